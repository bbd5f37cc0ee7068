import hashlib
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.training.corpus import Corpus, TextFile, files, folder, standard_library, xz_bits_per_byte
from regard.training.data import Batch, Packed
from regard.training.loss import IGNORED
from regard.training.text import Tokenizer, train_tokenizer


def write(root: Path, texts: dict[str, str | bytes]) -> Path:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def paths(part: tuple[TextFile, ...]) -> list[str]:
    return [file.path for file in part]


def assert_same(one: Batch, other: Batch) -> None:
    for name, left, right in zip(Batch._fields, one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def packed(documents: list[list[int]], context_length: int, **rest: int | float) -> Packed:
    return Packed(documents, context_length=context_length, vocab_size=101, **rest)  # type: ignore[arg-type]


def test_the_comparison_of_batches_fails_on_a_wrong_value() -> None:
    batch = packed([[5, 6], [7, 8, 9]], 3).batch(0, 2)
    for name in Batch._fields:
        with pytest.raises(AssertionError, match=name):
            assert_same(batch, batch._replace(**{name: getattr(batch, name) + 1}))


# --- which files -------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Corpus:
    return standard_library()


def test_the_standard_library_is_source_and_documentation_in_order(library: Corpus) -> None:
    every = paths(library.training) + paths(library.held_out)
    assert len(every) > 500
    assert {"json/decoder.py", "types.py", "inspect.py"} <= set(every)
    assert len(set(every)) == len(every)
    assert paths(library.training) == sorted(paths(library.training))
    assert paths(library.held_out) == sorted(paths(library.held_out))
    assert {Path(path).suffix for path in every} <= {".py", ".txt", ".rst"}
    assert not any("site-packages" in path or "__pycache__" in path or "\\" in path for path in every)


def test_about_a_twentieth_of_the_library_s_source_is_held_out_and_none_of_it_is_trained_on(library: Corpus) -> None:
    def is_source(path: str) -> bool:
        return not path.startswith(("test/", "encodings/")) and "/test" not in path and "/idle_test" not in path

    assert all(is_source(path) for path in paths(library.held_out))
    assert 0.02 < len(library.held_out) / sum(map(is_source, paths(library.training))) < 0.08
    trained = {file.text for file in library.training}
    assert len(trained) == len(library.training)
    assert not trained & {file.text for file in library.held_out}
    assert all(0 not in file.text.encode() for file in library.training + library.held_out)


def test_the_files_to_hold_out_are_the_same_everywhere(tmp_path: Path) -> None:
    # The rule by hand: the SHA-256 of the path, modulo 20, is 0.
    chosen = ["codecs.py", "encodings/cp775.py", "test/test_io.py", "traceback.py"]
    others = ["abc.py", "ast.py", "os.py"]
    for path in chosen + others:
        assert (int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20 == 0) == (path in chosen)
    root = write(tmp_path, {path: f"# {path}\n" for path in chosen + others})
    corpus = standard_library(root)
    # tests and tables of characters are trained on whatever their hash
    assert paths(corpus.held_out) == ["codecs.py", "traceback.py"]
    assert paths(corpus.training) == ["abc.py", "ast.py", "encodings/cp775.py", "os.py", "test/test_io.py"]
    # in a folder of one's own there is no such exception
    assert paths(folder(root, "**/*.py").held_out) == chosen
    # other files come and go: those that are here stay where they are
    write(tmp_path, {f"sub/more_{number}.py": f"{number}\n" for number in range(50)})
    (root / "abc.py").unlink()
    later = standard_library(root)
    assert {"codecs.py", "traceback.py"} <= set(paths(later.held_out))
    assert {"os.py", "ast.py"} <= set(paths(later.training))


def test_installed_packages_machine_files_and_broken_test_inputs_are_not_taken(tmp_path: Path) -> None:
    good = {"a.py": "a\n", "lib2to3/Grammar.txt": "grammar\n", "email/notes.rst": "notes\n", "test/test_a.py": "test\n"}
    bad = {
        "site-packages/p/a.py": "1\n",
        "sub/__pycache__/a.py": "2\n",
        "lib2to3/tests/data/bom.py": "3\n",
        "test/cjkencodings/hz.txt": "4\n",
        "test/tokenizedata/bad.py": "5\n",
        "test/numbers.txt": "6\n",
        "json/tests/numbers.txt": "7\n",
        "config-3.11-x86_64/python-config.py": "8\n",
        "_sysconfigdata__linux.py": "9\n",
        "sitecustomize.py": "10\n",
        "a.json": "11\n",
    }
    corpus = standard_library(write(tmp_path, {**good, **bad}))
    assert sorted(paths(corpus.training) + paths(corpus.held_out)) == sorted(good)
    assert corpus.skipped == {}


def test_source_is_decoded_as_python_would_and_what_cannot_be_is_skipped_with_its_reason(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "latin.py": b"# -*- coding: latin-1 -*-\r\nname = 'caf\xe9'\r\n",
            "marked.py": b"\xef\xbb\xbfname = 1\n",
            "not_utf8.py": b"name = 'caf\xe9'\n",
            "not_utf8_later.py": b"\n\n\nname = 'caf\xe9'\n",
            "no_such.py": b"# coding: uft-8\n",
            "nul.py": b"name = 1\0\n",
            "surrogate.py": b"# coding: utf-7\nname = '+2AA-'\n",
            "empty.py": b"\n",
        },
    )
    corpus = standard_library(tmp_path)
    texts = {file.path: file.text for file in corpus.training + corpus.held_out}
    assert texts == {"latin.py": "# -*- coding: latin-1 -*-\nname = 'café'\n", "marked.py": "name = 1\n"}
    assert set(corpus.skipped) == {
        "not_utf8.py",
        "not_utf8_later.py",
        "no_such.py",
        "nul.py",
        "surrogate.py",
        "empty.py",
    }
    assert "uft-8" in corpus.skipped["no_such.py"]
    assert "NUL" in corpus.skipped["nul.py"]


def test_a_library_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path.name}: expected texts, found none"):
        standard_library(tmp_path)


def test_something_is_left_to_train_on_where_every_file_would_be_held_out(tmp_path: Path) -> None:
    corpus = standard_library(write(tmp_path, {"codecs.py": "one\n", "traceback.py": "two\n"}))
    assert (len(corpus.training), len(corpus.held_out)) == (1, 1)


def test_of_files_with_the_same_text_only_the_first_is_kept(tmp_path: Path) -> None:
    # traceback.py would be held out, but is a copy of abc.py, which is trained on.
    text = "the same text\n"
    corpus = standard_library(
        write(tmp_path, {"traceback.py": text, "abc.py": text, "codecs.py": "x\n", "os.py": "y\n"})
    )
    assert paths(corpus.training) == ["abc.py", "os.py"]
    assert paths(corpus.held_out) == ["codecs.py"]
    assert corpus.skipped == {"traceback.py": "it has the same text as abc.py"}


def test_a_held_out_file_is_dropped_when_more_than_half_of_it_stands_in_training_files(tmp_path: Path) -> None:
    shared = "a line that two of these files have in common\n"  # 45 characters
    own = "a line that is to be found here and not else\n"  # 44 characters
    other = {"abc.py": shared + "and something more, not short\n", "os.py": "nothing of the kind in here\n"}
    dropped = standard_library(write(tmp_path / "1", {"codecs.py": "short\n" * 99 + shared + own, **other}))
    assert (paths(dropped.held_out), list(dropped.skipped)) == ([], ["codecs.py"])
    assert paths(dropped.training) == ["abc.py", "os.py"]
    kept = standard_library(write(tmp_path / "2", {"codecs.py": shared + "  " + own[:-1] + "..\n", **other}))
    assert (paths(kept.held_out), kept.skipped) == (["codecs.py"], {})


def test_a_folder_gives_every_file_with_text_or_those_that_match_and_says_what_was_skipped(tmp_path: Path) -> None:
    files = {"b.txt": "b\n", "sub/a.txt": "a\n", "c.md": "c\n", "NOTES": "d\n", "empty.txt": "", "p.txt": b"\x89PNG\0"}
    write(tmp_path, {**files, "latin.txt": "caf\xe9".encode("latin-1"), "copy.md": "c\n"})
    write(tmp_path, {".git/config": "text\n", ".hidden": "text\n", "node_modules/x.md": "text\n"})
    corpus = folder(tmp_path)
    # The hash of b.txt, modulo 20, is the smallest of those: it is held out, to have something to measure with.
    assert (paths(corpus.training), paths(corpus.held_out)) == (["NOTES", "c.md", "sub/a.txt"], ["b.txt"])
    assert set(corpus.skipped) == {"empty.txt", "p.txt", "latin.txt", "copy.md"}
    told = str(corpus)
    assert told.startswith("4 texts (2 .txt, 1 .md, 1 without an ending), 0.0 MB; 1 held out\nskipped: ")
    for words in ("1 binary", "1 empty", "1 not UTF-8", "1 the same as another"):
        assert words in told.split("skipped: ")[1]
    assert paths(folder(tmp_path, "*.md").training) == ["c.md"]


def test_the_folder_of_a_model_is_no_text_to_learn_from(tmp_path: Path) -> None:
    run = {"runs/mine/card.md": "# Model card\n", "runs/mine/tokenizer.json": "{}\n", "runs/mine/checks/a.md": "x\n"}
    write(tmp_path, {"a.md": "a\n", "b.md": "b\n", "runs/c.md": "c\n", **run, "runs/mine/progress.safetensors": b"\1"})
    for pattern in (None, "**/*.md"):
        corpus = folder(tmp_path, pattern)
        assert sorted(paths(corpus.training) + paths(corpus.held_out)) == ["a.md", "b.md", "runs/c.md"]


def test_a_text_of_more_than_sixteen_megabytes_can_be_learnt_from(tmp_path: Path) -> None:
    write(tmp_path, {"large.txt": "a line of text\n" * 1_200_000})
    for corpus in (folder(tmp_path), files([tmp_path / "large.txt"])):
        assert len(corpus.training[0].text) > 2**24


def test_a_folder_without_texts_is_refused_and_what_is_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone: expected a folder"):
        folder(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"expected texts, found none; the folder holds no file$"):
        folder(tmp_path)
    write(tmp_path, {"a.txt": b"\0"})
    with pytest.raises(ValueError, match=r"expected texts, found none, only:\n  a\.txt: .*NUL at byte 0"):
        folder(tmp_path)
    write(tmp_path, {"b.md": "b\n", "c/d.md": "d\n"})
    there = r"\*\.rst: expected texts, found none; the folder holds 2 \.md, 1 \.txt\n  hint: without a pattern"
    with pytest.raises(ValueError, match=there):
        folder(tmp_path, "*.rst")


def test_named_files_are_known_by_their_path_below_the_folder_they_share(tmp_path: Path) -> None:
    write(tmp_path, {"x/b.txt": "b\n", "y/a.txt": "a\n"})
    for order in (["x/b.txt", "y/a.txt"], ["y/a.txt", "x/../x/b.txt", "x/b.txt"]):
        corpus = files([tmp_path / path for path in order])
        assert sorted(paths(corpus.training) + paths(corpus.held_out)) == ["x/b.txt", "y/a.txt"]
        assert corpus.skipped == {}


def test_a_single_file_is_cut_in_two_at_the_end_of_a_line(tmp_path: Path) -> None:
    # 40 lines of 5 characters: a twentieth is the last two.
    text = "".join(f"{number:04}\n" for number in range(40))
    write(tmp_path, {"a.txt": text, "line.txt": "one line only, without an end"})
    corpus = files([tmp_path / "a.txt"])
    assert corpus.held_out == (TextFile("a.txt", "0038\n0039\n"),)
    assert corpus.training == (TextFile("a.txt", text[:-10]),)
    assert files([tmp_path / "line.txt"]).held_out == ()


def test_files_that_are_missing_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.txt: there is no such file"):
        files([tmp_path / "gone.txt"])
    for wrong in ([], "a.txt", tmp_path):
        with pytest.raises(ValueError, match="paths: expected a list of one file or more"):
            files(wrong)  # type: ignore[arg-type]


def test_the_digest_changes_with_every_text_path_and_part() -> None:
    a, b = TextFile("a", "text"), TextFile("b", "other")
    corpora = [
        Corpus((a, b), (), {}),
        Corpus((a,), (b,), {}),
        Corpus((a, TextFile("b", "othe")), (), {}),
        Corpus((TextFile("at", "ext"), b), (), {}),
    ]
    assert len({corpus.digest() for corpus in corpora}) == 4
    assert corpora[0].digest() == Corpus((a, b), (), {"c": "it is empty"}).digest()


# --- the yardstick -----------------------------------------------------------


def test_xz_needs_eight_bits_for_a_random_byte_and_few_for_a_repeated_one() -> None:
    # Letters drawn from 16 carry 4 bits each; é is two bytes of UTF-8, so half as many per byte.
    letters = "".join(random.Random(0).choices("abcdefghijklmnop", k=300_000))
    assert 4 < (once := xz_bits_per_byte([letters])) < 4.5
    # at its strongest it looks back far enough to find all of them again
    assert xz_bits_per_byte([letters, letters]) == pytest.approx(once / 2, rel=0.01)
    assert xz_bits_per_byte(["é" * 10_000, "é" * 10_000]) == xz_bits_per_byte(["é" * 20_000]) < 0.1
    with pytest.raises(ValueError, match="texts: expected some text"):
        xz_bits_per_byte(iter([]))


# --- rows --------------------------------------------------------------------


def test_once_gives_every_token_as_a_target_once_in_order() -> None:
    # ring: 0 5 6 0 7 8 9, cut into rows of 3; the last one is filled up.
    batches = list(packed([[5, 6], [7, 8, 9]], 3).once(2))
    assert [batch.tokens.tolist() for batch in batches] == [[[0, 5, 6], [0, 7, 8]], [[9, 0, 0]]]
    assert [batch.targets.tolist() for batch in batches] == [[[5, 6, 0], [7, 8, 9]], [[0, IGNORED, IGNORED]]]
    assert [batch.documents.tolist() for batch in batches] == [[[0, 0, 0], [0, 0, 0]], [[0, 1, 1]]]
    for batch in batches:
        assert [part.dtype for part in batch] == [torch.int64, torch.int64, torch.int32]


def test_a_row_that_meets_the_next_document_numbers_it_anew() -> None:
    (batch,) = packed([[5, 6], [], [7, 8, 9]], 5).once(2)
    assert batch.tokens.tolist() == [[0, 5, 6, 0, 7], [8, 9, 0, 0, 0]]
    assert batch.targets.tolist() == [[5, 6, 0, 7, 8], [9, 0, IGNORED, IGNORED, IGNORED]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


def test_an_epoch_is_the_ring_of_documents_cut_at_an_offset() -> None:
    # One document: the ring is 0 1 2 3 4. Rows of two targets, so two ways to cut it, each three rows.
    at_0 = {((0, 1), (1, 2), (0, 0)), ((2, 3), (3, 4), (0, 0)), ((4, 0), (0, 1), (0, 1))}
    at_1 = {((1, 2), (2, 3), (0, 0)), ((3, 4), (4, 0), (0, 0)), ((0, 1), (1, 2), (0, 0))}
    data = packed([[1, 2, 3, 4]], 2)
    assert (data.size, data.rows) == (5, 3)
    epochs = []
    for epoch in range(20):
        batch = data.batch(3 * epoch, 3)
        epochs.append([tuple(tuple(part[row].tolist()) for part in batch) for row in range(3)])
    assert {frozenset(epoch) for epoch in epochs} == {frozenset(at_0), frozenset(at_1)}
    assert len({tuple(epoch) for epoch in epochs}) > 4  # the rows' order varies as well


def test_a_text_shorter_than_a_row_goes_round_as_another_document_each_time() -> None:
    data = packed([[1, 2]], 7)
    assert data.rows == 1
    seen = set()
    for epoch in range(30):
        batch = data.batch(epoch, 1)
        seen.add(
            (tuple(batch.tokens[0].tolist()), tuple(batch.targets[0].tolist()), tuple(batch.documents[0].tolist()))
        )
    assert seen == {
        ((0, 1, 2, 0, 1, 2, 0), (1, 2, 0, 1, 2, 0, 1), (0, 0, 0, 1, 1, 1, 2)),
        ((1, 2, 0, 1, 2, 0, 1), (2, 0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 1, 2, 2)),
        ((2, 0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 1, 2, 0), (0, 1, 1, 1, 2, 2, 2)),
    }


some_documents = st.lists(st.lists(st.integers(1, 100), max_size=13), min_size=1, max_size=7).filter(any)


@given(some_documents, st.integers(1, 11), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_document_whole_and_every_token_as_a_target(
    documents: list[list[int]], context_length: int, seed: int, epoch: int
) -> None:
    data = packed(documents, context_length, seed=seed)
    batch = data.batch(epoch * data.rows, data.rows)
    tokens, targets, numbers = batch
    assert tokens.shape == targets.shape == numbers.shape == (data.rows, context_length)
    # a target is the next token, and a new document begins at <|end|> and nowhere else
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    opened = (tokens == 0).int().cumsum(1)
    assert torch.equal(numbers, (opened - opened[:, :1]).int())
    # every token is a target, and the few that are so twice fill up the last row
    taken = Counter(targets.flatten().tolist())
    whole = Counter(token for document in documents if document for token in [0, *document])
    assert taken >= whole
    assert data.size == whole.total()
    assert taken.total() - whole.total() == data.rows * context_length - data.size < context_length


def test_documents_change_their_order_from_epoch_to_epoch_but_not_their_inside() -> None:
    documents = [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42], [50, 51, 52]]
    data = packed(documents, 20)
    assert data.rows == 1
    orders = set()
    for epoch in range(12):
        row = data.batch(epoch, 1).tokens[0].tolist()
        start = row.index(0)
        row = row[start:] + row[:start]
        inside = [row[place + 1 : place + 4] for place in range(0, 20, 4)]
        assert sorted(inside) == documents
        orders.add(tuple(first for first, _, _ in inside))
    assert len(orders) > 8


def test_the_digest_of_rows_changes_with_every_token_and_every_border() -> None:
    some = [packed(d, 3).digest() for d in ([[5, 6], [7]], [[5, 6], [8]], [[5], [6, 7]], [[7], [5, 6]])]
    assert len(set(some)) == 4
    assert packed([[5, 6], [7]], 4, seed=2).digest() == some[0]


@given(some_documents, st.integers(1, 11), st.integers(1, 5), st.integers(0, 40), st.sampled_from([0.0, 0.3, 1.0]))
def test_a_run_taken_up_again_sees_the_batches_of_one_that_was_never_stopped(
    documents: list[list[int]], context_length: int, batch_size: int, steps: int, repeats: float
) -> None:
    whole = packed(documents, context_length, seed=3, repeats=repeats).batches(batch_size)
    again = packed(documents, context_length, seed=3, repeats=repeats).batches(batch_size, position=steps * batch_size)
    for one, other in zip(islice(whole, steps, steps + 5), again, strict=False):
        assert_same(one, other)


def test_a_batch_does_not_depend_on_the_one_asked_for_before() -> None:
    data = packed([[5, 6], [7, 8, 9]], 3)
    first, far = data.batch(0, 7), data.batch(1009, 7)
    assert_same(data.batch(0, 7), first)
    assert_same(data.batch(1009, 7), far)


def test_another_seed_gives_other_rows() -> None:
    documents = [list(range(1 + 7 * n, 8 + 7 * n)) for n in range(11)]
    one, same, other = (packed(documents, 5, seed=seed, repeats=0.5).batch(0, 13) for seed in (1, 1, 2))
    assert_same(one, same)
    assert not torch.equal(one.tokens[::2], other.tokens[::2])  # texts
    assert not torch.equal(one.tokens[1::2], other.tokens[1::2])  # repeats


# --- repeats -----------------------------------------------------------------


def period(row: Tensor) -> int:
    """The smallest number of places by which the row can be moved onto itself."""
    return next(n for n in range(1, len(row)) if torch.equal(row[n:], row[:-n]))


def test_repeated_rows_are_random_tokens_again_and_again_as_one_document() -> None:
    tokens, targets, documents = packed([[5, 6]], 96, end_id=7, repeats=1.0).batch(0, 400)
    rows = torch.cat([tokens, targets[:, -1:]], dim=1)
    assert torch.equal(targets, rows[:, 1:])
    assert not documents.any()
    periods = [period(row) for row in rows]
    assert set(periods) == set(range(16, 49))  # half of 97, rounded down
    # every token of the vocabulary but <|end|>, each about as often: 100 of them in 400 * 32 draws
    drawn = torch.cat([row[:n] for row, n in zip(rows, periods, strict=True)]).bincount(minlength=101)
    assert drawn[7] == 0
    others = torch.cat([drawn[:7], drawn[8:]])
    assert len(others) == 100
    assert others.min() > 0.6 * others.float().mean()
    assert others.max() < 1.4 * others.float().mean()


@pytest.mark.parametrize(("repeats", "places"), [(0.0, []), (0.25, [3, 7, 11]), (0.4, [2, 4, 7, 9]), (1.0, range(12))])
def test_the_share_of_repeats_is_spread_evenly(repeats: float, places: list[int]) -> None:
    # The text consists of token 5 and <|end|> 0; in a repeat of 32 tokens or more other tokens must occur.
    batch = packed([[5] * 500], 64, repeats=repeats).batch(0, 12)
    other = ((batch.tokens != 5) & (batch.tokens != 0)).any(dim=1)
    assert other.nonzero().flatten().tolist() == list(places)


def test_a_row_too_short_for_sixteen_tokens_is_repeated_from_its_half() -> None:
    batch = packed([[5, 6]], 10, repeats=1.0).batch(0, 20)
    assert {period(torch.cat([row, last])) for row, last in zip(batch.tokens, batch.targets[:, -1:], strict=True)} <= {
        5
    }


# --- from texts --------------------------------------------------------------


def test_texts_are_encoded_in_order_and_the_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(train_tokenizer(["the cat, the hat"], vocab_size=263))
    texts = ["the cat", "", "<|end|>", "the hat " * 5, "x"]
    monkeypatch.setattr("regard.training.data.ENCODED_AT_ONCE", 12)
    told: list[tuple[int, int]] = []
    data = Packed.from_texts(
        texts, tokenizer, context_length=5, seed=2, repeats=0.5, progress=lambda done, all_: told.append((done, all_))
    )
    by_hand = Packed(
        [tokenizer.encode(text) for text in texts], context_length=5, vocab_size=263, end_id=0, seed=2, repeats=0.5
    )
    assert_same(data.batch(0, 17), by_hand.batch(0, 17))
    assert told == [(2, 5), (3, 5), (4, 5), (5, 5)]


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "changed", "message"),
    [
        ([[5]], {"context_length": 0}, "context_length: expected at least 1, got 0"),
        ([[5]], {"end_id": 101}, "end_id: expected a token from 0 to 100, got 101"),
        ([[5]], {"repeats": 1.5}, "repeats: expected a share from 0 to 1, got 1.5"),
        ([[5]], {"repeats": float("nan")}, "repeats: expected a share from 0 to 1, got nan"),
        ([[0]], {"vocab_size": 1, "repeats": 0.1}, "repeats: expected a token besides"),
        ([[5], [6, 101]], {}, "documents: expected tokens from 0 to 100, .*got 6 to 101 in document 1"),
        ([[5], [6, -1]], {}, "documents: expected tokens from 0 to 100, .*got -1 to 6 in document 1"),
        ([[5], [6, 0]], {}, r"without <\|end\|> \(0\), got 0 to 6 in document 1"),
        ([], {}, "documents: expected at least one with a token"),
        ([[], []], {}, "documents: expected at least one with a token"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    documents: list[list[int]], changed: dict[str, int | float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Packed(documents, **{"context_length": 3, "vocab_size": 101, **changed})  # type: ignore[arg-type]


def test_a_place_or_a_size_that_makes_no_sense_is_refused() -> None:
    data = packed([[5, 6]], 3)
    with pytest.raises(ValueError, match="position: expected at least 0, got -1"):
        data.batch(-1, 2)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        data.batch(0, 0)
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        next(data.once(0))

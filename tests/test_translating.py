"""Pairs of texts: read from tables, batched, learned, gone on with."""

import csv
import io
import json
import random
from pathlib import Path

import pytest
import torch

from regard import EncoderDecoder, ModelConfig, load
from regard.training.checkpoint import read, save_model
from regard.training.loss import IGNORED
from regard.training.pairs import Pairs
from regard.training.report import Listener
from regard.training.run import begin, resume
from regard.training.settings import Recipe
from regard.training.table import Table, read_table
from regard.training.text import CHARACTERS, Tokenizer, train_tokenizer
from regard.training.translating import exactness, split, translate_texts

SMALL = {"dim": 32, "layers": 1, "heads": 2, "context_length": 24, "batch_size": 64, "precision": "no", "threads": 1}


# --- tables -----------------------------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_the_same_rows_are_read_from_csv_tsv_and_jsonl(tmp_path):
    rows = [("3. März", "03-03"), ('a "quoted" word, and a comma', "x"), ("two", "deux")]
    quoted = "".join(f'"{a.replace(chr(34), 2 * chr(34))}",{b},7\r\n' for a, b in rows)
    files = {
        "a.csv": f"\ufefffrom,to,number\r\n{quoted}\r\n,blank,1\r\n",
        "a.tsv": "from\tto\tnumber\n" + "".join(f"{a}\t{b}\t7\n" for a, b in rows) + "\tblank\t1\n",
        "a.jsonl": "".join(json.dumps({"number": 7, "from": a, "to": b}) + "\n" for a, b in [*rows, ("", "blank")]),
    }
    for name, text in files.items():
        found = read_table(written(tmp_path, name, text), ["from", "to"])
        assert found == Table(("from", "to"), rows, 1), name
        assert read_table(tmp_path / name, ["to", "from"]).rows == [(b, a) for a, b in rows]
    assert read_table(tmp_path / "a.csv", [None, None]).columns == ("from", "to")
    assert read_table(tmp_path / "a.csv", [None, "from"]).columns == ("to", "from")


def as_tsv(rows, quoting):
    """Rows below their names, as a program writes them; as they are where `quoting` is None."""
    if quoting is None:
        return "".join(f"{a}\t{b}\n" for a, b in [("from", "to"), *rows])
    text = io.StringIO()
    csv.writer(text, delimiter="\t", quoting=quoting).writerows([("from", "to"), *rows])
    return text.getvalue()


QUOTED = [
    [('"Yes", she said', "a"), ("plain", "b")],
    [("two\nlines", "a"), ('a "word"', "b")],
    [("a\ttab", "a"), ('"all of it"', "b")],
    [('"', "a"), ("'", "b")],
]
AS_THEY_ARE = [
    [('"open', "a"), ('close"', "b")],
    [('"Yes" she said', "a"), ('"all of it"', "b")],
    [('"all of it"', "a"), ("plain", '"')],
    [('6" by 8""', "a"), ('""', "b")],
]


@pytest.mark.parametrize(
    ("rows", "quoting"),
    [
        *((rows, way) for rows in QUOTED for way in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)),
        *((rows, None) for rows in AS_THEY_ARE),
    ],
)
def test_fields_apart_by_tabs_are_read_without_the_quotes_of_a_program_and_with_their_own(rows, quoting, tmp_path):
    assert read_table(written(tmp_path, "a.tsv", as_tsv(rows, quoting)), [None, None]).rows == rows


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "from,to\n", "expected rows with from and to, found none below the names of the columns"),
        ("a.csv", "from,to\n1,\n,2\n", "found none, 2 with a blank from or to"),
        ("a.csv", "from\n1\n", "expected 2 columns or more, the file has from"),
        ("a.csv", "from,from\n1,2\n", "expected each column once, got from twice"),
        ("a.csv", "from,to\n1,2\n1,2,3\n", "row 3 has 3 fields, more than the 2 that are named: from, to"),
        ("a.csv", 'from,to\n1,"2\n', "line 2 is no CSV"),
        ("a.jsonl", '{"from": 1', "line 1 is no JSON"),
        ("a.jsonl", '{"from": 1}\n[2]\n', "line 2: expected an object with names and texts"),
        ("a.txt", "from,to\n1,2\n", "expected a table, a file in .csv, .tsv, .jsonl, got .txt"),
    ],
)
def test_a_table_that_cannot_be_read_is_named_with_its_line(name, text, says, tmp_path):
    path = written(tmp_path, name, text)
    with pytest.raises(ValueError, match=f"{path}: .*{says}"):
        read_table(path, [None, None])


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(ValueError, match=r"expected a column 'target', the file has from, to"):
        read_table(written(tmp_path, "a.csv", "from,to\n1,2\n"), [None, "target"])


# --- pairs ------------------------------------------------------------------------------------------------------------


def some_pairs(count=37, seed=1):
    draw = random.Random(seed)
    return [
        ([draw.randrange(1, 9) for _ in range(draw.randrange(1, 9))], [draw.randrange(1, 9) for _ in range(n % 5 + 1)])
        for n in range(count)
    ]


def test_every_epoch_has_every_pair_and_the_batches_follow_from_seed_and_place_alone():
    pairs = some_pairs()
    data, again = Pairs(pairs, seed=3), Pairs(pairs, seed=3)
    seen: list[list[tuple[int, ...]]] = []
    for epoch in range(2):
        seen.append([])
        for number in range(5):
            batch = data.batch(40 * epoch + 8 * number, 8)
            for source, length in zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True):
                assert source[length:] == [0] * (len(source) - length)
                seen[-1].append(tuple(source[1:length]))
        assert {*seen[-1]} == {tuple(source) for source, _ in pairs}
        assert len(seen[-1]) == 40
    assert seen[0] != seen[1]
    for place in (48, 0, 72):
        for one, other in zip(data.batch(place, 8), again.batch(place, 8), strict=True):
            assert torch.equal(one, other)
    assert data.digest() == again.digest() != Pairs(some_pairs(seed=2)).digest()
    assert not torch.equal(data.batch(0, 8).source_lengths, Pairs(pairs, seed=4).batch(0, 8).source_lengths)


def test_a_batch_holds_pairs_of_about_the_same_length():
    data = Pairs(some_pairs(400))
    batches = [data.batch(8 * number, 8) for number in range(50)]
    lengths = [batch.source_lengths + (batch.wanted != IGNORED).sum(1) for batch in batches]
    spread = [float(of_batch.max() - of_batch.min()) for of_batch in lengths]
    everything = torch.cat(lengths)
    assert everything.max() - everything.min() >= 10
    assert sum(spread) / len(spread) < 1
    assert len({float(of_batch[0]) for of_batch in lengths[:10]}) > 3  # and batches of all lengths come mixed


def test_the_loss_of_a_batch_is_that_of_its_pairs_one_by_one():
    torch.manual_seed(0)
    model = EncoderDecoder(ModelConfig(vocab_size=9, context_length=12, dim=12, layers=2, heads=2)).double()
    batch = Pairs(some_pairs()).batch(0, 8)
    total, count = 0.0, 0
    for source, length, target, wanted in zip(*batch, strict=True):
        kept = wanted != IGNORED
        logs = model(source[None, :length], target[None, : int(kept.sum())])[0].log_softmax(-1)
        total -= float(logs.gather(1, wanted[kept, None]).sum().detach())
        count += int(kept.sum())
    assert float(Pairs(some_pairs()).loss(model, batch).detach()) == pytest.approx(total / count, rel=1e-5)
    assert Pairs(some_pairs()).tokens(batch) == count + int(batch.source_lengths.sum())


def test_a_held_out_target_is_never_trained_on_and_pairs_are_kept_once():
    rows = [(f"{n} {way}", f"target {n}") for n in range(100) for way in "abca"]
    training, held_out = split(Table(("a", "b"), rows, 0))
    assert not {target for _, target in training} & {target for _, target in held_out}
    assert len(training) + len(held_out) == 300
    assert 1 <= len({target for _, target in held_out}) <= 15
    assert len(split(Table(("a", "b"), [("1", "x"), ("2", "y")], 0))[1]) == 1
    with pytest.raises(ValueError, match="expected two different targets or more, got 'x' alone"):
        split(Table(("a", "b"), [("1", "x"), ("2", "x")], 0))


# --- a run ------------------------------------------------------------------------------------------------------------


class Told(Listener):
    def __init__(self, stop_at: int | None = None) -> None:
        self.notes: list[str] = []
        self.stop_at = stop_at

    def note(self, text):
        self.notes.append(text)

    def step(self, report, settings):
        if report.step == self.stop_at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """Numbers in letters, and in digits."""
    draw = random.Random(0)
    numbers = [f"{draw.randrange(1000):03}" for _ in range(900)]
    lines = ["".join("abcdefghij"[int(digit)] for digit in number) + f",{number}" for number in numbers]
    return written(
        tmp_path_factory.mktemp("pairs"), "pairs.csv", "\n".join(["letters,digits", *lines, "long" * 9 + ",1"])
    )


def test_a_run_on_pairs_learns_them_and_goes_on_where_it_stopped_bit_for_bit(table, tmp_path):
    recipe = Recipe.of("translate", data=str(table), steps=100, learning_rate=0.02, **SMALL)
    whole, told = tmp_path / "whole", Told()
    measured = begin(whole, recipe, listener=told)
    assert measured.exact >= 0.8 * measured.pairs > 0
    assert any("1 pairs are longer than 24 tokens and are not trained on" in note for note in told.notes)
    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        begin(parts, recipe, listener=Told(stop_at=63))
    assert resume(parts).exact == measured.exact
    for name, tensor in read(whole / "progress.safetensors")[1].items():
        assert torch.equal(tensor, read(parts / "progress.safetensors")[1][name]), name
    card = (whole / "card.md").read_text()
    assert f"{measured.exact:,} of {measured.pairs:,}" in card
    assert "Encoder-decoder of" in card

    loaded = load(whole)
    assert isinstance(loaded.model, EncoderDecoder)
    ((best, *_),) = translate_texts(loaded.model, loaded.tokenizer, ["cde"], beams=3)
    assert (best.text, best.ended) == ("234", True)
    assert 0.5 < best.probability <= 1
    with pytest.raises(ValueError, match=r"'aaaa.*': 31 tokens are more than the 24 that the model can read"):
        translate_texts(loaded.model, loaded.tokenizer, ["a" * 30])


def test_what_cannot_be_trained_on_is_said_before_anything_is_written(table, tmp_path):
    for given, says in (
        ({}, "--data: expected a table of pairs"),
        ({"data": str(table), "target": "words"}, "expected a column 'words', the file has letters, digits"),
        ({"data": str(table), "start_from": "stdlib"}, "--from: stdlib is a model of another kind: decoder"),
        ({"data": str(table), "context_length": 2}, "no pair fits into 2 tokens"),
    ):
        with pytest.raises(ValueError, match=says):
            begin(tmp_path / "run", Recipe.of("translate", **{**SMALL, **given}))
        assert not (tmp_path / "run" / "progress.safetensors").exists()
    with pytest.raises(ValueError, match="task must be one of text, translate, masked, classify, got 'dance'"):
        Recipe.of("dance")


def test_a_vocabulary_of_characters_has_a_token_for_each_and_bytes_for_the_others():
    tokenizer = Tokenizer(train_tokenizer(["März, März"] * 3, 300, split=CHARACTERS))
    assert tokenizer.pieces(tokenizer.encode("März")) == ["M", "ä", "r", "z"]
    assert len(tokenizer.encode("日")) == 3
    assert tokenizer.decode(tokenizer.encode("日 März")) == "日 März"


def test_exactness_counts_and_shows_what_is_wrong(tmp_path):
    torch.manual_seed(0)
    tokenizer = Tokenizer(train_tokenizer(["ab"], 259, split=CHARACTERS))
    model = EncoderDecoder(ModelConfig(vocab_size=tokenizer.vocab_size, context_length=8, dim=8, layers=1, heads=2))
    right = translate_texts(model, tokenizer, ["a"])[0][0].text
    told = []
    found = exactness(model, tokenizer, [("a", right), ("b", "no")], lambda *done: told.append(done))
    assert (found.pairs, found.exact) == (2, 1)
    assert [(wrong.source, wrong.target) for wrong in found.mistakes] == [("b", "no")]
    assert told == [(2, 2)]
    assert "1 of 2 translated exactly, 50.00%" in str(found)


def test_an_encoder_decoder_is_stored_once_where_weights_are_shared_and_comes_back_as_it_was(tmp_path):
    for tied in (True, False):
        model = EncoderDecoder(
            ModelConfig(vocab_size=300, context_length=8, dim=8, layers=1, heads=2, tied=tied)
        ).eval()
        save_model(tmp_path / str(tied), model)
        Tokenizer(train_tokenizer(["ab"], 258)).save(tmp_path / str(tied) / "tokenizer.json")
        again = load(tmp_path / str(tied)).model
        tokens = torch.tensor([[1, 2, 3]])
        assert torch.equal(again(tokens, tokens), model(tokens, tokens))
        assert again.encoder.embedding.weight is again.decoder.embedding.weight
        stored = read(tmp_path / str(tied) / "model.safetensors")[1]
        assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in model.parameters())

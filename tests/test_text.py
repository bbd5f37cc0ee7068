import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.extras import how
from regard.training.text import END, Tokenizer, read_text, train_tokenizer

CODE = [
    "def tokens(self, path):\n    for line in path:\n        yield self.tokens(line)\n\n    return None\n",
    "class Path:\n    def tokens(self):\n        return [self.path, self.line]\n",
] * 3

# Any string that UTF-8 can hold: the lone surrogates (Cs) are the only characters it cannot.
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(CODE, vocab_size=311))


# --- read_text ---------------------------------------------------------------


def test_a_text_is_read_with_newlines_alone_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n caf\xc3\xa9")
    assert read_text(file) == "one\ntwo\nthree\n café"
    assert read_text(str(file)) == read_text(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf", "the file is empty"),
        ("caf\xe9".encode("utf-16"), "expected UTF-8, got UTF-16\n  hint: save the file as UTF-8"),
        (b"PK\x03\x04\x00", "got NUL at byte 4"),
        (b"caf\xe9 noir", "expected UTF-8, got 0xe9 at byte 3 "),
        (b"\xef\xbb\xbfcaf\xe9 noir", "expected UTF-8, got 0xe9 at byte 6 "),
        (b"cut \xf0\x9f\x98", "expected UTF-8, got 0xf0 at byte 4 "),
    ],
)
def test_a_file_that_is_not_text_is_refused_with_its_name_and_the_place(
    tmp_path: Path, data: bytes, message: str
) -> None:
    file = tmp_path / "strange.bin"
    file.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_text(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.txt: there is no such file"):
        read_text(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=f"{tmp_path.name}: expected a text file, got a folder"):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_text("a file is no folder")
    with pytest.raises(ValueError, match=r"b\.txt: cannot be read: "):
        read_text(tmp_path / "a.txt" / "b.txt")


def test_a_file_may_have_the_limit_and_not_a_byte_more(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 1009)
    assert read_text(file, largest=1009) == "x" * 1009
    file.write_text("x" * 2003)
    with pytest.raises(ValueError, match=r"a\.txt: expected at most 1,009 bytes, got 2,003"):
        read_text(file, largest=1009)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a file without an end")
def test_a_file_without_an_end_is_refused_too() -> None:
    with pytest.raises(ValueError, match="/dev/zero: expected at most 1,009 bytes"):
        read_text("/dev/zero", largest=1009)


# --- training ----------------------------------------------------------------


def test_the_vocabulary_is_the_end_then_the_bytes_then_the_pairs_by_frequency() -> None:
    # "aaab" twice: aa occurs 4 times (aligned or not) and is merged first; then aa+a and a+b come twice each.
    model = train_tokenizer(["aaab aaab"], vocab_size=258)
    assert model.get_vocab_size() == 258
    assert model.token_to_id(END) == 0
    tokenizer = Tokenizer(model)
    assert tokenizer.pieces([257]) == ["aa"]
    assert sorted(tokenizer._bytes[1:257]) == [bytes([byte]) for byte in range(256)]


def test_the_same_texts_give_the_same_tokenizer() -> None:
    assert train_tokenizer(CODE, 311).to_str() == train_tokenizer(iter(CODE), 311).to_str()


def test_a_newline_and_its_indentation_are_kept_in_one_piece(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def tokens(self):\n        return self.path\n")
    assert tokenizer.pieces(ids) == ["def", " tokens", "(self", "):\\n        ", "return", " self", ".path", "\\n"]


def test_text_is_split_into_words_numbers_punctuation_and_line_ends(tokenizer: Tokenizer) -> None:
    text = "if  x.y == 3_141:\n\n    # it's\n\tdef f2(\n)  \n end\n"
    splits = [text[start:stop] for _, (start, stop) in tokenizer.model.pre_tokenizer.pre_tokenize_str(text)]
    assert splits == [
        *["if", " ", " x", ".y", " ==", " ", "3", "_", "141", ":\n\n    ", "#", " it", "'s", "\n\t"],
        *["def", " f", "2", "(\n", ")  \n ", "end", "\n"],
    ]


def test_a_vocabulary_that_cannot_hold_every_byte_is_refused() -> None:
    assert train_tokenizer([], 257).get_vocab_size() == 257
    with pytest.raises(ValueError, match=r"vocab_size: expected at least 257 .*, got 256"):
        train_tokenizer(CODE, 256)


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError) as caught:
        train_tokenizer(CODE)
    assert str(caught.value) == f"a tokenizer needs tokenizers: {how('cli')}"


# --- encoding and decoding ---------------------------------------------------


@given(any_text)
def test_every_text_comes_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  ",
        "\n",
        "\n\n  \n",
        "\t x\r\n",
        "\0\x1b\x7f",
        "\ufeff",
        "e\u0301",
        "👩‍👩‍👧",
        "\U0010ffff",
        "x   ",
        "   x",
    ],
)
def test_lone_spaces_controls_and_composed_letters_come_back_unchanged(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_spells_the_end_is_encoded_as_plain_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = f"a{END}b {END}"
    tokenizer.save(tmp_path / "tokenizer.json")
    for one in (tokenizer, Tokenizer.load(tmp_path / "tokenizer.json")):
        ids = one.encode(text)
        assert one.end_id == 0
        assert one.end_id not in ids
        assert one.decode(ids) == text
        assert "".join(one.pieces(ids)) == text
    assert tokenizer.decode([tokenizer.end_id]) == END


@given(st.lists(any_text, max_size=5))
def test_a_batch_is_encoded_as_each_text_alone(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_what_is_no_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TypeError, match="text: expected str, got bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at character 2"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize("number", [-1, 311])
def test_a_number_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, number: int) -> None:
    assert tokenizer.vocab_size == 311
    for method in (tokenizer.decode, tokenizer.pieces):
        with pytest.raises(ValueError, match=f"ids: expected token numbers from 0 to 310, got {number}"):
            method([0, number])


def test_half_a_character_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"


# --- pieces and spans --------------------------------------------------------


def test_pieces_show_spaces_as_they_are_and_the_rest_readably(tokenizer: Tokenizer) -> None:
    assert tokenizer.pieces(tokenizer.encode(" path\n\té\x00")) == [" path", "\\n", "\\t", "\\xc3", "\\xa9", "\\x00"]
    assert tokenizer.pieces([0]) == [END]


@given(any_text)
def test_pieces_fit_on_one_line_and_are_printable(tokenizer: Tokenizer, text: str) -> None:
    assert all(piece and piece.isprintable() for piece in tokenizer.pieces(tokenizer.encode(text)))


def test_spans_count_characters_and_share_a_cut_one(tokenizer: Tokenizer) -> None:
    # é is two bytes, 😀 four, none of them merged: every byte's token spans the whole character.
    assert tokenizer.pieces(tokenizer.encode(" path é😀x"))[0] == " path"
    assert tokenizer.spans(" path é😀x") == [(0, 5), (5, 6), (6, 7), (6, 7), *[(7, 8)] * 4, (8, 9)]
    assert tokenizer.spans("") == []


@given(any_text | st.text("é😀 \npath(self)", min_size=1))
def test_spans_are_where_the_bytes_of_the_tokens_stand(tokenizer: Tokenizer, text: str) -> None:
    character_of = [number for number, letter in enumerate(text) for _ in letter.encode()]
    expected, start = [], 0
    for token in tokenizer.encode(text):
        stop = start + len(tokenizer._bytes[token])
        expected.append((character_of[start], character_of[stop - 1] + 1))
        start = stop
    assert tokenizer.spans(text) == expected
    assert start == len(text.encode())


# --- saving ------------------------------------------------------------------


def test_a_saved_tokenizer_comes_back_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.end_id) == (311, 0)
    assert loaded.encode(CODE[0]) == tokenizer.encode(CODE[0])
    assert loaded.model.to_str() == tokenizer.model.to_str()


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"version": "1.0", "model": {"type": "none"}}'])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: "):
        Tokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"gone\.json: there is no such file"):
        Tokenizer.load(tmp_path / "gone.json")


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    import tokenizers

    with pytest.raises(ValueError, match="model: expected a byte-level tokenizer"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    with pytest.raises(ValueError, match=r"model: expected a tokenizer with the token <\|end\|>"):
        Tokenizer(byte_level)

"""Reading text files, and the tokenizer.

A language model reads integers. The tokenizer that makes them here is byte-level byte-pair encoding [1, 2]: start from
the 256 bytes of UTF-8, then, again and again, give the most frequent pair of neighbours a token of its own, until the
vocabulary is full. Because every byte is a token to begin with, no text is ever unknown and nothing is lost:
`decode(encode(text)) == text` holds for every string.

Pairs never grow across the pieces that a regular expression cuts first. Those of `SPLIT` suit source code, where much
of the text is punctuation and indentation: a newline stays together with the indentation that follows it and with the
punctuation before it (`):\\n        ` can be one token), and a word takes along one mark before it (`.path`, `(self`,
` name`).

One token stands for no text: `<|end|>`, number 0, which separates documents. It can only be put in by number. A text
that happens to contain the seven characters `<|end|>` is encoded like any other text, so no text can forge an end.

References:
    [1] Gage, "A New Algorithm for Data Compression", 1994.
    [2] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.2.
"""

import codecs
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from regard.extras import need
from regard.storage import replacing
from regard.training.settings import LARGEST_VOCABULARY

if TYPE_CHECKING:
    import tokenizers

END = "<|end|>"

MAX_TEXT_BYTES = 16 * 2**20
"""Bytes of the largest file that `read_text` takes by default: more than a book, less than most wrong files."""

# 3.55 bytes per token on the held-out files of Python 3.11's standard library, with 4,096 tokens learnt from the rest.
# GPT-2's split gives 3.37 there, GPT-4's 3.39, and this one, were punctuation kept apart from the line's end, 3.43.
SPLIT = (
    r"[^\n\p{L}\p{N}]?\p{L}+"  # a word, with the one mark or space before it
    r"|\p{N}+"
    r"| ?[^\s\p{L}\p{N}]+(?:\s*\n[ \t]*)?"  # punctuation, with the line's end and the next line's indentation
    r"|\s*\n[ \t]*"
    r"|\s+(?!\S)|\s+"  # other space: its last character is left to the word that follows
)

CHARACTERS = r"[\s\S]"
"""Splits a text into its characters: each that is frequent enough is a token, any other the bytes of its UTF-8."""


def read_text(path: str | PathLike[str], *, largest: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file, its line ends made newlines, as in Python's text mode, and without a byte-order mark.

    Args:
        path: the file.
        largest: the most bytes the file may have.

    Raises:
        ValueError: the file is missing, a folder, unreadable, empty, too large or not text; the message names the path.

    >>> read_text("no/such/file.txt")
    Traceback (most recent call last):
        ...
    ValueError: no/such/file.txt: there is no such file
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise ValueError(f"{path}: expected a text file, got a folder")
        size = file.stat().st_size
        with file.open("rb") as stream:
            data = stream.read(largest + 1)  # a pipe or a device tells no size, and may have no end
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > largest:
        raise ValueError(
            f"{path}: expected at most {largest:,} bytes, got {max(size, len(data)):,}\n  hint: split the file"
        )
    text = as_text(str(path), data)
    if not text:
        raise ValueError(f"{path}: the file is empty")
    return text


def as_text(name: str, data: bytes) -> str:
    """UTF-8 as text, its line ends made newlines and without a byte-order mark; `name` is what an error calls it.

    >>> as_text("notes", b"one\\r\\ntwo")
    'one\\ntwo'
    """
    hint = "save the file as UTF-8"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name}: expected UTF-8, got UTF-16\n  hint: {hint}")
    if (nul := data.find(0)) >= 0:
        raise ValueError(f"{name}: expected text, got NUL at byte {nul:,}\n  hint: this looks like a binary file")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8, got 0x{data[error.start]:02x} at byte {error.start:,} ({error.reason})\n"
            f"  hint: {hint}"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096, *, split: str = SPLIT) -> "tokenizers.Tokenizer":
    """Learn a byte-level byte-pair encoding from texts.

    The same texts give the same tokenizer. Token 0 is `<|end|>`, 1 to 256 are the bytes, then the pairs by rank.

    Args:
        texts: what to learn from.
        vocab_size: how many tokens at most, 257 or more. Few texts may give fewer.
        split: a regular expression of the pieces that no token reaches across.

    Raises:
        ValueError: `vocab_size` is too small to hold `<|end|>` and every byte, or absurdly large.
        ImportError: the package tokenizers is not installed.
    """
    if vocab_size > LARGEST_VOCABULARY:
        raise ValueError(f"vocab_size: expected at most {LARGEST_VOCABULARY:,}, got {vocab_size:,}")
    library = _tokenizers()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ValueError(f"vocab_size: expected at least {len(alphabet) + 1} (every byte, and {END}), got {vocab_size}")
    model: tokenizers.Tokenizer = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Split(library.Regex(split), behavior="isolated"),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    return model


class Tokenizer:
    """Text to token numbers and back.

    Args:
        model: a byte-level tokenizer with the token `<|end|>`, as `train_tokenizer` gives it.

    Raises:
        ValueError: the model is not byte-level, or has no `<|end|>`.

    >>> tokenizer = Tokenizer(train_tokenizer(["the cat, the hat"], vocab_size=260))
    >>> tokenizer.pieces(tokenizer.encode("the bat"))
    ['the', ' ', 'b', 'at']
    """

    def __init__(self, model: "tokenizers.Tokenizer") -> None:
        if not isinstance(model.decoder, _tokenizers().decoders.ByteLevel):
            raise ValueError("model: expected a byte-level tokenizer, as train_tokenizer gives it")
        end_id = model.token_to_id(END)
        if end_id is None:
            raise ValueError(f"model: expected a tokenizer with the token {END}, got one without")
        self.model = model
        self.end_id: int = end_id
        self.stop_ids = frozenset({end_id})
        self.vocab_size: int = model.get_vocab_size()
        # Text never becomes a special token. The model's file does not store this, and every model passes here.
        self.model.encode_special_tokens = True
        self._bytes = _bytes_of_tokens(model)

    def encode(self, text: str) -> list[int]:
        """The token numbers of a text."""
        return self._encodings([text])[0].ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token numbers of several texts, encoded side by side on all cores."""
        return [encoding.ids for encoding in self._encodings(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token numbers; bytes that are not UTF-8, as of a character cut in two, become U+FFFD."""
        return self.as_bytes(ids).decode("utf-8", "replace")

    def as_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 of token numbers, as it is."""
        return b"".join(self._bytes[i] for i in self._checked(ids))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        r"""How each token shows on its own, in one line: spaces stay, a newline is `\n`, part of a letter is `\xe2`."""
        return [
            "".join(
                letter if letter.isprintable() else repr(letter)[1:-1]
                for letter in self._bytes[i].decode("utf-8", "backslashreplace")
            )
            for i in self._checked(ids)
        ]

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `encode(text)` stands: the first character it touches, and the one after its last.

        Two tokens that share a character, each with some of its bytes, both span it.
        """
        return self._encodings([text])[0].offsets

    def save(self, path: str | PathLike[str]) -> None:
        """Write the tokenizer to one JSON file, the format that transformers reads as `tokenizer.json`."""
        with replacing(Path(path)) as new:
            new.write_text(self.model.to_str(pretty=True), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Read what `save` wrote.

        Raises:
            ValueError: the file is missing or not a tokenizer; the message names the path.
        """
        text = read_text(path)
        try:
            return cls.of(text)
        except ImportError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer: {error}") from error

    @classmethod
    def of(cls, text: str) -> "Tokenizer":
        """A tokenizer from the text of its file."""
        return cls(_tokenizers().Tokenizer.from_str(text))

    def _encodings(self, texts: Sequence[str]) -> "list[tokenizers.Encoding]":
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"text: expected str, got {type(text).__name__}")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"text: expected text that UTF-8 can hold, got the lone surrogate {text[error.start]!r} "
                    f"at character {error.start:,}"
                ) from None
        return self.model.encode_batch(list(texts), add_special_tokens=False)

    def _checked(self, ids: Sequence[int]) -> Sequence[int]:
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"ids: expected token numbers from 0 to {self.vocab_size - 1}, got {i}")
        return ids


def _bytes_of_tokens(model: "tokenizers.Tokenizer") -> list[bytes]:
    """The bytes of every token, by number.

    A byte-level vocabulary writes each byte as one visible character: printable Latin-1 as itself, the 68 others, in
    order, as U+0100 and on. `<|end|>`, and other added tokens, are written as they are.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    added = {number: token.content.encode() for number, token in model.get_added_tokens_decoder().items()}
    return [
        added[number] if number in added else bytes(byte_of[letter] for letter in model.id_to_token(number) or "")
        for number in range(model.get_vocab_size())
    ]


def _tokenizers() -> ModuleType:
    need("a tokenizer", "cli", "tokenizers")
    import tokenizers

    return tokenizers

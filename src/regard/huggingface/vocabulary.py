"""A tokenizer of transformers with the interface of `regard.training.text.Tokenizer`.

Every token stands for some bytes of UTF-8. How its name writes them differs:

    byte-level     each byte a visible character, as in GPT-2: Ġthe
    sentencepiece  a space as ▁, a byte that is no character as <0x0A>: ▁the
    WordPiece      ## where a word goes on, and a space before every other: ##ing
"""

import re
from collections.abc import Sequence
from typing import Any


class ForeignTokenizer:
    """Text to token numbers and back, by a fast tokenizer of transformers.

    Args:
        theirs: the tokenizer.

    Attributes:
        end_id: the token that opens every text; where the tokenizer has none, the one that ends it.
        stop_ids: the tokens at which a text ends. vocab_size: how many tokens there are.

    Raises:
        ValueError: it is no fast tokenizer (which alone can tell where a token stands), or no token of it opens or ends
            a text.
    """

    def __init__(self, theirs: Any) -> None:
        if not getattr(theirs, "is_fast", False):
            raise ValueError(
                f"model: its tokenizer, {type(theirs).__name__}, cannot tell where a token stands in a text; expected "
                "one with a tokenizer.json"
            )
        self.theirs = theirs
        opening = [theirs.bos_token_id, theirs.cls_token_id, theirs.eos_token_id, theirs.pad_token_id]
        found = [number for number in opening if number is not None]
        if not found:
            raise ValueError("model: its tokenizer has no token that opens or ends a text (bos, cls, eos or pad)")
        self.end_id: int = found[0]
        self.stop_ids = frozenset(number for number in (theirs.eos_token_id, self.end_id) if number is not None)
        self.vocab_size: int = len(theirs)
        self._names: list[str | None] = theirs.convert_ids_to_tokens(range(self.vocab_size))
        self._special = set(theirs.all_special_ids)
        written = repr(theirs.backend_tokenizer.decoder)
        self._kind = "bytes" if "ByteLevel" in written else "pieces" if "WordPiece" in written else "spaces"

    def encode(self, text: str) -> list[int]:
        """The token numbers of a text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token numbers of several texts."""
        found: list[list[int]] = self.theirs(list(texts), add_special_tokens=False)["input_ids"]
        return found

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `encode(text)` stands: the first character it touches, and the one after its last."""
        found: list[tuple[int, int]] = self.theirs(text, add_special_tokens=False, return_offsets_mapping=True)[
            "offset_mapping"
        ]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token numbers; bytes that are not UTF-8 become U+FFFD."""
        return self.as_bytes(ids).decode("utf-8", "replace")

    def as_bytes(self, ids: Sequence[int]) -> bytes:
        """The UTF-8 of token numbers; nothing for a token that stands for no text."""
        return b"".join(self._bytes(number) for number in ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """How each token shows on its own, in one line."""
        return [
            self._name(number) or f"<{number}>"
            if number in self._special or not self._name(number)
            else "".join(
                letter if letter.isprintable() else repr(letter)[1:-1]
                for letter in self._bytes(number).decode("utf-8", "backslashreplace")
            )
            for number in ids
        ]

    def _name(self, number: int) -> str:
        """How the tokenizer writes a token; nothing for a number that only the model has."""
        return (self._names[number] or "") if number < len(self._names) else ""

    def _bytes(self, number: int) -> bytes:
        name = self._name(number)
        if number in self._special or not name:
            return b""
        if self._kind == "bytes":
            return bytes(BYTE_OF[letter] for letter in name) if set(name) <= BYTE_OF.keys() else name.encode()
        if self._kind == "pieces":
            return (name[2:] if name.startswith("##") else f" {name}").encode()
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return bytes.fromhex(byte[1])
        return name.replace("▁", " ").encode()


def _byte_of() -> dict[str, int]:
    """Which byte a visible character stands for: printable Latin-1 for itself, the 68 others, in order, from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF = _byte_of()

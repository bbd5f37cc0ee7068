"""Text of tokens as they come: whole characters, and nothing from a stop string on."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class ByteTokenizer(Protocol):
    """A tokenizer whose tokens are bytes of UTF-8, as `regard.training.text.Tokenizer`."""

    def as_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of token numbers."""


class TextStream:
    """Text from tokens, piece by piece, in time and memory that do not grow with the text.

    A character whose bytes are in several tokens comes with the last of them. Text that may be the beginning of a stop
    string is held back until it is known not to be.

    Args:
        tokenizer: what decodes the tokens.
        stop: texts at the first of which the stream ends, before it; each at least one character.

    Attributes:
        stopped: whether a stop string has come; what follows is ignored.

    Raises:
        ValueError: a stop string is empty.

    >>> class Letters:
    ...     def as_bytes(self, ids):
    ...         return bytes(ids)
    >>> stream = TextStream(Letters(), stop=["lo!"])
    >>> [stream.add(byte) for byte in "hallo! you".encode()], stream.stopped
    (['h', 'a', '', 'l', '', '', '', '', '', ''], True)
    """

    def __init__(self, tokenizer: ByteTokenizer, *, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str) or any(not isinstance(text, str) or not text for text in stop):
            raise ValueError(f"TextStream: stop must be a list of texts, none of them empty, got {stop!r}")
        self.tokenizer, self.stop, self.stopped = tokenizer, tuple(stop), False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, token: int) -> str:
        """The text that is certain now that this token has come."""
        return "" if self.stopped else self._passed(self._decoder.decode(self.tokenizer.as_bytes([token])))

    def end(self) -> str:
        """The rest, when no token comes any more."""
        if self.stopped:
            return ""
        text = self._passed(self._decoder.decode(b"", final=True))
        rest, self._held = "" if self.stopped else self._held, ""
        return text + rest

    def _passed(self, new: str) -> str:
        text = self._held + new
        found = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        certain = len(text) - max((_begun(text, stop) for stop in self.stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

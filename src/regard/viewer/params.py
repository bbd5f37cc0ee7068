"""What the page asks with: parameters read one by one, each checked, or refused in one sentence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class NotFoundError(LookupError):
    """There is no such method, text or job."""


class Params:
    """The parameters of one question.

    Args:
        method: for the error messages.
        given: what came, from a page that may send anything.

    >>> Params("tile", {"level": 9}).whole("level", most=4)
    Traceback (most recent call last):
    ValueError: tile: level must be a whole number from 0 to 4, got 9
    """

    def __init__(self, method: str, given: Mapping[str, Any]) -> None:
        self.method, self.given = method, given

    def has(self, name: str) -> bool:
        """Whether it came, and is not null."""
        return self.given.get(name) is not None

    def wrong(self, name: str, expected: str) -> ValueError:
        """The error for one that is not as expected."""
        got = repr(self.given.get(name))
        return ValueError(f"{self.method}: {name} must be {expected}, got {got if len(got) < 80 else got[:77] + '...'}")

    def whole(self, name: str, *, least: int = 0, most: int | None = None, default: int | None = None) -> int:
        """A whole number."""
        value: Any = self.given.get(name)
        value = default if value is None else value
        if not _is_whole(value) or value < least or (most is not None and value > most):
            raise self.wrong(name, f"a whole number from {least}" + (" on" if most is None else f" to {most}"))
        return int(value)

    def number(self, name: str, default: float, *, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number."""
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise self.wrong(name, "a number" + ("" if least == -math.inf else f" from {least:g} to {most:g}"))
        return float(value)

    def text(self, name: str, *, most_bytes: int, default: str | None = None) -> str:
        """A text of at most so many bytes in UTF-8."""
        value = self.given.get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise self.wrong(name, "a text that UTF-8 can hold") from None
        if size > most_bytes:
            raise ValueError(f"{self.method}: {name} must be at most {most_bytes:,} bytes, got {size:,}")
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None = None) -> str:
        """One of some words."""
        value = self.given.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.wrong(name, f"one of {', '.join(choices)}")
        return value

    def span(self, name: str, length: int, most: int | None = None) -> range:
        """A pair [start, stop] of at least one within a length."""
        value = self.given.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(map(_is_whole, value)):
            raise self.wrong(name, "a pair [start, stop]")
        start, stop = value
        if not 0 <= start < stop <= length or (most is not None and stop - start > most):
            limit = "" if most is None else f" with at most {most:,} between them"
            raise self.wrong(name, f"a pair [start, stop] from 0 to {length}{limit}")
        return range(start, stop)

    def pairs(self, name: str, most: int) -> list[tuple[int, int]]:
        """A list of pairs of whole numbers, such as heads [layer, head]."""
        value = self.given.get(name)
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= most:
            raise self.wrong(name, f"a list of 1 to {most} pairs [layer, head]")
        for pair in value:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(_is_whole, pair)):
                raise self.wrong(name, "a list of pairs [layer, head]")
        return [(int(layer), int(head)) for layer, head in value]

    def pair(self, name: str) -> tuple[int, int]:
        """One head, [layer, head]."""
        return Params(self.method, {name: [self.given.get(name)]}).pairs(name, 1)[0]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

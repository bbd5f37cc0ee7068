"""Text as a terminal can show it: what every character looks like, and how many cells it takes.

A character that would move the cursor, change the colours, or turn the direction of writing is shown as a sign that
stands for it; all others as they are. A character that takes no cell of its own (an accent, a joiner) stays with the
one before it.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from regard.display.signs import JOINERS, NO_LETTERS, SIGNS, sign

MORE = "…"


class Unit(NamedTuple):
    """What stands in one place of a line: a character, and those that lie on it."""

    shown: str
    width: int
    start: int
    """Where its first character stands in the text."""
    stop: int


def visible(text: str) -> str:
    """A text in one line, nothing in it that a terminal would obey.

    >>> from regard.display.letters import visible
    >>> visible("für" + chr(10) + chr(27) + "[2J")
    'für↵␛[2J'
    """
    return "".join(unit.shown for unit in units(text))


def obeyed_by_none(text: str) -> str:
    """A text as it is, lines and tabs too, but for what else a terminal would obey."""
    return "".join(character if character in "\n\t" else sign(character) for character in text)


def units(text: str) -> Iterator[Unit]:
    """A text taken apart into what stands in one place each."""
    start, shown = 0, ""
    for place, character in enumerate(text):
        if not _lies_on_another(character):
            if shown:
                yield Unit(shown, _width(shown), start, place)
            start, shown = place, sign(character)
        elif shown and text[place - 1] not in SIGNS:
            shown += character
        else:
            if shown:
                yield Unit(shown, _width(shown), start, place)
            start, shown = place, "◌" + character
    if shown:
        yield Unit(shown, _width(shown), start, len(text))


def cells(text: str) -> int:
    """How many cells a terminal takes for a text, at most: some draw several characters as one."""
    return sum(unit.width for unit in units(text))


def fitted(text: str, width: int) -> str:
    """A text in one line of exactly `width` cells: cut, with `…`, or filled with spaces.

    >>> from regard.display.letters import fitted
    >>> fitted("attention", 6), fitted("key", 6)
    ('atten…', 'key   ')
    """
    text = visible(text)
    if cells(text) > width:
        kept, taken = "", 0
        for unit in units(text):
            if taken + unit.width > width - 1:
                break
            kept, taken = kept + unit.shown, taken + unit.width
        text = (kept + MORE) if width > 0 else ""
    return text + " " * (width - cells(text))


def joined(parts: Sequence[Text], width: int, *, indent: int = 2, gap: int = 2) -> list[Text]:
    """Parts side by side, in as many lines as they need; a part that is wider than a line is cut."""
    lines: list[Text] = []
    for part in parts:
        part.truncate(width - indent, overflow="ellipsis")
        if lines and cells(lines[-1].plain) + gap + cells(part.plain) <= width:
            lines[-1].append(" " * gap).append_text(part)
        else:
            lines.append(Text(" " * indent).append_text(part))
    return lines


def _width(shown: str) -> int:
    return max(cell_len(shown), sum(map(cell_len, shown)))


def _lies_on_another(character: str) -> bool:
    category = unicodedata.category(character)
    return character in JOINERS or category in ("Mn", "Me") or (cell_len(character) == 0 and category not in NO_LETTERS)

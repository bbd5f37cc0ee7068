"""What is drawn on: a console of some width, and the colours that suit it."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from regard.display.ground import Theme, palette_of
from regard.display.letters import visible
from regard.display.palette import Palette

MIN_WIDTH_CELLS = 32
"""Cells of the narrowest terminal that is drawn for."""


@dataclass(frozen=True)
class Paper:
    """A console, with the colours that suit it."""

    console: Console
    palette: Palette

    @classmethod
    def on(cls, console: Console, theme: Theme = "auto") -> "Paper":
        """The paper that a console is."""
        return cls(console, palette_of(console, theme))

    @property
    def width(self) -> int:
        """Cells of a line."""
        return max(MIN_WIDTH_CELLS, self.console.width)

    @property
    def indent(self) -> int:
        """Cells before what stands under a heading."""
        return 2 if self.width >= 60 else 0

    @property
    def could_colour(self) -> bool:
        """Whether colours are missing only because the background is not known."""
        return self.palette.ground is None and self.palette.depth is not None

    def lines(self, lines: Iterable[Text]) -> None:
        """Lines that were made for this width."""
        for line in lines:
            self.console.print(line, no_wrap=True, overflow="ignore", crop=False)

    def gap(self) -> None:
        """An empty line."""
        self.console.print()

    def say(self, *parts: str | tuple[str, str], indent: int = 0, hang: int = 0) -> None:
        """Words, with nothing in them that a terminal would obey, broken between words where a line is full."""
        shown = [(part, "") if isinstance(part, str) else part for part in parts]
        words = Text.assemble(*((visible(words), style) for words, style in shown))
        self.lines(self.flow(words, indent=indent, hang=hang))

    def quiet(self, words: str) -> None:
        """Words of less importance."""
        self.say((words, self.palette.quiet))

    def flow(self, text: Text, *, indent: int = 0, hang: int = 0) -> list[Text]:
        """A text broken between words; later lines begin `hang` cells further in."""
        lines = flowed(self.console, text, self.width - indent, hang=hang)
        return [Text(" " * indent).append_text(line) for line in lines]


def flowed(console: Console, text: Text, room: int, *, hang: int = 0) -> list[Text]:
    """A text in lines of at most `room` cells, broken between words; later lines begin `hang` cells further in."""
    if text.cell_len <= room:
        return [text]
    first, *rest = text.wrap(console, room)
    if hang and rest:
        start = len(first.plain)
        while text.plain[start : start + 1] == " ":
            start += 1
        rest = [Text(" " * hang).append_text(line) for line in text[start:].wrap(console, room - hang)]
    for line in (first, *rest):
        line.rstrip()
    return [first, *rest]


def quoted(label: str) -> str:
    """A token between marks, so that its spaces can be seen."""
    return f"'{label}'"

"""Where commands print: standard output and error, with or without a terminal."""

import os
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

WIDTH = 80
"""Cells of a line where nothing says how many there are."""


def open_console(stderr: bool = False) -> Console:
    """A console on standard output or error. What a stream's encoding lacks is written as an escape, not refused."""
    stream = sys.stderr if stderr else sys.stdout
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    return Console(stderr=stderr, highlight=False, width=_width(stream), soft_wrap=False)


def _width(stream: TextIO) -> int | None:
    """Cells of a line: None where the console finds out by itself, as the terminal's window may change."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return int(os.environ["COLUMNS"]) or WIDTH
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # piped, or no stream of the system's
        return WIDTH
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")  # then the console does not look
    return columns if dumb and columns else None if columns else WIDTH


def tell(console: Console, words: str, style: str | None = None) -> None:
    """Words with nothing in them that a terminal would obey, whoever wrote them; broken between words on a terminal."""
    from regard.display.letters import obeyed_by_none

    _print_lines(console, Text(obeyed_by_none(words), style or ""), hang=2)


def print_plain(words: str, *, hang: int) -> None:
    """Lines on standard output: as they are in a file, broken between words and `hang` cells in on a terminal."""
    console = open_console()
    if not console.is_terminal:
        print(words, flush=True)
        return
    _print_lines(console, Text(words.removesuffix("\n")), hang=hang)


def print_cut(words: str) -> None:
    """One line on standard output, cut with an ellipsis where the terminal ends, or after 120 cells without one."""
    from regard.display.letters import fitted

    console = open_console()
    print(fitted(words, console.width if console.is_terminal else 120).rstrip(), flush=True)


def _print_lines(console: Console, text: Text, *, hang: int) -> None:
    from regard.display.paper import flowed

    for line in text.split("\n", allow_blank=True):
        room = console.width if console.is_terminal else line.cell_len
        for part in flowed(console, line, room, hang=hang if room >= 2 * hang else 2):
            console.print(part, no_wrap=True, overflow="ignore", crop=False)


def progress_bar(console: Console, *extra: str, transient: bool = False) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),  # what is left of the line
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    columns += [TextColumn(text) for text in extra]
    return Progress(*columns, console=console, expand=True, disable=not console.is_terminal, transient=transient)

"""Where commands print: standard output and error, with or without a terminal."""

import sys
from typing import Any

from rich.console import Console


def open_console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # piped text has no width of its own; wide enough for the map of a dozen heads
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 160, soft_wrap=False)


def progress_bar(console: Console, *extra: str) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, *(TextColumn(text) for text in extra), console=console, disable=not console.is_terminal)

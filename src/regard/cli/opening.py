"""The page from the command line: served until Ctrl-C, or written as one file where nobody is there to press it."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from regard.cli.console import open_console, print_plain, progress_bar, tell
from regard.extras import need

if TYPE_CHECKING:
    from regard.viewer.readers import Reader
    from regard.viewer.run import Run

PAGE = Path("regard-look.html")
"""Where the page is written if nothing else is said; an older page of that name is replaced."""


def read_for_page(reader: "Reader", text: str, source: str, start: int) -> "Run":
    """A text as the page needs it: with values and outputs."""
    from regard.viewer.reading import read

    with progress_bar(open_console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading for the page", total=None)
        return read(reader, text, source, start, lambda done, all: bar.update(task, completed=done, total=all))


def open_recording(path: str) -> "Run":
    """The file of a recording."""
    from regard.recording import load_recording
    from regard.viewer.notebook import run_of

    return run_of(load_recording(path), source=path)


def choose(run: "Run", layer: int | None, head: int | None, query: str | None) -> None:
    """Has the page begin where the options say.

    Raises:
        ValueError: there is no such layer, head or query.
    """
    if (layer, head, query) == (None, None, None):
        return
    first = run.first_shown()
    layer = first[0] if layer is None else layer
    seen = run.layer(layer)
    head = (first[1] if first[1] in seen.heads else seen.heads[0]) if head is None else head
    if head not in seen.heads:
        raise ValueError(f"--head must be one of {', '.join(map(str, seen.heads))}, got {head}")
    number = seen.grid.query_len - 1 if query is None else int(query) if query.isdecimal() else -1
    if not 0 <= number < seen.grid.query_len:
        raise ValueError(f"--query must be 0 to {seen.grid.query_len - 1}, got {query}")
    run.chosen = layer, head, number


def print_summary(console: Console, run: "Run", *, as_json: bool, served: bool) -> None:
    """What there is to tell of heads whose text is not at hand, or of a model that is not regard's own: one line for
    each of them.

    Args:
        served: whether a page follows, which need not wait for what takes long: it is worked out meanwhile.
    """
    from regard.recording import Summary
    from regard.viewer.looking import MAX_WEIGHTS_AT_ONCE, heads_as_data, plain

    title = f"{run.source}, read by {run.model or 'a model'}: {run.length:,} tokens"
    found = run.summary
    if found is None and served and run.weights() > MAX_WEIGHTS_AT_ONCE:
        tell(console, f"{title}\n\nWhat each head does is worked out while the page is open.")
        return
    if found is None:
        with progress_bar(open_console(stderr=True), transient=True) as bar:
            task = bar.add_task("describing every head", total=None)
            found = run.summarise(lambda done, all: bar.update(task, completed=done, total=all))
    if as_json:
        data = {"model": run.model, "source": run.source, "layers": run.names, **heads_as_data(run, found)}
        print(json.dumps(plain(data), ensure_ascii=False), flush=True)
    else:
        tell(console, f"{title}\n\n{Summary(found)}")


def is_served(path: Path | None) -> bool:
    """Whether the page is served: a person sits at the terminal, and it was not told to write it to a path."""
    return path is None and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def open_page(run: "Run", path: Path | None) -> None:
    """Serves the page of a run, or writes it.

    Args:
        path: where to write it; None: served where a person sits at the terminal, else written to `PAGE`, and neither
            where the output goes into a pipe or a file.
    """

    served = is_served(path)
    if not served and path is None and sys.stdin is not None and sys.stdin.isatty():
        return
    missing = ""
    if served:
        try:
            need("the page", "view", "starlette", "uvicorn")
        except ImportError as error:
            served, missing = False, f" ({error})"
    if not served:
        _write(run, PAGE if path is None else path)
        if missing:
            tell(open_console(stderr=True), f"not served{missing}")
        return
    from regard.viewer.server import Server
    from regard.viewer.session import Session

    readers = [] if run.reader is None else [run.reader]
    server = Server(Session([run], readers))
    print_plain(f"\nThe page: {server.address}\nCtrl-C ends it.", hang=2)
    if not server.run():  # a model is still at work, and nothing waits for it
        sys.stdout.flush()
        os._exit(0)


def _write(run: "Run", path: Path) -> None:
    from regard.viewer.export import export, save_page

    with progress_bar(open_console(stderr=True), transient=True) as bar:
        task = bar.add_task("writing the page", total=None)
        html = export(run, None, lambda done, all: bar.update(task, completed=done, total=all))
    save_page(path, html)
    print_plain(f"\nThe page: {path}\nOpen it in a browser.", hang=2)

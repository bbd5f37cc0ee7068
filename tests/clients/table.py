"""How far a client's numbers are apart, and the table of all clients in docs/transformers.md."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "transformers.md"
BEGIN, END = "<!-- table: make clients -->\n", "<!-- end of table -->\n"
HEAD = ("client", "version", "compared with eager", "largest difference")

ALLOWED = 1e-5
"""The largest difference, relative to the largest number."""

Numbers = Tensor | np.ndarray | Sequence["Numbers"] | float
Row = tuple[str, str, str, str]


def client_of(file: Path) -> str:
    """The name that the client in a file is installed by.

    >>> client_of(Path("test_sentence_transformers.py"))
    'sentence-transformers'
    """
    return file.stem.removeprefix("test_").replace("_", "-")


def clients() -> list[str]:
    """Every client that has a file."""
    return sorted(client_of(file) for file in HERE.glob("test_*.py"))


def in_a_row(given: Numbers) -> Tensor:
    """All numbers that a client returned."""
    if isinstance(given, list | tuple):
        return torch.cat([in_a_row(one) for one in given])
    return torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given)).detach().double().flatten()


def difference(what: str, ours: Numbers, theirs: Numbers) -> float:
    """max|ours - theirs| / max|theirs|, which must be no more than is allowed."""
    actual, expected = in_a_row(ours), in_a_row(theirs)
    assert actual.shape == expected.shape, f"{what}: {len(actual)} numbers, expected {len(expected)}"
    assert expected.isfinite().all(), f"{what}: what is expected is not finite"
    assert expected.unique().numel() > 1, f"{what}: what is expected is the same everywhere"
    far = float((actual - expected).abs().max() / expected.abs().max())
    assert far <= ALLOWED, f"{what}: off by {far:.1e}, allowed {ALLOWED:.0e}"
    return far


def table(rows: Iterable[Row]) -> str:
    """Rows as Markdown."""
    lines = (HEAD, ("---",) * len(HEAD), *rows)
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines)


def rows(page: str) -> list[Row]:
    """The rows of the table in a page."""
    _, found, _ = apart(page)
    head, _, *lines = (tuple(cell.strip() for cell in line.strip("|").split("|")) for line in found.split("\n") if line)
    assert head == HEAD
    return lines


def written(page: str, made: str) -> str:
    """A page with another table between its two marks."""
    before, _, after = apart(page)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def apart(page: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands behind it."""
    found = re.fullmatch(f"(.*){re.escape(BEGIN)}(.*){re.escape(END)}(.*)", page, re.DOTALL)
    assert found, f"there is no place for a table, between {BEGIN!r} and {END!r}"
    return found[1], found[2], found[3]

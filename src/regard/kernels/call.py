"""What a kernel is given, and what a kernel is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from regard.dropout import Dropout
from regard.scores import Scoring


class KernelError(RuntimeError):
    """A kernel that was asked for by name cannot do this call, or there is no such kernel."""


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: tensors, what a score is, what is dropped, and whether lse is wanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring
    dropout: Dropout | None = None
    wants_lse: bool = False


def all_cells(call: Call) -> int:
    """Every score of a call."""
    grid = call.scoring.grid
    return grid.batch * grid.heads * grid.query_len * grid.key_len


class Kernel(NamedTuple):
    """A way to compute attention."""

    name: str
    cannot: Callable[[Call], str | None]
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    """Output and lse; None for lse is allowed where the call does not want it."""
    cells: Callable[[Call], int]
    """How many scores it computes, over all batch rows and heads."""
    square: Callable[[Call], int]
    """How many numbers of size query_len x key_len it holds at once: 0 for a kernel that needs none."""
    held: Callable[[Call], int]
    """How many bytes it holds at once beside inputs and output, in a forward pass; an estimate."""
    faster: Callable[[Call], str | None] = lambda call: None
    """Why it takes less time for a call than those that "auto" would prefer, as was measured; None if it does not."""

"""What a kernel is given, and what a kernel is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
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

    @property
    def learns(self) -> bool:
        """Whether a gradient is wanted of any tensor in it."""
        if not torch.is_grad_enabled():
            return False
        return any(map(learns, (self.query, self.key, self.value, self.scoring.sink, *self.scoring.learned())))


def learns(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def all_scores(call: Call) -> int:
    """How many scores a call has, hidden ones too."""
    grid = call.scoring.grid
    return grid.batch * grid.heads * grid.query_len * grid.key_len


class Kernel(NamedTuple):
    """A way to compute attention."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why it cannot do a call; None if it can."""
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    """Output and lse; None for lse is allowed where the call does not want it."""
    num_scores: Callable[[Call], int]
    """How many scores it computes, over all batch rows and heads."""
    quadratic_numbers: Callable[[Call], int]
    """How many numbers of size query_len x key_len it holds at once: 0 for a kernel that needs none."""
    peak_bytes: Callable[[Call], int]
    """How many bytes it holds at once beside inputs and output, in a forward pass; an estimate."""

"""What a kernel is given, and what a kernel is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from regard.reference import AttentionOutput
from regard.scores import Dropout, Scoring


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


class Kernel(NamedTuple):
    """A way to compute attention."""

    name: str
    cannot: Callable[[Call], str | None]
    run: Callable[[Call], AttentionOutput]
    """For a call with `wants_lse=False` the lse it returns is not read."""
    square: Callable[[Call], int]
    """How many numbers of size query_len x key_len it holds at once: 0 for a kernel that needs none."""

"""The input of a kernel, and the interface that every kernel implements."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.dropout import Dropout
from regard.graphs import concrete, tracing
from regard.numerics import without_autocast
from regard.scores import Scoring


class KernelError(RuntimeError):
    """The kernel requested by name does not support this call, or does not exist."""


class Call(NamedTuple):
    """One validated call: tensors, scoring, dropout, and whether lse is wanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring
    dropout: Dropout | None = None
    wants_lse: bool = False

    @property
    def learns(self) -> bool:
        """Whether any of its tensors needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return any(map(learns, (self.query, self.key, self.value, self.scoring.sink, *self.scoring.learned())))

    @property
    def bias_learns(self) -> bool:
        """Whether a bias needs a gradient, or the v of an additive similarity."""
        return torch.is_grad_enabled() and any(map(learns, self.scoring.learned()))

    @property
    def inspectable(self) -> bool:
        """Whether the result can be inspected as soon as it is computed, and no gradient is needed."""
        return self.concrete and not self.learns

    @property
    def concrete(self) -> bool:
        """Whether numbers can be looked at where they are: on a CPU, neither traced nor transformed."""
        return concrete(self.query.device)


def learns(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def all_scores(call: Call) -> int:
    """Number of scores of a call, masked ones included."""
    grid = call.scoring.grid
    return grid.batch * grid.heads * grid.query_len * grid.key_len


Prepared = Callable[[Tensor, Tensor, Tensor, Tensor | None, Bias | Tensor | None], tuple[Tensor, Tensor | None]]
"""A call that waits for its query, key, value, sink and bias, these as the user gives them: returns output and lse. Of
the bias only a tensor is looked at, by kernels that read it in place."""

Single = Callable[[Tensor, Tensor, Tensor, Tensor | None, Any, Tensor | None], tuple[Tensor, Tensor | None] | None]
"""A call of one query that waits for query, key, value, sink, what the mask hides (`Hidden`, or None) and a bias, both
[1 or batch, 1 or heads, 1, key_len]. None where anything hidden may have contributed."""


class Kernel(NamedTuple):
    """An implementation of attention."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why it does not support a call; None if it does."""
    run: Callable[[Call], tuple[Tensor, Tensor | None]]
    """Output and lse; lse may be None if the call does not want it."""
    num_scores: Callable[[Call], int]
    """Number of scores it computes, over all batch indices and heads."""
    quadratic_numbers: Callable[[Call], int]
    """Numbers it holds at once in quadratic tensors (query_len x key_len); 0 if it needs none."""
    peak_bytes: Callable[[Call], int]
    """Estimated peak memory of a forward pass in bytes, beyond inputs and output."""
    prepare: Callable[[Call], Prepared | None] = lambda call: None
    """`run` for other tensors of the same form, with what does not depend on their numbers computed once; None where
    there is nothing of that kind. If the kernel reads a bias tensor in place, every call may have another one. With
    dropout, every call draws its seed from torch's generator. It must not keep the call's tensors alive."""
    single: Callable[[Call], Single | None] = lambda call: None
    """`run` of a call of one query without gradients, for other tensors, mask and bias, and any key_len; None where
    there is no such way."""
    reads_in_place: Callable[[Call], bool] = lambda call: False
    """Whether the bias tensor of a call, and of those like it, is read anew in every one, where it lies in memory;
    otherwise what was read may be kept."""

    def compute(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """`run`, with autocast off: the dtype of the query decides, and no score is rounded on the way."""
        if not (tracing() or torch._C._is_any_autocast_enabled()):  # what a small call can ask at little cost
            return self.run(call)
        with without_autocast(call.query.device):
            return self.run(call)

"""The one definition of a score.

    scores = softcap(scale * query @ key^T) + bias,    softcap(s) = c * tanh(s / c)
    scores = -inf where the mask does not allow

The reference, the statistics and the step-by-step view compute scores through `Scoring`, for any rectangle; the kernels
are tested against it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add, or_
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.biases import Bias, Given
from regard.graphs import has_numbers
from regard.masks import EVERYTHING, Mask
from regard.numerics import grouped_matmul, upcast
from regard.shapes import Grid


class Stage(NamedTuple):
    """One step in the computation of a score."""

    name: str
    formula: str
    scores: Tensor


class Additive:
    """The similarity of Bahdanau et al. 2014 (appendix A.1.2), in place of the product of query and key.

        similarity(q_i, k_j) = v . tanh(q_i + k_j)

    where query and key are already projected (W q and U k). At most `CELLS` numbers are held at a time, forward and
    backward: the tanh of [batch, heads, rows, columns, head_dim] is recomputed in the backward pass.

    Args:
        v: [heads, head_dim], differentiable.
    """

    CELLS = 1 << 24

    def __init__(self, v: Tensor) -> None:
        self.v = v

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Shapes: query [batch, heads, rows, head_dim], key [batch, kv_heads, columns, head_dim] -> scores."""
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        v = self.v.to(query.dtype)

        def rows(part: Tensor) -> Tensor:
            return ((part[:, :, :, None] + key[:, :, None]).tanh() * v[:, None, None]).sum(-1)

        step = max(1, self.CELLS // max(1, key.numel()))
        if step >= query.shape[2]:
            return rows(query)
        return torch.cat([checkpoint(rows, part, use_reentrant=False) for part in query.split(step, dim=2)], dim=2)


class ScoringArguments(TypedDict):
    """The arguments of `attention` that define a score."""

    mask: Mask | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    additive: Additive | None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are computed in one call: the similarity and everything applied to it.

    Args:
        grid: batch, heads, query_len and key_len of the call.
        scale: factor on the similarity; 1/sqrt(head_dim) for products, so that their variance stays 1 (Vaswani et al.
            2017, section 3.2.1).
        softcap: bound on the size of a score before bias and mask; None for no bound.
        bias, mask: bound to the grid; None for none.
        sink: [heads], a logit that takes weight and has no value; None for none.
        additive: the similarity, if it is not the dot product.
    """

    grid: Grid
    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    mask: Mask | None = None
    sink: Tensor | None = None
    additive: Additive | None = None

    @property
    def mask_or_everything(self) -> Mask:
        """The mask, or `EVERYTHING` if there is none."""
        return EVERYTHING if self.mask is None else self.mask

    def with_sink(self, sink: Tensor | None) -> "Scoring":
        """The same with another sink."""
        if sink is self.sink:
            return self
        return Scoring(self.grid, self.scale, self.softcap, self.bias, self.mask, sink, self.additive)

    def with_bias(self, bias: Bias | None) -> "Scoring":
        """The same with another bias."""
        return Scoring(self.grid, self.scale, self.softcap, bias, self.mask, self.sink, self.additive)

    def with_grid(self, grid: Grid) -> "Scoring":
        """The same of another grid, for which bias and mask are bound."""
        return Scoring(grid, self.scale, self.softcap, self.bias, self.mask, self.sink, self.additive)

    def tile(self, query: Tensor, key: Tensor, queries: range | Tensor, keys: range | Tensor) -> Tensor:
        """The scores of a rectangle, in float32 or wider.

        Shapes: query [batch, heads, rows, head_dim] and key [batch, kv_heads, columns, head_dim] are the rectangle's
        own; the result is [batch, heads, rows, columns].
        Args:
            queries, keys: the indices of these rows and columns in the call, for bias and mask.
        """
        scores = query
        for stage in self.stages(query, key, queries, keys):
            scores = stage.scores
        return scores

    def stages(self, query: Tensor, key: Tensor, queries: range | Tensor, keys: range | Tensor) -> Iterator[Stage]:
        """The same scores, stage by stage: score, scale, cap, bias, mask (those that this call has)."""
        query, key = upcast(query), upcast(key)
        if self.additive is None:
            scores = grouped_matmul(query, key.transpose(-2, -1))
            yield Stage("score", "query @ key^T", scores)
        else:
            scores = self.additive(query, key)
            yield Stage("score", "v . tanh(query + key)", scores)
        if self.scale != 1.0:
            scores = scores * self.scale
            yield Stage("scale", f"scores * {self.scale:.6g}", scores)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
            yield Stage("cap", f"{self.softcap:g} * tanh(scores / {self.softcap:g})", scores)
        if self.bias is not None:
            scores = scores + self.biases(queries, keys, scores.dtype)
            yield Stage("bias", f"scores + {self.bias!r}", scores)
        allowed = self.allowed(queries, keys)
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)  # masked_fill takes twice the time
            yield Stage("mask", f"-inf where not {self.bias if self.mask is None else self.mask!r}", scores)

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors besides query and key that may need a gradient through a score."""
        found = () if self.bias is None else self.bias.learned()
        return found if self.additive is None else (*found, self.additive.v)

    def biases(self, queries: range | Tensor, keys: range | Tensor, dtype: torch.dtype) -> Tensor:
        """The bias of a rectangle, broadcastable to it."""
        assert self.bias is not None
        return reduce(add, (self._values(term, queries, keys).to(dtype) for term in self.bias.terms()))

    def allowed(self, queries: range | Tensor, keys: range | Tensor, biases: Tensor | None = None) -> Tensor | None:
        """Where mask and bias (which may be -inf) allow attention; None if nothing is hidden.

        Args:
            biases: those of the rectangle, if they are known.
        """
        allowed = None
        if self.mask is not None and self.mask is not EVERYTHING:
            allowed = self.mask.allowed(self._where(queries), self._where(keys))
        if self.bias is not None:
            parts = (self._values(term, queries, keys) for term in self.bias.terms()) if biases is None else (biases,)
            hidden = reduce(or_, (part.isneginf() for part in parts))
            if allowed is not None:
                allowed = allowed & ~hidden
            elif not has_numbers(hidden) or bool(hidden.any()):
                allowed = ~hidden
        return allowed

    def _values(self, bias: Bias, queries: range | Tensor, keys: range | Tensor) -> Tensor:
        if bias.of_distance or isinstance(bias, Given):  # evaluated once per distance of two ranges; read in place
            return bias.values(queries, keys)
        return bias.values(self._where(queries), self._where(keys))

    def _where(self, which: range | Tensor) -> Tensor:
        device = self.grid.device
        return which if isinstance(which, Tensor) else torch.arange(which.start, which.stop, which.step, device=device)

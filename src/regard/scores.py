"""The one definition of a score.

    scores = softcap(scale * query @ key^T) + bias,    softcap(s) = c * tanh(s / c)
    scores = -inf where the mask does not allow

Everything that needs a score, the reference, kernels, inspection and the step-by-step view, asks `Scoring` for a
rectangle of them. What happens to the weights afterwards at random, dropout, is defined here too, as a function of the
seed and the place in the matrix, so that any tile can be dropped again exactly, by any kernel, at any time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.biases import Bias
from regard.graphs import exporting, tracing
from regard.indexing import indices
from regard.masks import EVERYTHING, Mask
from regard.shapes import Grid


class Stage(NamedTuple):
    """One step on the way to a score."""

    name: str
    formula: str
    scores: Tensor


class Additive:
    """The similarity of Bahdanau et al. 2014 (appendix A.1.2), in place of the product of query and key.

        similarity(q_i, k_j) = v . tanh(q_i + k_j)

    where query and key are already projected (W q and U k). Held at most `CELLS` numbers at a time, forward and
    backward: the tanh of [batch, heads, rows, columns, head_dim] is computed again in the backward pass.

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


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a score is in one call: the similarity and everything that is done to it.

    Args:
        grid: batch, heads, query_len and key_len of the call.
        scale: factor on the similarity; 1/sqrt(head_dim) for products, so that their variance stays 1 (Vaswani et al.
            2017, section 3.2.1).
        softcap: bound on the size of a score before bias and mask; None for no bound.
        bias, mask: bound to the grid; None for none.
        sink: [heads], the logit of a place that takes weight and gives no value; None for none.
        additive: the similarity if it is not the product.
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
        """The mask; the one that hides nothing where there is none."""
        return EVERYTHING if self.mask is None else self.mask

    def tile(self, query: Tensor, key: Tensor, queries: range | Tensor, keys: range | Tensor) -> Tensor:
        """The scores of a rectangle, in float32 or wider.

        Shapes: query [batch, heads, rows, head_dim] and key [batch, kv_heads, columns, head_dim] are the rectangle's
        own; the result is [batch, heads, rows, columns].
        Args:
            queries, keys: where in the call those rows and columns lie, for bias and mask.
        """
        scores = query
        for stage in self.stages(query, key, queries, keys):
            scores = stage.scores
        return scores

    def stages(self, query: Tensor, key: Tensor, queries: range | Tensor, keys: range | Tensor) -> Iterator[Stage]:
        """The same, one step after another: score, scale, cap, bias, mask (those that this call has)."""
        query, key = wide(query), wide(key)
        if self.additive is None:
            scores = grouped_product(query, key.transpose(-2, -1))
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
        """The tensors besides query and key that may want a gradient through a score."""
        found = () if self.bias is None else self.bias.learned()
        return found if self.additive is None else (*found, self.additive.v)

    def biases(self, queries: range | Tensor, keys: range | Tensor, dtype: torch.dtype) -> Tensor:
        """The bias of a rectangle, broadcastable to it."""
        assert self.bias is not None
        return self.bias.values(self._where(queries), self._where(keys)).to(dtype)

    def allowed(self, queries: range | Tensor, keys: range | Tensor) -> Tensor | None:
        """Where mask and bias (which may be -inf) let a query attend; None where nothing is hidden."""
        queries, keys = self._where(queries), self._where(keys)
        allowed = None if self.mask is None or self.mask is EVERYTHING else self.mask.allowed(queries, keys)
        if self.bias is not None:
            hidden = self.bias.values(queries, keys).isneginf()
            if allowed is not None:
                allowed = allowed & ~hidden
            elif tracing() or bool(hidden.any()):
                allowed = ~hidden
        return allowed

    def _where(self, which: range | Tensor) -> Tensor:
        device = self.grid.device
        return which if isinstance(which, Tensor) else torch.arange(which.start, which.stop, which.step, device=device)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which weights are dropped: a function of the seed and of batch row, head, query and key alone.

        kept  <=>  hash(seed, batch, head, query, key) >= rate * 2^16;   kept weights are divided by the share kept

    The hash is 16 of the 32 bits of MurmurHash3's finalizer over a random number per row of the matrix, XORed with one
    per pair of columns: the low half is the even column's, the high half the odd one's. No state and no order: tiles,
    kernels and the backward pass agree by construction. The rate is taken to the nearest 1/65,536.
    """

    rate: float
    seed: int | Tensor
    """A tensor in a graph, which draws it when it runs."""
    first: int = 0
    """The batch row that a grid's row 0 is, for a kernel that takes the rows one by one."""

    def keep(
        self, grid: Grid, queries: range | Tensor, keys: range | Tensor, *, dtype: torch.dtype = torch.bool
    ) -> Tensor:
        """Shapes: [batch, heads, rows, columns], True (or 1, in another dtype) where the weight is kept."""
        batch, heads, query_len, _, device = grid
        places = (self.first * heads + torch.arange(batch * heads, device=device)[:, None]) * query_len
        rows = places + indices(queries, device)
        row = _mix(_fold(rows, self.seed)).view(batch, heads, rows.shape[1], 1)
        if isinstance(keys, range) and keys.step == 1:  # whole pairs are hashed, and two cells read from each
            pairs = torch.arange(keys.start // 2, -(-keys.stop // 2), device=device)
            first = keys.start % 2
            halves = self._hash(row, pairs).flatten().view(torch.int16).view(*row.shape[:3], 2 * len(pairs))
            halves = halves[..., first : first + len(keys)]
        else:
            columns = indices(keys, device)
            halves = (self._hash(row, columns // 2) >> 16 * (columns % 2)).to(torch.int16)
        least = min(round(self.rate * 2**16), 2**16 - 1) - 2**15
        return torch.ge(halves, least, out=torch.empty(halves.shape, dtype=dtype, device=device))

    def _hash(self, row: Tensor, pairs: Tensor) -> Tensor:
        return _mix(row ^ _mix(_fold(pairs, self.seed ^ 0x5DEECE66D)))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is if it is wider."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def grouped_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """``left @ right`` where right has fewer heads: query head h meets kv head ``h // (heads // kv_heads)``.

    The query heads that share a kv head are laid one below the other, so nothing is repeated in memory.
    Shapes: [batch, heads, M, D] and [batch, kv_heads, D, N] -> [batch, heads, M, N], written into `out` if given.
    """
    batch, heads, M, D = left.shape
    kv_heads, N = right.shape[1], right.shape[3]
    if heads == kv_heads:
        return torch.matmul(left, right, out=out)
    if exporting():  # the folded length would be a product of lengths, about which the tracer then asks
        return torch.matmul(left.unflatten(1, (kv_heads, heads // kv_heads)), right[:, :, None]).flatten(1, 2)
    shape = batch, kv_heads, heads // kv_heads * M
    folded = torch.matmul(left.reshape(*shape, D), right, out=None if out is None else out.view(*shape, N))
    return folded.view(batch, heads, M, N)


def hide(tensor: Tensor, allowed: Tensor | None) -> Tensor:
    """Keys or values with zeros where no query may see them, so that NaN and inf there reach nothing.

    Shapes: tensor [batch, kv_heads, key_len, size], allowed broadcastable to [batch, heads, query_len, key_len].
    """
    if allowed is None:
        return tensor
    seen = allowed.any(dim=-2)
    kv_heads = tensor.shape[1]
    if seen.shape[1] not in (1, kv_heads):
        seen = seen.unflatten(1, (kv_heads, seen.shape[1] // kv_heads)).any(dim=2)
    return hide_where(tensor, seen)


def hide_blind(query: Tensor, allowed: Tensor | None) -> Tensor:
    """Queries with zeros where they may see nothing, so that NaN and inf there reach nothing either.

    Shapes: query [batch, heads, query_len, head_dim], allowed as in `hide`.
    """
    return query if allowed is None else hide_where(query, allowed.any(dim=-1))


def hide_where(tensor: Tensor, where: Tensor) -> Tensor:
    """The tensor with zeros where not; the tensor itself, not a copy, where that can be known without waiting."""
    if where.device.type == "cpu" and not tracing() and bool(where.all()):
        return tensor
    return tensor.masked_fill(~where[..., None], 0.0)


def _fold(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """64-bit numbers and a seed as int32 (wrapping): the high halves multiplied in, so that none is lost."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    mixed = (numbers ^ low) * 0x2545F491 + (numbers >> 32) * 0x85EBCA6B + high * 0x9E3779B9
    return _signed(mixed)


def _signed(numbers: Tensor) -> Tensor:
    return ((numbers & 0xFFFFFFFF) ^ 0x80000000).sub(0x80000000).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on int32 that wraps; overwrites x."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x

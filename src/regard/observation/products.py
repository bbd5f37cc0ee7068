"""The two operations in which a pass spends most of its time: products of queries and keys, and the largest weights."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.numerics import grouped_matmul
from regard.observation import tuning


def product(query: Tensor, key: Tensor, scale: float, added: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``added + scale query @ key^T``, written into `out` if given.

    Of tensors that are not contiguous, libraries may copy the transposed key, which takes as long as the product.

    Shapes: query [batch, heads, rows, size], key [batch, kv_heads, columns, size], added [batch, heads, rows, 1]
    -> [batch, heads, rows, columns].
    """
    return grouped_matmul(query.contiguous(), key.contiguous().transpose(-2, -1), out=out, scale=scale, added=added)


class Found(NamedTuple):
    """The largest numbers of each row, largest first, and their columns."""

    values: Tensor
    columns: Tensor


def largest(weights: Tensor, count: int) -> Found:
    """The `count` largest of each row of numbers that are not negative: [*, columns] -> [*, count] each.

    Columns are folded into layers, and the maxima of the numbers that lie on each other taken: the largest numbers lie
    in the columns of the largest maxima. So `torch.topk`, which goes from number to number, sees fewer of them.
    """
    # nonnegative floats sort like their bits, and comparing integers needs no check for NaN
    bits = weights.view(torch.int64 if weights.dtype == torch.float64 else torch.int32)
    columns = bits.shape[-1]
    layers = min(tuning.LAYERS, key=lambda layers: _time(columns, layers, count))
    if layers == 1:
        values, places = bits.topk(count, dim=-1)
        return Found(values.view(weights.dtype), places)
    width, inside = columns // layers, columns - columns % layers
    chosen = bits[..., :inside].unflatten(-1, (layers, width)).amax(-2).topk(count, dim=-1, sorted=False).indices
    first = torch.arange(0, inside, width, device=bits.device)
    candidates = (chosen[..., None, :] + first[:, None]).flatten(-2)
    if inside < columns:
        rest = torch.arange(inside, columns, device=bits.device)
        candidates = torch.cat([candidates, rest.expand(*candidates.shape[:-1], -1)], dim=-1)
    values, places = bits.gather(-1, candidates).topk(count, dim=-1)
    return Found(values.view(weights.dtype), candidates.gather(-1, places))


def _time(columns: int, layers: int, count: int) -> float:
    """The time for one row, in nanoseconds; infinite for fewer columns than numbers wanted."""
    if layers == 1:
        return _time_of_topk(columns, count)
    if columns < 2 * layers * count:
        return float("inf")
    folding = 0.05 * columns + 60.0
    return folding + _time_of_topk(columns // layers, count) + _time_of_topk(layers * count + columns % layers, count)


def _time_of_topk(columns: int, count: int) -> float:
    """The same for `torch.topk`, which keeps a heap if the columns are many, and otherwise partitions them."""
    return 0.35 * columns + 40.0 * count if columns >= 64 * count else 3.0 * columns + 60.0

"""The two operations in which a pass spends most of its time: products of queries and keys, and the largest weights."""

import math
from functools import lru_cache
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
    """The `count` largest of each row of numbers that are not negative: [*, columns] -> [*, count] each."""
    # nonnegative floats sort like their bits, and comparing integers needs no check for NaN
    bits = weights.view(torch.int64 if weights.dtype == torch.float64 else torch.int32).flatten(0, -2)
    some = bits.split(tuning.ROWS_AT_ONCE) if bits.device.type == "cpu" else (bits,)
    columns = torch.cat([_largest(rows, count) for rows in some]) if len(some) > 1 else _largest(bits, count)
    shape = (*weights.shape[:-1], count)
    return Found(bits.gather(-1, columns).view(weights.dtype).view(shape), columns.view(shape))


def _largest(bits: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest of each row, largest first: [rows, columns] -> [rows, count].

    Columns are folded into layers, and the maxima of the numbers that lie on each other taken: the largest numbers lie
    in the columns of the largest maxima. So what goes from number to number sees fewer of them.
    """
    rows, columns = bits.shape
    _, layers = _cheapest(rows, columns, count, torch.get_num_threads())
    if layers == 1:
        return _picked(bits, count)
    width, inside = columns // layers, columns - columns % layers
    chosen = _largest(bits[:, :inside].unflatten(-1, (layers, width)).amax(-2), count)
    first = torch.arange(0, inside, width, device=bits.device)
    candidates = (chosen[:, None] + first[:, None]).flatten(-2)
    if inside < columns:
        rest = torch.arange(inside, columns, device=bits.device)
        candidates = torch.cat([candidates, rest.expand(rows, -1)], dim=-1)
    return candidates.gather(-1, _picked(bits.gather(-1, candidates), count))


def _picked(bits: Tensor, count: int) -> Tensor:
    """The same without folding: by `torch.topk`, or by `count` maxima of rows from which each is taken out.

    For maxima that tell their columns, these are the lower half of integers of 64 bits, whose upper half the numbers
    are. A maximum takes all rows with vectors, but `torch.topk` a row after the other.
    """
    rows, columns = bits.shape
    how = rows, columns, count, torch.get_num_threads()
    if bits.dtype is torch.int64 or bits.device.type != "cpu" or _time_of_topk(*how) < _time_of_maxima(*how):
        return bits.topk(count, dim=-1).indices
    left = bits.to(torch.int64)  # by itself: no sum widens it as fast
    torch.add(torch.arange(columns, device=bits.device), left, alpha=1 << 32, out=left)
    starts = torch.arange(0, rows * columns, columns, device=bits.device)
    found = left.new_empty(rows, count)
    for number in range(count):
        column = torch.bitwise_and(left.amax(-1), 0xFFFFFFFF, out=found[:, number])
        if number + 1 < count:
            left.view(-1).index_fill_(0, starts + column, torch.iinfo(torch.int64).min)
    return found


@lru_cache(maxsize=1024)
def _cheapest(rows: int, columns: int, count: int, threads: int) -> tuple[float, int]:
    """The least time in nanoseconds, and the number of layers into which columns should be folded for that."""
    return min((_time(rows, columns, layers, count, threads), layers) for layers in tuning.LAYERS)


def _time(rows: int, columns: int, layers: int, count: int, threads: int) -> float:
    """The time in nanoseconds; infinite for fewer columns than numbers wanted."""
    if layers == 1:
        return min(time_of(rows, columns, count, threads) for time_of in (_time_of_topk, _time_of_maxima))
    if columns < 2 * layers * count:
        return math.inf
    candidates = layers * count + columns % layers
    folding = _at_once(rows, columns, 0.1 * columns, threads) + _at_once(rows, candidates, 1.2 * candidates, threads)
    calls = 8 * tuning.CALL
    fewer, _ = _cheapest(rows, columns // layers, count, threads)
    return calls + folding + fewer + _time(rows, candidates, 1, count, threads)


def _time_of_topk(rows: int, columns: int, count: int, threads: int) -> float:
    """The same for `torch.topk`, which keeps a heap if the columns are many, and otherwise partitions them."""
    each = 0.7 * columns + 100.0 * count if columns >= 64 * count else 6.0 * columns + 20.0 * count + 50.0
    return tuning.CALL + _at_once(rows, columns, each, threads)


def _time_of_maxima(rows: int, columns: int, count: int, threads: int) -> float:
    """The same for maxima."""
    of_rows = _at_once(rows, columns, (0.6 + 0.13 * count) * columns, threads)
    return 4 * count * tuning.CALL + of_rows + 4.0 * count * rows


def _at_once(rows: int, columns: int, each: float, threads: int) -> float:
    """The time of an operation that takes so long for each row: torch divides only large ones among threads."""
    return rows * each / (threads if rows * columns > tuning.MIN_DIVIDED else 1)

"""Cuts a strip into pieces: scores of some rows of some heads, few enough to stay in a core's cache."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.strips import tuning
from regard.matmul import onednn_is_faster
from regard.numerics import wide


class Piece(NamedTuple):
    """Some scores of a strip.

    Attributes:
        by_query: per-query tensors [stack, group, rows, ...]; a group is the heads that share a kv head.
        key, value: [stack, keys, size] of each span of keys.
        to_key: other per-key tensors [stack, keys, ...].
        tiles: numbers to add to the scores, broadcastable to [stack, group, rows, keys].
        space: a buffer for scores.
        batch, heads: place in the strip (batch only with `apart`).
        rows: which queries. keys: how many keys. columns: the number to which they are filled up with zeros.
    """

    by_query: list[Tensor]
    key: list[Tensor]
    value: list[Tensor]
    to_key: list[Tensor]
    tiles: list[Tensor]
    space: Tensor
    batch: int
    heads: slice
    rows: slice
    keys: int
    columns: int


class Space:
    """Memory for scores, used by one piece after another in all strips of a pass: new memory is slow at first."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None

    def of(self, like: Tensor, *shape: int) -> Tensor:
        """A tensor with whatever the memory holds."""
        size, dtype = math.prod(shape), wide(like.dtype)
        if self._numbers is None or self._numbers.numel() < size:
            self._numbers = like.new_empty(size, dtype=dtype)
        return self._numbers[:size].view(shape)


def pieces(
    by_query: Sequence[Tensor],
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    to_key: Sequence[Tensor],
    tiles: Sequence[Tensor],
    *,
    space: Space,
    causal: bool,
    spaces: int,
    apart: bool,
    until: Callable[[int], int],
    fills: bool,
) -> Iterator[Piece]:
    """The pieces of a strip, each with at most `scores_at_a_time` scores, unless one head's rows have more.

    Args:
        key, value: those of each span, one after another.
        until: to how many columns a number of keys is filled up; queries likewise, if it `fills` them.
        spaces: numbers per score. apart: take batch indices one by one, and report which.
        others: as in `Piece`, for the whole strip.
    """
    batch, heads, queries = by_query[0].shape[:3]
    kv_heads, keys = key[0].shape[1], sum(part.shape[2] for part in key)
    group = heads // kv_heads
    if not queries or not keys or not batch:
        return
    by_query = [tensor.unflatten(1, (kv_heads, group)) for tensor in by_query]
    tiles = [tile.expand(batch, heads, queries, keys).unflatten(1, (kv_heads, group)) for tile in tiles]
    by_key = [*key, *value, *to_key]
    dtype = by_query[0].dtype
    height, at_a_time, least = (until if fills else int), scores_at_a_time(dtype, fills), tuning.PIECE_QUERIES
    rows = rows_of_square(keys, group, dtype) if causal else rows_at_a_time(queries, keys, group, dtype)
    if fills and not causal:  # a rest is filled up, and need not be cut
        least = rows = queries if height(group * queries) * until(keys) <= at_a_time else rows
    most = max(at_a_time, height(group * min(rows, queries)) * until(keys))
    room = space.of(by_query[0], spaces, most)
    for start, stop in blocks(queries, rows, least):
        keys = stop if causal else keys
        tensors = [tensor[:, :, :, start:stop] for tensor in by_query]
        tensors += [tensor[:, :, :keys] for tensor in by_key] + [tile[:, :, :, start:stop, :keys] for tile in tiles]
        together = max(1, at_a_time // (height(group * (stop - start)) * until(keys)))
        for index, stack in stacks(tensors, apart):
            equal = -(-len(stack[0]) // -(-len(stack[0]) // together))
            for at in range(0, len(stack[0]), equal):
                piece = iter([tensor[at : at + equal] for tensor in stack])
                of_query, of_key, of_value, of_grads = (
                    [*islice(piece, len(part))] for part in (by_query, key, value, to_key)
                )
                yield Piece(
                    of_query,
                    of_key,
                    of_value,
                    of_grads,
                    [*piece],
                    room,
                    index,
                    slice(at * group, (at + len(of_query[0])) * group),
                    slice(start, stop),
                    keys,
                    until(keys),
                )


def stacks(tensors: list[Tensor], apart: bool) -> Iterator[tuple[int, list[Tensor]]]:
    """Batch and heads as one axis, in either order, without a copy: if strides do not allow it, one batch index or head
    at a time.

    Args:
        apart: take batch indices one by one, and report which.
    """
    batch, heads = tensors[0].shape[:2]
    if not apart and batch > 1:
        if heads == 1:
            yield 0, [tensor[:, 0] for tensor in tensors]
            return
        if all(tensor.stride(0) == heads * tensor.stride(1) for tensor in tensors):
            yield 0, [tensor.flatten(0, 1) for tensor in tensors]
            return
        if all(tensor.stride(1) == batch * tensor.stride(0) for tensor in tensors):  # equal parts of all heads' texts
            yield 0, [tensor.transpose(0, 1).flatten(0, 1) for tensor in tensors]
            return
        if heads < batch:
            for head in range(heads):
                yield 0, [tensor[:, head] for tensor in tensors]
            return
    for row in range(batch):
        yield row, [tensor[row] for tensor in tensors]


def scores_at_a_time(dtype: torch.dtype, fills: bool = False) -> int:
    """Most scores of a piece, for a call in a dtype."""
    of_thread = tuning.PIECE_SCORES_BY_ONEDNN << fills if onednn_is_faster(dtype) else tuning.PIECE_SCORES
    return of_thread * min(torch.get_num_threads(), tuning.MAX_PIECE_THREADS)


def rows_at_a_time(queries: int, keys: int, group: int, dtype: torch.dtype) -> int:
    """Queries of each head in a piece, if `group` heads share a kv head: a power of two, for few different shapes."""
    most = scores_at_a_time(dtype) // (max(1, keys) * group)
    return _power_of_two(max(tuning.PIECE_QUERIES, min(queries, most)))


def rows_of_square(length: int, group: int, dtype: torch.dtype) -> int:
    """The same for a causal square."""
    if not onednn_is_faster(dtype):
        return tuning.SQUARE_QUERIES
    least, most = tuning.SQUARE_QUERIES_BY_ONEDNN.start, tuning.SQUARE_QUERIES_BY_ONEDNN.stop
    rows = min(max(length // 8, least), most, 2 * scores_at_a_time(dtype) // (max(1, length) * group))
    return _power_of_two(max(rows, tuning.PIECE_QUERIES))


def _power_of_two(number: int) -> int:
    """The largest that is not above a number."""
    return 1 << number.bit_length() - 1


def blocks(length: int, rows: int, least: int = tuning.PIECE_QUERIES) -> Iterator[tuple[int, int]]:
    """(start, stop) of successive blocks of rows; the rest in halves, halves of halves and so on, down to `least`."""
    start = 0
    while start < length:
        while start + rows > length and rows > least:
            rows //= 2
        yield start, min(start + rows, length)
        start += rows

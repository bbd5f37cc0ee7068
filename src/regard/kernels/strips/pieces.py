"""Cuts a strip into pieces: scores of some rows of some heads, few enough to stay in a core's cache."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.strips import tuning
from regard.matmul import onednn_is_faster, regular
from regard.numerics import upcast


class Piece(NamedTuple):
    """Some scores of a strip.

    Attributes:
        by_query: per-query tensors [stack, group, rows, ...]; a group is the heads that share a kv head.
        by_key: per-key tensors [stack, keys, ...].
        tiles: numbers to add to the scores, broadcastable to [stack, group, rows, keys].
        space: a buffer for scores.
        batch, heads: place in the strip (batch only with `apart`).
        rows: which queries.
    """

    by_query: list[Tensor]
    by_key: list[Tensor]
    tiles: list[Tensor]
    space: Tensor
    batch: int
    heads: slice
    rows: slice


def pieces(
    by_query: Sequence[Tensor],
    by_key: Sequence[Tensor],
    tiles: Sequence[Tensor],
    *,
    causal: bool,
    spaces: int,
    apart: bool,
    padded: bool = False,
) -> Iterator[Piece]:
    """The pieces of a strip, each with at most `scores_at_a_time` scores, unless one head's rows have more.

    Args:
        padded: whether the first two per-key tensors have a regular number of keys, and so shall those of a piece; all
            other tensors end with the last key.
        spaces: numbers per score in the buffer. apart: take batch indices one by one, and report which.
        others: as in `Piece`, for the whole strip.
    """
    batch, heads, queries = by_query[0].shape[:3]
    kv_heads, keys = by_key[0].shape[1:3]
    group = heads // kv_heads
    if not queries or not keys or not batch:
        return
    by_query = [tensor.unflatten(1, (kv_heads, group)) for tensor in by_query]
    tiles = [tile.expand(batch, heads, queries, -1).unflatten(1, (kv_heads, group)) for tile in tiles]
    rows = rows_of_square(keys, group) if causal else rows_at_a_time(queries, keys, group)
    most = max(scores_at_a_time(), group * min(rows, queries) * keys)
    space = by_query[0].new_empty(spaces, most, dtype=upcast(by_query[0][:0]).dtype)
    for start, stop in blocks(queries, rows):
        if causal:
            keys = regular(stop) if padded else stop
        tensors = [tensor[:, :, :, start:stop] for tensor in by_query] + [tensor[:, :, :keys] for tensor in by_key]
        tensors += [tile[:, :, :, start:stop, :keys] for tile in tiles]
        together = max(1, scores_at_a_time() // (group * (stop - start) * keys))
        for index, stack in stacks(tensors, apart):
            for at in range(0, len(stack[0]), together):
                piece = [tensor[at : at + together] for tensor in stack]
                yield Piece(
                    piece[: len(by_query)],
                    piece[len(by_query) : len(by_query) + len(by_key)],
                    piece[len(by_query) + len(by_key) :],
                    space,
                    index,
                    slice(at * group, (at + len(piece[0])) * group),
                    slice(start, stop),
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


def scores_at_a_time() -> int:
    """Most scores of a piece."""
    of_thread = tuning.PIECE_SCORES_BY_ONEDNN if onednn_is_faster() else tuning.PIECE_SCORES
    return of_thread * min(torch.get_num_threads(), tuning.MAX_PIECE_THREADS)


def rows_at_a_time(queries: int, keys: int, group: int) -> int:
    """Queries of each head in a piece, if `group` heads share a kv head: a power of two, for few different shapes."""
    return _power_of_two(max(tuning.PIECE_QUERIES, min(queries, scores_at_a_time() // (max(1, keys) * group))))


def rows_of_square(length: int, group: int) -> int:
    """The same for a causal square."""
    if not onednn_is_faster():
        return tuning.PIECE_QUERIES
    least, most = tuning.SQUARE_QUERIES_BY_ONEDNN.start, tuning.SQUARE_QUERIES_BY_ONEDNN.stop
    rows = min(max(length // 8, least), most, 2 * scores_at_a_time() // (max(1, length) * group))
    return _power_of_two(max(rows, tuning.PIECE_QUERIES))


def _power_of_two(number: int) -> int:
    """The largest that is not above a number."""
    return 1 << number.bit_length() - 1


def blocks(length: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of successive blocks of rows; the rest in halves, halves of halves and so on, down to
    `PIECE_QUERIES`."""
    start = 0
    while start < length:
        while start + rows > length and rows > tuning.PIECE_QUERIES:
            rows //= 2
        yield start, min(start + rows, length)
        start += rows

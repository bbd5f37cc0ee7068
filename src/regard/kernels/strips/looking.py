"""Statistics of the weights by the compiled library, and lse without an output.

Blocks of scores are computed as for attention, and each statistic adds up what it needs of them while they are in the
cache. Sums over queries are added up by one thread for each kv head, or by several, each with its own numbers.
"""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.strips import native, tuning
from regard.kernels.strips.binding import StatisticOf, TensorAt
from regard.kernels.strips.dealing import chunks_of
from regard.kernels.strips.order import orders_of
from regard.scores import Scoring


class Kind(IntEnum):
    """What is computed of weights w, as in c/call.h, and the shape of its numbers after [batch, heads]."""

    ENTROPY = 0
    """sum_j w log2 w: [query_len]."""
    RECEIVED = 1
    """sum_i w: [key_len]."""
    TOP = 2
    """The n largest, largest first: [query_len, n]."""
    PIXEL_SUMS = 3
    """Sums over so many queries and keys each: [rows, columns]."""
    PIXEL_MAXIMA = 4
    """The largest of so many."""


class Wanted(NamedTuple):
    """A statistic, and zeros that become its numbers.

    Attributes:
        keys: of `TOP`: int64, the key of each number; left as they are where fewer weights are above 0.
        pixel: of images: queries and keys of a pixel.
    """

    kind: Kind
    numbers: Tensor
    keys: Tensor | None = None
    pixel: tuple[int, int] = (1, 1)


def as_call(query: Tensor, key: Tensor, scoring: Scoring) -> Call:
    """A call whose weights are looked at, without values."""
    return Call(query, key, key, scoring, None, wants_lse=True)


def look(
    call: Call,
    lse: Tensor,
    wanted: Sequence[Wanted] = (),
    *,
    knows_lse: bool = False,
    queries: range | None = None,
    progress: Callable[[int, int], None] = lambda done, all: None,
) -> None:
    """Computes statistics of a call that `native` supports.

    Args:
        lse: [batch, heads, query_len], contiguous, in float32 or wider; written if it is not known.
        queries: those of which lse is wanted, without statistics, and perhaps others beside them; None for all.
        progress: called with the parts done, and all; they take about equally long.
    """
    query, key, value, scoring, _, _ = call
    every = queries is None or len(queries) == query.shape[2]
    plan = native.plan_of(call, sorts=every)  # some queries would be everywhere among sorted ones
    orders = orders_of(query, key, value, scoring.sink, scoring, None, plan)
    stacks = query.shape[0] * key.shape[1]
    chunks = chunks_of(stacks, query.shape[2], torch.get_num_threads(), 2 * orders[0].compiled.lanes)
    sums = [_sums(statistic, chunks) for statistic in wanted]
    told = (StatisticOf * len(wanted))(*map(_told, wanted, sums))
    passes = [(knows_lse, len(wanted))]
    if plan.others and wanted and not knows_lse:  # which is that of all keys
        passes = [(False, 0), (True, len(wanted))]
    parts = max(1, native.num_scores(call, plan) // (tuning.SCORES_BETWEEN_REPORTS * torch.get_num_threads()))
    done = 0
    for knows_lse, statistics in passes:
        for order in orders:
            order.deal(chunks)
            order.numbers("lse", lse)
            order.number("knows_lse", knows_lse)
            if queries is not None:
                order.number("first_query", queries.start)
                order.number("last_query", queries.stop - 1)
            order.number("statistic", ctypes.addressof(told))
            order.number("statistics", statistics)
            order.number("parts", parts)
            for part in range(parts):
                order.number("part", part)
                order.run(order.compiled.look, goes_on=order is not orders[0])
                done += 1
                progress(done, parts * len(orders) * len(passes))
    for statistic, of_chunks in zip(wanted, sums, strict=True):
        if of_chunks is not statistic.numbers:
            total = of_chunks.amax(0) if statistic.kind is Kind.PIXEL_MAXIMA else of_chunks.sum(0)
            statistic.numbers.copy_(total)


def _sums(wanted: Wanted, chunks: int) -> Tensor:
    """Where a statistic is added up: a part for each thread, if several have to do with the same number."""
    numbers = wanted.numbers
    if wanted.kind is Kind.RECEIVED:  # of very many queries
        return numbers.new_zeros((chunks, *numbers.shape), dtype=torch.float64)
    if wanted.kind in (Kind.PIXEL_SUMS, Kind.PIXEL_MAXIMA) and chunks > 1:
        return numbers.new_zeros((chunks, *numbers.shape))
    return numbers


def _told(wanted: Wanted, sums: Tensor) -> StatisticOf:
    """A statistic as the library reads it."""
    numbers = wanted.numbers if sums is wanted.numbers else sums[0]
    chunk = 0 if sums is wanted.numbers else sums.stride(0)
    keys = None if wanted.keys is None else wanted.keys.data_ptr()
    at = TensorAt(numbers.data_ptr(), *numbers.stride()[:3])
    return StatisticOf(wanted.kind, at, chunk, keys, numbers.shape[-1], *wanted.pixel)

"""One query by the compiled library, for calls that are alike but for their numbers and how many keys there are.

So it is in writing token by token: what the library is told is made once, and the tensors it reads itself.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.fused import HALF
from regard.kernels.hidden import Hidden, numbers_added
from regard.kernels.strips import tuning
from regard.kernels.strips.binding import DONE, DTYPES, FAR, OneOf
from regard.kernels.strips.intervals import library
from regard.kernels.strips.order import as_read, library_for, sink_as_read
from regard.masks.planning import EVERY_DIAGONAL, Alternative, Diagonals
from regard.numerics import wide


class _Interval(NamedTuple):
    """Which keys are seen, as the library is told: at this address, where the first of each text are, the ends, and how
    far apart those of texts and of queries are."""

    at: int
    held: object


def _told(allowed: Tensor) -> _Interval | None:
    """None if the keys that are seen are not side by side, or others for each head, or not told one by one."""
    rows, heads, _, keys = allowed.shape
    if heads > 1 or keys == 1:
        return None
    if allowed.stride(3) != 1:
        allowed = allowed.contiguous()
    first_and_end = array("i", bytes(8 * rows))
    first, _ = first_and_end.buffer_info()
    end = first + 4 * rows
    side_by_side = library().find_keys(allowed.data_ptr(), rows, keys, allowed.stride(0), first, end)
    words = array("q", (first, end, rows > 1, 0))
    return _Interval(words.buffer_info()[0], (words, first_and_end)) if side_by_side else None


def is_told(hidden: Hidden) -> bool:
    """Whether the library is told which keys are seen, and leaves the others out."""
    return hidden.kept("interval", _told) is not None


Alone = Callable[[Tensor, Tensor, Tensor, Tensor | None, Hidden | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""A `Single` that takes what is hidden out of the result itself."""


def told_of_one(call: Call, diagonals: Diagonals = EVERY_DIAGONAL, alternatives: Sequence[Alternative] = ()) -> OneOf:
    """What the library is told of such calls; of more queries, too, if nothing but these diagonals tells what each
    sees: counted from its own key, where the last of them has the last; or these alternatives."""
    (batch, heads, rows, size), kv_heads = call.query.shape, call.key.shape[1]
    told = OneOf(has_lse=call.wants_lse, has_sink=call.scoring.sink is not None)
    told.call.batches, told.call.heads, told.call.kv_heads = batch, heads, kv_heads
    told.call.query_len, told.call.head_dim, told.call.value_dim = rows, size, call.value.shape[3]
    told.call.dtype, told.call.scale = DTYPES[call.query.dtype], call.scoring.scale
    told.call.softcap, told.call.strips = call.scoring.softcap or 0.0, 1
    told.strip.batch, told.strip.times, told.strip.step, told.strip.count, told.strip.spans = -1, 1, 1, rows, 1
    low, high = diagonals
    told.span.step, told.span.low, told.span.high = 1, -FAR if low is None else low, FAR if high is None else high
    told.alternatives = len(alternatives)
    for to, one in zip(told.alternative, alternatives, strict=False):
        to.low, to.high = (-FAR if one.low is None else one.low), (FAR if one.high is None else one.high)
        to.since, to.until = one.since or 0, (FAR if one.until is None else one.until)
        to.step, to.chunk = one.step, one.chunk or 0
    told.alone = tuning.NUMBERS_OF_A_THREAD // max(1, batch * kv_heads * size) if rows == 1 else 0
    return told


def single(call: Call) -> Alone | None:
    """A function of query, key, value, sink, what is hidden, and a bias, in which nothing that is hidden has a part.

    None where gradients are wanted.
    """
    if not call.inspectable:
        return None
    (batch, heads, rows, size), dtype = call.query.shape, wide(call.query.dtype)
    shape, library, wants_lse = (batch, heads, rows, call.value.shape[3]), library_for(dtype), call.wants_lse
    told = told_of_one(call)

    def attend_one(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, hidden: Hidden | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_neg() or key.is_neg() or value.is_neg():
            query, key, value = as_read(query), as_read(key), as_read(value)
        alike = shape[3] == size and query.is_contiguous()
        output = torch.empty_like(query) if alike else query.new_empty(shape)  # the first takes half the time
        tensors: tuple[Tensor, ...] = query, key, value, output
        lse, within = None, None
        if wants_lse:
            lse = query.new_empty(shape[:3], dtype=dtype)
            tensors += (lse,)
        if sink is not None:
            tensors += (sink_as_read(sink, dtype),)
        if hidden is not None:
            within = hidden.kept("interval", _told)
            if within is None:
                bias = numbers_added(hidden, bias, dtype)
        if bias is not None:
            tensors += (_bias_as_read(bias, dtype),)
        threads, seen = torch.get_num_threads(), None if within is None else within.at
        if library.one(ctypes.addressof(told), threads, seen, tensors) != DONE:
            return attend_one(as_read(query), as_read(key), as_read(value), sink, hidden, bias)
        return output, lse

    return attend_one


def _bias_as_read(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores as the library reads it, or a copy."""
    bias = bias if bias.dtype is dtype or bias.dtype in HALF else bias.to(dtype)
    return bias.resolve_neg() if bias.is_neg() else bias

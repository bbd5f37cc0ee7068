"""One query by the compiled library, for calls that are alike but for their numbers and how many keys there are.

So it is in writing token by token: what the library is told is made once, and only what changes is filled in.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.fused import HALF
from regard.kernels.hidden import Hidden, numbers_added
from regard.kernels.strips import tuning
from regard.kernels.strips.binding import DTYPES, FAR, CallOf, SpanOf, StripOf, TileAt
from regard.kernels.strips.intervals import Interval, of_one_query
from regard.kernels.strips.order import as_read, library_for
from regard.numerics import wide


class _Told(ctypes.Structure):
    """A call of one strip, of one span, with one tile or none."""

    _fields_ = (("call", CallOf), ("strip", StripOf), ("span", SpanOf), ("tile", TileAt))


_WORDS = ctypes.c_int64 * (ctypes.sizeof(_Told) // 8)


def _at(part: str, field: str) -> int:
    kind = dict(_Told._fields_)[part]
    return int(getattr(_Told, part).offset + getattr(kind, field).offset) // 8


_KEY_LEN, _THREADS, _SINK = _at("call", "key_len"), _at("call", "threads"), _at("call", "sink")
_STRIP, _COUNT, _TILES = _at("call", "strip"), _at("span", "count"), _at("span", "tiles")
_FIRST_KEY = _at("call", "first_key")
_LSE = _at("call", "lse")
_NUMBERS, _SUSPECT, _CAREFUL = _at("tile", "numbers"), _at("call", "suspect"), _at("call", "careful")


class _Interval(NamedTuple):
    """Which keys are seen, as the library is told: where the first of each text are, the ends, and how far apart."""

    words: list[ctypes.c_int64 | int]
    held: Interval


def _told(allowed: Tensor) -> _Interval | None:
    interval = of_one_query(allowed)
    if interval is None:
        return None
    return _Interval([interval.first.data_ptr(), interval.end.data_ptr(), len(interval.first) > 1], interval)


def is_told(hidden: Hidden) -> bool:
    """Whether the library is told which keys are seen, and leaves the others out."""
    return hidden.kept("interval", _told) is not None


Alone = Callable[[Tensor, Tensor, Tensor, Tensor | None, Hidden | None, Tensor | None], tuple[Tensor, Tensor | None]]
"""A `Single` that takes what is hidden out of the result itself."""


def single(call: Call) -> Alone | None:
    """A function of query, key, value, sink, what is hidden, and a bias, in which nothing that is hidden has a part.

    None where gradients are wanted.
    """
    if not call.inspectable:
        return None
    (batch, heads, rows, size), dtype = call.query.shape, wide(call.query.dtype)
    shape, library, wants_lse = (batch, heads, rows, call.value.shape[3]), library_for(dtype), call.wants_lse
    told = _Told()
    told.call.batches, told.call.heads, told.call.kv_heads = batch, heads, call.key.shape[1]
    told.call.query_len, told.call.head_dim, told.call.value_dim = rows, size, shape[3]
    told.call.dtype, told.call.scale = DTYPES[call.query.dtype], call.scoring.scale
    told.call.softcap, told.call.strips, told.call.threads = call.scoring.softcap or 0.0, 1, 1
    told.strip.batch, told.strip.times, told.strip.step, told.strip.count, told.strip.spans = -1, 1, 1, rows, 1
    told.span.step, told.span.low, told.span.high = 1, -FAR, FAR
    strip, span, tile = (getattr(_Told, part).offset for part in ("strip", "span", "tile"))
    known, of_output = bytes(told), (heads * rows * shape[3], rows * shape[3], shape[3])
    alone = tuning.NUMBERS_OF_A_THREAD // max(1, batch * call.key.shape[1] * size)

    def attend_one(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, hidden: Hidden | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        together = of_query[3] == of_key[3] == of_value[3] == 1
        if not together or query.is_neg() or key.is_neg() or value.is_neg():
            query, key, value = as_read(query), as_read(key), as_read(value)
            of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        alike = shape[3] == size and query.is_contiguous()
        output = torch.empty_like(query) if alike else query.new_empty(shape)  # the first takes half the time
        words = _WORDS.from_buffer_copy(known)
        words[:16] = [
            query.data_ptr(), *of_query[:3], key.data_ptr(), *of_key[:3],
            value.data_ptr(), *of_value[:3], output.data_ptr(), *of_output,
        ]  # fmt: skip
        first, key_len = ctypes.addressof(words), key.shape[2]
        words[_STRIP : _STRIP + 3] = [first + strip, first + span, first + tile]
        words[_COUNT] = words[_KEY_LEN] = key_len
        if key_len > alone:
            words[_THREADS] = torch.get_num_threads()
        lse = query.new_empty(shape[:3], dtype=dtype) if wants_lse else None
        if lse is not None:
            words[_LSE] = lse.data_ptr()
        if sink is not None:
            sink = sink.to(dtype).contiguous()
            words[_SINK] = sink.data_ptr()
        if hidden is not None:
            within = hidden.kept("interval", _told)
            if within is None:
                bias = numbers_added(hidden, bias, dtype)
            else:
                words[_FIRST_KEY : _FIRST_KEY + 3] = within.words
        if bias is not None:
            bias = (bias if bias.dtype in HALF else bias.to(dtype)).resolve_neg()
            apart, sizes = bias.stride(), bias.shape  # where one number serves all, it is read again and again
            words[_TILES] = 1
            words[_NUMBERS : _NUMBERS + 6] = [
                bias.data_ptr(), DTYPES[bias.dtype],
                apart[0] * (sizes[0] > 1), apart[1] * (sizes[1] > 1), 0, apart[3] * (sizes[3] > 1),
            ]  # fmt: skip
        library.forward(words)
        if bias is not None and words[_SUSPECT]:  # a hidden key may have had a part
            words[_CAREFUL] = 1
            library.forward(words)
        return output, lse

    return attend_one

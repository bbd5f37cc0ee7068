"""One query by the compiled library, for calls that are alike but for their numbers and how many keys there are.

So it is in writing token by token: what the library is told is made once, and only what changes is filled in.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.fused import HALF
from regard.kernels.hidden import Hidden, numbers_added
from regard.kernels.strips import tuning
from regard.kernels.strips.binding import DTYPES, FAR, CallOf, SpanOf, StripOf, TensorAt, TileAt, Told
from regard.kernels.strips.intervals import library
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

_tell = struct.Struct("Q3qQ3qQ3qQ").pack_into
"""Writes where query, key, value and output lie; faster than word by word."""


class _Interval(NamedTuple):
    """Which keys are seen, as the library is told: where the first of each text are, the ends, and how far apart."""

    words: list[ctypes.c_int64 | int]
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
    return _Interval([first, end, rows > 1], first_and_end) if side_by_side else None


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
    shape, forward, wants_lse = (batch, heads, rows, call.value.shape[3]), library_for(dtype).forward, call.wants_lse
    told = _Told()
    told.call.batches, told.call.heads, told.call.kv_heads = batch, heads, call.key.shape[1]
    told.call.query_len, told.call.head_dim, told.call.value_dim = rows, size, shape[3]
    told.call.output = TensorAt(None, heads * rows * shape[3], rows * shape[3], shape[3])
    told.call.dtype, told.call.scale = DTYPES[call.query.dtype], call.scoring.scale
    told.call.softcap, told.call.strips = call.scoring.softcap or 0.0, 1
    told.strip.batch, told.strip.times, told.strip.step, told.strip.count, told.strip.spans = -1, 1, 1, rows, 1
    told.span.step, told.span.low, told.span.high = 1, -FAR, FAR
    known = bytes(told)
    alone = tuning.NUMBERS_OF_A_THREAD // max(1, batch * call.key.shape[1] * size)
    rooms: list[tuple[Told, int]] = []  # one for each thread of Python that has been here at once

    def attend_one(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, hidden: Hidden | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        if not of_query[3] == of_key[3] == of_value[3] == 1 or query.is_neg() or key.is_neg() or value.is_neg():
            query, key, value = as_read(query), as_read(key), as_read(value)
            of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        alike = shape[3] == size and query.is_contiguous()
        output = torch.empty_like(query) if alike else query.new_empty(shape)  # the first takes half the time
        try:
            words, at = rooms.pop()
        except IndexError:
            words, at = _room(known)
        _tell(
            words, 0, query.data_ptr(), *of_query[:3], key.data_ptr(), *of_key[:3],
            value.data_ptr(), *of_value[:3], output.data_ptr(),
        )  # fmt: skip
        words[_COUNT] = words[_KEY_LEN] = key_len = key.shape[2]
        words[_THREADS] = 1 if key_len <= alone else torch.get_num_threads()
        lse = query.new_empty(shape[:3], dtype=dtype) if wants_lse else None
        if lse is not None:
            words[_LSE] = lse.data_ptr()
        if sink is not None:
            sink = sink.to(dtype).contiguous()
            words[_SINK] = sink.data_ptr()
        if hidden is None and bias is None:
            forward(at)
        else:
            held = _tell_added(words, hidden, bias, dtype)
            forward(at)
            if words[_TILES] and words[_SUSPECT]:  # a hidden key may have had a part
                words[_CAREFUL] = 1
                forward(at)
            words[_FIRST_KEY] = words[_TILES] = words[_CAREFUL] = 0
            del held
        rooms.append((words, at))
        return output, lse

    return attend_one


def _room(known: bytes) -> tuple[Told, int]:
    """What the library is told, and where that is."""
    words = _WORDS.from_buffer_copy(known)
    at = ctypes.addressof(words)
    words[_STRIP : _STRIP + 3] = [at + getattr(_Told, part).offset for part in ("strip", "span", "tile")]
    return words, at


def _tell_added(words: Told, hidden: Hidden | None, bias: Tensor | None, dtype: torch.dtype) -> object:
    """Tells what is hidden and what is added; returns what must not be freed before the library is done."""
    within = None
    if hidden is not None:
        within = hidden.kept("interval", _told)
        if within is None:
            bias = numbers_added(hidden, bias, dtype)
        else:
            words[_FIRST_KEY : _FIRST_KEY + 3] = within.words
    if bias is not None:
        if bias.dtype is not dtype and bias.dtype not in HALF:
            bias = bias.to(dtype)
        if bias.is_neg():
            bias = bias.resolve_neg()
        apart, sizes = bias.stride(), bias.shape  # where one number serves all, it is read again and again
        words[_TILES], words[_SUSPECT] = 1, 0
        words[_NUMBERS : _NUMBERS + 6] = [
            bias.data_ptr(), DTYPES[bias.dtype],
            apart[0] * (sizes[0] > 1), apart[1] * (sizes[1] > 1), 0, apart[3] * (sizes[3] > 1),
        ]  # fmt: skip
    return within, bias

"""One query by the compiled library, at once: the strip of a call that is like an earlier one but for its numbers and
for how many keys there are, as in writing token by token."""

import ctypes

import torch
from torch import Tensor

from regard.kernels.call import Call, Single
from regard.kernels.strips import tuning
from regard.kernels.strips.binding import DTYPES, CallOf, SpanOf, StripOf, TileAt
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
_NUMBERS = _at("tile", "numbers")


def single(call: Call) -> Single | None:
    """A function of query, key, value, sink and what is added; None where gradients or lse are wanted."""
    if not call.inspectable or call.wants_lse:
        return None
    (batch, heads, rows, size), dtype = call.query.shape, wide(call.query.dtype)
    shape, library = (batch, heads, rows, call.value.shape[3]), library_for(dtype)
    told = _Told()
    told.call.batches, told.call.heads, told.call.kv_heads = batch, heads, call.key.shape[1]
    told.call.query_len, told.call.head_dim, told.call.value_dim = rows, size, shape[3]
    told.call.dtype, told.call.scale = DTYPES[call.query.dtype], call.scoring.scale
    told.call.softcap, told.call.strips, told.call.threads = call.scoring.softcap or 0.0, 1, 1
    told.strip.batch, told.strip.times, told.strip.step, told.strip.count, told.strip.spans = -1, 1, 1, rows, 1
    told.span.step = 1
    strip, span, tile = (getattr(_Told, part).offset for part in ("strip", "span", "tile"))
    known, of_output = bytes(told), (heads * rows * shape[3], rows * shape[3], shape[3])
    alone = tuning.NUMBERS_OF_A_THREAD // max(1, batch * call.key.shape[1] * size)

    def attend_one(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, added: Tensor | None) -> Tensor:
        query, key, value = as_read(query), as_read(key), as_read(value)
        told = _Told.from_buffer_copy(known)
        words, output = _WORDS.from_buffer(told), query.new_empty(shape)
        of_key = key.stride()
        words[:16] = [
            query.data_ptr(), *query.stride()[:3], key.data_ptr(), *of_key[:3],
            value.data_ptr(), *value.stride()[:3], output.data_ptr(), *of_output,
        ]  # fmt: skip
        first, key_len = ctypes.addressof(told), key.shape[2]
        words[_STRIP : _STRIP + 3] = [first + strip, first + span, first + tile]
        words[_COUNT] = words[_KEY_LEN] = key_len
        if key_len > alone:
            words[_THREADS] = torch.get_num_threads()
        if sink is not None:
            sink = sink.to(dtype).contiguous()
            words[_SINK] = sink.data_ptr()
        if added is not None:
            added = added.to(dtype)
            strides = zip(added.stride(), added.shape, strict=True)
            words[_TILES] = 1
            words[_NUMBERS : _NUMBERS + 5] = [added.data_ptr(), *(by if size > 1 else 0 for by, size in strides)]
        library.forward(told.call)
        return output

    return attend_one

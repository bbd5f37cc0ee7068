"""Calls by the compiled library that are alike but for their tensors, without gradients: what it is told is made once.

Between the layers of a model, Python's own objects leave the processor's caches: what takes 20 us in a loop of small
calls takes 200 there. So as little as possible is looked at here. Whatever else a call may need takes the general way.
"""

import torch
from torch import Tensor

from regard.biases import Bias
from regard.kernels.call import Call, Prepared
from regard.kernels.strips.binding import AT, Words
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.order import Order, laid_like, library_for
from regard.numerics import wide
from regard.scores import Scoring

_THREADS, _SINK, _LSE, _SUSPECT = (AT[name] for name in ("threads", "sink", "lse", "suspect"))


def ready(call: Call, scoring: Scoring, plan: StripPlan, general: Prepared) -> Prepared:
    """The call, for other tensors of the same form.

    Args:
        scoring: without sink.
        plan: of calls of this form alone.
        general: computes any call.
    """
    dtype, library, wants_lse = wide(call.query.dtype), library_for(call.query.dtype), call.wants_lse
    forward, of_lse, size = library.forward, call.query.shape[:3], call.value.shape[3]
    laid = _layouts(*call.query.shape) if size == call.query.shape[3] else ()
    told: bytes | None = None
    held: object = None

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        nonlocal told, held
        of_query, of_key, of_value = query.stride(), key.stride(), value.stride()
        as_they_are = of_query[3] == of_key[3] == of_value[3] == 1
        if told is None or not as_they_are or query.is_neg() or key.is_neg() or value.is_neg():
            results = general(query, key, value, sink, bias)
            if told is None:
                order = Order(query, key, value, None, scoring, None, plan)
                held, told = order.of_form()
            return results
        output = torch.empty_like(query) if of_query in laid else laid_like(query, size)
        words = Words.from_buffer_copy(told)
        words[:16] = [
            query.data_ptr(), *of_query[:3], key.data_ptr(), *of_key[:3], value.data_ptr(), *of_value[:3],
            output.data_ptr(), *output.stride()[:3],
        ]  # fmt: skip
        words[_THREADS] = torch.get_num_threads()
        lse = query.new_empty(of_lse, dtype=dtype) if wants_lse else None
        if lse is not None:
            words[_LSE] = lse.data_ptr()
        if sink is not None:
            sink = sink.to(dtype).contiguous()
            words[_SINK] = sink.data_ptr()
        forward(words)
        if words[_SUSPECT]:  # something hidden may have had a part
            return general(query, key, value, sink, bias)
        return output, lse

    return attend


def _layouts(batch: int, heads: int, length: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The two of `laid_like`, which torch keeps by itself, in less time: strides."""
    whole = heads * length * size
    return (whole, length * size, size, 1), (whole, size, heads * size, 1)

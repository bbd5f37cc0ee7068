"""A call on a part of the keys that its queries see: results to be merged, gradients from the result of whole rows.

Both are computed in float32 or wider, whatever the dtype of query, key and value, since they are added to others.
"""

from collections.abc import Sequence
from functools import reduce

from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.strips import engine, options, tuning
from regard.kernels.strips.engines import OPERATORS, added
from regard.kernels.strips.options import plan_of
from regard.matmul import onednn_is_faster
from regard.numerics import upcast, wide

SHORT_STRIP_QUERIES = 16.0
"""As of the options for strips, at least: those tell which heights are cheaper, this how long a part takes beside a
dense call. Row "window 256" of benchmarks/parallel.py with REGARD_MEASURE=0."""


def attend_part(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of these keys alone, without a sink."""
    tensors = upcast(call.query), upcast(call.key), upcast(call.value)
    wide = call._replace(query=tensors[0], key=tensors[1], value=tensors[2], wants_lse=True)
    return OPERATORS.forward(*tensors, None, call.scoring, call.dropout, plan_of(wide))[:2]


def gradients_of_part(
    call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None, *, grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of query, key and value to `grads`; returns those of the learned tensors of the scoring.

    Args:
        output, lse, grad_output, grad_lse: of whole rows: all keys and the sink.
    """
    tensors = upcast(call.query), upcast(call.key), upcast(call.value)
    wide = call._replace(query=tensors[0], key=tensors[1], value=tensors[2], wants_lse=True)
    of_learned = [
        engine.backward(
            *tensors, None, call.scoring, call.dropout, part, *call.scoring.learned(),
            output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse, grads=grads,
        )[4:]
        for part in plan_of(wide).parts
    ]  # fmt: skip
    return tuple(reduce(added, of_one) for of_one in zip(*of_learned, strict=True))


def scores_in_time(call: Call) -> float:
    """The scores of a dense call, over batch and heads, that takes as long as `attend_part` and merging its result.

    More than the mask allows: strips hold hidden scores too, short ones make smaller products than a dense call of all
    these queries does, and each strip takes some time by itself: fewer scores of it where a dense call is slower.
    """
    grid, by = call.scoring.grid, options.options(call)
    heads = grid.batch * grid.heads
    by_itself = tuning.SCORES_PER_STRIP / heads / (1 if onednn_is_faster(wide(call.query.dtype)) else 2)
    short = max(by.short or 0.0, SHORT_STRIP_QUERIES)
    of_strips = options.cost(call, by._replace(short=short, scores_per_call=by_itself, speed=1))
    return of_strips / (1 + short / max(1, grid.query_len)) + heads * tuning.SCORES_PER_RESULT * grid.query_len

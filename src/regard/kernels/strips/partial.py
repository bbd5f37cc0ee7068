"""A call on a part of the keys that its queries see: results to be merged, gradients from the result of whole rows.

Both are computed in float32 or wider, whatever the dtype of query, key and value, since they are added to others.
"""

from collections.abc import Sequence

from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.strips import engine, tuning
from regard.kernels.strips.options import num_scores, options, plan_of
from regard.numerics import upcast


def attend_part(call: Call) -> tuple[Tensor, Tensor]:
    """Output and lse of these keys alone, without a sink."""
    tensors = upcast(call.query), upcast(call.key), upcast(call.value)
    wide = call._replace(query=tensors[0], key=tensors[1], value=tensors[2], wants_lse=True)
    return engine.forward(*tensors, None, call.scoring, call.dropout, plan_of(wide))


def gradients_of_part(
    call: Call, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None, *, grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Adds the gradients of query, key and value to `grads`; returns those of the learned tensors of the scoring.

    Args:
        output, lse, grad_output, grad_lse: of whole rows: all keys and the sink.
    """
    tensors = upcast(call.query), upcast(call.key), upcast(call.value)
    wide = call._replace(query=tensors[0], key=tensors[1], value=tensors[2], wants_lse=True)
    found = engine.backward(
        *tensors, None, call.scoring, call.dropout, plan_of(wide), *call.scoring.learned(),
        output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse, grads=grads,
    )  # fmt: skip
    return found[4:]


def scores_in_time(call: Call) -> float:
    """The scores of a dense call, over batch and heads, that takes as long as `attend_part` and merging its result.

    More than the mask allows: strips hold hidden scores too, short ones make smaller products, and each call of torch's
    operator takes some time by itself.
    """
    grid, by = call.scoring.grid, options(call)
    heads = grid.batch * grid.heads
    cost = sum(
        by.cost(len(strip.queries), num_scores(strip, call) / len(strip.queries) / heads, copied=len(strip.spans) > 1)
        for strip in plan_of(call).strips
        if strip.keys and strip.queries
    )
    return heads * (cost + tuning.SCORES_PER_RESULT * grid.query_len)

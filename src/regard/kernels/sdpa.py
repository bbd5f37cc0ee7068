"""torch's `scaled_dot_product_attention`, where it computes the same as regard's definition.

It has no softcap, no sink and no log-sum-exp, and its dropout is not reproducible; its causal mask is aligned top-left
(regard's offset 0). Any other mask is passed as a tensor of query_len x key_len: exact, but slow. Two things that
torch leaves to the caller are done here: fully masked keys are zeroed, since NaN in them would reach the output, and a
bias is never rounded to a lower precision. A bias that is a finished table is read in place.
"""

import math

from torch import Tensor

from regard.biases import Given
from regard.graphs import exporting, tracing, whole
from regard.kernels.call import Call, Kernel, Prepared, all_scores
from regard.kernels.fused import FLASH, HALF, causal_scores, full_attention
from regard.kernels.hidden import has_nan, hidden_in, hidden_in_call
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal


def cannot(call: Call) -> str | None:
    """Why torch's function does not support a call."""
    scoring = call.scoring
    if call.wants_lse:
        return "torch's scaled_dot_product_attention does not return lse"
    if scoring.additive is not None:
        return "torch's scaled_dot_product_attention has no additive similarity"
    if scoring.softcap is not None:
        return "torch's scaled_dot_product_attention has no softcap"
    if scoring.sink is not None:
        return "torch's scaled_dot_product_attention has no sink"
    if call.dropout is not None:
        return "torch's dropout cannot be reproduced from a seed and indices"
    if scoring.bias is not None and call.query.dtype in HALF and finished_table(call) is None:
        return f"the bias would be rounded to {call.query.dtype}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """One call of torch's function."""
    prepared = prepare(call)
    if prepared is not None:
        return prepared(call.query, call.key, call.value)
    return _with_zeros(call), None


def _with_zeros(call: Call) -> Tensor:
    """The result, with zeros in place of hidden queries, keys and values."""
    scoring, (query, key, value) = call.scoring, call[:3]
    added = None
    if scoring.bias is not None:
        queries, keys = (whole(length, scoring.grid.device) for length in scoring.grid[2:4])
        added = scoring.biases(queries, keys, query.dtype)
    hidden = hidden_in_call(scoring, added)
    if hidden is not None:
        query, key, value = hidden.seeing(query), hidden.seen(key), hidden.seen(value)
        if added is None:
            added = hidden.allowed if tracing() else hidden.numbers(query.dtype)
        else:
            added = added.masked_fill(~hidden.allowed, -math.inf)
    output = full_attention(query, key, value, scale=scoring.scale, attn_mask=added)
    if exporting() and hidden is not None:  # a fully masked row is NaN where the graph will run, but 0 in regard
        output = output.masked_fill(~hidden.allowed.any(dim=-1)[..., None], 0.0)
    return output


def prepare(call: Call) -> Prepared | None:
    """What a mask or a finished table adds is known once, and what it hides is zeroed only if the result is NaN."""
    scoring, scale, table = call.scoring, call.scoring.scale, finished_table(call)
    if scoring.bias is not None and (table is None or not call.inspectable):
        return None
    if scoring.bias is None and is_top_left_causal(scoring.mask):
        seen = min(scoring.grid.query_len, scoring.grid.key_len)  # no query sees later keys

        def attend_causal(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
            if key.shape[2] > seen:
                key, value = key[:, :, :seen], value[:, :, :seen]
            return full_attention(query, key, value, scale=scale, is_causal=True), None

        return attend_causal
    if scoring.mask_or_everything is not EVERYTHING and not call.inspectable:
        return None
    hidden = hidden_in(scoring.mask, scoring.grid)
    added = table if hidden is None else hidden.numbers(call.query.dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        output = full_attention(query, key, value, scale=scale, attn_mask=added)
        if added is not None and has_nan(output):
            output = _with_zeros(Call(query, key, value, scoring))
        return output, None

    return attend


def finished_table(call: Call) -> Tensor | None:
    """The bias, if it is all that is added and torch can read it in place: a number for each query and key, in the
    query's dtype."""
    scoring = call.scoring
    if not isinstance(scoring.bias, Given) or scoring.mask_or_everything is not EVERYTHING:
        return None
    numbers = scoring.bias.numbers
    whole = numbers.shape[2:] == (scoring.grid.query_len, scoring.grid.key_len)
    return numbers if whole and numbers.dtype == call.query.dtype else None


def reads_a_table(call: Call) -> bool:
    """Whether the call is torch's function with a finished table, without a copy of it and without gradients."""
    return call.inspectable and call.query.shape[3] == call.value.shape[3] and finished_table(call) is not None


def num_scores(call: Call) -> int:
    """All of them; of a causal square what torch's fused operator for the CPU leaves in."""
    grid, scoring = call.scoring.grid, call.scoring
    fused = FLASH and grid.device.type == "cpu" and call.query.shape[3] == call.value.shape[3]
    if not fused or scoring.bias is not None or not is_top_left_causal(scoring.mask):
        return all_scores(call)
    return grid.batch * grid.heads * causal_scores(grid.query_len, min(grid.query_len, grid.key_len))


def quadratic_numbers(call: Call) -> int:
    """The mask or bias tensor, unless it is read in place; and all scores where torch cannot use its fused operator."""
    scoring, grid = call.scoring, call.scoring.grid
    if reads_a_table(call):
        return 0
    scores = grid.query_len * grid.key_len
    fused = call.query.shape[-1] == call.value.shape[-1]
    numbers = 0
    if scoring.bias is not None or not (scoring.mask_or_everything is EVERYTHING or is_top_left_causal(scoring.mask)):
        corner = range(min(1, grid.query_len)), range(min(1, grid.key_len))
        parts = [scoring.allowed(*corner)]
        if scoring.bias is not None:
            parts.append(scoring.biases(*corner, call.query.dtype))
        for part in parts:
            if part is not None:
                numbers += scores * part.shape[0] * part.shape[1]
                fused = fused and not part.requires_grad
    return numbers if fused else numbers + 2 * scores * grid.batch * grid.heads


def peak_bytes(call: Call) -> int:
    """The quadratic tensors, and torch's log-sum-exp."""
    grid = call.scoring.grid
    return quadratic_numbers(call) * max(4, call.query.element_size()) + 4 * grid.batch * grid.heads * grid.query_len


KERNEL = Kernel("sdpa", cannot, run, num_scores, quadratic_numbers, peak_bytes, prepare)

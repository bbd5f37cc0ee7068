"""torch's `scaled_dot_product_attention`, where it computes the same as regard's definition.

It has no softcap, no sink and no log-sum-exp, and its dropout is not reproducible; its causal mask is aligned top-left
(regard's offset 0). Any other mask is passed as a tensor of query_len x key_len: exact, but slow. Two things that
torch leaves to the caller are done here: fully masked keys are zeroed, since NaN in them would reach the output, and a
bias is never rounded to a lower precision. A bias that is a finished table is read in place.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.biases import Bias, Given
from regard.graphs import concrete, exporting, tracing, whole
from regard.kernels.call import Call, Kernel, Prepared, Single, all_scores
from regard.kernels.fused import (
    FLASH,
    HALF,
    causal_scores,
    finished_table,
    full_attention,
    prepared,
    reads_a_table,
)
from regard.kernels.hidden import (
    MAX_KEPT_SCORES,
    Hidden,
    harmless,
    has_nan,
    hidden_in_call,
    known_numbers,
    numbers_added,
    table_key,
)
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal
from regard.matmul import onednn_beats_fused
from regard.numerics import wide

MAX_MASKED_KEYS = 256
"""Queries or keys up to which computing all scores costs less than leaving out what a mask hides; more where strips are
slow."""

MIN_STACK = 8
"""Fewest matrices in a stack that strips of plain products are fast at. Row "causal, 3 heads" of features.py."""


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
    rounds = call.query.dtype in HALF and not finished_table(call) and not _by_flash(call)
    if scoring.bias is not None and rounds:
        return f"the bias would be rounded to {call.query.dtype}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """One call of torch's function."""
    at_once = prepare(call)
    if at_once is not None:
        return at_once(call.query, call.key, call.value, None, call.scoring.bias)
    if call.inspectable:
        output = full_attention(*call[:3], scale=call.scoring.scale, attn_mask=_in_full(call)[1])
        if not has_nan(output):
            return output, None
    return _with_zeros(call), None


def _in_full(call: Call) -> tuple[Hidden | None, Tensor | None]:
    """What mask and bias hide, and what they add."""
    scoring, biases = call.scoring, None
    if scoring.bias is not None:
        queries, keys = (whole(length, scoring.grid.device) for length in scoring.grid[2:4])
        biases = scoring.biases(queries, keys, _dtype_of_bias(call))
    hidden = hidden_in_call(scoring, biases)
    if hidden is None:
        return None, biases
    if biases is None:
        return hidden, hidden.allowed if tracing() else hidden.numbers(call.query.dtype)
    return hidden, biases.masked_fill(~hidden.allowed, -math.inf)


def _with_zeros(call: Call) -> Tensor:
    """The result, with zeros in place of hidden queries, keys and values."""
    query, key, value = call[:3]
    hidden, added = _in_full(call)
    if hidden is not None:
        query, key, value = hidden.seeing(query), hidden.seen(key), hidden.seen(value)
    output = prepared(call)(query, key, value, added)
    if exporting() and hidden is not None:  # a fully masked row is NaN where the graph will run, but 0 in regard
        output = output.masked_fill(~hidden.allowed.any(dim=-1)[..., None], 0.0)
    return output


def prepare(call: Call) -> Prepared | None:
    """What mask and bias add is known once, and what they hide is zeroed only where it matters."""
    scoring = call.scoring
    if scoring.bias is None and is_top_left_causal(scoring.mask):
        seen = min(scoring.grid.query_len, scoring.grid.key_len)  # no query sees later keys
        if seen == scoring.grid.key_len:
            attend = prepared(call, is_causal=True)
            return lambda query, key, value, sink, bias: (attend(query, key, value), None)
        scoring = scoring.with_grid(scoring.grid._replace(key_len=seen))
        attend = prepared(call._replace(scoring=scoring), is_causal=True)
        return lambda query, key, value, sink, bias: (attend(query, key[:, :, :seen], value[:, :, :seen]), None)
    attend = prepared(call)
    if scoring.bias is None and scoring.mask_or_everything is EVERYTHING:
        return lambda query, key, value, sink, bias: (attend(query, key, value), None)
    if not call.concrete or call.bias_learns:
        return None
    if isinstance(scoring.bias, Given) and finished_table(call):
        return _reading(call, scoring.bias.without_numbers(), attend)
    look_up = known_numbers(scoring, call.query.dtype if scoring.bias is None else _dtype_of_bias(call))
    if look_up is None:
        return None
    hidden, _ = look_up()
    safe = hidden is not None and hidden.keys is None and hidden.queries is None

    def attend_alone(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, None]:
        _, added = look_up()
        output = attend(query, key, value, added)
        if not safe and added is not None and has_nan(output):
            output = _with_zeros(Call(query, key, value, scoring))
        return output, None

    if not call.learns:
        return attend_alone

    def attend_and_learn(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, None]:
        hidden, added = look_up()
        if not safe and hidden is not None:
            query, key, value = hidden.seeing(query), hidden.seen(key), hidden.seen(value)
        return attend(query, key, value, added), None

    return attend_and_learn


def _reading(call: Call, given: Given, attend: Callable[..., Tensor]) -> Prepared:
    """`prepare` of a call with a finished table, which may be another one in every call. It is not looked at, which
    takes longer than a small call: where it hides anything that is no number, the result tells, or the inputs do. Row
    "bias, dense, new in every call" of features.py.

    Args:
        given: the table without its numbers.
    """
    scoring, learns = call.scoring.with_bias(given), call.learns

    def attend_with(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, None]:
        numbers = bias.numbers if isinstance(bias, Given) else bias
        if not isinstance(numbers, Tensor) or numbers.dim() < 4:
            numbers = given.of(bias).numbers
        if learns and not (_hides_nothing(numbers, query) or harmless(query, key, value)):
            return _with_zeros(Call(query, key, value, scoring.with_bias(given.of(numbers)))), None
        output = attend(query, key, value, _as_read(numbers))
        if not learns and has_nan(output):
            output = _with_zeros(Call(query, key, value, scoring.with_bias(given.of(numbers))))
        return output, None

    return attend_with


def _hides_nothing(added: Tensor, query: Tensor) -> bool:
    """Whether it is soon found out that all numbers that are added to scores are larger than -inf."""
    few = added.numel() <= query.numel() and concrete(added.device)
    return few and added.numel() > 0 and added.detach().amin().item() > -math.inf


def single(call: Call) -> Single | None:
    """Nothing but torch's function, since what is added is given."""
    if not call.inspectable:
        return None
    attend = prepared(call)

    def attend_one(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, hidden: Hidden | None, bias: Tensor | None
    ) -> tuple[Tensor, None] | None:
        numbers = numbers_added(hidden, bias, query.dtype)
        output = attend(query, key, value, numbers)
        return None if numbers is not None and has_nan(output) else (output, None)

    return attend_one


def _by_flash(call: Call) -> bool:
    """Whether torch's fused operator computes it, which adds float32 numbers to the scores of half precision too, and
    needs some query and key."""
    if not (call.concrete and FLASH and call.query.numel() and call.key.numel()):
        return False
    return call.query.shape[3] == call.value.shape[3] and not call.bias_learns


def _dtype_of_bias(call: Call) -> torch.dtype:
    return wide(call.query.dtype) if _by_flash(call) else call.query.dtype


def _as_read(numbers: Tensor) -> Tensor:
    """A table as torch's operator takes it: torch leaves that for another where a table could learn, though nothing
    does without a graph."""
    return numbers.detach() if numbers.requires_grad and not torch.is_grad_enabled() else numbers


def keeps_a_table(call: Call) -> bool:
    """Whether what mask and bias add is a small table that is kept, for a mask that leaves most scores, or one row."""
    scoring, grid, mask = call.scoring, call.scoring.grid, call.scoring.mask_or_everything
    if not _by_flash(call) or (scoring.bias is None and (mask is EVERYTHING or is_top_left_causal(mask))):
        return False
    if grid.query_len == 1 and not call.learns:
        return True
    long = min(grid.query_len, grid.key_len) > _most_rows(call)
    if long and mask is not EVERYTHING and onednn_beats_fused(call.query.dtype):
        return False
    if scoring.bias is None:
        return grid.batch * grid.query_len * grid.key_len <= MAX_KEPT_SCORES and mask.structure() is not None
    return table_key(scoring, _dtype_of_bias(call)) is not None


def _most_rows(call: Call) -> int:
    """Queries or keys up to which torch's operator with a table is faster than strips that oneDNN multiplies."""
    if call.scoring.grid.batch * call.key.shape[1] < MIN_STACK:
        return 4 * MAX_MASKED_KEYS
    if call.query.dtype in HALF and call.learns:  # few queries at a time: see fused.QUERIES_AT_A_TIME
        return 2 * MAX_MASKED_KEYS
    return MAX_MASKED_KEYS


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


KERNEL = Kernel(
    "sdpa", cannot, run, num_scores, quadratic_numbers, peak_bytes, prepare, single, reads_in_place=reads_a_table
)

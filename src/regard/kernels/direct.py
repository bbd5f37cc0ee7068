"""All scores of a small call at once: two matrix products with a softmax between them.

    scores = scale query key^T + bias and mask,    output = softmax(scores) value

For one new token with a cache, or a short text, the preparation for torch's fused operator (an additive mask, expanded
query heads, a check of every hidden key) costs more than the operator itself. Here query heads that share a kv head are
stacked along the queries, and the additive mask is built once for all layers.

Without gradients, hidden keys and values need no check beforehand. Whatever they contain, their scores are -inf or NaN,
and their values are multiplied by 0, which gives 0 or NaN. So if the result is not NaN, they did not contribute;
otherwise the call is repeated with zeros in their place. Gradients offer no such check, so there the zeros come first.
"""

import math

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.kernels import processor
from regard.kernels.call import Call, Kernel, all_scores
from regard.kernels.hidden import Hidden, fold, hidden_in, hidden_in_call
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal
from regard.numerics import upcast

MAX_DIRECT_SCORES = 1 << 16
"""Scores of all heads up to which this is the fastest kernel."""


def cannot(call: Call) -> str | None:
    """Why this kernel does not support a call."""
    if tracing():
        return "it inspects its result, which a graph does not have yet"
    if call.scoring.additive is not None:
        return "it does not support additive similarity"
    return None if call.dropout is None else "it does not support dropout"


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result; where it can be inspected, hidden keys are zeroed only if it is NaN."""
    scoring = call.scoring
    if _may_look(call):
        output, lse = _attend(call, hidden_in(scoring.mask, scoring.grid), call.query, call.key, call.value)
        total = output.sum() if lse is None else output.sum() + lse.clamp(min=0.0).sum()
        if not math.isnan(total.item()):
            return output, lse
    hidden = hidden_in_call(scoring)
    if hidden is None:
        return _attend(call, None, call.query, call.key, call.value)
    return _attend(call, hidden, hidden.seeing(call.query), hidden.seen(call.key), hidden.seen(call.value))


def _may_look(call: Call) -> bool:
    """Whether the result can be inspected at once, and no gradient is needed."""
    if call.query.device.type != "cpu" or call.learns:
        return False
    return not torch._C._are_functorch_transforms_active()


def _attend(
    call: Call, hidden: Hidden | None, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    scoring, (batch, heads, rows, size), (kv_heads, keys) = call.scoring, query.shape, key.shape[1:3]
    query = upcast(query).reshape(batch * kv_heads, heads // kv_heads * rows, size)
    key, value = (upcast(t).reshape(batch * kv_heads, keys, t.shape[3]) for t in (key, value))
    added = _added(call, hidden, query.dtype)
    if scoring.softcap is None and added is not None:
        scores = torch.baddbmm(added, query, key.mT, alpha=scoring.scale)
    else:
        scores = torch.bmm(query, key.mT) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if added is not None:
            scores = scores + added
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, fold(sink, batch, heads, kv_heads, rows)], dim=-1)
    lse = torch.logsumexp(scores, -1).view(batch, heads, rows) if call.wants_lse else None
    output = torch.bmm(torch.softmax(scores, -1)[..., :keys], value).view(batch, heads, rows, value.shape[2])
    if hidden is not None and hidden.queries is not None:  # fully masked queries attend to the sink alone, if any
        output = output.masked_fill(~hidden.queries[..., None], 0.0)
        if lse is not None:
            alone = lse.new_tensor(-math.inf) if scoring.sink is None else scoring.sink.to(lse.dtype)[:, None]
            lse = torch.where(hidden.queries, lse, alone)
    return output.to(call.query.dtype), lse


def _added(call: Call, hidden: Hidden | None, dtype: torch.dtype) -> Tensor | None:
    """What mask and bias add to the scores; 0 for fully masked queries, whose output is set afterwards."""
    scoring, batch, heads, kv_heads = call.scoring, *call.query.shape[:2], call.key.shape[1]
    if scoring.bias is None:
        return None if hidden is None else hidden.folded(dtype, batch, heads, kv_heads, call.query.shape[2])
    rows, columns = scoring.grid.query_len, scoring.grid.key_len
    numbers = scoring.biases(range(rows), range(columns), dtype)
    if hidden is not None:
        numbers = numbers.masked_fill(~hidden.allowed, 0.0) + hidden.where_seeing(dtype)
    return fold(numbers.expand(*numbers.shape[:2], rows, columns), batch, heads, kv_heads, rows)


def pays(call: Call) -> bool:
    """Whether this is faster than the other kernels."""
    scoring, mask = call.scoring, call.scoring.mask
    if (
        not processor.MKL
        or call.query.dtype not in (torch.float32, torch.float64)
        or all_scores(call) > MAX_DIRECT_SCORES
    ):
        return False
    plain = mask is None or mask is EVERYTHING or is_top_left_causal(mask)
    if plain and scoring.bias is None and scoring.softcap is None and scoring.sink is None:
        return False
    return _may_look(call)


def quadratic_numbers(call: Call) -> int:
    """The scores, the weights, and bias and mask."""
    return 3 * all_scores(call)


def peak_bytes(call: Call) -> int:
    """The quadratic tensors."""
    return quadratic_numbers(call) * max(4, call.query.element_size())


KERNEL = Kernel("direct", cannot, run, all_scores, quadratic_numbers, peak_bytes)

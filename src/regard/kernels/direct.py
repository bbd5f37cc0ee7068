"""All scores of a small call at once: two matrix products with a softmax between them.

    scores = scale query key^T + bias and mask,    output = softmax(scores) value

For one new token with a cache, or a short text, the preparation for torch's fused operator (an additive mask, expanded
query heads, a check of every hidden key) costs more than the operator itself. Here query heads that share a kv head are
stacked along the queries, and the additive mask is built once for all layers.

Hidden keys and values need no check beforehand where the result can be inspected (`kernels.hidden`).
"""

import math

import torch
from torch import Tensor

from regard import processor
from regard.graphs import tracing
from regard.kernels.call import Call, Kernel, Prepared, all_scores
from regard.kernels.fused import HALF, QUERIES_AT_A_TIME
from regard.kernels.hidden import Hidden, Table, fold, has_nan, hidden_in, hidden_in_call, known_table
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal
from regard.matmul import MIN_PRODUCTS, baddbmm, bmm, onednn_is_faster
from regard.numerics import upcast, wide

MAX_DIRECT_SCORES = 1 << 17
"""Scores of all heads up to which this is the fastest kernel, and twice as many by oneDNN; for one query it is at any
number of keys. Rows of 128 tokens in features.py."""

MAX_LEARNT_SCORES = 1 << 20
"""The same for gradients in half precision, without AMX, as long as torch's operator takes its queries by 32: it then
takes 1.4 to 2 times as long."""


def cannot(call: Call) -> str | None:
    """Why this kernel does not support a call."""
    if tracing():
        return "it inspects its result, which a graph does not have yet"
    return None if call.scoring.additive is None else "it does not support additive similarity"


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result; where it can be inspected, hidden keys are zeroed only if it is NaN."""
    return _checked(call, *_prepared(call)) if call.inspectable else _with_zeros(call)


def prepare(call: Call) -> Prepared | None:
    """What mask and bias add is computed once; None where that may change unnoticed."""
    if not call.concrete or call.dropout is not None:
        return None
    scoring, wants_lse = call.scoring.with_sink(None), call.wants_lse
    if not call.learns:
        hidden, added = _prepared(call)

        def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return _checked(Call(query, key, value, scoring.with_sink(sink), None, wants_lse), hidden, added)

        return attend
    hidden, added = _in_full(call)
    if scoring.bias is not None and not isinstance(hidden, Table):
        return None

    def attend_and_learn(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        call = Call(query, key, value, scoring.with_sink(sink), None, wants_lse)
        return _attend(_zeroed(call, hidden), hidden, added)

    return attend_and_learn


def _prepared(call: Call) -> tuple[Hidden | None, Tensor | None]:
    """What is hidden, as far as it is known without looking at a bias, and what mask and bias add."""
    table = _table(call)
    if table is not None:
        return table, _added(call, table, None)
    hidden = hidden_in(call.scoring.mask, call.scoring.grid)
    return hidden, _added(call, hidden, _biases(call))


def _in_full(call: Call) -> tuple[Hidden | None, Tensor | None]:
    """What mask and bias hide and add."""
    table = _table(call)
    if table is not None:
        return table, _added(call, table, None)
    biases = _biases(call)
    hidden = hidden_in_call(call.scoring, biases)
    return hidden, _added(call, hidden, biases)


def _table(call: Call) -> Table | None:
    if call.scoring.bias is None or call.scoring.grid.query_len == 1:  # of one query it is made as fast as looked up
        return None
    look_up = known_table(call.scoring, wide(call.query.dtype))
    return None if look_up is None else look_up()


def _checked(call: Call, hidden: Hidden | None, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
    output, lse = _attend(call, hidden, added)
    known = isinstance(hidden, Table) or call.scoring.bias is None
    if known and (hidden is None or hidden.keys is None):  # no key is hidden from all queries
        return output, lse
    if has_nan(output) or (lse is not None and has_nan(lse.clamp(min=0.0))):
        return _with_zeros(call)
    return output, lse


def _with_zeros(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result, with zeros in place of hidden queries, keys and values."""
    hidden, added = _in_full(call)
    return _attend(_zeroed(call, hidden), hidden, added)


def _zeroed(call: Call, hidden: Hidden | None) -> Call:
    if hidden is None:
        return call
    return call._replace(query=hidden.seeing(call.query), key=hidden.seen(call.key), value=hidden.seen(call.value))


def _attend(call: Call, hidden: Hidden | None, added: Tensor | None) -> tuple[Tensor, Tensor | None]:
    query, key, value, scoring, dropout, wants_lse = call
    dtype, (batch, heads, rows, size), (kv_heads, keys) = query.dtype, query.shape, key.shape[1:3]
    query = upcast(query).reshape(batch * kv_heads, heads // kv_heads * rows, size)
    key, value = (upcast(t).reshape(batch * kv_heads, keys, t.shape[3]) for t in (key, value))
    if scoring.softcap is None and added is not None:
        scores = baddbmm(added, query, key.mT, alpha=scoring.scale)
    else:
        scores = bmm(query, key.mT)
        if scoring.softcap is None:
            scores = scores * scoring.scale
        else:  # softcap * tanh(x) = softcap * (2 sigmoid(2 x) - 1), which takes less time
            scores = torch.sigmoid(scores * (2.0 * scoring.scale / scoring.softcap)) * (2.0 * scoring.softcap)
            scores = scores - scoring.softcap
        if added is not None:
            scores = scores + added
    if scoring.sink is not None:
        sink = scoring.sink.to(scores.dtype).view(1, heads, 1, 1).expand(batch, heads, rows, 1)
        scores = torch.cat([scores, fold(sink, batch, heads, kv_heads, rows)], dim=-1)
    lse = torch.logsumexp(scores, -1).view(batch, heads, rows) if wants_lse else None
    weights = torch.softmax(scores, -1)
    if scoring.sink is not None:
        weights = weights[..., :keys]
    if dropout is not None:
        kept = dropout.keep(scoring.grid, range(rows), range(keys), dtype=weights.dtype)
        weights = weights * fold(kept.mul_(1.0 / (1.0 - dropout.rate)), batch, heads, kv_heads, rows)
    output = bmm(weights, value).view(batch, heads, rows, value.shape[2])
    if hidden is not None and hidden.queries is not None:  # fully masked queries attend to the sink alone, if any
        output = output.masked_fill(~hidden.queries[..., None], 0.0)
        if lse is not None:
            alone = lse.new_tensor(-math.inf) if scoring.sink is None else scoring.sink.to(lse.dtype)[:, None]
            lse = torch.where(hidden.queries, lse, alone)
    return output.to(dtype), lse


def _biases(call: Call) -> Tensor | None:
    """What the bias adds to all scores."""
    if call.scoring.bias is None:
        return None
    queries, keys = map(range, call.scoring.grid[2:4])
    return call.scoring.biases(queries, keys, wide(call.query.dtype))


def _added(call: Call, hidden: Hidden | None, biases: Tensor | None) -> Tensor | None:
    """What mask and bias add to the scores; 0 for fully masked queries, whose output is set afterwards."""
    (batch, heads, rows, columns), kv_heads = call.scoring.grid[:4], call.key.shape[1]
    if biases is None:
        return None if hidden is None else hidden.folded(wide(call.query.dtype), batch, heads, kv_heads, rows)
    if hidden is not None:
        biases = torch.where(hidden.allowed, biases, hidden.where_seeing(biases.dtype))
    return fold(biases.expand(*biases.shape[:2], rows, columns), batch, heads, kv_heads, rows)


def pays(call: Call) -> bool:
    """Whether this is faster than the other kernels."""
    scoring, mask = call.scoring, call.scoring.mask
    query_len, group = scoring.grid.query_len, scoring.grid.heads // call.key.shape[1]
    slow_gradients = call.query.dtype in HALF and query_len < QUERIES_AT_A_TIME[1][0] and call.learns
    by_onednn = _by_onednn(call)
    most = MAX_DIRECT_SCORES * (2 if by_onednn else 1)
    if slow_gradients and not processor.AMX:
        most = MAX_LEARNT_SCORES
    if not processor.MKL or (all_scores(call) > most and query_len > 1):
        return False
    if call.query.dtype in HALF and query_len * group < call.query.shape[3]:
        return False  # keys and values are copied in float32, more numbers than there are scores
    extras = scoring.bias, scoring.softcap, scoring.sink, call.dropout
    plain = mask is None or mask is EVERYTHING or is_top_left_causal(mask)
    if plain and all(extra is None for extra in extras) and call.query.shape[3] == call.value.shape[3]:
        # nothing lies around torch's own function here; but its products are MKL's, and its gradients take twice as
        # long in half precision
        return call.concrete and (by_onednn or (call.learns and call.query.dtype in HALF))
    return call.concrete


def _by_onednn(call: Call) -> bool:
    """Whether oneDNN computes its products, and they are large enough to make up for three operators instead of one."""
    products = all_scores(call) * call.query.shape[3]
    enough = products >= 2 * MIN_PRODUCTS * torch.get_num_threads() and call.query.dtype != torch.float64
    return enough and onednn_is_faster()


def quadratic_numbers(call: Call) -> int:
    """The scores, the weights, and bias and mask."""
    return 3 * all_scores(call)


def peak_bytes(call: Call) -> int:
    """The quadratic tensors."""
    return quadratic_numbers(call) * max(4, call.query.element_size())


KERNEL = Kernel("direct", cannot, run, all_scores, quadratic_numbers, peak_bytes, prepare)

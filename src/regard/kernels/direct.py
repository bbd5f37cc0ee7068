"""All scores of a small call at once: two matrix products with a softmax between them.

    scores = scale query key^T + bias and mask,    output = softmax(scores) value

For one new token with a cache, or a short text, the preparation for torch's fused operator (an additive mask, expanded
query heads, a check of every hidden key) costs more than the operator itself. Here query heads that share a kv head are
stacked along the queries, and the additive mask is built once for all layers.

Hidden keys and values need no check beforehand where the result can be inspected (`kernels.hidden`).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from regard import processor
from regard.biases import Bias, Given
from regard.graphs import exporting, tracing
from regard.kernels.call import Call, Kernel, Prepared, Single, all_scores, learns
from regard.kernels.fused import FLASH, HALF, SHORT, reads_a_table
from regard.kernels.hidden import (
    Hidden,
    Table,
    fold,
    has_nan,
    hidden_in,
    hidden_in_call,
    known_table,
    numbers_added,
    table_key,
)
from regard.kernels.stacked import Fixed, Stacked, added_by, attend, formula
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal
from regard.matmul import MIN_PRODUCTS, is_regular, onednn_beats_fused, onednn_is_faster
from regard.numerics import wide
from regard.scores import Scoring

MAX_SCORES = 1 << 20
MAX_SCORES_OF_A_HEAD = 3 << 16
"""Scores of all heads up to which this is faster than the others; four times as many where strips take one batch index
at a time, or where the scores of one head of one batch index, 768 KiB, stay in the cache between two products. What is
kept for the gradients has 16 MiB at most. Rows of 128 to 512 tokens in features.py."""

MIN_SCORES_IN_HALF_PRECISION = 1 << 16
MIN_HEADS_IN_HALF_PRECISION = 8
"""The same of a call with nothing added in half precision, by MKL and without gradients, beside torch's operator, whose
one call is shorter if there are fewer. Rows "causal" and "causal, 3 heads" of features.py."""

MAX_NUMBERS_THAT_LEARN = 1 << 20
"""Most numbers in the keys of few queries in half precision of which float32 copies are made, as of the values, where
torch's gradients are slow."""

MAX_NUMBERS_OF_ONE = 1 << 18
"""The same of one query without gradients: strips take longer to begin."""

MIN_NUMBERS_THAT_LEARN = 1 << 21
"""Fewest numbers in the keys of one query of which torch's operator takes longer for the gradients: 8 MiB, which have
to be fetched from farther away than a core's cache."""

MIN_STACK = 16
"""Fewest matrices of one row at which torch's operator is slow in half precision without AMX; four times as many where
the values have to be widened, too. Row "GPT-2 generates, 8 rows padded left" of models.py in bfloat16."""

FEW_ROWS = 8
"""Most queries, of all heads that share one of keys and values, of which a graph adds up products by itself: that it
fuses with what hides values and what widens them, of which operators for products want copies. Where there is neither,
it is one. From calls of 1 to 8 such queries, with heads of 64 to 512 and 128 to 4,096 keys, with padding, a sink, a
softcap and dropout; row "Llama generates, static cache, compiled" of models.py."""

LARGE_HEAD = 256
LARGE_HEAD_OF_A_TABLE = 512
"""Features of a head from which on gradients take less time with all weights kept; and where what a bias and a mask add
is written into one table first. From masks of cells with each kind of bias, of 1,024 to 2,048 tokens."""

MAX_SCORES_OF_LARGE_HEADS = 1 << 22
"""Most scores of such heads whose weights are kept: 16 MiB. Of more, the compiled library takes less time. From calls
of 1 to 8 heads of 512, of 100 to 2,048 queries and 512 to 8,192 keys."""

LARGE_HEAD_OF_PRODUCTS = 512
MAX_SCORES_OF_A_LARGE_HEAD = 1 << 18
FEWEST_NUMBERS_TO_MULTIPLY = 3 << 14
"""Features from which on plain products are the fastest without gradients, up to so many scores of a head, 1 MiB, and
from so many numbers in its queries, or keys. From calls of 1 to 8 heads of 256 to 768 features, of 100 to 2,048
tokens."""

FEWEST_NUMBERS_OF_LARGE_HEADS = 1 << 14
FEWEST_PRODUCTS_OF_LARGE_HEADS = 1 << 24
FEWEST_NUMBERS_OF_PLAIN_HEADS = 3 << 13
FEWEST_PRODUCTS_OF_PLAIN_HEADS = 3 << 20
"""Fewest numbers in the queries, or keys, of a head, and multiplications of all scores: of fewer, the compiled library
begins so much sooner; where nothing is added to scores, these begin sooner, too. From 27 calls of 32 to 512 queries,
with AVX2 and with AVX-512."""


def cannot(call: Call) -> str | None:
    """Why this kernel does not support a call."""
    if exporting():
        return "it compares sizes, which an exported graph does not know"
    return None if call.scoring.additive is None else "it does not support additive similarity"


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result; where it can be inspected, hidden keys are zeroed only if it is NaN."""
    if _suits_operators(call):
        return _by_operators(call)(*call[:3], None, None)
    return _alone(call)(*call[:3], call.scoring.sink, None) if call.inspectable else _with_zeros(call)


def prepare(call: Call) -> Prepared | None:
    """What mask and bias add is computed once; None where that may change unnoticed."""
    if not call.concrete or call.dropout is not None:
        return None
    if _suits_operators(call):
        return _by_operators(call)
    if not call.learns:
        return _alone(call)
    hidden, added, _ = _in_full(call)
    if call.scoring.bias is not None and not isinstance(hidden, Table):
        return None
    fixed = Fixed(call.scoring.with_sink(None), hidden, added, None, call.wants_lse, keeps=True)

    def attend_and_learn(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _attended(fixed, *_zeroed(hidden, query, key, value), sink, None)

    return attend_and_learn


def _alone(call: Call) -> Prepared:
    """A call without gradients, for other tensors: hidden keys are zeroed only if the result is NaN."""
    hidden, added = _prepared(call)
    scoring, dropout, wants_lse = call.scoring.with_sink(None), call.dropout, call.wants_lse
    fixed, sees_all = Fixed(scoring, hidden, added, _kept(call), wants_lse, keeps=False), _sees_all(call, hidden)

    def attend_alone(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        results = _attended(fixed, query, key, value, sink, None)
        if sees_all or not has_nan(*results):
            return results
        return _with_zeros(Call(query, key, value, scoring.with_sink(sink), dropout, wants_lse))

    return attend_alone


def _suits_operators(call: Call) -> bool:
    """Whether torch's operators take less time one by one: with gradients, where autograd does all the rest, and for
    large heads."""
    return _is_plain(call) if call.learns else multiplies_faster(call)


def _is_plain(call: Call) -> bool:
    """Whether nothing is done to the scores, in a dtype in which torch multiplies by the faster library."""
    scoring, dtype = call.scoring, call.query.dtype
    more = scoring.bias, scoring.softcap, scoring.sink, call.dropout
    if call.wants_lse or scoring.mask_or_everything is not EVERYTHING or any(part is not None for part in more):
        return False
    return call.concrete and dtype is wide(dtype) and not onednn_is_faster(dtype)


def _by_operators(call: Call) -> Prepared:
    """Such a call, for other tensors."""
    scale = call.scoring.scale
    return lambda query, key, value, sink, bias: (formula(query, key, value, scale), None)


def single(call: Call) -> Single | None:
    """All scores at once, with what is added."""
    if not call.inspectable:
        return None
    scoring, wants_lse = replace(call.scoring, mask=None, bias=None, sink=None), call.wants_lse
    batch, heads, dtype = *scoring.grid[:2], wide(call.query.dtype)

    def attend_one(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, hidden: Hidden | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        numbers = numbers_added(hidden, bias, dtype)
        if numbers is not None:
            numbers = fold(numbers.to(dtype), batch, heads, key.shape[1], 1)
        results = _attend(Call(query, key, value, scoring.with_sink(sink), wants_lse=wants_lse), None, numbers)
        return None if numbers is not None and has_nan(*results) else results

    return attend_one


def _prepared(call: Call) -> tuple[Hidden | None, Tensor | None]:
    """What is hidden, as far as it is known without looking at a bias, and what mask and bias add."""
    table = _table(call)
    hidden = hidden_in(call.scoring.mask, call.scoring.grid) if table is None else table
    return hidden, _added(call, hidden, _biases(call) if table is None else None)


def _in_full(call: Call) -> tuple[Hidden | None, Tensor | None, Tensor | None]:
    """What mask and bias hide, what they add if nothing of it learns, and biases that learn."""
    table = _table(call)
    if table is not None:
        return table, _added(call, table, None), None
    biases = _biases(call)
    hidden = hidden_in_call(call.scoring, biases)
    if biases is not None and biases.requires_grad:
        return hidden, None, biases
    return hidden, _added(call, hidden, biases), None


def _table(call: Call) -> Table | None:
    if call.scoring.bias is None or call.scoring.grid.query_len == 1:  # of one query it is made as fast as looked up
        return None
    look_up = known_table(call.scoring, wide(call.query.dtype))
    return None if look_up is None else look_up()


def _sees_all(call: Call, hidden: Hidden | None) -> bool:
    """Whether it is known that no key is hidden from all queries."""
    known = isinstance(hidden, Table) or call.scoring.bias is None
    return known and (hidden is None or hidden.keys is None)


def _with_zeros(call: Call) -> tuple[Tensor, Tensor | None]:
    """The result, with zeros in place of hidden queries, keys and values."""
    hidden, *more = _in_full(call)
    query, key, value = call[:3]
    if hidden is not None and tracing() and may_add_up(call) and not call.learns:  # scores do not tell of hidden keys
        value = hidden.seen(value)
    else:
        query, key, value = _zeroed(hidden, query, key, value)
    return _attend(call._replace(query=query, key=key, value=value), hidden, *more)


def may_add_up(call: Call) -> bool:
    """Whether a graph may add up the products of few queries by itself, without gradients of dropped weights, of whose
    hash it would make one for every number of a product."""
    rows = call.scoring.grid.query_len * (call.scoring.grid.heads // call.key.shape[1])
    copies = call.query.dtype in HALF or call.scoring.mask_or_everything is not EVERYTHING
    few = rows <= (FEW_ROWS if copies else 1)
    return call.query.device.type == "cpu" and few and not (call.dropout is not None and call.learns)


def _zeroed(hidden: Hidden | None, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if hidden is None:
        return query, key, value
    return hidden.seeing(query), hidden.seen(key), hidden.seen(value)


def _attend(
    call: Call, hidden: Hidden | None, added: Tensor | None, biases: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    keeps, adds_up = call.concrete and call.learns, tracing() and may_add_up(call)
    fixed = Fixed(call.scoring, hidden, added, _kept(call), call.wants_lse, keeps=keeps, adds_up=adds_up)
    return _attended(fixed, *call[:3], call.scoring.sink, biases)


def _attended(
    fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, biases: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Output and lse, with gradients by hand or by autograd."""
    if fixed.keeps:
        output, lse = Stacked.apply(fixed, query, key, value, sink, biases)  # type: ignore[no-untyped-call]
    else:
        output, lse = attend(fixed, query, key, value, sink, biases)
    hidden = fixed.hidden
    if hidden is not None and hidden.queries is not None:  # fully masked queries attend to the sink alone, if any
        output = output.masked_fill(~hidden.queries[..., None], 0.0)
        if lse is not None:
            alone = lse.new_tensor(-math.inf) if sink is None else sink.to(lse.dtype)[:, None]
            lse = torch.where(hidden.queries, lse, alone)
    return output, lse


def _kept(call: Call) -> Tensor | None:
    """0 for weights that are dropped, 1 / (1 - dropout) for others; None without dropout."""
    if call.dropout is None:
        return None
    (batch, heads, rows, keys), kv_heads = call.scoring.grid[:4], call.key.shape[1]
    kept = call.dropout.keep(call.scoring.grid, range(rows), range(keys)).to(wide(call.query.dtype))
    return fold(kept.mul_(call.dropout.factor), batch, heads, kv_heads, rows)


def _biases(call: Call) -> Tensor | None:
    """What the bias adds to all scores."""
    if call.scoring.bias is None:
        return None
    queries, keys = map(range, call.scoring.grid[2:4])
    return call.scoring.biases(queries, keys, wide(call.query.dtype))


def _added(call: Call, hidden: Hidden | None, biases: Tensor | None) -> Tensor | None:
    return added_by(hidden, biases, call.scoring, call.key.shape[1], wide(call.query.dtype))


def pays(call: Call) -> bool:
    """Whether this is faster than the other kernels, if a mask hides little."""
    if not call.concrete or (not processor.MKL and _torch_can(call)):
        return False  # what torch's operator cannot do, strips multiply by the same library, whichever it is
    grid, half = call.scoring.grid, call.query.dtype in HALF
    if grid.query_len == 1:
        return _pays_for_one(call)
    in_cache = grid.query_len * grid.key_len <= MAX_SCORES_OF_A_HEAD
    scores, most = all_scores(call), MAX_SCORES * (4 if in_cache or _strips_go_by_batch(call) else 1)
    if scores > most or not _torch_can(call):
        return scores <= most
    if half and processor.AMX:
        return call.learns and max(grid.query_len, grid.key_len) < SHORT
    if _has_few_rows(call) and (half or not call.learns):
        return call.learns and call.key.numel() <= MAX_NUMBERS_THAT_LEARN
    if _by_onednn(call) or (half and call.learns):
        return True
    enough = grid.batch * grid.heads >= MIN_HEADS_IN_HALF_PRECISION and scores >= MIN_SCORES_IN_HALF_PRECISION
    return enough and plain(call.scoring) and _rounds_weights(call)  # one operator multiplies all else as fast


def saves_a_product(call: Call) -> bool:
    """Whether heads are so large that to keep all weights for the gradients takes less time than to compute scores
    again, as all other kernels do: one of seven products, which takes as long as a few operators on all scores. They
    take at most twice the memory of queries and outputs. Row "full, 1 head of 512" of features.py."""
    scoring, grid, size = call.scoring, call.scoring.grid, min(call.query.shape[3], call.value.shape[3])
    more = scoring.softcap, scoring.sink, scoring.additive, call.dropout
    if size < LARGE_HEAD or call.query.dtype is not torch.float32 or any(part is not None for part in more):
        return False
    if not (call.concrete and call.learns) or call.bias_learns:
        return False
    scores, shortest = all_scores(call), min(grid[2:4])
    few = grid.key_len <= 4 * size
    fewest = FEWEST_NUMBERS_OF_LARGE_HEADS, FEWEST_PRODUCTS_OF_LARGE_HEADS
    if _is_plain(call):
        fewest = FEWEST_NUMBERS_OF_PLAIN_HEADS, FEWEST_PRODUCTS_OF_PLAIN_HEADS
    enough = shortest * size >= fewest[0] and scores * size >= fewest[1]
    if not (few and enough and scores <= MAX_SCORES_OF_LARGE_HEADS):
        return False
    reads = isinstance(scoring.bias, Given) and scoring.mask_or_everything is EVERYTHING
    finds = scoring.bias is None or reads or table_key(scoring, torch.float32) is not None
    return finds or size >= LARGE_HEAD_OF_A_TABLE


def multiplies_faster(call: Call) -> bool:
    """Whether heads are so large, and the scores of each so few that they stay in the cache, that without gradients two
    products of whole matrices take less time than all other kernels. Row "full, 1 head of 512" of features.py."""
    grid, size = call.scoring.grid, min(call.query.shape[3], call.value.shape[3])
    if not _is_plain(call) or call.learns or call.query.dtype is not torch.float32 or size < LARGE_HEAD_OF_PRODUCTS:
        return False
    scores = all_scores(call)
    few = grid.query_len * grid.key_len <= MAX_SCORES_OF_A_LARGE_HEAD and scores <= 4 * MAX_SCORES
    enough = min(grid[2:4]) * size >= FEWEST_NUMBERS_TO_MULTIPLY and scores * size >= FEWEST_PRODUCTS_OF_LARGE_HEADS
    return few and enough


def _rounds_weights(call: Call) -> bool:
    """Whether weights are multiplied in bfloat16, for which torch's operator takes longer, and scores by MKL, which
    takes odd lengths as they are; oneDNN wants them filled up, as strips do. Row "ViT reads 8 images" of models.py."""
    return call.query.dtype == torch.bfloat16 and processor.BFLOAT16 and not onednn_beats_fused(call.query.dtype)


def _has_few_rows(call: Call) -> bool:
    """Whether keys and values are more numbers than there are scores: to read them takes longest, and in half precision
    to copy them to float32."""
    grid = call.scoring.grid
    return grid.query_len * (grid.heads // call.key.shape[1]) * (1 + call.learns) < call.query.shape[3]


def _pays_for_one(call: Call) -> bool:
    """The same of one query."""
    (batch, kv_heads), numbers = call.key.shape[:2], max(call.key.numel(), call.value.numel())
    half, torch_can = call.query.dtype in HALF, _torch_can(call)
    if half and _has_few_rows(call):
        if call.learns:
            return not processor.AMX and numbers <= MAX_NUMBERS_THAT_LEARN
        fewest = MIN_STACK if processor.BFLOAT16 else 4 * MIN_STACK
        slow = not processor.AMX and call.scoring.grid.heads == kv_heads and batch * kv_heads >= fewest
        return numbers <= MAX_NUMBERS_OF_ONE and (slow or not torch_can)
    if not torch_can:
        return True
    slow = not processor.AMX if half else numbers >= MIN_NUMBERS_THAT_LEARN
    return call.learns and slow


def _strips_go_by_batch(call: Call) -> bool:
    """Whether strips take one batch index at a time: a bias that learns asks where its gradient belongs."""
    biases = call.scoring.learned() if torch.is_grad_enabled() else ()
    return call.scoring.grid.batch > 1 and any(map(learns, biases))


def plain(scoring: Scoring) -> bool:
    """Whether nothing is added to the scores, except what torch's operator does by itself."""
    mask = scoring.mask
    return scoring.bias is None and (mask is None or mask is EVERYTHING or is_top_left_causal(mask))


def _torch_can(call: Call) -> bool:
    """Whether torch's fused operator can do it, with a table that is given or made once, or for one query; without
    gradients and a table, what follows from its log-sum-exp too (`strips`)."""
    scoring = call.scoring
    more = scoring.softcap, call.dropout
    if any(part is not None for part in more) or call.query.shape[3] != call.value.shape[3]:
        return False
    if call.wants_lse or scoring.sink is not None:
        return FLASH and plain(scoring) and not call.learns and scoring.grid.query_len > 1
    if scoring.grid.query_len == 1 and not call.learns:
        return FLASH
    if scoring.bias is not None:
        return reads_a_table(call) or table_key(scoring, wide(call.query.dtype)) is not None
    return plain(scoring) or scoring.mask_or_everything.structure() is not None


def _by_onednn(call: Call) -> bool:
    """Whether oneDNN computes its products, and they are large enough to make up for three operators instead of one."""
    (batch, heads, rows, keys), kv_heads = call.scoring.grid[:4], call.key.shape[1]
    products = batch * heads * rows * keys * call.query.shape[3]
    enough = products >= 2 * MIN_PRODUCTS * torch.get_num_threads() and call.query.dtype != torch.float64
    return enough and is_regular(heads // kv_heads * rows) and is_regular(keys) and onednn_is_faster(torch.float32)


def quadratic_numbers(call: Call) -> int:
    """The scores, the weights, and bias and mask."""
    return 3 * all_scores(call)


def peak_bytes(call: Call) -> int:
    """The quadratic tensors."""
    return quadratic_numbers(call) * max(4, call.query.element_size())


KERNEL = Kernel("direct", cannot, run, all_scores, quadratic_numbers, peak_bytes, prepare, single)

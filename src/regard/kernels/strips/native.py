"""The strips of a call by the compiled library: all of them in one call, forward and backward.

The library (c/attention.c) computes the scores of a few queries with a few keys at a time and uses them while they are
in the cache. So a score costs about the same in any strip, and what is added to it is read where it is:

    a tensor            with its own strides
    a bias by distance  one row of numbers for the whole call, of which every strip reads a part
    what a mask hides   intervals of keys, and bits, kept with the plan

Scores, weights and all sums are float32 or wider, whatever the dtype of query, key and value.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from regard import measured, processor
from regard.biases import Given
from regard.dropout import Dropout
from regard.graphs import concrete
from regard.kernels import fused
from regard.kernels.call import Call, learns
from regard.kernels.strips import ready, tuning
from regard.kernels.strips.added import is_of_distance, read_by_place
from regard.kernels.strips.binding import DTYPES, PRODUCTS, is_there
from regard.kernels.strips.dealing import dealing, most_sums_of_a_thread, sums_of_a_thread
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.intervals import Interval, by_interval
from regard.kernels.strips.order import Order, as_read, laid_like, library_for, orders_of
from regard.kernels.strips.plan import PlanOptions
from regard.kernels.strips.reordering import Reordering, reordering
from regard.kernels.strips.unions import by_documents, plan_union
from regard.masks import Mask
from regard.numerics import upcast, wide
from regard.scores import Scoring
from regard.shapes import Grid

MAX_PRICE = 1.15
"""Times that a score takes beside torch's operator, up to which its strips are not compared: to cut them anew for every
mask takes several times as long as the call. On an Intel processor limited to AVX2, where a score cost 1.05 times
torch's, rows "... new in every call" of features.py."""

HEAD_SIZES = {64: (1024, 1024), 128: (768, 512), 256: (768, 256), 512: (768, 256)}
"""Features of the heads for which it is measured what a score takes beside torch's operator, and by how many queries
and keys: the larger the products, the more it takes. Rows "full, 1 head of 512" and "causal, 2 heads of 256" of
features.py."""

FEWEST_QUERIES = {128: 768, 256: 768, 512: 192}
"""Of heads of these sizes for which that holds: torch's operator takes 32 queries at a time, from 192 on 64, and from
768 on 256 (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp), and large products of few rows take it longer. The same
rows."""

BYTES_OF_A_CELL = 1 / 8
"""Of a mask, as the library reads it."""


def runs_on(call: Call) -> bool:
    """Whether there is a library for tensors as those of a call."""
    dtype = call.query.dtype
    return dtype in DTYPES and is_there(wide(dtype)) and call.query.device.type == "cpu"


def cannot(call: Call) -> str | None:
    """Why the library does not support a call."""
    if not is_there(wide(call.query.dtype)):
        return "it is not compiled for this processor, or turned off by REGARD_NATIVE=0"
    query, scoring, grid = call.query, call.scoring, call.scoring.grid
    if not concrete(query.device):
        return "it reads tensors where they are: on a CPU, outside of torch.func and torch.autograd.forward_ad"
    if query.dtype not in DTYPES:
        return f"it does not compute in {query.dtype}"
    if scoring.additive is not None:
        return "it does not support additive similarity"
    if not (all(grid[:4]) and query.shape[3] and call.value.shape[3]):
        return "there is nothing to compute"
    if call.learns and not _adds_up_gradients(call):
        return "a bias that learns is a function of every score"
    if query.dtype is torch.bfloat16:
        settle_products()
    return None


def _adds_up_gradients(call: Call) -> bool:
    """Whether the library adds up the gradients of what learns in a bias: of tensors and of biases by distance."""
    bias = call.scoring.bias
    if bias is None or not call.bias_learns:
        return True
    for changed in map(reordering, by_documents(call)):
        if changed is not None and read_by_place(changed.of(call.scoring).bias, wide(call.query.dtype)) is None:
            return False
    terms = (term for term in bias.terms() if any(map(learns, term.learned())))
    return all(term.of_distance or isinstance(term, Given) for term in terms)


def plan_of(call: Call, *, sorts: bool = True) -> StripPlan:
    """The strips of a call.

    Args:
        sorts: whether tokens may be sorted, which is then part of the plan.
    """
    plan, *others = (part for one in (by_documents(call) if sorts else [call]) for part in _plan_of(one, sorts).parts)
    return plan.beside(others)


def _plan_of(call: Call, sorts: bool) -> StripPlan:
    changed = reordering(call) if sorts else None
    scoring = call.scoring if changed is None else changed.of(call.scoring)
    rule, interval = by_interval(scoring.mask_or_everything, scoring.grid)
    return plan_within(scoring, call.query.dtype, rule, interval, changed)


def plan_within(
    scoring: Scoring, dtype: torch.dtype, rule: Mask, interval: Interval | None, changed: Reordering | None = None
) -> StripPlan:
    """The same where the mask is a rule within an interval of keys for each query, of tokens in the scoring's order."""
    grid = scoring.grid
    evaluated = not rule.closed_form or _is_evaluated(scoring, dtype)
    most = tuning.MAX_TILE_SCORES // max(1, grid.batch * grid.heads) if evaluated else None
    together = not evaluated and (scoring.bias is None or is_of_distance(scoring.bias))
    together = together and (interval is None or interval.words is None)
    by = PlanOptions(
        tuning.SHORT_STRIP_QUERIES_NATIVE, tuning.SCORES_PER_STRIP_NATIVE, together=together, in_place=True,
        skips=library_for(dtype).lanes, most_scores=most,
    )  # fmt: skip
    plan, *others = (part.within(interval).sorted_by(changed) for part in plan_union(rule, grid, by).parts)
    return plan.beside(others)


def is_quickly_planned(call: Call) -> bool:
    """Whether neither mask nor bias is evaluated to find strips and what is added to them."""
    rule, _ = by_interval(call.scoring.mask_or_everything, call.scoring.grid)
    return rule.closed_form and not _is_evaluated(call.scoring, call.query.dtype)


def _is_evaluated(scoring: Scoring, dtype: torch.dtype) -> bool:
    """Whether a bias makes a number for every score, which is then held."""
    bias = scoring.bias
    if bias is None or read_by_place(bias, wide(dtype)) is not None:
        return False
    return not all(
        term.of_distance or (isinstance(term, Given) and term.numbers.dtype is wide(dtype)) for term in bias.terms()
    )


def beats(call: Call, scores: float, *, by_table: bool = False) -> bool:
    """Whether this takes less time than torch's own function, which would compute so many scores.

    Args:
        by_table: whether torch's is given a table of what is hidden and added.
    """
    learns, dtype = call.learns, call.query.dtype
    scores, in_full = _by_torch(call, scores, by_table)
    table, plan, of_head = has_table(call.scoring), plan_of(call), head_size(call)
    if plan.interval is not None and not plan.others:
        least = _scores(call, plan.within(None))  # is counted in less time
        if price(dtype, learns, table, of_head) * least < scores:
            return True
    own = sum(_scores(call, part) for part in plan.parts)
    scores = min(max(scores, own), in_full)  # both count the last queries in full
    own += len(plan.others) * tuning.SCORES_PER_RESULT * call.query.shape[:3].numel()
    if price(dtype, learns, table, of_head) * own < scores:
        return True
    return by_table and not table and price(dtype, learns, False, of_head, by_table=True) * own < scores


def _by_torch(call: Call, scores: float, by_table: bool) -> tuple[float, float]:
    """How many scores of a call of many queries take as long as torch's function takes for so many of this one; and how
    many if its last queries fill up what it computes at a time."""
    queries, in_half = call.query.shape[2], call.query.dtype in fused.HALF
    in_full = -(-queries // tuning.QUERIES_AT_A_TIME) * tuning.QUERIES_AT_A_TIME / queries
    few = queries > 1 and 2 * queries <= call.key.shape[2]
    if queries == 1:
        scores *= tuning.ONE_QUERY
    elif few:
        to_begin = tuning.QUERIES_TO_BEGIN_HALVES if in_half else tuning.QUERIES_TO_BEGIN
        scores *= 1 + (tuning.QUERIES_TO_BEGIN_GRADIENTS if call.learns else to_begin) / queries
        if queries > tuning.QUERIES_AT_A_TIME and (processor.AMX or not in_half):
            scores *= in_full
    if by_table and isinstance(call.scoring.bias, Given) and queries > 1:  # what it hides shows in the output alone
        scores += tuning.SCORES_PER_LOOK * call.query.shape[:3].numel()
    return scores, scores if few else scores * in_full


def _products_of(dtype: torch.dtype) -> str:
    """By what numbers of a dtype are multiplied."""
    if dtype is not torch.bfloat16:
        return "plain"
    settle_products()
    return library_for(dtype).products


@cache
def settle_products() -> None:
    """Products of bfloat16 numbers by the instructions that take the least time here, of those that there are."""
    library = library_for(torch.bfloat16)
    best, *others = PRODUCTS[PRODUCTS.index(library.products) :: -1]
    of_ours, _ = measured.alone(lambda: _two_ways(torch.bfloat16, learns=True))

    def by(products: str) -> None:
        library.set_products(products)
        of_ours()

    for other in others:
        ways = partial(by, best), partial(by, other)
        of_both = partial(measured.ratio, f"{best} / {other} products, native", *ways)
        best = best if measured.alone(of_both) <= 1 else other
    library.set_products(best)


def has_table(scoring: Scoring) -> bool:
    """Whether a bias tensor has a number for each query and key, all of which are read from memory."""
    terms = () if scoring.bias is None else scoring.bias.terms()
    return any(isinstance(term, Given) and term.numbers.shape[2] > 1 < term.numbers.shape[3] for term in terms)


def head_size(call: Call) -> int:
    """About how many features a head has, of query and key and of value: the next of those that are measured, and that
    matter for so many queries."""
    smallest, features = min(HEAD_SIZES), call.query.shape[3] + call.value.shape[3]
    size = next((size for size in HEAD_SIZES if features <= 3 * size), max(HEAD_SIZES))
    return size if size == smallest or call.query.shape[2] >= FEWEST_QUERIES[size] else smallest


@cache
def price(dtype: torch.dtype, learns: bool, table: bool, of_head: int, *, by_table: bool = False) -> float:
    """How long a score takes, with its gradients if something learns, over the time that torch's operator takes here;
    1 where nothing is measured.

    Args:
        table: whether to both a number is added that is read from memory. by_table: whether to torch's alone.
        of_head: as of `head_size`.
    """
    products = _products_of(dtype)
    tables = ", a table" if table else ", a table for torch" if by_table else ""
    wide_heads = f", heads of {of_head}" if of_head > min(HEAD_SIZES) else ""
    kinds = f"{', gradients' * learns}{tables}, {products} products{wide_heads}"
    name = f"native / fused, {dtype}{kinds}"
    return measured.alone(
        lambda: measured.ratio(name, *_two_ways(dtype, learns, of_head, here=table, there=table or by_table))
    )


def pays(dtype: torch.dtype, learns: bool, table: bool, of_head: int) -> bool:
    """Whether strips take no more time than by torch's operator, which computes more scores than a mask allows."""
    return price(dtype, learns, table, of_head) <= MAX_PRICE


pays._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes the answer as it is


def saved_by_a_node(dtype: torch.dtype, learns: bool, table: bool, of_head: int, share: float) -> tuple[float, float]:
    """What part of the scores of torch's own function a node in a graph of torch.compile saves, which computes this
    share of them; and how many it has to save to make up for the time in which it begins. table, of_head: as of
    `price`."""
    if learns:  # in half precision torch's own function takes nearly as long to begin
        to_begin = tuning.SCORES_TO_BEGIN_NODES_THAT_LEARN // (8 if dtype in fused.HALF else 1)
    else:
        to_begin = tuning.SCORES_TO_BEGIN_A_NODE * fused.speed(dtype)
    return 1 - share * price(dtype, learns, table, of_head), to_begin * torch.get_num_threads()


saved_by_a_node._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _two_ways(
    dtype: torch.dtype, learns: bool, of_head: int = 64, *, here: bool = False, there: bool = False
) -> tuple[Callable[[], object], Callable[[], object]]:
    """As many scores, computed here and by torch's operator, of which each may be given a table."""
    queries, keys = HEAD_SIZES[of_head]
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, 1, 2 * queries + 2 * keys, of_head, generator=draw).to(dtype)
    query, key, value, grad = drawn.split([queries, keys, keys, queries], dim=2)
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    numbers = torch.randn(1, 1, queries, keys, generator=draw).to(dtype)
    table, bias = numbers if there else None, Given(numbers) if here else None
    scoring = Scoring(Grid(1, 1, queries, keys, query.device), 0.125, None, bias, None, None, None)
    given = query, key, value, None, scoring, None, plan_of(Call(query, key, value, scoring))

    def of_ours() -> object:
        output, lse, exact = forward(*given, wants_lse=learns, learns=learns)
        return backward(*given, output=exact, lse=lse, grad_output=grad, grad_lse=None) if learns else output

    def by_torch() -> object:
        if not learns:
            return fused.full_attention(query, key, value, scale=0.125, attn_mask=table)
        with torch.enable_grad():
            output = fused.full_attention(leaves[0], leaves[1], leaves[2], scale=0.125, attn_mask=table)
            return torch.autograd.grad(output, leaves, grad)

    return of_ours, by_torch


def num_scores(call: Call, plan: StripPlan | None = None) -> int:
    """Scores of all strips, of a plan or else that of the call; of a causal square about half."""
    return sum(_scores(call, part) for part in (plan or plan_of(call)).parts)


def _scores(call: Call, plan: StripPlan) -> int:
    return call.scoring.grid.heads * round(plan.cells(library_for(call.query.dtype).lanes))


def peak_bytes(call: Call) -> int:
    """The log-sum-exp, and masks and biases that are evaluated, of as many strips as are given at once."""
    grid, size = call.scoring.grid, upcast(call.query[:0]).element_size()
    plan, kept = plan_of(call), 0.0
    for part in plan.parts:
        is_evaluated = _is_evaluated(part.in_order(call.scoring), call.query.dtype)
        of_bias = 2 * size * grid.batch * grid.heads if is_evaluated else 0
        for strip in part.strips:
            of_mask = 1 + BYTES_OF_A_CELL if None in part.diagonals(strip) else 0
            kept = max(kept, len(strip.queries) * strip.keys * (of_mask + of_bias))
    kept += 2 * len(plan.others) * size * call.query.shape[:3].numel() * call.value.shape[3]
    if plan.interval is not None and plan.interval.words is not None:
        kept += plan.interval.words.nbytes
    return size * grid.batch * grid.heads * grid.query_len + math.ceil(kept)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scoring: Scoring,
    dropout: Dropout | None,
    plan: StripPlan,
    *,
    wants_lse: bool = True,
    learns: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp (which holds anything if it is not wanted), and the output as `backward` takes it: in half
    precision unrounded, if something learns, since the gradients of scores are differences from it.
    """
    likeness = wants_lse, learns
    alike = plan.told is not None and not plan.others
    if alike:
        bias = plan.in_order(scoring).bias
        found = ready.forward(query, key, value, sink, bias, dropout, plan, *likeness)
        if found is not None:
            return found
    orders = orders_of(query, key, value, sink, scoring, dropout, plan)
    dtype, wants_lse = wide(query.dtype), wants_lse or len(orders) > 1
    exact = output = laid_like(query, value.shape[3])
    if query.dtype is not dtype and (learns or len(orders) > 1):
        exact = laid_like(query, value.shape[3], dtype)
    lse = query.new_empty(query.shape[:3] if wants_lse else (0,), dtype=dtype)
    for order in orders:
        order.tensors("output", output)
        if exact is not output:
            order.tensors("exact", exact)
        if wants_lse:
            order.numbers("lse", lse)
    for careful in (False, True):
        for order in orders:  # each goes on from what those before left
            order.run(order.compiled.forward, careful=careful, goes_on=order is not orders[0])
        if not any(order.is_suspect() for order in orders):
            break  # otherwise a hidden key may have had a part
    if alike and not careful:
        ready.remember_forward(orders[0], query, key, value, sink, dropout, *likeness)
    return output, lse, exact


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scoring: Scoring,
    dropout: Dropout | None,
    plan: StripPlan,
    *learned: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, sink and `learned`."""
    scoring = plan.in_order(scoring)
    grad_output = as_read(grad_output if grad_output.dtype is query.dtype else grad_output.to(query.dtype))
    found = None
    if plan.told is not None:
        given = output, lse, grad_output, grad_lse
        found = ready.backward(query, key, value, sink, scoring.bias, dropout, plan, learned, *given)
    if found is not None:
        grads, of_learned, _ = found
    else:
        grad_sink = None if sink is None else sink.new_empty(sink.shape, dtype=lse.dtype)
        order = Order(query, key, value, sink, scoring, dropout, plan, learned)
        order.tensors("output" if output.dtype is query.dtype else "exact", output)
        order.tensors("grad_output", grad_output)
        order.numbers("lse", lse)
        if grad_lse is not None:
            order.numbers("grad_lse", grad_lse.to(lse.dtype))
        if grad_sink is not None:
            order.numbers("grad_sink", grad_sink)
        three = query, key, value
        of_three, sums = _gradients(order, *three)
        if order.is_suspect():
            order.begin_again()
            of_three, _ = _gradients(order, *three, careful=True)
        elif plan.told is not None:
            ready.remember_backward(order, three, sink, learned, dropout, output, grad_output, lse, grad_lse, sums)
        grads = [*of_three, None if sink is None or grad_sink is None else grad_sink.to(sink.dtype)]
        of_learned = order.added.finish() if order.learns else []
    return (*grads, *ready.of_each(learned, of_learned))


def _gradients(
    order: Order, query: Tensor, key: Tensor, value: Tensor, *, careful: bool = False
) -> tuple[list[Tensor], tuple[int, ...]]:
    """The gradients of query, key and value, laid like them, and how many numbers were added up elsewhere for each; the
    gradients of what is added to scores are left there."""
    dtype, lanes = wide(query.dtype), order.compiled.lanes
    in_common = _in_common(order)
    order.number("batches_in_common", in_common[0])
    order.number("heads_in_common", in_common[1])
    batches, heads = (1 if one else size for size, one in zip(key.shape[:2], in_common, strict=True))
    deal = dealing(key, value, query.shape[2], (batches, heads), lanes, learns=order.learns)
    order.deal(deal.chunks, deal.piece, all_heads=deal.all_heads)
    grads, elsewhere = [laid_like(tensor, tensor.shape[3]) for tensor in (query, key, value)], [0, 0, 0]
    of_a_thread = sums_of_a_thread(key, value, heads, lanes, deal.piece)
    by_thread = deal.sums == 1 and order.is_whole and of_a_thread <= most_sums_of_a_thread()
    if not deal.piece:
        order.tensors("grad_query", grads[0])
    elif deal.chunks == 1 and grads[0].dtype is dtype:
        order.tensors("sum_query", grads[0])
    else:
        elsewhere[0] = order.sums("query", grads[0], deal.chunks)
    for n, (name, grad) in enumerate((("key", grads[1]), ("value", grads[2])), start=1):
        whole = grad.shape[3] % lanes == 0 and grad.dtype is dtype and order.plan.reordering is None
        lie_apart = grad.stride(2) != grad.shape[3]
        if deal.sums == 1 and whole and not (by_thread and lie_apart):
            order.tensors(f"sum_{name}", grad)
        elif by_thread:
            order.number(f"sum_{name}", 0)
            order.tensors(f"grad_{name}", grad)
        else:  # whole vectors are added up, by each thread
            elsewhere[n] = order.sums(name, grad, deal.sums)
    by_distance = None
    if order.learns and order.added.learns_by_distance:
        assert order.added.row is not None
        by_distance = order.added.row.new_zeros(deal.chunks, *query.shape[:2], order.added.row.shape[2])
    if order.learns:
        order.gradients(by_distance)
    order.run(order.compiled.backward, careful=careful, adds_up=True)
    if any(elsewhere):
        order.finish()
    if by_distance is not None:
        order.added.pull_distances(by_distance.sum(0).flip(2))
    return grads, tuple(elsewhere)


def _in_common(order: Order) -> tuple[bool, bool]:
    """Whether batch indices, and heads, have numbers of a bias that learns in common."""
    batch, heads = order.scoring.grid[:2]
    bias = order.scoring.bias
    if bias is None or not order.learns:
        return False, False
    of_sorted = read_by_place(bias, order.compiled.dtype)
    terms = (bias if of_sorted is None else of_sorted.bias).terms()
    shapes = [term.numbers.shape for term in terms if isinstance(term, Given) and term.numbers.requires_grad]
    return any(shape[0] < batch for shape in shapes), any(shape[1] < heads for shape in shapes)

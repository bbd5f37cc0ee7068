"""The strips of a call by the compiled library: all of them in one call, forward and backward.

The library (c/attention.c) computes the scores of a few queries with a few keys at a time and uses them while they are
in the cache. So a score costs about the same in any strip, and what is added to it is read where it is:

    a tensor            with its own strides
    a bias by distance  one row of numbers for the whole call, of which every strip reads a part
    what a mask hides   0 and -inf of a strip, key by key, kept with the plan

Scores, weights and all sums are float32 or wider, whatever the dtype of query, key and value.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard import measured, processor
from regard.biases import Given
from regard.dropout import Dropout
from regard.graphs import concrete
from regard.kernels import fused
from regard.kernels.call import Call, learns
from regard.kernels.strips import engine, tuning
from regard.kernels.strips.added import Added, is_of_distance, read_by_place
from regard.kernels.strips.binding import AT, DTYPES, CallOf, Compiled, Words, compiled, is_there
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import Kind, PlanOptions, Strip
from regard.kernels.strips.reordering import reordering
from regard.kernels.strips.work import Work, works
from regard.numerics import row_products, upcast, wide
from regard.rules import contents
from regard.scores import Scoring
from regard.shapes import Grid

MAX_UNEVEN = 1.15
"""Gradients of keys are added up by one thread for each kv head, or by several, if otherwise the slowest thread took
more than this many times its share."""


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
        return "it reads tensors where they are: on a CPU, outside of transforms of torch.func"
    if query.dtype not in DTYPES:
        return f"it does not compute in {query.dtype}"
    if query.dtype is torch.bfloat16 and processor.AMX:
        return "it does not use the matrix instructions (AMX) that this processor has for bfloat16"
    if scoring.additive is not None:
        return "it does not support additive similarity"
    if not (all(grid[:4]) and query.shape[3] and call.value.shape[3]):
        return "there is nothing to compute"
    if any(not _is_alone(tensor, call) for tensor in scoring.learned() if learns(tensor)):
        return "several scores share a number of a bias that learns"
    return None


def _is_alone(tensor: Tensor, call: Call) -> bool:
    """Whether every number of a bias that learns belongs to one score, or to one distance, so that threads do not add
    to the same."""
    bias, grid = call.scoring.bias, call.scoring.grid
    assert bias is not None
    if is_of_distance(bias):
        return True
    given = [term for term in bias.terms() if isinstance(term, Given) and term.numbers is tensor]
    return len(given) == 1 and tensor.dtype is wide(call.query.dtype) and tensor.shape == grid[:4]


def plan_of(call: Call) -> StripPlan:
    """The strips of a call."""
    scoring, grid = call.scoring, call.scoring.grid
    mask = scoring.mask_or_everything
    evaluated = not is_quickly_planned(call)
    most = tuning.MAX_TILE_SCORES // max(1, grid.batch * grid.heads) if evaluated else None
    together = not evaluated and (scoring.bias is None or is_of_distance(scoring.bias))
    by = PlanOptions(
        tuning.SHORT_STRIP_QUERIES_NATIVE, tuning.SCORES_PER_STRIP_NATIVE, together=together, in_place=True,
        most_scores=most,
    )  # fmt: skip
    return plan_strips(mask, grid, by)


def is_quickly_planned(call: Call) -> bool:
    """Whether neither mask nor bias is evaluated to find strips and what is added to them."""
    return call.scoring.mask_or_everything.closed_form and not _is_evaluated(call.scoring, call.query.dtype)


def _is_evaluated(scoring: Scoring, dtype: torch.dtype) -> bool:
    """Whether a bias makes a number for every score, which is then held."""
    bias = scoring.bias
    if bias is None or read_by_place(bias, wide(dtype)) is not None:
        return False
    return not all(
        term.of_distance or (isinstance(term, Given) and term.numbers.dtype is wide(dtype)) for term in bias.terms()
    )


def beats(call: Call, scores: int) -> bool:
    """Whether this takes less time than torch's own function, which would compute so many scores."""
    learns, size = call.learns, (call.query.shape[3] + call.value.shape[3]) / 128
    to_begin = tuning.SCORES_TO_BEGIN_THAT_LEARN if learns else tuning.SCORES_TO_BEGIN
    if call.scoring.grid.query_len < 2 * _compiled(call.query.dtype).lanes:
        to_begin *= tuning.FEW_QUERIES
    bias = call.scoring.bias
    if bias is not None and (not is_of_distance(bias) or reordering(call) is not None):
        to_begin += tuning.SCORES_TO_ADD
    most = size * scores / torch.get_num_threads() - to_begin
    if most <= 0:
        return False
    return size * num_scores(call) / torch.get_num_threads() * price(call.query.dtype) < most


@cache
def price(dtype: torch.dtype) -> float:
    """How long a score takes, over the time that torch's operator takes here; 1 where nothing is measured."""
    return measured.alone(lambda: measured.ratio(f"native / fused, {dtype}", *_two_ways(dtype)))


def _two_ways(dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same scores, computed here and by torch's operator."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 256, 64, generator=draw).to(dtype).unbind()
    call = Call(query, key, value, Scoring(Grid(1, 4, 256, 256, query.device), 0.125, None, None, None, None, None))
    given = query, key, value, None, call.scoring, None, plan_of(call)
    return (
        lambda: forward(*given, wants_lse=False, learns=False),
        lambda: fused.full_attention(query, key, value, scale=0.125),
    )


def num_scores(call: Call) -> int:
    """Scores of all strips; of a causal square about half."""
    grid = call.scoring.grid
    unit = 2 * _compiled(call.query.dtype).lanes
    return sum(
        (_of_square(strip, unit) if strip.kind is Kind.CAUSAL else len(strip.queries) * strip.keys)
        * strip.times
        * grid.heads
        * (grid.batch if strip.batch_index is None else 1)
        for strip in plan_of(call).strips
    )


def _of_square(strip: Strip, unit: int) -> int:
    return sum(min(start + unit, strip.keys) * min(unit, strip.keys - start) for start in range(0, strip.keys, unit))


def peak_bytes(call: Call) -> int:
    """The log-sum-exp, and masks and biases that are evaluated, of as many strips as are given at once."""
    grid, size = call.scoring.grid, upcast(call.query[:0]).element_size()
    evaluated, kept = _is_evaluated(call.scoring, call.query.dtype), 0
    for strip in plan_of(call).strips:
        if strip.kind is Kind.MASKED or evaluated:
            kept = max(kept, len(strip.queries) * strip.keys)
    heads = grid.batch * grid.heads if evaluated else 1
    return size * grid.batch * grid.heads * grid.query_len + (1 + 2 * size) * heads * kept


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
    precision unrounded, if something learns, since the gradients of scores are differences from it."""
    order = Order(query, key, value, sink, scoring, dropout, plan)
    exact = output = query.new_empty((*query.shape[:3], value.shape[3]))
    order.tensor("output", output)
    dtype = wide(query.dtype)
    if learns and query.dtype is not dtype:
        exact = query.new_empty(output.shape, dtype=dtype)
        order.tensor("exact", exact)
    lse = query.new_empty(query.shape[:3] if wants_lse else (0,), dtype=dtype)
    if wants_lse:
        order.numbers("lse", lse)
    order.run(order.compiled.forward)
    if order.is_suspect():  # a hidden key may have had a part
        order.run(order.compiled.forward, careful=True)
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
    order = Order(query, key, value, sink, scoring, dropout, plan, learned)
    order.tensor("output" if output.dtype is query.dtype else "exact", output)
    order.tensor("grad_output", grad_output if grad_output.dtype is query.dtype else grad_output.to(query.dtype))
    order.numbers("lse", lse)
    if grad_lse is not None:
        order.numbers("grad_lse", grad_lse.to(lse.dtype))
    found = _gradients(order, query, key, value)
    if order.is_suspect():
        order.begin_again()
        found = _gradients(order, query, key, value, careful=True)
    grad_sink = None
    if sink is not None:
        delta = row_products(grad_output, output)
        grad_sink = engine.gradient_of_sink(sink, lse, delta if grad_lse is None else delta.sub_(grad_lse))
    of_learned = iter(order.added.finish() if order.learns else ())
    grads = (next(of_learned).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned)
    return (*found, grad_sink, *grads)


def _gradients(order: "Order", query: Tensor, key: Tensor, value: Tensor, *, careful: bool = False) -> list[Tensor]:
    """The gradients of query, key and value; those of what is added to scores are left there."""
    dtype, lanes = wide(query.dtype), order.compiled.lanes
    chunks = chunks_of(query.shape, key.shape[1], torch.get_num_threads(), 2 * lanes)
    of_query = query.new_empty(query.shape, dtype=dtype)
    order.tensor("grad_query", of_query)
    grads = [of_query]
    for name, tensor in (("key", key), ("value", value)):
        size = -(-tensor.shape[3] // lanes) * lanes
        total = tensor.new_zeros((chunks, *tensor.shape[:3], size), dtype=dtype)
        order.tensor(f"grad_{name}", total[0])
        order.number(f"chunk_{name}", total.stride(0))
        grads.append((total[0], total)[chunks > 1])
    order.number("chunks", chunks)
    by_distance = None
    if order.learns and order.added.learns_by_distance:
        assert order.added.row is not None
        by_distance = order.added.row.new_zeros(chunks, *query.shape[:2], order.added.row.shape[2])
    order.run(order.compiled.backward, by_distance, careful=careful)
    if by_distance is not None:
        order.added.pull_distances(by_distance.sum(0).flip(2))
    if chunks > 1:
        grads[1:] = [total.sum(0) for total in grads[1:]]
    tensors = query, key, value
    grads = [
        g if g.shape[3] == t.shape[3] else g[..., : t.shape[3]].contiguous()
        for g, t in zip(grads, tensors, strict=True)
    ]
    return [g if query.dtype is dtype else g.to(query.dtype) for g in grads]


def chunks_of(shape: Sequence[int], kv_heads: int, threads: int, unit: int) -> int:
    """By how many threads the queries of a kv head are computed."""
    stacks = shape[0] * kv_heads
    most = min(threads, max(1, shape[2] // unit))
    for chunks in range(1, most + 1):
        items = stacks * chunks
        if -(-items // threads) * threads <= MAX_UNEVEN * items:
            return chunks
    return most


@cache
def _compiled(dtype: torch.dtype) -> Compiled:
    found = compiled(wide(dtype))
    assert found is not None  # or `cannot` said so
    return found


class Order:
    """A call of the library: what both passes are told, and tensors whose memory must not be freed before.

    Attributes:
        learns: whether a bias wants a gradient.
    """

    __slots__ = ("_added", "_call", "_held", "_learned", "_words", "compiled", "learns", "plan", "scoring")

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: Dropout | None,
        plan: StripPlan,
        learned: Sequence[Tensor] = (),
    ) -> None:
        self.scoring, self.plan, self.compiled = scoring, plan, _compiled(query.dtype)
        self._added: Added | None = None
        self._learned, self.learns = learned, any(tensor.requires_grad for tensor in learned)
        self._held: list[Any] = []
        form = query.shape, value.shape, query.dtype, scoring.scale, scoring.softcap
        known = plan.orders.get(form)
        if known is None:
            known = plan.orders[form] = _order(query, value, scoring)
        self._call = CallOf.from_buffer_copy(known)
        self._words = Words.from_buffer(self._call)
        self.tensor("query", query)
        self.tensor("key", key)
        self.tensor("value", value)
        self.number("threads", torch.get_num_threads())
        if sink is not None:
            self.numbers("sink", sink.to(wide(query.dtype)))
        if dropout is not None:
            numbers = dropout.numbers(scoring.grid)
            self.numbers("row_bits", numbers.rows)
            self.numbers("column_bits", numbers.columns)
            self.numbers("column_odd", numbers.odds().expand_as(numbers.columns).int())
            self.number("column_batch", scoring.grid.key_len if len(numbers.columns) > 1 else 0)
            self._call.kept_factor, self._call.kept_least = dropout.factor, dropout.least

    def tensor(self, name: str, tensor: Tensor) -> None:
        """Tells of a tensor [batch, heads, length, size]; of a copy, if its features are not consecutive."""
        batch, head, row, feature = tensor.stride()
        if (feature != 1 and tensor.shape[3] > 1) or tensor.is_neg():
            tensor = tensor.resolve_neg().contiguous()
            batch, head, row, _ = tensor.stride()
        self._held.append(tensor)
        at = AT[name]
        self._words[at : at + 4] = [tensor.data_ptr(), batch, head, row]

    def numbers(self, name: str, tensor: Tensor) -> None:
        """Tells of numbers one after another."""
        tensor = tensor.resolve_neg().contiguous()
        self._held.append(tensor)
        self._words[AT[name]] = tensor.data_ptr()

    def number(self, name: str, number: int) -> None:
        """Tells a number."""
        self._words[AT[name]] = number

    @property
    def added(self) -> Added:
        """What is added to scores."""
        if self._added is None:
            self._added = Added(self.scoring, self.plan, self.compiled.dtype, self._learned, by_place=True)
        return self._added

    def begin_again(self) -> None:
        """Forgets the gradients of what is added to scores."""
        self._added = None

    def run(self, way: Callable[[CallOf], None], by_distance: Tensor | None = None, *, careful: bool = False) -> None:
        """Computes all strips, one way.

        Args:
            by_distance: as of `work.Tiles`. careful: takes what nobody sees as 0.
        """
        self.number("careful", careful)
        for work in self._works(by_distance):
            at = AT["strip"]
            self._words[at : at + 3] = [*work.addresses()]
            self.number("strips", len(work.strips))
            way(self._call)

    def _works(self, by_distance: Tensor | None) -> Iterable[Work]:
        kept_as = self._kept_as()
        known = None if kept_as is None else self.plan.work.get(kept_as)
        if known is not None:
            return (known,)
        return works(self.plan, self.added, by_distance, 2 * self.compiled.lanes, kept_as)

    def _kept_as(self) -> Hashable | None:
        """What is equal for two calls only if the library is told the same of all strips; None if that is not kept, as
        of biases that are tensors, which would not be freed."""
        bias, dtype = self.scoring.bias, self.compiled.dtype
        if not self.plan.is_kept or self.learns:
            return None
        if bias is None:
            return dtype
        places = None
        if (by_place := read_by_place(bias, dtype)) is not None:  # the work holds them: no others take their names
            places, bias = (id(by_place.queries), id(by_place.keys)), by_place.bias
        found = contents(bias) if is_of_distance(bias) else None
        return None if found is None else (dtype, places, found)

    def is_suspect(self) -> bool:
        """Whether something hidden may have had a part in what was computed."""
        found = self._words[AT["suspect"]] != 0
        return found and (self.plan.hides or (self.scoring.bias is not None and self.added.hides))


def _order(query: Tensor, value: Tensor, scoring: Scoring) -> bytes:
    """What an order begins with."""
    call = CallOf()
    call.batches, call.heads, call.query_len, call.head_dim = query.shape
    _, call.kv_heads, call.key_len, call.value_dim = value.shape
    call.parts, call.last_query = 1, call.query_len - 1
    call.dtype, call.scale, call.softcap = DTYPES[query.dtype], scoring.scale, scoring.softcap or 0.0
    return bytes(call)

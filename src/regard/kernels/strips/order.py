"""A call of the compiled library: what it is told, from the structures of a plan and the tensors of the call."""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.biases import Bias, Given
from regard.dropout import Dropout, odd_keys
from regard.kernels.known import keep
from regard.kernels.strips.added import Added, is_read, read_by_place, tensors_of
from regard.kernels.strips.binding import AT, DTYPES, CallOf, Compiled, Told, Words, compiled
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.intervals import Interval
from regard.kernels.strips.work import Work, gradients_of, strides_of, works
from regard.numerics import wide
from regard.rules import contents
from regard.scores import Scoring
from regard.shapes import Grid

MAX_KEPT = 16
"""Calls of a plan that are kept: those of a model whose layers differ in their biases by distance."""


@cache
def library_for(dtype: torch.dtype) -> Compiled:
    """The library for tensors of a dtype, which must be there."""
    found = compiled(wide(dtype))
    assert found is not None  # or `native.cannot` said so
    return found


def as_read(tensor: Tensor) -> Tensor:
    """A tensor [batch, heads, length, size], or a copy of it, if its features are not consecutive numbers."""
    if (tensor.stride(3) == 1 or tensor.shape[3] == 1) and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().contiguous()


def _lies_by_token(tensor: Tensor) -> bool:
    """Whether heads lie within each token, as a layer projects them and takes them back, not each head by itself."""
    return tensor.stride(1) < tensor.stride(2)


def laid_like(tensor: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for [batch, heads, length, size] whose heads and tokens lie as those of a tensor do."""
    batch, heads, length, _ = tensor.shape
    row = heads * size if _lies_by_token(tensor) else size
    head = length * size if row == size else size
    return tensor.new_empty_strided((batch, heads, length, size), (heads * length * size, head, row, 1), dtype=dtype)


def as_laid(like: Tensor, tensor: Tensor) -> Tensor:
    """A tensor as `laid_like` lays it: itself, if it lies so."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if _lies_by_token(like) else tensor.contiguous()


class Order:
    """A call of the library: what both passes are told, and tensors whose memory must not be freed before.

    Attributes:
        learns: whether a bias wants a gradient.
    """

    __slots__ = (
        "_added", "_chunks", "_form", "_held", "_learned", "_of_plan", "_told", "_words", "_work", "compiled",
        "learns", "plan", "scoring",
    )  # fmt: skip

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
        self.scoring, self.plan, self.compiled = scoring, plan, library_for(query.dtype)
        self._added: Added | None = None
        self._learned, self.learns = learned, any(tensor.requires_grad for tensor in learned)
        self._held: list[Any] = []
        self._chunks = 1
        self._form = plan.form or form_of(query, value, scoring, plan)
        known: tuple[bytes, Work | None] | None = None if self._form is None else plan.orders.get(self._form)
        self._told, self._work = (_order(query, value, scoring), None) if known is None else known
        self._words = Words.from_buffer_copy(self._told)
        self.tensors("query", query, key, value)
        self._words[AT["threads"]], self._words[AT["is_part"]] = torch.get_num_threads(), plan.is_part
        if plan.interval is not None:
            self._held.append(plan.interval)
            tell_interval(self._words, plan.interval)
        if plan.reordering is not None:
            for side, places in (("query_order", plan.reordering.queries), ("key_order", plan.reordering.keys)):
                self.numbers(side, places)
                self.number(f"{side}_batch", places.shape[1] if len(places) > 1 else 0)
        self._of_plan = self._held[3:]
        self._held += tell_added(self._words, sink, scoring.bias, self.compiled.dtype)
        if dropout is not None:
            self._held += tell_dropout(self._words, dropout, scoring.grid, self.compiled)

    def tensors(self, name: str, *tensors: Tensor) -> None:
        """Tells of tensors [batch, heads, length, size], the first by this name and the others by those that follow; of
        copies, if their features are not consecutive."""
        told: list[ctypes.c_int64 | int] = []
        for tensor in tensors:
            *apart, feature = tensor.stride()
            if feature != 1 or tensor.is_neg():
                tensor = as_read(tensor)
                *apart, _ = tensor.stride()
            self._held.append(tensor)
            told += tensor.data_ptr(), *apart
        at = AT[name]
        self._words[at : at + len(told)] = told

    def numbers(self, name: str, tensor: Tensor) -> None:
        """Tells of numbers one after another."""
        tensor = tensor.resolve_neg().contiguous()
        self._held.append(tensor)
        self._words[AT[name]] = tensor.data_ptr()

    def number(self, name: str, number: int) -> None:
        """Tells a number."""
        self._words[AT[name]] = number

    def sums(self, name: str, grad: Tensor, chunks: int) -> int:
        """Tells where a gradient goes, and where each of so many chunks adds up its share of it before, in whole
        vectors; returns of how many numbers."""
        (batch, heads, length, size), lanes = grad.shape, self.compiled.lanes
        row = -(-size // lanes) * lanes
        chunk = batch * heads * length * row
        room = grad.new_empty(chunks * chunk, dtype=self.compiled.dtype)
        self._held.append(room)
        self.tensors(f"grad_{name}", grad)
        at = AT[f"sum_{name}"]
        self._words[at : at + 4] = [room.data_ptr(), heads * length * row, length * row, row]
        self.number(f"chunk_{name}", chunk if chunks > 1 else 0)  # 0: all threads add to the same room
        return room.numel()

    def of_form(self) -> tuple[Told, object]:
        """What calls of the same form are told, but for their tensors; and what must not be freed before the last."""
        words = Words.from_buffer_copy(self._words)
        words[AT["suspect"]] = 0
        return words, (self._work, self._of_plan)

    @property
    def is_whole(self) -> bool:
        """Whether it is known that the library is told of all strips at once."""
        return self._work is not None

    @property
    def added(self) -> Added:
        """What is added to scores."""
        if self._added is None:
            self._added = Added(
                self.scoring, self.plan, self.compiled.dtype, self._learned, by_place=True, chunks=self._chunks
            )
        return self._added

    def deal(self, chunks: int, piece: int = 0, *, all_heads: bool = False) -> None:
        """Tells that what is computed of a head is given to so many threads, each of which adds up over its own.

        Args:
            piece: of the keys, so many at a time; 0: of the queries.
            all_heads: of all kv heads of a batch index, one after another.
        """
        self._chunks = chunks
        self.number("chunks", chunks)
        self.number("piece", piece)
        self.number("all_heads", all_heads)

    def begin_again(self) -> None:
        """Forgets the gradients of what is added to scores."""
        self._added = None

    def gradients(self, by_distance: Tensor | None) -> None:
        """Tells where the gradients of what is added to scores go.

        Args:
            by_distance: as of `gradients_of`.
        """
        array = gradients_of(self.added, by_distance)
        self._held += array, by_distance
        self._words[AT["gradient"]] = ctypes.addressof(array)

    def run(
        self, way: Callable[[Told], None], *, careful: bool = False, goes_on: bool = False, adds_up: bool = False
    ) -> None:
        """Computes all strips, one way.

        Args:
            careful: takes what nobody sees as 0.
            goes_on: from what was computed of other keys.
            adds_up: whether strips add to what earlier ones left, so that all but the first go on from it.
        """
        self._words[AT["careful"]], self._words[AT["goes_on"]] = careful, goes_on
        if self._work is not None:  # it is told of its strips
            way(self._words)
            return
        parts = 0
        for work in works(self.plan, self.added, 2 * self.compiled.lanes):
            _tell(self._words, work)
            self._words[AT["goes_on"]] = goes_on or (adds_up and parts > 0)
            way(self._words)
            parts += 1
        if parts == 1:
            self._work = work
            if self._form is not None:
                self._keep(work)

    def finish(self) -> None:
        """Writes the gradients that threads added up elsewhere."""
        self.compiled.finish(self._words)

    def _keep(self, work: Work) -> None:
        """With the plan, for other calls of the same form."""
        words = Words.from_buffer_copy(self._told)
        _tell(words, work)
        assert self._form is not None
        keep(self.plan.orders, self._form, (bytes(words), work), MAX_KEPT)

    def is_suspect(self) -> bool:
        """Whether something hidden may have had a part in what was computed."""
        found = self._words[AT["suspect"]] != 0
        return found and (self.plan.hides or (self.scoring.bias is not None and self.added.hides))


def orders_of(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
    plan: StripPlan,
) -> list[Order]:  # fmt: skip
    """A plan and those beside it, of which each goes on from what those before left: the sink is the first one's."""
    sinks = (sink, *(None for _ in plan.others))
    return [
        Order(query, key, value, of_part, part.in_order(scoring), dropout, part)
        for of_part, part in zip(sinks, plan.parts, strict=True)
    ]


def form_of(query: Tensor, value: Tensor, scoring: Scoring, plan: StripPlan) -> Hashable | None:
    """What is equal for two calls of a plan only if the library is told the same but for their tensors; None if that is
    not kept.

    Args:
        scoring: as it is for the plan's strips (`StripPlan.in_order`).
    """
    if not plan.is_kept:
        return None
    bias, dtype, by_place = scoring.bias, wide(query.dtype), False
    if bias is not None and (of_sorted := read_by_place(bias, dtype)) is not None:
        by_place, bias = True, of_sorted.bias
    added = likeness_of(bias, dtype)
    if added is None:
        return None
    return query.shape, value.shape, query.dtype, scoring.scale, scoring.softcap, by_place, added


def by_form(plan: StripPlan, query: Tensor, value: Tensor, scoring: Scoring) -> StripPlan:
    """A plan for calls of one form alone: that of this call."""
    return plan.of_form(form_of(query, value, plan.in_order(scoring), plan))


def likeness_of(bias: Bias | None, dtype: torch.dtype) -> tuple[Hashable, ...] | None:
    """What is equal for two biases only if the library is told the same of them, but for where their tensors begin;
    None if not known."""
    added = () if bias is None else tuple(_likeness(term, dtype) for term in bias.terms())
    return None if None in added else added


def _likeness(bias: Bias, dtype: torch.dtype) -> Hashable | None:
    """The same of one term."""
    if isinstance(bias, Given):
        numbers = bias.numbers
        return (numbers.dtype, numbers.shape, numbers.stride()) if is_read(numbers, dtype) else None
    return contents(bias) if bias.of_distance else None


def tell_interval(words: Told, interval: Interval) -> None:
    """Tells of an interval of keys for each query, which must not be freed before the library is done."""
    first, end, seen = interval
    at = AT["first_key"]
    assert AT["keys_query"] == at + 3
    words[at : at + 4] = [first.data_ptr(), end.data_ptr(), *strides_of(first)]
    if seen is not None:
        at = AT["seen"]
        words[at : at + 5] = [seen.data_ptr(), *strides_of(seen)]


def tell_added(words: Told, sink: Tensor | None, bias: Bias | None, dtype: torch.dtype) -> list[object]:
    """Tells of a sink and of the tensors of a bias; returns what must not be freed before the library is done."""
    held: list[object] = []
    if bias is not None and (given := tensors_of(bias, dtype)):
        begin = (ctypes.c_void_p * len(given))(*map(Tensor.data_ptr, given))
        held += *given, begin
        words[AT["given"]] = ctypes.addressof(begin)
    if sink is not None:
        sink = sink_as_read(sink, dtype)
        held.append(sink)
        words[AT["sink"]] = sink.data_ptr()
    return held


def sink_as_read(sink: Tensor, dtype: torch.dtype) -> Tensor:
    """A sink as the library reads it, or a copy."""
    return sink.detach().to(dtype).resolve_neg().contiguous()


def tell_dropout(words: Told, dropout: Dropout, grid: Grid, compiled: Compiled) -> list[object]:
    """Tells of the random numbers that decide which weights are dropped; returns what must not be freed before the
    library is done."""
    words[AT["kept_least"]] = dropout.least
    ctypes.c_double.from_buffer(words, 8 * AT["kept_factor"]).value = dropout.factor
    if not dropout.places:
        written, odd = dropout.written(grid, compiled.write_random), _kept_odd_keys(grid.key_len)
        rows = words[AT["row_bits"]] = written.data_ptr()
        words[AT["column_bits"]] = rows + (len(written) - grid.key_len) * written.element_size()
        words[AT["column_odd"]], words[AT["column_batch"]] = odd.data_ptr(), 0
        return [written, odd]
    numbers = dropout.numbers(grid)
    held = [
        tensor.contiguous() for tensor in (numbers.rows, numbers.columns, numbers.odds().expand_as(numbers.columns))
    ]
    words[AT["row_bits"]], words[AT["column_bits"]], words[AT["column_odd"]] = map(Tensor.data_ptr, held)
    words[AT["column_batch"]] = grid.key_len if len(numbers.columns) > 1 else 0
    return [*held]


@lru_cache(maxsize=8)
def _kept_odd_keys(length: int) -> Tensor:
    with torch.inference_mode(False):
        return odd_keys(length, 0, torch.device("cpu"))


def _tell(words: Told, work: Work) -> None:
    words[AT["strip"]], words[AT["span"]], words[AT["tile"]] = work.addresses()
    words[AT["strips"]] = len(work.strips)


def _order(query: Tensor, value: Tensor, scoring: Scoring) -> bytes:
    """What an order begins with."""
    call = CallOf()
    call.batches, call.heads, call.query_len, call.head_dim = query.shape
    _, call.kv_heads, call.key_len, call.value_dim = value.shape
    call.parts, call.last_query = 1, call.query_len - 1
    call.dtype, call.scale, call.softcap = DTYPES[query.dtype], scoring.scale, scoring.softcap or 0.0
    return bytes(call)

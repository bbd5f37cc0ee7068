"""The strips of a plan as the compiled library reads them: numbers, and the addresses of what is added to scores."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.kernels.hidden import MAX_KEPT_SCORES
from regard.kernels.strips.added import Added, is_read
from regard.kernels.strips.binding import SpanOf, StripOf, TileAt
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.plan import Kind, Strip

Row = tuple[int | None, ...]


@dataclass(slots=True)
class Work:
    """Strips as the library reads them.

    Attributes:
        held: tensors that were made for it, by the address of their memory; biases that are given are the call's.
    """

    strips: list[Row] = field(default_factory=list)
    spans: list[Row] = field(default_factory=list)
    tiles: list[Row] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    arrays: Sequence[Any] = ()

    def addresses(self) -> tuple[int, int, int]:
        """Where strips, spans and tiles are; no strip may be added afterwards."""
        if not self.arrays:
            self.arrays = _array(StripOf, self.strips), _array(SpanOf, self.spans), _array(TileAt, self.tiles)
        strips, spans, tiles = map(ctypes.addressof, self.arrays)
        return strips, spans, tiles

    @property
    def numbers(self) -> int:
        """Numbers that are held."""
        return sum(map(Tensor.numel, self.held.values()))

    def hold(self, tensor: Tensor, at: int = 0) -> int:
        """Where a number of a tensor is, which is held from then on."""
        self.held[tensor.untyped_storage().data_ptr()] = tensor
        return _address(tensor, at)

    def add(self, strip: Strip, tiles: "Tiles") -> None:
        """Adds a strip."""
        of_strip, spans, start = tiles.of(strip, self), [span for span in strip.spans if span], 0
        for number, span in enumerate(spans):
            first = len(self.tiles)
            shift = strip.step if number == len(spans) - 1 else 0  # equal strips have all other keys in common
            self.tiles += of_strip(start, span, strip.step - shift)
            causal = strip.kind is Kind.CAUSAL
            self.spans.append((span.start, span.step, len(span), shift, causal, first, len(self.tiles) - first))
            start += len(span)
        if strip.merges:  # of the same queries as the one before
            *same, before = self.strips.pop()
            assert before is not None
            self.strips.append((*same, before + len(spans)))
            return
        queries, batch = strip.queries, -1 if strip.batch_index is None else strip.batch_index
        places = queries.start, queries.step, len(queries), len(self.spans) - len(spans), len(spans)
        self.strips.append((batch, strip.times, strip.step, *places))


def _array(kind: Any, rows: list[Row]) -> Any:
    return (kind * len(rows))(*rows)


AS_THEY_ARE: Row = (None, None, 0, 0)
"""Places of tokens that are not sorted."""


def works(plan: StripPlan, added: Added, by_distance: Tensor | None, spare: int) -> Iterator[Work]:
    """The strips, as many at once as hold few numbers.

    Args:
        by_distance, spare: as of `Tiles`.
    """
    tiles, work = Tiles(added, by_distance, spare), Work()
    for strip in plan.strips:
        if work.numbers > MAX_KEPT_SCORES and not strip.merges:  # which belongs to the one before
            yield work
            work = Work()
        work.add(strip, tiles)
    yield work


class Tiles:
    """What is added to the scores of strips, as the library reads it.

    Args:
        by_distance: gradients of biases by distance, [chunks, batch, heads, distances] in the order of the row of
            numbers; None if none are wanted.
        spare: numbers that the library may read beyond those of the last query.
    """

    def __init__(self, added: Added, by_distance: Tensor | None, spare: int) -> None:
        self._added, self._by_distance = added, by_distance
        self._spare = spare
        self._row: Tensor | None = None
        if added.row is not None:  # by the query's place less the key's, so that queries are consecutive
            length = added.row.shape[2]
            self._row = added.row.new_empty(*added.row.shape[:2], length + self._spare)[..., :length]
            self._row.copy_(added.row.flip(2))

    def of(self, strip: Strip, work: Work) -> Callable[[int, range, int], Iterator[Row]]:
        """A function of the first column of a span, its keys, and how much farther ahead of them the queries of the
        next of equal strips are."""
        of_strip, queries = self._added.of(strip), strip.queries

        def of_span(column: int, keys: range, farther: int) -> Iterator[Row]:
            places = self._places(work)
            at, farther = ((queries, keys), farther) if places is AS_THEY_ARE else ((range(1), range(1)), 0)
            if self._row is not None:
                yield (*self._of_distance(self._row, *at, farther, work), *places)
            for numbers, total in self._added.given:
                yield (*_of_given(numbers, self._added.dtype, total, *at, work), *places)
            if of_strip.made is not None:
                assert not of_strip.made.requires_grad  # the library reads it, and adds nothing to its gradient
                yield (*_whole(of_strip.made, column, len(keys), 0, work), *AS_THEY_ARE)
            if of_strip.hidden is not None:
                hidden = of_strip.hidden.by_key(self._added.dtype, self._spare).mT
                yield (*_whole(hidden, column, len(keys), self._spare, work), *AS_THEY_ARE)

        return of_span

    def _places(self, work: Work) -> Row:
        """The places of sorted tokens."""
        if self._added.places is None:
            return AS_THEY_ARE
        queries, keys = self._added.places
        of_batch = (len(places) > 1 and places.stride(0) for places in (queries, keys))
        return work.hold(queries), work.hold(keys), *of_batch

    def _of_distance(self, row: Tensor, queries: range, keys: range, farther: int, work: Work) -> Row:
        first = queries.start - keys.start + self._added.scoring.grid.key_len - 1
        steps, grads = (queries.step, -keys.step), self._by_distance
        of_grads: Row = (None, 0, 0, 0, 0, 0)
        if grads is not None:
            chunk, batch, head, _ = grads.stride()
            of_grads = _address(grads, first), batch, head, *steps, chunk
        return (work.hold(row, first), *_strides(row)[:2], *steps, farther, self._spare, *of_grads)


def _of_given(
    numbers: Tensor, dtype: torch.dtype, total: Tensor | None, queries: range, keys: range, work: Work
) -> Row:
    """A bias tensor and its gradient, as in `Added.given`."""
    if not is_read(numbers, dtype):
        rows, columns = (slice(part.start, part.stop, part.step) for part in (queries, keys))
        numbers = numbers[:, :, rows if numbers.shape[2] > 1 else slice(None)]
        numbers = numbers[..., columns if numbers.shape[3] > 1 else slice(None)].to(dtype).resolve_neg().contiguous()
        first = work.hold(numbers), *_strides(numbers), 0, 0
    else:
        batch, head, query, key = _strides(numbers)
        at = queries.start * query + keys.start * key
        first = _address(numbers, at), batch, head, query * queries.step, key * keys.step, 0, 0
    if total is None:
        return (*first, None, 0, 0, 0, 0, 0)
    chunk, batch, head, query, key = _strides(total)
    at = queries.start * query + keys.start * key
    return (*first, _address(total, at), batch, head, query * queries.step, key * keys.step, chunk)


def _whole(numbers: Tensor, column: int, columns: int, spare: int, work: Work) -> Row:
    """Numbers of a strip: the columns of one of its spans."""
    if numbers.shape[3] > 1:
        numbers = numbers[..., column : column + columns]
    return (work.hold(numbers), *_strides(numbers), 0, spare, None, 0, 0, 0, 0, 0)


def _address(tensor: Tensor, at: int) -> int:
    return tensor.data_ptr() + tensor.element_size() * at


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """How far numbers lie apart along each axis: 0 where one serves all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

"""The strips of a plan as the compiled library reads them: numbers, and the addresses of what is added to scores."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.kernels.hidden import MAX_KEPT_SCORES
from regard.kernels.strips.added import Added, is_read
from regard.kernels.strips.binding import BITS, DTYPES, FAR, OWN, GradientAt, SpanOf, StripOf, TileAt
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.intervals import library
from regard.kernels.strips.plan import Strip
from regard.masks.planning import Diagonals

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
        of_strip, start, first_span = tiles.of(strip, self), 0, len(self.spans)
        seen = [(span, diagonals) for span, diagonals in zip(strip.spans, tiles.diagonals(strip), strict=True) if span]
        for number, (span, diagonals) in enumerate(seen, 1):
            first = len(self.tiles)
            shift = strip.step if number == len(seen) else 0  # equal strips have all other keys in common
            self.tiles += of_strip(start, span, strip.step - shift, diagonals is None)
            low, high = (None, None) if diagonals is None else diagonals
            ends = -FAR if low is None else low, FAR if high is None else high
            self.spans.append((span.start, span.step, len(span), shift, *ends, first, len(self.tiles) - first))
            start += len(span)
        if strip.merges:  # of the same queries as the one before
            *same, before = self.strips.pop()
            assert before is not None
            self.strips.append((*same, before + len(seen)))
            return
        queries, batch = strip.queries, -1 if strip.batch_index is None else strip.batch_index
        places = queries.start, queries.step, len(queries), first_span, len(seen)
        self.strips.append((batch, strip.times, strip.step, *places))


def _array(kind: Any, rows: list[Row]) -> Any:
    return (kind * len(rows))(*rows)


def works(plan: StripPlan, added: Added, spare: int) -> Iterator[Work]:
    """The strips, as many at once as hold few numbers.

    Args:
        spare: as of `Tiles`.
    """
    tiles, work = Tiles(added, spare), Work()
    for strip in plan.strips:
        if work.numbers > MAX_KEPT_SCORES and not strip.merges:  # which belongs to the one before
            yield work
            work = Work()
        work.add(strip, tiles)
    yield work


NO_GRADIENT, OF_DISTANCES, OF_TENSORS = -1, 0, 1
"""Numbers of gradients: of biases by distance, and the first of bias tensors."""


def gradients_of(added: Added, by_distance: Tensor | None) -> Any:
    """Where the gradients of what is added to scores go, as the library reads it.

    Args:
        by_distance: those of biases by distance, [chunks, batch, heads, distances] in the order of `Tiles`; None if
            none are wanted.
    """
    rows: list[Row] = [(None, 0, 0, 0, 0, 0)]
    if by_distance is not None:
        rows = [(_address(by_distance, added.scoring.grid.key_len - 1), *by_distance.stride()[:3], 1, -1)]
    for _, total in added.given:
        rows.append((None, 0, 0, 0, 0, 0) if total is None else (total.data_ptr(), *strides_of(total)))
    return _array(GradientAt, rows)


def places_of_gradients(added: Added) -> tuple[int, ...] | None:
    """For each tensor that learns, which of the numbers of `gradients_of` is the address of its gradient; None if that
    is computed from others."""
    if not added.in_place:
        return None
    places = {total.data_ptr(): n for n, (_, total) in enumerate(added.given, OF_TENSORS) if total is not None}
    return tuple(places[grad.data_ptr()] * len(GradientAt._fields_) for grad in added.grads)


class Tiles:
    """What is added to the scores of strips, as the library reads it.

    Args:
        spare: numbers that the library may read beyond those of the last query.
    """

    def __init__(self, added: Added, spare: int) -> None:
        self._added = added
        self._spare = spare
        self._row: Tensor | None = None
        if added.row is not None:
            self._row = by_query(added.row, spare)

    def diagonals(self, strip: Strip) -> tuple[Diagonals | None, ...]:
        """As of the plan."""
        return self._added.plan.diagonals(strip)

    def of(self, strip: Strip, work: Work) -> Callable[[int, range, int, bool], Iterator[Row]]:
        """A function of the first column of a span, its keys, how much farther ahead of them the queries of the next of
        equal strips are, and whether only a mask tells what is hidden."""
        of_strip, queries = self._added.of(strip), strip.queries

        def of_span(column: int, keys: range, farther: int, masked: bool) -> Iterator[Row]:
            by_place = self._added.reads_by_place
            at, farther = ((range(1), range(1)), 0) if by_place else ((queries, keys), farther)
            if self._row is not None:
                yield (*self._of_distance(self._row, *at, farther, work), by_place)
            for number, (numbers, _) in enumerate(self._added.given, OF_TENSORS):
                yield (*_of_given(numbers, self._added.dtype, *at, work), number, by_place)
            if of_strip.made is not None:
                assert not of_strip.made.requires_grad  # the library reads it, and adds nothing to its gradient
                yield (*_whole(of_strip.made, OWN, column, len(keys), work), False)
            if masked and of_strip.hidden is not None:
                words = of_strip.hidden.kept("words", library().bits_of)
                yield (*_whole(words, BITS, column, len(keys), work), False)

        return of_span

    def _of_distance(self, row: Tensor, queries: range, keys: range, farther: int, work: Work) -> Row:
        first = queries.start - keys.start + self._added.scoring.grid.key_len - 1
        strides = *strides_of(row)[:2], queries.step, -keys.step
        return (work.hold(row, first), OWN, *strides, farther, self._spare, OF_DISTANCES)


def by_query(row: Tensor, spare: int) -> Tensor:
    """Numbers by distance, by the query's place less the key's, so that those of queries are consecutive.

    Args:
        spare: as of `Tiles`.
    """
    length = row.shape[2]
    return row.new_zeros(*row.shape[:2], length + spare)[..., :length].copy_(row.flip(2))


def _of_given(numbers: Tensor, dtype: torch.dtype, queries: range, keys: range, work: Work) -> Row:
    """A bias tensor, but for the number of its gradient: where it is after that of the call."""
    begin = numbers.data_ptr()
    if not is_read(numbers, dtype):
        rows, columns = (slice(part.start, part.stop, part.step) for part in (queries, keys))
        numbers = numbers[:, :, rows if numbers.shape[2] > 1 else slice(None)]
        numbers = numbers[..., columns if numbers.shape[3] > 1 else slice(None)].to(dtype).resolve_neg().contiguous()
        return (work.hold(numbers) - begin, OWN, *strides_of(numbers), 0, 0)
    batch, head, query, key = strides_of(numbers)
    after = numbers.element_size() * (queries.start * query + keys.start * key)
    return (after, DTYPES[numbers.dtype], batch, head, query * queries.step, key * keys.step, 0, 0)


def _whole(numbers: Tensor, kind: int, column: int, columns: int, work: Work) -> Row:
    """Numbers or bits of a strip: the columns of one of its spans."""
    if numbers.shape[3] > 1:
        numbers = numbers[..., column : column + columns]
    return (work.hold(numbers), kind, *strides_of(numbers), 0, 0, NO_GRADIENT)


def _address(tensor: Tensor, at: int) -> int:
    return tensor.data_ptr() + tensor.element_size() * at


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """How far numbers lie apart along each axis: 0 where one serves all."""
    return tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

"""How a mask is cut into strips: some consecutive queries, and the spans of keys that any of them may see.

Empty tiles are in no strip. Where the mask allows all of a strip it needs no mask, and where it does not, a small one.
Nothing of size query_len x key_len exists: a mask answers for whole rectangles (`Mask.tile`), and rectangles are halved
only where the answer is PARTIAL.

    Causal() & Window(3)        strips of two queries

    # . . . . .                 [0 1]                keys 0-1
    # # . . . .
    # # # . . .                     [2 3]            keys 0-3
    . # # # . .
    . . # # # .                         [4 5]        keys 2-5
    . . . # # #

A causal square is one strip, which torch's operator knows; so are queries that all see the same keys. Strips that are
alike and equally far apart stand as one, a batch of views. What was found out is remembered by what the mask is.
"""

import ctypes
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.hidden import KEPT, Hidden
from regard.masks import EVERYTHING, Band, Mask, Prefix, Strided, Tile
from regard.masks.planning import MaskKey, by_batch, common_keys, factors, product_of, visible
from regard.scores import Scoring
from regard.shapes import Grid

ROWS = 256
"""Queries in a strip, at most."""

ALONE = 64
"""Queries that are worth a strip of their own."""

COLUMNS = 32
"""Keys in the smallest tile that is asked about: spans begin and end at multiples of it."""

LEAST_OF_RESIDUE = 8
"""Queries of a strided mask that share their keys, for them to be worth strips of their own."""

TOGETHER = 8192
"""Queries of all heads in strips that are computed together, at most: their result is a copy, which should stay in the
cache. With few heads, one call keeps all threads busy where a strip could not."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Some queries, and the spans of keys that they may see; under a strided mask every step-th.

    Attributes:
        row: the batch row it is for; None for all rows at once.
        full: whether every query may see every key of the spans.
        causal: whether query i of the strip may see the first i + 1 keys of its one span, and nothing else.
        times, step: how many strips alike it stands for, each so many queries and keys after the one before.
        joins: whether its queries were in a strip before this one, so that the two results have to be merged.
    """

    row: int | None
    queries: range
    spans: tuple[range, ...]
    full: bool
    causal: bool = False
    times: int = 1
    step: int = 0
    joins: bool = False

    @property
    def keys(self) -> int:
        """How many keys each of its queries meets."""
        return sum(map(len, self.spans))

    @property
    def overlaps(self) -> bool:
        """Whether it stands for several strips that share keys."""
        return self.times > 1 and self.step < self.keys and self.queries.step == 1


class Cutting(NamedTuple):
    """How to cut: what is cheapest in one kind of call.

    A score of a strip of h queries costs 1 + short / h of what it costs in a high one: torch's operator multiplies
    smaller matrices. High strips are fewer, and hold more that is hidden where keys move on with the queries.
    """

    rows: int
    """Queries in a strip, at most."""
    short: float | None
    """None: strips are as high as they may be."""
    call: float = 0.0
    """What a strip costs by itself, in scores of all heads."""
    together: bool = False
    """Whether strips that are alike are computed by one call."""
    squares: bool = True
    """Whether a causal square is one strip."""


def cut(
    mask: Mask, query_len: int, key_len: int, row: int | None = None, *, by: Cutting | None = None
) -> Iterator[Strip]:
    """The strips of a bound mask, in one batch row or all."""
    by = Cutting(ROWS, None) if by is None else by
    breaks = {at for at in mask.breaks(query_len) if 0 < at < query_len}
    if breaks and by.short is not None and common_keys(mask, range(query_len), key_len) is not None:
        breaks = set()
    diagonals = {at for part in mask.leaves() if (at := _diagonal(part)) is not None} if by.squares else set()
    prefixes = {part.n for part in mask.leaves() if isinstance(part, Prefix) and isinstance(part.n, int)}
    starts = {(n - at, at) for n in prefixes for at in diagonals if 0 < n - at < query_len}
    breaks = breaks | {start for start, at in starts if _square_at(at, mask, range(start, query_len), key_len)}
    for segment in _segments(sorted(breaks), query_len):
        square = next((found for at in diagonals if (found := _square_at(at, mask, segment, key_len))), None)
        if square is not None:
            diagonal, before = square
            yield Strip(row, segment, (diagonal,), full=False, causal=True)
            if before:
                yield Strip(row, segment, (before,), full=True, joins=True)
            continue
        if by.short is not None:
            shared = common_keys(mask, segment, key_len)
            if shared is not None:
                yield Strip(row, segment, (shared,), full=bool(shared))
                continue
        high = _height(mask, segment, key_len, by)
        spans: list[range] = []
        for start in range(segment.start, max(segment.stop, segment.start + 1), high):
            queries = range(start, min(start + high, segment.stop))
            places = _places_near(spans, len(queries), key_len)
            spans, full = [], True
            for columns, tile in (found for place in places for found in visible(mask, queries, place, COLUMNS)):
                full = full and tile is Tile.FULL
                if spans and spans[-1].stop == columns.start:
                    spans[-1] = range(spans[-1].start, columns.stop)
                else:
                    spans.append(columns)
            if by.together and len(spans) > 1:
                spans = [*(_exactly(mask, queries, span) for span in spans[:-1]), spans[-1]]
            yield Strip(row, queries, tuple(spans) or (range(0),), full and bool(spans))


def _exactly(mask: Mask, queries: range, span: range) -> range:
    """The keys of a span that are seen, if all queries see the same ones; else the span."""
    if mask.tile(queries, span) is Tile.FULL or not mask.closed_form:
        return span
    shared = common_keys(mask, queries, span.stop, span.start)
    return shared or span


def _square_at(offset: int, mask: Mask, segment: range, key_len: int) -> tuple[range, range] | None:
    """The keys of a causal square that the queries of a segment see, and keys before it that all of them see."""
    diagonal = range(segment.start + offset, segment.stop + offset)
    if len(segment) < ALONE or diagonal.start < 0 or diagonal.stop > key_len:
        return None
    if mask.tile(segment, range(diagonal.stop, key_len)) is not Tile.EMPTY:
        return None
    inside = mask.restrict(segment, diagonal)
    if _diagonal(inside) != offset:
        return None
    if mask.tile(segment, range(diagonal.start)) is Tile.EMPTY:
        return diagonal, range(0)
    before = common_keys(mask, segment, diagonal.start) if len(segment) >= ROWS else None
    return None if before is None else (diagonal, before)


def _diagonal(mask: Mask | Tile) -> int | None:
    """The offset of a causal mask; None for others."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int) or mask.before is not None or mask.after is None:
        return None
    return mask.offset + mask.after


def _height(mask: Mask, segment: range, key_len: int, by: Cutting) -> int:
    """Queries in a strip of a segment, for the least cost, as its middle tells."""
    if by.short is None or len(segment) <= ALONE:
        return by.rows
    short = by.short

    def cost(height: int) -> float:
        start = segment.start + len(segment) // 2 // height * height
        seen = visible(mask, range(start, min(start + height, segment.stop)), range(key_len), COLUMNS)
        return sum(len(columns) for columns, _ in seen) * (1 + short / height) + by.call / height

    return min((by.rows >> n for n in range(by.rows.bit_length()) if n == 0 or by.rows >> n >= COLUMNS), key=cost)


def _by_residue(mask: Mask, query_len: int, key_len: int, row: int | None, by: Cutting) -> Iterator[Strip]:
    """The strips of a strided mask: the queries that share a residue see the same keys, every step-th."""
    (strided,) = (part for part in factors(mask) if isinstance(part, Strided))
    rest = product_of(part for part in factors(mask) if part is not strided)
    step, offset = strided.step, strided.offset
    assert isinstance(offset, int)  # `_is_strided` has seen to it
    for first in range(min(step, query_len)):
        queries, keys = range(first, query_len, step), range((first + offset) % step, key_len, step)
        for strip in cut(_every(rest, queries, keys), len(queries), len(keys), row, by=by):
            spans = tuple(keys[span.start : span.stop] for span in strip.spans)
            yield replace(strip, queries=queries[strip.queries.start : strip.queries.stop], spans=spans)


def _every(mask: Mask, queries: range, keys: range) -> Mask:
    """A mask on queries and keys that stand equally far apart, as a mask on their numbers."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int):
        return mask if mask is EVERYTHING else _Every(mask, queries, keys)
    # query m and key n are (ahead + (m - n) step) apart
    ahead, step = queries.start + mask.offset - keys.start, queries.step
    before, after = mask.before, mask.after
    return Band(
        None if before is None else (before - ahead) // step,
        None if after is None else (after + ahead) // step,
        offset=0,
    )


class _Every(Mask):
    """As `_every`, where no number can be said."""

    def __init__(self, mask: Mask, queries: range, keys: range) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = (side.start + at * side.step for side, at in ((self.queries, query), (self.keys, key)))
        return self.mask.rule(batch, head, query, key)

    @property
    def closed_form(self) -> bool:
        return self.mask.closed_form

    def breaks(self, query_len: int) -> set[int]:
        first, step = self.queries.start, self.queries.step
        return {-((first - at) // step) for at in self.mask.breaks(first + query_len * step)}

    def coverage(self, rows: range, columns: range) -> Tile:
        queries, keys = self.queries[rows.start : rows.stop], self.keys[columns.start : columns.stop]
        return self.mask.tile(range(queries[0], queries[-1] + 1), range(keys[0], keys[-1] + 1))


def _is_strided(mask: Mask, query_len: int) -> bool:
    """Whether one mask among those that must all allow is strided, with enough queries to a residue."""
    strided = [part for part in factors(mask) if isinstance(part, Strided)]
    return (
        len(strided) == 1
        and isinstance(strided[0].offset, int)
        and 1 < strided[0].step <= query_len // LEAST_OF_RESIDUE
    )


def _segments(breaks: list[int], length: int) -> Iterator[range]:
    """Queries between two breaks; short ones together, up to a strip's length."""
    start = end = 0
    for at in (*breaks, length):
        if end > start and (at - start > ROWS or end - start >= ALONE):
            yield range(start, end)
            start = end
        end = max(end, at)
    yield range(start, end)


def _places_near(spans: Iterable[range], moved: int, key_len: int) -> Iterator[range]:
    """All keys, in parts that are likely to be empty as a whole or not: around those of the strip before."""
    start = 0
    for span in spans:
        stop = min(key_len, span.start + -(-(len(span) + moved) // COLUMNS) * COLUMNS)
        if span.start > start:
            yield range(start, span.start)
        if stop > max(start, span.start):
            yield range(max(start, span.start), stop)
        start = max(start, stop)
    if start < key_len:
        yield range(start, key_len)


class Cut:
    """A bound mask cut into strips, and what each of them hides.

    Attributes:
        masks: the mask of each batch row that has strips of its own, by row; under None that of all.
    """

    def __init__(self, mask: Mask, grid: Grid, by: Cutting) -> None:
        self.masks = by_batch(mask, grid)
        lengths = grid.query_len, grid.key_len
        self.strips = tuple(
            strip
            for row, one in self.masks.items()
            for strip in (
                _by_residue(one, *lengths, row, by)
                if _is_strided(one, grid.query_len)
                else cut(one, *lengths, row, by=by)
            )
        )
        self._hidden: dict[Strip, Hidden] = {}
        self._kept = self._looked = 0
        if by.together:
            self.strips = tuple(self._together(grid))

    def _together(self, grid: Grid) -> Iterator[Strip]:
        """The strips, those that are alike and equally far apart as one, which is then a batch of views.

        Keys that all of them see, as those of a prefix, are a strip of their own, which joins.
        """
        alike: dict[Hashable, list[Strip]] = {}
        for strip in self.strips:
            alike.setdefault(self._kind(strip, grid), []).append(strip)
        for strips in alike.values():
            most = max(1, TOGETHER // max(1, len(strips[0].queries) * grid.heads))
            while strips:
                first, times = strips[0], 1
                *shared, moving = first.spans
                step = strips[1].queries.start - first.queries.start if len(strips) > 1 else 0
                if shared and step != len(first.queries):  # between them lie queries that see something else
                    most = 1
                while (
                    times < min(most, len(strips))
                    and strips[times].queries.start - strips[times - 1].queries.start == step
                ):
                    times += 1
                if times == 1:
                    yield first
                else:
                    yield replace(first, spans=(moving,), times=times, step=step)
                    if shared:
                        queries = range(first.queries.start, strips[times - 1].queries.stop)
                        yield Strip(first.row, queries, tuple(shared), full=True, joins=True)
                strips = strips[times:]

    def _kind(self, strip: Strip, grid: Grid) -> Hashable:
        """What strips share that may be computed by one call."""
        *shared, moving = strip.spans
        queries, mask = strip.queries, self.masks[strip.row]
        if not strip.keys or strip.joins or moving.step != queries.step or (grid.batch > 1 and strip.row is None):
            return strip
        gaps = queries.step > 1
        if shared and (gaps or any(mask.tile(queries, span) is not Tile.FULL for span in shared)):
            return strip
        kind = strip.row, len(queries), queries.step, tuple(shared), len(moving), moving.start - queries.start
        if strip.full or strip.causal:
            return (*kind, strip.causal)
        hides = mask if gaps else mask.restrict(queries, moving)
        if isinstance(hides, Tile):
            return (*kind, hides)
        if not gaps and all(isinstance(part, Band) and isinstance(part.offset, int) for part in hides.leaves()):
            return (*kind, hides.structure())  # bands move on with the queries
        self._looked += len(queries) * len(moving)
        if self._looked > KEPT or grid.device.type != "cpu":
            return strip
        allowed = mask.allowed(where(queries, grid), where(moving, grid))
        return (*kind, allowed.shape, _bytes(allowed))

    def hidden(self, strip: Strip, scoring: Scoring) -> Hidden | None:
        """What a strip hides: None for nothing, and for a causal one, where torch knows it.

        Args:
            scoring: that of the strip's batch row.
        """
        if scoring.bias is not None:  # which may hide keys as well, and may be another one in every call
            allowed = scoring.allowed(strip.queries, places(strip, scoring))
            return None if allowed is None else Hidden(allowed)
        if strip.full or strip.causal:
            return None
        if strip not in self._hidden:
            with torch.inference_mode(False):
                return self._found(strip, scoring)
        return self._hidden[strip]

    def _found(self, strip: Strip, scoring: Scoring) -> Hidden:
        grid = scoring.grid
        allowed = self.masks[strip.row].allowed(where(strip.queries, grid), where(places(strip, scoring), grid))
        last = None if allowed.is_meta else next(reversed(self._hidden.values()), None)
        if last is not None and last.allowed.shape == allowed.shape and torch.equal(last.allowed, allowed):
            hidden = last  # along a band every strip looks the same
        else:
            hidden = Hidden(allowed)
            self._kept += allowed.numel()
        if self._kept <= KEPT:
            self._hidden[strip] = hidden
        return hidden


def cut_for(mask: Mask, grid: Grid, by: Cutting) -> Cut:
    """A bound mask, cut; remembered where it can be told from others."""
    known = MaskKey(mask)
    if known.structure is None or torch._C._are_functorch_transforms_active():
        return Cut(mask, grid, by)  # what is made in a transform must not be met outside it
    return _remembered(known, grid, by)


@lru_cache(maxsize=32)
def _remembered(known: MaskKey, grid: Grid, by: Cutting) -> Cut:
    with torch.inference_mode(False):  # whose tensors training could not use
        return Cut(known.mask, grid, by)


def places(strip: Strip, scoring: Scoring) -> range | Tensor:
    """The strip's keys as places in the call."""
    if len(strip.spans) == 1:
        return strip.spans[0]
    return torch.cat([where(span, scoring.grid) for span in strip.spans])


def _bytes(allowed: Tensor) -> bytes:
    """What a bool tensor holds, as a key."""
    allowed = allowed.contiguous()
    return ctypes.string_at(allowed.data_ptr(), allowed.numel())


def where(places: range | Tensor, grid: Grid) -> Tensor:
    if isinstance(places, Tensor):
        return places
    return torch.arange(places.start, places.stop, places.step, device=grid.device)

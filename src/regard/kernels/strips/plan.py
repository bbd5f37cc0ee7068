"""Cuts a mask into strips: blocks of consecutive queries with the spans of keys that any of them may attend to.

Empty tiles belong to no strip. A strip that is allowed entirely needs no mask; any other needs a small one. Nothing of
size query_len x key_len is built: a mask reports the coverage of whole rectangles (`Mask.tile`), and only PARTIAL
rectangles are subdivided.

    Causal() & Window(3)        strips of two queries

    # . . . . .                 [0 1]                keys 0-1
    # # . . . .
    # # # . . .                     [2 3]            keys 0-3
    . # # # . .
    . . # # # .                         [4 5]        keys 2-5
    . . . # # #

A causal square is one strip, since torch's operator supports it; so are queries that all see the same keys. Equal
strips at equal distances are computed as one batch of views (`grouping`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import reduce
from itertools import chain, islice, repeat
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from regard.indexing import hull, merged
from regard.kernels.strips import tuning
from regard.masks import Band, Mask, Prefix, Tile
from regard.masks.planning import cells_on, common_keys, diagonals_of, factors, product_of, visible

MAX_PARTS = 1 << 20
"""Smallest parts of strips about which a mask may have to be asked at once: some dozen MB."""


class Kind(Enum):
    """Which of its keys the queries of a strip see."""

    FULL = "every query sees every key"
    CAUSAL = "query i sees the first i + 1 keys of one span"
    MASKED = "a small mask says"


@dataclass(frozen=True, slots=True)
class Strip:
    """Some queries, and the spans of keys that they may see; ranges with a step under a strided mask.

    Attributes:
        batch_index: the batch index it is for; None for all of them.
        times, step: it stands for `times` equal strips, each `step` queries and keys after the previous one.
        merges: whether an earlier strip has the same queries, so that the two results have to be merged.
        allowed: the evaluated mask, if it has no closed form: True = may attend.
    """

    batch_index: int | None
    queries: range
    spans: tuple[range, ...]
    kind: Kind
    times: int = 1
    step: int = 0
    merges: bool = False
    allowed: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def keys(self) -> int:
        """Number of keys that its queries are compared with."""
        return sum(map(len, self.spans))

    @property
    def overlaps(self) -> bool:
        """Whether it stands for several strips with common keys."""
        return self.times > 1 and self.step < self.keys and self.queries.step == 1


class PlanOptions(NamedTuple):
    """How to cut most cheaply for one kind of call.

    A score in a strip of h queries costs 1 + short / h times as much as in a high strip, since its products are those
    of smaller matrices. Higher strips are fewer, but contain more masked scores under a window.
    """

    short: float | None = None
    """None: strips are as high as allowed."""
    scores_per_call: float = 0.0
    """Fixed cost of a strip, in scores of all heads."""
    speed: int = 1
    """How many times as fast scores are as where these costs were found (`fused.speed`)."""
    together: bool = False
    """Whether equal strips are computed as one batch."""
    in_place: bool = False
    """Whether keys are read where they are, in several spans, too, and by equal strips of several batch indices."""
    skips: int | None = None
    """How many queries of a strip skip together the keys that a band hides from all of them, so that its strip need not
    be cut; None: all of a strip."""
    copies: bool = False
    """Whether the keys of overlapping strips are copied in any case, rather than read where they are."""
    causal: bool = True
    """Whether a causal square is one strip."""
    most_scores: int | None = None
    """Most scores of one head in a strip, where a number is held for every score; None for any number."""
    joins: bool = False
    """Whether neighbours with the same keys become one strip, since the numbers added to their scores exist already."""

    def max_queries(self, keys: int) -> int:
        """Most queries in a strip with so many keys: a power of two, for few different shapes."""
        if self.most_scores is None:
            return tuning.MAX_STRIP_QUERIES
        most = max(self.most_scores // max(1, keys), tuning.MIN_STRIP_QUERIES // 4)
        return min(1 << most.bit_length() - 1, tuning.MAX_STRIP_QUERIES)

    def cost(self, queries: int, keys: float, *, copied: bool = False) -> float:
        """Of a strip, in scores of one head, for the mean number of keys with which each query is compared. Keys of
        several spans are copied, to lie side by side."""
        copied = copied and not self.in_place
        of_keys = keys * (queries + (self.short or 0.0) + copied * tuning.SCORES_PER_COPIED_KEY * self.speed)
        return of_keys + self.scores_per_call * self.speed


def cut(
    mask: Mask, query_len: int, key_len: int, batch_index: int | None = None, *, by: PlanOptions | None = None
) -> Iterator[Strip]:
    """The strips of a bound mask, for one batch index or all."""
    by = PlanOptions() if by is None else by
    if not mask.closed_form:
        yield from _cut_by_looking(mask, query_len, key_len, batch_index, by)
        return
    if by.skips is not None and by.most_scores is None:
        of_band = _of_a_band(mask, range(query_len), key_len, batch_index)
        if of_band is not None:
            yield of_band
            return
    breaks = {at for at in mask.breaks(query_len) if 0 < at < query_len}
    if breaks and by.short is not None and common_keys(mask, range(query_len), key_len) is not None:
        breaks = set()
    diagonals = {at for part in mask.leaves() if (at := _diagonal(part)) is not None} if by.causal else set()
    prefixes = {part.n for part in mask.leaves() if isinstance(part, Prefix) and isinstance(part.n, int)}
    starts = {(n - at, at) for n in prefixes for at in diagonals if 0 < n - at < query_len}
    breaks = breaks | {start for start, at in starts if _causal_at(at, mask, range(start, query_len), key_len)}
    segments = [*_segments(sorted(breaks), query_len, by)]
    squares = [_square(mask, segment, key_len, batch_index, diagonals) for segment in segments]
    others = [segment for segment, square in zip(segments, squares, strict=True) if not square]
    known = _shared(mask, others, key_len, by) if by.short is not None else [None] * len(others)
    apart = [segment for segment, shared in zip(others, known, strict=True) if shared is None]
    shared_keys, cut_up = iter(known), _cut_up(mask, apart, key_len, batch_index, by)
    for segment, square in zip(segments, squares, strict=True):
        if square:
            yield from square
        elif (shared := next(shared_keys)) is None:
            are_joined = len(segment) <= tuning.MAX_STRIP_QUERIES and not breaks.isdisjoint(segment[1:])
            yield from (_tight(mask, strip, key_len - query_len) if are_joined else strip for strip in next(cut_up))
        else:
            whole = by.most_scores is None
            for queries in (segment,) if whole else _split(segment, by.max_queries(len(shared))):
                yield Strip(batch_index, queries, (shared,), Kind.FULL if shared else Kind.MASKED)


def _of_a_band(mask: Mask, queries: range, key_len: int, batch_index: int | None) -> Strip | None:
    """All queries as one strip, if they see a band of the keys, or all of them; None if not. What is outside of a band
    is skipped without being cut off."""
    seen = diagonals_of(mask, queries, range(key_len))
    if seen is None:
        return None
    low, high = seen
    stop = key_len if high is None else min(key_len, len(queries) + high)
    keys = range(0 if low is None else max(0, low), stop)
    if not keys:
        return Strip(batch_index, queries, (range(0),), Kind.MASKED)
    if mask.tile(queries, keys) is Tile.FULL:
        return Strip(batch_index, queries, (keys,), Kind.FULL)
    is_square = seen == (None, 0) and len(keys) == len(queries)
    return Strip(batch_index, queries, (keys,), Kind.CAUSAL if is_square else Kind.MASKED)


def _square(mask: Mask, segment: range, key_len: int, batch_index: int | None, diagonals: Iterable[int]) -> list[Strip]:
    """The causal square of a segment of queries, and the keys before it that all of them see; none if it is no such."""
    found = next((found for at in diagonals if (found := _causal_at(at, mask, segment, key_len))), None)
    if found is None:
        return []
    diagonal, before = found
    strips = [Strip(batch_index, segment, (diagonal,), Kind.CAUSAL)]
    return [*strips, Strip(batch_index, segment, (before,), Kind.FULL, merges=True)] if before else strips


def _shared(mask: Mask, segments: Sequence[range], key_len: int, by: PlanOptions) -> list[range | None]:
    """The keys that queries of a segment see, if they are consecutive and the same for all of them; else None."""
    every = range(key_len)
    found: list[range | None] = []
    for segment, parts in zip(
        segments, visible(mask, [(part, every) for part in segments], tuning.KEY_STEP), strict=True
    ):
        spans, partial = _spans_of(parts)
        if len(spans) > 1 or partial > 2 * tuning.KEY_STEP:  # more than an edge on either side
            found.append(None)
        else:
            found.append(common_keys(mask, segment, spans[0].stop, spans[0].start) if spans else range(0))
    return found


def _cut_up(
    mask: Mask, segments: Sequence[range], key_len: int, batch_index: int | None, by: PlanOptions
) -> Iterator[list[Strip]]:
    """The strips of each segment, of its cheapest height."""
    every = range(key_len)
    heights = _heights(mask, segments, key_len, by)
    cuts = [[*_split(part, high)] or [part] for part, high in zip(segments, heights, strict=True)]
    rectangles = [(queries, every) for cut in cuts for queries in cut]
    at_a_time = max(1, MAX_PARTS // (1 + key_len // tuning.KEY_STEP))
    found = chain.from_iterable(
        visible(mask, rectangles[at : at + at_a_time], tuning.KEY_STEP) for at in range(0, len(rectangles), at_a_time)
    )
    for cut in cuts:
        strips: list[Strip] = []
        spans: list[range] = []
        for queries, parts in zip(cut, islice(found, len(cut)), strict=True):
            before, (spans, partial) = spans, _spans_of(parts)
            if by.together:
                spans, _ = _exactly(mask, queries, spans, before)
            kind = Kind.MASKED if partial or not spans else Kind.FULL
            if partial and len(cut) > 1 and queries in (cut[0], cut[-1]) and _is_higher(mask, queries, spans, by):
                strips += next(_cut_up(mask, [queries], key_len, batch_index, by))
                continue
            strips.append(Strip(batch_index, queries, tuple(spans) or (range(0),), kind))
        yield strips


def _is_higher(mask: Mask, queries: range, spans: Sequence[range], by: PlanOptions) -> bool:
    """Whether a strip at an end may be too high, as those between are for a band that only they see."""
    return by.skips is not None and any(diagonals_of(mask, queries, span) is None for span in spans)


def _tight(mask: Mask, strip: Strip, offset: int) -> Strip:
    """A strip of several segments, without keys on either side that belong to none of them: spans found in steps of
    KEY_STEP hold those of others, too."""
    if len(strip.spans) > 1:
        return strip
    (span,), queries = strip.spans, strip.queries
    start, stop = max(span.start, queries.start + offset), min(span.stop, queries.stop + offset)
    outside = (side for side in (range(span.start, start), range(stop, span.stop)) if side)
    if start >= stop or any(mask.tile(queries, side) is not Tile.EMPTY for side in outside):
        return strip
    return replace(strip, spans=(range(start, stop),))


def _spans_of(parts: Sequence[tuple[range, Tile]]) -> tuple[list[range], int]:
    """Visible parts as spans that do not touch, and how many of their keys some queries may not see."""
    return merged(columns for columns, _ in parts), sum(len(columns) for columns, tile in parts if tile is Tile.PARTIAL)


def joined(strips: Iterable[Strip]) -> Iterator[Strip]:
    """The strips, with neighbours that have the same keys as one, while their mask has few enough scores.

    torch's operator is faster in higher strips; where the keys differ, a higher strip would contain more masked scores.
    """
    before: Strip | None = None
    for strip in strips:
        if before is not None and (both := _as_one(before, strip)) is not None:
            before = both
            continue
        if before is not None:
            yield before
        before = strip
    if before is not None:
        yield before


def _as_one(first: Strip, second: Strip) -> Strip | None:
    alike = first.kind is second.kind is not Kind.CAUSAL and first.batch_index == second.batch_index
    queries = range(first.queries.start, second.queries.stop, first.queries.step)
    if not alike or first.spans != second.spans or len(queries) != len(first.queries) + len(second.queries):
        return None
    if first.kind is Kind.FULL:
        return replace(first, queries=queries)
    one, other = first.allowed, second.allowed
    if one is None or other is None or one.numel() + other.numel() > tuning.MAX_TILE_SCORES:
        return None
    if one.shape[:2] != other.shape[:2] or (one.shape[2], other.shape[2]) != (len(first.queries), len(second.queries)):
        return None
    return replace(first, queries=queries, allowed=torch.cat([one, other], dim=2))


def _cut_by_looking(
    mask: Mask, query_len: int, key_len: int, batch_index: int | None, by: PlanOptions
) -> Iterator[Strip]:
    """The strips of a mask without closed form: the mask is evaluated for a whole strip at a time."""
    closed = product_of(part for part in factors(mask) if part.closed_form)
    breaks = sorted(at for at in mask.breaks(query_len) if 0 < at < query_len)
    high = tuning.MAX_STRIP_QUERIES
    blocks = [part for segment in _segments(breaks, query_len, by) for part in _split(segment, high)]
    near = visible(closed, [(queries, range(key_len)) for queries in blocks], tuning.KEY_STEP)
    hulls = (hull([columns for columns, _ in parts] or [range(0)]) for parts in near)
    rectangles = (
        (part, keys)
        for block, keys in zip(blocks, hulls, strict=True)
        for part in _split(block, by.max_queries(len(keys)))
    )
    for queries, keys in rectangles:
        allowed = mask.allowed(queries, keys)
        if allowed.is_meta or not allowed.numel():
            yield Strip(batch_index, queries, (keys,), Kind.MASKED)
            continue
        of_one = allowed.expand(*allowed.shape[:2], len(queries), len(keys)).flatten(0, 1).view(torch.uint8)
        if bool(of_one.amin()):
            yield Strip(batch_index, queries, (keys,), Kind.FULL)
            continue
        for rows, seen in _cheapest_rows(_seen(of_one), by):
            spans = _spans(seen, keys)
            part = allowed[:, :, rows] if allowed.shape[2] > 1 else allowed
            if sum(map(len, spans)) < len(keys) and allowed.shape[3] > 1:
                pieces = [part[..., span.start - keys.start : span.stop - keys.start] for span in spans]
                part = torch.cat(pieces or [part[..., :0]], dim=-1)
            yield Strip(batch_index, queries[rows], tuple(spans) or (range(0),), Kind.MASKED, allowed=part)


def _seen(allowed: Tensor) -> Tensor:
    """Which squares of KEY_STEP queries and keys have anything allowed.

    Shapes: uint8 [any, queries, keys] -> uint8 [squares, squares], 1 for what is allowed.
    """
    step = tuning.KEY_STEP
    # one axis at a time, the longest first: torch takes several times as long for several at once
    by_rows = torch.stack([rows.flatten(0, 1).amax(0) for rows in allowed.split(step, dim=1)]).cpu()
    columns = -(-allowed.shape[2] // step)
    padded = by_rows.new_zeros(len(by_rows), columns * step)
    padded[:, : allowed.shape[2]] = by_rows
    return padded.view(-1, columns, step).amax(2)


def _cheapest_rows(seen: Tensor, by: PlanOptions) -> list[tuple[slice, bytes]]:
    """The rows of each strip, all of the cheapest height, and which steps of keys they see; or all rows with the keys
    in between, of which none has to be copied.

    Args:
        seen: as from `_seen`, of as many rows as a strip may have.
    """
    squares = [int.from_bytes(bytes(row)) for row in seen.tolist()]  # a byte for each, whose unions are fast
    high, step = len(squares), tuning.KEY_STEP
    filled = _filled(reduce(or_, squares).to_bytes(seen.shape[1]))
    least, best = by.cost(high * step, sum(filled) * step), [(slice(0, high * step), filled)]
    while high:
        starts = range(0, len(squares), high)
        strips = [reduce(or_, squares[at : at + high]).to_bytes(seen.shape[1]) for at in starts]
        gaps = (b"\0" in strip.strip(b"\0") for strip in strips)
        cost = sum(by.cost(high * step, sum(strip) * step, copied=gap) for strip, gap in zip(strips, gaps, strict=True))
        if cost < least:
            rows = (slice(at * step, (at + high) * step) for at in starts)
            least, best = cost, list(zip(rows, strips, strict=True))
        high = -(-high // 2) if high > 1 and by.short is not None else 0
    return best


def _filled(seen: bytes) -> bytes:
    """The same without gaps."""
    first, stop = seen.find(1), seen.rfind(1) + 1
    return bytes(first) + b"\1" * (stop - first) + bytes(len(seen) - stop) if stop else seen


def _spans(seen: bytes, keys: range) -> list[range]:
    """The spans of these keys that contain visible ones, in multiples of KEY_STEP.

    Args:
        seen: of each step of keys, 1 if any of it is visible.
    """
    spans: list[range] = []
    for step, visible_there in enumerate(seen):
        if visible_there:
            span = keys[step * tuning.KEY_STEP : (step + 1) * tuning.KEY_STEP]
            spans.append(range(spans.pop().start, span.stop) if spans and spans[-1].stop == span.start else span)
    return spans


def _exactly(mask: Mask, queries: range, spans: list[range], before: Sequence[range] = ()) -> tuple[list[range], bool]:
    """Spans of which all but the last hold exactly the keys that all queries see, as a prefix does, until one cannot;
    and whether all of those do, so that they can be a strip of their own.

    Args:
        before: the spans of the queries before these, whose prefix is probably the same.
    """
    exact: list[range] = []
    for span, likely in zip(spans[:-1], chain(before, repeat(range(0))), strict=False):
        shared: range | None = likely
        if not likely or not _are_exactly(mask, queries, span, likely):
            shared = common_keys(mask, queries, span.stop, span.start)
        if not shared:
            return [*exact, *spans[len(exact) :]], False
        exact.append(shared)
    return [*exact, *spans[-1:]], True


def _are_exactly(mask: Mask, queries: range, span: range, keys: range) -> bool:
    """Whether all queries see these keys of a span, and no query others of it."""
    if keys.start < span.start or keys.stop > span.stop or mask.tile(queries, keys) is not Tile.FULL:
        return False
    outside = range(span.start, keys.start), range(keys.stop, span.stop)
    return all(mask.tile(queries, part) is Tile.EMPTY for part in outside)


def _causal_at(offset: int, mask: Mask, segment: range, key_len: int) -> tuple[range, range] | None:
    """The keys of the causal square of a segment of queries, and earlier keys that all of them see."""
    diagonal = range(segment.start + offset, segment.stop + offset)
    if diagonal.start < 0 or diagonal.stop > key_len:
        return None
    if mask.tile(segment, range(diagonal.stop, key_len)) is not Tile.EMPTY:
        return None
    inside = mask.restrict(segment, diagonal)
    if _diagonal(inside) != offset:
        return None
    if mask.tile(segment, range(diagonal.start)) is Tile.EMPTY:
        return diagonal, range(0)
    before = common_keys(mask, segment, diagonal.start) if len(segment) >= tuning.MAX_STRIP_QUERIES else None
    return None if before is None else (diagonal, before)


def _diagonal(mask: Mask | Tile) -> int | None:
    """The offset of a causal mask; None for others."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int) or mask.before is not None or mask.after is None:
        return None
    return mask.offset + mask.after


def _heights(mask: Mask, segments: Sequence[range], key_len: int, by: PlanOptions) -> list[int]:
    """The cheapest strip height for each segment, estimated at its middle."""
    highest = _highest(mask, segments, key_len, by)
    asked = [
        (number, high >> n)
        for number, (segment, high) in enumerate(zip(segments, highest, strict=True))
        if by.short is not None and len(segment) > tuning.MIN_STRIP_QUERIES
        for n in range(high.bit_length())
        if n == 0 or high >> n >= tuning.KEY_STEP
    ]
    middles = [_middle(segments[number], height) for number, height in asked]
    found = visible(mask, [(queries, range(key_len)) for queries in middles], tuning.KEY_STEP)
    cheapest = [(math.inf, high) for high in highest]
    for (number, height), queries, parts in zip(asked, middles, found, strict=True):
        spans, _ = _spans_of(parts)
        copied = by.together and not _exactly(mask, queries, spans)[1]
        cost = by.cost(height, _compared(mask, queries, spans, by), copied=copied) / height
        if cost < cheapest[number][0]:
            cheapest[number] = cost, height
    return [height for _, height in cheapest]


def _compared(mask: Mask, queries: range, spans: Sequence[range], by: PlanOptions) -> float:
    """With how many keys each query is compared, on average."""
    if by.skips is None:
        return sum(map(len, spans))
    found = [(span, diagonals_of(mask, queries, span)) for span in spans]
    return sum(
        len(span) if seen is None else cells_on(seen, queries, span, by.skips) / len(queries) for span, seen in found
    )


def _highest(mask: Mask, segments: Sequence[range], key_len: int, by: PlanOptions) -> list[int]:
    """The highest strips that each segment may have, by the keys seen at either end and in its middle."""
    high = tuning.MAX_STRIP_QUERIES
    if by.most_scores is None:
        return [high] * len(segments)
    places = [part for segment in segments for part in (segment[:high], _middle(segment, high), segment[-high:])]
    found = visible(mask, [(queries, range(key_len)) for queries in places], tuning.KEY_STEP)
    keys = [sum(map(len, _spans_of(parts)[0])) for parts in found]
    return [by.max_queries(max(keys[at : at + 3])) for at in range(0, len(keys), 3)]


def _middle(segment: range, height: int) -> range:
    """A strip of this height in the middle of a segment."""
    start = segment.start + len(segment) // 2 // height * height
    return range(start, min(start + height, segment.stop))


def _segments(breaks: list[int], length: int, by: PlanOptions) -> Iterator[range]:
    """The queries between breaks; short segments are joined, while the scores of each with the keys of the other, which
    are computed in vain, cost less than a strip. Equal ones are not, if they are computed as one batch."""
    start = end = 0
    for at in (*breaks, length):
        in_vain, high = 2 * (end - start) * (at - end), at - start > tuning.MAX_STRIP_QUERIES
        alone = by.together and at - end == end - start
        alone = alone or high or end - start >= tuning.MIN_STRIP_QUERIES or in_vain > by.scores_per_call
        if end > start and alone:
            yield range(start, end)
            start = end
        end = max(end, at)
    yield range(start, end)


def _split(queries: range, high: int) -> Iterator[range]:
    """Blocks of `high` queries."""
    return (queries[start : start + high] for start in range(0, len(queries), high))

"""The tiles of a pass: the visible keys, cut so that a tile fits the cache and little of it is hidden.

They depend on the mask and the sizes of a call only; no score is computed here.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from regard import matmul
from regard.indexing import hull, merged, split_at
from regard.masks import EVERYTHING, Band, Mask, Tile
from regard.masks.planning import by_batch, common_keys, visible
from regard.observation import tuning
from regard.observation.observed import ObservedCall


class Strips(NamedTuple):
    """Queries that see as many keys each, at equal distances: strips of them have the same form.

    Attributes:
        queries: all of them. height: the queries of a strip. width: the keys that it spans.
        mask: what holds for these keys, by distance alone.
        shared: the keys before, of which all strips may see the same: an ordinary tile.
    """

    queries: range
    height: int
    width: int
    mask: Mask
    shared: range


class BatchPlan(NamedTuple):
    """Batch indices that are in a tile together, their mask, the heads that are, and the queries of each row of tiles.

    Attributes:
        keys: all that these queries may see. step: they are split at multiples of this, counted from the first.
        widest: most keys in a tile.
        strips: if the queries of each row are several strips, which come as one tile; None if not.
    """

    batch: slice
    mask: Mask
    heads: list[slice]
    queries: list[range]
    keys: range
    step: int
    widest: int
    strips: Strips | None = None


class TilePlan(NamedTuple):
    """The tiles of a rectangle of a call."""

    batches: list[BatchPlan]
    max_scores: int
    """An upper bound on the scores in a tile."""
    whole_rows: bool
    """Whether a tile spans all keys that its queries see, and so gives their lse."""
    regular: bool
    """Whether tiles are widened to the lengths of `regard.matmul.regular`."""

    def tiles_of(self, group: BatchPlan, queries: range) -> list[tuple[range, bool]]:
        """The keys of some queries' tiles, from left to right, and whether they are strips: then those of the first."""
        strips = group.strips
        if strips is None:
            return [(keys, False) for keys in self._of_rectangle(group, queries, group.keys)]
        window = hull([*_visible_keys(strips.mask, queries[: strips.height], group.keys, group.step, strips.height)])
        shared = self._of_rectangle(group, queries, strips.shared)
        return [*((keys, False) for keys in shared), (range(window.stop - strips.width, window.stop), True)]

    def _of_rectangle(self, group: BatchPlan, queries: range, keys: range) -> list[range]:
        seen = [*_visible_keys(group.mask, queries, keys, group.step)]
        if self.whole_rows:
            parts = [hull(seen)] if seen else []
        else:
            parts = [part for span in seen for part in split_at(span, span.start, group.widest)]
        if not self.regular:
            return parts
        ends = [keys.start, *(part.stop for part in parts)]
        starts = [*(part.start for part in parts[1:]), keys.stop]
        return [_widened(part, group, *gap) for part, *gap in zip(parts, ends, starts, strict=False)]


def _widened(keys: range, group: BatchPlan, start: int, stop: int) -> range:
    """The keys of a tile with hidden ones beside them, so that their number is one of few; none before `start` or from
    `stop` on, which are in other tiles."""
    piece = keys.start - (keys.start - group.keys.start) % group.step
    start, stop = max(start, piece), min(stop, piece + group.step)
    width = matmul.regular(len(keys))
    if width > min(stop - start, group.widest):
        return keys
    stop = min(stop, keys.start + width)
    return range(stop - width, stop)


def plan_whole_rows(call: ObservedCall, max_keys: int, strips: bool = False) -> TilePlan | None:
    """Tiles that hold all keys that their queries see, and so give lse; None if computing lse beforehand is faster.

    Args:
        max_keys: most keys in a tile.
        strips: as in `plan_tiles`.
    """
    queries, keys = range(call.grid.query_len), range(call.grid.key_len)
    widest = in_tiles = visible_scores = 0
    for _, mask in _masks(call, ()):
        for start in reversed(range(0, len(queries), tuning.TILE_QUERIES)):  # the last see most under a causal mask
            some = range(start, min(start + tuning.TILE_QUERIES, len(queries)))
            tiles = [*_visible_keys(mask, some, keys, max(1, len(keys)))]
            wide = len(hull(tiles)) if tiles else 0
            if wide > max_keys:
                return None
            widest, in_tiles = max(widest, wide), in_tiles + wide * len(some)
            visible_scores += sum(map(len, tiles)) * len(some)
    if in_tiles > tuning.MAX_WHOLE_ROW_COST * visible_scores:
        return None
    return plan_tiles(call, queries, keys, whole_rows_of=max(1, widest), strips=strips)


def plan_tiles(
    call: ObservedCall,
    queries: range,
    keys: range,
    others: Sequence[ObservedCall] = (),
    whole_rows_of: int | None = None,
    strips: bool = False,
) -> TilePlan:
    """The tiles of a rectangle.

    Args:
        others: calls whose visible keys must not be skipped either.
        whole_rows_of: for tiles that hold whole rows, the most keys that `TILE_QUERIES` queries span; None: tiles that
            skip hidden keys.
        strips: whether several strips may come as one tile.
    """
    cut = _Cutting(call, keys, whole_rows_of)
    masks = _masks(call, others)
    if len(masks) == 1 < call.grid.batch and not cut.fits_all(queries):  # tiles of all batch indices would be too flat
        masks = [(slice(index, index + 1), masks[0][1]) for index in range(call.grid.batch)]
    batches: list[BatchPlan] = []
    for some, mask in masks:
        found = _strips(call, mask, queries, keys) if strips else None
        if found is None or (found.shared and whole_rows_of is not None):
            batches.append(cut.rectangle(some, mask, queries))
            continue
        first, last = range(queries.start, found.queries.start), range(found.queries.stop, queries.stop)
        batches += [cut.rectangle(some, mask, first)] if first else []
        batches += [cut.strips(slice(index, index + 1), mask, found) for index in range(some.start, some.stop)]
        batches += [cut.rectangle(some, mask, last)] if last else []
    return TilePlan(batches, cut.largest, whole_rows_of is not None, cut.regular)


class _Cutting:
    """How parts of a call are cut into tiles.

    Args:
        keys: all keys. whole_rows_of: as in `plan_tiles`.
    Attributes:
        largest: an upper bound on the scores in a tile of the parts cut so far.
        regular: as of `TilePlan`.
    """

    def __init__(self, call: ObservedCall, keys: range, whole_rows_of: int | None) -> None:
        self._batch, self._heads, device = call.grid.batch, call.grid.heads, call.grid.device
        self._group = self._heads // call.key.shape[1]
        self._keys, self._whole_rows_of, self.largest = keys, whole_rows_of, 0
        self._most = tuning.MAX_TILE_SCORES if device.type == "cpu" else tuning.MAX_TILE_SCORES_ON_GPU
        self._most_in_strips = min(self._most, tuning.MAX_STRIP_SCORES) if device.type == "cpu" else self._most
        self.regular = device.type == "cpu" and matmul.onednn_is_faster(call.dtype)

    def fits_all(self, queries: range) -> bool:
        """Whether all batch indices and heads can be in a tile together, whatever these queries see."""
        return self._batch * self._heads <= self._max_heads(queries, self._widest())

    def _widest(self, seen: int | None = None) -> int:
        """Most keys in a tile of queries that see at most so many together."""
        if self._whole_rows_of is not None:
            return min(len(self._keys), matmul.regular(self._whole_rows_of)) if self.regular else self._whole_rows_of
        wide = tuning.MAX_TILE_KEYS // (1 if self._batch * self._heads >= tuning.MIN_HEADS_OF_WIDE_TILES else 2)
        wide = min(wide, len(self._keys), max(tuning.MIN_TILE_KEYS, self._most // tuning.MIN_TILE_KEYS))
        return max(1, wide if seen is None else min(wide, matmul.regular(seen)))

    def _max_heads(self, queries: range, widest: int) -> int:
        return max(1, self._most // (widest * max(1, min(tuning.TILE_QUERIES, len(queries)))))

    def rectangle(self, some: slice, mask: Mask, queries: range) -> BatchPlan:
        """Some queries of some batch indices, all heads."""
        seen, longest = _seen(mask, queries, self._keys)
        widest, step = self._widest(longest), max(1, len(self._keys)) if self._whole_rows_of else self._widest()
        num_batch, max_heads = some.stop - some.start, self._max_heads(queries, widest)
        together = num_batch * self._heads <= max_heads
        num_heads = self._heads if together else heads_of_a_tile(self._heads, self._group, max_heads)
        most = max(1, self._most // (widest * num_batch * num_heads))
        at_once = most >= len(queries) and (matmul.is_regular(len(queries)) or not self.regular)
        num_queries = max(1, len(queries)) if at_once else 1 << (min(most, len(queries)).bit_length() - 1)
        if self._whole_rows_of is not None and widest < len(self._keys):  # more queries would see more keys
            limit = min(num_queries, tuning.TILE_QUERIES)
            num_queries = max(count for count in range(1, limit + 1) if tuning.TILE_QUERIES % count == 0)
        height = _height(mask, queries, self._keys, num_queries, step, num_batch * num_heads)
        self.largest = max(self.largest, num_batch * num_heads * num_queries * widest)
        in_heads = _equal_parts(self._heads, num_heads)
        return BatchPlan(some, mask, in_heads, [*split_at(queries, queries.start, height)], seen, step, widest)

    def strips(self, some: slice, mask: Mask, strips: Strips) -> BatchPlan:
        """The queries of strips, of one batch index."""
        of_strip, count = strips.height * strips.width, len(strips.queries) // strips.height
        most = max(1, self._most_in_strips // of_strip)
        # views of one head need no copies; with several heads, strips are copied, but the tiles are fewer
        heads = _equal_parts(self._heads, heads_of_a_tile(self._heads, self._group, max(1, most // count)))
        together = -(-count // -(-count // max(1, most // heads[0].stop)))
        self.largest = max(self.largest, of_strip * together * heads[0].stop)
        widest = max(1, self._most_in_strips // (together * strips.height * heads[0].stop))
        rows = split_at(strips.queries, strips.queries.start, together * strips.height)
        return BatchPlan(some, mask, heads, [*rows], self._keys, max(1, len(self._keys)), widest, strips)


def _strips(call: ObservedCall, mask: Mask, queries: range, keys: range) -> Strips | None:
    """The queries that see a full window, and perhaps some first keys; None if the mask is none, or gradients are
    recorded."""
    biases = () if call.scoring.bias is None else call.scoring.bias.terms()
    by_distance = mask is not EVERYTHING and call.from_products and all(bias.of_distance for bias in biases)
    if (
        not (by_distance and mask.closed_form)
        or call.wants_grad
        or keys != range(call.grid.key_len)
        or len(queries) < tuning.MIN_SLIDING_QUERIES
    ):
        return None
    every = keys
    middle = (queries.start + queries.stop) // 2
    some = range(middle, middle + tuning.MIN_TILE_KEYS)
    parts = [*_visible_keys(mask, some, keys, len(keys))]
    if not parts:
        return None
    if len(parts) > 1:  # in the last part a window, before it what does not move
        shared = common_keys(mask, some, parts[-1].start)
        keys = keys[shared.stop if shared else parts[-2].stop :]
    rest = mask.restrict(queries, keys)
    if isinstance(rest, Tile):
        return None
    if not all(isinstance(leaf, Band) and isinstance(leaf.offset, int) for leaf in rest.leaves()):
        return None

    def seen(first: int, height: int) -> range | None:
        """The keys that a strip sees, if they are consecutive, counted from its first query."""
        parts = [*_visible_keys(rest, range(first, first + height), every, len(every), height)]
        return range(parts[0].start - first, parts[0].stop - first) if len(parts) == 1 else None

    window = seen(middle, tuning.MIN_TILE_KEYS)
    if window is None:
        return None
    width = len(window) - tuning.MIN_TILE_KEYS
    height = min(max(tuning.STRIP_QUERIES, key=lambda rows: rows if 4 * rows <= width else -rows), len(queries))
    window = seen(middle - (middle - queries.start) % height, height)
    if window is None or len(window) % height:
        return None
    width = matmul.regular(len(window))  # of few shapes, where it still consists of strips
    width = len(window) if width % height else width
    # the first and the last strip whose keys lie within the text; where these see the same, all between them do
    start = keys.start + width - len(window)
    first = queries.start + -(-max(0, start - window.start - queries.start) // height) * height
    end = min(queries.stop, keys.stop - max(0, window.stop - height))
    count = (end - first) // height
    if count < 2 or seen(first, height) != window or seen(first + (count - 1) * height, height) != window:
        return None
    return Strips(range(first, first + count * height), height, width, rest, range(keys.start))


def _equal_parts(heads: int, each: int) -> list[slice]:
    """Heads in parts of as many, but for the last."""
    return [slice(start, min(start + each, heads)) for start in range(0, heads, each)]


def heads_of_a_tile(heads: int, group: int, most: int) -> int:
    """The number of heads in a tile: whole groups that share a kv head, equally many in each tile, or an equal part of
    one group."""
    if most < group:
        return max(count for count in range(1, most + 1) if group % count == 0)
    kv_heads = heads // group
    tiles = -(-kv_heads // (most // group))
    return -(-kv_heads // tiles) * group


def _masks(call: ObservedCall, others: Sequence[ObservedCall]) -> list[tuple[slice, Mask]]:
    """The union of the masks of some calls: for all batch indices, or for each if they differ."""
    mask = reduce(or_, (seen.scoring.mask_or_everything for seen in (call, *others)))
    found = by_batch(mask, call.grid)
    return [(slice(0, call.grid.batch) if n is None else slice(n, n + 1), part) for n, part in found.items()]


def _seen(mask: Mask, queries: range, keys: range) -> tuple[range, int | None]:
    """The keys from the first to the last that some queries see, and the most consecutive ones that `TILE_QUERIES` of
    them do, from a look at some: at few if that is evaluating the mask, and then all keys count as seen."""
    if not queries or not keys:
        return keys, None
    each, most = tuning.TILE_QUERIES, tuning.MOST_LOOKS if mask.closed_form else tuning.MOST_EVALUATED_LOOKS
    starts = range(queries.start, queries.stop, each * -(-len(queries) // (each * most)))
    looks = [(range(start, min(start + each, queries.stop)), keys) for start in starts]
    looks.append((range(max(queries.start, queries.stop - each), queries.stop), keys))
    of_looks = visible(mask, looks, tuning.MIN_TILE_KEYS)
    longest = max((len(span) for part in of_looks for span in merged(columns for columns, _ in part)), default=1)
    if not mask.closed_form:
        return keys, longest
    (whole,) = visible(mask, [(queries, keys)], tuning.MIN_TILE_KEYS)
    return (hull([columns for columns, _ in whole]) if whole else keys[:0]), longest


def _visible_keys(mask: Mask, queries: range, keys: range, step: int, edge: int | None = None) -> Iterator[range]:
    """The keys visible to some of the queries, from left to right, split at multiples of `step` from the first.

    Args:
        edge: keys in the smallest part; None: `MIN_TILE_KEYS`.
    """
    (found,) = visible(mask, [(queries, keys)], tuning.MIN_TILE_KEYS if edge is None else edge)
    for span in merged(columns for columns, _ in found):
        yield from split_at(span, keys.start, step)


def _height(mask: Mask, queries: range, keys: range, most: int, step: int, heads: int) -> int:
    """The cheapest number of queries in a tile, estimated at the middle of the queries: higher tiles are fewer, but
    under a window more of their scores are hidden."""

    def cost(height: int) -> float:
        middle = queries.start + max(0, len(queries) - height) // 2 // height * height
        tiles = [*_visible_keys(mask, range(middle, min(middle + height, queries.stop)), keys, step)]
        return sum(map(len, tiles)) + len(tiles) * tuning.TILE_OVERHEAD_SCORES / (heads * height)

    halves = [most >> n for n in range(most.bit_length())]
    return min((height for height in halves if height == most or height >= tuning.MIN_TILE_KEYS), key=cost)

"""The tiles of a pass: the visible keys, cut so that a tile fits the cache and little of it is hidden.

They depend on the mask and the sizes of a call only; no score is computed here.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from regard.indexing import hull, merged, split_at
from regard.masks import EVERYTHING, Band, Mask
from regard.masks.planning import by_batch, visible
from regard.observation import tuning
from regard.observation.observed import ObservedCall


class BatchPlan(NamedTuple):
    """Batch indices that are in a tile together, their mask, the heads that are, and the queries of each row of tiles.

    Attributes:
        height: if each of these is several strips, which come as one tile, the queries of a strip; None if not.
    """

    batch: slice
    mask: Mask
    heads: list[slice]
    queries: list[range]
    height: int | None = None


class TilePlan(NamedTuple):
    """The tiles of a rectangle of a call."""

    keys: range
    """All keys of the rectangle."""
    step: int
    """Keys are split at multiples of this, counted from the first."""
    batches: list[BatchPlan]
    max_scores: int
    """An upper bound on the scores in a tile."""
    whole_rows: bool
    """Whether a tile spans all keys that its queries see, and so gives their lse."""

    def keys_of(self, group: BatchPlan, queries: range) -> Iterable[range]:
        """The keys of some queries' tiles, from left to right; of the first strip, if they are several."""
        if group.height is not None:
            return [
                hull([*_visible_keys(group.mask, queries[: group.height], self.keys, len(self.keys), group.height)])
            ]
        tiles = _visible_keys(group.mask, queries, self.keys, self.step)
        if not self.whole_rows:
            return tiles
        seen = [*tiles]
        return [hull(seen)] if seen else ()


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
    batch, heads, device = call.grid.batch, call.grid.heads, call.grid.device
    max_scores = tuning.MAX_TILE_SCORES if device.type == "cpu" else tuning.MAX_TILE_SCORES_ON_GPU
    widest = whole_rows_of
    if widest is None:
        wide = tuning.MAX_TILE_KEYS // (1 if batch * heads >= tuning.MIN_HEADS_OF_WIDE_TILES else 2)
        widest = max(1, min(wide, len(keys), max(tuning.MIN_TILE_KEYS, max_scores // tuning.MIN_TILE_KEYS)))
    max_heads = max(1, max_scores // (widest * max(1, min(tuning.TILE_QUERIES, len(queries)))))
    masks = _masks(call, others)
    if len(masks) == 1 < batch and batch * heads > max_heads:  # tiles of all batch indices would be too flat
        masks = [(slice(index, index + 1), masks[0][1]) for index in range(batch)]
    num_batch = batch if len(masks) == 1 else 1
    group = heads // call.key.shape[1]
    num_heads = heads if num_batch * heads <= max_heads else heads_of_a_tile(heads, group, max_heads)
    num_queries = max(1, min(len(queries), max_scores // (widest * num_batch * num_heads)))
    if whole_rows_of is not None and whole_rows_of < len(keys):  # more queries together would see more keys
        most = min(num_queries, tuning.TILE_QUERIES)
        num_queries = max(count for count in range(1, most + 1) if tuning.TILE_QUERIES % count == 0)
    step = widest if whole_rows_of is None else max(1, len(keys))
    in_heads = _equal_parts(heads, num_heads)
    batches = []
    largest = num_batch * num_heads * num_queries * widest
    for some, mask in masks:
        height = _height(mask, queries, keys, num_queries, step, num_batch * num_heads)
        sliding = _sliding(call, mask, queries, keys) if strips else None
        if sliding is None:
            batches.append(BatchPlan(some, mask, in_heads, [*split_at(queries, queries.start, height)]))
            continue
        first, last = range(queries.start, sliding.queries.start), range(sliding.queries.stop, queries.stop)
        if first:
            batches.append(BatchPlan(some, mask, in_heads, [*split_at(first, first.start, height)]))
        of_strip, count = sliding.height * sliding.width, len(sliding.queries) // sliding.height
        most = max(1, max_scores // of_strip)
        # views of one head need no copies; with several heads, strips are copied, but the tiles are fewer
        few = _equal_parts(heads, heads_of_a_tile(heads, group, max(1, most // count)))
        together = -(-count // -(-count // max(1, most // few[0].stop)))
        largest = max(largest, of_strip * together * few[0].stop)
        for index in range(some.start, some.stop):
            rows = split_at(sliding.queries, sliding.queries.start, together * sliding.height)
            batches.append(BatchPlan(slice(index, index + 1), mask, few, [*rows], sliding.height))
        if last:
            batches.append(BatchPlan(some, mask, in_heads, [*split_at(last, last.start, height)]))
    return TilePlan(keys, step, batches, largest, whole_rows_of is not None)


class Sliding(NamedTuple):
    """Queries that see as many keys each, at equal distances: strips of them have the same form.

    Attributes:
        queries: all of them. height: the queries of a strip. width: the keys that it spans.
    """

    queries: range
    height: int
    width: int


def _sliding(call: ObservedCall, mask: Mask, queries: range, keys: range) -> Sliding | None:
    """The queries that see a full window; None if the mask is none, or gradients are recorded."""
    bands = all(isinstance(part, Band) and isinstance(part.offset, int) for part in mask.leaves())
    biases = () if call.scoring.bias is None else call.scoring.bias.terms()
    by_distance = bands and mask is not EVERYTHING and call.folds and all(bias.of_distance for bias in biases)
    if (
        not by_distance
        or call.wants_grad
        or keys != range(call.grid.key_len)
        or len(queries) < tuning.MIN_SLIDING_QUERIES
    ):
        return None

    def seen(first: int, height: int) -> range | None:
        """The keys that a strip sees, if they are consecutive, counted from its first query."""
        parts = [*_visible_keys(mask, range(first, first + height), keys, len(keys), height)]
        return range(parts[0].start - first, parts[0].stop - first) if len(parts) == 1 else None

    middle = (queries.start + queries.stop) // 2
    window = seen(middle, tuning.MIN_TILE_KEYS)
    if window is None:
        return None
    width = len(window) - tuning.MIN_TILE_KEYS
    height = min(max(tuning.STRIP_QUERIES, key=lambda rows: rows if 4 * rows <= width else -rows), len(queries))
    window = seen(middle - (middle - queries.start) % height, height)
    if window is None or len(window) % height:
        return None
    # the first and the last strip whose keys lie within the text; where these see the same, all between them do
    first = queries.start + -(-max(0, -window.start - queries.start) // height) * height
    end = min(queries.stop, keys.stop - max(0, window.stop - height))
    count = (end - first) // height
    if count < 2 or seen(first, height) != window or seen(first + (count - 1) * height, height) != window:
        return None
    return Sliding(range(first, first + count * height), height, len(window))


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
        middle = queries.start + max(0, len(queries) - height) // 2
        tiles = [*_visible_keys(mask, range(middle, min(middle + height, queries.stop)), keys, step)]
        return sum(map(len, tiles)) + len(tiles) * tuning.TILE_OVERHEAD_SCORES / (heads * height)

    halves = [most >> n for n in range(most.bit_length())]
    return min((height for height in halves if height == most or height >= tuning.MIN_TILE_KEYS), key=cost)

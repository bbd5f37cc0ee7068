"""Which keys some queries may see, and how many scores that makes: asked of masks by rectangles, never by cells."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from regard.indexing import merged, split_at
from regard.masks import Mask, Tile
from regard.masks.planning import factors, product_of, visible

KEY_STEP = 32
"""Keys in the smallest tile for which a mask is asked: so many more than needed may be sent at the edge of a window."""

KEYS_LOOKED_AT = 128
"""Keys of which all cells are looked at together, where another part of the mask has already hidden some: of large
rectangles, a mask without a closed form says nothing."""

MAX_QUESTIONS = 1 << 20
"""Rectangles about which a mask is asked, divided by the number of ranks: one that hides keys here and there
everywhere, as a stride does, would be asked about as many as there are keys."""

MIN_QUESTIONS = 256
"""The least for one range of queries and one of keys: enough for the ends of a dozen ranges among ten million keys."""


def seen_keys(
    mask: Mask, queries: Iterable[range], held: Sequence[range], ranks: int, *, looks: bool = True
) -> list[range]:
    """The keys among those held that any of the queries may see, in order; what a mask is not sure of counts as seen.

    Args:
        mask: bound to the whole call.
        held: ranges of keys, in order.
        ranks: of the group; the more, the fewer questions each of them asks.
        looks: whether a mask without a closed form, which has to look at all cells, is asked, too.
    """
    closed = product_of(part for part in factors(mask) if part.closed_form)
    by_looking = [part for part in factors(mask) if looks and not part.closed_form]
    pairs = [(rows, piece) for rows in queries for piece in held]
    questions = max(MIN_QUESTIONS * len(pairs), MAX_QUESTIONS // ranks)

    found = [
        columns
        for (rows, piece), parts in zip(pairs, visible(closed, pairs, KEY_STEP, questions), strict=True)
        for part, _ in parts
        for columns in (split_at(part, piece.start, KEYS_LOOKED_AT) if by_looking and part != piece else [part])
        if all(other.tile(rows, columns) is not Tile.EMPTY for other in by_looking)
    ]
    return merged(found)


def trimmed(mask: Mask, queries: range, keys: range) -> tuple[range, range] | None:
    """A rectangle without the rows and columns at its edges that are known to be empty; None if all of it is."""
    if mask.tile(queries, keys) is Tile.EMPTY:
        return None
    if not mask.closed_form:
        return queries, keys
    rows = _without_ends(queries, lambda part: mask.tile(part, keys) is Tile.EMPTY)
    columns = _without_ends(keys, lambda part: mask.tile(rows, part) is Tile.EMPTY)
    return (rows, columns) if rows and columns else None


def _without_ends(side: range, empty: Callable[[range], bool]) -> range:
    """A range without the longest parts at its start and end that are empty."""
    start, stop = side.start, side.stop
    first = start + bisect_left(side, True, key=lambda at: not empty(range(start, at + 1)))
    return range(first, first + bisect_left(range(first, stop), True, key=lambda at: empty(range(at, stop))))

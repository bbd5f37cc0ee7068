"""Which keys some queries may see, and how many scores that makes: asked of masks by rectangles, never by cells."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from regard.masks import Mask, Tile
from regard.masks.planning import factors, product_of, visible

KEY_STEP = 32
"""Keys in the smallest tile for which a mask is asked: so many more than needed may be sent at the edge of a window."""


def seen_keys(mask: Mask, queries: Iterable[range], held: Sequence[range], edge: int = KEY_STEP) -> list[range]:
    """The keys among those held that any of the queries may see, in order; what a mask is not sure of counts as seen.

    Args:
        mask: bound to the whole call.
        held: ranges of keys, in order.
        edge: keys in the smallest tile that is asked about.
    """
    closed = product_of(part for part in factors(mask) if part.closed_form)
    by_looking = [part for part in factors(mask) if not part.closed_form]
    found: list[range] = []
    for rows in queries:
        for piece in held:
            for columns, _ in visible(closed, rows, piece, edge):
                if all(other.tile(rows, columns) is not Tile.EMPTY for other in by_looking):
                    found.append(columns)
    return joined(found)


def joined(ranges: Iterable[range]) -> list[range]:
    """The same numbers as ranges in order that neither touch nor overlap."""
    found: list[range] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            part = range(found[-1].start, max(found.pop().stop, part.stop))
        found.append(part)
    return found


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

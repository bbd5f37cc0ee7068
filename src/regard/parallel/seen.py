"""Which keys some queries may see, and how many scores that makes: asked of masks by rectangles, never by cells."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from regard.masks import Mask, Tile
from regard.masks.planning import factors, product_of

KEY_STEP = 32
"""Keys in the smallest tile for which a mask is asked: so many more than needed may be sent at the edge of a window."""

MAX_QUESTIONS = 1 << 18
"""Rectangles about which a mask is asked for one range of queries and one of keys, divided by the number of ranks: a
mask that hides keys here and there everywhere, as a stride does, would be asked about as many as there are keys."""

MIN_QUESTIONS = 256
"""The least of that: enough for the ends of some dozen ranges of keys among ten million."""


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
    questions = max(MIN_QUESTIONS, MAX_QUESTIONS // ranks)

    found = [
        columns
        for rows in queries
        for piece in held
        for columns in _visible(closed, rows, piece, questions)
        if all(other.tile(rows, columns) is not Tile.EMPTY for other in by_looking)
    ]
    return joined(found)


def _visible(mask: Mask, rows: range, piece: range, questions: int) -> Iterator[range]:
    """The nonempty parts of a range of keys, halved until a mask is sure, they are small, or it was asked too often."""
    todo = deque([piece])
    while todo:
        columns = todo.popleft()
        tile = mask.tile(rows, columns)
        questions -= 1
        if tile is Tile.EMPTY:
            continue
        if tile is Tile.FULL or len(columns) <= KEY_STEP or questions <= len(todo):
            yield columns
            continue
        half = columns.start + -(-len(columns) // (2 * KEY_STEP)) * KEY_STEP
        todo += [range(columns.start, half), range(half, columns.stop)]


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

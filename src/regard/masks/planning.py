"""Queries that kernels make to a mask: visible keys, keys shared by all queries, the mask of each batch index."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import reduce

from regard.masks.algebra import EVERYTHING, And, Mask, Tile
from regard.masks.positional import Band
from regard.shapes import Grid


def visible(mask: Mask, rows: range, columns: range, edge: int) -> Iterator[tuple[range, Tile]]:
    """The nonempty parts of the columns, from left to right, by bisection where the mask is PARTIAL.

    Args:
        edge: keys in the smallest part.
    """
    tile = mask.tile(rows, columns)
    if tile is Tile.EMPTY:
        return
    if tile is Tile.FULL or len(columns) <= edge:
        yield columns, tile
        return
    half = columns.start + -(-len(columns) // (2 * edge)) * edge
    yield from visible(mask, rows, range(columns.start, half), edge)
    yield from visible(mask, rows, range(half, columns.stop), edge)


def common_keys(mask: Mask, queries: range, stop: int, start: int = 0) -> range | None:
    """The keys between start and stop that the queries see, if they are consecutive and the same for all queries; None
    if not, or if finding out needs the evaluation of cells."""
    if not mask.closed_form:
        return None
    if mask.tile(queries, range(start, stop)) is Tile.FULL:
        return range(start, stop)

    def some_until(key: int) -> bool:
        return mask.tile(queries, range(start, key + 1)) is not Tile.EMPTY

    def none_from(key: int) -> bool:
        return mask.tile(queries, range(key, stop)) is Tile.EMPTY

    first = start + bisect_left(range(start, stop), True, key=some_until)
    shared = range(first, first + bisect_left(range(first, stop), True, key=none_from))
    return shared if not shared or mask.tile(queries, shared) is Tile.FULL else None


def is_top_left_causal(mask: object) -> bool:
    """Whether it is the causal mask of torch's function: query i sees the first i + 1 keys."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int):
        return False
    return mask.before is None and mask.after == 0 and mask.offset == 0


def factors(mask: Mask) -> Iterator[Mask]:
    """The operands of a chain of ``&``."""
    if isinstance(mask, And):
        yield from factors(mask.left)
        yield from factors(mask.right)
    else:
        yield mask


def product_of(masks: Iterable[Mask]) -> Mask:
    """The masks joined by ``&``."""
    everything: Mask = EVERYTHING
    return reduce(lambda left, right: right if left is EVERYTHING else left & right, masks, everything)


def by_batch(mask: Mask, grid: Grid) -> dict[int | None, Mask]:
    """The bound mask of each batch index; or, under the key None, the mask of all if it does not differ."""
    if not mask.varies_by_batch:
        return {None: mask}
    if grid.batch == 1:
        return {None: mask.for_batch(0).bind(grid)}
    return {index: mask.for_batch(index).bind(grid._replace(batch=1)) for index in range(grid.batch)}


class MaskKey:
    """A mask as a cache key, compared by structure; a mask without one equals only itself."""

    def __init__(self, mask: Mask) -> None:
        self.mask, self.structure = mask, mask.structure()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKey):
            return False
        return self.mask is other.mask if self.structure is None else self.structure == other.structure

    def __hash__(self) -> int:
        return id(self.mask) if self.structure is None else hash(self.structure)

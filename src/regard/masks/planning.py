"""What kernels ask of a mask: which keys are visible, which all queries share, what it says per batch index."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import reduce

from regard.masks.algebra import EVERYTHING, And, Mask, Tile
from regard.masks.positional import Band
from regard.shapes import Grid


def visible(mask: Mask, rows: range, columns: range, edge: int) -> Iterator[tuple[range, Tile]]:
    """The parts of the columns that are not empty, from left to right: halves of halves, where the mask says PARTIAL.

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
    """The keys, from start to stop, of queries that all see the same ones, next to each other; None where they do not,
    or where it takes looking at cells to know."""
    if not mask.closed_form:
        return None

    def some_until(key: int) -> bool:
        return mask.tile(queries, range(start, key + 1)) is not Tile.EMPTY

    def none_from(key: int) -> bool:
        return mask.tile(queries, range(key, stop)) is Tile.EMPTY

    first = start + bisect_left(range(start, stop), True, key=some_until)
    shared = range(first, first + bisect_left(range(first, stop), True, key=none_from))
    return shared if not shared or mask.tile(queries, shared) is Tile.FULL else None


def is_top_left_causal(mask: object) -> bool:
    """Whether it is the causal mask of torch's own function: query i sees the first i + 1 keys."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int):
        return False
    return mask.before is None and mask.after == 0 and mask.offset == 0


def factors(mask: Mask) -> Iterator[Mask]:
    """The masks that must all allow."""
    if isinstance(mask, And):
        yield from factors(mask.left)
        yield from factors(mask.right)
    else:
        yield mask


def product_of(masks: Iterable[Mask]) -> Mask:
    """The mask that allows what all of them allow."""
    everything: Mask = EVERYTHING
    return reduce(lambda left, right: right if left is EVERYTHING else left & right, masks, everything)


def by_batch(mask: Mask, grid: Grid) -> dict[int | None, Mask]:
    """The bound mask of each batch index, where they differ; under None that of all, where they do not."""
    if not mask.varies_by_batch:
        return {None: mask}
    if grid.batch == 1:
        return {None: mask.for_batch(0).bind(grid)}
    return {index: mask.for_batch(index).bind(grid._replace(batch=1)) for index in range(grid.batch)}


class MaskKey:
    """A mask as the key of what was found out about it; one that cannot be told from others is equal to itself."""

    def __init__(self, mask: Mask) -> None:
        self.mask, self.structure = mask, mask.structure()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKey):
            return False
        return self.mask is other.mask if self.structure is None else self.structure == other.structure

    def __hash__(self) -> int:
        return id(self.mask) if self.structure is None else hash(self.structure)

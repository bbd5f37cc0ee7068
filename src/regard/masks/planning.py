"""Queries that kernels make to a mask: visible keys, keys shared by all queries, the mask of each batch index."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import product
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from regard.masks.algebra import EVERYTHING, And, Mask, Not, Or, Tile
from regard.masks.positional import Band, Chunk, Positioned, Prefix, Strided
from regard.shapes import Grid, Offset

BRANCHES = 4
"""Parts into which a PARTIAL rectangle is cut: more of them are more questions, fewer are more rounds of asking."""

MAX_MULTIPLIED_OUT = 64
"""Alternatives up to which a mask is multiplied out: each union doubles them."""

FEW = 16
"""Rectangles for which asking one at a time takes less than arithmetic on tensors."""


def visible(
    mask: Mask, rectangles: Sequence[tuple[range, range]], edge: int, questions: float = math.inf
) -> list[list[tuple[range, Tile]]]:
    """For each rectangle, the nonempty parts of its columns from left to right, neighbours of one kind as one.

    All rectangles are asked about in a round, then the parts of those that are PARTIAL, again and again; where they are
    many, together.

    Args:
        edge: keys in the smallest part. questions: about how many parts to ask; those left over count as PARTIAL.
    """
    todo = [(number, columns) for number, (rows, columns) in enumerate(rectangles) if rows and columns]
    step = edge
    while step < max((len(columns) for _, columns in todo), default=0):
        step *= BRANCHES
    found: list[list[int]] = []  # number of the rectangle, start, stop, whether FULL
    while 0 < len(todo) <= FEW:
        asked, todo, step, questions = todo, [], step // BRANCHES, questions - len(todo)
        for number, columns in asked:
            tile = mask.tile(rectangles[number][0], columns)
            if tile is Tile.PARTIAL and len(columns) > edge and questions > 0:
                todo += [(number, columns[at : at + step]) for at in range(0, len(columns), step)]
            elif tile is not Tile.EMPTY:
                found.append([number, columns.start, columns.stop, tile is Tile.FULL])
    if todo:
        parts = ((number, *_ends(rectangles[number][0]), *_ends(columns)) for number, columns in todo)
        found += _visible_of_many(mask, [*parts], step, edge, questions)
    seen: list[list[tuple[range, Tile]]] = [[] for _ in rectangles]
    for number, start, stop, full in sorted(found):
        tile, before = Tile.FULL if full else Tile.PARTIAL, seen[number]
        if before and before[-1][0].stop == start and before[-1][1] is tile:
            start = before.pop()[0].start
        before.append((range(start, stop), tile))
    return seen


def _visible_of_many(
    mask: Mask, parts: Sequence[tuple[int, ...]], step: int, edge: int, questions: float
) -> list[list[int]]:
    """The nonempty parts of parts of rectangles: number of the rectangle, start, stop, whether FULL.

    Args:
        parts: number of the rectangle, first and last row, first and last column. step: columns in the largest.
    """
    number, top, bottom, start, last = torch.tensor(parts, dtype=torch.int64, device="cpu").unbind(1)
    stop = last + 1
    found = []
    while len(number):
        empty, full = _verdict(mask, top, bottom, start, stop - 1)
        step, questions = step // BRANCHES, questions - len(number)
        cut = ~(empty | full) & (stop - start > edge)
        if questions < BRANCHES * int(cut.sum()):
            cut = torch.zeros_like(cut)
        here = ~(empty | cut)
        found.append(torch.stack([number[here], start[here], stop[here], full[here]]))
        starts = start[cut, None] + step * torch.arange(BRANCHES, device="cpu")
        stops = stop[cut, None]
        inside = starts < stops
        number, top, bottom = (side[cut, None].expand_as(starts)[inside] for side in (number, top, bottom))
        start, stop = starts[inside], (starts + step).minimum(stops)[inside]
    return _neighbours_as_one(torch.cat(found, dim=1)).T.tolist()


def _neighbours_as_one(parts: Tensor) -> Tensor:
    """Parts of rectangles in order, those that touch and are of one kind as one.

    Shapes: [4, any]: number of the rectangle, start, stop, whether it is FULL.
    """
    parts = parts[:, parts[1].argsort()]
    number, start, stop, full = parts[:, parts[0].argsort(stable=True)]
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[1:] = (number[1:] != number[:-1]) | (start[1:] != stop[:-1]) | (full[1:] != full[:-1])
    ends = begins.roll(-1)
    return torch.stack([number[begins], start[begins], stop[ends], full[begins]])


def _verdict(mask: Mask, *sides: Tensor) -> tuple[Tensor, Tensor]:
    """Which rectangles are EMPTY and which are FULL, asked together if the mask can be.

    Shapes: top, bottom, left and right int64 [any] -> bool [any] each.
    """
    said = mask.verdict(*sides) if mask.closed_form else None
    if said is not None:
        empty, full = (torch.as_tensor(one, device="cpu").expand_as(sides[0]) for one in said)
        return empty, full
    edges = zip(*(side.tolist() for side in sides), strict=True)
    tiles = [mask.tile(range(top, bottom + 1), range(left, right + 1)) for top, bottom, left, right in edges]
    empty, full = (torch.tensor([tile is kind for tile in tiles], device="cpu") for kind in (Tile.EMPTY, Tile.FULL))
    return empty, full


def _ends(part: range) -> tuple[int, int]:
    return part[0], part[-1]


def common_keys(mask: Mask, queries: range, stop: int, start: int = 0) -> range | None:
    """The keys between start and stop that the queries see, if they are consecutive and the same for all queries; None
    if not, or if finding out needs the evaluation of cells."""
    if not mask.closed_form:
        return None
    if len(queries) == 1 and isinstance(mask, Band):
        seen = mask.seen_by(queries[0], range(start, stop))
        if seen is not None:
            return seen
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
    return isinstance(mask, Band) and mask.before is None and hides_later_keys(mask)


def hides_later_keys(mask: Mask) -> bool:
    """Whether it is known that query i sees none but the first i + 1 keys: about half of a square."""
    bands = (factor for factor in factors(mask) if isinstance(factor, Band))
    return any(isinstance(band.offset, int) and band.offset == band.after == 0 for band in bands)


def factors(mask: Mask) -> list[Mask]:
    """The operands of a chain of ``&``."""
    return _operands(And, mask)


def alternatives(mask: Mask) -> list[Mask]:
    """The operands of a chain of ``|``."""
    return _operands(Or, mask)


def holds_data(mask: Mask) -> bool:
    """Whether some of it is a tensor, as padding and ids of documents, which are others for every batch."""
    return any(isinstance(value, Tensor) for leaf in mask.leaves() for value in leaf.arguments().values())


def is_likely_new(mask: Mask) -> bool:
    """Whether it is likely to be another one in every call: some of it is a tensor, or a function."""
    return holds_data(mask) or not all(leaf.closed_form for leaf in mask.leaves())


def _operands(kind: type[And] | type[Or], mask: Mask) -> list[Mask]:
    if not isinstance(mask, kind):
        return [mask]
    return [*_operands(kind, mask.left), *_operands(kind, mask.right)]


Diagonals = tuple[int | None, int | None]
"""Which keys of a rectangle its queries see: query i those from i + low to i + high on, both included, with None for a
side without an end."""

EVERY_DIAGONAL: Diagonals = None, None


def diagonals_of(mask: Mask, queries: range, keys: range) -> Diagonals | None:
    """The diagonals of a rectangle that a mask allows; None if it allows other cells. With a step, as under a strided
    mask, they are counted in steps."""
    step = queries.step
    if not step == keys.step > 0:
        return None
    part = mask.restrict(queries, keys) if step == 1 else mask
    if isinstance(part, Tile):
        return EVERY_DIAGONAL if part is Tile.FULL else None
    lows, highs = [], []
    for band in factors(part):
        if step > 1 and _sees_all(band, queries, keys):
            continue
        if not is_band(band):
            return None
        assert isinstance(band.offset, int)
        moved = queries.start + band.offset - keys.start
        lows += [] if band.before is None else [-((band.before - moved) // step)]
        highs += [] if band.after is None else [(moved + band.after) // step]
    return max(lows, default=None), min(highs, default=None)


def is_band(mask: Mask) -> TypeGuard[Band]:
    """Whether it is a band by its own rule, the same for all batch indices."""
    return isinstance(mask, Band) and type(mask).rule is Band.rule and isinstance(mask.offset, int)


def from_own_key(mask: Mask, offset: Offset = None) -> tuple[Diagonals, list[Mask]]:
    """The diagonals of the bands with this offset, counted from a query's own key, and the other factors."""
    lows, highs, others = [], [], []
    for part in factors(mask):
        if not isinstance(part, Band) or type(part).rule is not Band.rule or not _is_same(part.offset, offset):
            others.append(part)
            continue
        lows += [] if part.before is None else [-part.before]
        highs += [] if part.after is None else [part.after]
    return (max(lows, default=None), min(highs, default=None)), others


def _is_same(one: Offset, other: Offset) -> bool:
    return one is other or (type(one) is type(other) is int and one == other)


def keys_of_last(mask: Mask, key_len: int) -> tuple[range, list[Mask]]:
    """The keys that the last of so many tokens sees under these bands, and the other factors."""
    (low, high), others = from_own_key(mask)
    first = 0 if low is None else max(0, key_len - 1 + low)
    return range(first, key_len if high is None else min(key_len, key_len + high)), others


class Alternative(NamedTuple):
    """Keys that a query sees, None for no such limit.

    Attributes:
        low, high: from its own + low to its own + high, both included.
        since, until: from the first of these to before the other.
        step: every so many, counted from its own.
        chunk: of so many, those of its own.
    """

    low: int | None = None
    high: int | None = None
    since: int | None = None
    until: int | None = None
    step: int = 1
    chunk: int | None = None


def seen_from_own_key(mask: Mask) -> list[Alternative] | None:
    """What a query sees, if the last one has the last key: alternatives that may have keys in common, those with a step
    last. None if it is not known, or follows from data."""
    found = _alternatives(mask)
    return None if found is None else sorted(found, key=lambda one: one.step)


def _alternatives(mask: Mask) -> list[Alternative] | None:
    if isinstance(mask, And | Or):
        left, right = _alternatives(mask.left), _alternatives(mask.right)
        if left is None or right is None:
            return None
        return left + right if isinstance(mask, Or) else _in_common(left, right)
    inner = mask.mask if isinstance(mask, Not) else mask
    if isinstance(inner, Positioned) and inner.offset is not None:
        return None
    if isinstance(inner, Band) and type(inner).rule is Band.rule:
        before, after = inner.before, inner.after
        if inner is mask:
            return [Alternative(None if before is None else -before, after)]
        behind = [] if before is None else [Alternative(high=-before - 1)]
        return behind + ([] if after is None else [Alternative(low=after + 1)])
    if isinstance(inner, Prefix) and type(inner).rule is Prefix.rule and isinstance(inner.n, int):
        return [Alternative(until=inner.n) if inner is mask else Alternative(since=inner.n)]
    if type(mask) is Strided:
        return [Alternative(step=mask.step)]
    return [Alternative(chunk=mask.size)] if type(mask) is Chunk else None


def _in_common(some: list[Alternative], others: list[Alternative]) -> list[Alternative] | None:
    """What is seen by one of some and by one of others; None if that is no alternative, or they are many."""
    if len(some) * len(others) > MAX_MULTIPLIED_OUT:
        return None
    found = []
    for one, other in product(some, others):
        if 1 not in (one.step, other.step) or None not in (one.chunk, other.chunk):
            return None
        sides = [[side for side in pair if side is not None] for pair in zip(one, other, strict=True)]
        low, since = (max(sides[place], default=None) for place in (0, 2))
        high, until = (min(sides[place], default=None) for place in (1, 3))
        found.append(Alternative(low, high, since, until, one.step * other.step, one.chunk or other.chunk))
    return found


def _sees_all(mask: Mask, queries: range, keys: range) -> bool:
    """Whether it is a strided mask whose step divides that of the rectangle, and allows all of that."""
    if not isinstance(mask, Strided) or type(mask).rule is not Strided.rule or not isinstance(mask.offset, int):
        return False
    return queries.step % mask.step == 0 and (queries.start + mask.offset - keys.start) % mask.step == 0


def cells_on(diagonals: Diagonals, queries: range, keys: range, together: int) -> int:
    """Cells computed of the diagonals of a rectangle, if so many queries skip together what none of them sees; at most
    half as many are computed one by one, and so is a last eighth of twice as many."""
    low, high = diagonals
    rows, columns = len(queries), len(keys)
    of_two, rest = rows % (2 * together), rows % together
    alone = rows <= together // 2 or rest == 0 or (of_two <= together // 4 and rows > 2 * together)
    if low is None and high is None:
        return (rows if alone else rows - rest + together) * columns
    whole = rows // together
    starts = 0 if low is None else _clamped(whole, together, low, columns)
    stops = whole * columns if high is None else _clamped(whole, together, together + high, columns)
    cells = together * max(0, stops - starts)
    if rest:
        start = 0 if low is None else _clamped(1, together, whole * together + low, columns)
        stop = columns if high is None else _clamped(1, together, rows + high, columns)
        cells += (rest if alone else together) * max(0, stop - start)
    return cells


def _clamped(count: int, step: int, first: int, most: int) -> int:
    """The sum of so many numbers that follow each other in steps, from the first on, each between 0 and the most."""
    below = min(count, max(0, -(first // step)))  # 0, or the first of those above it
    above = min(count, max(below, -((first - most) // step)))
    between = above - below
    return between * first + step * (below + above - 1) * between // 2 + (count - above) * most


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

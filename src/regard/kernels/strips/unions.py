"""Unions of which a part needs strips of its own: parts that have no cell in common, whose results are merged.

Strips of a window have consecutive queries, those of a strided mask (Sparse Transformers, Child et al. 2019) queries
with the same residue. Documents whose tokens lie apart are sorted. No strip and no order suits both parts of a union:

    Causal() & (Window(128) | Strided(128))     the window, and Strided(128) & Band(None, -128)
    Causal() & (Document(ids) | Prefix(4))      the prefix, and Causal() & Document(ids) & ~Prefix(4)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from regard.kernels.call import Call
from regard.kernels.known import cached_by_mask
from regard.kernels.strips import tuning
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import PlanOptions
from regard.kernels.strips.reordering import share_of_documents
from regard.kernels.strips.residues import is_strided
from regard.masks import Band, Document, Mask, Or, Strided
from regard.masks.planning import EVERY_DIAGONAL, Diagonals, alternatives, cells_on, factors, is_band, product_of
from regard.shapes import Grid


def plan_union(mask: Mask, grid: Grid, by: PlanOptions) -> StripPlan:
    """The strips of a bound mask, and beside them those of other parts, if a part is strided."""
    first, *others = (plan_strips(part, grid, by) for part in parts_by_residue(mask, grid))
    return first.beside(others)


@cached_by_mask(maxsize=8)
def parts_by_residue(mask: Mask, grid: Grid) -> list[Mask]:
    """Masks that together allow what a bound mask does, no cell twice, with strided ones by themselves; the mask alone
    if it is no such union, or if so few keys would be left out that merging takes longer."""

    def share(part: Mask) -> float | None:
        if not is_strided(part, grid.query_len):
            return None
        return math.prod(1 / factor.step for factor in factors(part) if isinstance(factor, Strided))

    return _parts_of(mask, grid, share)


def by_documents(call: Call) -> list[Call]:
    """A call as several, of the parts of its mask by document; itself if little is to be computed."""
    scoring = call.scoring
    few = math.prod(scoring.grid[:4]) <= tuning.SCORES_WORTH_SORTING_DOCUMENTS
    if scoring.mask is None or few or scoring.grid.device.type != "cpu":
        return [call]
    masks = parts_by_document(scoring.mask, scoring.grid)
    return [call._replace(scoring=replace(scoring, mask=mask)) for mask in masks] if len(masks) > 1 else [call]


@cached_by_mask(maxsize=8)
def parts_by_document(mask: Mask, grid: Grid) -> list[Mask]:
    """The same with documents whose tokens lie apart by themselves."""

    def share(part: Mask) -> float | None:
        apart = [one for one in factors(part) if isinstance(one, Document) and not one.closed_form]
        return min(map(share_of_documents, apart), default=None)

    return _parts_of(mask, grid, share)


def _parts_of(mask: Mask, grid: Grid, share_of: Callable[[Mask], float | None]) -> list[Mask]:
    """share_of: how many of the keys a part of a union shows, if it is better by itself; None if not."""
    for union in (part for part in factors(mask) if isinstance(part, Or)):
        shares = [share_of(part) for part in alternatives(union)]
        if any(share is not None for share in shares):
            break
    else:
        return [mask]
    rest = [part for part in factors(mask) if part is not union]
    found = [*zip(alternatives(union), shares, strict=True)]
    seen = [part for part, share in found if share is None]
    parts, left_out = [product_of([*rest, reduce(or_, seen)])] if seen else [], 0.0
    for part, share in found:
        if share is None:
            continue
        for side in _outside(rest, seen):
            keys = cells_on(side, range(grid.query_len), range(grid.key_len), 1) / grid.query_len
            left_out += keys * (1 - share)
            parts.append(product_of([Band(*_band(side), offset=0), *_others(rest, seen), *factors(part)]))
        seen.append(part)
    return parts if left_out >= tuning.KEYS_WORTH_MERGING else [mask]


def _outside(rest: Sequence[Mask], seen: Sequence[Mask]) -> list[Diagonals]:
    """The diagonals that the bands of `rest` allow, without those of the bands in `seen`: what lies on either side."""
    sides = [reduce(_both, map(_diagonals, filter(is_band, rest)), EVERY_DIAGONAL)]
    for low, high in map(_diagonals, filter(is_band, seen)):
        if low is not None and high is not None and low > high:
            continue  # it shows nothing
        outside: list[Diagonals] = [] if low is None else [(None, low - 1)]
        outside += [] if high is None else [(high + 1, None)]
        sides = [_both(side, other) for side in sides for other in outside]
    return [(low, high) for low, high in sides if low is None or high is None or low <= high]


def _others(rest: Sequence[Mask], seen: Sequence[Mask]) -> list[Mask]:
    """The factors of `rest` that are no bands, and what is not in `seen` of others."""
    return [part for part in rest if not is_band(part)] + [~mask for mask in seen if not is_band(mask)]


def _diagonals(band: Band) -> Diagonals:
    assert isinstance(band.offset, int)
    low = None if band.before is None else band.offset - band.before
    return low, None if band.after is None else band.offset + band.after


def _both(one: Diagonals, other: Diagonals) -> Diagonals:
    (low, high), (least, most) = one, other
    low = low if least is None else least if low is None else max(low, least)
    return low, high if most is None else most if high is None else min(high, most)


def _band(diagonals: Diagonals) -> Diagonals:
    """The arguments of the band that allows them."""
    low, high = diagonals
    return None if low is None else -low, high

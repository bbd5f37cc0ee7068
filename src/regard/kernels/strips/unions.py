"""Unions with a strided mask, as of Sparse Transformers (Child et al. 2019): parts that have no cell in common.

Strips of a window have consecutive queries, those of a strided mask queries with the same residue. No strip suits both,
so each part has strips of its own, and the results of a query are merged:

    Causal() & (Window(128) | Strided(128))     the window, and Strided(128) & Band(None, -128)
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from regard.kernels.strips import tuning
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import PlanOptions
from regard.kernels.strips.residues import is_strided
from regard.masks import Band, Mask, Or, Strided
from regard.masks.planning import EVERY_DIAGONAL, Diagonals, alternatives, cells_on, factors, is_band, product_of
from regard.shapes import Grid


def plan_union(mask: Mask, grid: Grid, by: PlanOptions) -> StripPlan:
    """The strips of a bound mask, and beside them those of other parts, if it is such a union."""
    first, *others = (plan_strips(part, grid, by) for part in parts_of(mask, grid.query_len, grid.key_len))
    return first.beside(others)


def parts_of(mask: Mask, query_len: int, key_len: int) -> list[Mask]:
    """Masks that together allow what a bound mask does, no cell twice; the mask alone if it is no such union, or if so
    few keys would be left out that merging takes longer."""
    found = [part for part in factors(mask) if isinstance(part, Or) and _strided(part, query_len)]
    if len(found) != 1:
        return [mask]
    rest, strided = [part for part in factors(mask) if part is not found[0]], _strided(found[0], query_len)
    seen = [other for other in alternatives(found[0]) if other not in strided]
    parts, left_out = [product_of([*rest, reduce(or_, seen)])] if seen else [], 0.0
    for part in strided:
        (step,) = (factor.step for factor in factors(part) if isinstance(factor, Strided))
        for side in _outside(rest, seen):
            left_out += cells_on(side, range(query_len), range(key_len), 1) / query_len * (1 - 1 / step)
            parts.append(product_of([Band(*_band(side), offset=0), *_others(rest, seen), *factors(part)]))
        seen.append(part)
    return parts if left_out >= tuning.KEYS_WORTH_MERGING else [mask]


def _strided(mask: Mask, query_len: int) -> list[Mask]:
    return [other for other in alternatives(mask) if is_strided(other, query_len)]


def _outside(rest: Sequence[Mask], seen: Sequence[Mask]) -> list[Diagonals]:
    """The diagonals that the bands of `rest` allow, without those of the bands in `seen`: what lies on either side."""
    sides = [reduce(_both, map(_diagonals, filter(is_band, rest)), EVERY_DIAGONAL)]
    for low, high in map(_diagonals, filter(is_band, seen)):
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

"""Strips of a strided mask: queries with the same residue modulo its step see the same keys, and no others.

Each residue is cut as if its tokens were consecutive; the strips hold them as ranges with a step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.kernels.strips import tuning
from regard.kernels.strips.plan import PlanOptions, Strip, cut
from regard.masks import EVERYTHING, Band, Mask, Strided, Tile
from regard.masks.algebra import Verdict
from regard.masks.planning import factors, product_of


def cut_by_residue(
    mask: Mask, query_len: int, key_len: int, batch_index: int | None, by: PlanOptions
) -> Iterator[Strip]:
    """The strips of a strided mask: queries with the same residue modulo the step see the same keys."""
    (strided,) = (part for part in factors(mask) if isinstance(part, Strided))
    rest = product_of(part for part in factors(mask) if part is not strided)
    step, offset = strided.step, strided.offset
    assert isinstance(offset, int)  # checked by `is_strided`
    known: dict[tuple[Mask, int, int], list[Strip]] = {}
    for first in range(min(step, query_len)):
        queries, keys = range(first, query_len, step), range((first + offset) % step, key_len, step)
        thinned = _thinned(rest, queries, keys), len(queries), len(keys)
        if thinned not in known:  # most residues see the same
            known[thinned] = [*cut(*thinned, batch_index, by=by)]
        for strip in known[thinned]:
            spans = tuple(keys[span.start : span.stop] for span in strip.spans)
            yield replace(strip, queries=queries[strip.queries.start : strip.queries.stop], spans=spans)


def _thinned(mask: Mask, queries: range, keys: range) -> Mask:
    """A mask on every step-th query and key, as a mask on their consecutive numbers."""
    if not isinstance(mask, Band) or not isinstance(mask.offset, int):
        return mask if mask is EVERYTHING else _Thinned(mask, queries, keys)
    # query m and key n are (ahead + (m - n) step) apart
    ahead, step = queries.start + mask.offset - keys.start, queries.step
    before, after = mask.before, mask.after
    return Band(
        None if before is None else (before - ahead) // step,
        None if after is None else (after + ahead) // step,
        offset=0,
    )


class _Thinned(Mask):
    """`_thinned` for masks other than bands."""

    def __init__(self, mask: Mask, queries: range, keys: range) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query, key = (side.start + at * side.step for side, at in ((self.queries, query), (self.keys, key)))
        return self.mask.rule(batch, head, query, key)

    @property
    def closed_form(self) -> bool:
        return self.mask.closed_form

    def breaks(self, query_len: int) -> set[int]:
        first, step = self.queries.start, self.queries.step
        return {-((first - at) // step) for at in self.mask.breaks(first + query_len * step)}

    def coverage(self, rows: range, columns: range) -> Tile:
        queries, keys = self.queries[rows.start : rows.stop], self.keys[columns.start : columns.stop]
        return self.mask.tile(range(queries[0], queries[-1] + 1), range(keys[0], keys[-1] + 1))

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        (top, bottom), (left, right) = (
            (side.start + first * side.step, side.start + last * side.step)
            for side, first, last in ((self.queries, top, bottom), (self.keys, left, right))
        )
        return self.mask.verdict(top, bottom, left, right)


def is_strided(mask: Mask, query_len: int) -> bool:
    """Whether exactly one factor of the mask is strided, with enough queries per residue."""
    strided = [part for part in factors(mask) if isinstance(part, Strided)]
    return (
        len(strided) == 1
        and isinstance(strided[0].offset, int)
        and 1 < strided[0].step <= query_len // tuning.MIN_QUERIES_PER_RESIDUE
    )

"""The strips of a whole mask, with equal strips grouped into batches, and the cache of such plans by mask structure.

A mask that has neither a closed form nor a comparable structure is cut again in every pass, strip by strip, so that
nothing of size query_len x key_len is held.
"""

import ctypes
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.indexing import indices
from regard.kernels.hidden import MAX_KEPT_SCORES, Hidden
from regard.kernels.known import cached_by_mask
from regard.kernels.strips import tuning
from regard.kernels.strips.apart import Apart, one_by_one
from regard.kernels.strips.intervals import Interval
from regard.kernels.strips.plan import Kind, PlanOptions, Strip, cut, joined
from regard.kernels.strips.reordering import Reordering
from regard.kernels.strips.residues import cut_by_residue, is_strided
from regard.masks import Band, Mask, Tile
from regard.masks.planning import EVERY_DIAGONAL, Diagonals, by_batch, cells_on, diagonals_of
from regard.scores import Scoring
from regard.shapes import Grid


class StripPlan:
    """The strips of a bound mask, and what the mask hides in each.

    Attributes:
        masks: the mask of each batch index with separate strips; the key None if one mask holds for all.
        is_kept: whether strips, and masks that were evaluated to find them, are kept as long as the plan.
        orders: what the compiled library is told of calls, by their form, with the strips in it as it reads them.
        interval: the keys to which each query is limited besides, or None.
        reordering: how tokens are sorted, if strips and interval are of sorted ones: in the tensors they lie elsewhere.
        others: plans of the other keys that queries see; their results are merged.
        is_part: whether it is one of these, or has them.
        form: that of all calls which it is for, if they are alike; None if they are not, or it is not known.
        told: what the library is told of these, by how their tensors lie; None as well. Plans within other intervals
            have it in common.
    """

    interval: Interval | None = None
    reordering: Reordering | None = None
    others: tuple["StripPlan", ...] = ()
    is_part: bool = False
    form: Hashable | None = None
    told: dict[Hashable, Any] | None = None

    def __init__(self, mask: Mask, grid: Grid, by: PlanOptions) -> None:
        self.masks = by_batch(mask, grid)
        self._grid, self._by = grid, by
        self._hidden: dict[Strip, Hidden] = {}
        self._diagonals: dict[Strip, tuple[Diagonals | None, ...]] = {}
        self._kept = self._looked = 0
        self._strips: tuple[Strip, ...] | None = None
        self.orders: dict[Hashable, tuple[bytes, Any]] = {}
        self.is_kept = mask.closed_form or mask.structure() is not None
        if self.is_kept:
            self._strips = tuple(self._together() if by.together else self._cut())

    def within(self, interval: Interval | None) -> "StripPlan":
        """The same strips, in which each query is limited to an interval of keys."""
        if interval is self.interval:
            return self
        limited = copy(self)
        limited.interval, limited.hides = interval, True
        return limited

    def sorted_by(self, reordering: Reordering | None) -> "StripPlan":
        """The same strips, of tokens that lie elsewhere in the tensors."""
        if reordering is self.reordering:
            return self
        elsewhere = copy(self)
        elsewhere.reordering = reordering
        return elsewhere

    def in_order(self, scoring: Scoring) -> Scoring:
        """The scoring of a call, as it is for the tokens of the strips."""
        return scoring if self.reordering is None else self.reordering.of(scoring)

    def beside(self, others: Sequence["StripPlan"]) -> "StripPlan":
        """The same strips, and those of other plans for the other keys of their queries."""
        if not others:
            return self
        joined, *rest = (copy(plan) for plan in (self, *others))
        for plan in (joined, *rest):
            plan.merges = plan.is_part = True
        joined.others, joined.is_kept = tuple(rest), all(plan.is_kept for plan in (self, *others))
        return joined

    @property
    def parts(self) -> "tuple[StripPlan, ...]":
        """All plans whose results are merged, this one first."""
        return self, *self.others

    def of_form(self, form: Hashable | None) -> "StripPlan":
        """The same for calls of one form alone, which need not be asked for theirs."""
        alike = copy(self)
        alike.form, alike.told = form, None if form is None else {}
        return alike

    @property
    def strips(self) -> Iterable[Strip]:
        """All strips, in the order in which they must be computed."""
        return self._cut() if self._strips is None else self._strips

    @cached_property
    def hides(self) -> bool:
        """Whether anything may be hidden beyond torch's own causal form."""
        return self._strips is None or any(strip.kind is Kind.MASKED or not strip.keys for strip in self._strips)

    @cached_property
    def has_keys_for_all(self) -> bool:
        """Whether every query is known to be in a strip with keys."""
        return self._strips is not None and all(strip.keys for strip in self._strips)

    @property
    def only(self) -> Strip | None:
        """The strip, if there is exactly one."""
        return self._strips[0] if self._strips is not None and len(self._strips) == 1 else None

    @cached_property
    def apart(self) -> Apart | None:
        """The strips, if they are several that have neither queries nor keys in common, and every query sees a key."""
        strips = one_by_one(self._strips or (), (self._grid.query_len, self._grid.key_len))
        if strips is None or sum(strip.times for strip in strips) < 2:
            return None
        hidden = [self.hidden(strip) for strip in strips]
        return None if any(one is not None and one.queries is not None for one in hidden) else Apart(strips, hidden)

    @cached_property
    def merges(self) -> bool:
        """Whether a query may be in several strips, of this plan or one beside it, whose results are merged."""
        return self._strips is not None and any(strip.merges for strip in self._strips)

    def _cut(self) -> Iterator[Strip]:
        lengths = self._grid.query_len, self._grid.key_len
        kept = 0
        for batch_index, mask in self.masks.items():
            way = cut_by_residue if is_strided(mask, self._grid.query_len) else cut
            strips = way(mask, *lengths, batch_index, by=self._by)
            for strip in joined(strips) if self._by.joins else strips:
                if strip.allowed is not None and self.is_kept:
                    kept += strip.allowed.numel()
                yield strip if kept <= MAX_KEPT_SCORES else replace(strip, allowed=None)

    def _together(self) -> Iterator[Strip]:
        """The strips, with equal ones at equal distances joined into a batch of views.

        Keys that all of them see, such as a prefix, are copied beside those of each strip if they are few; many become
        a separate strip, whose result is merged. Alone, the keys of a strip can be read where they are by torch's
        operator and by MKL; beside others they are copied as well.
        """
        alike: dict[Hashable, list[Strip]] = {}
        for strip in self._cut():
            alike.setdefault(self._likeness(strip), []).append(strip)
        for strips in alike.values():
            of_one = max(len(strips[0].queries), len(strips[0].spans[-1])) * self._grid.heads
            most = max(1, tuning.MAX_KEYS_TOGETHER // max(1, of_one))
            while strips:
                first, times = strips[0], 1
                *shared, moving = first.spans
                step = strips[1].queries.start - first.queries.start if len(strips) > 1 else 0
                apart = step != len(first.queries)  # the queries in between see other keys
                copied = sum(map(len, shared if apart or self._by.copies else first.spans)) if shared else 0
                copied = 0 if self._by.in_place else copied
                merges = copied * tuning.SCORES_PER_COPIED_KEY > len(first.queries) * tuning.SCORES_PER_RESULT
                if merges and apart:
                    most = 1
                while (
                    times < min(most, len(strips))
                    and strips[times].queries.start - strips[times - 1].queries.start == step
                ):
                    times += 1
                if times == 1:
                    yield first
                else:
                    yield replace(first, spans=(moving,) if merges else first.spans, times=times, step=step)
                    if merges:
                        queries = range(first.queries.start, strips[times - 1].queries.stop)
                        yield Strip(first.batch_index, queries, tuple(shared), Kind.FULL, merges=True)
                strips = strips[times:]

    def _likeness(self, strip: Strip) -> Hashable:
        """A key that is equal for strips that may be batched."""
        *shared, moving = strip.spans
        grid, queries, mask = self._grid, strip.queries, self.masks[strip.batch_index]
        if not strip.keys or strip.merges or moving.step != queries.step:
            return strip
        if grid.batch > 1 and strip.batch_index is None and not self._by.in_place:
            return strip
        gaps = queries.step > 1
        if shared and (gaps or any(mask.tile(queries, span) is not Tile.FULL for span in shared)):
            return strip
        likeness = (
            strip.batch_index,
            len(queries),
            queries.step,
            tuple(shared),
            len(moving),
            moving.start - queries.start,
        )
        if strip.kind is not Kind.MASKED:
            return (*likeness, strip.kind)
        hides = mask if gaps else mask.restrict(queries, moving)
        if isinstance(hides, Tile):
            return (*likeness, hides)
        if not gaps and all(isinstance(part, Band) and isinstance(part.offset, int) for part in hides.leaves()):
            return (*likeness, hides.structure())  # a band looks the same relative to the queries
        self._looked += len(queries) * len(moving)
        if self._looked > MAX_KEPT_SCORES or grid.device.type != "cpu":
            return strip
        allowed = mask.allowed(indices(queries, grid.device), indices(moving, grid.device))
        return (*likeness, allowed.shape, _bytes(allowed))

    def diagonals(self, strip: Strip) -> tuple[Diagonals | None, ...]:
        """The diagonals that the queries of a strip see in each of its spans; None where only a mask tells."""
        if strip.kind is not Kind.MASKED:
            return ((None, 0) if strip.kind is Kind.CAUSAL else EVERY_DIAGONAL,) * len(strip.spans)
        if strip.allowed is not None:
            return (None,) * len(strip.spans)
        found = self._diagonals.get(strip)
        if found is None:
            mask = self.masks[strip.batch_index]
            found = tuple(diagonals_of(mask, strip.queries, span) for span in strip.spans)
            if self._strips is not None:
                self._diagonals[strip] = found
        return found

    def cells(self, lanes: int) -> float:
        """Cells that the compiled library computes, of all batch indices, for vectors of so many numbers."""
        batch = self._grid.batch
        cells = sum(
            self._cells_of(strip, span, seen or EVERY_DIAGONAL, lanes) * (batch if strip.batch_index is None else 1)
            for strip in self.strips
            for span, seen in zip(strip.spans, self.diagonals(strip), strict=True)
        )
        return cells if self.interval is None else cells * self.interval.share_computed()

    def _cells_of(self, strip: Strip, span: range, diagonals: Diagonals, lanes: int) -> float:
        """Those of a span of a strip; the mean of all batch indices, if there are several."""
        if self.interval is None:
            return strip.times * cells_on(diagonals, strip.queries, span, lanes)
        within = self.interval.of_batch(strip.batch_index)
        of_keys, cells = strip.step if span is strip.spans[-1] else 0, 0  # equal strips have all other keys in common
        for time in range(strip.times):
            rectangle = _moved(strip.queries, time * strip.step), _moved(span, time * of_keys)
            cells += within.cells_on(diagonals, *rectangle, lanes)
        return cells / len(within.first)

    def hidden(self, strip: Strip) -> Hidden | None:
        """What the mask hides in a strip; None for nothing, and for a causal square, which needs no mask."""
        if strip.kind is not Kind.MASKED:
            return None
        if strip.allowed is not None and strip not in self._hidden:
            hidden = Hidden(strip.allowed)
            if self._strips is None:
                return hidden
            self._hidden[strip] = hidden
        if strip not in self._hidden:
            with torch.inference_mode(False):
                return self._found(strip)
        return self._hidden[strip]

    def _found(self, strip: Strip) -> Hidden:
        keys = strip.spans[0] if len(strip.spans) == 1 else keys_of(strip, self._grid.device)
        allowed = self.masks[strip.batch_index].allowed(strip.queries, keys)
        last = None if allowed.is_meta else next(reversed(self._hidden.values()), None)
        if last is not None and last.allowed.shape == allowed.shape and torch.equal(last.allowed, allowed):
            hidden = last  # every strip of a band looks the same
        else:
            hidden = Hidden(allowed)
            self._kept += allowed.numel()
        if self._kept <= MAX_KEPT_SCORES:
            self._hidden[strip] = hidden
        return hidden


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by, part.step)


def keys_of(strip: Strip, device: torch.device) -> Tensor:
    """The indices of the strip's keys, its spans concatenated."""
    return torch.cat([indices(span, device) for span in strip.spans])


@cached_by_mask(maxsize=32)
def plan_strips(mask: Mask, grid: Grid, by: PlanOptions) -> StripPlan:
    """The strips of a bound mask."""
    return StripPlan(mask, grid, by)


def _bytes(allowed: Tensor) -> bytes:
    """The contents of a bool tensor, as a hashable key."""
    allowed = allowed.contiguous()
    return ctypes.string_at(allowed.data_ptr(), allowed.numel())

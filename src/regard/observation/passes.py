"""The passes that some statistics need: by the compiled kernel, or over tiles.

Over tiles it is one pass, if these give lse as well, or one for lse first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from regard.indexing import hull
from regard.observation import compiled, tuning
from regard.observation.lse import settled
from regard.observation.measures import Entropy
from regard.observation.observed import ObservedCall
from regard.observation.statistic import Statistic
from regard.observation.streaming import Progress, silent, stream
from regard.observation.tiling import TilePlan, plan_tiles, plan_whole_rows


def gather(
    call: ObservedCall, statistics: Sequence[Statistic[Any]], progress: Progress = silent, plan: TilePlan | None = None
) -> tuple[tuple[Any, ...], Tensor | None]:
    """The results of some statistics, and lse if it was needed.

    Args:
        plan: tiles that hold whole rows; None: the fastest tiles are determined here.
    """
    entropy = None
    needing = [statistic for statistic in statistics if statistic.needs_weights]
    if needing and plan is None and all(map(compiled.computes, needing)) and compiled.supports(call):
        return _with_kernel(call, statistics, progress)
    if needing and plan is None and not call.knows_lse:
        entropy_alone = all(type(statistic) is Entropy for statistic in needing)
        fused = entropy_alone and call.is_product
        plan = whole_rows_for(call, statistics, tuning.MAX_TILE_KEYS if fused else tuning.MAX_WHOLE_ROW_KEYS)
        if plan is None:
            call, entropy = settled(call, entropy_alone)
    lse = call.lse if plan is None else call.lse_of_empty
    known = replace(call, lse=lse)  # filled in by the pass, before statistics finish
    along = [entropy is not None and type(statistic) is Entropy for statistic in statistics]  # with lse
    asked = [statistic.begun(known) for statistic, came in zip(statistics, along, strict=True) if not came]
    if not asked:
        progress(call.grid.query_len, call.grid.query_len)
    elif plan is None:
        _over_tiles(call, asked, progress)
    else:
        stream(replace(call, lse=None), asked, plan, progress, lse)
    results = (statistic.finish() for statistic in asked)
    return tuple(entropy if came else next(results) for came in along), lse


def _with_kernel(
    call: ObservedCall, statistics: Sequence[Statistic[Any]], progress: Progress
) -> tuple[tuple[Any, ...], Tensor | None]:
    """The same, if the compiled kernel computes all statistics that need weights."""
    known = call if call.knows_lse else replace(call, lse=call.lse_of_empty)
    begun = [statistic.begun(known) for statistic in statistics]
    computed = [statistic for statistic in begun if compiled.computes(statistic)]
    left = [statistic for statistic in begun if not compiled.computes(statistic)]
    reports = [progress]
    if left:
        reports = [_part_of(progress, number, 2, call.grid.batch * call.grid.query_len) for number in range(2)]
    compiled.compute(known, computed, reports[0], knows_lse=call.knows_lse)
    if left:
        _over_tiles(known, left, reports[1])
    return tuple(statistic.finish() for statistic in begun), known.lse


def _part_of(progress: Progress, number: int, passes: int, length: int) -> Progress:
    """Reports the progress of one of several passes as a part of that of all."""
    return lambda done, all: progress(number * length + length * done // all, passes * length)


def _over_tiles(call: ObservedCall, statistics: Sequence[Statistic[Any]], progress: Progress) -> None:
    """Passes the tiles to statistics that have started."""
    areas = [statistic.area() for statistic in statistics]
    others = [other for statistic in statistics for other in statistic.others()]
    queries, keys = (hull([area[axis] for area in areas]) for axis in (0, 1))
    stream(call, statistics, plan_tiles(call, queries, keys, others, strips=_take_strips(statistics)), progress)


def whole_rows_for(call: ObservedCall, statistics: Sequence[Statistic[Any]], max_keys: int) -> TilePlan | None:
    """Tiles of at most `max_keys` keys that give lse as well; None if gradients are recorded, other calls are involved,
    or it would be slower."""
    if call.wants_grad or any(statistic.others() for statistic in statistics):
        return None
    return plan_whole_rows(call, max_keys, _take_strips(statistics))


def _take_strips(statistics: Sequence[Statistic[Any]]) -> bool:
    return all(statistic.takes_strips for statistic in statistics)

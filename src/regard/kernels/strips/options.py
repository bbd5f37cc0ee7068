"""How to cut the strips of a call, given the engine that computes them."""

from regard.biases import Given
from regard.kernels.call import Call
from regard.kernels.strips import engine, tuning
from regard.kernels.strips.added import is_by_distance
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import PlanOptions
from regard.numerics import upcast


def plan_of(call: Call) -> StripPlan:
    """The strips of a call."""
    return plan_strips(call.scoring.mask_or_everything, call.scoring.grid, options(call))


def is_given(call: Call) -> bool:
    """Whether the numbers added to scores are read where they are: one tensor, a bias or a mask, and no other."""
    bias, mask = call.scoring.bias, call.scoring.mask_or_everything
    if bias is None:
        return not mask.closed_form
    return isinstance(bias, Given) and mask.closed_form and bias.numbers.dtype == upcast(call.query[:0]).dtype


def options(call: Call) -> PlanOptions:
    """The options for a call."""
    scoring, grid = call.scoring, call.scoring.grid
    heads = max(1, grid.batch * grid.heads)
    flash = engine.flash_can(call.query, scoring, call.dropout)
    by_distance = flash and is_by_distance(scoring)
    closed_form = scoring.mask_or_everything.closed_form
    if (scoring.bias is not None and not by_distance) or not closed_form:  # numbers are held for every score
        at_a_time = tuning.MAX_TILE_SCORES // (heads * max(1, grid.key_len))
        high = min(max(at_a_time, tuning.MIN_STRIP_QUERIES // 4), tuning.MAX_STRIP_QUERIES)
        return PlanOptions(high, causal=False, joins=is_given(call))
    if call.dropout is not None:  # which weights are dropped is asked strip by strip
        by_itself = tuning.SCORES_PER_STRIP_OF_PRODUCTS / heads
        return PlanOptions(tuning.MAX_STRIP_QUERIES, tuning.SHORT_STRIP_QUERIES, by_itself)
    full = not flash or call.query.dtype == upcast(call.query[:0]).dtype or call.wants_lse
    short = tuning.SHORT_STRIP_QUERIES if full else tuning.SHORT_STRIP_QUERIES_IN_HALF_PRECISION
    by_itself = tuning.SCORES_PER_CALL / heads
    return PlanOptions(tuning.MAX_STRIP_QUERIES, short, by_itself, together=True, causal=not by_distance)

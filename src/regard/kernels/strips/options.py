"""How to cut the strips of a call, given the engine that computes them."""

from regard.kernels.call import Call
from regard.kernels.strips import engine, tuning
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import PlanOptions
from regard.numerics import upcast


def plan_of(call: Call) -> StripPlan:
    """The strips of a call."""
    return plan_strips(call.scoring.mask_or_everything, call.scoring.grid, options(call))


def options(call: Call) -> PlanOptions:
    """The options for a call."""
    scoring, grid = call.scoring, call.scoring.grid
    heads = max(1, grid.batch * grid.heads)
    if scoring.bias is not None or not scoring.mask_or_everything.closed_form:  # one number per score is held
        at_a_time = tuning.MAX_TILE_SCORES // (heads * max(1, grid.key_len))
        high = min(max(at_a_time, tuning.MIN_STRIP_QUERIES // 4), tuning.MAX_STRIP_QUERIES)
        return PlanOptions(high, causal=False)
    if not engine.flash_can(call.query, scoring, call.dropout):
        # rows are computed a few at a time anyway; dropout is evaluated for each strip, not for a batch of strips
        return PlanOptions(tuning.MAX_STRIP_QUERIES, short=tuning.SHORT_STRIP_QUERIES, together=call.dropout is None)
    full = call.query.dtype == upcast(call.query[:0]).dtype or call.wants_lse
    short = tuning.SHORT_STRIP_QUERIES if full else tuning.SHORT_STRIP_QUERIES_IN_HALF_PRECISION
    return PlanOptions(tuning.MAX_STRIP_QUERIES, short, scores_per_call=tuning.SCORES_PER_CALL / heads, together=True)

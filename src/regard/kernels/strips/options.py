"""How to cut the strips of a call, given the engine that computes them, and what they cost."""

from regard.biases import Given
from regard.kernels import fused
from regard.kernels.call import Call
from regard.kernels.strips import engine, products, tuning
from regard.kernels.strips.added import is_by_distance
from regard.kernels.strips.grouping import StripPlan, plan_strips
from regard.kernels.strips.plan import Kind, PlanOptions, Strip
from regard.numerics import wide


def plan_of(call: Call) -> StripPlan:
    """The strips of a call."""
    return plan_strips(call.scoring.mask_or_everything, call.scoring.grid, options(call))


def num_scores(strip: Strip, call: Call) -> int:
    """Scores that its engine computes for a strip of a call, over batch and heads."""
    grid, of_one = call.scoring.grid, len(strip.queries) * strip.keys
    if strip.kind is Kind.CAUSAL:
        flash = engine.flash_can(call.query, call.scoring, call.dropout)
        by_products = not flash or engine.products_pay(strip, call.query, call.key)
        group = grid.heads // call.key.shape[1]
        by_torch = fused.causal_scores(strip.keys, strip.keys)
        of_one = products.scores_of_square(strip.keys, group, call.query.dtype) if by_products else by_torch
    return of_one * strip.times * grid.heads * (grid.batch if strip.batch_index is None else 1)


def cost(call: Call, by: PlanOptions | None = None) -> float:
    """The scores of a dense call, over batch and heads, that takes as long as its strips.

    More than the mask allows: strips hold hidden scores too, short ones make smaller products, and each call of torch's
    operator takes some time by itself.

    Args:
        by: what they cost; None: the options by which they are cut.
    """
    grid, by = call.scoring.grid, by or options(call)
    heads = grid.batch * grid.heads
    of_strips = (
        by.cost(len(strip.queries), num_scores(strip, call) / len(strip.queries) / heads, copied=len(strip.spans) > 1)
        for strip in plan_of(call).strips
        if strip.keys and strip.queries
    )
    return heads * sum(of_strips)


def is_given(call: Call) -> bool:
    """Whether the numbers added to scores are read where they are: one tensor, a bias or a mask, and no other."""
    bias, mask = call.scoring.bias, call.scoring.mask_or_everything
    if bias is None:
        return not mask.closed_form
    return isinstance(bias, Given) and mask.closed_form and bias.numbers.dtype == wide(call.query.dtype)


def options(call: Call) -> PlanOptions:
    """The options for a call."""
    scoring, grid = call.scoring, call.scoring.grid
    heads = max(1, grid.batch * grid.heads)
    flash = engine.flash_can(call.query, scoring, call.dropout)
    by_distance = flash and is_by_distance(scoring)
    in_full = not flash or call.query.dtype == wide(call.query.dtype) or call.wants_lse
    short = tuning.SHORT_STRIP_QUERIES if in_full else tuning.SHORT_STRIP_QUERIES_IN_HALF_PRECISION
    if products.by_onednn(call.query.dtype):
        short = tuning.SHORT_STRIP_QUERIES_BY_ONEDNN
    holds = (scoring.bias is not None and not by_distance) or not scoring.mask_or_everything.closed_form
    if not holds and call.dropout is None:
        of_call = tuning.SCORES_PER_CALL / heads
        return PlanOptions(short, of_call, together=True, causal=not by_distance)
    by_itself = tuning.SCORES_PER_STRIP / heads
    if not holds:  # which weights are dropped is asked strip by strip
        return PlanOptions(short, by_itself)
    most_scores = tuning.MAX_TILE_SCORES // heads
    return PlanOptions(short, by_itself, causal=False, most_scores=most_scores, joins=is_given(call))

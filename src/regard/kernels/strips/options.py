"""How to cut the strips of a call, given the engine that computes them, and what they cost."""

import math

import torch

from regard import faint
from regard.biases import Given
from regard.kernels import fused
from regard.kernels.call import Call, all_scores
from regard.kernels.strips import engine, products, tuning
from regard.kernels.strips.added import is_by_distance
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.plan import Kind, PlanOptions, Strip
from regard.kernels.strips.unions import plan_union
from regard.matmul import onednn_beats_fused, onednn_is_faster
from regard.numerics import wide


def plan_of(call: Call) -> StripPlan:
    """The strips of a call."""
    return plan_union(call.scoring.mask_or_everything, call.scoring.grid, options(call))


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
    heads, plans = grid.batch * grid.heads, plan_of(call).parts
    of_strips = (
        by.cost(len(strip.queries), num_scores(strip, call) / len(strip.queries) / heads, copied=len(strip.spans) > 1)
        for plan in plans
        for strip in plan.strips
        if strip.keys and strip.queries
    )
    merged = grid.query_len * (len(plans) - 1) * tuning.SCORES_PER_RESULT
    return heads * (sum(of_strips) + merged)


def one_by_one(call: Call) -> int:
    """How many strips take time each before they begin; none where they lie apart, and torch's operator is all."""
    scoring, plan = call.scoring, plan_of(call)
    by_flash = engine.flash_can(call.query, scoring, call.dropout)
    if by_flash and engine.apart_in(plan, scoring, call.query, call.key, backward=call.learns) is not None:
        return 0
    return sum(1 for part in plan.parts for strip in part.strips if strip.keys)


def is_given(call: Call) -> bool:
    """Whether the numbers added to scores are read where they are: one tensor, a bias or a mask, and no other."""
    bias, mask = call.scoring.bias, call.scoring.mask_or_everything
    if bias is None:
        return not mask.closed_form
    return isinstance(bias, Given) and mask.closed_form and bias.numbers.dtype == wide(call.query.dtype)


def options(call: Call) -> PlanOptions:
    """The options for a call."""
    scoring, grid = call.scoring, call.scoring.grid
    heads, dtype = max(1, grid.batch * grid.heads), call.query.dtype
    flash = engine.flash_can(call.query, scoring, call.dropout)
    by_distance = flash and is_by_distance(scoring)
    in_full = not flash or dtype == wide(dtype) or call.wants_lse
    short = tuning.SHORT_STRIP_QUERIES_THAT_LEARN if call.learns or not flash else tuning.SHORT_STRIP_QUERIES
    short = short if in_full else tuning.SHORT_STRIP_QUERIES_IN_HALF_PRECISION
    if onednn_is_faster(dtype):
        short = tuning.SHORT_STRIP_QUERIES_BY_ONEDNN
    speed = fused.speed(dtype)
    holds = (scoring.bias is not None and not by_distance) or not scoring.mask_or_everything.closed_form
    if not holds and not scores_of_faint(call):
        copies = onednn_beats_fused(dtype) if flash else onednn_is_faster(dtype)
        in_turn = call.learns and not flash  # plain products, for the gradients of keys
        of_call = (tuning.SCORES_PER_STRIP if in_turn else tuning.SCORES_PER_CALL) / heads
        return PlanOptions(short, of_call, speed, together=True, copies=copies, causal=not by_distance)
    by_itself = tuning.SCORES_PER_STRIP / heads
    if not holds:  # strips of plain products take time each
        return PlanOptions(short, by_itself, speed, causal=not by_distance)
    most_scores = tuning.MAX_TILE_SCORES // heads
    return PlanOptions(short, by_itself, speed, causal=False, most_scores=most_scores, joins=is_given(call))


def scores_of_faint(call: Call) -> float:
    """The scores computed in the time that torch's operator takes for weights too faint to matter, for the gradients;
    judged from what is added for four queries."""
    scoring, grid = call.scoring, call.scoring.grid
    if scoring.bias is None or not (call.learns and call.concrete and all(grid[:4])):
        return 0.0
    if not (engine.flash_can(call.query, scoring, call.dropout) and faint.are_slow(call.query)):
        return 0.0
    step = -(-grid.query_len // 4)
    queries, keys = range(step // 2, grid.query_len, step), range(grid.key_len)
    biases = scoring.biases(queries, keys, torch.float32).detach()
    if not faint.spread(biases):
        return 0.0
    allowed = scoring.allowed(queries, keys, biases)
    biases = biases if allowed is None else biases.masked_fill(~allowed, -math.inf)
    return faint.price() * faint.share(biases) * all_scores(call)

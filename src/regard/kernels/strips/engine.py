"""Forward and backward pass over all strips of a call: each by torch's fused operator or by plain products.

The gradients of the strips add up exactly, because the backward pass of every strip uses the output and log-sum-exp of
the whole row (Dao et al. 2022, appendix B.4). A sink changes only these two: it acts like a key with value 0.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import faint
from regard.dropout import Dropout
from regard.graphs import concrete, transformed
from regard.kernels import fused
from regard.kernels.hidden import Hidden, harmless, has_nan
from regard.kernels.strips import products
from regard.kernels.strips.added import Added
from regard.kernels.strips.apart import Apart
from regard.kernels.strips.dropped import Dropped
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.pieces import Space
from regard.kernels.strips.plan import Kind, Strip
from regard.kernels.strips.view import StripView
from regard.matmul import onednn_beats_fused, onednn_is_faster
from regard.numerics import (
    add_sink,
    exp,
    finite_lse,
    merge,
    row_products,
    wide,
    zero_empty_queries,
    zero_unseen,
)
from regard.scores import Scoring


class Part(StripView):
    """One strip of a call: its tensors, bias and mask as numbers, and which queries and keys are fully masked.

    Its queries are computed from first to last, or turned: from last to first.
    """

    def __init__(self, strip: Strip, query: Tensor, added: Added, dropout: Dropout | None, careful: bool) -> None:
        super().__init__(strip)
        scoring = added.scoring
        self.added = added.of(strip)
        self._hidden: Hidden | None = None
        if careful and self.added.tiles:
            whole = self.added.whole()
            assert whole is not None
            self._hidden = Hidden(~whole.isneginf())
        self._turned = dropout is None and strip.kind is not Kind.CAUSAL and self.added.turn(query)
        self.formula = products.Formula(
            scale=scoring.scale,
            causal=strip.kind is Kind.CAUSAL,
            softcap=scoring.softcap,
            added=self.added,
            dropped=None if dropout is None else Dropped(dropout, scoring.grid, self),
            additive=scoring.additive,
        )

    def by_query(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-query tensor, in the order in which queries are computed."""
        return self.turned(self.of_query(tensor))

    def turned(self, part: Tensor) -> Tensor:
        """From the order of the call to that in which queries are computed, or back."""
        return part.flip(2) if self._turned else part

    def set_query(self, tensor: Tensor, part: Tensor) -> None:
        """Writes what was changed in a copy of the strip's queries back."""
        if self._turned:
            self.of_query(tensor).copy_(part.flip(2))

    def result_like(self, part: Tensor) -> Tensor:
        """What a result is written into that belongs there: the part itself, or new numbers."""
        return torch.empty_like(part) if self.strip.merges or self._turned else part

    def safe_query(self, tensor: Tensor) -> Tensor:
        """The strip's queries, likewise; fully masked ones are zeroed if they could affect anything."""
        query = self.of_query(tensor)
        return self.turned(query if self._hidden is None else zero_empty_queries(query, self._hidden.allowed))

    def safe_key(self, tensor: Tensor) -> Tensor:
        """The strip's keys or values; fully masked ones are zeroed, likewise."""
        key = self.of_key(tensor)
        return key if self._hidden is None else zero_unseen(key, self._hidden.allowed)

    def safe_spans(self, tensor: Tensor) -> list[Tensor]:
        """The same, span by span."""
        return self.spans_of_key(tensor) if self._hidden is None else [self.safe_key(tensor)]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scoring: Scoring,
    dropout: Dropout | None,
    plan: StripPlan,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (incomplete if it is not wanted)."""
    size = value.shape[3]
    by_flash = flash_can(query, scoring, dropout)
    if by_flash:
        width = max(query.shape[3], size)
        query, key, value = (_padded(t, width) for t in (query, key, value))
    added = Added(scoring, plan, query.dtype)
    needs_lse = wants_lse or sink is not None or plan.merges
    given = query, key, value, added, dropout, by_flash, needs_lse
    hides, inspects = plan.hides or added.hides, concrete(query.device)
    apart = apart_in(plan, scoring, query, key) if by_flash else None
    if apart is not None:
        output, lse = apart.attend(query, key, value, scoring.scale, needs_lse)
    else:
        output, lse = _attend(*given, careful=hides and not inspects)
    if hides and inspects and has_nan(output, lse if needs_lse else None):
        output, lse = _attend(*given, careful=True)
    if sink is not None:
        output, lse = add_sink(output, lse, sink, out=None if transformed() else output)
    return output[..., :size], lse


def _attend(
    query: Tensor, key: Tensor, value: Tensor, added: Added, dropout: Dropout | None, by_flash: bool, needs_lse: bool,
    *, careful: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp without the sink, each strip written or merged into its place."""
    plan = added.plan
    # a query that no strip has a key for gets zeros
    empty = query.new_empty if plan.has_keys_for_all else query.new_zeros
    output = empty(*query.shape[:3], value.shape[3])
    lse = torch.full(query.shape[:3], -math.inf, dtype=wide(query.dtype), device=query.device)
    space = Space()
    for strip in _not_empty(plan, query):
        part = Part(strip, query, added, dropout, careful)
        q, to_output, to_lse = part.safe_query(query), part.of_query(output), part.of_query(lse)
        if not by_flash or products_pay(strip, query, key):
            result, part_lse = part.result_like(to_output), part.result_like(to_lse)
            into_lse = part_lse if needs_lse else None
            k, v = part.safe_spans(key), part.safe_spans(value)
            products.attend(q, k, v, part.formula, space=space, output=result, lse=into_lse)
        else:
            result, part_lse = _flash(q, part.safe_key(key), part.safe_key(value), part)
        result, part_lse = part.turned(result), part.turned(part_lse)
        if strip.merges:
            merge(to_output, to_lse, result, part_lse)
        elif result is not to_output:
            to_output.copy_(result)
            if needs_lse:
                to_lse.copy_(part_lse)
    return output, lse


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scoring: Scoring,
    dropout: Dropout | None,
    plan: StripPlan,
    *learned: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    grads: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, sink and `learned`.

    Args:
        grads: what those of query, key and value are added to, of lse's dtype; None: zeros.
    """
    by_flash = flash_can(query, scoring, dropout) and not any(tensor.requires_grad for tensor in learned)
    grad_output = fused.whole_features(grad_output)  # one number, from a sum, is multiplied matrix by matrix
    finite = finite_lse(lse)
    widen = _for_flash(query, key, value, output, grad_output, grad_lse)
    added = Added(scoring, plan, query.dtype, learned)
    careful = (plan.hides or added.hides) and not harmless(query, key, value)
    apart = None
    if by_flash and not careful and grads is None:
        apart = apart_in(plan, scoring, query, key, backward=True)
    if apart is not None:
        grad, q, k, v, out = widen()
        found = apart.gradients(grad, q, k, v, out, finite, scale=scoring.scale)
        three = (grad[..., : t.shape[3]] for grad, t in zip(found, (query, key, value), strict=True))
        grad_sink = None if sink is None else gradient_of_sink(sink, lse, _delta(output, grad_output, grad_lse))
        return (*three, grad_sink, *(None for _ in learned))
    delta = _delta(output, grad_output, grad_lse)
    # a row that lies in one strip does not need the output, which was rounded to half precision
    whole_rows = not by_flash and not plan.merges and query.dtype != lse.dtype
    less_lse = torch.zeros_like(lse) if grad_lse is None else -grad_lse
    # gradients of shared keys accumulate in float32, whatever the call's dtype
    if grads is None:
        grads = [torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in (query, key, value)]
    space = Space()
    for strip in _not_empty(plan, query):
        part = Part(strip, query, added, dropout, careful)
        if not by_flash or _is_faint(part, query) or products_learn(strip, query, key):
            # MKL adds to the gradients of keys in place, strip by strip; oneDNN is faster with one stack of all strips
            in_place = strip.overlaps and not onednn_is_faster(query.dtype)
            alone = len(strip.spans) == 1 and (in_place or not strip.overlaps)  # no copy, no number in it twice
            of_query = part.by_query(grads[0])
            to_key, to_value = (
                part.of_key(total)
                if alone
                else total.new_zeros(len(of_query), total.shape[1], strip.keys, total.shape[3])
                for total in grads[1:]
            )
            products.gradients(
                part.by_query(grad_output),
                part.safe_query(query),
                part.safe_spans(key),
                part.safe_spans(value),
                part.formula,
                space=space,
                lse=part.by_query(finite),
                delta=part.by_query(less_lse if whole_rows else delta),
                whole_rows=whole_rows,
                apart=in_place,
                grads=(of_query, to_key, to_value),
            )
            part.set_query(grads[0], of_query)
            part.added.finish()
            if not alone:
                part.add_to_key(grads[1], to_key)
                part.add_to_key(grads[2], to_value)
            continue
        grad, q, k, v, out = widen()
        of_query, of_key, of_value = fused.flash_backward(
            part.by_query(grad),
            part.safe_query(q),
            part.safe_key(k),
            part.safe_key(v),
            part.by_query(out),
            part.by_query(finite),
            scale=scoring.scale,
            is_causal=strip.kind is Kind.CAUSAL,
            attn_mask=None if strip.kind is Kind.CAUSAL else part.added.whole(),
        )
        part.of_query(grads[0]).add_(part.turned(of_query[..., : query.shape[3]]))
        part.add_to_key(grads[1], of_key[..., : key.shape[3]])
        part.add_to_key(grads[2], of_value[..., : value.shape[3]])
    grad_sink = None if sink is None else gradient_of_sink(sink, lse, delta)
    of_learned = iter(added.finish())
    return (
        *(grad.to(query.dtype) for grad in grads),
        grad_sink,
        *(next(of_learned).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned),
    )


def _delta(output: Tensor, grad_output: Tensor, grad_lse: Tensor | None) -> Tensor:
    """sum(output doutput) - dlse of each query."""
    delta = row_products(grad_output, output)
    return delta if grad_lse is None else delta.sub_(grad_lse)


def gradient_of_sink(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of a sink [heads], from the lse of whole rows, the sink included, and delta as in `products`."""
    return -(exp(sink.to(lse.dtype)[:, None] - finite_lse(lse)) * delta).sum((0, 2)).to(sink.dtype)


def flash_can(query: Tensor, scoring: Scoring, dropout: Dropout | None) -> bool:
    """Whether torch's operator supports the call, on this device."""
    plain = dropout is None and scoring.softcap is None and scoring.additive is None
    return plain and fused.FLASH and query.device.type == "cpu"


def _not_empty(plan: StripPlan, query: Tensor) -> Iterator[Strip]:
    """The strips that have anything to compute."""
    return (strip for strip in plan.strips if strip.keys and all(query.shape[:3]))


def apart_in(plan: StripPlan, scoring: Scoring, query: Tensor, key: Tensor, *, backward: bool = False) -> Apart | None:
    """The strips, if they lie apart, nothing but a mask is added, and most of their scores are those of torch's
    operator."""
    if scoring.bias is not None or transformed() or not query.numel():
        return None

    def pays() -> bool:
        scores, by_products = {True: 0, False: 0}, products_learn if backward else products_pay
        for strip in plan.strips:
            scores[by_products(strip, query, key)] += len(strip.queries) * strip.keys * strip.times
        return scores[True] < scores[False]

    call = query.dtype, query.shape[1], key.shape[1], backward, onednn_beats_fused(query.dtype)
    return plan.apart if plan.apart is not None and plan.apart.pays(call, pays) else None


def products_pay(strip: Strip, query: Tensor, key: Tensor, *, backward: bool = False) -> bool:
    """Whether plain products are faster for a strip than torch's operator."""
    heads, times = key.shape[1], strip.times
    stack = heads * (query.shape[0] if strip.batch_index is None else 1)
    if times > 1:  # heads and strips form one axis if the strips are all that there is, else either of them
        whole = onednn_beats_fused(query.dtype) and strip.step * times == query.shape[2] == key.shape[2]
        stack = heads * times if whole else max(heads, times)
    rows = len(strip.queries) * (query.shape[1] // heads)
    causal = strip.kind is Kind.CAUSAL
    return products.pay(query.dtype, stack, rows, strip.keys, causal=causal, backward=backward)


def products_learn(strip: Strip, query: Tensor, key: Tensor) -> bool:
    """The same for the gradients, which torch's operator may compute of float32 copies (its own function does not)."""
    few = strip.keys < fused.SHORT and not onednn_beats_fused(query.dtype)
    in_full = few and fused.learns_in_full(query.dtype, len(strip.queries), strip.keys)
    return not in_full and products_pay(strip, query, key, backward=True)


def _is_faint(part: Part, query: Tensor) -> bool:
    """Whether torch's operator would multiply many weights that are too faint to matter, for the gradients; for the
    output it takes them as 0."""
    return faint.are_slow(query) and part.formula.spreads()


# --- torch's operator -------------------------------------------------------------------------------------------------


def _flash(query: Tensor, key: Tensor, value: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """A strip by torch's operator."""
    scale = part.formula.scale
    if part.strip.kind is Kind.CAUSAL:
        return fused.flash(query, key, value, scale=scale, is_causal=True)
    numbers = part.added.whole()
    output, lse = fused.flash(query, key, value, scale=scale, attn_mask=numbers)
    if numbers is not None and part.added.may_hide_all:
        nothing = lse == 0.0  # the operator's lse of a fully masked query, and by coincidence of others
        if bool(nothing.any()):
            empty = (numbers.amax(-1) == -math.inf).expand(lse.shape)
            output, lse = output.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -math.inf)
    return output, lse


def _padded(tensor: Tensor, width: int) -> Tensor:
    """Padded with zeros to `width` features and with contiguous features, as torch's operator needs it."""
    if tensor.shape[3] < width:
        return F.pad(tensor, (0, width - tensor.shape[3]))
    return fused.whole_features(tensor)


def _for_flash(query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad_output: Tensor, grad_lse: Tensor | None):  # type: ignore[no-untyped-def]
    """Gradient, query, key, value and output in the form that the backward operator needs, built on first use."""

    @cache
    def widen() -> tuple[Tensor, ...]:
        width = max(query.shape[3], value.shape[3])
        five = tuple(_padded(tensor, width) for tensor in (grad_output, query, key, value, output))
        if grad_lse is None:
            return five
        # torch's operator takes no delta: dlse is passed as one more feature, with value 0 and gradient 1
        grad, *three, out = five
        out = torch.cat([out, -grad_lse.to(out.dtype)[..., None]], dim=-1)
        grad = torch.cat([grad, torch.ones_like(grad[..., :1])], dim=-1)
        return (grad, *(_padded(tensor, width + 1) for tensor in three), out)

    return widen

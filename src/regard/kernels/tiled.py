"""Any mask at the price of the work it contains: a plan of dense calls on PyTorch's own fused operator.

A mask is cut into *strips* (`regard.kernels.strips`). A strip is one dense attention call over its spans laid end to
end; where the mask allows all of it, without a mask, and where it does not, with a small one. Nothing of size
query_len x key_len exists, not while planning either.

A strip is computed by one of two engines:

    fused    torch's flash attention for the CPU, forward and backward; it also returns the log-sum-exp. Where rows are
             so short that it does not pay, plain products (`regard.kernels.products`)
    written  the definition itself (`Scoring.tile`), a few rows at a time, and computed again in the backward pass: for
             softcap, additive similarity, dropout, a bias that learns, and devices without that operator

The gradients of strips add up exactly, because every strip's backward pass uses the row's own output and log-sum-exp
(Dao et al. 2022, appendix B.4). With p = exp(s - lse) and m the dropout mask over 1 - dropout,

    ds = p (m dp - sum(dout * out) + dlse),    dv = (m p)^T dout

A sink changes only out and lse; it is a place with value 0. A gradient of a gradient is left to the reference.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from regard.biases import Given
from regard.dropout import Dropout
from regard.graphs import exporting, tracing
from regard.kernels import dense, products, strips
from regard.kernels.call import Call, Kernel
from regard.kernels.products import attend, gradients
from regard.kernels.strips import Cut, Cutting, Strip, cut_for, places
from regard.masks import EVERYTHING
from regard.numerics import LOG2_E, exp, grouped_matmul, upcast
from regard.reference import reference
from regard.rules import spell, unspell
from regard.scores import Scoring
from regard.shapes import Grid

CALL = 1 << 13
"""Scores of one head that torch's operator computes in the time that it takes to call it."""

HALVED = 2048
"""Length from which a causal square is worth halving where its heads do not share out evenly among threads. (Not in
half precision, where merging would round twice.)"""

UNEVEN = 1.1
"""How much more than the mean the busiest thread has to do, from which on it is worth it."""

WRITTEN = 1 << 22
"""Scores that the written engine likes to hold at a time: what fits into a processor's last cache."""


def cut_of(call: Call) -> Cut:
    """A call's mask, cut."""
    return cut_for(call.scoring.mask_or_everything, call.scoring.grid, cutting(call))


def cutting(call: Call) -> Cutting:
    """How to cut a call."""
    grid = call.scoring.grid
    heads = max(1, grid.batch * grid.heads)
    if not fusable(call) or call.scoring.bias is not None:  # numbers are held for every score, of every head
        few = WRITTEN // (heads * max(1, grid.key_len))
        return Cutting(min(max(few, strips.ALONE // 4), strips.ROWS), None, squares=False)
    full = call.query.dtype == upcast(call.query[:0]).dtype or call.wants_lse
    return Cutting(strips.ROWS, 3.0 if full else 16.0, CALL / heads, together=True)


class Part:
    """One strip of a call: its piece of query, key and value, and what is hidden in it."""

    def __init__(self, strip: Strip, scoring: Scoring, found: Cut) -> None:
        self.strip = strip
        self.rows = slice(None) if strip.row is None else slice(strip.row, strip.row + 1)
        self.queries = slice(strip.queries.start, strip.queries.stop, strip.queries.step)
        if strip.row is not None:
            grid = scoring.grid._replace(batch=1)
            bias = None if scoring.bias is None else scoring.bias.for_batch(strip.row).bind(grid)
            scoring = replace(scoring, grid=grid, mask=found.masks[strip.row], bias=bias)
        self.scoring = replace(scoring, mask=None) if strip.full else scoring
        self.hidden = found.hidden(strip, self.scoring)

    @property
    def is_square(self) -> bool:
        """Whether torch's causal form does all that has to be hidden."""
        return self.hidden is None and self.strip.causal

    def of_query(self, tensor: Tensor) -> Tensor:
        """The strip's queries, or what is there one per query."""
        tensor = tensor[self.rows]
        return self._views(tensor, self.strip.queries) if self.strip.times > 1 else tensor[:, :, self.queries]

    def of_key(self, tensor: Tensor) -> Tensor:
        """The strip's keys or values, its spans end to end."""
        tensor = tensor[self.rows]
        if self.strip.times > 1:
            return self._views(tensor, self.strip.spans[0])
        pieces = [tensor[:, :, span.start : span.stop : span.step] for span in self.strip.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _views(self, tensor: Tensor, first: range) -> Tensor:
        """Strips that are alike as a batch, without a copy: [times, heads, length, ...]; their keys may overlap."""
        start = tensor[0, :, first.start :]
        heads, place, *rest = start.stride()
        return start.as_strided(
            (self.strip.times, len(start), len(first), *start.shape[2:]),
            (self.strip.step * place, heads, first.step * place, *rest),
        )

    def add_to_key(self, total: Tensor, part: Tensor) -> None:
        """Adds what is there one per key to the whole."""
        total = total[self.rows]
        if self.strip.times > 1:
            views = self._views(total, self.strip.spans[0])
            if not self.strip.overlaps:
                views.add_(part)
            else:
                for view, one in zip(views, part, strict=True):
                    view += one
            return
        start = 0
        for span in self.strip.spans:
            total[:, :, span.start : span.stop : span.step] += part[:, :, start : start + len(span)]
            start += len(span)

    def seeing(self, query: Tensor) -> Tensor:
        """Queries with zeros where they see nothing, so that NaN there reaches nothing."""
        return query if self.hidden is None else self.hidden.seeing(query)

    def seen(self, key: Tensor) -> Tensor:
        """Keys or values with zeros where nobody sees them; themselves, not a copy, where what is there is harmless."""
        return key if self.hidden is None else self.hidden.seen(key)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """The strip's scores, by the definition."""
        keys = places(self.strip, self.scoring)
        return self.scoring.tile(self.seeing(query), self.seen(key), self.strip.queries, keys)

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """The strip's mask and bias as numbers to add, which is what torch takes."""
        if self.scoring.bias is None:
            return None if self.hidden is None else self.hidden.numbers(dtype)
        numbers = self.scoring.biases(self.strip.queries, places(self.strip, self.scoring), dtype)
        if self.hidden is not None:
            numbers = numbers.masked_fill(~self.hidden.allowed, -math.inf)
        return numbers.expand(*numbers.shape[:2], len(self.strip.queries), self.strip.keys)

    def kept(self, dropout: Dropout, weights: Tensor) -> Tensor:
        """1 where dropout keeps a weight, 0 where it drops it."""
        dropout = replace(dropout, first=self.strip.row or 0)
        keys = places(self.strip, self.scoring)
        return dropout.keep(self.scoring.grid, self.strip.queries, keys, dtype=weights.dtype)


class Fused:
    """All strips by torch's flash attention for the CPU, with its own backward pass."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: None,
        found: Cut,
        *learned: Tensor,
        wants_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        size = value.shape[3]
        width = max(query.shape[3], size)
        query, key, value = (_padded(t, width) for t in (query, key, value))
        output = query.new_empty(*query.shape[:3], width)
        if not all(strip.keys for strip in found.strips):  # their queries stay as they are
            output.zero_()
        lse = torch.full(query.shape[:3], -math.inf, dtype=upcast(query[:0]).dtype)
        needs_lse = wants_lse or sink is not None or any(strip.joins for strip in found.strips)
        for part in _parts(found, query, scoring):
            three = part.seeing(part.of_query(query)), part.seen(part.of_key(key)), part.seen(part.of_key(value))
            to_output, to_lse = part.of_query(output), part.of_query(lse)
            if _suits_products(part.strip, query, key, part.is_square):
                result, part_lse = to_output, to_lse
                if part.strip.joins:
                    result, part_lse = torch.empty_like(to_output), torch.empty_like(to_lse)
                attend(
                    *three,
                    part.added(lse.dtype),
                    scale=scoring.scale,
                    causal=part.is_square,
                    output=result,
                    lse=part_lse if needs_lse else None,
                )
            elif part.is_square:
                result, part_lse = _square(*three, scoring.scale)
            else:
                mask = part.added(query.dtype)
                result, part_lse = _flash(*three, 0.0, False, attn_mask=mask, scale=scoring.scale)
            if part.strip.joins:
                _join(to_output, to_lse, result, part_lse)
            elif result is not to_output:
                to_output.copy_(result)
                to_lse.copy_(part_lse)
            if part.hidden is not None and part.hidden.queries is not None:
                to_output.masked_fill_(~part.hidden.queries[..., None], 0.0)
                to_lse.masked_fill_(~part.hidden.queries, -math.inf)
        if sink is not None:
            output, lse = with_sink(output, lse, sink)
        return output[..., :size], lse

    @staticmethod
    def gradients(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: None,
        found: Cut,
        *learned: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        sizes = query.shape[3], key.shape[3], value.shape[3]
        width = max(sizes)
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # exp(-inf - 0) is the 0 that an empty row needs
        delta = (upcast(grad_output) * upcast(output)).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse

        @cache
        def as_torch_wants_them() -> tuple[Tensor, ...]:
            five = tuple(_padded(tensor, width) for tensor in (query, key, value, output, grad_output))
            if grad_lse is None:
                return five
            # torch's operator knows no delta: dlse enters as one more feature, with value 0 and gradient 1
            *three, out, grad = five
            out = torch.cat([out, -grad_lse.to(out.dtype)[..., None]], dim=-1)
            grad = torch.cat([grad, torch.ones_like(grad[..., :1])], dim=-1)
            return (*(_padded(tensor, width + 1) for tensor in three), out, grad)

        # strips that share keys add up in float32, whatever the call's dtype
        grads = [torch.zeros(t.shape, dtype=upcast(t[:0]).dtype) for t in (query, key, value)]
        for part in _parts(found, query, scoring):
            if _suits_products(part.strip, query, key, part.is_square, backward=True):
                alone = len(part.strip.spans) == 1  # and not a copy of several spans
                to_key, to_value = (part.of_key(t) if alone else torch.zeros_like(part.of_key(t)) for t in grads[1:])
                gradients(
                    part.of_query(grad_output),
                    part.seeing(part.of_query(query)),
                    part.seen(part.of_key(key)),
                    part.seen(part.of_key(value)),
                    part.added(lse.dtype),
                    lse=part.of_query(finite),
                    delta=part.of_query(delta),
                    scale=scoring.scale,
                    causal=part.is_square,
                    grads=(part.of_query(grads[0]), to_key, to_value),
                    overlap=part.strip.overlaps,
                )
                if not alone:
                    part.add_to_key(grads[1], to_key)
                    part.add_to_key(grads[2], to_value)
                continue
            q, k, v, out, grad = as_torch_wants_them()
            of_query, of_key, of_value = _flash_backward(
                part.of_query(grad),
                part.seeing(part.of_query(q)),
                part.seen(part.of_key(k)),
                part.seen(part.of_key(v)),
                part.of_query(out),
                part.of_query(finite),
                0.0,
                part.is_square,
                attn_mask=part.added(q.dtype),
                scale=scoring.scale,
            )
            part.of_query(grads[0]).add_(of_query[..., : sizes[0]])
            part.add_to_key(grads[1], of_key[..., : sizes[1]])
            part.add_to_key(grads[2], of_value[..., : sizes[2]])
        grad_sink = None
        if sink is not None:
            grad_sink = -(exp(sink.to(lse.dtype)[:, None] - finite) * delta).sum((0, 2)).to(sink.dtype)
        return (*(grad.to(query.dtype) for grad in grads), grad_sink)


def with_sink(output: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """What a sink makes of a result: one more place in the sum, with value 0."""
    whole = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    share = exp(lse - whole.masked_fill(whole == -math.inf, 0.0))
    return output * share[..., None].to(output.dtype), whole


def _flash(*arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """torch's flash attention for the CPU: output and log-sum-exp."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*arguments, **more)  # type: ignore[no-any-return]


def _flash_backward(*arguments: Any, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward pass: the gradients of query, key and value."""
    aten = torch.ops.aten
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, **more)  # type: ignore[no-any-return]


def _is_as_expected() -> bool:
    """Whether this torch has the operator, whose name is private and promises nothing, and it does what is relied on.

    Two queries that see one key each, forward and backward.
    """
    try:
        query, key = torch.eye(2).view(1, 1, 2, 2), torch.tensor([[[[3.0, 0.0], [0.0, 5.0]]]])
        mask = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
        output, lse = _flash(query, key, key, 0.0, False, attn_mask=mask, scale=2.0)
        grads = _flash_backward(output, query, key, key, output, lse, 0.0, False, attn_mask=mask, scale=2.0)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = (key, torch.tensor([[[6.0, 10.0]]]), 0 * query, 0 * key, output)
    return all(torch.allclose(one, other) for one, other in zip((output, lse, *grads), expected, strict=True))


FLASH = _is_as_expected()
"""Where this is false, everything runs on the written engine."""


def _square(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A causal square; in halves where torch would leave a thread idle.

    torch gives each thread equally many rows, one head after another, though the later rows of a head have more to do.
    Here the second half of the queries sees all of the first half of the keys, which is the same work for every row,
    and a square half as long; the two results are merged by lse.
    """
    length = query.shape[2]
    uneven = length >= HALVED and busiest(query.shape[0] * query.shape[1], torch.get_num_threads()) >= UNEVEN
    if not uneven or query.dtype != upcast(query[:0]).dtype:
        return _flash(query, key, value, 0.0, True, scale=scale)
    (query, later), (old_key, new_key), (old_value, new_value) = (
        t.split([length - length // 2, length // 2], dim=2) for t in (query, key, value)
    )
    first, first_lse = _square(query, old_key, old_value, scale)
    before, before_lse = _flash(later, old_key, old_value, 0.0, False, scale=scale)
    within, within_lse = _square(later, new_key, new_value, scale)
    _join(within, within_lse, before, before_lse)
    return torch.cat([first, within], dim=2), torch.cat([first_lse, within_lse], dim=2)


def _join(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Adds what the same queries found in other keys to output and log-sum-exp."""
    whole = torch.logaddexp(lse, more_lse)
    share = exp(more_lse - whole)[..., None]
    if output.dtype == share.dtype:
        output.lerp_(more, share)
    else:
        output.copy_(torch.lerp(output.to(share.dtype), more.to(share.dtype), share))
    lse.copy_(whole)


def busiest(heads: int, threads: int) -> float:
    """How much more than the mean the busiest thread has to do, if each takes equally many rows of causal squares.

    >>> busiest(1, 2), busiest(12, 2)
    (1.5, 1.0)
    """
    shares = [thread * heads / threads for thread in range(threads + 1)]
    done = [int(share) + (share - int(share)) ** 2 for share in shares]  # of a head's work, at the border of a share
    return max(after - before for before, after in pairwise(done)) * threads / heads


def _suits_products(strip: Strip, query: Tensor, key: Tensor, square: bool, *, backward: bool = False) -> bool:
    """Whether plain products take less time for a strip than torch's operator."""
    heads, times = key.shape[1], strip.times
    stack = heads * (query.shape[0] if strip.row is None else 1)
    if times > 1:  # either heads or strips are one axis; strips cannot be where their gradients add up
        stack = heads if backward and strip.overlaps else max(heads, times)
    rows = len(strip.queries) * (query.shape[1] // heads)
    return products.suit(query.dtype, stack, rows, strip.keys, causal=square, backward=backward)


def _parts(found: Cut, query: Tensor, scoring: Scoring) -> Iterator[Part]:
    """Those strips in which there is something to compute."""
    return (Part(strip, scoring, found) for strip in found.strips if strip.keys and query.numel())


def _padded(tensor: Tensor, width: int) -> Tensor:
    """With zeros up to `width` features, and features next to each other in memory, as torch's operator wants them."""
    if tensor.shape[3] < width:
        return F.pad(tensor, (0, width - tensor.shape[3]))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


class Written:
    """All strips by the definition, a few rows at a time."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: Dropout | None,
        found: Cut,
        *learned: Tensor,
        wants_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        lse = torch.empty(query.shape[:3], dtype=upcast(query[:0]).dtype, device=query.device)
        for strip in found.strips:
            part = Part(strip, scoring, found)
            scores = part.scores(part.of_query(query), part.of_key(key))
            top = scores.amax(-1, keepdim=True) if strip.keys else scores.new_full((*scores.shape[:3], 1), -math.inf)
            if sink is not None:
                top = torch.maximum(top, sink.to(top.dtype)[:, None, None])
            top.masked_fill_(top == -math.inf, 0.0)
            weights = scores.sub_(top).mul_(LOG2_E).exp2_()
            total = weights.sum(-1, keepdim=True)
            if sink is not None:
                total += exp(sink.to(top.dtype)[:, None, None] - top)
            empty = total == 0
            part.of_query(lse).copy_((top + total.log()).masked_fill(empty, -math.inf).squeeze(-1))
            if dropout is not None:
                weights *= part.kept(dropout, weights)
                total = total * (1 - dropout.rate)
            result = grouped_matmul(weights, upcast(part.seen(part.of_key(value))))
            part.of_query(output).copy_(result / total.masked_fill(empty, 1.0))
        return output, lse

    @staticmethod
    def gradients(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: Dropout | None,
        found: Cut,
        *learned: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse  # sum(dout * out) - dlse
        wanted = [tensor for tensor in learned if tensor.requires_grad]
        grads = [torch.zeros(t.shape, dtype=upcast(t[:0]).dtype, device=t.device) for t in (query, key, value, *wanted)]
        for strip in found.strips:
            if not strip.keys:
                continue
            with torch.enable_grad():  # only of the strip's scores, whatever they are made of
                part = Part(strip, scoring, found)
                part_query = upcast(part.of_query(query)).detach().requires_grad_()
                part_key = upcast(part.of_key(key)).detach().requires_grad_()
                scores = part.scores(part_query, part_key)
            weights = (scores.detach() - part.of_query(finite)[..., None]).mul_(LOG2_E).exp2_()
            grad_part = upcast(part.of_query(grad_output))
            if dropout is not None:
                grad_part = grad_part / (1 - dropout.rate)
            grad_weights = grouped_matmul(grad_part, upcast(part.seen(part.of_key(value))).mT)
            kept = None if dropout is None else part.kept(dropout, weights)
            if kept is not None:
                grad_weights *= kept
            of_row = part.of_query(delta).add_((weights * grad_weights).sum(-1))
            grad_scores = grad_weights.sub_(of_row[..., None]).mul_(weights)
            if kept is not None:
                weights *= kept
            kv_heads = key.shape[1]  # query heads that share a kv head add up
            of_value = _folded(weights, kv_heads).mT @ _folded(grad_part, kv_heads)
            of_query, of_key, *of_learned = torch.autograd.grad(
                scores, (part_query, part_key, *wanted), grad_scores, allow_unused=True
            )
            part.of_query(grads[0]).copy_(of_query)
            part.add_to_key(grads[1], of_key)
            part.add_to_key(grads[2], of_value)
            for total, one in zip(grads[3:], of_learned, strict=True):
                if one is not None:
                    total += one
        grad_sink = None
        if sink is not None:
            grad_sink = -(exp(sink.to(lse.dtype)[:, None] - finite) * delta).sum((0, 2)).to(sink.dtype)
        three = (grad.to(query.dtype) for grad in grads[:3])
        rest = iter(grads[3:])
        return (
            *three,
            grad_sink,
            *(next(rest).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned),
        )


def _folded(tensor: Tensor, kv_heads: int) -> Tensor:
    """The query heads that share a kv head, one below the other: [batch, kv_heads, heads / kv_heads * rows, size]."""
    apart: Tensor = tensor.unflatten(1, (kv_heads, -1))
    return apart.flatten(2, 3)


Engine = type[Fused] | type[Written]


class Strips(torch.autograd.Function):
    """An engine, as autograd and torch.func see it."""

    @staticmethod
    def forward(
        engine: Engine,
        scoring: Scoring,
        dropout: Dropout | None,
        found: Cut,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return engine.forward(query, key, value, sink, scoring, dropout, found, *learned)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.fixed = inputs[:4]
        ctx.save_for_backward(*output, *inputs[4:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing has them once
        if grad_output is None:
            grad_output = torch.zeros_like(saved[0])
        grads = Gradients.apply(*ctx.fixed, grad_output, grad_lse, *saved)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *grads)

    @staticmethod
    def vmap(*arguments: Any) -> tuple[Any, Any]:
        return _one_by_one(Strips, *arguments)


class Gradients(torch.autograd.Function):
    """The backward pass of `Strips`, as something that can be differentiated in turn: by the reference."""

    @staticmethod
    def forward(
        engine: Engine,
        scoring: Scoring,
        dropout: Dropout | None,
        found: Cut,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        lse: Tensor,
        *inputs: Any,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, sink, *learned = inputs
        return engine.gradients(
            *(query, key, value, sink, scoring, dropout, found, *learned),
            output=output,
            lse=lse,
            grad_output=grad_output,
            grad_lse=grad_lse,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _, ctx.scoring, ctx.dropout, _, grad_output, grad_lse, _, _, *tensors = inputs
        ctx.save_for_backward(grad_output, grad_lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        warnings.warn(
            "attention: a gradient of a gradient is computed by kernel 'reference', which holds every score",
            stacklevel=2,
        )
        inputs = ctx.saved_tensors
        grad_output, grad_lse, *tensors = inputs
        third = torch.is_grad_enabled()
        with torch.enable_grad():
            query, key, value, *_ = tensors
            results = reference(query, key, value, ctx.scoring, ctx.dropout)
            outputs, given = zip(
                *((r, g) for r, g in zip(results, (grad_output, grad_lse), strict=True) if g is not None), strict=True
            )
            learning = [tensor for tensor in tensors if _learns(tensor)]
            firsts = torch.autograd.grad(outputs, learning, given, create_graph=True, allow_unused=True)
            asked = [grad for tensor, grad in zip(tensors, grads, strict=True) if _learns(tensor)]
            pairs = [(f, g) for f, g in zip(firsts, asked, strict=True) if _learns(f) and g is not None]
            seconds = torch.autograd.grad(
                [first for first, _ in pairs],
                [tensor for tensor in inputs if _learns(tensor)],
                [grad for _, grad in pairs],
                create_graph=third,
                allow_unused=True,
            )
        found = iter(seconds)
        of_output, of_lse, *rest = (next(found) if _learns(tensor) else None for tensor in inputs)
        return (None, None, None, None, of_output, of_lse, None, None, *rest)

    @staticmethod
    def vmap(*arguments: Any) -> tuple[Any, Any]:
        return _one_by_one(Gradients, *arguments)


@library.custom_op("regard::strips", mutates_args=())
def in_graph(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, tensors: list[Tensor], mask: str, scale: float,
    softcap: float | None, numbers: list[int], bias: Tensor | None, seed: Tensor | None, rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Strips` as one node of a graph of torch.compile's.

    Args:
        mask: the mask as a line, with its `tensors` and `numbers` (`regard.rules.spell`).
        seed, rate: of a dropout.
    """
    engine, scoring, found = _of_node(query, key, sink, tensors, mask, scale, softcap, numbers, bias, rate)
    given: Any = (query, key, value, sink, scoring, _dropout(seed, rate), found, *scoring.learned())
    return engine.forward(*given)


@library.custom_op("regard::strips_backward", mutates_args=())
def _in_graph_backward(
    grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, sink: Tensor | None, bias: Tensor | None, seed: Tensor | None, tensors: list[Tensor], mask: str,
    scale: float, softcap: float | None, numbers: list[int], rate: float, learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`Gradients` likewise; that of a sink or a bias is empty where there is none, or where it does not learn."""
    with _autograd_inside():
        with torch.enable_grad():
            if bias is not None and learns:
                bias = bias.detach().requires_grad_()
            engine, scoring, found = _of_node(query, key, sink, tensors, mask, scale, softcap, numbers, bias, rate)
        given: Any = (query, key, value, sink, scoring, _dropout(seed, rate), found, *scoring.learned())
        grads = engine.gradients(
            *given,
            output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse,
        )  # fmt: skip
    of_query, of_key, of_value, of_sink, of_bias = (
        query.new_empty(0) if grad is None else grad for grad in (*grads, None)[:5]
    )
    return of_query, of_key, of_value, of_sink, of_bias


def _dropout(seed: Tensor | None, rate: float) -> Dropout | None:
    return None if seed is None else Dropout(rate, int(seed))


def _autograd_inside() -> AbstractContextManager[Any]:
    """Lets the written engine ask autograd for the gradients of scores inside a node, where torch has turned it off."""
    keys = torch._C.DispatchKey
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        off = off.remove(key)
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(), off
    )
    return guard


def _of_node(
    query: Tensor, key: Tensor, sink: Tensor | None, tensors: list[Tensor], mask: str, scale: float,
    softcap: float | None, numbers: list[int], bias: Tensor | None, rate: float,
) -> tuple[Engine, Scoring, Cut]:  # fmt: skip
    """What a node of a graph stands for."""
    batch, heads, query_len, _ = query.shape
    grid = Grid(batch, heads, query_len, key.shape[2], query.device)
    added = None if bias is None else Given(bias).bind(grid)
    scoring = Scoring(grid, scale, softcap, added, unspell(mask, tensors, numbers).bind(grid), sink, None)
    call = Call(query, key, key, scoring, Dropout(rate, 0) if rate else None, wants_lse=True)
    return Fused if added is None and fusable(call) else Written, scoring, cut_of(call)


@in_graph.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=upcast(query[:0]).dtype)
    return query.new_empty(*query.shape[:3], value.shape[3]), lse


@_in_graph_backward.register_fake
def _(
    grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, sink: Tensor | None, bias: Tensor | None, seed: Tensor | None, tensors: list[Tensor], mask: str,
    scale: float, softcap: float | None, numbers: list[int], rate: float, learns: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    none = query.new_empty(0)
    five = query, key, value, none if sink is None else sink, bias if bias is not None and learns else none
    return tuple(tensor.new_empty(tensor.shape) for tensor in five)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *four, tensors, mask, scale, softcap, numbers, bias, seed, rate = inputs
    ctx.save_for_backward(*output, *four, bias, seed, *tensors)
    ctx.fixed = mask, scale, softcap, numbers, rate, _learns(bias)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    output, lse, query, key, value, sink, bias, seed, *tensors = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    *three, of_sink, of_bias = _in_graph_backward(
        grad_output, grad_lse, output, lse, query, key, value, sink, bias, seed, tensors, *ctx.fixed
    )
    of_sink, of_bias = None if sink is None else of_sink, of_bias if ctx.fixed[-1] else None
    of_tensors = [None] * len(tensors)
    of_numbers: list[None] | None = None if ctx.fixed[3] else []  # torch takes an empty list for one of tensors
    return (*three, of_sink, of_tensors, None, None, None, of_numbers, of_bias, None, None)


in_graph.register_autograd(_backward, setup_context=_keep)


def _learns(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _one_by_one(function: Any, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """torch.func.vmap's rule: the calls one after another, each of which keeps the machine busy by itself."""
    calls = [
        function.apply(*(x if at is None else x.select(at, n) for x, at in zip(inputs, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls, strict=True))
    return results, tuple(None if result is None else 0 for result in results)


def faster(call: Call) -> str | None:
    """Why this kernel takes less time than one call of torch's, which could do it as well; None if it does not."""
    grid, mask, dtype = call.scoring.grid, call.scoring.mask, call.query.dtype
    causal = dense.is_top_left_causal(mask) and grid.query_len == grid.key_len
    if not (causal or mask is None or mask is EVERYTHING) or call.scoring.bias is not None or not fusable(call):
        return None
    kv_heads = call.key.shape[1]
    stack, rows = grid.batch * kv_heads, grid.query_len * (grid.heads // kv_heads)
    if products.suit(dtype, stack, rows, grid.key_len, causal=causal, backward=False):
        if dtype == torch.float32:
            return "torch's causal form computes nearly the whole of a square this long; here, it is little over half"
        return f"rows are short enough for plain products, at which the processor is faster in {dtype}"
    if not causal or dtype != torch.float32 or grid.query_len < HALVED or tracing():
        return None  # a compiler cannot ask for the number of threads
    if busiest(grid.batch * grid.heads, torch.get_num_threads()) >= UNEVEN:
        return "torch's causal form gives threads unequal shares of so few heads, halves of the square equal ones"
    return None


def cannot(call: Call) -> str | None:
    """Everything can be cut into strips, where there is something to cut."""
    if exporting():
        return "a graph that leaves this process can hold torch's own operators alone"
    return None


def fusable(call: Call) -> bool:
    """Whether torch's operator computes what was asked, on this device."""
    scoring = call.scoring
    if call.dropout is not None or scoring.softcap is not None or scoring.additive is not None:
        return False
    if scoring.bias is not None and call.query.dtype in (torch.bfloat16, torch.float16):
        return False
    if scoring.bias is not None and torch.is_grad_enabled():
        return False  # a bias may want a gradient
    return FLASH and call.query.device.type == "cpu"


def _narrowed(call: Call, span: range) -> Call:
    """The same call on some of its keys, all of which every query may see."""
    scoring = replace(call.scoring, grid=call.scoring.grid._replace(key_len=len(span)), mask=None)
    key, value = (tensor[:, :, span.start : span.stop] for tensor in (call.key, call.value))
    return replace(call, key=key, value=value, scoring=scoring)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The strips, by the engine that can; a single strip without a mask, as in decoding, is one call of torch's."""
    if not tracing():
        return _run(call)
    tensors: list[Tensor] = []
    numbers: list[int] = []
    scoring, dropout = call.scoring, call.dropout
    mask = spell(EVERYTHING if scoring.mask is None else scoring.mask, tensors, numbers)
    if mask is None or scoring.additive is not None or not (scoring.bias is None or isinstance(scoring.bias, Given)):
        broken: Callable[[Call], tuple[Tensor, Tensor | None]] = torch.compiler.disable(_run)
        return broken(call)  # the graph breaks here: a node has no words for functions
    output, lse = in_graph(
        *(upcast(t) if call.wants_lse and fusable(call) else t for t in (call.query, call.key, call.value)),
        scoring.sink, tensors, mask, scoring.scale, scoring.softcap, numbers,
        None if scoring.bias is None else scoring.bias.numbers,
        None if dropout is None else torch.as_tensor(dropout.seed), 0.0 if dropout is None else dropout.rate,
    )  # fmt: skip
    return output.to(call.query.dtype), lse


def _run(call: Call) -> tuple[Tensor, Tensor | None]:
    found = cut_of(call)
    if not fusable(call):
        return _apply(Written, call, (call.query, call.key, call.value), call.dropout, found, call.scoring.learned())
    strip = found.strips[0]
    if (
        len(found.strips) == strip.times == 1
        and strip.row is None
        and strip.full
        and len(strip.spans) == 1
        and strip.spans[0].step == 1
    ):
        alone = _narrowed(call, strip.spans[0])
        if dense.cannot(alone) is None and faster(alone) is None:
            return dense.run(alone)
    tensors = (call.query, call.key, call.value)
    if call.wants_lse:
        # in half precision torch's operator takes a short cut in exp, good enough for its output but not for an lse
        # from which weights are made again: that is computed in float32
        tensors = (upcast(call.query), upcast(call.key), upcast(call.value))
    output, lse = _apply(Fused, call, tensors, None, found, ())
    return output.to(call.query.dtype), lse


def _apply(
    engine: Engine,
    call: Call,
    tensors: tuple[Tensor, Tensor, Tensor],
    dropout: Dropout | None,
    found: Cut,
    learned: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor | None]:
    """Runs an engine; where nothing learns, without autograd's cost, which is as much as that of a small call."""
    scoring = call.scoring
    rest: tuple[Any, ...] = (*tensors, scoring.sink, *learned)
    learns = torch.is_grad_enabled() and any(map(_learns, rest))
    if learns or torch._C._are_functorch_transforms_active():
        output, lse = Strips.apply(engine, scoring, dropout, found, *rest)  # type: ignore[no-untyped-call]
        return output, lse
    fixed: Any = (scoring, dropout, found)
    with torch.no_grad():
        output, lse = engine.forward(*rest[:4], *fixed, *learned, wants_lse=call.wants_lse)
    return output, lse if call.wants_lse else None


def cells(call: Call) -> int:
    """Scores in all strips; of a causal square all, if torch computes it, which leaves out what it can."""
    grid, bias, count = call.scoring.grid, call.scoring.bias, 0
    for strip in cut_of(call).strips:
        square = strip.causal and bias is None
        by_products = fusable(call) and square and _suits_products(strip, call.query, call.key, square)
        each = products.cells_of_square(strip.keys) if by_products else len(strip.queries) * strip.keys
        count += each * strip.times * (grid.batch if strip.row is None else 1)
    return grid.heads * count


def held(call: Call) -> int:
    """The log-sum-exp, and for the largest strip its mask, biases, keys and result, or its scores if written out."""
    grid, query, key, bias = call.scoring.grid, call.query, call.key, call.scoring.bias
    size = upcast(query[:0]).element_size()
    sizes = []
    for strip in cut_of(call).strips:
        rows = grid.batch if strip.row is None else 1
        cells = len(strip.queries) * strip.keys
        if fusable(call):
            masked = 0 if strip.full or strip.causal else cells * (1 + query.element_size())
            biases = 0 if bias is None else rows * grid.heads * cells * size
            cat = 0 if len(strip.spans) == 1 else 2 * rows * key.shape[1] * strip.keys * key.shape[3]
            result = rows * grid.heads * len(strip.queries) * strip.times * call.value.shape[3]
            sizes.append(masked + biases + (cat + result) * query.element_size())
        else:
            sizes.append(3 * rows * grid.heads * cells * size)
    return max(sizes, default=0) + grid.batch * grid.heads * grid.query_len * size


KERNEL = Kernel("tiled", cannot, run, cells, square=lambda call: 0, held=held, faster=faster)

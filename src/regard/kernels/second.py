"""What a backward pass of our own cannot do: its own backward pass, and several gradients at once.

The first is written by hand for query, key, value and sink, some queries at a time; all else is left to the reference.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regard.dropout import Dropout
from regard.graphs import transformed
from regard.kernels.call import KernelError, learns
from regard.numerics import exp, finite_lse, grouped_matmul, softmax, upcast, zero_empty_queries, zero_unseen
from regard.reference import reference
from regard.scores import Scoring

MAX_SCORES = 1 << 19
"""Scores of which a backward pass of the backward pass holds all that it needs at once: some 12 numbers for each. From
2^18 to 2^22 it takes about the same time. Rows "a penalty on gradients" of features.py."""

MIN_QUERIES = 64
"""Fewest queries at a time, for products that are worth their beginning."""


def is_batched(*grads: Tensor | None) -> bool:
    """Whether any stands for several gradients, as in `torch.autograd.grad(..., is_grads_batched=True)` and in
    `torch.autograd.functional.jacobian(..., vectorize=True)`: it has no numbers of its own to be read."""
    return any(grad is not None and not torch._C._has_storage(grad) for grad in grads)


def batched_gradients(
    scoring: Scoring, dropout: Dropout | None, grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a call, for several gradients of its output and lse at once.

    Args:
        grads: of output and lse. inputs: query, key, value, sink and what else may learn.
    """
    with torch.enable_grad():
        query, key, value, sink = (None if t is None else t.detach().requires_grad_() for t in inputs[:4])
        assert query is not None
        assert key is not None
        assert value is not None
        results = reference(query, key, value, scoring.with_sink(sink), dropout)
        given = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        tensors = [query, key, value, sink, *inputs[4:]]
        learning = [tensor for tensor in tensors if learns(tensor)]
        outputs, of_outputs = zip(*given, strict=True)
        found = iter(torch.autograd.grad(outputs, learning, of_outputs, allow_unused=True))  # type: ignore[arg-type]
    return [next(found) if learns(tensor) else None for tensor in tensors]


def second_gradients(
    scoring: Scoring, dropout: Dropout | None, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of what a backward pass was given.

        L = sum of what it returned, times `grads`;   returned: dL/d(inputs)

    Args:
        inputs: the gradients of output and lse, then query, key, value, sink and all else that may learn.
        grads: those of what it returned: the gradients of query, key, value, sink and all else.

    Raises:
        KernelError: the result shall be differentiated again, and there are biases that learn.
    """
    third = torch.is_grad_enabled()
    others = scoring.additive is not None or any(map(learns, inputs[6:]))
    if all(scoring.grid[:4]) and not (third or transformed() or others):
        return _in_parts(scoring, dropout, inputs, grads)
    warnings.warn(
        "attention: a gradient of a gradient is computed by kernel 'reference', which holds every score", stacklevel=3
    )
    if third and any(map(learns, inputs[6:])):  # the query may depend on them: they would be counted twice
        raise KernelError(
            "attention: third derivatives are not computed where a bias learns\n"
            "  hint: kernel='reference' computes derivatives of any order"
        )
    with torch.enable_grad():
        # views, so that each is alone: the gradient of the output depends on the output, which depends on the query;
        # detached from what they were computed from, which is left for those who go back through it next
        grad_output, grad_lse, query, key, value, sink = (
            None if t is None else t.view_as(t) if third else t.detach().requires_grad_(t.requires_grad)
            for t in inputs[:6]
        )
        tensors = query, key, value, sink, *inputs[6:]
        inputs = grad_output, grad_lse, *tensors
        assert query is not None
        assert key is not None
        assert value is not None
        results = reference(query, key, value, scoring.with_sink(sink), dropout)
        outputs, given = zip(
            *((r, g) for r, g in zip(results, (grad_output, grad_lse), strict=True) if g is not None), strict=True
        )
        learning = [tensor for tensor in tensors if tensor is not None and learns(tensor)]
        firsts = torch.autograd.grad(outputs, learning, given, create_graph=True, allow_unused=True)
        asked = [grad for tensor, grad in zip(tensors, grads, strict=True) if learns(tensor)]
        pairs = [(f, g) for f, g in zip(firsts, asked, strict=True) if learns(f) and g is not None]
        seconds = torch.autograd.grad(
            [first for first, _ in pairs],
            [tensor for tensor in inputs if tensor is not None and learns(tensor)],
            [grad for _, grad in pairs],
            create_graph=third,
            allow_unused=True,
        )
    found = iter(seconds)
    return [next(found) if learns(tensor) else None for tensor in inputs]


def _in_parts(
    scoring: Scoring, dropout: Dropout | None, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The same, of nothing that learns in a bias: each part of the queries adds its share to keys, values and sink."""
    grid, total = scoring.grid, _Second(scoring, dropout, inputs, grads)
    rows = max(MIN_QUERIES, MAX_SCORES // max(1, grid.batch * grid.heads * grid.key_len))
    for start in range(0, grid.query_len, rows):
        total.add(range(start, min(start + rows, grid.query_len)))
    return total.finish()


class _Second:
    """Gradients of the gradients of a call, added up over its queries.

    With P the weights, D = 1 or what dropout makes of it, u = scale q k^T, t = dS/du the slope of a softcap, and g and
    l the gradients of output and lse, the gradients are

        dS = P (dP - delta),    dP = D (g v^T),    delta = sum_j P dP - l,    dU = t dS
        dq = scale dU k,    dk = scale dU^T q,    dv = (D P)^T g,    dsink = -Psink delta

    L is the sum of their products with Q, K, V and s, which are given. So

        A = t scale (Q k^T + q K^T)                 dL/d(dS)
        a = sum_j P A + Psink s                     dL/dl
        C = D P (A - a)                             dL/d(g v^T)
        E = A (dP - delta) - a dP + D (g V^T)       dL/dP,    Esink = -s delta
        T = P (E - sum_j P E - Psink Esink)         dL/dS,    Tsink = Psink (Esink - the same sum)
        R = t T + A dS t' / t                       dL/du,    t' / t = -2 S / c^2 with a softcap c

        dL/dg = C v + D P V,    dL/dq = scale (R k + dU K),    dL/dsink = sum_i Tsink
        dL/dv = C^T g,          dL/dk = scale (R^T q + dU^T Q)
    """

    def __init__(
        self, scoring: Scoring, dropout: Dropout | None, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]
    ) -> None:
        self._scoring, self._dropout, self._inputs = scoring, dropout, inputs
        grad_output, self._grad_lse, query, key, value, self._sink = map(_wide, inputs[:6])
        assert query is not None
        assert key is not None
        assert value is not None
        self._query, self._key, self._value = query, key, value
        self._grad_output = query.new_zeros(*query.shape[:3], value.shape[3]) if grad_output is None else grad_output
        self._of_query, self._of_key, self._of_value, self._of_sink = map(_wide, grads[:4])
        self._totals: list[Tensor | None] = [None] * 6
        self._room = query.new_empty(0)

    def finish(self) -> list[Tensor | None]:
        """The gradients of all that is wanted, each in the dtype of what it belongs to."""
        found: list[Tensor | None] = [None] * len(self._inputs)
        for place, (tensor, total) in enumerate(zip(self._inputs, self._totals, strict=False)):
            if tensor is not None and learns(tensor):
                found[place] = torch.zeros_like(tensor) if total is None else total.to(tensor.dtype)
        return found

    def add(self, queries: range) -> None:
        """What some queries add, to the same sizes of their own and to sums over all."""
        allowed, keys = self._seen(queries)
        rows, columns = (_between(which) for which in (queries, keys))
        q, g = zero_empty_queries(self._query[:, :, rows], allowed), self._grad_output[:, :, rows]
        k, v = zero_unseen(self._key[:, :, columns], allowed), zero_unseen(self._value[:, :, columns], allowed)
        of_query = None if self._of_query is None else self._of_query[:, :, rows]
        of_key, of_value = (None if t is None else t[:, :, columns] for t in (self._of_key, self._of_value))
        scale, softcap = self._scoring.scale, self._scoring.softcap
        weights, of_sink, capped = self._weights(q, k, queries, keys, allowed)
        kept = None
        if self._dropout is not None:
            kept = self._dropout.keep(self._scoring.grid, queries, keys).to(weights.dtype).mul_(self._dropout.factor)
        dropped = weights if kept is None else weights * kept

        from_delta = grouped_matmul(g, v.mT)  # dP - delta
        from_delta = from_delta if kept is None else from_delta.mul_(kept)
        delta = self._sums(weights, from_delta)
        if self._grad_lse is not None:
            delta -= self._grad_lse[:, :, rows, None]
        grad_scores = from_delta.sub_(delta) * weights

        terms = [(x, y) for x, y in ((of_query, k), (q, of_key)) if x is not None and y is not None]
        by = None  # A
        for left, right in terms:
            more = grouped_matmul(left, right.mT, scale=scale)
            by = more if by is None else by.add_(more)
        by = torch.zeros_like(weights) if by is None else by
        slope = None if capped is None or softcap is None else 1.0 - (capped / softcap).square_()
        by = by if slope is None else by.mul_(slope)
        of_lse = self._sums(weights, by)  # a
        if of_sink is not None and self._of_sink is not None:
            of_lse += of_sink * self._of_sink[:, None, None]
        bent = None if capped is None or softcap is None else by * grad_scores * capped.mul_(-2.0 / softcap**2)

        from_lse = by.sub_(of_lse)  # A - a
        of_product = torch.mul(dropped, from_lse, out=capped)  # C
        of_weights = from_lse.mul_(from_delta).sub_(of_lse * delta)  # E
        if of_value is not None:
            more = grouped_matmul(g, of_value.mT)
            of_weights += more if kept is None else more.mul_(kept)
        mean = self._sums(weights, of_weights)
        if of_sink is not None:
            by_sink = torch.zeros_like(delta) if self._of_sink is None else -self._of_sink[:, None, None] * delta
            mean += of_sink * by_sink
            if self._wants(5):
                self._add(5, slice(None), (of_sink * (by_sink - mean)).sum((0, 2, 3)))
        of_scores = of_weights.sub_(mean).mul_(weights)  # T, then R
        if slope is not None and bent is not None:
            of_scores.mul_(slope).add_(bent)
            grad_scores.mul_(slope)

        kv_heads = k.shape[1]
        if self._wants(0):
            self._add(0, rows, grouped_matmul(of_product, v))
            if of_value is not None:
                self._add(0, rows, grouped_matmul(dropped, of_value))
        if self._wants(1):
            self._add(1, rows, of_lse.squeeze(-1))
        if self._wants(2):
            self._add(2, rows, grouped_matmul(of_scores, k, scale=scale))
            if of_key is not None:
                self._add(2, rows, grouped_matmul(grad_scores, of_key, scale=scale))
        if self._wants(3):
            self._add(3, columns, _of_keys(of_scores, q, kv_heads), scale)
            if of_query is not None:
                self._add(3, columns, _of_keys(grad_scores, of_query, kv_heads), scale)
        if self._wants(4):
            self._add(4, columns, _of_keys(of_product, g, kv_heads))

    def _wants(self, place: int) -> bool:
        """Whether an input learns. The gradient of the output does not where a sum is differentiated."""
        return learns(self._inputs[place])

    def _sums(self, first: Tensor, second: Tensor) -> Tensor:
        """Sums of products along keys."""
        if self._room.shape != first.shape:
            self._room = torch.empty_like(first)
        return torch.mul(first, second, out=self._room).sum(-1, keepdim=True)

    def _add(self, place: int, which: slice, more: Tensor, factor: float = 1.0) -> None:
        """To a total, of which the first share of all is taken as it is."""
        tensor, total = self._inputs[place], self._totals[place]
        assert tensor is not None  # it is wanted
        if total is None and tensor.shape == more.shape:
            self._totals[place] = more if factor == 1.0 else more.mul_(factor)
            return
        if total is None:
            total = self._totals[place] = more.new_zeros(tensor.shape)
        (total[which] if total.dim() == 1 else total[:, :, which]).add_(more, alpha=factor)

    def _seen(self, queries: range) -> tuple[Tensor | None, range]:
        """What these queries may see, None for all, and the keys from the first to the last of these; one if it is
        none, since a sink may take all weight."""
        key_len = self._scoring.grid.key_len
        allowed = self._scoring.allowed(queries, range(key_len))
        if allowed is None or allowed.shape[-1] < key_len:
            return allowed, range(key_len)
        seen = allowed.flatten(0, -2).any(0).nonzero().flatten()
        keys = range(int(seen[0]), int(seen[-1]) + 1) if len(seen) else range(1)
        return allowed[..., keys.start : keys.stop], keys

    def _weights(
        self, q: Tensor, k: Tensor, queries: range, keys: range, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weights before dropout, that of the sink [batch, heads, queries, 1], and scores after the softcap."""
        capped = None
        for stage in replace(self._scoring, mask=None).stages(q, k, queries, keys):
            capped = stage.scores.clone() if stage.name == "cap" else capped
            scores = stage.scores
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        if self._sink is None and (allowed is None or bool(allowed.any(-1).all())):
            return scores.softmax(-1), None, capped
        weights, lse = softmax(scores, self._sink)
        of_sink = None if self._sink is None else exp(self._sink[:, None] - finite_lse(lse))[..., None]
        return weights, of_sink, capped


def _wide(tensor: Tensor | None) -> Tensor | None:
    """Without what it was computed from."""
    return None if tensor is None else upcast(tensor.detach())


def _between(which: range) -> slice:
    return slice(which.start, which.stop)


def _of_keys(scores: Tensor, rows: Tensor, kv_heads: int) -> Tensor:
    """scores^T rows, added up over the heads of each kv head.

    Shapes: [batch, heads, rows, columns] and [batch, heads, rows, size] -> [batch, kv_heads, columns, size].
    """
    scores, rows = (t.unflatten(1, (kv_heads, -1)).flatten(2, 3) for t in (scores, rows))
    return scores.mT @ rows

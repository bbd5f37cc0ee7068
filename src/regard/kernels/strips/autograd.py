"""The strips of a call as a `torch.autograd.Function`.

Gradients of its gradients are those of `regard.kernels.second`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.biases import Given
from regard.dropout import Dropout
from regard.graphs import transformed
from regard.kernels.second import batched_gradients, is_batched, second_gradients
from regard.kernels.strips import ready
from regard.kernels.strips.engines import Engine
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.order import as_read
from regard.scores import Scoring

Fixed = tuple[Engine, Scoring, Dropout | None, StripPlan]
"""What is fixed of a call, but for its tensors."""


class Alike:
    """Calls that are alike, but for their tensors (`regard.repeated`).

    Attributes:
        kept: what the library found out about the data of their mask, if it may be another in each call.
        has_gaps: whether that hides keys between others.
        passes: the last backward pass that needed nothing but tensors and what is kept, without gaps and with.
    """

    kept: bytes | None = None
    has_gaps: bool = False

    def __init__(self) -> None:
        self.passes: dict[bool, ready.Pass] = {}

    def fixed(self, query: Tensor, key: Tensor, value: Tensor, *saved: Tensor) -> Fixed:
        """What is fixed of one of them, of which this is saved."""
        raise NotImplementedError


class Same(Alike):
    """Those of which all is fixed."""

    def __init__(self, fixed: Fixed) -> None:
        super().__init__()
        self._fixed = fixed

    def fixed(self, query: Tensor, key: Tensor, value: Tensor, *saved: Tensor) -> Fixed:
        return self._fixed


class WithTable(Same):
    """Those of which all is fixed but a tensor that is added to scores: the first that is saved."""

    def fixed(self, query: Tensor, key: Tensor, value: Tensor, *saved: Tensor) -> Fixed:
        return beside(self._fixed, saved[0])


def without_table(fixed: Fixed) -> Fixed:
    """The same for `beside`, of a call whose bias is a tensor, without keeping its memory alive."""
    engine, scoring, dropout, plan = fixed
    assert isinstance(scoring.bias, Given)
    return engine, scoring.with_bias(scoring.bias.without_numbers()), dropout, plan


def beside(fixed: Fixed, table: Tensor) -> Fixed:
    """The same of a call with another bias tensor."""
    engine, scoring, dropout, plan = fixed
    assert isinstance(scoring.bias, Given)
    return engine, scoring.with_bias(scoring.bias.of(table)), dropout, plan


def _forward(
    engine: Engine,
    scoring: Scoring,
    dropout: Dropout | None,
    plan: StripPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    *learned: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and the output as the gradients take it."""
    return engine.forward(query, key, value, sink, scoring, dropout, plan)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """For the gradients."""
    ctx.fixed = inputs[:4]
    ctx.save_for_backward(*output, *inputs[4:])
    ctx.set_materialize_grads(False)


class Strips(torch.autograd.Function):
    """Attention by strips, as a differentiable function."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output, lse, kept = _forward(*inputs)
        _keep(ctx, inputs, (kept, lse))
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_pulled(ctx.fixed, ctx.saved_tensors, grad_output, grad_lse)


def _pulled(
    fixed: tuple[Any, ...], saved: tuple[Any, ...], grad_output: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, sink and all else that may learn.

    Args:
        fixed, saved: as `_keep` keeps them. What is saved may be read only once, as activation checkpointing requires.
    """
    if grad_output is None and grad_lse is None:  # gradients of gradients do not go through the results
        return tuple(None for _ in saved[2:])
    if grad_output is None:
        grad_output = torch.zeros_like(saved[0])
    if is_batched(grad_output, grad_lse) and not transformed():
        _, scoring, dropout, _ = fixed
        return tuple(batched_gradients(scoring, dropout, (grad_output, grad_lse), saved[2:]))
    again = torch.is_grad_enabled() or transformed()
    way: Callable[..., tuple[Tensor | None, ...]] = Gradients.apply if again else Gradients.forward  # a node takes time
    return way(*fixed, grad_output, grad_lse, *saved)


class Computed(Strips):
    """The same of a call that the library has computed already (`regard.repeated`), without dropout."""

    @staticmethod
    def forward(ctx: Any, alike: Alike, results: tuple[Tensor, ...], *inputs: Any) -> tuple[Tensor, Tensor]:
        output, lse, kept = results
        ctx.alike = alike
        ctx.save_for_backward(kept, lse, *inputs)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        alike: Alike = ctx.alike
        later = torch.is_grad_enabled() or transformed() or is_batched(grad_output, grad_lse)
        if grad_output is None or grad_lse is not None or later:
            return None, None, *_pulled(*_with_fixed(alike, saved), grad_output, grad_lse)
        grad_output, last = as_read(grad_output), alike.passes.get(alike.has_gaps)
        grads = None if last is None else last.pull(saved, grad_output, alike.kept)
        return (None, None, *_pulled_at_first(alike, saved, grad_output)) if grads is None else grads


def _with_fixed(alike: Alike, saved: tuple[Any, ...]) -> tuple[Fixed, tuple[Any, ...]]:
    """What is fixed of a call, and what was saved of it, as `_pulled` takes them."""
    if len(saved) == 6:
        return alike.fixed(*saved[2:5]), saved
    with torch.enable_grad():  # a view of what learns does so, too
        fixed = alike.fixed(*saved[2:5], *saved[6:])
    return fixed, (*saved[:6], *fixed[1].learned())  # on which nothing before them depends


def _pulled_at_first(alike: Alike, saved: tuple[Any, ...], grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """As `_pulled`; by what the library is told then, later gradients may be found without all this."""
    fixed, taken = _with_fixed(alike, saved)
    scoring, plan = fixed[1], fixed[3]
    output, lse, query, key, value, sink, *learned = taken
    bias = plan.in_order(scoring).bias
    found = ready.backward(query, key, value, sink, bias, None, plan, learned, output, lse, grad_output, None)
    if found is None:
        return _pulled(fixed, taken, grad_output, None)
    grads, of_learned, last = found
    is_told = last.interval is plan.interval or alike.kept is not None
    if is_told and last.needs_only(saved[6:], bias):
        alike.passes[alike.has_gaps] = last
    return *grads, *ready.of_each(learned, of_learned)


apply: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Strips).apply
attach: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Computed).apply
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""`Strips.apply` for tensors that no transform of torch.func is at work on, but that one may have left behind; to look
for one, torch takes 20 us between the layers of a model. Row "5 queries, causal" of features.py."""


class Gradients(torch.autograd.Function):
    """The backward pass of `Strips`, itself differentiable by the reference."""

    @staticmethod
    def forward(
        engine: Engine,
        scoring: Scoring,
        dropout: Dropout | None,
        plan: StripPlan,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        output: Tensor,
        lse: Tensor,
        *inputs: Any,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, sink, *learned = inputs
        return engine.backward(
            *(query, key, value, sink, scoring, dropout, plan, *learned),
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
        of_output, of_lse, *rest = second_gradients(ctx.scoring, ctx.dropout, ctx.saved_tensors, grads)
        return (None, None, None, None, of_output, of_lse, None, None, *rest)

    @staticmethod
    def vmap(*arguments: Any) -> tuple[Any, Any]:
        return one_by_one(Gradients, *arguments)


def one_by_one(function: Any, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """The rule for torch.func.vmap: one call after another, since each keeps all cores busy."""
    calls = [
        function.apply(*(x if at is None else x.select(at, n) for x, at in zip(inputs, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls, strict=True))
    return results, tuple(None if result is None else 0 for result in results)

"""Attention whose weights are part of the autograd graph of its output, without being computed.

    weights = softmax(scores(query, key))        `LazyWeights`, a node of torch's graph
    output  = dropout(weights) @ value           a second node, of weights and value

The output and its gradients are computed from query, key and value by the kernel that `attention` would use. The graph
that torch sees consists of the two lines above. The gradient of the weights is

    d weights[i, j] = dropout(d output[i] . value[j])

any rectangle of which follows from d output and value, so it is lazy too (`LazyGradient`). It carries the gradients of
query and key from the kernel's backward pass, which are used as long as no hook changes the gradient of the weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.dropout import Dropout
from regard.functional import run, run_perhaps_with_lse
from regard.graphs import transformed
from regard.hooks import Compute, Heads, Result, ScoringArguments
from regard.huggingface.parts import LazyGradient, LazyParts, Place
from regard.huggingface.weights import LazyWeights, is_checkpointed, is_differentiable, weights_of
from regard.kernels import Call
from regard.numerics import grouped_matmul, upcast, without_autocast
from regard.observation.selecting import kv_of_heads
from regard.shapes import Grid
from regard.validation import check_call


class ComputeByWeights(Compute):
    """Attention itself, for calls that also return the weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self._made: list[tuple[Heads, ScoringArguments, Tensor]] = []

    def __call__(self, heads: Heads, scoring: ScoringArguments) -> Result:
        call = check_call("attention", *heads, **scoring, dropout=self.dropout)
        differentiable = is_differentiable(call.query, call.key, call.scoring)
        if differentiable and not is_checkpointed() and not transformed():
            weights, lse = weights_of(call.query, call.key, call.scoring), None
            output = _Output.apply(weights, call.value, call)  # type: ignore[no-untyped-call]
        else:
            output, lse = run_perhaps_with_lse(call)
            weights = weights_of(call.query, call.key, call.scoring, lse, "activation checkpointing computes it twice")
        self._made.append((heads, scoring, weights))
        return output, lse

    def weights(self, heads: Heads, scoring: ScoringArguments) -> Tensor:
        """The weights of a call: those of which its output is a function, if it was computed here exactly once."""
        made = [weights for of, by, weights in self._made if of is heads and by is scoring]
        if len(made) == len(self._made) == 1:
            return made[0]
        call = check_call("attention", *heads, **scoring)
        return weights_of(call.query, call.key, call.scoring, None, "an intervention stands around the layer")


class _Output(torch.autograd.Function):
    """The output as a function of weights and value."""

    @staticmethod
    def forward(ctx: Any, weights: LazyWeights, value: Tensor, call: Call) -> Tensor:
        with torch.enable_grad():
            output, _ = run(call, "auto")
        ctx.scoring, ctx.dropout = call.scoring, call.dropout
        ctx.save_for_backward(weights, call.query, call.key, value, output)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, query, key, value, output = ctx.saved_tensors
        scoring, dropout = ctx.scoring, ctx.dropout
        of_weights = OfOutput(gradient, value, scoring.grid, dropout)
        if torch.is_grad_enabled():
            return *of_weights.twice(weights), None
        if output.grad_fn is None:  # removed by hooks on saved tensors
            with torch.enable_grad():
                output, _ = run(Call(query, key, value, scoring, dropout), "auto")
        inputs = value, query, key, *(() if scoring.sink is None else (scoring.sink,)), *scoring.learned()
        wanted = [n for n, tensor in enumerate(inputs) if tensor.requires_grad]
        given = torch.autograd.grad(output, [inputs[n] for n in wanted], gradient, retain_graph=True, allow_unused=True)
        found: list[Tensor | None] = [None] * len(inputs)
        for n, one in zip(wanted, given, strict=True):
            found[n] = one
        of_weights.of_inputs = found[1:]
        return LazyGradient.of(of_weights, weights.frame), found[0], None


class OfOutput:
    """The gradient of weights, as a function of the gradient of the output."""

    of_inputs: Sequence[Tensor | None] = ()

    def __init__(self, gradient: Tensor, value: Tensor, grid: Grid, dropout: Dropout | None) -> None:
        self.gradient, self.value, self.grid, self.dropout = gradient, value, grid, dropout

    def rectangle(self, place: Place) -> Tensor:
        if not place.cells():
            return self.gradient.new_zeros(place.sizes())
        batch, heads, queries, keys = (slice(side.start, side.stop) for side in place)
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self.grid.device):
            value = kv_of_heads(self.value, self.grid.heads, place.heads)[batch, :, keys]
            product = grouped_matmul(upcast(self.gradient[batch, heads, queries]), upcast(value).mT)
            return product if self.dropout is None else product * self._kept(place)

    def twice(self, weights: LazyParts) -> tuple[Tensor, Tensor]:
        """The gradients of weights and value for double backward: by the definition, with all weights."""
        dropped = weights.dense()
        gradient, value = upcast(self.gradient), upcast(self.value)
        with without_autocast(self.grid.device):
            product = grouped_matmul(gradient, value.mT)
            if self.dropout is not None:
                kept = self._kept(weights.frame.whole())
                dropped, product = dropped * kept, product * kept
            of_value = (upcast(dropped).mT @ gradient).unflatten(1, (value.shape[1], -1)).sum(2)
        return product.to(weights.dtype), of_value.to(self.value.dtype)

    def _kept(self, place: Place) -> Tensor:
        """The factors of dropout: 0, or 1 / (1 - rate)."""
        assert self.dropout is not None
        kept = self.dropout.keep(self.grid, place.queries, place.keys, batches=place.batch, heads=place.heads)
        return kept / (1 - self.dropout.rate)

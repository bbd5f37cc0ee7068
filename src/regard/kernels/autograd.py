"""Gradients of gradients for torch's fused operator, whose backward pass has none of its own.

torch computes the gradients. Only where those are to be differentiated too (``create_graph=True``), they are replaced
by the same numbers with a backward pass, `second.py`, so that nothing else pays for it.
"""

from typing import Any

import torch
from torch import Tensor

from regard.biases import Given
from regard.kernels.second import second_gradients
from regard.masks import Causal
from regard.scores import Scoring
from regard.shapes import Grid

NODE = "ScaledDotProductFlashAttentionForCpuBackward0"
"""What autograd calls the backward pass of torch's fused operator for the CPU. All else that its function may run is
made of operators whose gradients have gradients."""


def differentiable_twice(output: Tensor) -> Tensor:
    """The output of torch's function as it is; its gradients, if it has any, will have gradients."""
    if output.grad_fn is not None:  # None where what learns has no part in it
        output.grad_fn.register_hook(_differentiable)
    return output


def _differentiable(grads: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor, ...]) -> tuple[Any, ...] | None:
    """The gradients of query, key and value with a backward pass, if one is wanted."""
    if not torch.is_grad_enabled():
        return None
    node = torch._C._current_autograd_node()
    if node.name() != NODE:
        return None
    query, key, value, mask, is_causal, scale = _saved(node)
    grid = Grid(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    scoring = Scoring(
        grid,
        scale,
        bias=None if mask is None else Given(mask).bind(grid),
        mask=Causal(0).bind(grid) if is_causal else None,
    )
    return Gradients.apply(scoring, grads, grad_outputs[0], query, key, value)  # type: ignore[no-any-return, no-untyped-call]


def _saved(node: Any) -> list[Any]:
    """Query, key, value, mask, whether it is causal, and scale, as the operator got them.

    They are read in a backward pass of their own, since activation checkpointing hands out once in each what it
    recomputes, and torch has read them in this one.
    """
    found: list[Any] = []
    names = "query", "key", "value", "attn_mask", "is_causal", "scale"
    pass_of_its_own = torch.zeros((), requires_grad=True)
    pass_of_its_own.register_hook(lambda _: found.extend(getattr(node, f"_saved_{name}") for name in names))
    pass_of_its_own.backward()
    return found


class Gradients(torch.autograd.Function):
    """The gradients of query, key and value that torch has computed, with a backward pass."""

    @staticmethod
    def forward(
        ctx: Any, scoring: Scoring, grads: tuple[Tensor | None, ...], grad_output: Tensor, *three: Tensor
    ) -> tuple[Tensor | None, ...]:
        ctx.scoring = scoring
        ctx.save_for_backward(grad_output, *three)
        return tuple(None if grad is None else grad.detach() for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, *three = ctx.saved_tensors
        given = grad_output, None, *three, None
        of_output, _, *rest, _ = second_gradients(ctx.scoring, None, given, (*grads, None))
        return (None, None, of_output, *rest)

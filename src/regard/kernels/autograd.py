"""torch's fused operator as a `torch.autograd.Function`, whose gradients have gradients.

The backward pass of torch's own function has none. Here a gradient of a gradient is computed by the reference.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels import fused
from regard.kernels.second import second_gradients
from regard.scores import Scoring


class Fused(torch.autograd.Function):
    """Attention with a causal mask, or with a table of numbers to add, which itself does not learn."""

    @staticmethod
    def forward(
        ctx: Any, scoring: Scoring, is_causal: bool, table: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        output, lse = fused.flash(query, key, value, scale=scoring.scale, is_causal=is_causal, attn_mask=table)
        ctx.fixed = scoring, is_causal
        ctx.save_for_backward(table, output, lse, query, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once, as activation checkpointing requires
        if torch.is_grad_enabled():
            return None, None, None, *Gradients.apply(*ctx.fixed, grad_output, *saved)  # type: ignore[no-untyped-call]
        return None, None, None, *_gradients(*ctx.fixed, grad_output, *saved)


class Gradients(torch.autograd.Function):
    """The backward pass of `Fused`, itself differentiable."""

    @staticmethod
    def forward(
        ctx: Any, scoring: Scoring, is_causal: bool, grad_output: Tensor, table: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scoring = scoring
        ctx.save_for_backward(grad_output, *tensors[2:])
        return _gradients(scoring, is_causal, grad_output, table, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, *three = ctx.saved_tensors
        of_output, _, *rest = second_gradients(ctx.scoring, None, (grad_output, None, *three), grads)
        return (None, None, of_output, None, None, None, *rest)


def _gradients(
    scoring: Scoring, is_causal: bool, grad_output: Tensor, table: Tensor | None, output: Tensor, lse: Tensor,
    *three: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = grad_output, *three, output, lse
    return fused.flash_backward(*tensors, scale=scoring.scale, is_causal=is_causal, attn_mask=table)

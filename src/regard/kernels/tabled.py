"""torch's fused operator with a table of numbers that are added to the scores, as a `torch.autograd.Function`.

torch's own function does the same, but its backward pass has no gradient; here that is computed by the reference.
"""

from typing import Any

import torch
from torch import Tensor

from regard.kernels import fused
from regard.kernels.second import second_gradients
from regard.scores import Scoring


class Tabled(torch.autograd.Function):
    """Attention with a table, which itself does not learn."""

    @staticmethod
    def forward(ctx: Any, scoring: Scoring, table: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, lse = fused.flash(query, key, value, scale=scoring.scale, attn_mask=table)
        ctx.scoring = scoring
        ctx.save_for_backward(table, output, lse, query, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once, as activation checkpointing requires
        if torch.is_grad_enabled():
            return None, None, *Gradients.apply(ctx.scoring, grad_output, *saved)  # type: ignore[no-untyped-call]
        return None, None, *_gradients(ctx.scoring, grad_output, *saved)


class Gradients(torch.autograd.Function):
    """The backward pass of `Tabled`, itself differentiable."""

    @staticmethod
    def forward(
        ctx: Any, scoring: Scoring, grad_output: Tensor, table: Tensor, output: Tensor, lse: Tensor, *three: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.scoring = scoring
        ctx.save_for_backward(grad_output, *three)
        return _gradients(scoring, grad_output, table, output, lse, *three)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_output, *three = ctx.saved_tensors
        of_output, _, *rest = second_gradients(ctx.scoring, None, (grad_output, None, *three), grads)
        return (None, of_output, None, None, None, *rest)


def _gradients(
    scoring: Scoring, grad_output: Tensor, table: Tensor, output: Tensor, lse: Tensor, *three: Tensor
) -> tuple[Tensor, ...]:
    tensors = grad_output, *three, output, lse
    return fused.flash_backward(*tensors, scale=scoring.scale, attn_mask=table)

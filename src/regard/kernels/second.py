"""What a backward pass of our own cannot do, by the reference: its own backward pass, and several gradients at once."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.dropout import Dropout
from regard.kernels.call import KernelError, learns
from regard.reference import reference
from regard.scores import Scoring


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

    Args:
        inputs: the gradients of output and lse, then query, key, value, sink and all else that may learn.
        grads: those of what it returned: the gradients of query, key, value, sink and all else.

    Raises:
        KernelError: the result shall be differentiated again, and there are biases that learn.
    """
    warnings.warn(
        "attention: a gradient of a gradient is computed by kernel 'reference', which holds every score", stacklevel=3
    )
    third = torch.is_grad_enabled()
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

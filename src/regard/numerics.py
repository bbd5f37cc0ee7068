"""Numerics shared by all implementations of attention: precision, exponentials, zeros for what is fully masked.

Functions of tensors only, independent of masks, biases and kernels.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from regard import processor
from regard.graphs import concrete, exporting, has_numbers
from regard.matmul import baddbmm, bmm

LOG2_E = 1.0 / math.log(2.0)

MAX_BETWEEN = 1 << 17
"""Numbers held for a moment by `row_products`."""


def upcast(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is wider."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype itself if it is wider: that of `upcast`."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def in_one_dtype(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """The factors of a product in one dtype: bfloat16 if they are given in it and the processor is fast at it."""
    if processor.BFLOAT16 and others[0].dtype == torch.bfloat16:
        return (first.bfloat16(), *others)
    return (first, *map(upcast, others))


def grouped_matmul(
    left: Tensor, right: Tensor, out: Tensor | None = None, *, scale: float = 1.0, added: Tensor | None = None
) -> Tensor:
    """``added + scale left @ right`` if right has fewer heads: query head h is multiplied by kv head
    ``h // (heads // kv_heads)``.

    Query heads that share a kv head are stacked along the rows, so nothing is repeated in memory.
    Shapes: [batch, heads, M, D] and [batch, kv_heads, D, N] -> [batch, heads, M, N], written into `out` if given.
    Args:
        added: [batch, heads, M, 1], a number for each row; None for 0.
    """
    batch, heads, M, D = left.shape
    kv_heads, N = right.shape[1], right.shape[3]
    if exporting():  # the stacked length would be a product of symbolic lengths, on which the tracer would branch
        if heads == kv_heads:
            found = torch.matmul(left, right)
        else:
            found = torch.matmul(left.unflatten(1, (kv_heads, heads // kv_heads)), right[:, :, None]).flatten(1, 2)
        found = found if scale == 1.0 else scale * found
        return found if added is None else added + found
    stack, rows = batch * kv_heads, heads // kv_heads * M
    into = None if out is None else out.view(stack, rows, N)
    left, right = left.reshape(stack, rows, D), right.reshape(stack, D, N)
    if added is None and scale == 1.0:
        found = bmm(left, right, out=into)
    elif added is None:
        found = baddbmm(left.new_zeros(1, 1, 1), left, right, beta=0.0, alpha=scale, out=into)
    else:
        found = baddbmm(added.reshape(stack, rows, 1), left, right, alpha=scale, out=into)
    return found.view(batch, heads, M, N)


def row_products(first: Tensor, second: Tensor) -> Tensor:
    """sum(first * second) over features, in float32 or wider: [batch, heads, length, size] twice -> [..., length].

    On a CPU a few heads at a time: what is only needed in between stays in the cache, and is not memory that the system
    has to hand out anew in every call, which takes several times as long as the sums.
    """
    if first.device.type != "cpu":
        return (upcast(first) * upcast(second)).sum(-1)
    batch, heads, length, size = first.shape
    sums = first.new_empty(batch, heads, length, dtype=wide(first.dtype))
    together = max(1, MAX_BETWEEN // max(1, length * size))
    rows = max(1, together // max(1, heads))
    for row in range(0, batch, rows):
        for head in range(0, heads, together):
            part = slice(row, row + rows), slice(head, head + together)
            sums[part] = (upcast(first[part]) * upcast(second[part])).sum(-1)
    return sums


def all_zero(numbers: Tensor) -> bool:
    """Whether all numbers are 0 and none of them learns; False where finding out costs much."""
    if type(numbers) is not Tensor or numbers.requires_grad or not concrete(numbers.device):
        return False
    if numbers.is_nested or not numbers.is_contiguous() or not numbers.numel():
        return False
    flat = numbers.view(-1)
    # nearly always the first tells; of all, the largest byte is found in a twentieth of the time that any() takes
    return flat[0].item() == 0 and flat.view(torch.uint8).amax().item() == 0


def zero_unseen(tensor: Tensor, allowed: Tensor | None) -> Tensor:
    """Keys or values with fully masked ones zeroed, so that NaN and inf in them have no effect.

    Shapes: tensor [batch, kv_heads, key_len, size], allowed broadcastable to [batch, heads, query_len, key_len].
    """
    if allowed is None:
        return tensor
    seen = allowed.any(dim=-2)
    kv_heads = tensor.shape[1]
    if seen.shape[1] not in (1, kv_heads):
        seen = seen.unflatten(1, (kv_heads, seen.shape[1] // kv_heads)).any(dim=2)
    return zero_unless(tensor, seen)


def zero_empty_queries(query: Tensor, allowed: Tensor | None) -> Tensor:
    """Queries with fully masked ones zeroed, so that NaN and inf in them have no effect.

    Shapes: query [batch, heads, query_len, head_dim], allowed as in `zero_unseen`.
    """
    return query if allowed is None else zero_unless(query, allowed.any(dim=-1))


def zero_unless(tensor: Tensor, where: Tensor) -> Tensor:
    """The tensor with zeros where the condition is False; not a copy if it is True everywhere, as far as can be known
    without a device sync."""
    if where.device.type == "cpu" and has_numbers(where) and bool(where.all()):
        return tensor
    return tensor.masked_fill(~where[..., None], 0.0)


def softmax(scores: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of scores [batch, heads, rows, columns], with a sink [heads] in the denominator.

    Not torch's softmax, because a fully masked row must give zeros, not NaN, also in the gradient.
    """
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    else:
        top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sink is not None:
        sink = sink.to(scores.dtype)[:, None, None]
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return weights / total, (top + total.log()).masked_fill(empty, -math.inf).squeeze(-1)


def exp(x: Tensor) -> Tensor:
    """e^x as 2^(x log2 e): on a CPU torch's exp2 is many times faster than its exp, above all where x is -inf."""
    return (x * LOG2_E).exp2()


def finite_lse(lse: Tensor) -> Tensor:
    """lse with 0 for fully masked queries, to subtract from scores: -inf - -inf would be NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off where it is on: the dtype of the query decides, and no score is rounded on the way."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def add_sink(output: Tensor, lse: Tensor, sink: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """A result with a sink added: one more key, with value 0.

    Shapes: output [batch, heads, query_len, value_dim], lse [batch, heads, query_len], sink [heads].

    Args:
        out: where the output is written; it may be `output`.
    """
    share = share_beside(sink, lse)[..., None].to(output.dtype)
    return torch.mul(output, share, out=out), torch.logaddexp(lse, sink.to(lse.dtype)[:, None])


def share_beside(sink: Tensor, lse: Tensor) -> Tensor:
    """The weight that all keys of a query have together beside a sink; any number for a fully masked query.

    Shapes: sink [heads], lse [batch, heads, query_len] of the keys alone -> [batch, heads, query_len].
    """
    return torch.sigmoid(lse.clamp(min=torch.finfo(lse.dtype).min) - sink.to(lse.dtype)[:, None])  # not -inf - -inf


def merge(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges the results of the same queries for other keys into output and log-sum-exp.

    lse = log(exp(lse) + exp(more_lse)),    output = output exp(old lse - lse) + more exp(more_lse - lse)
    """
    whole = torch.logaddexp(lse, more_lse)
    share = exp(more_lse - finite_lse(whole))[..., None]
    if output.dtype == share.dtype:
        output.lerp_(more.to(share.dtype), share)
    else:
        output.copy_(torch.lerp(output.to(share.dtype), more.to(share.dtype), share))
    lse.copy_(whole)

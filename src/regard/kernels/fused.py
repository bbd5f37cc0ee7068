"""torch's fused attention for the CPU: the operator beneath `scaled_dot_product_attention`, forward and backward.

The operator is private, so the behaviour relied on is checked once, on a small example (`FLASH`). Unlike the public
function, it returns the log-sum-exp, and its backward pass accepts the output and log-sum-exp of a whole row when its
keys are only part of that row.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.graphs import tracing

QUERIES_AT_A_TIME = ((768, 256), (192, 64), (0, 32))
"""From which query_len on the operator takes how many queries together."""

KEYS_AT_A_TIME = 512
"""Keys that the operator takes together."""

HALF = torch.bfloat16, torch.float16


def flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; output 0 and lse 0 for a fully masked query.

    Args:
        more: `attn_mask`, numbers to add, or `is_causal`.
    """
    causal = more.pop("is_causal", False)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, 0.0, causal, scale=scale, **more)  # type: ignore[no-any-return]


def flash_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *, scale: float,
    is_causal: bool = False, attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    tensors = grad_output, query, key, value, output, lse
    return operator(*tensors, 0.0, is_causal, attn_mask=attn_mask, scale=scale)  # type: ignore[no-any-return]


def is_as_expected() -> bool:
    """Whether this version of torch has the operator, and it behaves as expected for two queries that see one key each
    and one that is fully masked: forward and backward, in float32 and in bfloat16 with a float32 mask."""
    # one thread: torch starts its others once, and a process that is forked after that waits for them for ever
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]], dtype=dtype)
            key = torch.tensor([[[[3.0, 0.0], [0.0, 5.0]]]], dtype=dtype)
            mask = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0], [-math.inf, -math.inf]]).view(1, 1, 3, 2)
            output, lse = flash(query, key, key, scale=2.0, attn_mask=mask)
            given = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]], dtype=dtype)
            grads = flash_backward(given, query, key, key, output, lse, scale=2.0, attn_mask=mask)
            right = F.pad(key, (0, 0, 0, 1)), torch.tensor([[[6.0, 10.0, 0.0]]]), 0 * query, 0 * key, given[:, :, :2]
            if not all(torch.allclose(a, b.to(a.dtype)) for a, b in zip((output, lse, *grads), right, strict=True)):
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    finally:
        torch.set_num_threads(threads)
    return True


FLASH = is_as_expected()
"""If false, plain products replace the operator everywhere."""


def full_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """torch's function, with grouped heads too.

    Where the mask allows it, the query heads that share a kv head are stacked along the queries, so that keys and
    values are read once and not once per head. In half precision on a CPU a single row is computed twice: torch has
    fast products for two rows and slow ones for one.

    Args:
        attn_mask: as torch takes it, broadcastable to [batch, heads, query_len, key_len].
    """
    # torch's fused operator needs contiguous features; without them it falls back to computing all scores
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    (batch, heads, rows, size), kv_heads, key_len = query.shape, key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = bool(heads != kv_heads)  # torch.jit.trace compares sizes as tensors
    single = not tracing() and rows == 1
    if is_causal or not (attn_mask is None or single):
        if attn_mask is not None:
            attn_mask = attn_mask.expand(-1, -1, rows, key_len)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )
    if grouped:
        query = query.reshape(batch, kv_heads, group * rows, size)
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.reshape(-1, kv_heads, group, attn_mask.shape[3])
    twice = single and query.shape[2] == 1 and query.dtype in HALF and query.device.type == "cpu"
    if twice:
        query = query.repeat(1, 1, 2, 1)  # rows in the same place make gradients take twenty times as long
    if attn_mask is not None:
        attn_mask = attn_mask.expand(-1, -1, query.shape[2], key_len)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, False, scale=scale)
    if twice:
        output = output[:, :, :1]
    return output.reshape(batch, heads, rows, value.shape[3]) if grouped else output


def causal_scores(query_len: int, key_len: int) -> int:
    """Number of scores that the operator computes for one head under its causal mask.

    It leaves out the blocks of keys that none of the queries taken together may see.

    >>> causal_scores(512, 512) / 512 ** 2, causal_scores(1024, 1024) / 1024 ** 2, causal_scores(8192, 8192) / 8192 ** 2
    (1.0, 0.75, 0.53125)
    """
    step = next(step for least, step in QUERIES_AT_A_TIME if query_len >= least)
    count = 0
    for first in range(0, query_len, step):
        stop = min(first + step, query_len)
        seen = -(-stop // KEYS_AT_A_TIME) * KEYS_AT_A_TIME
        count += (stop - first) * min(seen, key_len)
    return count

"""torch's `scaled_dot_product_attention`, where it computes the same as regard's definition.

It has no softcap, no sink and no log-sum-exp, and its dropout is not reproducible; its causal mask is aligned top-left
(regard's offset 0). Any other mask is passed as a tensor of query_len x key_len: exact, but slow. Two things that
torch leaves to the caller are done here: fully masked keys are zeroed, since NaN in them would reach the output, and a
bias is never rounded to a lower precision.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.graphs import exporting, tracing, whole
from regard.kernels.call import Call, Kernel, all_scores
from regard.kernels.fused import FLASH, causal_scores, full_attention
from regard.kernels.hidden import hidden_in_call
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal


def cannot(call: Call) -> str | None:
    """Why torch's function does not support a call."""
    scoring = call.scoring
    if call.wants_lse:
        return "torch's scaled_dot_product_attention does not return lse"
    if scoring.additive is not None:
        return "torch's scaled_dot_product_attention has no additive similarity"
    if scoring.softcap is not None:
        return "torch's scaled_dot_product_attention has no softcap"
    if scoring.sink is not None:
        return "torch's scaled_dot_product_attention has no sink"
    if call.dropout is not None:
        return "torch's dropout cannot be reproduced from a seed and indices"
    if scoring.bias is not None and call.query.dtype in (torch.bfloat16, torch.float16):
        return f"the bias would be rounded to {call.query.dtype}"
    return None


def run(call: Call) -> tuple[Tensor, None]:
    """One call of torch's function."""
    scoring = call.scoring
    query, key, value = call.query, call.key, call.value
    mask, bias = scoring.mask, scoring.bias
    causal, attn_mask, allowed = False, None, None
    if bias is None and (mask is None or mask is EVERYTHING):
        pass
    elif bias is None and is_top_left_causal(mask):
        causal = True
        if scoring.grid.key_len > scoring.grid.query_len:  # no query sees later keys
            key, value = key[:, :, : scoring.grid.query_len], value[:, :, : scoring.grid.query_len]
    else:
        hidden = hidden_in_call(scoring)
        if hidden is not None:
            allowed = hidden.allowed
            query, key, value = hidden.seeing(query), hidden.seen(key), hidden.seen(value)
            attn_mask = allowed if tracing() else hidden.numbers(query.dtype)
        if bias is not None:
            queries, keys = (whole(length, scoring.grid.device) for length in scoring.grid[2:4])
            attn_mask = scoring.biases(queries, keys, query.dtype)
            if allowed is not None:
                attn_mask = attn_mask.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(-1, -1, scoring.grid.query_len, scoring.grid.key_len)
    if attn_mask is None:
        return full_attention(query, key, value, scale=scoring.scale, is_causal=causal), None
    query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    grouped = bool(query.shape[1] != key.shape[1])  # torch.jit.trace compares sizes as tensors
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, False, scale=scoring.scale, enable_gqa=grouped
    )
    if exporting() and allowed is not None:  # a fully masked row is NaN where the graph will run, but 0 in regard
        output = output.masked_fill(~allowed.any(dim=-1)[..., None], 0.0)
    return output, None


def num_scores(call: Call) -> int:
    """All of them; of a causal square what torch's fused operator for the CPU leaves in."""
    grid, scoring = call.scoring.grid, call.scoring
    fused = FLASH and grid.device.type == "cpu" and call.query.shape[3] == call.value.shape[3]
    if not fused or scoring.bias is not None or not is_top_left_causal(scoring.mask):
        return all_scores(call)
    return grid.batch * grid.heads * causal_scores(grid.query_len, min(grid.query_len, grid.key_len))


def quadratic_numbers(call: Call) -> int:
    """The mask or bias tensor; and all scores where torch cannot use its fused operator."""
    scoring, grid = call.scoring, call.scoring.grid
    scores = grid.query_len * grid.key_len
    fused = call.query.shape[-1] == call.value.shape[-1]
    numbers = 0
    if scoring.bias is not None or not (scoring.mask_or_everything is EVERYTHING or is_top_left_causal(scoring.mask)):
        corner = range(min(1, grid.query_len)), range(min(1, grid.key_len))
        parts = [scoring.allowed(*corner)]
        if scoring.bias is not None:
            parts.append(scoring.biases(*corner, call.query.dtype))
        for part in parts:
            if part is not None:
                numbers += scores * part.shape[0] * part.shape[1]
                fused = fused and not part.requires_grad
    return numbers if fused else numbers + 2 * scores * grid.batch * grid.heads


def peak_bytes(call: Call) -> int:
    """The quadratic tensors, and torch's log-sum-exp."""
    grid = call.scoring.grid
    return quadratic_numbers(call) * max(4, call.query.element_size()) + 4 * grid.batch * grid.heads * grid.query_len


KERNEL = Kernel("sdpa", cannot, run, num_scores, quadratic_numbers, peak_bytes)

"""torch's own `scaled_dot_product_attention`, where its meaning equals ours.

It has no softcap, no sink and no log-sum-exp, and its dropout cannot be made again; its causal mask is aligned to the
top left (our offset 0). Any other mask is handed over as a whole tensor of query_len x key_len: exact, and slow. Two
things are taken care of here because torch does not: keys that no query may see are zeroed, since NaN in them would
reach the output, and a bias is only handed over in the precision it was given in.
"""

import math

import torch
import torch.nn.functional as F

from regard.kernels.call import Call, Kernel
from regard.masks import EVERYTHING, Band
from regard.reference import AttentionOutput
from regard.scores import hide


def cannot(call: Call) -> str | None:
    """Why torch's function would not compute what was asked."""
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
        return "torch's dropout cannot be made again from a seed and a place"
    if scoring.bias is not None and call.query.dtype in (torch.bfloat16, torch.float16):
        return f"the bias would be rounded to {call.query.dtype}"
    return None


def run(call: Call) -> AttentionOutput:
    """One call of torch's function."""
    query, key, value, scoring = call.query, call.key, call.value, call.scoring
    mask, bias = scoring.mask, scoring.bias
    causal, attn_mask = False, None
    if bias is None and (mask is None or mask is EVERYTHING):
        pass
    elif bias is None and _is_top_left_causal(mask):
        causal = True
        if scoring.grid.key_len > scoring.grid.query_len:  # later keys are seen by nobody
            key, value = key[:, :, : scoring.grid.query_len], value[:, :, : scoring.grid.query_len]
    else:
        queries, keys = range(scoring.grid.query_len), range(scoring.grid.key_len)
        attn_mask = allowed = scoring.allowed(queries, keys)
        key, value = hide(key, allowed), hide(value, allowed)
        if bias is not None:
            attn_mask = scoring.biases(queries, keys, query.dtype)
            if allowed is not None:
                attn_mask = attn_mask.masked_fill(~allowed, -math.inf)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(-1, -1, len(queries), len(keys))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, causal, scale=scoring.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return AttentionOutput(output, output)


def square(call: Call) -> int:
    """A mask or bias is built whole; and torch itself builds all scores where its fused form does not fit."""
    query, value, scoring = call.query, call.value, call.scoring
    grid = scoring.grid
    cells = grid.query_len * grid.key_len
    plain = scoring.bias is None and (
        scoring.mask is None or scoring.mask is EVERYTHING or _is_top_left_causal(scoring.mask)
    )
    numbers = 0 if plain else cells * grid.batch
    if query.shape[-1] != value.shape[-1] or (scoring.bias is not None and torch.is_grad_enabled()):
        numbers += 2 * cells * grid.batch * grid.heads
    return numbers


def _is_top_left_causal(mask: object) -> bool:
    if not isinstance(mask, Band) or not isinstance(mask.offset, int):
        return False
    return mask.before is None and mask.after == 0 and mask.offset == 0


KERNEL = Kernel("dense", cannot, run, square)

"""torch's fused attention for the CPU: the operator beneath `scaled_dot_product_attention`, forward and backward.

The operator is private, so the behaviour relied on is checked once, on a small example (`FLASH`). Unlike the public
function, it returns the log-sum-exp, and its backward pass accepts the output and log-sum-exp of a whole row when its
keys are only part of that row.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import processor
from regard.biases import Given
from regard.graphs import concrete, tracing
from regard.kernels.autograd import differentiable_twice
from regard.kernels.call import Call, learns
from regard.masks import EVERYTHING

QUERIES_AT_A_TIME = ((768, 256), (192, 64), (0, 32))
"""From which query_len on the operator takes how many queries together."""

SHORT = QUERIES_AT_A_TIME[1][0]
"""Queries below which it multiplies the fewest at a time, and takes up to twice as long for the gradients in half
precision as in float32. Rows "documents of 20 to 200" and "window 256" of features.py in bfloat16."""

KEYS_AT_A_TIME = 512
"""Keys that the operator takes together."""

SCORES_BY_AMX = 4
"""Scores in bfloat16 that the operator computes with AMX in the time of one without. Rows "window 256" and "bias,
dense, causal" of features.py."""

HALF = torch.bfloat16, torch.float16


def speed(dtype: torch.dtype) -> int:
    """How many times as many scores are computed in the time that is taken by something else, such as a call."""
    return SCORES_BY_AMX if processor.AMX and dtype is torch.bfloat16 else 1


def finished_table(call: Call) -> bool:
    """Whether the bias is all that is added, and torch can read it in place: a number for each query and key, in the
    query's dtype."""
    scoring = call.scoring
    if not isinstance(scoring.bias, Given) or scoring.mask_or_everything is not EVERYTHING:
        return False
    numbers = scoring.bias.numbers
    return numbers.shape[2:] == (scoring.grid.query_len, scoring.grid.key_len) and numbers.dtype == call.query.dtype


def reads_a_table(call: Call) -> bool:
    """Whether the call is torch's function with a finished table, without a copy of it and without its gradient."""
    if not call.concrete or call.bias_learns:
        return False
    return call.query.shape[3] == call.value.shape[3] and finished_table(call)


def flash(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **more: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; output 0 and lse 0 for a fully masked query.

    Args:
        more: `attn_mask`, numbers to add, or `is_causal`.
    """
    causal = more.pop("is_causal", False)
    operator = torch._scaled_dot_product_flash_attention_for_cpu  # called in 2/3 of the time of that in torch.ops.aten
    rows = Rows(query, key, more.get("attn_mask"), causal)
    if rows.as_they_are:
        return operator(query, key, value, 0.0, causal, scale=scale, **more)
    output, lse = operator(rows.given(query), key, value, 0.0, False, scale=scale, attn_mask=rows.mask)
    return rows.back(output), rows.back(lse)


def flash_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *, scale: float,
    is_causal: bool = False, attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, in float32 if `learns_in_full`."""
    if learns_in_full(query.dtype, query.shape[2], key.shape[2]):
        five = grad_output, query, key, value, output
        grad_output, query, key, value, output = (tensor.float() for tensor in five)
        attn_mask = None if attn_mask is None else attn_mask.float()
    return _gradients(grad_output, query, key, value, output, lse, scale, is_causal, attn_mask)


def _gradients(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, scale: float,
    is_causal: bool, attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    by_head = adds_rounded(query, key)
    if by_head:
        kv_heads, (key, value) = key.shape[1], (for_each_head(tensor, query.shape[1]) for tensor in (key, value))
    rows = Rows(query, key, attn_mask, is_causal)
    if rows.as_they_are:
        tensors = grad_output, query, key, value, output, lse
        grad, *others = operator(*tensors, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
        return grad, *(t.unflatten(1, (kv_heads, -1)).sum(2) if by_head else t for t in others)
    grad_output = rows.given(grad_output)
    if rows.twice:
        grad_output[:, :, 1:] = 0.0
    tensors = grad_output, rows.given(query), key, value, rows.given(output), rows.given(lse)
    grad, *others = operator(*tensors, 0.0, False, attn_mask=rows.mask, scale=scale)
    return rows.back(grad), *others


def torch_imitates(dtype: torch.dtype, *, backward: bool) -> bool:
    """Whether the operator is slow in a dtype for which the processor has no instructions."""
    in_float16 = dtype == torch.float16 and not processor.FLOAT16
    return in_float16 or (dtype == torch.bfloat16 and not processor.BFLOAT16 and backward)


def learns_in_full(dtype: torch.dtype, queries: int, keys: int) -> bool:
    """Whether the operator takes less time for the gradients of float32 copies than of what is in half precision.

    Of few queries it multiplies so few at a time that rounding every product takes longest, with AMX and without.
    """
    few = dtype in HALF and queries < SHORT and keys <= KEYS_AT_A_TIME
    return few or torch_imitates(dtype, backward=True)


def adds_rounded(query: Tensor, key: Tensor) -> bool:
    """Whether the gradients of a key would be sums over the heads that share it, rounded as each is added.

    In half precision the operator rounds the gradients of keys and values after every block of queries. With the heads
    of a group that is group times as many blocks as a key of their own has.
    """
    (heads, rows), half = query.shape[1:3], query.dtype in HALF
    return bool(half and heads != key.shape[1] and rows > 1 and query.device.type == "cpu")


def for_each_head(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values of shared heads, copied for each of the query heads."""
    batch, kv_heads, *rest = tensor.shape
    return tensor[:, :, None].expand(batch, kv_heads, heads // kv_heads, *rest).flatten(1, 2)


class Rows:
    """How the rows of queries are handed to torch's operator, which multiplies the matrix of one query head at a time.

    Where the mask allows it, the query heads that share a kv head are stacked along the queries, so that keys and
    values are read once and not once per head. In half precision without AMX a single row is computed twice: torch has
    fast products for two rows and slow ones for one; copied, since it has slow gradients for two rows in one place.

    Attributes:
        as_they_are: whether nothing changes. single: whether there is one row. grouped: whether query heads share kv
            heads. twice: whether the only row is given twice. mask: in the new form.
    """

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool = False) -> None:
        (batch, heads, rows, _), kv_heads = query.shape, key.shape[1]
        single = self.single = not tracing() and rows == 1
        self.grouped = bool(heads != kv_heads)  # torch.jit.trace compares sizes as tensors
        self.as_they_are, self.mask, self.twice = True, mask, False
        if causal or not (single or self.grouped):
            return
        folds = mask is None or single or (not tracing() and mask.shape[1] == mask.shape[2] == 1)
        grouped = folds and self.grouped
        group = heads // kv_heads if grouped else 1
        slow = query.dtype in HALF and query.device.type == "cpu" and not processor.AMX
        self.twice = single and group == 1 and slow
        self.as_they_are = not (grouped or self.twice)
        if self.as_they_are:
            return
        self._sizes, self._stacked = (batch, heads, rows), (batch, kv_heads, group * rows)
        self.mask = None if mask is None else self.masking(mask)

    def masking(self, mask: Tensor) -> Tensor:
        """A mask in the new form: of a row for all heads of a group, as it is, since torch repeats it."""
        if self._stacked == self._sizes or mask.shape[1] == 1:
            return mask
        return mask.reshape(-1, *self._stacked[1:], mask.shape[3])

    def given(self, tensor: Tensor) -> Tensor:
        """A tensor [batch, heads, rows, ...] as the operator gets it."""
        tensor = tensor.reshape(*self._stacked, *tensor.shape[3:]) if self._stacked != self._sizes else tensor
        return torch.cat([tensor, tensor], dim=2) if self.twice else tensor

    def back(self, result: Tensor) -> Tensor:
        """What it returns, with the rows of the call."""
        result = result.narrow(2, 0, self._stacked[2]) if self.twice else result
        return result.reshape(*self._sizes, *result.shape[3:]) if self._stacked != self._sizes else result


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
            grads = _gradients(given, query, key, key, output, lse, 2.0, False, mask)
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
    attn_mask: Tensor | None = None,
    *,
    scale: float,
    is_causal: bool = False,
) -> Tensor:
    """torch's function, with grouped heads too, and with gradients of gradients.

    Args:
        attn_mask: as torch takes it, broadcastable to [batch, heads, query_len, key_len].
    """
    query, key, value = with_whole_features(query, key, value)
    if torch.is_grad_enabled() and any(map(learns, (query, key, value))) and adds_rounded(query, key):
        key, value = (for_each_head(tensor, query.shape[1]) for tensor in (key, value))
    rows = Rows(query, key, attn_mask, is_causal)
    given, gqa = query if rows.as_they_are else rows.given(query), rows.grouped and rows.as_they_are
    output = F.scaled_dot_product_attention(given, key, value, rows.mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    if output.requires_grad and concrete(output.device):
        output = differentiable_twice(output)
    return output if rows.as_they_are else rows.back(output)


def prepared(call: Call, *, is_causal: bool = False) -> Callable[..., Tensor]:
    """`full_attention` for query, key, value and attn_mask of calls of the same form, with the same scale; of one query
    with any key_len."""
    scale, rows = call.scoring.scale, Rows(call.query, call.key, None, is_causal)
    learning = call.learns and call.concrete

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
            query, key, value = with_whole_features(query, key, value)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale)
        return differentiable_twice(output) if learning else output

    if rows.as_they_are and not rows.grouped:
        return attend
    if rows.as_they_are or not rows.single:  # then the mask decides, too
        return partial(full_attention, scale=scale, is_causal=is_causal)

    def attend_folded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        mask = None if attn_mask is None else rows.masking(attn_mask)
        return rows.back(attend(rows.given(query), key, value, mask))

    return attend_folded


def with_whole_features(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as torch's operator needs them, the features of a head one after another; without that, torch falls
    back to computing all scores."""
    return whole_features(query), whole_features(key), whole_features(value)


def whole_features(tensor: Tensor) -> Tensor:
    """The same of one tensor."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


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

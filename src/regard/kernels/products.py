"""Attention as two matrix products and a softmax between them, for rows of scores that stay in the cache.

torch's flash attention for the CPU takes keys in blocks and multiplies small matrices. That pays where rows of scores
are long. Where they are short, a few of them at a time stay in the cache by themselves, and the products are larger:

    scores = scale query key^T + mask,    output = softmax(scores) value

A causal square is computed a few rows at a time, each with the keys up to its own end. The gradients are, with
p = exp(scores - lse) and delta = sum(output * doutput) - dlse (Dao et al. 2022, appendix B.4),

    dvalue = p^T doutput,    ds = p (doutput value^T - delta),    dquery = scale ds key,    dkey = scale ds^T query

Scores are float32 at least, whatever the call's dtype. Weights and ds are rounded to bfloat16 before they are
multiplied by bfloat16, as torch's operator does too, where the processor is faster at that; else all is float32.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.numerics import upcast

CELLS = 1 << 19
"""Scores held at a time: what stays in a processor's cache."""

ROWS = 64
"""Queries of each head at a time in a causal square: more of them compute more that is hidden."""

MKL = torch.backends.mkl.is_available()
"""Whether torch multiplies float32 by Intel's library, with which all was measured."""

_ABLE = torch.cpu.get_capabilities()
FLOAT16 = bool(_ABLE.get("avx512_fp16") or _ABLE.get("amx_fp16"))
BFLOAT16 = bool(_ABLE.get("avx512_bf16") or _ABLE.get("amx_bf16"))
"""Whether the processor has instructions for products of these; it is faster at them than at float32."""
AMX = bool(_ABLE.get("amx_tile"))
"""Whether it multiplies whole tiles of bfloat16, in which case torch's operator is another one."""

SQUARES = range(320, 641)
"""Lengths of causal squares that torch computes nearly the whole of: it takes keys 512 at a time."""


def suit(dtype: torch.dtype, stack: int, rows: int, keys: int, *, causal: bool, backward: bool) -> bool:
    """Whether this takes less time than torch's operator.

    Measured on one x86-64 processor that has instructions for bfloat16, but not AMX; where that differs, it is no.

    Args:
        stack: kv heads, of all batch rows, that stand as one axis; rows: queries of each, of all heads that share it.
    """
    if not MKL or rows < ROWS:
        return False
    scores = stack * keys * (ROWS if causal else rows)
    if dtype == torch.float16 and not FLOAT16:
        return scores >= 1 << 15  # torch's operator is slow at numbers that the processor cannot multiply
    if stack < 8 or scores < 3 << 16:
        return False
    if dtype == torch.bfloat16 and BFLOAT16 and not AMX:
        return keys <= (512 if backward and (causal or rows > 2 * ROWS) else 2048)
    return causal and dtype == torch.float32 and keys in SQUARES


def cells_of_square(length: int) -> int:
    """Scores computed for a causal square."""
    return sum((stop - start) * stop for start, stop in _blocks(length, ROWS))


def _blocks(length: int, rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + rows, length)) for start in range(0, length, rows))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool,
    output: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes output and log-sum-exp; both are NaN for a query that sees nothing.

    Args:
        query, output: [batch, heads, query_len, size], whatever their strides; lse: [batch, heads, query_len].
        key, value: [batch, kv_heads, key_len, size].
        mask: numbers to add to scores, float32 at least: [1 or batch, 1 or heads, query_len, key_len].
        causal: query i sees the first i + 1 keys, of as many; then there is no mask.
    """
    by_query, later = [query, output] if lse is None else [query, output, lse], _later(query, causal)
    for (q, into, *into_lse), (k, v), added, space in _pieces(by_query, [key, value], mask, causal, 1):
        scores = _scores(q, k, added, later, scale, space[0])
        top = scores.amax(-1) if into_lse else None
        weights = torch.softmax(scores, -1, out=scores)
        if top is not None:  # the largest weight is exp(top - lse)
            into_lse[0].copy_(top.sub_(weights.amax(-1).log_()).view_as(into_lse[0]))
        weights, v = _factors(weights, v)
        into.copy_((weights @ v).view_as(into))


def gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    lse: Tensor,
    delta: Tensor,
    scale: float,
    causal: bool,
    grads: tuple[Tensor, Tensor, Tensor],
    overlap: bool,
) -> None:
    """Adds to the gradients of query, key and value.

    Args:
        lse, delta: [batch, heads, query_len]; where lse is -inf it has to be replaced by something finite.
        grads: those of query, key and value, float32 at least.
        overlap: whether batch rows share memory in the last two of them.
        others: as in `attend`.
    """
    by_query, by_key = [query, grad_output, lse, delta, grads[0]], [key, value, *grads[1:]]
    later = _later(query, causal)
    for of_query, of_key, added, space in _pieces(by_query, by_key, mask, causal, 2, overlap):
        (q, grad_out, sums, inner, into), (k, v, to_key, to_value) = of_query, of_key
        scores = _scores(q, k, added, later, scale, space[0])
        weights = scores.sub_(sums.flatten(1)[..., None]).exp_()
        grad_out = grad_out.flatten(1, 2)
        grad_weights = torch.bmm(upcast(grad_out), upcast(v).mT, out=space[1][: weights.numel()].view_as(weights))
        grad_scores = grad_weights.sub_(inner.flatten(1)[..., None]).mul_(weights)
        weights, grad_out = _factors(weights, grad_out)
        to_value += weights.mT @ grad_out
        grad_scores, q, k = _factors(grad_scores, q.flatten(1, 2), k)
        into.add_((grad_scores @ k).view_as(into), alpha=scale)
        to_key.add_(grad_scores.mT @ q, alpha=scale)


Piece = tuple[list[Tensor], list[Tensor], Tensor | None, Tensor]


def _pieces(
    by_query: Sequence[Tensor],
    by_key: Sequence[Tensor],
    mask: Tensor | None,
    causal: bool,
    spaces: int,
    overlap: bool = False,
) -> Iterator[Piece]:
    """A call in pieces of at most `CELLS` scores, if one head's rows are not more.

    Yields what is there by query, as [stack, group, rows, ...], where a group are the heads
    that share a kv head; by key, as [stack, keys, ...]; the mask, as [stack, group * rows, keys]; room for scores.
    """
    batch, heads, queries = by_query[0].shape[:3]
    kv_heads, keys = by_key[0].shape[1:3]
    group = heads // kv_heads
    by_query = [tensor.unflatten(1, (kv_heads, group)) for tensor in by_query]
    if mask is not None:
        mask = mask.expand(batch, heads, -1, -1).unflatten(1, (kv_heads, group))
    rows = ROWS if causal else max(ROWS, min(queries, CELLS // (4 * keys * group)))
    most = max(CELLS, group * min(rows, queries) * keys)
    space = torch.empty(spaces, most, dtype=upcast(by_query[0][:0]).dtype)
    for start, stop in _blocks(queries, rows):
        keys = stop if causal else keys
        tensors = [tensor[:, :, :, start:stop] for tensor in by_query] + [tensor[:, :, :keys] for tensor in by_key]
        if mask is not None:
            tensors.append(mask[:, :, :, start:stop].flatten(2, 3))
        together = max(1, CELLS // (group * (stop - start) * keys))
        for stack in _stacks(tensors, overlap):
            for at in range(0, len(stack[0]), together):
                piece = [tensor[at : at + together] for tensor in stack]
                added = None if mask is None else piece.pop()
                yield piece[: len(by_query)], piece[len(by_query) :], added, space


def _stacks(tensors: list[Tensor], overlap: bool) -> list[list[Tensor]]:
    """Batch and heads as one axis, without a copy: if strides do not allow it, for one batch row or head at a time."""
    batch, heads = tensors[0].shape[:2]
    if batch == 1 or overlap:
        return [[tensor[row] for tensor in tensors] for row in range(batch)]
    if heads == 1:
        return [[tensor[:, 0] for tensor in tensors]]
    if all(tensor.stride(0) == heads * tensor.stride(1) for tensor in tensors):
        return [[tensor.flatten(0, 1) for tensor in tensors]]
    if heads >= batch:
        return [[tensor[row] for tensor in tensors] for row in range(batch)]
    return [[tensor[:, head] for tensor in tensors] for head in range(heads)]


def _later(query: Tensor, causal: bool) -> Tensor | None:
    """What hides later keys in the rows of a causal square, as numbers to add."""
    if not causal:
        return None
    return torch.full((ROWS, ROWS), -math.inf, dtype=upcast(query[:0]).dtype).triu_(1)


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, later: Tensor | None, scale: float, space: Tensor
) -> Tensor:
    """[stack, group * rows, keys]; in a causal square the last keys are the rows' own."""
    stack, group, rows, _ = query.shape
    query, key = upcast(query.flatten(1, 2)), upcast(key).mT
    keys = key.shape[2]
    scores = space[: stack * group * rows * keys].view(stack, group * rows, keys)
    if mask is not None:
        return torch.baddbmm(mask, query, key, alpha=scale, out=scores)
    torch.baddbmm(scores, query, key, beta=0, alpha=scale, out=scores)
    if later is not None:
        scores[..., keys - rows :].unflatten(1, (group, rows)).add_(later[:rows, :rows])
    return scores


def _factors(first: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Factors of a product in one dtype: bfloat16 where that is what was given and what the processor is fast at."""
    if BFLOAT16 and others[0].dtype == torch.bfloat16:
        return (first.bfloat16(), *others)
    return (first, *map(upcast, others))

"""All scores of a call as one stack of matrices, and its gradients from the weights that were kept.

    scores = softcap(scale query key^T) + added,    output = share dropped(softmax(scores)) value

where a sink leaves the keys the share 1 / (1 + exp(sink - lse)), a number for each query. The gradients are, with w the
weights before dropout, m the dropout mask over 1 - dropout, and g = share doutput (Dao et al. 2022, appendix B.4),

    dvalue = (m w)^T g,          ds = w (m g value^T - share (sum(output doutput) - dlse))
    dquery = scale ds key,       dkey = scale ds^T query

of which the sum, where there is no sink, is that of w m g value^T over the keys, as in the gradient of a softmax.

Autograd computes the same in twice as many operators, all by the same library, which may be the slower one
(`regard.matmul`). It is left to do so where a gradient of these gradients is wanted, and where there is so little to
compute beside the products that a function of Python takes longer (`formula`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import faint
from regard.graphs import tracing, transformed
from regard.kernels.call import learns
from regard.kernels.hidden import Hidden, fold
from regard.kernels.scratch import MAX_NUMBERS, scratch
from regard.matmul import baddbmm, bmm
from regard.numerics import in_one_dtype, wide
from regard.scores import Scoring


class Fixed(NamedTuple):
    """What a call is given beside the tensors that may learn.

    Attributes:
        hidden: what mask and bias hide. added: what they add, in the layout of `fold`; None for nothing, and where a
            bias learns. kept: 0 for weights that are dropped, 1 / (1 - dropout) for others, likewise.
        keeps: whether the weights are used later, for the gradients; otherwise they are gone after the call.
        adds_up: whether products are sums that a graph fuses with all else.
    """

    scoring: Scoring
    hidden: Hidden | None
    added: Tensor | None
    kept: Tensor | None
    wants_lse: bool
    keeps: bool
    adds_up: bool = False


class Result(NamedTuple):
    """What is computed of a stack.

    Attributes:
        output: [stack, rows, value_dim]. lse: [stack, rows, 1] with the sink in it, if wanted.
        weights: [stack, rows, keys], before dropout, adding up to 1.
        share: [stack, rows, 1], that of the keys beside a sink. capped: sigmoid(2 score / softcap), with a softcap.
    """

    output: Tensor
    lse: Tensor | None
    weights: Tensor
    share: Tensor | None
    capped: Tensor | None


def attend(
    fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, biases: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Output [batch, heads, rows, value_dim] in the dtype of the query, and lse [batch, heads, rows].

    Args:
        biases: those that learn, broadcastable to the scores.
    """
    if _wants_new_tensors(query, key, value, sink, biases) or query.device.type != "cpu":
        return _shaped(_in_full(fixed, query, key, value, sink, biases), fixed.scoring.grid[:3], query.dtype)
    return _piece_by_piece(fixed, query, key, value, sink)


def _in_full(
    fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, biases: Tensor | None
) -> Result:
    """All scores at once, in float32 or wider, by operators of which each has a gradient."""
    scoring, kv_heads = fixed.scoring, key.shape[1]
    q, k, v = (_stacked(tensor, kv_heads) for tensor in (query, key, value))
    added = fixed.added if biases is None else added_by(fixed.hidden, biases, scoring, kv_heads, q.dtype)
    new = _wants_new_tensors(query, key, value, sink, biases)
    space = None if new else scratch(q, q.dtype, (*q.shape[:2], k.shape[1]))[0]
    return _result(fixed, kv_heads, q, k, v, sink, added, fixed.kept, space)


def _wants_new_tensors(*given: Tensor | None) -> bool:
    """Whether operators are recorded, for gradients of these, a transform or a graph: none may write over what another
    one made."""
    return (torch.is_grad_enabled() and any(map(learns, given))) or transformed() or tracing()


def formula(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale query key^T) value, in torch's operators, which have gradients of any order. Rows "1 head of 512"
    of features.py."""
    kv_heads, sizes = key.shape[1], query.shape[:3]
    if sizes[1] != kv_heads:  # as `_stacked`
        query = query.reshape(sizes[0], kv_heads, sizes[1] // kv_heads * sizes[2], query.shape[3])
    output = torch.softmax(query @ key.mT * scale, -1) @ value
    return output if sizes[1] == kv_heads else output.view(*sizes, value.shape[3])


def _piece_by_piece(
    fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A few batch indices at a time, in memory that is kept: what a piece needs stays in the cache."""
    (batch, heads, rows, size), (kv_heads, keys), dtype = query.shape, key.shape[1:3], wide(query.dtype)
    widened = query.dtype != dtype
    numbers = heads * rows * keys + widened * (heads * rows + kv_heads * keys) * size
    together = max(1, MAX_NUMBERS // max(1, numbers))
    if batch <= together:
        return _piece(fixed, query, key, value, sink, slice(0, batch))
    output = query.new_empty(batch, heads, rows, value.shape[3])
    lse = query.new_empty(batch, heads, rows, dtype=dtype) if fixed.wants_lse else None
    together = -(-batch // -(-batch // together))  # in pieces of one size
    for start in range(0, batch, together):
        part = slice(start, min(start + together, batch))
        output[part], of_part = _piece(fixed, query[part], key[part], value[part], sink, part)
        if lse is not None and of_part is not None:
            lse[part] = of_part
    return output, lse


def _piece(
    fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, part: slice
) -> tuple[Tensor, Tensor | None]:
    """Output and lse of some batch indices. What is in half precision is widened to compute the scores, and weights are
    rounded to it where the processor multiplies faster then."""
    (batch, heads, rows, _), (kv_heads, keys), dtype = query.shape, key.shape[1:3], wide(query.dtype)
    scores = batch * kv_heads, heads // kv_heads * rows, keys
    if query.dtype == dtype:
        (space,) = scratch(query, dtype, scores)
    else:
        space, *copies = scratch(query, dtype, scores, query.shape, key.shape)
        query, key = (copy.copy_(tensor) for copy, tensor in zip(copies, (query, key), strict=True))
    stacks = _stack_of(query, kv_heads), _stack_of(key, kv_heads), _stack_of(value, kv_heads)
    added, kept = _rows_of(fixed.added, kv_heads, part), _rows_of(fixed.kept, kv_heads, part)
    return _shaped(_result(fixed, kv_heads, *stacks, sink, added, kept, space), (batch, heads, rows), value.dtype)


def _outputs(weights: Tensor, kept: Tensor | None, value: Tensor, adds_up: bool) -> Tensor:
    """Sums of values, weighted by what dropout keeps."""
    weights = weights if kept is None else weights * kept
    if adds_up:
        if kept is not None:  # so that a graph writes them, and makes no hash for every number of a product
            weights = weights.as_strided(weights.shape, weights.stride())
        return (weights[..., None] * value.to(weights.dtype)[:, None]).sum(-2)
    return bmm(*in_one_dtype(weights, value))


def _hidden_by(added: Tensor, scores: Tensor) -> Tensor:
    """The scores with what is added; where that is -inf, whatever they are."""
    return torch.where(added == -math.inf, added, scores + added)


def _of_rows(sink: Tensor, scores: Tensor, kv_heads: int, fixed: Fixed) -> Tensor:
    """The logit of each row of a stack of scores: [stack, rows, 1]."""
    heads, rows = fixed.scoring.grid[1:3]
    of_all = sink.to(scores.dtype)[:, None].expand(len(scores) // kv_heads, heads, rows)
    return of_all.reshape(*scores.shape[:2], 1)


def _beside_a_sink(scores: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of keys beside one more of these scores, and lse: a graph fuses this with the scores."""
    top = torch.maximum(scores.amax(-1, keepdim=True), logit).detach()  # which cancels
    powers = torch.exp(scores - top)
    total = powers.sum(-1, keepdim=True) + torch.exp(logit - top)
    return powers / total, top + torch.log(total)


def _rows_of(numbers: Tensor | None, kv_heads: int, part: slice) -> Tensor | None:
    """The part of some batch indices of numbers in the layout of `fold`."""
    if numbers is None or len(numbers) in (1, kv_heads):  # the same for all of them
        return numbers
    return numbers[part.start * kv_heads : part.stop * kv_heads]


def _result(
    fixed: Fixed, kv_heads: int, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, added: Tensor | None,
    kept: Tensor | None, space: Tensor | None,
) -> Result:  # fmt: skip
    """What is computed of stacks of queries, keys and values.

    Args:
        added, kept: as in `Fixed`, for these stacks. space: where scores are written; None for new tensors.
    """
    scoring, softcap, capped, adds_up = fixed.scoring, fixed.scoring.softcap, None, fixed.adds_up
    factor = scoring.scale if softcap is None else 2.0 * scoring.scale / softcap
    if added is not None and len(added) not in (1, len(query)):  # the same for all batch indices
        if space is None or softcap is not None:
            added = added.repeat(len(query) // kv_heads, 1, 1)
        else:
            added = space.unflatten(0, (-1, kv_heads)).copy_(added).flatten(0, 1)
    if adds_up:
        scores = (query[:, :, None] * key[:, None]).sum(-1) * factor
        scores = scores if added is None or softcap is not None else _hidden_by(added, scores)
    elif softcap is None and added is not None:
        scores = baddbmm(added, query, key.mT, alpha=factor, out=space)
    elif space is not None:  # without another pass over the scores
        scores = baddbmm(space, query, key.mT, beta=0.0, alpha=factor, out=space)
    else:
        scores = bmm(query, key.mT) * factor
    if softcap is not None:  # softcap * tanh(x) = softcap * (2 sigmoid(2 x) - 1), which takes less time
        capped = torch.sigmoid(scores, out=None if space is None or fixed.keeps else scores)
        scores = torch.mul(capped, 2.0 * softcap, out=space)
        scores = torch.sub(scores, softcap, out=space)
        if added is not None:
            scores = _hidden_by(added, scores) if adds_up else torch.add(scores, added, out=space)
    if adds_up and sink is not None and scores.shape[2]:
        weights, lse = _beside_a_sink(scores, _of_rows(sink, scores, kv_heads, fixed))
        return Result(_outputs(weights, kept, value, adds_up), lse, weights, None, capped)
    top = scores.amax(-1, keepdim=True) if (sink is not None or fixed.wants_lse) and scores.shape[2] else None
    weights = torch.softmax(scores, -1, out=None if space is None or fixed.keeps else scores)
    if space is not None and scoring.bias is not None:
        weights = faint.without_faint(weights)
    output = _outputs(weights, kept, value, adds_up)
    if sink is None and not fixed.wants_lse:
        return Result(output, None, weights, None, capped)
    # the largest weight is exp(top - lse); torch.logsumexp takes four times as long
    lse = scores.sum(-1, keepdim=True).sub(math.inf) if top is None else top - weights.amax(-1, keepdim=True).log()
    if sink is None:
        return Result(output, lse, weights, None, capped)
    logit = _of_rows(sink, scores, kv_heads, fixed)
    share = torch.sigmoid(lse - logit)
    return Result(output * share, torch.logaddexp(lse, logit) if fixed.wants_lse else None, weights, share, capped)


def _shaped(result: Result, sizes: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Output [batch, heads, rows, value_dim] and lse [batch, heads, rows], of these sizes."""
    output = result.output.view(*sizes, result.output.shape[2]).to(dtype)
    return output, None if result.lse is None else result.lse.view(*sizes)


def added_by(
    hidden: Hidden | None, biases: Tensor | None, scoring: Scoring, kv_heads: int, dtype: torch.dtype
) -> Tensor | None:
    """What mask and bias add to the scores, in the layout of `fold`; 0 for fully masked queries, whose output is set
    afterwards."""
    batch, heads, rows, columns = scoring.grid[:4]
    if biases is None:
        return None if hidden is None else hidden.folded(dtype, batch, heads, kv_heads, rows)
    if hidden is not None:
        biases = torch.where(hidden.allowed, biases, hidden.where_seeing(biases.dtype))
    return fold(biases.expand(*biases.shape[:2], rows, columns), batch, heads, kv_heads, rows)


class Stacked(torch.autograd.Function):
    """All scores at once, with their gradients by hand."""

    @staticmethod
    def forward(
        ctx: Any, fixed: Fixed, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, biases: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        result = _in_full(fixed, query, key, value, sink, biases)
        ctx.fixed = fixed
        ctx.save_for_backward(query, key, value, sink, biases, result.output, *result[2:])
        ctx.set_materialize_grads(False)
        return _shaped(result, fixed.scoring.grid[:3], query.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once, as activation checkpointing requires
        way = _by_autograd if torch.is_grad_enabled() else _by_hand
        return None, *way(ctx.fixed, saved, grad_output, grad_lse, ctx.needs_input_grad[1:])


def _by_hand(
    fixed: Fixed, saved: Sequence[Any], grad_output: Tensor | None, grad_lse: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of query, key, value, sink and biases, of those that are needed."""
    query, key, value, sink, biases, output, weights, share, capped = saved
    kv_heads, factor, sizes = key.shape[1], fixed.scoring.scale, fixed.scoring.grid[:3]
    q, k, v = (_stacked(tensor, kv_heads) for tensor in (query, key, value))
    grad = torch.zeros_like(output) if grad_output is None else _stacked(grad_output, kv_heads)
    of_lse = None if grad_lse is None else grad_lse.reshape(*output.shape[:2], 1)
    grads: list[Tensor | None] = [None] * 5
    if share is not None:
        of_lse = (0.0 if of_lse is None else of_lse) - (grad * output).sum(-1, keepdim=True)
        if needed[3]:
            grads[3] = ((1.0 - share) * of_lse).view(sizes).sum((0, 2)).to(sink.dtype)
        grad, of_lse = grad * share, of_lse * share
    if needed[2]:
        kept = weights if fixed.kept is None else weights * fixed.kept
        grads[2] = bmm(kept.mT, grad).view(value.shape).to(value.dtype)
    space = None if needed[4] else scratch(grad, grad.dtype, weights.shape)[0]
    factor *= 1.0 if capped is None else 4.0  # of its derivative, 4 x (1 - x)
    early = 1.0 if needed[4] else factor  # where it takes no time
    grad_scores = baddbmm(weights, grad, v.mT, beta=0.0, alpha=early, out=space)
    if fixed.kept is not None:
        grad_scores *= fixed.kept
    if share is None:
        grad_scores = torch.ops.aten._softmax_backward_data(grad_scores, weights, -1, weights.dtype)
    else:
        grad_scores *= weights
    if of_lse is not None:
        grad_scores.addcmul_(weights, of_lse, value=early)
    if needed[4]:
        grads[4] = grad_scores.view(*sizes, k.shape[1]).sum_to_size(biases.shape)
    if capped is not None:
        grad_scores = torch.mul(grad_scores, capped, out=space)
        grad_scores.addcmul_(grad_scores, capped, value=-1.0)
    if early != factor:
        grad_scores = grad_scores * factor  # not in place: the gradient of a bias may be these very numbers
    if needed[0]:
        grads[0] = bmm(grad_scores, k).view(query.shape).to(query.dtype)
    if needed[1]:
        grads[1] = bmm(grad_scores.mT, q).view(key.shape).to(key.dtype)
    return grads


def _by_autograd(
    fixed: Fixed, saved: Sequence[Any], grad_output: Tensor | None, grad_lse: Tensor | None, needed: Sequence[bool]
) -> list[Tensor | None]:
    """The same, with a graph of their own."""
    # views: one tensor may be several of the inputs
    inputs: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in saved[:5]]
    results = _shaped(_in_full(fixed, *inputs), fixed.scoring.grid[:3], saved[0].dtype)
    pairs = [pair for pair in zip(results, (grad_output, grad_lse), strict=True) if pair[1] is not None]
    learning = [tensor for tensor, asked in zip(inputs, needed, strict=True) if asked]
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, learning, given, create_graph=True, allow_unused=True))
    return [next(found) if asked else None for asked in needed]


def _stacked(tensor: Tensor, kv_heads: int) -> Tensor:
    """Query heads that share a kv head one below the other: [batch, heads, rows, size] -> [batch * kv_heads, heads //
    kv_heads * rows, size], in float32 or wider."""
    if tensor.dtype != wide(tensor.dtype):  # one copy for both
        tensor = tensor.to(wide(tensor.dtype), memory_format=torch.contiguous_format)
    return _stack_of(tensor, kv_heads)


def _stack_of(tensor: Tensor, kv_heads: int) -> Tensor:
    """The same in its own dtype."""
    batch, heads, rows, size = tensor.shape
    return tensor.reshape(batch * kv_heads, heads // kv_heads * rows, size)

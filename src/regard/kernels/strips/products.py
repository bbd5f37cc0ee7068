"""Attention as two matrix products with a softmax between them, over pieces of scores that stay in a core's cache.

torch's flash attention for the CPU takes keys in blocks and multiplies small matrices. It supports neither softcap nor
dropout nor trainable biases. Here a few whole rows of scores are computed at a time and used while in the cache:

    scores = softcap(scale query key^T) + bias and mask,    output = dropout(softmax(scores)) value

A causal square is computed a few rows at a time, each with the keys up to its last row. The gradients are, with
p = exp(scores - lse), m the dropout mask over 1 - dropout and delta = sum(output * doutput) - dlse (Dao et al. 2022,
appendix B.4),

    dvalue = (m p)^T doutput,    ds = p (m doutput value^T - delta)
    dquery = scale ds key,       dkey = scale ds^T query

Scores are float32 or wider, whatever the call's dtype. On processors with fast bfloat16 products, weights and ds are
rounded to bfloat16 before they are multiplied, as in torch's operator; elsewhere all products are in float32.

softcap is computed as c tanh(s / c) = 2 c sigmoid(2 s / c) - c, since torch's sigmoid takes a sixth of the time of its
tanh; with x = sigmoid(2 s / c) its derivative is 4 x (1 - x).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import faint, processor
from regard.kernels.fused import KEYS_AT_A_TIME, QUERIES_AT_A_TIME, torch_imitates
from regard.kernels.strips import tuning
from regard.kernels.strips.added import AddedToStrip
from regard.kernels.strips.dropped import Dropped
from regard.kernels.strips.pieces import Piece, Space, blocks, pieces, rows_at_a_time, rows_of_square, scores_at_a_time
from regard.kernels.strips.plan import Kind, Strip
from regard.matmul import baddbmm, bmm, is_regular, onednn_beats_fused, onednn_is_faster, regular
from regard.numerics import LOG2_E, in_one_dtype, upcast, wide
from regard.scores import Additive


def pay(dtype: torch.dtype, stack: int, rows: int, keys: int, *, causal: bool, backward: bool) -> bool:
    """Whether this is faster than torch's operator for a call that both support.

    It is nearly everywhere where oneDNN multiplies faster than MKL, with which torch's operator multiplies
    (`regard.matmul`). Elsewhere only where torch's operator is slow in half precision, which was found on an x86-64
    processor with bfloat16 instructions but without AMX, and is not assumed of others.

    Args:
        stack: kv heads of all batch indices that form one axis; rows: queries per kv head, of all heads that share it.
    """
    if not processor.MKL or rows < tuning.PIECE_QUERIES:
        return False
    group = max(1, rows // max(1, keys))
    scores = stack * keys * (min(rows, rows_of_square(keys, group, dtype) * group) if causal else rows)
    if torch_imitates(dtype, backward=backward):
        return scores >= 1 << 15
    if not backward and dtype != wide(dtype) and onednn_beats_fused(dtype) and scores >= tuning.MIN_SCORES_BY_ONEDNN:
        return True
    if onednn_beats_fused(dtype):
        # what is padded, and what is left to MKL, weighs more; in a causal square less than what is left out
        odd = not causal and not (is_regular(rows) and is_regular(keys))
        if odd and keys < tuning.SHORT_ODD_KEYS:
            return scores >= tuning.MIN_SCORES_BY_ONEDNN << 4
        if scores >= tuning.MIN_SCORES_BY_ONEDNN << odd:
            return True
    if stack < tuning.MIN_STACK or dtype != torch.bfloat16 or not processor.BFLOAT16 or processor.AMX:
        return False
    if rows >= QUERIES_AT_A_TIME[0][0]:  # then the operator multiplies the largest matrices
        return False
    short, low = keys < KEYS_AT_A_TIME, rows <= 2 * tuning.PIECE_QUERIES  # if short, there have to be more of them
    if backward:
        least = tuning.MIN_SCORES << 2 if causal and short else tuning.MIN_SCORES_BACKWARD
        return scores >= least and (keys <= 512 if causal else low and keys <= 2048)
    return scores >= (tuning.MIN_SCORES << 2 if short else tuning.MIN_SCORES) and keys <= (2048 if low else 1024)


def scores_of_square(length: int, group: int, dtype: torch.dtype) -> int:
    """Number of scores computed for a causal square of each head, if `group` heads share a kv head."""
    keys = regular if onednn_is_faster(dtype) else int
    return sum((stop - start) * keys(stop) for start, stop in blocks(length, rows_of_square(length, group, dtype)))


def most_scores(strip: Strip, group: int, dtype: torch.dtype) -> int:
    """Most scores of a strip held at a time, if `group` heads share a kv head."""
    causal, queries = strip.kind is Kind.CAUSAL, len(strip.queries)
    rows = rows_of_square(queries, group, dtype) if causal else rows_at_a_time(queries, strip.keys, group, dtype)
    return max(scores_at_a_time(dtype, _fills(dtype)), group * min(queries, rows) * strip.keys)


@dataclass(frozen=True, slots=True)
class Formula:
    """How scores and weights are computed in one strip.

    Attributes:
        causal: query i sees the first i + 1 keys of a square; the mask then adds no numbers.
        added: bias and mask as numbers, or None. dropped: the dropout, or None.
        additive: the similarity, if it is not the dot product.
    """

    scale: float
    causal: bool = False
    softcap: float | None = None
    added: AddedToStrip | None = None
    dropped: Dropped | None = None
    additive: Additive | None = None

    @property
    def tiles(self) -> Sequence[Tensor]:
        return () if self.added is None else self.added.tiles

    @property
    def factor(self) -> float:
        """What the weights that dropout keeps are multiplied by: products do it, by the way."""
        return 1.0 if self.dropped is None else self.dropped.factor

    @property
    def by_place(self) -> bool:
        """Whether a piece must know its batch index and heads."""
        return self.additive is not None or (self.added is not None and bool(self.added.call.wanted))

    def spreads(self) -> bool:
        """Whether many weights are faint and slow to multiply, judged by what is added for the first and last query."""
        if not self.tiles or not faint.are_slow(self.tiles[0]):
            return False
        first, *others = (tile[..., :: max(1, tile.shape[2] - 1), :] for tile in self.tiles)
        return faint.spread(sum(others, start=first))


def attend(
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    formula: Formula,
    *,
    space: Space,
    output: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes output and log-sum-exp: 0 and -inf for a fully masked query.

    Args:
        query, output: [batch, heads, query_len, size], any strides; lse: [batch, heads, query_len].
        key, value: [batch, kv_heads, key_len, size] of each span of keys.
    """
    if not formula.tiles:
        (query,), key, value = _one_stack([query], key, value)
    by_query = [query, output] if lse is None else [query, output, lse]
    later, may_be_empty = _later(query, key[0], formula), formula.added is not None and formula.added.may_hide_all
    spreads = formula.spreads()
    for piece in _pieces(by_query, key, value, (), formula, space, 1, fills=_fills(query.dtype)):
        q, into, *into_lse = piece.by_query[: len(by_query)]
        k = _side_by_side(piece.key, piece.columns, wide(query.dtype))
        similarity = None if formula.additive is None else Similarity(piece, q, k, formula.additive)
        rows = q.shape[1] * q.shape[2]
        height = regular(rows) if _fills(q.dtype) and similarity is None else rows
        scores = _scores(q, k, formula, piece, later, similarity, height)
        top = scores[:, :rows].amax(-1) if into_lse or may_be_empty else None
        weights = torch.softmax(scores, -1, out=scores)
        empty = top == -math.inf if top is not None and may_be_empty else None
        if top is not None and into_lse:  # the largest weight is exp(top - lse)
            sums = top.sub_(weights[:, :rows].amax(-1).log_())
            into_lse[0].copy_((sums if empty is None else sums.masked_fill_(empty, -math.inf)).view_as(into_lse[0]))
        if formula.dropped is not None:
            weights[:, :rows, : piece.keys].mul_(formula.dropped.kept(piece))
        # copied only now, since keys and values together are more than a core caches
        weights, v = in_one_dtype(weights, _side_by_side(piece.value, piece.columns, value[0].dtype))
        if spreads:
            weights = faint.without_faint(weights)
        in_place = into.is_contiguous() and into.dtype == v.dtype and weights.shape[1] == rows
        result = bmm(weights, v, alpha=formula.factor, out=into.flatten(1, 2) if in_place else None)[:, :rows]
        if empty is not None:
            result.masked_fill_(empty[..., None], 0.0)
        if not in_place:
            into.copy_(result.unflatten(1, into.shape[1:3]))


def gradients(
    grad_output: Tensor,
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    formula: Formula,
    *,
    space: Space,
    lse: Tensor,
    delta: Tensor,
    whole_rows: bool = False,
    apart: bool = False,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Adds to the gradients of query, key and value, and of trainable biases.

    Args:
        lse, delta: [batch, heads, query_len]; an lse of -inf must be replaced by a finite number.
        whole_rows: whether these are all keys that the queries see; then delta is -dlse alone, and
            sum(output * doutput) is computed here, from unrounded weights.
        apart: whether batch indices are computed one after another, since their keys overlap.
        grads: gradients of query, key and value, float32 or wider.
        others: as in `attend`.
    """
    if not (apart or formula.tiles):
        (query, grad_output), key, value = _one_stack([query, grad_output], key, value)
    later, by_query = _later(query, key[0], formula), [query, grad_output, lse, delta, grads[0]]
    spaces = 2 + (formula.softcap is not None) + (formula.dropped is not None)
    for piece in _pieces(by_query, key, value, grads[1:], formula, space, spaces, apart):
        (q, grad_out, sums, inner, into), (to_key, to_value) = piece.by_query[: len(by_query)], piece.to_key[:2]
        k = _side_by_side(piece.key, piece.columns, key[0].dtype)
        similarity = None if formula.additive is None else Similarity(piece, q, k, formula.additive)
        scores = _scores(q, _widened(k), formula, piece, later, similarity, q.shape[1] * q.shape[2])
        weights = faint.without_faint_exponents(scores.sub_(sums.flatten(1)[..., None]).mul_(LOG2_E)).exp2_()
        grad_out = grad_out.flatten(1, 2)
        v = _side_by_side(piece.value, piece.columns, grads[2].dtype)
        wide_grad = _widened(grad_out)
        grad_weights = _room(piece.space[1], weights)
        inner = inner.flatten(1)[..., None]
        if formula.dropped is None and not whole_rows:
            baddbmm(inner, wide_grad, v.mT, beta=-1, out=grad_weights, of=query.dtype)
            grad_scores = grad_weights.mul_(weights)
        else:
            bmm(wide_grad, v.mT, alpha=formula.factor, out=grad_weights, of=query.dtype)
            kept = weights
            if formula.dropped is not None:
                kept = _room(piece.space[-1], weights)
                torch.mul(weights[..., : piece.keys], formula.dropped.kept(piece), out=kept[..., : piece.keys])
                kept[..., piece.keys :].zero_()
            grad_scores = grad_weights.mul_(kept)
            if whole_rows:
                inner = inner + grad_scores.sum(-1, keepdim=True)
            grad_scores.addcmul_(weights, inner, value=-1.0)
            weights = kept
        weights, grad_out = in_one_dtype(weights, grad_out)
        to_value.add_(bmm(weights.mT, grad_out)[:, : piece.keys], alpha=formula.factor)
        if formula.added is not None and formula.added.call.wanted:
            heads = grad_scores.view(-1, q.shape[2], grad_scores.shape[2])
            formula.added.pull(heads[..., : piece.keys], piece.batch, piece.heads, piece.rows)
        factor = formula.scale
        if formula.softcap is not None:
            slope = _room(piece.space[2], weights)  # a quarter of the derivative, stored by `_scores`
            grad_scores.mul_(slope)
            factor *= 4.0
        if similarity is not None:
            similarity.pull(grad_scores.mul_(factor), into, to_key, formula.added)
            continue
        grad_scores, q, k = in_one_dtype(grad_scores, q.flatten(1, 2), k)
        into.add_(bmm(grad_scores, k).view_as(into), alpha=factor)
        to_key.add_(bmm(grad_scores.mT, q)[:, : piece.keys], alpha=factor)


def _pieces(
    by_query: Sequence[Tensor],
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    to_key: Sequence[Tensor],
    formula: Formula,
    space: Space,
    spaces: int,
    apart: bool = False,
    fills: bool = False,
) -> Iterator[Piece]:
    if formula.dropped is not None:
        by_query = [*by_query, *formula.dropped.by_query]
        to_key = [*to_key, *(part.expand(-1, key[0].shape[1], -1) for part in formula.dropped.by_key)]
    given, apart = (by_query, key, value, to_key, formula.tiles), apart or formula.by_place
    until = regular if onednn_is_faster(key[0].dtype) else int
    return pieces(*given, space=space, causal=formula.causal, spaces=spaces, apart=apart, until=until, fills=fills)


def _one_stack(*groups: Sequence[Tensor]) -> Sequence[Sequence[Tensor]]:
    """Queries, keys and values with batch and heads in order, so that they form one axis: copies of those in half
    precision that a layer holds token by token, unless they are many."""
    first = groups[0][0]
    by_token = len(first) > 1 and first.stride(1) < first.stride(2)
    numbers = sum(part.numel() for group in groups for part in group)
    if not by_token or first.dtype == wide(first.dtype) or numbers > tuning.MAX_COPIED_NUMBERS:
        return groups
    return [[part.contiguous() for part in group] for group in groups]


def _side_by_side(parts: Sequence[Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    """Keys or values of all spans one after another in memory, and zeros up to the number of columns, in a dtype.

    A single span is taken as it lies if MKL reads it.
    """
    as_it_lies = parts[0].dtype == dtype and (not onednn_is_faster(dtype) or parts[0].is_contiguous())
    if len(parts) == 1 and parts[0].shape[1] == columns and as_it_lies:
        return parts[0]
    found = parts[0].new_empty(len(parts[0]), columns, parts[0].shape[2], dtype=dtype)
    start = 0
    for part in parts:
        found[:, start : start + part.shape[1]].copy_(part)
        start += part.shape[1]
    if start < columns:
        found[:, start:].zero_()
    return found


def _later(query: Tensor, key: Tensor, formula: Formula) -> Tensor | None:
    """The additive mask that hides later keys in the last columns of a causal square."""
    if not formula.causal:
        return None
    length = query.shape[2]
    rows = rows_of_square(length, query.shape[1] // key.shape[1], query.dtype)
    until = regular if onednn_is_faster(query.dtype) else int
    columns = max((until(stop) - start for start, stop in blocks(length, rows)), default=0)
    return query.new_full((rows, columns), -math.inf, dtype=wide(query.dtype)).triu_(1)


def _scores(
    query: Tensor,
    key: Tensor,
    formula: Formula,
    piece: Piece,
    later: Tensor | None,
    similarity: "Similarity | None",
    height: int,
) -> Tensor:
    """The scores of a piece, [stack, height, columns], of which the first group * rows are those of its queries.

    Args:
        key: [stack, columns, size], float32 or wider.
        later: what hides keys after the first of its queries in a causal square.
    """
    (stack, group, rows, _), tiles, space = query.shape, piece.tiles, piece.space
    columns, keys = key.shape[1], piece.keys
    scores = space[0][: stack * height * columns].view(stack, height, columns)
    by_head = scores[:, : group * rows].unflatten(1, (group, rows))
    scale, softcap = formula.scale, formula.softcap
    factor = scale if softcap is None else 2.0 * scale / softcap
    if similarity is not None:
        torch.mul(similarity.numbers.detach().reshape(scores.shape), factor, out=scores)
    else:
        q, k = _widened(query.flatten(1, 2), height), key.mT
        beta = 0
        if tiles and softcap is None:
            first, *tiles = tiles
            beta = 1
            by_head[..., :keys].copy_(first)
            scores[..., keys:].zero_()
        baddbmm(scores, q, k, beta=beta, alpha=factor, out=scores, of=query.dtype)
    if softcap is not None:
        x = scores.sigmoid_()
        if len(space) > 2:
            torch.addcmul(x, x, x, value=-1.0, out=_room(space[2], x))
        scores.mul_(2.0 * softcap).sub_(softcap)
    for tile in tiles:
        by_head[..., :keys].add_(tile)
    if later is not None:
        first = piece.rows.start
        by_head[..., first:].add_(later[:rows, : columns - first])
    elif columns > keys:
        scores[..., keys:].fill_(-math.inf)
    return scores


def _fills(dtype: torch.dtype) -> bool:
    """Whether queries are filled up with zeros, as keys are: those in half precision, which are copied anyway."""
    return dtype != wide(dtype) and onednn_is_faster(dtype)


def _widened(tensor: Tensor, height: int | None = None) -> Tensor:
    """A stack in float32 or wider, one matrix after another in memory and filled up with zeros if it is a copy."""
    if tensor.dtype == wide(tensor.dtype):
        return tensor
    stack, rows, size = tensor.shape
    found = tensor.new_empty(stack, height or rows, size, dtype=wide(tensor.dtype))
    found[:, :rows].copy_(tensor)
    if height is not None and height > rows:
        found[:, rows:].zero_()
    return found


def _room(space: Tensor, like: Tensor) -> Tensor:
    return space[: like.numel()].view_as(like)


class Similarity:
    """The additive similarity of one piece, with its autograd graph."""

    def __init__(self, piece: Piece, query: Tensor, key: Tensor, additive: Additive) -> None:
        self._heads = piece.heads
        with torch.enable_grad():
            leaves = query.flatten(0, 1), key, additive.v[self._heads]
            self._leaves = [upcast(leaf.detach()).requires_grad_() for leaf in leaves]
            q, k, v = self._leaves
            self.numbers = Additive(v)(q[None], k[None])[0]

    def pull(self, grad: Tensor, to_query: Tensor, to_key: Tensor, added: AddedToStrip | None) -> None:
        """Adds to the gradients of query, key and v."""
        of_query, of_key, of_v = torch.autograd.grad(self.numbers, self._leaves, grad.view_as(self.numbers))
        to_query.add_(of_query.view_as(to_query))
        to_key.add_(of_key[:, : to_key.shape[1]])
        total = None if added is None else added.call.grad_of_v
        if total is not None:
            total[self._heads] += of_v

"""Any mask at the price of the work it contains: a plan of dense calls on PyTorch's own fused operator.

A mask is cut into *strips*: some consecutive queries, and the spans of keys that any of them may see. Empty tiles are
in no strip. A strip is one dense attention call over its spans laid end to end; where the mask allows all of it,
without a mask, and where it does not, with a small one. Nothing of size query_len x key_len exists, not while
planning either: a mask answers for whole rectangles (`Mask.tile`), and rectangles are halved only where the answer is
PARTIAL.

    Causal() & Window(3)        strips of two queries

    # . . . . .                 [0 1]                keys 0-1
    # # . . . .
    # # # . . .                     [2 3]            keys 0-3
    . # # # . .
    . . # # # .                         [4 5]        keys 2-5
    . . . # # #

A strip is computed by one of two engines:

    fused    torch's flash attention for the CPU, forward and backward; it also returns the log-sum-exp
    written  the definition itself (`Scoring.tile`), a few rows at a time, and computed again in the backward pass: for
             softcap, additive similarity, dropout, a bias that learns, and devices without that operator

The gradients of strips add up exactly, because every strip's backward pass uses the row's own output and log-sum-exp
(Dao et al. 2022, appendix B.4). With p = exp(s - lse) and m the dropout mask over 1 - dropout,

    ds = p (m dp - sum(dout * out) + dlse),    dv = (m p)^T dout

A sink changes only out and lse; it is a place with value 0. A gradient of a gradient is left to the reference.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import dense
from regard.kernels.call import Call, Kernel
from regard.masks import EVERYTHING, And, Band, Mask, Tile
from regard.reference import LOG2_E, exp, reference
from regard.scores import Dropout, Scoring, grouped_product, hide, hide_blind, wide

ROWS = 256
"""Queries in a strip."""

ALONE = 64
"""Queries that are worth a strip of their own."""

COLUMNS = 64
"""Keys in the smallest tile that is asked about: spans begin and end at multiples of it."""


WRITTEN = 1 << 22
"""Scores that the written engine likes to hold at a time: what fits into a processor's last cache."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Consecutive queries and the spans of keys that they may see.

    Attributes:
        row: the batch row it is for; None for all rows at once.
        full: whether every query may see every key of the spans.
        causal: whether query i of the strip may see the first i + 1 keys of its one span, and nothing else.
    """

    row: int | None
    queries: range
    spans: tuple[range, ...]
    full: bool
    causal: bool = False

    @property
    def keys(self) -> int:
        """How many keys it computes."""
        return sum(map(len, self.spans))


def cut(
    mask: Mask, query_len: int, key_len: int, row: int | None = None, *, rows: int = ROWS, triangles: bool = True
) -> Iterator[Strip]:
    """The strips of a bound mask.

    Args:
        rows: queries in a strip, at most. triangles: whether a causal square, however long, may be one strip.
    """
    causal, rest = _without_causal(mask) if triangles else (None, mask)
    for segment in _segments(sorted(mask.breaks(query_len)), query_len):
        if causal is not None:
            diagonal = range(segment.start + causal, segment.stop + causal)
            if diagonal.start >= 0 and diagonal.stop <= key_len and len(segment) >= ALONE:
                before = mask.tile(segment, range(diagonal.start))
                if before is Tile.EMPTY and rest.tile(segment, diagonal) is Tile.FULL:
                    yield Strip(row, segment, (diagonal,), full=False, causal=True)
                    continue
        for start in range(segment.start, max(segment.stop, segment.start + 1), rows):
            queries = range(start, min(start + rows, segment.stop))
            spans: list[range] = []
            full = True
            for columns, tile in _visible(mask, queries, range(key_len)):
                full = full and tile is Tile.FULL
                if spans and spans[-1].stop == columns.start:
                    spans[-1] = range(spans[-1].start, columns.stop)
                else:
                    spans.append(columns)
            yield Strip(row, queries, tuple(spans) or (range(0),), full and bool(spans))


def _without_causal(mask: Mask) -> tuple[int | None, Mask]:
    """The offset of the causal mask among those that must all allow, and the others together."""
    parts = [mask]
    others: Mask = EVERYTHING
    offset: int | None = None
    while parts:
        part = parts.pop()
        if isinstance(part, And):
            parts += [part.left, part.right]
        elif isinstance(part, Band) and (part.before, part.after) == (None, 0) and isinstance(part.offset, int):
            offset = part.offset if offset is None else min(offset, part.offset)
        else:
            others = part if others is EVERYTHING else others & part
    return offset, others


def _segments(breaks: list[int], length: int) -> Iterator[range]:
    """Queries between two breaks; short ones together, up to a strip's length."""
    start = end = 0
    for at in (*breaks, length):
        if end > start and (at - start > ROWS or end - start >= ALONE):
            yield range(start, end)
            start = end
        end = max(end, at)
    yield range(start, end)


def _visible(mask: Mask, rows: range, columns: range) -> Iterator[tuple[range, Tile]]:
    """The parts of a strip that are not empty, from left to right."""
    tile = mask.tile(rows, columns)
    if tile is Tile.EMPTY:
        return
    if tile is Tile.FULL or len(columns) <= COLUMNS:
        yield columns, tile
        return
    half = columns.start + -(-len(columns) // (2 * COLUMNS)) * COLUMNS
    yield from _visible(mask, rows, range(columns.start, half))
    yield from _visible(mask, rows, range(half, columns.stop))


Strips = tuple[Strip, ...]


def strips(call: Call) -> Strips:
    """The strips of a call; where batch rows differ, each row has its own."""
    grid, mask = call.scoring.grid, call.scoring.mask or EVERYTHING
    fused = fusable(call)
    few = WRITTEN // max(1, grid.batch * grid.heads * grid.key_len)
    rows = ROWS if fused else min(max(few, ALONE // 4), ROWS)
    masks: list[tuple[Mask, int | None]] = [(mask, None)]
    if grid.batch > 1 and mask.by_row:
        masks = [(mask.of_row(row).bind(grid._replace(batch=1)), row) for row in range(grid.batch)]
    return tuple(
        strip for one, row in masks for strip in cut(one, grid.query_len, grid.key_len, row, rows=rows, triangles=fused)
    )


class Part:
    """One strip of a call: its piece of query, key and value, and of the mask."""

    def __init__(self, strip: Strip, scoring: Scoring) -> None:
        self.strip = strip
        self.rows = slice(None) if strip.row is None else slice(strip.row, strip.row + 1)
        self.queries = slice(strip.queries.start, strip.queries.stop)
        scoring = replace(scoring, mask=None) if strip.full else scoring
        self.scoring = _of_row(scoring, strip.row)

    @property
    def keys(self) -> range | Tensor:
        """The strip's keys as places in the call."""
        if len(self.strip.spans) == 1:
            return self.strip.spans[0]
        device = self.scoring.grid.device
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.strip.spans])

    def of_query(self, tensor: Tensor) -> Tensor:
        """The strip's queries, or what is there one per query."""
        return tensor[self.rows, :, self.queries]

    def of_key(self, tensor: Tensor) -> Tensor:
        """The strip's keys or values, its spans end to end."""
        pieces = [tensor[self.rows, :, span.start : span.stop] for span in self.strip.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def add_to_key(self, total: Tensor, part: Tensor) -> None:
        """Adds what is there one per key to the whole."""
        start = 0
        for span in self.strip.spans:
            total[self.rows, :, span.start : span.stop] += part[:, :, start : start + len(span)]
            start += len(span)

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor | None) -> Tensor:
        """The strip's scores, by the definition."""
        return self.scoring.tile(hide_blind(query, allowed), hide(key, allowed), self.strip.queries, self.keys)

    def kept(self, dropout: Dropout, weights: Tensor) -> Tensor:
        """1 where dropout keeps a weight, 0 where it drops it."""
        dropout = replace(dropout, first=self.strip.row or 0)
        return dropout.keep(self.scoring.grid, self.strip.queries, self.keys, dtype=weights.dtype)

    def allowed(self) -> Tensor | None:
        """Who may attend to whom inside the strip; None for everybody."""
        if (self.strip.full or self.strip.causal) and self.scoring.bias is None:
            return None
        return self.scoring.allowed(self.strip.queries, self.keys)


def _of_row(scoring: Scoring, row: int | None) -> Scoring:
    if row is None:
        return scoring
    grid = scoring.grid._replace(batch=1)
    mask = None if scoring.mask is None else scoring.mask.of_row(row).bind(grid)
    bias = None if scoring.bias is None else scoring.bias.of_row(row).bind(grid)
    return replace(scoring, grid=grid, mask=mask, bias=bias)


class Fused(torch.autograd.Function):
    """All strips by torch's flash attention for the CPU, with its own backward pass."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: None,
        found: Strips,
    ) -> tuple[Tensor, Tensor]:
        size = value.shape[3]
        width = max(query.shape[3], size)
        query, key, value = (_padded(t, width) for t in (query, key, value))
        output = query.new_zeros(*query.shape[:3], width)
        lse = torch.full(query.shape[:3], -math.inf, dtype=wide(query[:0]).dtype)
        for part in _parts(found, query, scoring):
            allowed = part.allowed()
            result, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                hide_blind(part.of_query(query), allowed),
                hide(part.of_key(key), allowed),
                hide(part.of_key(value), allowed),
                0.0,
                allowed is None and part.strip.causal,
                attn_mask=_numbers(part, allowed, query.dtype),
                scale=scoring.scale,
            )
            if allowed is not None:  # torch says 0 for a row without keys
                part_lse = part_lse.masked_fill(~allowed.any(-1), -math.inf)
            part.of_query(output).copy_(result)
            part.of_query(lse).copy_(part_lse)
        if sink is not None:
            whole = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
            output *= exp(lse - whole.masked_fill(whole == -math.inf, 0.0))[..., None].to(output.dtype)
            lse = whole
        return output[..., :size], lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scoring, ctx.dropout, ctx.found = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sink, output, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _twice(ctx, grad_output, grad_lse, (query, key, value, sink))
        dtype, sizes = query.dtype, (query.shape[3], key.shape[3], value.shape[3])
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        width = max(sizes)
        query, key, value, output, grad_output = (_padded(t, width) for t in (query, key, value, output, grad_output))
        # ds = p (dp - sum(dout * out) + dlse): the last term enters as one more feature, with value 0 and gradient 1
        if grad_lse is not None:
            query, key, value = (_padded(t, width + 1) for t in (query, key, value))
            grad_output = torch.cat([grad_output, torch.ones_like(grad_output[..., :1])], dim=-1)
            output = torch.cat([output, -grad_lse.to(output.dtype)[..., None]], dim=-1)
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # exp(-inf - 0) is the 0 that an empty row needs
        # strips that share keys add up in float32, whatever the call's dtype
        grads = [torch.zeros(t.shape, dtype=wide(t[:0]).dtype) for t in (query, key, value)]
        for part in _parts(ctx.found, query, ctx.scoring):
            allowed = part.allowed()
            grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part.of_query(grad_output),
                hide_blind(part.of_query(query), allowed),
                hide(part.of_key(key), allowed),
                hide(part.of_key(value), allowed),
                part.of_query(output),
                part.of_query(finite),
                0.0,
                allowed is None and part.strip.causal,
                attn_mask=_numbers(part, allowed, query.dtype),
                scale=ctx.scoring.scale,
            )
            part.of_query(grads[0]).copy_(grad_query)
            part.add_to_key(grads[1], grad_key)
            part.add_to_key(grads[2], grad_value)
        grad_sink = None
        if sink is not None:
            mass = exp(sink.to(lse.dtype)[:, None] - finite)
            grad_sink = -(mass * (grad_output * output).sum(-1)).sum((0, 2)).to(sink.dtype)
        three = (grad[..., :size].to(dtype) for grad, size in zip(grads, sizes, strict=True))
        return (*three, grad_sink, None, None, None)

    @staticmethod
    def vmap(*arguments: Any) -> tuple[Any, tuple[int, int]]:
        return _one_by_one(Fused, *arguments)


def _parts(found: Strips, query: Tensor, scoring: Scoring) -> Iterator["Part"]:
    """Those strips in which there is something to compute."""
    return (Part(strip, scoring) for strip in found if strip.keys and query.numel())


def _padded(tensor: Tensor, width: int) -> Tensor:
    """With zeros up to `width` features, and features next to each other in memory, as torch's operator wants them."""
    if tensor.shape[3] < width:
        return F.pad(tensor, (0, width - tensor.shape[3]))
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _numbers(part: Part, allowed: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The strip's mask and bias as numbers to add, which is what torch takes."""
    if part.scoring.bias is None:
        if allowed is None:
            return None
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)
    numbers = part.scoring.biases(part.strip.queries, part.keys, dtype)
    if allowed is not None:
        numbers = numbers.masked_fill(~allowed, -math.inf)
    return numbers.expand(*numbers.shape[:2], len(part.strip.queries), part.strip.keys)


class Written(torch.autograd.Function):
    """All strips by the definition, a few rows at a time."""

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scoring: Scoring,
        dropout: Dropout | None,
        found: Strips,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        lse = torch.empty(query.shape[:3], dtype=wide(query[:0]).dtype, device=query.device)
        for strip in found:
            part = Part(strip, scoring)
            allowed = part.allowed()
            scores = part.scores(part.of_query(query), part.of_key(key), allowed)
            top = scores.amax(-1, keepdim=True) if strip.keys else scores.new_full((*scores.shape[:3], 1), -math.inf)
            if sink is not None:
                top = torch.maximum(top, sink.to(top.dtype)[:, None, None])
            top.masked_fill_(top == -math.inf, 0.0)
            weights = scores.sub_(top).mul_(LOG2_E).exp2_()
            total = weights.sum(-1, keepdim=True)
            if sink is not None:
                total += exp(sink.to(top.dtype)[:, None, None] - top)
            empty = total == 0
            part.of_query(lse).copy_((top + total.log()).masked_fill(empty, -math.inf).squeeze(-1))
            if dropout is not None:
                weights *= part.kept(dropout, weights)
                total = total * (1 - dropout.rate)
            result = grouped_product(weights, wide(hide(part.of_key(value), allowed)))
            part.of_query(output).copy_(result / total.masked_fill(empty, 1.0))
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, sink, ctx.scoring, ctx.dropout, ctx.found, *learned = inputs
        ctx.save_for_backward(query, key, value, sink, output[1], *learned)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sink, lse, *learned = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _twice(ctx, grad_output, grad_lse, (query, key, value, sink, *learned))
        if grad_output is None:
            grad_output = query.new_zeros(*query.shape[:3], value.shape[3])
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse  # sum(dout * out) - dlse
        wanted = [tensor for tensor in learned if tensor.requires_grad]
        grads = [torch.zeros(t.shape, dtype=wide(t[:0]).dtype, device=t.device) for t in (query, key, value, *wanted)]
        for strip in ctx.found:
            if not strip.keys:
                continue
            with torch.enable_grad():  # only of the strip's scores, whatever they are made of
                part = Part(strip, ctx.scoring)
                allowed = part.allowed()
                part_query = wide(part.of_query(query)).detach().requires_grad_()
                part_key = wide(part.of_key(key)).detach().requires_grad_()
                scores = part.scores(part_query, part_key, allowed)
            weights = (scores.detach() - part.of_query(finite)[..., None]).mul_(LOG2_E).exp2_()
            grad_part = wide(part.of_query(grad_output))
            if ctx.dropout is not None:
                grad_part = grad_part / (1 - ctx.dropout.rate)
            grad_weights = grouped_product(grad_part, wide(hide(part.of_key(value), allowed)).mT)
            kept = None if ctx.dropout is None else part.kept(ctx.dropout, weights)
            if kept is not None:
                grad_weights *= kept
            of_row = part.of_query(delta).add_((weights * grad_weights).sum(-1))
            grad_scores = grad_weights.sub_(of_row[..., None]).mul_(weights)
            if kept is not None:
                weights *= kept
            kv_heads = key.shape[1]  # query heads that share a kv head add up
            of_value = _folded(weights, kv_heads).mT @ _folded(grad_part, kv_heads)
            of_query, of_key, *of_learned = torch.autograd.grad(
                scores, (part_query, part_key, *wanted), grad_scores, allow_unused=True
            )
            part.of_query(grads[0]).copy_(of_query)
            part.add_to_key(grads[1], of_key)
            part.add_to_key(grads[2], of_value)
            for total, one in zip(grads[3:], of_learned, strict=True):
                if one is not None:
                    total += one
        grad_sink = None
        if sink is not None:
            grad_sink = -(exp(sink.to(lse.dtype)[:, None] - finite) * delta).sum((0, 2)).to(sink.dtype)
        three = (grad.to(query.dtype) for grad in grads[:3])
        rest = iter(grads[3:])
        return (
            *three,
            grad_sink,
            None,
            None,
            None,
            *(next(rest).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned),
        )

    @staticmethod
    def vmap(*arguments: Any) -> tuple[Any, tuple[int, int]]:
        return _one_by_one(Written, *arguments)


def _folded(tensor: Tensor, kv_heads: int) -> Tensor:
    """The query heads that share a kv head, one below the other: [batch, kv_heads, heads / kv_heads * rows, size]."""
    return tensor.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _twice(
    ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, tensors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The backward pass as something that can be differentiated again: that of the reference.

    Args:
        tensors: query, key, value, sink and what is learned.
    """
    warnings.warn(
        "attention: a gradient of a gradient is computed by kernel 'reference', which holds every score",
        stacklevel=2,
    )
    query, key, value, *_ = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    results = reference(query, key, value, ctx.scoring, ctx.dropout)
    given = [(result, grad) for result, grad in zip(results, (grad_output, grad_lse), strict=True) if grad is not None]
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    outputs, grads = zip(*given, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    of = [next(found) if tensor is not None and tensor.requires_grad else None for tensor in tensors]
    return (*of[:4], None, None, None, *of[4:])


def _one_by_one(function: Any, info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, tuple[int, int]]:
    """torch.func.vmap's rule: the calls one after another, each of which keeps the machine busy by itself."""
    results = [
        function.apply(*(x if at is None else x.select(at, n) for x, at in zip(inputs, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    outputs, lses = zip(*results, strict=True)
    return (torch.stack(outputs), torch.stack(lses)), (0, 0)


def cannot(call: Call) -> str | None:
    """Everything can be cut into strips."""
    return None


def fusable(call: Call) -> bool:
    """Whether torch's operator computes what was asked, on this device."""
    scoring = call.scoring
    if call.dropout is not None or scoring.softcap is not None or scoring.additive is not None:
        return False
    if scoring.bias is not None and call.query.dtype in (torch.bfloat16, torch.float16):
        return False
    if scoring.bias is not None and torch.is_grad_enabled():
        return False  # a bias may want a gradient
    return call.query.device.type == "cpu"


def _narrowed(call: Call, span: range) -> Call:
    """The same call on some of its keys, all of which every query may see."""
    scoring = replace(call.scoring, grid=call.scoring.grid._replace(key_len=len(span)), mask=None)
    key, value = (tensor[:, :, span.start : span.stop] for tensor in (call.key, call.value))
    return replace(call, key=key, value=value, scoring=scoring)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """The strips, by the engine that can; a single strip without a mask, as in decoding, is one call of torch's."""
    found = strips(call)
    if not fusable(call):
        tensors = (call.query, call.key, call.value, call.scoring.sink)
        return Written.apply(*tensors, call.scoring, call.dropout, found, *call.scoring.learned())
    if len(found) == 1 and found[0].row is None and found[0].full and len(found[0].spans) == 1:
        alone = _narrowed(call, found[0].spans[0])
        if dense.cannot(alone) is None:
            return dense.run(alone)
    tensors = (call.query, call.key, call.value)
    if call.wants_lse:
        # in half precision torch's operator takes a short cut in exp, good enough for its output but not for an lse
        # from which weights are made again: that is computed in float32
        tensors = (wide(call.query), wide(call.key), wide(call.value))
    output, lse = Fused.apply(*tensors, call.scoring.sink, call.scoring, None, found)
    return output.to(call.query.dtype), lse


def cells(call: Call) -> int:
    """Scores in all strips."""
    grid = call.scoring.grid
    rows = sum(len(s.queries) * s.keys * (grid.batch if s.row is None else 1) for s in strips(call))
    return rows * grid.heads


KERNEL = Kernel("tiled", cannot, run, cells, square=lambda call: 0)

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

    fused   torch's flash attention for the CPU, forward and backward; it also returns the log-sum-exp
    plain   the definition itself (`Scoring.tile`) on the strip, computed again in the backward pass: for softcap,
            additive similarity, dropout and whatever else the fused operator lacks

The gradients of strips add up exactly, because every strip's backward pass uses the row's own output and log-sum-exp:
ds = p (dp - sum(dout * out)) with p = exp(s - lse). A sink changes only those two; it is a place with value 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from regard.kernels import dense
from regard.kernels.call import Call, Kernel
from regard.masks import EVERYTHING, And, Band, Mask, Tile
from regard.reference import exp, reference
from regard.scores import Scoring, hide, hide_blind, wide

ROWS = 256
"""Queries in a strip."""

ALONE = 64
"""Queries that are worth a strip of their own."""

COLUMNS = 64
"""Keys in the smallest tile that is asked about: spans begin and end at multiples of it."""


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


def cut(mask: Mask, query_len: int, key_len: int, row: int | None = None) -> Iterator[Strip]:
    """The strips of a bound mask."""
    causal, rest = _without_causal(mask)
    for segment in _segments(sorted(mask.breaks(query_len)), query_len):
        if causal is not None:
            diagonal = range(segment.start + causal, segment.stop + causal)
            if diagonal.start >= 0 and diagonal.stop <= key_len and len(segment) >= ALONE:
                before = mask.tile(segment, range(diagonal.start))
                if before is Tile.EMPTY and rest.tile(segment, diagonal) is Tile.FULL:
                    yield Strip(row, segment, (diagonal,), full=False, causal=True)
                    continue
        for start in range(segment.start, max(segment.stop, segment.start + 1), ROWS):
            queries = range(start, min(start + ROWS, segment.stop))
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
    if grid.batch > 1 and mask.by_row:
        rows = (mask.of_row(row).bind(grid._replace(batch=1)) for row in range(grid.batch))
        return tuple(s for n, m in enumerate(rows) for s in cut(m, grid.query_len, grid.key_len, n))
    return tuple(cut(mask, grid.query_len, grid.key_len))


class Part:
    """One strip of a call: its piece of query, key and value, and of the mask."""

    def __init__(self, strip: Strip, scoring: Scoring) -> None:
        self.strip = strip
        self.rows = slice(None) if strip.row is None else slice(strip.row, strip.row + 1)
        self.queries = slice(strip.queries.start, strip.queries.stop)
        self.keys = torch.cat([torch.arange(s.start, s.stop, device=scoring.grid.device) for s in strip.spans])
        self.scoring = _of_row(scoring, strip.row)

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
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, found: Strips
    ) -> tuple[Tensor, Tensor]:
        head_dim, size = query.shape[3], value.shape[3]
        width = max(query.shape[3], size)
        query, key, value = (_padded(t, width) for t in (query, key, value))
        output = query.new_zeros(*query.shape[:3], width)
        lse = torch.full(query.shape[:3], -math.inf, dtype=wide(query[:0]).dtype)
        parts = [Part(strip, scoring) for strip in found if strip.keys and query.numel()]
        for part in parts:
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
        ctx.save_for_backward(query, key, value, sink, output, lse)
        ctx.set_materialize_grads(False)
        ctx.scoring, ctx.parts, ctx.sizes = scoring, parts, (head_dim, size)
        return output[..., :size], lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, sink, output, lse = ctx.saved_tensors
        head_dim, value_dim = ctx.sizes
        if grad_output is None:
            grad_output = torch.zeros_like(output[..., :value_dim])
        width = query.shape[3]
        grad_output = _padded(grad_output, width)
        # ds = p (dp - sum(dout * out) + dlse): the last term enters as one more feature, with value 0 and gradient 1
        if grad_lse is not None:
            query, key, value = (_padded(t, width + 1) for t in (query, key, value))
            grad_output = torch.cat([grad_output, torch.ones_like(grad_output[..., :1])], dim=-1)
            output = torch.cat([output, -grad_lse.to(output.dtype)[..., None]], dim=-1)
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # exp(-inf - 0) is the 0 that an empty row needs
        # strips that share keys add up in float32, whatever the call's dtype
        grads = [torch.zeros(t.shape, dtype=wide(t[:0]).dtype) for t in (query, key, value)]
        for part in ctx.parts:
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
        sizes = (head_dim, head_dim, value_dim)
        return (
            *(grad[..., :size].to(query.dtype) for grad, size in zip(grads, sizes, strict=True)),
            grad_sink,
            None,
            None,
        )


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
    return numbers.expand(*numbers.shape[:2], len(part.strip.queries), len(part.keys))


def plain(call: Call) -> tuple[Tensor, Tensor]:
    """All strips by the definition itself; the scores are computed again in the backward pass."""
    rows: dict[int | None, list[tuple[Tensor, Tensor]]] = {}
    for strip in strips(call):
        part = Part(strip, call.scoring)
        dropout = None if call.dropout is None else replace(call.dropout, first=strip.row or 0)
        arguments = (
            *(part.of_query(call.query), part.of_key(call.key), part.of_key(call.value)),
            *(part.scoring, dropout, strip.queries, part.keys),
        )
        if torch.is_grad_enabled():
            result = checkpoint(reference, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            result = reference(*arguments)
        rows.setdefault(strip.row, []).append(result)
    output, lse = (torch.cat([torch.cat([r[n] for r in row], dim=2) for row in rows.values()]) for n in (0, 1))
    return output, lse


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
    if not fusable(call):
        return plain(call)
    found = strips(call)
    if len(found) == 1 and found[0].row is None and found[0].full and len(found[0].spans) == 1:
        alone = _narrowed(call, found[0].spans[0])
        if dense.cannot(alone) is None:
            return dense.run(alone)
    tensors = (call.query, call.key, call.value)
    if call.wants_lse:
        # in half precision torch's operator takes a short cut in exp, good enough for its output but not for an lse
        # from which weights are made again: that is computed in float32
        tensors = (wide(call.query), wide(call.key), wide(call.value))
    output, lse = Fused.apply(*tensors, call.scoring.sink, call.scoring, found)  # type: ignore[no-untyped-call]
    return output.to(call.query.dtype), lse


def cells(call: Call) -> int:
    """Scores in all strips."""
    grid = call.scoring.grid
    rows = sum(len(s.queries) * s.keys * (grid.batch if s.row is None else 1) for s in strips(call))
    return rows * grid.heads


KERNEL = Kernel("tiled", cannot, run, cells, square=lambda call: 0)

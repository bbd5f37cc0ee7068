"""torch's FlexAttention, for masks on a GPU: the mask as a function of one cell, its empty blocks skipped.

FlexAttention compiles attention anew for a function of (batch, head, query, key), and takes a list of the blocks that
hold something. torch finds those by asking the function about every cell, N x N of them; here they come from the mask's
own answers for rectangles (`Mask.tile`). On a CPU it has no backward pass, and strips (`tiled`) take its place there.

That "auto" prefers it to strips on CUDA devices rests on what is published, not on a measurement of ours:
Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", arXiv:2412.05496.
Mask, blocks and results are compared with the reference on a CPU, without the compiler.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.kernels.call import Call, Kernel, all_cells
from regard.kernels.known import Known
from regard.kernels.strips import row_by_row, visible
from regard.kernels.tiled import with_sink
from regard.masks import (
    EVERYTHING,
    And,
    Band,
    Chunk,
    Dense,
    Document,
    Everything,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Strided,
    Tile,
    Where,
)
from regard.scores import hide_where
from regard.shapes import Grid

BLOCK = 128
"""Queries and keys in a block, as torch's own default."""

Cell = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a cell is allowed: a function of (batch, head, query, key), each a number in a tensor."""


def cell(mask: Mask) -> Cell | None:
    """A bound mask as a function of one cell; None for a kind that is not known."""
    if isinstance(mask, Everything):
        return lambda batch, head, query, key: query >= 0
    if isinstance(mask, (And, Or)):
        left, right = cell(mask.left), cell(mask.right)
        if left is None or right is None:
            return None
        if isinstance(mask, And):
            return lambda *at: left(*at) & right(*at)
        return lambda *at: left(*at) | right(*at)
    if isinstance(mask, Not):
        inner = cell(mask.mask)
        return None if inner is None else lambda *at: ~inner(*at)
    if isinstance(mask, Band):
        before, after, place = mask.before, mask.after, _position(mask.offset)

        def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            ahead = key - place(batch, query)
            allowed = ahead == ahead if before is None else ahead >= -before
            return allowed if after is None else allowed & (ahead <= after)

        return near
    if isinstance(mask, Strided):
        step, place = mask.step, _position(mask.offset)
        return lambda batch, head, query, key: (place(batch, query) - key) % step == 0
    if isinstance(mask, Chunk):
        size, place = mask.size, _position(mask.offset)
        return lambda batch, head, query, key: place(batch, query) // size == key // size
    if isinstance(mask, Prefix):
        n = mask.n
        return lambda batch, head, query, key: key < (n[batch] if isinstance(n, Tensor) else n)
    if isinstance(mask, Document):
        of_query, of_key = mask.query_ids, mask.key_ids
        rows, columns = len(of_query), len(of_key)
        return lambda batch, head, query, key: of_query[batch % rows, query] == of_key[batch % columns, key]
    if isinstance(mask, Padding):
        keys = mask.keys
        if keys.dtype == torch.bool:
            return lambda batch, head, query, key: keys[batch % len(keys), key]
        return lambda batch, head, query, key: key < keys[batch % len(keys)]
    if isinstance(mask, Dense):
        cells, (a, b, c, d) = mask.mask, mask.mask.shape
        return lambda batch, head, query, key: cells[batch % a, head % b, query % c, key % d]
    if isinstance(mask, Where):
        return mask.fn
    return None


def _position(offset: int | Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Where a query stands."""
    if isinstance(offset, Tensor):
        return lambda batch, query: query + offset[batch % len(offset)]
    return lambda batch, query: query + (offset or 0)


class Blocks(NamedTuple):
    """What of a mask FlexAttention is told, and what nobody sees.

    Attributes:
        partial, full: which key blocks each block of queries meets, and how many: int [batch or 1, 1, rows, columns]
            and [batch or 1, 1, rows].
        queries, keys: bool [batch or 1, length], which see something, which are seen by somebody.
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    queries: Tensor
    keys: Tensor


def blocks(mask: Mask, grid: Grid) -> Blocks:
    """The blocks of a bound mask, from what it says of rectangles."""
    rows, columns = -(-grid.query_len // BLOCK), -(-grid.key_len // BLOCK)
    masks = list(row_by_row(mask, grid).values())
    order = torch.zeros(2, len(masks), 1, rows, columns, dtype=torch.int32)
    count = torch.zeros(2, len(masks), 1, rows, dtype=torch.int32)
    queries = torch.zeros(len(masks), grid.query_len, dtype=torch.bool)
    keys = torch.zeros(len(masks), grid.key_len, dtype=torch.bool)
    for n, one in enumerate(masks):
        for row in range(rows):
            of_block = range(row * BLOCK, min((row + 1) * BLOCK, grid.query_len))
            covered: dict[int, int] = {}  # keys of a block that everybody in the row sees; -1: somebody does not
            for found, tile in visible(one, of_block, range(grid.key_len)):
                for column in range(found.start // BLOCK, -(-found.stop // BLOCK)):
                    inside = min(found.stop, (column + 1) * BLOCK) - max(found.start, column * BLOCK)
                    before = covered.get(column, 0)
                    covered[column] = before + inside if tile is Tile.FULL and before >= 0 else -1
            for column, seen in covered.items():
                place = range(column * BLOCK, min((column + 1) * BLOCK, grid.key_len))
                full = seen == len(place)
                if full:
                    queries[n, of_block.start : of_block.stop] = True
                    keys[n, place.start : place.stop] = True
                else:
                    allowed = one.allowed(of_block, place).expand(-1, -1, len(of_block), len(place)).flatten(0, 1).cpu()
                    queries[n, of_block.start : of_block.stop] |= allowed.any(-1).any(0)
                    keys[n, place.start : place.stop] |= allowed.any(-2).any(0)
                order[int(full), n, 0, row, count[int(full), n, 0, row]] = column
                count[int(full), n, 0, row] += 1
    order, count, queries, keys = (t.to(grid.device) for t in (order, count, queries, keys))
    return Blocks((count[0], order[0]), (count[1], order[1]), queries, keys)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, *at: softcap * torch.tanh(score / softcap)


@lru_cache(maxsize=32)
def _planned(known: Known, grid: Grid) -> tuple[Any, Blocks]:
    """torch's BlockMask, with the function in it: the same object for the same mask, or torch compiles again."""
    from torch.nn.attention.flex_attention import BlockMask

    found = blocks(known.mask, grid)
    made = BlockMask.from_kv_blocks(
        *found.partial, *found.full, BLOCK_SIZE=BLOCK, mask_mod=cell(known.mask),
        seq_lengths=(grid.query_len, grid.key_len),
    )  # fmt: skip
    return made, found


def cannot(call: Call) -> str | None:
    """Why FlexAttention would not compute what was asked."""
    scoring = call.scoring
    if call.query.device.type != "cuda":
        return "torch's FlexAttention is taken on CUDA devices only: elsewhere it has no backward pass"
    if tracing():
        return "torch's FlexAttention is compiled by itself, and a graph that is being compiled cannot wait for it"
    if call.query.dtype == torch.float64:
        return "torch's FlexAttention has no float64"
    if call.dropout is not None:
        return "torch's FlexAttention has no dropout"
    if scoring.additive is not None:
        return "torch's FlexAttention has no additive similarity"
    if scoring.bias is not None:
        return "biases are not handed to FlexAttention"
    if scoring.mask is not None and cell(scoring.mask) is None:
        return f"no function of one cell is known for {scoring.mask!r}"
    return None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """One call of FlexAttention; a sink, which it does not know, scales its result."""
    from torch.nn.attention.flex_attention import AuxRequest

    scoring, query, key, value = call.scoring, call.query, call.key, call.value
    mask = None
    if scoring.mask is not None and scoring.mask is not EVERYTHING:
        mask, found = _planned(Known(scoring.mask), scoring.grid)
        query = hide_where(query, found.queries[:, None])
        key, value = (hide_where(t, found.keys[:, None]) for t in (key, value))
    output, aux = _compiled()(
        query, key, value, None if scoring.softcap is None else _capped(scoring.softcap), mask, scoring.scale,
        query.shape[1] != key.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse
    if scoring.sink is not None:
        output, lse = with_sink(output, lse, scoring.sink)
    return output, lse if call.wants_lse else None


def held(call: Call) -> int:
    """The log-sum-exp, and the list of blocks."""
    grid = call.scoring.grid
    blocks = (1 + grid.query_len // BLOCK) * (1 + grid.key_len // BLOCK)
    return 4 * grid.batch * (grid.heads * grid.query_len + 4 * blocks)


def cells(call: Call) -> int:
    """Scores in all blocks."""
    grid, mask = call.scoring.grid, call.scoring.mask
    if mask is None or mask is EVERYTHING:
        return all_cells(call)
    _, found = _planned(Known(mask), grid)
    count = int(found.partial[0].sum() + found.full[0].sum()) * (grid.batch if len(found.queries) == 1 else 1)
    return count * grid.heads * BLOCK**2


KERNEL = Kernel("flex", cannot, run, cells, square=lambda call: 0, held=held)

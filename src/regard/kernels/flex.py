"""torch's FlexAttention, for masks on a GPU: the mask as a function of one cell, with empty blocks skipped.

FlexAttention compiles attention for a given function of (batch, head, query, key) and takes a list of non-empty blocks.
torch builds that list by evaluating the function in all N x N cells; here it comes from the mask's closed form for
rectangles (`Mask.tile`). On a CPU, FlexAttention has no backward pass, so strips are used there.

"auto" prefers it to strips on CUDA devices because of published results, not because of our own measurements:
Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", arXiv:2412.05496.
Mask, blocks and results are tested against the reference on a CPU, without the compiler.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.kernels.call import Call, Kernel, all_scores
from regard.kernels.known import cached_by_mask
from regard.masks import EVERYTHING, Mask, Tile
from regard.masks.planning import by_batch, visible
from regard.numerics import add_sink, zero_unless
from regard.shapes import Grid

BLOCK = 128
"""Queries and keys in a block: torch's default."""

KEY_STEP = 32
"""Keys in the smallest rectangle for which a mask is evaluated."""


class Blocks(NamedTuple):
    """The block lists that FlexAttention takes, and which queries and keys are not fully masked.

    Attributes:
        partial, full: number of key blocks for each block of queries, and their indices: int [batch or 1, 1, rows]
            and [batch or 1, 1, rows, columns].
        queries, keys: bool [batch or 1, length], False where fully masked.
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    queries: Tensor
    keys: Tensor


def blocks(mask: Mask, grid: Grid) -> Blocks:
    """The blocks of a bound mask, from its coverage of rectangles."""
    rows, columns = -(-grid.query_len // BLOCK), -(-grid.key_len // BLOCK)
    masks = list(by_batch(mask, grid).values())
    order = torch.zeros(2, len(masks), 1, rows, columns, dtype=torch.int32)
    count = torch.zeros(2, len(masks), 1, rows, dtype=torch.int32)
    queries = torch.zeros(len(masks), grid.query_len, dtype=torch.bool)
    keys = torch.zeros(len(masks), grid.key_len, dtype=torch.bool)
    for n, one in enumerate(masks):
        across = [range(row * BLOCK, min((row + 1) * BLOCK, grid.query_len)) for row in range(rows)]
        seen_by = visible(one, [(of_block, range(grid.key_len)) for of_block in across], KEY_STEP)
        for row, of_block in enumerate(across):
            covered: dict[int, int] = {}  # keys of a block that all queries of the row see; -1: some do not
            for found, tile in seen_by[row]:
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


@cached_by_mask(maxsize=32)
def _planned(mask: Mask, grid: Grid) -> tuple[Any, Blocks]:
    """torch's BlockMask: the same object for the same mask, since torch would otherwise recompile."""
    from torch.nn.attention.flex_attention import BlockMask

    found = blocks(mask, grid)
    made = BlockMask.from_kv_blocks(
        *found.partial, *found.full, BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod,
        seq_lengths=(grid.query_len, grid.key_len),
    )  # fmt: skip
    return made, found


def cannot(call: Call) -> str | None:
    """Why FlexAttention does not support a call."""
    scoring = call.scoring
    if call.query.device.type != "cuda":
        return "FlexAttention is used on CUDA devices only: on others it has no backward pass"
    if tracing():
        return "FlexAttention has to be compiled by itself, which a graph being compiled cannot do"
    if call.query.dtype == torch.float64:
        return "FlexAttention has no float64"
    if call.dropout is not None:
        return "FlexAttention has no dropout"
    if scoring.additive is not None:
        return "FlexAttention has no additive similarity"
    if scoring.bias is not None:
        return "biases are not passed to FlexAttention"
    return None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """One call of FlexAttention; a sink is applied afterwards, by rescaling the result with lse."""
    from torch.nn.attention.flex_attention import AuxRequest

    scoring, query, key, value = call.scoring, call.query, call.key, call.value
    mask = None
    if scoring.mask is not None and scoring.mask is not EVERYTHING:
        mask, found = _planned(scoring.mask, scoring.grid)
        query = zero_unless(query, found.queries[:, None])
        key, value = (zero_unless(t, found.keys[:, None]) for t in (key, value))
    output, aux = _compiled()(
        query, key, value, None if scoring.softcap is None else _capped(scoring.softcap), mask, scoring.scale,
        query.shape[1] != key.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse
    if scoring.sink is not None:
        output, lse = add_sink(output, lse, scoring.sink)
    return output, lse if call.wants_lse else None


def peak_bytes(call: Call) -> int:
    """The log-sum-exp, and the list of blocks."""
    grid = call.scoring.grid
    blocks = (1 + grid.query_len // BLOCK) * (1 + grid.key_len // BLOCK)
    return 4 * grid.batch * (grid.heads * grid.query_len + 4 * blocks)


def num_scores(call: Call) -> int:
    """Scores in all blocks."""
    grid, mask = call.scoring.grid, call.scoring.mask
    if mask is None or mask is EVERYTHING:
        return all_scores(call)
    _, found = _planned(mask, grid)
    count = int(found.partial[0].sum() + found.full[0].sum()) * (grid.batch if len(found.queries) == 1 else 1)
    return count * grid.heads * BLOCK**2


KERNEL = Kernel("flex", cannot, run, num_scores, quadratic_numbers=lambda call: 0, peak_bytes=peak_bytes)

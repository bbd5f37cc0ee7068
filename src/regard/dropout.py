"""Dropout as a function of seed and indices, so that any tile can be reproduced exactly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.indexing import Indices, indices
from regard.shapes import Grid


class Cells(NamedTuple):
    """Some of the weights of a call.

    Attributes:
        grid: the call.
    """

    grid: Grid
    batches: range
    heads: range
    queries: Indices
    keys: Indices


Places = Callable[[Cells], Cells]
"""Where cells of a call lie in another one, of which it is a part or whose tokens it has in another order."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which weights are dropped: a function of the seed and of the indices of batch, head, query and key only.

        kept  <=>  hash(seed, batch, head, query, key) >= rate * 2^16;   kept weights are divided by the share kept

    The hash is 16 of the 32 bits of MurmurHash3's finalizer, applied to a random number per row of the matrix XORed
    with one per pair of columns: the low half for the even column, the high half for the odd one. There is no state and
    no order, so tiles, kernels and the backward pass agree by construction. The rate is rounded to 1/65,536.
    """

    rate: float
    seed: int | Tensor
    """In a graph, a tensor that is drawn when the graph runs."""
    places: tuple[Places, ...] = ()
    """From this call to the one whose indices count, through each in between."""

    def seen_from(self, places: Places) -> "Dropout":
        """The dropout of a call whose cells lie at these places of this one."""
        return replace(self, places=(places, *self.places))

    def keep(
        self,
        grid: Grid,
        queries: Indices,
        keys: Indices,
        *,
        batches: range | None = None,
        heads: range | None = None,
        dtype: torch.dtype = torch.bool,
    ) -> Tensor:
        """Shapes: [batch, heads, rows, columns], True (or 1, in another dtype) where the weight is kept.

        Args:
            batches, heads: which batch indices and heads of the call; None for all.
        """
        batches = range(grid.batch) if batches is None else batches
        cells = Cells(grid, batches, range(grid.heads) if heads is None else heads, queries, keys)
        for places in self.places:
            cells = places(cells)
        grid, batches, heads, queries, keys = cells
        device = grid.device
        of_head = indices(batches, device)[:, None] * grid.heads + indices(heads, device)
        rows = of_head[..., None] * grid.query_len + indices(queries, device)
        row = _mix(_fold(rows, self.seed))[..., None]
        if isinstance(keys, range) and keys.step == 1:  # hashes whole pairs, and reads two cells from each
            pairs = torch.arange(keys.start // 2, -(-keys.stop // 2), device=device)
            first = keys.start % 2
            halves = self._hash(row, pairs).flatten().view(torch.int16).view(*row.shape[:3], 2 * len(pairs))
            halves = halves[..., first : first + len(keys)]
        else:
            columns = indices(keys, device)
            halves = (self._hash(row, columns // 2) >> 16 * (columns % 2)).to(torch.int16)
        least = min(round(self.rate * 2**16), 2**16 - 1) - 2**15
        return torch.ge(halves, least, out=torch.empty(halves.shape, dtype=dtype, device=device))

    def _hash(self, row: Tensor, pairs: Tensor) -> Tensor:
        return _mix(row ^ _mix(_fold(pairs, self.seed ^ 0x5DEECE66D)))


def drawn(generator: torch.Generator | None = None) -> int | Tensor:
    """A seed from a generator, by default torch's own."""
    device = "cpu" if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (), generator=generator, device=device)
    return seed if tracing() else int(seed)


def _fold(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """64-bit numbers and a seed, folded to int32 (wrapping): high halves are multiplied in, so no bits are lost."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    mixed = (numbers ^ low) * 0x2545F491 + (numbers >> 32) * 0x85EBCA6B + high * 0x9E3779B9
    return _signed(mixed)


def _signed(numbers: Tensor) -> Tensor:
    return ((numbers & 0xFFFFFFFF) ^ 0x80000000).sub(0x80000000).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer, on int32 that wraps; overwrites x."""
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    return x

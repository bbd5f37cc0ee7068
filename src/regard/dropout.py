"""Dropout as a function of seed and indices, so that any tile can be reproduced exactly."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.indexing import Indices, indices
from regard.shapes import Grid

MAX_KEPT_NUMBERS = 1 << 20
"""Rows, over batch and heads, or pairs of columns whose random numbers are kept while a call lasts: 4 MiB. Row
"dropout, window 256" of benchmarks/features.py."""


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
    _known: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Random numbers of all rows and of all pairs of columns, since the first tile was asked for."""

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
        if isinstance(queries, range) and self._keeps(math.prod(grid[:3])):
            every = self._all(math.prod(grid[:3]), self.seed, device).view(grid[:3])
            row = every[batches.start : batches.stop, heads.start : heads.stop, _slice(queries)]
        else:
            of_head = indices(batches, device)[:, None] * grid.heads + indices(heads, device)
            row = _random(of_head[..., None] * grid.query_len + indices(queries, device), self.seed)
        if isinstance(keys, range) and keys.step == 1:  # hashes whole pairs, and reads two cells from each
            pairs, first = range(keys.start // 2, -(-keys.stop // 2)), keys.start % 2
            halves = _mix_rest(row[..., None] ^ self._of_pairs(pairs, grid))
            halves = halves.flatten().view(torch.int16).view(*row.shape, 2 * len(pairs))
            halves = halves[..., first : first + len(keys)]
        else:
            columns = indices(keys, device)
            mixed = _mix_rest(row[..., None] ^ self._of_pairs(columns // 2, grid))
            halves = (mixed >> 16 * (columns % 2)).to(torch.int16)
        least = min(round(self.rate * 2**16), 2**16 - 1) - 2**15
        return torch.ge(halves, least, out=torch.empty(halves.shape, dtype=dtype, device=device))

    def _of_pairs(self, pairs: range | Tensor, grid: Grid) -> Tensor:
        """A random number for each of these pairs of columns."""
        seed, count = self.seed ^ 0x5DEECE66D, -(-grid.key_len // 2)
        if isinstance(pairs, range) and self._keeps(count):
            return self._all(count, seed, grid.device)[_slice(pairs)]
        return _random(indices(pairs, grid.device), seed)

    def _keeps(self, count: int) -> bool:
        """Whether so many random numbers are kept for the next tile; not for a part of a larger call."""
        return isinstance(self.seed, int) and not (self.places or tracing()) and count <= MAX_KEPT_NUMBERS

    def _all(self, count: int, seed: int | Tensor, device: torch.device) -> Tensor:
        """Random numbers for 0 to count - 1."""
        key = count, int(seed)
        if key not in self._known or self._known[key].device != device:
            with torch.inference_mode(False):  # backward may use them outside that mode
                self._known[key] = _random(torch.arange(count, device=device), seed)
        return self._known[key]


def _slice(places: range) -> slice:
    return slice(places.start, places.stop, places.step)


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


def _random(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """An int32 for each number, with the first step of the next round of the finalizer.

    That step is the same for an XOR of two numbers and for each of them alone, so it is done for rows and columns
    instead of for all cells.
    """
    return _first_step(_mix_rest(_first_step(_fold(numbers, seed))))


def _first_step(x: Tensor) -> Tensor:
    """The first line of MurmurHash3's 32-bit finalizer, on int32 that wraps; overwrites x."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _mix_rest(x: Tensor) -> Tensor:
    """The other lines."""
    x *= -2048144789  # 0x85EBCA6B
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= -1028477387  # 0xC2B2AE35
    return _first_step(x)

"""Dropout as a function of seed and indices, so that any tile can be reproduced exactly."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.graphs import has_numbers, is_of_many
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

Write = Callable[[Tensor, int, int, int], None]
"""Writes the random numbers of so many rows, for a seed, into a tensor of int32, and those of keys for another one."""

OF_COLUMNS = 0x5DEECE66D
"""The seed of columns is that of rows XORed with this."""


class Numbers(NamedTuple):
    """Random numbers of rows and columns, which decide which weights are dropped.

    Attributes:
        rows: [batch, heads, queries]. columns: each key has that of its pair of columns, [batch or 1, 1, keys].
        odd: whether a key is the second of its pair: 0 or 1 for the first of consecutive keys; for each of others.
    """

    rows: Tensor
    columns: Tensor
    odd: int | Tensor

    def odds(self) -> Tensor:
        """For each key, also of consecutive ones: [batch or 1, 1, keys]."""
        if isinstance(self.odd, Tensor):
            return self.odd
        return odd_keys(self.columns.shape[2], self.odd, self.columns.device)


def odd_keys(length: int, odd: int, device: torch.device) -> Tensor:
    """Which of consecutive keys are the second of their pair, if the first is (1) or is not (0): [1, 1, length]."""
    return torch.arange(length, dtype=torch.int32, device=device).add_(odd).bitwise_and_(1)[None, None]


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
    """In a graph, a tensor that is drawn when the graph runs; so in torch.func.vmap, if it draws another for each."""
    places: tuple[Places, ...] = ()
    """From this call to the one whose indices count, through each in between."""
    _known: dict[Grid, Numbers] = field(default_factory=dict, init=False, compare=False, repr=False)
    _written: dict[Grid, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The numbers of a whole call, since its first pass."""

    @property
    def factor(self) -> float:
        """What weights that are kept are multiplied by."""
        return 1.0 / (1.0 - self.rate)

    @property
    def least(self) -> int:
        """The smallest hash, as a signed number of 16 bits, of a weight that is kept."""
        return min(round(self.rate * 2**16), 2**16 - 1) - 2**15

    def drawn_anew(self) -> "Dropout":
        """That of a later call like this one."""
        return Dropout(self.rate, drawn(), self.places)

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
    ) -> Tensor:
        """Shapes: [batch, heads, rows, columns], 1 where the weight is kept, 0 elsewhere: int16, as it is found.

        Args:
            batches, heads: which batch indices and heads of the call; None for all.
        """
        batches = range(grid.batch) if batches is None else batches
        heads = range(grid.heads) if heads is None else heads
        return self.kept(*self._numbers(Cells(grid, batches, heads, queries, keys)))

    def kept(self, rows: Tensor, columns: Tensor, odd: int | Tensor) -> Tensor:
        """The same from some of a call's numbers: [..., rows] and twice [..., columns] -> [..., rows, columns]."""
        length = columns.shape[-1]
        if isinstance(odd, int):  # hashes whole pairs, and reads two cells from each
            columns = torch.cat([columns[..., :1], columns[..., 1::2]], -1) if odd else columns[..., ::2].contiguous()
        mixed, of_many = None, is_of_many(rows)  # for which torch.func.vmap has fewer operators
        if not of_many:
            mixed = torch.empty((*rows.shape, columns.shape[-1]), dtype=torch.int32, device=rows.device)
        mixed = _mix_rest(torch.bitwise_xor(rows[..., None], columns[..., None, :], out=mixed))
        if isinstance(odd, int):
            halves = mixed.view(torch.int16)[..., odd : odd + length]
        else:
            halves = mixed.bitwise_right_shift_(16 * odd[..., None, :]).to(torch.int16)
        return (halves >= self.least).to(torch.int16) if of_many else halves.ge_(self.least)

    def numbers(self, grid: Grid) -> Numbers:
        """The numbers of a whole call, kept as long as it lasts."""
        if grid not in self._known:
            with torch.inference_mode(False):  # backward may use them outside that mode
                self._known[grid] = self._of_all(grid)
        return self._known[grid]

    def written(self, grid: Grid, write: Write) -> Tensor:
        """The numbers of all rows of a call that is no part of another, [batch, heads, query_len], and of its keys, one
        after another; kept as long as it lasts, since a small call has no time for more tensors."""
        if grid not in self._written:
            rows, seed = grid.batch * grid.heads * grid.query_len, int(self.seed)
            numbers = self._written[grid] = torch.empty(rows + grid.key_len, dtype=torch.int32)
            write(numbers, rows, seed, seed ^ OF_COLUMNS)
        return self._written[grid]

    def _of_all(self, grid: Grid) -> Numbers:
        batches = [range(at, at + 1) for at in range(grid.batch)] if self.places else [range(grid.batch)]
        every = range(grid.heads), range(grid.query_len), range(grid.key_len)
        rows, columns, odd = zip(*(self._numbers(Cells(grid, batch, *every)) for batch in batches), strict=True)
        return Numbers(torch.cat(rows), torch.cat(columns), torch.cat(odd) if isinstance(odd[0], Tensor) else odd[0])

    def _numbers(self, cells: Cells) -> Numbers:
        for places in self.places:
            cells = places(cells)
        grid, batches, heads, queries, keys = cells
        device = grid.device
        of_head = indices(batches, device)[:, None] * grid.heads + indices(heads, device)
        rows = _random(of_head[..., None] * grid.query_len + indices(queries, device), self.seed)
        seed = self.seed ^ OF_COLUMNS
        if isinstance(keys, range) and keys.step == 1:
            pairs, odd = torch.arange(keys.start // 2, -(-keys.stop // 2), device=device), keys.start % 2
            columns = _random(pairs, seed).repeat_interleave(2)[odd : odd + len(keys)]
            return Numbers(rows, columns[None, None], odd)
        of_key = indices(keys, device)
        return Numbers(rows, _random(of_key // 2, seed)[None, None], (of_key % 2).int()[None, None])


def drawn(generator: torch.Generator | None = None) -> int | Tensor:
    """A seed from a generator, by default torch's own."""
    device = "cpu" if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (), generator=generator, device=device)
    return int(seed) if has_numbers(seed) else seed


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
    """The other lines. What is needed in between lies in one piece of memory: what is new is slow at first."""
    x *= -2048144789  # 0x85EBCA6B
    shifted = x >> 13
    x ^= shifted.bitwise_and_(0x7FFFF)
    x *= -1028477387  # 0xC2B2AE35
    shifted = torch.bitwise_right_shift(x, 16, out=None if is_of_many(x) else shifted)
    x ^= shifted.bitwise_and_(0xFFFF)
    return x

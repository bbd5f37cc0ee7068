"""Masks and biases of recordings: of several calls merged into one, or with one key hidden."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from regard.biases import Bias
from regard.indexing import Indices, indices
from regard.masks import EVERYTHING, Mask, Tile
from regard.masks.algebra import together
from regard.rules import Rule
from regard.shapes import Grid


class _Pieces(Rule):
    """The masks or biases of several calls, concatenated along the queries.

    Args:
        pieces: the mask or bias of each call, or None.
        lengths: query_len, first key and key_len of each call.
    """

    def __init__(self, pieces: Sequence[Any], lengths: Sequence[Sequence[int]]) -> None:
        self.pieces, self.lengths = list(pieces), [tuple(each) for each in lengths]
        self.ends = list(accumulate(query_len for query_len, _, _ in self.lengths))

    def bind(self, grid: Grid) -> Self:
        bound = [
            None if piece is None else piece.bind(grid._replace(query_len=query_len, key_len=key_len))
            for piece, (query_len, _, key_len) in zip(self.pieces, self.lengths, strict=True)
        ]
        return type(self)(bound, self.lengths)

    def places(self, query: Tensor, key: Tensor) -> Iterator[tuple[Any, Tensor, Tensor, Tensor]]:
        """Each piece, whether query and key belong to it, and their indices in it (arbitrary, if they do not)."""
        for piece, end, (query_len, first, key_len) in zip(self.pieces, self.ends, self.lengths, strict=True):
            row, column = query - (end - query_len), key - first
            inside = (row >= 0) & (row < query_len) & (column >= 0) & (column < key_len)
            yield piece, inside, row.clamp(0, query_len - 1), column.clamp(0, key_len - 1)

    def join(
        self, queries: Indices, keys: Indices, say: Callable[[Any, Tensor, Tensor], Tensor], nothing: Tensor
    ) -> Tensor:
        """The values of all pieces [batch or 1, heads or 1, rows, columns]; `nothing` where a piece lacks the key."""
        rows, columns = indices(queries), indices(keys)
        parts = []
        of_rows = torch.bucketize(rows, torch.tensor(self.ends, device=rows.device), right=True)
        for piece in of_rows.unique().tolist():
            query_len, first, key_len = self.lengths[piece]
            here = (of_rows == piece).nonzero()[:, 0]
            there = ((columns >= first) & (columns < first + key_len)).nonzero()[:, 0]
            said = say(self.pieces[piece], rows[here] - (self.ends[piece] - query_len), columns[there] - first)
            parts.append((here, there, said))
        batch, heads = (max((said.shape[axis] for _, _, said in parts), default=1) for axis in (0, 1))
        dtype = reduce(torch.promote_types, (said.dtype for _, _, said in parts)) if parts else nothing.dtype
        whole = nothing.to(rows.device, dtype).expand(batch, heads, len(rows), len(columns)).clone()
        for here, there, said in parts:
            whole[:, :, here[:, None], there] = said.to(dtype).expand(batch, heads, len(here), len(there))
        return whole

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<{len(self.pieces)} calls>)"


class PiecesMask(_Pieces, Mask):
    """The masks of several calls, concatenated along the queries; keys that a call did not have are hidden."""

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        def say(mask: Mask | None, rows: Tensor, columns: Tensor) -> Tensor:
            return (EVERYTHING if mask is None else mask).allowed(rows, columns)

        return self.join(queries, keys, say, torch.zeros((), dtype=torch.bool))

    def coverage(self, rows: range, columns: range) -> Tile:
        def tile(piece: int) -> Tile:
            query_len, first, key_len = self.lengths[piece]
            start = self.ends[piece] - query_len
            mine = range(max(rows.start - start, 0), min(rows.stop - start, query_len))
            there = range(max(columns.start - first, 0), min(columns.stop - first, key_len))
            if not there:
                return Tile.EMPTY
            mask = self.pieces[piece]
            inside = Tile.FULL if mask is None else mask.tile(mine, there)
            return Tile.PARTIAL if inside is Tile.FULL and len(there) < len(columns) else inside

        first, last = (bisect_right(self.ends, row) for row in (rows[0], rows[-1]))
        return together(tile(piece) for piece in range(len(self.pieces))[first : last + 1] if self.lengths[piece][0])

    def breaks(self, query_len: int) -> set[int]:
        return set(self.ends)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query != query
        for mask, inside, row, column in self.places(query, key):
            allowed = allowed | (inside if mask is None else inside & mask.rule(batch, head, row, column))
        return allowed


class PiecesBias(_Pieces, Bias):
    """The biases of several calls, concatenated along the queries."""

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        def say(bias: Bias | None, rows: Tensor, columns: Tensor) -> Tensor:
            return torch.zeros(1, 1, 1, 1, device=rows.device) if bias is None else bias.values(rows, columns)

        return self.join(queries, keys, say, torch.zeros(()))

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        numbers: Tensor | float = 0.0
        for bias, inside, row, column in self.places(query, key):
            if bias is not None:
                numbers = numbers + torch.where(inside, bias.rule(batch, head, row, column), 0.0)
        return numbers + torch.zeros((), device=query.device)


class HiddenKey(Mask):
    """Allows everything except one key in one head.

    >>> print(HiddenKey(head=0, key=1).draw(2, 3))
    # . #
    # . #
    """

    def __init__(self, head: int, key: int) -> None:
        self.head, self.key = head, key

    def bind(self, grid: Grid) -> Mask:
        return EVERYTHING if self.key >= grid.key_len or self.head >= grid.heads else self._bound(grid)

    def _size(self, axis: str) -> int:
        return self.head + 1 if axis == "heads" else 1

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (head != self.head) | (key != self.key)

    def coverage(self, rows: range, columns: range) -> Tile:
        if self.key not in columns:
            return Tile.FULL
        heads = self._size("heads") if self._heads is None else self._heads
        return Tile.EMPTY if heads == 1 and len(columns) == 1 else Tile.PARTIAL

    def __repr__(self) -> str:
        return f"HiddenKey(head={self.head}, key={self.key})"

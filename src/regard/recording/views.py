"""Masks and biases as a recording sees them: those of several calls as one, those of some heads, one without a key."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from regard.biases import Bias
from regard.indexing import Indices, indices, lookup
from regard.masks import EVERYTHING, Mask, Tile
from regard.masks.algebra import together
from regard.shapes import Grid


class PiecesMask(Mask):
    """The masks of several calls, one below the other; keys that a call did not have are hidden from its queries."""

    def __init__(self, masks: Sequence[Mask | None], lengths: Sequence[Sequence[int]]) -> None:
        self.masks, self.lengths = list(masks), [tuple(pair) for pair in lengths]
        self._pieces = _Stacked(self.lengths)

    def bind(self, grid: Grid) -> "PiecesMask":
        bound = [
            None if mask is None else mask.bind(grid._replace(query_len=query_len, key_len=key_len))
            for mask, (query_len, _, key_len) in zip(self.masks, self.lengths, strict=True)
        ]
        return PiecesMask(bound, self.lengths)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        def cells(piece: int, rows: Tensor, columns: Tensor) -> Tensor:
            mask = self.masks[piece]
            return (EVERYTHING if mask is None else mask).allowed(rows, columns)

        return self._pieces.cells(indices(queries), indices(keys), cells, torch.zeros((), dtype=torch.bool))

    def coverage(self, rows: range, columns: range) -> Tile:
        def tile(piece: int, rows: range) -> Tile:
            _, first, key_len = self.lengths[piece]
            there = range(max(columns.start - first, 0), min(columns.stop - first, key_len))
            if not there:
                return Tile.EMPTY
            mask = self.masks[piece]
            inside = Tile.FULL if mask is None else mask.tile(rows, there)
            return Tile.PARTIAL if inside is Tile.FULL and len(there) < len(columns) else inside

        return together(tile(piece, rows) for piece, rows in self._pieces.of(rows))

    def breaks(self, query_len: int) -> set[int]:
        return set(self._pieces.ends)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query != query
        for mask, (inside, row, column) in zip(self.masks, self._pieces.places(query, key), strict=True):
            allowed = allowed | (inside if mask is None else inside & mask.rule(batch, head, row, column))
        return allowed

    def __repr__(self) -> str:
        return f"PiecesMask(<{len(self.masks)} calls>)"


class PiecesBias(Bias):
    """The biases of several calls, one below the other."""

    def __init__(self, biases: Sequence[Bias | None], lengths: Sequence[Sequence[int]]) -> None:
        self.biases, self.lengths = list(biases), [tuple(pair) for pair in lengths]
        self._pieces = _Stacked(self.lengths)

    def bind(self, grid: Grid) -> "PiecesBias":
        bound = [
            None if bias is None else bias.bind(grid._replace(query_len=query_len, key_len=key_len))
            for bias, (query_len, _, key_len) in zip(self.biases, self.lengths, strict=True)
        ]
        return PiecesBias(bound, self.lengths)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        def cells(piece: int, rows: Tensor, columns: Tensor) -> Tensor:
            bias = self.biases[piece]
            return torch.zeros(1, 1, 1, 1, device=rows.device) if bias is None else bias.values(rows, columns)

        return self._pieces.cells(indices(queries), indices(keys), cells, torch.zeros(()))

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        numbers: Tensor | float = 0.0
        for bias, (inside, row, column) in zip(self.biases, self._pieces.places(query, key), strict=True):
            if bias is not None:
                numbers = numbers + torch.where(inside, bias.rule(batch, head, row, column), 0.0)
        return numbers + torch.zeros((), device=query.device)

    def __repr__(self) -> str:
        return f"PiecesBias(<{len(self.biases)} calls>)"


class _Stacked:
    """Calls of (query_len, first key, key_len) one below the other: which rows of a rectangle are whose."""

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.lengths = lengths
        self.ends: list[int] = list(accumulate(query_len for query_len, _, _ in lengths))

    def of(self, rows: range) -> Iterator[tuple[int, range]]:
        """The pieces in which these rows lie, with the rows as they are counted there."""
        start = rows.start
        for piece in range(bisect_right(self.ends, rows.start), len(self.ends)):
            if start >= rows.stop:
                return
            first = self.ends[piece] - self.lengths[piece][0]
            stop = min(rows.stop, self.ends[piece])
            yield piece, range(start - first, stop - first)
            start = stop

    def places(self, query: Tensor, key: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each piece: whether query and key are its own, and where they stand in it (anywhere, if they are not)."""
        for end, (query_len, first, key_len) in zip(self.ends, self.lengths, strict=True):
            row, column = query - (end - query_len), key - first
            inside = (row >= 0) & (row < query_len) & (column >= 0) & (column < key_len)
            yield inside, row.clamp(0, query_len - 1), column.clamp(0, key_len - 1)

    def cells(
        self, rows: Tensor, columns: Tensor, ask: Callable[[int, Tensor, Tensor], Tensor], nothing: Tensor
    ) -> Tensor:
        """Cells [batch or 1, heads or 1, rows, columns] put together; `nothing` where a piece has no such key."""
        parts = []
        ends = torch.tensor(self.ends, device=rows.device)
        of_rows = torch.bucketize(rows, ends, right=True)
        for piece in of_rows.unique().tolist():
            query_len, first, key_len = self.lengths[piece]
            here = (of_rows == piece).nonzero()[:, 0]
            there = ((columns >= first) & (columns < first + key_len)).nonzero()[:, 0]
            answer = ask(piece, rows[here] - (self.ends[piece] - query_len), columns[there] - first)
            parts.append((here, there, answer))
        batch, heads = (max((part[2].shape[axis] for part in parts), default=1) for axis in (0, 1))
        dtype = parts[0][2].dtype if parts else nothing.dtype
        for part in parts[1:]:
            dtype = torch.promote_types(dtype, part[2].dtype)
        whole = nothing.to(rows.device, dtype).expand(batch, heads, len(rows), len(columns)).clone()
        for here, there, answer in parts:
            whole[:, :, here[:, None], there] = answer.to(dtype).expand(batch, heads, len(here), len(there))
        return whole


class HeadsMask(Mask):
    """What a mask says of some heads. Args: heads: their numbers. of: how many the mask is for."""

    def __init__(self, mask: Mask, heads: Sequence[int], of: int) -> None:
        self.mask, self.heads, self.of = mask, list(heads), of

    def bind(self, grid: Grid) -> "HeadsMask":
        return HeadsMask(self.mask.bind(grid._replace(heads=self.of)), self.heads, self.of)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        cells = self.mask.allowed(queries, keys)
        return cells if cells.shape[1] == 1 else cells[:, self.heads]

    def coverage(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.rule(batch, lookup(torch.tensor(self.heads), head), query, key)

    def __repr__(self) -> str:
        return repr(self.mask)


class HeadsBias(Bias):
    """What a bias adds in some heads; as `HeadsMask`."""

    def __init__(self, bias: Bias, heads: Sequence[int], of: int) -> None:
        self.bias, self.heads, self.of = bias, list(heads), of

    def bind(self, grid: Grid) -> "HeadsBias":
        return HeadsBias(self.bias.bind(grid._replace(heads=self.of)), self.heads, self.of)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        cells = self.bias.values(queries, keys)
        return cells if cells.shape[1] == 1 else cells[:, self.heads]

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.rule(batch, lookup(torch.tensor(self.heads), head), query, key)

    def __repr__(self) -> str:
        return repr(self.bias)


class HiddenKey(Mask):
    """Everything but one key in one head.

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

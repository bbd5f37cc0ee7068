"""The masks and biases that a recording needs beside those of a call, and every one of them as plain data."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard import masks
from regard.biases import Alibi, Bias, Given, RelativeBias, Sum
from regard.masks import (
    EVERYTHING,
    And,
    Band,
    Causal,
    Chunk,
    Document,
    Indices,
    Mask,
    Not,
    Or,
    Prefix,
    Strided,
    Tile,
    Window,
    indices,
    together,
)
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

    def _tile(self, rows: range, columns: range) -> Tile:
        def tile(piece: int, rows: range) -> Tile:
            _, first, key_len = self.lengths[piece]
            there = range(max(columns.start - first, 0), min(columns.stop - first, key_len))
            if not there:
                return Tile.EMPTY
            mask = self.masks[piece]
            inside = Tile.FULL if mask is None else mask.tile(rows, there)
            return Tile.PARTIAL if inside is Tile.FULL and len(there) < len(columns) else inside

        return together(tile(piece, rows) for piece, rows in self._pieces.of(rows))

    @property
    def by_row(self) -> bool:
        return any(mask is not None and mask.by_row for mask in self.masks)

    def of_row(self, row: int) -> "PiecesMask":
        return PiecesMask([None if mask is None else mask.of_row(row) for mask in self.masks], self.lengths)

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

    def of_row(self, row: int) -> "PiecesBias":
        return PiecesBias([None if bias is None else bias.of_row(row) for bias in self.biases], self.lengths)

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

    def _tile(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    @property
    def by_row(self) -> bool:
        return self.mask.by_row

    def of_row(self, row: int) -> "HeadsMask":
        return HeadsMask(self.mask.of_row(row), self.heads, self.of)

    def breaks(self, query_len: int) -> set[int]:
        return self.mask.breaks(query_len)

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

    def of_row(self, row: int) -> "HeadsBias":
        return HeadsBias(self.bias.of_row(row), self.heads, self.of)

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
        self._heads = head + 1

    def bind(self, grid: Grid) -> Mask:
        if self.key >= grid.key_len or self.head >= grid.heads:
            return EVERYTHING
        bound = HiddenKey(self.head, self.key)
        bound._heads = grid.heads
        return bound

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        queries, keys = indices(queries), indices(keys)
        head = torch.arange(self._heads, device=keys.device)[:, None, None] == self.head
        return ~(head & (keys == self.key)).expand(1, -1, len(queries), -1)

    def _tile(self, rows: range, columns: range) -> Tile:
        if self.key not in columns:
            return Tile.FULL
        return Tile.EMPTY if self._heads == 1 and len(columns) == 1 else Tile.PARTIAL

    def __repr__(self) -> str:
        return f"HiddenKey(head={self.head}, key={self.key})"


PARTS: dict[type, tuple[str, ...]] = {
    **masks.PARTS,
    HiddenKey: ("head", "key"),
    HeadsMask: ("mask", "heads", "of"),
    PiecesMask: ("masks", "lengths"),
    Given: ("numbers",),
    Sum: ("left", "right"),
    Alibi: ("slopes", "offset"),
    RelativeBias: ("table", "bidirectional", "max_distance", "offset"),
    HeadsBias: ("bias", "heads", "of"),
    PiecesBias: ("biases", "lengths"),
}
"""Every mask and bias that is made of data, and the arguments that make it again."""

KINDS = {kind.__name__: kind for kind in PARTS}
OF_POSITIONS = (type(EVERYTHING), Band, Causal, Window, Prefix, Strided, Chunk, And, Or, Not, Sum, Alibi, RelativeBias)
"""Those that know nothing but positions, unless an offset or length is given."""

Part = TypeVar("Part", bound=Mask | Bias)


def arguments_of(part: Mask | Bias) -> dict[str, Any]:
    """What makes a mask or bias again."""
    found = {name: getattr(part, name) for name in PARTS[type(part)]}
    if isinstance(part, Document) and part.key_ids is part.query_ids:
        found["key_ids"] = None
    return found


def made_from(kind: type, arguments: Mapping[str, Any]) -> Any:
    return EVERYTHING if kind is type(EVERYTHING) else kind(**arguments)


def each_tensor(part: Part, change: Callable[[Tensor], Tensor]) -> Part:
    """The same mask or bias with its tensors changed; one that is no data, as it is."""
    if type(part) not in PARTS:
        return part
    changed = {
        name: change(value)
        if isinstance(value, Tensor)
        else each_tensor(value, change)
        if isinstance(value, (Mask, Bias))
        else value
        for name, value in arguments_of(part).items()
    }
    made: Part = made_from(type(part), changed)
    return made


def same(one: Any, other: Any) -> bool:
    """Whether two masks, biases, tensors or numbers are the same; of two functions, whether they are one."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    if type(one) is not type(other) or type(one) not in PARTS:
        return bool(one == other)
    mine, others = arguments_of(one), arguments_of(other)
    return all(same(mine[name], others[name]) for name in mine)


def by_position(part: Mask | Bias | None) -> bool:
    """Whether it depends on nothing but where query and key stand, counted from the last of both."""
    if part is None:
        return True
    if type(part) not in OF_POSITIONS:
        return False
    given = arguments_of(part)
    return (
        given.get("offset") is None
        and not isinstance(given.get("n"), Tensor)
        and all(by_position(value) for value in given.values() if isinstance(value, (Mask, Bias)))
    )

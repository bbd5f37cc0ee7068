"""Some batch rows and heads of a call: what of its keys, mask and bias belongs to them.

Tensors in, views of tensors out, and masks and biases seen by those rows and heads; no score is computed here.
"""

from torch import Tensor

from regard.biases import Bias
from regard.indexing import Indices
from regard.masks import Mask, Tile
from regard.shapes import Grid


def kv_of_heads(kv: Tensor, num_heads: int, heads: range) -> Tensor:
    """The keys or values of some of `num_heads` query heads: a view where every kv head keeps equally many of them.

    Shapes: kv [batch, kv_heads, key_len, size] -> [batch, some or one for each head, key_len, size].
    """
    group = num_heads // kv.shape[1]
    kv_heads = [head // group for head in heads]
    count = kv_heads[-1] - kv_heads[0] + 1
    each = len(heads) // count
    if len(heads) % count == 0 and all(head == kv_heads[0] + n // each for n, head in enumerate(kv_heads)):
        return kv[:, kv_heads[0] : kv_heads[-1] + 1]
    return kv[:, kv_heads]


def selected_mask(mask: Mask, grid: Grid, batch: range, heads: range) -> Mask:
    """What a mask bound to a grid says of some batch rows and heads; itself where that is the same for all."""
    cells = mask.allowed(*_corner(grid))
    return SelectedMask(mask, grid, batch, heads) if _varies(cells, batch, heads) else mask


def selected_bias(bias: Bias, grid: Grid, batch: range, heads: range) -> Bias:
    """The same for a bias."""
    cells = bias.values(*_corner(grid))
    return SelectedBias(bias, grid, batch, heads) if _varies(cells, batch, heads) else bias


class SelectedMask(Mask):
    """What a mask says of some batch rows and heads."""

    def __init__(self, mask: Mask, grid: Grid, batch: range, heads: range) -> None:
        self.mask, self.grid, self.batch, self.heads = mask, grid, batch, heads

    def bind(self, grid: Grid) -> Mask:
        return self  # of a mask that is bound already

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return _narrowed(self.mask.allowed(queries, keys), self.batch, self.heads)

    @property
    def varies_by_batch(self) -> bool:
        return len(self.batch) > 1 and self.mask.varies_by_batch

    def for_batch(self, index: int) -> Mask:
        grid = self.grid._replace(batch=1)
        return SelectedMask(self.mask.for_batch(self.batch[index]).bind(grid), grid, range(1), self.heads)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.rule(batch + self.batch.start, head + self.heads.start, query, key)

    def breaks(self, query_len: int) -> set[int]:
        return self.mask.breaks(query_len)

    def coverage(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    def __repr__(self) -> str:
        return repr(self.mask)


class SelectedBias(Bias):
    """What a bias adds in some batch rows and heads."""

    def __init__(self, bias: Bias, grid: Grid, batch: range, heads: range) -> None:
        self.bias, self.grid, self.batch, self.heads = bias, grid, batch, heads

    def bind(self, grid: Grid) -> Bias:
        return self

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return _narrowed(self.bias.values(queries, keys), self.batch, self.heads)

    def for_batch(self, index: int) -> Bias:
        grid = self.grid._replace(batch=1)
        return SelectedBias(self.bias.for_batch(self.batch[index]).bind(grid), grid, range(1), self.heads)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.rule(batch + self.batch.start, head + self.heads.start, query, key)

    def __repr__(self) -> str:
        return repr(self.bias)


def _corner(grid: Grid) -> tuple[range, range]:
    """The first query and key, if there are any: what a mask or bias gives for them shows on which axes it depends."""
    return range(min(1, grid.query_len)), range(min(1, grid.key_len))


def _varies(cells: Tensor, batch: range, heads: range) -> bool:
    """Whether [batch or 1, heads or 1, rows, columns] has batch rows or heads that are not among the selected."""
    return any(size not in (1, len(chosen)) for size, chosen in zip(cells.shape[:2], (batch, heads), strict=True))


def _narrowed(cells: Tensor, batch: range, heads: range) -> Tensor:
    """The selected of [batch or 1, heads or 1, rows, columns]."""
    for axis, chosen in ((0, batch), (1, heads)):
        if cells.shape[axis] > 1:
            cells = cells.narrow(axis, chosen.start, len(chosen))
    return cells

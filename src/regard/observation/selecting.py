"""Some batch indices and heads of a call: their keys, mask and bias. No score is computed here."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from regard.biases import Bias
from regard.indexing import Indices, lookup
from regard.masks import Mask, Tile
from regard.masks.algebra import Verdict
from regard.rules import Rule
from regard.shapes import Grid


def kv_of_heads(kv: Tensor, num_heads: int, heads: range) -> Tensor:
    """The keys or values for some of `num_heads` query heads: a view if each kv head keeps equally many of them.

    Shapes: kv [batch, kv_heads, key_len, size] -> [batch, some or one for each head, key_len, size].
    """
    group = num_heads // kv.shape[1]
    kv_heads = [head // group for head in heads]
    count = kv_heads[-1] - kv_heads[0] + 1
    each = len(heads) // count
    if len(heads) % count == 0 and all(head == kv_heads[0] + n // each for n, head in enumerate(kv_heads)):
        return kv[:, kv_heads[0] : kv_heads[-1] + 1]
    return kv[:, kv_heads]


def selected(part: Any, grid: Grid, batch: range, heads: range) -> Any:
    """A mask or bias, bound to a grid, for some batch indices and heads; itself if it is the same for all."""
    if len(batch) == 1 < grid.batch:
        grid, batch, part = grid._replace(batch=1), range(1), part.for_batch(batch.start).bind(grid._replace(batch=1))
    corner = range(min(1, grid.query_len)), range(min(1, grid.key_len))  # which shows on which axes it depends
    ask, view = (part.allowed, HeadsMask) if isinstance(part, Mask) else (part.values, HeadsBias)
    sizes = zip(ask(*corner).shape[:2], (batch, heads), strict=True)
    if all(size in (1, len(chosen)) for size, chosen in sizes):
        return part
    return view(part, heads, grid.heads, None if len(batch) == grid.batch else (batch.start, batch.stop, grid.batch))


class _Selected(Rule):
    """A mask or bias for some of its heads and batch indices.

    Args:
        heads: their numbers. of: number of heads of the mask or bias.
        rows: the first batch index, the one after the last, and their number in the mask or bias; None for all.
    """

    def __init__(self, heads: Sequence[int], of: int, rows: Sequence[int] | None) -> None:
        self.heads, self.of, self.rows = list(heads), of, None if rows is None else list(rows)

    @property
    def part(self) -> Any:
        return getattr(self, self.fields[0])

    @property
    def first(self) -> int:
        return 0 if self.rows is None else self.rows[0]

    def bind(self, grid: Grid) -> Self:
        whole = grid._replace(batch=grid.batch if self.rows is None else self.rows[2], heads=self.of)
        return self._again({**self.arguments(), self.fields[0]: self.part.bind(whole)})

    def for_batch(self, index: int) -> Self:
        one = self.part.for_batch(self.first + index)
        return self._again({**self.arguments(), self.fields[0]: one, "rows": None})

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        heads = torch.tensor(self.heads, device=head.device)
        result: Tensor = self.part.rule(batch + self.first, lookup(heads, head), query, key)
        return result

    def narrowed(self, cells: Tensor) -> Tensor:
        """The selected of [batch or 1, heads or 1, rows, columns], as a view where that is possible."""
        if self.rows is not None and cells.shape[0] > 1:
            cells = cells[self.rows[0] : self.rows[1]]
        if cells.shape[1] == 1:
            return cells
        first, end = self.heads[0], self.heads[0] + len(self.heads)
        return cells[:, first:end] if self.heads == list(range(first, end)) else cells[:, self.heads]

    def __repr__(self) -> str:
        return repr(self.part)


class HeadsMask(_Selected, Mask):
    """A mask for some of its heads and batch indices."""

    def __init__(self, mask: Mask, heads: Sequence[int], of: int, rows: Sequence[int] | None = None) -> None:
        super().__init__(heads, of, rows)
        self.mask = mask

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return self.narrowed(self.mask.allowed(queries, keys))

    def coverage(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        return self.mask.verdict(top, bottom, left, right)


class HeadsBias(_Selected, Bias):
    """A bias for some of its heads and batch indices."""

    def __init__(self, bias: Bias, heads: Sequence[int], of: int, rows: Sequence[int] | None = None) -> None:
        super().__init__(heads, of, rows)
        self.bias, self.of_distance = bias, bias.of_distance

    def terms(self) -> Iterator[Bias]:
        return (self._with(bias=term, of_distance=term.of_distance) for term in self.bias.terms())

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return self.narrowed(self.bias.values(queries, keys))

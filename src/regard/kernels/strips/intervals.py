"""Masks that hold data of texts, such as padding and packed documents, as an interval of keys for every query.

Data change from batch to batch: to cut strips anew takes longer than to compute short texts. So the compiled library is
given the intervals, and strips follow from the rest of the mask, which is about positions alone:

    Causal() & Padding([2, 3])      strips of Causal(), and the keys [0, 2) and [0, 3) for all queries of a text

Keys that are hidden between the first and the last are told in words (`Compiled.bits_of`), by which the library leaves
out those that several queries side by side do not see.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from regard.indexing import lookup
from regard.kernels.hidden import MAX_KEPT_SCORES
from regard.kernels.known import cached_by_mask
from regard.kernels.strips.binding import QUERIES_OF_A_WORD, Compiled, compiled
from regard.masks import (
    And,
    Band,
    Causal,
    Dense,
    Document,
    Everything,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Tile,
    Window,
)
from regard.masks.planning import Diagonals, factors, holds_data, product_of
from regard.shapes import Grid

MAX_CELLS = 1 << 23
"""Most cells of a mask that is no tensor of them, but is evaluated: a few hundredths of a second, and 1 MiB in words.
Row "8 rows of documents or a prefix, new in every call" of features.py."""

MAX_KEPT_CELLS = 1 << 20
"""Most of them that are kept, as bytes, until the mask has its plan."""

MAX_LOOKED_AT = 1 << 24
"""Most cells of a mask that are looked at to find out whether keys are side by side: some hundredths of a second, once
for all texts of the same lengths."""

KEYS_AT_A_TIME = 128
"""KEYS of c/vectors.h."""

NUMBERS_OF_SIZES = 6
"""SIZES of c/data.h."""


class Interval(NamedTuple):
    """The first key that each query sees, and the one after the last; equal where it sees none.

    Shapes: int32 [batch or 1, query_len or 1].

    Attributes:
        words: which of these it sees, as `Compiled.bits_of` has it: [batch or 1, heads or 1, words, key_len]; None for
            all.
    """

    first: Tensor
    end: Tensor
    words: Tensor | None = None

    def __and__(self, other: "Interval") -> "Interval":
        first = self.first.maximum(other.first)
        words = other.words if self.words is None else self.words
        if self.words is not None and other.words is not None:
            words = self.words & other.words
        return Interval(first, self.end.minimum(other.end).maximum(first), words)

    def joined(self, other: "Interval") -> "Interval | None":
        """The keys of both; None if they are apart for some query."""
        if self.words is not None or other.words is not None:
            return None
        if not bool((self.first.maximum(other.first) <= self.end.minimum(other.end)).all()):
            return None
        return Interval(self.first.minimum(other.first), self.end.maximum(other.end))

    def placed(self) -> "Interval":
        """Two tensors alike in shape and strides."""
        first, end = torch.broadcast_tensors(self.first, self.end)
        return Interval(first.contiguous(), end.contiguous(), self.words)

    def of_batch(self, index: int | None) -> "Interval":
        """That of a batch index; None: of all of them."""
        if index is None or len(self.first) == 1:
            return self
        return Interval(self.first[index : index + 1], self.end[index : index + 1])

    def share_computed(self) -> float:
        """About what part of these keys the library computes: of so many at a time, those from the first that any query
        of a word sees to the last."""
        if self.words is None:
            return 1.0
        seen = (self.words != 0).any(1)
        seen = nn.functional.pad(seen, (0, -seen.shape[2] % KEYS_AT_A_TIME)).unflatten(2, (-1, KEYS_AT_A_TIME))
        seen = seen.to(torch.uint8)
        computed = (KEYS_AT_A_TIME - seen.argmax(3) - seen.flip(3).argmax(3)).mul_(seen.amax(3)).sum(2).double().mean()
        keys = (self.end - self.first).double().mean()
        return min(1.0, float(computed / keys.clamp(min=1)))

    def cells_on(self, diagonals: Diagonals, queries: range, keys: range, together: int) -> int:
        """As `regard.masks.planning.cells_on`: cells computed of a rectangle, of all batch indices there are here; its
        last queries are counted as any others, however few they are."""
        (low, high), (first, end, *_) = diagonals, self
        spare = -len(queries) % together
        of_last = torch.arange(together - 1, len(queries) + spare, together, device="cpu").clamp(max=len(queries) - 1)
        if first.shape[1] > 1:
            first, end = (side[:, queries.start : queries.stop : queries.step] for side in (first, end))
            first, end = (torch.cat([side, side[:, -1:].expand(-1, spare)], 1) for side in (first, end))
            first, end = (side.unflatten(1, (-1, together)) for side in (first, end))
            first, end = first.amin(2), end.amax(2)
        first, end = (-((keys.start - side) // keys.step) for side in (first, end))
        first, end = first.clamp(0, len(keys)), end.clamp(0, len(keys))
        if low is not None:
            first = first.maximum(torch.arange(0, len(queries), together, device="cpu") + low)
        if high is not None:
            end = end.minimum(of_last + high + 1)
        rows = together if len(queries) > together // 2 else len(queries)
        return int((end - first).clamp(min=0).expand(-1, len(of_last)).sum()) * rows


class Between(Mask):
    """Keys between two ends, which are others for each query.

    Args:
        first, end: int32 [batch or 1, query_len], the first key and the one after the last; equal where there is none.
    """

    axes: ClassVar = {"first": ("batch", "query_len"), "end": ("batch", "query_len")}

    def __init__(self, first: Tensor, end: Tensor) -> None:
        self.first, self.end = first, end

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _is_inside(self, batch, query, key)

    def coverage(self, rows: range, columns: range) -> Tile:
        first, end = self.first[:, rows.start : rows.stop], self.end[:, rows.start : rows.stop]
        if bool(((first <= columns.start) & (end >= columns.stop)).all()):
            return Tile.FULL
        some = first.clamp(min=columns.start) < end.clamp(max=columns.stop)
        return Tile.PARTIAL if bool(some.any()) else Tile.EMPTY


def _is_inside(ends: "Between | Within", batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key >= lookup(ends.first, batch, query)) & (key < lookup(ends.end, batch, query))


@cached_by_mask(maxsize=16)
def by_interval(mask: Mask, grid: Grid) -> tuple[Mask, Interval | None]:
    """A bound mask as a rule, and an interval of keys that it leaves out of the rule; None if there is none.

    The factors that hold data go into the interval, and functions, and unions, of which the strips would be several,
    unless some query sees keys that are apart. If more cells are evaluated than are kept, strips follow from the
    documents as well.
    """
    rules, found, documents = [], [], []
    for factor in factors(mask):
        interval = _interval_of(factor, grid) if isinstance(factor, Or) or holds_data(factor) else None
        if interval is None and _is_evaluated(factor):
            interval = _evaluated(factor, grid)
        if interval is None:
            rules.append(factor)
        else:
            found.append(interval)
            documents += [factor] if isinstance(factor, (Document, Between)) else []
    if not found:
        return mask, None
    if any(map(_is_evaluated, rules)) and grid.query_len * grid.key_len > MAX_KEPT_SCORES:
        rules += documents
    return product_of(rules), reduce(Interval.__and__, found).placed()


class Within(Mask):
    """An interval of keys for each query, as a mask: its fields are the arguments."""

    axes: ClassVar = {
        "first": ("batch", "query_len"), "end": ("batch", "query_len"), "words": ("batch", "heads", "words", "key_len"),
    }  # fmt: skip

    def __init__(self, first: Tensor, end: Tensor, words: Tensor | None) -> None:
        self.first, self.end, self.words = first, end, words

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = _is_inside(self, batch, query, key)
        if self.words is None:
            return inside
        words = lookup(self.words, batch, head, query // QUERIES_OF_A_WORD, key)
        return inside & (words >> query % QUERIES_OF_A_WORD & 1).bool()


def intervals_from(kept: bytes) -> Interval:
    """What the library found out about the data of a mask: `kept_intervals` of c/data.h."""
    numbers = torch.frombuffer(bytearray(kept), dtype=torch.int32)
    sizes, numbers = numbers[:NUMBERS_OF_SIZES].tolist(), numbers[NUMBERS_OF_SIZES:]
    rows, columns, *of_words = sizes
    first, end, words = numbers.split([rows * columns, rows * columns, math.prod(of_words)])
    ends = first.view(rows, columns), end.view(rows, columns)
    return Interval(*ends, words.view(of_words) if len(words) else None)


def has_gaps(kept: bytes) -> bool:
    """Whether keys are hidden between those of an interval."""
    return any(kept[8:12])


@cached_by_mask(maxsize=8)
def side_by_side(mask: Mask, grid: Grid) -> Interval | None:
    """A bound mask as an interval of keys for each query; None if there are gaps, or others for each head, or more
    cells than are looked at."""
    found = [_interval_of(factor, grid) for factor in factors(mask)]
    known = [interval for interval in found if interval is not None and interval.words is None]
    if len(known) == len(found):
        return reduce(Interval.__and__, known).placed()
    if grid.batch * grid.query_len * grid.key_len > MAX_LOOKED_AT:
        return None
    rows, parts = max(1, MAX_KEPT_SCORES // (grid.batch * grid.key_len)), []
    for start in range(0, grid.query_len, rows):
        queries = range(start, min(start + rows, grid.query_len))
        cells = mask.allowed(queries, range(grid.key_len)).expand(-1, -1, len(queries), grid.key_len)
        interval, without_gaps = _hull_of(cells[:, 0])
        if cells.shape[1] > 1 or not without_gaps:
            return None
        parts.append(interval)
    first, end = (torch.cat(sides, dim=1) for sides in zip(*((part.first, part.end) for part in parts), strict=True))
    return Interval(first, end)


def library() -> Compiled:
    """That of float32, which must be there: or strips would not be computed by it."""
    found = compiled(torch.float32)  # as `library_for` asks: without the dtype it would be another object
    assert found is not None
    return found


def _is_evaluated(rule: Mask) -> bool:
    """Whether its cells are, to find strips or what is hidden in them."""
    return not rule.closed_form or holds_data(rule)


def _interval_of(mask: Mask, grid: Grid) -> Interval | None:
    """The keys that each query sees; None if they are not side by side, or not known to be."""
    find = _FOUND_BY.get(type(mask))
    return None if find is None else find(mask, grid)


def _of_both(mask: And, grid: Grid) -> Interval | None:
    left, right = _interval_of(mask.left, grid), _interval_of(mask.right, grid)
    return None if left is None or right is None else left & right


def _of_either(mask: Or, grid: Grid) -> Interval | None:
    left, right = _interval_of(mask.left, grid), _interval_of(mask.right, grid)
    return None if left is None or right is None else left.joined(right)


def _of_others(mask: Not, grid: Grid) -> Interval | None:
    """What another mask hides; None if that lies on both sides of what it shows."""
    shown = _interval_of(mask.mask, grid)
    if shown is None or shown.words is not None:
        return None
    first, end, all_keys = *shown[:2], torch.full_like(shown.end, grid.key_len)
    none = first >= end
    if bool((none | (first == 0)).all()):
        return Interval(end.masked_fill(none, 0), all_keys)
    if bool((none | (end == grid.key_len)).all()):
        return Interval(torch.zeros_like(first), torch.where(none, all_keys, first))
    return None


def _of_everything(mask: Everything, grid: Grid) -> Interval:
    end = torch.full((1, 1), grid.key_len, dtype=torch.int32, device="cpu")
    return Interval(torch.zeros_like(end), end)


def _of_between(mask: "Between", grid: Grid) -> Interval:
    return Interval(mask.first, mask.end)


def _of_band(mask: Band, grid: Grid) -> Interval:
    at = torch.arange(grid.query_len, device="cpu") + torch.as_tensor(mask.offset, device="cpu").reshape(-1, 1)
    first = torch.zeros_like(at) if mask.before is None else (at - mask.before).clamp(0, grid.key_len)
    end = torch.full_like(at, grid.key_len) if mask.after is None else (at + mask.after + 1).clamp(0, grid.key_len)
    return Interval(first.to(torch.int32), end.maximum(first).to(torch.int32))


def _of_prefix(mask: Prefix, grid: Grid) -> Interval:
    return _first_keys(torch.as_tensor(mask.n, device="cpu"), grid)


def _of_padding(mask: Padding, grid: Grid) -> Interval | None:
    return _of_cells(mask.keys[:, None, None]) if mask.keys.dtype == torch.bool else _first_keys(mask.keys, grid)


def _of_dense(mask: Dense, grid: Grid) -> Interval | None:
    return _of_cells(mask.mask.expand(-1, -1, -1, grid.key_len))


def _evaluated(mask: Mask, grid: Grid) -> Interval | None:
    """By looking at every cell, if they are not too many."""
    cells = cells_of(mask, grid)
    return None if cells is None else _of_cells(cells)


def cells_of(mask: Mask, grid: Grid) -> Tensor | None:
    """What a bound mask says of every cell, [batch or 1, heads or 1, query_len or 1, key_len]; None if they are too
    many."""
    texts, heads, queries, keys, _ = grid
    if texts * heads * queries * keys > MAX_CELLS:
        texts, heads, *_ = mask.allowed(range(min(1, queries)), range(min(1, keys))).shape  # that differ
    cells = texts * heads * queries * keys
    if cells > MAX_CELLS:
        return None
    return _kept_cells_of(mask, grid) if cells <= MAX_KEPT_CELLS else _all_cells_of(mask, grid)


def _all_cells_of(mask: Mask, grid: Grid) -> Tensor:
    return mask.allowed(range(grid.query_len), range(grid.key_len)).expand(-1, -1, -1, grid.key_len)


_kept_cells_of = cached_by_mask(maxsize=4)(_all_cells_of)


def _of_documents(mask: Document, grid: Grid) -> Interval | None:
    if not mask.closed_form or mask.key_ids is not mask.query_ids:
        return None
    ids = mask.query_ids
    places, begins = torch.arange(ids.shape[1], dtype=torch.int32, device="cpu"), torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    first = torch.where(begins, places, 0).cummax(1).values
    ends = begins.roll(-1, 1)  # since a text begins with a document, it ends with one
    end = torch.where(ends, places + 1, ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return Interval(first, end)


_FOUND_BY: dict[type, Callable[[Any, Grid], Interval | None]] = {
    And: _of_both, Or: _of_either, Not: _of_others, Band: _of_band, Causal: _of_band, Window: _of_band,
    Prefix: _of_prefix, Padding: _of_padding, Dense: _of_dense, Document: _of_documents, Between: _of_between,
    Everything: _of_everything,
}  # fmt: skip
"""By the class itself: one derived from it may have a rule of its own."""


def _first_keys(lengths: Tensor, grid: Grid) -> Interval:
    end = lengths.reshape(-1, 1).clamp(max=grid.key_len).to(torch.int32)
    return Interval(torch.zeros_like(end), end)


def _of_cells(allowed: Tensor) -> Interval | None:
    """The keys that queries see: bool [batch or 1, heads or 1, query_len or 1, key_len]. None where they lie apart and
    there is no library to be told which."""
    of_all_heads = allowed[:, 0] if allowed.shape[1] == 1 else allowed.any(1)
    interval, side_by_side = _hull_of(of_all_heads)
    if side_by_side and allowed.shape[1] == 1:
        return interval
    found = compiled(torch.float32)
    return None if found is None else interval._replace(words=found.bits_of(allowed))


def _hull_of(cells: Tensor) -> tuple[Interval, bool]:
    """The smallest interval of each row of a mask, and whether all keys in it are allowed."""
    found = compiled(torch.float32)
    if found is None:
        seen, keys = cells.to(torch.uint8), cells.shape[2]
        count = seen.sum(2, dtype=torch.int32)  # a row of zeros has its maximum at the first
        first, end = seen.argmax(2), (keys - seen.flip(2).argmax(2)).mul_(count != 0)
        interval = Interval(first.to(torch.int32), end.to(torch.int32))
        return interval, torch.equal(interval.end - interval.first, count)
    cells = cells.contiguous()
    first, end = torch.empty(2, *cells.shape[:2], dtype=torch.int32, device="cpu").unbind()
    rows, keys = first.numel(), cells.shape[2]
    side_by_side = found.find_keys(cells.data_ptr(), rows, keys, keys, first.data_ptr(), end.data_ptr())
    return Interval(first, end), bool(side_by_side)

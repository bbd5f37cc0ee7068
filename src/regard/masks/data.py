"""Masks that hold data: documents, padding, bool tensors, functions."""

import inspect
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.indexing import Indices, as_place, lookup, pick
from regard.masks.algebra import Mask, Tile, Verdict, coverage_of
from regard.masks.positional import first_keys
from regard.shapes import (
    INTEGER_DTYPES,
    Grid,
    ShapeError,
    check_broadcast,
    check_per_batch,
    how_to_plain,
    is_plain,
    kind,
    known_true,
)


class Document(Mask):
    """Tokens of the same document: separates documents packed into one sequence.

        allowed  <=>  query_ids[b, i] == key_ids[b, j]

    Args:
        query_ids: int [batch, query_len], or [query_len] for the whole batch: the document of each query.
        key_ids: the same for keys, [batch, key_len]; default: those of the queries.

    >>> print((Causal() & Document.from_lengths([2, 3])).draw(5, 5))
    # . . . .
    # # . . .
    . . # . .
    . . # # .
    . . # # #
    """

    axes: ClassVar = {"query_ids": ("batch", "query_len"), "key_ids": ("batch", "key_len")}

    def __init__(self, query_ids: Tensor, key_ids: Tensor | None = None) -> None:
        self.query_ids = _ids(query_ids, "query_ids")
        self.key_ids = self.query_ids if key_ids is None else _ids(key_ids, "key_ids")
        if self.query_ids.device != self.key_ids.device:
            raise ValueError(
                f"Document: query_ids and key_ids must be on one device, "
                f"got {self.query_ids.device} and {self.key_ids.device}"
            )
        self._found: dict[str, bool] = {}  # cached properties of the ids, shared with bound copies

    def arguments(self) -> dict[str, Any]:
        return {"query_ids": self.query_ids, "key_ids": None if self.key_ids is self.query_ids else self.key_ids}

    @property
    def closed_form(self) -> bool:
        """Whether every document is contiguous; otherwise ids are compared."""
        return tracing() or self._ordered

    @property
    def _ordered(self) -> bool:
        """Whether queries and keys are the same tokens, with nondecreasing ids, as in packed documents."""
        if "ordered" not in self._found:
            ids = self.query_ids
            self._found["ordered"] = self.key_ids is ids and known_true((ids[:, 1:] >= ids[:, :-1]).all())
        return self._found["ordered"]

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> "Document":
        """Consecutive documents of these lengths; a list per batch index, or one list for all."""
        listed: Any = lengths.tolist() if is_plain(lengths) else lengths
        if not isinstance(listed, Sequence):
            raise TypeError(
                f"Document.from_lengths: lengths must be a list, or a list per batch index, got {kind(lengths)}"
            )
        rows = listed if listed and isinstance(listed[0], Sequence) else [listed]
        for row in rows:
            if not row or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in row):
                raise ValueError(f"Document.from_lengths: lengths must be whole numbers, 0 or more, got {row!r}")
        if len({sum(row) for row in rows}) > 1:
            raise ValueError(
                "Document.from_lengths: every batch index must hold the same number of tokens, got "
                f"{[sum(row) for row in rows]}"
            )
        ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
        return cls(torch.stack(ids))

    def _hint(self, name: str) -> str:
        return "; give key_ids too when key_len differs" if self.key_ids is self.query_ids else ""

    def breaks(self, query_len: int) -> set[int]:
        changes = (self.query_ids[:, 1:] != self.query_ids[:, :-1]).any(dim=0)
        return set((changes.nonzero()[:, 0] + 1).tolist())

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return lookup(self.query_ids, batch, query) == lookup(self.key_ids, batch, key)

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        if not self._ordered:
            return None
        # documents are contiguous, so two ranges share ids if neither ends before the other begins
        if isinstance(top, int):
            said = [_of_document(*ids) for ids in self.query_ids[:, [top, bottom, left, right]].tolist()]
            return all(empty for empty, _ in said), all(full for _, full in said)
        ids = self.query_ids.cpu()
        empty, full = _of_document(*(ids[:, at] for at in (top, bottom, left, right)))
        return empty.all(0), full.all(0)

    def coverage(self, rows: range, columns: range) -> Tile:
        if self._ordered:
            return super().coverage(rows, columns)
        queries, keys = self.query_ids[:, rows[0] : rows[-1] + 1], self.key_ids[:, columns[0] : columns[-1] + 1]
        if coverage_of(queries[:, :1] == keys) is Tile.PARTIAL:  # to one query, and so to all together
            return Tile.PARTIAL
        (query_low, query_high), (key_low, key_high) = queries.aminmax(dim=1), keys.aminmax(dim=1)
        if bool(((query_low == query_high) & (key_low == key_high) & (query_low == key_low)).all()):
            return Tile.FULL
        # overlapping ranges of ids may still be disjoint sets, so compare the ids of those batch indices
        overlap = ((query_low <= key_high) & (key_low <= query_high)).expand(max(len(queries), len(keys)))
        for index in overlap.nonzero()[:, 0].tolist():
            if bool(torch.isin(queries[index % len(queries)], keys[index % len(keys)]).any()):
                return Tile.PARTIAL
        return Tile.EMPTY


class Padding(Mask):
    """Hides padding: keys that fill the texts of a batch to equal lengths.

    Args:
        keys: int [batch], the number of real keys at the beginning of each text (right padding); or bool [batch,
            key_len], True where a key is real (padding anywhere).

    >>> print(Padding([2, 4]).draw(2, 4, batch=2))
    # # . .
    # # . .
    """

    axes: ClassVar = {"keys": ("batch", "key_len")}

    def __init__(self, keys: Sequence[int] | Tensor) -> None:
        if is_plain(keys) and keys.dtype == torch.bool:
            if keys.dim() != 2:
                raise ShapeError(
                    f"Padding: a bool mask must be [batch, key_len], got {list(keys.shape)}"
                    + {1: "; a batch of one still has a batch axis: keys[None]", 4: "; that is Dense(mask)"}.get(
                        keys.dim(), ""
                    )
                )
            self.keys = keys
            return
        if not isinstance(keys, Sequence) and not (is_plain(keys) and keys.dim() == 1):
            usual = how_to_plain(keys) or "; use .bool() on a 0/1 attention mask" * isinstance(keys, Tensor)
            raise TypeError(
                "Padding: keys must be int [batch] (how many real keys each text begins with) or bool [batch, key_len] "
                f"(True = real), got {kind(keys)}{usual}"
            )
        self.keys = check_per_batch("Padding", "keys", keys)
        if known_true((self.keys < 0).any()):
            raise ValueError(f"Padding: lengths must be 0 or more, got {self.keys.tolist()}")

    def _called(self, name: str) -> str:
        return "Padding: lengths" if self.keys.dtype != torch.bool else "Padding: keys"

    def _bound(self, grid: Grid) -> Self:
        bound = super()._bound(grid)
        if self.keys.dtype != torch.bool and known_true((self.keys > grid.key_len).any()):
            raise ShapeError(f"Padding: a row has {int(self.keys.max())} real keys, but the scores are {grid}")
        return bound

    def breaks(self, query_len: int) -> set[int]:
        """Where real tokens begin or end, if queries and keys are the same tokens."""
        if len(self.keys) > 1 or self.keys.is_meta:
            return set()
        if self.keys.dtype != torch.bool:
            return {length for length in self.keys.tolist() if 0 < length < query_len}
        changes = self.keys[0, :query_len].to(torch.int8).diff().nonzero()[:, 0] + 1
        return set(changes.tolist()) if len(changes) <= 2 else set()  # not worth it for padding within a text

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if self.keys.dtype == torch.bool:
            return lookup(self.keys, batch, key)
        return key < lookup(self.keys, batch)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        if self.keys.dtype != torch.bool:
            return super().allowed(queries, keys)
        return pick(self.keys[:, None, None], range(1), as_place(keys))  # a view: no cell is evaluated

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        if self.keys.dtype != torch.bool:
            return first_keys(self.keys.tolist(), left, right)
        if isinstance(left, int):
            tile = coverage_of(self.keys[:, left : right + 1])
            return tile is Tile.EMPTY, tile is Tile.FULL
        until = torch.nn.functional.pad(self.keys.cpu().cumsum(1), (1, 0))
        real = until[:, right + 1] - until[:, left]
        return (real == 0).all(0), (real == right + 1 - left).all(0)


class Dense(Mask):
    """A bool tensor, True = may attend: for a mask that has no structure. Holds query_len x key_len numbers.

    Args:
        mask: bool, broadcastable to [batch, heads, query_len, key_len] by the usual rule, from the right: a tensor of
            two axes is [query_len, key_len], one of three [heads, query_len, key_len]. If the sizes of a call also
            permit a reading per batch index ([batch, key_len], [batch, query_len, key_len]), it raises an error.

    >>> print(Dense(torch.tensor([[True, False], [True, True]])).draw(2, 2))
    # .
    # #
    """

    axes: ClassVar = {"mask": ("batch", "heads", "query_len", "key_len")}

    def __init__(self, mask: Tensor) -> None:
        if not is_plain(mask) or mask.dtype != torch.bool:
            raise TypeError(f"Dense: mask must be a bool tensor (True = may attend), got {kind(mask)}{_as_bool(mask)}")
        if mask.dim() > 4:
            raise ShapeError(f"Dense: mask has more axes than [batch, heads, query_len, key_len]: {list(mask.shape)}")
        self.mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        self._axes = mask.dim()

    def _bound(self, grid: Grid) -> Self:
        check_broadcast("Dense: mask", self.mask, self._axes, grid, "Padding(mask)", "Dense(mask{})")
        return super()._bound(grid)._with(_axes=4)

    @property
    def closed_form(self) -> bool:
        return False  # it evaluates every cell

    def structure(self) -> Hashable | None:
        found = super().structure()
        return None if found is None else (found, self._axes)  # which decide how it may be read

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return lookup(self.mask, batch, head, query, key)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return pick(self.mask, as_place(queries), as_place(keys))  # rows and columns at once, not cell by cell

    def coverage(self, rows: range, columns: range) -> Tile:
        return coverage_of(pick(self.mask, rows, columns))


class Where(Mask):
    """Any function ``fn(batch, head, query, key)`` of index tensors, evaluated tile by tile.

    Args:
        fn: receives int tensors [batch, 1, 1, 1], [1, heads, 1, 1], [1, 1, rows, 1], [1, 1, 1, columns] and returns a
            bool tensor that broadcasts to [batch, heads, rows, columns]. `query` and `key` are indices into the call.

    Its `tile` has no closed form: it evaluates `fn` in every cell, and returns PARTIAL for large rectangles.

    >>> print(Where(lambda batch, head, query, key: (query + key) % 3 == 0).draw(3, 3))
    # . .
    . . #
    . # .
    """

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(fn):
            raise TypeError(f"Where: fn must be a function of (batch, head, query, key), got {type(fn).__name__}")
        taken = _arguments(fn)
        if taken is not None:
            raise TypeError(
                f"Where: fn must be a function of (batch, head, query, key), got one of {taken}; "
                "for a rule of positions alone: lambda batch, head, query, key: rule(query, key)"
            )
        self.fn = fn

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        try:
            allowed = self.fn(batch, head, query, key)
        except RuntimeError as error:
            if "Boolean value of Tensor" not in str(error):
                raise
            raise TypeError(
                "Where: fn gets tensors of indices, not numbers: write & | ~ for and, or, not, and torch.where for if"
            ) from error
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = str(allowed.dtype) if isinstance(allowed, Tensor) else type(allowed).__name__
            raise TypeError(f"Where: fn must return a bool tensor (True = may attend), got {got}")
        whole = torch.broadcast_tensors(batch, head, query, key)[0].shape  # broadcast_shapes would load sympy
        wanted = whole[len(whole) - allowed.dim() :]
        if allowed.dim() > len(whole) or any(size not in (1, n) for size, n in zip(allowed.shape, wanted, strict=True)):
            raise ShapeError(f"Where: fn returned {list(allowed.shape)}, which does not broadcast to {list(whole)}")
        return allowed

    def __repr__(self) -> str:
        return f"Where({getattr(self.fn, '__name__', type(self.fn).__name__)})"


def _of_document(top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
    """The verdict by the ids of the first and last row and column."""
    return (bottom < left) | (right < top), (top == bottom) & (top == left) & (top == right)


def _ids(ids: Tensor, name: str) -> Tensor:
    if not is_plain(ids) or ids.dtype not in INTEGER_DTYPES or ids.dim() not in (1, 2):
        got = f"{ids.dtype} {list(ids.shape)}" if is_plain(ids) else type(ids).__name__
        raise TypeError(
            f"Document: {name} must be an int tensor [batch, length] or [length], got {got}{how_to_plain(ids)}"
        )
    return ids[None] if ids.dim() == 1 else ids


def _arguments(fn: Callable[..., object]) -> str | None:
    """The signature of a function that does not take four positional arguments; None if it does, or is unknown."""
    if type(fn) is FunctionType and fn.__code__.co_argcount == 4 and not fn.__code__.co_kwonlyargcount:
        return None  # in a fiftieth of the time
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # not written in Python
        return None
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        return str(signature)
    return None


def _as_bool(value: object) -> str:
    """How to convert a value for `Dense`, as the end of an error message."""
    if not is_plain(value):
        return how_to_plain(value)
    assert isinstance(value, Tensor)
    if value.is_floating_point():
        return "; numbers that are added to the scores go into bias; of 1 and 0, pass tensor.bool()"
    return "; of 1 (may attend) and 0, pass tensor.bool(); a mask [batch, key_len] is Padding(tensor.bool())"

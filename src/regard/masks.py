"""Who may attend to whom.

A mask answers two questions about a rectangle of the score matrix, queries (rows) times keys (columns), both given as
indices into the call:

    allowed(queries, keys)  True where the query may attend to the key. **True = may attend**, always.
    tile(rows, columns)     EMPTY, PARTIAL or FULL: the same answer for the whole rectangle, without looking inside.

The second is closed-form for every structured mask, which is what lets a kernel skip the empty part of a matrix that
is never built. Masks compose with ``&``, ``|`` and ``~``, print as the expression that makes them, and know no length:
query i stands at *position* ``i + offset`` and key j at position j, where the default offset ``key_len - query_len``
puts the last query on the last key (right for a cache; zero for a square). The offset is settled when a call binds the
mask to its lengths (`Mask.bind`); a mask that was never bound counts its default offset as 0.

    Causal()                 Window(2)                Causal() & Window(2)     Causal() | Prefix(2)
    # . . . .                # # . . .                # . . . .                # # . . .
    # # . . .                # # # . .                # # . . .                # # . . .
    # # # . .                . # # # .                . # # . .                # # # . .
    # # # # .                . . # # #                . . # # .                # # # # .
    # # # # #                . . . # #                . . . # #                # # # # #
"""

import inspect
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from enum import Enum
from functools import cached_property
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.shapes import Grid, ShapeError, how_to_plain, is_plain, kind

Indices = range | slice | Tensor
"""Which queries or keys: a range, a slice with a stop, or a 1-D tensor of integers."""

Offset = int | Sequence[int] | Tensor | None
"""Position of query 0: an int, one int per batch row, or None for ``key_len - query_len``."""


class Tile(Enum):
    """What a mask says of a whole rectangle, for all batch rows and heads together."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


SMALL = 1 << 20
"""Numbers in a tensor that is remembered with what was found out about it: a few per token, not per pair."""


class _Same:
    """A tensor as it is now: equal to itself until it is changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))


class Mask:
    """Which queries may attend to which keys; compose with ``&``, ``|`` and ``~``.

    >>> print((Causal() & Window(3)) | Prefix(1))
    (Causal() & Window(3)) | Prefix(1)
    >>> print((Causal() & Window(2)).draw(4, 4))
    # . . .
    # # . .
    . # # .
    . . # #
    """

    def bind(self, grid: Grid) -> "Mask":
        """This mask for one call: lengths checked, default offset settled, and simplified where that is free.

        Raises:
            ShapeError: the mask carries data for another batch, number of heads or length.
            ValueError: the mask carries data on another device.
        """
        return self

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        """True where a query may attend to a key.

        Shapes: bool, broadcastable to [batch, heads, rows, columns]; an axis that the mask does not depend on may be 1.
        """
        inside = self._allowed(indices(queries)[:, None], indices(keys)[None, :])
        return inside.reshape((1,) * (4 - inside.dim()) + inside.shape)

    def tile(self, rows: range | slice, columns: range | slice) -> Tile:
        """Whether nothing, something or everything in the rectangle is allowed, over all batch rows and heads.

        EMPTY and FULL are always true. A single mask never says PARTIAL of a rectangle that is one of them; a composed
        one may, where its parts are both PARTIAL.
        """
        rows, columns = as_range(rows), as_range(columns)
        if rows.step != 1 or columns.step != 1:
            raise ValueError(f"tile: a rectangle has no gaps, got {rows} and {columns}")
        if not rows or not columns:
            return Tile.EMPTY
        return self._tile(rows, columns)

    @property
    def by_row(self) -> bool:
        """Whether it carries data that differs between batch rows."""
        return False

    def of_row(self, row: int) -> "Mask":
        """The mask of one batch row, for a call with batch=1. Bind it before use."""
        return self

    def breaks(self, query_len: int) -> set[int]:
        """Queries before which it is good to cut a call in parts: where a document or a chunk begins."""
        return set()

    def structure(self) -> Hashable | None:
        """What two masks share that always answer alike: their kind, numbers and parts, and the tensors they hold.

        None where that cannot be told: a function may answer otherwise tomorrow, a tensor of inference mode may change
        unseen, and a large one is not worth keeping.
        """
        found: list[Any] = [type(self)]
        for part in vars(self).values():
            if isinstance(part, Mask):
                inner = part.structure()
                if inner is None:
                    return None
                found.append(inner)
            elif isinstance(part, Tensor):
                if part.numel() > SMALL or part.is_inference():
                    return None
                found.append(_Same(part))
            elif part is None or isinstance(part, (int, float, torch.device)):
                found.append(part)
            else:
                return None
        return tuple(found)

    def draw(self, query_len: int, key_len: int, *, batch: int = 1, heads: int = 1) -> str:
        """The mask of the first batch row and head as text: ``#`` may attend, ``.`` may not."""
        allowed = self.bind(Grid(batch, heads, query_len, key_len)).allowed(range(query_len), range(key_len))
        rows = allowed.expand(-1, -1, query_len, key_len)[0, 0].tolist()
        return "\n".join(" ".join("#" if cell else "." for cell in row) for row in rows)

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """`allowed` for index tensors [rows, 1] and [1, columns]."""
        raise NotImplementedError

    def _tile(self, rows: range, columns: range) -> Tile:
        """`tile` for two ranges that are not empty."""
        raise NotImplementedError

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, check_mask("&", "both sides", other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, check_mask("|", "both sides", other))

    __rand__, __ror__ = __and__, __or__  # reached only by what is no mask, which is refused

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> NoReturn:
        """Refused: ``Causal() and Window(3)`` would be `Window(3)` alone."""
        raise TypeError(
            f"{type(self).__name__}: a mask is neither true nor false. Write a & b, a | b, ~a for `a and b`, `a or b`, "
            "`not a`, and `mask is not None` to ask whether there is one"
        )

    def _no_number(self, other: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: masks are joined with & | ~, not with + - *; numbers that are added to scores are "
            "a bias (for sum() over masks: functools.reduce(operator.or_, masks))"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_number

    def __eq__(self, other: object) -> bool:
        """Whether both are the same expression of equal numbers; a mask that holds a function equals only itself."""
        if self is other or type(self) is not type(other):
            return self is other
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        line = spell(self, ours)
        return line is not None and line == spell(other, theirs) and all(map(_equal, ours, theirs))

    def __hash__(self) -> int:
        line = spell(self, [])
        return object.__hash__(self) if line is None else hash(line)


class Everything(Mask):
    """Every query may attend to every key: what a mask simplifies to where it hides nothing."""

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(len(queries), keys.shape[1], dtype=torch.bool, device=queries.device)

    def _tile(self, rows: range, columns: range) -> Tile:
        return Tile.FULL

    def __repr__(self) -> str:
        return "Everything()"


EVERYTHING = Everything()


class Structured(Mask):
    """A mask whose `tile` costs nothing, so that binding may ask it about the whole grid."""

    def bind(self, grid: Grid) -> Mask:
        bound = self._bind(grid)
        if tracing():
            return bound  # that holds for other lengths, and nothing can be asked of data
        whole = bound.tile(range(grid.query_len), range(grid.key_len))
        return EVERYTHING if whole is Tile.FULL else bound

    def _bind(self, grid: Grid) -> Self:
        """The default offset settled and carried data checked."""
        return self


class Positioned(Structured):
    """A mask that compares positions: query i stands at ``i + offset``."""

    def __init__(self, offset: Offset = None) -> None:
        self.offset = position_of_query_0(offset, type(self).__name__)

    def _bind(self, grid: Grid) -> Self:
        if isinstance(self.offset, int):
            return self
        if self.offset is None:
            return self._at(grid.key_len - grid.query_len)
        check_rows(self, "offset", self.offset, grid)
        return self

    def _at(self, offset: int) -> Self:
        """The same mask with its offset settled."""
        settled = object.__new__(type(self))
        settled.__dict__.update(self.__dict__, offset=offset)
        return settled

    @property
    def by_row(self) -> bool:
        return isinstance(self.offset, Tensor)

    def of_row(self, row: int) -> Self:
        return self._at(int(self.offset[row])) if isinstance(self.offset, Tensor) else self

    def _positions(self, queries: Tensor) -> Tensor:
        """Positions of queries [rows, 1]: [rows, 1], or [batch, 1, rows, 1] where each batch row has its offset."""
        if isinstance(self.offset, Tensor) and self.offset.dim():
            return queries + self.offset.to(queries.device)[:, None, None, None]
        return queries if self.offset is None else queries + self.offset  # torch.jit.trace has lengths in tensors

    def _offsets(self) -> list[int]:
        return sorted(set(self.offset.tolist())) if isinstance(self.offset, Tensor) else [self.offset or 0]

    def _tile(self, rows: range, columns: range) -> Tile:
        if not isinstance(self.offset, Tensor):
            return self._tile_at(self.offset or 0, rows, columns)
        return together(self._tile_at(offset, rows, columns) for offset in self._offsets())

    def _tile_at(self, offset: int, rows: range, columns: range) -> Tile:
        """`_tile` for one offset."""
        raise NotImplementedError

    def _offset_argument(self, first: bool = False) -> str:
        if self.offset is None:
            return ""
        shown = self.offset.tolist() if isinstance(self.offset, Tensor) else self.offset
        return f"{'' if first else ', '}offset={shown}"


class Band(Positioned):
    """Keys from `before` positions behind the query to `after` positions ahead of it, both included.

        allowed  <=>  -before <= key_position - query_position <= after

    Args:
        before: how many keys behind the query are seen; None for all of them.
        after: how many keys ahead of the query are seen; None for all of them.
        offset: position of query 0 (see the module); default ``key_len - query_len``.

    >>> print(Band(1, 2).draw(5, 5))
    # # # . .
    # # # # .
    . # # # #
    . . # # #
    . . . # #
    """

    def __init__(self, before: int | None, after: int | None, offset: Offset = None) -> None:
        super().__init__(offset)
        for name, value in (("before", before), ("after", after)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"Band: {name} must be an int or None (unbounded), got {value!r}")
        self.before, self.after = before, after

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        ahead = keys - self._positions(queries)
        if self.before is None:
            return torch.ones_like(ahead, dtype=torch.bool) if self.after is None else ahead <= self.after
        near = ahead >= -self.before
        return near if self.after is None else near & (ahead <= self.after)

    def _tile_at(self, offset: int, rows: range, columns: range) -> Tile:
        # key_position - query_position takes every value from `least` to `most` inside the rectangle
        least = columns[0] - (rows[-1] + offset)
        most = columns[-1] - (rows[0] + offset)
        low = least if self.before is None else -self.before
        high = most if self.after is None else self.after
        if low <= least and most <= high:
            return Tile.FULL
        return Tile.EMPTY if max(low, least) > min(high, most) else Tile.PARTIAL

    def intersection(self, other: "Band") -> "Band | None":
        """The band that is both, if both stand at the same offset."""
        if isinstance(self.offset, Tensor) or isinstance(other.offset, Tensor) or self.offset != other.offset:
            return None
        return Band(_smaller(self.before, other.before), _smaller(self.after, other.after), self.offset)

    def __repr__(self) -> str:
        return f"Band({self.before}, {self.after}{self._offset_argument()})"


class Causal(Band):
    """No query sees a later key: ``key_position <= query_position`` (Vaswani et al. 2017, section 3.2.3).

    >>> print(Causal().draw(2, 5))   # two new tokens after three in the cache
    # # # # .
    # # # # #
    >>> print(Causal(offset=0).draw(2, 5))
    # . . . .
    # # . . .
    """

    def __init__(self, offset: Offset = None) -> None:
        super().__init__(None, 0, offset)

    def __repr__(self) -> str:
        return f"Causal({self._offset_argument(first=True)})"


class Window(Band):
    """Keys closer than w: ``|query_position - key_position| < w``; with `Causal` exactly w keys, its own included.

    >>> print(Window(2).draw(4, 4))
    # # . .
    # # # .
    . # # #
    . . # #
    """

    def __init__(self, w: int, offset: Offset = None) -> None:
        self.w = positive(w, "Window: w", "Window(1) sees only the query's own position")
        super().__init__(w - 1, w - 1, offset)

    def __repr__(self) -> str:
        return f"Window({self.w}{self._offset_argument()})"


class Prefix(Structured):
    """Keys before position n, seen by every query: ``key_position < n``.

    A prefix language model is ``Causal() | Prefix(n)``; a streaming model that keeps the first tokens (Xiao et al.
    2023) is ``Causal() & (Window(w) | Prefix(4))``.

    Args:
        n: length of the prefix, or one length per batch row.

    >>> print((Causal() | Prefix(2)).draw(4, 4))
    # # . .
    # # . .
    # # # .
    # # # #
    """

    def __init__(self, n: int | Sequence[int] | Tensor) -> None:
        if isinstance(n, int) and not isinstance(n, bool):
            if n < 0:
                raise ValueError(f"Prefix: n must be 0 or more, got {n}")
            self.n: int | Tensor = n
        else:
            self.n = per_row(n, "Prefix: n")
            if _known((self.n < 0).any()):
                raise ValueError(f"Prefix: n must be 0 or more, got {self.n.tolist()}")

    def _bind(self, grid: Grid) -> Self:
        if isinstance(self.n, Tensor):
            check_rows(self, "n", self.n, grid)
        return self

    @property
    def by_row(self) -> bool:
        return isinstance(self.n, Tensor)

    def of_row(self, row: int) -> "Prefix":
        return Prefix(int(self.n[row])) if isinstance(self.n, Tensor) else self

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        n = self.n.to(keys.device)[:, None, None, None] if isinstance(self.n, Tensor) else self.n
        return keys < n

    def _tile(self, rows: range, columns: range) -> Tile:
        lengths = self.n.tolist() if isinstance(self.n, Tensor) else [self.n]
        return _first_keys(lengths, columns)

    def __repr__(self) -> str:
        return f"Prefix({self.n.tolist() if isinstance(self.n, Tensor) else self.n})"


class Strided(Positioned):
    """Keys a multiple of `step` positions away: the strided half of the sparse Transformer (Child et al. 2019).

        allowed  <=>  (query_position - key_position) mod step == 0

    >>> print((Causal() & Strided(2)).draw(5, 5))
    # . . . .
    . # . . .
    # . # . .
    . # . # .
    # . # . #
    """

    def __init__(self, step: int, offset: Offset = None) -> None:
        super().__init__(offset)
        self.step = positive(step, "Strided: step")

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (self._positions(queries) - keys) % self.step == 0

    def _tile_at(self, offset: int, rows: range, columns: range) -> Tile:
        least = rows[0] + offset - columns[-1]
        most = rows[-1] + offset - columns[0]
        first_multiple = -(-least // self.step) * self.step
        if first_multiple > most:
            return Tile.EMPTY
        return Tile.FULL if self.step == 1 or least == most else Tile.PARTIAL

    def __repr__(self) -> str:
        return f"Strided({self.step}{self._offset_argument()})"


class Chunk(Positioned):
    """Keys in the same block of `size` consecutive positions: ``query_position // size == key_position // size``.

    >>> print(Chunk(2).draw(5, 5))
    # # . . .
    # # . . .
    . . # # .
    . . # # .
    . . . . #
    """

    def __init__(self, size: int, offset: Offset = None) -> None:
        super().__init__(offset)
        self.size = positive(size, "Chunk: size")

    def breaks(self, query_len: int) -> set[int]:
        return {i for offset in self._offsets() for i in range(-offset % self.size, query_len, self.size)}

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        def chunk(positions: Tensor) -> Tensor:
            return positions.div(self.size, rounding_mode="floor")

        return chunk(self._positions(queries)) == chunk(keys)

    def _tile_at(self, offset: int, rows: range, columns: range) -> Tile:
        first_row, last_row = (rows[0] + offset) // self.size, (rows[-1] + offset) // self.size
        first_column, last_column = columns[0] // self.size, columns[-1] // self.size
        if last_row < first_column or last_column < first_row:
            return Tile.EMPTY
        return Tile.FULL if first_row == last_row == first_column == last_column else Tile.PARTIAL

    def __repr__(self) -> str:
        return f"Chunk({self.size}{self._offset_argument()})"


class Document(Mask):
    """Tokens of the same document: what keeps several documents packed in one row apart.

        allowed  <=>  query_ids[b, i] == key_ids[b, j]

    Args:
        query_ids: int [batch, query_len], or [query_len] for all rows alike; which document each query belongs to.
        key_ids: the same for keys [batch, key_len]; default: the queries' own.

    >>> print((Causal() & Document.from_lengths([2, 3])).draw(5, 5))
    # . . . .
    # # . . .
    . . # . .
    . . # # .
    . . # # #
    """

    def __init__(self, query_ids: Tensor, key_ids: Tensor | None = None) -> None:
        self.query_ids = _ids(query_ids, "query_ids")
        self.key_ids = self.query_ids if key_ids is None else _ids(key_ids, "key_ids")
        if self.query_ids.device != self.key_ids.device:
            raise ValueError(
                f"Document: query_ids and key_ids must be on one device, "
                f"got {self.query_ids.device} and {self.key_ids.device}"
            )

    @cached_property
    def _ordered(self) -> bool:
        """Whether queries and keys are the same tokens, with ids that never fall: packed documents, nearly always."""
        ids = self.query_ids
        return self.key_ids is ids and bool((ids[:, 1:] >= ids[:, :-1]).all())

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> "Document":
        """Documents of these lengths, one after another; a list per batch row, or one list for all rows."""
        listed: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        if not isinstance(listed, Sequence):
            raise TypeError(f"Document.from_lengths: lengths must be a list, or a list per batch row, got {lengths!r}")
        rows = listed if listed and isinstance(listed[0], Sequence) else [listed]
        for row in rows:
            if not row or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in row):
                raise ValueError(f"Document.from_lengths: lengths must be whole numbers, 0 or more, got {row!r}")
        if len({sum(row) for row in rows}) > 1:
            raise ValueError(
                f"Document.from_lengths: every row must hold the same number of tokens, got {[sum(r) for r in rows]}"
            )
        ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
        return cls(torch.stack(ids))

    def bind(self, grid: Grid) -> "Document":
        for name, ids, length in (
            ("query_ids", self.query_ids, grid.query_len),
            ("key_ids", self.key_ids, grid.key_len),
        ):
            if ids.shape[0] not in (1, grid.batch) or ids.shape[1] != length:
                raise ShapeError(
                    f"Document: {name} is for [batch={ids.shape[0]}, length={ids.shape[1]}], the scores are {grid}"
                    + ("; give key_ids too when key_len differs" if self.key_ids is self.query_ids else "")
                )
            check_device(self, name, ids, grid)
        return self

    @property
    def by_row(self) -> bool:
        return len(self.query_ids) > 1 or len(self.key_ids) > 1

    def of_row(self, row: int) -> "Document":
        queries = self.query_ids[row % len(self.query_ids)]
        return Document(queries, None if self.key_ids is self.query_ids else self.key_ids[row % len(self.key_ids)])

    def breaks(self, query_len: int) -> set[int]:
        changes = (self.query_ids[:, 1:] != self.query_ids[:, :-1]).any(dim=0)
        return set((changes.nonzero()[:, 0] + 1).tolist())

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        rows, columns = self.query_ids[:, queries[:, 0]], self.key_ids[:, keys[0]]
        return (rows[:, :, None] == columns[:, None, :])[:, None]

    def _tile(self, rows: range, columns: range) -> Tile:
        if self._ordered:
            # Every document is one run, so what two ranges share lies between the larger of their first ids and the
            # smaller of their last: nothing inside needs to be read.
            ends = self.query_ids[:, [rows[0], rows[-1], columns[0], columns[-1]]].tolist()
            return together(
                Tile.FULL if a == b == c == d else Tile.PARTIAL if max(a, c) <= min(b, d) else Tile.EMPTY
                for a, b, c, d in ends
            )
        queries, keys = self.query_ids[:, rows[0] : rows[-1] + 1], self.key_ids[:, columns[0] : columns[-1] + 1]
        (query_low, query_high), (key_low, key_high) = queries.aminmax(dim=1), keys.aminmax(dim=1)
        if bool(((query_low == query_high) & (key_low == key_high) & (query_low == key_low)).all()):
            return Tile.FULL
        # ranges that overlap may still share no id, so ask the ids themselves, but only in those rows
        overlap = ((query_low <= key_high) & (key_low <= query_high)).expand(max(len(queries), len(keys)))
        for row in overlap.nonzero()[:, 0].tolist():
            if bool(torch.isin(queries[row % len(queries)], keys[row % len(keys)]).any()):
                return Tile.PARTIAL
        return Tile.EMPTY

    def __repr__(self) -> str:
        def shown(ids: Tensor) -> str:
            return str(ids.tolist()) if ids.numel() <= 16 else f"<{list(ids.shape)}>"

        keys = "" if self.key_ids is self.query_ids else f", {shown(self.key_ids)}"
        return f"Document({shown(self.query_ids)}{keys})"


class Padding(Structured):
    """Real keys only: hides the filling that makes the rows of a batch equally long.

    Args:
        keys: int [batch], how many real keys each row begins with (right padding); or bool [batch, key_len], True
            where a key is real (padding anywhere).

    >>> print(Padding([2, 4]).draw(2, 4, batch=2))
    # # . .
    # # . .
    """

    def __init__(self, keys: Sequence[int] | Tensor) -> None:
        if is_plain(keys) and keys.dtype == torch.bool:
            if keys.dim() != 2:
                raise ShapeError(
                    f"Padding: a bool mask must be [batch, key_len], got {list(keys.shape)}"
                    + {1: "; one row alone still has a batch axis: keys[None]", 4: "; that is Dense(mask)"}.get(
                        keys.dim(), ""
                    )
                )
            self.keys = keys
            return
        if not isinstance(keys, Sequence) and not (is_plain(keys) and keys.dim() == 1):
            usual = how_to_plain(keys) or "; use .bool() on a 0/1 attention mask" * isinstance(keys, Tensor)
            raise TypeError(
                "Padding: keys must be int [batch] (how many real keys each row begins with) or bool [batch, key_len] "
                f"(True = real), got {kind(keys)}{usual}"
            )
        self.keys = per_row(keys, "Padding: keys")
        if _known((self.keys < 0).any()):
            raise ValueError(f"Padding: lengths must be 0 or more, got {self.keys.tolist()}")

    def _bind(self, grid: Grid) -> Self:
        if self.keys.dtype != torch.bool:
            check_rows(self, "lengths", self.keys, grid)
            if _known((self.keys > grid.key_len).any()):
                raise ShapeError(f"Padding: a row has {int(self.keys.max())} real keys, but the scores are {grid}")
            return self
        if self.keys.shape[0] not in (1, grid.batch) or self.keys.shape[1] != grid.key_len:
            batch, length = self.keys.shape
            raise ShapeError(f"Padding: the mask is [batch={batch}, key_len={length}], the scores are {grid}")
        check_device(self, "keys", self.keys, grid)
        return self

    @property
    def by_row(self) -> bool:
        return len(self.keys) > 1

    def of_row(self, row: int) -> "Padding":
        row %= len(self.keys)
        return Padding(self.keys[row : row + 1])

    def breaks(self, query_len: int) -> set[int]:
        """Where a row's real tokens begin or end, if queries and keys are the same tokens."""
        if self.by_row or self.keys.is_meta:
            return set()
        if self.keys.dtype != torch.bool:
            return {length for length in self.keys.tolist() if 0 < length < query_len}
        changes = self.keys[0, :query_len].to(torch.int8).diff().nonzero()[:, 0] + 1
        return set(changes.tolist()) if len(changes) <= 2 else set()  # padding in the midst of a row is odd

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        if self.keys.dtype == torch.bool:
            return self.keys[:, keys[0]][:, None, None, :]
        return keys < self.keys.to(keys.device)[:, None, None, None]

    def _tile(self, rows: range, columns: range) -> Tile:
        if self.keys.dtype == torch.bool:
            return _of(self.keys[:, columns[0] : columns[-1] + 1])
        return _first_keys(self.keys.tolist(), columns)

    def __repr__(self) -> str:
        if self.keys.dtype == torch.bool:
            return f"Padding(<bool {list(self.keys.shape)}>)"
        return f"Padding({self.keys.tolist()})"


class Dense(Mask):
    """A bool tensor, True = may attend: for a mask that has no structure. Holds query_len x key_len numbers.

    Args:
        mask: bool, broadcastable to [batch, heads, query_len, key_len] by the usual rule, from the right: a tensor of
            two axes is [query_len, key_len], one of three [heads, query_len, key_len]. Where the sizes of a call allow
            it to be meant by batch row as well ([batch, key_len], [batch, query_len, key_len]), it is refused.

    >>> print(Dense(torch.tensor([[True, False], [True, True]])).draw(2, 2))
    # .
    # #
    """

    def __init__(self, mask: Tensor) -> None:
        if not is_plain(mask) or mask.dtype != torch.bool:
            raise TypeError(f"Dense: mask must be a bool tensor (True = may attend), got {kind(mask)}{_as_bool(mask)}")
        if mask.dim() > 4:
            raise ShapeError(f"Dense: mask has more axes than [batch, heads, query_len, key_len]: {list(mask.shape)}")
        self.mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        self._axes = mask.dim()

    def bind(self, grid: Grid) -> "Dense":
        check_broadcast("Dense: mask", self.mask, self._axes, grid, "Padding(mask)", "Dense(mask{})")
        check_device(self, "mask", self.mask, grid)
        return self if self._axes == 4 else Dense(self.mask)

    @property
    def by_row(self) -> bool:
        return self.mask.shape[0] > 1

    def of_row(self, row: int) -> "Dense":
        row %= self.mask.shape[0]
        return Dense(self.mask[row : row + 1])

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return pick(self.mask, queries[:, 0], keys[0])

    def _tile(self, rows: range, columns: range) -> Tile:
        return _of(pick(self.mask, rows, columns))

    def __repr__(self) -> str:
        return f"Dense(<bool {list(self.mask.shape)}>)"


class Where(Mask):
    """Any rule at all: ``fn(batch, head, query, key)`` on index tensors, asked tile by tile.

    Args:
        fn: receives int tensors [batch, 1, 1, 1], [1, heads, 1, 1], [1, 1, rows, 1], [1, 1, 1, columns] and returns a
            bool tensor that broadcasts to [batch, heads, rows, columns]. `query` and `key` are indices into the call.

    Its `tile` has no closed form: it asks `fn` about every cell, and says PARTIAL of a rectangle with too many.

    >>> print(Where(lambda batch, head, query, key: (query + key) % 3 == 0).draw(3, 3))
    # . .
    . . #
    . # .
    """

    _CELLS = 1 << 22  # the most cells that `tile` looks at: 4 MiB of bools

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
        self._batch, self._heads, self._device = 1, 1, torch.device("cpu")

    def bind(self, grid: Grid) -> "Where":
        bound = copy(self)
        bound._batch, bound._heads, bound._device = grid.batch, grid.heads, grid.device
        return bound

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        device = queries.device
        batch = torch.arange(self._batch, device=device)[:, None, None, None]
        head = torch.arange(self._heads, device=device)[None, :, None, None]
        allowed = self.fn(batch, head, queries[None, None], keys[None, None])
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = str(allowed.dtype) if isinstance(allowed, Tensor) else type(allowed).__name__
            raise TypeError(f"Where: fn must return a bool tensor (True = may attend), got {got}")
        whole = (self._batch, self._heads, len(queries), keys.shape[1])
        wanted = whole[len(whole) - allowed.dim() :]
        if allowed.dim() > 4 or any(size not in (1, n) for size, n in zip(allowed.shape, wanted, strict=True)):
            raise ShapeError(f"Where: fn returned {list(allowed.shape)}, which does not broadcast to {list(whole)}")
        return allowed.expand(*allowed.shape[:-2], *whole[-2:]) if allowed.dim() >= 2 else allowed.expand(whole[-2:])

    def _tile(self, rows: range, columns: range) -> Tile:
        if self._batch * self._heads * len(rows) * len(columns) > self._CELLS:
            return Tile.PARTIAL
        # where the call runs: `fn` may look into tensors there
        return _of(self.allowed(indices(rows, self._device), indices(columns, self._device)))

    def of_row(self, row: int) -> "Where":
        return Where(lambda batch, head, query, key: self.fn(batch + row, head, query, key))

    def __repr__(self) -> str:
        return f"Where({getattr(self.fn, '__name__', type(self.fn).__name__)})"


class _Pair(Mask):
    """Two masks joined by an operator."""

    sign: str

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    @property
    def by_row(self) -> bool:
        return self.left.by_row or self.right.by_row

    def breaks(self, query_len: int) -> set[int]:
        return self.left.breaks(query_len) | self.right.breaks(query_len)

    def __repr__(self) -> str:
        parts = (
            f"({part!r})" if isinstance(part, _Pair) and type(part) is not type(self) else repr(part)
            for part in (self.left, self.right)
        )
        return f" {self.sign} ".join(parts)


class And(_Pair):
    """Allowed by both."""

    sign = "&"

    def bind(self, grid: Grid) -> Mask:
        left, right = self.left.bind(grid), self.right.bind(grid)
        if left is EVERYTHING:
            return right
        if right is EVERYTHING:
            return left
        both = left.intersection(right) if isinstance(left, Band) and isinstance(right, Band) else None
        return And(left, right) if both is None else both

    def of_row(self, row: int) -> "And":
        return And(self.left.of_row(row), self.right.of_row(row))

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.left.allowed(queries[:, 0], keys[0]) & self.right.allowed(queries[:, 0], keys[0])

    def _tile(self, rows: range, columns: range) -> Tile:
        left = self.left._tile(rows, columns)
        if left is Tile.EMPTY:
            return Tile.EMPTY
        right = self.right._tile(rows, columns)
        return right if left is Tile.FULL else Tile.EMPTY if right is Tile.EMPTY else Tile.PARTIAL


class Or(_Pair):
    """Allowed by one of the two, or both."""

    sign = "|"

    def bind(self, grid: Grid) -> Mask:
        left, right = self.left.bind(grid), self.right.bind(grid)
        return EVERYTHING if left is EVERYTHING or right is EVERYTHING else Or(left, right)

    def of_row(self, row: int) -> "Or":
        return Or(self.left.of_row(row), self.right.of_row(row))

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.left.allowed(queries[:, 0], keys[0]) | self.right.allowed(queries[:, 0], keys[0])

    def _tile(self, rows: range, columns: range) -> Tile:
        left = self.left._tile(rows, columns)
        if left is Tile.FULL:
            return Tile.FULL
        right = self.right._tile(rows, columns)
        return right if left is Tile.EMPTY else Tile.FULL if right is Tile.FULL else Tile.PARTIAL


class Not(Mask):
    """Allowed where the other is not."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def bind(self, grid: Grid) -> Mask:
        bound = self.mask.bind(grid)
        return bound.mask if isinstance(bound, Not) else Not(bound)

    @property
    def by_row(self) -> bool:
        return self.mask.by_row

    def of_row(self, row: int) -> "Not":
        return Not(self.mask.of_row(row))

    def breaks(self, query_len: int) -> set[int]:
        return self.mask.breaks(query_len)

    def _allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ~self.mask.allowed(queries[:, 0], keys[0])

    def _tile(self, rows: range, columns: range) -> Tile:
        inside = self.mask._tile(rows, columns)
        return {Tile.EMPTY: Tile.FULL, Tile.FULL: Tile.EMPTY}.get(inside, Tile.PARTIAL)

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Pair) else f"~{self.mask!r}"


PARTS: dict[type[Mask], tuple[str, ...]] = {
    Everything: (),
    Band: ("before", "after", "offset"),
    Causal: ("offset",),
    Window: ("w", "offset"),
    Prefix: ("n",),
    Strided: ("step", "offset"),
    Chunk: ("size", "offset"),
    Document: ("query_ids", "key_ids"),
    Padding: ("keys",),
    Dense: ("mask",),
    And: ("left", "right"),
    Or: ("left", "right"),
    Not: ("mask",),
}
"""Every mask that is made of data, and the arguments that make it again."""


def spell(mask: Mask, tensors: list[Tensor], numbers: list[int] | None = None) -> str | None:
    """A mask as a line of JSON and the tensors it names, which are added to the list; None for one with a function.

    With a list of numbers they are named too, not written: in a graph for any length they are not known yet.

    >>> spell(Causal() & ~Window(3), [])
    '["And",["Causal",null],["Not",["Window",3,null]]]'
    """
    names = PARTS.get(type(mask))
    if names is None:
        return None
    line = f'["{type(mask).__name__}"'
    for name in names:
        part = getattr(mask, name)
        if isinstance(part, Mask):
            inner = spell(part, tensors, numbers)
            if inner is None:
                return None
            line = f"{line},{inner}"
        elif isinstance(part, Tensor):
            line = f'{line},{{"tensor":{len(tensors)}}}'
            tensors.append(part)
        elif part is None or numbers is None:
            line = f"{line},{'null' if part is None else int(part)}"
        else:
            line = f'{line},{{"number":{len(numbers)}}}'
            numbers.append(part)
    return f"{line}]"


def unspell(line: str, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> Mask:
    """The mask that was spelt."""
    kinds = {kind.__name__: kind for kind in PARTS}

    def made(part: Any) -> Any:
        if isinstance(part, list):
            return EVERYTHING if part == ["Everything"] else kinds[part[0]](*map(made, part[1:]))
        if isinstance(part, dict):
            return tensors[part["tensor"]] if "tensor" in part else numbers[part["number"]]
        return part

    mask: Mask = made(json.loads(line))
    return mask


# --- what masks and biases share ----------------------------------------------------------------------------------


def _known(wrong: Tensor) -> bool:
    """Whether data is wrong. A compiler cannot ask; it is asked where the compiled graph makes the mask again."""
    return not tracing() and bool(wrong)


def indices(which: Indices, device: torch.device | None = None) -> Tensor:
    """Queries or keys as a 1-D int64 tensor."""
    if isinstance(which, Tensor):
        if which.dim() != 1 or which.is_floating_point() or which.dtype == torch.bool:
            raise TypeError(f"indices must be a 1-D tensor of integers, got {which.dtype} {list(which.shape)}")
        return which.to(torch.int64)  # the small integer dtypes cannot index: torch takes uint8 for a mask
    which = as_range(which)
    return torch.arange(which.start, which.stop, which.step, device=device)


def as_range(which: range | slice) -> range:
    """A slice with a stop as a range."""
    if isinstance(which, range):
        return which
    if not isinstance(which, slice) or which.stop is None:
        raise TypeError(f"give a range, or a slice with a stop, got {which!r}")
    return range(which.start or 0, which.stop, which.step or 1)


def pick(tensor: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
    """Rows and columns of a tensor [.., query_len or 1, key_len or 1]; an axis of size 1 stays as it is."""
    for axis, which in ((-2, rows), (-1, columns)):
        if tensor.shape[axis] == 1:
            continue
        if isinstance(which, Tensor):
            tensor = tensor.index_select(axis, which.to(tensor.device))
        else:
            tensor = tensor.narrow(axis, which.start, len(which))
    return tensor


def per_row(values: int | Iterable[int] | Tensor, name: str) -> Tensor:
    """One int per batch row, as a 1-D int64 tensor."""
    wanted = f"{name} must be an int, or one int per batch row, got"
    if not isinstance(values, Iterable):
        raise TypeError(f"{wanted} {values!r}")
    try:
        tensor = values if isinstance(values, Tensor) else torch.tensor(list(values))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{wanted} {values!r}") from error
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{wanted} {tensor.dtype} {list(tensor.shape)}")
    return tensor.to(torch.int64)


def position_of_query_0(offset: Offset, owner: str) -> int | Tensor | None:
    """An offset as it was given, one per batch row as a tensor."""
    if offset is None or (isinstance(offset, int) and not isinstance(offset, bool)):
        return offset
    return per_row(offset, f"{owner}: offset")


def positive(value: int, name: str, hint: str = "") -> int:
    """An int of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}" + (f"; {hint}" if hint else ""))
    return value


def check_rows(owner: object, name: str, values: Tensor, grid: Grid) -> None:
    """Per-row data must have one value for each batch row."""
    if len(values) != grid.batch:
        raise ShapeError(f"{type(owner).__name__}: {name} is for batch={len(values)}, the scores are {grid}")


def check_mask(owner: str, name: str, value: object) -> Mask:
    """A mask as it is; what people pass in its place is refused with the mask that it probably is."""
    if isinstance(value, Mask):
        return value
    raise TypeError(f"{owner}: {name} must be a regard mask such as Causal(), got {kind(value)}{_as_mask(value)}")


def check_broadcast(what: str, data: Tensor, axes: int, grid: Grid, by_key: str, by_axes: str) -> None:
    """Data of so many axes, filled up to four from the left, must fit the scores in one way only.

    Args:
        data: [batch or 1, heads or 1, query_len or 1, key_len or 1].
        axes: how many it was given with.
        by_key, by_axes: how to say that it is [batch, key_len]; and that it has four axes, ``{}`` for an index.
    Raises:
        ShapeError: it does not broadcast, or it could as well be meant by batch row.
    """
    fits = all(size in (1, wanted) for size, wanted in zip(data.shape, grid[:4], strict=True))
    given = list(data.shape[4 - axes :])
    by_row = axes in (2, 3) and given[0] == grid.batch > 1 and given[-1] == grid.key_len
    if axes == 3:
        by_row = by_row and given[1] in (1, grid.query_len)
    if fits and not by_row:
        return
    counted = "[query_len, key_len]" if axes == 2 else "[heads, query_len, key_len]"
    meant = "[batch, key_len]" if axes == 2 else "[batch, query_len, key_len]"
    by_count = by_axes.format("[None, None]" if axes == 2 else "[None]")
    by_batch = by_key if axes == 2 else by_axes.format("[:, None]")
    if fits:
        raise ShapeError(
            f"{what} {given} may be {counted} or {meant}: both fit the scores {grid}; "
            f"say which, {by_count} or {by_batch}"
        )
    hint = f"; if it is {meant}: {by_batch}" if by_row else ""
    raise ShapeError(f"{what} {given} does not broadcast to the scores {grid}{hint}")


def check_device(owner: object, name: str, data: Tensor, grid: Grid) -> None:
    """Per-token data must lie where the call runs."""
    if data.device != grid.device:
        raise ValueError(f"{type(owner).__name__}: {name} is on {data.device}, the call runs on {grid.device}")


def together(tiles: Iterable[Tile]) -> Tile:
    """One answer for several parts: EMPTY or FULL only if all of them are."""
    answers = set(tiles)
    return answers.pop() if len(answers) == 1 else Tile.PARTIAL


def _as_mask(value: object) -> str:
    """Which mask it probably is, as the end of an error."""
    if isinstance(value, type) and issubclass(value, Mask):
        return f"; make one: {value.__name__}(...)"
    if isinstance(value, str):
        return "; masks are objects: mask=Causal()"
    if type(value).__name__ == "CausalBias":  # torch.nn.attention.bias
        return "; causal_lower_right(...) is Causal(), causal_upper_left(...) is Causal(offset=0)"
    if not is_plain(value):
        if hasattr(value, "mask_mod"):  # torch.nn.attention.flex_attention
            return "; a BlockMask is Where(block_mask.mask_mod)"
        return "; a rule is Where(rule)" if callable(value) else how_to_plain(value)
    assert isinstance(value, Tensor)
    if value.dtype == torch.bool:
        padding = ", [batch, key_len] is Padding(tensor)" if value.dim() == 2 else ""
        return f"; a bool tensor (True = may attend) is Dense(tensor){padding}"
    if value.is_floating_point():
        return "; numbers that are added to the scores are a bias: bias=tensor"
    made = "Padding(tensor.bool())" if value.dim() == 2 else "Dense(tensor.bool())"
    return f"; of 1 (may attend) and 0 it is {made}"


def _arguments(fn: Callable[..., object]) -> str | None:
    """The signature of a function that does not take four arguments by position; None where it does, or is unknown."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return None
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        return str(signature)
    return None


def _as_bool(value: object) -> str:
    """How to make the tensor that `Dense` takes, as the end of an error."""
    if not is_plain(value):
        return how_to_plain(value)
    assert isinstance(value, Tensor)
    if value.is_floating_point():
        return "; numbers that are added to the scores go into bias; of 1 and 0, pass tensor.bool()"
    return "; of 1 (may attend) and 0, pass tensor.bool(); a mask [batch, key_len] is Padding(tensor.bool())"


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, as far as that can be known: those of a meta tensor cannot."""
    if one is other:
        return True
    alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return alike and not one.is_meta and torch.equal(one, other)


def _of(allowed: Tensor) -> Tile:
    return Tile.FULL if bool(allowed.all()) else Tile.PARTIAL if bool(allowed.any()) else Tile.EMPTY


def _first_keys(lengths: list[int], columns: range) -> Tile:
    if columns[-1] < min(lengths, default=0):
        return Tile.FULL
    return Tile.EMPTY if columns[0] >= max(lengths, default=0) else Tile.PARTIAL


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _ids(ids: Tensor, name: str) -> Tensor:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.dim() not in (1, 2):
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"Document: {name} must be an int tensor [batch, length] or [length], got {got}")
    return ids[None] if ids.dim() == 1 else ids

"""The base class of masks: a rule for one query and one key, its coverage of rectangles, and composition."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from regard.graphs import has_numbers, is_of_many, tracing
from regard.indexing import Indices, as_range, indices, shifted
from regard.rules import Rule, is_data, same, serialise
from regard.shapes import Grid, how_to_plain, is_plain, kind


class Tile(Enum):
    """The coverage of a rectangle by a mask, over all batch indices and heads."""

    EMPTY = "empty"
    PARTIAL = "partial"
    FULL = "full"


Verdict = tuple[Any, Any]
"""Whether a rectangle is certainly EMPTY, and whether it is certainly FULL; of many rectangles, two bool tensors."""


class Mask(Rule):
    """Which queries may attend to which keys; compose with ``&``, ``|`` and ``~``.

    A mask of your own derives from this and defines `rule`, True = may attend; and `coverage`, if that can be computed
    without evaluating every cell. Everything else follows from these two (see `regard.rules` for its data).

    >>> print((Causal() & Window(3)) | Prefix(1))
    (Causal() & Window(3)) | Prefix(1)
    >>> print((Causal() & Window(2)).draw(4, 4))
    # . . .
    # # . .
    . # # .
    . . # #
    """

    MAX_TILE_SCORES: ClassVar[int] = 1 << 22
    """Most cells that `tile` evaluates if there is no closed form: 4 MiB of bools."""

    _judges_rectangles: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "coverage" in vars(cls) and "verdict" not in vars(cls):
            cls.verdict = Mask.verdict  # type: ignore[method-assign]  # that of a base class says something else
        cls._judges_rectangles = cls.coverage is not Mask.coverage or cls.verdict is not Mask.verdict

    @property
    def closed_form(self) -> bool:
        """Whether `coverage` is computed without evaluating cells, as in every class that defines it or `verdict`; but
        not in torch.func.vmap, if that takes its data apart."""
        return self._judges_rectangles and not any(map(is_of_many, vars(self).values()))

    def coverage(self, rows: range, columns: range) -> Tile:
        """The coverage of a nonempty rectangle: EMPTY and FULL must be certain, PARTIAL need not be.

        By default what `verdict` says; without one it evaluates the cells, if they are few.
        """
        said = self.verdict(rows[0], rows[-1], columns[0], columns[-1])
        if said is not None:
            empty, full = said
            return Tile.EMPTY if empty else Tile.FULL if full else Tile.PARTIAL
        batch, heads = self._batch or 1, self._heads or 1
        if batch * heads * len(rows) * len(columns) > self.MAX_TILE_SCORES:
            return Tile.PARTIAL
        # on the device of the call, where the rule's tensors may be
        return coverage_of(self.allowed(indices(rows, self._device), indices(columns, self._device)))

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        """`coverage` of a nonempty rectangle, or of many at once; None if that is told of one at a time only.

        Args:
            top, bottom, left, right: its first and last row and column: ints, or int64 tensors on the CPU, so the same
                arithmetic answers both.
        """
        return None

    def bind(self, grid: Grid) -> "Mask":
        bound = self._bound(grid)
        if not bound.closed_form:
            return bound
        if tracing():
            return bound  # the graph is for other lengths too, and cannot branch on data
        whole = bound.tile(range(grid.query_len), range(grid.key_len))
        return EVERYTHING if whole is Tile.FULL else bound

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        """True where a query may attend to a key.

        Shapes: bool, broadcastable to [batch, heads, rows, columns]; an axis that the mask does not depend on may be 1.
        """
        allowed = self.ask(queries, keys)
        if allowed.dtype != torch.bool:
            raise TypeError(
                f"{type(self).__name__}: rule must return a bool tensor (True = may attend), got {allowed.dtype}"
            )
        return allowed

    def tile(self, rows: range | slice, columns: range | slice) -> Tile:
        """Whether nothing, something or everything in the rectangle is allowed, over all batch indices and heads.

        EMPTY and FULL are always certain. regard's own masks return PARTIAL only if neither holds; a composed mask may
        also return it if both of its parts are PARTIAL.
        """
        rows, columns = as_range(rows), as_range(columns)
        if rows.step != 1 or columns.step != 1:
            raise ValueError(f"tile: a rectangle has no gaps, got {rows} and {columns}")
        if not rows or not columns:
            return Tile.EMPTY
        return self.coverage(rows, columns)

    def restrict(self, queries: range, keys: range) -> "Mask | Tile":
        """The mask on a rectangle, simplified: without parts that are full or empty there."""
        tile = self.tile(queries, keys)
        return self if tile is Tile.PARTIAL else tile

    def counted_from(self, query: int, key: int, grid: Grid) -> "Mask":
        """The mask of a part of a call, whose first query and key are these of the whole: what `rule` is told is moved.

        Args:
            grid: the whole call, to which this mask is bound.
        """
        return Moved(self, query, key, grid[:4])

    def intersection(self, other: "Mask") -> "Mask | None":
        """A single mask of this class equal to `self & other`, if there is one."""
        return None

    def leaves(self) -> "Iterator[Mask]":
        """The leaves of the expression."""
        yield self

    def breaks(self, query_len: int) -> set[int]:
        """Queries at which a call is best divided: where a document or chunk begins."""
        return set().union(*(part.breaks(query_len) for part in self.parts() if isinstance(part, Mask)))

    @property
    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The rule as a function for torch's `create_block_mask` and `flex_attention`. Bind the mask first."""
        return lambda batch, head, query, key: self.rule(batch, head, query, key)

    def draw(self, query_len: int, key_len: int, *, batch: int = 1, heads: int = 1) -> str:
        """The mask of the first batch index and head as text: ``#`` may attend, ``.`` may not."""
        allowed = self.bind(Grid(batch, heads, query_len, key_len)).allowed(range(query_len), range(key_len))
        rows = allowed.expand(-1, -1, query_len, key_len)[0, 0].tolist()
        return "\n".join(" ".join("#" if cell else "." for cell in row) for row in rows)

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, check_mask("&", "both sides", other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, check_mask("|", "both sides", other))

    __rand__, __ror__ = __and__, __or__  # reached only with operands that are not masks, which raise

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> NoReturn:
        """Raises: ``Causal() and Window(3)`` would be just `Window(3)`."""
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
        """Whether both are the same expression with equal arguments; a mask with a function equals only itself."""
        return self is other or (type(self) is type(other) and is_data(self) and same(self, other))

    def __hash__(self) -> int:
        line = serialise(self, [])
        return object.__hash__(self) if line is None else hash(line)

    def __repr__(self) -> str:
        shown = [
            f"{name}={shown_argument(value)}" if name in self.optional else shown_argument(value)
            for name, value in self.arguments().items()
            if value is not None or name not in self.optional
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


class Everything(Mask):
    """Allows everything: what a mask that hides nothing simplifies to. A singleton."""

    of_positions = True
    _only: "ClassVar[Everything]"

    def __new__(cls) -> "Everything":
        return cls._only

    def bind(self, grid: Grid) -> "Everything":
        return self

    def for_batch(self, index: int) -> "Everything":
        return self

    def counted_from(self, query: int, key: int, grid: Grid) -> "Everything":
        return self

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query == query) & (key == key)

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        return False, True


EVERYTHING = Everything._only = object.__new__(Everything)


class _Pair(Mask):
    """Two masks joined by an operator."""

    sign: ClassVar[str]
    decides: ClassVar[Tile]
    """The coverage of one side that determines the result; with the opposite, the other side does."""

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    @property
    def closed_form(self) -> bool:
        return self.left.closed_form and self.right.closed_form

    @property
    def of_positions(self) -> bool:
        return self.left.of_positions and self.right.of_positions

    def coverage(self, rows: range, columns: range) -> Tile:
        left = self.left.coverage(rows, columns)
        if left is self.decides:
            return left
        right = self.right.coverage(rows, columns)
        if right is self.decides or left is not Tile.PARTIAL:
            return right
        return Tile.PARTIAL

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        one, other = (side.verdict(top, bottom, left, right) for side in (self.left, self.right))
        return None if one is None or other is None else self._joined(one, other)

    @staticmethod
    def _joined(one: Verdict, other: Verdict) -> Verdict:
        raise NotImplementedError

    def restrict(self, queries: range, keys: range) -> Mask | Tile:
        left, right = self.left.restrict(queries, keys), self.right.restrict(queries, keys)
        if left is self.decides or right is self.decides:
            return self.decides
        if isinstance(left, Tile):
            return right
        return left if isinstance(right, Tile) else type(self)(left, right)

    def counted_from(self, query: int, key: int, grid: Grid) -> Mask:
        return type(self)(self.left.counted_from(query, key, grid), self.right.counted_from(query, key, grid))

    def leaves(self) -> Iterator[Mask]:
        yield from self.left.leaves()
        yield from self.right.leaves()

    def __repr__(self) -> str:
        parts = (
            f"({part!r})" if isinstance(part, _Pair) and type(part) is not type(self) else repr(part)
            for part in (self.left, self.right)
        )
        return f" {self.sign} ".join(parts)


class And(_Pair):
    """Allowed by both."""

    sign = "&"
    decides = Tile.EMPTY

    @staticmethod
    def _joined(one: Verdict, other: Verdict) -> Verdict:
        return one[0] | other[0], one[1] & other[1]

    def bind(self, grid: Grid) -> Mask:
        left, right = self.left.bind(grid), self.right.bind(grid)
        if left is EVERYTHING:
            return right
        if right is EVERYTHING:
            return left
        both = left.intersection(right)
        return And(left, right) if both is None else both

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left.rule(batch, head, query, key) & self.right.rule(batch, head, query, key)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return self.left.allowed(queries, keys) & self.right.allowed(queries, keys)


class Or(_Pair):
    """Allowed by one of the two, or both."""

    sign = "|"
    decides = Tile.FULL

    @staticmethod
    def _joined(one: Verdict, other: Verdict) -> Verdict:
        return one[0] & other[0], one[1] | other[1]

    def bind(self, grid: Grid) -> Mask:
        left, right = self.left.bind(grid), self.right.bind(grid)
        return EVERYTHING if left is EVERYTHING or right is EVERYTHING else Or(left, right)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left.rule(batch, head, query, key) | self.right.rule(batch, head, query, key)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return self.left.allowed(queries, keys) | self.right.allowed(queries, keys)


class Not(Mask):
    """Allowed where the other is not."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    @property
    def closed_form(self) -> bool:
        return self.mask.closed_form

    @property
    def of_positions(self) -> bool:
        return self.mask.of_positions

    def bind(self, grid: Grid) -> Mask:
        bound = self.mask.bind(grid)
        return bound.mask if isinstance(bound, Not) else Not(bound)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ~self.mask.rule(batch, head, query, key)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return ~self.mask.allowed(queries, keys)

    def coverage(self, rows: range, columns: range) -> Tile:
        return _OPPOSITE[self.mask.coverage(rows, columns)]

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        said = self.mask.verdict(top, bottom, left, right)
        return None if said is None else (said[1], said[0])

    def counted_from(self, query: int, key: int, grid: Grid) -> Mask:
        return Not(self.mask.counted_from(query, key, grid))

    def leaves(self) -> Iterator[Mask]:
        yield from self.mask.leaves()

    def __repr__(self) -> str:
        return f"~({self.mask!r})" if isinstance(self.mask, _Pair) else f"~{self.mask!r}"


class Moved(Mask):
    """A bound mask on a part of its call, with queries and keys counted from the first of the part.

    Args:
        query, key: where the part begins. sizes: batch, heads, query_len and key_len of the whole call.
    """

    def __init__(self, mask: Mask, query: int, key: int, sizes: Sequence[int]) -> None:
        self.mask, self.query, self.key, self.sizes = mask, query, key, tuple(sizes)

    @property
    def closed_form(self) -> bool:
        return self.mask.closed_form

    def bind(self, grid: Grid) -> "Moved":
        return self  # of a mask that is bound already

    def for_batch(self, index: int) -> "Moved":
        _, heads, query_len, key_len = self.sizes
        grid = Grid(1, heads, query_len, key_len, self.mask._device)
        return Moved(self.mask.for_batch(index).bind(grid), self.query, self.key, grid[:4])

    def counted_from(self, query: int, key: int, grid: Grid) -> "Moved":
        return Moved(self.mask, self.query + query, self.key + key, self.sizes)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.rule(batch, head, query + self.query, key + self.key)

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return self.mask.allowed(shifted(queries, self.query), shifted(keys, self.key))

    def breaks(self, query_len: int) -> set[int]:
        return {at - self.query for at in self.mask.breaks(self.query + query_len) if at > self.query}

    def coverage(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(
            range(rows.start + self.query, rows.stop + self.query),
            range(columns.start + self.key, columns.stop + self.key),
        )

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict | None:
        return self.mask.verdict(top + self.query, bottom + self.query, left + self.key, right + self.key)

    def __repr__(self) -> str:
        return f"{self.mask!r} from query {self.query} and key {self.key}"


_OPPOSITE = {Tile.EMPTY: Tile.FULL, Tile.PARTIAL: Tile.PARTIAL, Tile.FULL: Tile.EMPTY}


def check_mask(owner: str, name: str, value: object) -> Mask:
    """Returns a mask unchanged; raises for anything else, with the mask that was probably meant."""
    if isinstance(value, Mask):
        return value
    raise TypeError(f"{owner}: {name} must be a regard mask such as Causal(), got {kind(value)}{_as_mask(value)}")


def _as_mask(value: object) -> str:
    """The mask that was probably meant, as the end of an error message."""
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


def coverage_of(allowed: Tensor) -> Tile:
    """The coverage of evaluated cells: from the least and largest byte, which torch finds 20 times as fast as whether
    all or any are True."""
    if not allowed.numel():
        return Tile.FULL
    if not has_numbers(allowed):
        return Tile.PARTIAL
    least, largest = allowed.view(torch.uint8).aminmax()
    return Tile.FULL if bool(least) else Tile.PARTIAL if bool(largest) else Tile.EMPTY


def together(tiles: Iterable[Tile]) -> Tile:
    """The coverage of several parts: EMPTY or FULL only if all of them are."""
    answers = set(tiles)
    return answers.pop() if len(answers) == 1 else Tile.PARTIAL


def shown_argument(value: object) -> str:
    """An argument for repr(): a tensor by its numbers if they are few, else by its shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() <= 16 and value.dtype != torch.bool and not value.is_meta and not is_of_many(value):
        return str(value.tolist())
    return f"<{'bool ' if value.dtype == torch.bool else ''}{list(value.shape)}>"

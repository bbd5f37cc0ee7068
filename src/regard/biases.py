"""Numbers added to scores, evaluated tile by tile.

For a rectangle of queries and keys, a bias returns numbers that broadcast to [batch, heads, rows, columns]; the whole
matrix is never built. Distances are between positions, with the same offset as in `regard.masks`. A tensor is a bias
too, wrapped in `Given`. A bias of -inf hides the key, like a mask. Biases can be added: ``Alibi(8) + table``.
"""

import math
from collections.abc import Hashable, Iterator
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor

from regard.diagonals import turned_tile
from regard.indexing import Indices, as_place, lookup, pick
from regard.masks import Mask
from regard.rules import Positioned, Rule, learned, structure_of
from regard.shapes import (
    Grid,
    Offset,
    ShapeError,
    check_broadcast,
    check_flag,
    check_whole,
    how_to_plain,
    is_plain,
    kind,
)


class Bias(Rule):
    """Numbers added to scores after scale and softcap, before the mask.

    A bias of your own derives from this and defines `rule`: the number for a query and a key, which follows from its
    attributes alone: it may be asked once for several calls. Trainable tensors and modules may be in any attribute, in
    lists and dicts too (see `regard.rules` for its data).

    >>> class Recent(Bias):
    ...     def __init__(self, bonus):
    ...         self.bonus = bonus
    ...     def rule(self, batch, head, query, key):
    ...         return torch.where(query == key, self.bonus, 0.0)
    >>> Recent(2.0).values(range(2), range(2)).tolist()
    [[[[2.0, 0.0], [0.0, 2.0]]]]

    Attributes:
        of_distance: whether the number depends only on ``key - query``, batch index and head: then it is evaluated once
            per distance of a call (also for keys beyond its ends) instead of once per score.
    """

    of_distance: bool = False

    def bind(self, grid: Grid) -> "Bias":
        return self._bound(grid)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        """The numbers for a rectangle. Shapes: broadcastable to [batch, heads, rows, columns]."""
        if not (self.of_distance and isinstance(queries, range) and isinstance(keys, range)):
            return self.ask(queries, keys)
        if len(queries) < 2 or not keys or not queries.step == keys.step == 1:
            return self.ask(queries, keys)
        distances = range(keys.start, keys.stop + len(queries) - 1)  # from the last query, then from earlier ones
        row = self.ask(queries[-1:], distances)
        if row.shape[3] < len(distances):  # the same for all of them
            return row
        return turned_tile(row.squeeze(2), len(queries), len(keys))

    def terms(self) -> Iterator["Bias"]:
        """The biases that it is the sum of; itself, if it is no sum."""
        yield self

    def structure(self) -> Hashable | None:
        """As of a mask, but of all attributes: they may hold tensors that are no arguments."""
        return structure_of((type(self), *vars(self)), vars(self).values())

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that may need a gradient: its floating tensors and the parameters of its modules, each once."""
        found: list[Tensor] = []
        for tensor in learned(self):
            if not any(tensor is other for other in found):  # a graph that asks for an id is compiled for it alone
                found.append(tensor)
        return tuple(found)

    def __add__(self, other: "Bias | Tensor") -> "Bias":
        return Sum(self, as_bias(other, "+", "both sides"))

    def __radd__(self, other: "Bias | Tensor | int") -> "Bias":
        return self if type(other) is int and other == 0 else Sum(as_bias(other, "+", "both sides"), self)  # sum()

    def __bool__(self) -> NoReturn:
        """Raises: ``Alibi(8) and table`` would be just `table`."""
        raise TypeError(
            f"{type(self).__name__}: a bias is neither true nor false. Biases add up with a + b, and "
            "`bias is not None` asks whether there is one"
        )


def as_bias(bias: object, owner: str = "attention", name: str = "bias") -> Bias:
    """A bias unchanged; a tensor wrapped in `Given`."""
    if isinstance(bias, Bias):
        return bias
    if is_plain(bias):
        return Given(bias)
    usual = f"; make one: {bias.__name__}(...)" if isinstance(bias, type) else how_to_plain(bias)
    if isinstance(bias, Mask):
        usual = "; a mask goes into mask="
    raise TypeError(
        f"{owner}: {name} must be a floating tensor or a regard bias such as Alibi(8), got {kind(bias)}{usual}"
    )


class Given(Bias):
    """A tensor as a bias; differentiable.

    Args:
        numbers: floating, broadcastable to [batch, heads, query_len, key_len] from the right; an error if it could also
            be per batch index ([batch, key_len], [batch, query_len, key_len]).
    """

    axes: ClassVar = {"numbers": ("batch", "heads", "query_len", "key_len")}

    def __init__(self, numbers: Tensor) -> None:
        if not is_plain(numbers) or not numbers.is_floating_point():
            usual = "; a bool tensor is a mask: mask=Dense(tensor)" if is_plain(numbers) else how_to_plain(numbers)
            raise TypeError(f"attention: bias must be a floating tensor, got {kind(numbers)}{usual}")
        if numbers.dim() > 4:
            raise ShapeError(f"bias has more axes than [batch, heads, query_len, key_len]: {list(numbers.shape)}")
        self.numbers = _in_four_axes(numbers)
        self._axes = numbers.dim()

    def of(self, other: Bias | Tensor | None) -> Self:
        """The same of another tensor, which is known to fit, since the first of its shape did; bound if this is."""
        numbers = other.numbers if isinstance(other, Given) else other
        assert isinstance(numbers, Tensor)
        return self._with(numbers=_in_four_axes(numbers))

    def without_numbers(self) -> Self:
        """What `of` is asked of later, without keeping memory alive."""
        return self._with(numbers=self.numbers.new_empty((0,) * 4))

    def _called(self, name: str) -> str:
        return "bias"

    def _bound(self, grid: Grid) -> Self:
        check_broadcast("bias", self.numbers, self._axes, grid, "bias[:, None, None]", "bias{}")
        return super()._bound(grid)._with(_axes=4)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return lookup(self.numbers, batch, head, query, key)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return pick(self.numbers, as_place(queries), as_place(keys))  # rows and columns at once, not cell by cell

    def __repr__(self) -> str:
        return f"Given(<{list(self.numbers.shape)}>)"


def _in_four_axes(numbers: Tensor) -> Tensor:
    """A view, also of what has them: a query may depend on the tensor itself, through an earlier layer."""
    return numbers.reshape((1,) * (4 - numbers.dim()) + numbers.shape)


class Sum(Bias):
    """The sum of two biases."""

    def __init__(self, left: Bias, right: Bias) -> None:
        self.left, self.right = left, right

    def terms(self) -> Iterator[Bias]:
        yield from self.left.terms()
        yield from self.right.terms()

    @property
    def of_positions(self) -> bool:
        return self.left.of_positions and self.right.of_positions

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.left.rule(batch, head, query, key) + self.right.rule(batch, head, query, key)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return self.left.values(queries, keys) + self.right.values(queries, keys)

    def __repr__(self) -> str:
        return f"{self.left!r} + {self.right!r}"


class Alibi(Positioned, Bias):
    """Attention with linear biases: a fixed penalty on distance, steeper in some heads than in others.

        bias = -slope_h * |query_position - key_position|
        slope_h = 2^(-8 h / heads),  h = 1 .. heads

    If the number of heads is not a power of two, the slopes are those of the next lower power followed by every second
    slope of the next higher one, as in the authors' code. Under a causal mask this is the paper's bias.

    Args:
        heads: number of heads, for the paper's slopes.
        slopes: the slopes [heads], differentiable; give either heads or slopes.
        offset: position of query 0; default ``key_len - query_len``.

    References:
        Press, Smith, Lewis 2021, "Train Short, Test Long", section 3.

    >>> Alibi(4).slopes
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    of_distance = True
    fields = ("slopes", "offset")  # a number of heads stands for slopes
    axes: ClassVar = {"slopes": ("heads",)}

    def __init__(self, heads: int | None = None, *, slopes: Tensor | None = None, offset: Offset = None) -> None:
        super().__init__(offset)
        if (heads is None) == (slopes is None):
            raise TypeError("Alibi: give heads (the paper's slopes) or slopes, one of the two")
        if slopes is None:
            assert heads is not None
            slopes = torch.tensor(_slopes(check_whole("Alibi", "heads", heads)))
        elif not isinstance(slopes, Tensor) or slopes.dim() != 1 or not slopes.is_floating_point():
            raise TypeError(f"Alibi: slopes must be a floating tensor [heads], got {kind(slopes)}")
        self.slopes = slopes

    def _bound(self, grid: Grid) -> Self:
        if len(self.slopes) != grid.heads:
            raise ShapeError(f"Alibi: {len(self.slopes)} slopes, the scores are {grid}")
        bound = super()._bound(grid)
        # a few numbers, moved to the device; in float32, since half precision cannot represent distances
        bound.slopes = self.slopes.to(grid.device, torch.promote_types(self.slopes.dtype, torch.float32))
        return bound

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return -lookup(self.slopes, head) * (key - self.position(batch, query)).abs()

    def __repr__(self) -> str:
        return f"Alibi({len(self.slopes)})"


class RelativeBias(Positioned, Bias):
    """T5's learned bias: one number per head and bucket of distances.

        bias = table[bucket(key_position - query_position), head]

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`; larger distances
    share the last one. With `bidirectional`, half of the buckets are for keys behind the query and half for keys ahead;
    without it, all keys ahead share bucket 0.

    Args:
        table: floating [buckets, heads], usually a parameter; differentiable.
        bidirectional: True in encoders, False in decoders.
        max_distance: the start of the last bucket, in tokens.
        offset: position of query 0; default ``key_len - query_len``.

    References:
        Raffel et al. 2019, "Exploring the Limits of Transfer Learning", section 2.1.
    """

    of_distance = True
    axes: ClassVar = {"table": ("buckets", "heads")}

    def __init__(
        self, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128, offset: Offset = None
    ) -> None:
        super().__init__(offset)
        if not isinstance(table, Tensor) or table.dim() != 2 or not table.is_floating_point():
            raise TypeError(f"RelativeBias: table must be a floating tensor [buckets, heads], got {kind(table)}")
        check_flag("RelativeBias", "bidirectional", bidirectional)
        self.table, self.bidirectional = table, bidirectional
        self.max_distance = check_whole("RelativeBias", "max_distance", max_distance)
        exact = len(table) // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact:
            raise ValueError(
                f"RelativeBias: {len(table)} buckets hold {exact} single distances on a side; that must be at least 1 "
                f"and less than max_distance={max_distance}"
            )

    def _bound(self, grid: Grid) -> Self:
        if self.table.shape[1] != grid.heads:
            raise ShapeError(f"RelativeBias: the table has heads={self.table.shape[1]}, the scores are {grid}")
        if self.table.device != grid.device:
            raise ValueError(f"RelativeBias: table is on {self.table.device}, the call runs on {grid.device}")
        return super()._bound(grid)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return lookup(self.table, self._bucket(key - self.position(batch, query)), head)

    def _bucket(self, ahead: Tensor) -> Tensor:
        buckets = len(self.table)
        if self.bidirectional:
            buckets //= 2
            first = (ahead > 0) * buckets
            distance = ahead.abs()
        else:
            first = torch.zeros_like(ahead)
            distance = (-ahead).clamp(min=0)
        exact = buckets // 2
        # in float32, as for published checkpoints: the edges of logarithmic buckets depend on rounding
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)

    def __repr__(self) -> str:
        return f"RelativeBias(<{list(self.table.shape)}>, bidirectional={self.bidirectional})"


def _slopes(heads: int) -> list[float]:
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (heads - power), 2)]

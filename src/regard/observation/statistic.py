"""The base classes of statistics, for regard's own and for yours."""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from regard.observation.observed import ObservedCall
from regard.observation.tile import ScoreTile
from regard.shapes import Grid, ShapeError

Result = TypeVar("Result")


class Statistic(Generic[Result]):
    """A quantity computed from the weights of a call tile by tile, so that they are never all in memory.

    `Observation.ask` computes one, `Observation.gather` several in one pass, for recordings too, and `regard.gather`
    while a model runs. A sum per query or per key derives from `PerQuery` or `PerKey` and defines `of`, the
    contribution of a tile. Others also define `start`, which allocates memory, `add`, which accumulates what `of`
    returned, and `finish`, which returns the result.

    Attributes:
        call: the observed call (`ObservedCall`), from `start` on: `call.grid`, `call.scoring`, and in `finish`, if the
            statistic needs weights, `call.lse`.

    >>> class Squares(PerQuery):
    ...     def of(self, tile):
    ...         return tile.weights.square().sum(-1)
    >>> query = torch.zeros(1, 1, 2, 4)
    >>> observe(query, query, mask=Causal()).ask(Squares())
    tensor([[[1.0000, 0.5000]]])
    """

    needs_weights: ClassVar[bool] = True
    """False for one that uses only scores or the mask: lse is then not needed."""

    keeps_tiles: ClassVar[bool] = True
    """Whether it may keep a tile's tensors, or views of them, beyond the next tile; False lets tiles share memory,
    which is faster. A class that overrides `add` or `see` has to set it again."""

    takes_strips: bool = False
    """Whether it takes several strips as one tile (see `ScoreTile`): then `of_queries`, `of_keys` and `indices` do not
    serve, but `rows_of` and `add_to_columns`. Under a window, a pass is faster if all its statistics do. A class that
    overrides `of`, `add` or `see` has to set it again."""

    call: ObservedCall

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "keeps_tiles" not in own and ("add" in own or "see" in own):
            cls.keeps_tiles = True
        if "takes_strips" not in own and not own.keys().isdisjoint(("of", "add", "see")):
            cls.takes_strips = False

    def begun(self, call: ObservedCall) -> Self:
        """A copy that has started, so that one object can be used many times, for many calls."""
        begun = copy.copy(self)
        begun.call = call
        begun.start(call)
        return begun

    def start(self, call: ObservedCall) -> None:
        """Called before the first tile: allocates what it accumulates."""

    def area(self) -> tuple[range, range]:
        """The queries and keys that it needs (known after `start`): all by default."""
        return range(self.call.grid.query_len), range(self.call.grid.key_len)

    def others(self) -> tuple[ObservedCall, ...]:
        """Other calls of the same grid that it uses, whose visible keys must not be skipped."""
        return ()

    def of(self, tile: ScoreTile) -> Any:
        """The contribution of a tile: tensors that depend on the tile and on nothing that changes, since the backward
        pass recomputes them."""
        raise NotImplementedError

    def add(self, tile: ScoreTile, part: Any) -> None:
        """Accumulates what `of` returned for a tile. Tiles come row by row, from left to right."""
        raise NotImplementedError

    def see(self, tile: ScoreTile) -> None:
        """`of` and `add` in one step."""
        self.add(tile, self.of(tile))

    def finish(self) -> Result:
        """Called after the last tile: the result."""
        raise NotImplementedError


def check_statistics(statistics: Sequence[object]) -> None:
    """Raises unless there is at least one statistic, and every argument is an instance of one."""
    wrong = next((repr(other) for other in statistics if not isinstance(other, Statistic)), None)
    if wrong is not None or not statistics:
        got = "none" if wrong is None else wrong
        raise TypeError(f"gather: expected statistics of regard.observation, such as Entropy(), Top(8); got {got}")


class _Sums(Statistic[Tensor]):
    """Sums over tiles, per query or per key."""

    keeps_tiles = False
    extra: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def start(self, call: ObservedCall) -> None:
        self.total = call.zero_sums(self._length(call.grid), *self.extra, dtype=self.dtype)

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        batch, heads, rows, columns = tile.shape
        length = rows if self._axis == "rows" else columns
        if part.shape != (batch, heads, length, *self.extra):
            axes = f"{batch=}, {heads=}, {self._axis}={length}{''.join(f', {size}' for size in self.extra)}"
            raise ShapeError(f"{type(self).__name__}.of: a part must be [{axes}], got {list(part.shape)}")
        self._accumulate(tile, part)

    def finish(self) -> Tensor:
        return self.total

    _axis: ClassVar[str]

    def _length(self, grid: Grid) -> int:
        raise NotImplementedError

    def _accumulate(self, tile: ScoreTile, part: Tensor) -> None:
        raise NotImplementedError


class PerQuery(_Sums):
    """A sum for each query: ``of`` gives [batch, heads, rows, *extra], the result is [batch, heads, query_len, *extra].

    Attributes:
        extra: further axes of the result, set before or in `start`.
        dtype: of the result; None: that of scores.
    """

    _axis = "rows"

    def _length(self, grid: Grid) -> int:
        return grid.query_len

    def _accumulate(self, tile: ScoreTile, part: Tensor) -> None:
        rows = tile.rows_of(self.total)
        rows += part


class PerKey(_Sums):
    """A sum for each key: ``of`` gives [batch, heads, columns, *extra], the result is [batch, heads, key_len, *extra].

    Attributes: as of `PerQuery`.
    """

    _axis = "columns"

    def _length(self, grid: Grid) -> int:
        return grid.key_len

    def _accumulate(self, tile: ScoreTile, part: Tensor) -> None:
        tile.add_to_columns(self.total, part)

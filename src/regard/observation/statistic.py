"""What a statistic is: the class to derive from, for regard's own and for yours. Single statistics stand elsewhere."""

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
    """Something that is computed from the weights of a call tile by tile, so that they are never held.

    It is asked by `Observation.ask`, or several in one pass by `Observation.gather`, of a recording likewise, and by
    `regard.gather` while a model runs. A sum per query or per key derives from `PerQuery` or `PerKey` and says with
    `of` what a tile adds. Others say in `start` what they hold, in `add` what a part does to it, and in `finish` what
    they answer.

    Attributes:
        call: the call that is asked (`ObservedCall`), from `start` on: `call.grid`, `call.scoring`, and in `finish`,
            for one that needs weights, `call.lse`.

    >>> class Squares(PerQuery):
    ...     def of(self, tile):
    ...         return tile.weights.square().sum(-1)
    >>> query = torch.zeros(1, 1, 2, 4)
    >>> observe(query, query, mask=Causal()).ask(Squares())
    tensor([[[1.0000, 0.5000]]])
    """

    needs_weights: ClassVar[bool] = True
    """False for one that looks at scores or at the mask alone: lse is then not needed."""

    keeps_tiles: ClassVar[bool] = True
    """Whether a tile's tensors, or views of them, may be kept when the next tile is shown; False lets tiles take each
    other's memory, which is faster. A class with an `add` or `see` of its own says it anew."""

    call: ObservedCall

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "keeps_tiles" not in own and ("add" in own or "see" in own):
            cls.keeps_tiles = True

    def begun(self, call: ObservedCall) -> Self:
        """A copy that has started, so that one object may be asked many times, of many calls."""
        begun = copy.copy(self)
        begun.call = call
        begun.start(call)
        return begun

    def start(self, call: ObservedCall) -> None:
        """Before the first tile: makes what it holds."""

    def area(self) -> tuple[range, range]:
        """The queries and keys that it wants to see (after `start`): all, unless said otherwise."""
        return range(self.call.grid.query_len), range(self.call.grid.key_len)

    def others(self) -> tuple[ObservedCall, ...]:
        """Other calls of the same grid that it looks at, whose visible keys must not be skipped."""
        return ()

    def of(self, tile: ScoreTile) -> Any:
        """What a tile adds: tensors computed from the tile and from nothing that changes; a backward pass computes them
        again."""
        raise NotImplementedError

    def add(self, tile: ScoreTile, part: Any) -> None:
        """Takes in what `of` gave for the tile. Tiles come row by row, from left to right."""
        raise NotImplementedError

    def see(self, tile: ScoreTile) -> None:
        """Both at once."""
        self.add(tile, self.of(tile))

    def finish(self) -> Result:
        """After the last tile."""
        raise NotImplementedError


def check_statistics(statistics: Sequence[object]) -> None:
    """One statistic or more, made and not only named."""
    wrong = next((repr(other) for other in statistics if not isinstance(other, Statistic)), None)
    if wrong is not None or not statistics:
        got = "none" if wrong is None else wrong
        raise TypeError(f"gather: expected statistics of regard.observation, such as Entropy(), Top(8); got {got}")


class _Sums(Statistic[Tensor]):
    """Parts added up where a tile's queries, or its keys, stand in the result."""

    keeps_tiles = False
    extra: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def start(self, call: ObservedCall) -> None:
        self.total = call.zero_sums(self._length(call.grid), *self.extra, dtype=self.dtype)

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        into = self.total[self._place(tile)]
        if part.shape != into.shape:
            batch, heads, length = into.shape[:3]
            axes = f"{batch=}, {heads=}, {self._axis}={length}{''.join(f', {size}' for size in self.extra)}"
            raise ShapeError(f"{type(self).__name__}.of: a part must be [{axes}], got {list(part.shape)}")
        into += part

    def finish(self) -> Tensor:
        return self.total

    _axis: ClassVar[str]

    def _length(self, grid: Grid) -> int:
        raise NotImplementedError

    def _place(self, tile: ScoreTile) -> tuple[slice, slice, slice]:
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

    def _place(self, tile: ScoreTile) -> tuple[slice, slice, slice]:
        return tile.of_queries()


class PerKey(_Sums):
    """A sum for each key: ``of`` gives [batch, heads, columns, *extra], the result is [batch, heads, key_len, *extra].

    Attributes: as of `PerQuery`.
    """

    _axis = "columns"

    def _length(self, grid: Grid) -> int:
        return grid.key_len

    def _place(self, tile: ScoreTile) -> tuple[slice, slice, slice]:
        return tile.of_keys()

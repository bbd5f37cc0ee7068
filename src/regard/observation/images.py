"""Statistics that pool the weights, or a rectangle of them, into a small image."""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from regard.indexing import overlap
from regard.observation.observed import ObservedCall
from regard.observation.spans import Span, refuse_many, span_of
from regard.observation.statistic import Statistic
from regard.observation.tile import ScoreTile
from regard.shapes import check_whole


class Image(Statistic[Tensor]):
    """See `Observation.image`."""

    keeps_tiles = False
    takes_strips = True

    def __init__(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Span = None, keys: Span = None
    ) -> None:
        if pool not in ("max", "mean"):
            raise ValueError(f'Observation.image: pool must be "max" or "mean", got {pool!r}')
        self.size, self.pool = check_whole("Observation.image", "size", size), pool
        self.queries, self.keys = queries, keys
        self.takes_strips = self.takes_strips and self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether it shows all queries and keys."""
        return self.queries is None and self.keys is None

    def start(self, call: ObservedCall) -> None:
        self.spans = span_of(self.queries, call.grid.query_len), span_of(self.keys, call.grid.key_len)
        self.steps = tuple(self.step_of(len(span)) for span in self.spans)
        rows, columns = (-(-len(span) // step) for span, step in zip(self.spans, self.steps, strict=True))
        count = call.grid.batch * call.grid.heads * rows * columns
        refuse_many(count, "pixels", "a smaller size, or for one head, seen[0, 3]")
        self.pixels = self.blank(call, rows, columns)

    def step_of(self, length: int) -> int:
        """How many queries, or keys, of so many a pixel covers."""
        return max(1, -(-length // self.size))

    def blank(self, call: ObservedCall, rows: int, columns: int) -> Tensor:
        """The pixels before the first tile."""
        return call.zeros(rows, columns) if self.pool == "max" else call.zero_sums(rows, columns)

    def drawn(self, tile: ScoreTile) -> Tensor:
        """What a tile is drawn by: its weights."""
        return tile.weights.detach() if self.pool == "max" else tile.weights

    def area(self) -> tuple[range, range]:
        return self.spans

    def of(self, tile: ScoreTile) -> list[Tensor]:
        pixels = self.drawn(tile)
        return [self._pooled(pixels[some], places) for some, places in self._alike(tile)]

    def add(self, tile: ScoreTile, part: list[Tensor]) -> None:
        for (_, places), pixels in zip(self._alike(tile), part, strict=True):
            rows, columns = (
                slice((inside.start - span.start) // step, (inside.stop - 1 - span.start) // step + 1)
                for inside, span, step in zip(self._inside(places), self.spans, self.steps, strict=True)
            )
            if tile.place.times == 1:
                self._join(self.pixels[tile.batch, tile.heads, rows, columns], pixels)
                continue
            into, each = self.pixels[tile.batch, tile.heads, rows.start :, columns.start :][0], self._period(tile)
            down, right = (each // step for step in self.steps)
            heads, row, column = into.stride()
            for first in range(0, pixels.shape[-2], down):  # of the rows that several strips draw, each has others
                some = pixels[..., first : first + down, :]
                strides = down * row + right * column, heads, row, column
                self._join(into[:, first:].as_strided(some.shape, strides), some)

    def _pooled(self, pixels: Tensor, places: tuple[range, range]) -> Tensor:
        """The pixels of weights of these queries and keys, those of the first if there are several strips."""
        inside = self._inside(places)
        for dim, span, step, part in zip((-2, -1), self.spans, self.steps, inside, strict=True):
            pixels = pixels.narrow(dim, part.start - places[dim].start, len(part))
            pixels = pooled(pixels, part.start - span.start, step, dim, self.pool)
        return pixels

    def _join(self, pixels: Tensor, part: Tensor) -> None:
        """Draws a part over pixels, in place."""
        if self.pool == "max":
            torch.maximum(pixels, part, out=pixels)
        else:
            pixels += part

    def _alike(self, tile: ScoreTile) -> Iterator[tuple[slice, tuple[range, range]]]:
        """Strips of a tile that begin at the same place of a pixel, and the queries and keys of the first of them; an
        ordinary tile is one."""
        height = len(tile.queries)
        apart = self._period(tile) // height
        for first in range(min(apart, tile.place.times)):
            on = first * height
            queries, keys = (range(part.start + on, part.stop + on) for part in (tile.queries, tile.keys))
            yield slice(first, None, apart) if tile.place.times > 1 else slice(None), (queries, keys)

    def _period(self, tile: ScoreTile) -> int:
        """The queries from a strip to the next that begins at the same place of a pixel."""
        return math.lcm(len(tile.queries), *self.steps)

    def finish(self) -> Tensor:
        return self.mean(self.pixels, self.steps[0])

    def _inside(self, places: tuple[range, range]) -> tuple[range, range]:
        """The queries and keys of these that lie in the image."""
        rows, columns = self.spans
        return overlap(places[0], rows), overlap(places[1], columns)

    def mean(self, pixels: Tensor, step: int) -> Tensor:
        """With mean pooling, turns sums over queries into means over the queries of each row of pixels."""
        if self.pool == "max":
            return pixels
        first = torch.arange(pixels.shape[-2], device=pixels.device) * step
        return pixels / (len(self.spans[0]) - first).clamp(max=step)[:, None]


class Pyramid(Statistic[tuple[Tensor, ...]]):
    """See `Observation.pyramid`."""

    keeps_tiles = False
    takes_strips = True

    def __init__(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> None:
        self.finest = Image(size, pool)

    def start(self, call: ObservedCall) -> None:
        self.finest = self.finest.begun(call)

    def of(self, tile: ScoreTile) -> list[Tensor]:
        return self.finest.of(tile)

    def add(self, tile: ScoreTile, part: list[Tensor]) -> None:
        self.finest.add(tile, part)

    def finish(self) -> tuple[Tensor, ...]:
        pixels, step, pool = self.finest.pixels, self.finest.steps[0], self.finest.pool
        levels = [self.finest.mean(pixels, step)]
        while max(pixels.shape[-2:]) > 1:
            pixels, step = pooled(pooled(pixels, 0, 2, -2, pool), 0, 2, -1, pool), 2 * step
            levels.append(self.finest.mean(pixels, step))
        return tuple(levels)


def pooled(pixels: Tensor, first: int, step: int, dim: int, pool: str) -> Tensor:
    """The maximum or sum of every `step` neighbours along -2 or -1; the first lies `first` pixels after a border."""
    if step == 1 or not pixels.shape[dim]:
        return pixels
    reduce = torch.amax if pool == "max" else torch.sum
    size = pixels.shape[dim]
    front = min(-first % step, size)
    whole = (size - front) // step * step
    head, middle, tail = pixels.split([front, whole, size - front - whole], dim=dim)
    parts = [reduce(part, dim, keepdim=True) for part in (head, tail) if part.shape[dim]]
    if whole:
        parts.insert(1 if front else 0, reduce(middle.unflatten(dim, (-1, step)), dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

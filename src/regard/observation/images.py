"""Statistics that pool the weights, or a rectangle of them, into a small image."""

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

    def __init__(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Span = None, keys: Span = None
    ) -> None:
        if pool not in ("max", "mean"):
            raise ValueError(f'Observation.image: pool must be "max" or "mean", got {pool!r}')
        self.size, self.pool = check_whole("Observation.image", "size", size), pool
        self.queries, self.keys = queries, keys

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

    def of(self, tile: ScoreTile) -> Tensor:
        pixels = self.drawn(tile)
        for dim, span, step, inside in zip((-2, -1), self.spans, self.steps, self._inside(tile), strict=True):
            first = (tile.queries, tile.keys)[dim].start
            pixels = pixels.narrow(dim, inside.start - first, len(inside))
            pixels = pooled(pixels, inside.start - span.start, step, dim, self.pool)
        return pixels

    def add(self, tile: ScoreTile, part: Tensor) -> None:
        rows, columns = (
            slice((inside.start - span.start) // step, (inside.stop - 1 - span.start) // step + 1)
            for inside, span, step in zip(self._inside(tile), self.spans, self.steps, strict=True)
        )
        at = (tile.batch, tile.heads, rows, columns)
        self.pixels[at] = torch.maximum(self.pixels[at], part) if self.pool == "max" else self.pixels[at] + part

    def finish(self) -> Tensor:
        return self.mean(self.pixels, self.steps[0])

    def _inside(self, tile: ScoreTile) -> tuple[range, range]:
        """The tile's queries and keys that lie in the image."""
        rows, columns = self.spans
        return overlap(tile.queries, rows), overlap(tile.keys, columns)

    def mean(self, pixels: Tensor, step: int) -> Tensor:
        """With mean pooling, turns sums over queries into means over the queries of each row of pixels."""
        if self.pool == "max":
            return pixels
        first = torch.arange(pixels.shape[-2], device=pixels.device) * step
        return pixels / (len(self.spans[0]) - first).clamp(max=step)[:, None]


class Pyramid(Statistic[tuple[Tensor, ...]]):
    """See `Observation.pyramid`."""

    keeps_tiles = False

    def __init__(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> None:
        self.finest = Image(size, pool)

    def start(self, call: ObservedCall) -> None:
        self.finest = self.finest.begun(call)

    def of(self, tile: ScoreTile) -> Tensor:
        return self.finest.of(tile)

    def add(self, tile: ScoreTile, part: Tensor) -> None:
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

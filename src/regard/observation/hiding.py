"""What the mask hides in a tile: looked up only in the columns in which it hides anything."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.hidden import Hidden
from regard.masks import Mask, Tile
from regard.masks.planning import visible
from regard.observation import tuning


class Part(NamedTuple):
    """Some columns of a tile, as a slice, and what is hidden there."""

    columns: slice
    hidden: Hidden


class Hiding:
    """What a bound mask hides in a tile.

    Attributes:
        parts: the columns in which anything is hidden, and what.
    """

    _known: dict[tuple[int, torch.dtype, float], Tensor]

    def __init__(self, mask: Mask | None, queries: range, keys: range) -> None:
        self.parts = [] if mask is None else [
            Part(slice(part.start - keys.start, part.stop - keys.start), Hidden(mask.allowed(queries, part)))
            for part in _not_full(mask, queries, keys)
        ]  # fmt: skip
        self._known = {}

    def hide(self, scores: Tensor, harmless: bool, least: float = -math.inf) -> Tensor:
        """Scores with `least` where hidden, in place.

        Args:
            harmless: whether every score is so small that adding `least` hides it. That is several times faster.
        """
        for columns, hidden in self.parts:
            if harmless:
                scores[..., columns].add_(self._numbers(hidden, scores.dtype, least))
            else:
                scores[..., columns].masked_fill_(~hidden.allowed, least)
        return scores

    def _numbers(self, hidden: Hidden, dtype: torch.dtype, least: float) -> Tensor:
        """0 where allowed, `least` elsewhere."""
        key = id(hidden), dtype, least
        if key not in self._known:
            self._known[key] = hidden.numbers(dtype).clamp(min=least)
        return self._known[key]


def _not_full(mask: Mask, queries: range, keys: range) -> Iterator[range]:
    """The parts of the keys in which something is hidden, from left to right."""
    start = keys.start
    (found,) = visible(mask, [(queries, keys)], tuning.MIN_TILE_KEYS)
    for seen, tile in found:
        if tile is Tile.FULL:
            if start < seen.start:
                yield range(start, seen.start)
            start = seen.stop
    if start < keys.stop:
        yield range(start, keys.stop)

"""Which positions of a sequence each rank holds."""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from regard.indexing import placed
from regard.masks import EVERYTHING, Mask, check_mask
from regard.parallel.balancing import SCORES_PER_KEY, cheapest, even, zigzag
from regard.shapes import Grid, ShapeError, check_kind, check_real, check_whole, is_plain, kind


class Shards:
    """Which positions of a sequence each rank holds: every position belongs to exactly one rank.

    A rank's tokens lie in the order of their positions, whatever the order of the ranges.

    Args:
        ranges: for each rank, the ranges of positions that it holds; a rank may hold none.
    Raises:
        ShapeError: ranges overlap, or leave a gap.

    >>> shards = Shards.zigzag(16, ranks=2)
    >>> shards
    Shards([[range(0, 4), range(12, 16)], [range(4, 12)]])
    >>> shards.take(torch.arange(16), rank=0, dim=0).tolist()
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    def __init__(self, ranges: Sequence[Sequence[range]]) -> None:
        if not isinstance(ranges, Sequence) or not ranges:
            raise TypeError(f"Shards: ranges must be a list of ranges for each rank, got {kind(ranges)}")
        self.ranges = tuple(_in_order(rank, held) for rank, held in enumerate(ranges))
        at = 0
        pieces = [(part.start, part.stop, rank) for rank, held in enumerate(self.ranges) for part in held]
        for start, stop, rank in sorted(pieces):
            if start != at:
                gap = f"nobody holds positions {at} to {start - 1}"
                what = gap if start > at else f"position {start} is held twice"
                raise ShapeError(f"Shards: every position belongs to exactly one rank, but {what} (see rank {rank})")
            at = stop
        self.length = at

    @classmethod
    def contiguous(cls, length: int, ranks: int) -> "Shards":
        """Consecutive positions for each rank, as equally many as possible.

        >>> Shards.contiguous(10, 3)
        Shards([[range(0, 4)], [range(4, 7)], [range(7, 10)]])
        """
        return cls([[part] for part in even(*_checked(length, ranks))])

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Shards":
        """Consecutive positions, so many for each rank."""
        ends = [0, *accumulate(check_whole("Shards", "sizes", size, 0) for size in sizes)]
        return cls([[range(start, stop)] for start, stop in pairwise(ends)])

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> "Shards":
        """Two pieces for each rank, one from the start and one from the end: equal work under a causal mask."""
        return cls(zigzag(*_checked(length, ranks)))

    @classmethod
    def balanced(
        cls, mask: Mask | None, length: int, ranks: int, *, batch: int = 1, heads: int = 1,
        scores_per_key: float = SCORES_PER_KEY,
    ) -> "Shards":  # fmt: skip
        """The cheapest for a mask of several ways: consecutive, zigzag, equal work, documents whole.

            time of a rank = scores that its queries see + scores_per_key * keys that it receives

        Args:
            batch, heads: of the call, for a mask with data for them.
            scores_per_key: how many scores a rank computes while one key and value arrive.

        >>> from regard import Causal, Document, Window
        >>> Shards.balanced(Causal(), 4096, 2) == Shards.zigzag(4096, 2)
        True
        >>> Shards.balanced(Causal() & Window(64), 4096, 2) == Shards.contiguous(4096, 2)
        True
        >>> Shards.balanced(Causal() & Document.from_lengths([1500, 1000, 500, 1000, 96]), 4096, 2)
        Shards([[range(0, 1500)], [range(1500, 4096)]])
        """
        length, ranks = _checked(length, ranks)
        check_real("Shards.balanced", "scores_per_key", scores_per_key, 0.0)
        if mask is not None:
            check_mask("Shards.balanced", "mask", mask)
        bound = EVERYTHING if mask is None else mask.bind(Grid(batch, heads, length, length))
        return cls(cheapest(bound, length, ranks, scores_per_key))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.ranges)

    def size(self, rank: int) -> int:
        """How many positions a rank holds."""
        return sum(map(len, self.ranges[rank]))

    @cached_property
    def largest(self) -> int:
        """The most positions that a rank holds."""
        return max(self.size(rank) for rank in range(self.ranks))

    def of_others(self, rank: int) -> list[range]:
        """The positions that other ranks hold, as ranges in order."""
        ends = [0, *(end for part in self.ranges[rank] for end in (part.start, part.stop)), self.length]
        return [range(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """The positions that a rank holds, in order: int64 [size]."""
        parts = [torch.arange(part.start, part.stop, device=device) for part in self.ranges[rank]]
        return torch.cat(parts) if parts else torch.arange(0, device=device)

    def take(self, whole: Tensor, rank: int, dim: int = 2) -> Tensor:
        """A rank's part of a tensor of the whole sequence: a view where it is one range."""
        if not is_plain(whole) or whole.shape[dim] != self.length:
            raise ShapeError(f"Shards.take: axis {dim} must hold {self.length} positions, got {kind(whole)}")
        held = self.ranges[rank] or (range(0),)
        parts = [whole.narrow(dim, part.start, len(part)) for part in held]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int = 2) -> Tensor:
        """The tensor of the whole sequence, from the parts of all ranks."""
        found = [part.shape[dim] for part in parts]
        if found != [self.size(rank) for rank in range(self.ranks)]:
            raise ShapeError(f"Shards.join: parts must have the sizes of {self!r} on axis {dim}, got {found}")
        pieces = {
            piece.start: part.narrow(dim, at, len(piece))
            for rank, part in enumerate(parts)
            for piece, at in placed(self.ranges[rank])
        }
        return torch.cat([pieces[start] for start in sorted(pieces)] or list(parts[:1]), dim)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __repr__(self) -> str:
        shown = [list(held) for held in self.ranges]
        if self.ranks <= 8 and sum(map(len, shown)) <= 32:
            return f"Shards({shown})"
        return f"Shards(<{self.length:,} positions, {self.ranks} ranks, {sum(map(len, shown))} ranges>)"


def check_shards(owner: str, name: str, shards: object, ranks: int) -> Shards:
    """Shards for so many ranks."""
    check_kind(owner, name, shards, Shards, "; such as Shards.contiguous(length, ranks)")
    assert isinstance(shards, Shards)
    if shards.ranks != ranks:
        raise ShapeError(f"{owner}: {name} are for {shards.ranks} ranks, the group has {ranks}")
    return shards


def _checked(length: int, parts: int) -> tuple[int, int]:
    return check_whole("Shards", "length", length, 0), check_whole("Shards", "ranks", parts)


def _in_order(rank: int, held: Sequence[range]) -> tuple[range, ...]:
    """A rank's ranges without empty ones, sorted, those that touch as one."""
    if not isinstance(held, (list, tuple)):
        raise TypeError(f"Shards: ranges must be a list of ranges for each rank, got {kind(held)} for rank {rank}")
    for part in held:
        if not isinstance(part, range) or part.step != 1 or part.start < 0:
            raise TypeError(f"Shards: rank {rank} must hold ranges of positions without a step, got {part!r}")
    joined: list[range] = []
    for part in sorted((part for part in held if part), key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            part = range(joined.pop().start, part.stop)
        joined.append(part)
    return tuple(joined)

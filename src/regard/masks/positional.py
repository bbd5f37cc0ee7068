"""Masks that depend on the distance between query and key, or on the position of the key.

Query i has position ``i + offset`` and key j position j. With the default offset ``key_len - query_len``, the last
query has the position of the last key; it is fixed when a call binds the mask.
"""

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any, ClassVar, Self

from torch import Tensor

from regard import rules
from regard.graphs import exporting
from regard.indexing import lookup
from regard.masks.algebra import EVERYTHING, Mask, Verdict
from regard.shapes import Grid, Offset, check_per_batch, check_whole, known_true


class Positioned(rules.Positioned, Mask):
    """A mask that compares positions: query i has position ``i + offset``."""

    def offsets(self) -> list[int]:
        """The distinct offsets of all batch indices."""
        return sorted(set(self.offset.tolist())) if isinstance(self.offset, Tensor) else [self.offset or 0]

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        if not isinstance(self.offset, Tensor):
            offset = self.offset or 0
            return self.verdict_on(top + offset, bottom + offset, left, right)
        said = [self.verdict_on(top + offset, bottom + offset, left, right) for offset in self.offsets()]
        return reduce(and_, (empty for empty, _ in said), True), reduce(and_, (full for _, full in said), True)

    def verdict_on(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        """`verdict` by the positions of queries and keys."""
        raise NotImplementedError

    def _moved_offset(self, query: int, key: int) -> Self:
        """`counted_from` for a mask of the distance between query and key alone."""
        assert self.offset is not None  # it is bound
        return self._with(offset=self.offset + (query - key))


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
        self.before, self.after = _reach("before", before), _reach("after", after)

    def bind(self, grid: Grid) -> Mask:
        # one query sees all keys up to its own, which is the last: for any number of them, as in a graph; but one that
        # leaves is for other numbers of queries, too
        sees_its_own = self.offset is None and self.before is None and self.after is not None and self.after >= 0
        if sees_its_own and type(self).rule is Band.rule and not exporting() and grid.query_len == 1:
            return EVERYTHING
        return super().bind(grid)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = self.position(batch, query)
        if self.before is None:
            return key - at == key - at if self.after is None else key <= at + self.after
        near = key >= at - self.before
        return near if self.after is None else near & (key <= at + self.after)

    def verdict_on(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        # in the rectangle, key_position - query_position takes every value from `least` to `most`
        least, most = left - bottom, right - top
        low = least if self.before is None else -self.before
        high = most if self.after is None else self.after
        return (low > most) | (least > high) | (low > high), (low <= least) & (most <= high)

    def counted_from(self, query: int, key: int, grid: Grid) -> Mask:
        if type(self).rule is not Band.rule:  # a band with a rule of its own, of places perhaps
            return super().counted_from(query, key, grid)
        return self._moved_offset(query, key)

    def seen_by(self, query: int, keys: range) -> range | None:
        """Those of consecutive keys that a query sees; None where that differs between batch indices."""
        if type(self).rule is not Band.rule or not isinstance(self.offset, int):
            return None
        at, first, last = query + self.offset, keys.start, keys.stop
        if self.before is not None:
            first = min(max(first, at - self.before), last)
        if self.after is not None:
            last = max(min(last, at + self.after + 1), first)
        return range(first, last)

    def intersection(self, other: Mask) -> "Band | None":
        """The intersection of two bands with the same offset."""
        if not isinstance(other, Band) or isinstance(self.offset, Tensor) or isinstance(other.offset, Tensor):
            return None
        if self.offset != other.offset:
            return None
        both = Band(_smaller(self.before, other.before), _smaller(self.after, other.after), self.offset)
        return both._with(_batch=self._batch, _heads=self._heads, _device=self._device)


def _reach(name: str, value: int | None) -> int | None:
    """How many keys a band sees on one side."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise TypeError(f"Band: {name} must be an int or None (unbounded), got {value!r}")
    return value


class Causal(Band):
    """Hides later keys: allowed if ``key_position <= query_position`` (Vaswani et al. 2017, section 3.2.3).

    >>> print(Causal().draw(2, 5))   # two new tokens after three in the cache
    # # # # .
    # # # # #
    >>> print(Causal(offset=0).draw(2, 5))
    # . . . .
    # # . . .
    """

    def __init__(self, offset: Offset = None) -> None:
        super().__init__(None, 0, offset)


class Window(Band):
    """Keys closer than w: ``|query_position - key_position| < w``; with `Causal` exactly w keys, its own included.

    >>> print(Window(2).draw(4, 4))
    # # . .
    # # # .
    . # # #
    . . # #
    """

    def __init__(self, w: int, offset: Offset = None) -> None:
        self.w = check_whole("Window", "w", w, hint="; Window(1) sees only the query's own position")
        super().__init__(self.w - 1, self.w - 1, offset)


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
        self.step = check_whole("Strided", "step", step)

    def counted_from(self, query: int, key: int, grid: Grid) -> Mask:
        if type(self).rule is not Strided.rule:
            return super().counted_from(query, key, grid)
        return self._moved_offset(query, key)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (self.position(batch, query) - key) % self.step == 0

    def verdict_on(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        least, most = top - right, bottom - left
        seen = -(-least // self.step) * self.step <= most  # the first multiple of the step
        return seen ^ True, seen & ((least == most) | (self.step == 1))


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
        self.size = check_whole("Chunk", "size", size)

    def breaks(self, query_len: int) -> set[int]:
        return {i for offset in self.offsets() for i in range(-offset % self.size, query_len, self.size)}

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.position(batch, query) // self.size == key // self.size

    def verdict_on(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        top, bottom, left, right = (at // self.size for at in (top, bottom, left, right))
        return (bottom < left) | (right < top), (top == bottom) & (top == left) & (top == right)


class Prefix(Mask):
    """Keys before position n, seen by every query: ``key_position < n``.

    A prefix language model is ``Causal() | Prefix(n)``; a streaming model that keeps the first tokens (Xiao et al.
    2023) is ``Causal() & (Window(w) | Prefix(4))``.

    Args:
        n: length of the prefix, or one length per batch index.

    >>> print((Causal() | Prefix(2)).draw(4, 4))
    # # . .
    # # . .
    # # # .
    # # # #
    """

    axes: ClassVar = {"n": ("batch",)}

    def __init__(self, n: int | Sequence[int] | Tensor) -> None:
        if isinstance(n, int) and not isinstance(n, bool):
            if n < 0:
                raise ValueError(f"Prefix: n must be 0 or more, got {n}")
            self.n: int | Tensor = n
        else:
            self.n = check_per_batch("Prefix", "n", n)
            if known_true((self.n < 0).any()):
                raise ValueError(f"Prefix: n must be 0 or more, got {self.n.tolist()}")

    @property
    def of_positions(self) -> bool:
        return not isinstance(self.n, Tensor)

    def counted_from(self, query: int, key: int, grid: Grid) -> Mask:
        if type(self).rule is not Prefix.rule:
            return super().counted_from(query, key, grid)
        n = self.n - key
        return self._with(n=n.clamp(min=0) if isinstance(n, Tensor) else max(0, n))

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < (lookup(self.n, batch) if isinstance(self.n, Tensor) else self.n)

    def verdict(self, top: Any, bottom: Any, left: Any, right: Any) -> Verdict:
        return first_keys(self.n.tolist() if isinstance(self.n, Tensor) else [self.n], left, right)


def first_keys(lengths: list[int], left: Any, right: Any) -> Verdict:
    """The verdict on columns if each batch index sees its first so many keys."""
    return left >= max(lengths, default=0), right < min(lengths, default=0)


def _smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)

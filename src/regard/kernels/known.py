"""What was found out about masks and biases, cached by their structure: once for all layers that share them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import ref

import torch

from regard.graphs import as_it_stands
from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.rules import settled
from regard.shapes import Grid

Function = TypeVar("Function", bound=Callable[..., Any])


def cached_by_mask(maxsize: int) -> Callable[[Function], Function]:
    """Caches a function of a mask, and of further arguments that can be hashed, where the mask can be compared."""

    def decorate(function: Function) -> Function:
        @lru_cache(maxsize)
        def remembered(known: MaskKey, *more: Any) -> Any:
            with torch.inference_mode(False):  # autograd cannot save inference tensors
                return function(settled(known.mask), *more)

        @wraps(function)
        def found(mask: Mask, *more: Any) -> Any:
            if not as_it_stands():
                return function(mask, *more)  # tensors made in a functorch transform must not be cached
            known = MaskKey(mask)
            return function(mask, *more) if known.structure is None else remembered(known, *more)

        return cast(Function, found)

    return decorate


@cached_by_mask(maxsize=8)
def bind(mask: Mask, grid: Grid) -> Mask:
    """`Mask.bind`, cached."""
    return mask.bind(grid)


class Sized(Protocol):
    """Something that is kept, and how many numbers it holds."""

    @property
    def size(self) -> int: ...


Value = TypeVar("Value", bound=Sized)


class Kept(Generic[Value]):
    """A cache of limited size: what was not asked for the longest makes room.

    Args:
        most: numbers that all values together may hold.
    """

    def __init__(self, most: int) -> None:
        self._most, self._numbers = most, 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, known: Hashable, make: Callable[[], Value]) -> Value:
        """The value under a key; made if it is not there."""
        with self._lock:
            if known in self._values:
                self._values.move_to_end(known)
                return self._values[known]
        value = make()
        with self._lock:
            if known not in self._values:
                self._values[known] = value
                self._numbers += value.size
            while self._numbers > self._most:
                self._numbers -= self._values.popitem(last=False)[1].size
        return value

    def getter(self, known: Hashable, make: Callable[[], Value]) -> Callable[[], Value]:
        """A function that gets it, and compares no keys while it is kept."""
        found: Callable[[], Value | None] = lambda: None  # noqa: E731

        def get() -> Value:
            nonlocal found
            value = found()
            if value is None:
                value = self.get(known, make)
                found = ref(value)
            return value

        return get

    def has(self, known: Hashable) -> bool:
        """Whether a value is there."""
        return known in self._values

    def clear(self) -> None:
        """Empties it."""
        with self._lock:
            self._values.clear()
            self._numbers = 0

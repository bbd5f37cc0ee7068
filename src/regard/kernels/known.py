"""What was found out about masks and biases, cached by their structure: once for all layers that share them."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor

from regard.graphs import as_it_stands
from regard.masks import Mask
from regard.rules import settled
from regard.shapes import Grid
from regard.versions import tensors_in

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")


_lock = threading.Lock()


def keep(values: dict[Any, Value], key: Hashable, value: Value, most: int) -> Value:
    """Adds a value to a cache of so many; those that are oldest make room. Returns the value."""
    with _lock:
        while len(values) >= most:
            values.pop(next(iter(values), None), None)
        values[key] = value
    return value


class Recent(Generic[Value]):
    """The values of a few keys, which were asked for last. A value is dropped with the first tensor of its key that is:
    then nothing has that key any more, and what was found out about a large mask takes no memory after it.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, tuple[Value, list[ref[Tensor]]]] = OrderedDict()
        self._lock = threading.RLock()  # a tensor may be dropped while it is held

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value under a key; made if it is not there. It must not hold the tensors of the key itself, but may hold
        others with the same memory (`settled`)."""
        found = self._values.get(key)
        if found is None:

            def drop(tensor: object) -> None:
                with self._lock:
                    self._values.pop(key, None)

            tensors = tensors_in(key)  # they are there until the value is
            found = make(), [ref(tensor, drop) for tensor in tensors]
            with self._lock:
                self._values[key] = found
                while len(self._values) > self._most:
                    self._values.popitem(last=False)
        else:
            with self._lock:
                if key in self._values:  # it may have been dropped just now
                    self._values.move_to_end(key)
        return found[0]


def cached_by_mask(maxsize: int) -> Callable[[Function], Function]:
    """Caches a function of a mask, and of further arguments that can be hashed, where the mask can be compared."""

    def decorate(function: Function) -> Function:
        recent: Recent[Any] = Recent(maxsize)

        @wraps(function)
        def found(mask: Mask, *more: Any) -> Any:
            # tensors made in a functorch transform must not be cached
            structure = mask.structure() if as_it_stands() else None
            if structure is None:
                return function(mask, *more)

            def make() -> Any:
                with torch.inference_mode(False):  # autograd cannot save inference tensors
                    return function(settled(mask), *more)

            return recent.get((structure, *more), make)

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


SizedValue = TypeVar("SizedValue", bound=Sized)


class Kept(Generic[SizedValue]):
    """A cache of limited size: what was not asked for the longest makes room.

    Args:
        most: numbers that all values together may hold.
    """

    def __init__(self, most: int) -> None:
        self._most, self._numbers = most, 0
        self._values: OrderedDict[Hashable, SizedValue] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, known: Hashable, make: Callable[[], SizedValue]) -> SizedValue:
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

    def getter(self, known: Hashable, make: Callable[[], SizedValue]) -> Callable[[], SizedValue]:
        """A function that gets it, and compares no keys while it is kept."""
        found: Callable[[], SizedValue | None] = lambda: None  # noqa: E731

        def get() -> SizedValue:
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

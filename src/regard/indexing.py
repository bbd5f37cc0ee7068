"""Selections of queries and keys: ranges, slices and index tensors, and reading data at them."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

Indices = range | slice | Tensor
"""A selection of queries or keys: a range, a slice with a stop, or a 1-D tensor of integers."""


def indices(which: Indices, device: torch.device | None = None) -> Tensor:
    """Queries or keys as a 1-D int64 tensor."""
    if isinstance(which, Tensor):
        if which.dim() != 1 or which.is_floating_point() or which.dtype == torch.bool:
            raise TypeError(f"indices must be a 1-D tensor of integers, got {which.dtype} {list(which.shape)}")
        return which.to(torch.int64)  # torch would treat uint8 as a mask
    which = as_range(which)
    return torch.arange(which.start, which.stop, which.step, device=device)


def as_range(which: range | slice) -> range:
    """A slice with a stop as a range."""
    if isinstance(which, range):
        return which
    if not isinstance(which, slice) or which.stop is None:
        raise TypeError(f"give a range, or a slice with a stop, got {which!r}")
    return range(which.start or 0, which.stop, which.step or 1)


def overlap(one: range, other: range) -> range:
    """The intersection of two ranges."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def shifted(which: Indices, by: int) -> range | Tensor:
    """The same selection, so many places later."""
    if isinstance(which, Tensor):
        return indices(which) + by
    which = as_range(which)
    return range(which.start + by, which.stop + by, which.step)


def hull(ranges: Sequence[range]) -> range:
    """The smallest range that contains all of them."""
    return range(min(part.start for part in ranges), max(part.stop for part in ranges))


def merged(ranges: Iterable[range]) -> list[range]:
    """The same numbers as ranges in order that neither touch nor overlap."""
    found: list[range] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            part = range(found[-1].start, max(found.pop().stop, part.stop))
        found.append(part)
    return found


def placed(ranges: Iterable[range]) -> Iterator[tuple[range, int]]:
    """Each range with the place of its first number among all of them."""
    at = 0
    for part in ranges:
        yield part, at
        at += len(part)


def split_at(whole: range, origin: int, step: int) -> Iterator[range]:
    """A range split at multiples of `step`, counted from an origin."""
    start = whole.start
    while start < whole.stop:
        stop = min(whole.stop, start + step - (start - origin) % step)
        yield range(start, stop)
        start = stop


def as_place(which: Indices) -> range | Tensor:
    """The form that `pick` takes: a range without gaps unchanged, which needs no copy; else a tensor."""
    return which if isinstance(which, range) and which.step == 1 else indices(which)


def pick(tensor: Tensor, rows: range | Tensor, columns: range | Tensor) -> Tensor:
    """Rows and columns of a tensor [.., query_len or 1, key_len or 1]; an axis of size 1 stays as it is."""
    for axis, which in ((-2, rows), (-1, columns)):
        if tensor.shape[axis] == 1:
            continue
        if isinstance(which, Tensor):
            tensor = tensor.index_select(axis, which.to(tensor.device))
        elif len(which) < tensor.shape[axis]:  # a view of the whole would copy its gradient
            tensor = tensor.narrow(axis, which.start, len(which))
    return tensor


def lookup(data: Tensor, *places: Tensor) -> Tensor:
    """``data[places]`` with one index tensor for each axis; an axis of size 1 broadcasts.

    >>> ids = torch.tensor([[7, 8, 9]])                               # one row, for every batch index
    >>> lookup(ids, torch.arange(2)[:, None], torch.tensor([0, 2])).tolist()
    [7, 9]
    """
    device = places[0].device
    data = data if data.device == device else data.to(device)
    return data[tuple(0 if size == 1 else place for size, place in zip(data.shape, places, strict=True))]

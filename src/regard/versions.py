"""How a tensor is known again: as itself in the same version, or by its contents if they are few.

A key does not keep a tensor alive: it has a weak reference to it, which is equal to no other once the tensor is gone.
"""

from collections.abc import Callable, Hashable
from ctypes import string_at
from weakref import ref

import torch
from torch import Tensor, nn

from regard.graphs import transformed

MAX_HELD_BYTES = 1 << 23
"""Most bytes of a tensor that a cache keeps alive with a value: a number for each pair of up to 512 tokens in 8 heads.
Row "bias, dense, causal" of features.py."""

MAX_READ_NUMBERS = 1 << 12
"""Most floating numbers in a tensor that is compared by its contents, such as slopes or a table of buckets."""

MAX_READ_BYTES = 1 << 16
"""Most bytes of an inference tensor, whose versions torch does not count, that is compared by its contents, such as the
mask of 256 tokens."""

_READABLE = frozenset({Tensor, nn.Parameter})

is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether it is a tensor of a transform of torch.func, perhaps of one that has ended: it has no memory of its own."""


class NotComparableError(Exception):
    """A value that has no comparable structure."""


def version(tensor: Tensor) -> Hashable:
    """Equal for the same tensor in the same version; for inference tensors, which have none, for the same few bytes."""
    if tensor.is_inference():
        if not is_few(tensor):
            raise NotComparableError
        return _contents(tensor)
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        raise NotComparableError
    if base is tensor:
        # the id comes first, so that tuples never compare two tensors elementwise
        return id(tensor), tensor._version, ref(tensor)
    return id(base), base._version, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), ref(base)


def tensors_in(key: Hashable) -> list[Tensor]:
    """The tensors that a key tells of by their version."""
    todo, found = [key], []
    for part in todo:
        if isinstance(part, tuple):
            todo += part
        elif type(part) is ref:
            found.append(part())
    return [tensor for tensor in found if tensor is not None]


def few_or_version(tensor: Tensor) -> Hashable:
    """Equal for tensors with the same few numbers, and for the same tensor in the same version."""
    if tensor.requires_grad and (torch.is_grad_enabled() or tensor.grad_fn is not None):
        raise NotComparableError  # it learns, or holds a graph
    if is_few(tensor):
        return _contents(tensor)
    return version(tensor)


def _contents(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, string_at(tensor.data_ptr(), tensor.nbytes)


def is_few(tensor: Tensor) -> bool:
    """Whether it holds few floating numbers, or is an inference tensor of few bytes, one after the other in memory that
    may be read."""
    few = tensor.is_floating_point() and tensor.numel() <= MAX_READ_NUMBERS
    few = few or (tensor.is_inference() and tensor.nbytes <= MAX_READ_BYTES)
    if not few or not tensor.is_contiguous():
        return False
    readable = type(tensor) in _READABLE and tensor.is_cpu
    return readable and not (transformed() or is_wrapped(tensor))


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one shape and dtype, on one device, and have the same numbers."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device or one.is_meta:
        return False
    if _are_eights(one) and _are_eights(other):  # which torch compares in a fifth of the time
        return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))
    return torch.equal(one, other)


def _are_eights(tensor: Tensor) -> bool:
    """Whether they are bools that may be read as numbers of eight."""
    if tensor.dtype is not torch.bool or not tensor.is_contiguous():
        return False
    return tensor.numel() % 8 == 0 == tensor.storage_offset() % 8

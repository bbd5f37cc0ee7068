"""Axis names, a shape table for each public function, argument checks, and the form of error messages.

Every tensor axis in regard has a name, and an axis that appears twice in a table must have the same size:

    query  [batch, heads,    query_len, head_dim]
    key    [batch, kv_heads, key_len,   head_dim]
    value  [batch, kv_heads, key_len,   value_dim]

A call is checked once, before any kernel runs, so all kernels raise the same errors. An error says what is wrong, lists
what was passed by name and axis, and adds a hint if the cause can be guessed.
"""

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from regard.graphs import has_numbers, tracing


class ShapeError(ValueError):
    """Tensors whose axes do not fit each other, or a mask or bias that does not fit the call."""


class LayoutWarning(UserWarning):
    """A call whose heads and length look swapped."""


class Grid(NamedTuple):
    """The scores of one call: how many rows and columns there are, per batch index and head, and on which device."""

    batch: int
    heads: int
    query_len: int
    key_len: int
    device: torch.device = torch.device("cpu")

    def __str__(self) -> str:
        return f"[batch={self.batch}, heads={self.heads}, query_len={self.query_len}, key_len={self.key_len}]"


Table = Mapping[str, tuple[str, ...]]

ATTENTION: Table = {
    "query": ("batch", "heads", "query_len", "head_dim"),
    "key": ("batch", "kv_heads", "key_len", "head_dim"),
    "value": ("batch", "kv_heads", "key_len", "value_dim"),
}
LAYER: Table = {
    "query": ("batch", "query_len", "dim"),
    "key": ("batch", "key_len", "key_input"),
    "value": ("batch", "key_len", "value_input"),
}
STATES: Table = {"x": ("batch", "length", "dim")}
TOKENS: Table = {"tokens": ("batch", "length")}
CACHE: Table = {
    "key": ("batch", "kv_heads", "length", "head_dim"),
    "value": ("batch", "kv_heads", "length", "value_dim"),
}

MAX_HEADS = 256
"""No known model has more heads; a call with more heads than this and few queries probably has its axes swapped."""

FLOATING_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})

INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

# common mistakes in a call of attention: the axis that does not fit -> what probably happened
_HINTS = {
    "key_len": "after a cache, pass the keys and values that append() returned, both of them",
    "batch": "nothing is broadcast; use .expand(batch, -1, -1, -1) to share a tensor between rows",
    "kv_heads": "key and value come in pairs; only query may have more heads",
    "head_dim": "query and key are multiplied feature by feature; only value may be of another size",
}


def kind(value: object) -> str:
    """A short description of an argument for an error: dtype and shape of a tensor, type or value of anything else.

    >>> kind(torch.zeros(2, 3)), kind(None), kind([0] * 1000), kind("causal")
    ('torch.float32 tensor [2, 3]', 'None', 'list', "'causal'")
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            return "a nested tensor"
        form = "tensor" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} tensor"
        return f"{value.dtype} {form} {list(value.shape)}"
    if isinstance(value, (bool, int, float, str, type)) or value is None:
        shown = repr(value)
        return shown if len(shown) <= 60 else f"{shown[:57]}..."
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        return f"{type(value).__module__}.{type(value).__name__} {list(value.shape)}"
    return type(value).__name__


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is an int or float, but not a bool or a tensor."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_whole(owner: str, name: str, value: object, least: int | None = 1, hint: str = "") -> int:
    """A size or count as an int, not below `least`; numpy's integers are accepted, bools are not."""
    whole = as_whole(value)
    if whole is None or (least is not None and whole < least):
        bound = "" if least is None else f", {least} or more"
        raise ValueError(f"{owner}: {name} must be a whole number{bound}, got {kind(value)}{hint}")
    return whole


def as_whole(value: object) -> int | None:
    """A whole number as an int; None for anything else, including bools and tensors."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return None if isinstance(value, (bool, Tensor)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_real(owner: str, name: str, value: object, above: float) -> None:
    """Raises unless the value is a finite number above a bound."""
    if not is_number(value):
        raise TypeError(f"{owner}: {name} must be a number, got {kind(value)}")
    if not above < value < math.inf:
        raise ValueError(f"{owner}: {name} must be a finite number above {above:g}, got {value}")


def check_rate(owner: str, name: str, value: object) -> None:
    """Raises unless the value is a dropout probability."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ValueError(f"{owner}: {name} must be a probability in [0, 1), got {kind(value)}")


def check_flag(owner: str, name: str, value: object) -> None:
    """Raises unless the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be True or False, got {kind(value)}")


def check_floating(owner: str, name: str, value: object, axes: str) -> None:
    """Raises unless the value is a floating tensor."""
    if not is_plain(value) or not value.is_floating_point():
        raise TypeError(f"{owner}: {name} must be a floating tensor {axes}, got {kind(value)}{how_to_plain(value)}")


def check_kind(owner: str, name: str, value: object, wanted: type, hint: str = "") -> None:
    """Raises unless the value is an instance of a class."""
    if not isinstance(value, wanted):
        raise TypeError(f"{owner}: {name} must be a {wanted.__name__}, got {kind(value)}{hint}")


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a dense torch tensor: not sparse, not nested, not an array of another library."""
    return isinstance(value, Tensor) and not value.is_nested and value.layout is torch.strided


def how_to_plain(value: object) -> str:
    """How to convert a value to a plain tensor, as the end of an error message; empty if unknown."""
    if isinstance(value, Tensor) and value.is_nested:
        return "; pad it, .to_padded_tensor(0.0), and hide the padding with mask=Padding(lengths)"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return "; pass tensor.to_dense()"
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        return "; pass torch.as_tensor(array)"
    return ""


def describe(name: str, tensor: Tensor, axes: tuple[str, ...]) -> str:
    """One line of an error message: a tensor's name, its axes and their sizes."""
    if tensor.dim() == len(axes):
        inside = ", ".join(f"{axis}={size}" for axis, size in zip(axes, tensor.shape, strict=True))
    else:
        inside = ", ".join(map(str, tensor.shape))
    return f"  {name:<5} [{inside}]"


def shape_error(
    function: str, what: str, table: Table, tensors: Mapping[str, Tensor], hint: str | None = None
) -> ShapeError:
    """A `ShapeError`: what is wrong, what was passed, and a hint."""
    lines = [f"{function}: {what}"]
    lines += [describe(name, tensors[name], axes) for name, axes in table.items() if name in tensors]
    if hint:
        lines.append(f"  hint: {hint}")
    return ShapeError("\n".join(lines))


def check(function: str, table: Table, **tensors: Tensor) -> dict[str, int]:
    """Checks every tensor against its row of the table and returns the sizes of axes by name.

    Raises:
        TypeError: something is not a tensor.
        ShapeError: the number of axes is wrong, or one axis has two sizes.
    """
    for name, tensor in tensors.items():
        if not is_plain(tensor):
            got = kind(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"{function}: {name} must be a tensor [{', '.join(table[name])}], got {got}{how_to_plain(tensor)}"
            )
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        axes, shape = table[name], tensor.shape
        if len(shape) != len(axes):
            raise shape_error(
                function,
                f"{name} must have {len(axes)} axes [{', '.join(axes)}], got {len(shape)}",
                table,
                tensors,
                _axes_hint(len(shape), axes),
            )
        for axis, size in zip(axes, shape):  # noqa: B905  (the lengths are equal; strict= costs time on every call)
            if sizes.setdefault(axis, size) != size:
                other = next(n for n in tensors if n != name and axis in table[n])
                raise shape_error(
                    function,
                    f"{other} and {name} must have the same {axis}, got {sizes[axis]} and {size}",
                    table,
                    tensors,
                    _size_hint(axis, tensors) if table is ATTENTION else None,
                )
    return sizes


def check_attention(function: str, query: Tensor, key: Tensor, value: Tensor) -> Grid:
    """Checks query, key and value: shapes, numbers of heads, one floating dtype, one device.

    Returns:
        The grid of scores of this call.
    """
    if not _fit(query, key, value):
        check(function, ATTENTION, query=query, key=key, value=value)  # raises the specific error
    batch, heads, query_len, _ = query.shape
    kv_heads, key_len = key.shape[1], key.shape[2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise shape_error(
            function,
            f"kv_heads must divide heads, got kv_heads={kv_heads} and heads={heads}",
            ATTENTION,
            {"query": query, "key": key, "value": value},
            "the layout is [batch, heads, length, head_dim]; was length put before heads? x.transpose(1, 2)",
        )
    dtype, device = query.dtype, query.device
    dtypes = dtype, key.dtype, value.dtype
    if dtype not in FLOATING_DTYPES or len(set(dtypes)) > 1:
        convert = (
            "\n  hint: convert them, as by query.to(value.dtype): in torch.autocast, too, no dtype is changed here"
        )
        raise TypeError(
            f"{function}: query, key and value must share one of float64, float32, bfloat16, float16, "
            f"got {', '.join(map(str, dtypes))}{convert if FLOATING_DTYPES.issuperset(dtypes) else ''}"
        )
    if key.device != device or value.device != device:
        raise ValueError(
            f"{function}: query, key and value must be on one device, got {query.device}, {key.device}, {value.device}"
        )
    if heads > MAX_HEADS and kv_heads > MAX_HEADS and heads > 4 * max(query_len, key_len) > 4:
        warnings.warn(
            f"{function}: {heads} heads of {query_len} queries and {key_len} keys look like [batch, length, heads, "
            "head_dim]; the layout is [batch, heads, length, head_dim]: x.transpose(1, 2)",
            LayoutWarning,
            stacklevel=5,
        )
    return Grid(batch, heads, query_len, key_len, device)


def _fit(query: object, key: object, value: object) -> bool:
    """A fast version of `check` for every call."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return False
    if not (query.layout is key.layout is value.layout is torch.strided):
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # one nested layout is also called strided
        return False
    queries, keys, values = query.shape, key.shape, value.shape
    if not len(queries) == len(keys) == len(values) == 4:
        return False
    return queries[0] == keys[0] and queries[3] == keys[3] and keys[:3] == values[:3]


def _size_hint(axis: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The probable cause if an axis of a call of attention has two sizes."""
    query, key = (tensors[name].shape for name in ("query", "key"))
    value = tensors["value"].shape if "value" in tensors else key
    if axis == "head_dim" and key[2] == query[3] and key[3] == value[2]:
        return "key is [batch, kv_heads, key_len, head_dim], not transposed: key.transpose(-2, -1)"
    if axis == "kv_heads" and key[1] == value[2] and key[2] == value[1]:
        return "key has its heads and its length the other way round than value: .transpose(1, 2)"
    return _HINTS.get(axis)


Offset = int | Sequence[int] | Tensor | None
"""Position of query 0: an int, one int per batch index, or None for ``key_len - query_len``."""


def check_per_batch(owner: str, name: str, values: int | Iterable[int] | Tensor) -> Tensor:
    """One int per batch index, as a 1-D int64 tensor."""
    wanted = f"{owner}: {name} must be an int, or one int per batch index, got"
    if isinstance(values, Tensor) and not is_plain(values):
        raise TypeError(f"{wanted} {kind(values)}{how_to_plain(values)}")
    if not isinstance(values, Iterable):
        raise TypeError(f"{wanted} {values!r}")
    try:
        tensor = torch.as_tensor(values if hasattr(values, "__array__") else list(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{wanted} {values!r}") from error
    if tensor.dim() != 1 or tensor.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{wanted} {tensor.dtype} {list(tensor.shape)}")
    if not isinstance(values, Tensor) and not tracing() and tensor.is_inference():
        with torch.inference_mode(False):  # a fresh copy, whose version can be tracked
            return tensor.to(torch.int64, copy=True)
    return tensor.to(torch.int64)


def check_offset(owner: str, offset: Offset) -> int | Tensor | None:
    """A validated offset: an int, a tensor with one per batch index, or None."""
    if offset is None:
        return None
    whole = as_whole(offset)
    return check_per_batch(owner, "offset", offset) if whole is None else whole


def known_true(answer: Tensor) -> bool:
    """Whether a condition on data is known to hold. In a graph it cannot be evaluated, and is checked when that runs;
    in torch.func.vmap, which has several calls in one, it is not checked."""
    return has_numbers(answer) and bool(answer)


def check_broadcast(what: str, data: Tensor, axes: int, grid: Grid, by_key: str, by_axes: str) -> None:
    """Raises unless data, expanded to four axes from the left, fits the scores in exactly one way.

    Args:
        data: [batch or 1, heads or 1, query_len or 1, key_len or 1].
        axes: the number of axes with which it was given.
        by_key, by_axes: for the hint: how to pass [batch, key_len], and four axes (``{}`` stands for an index).
    Raises:
        ShapeError: it does not broadcast, or it could also be per batch index.
    """
    fits = all(size in (1, wanted) for size, wanted in zip(data.shape, grid[:4], strict=True))
    given = list(data.shape[4 - axes :])
    per_batch = axes in (2, 3) and given[0] == grid.batch > 1 and given[-1] == grid.key_len
    if axes == 3:
        per_batch = per_batch and given[1] in (1, grid.query_len)
    if fits and not per_batch:
        return
    counted = "[query_len, key_len]" if axes == 2 else "[heads, query_len, key_len]"
    meant = "[batch, key_len]" if axes == 2 else "[batch, query_len, key_len]"
    by_count = by_axes.format("[None, None]" if axes == 2 else "[None]")
    by_batch = by_key if axes == 2 else by_axes.format("[:, None]")
    if fits:
        raise ShapeError(
            f"{what} {given} may be {counted} or {meant}: both fit the scores {grid}; "
            f"say which, {by_count} or {by_batch}"
        )
    hint = f"; if it is {meant}: {by_batch}" if per_batch else ""
    raise ShapeError(f"{what} {given} does not broadcast to the scores {grid}{hint}")


def _axes_hint(count: int, axes: tuple[str, ...]) -> str | None:
    if count == 3 and axes[1] in ("heads", "kv_heads"):
        return (
            "[batch, length, dim]: split the heads first, x.unflatten(-1, (heads, head_dim)).transpose(1, 2); "
            "[heads, length, head_dim]: a batch of one still has a batch axis, x.unsqueeze(0)"
        )
    if count == len(axes) - 1 and axes[0] == "batch":
        return "a batch of one still has a batch axis: x.unsqueeze(0)"
    return None


def as_bytes(count: float) -> str:
    """A number of bytes in readable form: "21.1 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}"


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """The memory of some tensors in bytes, shared memory counted once."""
    found = {(t.device, t.untyped_storage()._cdata): t for t in tensors if t is not None and t.numel()}
    return sum(t.untyped_storage().nbytes() for t in found.values())


def plural(count: int, what: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{count:,} {what}{'s' * (count != 1)}"

"""Lazy tensors [batch, heads, query_len, key_len], computed one rectangle at a time.

    LazyParts      such a tensor: weights, or their gradient; or some batch indices and heads of one
    Parts          computes its rectangles
    LazyGradient   the gradient of such a tensor: the sum of the gradients from each use

Indexing by batch and head (``w[0]``, ``w[0][3]``) computes nothing. Indexing by query or key computes the selected
numbers, as does every function of torch. If gradients are recorded, each of these steps is a node of torch's graph
whose backward pass propagates a rectangle, never a quadratic tensor: so ``retain_grad``, ``register_hook`` and
`torch.autograd.grad` work as with any other tensor.
"""

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.huggingface.lazy import Lazy, _getter, _setter
from regard.indexing import overlap


class Place(NamedTuple):
    """A rectangle of queries and keys, of some batch indices and heads."""

    batch: range
    heads: range
    queries: range
    keys: range

    def sizes(self) -> tuple[int, int, int, int]:
        return len(self.batch), len(self.heads), len(self.queries), len(self.keys)

    def cells(self) -> int:
        return len(self.batch) * len(self.heads) * len(self.queries) * len(self.keys)

    def within(self, outer: "Place") -> tuple[slice, ...]:
        """Where it lies in a tensor that holds `outer`."""
        return tuple([slice(a.start - b.start, a.stop - b.start) for a, b in zip(self, outer, strict=True)])


class Frame(NamedTuple):
    """Shape, dtype and device of a lazy tensor.

    Args:
        batch, heads: which batch indices and heads of a call; a single one has no axis.
        lengths: query_len and key_len.
    """

    batch: range | int
    heads: range | int
    lengths: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]:
        return *(len(axis) for axis in (self.batch, self.heads) if isinstance(axis, range)), *self.lengths

    def whole(self) -> Place:
        """All of it."""
        batch, heads = (range(axis, axis + 1) if isinstance(axis, int) else axis for axis in (self.batch, self.heads))
        return Place(batch, heads, range(self.lengths[0]), range(self.lengths[1]))


class Parts(Protocol):
    """Computes any rectangle of a tensor [batch, heads, query_len, key_len]."""

    def rectangle(self, place: Place) -> Tensor:
        """The numbers, without a graph, in new memory: [batch, heads, queries, keys]."""
        ...


class LazyParts(Lazy):
    """A tensor of which rectangles are computed on first use; or some batch indices and heads of such a tensor.

    Attributes:
        parts: computes the rectangles.
        frame: shape, dtype and device, and which batch indices and heads it represents.
        aside: why the model's output does not depend on these numbers, so that they get no gradient; None if it does.
    """

    parts: Parts
    frame: Frame
    aside: str | None
    _pointed: Tensor | None
    _whole: Place

    @classmethod
    def of(cls, parts: Parts, frame: Frame, aside: str | None = None) -> Any:
        """A tensor without a graph."""
        made = cls._empty(cls, frame.shape, frame.dtype, frame.device)
        made.parts, made.frame, made.aside, made._pointed = parts, frame, aside, None
        made._whole = frame.whole()
        return made

    def dense(self) -> Tensor:
        self._check_size()
        chosen = (0 if isinstance(axis, int) else slice(None) for axis in (self.frame.batch, self.frame.heads))
        return self._numbers(self._whole)[tuple(chosen)]

    def _numbers(self, place: Place) -> Tensor:
        if self._wants_grad():
            numbers: Tensor = _Numbers.apply(self, place)  # type: ignore[no-untyped-call]
            return numbers
        return self.parts.rectangle(place).to(self.frame.device, self.frame.dtype)

    def _wants_grad(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.is_grad_enabled() and self.requires_grad

    def _like(self, frame: Frame | None = None) -> Any:
        """The same in another frame, by default its own, without a graph."""
        return type(self).of(self.parts, frame or self.frame, self.aside)

    def _view(self, frame: Frame | None = None) -> Any:
        """The same in another frame, by default its own."""
        if self._wants_grad():
            return _View.apply(self, frame or self.frame)  # type: ignore[no-untyped-call]
        return self._like(frame)

    # --- indexing ---

    def __getitem__(self, index: Any) -> Tensor:
        frame, whole = self.frame, self._whole
        axes = [axis for axis in range(4) if axis > 1 or isinstance(frame[axis], range)]
        asked = [x if type(x) is int else _plain(x) for x in (index if isinstance(index, tuple) else (index,))]
        if None in asked or asked.count(...) > 1:
            return self.dense()[index]
        if len(asked) - (... in asked) > len(axes):
            raise IndexError(f"regard: {type(self).__name__} has the axes {list(frame.shape)}, got {index!r}")
        at = asked.index(...) if ... in asked else len(asked)
        asked[at : at + 1] = [_ALL] * (len(axes) - len(asked) + (... in asked))
        place = list(whole)
        rests: list[Any] = [0, 0, _ALL, _ALL]
        for axis, x in zip(axes, asked, strict=True):
            if x is not _ALL:
                place[axis], rests[axis] = _find(x, whole[axis])
            else:
                rests[axis] = _ALL
        if rests[2] == rests[3] == _ALL and place[2:] == list(whole[2:]) and all(x in (0, _ALL) for x in rests[:2]):
            batch, heads = (of.start if rest == 0 else of for of, rest in zip(place[:2], rests[:2], strict=True))
            view: Tensor = self._view(frame._replace(batch=batch, heads=heads))
            return view
        numbers: Tensor = self._numbers(Place(*place))[tuple(rests)]
        return numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.dense().__array__(dtype)  # no copy of a copy

    def __iter__(self) -> Any:
        return iter([self[n] for n in range(len(self))])

    # --- what torch asks ---

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], LazyParts) else None
        if func in _GRADIENTS:
            asked = [given] if given is not None else []
            if func is torch.autograd.grad:
                wanted = kwargs["inputs"] if "inputs" in kwargs else args[1]
                asked = list(wanted) if isinstance(wanted, Sequence) else [wanted]
            for lazy in asked:
                if isinstance(lazy, LazyParts) and func is not Tensor.backward:
                    lazy._check_on_the_way()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if given is None:
            return super().__torch_function__(func, types, args, kwargs)
        if func in _COPIES:
            return given._view()
        if func in _DETACHED or (func is Tensor.__deepcopy__ and not given.requires_grad):
            return given._like()
        if func in _MOVES:
            moved = given._moved(func, args[1:], dict(kwargs))
            if moved is not None:
                return moved
        if func in _POINTERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(given._kept_for_pointers(), *args[1:], **kwargs)
        if func in _NEW:
            return func(torch.empty(0, dtype=given.dtype, device=given.device), *args[1:], **kwargs)
        if func is Tensor.__iter__ or (func in _UNBINDS and (args[1:] or tuple(kwargs.values())) in ((), (0,))):
            return tuple(given) if func is not Tensor.__iter__ else iter(given)
        if func in _SQUEEZES and (squeezed := given._squeezed(args[1:], kwargs)) is not None:
            return squeezed
        if func in (Tensor.requires_grad_, _setter("requires_grad")):
            wanted = bool(kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
            if wanted and not given.requires_grad:
                raise ValueError(
                    "regard: these weights were made without a graph and hold no numbers to be a leaf of one; take "
                    ".dense().requires_grad_(), or run the model with gradients enabled"
                )
            with torch._C.DisableTorchFunctionSubclass():  # raises if a graph would be cut
                return func(given, wanted) if wanted != given.requires_grad else given
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = args[0] if args and isinstance(args[0], LazyParts) else None
        if given is not None and func in _SAME:
            return given._like()
        if func is torch.ops.aten.add.Tensor and not kwargs:  # gradients from several uses, which torch adds up
            one, other = args
            if isinstance(one, LazyGradient) or isinstance(other, LazyGradient):
                return LazyGradient.added(one, other)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _check_on_the_way(self) -> None:
        if self.requires_grad and self.aside is not None:
            raise ValueError(
                f"regard: these weights are not on the way to the model's output ({self.aside}), so its gradient with "
                "respect to them would be missing or None; run the model without that, or load it with "
                'attn_implementation="eager"'
            )

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The tensor with another dtype or device; None if that cannot be lazy."""
        device: Any = None
        dtype: Any = None
        copied = kwargs.pop("copy", False) if func is Tensor.to else False
        if func in _DTYPES:
            dtype = _DTYPES[func]
        elif func in _DEVICES:
            if args or kwargs:
                return None
            device = torch.device(_DEVICES[func])
        elif func is Tensor.type and (not args or not isinstance(args[0], torch.dtype)):
            return None
        else:
            parsed: Sequence[Any] = torch._C._nn._parse_to(*args, **kwargs)
            if parsed[3] is not None:  # a layout in memory
                return None
            device, dtype = parsed[:2]
        if dtype is not None and not dtype.is_floating_point:
            return None
        if device is not None and device.index is None and device.type == "cuda":
            device = self.device if self.device.type == "cuda" else torch.empty(0, device=device).device
        if dtype in (None, self.dtype) and device in (None, self.device) and not copied:
            return self
        return self._view(self.frame._replace(dtype=dtype or self.dtype, device=device or self.device))

    def _kept_for_pointers(self) -> Tensor:
        """All numbers, in memory that lives as long as this tensor, for functions that return pointers."""
        if self._pointed is None:
            self._pointed = self.dense().detach()
        return self._pointed

    def _squeezed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Without a batch or head axis of size 1; None if another axis is meant."""
        asked = args or tuple(kwargs.values())
        if not asked and 1 not in self.shape[-2:]:
            return self[tuple(0 if size == 1 else slice(None) for size in self.shape)]
        if len(asked) != 1 or type(asked[0]) is not int or not -self.dim() <= asked[0] < self.dim():
            return None
        axis = asked[0] % self.dim()
        if axis >= self.dim() - 2:
            return None
        return self[(slice(None),) * axis + (0,)] if self.shape[axis] == 1 else self._view()


def _plain(x: Any) -> int | slice | EllipsisType | None:
    """An index of one axis if it is a number, a slice or an ellipsis; else None."""
    if type(x) in (int, slice, EllipsisType):
        return x  # type: ignore[no-any-return]
    if isinstance(x, bool) or (isinstance(x, Tensor) and (x.dim() or x.is_floating_point() or x.dtype == torch.bool)):
        return None
    try:
        return operator.index(x)
    except TypeError:
        return None


def _find(asked: Any, axis: range) -> tuple[range, Any]:
    """The shortest contiguous range of an axis that contains an index, and the index within it."""
    if isinstance(asked, int):
        if not -len(axis) <= asked < len(axis):
            raise IndexError(f"index {asked} is out of bounds for an axis of size {len(axis)}")
        found = axis[asked]
        return range(found, found + 1), 0
    side = axis[asked]
    if side.step < 0:
        raise ValueError("step must be greater than zero")
    return range(side.start, max(side.start, side.stop)), _ALL if side.step == 1 else slice(None, None, side.step)


_ALL = slice(None)
_GRADIENTS = {
    Tensor.retain_grad, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.backward,
    torch.autograd.grad, torch.autograd.backward, _setter("grad"),
}  # fmt: skip
_COPIES = {Tensor.contiguous, Tensor.clone, torch.clone}
_DETACHED = {Tensor.detach, torch.detach, _getter("data")}
_DTYPES = {
    Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip
_DEVICES = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}
_MOVES = {Tensor.to, Tensor.type, Tensor.type_as, *_DTYPES, *_DEVICES}
_POINTERS = {
    Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor._typed_storage,
    _getter("__cuda_array_interface__"),
}  # fmt: skip
_NEW = {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor}
_UNBINDS = {Tensor.unbind, torch.unbind}
_SQUEEZES = {Tensor.squeeze, torch.squeeze}
_SAME = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default}


# --- gradients --------------------------------------------------------------------------------------------------------


class OfPlace:
    """A gradient that came from the use of one rectangle."""

    def __init__(self, place: Place, numbers: Tensor) -> None:
        self.place, self.numbers = place, numbers

    def rectangle(self, place: Place) -> Tensor:
        made = self.numbers.new_zeros(place.sizes())
        both = Place(*(overlap(one, other) for one, other in zip(place, self.place, strict=True)))
        if both.cells():
            made[both.within(place)] = self.numbers[both.within(self.place)]
        return made


class Sum:
    """A gradient that came from several uses."""

    def __init__(self, *terms: Parts) -> None:
        self.terms: list[Parts] = [
            part for term in terms for part in (term.terms if isinstance(term, Sum) else (term,))
        ]

    def rectangle(self, place: Place) -> Tensor:
        first, *others = self.terms
        total = first.rectangle(place)
        for term in others:
            total = total + term.rectangle(place)
        return total


class LazyGradient(LazyParts):
    """The gradient of `LazyWeights`: the sum over all their uses, computed on first use."""

    @classmethod
    def of_use(cls, frame: Frame, gradient: Tensor, place: Place | None = None) -> "LazyGradient":
        """The gradient of a tensor of which a rectangle was used; None: all of it."""
        if isinstance(gradient, LazyGradient):
            parts = gradient.parts
        else:
            place = place or frame.whole()
            parts = OfPlace(place, gradient.reshape(place.sizes()))
        made: LazyGradient = cls.of(parts, frame)
        return made

    @classmethod
    def added(cls, one: Tensor, other: Tensor) -> "LazyGradient":
        frame = next(gradient.frame for gradient in (one, other) if isinstance(gradient, LazyGradient))
        made: LazyGradient = cls.of(Sum(cls.of_use(frame, one).parts, cls.of_use(frame, other).parts), frame)
        return made

    def _advice(self) -> str:
        return "read a part, gradient[0, 3, -64:, -64:]"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyGradient({list(self.shape)}, {self.dtype})"


class _Numbers(torch.autograd.Function):
    """A rectangle of a lazy tensor as numbers."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyParts, place: Place) -> Tensor:
        ctx.frame, ctx.place = lazy.frame, place
        return lazy.parts.rectangle(place).to(lazy.device, lazy.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _handed_on(ctx.frame, gradient, ctx.place), None


class _View(torch.autograd.Function):
    """A lazy tensor in another frame: some batch indices and heads, another dtype or device."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyParts, frame: Frame) -> LazyParts:
        ctx.frame, ctx.place = lazy.frame, frame.whole()
        view: LazyParts = lazy._like(frame)
        return view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _handed_on(ctx.frame, gradient, ctx.place), None


def _handed_on(frame: Frame, gradient: Tensor, place: Place) -> Tensor:
    """The gradient of a lazy tensor of which one rectangle was used."""
    if not torch.is_grad_enabled():
        return LazyGradient.of_use(frame, gradient, place)
    # double backward needs all of its numbers
    whole = frame.whole()
    LazyGradient.of_use(frame, gradient, place)._check_size()
    ends = [(a.start - b.start, b.stop - a.stop) for a, b in zip(place, whole, strict=True)]
    spread = F.pad(gradient.reshape(place.sizes()), [end for pair in reversed(ends) for end in pair])
    return spread.reshape(frame.shape).to(frame.device, frame.dtype)

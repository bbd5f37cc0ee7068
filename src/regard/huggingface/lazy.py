"""Tensors without data: they have a shape, and compute their numbers on first use."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.observation import MAX_NUMBERS_AT_ONCE


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


# attributes that need no numbers
_OUTSIDE = {
    Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
    Tensor.__len__, Tensor.__hash__, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed,
    Tensor.is_contiguous, Tensor.is_inference, Tensor.storage_offset, _setter("requires_grad"),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
# operations that are only meaningful for a mask of bools
_LOGICAL = {
    Tensor.contiguous, Tensor.clone, Tensor.__and__, Tensor.__rand__, Tensor.__or__, Tensor.__invert__,
    Tensor.logical_and, Tensor.logical_or, Tensor.logical_not, torch.logical_and, torch.logical_or, torch.logical_not,
    torch.cat, Tensor.__deepcopy__, Tensor.__reduce_ex__,
}  # fmt: skip
_INSIDE_PROPERTIES = {_getter(name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")}
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
_IN_PLACE_OPERATORS |= {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"}


class Lazy(Tensor):
    """A tensor without data. Its shape is known; any other use computes its numbers, if they are few.

    Every function of torch accepts it. Shape, dtype and device cost nothing; anything else uses `dense`, which raises
    an error if that would be large. It cannot be written to.
    """

    __format__ = object.__format__  # as repr() prints it

    @staticmethod
    def _empty(cls: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(made)  # otherwise C++ code gets a null pointer
        return made

    def dense(self) -> Tensor:
        """All the numbers, as an ordinary tensor.

        Raises:
            ValueError: they are too many.
        """
        raise NotImplementedError

    def _advice(self) -> str:
        raise NotImplementedError

    def _check_size(self) -> None:
        if self.numel() > MAX_NUMBERS_AT_ONCE:
            raise ValueError(
                f"regard: {type(self).__name__} {list(self.shape)} stands for {self.numel():,} numbers, which are not "
                f"made: more than {MAX_NUMBERS_AT_ONCE:,}; {self._advice()}"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OUTSIDE or (name == "__get__" and func not in _INSIDE_PROPERTIES):
                return func(*args, **kwargs)
            if func in (Tensor.contiguous, Tensor.clone):
                return args[0]
            written = (writes(func) or name == "__set__") and isinstance(args[0], Lazy)
            if written or isinstance(kwargs.get("out"), Lazy):
                raise _would_write(getattr(func, "__self__", func) if name == "__set__" else func)
            args, kwargs = tree_map_only(Lazy, lambda lazy: lazy.dense(), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and (isinstance(args[0], Lazy) or isinstance(kwargs.get("out"), Lazy)):
            raise _would_write(func)
        args, kwargs = tree_map_only(Lazy, lambda lazy: lazy.dense().detach(), (args, kwargs))
        return func(*args, **kwargs)


def writes(func: Any) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _would_write(func: Any) -> ValueError:
    name = getattr(func, "__name__", func)
    return ValueError(f"regard: {name} would write into a tensor that holds no numbers; write into .dense()")

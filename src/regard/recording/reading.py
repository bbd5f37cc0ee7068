"""Which tokens a call of an attention layer stands for: those that the modules around it were given."""

import inspect
import sys
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("tokens", "input_ids")
"""What the argument is called that holds them."""

_CALL = nn.Module._call_impl.__code__


class Reading:
    """Finds the tokens of a call, and keeps a copy of them, one for all layers that read the same.

    They are found on the stack: what the nearest module around the layer is given as `tokens` or `input_ids`, and of
    the model itself the first argument that holds whole numbers. So nothing is put on the modules.
    """

    def __init__(self, model: nn.Module, modules: Container[int]) -> None:
        self._model, self._modules = model, modules
        self._kept: tuple[Tensor, int | None, Tensor] | None = None

    def tokens(self, batch: int, query_len: int) -> Tensor | None:
        """The tokens of the caller's call, int [batch, query_len], where they are known."""
        found = self._given()
        if found is None or found.shape != (batch, query_len):
            return None
        version = None if found.is_inference() else found._version
        if self._kept is not None:
            source, then, copy = self._kept
            unchanged = version == then if version is not None else torch.equal(found, copy)
            if source is found and unchanged:
                return copy
        copy = found.detach().clone()
        self._kept = found, version, copy
        return copy

    def _given(self) -> Tensor | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code is _CALL or _is_given_tokens(code):
                given = frame.f_locals
                module = given.get("self")
                if id(module) in self._modules and isinstance(module, nn.Module):
                    found = self._of_call(module, given) if code is _CALL else _first(given.get(n) for n in NAMES)
                    if found is not None:
                        return found
                    if code is _CALL and (module is self._model or _reads_no_tokens(module)):
                        return None
            frame = frame.f_back
        return None

    def _of_call(self, module: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
        args, named = given["args"], given["kwargs"]
        places = _places(type(module).forward)
        found = [named.get(name, args[at] if at < len(args) else None) for name, at in places.items()]
        return _first([*found, *args] if module is self._model else found)


def _first(values: Any) -> Tensor | None:
    return next((t for t in values if isinstance(t, Tensor) and t.dim() == 2 and not _cannot_be_ids(t)), None)


def _cannot_be_ids(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool


def _is_given_tokens(code: CodeType) -> bool:
    """Whether it is the code of a method that has an argument for them."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return arguments[:1] == ("self",) and any(name in arguments for name in NAMES)


@lru_cache(1024)
def _places(forward: Callable[..., Any]) -> dict[str, int]:
    """Where among its arguments a module is given tokens."""
    try:
        arguments = list(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):  # it does not tell
        return {}
    return {name: at for at, name in enumerate(arguments) if name in NAMES}


def _reads_no_tokens(module: nn.Module) -> bool:
    """Whether a part of a model says that it reads something else: an image's pixels, a sound's features."""
    main = getattr(module, "main_input_name", None)
    return isinstance(main, str) and main not in NAMES

"""Finds out what the input of an attention layer is.

The tokens of its queries, whether its keys come from another sequence, and whether they are patches of an image.
"""

import inspect
import sys
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.layers import MultiHeadAttention
from regard.shapes import INTEGER_DTYPES

TOKEN_NAMES = ("tokens", "input_ids")
"""Names of the argument that holds the tokens."""

CONTEXT_NAMES = ("key", "key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Names of the argument of an attention layer that holds the states of another sequence."""

MAX_SPECIAL_TOKENS = 64
"""Most tokens of an image before its patches: CLS, registers."""

_CALL = nn.Module._call_impl.__code__


class Read(NamedTuple):
    """The input of a call.

    Attributes:
        tokens: int [batch, query_len], the tokens of the queries, if known.
        cross: whether the keys come from another sequence. patches: rows and columns of an image, or None.
    """

    tokens: Tensor | None = None
    cross: bool = False
    patches: tuple[int, int] | None = None


class Reading:
    """Finds the input of a call, and keeps one copy of the tokens for all layers that read the same.

    It is found on the call stack, from the arguments of the modules around the layer: tokens are the argument `tokens`
    or `input_ids` of the nearest module, or the first integer tensor among the arguments of the model itself. So the
    modules need no hooks.
    """

    def __init__(self, model: nn.Module, modules: Container[int]) -> None:
        self._model, self._modules = model, modules
        self._kept: tuple[Tensor, int | None, Tensor] | None = None

    def of_call(self, layer: nn.Module, batch: int, query_len: int, key_len: int) -> Read:
        """The input of the call that the caller makes for a layer."""
        tokens, cross, pixels, config = None, False, None, None
        searching = True  # for tokens
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _CALL or _is_given_tokens(code):
                given = frame.f_locals
                module = given.get("self")
                if id(module) in self._modules and isinstance(module, nn.Module):
                    if code is _CALL:
                        cross = cross or (module is layer and _has_other_keys(module, given))
                        pixels = _pixels(given) if pixels is None else pixels
                        config = _patched(module) if config is None else config
                    if searching:
                        of_call = code is _CALL
                        tokens = self._of_call(module, given) if of_call else _first(given.get(n) for n in TOKEN_NAMES)
                        searching = tokens is None and not (of_call and _reads_no_tokens(module))
                    if code is _CALL and module is self._model:
                        break
            frame = frame.f_back
        if tokens is not None and tokens.shape != (batch, query_len):
            tokens = None
        patches = None
        if tokens is None and not cross and pixels is not None and query_len == key_len:
            patches = _grid(pixels, config, query_len)
        return Read(None if tokens is None else self._copy(tokens), cross, patches)

    def _copy(self, tokens: Tensor) -> Tensor:
        version = None if tokens.is_inference() else tokens._version
        if self._kept is not None:
            source, then, copy = self._kept
            unchanged = version == then if version is not None else torch.equal(tokens, copy)
            if source is tokens and unchanged:
                return copy
        copy = tokens.detach().clone()
        self._kept = tokens, version, copy
        return copy

    def _of_call(self, module: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
        args, named = given["args"], given["kwargs"]
        places = _places(type(module).forward)
        found = [
            named.get(name, args[at] if at < len(args) else None) for name, at in places.items() if name in TOKEN_NAMES
        ]
        return _first([*found, *args] if module is self._model else found)


def _first(values: Any) -> Tensor | None:
    return next((t for t in values if isinstance(t, Tensor) and t.dim() == 2 and t.dtype in INTEGER_DTYPES), None)


def _is_given_tokens(code: CodeType) -> bool:
    """Whether this is the code of a method with an argument for tokens."""
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return arguments[:1] == ("self",) and any(name in arguments for name in TOKEN_NAMES)


@lru_cache(1024)
def _places(forward: Callable[..., Any]) -> dict[str, int]:
    """Positions of the arguments that hold tokens or the states of another sequence."""
    try:
        arguments = list(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):  # no signature available
        return {}
    return {name: at for at, name in enumerate(arguments) if name in TOKEN_NAMES + CONTEXT_NAMES}


def _reads_no_tokens(module: nn.Module) -> bool:
    """Whether a submodule declares another input: pixels of an image, features of a sound."""
    main = getattr(module, "main_input_name", None)
    return isinstance(main, str) and main not in TOKEN_NAMES


def _has_other_keys(layer: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether an attention layer got the states of another sequence besides its own."""
    args, named = given["args"], given["kwargs"]
    for name, at in _places(type(layer).forward).items():
        if name in CONTEXT_NAMES and (name != "key" or isinstance(layer, MultiHeadAttention)):
            other = named.get(name, args[at] if at < len(args) else None)
            if isinstance(other, Tensor) and other is not (args[0] if args else None):
                return True
    return getattr(layer, "is_cross_attention", False) is True


def _pixels(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of the images among a module's arguments, if there are any."""
    named = given["kwargs"].get("pixel_values")
    for value in (named, *given["args"]):
        if not isinstance(value, Tensor) or value.dim() != 4 or not value.is_floating_point():
            continue
        if value is named or value.shape[1] == 3:  # colours
            return value.shape[2], value.shape[3]
    return None


def _patched(module: nn.Module) -> Any:
    """A module's configuration, if it has a patch size."""
    config = getattr(module, "config", None)
    return config if getattr(config, "patch_size", None) is not None else None


def _grid(pixels: tuple[int, int], config: Any, length: int) -> tuple[int, int] | None:
    """Rows and columns of the patches, if their number and a few special tokens add up to the length."""
    size = getattr(config, "patch_size", None)
    if config is None or size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else (size[-2], size[-1]) if len(size) > 1 else (size[0],) * 2
    rows, columns = pixels[0] // height, pixels[1] // width
    if rows * columns and 0 <= length - rows * columns <= MAX_SPECIAL_TOKENS:
        return rows, columns
    window = getattr(config, "window_size", None)
    if isinstance(window, int) and window * window == length:  # attention within square windows (Swin)
        return window, window
    return None

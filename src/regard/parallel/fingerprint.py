"""Masks, biases and other arguments as a short fingerprint, by which ranks find out whether they mean the same."""

import ctypes
import dis
import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from regard.kernels.known import cached_by_mask
from regard.masks import Mask
from regard.rules import Rule

MAX_READ_NUMBERS = 1 << 20
"""Of a floating tensor with more numbers, so many are read, evenly chosen: a bias can be as large as the scores."""


def fingerprint(*values: Any) -> bytes:
    """16 bytes that are equal for equal values: numbers, texts, tensors, masks, biases, modules, and lists of them.

    Functions, and the rules of masks and biases, are compared by their code, the values that they close over, and the
    numbers, texts, tensors and functions that they name; objects of other kinds by their type and attributes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        _feed(digest.update, value)
    return digest.digest()


def of_mask(mask: Mask | None) -> bytes:
    """The fingerprint of a mask; remembered, where it can be told from others."""
    return fingerprint(mask) if mask is None else _remembered(mask)


_remembered = cached_by_mask(maxsize=8)(fingerprint)


def _feed(feed: Callable[[bytes], object], value: Any, inside: frozenset[int] = frozenset()) -> None:
    """Tells the digest of a value.

    Args:
        inside: functions and objects whose parts are being told, by id; they may refer to themselves.
    """
    feed(f"<{type(value).__name__}>".encode())
    if id(value) in inside:
        return

    def parts(*found: Any) -> None:
        for part in found:
            _feed(feed, part, inside | {id(value)})

    if isinstance(value, Tensor):
        feed(f"{value.dtype}{list(value.shape)}".encode())
        feed(_bytes_of(value))
    elif isinstance(value, Rule):
        parts(value.arguments(), type(value).rule)
    elif isinstance(value, nn.Module):
        parts(value.state_dict())
    elif isinstance(value, dict):
        for name, part in value.items():
            feed(str(name).encode())
            parts(part)
    elif isinstance(value, (list, tuple)):
        parts(*value)
    elif isinstance(value, CodeType):
        feed(value.co_code)
        parts(value.co_names, value.co_consts)
    elif isinstance(value, partial):
        parts(value.func, value.args, value.keywords)
    elif callable(value) and hasattr(value, "__code__"):
        named = [value.__globals__.get(name) for name in _names(value.__code__)]
        data = [part for part in named if isinstance(part, _DATA) or hasattr(part, "__code__")]
        parts(value.__code__, value.__defaults__, [cell.cell_contents for cell in value.__closure__ or ()], data)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, range, torch.dtype)):
        feed(repr(value).encode())
    elif isinstance(value, (type, ModuleType)):
        feed(value.__name__.encode())
    elif hasattr(value, "__dict__"):
        parts(vars(value))


_DATA = (bool, int, float, str, bytes, range, torch.dtype, Tensor, Rule, list, tuple, dict)
"""What counts of the global names of a function; of other objects, one attribute may be meant, and others differ."""


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function and those defined in it refer to, in the order of their use."""
    own = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return tuple(dict.fromkeys([*own, *inner]))


def _bytes_of(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.numel() > MAX_READ_NUMBERS:
        tensor = tensor.flatten()[:: tensor.numel() // MAX_READ_NUMBERS]
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""

"""Masks, biases and other arguments as a short fingerprint, by which ranks find out whether they mean the same."""

import ctypes
import hashlib
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.rules import Rule

MAX_READ_NUMBERS = 1 << 20
"""Of a floating tensor with more numbers, so many are read, evenly chosen: a bias can be as large as the scores."""


def fingerprint(*values: Any) -> bytes:
    """16 bytes that are equal for equal values: numbers, texts, tensors, masks, biases, modules, and lists of them.

    Functions are compared by their code and the values that they close over; objects of other kinds by their type and
    attributes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        _feed(digest.update, value)
    return digest.digest()


def of_mask(mask: Mask | None) -> bytes:
    """The fingerprint of a mask; remembered, where it can be told from others."""
    known = None if mask is None else MaskKey(mask)
    return fingerprint(mask) if known is None or known.structure is None else _remembered(known)


@lru_cache(maxsize=8)
def _remembered(known: MaskKey) -> bytes:
    return fingerprint(known.mask)


def _feed(feed: Callable[[bytes], object], value: Any) -> None:
    feed(f"<{type(value).__name__}>".encode())
    if isinstance(value, Tensor):
        feed(f"{value.dtype}{list(value.shape)}".encode())
        feed(_bytes_of(value))
    elif isinstance(value, Rule):
        _feed(feed, value.arguments())
    elif isinstance(value, nn.Module):
        _feed(feed, value.state_dict())
    elif isinstance(value, dict):
        for name, part in value.items():
            feed(str(name).encode())
            _feed(feed, part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _feed(feed, part)
    elif isinstance(value, CodeType):
        feed(value.co_code)
        _feed(feed, (value.co_names, value.co_consts))
    elif isinstance(value, partial):
        _feed(feed, (value.func, value.args, value.keywords))
    elif callable(value) and hasattr(value, "__code__"):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        _feed(feed, (value.__code__, value.__defaults__, [cell for cell in cells if cell is not value]))
    elif value is None or isinstance(value, (bool, int, float, str, bytes, range, torch.dtype)):
        feed(repr(value).encode())
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        _feed(feed, vars(value))


def _bytes_of(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.numel() > MAX_READ_NUMBERS:
        tensor = tensor.flatten()[:: tensor.numel() // MAX_READ_NUMBERS]
    tensor = tensor.cpu().contiguous()
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""

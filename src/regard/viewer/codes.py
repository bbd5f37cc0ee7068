"""Weights as 16-bit codes: what a tile is made of on its way to the page.

    code = 0                                        hidden: the mask allows no key there
    code = 65535 + 2048 log2(weight), 1 to 65535    everything else, rounded

Steps of 2^(1/2048) keep every weight to 1.7e-4 of itself, from 1 down to 2^-32; what is smaller gets code 1. (float16
would turn all below 3e-8 into 0, which at 131,072 tokens is an ordinary weight.)
"""

import ctypes
import math

import torch
from torch import Tensor

ONE = 65535
"""The code of a weight of 1."""

PER_OCTAVE = 2048
"""Codes between a weight and its half."""

NUMBERS_AT_ONCE = 1 << 15
"""Numbers that are encoded together: so few stay in the cache, and torch does not wake its other threads for them,
which takes longer than the numbers do where something else runs, as a browser does."""


def encode(log2: Tensor) -> Tensor:
    """Codes of weights, from their binary logarithms; -inf, and what is no number, is hidden.

    >>> encode(torch.tensor([0.0, -1.0, -40.0, -torch.inf])).tolist()
    [65535, 63487, 1, 0]
    """
    log2 = log2.contiguous()
    codes = torch.empty(log2.shape, dtype=torch.uint16, device=log2.device)
    for part, into in zip(log2.view(-1).split(NUMBERS_AT_ONCE), codes.view(-1).split(NUMBERS_AT_ONCE), strict=True):
        whole = (part * PER_OCTAVE + ONE).round_().clamp_(1, ONE)
        into.copy_(whole.masked_fill_(~(part > -math.inf), 0).to(torch.int32))
    return codes


def decode(codes: Tensor) -> Tensor:
    """Weights of codes, in float64; 0 where hidden.

    >>> decode(encode(torch.tensor([0.0, -3.0]))).tolist()
    [1.0, 0.125]
    """
    numbers = codes.to(torch.int32)
    return torch.where(numbers == 0, 0.0, ((numbers.double() - ONE) / PER_OCTAVE).exp2())


def raw(tensor: Tensor) -> bytes:
    """A tensor's numbers as bytes, in order, little-endian as every machine that torch runs on."""
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""

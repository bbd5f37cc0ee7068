"""Weights too faint to matter, which some processors take long to multiply.

A float32 number below 2^-126 is stored with fewer digits ("denormal"). Far keys get such weights from ALiBi: exp(-88)
and less. Intel processors multiply them in microcode: with one weight in fifteen denormal, the product of weights and
values took 18 times as long, and with one in thirty the gradients of a call 4.5 times. Others hardly notice, so it is
measured. torch.set_flush_denormal helps only in the thread that calls it, and there changes all that it computes.
"""

import math
from functools import cache

import torch
from torch import Tensor

from regard import measured

LEAST_EXPONENT = -100.0
"""Power of two up to which weights are taken as 0: products of greater ones with numbers above 2^-26 are not denormal,
nor are sums that begin with them. An output or gradient changes by 2^-100 of what the weight is multiplied by; float32
rounds to 2^-24. Row "bias, ALiBi" of features.py, which with 2^-126 takes a sixth longer."""

LEAST_NORMAL_SCORE, LEAST_SCORE = -126.0 * math.log(2.0), -150.0 * math.log(2.0)
"""How far below the greatest score of its row one has to lie for its weight to be denormal, and to be 0."""

FAR_SCORES = -LEAST_EXPONENT * math.log(2.0)
"""How far apart scores have to be for such weights."""

SLOW_RATIO = 32.0
"""How many times as long a product of denormal numbers has to take for their removal to pay: a call has few of them.
98 was found on an Intel Xeon with AMX. Row "bias, ALiBi"."""


def are_slow(numbers: Tensor) -> bool:
    """Whether it takes long to multiply denormal numbers of this dtype, where these are."""
    return numbers.dtype == torch.float32 and numbers.device.type == "cpu" and price() > SLOW_RATIO


def price() -> float:
    """How many times as long as others denormal float32 numbers take to be multiplied by this processor."""
    return _price()


def without_faint_exponents(exponents: Tensor) -> Tensor:
    """Exponents of two, those of weights too faint to matter replaced by -inf, in place, where they are slow."""
    return torch.threshold_(exponents, LEAST_EXPONENT, -math.inf) if are_slow(exponents) else exponents


def without_faint(weights: Tensor) -> Tensor:
    """Weights, those too faint to matter replaced by 0, in place, where they are slow."""
    return torch.threshold_(weights, 2.0**LEAST_EXPONENT, 0.0) if are_slow(weights) else weights


def spread(numbers: Tensor) -> bool:
    """Whether numbers that are added to scores lie so far apart that many weights are faint; -inf is none of them."""
    if not numbers.numel():
        return False
    high = numbers.amax()
    return bool(high - numbers.masked_fill(numbers == -math.inf, math.inf).amin() > FAR_SCORES)


def share(numbers: Tensor) -> float:
    """The share of scores whose weight is denormal, judged by the numbers that are added: [..., rows, columns]."""
    below = numbers - numbers.amax(-1, keepdim=True)
    return float(((below < LEAST_NORMAL_SCORE) & (below > LEAST_SCORE)).mean(dtype=torch.float32))


@cache
def _price() -> float:
    return measured.alone(_found_price)


def _found_price() -> float:
    draw = torch.Generator().manual_seed(0)
    weights, values = torch.rand(1, 32, 64, generator=draw), torch.randn(1, 64, 64, generator=draw)
    denormal = weights * 2.0**-130
    both = (lambda: torch.bmm(denormal, values)), (lambda: torch.bmm(weights, values))
    return measured.ratio("denormal / normal", *both)

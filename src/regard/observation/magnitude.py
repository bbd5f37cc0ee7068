"""How large the scores of a call can be: a product of query and key is at most as large as their lengths multiplied."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.graphs import concrete
from regard.scores import Scoring

MODERATE = 16.0
"""Largest score that needs no shift: an exponent is rounded by 2^-24 of its size, so that a power is off by a millionth
at most, and nothing is near the ends of float32."""

FINITE = 2.0**64
"""Larger products of lengths may become infinite scores."""


class Magnitude(NamedTuple):
    """What is known of all scores of a call.

    Attributes:
        is_finite: whether every score before the bias is finite, hidden ones too.
        is_moderate: whether powers of scores need no shift.
    """

    is_finite: bool
    is_moderate: bool


UNKNOWN = Magnitude(False, False)


def magnitude_of(query: Tensor, key: Tensor, scoring: Scoring) -> Magnitude:
    """Of a call whose scores come from products; unknown if finding out needs a device sync."""
    if not concrete(query.device):
        return UNKNOWN
    product = _longest(query) * _longest(key)
    sink = 0.0 if scoring.sink is None else scoring.sink.detach().abs().amax().item()
    is_moderate = scoring.bias is None and abs(scoring.scale) * product <= MODERATE and sink <= MODERATE
    return Magnitude(product < FINITE, is_moderate)  # both are false for NaN


def _longest(tensor: Tensor) -> float:
    """The length of the longest vector: [..., size]."""
    return torch.linalg.vector_norm(tensor.detach(), dim=-1).amax().item() if tensor.numel() else 0.0

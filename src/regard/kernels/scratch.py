"""Memory for scores that is used by one call after another.

Memory that a process releases is often given back to the system at once, and what the system hands out anew is zeroed
page by page: 0.5 ms for 2 MiB, as long as it takes to compute the 2^19 scores that they hold.
"""

import math
import threading

import torch
from torch import Tensor

MAX_NUMBERS = 1 << 20
"""Numbers that are kept for each thread of the caller: 4 MiB in float32."""


class _Kept(threading.local):
    numbers: Tensor | None = None


_kept = _Kept()


def scratch(like: Tensor, *shape: int) -> Tensor:
    """A tensor that holds anything, until the next call of this function by the same thread."""
    size = math.prod(shape)
    if size > MAX_NUMBERS or like.dtype != torch.float32 or like.device.type != "cpu":
        return like.new_empty(shape)
    numbers = _kept.numbers
    if numbers is None or len(numbers) < size:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            numbers = _kept.numbers = torch.empty(size, dtype=like.dtype, device=like.device)
    return numbers[:size].view(shape)

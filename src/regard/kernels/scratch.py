"""Memory for scores that is used by one call after another.

Memory that a process releases is often given back to the system at once, and what the system hands out anew is zeroed
page by page: 0.5 ms for 2 MiB, as long as it takes to compute the 2^19 scores that they hold.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_NUMBERS = 1 << 20
"""Numbers that are kept for each thread of the caller: 4 MiB in float32."""

LINE = 16
"""Numbers in a line of a cache, at which each of several tensors begins."""


class _Kept(threading.local):
    numbers: Tensor | None = None


_kept = _Kept()


def scratch(like: Tensor, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
    """Tensors that hold anything, until the next call of this function by the same thread.

    Args:
        like: what lies on the same device.
    """
    sizes = [-(-math.prod(shape) // LINE) * LINE for shape in shapes]
    size = sum(sizes)
    if size > MAX_NUMBERS or dtype != torch.float32 or like.device.type != "cpu":
        return [like.new_empty(shape, dtype=dtype) for shape in shapes]
    numbers = _kept.numbers
    if numbers is None or len(numbers) < size:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside that mode
            numbers = _kept.numbers = torch.empty(size, dtype=dtype, device=like.device)
    found, start = [], 0
    for shape, length in zip(shapes, sizes, strict=True):
        found.append(numbers.narrow(0, start, math.prod(shape)).view(shape))
        start += length
    return found

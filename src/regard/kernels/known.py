"""What was found out about a mask, cached by the mask's structure: once for all layers of a step that share it."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from regard.graphs import tracing
from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.shapes import Grid

P = ParamSpec("P")
T = TypeVar("T")
OfMask = Callable[Concatenate[Mask, P], T]


def cached_by_mask(maxsize: int) -> Callable[[OfMask[P, T]], OfMask[P, T]]:
    """Caches a function of a mask, and of further arguments that can be hashed, where the mask can be compared."""

    def decorate(function: OfMask[P, T]) -> OfMask[P, T]:
        @lru_cache(maxsize)
        def remembered(known: MaskKey, *more: P.args, **named: P.kwargs) -> T:
            with torch.inference_mode(False):  # autograd cannot save inference tensors
                return function(known.mask, *more, **named)

        @wraps(function)
        def found(mask: Mask, *more: P.args, **named: P.kwargs) -> T:
            if tracing() or torch._C._are_functorch_transforms_active():
                return function(mask, *more, **named)  # tensors made in a functorch transform must not be cached
            known = MaskKey(mask)
            return function(mask, *more, **named) if known.structure is None else remembered(known, *more, **named)

        return found

    return decorate


@cached_by_mask(maxsize=8)
def bind(mask: Mask, grid: Grid) -> Mask:
    """`Mask.bind`, cached."""
    return mask.bind(grid)

"""What was found out about a mask, cached by the mask's structure: once for all layers of a step that share it."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

from regard.graphs import tracing
from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.shapes import Grid

Function = TypeVar("Function", bound=Callable[..., Any])


def cached_by_mask(maxsize: int) -> Callable[[Function], Function]:
    """Caches a function of a mask, and of further arguments that can be hashed, where the mask can be compared."""

    def decorate(function: Function) -> Function:
        @lru_cache(maxsize)
        def remembered(known: MaskKey, *more: Any) -> Any:
            with torch.inference_mode(False):  # autograd cannot save inference tensors
                return function(known.mask, *more)

        @wraps(function)
        def found(mask: Mask, *more: Any) -> Any:
            if tracing() or torch._C._are_functorch_transforms_active():
                return function(mask, *more)  # tensors made in a functorch transform must not be cached
            known = MaskKey(mask)
            return function(mask, *more) if known.structure is None else remembered(known, *more)

        return cast(Function, found)

    return decorate


@cached_by_mask(maxsize=8)
def bind(mask: Mask, grid: Grid) -> Mask:
    """`Mask.bind`, cached."""
    return mask.bind(grid)

"""What was found out about a mask is remembered by what the mask is: a call like the one before is not asked again."""

from functools import lru_cache

import torch

from regard.graphs import tracing
from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.shapes import Grid


def bind(mask: Mask, grid: Grid) -> Mask:
    """`Mask.bind`; all layers of a step, whose mask is one, have it bound once."""
    if tracing() or torch._C._are_functorch_transforms_active():
        return mask.bind(grid)  # what is made in a transform must not be met outside it
    known = MaskKey(mask)
    return mask.bind(grid) if known.structure is None else _bound(known, grid)


@lru_cache(maxsize=8)
def _bound(known: MaskKey, grid: Grid) -> Mask:
    with torch.inference_mode(False):  # whose tensors training could not use
        return known.mask.bind(grid)

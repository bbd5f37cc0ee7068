"""A cache of bound masks, by mask structure: repeated calls skip the binding."""

from functools import lru_cache

import torch

from regard.graphs import tracing
from regard.masks import Mask
from regard.masks.planning import MaskKey
from regard.shapes import Grid


def bind(mask: Mask, grid: Grid) -> Mask:
    """`Mask.bind`, cached, so that all layers of a step that share a mask bind it once."""
    if tracing() or torch._C._are_functorch_transforms_active():
        return mask.bind(grid)  # tensors made in a functorch transform must not be cached
    known = MaskKey(mask)
    return mask.bind(grid) if known.structure is None else _bound(known, grid)


@lru_cache(maxsize=8)
def _bound(known: MaskKey, grid: Grid) -> Mask:
    with torch.inference_mode(False):  # autograd cannot save inference tensors
        return known.mask.bind(grid)

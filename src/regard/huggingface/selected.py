"""Keys that a model selects for each query itself, as the indexers of DeepSeek V3.2 and MiniMax M3 do."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.graphs import tracing
from regard.shapes import ShapeError


def selected_cells(
    module: nn.Module, query: Tensor, key: Tensor, keys: Any, blocks: Any, dtype: torch.dtype = torch.bool
) -> Tensor | None:
    """[batch, 1 or heads, query_len, key_len], True for the selected keys, or 0 for them and -inf for others in a
    floating dtype; None if none are named.

    Args:
        keys: int [batch, query_len, any number], which keys each query may see, in all heads; -1: no key.
        blocks: int [batch, kv_heads, query_len, any number], which blocks of as many keys as ``module.indexer``
            says in ``block_size``; -1: no block.
    """
    if keys is None and blocks is None:
        return None
    (batch, heads, query_len, _), key_len = query.shape, key.shape[2]
    if blocks is None:
        _check("indices", keys, (batch, query_len))
        return _marked(keys, key_len, dtype)[:, None]
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if keys is not None or not isinstance(size, int):
        raise ValueError(
            "regard: block_indices stand for blocks of as many keys as the layer's indexer.block_size says, "
            f"and come without indices; got {size!r}{'' if keys is None else ' and indices'}"
        )
    _check("block_indices", blocks, (batch, key.shape[1], query_len))
    allowed = _marked(blocks, -(-key_len // size), dtype).repeat_interleave(size, dim=3)[..., :key_len]
    return allowed.repeat_interleave(heads // key.shape[1], dim=1)


def _check(name: str, numbers: Any, shape: tuple[int, ...]) -> None:
    whole = isinstance(numbers, Tensor) and not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if not whole or tuple(numbers.shape[:-1]) != shape:
        got = f"{numbers.dtype} {list(numbers.shape)}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise ShapeError(f"regard: {name} must be int {[*shape, 'any']}, the numbers of selected keys, got {got}")


def _marked(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[..., count] that is True, or 0, at the numbers [..., any], and False, or -inf, elsewhere. Numbers other than 0
    to count - 1 mark nothing."""
    numbers, shape = numbers.long(), numbers.shape[:-1]
    unmarked, mark = (False, True) if dtype == torch.bool else (-math.inf, 0.0)
    if numbers.is_cpu and not tracing():
        try:
            return torch.full((*shape, count), unmarked, dtype=dtype).scatter_(-1, numbers, mark)
        except RuntimeError:  # some numbers mark nothing; to find that out first takes as long as all the rest
            pass
    marked = torch.full((*shape, count + 1), unmarked, dtype=dtype, device=numbers.device)
    return marked.scatter_(-1, torch.where(numbers < 0, count, numbers).clamp_(max=count), mark)[..., :count]

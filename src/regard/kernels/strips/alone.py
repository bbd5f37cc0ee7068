"""A call of the compiled library as a custom operator without a backward pass, one node in a graph of torch.compile.

An operator that has one begins later: torch asks in Python, in every call, whether anything wants a gradient. Nor is
there an output that only gradients need.
"""

from typing import Any

from torch import Tensor

from regard.kernels.strips.compiled import attended, node, read
from regard.kernels.strips.order import as_laid, laid_like
from regard.numerics import wide


def _alone(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, of_mask: list[Tensor], of_bias: list[Tensor],
    numbers: list[int], line: str, scale: float, softcap: float | None,
) -> list[Tensor]:  # fmt: skip
    """Output, and lse if it is wanted, of a call without dropout that learns nothing.

    Args:
        of_mask, of_bias, numbers, line: as of `compiled.write`.
    """
    output, lse = attended(query, key, value, sink, of_mask, of_bias, numbers, read(line), scale, softcap)
    output = as_laid(query, output)
    return [output] if lse is None else [output, lse]


def _like_alone(
    query: Tensor, key: Tensor, value: Tensor, sink: Any, of_mask: Any, of_bias: Any, numbers: Any, line: str, *_: Any
) -> list[Tensor]:
    output, lse = laid_like(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    return [output, lse] if read(line).wants_lse else [output]


in_graph = node("regard::strips_alone", _alone, _like_alone)

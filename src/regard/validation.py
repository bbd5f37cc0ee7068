"""The arguments of a call of attention, validated: everything else takes them as valid."""

import math

import torch
from torch import Tensor

from regard.biases import Bias, as_bias
from regard.dropout import Dropout, drawn
from regard.graphs import exporting
from regard.kernels import Call
from regard.kernels.known import bind
from regard.masks import Mask, check_mask
from regard.scores import Additive, Scoring
from regard.shapes import (
    ATTENTION,
    Grid,
    ShapeError,
    check_attention,
    check_rate,
    is_number,
    is_plain,
    kind,
    shape_error,
)


def check_call(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    additive: Additive | None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    wants_lse: bool = False,
) -> Call:
    """Validates every argument of a call, and binds mask and bias to its lengths."""
    grid = check_attention(function, query, key, value)
    if scale is None:
        scale = 1.0 if additive is not None else 1.0 / math.sqrt(max(1, query.shape[3]))
    elif not is_number(scale) or not -math.inf < scale < math.inf:
        learned = "; a tensor is a factor of the query: query * scale, with scale=1.0" if is_plain(scale) else ""
        raise ValueError(
            f"{function}: scale must be a finite number or None for 1/sqrt(head_dim), got {kind(scale)}{learned}"
        )
    if softcap is not None and (not is_number(softcap) or not 0 < softcap < math.inf):
        raise ValueError(f"{function}: softcap must be a positive number or None for none, got {kind(softcap)}")
    if mask is not None:
        check_mask(function, "mask", mask)
    try:
        bound_mask = None if mask is None else bind(mask, grid)
        bound_bias = None if bias is None else as_bias(bias, function).bind(grid)
    except ShapeError as error:
        raise shape_error(function, str(error), ATTENTION, {"query": query, "key": key, "value": value}) from None
    if sink is not None:
        _check_learned(function, "sink", sink, {"heads": grid.heads}, grid)
    if additive is not None:
        if not isinstance(additive, Additive):
            raise TypeError(f"{function}: additive must be an Additive(v), got {kind(additive)}")
        _check_learned(function, "additive.v", additive.v, {"heads": grid.heads, "head_dim": query.shape[3]}, grid)
    check_rate(function, "dropout", dropout)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{function}: generator must be a torch.Generator or None, got {kind(generator)}")
    if dropout and exporting():
        raise ValueError(
            f"{function}: dropout={dropout} cannot be exported: dropout needs a seed, which the graph does not "
            "have; export the model in eval mode, or with dropout=0.0"
        )
    dropped = Dropout(dropout, drawn(generator)) if dropout else None
    scoring = Scoring(grid, scale, softcap, bound_bias, bound_mask, sink, additive)
    return Call(query, key, value, scoring, dropped, wants_lse)


def _check_learned(function: str, name: str, tensor: object, sizes: dict[str, int], grid: Grid) -> None:
    """A sink, or the v of an additive similarity: floating, of the right shape, on the device of the call."""
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    wanted = f"{function}: {name} must be a floating tensor [{axes}], got {kind(tensor)}"
    if not is_plain(tensor) or not tensor.is_floating_point():
        raise TypeError(wanted)
    if tensor.shape != tuple(sizes.values()):
        raise ShapeError(wanted)
    if tensor.device != grid.device:
        raise ValueError(f"{function}: {name} is on {tensor.device}, the call runs on {grid.device}")

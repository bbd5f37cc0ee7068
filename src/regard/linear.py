"""The linear map that layers and models are made of: output = x W^T + b.

Writing token by token multiplies one row, or a few, by every matrix of a model: the time goes into reading the weights.
On AMD's processors, MKL's product of a matrix and a vector, which torch takes for one row, keeps one core busy, and a
few rows are dealt out badly. There the matrix is cut into blocks of outputs, whose products are one batch: every core
reads blocks of its own. Where x is small enough the batch is of W x^T, for which MKL reads the weights nearly as fast
as memory gives them; else of x W^T.

Read per second of a float32 matrix 3072 x 768, on two cores of an AMD EPYC that add up a model's weights at 39 GB/s;
and of as many of them as have 128 MB, on two cores of an Intel Xeon with AMX:

    rows                         1    2    4    8   16
    AMD    F.linear             16    9   11   13    9  GB/s
           in blocks            44   40   40   17   13  GB/s
    Intel  F.linear             20   18   12    9    9  GB/s
           in blocks             8    9    9   13    9  GB/s

So both are timed once per machine: for one row, and where that takes longer in blocks, for as many as there are.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import measured, processor
from regard.graphs import tracing, transformed

FEW_ROWS = 16
"""Rows up to which a batch of blocks may be faster; with one thread of a processor of AMD's, `TURNED_ROWS`."""

TURNED_ROWS, TURNED_NUMBERS = 4, 4096
"""Rows, and numbers in them, up to which W x^T is faster than x W^T."""

BLOCKS = 16
"""Blocks of outputs: a share for each of as many cores; from 2 to 32 they are equally fast."""

MIN_NUMBERS = 1 << 17
"""Numbers in a matrix from which on it pays: smaller ones are cached, with all others of their model."""


class Linear(nn.Linear):
    """`torch.nn.Linear`, faster where no gradient is wanted and there are few rows.

    Shapes: [..., in_features] -> [..., out_features].
    """

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `torch.nn.functional.linear`, up to the order in which products are added up.

    Shapes: x [..., inputs], weight [outputs, inputs], bias [outputs] -> [..., outputs].
    """
    return _in_blocks(x, weight, bias) if _pays(x, weight, bias) else F.linear(x, weight, bias)


def _pays(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    inputs = weight.shape[-1]
    return (
        processor.MKL
        and weight.numel() >= MIN_NUMBERS
        and not tracing()  # before what a graph cannot ask
        and 0 < x.numel() <= FEW_ROWS * inputs
        and x.dim() > 1
        and x.shape[-1] == inputs
        and x.dtype is weight.dtype is torch.float32
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and weight.is_contiguous()
        and not torch._C._is_any_autocast_enabled()
        and not transformed()
        and _pay_here(x.numel() // inputs, weight.numel())
    )


def _pay_here(rows: int, numbers: int) -> bool:
    """Whether so many rows times a matrix of so many numbers take less time in blocks here; not where nothing is
    measured."""
    if _price(1, 1024) > 1:
        return torch.get_num_threads() > 1 or rows <= TURNED_ROWS
    return _price(1 << (rows - 1).bit_length(), 1024 if numbers >= 1 << 20 else 512) > 1


@cache
def _price(rows: int, side: int) -> float:
    """Time of rows times a square matrix by torch's function, over that in blocks, on one thread."""

    def found() -> float:
        draw = torch.Generator().manual_seed(0)
        x, weight, bias = (torch.randn(size, generator=draw) for size in ((rows, side), (side, side), (side,)))
        both = (lambda: F.linear(x, weight, bias)), (lambda: _in_blocks(x, weight, bias))
        return measured.ratio(f"linear / in blocks, {rows} rows, {side} x {side}", *both)

    return measured.alone(found)


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    count, size = len(rows), outputs // BLOCKS
    whole = BLOCKS * size
    blocks = weight[:whole].view(BLOCKS, size, inputs)
    if count <= TURNED_ROWS and rows.numel() <= TURNED_NUMBERS:
        factors = blocks, rows.t().expand(BLOCKS, inputs, count)
        shape, back = (BLOCKS, size, 1), (2, 0, 1)
    else:
        factors = rows.expand(BLOCKS, count, inputs), blocks.mT
        shape, back = (BLOCKS, 1, size), (1, 0, 2)
    found = torch.bmm(*factors) if bias is None else torch.baddbmm(bias[:whole].view(shape), *factors)
    found = found.permute(back).reshape(count, whole)
    if whole < outputs:
        found = torch.cat([found, F.linear(rows, weight[whole:], None if bias is None else bias[whole:])], dim=1)
    return found.view(*x.shape[:-1], outputs)

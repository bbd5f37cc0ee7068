"""Products of stacks of matrices, by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices with Intel MKL, which on processors of other makers uses less than half of what they
can do. oneDNN, which torch uses for bfloat16, has no such preference. One thread of an AMD EPYC, in GFLOP/s:

                                               MKL   oneDNN
    8 products of 256 x 64 by 64 x 512         107      240
    the same with the first transposed          86      204

torch hands float32 products to oneDNN only if they may be rounded to bfloat16
(`torch.backends.mkldnn.matmul.fp32_precision`), and oneDNN rounds them only on processors with AMX. On others the
setting selects the library and changes nothing else, which is checked together with the speed. It holds for the whole
process, so it is changed for one product at a time; a product that another thread begins meanwhile is computed by
oneDNN too, with the same precision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from regard import measured, processor
from regard.graphs import tracing

MIN_PRODUCTS = 1 << 21
"""Numbers to multiply, for each thread, from which on oneDNN is faster: it takes longer to begin."""

FASTER = 0.7
"""Share of MKL's time below which oneDNN is used: copies and filled-up lengths, which it wants, take the rest. Of an
AMD EPYC of the generation before, 0.85 to 0.95 were measured; there, 103 random calls took 1.07 times as long by oneDNN
as by MKL."""

_MATMUL = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def bmm(first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """first @ second: [stack, rows, n] and [stack, n, columns] -> [stack, rows, columns]."""
    before = _setting_to_change(first, second)
    if before is None:
        return torch.bmm(first, second, out=out)
    first, second = packed(first), packed(second)
    with _set("bf16", before):
        if len(first) > 1:
            return torch.bmm(first, second, out=out)
        # of a stack of one, torch would copy slices
        return torch.mm(first[0], second[0], out=None if out is None else out[0])[None]


def baddbmm(
    added: Tensor, first: Tensor, second: Tensor, *, beta: float = 1.0, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """beta added + alpha first @ second, of shapes as in `bmm`; `added` is broadcast, and ignored if beta is 0."""
    before = _setting_to_change(first, second)
    if before is None:
        return torch.baddbmm(added, first, second, beta=beta, alpha=alpha, out=out)
    first, second = packed(first), packed(second)
    with _set("bf16", before):
        if len(first) > 1:
            return torch.baddbmm(added, first, second, beta=beta, alpha=alpha, out=out)
        one = None if out is None else out[0]
        return torch.addmm(added[0], first[0], second[0], beta=beta, alpha=alpha, out=one)[None]


def packed(stack: Tensor) -> Tensor:
    """The stack with its matrices one after another in memory; a copy if it lies otherwise.

    torch makes such a copy for oneDNN itself, but of a transposed matrix element by element, which takes as long as the
    product: key^T of a few heads, or of a layer that holds [batch, length, heads, size], is such a one.
    """
    return stack.mT.contiguous().mT if stack.stride(1) == 1 else stack.contiguous()


def regular(length: int) -> int:
    """The next length that is one of eight between two powers of two.

    oneDNN compiles a product for every shape anew, which takes about as long as a small product and is kept, with most
    of a megabyte. So lengths that vary from call to call are padded to one of few, and odd ones are left to MKL.

    >>> regular(100), regular(1000), regular(1025)
    (104, 1024, 1152)
    """
    step = max(8, (1 << length.bit_length()) // 16)
    return -(-length // step) * step


def is_regular(length: int) -> bool:
    """Whether it is one of these."""
    return regular(length) == length


@contextmanager
def _set(precision: str, before: str) -> Iterator[None]:
    """torch's setting for a product, and what it is afterwards."""
    try:
        _MATMUL.fp32_precision = precision
        yield
    finally:
        _MATMUL.fp32_precision = before


def _setting_to_change(first: Tensor, second: Tensor) -> str | None:
    """torch's setting, to be put back after the product, if oneDNN shall compute it; None if not."""
    large = (
        first.dtype is second.dtype is torch.float32
        and not tracing()
        and first.numel() * second.shape[2] >= MIN_PRODUCTS * torch.get_num_threads()
        and all(map(is_regular, (first.shape[1], first.shape[2], second.shape[2])))
        and first.device.type == "cpu"
        and onednn_is_faster()
    )
    # looked up once: with another thread in the middle of a product, this one must not put "bf16" back after it
    before: str | None = _MATMUL.fp32_precision if large else None
    return None if before == "bf16" else before


def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL here, and does not round them."""
    return _onednn_is_faster()


# torch.compile takes the answer as it is; torch.compiler.assume_constant_result does this, too, but loads the compiler
onednn_is_faster._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _onednn_is_faster() -> bool:
    return measured.alone(_found_to_be_faster)


def _found_to_be_faster() -> bool:
    if not processor.MKL or processor.AMX or not torch.backends.mkldnn.is_available():
        return False
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, rows, 64, generator=draw) for rows in (128, 512))

    before = _MATMUL.fp32_precision

    def product(precision: str) -> Tensor:
        with _set(precision, before):
            return torch.bmm(first, second.mT)

    right = torch.bmm(first.double(), second.double().mT)
    if not torch.allclose(product("bf16").double(), right, rtol=0.0, atol=1e-4):  # rounded to bfloat16: 0.1
        return False
    return measured.ratio("oneDNN / MKL", lambda: product("bf16"), lambda: product("ieee")) < FASTER

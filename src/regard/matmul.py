"""Products of stacks of matrices, by the faster of the two libraries that torch has for them.

torch multiplies float32 matrices with Intel MKL, which on processors of other makers uses less than half of what they
can do. oneDNN, which torch uses for bfloat16, has no such preference. One thread of an AMD EPYC, in GFLOP/s:

                                               MKL   oneDNN
    8 products of 256 x 64 by 64 x 512         107      240
    the same with the first transposed          86      204

torch hands float32 products to oneDNN only if their factors may be rounded to bfloat16
(`torch.backends.mkldnn.matmul.fp32_precision`), and oneDNN rounds them only on processors with AMX. On others the
setting selects the library and changes nothing else. With AMX, factors that are bfloat16 numbers to begin with, as
query and key in that dtype, lose nothing either: AMX multiplies them exactly and adds in float32. One thread of an
Intel Xeon with AMX, in GFLOP/s:

                                                        MKL   oneDNN
    8 products of 256 x 64 by 64 x 2048, bfloat16       161      387

The setting holds for the whole process, so it is changed for one product at a time. A product that another thread
begins meanwhile is computed by oneDNN too: without AMX, where speed and precision are checked, with the same precision;
with AMX its factors would be rounded, so there the setting is changed only while Python has no other thread.
"""

import threading
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


def bmm(
    first: Tensor, second: Tensor, *, alpha: float = 1.0, out: Tensor | None = None, of: torch.dtype | None = None
) -> Tensor:
    """alpha first @ second: [stack, rows, n] and [stack, n, columns] -> [stack, rows, columns].

    Args:
        of: dtype whose numbers the factors hold, if they are copies in a wider one; None for their own.
    """
    if alpha != 1.0:
        into = first.new_empty(*first.shape[:2], second.shape[2]) if out is None else out
        return baddbmm(into, first, second, beta=0.0, alpha=alpha, out=into, of=of)
    before = _setting_to_change(first, second, of)
    if before is None:
        return torch.bmm(first, second, out=out)
    first, second = packed(first), packed(second)
    with _set("bf16", before):
        if len(first) > 1:
            return torch.bmm(first, second, out=out)
        # of a stack of one, torch would copy slices
        return torch.mm(first[0], second[0], out=None if out is None else out[0])[None]


def baddbmm(
    added: Tensor, first: Tensor, second: Tensor, *, beta: float = 1.0, alpha: float = 1.0, out: Tensor | None = None,
    of: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """beta added + alpha first @ second, otherwise as `bmm`; `added` is broadcast, and ignored if beta is 0."""
    before = _setting_to_change(first, second, of)
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


def _setting_to_change(first: Tensor, second: Tensor, of: torch.dtype | None) -> str | None:
    """torch's setting, to be put back after the product, if oneDNN shall compute it; None if not."""
    large = (
        first.dtype is second.dtype is torch.float32
        and not tracing()
        and first.numel() * second.shape[2] >= MIN_PRODUCTS * torch.get_num_threads()
        and all(map(is_regular, (first.shape[1], first.shape[2], second.shape[2])))
        and first.device.type == "cpu"
        and onednn_is_faster(torch.bfloat16 if of is torch.bfloat16 else torch.float32)
        and (not processor.AMX or threading.active_count() == 1)
    )
    # looked up once: with another thread in the middle of a product, this one must not put "bf16" back after it
    before: str | None = _MATMUL.fp32_precision if large else None
    return None if before == "bf16" else before


def onednn_is_faster(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies float32 matrices of numbers of a dtype faster than MKL here, and does not round them.

    No for bfloat16 where the processor has no instructions for it, and for other dtypes than these two.
    """
    return _onednn_is_faster(dtype)


def onednn_beats_fused(dtype: torch.dtype) -> bool:
    """The same beside torch's fused attention, which multiplies by MKL, and by AMX in bfloat16 if there is."""
    return onednn_is_faster(dtype) and not (processor.AMX and dtype is torch.bfloat16)


# torch.compile takes the answers as they are; torch.compiler.assume_constant_result would, too, but loads the compiler
onednn_is_faster._dynamo_marked_constant = onednn_beats_fused._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _onednn_is_faster(dtype: torch.dtype) -> bool:
    if dtype is not torch.float32 and not (dtype is torch.bfloat16 and processor.BFLOAT16):
        return False
    if not processor.MKL or not torch.backends.mkldnn.is_available():
        return False
    if processor.AMX:
        return dtype is torch.bfloat16
    return _onednn_is_faster(torch.float32) if dtype is torch.bfloat16 else measured.alone(_found_to_be_faster)


def _found_to_be_faster() -> bool:
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

"""The kernels strips, native and triton: any mask, forward and backward, in memory linear in the length.

This folder decides how a mask is cut into strips and how a strip is computed:

    plan        cutting a mask into strips                   added       bias and mask as numbers, strip by strip
    grouping    batches of equal strips; the plan cache      dropped     which weights are dropped
    options     how to cut a given call                      products    two products with a softmax between them
    reordering  sorting tokens by document                   engine      all strips, forward and backward
    view        a strip's part of a tensor                   native      the same by the compiled library
    pieces      cache-sized pieces of a strip                binding     the library, and what it is called with
    apart       strips that share nothing                    tuning      measured constants
    partial     a part of the keys, to be merged             gpu         the same by programs on a GPU
    autograd, compiled, kernel    entry points
"""

from regard.kernels.strips.kernel import GPU_KERNEL, KERNEL, NATIVE_KERNEL

__all__ = ["GPU_KERNEL", "KERNEL", "NATIVE_KERNEL"]

"""The strips kernel: any mask, forward and backward, in memory linear in the length.

This folder decides how a mask is cut into strips and how a strip is computed:

    plan        cutting a mask into strips                   added       bias and mask as numbers, strip by strip
    grouping    batches of equal strips; the plan cache      dropped     which weights are dropped
    options     how to cut a given call                      products    two products with a softmax between them
    reordering  sorting tokens by document                   engine      all strips, forward and backward
    view        a strip's part of a tensor                   tuning      measured constants
    pieces      cache-sized pieces of a strip                apart       strips that share nothing, one after another
    partial     a part of the keys, to be merged             autograd, compiled, kernel    entry points
"""

from regard.kernels.strips.kernel import KERNEL

__all__ = ["KERNEL"]

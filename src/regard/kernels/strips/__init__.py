"""The strips kernel: any mask, forward and backward, in memory that grows with the length.

What lives here knows how a mask becomes strips and how a strip is computed. From a mask to a result:

    plan        a mask, cut into strips                      added       bias and mask as numbers, strip by strip
    grouping    those that are alike, and what is kept       dropped     which weights are dropped
    options     how a call is cut                            products    two products with a softmax between them
    view        a strip's part of a tensor                   engine      all strips, forward and backward
    pieces      a few rows of scores at a time               tuning      what was found by measuring
    autograd, compiled, kernel    how others call it
"""

from regard.kernels.strips.kernel import KERNEL

__all__ = ["KERNEL"]

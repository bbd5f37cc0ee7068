"""The implementations of attention, and the choice among them.

A kernel says whether it supports a call (`cannot` returns the reason if not), computes it (`run`) and reports the cost
(`num_scores`: scores computed; `quadratic_numbers`: numbers of size query_len x key_len held). To add one, write a file
here that ends in a `Kernel`, and add a row for it to the table in `choice`.
"""

from regard.kernels.call import Call, Kernel, KernelError, Prepared, Single, all_scores
from regard.kernels.choice import KERNELS, PREFERENCES, REFERENCE, choose, kernel_with_lse, preference, why_not

__all__ = [
    "KERNELS",
    "PREFERENCES",
    "REFERENCE",
    "Call",
    "Kernel",
    "KernelError",
    "Prepared",
    "Single",
    "all_scores",
    "choose",
    "kernel_with_lse",
    "preference",
    "why_not",
]

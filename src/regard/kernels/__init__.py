"""The ways to compute attention, and the choice among them.

A kernel says whether it can do a call (`cannot` gives the reason if not), does it (`run`), and tells what that costs
(`num_scores`: scores computed; `quadratic_numbers`: numbers of size query_len x key_len held). To add one, write a file
here that ends in a `Kernel`, and give it a row in the table of `choice`, where it belongs.
"""

from regard.kernels.call import Call, Kernel, KernelError, all_scores
from regard.kernels.choice import KERNELS, PREFERENCES, REFERENCE, choose, gives_lse, preference, why_not

__all__ = [
    "KERNELS",
    "PREFERENCES",
    "REFERENCE",
    "Call",
    "Kernel",
    "KernelError",
    "all_scores",
    "choose",
    "gives_lse",
    "preference",
    "why_not",
]

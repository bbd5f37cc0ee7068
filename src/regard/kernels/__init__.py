"""The ways to compute attention, and the choice among them.

A kernel is three functions: `cannot(call)` says in a few words why it can't do a call (or None), `run(call)` does it, and
`square(call)` tells how many numbers of size query_len x key_len it would hold. To add one, write a file here that ends
in a `Kernel`, and put it into `KERNELS` where it belongs: the first that can do a call is the one that "auto" takes. The
reference can do everything and stands last.
"""

from regard.kernels import dense
from regard.kernels.call import Call, Kernel, KernelError
from regard.reference import reference

__all__ = ["KERNELS", "REFERENCE", "Call", "Kernel", "KernelError", "choose"]

REFERENCE = Kernel(
    name="reference",
    cannot=lambda call: None,
    run=lambda call: reference(call.query, call.key, call.value, call.scoring, call.dropout),
    square=lambda call: 3 * call.scoring.grid.batch * call.scoring.grid.heads * _cells(call),
)

KERNELS: tuple[Kernel, ...] = (dense.KERNEL, REFERENCE)


def choose(call: Call, name: str = "auto") -> Kernel:
    """The kernel for a call: the first that can, or the one that is named.

    Raises:
        KernelError: the named kernel cannot do it, or does not exist.
    """
    if name == "auto":
        for kernel in KERNELS:
            if kernel.cannot(call) is None:
                return kernel
    for kernel in KERNELS:
        if kernel.name == name:
            why = kernel.cannot(call)
            if why is None:
                return kernel
            able = ", ".join(k.name for k in KERNELS if k.cannot(call) is None)
            raise KernelError(f"attention: kernel {name!r} cannot do this call: {why}\n  kernels that can: {able}")
    raise KernelError(f"attention: no kernel named {name!r}; there are: auto, {', '.join(k.name for k in KERNELS)}")


def _cells(call: Call) -> int:
    return call.scoring.grid.query_len * call.scoring.grid.key_len

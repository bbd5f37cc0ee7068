"""The ways to compute attention, and the choice among them.

A kernel says whether it can do a call (`cannot` gives the reason if not), does it (`run`), and tells what that costs
(`cells`: scores computed; `square`: numbers of size query_len x key_len held). To add one, write a file here that ends
in a `Kernel`, and put it into `KERNELS` where it belongs: "auto" takes the first that can do a call without holding
anything square worth mentioning. The reference can do everything and stands last.
"""

import torch

from regard.graphs import exporting, tracing
from regard.kernels import dense, direct, flex, tiled
from regard.kernels.call import Call, Kernel, KernelError, all_cells
from regard.reference import reference

__all__ = ["KERNELS", "REFERENCE", "SMALL", "Call", "Kernel", "KernelError", "all_cells", "choose", "gives_lse"]

REFERENCE = Kernel(
    name="reference",
    cannot=lambda call: None,
    run=lambda call: reference(call.query, call.key, call.value, call.scoring, call.dropout),
    cells=all_cells,
    square=lambda call: 3 * all_cells(call),
    held=lambda call: 3 * all_cells(call) * max(4, call.query.element_size()),
)

SMALL = 1 << 16
"""Up to this many numbers of query_len x key_len, building them costs less than avoiding them."""

KERNELS: tuple[Kernel, ...] = (dense.KERNEL, flex.KERNEL, tiled.KERNEL, direct.KERNEL, REFERENCE)


def choose(call: Call, name: str = "auto") -> Kernel:
    """The kernel for a call: the first that can and holds nothing square, or the one that is named.

    Exceptions are measured: calls for which a later one takes less time, and says so (`Kernel.faster`).

    Raises:
        KernelError: the named kernel cannot do it, or does not exist.
    """
    if name == "auto":
        graph = exporting()  # in which a size that is not a number yet decides nothing
        for kernel in () if graph else KERNELS:
            if kernel.faster(call):
                return kernel
        for kernel in KERNELS:
            if kernel.cannot(call) is None and (graph or kernel.square(call) <= SMALL):
                return kernel
        return REFERENCE
    for kernel in KERNELS:
        if kernel.name == name:
            why = kernel.cannot(call)
            if why is None:
                return kernel
            others = ", ".join(k.name for k in KERNELS if k.cannot(call) is None)
            raise KernelError(f"attention: kernel {name!r} cannot do this call: {why}\n  kernels that can: {others}")
    raise KernelError(f"attention: no kernel named {name!r}; there are: auto, {', '.join(k.name for k in KERNELS)}")


def gives_lse(call: Call) -> bool:
    """Whether the kernel that is chosen has lse on the way: asking for it changes no bit of the output.

    So it is in float32 and float64 on a CPU, where torch's own function is the same operator as the tiled kernel's. Not
    said of calls so small that asking costs more than having it later, nor of those that learn.
    """
    grid, query = call.scoring.grid, call.query
    if grid.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64) or all_cells(call) < SMALL:
        return False
    if tracing() or any(t.requires_grad for t in (query, call.key, call.value)):
        return False
    kernel = choose(call)
    if kernel is not dense.KERNEL:
        return kernel is tiled.KERNEL
    sizes = {t.shape[3] for t in (query, call.key, call.value)}
    return dense.square(call) == 0 and call.key.shape[1] == grid.heads and len(sizes) == 1 and tiled.FLASH

"""Whether a call is being computed, or written down as a graph that will compute it later.

    compiled  torch.compile: the graph runs in this process, and may hold operators of regard's own
    exported  torch.export, torch.onnx.export, torch.jit.trace: the graph leaves, so it may hold torch's operators
              alone; and it is for other lengths than those of the example, so no length may be taken for a number

In both no number in a tensor may decide what is done.
"""

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether a graph that will leave this process is being made."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined, no-untyped-call]


def tracing() -> bool:
    """Whether a graph is being made, to stay or to leave: nothing can be asked of data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def whole(length: int, device: torch.device) -> range | Tensor:
    """All queries or keys of a call; in a graph, counted when it runs."""
    return torch.arange(length, device=device) if tracing() else range(length)

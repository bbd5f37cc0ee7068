"""Whether a call is being computed, or traced into a graph that will compute it later.

    compiled  torch.compile: the graph runs in this process, and may contain regard's own operators
    exported  torch.export, torch.onnx.export, torch.jit.trace: the graph leaves the process, so it may contain only
              torch's operators; it is for any lengths, so no length may be treated as a constant

In both, no branch may depend on the contents of a tensor.
"""

import torch
from torch import Tensor


def exporting() -> bool:
    """Whether a graph is being traced that will leave this process."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()  # type: ignore[attr-defined, no-untyped-call]


def tracing() -> bool:
    """Whether a graph is being traced, of either kind: no branch may depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def whole(length: int, device: torch.device) -> range | Tensor:
    """All queries or keys of a call; in a graph, as a tensor computed when it runs."""
    return torch.arange(length, device=device) if tracing() else range(length)

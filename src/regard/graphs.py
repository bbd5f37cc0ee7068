"""Whether a call is being computed, or traced into a graph that will compute it later.

    compiled  torch.compile: the graph runs in this process, and may contain regard's own operators
    exported  torch.export, torch.onnx.export, torch.jit.trace, make_fx, FakeTensorMode: the graph leaves the process,
              so it may contain only torch's operators; it is for any lengths, so no length may be treated as a constant

In both, no branch may depend on the contents of a tensor. In transforms of torch.func tensors have contents, but those
that are made there must not be kept.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

Given = ParamSpec("Given")
Found = TypeVar("Found")

_STANDING_IN = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE


def exporting() -> bool:
    """Whether a graph is being traced that will leave this process."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting() or _watched()  # type: ignore[attr-defined, no-untyped-call]


def tracing() -> bool:
    """Whether a graph is being traced, of either kind: no branch may depend on data."""
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and _watched()


def _watched() -> bool:
    """Whether a mode stands in for every operator, to write it down (`make_fx`) or to compute its shape alone
    (`FakeTensorMode`); not those that only count or print."""
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0 and stands_in()


def stands_in() -> bool:
    """Whether tensors have no numbers, by such a mode: that of a compiler, too, which traces what Dynamo does not."""
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in _STANDING_IN)


def transformed() -> bool:
    """Whether a transform of torch.func is at work, or derivatives are carried forward (torch.autograd.forward_ad)."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def has_numbers(tensor: Tensor) -> bool:
    """Whether a branch may depend on the numbers of a tensor: neither in a graph nor where `is_of_many`."""
    return not (tracing() or is_of_many(tensor))


def is_of_many(value: object) -> bool:
    """Whether something is a tensor that in torch.func.vmap stands for those of several calls."""
    if not torch._C._are_functorch_transforms_active() or not isinstance(value, Tensor):
        return False
    while torch._C._functorch.is_gradtrackingtensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return torch._C._functorch.is_batchedtensor(value)


def as_it_stands() -> bool:
    """Whether a call is computed now and as it is: neither traced nor transformed. Asked in every call."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    if forward_ad._current_level >= 0:  # as `transformed`, without a call more
        return False
    return not torch._C._len_torch_dispatch_stack() or not _watched()


def concrete(device: torch.device) -> bool:
    """Whether numbers on this device can be looked at where they are: a CPU's, neither traced nor transformed."""
    return device.type == "cpu" and as_it_stands()


def whole(length: int, device: torch.device) -> range | Tensor:
    """All queries or keys of a call; in a graph, as a tensor computed when it runs."""
    return torch.arange(length, device=device) if tracing() else range(length)


def uncompiled(reason: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A decorator: torch.compile leaves the function out of its graphs, and all that the function calls.

    As `torch.compiler.disable`, but without loading the compiler, which takes seconds.
    """

    def left_out(function: Callable[Given, Found]) -> Callable[Given, Found]:
        @wraps(function)
        def run(*arguments: Given.args, **named: Given.kwargs) -> Found:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **named)
            alone: Callable[Given, Found] = torch.compiler.disable(function)
            return alone(*arguments, **named)

        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return run

    return left_out

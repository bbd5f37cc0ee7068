"""Gradients of gradients, some queries at a time: those of the reference, whatever a call is made of."""

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from comparing import assert_close
from regard import Alibi, Causal, Dense, Document, Padding, Window, attention_with_lse
from regard.kernels import second
from regard.kernels.strips import autograd, binding

KERNELS = ("strips",) if binding.compiled(torch.float32) is None else ("native", "strips")
SIZES = BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 37, 45, 8, 6
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window, softcap": {"mask": Causal() & Window(5), "softcap": 2.0},
    "nothing for some": {"mask": Padding([0, 20])},
    "documents": {"mask": Document(torch.arange(QUERIES) // 9, torch.arange(KEYS) // 9)},
    "bias with -inf": {"bias": torch.zeros(QUERIES, KEYS).masked_fill(torch.rand(QUERIES, KEYS) < 0.2, -torch.inf)},
    "sink": {"sink": torch.linspace(-1, 2, HEADS)},
    "a sink alone for some": {
        "mask": Dense((torch.arange(QUERIES) > 8)[:, None].expand(-1, KEYS)), "sink": torch.linspace(-1, 2, HEADS),
    },
    "a sink that takes nothing": {
        "mask": Dense((torch.arange(QUERIES) > 8)[:, None].expand(-1, KEYS)), "sink": torch.full((HEADS,), -torch.inf),
    },
    "dropout": {"dropout": 0.3},
    "all": {
        "mask": Padding([0, 20]) & Dense(torch.rand(QUERIES, KEYS) < 0.3), "softcap": 3.0, "dropout": 0.2,
        "sink": torch.linspace(-1, 2, HEADS), "bias": Alibi(HEADS),
    },
}  # fmt: skip


def leaves(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (HEADS, QUERIES, HEAD_DIM), (KV_HEADS, KEYS, HEAD_DIM), (KV_HEADS, KEYS, VALUE_DIM)
    return [torch.randn(BATCH, *size, generator=draw).to(dtype).requires_grad_() for size in sizes]


def penalty(
    inputs: list[Tensor], kernel: str, *, lse: bool = True, which: tuple[int, ...] = (0, 1, 2), **given: Any
) -> Any:
    """Gradients of a function of gradients, of those of the inputs that are wanted."""
    draw = torch.Generator().manual_seed(3)
    sink = given.pop("sink", None)
    inputs = inputs if sink is None else [*inputs, sink.to(inputs[0].dtype).requires_grad_()]
    more = {"sink": inputs[3]} if len(inputs) > 3 else {}
    output, of_keys = attention_with_lse(*inputs[:3], kernel=kernel, generator=draw, **more, **given)
    loss = output.double().sin().sum()
    if lse:
        loss = loss + of_keys.masked_fill(of_keys == -torch.inf, 0.0).double().cos().sum()
    wanted = [inputs[n] for n in which] + inputs[3:]
    grads = torch.autograd.grad(loss, wanted, create_graph=True)
    return torch.autograd.grad(sum((n + 1) * grad.double().square().sum() for n, grad in enumerate(grads)), wanted)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("name", CALLS)
def test_any_call_has_second_gradients_in_parts(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second, "MIN_QUERIES", rows)
    monkeypatch.setattr(second, "MAX_SCORES", 1)
    right = penalty(leaves(), "reference", **CALLS[name])
    for kernel, lse in itertools.product(KERNELS, (True, False)):
        expected = right if lse else penalty(leaves(), "reference", lse=False, **CALLS[name])
        for ours, theirs in zip(penalty(leaves(), kernel, lse=lse, **CALLS[name]), expected, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_what_is_not_wanted_is_left_out(which: tuple[int, ...]) -> None:
    for given in ({"mask": Causal()}, {"sink": torch.ones(HEADS), "dropout": 0.2}):
        for ours, theirs in zip(
            penalty(leaves(), "strips", which=which, **given),
            penalty(leaves(), "reference", which=which, **given),
            strict=True,
        ):
            assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_first_gradients_are_computed_once_where_the_second_do_not_go_through_the_results(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    first = autograd.Gradients.forward
    monkeypatch.setattr(
        autograd.Gradients, "forward", staticmethod(lambda *given: (computed.append(len(given)), first(*given))[1])
    )
    three = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    output, _ = attention_with_lse(*three, kernel=kernel)
    grads = torch.autograd.grad(output.sum(), three, create_graph=True)
    torch.autograd.grad(sum(grad.square().sum() for grad in grads), three)
    assert len(computed) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_in_half_precision_too(dtype: torch.dtype) -> None:
    inputs = leaves(dtype)
    exact = penalty([tensor.detach().double().requires_grad_() for tensor in inputs], "reference", mask=Causal())
    for ours, theirs in zip(penalty(inputs, "strips", mask=Causal()), exact, strict=True):
        assert ours.dtype is dtype
        assert_close(ours.double(), theirs, tolerance=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_what_is_hidden_reaches_no_second_gradient(kernel: str) -> None:
    inputs, mask = leaves(), Padding([20, 31])
    right = penalty(inputs, "reference", lse=False, mask=mask)
    with torch.no_grad():
        for tensor in inputs[1:]:
            tensor[0, :, 20:] = torch.nan
            tensor[1, :, 31:] = torch.inf
    for ours, theirs in zip(penalty(inputs, kernel, lse=False, mask=mask), right, strict=True):
        assert_close(ours, theirs)


MEASURED = """
import resource, sys, torch, regard
from regard import Causal
tensors = [torch.randn(1, 2, int(sys.argv[1]), 16, requires_grad=True) for _ in range(3)]
output = regard.attention(*tensors, mask=Causal())
grads = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sum(grad.square().sum() for grad in grads).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tells of memory in KiB")
def test_second_gradients_need_no_memory_for_all_scores() -> None:
    length = 4096
    run = subprocess.run([sys.executable, "-c", MEASURED, str(length)], capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < 2 * length**2 * 4, "more than the scores of two heads"

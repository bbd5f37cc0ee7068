"""Calls in transforms of torch.func and in modes that replace every operator, the first ones of a process: nothing that
is made there may be kept and met by a later call."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cases import ON_A_CPU
from comparing import assert_close
from regard import Alibi, Causal, Dense, Document, Padding, Window, attention

LENGTH = 6
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": Causal()},
    "window": lambda: {"mask": Causal() & Window(3)},
    "padding": lambda: {"mask": Padding(torch.tensor([5]))},
    "dense": lambda: {"mask": Dense(torch.arange(LENGTH**2).view(LENGTH, LENGTH) % 3 != 1)},
    "documents": lambda: {"mask": Document(torch.tensor([[0, 0, 1, 1, 1, 2]]))},
    "ALiBi": lambda: {"mask": Causal(), "bias": Alibi(2)},
    "a table": lambda: {"bias": torch.linspace(-1, 1, 2 * LENGTH**2).view(2, LENGTH, LENGTH)},
    "softcap": lambda: {"mask": Causal(), "softcap": 2.0},
    "sink": lambda: {"mask": Causal(), "sink": torch.linspace(-1, 1, 2)},
}


def _as_fakes(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert function(mode.from_tensor(x)).shape == ()


def _as_a_graph(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    assert_close(make_fx(function)(x)(2 * x), function(2 * x))


def _with_another_device(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.device("meta"):
        function(x)


MODES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "hessian": lambda function, x: torch.func.hessian(function)(x),
    "vmap": lambda function, x: torch.func.vmap(function)(torch.stack([x, x])),
    "make_fx": _as_a_graph,
    "FakeTensorMode": _as_fakes,
    "another device": _with_another_device,
}


@pytest.mark.parametrize("mode", MODES)
def test_what_a_mode_makes_is_not_met_outside_of_it(mode, tmp_path):
    given = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, __file__, mode], env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == list(FEATURES)


def _summed(attend: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return attend(x).sum()


@pytest.mark.parametrize("left", ["query", "key", "value", "sink", "bias"])
@pytest.mark.parametrize("kernel", ["auto", *ON_A_CPU])
def test_a_tensor_that_a_transform_has_left_behind_is_the_one_that_it_was_given(left, kernel):
    draw = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {name: torch.randn(1, 2, 40, 8, generator=draw) for name in ("query", "key", "value")}
    given |= {"sink": torch.randn(2, generator=draw), "bias": torch.randn(1, 2, 40, 40, generator=draw)}
    for name in ("bias", "sink"):
        if left != name:
            del given[name]
    if left == "sink" and kernel == "sdpa":
        pytest.skip("torch's function has no sink")
    behind: list[Tensor] = []

    def of_transform(tensor: Tensor) -> Tensor:
        behind.append(tensor)
        return tensor.square().sum()

    torch.func.grad(of_transform)(given[left])
    for _ in range(2):  # the second one is like the first
        grads = []
        for tensor in (given[left], behind[0]):
            learned = {name: each.detach().requires_grad_() for name, each in given.items() if name != left}
            output = attention(**(given | learned | {left: tensor}), mask=Causal() & Window(9), kernel=kernel)
            grads.append(torch.autograd.grad(output.square().sum(), list(learned.values())))
        for ours, theirs in zip(*grads, strict=True):
            assert_close(ours, theirs)


def _in_and_out(mode: str) -> None:
    """Each feature in the mode, then outside, then in the mode again; in the dtype of which nothing is known yet."""
    torch.set_num_threads(1)
    for name, feature in FEATURES.items():
        given, x = feature(), torch.randn(1, 2, LENGTH, 4)

        def attend(x: Tensor, kernel: str = "auto", given: dict[str, Any] = given) -> Tensor:
            return attention(x.sin(), x, x.cos(), kernel=kernel, **given)

        for _ in range(2):
            MODES[mode](partial(_summed, attend), x)
            learning = x.clone().requires_grad_()
            found, right = (attend(learning, kernel) for kernel in ("auto", "reference"))
            assert_close(found, right)
            assert_close(*(torch.autograd.grad(output.sum(), learning)[0] for output in (found, right)))
        print(name)


if __name__ == "__main__":
    _in_and_out(sys.argv[1])

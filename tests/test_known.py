"""What was found out about a mask is kept for as long as the mask is the same, however large, and no longer than it."""

import gc

import pytest
import torch

from cases import needs_library
from comparing import assert_close
from regard import Causal, Mask, Where, Window, attention
from regard.kernels.known import Recent, cached_by_mask
from regard.versions import MAX_HELD_BYTES, equal, few_or_version

LENGTH = 3000
KERNELS = [
    pytest.param("native", marks=needs_library), "strips",
]  # fmt: skip


class Cells(Mask):
    """A bool tensor [query_len, key_len], and how many cells of it were asked for."""

    axes = {"allowed_cells": ("query_len", "key_len")}  # noqa: RUF012
    asked: list[int] = []  # noqa: RUF012

    def __init__(self, allowed_cells):
        self.allowed_cells = allowed_cells

    def rule(self, batch, head, query, key):
        found = self.allowed_cells[query, key]
        self.asked.append(found.numel())
        return found


def blocks():
    """Blocks of 150 tokens, some of which see each other: larger than what is kept alive."""
    seen = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)) < 0.3
    cells = (seen | torch.eye(20).bool()).repeat_interleave(150, 0).repeat_interleave(150, 1)
    assert cells.nbytes > MAX_HELD_BYTES
    return cells


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("others", [None, Causal(), Window(700)], ids=str)
def test_a_large_mask_is_evaluated_once_read_anew_when_written_to_and_forgotten_with_its_tensor(kernel, others):
    cells = blocks()
    three = torch.randn(3, 1, 1, LENGTH, 8, generator=torch.Generator().manual_seed(1)).unbind()
    three = [tensor.requires_grad_() for tensor in three]

    def outcome(cells, kernel):
        mask = Cells(cells) if others is None else Cells(cells) & others
        Cells.asked.clear()
        output = attention(*three, mask=mask, kernel=kernel)
        return (output.detach(), *torch.autograd.grad(output.square().sum(), three)), sum(Cells.asked)

    for _ in range(2):
        right, _ = outcome(cells, "reference")
        for first in (True, False):
            found, asked = outcome(cells, kernel)
            assert (asked > 0) == first or kernel == "strips"  # which keeps less, as it holds a number for each cell
            for part, expected in zip(found, right, strict=True):
                assert_close(part, expected)
        cells[:150, :150].logical_not_()
        cells.fill_diagonal_(True)
    memory = range(cells.data_ptr(), cells.data_ptr() + cells.nbytes)
    held = sum(type(some) is torch.Tensor and some.data_ptr() in memory for some in gc.get_objects())
    assert held > 1  # by what is kept, or nothing would be forgotten below
    del cells
    assert not [some for some in gc.get_objects() if type(some) is torch.Tensor and some.data_ptr() in memory]


def test_the_last_few_values_are_kept_and_none_whose_tensor_is_gone():
    recent: Recent[int] = Recent(3)
    tensors = [torch.zeros(4, dtype=torch.bool) for _ in range(4)]
    views = [tensor[1:] for tensor in tensors]
    keys = [("some", (few_or_version(view),)) for view in views]
    made = []

    def get(number):
        return recent.get(keys[number], lambda: (made.append(number), number)[1])

    assert [get(number) for number in (0, 1, 2, 0, 3, 0, 1)] == [0, 1, 2, 0, 3, 0, 1]
    assert made == [0, 1, 2, 3, 1]  # 1 had made room for 3
    del tensors[0]
    assert len(recent._values) == 3  # its view is there
    del views[0]
    assert len(recent._values) == 2
    tensors.clear()
    views.clear()
    assert not recent._values


def test_a_tensor_may_be_gone_before_its_value_is_there():
    recent: Recent[int] = Recent(3)
    tensors = [torch.zeros(4, dtype=torch.bool)]
    key = few_or_version(tensors[0])
    assert recent.get(key, lambda: (tensors.clear(), 7)[1]) == 7
    assert not recent._values


def test_a_mask_of_a_function_of_a_large_tensor_is_not_kept():
    cells = blocks()
    asked = []
    found = cached_by_mask(maxsize=2)(lambda mask: asked.append(mask))
    for _ in range(2):
        found(Where(lambda batch, head, query, key: cells[query, key]))
    assert len(asked) == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "laid",
    [
        lambda x: x,
        lambda x: x.mT,
        lambda x: x[1:],
        lambda x: x[:, 1:],
        lambda x: x[:1].expand(3, -1),
        lambda x: x[:, :0],
    ],
    ids=["as it is", "turned", "later rows", "later columns", "repeated", "none"],
)
def test_two_tensors_are_equal_however_they_lie(laid, dtype):
    for columns in (8, 11):
        one = torch.arange(4 * columns).reshape(4, columns).mul(7).remainder(3).to(dtype)
        assert equal(laid(one), laid(one).clone())
        assert equal(laid(one).clone(), laid(one.clone()))
        for place in range(laid(one).numel()):
            other = laid(one).clone(memory_format=torch.contiguous_format)
            other.view(-1)[place] = not other.view(-1)[place] if dtype is torch.bool else 7
            assert not equal(laid(one), other)
    assert not equal(one, one.to(torch.int32))
    assert not equal(one, one[:3])
    assert not equal(one.to("meta"), one.to("meta"))

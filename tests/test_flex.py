"""What FlexAttention is told of a mask, on a CPU and without the compiler; with it, where there is a GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import composed_masks, grids
from comparing import assert_close, assert_same_cells
from regard import Causal, Dense, Document, Mask, Padding, Prefix, Where, Window, attention_with_lse
from regard.kernels import flex
from regard.reference import reference
from regard.shapes import Grid
from regard.validation import check_call


def call_of(query, key, value, mask=None, *, softcap=None, sink=None, dropout=0.0, bias=None):
    return check_call("test", query, key, value, mask, bias, None, softcap, sink, None, dropout, None, True)


@given(st.data())
def test_the_function_of_a_cell_says_what_the_mask_says(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    batch, heads, query_len, key_len, _ = grid
    axes = torch.meshgrid(*map(torch.arange, (batch, heads, query_len, key_len)), indexing="ij")
    asked = mask.rule(*axes)
    assert_same_cells(asked.expand(grid[:4]), mask.allowed(range(query_len), range(key_len)).expand(grid[:4]))


@settings(max_examples=50)
@given(st.data())
def test_blocks_hold_every_allowed_cell_and_full_ones_nothing_else(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 4)
        grid = data.draw(grids())
        mask = data.draw(composed_masks(grid)).mask.bind(grid)
        found = flex.blocks(mask, grid)
    allowed = mask.allowed(range(grid.query_len), range(grid.key_len)).expand(grid[:4])
    assert torch.equal(found.queries.expand(grid.batch, -1), allowed.any(-1).any(1))
    assert torch.equal(found.keys.expand(grid.batch, -1), allowed.any(-2).any(1))
    held = torch.zeros(grid[:4], dtype=torch.bool)
    for kind, (count, order) in (("partial", found.partial), ("full", found.full)):
        for batch, row in torch.cartesian_prod(torch.arange(grid.batch), torch.arange(count.shape[2])).tolist():
            n = min(batch, len(count) - 1)
            columns = order[n, 0, row, : count[n, 0, row]].tolist()
            assert columns == sorted(set(columns))
            for column in columns:
                at = batch, slice(None), slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
                held[at] = True
                assert kind == "partial" or bool(allowed[at].all())
    assert not bool((allowed & ~held).any())


CASES = {
    "nothing": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(40)},
    "streaming with a sink": {"mask": Causal() & (Window(20) | Prefix(3)), "sink": torch.randn(4)},
    "documents": {"mask": Causal(offset=0) & Document(torch.arange(150)[None] // 60, torch.arange(170)[None] // 60)},
    "padding, a row of it empty": {"mask": Padding([100, 0])},
    "softcap": {"mask": Causal(), "softcap": 2.0},
    "cells": {"mask": Dense(torch.rand(2, 4, 150, 170, generator=torch.Generator().manual_seed(0)) > 0.7)},
    "a function": {"mask": Where(lambda batch, head, query, key: (query + key + head) % 3 > batch)},
}


@pytest.fixture
def without_the_compiler(monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*return_lse.*|.*torch.compile.*:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_flex_attention_computes_what_the_reference_does(without_the_compiler, case):
    query, key, value = (torch.randn(2, n, length, 16) for n, length in ((4, 150), (2, 170), (2, 170)))
    call = call_of(query, key, value, **case)
    if "Padding" in repr(call.scoring.mask):
        key[0, :, 120:] = value[0, :, 110:] = math.nan  # seen by nobody
    for ours, right in zip(flex.run(call), reference(query, key, value, call.scoring), strict=True):
        assert_close(ours, right, tolerance=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_on_a_gpu_it_agrees_with_the_reference_forward_and_backward(case):
    tensors = [torch.randn(2, n, length, 64, device="cuda") for n, length in ((4, 150), (2, 170), (2, 170))]
    case = {
        name: value.to("cuda") if isinstance(value, (torch.Tensor, Mask)) else value for name, value in case.items()
    }
    found = []
    for kernel in ("flex", "reference"):
        leaves = [t.clone().requires_grad_() for t in tensors]
        output, lse = attention_with_lse(*leaves, **case, kernel=kernel)
        found.append([output, lse, *torch.autograd.grad(output.sin().sum(), leaves)])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, tolerance=1e-3)


def test_it_says_what_it_cannot_do():
    query = torch.randn(1, 2, 5, 4)
    assert "CUDA devices only" in flex.cannot(call_of(query, query, query))

    class OnCuda:
        """A call that says that it lies on a GPU."""

        def __init__(self, **given):
            self.call = call_of(query, query, query, **given)
            self.scoring, self.dropout = self.call.scoring, self.call.dropout
            self.query = type("Query", (), {"device": torch.device("cuda"), "dtype": torch.float32})

    assert flex.cannot(OnCuda()) is None
    assert flex.cannot(OnCuda(mask=Causal() & Window(3), softcap=1.0)) is None
    assert "no dropout" in flex.cannot(OnCuda(dropout=0.1))
    assert "biases" in flex.cannot(OnCuda(bias=torch.zeros(5, 5)))


def test_a_long_window_is_planned_without_a_square():
    grid = Grid(1, 1, 1 << 14, 1 << 14)
    asked = []

    class Watched(Window):
        def rule(self, batch, head, query, key):
            asked.append(query.numel() * key.numel())
            return super().rule(batch, head, query, key)

    found = flex.blocks(Watched(200).bind(grid), grid)
    assert sum(asked) < 6 * flex.BLOCK * grid.query_len
    assert bool(found.queries.all())

"""Weights too faint to matter are never multiplied where that is slow, and no result shows it."""

import math

import pytest
import torch

from comparing import assert_close
from regard import Alibi, Causal, Document, Window, attention, attention_with_lse, checked, faint, measured, plan

LEAST_NORMAL = 2.0**-126


@pytest.fixture(params=[98.0, 1.0], ids=["slow", "fast"])
def price(request, monkeypatch):
    """What the processor is said to take for a denormal number, in normal ones."""
    return said(monkeypatch, request.param)


@pytest.fixture
def slow(monkeypatch):
    return said(monkeypatch, 98.0)


def said(monkeypatch, price):
    monkeypatch.setattr(faint, "_price", lambda: price)
    checked.forget()
    return price


@pytest.fixture
def factors(monkeypatch):
    """How many denormal numbers every product of stacks of matrices had among its factors."""
    found = []

    def watched(real, at):
        def product(*given, **more):
            found.extend(int(((t != 0) & (t.abs() < LEAST_NORMAL)).sum()) for t in given[at : at + 2])
            return real(*given, **more)

        return product

    monkeypatch.setattr(torch, "bmm", watched(torch.bmm, 0))
    monkeypatch.setattr(torch, "baddbmm", watched(torch.baddbmm, 1))
    return found


def heads(length, heads=4, key_len=None, draw=None):
    draw = draw or torch.Generator().manual_seed(0)
    lengths = length, key_len or length, key_len or length
    return [torch.randn(2, heads, n, 8, generator=draw).requires_grad_() for n in lengths]


CALLS = {
    "everything": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(500)},
    "softcap": {"mask": Causal(), "softcap": 30.0},
    "dropout": {"dropout": 0.2},
    "tokens apart": {"mask": Document(torch.arange(600) % 2)},
}


@pytest.mark.parametrize("kernel", ["strips", "direct"])
@pytest.mark.parametrize("name", CALLS)
def test_no_denormal_weight_is_multiplied_where_that_is_slow(name, kernel, price, factors):
    tensors = heads(600)
    more = {"generator": torch.Generator().manual_seed(1)} if name == "dropout" else {}
    output = attention(*tensors, bias=Alibi(4), kernel=kernel, **CALLS[name], **more)
    output.sum().backward()
    if price > 1 or kernel == "direct" or name in ("softcap", "dropout"):  # elsewhere torch's operator multiplies
        assert factors
        assert (max(factors) == 0) == (price > 1)


@pytest.mark.parametrize("kernel", ["strips", "direct"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "dropout"])
def test_output_lse_and_gradients_are_those_of_the_definition(name, kernel, slow):
    towards = torch.randn(2, 4, 600, 8), torch.randn(2, 4, 600)

    def results(dtype, kernel):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in heads(600)]
        found = attention_with_lse(*tensors, bias=Alibi(4), kernel=kernel, **CALLS[name])
        return *found, *torch.autograd.grad(found, tensors, [tensor.to(dtype) for tensor in towards])

    for ours, exact in zip(results(torch.float32, kernel), results(torch.float64, "reference"), strict=True):
        assert_close(ours, exact.float())


@pytest.mark.parametrize("kernel", ["strips", "direct"])
def test_what_is_left_out_is_far_below_what_is_rounded(kernel, monkeypatch):
    found = []
    for price in (98.0, 1.0):
        said(monkeypatch, price)
        tensors = heads(600)
        output = attention(*tensors, bias=Alibi(4), softcap=30.0, kernel=kernel)
        found.append([output, *torch.autograd.grad(output.sum(), tensors)])
    for without, whole in zip(*found, strict=True):
        torch.testing.assert_close(without, whole, rtol=0, atol=600 * 2.0**-100 * 600)


def test_the_gradients_of_sharp_scores_are_no_different(price, factors):
    query, key, value = heads(80)
    output = attention(query * 30.0, key * 30.0, value, softcap=500.0, kernel="strips")
    factors.clear()
    output.sum().backward()
    assert (max(factors) == 0) == (price > 1)


@pytest.mark.usefixtures("torch_is_faster")
def test_calls_whose_gradients_have_many_such_weights_are_computed_by_strips(price):
    query, key, value = heads(600)
    table = torch.randn(1, 4, 600, 600)
    by_strips = plan(query, key, value, bias=Alibi(4)).kernel == "strips"
    assert by_strips == (price > 1)
    assert plan(query, key, value, bias=table).kernel == "sdpa"
    assert plan(query, key, value, bias=100.0 * table).kernel == ("strips" if price > 1 else "sdpa")
    with torch.no_grad():
        assert plan(query, key, value, bias=Alibi(4)).kernel == "sdpa"


def test_a_number_that_is_none_stays_and_so_does_what_is_wider(slow):
    exponents = torch.tensor([0.0, -99.0, -101.0, -math.inf, math.nan])
    left = torch.tensor([0.0, -99.0, -math.inf, -math.inf, math.nan])
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(faint.without_faint_exponents(exponents.clone()), left, **same)
    torch.testing.assert_close(faint.without_faint(exponents.exp2()), left.exp2(), **same)
    wider = exponents.double()
    torch.testing.assert_close(faint.without_faint_exponents(wider.clone()), wider, **same)
    torch.testing.assert_close(faint.without_faint(wider.exp2()), wider.exp2(), **same)


def test_what_lies_far_apart_is_told_from_what_is_hidden():
    assert not faint.spread(torch.tensor([0.0, -69.0, -math.inf]))
    assert faint.spread(torch.tensor([0.0, -70.0, -math.inf]))
    assert not faint.spread(torch.full((3,), -math.inf))
    assert not faint.spread(torch.empty(0))
    assert not faint.spread(torch.tensor([0.0, -70.0, math.nan]))


def test_the_share_is_that_of_weights_that_are_denormal():
    numbers = torch.tensor([[0.0, -88.0, -103.0, -104.0, -87.0, -math.inf], [-math.inf] * 6])
    assert faint.share(numbers) == pytest.approx(2 / 12)


def test_the_price_is_measured_of_products_that_are_alike_but_for_such_numbers(monkeypatch, factors):
    seen = []
    monkeypatch.setattr(measured, "ratio", lambda name, one, other: seen.append((one(), other())) or 50.0)
    assert faint._price.__wrapped__() == 50.0
    assert factors == [32 * 64, 0, 0, 0]
    torch.testing.assert_close(seen[0][0].double() * 2.0**130, seen[0][1].double(), rtol=1e-3, atol=1e-3)

"""Threads that are given the keys of a head: what they compute of few queries is what the definition says."""

import math

import pytest
import torch

import regard
from cases import needs_library
from comparing import assert_close
from regard import Alibi, Causal, Dense, Document, Padding, Strided, Window, attention_with_lse
from regard.checked import forget
from regard.kernels.strips import dealing
from regard.kernels.strips.order import Order

pytestmark = needs_library

QUERIES, KEYS = 21, 1100


def ids(length: int) -> torch.Tensor:
    """Documents whose tokens lie apart."""
    return (torch.arange(length) * 7 % 5)[None].expand(3, -1)


def hides_keys() -> torch.Tensor:
    """Cells that hide some keys from all queries, and from one query all keys."""
    cells = torch.arange(QUERIES)[:, None] * 3 % 7 >= torch.arange(KEYS) % 5
    cells[:, 400:475] = cells[4] = False
    return cells


CASES = {
    "nothing": {},
    "causal, of the last queries": {"mask": Causal(offset=KEYS - QUERIES)},
    "window": {"mask": Window(30) & Causal(offset=700)},
    "padded left": {"mask": Padding(torch.arange(KEYS) >= torch.tensor([[0], [90], [1099]]))},
    "no key is seen": {"mask": Padding(torch.zeros(3, KEYS, dtype=torch.bool))},
    "every third key": {"mask": Strided(3)},
    "window or every third key": {"mask": Causal(offset=700) & (Window(300) | Strided(3))},
    "documents apart": {"mask": Document(ids(QUERIES), ids(KEYS))},
    "cells": {"mask": Dense(hides_keys())},
    "sink, softcap and ALiBi": {"sink": torch.linspace(-1, 1, 4), "softcap": 5.0, "bias": Alibi(4)},
    "a tensor": {"bias": torch.linspace(-3, 3, KEYS).expand(1, 1, QUERIES, KEYS)},
    "scores that are far": {"bias": torch.where(torch.arange(KEYS) % 50 < 49, 0.0, 1e4).view(1, 1, 1, KEYS)},
    "dropout": {"dropout": 0.3},
}


def results(inputs, name, kernel="native", dtype=None):
    """Output, lse and gradients of query, key and value, of the second call, which is like the first."""
    three, grad, grad_lse = inputs
    leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in three]
    given = CASES[name]
    for _ in range(2):
        generator = {"generator": torch.Generator().manual_seed(3)} if "dropout" in given else {}
        output, lse = attention_with_lse(*leaves, **given, **generator, kernel=kernel)
        seen = lse.where(lse > -math.inf, 0)
        grads = torch.autograd.grad([output, seen], leaves, [grad.to(output.dtype), grad_lse.to(lse.dtype)])
    return output, lse, *grads


def note_deals(monkeypatch, told):
    deal = Order.deal

    def noted(order, chunks, piece=0, *, all_heads=False):
        told.append((chunks, piece, all_heads))
        deal(order, chunks, piece, all_heads=all_heads)

    monkeypatch.setattr(Order, "deal", noted)


@pytest.fixture
def dealt(monkeypatch):
    """What is told to be dealt; pieces are of 32 to 64 keys."""
    told = []
    monkeypatch.setattr(dealing, "MIN_PIECE", 32)
    monkeypatch.setattr(dealing, "MAX_PIECE", 64)
    note_deals(monkeypatch, told)
    before = torch.get_num_threads()
    forget()
    yield told
    torch.set_num_threads(before)
    forget()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "heads"), [(QUERIES, (4, 4)), (QUERIES, (4, 1)), (1, (4, 2))])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_few_queries_are_those_of_the_definition(name, queries, heads, dtype, dealt):
    if queries == 1 and name in ("documents apart", "cells", "a tensor"):
        pytest.skip("they have as many rows as there are queries")
    draw = torch.Generator().manual_seed(0)
    sizes = (heads[0], queries, 24), (heads[1], KEYS, 24), (heads[1], KEYS, 40)
    three = [torch.randn(3, *size, generator=draw).to(dtype) for size in sizes]
    if name == "cells":
        three[1][:, :, 400:475] = three[2][:, :, 400:475] = math.nan  # so that it is computed twice
    grads = torch.randn(3, heads[0], queries, 40, generator=draw), torch.randn(3, heads[0], queries, generator=draw)
    inputs = three, *grads
    expected = results(inputs, name, "reference", torch.float64)
    tolerance = 3e-2 if dtype is torch.bfloat16 else None
    if dtype is torch.float32 and name == "scores that are far":
        tolerance = 2e-3  # scores of 1e4, of 24 bits
    for threads in (5, 16):
        torch.set_num_threads(threads)
        for found, right in zip(results(inputs, name), expected, strict=True):
            assert_close(found, right.to(found.dtype), tolerance=tolerance)
    assert all(piece > 0 and chunks > 1 and not all_heads for chunks, piece, all_heads in dealt)
    assert dealt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_pieces_are_of_all_heads_that_lie_beside_one_another(name, dtype, dealt):
    """Every batch index is one thread's, or a half of its keys is, as many threads as there are."""
    draw = torch.Generator().manual_seed(0)
    sizes = (QUERIES, 4, 24), (KEYS, 2, 24), (KEYS, 2, 40)
    three = [torch.randn(3, *size, generator=draw).to(dtype).transpose(1, 2) for size in sizes]
    grads = torch.randn(3, QUERIES, 4, 40, generator=draw).transpose(1, 2), torch.randn(3, 4, QUERIES, generator=draw)
    inputs = three, *grads
    expected = results(inputs, name, "reference", torch.float64)
    tolerance = 3e-2 if dtype is torch.bfloat16 else 2e-3 if name == "scores that are far" else None
    for threads in (1, 3, 6):
        torch.set_num_threads(threads)
        for found, right in zip(results(inputs, name), expected, strict=True):
            assert_close(found, right.to(found.dtype), tolerance=tolerance)
    assert {(chunks, 0 < piece <= 32, all_heads) for chunks, piece, all_heads in dealt} == {
        (1, True, True),
        (2, True, True),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_token", [False, True])
def test_sums_that_are_too_large_for_a_thread_are_added_up_a_piece_at_a_time(dtype, by_token, dealt, monkeypatch):
    """One thread for each head. Sums are those that it makes of all keys at once, but for how dQ is rounded."""
    draw, found = torch.Generator().manual_seed(0), []
    inputs = [torch.randn(2, 2, length, 32, generator=draw).to(dtype) for length in (QUERIES, KEYS, KEYS, QUERIES)]
    if by_token:
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    usual = dealing.MIN_KEYS_OF_A_QUERY
    # by token, keys of few queries come in pieces anyway
    for most, least in ((dealing.MAX_SUMS_OF_A_THREAD, KEYS if by_token else usual), (0, usual)):
        monkeypatch.setattr(dealing, "MIN_KEYS_OF_A_QUERY", least)
        monkeypatch.setattr(dealing, "MAX_SUMS_OF_A_THREAD", most)
        monkeypatch.setattr(dealing, "MAX_SUMS_OF_THREADS", most)
        forget()
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        output = regard.attention(*leaves, mask=Causal(offset=KEYS - QUERIES), kernel="native")
        found.append(torch.autograd.grad(output, leaves, inputs[3]))
    assert [piece > 0 for _, piece, _ in dealt] == [False, True]
    for whole, pieces in zip(*found, strict=True):
        assert_close(pieces, whole, tolerance=1e-2 if dtype is torch.bfloat16 else 1e-6)
    assert all(torch.equal(*pair) for pair in list(zip(*found, strict=True))[1:])


def test_keys_are_dealt_where_they_are_many_and_queries_few(dealt, monkeypatch):
    """A square's queries are, and those of heads that are enough for all threads."""
    monkeypatch.undo()
    note_deals(monkeypatch, dealt)
    torch.set_num_threads(2)
    shapes = {
        (1, 100, 4096): (2, 1024),
        (1, 100, 1500): (2, 768),
        (1, 100, 500): (2, 0),
        (1, 2048, 2048): (2, 0),
        (2, 10, 4096): (1, 0),
    }
    for (heads, queries, keys), expected in shapes.items():
        dealt.clear()
        three = [torch.zeros(1, heads, length, 16, requires_grad=True) for length in (queries, keys, keys)]
        torch.autograd.grad(regard.attention(*three, kernel="native").sum(), three)
        assert dealt == [(*expected, False)]

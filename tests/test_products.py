"""Plain products against the definition: every stride, group, piece and dtype that the strips hand over."""

import math
from types import SimpleNamespace

import pytest
import torch

from comparing import assert_close, assert_within_budget
from regard import Alibi, Causal, Dense, Window, attention, attention_with_lse, matmul, numerics, plan, processor
from regard.kernels.strips import pieces, products, tuning
from regard.kernels.strips.plan import Kind, Strip
from regard.kernels.strips.view import StripView


def definition(query, key, value, mask, scale, causal, dtype=torch.float64):
    """Output and log-sum-exp of a few lines, and what can be differentiated."""
    query, key, value = (t.to(dtype) for t in (query, key, value))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def views(kind, heads, length, size, draw, dtype=torch.float64):
    """A tensor [batch, heads, length, size] in another layout of memory."""
    if kind == "one after another":
        return torch.randn(3, heads, length, size, dtype=dtype, generator=draw)
    if kind == "one row":
        return torch.randn(1, heads, length, size, dtype=dtype, generator=draw)
    if kind == "features of all heads together":
        return torch.randn(3, length, heads, size, dtype=dtype, generator=draw).transpose(1, 2)
    if kind == "every second":
        return torch.randn(3, heads, 2 * length, size, dtype=dtype, generator=draw)[:, :, 1::2]
    assert kind == "many rows of few heads"
    return torch.randn(heads, 7, length, size, dtype=dtype, generator=draw).transpose(0, 1)


class Adding:
    """What is added to the scores of a strip: numbers, of which nothing is learned."""

    def __init__(self, numbers):
        self.tiles, self.call, self.may_hide_all = [numbers], SimpleNamespace(wanted=[]), True


KINDS = [
    "one after another", "one row", "features of all heads together", "every second", "many rows of few heads",
]  # fmt: skip


@pytest.mark.parametrize("cells", [1 << 19, 150], ids=["at once", "in pieces"])
@pytest.mark.parametrize("masked", ["nothing", "causal", "numbers", "numbers by head"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_output_lse_and_gradients_are_those_of_the_definition(monkeypatch, kind, heads, kv_heads, masked, cells):
    monkeypatch.setattr(tuning, "PIECE_SCORES", cells)
    monkeypatch.setattr(tuning, "PIECE_QUERIES", 4)
    draw = torch.Generator().manual_seed(0)
    queries, keys = (11, 11) if masked == "causal" else (11, 17)
    query = views(kind, heads, queries, 6, draw)
    key, value = views(kind, kv_heads, keys, 6, draw), views(kind, kv_heads, keys, 5, draw)
    causal, mask = masked == "causal", None
    if masked.startswith("numbers"):
        mask = torch.randn(1, heads if masked.endswith("head") else 1, queries, keys, dtype=query.dtype, generator=draw)
        mask[..., 3:7] = -math.inf
    learning = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    right = definition(*learning, mask, 0.3, causal)
    towards = torch.randn(right[0].shape, dtype=query.dtype, generator=draw), torch.randn(right[1].shape).double()
    grads = torch.autograd.grad(right, learning, towards)
    right = [t.detach() for t in right]
    output, lse = views(kind, heads, queries, 5, draw), views(kind, heads, queries, 1, draw)[..., 0]

    formula = products.Formula(0.3, causal, added=None if mask is None else Adding(mask))
    products.attend(query, [key], [value], formula, space=pieces.Space(), output=output, lse=lse)
    assert_close(output, right[0], "output")
    assert_close(lse, right[1], "lse")

    found = [torch.ones_like(query), torch.ones_like(key), torch.zeros_like(value)]
    delta = (right[0] * towards[0]).sum(-1) - towards[1]
    products.gradients(
        towards[0], query, [key], [value], formula, space=pieces.Space(), lse=lse, delta=delta, grads=tuple(found),
    )  # fmt: skip
    for name, ours, theirs in zip(
        ("query", "key", "value"), found, (grads[0] + 1, grads[1] + 1, grads[2]), strict=True
    ):
        assert_close(ours, theirs, name)


def test_equal_parts_of_all_heads_are_one_stack_whichever_of_the_two_comes_first():
    parts = torch.arange(2 * 15 * 4).view(2, 5, 3, 4).transpose(0, 1)  # five parts of two heads
    ((_, (stack,)),) = pieces.stacks([parts], apart=False)
    assert stack.data_ptr() == parts.data_ptr()
    assert stack.flatten().tolist() == list(range(2 * 15 * 4))


@pytest.mark.parametrize("keys", [2, 3, 4, 5], ids="{} keys".format)
def test_keys_of_equal_strips_that_overlap_get_the_sum_of_all_parts(keys):
    strip = Strip(None, range(1, 3), (range(3, 3 + keys),), Kind.MASKED, times=5, step=2)
    total, part = torch.zeros(1, 2, 20, 3), torch.randn(5, 2, keys, 3)
    StripView(strip).add_to_key(total, part)
    right = torch.zeros(1, 2, 20, 3)
    for number, one in enumerate(part):
        first = 3 + 2 * number
        right[0, :, first : first + keys] += one
    assert_close(total, right)


@pytest.mark.parametrize("able", [True, False], ids=["with instructions for bfloat16", "without"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "mask",
    [None, Causal(), *(Dense(torch.rand(70, 70, generator=torch.Generator().manual_seed(n)) > 0.5) for n in (1, 56))],
    ids=["all", "causal", "cells", "cells whose lse rounds badly"],
)
def test_errors_stay_within_the_budget_of_the_plain_computation(monkeypatch, mask, dtype, able):
    monkeypatch.setattr(products, "pay", lambda *given, **more: True)
    monkeypatch.setattr(processor, "BFLOAT16", able)
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, n, 70, 32, generator=draw).to(dtype) for n in (4, 2, 2)]
    towards = torch.randn(2, 4, 70, 32, generator=draw).to(dtype)

    def answers(kernel, dtype):
        learning = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        output = attention(*learning, mask=mask, kernel=kernel)
        return output, *torch.autograd.grad(output, learning, towards.to(dtype))

    ours, plain, exact = answers("strips", dtype), answers("reference", dtype), answers("reference", torch.float64)
    lse = attention_with_lse(*leaves, mask=mask, kernel="strips").lse
    for name, *three in zip(("output", "query", "key", "value"), ours, exact, plain, strict=True):
        assert_within_budget(*three, name, lse=lse if name == "query" else None)


def test_products_suit_rows_that_are_short_and_stacks_that_are_high(monkeypatch):
    for name, value in {"MKL": True, "BFLOAT16": True, "FLOAT16": False, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)

    def suit(dtype, stack=12, rows=128, keys=512, causal=False, backward=False):
        return products.pay(dtype, stack, rows, keys, causal=causal, backward=backward)

    single, half, brain = torch.float32, torch.float16, torch.bfloat16
    assert not any(suit(single, keys=keys, causal=causal) for keys in (64, 512, 1024, 2048) for causal in (True, False))
    assert not suit(brain, rows=256, keys=256, causal=True)
    assert not suit(brain, rows=256, keys=256, causal=True, backward=True)
    assert suit(brain, stack=64, rows=256, keys=256, causal=True, backward=True)
    assert not suit(brain, rows=64, keys=64)
    assert suit(brain, rows=64, keys=64, backward=True)
    assert suit(brain, keys=2048)
    assert not suit(brain, rows=2048, keys=2048)
    assert suit(brain, rows=512, keys=512)
    assert not suit(brain, rows=512, keys=512, backward=True)
    assert suit(brain, rows=512, keys=512, causal=True, backward=True)
    assert not suit(brain, rows=1024, keys=1024)  # torch's operator takes 256 queries at a time
    assert not suit(brain, rows=1024, keys=1024, causal=True)
    assert not suit(brain, keys=4096)
    assert not suit(brain, stack=2)
    assert not suit(brain, rows=32)
    assert not suit(brain, keys=1024, causal=True, backward=True)
    assert suit(brain, keys=1024, backward=True)
    assert not suit(brain, rows=1024, keys=1024, backward=True)
    assert suit(half, stack=2)
    assert suit(half, keys=8192, backward=True)
    monkeypatch.setattr(processor, "BFLOAT16", False)
    assert suit(brain, stack=2, rows=1024, keys=1024, backward=True)  # in float32, for which there are instructions
    assert not suit(brain, rows=1024, keys=1024)
    monkeypatch.setattr(processor, "BFLOAT16", True)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: True)
    assert suit(single)
    assert suit(single, stack=1, rows=2048, keys=2048)
    assert suit(brain, keys=4096, backward=True)
    assert suit(single, rows=197, keys=197, stack=192)
    assert not suit(single, rows=197, keys=197, stack=48)  # pieces of few rows
    assert suit(brain, rows=197, keys=197, stack=48)  # of which the rest of the rows is filled up
    assert not suit(brain, rows=197, keys=197, stack=48, backward=True)
    assert suit(single, rows=333, keys=333)
    assert not suit(single, rows=64, keys=64)
    assert not suit(single, rows=32)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    monkeypatch.setattr(processor, "AMX", True)
    monkeypatch.setattr(processor, "FLOAT16", True)
    assert not suit(brain)
    assert not suit(half)


@pytest.mark.usefixtures("torch_is_faster")
@pytest.mark.parametrize(
    "parts",
    [{"bias": Alibi(8)}, {"mask": ~Window(3)}, {"bias": torch.zeros(512, 512)}],
    ids=["by distance", "mask", "table"],
)
def test_a_table_in_a_dtype_without_instructions_is_left_to_products_if_it_learns(monkeypatch, parts):
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    for name, value in {"MKL": True, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)
    leaves = [torch.randn(1, 8, 512, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    for able, kernels in ((False, {"strips", "direct"}), (True, {"sdpa", "strips"})):
        monkeypatch.setattr(processor, "BFLOAT16", able)
        assert plan(*leaves, **parts).kernel in kernels
        with torch.no_grad():
            assert plan(*leaves, **parts).kernel == "sdpa"


def test_a_causal_square_is_counted_as_it_is_computed(monkeypatch):
    single = torch.float32
    assert products.scores_of_square(256, 1, single) == 128 * 128 + 128 * 256
    assert products.scores_of_square(200, 1, single) == 128 * 128 + 64 * 192 + 8 * 200
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: True)
    assert products.scores_of_square(256, 1, single) == 128 * 128 + 128 * 256
    assert products.scores_of_square(200, 1, single) == 128 * 128 + 64 * 192 + 8 * 208
    assert products.scores_of_square(2048, 1, single) == 256 * 256 * 36  # an eighth at a time
    held = 2 * pieces.scores_at_a_time(single)
    assert products.most_scores(Strip(None, range(1 << 13), (range(1 << 13),), Kind.CAUSAL), 1, single) == held


@pytest.mark.parametrize("shape", [(1, 3, 50, 8), (5, 2, 40, 8), (2, 1, 0, 8), (3, 4, 10, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_products_of_rows_are_summed_a_few_heads_at_a_time(monkeypatch, shape, dtype):
    monkeypatch.setattr(numerics, "MAX_BETWEEN", 700)
    first, second = (torch.randn(shape[0], shape[2], shape[1], shape[3]).to(dtype).transpose(1, 2) for _ in range(2))
    right = (first.double() * second.double()).sum(-1)
    found = numerics.row_products(first, second)
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-5)

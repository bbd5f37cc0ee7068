"""The strips kernel's own promises: strips hold every allowed cell once, skip what is empty, and add up."""

import inspect
import math
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise, product

import pytest
import torch
from torch import library

from cases import needs_library
from comparing import assert_close, assert_within_budget
from lowered import looking
from regard import (
    Alibi,
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    Mask,
    Padding,
    Prefix,
    RelativeBias,
    Strided,
    Where,
    Window,
    attention,
    attention_with_lse,
    checked,
    matmul,
    plan,
    processor,
)
from regard.biases import Bias, Given
from regard.kernels import choose, fused
from regard.kernels.strips import alone, engine, grouping, native, products, residues, tuning
from regard.kernels.strips import compiled as compiled_strips
from regard.kernels.strips import kernel as strips_kernel
from regard.kernels.strips import plan as plans
from regard.kernels.strips.added import AddedToStrip
from regard.kernels.strips.compiled import in_graph
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.options import plan_of
from regard.kernels.strips.plan import Kind, PlanOptions, Strip
from regard.kernels.strips.reordering import reordering
from regard.masks import EVERYTHING
from regard.rules import deserialise
from regard.shapes import Grid, ShapeError
from regard.validation import check_call

BATCH, HEADS, KV_HEADS, QUERY_LEN, KEY_LEN, HEAD_DIM, VALUE_DIM = 2, 6, 3, 37, 53, 7, 5

MASKS = [
    None, Causal(), Causal(offset=0), Causal(offset=-20), Window(5), Causal() & Window(7), Causal() | Prefix(3),
    Causal() & (Window(4) | Prefix(3)), Padding([5, 53]), Padding([0, 9]), Strided(3) & Causal(), Chunk(4),
    Chunk(11, offset=3) & Causal(offset=3), ~Causal(), Band(2, 3, offset=[1, 4]), Prefix([0, 30]),
    Where(lambda batch, head, query, key: (query + key + head + batch) % 3 == 0),
    Padding([7, 9]) & Where(lambda batch, head, query, key: (query + key + batch) % 3 == 0),
    Document(torch.randint(0, 3, (2, 37)), torch.randint(0, 4, (2, 53))),
    Dense(torch.rand(2, 6, 37, 53, generator=torch.Generator().manual_seed(0)) > 0.7),
    Causal(offset=0) & Document(torch.arange(37) // 9, torch.arange(53) // 9),
]  # fmt: skip
EXTRAS = [{}, {"sink": True}, {"softcap": 2.0}, {"bias": Alibi(HEADS)}, {"dropout": 0.3}]


@pytest.fixture
def small(monkeypatch):
    """Strips so small that short lengths have many of them."""
    monkeypatch.setattr(tuning, "MAX_STRIP_QUERIES", 16)
    monkeypatch.setattr(tuning, "KEY_STEP", 8)
    monkeypatch.setattr(tuning, "MIN_STRIP_QUERIES", 4)


def cells(strips, mask, grid):
    """How often each cell is computed, and whether the strip's own mask lets it through: [batch, query, key]."""
    times = torch.zeros(grid.batch, grid.query_len, grid.key_len, dtype=torch.int64)
    for strip in strips:
        rows = range(grid.batch) if strip.batch_index is None else [strip.batch_index]
        for n, span in product(range(strip.times), strip.spans):
            moves = n * strip.step if span is strip.spans[-1] else 0  # keys before the last span are shared
            queries, keys = [at + n * strip.step for at in strip.queries], [at + moves for at in span]
            places = torch.meshgrid(
                *(torch.tensor(axis, dtype=torch.int64) for axis in (list(rows), queries, keys)), indexing="ij"
            )
            times[tuple(places)] += 1
    allowed = mask.allowed(range(grid.query_len), range(grid.key_len)).any(dim=1)
    return times, allowed.expand(grid.batch, grid.query_len, grid.key_len)


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask is not None], ids=repr)
def test_every_allowed_cell_is_in_exactly_one_strip_and_full_strips_hold_nothing_else(small, mask):
    tensors = (
        torch.zeros(BATCH, n, length, 8) for n, length in ((HEADS, QUERY_LEN), (KV_HEADS, KEY_LEN), (KV_HEADS, KEY_LEN))
    )
    call = check_call("test", *tensors, mask, None, None, None, None, None, 0.0, None, False)
    found = tuple(plan_of(call).strips)
    times, allowed = cells(found, call.scoring.mask, call.scoring.grid)
    assert times.max() <= 1
    assert (times[allowed] == 1).all()
    for strip in found:
        inside = allowed[slice(None) if strip.batch_index is None else slice(strip.batch_index, strip.batch_index + 1)]
        inside = inside[:, list(strip.queries)][..., [key for span in strip.spans for key in span]]
        if strip.kind is Kind.FULL:
            assert inside.all()
        if strip.kind is Kind.CAUSAL:
            assert torch.equal(inside, torch.ones_like(inside).tril())


@pytest.fixture(params=["flash", "products"])
def operator(request, monkeypatch):
    """What the fused engine computes strips by."""
    monkeypatch.setattr(products, "pay", lambda *given, **more: request.param == "products")
    monkeypatch.setattr(tuning, "PIECE_QUERIES", 4)
    monkeypatch.setattr(tuning, "PIECE_SCORES", 200)


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "".join(extra) or "nothing")
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_strips_add_up_to_the_reference_forward_and_backward_and_through_lse(small, operator, mask, extra):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=draw)

    leaves = [
        normal(BATCH, HEADS, QUERY_LEN, HEAD_DIM),
        normal(BATCH, KV_HEADS, KEY_LEN, HEAD_DIM),
        normal(BATCH, KV_HEADS, KEY_LEN, VALUE_DIM),
    ]
    extra = dict(extra)
    if "sink" in extra:
        extra["sink"] = normal(HEADS)
        leaves.append(extra["sink"])
    for leaf in leaves:
        leaf.requires_grad_()
    towards = normal(BATCH, HEADS, QUERY_LEN, VALUE_DIM), normal(BATCH, HEADS, QUERY_LEN)

    def answers(kernel):
        seed = torch.Generator().manual_seed(3)
        output, lse = attention_with_lse(*leaves[:3], mask=mask, kernel=kernel, generator=seed, **extra)
        loss = (output * towards[0]).sum() + (lse.masked_fill(lse.isinf(), 0.0) * towards[1]).sum()
        return [output, lse, *torch.autograd.grad(loss, leaves)]

    for name, ours, right in zip(
        ("output", "lse", "query", "key", "value", "sink"), answers("strips"), answers("reference"), strict=False
    ):
        assert_close(ours, right, name, tolerance=1e-12 * max(1.0, float(right[right.isfinite()].detach().abs().max())))


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask is not None and mask.varies_by_batch], ids=repr)
def test_the_mask_of_one_row_is_that_row_of_the_mask(mask):
    grid = Grid(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    whole = mask.bind(grid).allowed(range(QUERY_LEN), range(KEY_LEN)).expand(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    for row in range(BATCH):
        alone = mask.for_batch(row).bind(grid._replace(batch=1)).allowed(range(QUERY_LEN), range(KEY_LEN))
        assert torch.equal(alone.expand(1, HEADS, QUERY_LEN, KEY_LEN)[0], whole[row])


@pytest.mark.usefixtures("without_the_library")
def test_a_window_costs_its_width_and_not_the_length():
    tensors = torch.zeros(3, 1, 1, 1, 1).expand(3, 1, 1, 1 << 17, 8)  # nothing of that length is written anywhere
    call = check_call("test", *tensors, Causal() & Window(256), None, None, None, None, None, 0.0, None, False)
    assert choose(call).name == "strips"
    computed = strips_kernel.num_scores(call)
    # a strip of ROWS queries needs the window before it, rounded up to whole tiles
    assert computed <= (1 << 17) * (tuning.MAX_STRIP_QUERIES + 256 + tuning.KEY_STEP)
    assert computed >= (1 << 17) * 256 - 256 * 256


def strips_of(length, heads=1, **given):
    """The strips of a call, each as queries and keys."""
    tensors = torch.zeros(3, 1, 1, 1, 1).expand(3, 1, heads, length, 8)
    mask, bias = given.get("mask"), given.get("bias")
    call = check_call("test", *tensors, mask, bias, None, None, None, None, 0.0, None, False)
    return [(len(strip.queries), strip.keys) for strip in plan_of(call).strips]


def test_neighbours_with_the_same_keys_are_one_strip_where_the_numbers_to_add_exist(monkeypatch):
    length = 4 * tuning.MAX_STRIP_QUERIES
    bias, half = torch.zeros(length, length), torch.rand(length, length) < 0.5
    assert strips_of(length, bias=bias) == strips_of(length, mask=Dense(half)) == [(length, length)]
    assert len(strips_of(length, bias=bias, mask=Dense(half))) == 4  # a sum of the two is made strip by strip
    assert len(strips_of(length, bias=Alibi(1) + bias)) == 4
    below = strips_of(length, mask=Dense(half.tril()))
    assert len({keys for _, keys in below}) == len(below) > 3  # each sees other keys
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 2 * tuning.MAX_STRIP_QUERIES * length)
    assert len(strips_of(length, mask=Dense(half.clone()))) == 2


def test_strips_with_numbers_of_their_own_are_as_high_for_long_texts_where_a_window_leaves_few_keys():
    """How many numbers a strip holds depends on the keys it sees, and not on those that there are."""
    window, near = Causal() & Window(64), Where(lambda batch, head, query, key: query // 64 == key // 64)
    for mask, bias in ((window, torch.zeros(1, 1, 1, 1)), (near & window, None)):
        short, long = (
            {
                high
                for high, _ in strips_of(
                    length, heads=64, mask=mask, bias=None if bias is None else bias.expand(1, 1, length, length)
                )
            }
            for length in (512, 1 << 14)
        )
        assert short == long, mask


def test_strips_are_low_where_that_computes_fewer_scores_whatever_mask_and_bias_are():
    length = 2048
    blocks = torch.rand(length // 64, length // 64, generator=torch.Generator().manual_seed(0)) < 0.2
    blocks = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
    near = Where(lambda batch, head, query, key: query // 128 == key // 128)
    numbers = torch.zeros(length, length)
    for given, most in (
        ({"mask": Dense(blocks)}, int(blocks.sum())),
        ({"mask": near}, 128 * length),
        ({"mask": near, "bias": numbers}, 128 * length),
        ({"mask": Causal() & Window(64), "bias": numbers}, 3 * 64 * length),
        ({"mask": Causal() & Window(64), "bias": Alibi(16) + numbers}, 3 * 64 * length),
        ({"mask": Causal() & Chunk(100), "bias": numbers}, 140 * length),
    ):
        assert sum(queries * keys for queries, keys in strips_of(length, heads=16, **given)) <= most, given


def test_packed_causal_documents_are_one_causal_call_each():
    lengths = [300, 70, 700, 142]
    tensors = torch.zeros(3, 1, 2, sum(lengths), 8)
    mask = Causal() & Document.from_lengths(lengths)
    call = check_call("test", *tensors, mask, None, None, None, None, None, 0.0, None, False)
    found = plan_of(call).strips
    assert [len(strip.queries) for strip in found] == lengths
    assert all(strip.kind is Kind.CAUSAL and strip.spans == (strip.queries,) for strip in found)


@pytest.mark.parametrize(
    "mask", [Causal() & Document.from_lengths([16] * 6), Document.from_lengths([16] * 6)], ids=repr
)
def test_equal_packed_documents_are_one_call_of_torchs_operator_forward_and_backward(monkeypatch, mask):
    calls = []

    def counted(name, real):
        return lambda *tensors, **more: [calls.append(name), real(*tensors, **more)][1]

    for name in ("flash", "flash_backward"):
        monkeypatch.setattr(fused, name, counted(name, vars(fused)[name]))
    given = torch.randn(1, 2, 96, 8)
    found = []
    for kernel in ("strips", "reference"):
        tensors = [torch.randn(1, 2, 96, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        leaves = [tensor.requires_grad_() for tensor in tensors]
        output, lse = attention_with_lse(*leaves, mask=mask, kernel=kernel)
        found.append([output, lse, *torch.autograd.grad([output, lse], leaves, [given, given[..., 0]])])
    assert calls == ["flash", "flash_backward"]
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)


def test_documents_of_which_some_are_equal_and_some_are_not_lie_in_their_places():
    lengths = [16, 16, 16, 70, 20, 20, 9, 16, 16]
    tensors = [torch.randn(1, 3, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = Causal() & Document.from_lengths(lengths)
    call = check_call("test", *tensors, mask, *[None] * 5, 0.0, None, False)
    assert sorted(strip.times for strip in plan_of(call).apart.strips)[-1] > 1
    given = torch.randn(1, 3, sum(lengths), 8, dtype=torch.float64)
    found = []
    for kernel in ("strips", "reference"):
        output = attention(*tensors, mask=mask, kernel=kernel)
        found.append([output, *torch.autograd.grad(output, tensors, given)])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)


def test_gradients_by_strips_are_made_ready_without_reading_the_signature_of_a_function(monkeypatch):
    tensors = [normal(1, 2, 64, 8).detach().requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(attention(*tensors, mask=Window(9), kernel="strips").sum(), tensors)
    monkeypatch.setattr(inspect, "signature", lambda function: pytest.fail(f"the signature of {function} is read"))
    found = torch.autograd.grad(attention(*tensors, mask=Window(9), kernel="strips").sum(), tensors)
    for ours, right in zip(found, expected, strict=True):
        assert_close(ours, right)


@pytest.mark.usefixtures("without_the_library")
def test_a_causal_square_that_torch_would_compute_whole_is_computed_a_few_rows_at_a_time_where_torch_is_slow(
    monkeypatch,
):
    def found(heads=8, length=512, dtype=torch.bfloat16):
        tensors = torch.zeros(3, 1, heads, length, 8, dtype=dtype)
        call = check_call("test", *tensors, Causal(), *[None] * 5, 0.0, None, False)
        return choose(call).name, strips_kernel.num_scores(call) / (heads * length**2)

    for name, value in {"MKL": True, "BFLOAT16": True, "FLOAT16": False, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    assert found() == ("strips", 5 / 8)
    assert found(heads=4) == ("sdpa", 1)  # a stack of few heads
    assert found(length=1024) == ("sdpa", 3 / 4)  # 256 queries at a time
    assert found(dtype=torch.float32) == found(dtype=torch.float64) == ("sdpa", 1)
    # torch leaves out blocks of 512 keys that its 256 queries do not see
    assert found(length=2048, dtype=torch.float32) == ("sdpa", 5 / 8)
    monkeypatch.setattr(processor, "MKL", False)
    assert found() == ("sdpa", 1)


def test_strips_are_lower_where_keys_move_on_with_the_queries_and_high_where_they_stay(monkeypatch):
    monkeypatch.setattr(processor, "AMX", False)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    query = torch.zeros(1, 12, 4096, 64)

    def heights(mask, dtype=torch.float32, learns=False):
        q = query.to(dtype).requires_grad_(learns)
        call = check_call("test", q, q, q, mask, None, None, None, None, None, 0.0, None, False)
        return {len(strip.queries) for strip in plan_of(call).strips}

    assert heights(Causal() & Window(32)) == {32}
    assert heights(Causal() & Window(600)) == {64}
    assert heights(Causal() & Window(600), learns=True) == {128}  # gradients of every strip's keys are added up
    assert heights(Window(2000)) == {256}
    assert heights(Prefix(700)) == {4096}  # who sees the same keys is one strip
    assert heights(Causal() | Prefix(3000)) == {3000, 1096}
    assert heights(Causal() & Window(300), torch.bfloat16) == {64}
    assert heights(Causal() & Window(2000), torch.bfloat16) == {256}
    monkeypatch.setattr(processor, "AMX", True)  # a call takes as long as four times as many scores
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: dtype is torch.bfloat16)
    assert heights(Causal() & Window(300), torch.bfloat16) == {128}


ALIKE = {
    "window": Causal(offset=0) & Window(5, offset=0),
    "both ways": Window(6, offset=3),
    "documents of one length": Causal() & Document(torch.arange(64)[None] // 16),
    "documents of two lengths": Document(torch.tensor([0] * 8 + [1] * 8 + [2] * 20 + [3] * 8 + [4] * 20)[None]),
    "chunks": Chunk(8),
    "chunks, causal": Chunk(16) & Causal(),
    "a window and chunks": Causal() & (Window(4) | Chunk(16)),
    "the first keys and the last": Causal(offset=0) & (Window(5, offset=0) | Prefix(3)),
    "many first keys and the last": Causal(offset=0) & (Window(5, offset=0) | Prefix(9)),
    "every fourth": Causal(offset=0) & Strided(4),
    "every second, near": Causal() & Window(20) & Strided(2),
    "cells": Chunk(8) & Where(lambda batch, head, query, key: (query % 8) * 3 >= key % 8),
}


@pytest.mark.parametrize("mask", ALIKE.values(), ids=ALIKE.keys())
@pytest.mark.parametrize("sink", [False, True])
def test_strips_that_are_alike_are_one_call_and_add_up(small, operator, mask, sink):
    query, key, value = (torch.randn(1, n, 64, 7, dtype=torch.float64) for n in (4, 2, 2))
    given = {"mask": mask, "sink": torch.randn(4, dtype=torch.float64).requires_grad_() if sink else None}
    learning = [t.requires_grad_() for t in (query, key, value)] + ([given["sink"]] if sink else [])
    call = check_call("test", query, key, value, mask, None, None, None, None, None, 0.0, None, True)
    strips = tuple(plan_of(call).strips)
    if call.scoring.mask.closed_form:  # others are looked at as they are computed, one after another
        assert max(strip.times for strip in strips) > 1
    times, allowed = cells(strips, call.scoring.mask, call.scoring.grid)
    assert bool((times[allowed] == 1).all())
    found = []
    for kernel in ("strips", "reference"):
        output, lse = attention_with_lse(query, key, value, **given, kernel=kernel)
        loss = output.sin().sum() + lse.nan_to_num(neginf=0.0).cos().sum()
        found.append([output, lse, *torch.autograd.grad(loss, learning)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 70, 1), (2, 1, 1), (1, 1, 70)], ids=str)
@pytest.mark.parametrize("mask", [None, Causal(), Window(20)], ids=repr)
@pytest.mark.parametrize("given", [{}, {"softcap": 3.0}, {"sink": torch.ones(2)}], ids=lambda given: "".join(given))
def test_a_bias_that_is_one_number_for_all_keys_or_queries_is_added_to_every_score(operator, shape, mask, given):
    query, key, value = (torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(3))
    given = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    bias = torch.randn(shape, dtype=torch.float64)
    found = [
        attention_with_lse(query, key, value, mask=mask, bias=bias, **given, kernel=kernel)
        for kernel in ("strips", "reference")
    ]
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_keys_that_all_see_are_a_strip_of_their_own_which_joins(monkeypatch):
    query = torch.zeros(1, 12, 4096, 8)

    def found(mask, key_len=4096):
        key = torch.zeros(1, 12, key_len, 8)
        call = check_call("test", query, key, key, mask, None, None, None, None, None, 0.0, None, False)
        return plan_of(call).strips

    assert found(Causal() | Prefix(1000)) == (
        Strip(None, range(1000), (range(1000),), Kind.FULL),
        Strip(None, range(1000, 4096), (range(1000, 4096),), Kind.CAUSAL),
        Strip(None, range(1000, 4096), (range(1000),), Kind.FULL, merges=True),
    )
    assert found(Causal(), 5000) == (  # later tokens and those that they follow
        Strip(None, range(4096), (range(904, 5000),), Kind.CAUSAL),
        Strip(None, range(4096), (range(904),), Kind.FULL, merges=True),
    )
    streaming = found(Causal() & (Window(256) | Prefix(100)))
    joining = [strip for strip in streaming if strip.merges]
    assert {strip.spans for strip in joining} == {(range(100),)}
    assert sum(len(strip.queries) for strip in joining) > 3500
    assert len(streaming) < 30
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: True)
    few = found(Causal() & (Window(256) | Prefix(4)))  # copied beside the others, as oneDNN wants them
    assert not any(strip.merges for strip in few)
    assert {strip.spans[0] for strip in few if strip.times > 1} == {range(4)}
    assert len(few) < 20
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    few = found(Causal() & (Window(256) | Prefix(5)))  # which are read where they are
    assert {strip.spans for strip in few if strip.merges} == {(range(5),)}
    assert {len(strip.spans) for strip in few if strip.times > 1} == {1}
    strided = found(Causal() & Strided(8))
    assert [(strip.times, strip.step, strip.queries.step, strip.kind is Kind.CAUSAL) for strip in strided] == [
        (8, 1, 8, True)
    ]


@pytest.mark.parametrize("key_len", [64, 81, 100])
@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.parametrize("rest", [None, Causal(), Window(30), Causal() & Window(11), Document(torch.arange(100) // 30)])
def test_strided_masks_with_keys_before_the_queries_add_up(small, operator, rest, step, key_len):
    if isinstance(rest, Document):
        rest = Document(torch.arange(64) // 30, torch.arange(key_len) // 30)
    mask = Strided(step) if rest is None else Strided(step) & rest
    query, key, value = (torch.randn(2, n, t, 7, dtype=torch.float64) for n, t in ((4, 64), (2, key_len), (2, key_len)))
    learning = [t.requires_grad_() for t in (query, key, value)]
    found = []
    for kernel in ("strips", "reference"):
        output, lse = attention_with_lse(query, key, value, mask=mask, kernel=kernel)
        loss = output.sin().sum() + lse.nan_to_num(neginf=0.0).cos().sum()
        found.append([output, lse, *torch.autograd.grad(loss, learning)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_results_that_are_merged_stay_within_the_budget_in_half_precision():
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        leaves = [torch.randn(1, 2, 600, 16, generator=draw).to(dtype) for _ in range(3)]

        def answers(kernel, dtype, leaves=leaves):
            learning = [leaf.to(dtype).requires_grad_() for leaf in leaves]
            output = attention(*learning, mask=Causal() | Prefix(300), kernel=kernel)
            return output, *torch.autograd.grad(output.square().sum(), learning)

        ours, plain, exact = answers("strips", dtype), answers("reference", dtype), answers("reference", torch.float64)
        for three in zip(ours, exact, plain, strict=True):
            assert_within_budget(*three)


class Sloped(Bias):
    """A bias that says of every score by itself what it is."""

    def rule(self, batch, head, query, key):
        return -(2.0 ** -(head + 1)) * (query - key).abs()


@pytest.fixture
def built(monkeypatch):
    """The numbers that are made to be added to scores, tile by tile."""
    found = []
    tiles = AddedToStrip.tiles.fget

    def watched(self):
        if self._tiles is None:
            found.extend(tiles(self))
        return tiles(self)

    monkeypatch.setattr(AddedToStrip, "tiles", property(watched))
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 1 << 17)
    return found


@pytest.mark.parametrize("mask", [None, Causal(), Causal() | Prefix(500), Window(64), Strided(4)], ids=repr)
@pytest.mark.parametrize("bias", [Alibi(4), Sloped()], ids=["by distance", "of ones own"])
def test_biases_are_built_for_a_few_rows_at_a_time(built, mask, bias):
    query = torch.randn(1, 4, 2000, 8)
    with torch.no_grad():
        output = attention(query, query, query, mask=mask, bias=bias, kernel="strips")
    most = max((numbers.numel() for numbers in built), default=0)
    assert most <= 1 << 17
    assert_close(output, attention(query, query, query, mask=mask, bias=bias, kernel="reference"))
    call = check_call("test", query, query, query, mask, bias, *[None] * 4, 0.0, None, False)
    assert strips_kernel.peak_bytes(call) > 4 * most


def test_a_bias_by_distance_is_one_row_of_numbers_and_no_tile(built):
    query, key, value = (torch.randn(2, 4, n, 8, dtype=torch.float64).requires_grad_() for n in (300, 350, 350))
    for mask in (None, Causal(), Causal() & Window(40)):
        found = []
        for kernel in ("strips", "reference"):
            given = {"mask": mask, "bias": RelativeBias(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))}
            output, lse = attention_with_lse(query, key, value, kernel=kernel, **given)
            found.append([output, lse, *torch.autograd.grad(output.sin().sum() + lse.cos().sum(), (query, key, value))])
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)
    assert built == []


def test_hidden_keys_of_strips_that_are_alike_reach_nothing(small):
    query, value = torch.randn(2, 1, 2, 64, 4).unbind()
    mask = Chunk(8) & Where(lambda batch, head, query, key: key % 8 != 3)
    clean = attention_with_lse(query, query, value, mask=mask, kernel="reference")
    value = value.clone()
    value[:, :, 3::8] = math.nan
    for ours, theirs in zip(attention_with_lse(query, query, value, mask=mask, kernel="strips"), clean, strict=True):
        assert_close(ours, theirs)


ODD_AND_EVEN = Where(lambda batch, head, query, key: (query // 16 % 2 == 0) | (key == query))


@pytest.mark.parametrize(
    "mask",
    [
        Prefix(8) | (Window(3) & ODD_AND_EVEN),  # strips that are alike, and others between them
        # the second half's strips are alike in all but what they hide
        Window(4) | (Window(7) & Document(torch.arange(256) // 128, torch.ones(272, dtype=torch.int64))),
        Causal(offset=0) | ~Prefix(256),  # a causal square, and keys after it
        Causal() | Prefix(100),
        Causal() & (Window(30) | Prefix(3)),
    ],
    ids=repr,
)
def test_strips_that_are_not_quite_alike_stay_apart(small, operator, mask):
    query, key, value = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (256, 272, 272))
    ours, right = (attention(query, key, value, mask=mask, kernel=kernel) for kernel in ("strips", "reference"))
    assert_close(ours, right)


@pytest.mark.parametrize("offset", [-7, 0, 3])
@pytest.mark.parametrize("band", [(None, 0), (9, 0), (3, 4), (None, None), (5, None), (0, 2)])
def test_a_band_on_every_third_query_and_key_is_a_band(band, offset):
    mask = Band(*band, offset=offset).bind(Grid(1, 1, 40, 50))
    for queries, keys in ((range(0, 40, 3), range(1, 50, 3)), (range(2, 40, 3), range(0, 50, 3))):
        found = residues._thinned(mask, queries, keys).bind(Grid(1, 1, len(queries), len(keys)))
        right = mask.allowed(range(40), range(50))[..., queries.start :: 3, keys.start :: 3]
        assert torch.equal(found.allowed(range(len(queries)), range(len(keys))), right)


@pytest.mark.parametrize("number", [math.nan, math.inf, 3e38, -3e38])
@pytest.mark.parametrize("mask", [Window(9), Causal() & (Window(9) | Prefix(3)), Chunk(40)], ids=repr)
def test_whatever_stands_in_hidden_keys_and_values_reaches_nothing(small, operator, mask, number):
    query, key, value = torch.randn(3, 1, 2, 320, 8, generator=torch.Generator().manual_seed(0)).unbind()
    real = torch.arange(320) % 50 != 7
    found = []
    for fill in (0.0, number):
        learning = [t.clone().masked_fill_(~real[:, None], fill).requires_grad_() for t in (key, value)]
        learning.append(query.clone().requires_grad_())
        output, lse = attention_with_lse(learning[2], *learning[:2], mask=mask & Padding(real[None]), kernel="strips")
        found.append([output, lse, *torch.autograd.grad(output.square().sum() + lse.sum(), learning)])
    for clean, ours in zip(*found, strict=True):
        assert_close(ours, clean)


def test_as_many_strips_are_computed_together_as_stay_in_the_cache():
    def times(heads):
        query = torch.zeros(1, heads, 4096, 8)
        call = check_call("test", query, query, query, Window(100), None, None, None, None, None, 0.0, None, False)
        return max(len(strip.queries) * strip.times * heads for strip in plan_of(call).strips)

    assert times(1) > 3000
    assert 4000 < times(8) < tuning.MAX_KEYS_TOGETHER  # whose keys overlap
    assert times(2048) == 32 * 2048  # one strip


def test_padded_rows_cost_what_they_hold_on_either_side():
    query = torch.zeros(2, 3, 300, 8)

    def strips(mask):
        call = check_call("test", query, query, query, mask, None, None, None, None, None, 0.0, None, False)
        return [(s.batch_index, s.queries, s.spans, s.kind) for s in plan_of(call).strips if s.keys]

    assert strips(Padding([100, 300])) == [
        (0, range(300), (range(100),), Kind.FULL),
        (1, range(300), (range(300),), Kind.FULL),
    ]
    assert strips(Causal() & Padding([100, 300])) == [
        (0, range(100), (range(100),), Kind.CAUSAL),
        (0, range(100, 300), (range(100),), Kind.FULL),
        (1, range(300), (range(300),), Kind.CAUSAL),
    ]
    left = torch.arange(300)[None] >= torch.tensor([[70], [0]])
    assert strips(Causal() & Padding(left)) == [
        (0, range(70, 300), (range(70, 300),), Kind.CAUSAL),
        (1, range(300), (range(300),), Kind.CAUSAL),
    ]
    assert strips(Document(torch.arange(300)[None] // 150)) == [
        (None, range(150), (range(150),), Kind.FULL),
        (None, range(150, 300), (range(150, 300),), Kind.FULL),
    ]


def test_a_rule_that_has_to_be_asked_is_not_asked_for_more_than_its_strips(monkeypatch):
    asked = []

    def rule(batch, head, query, key):
        asked.append(query.numel() * key.numel())
        return (query - key) % 2 == 0

    query = torch.zeros(1, 1, 512, 4)
    call = check_call("test", query, query, query, Where(rule), None, None, None, None, None, 0.0, None, False)
    asked.clear()
    plan_of(call)
    assert sum(asked) < 40 * 512 * 512


def test_a_torch_without_the_operator_runs_on_plain_products(monkeypatch):
    assert fused.FLASH
    query = torch.randn(1, 2, 40, 8)
    mask = Causal() & Window(5)
    right = attention_with_lse(query, query, query, mask=mask)
    with monkeypatch.context() as without:
        for name in ("flash", "flash_backward"):
            without.delattr(fused, name)
        without.setattr(fused, "FLASH", False)
        for ours, expected in zip(attention_with_lse(query, query, query, mask=mask), right, strict=True):
            assert_close(ours, expected)

    class Changed:
        """An operator that has forgotten its mask."""

        def __init__(self, aten):
            self.aten = aten

        def __getattr__(self, name):
            operator = getattr(self.aten, name)
            return lambda *arguments, attn_mask, **more: operator(*arguments, **more)

    class Ops:
        aten = Changed(torch.ops.aten)

    monkeypatch.setattr(torch, "ops", Ops)
    assert not fused.is_as_expected()
    monkeypatch.setattr(Ops, "aten", object())
    assert not fused.is_as_expected()


FORKING = """
import os, torch
from regard import attention
child = os.fork()
if not child:
    torch.set_num_threads(2)
    attention(*torch.zeros(3, 1, 12, 512, 64))
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_process_that_is_forked_after_the_import_can_compute():
    assert subprocess.run([sys.executable, "-c", FORKING], timeout=30).returncode == 0


@pytest.mark.parametrize("step", [3, 37])
@pytest.mark.parametrize("offset", [0, 5, -200])
def test_a_strided_mask_costs_the_share_of_the_keys_that_it_allows(step, offset):
    length = 512
    mask = Strided(step, offset)
    call = check_call("test", *torch.zeros(3, 1, 1, length, 8), mask, *[None] * 5, 0.0, None, False)
    assert strips_kernel.num_scores(call) == mask.allowed(range(length), range(length)).sum()


@pytest.mark.parametrize("lengths", [[3, 5, 2, 9, 1], [40, 2, 2, 2, 60], [1] * 30, [6] * 9, [12, 1, 12, 1, 2, 3, 12]])
def test_short_documents_share_a_strip_while_what_they_compute_in_vain_costs_less_than_one(small, lengths):
    length, cost = sum(lengths), 40.0
    mask = (Causal() & Document.from_lengths(lengths)).bind(Grid(1, 1, length, length))
    found = [*plans.cut(mask, length, length, by=PlanOptions(scores_per_call=cost))]
    ends = [*accumulate(lengths)]
    documents = [
        [n for n, end in enumerate(ends) if end - lengths[n] < s.queries.stop and end > s.queries.start] for s in found
    ]
    assert sorted({n for inside in documents for n in inside}) == [*range(len(lengths))]
    for strip, inside in zip(found, documents, strict=True):
        if len(inside) == 1 and len(strip.queries) == lengths[inside[0]] > 1:
            assert strip.kind is Kind.CAUSAL  # it needs no mask
        for n in range(1, len(inside)):
            assert 2 * sum(lengths[m] for m in inside[:n]) * lengths[inside[n]] <= cost
    for (one, before), (other, after) in pairwise(zip(found, documents, strict=True)):
        if before != after:
            tall = sum(lengths[m] for m in before)
            join = 2 * tall * lengths[after[0]] <= cost and tall < 4
            assert not join or len(one.queries) + len(other.queries) > 16


@pytest.mark.parametrize("wide", [32, 992])
def test_keys_that_nobody_sees_are_left_out_only_if_they_are_more_than_others_to_copy(wide):
    allowed = torch.rand(512, 2048) > 0.5
    allowed[:, 512 : 512 + wide] = False
    mask = Dense(allowed).bind(Grid(1, 1, 512, 2048))
    found = [*plans.cut(mask, 512, 2048, by=PlanOptions(3.0))]
    seen = (range(2048),) if wide == 32 else (range(512), range(512 + wide, 2048))
    assert {strip.spans for strip in found} == {seen}
    for strip in found:
        part = [allowed[strip.queries.start : strip.queries.stop, span.start : span.stop] for span in strip.spans]
        assert torch.equal(strip.allowed[0, 0], torch.cat(part, dim=1))


def packed(rows, length=90, kv_heads=2, dtype=torch.float64, seed=0):
    """Query, key and value, and the ids of documents of 3 to 20 tokens, others in each row."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(3, 20, (length,), generator=draw) for _ in range(rows)])
    ids = torch.stack([torch.repeat_interleave(torch.arange(length), lengths)[:length] for lengths in ids])
    tensors = [torch.randn(rows, heads, length, 8, generator=draw, dtype=dtype) for heads in (4, kv_heads, kv_heads)]
    return [tensor.requires_grad_() for tensor in tensors], ids


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mask", [EVERYTHING, Causal()], ids=["both ways", "causal"])
@pytest.mark.parametrize("parts", [{}, {"sink": True}, {"value_dim": True}, {"kv_heads": True}], ids=str)
def test_packed_documents_are_calls_of_torchs_operator_whose_results_lie_side_by_side(rows, mask, parts, monkeypatch):
    tensors, ids = packed(rows, kv_heads=1 if "kv_heads" in parts else 4)
    mask = mask & Document(ids)
    more = {"sink": torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()} if "sink" in parts else {}
    if "value_dim" in parts:
        tensors[2] = tensors[2].detach()[..., :5].requires_grad_()
    grads, calls = [], []
    # what has room for biases, several spans and merging is not taken
    monkeypatch.setattr(engine, "Part", lambda *given: pytest.fail("not by torch's operator alone"))
    monkeypatch.setattr(engine, "products_pay", lambda *given, **how: False)
    flash = fused.flash
    monkeypatch.setattr(fused, "flash", lambda *given, **how: (calls.append(given), flash(*given, **how))[1])
    for name in ("strips", "reference"):
        output, lse = attention_with_lse(*tensors, mask=mask, kernel=name, **more)
        learned = [*tensors, *more.values()]
        grads.append([output, lse, *torch.autograd.grad((output.sin().sum() + lse.cos().sum()), learned)])
    assert 1 < len(calls) <= len(torch.cat([row.unique(return_counts=True)[1] for row in ids]))
    for one, other in zip(*grads, strict=True):
        assert_close(one, other)


def test_what_is_hidden_among_packed_documents_reaches_none_of_them():
    tensors, ids = packed(1)
    keys = ids.clone()
    keys[0, 40] = 1000  # seen by no query
    mask, found = Causal() & Document(ids, keys), []
    strips = plan_of(check_call("test", *tensors, mask, *[None] * 5)).strips
    assert any(strip.kind is Kind.MASKED and 40 in strip.spans[0] for strip in strips)
    for number in (0.0, math.nan):
        given = [tensor.detach().clone() for tensor in tensors]
        for tensor in given[1:]:
            tensor[:, :, 40] = number
        output = attention(*(tensor.requires_grad_() for tensor in given), mask=mask, kernel="strips")
        output.sum().backward()
        found.append([output, *(tensor.grad for tensor in given)])
    for clean, beside in zip(*found, strict=True):
        assert_close(beside, clean)


def test_documents_that_share_a_strip_are_compared_with_each_other_alone():
    tensors, ids = packed(2)
    found = plan_of(check_call("test", *tensors, Document(ids) & Causal(), *[None] * 5)).strips
    shared = [strip for strip in found if strip.kind is Kind.MASKED]
    assert shared
    assert all(strip.spans == (strip.queries,) for strip in shared)


def test_gradients_of_gradients_of_packed_documents_are_those_of_the_reference():
    tensors, ids = packed(1, length=40)
    found = []
    for name in ("strips", "reference"):
        output = attention(*tensors, mask=Causal() & Document(ids), kernel=name)
        grads = torch.autograd.grad(output.sin().sum(), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), tensors))
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.usefixtures("without_the_library")
def test_short_documents_are_computed_one_by_one_as_soon_as_that_is_less_work_than_all_scores():
    def chosen(length, document):
        tensors = torch.zeros(3, 1, 8, length, 8)
        return plan(*tensors, mask=Causal() & Document.from_lengths([document] * (length // document))).kernel

    assert [chosen(256, document) for document in (16, 32, 64)] == ["strips"] * 3
    assert chosen(128, 16) == chosen(128, 32) == "strips"
    assert "strips" not in {chosen(256, 256), chosen(64, 8)}


def test_strips_take_time_to_begin_each_unless_they_lie_apart():
    def one_by_one(mask, **parts):
        tensors = torch.zeros(3, 1, 2, 300, 8)
        return strips_kernel.one_by_one(check_call("test", *tensors, mask, *[parts.get("bias"), *[None] * 4]))

    assert one_by_one(Causal() & Document.from_lengths([90, 70, 140])) == 0
    assert one_by_one(Causal() & Document.from_lengths([90, 70, 140]), bias=Alibi(2)) >= 3
    assert one_by_one(Causal() & Window(30)) >= 1


def test_strips_are_planned_once_for_calls_of_one_form(monkeypatch):
    tensors, ids = packed(1)
    mask = Causal() & Document(ids)
    checked.forget()
    first = attention(*tensors, mask=mask, kernel="strips")
    monkeypatch.setattr(strips_kernel, "plan_of", lambda *given: pytest.fail("planned again"))
    assert_close(attention(*tensors, mask=mask, kernel="strips"), first)
    monkeypatch.undo()
    ids[0, 50:] = 1000  # another mask, in the same object
    again = attention(*tensors, mask=mask, kernel="strips")
    assert not torch.allclose(again, first)
    assert_close(again, attention(*tensors, mask=mask, kernel="reference"))


@pytest.mark.parametrize("parts", [{}, {"softcap": 2.0}, {"dropout": 0.3}, {"bias": Alibi(2)}], ids=repr)
def test_queries_without_features_average_what_they_may_see(parts):
    query, value = torch.zeros(1, 2, 9, 0), torch.randn(1, 2, 9, 3)
    found = []
    for name in ("strips", "reference"):
        draw = torch.Generator().manual_seed(0)
        found.append(attention(query, query, value, mask=Causal(), kernel=name, generator=draw, **parts))
    assert_close(*found)


def scattered(rows, documents, length=300):
    draw = torch.Generator().manual_seed(documents)
    return torch.randint(0, documents, (rows, length), generator=draw)


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        (Document(scattered(1, 3)), 0.45),
        (Document(scattered(2, 3)), 0.45),
        (Document(scattered(2, 3)) & Causal(), 0.4),
        (Document(scattered(2, 3)) & Causal() & Padding(torch.tensor([170, 300])), 0.4),  # sorted with the keys
        (Padding(torch.arange(300)[None] % 5 > 0) & Document(scattered(2, 3)), 0.45),
        (Document(scattered(2, 3), scattered(2, 4, 200)), 0.5),
        (Document(scattered(1, 5)) & Window(200), 1.0),  # which goes by the places of tokens
    ],
    ids=["all rows alike", "by row", "causal", "padded", "holes", "other keys", "window"],
)
def test_documents_whose_tokens_lie_apart_are_brought_together(mask, share):
    key_len = next(part.key_ids.shape[1] for part in mask.leaves() if isinstance(part, Document))
    query, key, value = (
        torch.randn(2, n, t, 7, dtype=torch.float64).requires_grad_() for n, t in ((4, 300), (2, key_len), (2, key_len))
    )
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    found = []
    for name in ("strips", "reference"):
        output, lse = attention_with_lse(query, key, value, mask=mask, sink=sink, kernel=name)
        loss = output.sin().sum() + lse.cos().sum()
        found.append([output, lse, *torch.autograd.grad(loss, (query, key, value, sink))])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
    call = check_call("test", query, key, value, mask, *[None] * 5, 0.0, None, False)
    assert strips_kernel.num_scores(call) <= share * 2 * 4 * 300 * key_len


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Window(64), Causal() & (Window(64) | Prefix(3)), Causal() & Strided(4),
        Document.from_lengths([64] * 5), Document.from_lengths([65] * 4 + [60]),
        Causal() & Document.from_lengths([45] * 7 + [5]),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("filled", [False, True])
def test_equal_strips_with_dropout_are_computed_together_and_drop_the_same_weights(mask, filled, monkeypatch):
    monkeypatch.setattr(tuning, "PIECE_QUERIES", 4)
    monkeypatch.setattr(tuning, "PIECE_SCORES", 5000)
    monkeypatch.setattr(tuning, "MAX_STRIP_QUERIES", 64)
    monkeypatch.setattr(tuning, "KEY_STEP", 16)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: filled)
    query, key, value = normal(1, 4, 320, 7), normal(1, 2, 320, 7, seed=2), normal(1, 2, 320, 5, seed=3)
    found = []
    for kernel in ("strips", "reference"):
        draw = torch.Generator().manual_seed(4)
        output = attention(query, key, value, mask=mask, dropout=0.3, generator=draw, kernel=kernel)
        found.append([output, *torch.autograd.grad(output.sin().sum(), (query, key, value))])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)
    call = check_call("test", query, key, value, mask, *[None] * 5, 0.3, None, False)
    assert max(strip.times for strip in plan_of(call).strips) > 1


def test_batch_indices_with_dropout_are_one_stack(monkeypatch):
    stacks, real = [], torch.softmax

    def watched(scores, *rest, **more):
        stacks.append(len(scores))
        return real(scores, *rest, **more)

    monkeypatch.setattr(torch, "softmax", watched)
    query = torch.randn(6, 4, 40, 8)
    attention(query, query, query, dropout=0.3, kernel="strips")
    assert stacks == [24]


def test_the_gradient_of_a_sum_is_multiplied_in_one_stack(monkeypatch):
    strides, real = [], products.gradients

    def watched(grad_output, *rest, **more):
        strides.append(grad_output.stride(3))
        real(grad_output, *rest, **more)

    monkeypatch.setattr(products, "gradients", watched)
    query = torch.randn(1, 4, 40, 8).requires_grad_()
    attention(query, query, query, softcap=5.0, kernel="strips").sum().backward()
    assert strides == [1]


def test_strips_of_plain_products_are_higher_than_those_of_one_operator(monkeypatch):
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    monkeypatch.setattr(fused, "FLASH", True)

    def height(learns=False, **more):
        query = torch.zeros(1, 8, 2048, 64, requires_grad=learns)
        given = {"softcap": None, "dropout": 0.0} | more
        call = check_call(
            "test", query, query, query, mask=Causal() & Window(256), bias=None, scale=None, sink=None, additive=None,
            generator=None, wants_lse=False, **given,
        )  # fmt: skip
        return max(len(strip.queries) for strip in plan_of(call).strips)

    assert height() == 32
    assert height(softcap=5.0) == height(dropout=0.1) == height(learns=True) == 64
    assert height(learns=True, softcap=5.0) == height(learns=True, dropout=0.1) == 128  # one by one


@pytest.mark.parametrize("of_what", ["one row", "rows", "other keys"])
@pytest.mark.parametrize("name", ["alibi", "table", "scores", "sum", "own", "dropout"])
def test_tokens_that_are_brought_together_keep_the_biases_and_the_dropout_of_their_places(of_what, name):
    key_len = 200 if of_what == "other keys" else 150
    queries, keys = scattered(2, 3, 150), scattered(2, 4, key_len) if of_what == "other keys" else None
    mask = Document(queries[:1] if of_what == "one row" else queries, keys)
    table, slopes, scores = normal(32, 2), normal(2, seed=1), torch.randn(1, 1, 150, key_len).double()
    bias, learned = {
        "alibi": (Alibi(slopes=slopes), (slopes,)),
        "table": (RelativeBias(table), (table,)),
        "scores": (scores, ()),
        "sum": (Alibi(slopes=slopes) + scores, (slopes,)),
        "own": (Penalty(torch.nn.Linear(1, 2).double(), slopes), (slopes,)),
        "dropout": (None, ()),
    }[name]
    tensors = normal(2, 2, 150, 7), normal(2, 1, key_len, 7, seed=2), normal(2, 1, key_len, 5, seed=3)
    found = []
    for kernel in ("strips", "reference"):
        draw, rate = torch.Generator().manual_seed(4), 0.3 if name == "dropout" else 0.0
        output = attention(*tensors, mask=mask, bias=bias, dropout=rate, generator=draw, kernel=kernel)
        found.append([output, *torch.autograd.grad(output.sin().sum(), (*tensors, *learned))])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)
    call = check_call("test", *tensors, mask, bias, None, None, None, None, rate, None, False)
    assert strips_kernel.num_scores(call) <= 0.7 * 2 * 2 * 150 * key_len


def test_calls_that_are_alike_drop_the_weights_of_their_places_in_the_second_one_too():
    tensors, mask = (normal(2, 2, 150, 7), normal(2, 1, 150, 7), normal(2, 1, 150, 7)), Document(scattered(2, 3, 150))
    for seed in range(3):
        found = []
        for kernel in ("strips", "reference"):
            torch.manual_seed(seed)
            found.append(attention(*tensors, mask=mask, dropout=0.3, kernel=kernel))
        assert_close(*found)


def test_a_learned_number_for_every_score_keeps_documents_where_they_are():
    tensors, mask = (normal(1, 2, 150, 7), normal(1, 2, 150, 7), normal(1, 2, 150, 7)), Document(scattered(1, 3, 150))
    call = check_call("test", *tensors, mask, normal(1, 2, 150, 150), None, None, None, None, 0.0, None, False)
    assert reordering(call, copies=True) is None  # each document would get a gradient as large as the table


def test_a_cache_is_read_where_the_window_is_and_by_one_plain_call(monkeypatch):
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 384, 8)
    seen = []
    whole = fused.full_attention
    monkeypatch.setattr(
        fused, "full_attention", lambda query, key, *rest, **more: seen.append(key) or whole(query, key, *rest, **more)
    )
    output = attention(query, key, key, mask=Causal() & Window(64), kernel="strips")
    assert [key.shape[2] for key in seen] == [64]
    right = attention(query, key[:, :, -64:], key[:, :, -64:], kernel="reference")
    assert_close(output, right, tolerance=1e-6)


def test_gradients_of_shared_keys_add_up_in_float32():
    """In bfloat16 a sum of many strips' parts would stop growing; the total is rounded once instead."""
    value = torch.zeros(1, 1, 8192, 8, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(1, 1, 8192, 8, dtype=torch.bfloat16)
    attention(zeros, zeros, value, mask=Prefix(4), kernel="strips").sum().backward()
    assert value.grad[0, 0, 0, 0].item() == 2048  # 8192 queries, a quarter each
    assert math.isclose(value.grad.sum().item(), 8192 * 8)


# --- gradients that autograd cannot take by itself ------------------------------------------------------------------


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"dropout": 0.3}], ids=lambda extra: "".join(extra) or "fused")
def test_a_gradient_of_a_gradient_is_right_and_where_a_bias_learns_says_who_computes_it(small, extra):
    tensors = normal(1, 2, 5, 2), normal(1, 1, 5, 2, seed=1), normal(1, 1, 5, 3, seed=2), normal(2, seed=3)

    def output(query, key, value, sink, bias=None):
        draw = torch.Generator().manual_seed(4)
        return attention(
            query, key, value, mask=Causal() & Window(3), bias=bias, sink=sink, kernel="strips", generator=draw,
            **extra,
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(output, tensors)
    with pytest.warns(UserWarning, match="a gradient of a gradient is computed by kernel 'reference'"):
        assert torch.autograd.gradgradcheck(output, (*tensors, normal(2, 5, 5, seed=5)))


class Penalty(Bias):
    """A user's own bias, which learns through a module and through a tensor."""

    def __init__(self, network, table):
        self.network, self.table = network, table

    def bind(self, grid):
        return self

    def values(self, queries, keys):
        distance = (queries[:, None] - keys[None, :]).abs().to(self.table.dtype)[..., None]
        return self.network(distance).permute(2, 0, 1)[None] + self.table[:, None, None]


def test_whatever_a_bias_learns_through_gets_its_gradient(small):
    torch.manual_seed(0)
    network, table = torch.nn.Linear(1, HEADS).double(), normal(HEADS)
    tensors = normal(1, HEADS, 37, 7), normal(1, KV_HEADS, 37, 7, seed=1), normal(1, KV_HEADS, 37, 5, seed=2)
    bias = Penalty(network, table) + Alibi(slopes=normal(HEADS, seed=5))
    learned = [*tensors, *network.parameters(), table, bias.right.slopes]

    def gradients(kernel):
        output = attention(*tensors, mask=Causal(), bias=bias, kernel=kernel)
        return torch.autograd.grad(output.square().sum(), learned)

    for ours, right in zip(gradients("strips"), gradients("reference"), strict=True):
        assert_close(ours, right)


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}], ids=["fused", "written"])
def test_functional_transforms_see_through_strips(small, extra):
    tensors = [tensor.detach() for tensor in (normal(3, 1, 2, 37, 7), normal(3, 1, 2, 37, 7), normal(3, 1, 2, 37, 5))]

    def loss(query, key, value, kernel):
        return attention(query, key, value, mask=Causal() & Window(9), kernel=kernel, **extra).square().sum()

    def gradients(kernel):
        of_one = torch.func.grad(lambda *three: loss(*three, kernel), argnums=(0, 1, 2))
        return torch.func.vmap(of_one)(*tensors), [torch.stack(x) for x in zip(*map(of_one, *tensors), strict=True)]

    (ours, ours_by_hand), (right, _) = gradients("strips"), gradients("reference")
    for found, by_hand, expected in zip(ours, ours_by_hand, right, strict=True):
        assert_close(found, expected)
        assert_close(by_hand, expected)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("kernel", ["strips", "sdpa"])
@pytest.mark.parametrize("mask", [None, Causal() & Padding([5, 2])], ids=repr)
def test_a_penalty_on_a_gradient_may_go_through_the_output_itself(kernel, mask):
    tensors = [torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3)]
    bias = torch.randn(3, 7, 7)

    def penalty(kernel):
        output = attention(*tensors, mask=mask, bias=bias, kernel=kernel)
        firsts = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(first.square().sum() for first in firsts), tensors)

    for found, right in zip(penalty(kernel), penalty("reference"), strict=True):
        assert_close(found, right, tolerance=1e-4)


# --- what is remembered ---------------------------------------------------------------------------------------------


def cut_for(mask, length=300, **parts):
    tensors = torch.zeros(3, 2, 2, length, 8)
    given = {"bias": None, "scale": None, "softcap": None, "sink": None, "additive": None} | parts
    return plan_of(check_call("test", *tensors, mask, *given.values(), 0.0, None, False))


def test_equal_masks_share_a_plan_and_others_do_not():
    assert cut_for(Causal() & Window(20)) is cut_for(Causal() & Window(20))
    assert cut_for(Causal() & Window(20)) is not cut_for(Causal() & Window(21))
    assert cut_for(Causal() & Window(20)) is not cut_for(Causal() & Window(20), length=301)
    assert cut_for(Causal() | Window(20)) is not cut_for(Causal() & Window(20))
    last = [20]
    rule = lambda batch, head, query, key: key < last[0]  # noqa: E731
    assert cut_for(Where(rule)) is not cut_for(Where(rule))  # it may answer otherwise tomorrow


def test_a_plan_for_data_that_was_changed_in_place_is_made_anew():
    ids = torch.arange(300)[None] // 100
    query = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    answers = []
    for _ in range(2):
        mask = Causal() & Document(ids)
        answers.append(attention(query, query, query, mask=mask, kernel="strips"))
        assert_close(answers[-1], attention(query, query, query, mask=mask, kernel="reference"))
        ids[:, 100:200] = 0
    assert not torch.equal(*answers)


def test_a_plan_remembers_masks_only_up_to_a_size(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_KEPT_SCORES", 20_000)
    found = cut_for(Causal() & Window(70) & Prefix(290), length=3000)
    query = torch.zeros(2, 2, 3000, 8)
    attention(query, query, query, mask=Causal() & Window(70) & Prefix(290), kernel="strips")
    assert sum(hidden.allowed.numel() for hidden in {id(h): h for h in found._hidden.values()}.values()) <= 20_000


def test_what_inference_mode_planned_is_not_met_in_training():
    query = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    mask = Causal() & Window(17)
    with torch.inference_mode():
        attention(query, query, query, mask=mask, softcap=3.0)
    learning = query.clone().requires_grad_()
    attention(learning, query, query, mask=mask, softcap=3.0).sum().backward()
    assert bool((learning.grad != 0).any())


@pytest.fixture
def compiler():
    yield
    torch._dynamo.reset()


COMPILED = {
    "dense": {"mask": Causal()},
    "window": {"mask": Causal() & Window(50)},
    "written": {"mask": Causal() & Document.from_lengths([100, 200]), "softcap": 3.0},
    "sink": {"mask": Chunk(7) & ~Prefix(3), "sink": torch.randn(2)},
    "written with a sink": {"mask": Strided(5) & Causal(), "softcap": 3.0, "sink": torch.randn(2)},
    "padding": {"mask": Causal(offset=[2]) & Padding(torch.arange(300)[None] < 200)},
    "lengths": {"mask": Causal() | Prefix([30]) & Padding([200])},
    "cells": {"mask": Dense(torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) > 0.5)},
    "a bias that learns": {"mask": Causal() & Window(50), "bias": torch.randn(2, 300, 300)},
    "a bias for all": {"mask": Causal() & Window(50), "bias": torch.randn(300), "softcap": 3.0},
    "dropout": {"mask": Causal() & Window(50), "dropout": 0.25},
    "ALiBi": {"mask": Causal(), "bias of": (torch.ones(2), lambda slopes: Alibi(2))},
    "ALiBi that learns": {"mask": Causal() & Window(50), "bias of": (torch.rand(2), lambda s: Alibi(slopes=s))},
    "T5": {"mask": None, "bias of": (torch.randn(32, 2), RelativeBias)},
    "T5 of sorted tokens": {
        "mask": Causal() & Document(torch.arange(300)[None] * 7 % 3),
        "bias of": (torch.randn(32, 2), lambda table: RelativeBias(table, bidirectional=False)),
    },
    "a sum": {
        "mask": Causal(),
        "softcap": 3.0,
        "bias of": (torch.randn(32, 2), lambda table: RelativeBias(table) + Alibi(2) + Given(table[0][:, None, None])),
    },
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch._dynamo looks at it, and hides that
@pytest.mark.parametrize("lse", [False, True], ids=["output", "lse too"])
@pytest.mark.parametrize("given", COMPILED.values(), ids=COMPILED.keys())
def test_a_compiled_model_is_one_graph_and_computes_the_same_forward_and_backward(compiler, given, lse):
    tensors = [torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    given = dict(given)
    named = [name for name in ("sink", "bias") if name in given]
    tensors += [given.pop(name) for name in named]
    parts, bias_of = given.pop("bias of", (None, None))
    tensors += [] if parts is None else [parts]

    def model(query, key, value, *learned):
        if bias_of is None:
            more = {**given, **dict(zip(named, learned, strict=True))}
        else:
            more = {**given, "bias": bias_of(*learned)}
        if lse:
            output, norm = attention_with_lse(2 * query, key, value, **more)
            return torch.cat([output.square(), norm[..., None]], dim=-1)
        return attention(2 * query, key, value, **more).square()

    def answers(function):
        torch.manual_seed(0)  # of what is dropped
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = function(*leaves)
        grads = torch.autograd.grad(output.nan_to_num(neginf=0.0).sum(), leaves, allow_unused=True)
        return [output, *(grad for grad in grads if grad is not None)]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, right in zip(answers(compiled), answers(model), strict=True):
        assert_close(ours, right)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    "given", [
        {"mask": Where(lambda batch, head, query, key: (query + key) % 3 == 0)}, {"bias": Sloped()},
        {"mask": Where(lambda batch, head, query, key: key <= query), "bias": torch.randn(1, 2, 1, 300)},
        {"mask": Where(lambda batch, head, query, key: key <= query), "bias": Alibi(2) + torch.randn(300, 300)},
    ],
    ids=["a function", "a bias of ones own", "a function and a tensor", "a function and two biases"],
)  # fmt: skip
def test_what_a_graph_cannot_hold_breaks_it_and_is_computed_all_the_same(compiler, given):
    query, key, value = torch.randn(3, 1, 2, 300, 8)
    learning = query.clone().requires_grad_()

    def model(query):
        return attention(2 * query, key, value, **given).square()

    compiled = torch.compile(model, backend="aot_eager")
    (ours,) = torch.autograd.grad(compiled(learning).sum(), learning)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(2):
            torch.autograd.grad(compiled(learning).sum(), learning)
    (right,) = torch.autograd.grad(model(learning).sum(), learning)
    assert_close(ours, right)


@needs_library
@pytest.mark.parametrize("price", [0.5, 2.0])
def test_a_graph_holds_the_engine_that_takes_less_time(compiler, monkeypatch, price):
    monkeypatch.setattr(native, "price", lambda *of: price)
    held = []

    def look(node):
        held.extend([compiled_strips.read(node.args[7]).by] if "regard" in str(node.target) else [])

    tensors = torch.randn(3, 1, 2, 300, 8)
    for softcap in (None, 5.0):
        torch.compile(
            lambda *three, c=softcap: attention(*three, mask=Causal() & Window(50), softcap=c), backend=looking(look)
        )(*tensors)
    assert held == ["native" if price < 1 else "strips", "native"]  # torch's operator has no softcap


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_backward_pass_of_a_graph_knows_the_mask_of_the_forward_pass_and_sees_what_is_written_to_it(
    compiler, monkeypatch
):
    made, make = [], compiled_strips.deserialise
    monkeypatch.setattr(compiled_strips, "deserialise", lambda *given: (made.append(given), make(*given))[1])
    monkeypatch.setattr(compiled_strips, "_masks", {})
    cells, query = torch.rand(300, 300) < 0.5, torch.randn(1, 2, 300, 8)

    def model(query):
        return attention(2 * query, query, query, mask=Dense(cells)).square()

    def gradient(function):
        learning = query.clone().requires_grad_()
        return torch.autograd.grad(function(learning).sum(), learning)[0]

    compiled = torch.compile(model, backend="aot_eager")
    for step in range(4):
        if step == 2:
            cells.logical_not_()
        made.clear()
        assert_close(gradient(compiled), gradient(model))
        assert len(made) == (step in (0, 2))


def cells_at_random(rows, length, draw):
    return torch.rand(1, 2, rows, length, generator=draw) < 0.5


OF_ANY_LENGTH = {
    "causal": (lambda rows, length, draw: [], lambda: {"mask": Causal()}),
    "a window from elsewhere": (
        lambda rows, length, draw: [], lambda: {"mask": Causal(offset=3) & Window(50, offset=3)}
    ),
    "padding": (
        lambda rows, length, draw: [torch.randint(1, length, (2,), generator=draw)],
        lambda lengths: {"mask": Causal() & Padding(lengths)},
    ),
    "cells": (lambda *of: [cells_at_random(*of)], lambda cells: {"mask": Dense(cells)}),
    "ALiBi and a prefix": (
        lambda rows, length, draw: [], lambda: {"mask": Causal() | Prefix(9), "bias": Alibi(2), "softcap": 3.0}
    ),
    "a table": (lambda *of: [cells_at_random(*of).float()], lambda table: {"bias": table}),
    "all of T5": (
        lambda rows, length, draw: [torch.randn(32, 2, generator=draw)],
        lambda table: {"mask": Padding([60, 90]), "bias": RelativeBias(table), "sink": table[0]},
    ),
}  # fmt: skip


@needs_library
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("before", [0, 40], ids=["all queries", "the last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("drawn", "rules"), OF_ANY_LENGTH.values(), ids=OF_ANY_LENGTH)
def test_a_graph_for_any_length_computes_each_as_without_it(compiler, monkeypatch, drawn, rules, dtype, before):
    monkeypatch.setattr(native, "price", lambda *of: 0.5)
    monkeypatch.setattr(tuning, "SCORES_TO_BEGIN_A_NODE", 0)
    monkeypatch.setattr(tuning, "SCORES_TO_BEGIN_NODES_THAT_LEARN", 0)
    held, draw = [], torch.Generator().manual_seed(0)

    def model(query, key, value, *data):
        return attention_with_lse(2 * query, key, value, **rules(*data))

    def backend(graph, examples):
        held.extend(node for node in graph.graph.nodes if "regard.strips" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (120, 200, 129, 161, 161, 255):
        data = drawn(length - before, length, draw)
        three = [torch.randn(2, 2, size, 8, generator=draw).to(dtype) for size in (length - before, length, length)]
        found = []
        for function in (compiled, model):
            leaves = [tensor.clone().requires_grad_() for tensor in three]
            output, lse = function(*leaves, *data)
            seen = lse.isfinite()
            grads = torch.autograd.grad(output.float().sin().sum() + lse[seen].sum(), leaves)
            with torch.no_grad():
                found.append([output, lse, *grads, *function(*three, *data)])
        for ours, right in zip(*found, strict=True):
            assert_close(ours, right)
    assert 1 <= len(held) <= 4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_lengths_that_a_graph_is_given_are_read_when_it_runs(compiler):
    def model(query, lengths):
        return attention(query, query, query, mask=Causal() & Padding(lengths))

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for length in (300, 310, 320):
        query, lengths = torch.randn(2, 2, length, 8), torch.tensor([length, 7])
        assert_close(compiled(query, lengths), model(query, lengths))
    with pytest.raises(ValueError, match=r"Padding: lengths must be 0 or more, got \[-1, 5\]"):
        compiled(query, torch.tensor([-1, 5]))
    with pytest.raises(ShapeError, match="Padding: a row has 400 real keys"):
        compiled(query, torch.tensor([400, 5]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(99), Causal() & Padding([1500])], ids=repr)
def test_a_long_call_of_one_head_is_one_graph_too(compiler, mask):
    query = torch.randn(1, 1, 2100, 4)

    def model(query):
        return attention(2 * query, query, query, mask=mask)

    assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(query), model(query))


@needs_library
@pytest.mark.parametrize(("length", "mask", "is_node"), [(8, None, False), (90, Causal(), True), (90, None, False)])
def test_a_graph_holds_the_library_where_that_takes_less_time(compiler, monkeypatch, length, mask, is_node):
    monkeypatch.setattr(native, "price", lambda *of: 0.9)
    monkeypatch.setattr(tuning, "SCORES_TO_BEGIN_A_NODE", (1 << 14) / torch.get_num_threads())
    query, nodes = torch.randn(1, 8, length, 8), []
    compiled = torch.compile(
        lambda query: attention(query, query, query, mask=mask),
        backend=looking(lambda node: nodes.append(str(node.target))),
        fullgraph=True,
    )
    assert_close(compiled(query), attention(query, query, query, mask=mask))
    assert ("regard.strips_alone.default" in nodes) is is_node


@pytest.mark.usefixtures("without_the_library")
def test_a_plan_says_why_strips_are_faster_than_torchs_function(monkeypatch):
    short = torch.zeros(1, 4, 512, 4)
    monkeypatch.setattr(products, "pay", lambda *given, **more: given[3] == 512)
    assert plan(short, short, short, mask=Causal()).why.startswith("plain products of matrices take less time")
    planned = plan(*(torch.zeros(2, 4, 512, 4, dtype=torch.bfloat16),) * 3)
    assert planned.kernel == "strips"
    assert "plain products" in planned.why
    assert planned.others["sdpa"] == "supported, but strips is preferred"


@pytest.mark.parametrize("by", ["strips", "native"])
def test_the_node_of_a_graph_keeps_torchs_rules(by):
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    lengths, sink, mask = torch.tensor([30]), torch.randn(2), '["And",["Band",null,0,0],["Padding",{"tensor":0}]]'
    learning, rest = (query.requires_grad_(), key, value, sink.requires_grad_()), (0.3, None, None, 0.0)
    library.opcheck(in_graph, (*learning, [lengths], [], [], f"{mask}\n\n{by} 0 1 1", *rest))
    half = [tensor.detach().bfloat16() for tensor in learning]
    library.opcheck(in_graph, (*half, [lengths], [], [], f"{mask}\n\n{by} 0 1 1", *rest))
    mask = mask.replace("0,0", '{"number":0},{"number":1}')
    numbers, slopes = torch.randn(1, 2, 40, 40).requires_grad_(), torch.rand(2).requires_grad_()
    bias = '["Sum",["Given",{"tensor":0}],["Alibi",{"tensor":1},{"number":0}]]'
    line, rest = f"{mask}\n{bias}\n{by} 2 1 1", (0.3, 2.0, torch.tensor(7), 0.25)
    library.opcheck(in_graph, (query, key, value, None, [lengths], [numbers, slopes], [0, 0, 0], line, *rest))


@pytest.mark.parametrize("lies", ["by heads", "by tokens", "otherwise"])
@pytest.mark.parametrize("wants_lse", [0, 1])
def test_the_node_of_a_call_without_gradients_keeps_torchs_rules(lies, wants_lse):
    places = {"by heads": (0, 1, 2, 3), "by tokens": (0, 2, 1, 3), "otherwise": (3, 1, 2, 0)}[lies]
    drawn = torch.randn(3, 2, 3, 40, 8)
    query, key, value = (one.permute(places).contiguous().permute(places) for one in drawn.unbind())
    mask, bias = '["And",["Band",null,0,{"number":0}],["Padding",{"tensor":0}]]', '["Alibi",{"tensor":0},{"number":0}]'
    line, slopes = f"{mask}\n{bias}\nnative 1 0 {wants_lse}", torch.rand(3)
    given = torch.randn(3), [torch.tensor([30, 20])], [slopes], [0, 0], line, 0.3, 2.0
    library.opcheck(alone.in_graph, (query, key, value, *given))
    rules = {"mask": Causal() & Padding(torch.tensor([30, 20])), "bias": deserialise(bias, [slopes], [0])}
    rest = {"scale": 0.3, "softcap": 2.0, "sink": given[0], "kernel": "reference"}
    expected = attention_with_lse(*drawn, **rules, **rest)
    found = alone.in_graph(query, key, value, *given)
    assert len(found) == 1 + wants_lse
    for ours, right in zip(found, expected, strict=False):
        assert_close(ours, right)


@pytest.mark.usefixtures("without_the_library")
def test_a_whole_square_in_half_precision_is_computed_by_products_where_they_suit(monkeypatch):
    query = torch.randn(1, 2, 80, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    called = []
    attend = products.attend
    monkeypatch.setattr(products, "attend", lambda *given, **more: called.append(more) or attend(*given, **more))
    for suits in (False, True):
        monkeypatch.setattr(products, "pay", lambda *given, answer=suits, **more: answer)
        for mask in (None, Window(200), Causal()):
            called.clear()
            checked.forget()
            output = attention(query, query, query, mask=mask)
            assert bool(called) == suits
            assert plan(query, query, query, mask=mask).kernel == ("strips" if suits else "sdpa")
            assert_close(output, attention(query, query, query, mask=mask, kernel="reference"))


@pytest.mark.parametrize("rest", [Strided(64) | Window(20), Strided(300) | Window(20), ~Strided(64)], ids=str)
def test_a_mask_that_hides_keys_here_and_there_is_planned_with_few_questions(rest, monkeypatch):
    asked, tile = [], Mask.tile

    def counted(mask, rows, columns):
        asked.append(mask)
        return tile(mask, rows, columns)

    monkeypatch.setattr(Mask, "tile", counted)
    grid = Grid(1, 8, 8000, 8000)
    options = PlanOptions(tuning.SHORT_STRIP_QUERIES, 1024.0, together=True)
    strips = StripPlan((Causal() & rest).bind(grid), grid, options).strips
    assert len(asked) < 8000  # of some 50,000 rectangles of a strip and 32 keys
    assert sum(strip.keys * len(strip.queries) for strip in strips) < 0.53 * 8000**2


@needs_library
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_node_is_planned_once_for_calls_that_differ_in_their_sink(compiler, monkeypatch):
    planned, plan_of = [], native.plan_of
    watched = replace(compiled_strips.NATIVE, plan_of=lambda call: (planned.append(call), plan_of(call))[1])
    monkeypatch.setitem(compiled_strips.ENGINES, "native", watched)
    monkeypatch.setattr(compiled_strips, "NATIVE", watched)
    monkeypatch.setattr(compiled_strips, "_nodes", {})
    real, query = torch.arange(300)[None] < 200, torch.randn(1, 2, 300, 8)

    def model(query, sink, real):
        return attention(2 * query, query, query, mask=Causal() & Padding(real), sink=sink)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(4):
        given = query, torch.randn(2), real.roll(step // 2)
        found = []
        for function in (compiled, model):
            leaves = [tensor.clone().requires_grad_() for tensor in given[:2]]
            output = function(*leaves, given[2])
            found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        for ours, right in zip(*found, strict=True):
            assert_close(ours, right)
    assert len(planned) == 2  # one for each padding


@needs_library
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["slopes", "a frozen table", "a tensor", "a tensor that learns", "two"])
def test_a_node_with_a_bias_is_planned_and_told_once(compiler, monkeypatch, kind, dtype):
    made, order = [], native.Order
    monkeypatch.setattr(compiled_strips, "_nodes", {})
    monkeypatch.setattr(native, "Order", lambda *given: (made.append(given), order(*given))[1])
    table = torch.randn(32, 2)

    def model(query, numbers, real):
        rules = {"slopes": Alibi(2), "a frozen table": RelativeBias(table), "two": Alibi(2) + Given(numbers)}
        mask, bias = Causal() & Padding(real), rules.get(kind, numbers)
        return attention(2 * query, query, query, mask=mask, bias=bias, kernel="native")

    real, learns = torch.arange(150)[None] < 100, kind == "a tensor that learns"
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(4):
        query, numbers = torch.randn(1, 2, 150, 16).to(dtype), torch.randn(1, 2, 150, 150)
        found = []
        for function in (model, compiled):
            made.clear()
            leaves = [query.clone().requires_grad_(), numbers.clone().requires_grad_(learns)]
            output = function(*leaves, real)
            found.append([output, *torch.autograd.grad(output.square().sum(), leaves[: 1 + learns])])
        assert not made or step < 2
        for right, ours in zip(*found, strict=True):
            assert_close(ours, right)


@needs_library
@pytest.mark.parametrize(
    ("mask", "keys", "is_node"),
    [
        (Causal(), 2000, False),
        (Causal(), 5000, True),
        (Causal(offset=torch.tensor([1000])), 2000, False),
        (Causal(offset=torch.tensor([1000])), 5000, True),
        (Causal(offset=torch.tensor([50])), 100, False),
    ],
    ids=["nothing hidden", "nothing hidden of many keys", "half of the cache", "most of a large one", "few keys"],
)
def test_a_graph_adds_up_the_products_of_one_query_and_leaves_more_scores_to_a_node(compiler, mask, keys, is_node):
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, keys, 64)
    nodes = []
    compiled = torch.compile(
        lambda *three: attention(*three, mask=mask),
        backend=looking(lambda node: nodes.append(str(node.target))),
        fullgraph=True,
    )
    assert_close(compiled(query, key, value), attention(query, key, value, mask=mask))
    assert ("regard.strips_alone.default" in nodes) is is_node
    assert not any("mm" in node or "flash" in node for node in nodes)  # which want copies of what is hidden


@needs_library
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("keys", "learns", "is_node"), [(600, False, False), (5000, False, True), (600, True, False), (5000, True, True)]
)
def test_a_graph_makes_the_hash_of_dropped_weights_once(compiler, keys, learns, is_node):
    """Not anew for every feature of the values, which takes ten times as long with 512: weights are written before
    products are added up, and where gradients would make it again, products are not added up."""
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, keys, 64)
    query.requires_grad_(learns)
    nodes = []
    compiled = torch.compile(
        lambda *three: attention(*three, dropout=0.1), backend=looking(lambda node: nodes.append(str(node.target))),
        fullgraph=True,
    )  # fmt: skip
    compiled(query, key, value)
    assert ("regard.strips.default" in nodes) is is_node
    assert any("mm" in node for node in nodes) is (learns and not is_node)
    assert any("as_strided" in node for node in nodes) is not (learns or is_node)

"""The tiled kernel's own promises: strips hold every allowed cell once, skip what is empty, and add up."""

import math

import pytest
import torch

from comparing import assert_close
from regard import (
    Alibi,
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    Padding,
    Prefix,
    Strided,
    Where,
    Window,
    attention,
    attention_with_lse,
)
from regard.functional import check_call
from regard.kernels import choose, tiled
from regard.shapes import Grid

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
    monkeypatch.setattr(tiled, "ROWS", 16)
    monkeypatch.setattr(tiled, "COLUMNS", 8)
    monkeypatch.setattr(tiled, "ALONE", 4)


def cells(strips, mask, grid):
    """How often each cell is computed, and whether the strip's own mask lets it through: [batch, query, key]."""
    times = torch.zeros(grid.batch, grid.query_len, grid.key_len, dtype=torch.int64)
    for strip in strips:
        rows = slice(None) if strip.row is None else strip.row
        for span in strip.spans:
            times[rows, strip.queries.start : strip.queries.stop, span.start : span.stop] += 1
    allowed = mask.allowed(range(grid.query_len), range(grid.key_len)).any(dim=1)
    return times, allowed.expand(grid.batch, grid.query_len, grid.key_len)


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask is not None], ids=repr)
def test_every_allowed_cell_is_in_exactly_one_strip_and_full_strips_hold_nothing_else(small, mask):
    tensors = (
        torch.zeros(BATCH, n, length, 8) for n, length in ((HEADS, QUERY_LEN), (KV_HEADS, KEY_LEN), (KV_HEADS, KEY_LEN))
    )
    call = check_call("test", *tensors, mask, None, None, None, None, None, 0.0, None, False)
    found = tiled.strips(call)
    times, allowed = cells(found, call.scoring.mask, call.scoring.grid)
    assert times.max() <= 1
    assert (times[allowed] == 1).all()
    for strip in found:
        inside = allowed[:, strip.queries.start : strip.queries.stop] if strip.row is None else allowed[
            strip.row : strip.row + 1, strip.queries.start : strip.queries.stop
        ]  # fmt: skip
        inside = torch.cat([inside[..., span.start : span.stop] for span in strip.spans], dim=-1)
        if strip.full:
            assert inside.all()
        if strip.causal:
            assert torch.equal(inside, torch.ones_like(inside).tril())


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "".join(extra) or "nothing")
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_strips_add_up_to_the_reference_forward_and_backward_and_through_lse(small, mask, extra):
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
        ("output", "lse", "query", "key", "value", "sink"), answers("tiled"), answers("reference"), strict=False
    ):
        assert_close(ours, right, name, tolerance=1e-12 * max(1.0, float(right[right.isfinite()].detach().abs().max())))


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask is not None and mask.by_row], ids=repr)
def test_the_mask_of_one_row_is_that_row_of_the_mask(mask):
    grid = Grid(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    whole = mask.bind(grid).allowed(range(QUERY_LEN), range(KEY_LEN)).expand(BATCH, HEADS, QUERY_LEN, KEY_LEN)
    for row in range(BATCH):
        alone = mask.of_row(row).bind(grid._replace(batch=1)).allowed(range(QUERY_LEN), range(KEY_LEN))
        assert torch.equal(alone.expand(1, HEADS, QUERY_LEN, KEY_LEN)[0], whole[row])


def test_a_window_costs_its_width_and_not_the_length():
    tensors = torch.zeros(3, 1, 1, 1, 1).expand(3, 1, 1, 1 << 17, 8)  # nothing of that length is written anywhere
    call = check_call("test", *tensors, Causal() & Window(256), None, None, None, None, None, 0.0, None, False)
    assert choose(call).name == "tiled"
    computed = tiled.cells(call)
    # a strip of ROWS queries needs the window before it, rounded up to whole tiles
    assert computed <= (1 << 17) * (tiled.ROWS + 256 + tiled.COLUMNS)
    assert computed >= (1 << 17) * 256 - 256 * 256


def test_packed_causal_documents_are_one_causal_call_each():
    lengths = [300, 70, 512, 142]
    tensors = torch.zeros(3, 1, 2, sum(lengths), 8)
    mask = Causal() & Document.from_lengths(lengths)
    call = check_call("test", *tensors, mask, None, None, None, None, None, 0.0, None, False)
    found = tiled.strips(call)
    assert [len(strip.queries) for strip in found] == lengths
    assert all(strip.causal and strip.spans == (strip.queries,) for strip in found)


@pytest.mark.parametrize("lengths", [[3, 5, 2, 9, 1], [40, 2, 2, 2, 60], [1] * 30])
def test_short_documents_share_a_strip(small, lengths):
    mask = (Causal() & Document.from_lengths(lengths)).bind(Grid(1, 1, sum(lengths), sum(lengths)))
    found = list(tiled.cut(mask, sum(lengths), sum(lengths)))
    assert [i for strip in found for i in strip.queries] == list(range(sum(lengths)))
    assert sum(len(strip.queries) < 4 for strip in found) <= 2


def test_a_cache_is_read_where_the_window_is_and_by_one_plain_call(monkeypatch):
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 384, 8)
    seen = []
    monkeypatch.setattr(tiled.dense, "run", lambda call, run=tiled.dense.run: seen.append(call) or run(call))
    output = attention(query, key, key, mask=Causal() & Window(64), kernel="tiled")
    assert seen[0].key.shape[2] == 64
    assert seen[0].scoring.mask is None
    right = attention(query, key[:, :, -64:], key[:, :, -64:], kernel="reference")
    assert_close(output, right, tolerance=1e-6)


def test_gradients_of_shared_keys_add_up_in_float32():
    """In bfloat16 a sum of many strips' parts would stop growing; the total is rounded once instead."""
    value = torch.zeros(1, 1, 8192, 8, dtype=torch.bfloat16, requires_grad=True)
    zeros = torch.zeros(1, 1, 8192, 8, dtype=torch.bfloat16)
    attention(zeros, zeros, value, mask=Prefix(4), kernel="tiled").sum().backward()
    assert value.grad[0, 0, 0, 0].item() == 2048  # 8192 queries, a quarter each
    assert math.isclose(value.grad.sum().item(), 8192 * 8)

"""Masks that hold data of texts, as an interval of keys for every query: the same cells, from strips that stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import composed_masks, grids, needs_library, single_masks
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
    RelativeBias,
    Strided,
    Tile,
    Where,
    Window,
    attention,
)  # fmt: skip
from regard.kernels.strips import binding, intervals, native, tuning
from regard.kernels.strips.binding import compiled
from regard.kernels.strips.intervals import Between, Interval, Within, by_interval, library, side_by_side
from regard.kernels.strips.reordering import reordering
from regard.masks import EVERYTHING
from regard.masks.planning import EVERY_DIAGONAL, factors
from regard.shapes import Grid
from regard.validation import check_call

pytestmark = needs_library

LENGTHS = torch.tensor([5, 9, 0])


def draw(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cells(interval, grid):
    """What an interval allows: [batch, heads or 1, query_len, key_len]."""
    places = torch.arange(grid.key_len)
    inside = (interval.first[..., None] <= places) & (places < interval.end[..., None])
    seen = inside[:, None].expand(grid.batch, 1, grid.query_len, grid.key_len)
    return seen if interval.words is None else seen & told_in(interval, grid)


def told_in(interval, grid):
    """What the words of an interval allow, likewise."""
    bits = interval.words[:, :, :, None] >> torch.arange(32)[:, None] & 1
    bits = bits.flatten(2, 3)[:, :, : grid.query_len].bool()
    return bits.expand(grid.batch, -1, grid.query_len, grid.key_len)


def call_of(mask, batch=3, queries=9, keys=9, heads=2):
    query, key = draw((batch, heads, queries, 8)), draw((batch, heads, keys, 8))
    return check_call("test", query, key, key, mask, None, None, None, None, None)


@pytest.mark.parametrize(
    ("mask", "first", "end"),
    [
        (Padding([2, 3]), [[0], [0]], [[2], [3]]),
        (Padding(torch.tensor([[True, True, False], [False, True, False]])), [[0], [1]], [[2], [2]]),
        (Padding(torch.tensor([[False] * 3, [False, True, True]])), [[3], [1]], [[3], [3]]),
        (Document(torch.tensor([[0, 0, 1], [4, 5, 5]])), [[0, 0, 2], [0, 1, 1]], [[2, 2, 3], [1, 3, 3]]),
        (Prefix([1, 2]), [[0], [0]], [[1], [2]]),
        (Causal(offset=[0, 1]), [[0] * 3] * 2, [[1, 2, 3], [2, 3, 3]]),
        (Band(1, 0, offset=[0, -2]), [[0, 0, 1], [0, 0, 0]], [[1, 2, 3], [0, 0, 1]]),
        (Band(1 << 40, 0, offset=[0, 1]), [[0] * 3] * 2, [[1, 2, 3], [2, 3, 3]]),
        (Dense(torch.ones(3, 3, dtype=torch.bool).tril()), [[0] * 3], [[1, 2, 3]]),
        (Dense(torch.tensor([[True], [False], [True]])), [[0, 3, 0]], [[3] * 3]),
        (Causal() | Prefix([1, 2]), [[0] * 3] * 2, [[1, 2, 3], [2, 2, 3]]),
    ],
)
def test_worked_by_hand(mask, first, end):
    rule, interval = by_interval(mask.bind(Grid(2, 1, 3, 3)), Grid(2, 1, 3, 3))
    assert rule is EVERYTHING
    assert interval.first.tolist() == first
    assert interval.end.tolist() == end
    assert interval.first.dtype == interval.end.dtype == torch.int32


def test_what_is_about_positions_alone_stays_a_rule():
    grid = Grid(2, 1, 3, 3)
    rule, interval = by_interval((Causal() & Padding([2, 1]) & Chunk(2)).bind(grid), grid)
    assert "Padding" not in repr(rule)
    assert "Causal" in repr(rule)
    assert interval.end.tolist() == [[2], [1]]
    assert by_interval(Causal().bind(grid), grid) == (Causal().bind(grid), None)


def test_a_union_is_one_where_the_keys_of_every_query_lie_side_by_side():
    grid = Grid(1, 1, 6, 6)
    rule, interval = by_interval((Causal() | Prefix(3)).bind(grid), grid)
    assert rule is EVERYTHING
    assert interval.first.tolist() == [[0] * 6]
    assert interval.end.tolist() == [[3, 3, 3, 4, 5, 6]]
    apart = ((Causal() & Window(2)) | Prefix(2)).bind(grid)
    assert by_interval(apart, grid) == (apart, None)


APART = torch.zeros(1, 1, 3, 9, dtype=torch.bool)
APART[..., [0, -1]] = True


@pytest.mark.parametrize(
    "mask",
    [Padding([1, 1]) | Padding(APART[:, 0, 0]), ~Dense(APART.repeat(2, 1, 1, 1))],
    ids=["either", "not"],
)
def test_strips_are_cut_where_too_many_cells_would_be_looked_at(mask, monkeypatch):
    monkeypatch.setattr(intervals, "MAX_CELLS", 53)  # of two texts there are 54
    grid = Grid(2, 2, 3, 9)
    bound = mask.bind(grid)
    rule, interval = by_interval(bound, grid)
    assert interval is None
    assert rule == bound


@pytest.mark.parametrize(
    "mask",
    [
        Padding(APART[:, 0, 0]),
        Dense(APART),
        Dense(APART.repeat(2, 1, 1, 1)),
        Dense(APART.repeat(1, 2, 1, 1)),
        Padding([1, 1]) | Padding(APART[:, 0, 0]),
    ],
    ids=["keys", "cells", "cells of texts", "cells of heads", "either"],
)
def test_keys_may_lie_apart(mask):
    grid = Grid(2, 2, 3, 9)
    rule, interval = by_interval(mask.bind(grid), grid)
    assert rule is EVERYTHING
    both = cells(interval, grid), mask.bind(grid).allowed(range(3), range(9))
    assert torch.equal(*(seen.expand(2, 2, 3, 9) for seen in both))


def test_what_the_library_computes_is_about_what_is_counted():
    length = 512
    blocks = torch.eye(4, dtype=torch.bool).repeat_interleave(128, 0).repeat_interleave(128, 1)
    first, end = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), length, dtype=torch.int32)
    for seen, share in (
        (torch.ones(length, length, dtype=torch.bool), 1),
        (blocks, 1 / 4),
        (blocks.flip(0) | blocks, 1 / 2),
        (blocks & (torch.arange(length) % 128 >= 96), 1 / 16),
        (torch.zeros(length, length, dtype=torch.bool), 0),
    ):
        words = library().bits_of(seen[None, None])
        assert Interval(first, end, words).share_computed() == pytest.approx(share)
    assert Interval(first, end).share_computed() == 1
    header = (Path(binding.__file__).parent / "c" / "vectors.h").read_text(encoding="utf-8")
    assert f"#define KEYS {intervals.KEYS_AT_A_TIME} " in header


@pytest.mark.parametrize(
    "mask",
    [
        Padding(torch.tensor([[True, False, True], [True, False, True]])) & Padding([3, 1]) | Padding([1, 2]),
        Document(torch.tensor([0, 1, 0])),
        Dense(torch.tensor([[[[True, False, True]] * 3, [[False, True, False]] * 3]])),
        ~Padding([1, 2]),
        Window(2) | Dense(torch.tensor([[[[True, False, False]]], [[[False, False, True]]]])),
        type("Own", (Padding,), {"rule": lambda self, batch, head, query, key: key != query})([1, 2]),
    ],
    ids=["holes on one side", "documents apart", "heads", "not", "either", "a rule of its own"],
)
def test_all_others_are_looked_at_if_they_are_small(mask):
    grid = Grid(2, 2, 3, 3)
    bound = mask.bind(grid)
    rule, interval = by_interval(bound, grid)
    assert rule is EVERYTHING
    both = cells(interval, grid), bound.allowed(range(3), range(3))
    assert torch.equal(*(seen.expand(2, 2, 3, 3) for seen in both))
    as_mask = Within(*interval).bind(grid).allowed(range(3), range(3))
    assert torch.equal(as_mask.expand(2, 2, 3, 3), both[1].expand(2, 2, 3, 3))


def test_keys_that_are_hidden_between_are_hidden_one_by_one():
    grid = Grid(2, 1, 4, 8)
    places = torch.arange(8)
    few = torch.stack([(places > 1) & (places != 4), places != 5])
    rule, interval = by_interval((Causal() & Padding(few)).bind(grid), grid)
    assert repr(rule) == "Causal(offset=4)"
    assert interval.first.tolist() == [[2], [0]]
    assert interval.end.tolist() == [[8], [8]]
    assert torch.equal(told_in(interval, grid)[:, 0], few[:, None].expand(2, 4, 8))
    both = by_interval((Padding(few) & Padding(few.flip(1))).bind(grid), grid)[1]
    assert torch.equal(told_in(both, grid)[:, 0], (few & few.flip(1))[:, None].expand(2, 4, 8))


def test_any_byte_but_0_is_true():
    grid = Grid(1, 1, 1, 20)
    mask = torch.zeros(1, 20, dtype=torch.uint8)
    mask[0, 11:14] = torch.tensor([2, 255, 128], dtype=torch.uint8)
    _, interval = by_interval(Padding(mask.view(torch.bool)).bind(grid), grid)
    assert (int(interval.first), int(interval.end)) == (11, 14)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rule_and_interval_are_the_mask(data):
    grid = data.draw(grids())
    mask = data.draw(st.one_of(single_masks(grid), composed_masks(grid))).mask.bind(grid)
    rule, interval = by_interval(mask, grid)
    whole = range(grid.query_len), range(grid.key_len)
    sizes = grid.batch, grid.heads, grid.query_len, grid.key_len
    found = rule.allowed(*whole).expand(sizes)
    if interval is not None:
        found = found & cells(interval, grid)
    assert torch.equal(found, mask.allowed(*whole).expand(sizes))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_output_and_gradients_are_those_of_the_reference(data):
    number = data.draw(st.integers(0, 1 << 30))
    of = torch.Generator().manual_seed(number)
    batch, queries = data.draw(st.sampled_from([1, 3])), data.draw(st.sampled_from([3, 20, 40, 150]))
    keys = queries if data.draw(st.booleans()) else 150
    starts = torch.randint(0, keys, (batch, 1), generator=of)
    ends = starts + torch.randint(0, keys, (batch, 1), generator=of)
    places = torch.arange(keys)
    limits = {
        "right": Padding(ends.clamp(max=keys)[:, 0]),
        "holes": Padding(((starts <= places) & (places < ends)) & (places % 7 > 0)),
        "both sides": Padding((starts <= places) & (places < ends)),
        "prefix": Prefix(starts[:, 0]),
        "cells": Dense(((starts <= places) & (places < ends))[:, None, None]),
        "offsets": Window(20, offset=starts[:, 0]),
        "at random": Dense(torch.rand(batch, 1, queries, keys, generator=of) < 0.5),
        "at random, of heads": Dense(torch.rand(1, 4, queries, keys, generator=of) < 0.2),
        "either": Window(5) | Dense(((places % 9 == 1) & (starts <= places))[:, None, None]),
    }
    if queries == keys:
        ids = torch.randint(0, 5, (batch, keys), generator=of).sort(1).values
        limits["documents"] = Document(ids)
        limits["cells of queries"] = Dense((ids[:, None, :, None] == ids[:, None, None]) & (places[:, None] >= places))
    limit = data.draw(st.sampled_from(sorted(limits)))
    rule = data.draw(st.sampled_from([None, Causal(), Window(30), Causal() & (Window(9) | Prefix(4))]))
    mask = limits[limit] if rule is None else rule & limits[limit]
    tensors = [draw(size, number + n) for n, size in enumerate([(batch, 4, queries, 8), *[(batch, 2, keys, 8)] * 2])]
    bias = draw((1, 4, queries, keys), number) if data.draw(st.booleans()) else None
    results = []
    for kernel in ("reference", "native"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = attention(*leaves, mask=mask, bias=bias, kernel=kernel)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for expected, found in zip(*results, strict=True):
        assert_close(found, expected)


def test_new_texts_need_no_new_strips():
    first, second = (native.plan_of(call_of(Causal() & Padding(lengths))) for lengths in (LENGTHS, LENGTHS.flip(0)))
    assert first.strips is second.strips
    assert first.orders is second.orders
    assert first.interval.end.tolist() == [[5], [9], [0]]
    assert second.interval.end.tolist() == [[0], [9], [5]]


def test_they_are_told_of_their_own_keys_though_all_else_is_kept():
    query, key, value = (draw((3, 2, 9, 8), n) for n in range(3))
    some = [torch.rand(3, 9, generator=torch.Generator().manual_seed(n)) < 0.8 for n in range(20)]
    for limit in (LENGTHS, LENGTHS.flip(0), LENGTHS + 1 - (LENGTHS == 9).long(), *some):
        mask = Causal() & Padding(limit)
        expected = attention(query, key, value, mask=mask, kernel="reference")
        assert_close(attention(query, key, value, mask=mask, kernel="native"), expected)


@pytest.mark.parametrize("limit", [Padding(LENGTHS), Document(torch.arange(9) // 4)])
def test_scores_are_counted_by_vectors(limit):
    allowed = int(limit.bind(Grid(3, 2, 9, 9)).allowed(range(9), range(9)).expand(3, 2, 9, 9).sum())
    assert allowed <= native.num_scores(call_of(limit)) <= 3 * 2 * 9 * 16
    assert native.num_scores(call_of(Padding([0, 0, 0]))) == 0


def test_cells_of_a_rectangle():
    interval = Interval(torch.tensor([[2, 2, 0, 0]]).int(), torch.tensor([[4, 6, 3, 3]]).int())
    whole = range(4), range(8)
    assert interval.cells_on(EVERY_DIAGONAL, *whole, 2) == 2 * 4 + 2 * 3
    assert interval.cells_on((None, 0), *whole, 2) == 2 * 0 + 2 * 3
    assert interval.cells_on((1, None), *whole, 2) == 2 * 4 + 2 * 0
    assert interval.cells_on(EVERY_DIAGONAL, range(2, 4), range(1, 8), 2) == 2 * 2
    assert interval.cells_on(EVERY_DIAGONAL, range(0, 4, 2), range(0, 8, 2), 1) == 1 + 2


def test_the_library_tells_whether_keys_are_side_by_side():
    cells = torch.tensor([[True, True, False, False, True], [False, True, False, True, False]])
    first, end = torch.empty(2, 2, dtype=torch.int32).unbind()

    def side_by_side(rows, keys):
        return compiled().find_keys(cells.data_ptr(), rows, keys, cells.stride(0), first.data_ptr(), end.data_ptr())

    assert side_by_side(rows=1, keys=3)
    assert side_by_side(rows=2, keys=3)
    assert (first.tolist(), end.tolist()) == ([0, 1], [2, 2])
    assert not side_by_side(rows=2, keys=5)
    assert (first.tolist(), end.tolist()) == ([0, 1], [5, 4])


def test_torch_tells_the_same_where_there_is_no_library(monkeypatch):
    cells = (
        torch.rand(3, 40, 9, generator=torch.Generator().manual_seed(0)) < torch.tensor([0.1, 0.5, 1.0])[:, None, None]
    )
    told, side_by_side = intervals._hull_of(cells)
    monkeypatch.setattr(intervals, "compiled", lambda dtype: None)
    found, also = intervals._hull_of(cells)
    some = cells.any(2)
    assert torch.equal(found.first[some], told.first[some])
    assert torch.equal(found.end[some], told.end[some])
    assert (found.first == found.end)[~some].all()
    assert side_by_side is also is False
    assert intervals._hull_of(cells[2:])[1]


# --- documents whose tokens are apart ---------------------------------------------------------------------------------


BESIDE = {
    "a window": lambda length: Causal() & Window(7),
    "a window both ways": lambda length: Window(5),
    "all but a window": lambda length: Causal() & ~Window(4),
    "chunks": lambda length: Causal() & Chunk(6),
    "a prefix": lambda length: Causal() | Prefix(9),
    "a stride": lambda length: Strided(3),
    "a stride from elsewhere, in a window": lambda length: Strided(3, offset=1) & Window(9),
    "two strides": lambda length: Strided(2) & Strided(3) & Causal(),
    "other documents": lambda length: Document(torch.arange(length)[None] % 4),
    "other documents for each text": lambda length: Document(apart(3, length, seed=5)) & Causal(),
    "offsets of each text": lambda length: Band(6, 2, offset=[0, 3, -50]),
    "padding": lambda length: Window(8) & Padding(torch.arange(length) % 5 < torch.tensor([[4], [3], [5]])),
    "cells": lambda length: Dense(draw((60 if length == 75 else length, length)) < 0.3),
    "cells of heads": lambda length: (
        Window(20) & Dense(torch.rand(1, 2, 1, length, generator=torch.Generator().manual_seed(8)) < 0.6)
    ),
    "a window or a stride": lambda length: Window(4) | Strided(7),
    "a window or a prefix, not here": lambda length: Causal() & ~(Window(4) | Prefix(3)),
    "a function of keys": lambda length: Where(lambda batch, head, query, key: key % 3 == 0),
    "a function of both": lambda length: Where(lambda batch, head, query, key: (key <= query) & (key * 2 >= query)),
}


def apart(batch, length, seed=0, kinds=4, dtype=torch.int64):
    return torch.randint(-1, kinds, (batch, length), generator=torch.Generator().manual_seed(seed)).to(dtype)


def sorted_call(mask, queries=60, keys=60):
    """A call, and how its tokens are sorted."""
    call = call_of(mask, queries=queries, keys=keys)
    found = reordering(call)
    assert found is not None
    return call, found


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("of_keys", [None, "as many", "more"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_sorted_by_document_tokens_see_each_other_as_before(beside, rows, of_keys):
    keys = 75 if of_keys == "more" else 60
    if of_keys == "more" and any(type(part) is Document for part in factors(beside(keys))):
        pytest.skip("documents of queries and keys alike")
    ids = None if of_keys is None else apart(rows, keys, seed=1, kinds=6, dtype=torch.int32)
    call, found = sorted_call(Document(apart(rows, 60), ids) & beside(keys), keys=keys)
    before = call.scoring.mask.allowed(range(60), range(keys)).expand(3, -1, 60, keys)
    after = found.mask.allowed(range(60), range(keys)).expand(3, -1, 60, keys)
    queries, places = (of.expand(3, -1) for of in (found.queries, found.keys))
    for text in range(3):
        assert torch.equal(after[text], before[text][:, queries[text]][:, :, places[text]])
    assert torch.equal(found.queries.gather(1, found.back), torch.arange(60).expand_as(found.back))


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_documents_apart_under_another_mask_are_computed_exactly(beside, monkeypatch):
    monkeypatch.setattr(tuning, "KEYS_WORTH_SORTING", -1)
    mask, tensors = (
        Document(apart(3, 60)) & beside(60),
        [draw((3, 2, 60, 8), seed).requires_grad_() for seed in range(3)],
    )
    results = []
    for kernel in ("native", "strips", "reference"):
        output = attention(*tensors, mask=mask, bias=Alibi(2), kernel=kernel)
        results.append([output, *torch.autograd.grad(output.sin().sum(), tensors)])
    for ours, by_operators, right in zip(*results, strict=True):
        assert_close(ours, right)
        assert_close(by_operators, right)


def test_little_else_is_computed_than_the_documents_of_a_window():
    call = check_call(
        "test", *torch.zeros(3, 1, 2, 2048, 8), Causal() & Window(600) & Document(apart(1, 2048, kinds=7)), *[None] * 5
    )
    allowed = int(call.scoring.mask.allowed(range(2048), range(2048)).sum()) * 2
    assert native.num_scores(call) < 1.5 * allowed


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("beside", [Where(lambda batch, head, query, key: key % 3 == 0), Window(4) | Strided(7)])
def test_tokens_of_documents_side_by_side_stay_where_they_are(beside):
    assert reordering(call_of(Document(apart(1, 60)) & beside, queries=60, keys=60)) is not None
    assert reordering(call_of(Document(apart(1, 60).sort(1).values) & beside, queries=60, keys=60)) is None


@pytest.mark.parametrize("beside", ["cells", "a window or a prefix", "a function of keys"])
def test_little_else_is_computed_than_the_documents_beside_any_mask(beside):
    masks = {**BESIDE, "a window or a prefix": lambda length: Causal() & (Window(512) | Prefix(64))}
    shown = masks[beside](2048)
    call = check_call("test", *torch.zeros(3, 1, 2, 2048, 8), shown & Document(apart(1, 2048)), *[None] * 5)
    whole = call._replace(scoring=replace(call.scoring, mask=Document(apart(1, 2048)).bind(call.scoring.grid)))
    assert native.num_scores(call) <= 1.1 * native.num_scores(whole)


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("beside", [Window(5), Strided(3) & Window(30)])
def test_tokens_are_not_copied_where_little_is_won(beside):
    call = call_of(Document(apart(1, 60)) & beside, queries=60, keys=60)
    assert reordering(call) is not None
    assert reordering(call, copies=True) is None


def with_gaps(batch, length, share=0.4, seed=0):
    return torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share


GAPS = {
    "padding": lambda batch: Padding(with_gaps(batch, 60)),
    "padding and padding": lambda batch: Padding(with_gaps(batch, 60)) & Padding([50, 9, 60]),
    "twice": lambda batch: Padding(with_gaps(batch, 60)) & Padding(with_gaps(1, 60, seed=1)),
    "a text that is all hidden": lambda batch: Padding(with_gaps(3, 60) & (torch.arange(3) != 1)[:, None]),
    "cells": lambda batch: Dense(with_gaps(batch, 60)[:, None, None]),
    "causal": lambda batch: Causal() & Padding(with_gaps(batch, 60)),
    "a window of cells": lambda batch: Window(9) & Dense(with_gaps(batch, 60)[:, None, None]),
    "a prefix": lambda batch: (Causal() | Prefix(9)) & Padding(with_gaps(batch, 60)),
    "offsets of each text": lambda batch: Band(6, 2, offset=[0, 3, -50]) & Padding(with_gaps(batch, 60)),
    "documents": lambda batch: Document(apart(batch, 60).sort(1).values) & Causal() & Padding(with_gaps(batch, 60)),
    "documents apart": lambda batch: Document(apart(3, 60)) & Padding(with_gaps(batch, 60)),
    "a stride": lambda batch: Strided(3) & Padding(with_gaps(batch, 60)) & Causal(),
}


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", GAPS)
def test_keys_that_nobody_sees_between_others_are_left_out(kind, batch, monkeypatch):
    monkeypatch.setattr(tuning, "SCORES_WORTH_SORTING", 0)
    call, found = sorted_call(GAPS[kind](batch))
    before = call.scoring.mask.allowed(range(60), range(60)).expand(3, -1, 60, 60)
    after = found.mask.allowed(range(60), range(60)).expand(3, -1, 60, 60)
    queries, places = (of.expand(3, -1) for of in (found.queries, found.keys))
    for text in range(3):
        assert torch.equal(after[text], before[text][:, queries[text]][:, :, places[text]])
    grid = call.scoring.grid
    rule, interval = by_interval(found.mask, grid)
    assert interval is not None
    assert interval.words is None  # each query sees keys side by side
    assert rule is EVERYTHING


@pytest.mark.parametrize("bad", [0.0, torch.nan])
@pytest.mark.parametrize("kind", GAPS)
def test_calls_whose_keys_have_gaps_are_computed_exactly(kind, bad, monkeypatch):
    monkeypatch.setattr(tuning, "SCORES_WORTH_SORTING", 0)
    monkeypatch.setattr(tuning, "KEYS_WORTH_SORTING", -1)
    mask, tensors = GAPS[kind](3), [draw((3, 2, 60, 8), seed) for seed in range(3)]
    seen = mask.bind(Grid(3, 2, 60, 60)).allowed(range(60), range(60)).expand(3, 2, 60, 60).any(2)
    for part in tensors[1:]:
        part.masked_fill_(~seen[..., None], bad)
    results = []
    for kernel in ("native", "strips", "reference"):
        leaves = [part.clone().requires_grad_() for part in (*tensors, torch.linspace(-1, 1, 32 * 2).view(32, 2))]
        sink = torch.arange(2.0).requires_grad_()
        output = attention(*leaves[:3], mask=mask, bias=RelativeBias(leaves[3]), sink=sink, kernel=kernel)
        results.append([output, *torch.autograd.grad(output.sin().sum(), (*leaves, sink))])
        torch.manual_seed(0)
        results[-1].append(attention(*tensors, mask=mask, bias=Alibi(2), dropout=0.4, kernel=kernel))
    for ours, by_operators, right in zip(*results, strict=True):
        assert_close(ours, right)
        assert_close(by_operators, right)


def test_few_gaps_or_few_scores_are_not_worth_sorting():
    few = torch.arange(2048)[None] % 9 != 5
    assert reordering(call_of(Padding(few), queries=2048, keys=2048)) is None
    assert reordering(call_of(Padding(few[:, :200] & with_gaps(1, 200)), queries=200, keys=200)) is None
    assert reordering(call_of(Padding(few & (torch.arange(2048) > 900)), queries=2048, keys=2048)) is None
    assert reordering(call_of(Padding(few & with_gaps(1, 2048)), queries=2048, keys=2048)) is not None


def test_a_mask_with_too_many_cells_is_not_looked_at(monkeypatch):
    grid, mask = Grid(1, 1, 50, 50), Causal() & Chunk(7)
    found = side_by_side(mask.bind(grid), grid)
    assert torch.equal(cells(found, grid), mask.bind(grid).allowed(range(50), range(50)))
    monkeypatch.setattr(intervals, "MAX_LOOKED_AT", 50 * 50 - 1)
    mask = Causal() & Chunk(8)
    assert side_by_side(mask.bind(grid), grid) is None
    assert side_by_side((Causal() & Window(8)).bind(grid), grid) is not None


def test_between_tells_of_rectangles_what_its_cells_do():
    first = torch.tensor([[0, 2, 4, 4], [1, 1, 0, 3]], dtype=torch.int32)
    end = torch.tensor([[3, 5, 4, 6], [4, 4, 6, 6]], dtype=torch.int32)
    mask = Between(first, end).bind(Grid(2, 1, 4, 6))
    assert mask.draw(4, 6, batch=2).splitlines()[2].split() == [".", ".", ".", ".", ".", "."]
    for top, bottom in ((0, 1), (0, 2), (1, 4), (2, 3), (0, 4)):
        for left in range(6):
            for right in range(left + 1, 7):
                inside = mask.allowed(range(top, bottom), range(left, right))
                expected = Tile.FULL if inside.all() else Tile.PARTIAL if inside.any() else Tile.EMPTY
                assert mask.tile(range(top, bottom), range(left, right)) is expected

"""Attention over many processes is attention: forward, backward, and what is sent."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from cases import GRID, composed_masks, fixed_masks, grids, tensors
from comparing import assert_close, assert_within_budget
from ranks import Raised, Ranks
from regard import Alibi, Causal, Document, Image, PerKey, Prefix, Pyramid, RelativeBias, Spread, Top, Window
from regard.parallel import ParallelError, Shards, plan
from regard.parallel.exchange import plan_exchange
from regard.parallel.fingerprint import fingerprint
from regard.parallel.heads import heads_pay
from regard.scores import Scoring
from regard.shapes import Grid, ShapeError
from sharded import (
    asks_for_what_cannot_be_joined,
    call,
    calls_as_an_outsider,
    compiled_step,
    dies_between_the_passes,
    differentiates_twice,
    even,
    odd,
    reference,
    seen,
    share,
    share_by_table,
    statistics,
    whole,
)


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(4)
    yield started
    started.close()


def weights_of(query, value, seed=3):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(*query.shape[:3], value.shape[3], generator=draw),
        torch.randn(query.shape[:3], generator=draw),
    )


def assert_is_the_whole(ranks, size, query, key, value, arguments, shards, key_shards=None, exchange="keys"):
    """Outputs, lse and gradients of all ranks, against the specification in float64.

    In half precision also against the specification in that dtype.
    """
    weights = weights_of(query, value)
    answers = ranks.results(share, (query, key, value), weights, arguments, shards, key_shards, exchange, ranks=size)
    of_query = shards or Shards.contiguous(query.shape[2], size)
    of_key = key_shards or (of_query if shards is not None else Shards.contiguous(key.shape[2], size))
    wide = {name: given.double() if isinstance(given, torch.Tensor) else given for name, given in arguments.items()}
    exact = whole(reference, [t.double() for t in (query, key, value)], weights, wide)
    half = query.dtype in (torch.bfloat16, torch.float16)
    plain = whole(reference, (query, key, value), weights, arguments) if half else exact
    names = "output", "lse", "grad query", "grad key", "grad value", "grad of shared", "grad of shared"
    along = of_query, of_query, of_query, of_key, of_key
    for n, parts in enumerate(zip(*answers, strict=True)):
        found = along[n].join(parts) if n < len(along) else sum(parts)
        what = f"{names[n]} of {arguments} on {size} ranks"
        if half:
            assert_within_budget(found, exact[n], plain[n], what)
        else:
            assert_close(found, exact[n].to(found.dtype), what)


@st.composite
def shards_of(draw, length, size):
    """Positions cut anywhere, and dealt to anybody."""
    way = draw(st.sampled_from(["contiguous", "zigzag", "any"]))
    if way != "any":
        return getattr(Shards, way)(length, size)
    ends = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=5))})
    held = [[] for _ in range(size)]
    for start, stop in pairwise(ends):
        held[draw(st.integers(0, size - 1))].append(range(start, stop))
    return Shards(held)


@settings(max_examples=40)
@given(data=st.data())
def test_any_mask_on_any_shards_gives_the_rows_and_gradients_of_the_whole(ranks, data):
    grid = data.draw(grids(largest=13))
    grid = grid._replace(heads=2 * grid.heads)
    mask = data.draw(composed_masks(grid)).mask
    size = data.draw(st.sampled_from([2, 3, 4]))
    query, key, value = tensors(
        torch.float64, batch=grid.batch, heads=grid.heads, kv_heads=grid.heads // 2, query_len=grid.query_len,
        key_len=grid.key_len, head_dim=4, value_dim=3,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    more = {
        "softcap": 3.0, "sink": torch.randn(grid.heads, generator=draw), "scale": 0.7,
        "bias": torch.randn(grid.heads, grid.query_len, grid.key_len, generator=draw)[None],
    }  # fmt: skip
    arguments = {"mask": mask} | {name: more[name] for name in data.draw(st.sets(st.sampled_from(sorted(more))))}
    shards = data.draw(st.none() | shards_of(grid.query_len, size))
    key_shards = None
    if shards is not None and (grid.query_len != grid.key_len or data.draw(st.booleans())):
        key_shards = data.draw(shards_of(grid.key_len, size))
    ways = ["auto", "keys"] if key.shape[1] % size else ["auto", "keys", "heads"]
    assert_is_the_whole(ranks, size, query, key, value, arguments, shards, key_shards, data.draw(st.sampled_from(ways)))


@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_of_the_design(ranks, name):
    query, key, value = tensors(torch.float32)
    arguments = {"mask": fixed_masks()[name].mask, "bias": Alibi(GRID.heads), "sink": torch.linspace(-1, 1, GRID.heads)}
    shards = Shards([[range(2), range(5, 7)], [range(2, 5)]]), Shards([[range(3, 9)], [range(3), range(9, 11)]])
    assert_is_the_whole(ranks, 2, query, key, value, arguments, *shards)


def long_masks(length):
    """Masks of a call several strips and parcels long."""
    return {
        "causal": Causal(),
        "a window and a prefix": Causal() & (Window(100) | Prefix(4)),
        "documents": Causal() & Document.from_lengths([300, 1000, 40, length - 1340]),
        "documents whose tokens lie apart": Document(torch.arange(length) % 3),
        "nothing hidden": None,
    }


@pytest.mark.parametrize("name", long_masks(4001))
def test_a_long_call_in_many_parcels(ranks, name):
    length = 4001
    query, key, value = tensors(
        torch.float32, batch=1, heads=2, kv_heads=1, query_len=length, key_len=length, head_dim=8
    )
    arguments = {"mask": long_masks(length)[name]}
    weights = weights_of(query, value)
    shards = Shards.zigzag(length, 3)
    answers = ranks.results(share, (query, key, value), weights, arguments, shards, ranks=3)
    single = whole(regard.attention_with_lse, (query, key, value), weights, arguments)
    for n, parts in enumerate(zip(*answers, strict=True)):
        assert_close(shards.join(parts), single[n], f"result {n}")


def test_dropout_drops_the_same_cells_as_on_one_process_from_the_seed_of_rank_0(ranks):
    query, key, value = tensors(torch.float32)
    arguments = {"mask": Causal() | Prefix(2), "dropout": 0.4}
    shards = Shards([[range(3), range(5, 7)], [range(3, 5)], []]), Shards.contiguous(11, 3)
    for way in ("keys", "heads"):
        assert_is_the_whole(ranks, 3, query, key, value, arguments, *shards, way)


def test_dropout_of_dealt_heads_is_theirs_where_tokens_are_sorted_by_document(ranks):
    length = 300
    query, key, value = tensors(torch.float32, heads=4, kv_heads=4, query_len=length, key_len=length)
    arguments = {"mask": Document(torch.arange(length) % 3), "dropout": 0.4}
    assert_is_the_whole(ranks, 2, query, key, value, arguments, Shards.contiguous(length, 2), None, "heads")


@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_of_the_design_with_heads_over_ranks(ranks, name):
    query, key, value = tensors(torch.float32)
    arguments = {"mask": fixed_masks()[name].mask, "bias": Alibi(GRID.heads), "sink": torch.linspace(-1, 1, GRID.heads)}
    shards = Shards([[range(2), range(5, 7)], [range(2, 5)], []]), Shards.contiguous(11, 3)
    assert_is_the_whole(ranks, 3, query, key, value, arguments, *shards, "heads")


def test_heads_travel_where_that_moves_fewer_numbers():
    def pays(mask, size, heads=8, kv_heads=8):
        grid = Grid(1, heads, 4096, 4096)
        scoring = Scoring(grid, 1.0, mask=None if mask is None else mask.bind(grid))
        return heads_pay(scoring, *[Shards.zigzag(4096, size)] * 2, kv_heads, 64, 64)

    assert pays(None, 8)
    assert pays(Causal(), 8)
    assert not pays(None, 2)  # as many numbers as keys and values
    assert not pays(Causal() & Window(64), 8)
    assert not pays(None, 8, heads=64)  # query heads that share few keys
    assert not pays(None, 3)  # 8 heads cannot be dealt to 3 ranks


def test_a_bias_that_learns_gets_the_share_of_each_ranks_queries(ranks):
    query, key, value = tensors(torch.float32)
    table = torch.linspace(-1, 1, 8 * GRID.heads).view(8, GRID.heads)
    weights = weights_of(query, value)

    def by_table(*given, bias, **more):
        return regard.attention_with_lse(*given, bias=RelativeBias(bias, max_distance=6), **more)

    expected = whole(by_table, (query, key, value), weights, {"bias": table, "mask": Causal()})
    shards = Shards.contiguous(7, 3), Shards.zigzag(11, 3)
    found = ranks.results(share_by_table, (query, key, value), weights, table, *shards, ranks=3)
    assert_close(sum(found), expected[-1])


def test_half_precision_is_as_exact_as_on_one_process(ranks):
    for dtype in (torch.bfloat16, torch.float16):
        query, key, value = tensors(dtype)
        assert_is_the_whole(ranks, 4, query, key, value, {"mask": Causal()}, None)


def test_results_are_the_same_bits_every_time(ranks):
    query, key, value = tensors(torch.float32, query_len=64, key_len=64)
    given = (query, key, value), weights_of(query, value), {"mask": Causal()}, Shards.zigzag(64, 4)
    first, second = ranks.results(share, *given), ranks.results(share, *given)
    assert all(
        torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_numbers_that_nobody_may_see_reach_nothing_on_any_rank(ranks):
    query, key, value = tensors(torch.float32, query_len=12, key_len=12)
    key, value = key.detach().clone(), value.detach().clone()
    hidden = regard.Padding([12, 5])
    clean = whole(regard.attention_with_lse, (query, key, value), weights_of(query, value), {"mask": hidden})
    key[1, :, 5:], value[1, :, 5:] = torch.nan, torch.inf
    shards = Shards.contiguous(12, 3)
    answers = ranks.results(share, (query, key, value), weights_of(query, value), {"mask": hidden}, shards, ranks=3)
    for n, parts in enumerate(zip(*answers, strict=True)):
        assert_close(shards.join(parts), clean[n], f"result {n}")


def test_inside_of_torch_compile_it_runs_as_it_is(ranks):
    for found, expected in ranks.results(compiled_step, ranks=2):
        for part, other in zip(found, expected, strict=True):
            assert_close(part, other)


@pytest.mark.parametrize("exchange", ["keys", "heads"])
def test_gradients_of_gradients_are_refused(ranks, exchange):
    for answer in ranks.run(differentiates_twice, exchange, ranks=2):
        assert answer.kind == "ParallelError"
        assert "gradients of gradients are not computed over ranks" in answer.text


# --- statistics -------------------------------------------------------------------------------------------------------


def assert_same_answer(found, expected, what):
    if isinstance(expected, torch.Tensor):
        if expected.is_floating_point():
            assert_close(found, expected, what)
        else:
            assert torch.equal(found, expected), what
        return
    for n, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_answer(one, other, f"{what}, part {n}")


@settings(max_examples=15)
@given(data=st.data())
def test_statistics_of_any_call_are_those_of_the_whole(ranks, data):
    grid = data.draw(grids(smallest=3, largest=13))
    mask, size = data.draw(composed_masks(grid)).mask, data.draw(st.sampled_from([2, 3, 4]))
    query, key, _ = tensors(
        torch.float64, batch=grid.batch, heads=grid.heads, kv_heads=grid.heads, query_len=grid.query_len,
        key_len=grid.key_len, head_dim=4,
    )  # fmt: skip
    arguments = {"mask": mask, "sink": torch.linspace(-1, 1, grid.heads, dtype=torch.float64)}
    shards, key_shards = data.draw(shards_of(grid.query_len, size)), data.draw(shards_of(grid.key_len, size))
    groups = torch.arange(grid.key_len) % 3
    alone = regard.observe(query.detach(), key.detach(), **arguments)
    expected = alone.gather(*statistics(groups))
    lse = data.draw(st.sampled_from([None, alone.lse]))
    answers = ranks.results(seen, query, key, arguments, shards, key_shards, groups, lse, ranks=size)
    for n, statistic in enumerate(statistics(groups)):
        of = key_shards if isinstance(statistic, PerKey) else shards
        for rank, (found, _, _) in enumerate(answers):
            if isinstance(statistic, (Image, Pyramid)):
                mine = expected[n]
            elif isinstance(statistic, (Top, Spread)):
                mine = [of.take(part, rank) if part.dim() > 2 else part for part in expected[n]]
            else:
                mine = of.take(expected[n], rank)
            assert_same_answer(found[n], mine, f"{type(statistic).__name__} on rank {rank}")
    assert_close(key_shards.join([received for _, received, _ in answers]), expected[2])
    assert_close(shards.join([lse for _, _, lse in answers]), alone.lse)


def test_a_statistic_that_cannot_be_joined_is_refused(ranks):
    for answer in ranks.run(asks_for_what_cannot_be_joined, ranks=2):
        assert answer.kind == "TypeError"
        assert "Last derives from neither PerQuery nor PerKey" in answer.text


# --- what travels -----------------------------------------------------------------------------------------------------


def drawn(data):
    """A call over ranks: its grid and bound mask, the number of ranks, and how queries and keys are dealt out."""
    grid = data.draw(grids(largest=40))
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    size = data.draw(st.integers(1, 4))
    queries, keys = data.draw(shards_of(grid.query_len, size)), data.draw(shards_of(grid.key_len, size))
    return grid, mask, size, queries, keys


@given(st.data())
def test_what_a_rank_sends_is_what_the_other_expects_and_all_that_it_may_see(data):
    grid, mask, size, queries, keys = drawn(data)
    plans = [plan_exchange(mask, queries, keys, rank) for rank in range(size)]
    for rank, found in enumerate(plans):
        for other in range(size):
            sent = [turn.sent for turn in found.turns if turn.target == other and turn.sent]
            expected = [turn.received for turn in plans[other].turns if turn.source == rank and turn.received]
            assert sent == expected
        here = {key for part in found.own for key in part}
        here |= {key for turn in found.turns for part in turn.received for key in part}
        seen = mask.allowed(queries.positions(rank), torch.arange(grid.key_len))
        seen = seen.expand(-1, -1, queries.size(rank), grid.key_len).flatten(0, 2).any(0)
        assert set(seen.nonzero().flatten().tolist()) <= here


@given(st.data())
def test_every_allowed_score_of_a_rank_is_in_one_of_its_rectangles(data):
    grid, mask, size, queries, keys = drawn(data)
    times = torch.zeros(grid.query_len, grid.key_len, dtype=torch.int64)
    for rank in range(size):
        found, rows = plan_exchange(mask, queries, keys, rank), queries.positions(rank)
        held = [(keys.positions(rank), found.rectangles)]
        held += [(torch.cat([torch.arange(part.start, part.stop) for part in turn.received]), turn.rectangles)
                 for turn in found.turns if turn.received]  # fmt: skip
        for columns, rectangles in held:
            for place in rectangles:
                assert rows[place.rows].tolist() == list(place.queries)
                assert columns[place.columns].tolist() == list(place.keys)
                times[place.queries.start : place.queries.stop, place.keys.start : place.keys.stop] += 1
    allowed = mask.allowed(range(grid.query_len), range(grid.key_len)).flatten(0, -3).any(0)
    assert set(times.flatten().tolist()) <= {0, 1}
    assert bool(times[allowed.expand_as(times)].all())


def bound(mask, length):
    return mask.bind(Grid(1, 8, length, length))


def test_a_window_sends_little_more_than_its_neighbours_need():
    mask = bound(Causal() & Window(256), 65536)
    for rank in range(4):
        received = plan_exchange(mask, *[Shards.contiguous(65536, 4)] * 2, rank).keys_received
        assert received <= 1.1 * 255 * (rank > 0)
        print(f"rank {rank}: {received} keys received")


def test_documents_that_lie_whole_on_a_rank_send_nothing():
    lengths = [3000, 500, 1200, 700, 2100, 64, 900, 1536]
    mask = Causal() & Document.from_lengths(lengths)
    shards = Shards.balanced(mask, sum(lengths), 4)
    plans = [plan_exchange(bound(mask, sum(lengths)), shards, shards, rank) for rank in range(4)]
    assert [found.keys_received for found in plans] == [0] * 4
    assert [found.keys_sent for found in plans] == [0] * 4


@pytest.mark.parametrize(("length", "size"), [(16384, 2), (16384, 4), (10001, 4), (9999, 7)])
def test_zigzag_gives_every_rank_the_same_work_under_a_causal_mask(length, size):
    shards = Shards.zigzag(length, size)
    work = [int(shards.positions(rank).sum()) + shards.size(rank) for rank in range(size)]
    assert max(work) <= 1.02 * sum(work) / size
    assert plan(shards=shards, heads=1, head_dim=8, mask=Causal()).balance <= 1.02


def test_ranks_with_equal_work_have_done_equally_much_after_each_turn():
    length, size, piece = 16384, 2, 4096
    shards = Shards.zigzag(length, size)
    plans = [plan_exchange(bound(Causal(), length), shards, shards, rank) for rank in range(size)]
    done = [0] * size
    for turns in zip(*(found.turns for found in plans), strict=True):
        for rank, turn in enumerate(turns):
            for part in turn.received:  # whoever sees some of it sees all of it
                rows = sum(len(held[held.index(max(held.start, part.stop)) :])
                           for held in shards.ranges[rank] if held.stop > part.stop)  # fmt: skip
                done[rank] += rows * len(part)
        assert max(done) - min(done) <= piece * piece // 4
    assert max(done) == min(done) == 2 * piece * piece


def test_planned_time_counts_what_strips_compute_beyond_the_mask_and_what_a_pass_takes_by_itself():
    speeds = {"flops_per_second": 1e11, "bytes_per_second": 1e15, "latency": 0, "pass_seconds": 0}

    def found(mask, **more):
        return plan(4096, 2, heads=4, head_dim=64, mask=mask, exchange="keys", **speeds | more)

    def slower(mask):
        said = found(mask)
        return said.seconds * 1e11 / max(said.flops)

    assert 1.0 <= slower(None) < 1.02
    # strips of 64 queries see 319 keys, of which each sees 256, and their products are small: 1.7 was measured
    assert 1.55 < slower(Causal() & Window(256)) < 1.85
    assert 1.5 < slower(Causal() & Document.from_lengths([128] * 32)) < 3.0  # causal squares computed nearly whole
    for more, by in (({"pass_seconds": 1.0}, 2.0), ({"latency": 1.0}, 0.0)):
        alone = Document.from_lengths([2048] * 2)
        later = found(alone, backward=True, **more).seconds - found(alone, backward=True).seconds
        assert later == pytest.approx(by)


class EveryThird(regard.Mask):
    """Without a closed form."""

    def rule(self, batch, head, query, key):
        return (key // 1000) % 3 == 0


SCATTERED = {
    "a stride": Causal() & (Window(500) | regard.Strided(64)),
    "documents whose tokens lie apart": Document(torch.arange(1_000_000) % 5),
    "a mask of one's own": EveryThird(),
    "a function": regard.Where(lambda batch, head, query, key: key <= query),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_mask_that_hides_keys_here_and_there_is_asked_about_few_rectangles_and_cells(name, monkeypatch):
    asked, looked = [], []
    tile, allowed = regard.Mask.tile, regard.Mask.allowed

    def counted(mask, rows, columns):
        asked.append(mask)
        return tile(mask, rows, columns)

    def counted_cells(mask, queries, keys):
        found = allowed(mask, queries, keys)
        looked.append(found.numel())
        return found

    monkeypatch.setattr(regard.Mask, "tile", counted)
    monkeypatch.setattr(regard.Mask, "allowed", counted_cells)
    said = plan(1_000_000, 32, heads=1, head_dim=64, mask=SCATTERED[name])
    assert len(asked) < 2_000_000  # 31,250 smallest tiles of keys on each of 32 ranks, 2 questions for each
    assert sum(looked) < 1 << 28  # of 2 ** 40
    assert max(said.received_keys) > 900_000


def test_planned_work_is_that_of_all_cells_counted():
    length = 8000

    def counted(mask, rows):
        bound = mask.bind(Grid(1, 1, length, length))
        shares = [bound.allowed(range(at, at + 500), range(length)).double().mean() for at in range(*rows, 500)]
        return float(sum(shares)) * 500 * length

    for name, mask in (SCATTERED | {"causal": Causal(), "a window": Causal() & Window(300)}).items():
        if name == "documents whose tokens lie apart":
            mask = Document(torch.arange(length) % 5)
        said = plan(length, 2, heads=1, head_dim=1, mask=mask).flops
        exact = [4 * counted(mask, rows) for rows in ((0, length // 2), (length // 2, length))]
        for rank in range(2):
            assert said[rank] == pytest.approx(exact[rank], rel=0.05), name


def test_shards_that_overlap_or_leave_gaps_are_refused():
    with pytest.raises(ShapeError, match="nobody holds positions 3 to 4"):
        Shards([[range(3)], [range(5, 9)]])
    with pytest.raises(ShapeError, match="position 2 is held twice"):
        Shards([[range(3)], [range(2, 9)]])
    with pytest.raises(ShapeError, match="nobody holds positions 0 to 1"):
        Shards([[range(2, 5)]])
    with pytest.raises(TypeError, match="without a step"):
        Shards([[range(0, 6, 2)]])
    shards = Shards([[range(6, 9), range(3)], [], [range(3, 6)]])
    assert shards.positions(0).tolist() == [0, 1, 2, 6, 7, 8]
    whole_of = torch.arange(9)
    assert torch.equal(shards.join([shards.take(whole_of, rank, 0) for rank in range(3)], 0), whole_of)


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_without_a_process_group_the_call_says_how_to_start_one():
    with pytest.raises(ParallelError, match=r"torch.distributed has no process group\n  hint: start with torchrun"):
        regard.parallel.attention(*torch.zeros(3, 1, 1, 2, 4))


DISAGREEMENTS = {
    "dim": ({"dim": 5}, "must agree on head_dim, value_dim"),
    "dtype": ({"dtype": torch.float64}, "must agree on dtype"),
    "mask": ({"mask": Causal() & Window(3)}, "must agree on mask"),
    "the data of a mask": ({"mask": Document(torch.tensor([0] * 6 + [1] * 6))}, "must agree on mask"),
    "softcap": ({"softcap": 2.0}, "must agree on softcap"),
    "the numbers of a sink": ({"sink": torch.ones(2)}, "must agree on sink"),
    "function": ({"function": "attention_with_lse"}, "must agree on function"),
    "shards": ({"shards": Shards.contiguous(12, 3)}, "must agree on shards"),
    "a number that a function names": ({"mask": "function", "every": 3}, "must agree on mask"),
    "a number that the rule of a mask names": ({"mask": "class", "every": 3}, "must agree on mask"),
    "a table that the rule of a bias names": ({"bias": "class", "every": 3}, "must agree on bias"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_so_on_every_rank(ranks, name):
    different, said = DISAGREEMENTS[name]
    others = {"the data of a mask": {"mask": Document(torch.tensor([0] * 5 + [1] * 7))}, "the numbers of a sink":
              {"sink": torch.zeros(2)}}.get(name, different | {"every": 2} if "every" in different else {})  # fmt: skip
    for answer in ranks.run(call, {1: different, "all": others}, ranks=3):
        assert isinstance(answer, Raised)
        assert answer.kind == "ParallelError"
        assert said in answer.text


def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks):
    first, second, third = ranks.run(call, {1: {"mask": "causal"}, "all": {"mask": "causal"}}, ranks=3)
    assert {first.kind, second.kind, third.kind} == {"TypeError"}
    assert "mask must be a regard mask such as Causal()" in first.text
    first, second, third = ranks.run(call, {1: {"dtype": torch.int64}}, ranks=3)
    assert second.kind == "TypeError"
    assert first.kind == third.kind == "ParallelError"
    assert "rank 1 refused the call\n  TypeError: parallel.attention: query, key and value must share" in first.text


def test_a_mask_for_other_positions_is_refused_on_every_rank(ranks):
    for shards in (None, Shards.contiguous(12, 3)):
        local = Document(torch.zeros(4, dtype=torch.int64))
        for answer in ranks.run(call, {"all": {"mask": local, "shards": shards}}, ranks=3):
            assert answer.kind == "ShapeError"
            assert "Document: query_ids is for [batch=1, query_len=4], the scores are" in answer.text
            assert "query_len=12" in answer.text


def test_a_process_outside_of_the_group_is_told_so(ranks):
    for answer in ranks.run(calls_as_an_outsider, ranks=2):
        assert answer.kind == "ParallelError"
        assert answer.text == "parallel.attention: this process is not in the group"


def test_functions_that_name_each_other_have_a_fingerprint():
    assert fingerprint(even) == fingerprint(even) != fingerprint(odd)


def test_shards_of_other_sizes_are_refused_on_every_rank(ranks):
    wrong = Shards([[range(3)], [range(3, 9)], [range(9, 12)]])
    answers = ranks.run(call, {"all": {"shards": wrong}}, ranks=3)
    assert [answer.kind for answer in answers] == ["ShapeError"] * 3
    for answer in ranks.run(call, {"all": {"shards": Shards.contiguous(12, 2)}}, ranks=3):
        assert "shards are for 2 ranks, the group has 3" in answer.text


def test_a_rank_that_hangs_is_an_error_within_the_time_out(ranks):
    answers = ranks.run(call, {1: {"sleep": 3.0}}, 1.0, ranks=3, spare=1)
    for answer in (answers[0], answers[2]):
        assert answer.kind == "ParallelError"
        assert "could not agree on the call within 1 s: a rank has ended, hangs" in answer.text


def test_a_rank_that_has_made_another_call_before_is_noticed(ranks):
    answers = ranks.run(call, {1: {"times": 2}}, 1.0, ranks=3, spare=2)
    assert answers[0] == answers[2] == "no error"
    assert answers[1].kind == "ParallelError"


def test_a_rank_that_dies_is_an_error_on_every_other():  # last: one of the processes has ended
    ranks = Ranks(3)
    try:
        *others, dead = ranks.run(dies_between_the_passes)
        assert isinstance(dead, Raised)
        for text, seconds in others:
            assert "could not" in text
            assert "a rank has ended" in text
            assert seconds < 15
    finally:
        ranks.close()


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/parallel.py as a module, and its committed results."""
    path = Path(__file__).parents[1] / "benchmarks" / "parallel.py"
    spec = importlib.util.spec_from_file_location("benchmark_parallel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, json.loads(module.RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_the_one_that_the_committed_results_make(benchmark):
    module, data = benchmark
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.with_tables(page, data) == page, "run: python benchmarks/parallel.py --report"


def test_the_bytes_that_were_counted_are_those_that_were_planned(benchmark):
    module, data = benchmark
    for ranks, found in data["ranks"].items():
        assert found["rows"].keys() == module.rows(data["length"], int(ranks)).keys()
        for name, row in found["rows"].items():
            for passes, backward in module.PASSES.items():
                said = module.planned(data["length"], int(ranks), name, backward)
                counted, planned = sum(row[passes]["bytes"]), sum(said.bytes_received)
                assert abs(counted - planned) <= 0.05 * planned, (ranks, name, passes)


def test_the_times_that_were_measured_are_those_that_were_planned(benchmark):
    module, data = benchmark
    found = data["ranks"]["2"]  # each process on a core of its own
    ratios = {
        (name, passes): module.planned(data["length"], 2, name, backward, found["speeds"][passes]).seconds
        / row[passes]["seconds"]
        for name, row in found["rows"].items()
        for passes, backward in module.PASSES.items()
    }
    off = [row for row, ratio in ratios.items() if abs(ratio - 1) > 0.25]
    assert not off
    assert "planned times are within 25 %" in module.PAGE.read_text(encoding="utf-8")


def test_two_processes_take_little_more_time_and_memory_than_half_of_one(benchmark):
    module, data = benchmark
    for passes, row in data["alone"]["passes"].items():
        assert row["ratio"] <= 1.15, passes
        assert max(row["peak_bytes of two"]) <= module.memory_bound(data["alone"], passes), passes


PUBLISHED = "## Figures that others published"


def test_what_the_page_says_of_published_figures_is_what_the_planner_says(benchmark):
    page = benchmark[0].PAGE.read_text(encoding="utf-8").partition(PUBLISHED)[2]
    sizes = {"heads": 32, "head_dim": 128, "dtype": torch.bfloat16}

    def causal(shards):
        return plan(shards=shards, mask=Causal(), exchange="keys", **sizes)

    for ranks in (8, 16):
        ring, zigzag = (causal(way(8192 * ranks, ranks)) for way in (Shards.contiguous, Shards.zigzag))
        assert f"{ring.balance:.2f} times the mean" in page
        assert f"{zigzag.balance:.2f}" == "1.00"
    assert f"{1 / causal(Shards.contiguous(65536, 8)).balance:.0%}" == "53%"
    assert "53 %" in page
    for ranks in (8, 16, 32):  # N / P stays the same
        numbers = max(plan(8192 * ranks, ranks, exchange="heads", **sizes).bytes_received) / 2
        assert numbers == 4 * 8192 * 4096 * (ranks - 1) / ranks
    speeds = {"flops_per_second": 312e12, "bytes_per_second": 300e9, "latency": 0, "pass_seconds": 0}

    def slower(shard):
        found = plan(8 * shard, 8, exchange="keys", **speeds, **sizes)
        return found.seconds * 312e12 / max(found.flops)

    assert slower(1040) <= 1.01
    assert f"{slower(520):.1f} times as long" in page

"""Every statistic against the dense weights in float64, for every mask and bias, whole and in tiles."""

import gc
import math

import pytest
import torch

from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, KV_HEADS, QUERY_LEN, biases, fixed_masks, tensors
from comparing import assert_close, assert_zero
from naive import naive
from regard.biases import Alibi, as_bias
from regard.functional import attention, attention_with_lse
from regard.masks import Band, Causal, Chunk, Dense, Document, Mask, Padding, Prefix, Tile, Where, Window
from regard.numerics import grouped_matmul, softmax
from regard.observation import (
    Distance,
    Entropy,
    Image,
    Mass,
    MaxScore,
    PerQuery,
    Pyramid,
    Received,
    Share,
    Spread,
    Statistic,
    Top,
    Viewers,
    Visible,
    observe,
    products,
    tuning,
)
from regard.observation.magnitude import MODERATE, magnitude_of
from regard.observation.tiling import heads_of_a_tile, plan_tiles
from regard.scores import Additive
from regard.shapes import ShapeError

QUERY, KEY, VALUE = (x.detach() for x in tensors())
MASKS = fixed_masks()
BIASES = biases()
SINK = torch.linspace(-1.0, 1.5, HEADS, dtype=torch.float64)
V = torch.randn(HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

CALLS = {
    "nothing": {},
    **{f"mask: {name}": {"mask": ruled.mask} for name, ruled in MASKS.items()},
    **{f"bias: {name}": {"bias": bias} for name, (bias, _) in BIASES.items()},
    "scale": {"scale": 2.0},
    "softcap": {"softcap": 0.8, "scale": 1.0},
    "sink": {"sink": SINK},
    "sink and rows that see nothing": {"sink": SINK, "mask": Padding([0, 4])},
    "a sink of no weight": {"sink": torch.full((HEADS,), -math.inf, dtype=torch.float64), "mask": Padding([0, 4])},
    "additive": {"additive": Additive(V)},
    "everything": {
        "mask": Causal() & Window(3), "bias": BIASES["alibi + tensor"][0], "softcap": 2.0, "sink": SINK, "scale": 1.0,
    },
}  # fmt: skip

every_call = pytest.mark.parametrize("name", CALLS)


TILINGS = ["by the compiled kernel", "at once", "in whole rows", "in tiles"]


@pytest.fixture(params=TILINGS)
def _tiles(request, monkeypatch):
    """Without tiles, where the kernel is there and computes it; or all 7 x 11 scores at once; 3 rows of some heads; and
    4 x 4 of all heads, where 2 keys may make a tile."""
    if request.param == TILINGS[0]:
        return
    request.getfixturevalue("without_the_library")
    if request.param != "at once":
        whole = {"MAX_TILE_SCORES": 3 * 4 * KEY_LEN + 5, "TILE_QUERIES": 3}
        parts = {"MAX_TILE_SCORES": 4 * HEADS * 4 + 5, "MAX_WHOLE_ROW_KEYS": 4}
        limits = parts if request.param == "in tiles" else whole
        limits |= {"MAX_TILE_KEYS": 4, "MIN_TILE_KEYS": 2, "MAX_WHOLE_ROW_COST": math.inf}
        for name, value in limits.items():
            monkeypatch.setattr(tuning, name, value)


in_tiles = pytest.mark.usefixtures("_tiles")
# what is slow and is computed by the same tiles as the statistics: each call in one way, each way for a quarter of them
every_call_in_tiles_of_some_kind = pytest.mark.parametrize(
    ("name", "_tiles"), [(name, TILINGS[n % 4]) for n, name in enumerate(CALLS)], indirect=["_tiles"]
)


def seen(name, **more):
    return observe(QUERY, KEY, **CALLS[name], **more)


def cell_of(name):
    """Whether a cell is allowed, and what is added to it, as functions of (b, h, i, j), or None."""
    arguments = CALLS[name]
    mask, bias = arguments.get("mask"), arguments.get("bias")
    allowed = added = None
    if mask is not None:
        cells = mask.bind(GRID).allowed(range(QUERY_LEN), range(KEY_LEN)).expand(*GRID[:4]).tolist()

        def allowed(b, h, i, j):
            return cells[b][h][i][j]

    if bias is not None:
        numbers = as_bias(bias).bind(GRID).values(range(QUERY_LEN), range(KEY_LEN)).expand(*GRID[:4]).tolist()

        def added(b, h, i, j):
            return numbers[b][h][i][j]

    return allowed, added


@pytest.fixture(scope="module")
def dense():
    """The weights [batch, heads, query_len, key_len], the scores and lse of a call, in plain Python, once each."""
    known = {}

    def of(name):
        if name not in known:
            arguments = CALLS[name]
            allowed, added = cell_of(name)
            rest = {key: arguments.get(key) for key in ("scale", "softcap")}
            sink = arguments.get("sink")
            v = arguments["additive"].v.tolist() if "additive" in arguments else None
            # one value per key, 1 for itself: the output is then the row of weights
            identity = torch.eye(KEY_LEN, dtype=torch.float64).expand(BATCH, KV_HEADS, -1, -1)
            given = {"allowed": allowed, "bias": added, "v": v, **rest}
            weights, lse = naive(QUERY, KEY, identity, sink=None if sink is None else sink.tolist(), **given)
            known[name] = weights, weights.log() + lse.masked_fill(lse == -math.inf, 0)[..., None], lse
        return known[name]

    return of


def entropy(weights):
    return -torch.where(weights > 0, weights * weights.log(), 0.0).sum(-1)


# --- two queries by hand ----------------------------------------------------------------------------------------------


def test_two_queries_by_hand():
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    seen = observe(query, query, mask=Causal(), scale=1.0)
    e = math.e
    low, high = 1 / (1 + e), e / (1 + e)
    assert_close(seen.scores(), torch.tensor([[[[1.0, -math.inf], [0.0, 1.0]]]]))
    assert_close(seen.weights(), torch.tensor([[[[1.0, 0.0], [low, high]]]]))
    assert_close(seen.lse, torch.tensor([[[1.0, math.log(1 + e)]]]))
    assert_close(seen.entropy(), torch.tensor([[[0.0, -low * math.log(low) - high * math.log(high)]]]))
    assert_close(seen.received(), torch.tensor([[[1 + low, high]]]))
    assert_close(seen.distance(), torch.tensor([[[0.0, low]]]))
    assert_close(seen.max_score(), torch.tensor([[[1.0, 1.0]]]))
    assert seen.visible().tolist() == [[[1, 2]]]
    assert_zero(seen.sink_mass())
    weights, keys = seen.top(2)
    assert_close(weights, torch.tensor([[[[1.0, 0.0], [high, low]]]]))
    assert keys.tolist() == [[[[0, -1], [1, 0]]]]  # the first query sees one key


# --- every call against plain Python ----------------------------------------------------------------------------------


@in_tiles
@every_call
def test_weights_scores_and_lse(name, dense):
    weights, scores, lse = dense(name)
    assert_close(seen(name).weights(), weights, "weights")
    assert_close(seen(name).scores(), scores, "scores")
    assert_close(seen(name).lse, lse, "lse")


@in_tiles
@every_call
def test_statistics(name, dense):
    weights, scores, lse = dense(name)
    observation = seen(name)
    mass = 1 - weights.sum(-1)
    sees = lse > -math.inf
    sink_mass = torch.where(sees, mass, 0.0) if "sink" in CALLS[name] else torch.zeros_like(lse)
    assert_close(observation.sink_mass(), sink_mass, "sink mass", tolerance=1e-9)
    places = torch.cat([weights, sink_mass[..., None]], dim=-1)
    assert_close(observation.entropy(), entropy(places), "entropy", tolerance=1e-9)
    assert_close(observation.received(), weights.sum(-2), "received")
    assert_close(observation.max_score(), scores.amax(-1), "max score")
    assert torch.equal(observation.visible(), (scores > -math.inf).sum(-1))
    back = torch.arange(QUERY_LEN)[:, None] + KEY_LEN - QUERY_LEN - torch.arange(KEY_LEN)
    assert_close(observation.distance(), (weights * back).sum(-1), "distance")
    groups = torch.tensor([0, 2, 2, 1, 0, 1, 2, 2, 0, 0, 1])
    expected = torch.stack([weights[..., groups == group].sum(-1) for group in range(3)], dim=-1)
    assert_close(observation.mass(groups), expected, "mass")
    per_row = torch.stack([groups, groups.flip(0)])
    assert_close(observation.mass(per_row)[0], expected[0], "mass of a row's own groups")
    expected = torch.stack([weights[1][..., groups.flip(0) == group].sum(-1) for group in range(3)], dim=-1)
    assert_close(observation.mass(per_row)[1], expected, "mass of a row's own groups")
    share = observation.share(lambda query, key: (query + key) % 5 < 2)  # 5, which no tile of three rows hides
    chosen = (torch.arange(QUERY_LEN)[:, None] + torch.arange(KEY_LEN)) % 5 < 2
    assert_close(share, (weights * chosen).sum(-1), "share")


@in_tiles
@every_call
def test_the_largest_weights_and_their_keys(name, dense):
    weights, _, _ = dense(name)
    top, keys = seen(name).top(4)
    assert_close(top, weights.topk(4).values)
    assert torch.equal(keys == -1, top == 0)  # a weight of 0 has no key
    assert_close(weights.gather(-1, keys.clamp(min=0)).masked_fill(keys == -1, 0.0), top)
    for row in keys.flatten(0, 2).tolist():
        found = [key for key in row if key >= 0]
        assert len(set(found)) == len(found)


@every_call
def test_rows_sum_to_1_without_the_sink_and_to_0_where_nothing_is_seen(name):
    observation = seen(name)
    sees = (observation.lse > -math.inf).double()
    assert_close(observation.weights().sum(-1) + observation.sink_mass(), sees)


@every_call
def test_weights_times_value_are_the_output_of_attention(name):
    weights = seen(name).weights()
    value = VALUE.repeat_interleave(HEADS // KV_HEADS, dim=1)
    assert_close(weights @ value, attention(QUERY, KEY, VALUE, **CALLS[name]).detach())


@every_call_in_tiles_of_some_kind
@pytest.mark.usefixtures("_tiles")
def test_one_head_is_cut_out_of_all(name, dense):
    observation = seen(name)
    whole = {
        "weights": observation.weights(), "scores": observation.scores(), "entropy": observation.entropy(),
        "received": observation.received(), "distance": observation.distance(), "max_score": observation.max_score(),
        "sink_mass": observation.sink_mass(), "visible": observation.visible(),
    }  # fmt: skip
    # where the lse of all heads is known, and where it is not
    for head, one in ((1, observation.head(1)), (HEADS - 1, seen(name).head(HEADS - 1))):
        assert one.grid == GRID._replace(heads=1)
        for statistic, values in whole.items():
            expected = values[:, head : head + 1]
            assert_close(getattr(one, statistic)().double(), expected.double(), f"{statistic} of head {head}")
        assert_close(one.lse, dense(name)[2][:, head : head + 1], "lse")
        assert_close(one.top(2).weights, observation.top(2).weights[:, head : head + 1])
        assert_close(one.head(0).weights(), one.weights())


@every_call
def test_any_rectangle_is_cut_out_of_the_whole(name):
    observation = seen(name)
    weights, scores = observation.weights(), observation.scores()
    for rows, columns in (
        (slice(2, 5), slice(3, 11)), (slice(None), slice(0, 1)), (slice(4), slice(7, None)),
        (slice(-2, None), range(2, 4)), (range(1, 2), slice(0, 1000)), (slice(3, 3), slice(None)),
    ):  # fmt: skip
        at = [slice(which.start, which.stop) if isinstance(which, range) else which for which in (rows, columns)]
        assert_close(observation.weights(queries=rows, keys=columns), weights[:, :, at[0], at[1]])
        assert_close(observation.scores(queries=rows, keys=columns), scores[:, :, at[0], at[1]])


@pytest.mark.parametrize("name", ["nothing", "mask: padding of a whole row", "everything", "additive"])
def test_the_lse_of_the_call_may_be_given(name):
    lse = attention_with_lse(QUERY, KEY, VALUE, **CALLS[name]).lse
    observation = seen(name, lse=lse.detach())
    assert observation.lse is not None
    assert_close(observation.weights(), seen(name).weights())
    with torch.no_grad():  # it is taken, and not computed again
        assert_close(seen(name, lse=lse.detach() + 1).weights(), seen(name).weights() / math.e)


def test_half_precision_is_observed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        query, key = QUERY.to(dtype), KEY.to(dtype)
        observation = observe(query, key, mask=Causal())
        assert observation.weights().dtype == observation.entropy().dtype == torch.float32
        exact = observe(query.double(), key.double(), mask=Causal())
        assert_close(observation.weights().double(), exact.weights(), tolerance=1e-5)


def test_autocast_rounds_nothing():
    query, key = QUERY.float(), KEY.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = observe(query, key, mask=Causal())
        found = inside.gather(Entropy(), Received()), inside.weights(), inside.lse
    outside = observe(query, key, mask=Causal())
    expected = outside.gather(Entropy(), Received()), outside.weights(), outside.lse
    for actual, exact in zip(flat(found), flat(expected), strict=True):
        assert_close(actual, exact, tolerance=1e-6)


def test_what_hidden_keys_hold_is_not_seen():
    key = KEY.clone()
    key[1, :, 6:] = math.nan
    observation = observe(QUERY, key, mask=Padding([11, 6]))
    clean = observe(QUERY, KEY, mask=Padding([11, 6]))
    for statistic in ("weights", "entropy", "received", "distance", "max_score", "lse", "visible"):
        actual, expected = getattr(observation, statistic), getattr(clean, statistic)
        if statistic != "lse":
            actual, expected = actual(), expected()
        assert_close(actual.double(), expected.double(), statistic)


def test_distances_are_exact_far_into_a_text():
    # the query at 99,999 looks at its own place and at the one before, half and half
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 100_000, 1)
    observation = observe(query, key, mask=Causal() & Window(2))
    assert float(observation.distance()) == 0.5


def test_a_call_without_queries_or_without_keys_has_no_nan():
    for query, key in ((QUERY[:, :, :0], KEY), (QUERY, KEY[:, :, :0])):
        observation = observe(query, key)
        length = query.shape[2]
        for statistic in ("entropy", "distance", "max_score", "sink_mass", "visible"):
            values = getattr(observation, statistic)()
            assert values.shape == (BATCH, HEADS, length), statistic
            assert not values.isnan().any()
        assert observation.weights().shape == (BATCH, HEADS, length, key.shape[2])
        assert observation.received().shape == (BATCH, HEADS, key.shape[2])
        assert bool((observation.max_score() == -math.inf).all())


# --- pictures, comparisons, selections, several at once ---------------------------------------------------------------


def pooled(weights, rows, columns, pool):
    """A picture pixel by pixel, of the largest weights or of the mean over queries of the sum over keys."""
    pixels = []
    for r in range(0, weights.shape[2], rows):
        block = weights[:, :, r : r + rows]
        cut = [block[..., c : c + columns] for c in range(0, weights.shape[3], columns)]
        pixels.append(torch.stack([c.amax((-2, -1)) if pool == "max" else c.sum(-1).mean(-1) for c in cut], dim=-1))
    return torch.stack(pixels, dim=-2)


@every_call_in_tiles_of_some_kind
@pytest.mark.usefixtures("_tiles")
def test_pictures(name, dense):
    weights, _, _ = dense(name)
    for pool in ("max", "mean"):
        assert_close(seen(name).image(3, pool), pooled(weights, 3, 4, pool), f"{pool} in blocks of 3 x 4")
        part = seen(name).image(2, pool, queries=slice(1, 6), keys=range(2, 9))
        assert_close(part, pooled(weights[:, :, 1:6, 2:9], 3, 4, pool), f"{pool} of a rectangle")
        levels = seen(name).pyramid(8, pool)
        assert [list(level.shape[2:]) for level in levels] == [[7, 6], [4, 3], [2, 2], [1, 1]]
        for n, level in enumerate(levels):
            assert_close(level, pooled(weights, 2**n, 2 ** (n + 1), pool), f"{pool}, level {n}")
    assert_close(seen(name).image(11), weights, "a pixel for every weight")
    total = pooled(weights.sum(-1, keepdim=True), 3, 1, "mean")[..., 0]
    assert_close(seen(name).image(3, "mean").sum(-1), total, "rows of the mean picture")


@in_tiles
@every_call
def test_distances_and_who_may_look(name, dense):
    weights, scores, _ = dense(name)
    allowed = scores > -math.inf
    assert torch.equal(seen(name).viewers(), allowed.sum(-2))
    assert_close(seen(name).mean_received(), weights.sum(-2) / allowed.sum(-2).clamp(min=1), "mean received")
    back = torch.arange(QUERY_LEN)[:, None] + KEY_LEN - QUERY_LEN - torch.arange(KEY_LEN)
    for edges in (None, [-1, 2, 3, 7]):
        edges, mass = seen(name).distances(edges)
        expected = [
            (weights * ((back >= low) & (back < high))).sum(-1)
            for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
        assert_close(mass, torch.stack(expected, dim=-1), "mass by distance")
    assert_close(seen(name).distances().mass.sum(-1), weights.sum(-1), "every distance has a bin")
    assert seen(name).distances().edges.tolist() == [-11, 0, 1, 2, 4, 8, 16]


@in_tiles
@pytest.mark.parametrize("name", ["nothing", "sink", "mask: causal offset per row", "mask: dense", "everything"])
def test_two_calls_are_compared(name, dense):
    def places(call):
        weights, _, lse = dense(call)
        has_sink = torch.tensor("sink" in CALLS[call])
        rest = torch.where((lse > -math.inf) & has_sink, 1 - weights.sum(-1), 0.0)
        return torch.cat([weights, rest[..., None]], dim=-1)

    other = "mask: window"
    p, q = places(name), places(other)
    with torch.no_grad():
        divergence, variation, cosine = seen(name).compare(seen(other))
    expected = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    assert_close(divergence, expected.clamp(min=0), "Jensen-Shannon", tolerance=1e-8)
    assert_close(variation, (p - q).abs().sum(-1) / 2, "total variation", tolerance=1e-8)
    size = (p.square().sum(-1) * q.square().sum(-1)).sqrt()
    assert_close(cosine, (p * q).sum(-1) / size.clamp(min=1e-30), "cosine", tolerance=1e-8)


def test_a_head_is_compared_with_itself_and_with_one_that_shares_nothing():
    first = observe(QUERY[:1, :1], KEY[:1, :1], mask=Causal())
    divergence, variation, cosine = first.compare(first)
    assert_close(divergence, torch.zeros_like(divergence))
    assert_close(variation, torch.zeros_like(variation))
    assert_close(cosine, torch.ones_like(cosine))
    later = observe(QUERY[:1, :1], KEY[:1, :1], mask=~Causal())
    divergence, variation, cosine = (found[..., :-1] for found in first.compare(later))  # the last sees no later key
    assert_close(divergence, torch.full_like(divergence, math.log(2)))
    assert_close(variation, torch.ones_like(variation))
    assert_zero(cosine)


def all_statistics():
    keys = torch.arange(KEY_LEN)
    return {
        "entropy": Entropy(), "received": Received(), "top": Top(3), "visible": Visible(), "viewers": Viewers(),
        "share": Share(lambda query, key: (query + key) % 3 == 0), "mass": Mass(keys % 2), "distance": Distance(),
        "distances": Spread(), "max_score": MaxScore(), "image": Image(3), "mean image": Image(4, "mean"),
        "zoom": Image(2, "mean", slice(2, 5), slice(0, 6)), "pyramid": Pyramid(5),
    }  # fmt: skip


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else [tensor for part in result for tensor in flat(part)]


@every_call_in_tiles_of_some_kind
@pytest.mark.usefixtures("_tiles")
def test_statistics_asked_together_equal_those_asked_alone(name):
    statistics, reports = all_statistics(), []
    with torch.no_grad():
        together = seen(name).gather(*statistics.values(), progress=lambda *report: reports.append(report))
        for (what, statistic), result in zip(statistics.items(), together, strict=True):
            for one, alone in zip(flat(result), flat(seen(name).gather(statistic)[0]), strict=True):
                assert_close(one.double(), alone.double(), what)
    done, totals = zip(*reports, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}


@every_call
def test_a_selection_equals_slicing(name):
    whole = seen(name)
    for rows, heads in ((0, 2), (slice(1, 2), slice(2, 4)), (slice(None), slice(1, 4)), (-1, slice(None))):
        at = [slice(n, n + 1 or None) if isinstance(n, int) else n for n in (rows, heads)]
        with torch.no_grad():
            part = seen(name)[rows, heads]
            for what in ("weights", "entropy", "received", "viewers"):
                expected = getattr(whole, what)()[at[0], at[1]]
                assert_close(getattr(part, what)().double(), expected.double(), f"{what} of {rows}, {heads}")
            assert_close(whole[rows, heads].lse, whole.lse[at[0], at[1]], "lse")


def test_some_rows_of_several_are_selected():
    query, key = torch.randn(5, 2, 7, 3, dtype=torch.float64), torch.randn(5, 2, 11, 3, dtype=torch.float64)
    whole = observe(query, key, mask=Causal([0, 3, -2, 4, 9]), bias=torch.randn(5, 1, 1, 11, dtype=torch.float64))
    for part, at in ((whole[1:4], slice(1, 4)), (whole[1:4][1:], slice(2, 4)), (whole[1:][1, 1], slice(2, 3))):
        heads = slice(None) if part.grid.heads == 2 else slice(1, 2)
        assert_close(part.weights(), whole.weights()[at, heads])
        assert_close(part.entropy(), whole.entropy()[at, heads])


def test_received_sums_to_the_queries_that_see_something_less_the_sink():
    for name in ("mask: padding of a whole row", "sink and rows that see nothing", "everything"):
        observation = seen(name)
        sees = (observation.lse > -math.inf).sum(-1) - observation.sink_mass().sum(-1)
        assert_close(observation.received().sum(-1), sees)


# --- several tiles long, in float32 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(100), Causal() & Document.from_lengths([311, 390])])
def test_a_longer_text_in_float32(mask, monkeypatch):
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 1 << 15)
    query, key = 2 * torch.randn(1, 4, 701, 17), torch.randn(1, 2, 701, 17)
    observation = observe(query, key, mask=mask)
    entropies, received, top, picture = observation.gather(Entropy(), Received(), Top(8), Image(100, "mean"))
    weights = observe(query.double(), key.double(), mask=mask).weights()
    assert_close(entropies.double(), entropy(weights), "entropy", tolerance=1e-5)
    assert_close(received.double(), weights.sum(-2), "received", tolerance=1e-5)
    assert_close(top.weights.double(), weights.topk(8).values, "top", tolerance=1e-5)
    assert_close(weights.gather(-1, top.keys.clamp(min=0)).masked_fill(top.keys < 0, 0), top.weights.double(),
                 tolerance=1e-5)  # fmt: skip
    assert_close(picture.double(), pooled(weights, 8, 8, "mean"), "picture", tolerance=1e-5)
    known = observe(query, key, mask=mask, lse=observation.lse)
    assert_close(known.entropy().double(), entropy(weights), "entropy by tiles", tolerance=1e-5)


class Cells(PerQuery):
    """How many weights a pass computes for each query."""

    def of(self, tile):
        return torch.full(tile.weights.shape[:-1], float(tile.weights.shape[-1]))


def test_what_the_mask_calls_empty_is_not_computed():
    length = 4099
    query = torch.randn(1, 1, length, 3)
    for mask, most in ((Causal(), length / 2 + 320), (Causal() & Window(100), 500), (Chunk(64), 320)):
        (cells,) = observe(query, query, mask=mask).gather(Cells())
        assert 1 <= float(cells.mean()) <= most, mask


def test_no_more_than_cells_are_held_at_once(monkeypatch):
    largest = []

    class Watch(PerQuery):
        def of(self, tile):
            largest.append(tile.weights.numel())
            return tile.weights.sum(-1)

    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 1 << 15)
    query = torch.randn(3, 2, 301, 3)
    for key_len in (2, 301, 1301):
        observe(query, torch.randn(3, 1, key_len, 3), softcap=2.0).gather(Watch())
        assert max(largest) <= 1 << 15
        largest.clear()
    # 104 queries from anywhere could see two documents, 64 from a multiple of 64 see one
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 256 * 104)
    query = torch.randn(1, 1, 768, 3)
    observation = observe(query, query, mask=Document.from_lengths([256, 256, 256]))
    entropies, mass = observation.gather(Entropy(), Watch())
    assert max(largest) == 64 * 256
    assert_close(mass, torch.ones(1, 1, 768), tolerance=1e-5)
    assert_close(entropies, entropy(observation.weights()), tolerance=1e-5)
    assert_close(observe(query, query, mask=observation.scoring.mask).gather(Entropy(), Received())[0], entropies)


class Surprising(Mask):
    """A window that knows of many rows what they cannot see, and of few nothing."""

    window = Band(100, 0, 0)

    def allowed(self, queries, keys):
        return self.window.allowed(queries, keys)

    def coverage(self, rows, columns):
        return Tile.PARTIAL if len(rows) < 128 else self.window.tile(rows, columns)


def test_a_mask_that_says_less_of_many_rows_than_of_few_costs_memory_and_no_answer(monkeypatch):
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 64 * 256)
    query = torch.randn(1, 1, 512, 3)
    found = observe(query, query, mask=Surprising()).gather(Entropy(), Received(), Top(2))
    expected = observe(query, query, mask=Surprising.window).gather(Entropy(), Received(), Top(2))
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert_close(one.double(), other.double(), tolerance=1e-5)


class Keep(Statistic):
    """A statistic from elsewhere, which keeps the tiles themselves."""

    def start(self, seen):
        super().start(seen)
        self.tiles = []

    def of(self, tile):
        return tile.weights

    def add(self, tile, part):
        self.tiles.append((tile.queries, tile.heads, part[..., :2]))

    def finish(self):
        return self.tiles


def test_a_statistic_from_elsewhere_may_keep_what_it_was_shown(monkeypatch):
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 3 * KEY_LEN)
    for name in ("nothing", "softcap", "sink"):
        weights = seen(name).weights()
        for lse in (None, seen(name).lse):
            _, tiles = seen(name, lse=lse).gather(Entropy(), Keep())
            assert len(tiles) > 6
            for number, (queries, heads, kept) in enumerate(tiles):
                expected = weights[number // (len(tiles) // 2), heads, queries.start : queries.stop, :2]
                assert_close(kept[0], expected, name)


@pytest.mark.usefixtures("without_the_library")
def test_lse_comes_out_of_the_pass_where_tiles_hold_whole_rows_at_little_more_cost(monkeypatch):
    computed = []

    def counted(left, right, **more):
        computed.append(left.shape[1] * left.shape[2] * right.shape[3])
        return grouped_matmul(left, right, **more)

    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 1 << 12)
    monkeypatch.setattr(products, "grouped_matmul", counted)
    query = torch.randn(1, 1, 2048, 3)
    sinks_and_window = Causal() & (Window(16) | Prefix(4))
    cases = (None, 2048, 1), (Causal(), 2048, 1), (None, 2047, 2), (sinks_and_window, 2048, 2), (Window(16), 300, 1)
    for mask, most, passes in cases:
        monkeypatch.setattr(tuning, "MAX_WHOLE_ROW_KEYS", most)
        observation = observe(query, query, mask=mask)
        computed.clear()
        found = observation.gather(Received(), Top(2))
        first = sum(computed)
        assert_close(observation.lse, attention_with_lse(query, query, query, mask=mask).lse, tolerance=1e-5)
        assert sum(computed) == first  # it is known
        again = observation.gather(Received(), Top(2))
        more = first / (sum(computed) - first)
        assert more == passes or (passes == 1 and 0.4 < more < 1.5), mask
        for one, other in zip(flat(found), flat(again), strict=True):
            assert_close(one.double(), other.double(), tolerance=1e-5)


@in_tiles
def test_scores_far_from_0_do_not_overflow():
    # all scores are -500, or the sink is; a window leaves rows without a key in tiles where others have one
    query, key = torch.full((1, 2, 7, 1), -50.0), torch.full((1, 2, 11, 1), 10.0)
    for sink, mask in ((None, Causal() & Window(3)), (torch.tensor([-500.0, 500.0]), Causal())):
        observation = observe(query, key, mask=mask, scale=1.0, sink=sink)
        expected = observe(query.double(), key.double(), mask=mask, scale=1.0, sink=sink)
        entropies, received = observation.gather(Entropy(), Received())
        assert_close(observation.lse.double(), torch.logsumexp(expected.scores(), -1) if sink is None else
                     torch.logaddexp(torch.logsumexp(expected.scores(), -1), sink.double()[:, None]),
                     tolerance=1e-4)  # fmt: skip
        assert_close(entropies.double(), entropy(torch.cat([expected.weights(), expected.sink_mass()[..., None]], -1)),
                     tolerance=1e-4)  # fmt: skip
        assert_close(received.double(), expected.weights().sum(-2), tolerance=1e-4)
        if sink is None:
            assert_close(observation.lse[0, 0, -1], torch.tensor(math.log(3) - 500.0), tolerance=1e-4)


@in_tiles
@pytest.mark.parametrize(
    ("softcap", "sink"), [(None, None), (30.0, None), (None, -70.0), (None, 15.0), (9.0, -math.inf)]
)
@pytest.mark.parametrize("largest", [1.0, 0.99 * MODERATE, 1.01 * MODERATE])
def test_scores_are_shifted_only_where_they_can_be_large(largest, softcap, sink):
    draw = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 2, length, 3, generator=draw) for length in (7, 11))
    query, key = (tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (query, key))
    mask = Causal(2) & Window(3) & ~Prefix(2)  # the first query sees nothing
    sinks = None if sink is None else torch.full((2,), sink)
    more = {"mask": mask, "scale": largest, "softcap": softcap, "sink": sinks}
    seen, wide = observe(query, key, **more), observe(query.double(), key.double(), **more)
    magnitude = magnitude_of(query, key, seen.call.scoring)
    assert magnitude == (True, largest < MODERATE and sink in (None, 15.0))
    found = seen.gather(Entropy(), Received(), Top(2), MaxScore())
    mass = torch.cat([wide.weights(), wide.sink_mass()[..., None]], -1)
    assert_close(found[0].double(), entropy(mass), tolerance=1e-4)
    assert_close(found[1].double(), wide.weights().sum(-2), tolerance=1e-5)
    assert_close(found[2].weights.double(), wide.weights().topk(2).values, tolerance=1e-5)
    assert_close(found[3].double(), wide.scores().amax(-1), tolerance=1e-4)
    assert_close(seen.lse.double(), attention_with_lse(query.double(), key.double(), key.double(), **more).lse,
                 tolerance=1e-4)  # fmt: skip


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e30])
def test_nothing_is_known_of_scores_with_numbers_that_are_not_finite_or_huge(wrong):
    query, key = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2)
    key[0, 0, 1, 1] = wrong
    assert magnitude_of(query, key, observe(query, key).call.scoring) == (False, False)
    assert magnitude_of(query[:, :, :0], key[:, :, :1], observe(query, key).call.scoring) == (True, True)


@pytest.mark.parametrize("known", [False, True], ids=["lse unknown", "lse known"])
@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(9), Window(6), Band(11, -3), Causal() & Window(12) & ~Window(3), Causal(torch.tensor([0, 11]))
     & Window(8), Causal() & (Window(9) | Prefix(3)), Window(5) | Prefix(4)],
    ids=str,
)  # fmt: skip
def test_strips_of_a_window_come_as_one_tile_and_equal_the_dense_weights(mask, known, monkeypatch):
    for name, value in {"STRIP_QUERIES": (1, 2), "MIN_TILE_KEYS": 2, "MIN_SLIDING_QUERIES": 8}.items():
        monkeypatch.setattr(tuning, name, value)
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(2, 6, 61, 5, generator=draw, dtype=torch.float64)
    key = torch.randn(2, 3, 72, 5, generator=draw, dtype=torch.float64)
    sink = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    for more in ({}, {"softcap": 2.0, "sink": sink}, {"bias": Alibi(heads=6)}):
        for most in (1 << 7, 1 << 20):  # few strips of one head in a tile, and all of several
            monkeypatch.setattr(tuning, "MAX_TILE_SCORES", most)
            seen, dense = (observe(query, key, mask=mask, **more) for _ in range(2))
            plan = plan_tiles(seen.call, range(61), range(72), strips=True)
            assert any(group.strips for group in plan.batches)
            weights = dense.weights()
            if known:
                assert_close(seen.lse, attention_with_lse(query, key, key, mask=mask, **more).lse)
            entropies, received, top, largest = seen.gather(Entropy(), Received(), Top(3), MaxScore())
            mass = torch.cat([weights, dense.sink_mass()[..., None]], -1)
            assert_close(entropies, entropy(mass))
            assert_close(received, weights.sum(-2))
            assert_close(top.weights, weights.topk(3).values)
            assert_close(weights.gather(-1, top.keys.clamp(min=0)) * (top.keys >= 0), top.weights)
            assert_close(largest, dense.scores().amax(-1))
            assert_close(seen.lse, attention_with_lse(query, key, key, mask=mask, **more).lse)

            for size in (61, 29, 9, 1):  # pixels of 1, 3, 7 and 61 queries
                images = Image(size, "mean"), Image(size), Pyramid(size, "mean")
                assert all(image.takes_strips for image in images)
                mean, most, levels = seen.gather(*images)
                down, across = -(-61 // size), -(-72 // size)
                rows = weights.split(down, -2)
                columns = torch.stack([part.mean(-2) for part in rows], -2).split(across, -1)
                assert_close(mean, torch.stack([part.sum(-1) for part in columns], -1))
                columns = torch.stack([part.amax(-2) for part in rows], -2).split(across, -1)
                assert_close(most, torch.stack([part.amax(-1) for part in columns], -1))
                assert_close(levels[0], mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_of_a_row_are_those_of_topk(dtype):
    draw = torch.Generator().manual_seed(1)
    for columns, count in ((1, 1), (5, 5), (31, 3), (64, 1), (288, 8), (293, 8), (2051, 1), (2053, 8), (4097, 20)):
        weights = torch.rand(2, 3, columns, generator=draw, dtype=dtype)
        weights[0] = weights[0].mul(4).floor()  # many are equal, many are 0
        found = products.largest(weights, count)
        assert torch.equal(found.values, weights.topk(count).values)
        assert torch.equal(weights.gather(-1, found.columns), found.values)
        assert bool((found.columns.sort(-1).values.diff() > 0).all())  # each once


def test_the_largest_of_many_short_rows_are_those_of_topk_too(monkeypatch):
    draw = torch.Generator().manual_seed(1)
    for rows, columns, count in ((3000, 7, 7), (3000, 20, 3), (2000, 324, 8), (1500, 517, 1), (900, 1031, 8)):
        monkeypatch.setattr(tuning, "ROWS_AT_ONCE", rows - 100)
        weights = torch.rand(rows, columns, generator=draw)
        weights[:500] = weights[:500].mul(4).floor()
        weights[500], weights[501], weights[502] = 0.0, torch.nan, -torch.nan
        found = products.largest(weights, count)
        assert torch.equal(weights.gather(-1, found.columns).nan_to_num(9.0), found.values.nan_to_num(9.0))
        assert torch.equal(found.values[:501], weights[:501].topk(count).values)
        assert torch.equal(found.values[503:], weights[503:].topk(count).values)
        assert bool((found.columns.sort(-1).values.diff() > 0).all())


def test_narrow_blocks_of_a_dense_mask_come_with_all_heads():
    blocks = torch.eye(32, dtype=torch.bool).repeat_interleave(128, 0).repeat_interleave(128, 1)
    query = torch.randn(1, 12, 4096, 4)
    plan = plan_tiles(observe(query, query, mask=Dense(blocks)).call, range(4096), range(4096))
    assert [group.heads for group in plan.batches] == [[slice(0, 12)]]


def test_documents_of_equal_lengths_are_cut_where_they_begin():
    query = torch.randn(1, 12, 2048, 4)
    for length in (128, 256):
        call = observe(query, query, mask=Document.from_lengths([length] * (2048 // length))).call
        plan = plan_tiles(call, range(2048), range(2048))
        tiles = [(queries, keys) for group in plan.batches for queries in group.queries
                 for keys, _ in plan.tiles_of(group, queries)]  # fmt: skip
        assert sum(len(queries) * len(keys) for queries, keys in tiles) == 2048 * length


def test_heads_go_together_in_whole_groups_or_in_equal_parts_of_one():
    for heads, group, most, together in ((12, 1, 4, 4), (12, 1, 5, 4), (12, 1, 8, 6), (32, 4, 6, 4), (32, 4, 9, 8),
                                         (32, 8, 6, 4), (6, 3, 2, 1), (32, 32, 31, 16), (7, 1, 3, 3)):  # fmt: skip
        assert heads_of_a_tile(heads, group, most) == together, (heads, group, most)


# --- gradients --------------------------------------------------------------------------------------------------------


def differentiable(name):
    """query, key and what else learns in a call, and the observation of them."""
    arguments = dict(CALLS[name])
    leaves = [QUERY.clone().requires_grad_(), KEY.clone().requires_grad_()]
    if "sink" in arguments:
        arguments["sink"] = arguments["sink"].clone().requires_grad_()
        leaves.append(arguments["sink"])
    if isinstance(arguments.get("bias"), torch.Tensor):
        arguments["bias"] = arguments["bias"].detach().clone().requires_grad_()
        leaves.append(arguments["bias"])
    return leaves, observe(leaves[0], leaves[1], **arguments)


@in_tiles
@pytest.mark.parametrize(
    "name",
    ["nothing", "mask: causal offset per row", "mask: dense per row and head", "sink", "softcap", "additive",
     "bias: tensor with -inf", "sink and rows that see nothing", "everything"],
)  # fmt: skip
def test_gradients_equal_those_of_the_dense_formula(name):
    leaves, observation = differentiable(name)
    scoring, draw = observation.scoring, torch.Generator().manual_seed(9)
    allowed = scoring.allowed(range(QUERY_LEN), range(KEY_LEN))
    scores = scoring.tile(*leaves[:2], range(QUERY_LEN), range(KEY_LEN))
    weights = softmax(scores, scoring.sink)[0]
    safe = weights.masked_fill(weights == 0, 1.0)
    plain = -(weights * safe.log()).sum(-1)
    if scoring.sink is not None:
        rest = (scoring.sink[:, None] - softmax(scores, scoring.sink)[1]).exp()
        plain = plain - rest * rest.log()
    mean = pooled(weights, 4, 4, "mean")
    pairs = {
        "entropy": (observation.entropy, plain),
        "received": (observation.received, weights.sum(-2)),
        "mean picture": (lambda: observation.image(3, "mean"), pooled(weights, 3, 4, "mean")),
        "weights": (lambda: observation.weights(slice(1, 4), slice(2, 9)), weights[:, :, 1:4, 2:9]),
    }
    assert mean.shape[-1] == 3
    for what, (asked, expected) in pairs.items():
        upstream = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
        wanted = torch.autograd.grad(expected, leaves, upstream, retain_graph=True, allow_unused=True)
        given = torch.autograd.grad(asked(), leaves, upstream, allow_unused=True)  # asked twice: no graph is used up
        again = torch.autograd.grad(asked(), leaves, upstream, allow_unused=True)
        for number, gradient in enumerate(wanted):
            gradient = torch.zeros_like(leaves[number]) if gradient is None else gradient
            assert_close(given[number], gradient, f"gradient {number} of {what}", tolerance=1e-8)
            assert torch.equal(given[number], again[number])
    assert allowed is None or allowed.dtype == torch.bool


def test_gradcheck_of_entropy_and_received():
    query, key = (torch.randn(1, heads, 3, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for more in ({}, {"softcap": 2.0}):

        def of(query, key, sink, more=more):
            return observe(query, key, mask=Causal(), sink=sink, **more).gather(Entropy(), Received())

        assert torch.autograd.gradcheck(of, (query, key, sink))


def test_a_given_lse_without_a_graph_does_not_take_the_gradient_away():
    query = QUERY.clone().requires_grad_()
    lse = observe(QUERY, KEY).lse
    (wanted,) = torch.autograd.grad(observe(query, KEY).received()[0, 0, 3], query)
    (given,) = torch.autograd.grad(observe(query, KEY, lse=lse).received()[0, 0, 3], query)
    assert_close(given, wanted)
    assert float(wanted.abs().max()) > 1e-3


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nothing_square_is_kept_for_the_backward_pass(softcap):
    length, saved = 1501, {}
    query, key = (torch.randn(1, 1, length, 3, requires_grad=True) for _ in range(2))

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    gc.collect()
    before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        observation = observe(query, key, mask=Causal(), softcap=softcap)
        loss = observation.entropy().sum() + observation.received().square().sum()
    alive = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and id(t) not in before
    }
    square = 4 * length * length
    assert 0 < sum(saved.values()) < square / 8
    assert sum(alive.values()) < square / 8
    loss.backward()
    assert query.grad is not None
    assert bool(query.grad.isfinite().all())


def test_nan_in_hidden_keys_and_blind_queries_reaches_no_gradient():
    query, key = QUERY.clone(), KEY.clone()
    key[1, :, 6:] = math.nan
    key[0] = math.nan
    query[0] = math.nan  # sees nothing
    for more in ({}, {"sink": SINK}, {"softcap": 3.0}):
        results = []
        for q, k in ((query, key), (QUERY, KEY)):
            q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
            observation = observe(q, k, mask=Padding([0, 6]), **more)
            values = observation.entropy(), observation.received()
            results.append((*values, *torch.autograd.grad(values[0].sum() + values[1].square().sum(), (q, k))))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


# --- nothing square ---------------------------------------------------------------------------------------------------


def test_weights_of_a_long_text_are_refused_and_advice_is_given():
    length = 1 << 15
    query = torch.zeros(1, 1, length, 1)
    observation = observe(query, query, mask=Causal())
    with pytest.raises(ValueError, match="1,073,741,824 weights at once are more than 67,108,864; ask for"):
        observation.weights()
    corner = observation.weights(queries=slice(0, 2), keys=slice(0, 4))
    assert_close(corner, torch.tensor([[[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0]]]]))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_places_that_do_not_exist_are_refused():
    observation = seen("nothing")
    for rows in (range(-1, 3), range(8), range(0, 6, 2), slice(0, 6, 2)):
        with pytest.raises(ValueError, match="queries and keys must lie in 0 to 7, in steps of 1, got"):
            observation.weights(queries=rows)
    with pytest.raises(ValueError, match="queries and keys must lie in 0 to 11"):
        observation.scores(keys=range(5, 12))
    for head in (-1, 6):
        with pytest.raises(ValueError, match=f"head must be 0 to 5, got {head}"):
            observation.head(head)
    for count in (0, 12):
        with pytest.raises(ValueError, match=f"count must be 1 to key_len=11, got {count}"):
            observation.top(count)
    with pytest.raises(ShapeError, match=r"groups must be \[batch=2, key_len=11\], got \[2, 7\]"):
        observation.mass(torch.zeros(7, dtype=torch.int64))


def test_selections_pictures_and_edges_that_make_no_sense_are_refused():
    observation = seen("nothing")
    for which, message in ((2, "batch rows are 0 to 1, got 2"), ((0, 6), "heads are 0 to 5, got 6"),
                           (slice(2, 2), "one or more batch rows of 2")):  # fmt: skip
        with pytest.raises(IndexError, match=message):
            observation[which]
    with pytest.raises(ValueError, match='pool must be "max" or "mean", got \'min\''):
        observation.image(pool="min")
    with pytest.raises(ValueError, match="size must be a whole number, 1 or more, got 0"):
        observation.image(0)
    with pytest.raises(ValueError, match="edges must be two or more rising numbers"):
        observation.distances([0, 3, 3])
    with pytest.raises(ShapeError, match="both must have the same scores"):
        observation.compare(observation.head(1))
    long = torch.zeros(1, 2, 8192, 1)
    with pytest.raises(ValueError, match="134,217,728 pixels at once are more than 67,108,864; ask for a smaller size"):
        observe(long, long, lse=torch.zeros(1, 2, 8192)).image(8192)


def test_observe_refuses_what_attention_refuses():
    with pytest.raises(ShapeError, match="observe: kv_heads must divide heads"):
        observe(QUERY[:, :5], KEY)
    with pytest.raises(TypeError, match="observe: mask must be a regard mask"):
        observe(QUERY, KEY, mask=torch.ones(7, 11).bool())
    with pytest.raises(ShapeError, match=r"observe: lse must be \[batch=2, heads=6, query_len=7\], got \[2, 6, 11\]"):
        observe(QUERY, KEY, lse=torch.zeros(2, 6, 11))


def test_a_mask_or_bias_that_knows_heads_is_asked_for_the_head_that_is_shown():
    mask = Where(lambda batch, head, query, key: key % HEADS == head) | Dense(torch.eye(QUERY_LEN, KEY_LEN).bool())
    bias = torch.randn(HEADS, 1, KEY_LEN, dtype=torch.float64)
    observation = observe(QUERY, KEY, mask=mask, bias=bias)
    for head in range(HEADS):
        assert_close(observation.head(head).weights()[:, 0], observation.weights()[:, head])
    shown = observation.head(3).scoring
    assert (repr(shown.mask), repr(shown.bias)) == (repr(observation.scoring.mask), repr(observation.scoring.bias))
    assert shown.mask.tile(range(3), range(2)) is observation.scoring.mask.tile(range(3), range(2))


@pytest.mark.parametrize("lse_known", [False, True], ids=["lse unknown", "lse known"])
def test_a_bias_as_low_as_the_least_number_hides_like_minus_infinity(lse_known):
    query, key = torch.randn(2, 1, 2, 30, 8)
    bias = torch.zeros(1, 1, 30, 30)
    bias[..., 5] = torch.finfo(torch.float32).min
    lse = observe(query, key, bias=bias).lse if lse_known else None
    lowest = observe(query, key, bias=bias, lse=lse).gather(Entropy(), Received(), Top(3))
    hidden = observe(query, key, bias=bias.clamp(min=-1e4)).gather(Entropy(), Received(), Top(3))
    assert_close(lowest[0], hidden[0])
    assert_close(lowest[1], hidden[1])
    assert_close(lowest[2].weights, hidden[2].weights)

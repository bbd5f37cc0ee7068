"""Every statistic against the dense weights in float64, for every mask and bias, whole and in tiles."""

import math

import pytest
import torch

import regard.observation
from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, KV_HEADS, QUERY_LEN, biases, fixed_masks, tensors
from comparing import assert_close, assert_zero
from naive import naive
from regard.biases import as_bias
from regard.functional import attention, attention_with_lse
from regard.masks import Causal, Dense, Padding, Where, Window
from regard.observation import observe
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


@pytest.fixture(params=["at once", "in tiles"])
def _tiles(request, monkeypatch):
    """All seven rows of scores at once, and three at a time."""
    if request.param == "in tiles":
        monkeypatch.setattr(regard.observation, "CELLS", 3 * BATCH * HEADS * KEY_LEN + 5)


in_tiles = pytest.mark.usefixtures("_tiles")


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
    assert keys.tolist() == [[[[0, 1], [1, 0]]]]


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
    assert_close(weights.gather(-1, keys), top)
    assert bool((keys.diff(dim=-1) != 0).all())


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


@in_tiles
@every_call
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
    # it is taken, and not computed again
    assert_close(seen(name, lse=lse.detach() + 1).weights(), seen(name).weights() / math.e)


def test_half_precision_is_observed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        query, key = QUERY.to(dtype), KEY.to(dtype)
        observation = observe(query, key, mask=Causal())
        assert observation.weights().dtype == observation.entropy().dtype == torch.float32
        exact = observe(query.double(), key.double(), mask=Causal())
        assert_close(observation.weights().double(), exact.weights(), tolerance=1e-5)


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


# --- nothing square ---------------------------------------------------------------------------------------------------


def test_no_more_than_cells_are_held_at_once(monkeypatch):
    largest = []
    tile = regard.observation.Scoring.tile

    def watched(self, query, key, queries, keys):
        scores = tile(self, query, key, queries, keys)
        largest.append(scores.numel())
        return scores

    monkeypatch.setattr(regard.observation.Scoring, "tile", watched)
    monkeypatch.setattr(regard.observation, "CELLS", 2 * BATCH * HEADS * KEY_LEN)
    observation = seen("everything")
    for statistic in (observation.entropy, observation.received, observation.distance, observation.visible):
        statistic()
    assert max(largest) == 2 * BATCH * HEADS * KEY_LEN
    largest.clear()
    # a head by itself costs one head's scores, and takes more rows at a time
    observation.head(2).entropy()
    assert sum(largest) == BATCH * QUERY_LEN * KEY_LEN
    assert len(largest) == 1


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
        with pytest.raises(ValueError, match="rows and columns must lie in 0 to 7, in steps of 1, got"):
            observation.weights(queries=rows)
    with pytest.raises(ValueError, match="rows and columns must lie in 0 to 11"):
        observation.scores(keys=range(5, 12))
    for head in (-1, 6):
        with pytest.raises(ValueError, match=f"head must be 0 to 5, got {head}"):
            observation.head(head)
    for count in (0, 12):
        with pytest.raises(ValueError, match=f"count must be 1 to key_len=11, got {count}"):
            observation.top(count)
    with pytest.raises(ShapeError, match=r"groups must be \[batch=2, key_len=11\], got \[2, 7\]"):
        observation.mass(torch.zeros(7, dtype=torch.int64))


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

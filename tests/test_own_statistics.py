"""A statistic of a user's own, one class of public names, is asked wherever regard's are, and answers what the dense
weights say."""

import math

import pytest
import torch

import regard
from comparing import assert_close, assert_zero
from regard import Causal, Decoder, Document, Entropy, ModelConfig, Padding, PerKey, PerQuery, Statistic, Top, Window

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 6, 3, 13, 5
IDS = torch.randint(4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
FAVOUR = torch.linspace(0.5, 2.0, HEADS, dtype=torch.float64)


class SameToken(PerQuery):
    """How much weight each query puts on tokens with its own id, times a number of the head's own."""

    def __init__(self, ids, favour=FAVOUR):
        self.ids, self.favour = ids, favour

    def of(self, tile):
        batch, head, query, key = tile.indices
        same = self.ids[batch, query + self.call.behind] == self.ids[batch, key]
        return (tile.weights * same * self.favour[head]).sum(-1)


class SameTokenReceived(PerKey):
    """How much weight each key gets from queries with its id."""

    def __init__(self, ids):
        self.ids = ids

    def of(self, tile):
        batch, _, query, key = tile.indices
        return (tile.weights * (self.ids[batch, query] == self.ids[batch, key])).sum(-2)


class Farthest(Statistic):
    """The farthest key that has a weight above a threshold: no sum, so it says itself how tiles come together."""

    keeps_tiles = False

    def __init__(self, above):
        self.above = above

    def start(self, call):
        self.found = call.zeros(call.grid.query_len, dtype=torch.int64)

    def of(self, tile):
        query, key = tile.indices[2:]
        return ((tile.weights.detach() > self.above) * (query - key).abs()).amax(-1)

    def add(self, tile, part):
        at = tile.of_queries()
        self.found[at] = torch.maximum(self.found[at], part)

    def finish(self):
        return self.found


def same(ids):
    return (ids[:, :, None] == ids[:, None])[:, None]


def by_head(weights, ids=IDS, favour=FAVOUR):
    return (weights * same(ids)).sum(-1) * favour[:, None]


def tensors():
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, LENGTH, SIZE, generator=draw, dtype=torch.float64)
    return query, torch.randn(BATCH, KV_HEADS, LENGTH, SIZE, generator=draw, dtype=torch.float64)


CALLS = {
    "nothing": {},
    "causal window": {"mask": Causal() & Window(4)},
    "rows with masks of their own": {"mask": Document.from_lengths([[6, 7], [10, 3]]) & Padding([13, 9])},
    "a row that sees nothing": {"mask": Padding([0, 9])},
    "bias": {"bias": torch.linspace(-1, 1, HEADS * LENGTH, dtype=torch.float64).view(HEADS, 1, LENGTH)},
    "alibi, softcap": {"bias": regard.Alibi(HEADS), "softcap": 1.5, "mask": Causal()},
    "sink": {"sink": torch.linspace(-1, 2, HEADS, dtype=torch.float64), "mask": Causal()},
}


@pytest.fixture(params=["large tiles", "small tiles"])
def _tiles(request, monkeypatch):
    if request.param == "small tiles":
        from regard.observation import tuning

        for name, value in {"MAX_TILE_SCORES": 5 * LENGTH, "TILE_QUERIES": 3, "MIN_TILE_KEYS": 2}.items():
            monkeypatch.setattr(tuning, name, value)


in_tiles = pytest.mark.usefixtures("_tiles")


@in_tiles
@pytest.mark.parametrize("name", CALLS)
def test_of_a_call_whole_and_of_selected_rows_and_heads(name):
    seen = regard.observe(*tensors(), **CALLS[name])
    weights = seen.weights()
    statistic = SameToken(IDS)
    assert_close(seen.ask(statistic), by_head(weights), name)
    assert_close(seen.ask(statistic), by_head(weights), "asked again")
    for which in (1, slice(1, 2), (slice(None), 3), (1, slice(2, 5)), (0, -1)):
        batch, heads = which if isinstance(which, tuple) else (which, slice(None))
        at = [slice(n, n + 1 or None) if isinstance(n, int) else n for n in (batch, heads)]
        assert_close(seen[which].ask(statistic), by_head(weights)[at[0], at[1]], f"{name} of {which}")
    assert_close(seen[1][:, 4].ask(statistic), by_head(weights)[1:, 4:5], "selected twice")
    assert_close(seen.head(4).ask(statistic), by_head(weights)[:, 4:5], "a head")


@in_tiles
@pytest.mark.parametrize("name", CALLS)
def test_several_in_one_pass_beside_regard_s_own(name):
    seen = regard.observe(*tensors(), **CALLS[name])
    weights = seen.weights()
    own, received, far, entropy, top = seen.gather(
        SameToken(IDS), SameTokenReceived(IDS), Farthest(0.1), Entropy(), Top(2)
    )
    assert_close(own, by_head(weights))
    assert_close(received, (weights * same(IDS)).sum(-2))
    index = torch.arange(LENGTH)
    assert torch.equal(far, ((weights > 0.1) * (index[:, None] - index).abs()).amax(-1))
    assert_close(entropy, seen.entropy())
    assert torch.equal(top.keys, seen.top(2).keys)


@in_tiles
@pytest.mark.parametrize("name", CALLS)
def test_with_the_gradients_of_the_dense_formula(name):
    given = dict(CALLS[name])
    leaves = [x.requires_grad_() for x in tensors()]
    for learned in ("sink", "bias"):
        if isinstance(given.get(learned), torch.Tensor):
            given[learned] = given[learned].clone().requires_grad_()
            leaves.append(given[learned])
    seen = regard.observe(*leaves[:2], **given)
    own, received, entropy = seen.gather(SameToken(IDS), SameTokenReceived(IDS), Entropy())
    weights = seen.weights()
    for found, expected in ((own, by_head(weights)), (received, (weights * same(IDS)).sum(-2))):
        upstream = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, upstream, retain_graph=True)
        for one, other in zip(torch.autograd.grad(found, leaves, upstream, retain_graph=True), wanted, strict=True):
            assert_close(one, other, name, tolerance=1e-8)
    assert entropy.requires_grad


def model():
    torch.manual_seed(0)
    made = Decoder(ModelConfig(vocab_size=4, context_length=LENGTH, dim=24, layers=2, heads=HEADS, hidden_dim=17))
    return made.double().eval()


@in_tiles
@pytest.mark.parametrize("graph", [False, True])
def test_of_a_model_while_it_runs_and_of_its_recording(graph):
    made, statistics = model(), (SameToken(IDS), Entropy(), Farthest(0.1))
    with torch.set_grad_enabled(graph):
        with regard.record(made) as recording:
            made(IDS)
        with regard.gather(made, *statistics) as gathered:
            made(IDS)
    for name, seen in recording.items():
        own = by_head(seen.weights())
        assert_close(gathered[name][0].detach(), own, name)
        assert_close(seen.ask(SameToken(IDS)), own, name)
        assert_close(seen.head(2).gather(*statistics)[0], own[:, 2:3], f"{name}, head 2")
        assert torch.equal(gathered[name][2], seen.ask(Farthest(0.1)))
    if graph:
        gathered["layers.1"][0].sum().backward()
        assert float(made.layers[0].attention.query.weight.grad.abs().max()) > 0


def test_of_a_text_that_is_read_in_pieces_with_a_cache():
    made = model()
    with torch.no_grad():
        with regard.record(made) as whole:
            made(IDS)
        cache = made.cache()
        with regard.gather(made, SameToken(IDS)) as gathered, regard.record(made) as recording:
            for piece in IDS.split([4, 1, 7, 1], dim=1):
                made(piece, cache=cache)
    for name, seen in whole.items():
        expected = by_head(seen.weights())
        assert_close(torch.cat([own for (own,) in gathered.calls(name)], dim=2), expected, name)
        assert_close(recording[name].ask(SameToken(IDS)), expected, name)
        pieces = [call.ask(SameToken(IDS)) for call in recording.calls(name)]
        assert_close(torch.cat(pieces, dim=2), expected, name)


def test_of_a_recording_of_some_heads_by_their_numbers_in_the_layer(tmp_path):
    made = model()
    with torch.no_grad(), regard.record(made) as whole, regard.record(made, heads=[4, 1]) as some:
        made(IDS)
    some.save(tmp_path / "some")
    for recording in (some, regard.load_recording(tmp_path / "some")):
        found = recording["layers.1"]
        expected = by_head(whole["layers.1"].weights())
        assert_close(found.ask(SameToken(IDS)), expected[:, [4, 1]])
        assert_close(found.head(1).ask(SameToken(IDS)), expected[:, 1:2])
        assert_close(found[1, 0].ask(SameToken(IDS)), expected[1:, 4:5])


def test_the_model_of_transformers_is_asked_too():
    transformers = pytest.importorskip("transformers")
    regard.huggingface.register()
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 17}
    made = transformers.BertModel(transformers.BertConfig(vocab_size=4, **sizes), add_pooling_layer=False)
    made = made.double().eval()
    made.set_attn_implementation("regard")
    padding = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    padding[1, 9:] = 0
    with torch.no_grad(), regard.gather(made, SameToken(IDS)) as gathered:
        outputs = made(IDS, attention_mask=padding, output_attentions=True)
    for weights, (own,) in zip(outputs.attentions, gathered.values(), strict=True):
        assert_close(own, by_head(torch.as_tensor(weights[:, :, :, :])), tolerance=1e-6)


class ByDistance(PerKey):
    """How much weight each key gets from queries so many tokens behind it, for the first distances."""

    extra = (3,)

    def of(self, tile):
        _, _, query, key = tile.indices
        return torch.stack([(tile.weights * (query - key == far)).sum(-2) for far in range(3)], dim=-1)


class MeanScore(PerQuery):
    """The mean of the scores that a query has: of scores alone, so that no weight is computed for it."""

    needs_weights = False

    def of(self, tile):
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if tile.allowed is None else tile.allowed
        return torch.where(allowed, tile.scores, 0.0).sum(-1)

    def finish(self):
        return self.total / self.call.grid.key_len


class Moments(Statistic):
    """Sums of weights and of their squares, as a pair of tensors that a tile gives."""

    keeps_tiles = False

    def start(self, call):
        self.sums = [call.zero_sums(call.grid.query_len) for _ in range(2)]

    def of(self, tile):
        return tile.weights.sum(-1), tile.weights.square().sum(-1)

    def add(self, tile, part):
        for total, one in zip(self.sums, part, strict=True):
            total[tile.of_queries()] += one

    def finish(self):
        return tuple(self.sums)


@in_tiles
@pytest.mark.parametrize("name", CALLS)
def test_further_axes_scores_alone_and_pairs(name):
    query, key = (x.requires_grad_() for x in tensors())
    seen = regard.observe(query, key, **CALLS[name])
    with torch.no_grad():
        weights, scores = seen.weights(), seen.scores()
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    by_distance = torch.stack([(weights * (back == far)).sum(-2) for far in range(3)], dim=-1)
    mean = torch.where(scores > -math.inf, scores, 0.0).sum(-1) / LENGTH
    for again in (seen, regard.observe(query, key, **CALLS[name], lse=seen.lse.detach())):
        for graph in (True, False):
            with torch.set_grad_enabled(graph):
                found = again.gather(ByDistance(), MeanScore(), Moments())
                alone = again.ask(MeanScore())
            assert_close(found[0].detach(), by_distance)
            assert_close(found[1].detach(), mean)
            assert_close(alone.detach(), mean)
            assert_close(found[2][0].detach(), weights.sum(-1))
            assert_close(found[2][1].detach(), weights.square().sum(-1))
            if graph:
                gradients = torch.autograd.grad(alone.sum() + found[2][1].sum(), (query, key))
                assert all(bool(g.isfinite().all()) and float(g.abs().max()) > 0 for g in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_and_under_autocast(dtype):
    query, key = tensors()
    exact = by_head(regard.observe(query.to(dtype).double(), key.to(dtype).double()).weights())
    found = regard.observe(query.to(dtype), key.to(dtype)).ask(SameToken(IDS, FAVOUR.float()))
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, tolerance=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = regard.observe(query.float(), key.float()).ask(SameToken(IDS, FAVOUR.float()))
    assert_close(found.double(), by_head(regard.observe(query, key).weights()), tolerance=1e-5)


def test_a_part_of_another_shape_is_refused_in_words():
    class OverQueries(PerQuery):
        def of(self, tile):
            return tile.weights[..., :3].sum(-2)

    class OverHeads(PerKey):
        def of(self, tile):
            return tile.weights.sum((1, 2))

    seen = regard.observe(*tensors())
    told = r"OverQueries\.of: a part must be \[batch=2, heads=6, rows=13\], got \[2, 6, 3\]"
    with pytest.raises(regard.ShapeError, match=told):
        seen.ask(OverQueries())
    with pytest.raises(regard.ShapeError, match=r"must be \[batch=2, heads=6, columns=13\], got \[2, 13\]"):
        seen.ask(OverHeads())


# --- memory -----------------------------------------------------------------------------------------------------------


class Where(PerQuery):
    """Which memory its tiles stand in."""

    memory: set

    def start(self, call):
        super().start(call)
        type(self).memory = set()

    def of(self, tile):
        self.memory.add(tile.weights.data_ptr())
        return tile.weights.sum(-1)


class Kept(Where):
    """The same, which keeps the tiles."""

    keeps_tiles = True

    def start(self, call):
        super().start(call)
        self.tiles = []

    def see(self, tile):
        self.tiles.append(tile.weights)
        super().see(tile)


class KeptByAdd(PerQuery):
    """A sum that does something else with its parts, and does not say whether it keeps them."""

    def add(self, tile, part):
        self.parts = [*getattr(self, "parts", []), part]

    def of(self, tile):
        return tile.weights

    def finish(self):
        return self.parts


class ScoresAndWeights(PerQuery):
    """The mean score, from scores that are taken before the weights."""

    def of(self, tile):
        scores, weights = tile.scores, tile.weights
        return (scores.masked_fill(scores == -math.inf, 0.0) * weights).sum(-1)


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"bias": torch.ones(HEADS, 1, LENGTH)}])
@pytest.mark.parametrize("known", [False, True])
def test_scores_stay_what_they_are_when_weights_are_taken_after_them(more, known):
    query, key = tensors()
    seen = regard.observe(query, key, mask=Causal(), **more)
    weights, scores = seen.weights(), seen.scores()
    if known:
        assert seen.lse is not None
    expected = (weights * scores.masked_fill(scores == -math.inf, 0.0)).sum(-1)
    assert_close(seen.ask(ScoresAndWeights()), expected)


def test_tiles_take_each_other_s_memory_unless_a_statistic_keeps_them(monkeypatch):
    from regard.observation import tuning

    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 5 * LENGTH)
    seen = regard.observe(*tensors())
    seen.gather(Where())
    assert len(Where.memory) == 1  # beside regard's own, and alone
    seen.gather(Where(), Entropy(), Top(3))
    assert len(Where.memory) == 1
    seen.gather(Kept(), Entropy())
    assert len(Kept.memory) > 10
    assert seen.gather(Entropy(), Kept())[1].shape == (BATCH, HEADS, LENGTH)
    (parts,) = seen.gather(KeptByAdd())
    assert len({part.data_ptr() for part in parts}) == len(parts) > 10
    assert float(sum(part.sum() for part in parts)) == pytest.approx(BATCH * HEADS * LENGTH)


# --- what nobody sees -------------------------------------------------------------------------------------------------


class Squares(PerQuery):
    def of(self, tile):
        return tile.weights.square().sum(-1)


@pytest.mark.parametrize("given", ["nothing", "bias", "alibi", "softcap", "sink", "additive", "no keys"])
def test_where_nothing_is_visible_statistics_have_a_graph_and_gradients_of_0(given):
    query, key = tensors()
    mask = Padding([0, 0])
    more = {
        "bias": {"bias": torch.randn(LENGTH, LENGTH, dtype=torch.float64).requires_grad_()},
        "alibi": {"bias": regard.Alibi(HEADS)},
        "softcap": {"softcap": 2.0},
        "sink": {"sink": torch.zeros(HEADS, dtype=torch.float64).requires_grad_()},
        "additive": {"additive": regard.Additive(torch.randn(HEADS, SIZE, dtype=torch.float64).requires_grad_())},
    }.get(given, {})
    if given == "no keys":
        key, mask = key[:, :, :0], None
    query, key = query.requires_grad_(), key.detach().requires_grad_()
    leaves = [query, key, *(x for x in more.values() if isinstance(x, torch.Tensor))]
    if given == "additive":
        leaves.append(more["additive"].v)
    output = regard.attention(query, key, key, mask=mask, **more)
    torch.autograd.grad(output.sum(), leaves)  # as attention gives them
    seen = regard.observe(query, key, mask=mask, **more)
    asked = {
        "entropy": seen.entropy, "received": seen.received, "distance": seen.distance, "lse": lambda: seen.lse.exp(),
        "image": lambda: seen.image(4, "mean"), "pyramid": lambda: seen.pyramid(4, "mean")[0],
        "distances": lambda: seen.distances().mass, "mass": lambda: seen.mass(torch.zeros(key.shape[2]).long()),
        "compare": lambda: sum(seen.compare(seen)), "own": lambda: seen.ask(Squares()), "sink": seen.sink_mass,
        "mean received": seen.mean_received, "together": lambda: sum(seen.gather(Entropy(), Squares())),
    }  # fmt: skip
    if given == "no keys":
        del asked["mass"]  # no key, no group
    if given == "sink":
        del asked["lse"]  # which is the sink
    for name, ask in asked.items():
        result = ask()
        assert result.requires_grad, name
        for leaf, gradient in zip(leaves, torch.autograd.grad(result.sum(), leaves), strict=True):
            assert gradient.shape == leaf.shape
            assert_zero(gradient)
    assert not seen.top(1).weights.requires_grad if key.shape[2] else True
    assert not seen.image(4).requires_grad


# --- lse --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_lse_wider_than_the_scores_is_taken(dtype):
    query, key = (x.to(dtype) for x in tensors())
    for given in ({}, {"softcap": 3.0}, {"mask": Causal()}):
        expected = regard.observe(query, key, **given)
        seen = regard.observe(query, key, **given, lse=expected.lse.double())
        assert seen.lse.dtype == torch.float32
        for one, other in zip(seen.gather(Entropy(), Squares()), expected.gather(Entropy(), Squares()), strict=True):
            assert one.dtype == torch.float32
            assert_close(one, other, tolerance=1e-5)
        assert_close(seen.weights(), expected.weights(), tolerance=1e-5)
        assert seen[1, 2].received().dtype == torch.float32


def test_an_lse_narrower_than_float32_is_refused():
    query, key = (x.float() for x in tensors())
    lse = regard.observe(query, key).lse
    for dtype in (torch.float16, torch.bfloat16):
        for q, k in ((query, key), (query.to(dtype), key.to(dtype))):
            with pytest.raises(TypeError, match=f"observe: lse must be float32 or wider, .* got {dtype}"):
                regard.observe(q, k, lse=lse.to(dtype))


def test_gradients_go_through_an_lse_of_another_dtype():
    query, key = (x.float().requires_grad_() for x in tensors())
    lse = regard.attention_with_lse(query, key, key).lse
    (wanted,) = torch.autograd.grad(regard.observe(query, key).received()[0, 0, 3], query)
    (given,) = torch.autograd.grad(regard.observe(query, key, lse=lse.double()).received()[0, 0, 3], query)
    assert_close(given, wanted, tolerance=1e-5)
    assert math.isfinite(float(given.sum()))


def test_a_rule_for_other_rows_than_those_that_are_asked_is_refused():
    seen = regard.observe(*tensors())
    chosen = same(IDS)

    def rule(query, key):
        return chosen[:, :, query[:, 0, None], key[0]]

    assert_close(seen.share(rule), (seen.weights() * chosen).sum(-1))
    with pytest.raises(regard.ShapeError, match=r"Observation.share: chosen must broadcast to \[batch=1, heads=6"):
        seen[1].share(rule)


def test_what_is_no_statistic_is_refused():
    seen = regard.observe(*tensors())
    for wrong, told in ((Entropy, "<class '.*Entropy'>"), ("entropy", "'entropy'"), (None, "None")):
        with pytest.raises(TypeError, match=f"expected statistics .* such as Entropy.*; got {told}"):
            seen.ask(wrong)
    with pytest.raises(TypeError, match="got none"):
        seen.gather()

"""Statistics taken while a model runs are those of its recording, and the model gives what it gives without them."""

import gc

import pytest
import torch
from torch import nn

import regard.hooks
from cases import tensors
from comparing import assert_close, assert_zero
from naive import naive
from regard.cache import LayerCache
from regard.configuration import ModelConfig
from regard.feed_forward import FeedForward
from regard.generation import generate
from regard.kernels.strips import native
from regard.layers import MultiHeadAttention
from regard.masks import Causal, Dense, Document, Padding
from regard.models import Encoder
from regard.observation import (
    Attended,
    Distance,
    Entropy,
    Image,
    MaxScore,
    Received,
    Share,
    Spread,
    Top,
    observe,
    tuning,
)
from regard.recording import Ablate, HideKey, Replace, gather, intervene, record
from regard.scores import Additive
from small import LENGTH, VOCAB, decoder, spread, text

PARTS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "alibi, grouped": {"positions": "alibi", "kv_heads": 2},
    "window, softcap": {"window": 3, "softcap": 1.5},
    "learned": {"positions": "learned", "norm": "layer", "bias": True},
}
STATISTICS = Entropy(), Received(), Top(4), Distance(), Image(5, "mean"), MaxScore(), Spread()


@pytest.fixture(params=["one pass", "one pass, head by head", "two passes", "two passes, the compiled kernel"])
def passes(request, monkeypatch):
    """Whether the output comes from the weights; as a number, how often attention is then called for each layer."""
    if request.param == "two passes, the compiled kernel":
        if not native.is_there(torch.float32):
            pytest.skip("no library for this processor")
        return 1
    request.getfixturevalue("without_the_library")
    if request.param == "one pass, head by head":
        monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 5 * LENGTH)
        monkeypatch.setattr(tuning, "TILE_QUERIES", 3)
    if request.param == "two passes":
        monkeypatch.setattr(tuning, "MAX_ATTENDED_KEYS", 4)
    monkeypatch.setattr(tuning, "MAX_WHOLE_ROW_COST", float("inf"))
    return int(request.param == "two passes")


@pytest.fixture
def attended(monkeypatch):
    """One entry for every call of attention."""
    calls, real = [], regard.hooks.attention_and_perhaps_lse

    def counted(*args, **kwargs):
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(regard.hooks, "attention_and_perhaps_lse", counted)
    return calls


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else [tensor for part in result for tensor in flat(part)]


def assert_alike(found, expected, what=""):
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert_close(one.double(), other.double(), what)


@pytest.mark.parametrize("name", PARTS)
def test_what_is_gathered_is_what_a_recording_answers_and_the_model_gives_the_same(name, passes, attended):
    model, tokens = decoder(**PARTS[name]), text()
    for mask in (None, Document.from_lengths([[4, 7], [11, 0]])):
        with torch.no_grad():
            with record(model) as recording:
                plain = model(tokens, mask=mask)
            attended.clear()
            with gather(model, *STATISTICS) as gathered:
                output = model(tokens, mask=mask)
        assert len(attended) == passes * len(gathered)
        assert_close(output, plain, name)
        assert list(gathered) == list(recording)
        for layer, seen in recording.items():
            assert_alike(gathered[layer], seen.gather(*STATISTICS), layer)
    if passes:
        assert torch.equal(output, plain)  # nothing was done in another way


CALLS = {
    "nothing": {},
    "causal": {"mask": Causal()},
    "rows that see nothing": {"mask": Padding([0, 9])},
    "any cells": {"mask": Dense(torch.rand(2, 6, 7, 11, generator=torch.Generator().manual_seed(0)) < 0.4)},
    "softcap, scale": {"softcap": 0.8, "scale": 1.0},
    "bias": {"bias": torch.randn(6, 7, 11, dtype=torch.float64)},
    "sink": {"sink": torch.linspace(-1, 40, 6, dtype=torch.float64), "mask": Padding([0, 9])},
    "additive": {"additive": Additive(torch.ones(6, 3, dtype=torch.float64))},
}


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("name", CALLS)
def test_the_output_is_attention_s_and_lse_comes_along(name, monkeypatch):
    query, key, value = (x.detach() for x in tensors())
    call = dict(CALLS[name])
    if "additive" in call:
        call["additive"] = Additive(torch.linspace(-1, 1, 6 * query.shape[-1], dtype=torch.float64).view(6, -1))
    for cells in (1 << 20, 40):
        monkeypatch.setattr(tuning, "MAX_TILE_SCORES", cells)
        monkeypatch.setattr(tuning, "MAX_WHOLE_ROW_COST", float("inf"))
        seen = observe(query, key, **call)
        output, (entropy,) = seen.attend(value, [Entropy()])
        exact, lse = regard.attention_with_lse(query, key, value, **call, kernel="reference")
        assert_close(output, exact)
        assert_close(seen.call.lse, lse)
        assert_close(entropy, observe(query, key, **call, lse=lse).entropy())
    if not call:
        assert_close(output, naive(query, key, value)[0])
    assert_close(observe(query, key, **call).gather(Attended(value))[0], exact)


@pytest.mark.usefixtures("without_the_library")
def test_nan_in_keys_and_values_that_nobody_sees_reaches_nothing():
    query, key, value = (x.detach().clone() for x in tensors())
    key[1, :, 6:] = value[1, :, 6:] = key[0] = value[0] = torch.nan
    seen = observe(query, key, mask=Padding([0, 6]))
    output, (entropy, received) = seen.attend(value, [Entropy(), Received()])
    assert_zero(output[0])
    clean = (x.detach() for x in tensors())
    assert_close(output, regard.attention(*clean, mask=Padding([0, 6])))
    assert bool(entropy.isfinite().all())
    assert_zero(received[1, :, 6:])


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_is_as_exact_as_the_reference_in_the_same_dtype(dtype):
    shape = 1, 4, 211, 17
    query, key, value = (torch.randn(shape).to(dtype) for _ in range(3))
    output, _ = observe(query, key, mask=Causal()).attend(value, [Entropy()])
    assert output.dtype == dtype
    wide = (x.double() for x in (query, key, value))
    exact = regard.attention(*wide, mask=Causal(), kernel="reference")
    own = regard.attention(query, key, value, mask=Causal(), kernel="reference")
    error, allowed = (output - exact).abs().max(), (own - exact).abs().max()
    assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max()


def test_gradients_go_through_what_is_gathered_and_the_output_is_untouched(attended):
    layer = spread(MultiHeadAttention(24, 6, kv_heads=2, mask=Causal(), sink=True))
    x = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    with gather(layer, Entropy(), Received()) as gathered:
        output = layer(x)
    assert len(attended) == 1
    assert torch.equal(output, layer(x))
    entropy, received = gathered["attention"]
    (entropy.sum() + received.square().sum()).backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    heads = layer.project(x)
    seen = observe(heads.query, heads.key, mask=Causal(), sink=layer.sink)
    (seen.entropy().sum() + seen.received().square().sum()).backward()
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            assert_close(found[name], parameter.grad, name)
    assert len(found) >= 3


def test_dropout_drops_from_the_output_and_not_from_the_statistics():
    model, tokens = decoder(attention_dropout=0.4), text()
    with torch.no_grad():
        with gather(model, Entropy()) as still:
            model(tokens)
        model.train()
        torch.manual_seed(5)
        plain = model(tokens)
        torch.manual_seed(5)
        with gather(model, Entropy()) as gathered:
            output = model(tokens)
    assert torch.equal(output, plain)
    assert_close(gathered["layers.0"][0], still["layers.0"][0])  # the first has no layer before it that dropped


def test_other_blocks_around_and_inside_see_the_same_call():
    model, tokens = decoder(), text()
    change = HideKey("layers.1", 2, key=3)
    with torch.no_grad():
        with intervene(model, change), record(model) as expected:
            plain = model(tokens)
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)):
            blocks = [intervene(model, change), gather(model, Top(2), Received()), record(model)]
            with blocks[order[0]] as first, blocks[order[1]] as second, blocks[order[2]] as third:
                output = model(tokens)
            found = dict(zip(order, (first, second, third), strict=True))
            assert_close(output, plain)
            assert_alike(found[1]["layers.1"], expected["layers.1"].gather(Top(2), Received()))
            assert_close(found[2]["layers.1"].weights(), expected["layers.1"].weights())
        with gather(model, Entropy()) as outer, gather(model, Received()) as inner:
            model(tokens)
    assert_close(inner["layers.2"][0].sum(-1), torch.full((2, 6), float(LENGTH), dtype=torch.float64))
    assert len(outer["layers.2"]) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_recording_around_it_is_told_lse(dropout):
    layer, x = MultiHeadAttention(32, 4, dropout=dropout), torch.randn(1, 200, 32)
    with torch.no_grad(), record(layer) as recording, gather(layer, Entropy()) as gathered:
        layer(x)
    seen = recording["attention"]
    assert seen.call.lse is not None
    assert_close(seen.lse, observe(seen.query, seen.key).lse)
    assert_close(gathered["attention"][0], seen.entropy())


def test_a_head_s_output_is_changed_after_it_was_gathered():
    model, tokens = decoder(), text()
    other = torch.randn(2, LENGTH, 4, dtype=torch.float64)
    for change in (Ablate("layers.2", 5), Replace("layers.2", 5, other)):
        with torch.no_grad():
            with intervene(model, change):
                plain = model(tokens)
            with gather(model, Entropy()), intervene(model, change):
                assert_close(model(tokens), plain)


def test_every_call_is_taken_for_itself():
    model = decoder()
    with torch.inference_mode(), gather(model, Received()) as gathered:
        list(generate(model, text(1, 4)[0].tolist(), 3, temperature=0.0))
    shapes = [list(received.shape) for (received,) in gathered.calls("layers.1")]
    assert shapes == [[1, 6, 4], [1, 6, 5], [1, 6, 6]]
    assert [float(received.sum()) for (received,) in gathered.calls(1)] == pytest.approx([24, 6, 6])
    assert gathered[1] == gathered.calls(1)[-1]
    layer, cache = spread(MultiHeadAttention(24, 6, mask=Causal())), LayerCache()
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    with torch.no_grad(), gather(layer, Entropy()) as gathered:
        whole = layer(x)
        pieces = [layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)]
    assert_close(torch.cat(pieces, dim=1), whole)
    (whole,), *pieces = gathered.calls("attention")
    assert_close(torch.cat([entropy for (entropy,) in pieces], dim=2), whole)


def test_layers_are_chosen_and_the_others_run_as_ever(attended):
    model, tokens = decoder(), text()
    for chosen in ("layers.1", 1, [1], ["layers.1"], ("layers.1", 1)):
        attended.clear()
        with torch.no_grad(), gather(model, Entropy(), layers=chosen) as gathered:
            model(tokens)
        assert list(gathered) == ["layers.1"]
        # the others need no lse; nor does the chosen one need a call, where tiles give its output
        assert len(attended) == native.is_there(torch.float64)


def test_nothing_but_the_answers_is_kept():
    model, tokens = decoder(layers=6), text(length=13)
    with torch.no_grad():
        with gather(model, Entropy()):
            model(tokens)  # masks and their strips are kept at a first call
        gc.collect()
        before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
        with gather(model, Entropy()) as gathered:
            model(tokens)
    gc.collect()
    kept = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in before]
    assert sorted(map(id, kept)) == sorted(id(entropy) for (entropy,) in gathered.values())


def test_a_batch_with_a_rule_of_heads_and_rows_in_parts(monkeypatch):
    monkeypatch.setattr(tuning, "MAX_TILE_SCORES", 40)
    query, key, _ = (x.detach() for x in tensors())
    chosen = torch.rand(2, 6, 7, 11) < 0.5

    def rule(queries, keys):
        return chosen[:, :, queries[:, 0, None], keys[0]]

    weights = observe(query, key).weights()
    assert_close(observe(query, key).share(rule), (weights * chosen).sum(-1))
    assert_close(observe(query, key).gather(Share(lambda q, k: rule(q, k)[:1, :1]))[0],
                 (weights * chosen[:1, :1]).sum(-1))  # fmt: skip


def test_it_says_what_it_has():
    model = decoder()
    with gather(model, Entropy()) as gathered:
        assert len(gathered) == 0
        with pytest.raises(KeyError, match=r"gather: no layer 'layers\.0'; gathered are: none: has the model run"):
            gathered["layers.0"]
        model(text())
    assert repr(gathered) == "<Gathered: 3 layers, 3 calls, 1 statistic, 3.1 KiB>"
    with pytest.raises(KeyError, match=r"gather: no layer 3; gathered are: layers\.0, layers\.1, layers\.2"):
        gathered.calls(3)
    assert "layers.1" in gathered


def test_what_cannot_be_gathered_is_refused():
    model = decoder()
    with pytest.raises(TypeError, match=r"gather: expected statistics of regard\.observation.*; got none"):
        gather(model).__enter__()
    with pytest.raises(
        TypeError, match=r"such as Entropy\(\), Top\(8\); got <class 'regard\.observation\.measures\.Entropy'>"
    ):
        gather(model, Entropy).__enter__()
    with pytest.raises(ValueError, match=r"gather: no layer layers\.7; there are: layers\.0, "):
        gather(model, Entropy(), layers="layers.7").__enter__()
    with pytest.raises(ValueError, match="gather: no attention of FeedForward went through regard"), \
            gather(FeedForward(3, 4), Entropy()):  # fmt: skip
        pass
    with pytest.raises(ValueError, match="count must be 1 to key_len=11, got 12"), gather(model, Top(12)):
        model(text())
    assert not regard.hooks._active


def test_a_model_of_transformers_is_gathered_from(attended):
    transformers = pytest.importorskip("transformers")
    import regard.huggingface

    regard.huggingface.register()
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
             "intermediate_size": 17}  # fmt: skip
    model = spread(transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False)).eval()
    tokens, padding = text(), torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, 8:] = 0
    with torch.no_grad():
        model.set_attn_implementation("eager")
        eager = model(tokens, attention_mask=padding, output_attentions=True)
        model.set_attn_implementation("regard")
        with gather(model, Entropy(), Received(), Top(3)) as gathered:
            output = model(tokens, attention_mask=padding)
    assert_close(output.last_hidden_state[padding.bool()], eager.last_hidden_state[padding.bool()])
    for (entropy, received, top), weights in zip(gathered.values(), eager.attentions, strict=True):
        rows = padding[:, None, :, None]
        assert_close(entropy * rows[..., 0], torch.special.entr(weights).sum(-1) * rows[..., 0])
        assert_close(top.weights * rows, weights.topk(3).values * rows)
        assert received.shape == (2, 6, LENGTH)
    assert len(attended) == 3 * native.is_there(torch.float32)
    assert isinstance(model, nn.Module)


def test_an_encoder_with_both_sides_visible(passes, attended):
    sizes = {"vocab_size": VOCAB, "context_length": 13, "dim": 24, "layers": 2, "heads": 3, "hidden_dim": 17}
    model, tokens = spread(Encoder(ModelConfig(**sizes))).eval(), text(1)
    with torch.no_grad():
        plain = model(tokens)
        with gather(model, Entropy()) as gathered:
            assert_close(model(tokens), plain)
        assert len(attended) == passes * 2
        with record(model) as recording:
            model(tokens)
    assert_close(gathered[1][0], recording[1].entropy())

"""A recording has what every layer saw, changes nothing, and calls heads by what they do."""

import math

import pytest
import torch
from torch import nn

from comparing import assert_close, assert_zero
from regard.biases import RelativeBias
from regard.cache import LayerCache
from regard.layers import FeedForward, MultiHeadAttention
from regard.masks import Causal, Document, Padding
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, ModelConfig
from regard.observation import Observation, observe
from regard.recording import LOCAL, Recording, kind_of, record, seen_before, summarise
from regard.shapes import ShapeError

VOCAB, LENGTH = 29, 11


def config(**changes):
    return ModelConfig(
        **{"vocab_size": VOCAB, "context_length": 13, "dim": 24, "layers": 3, "heads": 6, "hidden_dim": 17} | changes
    )


def spread(model):
    """Weights large enough that attention is far from even, in float64."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return model.double()


def text(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_every_layer_has_its_name():
    model, tokens = spread(Decoder(config())), text()
    with record(model) as recording:
        assert len(recording) == 0
        model(tokens)
    assert list(recording) == ["layers.0", "layers.1", "layers.2"]
    assert isinstance(recording["layers.2"], Observation)
    assert "layers.3" not in recording
    assert str(recording["layers.0"].grid) == "[batch=2, heads=6, query_len=11, key_len=11]"


def test_layers_of_a_whole_are_named_by_their_place_in_it():
    model = spread(EncoderDecoder(config(layers=2)))
    with record(model) as recording:
        model(text(), text(length=7))
    names = ["encoder.layers.0", "encoder.layers.1"]
    names += ["decoder.layers.0", "decoder.layers.0.cross", "decoder.layers.1", "decoder.layers.1.cross"]
    assert sorted(recording) == sorted(names)
    assert recording["decoder.layers.1.cross"].grid[2:4] == (7, 11)
    with record(Classifier(Encoder(config(layers=1)), 2)) as recording:
        pass
    assert len(recording) == 0
    layer = spread(MultiHeadAttention(24, 6))
    with record(layer) as recording:
        layer(torch.randn(1, 3, 24, dtype=torch.float64))
    assert list(recording) == ["attention"]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"positions": "alibi", "kv_heads": 2},
        {"window": 3, "softcap": 1.5},
        {"positions": "learned", "norm": "layer", "bias": True, "attention_dropout": 0.3},
    ],
    ids=str,
)
def test_recorded_weights_times_value_are_what_each_layer_did(parts):
    model, tokens = spread(Decoder(config(**parts))).eval(), text()
    plain = model(tokens)
    outputs = {}
    for number, block in enumerate(model.layers):
        block.attention.register_forward_hook(
            lambda module, inputs, output, number=number: outputs.update({number: (inputs[0], output)})
        )
    mask = Document.from_lengths([[4, 7], [11, 0]])
    with record(model) as recording:
        output = model(tokens, mask=mask)
        assert torch.equal(output, model(tokens, mask=mask))
    for number, block in enumerate(model.layers):
        given, said = outputs[number]
        heads = block.attention.project(given)
        value = heads.value.repeat_interleave(6 // heads.value.shape[1], dim=1)
        assert_close(block.attention.join(recording[f"layers.{number}"].weights() @ value), said)
    assert torch.equal(model(tokens), plain)


def test_learned_parts_of_a_score_are_recorded_as_they_were():
    layers = {
        "sink": MultiHeadAttention(24, 6, sink=True),
        "additive": MultiHeadAttention(24, 6, similarity="additive"),
        "bias": MultiHeadAttention(24, 6),
    }
    table = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    for name, layer in layers.items():
        spread(layer)
        bias = RelativeBias(table, max_distance=9) if name == "bias" else None
        with record(layer) as recording:
            layer(x, bias=bias)
        q, k, _ = layer.project(x)
        expected = observe(q, k, **layer.scoring(bias=bias)).weights().detach()
        with torch.no_grad():  # as the next step of training would
            for parameter in (layer.sink, layer.similarity):
                if parameter is not None:
                    parameter += 1
        assert_close(recording["attention"].weights(), expected, name)
        if name != "bias":
            assert not recording["attention"].weights().requires_grad
        summary = recording.summary(torch.zeros(1, 5, dtype=torch.int64))
        assert len(summary) == 6


def test_the_last_call_of_a_layer_is_the_one_that_stays():
    layer = spread(MultiHeadAttention(24, 6))
    first, last = torch.randn(2, 1, 5, 24, dtype=torch.float64)
    with record(layer) as recording:
        layer(first)
        layer(last)
    with record(layer) as expected:
        layer(last)
    assert_close(recording["attention"].weights(), expected["attention"].weights())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_cache_does_later_does_not_change_what_was_recorded(mode):
    layer = spread(MultiHeadAttention(24, 6, mask=Causal()))
    x = torch.randn(1, 9, 24, dtype=torch.float64)
    cache = LayerCache()
    with mode():
        layer(x[:, :3], cache=cache)
        with record(layer) as recording:
            layer(x[:, 3:5], cache=cache)
        expected = recording["attention"].weights().clone()
        assert expected.shape[2:] == (2, 5)
        cache.crop(2)
        layer(x[:, 5:], cache=cache)
    recording["attention"]._lse = None  # to be computed again
    assert_close(recording["attention"].weights(), expected)


def test_a_recording_can_be_asked_outside_of_inference_mode():
    model, tokens = spread(Decoder(config())), text()
    with torch.inference_mode(), record(model) as recording:
        model(tokens)
    with record(model) as expected:
        model(tokens)
    assert_close(recording["layers.1"].head(4).entropy(), expected["layers.1"].head(4).entropy())
    assert recording.summary(tokens)[7] == expected.summary(tokens)[7]


# --- watchers ---------------------------------------------------------------------------------------------------------


def watchers(model):
    return [module.watcher for module in model.modules() if isinstance(module, MultiHeadAttention)]


def test_watchers_are_restored():
    model = spread(Decoder(config()))
    own = []

    def watch(heads, scoring, attend):
        own.append(heads)
        return attend(heads, scoring)

    model.layers[1].attention.watcher = watch
    with record(model) as recording:
        model(text())
        assert None not in watchers(model)
    assert watchers(model) == [None, watch, None]
    assert len(own) == 1  # it has seen what the recording saw
    model(text())
    assert len(own) == 2
    assert len(recording) == 3


def test_watchers_are_restored_after_an_error_and_what_was_recorded_before_it_stays():
    model = spread(Decoder(config()))
    model.layers[1].feed_forward.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), record(model) as recording:
        model(text())
    assert watchers(model) == [None, None, None]
    assert list(recording) == ["layers.0", "layers.1"]


def test_a_recording_inside_another_one_takes_nothing_from_it():
    model = spread(Decoder(config()))
    tokens = [text(), text(), text()]
    with record(model) as outer:
        model(tokens[0])
        with record(model.layers[2]) as inner:
            model(tokens[1])
        assert_close(outer["layers.2"].weights(), inner["attention"].weights())
        model(tokens[2])
    assert list(inner) == ["attention"]
    assert watchers(model) == [None, None, None]
    with record(model) as expected:
        model(tokens[1])
    assert_close(inner["attention"].weights(), expected["layers.2"].weights())


def test_a_model_without_attention_is_refused():
    for model in (nn.Linear(3, 4), FeedForward(3, 4)):
        says = f"record: {type(model).__name__} contains no regard.MultiHeadAttention"
        with pytest.raises(ValueError, match=says), record(model):
            pass


def test_a_name_that_was_not_recorded_is_answered_with_those_that_were():
    with pytest.raises(KeyError, match=r"no layer 'layers\.0'; recorded are: none: has the model run inside"):
        Recording()["layers.0"]
    model = spread(Decoder(config(layers=2)))
    with record(model) as recording:
        model(text())
    with pytest.raises(KeyError, match=r"recording: no layer 'layer\.0'; recorded are: layers\.0, layers\.1"):
        recording["layer.0"]
    assert recording.get("layer.0") is None


# --- what heads are called --------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[7, 1, 2, 3, 1, 2, 3, 1], [7, 4, 4, 5, 6, 4, 5, 8]])
"""Earlier occurrences: in the first row from place 4 on, in the second at places 2, 5 and 6."""


def looking_at(*targets, batch=2):
    """An observation whose heads put all weight on one key each: targets[head][query], or None to look evenly."""
    length = len(targets[0])
    query = torch.zeros(batch, len(targets), length, length, dtype=torch.float64)
    for head, keys in enumerate(targets):
        for place, key in enumerate(keys):
            if key is not None:
                query[:, head, place, key] = 1000.0
    key = torch.eye(length, dtype=torch.float64).expand(batch, len(targets), -1, -1)
    return observe(query, key, mask=Causal(), scale=1.0)


def test_heads_by_hand():
    heads = {
        "previous token": [0, 0, 1, 2, 3, 4, 5, 6],
        "first token": [0] * 8,
        "same token": list(range(8)),
        "induction": [0, 0, 0, 0, 2, 3, 4, 5],  # what followed the last 1, 2, 3, 1 of the first row
        "even": [None] * 8,
    }
    summary = summarise("layers.4", looking_at(*heads.values(), batch=1), TOKENS[:1])
    assert [s.kind for s in summary] == list(heads)
    assert [(s.layer, s.head) for s in summary] == [("layers.4", head) for head in range(5)]
    previous, first, same, induction, even = summary
    # place 1 looks at place 0, which is the first token and the previous one: 1 of the 7 queries from the second on
    assert previous.shares == pytest.approx(
        {"previous token": 1, "first token": 1 / 7, "same token": 0, "induction": 0, "local": 1}
    )
    assert first.shares == pytest.approx(
        {"previous token": 1 / 7, "first token": 1, "same token": 0, "induction": 0, "local": 1}
    )
    assert same.shares == pytest.approx(
        {"previous token": 0, "first token": 0, "same token": 1, "induction": 0, "local": 1}
    )
    assert induction.shares == pytest.approx(
        {"previous token": 1 / 7, "first token": 3 / 7, "same token": 0, "induction": 1, "local": 1}
    )
    # query i puts 1 / (i + 1) on each of its keys
    own_or_same = [1 / 2, 1 / 3, 1 / 4, 2 / 5, 2 / 6, 2 / 7, 3 / 8]
    after_same = [1 / 5, 1 / 6, 1 / 7, 2 / 8]
    assert even.shares == pytest.approx(
        {
            "previous token": sum(1 / (i + 1) for i in range(1, 8)) / 7,
            "first token": sum(1 / (i + 1) for i in range(1, 8)) / 7,
            "same token": sum(own_or_same) / 7,
            "induction": sum(after_same) / 4,
            "local": 1,
        }
    )
    assert [s.entropy for s in summary[:4]] == pytest.approx([0] * 4)
    assert even.entropy == pytest.approx(sum(math.log(i + 1) for i in range(8)) / 8)
    assert [s.spread for s in summary] == pytest.approx([0, 0, 0, 0, 1])
    assert [s.distance for s in summary] == pytest.approx(
        [7 / 8, 28 / 8, 0, (0 + 1 + 2 + 3 + 2 + 2 + 2 + 2) / 8, 28 / 16]
    )


def test_earlier_occurrences():
    assert seen_before(TOKENS).int().tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0]]


def test_shares_of_any_weights_counted_one_by_one():
    observation = observe(
        torch.randn(2, 3, 12, 5, dtype=torch.float64), torch.randn(2, 3, 12, 5, dtype=torch.float64),
        mask=Causal() & Padding([12, 9]), scale=2.0,
    )  # fmt: skip
    tokens = torch.randint(4, (2, 12))
    weights = observation.weights().tolist()
    for summary in summarise("layers.0", observation, tokens):
        sums = dict.fromkeys(summary.shares, 0.0)
        counts = dict.fromkeys(summary.shares, 0)
        for b in range(2):
            row = tokens[b].tolist()
            for i in range(12):
                w = weights[b][summary.head][i]
                found = {
                    "previous token": [i - 1],
                    "first token": [0],
                    "same token": [j for j in range(i + 1) if row[j] == row[i]],
                    "induction": [j for j in range(1, i + 1) if row[j - 1] == row[i]],
                    "local": [j for j in range(12) if abs(i - j) < LOCAL],
                }
                for kind, keys in found.items():
                    if i > 0 if kind != "induction" else row[i] in row[:i]:
                        sums[kind] += sum(w[j] for j in keys)
                        counts[kind] += 1
        assert summary.shares == pytest.approx({kind: sums[kind] / counts[kind] for kind in sums})


def test_a_text_without_repetition_has_no_share_of_induction():
    (summary,) = summarise("layers.0", looking_at([None] * 8, batch=1), torch.arange(8)[None])
    assert summary.shares["induction"] == 0


def test_the_sink_is_one_more_place_to_spread_over():
    query = torch.zeros(1, 1, 4, 2)
    seen = observe(query, query, mask=Causal(), sink=torch.zeros(1))
    (summary,) = summarise("layers.0", seen, torch.zeros(1, 4, dtype=torch.int64))
    assert summary.spread == pytest.approx(1)
    assert summary.entropy == pytest.approx(sum(math.log(n) for n in (2, 3, 4, 5)) / 4)


def test_a_layer_that_sees_nothing_has_no_nan():
    query = torch.zeros(1, 2, 4, 2)
    for mask in (Padding([0]), Padding([1]) & ~Causal()):
        for summary in summarise("layers.0", observe(query, query, mask=mask), torch.zeros(1, 4, dtype=torch.int64)):
            numbers = [summary.entropy, summary.spread, summary.distance, *summary.shares.values()]
            assert_zero(torch.tensor(numbers))


@pytest.mark.parametrize(
    ("shares", "spread", "kind"),
    [
        ({"induction": 0.4}, 0.9, "induction"),
        ({"induction": 0.39}, 0.9, "even"),
        ({"induction": 0.39}, 0.79, "mixed"),
        ({"previous token": 0.5, "induction": 0.6, "local": 0.9}, 0.1, "induction"),
        ({"first token": 0.39, "local": 0.5}, 0.79, "local"),
        ({"first token": 0.39, "local": 0.49}, 0.79, "mixed"),
        ({"first token": 0.39, "local": 0.9}, 0.8, "even"),
    ],
)
def test_the_largest_share_that_is_large_enough_gives_the_name(shares, spread, kind):
    nothing = dict.fromkeys(("previous token", "first token", "same token", "induction", "local"), 0.0)
    assert kind_of(nothing | shares, spread) == kind


def test_a_summary_goes_through_all_layers_and_says_how_far_it_is():
    model, tokens = spread(Decoder(config())), text()
    with record(model) as recording:
        model(tokens)
    told = []
    summary = recording.summary(tokens, progress=lambda done, all: told.append((done, all)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert [(s.layer, s.head) for s in summary] == [(f"layers.{layer}", h) for layer in range(3) for h in range(6)]
    assert summary[8] == summarise("layers.1", recording["layers.1"], tokens)[2]


def test_a_summary_needs_the_text_that_was_read_whole_and_at_once():
    model, tokens = spread(Decoder(config())), text()
    cache = model.cache()
    with record(model) as recording:
        model(tokens, cache=cache)
        with pytest.raises(
            ShapeError, match=r"summary: layers\.0 saw 11 queries and 11 keys in 2 rows, tokens are \[2, 9\]"
        ):
            recording.summary(tokens[:, :9])
        with pytest.raises(ShapeError, match=r"tokens are \[1, 11\]"):
            recording.summary(tokens[:1])
        model(tokens[:, :1], cache=cache)
    with pytest.raises(ShapeError, match=r"saw 1 queries and 12 keys in 2 rows.*whole and at once"):
        recording.summary(tokens[:, :1])

"""A recording has what every layer saw, changes nothing, calls heads by what they do, and survives a file; and a head
that is changed is changed as if its weights were."""

import json
import math
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from cases import (
    BATCH,
    GRID,
    HEADS,
    KEY_LEN,
    KV_HEADS,
    QUERY_LEN,
    Ruled,
    around,
    biases,
    composed_masks,
    fixed_masks,
    tensors,
    told,
)
from comparing import assert_close, assert_same_cells, assert_zero
from regard import hooks
from regard.biases import Alibi, Bias, RelativeBias
from regard.cache import LayerCache
from regard.feed_forward import FeedForward
from regard.functional import plan
from regard.generation import generate
from regard.hooks import Heads
from regard.layers import MultiHeadAttention
from regard.masks import Causal, Chunk, Dense, Document, Mask, Padding, Prefix, Tile, Where, Window
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder
from regard.observation import Observation, observe
from regard.observation.selecting import HeadsMask
from regard.recording import (
    Ablate,
    HideKey,
    Recorded,
    Recording,
    Replace,
    Scale,
    Summary,
    intervene,
    load_recording,
    record,
)
from regard.recording.file import FORMAT
from regard.recording.summary import LOCAL_DISTANCE, kind_of, seen_before, summarise
from regard.recording.views import HiddenKey, PiecesMask
from regard.scores import Additive
from regard.shapes import Grid, ShapeError
from small import LENGTH, VOCAB, config, looking_at, spread, text

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
    seen = recording["attention"]
    seen.call = replace(seen.call, lse=None)  # to be computed again
    assert_close(recording["attention"].weights(), expected)


def test_a_recording_can_be_asked_outside_of_inference_mode():
    model, tokens = spread(Decoder(config())), text()
    with torch.inference_mode(), record(model) as recording:
        model(tokens)
    with record(model) as expected:
        model(tokens)
    assert_close(recording["layers.1"].head(4).entropy(), expected["layers.1"].head(4).entropy())
    one, other = (made.summary(tokens)[7] for made in (recording, expected))
    rounded = "entropy", "spread", "distance"  # without gradients, torch may add up in another order
    assert [getattr(one, name) for name in rounded] == pytest.approx([getattr(other, name) for name in rounded])
    assert one.shares == pytest.approx(other.shares)
    assert (one.layer, one.head, one.kind, one.reads) == (other.layer, other.head, other.kind, other.reads)


# --- the blocks -------------------------------------------------------------------------------------------------------


def test_another_hook_sees_what_a_recording_sees():
    model, own = spread(Decoder(config())), []
    with told(model.layers[1].attention, own):
        with record(model) as recording:
            model(text())
        assert len(own) == 1
        model(text())
    assert len(own) == 2
    assert len(recording) == 3
    assert not hooks._active


def test_nothing_stands_around_after_an_error_and_what_was_recorded_before_it_stays():
    model = spread(Decoder(config()))
    model.layers[1].feed_forward.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), record(model) as recording:
        model(text())
    assert not hooks._active
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
    assert not hooks._active
    with record(model) as expected:
        model(tokens[1])
    assert_close(inner["attention"].weights(), expected["layers.2"].weights())


def test_a_model_without_attention_is_refused():
    for model in (nn.Linear(3, 4), FeedForward(3, 4)):
        says = rf"record: no attention of {type(model).__name__} went through regard.*huggingface.register\(\)"
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


def test_heads_by_hand():
    heads = {
        "previous token": [0, 0, 1, 2, 3, 4, 5, 6],
        "first token": [0] * 8,
        "same token": list(range(8)),
        "induction": [0, 0, 0, 0, 2, 3, 4, 5],  # what followed the last 1, 2, 3, 1 of the first row
        "even": [None] * 8,
    }
    summary = summarise("layers.4", looking_at(*heads.values(), mask=Causal()), TOKENS[:1])
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
                    "local": [j for j in range(12) if abs(i - j) < LOCAL_DISTANCE],
                }
                for kind, keys in found.items():
                    if i > 0 if kind != "induction" else row[i] in row[:i]:
                        sums[kind] += sum(w[j] for j in keys)
                        counts[kind] += 1
        assert summary.shares == pytest.approx({kind: sums[kind] / counts[kind] for kind in sums})


def test_a_text_without_repetition_has_no_share_of_induction():
    (summary,) = summarise("layers.0", looking_at([None] * 8, mask=Causal()), torch.arange(8)[None])
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
    assert len(recording.summary(torch.cat([tokens, tokens[:, :1]], dim=1))) == 18
    with record(model) as recording:
        model(tokens[:, :1], cache=cache)
    with pytest.raises(ShapeError, match=r"saw 1 queries and 13 keys in 2 rows.*whole, from its first token on"):
        recording.summary(tokens[:, :1])


def test_a_summary_knows_the_tokens_or_does_without():
    model, tokens = spread(Decoder(config())), text()
    with record(model) as recording:
        model(tokens)
    assert recording.summary() == recording.summary(tokens)
    layer = spread(MultiHeadAttention(24, 6))
    with record(layer) as recording:
        layer(torch.randn(1, 3, 24, dtype=torch.float64))
    assert recording.tokens is None
    assert {head.reads for head in recording.summary()} == {"sequence"}
    assert {head.reads for head in recording.summary(torch.zeros(1, 3, dtype=torch.int64))} == {"text"}
    with pytest.raises(ShapeError, match=r"attention saw 3 queries and 3 keys in 1 rows, tokens are \[1, 4\]"):
        recording.summary(torch.zeros(1, 4, dtype=torch.int64))


def test_a_head_that_stays_in_its_document_by_hand():
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    heads = {
        "inside": [0, 0, 0, 0, 4, 4, 4, 4],
        "across": [0, 0, 0, 0, 1, 1, 1, 1],
        "even": [None] * 8,
        "half": [0, 0, 0, 0, 4, 1, 5, 2],
    }
    summary = summarise("layers.0", looking_at(*heads.values(), mask=Causal()), torch.arange(8)[None], documents)
    # queries 4 to 7 could see the first document; even attention puts 1/5, 2/6, 3/7, 4/8 on their own
    even = [1 / 5, 2 / 6, 3 / 7, 4 / 8]
    rest = sum(1 - share for share in even)
    assert [s.shares["document"] for s in summary] == pytest.approx(
        [1, -sum(even) / rest, 0, (1 - even[0] - even[1] + 1 - even[2] - even[3]) / rest]
    )
    # where the mask keeps the documents apart, nobody can be outside, and nothing can be told from it
    query = torch.zeros(1, 1, 8, 2)
    for mask in (Causal() & Document(documents), Padding([0])):
        (summary,) = summarise("layers.0", observe(query, query, mask=mask), torch.arange(8)[None], documents)
        assert summary.shares["document"] == 0
    with pytest.raises(ShapeError, match=r"documents are \[1, 5\]"):
        summarise("layers.0", observe(query, query), torch.arange(8)[None], documents[:, :5])


@pytest.mark.parametrize(
    ("shares", "spread", "kind"),
    [
        ({"document": 0.8}, 0.79, "document"),
        ({"document": 0.79}, 0.79, "mixed"),
        ({"document": 0.9, "local": 0.5}, 0.5, "local"),
        ({"document": 0.9}, 0.8, "even"),
        ({"document": 0.9, "first token": 0.4}, 0.8, "first token"),
    ],
)
def test_a_head_is_called_by_its_document_if_nothing_narrower_fits(shares, spread, kind):
    nothing = dict.fromkeys(("previous token", "first token", "same token", "induction", "local"), 0.0)
    assert kind_of(nothing | shares, spread) == kind


def test_a_summary_is_a_table_with_a_score_for_every_head():
    heads = {"previous token": [0, 0, 1, 2, 3, 4, 5, 6], "even": [None] * 8}
    summary = Summary(summarise("a<b", looking_at(*heads.values(), mask=Causal()), TOKENS[:1]))
    assert [s.score for s in summary] == pytest.approx([1, 1])
    mixed = summary[0]._replace(kind="mixed", spread=0.3)
    assert mixed.score == pytest.approx(0.7)
    assert str(summary).splitlines() == [
        "layer  head  kind            score  entropy  spread  distance",
        "a<b       0  previous token   1.00     0.00    0.00       0.9",
        "a<b       1  even             1.00     1.33    1.00       1.8",
    ]
    page = summary._repr_html_()
    assert page.startswith("<table><thead><tr><th>layer</th>")
    assert page.count("<tr>") == 3
    assert "<td>a&lt;b</td><td>0</td><td>previous token</td>" in page
    assert [s.head for s in summary.of("even")] == [1]
    worse = summary[0]._replace(head=2, shares=summary[0].shares | {"previous token": 0.5})
    assert [s.head for s in Summary([worse, *summary]).of("previous token")] == [0, 2]


def test_a_recording_shows_itself():
    model = spread(Decoder(config(layers=2)))
    with record(model) as recording:
        model(text())
    grid = "[batch=2, heads=6, query_len=11, key_len=11]"
    with_lse = ", lse" in repr(recording[0])  # not all kernels tell it, and which is taken depends on the processor
    whole, each, lse = ("18.7", "9.5", "lse, ") if with_lse else ("16.7", "8.4", "")
    assert repr(recording) == f"<Recording of Decoder: 2 layers, 2 calls, 6 heads, 11 tokens in 2 rows, {whole} KiB>"
    assert repr(recording[0]) == f"<Recorded {grid}, Causal(offset=0), {lse}tokens, {each} KiB>"
    assert repr(recording[0].head(3)).startswith("<Recorded [batch=2, heads=1, query_len=11")
    query = torch.zeros(1, 2, 3, 4)
    assert repr(observe(query, query + 0)) == "<Observation [batch=1, heads=2, query_len=3, key_len=3], 192.0 B>"
    assert repr(Recording()) == "<Recording: 0 layers>"
    page = recording._repr_html_()
    assert "<td>1</td><td>layers.1</td><td>6</td><td>11</td><td>11</td><td>Causal(offset=0)</td><td>1</td>" in page


# --- which layers, which heads, what of them --------------------------------------------------------------------------


def test_layers_are_chosen_by_name_or_by_number_and_found_by_either():
    model, tokens = spread(Decoder(config())), text()
    with record(model) as every:
        model(tokens)
    for layers, names in (
        (["layers.2", "layers.0"], ["layers.0", "layers.2"]),
        ([1], ["layers.1"]),
        ("layers.1", ["layers.1"]),
        (2, ["layers.2"]),
        ([0, "layers.1"], ["layers.0", "layers.1"]),
    ):
        with record(model, layers=layers) as recording:
            model(tokens)
        assert list(recording) == names
        for number, name in enumerate(names):
            assert torch.equal(recording[name].query, every[name].query)
            assert recording[number] is recording[name]
    assert every[-1] is every["layers.2"]
    for number in (3, -4):
        with pytest.raises(KeyError, match=rf"no layer {number}; recorded are: layers\.0, layers\.1, layers\.2"):
            every[number]
    for layers, wrong in ((["layers.3"], "layers.3"), ([3], "3"), (-1, "-1")):
        with (
            pytest.raises(ValueError, match=rf"record: no layer {wrong}; there are: layers\.0, layers\.1"),
            record(model, layers=layers),
        ):
            pass


def test_a_layer_that_was_asked_for_and_never_called_is_told():
    model = spread(EncoderDecoder(config(layers=2)))
    with (
        pytest.raises(ValueError, match=r"layer decoder\.layers\.1 never attended; those that did: encoder\.layers\.0"),
        record(model, layers=["decoder.layers.1"]),
    ):
        model.encoder(text())


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_chosen_heads_are_those_heads(kv_heads):
    parts = {"positions": "alibi", "kv_heads": kv_heads, "window": 5}
    model, tokens = spread(Decoder(config(**parts))), text()
    mask = Where(lambda batch, head, query, key: (query + key + head) % 5 != 1)
    with record(model, values=True) as every:
        model(tokens, mask=mask)
    with record(model, values=True, heads=[4, 1, 5, 4]) as recording:
        model(tokens, mask=mask)
    seen, whole = recording["layers.1"], every["layers.1"]
    assert seen.heads == (4, 1, 5)
    assert_close(seen.weights(), whole.weights()[:, [4, 1, 5]])
    for head in seen.heads:
        assert_close(seen.head(head).weights(), whole.head(head).weights())
        assert_close(seen.head(head).steps().output, whole.head(head).steps().output)
    with pytest.raises(ValueError, match="recording: no head 0; recorded are: 4, 1, 5"):
        seen.head(0)
    with pytest.raises(ValueError, match="recording: no head 6; recorded are: 0, 1, 2, 3, 4, 5"):
        whole.head(6)
    assert [(s.head, s.kind) for s in recording.summary()][3:6] == [
        (head, [s for s in every.summary() if s.layer == "layers.1"][head].kind) for head in (4, 1, 5)
    ]
    for heads in ([6], [-1], []):
        with (
            pytest.raises(ValueError, match=r"record: layers\.0 has heads 0 to 5, heads= was"),
            record(model, heads=heads),
        ):
            model(tokens)


def test_rows_and_heads_of_what_was_recorded_bring_their_values_tokens_and_numbers():
    model, tokens = spread(Decoder(config(kv_heads=2))), text()
    with record(model, values=True) as recording:
        model(tokens)
    seen = recording[1]
    for which, rows, heads in (
        (1, [1], [0, 1, 2, 3, 4, 5]),
        (-1, [1], [0, 1, 2, 3, 4, 5]),
        ((0, 4), [0], [4]),
        ((slice(None), slice(2, 5)), [0, 1], [2, 3, 4]),
        (slice(0, 2), [0, 1], [0, 1, 2, 3, 4, 5]),
    ):
        part = seen[which]
        assert isinstance(part, Recorded)
        assert part.heads == tuple(heads)
        assert torch.equal(part.tokens, tokens[rows])
        assert_close(part.weights(), seen.weights()[rows][:, heads])
        assert_close(part.steps().output, seen.steps().output[rows][:, heads])
        assert_close(part.head(heads[-1]).weights(), seen.weights()[rows][:, heads[-1:]])


def test_chosen_heads_have_their_sink_and_their_similarity():
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    for changes in ({"sink": True}, {"similarity": "additive", "kv_heads": 2}):
        layer = spread(MultiHeadAttention(24, 6, **changes))
        with record(layer) as every:
            layer(x)
        with record(layer, heads=[5, 2]) as recording:
            layer(x)
        assert_close(recording["attention"].weights(), every["attention"].weights()[:, [5, 2]])


def test_half_precision_is_kept_as_it_is_rounded_and_its_weights_still_sum_to_one():
    model, tokens = spread(Decoder(config())).float(), text()
    with record(model) as every:
        model(tokens)
    with record(model, values=True, dtype=torch.float16) as recording:
        model(tokens)
    seen = recording["layers.2"]
    assert seen.query.dtype == seen.key.dtype == seen.value.dtype == torch.float16
    assert torch.equal(seen.query, every["layers.2"].query.half())
    scores = seen.scores()  # what the last digit of a score is worth
    digit = torch.finfo(torch.float32).eps * float(scores[scores > -torch.inf].abs().max())
    assert_close(seen.weights().sum(-1), torch.ones(2, 6, LENGTH), tolerance=digit)
    assert_close(seen.weights(), observe(seen.query, seen.key, mask=Causal()).weights())
    with pytest.raises(TypeError, match="record: dtype must be floating"), record(model, dtype=torch.int8):
        pass


def test_numbers_that_half_precision_cannot_hold_are_refused():
    layer = MultiHeadAttention(24, 6)
    with torch.no_grad():
        layer.query.bias.fill_(1e5)
    with (
        pytest.raises(ValueError, match=r"attention has numbers that torch\.float16 cannot hold \(up to 65504\)"),
        record(layer, dtype=torch.float16),
    ):
        layer(torch.randn(1, 3, 24))
    with record(layer, dtype=torch.bfloat16) as recording:
        layer(torch.randn(1, 3, 24))
    assert recording["attention"].query.dtype == torch.bfloat16


def test_nothing_is_copied_that_nobody_writes_into():
    layer, given = MultiHeadAttention(24, 6), []
    with torch.no_grad(), record(layer, values=True) as recording, told(layer, given):
        layer(torch.randn(1, 3, 24))
    (kept,) = recording._texts["attention"]
    assert [t.data_ptr() for t in (kept.queries[0], kept.key, kept.value)] == [t.data_ptr() for t in given[0][0]]


# --- what is read -----------------------------------------------------------------------------------------------------


def test_the_tokens_are_those_that_each_part_of_the_model_read():
    model, tokens = spread(Decoder(config())), text()
    with record(model) as recording:
        model(tokens)
    assert torch.equal(recording.tokens, tokens)
    assert torch.equal(recording["layers.2"].tokens, tokens)
    assert torch.equal(recording["layers.2"].head(3).tokens, tokens)
    tokens += 1  # the recording has its own
    assert torch.equal(recording.tokens, tokens - 1)
    with record(model) as recording:
        model(tokens=tokens)
    assert torch.equal(recording.tokens, tokens)

    both, source, target = spread(EncoderDecoder(config(layers=1))), text(), text()
    with record(both) as recording:
        both(source, target)
    assert torch.equal(recording["encoder.layers.0"].tokens, source)
    assert torch.equal(recording["decoder.layers.0"].tokens, target)
    whole = nn.Sequential(nn.Embedding(VOCAB, 24), MultiHeadAttention(24, 6))
    with record(whole) as recording:
        whole(tokens)
    assert torch.equal(recording["1"].tokens, tokens)
    assert len(whole._forward_pre_hooks) == len(both.encoder._forward_pre_hooks) == 0


class TokensOrVectors(nn.Module):
    """Reads either, as models do that take `inputs_embeds`."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCAB, 24), MultiHeadAttention(24, 6)

    def forward(self, input_ids=None, vectors=None):
        return self.attention(self.embed(input_ids) if vectors is None else vectors)


def test_a_text_given_as_vectors_has_not_the_tokens_of_the_one_before():
    model, tokens = TokensOrVectors(), text()
    with record(model) as recording:
        model(tokens)
        model(vectors=torch.randn(2, LENGTH, 24))
    assert recording.tokens is None
    assert torch.equal(recording.calls(0)[0].tokens, tokens)


class Masked(nn.Module):
    """Reads tokens behind a mask of them, which has their shape."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(VOCAB, 24), MultiHeadAttention(24, 6)

    def forward(self, real, words):
        return self.attention(self.embed(words), mask=Padding(real))


def test_a_bool_tensor_is_a_mask_and_not_taken_for_tokens():
    model, tokens = Masked(), text()
    with record(model) as recording:
        model(tokens > 3, tokens)
    assert torch.equal(recording.tokens, tokens)


# --- a text in pieces -------------------------------------------------------------------------------------------------

PRESETS = [
    {},
    {"positions": "alibi", "kv_heads": 2, "window": 4},
    {"positions": "learned", "norm": "layer", "bias": True, "softcap": 1.5},
]


@pytest.mark.parametrize("parts", PRESETS, ids=str)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_text_read_in_pieces_is_one_text(parts, mode):
    model, tokens = spread(Decoder(config(**parts))), text()
    with record(model, values=True) as expected:
        model(tokens)
    cache = model.cache()
    with mode(), record(model, values=True) as recording:
        for piece in tokens.split([4, 1, 5, 1], dim=1):
            model(piece, cache=cache)
    assert torch.equal(recording.tokens, tokens)
    for name, whole in expected.items():
        seen = recording[name]
        assert seen.grid == whole.grid
        assert repr(seen.scoring.mask) == repr(whole.scoring.mask)
        for statistic in ("weights", "entropy", "received"):
            assert_close(getattr(seen, statistic)(), getattr(whole, statistic)(), statistic)
        assert_close(seen.steps()["weigh"].tensor, whole.steps()["weigh"].tensor)
        start = 0
        for call, (query_len, key_len) in zip(recording.calls(name), [(4, 4), (1, 5), (5, 10), (1, 11)], strict=True):
            assert call.grid[2:4] == (query_len, key_len)
            assert_close(call.weights(), whole.weights()[:, :, start : start + query_len, :key_len])
            assert torch.equal(call.tokens, tokens[:, start : start + query_len])
            start += query_len
    assert_close(recording.summary()[7].entropy * torch.ones(1), expected.summary()[7].entropy * torch.ones(1))


def test_generation_is_recorded_as_one_text_with_its_tokens_and_its_keys_are_kept_once():
    model = spread(Decoder(config(positions="sinusoidal"))).float()
    with record(model) as recording:
        written = list(generate(model, [3, 1, 4], 7, temperature=0))
    tokens = torch.tensor([[3, 1, 4, *written[:-1]]])
    assert torch.equal(recording.tokens, tokens)
    assert len(recording.calls("layers.1")) == 7
    (text,) = recording._texts["layers.1"]
    assert text.past == []
    assert text.key.shape[2] == 9
    with record(model) as expected:
        model(tokens)
    assert_close(recording["layers.1"].weights(), expected["layers.1"].weights())


def test_other_texts_are_not_taken_for_the_rest_of_one():
    model, tokens = spread(Decoder(config(layers=1))), text()
    cache = model.cache()
    with record(model) as recording:
        model(tokens)
        model(tokens)  # once more, without a cache
        assert recording["layers.0"].grid[2:4] == (11, 11)
        model(tokens[:, :4], cache=cache)
        model(tokens[:, 4:6], cache=cache)
        assert recording["layers.0"].grid[2:4] == (6, 6)
        cache.reorder(torch.tensor([1, 0]))
        model(tokens[:, 6:8], cache=cache)
        assert recording["layers.0"].grid[2:4] == (2, 8)
        cache.crop(3)
        model(tokens[:, 8:9], cache=cache)
        assert recording["layers.0"].grid[2:4] == (1, 4)
    assert [call.grid[2:4] for call in recording.calls("layers.0")] == [(11, 11)] * 2 + [(4, 4), (2, 6), (2, 8), (1, 4)]
    with pytest.raises(KeyError, match=r"no layer 'layers\.1'"):
        recording.calls("layers.1")


def stacked(calls, attribute="weights"):
    """The weights of calls, each below the other, padded with zeros where a call had no key yet."""
    length = max(call.grid.key_len for call in calls)
    parts = [getattr(call, attribute)() for call in calls]
    return torch.cat([F.pad(part, (0, length - part.shape[-1])) for part in parts], dim=2)


@pytest.mark.parametrize("of", ["mask", "other masks", "bias", "bidirectional", "hidden"])
def test_rules_that_are_each_calls_own_stand_below_each_other(of):
    layer = spread(MultiHeadAttention(24, 6, mask=None if of == "bidirectional" else Causal()))
    x, cache = torch.randn(2, 9, 24, dtype=torch.float64), LayerCache()
    changes = [HideKey("attention", 2, key=1)] if of == "hidden" else []
    with torch.no_grad(), record(layer) as recording, intervene(layer, *changes):
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            real = torch.arange(stop).expand(2, -1) < torch.tensor([[9], [3]])
            mask = Padding(real) if of == "mask" else Window(start + 1) if of == "other masks" else None
            bias = torch.randn(6, stop - start, stop) if of == "bias" and start != 4 else None
            layer(x[:, start:stop], cache=cache, mask=mask, bias=bias)
    seen, calls = recording["attention"], recording.calls("attention")
    assert len(calls) == 3
    assert isinstance(seen.scoring.mask, PiecesMask)
    assert_close(seen.weights(), stacked(calls))
    assert_close(seen.head(2).weights(), stacked([call.head(2) for call in calls]))
    assert_close(seen.entropy()[:, :, 4:5], calls[1].entropy())


pieces_of = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.data(), pieces_of)
def test_masks_below_each_other_answer_for_every_rectangle(data, steps):
    masks, says, lengths, rows = [], [], [], 0
    for query_len, gone in steps:
        first = (lengths[-1][1] if lengths else 0) + min(gone, 2)
        key_len = gone + query_len
        ruled = data.draw(st.none() | composed_masks(Grid(2, 3, query_len, key_len)))
        masks.append(None if ruled is None else ruled.mask)
        cells = torch.ones(2, 3, query_len, key_len, dtype=torch.bool)
        says.append(cells if ruled is None else ruled.cells(Grid(2, 3, query_len, key_len)))
        lengths.append((query_len, first, key_len))
        rows += query_len
    columns = max(first + key_len for _, first, key_len in lengths)
    whole = torch.cat(
        [
            F.pad(cells, (first, columns - first - key_len))
            for cells, (_, first, key_len) in zip(says, lengths, strict=True)
        ],
        dim=2,
    )
    mask = PiecesMask(masks, lengths).bind(Grid(2, 3, rows, columns))
    assert_same_cells(mask.allowed(range(rows), range(columns)).expand(2, 3, -1, -1), whole)
    some_rows, some_columns = torch.randint(rows, (7,)), torch.randint(columns, (5,))
    assert_same_cells(mask.allowed(some_rows, some_columns), whole[:, :, some_rows][..., some_columns])
    for row in range(2):
        of_row = mask.for_batch(row).bind(Grid(1, 3, rows, columns)) if mask.varies_by_batch else mask
        expected = whole[row : row + 1] if mask.varies_by_batch else whole
        assert_same_cells(of_row.allowed(range(rows), range(columns)), expected)
    a, b = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    c, d = sorted(data.draw(st.tuples(st.integers(0, columns), st.integers(0, columns))))
    tile, inside = mask.tile(range(a, b), range(c, d)), whole[:, :, a:b, c:d]
    if tile is Tile.EMPTY:
        assert not inside.any()
    if tile is Tile.FULL:
        assert inside.all()
    if all(m is None for m in masks) and inside.numel():
        assert tile is (Tile.FULL if inside.all() else Tile.PARTIAL if inside.any() else Tile.EMPTY)


# --- models of others -------------------------------------------------------------------------------------------------


class ForeignAttention(nn.Module):
    """An attention layer that attends as a module of transformers does, through regard."""

    def __init__(self, heads=4, kv_heads=2, head_dim=3, *, cache=None):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.project = nn.Linear(12, (heads + 2 * kv_heads) * head_dim)
        self.output = nn.Linear(heads * head_dim, 12)
        self.kind, self.seen = cache, 0

    def forward(self, x):
        parts = self.project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        mask = Causal()
        if self.kind == "static":
            if self.seen == 0:
                self.keys, self.values = k.new_zeros(2, *k.shape[:2], 10, self.head_dim)
            place = torch.arange(self.seen, self.seen + x.shape[1])
            k, v = self.keys.index_copy_(2, place, k), self.values.index_copy_(2, place, v)
            mask = Causal(offset=self.seen)
        elif self.kind == "rolling":  # as long as the window, but for the first call
            if self.seen:
                k, v = (torch.cat([old, new], dim=2) for old, new in ((self.keys, k), (self.values, v)))
            self.keys, self.values = k[:, :, -3:], v[:, :, -3:]
            mask = Causal() & Window(4)
        self.seen += x.shape[1]
        scoring = {"mask": mask, "bias": None, "scale": None, "softcap": None, "sink": None, "additive": None}
        attended = hooks.attend(self, Heads(q, k, v), scoring)
        return self.output(attended.transpose(1, 2).flatten(2))


class ForeignModel(nn.Module):
    def __init__(self, cache=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": ForeignAttention(cache=cache)}) for _ in range(3))

    def forward(self, input_ids=None, attention_mask=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block["attn"](x)
        return x


def test_a_foreign_model_is_recorded_by_the_names_of_its_modules():
    model, tokens = spread(ForeignModel()), text()
    plain = model(tokens)
    with record(model, values=True) as recording:
        assert torch.equal(model(attention_mask=torch.ones_like(tokens), input_ids=tokens), plain)
    assert list(recording) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert not hooks._active
    assert torch.equal(recording.tokens, tokens)
    assert recording.model == "ForeignModel"
    seen, layer = recording["blocks.0.attn"], model.blocks[0]["attn"]
    given = seen.steps()["weigh"].tensor.transpose(1, 2).flatten(2)
    assert_close(layer.output(given), layer(model.embed(tokens)))
    with record(model, layers=[1, "blocks.2.attn"]) as recording:
        model(tokens)
    assert list(recording) == ["blocks.1.attn", "blocks.2.attn"]
    alone = spread(ForeignAttention())
    with record(alone) as recording:
        alone(torch.randn(1, 3, 12, dtype=torch.float64))
    assert list(recording) == ["attention"]


def test_a_foreign_model_whose_attention_does_not_go_through_regard_is_told_how_to():
    model = ForeignModel()
    with pytest.raises(ValueError, match="no attention of ForeignModel went through regard"), record(model):
        pass
    assert not hooks._active
    with pytest.raises(ZeroDivisionError), record(model):
        raise ZeroDivisionError
    model.config = type("Config", (), {"_attn_implementation": "sdpa", "name_or_path": "some/model"})()
    with (
        pytest.raises(
            ValueError, match=r"record: ForeignModel uses attn_implementation='sdpa'.*attn_implementation=\"regard\""
        ),
        record(model),
    ):
        pass
    model.config._attn_implementation = "regard"
    with record(model) as recording:
        model(text())
    assert recording.model == "some/model"
    for layers, says in (
        (["blocks.7"], r"no layer blocks\.7; there are: the names of its modules"),
        (["blocks.1"], r"layer blocks\.1 never attended; those that did: blocks\.0\.attn, blocks\.1\.attn"),
        ([3], r"layer 3 never attended"),
    ):
        with pytest.raises(ValueError, match=says), record(model, layers=layers):
            model(text())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["static", "rolling"])
def test_caches_that_write_over_their_keys_or_let_go_of_them_are_recorded_as_one_text(kind, mode):
    model, tokens = spread(ForeignModel(cache=kind)), text(length=9)
    lengths = [4, 1, 2, 1, 1]
    with mode(), record(model, values=True) as recording:
        outputs = [model(piece) for piece in tokens.split(lengths, dim=1)]
        assert sum(call.grid.query_len for call in recording.calls(0)) == 9
        whole = spread(ForeignModel())
        for block, own in zip(model.blocks, whole.blocks, strict=True):
            own["attn"].load_state_dict(block["attn"].state_dict())
            if kind == "static":  # as a cache that is used again
                block["attn"].keys.fill_(7.0)
                block["attn"].values.fill_(7.0)
    seen = recording["blocks.1.attn"]
    assert seen.grid[2:4] == (9, 9)
    assert torch.equal(seen.tokens, tokens)
    mask = Causal() if kind == "static" else Causal() & Window(4)
    assert_close(seen.weights(), observe(seen.query, seen.key, mask=mask).weights())
    layer = model.blocks[0]["attn"]
    first = recording["blocks.0.attn"].steps()["weigh"].tensor.transpose(1, 2).flatten(2)
    embedded = model.embed(tokens)
    expected = torch.cat(outputs, dim=1)
    x = embedded + layer.output(first)
    for number in (1, 2):
        given = recording[number].steps()["weigh"].tensor.transpose(1, 2).flatten(2)
        x = x + model.blocks[number]["attn"].output(given)
    assert_close(x, expected.clone())
    calls = recording.calls("blocks.1.attn")
    assert [call.grid.query_len for call in calls] == lengths
    expected_keys = [10] * 5 if kind == "static" else [4, 4, 5, 4, 4]
    assert [call.grid.key_len for call in calls] == expected_keys
    start = 0
    for call, key_len in zip(calls, expected_keys, strict=True):
        stop = start + call.grid.query_len
        first = 0 if kind == "static" else stop - key_len
        cells = seen.weights()[:, :, start:stop, first : first + key_len]
        assert_close(call.weights()[..., : cells.shape[-1]], cells)
        start = stop
    assert len(recording._texts["blocks.1.attn"]) == 1


@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding"])
def test_a_model_of_transformers_is_recorded_while_it_generates(cache, tmp_path):
    transformers = pytest.importorskip("transformers")
    from regard import huggingface

    huggingface.register()
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "attn_implementation": "regard",
    }  # fmt: skip
    if cache == "sliding":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=4))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model, tokens = spread(model).eval(), text(length=7)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    with record(model, values=True) as recording:
        written = model.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0, **options)
    assert list(recording) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert torch.equal(recording.tokens, written[:, :-1])
    with record(model, values=True) as expected:
        model(written[:, :-1])
    for name, seen in recording.items():
        assert len(recording.calls(name)) == 5
        assert_close(seen.weights(), expected[name].weights())
        assert_close(seen.head(3).steps(query=9).output, expected[name].head(3).steps(query=9).output)
    recording.save(tmp_path / "run")
    assert_same_answers(recording, load_recording(tmp_path / "run"))
    attention = model.model.layers[1].self_attn
    with intervene(model, Ablate(1, 4)):
        changed = model(tokens).logits
    with torch.no_grad():
        attention.o_proj.weight[:, 16:20] = 0
    assert_close(changed, model(tokens).logits)
    allowed = torch.ones(2, 6, 7, 7, dtype=torch.bool)
    allowed[:, 4, :, 2] = False
    with around(
        attention, lambda heads, scoring, attend: attend(heads, {**scoring, "mask": scoring["mask"] & Dense(allowed)})
    ):
        hidden = model(tokens).logits
    with intervene(model, HideKey(1, 4, key=2)):
        assert_close(model(tokens).logits, hidden)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_the_steps_of_a_recorded_head_lead_to_what_it_gave():
    model, tokens = spread(Decoder(config(softcap=2.0, positions="alibi", kv_heads=2))).eval(), text()
    given = {}
    with record(model, values=True) as recording, ExitStack() as stack:
        for number, block in enumerate(model.layers):
            stack.enter_context(
                around(block.attention, lambda h, s, attend, n=number: given.setdefault(n, attend(h, s)))
            )
        model(tokens)
    for number, name in enumerate(recording):
        assert_close(recording[name].steps().output, given[number])
        shown = recording[name].head(3).steps(query=7)
        assert shown.names == ["query", "key", "value", "score", "scale", "cap", "bias", "mask", "softmax", "weigh"]
        assert_close(shown.output, given[number][:, 3:4, 7:8])
        assert_close(shown["softmax"].tensor, recording[name].weights()[:, 3:4, 7:8])
        assert_close(shown["score"].tensor[:, 0], shown["query"].tensor[:, 0] @ shown["key"].tensor[:, 0].mT)
        assert str(shown["key"]).startswith("key: as it came to attention\n  [batch=2, kv_heads=1, key_len=11, ")
    for query in (-1, 11):
        with pytest.raises(ValueError, match=f"steps: query must be 0 to 10, got {query}"):
            recording[0].steps(query=query)


def test_steps_without_values_say_how_to_have_them(monkeypatch):
    model = spread(Decoder(config()))
    with record(model) as recording:
        model(text())
    shown = recording[0].head(2).steps()
    assert shown.names == ["query", "key", "score", "scale", "mask", "softmax"]
    assert shown["softmax"].note.endswith("record(model, values=True) shows the output as well")
    monkeypatch.setattr(sys.modules["regard.stepwise"], "MAX_SHOWN_SCORES", 100)
    with pytest.raises(ValueError, match="242 scores are too many to show; give query=i"):
        recording[0].head(2).steps()
    assert recording[0].head(2).steps(query=3)["softmax"].tensor.shape == (2, 1, 1, 11)


# --- the file ---------------------------------------------------------------------------------------------------------


def answers(seen):
    """Everything that an observation can be asked, and what it says of itself."""
    numbers = [seen.weights(), seen.lse, seen.entropy(), seen.received(), seen.max_score(), seen.sink_mass()]
    numbers += [*seen.top(2), seen.distance(), *(step.tensor for step in seen.steps())]
    return numbers, seen.steps().names, seen.heads, seen.grid


def assert_same_answers(one, other):
    assert list(one) == list(other)
    assert one.model == other.model
    for name in one:
        pairs = [(one[name], other[name]), *zip(one.calls(name), other.calls(name), strict=True)]
        for mine, theirs in pairs:
            assert isinstance(theirs, Recorded)
            (numbers, *words), (others, *said) = answers(mine), answers(theirs)
            assert words == said
            for a, b in zip(numbers, others, strict=True):
                assert torch.equal(a, b)
            assert (mine.tokens is None) == (theirs.tokens is None)
            assert mine.tokens is None or torch.equal(mine.tokens, theirs.tokens)


def recorded(mask=None, bias=None, *, kinds=("one",), **scoring):
    """A recording of one call with these rules, made through the seam."""
    layer = ForeignAttention(HEADS, KV_HEADS)

    def call(heads):
        query, key, value = tensors()
        heads = Heads(query.detach(), key.detach(), value.detach())
        arguments = {
            "mask": mask,
            "bias": bias,
            "scale": None,
            "softcap": None,
            "sink": None,
            "additive": None,
        } | scoring
        hooks.attend(layer, heads, arguments)

    layer.forward = call
    with record(layer, values=True) as recording:
        layer(None)
    return recording


CALLS = {
    **{f"mask {name}": {"mask": ruled.mask} for name, ruled in fixed_masks().items()},
    **{f"bias {name}": {"bias": bias} for name, (bias, _) in biases().items()},
    "everything": {"softcap": 1.5, "scale": 0.3, "sink": torch.randn(HEADS), "mask": Causal(), "bias": Alibi(HEADS)},
    "additive": {"additive": Additive(torch.randn(HEADS, 5, dtype=torch.float64))},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_recording_answers_the_same_from_a_file(name, tmp_path):
    recording = recorded(**CALLS[name])
    recording.save(tmp_path / "run.safetensors")
    assert_same_answers(recording, load_recording(tmp_path / "run.safetensors"))


@pytest.mark.parametrize(
    "options", [{}, {"values": True}, {"heads": [4, 1]}, {"dtype": torch.float16, "values": True}], ids=str
)
def test_a_recorded_model_answers_the_same_from_a_file(options, tmp_path):
    model, tokens = spread(Decoder(config(positions="alibi", kv_heads=2))).float(), text()
    cache = model.cache()
    with record(model, **options) as recording, intervene(model, HideKey("layers.1", 4, key=2)):
        model(tokens, mask=Document.from_lengths([[4, 7], [11, 0]]))
        for piece in tokens.split([4, 1, 6], dim=1):
            model(piece, cache=cache)
    path = tmp_path / "new" / "run.safetensors"
    recording.save(path)
    loaded = load_recording(str(path))
    assert_same_answers(recording, loaded)
    assert loaded.summary() == recording.summary()
    loaded.save(path)  # over itself
    assert_same_answers(recording, loaded)
    assert_same_answers(recording, load_recording(path))
    assert [p.name for p in path.parent.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("kind", ["static", "rolling"])
def test_a_foreign_model_answers_the_same_from_a_file(kind, tmp_path):
    model = spread(ForeignModel(cache=kind))
    with torch.no_grad(), record(model, values=True) as recording:
        for piece in text(length=9).split([4, 1, 2, 1, 1], dim=1):
            model(piece)
    recording.save(tmp_path / "run")
    assert_same_answers(recording, load_recording(tmp_path / "run"))


def test_the_numbers_stay_in_the_file_until_they_are_asked_for(tmp_path):
    layer = MultiHeadAttention(64, 1, projection_bias=False)
    with torch.no_grad(), record(layer, values=True) as recording:
        layer(torch.randn(1, 100_000, 64), mask=Causal() & Window(2))
    seen = recording["attention"]
    seen.call = replace(seen.call, lse=torch.zeros(1, 1, 100_000))
    recording.save(tmp_path / "run.safetensors")
    script = (
        "import sys, regard.recording\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = size()\n"
        "seen = regard.recording.load_recording(sys.argv[1])['attention']\n"
        "seen.weights(queries=range(5, 9), keys=range(9))\n"
        "print(size() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run.safetensors")], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "run.safetensors").stat().st_size > 75e6
    assert int(run.stdout) < 30e6


def test_a_file_whose_tensors_begin_anywhere_answers_the_same(tmp_path):
    model = spread(Decoder(config())).float()
    with record(model, values=True) as recording:
        model(text())
    recording.save(tmp_path / "run")
    metadata = {"format": FORMAT, "recording": read_header(tmp_path / "run")}
    for surplus in range(0, 64, 8):
        save_file(load_file(tmp_path / "run"), tmp_path / "moved", metadata | {"surplus": "." * surplus})
        assert_same_answers(recording, load_recording(tmp_path / "moved"))


def test_a_tensor_that_layers_share_is_written_once_and_no_code_is(tmp_path):
    model, tokens = spread(Decoder(config())), text()
    with record(model) as recording:
        model(tokens, mask=Document.from_lengths([[4, 7], [11, 0]]))
    path = tmp_path / "run.safetensors"
    recording.save(path)
    tensors = load_file(path)
    assert sum(t.dtype == torch.int64 for t in tensors.values()) == 2  # the tokens, the documents
    assert len(tensors) == 2 + 3 * 3  # query, key, lse
    assert b"pickle" not in path.read_bytes()
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == 0  # so that tensors are used where they lie
    assert FORMAT.encode() in path.read_bytes()[:9000]


class Odd(Mask):
    """Of a function, so that no file can hold it."""

    def __init__(self, odd=lambda number: number % 2 == 1):
        self.odd = odd

    def rule(self, batch, head, query, key):
        return self.odd(query + key)

    def coverage(self, rows, columns):
        return Tile.PARTIAL


class Rising(Bias):
    def __init__(self, rise=lambda number: number / 7.0):
        self.rise = rise

    def rule(self, batch, head, query, key):
        return self.rise(query * key)


def test_a_rule_that_is_a_function_is_written_out_cell_by_cell_up_to_a_size(tmp_path, monkeypatch):
    by_head = Where(lambda batch, head, query, key: (query + key + head + batch) % 3 != 1)
    for rule in ({"mask": Causal() & ~Odd()}, {"mask": Prefix(4) | by_head}, {"bias": Rising()}):
        recording = recorded(**rule)
        recording.save(tmp_path / "run")
        loaded = load_recording(tmp_path / "run")
        assert torch.equal(loaded["attention"].weights(), recording["attention"].weights())
        assert torch.equal(loaded["attention"].lse, recording["attention"].lse)
    monkeypatch.setattr(sys.modules["regard.recording.file"], "MAX_WRITTEN_SCORES", QUERY_LEN * KEY_LEN)
    recorded(Odd()).save(tmp_path / "run")
    before = (tmp_path / "run").read_bytes()
    says = r"attention: Where\(<lambda>\) is a function, which no file can hold, and has 924 cells.*Causal\(\), Window"
    with pytest.raises(ValueError, match=says):
        recorded(by_head).save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_an_empty_recording_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="nothing to write; has the model run"):
        Recording().save(tmp_path / "run")


def test_a_file_that_is_no_recording_is_refused_with_a_hint(tmp_path):
    with pytest.raises(ValueError, match=r"none\.safetensors: there is no such file"):
        load_recording(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="not a recording, or only a part of one"):
        load_recording(tmp_path)
    path = tmp_path / "run.safetensors"
    for content in (b"", b"hello", b"PK\x03\x04" * 100, b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run\.safetensors: not a recording, or only a part of one"):
            load_recording(path)
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"no recording of regard \(format '', expected 'regard\.recording\.1'\)"):
        load_recording(path)
    save_file({"weight": torch.zeros(3)}, path, {"format": "regard.recording.2"})
    with pytest.raises(ValueError, match=r"another version of regard \('regard\.recording\.2'"):
        load_recording(path)
    for header in ("", "[]", "{}", '{"model": "", "layers": {"a": [{}]}}', '{"model": "", "layers": []}', "[" * 5000):
        save_file({"weight": torch.zeros(3)}, path, {"format": FORMAT, "recording": header})
        with pytest.raises(ValueError, match=r"run\.safetensors: a damaged recording"):
            load_recording(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    recording = recorded(Causal() & Chunk(3), torch.randn(KEY_LEN))
    recording.save(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    for end in range(0, len(whole), 97):
        (tmp_path / "part").write_bytes(whole[:end])
        with pytest.raises(ValueError, match="part: not a recording, or only a part of one"):
            load_recording(tmp_path / "part")


def test_a_header_that_does_not_fit_the_tensors_is_refused_with_the_files_name(tmp_path):
    recording = recorded(Causal() & Padding([11, 6]), Alibi(HEADS))
    recording.save(tmp_path / "run")
    tensors = load_file(tmp_path / "run")
    header = json.dumps(json.loads(read_header(tmp_path / "run")))

    def broken(change):
        data = json.loads(header)
        (text,) = data["layers"]["attention"]
        change(text)
        save_file(tensors, tmp_path / "broken", {"format": FORMAT, "recording": json.dumps(data)})
        with pytest.raises(ValueError, match="broken: a damaged recording"):
            load_recording(tmp_path / "broken")

    piece = lambda text: text["pieces"][0]  # noqa: E731
    broken(lambda text: text.pop("query"))
    broken(lambda text: text.update(query="77"))
    broken(lambda text: text.update(key=text["lse"]))
    broken(lambda text: text.update(lse=text["key"]))
    broken(lambda text: text.update(value=text["lse"]))
    broken(lambda text: text.update(scale="x"))
    broken(lambda text: text.update(sink=text["query"]))
    broken(lambda text: text.update(heads=[1]))
    broken(lambda text: text.update(pieces=[]))
    broken(lambda text: piece(text).update(query_len=3))
    broken(lambda text: piece(text).update(key_len=3))
    broken(lambda text: piece(text).update(first=2))
    broken(lambda text: piece(text).update(tokens=text["query"]))
    broken(lambda text: piece(text)["mask"].update(kind="System"))
    broken(lambda text: piece(text)["mask"].update(left=5))
    broken(lambda text: piece(text)["mask"]["left"].update(offset="x"))
    broken(lambda text: piece(text)["mask"]["left"].update(surplus=1))
    broken(lambda text: piece(text).update(mask=piece(text)["bias"]))
    broken(lambda text: piece(text).update(bias=piece(text)["mask"]))


def read_header(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()["recording"]


# --- changing a head --------------------------------------------------------------------------------------------------

MODELS = {
    "llama": lambda: Decoder(config(kv_heads=2)),
    "gpt2": lambda: Decoder(config(positions="learned", norm="layer", bias=True)),
    "bert": lambda: Encoder(config(positions="learned", norm="layer", norm_first=False, bias=True)),
    "windowed": lambda: Decoder(config(positions="alibi", window=4, softcap=2.0, kv_heads=3)),
}

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_an_ablated_head_is_one_whose_slice_of_the_output_projection_is_zero(name):
    model, tokens = spread(MODELS[name]()), text()
    plain = model(tokens)
    with intervene(model, Ablate("layers.1", 4), Ablate("layers.1", 0)):
        changed = model(tokens)
    assert not torch.allclose(changed, plain)
    assert torch.equal(model(tokens), plain)
    assert not hooks._active
    with torch.no_grad():
        for head in (4, 0):
            model.layers[1].attention.output.weight[:, 4 * head : 4 * head + 4] = 0
    assert_close(changed, model(tokens))


@every_model
def test_a_scaled_head_is_one_whose_slice_of_the_output_projection_is_scaled(name):
    model, tokens = spread(MODELS[name]()), text()
    with intervene(model, Scale(2, 3, 0.7)):  # a layer by its number
        changed = model(tokens)
    with torch.no_grad():
        model.layers[2].attention.output.weight[:, 12:16] *= 0.7
    assert_close(changed, model(tokens))


@every_model
def test_hiding_a_key_from_one_head_equals_a_dense_mask(name):
    model, tokens = spread(MODELS[name]()), text()
    plain = model(tokens)
    with intervene(model, HideKey("layers.0", 4, key=2), HideKey("layers.0", 4, key=5), HideKey("layers.0", 1, key=0)):
        changed = model(tokens)
    assert not torch.allclose(changed, plain)
    allowed = torch.ones(6, LENGTH, LENGTH, dtype=torch.bool)
    allowed[4, :, [2, 5]] = False
    allowed[1, :, 0] = False
    layer = model.layers[0].attention
    layer.mask = Dense(allowed) if layer.mask is None else layer.mask & Dense(allowed)
    assert_close(changed, model(tokens))


def test_a_replaced_head_gives_what_it_is_told_to():
    model, tokens, others = spread(Decoder(config(layers=1))), text(), text()
    outputs = {}

    def keep(output):
        outputs["kept"] = output.detach()
        return output

    with intervene(model, Replace("layers.0", 3, keep)):
        assert_close(model(others), model(others))
    for change, expected in (
        (Replace("layers.0", 3, outputs["kept"]), outputs["kept"]),
        (Replace("layers.0", 3, lambda output: output.mean(1, keepdim=True)), None),
        (Replace("layers.0", 3, torch.ones(4)), torch.ones(2, LENGTH, 4, dtype=torch.float64)),
    ):
        given = []
        with intervene(model, change):
            hook = model.layers[0].attention.output.register_forward_pre_hook(lambda m, x: given.append(x[0]))  # noqa: B023
            model(tokens)
            hook.remove()
        model(tokens)
        slice_of = given[0][..., 12:16]
        if expected is None:
            assert_close(slice_of, slice_of[:, :1].expand_as(slice_of))
        else:
            assert_close(slice_of, expected)
    for wrong in (torch.ones(5), torch.ones(2, 3, 2, LENGTH, 4)):
        with (
            pytest.raises(
                ShapeError, match=r"Replace: layer 'layers\.0', head 3: output must broadcast to .* \[2, 11, 4\]"
            ),
            intervene(model, Replace("layers.0", 3, wrong)),
        ):
            model(tokens)


def test_changes_of_one_head_are_made_in_order_and_outer_ones_first():
    model, tokens = spread(Decoder(config(layers=1))), text()
    told = []

    def say(name):
        return Replace("layers.0", 2, lambda output: (told.append(name), output)[1])

    with intervene(model, say("a"), say("b")), intervene(model, say("c")):
        model(tokens)
    assert told == ["a", "b", "c"]
    with intervene(model, Replace("layers.0", 2, torch.ones(4)), Scale("layers.0", 2, 3.0)):
        scaled = model(tokens)
    with intervene(model, Replace("layers.0", 2, torch.full((4,), 3.0))):
        assert_close(model(tokens), scaled)


@pytest.mark.parametrize("inside", [True, False])
def test_a_recording_has_what_attention_was_given_whichever_block_is_the_outer_one(inside):
    model, tokens = spread(Decoder(config())), text()
    changes = intervene(model, HideKey("layers.1", 4, key=2), Ablate("layers.0", 1))
    recording = record(model, values=True)
    if inside:
        with changes, recording as seen:
            logits = model(tokens)
    else:
        with recording as seen, changes:
            logits = model(tokens)
    assert not hooks._active
    assert_zero(seen["layers.1"].head(4).weights()[..., 2])
    assert float(seen["layers.1"].head(3).weights()[..., 2].sum()) > 0
    assert float(seen["layers.0"].head(1).steps().output.abs().sum()) > 0  # what attention gave, not what became of it
    with intervene(model, HideKey("layers.1", 4, key=2), Ablate("layers.0", 1)):
        assert torch.equal(model(tokens), logits)


def test_changes_reach_a_foreign_model_and_generation():
    model, tokens = spread(ForeignModel()), text()
    with intervene(model, Ablate("blocks.1.attn", 3)):
        changed = model(tokens)
    with torch.no_grad():
        model.blocks[1]["attn"].output.weight[:, 9:] = 0
    assert_close(changed, model(tokens))
    assert not hooks._active

    model, cache = spread(Decoder(config())), None
    with intervene(model, HideKey("layers.1", 4, key=6)):
        whole = model(tokens)
        cache = model.cache()
        pieces = [model(piece, cache=cache) for piece in tokens.split([5, 1, 5], dim=1)]
    assert_close(torch.cat(pieces, dim=1), whole)


def test_gradients_flow_through_changes():
    layer = spread(MultiHeadAttention(24, 6, output=False))
    x = torch.randn(1, 5, 24, dtype=torch.float64, requires_grad=True)
    with intervene(layer, Scale("attention", 1, 0.5), Ablate("attention", 2)):
        changed = layer(x)
    (grad,) = torch.autograd.grad(changed[..., 4:12].sum(), x)
    (expected,) = torch.autograd.grad(0.5 * layer(x)[..., 4:8].sum(), x)
    assert_close(grad, expected)


def test_changes_that_name_nothing_are_refused():
    model = spread(Decoder(config()))
    with (
        pytest.raises(ValueError, match=r"intervene: no layer layers\.3; there are: layers\.0, layers\.1, layers\.2"),
        intervene(model, Ablate("layers.3", 0)),
    ):
        pass
    for head in (6, -1):
        with (
            pytest.raises(ValueError, match=rf"intervene: layers\.0 has heads 0 to 5, got {head}"),
            intervene(model, Ablate("layers.0", head)),
        ):
            model(text())
    assert not hooks._active
    with (
        pytest.raises(TypeError, match="intervene: expected Ablate, Scale, Replace or HideKey, got tuple"),
        intervene(model, ("layers.0", 1)),
    ):
        pass
    for key in (-1, True, 1.5):
        with pytest.raises(ValueError, match="HideKey: key must be an index, 0 or more"):
            HideKey("layers.0", 0, key=key)


@settings(max_examples=60)
@given(st.integers(0, 2), st.integers(0, 8), st.integers(1, 3), st.integers(1, 7), st.data())
def test_a_hidden_key_answers_for_every_rectangle(head, key, heads, key_len, data):
    grid = Grid(2, heads, 5, key_len)
    mask = HiddenKey(head, key).bind(grid)
    ruled = Ruled(mask, lambda b, h, i, j, grid: not (h == head and j == key))
    assert_same_cells(mask.allowed(range(5), range(key_len)).expand(2, heads, -1, -1), ruled.cells(grid))
    a, b = sorted(data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True)))
    c, d = sorted(data.draw(st.lists(st.integers(0, key_len), min_size=2, max_size=2, unique=True)))
    cells = ruled.cells(grid, range(a, b), range(c, d))
    expected = Tile.FULL if cells.all() else Tile.PARTIAL if cells.any() else Tile.EMPTY
    assert mask.tile(range(a, b), range(c, d)) is expected


@settings(max_examples=40)
@given(st.data())
def test_a_mask_of_some_heads_is_those_heads_of_the_mask(data):
    ruled = data.draw(composed_masks(GRID))
    mask = HeadsMask(ruled.mask, [4, 1], HEADS).bind(GRID._replace(heads=2))
    cells = ruled.cells(GRID)[:, [4, 1]]
    rows, columns = range(QUERY_LEN), range(KEY_LEN)
    assert_same_cells(mask.allowed(rows, columns).expand(BATCH, 2, -1, -1), cells)
    tile = mask.tile(rows, columns)
    assert tile is Tile.PARTIAL or cells.all() == cells.any() == (tile is Tile.FULL)


# --- lse on the way -------------------------------------------------------------------------------------------------


def lse_kept(recording):
    ((text,),) = recording._texts.values()
    return text.lse


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(40), Padding([300, 130])], ids=repr)
@pytest.mark.parametrize("more", [{}, {"kv_heads": 2}, {"sink": True}, {"softcap": 2.0}], ids=str)
def test_lse_is_kept_where_the_kernel_has_it_and_changes_no_bit_of_the_output(tmp_path, mask, more):
    torch.manual_seed(0)
    layer = MultiHeadAttention(32, 4, mask=mask, **more).eval()
    x = torch.randn(2, 300, 32)
    with torch.no_grad():
        plain = layer(x)
        with record(layer) as recording, record(layer, heads=[3, 1]) as some:
            assert torch.equal(layer(x), plain)
    seen = recording["attention"]
    key = torch.zeros(2, more.get("kv_heads", 4), 300, 8)
    kernel = plan(torch.zeros(2, 4, 300, 8), key, key, **layer.scoring()).kernel
    by_strips = not isinstance(mask, Padding) and more != {"kv_heads": 2}  # the same numbers, to the bit, as torch's
    assert (lse_kept(recording) is None) == (kernel == "sdpa" and not by_strips)
    remade = observe(seen.query, seen.key, **layer.scoring()).lse
    assert_close(seen.lse, remade)
    assert_close(some["attention"].lse, remade[:, [3, 1]])
    assert_close(some["attention"].head(1).weights(), seen.head(1).weights())
    recording.save(tmp_path / "run.safetensors")
    assert torch.equal(load_recording(tmp_path / "run.safetensors")["attention"].lse, seen.lse)


def test_lse_is_not_kept_where_asking_would_change_the_call_or_its_numbers_are_rounded():
    layer, x = MultiHeadAttention(32, 4), torch.randn(1, 200, 32)

    def kept(layer, x, **more):
        with record(layer, **more) as recording:
            layer(x)
        return lse_kept(recording) is not None

    assert not kept(layer, x)  # it learns
    with torch.no_grad():
        assert kept(layer, x)
        assert not kept(layer, x, dtype=torch.float16)
        assert not kept(layer, x[:, :20])
        assert not kept(layer.bfloat16(), x.bfloat16())
        layer.float()
        with record(layer) as recording:
            cache = LayerCache()
            layer(x[:, :150], mask=Causal(), cache=cache)
            assert lse_kept(recording) is not None
            layer(x[:, 150:], mask=Causal(), cache=cache)
        assert lse_kept(recording) is None
        assert_close(recording["attention"].weights().sum(-1), torch.ones(1, 4, 200))

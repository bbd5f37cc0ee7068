"""What is shown is what the layer does: every number of the worked example, and the layer's own output at the end."""

import math
import re
import sys

import pytest
import torch
from torch import nn

from comparing import assert_close
from regard.biases import Alibi
from regard.feed_forward import ACTIVATIONS, FeedForward
from regard.layers import Block, MultiHeadAttention, make_norm
from regard.masks import Causal, Document, Padding, Window
from regard.positions import Rotary
from regard.shapes import ShapeError
from regard.stepwise import Step, Steps, format_number, numbers, steps, three_tokens

BATCH, LENGTH, CONTEXT, DIM, HEADS = 2, 7, 11, 24, 6


def spread(layer):
    """Weights that are not small, constants that are not zero."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    return layer


def attention(**changes):
    return spread(MultiHeadAttention(DIM, HEADS, **changes))


def feed_forward(activation="gelu", **changes):
    return spread(FeedForward(DIM, 17, activation=activation, **changes))


def block(attention, feed_forward, kind="layer", **changes):
    return spread(Block(attention, feed_forward, norm=lambda dim: make_norm(kind, dim), **changes))


def tokens(length=LENGTH):
    return torch.randn(BATCH, length, DIM)


# Whatever is dropped in training: it is not shown.
DROPPED = {"dropout": 0.3, "output_dropout": 0.3}

LAYERS = {
    "self-attention": lambda: attention(),
    "causal": lambda: attention(mask=Causal()),
    "without constants": lambda: attention(projection_bias=False),
    "sizes of its own": lambda: attention(key_dim=18, value_dim=30),
    "grouped heads": lambda: attention(kv_heads=2, mask=Causal()),
    "rotary": lambda: attention(rotary=Rotary(4), mask=Causal()),
    "rotary, grouped heads": lambda: attention(rotary=Rotary(4, layout="interleaved"), kv_heads=3),
    "softcap": lambda: attention(softcap=0.7),
    "scale": lambda: attention(scale=1.0),
    "bias": lambda: attention(bias=Alibi(HEADS), mask=Causal() & Window(3)),
    "sink": lambda: attention(sink=True, mask=Causal()),
    "additive": lambda: attention(similarity="additive", mask=Causal(), kv_heads=2),
    "no output": lambda: attention(output=False, value_dim=30),
    "dropout": lambda: attention(**DROPPED),
    **{f"feed-forward, {name}": lambda name=name: feed_forward(name, **DROPPED) for name in ACTIVATIONS},
    "feed-forward without constants": lambda: feed_forward("swiglu", bias=False),
    "pre-norm block": lambda: block(attention(mask=Causal(), **DROPPED), feed_forward("swiglu", **DROPPED), "rms"),
    "block with norms after its sublayers": lambda: block(
        attention(mask=Causal()), feed_forward("geglu_tanh"), "rms", output_norm=lambda dim: make_norm("rms", dim)
    ),
    "post-norm block": lambda: block(attention(sink=True), feed_forward("relu", **DROPPED), norm_first=False),
}  # fmt: skip

every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
def test_the_last_step_is_the_layers_own_output(name):
    layer, x = LAYERS[name](), tokens()
    assert layer.training
    shown = steps(layer, x)
    assert layer.training, "the mode is left as it was"
    assert_close(shown.output, layer.eval()(x))
    assert not any(step.tensor.requires_grad for step in shown)
    assert not steps(layer, x).output.requires_grad
    assert not layer.training


@every_layer
def test_a_single_query_is_a_row_of_the_whole(name):
    layer, x = LAYERS[name](), tokens()
    whole = steps(layer, x)
    for query in (0, 4, LENGTH - 1):
        one = steps(layer, x, query=query)
        assert one.names == whole.names
        for step, of_all in zip(one, whole, strict=True):
            assert step.axes == of_all.axes
            assert step.formula == of_all.formula
            for axis in ("query_len", "length"):
                if axis in step.axes:
                    of_all = of_all._replace(tensor=of_all.tensor.narrow(step.axes.index(axis), query, 1))
            assert_close(step.tensor, of_all.tensor, step.name)


@every_layer
def test_every_step_names_its_axes(name):
    sizes = {"batch": BATCH, "query_len": LENGTH, "key_len": LENGTH, "length": LENGTH, "dim": DIM, "hidden_dim": 17}
    sizes["heads"] = HEADS
    layer = LAYERS[name]()
    if name == "no output":
        sizes["dim"] = 30
    for step in steps(layer, tokens()):
        assert len(step.axes) == step.tensor.dim(), step.name
        for axis, size in zip(step.axes, step.tensor.shape, strict=True):
            assert sizes.get(axis, size) == size, f"{step.name}: {axis}"
        assert f"{step.name}: {step.formula}\n  [batch=2, " in str(step)


def test_cross_attention_shows_the_layers_own_output():
    layer = attention(key_input=5, value_input=3, mask=Window(2), bias=Alibi(HEADS))
    x, key, value = tokens(), torch.randn(BATCH, CONTEXT, 5), torch.randn(BATCH, CONTEXT, 3)
    padding, bias = Padding([11, 6]), torch.randn(LENGTH, CONTEXT)
    shown = steps(layer, x, key, value, mask=padding, bias=bias)
    assert_close(shown.output, layer(x, key, value, mask=padding, bias=bias))
    assert shown["mask"].tensor.shape == (BATCH, HEADS, LENGTH, CONTEXT)
    one = steps(layer, x, key, value, mask=padding, bias=bias, query=4)
    assert_close(one.output, shown.output[:, 4:5])
    layer = attention()
    assert_close(steps(layer, x, x).output, layer(x, x))


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_block_with_cross_attention_shows_its_own_output(norm_first):
    # masks by position, so that a query shown alone has to keep its place
    layer = block(
        attention(mask=Causal()), feed_forward(), cross=attention(mask=Window(4), kv_heads=2), norm_first=norm_first
    )
    x, context = tokens(), tokens(CONTEXT)
    masks = {"mask": Document.from_lengths([[3, 4], [7, 0]]), "context_mask": Padding([11, 6])}
    bias = torch.randn(HEADS, LENGTH, LENGTH)
    expected = layer(x, context=context, bias=bias, **masks)
    shown = steps(layer, x, context, bias=bias, **masks)
    assert_close(shown.output, expected)
    assert {"attention mask", "cross mask", "cross add", "feed-forward widen"} <= set(shown.names)
    for query in (0, 2, 6):
        one = steps(layer, x, context, bias=bias, query=query, **masks)
        assert_close(one.output, expected[:, query : query + 1])
        assert_close(one["cross softmax"].tensor, shown["cross softmax"].tensor[:, :, query : query + 1])


def test_what_hidden_tokens_hold_is_not_shown_in_what_others_get():
    layer, x = attention(), tokens()
    x[1, 4:] = math.nan
    shown = steps(layer, x, mask=Padding([7, 4]))
    for name in ("softmax", "weigh", "project output"):
        tensor = shown[name].tensor
        visible = tensor[1, :, :4] if tensor.dim() == 4 else tensor[1, :4]
        assert not visible.isnan().any(), name
    assert_close(shown.output[1, :4], layer(x, mask=Padding([7, 4]))[1, :4])


def test_half_precision_is_shown_as_it_is_computed():
    layer, x = attention(mask=Causal(), kv_heads=3).bfloat16(), tokens().bfloat16()
    shown = steps(layer, x)
    assert shown.output.dtype == torch.bfloat16
    assert shown["softmax"].tensor.dtype == torch.float32
    assert_close(shown.output, layer(x))


# --- names and formulas -----------------------------------------------------------------------------------------------


def test_the_steps_of_a_layer_that_has_everything():
    layer = attention(rotary=Rotary(4), bias=Alibi(HEADS), softcap=5.0, mask=Causal(), kv_heads=2, sink=True)
    shown = steps(layer, tokens())
    assert {step.name: step.formula for step in shown} == {
        "project query": "query_input @ W_query + b_query",
        "project key": "key_input @ W_key + b_key",
        "project value": "value_input @ W_value + b_value",
        "split query": "features into 6 heads of 4",
        "split key": "features into 2 kv_heads of 4",
        "split value": "features into 2 kv_heads of 4",
        "rotate query": "each pair of features turned by position * frequency",
        "rotate key": "each pair of features turned by position * frequency",
        "score": "query @ key^T",
        "scale": "scores * 0.5",
        "cap": "5 * tanh(scores / 5)",
        "bias": "scores + Alibi(6)",
        "mask": "-inf where not Causal(offset=0)",
        "softmax": "exp(scores) / sum over keys of exp(scores) and exp(sink)",
        "weigh": "weights @ value",
        "join": "heads side by side",
        "project output": "joined @ W_output + b_output",
    }
    assert shown.names == [step.name for step in shown]
    q, k, v = layer.project(tokens())
    assert shown["rotate query"].tensor.shape == q.shape
    assert shown["rotate key"].tensor.shape == k.shape
    assert shown["split value"].tensor.shape == v.shape


def test_every_step_follows_from_the_ones_before_it_by_its_formula():
    layer, x = attention(rotary=Rotary(4), mask=Causal(), softcap=5.0), tokens()
    s = {step.name: step.tensor for step in steps(layer, x)}
    for name in ("query", "key", "value"):
        linear = getattr(layer, name)
        assert_close(s[f"project {name}"], x @ linear.weight.T + linear.bias)
        parts = torch.stack(s[f"project {name}"].split(4, dim=-1), dim=1)
        assert_close(s[f"split {name}"], parts)
    assert_close(s["rotate key"], layer.rotary(s["split key"]))
    assert_close(s["score"], s["rotate query"] @ s["rotate key"].transpose(-2, -1))
    assert_close(s["scale"], s["score"] / 2)
    assert_close(s["cap"], 5 * torch.tanh(s["scale"] / 5))
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    assert_close(s["mask"], s["cap"].masked_fill(hidden, -math.inf))
    assert_close(s["softmax"], s["mask"].softmax(-1))
    assert_close(s["weigh"], s["softmax"] @ s["split value"])
    assert_close(s["join"], torch.cat(s["weigh"].unbind(1), dim=-1))
    assert_close(s["project output"], s["join"] @ layer.output.weight.T + layer.output.bias)


def test_the_steps_of_feed_forward_and_of_a_block():
    assert {s.name: s.formula for s in steps(feed_forward("relu"), tokens())} == {
        "widen": "x @ W_input + b_input",
        "activate": "relu(widened)",
        "narrow": "hidden @ W_output + b_output",
    }
    assert {s.name: s.formula for s in steps(feed_forward("swiglu", bias=False), tokens())} == {
        "widen": "x @ W_input",
        "gate": "silu(x @ W_gate)",
        "multiply": "gate * widened",
        "narrow": "hidden @ W_output",
    }
    pre = steps(block(attention(), feed_forward(), "rms"), tokens())
    assert (pre.names[0], pre[0].formula) == ("attention norm", "RMSNorm(x)")
    assert pre.names[-5:] == [
        "feed-forward norm", "feed-forward widen", "feed-forward activate", "feed-forward narrow", "feed-forward add",
    ]  # fmt: skip
    post = steps(block(attention(), feed_forward(), norm_first=False), tokens())
    assert post.names[0] == "attention project query"
    assert post.names[-2:] == ["feed-forward add", "feed-forward norm"]


def test_steps_are_a_sequence_with_names():
    shown = steps(attention(), tokens())
    assert isinstance(shown, Steps)
    assert isinstance(shown[0], Step)
    assert shown[-1].name == "project output"
    assert shown[3:5].names == ["split query", "split key"]
    assert isinstance(shown[3:5], Steps)
    assert len(shown) == len(list(shown)) == 12
    assert shown["softmax"].tensor is shown[shown.names.index("softmax")].tensor
    assert shown.output is shown[-1].tensor
    with pytest.raises(KeyError, match="no step 'mask'; there are: project query, project key"):
        shown["mask"]


# --- the worked example -----------------------------------------------------------------------------------------------

NUMBERS = {
    "project query": [[1, 0, 2], [2, 2, 2], [2, 1, 3]],
    "project key": [[0, 1, 1], [4, 4, 0], [2, 3, 1]],
    "project value": [[1, 2, 3], [2, 8, 0], [2, 6, 3]],
    "score": [[2, 4, 4], [4, 16, 12], [4, 12, 10]],
    "softmax": [
        [6.3379e-02, 4.6831e-01, 4.6831e-01], [6.0337e-06, 9.8201e-01, 1.7986e-02], [2.9539e-04, 8.8054e-01, 1.1917e-01]
    ],
    "weigh": [[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]],
    "join": [[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]],
}  # fmt: skip


def test_the_three_tokens_have_the_numbers_worked_by_hand():
    shown = steps(*three_tokens())
    for name, expected in NUMBERS.items():
        actual = shown[name].tensor.reshape(3, 3)
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=5e-5, atol=4e-5)
    softmax = torch.tensor(NUMBERS["softmax"])
    torch.testing.assert_close(shown["softmax"].tensor[0, 0], softmax, rtol=1e-4, atol=0)
    # one head, scale 1, no mask, no output projection: nothing else is done
    assert shown.names == [
        *(f"{what} {of}" for what in ("project", "split") for of in ("query", "key", "value")),
        "score", "softmax", "weigh", "join",
    ]  # fmt: skip


def test_the_printed_table_has_every_number_of_the_three_tokens():
    shown = steps(*three_tokens())
    printed = str(shown)
    blocks = dict(re.findall(r"^(\S.*?): .*\n  \[batch=1, .*\]\n((?:   .*\n?)+)", printed, re.MULTILINE))
    assert list(blocks) == shown.names
    for name, expected in NUMBERS.items():
        found = [float(number) for number in blocks[name].split()]
        assert found == pytest.approx([x for row in expected for x in row], rel=1e-3, abs=5e-5), name
    for number in ("0.063379", "6.0337e-06", "0.98201", "0.017986", "0.00029539", "6.6831", "7.964"):
        assert number in printed
    assert "query @ key^T" in printed
    assert str(shown["softmax"]) in printed


# --- printing numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (3.0, "3"), (-12.0, "-12"), (999999.0, "999999"), (1e6, "1.0000e+06"),
        (1e30, "1.0000e+30"), (0.5, "0.5"), (math.pi, "3.1416"), (-1234.567, "-1234.6"), (6.0337e-06, "6.0337e-06"),
        (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_numbers_have_five_digits_and_whole_ones_no_point(value, text):
    assert format_number(value) == text


def test_a_small_tensor_is_printed_whole_and_a_large_one_by_its_corner_and_range():
    assert numbers(torch.tensor([[1.0, 20.5], [-3.0, math.inf]])) == ["    1 20.5", "   -3  inf"]
    assert numbers(torch.arange(6.0).view(1, 3, 2)) == [" 0 1", " 2 3", " 4 5"]
    lines = numbers(torch.arange(12.0).view(1, 2, 3, 2))
    assert lines == ["(0, 0)", " 0 1", " 2 3", " 4 5", "(0, 1)", "  6  7", "  8  9", " 10 11"]
    lines = numbers(torch.arange(90.0).view(1, 9, 10))
    assert lines[0] == "  0  1  2  3  4  5  6  7 ..."
    assert lines[-2:] == [" ... 1 more rows", "90 numbers, 0 to 89"]
    assert len(lines) == 10
    lines = numbers(torch.arange(10.0).view(10, 1, 1))
    assert lines[-2:] == ["... 2 more", "10 numbers, 0 to 9"]
    assert lines[:2] == ["(0)", " 0"]
    masked = torch.full((1, 9, 2), -math.inf)
    assert numbers(masked)[-1] == " ... 1 more rows"
    masked[0, 0] = 2.5
    assert numbers(masked)[-1] == "18 numbers, 2.5 to 2.5"


# --- 6: saturation ----------------------------------------------------------------------------------------------------


def test_unscaled_normal_weights_are_shown_to_saturate_the_softmax_and_scaled_ones_are_not():
    unscaled = MultiHeadAttention(512, 8, scale=1.0, projection_bias=False)
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(unscaled, name).weight.normal_()
    x = torch.randn(1, 13, 512)
    note = steps(unscaled, x)["softmax"].note
    found = re.match(r"saturated: (\d+)% of the queries put more than 0\.999 .* \(largest score (\S+)\);", note)
    assert int(found[1]) > 90
    assert float(found[2]) > 1000
    assert f"  note: {note}" in str(steps(unscaled, x))
    assert not any(step.note for step in steps(MultiHeadAttention(512, 8), x))


def test_a_query_that_sees_one_key_is_not_called_saturated():
    x = tokens()
    for mask in (Window(1), Padding([1, 1]), Padding([0, 0])):
        assert steps(attention(), x, mask=mask)["softmax"].note == ""
    # queries that see one key do not count; of the others, half have to be saturated
    layer = MultiHeadAttention(DIM, 1, scale=1e6, mask=Causal())
    assert steps(layer, x)["softmax"].note.startswith("saturated: 100% of the queries")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_too_many_scores_to_show_are_refused_and_a_single_query_is_not(monkeypatch):
    monkeypatch.setattr(sys.modules["regard.stepwise"], "MAX_SHOWN_SCORES", BATCH * HEADS * LENGTH * LENGTH - 1)
    layer, x = attention(), tokens()
    with pytest.raises(ValueError, match="steps: 588 scores are too many to show; give query=i to see one token's"):
        steps(layer, x)
    assert steps(layer, x, query=3).output.shape == (BATCH, 1, DIM)


def test_what_cannot_be_shown_is_refused():
    x = tokens()
    with pytest.raises(TypeError, match="steps: expected MultiHeadAttention, FeedForward or Block, got Linear"):
        steps(nn.Linear(DIM, DIM), x)
    with pytest.raises(TypeError, match="steps: expected a FeedForward in the block, got Linear"):
        steps(Block(attention(), nn.Linear(DIM, DIM)), x)
    for query in (-1, 7):
        with pytest.raises(ValueError, match=f"steps: query must be 0 to 6, got {query}"):
            steps(attention(), x, query=query)
    with pytest.raises(ValueError, match="steps: this block has cross-attention; give its context as `key`"):
        steps(block(attention(), feed_forward(), cross=attention()), x)
    with pytest.raises(ValueError, match="steps: this block has no cross-attention; it takes no key"):
        steps(block(attention(), feed_forward()), x, x)
    with pytest.raises(ShapeError, match="MultiHeadAttention: query must have 24 features, got 23"):
        steps(attention(), x[..., :23])
    with pytest.raises(TypeError, match="steps: mask must be a regard mask"):
        steps(attention(), x, mask=torch.ones(7, 7).bool())

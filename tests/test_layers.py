"""The layers against their formulas, written out once more here, and against laws that hold for all of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard.scores
from cases import around, told
from comparing import assert_close, assert_zero
from naive import naive
from regard.biases import Alibi
from regard.feed_forward import ACTIVATIONS, GATED_ACTIVATIONS, FeedForward
from regard.functional import attention
from regard.layers import Block, MultiHeadAttention, TokenEmbedding, join, make_norm, split
from regard.masks import Causal, Document, Padding, Window
from regard.positions import Rotary
from regard.shapes import ShapeError

# A different prime for every axis; dim is no multiple of anything.
BATCH, LENGTH, CONTEXT, DIM, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 7, 11, 23, 6, 3, 5, 13


def layer_of(**changes):
    """A layer in float64 with constants that are not small, so that a forgotten one is noticed."""
    given = {"dim": DIM, "heads": HEADS, "key_dim": HEADS * HEAD_DIM, "value_dim": HEADS * VALUE_DIM} | changes
    layer = MultiHeadAttention(given.pop("dim"), given.pop("heads"), **given).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return layer


def tokens(length=LENGTH, dim=DIM, batch=BATCH):
    return torch.randn(batch, length, dim, dtype=torch.float64)


def by_hand(layer, query, key=None, value=None, **rest):
    """The layer's output, head by head, with its own weight matrices and the naive attention in plain Python."""
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = (F.linear(x, m.weight, m.bias) for x, m in ((query, layer.query), (key, layer.key), (value, layer.value)))

    D = layer.head_dim

    def head(x, h, size):
        return x[..., h * size : (h + 1) * size]

    outputs = []
    for h in range(layer.heads):
        kv = h // (layer.heads // layer.kv_heads)
        attended, _ = naive(
            *(head(x, at, size)[:, None] for x, at, size in ((q, h, D), (k, kv, D), (v, kv, layer.value_dim))),
            **{name: part(h) for name, part in rest.items()},
        )
        outputs.append(attended[:, 0])
    joined = torch.cat(outputs, dim=-1)
    return joined if layer.output is None else F.linear(joined, layer.output.weight, layer.output.bias)


# --- 1: self-attention by hand ----------------------------------------------------------------------------------------

X = torch.tensor([[[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]])
W_KEY = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
W_QUERY = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
W_VALUE = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])


def three_token_layer(dtype=torch.float32):
    layer = MultiHeadAttention(4, 1, key_dim=3, value_dim=3, output=False, projection_bias=False, scale=1.0).to(dtype)
    with torch.no_grad():
        for name, matrix in (("query", W_QUERY), ("key", W_KEY), ("value", W_VALUE)):
            getattr(layer, name).weight.copy_(matrix.T)
    return layer


def test_three_tokens_by_hand():
    layer = three_token_layer()
    query, key, value = layer.project(X)
    assert query[0, 0].tolist() == [[1, 0, 2], [2, 2, 2], [2, 1, 3]]
    assert key[0, 0].tolist() == [[0, 1, 1], [4, 4, 0], [2, 3, 1]]
    assert value[0, 0].tolist() == [[1, 2, 3], [2, 8, 0], [2, 6, 3]]
    expected = torch.tensor([[[1.9366, 6.6831, 1.5951], [2.0, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]]])
    assert_close(layer(X), expected, tolerance=1e-5)


def test_the_weights_that_are_usually_printed_for_the_three_tokens_are_rounded_and_give_other_numbers():
    value = three_token_layer().project(X).value[0, 0]
    rounded = torch.tensor([[0, 0.5, 0.5], [0, 1, 0], [0, 0.9, 0.1]])
    assert_close(rounded @ value, torch.tensor([[2, 7, 1.5], [2, 8, 0], [2, 7.8, 0.3]]))
    assert bool(((rounded @ value - three_token_layer()(X)[0]).abs().amax(-1) > 0.03).all())


# --- 2 and 3: one head and several, with sizes of their own -----------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 1, "key_dim": 5, "value_dim": 13},
        {"heads": 6, "key_dim": 30, "value_dim": 78},
        {"heads": 6, "key_dim": 30, "value_dim": 78, "output": False},
        {"heads": 6, "key_dim": 30, "value_dim": 78, "projection_bias": False},
        {"heads": 6, "key_dim": 30, "value_dim": 78, "projection_bias": False, "output_bias": True},
        {"heads": 6, "key_dim": 30, "value_dim": 78, "kv_heads": 3},
        {"heads": 6, "key_dim": 30, "value_dim": 78, "kv_heads": 1},
    ],
    ids=str,
)
def test_key_dim_and_value_dim_are_free(sizes):
    layer = layer_of(**sizes)
    x = tokens()
    assert_close(layer(x), by_hand(layer, x))
    constants = sizes.get("projection_bias", True)
    assert [part.bias is not None for part in (layer.query, layer.key, layer.value)] == [constants] * 3
    if layer.output is not None:
        assert (layer.output.bias is not None) == sizes.get("output_bias", constants)
    assert layer(x).shape[-1] == (sizes["value_dim"] if sizes.get("output") is False else DIM)


def test_sizes_that_are_not_given_follow_dim():
    layer = MultiHeadAttention(12, 3)
    assert (layer.head_dim, layer.value_dim, layer.kv_heads) == (4, 4, 3)
    assert [tuple(m.weight.shape) for m in (layer.query, layer.key, layer.value, layer.output)] == [(12, 12)] * 4
    layer = MultiHeadAttention(12, 3, key_dim=6, kv_heads=1, key_input=7)
    assert [tuple(m.weight.shape) for m in (layer.query, layer.key, layer.value, layer.output)] == [
        (6, 12), (2, 7), (2, 7), (12, 6),
    ]  # fmt: skip
    assert all(m.bias is not None for m in (layer.query, layer.key, layer.value, layer.output))


def test_the_scale_is_that_of_one_head_and_not_of_all_together():
    x = tokens()
    layer = layer_of()
    expected = layer(x)
    layer.scale = HEAD_DIM**-0.5
    assert_close(layer(x), expected)
    layer.scale = (HEADS * HEAD_DIM) ** -0.5
    assert bool(((layer(x) - expected).abs() > 0.01).any())


def test_a_scale_of_its_own_is_used():
    layer, x = layer_of(scale=0.3), tokens()
    assert_close(layer(x), by_hand(layer, x, scale=lambda h: 0.3))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_splitting_and_joining_moves_every_number_to_its_place_and_back(batch, heads, length, size):
    x = torch.arange(batch * length * heads * size).view(batch, length, heads * size)
    parts = split(x, heads)
    assert parts.shape == (batch, heads, length, size)
    expected = [
        [[[int(x[b, t, h * size + d]) for d in range(size)] for t in range(length)] for h in range(heads)]
        for b in range(batch)
    ]
    assert parts.tolist() == expected
    assert torch.equal(join(parts), x)


# --- attention is over tokens, and rows of a batch do not see each other ----------------------------------------------


def test_permuting_the_tokens_permutes_the_outputs():
    layer, x = layer_of(kv_heads=KV_HEADS), tokens()
    order = torch.randperm(LENGTH)
    assert_close(layer(x[:, order]), layer(x)[:, order])


def test_a_change_in_one_token_reaches_every_token_of_its_row_and_no_other_row():
    layer, x = layer_of(), tokens(batch=3)
    changed = x.clone()
    changed[1, 4] += 1.0
    moved = (layer(changed) - layer(x)).abs().amax(-1)
    assert_zero(moved[[0, 2]])
    assert bool((moved[1] > 1e-6).all())


def test_packed_documents_do_not_see_each_other():
    layer = layer_of(mask=Causal())
    one, other = tokens(3), tokens(4)
    packed = layer(torch.cat([one, other], dim=1), mask=Document.from_lengths([3, 4]))
    assert_close(packed, torch.cat([layer(one), layer(other)], dim=1))


# --- 4: causal --------------------------------------------------------------------------------------------------------


def test_a_causal_token_depends_on_itself_and_on_what_came_before():
    layer, x = layer_of(mask=Causal()), tokens()
    assert_close(layer(x), by_hand(layer, x, allowed=lambda h: lambda b, _, i, j: j <= i))
    changed = x.clone()
    changed[:, 4] += 1.0
    moved = (layer(changed) - layer(x)).abs().amax(-1)
    assert_zero(moved[:, :4])
    assert bool((moved[:, 4:] > 1e-6).all())


def test_no_buffer_is_kept_for_the_mask_at_any_context_length():
    layer = MultiHeadAttention(12, 3, mask=Causal(), context_length=1 << 20)
    assert not list(layer.buffers())
    assert sorted(layer.state_dict()) == sorted(
        f"{part}.{kind}" for part in ("query", "key", "value", "output") for kind in ("weight", "bias")
    )


def test_a_text_longer_than_the_context_is_refused():
    layer = MultiHeadAttention(DIM, 1, context_length=LENGTH)
    layer(torch.randn(1, LENGTH, DIM))
    with pytest.raises(ValueError, match="MultiHeadAttention: 8 tokens are more than context_length=7"):
        layer(torch.randn(1, LENGTH + 1, DIM))
    with pytest.raises(ValueError, match="8 tokens are more than context_length=7"):
        layer(torch.randn(1, 2, DIM), torch.randn(1, LENGTH + 1, DIM))


# --- 5: three inputs --------------------------------------------------------------------------------------------------


def test_query_key_and_value_may_be_three_inputs_of_three_sizes():
    layer = layer_of(key_input=17, value_input=19, kv_heads=KV_HEADS)
    query, key, value = tokens(), tokens(CONTEXT, 17), tokens(CONTEXT, 19)
    assert_close(layer(query, key, value), by_hand(layer, query, key, value))


def test_without_a_value_the_key_is_the_value_and_without_a_key_the_query_is_the_key():
    layer, x, context = layer_of(), tokens(), tokens(CONTEXT)
    assert_close(layer(x, context), layer(x, context, context))
    assert_close(layer(x), layer(x, x, x))
    value = tokens()
    assert_close(layer(x, None, value), layer(x, x, value))


def test_one_mask_is_for_all_heads_and_joins_the_layers_own():
    layer, x = layer_of(mask=Causal()), tokens()
    padding = Padding([7, 3])

    def allowed(b, _, i, j):
        return j <= i and j < (7, 3)[b]

    assert_close(layer(x, mask=padding), by_hand(layer, x, allowed=lambda h: allowed))


def test_what_padding_holds_reaches_nothing():
    layer, x = layer_of(), tokens()
    filled = x.clone()
    filled[1, 3:] = math.nan
    output = layer(filled, mask=Padding([7, 3]))
    assert_close(output[0], layer(x)[0])
    assert_close(output[1, :3], layer(x, mask=Padding([7, 3]))[1, :3])


def test_a_bias_of_the_call_joins_the_layers_own():
    layer, x = layer_of(bias=Alibi(HEADS)), tokens()
    extra = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    slopes = Alibi(HEADS).slopes.double()

    def bias(h):
        return lambda b, _, i, j: float(extra[h, i, j] - slopes[h] * abs(i - j))

    assert_close(layer(x, bias=extra), by_hand(layer, x, bias=bias))
    layer.bias = None
    assert_close(layer(x, bias=extra), by_hand(layer, x, bias=lambda h: lambda b, _, i, j: float(extra[h, i, j])))


def test_a_query_that_sees_nothing_gets_the_output_constant_alone_and_no_gradient():
    layer, x = layer_of(), tokens().requires_grad_()
    output = layer(x, mask=Padding([7, 0]))
    assert_close(output[1], layer.output.bias.expand(LENGTH, -1))
    output.sum().backward()
    assert_zero(x.grad[1])
    assert not any(p.grad.isnan().any() for p in layer.parameters())


# --- 6: a saturated softmax -------------------------------------------------------------------------------------------


def test_unscaled_normal_weights_make_scores_in_the_thousands_and_nothing_breaks():
    layer = MultiHeadAttention(512, 8, scale=1.0, projection_bias=False)
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(layer, name).weight.normal_()
    x = torch.randn(1, 5, 512, requires_grad=True)
    heads = layer.project(x)
    scores = heads.query @ heads.key.transpose(-2, -1)
    assert bool((scores.abs() > 1000).any())
    output = layer(x)
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad.isfinite().all()
    # each query takes the value of one key
    taken = heads.value.gather(2, scores.argmax(-1)[..., None].expand(-1, -1, -1, 64))
    sure = scores.softmax(-1).amax(-1) > 1 - 1e-6
    assert_close(layer.attend(heads)[sure], taken[sure], tolerance=1e-5)
    assert sure.float().mean() > 0.9


# --- 7: token embedding -----------------------------------------------------------------------------------------------


def test_the_row_of_padding_is_zero_and_gets_no_gradient():
    embedding = TokenEmbedding(11, 5, padding_id=3, scale=2.0)
    assert_zero(embedding(torch.tensor([[3, 3]])))
    embedding(torch.tensor([[3, 4]])).sum().backward()
    assert_zero(embedding.weight.grad[3])
    assert embedding.weight.grad[4].tolist() == [2.0] * 5


def test_vectors_are_drawn_from_the_standard_normal_distribution():
    weight = TokenEmbedding(401, 251).weight.detach()
    assert -0.01 < float(weight.mean()) < 0.01
    assert 0.99 < float(weight.std()) < 1.01


def test_the_scale_is_a_factor_on_the_vectors():
    embedding = TokenEmbedding(11, 4, scale=2.0)
    tokens = torch.tensor([[1, 2], [10, 0]])
    assert_close(embedding(tokens), 2 * embedding.weight[tokens])
    assert embedding(tokens.int()).shape == (2, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("frozen", [True, False])
def test_vectors_from_elsewhere_stay_as_they_are_or_are_tuned(frozen, dtype):
    vectors = torch.randn(11, 5, dtype=dtype)
    kept = vectors.clone()
    embedding = TokenEmbedding.from_vectors(vectors, frozen=frozen, padding_id=2)
    assert embedding.weight.dtype == dtype
    kept_but_padding = kept.clone()
    kept_but_padding[2] = 0
    assert_close(embedding.weight, kept_but_padding)
    assert embedding.weight.requires_grad is not frozen
    with torch.no_grad():
        embedding.weight += 1
    assert_close(vectors, kept, "the vectors that were given")


def test_a_token_that_is_not_in_the_vocabulary_is_named():
    embedding = TokenEmbedding(11, 5)
    for token in (11, -1):
        with pytest.raises(
            ValueError, match=f"TokenEmbedding: tokens must be 0 to 10, got {token}; is this the tokenizer"
        ):
            embedding(torch.tensor([[1, token, 4]]))
    with pytest.raises(TypeError, match=r"tokens must be int64 or int32, got torch\.float32"):
        embedding(torch.zeros(1, 2))
    with pytest.raises(ShapeError, match=r"tokens must have 2 axes \[batch, length\], got 1"):
        embedding(torch.tensor([1, 2]))
    assert embedding(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 5)


def test_an_embedding_that_cannot_be_is_refused():
    for padding_id in (-1, 11):
        with pytest.raises(ValueError, match=f"padding_id must be 0 to 10, got {padding_id}"):
            TokenEmbedding(11, 5, padding_id=padding_id)
    for vectors in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"vectors must be floating \[vocab_size, dim\], got"):
            TokenEmbedding.from_vectors(vectors, frozen=True)


# --- 8: rotary inside a layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_rotary_layer_turns_query_and_key_and_not_the_value(layout):
    layer = layer_of(key_dim=HEADS * 4, rotary=Rotary(4, layout=layout), kv_heads=KV_HEADS, mask=Causal())
    x = tokens()
    q, k, v = layer.project(x)
    plain = layer_of(key_dim=HEADS * 4, kv_heads=KV_HEADS)
    plain.load_state_dict(layer.state_dict())
    unturned = plain.project(x)
    frequencies = 10000.0 ** (-torch.arange(0, 4, 2, dtype=torch.float64) / 4)
    for turned, flat in ((q, unturned.query), (k, unturned.key)):
        # a pair of features is a complex number, and turning it a multiplication
        first, second = (flat[..., :2], flat[..., 2:]) if layout == "half" else (flat[..., ::2], flat[..., 1::2])
        angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies
        numbers = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        if layout == "half":
            expected = torch.cat([numbers.real, numbers.imag], dim=-1)
        else:
            expected = torch.view_as_real(numbers).flatten(-2)
        assert_close(turned, expected)
    assert_close(v, unturned.value)
    assert_close(layer(x), layer.join(attention(q, k, v, mask=Causal())))


# --- 9: feed-forward and block ----------------------------------------------------------------------------------------


def activations(x):
    return {
        "relu": x.clamp(min=0),
        "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "silu": x / (1 + torch.exp(-x)),
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_of_every_activation(activation, bias):
    layer = FeedForward(5, 11, activation=activation, bias=bias).double()
    assert (layer.input.bias is not None) == (layer.output.bias is not None) == bias
    x = tokens(dim=5)

    def map_(linear, given):
        return given @ linear.weight.T + (0 if linear.bias is None else linear.bias)

    if activation in GATED_ACTIVATIONS:
        hidden = activations(map_(layer.gate, x))[
            {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}[activation]
        ] * map_(layer.input, x)
    else:
        assert layer.gate is None
        hidden = activations(map_(layer.input, x))[activation]
    assert_close(layer(x), map_(layer.output, hidden))


def normalised(x, norm):
    if isinstance(norm, nn.LayerNorm):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + norm.eps).sqrt()
        return x * norm.weight + (0 if norm.bias is None else norm.bias)
    return x / ((x * x).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


@pytest.mark.parametrize("cross", [False, True], ids=["", "cross"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_block_adds_what_each_sublayer_says(kind, norm_first, cross):
    look = layer_of(key_input=17) if cross else None
    block = Block(
        layer_of(mask=Causal()),
        FeedForward(DIM, 11, activation="relu"),
        cross=look,
        norm=lambda dim: make_norm(kind, dim),
        norm_first=norm_first,
    ).double()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randn_like(parameter))
    x, context = tokens(), tokens(CONTEXT, 17) if cross else None
    sublayers = [(block.attention_norm, block.attention), (block.feed_forward_norm, block.feed_forward)]
    if cross:
        sublayers.insert(1, (block.cross_norm, lambda x: look(x, context, mask=Padding([11, 3]))))
    expected = x
    for norm, sublayer in sublayers:
        if norm_first:
            expected = expected + sublayer(normalised(expected, norm))
        else:
            expected = normalised(expected + sublayer(expected), norm)
    assert_close(block(x, context=context, context_mask=Padding([11, 3]) if cross else None), expected)


def test_a_block_hands_mask_and_bias_to_its_self_attention():
    block = Block(layer_of(), FeedForward(DIM, 11)).double()
    x, bias = tokens(), torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    given = []
    with told(block.attention, given):
        block(x, mask=Window(3), bias=bias)
    ((_, scoring),) = given
    assert repr(scoring["mask"]) == "Window(3)"
    assert scoring["bias"] is bias


def test_a_context_and_cross_attention_come_together():
    plain = Block(layer_of(), FeedForward(DIM, 11)).double()
    with pytest.raises(ValueError, match="a context was given, but this block has no cross-attention"):
        plain(tokens(), context=tokens())
    cross = Block(layer_of(), FeedForward(DIM, 11), cross=layer_of()).double()
    with pytest.raises(ValueError, match=r"needs a context \[batch, context_len, dim\]"):
        cross(tokens())


def test_norms_have_their_usual_eps():
    assert [make_norm("layer", 3).eps, make_norm("rms", 3).eps] == [1e-5, 1e-6]
    assert [make_norm(kind, 3, eps=1e-12).eps for kind in ("layer", "rms")] == [1e-12, 1e-12]
    assert make_norm("layer", 3, bias=False).bias is None
    with pytest.raises(ValueError, match="norm must be 'layer' or 'rms', got 'batch'"):
        make_norm("batch", 3)


# --- 10: additive attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [1 << 24, 100], ids=["at once", "in tiles"])
def test_additive_attention_is_v_dot_tanh_of_the_sum(cells, monkeypatch):
    monkeypatch.setattr(regard.scores.Additive, "CELLS", cells)
    layer = layer_of(similarity="additive", mask=Causal(), kv_heads=KV_HEADS)
    assert layer.similarity.shape == (HEADS, HEAD_DIM)
    x = tokens()

    def allowed(b, _, i, j):
        return j <= i and j < (7, 4)[b]

    expected = by_hand(layer, x, allowed=lambda h: allowed, v=lambda h: layer.similarity[h : h + 1].tolist())
    assert_close(layer(x, mask=Padding([7, 4])), expected)


@pytest.mark.parametrize("cells", [1 << 24, 20], ids=["at once", "in tiles"])
def test_additive_attention_has_the_gradients_of_its_formula(cells, monkeypatch):
    monkeypatch.setattr(regard.scores.Additive, "CELLS", cells)
    layer = layer_of(dim=3, heads=2, key_dim=4, value_dim=2, similarity="additive", mask=Causal())
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def output(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (tokens(4, 3, 1).requires_grad_(), *parameters))


# --- parts: grouped heads, softcap, sink, dropout ---------------------------------------------------------------------


def test_grouped_heads_are_heads_whose_keys_and_values_are_repeated():
    grouped, x = layer_of(kv_heads=KV_HEADS), tokens()
    whole = layer_of()
    weights = grouped.state_dict()
    for name, size in (("key", HEAD_DIM), ("value", VALUE_DIM)):
        for kind in ("weight", "bias"):
            parts = weights[f"{name}.{kind}"].unflatten(0, (KV_HEADS, size))
            weights[f"{name}.{kind}"] = parts.repeat_interleave(HEADS // KV_HEADS, 0).flatten(0, 1)
    whole.load_state_dict(weights)
    assert_close(grouped(x), whole(x))


def test_a_softcap_bounds_the_scores():
    layer, x = layer_of(softcap=0.7), tokens()
    assert_close(layer(x), by_hand(layer, x, softcap=lambda h: 0.7))


def test_a_sink_is_learned_one_for_each_head():
    layer, x = layer_of(sink=True), tokens()
    assert layer.sink.shape == (HEADS,)
    assert_close(layer(x), by_hand(layer, x, sink=lambda h: layer.sink[h : h + 1].tolist()))
    layer(x).sum().backward()
    assert bool((layer.sink.grad != 0).all())
    assert_zero(MultiHeadAttention(12, 3, sink=True).sink)


@pytest.mark.parametrize("rate", ["dropout", "output_dropout"])
def test_nothing_is_dropped_outside_training_and_in_training_it_is_reproducible(rate):
    x = tokens()
    layer = layer_of(**{rate: 0.5})
    plain = layer_of()
    plain.load_state_dict(layer.state_dict())
    layer.eval()
    assert_close(layer(x), plain(x))
    layer.train()
    torch.manual_seed(5)
    first = layer(x)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    assert bool(((first - plain(x)).abs() > 0.1).any())


def test_output_dropout_is_on_the_output_and_dropout_on_the_weights():
    x = tokens()
    layer = layer_of(output_dropout=0.5)
    output = layer(x)
    assert 0.3 < float((output == 0).double().mean()) < 0.7
    kept = output != 0
    assert_close(output[kept], 2 * layer.eval()(x)[kept])
    assert bool((layer_of(dropout=0.5)(x) != 0).all())


def test_feed_forward_drops_the_middle_and_the_output_in_training_alone():
    x = tokens(dim=5)
    layer = FeedForward(5, 1001, activation="relu", output_dropout=0.5).double()
    output = layer(x)
    kept = output != 0
    assert 0.2 < float(kept.double().mean()) < 0.8
    assert_close(output[kept], 2 * layer.eval()(x)[kept])
    layer = FeedForward(5, 1001, activation="relu", dropout=0.5).double()
    assert bool((layer(x) != 0).all())
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_a_hook_sees_what_goes_into_attention():
    layer = layer_of(kv_heads=KV_HEADS, softcap=3.0, mask=Causal())
    given = []
    x = tokens()
    with told(layer, given):
        output = layer(x)
    assert torch.equal(output, layer(x))
    ((heads, scoring),) = given
    assert_close(layer.join(attention(*heads, **scoring)), output)
    assert [part.shape[1] for part in heads] == [HEADS, KV_HEADS, KV_HEADS]


def test_a_hook_may_answer_in_place_of_attention():
    layer, x = layer_of(mask=Causal()), tokens()
    with around(layer, lambda heads, scoring, attend: 2 * attend(heads, {**scoring, "mask": None})):
        assert_close(layer(x), layer.join(2 * attention(*layer.project(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_speaks_its_own_dtype(dtype):
    layer = layer_of(kv_heads=KV_HEADS, sink=True, softcap=5.0, mask=Causal()).to(dtype)
    x = tokens().to(dtype)
    assert layer(x).dtype == dtype
    assert_close(layer(x).double(), layer.double()(x.double()), tolerance=2e-5 if dtype == torch.float32 else 3e-2)


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG = {
    "heads that do not divide key_dim": ({"heads": 3, "dim": 16}, "heads must divide key_dim, got heads=3, key_dim=16"),
    "heads that do not divide value_dim": ({"value_dim": 7}, "heads must divide value_dim, got heads=4, value_dim=7"),
    "kv_heads that do not divide heads": ({"kv_heads": 3}, "kv_heads must divide heads, got kv_heads=3, heads=4"),
    "no heads": ({"heads": 0}, "heads must divide key_dim, got heads=0"),
    "no kv_heads": ({"kv_heads": 0}, "kv_heads must divide heads, got kv_heads=0"),
    "no key_dim": ({"key_dim": 0}, "heads must divide key_dim, got heads=4, key_dim=0"),
    "another similarity": ({"similarity": "cosine"}, "similarity must be 'product' or 'additive', got 'cosine'"),
    "dropout of 1": ({"dropout": 1.0}, r"dropout must be a probability in \[0, 1\), got 1.0"),
    "negative dropout": ({"output_dropout": -0.1}, r"output_dropout must be a probability in \[0, 1\), got -0.1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_cannot_be_is_refused(name):
    arguments, says = WRONG[name]
    given = {"dim": 16, "heads": 4} | arguments
    with pytest.raises(ValueError, match=f"MultiHeadAttention: {says}"):
        MultiHeadAttention(given.pop("dim"), given.pop("heads"), **given)


def test_inputs_that_do_not_fit_are_named_with_their_axes():
    layer = MultiHeadAttention(16, 4, key_input=5)
    x, context = torch.randn(2, 7, 16), torch.randn(2, 11, 5)
    for arguments, says in (
        ((x[0],), r"query must have 3 axes \[batch, query_len, dim\], got 2"),
        ((x,), r"key must have 5 features, got 16(?s:.*)query \[batch=2, query_len=7, dim=16\]"),
        ((x[..., :15], context), "query must have 16 features, got 15"),
        ((x, context, context[..., :4]), "value must have 5 features, got 4"),
        ((x, context[:1]), "query and key must have the same batch, got 2 and 1"),
        ((x, context, context[:, :3]), "key and value must have the same key_len, got 11 and 3"),
    ):
        with pytest.raises(ShapeError, match=f"MultiHeadAttention: {says}"):
            layer(*arguments)
    with pytest.raises(TypeError, match="query must be a tensor"):
        layer(x.tolist())


def test_an_activation_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match="activation must be one of relu, gelu, gelu_tanh, silu, swiglu, geglu, geglu_tanh, got 'tanh'"
    ):
        FeedForward(4, 8, activation="tanh")


def test_layers_print_what_makes_them():
    text = str(Block(MultiHeadAttention(16, 4, kv_heads=2, mask=Causal(), bias=Alibi(4)), FeedForward(16, 8)))
    for part in ("heads=4, kv_heads=2, mask=Causal(), bias=Alibi(4)", "activation='gelu'", "norm_first=True"):
        assert part in text

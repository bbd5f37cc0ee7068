"""Other libraries' weights in regard's layers: each layout against its authority, or its formula written out."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from comparing import assert_close, assert_zero
from regard.feed_forward import ACTIVATIONS, GATED_ACTIVATIONS
from regard.layers import Block, MultiHeadAttention
from regard.layouts import (
    ARCHITECTURES,
    LAYOUTS,
    LEFT_OUT,
    Architecture,
    Renamed,
    config_of,
    from_annotated,
    from_fused,
    from_gpt,
    from_heads,
    from_torch,
    from_transformers,
    torch_nn,
    transformers,
)
from regard.layouts import gpt as gpt_layout
from regard.layouts import layers as layer_layouts
from regard.layouts.renaming import STORED_MASK, SkipInit
from regard.masks import Causal, Dense, Padding
from regard.models import Decoder
from regard.shapes import ShapeError

# A different prime for every axis; dim = heads * head_dim.
BATCH, HEADS, HEAD_DIM, QUERY_LEN, KEY_LEN, KEY_INPUT, VALUE_INPUT, HIDDEN = 2, 3, 5, 7, 11, 13, 17, 19
DIM = HEADS * HEAD_DIM
VOCAB, CONTEXT, LAYERS = 23, 29, 2


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def drawn(module):
    """The module in float64 with every parameter drawn anew: torch begins constants at 0 and norms at 1."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5)
    return module


def weights_of(layer: MultiHeadAttention, *inputs: Tensor, **arguments) -> Tensor:
    """The weights of one call of an attention layer: [batch, heads, query_len, key_len]."""
    with regard.record(layer) as recording:
        layer(*inputs, **arguments)
    return recording["attention"].weights()


# --- by hand ------------------------------------------------------------------------------------------------------


def test_two_tokens_by_hand_in_each_layout_of_one_layer():
    # queries and keys are the tokens (1, 0) and (0, 1), so a score is 1/sqrt(2) on the diagonal and 0 beside it, and
    # the weights are 0.66976 and 0.33024; values are 1 and 3; the output doubles them and puts them second
    x, one = torch.eye(2)[None], torch.eye(2)
    value, output = torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    full = torch.tensor([[[0.0, 3.32096], [0.0, 4.67904]]])
    causal = torch.tensor([[[0.0, 2.0], [0.0, 4.67904]]])
    assert_close(from_heads(one[None], one[None], value[None], output)(x), full)
    linears = {"linears.0": one, "linears.1": one, "linears.2": value.T, "linears.3": output.T}
    assert_close(from_annotated({f"{k}.weight": v for k, v in linears.items()}, heads=1)(x), full)
    conv1d = {"c_attn.weight": torch.cat([one, one, value], 1), "c_proj.weight": output}
    assert_close(from_fused(conv1d, heads=1)(x), causal)
    assert_close(from_fused({name: tensor.T for name, tensor in conv1d.items()}, heads=1)(x), causal)


# --- torch.nn.MultiheadAttention ----------------------------------------------------------------------------------

TORCH_LAYERS = {
    "fused": {},
    "without constants": {"bias": False},
    "inputs of other sizes": {"kdim": KEY_INPUT, "vdim": VALUE_INPUT},
    "inputs of other sizes, without constants": {"kdim": KEY_INPUT, "vdim": VALUE_INPUT, "bias": False},
    "one input of another size": {"vdim": VALUE_INPUT},
    "a key and value of zeros": {"add_zero_attn": True},
}


@pytest.fixture(params=TORCH_LAYERS.values(), ids=TORCH_LAYERS)
def theirs(request) -> nn.MultiheadAttention:
    return drawn(nn.MultiheadAttention(DIM, HEADS, batch_first=True, **request.param)).eval()


def inputs_for(theirs: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    return draw(BATCH, QUERY_LEN, DIM), draw(BATCH, KEY_LEN, theirs.kdim), draw(BATCH, KEY_LEN, theirs.vdim)


def same_as_torch(theirs: nn.MultiheadAttention, inputs, arguments, masks) -> None:
    """Output and weights of torch's layer with `masks`, and of regard's with `arguments`."""
    ours = from_torch(theirs)
    output, weights = theirs(*inputs, need_weights=True, average_attn_weights=False, **masks)
    assert_close(ours(*inputs, **arguments), output, "output")
    seen = weights_of(ours, *inputs, **arguments)
    assert_close(seen, weights[..., : seen.shape[3]], "weights")  # without torch's column for the key of zeros


def test_the_layer_of_torch_agrees_in_output_and_weights(theirs):
    same_as_torch(theirs, inputs_for(theirs), {}, {})


def test_torchs_key_padding_mask_is_true_where_regards_padding_is_false(theirs):
    real = torch.arange(KEY_LEN) < torch.tensor([[4], [KEY_LEN]])
    same_as_torch(theirs, inputs_for(theirs), {"mask": Padding(real)}, {"key_padding_mask": ~real})
    same_as_torch(theirs, inputs_for(theirs), {"mask": Padding([4, KEY_LEN])}, {"key_padding_mask": ~real})


def test_torchs_attention_masks_are_dense_turned_round_or_a_bias(theirs):
    hidden = torch.rand(BATCH, HEADS, QUERY_LEN, KEY_LEN) < 0.4
    hidden[..., 0] = False  # torch has no answer for a row that sees nothing
    same_as_torch(theirs, inputs_for(theirs), {"mask": Dense(~hidden)}, {"attn_mask": hidden.flatten(0, 1)})
    added = draw(QUERY_LEN, KEY_LEN)
    same_as_torch(theirs, inputs_for(theirs), {"bias": added}, {"attn_mask": added})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
def test_torchs_layer_agrees_in_causal_self_attention(bias, zeros):
    theirs = drawn(nn.MultiheadAttention(DIM, HEADS, bias=bias, add_zero_attn=zeros, batch_first=True)).eval()
    x = draw(BATCH, QUERY_LEN, DIM)
    later = torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool).triu(1)
    same_as_torch(theirs, (x, x, x), {"mask": Causal()}, {"attn_mask": later})


def test_a_layer_that_was_length_first_becomes_batch_first(theirs):
    length_first = nn.MultiheadAttention(
        DIM,
        HEADS,
        kdim=theirs.kdim,
        vdim=theirs.vdim,
        bias=theirs.in_proj_bias is not None,
        add_zero_attn=theirs.add_zero_attn,
        dtype=torch.float64,
    ).eval()
    length_first.load_state_dict(theirs.state_dict())
    inputs = inputs_for(theirs)
    output, _ = length_first(*(x.transpose(0, 1) for x in inputs))
    assert_close(from_torch(length_first)(*inputs), output.transpose(0, 1))


def test_the_key_of_zeros_is_a_sink_that_takes_as_much_weight_and_stays_what_it_is():
    theirs = drawn(nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True, batch_first=True))
    ours, inputs = from_torch(theirs), inputs_for(theirs)
    assert_zero(ours.sink)
    assert not ours.sink.requires_grad
    assert all(p.requires_grad for name, p in ours.named_parameters() if name != "sink")
    _, weights = theirs(*inputs, average_attn_weights=False)
    with regard.record(ours) as recording:
        ours(*inputs)
    assert_close(recording["attention"].sink_mass(), weights[..., -1])


def test_a_learned_key_and_value_is_refused():
    with pytest.raises(ValueError, match="add_bias_kv is not in regard"):
        from_torch(nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True))


# --- torch.nn's Transformer layers --------------------------------------------------------------------------------

each_norm_first = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
each_activation = pytest.mark.parametrize(
    "activation",
    ["relu", "gelu", nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), torch.relu],
    ids=lambda one: getattr(one, "__name__", str(one)),
)


@each_norm_first
@each_activation
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_an_encoder_layer_of_torch_agrees(norm_first, activation, bias, eps):
    theirs = nn.TransformerEncoderLayer(
        DIM,
        HEADS,
        HIDDEN,
        activation=activation,
        layer_norm_eps=eps,
        batch_first=True,
        norm_first=norm_first,
        bias=bias,
    )
    theirs = drawn(theirs).eval()
    ours, x = from_torch(theirs), draw(BATCH, QUERY_LEN, DIM)
    assert type(ours) is Block
    assert_close(ours(x), theirs(x))
    later = torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool).triu(1)
    assert_close(ours(x, mask=Causal()), theirs(x, later))
    padded = torch.arange(QUERY_LEN) >= torch.tensor([[3], [QUERY_LEN]])
    assert_close(ours(x, mask=Padding([3, QUERY_LEN])), theirs(x, src_key_padding_mask=padded))


@each_norm_first
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_decoder_layer_of_torch_agrees(norm_first, bias, batch_first):
    theirs = nn.TransformerDecoderLayer(
        DIM, HEADS, HIDDEN, activation="gelu", batch_first=batch_first, norm_first=norm_first, bias=bias
    )
    theirs = drawn(theirs).eval()
    x, context = draw(BATCH, QUERY_LEN, DIM), draw(BATCH, KEY_LEN, DIM)
    padded = torch.arange(KEY_LEN) >= torch.tensor([[4], [KEY_LEN]])
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    expected = theirs(
        turn(x),
        turn(context),
        tgt_mask=torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool).triu(1),
        memory_key_padding_mask=padded,
    )
    ours = from_torch(theirs)(x, mask=Causal(), context=context, context_mask=Padding([4, KEY_LEN]))
    assert_close(ours, turn(expected))


def test_keys_of_zeros_inside_a_decoder_layer_become_sinks():
    theirs = drawn(nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, batch_first=True)).eval()
    theirs.self_attn.add_zero_attn = theirs.multihead_attn.add_zero_attn = True
    x, context = draw(BATCH, QUERY_LEN, DIM), draw(BATCH, KEY_LEN, DIM)
    assert_close(from_torch(theirs)(x, context=context), theirs(x, context))


def test_stacks_of_torch_become_lists_of_blocks_without_the_last_norm():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, batch_first=True)
    encoder = drawn(nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(DIM), enable_nested_tensor=False)).eval()
    layer = nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, batch_first=True)
    decoder = drawn(nn.TransformerDecoder(layer, 2)).eval()
    source, target = draw(BATCH, KEY_LEN, DIM), draw(BATCH, QUERY_LEN, DIM)
    states = source
    for block in from_torch(encoder):
        states = block(states)
    assert_close(encoder.norm(states), encoder(source))
    seen = target
    for block in from_torch(decoder):
        seen = block(seen, context=encoder(source))
    assert_close(seen, decoder(target, encoder(source)))


def test_every_dropout_of_a_torch_layer_comes_to_its_place_and_training_stays_training():
    theirs = nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, dropout=0.125)
    theirs.self_attn.dropout, theirs.multihead_attn.dropout, theirs.dropout.p = 0.25, 0.375, 0.5
    theirs.dropout1.p, theirs.dropout2.p, theirs.dropout3.p = 0.0625, 0.625, 0.75
    ours = from_torch(theirs)
    assert (ours.attention.dropout, ours.attention.output_dropout) == (0.25, 0.0625)
    assert (ours.cross.dropout, ours.cross.output_dropout) == (0.375, 0.625)
    assert (ours.feed_forward.dropout, ours.feed_forward.output_dropout) == (0.5, 0.75)
    assert from_torch(nn.TransformerEncoderLayer(DIM, HEADS, dropout=0.25)).feed_forward.output_dropout == 0.25
    assert ours.training
    assert not from_torch(theirs.eval()).training
    assert not from_torch(theirs.self_attn).training


def test_layers_of_torch_that_regard_does_not_have_are_refused():
    with pytest.raises(ValueError, match="activation must be relu, gelu or silu of torch, got"):
        from_torch(nn.TransformerEncoderLayer(DIM, HEADS, activation=torch.tanh))
    theirs = nn.TransformerEncoderLayer(DIM, HEADS)
    theirs.norm2.eps = 0.5
    with pytest.raises(ValueError, match=r"all norms of a layer must have one eps, got \[1e-05, 0.5\]"):
        from_torch(theirs)
    with pytest.raises(TypeError, match=r"from_torch: module must be an nn.MultiheadAttention, .* got Linear"):
        from_torch(nn.Linear(2, 2))


# --- what comes back ----------------------------------------------------------------------------------------------


def test_the_result_has_its_own_copies_and_can_be_trained():
    theirs = drawn(nn.MultiheadAttention(DIM, HEADS, batch_first=True))
    ours, x = from_torch(theirs), draw(BATCH, QUERY_LEN, DIM)
    before = ours(x)
    with torch.no_grad():
        theirs.in_proj_weight.zero_()
    assert_close(ours(x), before)
    before.sum().backward()
    assert all(p.grad is not None and p.is_contiguous() for p in ours.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_result_keeps_the_dtype(dtype):
    theirs = nn.TransformerEncoderLayer(DIM, HEADS, dtype=dtype)
    assert {p.dtype for p in from_torch(theirs).parameters()} == {dtype}
    assert {p.dtype for p in from_gpt(gpt_state(TinyGPT().to(dtype)), heads=HEADS).parameters()} == {dtype}


def test_filling_draws_no_random_numbers():
    state = gpt_state(TinyGPT())
    torch.manual_seed(1)
    first = torch.rand(3)
    torch.manual_seed(1)
    from_gpt(state, heads=HEADS)
    assert torch.equal(torch.rand(3), first)


def test_undrawn_parameters_stay_as_they_were():
    x = torch.zeros(3, 5)
    with SkipInit():
        for draw_into in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_):
            assert draw_into(x) is x
            assert_zero(x)
        assert nn.init.normal_(tensor=x) is x
        assert float(x.new_ones(2).sum()) == 2.0
    assert float(nn.init.normal_(x).abs().sum()) > 0


# --- fused: GPT-2, minGPT, nanoGPT --------------------------------------------------------------------------------


class Fused(nn.Module):
    """The layer of minGPT and nanoGPT with its saved mask: one map for query, key and value, one for the output."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(DIM, 3 * DIM, bias=bias)
        self.c_proj = nn.Linear(DIM, DIM, bias=bias)
        self.register_buffer("bias", torch.ones(CONTEXT, CONTEXT).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            query, key, value = (part.reshape(len(row), HEADS, HEAD_DIM) for part in self.c_attn(row).split(DIM, dim=1))
            tokens = []
            for t in range(len(row)):  # token t sees tokens 0 to t
                scores = torch.einsum("hd,jhd->hj", query[t], key[: t + 1]) / math.sqrt(HEAD_DIM)
                tokens.append(torch.einsum("hj,jhd->hd", scores.exp() / scores.exp().sum(1, True), value[: t + 1]))
            rows.append(torch.stack(tokens).flatten(1))
        return self.c_proj(torch.stack(rows))


def as_conv1d(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of `c_attn`, `c_proj` and `c_fc` turned, as GPT-2 of transformers stores them."""
    return {n: t.T if any(f"c_{p}.weight" in n for p in ("attn", "proj", "fc")) else t for n, t in state.items()}


def without_masks(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.dim() not in (0, 4)}


def with_all_masks(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older versions saved them: a mask of bools, and the number that stood for minus infinity."""
    found = [name for name, tensor in state.items() if tensor.dim() == 4]
    more = {name.removesuffix("bias") + "masked_bias": torch.tensor(-1e4) for name in found}
    return {name: tensor.bool() if name in found else tensor for name, tensor in state.items()} | more


each_way_to_lie = pytest.mark.parametrize("lie", [dict, as_conv1d], ids=["as Linear", "as Conv1D"])
each_mask = pytest.mark.parametrize("masks", [dict, without_masks, with_all_masks], ids=lambda f: f.__name__)


@each_way_to_lie
@each_mask
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "transformer.h.1.attn."])
def test_fused_layers_agree_with_their_formula(lie, masks, bias, prefix):
    theirs = drawn(Fused(bias))
    state = {prefix + name: tensor for name, tensor in masks(lie(theirs.state_dict())).items()}
    if prefix:  # a whole model, of which only this layer is read
        state |= {"transformer.h.0.attn.c_attn.weight": draw(2, 2), "transformer.wte.weight": draw(3, 3)}
    ours, x = from_fused(state, heads=HEADS, prefix=prefix), draw(BATCH, QUERY_LEN, DIM)
    assert repr(ours.mask) == "Causal()"
    assert_close(ours(x), theirs(x))


def test_a_fused_layer_is_causal_beyond_the_mask_that_was_saved():
    theirs = drawn(Fused())
    ours, x = from_fused(theirs.state_dict(), heads=HEADS), draw(1, CONTEXT + 2, DIM)
    assert_close(ours(x), theirs(x))


def test_a_fused_layer_with_constants_in_one_place_only():
    theirs = drawn(Fused())
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name != "c_proj.bias"}
    nn.init.zeros_(theirs.c_proj.bias)
    x = draw(BATCH, QUERY_LEN, DIM)
    assert_close(from_fused(state, heads=HEADS)(x), theirs(x))


def test_a_bias_that_is_no_mask_is_not_thrown_away():
    state = dict(drawn(Fused()).state_dict())
    state["bias"] = draw(DIM)
    with pytest.raises(ValueError, match=r"from_fused: these are not the tensors of .*\n  unexpected bias\n"):
        from_fused(state, heads=HEADS)


# --- four linear maps ---------------------------------------------------------------------------------------------


class Annotated(nn.Module):
    """Four linear maps in a list; scores where the mask is 0 count as minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        to_query, to_key, to_value, to_output = self.linears
        heads = []
        for head in range(HEADS):
            mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            scores = to_query(query)[..., mine] @ to_key(key)[..., mine].mT / math.sqrt(HEAD_DIM)
            heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ to_value(value)[..., mine])
        return to_output(torch.cat(heads, dim=-1))


def test_four_linear_maps_agree_with_their_formula_in_self_and_cross_attention():
    theirs = drawn(Annotated())
    ours = from_annotated(theirs.state_dict(), heads=HEADS)
    x, key, value = draw(BATCH, QUERY_LEN, DIM), draw(BATCH, KEY_LEN, DIM), draw(BATCH, KEY_LEN, DIM)
    mask = torch.rand(BATCH, QUERY_LEN, KEY_LEN) < 0.6
    mask[..., 2] = True
    assert_close(ours(x, key, value, mask=Dense(mask[:, None])), theirs(x, key, value, mask))
    causal = torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool).tril()
    assert_close(ours(x, mask=Causal()), theirs(x, x, x, causal))
    assert ours.mask is None


def test_four_linear_maps_inside_a_model_without_constants():
    theirs = drawn(Annotated())
    state = {f"encoder.layers.0.self_attn.{n}": t for n, t in theirs.state_dict().items() if n.endswith("weight")}
    for linear in theirs.linears:
        nn.init.zeros_(linear.bias)
    ours = from_annotated(state, heads=HEADS, prefix="encoder.layers.0.self_attn.")
    x = draw(BATCH, QUERY_LEN, DIM)
    assert_close(ours(x), theirs(x, x, x, torch.ones(QUERY_LEN, QUERY_LEN, dtype=torch.bool)))


# --- one matrix per head ------------------------------------------------------------------------------------------

VALUE_DIM = 2


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("constants", [(), ("value",), ("query", "key", "value"), ("query", "output")], ids=str)
def test_a_matrix_per_head_agrees_with_its_formula(kv_heads, constants):
    heads = 6
    query, key = draw(heads, DIM, HEAD_DIM), draw(kv_heads, KEY_INPUT, HEAD_DIM)
    value, output = draw(kv_heads, VALUE_INPUT, VALUE_DIM), draw(heads * VALUE_DIM, DIM)
    shapes = {"query": (heads, HEAD_DIM), "key": (kv_heads, HEAD_DIM), "value": (kv_heads, VALUE_DIM), "output": (DIM,)}
    given = {f"{name}_bias": draw(*shapes[name]) for name in constants}
    add = {name: given.get(f"{name}_bias", torch.zeros(shape)) for name, shape in shapes.items()}
    x, k, v = draw(BATCH, QUERY_LEN, DIM), draw(BATCH, KEY_LEN, KEY_INPUT), draw(BATCH, KEY_LEN, VALUE_INPUT)

    joined = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        q_h, k_h = x @ query[head] + add["query"][head], k @ key[group] + add["key"][group]
        weights = (q_h @ k_h.mT / math.sqrt(HEAD_DIM)).softmax(-1)
        joined.append(weights @ (v @ value[group] + add["value"][group]))
    expected = torch.cat(joined, -1) @ output + add["output"]

    assert_close(from_heads(query, key, value, output, **given)(x, k, v), expected)


def test_matrices_per_head_that_do_not_fit_are_refused_by_name():
    query, key, output = draw(6, DIM, 5), draw(3, DIM, 5), draw(30, DIM)
    with pytest.raises(ShapeError, match="query and key must have the same head_dim, got 5 and 7"):
        from_heads(query, draw(6, DIM, 7), key, output)
    with pytest.raises(ShapeError, match="kv_heads=4 must divide heads=6"):
        from_heads(query, draw(4, DIM, 5), draw(4, DIM, 5), output)
    with pytest.raises(ShapeError, match=r"output must have heads \* value_dim = 30 rows, got 15"):
        from_heads(query, key, key, draw(15, DIM))
    with pytest.raises(ShapeError, match="query and query_bias must have the same head_dim, got 5 and 4"):
        from_heads(query, key, key, output, query_bias=draw(6, 4))
    with pytest.raises(TypeError, match="output must be a tensor"):
        from_heads(query, key, key, None)


# --- whole models -------------------------------------------------------------------------------------------------


class TinyGPT(nn.Module):
    """GPT-2 as minGPT and nanoGPT write it: pre-norm, learned positions, and a head that may be tied."""

    def __init__(self, *, bias: bool = True, tied: bool = True, tanh: bool = True) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, DIM, bias=bias)

        def block() -> nn.ModuleDict:
            mlp = nn.ModuleDict({"c_fc": nn.Linear(DIM, HIDDEN, bias), "c_proj": nn.Linear(HIDDEN, DIM, bias)})
            return nn.ModuleDict({"ln_1": norm(), "attn": Fused(bias), "ln_2": norm(), "mlp": mlp})

        blocks = nn.ModuleList(block() for _ in range(LAYERS))
        parts = {"wte": nn.Embedding(VOCAB, DIM), "wpe": nn.Embedding(CONTEXT, DIM), "h": blocks, "ln_f": norm()}
        self.transformer, self.lm_head, self.tanh = nn.ModuleDict(parts), nn.Linear(DIM, VOCAB, bias=False), tanh
        drawn(self)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts.wte(tokens) + parts.wpe.weight[: tokens.shape[1]]
        for block in parts.h:
            x = x + block.attn(block.ln_1(x))
            hidden = block.mlp.c_fc(block.ln_2(x))
            if self.tanh:  # "NewGELU"
                hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
            else:
                hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            x = x + block.mlp.c_proj(hidden)
        return parts.ln_f(x) @ self.lm_head.weight.T


def gpt_state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def test_the_authority_of_these_tests_agrees_with_torchs_own_gelu():
    x = draw(11)
    new_gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert_close(new_gelu, F.gelu(x, approximate="tanh"))
    assert_close(x * (1 + torch.erf(x / math.sqrt(2))) / 2, F.gelu(x))


@each_way_to_lie
@each_mask
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("bias", "tanh"), [(True, True), (False, False)], ids=["minGPT", "nanoGPT without constants"])
def test_a_whole_gpt_agrees_with_its_formula(lie, masks, tied, bias, tanh):
    theirs = TinyGPT(bias=bias, tied=tied, tanh=tanh)
    ours = from_gpt(masks(lie(gpt_state(theirs))), heads=HEADS, activation="gelu_tanh" if tanh else "gelu")
    assert type(ours) is Decoder
    assert (ours.logits.weight is ours.embedding.weight) == tied == ours.config.tied
    tokens = torch.randint(VOCAB, (BATCH, QUERY_LEN))
    assert_close(ours(tokens), theirs(tokens))


@pytest.mark.parametrize("prefix", ["", "transformer.", "_orig_mod.transformer."])
def test_a_whole_gpt_may_be_the_inner_model_alone_or_a_compiled_one(prefix):
    theirs = TinyGPT()
    state = {prefix + n.removeprefix("transformer."): t for n, t in gpt_state(theirs).items() if n != "lm_head.weight"}
    tokens = torch.randint(VOCAB, (BATCH, QUERY_LEN))
    ours = from_gpt(state, heads=HEADS)
    assert ours.config.tied
    assert_close(ours(tokens), theirs(tokens))


def test_sizes_are_read_from_the_tensors_and_the_configuration_makes_the_same_model_again():
    ours = from_gpt(gpt_state(TinyGPT(bias=False)), heads=HEADS)
    config = ours.config
    assert (config.vocab_size, config.context_length, config.dim, config.layers) == (VOCAB, CONTEXT, DIM, LAYERS)
    assert (config.heads, config.hidden_dim, config.bias, config.positions) == (HEADS, HIDDEN, False, "learned")
    again = Decoder(regard.ModelConfig.from_dict(config.to_dict())).double()
    again.load_state_dict(ours.state_dict())
    tokens = torch.randint(VOCAB, (BATCH, QUERY_LEN))
    assert_close(again(tokens), ours(tokens))


def test_eleven_layers_are_eleven_and_in_their_order():
    names = [f"h.{n}.attn.c_attn.weight" for n in range(11)]
    renamed = Renamed("from_gpt", gpt_layout.GPT, {name: torch.full((3, 1), float(n)) for n, name in enumerate(names)})
    assert [float(renamed[f"layers.{n}.attention.value.weight"]) for n in range(11)] == list(range(11))


def test_the_cache_of_a_loaded_gpt_gives_the_same_logits():
    theirs = TinyGPT(tied=False)
    ours, tokens = from_gpt(gpt_state(theirs), heads=HEADS), torch.randint(VOCAB, (BATCH, QUERY_LEN))
    cache = ours.cache()
    with torch.no_grad():
        steps = [ours(tokens[:, t : t + 1], cache=cache) for t in range(QUERY_LEN)]
    assert_close(torch.cat(steps, 1), theirs(tokens))


# --- errors -------------------------------------------------------------------------------------------------------


def states() -> dict[str, dict[str, Tensor]]:
    return {
        "from_fused": dict(drawn(Fused()).state_dict()),
        "from_annotated": dict(drawn(Annotated()).state_dict()),
        "from_gpt": gpt_state(TinyGPT()),
    }


READERS = {"from_fused": from_fused, "from_annotated": from_annotated, "from_gpt": from_gpt}
FIRST_MISSING = {"from_fused": "c_attn.weight", "from_annotated": "linears.0.weight", "from_gpt": "wte.weight"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layout", READERS)
def test_a_state_dict_of_another_layout_is_told_what_it_lacks_what_it_has_and_what_there_is(reader, layout):
    state = states()[layout]
    if reader == layout:
        READERS[reader](state, heads=HEADS)
        return
    with pytest.raises(ValueError) as error:
        READERS[reader](state, heads=HEADS)
    lines = str(error.value).split("\n")
    assert lines[0].startswith(f"{reader}: these are not the tensors of ")
    assert lines[1] == f"  missing    {FIRST_MISSING[reader]}"
    shown = next(iter(state)).removeprefix("transformer.") if reader == "from_gpt" else next(iter(state))
    assert lines[2].startswith(f"  unexpected {shown}, ")
    assert all(any(line.split()[0] == function for line in lines[3:]) for function in LAYOUTS)


def test_missing_and_unexpected_names_are_theirs_and_only_the_first_few():
    state = gpt_state(TinyGPT())
    for name in [name for name in state if ".1.mlp." in name]:
        del state[name]
    del state["transformer.h.1.attn.c_attn.bias"]  # three of regard's names, one of theirs
    state |= {f"adapter.{n}": torch.zeros(1) for n in range(6)}
    with pytest.raises(ValueError) as error:
        from_gpt(state, heads=HEADS)
    assert str(error.value).split("\n")[1:3] == [
        "  missing    h.1.attn.c_attn.bias, h.1.mlp.c_fc.weight, h.1.mlp.c_fc.bias, h.1.mlp.c_proj.weight and 1 more",
        "  unexpected adapter.0, adapter.1, adapter.2, adapter.3 and 2 more",
    ]


def test_a_constant_in_one_block_only_is_unexpected():
    state = gpt_state(TinyGPT(bias=False)) | {"transformer.h.1.attn.c_attn.bias": draw(3 * DIM)}
    with pytest.raises(ValueError, match=r"\n  unexpected h.1.attn.c_attn.bias\n"):
        from_gpt(state, heads=HEADS)


def test_a_tensor_of_another_shape_is_named():
    state = gpt_state(TinyGPT())
    state["transformer.h.1.mlp.c_proj.weight"] = draw(DIM, HIDDEN + 1)
    with pytest.raises(ValueError, match=r"from_gpt: h.1.mlp.c_proj.weight must be \[15, 19\] as .*, got \[15, 20\]"):
        from_gpt(state, heads=HEADS)
    with pytest.raises(ValueError, match=r"from_fused: c_attn.weight must hold 3 equal parts .*, got \[16, 5\]"):
        from_fused({"c_attn.weight": draw(16, 5), "c_proj.weight": draw(5, 5)}, heads=1)


def test_quantised_tensors_are_refused():
    state = dict(drawn(Annotated()).state_dict())
    state["linears.1.weight"] = torch.ones(DIM, DIM, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"linears.1.weight must be floating point, got torch.int8"):
        from_annotated(state, heads=HEADS)


@pytest.mark.parametrize("heads", [2, 7, 0, -3])
def test_heads_that_do_not_divide_are_refused(heads):
    for name, read in READERS.items():
        with pytest.raises(ValueError, match=rf"heads must divide .*[ =]{heads}\b"):
            read(states()[name], heads=heads)


def test_a_model_that_is_not_in_the_list_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"regard has no model like Linear\n  hint: it has GPT2LMHeadModel, "):
        from_transformers(nn.Linear(2, 2))


# --- a layout of one's own ----------------------------------------------------------------------------------------

MINE = {
    "tok": "embedding.weight",
    "pos": "positions.weight",
    "layer.*.wqkv": "layers.*.attention.{query,key,value}.weight",
    "layer.*.wo": "layers.*.attention.output.weight",
    "layer.*.scale_a": "layers.*.attention_norm.weight",
    "layer.*.scale_f": "layers.*.feed_forward_norm.weight",
    "layer.*.up": "layers.*.feed_forward.input.weight",
    "layer.*.down": "layers.*.feed_forward.output.weight",
    "scale": "norm.weight",
    "steps_trained": LEFT_OUT,
}


def mine() -> dict[str, Tensor]:
    state = {"tok": draw(VOCAB, DIM), "pos": draw(CONTEXT, DIM), "scale": draw(DIM), "steps_trained": torch.tensor(3)}
    for n in range(LAYERS):
        shapes = {"wqkv": (3 * DIM, DIM), "wo": (DIM, DIM), "scale_a": (DIM,), "scale_f": (DIM,)}
        shapes |= {"up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
        state |= {f"layer.{n}.{name}": draw(*shape) for name, shape in shapes.items()}
    return state


def as_gpt(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers under nanoGPT's names."""
    names = {"tok": "wte.weight", "pos": "wpe.weight", "scale": "ln_f.weight", "layer.": "h."}
    names |= {".wqkv": ".attn.c_attn.weight", ".wo": ".attn.c_proj.weight", ".up": ".mlp.c_fc.weight"}
    names |= {".down": ".mlp.c_proj.weight", ".scale_a": ".ln_1.weight", ".scale_f": ".ln_2.weight"}
    renamed = {}
    for name, tensor in state.items():
        for mine, theirs in names.items():
            name = theirs if name == mine else name.replace(mine, theirs) if "." in mine else name
        renamed[name] = tensor
    del renamed["steps_trained"]
    return renamed


def test_a_layout_of_ones_own_is_a_table_and_reads_a_whole_model():
    state = mine()
    tensors = Renamed("from_mine", MINE, state)
    config = config_of(tensors, HEADS, positions="learned", norm="layer", activation="gelu_tanh")
    decoder = tensors.fill(lambda: Decoder(config))
    tokens = torch.randint(VOCAB, (BATCH, QUERY_LEN))
    assert_close(decoder(tokens), from_gpt(as_gpt(state), heads=HEADS)(tokens))


def test_a_layout_of_ones_own_says_what_is_missing_and_unexpected_by_its_own_names():
    state = mine()
    state["adapter"] = state.pop("layer.1.wqkv")
    tensors = Renamed("from_mine", MINE, state)
    config = config_of(tensors, HEADS, positions="learned", norm="layer", activation="gelu_tanh")
    with pytest.raises(ValueError) as error:
        tensors.fill(lambda: Decoder(replace(config, layers=LAYERS)))
    assert str(error.value).split("\n")[:3] == [
        "from_mine: these are not the tensors of its table",
        "  missing    layer.1.wqkv",
        "  unexpected adapter",
    ]


def test_a_model_class_of_ones_own_is_an_entry_of_the_table_of_architectures(monkeypatch):
    state = mine()

    class MineForCausalLM(nn.Module):
        config = SimpleNamespace(num_attention_heads=HEADS, num_hidden_layers=LAYERS, eps=1e-3)

        def state_dict(self):
            return {f"model.{name}": tensor for name, tensor in state.items()}

    def settings(config):
        return {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "norm_eps": config.eps}

    monkeypatch.setitem(ARCHITECTURES, "MineForCausalLM", Architecture(MINE, settings, prefixes=("model.",)))
    decoder = from_transformers(MineForCausalLM().eval())
    assert (decoder.config.norm_eps, decoder.training) == (1e-3, False)
    assert torch.equal(decoder.layers[1].attention.value.weight, state["layer.1.wqkv"][2 * DIM :])


# --- the tables ---------------------------------------------------------------------------------------------------

TABLES = {
    **{name: getattr(torch_nn, name) for name in ("TORCH_ATTENTION", "TORCH_ENCODER_LAYER", "TORCH_DECODER_LAYER")},
    **{name: getattr(layer_layouts, name) for name in ("FUSED_ATTENTION", "ANNOTATED_ATTENTION")},
    "GPT": gpt_layout.GPT,
    **{name: getattr(transformers, name) for name in ("LLAMA", "BERT", "BERT_MASKED", "BERT_CLASSIFIER")},
}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_table_keeps_its_stars(table):
    for theirs, ours in TABLES[table].items():
        if ours not in (LEFT_OUT, STORED_MASK):
            assert theirs.count("*") == ours.count("*"), (theirs, ours)


def test_every_activation_of_a_table_is_one_of_regards():
    assert set(transformers.GATED_ACTIVATIONS.values()) == GATED_ACTIVATIONS
    assert not set(transformers.PLAIN_ACTIVATIONS.values()) & GATED_ACTIVATIONS
    for activation in {*transformers.PLAIN_ACTIVATIONS.values(), *torch_nn.TORCH_ACTIVATIONS.values()}:
        assert activation in ACTIVATIONS

"""transformers' models in regard: tiny random ones, compared number by number, and mutants that must not pass.

The library draws weights so small that attention is almost even, and a wrong mask hardly shows. Here they are drawn
with 1.5 / sqrt(fan-in), so that a head attends to few tokens.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import regard
from comparing import assert_close, assert_within_budget
from regard.feed_forward import ACTIVATIONS
from regard.layouts import from_gpt, from_transformers
from regard.layouts.transformers import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, rotary
from regard.masks import Causal, Padding, Window
from regard.models import Classifier, Decoder, Encoder, MaskedLanguageModel
from regard.positions import Rotary

# A different prime for every axis where the models allow it (heads: groups of kv_heads; head_dim is even for rotary).
BATCH, LENGTH, VOCAB, LAYERS, HIDDEN, WINDOW = 3, 23, 67, 2, 29, 5
HEADS, KV_HEADS, HEAD_DIM, DIM = 6, 2, 10, 42
LENGTHS = [23, 11, 5]
TOLERANCE = 1e-5

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
SIZES: dict[str, Any] = {
    **NO_TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 37,
}
GPT2_SIZES: dict[str, Any] = {
    **NO_TOKENS,
    "vocab_size": VOCAB,
    "n_embd": DIM,
    "n_inner": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 37,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """The model with sharp attention, with constants and norms that are not 0 and 1, and without dropout."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                fan_in = module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features
                module.weight.normal_(std=1.5 * fan_in**-0.5)
            elif isinstance(module, nn.Embedding):
                module.weight.normal_()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # the weight of a norm, or a constant
                parameter.normal_(mean=1.0 if name.endswith("weight") else 0.0, std=0.3)
    model.tie_weights()
    return model.eval()


def gpt2(**changes: Any) -> PreTrainedModel:
    return drawn(GPT2LMHeadModel(GPT2Config(**{**GPT2_SIZES, **changes})))


def llama(**changes: Any) -> PreTrainedModel:
    return drawn(LlamaForCausalLM(LlamaConfig(**{**GROUPED, **changes})))


def mistral(**changes: Any) -> PreTrainedModel:
    return drawn(MistralForCausalLM(MistralConfig(**{**GROUPED, "sliding_window": WINDOW, **changes})))


def qwen2(**changes: Any) -> PreTrainedModel:
    return drawn(Qwen2ForCausalLM(Qwen2Config(**{**GROUPED, **changes})))


def bert(kind: type = BertForMaskedLM, **changes: Any) -> PreTrainedModel:
    return drawn(kind(BertConfig(**{**SIZES, "type_vocab_size": 2, "pad_token_id": 0, **changes})))


DECODERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": gpt2,
    "gpt2 untied, exact gelu": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "gpt2 with other eps": lambda: gpt2(layer_norm_epsilon=0.1, n_inner=None),
    "llama": llama,
    "llama tied, one kv head": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama, as many kv heads": lambda: llama(num_key_value_heads=HEADS, head_dim=None, hidden_size=6 * 8),
    "llama with constants in attention": lambda: llama(attention_bias=True),
    "llama with constants in feed-forward": lambda: llama(mlp_bias=True, rms_norm_eps=0.1),
    "llama with constants": lambda: llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "mistral, window shorter than the text": mistral,
    "mistral without window": lambda: mistral(sliding_window=None),
    "qwen2": qwen2,
    "qwen2 with windows": lambda: qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0),
    "qwen2 with windows in some layers": lambda: qwen2(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
}
each_decoder = pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS)


def some_tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (BATCH, length))


def agree(ours: Decoder, theirs: PreTrainedModel, tokens: Tensor) -> None:
    """The same logits, to 1e-5 of the largest."""
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).logits, "logits", tolerance=TOLERANCE)


# --- decoders -----------------------------------------------------------------------------------------------------


@each_decoder
def test_logits_agree(make):
    theirs = make()
    ours = from_transformers(theirs)
    assert type(ours) is Decoder
    assert not ours.training
    agree(ours, theirs, some_tokens())


@pytest.mark.parametrize("make", [gpt2, llama, mistral, qwen2])
def test_the_heads_of_these_models_attend_to_few_tokens(make):
    # else this file would prove nothing about masks
    ours, tokens = from_transformers(make()), some_tokens()
    with torch.no_grad(), regard.record(ours) as recording:
        ours(tokens)
    assert all(head.spread < 0.9 for head in recording.summary(tokens))


@each_decoder
def test_one_token_at_a_time_agrees_with_transformers_whole_text(make):
    theirs = make()
    ours, tokens = from_transformers(theirs), some_tokens()
    cache = ours.cache()
    with torch.no_grad():
        pieces = [ours(tokens[:, :4], cache=cache)]
        pieces += [ours(tokens[:, t : t + 1], cache=cache) for t in range(4, LENGTH)]
        assert_close(torch.cat(pieces, 1), theirs(tokens).logits, tolerance=TOLERANCE)


@pytest.mark.parametrize("make", [gpt2, llama, mistral, qwen2])
def test_real_tokens_agree_where_rows_are_padded(make):
    theirs = make()
    ours, tokens = from_transformers(theirs), some_tokens()
    lengths = torch.tensor(LENGTHS)[:, None]
    for real in (torch.arange(LENGTH) < lengths, torch.arange(LENGTH) >= LENGTH - lengths):
        with torch.no_grad():
            expected = theirs(tokens, attention_mask=real.long()).logits
            assert_close(ours(tokens, mask=Padding(real))[real], expected[real], tolerance=TOLERANCE)


@pytest.mark.parametrize("make", [gpt2, llama, mistral, qwen2])
def test_the_states_after_every_block_agree(make):
    theirs = make()
    ours, tokens = from_transformers(theirs), some_tokens()
    states: list[Tensor] = []
    for block in ours.layers:
        block.register_forward_hook(lambda block, inputs, output: states.append(output))
    with torch.no_grad():
        last = ours.states(tokens)
        expected = theirs(tokens, output_hidden_states=True).hidden_states
    assert len(states) == LAYERS
    assert_close(last, expected[-1], "after the last norm", tolerance=TOLERANCE)
    for number, (state, wanted) in enumerate(zip(states[:-1], expected[1:-1], strict=True)):
        assert_close(state, wanted, f"after block {number}", tolerance=TOLERANCE)


@pytest.mark.parametrize("make", [gpt2, llama, mistral, qwen2, bert])
def test_the_weights_of_every_layer_agree(make):
    theirs = make()
    ours, tokens = from_transformers(theirs), some_tokens()
    theirs.set_attn_implementation("eager")
    with torch.no_grad(), regard.record(ours) as recording:
        ours(tokens)
        expected = theirs(tokens, output_attentions=True).attentions
    assert len(recording) == len(expected) == LAYERS
    for seen, weights in zip(recording.values(), expected, strict=True):
        assert_close(seen.weights(), weights, tolerance=TOLERANCE)


BASES = {
    "GPT2Model": (gpt2, lambda model: model.transformer),
    "LlamaModel": (llama, lambda model: model.model),
    "MistralModel": (mistral, lambda model: model.model),
    "Qwen2Model": (qwen2, lambda model: model.model),
}


@pytest.mark.parametrize("name", BASES)
def test_a_model_without_a_head_for_logits_gives_its_states(name):
    make, inner = BASES[name]
    theirs, tokens = inner(make()), some_tokens()
    assert isinstance(theirs, GPT2Model | LlamaModel | MistralModel | Qwen2Model)
    ours = from_transformers(theirs)
    assert ours.config.tied
    with torch.no_grad():
        assert_close(ours.states(tokens), theirs(tokens).last_hidden_state, tolerance=TOLERANCE)


def test_the_state_dict_of_a_gpt2_alone_is_enough():
    theirs, tokens = gpt2(), some_tokens()
    for state in (theirs.state_dict(), theirs.transformer.state_dict()):
        agree(from_gpt(state, heads=HEADS), theirs, tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_stays_tied_and_untied_stays_untied(tied):
    ours = from_transformers(llama(tie_word_embeddings=tied))
    assert (ours.logits.weight is ours.embedding.weight) == ours.config.tied == tied


def test_the_configuration_alone_makes_the_same_model_again():
    theirs = mistral(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, pad_token_id=3)
    ours, tokens = from_transformers(theirs), some_tokens()
    again = Decoder(regard.ModelConfig.from_dict(ours.config.to_dict()))
    again.load_state_dict(ours.state_dict())
    agree(again.eval(), theirs, tokens)
    assert ours.config.padding_id == ours.embedding.padding_idx == 3


def test_dropout_comes_along_for_training():
    theirs = GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, resid_pdrop=0.25, embd_pdrop=0.25, attn_pdrop=0.5))
    ours = from_transformers(theirs)
    assert ours.training
    assert (ours.config.dropout, ours.config.attention_dropout) == (0.25, 0.5)
    assert (ours.layers[0].attention.dropout, ours.layers[0].attention.output_dropout) == (0.5, 0.25)
    assert ours.layers[0].feed_forward.output_dropout == 0.25
    with pytest.raises(ValueError, match=r"embd_pdrop=0.5 is not supported, only embd_pdrop=0.25; .* set them equal"):
        from_transformers(GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, resid_pdrop=0.25, embd_pdrop=0.5)))


# --- rotary positions ---------------------------------------------------------------------------------------------

THETA = 500.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 11}
SCALED: dict[str, dict[str, Any]] = {
    "another theta": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn with its own range": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn with an attention factor": {**YARN, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn with both mscales": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn with one mscale, which is ignored": {**YARN, "mscale": 2.0},
    "yarn with an mscale of 0, which is ignored": {**YARN, "mscale": 2.0, "mscale_all_dim": 0},
    "yarn without a factor": {**YARN, "factor": None, "beta_fast": 0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 11,
    },
}


def rotary_changed(ours: Decoder, **changes: Any) -> Decoder:
    """A copy of the model whose rotary encoding has other arguments."""
    changed = copy.deepcopy(ours)
    old = changed.layers[0].attention.rotary
    arguments = {"theta": old.theta, "scaling": old.scaling, "layout": old.layout, **changes}
    for block in changed.layers:
        block.attention.rotary = Rotary(old.head_dim, **arguments)
    return changed


@pytest.mark.parametrize("parameters", SCALED.values(), ids=SCALED)
def test_every_kind_of_rotary_positions_agrees_beyond_the_original_context(parameters):
    # the original context is 11, the text has 23 tokens, and 44 is what the configuration says
    context = 11 if parameters["rope_type"] in ("linear", "dynamic") else 44
    theirs = llama(rope_parameters={"rope_theta": THETA, **parameters}, max_position_embeddings=context)
    ours, tokens = from_transformers(theirs), some_tokens()
    agree(ours, theirs, tokens)
    without = {"theta": 10000.0} if parameters["rope_type"] == "default" else {"scaling": None}
    with pytest.raises(AssertionError, match="logits: off by"):
        agree(rotary_changed(ours, **without), theirs, tokens)


@pytest.mark.parametrize("parameters", [p for p in SCALED.values() if p["rope_type"] != "dynamic"], ids=str)
def test_every_kind_of_rotary_positions_agrees_one_token_at_a_time(parameters):
    theirs = llama(rope_parameters={"rope_theta": THETA, **parameters}, max_position_embeddings=44)
    ours, tokens = from_transformers(theirs), some_tokens()
    cache = ours.cache()
    with torch.no_grad():
        steps = [ours(tokens[:, t : t + 1], cache=cache) for t in range(LENGTH)]
        assert_close(torch.cat(steps, 1), theirs(tokens).logits, tolerance=TOLERANCE)


FORMERLY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_scaling": None}, {"rope_type": "default"}),
    ({"rope_scaling": {"type": "linear", "factor": 3.0}}, SCALED["linear"]),
    ({"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 3.0}}, SCALED["dynamic"]),
    ({"rope_scaling": SCALED["llama3"]}, SCALED["llama3"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 11}, YARN),
]


@pytest.mark.parametrize(("formerly", "today"), FORMERLY, ids=lambda x: "")
def test_rotary_positions_as_they_were_written_formerly(formerly, today):
    config = LlamaConfig(**GROUPED, rope_parameters={"rope_theta": THETA, **today})
    read = rotary(SimpleNamespace(max_position_embeddings=37, rope_theta=THETA, **formerly))
    assert read == rotary(config)
    assert read["rotary_theta"] == THETA


def test_a_scaled_model_may_read_as_far_as_its_factor_reaches():
    def context(**parameters: Any) -> int:
        config = SimpleNamespace(max_position_embeddings=100, rope_parameters={"rope_theta": 10.0, **parameters})
        return rotary(config)["context_length"]

    assert context(rope_type="default") == 100
    assert context(rope_type="linear", factor=2.5) == 250
    assert context(rope_type="dynamic", factor=2.0) == 200
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=100) == 400
    assert context(rope_type="yarn", factor=4.0, original_max_position_embeddings=25) == 100


# --- BERT ---------------------------------------------------------------------------------------------------------


def bert_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, token types and which tokens are real."""
    real = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    tokens = some_tokens() * real
    types = (torch.arange(LENGTH) >= torch.tensor([[9], [4], [2]])).long()
    return tokens, types, real


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_norm_eps": 0.1}, {"hidden_act": "relu"}, {"hidden_act": "gelu_new"}, {"pad_token_id": None}],
    ids=str,
)
def test_a_masked_language_model_agrees_with_token_types_and_padding(changes):
    theirs = bert(**changes)
    ours = from_transformers(theirs)
    assert type(ours) is MaskedLanguageModel
    tokens, types, real = bert_inputs()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=real.long(), token_type_ids=types).logits
        assert_close(ours(tokens, segments=types, mask=Padding(real))[real], expected[real], tolerance=TOLERANCE)
        assert_close(ours(tokens), theirs(tokens).logits, tolerance=TOLERANCE)
        for wrong in (
            ours(tokens, segments=types),  # the padding is seen
            ours(tokens, mask=Padding(real)),  # all of one type
            ours(tokens, segments=types, mask=Padding(real) & Causal()),
        ):
            with pytest.raises(AssertionError, match="off by"):
                assert_close(wrong[real], expected[real], tolerance=TOLERANCE)


@pytest.mark.parametrize("pooler", [True, False])
def test_a_bert_without_a_head_becomes_an_encoder(pooler):
    theirs = drawn(BertModel(BertConfig(**SIZES), add_pooling_layer=pooler))
    ours = from_transformers(theirs)
    assert type(ours) is Encoder
    tokens, types, real = bert_inputs()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=real.long(), token_type_ids=types).last_hidden_state
        states = ours(tokens, segments=types, mask=Padding(real))
    assert_close(states[real], expected[real], tolerance=TOLERANCE)


def test_a_bert_that_classifies_becomes_a_classifier():
    theirs = bert(BertForSequenceClassification, num_labels=5)
    ours = from_transformers(theirs)
    assert type(ours) is Classifier
    tokens, types, real = bert_inputs()
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=real.long(), token_type_ids=types).logits
        assert_close(ours(tokens, segments=types, mask=Padding(real)), expected, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", {**PLAIN_ACTIVATIONS, **GATED_ACTIVATIONS})
def test_every_activation_is_the_one_of_that_name(name):
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    tables = (PLAIN_ACTIVATIONS, GATED_ACTIVATIONS)
    for activation in (table[name] for table in tables if name in table):
        # one of them writes sqrt(2 / pi) with ten digits
        assert_close(ACTIVATIONS[activation](x), ACT2FN[name](x), tolerance=1e-9)


# --- mutants: each of them must be caught -------------------------------------------------------------------------


def without_mask(ours: Decoder) -> None:
    for block in ours.layers:
        block.attention.mask = None


def windows(w: int) -> Callable[[Decoder], None]:
    def mutate(ours: Decoder) -> None:
        for block in ours.layers:
            block.attention.mask = Causal() & Window(w)

    return mutate


def spread_kv_heads(order: Callable[[Tensor], Tensor]) -> Callable[[Decoder], None]:
    """As many kv heads as heads: which of the old ones each head gets is what `order` makes of [0, 1, ...]."""

    def mutate(ours: Decoder) -> None:
        for block in ours.layers:
            layer = block.attention
            which = order(torch.arange(layer.kv_heads))
            for linear in (layer.key, layer.value):
                linear.weight = nn.Parameter(linear.weight.unflatten(0, (layer.kv_heads, -1))[which].flatten(0, 1))
            layer.kv_heads = layer.heads

    return mutate


def with_other_rotary(**changes: Any) -> Callable[[Decoder], None]:
    def mutate(ours: Decoder) -> None:
        ours.layers = rotary_changed(ours, **changes).layers

    return mutate


def with_eps(eps: float) -> Callable[[Decoder], None]:
    def mutate(ours: Decoder) -> None:
        for module in ours.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.eps = eps

    return mutate


def with_activation(activation: str) -> Callable[[Decoder], None]:
    def mutate(ours: Decoder) -> None:
        for block in ours.layers:
            block.feed_forward.activation = activation

    return mutate


def with_scale(ours: Decoder) -> None:
    for block in ours.layers:
        block.attention.scale = DIM**-0.5  # of all heads together


MUTANTS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[Decoder], None]]] = {
    "gpt2, mask ignored": (gpt2, without_mask),
    "gpt2, scaled by the size of all heads": (gpt2, with_scale),
    "gpt2, exact gelu": (gpt2, with_activation("gelu")),
    "llama, mask ignored": (llama, without_mask),
    "llama, kv heads tiled instead of grouped": (llama, spread_kv_heads(lambda kv: kv.repeat(HEADS // KV_HEADS))),
    "llama, interleaved instead of half": (llama, with_other_rotary(layout="interleaved")),
    "llama, another eps": (llama, with_eps(1e-4)),
    "llama, gelu in the gate": (llama, with_activation("geglu")),
    "mistral, window ignored": (mistral, windows(LENGTH)),
    "mistral, window one too long": (mistral, windows(WINDOW + 1)),
    "mistral, window one too short": (mistral, windows(WINDOW - 1)),
}


@pytest.mark.parametrize(("make", "mutate"), MUTANTS.values(), ids=MUTANTS)
def test_the_comparison_fails_for_a_mutant(make, mutate):
    theirs = make()
    ours, tokens = from_transformers(theirs), some_tokens()
    agree(ours, theirs, tokens)
    mutate(ours)
    with pytest.raises(AssertionError, match="logits: off by"):
        agree(ours, theirs, tokens)


def test_the_mutants_machinery_itself_passes_where_it_changes_nothing():
    theirs, tokens = llama(), some_tokens()
    ours = from_transformers(theirs)
    spread_kv_heads(lambda kv: kv.repeat_interleave(HEADS // KV_HEADS))(ours)
    with_other_rotary()(ours)
    windows(LENGTH)(ours)
    agree(ours, theirs, tokens)


# --- low precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, mistral, qwen2])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers_in_bfloat16(make):
    theirs = make()
    tokens = some_tokens()
    with torch.no_grad():
        theirs = theirs.to(torch.bfloat16)
        exact = copy.deepcopy(theirs).double()(tokens).logits
        ours = from_transformers(theirs)
        assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
        assert_within_budget(ours(tokens), exact, theirs(tokens).logits)


# --- what regard does not have ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "no scale": (lambda: gpt2(scale_attn_weights=False), "scale_attn_weights=False"),
    "a scale per layer": (lambda: gpt2(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
    "cross-attention": (lambda: gpt2(add_cross_attention=True), "add_cross_attention=True|crossattention"),
    "an activation": (lambda: gpt2(activation_function="quick_gelu"), "activation_function must be .*'quick_gelu'"),
    "an activation in a gate": (lambda: llama(hidden_act="quick_gelu"), "hidden_act must be one of silu"),
    "a llama that is not causal": (lambda: llama(is_causal=False), "is_causal=False"),
    "a head of another kind": (
        lambda: GPT2ForSequenceClassification(GPT2Config(**GPT2_SIZES, pad_token_id=0)),
        "no model like GPT2ForSequenceClassification",
    ),
    "two heads": (lambda: bert(BertForPreTraining), "no model like BertForPreTraining"),
    "a bert that decodes": (lambda: bert(is_decoder=True), "is_decoder=True"),
    "an untied bert": (
        lambda: bert(tie_word_embeddings=False),
        "cls.predictions.decoder.(weight|bias) and .* must be equal, for regard ties them",
    ),
    "a classifier with a dropout of its own": (
        lambda: bert(BertForSequenceClassification, classifier_dropout=0.5),
        "classifier_dropout=0.5 is not supported, only classifier_dropout=0.1; .* set them equal",
    ),
    "another kind of rotary positions": (
        lambda: llama(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": THETA,
                "short_factor": [1.0] * 5,
                "long_factor": [2.0] * 5,
                "original_max_position_embeddings": 11,
                "factor": 2.0,
            }
        ),
        "rope_type must be one of default, linear, dynamic, llama3, yarn, got 'longrope'",
    ),
    "a softcap that transformers does not use": (
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=29,
                hidden_size=12,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=6,
                intermediate_size=17,
                max_position_embeddings=13,
                attn_logit_softcapping=2.0,
            )
        ),
        "attn_logit_softcapping=2.0 is not supported, only attn_logit_softcapping=None",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_regard_does_not_have_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=f"from_transformers: .*({message})"):
        from_transformers(make())


def test_settings_that_a_configuration_may_hold_besides_are_refused_by_name():
    for name, value in (
        ("is_causal", True),
        ("pruned_heads", {0: [1]}),
        ("position_embedding_type", "relative_key"),
        ("quantization_config", {"bits": 4}),
        ("is_encoder_decoder", True),
    ):
        theirs = bert()
        setattr(theirs.config, name, value)
        with pytest.raises(ValueError, match=f"from_transformers: {name}=.* is not supported, only {name}="):
            from_transformers(theirs)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_type 'default' with mrope_section is not supported"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, "rope_type 'dynamic' with alpha is not supported"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "with partial_rotary_factor is not"),
    ],
    ids=str,
)
def test_rotary_parameters_that_are_not_understood_are_refused_by_name(parameters, message):
    config = SimpleNamespace(max_position_embeddings=37, rope_parameters={"rope_theta": THETA, **parameters})
    with pytest.raises(ValueError, match=message):
        rotary(config)


def test_a_model_that_holds_something_else_besides_is_refused():
    theirs = llama()
    theirs.model.layers[1].self_attn.q_norm = nn.LayerNorm(HEAD_DIM)
    with pytest.raises(ValueError, match=r"\n  unexpected layers.1.self_attn.q_norm.bias, layers.1.self_attn.q_norm"):
        from_transformers(theirs)
    theirs = llama()
    theirs.config.num_hidden_layers = 1  # the second is there, and not used
    with pytest.raises(ValueError, match="holds 2 layers and its num_hidden_layers is 1"):
        from_transformers(theirs)

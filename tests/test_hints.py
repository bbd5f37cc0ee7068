"""Other libraries' names of arguments: every one is refused with regard's way, and nothing else is changed."""

import inspect
import timeit

import pytest
import torch

from regard import (
    Block,
    Causal,
    Decoder,
    Document,
    Encoder,
    FeedForward,
    ModelConfig,
    MultiHeadAttention,
    Rotary,
    TokenEmbedding,
    attention,
    attention_with_lse,
    generate,
    hints,
    observe,
    plan,
    sample,
)
from regard.hints import hinted

QUERY = torch.randn(1, 2, 4, 8)
TOKENS = torch.tensor([[1, 2, 3]])
SIZES = {"vocab_size": 11, "context_length": 16, "dim": 8, "layers": 1, "heads": 2}


def decoder() -> Decoder:
    return Decoder(ModelConfig(**SIZES))


LAYER = MultiHeadAttention(8, 2)
X = torch.randn(1, 3, 8)

CALLS = {
    "attention": (hints.ATTENTION, lambda **named: attention(QUERY, QUERY, QUERY, **named)),
    "attention_with_lse": (hints.ATTENTION, lambda **named: attention_with_lse(QUERY, QUERY, QUERY, **named)),
    "plan": (hints.ATTENTION, lambda **named: plan(QUERY, QUERY, QUERY, **named)),
    "observe": (hints.ATTENTION, lambda **named: observe(QUERY, QUERY, **named)),
    "MultiHeadAttention": (hints.LAYER, lambda **named: MultiHeadAttention(8, 2, **named)),
    "FeedForward": (hints.LAYER, lambda **named: FeedForward(8, 16, **named)),
    "TokenEmbedding": (hints.LAYER, lambda **named: TokenEmbedding(11, 8, **named)),
    "MultiHeadAttention, called": (hints.LAYER_CALL, lambda **named: LAYER(X, **named)),
    "Block": (hints.BLOCK, lambda **named: Block(LAYER, FeedForward(8, 16), **named)),
    "Block, called": (hints.LAYER_CALL, lambda **named: Block(LAYER, FeedForward(8, 16))(X, **named)),
    "ModelConfig": (hints.CONFIG, lambda **named: ModelConfig(**SIZES, **named)),
    "ModelConfig, changed": (hints.CONFIG, lambda **named: ModelConfig.preset("gpt2", **named)),
    "Decoder, called": (hints.MODEL_CALL, lambda **named: decoder()(TOKENS, **named)),
    "Encoder, called": (hints.MODEL_CALL, lambda **named: Encoder(ModelConfig(**SIZES))(TOKENS, **named)),
    "generate": (hints.GENERATION, lambda **named: generate(decoder(), [1], 2, **named)),
    "sample": (hints.GENERATION, lambda **named: sample(torch.zeros(1, 3), **named)),
    "Rotary": (hints.ROTARY, lambda **named: Rotary(8, **named)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_name_of_a_table_is_refused_with_its_hint(name):
    table, call = CALLS[name]
    owner = name.split(",")[0]
    refused = 0
    for theirs, hint in table.items():
        with pytest.raises(TypeError) as caught:
            call(**{theirs: None})
        said = str(caught.value).split("\n")
        if said[0] == f"{owner}: unknown argument {theirs}":
            assert said[1:] == [f"  hint: {hint}"]
            refused += 1
        else:  # an argument that this one has, by another's name: given twice, or of the wrong type
            assert said[0].startswith(f"{owner}: "), said
    assert refused > len(table) // 2


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: attention(QUERY, QUERY, QUERY, is_causal=True), r"is_causal=True is mask=Causal\(\)"),
        (lambda: attention(QUERY, QUERY, QUERY, attn_mask=None), r"mask=Dense\(attn_mask\), a float .* bias=attn_mask"),
        (lambda: attention(QUERY, QUERY, QUERY, dropout_p=0.1), "dropout_p is dropout="),
        (lambda: attention(QUERY, QUERY, QUERY, enable_gqa=True), "leave enable_gqa out"),
        (lambda: LAYER(X, key_padding_mask=TOKENS), r"mask=Padding\(~key_padding_mask\)"),
        (lambda: LAYER(X, need_weights=False), r"regard.record\(model\)"),
        (lambda: MultiHeadAttention(embed_dim=8, num_heads=2), "embed_dim is dim=\n  hint: num_heads is heads="),
        (lambda: attention(QUERY, QUERY, QUERY, cu_seqlens_q=TOKENS), r"Document.from_lengths\(cu_seqlens.diff\(\)\)"),
        (lambda: ModelConfig(**SIZES, num_key_value_heads=1), "num_key_value_heads is kv_heads="),
        (lambda: decoder()(input_ids=TOKENS), "input_ids is tokens, the first argument"),
        (lambda: decoder()(TOKENS, attention_mask=TOKENS), r"mask=Padding\(attention_mask.bool\(\)\)"),
        (lambda: attention(QUERY, QUERY, QUERY, msk=None), "msk is perhaps mask="),
        (lambda: attention(QUERY, QUERY, QUERY, colour=None), r"it is called as attention\(query, key, value, mask=, "),
        (
            lambda: attention(QUERY, QUERY, QUERY, Causal()),
            "takes only query, key, value by position, got 4 arguments\n",
        ),
        (
            lambda: attention(QUERY, QUERY),
            r"value missing\n  hint: it is called as attention\(query, key, value, mask=",
        ),
        (lambda: attention(QUERY, QUERY, QUERY, key=QUERY), "key given twice, by position and by name"),
        (lambda: ModelConfig(11, 16), "takes nothing by position, got 2 arguments"),
        (lambda: ModelConfig(vocab_size=11), "context_length, dim, layers, heads missing"),
    ],
)
def test_likely_first_mistakes_by_hand(call, says):
    with pytest.raises(TypeError, match=says) as caught:
        call()
    assert caught.value.__context__ is None, "Python's own words would stand above"


def test_cumulated_lengths_become_documents_as_the_hint_says():
    ends = torch.tensor([0, 2, 5])
    assert Document.from_lengths(ends.diff()) == Document.from_lengths([2, 3])


def test_an_error_from_inside_passes_through_as_it_is():
    inside = TypeError("f() got an unexpected keyword argument 'is_causal'")

    @hinted(hints.ATTENTION)
    def f(query, *, mask=None):
        raise inside

    with pytest.raises(TypeError) as caught:
        f(1)
    assert caught.value is inside


def test_signatures_names_and_docstrings_stay_what_they_are():
    assert list(inspect.signature(attention).parameters)[:4] == ["query", "key", "value", "mask"]
    assert "p" not in inspect.signature(ModelConfig).parameters
    assert list(inspect.signature(MultiHeadAttention).parameters)[:3] == ["dim", "heads", "kv_heads"]
    assert list(inspect.signature(LAYER.forward).parameters) == ["query", "key", "value", "mask", "bias", "cache"]
    assert attention.__name__ == "attention"
    assert attention.__doc__.startswith("For every query, the average of the values")
    assert attention.__module__ == "regard.functional"
    for function in (attention, observe, generate, MultiHeadAttention.__init__, LAYER.forward):
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_a_hinted_call_compiles_into_one_graph():
    compiled = torch.compile(lambda q: attention(q, q, q, mask=Causal()), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(QUERY), attention(QUERY, QUERY, QUERY, mask=Causal()), atol=1e-6)
    layer = torch.compile(LAYER, backend="aot_eager", fullgraph=True)
    assert torch.allclose(layer(X, mask=Causal()), LAYER(X, mask=Causal()), atol=1e-6)


def test_a_hint_costs_a_small_part_of_the_smallest_call():
    times = {attention: [], inspect.unwrap(attention): []}
    with torch.no_grad():
        for _ in range(60):  # in turn, as the speed of a machine changes
            for function, taken in times.items():
                taken.append(timeit.timeit(lambda call=function: call(QUERY, QUERY, QUERY), number=50))
    hinted, plain = map(min, times.values())
    assert hinted < 1.2 * plain


def test_a_model_of_a_configuration_file_of_transformers_gets_the_names_too():
    theirs = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 11, "colour": "red"}
    with pytest.raises(ValueError, match="unknown fields colour, hidden_size, num_hidden_layers") as caught:
        ModelConfig.from_dict(theirs)
    assert "hint: hidden_size is dim=\n  hint: num_hidden_layers is layers=" in str(caught.value)
    with pytest.raises(ValueError, match="unknown fields colour; written by a newer regard"):
        ModelConfig.from_dict({"colour": "red"})

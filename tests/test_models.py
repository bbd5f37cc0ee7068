"""Whole models: presets build, every part is where its configuration says, packing changes nothing, and they learn."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from comparing import assert_close, assert_zero
from regard.configuration import PRESETS, ModelConfig
from regard.masks import Causal, Document, Padding, Window
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, MaskedLanguageModel
from regard.positions import DynamicScaling, Learned, LinearScaling, Llama3Scaling, Rotary, Sinusoidal, YarnScaling

VOCAB, CONTEXT = 29, 13
SMALL = {"vocab_size": VOCAB, "context_length": CONTEXT, "dim": 24, "layers": 2, "heads": 6, "hidden_dim": 17}
"""No two sizes alike, and small."""


def config(**changes):
    return ModelConfig(**SMALL | changes)


def preset(name, **changes):
    kv_heads = {"kv_heads": 3} if name == "llama" else {}
    scale = {"embedding_scale": math.sqrt(24)} if name == "original" else {}
    return ModelConfig.preset(name, **SMALL | kv_heads | scale | changes)


def spread(model):
    """Weights large enough that nothing is lost in rounding or in evenness, in float64, nothing dropped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return model.double().eval()


def text(*shape):
    return torch.randint(1, VOCAB, shape)


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", [Encoder, Decoder, EncoderDecoder])
def test_every_preset_makes_every_kind_of_model_and_gradients_reach_every_parameter(name, kind):
    model = kind(preset(name, dropout=0.0, attention_dropout=0.0))
    if kind is EncoderDecoder:
        inputs = (text(2, 7), text(2, 5))
        output = model(*inputs, source_mask=Padding([7, 4]))
        assert output.shape == (2, 5, VOCAB)
    else:
        output = model(text(2, 7))
        assert output.shape == (2, 7, 24 if kind is Encoder else VOCAB)
    assert output.dtype == torch.float32
    (output * torch.randn_like(output)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        # a constant of a key shifts all scores of a query alike and changes nothing
        if not parameter_name.endswith("key.bias"):
            assert bool((parameter.grad != 0).any()), parameter_name


def test_presets_are_what_was_published():
    # parameters of GPT-2 small, of BERT base (with its pooler: 110M) and of Llama 3 8B, counted from their sizes
    def count(name, **changes):
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(ModelConfig.preset(name, **changes)).parameters())

    assert count("gpt2") == 124_439_808
    assert count("llama") == 8_030_261_248
    with torch.device("meta"):
        bert = Encoder(ModelConfig.preset("bert"))
    assert sum(p.numel() for p in bert.parameters()) == 108_891_648
    assert [type(part) for part in (Decoder(preset("original")).positions, bert.positions)] == [Sinusoidal, Learned]
    assert ModelConfig.preset("original").embedding_scale == math.sqrt(512)


def test_a_preset_of_another_dim_keeps_its_proportions():
    wide = {name: ModelConfig.preset(name, dim=48, heads=4, kv_heads=None).hidden_dim for name in PRESETS}
    assert wide == {"original": 192, "bert": 192, "gpt2": 192, "llama": 168}
    assert ModelConfig.preset("original", dim=100, heads=4).embedding_scale == 10
    assert ModelConfig.preset("gpt2", dim=48).embedding_scale == 1
    assert ModelConfig.preset("gpt2", dim=48, hidden_dim=7).hidden_dim == 7
    assert ModelConfig.preset("gpt2", dim=48, hidden_dim=None).hidden_dim is None
    for name, published in PRESETS.items():
        assert ModelConfig.preset(name, dim=published.dim) == published == ModelConfig.preset(name)
    with pytest.raises(ValueError, match="dim must be"):
        ModelConfig.preset("gpt2", dim="48")


def test_a_decoder_by_hand():
    model = spread(
        Decoder(config(positions="learned", tied=False, bias=True, norm="layer", softcap=1.5, logit_softcap=3.0))
    )
    tokens = text(2, 7)
    x = F.embedding(tokens, model.embedding.weight) + model.positions.weight[:7]
    for block in model.layers:
        x = x + block.attention(block.attention_norm(x))
        x = x + block.feed_forward(block.feed_forward_norm(x))
        assert repr(block.attention.mask) == "Causal()"
        assert block.attention.softcap == 1.5
    logits = model.norm(x) @ model.logits.weight.T
    assert_close(model(tokens), 3 * torch.tanh(logits / 3))


def test_norms_after_sublayers_and_a_window_and_a_rotation_for_each_kind_of_layer_by_hand():
    model = spread(Decoder(config(layers=3, output_norms=True, window=(3, None), window_theta=50.0, scale=0.2)))
    tokens = text(2, 7)
    x = F.embedding(tokens, model.embedding.weight)
    for number, block in enumerate(model.layers):
        x = x + block.attention_output_norm(block.attention(block.attention_norm(x)))
        x = x + block.feed_forward_output_norm(block.feed_forward(block.feed_forward_norm(x)))
        windowed = number != 1  # the windows are repeated over the layers
        assert block.attention.mask == (Causal() & Window(3) if windowed else Causal())
        assert block.attention.rotary.theta == (50.0 if windowed else 10000.0)
        assert block.attention.scale == 0.2
    assert_close(model(tokens), model.norm(x) @ model.embedding.weight.T)
    again = ModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))
    assert again == model.config
    assert (again.widest, again.endless) == (None, False)
    every = config(window=[3, 5])
    assert (every.widest, every.endless) == (5, True)
    with pytest.raises(ValueError, match="window must be a number, one for each layer, or None, got none of them"):
        config(window=())


def test_an_encoder_by_hand():
    model = spread(
        Encoder(config(positions="learned", segments=2, embedding_norm=True, norm="layer", norm_first=False, bias=True))
    )
    tokens, segments = text(2, 7), torch.tensor([[0, 0, 0, 1, 1, 1, 1]]).expand(2, -1)
    x = F.embedding(tokens, model.embedding.weight) + model.positions.weight[:7] + model.segments.weight[segments]
    x = model.embedding_norm(x)
    for block in model.layers:
        x = block.attention_norm(x + block.attention(x))
        x = block.feed_forward_norm(x + block.feed_forward(x))
        assert block.attention.mask is None
    assert_close(model(tokens, segments=segments), x)
    assert_close(model(tokens), model(tokens, segments=torch.zeros_like(tokens)))
    assert model.norm is None


def test_what_a_configuration_says_of_attention_reaches_every_layer():
    model = Decoder(
        config(kv_heads=2, head_dim=6, window=3, rotary_theta=500.0, rotary_dim=4, attention_bias=True, bias=False)
    )
    rotaries = set()
    for block in model.layers:
        attention = block.attention
        assert (attention.heads, attention.kv_heads, attention.head_dim) == (6, 2, 6)
        assert repr(attention.mask) == "Causal() & Window(3)"
        assert attention.query.bias is not None
        assert attention.output.bias is None
        rotaries.add(attention.rotary)
    (rotary,) = rotaries
    assert (rotary.head_dim, rotary.theta, rotary.rotary_dim, rotary.layout) == (6, 500.0, 4, "half")
    assert repr(Encoder(config(window=3)).layers[0].attention.mask) == "Window(3)"
    assert repr(Decoder(config(positions="alibi")).layers[1].attention.bias) == "Alibi(6)"
    cross = Decoder(config(window=3), cross=True).layers[0].cross
    assert (cross.mask, cross.bias, cross.rotary) == (None, None, None)


def test_dropout_is_in_training_alone():
    for rates in ({"dropout": 0.5}, {"attention_dropout": 0.5}):
        model = Decoder(config(**rates))
        tokens = text(1, 7)
        assert not torch.equal(model(tokens), model(tokens))
        assert torch.equal(model.eval()(tokens), model(tokens))


def test_dropout_is_on_embeddings_and_on_the_output_of_every_sublayer():
    model = Decoder(config(dropout=0.5))
    dropped = {}

    def watch(name):
        return lambda module, inputs, output: dropped.update({name: (output == 0).double().mean().item()})

    for number, block in enumerate(model.layers):
        for name in ("attention", "feed_forward"):
            block.get_submodule(name).register_forward_hook(watch(f"{name} {number}"))
    model.layers[0].register_forward_pre_hook(lambda module, inputs: watch("embedding")(module, inputs, inputs[0]))
    model(text(5, 9))
    assert len(dropped) == 5
    for name, share in dropped.items():
        assert 0.4 < share < 0.6, name


# --- embeddings and initialisation ------------------------------------------------------------------------------------


def test_a_tied_output_layer_is_the_embedding_and_trains_with_it():
    model = Decoder(config())
    assert model.logits.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names
    assert "logits.weight" not in names
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens).logsumexp(-1).sum().backward()
    # tokens that were not read learn through the output layer
    assert bool((model.embedding.weight.grad[4:] != 0).any(-1).all())
    untied = Decoder(config(tied=False))
    untied(tokens).logsumexp(-1).sum().backward()
    assert_zero(untied.embedding.weight.grad[4:])
    model = model.double()
    assert model.logits.weight is model.embedding.weight
    both = EncoderDecoder(config())
    assert both.encoder.embedding.weight is both.decoder.embedding.weight is both.decoder.logits.weight


def test_first_weights_have_the_sizes_that_are_promised():
    model = Decoder(
        config(vocab_size=401, dim=120, layers=8, hidden_dim=200, positions="learned", bias=True, tied=False)
    )
    last = 0.02 / math.sqrt(2 * 8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert_zero(parameter, name)
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            expected = last if name.endswith("output.weight") else 0.02
            assert abs(float(parameter.detach().std()) / expected - 1) < 0.06, name
    scaled = Encoder(config(vocab_size=401, dim=120, embedding_scale=math.sqrt(120), padding_id=7))
    vectors = scaled.embedding(torch.arange(401)[None]).detach()
    assert_zero(vectors[0, 7])
    assert abs(float(vectors.std()) - 1) < 0.02


def test_padding_tokens_are_zero_vectors_and_get_no_gradient():
    model = Encoder(config(padding_id=0))
    model(torch.tensor([[1, 2, 0]])).sum().backward()
    assert_zero(model.embedding.weight[0])
    assert_zero(model.embedding.weight.grad[0])


# --- masks of a call --------------------------------------------------------------------------------------------------

POSITIONS = ["rotary", "alibi", None]
"""Positions by distance: a document packed behind another one is read as if it stood alone."""


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_packed_documents_are_read_as_if_each_stood_alone(kind, positions):
    model = spread(kind(config(positions=positions, kv_heads=2)))
    first, second = text(1, 5), text(1, 7)
    packed = model(torch.cat([first, second], dim=1), mask=Document.from_lengths([5, 7]))
    assert_close(packed, torch.cat([model(first), model(second)], dim=1))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", *POSITIONS])
def test_a_padded_text_is_read_as_if_it_stood_alone(kind, positions):
    model = spread(kind(config(positions=positions)))
    short, long = text(1, 4), text(1, 9)
    batch = torch.cat([F.pad(short, (0, 5)), long])
    states = model(batch, mask=Padding([4, 9]))
    assert_close(states[:1, :4], model(short))
    assert_close(states[1:], model(long))


def test_a_padded_source_is_translated_as_if_it_stood_alone():
    model = spread(EncoderDecoder(preset("original")))
    short, long, target = text(1, 4), text(1, 9), text(2, 6)
    logits = model(torch.cat([F.pad(short, (0, 5)), long]), target, source_mask=Padding([4, 9]))
    assert_close(logits, torch.cat([model(short, target[:1]), model(long, target[1:])]))
    # the target is read from left to right
    changed = target.clone()
    changed[:, 4] = changed[:, 4] % (VOCAB - 1) + 1
    other = model(torch.cat([F.pad(short, (0, 5)), long]), changed, source_mask=Padding([4, 9]))
    assert_zero((other - logits)[:, :4])
    assert bool((other != logits)[:, 4:].any(-1).all())


def test_rows_of_a_batch_do_not_see_each_other():
    model = spread(Decoder(config()))
    tokens = text(3, 7)
    changed = tokens.clone()
    changed[1] = tokens[1].flip(0)
    assert_close(model(changed)[[0, 2]], model(tokens)[[0, 2]])


def test_what_is_never_looked_at_is_refused():
    tokens, states = text(1, 3), torch.randn(1, 3, 24)
    with pytest.raises(ValueError, match="Block: a context was given"):
        Decoder(config())(tokens, context=states)
    with pytest.raises(ValueError, match="Block: this block has cross-attention and needs a context"):
        Decoder(config(), cross=True)(tokens)
    with pytest.raises(ValueError, match="Encoder: segments were given, but the configuration has segments=0"):
        Encoder(config())(tokens, segments=tokens)
    with pytest.raises(TypeError, match="nope"):
        Decoder(config())(tokens, nope=1)


def test_tokens_that_the_model_cannot_read_are_refused():
    model = Decoder(config())
    with pytest.raises(ValueError, match="Decoder: 14 tokens are more than context_length=13; shorten the text"):
        model(text(1, 14))
    with pytest.raises(ValueError, match="Decoder: tokens must be 0 to 28, got 29; is this the tokenizer"):
        model(torch.tensor([[1, 29]]))
    assert model(text(1, 13)).shape == (1, 13, VOCAB)


# --- heads on an encoder ----------------------------------------------------------------------------------------------


def test_a_classifier_and_a_masked_language_model_by_hand():
    encoder = Encoder(preset("bert"))
    tokens, padding = text(2, 7), Padding([7, 4])
    classifier = spread(Classifier(encoder, 5))
    pooled = torch.tanh(encoder(tokens, mask=padding)[:, 0] @ classifier.pool.weight.T + classifier.pool.bias)
    assert_close(classifier(tokens, mask=padding), pooled @ classifier.classes.weight.T + classifier.classes.bias)
    words = spread(MaskedLanguageModel(encoder))
    x = encoder(tokens, mask=padding) @ words.transform.weight.T + words.transform.bias
    x = F.layer_norm(x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), (24,), words.norm.weight, words.norm.bias, 1e-12)
    assert_close(words(tokens, mask=padding), x @ encoder.embedding.weight.T + words.constant)


# --- configuration ----------------------------------------------------------------------------------------------------

SCALINGS = {
    "linear": ({"factor": 2.0}, LinearScaling(2.0)),
    "dynamic": ({"factor": 2.0, "original_context": 8}, DynamicScaling(2.0, 8)),
    "yarn": ({"factor": 2.0, "original_context": 8}, YarnScaling(2.0, 8)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8},
        Llama3Scaling(8.0, 1.0, 4.0, 8),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_a_rotary_scaling_is_plain_data(kind):
    arguments, scaling = SCALINGS[kind]
    given = config(rotary_scaling={"kind": kind, **arguments})
    read = ModelConfig.from_dict(json.loads(json.dumps(given.to_dict())))
    assert read == given
    rotary = Decoder(read).layers[0].attention.rotary
    assert isinstance(rotary, Rotary)
    assert rotary.scaling == scaling
    assert read.rotary_scaling["kind"] == kind  # building a model takes nothing out of it


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_survives_json(name):
    given = ModelConfig.preset(name)
    assert ModelConfig.from_dict(json.loads(json.dumps(given.to_dict()))) == given


REFUSED = {
    "no layers": ({"layers": 0}, "layers must be a whole number, 1 or more, got 0"),
    "half a head": ({"heads": 1.5}, "heads must be a whole number, 1 or more, got 1.5"),
    "a flag for a size": ({"dim": True}, "dim must be a whole number, 1 or more, got True"),
    "heads that do not divide dim": ({"heads": 5}, "heads must divide dim, got heads=5, dim=24"),
    "other positions": ({"positions": "absolute"}, "positions must be learned, sinusoidal, rotary, alibi or None"),
    "another activation": ({"activation": "tanh"}, "activation must be one of relu, .*, got 'tanh'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_is_refused(name):
    changes, says = REFUSED[name]
    with pytest.raises(ValueError, match=f"ModelConfig: {says}"):
        config(**changes)


def test_what_only_the_layers_can_judge_is_refused_when_the_model_is_built():
    for changes, says in (
        ({"kv_heads": 4}, "kv_heads must divide heads, got kv_heads=4, heads=6"),
        ({"norm": "batch"}, "norm must be 'layer' or 'rms', got 'batch'"),
        ({"window": 0}, "Window: w must be a whole number, 1 or more, got 0"),
        ({"attention_dropout": 1.0}, "dropout must be a probability"),
        ({"padding_id": 29}, "padding_id must be 0 to 28, got 29"),
        ({"rotary_scaling": {"factor": 2.0}}, "kind must be one of linear, dynamic, yarn, llama3, got None"),
        ({"rotary_scaling": {"kind": "ntk"}}, "kind must be one of linear, dynamic, yarn, llama3, got 'ntk'"),
    ):
        with pytest.raises(ValueError, match=says):
            Decoder(config(**changes))


def test_unknown_presets_and_fields_are_named():
    with pytest.raises(ValueError, match="no preset named 'gpt9'; there are: original, bert, gpt2, llama"):
        ModelConfig.preset("gpt9")
    with pytest.raises(TypeError, match="n_layer"):
        ModelConfig.preset("gpt2", n_layer=3)
    with pytest.raises(ValueError, match="unknown fields experts, router; written by a newer regard"):
        ModelConfig.from_dict({**config().to_dict(), "router": 1, "experts": 2})


def test_head_dim_frees_heads_from_dividing_dim():
    model = Decoder(config(heads=5, head_dim=4))
    assert model.layers[0].attention.output.weight.shape == (24, 20)


def test_the_masks_of_decoders_and_encoders():
    assert isinstance(Decoder(config()).layers[0].attention.mask, Causal)
    assert Encoder(config()).layers[0].attention.mask is None
    assert isinstance(Encoder(config(window=2)).layers[0].attention.mask, Window)


# --- 12: they learn ---------------------------------------------------------------------------------------------------


def learn(model, loss, steps, rate=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    return float(loss().detach())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_learns_one_batch_by_heart(name):
    model = Decoder(preset(name, dropout=0.0, attention_dropout=0.0))
    tokens = text(4, 9)

    def loss():
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    assert abs(float(loss().detach()) - math.log(VOCAB)) < 0.2  # at first, every token is as likely as any other
    # the second token of a row follows from the first; where two rows begin alike it cannot be known
    assert learn(model, loss, 120, 1e-2) < 0.1


def test_a_classifier_learns_which_of_three_tokens_a_text_holds():
    model = Classifier(Encoder(config(norm="layer", positions="learned", bias=True, layers=1)), 3)
    texts, answers = torch.randint(4, VOCAB, (128, 8)), torch.arange(128) % 3
    texts[:, 0] = 0
    texts[torch.arange(128), torch.randint(1, 7, (128,))] = answers + 1
    padding = Padding([7] * 64)
    assert learn(model, lambda: F.cross_entropy(model(texts[:64], mask=padding), answers[:64]), 40, 1e-2) < 0.05
    right = model(texts[64:], mask=padding).argmax(-1) == answers[64:]
    assert float(right.double().mean()) > 0.9  # texts that it has not seen


@pytest.mark.parametrize("model", [Encoder, Decoder, EncoderDecoder])
def test_a_model_is_made_from_a_configuration_and_says_how_to_make_one(model):
    for wrong, says in (
        ({"dim": 8}, r"got dict; make one: ModelConfig.from_dict\(config\)"),
        ("gpt2", r"got 'gpt2'; make one: ModelConfig.preset\('gpt2'\)"),
        (None, "got None"),
        (8, "got 8"),
        (type("LlamaConfig", (), {"model_type": "llama"})(), r"got LlamaConfig; .*layouts.from_transformers\(model\)"),
    ):
        with pytest.raises(TypeError, match=f"{model.__name__}: config must be a ModelConfig, {says}"):
            model(wrong)

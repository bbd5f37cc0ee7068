"""captum: attributions to attention layers, outputs and weights of them, and to the tokens through them."""

import pytest

from test_huggingface import CAUSAL, ENCODERS, pair, some_tokens

attr = pytest.importorskip("captum.attr", reason="captum is not installed")

LLAMA, BERT = CAUSAL["Llama"], ENCODERS["BERT"]


def layers_of(model):
    """Of a model, its embedding and the module that computes attention in the second layer."""
    if hasattr(model, "encoder"):
        return model.embeddings.word_embeddings, model.encoder.layer[1].attention.self
    return model.model.embed_tokens, model.model.layers[1].self_attn


def chosen(model):
    """One number a row of the batch."""

    def forward(tokens):
        output = model(tokens, output_attentions=True)
        return (output.logits if "logits" in output else output.last_hidden_state)[:, -1, 7]

    return forward


every_family = pytest.mark.parametrize("family", [LLAMA, BERT], ids=lambda family: family[0])


@every_family
def test_gradient_times_activation_of_an_attention_layer(family, same):
    tokens = some_tokens()
    expected, actual = (
        attr.LayerGradientXActivation(chosen(model), layers_of(model)[1]).attribute(tokens) for model in pair(*family)
    )
    assert len(actual) == 2  # the output and the weights
    same("LayerGradientXActivation, output", actual[0], expected[0])
    same("LayerGradientXActivation, weights", actual[1], expected[1])


@every_family
def test_conductance_of_an_attention_layer(family, same):
    tokens, other = some_tokens(), some_tokens()
    found = []
    for model in reversed(pair(*family)):
        embedding, attention = layers_of(model)

        def from_vectors(vectors, model=model):
            output = model(inputs_embeds=vectors, output_attentions=True)
            return (output.logits if "logits" in output else output.last_hidden_state)[:, -1, 7]

        conductance = attr.LayerConductance(from_vectors, attention)
        found.append(conductance.attribute(embedding(tokens), baselines=embedding(other), n_steps=8))
    assert len(found[0]) == len(found[1]) == 2
    same("LayerConductance, output", found[0][0], found[1][0])
    same("LayerConductance, weights", found[0][1], found[1][1])


@every_family
def test_integrated_gradients_through_attention(family, same):
    tokens, other = some_tokens(), some_tokens()
    expected, actual = (
        attr.LayerIntegratedGradients(chosen(model), layers_of(model)[0]).attribute(tokens, other, n_steps=8)
        for model in pair(*family)
    )
    same("LayerIntegratedGradients of the embedding", actual, expected)

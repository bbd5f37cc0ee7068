"""nnsight: values inside a model, read and changed while it is traced."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

nnsight = pytest.importorskip("nnsight", reason="nnsight is not installed")


def test_what_attention_returns_is_eagers(same):
    tokens = some_tokens()
    seen = []
    for model in reversed(pair(*CAUSAL["Llama"])):
        traced = nnsight.NNsight(model)
        with traced.trace(tokens):
            inside = traced.model.layers[1].self_attn.output[0].save()
            logits = traced.output.logits.save()
        seen.append((inside, logits))
    same("trace, output of attention", seen[0][0], seen[1][0])
    same("trace, logits", seen[0][1], seen[1][1])


def test_what_follows_from_a_change_of_attention_is_eagers(same):
    tokens = some_tokens()
    seen = []
    for model in reversed(pair(*CAUSAL["Llama"])):
        traced = nnsight.NNsight(model)
        with traced.trace(tokens):
            traced.model.layers[0].self_attn.output[0][:, 4] = 0.0
            logits = traced.output.logits.save()
        assert not torch.equal(logits, model(tokens).logits)
        seen.append(logits)
    same("trace with a change, logits", *seen)


def test_the_call_of_attention_inside_a_layer_is_eagers(same):
    tokens = some_tokens()
    seen = []
    for model in reversed(pair(*CAUSAL["Llama"])):
        traced = nnsight.NNsight(model)
        with traced.trace(tokens, output_attentions=True):
            output, weights = traced.model.layers[1].self_attn.source.attention_interface_1.output
            output, weights = output.save(), weights.save()
        seen.append((output, weights))
    same("source of a layer, output of attention", seen[0][0], seen[1][0])
    same("source of a layer, weights", seen[0][1], seen[1][1])

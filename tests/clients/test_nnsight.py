"""nnsight: values inside a model, read and changed while it is traced."""

import pytest

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

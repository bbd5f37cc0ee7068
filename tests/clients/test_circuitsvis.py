"""circuitsvis: attention patterns, whose page holds the weights as numbers."""

import json
import re

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

attention = pytest.importorskip("circuitsvis.attention", reason="circuitsvis is not installed")


def drawn(page) -> list:
    (found,) = re.findall(r'"attention": (\[[-\d\s.,e\[\]]*\])', page.local_src)
    return json.loads(found)


@torch.no_grad()
def test_a_page_holds_eagers_weights(same):
    tokens = some_tokens(batch=1)
    words = [str(int(token)) for token in tokens[0]]
    expected, actual = (model(tokens, output_attentions=True).attentions for model in pair(*CAUSAL["Llama"]))
    for ours, theirs in zip(actual, expected, strict=True):
        same("attention_heads", *(drawn(attention.attention_heads(layer[0], words)) for layer in (ours, theirs)))
        same("attention_pattern", *(drawn(attention.attention_pattern(words, layer[0, 2])) for layer in (ours, theirs)))

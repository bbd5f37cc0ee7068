"""attnview: a layer's heads as nested numbers."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

attnview = pytest.importorskip("attnview", reason="attnview is not installed")


@torch.no_grad()
def test_a_pattern_is_eagers(same):
    tokens = some_tokens(batch=1)
    expected, actual = (model(tokens, output_attentions=True).attentions for model in pair(*CAUSAL["Llama"]))
    for ours, theirs in zip(actual, expected, strict=True):
        patterns = [attnview.AttentionPattern.from_data(layer[0]) for layer in (ours, theirs)]
        same("pattern of a layer", *(pattern.values for pattern in patterns))
    assert attnview.render_html(actual[0][0]).count("<html") == 1

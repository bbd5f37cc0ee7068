"""einops: axes of weights by name."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

einops = pytest.importorskip("einops", reason="einops is not installed")


@torch.no_grad()
def test_axes_by_name(same):
    tokens = some_tokens()
    expected, actual = (model(tokens, output_attentions=True).attentions for model in pair(*CAUSAL["Llama"]))

    def both(what, compute):
        same(what, compute(actual), compute(expected))

    both("rearrange", lambda layers: einops.rearrange(layers[0], "b (g h) q k -> b q k g h", g=2))
    both("reduce", lambda layers: einops.reduce(layers[0], "b h q k -> b k", "mean"))
    both("einsum", lambda layers: einops.einsum(layers[1], layers[0], "b h q i, b h i k -> b h q k"))
    both("pack", lambda layers: einops.pack(list(layers), "b * q k")[0])

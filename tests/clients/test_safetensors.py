"""safetensors: weights saved from what the model returned, and read again."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

saving = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@torch.no_grad()
def test_saved_weights_are_eagers(tmp_path, same):
    tokens = some_tokens()
    expected, actual = (model(tokens, output_attentions=True).attentions for model in pair(*CAUSAL["GPT-2"]))
    saving.save_file({str(layer): weights for layer, weights in enumerate(actual)}, tmp_path / "weights")
    read = saving.load_file(tmp_path / "weights")
    whole = saving.load(saving.save({"last": actual[-1]}))
    for layer, weights in enumerate(expected):
        same("save_file", read[str(layer)], weights)
    same("save", whole["last"], expected[-1])

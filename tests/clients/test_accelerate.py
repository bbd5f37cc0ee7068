"""accelerate: hooks that move what a layer is given and returns, and Accelerator.prepare."""

import pytest
import torch

from regard.huggingface import LazyWeights
from test_huggingface import CAUSAL, pair, some_tokens

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


def used(model, tokens):
    with torch.no_grad():
        return model(tokens, output_attentions=True)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_a_model_with_hooks_on_every_module(name, same):
    tokens = some_tokens()
    theirs, ours = pair(*CAUSAL[name])
    for model in (theirs, ours):
        accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
        accelerate.hooks.add_hook_to_module(model, accelerate.hooks.AlignDevicesHook(io_same_device=True))
        for part in model.modules():
            accelerate.hooks.add_hook_to_module(
                part, accelerate.hooks.AlignDevicesHook("cpu", io_same_device=True), append=True
            )
    expected, actual = used(theirs, tokens), used(ours, tokens)
    assert all(isinstance(layer, LazyWeights) for layer in actual.attentions)  # moving them made no numbers
    same("dispatch_model, logits", actual.logits, expected.logits)
    same("dispatch_model, attentions", actual.attentions, expected.attentions)


def test_weights_offloaded_to_the_cpu_and_to_a_folder(tmp_path, same):
    tokens = some_tokens()
    theirs, ours = pair(*CAUSAL["Llama"])
    expected = used(theirs, tokens)
    accelerate.disk_offload(ours, tmp_path, execution_device="cpu", offload_buffers=True)
    same("disk_offload, logits", used(ours, tokens).logits, expected.logits)


def test_prepared_steps_of_training(same):
    tokens = some_tokens(batch=8)
    seen = []
    for model in reversed(pair(*CAUSAL["Llama"])):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer, rows = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(tokens, 2))
        losses = []
        for row in rows:
            with accelerator.accumulate(model):
                output = model(row, labels=row, output_attentions=True)
                loss = output.loss + 0.1 * sum(layer.square().mean() for layer in output.attentions)
                accelerator.backward(loss)
                losses.append((loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1.0) or 0.0)))
                optimizer.step()
                optimizer.zero_grad()
        seen.append(losses)
    same("Accelerator.prepare, loss with attentions", *seen)

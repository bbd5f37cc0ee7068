"""peft: LoRA trained by transformers' Trainer, and merged."""

import copy

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from test_huggingface import CAUSAL, pair, real_tokens, some_tokens

peft = pytest.importorskip("peft", reason="peft is not installed")


class Losses(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            self.kept.append((logs["loss"], logs["grad_norm"]))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "projections"), [("GPT-2", ["c_attn"]), ("Llama", ["q_proj", "k_proj", "v_proj"])], ids=["GPT-2", "Llama"]
)
def test_training_of_low_rank_weights_is_eagers(name, projections, checkpointing, tmp_path, same):
    real = real_tokens("right").repeat(4, 1)
    tokens = some_tokens(batch=8).masked_fill(~real, 0)
    texts = [
        {"input_ids": row, "attention_mask": mask.long(), "labels": row.masked_fill(~mask, -100)}
        for row, mask in zip(tokens, real, strict=True)
    ]
    seen = []
    for model in reversed(pair(*CAUSAL[name])):
        for part in model.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.0
        if hasattr(model.config, "attn_pdrop"):
            model.config.attn_pdrop = 0.0
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=projections, task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(copy.deepcopy(model), lora)
        losses = Losses()
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-3, seed=5,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        Trainer(model=adapted, args=arguments, train_dataset=texts, callbacks=[losses]).train()
        assert len(losses.kept) == 6
        merged = adapted.eval().merge_and_unload()
        with torch.no_grad():
            logits = merged(input_ids=tokens, attention_mask=real.long()).logits[real]
        seen.append((losses.kept, logits))
    (losses, logits), (expected_losses, expected_logits) = seen
    same("loss and gradient norm of 6 steps", losses, expected_losses)
    same("logits of the merged model", logits, expected_logits)

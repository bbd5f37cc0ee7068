"""trl: supervised fine-tuning and preferences by its trainers."""

import copy

import pytest
from transformers import TrainerCallback

from test_huggingface import CAUSAL, pair

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets, which trl needs, is not installed")

TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
STEPS = {
    "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 5, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False,
}  # fmt: skip


class Losses(TrainerCallback):
    def __init__(self):
        self.kept = []

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in logs:
            self.kept.append((logs["loss"], logs["grad_norm"]))


def losses(trainer_of) -> list[list[tuple[float, float]]]:
    """What a trainer logs, by regard and by "eager"."""
    kind, sizes = CAUSAL["Llama"]
    found = []
    for model in reversed(pair(kind, {**sizes, **TOKENS})):
        kept = Losses()
        trainer = trainer_of(model)
        trainer.add_callback(kept)
        trainer.train()
        assert len(kept.kept) == STEPS["max_steps"]
        found.append(kept.kept)
    return found


def test_supervised_fine_tuning_is_eagers(tokenizer, tmp_path, same):
    texts = datasets.Dataset.from_dict({"text": ["the cat sat on a mat", "a dog runs far", "moon shines"] * 4})

    def trainer_of(model):
        arguments = trl.SFTConfig(output_dir=str(tmp_path), **STEPS)
        return trl.SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer)

    same("SFTTrainer, loss and gradient norm of 4 steps", *losses(trainer_of))


def test_learning_preferences_is_eagers(tokenizer, tmp_path, same):
    choices = datasets.Dataset.from_dict(
        {
            "prompt": ["the cat sat", "a dog runs far"] * 4,
            "chosen": [" on a mat", " over the sea"] * 4,
            "rejected": [" moon", " cold old mat cat"] * 4,
        }
    )

    def trainer_of(model):
        arguments = trl.DPOConfig(output_dir=str(tmp_path), **STEPS)
        return trl.DPOTrainer(
            model, copy.deepcopy(model), args=arguments, train_dataset=choices, processing_class=tokenizer
        )

    same("DPOTrainer, loss and gradient norm of 4 steps", *losses(trainer_of))

"""The model card: what a model was trained on, how, and how good it is, as Markdown."""

import json
import platform
from pathlib import Path

import torch

from regard.training.checkpoint import Model
from regard.training.data import Examples
from regard.training.settings import Settings, settings_alone
from regard.training.task import Measured, Task, describe


def card(
    measures: Measured,
    model: Model,
    data: Examples,
    settings: Settings,
    task: Task,
    *,
    command: str,
    seconds: float,
    begun_from: Path | None = None,
) -> str:
    """The model card: data, exact command, seed, steps, time and what was measured, as Markdown.

    Args:
        begun_from: the folder of the model that training began with; its card is repeated.
    """
    epochs = data.epochs(settings.steps * settings.batch_size)
    config = {name: value for name, value in model.config.to_dict().items() if value is not None}
    rows = {
        "configuration": f"`{json.dumps(config)}`",
        **task.card(),
        "command": f"`{command}`",
        "settings": f"`{json.dumps(settings_alone(settings))}`",
        "trained on": f"{round(epochs * data.size):,} tokens, {epochs:.2f} epochs of {data.size:,}",
        "time": f"{seconds / 60:.0f} minutes, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        **measures.rows(),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    before = ""
    if begun_from is not None:
        old = begun_from / "card.md"
        told = old.read_text(encoding="utf-8") if old.is_file() else "It has no card."
        rows_before = "\n".join(line for line in told.splitlines() if line.startswith("|")) or told
        before = f"\n## The model that training began with\n\n{rows_before}\n"
    return f"""# Model card

{describe(model).capitalize()} of {sum(p.numel() for p in model.parameters()):,} parameters.

| | |
|---|---|
{table}

The weights are stored in float16 and measured as stored. The licence of the texts is that of their authors.
{task.remarks()}
{before}"""

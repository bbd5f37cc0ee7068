"""The model card: what a model was trained on, how, and how good it is, as Markdown."""

import json
import platform
from pathlib import Path

import torch

from regard.models import Decoder
from regard.training.corpus import Corpus
from regard.training.data import Packed
from regard.training.measures import Measures
from regard.training.settings import Settings, settings_alone


def card(
    measures: Measures,
    model: Decoder,
    data: Packed,
    settings: Settings,
    corpus: Corpus,
    *,
    command: str,
    seconds: float,
    begun_from: Path | None = None,
) -> str:
    """The model card: data, exact command, seed, steps, time and held-out loss, as Markdown.

    Args:
        begun_from: the folder of the model that training began with; its card is repeated.
    """
    read = sum(len(file.text.encode()) for file in corpus.training)
    tokens = settings.steps * settings.batch_size * data.context_length
    added = f"; {data.repeats:.0%} of the rows are random tokens, repeated, which teach copying" if data.repeats else ""
    config = {name: value for name, value in model.config.to_dict().items() if value is not None}
    bits, each, joined = measures.bits_per_byte, measures.xz_each, measures.xz_joined
    rows = {
        "configuration": f"`{json.dumps(config)}`",
        "data": f"{len(corpus.training):,} files, {read:,} bytes, {data.size:,} tokens{added}",
        "digest of the data": f"`{corpus.digest()}` (Python {platform.python_version()})",
        "command": f"`{command}`",
        "settings": f"`{json.dumps(settings_alone(settings))}`",
        "trained on": f"{tokens:,} tokens, {tokens / data.size:.2f} epochs",
        "time": f"{seconds / 60:.0f} minutes, {torch.get_num_threads()} thread(s), torch {torch.__version__}",
        "held-out bits per byte": f"{bits:.4f}",
        "xz -9e on the same files": f"{each:.4f} each by itself (the model needs {bits / each:.3f} of that), "
        f"{joined:.4f} joined ({bits / joined:.3f})",
        "random tokens, then again": f"loss {measures.copy_first:.3f}, then {measures.copy_second:.3f} nats",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    held_out = "\n".join(f"- {file.path} ({len(file.text.encode()):,} bytes)" for file in corpus.held_out)
    before = ""
    if begun_from is not None:
        old = begun_from / "card.md"
        told = old.read_text(encoding="utf-8") if old.is_file() else "It has no card."
        rows_before = "\n".join(line for line in told.splitlines() if line.startswith("|")) or told
        before = f"\n## The model that training began with\n\n{rows_before}\n"
    return f"""# Model card

A decoder of {sum(p.numel() for p in model.parameters()):,} parameters.

| | |
|---|---|
{table}

The weights are stored in float16 and measured as stored. The licence of the texts is that of their authors. The model
writes what looks like these texts, and knows nothing else.
{before}
## Held-out files

{held_out}
"""

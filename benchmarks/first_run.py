"""The run of the guide's chapter on training: `regard train` on this repository's source, with three learning rates.

    python benchmarks/first_run.py [--steps 300] [--output benchmarks/results/first_run.json]

Told are, of every fifth step, loss (a mean over the five), learning rate and gradient norm, and at the end the bits per
byte on the held-out files, and the seconds of the processor that all of it took, tokenizer and measurement included, on
one thread. The run depends on the source as it is, and on nothing random. The chapter is docs/guide/15-training.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from regard import bench
from regard.training import run
from regard.training.metrics import read_metrics
from regard.training.report import Listener
from regard.training.settings import Recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "first_run.json"
PEAKS = (3e-3, 3e-4, 3e-2)
EVERY = 5
SIZES: dict[str, Any] = {"dim": 128, "layers": 4, "heads": 4, "context_length": 256, "vocab_size": 2048}


def train(learning_rate: float, steps: int, data: Path) -> dict[str, Any]:
    """One run, and its course."""
    recipe = Recipe(
        data=str(data), pattern="**/*.py", steps=steps, learning_rate=learning_rate, save_minutes=None,
        threads=1, **SIZES,
    )  # fmt: skip
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        measures = run.begin(Path(folder) / "run", recipe, command="benchmarks/first_run.py", listener=Listener())
        lines = read_metrics(Path(folder) / "run")
    took = time.process_time() - began
    assert measures is not None
    groups = [lines[at : at + EVERY] for at in range(0, len(lines) - EVERY + 1, EVERY)]
    return {
        "learning_rate": learning_rate,
        "bits_per_byte": round(measures.bits_per_byte, 3),
        "xz_bits_per_byte": round(measures.xz_each, 3),
        "processor_seconds": round(took, 1),
        "step": [group[-1]["step"] for group in groups],
        "loss": [round(statistics.mean(line["loss"] for line in group), 3) for group in groups],
        "rate": [round(group[-1]["learning_rate"], 6) for group in groups],
        "gradient_norm": [round(statistics.mean(line["gradient_norm"] for line in group), 3) for group in groups],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--data", type=Path, default=ROOT / "src")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    runs = []
    for learning_rate in PEAKS:
        runs.append(train(learning_rate, options.steps, options.data))
        print(learning_rate, runs[-1]["loss"][-1], runs[-1]["bits_per_byte"], runs[-1]["processor_seconds"], flush=True)
    said = {"machine": bench.machine(), "steps": options.steps, "sizes": SIZES, "runs": runs}
    options.output.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""A classifier of real texts: which package of Python's standard library a docstring is from.

    python benchmarks/sections.py [--steps 600] [--output benchmarks/results/sections.json]

This is `regard train --task classify --steps 600 --threads 1`: the texts are those of the Python that runs (PSF
licence), the eight packages those with the most docstrings, and one docstring in ten of each is held out. Told are the
confusion of labels on these, accuracy and F1, the accuracy of always telling the most frequent label, and the seconds
of the processor that all of it took, vocabulary and measurement included. The page is docs/models-at-work.md.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from regard import bench
from regard.training import run
from regard.training.classifying import Confusion
from regard.training.report import Listener, Report
from regard.training.settings import Recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sections.json"
SIZES: dict[str, Any] = {}
"""None but the usual ones."""


class Told(Listener):
    """Prints what is told, and keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)

    def step(self, report: Report, settings: Recipe) -> None:
        if report.step % 50 == 0:
            print(f"step {report.step}  loss {report.loss:.3f}  {report.seconds:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    recipe = Recipe.of("classify", data=options.data, steps=options.steps, threads=1, **SIZES)
    told, began = Told(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        found = run.begin(Path(folder) / "run", recipe, command="benchmarks/sections.py", listener=told)
    took = time.process_time() - began
    assert isinstance(found, Confusion)
    print(found)
    said = {
        "machine": bench.machine(),
        "python": platform.python_version(),
        "steps": options.steps,
        "processor_seconds": round(took),
        "texts": told.notes[0],
        "labels": list(found.labels),
        "counts": found.counts.tolist(),
        "accuracy": round(found.accuracy, 4),
        "usual": round(found.usual, 4),
        "f1": round(found.f1, 4),
    }
    options.output.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

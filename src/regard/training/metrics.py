"""Metrics of a run as JSON lines: one object for each step, which a notebook or a plotting tool can read.

    {"step": 200, "loss": 5.1, "learning_rate": 0.0029, "gradient_norm": 0.8, "tokens_per_second": 9500, "seconds": 86}

A run that goes on from its last save drops the lines of steps that were lost, so that every step stands there once.
"""

import json
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from regard.storage import cannot_write, replacing

NAME = "metrics.jsonl"


class Metrics:
    """The file `metrics.jsonl` of a folder, open for the steps after `step`.

    Raises:
        OSError: the file cannot be written, as on a full disk.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / NAME
        self._file: FileIO | None = None
        kept = [line for line in read_metrics(folder) if line["step"] <= step]
        with replacing(self.path) as new, new.open("w", encoding="utf-8") as file:
            file.writelines(_line(line) for line in kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line, which readers see at once."""
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            rest = memoryview(_line(line).encode())
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise cannot_write(self.path, error) from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`; what was not written to its end is left out."""
    path = folder / NAME
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(dict(line)) + "\n"

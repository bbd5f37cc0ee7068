"""The course of a run for TensorBoard: the numbers of `metrics.jsonl`, and the texts that the model writes on the way.

tensorboard --logdir runs
"""

from dataclasses import asdict
from pathlib import Path

from regard.extras import need
from regard.training.report import Report

FOLDER = "tensorboard"


class Board:
    """Writes events into `tensorboard` in a run's folder.

    Args:
        step: the steps before; what was written after that, by a run that was killed, no longer counts.
    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        need("--tensorboard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / FOLDER), purge_step=step + 1)

    def step(self, report: Report) -> None:
        """The numbers of a step."""
        for name, number in asdict(report).items():
            if name not in ("step", "seconds") and number is not None:
                self._writer.add_scalar(name, number, report.step)

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote after so many steps."""
        self._writer.add_text("sample", f"```\n{text}\n```", step)

    def close(self) -> None:
        self._writer.close()

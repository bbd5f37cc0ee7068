"""What `regard train` shows while it works: bars in a terminal, plain lines elsewhere."""

import time
from typing import Any

from rich.console import Console

from regard.cli.console import progress_bar, tell
from regard.training.report import Listener, Report
from regard.training.settings import Recipe

LINE_EVERY = 30
"""Seconds between two lines where there is no terminal, and so no bar."""


class Screen(Listener):
    """Bars in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Any = None
        self._task: Any = None
        self._work = ""
        self._smooth = Smooth()
        self._first: tuple[int, float] | None = None  # step and seconds where this process began
        self._line = time.monotonic()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def note(self, text: str) -> None:
        self._close()
        tell(self.console, text)

    def progress(self, work: str, done: int, total: int) -> None:
        self._show(work, done, total, "")

    def sample(self, step: int, text: str) -> None:
        self._close()
        tell(self.console, f"after step {step:,}, the model writes:\n{text}")

    def step(self, report: Report, settings: Recipe) -> None:
        loss = self._smooth(report.loss)
        speed = f"loss {loss:.3f}  {report.tokens_per_second:,.0f} tokens/s"
        if report.held_out is not None:
            self.note(f"after step {report.step:,}, the loss on held-out texts is {report.held_out:.3f}")
        self._show("training", report.step, settings.steps, speed)
        step, seconds = self._first = self._first or (report.step, report.seconds)
        if not self.console.is_terminal:
            waited = time.monotonic() - self._line
            if waited > LINE_EVERY or report.step in (step, settings.steps):
                self._line = time.monotonic()
                pace = (report.seconds - seconds) / max(1, report.step - step)
                left = f"  {_time((settings.steps - report.step) * pace)} left" if pace else ""
                self.console.print(f"step {report.step:,} of {settings.steps:,}  {speed}{left}", soft_wrap=True)

    def _show(self, work: str, done: int, total: int, words: str) -> None:
        if not self.console.is_terminal:
            return
        if work != self._work:
            self._close()
            self._work, self._bar = work, progress_bar(self.console, "{task.fields[words]}")
            self._bar.start()
            self._task = self._bar.add_task(work, total=total, completed=done, words=words)
        self._bar.update(self._task, completed=done, total=total, words=words)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._work, self._bar = "", None


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Smooth:
    """A running mean of the loss, over about fifty steps."""

    def __init__(self) -> None:
        self.value: float | None = None

    def __call__(self, loss: float) -> float:
        self.value = loss if self.value is None else 0.98 * self.value + 0.02 * loss
        return self.value

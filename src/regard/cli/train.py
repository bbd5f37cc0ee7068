"""regard train: a language model from texts to a checkpoint."""

import contextlib
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from regard.cli.console import open_console, progress_bar, tell
from regard.extras import need
from regard.training.report import Listener, Report
from regard.training.settings import Recipe

DATA, MODEL, TRAINING, RUNNING = "What to learn from", "Size of the model", "How to train", "Saving and going on"

LINE_EVERY = 30
"""Seconds between two lines where there is no terminal, and so no bar."""


def train(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write the model in.")],
    task: Annotated[
        Literal["text", "translate", "masked", "classify"] | None,
        typer.Option(
            "--task",
            metavar="text|translate|masked|classify",
            rich_help_panel=DATA,
            help="What to learn: text, to go on with texts; translate, to write one text for another; masked, to "
            "foretell hidden tokens from both sides; classify, to tell the label of a text. Default: text.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="stdlib|FOLDER|FILE",
            rich_help_panel=DATA,
            help="A folder of texts, a text file, or the source of Python's standard library (30 MB). Default: stdlib.",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="GLOB",
            rich_help_panel=DATA,
            help="Which files of the folder, such as '**/*.md'. Default: every file that holds text.",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="COLUMN",
            rich_help_panel=DATA,
            help="What to read, to translate or to classify: a column of --data, a .csv, .tsv or .jsonl file. "
            "Default: its first; to classify, text.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="COLUMN",
            rich_help_panel=DATA,
            help="What to tell: a column of translations or labels. Default: the next column; to classify, label.",
        ),
    ] = None,
    repeats: Annotated[
        float | None,
        typer.Option(
            "--repeats",
            metavar="SHARE",
            rich_help_panel=DATA,
            help="Share of the sequences, 0 to 1, replaced by repeated random tokens, which teach copying. Default: 0.",
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME|FOLDER",
            rich_help_panel=MODEL,
            help="Start from this model: its weights, vocabulary and sizes.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            metavar="N",
            min=257,
            rich_help_panel=MODEL,
            help="Tokens in the vocabulary, at most. Default: 4096.",
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length",
            metavar="N",
            min=8,
            rich_help_panel=MODEL,
            help="Tokens that the model reads at once. Default: 512, or that of --from.",
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(
            "--dim",
            metavar="N",
            min=8,
            rich_help_panel=MODEL,
            help="Width of the model, a multiple of --heads. Default: 192.",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option("--layers", metavar="N", min=1, rich_help_panel=MODEL, help="Number of layers. Default: 6."),
    ] = None,
    heads: Annotated[
        int | None,
        typer.Option(
            "--heads", metavar="N", min=1, rich_help_panel=MODEL, help="Attention heads in each layer. Default: 6."
        ),
    ] = None,
    hidden_dim: Annotated[
        int | None,
        typer.Option(
            "--hidden-dim",
            metavar="N",
            min=1,
            rich_help_panel=MODEL,
            help="Width of the feed-forward layers. Default: 8/3 of --dim.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            rich_help_panel=TRAINING,
            help="Training steps, each one update of the weights. Default: 5000.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            min=1,
            rich_help_panel=TRAINING,
            help="Sequences of --context-length tokens in each step. Default: 8.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            metavar="RATE",
            rich_help_panel=TRAINING,
            help="Peak learning rate; it rises over the first 3% of the steps, then falls to 0. Default: 0.003.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            rich_help_panel=TRAINING,
            help="Decides the initial weights and the order of the texts. Default: 0.",
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "bf16", "no"] | None,
        typer.Option(
            "--precision",
            metavar="auto|bf16|no",
            rich_help_panel=TRAINING,
            help="bf16 multiplies in bfloat16, no in float32; auto is bf16 where the hardware has it. Default: auto.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="N", min=1, rich_help_panel=TRAINING, help="CPU threads. Default: one for each core."
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            "--save-every",
            metavar="STEPS",
            min=1,
            rich_help_panel=RUNNING,
            help="Save after this many steps. Default: 200.",
        ),
    ] = None,
    save_minutes: Annotated[
        float | None,
        typer.Option(
            "--save-minutes",
            metavar="MINUTES",
            rich_help_panel=RUNNING,
            help="Save after this time, too, however few the steps. Default: 5.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=RUNNING,
            help="Go on with the run in FOLDER, with the options that it was begun with. --steps may be raised.",
        ),
    ] = False,
) -> None:
    """Train a language model on texts of your own, or on Python's standard library.

    The model can be used while it is being trained. Ctrl-C finishes the step, saves and stops; --resume goes on.

    At the end the model is measured on texts held out from training (about one file in twenty, or the end of a single
    file), in bits per byte; what xz -9e needs for the same texts stands beside it. Loss, learning rate and speed of
    every step are in FOLDER/metrics.jsonl.

    [bold]Examples[/bold]

      regard train runs/mine --steps 200
      regard train runs/mine --resume --steps 400
      regard train runs/docs --data docs --dim 128 --heads 4 --steps 300
      regard train runs/sections --task classify --steps 300
      regard train runs/more --from stdlib --data docs --steps 100
      regard look README.md --model runs/mine
    """
    need("regard train", "train", "accelerate", "tokenizers")
    given = {name: value for name, value in context.params.items() if value is not None}
    del given["folder"], given["resume"]
    recipe = None if resume else Recipe.of(**given)

    from regard.training import run
    from regard.training.checkpoint import progress_header
    from regard.training.loop import PROGRESS
    from regard.training.stopping import exits_on_signals

    console = open_console(stderr=True)
    command = shlex.join(["regard", *sys.argv[1:]])
    with exits_on_signals():
        try:
            with Screen(console) as screen:
                if recipe is None:
                    measures = run.resume(folder, command=command, listener=screen, **given)
                else:
                    measures = run.begin(folder, recipe, command=command, listener=screen)
        except (KeyboardInterrupt, SystemExit):
            with contextlib.suppress(OSError):  # the terminal has gone
                tell(console, _how_to_go_on(folder))
            raise
    if measures is None:
        return
    tell(console, str(measures))
    header = progress_header(folder / PROGRESS)
    tell(console, f"written: {folder}; {_use(header, shlex.quote(str(folder)))}")


def _how_to_go_on(folder: Path) -> str:
    """What to say when a run was stopped."""
    from regard.training.checkpoint import progress_header
    from regard.training.loop import PROGRESS

    try:
        header = progress_header(folder / PROGRESS)
    except ValueError:
        return "stopped before the first step; nothing was saved"
    place = shlex.quote(str(folder))
    return (
        f"stopped; saved at step {header['step']:,} of {header['settings']['steps']:,}\n"
        f"go on: regard train {place} --resume; {_use(header, place)}"
    )


def _use(header: dict[str, Any], place: str) -> str:
    """What a model can be used for, by what it was trained for."""
    return {
        "text": f"look at it: regard look FILE --model {place}",
        "translate": f'use it: regard translate "TEXT" --model {place}',
        "masked": f"use it: regard embed --data FILE --nearest TEXT --model {place}",
        "classify": f'use it: regard classify "TEXT" --model {place}',
    }[header["settings"]["task"]]


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

    def step(self, report: Report, settings: Recipe) -> None:
        loss = self._smooth(report.loss)
        speed = f"loss {loss:.3f}  {report.tokens_per_second:,.0f} tokens/s"
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

"""regard train: a language model from texts to a checkpoint."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from regard.cli.console import open_console, tell
from regard.cli.screen import Screen
from regard.extras import need
from regard.training.settings import Recipe

DATA, MODEL, TRAINING, RUNNING = "What to learn from", "Size of the model", "How to train", "Saving and going on"


def train(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write the model in.")],
    task: Annotated[
        Literal["text", "translate", "masked", "classify"] | None,
        typer.Option(
            "--task",
            metavar="TASK",
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
            help="Sequences of --context-length tokens in each step, of all processes together. Default: 8.",
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate",
            metavar="N",
            min=1,
            rich_help_panel=TRAINING,
            help="Compute the sequences of a step in N parts, one after another: the same step in less memory. "
            "Default: 1.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            metavar="RATE",
            rich_help_panel=TRAINING,
            help="Peak learning rate. Default: 0.003.",
        ),
    ] = None,
    schedule: Annotated[
        Literal["linear", "cosine", "constant"] | None,
        typer.Option(
            "--schedule",
            metavar="SCHEDULE",
            rich_help_panel=TRAINING,
            help="How the learning rate falls: linear and cosine to 0 at the last step, constant not at all. "
            "Default: linear.",
        ),
    ] = None,
    warmup: Annotated[
        float | None,
        typer.Option(
            "--warmup",
            metavar="SHARE",
            rich_help_panel=TRAINING,
            help="Share of the steps, 0 to 1, over which the learning rate rises to its peak. Default: 0.03.",
        ),
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            "--clip",
            metavar="NORM",
            rich_help_panel=TRAINING,
            help="A gradient longer than this is scaled down to it. Default: 1.",
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
    context_parallel: Annotated[
        int | None,
        typer.Option(
            "--context-parallel",
            metavar="N",
            min=1,
            rich_help_panel=TRAINING,
            help="With several processes: N of them hold each sequence together, some of its tokens each, for "
            "sequences too long for one. Default: 1.",
        ),
    ] = None,
    shard: Annotated[
        bool | None,
        typer.Option(
            "--shard",
            rich_help_panel=TRAINING,
            help="With several processes: each holds a part of the weights (FSDP2) instead of all of them (DDP).",
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every",
            metavar="STEPS",
            min=1,
            rich_help_panel=RUNNING,
            help="Evaluate on held-out texts, and show what the model writes, after this many steps. Default: only at "
            "the end.",
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            "--patience",
            metavar="N",
            min=1,
            rich_help_panel=RUNNING,
            help="Stop early, after N evaluations without a lower loss on held-out texts, and keep the model that had "
            "the lowest. Default: do all steps.",
        ),
    ] = None,
    tensorboard: Annotated[
        bool | None,
        typer.Option(
            "--tensorboard", rich_help_panel=RUNNING, help="Write the run for TensorBoard, into FOLDER/tensorboard."
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
    every step are in FOLDER/metrics.jsonl, and drawn in FOLDER/training.svg.

    Several processes, started by torchrun or accelerate launch, share the sequences of each step and end with the
    weights that one process ends with, up to rounding. A run may go on with another number of them.

    [bold]Examples[/bold]

      regard train runs/mine --steps 200
      regard train runs/mine --resume --steps 400
      regard train runs/docs --data docs --dim 128 --heads 4 --steps 300
      regard train runs/sections --task classify --steps 300
      regard train runs/stops --evaluate-every 100 --patience 3
      regard train runs/more --from stdlib --data docs --steps 100
      torchrun --nproc-per-node 2 -m regard train runs/two --steps 200
      torchrun --nproc-per-node 2 -m regard train runs/two --resume --shard
      torchrun --nproc-per-node 2 -m regard train runs/far --context-parallel 2
      regard look README.md --model runs/mine
    """
    need("regard train", "train", "tokenizers")
    given = {name: value for name, value in context.params.items() if value is not None}
    del given["folder"], given["resume"]
    recipe = None if resume else Recipe.of(**given)

    from regard.training import run
    from regard.training.checkpoint import progress_header
    from regard.training.loop import PROGRESS
    from regard.training.processes import join, known, leave
    from regard.training.stopping import exits_on_signals

    console = open_console(stderr=True)
    command = shlex.join(["regard", *sys.argv[1:]])
    with exits_on_signals():
        here = join()
        try:
            with Screen(console) as screen:
                if recipe is None:
                    measures = run.resume(folder, command=command, listener=screen, **given)
                else:
                    measures = run.begin(folder, recipe, command=command, listener=screen)
        except (KeyboardInterrupt, SystemExit):
            if here.main:
                with contextlib.suppress(OSError):  # the terminal has gone
                    tell(console, _how_to_go_on(folder))
            raise
        except Exception as error:
            if known(error) and not here.main:  # the first process tells it
                raise typer.Exit(2) from error
            raise
        finally:
            leave()
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

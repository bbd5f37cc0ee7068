"""regard train: a language model from texts to a checkpoint."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from regard.cli.console import open_console, progress_bar
from regard.cli.inputs import load_model
from regard.extras import need

if TYPE_CHECKING:
    from regard.training.data import Corpus


def train(
    folder: Annotated[Path, typer.Argument(help="Where the model is written.")],
    data: Annotated[
        str,
        typer.Option("--data", metavar="stdlib|FOLDER|FILE", help="Python's standard library, or texts of your own."),
    ] = "stdlib",
    pattern: Annotated[str, typer.Option("--pattern", help="Which files of a folder.")] = "**/*.txt",
    steps: Annotated[int, typer.Option("--steps", min=1, help="How often the weights change.")] = 5000,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At its highest.")] = 3e-3,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME|FOLDER", help="Go on from a model's weights, vocabulary and sizes."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", min=257, help="Default: 4096.")] = None,
    context_length: Annotated[
        int | None, typer.Option("--context-length", min=8, help="Default: 512, or that of --from.")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", min=8, help="Default: 192.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Default: 6.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Default: 6.")] = None,
    hidden_dim: Annotated[int | None, typer.Option("--hidden-dim", help="Default: 8/3 of dim.")] = None,
    repeats: Annotated[float, typer.Option("--repeats", help="Share of rows of repeated random tokens.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    precision: Annotated[Literal["auto", "bf16", "no"], typer.Option("--precision")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Processor threads; default: torch's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in FOLDER.")] = False,
) -> None:
    """Train a language model on Python's standard library, or on texts of your own.

    Ctrl-C saves; --resume goes on, with the same command or with more --steps. Held-out files tell how good the model
    is: about one file in twenty, never trained on, against what xz -9e needs for them.

    [bold]Examples[/bold]

      regard train runs/mine --steps 200

      regard train runs/mine --steps 200 --resume

      regard train runs/letters --data letters/ --pattern "*.md" --layers 4 --dim 128

      regard train runs/longer --from stdlib --context-length 1024 --steps 200
    """
    need("regard train", "train", "accelerate", "tokenizers")
    import torch

    from regard.models import Decoder, ModelConfig
    from regard.training import checkpoint, loop
    from regard.training.data import Packed
    from regard.training.text import Tokenizer, train_tokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    if resume and not (folder / "progress.safetensors").is_file():
        raise ValueError(f"--resume: there is no {folder / 'progress.safetensors'}; without --resume a new run begins")
    if not resume and (folder / "progress.safetensors").is_file():
        raise ValueError(f"{folder}: holds a run already; --resume goes on with it, another folder begins anew")
    settings = loop.Settings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, precision=precision
    )
    sizes = {"vocab_size": vocab_size, "dim": dim, "layers": layers, "heads": heads, "hidden_dim": hidden_dim}
    given = {name: size for name, size in sizes.items() if size is not None}
    beginning = None if begin is None else load_model(begin)
    if beginning is None:
        width = given.get("dim", 192)
        plain = {"vocab_size": 4096, "dim": width, "layers": 6, "heads": 6, "hidden_dim": -(-8 * width // 3 // 8) * 8}
        config = ModelConfig.from_dict({"context_length": context_length or 512, **plain, **given})
    else:
        config = beginning.model.config
        for name, size in given.items():
            if size != getattr(config, name):
                raise ValueError(
                    f"--{name.replace('_', '-')}: --from {begin} decides it, {getattr(config, name)}; got {size}"
                )
        if config.positions == "learned" and context_length not in (None, config.context_length):
            raise ValueError(
                f"--context-length: {begin} has learned a vector for each of {config.context_length} positions and no "
                f"more; got {context_length}"
            )
        config = replace(config, context_length=context_length or config.context_length)
    console = open_console(stderr=True)
    corpus = _corpus(data, pattern)
    if not corpus.held_out:
        raise ValueError(f"--data: {data} is too little to hold some of it out; give more than one line")
    texts = [file.text for file in corpus.training]
    size = sum(len(text.encode()) for text in texts)
    console.print(f"{len(texts):,} files, {size / 1e6:.1f} MB to train on; {len(corpus.held_out)} files held out")
    if resume:
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
    else:
        if beginning is None:
            with console.status("learning the vocabulary"):
                tokenizer = Tokenizer(train_tokenizer(texts, config.vocab_size))
        else:
            tokenizer = beginning.tokenizer
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
    if beginning is None:
        config = replace(config, vocab_size=tokenizer.vocab_size)  # few texts may have fewer tokens than asked for
    with progress_bar(console) as bar:
        task = bar.add_task("cutting into tokens", total=len(texts))
        rows = Packed.from_texts(
            texts,
            tokenizer,
            context_length=config.context_length,
            seed=seed,
            repeats=repeats,
            progress=lambda done, all: bar.update(task, completed=done, total=all),
        )
    torch.manual_seed(seed)
    model = Decoder(config)
    if beginning is not None:
        model.load_state_dict(beginning.model.state_dict())
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{parameters:,} parameters, {rows.size:,} tokens in an epoch; {steps:,} steps of "
        f"{batch_size * rows.context_length:,} tokens are "
        f"{steps * batch_size * rows.context_length / rows.size:.2f} epochs"
    )
    try:
        with progress_bar(console, "{task.fields[note]}") as bar:
            task = bar.add_task("training", total=steps, note="")
            smooth = Smooth()
            watch = _watcher(console, steps)

            def report(r: loop.Report) -> None:
                loss = smooth(r.loss)
                bar.update(task, completed=r.step, note=f"loss {loss:.3f}  {r.tokens_per_second:,.0f} tokens/s")
                watch(r, loss)

            seconds = loop.train(model, rows, settings, folder, resume=resume, report=report)
    except KeyboardInterrupt:
        console.print(f"stopped and saved; go on with the same command and --resume (in {folder})")
        raise
    checkpoint.save_model(folder, model, dtype=torch.float16)
    model = checkpoint.load(folder).model  # measured as stored
    with progress_bar(console) as bar:
        task = bar.add_task("measuring on held-out files", total=None)
        measures = loop.measure(
            model,
            tokenizer,
            corpus,
            progress=lambda done, all: bar.update(task, completed=done, total=all),
        )
    card = loop.card(
        measures,
        model,
        rows,
        settings,
        corpus,
        command="regard " + " ".join(sys.argv[1:]).replace(" --resume", ""),
        seconds=seconds,
        begun_from=beginning.folder if beginning else None,
    )
    (folder / "card.md").write_text(card, encoding="utf-8")
    console.print(
        f"held out: {measures.bits_per_byte:.3f} bits per byte (xz -9e: {measures.xz_each:.3f} file by file, "
        f"{measures.xz_joined:.3f} joined)\n"
        f"random tokens, then again: loss {measures.copy_first:.2f}, then {measures.copy_second:.2f}"
    )
    console.print(f"written: {folder}; look at it: regard look FILE --model {folder}")


def _corpus(data: str, pattern: str) -> "Corpus":
    from regard.training import data as sources

    if data == "stdlib":
        return sources.standard_library()
    return sources.folder(data, pattern) if Path(data).is_dir() else sources.files([data])


class Smooth:
    """A running mean of the loss, over about fifty steps."""

    def __init__(self) -> None:
        self.value: float | None = None

    def __call__(self, loss: float) -> float:
        self.value = loss if self.value is None else 0.98 * self.value + 0.02 * loss
        return self.value


def _watcher(console: Console, steps: int) -> Callable[[Any, float], None]:
    """Without a terminal there is no bar: a line every half minute, and at the end."""
    last = time.monotonic()

    def watch(r: Any, loss: float) -> None:
        nonlocal last
        if not console.is_terminal and (time.monotonic() - last > 30 or r.step in (1, steps)):
            last = time.monotonic()
            console.print(f"step {r.step:,} of {steps:,}  loss {loss:.3f}  {r.tokens_per_second:,.0f} tokens/s")

    return watch

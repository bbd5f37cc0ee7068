"""A training run as a whole: from texts, by a recipe, to a folder with a model, its vocabulary and its card.

    from regard.training.run import begin, resume
    from regard.training.settings import Recipe

    begin("runs/mine", Recipe(data="letters", steps=500))
    resume("runs/mine", steps=1000)

This is what `regard train` does. The parts (`corpus`, `text`, `data`, `loop`, `measures`, `card`) can be used alone.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.configuration import ModelConfig
from regard.extras import how, need
from regard.plots import training_course
from regard.storage import replacing
from regard.training.board import Board
from regard.training.card import card
from regard.training.checkpoint import PRETRAINED, Loaded, Model, load, progress_header, save_model
from regard.training.classifying import Classifying
from regard.training.data import Examples
from regard.training.language import Language
from regard.training.lock import hold
from regard.training.loop import BEST, PROGRESS, check_facts, enough_memory, facts_of, train
from regard.training.masked import Masking
from regard.training.memory import check_memory
from regard.training.metrics import read_metrics
from regard.training.processes import Processes, join
from regard.training.report import Listener, Report
from regard.training.settings import MAY_CHANGE, Recipe
from regard.training.task import Measured, Task, describe
from regard.training.text import Tokenizer
from regard.training.translating import Translating

TASKS: dict[str, type[Task]] = {
    "text": Language,
    "translate": Translating,
    "masked": Masking,
    "classify": Classifying,
}
"""What can be learned, by the recipe's `task`."""

LEAST_VOCABULARY = 257
"""Tokens that every vocabulary has: the bytes, and the end. How many more there are, the texts decide."""

CARD, PLOT = "card.md", "training.svg"


def begin(
    folder: str | os.PathLike[str], recipe: Recipe, *, command: str | None = None, listener: Listener | None = None
) -> Measured | None:
    """Begins a run and brings it to its end.

    Where a launcher such as torchrun has started several processes, all of them call this alike; the first one writes
    and tells.

    Args:
        folder: where everything is written; made if need be.
        command: what the card says that the run was begun with.
    Returns:
        How good the model is; None in all processes but the first.
    Raises:
        ValueError: the folder holds a run or a model, or another training is running there; or the recipe does not fit
            the texts, or the model that it starts from.
        DivergedError, OSError, RuntimeError, SystemExit: as `loop.train`. ImportError: a package is not installed.
    """
    folder, here = Path(folder), join()
    listener = listener if listener is not None and here.main else Listener()
    written = command or f"begin({str(folder)!r}, {recipe!r})"
    with ExitStack() as stack:
        with here.together():
            need("a training run", "train", "tokenizers")
            recipe = _placed(recipe)
            _check_board(recipe)
            recipe.rows_at_once(here.count)
            if here.main:
                stack.enter_context(hold(folder))
                if (folder / PROGRESS).exists():
                    raise ValueError(
                        f"{folder}: holds a run already; --resume goes on with it, another folder begins anew"
                    )
                if (folder / "model.safetensors").exists():
                    raise ValueError(f"{folder}: holds a model already, which would be lost; give another folder")
            _use_threads(recipe)
            kind = TASKS[recipe.task]
            first = None if recipe.start_from is None else _first(recipe.start_from, kind)
            config = _config(recipe, kind, first)
            fewest = min(config.vocab_size, LEAST_VOCABULARY) if first is None else config.vocab_size
            _check_memory(replace(config, vocab_size=fewest), recipe, here)
            task = kind(recipe, listener)
            config = task.config(config)
        if first is None:
            listener.progress("learning the vocabulary", 0, 1)
            tokenizer = Tokenizer.of(here.first(lambda: task.tokenizer(config.vocab_size).model.to_str()))
            listener.progress("learning the vocabulary", 1, 1)
            if tokenizer.vocab_size < config.vocab_size:
                listener.note(f"{tokenizer.vocab_size:,} tokens in the vocabulary: the texts give no more")
            config = replace(config, vocab_size=tokenizer.vocab_size)
        else:
            tokenizer = first.tokenizer
        with here.together():
            _check_memory(config, recipe, here)
            data = task.examples(tokenizer, config.context_length)
            torch.manual_seed(recipe.seed)
            model = _model(kind, config)
            if first is not None:
                task.start_from(model, first.model)
            if here.main:
                tokenizer.save(folder / "tokenizer.json")
        return _finish(folder, recipe, model, tokenizer, task, data, [written], listener, here, resumed=False)


def resume(
    folder: str | os.PathLike[str], *, command: str | None = None, listener: Listener | None = None, **changes: Any
) -> Measured | None:
    """Goes on with a run where it was last saved, with the recipe that it was begun with.

    Args:
        changes: fields of `Recipe`. More `steps` lengthen the run; `threads` and how often it is saved may change, and
            `data` says where the same texts lie now. Anything else has to be as it was.
    Returns:
        How good the model is; None where all steps were done, and measured, before, and in all processes but the first.
    Raises:
        ValueError: there is no run, or another training is running there; or a change contradicts the run, or its texts
            have changed.
        DivergedError, OSError, RuntimeError, SystemExit: as `loop.train`. ImportError: a package is not installed.
    """
    folder, here = Path(folder), join()
    listener = listener if listener is not None and here.main else Listener()
    progress = folder / PROGRESS
    with ExitStack() as stack:
        with here.together():
            if not progress.is_file():
                raise ValueError(f"--resume: there is no {progress}; without --resume a new run begins")
            need("a training run", "train", "tokenizers")
            if here.main:
                stack.enter_context(hold(folder))
            header = progress_header(progress)
            recipe = _continued(folder, header, changes)
            _check_board(recipe)
            recipe.rows_at_once(here.count)
            _use_threads(recipe)
            ended = _ended(header, recipe)
            done = ended is not None and (folder / CARD).exists()
        if done:
            listener.note(f"{folder}: {ended}")
            return None
        with here.together():
            task = TASKS[recipe.task](recipe, listener)
            config = ModelConfig.from_dict(header["config"])
            _check_memory(config, recipe, here)
            tokenizer = Tokenizer.load(folder / "tokenizer.json")
            data = task.examples(tokenizer, config.context_length)
            check_facts(progress, header, facts_of(recipe, data))
            listener.note(f"going on after step {header['step']:,}")
            commands = [*header["notes"]["commands"], command or f"resume({str(folder)!r}, **{changes!r})"]
            model = _model(TASKS[recipe.task], config)
        return _finish(folder, recipe, model, tokenizer, task, data, commands, listener, here, resumed=True)


def _finish(
    folder: Path,
    recipe: Recipe,
    model: Model,
    tokenizer: Tokenizer,
    task: Task,
    data: Examples,
    commands: Sequence[str],
    listener: Listener,
    here: Processes,
    *,
    resumed: bool,
) -> Measured | None:
    """Trains; then the first process stores the model in half precision, measures it as stored, and writes its card."""
    epochs = data.epochs(recipe.steps * recipe.batch_size)
    listener.note(
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {data.size:,} tokens in an epoch; "
        f"{recipe.steps:,} steps of {round(epochs * data.size / recipe.steps):,} tokens are {epochs:.2f} epochs"
    )
    if here.count > 1:
        rows = f"{recipe.batch_size * recipe.context_parallel // here.count} rows of each step in each"
        if recipe.context_parallel > 1:
            rows += f", of every row the tokens of 1 in {recipe.context_parallel}"
        listener.note(f"{here.count} processes, {rows}")
    with here.together():
        if here.main:
            (folder / CARD).unlink(missing_ok=True)  # of the model as it was before
    held_out = None if recipe.evaluate_every is None else task.held_out_examples(tokenizer, model.config.context_length)
    with ExitStack() as stack:
        begun = progress_header(folder / PROGRESS)["step"] if resumed else 0
        board = stack.enter_context(closing(Board(folder, begun))) if recipe.tensorboard and here.main else None

        def report(told: Report) -> None:
            if board is not None:
                board.step(told)
            if told.held_out is not None:
                text = task.sample(load(folder).model, tokenizer)
                listener.sample(told.step, text)
                if board is not None:
                    board.sample(told.step, text)
            listener.step(told, recipe)

        seconds = train(
            model,
            data,
            recipe,
            folder,
            held_out=held_out,
            resume=resumed,
            notes={"commands": list(commands)},
            report=report,
        )
    if not here.main:
        return None
    header = progress_header(folder / PROGRESS)
    if recipe.patience is not None and header["course"]["step"]:
        listener.note(f"the model is that of step {header['course']['step']:,}, the best on held-out texts")
        save_model(folder, load(folder, weights=BEST).model, dtype=torch.float16)
    else:
        save_model(folder, load(folder).model, dtype=torch.float16)
    model = load(folder).model
    measures = task.measure(
        model, tokenizer, lambda done, total: listener.progress("measuring on held-out texts", done, total)
    )
    written = card(
        measures,
        model,
        data,
        recipe,
        task,
        command="; ".join(commands),
        seconds=seconds,
        begun_from=None if recipe.start_from is None else PRETRAINED / recipe.start_from,
    )
    with replacing(folder / CARD) as new:
        new.write_text(written, encoding="utf-8")
    if find_spec("matplotlib") is None:
        listener.note(f"{folder / PLOT} is drawn with matplotlib: {how('plot')}")
    else:
        with replacing(folder / PLOT) as new:
            training_course(read_metrics(folder)).savefig(new, format="svg")
    return measures


def _check_board(recipe: Recipe) -> None:
    if recipe.tensorboard:
        need("--tensorboard", "tensorboard", "tensorboard")


def _ended(header: dict[str, Any], recipe: Recipe) -> str | None:
    """Why a run has come to its end; None if it has not."""
    if header["step"] >= recipe.steps:
        return f"all {recipe.steps:,} steps are done; more --steps go further"
    waited = header.get("course", {}).get("waited", 0)
    if recipe.patience is not None and waited >= recipe.patience:
        return f"ended after step {header['step']:,}, after {waited} evaluations without a lower loss on held-out texts"
    return None


def _use_threads(recipe: Recipe) -> None:
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)


def _placed(recipe: Recipe) -> Recipe:
    """The recipe with its paths made absolute, so that it can be gone on with from any folder."""
    data = recipe.data if recipe.data == "stdlib" else os.path.abspath(recipe.data)
    start = recipe.start_from
    if start is not None and Path(start).is_dir():
        start = os.path.abspath(start)
    return replace(recipe, data=data, start_from=start)


def _continued(folder: Path, header: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """The recipe of a run, with what may change about it."""
    was = header["settings"]
    if not {"data", "pattern"} <= set(was) or not {"config", "notes", "precision"} <= set(header):
        raise ValueError(f"{folder}: the run does not say what it was begun with; an older version of regard wrote it")
    names = {field.name for field in fields(Recipe)}
    if unknown := sorted({*changes, *was} - names):
        raise ValueError(f"{folder}: a recipe has no {', '.join(unknown)}")
    old = Recipe(**was)
    new = replace(old, **changes)
    wanted = asdict(_placed(new))
    really = {**header["config"], "precision": header["precision"]}  # what "auto" and None came to
    for name in changes:
        if name in MAY_CHANGE or wanted[name] in (was[name], really.get(name, was[name])):
            continue
        if name == "steps":
            if new.steps > old.steps:
                continue
            raise ValueError(
                f"{folder}: begun with {old.steps:,} steps; they may be raised, not lowered to {new.steps:,}"
            )
        raise ValueError(
            f"{folder}: begun with {name} {really.get(name, was[name])!r}, which cannot become {wanted[name]!r}; "
            "leave it out to go on"
        )
    return replace(old, **{name: wanted[name] for name in changes if name in MAY_CHANGE or name == "steps"})


def _hidden_dim(dim: int) -> int:
    """8/3 of dim, in whole eights."""
    return -(-8 * dim // 3 // 8) * 8


def _first(name: str, kind: type[Task]) -> Loaded[Any]:
    """The model that a run starts from."""
    first = load(name)
    if not kind.may_start_from(first.model):
        raise ValueError(f"--from: {name} is a model of another kind: {describe(first.model)}")
    return first


def _config(recipe: Recipe, kind: type[Task], first: Loaded[Any] | None) -> ModelConfig:
    """The sizes of the model: the recipe's, or those of the model that it starts from."""
    sizes = kind.sizes
    asked = {name: getattr(recipe, name) for name in (*sizes, "hidden_dim") if getattr(recipe, name) is not None}
    if first is None:
        dim = asked.get("dim", sizes["dim"])
        return ModelConfig.from_dict({**sizes, **kind.architecture, "hidden_dim": _hidden_dim(dim), **asked})
    config: ModelConfig = replace(first.model.config, **kind.architecture)
    context_length = asked.pop("context_length", config.context_length)
    for name, size in asked.items():
        if size != getattr(config, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option}: --from {recipe.start_from} decides it, {getattr(config, name)}; got {size}")
    if config.positions == "learned" and context_length != config.context_length:
        raise ValueError(
            f"--context-length: {recipe.start_from} has learned vectors for {config.context_length} positions only; "
            f"got {context_length}"
        )
    return replace(config, context_length=context_length)


def _check_memory(config: ModelConfig, recipe: Recipe, here: Processes) -> None:
    kind = TASKS[recipe.task]
    usual = {**kind.sizes, "hidden_dim": _hidden_dim(config.dim), "batch_size": Recipe().batch_size}
    check_memory(config, recipe.rows_at_once(here.count), usual, kind.model, recipe.context_parallel)


def _model(kind: type[Task], config: ModelConfig) -> Model:
    with enough_memory(f"a model of dim {config.dim}, {config.layers} layers, {config.vocab_size:,} tokens"):
        model: Model = kind.model(config)
    return model

"""The training loop, from top to bottom. What a batch is, and the loss on it, the data says (`data.Examples`).

Matrices inside the blocks are trained with Muon [1] (each step orthogonalised, scaled to the size of AdamW's [2]), the
embedding and everything that is no matrix with AdamW [3]. The learning rate climbs over the first steps and falls
linearly to zero [4].

A step follows from the weights, the optimizers' state and its number alone: the number gives the rows, the learning
rate and the seed of what is dropped. So a run that goes on from a save ends, on the same machine with as many threads,
with the weights, bit for bit, of one that was never stopped.

The rows of a step may be dealt out: to several processes, and in each to parts that are computed one after another. The
loss of each part is weighted by its share of what is foretold, so that the sum of their gradients is that of the whole,
whatever the parts, but for rounding.

References:
    [1] Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    [2] Liu et al. 2025, "Muon is Scalable for LLM Training".
    [3] Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    [4] Defazio et al. 2023, "Optimal Linear Decay Learning Rate Schedules and Further Refinements".
"""

import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.layers import Block
from regard.training.checkpoint import Model, load_progress, progress_header, save_batch, save_model, save_progress
from regard.training.context import Context
from regard.training.data import Examples, rows_of
from regard.training.evaluating import Course, held_out_loss
from regard.training.lock import hold
from regard.training.metrics import Metrics
from regard.training.processes import Processes, join
from regard.training.report import Report
from regard.training.settings import Settings, contradictions
from regard.training.spreading import ShardedMuon, exchanging, release, sharded, spread, whole
from regard.training.stopping import Stopping

PROGRESS = "progress.safetensors"
BEST = "best.safetensors"
"""The model of the lowest loss on held-out texts."""


class DivergedError(RuntimeError):
    """The loss or its gradient is no finite number, so that training cannot go on."""


def train(
    model: Model,
    data: Examples,
    settings: Settings,
    folder: Path,
    *,
    held_out: Examples | None = None,
    resume: bool = False,
    notes: Mapping[str, Any] | None = None,
    report: Callable[[Report], None] = lambda report: None,
) -> float:
    """Trains a model, saves model and progress on the way, and writes the course of the loss to metrics.jsonl.

    A save is made at the beginning, every `save_every` steps, every `save_minutes`, and at the end. Ctrl-C, SIGTERM and
    a terminal that closes end the run after the step that is under way, and save it; a second signal acts at once, and
    the last save stands. `resume` goes on from the last save with exactly the batches that were to come. It may be
    given more steps than before: the learning rate then follows the longer schedule from there on.

    Where a launcher such as torchrun has started several processes, all of them call this alike; the first one writes.

    Args:
        model: holds the trained weights afterwards; of several processes with `shard`, its part of them.
        held_out: what the model is evaluated on, every `evaluate_every` steps; each evaluation is followed by a save.
        folder: where model.safetensors, progress.safetensors and metrics.jsonl are written, and best.safetensors where
            there is `patience`; one training at a time.
        notes: plain data to be kept with the progress.
        report: called after every step, in the first process; if it raises KeyboardInterrupt the run ends as with
            Ctrl-C.
    Returns:
        Seconds of training in all, those before a resume included.
    Raises:
        ValueError: another training is running in the folder; or there is nothing to resume, or it was begun with other
            settings, another model or other data; or the rows of a step cannot be dealt out evenly.
        DivergedError: loss or gradient is nan or infinite; the batch is saved, and the last save stands.
        OSError: a file cannot be written, as on a full disk; the last save stands.
        RuntimeError: there is too little memory for a step; or another process has failed (`ElsewhereError`).
        SystemExit: the run was ended by a signal other than Ctrl-C; the code is 128 + its number.
    """
    here = join()
    progress = folder / PROGRESS
    facts = facts_of(settings, data)
    first, before, precision, course = 0, 0.0, _precision(settings.precision), Course()
    at_once = settings.rows_at_once(here.count)
    context = Context(here, settings.context_parallel)
    parts = context.rows * settings.accumulate
    here.check_same("data", facts)
    with here.connected(), ExitStack() as stack:
        with here.together():
            if here.main:
                stack.enter_context(hold(folder))
            if resume:
                header = progress_header(progress)
                check_facts(progress, header, facts)
                first, before = header["step"], header["seconds"]
                precision = header.get("precision", precision)  # what "auto" was when the run began
                course = Course(**header.get("course", {}))
        spread_model = spread(model.to(here.device), here, shards=settings.shard)
        optimizers = make_optimizers(model, settings)
        if resume:
            with here.together():
                load_progress(progress, model, optimizers)
        start = saved = time.perf_counter()

        def elapsed() -> float:
            return before + time.perf_counter() - start

        def save(step: int) -> None:
            nonlocal saved
            kept = {"config": model.config.to_dict(), "precision": precision, "notes": dict(notes or {})}
            header = {"step": step, "seconds": elapsed(), "course": asdict(course), **facts, **kept}
            with here.together():
                save_progress(progress if here.main else None, model, optimizers, header)
                save_model(folder if here.main else None, model, steps=(step, settings.steps))
            saved = time.perf_counter()

        def due(step: int) -> bool:
            by_steps = settings.save_every is not None and step % settings.save_every == 0
            minutes = settings.save_minutes
            return by_steps or (minutes is not None and here.any(time.perf_counter() - saved >= 60 * minutes))

        def mine(batch: Any, number: int) -> Any:
            """One of the parts of a batch that this process computes."""
            rows = rows_of(batch, (context.row * settings.accumulate + number) * at_once, at_once)
            return rows._make(tensor.to(here.device) for tensor in rows)

        def rounded() -> torch.autocast:
            return torch.autocast(here.device.type, torch.bfloat16, enabled=precision == "bf16")

        def gradient(step: int) -> tuple[float, float, Any]:
            """The loss of a step, the norm of its gradient before clipping, and its batch."""
            batch = data.batch(step * settings.batch_size, settings.batch_size)
            counted, loss = data.counted(batch), 0.0
            model.zero_grad()
            for number in range(settings.accumulate):
                part = context.row * settings.accumulate + number
                # dropout follows from step, part and place alone
                torch.manual_seed(_seed(settings.seed, step * parts + part, context.rank))
                rows = mine(batch, number)
                what = f"step {step + 1}, {at_once} rows, {data.tokens(rows):,} tokens"
                with enough_memory(what), exchanging(spread_model, number == settings.accumulate - 1):
                    with rounded():
                        of_rows, answers = context.loss(spread_model, data, rows)
                    share = answers / counted
                    (of_rows * (share * here.count)).backward()  # processes average their gradients
                loss += share * float(of_rows.detach())
            norm = whole(nn.utils.clip_grad_norm_(model.parameters(), settings.clip))
            return here.sum(loss), float(norm), batch

        def evaluation(step: int) -> float | None:
            """The loss on held-out texts where it is time for it; of the lowest, the weights are kept."""
            if held_out is None or settings.evaluate_every is None or step % settings.evaluate_every:
                return None
            with rounded():
                loss = held_out_loss(
                    spread_model,
                    held_out,
                    settings.batch_size,
                    lambda batch: (mine(batch, number) for number in range(settings.accumulate)),
                    here,
                    context,
                )
            release(spread_model)
            if course.add(step, loss) and settings.patience is not None:
                with here.together():
                    save_model(folder if here.main else None, model, steps=(step, settings.steps), name=BEST)
            return loss

        def has_waited() -> bool:
            return settings.patience is not None and course.waited >= settings.patience

        step = first
        if not resume:
            save(step)
        model.train()
        with here.together():
            metrics = stack.enter_context(Metrics(folder, step)) if here.main else None
        with Stopping(here.count > 1) as stopping:
            while step < settings.steps and not has_waited() and not _asked(stopping, here):
                began = time.perf_counter()
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = settings.rate(step)
                loss, norm, batch = gradient(step)
                if not math.isfinite(loss) or not math.isfinite(norm):
                    with here.together():
                        raise _diverged(folder if here.main else None, model, batch, step, loss, norm, settings)
                with enough_memory(f"step {step + 1}, the optimizers' averages"):
                    for optimizer in optimizers:
                        optimizer.step()
                step += 1
                seconds = time.perf_counter() - began
                speed, rate = data.tokens(batch) / seconds, settings.rate(step - 1)
                told = Report(step, loss, rate, norm, speed, elapsed(), evaluation(step))
                with here.together():
                    if metrics is not None:
                        metrics.write(asdict(told))
                if (due(step) and step < settings.steps) or told.held_out is not None:
                    save(step)
                if here.main and stopping.asked is None:  # a terminal that closed would let nothing be told
                    try:
                        report(told)
                    except KeyboardInterrupt:
                        stopping.ask(signal.SIGINT)
            save(step)
            if stopping.asked is not None:
                stopping.end()
    return elapsed()


def facts_of(settings: Settings, data: Examples) -> dict[str, dict[str, Any]]:
    """The facts that must not change when a run is resumed."""
    return {"settings": asdict(settings), "data": {**data.facts(), "digest": data.digest()}}


def check_facts(progress: Path, header: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that a run is resumed as it was started.

    Raises:
        ValueError: its settings or its data have changed.
    """
    digest = header.get("data", {}).get("digest")
    was = {part: {k: v for k, v in header.get(part, {}).items() if k != "digest"} for part in facts}
    changed = [words for part in facts for words in contradictions(was[part], facts[part])]
    if changed:
        raise ValueError(f"{progress}: begun with other settings: {', '.join(changed)}")
    if digest is not None and digest != facts["data"]["digest"]:
        raise ValueError(
            f"{progress}: begun with other data: the texts, or the tokens they are cut into, have changed since\n"
            "  hint: put the old texts back, or begin a run in another folder from this model's weights"
        )


def _diverged(
    folder: Path | None, model: Model, batch: Any, step: int, loss: float, norm: float, settings: Settings
) -> DivergedError:
    """Saves the batch on which training diverged, and returns the error to raise."""
    path = None if folder is None else folder / "diverged.safetensors"
    note = {"step": step + 1, "loss": str(loss), "gradient_norm": str(norm), "learning_rate": settings.rate(step)}
    try:
        save_batch(path, model, batch._asdict(), note)
        kept = f"its batch, and the weights before it, are in {path}"
    except OSError as error:
        kept = f"its batch is lost ({error})"
    return DivergedError(
        f"training: step {step + 1} has loss {loss:g} and a gradient of norm {norm:g}, with learning rate "
        f"{settings.rate(step):g}\n"
        f"  {kept}; the last save stands\n"
        f"  hint: begin anew with a smaller learning_rate (it was {settings.learning_rate:g}) or with precision='no'"
    )


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Turns an out-of-memory error into a clear message.

    Raises:
        RuntimeError: there was too little.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not known:
            raise
        raise RuntimeError(
            f"training: out of memory ({what})\n"
            "  hint: a smaller batch_size, context_length or model, or a larger accumulate; earlier saves are intact"
        ) from error


def _asked(stopping: Stopping, here: Processes) -> bool:
    """Whether to stop before the next step; all processes stop together."""
    asked = here.largest(stopping.asked or 0)
    if asked:
        stopping.ask(asked)
    return asked > 0


def make_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the rest."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    matrices = [p for block in blocks for p in block.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon = ShardedMuon if any(sharded(p) for p in matrices) else torch.optim.Muon
    return [
        muon(matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _seed(seed: int, number: int, place: int = 0) -> int:
    """A seed for each step; a hash, because torch's generator starts out alike from seeds that are near."""
    text = f"{seed}/{number}" + (f"/{place}" if place else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _precision(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    supported: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16" if supported() else "no"

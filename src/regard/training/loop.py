"""The training loop, from top to bottom. What a batch is, and the loss on it, the data says (`data.Examples`).

Matrices inside the blocks are trained with Muon [1] (each step orthogonalised, scaled to the size of AdamW's [2]), the
embedding and everything that is no matrix with AdamW [3]. The learning rate climbs over the first steps and falls
linearly to zero [4].

A step follows from the weights, the optimizers' state and its number alone: the number gives the rows, the learning
rate and the seed of what is dropped. So a run that goes on from a save ends, on the same machine with as many threads,
with the weights, bit for bit, of one that was never stopped.

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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.extras import need
from regard.layers import Block
from regard.training.checkpoint import Model, load_progress, progress_header, save_batch, save_model, save_progress
from regard.training.data import Examples
from regard.training.lock import hold
from regard.training.metrics import Metrics
from regard.training.report import Report
from regard.training.settings import Settings, contradictions
from regard.training.stopping import Stopping

PROGRESS = "progress.safetensors"


class DivergedError(RuntimeError):
    """The loss or its gradient is no finite number, so that training cannot go on."""


def train(
    model: Model,
    data: Examples,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
    notes: Mapping[str, Any] | None = None,
    report: Callable[[Report], None] = lambda report: None,
) -> float:
    """Trains a model, saves model and progress on the way, and writes the course of the loss to metrics.jsonl.

    A save is made at the beginning, every `save_every` steps, every `save_minutes`, and at the end. Ctrl-C, SIGTERM and
    a terminal that closes end the run after the step that is under way, and save it; a second signal acts at once, and
    the last save stands. `resume` goes on from the last save with exactly the batches that were to come. It may be
    given more steps than before: the learning rate then follows the longer schedule from there on.

    Args:
        folder: where model.safetensors, progress.safetensors and metrics.jsonl are written; one training at a time.
        notes: plain data to be kept with the progress.
        report: called after every step; if it raises KeyboardInterrupt the run ends as with Ctrl-C.
    Returns:
        Seconds of training in all, those before a resume included.
    Raises:
        ValueError: another training is running in the folder; or there is nothing to resume, or it was begun with other
            settings, another model or other data.
        DivergedError: loss or gradient is nan or infinite; the batch is saved, and the last save stands.
        OSError: a file cannot be written, as on a full disk; the last save stands.
        RuntimeError: there is too little memory for a step.
        SystemExit: the run was ended by a signal other than Ctrl-C; the code is 128 + its number.
        ImportError: the package accelerate is not installed.
    """
    need("training", "train", "accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="no")  # whose own is one for the whole process, for all runs in it
    main, world, rank = accelerator.is_main_process, accelerator.num_processes, accelerator.process_index
    optimizers = make_optimizers(model, settings)
    progress = folder / PROGRESS
    facts = facts_of(settings, data)
    first, before, precision = 0, 0.0, _precision(settings.precision)
    with hold(folder) if main else nullcontext():
        if resume:
            header = progress_header(progress)
            check_facts(progress, header, facts)
            load_progress(progress, model, optimizers)
            first, before = header["step"], header["seconds"]
            precision = header.get("precision", precision)  # what "auto" was when the run began
        wrapped, *prepared = accelerator.prepare(model, *optimizers)
        start = saved = time.perf_counter()

        def elapsed() -> float:
            return before + time.perf_counter() - start

        def save(step: int) -> None:
            nonlocal saved
            if main:
                kept = {"config": model.config.to_dict(), "precision": precision, "notes": dict(notes or {})}
                header = {"step": step, "seconds": elapsed(), **facts, **kept}
                save_progress(progress, model, optimizers, header)
                save_model(folder, model, steps=(step, settings.steps))
            saved = time.perf_counter()

        def due(step: int) -> bool:
            by_steps = settings.save_every is not None and step % settings.save_every == 0
            by_time = settings.save_minutes is not None and time.perf_counter() - saved >= 60 * settings.save_minutes
            return by_steps or by_time

        step = first
        if not resume:
            save(step)
        model.train()
        try:
            with Metrics(folder, step) if main else nullcontext() as metrics, Stopping() as stopping:
                while step < settings.steps and not _asked(stopping, accelerator):
                    began = time.perf_counter()
                    torch.manual_seed(_seed(settings.seed, step * world + rank))  # dropout follows from the step alone
                    for optimizer in optimizers:
                        for group in optimizer.param_groups:
                            group["lr"] = settings.rate(step)
                    batch = data.batch((step * world + rank) * settings.batch_size, settings.batch_size)
                    batch = batch._make(part.to(accelerator.device) for part in batch)
                    tokens = data.tokens(batch)
                    with enough_memory(f"step {step + 1}, {settings.batch_size} rows, {tokens:,} tokens"):
                        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=precision == "bf16"):
                            loss = data.loss(wrapped, batch)
                        model.zero_grad()
                        accelerator.backward(loss)
                        norm = accelerator.clip_grad_norm_(model.parameters(), settings.clip)
                        value, length = float(loss.detach()), float(norm)
                        if not math.isfinite(value) or not math.isfinite(length):
                            raise _diverged(folder, rank, model, batch, step, value, length, settings)
                        for optimizer in prepared:
                            optimizer.step()
                    step += 1
                    seconds = time.perf_counter() - began
                    speed = world * tokens / seconds
                    told = Report(step, value, settings.rate(step - 1), length, speed, elapsed())
                    if metrics is not None:
                        metrics.write(asdict(told))
                    if due(step) and step < settings.steps:
                        save(step)
                    if main and stopping.asked is None:  # a terminal that closed would let nothing be told
                        try:
                            report(told)
                        except KeyboardInterrupt:
                            stopping.ask(signal.SIGINT)
                save(step)
                if stopping.asked is not None:
                    stopping.end()
        finally:
            accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)  # the model is as it was, but for its weights
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
    folder: Path, rank: int, model: Model, batch: Any, step: int, loss: float, norm: float, settings: Settings
) -> DivergedError:
    """Saves the batch on which training diverged, and returns the error to raise."""
    path = folder / ("diverged.safetensors" if rank == 0 else f"diverged-{rank}.safetensors")
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
            "  hint: a smaller batch_size, context_length or model; earlier saves are intact"
        ) from error


def _asked(stopping: Stopping, accelerator: Any) -> bool:
    """Whether to stop before the next step; all processes stop together."""
    if accelerator.num_processes > 1:
        asked = torch.tensor([float(stopping.asked is not None)], device=accelerator.device)
        anywhere = float(accelerator.reduce(asked, "sum")) > 0
        if anywhere and stopping.asked is None:
            stopping.ask(signal.SIGTERM)
    return stopping.asked is not None


def make_optimizers(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the rest."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    matrices = [p for block in blocks for p in block.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(
            matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _seed(seed: int, number: int) -> int:
    """A seed for each step; a hash, because torch's generator starts out alike from seeds that are near."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:7], "big")


def _precision(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    supported: Any = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bf16" if supported() else "no"

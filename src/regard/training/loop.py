"""The training loop of a language model, in one place, from top to bottom.

    loss = mean of -log p(token i + 1 | tokens 0 .. i of the same document)

Matrices inside the blocks are trained with Muon [1] (each step orthogonalised, scaled to the size of AdamW's [2]), the
embedding and everything that is no matrix with AdamW [3]. The learning rate climbs over the first steps and falls
linearly to zero [4].
Documents are packed into rows, and attention stays inside its document: ``Causal() & Document(ids)``.

References:
    [1] Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    [2] Liu et al. 2025, "Muon is Scalable for LLM Training".
    [3] Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    [4] Defazio et al. 2023, "Optimal Linear Decay Learning Rate Schedules and Further Refinements".
"""

import hashlib
import json
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.extras import need
from regard.masks import Document
from regard.models import Decoder
from regard.training.checkpoint import load_progress, progress_header, save_model, save_progress
from regard.training.data import Batch, Corpus, Packed, xz_bits_per_byte
from regard.training.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is trained.

    Args:
        steps: how often the weights change. batch_size: rows of context_length tokens per step.
        learning_rate: at its highest. warmup: share of the steps over which it climbs.
        weight_decay: of matrices. clip: largest norm of a step's gradient.
        seed: of what is dropped; the command line takes it for the weights' first values and the data's order too.
        precision: "bf16" multiplies in bfloat16 (weights stay float32), "no" everything in float32; "auto" is "bf16"
            where the processor or GPU has instructions for it.
        save_every: steps between two saves of the progress.
    """

    steps: int
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    precision: str = "auto"
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")
        if self.precision not in ("auto", "bf16", "no"):
            raise ValueError(f"precision must be auto, bf16 or no, got {self.precision!r}")

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        climbing = (step + 1) / max(1.0, self.warmup * self.steps)
        falling = (self.steps - step) / self.steps
        return self.learning_rate * min(1.0, climbing) * falling


@dataclass(frozen=True)
class Report:
    """How training stands after a step."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds: float


def train(
    model: Decoder,
    data: Packed,
    settings: Settings,
    folder: Path,
    *,
    resume: bool = False,
    report: Callable[[Report], None] = lambda report: None,
) -> float:
    """Trains a decoder, saves its progress on the way and the model at the end.

    An interruption (Ctrl-C) saves before it is passed on; `resume` goes on from the last save with exactly the batches
    that were to come, and ends with exactly the weights that an uninterrupted run would have had. It may be given more
    steps than before: the learning rate then follows the longer schedule from there on.

    Args:
        folder: where model.safetensors and progress.safetensors are written.
        report: called after every step.
    Returns:
        Seconds of training in all, those before a resume included.
    Raises:
        ValueError: there is nothing to resume, or it was begun with other settings, another model or other data.
        ImportError: the package accelerate is not installed.
    """
    need("training", "train", "accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=_precision(settings.precision))
    optimizers = make_optimizers(model, settings)
    progress = folder / "progress.safetensors"
    facts = {"settings": asdict(settings), "data": _describe(data)}
    first, before = 0, 0.0
    if resume:
        header = progress_header(progress)
        changed = [
            f"{name} was {was!r} and is {facts[part].get(name)!r}"
            for part in facts
            for name, was in header.get(part, {}).items()
            if name != "save_every" and facts[part].get(name) != was and not (name == "steps" and settings.steps > was)
        ]
        if changed:
            raise ValueError(f"{progress}: begun with other settings: {', '.join(changed)}")
        load_progress(progress, model, optimizers)
        first, before = header["step"], header["seconds"]
    wrapped, *prepared = accelerator.prepare(model, *optimizers)
    world, rank = accelerator.num_processes, accelerator.process_index
    start = time.perf_counter()

    def save(step: int) -> None:
        if accelerator.is_main_process:
            save_progress(progress, model, optimizers, {"step": step, "seconds": elapsed(), **facts})

    def elapsed() -> float:
        return before + time.perf_counter() - start

    model.train()
    step = first
    try:
        while step < settings.steps:
            began = time.perf_counter()
            torch.manual_seed(_seed(settings.seed, step * world + rank))  # dropout, too, follows from the step alone
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate(step)
            batch = data.batch((step * world + rank) * settings.batch_size, settings.batch_size)
            with accelerator.autocast():
                loss = next_token_loss(wrapped, Batch(*(part.to(accelerator.device) for part in batch)))
            model.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), settings.clip)
            with uninterrupted():
                for optimizer in prepared:
                    optimizer.step()
                step += 1
            seconds = time.perf_counter() - began
            tokens = world * settings.batch_size * data.context_length
            if accelerator.is_main_process:
                report(Report(step, float(loss.detach()), settings.rate(step - 1), tokens / seconds, elapsed()))
            if step % settings.save_every == 0 and step < settings.steps:
                save(step)
    except KeyboardInterrupt:
        save(step)
        raise
    finally:
        accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)  # the model is as it was, but for its weights
    save(step)
    if accelerator.is_main_process:
        save_model(folder, model)
    return elapsed()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keeps Ctrl-C waiting until the block is done: weights changed in part, or changed and not counted, are lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    waiting: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if waiting:
        signal.raise_signal(signal.SIGINT)


def next_token_loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token, in nats, with attention kept inside each document."""
    logits = model(batch.tokens, mask=Document(batch.documents))
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def make_optimizers(model: Decoder, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the rest."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(
            matrices, lr=settings.learning_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.inference_mode()
def bits_per_byte(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] = lambda done, all: None,
) -> float:
    """Cross-entropy of texts in bits per byte of UTF-8: what the model would compress them to.

        bits = -sum_i log2 p(token i | the tokens before it, as many as fit)

    A text longer than the context is read in overlapping pieces of context_length tokens, `stride` apart (default: a
    quarter of the context); each token is counted once, in the piece where it has the most before it. Every text stands
    alone, after one end token. Nothing is dropped.

    Raises:
        ValueError: there is no text, or the pieces would not overlap or touch.
    """
    length = model.config.context_length
    stride = max(1, length // 4) if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride: expected 1 to context_length={length}, got {stride}")
    pieces: list[tuple[list[int], int]] = []  # tokens of a piece, and how many of its targets were counted before
    size = 0
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        size += len(text.encode())
        chain = [tokenizer.end_id, *ids]
        done = 0  # targets counted so far
        for at in range(0, len(chain) - 1, stride):
            piece = chain[at : at + length + 1]
            pieces.append((piece, done - at))
            done = at + len(piece) - 1
            if done == len(chain) - 1:
                break
    if not size:
        raise ValueError("texts: expected some text, got none")
    pieces.sort(key=lambda piece: len(piece[0]))  # rows of a batch then have little padding
    bits = 0.0
    for first in range(0, len(pieces), batch_size):
        some = pieces[first : first + batch_size]
        for losses in _losses(model, [piece for piece, _ in some], [counted for _, counted in some]):
            bits += float(losses.double().sum()) / math.log(2)
        progress(min(first + batch_size, len(pieces)), len(pieces))
    return bits / size


@torch.inference_mode()
def copying_loss(
    model: Decoder, *, length: int = 128, rows: int = 16, seed: int = 0, end_id: int = 0
) -> tuple[float, float]:
    """Loss on random tokens, and on the same tokens when they come again: (first, second), in nats per token.

    A model that has learnt to copy (an induction head, Olsson et al. 2022) knows the second copy, all but its first
    token.

    Args:
        length: tokens in a copy, at most; less where the context is too short for two.
        rows, seed: how many random texts, and which.
        end_id: the token that opens a text.
    """
    length = min(length, model.config.context_length // 2)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size - 1, (rows, length), generator=generator)
    tokens += tokens >= end_id  # every token but the end
    twice = torch.cat([torch.full((rows, 1), end_id), tokens, tokens], dim=1)
    losses = torch.stack(_losses(model, twice.tolist(), [0] * rows))
    return float(losses[:, :length].mean()), float(losses[:, length:].mean())


def _losses(model: Decoder, rows: Sequence[Sequence[int]], known: Sequence[int]) -> tuple[Tensor, ...]:
    """Cross-entropy of each row's tokens but the first, in nats; the first so many (`known`) of these left out."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    wanted = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
    for place, (row, first) in enumerate(zip(rows, known, strict=True)):
        tokens[place, : len(row)] = torch.tensor(row)
        wanted[place, first : len(row) - 1] = True
    counts = wanted.sum(dim=1).tolist()
    tokens, wanted = (x.to(model.embedding.weight.device) for x in (tokens, wanted))
    was_training = model.training
    model.eval()
    try:
        states = model.states(tokens[:, :-1])  # the filling comes last, so no token sees it
        logits = model.logits(states[wanted])  # of what counts alone: most of the work is in the vocabulary
    finally:
        model.train(was_training)
    losses: tuple[Tensor, ...] = F.cross_entropy(logits.float(), tokens[:, 1:][wanted], reduction="none").split(counts)
    return losses


def _describe(data: Packed) -> dict[str, int | float]:
    """What tells one run's data from another's."""
    return {name: getattr(data, name) for name in ("context_length", "size", "seed", "repeats")}


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


@dataclass(frozen=True)
class Measures:
    """How good a language model is.

    Attributes:
        bits_per_byte: on held-out files (see `bits_per_byte`).
        xz_each, xz_joined: what xz -9e needs for the same files, each by itself and all in one. These three are nan
            where nothing is held out.
        copy_first, copy_second: see `copying_loss`.
    """

    bits_per_byte: float
    xz_each: float
    xz_joined: float
    copy_first: float
    copy_second: float


def measure(
    model: Decoder,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    progress: Callable[[int, int], None] = lambda done, all: None,
) -> Measures:
    """Measures a model on the held-out files of a corpus, and on repeated tokens."""
    texts = [file.text for file in corpus.held_out]
    copying = copying_loss(model, end_id=tokenizer.end_id)
    if not texts:
        return Measures(math.nan, math.nan, math.nan, *copying)
    sizes = [len(text.encode()) for text in texts]
    each = sum(xz_bits_per_byte([text]) * size for text, size in zip(texts, sizes, strict=True)) / sum(sizes)
    bits = bits_per_byte(model, tokenizer, texts, progress=progress)
    return Measures(bits, each, xz_bits_per_byte(texts), *copying)


def card(
    measures: Measures,
    model: Decoder,
    data: Packed,
    settings: Settings,
    corpus: Corpus,
    *,
    command: str,
    seconds: float,
    begun_from: Path | None = None,
) -> str:
    """The model card: data, exact command, seed, steps, time and held-out loss, as Markdown.

    Args:
        begun_from: the folder of the model that training began with; its card is repeated.
    """
    read = sum(len(file.text.encode()) for file in corpus.training)
    tokens = settings.steps * settings.batch_size * data.context_length
    added = f"; {data.repeats:.0%} of the rows are random tokens, repeated, which teach copying" if data.repeats else ""
    config = {name: value for name, value in model.config.to_dict().items() if value is not None}
    bits, each, joined = measures.bits_per_byte, measures.xz_each, measures.xz_joined
    rows = {
        "configuration": f"`{json.dumps(config)}`",
        "data": f"{len(corpus.training):,} files, {read:,} bytes, {data.size:,} tokens{added}",
        "digest of the data": f"`{corpus.digest()}` (Python {platform.python_version()})",
        "command": f"`{command}`",
        "settings": f"`{json.dumps(asdict(settings))}`",
        "trained on": f"{tokens:,} tokens, {tokens / data.size:.2f} epochs",
        "time": f"{seconds / 60:.0f} minutes, {torch.get_num_threads()} thread(s), torch {torch.__version__}",
        "held-out bits per byte": f"{bits:.4f}",
        "xz -9e on the same files": f"{each:.4f} each by itself (the model needs {bits / each:.3f} of that), "
        f"{joined:.4f} joined ({bits / joined:.3f})",
        "random tokens, then again": f"loss {measures.copy_first:.3f}, then {measures.copy_second:.3f} nats",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    held_out = "\n".join(f"- {file.path} ({len(file.text.encode()):,} bytes)" for file in corpus.held_out)
    before = ""
    if begun_from is not None:
        old = begun_from / "card.md"
        told = old.read_text(encoding="utf-8") if old.is_file() else "It has no card."
        rows_before = "\n".join(line for line in told.splitlines() if line.startswith("|")) or told
        before = f"\n## The model that training began with\n\n{rows_before}\n"
    return f"""# Model card

A decoder of {sum(p.numel() for p in model.parameters()):,} parameters.

| | |
|---|---|
{table}

The weights are stored in float16 and measured as stored. The licence of the texts is that of their authors. The model
writes what looks like these texts, and knows nothing else.
{before}
## Held-out files

{held_out}
"""

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

import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.masks import Document, Padding
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
        seed: of the weights' first values and of the data's order.
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
    that were to come.

    Args:
        folder: where model.safetensors and progress.safetensors are written.
        report: called after every step.
    Returns:
        Seconds of training in all, those before a resume included.
    Raises:
        ValueError: there is nothing to resume, or it was begun with other settings.
    """
    from accelerate import Accelerator

    torch.manual_seed(settings.seed)
    accelerator = Accelerator(mixed_precision=_precision(settings.precision))
    optimizers = make_optimizers(model, settings)
    progress = folder / "progress.safetensors"
    first, before = 0, 0.0
    if resume:
        header = progress_header(progress)
        changed = {k for k, v in asdict(settings).items() if k != "save_every" and header["settings"].get(k) != v}
        if changed:
            raise ValueError(f"{progress}: begun with other settings: {', '.join(sorted(changed))}")
        load_progress(progress, model, optimizers)
        first, before = header["step"], header["seconds"]
    wrapped, *prepared = accelerator.prepare(model, *optimizers)
    world, rank = accelerator.num_processes, accelerator.process_index
    start = time.perf_counter()

    def save(step: int) -> None:
        if accelerator.is_main_process:
            header = {"step": step, "seconds": elapsed(), "settings": asdict(settings)}
            save_progress(progress, model, optimizers, header)

    def elapsed() -> float:
        return before + time.perf_counter() - start

    model.train()
    step = first
    try:
        while step < settings.steps:
            began = time.perf_counter()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = settings.rate(step)
            batch = data.batch((step * world + rank) * settings.batch_size, settings.batch_size)
            with accelerator.autocast():
                loss = next_token_loss(wrapped, Batch(*(part.to(accelerator.device) for part in batch)))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), settings.clip)
            for optimizer in prepared:
                optimizer.step()
                optimizer.zero_grad()
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
    save(step)
    if accelerator.is_main_process:
        save_model(folder, model)
    return elapsed()


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

    A text longer than the context is read in overlapping pieces of context_length tokens, `stride` apart (default:
    half the context); each token is counted once, in the piece where it has the most before it. Every text stands
    alone, after one end token.
    """
    length = model.config.context_length
    stride = length // 2 if stride is None else stride
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
        losses = _losses(model, [piece for piece, _ in some])
        for row, (piece, counted) in zip(losses, some, strict=True):
            bits += float(row[counted : len(piece) - 1].double().sum()) / math.log(2)
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
    tokens = torch.randint(1, model.config.vocab_size, (rows, length), generator=generator)
    twice = torch.cat([torch.full((rows, 1), end_id), tokens, tokens], dim=1)
    losses = _losses(model, twice.tolist())
    return float(losses[:, :length].mean()), float(losses[:, length:].mean())


def _losses(model: Decoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """Cross-entropy of every token but the first of each row, in nats: [rows, longest - 1], undefined after a row's end."""
    lengths = [len(row) - 1 for row in rows]
    tokens = torch.zeros(len(rows), max(lengths) + 1, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    tokens = tokens.to(model.embedding.weight.device)
    logits = model(tokens[:, :-1], mask=Padding(lengths))
    return F.cross_entropy(logits.transpose(1, 2).float(), tokens[:, 1:], reduction="none").cpu()


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
        bits_per_byte: on held-out files (see `bits_per_byte`); None where nothing is held out.
        xz_each, xz_joined: what xz -9e needs for the same files, each by itself and all in one.
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
    sizes = [len(text.encode()) for text in texts]
    return Measures(
        bits_per_byte(model, tokenizer, texts, progress=progress),
        sum(xz_bits_per_byte([text]) * size for text, size in zip(texts, sizes, strict=True)) / sum(sizes),
        xz_bits_per_byte(texts),
        *copying_loss(model, end_id=tokenizer.end_id),
    )


def card(
    measures: Measures,
    model: Decoder,
    data: Packed,
    settings: Settings,
    corpus: Corpus,
    *,
    command: str,
    seconds: float,
) -> str:
    """The model card: data, exact command, seed, steps, time and held-out loss, as Markdown."""
    tokens = settings.steps * settings.batch_size * data.context_length
    bits = measures.bits_per_byte
    repeats = (
        f"{data.repeats:.0%} of the rows are random tokens, repeated until the row is full, which teach copying."
        if data.repeats
        else "Nothing is added to it."
    )
    held_out = "\n".join(f"- {file.path} ({len(file.text.encode()):,} bytes)" for file in corpus.held_out)
    return f"""# Model card

A decoder of {sum(p.numel() for p in model.parameters()):,} parameters.

| | |
|---|---|
| configuration | `{json.dumps({k: v for k, v in model.config.to_dict().items() if v is not None})}` |
| data | {len(corpus.training):,} files, {sum(len(f.text.encode()) for f in corpus.training):,} bytes, {data.size:,} tokens; {repeats} |
| digest of the data | `{corpus.digest()}` (Python {platform.python_version()}) |
| command | `{command}` |
| settings | `{json.dumps(asdict(settings))}` |
| trained on | {tokens:,} tokens, {tokens / data.size:.2f} epochs |
| time | {seconds / 60:.0f} minutes, {torch.get_num_threads()} thread(s), torch {torch.__version__} |
| held-out bits per byte | {bits:.4f} |
| xz -9e on the same files | {measures.xz_each:.4f} each by itself ({bits / measures.xz_each:.3f}), {measures.xz_joined:.4f} joined ({bits / measures.xz_joined:.3f}) |
| random tokens, then again | loss {measures.copy_first:.3f}, then {measures.copy_second:.3f} nats |

The weights are stored in float16 and measured as stored. The data is the software's own source and documentation; its
licence is that of its authors. The model writes what looks like that text, and knows nothing else.

## Held-out files

{held_out}
"""

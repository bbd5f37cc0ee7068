"""Evaluation of a language model: bits per byte on held-out texts, and whether it has learnt to copy.

A model that predicts text can compress it, to its cross-entropy in bits; so a language model and xz can be compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models import Decoder
from regard.training.corpus import Corpus, xz_bits_per_byte
from regard.training.text import Tokenizer


@dataclass(frozen=True)
class Measures:
    """The evaluation of a language model.

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

    def rows(self) -> dict[str, str]:
        """For the model card."""
        bits, each, joined = self.bits_per_byte, self.xz_each, self.xz_joined
        return {
            "held-out bits per byte": f"{bits:.4f}",
            "xz -9e on the same files": f"{each:.4f} each by itself (the model needs {bits / each:.3f} of that), "
            f"{joined:.4f} joined ({bits / joined:.3f})",
            "random tokens, then again": f"loss {self.copy_first:.3f}, then {self.copy_second:.3f} nats",
        }

    def __str__(self) -> str:
        return (
            f"held out: {self.bits_per_byte:.3f} bits per byte (xz -9e: {self.xz_each:.3f} file by file, "
            f"{self.xz_joined:.3f} joined)\n"
            f"random tokens, then again: loss {self.copy_first:.2f}, then {self.copy_second:.2f}"
        )


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

"""The task of an encoder: to foretell tokens that were hidden from it, from what stands on both sides.

Of every row 15% of the tokens are chosen. Of these, 80% are replaced by `<|end|>`, which stands for no text, 10% by a
random token, and 10% are left as they are, so that the model has to have an opinion about tokens that it can see. Which
ones follows from the seed and the row's place alone. The loss is on the chosen tokens.

References:
    Devlin et al. 2018, "BERT", section 3.1 (the shares).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.masks import Document
from regard.models import MaskedLanguageModel
from regard.training.data import Batch, Packed, PerToken, seeded
from regard.training.language import SAMPLED, Language
from regard.training.loss import IGNORED, cross_entropy
from regard.training.report import Listener
from regard.training.settings import Recipe
from regard.training.task import Task
from regard.training.text import Tokenizer

CHOSEN, HIDDEN, REPLACED = 0.15, 0.8, 0.1
"""Shares: of the tokens, those that are to be foretold; of these, those that `<|end|>` and random tokens replace."""


class MaskedBatch(NamedTuple):
    """Rows for the model, each [batch, context_length].

    Attributes:
        tokens: what the model reads; int64. targets: what stood there; int64, `IGNORED` where nothing is asked.
        documents: which document of its row each token belongs to; int32.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor

    def per_token(self) -> PerToken:
        """What is there for every token of the text, and of another that is read besides."""
        return ("tokens", "targets"), ()


class Masked:
    """Packed texts with tokens hidden in them (see the module's docstring).

    >>> packed = Packed([[5, 6, 7, 8, 9] * 20], context_length=50, vocab_size=10)
    >>> batch = Masked(packed).batch(0, 2)
    >>> round(int((batch.targets != IGNORED).sum()) / batch.targets.numel(), 2)
    0.16
    """

    def __init__(self, packed: Packed) -> None:
        self.packed, self.size = packed, packed.size

    def batch(self, position: int, batch_size: int) -> MaskedBatch:
        rows = self.packed.batch(position, batch_size)
        parts = [
            self.hidden(Batch(*(part[row : row + 1] for part in rows)), position + row) for row in range(batch_size)
        ]
        return MaskedBatch(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def hidden(self, rows: Batch, place: int) -> MaskedBatch:
        """Rows with tokens hidden, which ones by their place."""
        packed, generator = self.packed, seeded(self.packed.seed, "hidden", place)
        text = rows.tokens != packed.end_id
        count = max(1, round(CHOSEN * int(text.sum())))
        # the same number in every row of the same length, at random places
        order = torch.rand(rows.tokens.shape, generator=generator).masked_fill(~text, 2.0)
        chosen = (order <= order.flatten().sort().values[count - 1]) & text
        dice = torch.rand(rows.tokens.shape, generator=generator)
        anything = torch.randint(packed.vocab_size, rows.tokens.shape, generator=generator)
        tokens = rows.tokens.masked_fill(chosen & (dice < HIDDEN), packed.end_id)
        tokens = torch.where(chosen & (dice >= HIDDEN) & (dice < HIDDEN + REPLACED), anything, tokens)
        return MaskedBatch(tokens, rows.tokens.masked_fill(~chosen, IGNORED), rows.documents)

    def loss(self, model: Callable[..., Tensor], batch: MaskedBatch) -> Tensor:
        asked = batch.targets != IGNORED
        logits = model(batch.tokens, where=asked, mask=Document(batch.documents))
        return cross_entropy(logits, batch.targets[asked])

    def tokens(self, batch: MaskedBatch) -> int:
        return batch.tokens.numel()

    def counted(self, batch: MaskedBatch) -> int:
        return int((batch.targets != IGNORED).sum())

    def epochs(self, rows: int) -> float:
        return self.packed.epochs(rows)

    def facts(self) -> dict[str, Any]:
        return self.packed.facts()

    def digest(self) -> str:
        return self.packed.digest()


@dataclass(frozen=True)
class Foretold:
    """How well hidden tokens of held-out texts are foretold.

    Attributes:
        count: how many were asked for. loss: nats per token. exact: share that the model's first guess has right.
        usual: the share that the most frequent token of these texts would have right.
    """

    count: int
    loss: float
    exact: float
    usual: float

    def rows(self) -> Mapping[str, str]:
        return {
            "hidden tokens of held-out texts": f"{self.count:,}",
            "loss on them": f"{self.loss:.3f} nats",
            "foretold exactly": f"{self.exact:.2%} (the most frequent token: {self.usual:.2%})",
        }

    def __str__(self) -> str:
        return (
            f"held out: {self.exact:.1%} of {self.count:,} hidden tokens foretold exactly (the most frequent token: "
            f"{self.usual:.1%}), loss {self.loss:.3f} nats"
        )


class Masking(Task):
    """Texts, packed into rows, for a `MaskedLanguageModel`."""

    model = MaskedLanguageModel
    sizes: ClassVar = {"vocab_size": 4096, "context_length": 256, "dim": 192, "layers": 6, "heads": 6}

    def __init__(self, recipe: Recipe, listener: Listener) -> None:
        self.language = Language(recipe, listener)  # the same texts, held out alike

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        return self.language.tokenizer(vocab_size)

    def examples(self, tokenizer: Tokenizer, context_length: int) -> Masked:
        return Masked(self.language.examples(tokenizer, context_length))

    def held_out_examples(self, tokenizer: Tokenizer, context_length: int) -> Masked:
        return Masked(self.language.held_out_examples(tokenizer, context_length))

    @torch.inference_mode()
    def sample(self, model: MaskedLanguageModel, tokenizer: Tokenizer) -> str:
        """The beginning of a held-out text; what was hidden is in brackets, as the model foretells it."""
        batch = self.held_out_examples(tokenizer, model.config.context_length).batch(0, 1)
        told = model(batch.tokens, mask=Document(batch.documents)).argmax(-1)
        hidden = batch.targets[0] != IGNORED
        shown = torch.where(hidden, told[0], batch.tokens[0])[:SAMPLED]
        pieces = tokenizer.pieces(shown.tolist())
        return "".join(f"[{piece}]" if asked else piece for piece, asked in zip(pieces, hidden.tolist(), strict=False))

    @torch.inference_mode()
    def measure(
        self, model: MaskedLanguageModel, tokenizer: Tokenizer, progress: Callable[[int, int], None]
    ) -> Foretold:
        held_out = [file.text for file in self.language.corpus.held_out]
        packed = Packed.from_texts(held_out, tokenizer, context_length=model.config.context_length)
        data, losses, right, done = Masked(packed), 0.0, 0, 0
        wanted: list[Tensor] = []
        for number, rows in enumerate(packed.once(8)):
            batch = data.hidden(rows, number)
            asked = batch.targets != IGNORED
            logits = model(batch.tokens, where=asked, mask=Document(batch.documents)).float()
            losses += float(F.cross_entropy(logits, batch.targets[asked], reduction="sum"))
            right += int((logits.argmax(-1) == batch.targets[asked]).sum())
            wanted.append(batch.targets[asked])
            done += len(rows.tokens)
            progress(done, packed.rows)
        every = torch.cat(wanted)
        return Foretold(len(every), losses / len(every), right / len(every), int(every.bincount().max()) / len(every))

    def card(self) -> Mapping[str, str]:
        return self.language.card()

    def remarks(self) -> str:
        return (
            "The model foretells hidden tokens from both sides, and its states can be the beginning of a classifier "
            f"(`regard train --task classify --from`).\n\n## Held-out files\n\n{self.language.held_out()}"
        )

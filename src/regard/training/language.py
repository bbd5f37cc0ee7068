"""The task of a language model: to foretell the next token of texts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import torch

from regard.generation import generate
from regard.models import Decoder
from regard.training import corpus as sources
from regard.training.corpus import Corpus
from regard.training.data import Packed
from regard.training.measures import Measures, measure
from regard.training.report import Listener
from regard.training.settings import Recipe
from regard.training.task import Task
from regard.training.text import Tokenizer, train_tokenizer

SAMPLED = 60
"""Tokens of a sample text: a line or a few."""


class Language(Task):
    """Texts, packed into rows, for a `Decoder`."""

    model = Decoder
    sizes: ClassVar = {"vocab_size": 4096, "context_length": 512, "dim": 192, "layers": 6, "heads": 6}

    def __init__(self, recipe: Recipe, listener: Listener) -> None:
        self.recipe, self.listener = recipe, listener
        self.corpus = _read(recipe)
        listener.note(str(self.corpus))
        if not self.corpus.held_out:
            alike = any(reason.startswith("held out, but") for reason in self.corpus.skipped.values())
            why = "holds texts too much alike" if alike else "is too little"
            raise ValueError(
                f"--data: {recipe.data} {why} to hold some of it out, to measure with; give more texts, or more lines"
            )
        self.texts = [file.text for file in self.corpus.training]

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        return Tokenizer(train_tokenizer(self.texts, vocab_size))

    def examples(self, tokenizer: Tokenizer, context_length: int) -> Packed:
        return Packed.from_texts(
            self.texts,
            tokenizer,
            context_length=context_length,
            seed=self.recipe.seed,
            repeats=self.recipe.repeats,
            progress=lambda done, total: self.listener.progress("cutting into tokens", done, total),
        )

    def held_out_examples(self, tokenizer: Tokenizer, context_length: int) -> Packed:
        texts = [file.text for file in self.corpus.held_out]
        return Packed.from_texts(texts, tokenizer, context_length=context_length)

    def sample(self, model: Decoder, tokenizer: Tokenizer) -> str:
        generator, end = torch.Generator().manual_seed(self.recipe.seed), tokenizer.end_id
        written = generate(model, [end], SAMPLED, temperature=0.8, end_id=end, generator=generator)
        return tokenizer.decode(list(written)).rstrip()

    def measure(self, model: Decoder, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> Measures:
        return measure(model, tokenizer, self.corpus, progress=progress)

    def card(self) -> Mapping[str, str]:
        read = sum(len(file.text.encode()) for file in self.corpus.training)
        share = self.recipe.repeats
        added = f"; {share:.0%} of the rows are random tokens, repeated, which teach copying" if share else ""
        return {
            "data": f"{len(self.corpus.training):,} files, {read:,} bytes{added}",
            "digest of the data": f"`{self.corpus.digest()}`",
        }

    def remarks(self) -> str:
        return (
            "The model writes what looks like these texts, and knows nothing else.\n\n## Held-out files\n\n"
            f"{self.held_out()}"
        )

    def held_out(self) -> str:
        """The files that were held out, as a list in Markdown."""
        return "\n".join(f"- {file.path} ({len(file.text.encode()):,} bytes)" for file in self.corpus.held_out)


def _read(recipe: Recipe) -> Corpus:
    if recipe.data == "stdlib":
        return sources.standard_library()
    if Path(recipe.data).is_dir():
        return sources.folder(recipe.data, recipe.pattern)
    return sources.files([recipe.data])

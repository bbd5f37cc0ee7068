"""The task of a classifier: to tell the label of a text, learned from a table of both.

**Held out.** About one text in ten of each label, decided by a hash of the text, is never trained on; a text that comes
twice is on one side.

**Without a table**, the standard library gives one: the docstrings of its packages, with the package as the label. They
are under the PSF licence.
"""

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.configuration import ModelConfig
from regard.masks import Padding
from regard.models import Classifier, MaskedLanguageModel
from regard.training import corpus as sources
from regard.training.labelled import Labelled, filled
from regard.training.report import Listener
from regard.training.settings import Recipe
from regard.training.table import Table, read_table
from regard.training.task import Task
from regard.training.text import Tokenizer, train_tokenizer

HELD_OUT_SHARE = 0.1

MAX_SHOWN_LABELS = 12
"""Most labels whose confusion is shown as a table; of more, the most frequent confusions are listed."""

SECTIONS = 8
"""Packages of the standard library whose docstrings are told apart: those with the most."""

SAMPLED = 3
"""Texts of a sample."""


@dataclass(frozen=True)
class Confusion:
    """How the labels of held-out texts are told.

    Attributes:
        labels: their names. counts: int [true label, told label].
    """

    labels: tuple[str, ...]
    counts: Tensor

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return int(self.counts.diagonal().sum()) / int(self.counts.sum())

    @property
    def usual(self) -> float:
        """The share that would be right if the most frequent label were told every time."""
        return int(self.counts.sum(1).max()) / int(self.counts.sum())

    @property
    def f1(self) -> float:
        """The mean over the labels of 2 * right / (texts that have it + texts that were told it)."""
        both = self.counts.sum(0) + self.counts.sum(1)
        return float((2 * self.counts.diagonal() / both.clamp(min=1)).mean())

    def rows(self) -> Mapping[str, str]:
        return {
            "held-out texts": f"{int(self.counts.sum()):,}, {len(self.labels)} labels",
            "label right": f"{self.accuracy:.2%} (the most frequent label: {self.usual:.2%})",
            "F1, mean over the labels": f"{self.f1:.3f}",
        }

    def table(self) -> str:
        """The confusion of labels, in lines: a row for each true label, a column for each that was told."""
        if len(self.labels) > MAX_SHOWN_LABELS:
            wrong = self.counts.clone().fill_diagonal_(0)
            likeliest = wrong.flatten().argsort(descending=True)[:MAX_SHOWN_LABELS].tolist()
            return "\n".join(
                f"{int(wrong.flatten()[place]):>6}  {self.labels[place // len(self.labels)]} told as "
                f"{self.labels[place % len(self.labels)]}"
                for place in likeliest
                if wrong.flatten()[place]
            )
        names = [_short(label) for label in self.labels]
        first = max(len("true / told"), *map(len, names))
        widths = [
            max(len(name), len(str(int(column.max())))) for name, column in zip(names, self.counts.T, strict=True)
        ]
        head = "  ".join([f"{'true / told':<{first}}", *(f"{n:>{w}}" for n, w in zip(names, widths, strict=True))])
        lines = [
            "  ".join([f"{name:<{first}}", *(f"{n:>{w}}" for n, w in zip(row.tolist(), widths, strict=True))])
            for name, row in zip(names, self.counts, strict=True)
        ]
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        told = f"held out: {self.accuracy:.1%} of {int(self.counts.sum()):,} texts have the right label"
        return f"{told} (the most frequent label: {self.usual:.1%}), F1 {self.f1:.3f}\n{self.table()}"


class Classifying(Task):
    """Texts with labels, two columns of a table, for a `Classifier`."""

    model = Classifier
    sizes: ClassVar = {"vocab_size": 4096, "context_length": 256, "dim": 128, "layers": 4, "heads": 4}
    architecture: ClassVar = {"labels": ("", " ")}  # as many as there are at least; the table names them

    def __init__(self, recipe: Recipe, listener: Listener) -> None:
        self.recipe, self.listener = recipe, listener
        if recipe.data == "stdlib":
            self.table = standard_library()
        else:
            self.table = read_table(recipe.data, [recipe.source or "text", recipe.target or "label"])
        self.training, self.held_out = split(self.table.rows, recipe.data)
        self.labels = tuple(sorted({label for _, label in self.training}))
        blank = f"; left out: {self.table.blank:,} with a blank field" if self.table.blank else ""
        listener.note(
            f"{len(self.training) + len(self.held_out):,} texts, {len(self.labels)} labels; "
            f"{len(self.held_out):,} held out{blank}"
        )
        self.confusion: Confusion | None = None

    def config(self, config: ModelConfig) -> ModelConfig:
        return replace(config, labels=self.labels)

    @classmethod
    def may_start_from(cls, model: object) -> bool:
        return isinstance(model, Classifier | MaskedLanguageModel)

    def start_from(self, model: Classifier, first: Classifier | MaskedLanguageModel) -> None:
        model.encoder.load_state_dict(first.encoder.state_dict())

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        return Tokenizer(train_tokenizer([text for text, _ in self.training], vocab_size))

    def examples(self, tokenizer: Tokenizer, context_length: int) -> Labelled:
        self.listener.progress("cutting into tokens", 0, 1)
        data = self._labelled(self.training, tokenizer, context_length)
        self.listener.progress("cutting into tokens", 1, 1)
        if data.cut:
            self.listener.note(
                f"{data.cut:,} texts are longer than {context_length} tokens, and are read up to there; "
                "--context-length takes longer ones"
            )
        return data

    def held_out_examples(self, tokenizer: Tokenizer, context_length: int) -> Labelled:
        return self._labelled(self.held_out, tokenizer, context_length)

    def _labelled(self, texts: Sequence[tuple[str, str]], tokenizer: Tokenizer, context_length: int) -> Labelled:
        return Labelled(
            tokenizer.encode_batch([text for text, _ in texts]),
            [self.labels.index(label) for _, label in texts],
            context_length=context_length,
            end_id=tokenizer.end_id,
            seed=self.recipe.seed,
        )

    def sample(self, model: Classifier, tokenizer: Tokenizer) -> str:
        texts = [text for text, _ in self.held_out[:SAMPLED]]
        told = probabilities(model, tokenizer, texts).max(-1)
        return "\n".join(
            f"{' '.join(text.split())[:60]} → {self.labels[number]}, {share:.2f}"
            for text, number, share in zip(texts, told.indices.tolist(), told.values.tolist(), strict=True)
        )

    def measure(self, model: Classifier, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> Confusion:
        counts = torch.zeros(len(self.labels), len(self.labels), dtype=torch.int64)
        for first in range(0, len(self.held_out), 64):
            some = self.held_out[first : first + 64]
            told = probabilities(model, tokenizer, [text for text, _ in some]).argmax(-1)
            for (_, label), number in zip(some, told.tolist(), strict=True):
                counts[self.labels.index(label), number] += 1
            progress(first + len(some), len(self.held_out))
        self.confusion = Confusion(self.labels, counts)
        return self.confusion

    def card(self) -> Mapping[str, str]:
        read = sum(len(text.encode()) for text, _ in self.training)
        total = hashlib.sha256()
        for field in (field for row in (*self.training, *self.held_out) for field in row):
            total.update(hashlib.sha256(field.encode()).digest())
        return {
            "data": f"{len(self.training):,} texts, {' and '.join(self.table.columns)}, {read:,} bytes",
            "digest of the data": f"`{total.hexdigest()}`",
        }

    def remarks(self) -> str:
        said = "The model tells one of its labels for every text, whatever it is about."
        if self.confusion is None:
            return said
        return f"{said}\n\n## Confusion on held-out texts\n\n```text\n{self.confusion.table()}\n```"


@torch.inference_mode()
def probabilities(model: Classifier, tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """The probability of each label of each text, [texts, labels]; a text is read up to the model's context."""
    rows = [[tokenizer.end_id, *ids][: model.config.context_length] for ids in tokenizer.encode_batch(texts)]
    tokens, lengths = filled(rows, tokenizer.end_id)
    logits: Tensor = model(tokens, mask=Padding(lengths))
    return logits.float().softmax(-1)


def split(rows: Sequence[tuple[str, ...]], source: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and held-out texts with their labels: see the module's docstring.

    Raises:
        ValueError: there is one label alone, or one with a single text.
    """
    by_label: dict[str, dict[str, None]] = {}
    for text, label in rows:
        by_label.setdefault(label, {})[text] = None
    if len(by_label) < 2:
        raise ValueError(f"--data: {source}: expected two labels or more, got {next(iter(by_label))!r} alone")
    rare = sorted(label for label, texts in by_label.items() if len(texts) < 2)
    if rare:
        more = f" and {len(rare) - 3} more" if len(rare) > 3 else ""
        raise ValueError(
            f"--data: {source}: expected two different texts or more of each label, one to learn from and one to "
            f"measure with; there is one of {', '.join(map(repr, rare[:3]))}{more}"
        )
    held_out: set[str] = set()
    kept: set[str] = set()
    for _, texts in sorted(by_label.items()):
        ranked = sorted(texts, key=_rank)
        wanted = max(1, round(HELD_OUT_SHARE * len(ranked)))
        for text in ranked:  # a text of several labels stays on the side where it is already
            if text not in held_out and text not in kept:
                (held_out if sum(t in held_out for t in texts) < wanted else kept).add(text)
    pairs = list(dict.fromkeys((text, label) for text, label in rows))
    training, measured = ([pair for pair in pairs if (pair[0] in held_out) == out] for out in (False, True))
    missing = sorted(set(by_label) - {label for _, label in training})
    if missing:
        raise ValueError(
            f"--data: {source}: label {missing[0]!r} has no text of its own to learn from; "
            "its texts have other labels, too"
        )
    return training, measured


def standard_library() -> Table:
    """The docstrings of the standard library, and the package that each is in."""
    library = sources.standard_library()
    found: dict[str, list[str]] = {}
    for file in (*library.training, *library.held_out):
        parts = file.path.split("/")
        if len(parts) < 2 or not file.path.endswith(".py") or {"test", "tests", "idle_test"} & set(parts):
            continue
        try:
            tree = ast.parse(file.text)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= 40:
                    found.setdefault(parts[0], []).append(text)
    most = sorted(found, key=lambda name: (-len(found[name]), name))[:SECTIONS]
    return Table(("text", "label"), [(text, name) for name in sorted(most) for text in found[name]], 0)


def _rank(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _short(label: str) -> str:
    return label if len(label) <= 16 else label[:15] + "…"

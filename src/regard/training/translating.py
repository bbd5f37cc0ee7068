"""The task of an encoder-decoder: to read one text and write another, learned from pairs of them.

**Held out.** About one target in twenty, decided by a hash of its text, is never trained on, with all of its sources.
So what the model is measured with it has never been told, by any source.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from regard.generation import translate
from regard.models import EncoderDecoder
from regard.training.corpus import HELD_OUT_ONE_IN
from regard.training.pairs import Pairs
from regard.training.report import Listener
from regard.training.settings import Recipe
from regard.training.table import Table, read_table
from regard.training.task import Task
from regard.training.text import CHARACTERS, Tokenizer, train_tokenizer

MISTAKES = 20
"""Most mistakes that a model card shows."""

SAMPLED = 3
"""Pairs of a sample."""

MEASURED_AT_ONCE = 512
"""Pairs between two reports of progress."""


class Translation(NamedTuple):
    """What a model wrote for a text.

    Attributes:
        text: what it wrote. probability: of the whole text, as the model sees it.
        score: what texts are ranked by. ended: whether the model ended it.
    """

    text: str
    probability: float
    score: float
    ended: bool


def translate_texts(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    count: int | None = None,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[Translation]]:
    """`regard.translate`, for texts: what a model that was trained on pairs writes for each, the best first.

    Raises:
        ValueError: a text is longer than the model's context, or a number is out of range.

    >>> import regard
    >>> dates = regard.load("dates")
    >>> [[best.text for best in found] for found in translate_texts(dates.model, dates.tokenizer, ["3. März 2026"])]
    [['2026-03-03']]
    """
    sources = [[tokenizer.end_id, *ids] for ids in tokenizer.encode_batch(texts)]
    room = model.config.context_length
    for text, source in zip(texts, sources, strict=True):
        if len(source) > room:
            shown = text if len(text) <= 40 else text[:39] + "…"
            raise ValueError(f"{shown!r}: {len(source)} tokens are more than the {room} that the model can read")
    found = translate(model, sources, count, beams=beams, length_penalty=length_penalty, end_id=tokenizer.end_id)
    return [
        [
            Translation(tokenizer.decode(one.tokens), math.exp(one.log_probability), one.score, one.ended)
            for one in written
        ]
        for written in found
    ]


class Mistake(NamedTuple):
    """A held-out pair that the model got wrong."""

    source: str
    target: str
    written: str


@dataclass(frozen=True)
class Exactness:
    """How many held-out sources a model translates exactly, greedily.

    Attributes:
        pairs: how many there are. exact: how many are right in every character. mistakes: the first of the others.
    """

    pairs: int
    exact: int
    mistakes: tuple[Mistake, ...]

    def rows(self) -> dict[str, str]:
        """For the model card."""
        return {"held-out pairs translated exactly": f"{self.exact:,} of {self.pairs:,}, {self.exact / self.pairs:.2%}"}

    def __str__(self) -> str:
        return f"held out: {self.exact:,} of {self.pairs:,} translated exactly, {self.exact / self.pairs:.2%}"


def exactness(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exactness:
    """Translates the source of every pair and compares it with the target."""
    exact = 0
    mistakes: list[Mistake] = []
    for first in range(0, len(pairs), MEASURED_AT_ONCE):
        some = pairs[first : first + MEASURED_AT_ONCE]
        for (source, target), found in zip(
            some, translate_texts(model, tokenizer, [source for source, _ in some]), strict=True
        ):
            if found[0].text == target:
                exact += 1
            elif len(mistakes) < MISTAKES:
                mistakes.append(Mistake(source, target, found[0].text))
        progress(first + len(some), len(pairs))
    return Exactness(len(pairs), exact, tuple(mistakes))


class Translating(Task):
    """Pairs of texts, two columns of a table, for an `EncoderDecoder`."""

    model = EncoderDecoder
    sizes: ClassVar = {"vocab_size": 2048, "context_length": 128, "dim": 64, "layers": 2, "heads": 4}

    def __init__(self, recipe: Recipe, listener: Listener) -> None:
        self.recipe, self.listener = recipe, listener
        if recipe.data == "stdlib":
            raise ValueError("--data: expected a table of pairs, a .csv, .tsv or .jsonl file, got none")
        self.table = read_table(recipe.data, [recipe.source, recipe.target])
        self.training, self.held_out = split(self.table)
        blank = f"; left out: {self.table.blank:,} with a blank field" if self.table.blank else ""
        names = " to ".join(self.table.columns)
        pairs = len(self.training) + len(self.held_out)
        listener.note(f"{pairs:,} pairs, {names}; {len(self.held_out):,} held out{blank}")
        self.measured: Exactness | None = None

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        texts = [text for pair in self.training for text in pair]
        return Tokenizer(train_tokenizer(texts, vocab_size, split=CHARACTERS))

    def examples(self, tokenizer: Tokenizer, context_length: int) -> Pairs:
        self.listener.progress("cutting into tokens", 0, 1)
        short = _short(self.training, tokenizer, context_length)
        if len(short) < len(self.training):
            self.listener.note(
                f"{len(self.training) - len(short):,} pairs are longer than {context_length} tokens and are not "
                "trained on; --context-length takes longer ones"
            )
        if not short:
            raise ValueError(f"--context-length: no pair fits into {context_length} tokens; give more")
        self.listener.progress("cutting into tokens", 1, 1)
        return Pairs(short, end_id=tokenizer.end_id, seed=self.recipe.seed)

    def held_out_examples(self, tokenizer: Tokenizer, context_length: int) -> Pairs:
        short = _short(self.held_out, tokenizer, context_length)
        if not short:
            raise ValueError(f"--context-length: no held-out pair fits into {context_length} tokens; give more")
        return Pairs(short, end_id=tokenizer.end_id)

    def sample(self, model: EncoderDecoder, tokenizer: Tokenizer) -> str:
        room = model.config.context_length
        ids = tokenizer.encode_batch([source for source, _ in self.held_out])
        asked = [source for (source, _), read in zip(self.held_out, ids, strict=True) if len(read) < room][:SAMPLED]
        found = translate_texts(model, tokenizer, asked) if asked else []
        return "\n".join(f"{source} → {best[0].text}" for source, best in zip(asked, found, strict=True))

    def measure(self, model: EncoderDecoder, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> Exactness:
        room = model.config.context_length
        ids = tokenizer.encode_batch([source for source, _ in self.held_out])
        short = [pair for pair, source in zip(self.held_out, ids, strict=True) if len(source) < room]
        self.measured = exactness(model, tokenizer, short, progress)
        return self.measured

    def card(self) -> Mapping[str, str]:
        read = sum(len(text.encode()) for pair in self.training for text in pair)
        return {
            "data": f"{len(self.training):,} pairs, {' to '.join(self.table.columns)}, {read:,} bytes",
            "digest of the data": f"`{digest([*self.training, *self.held_out])}`",
        }

    def remarks(self) -> str:
        said = "The model writes what these targets look like, whatever it is given to read."
        if self.measured is None or not self.measured.mistakes:
            return said
        lines = [f"| `{wrong.source}` | `{wrong.target}` | `{wrong.written}` |" for wrong in self.measured.mistakes]
        table = "\n".join(["| source | target | written |", "|---|---|---|", *lines])
        return f"{said}\n\n## Mistakes on held-out pairs\n\n{table}"


def _short(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, context_length: int
) -> list[tuple[list[int], list[int]]]:
    """The tokens of the pairs that fit into a context, with the end token."""
    sources, targets = (tokenizer.encode_batch(texts) for texts in zip(*pairs, strict=True))
    return [pair for pair in zip(sources, targets, strict=True) if max(map(len, pair)) < context_length]


def split(table: Table) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and held-out pairs, each pair once: see the module's docstring.

    Raises:
        ValueError: there are fewer than two targets.
    """
    pairs = [(source, target) for source, target in dict.fromkeys(table.rows)]
    ranked = sorted({target for _, target in pairs}, key=_rank)
    if len(ranked) < 2:
        raise ValueError(f"--data: expected two different targets or more, got {ranked[0]!r} alone")
    chosen = set(ranked[: max(1, sum(_rank(target)[0] == 0 for target in ranked))])
    return [pair for pair in pairs if pair[1] not in chosen], [pair for pair in pairs if pair[1] in chosen]


def digest(pairs: Sequence[tuple[str, str]]) -> str:
    """The SHA-256 of pairs, in hexadecimal: two runs with the same digest had the same data."""
    total = hashlib.sha256()
    for pair in pairs:
        for text in pair:
            total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _rank(target: str) -> tuple[int, int]:
    """Which targets are held out first: one in HELD_OUT_ONE_IN starts with 0. It depends on the text alone."""
    number = int.from_bytes(hashlib.sha256(target.encode()).digest(), "big")
    return number % HELD_OUT_ONE_IN, number

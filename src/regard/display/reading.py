"""A text read by a model: what every head did there, what the model expects next, and what is worth showing.

A model reads at most `context_length` tokens at once: the token that opens every text, and a window of the text. Tokens
are numbered within their window; number 0 is the one that opens it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.configuration import ModelConfig
from regard.display.script import Script, find_token
from regard.models import Decoder
from regard.observation import Observation
from regard.recording import Ablate, HeadSummary, Recording, intervene, record
from regard.training.text import Tokenizer

OPENING = "▸"
"""How the token that opens every text is shown; it stands for no letters."""

WINDOWS = 24
"""Most windows of a long text that are read for its overview; of a longer one, so many are chosen evenly."""

GUESSES = 5


class Place(NamedTuple):
    """A head of a layer, written 5.0."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer}.{self.head}"


class Guess(NamedTuple):
    """A token that may come next."""

    token: int
    text: str
    probability: float


class Actual(NamedTuple):
    """The token that does come next, and how it was expected: 1 is the model's first guess."""

    token: int
    text: str
    probability: float
    rank: int


@dataclass(frozen=True)
class Expected:
    """What a model expects after one token of a text.

    Attributes:
        without: the heads that gave nothing.
        guesses: the likeliest tokens. actual: what the text goes on with; None where it ends.
        loss: of the whole window, in nats per token; None for a window without a token to foretell.
    """

    without: tuple[Place, ...]
    guesses: tuple[Guess, ...]
    actual: Actual | None
    loss: float | None


class Window(NamedTuple):
    """A part of a long text: its first token and how many, its lines (from 1), the first whole one, its loss."""

    start: int
    tokens: int
    first_line: int
    last_line: int
    begins: str
    loss: float


@dataclass(frozen=True)
class Look:
    """A window of a text read by a model, and what every head did there.

    Attributes:
        start: which token of the whole text comes first in the window.
        query, layer, head: what is shown in detail; `chosen` says why.
        expected: after the query, by the whole model. without: the same without some heads; None if none was asked for.
        windows: those of a text longer than the context that were read; empty if it is not, or nobody asked.
    """

    model: str
    source: str
    script: Script
    start: int
    tokens: Tensor
    recording: Recording
    heads: list[HeadSummary]
    query: int
    layer: int
    head: int
    chosen: str
    expected: Expected
    without: Expected | None
    windows: tuple[Window, ...] = ()

    @property
    def count(self) -> int:
        """How many tokens the window has, with the one that opens it."""
        return self.tokens.shape[1]

    @property
    def stop(self) -> int:
        """Which token of the whole text comes after the window."""
        return self.start + self.count - 1

    def label(self, token: int) -> str:
        """A token of the window, in one line."""
        return OPENING if token == 0 else self.script.label(self.start + token - 1)

    def span(self, token: int) -> tuple[int, int]:
        """The characters of the whole text that a token of the window touches."""
        return (0, 0) if token == 0 else self.script.spans[self.start + token - 1]

    def of_layer(self, layer: int) -> list[HeadSummary]:
        """The heads of a layer in a few numbers each."""
        name = list(self.recording)[layer]
        return [s for s in self.heads if s.layer == name]

    def weights(self, layer: int) -> Tensor:
        """The weights of the shown query in every head of a layer: [heads, key_len]."""
        return _layer(self.recording, layer).weights(queries=slice(self.query, self.query + 1))[0, :, 0]


def look(
    model: Decoder,
    script: Script,
    *,
    name: str,
    source: str,
    start: int = 0,
    query: int | str | None = None,
    layer: int | None = None,
    head: int | None = None,
    without: Sequence[Place] = (),
    windows: Sequence[Window] = (),
) -> Look:
    """Reads a window of a text and gathers what there is to show.

    Args:
        start: which token the window begins with.
        query: which token of the window, as a number or by its text. layer, head: which head. What is None is chosen so
            that there is something to see.
        without: heads to take away, to see what the model then expects.
    Raises:
        ValueError: a number that is out of range, or a text that no token, or more than one, has.
    """
    config = model.config
    if not 0 <= start < len(script.ids):
        raise ValueError(
            f"--start must be 0 to {len(script.ids) - 1} (the text has {len(script.ids)} tokens), got {start}"
        )
    shown = [script.tokenizer.end_id, *script.ids[start : start + config.context_length - 1]]
    if isinstance(query, str):
        query = find_token(script, start, len(shown), query)
    check_numbers(config, without, query=(query, len(shown)), layer=(layer, config.layers), head=(head, config.heads))
    tokens = torch.tensor([shown])
    with torch.inference_mode(), record(model) as recording:
        logits = model(tokens)[0]
        heads = recording.summary(tokens)
        best = max(_candidates(script, start, recording, heads, tokens[0], logits, query, layer, head))
        expected = _expected(script, start, best.place[0], tokens[0], logits, ())
    return Look(
        name, source, script, start, tokens, recording, heads, *best.place, chosen=best.why, expected=expected,
        without=_without(model, script, start, best.place[0], tokens, tuple(without)), windows=tuple(windows),
    )  # fmt: skip


def check_numbers(config: ModelConfig, without: Sequence[Place], **numbers: tuple[int | None, int]) -> None:
    """Refuses heads that a model does not have, and numbers of options that are out of range.

    Args:
        numbers: by the name of the option, the number, or None, and how many there are.
    Raises:
        ValueError: one sentence that names the option.
    """
    for option, (value, count) in numbers.items():
        if value is not None and not 0 <= value < count:
            raise ValueError(f"--{option} must be 0 to {count - 1}, got {value}")
    for place in without:
        if not (0 <= place.layer < config.layers and 0 <= place.head < config.heads):
            raise ValueError(
                f"--without must be a head from 0.0 to {config.layers - 1}.{config.heads - 1}, LAYER.HEAD, got {place}"
            )


def _without(
    model: Decoder, script: Script, start: int, query: int, tokens: Tensor, heads: tuple[Place, ...]
) -> Expected | None:
    if not heads:
        return None
    with torch.inference_mode(), intervene(model, *(Ablate(place.layer, place.head) for place in heads)):
        return _expected(script, start, query, tokens[0], model(tokens)[0], heads)


def _expected(
    script: Script, start: int, query: int, tokens: Tensor, logits: Tensor, without: tuple[Place, ...]
) -> Expected:
    probabilities = logits[query].float().softmax(-1)
    likeliest = probabilities.topk(min(GUESSES, len(probabilities)))
    guesses = [
        Guess(token, _alone(script.tokenizer, token), probability)
        for probability, token in zip(likeliest.values.tolist(), likeliest.indices.tolist(), strict=True)
    ]
    follows = start + query  # in the whole text: the query's own place there is one less
    actual = None
    if follows < len(script.ids):
        token = script.ids[follows]
        rank = int((probabilities > probabilities[token]).sum()) + 1
        actual = Actual(token, script.label(follows), float(probabilities[token]), rank)
    return Expected(without, tuple(guesses), actual, _loss(tokens, logits))


def _loss(tokens: Tensor, logits: Tensor) -> float | None:
    return float(cross_entropy(logits[:-1].float(), tokens[1:])) if len(tokens) > 1 else None


def _alone(tokenizer: Tokenizer, token: int) -> str:
    """A token that stands in no text, in one line; part of a character as its bytes."""
    return (
        "end of text"
        if token in tokenizer.stop_ids
        else tokenizer.pieces([token])[0].replace("\\n", "↵").replace("\\t", "⇥")
    )


def read_windows(
    model: Decoder, script: Script, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Window]:
    """Reads a text that is longer than the model's context window by window, up to `WINDOWS` of them.

    Args:
        progress: called with how many windows have been read, and how many will be.
    """
    size = model.config.context_length - 1
    starts = script.windows(size)
    if len(starts) <= 1:
        return []
    count = min(len(starts), WINDOWS)
    found = []
    for done in range(count):
        progress(done, count)
        start = starts[round(done * (len(starts) - 1) / (count - 1))]
        ids = script.ids[start : start + size]
        tokens = torch.tensor([script.tokenizer.end_id, *ids])
        with torch.inference_mode():
            loss = _loss(tokens, model(tokens[None])[0])
        assert loss is not None
        begins = _first_line(script.text[script.spans[start][0] :][:2000], whole=start > 0)
        lines = script.line(start), script.line(start + len(ids) - 1)
        found.append(Window(start, len(ids), *lines, begins, loss))
    progress(count, count)
    return found


def _first_line(text: str, whole: bool) -> str:
    """What a window begins with: its first line with something in it, but not the rest of a line cut in two."""
    lines = [line.strip() for line in text.split("\n")]
    rest = [line for line in lines[1:] if line] if whole else []
    return next(iter(rest or [line for line in lines if line]), "")[:200]


@dataclass(frozen=True, order=True)
class _Candidate:
    """A query and a head that could be shown, and how much there is to see."""

    worth: float
    place: tuple[int, int, int]
    why: str


def _candidates(
    script: Script,
    start: int,
    recording: Recording,
    heads: Sequence[HeadSummary],
    tokens: Tensor,
    logits: Tensor,
    query: int | None,
    layer: int | None,
    head: int | None,
) -> Iterator[_Candidate]:
    """For every head that may be shown, its best query.

    A weight is worth more when its key is neither the first token nor next to the query, still more when it copies (the
    key follows an earlier occurrence of the query's token, in an induction head) and the model expects the copy, and
    rather late in the text, where there is more to choose from; much less where query or key has no letter.
    """
    places = torch.arange(len(tokens))
    lettered = torch.tensor(
        [any(map(str.isalpha, script.written(start + n - 1))) if n else False for n in places.tolist()]
    )
    expected = logits.float().softmax(-1)
    induction = {(s.layer, s.head) for s in heads if s.kind == "induction"}
    names = list(recording)
    for number in range(len(recording)) if layer is None else [layer]:
        seen = _layer(recording, number)
        top = seen.top(1)
        for h in range(seen.grid.heads) if head is None else [head]:
            weight, key = top.weights[0, h, :, 0], top.keys[0, h, :, 0]
            aside = (key > 0) & (key < places - 1)
            copies = aside & (tokens[(key - 1).clamp(min=0)] == tokens)
            if (names[number], h) not in induction:
                copies = torch.zeros_like(copies)
            copied = 4 + 4 * expected.gather(1, tokens[key, None])[:, 0]
            kind = torch.where(copies, copied, torch.where(aside, 1.0, 0.1))
            readable = torch.where(lettered & lettered[key], 1.0, 0.05)
            worth = weight * kind * readable * (0.5 + 0.5 * places / len(tokens))
            i = int(worth.argmax()) if query is None else query
            why = "chosen because it copies: the key follows an earlier occurrence of the query"
            if not copies[i]:
                why = (
                    "chosen because it looks farther back than the token before"
                    if aside[i]
                    else "chosen for its largest weight"
                )
            if None not in (query, layer, head):
                why = "as asked"
            yield _Candidate(float(worth[i]), (i, number, h), why)


def _layer(recording: Recording, number: int) -> Observation:
    return recording[number]

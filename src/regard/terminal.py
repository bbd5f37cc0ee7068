"""What the command line shows: tokens, the map of heads, what a token attends to, a layer's steps. Drawn with rich.

Colour runs from the terminal's own background to a bright hue with the weight, so that zero looks like nothing. Piped
output has no colour and says the same in words and numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.layers import MultiHeadAttention
from regard.models import Decoder
from regard.observation import Observation
from regard.recording import HeadSummary, Recording, record
from regard.stepwise import Step, Steps, format_number, numbers, steps, three_tokens
from regard.training.text import Tokenizer

Colour = tuple[int, int, int]

KINDS: dict[str, tuple[Colour, str]] = {
    "previous token": ((95, 175, 255), "looks at the token just before"),
    "first token": ((150, 150, 150), "rests on the first token"),
    "same token": ((255, 175, 95), "looks at the same token, here or earlier"),
    "induction": ((255, 95, 135), "looks at what followed this token the last time"),
    "local": ((95, 215, 175), "looks at the last few tokens"),
    "even": ((170, 170, 95), "spreads over all it can see"),
    "mixed": ((175, 175, 175), "none of these most of the time"),
}
"""Kinds of heads: colour, and what they do."""

HEAT: Colour = KINDS["induction"][0]
SCORES = ("score", "scale", "cap", "bias", "mask", "softmax")
"""The steps that have one number per key."""


@dataclass(frozen=True)
class Look:
    """A text read by a model, and what every head did there.

    Attributes:
        start, total: where in the whole text the shown tokens begin, and how many it has.
        query, layer, head: what is shown in detail; `chosen` says why.
    """

    model: str
    source: str
    pieces: list[str]
    tokens: Tensor
    start: int
    total: int
    recording: Recording
    heads: list[HeadSummary]
    query: int
    layer: int
    head: int
    chosen: str

    def weights(self, layer: int) -> Tensor:
        """The weights of the shown query in every head of a layer: [heads, key_len]."""
        return _layer(self.recording, layer).weights(queries=slice(self.query, self.query + 1))[0, :, 0]


def look(
    model: Decoder,
    tokenizer: Tokenizer,
    text: str,
    *,
    name: str,
    source: str,
    start: int = 0,
    query: int | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> Look:
    """Reads a text and gathers what there is to show.

    The model's context holds `context_length` tokens: the end token that opens every text, and the text from token
    `start` on, as far as it fits.

    Args:
        query: which token (as shown; the one that opens the text is 0). layer, head: which head. What is None is chosen
            so that there is something to see.
    Raises:
        ValueError: a number that is out of range.
    """
    config = model.config
    ids = tokenizer.encode(text)
    if not 0 <= start < len(ids):
        raise ValueError(f"--start must be 0 to {len(ids) - 1} (the text has {len(ids)} tokens), got {start}")
    shown = [tokenizer.end_id, *ids[start : start + config.context_length - 1]]
    for option, value, count in (
        ("query", query, len(shown)),
        ("layer", layer, config.layers),
        ("head", head, config.heads),
    ):
        if value is not None and not 0 <= value < count:
            raise ValueError(f"--{option} must be 0 to {count - 1}, got {value}")
    tokens = torch.tensor([shown])
    with torch.inference_mode(), record(model) as recording:
        model(tokens)
        heads = recording.summary(tokens)
        best = max(_candidates(recording, heads, tokens[0], query, layer, head))
    return Look(
        name, source, tokenizer.pieces(shown), tokens, start, len(ids), recording, heads, *best.place, chosen=best.why
    )


@dataclass(frozen=True, order=True)
class _Candidate:
    """A query and a head that could be shown, and how much there is to see."""

    worth: float
    place: tuple[int, int, int]
    why: str


def _candidates(
    recording: Recording,
    heads: Sequence[HeadSummary],
    tokens: Tensor,
    query: int | None,
    layer: int | None,
    head: int | None,
) -> Iterator[_Candidate]:
    """For every head that may be shown, its best query.

    A weight is worth more when its key is neither the first token nor next to the query, still more when it copies (the
    key follows an earlier occurrence of the query's token, in an induction head), and rather late in the text, where
    there is more to choose from.
    """
    asked = " and ".join(f"--{n}" for n, v in (("query", query), ("layer", layer), ("head", head)) if v is not None)
    places = torch.arange(len(tokens))
    for number in range(len(recording)) if layer is None else [layer]:
        seen = _layer(recording, number)
        top = seen.top(1)
        for h in range(seen.grid.heads) if head is None else [head]:
            weight, key = top.weights[0, h, :, 0], top.keys[0, h, :, 0]
            aside = (key > 0) & (key < places - 1)
            copies = aside & (tokens[(key - 1).clamp(min=0)] == tokens)
            if next(s.kind for s in heads if (s.layer, s.head) == (f"layers.{number}", h)) != "induction":
                copies = torch.zeros_like(copies)
            worth = weight * torch.where(copies, 4.0, torch.where(aside, 1.0, 0.1)) * (0.5 + 0.5 * places / len(tokens))
            i = int(worth.argmax()) if query is None else query
            why = "chosen because it copies: the key follows an earlier occurrence of the query"
            if not copies[i]:
                why = "chosen for its look far aside" if aside[i] else "chosen for its largest weight"
            if asked.count("--") == 3:
                why = "as asked"
            yield _Candidate(float(worth[i]), (i, number, h), why)


def print_look(console: Console, view: Look, *, count: int = 3) -> None:
    """The whole page: text, map, and what the query attends to."""
    piece = (_quoted(view.pieces[view.query]), "bold reverse")
    console.print(_title(view))
    console.print(
        Text.assemble(
            ("The text", "bold"), ", each token as bright as the weight it gets from token ", f"{view.query} ", piece,
            f" in layer {view.layer}, head {view.head}\n({view.chosen})",
        )
    )  # fmt: skip
    _indented(console, shaded(view))
    console.print(Text.assemble(("\nEvery head", "bold"), " on this text: layers down, heads across"))
    _indented(console, head_map(view))
    _indented(console, _legend(view))
    console.print(
        Text.assemble(
            ("\nWhat token ", "bold"), (f"{view.query} ", "bold"), piece, (" attends to", "bold"),
            f": each head's {count} largest weights, with the key's number and token",
        )
    )  # fmt: skip
    _indented(console, attends(view, count))
    console.print(
        Text(
            f"Another token: --query N (up to {len(view.pieces) - 1}); another head: --layer L --head H; all: --json\n"
            f"Step by step:  regard explain ... --query {view.query} --layer {view.layer} --head {view.head}",
            style="dim",
        )
    )


def shaded(view: Look) -> Text:
    """The text, each token on a background as bright as its weight, and the strongest ones in numbers."""
    weights = view.weights(view.layer)[view.head].tolist()
    text = Text()
    for number, (piece, weight) in enumerate(zip(view.pieces, weights, strict=True)):
        style = "bold reverse" if number == view.query else "dim" if number > view.query else _heat(weight)
        shown = "▸" if number == 0 else piece.replace("\\n", "↵\n").replace("\\t", "⇥ ")
        for part in shown.splitlines(keepends=True):
            text.append(part.rstrip("\n"), style)
            text.append("\n" if part.endswith("\n") else "")
    text.rstrip()
    strongest = sorted(range(len(weights)), key=lambda j: -weights[j])[:4]
    text.append("\n→ ", "bold")
    text.append("  ".join(f"{weights[j]:.2f} {_quoted(view.pieces[j])} ({j})" for j in strongest if weights[j] > 0.004))
    return text


def head_map(view: Look) -> Table:
    """Layers down, heads across: kind and its share; how far back and how spread."""
    table = _table()
    table.add_column("layer", justify="right", style="bold")
    for head in range(_layer(view.recording, 0).grid.heads):
        table.add_column(f"head {head}", no_wrap=True)
    for number in range(len(view.recording)):
        cells = []
        for s in _of_layer(view, number):
            share = s.shares.get(s.kind, s.spread if s.kind == "even" else 1 - s.spread)
            cells.append(
                Text.assemble(
                    (f"{s.kind.split()[0]:<10}{share:.2f}", _ink(share, KINDS[s.kind][0])),
                    (f"\n{s.distance:>3.0f} back {s.spread:>5.2f}", "dim"),
                )
            )
        table.add_row(str(number), *cells)
    return table


def attends(view: Look, count: int) -> Table:
    """For the chosen query, every head's strongest keys."""
    table = _table()
    table.add_column("layer.head", justify="right")
    table.add_column("kind")
    for rank in range(count):
        table.add_column("" if rank else "largest weights", no_wrap=True)
    for number in range(len(view.recording)):
        for s, weights in zip(_of_layer(view, number), view.weights(number), strict=True):
            colour = KINDS[s.kind][0]
            cells = [
                Text.assemble(
                    (f"{weight:.2f} ", _ink(weight, colour)),
                    (f"{key:>3} ", "dim"),
                    (_quoted(view.pieces[key]), "" if weight >= 0.05 else "dim"),
                )
                for weight, key in _largest(weights, count)
            ]
            shown = (number, s.head) == (view.layer, view.head)
            place = f"{'→ ' if shown else ''}{number}.{s.head}"
            table.add_row(place, Text(s.kind, style=_rgb(colour)), *cells, style="bold" if shown else "")
    return table


def look_as_data(view: Look, count: int = 8) -> dict[str, Any]:
    """The same as plain data, for --json."""
    return {
        **_place_as_data(view),
        "start": view.start,
        "total_tokens": view.total,
        "tokens": [{"id": int(i), "text": piece} for i, piece in zip(view.tokens[0], view.pieces, strict=True)],
        "heads": [
            {
                "layer": number,
                "head": s.head,
                "kind": s.kind,
                "shares": s.shares,
                "entropy": s.entropy,
                "spread": s.spread,
                "distance": s.distance,
            }
            for number in range(len(view.recording))
            for s in _of_layer(view, number)
        ],
        "attends": [
            {
                "layer": number,
                "head": head,
                "keys": [
                    {"key": key, "text": view.pieces[key], "weight": weight} for weight, key in _largest(weights, count)
                ],
            }
            for number in range(len(view.recording))
            for head, weights in enumerate(view.weights(number))
        ],
    }


def explain_token(model: Decoder, view: Look) -> Steps:
    """The steps of the shown layer's attention for the shown query, with the numbers the model has there."""
    given: list[Tensor] = []
    attention = model.layers[view.layer].get_submodule("attention")
    assert isinstance(attention, MultiHeadAttention)
    hook = attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    try:
        with torch.inference_mode():
            model(view.tokens)
    finally:
        hook.remove()
    return steps(attention, given[0], query=view.query)


def print_explained(console: Console, view: Look, shown: Steps, *, count: int = 12) -> None:
    """One query and one head: its vectors in every step, and the scores of its strongest keys in a table."""
    console.print(_title(view))
    console.print(
        Text.assemble(
            ("Token ", "bold"), f"{view.query} ", (_quoted(view.pieces[view.query]), "bold reverse"),
            (" in layer ", "bold"), f"{view.layer}", (", head ", "bold"), f"{view.head} ({view.chosen})\n",
        )
    )  # fmt: skip
    scores = [step for step in shown if step.name in SCORES]
    for step in shown:
        vector = _of_head(step, view.head, shown)
        if step is scores[0]:
            _print_scores(console, view, scores, count)
        elif step not in scores and "query_len" in step.axes:
            console.print(Text.assemble((f"{step.name:<16}", "bold"), step.formula))
            _indented(console, Text("\n".join(numbers(vector))))
    console.print(Text("The last vector is the layer's own output for this token: all heads together.", style="dim"))


def _print_scores(console: Console, view: Look, scores: Sequence[Step], count: int) -> None:
    """From score to weight, for the keys with the largest weights."""
    weights = scores[-1].tensor[0, view.head, 0]
    largest = [(weight, key) for weight, key in _largest(weights, count) if weight > 0]
    table = _table()
    table.add_column("key", justify="right")
    table.add_column("token", no_wrap=True)
    for step in scores:
        table.add_column("weight" if step.name == "softmax" else step.name, justify="right")
        console.print(Text.assemble((f"{step.name:<16}", "bold"), step.formula))
        if step.note:
            console.print(Text(f"  {step.note}", "yellow"))
    for weight, key in largest:
        cells = [format_number(float(step.tensor[0, view.head, 0, key])) for step in scores]
        table.add_row(str(key), _quoted(view.pieces[key]), *cells, style=_ink(weight, HEAT))
    _indented(console, table)
    held = sum(weight for weight, _ in largest)
    visible = int((scores[-2].tensor[0, view.head, 0] > -math.inf).sum())
    console.print(f"  {len(largest)} of the {visible} keys it may see hold {held:.1%} of the weight\n")


def steps_as_data(view: Look, shown: Steps) -> dict[str, Any]:
    """One head's steps as plain data, for --json."""
    return {
        **_place_as_data(view),
        "tokens": view.pieces,
        "steps": [_step_as_data(step, _of_head(step, view.head, shown)) for step in shown],
    }


def print_three_tokens(console: Console) -> None:
    """The worked example: every number of every step, and what rounding does to it."""
    shown = steps(*three_tokens())
    console.print(Text.assemble(("Three tokens", "bold"), ", four features each, one head of three; whole numbers\n"))
    console.print(Text("x"))
    _indented(console, Text("\n".join(numbers(three_tokens()[1]))))
    console.print(steps_table(shown))
    exact, rounded = _rounded(shown)
    console.print(Text("Rounding", "bold"))
    console.print(
        "Weights in tenths are easier to read, and give another output. Rounded so that each row still sums to 1\n"
        "(the largest remainders up, the others down), the weights"
    )
    _indented(console, Text("\n".join(numbers(rounded))))
    console.print("give the output")
    _indented(console, Text("\n".join(numbers(rounded @ _values(shown)))))
    console.print("and the exact weights give")
    _indented(console, Text("\n".join(numbers(exact @ _values(shown)))))


def three_tokens_as_data() -> dict[str, Any]:
    """The same as plain data, for --json."""
    shown = steps(*three_tokens())
    _, rounded = _rounded(shown)
    return {
        "x": three_tokens()[1].tolist(),
        "steps": [_step_as_data(step, step.tensor) for step in shown],
        "rounded": {"weights": _plain(rounded), "output": _plain(rounded @ _values(shown))},
    }


def steps_table(shown: Steps) -> RenderableType:
    """Every step of a small layer with all of its numbers."""
    table = _table(lines=True)
    for column in ("step", "formula", "shape", "numbers"):
        table.add_column(column, no_wrap=column in ("step", "numbers"))
    for step in shown:
        axes = [f"{axis} {size}" for axis, size in zip(step.axes, step.tensor.shape, strict=True) if axis != "batch"]
        formula = step.formula + (f"\n{step.note}" if step.note else "")
        table.add_row(
            Text(step.name, "bold"), formula, Text("\n".join(axes), "dim"), Text("\n".join(numbers(step.tensor)))
        )
    return table


def _rounded(shown: Steps) -> tuple[Tensor, Tensor]:
    """The example's weights, exact and in whole tenths that still sum to 1: the largest remainders are rounded up."""
    exact = shown["softmax"].tensor[0, 0]
    tenths = exact.mul(10).floor()
    for row, remainders in zip(tenths, exact * 10 - tenths, strict=True):
        row[remainders.topk(10 - int(row.sum())).indices] += 1
    return exact, tenths / 10


def _values(shown: Steps) -> Tensor:
    return shown["split value"].tensor[0, 0]


def _of_head(step: Step, head: int, shown: Steps) -> Tensor:
    """The part of a step that belongs to one query head: without the batch axis, and without the heads axis."""
    if "heads" in step.axes:
        return step.tensor[0, head]
    if "kv_heads" in step.axes:
        return step.tensor[0, head // (shown["split query"].tensor.shape[1] // step.tensor.shape[1])]
    return step.tensor[0]


def _step_as_data(step: Step, tensor: Tensor) -> dict[str, Any]:
    return {"name": step.name, "formula": step.formula, "note": step.note, "numbers": _plain(tensor)}


def _place_as_data(view: Look) -> dict[str, Any]:
    return {
        "model": view.model,
        "source": view.source,
        "query": view.query,
        "layer": view.layer,
        "head": view.head,
        "chosen": view.chosen,
    }


def _plain(tensor: Tensor) -> Any:
    """Nested lists of numbers; minus infinity, which JSON lacks, as None."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(v) for v in value]
        return value if math.isfinite(value) else None

    return clean(tensor.tolist())


def _layer(recording: Recording, number: int) -> Observation:
    return recording[f"layers.{number}"]


def _of_layer(view: Look, number: int) -> list[HeadSummary]:
    return [s for s in view.heads if s.layer == f"layers.{number}"]


def _largest(weights: Tensor, count: int) -> list[tuple[float, int]]:
    found = weights.topk(min(count, len(weights)))
    return list(zip(found.values.tolist(), found.indices.tolist(), strict=True))


def _title(view: Look) -> Text:
    read = len(view.pieces) - 1
    part = f"{view.total} tokens"
    if read < view.total:
        part = f"tokens {view.start} to {view.start + read - 1} of {view.total:,}, as many as the model's context holds"
    title = Text.assemble(("regard", "bold"), f"  {view.source}: {part}; model {view.model}")
    if view.start + read < view.total:
        title.append(f"\n        the next: --start {view.start + read}", "dim")
    return title.append("\n")


def _legend(view: Look) -> Text:
    text = Text(
        "kind and share of its weight that is so; below, mean distance in tokens and spread (0 one key, 1 even)\n"
    )
    text.stylize("dim")
    for kind in KINDS:
        if any(s.kind == kind for s in view.heads):
            colour, words = KINDS[kind]
            text.append(f"{kind:<15}", _rgb(colour))
            text.append(f" {words}\n", "dim")
    text.rstrip()
    return text


def _table(*, lines: bool = False) -> Table:
    return Table(box=SIMPLE, padding=(0, 1), pad_edge=False, show_lines=lines)


def _indented(console: Console, what: RenderableType) -> None:
    console.print(Padding(what, (0, 0, 0, 2), expand=False))


def _quoted(piece: str) -> str:
    return f"'{piece}'"


def _heat(weight: float) -> str:
    """A background whose strength is the weight (its root, so that small weights can be seen at all)."""
    if weight < 0.004:
        return ""
    strength = math.sqrt(weight)
    red, green, blue = (int(24 + (c - 24) * strength) for c in HEAT)
    return f"{'black' if strength > 0.6 else 'white'} on {_rgb((red, green, blue))}"


def _ink(strength: float, colour: Colour) -> str:
    strength = 0.45 + 0.55 * min(1.0, max(0.0, strength))
    return _rgb((int(colour[0] * strength), int(colour[1] * strength), int(colour[2] * strength)))


def _rgb(colour: Colour) -> str:
    return f"rgb({colour[0]},{colour[1]},{colour[2]})"

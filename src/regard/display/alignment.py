"""What an encoder-decoder attended to: for every token that it wrote, the tokens of the source.

The model reads the source, writes its translation greedily, and is recorded while it reads both once more: row i of a
head's weights are those with which token i of the translation was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from regard.display.letters import fitted, joined, units, visible
from regard.display.palette import MIN_DRAWN_WEIGHT
from regard.display.paper import Paper, quoted
from regard.display.reading import OPENING, Place, check_numbers
from regard.display.script import Script
from regard.generation import translate
from regard.models import EncoderDecoder
from regard.recording import Ablate, intervene, record

END = "end"
"""How the token that ends a text is shown."""

LISTED = 6
"""Keys of a head that are listed."""


@dataclass(frozen=True)
class Alignment:
    """A text translated by a model, and the weights of its cross-attention.

    Attributes:
        labels: of the tokens that were written, the end among them. written, text: what was written.
        weights: [layers, heads, written, source tokens]; source token 0 is the one that opens every text.
        layer, head: what is shown; None: the mean of all heads of the layer. query: the token shown in detail.
        without: heads that gave nothing, and what was written then; None if none was asked for.
    """

    model: str
    source: str
    script: Script
    labels: tuple[str, ...]
    written: tuple[int, ...]
    text: str
    weights: Tensor
    layer: int
    head: int | None
    query: int
    without: tuple[tuple[Place, ...], str] | None

    @property
    def shown(self) -> Tensor:
        """The weights that are drawn, [written, source tokens]."""
        of_layer = self.weights[self.layer]
        return of_layer.mean(0) if self.head is None else of_layer[self.head]

    @property
    def name(self) -> str:
        """What is drawn, in words."""
        return f"layer {self.layer}, " + ("mean of its heads" if self.head is None else f"head {self.head}")

    @property
    def place(self) -> tuple[str, int]:
        """The layer and the head to open: of a mean, the head with the largest weight for the token in detail."""
        peaks = self.weights[self.layer, :, self.query].amax(-1)
        return _cross(self.layer), int(peaks.argmax()) if self.head is None else self.head

    def key(self, token: int) -> str:
        """A token of the source, in one line."""
        return OPENING if token == 0 else self.script.label(token - 1)


def align(
    model: EncoderDecoder,
    script: Script,
    *,
    name: str,
    source: str,
    query: int | str | None = None,
    layer: int | None = None,
    head: int | None = None,
    without: Sequence[Place] = (),
) -> Alignment:
    """Translates a text and gathers what the cross-attention did.

    Args:
        query: which token of the translation, as a number or by its text; None: the one with the largest weight.
        layer: None: the last. head: None: the mean of all. without: heads of the cross-attention to take away.
    Raises:
        ValueError: the text is longer than the model's context, or a number is out of range.
    """
    config, end = model.config, script.tokenizer.end_id
    read = [end, *script.ids]
    if len(read) > config.context_length:
        raise ValueError(f"{source}: {len(read)} tokens, more than the {config.context_length} that the model can read")
    check_numbers(config, without, layer=(layer, config.layers), head=(head, config.heads))
    best = translate(model, [read], end_id=end)[0][0]
    written = list(best.tokens)
    target = torch.tensor([[end, *written][: config.context_length]])
    with torch.inference_mode(), record(model) as recording:
        model(torch.tensor([read]), target)
        found = [recording[_cross(number)].weights()[0] for number in range(config.layers)]
    weights = torch.stack(found)
    labels = tuple([*map(visible, script.tokenizer.pieces(written)), END][: weights.shape[2]])
    layer = config.layers - 1 if layer is None else layer
    drawn = weights[layer].mean(0) if head is None else weights[layer, head]
    chosen = int(drawn.amax(1).argmax()) if query is None else _place(query, labels)
    changed = None
    if without:
        changes = [Ablate(_cross(place.layer), place.head) for place in without]
        with intervene(model, *changes):
            changed = tuple(without), script.tokenizer.decode(translate(model, [read], end_id=end)[0][0].tokens)
    text = script.tokenizer.decode(written)
    return Alignment(name, source, script, labels, best.tokens, text, weights, layer, head, chosen, changed)


def _cross(layer: int) -> str:
    """The name of a layer's cross-attention."""
    return f"decoder.layers.{layer}.cross"


def _place(query: int | str, labels: Sequence[str]) -> int:
    """The number of a written token."""
    if isinstance(query, int):
        if not 0 <= query < len(labels):
            raise ValueError(f"--query must be 0 to {len(labels) - 1}, got {query}")
        return query
    found = [number for number, label in enumerate(labels) if label == query]
    if len(found) != 1:
        what = f"{query!r} was written {len(found)} times" if found else f"no {query!r} was written"
        numbered = ", ".join(f"{number} {quoted(label)}" for number, label in enumerate(labels))
        raise ValueError(f"--query: {what}; give a number: {numbered}")
    return found[0]


def print_alignment(paper: Paper, view: Alignment, *, every: bool = False) -> None:
    """The whole page.

    Args:
        every: list every written token, and not one alone.
    """
    count = len(view.script.ids)
    paper.say(("regard", "bold"), f"  {view.source}: {count} tokens read; model {view.model}", hang=8)
    paper.gap()
    paper.say(("Written", "bold"), f": {quoted(visible(view.text))}")
    if view.without is not None:
        places, text = view.without
        paper.say(f"without {', '.join(map(str, places))}: {quoted(visible(text))}", indent=paper.indent, hang=2)
    paper.gap()
    paper.say(("What each token looked at", "bold"), f" in the source when it was chosen: {view.name}")
    room = max(map(len, view.labels))
    for number, label in enumerate(view.labels):
        _print_row(paper, view, number, fitted(label, room))
    if not paper.palette.coloured:
        paper.quiet("Under the source: weights in tenths, 9 for 0.9 and more, . for 0.01 to 0.1")
    paper.quiet(f"{OPENING} is token 0, which stands before every source and means its beginning")
    paper.gap()
    rows = range(len(view.labels)) if every else [view.query]
    for number in rows:
        paper.say(("Every head", "bold"), f" when {quoted(view.labels[number])} ({number}) was chosen:")
        for layer, of_layer in enumerate(view.weights):
            for head, weights in enumerate(of_layer[:, number]):
                _print_keys(paper, view, Place(layer, head), weights)
    paper.gap()
    paper.quiet(
        f"Another token: --query N, 0 to {len(view.labels) - 1}, or --all. One head: --layer L --head H. "
        f"Without a head: --without {view.layer}.0. As numbers: --json"
    )


def _print_row(paper: Paper, view: Alignment, number: int, label: str) -> None:
    """One written token, and the source shaded by its weights, in as many lines as it takes."""
    weights = view.shown[number].tolist()
    start = paper.indent + len(label) + 2
    line, marks, column = Text(), "", 0
    shown = [(OPENING, 1, weights[0])]
    spans = [view.script.spans[token] for token in range(len(view.script.ids))]
    for unit in units(view.script.text):
        touching = [
            weights[token + 1] for token, (first, stop) in enumerate(spans) if first < unit.stop and unit.start < stop
        ]
        shown.append((unit.shown, unit.width, max(touching, default=0.0)))
    lines: list[Text] = []
    for text, width, weight in shown:
        if column + width > paper.width - start and column:
            lines += _line(paper, line, marks)
            line, marks, column = Text(), "", 0
        line.append(text, paper.palette.fill(weight))
        mark = str(min(9, int(weight * 10))) if weight >= 0.1 else "." if weight >= 0.01 else " "
        marks, column = marks + mark * width, column + width
    lines += _line(paper, line, marks)
    for at, part in enumerate(lines):
        margin = f"{label:>{len(label)}}  " if at == 0 else " " * (len(label) + 2)
        paper.lines([Text(" " * paper.indent).append(margin, "bold").append_text(part)])


def _print_keys(paper: Paper, view: Alignment, head: Place, weights: Tensor) -> None:
    """A head's largest weights, in one line."""
    largest = weights.topk(min(LISTED, len(weights)))
    parts = [
        Text.assemble(
            (f"{weight:.2f}", paper.palette.fill(weight)),
            " ",
            quoted(view.key(key)),
            (f" ({key})", paper.palette.quiet),
        )
        for weight, key in zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
        if weight >= MIN_DRAWN_WEIGHT
    ]
    indent = paper.indent + len(str(head)) + 2
    lines = joined(parts or [Text("no weight above 0.00")], paper.width, indent=indent)
    lines[0] = Text(" " * paper.indent).append(f"{head}  ").append_text(lines[0][indent:])
    paper.lines(lines)


def _line(paper: Paper, line: Text, marks: str) -> list[Text]:
    """A line of the source; without colours, its marks under it."""
    return [line] if paper.palette.coloured or not marks.strip() else [line, Text(marks.rstrip(), "bold")]


def alignment_as_data(view: Alignment) -> dict[str, Any]:
    """The page as plain data, with all weights."""
    return {
        "model": view.model,
        "source": view.source,
        "written": view.text,
        "without": None
        if view.without is None
        else {"heads": [list(place) for place in view.without[0]], "written": view.without[1]},
        "source_tokens": [view.key(token) for token in range(view.weights.shape[3])],
        "written_tokens": list(view.labels),
        "layer": view.layer,
        "head": view.head,
        "query": view.query,
        "heads": [
            {"layer": layer, "head": head, "weights": view.weights[layer, head].tolist()}
            for layer in range(view.weights.shape[0])
            for head in range(view.weights.shape[1])
        ],
    }

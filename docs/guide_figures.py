"""The guide's figures of shapes, positions, scores, costs and a circuit; `docs/pictures.py` draws them with the others.

Those of chapters 13 to 15 show what stands in benchmarks/results; the others are computed here, and nothing is random.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from drawing import GREEN, INK, PALE, WARM, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

import regard
from regard.plots import COLOURS
from regard.training.checkpoint import load

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def results(name: str) -> Any:
    """What a script of benchmarks/ measured."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# --- drawings ------------------------------------------------------------------------------------------------------


def blank(axes: Axes, width: float, height: float) -> None:
    """Axes as a sheet of paper."""
    axes.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axes.axis("off")


def box(axes: Axes, x: float, y: float, words: str, width: float = 2.6, height: float = 0.62, **style: Any) -> None:
    """A box with its centre at (x, y)."""
    style = {"facecolor": "#eef3f8", "edgecolor": INK, "linewidth": 1.0} | style
    corner = x - width / 2, y - height / 2
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.12", **style))
    axes.text(x, y, words, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], **style: Any) -> None:
    style = {
        "arrowstyle": "-|>",
        "mutation_scale": 8,
        "color": "0.3",
        "linewidth": 1.0,
        "shrinkA": 0,
        "shrinkB": 0,
    } | style
    axes.add_patch(FancyArrowPatch(start, stop, **style))


def plus(axes: Axes, x: float, y: float) -> None:
    """Where two paths are added."""
    axes.plot([x], [y], "o", ms=9, mfc="white", mec="0.3", mew=1.0)
    axes.text(x, y - 0.015, "+", ha="center", va="center")


def around(axes: Axes, x: float, start: float, stop: float, side: float = 1.75) -> None:
    """A residual connection: around what lies between two heights."""
    axes.plot([x, x - side, x - side, x - 0.16], [start, start, stop, stop], color="0.3", lw=1.0)


def transformer(path: Path) -> None:
    """A decoder from tokens to the next token, with the chapters that explain its parts."""
    figure = Figure(figsize=(7.2, 4.9), layout="constrained")
    axes = figure.subplots()
    blank(axes, 14.4, 9.8)
    x = 5.2
    axes.add_patch(Rectangle((2.6, 2.55), 4.6, 4.4, facecolor="#f7f7f5", edgecolor="0.6", linewidth=0.8))
    axes.text(2.4, 4.75, "a block,\nrepeated\n6 to 100\ntimes", ha="right", va="center", color="0.35", fontsize=7)
    column = [
        (0.35, "the cat sat on the", {"facecolor": "white", "edgecolor": "0.7"}),
        (1.25, "embedding", {}),
        (2.0, "positions", {}),
        (3.55, "attention", {"facecolor": "#cfe0ef"}),
        (5.45, "feed-forward", {}),
        (7.55, "logits, softmax", {}),
        (8.6, "mat 0.61   sofa 0.12   ...", {"facecolor": "white", "edgecolor": "0.7"}),
    ]
    for y, words, style in column:
        box(axes, x, y, words, 2.6 if y not in (0.35, 8.6) else 3.4, **style)
    arrow(axes, (x, 0.66), (x, 0.94))
    axes.plot([x, x], [1.56, 1.69], color="0.3", lw=1.0)
    for low, high, y in ((2.31, 4.5, 3.55), (4.5, 6.4, 5.45)):
        arrow(axes, (x, low), (x, y - 0.31))
        axes.plot([x, x], [y + 0.31, high], color="0.3", lw=1.0)
        around(axes, x, y - 0.62, high)
        plus(axes, x, high)
    arrow(axes, (x, 6.5), (x, 7.24))
    arrow(axes, (x, 7.86), (x, 8.29))
    notes = [
        (1.25, "7   every token becomes a vector"),
        (2.0, "8   which says where it stands"),
        (3.9, "1 to 3   tokens look at each other, in several heads"),
        (3.5, "4, 5, 6   masks, other texts, stored weights"),
        (3.1, "10, 13, 14   another score; why the root; the cost"),
        (5.45, "9   each token is processed by itself"),
        (6.4, "9   what was computed is added to what was there"),
        (7.55, "4, 15   a guess for the next token; how it is learned"),
        (8.6, "16   and how one can see why"),
        (9.35, "11, 12   two of these towers translate; what they replaced"),
    ]
    for y, words in notes:
        axes.text(7.6, y, words, va="center", ha="left", fontsize=7.5, color="0.15")
    save(figure, path)


def grid(axes: Axes, corner: tuple[float, float], rows: int, columns: int, colour: str, words: str, below: str) -> None:
    """A matrix of so many rows and columns; its upper left corner is given."""
    x, y = corner
    side = 0.3
    for row in range(rows):
        for column in range(columns):
            place = (x + side * column, y - side * (row + 1))
            axes.add_patch(Rectangle(place, side, side, facecolor=colour, edgecolor="white", linewidth=0.8))
    axes.text(x + side * columns / 2, y + 0.12, words, ha="center", va="bottom")
    axes.text(x + side * columns / 2, y - side * rows - 0.1, below, ha="center", va="top", fontsize=6.5, color="0.35")


def shapes(path: Path) -> None:
    """One head as matrices: which sizes have to agree."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.subplots()
    blank(axes, 14.4, 5.8)
    light, key, value = "#c9d3dc", WARM, GREEN
    grid(axes, (0.3, 3.9), 5, 4, light, "x", "length × dim")
    for y, name, colour, width in ((5.2, "query", INK, 3), (3.45, "key", key, 3), (1.7, "value", value, 2)):
        axes.text(1.85, y - 0.6, f"· W_{name} =", va="center", ha="left", fontsize=7.5)
        grid(axes, (3.75, y), 5, width, colour, "", "")
        size = "key_dim" if name != "value" else "value_dim"
        axes.text(3.85 + 0.3 * width, y - 0.75, f"{name}\nlength × {size}", ha="left", va="center", fontsize=6.5)
    arrow(axes, (6.6, 4.4), (7.6, 3.9))
    arrow(axes, (6.6, 2.75), (7.6, 3.2))
    grid(axes, (7.8, 4.3), 5, 5, "#7d9cbc", "query · keyᵀ / √key_dim", "scores\nlength × length")
    axes.text(9.92, 3.6, "softmax of\neach row", ha="center", va="center", fontsize=6.5)
    arrow(axes, (9.4, 3.1), (10.45, 3.1))
    grid(axes, (10.6, 4.3), 5, 5, "#7d9cbc", "weights", "each row sums to 1")
    arrow(axes, (6.6, 0.95), (12.6, 2.2), connectionstyle="arc3,rad=0.12")
    axes.text(12.3, 3.55, "· value =", va="center", ha="left", fontsize=7.5)
    grid(axes, (13.5, 4.3), 5, 2, value, "output", "length ×\nvalue_dim")
    save(figure, path)


def heads(path: Path) -> None:
    """Splitting features into heads, and what a plain `view` does instead."""
    figure = Figure(figsize=(7.2, 1.9), layout="constrained")
    axes = figure.subplots()
    blank(axes, 14.4, 3.8)
    colours = (PALE, "#f3c9a5")
    side = 0.62

    def table(x: float, y: float, rows: Sequence[Sequence[int]], words: str) -> None:
        for n, row in enumerate(rows):
            for m, number in enumerate(row):
                place = (x + side * m, y - side * (n + 1))
                colour = colours[number % 10 >= 2]
                axes.add_patch(Rectangle(place, side, side, facecolor=colour, edgecolor="white", linewidth=1.2))
                axes.text(place[0] + side / 2, place[1] + side / 2, str(number), ha="center", va="center")
        axes.text(x, y + 0.1, words, ha="left", va="bottom", fontsize=7)

    table(0.2, 2.6, [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]], "three tokens of four features")
    arrow(axes, (3.0, 1.9), (4.3, 1.9))
    axes.text(3.65, 2.05, "split", ha="center", va="bottom", fontsize=7)
    table(4.6, 2.6, [[0, 1], [10, 11], [20, 21]], "head 0")
    table(6.3, 2.6, [[2, 3], [12, 13], [22, 23]], "head 1")
    axes.text(9.3, 3.3, "not the same: view(1, 2, 3, 2)", ha="left", va="bottom", fontsize=7, color="0.35")
    table(9.3, 2.6, [[0, 1], [2, 3], [10, 11]], "“head 0”")
    table(11.0, 2.6, [[12, 13], [20, 21], [22, 23]], "“head 1”")
    save(figure, path)


def norms(path: Path) -> None:
    """A block with its norms after the sums, and before the layers."""
    figure = Figure(figsize=(5.6, 3.1), layout="constrained")
    axes = figure.subplots()
    blank(axes, 11.2, 6.1)
    tall, gap = 0.5, 0.35
    for x, title, first in ((2.8, "post-norm: the original", False), (8.2, "pre-norm: GPT-2, Llama", True)):
        axes.text(x, 5.95, title, ha="center", va="center")
        top = 0.1  # how far the path upwards has come
        for layer, colour in (("attention", "#cfe0ef"), ("feed-forward", "#eef3f8")):
            branch = top + 0.18
            for part in ["norm", layer] if first else [layer]:
                bottom = top + gap
                arrow(axes, (x, top), (x, bottom))
                box(axes, x, bottom + tall / 2, part, 2.4, tall, facecolor="white" if part == "norm" else colour)
                top = bottom + tall
            arrow(axes, (x, top), (x, top + gap))
            plus(axes, x, top + gap + 0.13)
            around(axes, x, branch, top + gap + 0.13, 1.7)
            top += gap + 0.27
            if not first:
                arrow(axes, (x, top), (x, top + gap))
                box(axes, x, top + gap + tall / 2, "norm", 2.4, tall, facecolor="white")
                top += gap + tall
        arrow(axes, (x, top), (x, top + gap))
    save(figure, path)


# --- computed ------------------------------------------------------------------------------------------------------


def lookup(path: Path) -> None:
    """The table of chapter 7, and the rows that three tokens take out of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight = regard.TokenEmbedding(vocab_size=6, dim=3).weight.detach()
    tokens = [4, 1, 4]
    figure = Figure(figsize=(5.6, 2.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, numbers, names, title in (
        (left, weight, [str(n) for n in range(6)], "weight: one row for each token"),
        (right, weight[tokens], [f"token {n}" for n in tokens], "output: rows, taken out"),
    ):
        axes.imshow(numbers.numpy(), cmap="RdBu_r", vmin=-2.4, vmax=2.4, aspect="auto")
        for row in range(numbers.shape[0]):
            for column in range(3):
                axes.text(column, row, f"{float(numbers[row, column]):.2f}", ha="center", va="center")
        axes.set_yticks(range(len(names)), names)
        axes.set(xticks=range(3), xlabel="feature", title=title)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    for row in set(tokens):
        left.add_patch(Rectangle((-0.48, row - 0.46), 2.96, 0.92, fill=False, edgecolor=INK, linewidth=1.6))
    save(figure, path)


def rotation(path: Path) -> None:
    """A query and a key as points in the plane, at two pairs of positions with the same distance."""
    rotary = regard.Rotary(2)
    query, key = torch.tensor([1.0, 0.25]), torch.tensor([0.2, 0.9])
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 3)
    points = rotary(torch.tensor([1.0, 0.0]).expand(1, 1, 7, 2))[0, 0]
    for position, (x, y) in enumerate(points.tolist()):
        panels[0].plot([0, x], [0, y], color=PALE, lw=1.0)
        panels[0].plot([x], [y], "o", color=INK, ms=4)
        panels[0].text(1.18 * x, 1.18 * y, str(position), ha="center", va="center", fontsize=7)
    panels[0].set_title("(1, 0) at positions 0 to 6")
    for axes, at in zip(panels[1:], (1, 4), strict=True):
        turned = [
            rotary(point.expand(1, 1, 1, 2), offset=place)[0, 0, 0] for point, place in ((query, at + 2), (key, at))
        ]
        for point, colour, name in zip(turned, (INK, WARM), ("query", "key"), strict=True):
            arrow(axes, (0, 0), (float(point[0]), float(point[1])), color=colour, linewidth=1.6)
            words = f"{name}\nat {at + 2 if name == 'query' else at}"
            axes.text(
                1.28 * float(point[0]),
                1.28 * float(point[1]),
                words,
                ha="center",
                va="center",
                fontsize=7,
                color=colour,
            )
        axes.set_title(f"query · key = {float(turned[0] @ turned[1]):.3f}")
    for axes in panels:
        axes.add_patch(mpl.patches.Circle((0, 0), 1.0, fill=False, edgecolor="0.85"))
        axes.set(xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    save(figure, path)


def similarity(path: Path) -> None:
    """The two scores over one feature of query and key: a product and a tanh of the sum."""
    line = torch.linspace(-3, 3, 121)
    product, additive = line[:, None] * line, torch.tanh(line[:, None] + line)
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, numbers, title, most in (
        (left, product, "product: query · key", 9.0),
        (middle, additive, "additive: tanh(query + key)", 1.0),
    ):
        image = axes.imshow(
            numbers.numpy(), origin="lower", extent=(-3, 3, -3, 3), cmap="RdBu_r", vmin=-most, vmax=most
        )
        axes.set(xlabel="key", ylabel="query", title=title, xticks=(-3, 0, 3), yticks=(-3, 0, 3))
        figure.colorbar(image, ax=axes, shrink=0.8, ticks=(-most, 0, most))
    sizes = torch.linspace(0, 6, 61)
    query, key, v = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0])
    right.plot(sizes, sizes * (query @ key), color=INK, lw=1.4, label="product")
    right.plot(sizes, torch.tanh(sizes[:, None] * query + key) @ v, color=WARM, lw=1.4, label="additive, v = (1, 2)")
    right.axhline(3, color="0.7", lw=0.8, ls=":")
    right.set(xlabel="the query, times", ylabel="score", title="only one of them has a bound", ylim=(0, 6.2))
    right.legend(frameon=False, loc="lower right")
    save(figure, path)


def saturation(path: Path) -> None:
    """The same ten scores at growing sizes, as weights; and the derivative of a weight."""
    scores = torch.tensor([0.9, -0.4, 0.2, 1.3, -1.1, 0.5, 1.0, -0.7, 0.0, -0.2])
    figure = Figure(figsize=(7.2, 2.2), layout="constrained")
    panels = figure.subplots(1, 4)
    for axes, factor in zip(panels, (1, 5, 25), strict=False):
        weights = (factor * scores).softmax(0)
        axes.bar(range(10), weights.tolist(), color=INK)
        left = float((weights * (1 - weights)).mean())
        axes.set(ylim=(0, 1.02), xticks=[], xlabel="key", title=f"scores times {factor}\nmean of w (1 - w): {left:.4f}")
    panels[0].set_ylabel("weight w")
    w = torch.linspace(0, 1, 101)
    panels[3].plot(w, w * (1 - w), color=WARM, lw=1.6)
    panels[3].set(
        xlabel="weight w", title="w (1 - w): how much\na weight can still change", ylim=(0, 0.27), xlim=(0, 1)
    )
    save(figure, path)


# --- measured ------------------------------------------------------------------------------------------------------

LINES = {
    ("product", False): (WARM, "-", "product, not scaled"),
    ("product", True): (INK, "-", "product, scaled"),
    ("additive", False): (WARM, "--", "additive, v of variance 1"),
    ("additive", True): (INK, "--", "additive, v / √head_dim"),
}


def root(path: Path) -> None:
    """What the factor does: benchmarks/results/scale.json."""
    data = results("scale")
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    (variance, largest), (gradient, learning) = figure.subplots(2, 2)
    for (kind, scaled), (colour, dash, name) in LINES.items():
        rows = [row for row in data["rows"] if row["similarity"] == kind and row["scaled"] == scaled]
        sizes = [row["head_dim"] for row in rows]
        style = {"color": colour, "ls": dash, "lw": 1.4}
        variance.plot(sizes, [row["variance"] for row in rows], label=name, **style)
        largest.plot(sizes, [row["largest_weight"] for row in rows], **style)
        if kind == "product":
            low, middle, high = zip(*(row["gradient"] for row in rows), strict=True)
            gradient.fill_between(sizes, low, high, color=colour, alpha=0.16, lw=0)
            gradient.plot(sizes, middle, **style)
    for axes in (variance, largest, gradient):
        axes.set_xscale("log", base=2)
        axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
        axes.set_xlabel("head_dim")
    variance.set_yscale("log")
    variance.set(title="variance of the scores", ylim=(0.2, 1e6))
    variance.legend(frameon=False)
    largest.set(title=f"largest of {data['keys']} weights, mean", ylim=(0, 1))
    gradient.set_yscale("log")
    gradient.set(title="gradient of a query: median, and eight of ten", ylim=(1e-6, 20))
    for row in data["learnt"]:
        shade = {16: 0.35, 64: 0.65, 256: 1.0}[row["head_dim"]]
        steps = [data["averaged"] * (n + 0.5) for n in range(len(row["loss"]))]
        colour = INK if row["scaled"] else WARM
        learning.plot(steps, row["loss"], color=colour, alpha=shade, lw=1.4)
        last = row["loss"][-1]
        if not row["scaled"]:
            learning.text(steps[-1] + 4, last, str(row["head_dim"]), va="center", fontsize=7, color=colour)
    learning.set(title="learning: mean squared error", xlabel="step", ylim=(0, 2.2), xlim=(0, 335))
    save(figure, path)


def cost(path: Path) -> None:
    """Counted and measured: benchmarks/results/cost.json."""
    data = results("cost")
    figure = Figure(figsize=(7.2, 3.1), layout="constrained")
    time, memory = figure.subplots(1, 2)
    colours = {"full": WARM, "causal": GREEN, "window 256": INK, "one query": "0.45"}
    for call, colour in colours.items():
        rows = [row for row in data["rows"] if row["call"] == call]
        lengths = [row["length"] for row in rows]
        time.plot(lengths, [row["predicted_ms"] for row in rows], color=colour, lw=1.2)
        time.plot(lengths, [row["ms"] for row in rows], "o", color=colour, ms=4, label=call)
        if "memory_bytes" in rows[0]:
            memory.plot(lengths, [row["peak_bytes"] / 2**20 for row in rows], color=colour, lw=1.2)
            taken = [(row["length"], row["memory_bytes"] / 2**20) for row in rows if "memory_bytes" in row]
            memory.plot(*zip(*taken, strict=True), "o", color=colour, ms=4)
    rows = [row for row in data["rows"] if "formula_ms" in row]
    lengths = [row["length"] for row in rows]
    time.plot(lengths, [row["formula_ms"] for row in rows], "x", color="0.1", ms=5, label="full, all scores held")
    memory.plot(lengths, [row["formula_bytes"] / 2**20 for row in rows], "x", color="0.1", ms=5)
    for axes, title in ((time, "milliseconds"), (memory, "MiB beyond query, key and value")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([512, 2048, 8192, 32768, 131072], ["512", "2,048", "8,192", "32,768", "131,072"])
        axes.set(title=title, xlabel="tokens")
    memory.set_xticks([512, 2048, 8192, 32768], ["512", "2,048", "8,192", "32,768"])
    time.plot([], [], color="0.6", lw=1.2, label="line: counted")
    time.set_ylim(0.004, 3000)
    time.legend(frameon=False, fontsize=7, loc="lower left")
    save(figure, path)


def training(path: Path) -> None:
    """The loss of runs of `regard train`: benchmarks/results/first_run.json."""
    runs = results("first_run")["runs"]
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
    colours = dict(zip(sorted(run["learning_rate"] for run in runs), (PALE, INK, WARM), strict=True))
    for run in runs:
        colour = colours[run["learning_rate"]]
        left.plot(run["step"], run["loss"], color=colour, lw=1.4, label=f"learning rate {run['learning_rate']:g}")
        right.plot(run["step"], run["gradient_norm"], color=colour, lw=1.0)
    left.set(xlabel="step", title="loss, nats per token", ylim=(2, 8))
    left.legend(frameon=False)
    right.set(xlabel="step", title="length of the gradient, before clipping", ylim=(0, None))
    save(figure, path)


def circuit(path: Path) -> None:
    """An induction head with all heads, and without the three previous-token heads below it; and the losses."""
    loaded = load("stdlib")
    model, end = loaded.model, loaded.tokenizer.end_id
    draw = torch.Generator().manual_seed(0)
    once = torch.randint(300, 4000, (4, 48), generator=draw)
    tokens = torch.cat([torch.full((4, 1), end), once, once], dim=1)

    def run(*heads: tuple[str, int]) -> tuple[regard.Recording, float]:
        changes = [regard.interventions.Ablate(layer, head) for layer, head in heads]
        with torch.inference_mode(), regard.intervene(model, *changes), regard.record(model) as recording:
            logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, 49:-1].flatten(0, 1), tokens[:, 50:].flatten())
        return recording, float(loss)

    whole, loss = run()
    summary = whole.summary()
    previous = [(head.layer, head.head) for head in summary.of("previous token")]
    copying = summary.of("induction")[0]
    cut, worst = run(*previous)
    losses = {"nothing": loss}
    losses |= {f"{layer[7:]}.{head}": run((layer, head))[1] for layer, head in previous}
    losses |= {"all three": worst, "three others": run(("layers.4", 0), ("layers.2", 0), ("layers.3", 1))[1]}
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, recording, title in zip(panels, (whole, cut), ("all heads", "without the three below"), strict=False):
        weights = recording[copying.layer].head(copying.head).weights()[0, 0]
        axes.imshow(weights.numpy(), cmap=COLOURS, norm=mpl.colors.PowerNorm(0.5, vmin=0.0, vmax=1.0))
        axes.set(title=f"layer {copying.layer[7:]}, head {copying.head}: {title}", xlabel="key", ylabel="query")
        axes.set(xticks=(0, 48, 96), yticks=(0, 48, 96))
        axes.spines[:].set_visible(False)
    names = list(losses)[::-1]
    colours = [INK if name == "all three" else PALE for name in names]
    panels[2].barh(range(len(names)), [losses[name] for name in names], color=colours, height=0.65)
    panels[2].set_yticks(range(len(names)), names)
    panels[2].tick_params(axis="y", length=0)
    panels[2].set(title="loss of the copy, without", xlim=(0, math.ceil(worst)))
    save(figure, path)


FIGURES: dict[str, Callable[[Path], None]] = {
    "guide/transformer.svg": transformer,
    "guide/shapes.svg": shapes,
    "guide/split.svg": heads,
    "guide/saturation.svg": saturation,
    "guide/lookup.svg": lookup,
    "guide/rotation.svg": rotation,
    "guide/norms.svg": norms,
    "guide/similarity.svg": similarity,
    "guide/root.svg": root,
    "guide/cost.svg": cost,
    "guide/training.svg": training,
    "guide/circuit.svg": circuit,
}

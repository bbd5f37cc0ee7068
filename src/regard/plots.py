"""Figures of attention, and of a training, drawn with matplotlib (the extra ``[plot]``).

    regard.plots.heat_map(recording["layers.3"].head(5), labels=pieces)
    regard.plots.head_grid(recording).savefig("heads.png")

Colour and width are proportional to the square root of a weight, so that small weights are visible and a weight of 0 is
not. Functions that draw a single plot accept the axes to draw on, and return them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from regard.extras import how
from regard.indexing import as_range
from regard.observation import Observation
from regard.shapes import check_whole, is_number, kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "Blues"
MAX_SIDE_CELLS = 512
"""Most cells on a side of a heat map; longer texts are pooled: each cell is the largest weight that it covers."""

MAX_LABELLED_TOKENS = 48
"""Most tokens for which labels are written."""

MAX_ARC_TOKENS = 128
"""Most tokens between which arcs are drawn."""


def heat_map(
    seen: Observation, *, row: int = 0, labels: Sequence[str] | None = None, axes: "Axes | None" = None
) -> "Axes":
    """One head's weights: queries down, keys across.

    Args:
        seen: one head, such as ``recording["layers.3"].head(5)``.
        row: of the batch.
        labels: the tokens as text; written if there are few enough.
        axes: the axes to draw on; None: a new figure.
    Raises:
        ImportError: matplotlib is missing.
        ValueError: several heads, or no such row.
    """
    _check("heat_map", seen, row, one_head=True)
    axes = _axes(axes, 6.0, 5.0)
    query_len, key_len = seen.grid.query_len, seen.grid.key_len
    drawn = _image(axes, _weights(seen, MAX_SIDE_CELLS)[row, 0], query_len, key_len, MAX_SIDE_CELLS)
    axes.set(xlabel="key", ylabel="query")
    if labels is not None:
        _label(axes.xaxis, labels, key_len)
        _label(axes.yaxis, labels[key_len - query_len :] if len(labels) == key_len else labels, query_len)
    axes.figure.colorbar(drawn, ax=axes, label="weight", ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
    return axes


def head_grid(seen: Observation | Mapping[str, Observation], *, row: int = 0, cells: int = 96) -> "Figure":
    """Every head as a small heat map: layers down, heads across.

    Args:
        seen: a recording, or one layer of it.
        row: of the batch.
        cells: most cells on a side of one map; longer texts are pooled.
    Raises:
        ImportError: matplotlib is missing.
        ValueError: nothing was recorded, or no such row.
    """
    pyplot = _pyplot()
    layers = {"": seen} if isinstance(seen, Observation) else seen
    if not isinstance(layers, Mapping):
        raise TypeError(
            f"plots.head_grid: seen must be a recording or an Observation, got {kind(seen)}{_as_seen(seen)}"
        )
    if not layers:
        raise ValueError("plots.head_grid: nothing was recorded")
    check_whole("plots.head_grid", "cells", cells)
    for layer in layers.values():
        _check("head_grid", layer, row)
    across = max(layer.grid.heads for layer in layers.values())
    figure: Figure
    figure, grid = pyplot.subplots(
        len(layers), across, figsize=(0.6 + 1.1 * across, 0.5 + 1.15 * len(layers)), squeeze=False, layout="constrained"
    )
    for down, (name, layer) in enumerate(layers.items()):
        weights = _weights(layer, cells)[row]
        for head, axes in enumerate(grid[down]):
            axes.set(xticks=[], yticks=[])
            if head >= layer.grid.heads:
                axes.set_axis_off()
                continue
            _image(axes, weights[head], layer.grid.query_len, layer.grid.key_len, cells)
            axes.set_title(f"head {_numbers(layer)[head]}", fontsize=7, pad=2)
            if head == 0:
                axes.set_ylabel(name, fontsize=7)
    return figure


def arcs(
    seen: Observation,
    *,
    row: int = 0,
    labels: Sequence[str] | None = None,
    places: range | slice | None = None,
    least: float = 0.1,
    axes: "Axes | None" = None,
) -> "Axes":
    """One head's weights as arcs between the tokens of a text, from each query to its keys.

    A weight on the query's own token is a ring around it.

    Args:
        seen: one head of self-attention.
        row: of the batch.
        labels: the tokens of the whole text.
        places: the part of the text to draw; None: all of it, up to `MAX_ARC_TOKENS` tokens.
        least: the smallest weight to draw.
    Raises:
        ImportError: matplotlib is missing.
        ValueError: several heads, not self-attention, too many tokens, or no such row.
    """
    patches = _matplotlib("patches")
    _check("arcs", seen, row, one_head=True)
    length = seen.grid.key_len
    if seen.grid.query_len != length:
        raise ValueError(f"plots.arcs: draws a text that attends to itself, got the scores {seen.grid}")
    part = range(length) if places is None else as_range(places)
    if not 0 <= part.start < part.stop <= length or part.step != 1 or len(part) > MAX_ARC_TOKENS:
        raise ValueError(
            f"plots.arcs: places must lie in 0 to {length}, {MAX_ARC_TOKENS} at most, got {part.start} to {part.stop}; "
            "choose some, places=slice(0, 64)"
        )
    if not is_number(least):
        raise ValueError(f"plots.arcs: least must be a number, the smallest weight that is drawn, got {kind(least)}")
    if labels is not None:
        _check_labels("arcs", labels, length)
    weights = _drawable(seen.weights(queries=part, keys=part)[row, 0])
    axes = _axes(axes, max(4.0, 0.22 * len(part)), 3.2)
    colour = _pyplot().get_cmap(COLOURS)(0.85)
    highest = 1.0
    for query, key in (weights >= least).nonzero().tolist():
        strength = float(weights[query, key]) ** 0.5
        if query == key:
            axes.plot([key], [0], "o", mfc="none", mec=colour, ms=4 + 5 * strength, alpha=strength, mew=1.2)
            continue
        span = abs(query - key)
        highest = max(highest, span / 2)
        axes.add_patch(
            patches.Arc(
                ((query + key) / 2, 0), span, span, theta1=0, theta2=180, color=colour, lw=0.4 + 2 * strength,
                alpha=strength,
            )
        )  # fmt: skip
    axes.set(xlim=(-0.8, len(part) - 0.2), ylim=(-0.08 * highest - 0.3, 1.05 * highest), yticks=[])
    axes.spines[["left", "right", "top", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    if labels is not None:
        axes.set_xticks(range(len(part)), [_plain(labels[place]) for place in part], rotation=90, fontsize=8)
    else:
        every = max(1, len(part) // 16)
        axes.set_xticks(range(0, len(part), every), [str(place) for place in part[::every]])
    return axes


def entropy(seen: Observation, *, row: int = 0, axes: "Axes | None" = None) -> "Axes":
    """The entropy of each query's weights, in nats: one line per head, and a dashed one for uniform weights.

    Args, Raises: as in `heat_map`, for any number of heads.
    """
    _check("entropy", seen, row)
    axes = _axes(axes, 7.0, 3.2)
    most = seen.visible().max(dim=1).values[row].clamp(min=1).log()
    axes.plot(most.cpu(), color="0.6", lw=1, ls="--", label="even")
    return _lines(axes, seen, seen.entropy()[row], "query", "entropy (nats)")


def received(seen: Observation, *, row: int = 0, axes: "Axes | None" = None) -> "Axes":
    """The weight that each key receives from all queries: one line per head, on a logarithmic scale.

    Args, Raises: as in `heat_map`, for any number of heads.
    """
    _check("received", seen, row)
    axes = _axes(axes, 7.0, 3.2)
    axes.set_yscale("log")
    return _lines(axes, seen, seen.received()[row].clamp(min=1e-6), "key", "weight received")


def _lines(axes: "Axes", seen: Observation, values: Tensor, across: str, up: str) -> "Axes":
    """One line for each head [heads, length]."""
    thin = 1.0 if values.shape[1] <= 2048 else 0.5
    for number, line in zip(_numbers(seen), values.detach().float().cpu(), strict=True):
        axes.plot(line, lw=thin, label=f"head {number}")
    axes.set(xlabel=across, ylabel=up, xlim=(0, max(1, values.shape[1] - 1)))
    axes.spines[["right", "top"]].set_visible(False)
    if len(values) <= 12:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.02))
    return axes


def _weights(seen: Observation, cells: int) -> Tensor:
    """The weights of all heads, pooled if the text is long: [batch, heads, rows, columns]."""
    small = max(seen.grid.query_len, seen.grid.key_len) <= cells
    weights = seen.weights() if small else seen.image(size=cells, pool="max")
    return _drawable(weights)


def _drawable(weights: Tensor) -> Tensor:
    """Weights as numbers for colours and widths, clamped: rounding may make a weight slightly larger than 1."""
    return weights.detach().float().cpu().clamp(0.0, 1.0)


def _image(axes: "Axes", weights: Tensor, query_len: int, key_len: int, cells: int) -> Any:
    norm = _matplotlib("colors").PowerNorm(0.5, vmin=0.0, vmax=1.0)
    down, across = (-(-length // cells) for length in (query_len, key_len))  # tokens that a pixel stands for
    rows, columns = weights.shape
    aspect: Literal["equal", "auto"] = "equal" if query_len == key_len else "auto"
    # averaged if the screen is coarser still: a single large weight fades, but is not skipped
    drawn = axes.imshow(
        weights.tolist(), cmap=COLOURS, norm=norm, extent=(-0.5, columns * across - 0.5, rows * down - 0.5, -0.5),
        aspect=aspect, interpolation="antialiased", interpolation_stage="data",
    )  # fmt: skip
    axes.set(xlim=(-0.5, key_len - 0.5), ylim=(query_len - 0.5, -0.5))  # the last pixels may cover fewer tokens
    return drawn


def _check_labels(function: str, labels: Sequence[str], length: int) -> None:
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not all(isinstance(one, str) for one in labels):
        raise TypeError(f"plots.{function}: labels must be the tokens as text, a list of str, got {kind(labels)}")
    if len(labels) != length:
        raise ValueError(f"plots.{function}: there are {length} tokens, got {len(labels)} labels")


def _label(axis: Any, labels: Sequence[str], length: int) -> None:
    _check_labels("heat_map", labels, length)
    if length <= MAX_LABELLED_TOKENS:
        turned = 90 if axis.axis_name == "x" else 0
        axis.set_ticks(range(length), [_plain(label) for label in labels], rotation=turned, fontsize=7)
        axis.set_tick_params(length=0)


def _plain(label: str) -> str:
    """A token escaped for a figure: `$` would start a formula, and a newline a new line."""
    return label.replace("\n", "\\n").replace("\t", "\\t").replace("$", r"\$")


def _numbers(seen: Observation) -> Sequence[int]:
    """The heads' numbers in their layer."""
    numbers: Sequence[int] = getattr(seen, "heads", range(seen.grid.heads))
    return numbers


def training_course(lines: Sequence[Mapping[str, Any]]) -> "Figure":
    """The loss of every step of a training, on its texts and on held-out ones, above the learning rate.

    Args:
        lines: of a run's metrics.jsonl, each with step, loss and learning_rate, and held_out where it was evaluated.
    Raises:
        ImportError: matplotlib is missing.
        ValueError: there is no line.
    """
    if not lines:
        raise ValueError("plots.training_course: lines must have a step or more, got none")
    figure: Figure = _matplotlib("figure").Figure(figsize=(7.0, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    above.plot(steps, losses, lw=0.6, alpha=0.35, color="C0")
    near = max(1, len(losses) // 50)
    means = [sum(part) / len(part) for part in (losses[max(0, at + 1 - near) : at + 1] for at in range(len(losses)))]
    above.plot(steps, means, color="C0", label="training")
    evaluated = [(line["step"], line["held_out"]) for line in lines if line.get("held_out") is not None]
    if evaluated:
        above.plot(*zip(*evaluated, strict=True), "o-", ms=3, color="C1", label="held out")
    above.set_ylabel("loss")
    above.legend()
    below.plot(steps, [line["learning_rate"] for line in lines], color="C2")
    below.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    return figure


def _check(function: str, seen: Observation, row: int, *, one_head: bool = False) -> None:
    if not isinstance(seen, Observation):
        raise TypeError(f"plots.{function}: seen must be an Observation, got {kind(seen)}{_as_seen(seen)}")
    if one_head and seen.grid.heads != 1:
        raise ValueError(f"plots.{function}: draws one head, got {seen.grid.heads}; choose one: seen.head(0)")
    if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < seen.grid.batch:
        raise ValueError(f"plots.{function}: row must be 0 to {seen.grid.batch - 1}, got {row}")
    if 0 in seen.grid[:4]:
        raise ValueError(f"plots.{function}: there is nothing to draw in the scores {seen.grid}")


def _as_seen(value: object) -> str:
    """How to get an observation, as the end of an error message."""
    if isinstance(value, Mapping):
        return "; choose a layer and a head: recording[name].head(0)"
    return "; regard.observe(query, key, mask=...) makes one, and recording[name].head(0) holds one of a model"


def _axes(axes: "Axes | None", width: float, height: float) -> "Axes":
    if axes is not None:
        if not hasattr(axes, "plot"):
            raise TypeError(f"plots: axes must be axes of matplotlib, or None for a new figure, got {kind(axes)}")
        return axes
    made: Axes = _pyplot().subplots(figsize=(width, height), layout="constrained")[1]
    return made


def _pyplot() -> Any:
    return _matplotlib("pyplot")


def _matplotlib(part: str) -> Any:
    """A module of matplotlib, imported when something is drawn."""
    import importlib

    try:
        return importlib.import_module(f"matplotlib.{part}")
    except ImportError as error:
        raise ImportError(f"regard.plots needs matplotlib ({error}): {how('plot')}") from error

"""What a mask costs: every row of `regard bench`, kept in benchmarks/results, and the page that is made of it.

    python benchmarks/masks.py [--rows PATTERN] [--quick] [--repeats 15] [--threads N] [--output FILE]
    python benchmarks/masks.py --report          writes docs/performance.md and its plots; measures nothing

Only a whole run is kept where the page is made from; for a part of it, or a quick one, say where with --output. A run
that is stopped keeps the rows that are done. What is measured, and against whom, says `regard.bench`.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from regard import bench

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "masks.json"
OTHERS = tuple(RESULTS.with_name(f"{name}.json") for name in ("small_calls", "observation", "recording"))
PAGE = ROOT / "docs" / "performance.md"

Data = dict[str, Any]

FORMS = ("torch", "torch, dense mask", "FlexAttention", "formula")
LAYERS = ("nn.MultiheadAttention", "x-transformers")

PLOTTED = ("full", "causal", "window 256", "documents of 512")
# of middling lightness, so that they can be read on a light page and on a dark one
COLOURS = {
    "regard": "#2f81f7",
    "torch": "#e8732c",
    "torch, dense mask": "#cf5fa5",
    "FlexAttention": "#2ea04f",
    "formula": "#8a919a",
}
INK, FAINT = "#808890", "#80889040"


# --- the page -----------------------------------------------------------------------------------------------------


def report(data: Data, small: Data, looking: Data, recorded: Data, plots: list[str]) -> str:
    """docs/performance.md.

    Args:
        data: what this script measured. small, looking, recorded: what small_calls.py, observation.py and recording.py
            did.
    """
    rows = data["rows"]
    functions = [row for row in rows if not row["layer"] and not row["sweep"]]
    layers = [row for row in rows if row["layer"]]
    parts = [
        "# Performance",
        "",
        "Written by `python benchmarks/masks.py --report` from `benchmarks/results/`. `make bench` measures anew, and",
        "so does `regard bench` wherever regard is installed. All who appear in a row did the same work on the same",
        "tensors, in turn, in one run; a result that differs from regard's is not timed. Read the ratios: the times",
        "are those of one machine.",
        "",
        _machine(data),
        "",
    ]
    if plots:
        parts += ["## Against length", "", *(f"![{_alt(plot)}]({plot})\n" for plot in plots)]
    parts += [
        "## Time",
        "",
        'Milliseconds; after the slash, how many times regard\'s time that is: above 1 regard is faster. "torch" is',
        "`scaled_dot_product_attention` in the form that suits the task best, which the column behind it names; making",
        "masks and compiling FlexAttention are not counted.",
        "",
        *_times(functions, FORMS, form=True),
    ]
    if any("memory_mib" in entry for row in rows for entry in row["peers"].values()):
        parts += [
            "## Memory",
            "",
            "The most that a call takes beyond query, key and value, in MiB: the output (and the gradients) in it, and",
            "the dense mask of those who need one. Each was measured in a process of its own.",
            "",
            *_memories(functions, FORMS),
        ]
    parts += _longest(functions)
    if layers:
        parts += [
            "## Layers",
            "",
            "`regard.MultiHeadAttention` beside others' layers with the same weights, 768 features in 12 heads.",
            "",
            *_times(layers, LAYERS, form=False),
            *_memories(layers, LAYERS),
        ]
    parts += _compiling(rows) + _missing(rows) + _looking(looking) + _recorded(recorded)
    parts += [
        "## Small calls",
        "",
        "What one call costs beyond torch's own, in microseconds.",
        "",
        "| call | shape | dtype | torch | regard | extra |",
        "|---|---|---|---:|---:|---:|",
        *(
            f"| {r['case']} | {r['shape']} | {r['dtype']} | {r['torch_us']} | {r['regard_us']} | {r['extra_us']} |"
            for r in small["rows"]
        ),
    ]
    return "\n".join(parts) + "\n"


def _machine(data: Data) -> str:
    machine = data["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "regard", "x-transformers") if name in machine)
    said = (
        f"Machine: {machine['processor']}, {machine['threads']} threads; Python {machine['python']}, {versions}. "
        f"Medians of {data['repeats']} repeats, fewer where a row takes long. "
        "12 heads of 64 unless the task says otherwise."
    )
    if data["shrink"] > 1:
        said += f" **A quick run: every length, window and document is 1/{data['shrink']} of what its name says.**"
    if len(data["rows"]) < data["planned"]:
        said += f" **A run that was stopped: {len(data['rows'])} of {data['planned']} rows.**"
    return said


def _head(row: Data) -> str:
    return f"| {_escaped(row['task'])} | {row['length']:,} | {row['dtype']} |"


def _escaped(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "&#124;")


def _table(head: list[str], numbers: int, lines: list[str]) -> list[str]:
    """`numbers` columns, the last ones, are numbers."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    rule[1] = "---:"
    return [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *lines, ""]


def _times(rows: list[Data], names: tuple[str, ...], *, form: bool) -> list[str]:
    lines = []
    for row in rows:
        ours = row["peers"]["regard"]["ms"]
        cells = [row["kernel"], _number(ours)]
        for name in names:
            entry = row["peers"].get(name)
            cells.append(f"{_number(entry['ms'])} / {_number(entry['ms'] / ours)}" if entry else "")
            if form and name == "torch":
                cells.append(_escaped(entry.get("form", "")) if entry else "")
        lines.append(f"{_head(row)} {' | '.join(cells)} |")
    shown = [column for name in names for column in ([name, "its form"] if form and name == "torch" else [name])]
    return _table(["task", "length", "dtype", "kernel", "regard", *shown], 1 + len(shown), lines)


def _memories(rows: list[Data], names: tuple[str, ...]) -> list[str]:
    lines = []
    for row in rows:
        entries = [row["peers"].get(name, {}).get("memory_mib") for name in ("regard", *names)]
        if any(entry is not None for entry in entries):
            sizes = [row["inputs_mib"], row["results_mib"], *entries]
            lines.append(f"{_head(row)} {' | '.join('' if n is None else _number(n) for n in sizes)} |")
    head = ["task", "length", "dtype", "inputs", "results", "regard", *names]
    return _table(head, 3 + len(names), lines) if lines else []


def _longest(rows: list[Data]) -> list[str]:
    """What the longest row needs beside its own inputs and output."""
    row = max(rows, key=lambda row: row["length"], default=None)
    if row is None or "memory_mib" not in row["peers"]["regard"]:
        return []
    data = row["inputs_mib"] + row["results_mib"]
    extra = row["peers"]["regard"]["memory_mib"] - row["results_mib"]
    extra = max(0.0, extra)
    return [
        f"The longest, {row['task']} at {row['length']:,} tokens: inputs and output are {_number(data)} MiB, and",
        f"regard takes {_number(extra)} MiB beside them ({extra / data:.1%}). The scores of one head alone would be "
        f"{_number(row['query_len'] * row['length'] * 4 / 2**20)} MiB.",
        "",
    ]


def _compiling(rows: list[Data]) -> list[str]:
    seconds = [entry["compile_s"] for row in rows for entry in row["peers"].values() if "compile_s" in entry]
    if not seconds:
        return []
    return [
        "## Compiling",
        "",
        "FlexAttention is compiled for every length and mask, or fetched from torch's cache on disk, if that has seen",
        f"them before: {min(seconds):.1f} to {max(seconds):.1f} seconds here, {sum(seconds):.0f} in all. regard "
        "compiles nothing.",
        "",
    ]


def _looking(data: Data) -> list[str]:
    """What benchmarks/observation.py measured."""
    first = data["rows"][0]
    lines = [f"| {row['task']} | {_number(row['ms'])} | {_number(row['times_fused'])} |" for row in data["rows"]]
    once = [
        f"| {row['task']} | {row['length']:,} | "
        + (f"{_number(row['seconds'])} s" if "seconds" in row else f"{_number(row['ms'])} ms")
        + f" | {_number(row['peak_mib'])} |"
        for row in data["once"]
    ]
    return [
        "## Looking",
        "",
        f"Statistics of {first['heads']} heads of 64 over {first['length']:,} tokens, causal, float32, from query and",
        "key (and lse, where that is known): milliseconds, and how many fused forward passes that is.",
        "",
        "| task | ms | forward passes |",
        "|---|---:|---:|",
        *lines,
        "",
        "One head of 64, once, in a process of its own; memory is all that the process held, Python and torch too.",
        "",
        "| task | length | time | MiB |",
        "|---|---:|---:|---:|",
        *once,
        "",
    ]


def _recorded(data: Data) -> list[str]:
    """What benchmarks/recording.py measured."""
    rows = {row["task"]: row for row in data["rows"]}
    theirs, plain = rows["eager, statistics"], rows["sdpa"]["memory_mib"]

    def beside(name: str) -> str:
        faster, more = theirs["ms"] / rows[name]["ms"], max(0.0, rows[name]["memory_mib"] - plain)
        return f"{_number(faster)} times as fast, and takes {_number(more)} MiB beyond the plain forward pass."

    return [
        "## A model of transformers, recorded",
        "",
        f"A BERT of {data['layers']} layers of 12 heads, {data['length']:,} tokens, float32, transformers "
        f"{data['machine']['transformers']}. Statistics are the entropy of",
        "each query, what each key receives, and the 8 largest weights, of every head. Memory is what a task takes",
        "beyond the model.",
        "",
        "| task | ms | MiB |",
        "|---|---:|---:|",
        *(f"| {row['task']} | {_number(row['ms'])} | {_number(row['memory_mib'])} |" for row in data["rows"]),
        "",
        'Compared with `output_attentions=True` under "eager", which takes '
        f"{_number(theirs['memory_mib'] - plain)} MiB beyond the plain forward pass",
        "(what an allocator keeps differs by some MiB from run to run):",
        "",
        f"- `record` and then the statistics is {beside('recorded, statistics')}",
        f"- `record(..., dtype=torch.float16)` and then the statistics is {beside('in float16, statistics')}",
        f"- `gather` is {beside('gathered')}",
        "",
    ]


def _missing(rows: list[Data]) -> list[str]:
    """Every empty cell has a reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for kind in ("not_measured", "memory_not_measured"):
            for name, why in row[kind].items():
                said = f"{'memory: ' if kind.startswith('memory') else ''}{why}"
                reasons.setdefault((name, said), []).append(f"{row['task']} at {row['length']:,}")
    if not reasons:
        return []
    lines = ["## Not measured", ""]
    for (name, why), where in sorted(reasons.items()):
        lines.append(f"- **{name}**: {why} ({'; '.join(dict.fromkeys(where))})")
    return [*lines, ""]


def _number(value: float) -> str:
    """Three digits that count, and no more."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


# --- the plots ----------------------------------------------------------------------------------------------------


def _alt(plot: str) -> str:
    what = "Time" if "time" in plot else "Memory"
    return f"{what} of a call against its length for full, causal, window and documents, regard and its peers"


def series(rows: list[Data], task: str, measure: str) -> dict[str, list[tuple[int, float]]]:
    """Length and number of each peer, for one task in float32."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        if row["task"] == task and row["dtype"] == "float32":
            for name, entry in row["peers"].items():
                if measure in entry:
                    found.setdefault(name, []).append((row["length"], entry[measure]))
    return found


def draw(data: Data, folder: Path) -> list[str]:
    """The plots, as SVG with a transparent ground; their names. None where nothing was measured against length."""
    if not any(row["sweep"] for row in data["rows"]):
        return []
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    style = {
        "svg.fonttype": "none",  # text stays text, in the reader's own font
        "svg.hashsalt": "regard",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": INK,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
    }
    names = []
    for measure, unit in (("ms", "milliseconds"), ("memory_mib", "MiB beyond query, key and value")):
        with mpl.rc_context(style):
            figure, axes = plt.subplots(2, 2, figsize=(9, 7), sharey=True)
            for axis, task in zip(axes.flat, PLOTTED, strict=True):
                for name, points in series(data["rows"], task, measure).items():
                    ours = name == "regard"
                    axis.plot(
                        *zip(*((n, max(value, 0.1)) for n, value in points), strict=True),
                        label="torch, best form" if name == "torch" else name,
                        color=COLOURS[name],
                        linewidth=4.5 if ours else 1.5,  # broad and below, so that it shows under a line that meets it
                        marker="o" if ours else "s",
                        markersize=7 if ours else 3.5,
                        zorder=2 if ours else 3,
                    )
                axis.set(xscale="log", yscale="log", title=task)
                lengths = sorted({row["length"] for row in data["rows"] if row["task"] == task})
                axis.set_xticks(lengths[:: 1 + len(lengths) // 7])
                axis.xaxis.set_minor_locator(NullLocator())
                axis.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"))
                axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
                axis.yaxis.set_tick_params(labelleft=True)
                axis.grid(visible=True, linewidth=0.8)
                axis.spines[["top", "right"]].set_visible(False)
            for axis in axes[1]:
                axis.set_xlabel("length")
            for axis in axes[:, 0]:
                axis.set_ylabel(unit)
            known = {
                label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            figure.legend(known.values(), known.keys(), loc="upper center", ncols=len(known), frameon=False)
            figure.tight_layout(rect=(0, 0, 1, 0.95))
            names.append(f"performance-{'time' if measure == 'ms' else 'memory'}.svg")
            figure.savefig(folder / names[-1], transparent=True, metadata={"Date": None})
            plt.close(figure)
    return names


# --- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="PATTERN", help="rows whose name contains this; * stands for anything")
    parser.add_argument("--quick", action="store_true", help="an eighth of every length, once each")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", action="store_true", help="write docs/performance.md and measure nothing")
    options = parser.parse_args()
    if options.report:
        data, *others = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, *OTHERS))
        PAGE.write_text(report(data, *others, draw(data, PAGE.parent)), encoding="utf-8")
        return
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    output = options.output
    if output is None and options.rows is None and not options.quick:
        output = RESULTS
    shrink = bench.QUICK_SHRINK if options.quick else 1
    try:
        bench.run(
            bench.chosen(options.rows, shrink),
            repeats=1 if options.quick else options.repeats,
            shrink=shrink,
            output=output,
            show=lambda row: print(row, flush=True),
            watch=lambda doing: print(f"\r\x1b[K{doing}\r", end="", file=sys.stderr) if sys.stderr.isatty() else None,
        )
    except ValueError as error:
        sys.exit(f"masks.py: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped; the rows that are done are in {output}" if output else "stopped")
    print(f"kept in {output}" if output else "not kept: only a part of the rows; --output FILE keeps them")


if __name__ == "__main__":
    main()

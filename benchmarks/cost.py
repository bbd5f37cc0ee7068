"""What attention costs: FLOPs and bytes as `regard.plan` counts them, and time and memory as they are measured.

    python benchmarks/cost.py [--repeats 5] [--shrink 1] [--output benchmarks/results/cost.json]
    python benchmarks/cost.py --memory         adds what calls take of memory to the times that are stored

Calls are full, causal, and causal with a window of 256, at lengths that double, 12 heads of 64 features in float32; the
explicit formula beside the full ones, up to where its squares are large; and one query against a growing cache, as in
generation. The count is turned into time by two yardsticks of the same run: how fast the machine multiplies matrices of
2,048 x 2,048, and how fast it reads memory (a matrix of 256 MiB times a vector).

    predicted = max(FLOPs computed / FLOPs per second, bytes moved / bytes per second)

Rows and yardsticks take turns, repeat by repeat, and the fastest repeat of each is told, since other programs make a
call slower and never faster; what share of the processors they took is told too. Memory is the most that a call takes
beyond query, key and value, in a process of its own. The chapter of the guide is docs/guide/14-what-it-costs.md.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regard
from regard import Causal, bench, matmul
from regard.bench import Task
from regard.bench.device import seconds_of

RESULTS = Path(__file__).parent / "results" / "cost.json"
MOST = {"full": 8192, "causal": 8192, "window 256": 32768}
MOST_BY_FORMULA = 2048
MOST_FLOPS_FOR_MEMORY = 6e10
CACHED = (2048, 8192, 32768, 131072)
MULTIPLIED, READ = 2048, 1 << 26
"""Rows and columns of the matrices of one yardstick; numbers in the matrix of the other."""


def tasks(shrink: int) -> list[Task]:
    """The calls that are measured: those of `regard bench` at lengths that double, and one query on a cache."""
    sweep = [task for task in bench.tasks(shrink) if task.name in MOST and task.heads == 12 and not task.backward]
    rows = [task for task in sweep if 512 // shrink <= task.length <= MOST[task.name] // shrink]
    cached = [Task("one query", length // shrink, Causal(), query_len=1) for length in CACHED]
    return sorted(rows, key=lambda task: (list(MOST).index(task.name), task.length)) + cached


def counted(task: Task) -> dict[str, Any]:
    """What `regard.plan` says of a call."""
    sizes = ((task.heads, task.queries), (task.kv_heads, task.length), (task.kv_heads, task.length))
    tensors = [torch.empty(task.batch, heads, length, task.head_dim) for heads, length in sizes]
    plan = regard.plan(*tensors, mask=task.mask)
    return {
        "call": task.name,
        "length": task.length,
        "kernel": plan.kernel,
        "flops_needed": plan.flops_needed,
        "flops_computed": plan.flops_computed,
        "bytes_moved": plan.bytes_moved,
        "peak_bytes": plan.peak_bytes,
    }


def yardsticks(shrink: int) -> dict[str, Callable[[], object]]:
    """A product of two matrices, and one of a matrix and a vector."""
    size = MULTIPLIED // shrink
    left, right = torch.randn(2, size, size)
    matrix, vector = torch.randn(READ // shrink // size, size), torch.randn(size)
    return {"multiplying": lambda: matmul.bmm(left[None], right[None]), "reading": lambda: matrix @ vector}


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The fewest seconds that each call took, all of them in turn."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    device = torch.device("cpu")
    for repeat in range(repeats):
        for name in bench.in_turn(list(calls), repeat):
            times[name].append(seconds_of(calls[name], device))
    return {name: min(values) for name, values in times.items()}


def measure_time(repeats: int, shrink: int) -> dict[str, Any]:
    """Every row with its counts and its time, and what the yardsticks say."""
    ours, _, _, _, formula = bench.FUNCTIONS
    rows, calls = [], yardsticks(shrink)
    for task in tasks(shrink):
        rows.append(counted(task))
        inputs = task.inputs(torch.float32)
        calls[task.label] = bench.work(task, ours, inputs)[0]
        if task.name == "full" and task.length <= MOST_BY_FORMULA // shrink:
            calls[f"formula, {task.label}"] = bench.work(task, formula, inputs)[0]
    rivals = bench.Others()
    took = timed(calls, repeats)
    others = rivals.share()
    size = MULTIPLIED // shrink
    flops, bytes_read = 2 * size**3 / took["multiplying"], READ // shrink * 4 / took["reading"]
    for task, row in zip(tasks(shrink), rows, strict=True):
        row["ms"] = round(took[task.label] * 1e3, 3)
        predicted = max(row["flops_computed"] / flops, row["bytes_moved"] / bytes_read)
        row["predicted_ms"] = round(predicted * 1e3, 3)
        if f"formula, {task.label}" in took:
            row["formula_ms"] = round(took[f"formula, {task.label}"] * 1e3, 3)
    return {
        "machine": bench.machine(),
        "repeats": repeats,
        "others": others,
        "heads": 12,
        "head_dim": 64,
        "gflops_per_second": round(flops / 1e9, 1),
        "gb_per_second": round(bytes_read / 1e9, 2),
        "rows": rows,
    }


def add_memory(rows: list[dict[str, Any]], shrink: int) -> None:
    """What every call takes in bytes, but those of one query, and those that compute for seconds."""
    for task, row in zip(tasks(shrink), rows, strict=True):
        if task.name != "one query" and row["flops_computed"] < MOST_FLOPS_FOR_MEMORY:
            row["memory_bytes"] = bench.memory_of(task, torch.float32, "regard", shrink)
        if "formula_ms" in row:
            row["formula_bytes"] = bench.memory_of(task, torch.float32, "formula", shrink)
        print(row["call"], row["length"], row.get("memory_bytes"), flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divides every length, for a try")
    parser.add_argument("--memory", action="store_true", help="add memory to the stored times")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.memory:
        said = json.loads(options.output.read_text(encoding="utf-8"))
        add_memory(said["rows"], options.shrink)
    else:
        said = measure_time(options.repeats, options.shrink)
    for row in said["rows"]:
        print(*row.values())
    options.output.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

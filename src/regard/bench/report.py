"""A run: rows measured, shown and stored one by one, with a description of the machine."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import regard
from regard import matmul, processor
from regard.bench.device import described
from regard.bench.memory import in_one_line
from regard.bench.task import CPU, Task, name_of
from regard.bench.timing import measure
from regard.kernels.strips import binding

QUICK_SHRINK = 8
"""A quick run has the same tasks at an eighth of the length, in float32, five repeats each, without memory and without
FlexAttention, whose compilation takes longer than everything else."""

QUICK_REPEATS = 5

BUSY_SHARE = 0.1
"""Share of the processors used by other programs from which on a row reports it."""


def machine(device: torch.device = CPU) -> dict[str, Any]:
    """Processor, threads, compiled library and versions of a run; for a GPU also its name, memory and CUDA version. If
    torch was told to leave out instructions, to which it was limited."""
    versions = {"torch": torch.__version__, "regard": regard.__version__}
    limit = os.environ.get("ATEN_CPU_CAPABILITY")
    if find_spec("x_transformers"):
        from importlib.metadata import version

        versions["x-transformers"] = version("x-transformers")
    return {
        "processor": processor.model(),
        **({"limited": limit} if limit else {}),
        "threads": torch.get_num_threads(),
        "products": _libraries(),
        "library": binding.name(),
        "python": platform.python_version(),
        **versions,
        **described(device),
    }


def _libraries() -> str:
    """What multiplies float32 matrices, and bfloat16 ones if that is another."""
    single = "oneDNN" if matmul.onednn_is_faster(torch.float32) else "MKL" if processor.MKL else "BLAS"
    if processor.AMX:
        return f"{single} and AMX"
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return f"{single} with AVX2"
    if single == "MKL" and "Intel" in processor.name():  # which it does not slow down
        single = "MKL on Intel"
    return single if processor.BFLOAT16 else f"{single} without bfloat16"


def run(
    rows: Sequence[tuple[Task, torch.dtype]],
    *,
    repeats: int = 15,
    shrink: int = 1,
    quick: bool = False,
    output: Path | None = None,
    show: Callable[[str], None] = print,
    watch: Callable[[str], None] = lambda doing: None,
    keep: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Measures rows one by one; each is shown, and stored in `output`, as soon as it is done.

    If regard itself fails in a row, that is reported, and the next row begins.

    Args:
        quick: skip memory and peers that have to be compiled.
        watch: called with the current state: which row of how many, and the estimated time left.
        keep: called with the results so far: at the beginning and after every row.
    Returns:
        What is written to `output`: the machine, rows done, rows failed, and the number planned.
    """
    data: dict[str, Any] = {
        "machine": machine(rows[0][0].device if rows else CPU),
        "repeats": repeats,
        "shrink": shrink,
        "planned": len(rows),
    }
    data |= {"load": load(), "rows": [], "failed": []}
    keep(data)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for number, (task, dtype) in enumerate(rows):
        label = f"{task.label}, {name_of(dtype)}"
        left = (time.perf_counter() - began) / number * (len(rows) - number) if number else None
        title = f"row {number + 1} of {len(rows)}{'' if left is None else f', {_in_words(left)} left'}: {label}"

        def told(doing: str, title: str = title) -> None:
            watch(f"{title}; {doing}")

        try:
            options: dict[str, Any] = {"repeats": repeats, "shrink": shrink, "memory": not quick, "compile": not quick}
            row = measure(task, dtype, **options, watch=told)
        except Exception as error:
            why = in_one_line(error)
            data["failed"].append({"row": label, "why": why})
            show(f"{label}: failed: {why}")
        else:
            data["rows"].append(row)
            show(shown(row))
        keep(data)
        if output is not None:
            beside = output.with_name(output.name + ".part")
            beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, output)
    return data


def load() -> float | None:
    """The load average of the last minute; None if the system does not report it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy(data: dict[str, Any]) -> str | None:
    """A sentence if other programs were busy during a run or at its beginning; else None.

    >>> busy({"load": 0.1, "rows": [{"others": 0.02}]})
    >>> busy({"load": 0.1, "rows": [{"others": 0.02}, {"others": 0.4}]})
    'others took up to 40% of the processors in 1 of 2 rows: measure again when the machine is idle'
    """
    taken = [row["others"] for row in data["rows"] if (row.get("others") or 0.0) > BUSY_SHARE]
    if taken:
        share, rows = max(taken), f"{len(taken)} of {len(data['rows'])} rows"
        return f"others took up to {share:.0%} of the processors in {rows}: measure again when the machine is idle"
    unknown = all(row.get("others") is None for row in data["rows"])
    if unknown and (data["load"] or 0.0) > (os.cpu_count() or 1) / 2:
        return f"the machine was busy when the run began (load {data['load']}): measure again when it is idle"
    return None


def _in_words(seconds: float) -> str:
    """
    >>> _in_words(20), _in_words(100), _in_words(4000)
    ('under a minute', 'about 2 min', 'about 67 min')
    """
    return "under a minute" if seconds < 45 else f"about {max(1, round(seconds / 60))} min"


def shown(row: dict[str, Any]) -> str:
    """A row as text: times, times relative to regard's, and memory.

    >>> print(shown({"task": "causal", "length": 1024, "dtype": "float32", "kernel": "sdpa", "others": 0.3,
    ...              "peers": {"regard": {"ms": 14.0, "spread": [0.98, 1.03], "memory_mib": 3.0},
    ...                        "torch": {"ms": 28.0, "spread": [1.9, 2.1], "form": "is_causal"}},
    ...              "not_measured": {"formula": "too large"}, "memory_not_measured": {}}))
    causal, N=1024, float32: regard takes its kernel 'sdpa'
      regard                     14.000 ms     1.00  0.98-1.03            3.0 MiB
      torch                      28.000 ms     2.00  1.90-2.10                     is_causal
      formula                not measured: too large
      others took 30% of the processors meanwhile
    """
    lines = [f"{row['task']}, N={row['length']}, {row['dtype']}: regard takes its kernel {row['kernel']!r}"]
    ours = row["peers"]["regard"]["ms"]
    room = 16 if any("memory_mib" in entry for entry in row["peers"].values()) else 0
    for name, entry in row["peers"].items():
        memory = f"{entry['memory_mib']:>12,.1f} MiB" if "memory_mib" in entry else ""
        note = entry.get("form", f"compiled in {entry['compile_s']} s" if "compile_s" in entry else "")
        spread = "{:.2f}-{:.2f}".format(*entry["spread"]) if "spread" in entry else ""
        times = f"{entry['ms']:>11,.3f} ms{entry['ms'] / ours:>9,.2f}  {spread:<12}"
        lines.append(f"  {name:<22}{times}{memory:<{room}}  {note}".rstrip())
    lines += [f"  {name:<23}not measured: {why}" for name, why in row["not_measured"].items()]
    lines += [f"  {name:<23}memory not measured: {why}" for name, why in row["memory_not_measured"].items()]
    if (row.get("others") or 0.0) > BUSY_SHARE:
        lines.append(f"  others took {row['others']:.0%} of the processors meanwhile")
    return "\n".join(lines)

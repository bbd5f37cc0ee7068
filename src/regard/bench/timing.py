"""One row: peers take turns on the same tensors; one with a different result is not timed."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.bench.device import peak_on_gpu, seconds_of, wait
from regard.bench.memory import in_one_line, memory_of
from regard.bench.peer import Results, difference, peers, work
from regard.bench.task import Task, name_of
from regard.functional import plan
from regard.shapes import bytes_of

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest allowed difference between two results, relative to the largest number."""

MAX_ROW_SECONDS = 8.0
"""Repeats end after this time, but not before the second."""

MiB = 1 << 20


def measure(
    task: Task,
    dtype: torch.dtype,
    *,
    repeats: int = 15,
    shrink: int = 1,
    memory: bool = True,
    compile: bool = True,
    watch: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """One row of the table.

    Args:
        repeats: how often each peer is timed; fewer if they are slow.
        shrink: as passed to `tasks`, so that another process finds the same task.
        memory: whether to measure memory too.
        compile: whether to include peers that have to be compiled.
        watch: called with the current state.
    """
    inputs = task.inputs(dtype)
    ready: dict[str, Callable[[], Results]] = {}
    entries: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    held: dict[str, int] = {}
    ours: Results = ()
    undropped = replace(task, dropout=0.0)
    for peer in peers(task):
        why = peer.cannot(task)
        if why is None and not compile and peer.name == "FlexAttention":
            why = "a quick run compiles nothing"
        if why is not None:
            skipped[peer.name] = why
            continue
        watch(f"{peer.name}: the first call")
        try:
            run, holds = work(task, peer, inputs)
            start = time.perf_counter()
            theirs = run()
            wait(task.device)
            first = time.perf_counter() - start
            if task.dropout:  # peers drop different weights, so results are compared without dropout
                theirs = work(undropped, peer, inputs)[0]()
        except Exception as error:
            if peer is peers(task)[0]:
                raise
            skipped[peer.name] = in_one_line(error)
            continue
        ours = ours or theirs
        apart = difference(ours, theirs)
        if apart > TOLERANCE[dtype]:
            skipped[peer.name] = f"gives another result than regard: differs by {apart:.2g} of the largest number"
            continue
        ready[peer.name] = run
        held[peer.name] = bytes_of(holds)
        entries[peer.name] = {"compile_s": round(first, 2)} if peer.name == "FlexAttention" else {}
    results_size = bytes_of(ours)
    del ours, theirs
    rivals = Others()
    times = _times(ready, repeats, task.device, watch)
    others = rivals.share()
    ours_alone = times[peers(task)[0].name]
    middle = statistics.median(ours_alone)
    for name, values in times.items():
        beside = [middle] * len(values) if values is ours_alone else ours_alone
        entries[name] |= {
            "ms": round(statistics.median(values) * 1e3, 3),
            "repeats": len(values),
            "spread": quartiles([value / our for value, our in zip(values, beside, strict=True)]),
        }
    unmeasured: dict[str, str] = {}
    for name in entries if memory else ():
        watch(f"{name}: memory")
        if task.device.type == "cuda":
            extra: int | str = held[name] + peak_on_gpu(ready[name], task.device)
        else:
            ready.clear()  # it is measured in a separate process
            extra = memory_of(task, dtype, name, shrink)
        if isinstance(extra, str):
            unmeasured[name] = extra
        else:
            entries[name]["memory_mib"] = round(extra / MiB, 2)
    if "torch" in entries:
        entries["torch"]["form"] = task.form
    return {
        "task": task.name,
        "length": task.length,
        "query_len": task.queries,
        "batch": task.batch,
        "heads": task.heads,
        "kv_heads": task.kv_heads,
        "head_dim": task.head_dim,
        "dtype": name_of(dtype),
        "layer": task.layer,
        "sweep": task.sweep,
        "kernel": _kernel(task, dtype),
        "others": others,
        "inputs_mib": round(bytes_of(inputs) / MiB, 2),
        "results_mib": round(results_size / MiB, 2),
        "peers": entries,
        "not_measured": skipped,
        "memory_not_measured": unmeasured,
    }


def _times(
    ready: dict[str, Callable[[], Results]], repeats: int, device: torch.device, watch: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of every call, by peer."""
    times: dict[str, list[float]] = {name: [] for name in ready}
    began = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 2 and time.perf_counter() - began > MAX_ROW_SECONDS:
            break
        for name in in_turn(list(ready), repeat):
            watch(f"{name}: {repeat + 1} of {repeats}")
            times[name].append(seconds_of(ready[name], device))
    return times


def quartiles(values: Sequence[float]) -> list[float]:
    """First and third quartile; minimum and maximum of fewer than four values.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 100.0])
    [2.0, 4.0]
    """
    if len(values) < 4:
        return [round(min(values), 3), round(max(values), 3)]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 3), round(high, 3)]


class Others:
    """Measures the processor time used by other programs, or taken by a hypervisor, from its creation on."""

    def __init__(self) -> None:
        self.before = self._seconds()

    def share(self) -> float | None:
        """The share of all processors; None if the system does not report it."""
        now = self._seconds()
        if now is None or self.before is None:
            return None
        everything, others = (after - before for after, before in zip(now, self.before, strict=True))
        return round(min(1.0, max(0.0, others / everything)), 3) if everything else None

    @staticmethod
    def _seconds() -> tuple[float, float] | None:
        """Processor seconds since the system started: in total, and used by others."""
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        each = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        mine = os.times()
        return sum(ticks) / each, (sum(ticks) - idle) / each - sum(mine[:4])


def in_turn(names: list[str], repeat: int) -> list[str]:
    """The order of peers in a repeat. What one leaves behind, such as memory that the system has yet to reclaim, slows
    down the next, and what it has read helps it; so over as many repeats as there are peers, or twice as many of an
    odd number, each follows every other (Williams 1949, "Experimental Designs Balanced for the Estimation of Residual
    Effects of Treatments").

    >>> [in_turn(["a", "b", "c", "d"], repeat) for repeat in range(2)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd']]
    """
    count = len(names)
    places = ((n + 1) // 2 if n % 2 else count - n // 2 for n in range(count))
    order = [names[(place + repeat) % count] for place in places]
    return order[::-1] if count % 2 and repeat % 2 else order  # an odd number is in balance with its mirror image only


def _kernel(task: Task, dtype: torch.dtype) -> str:
    sizes = ((task.heads, task.queries), (task.kv_heads, task.length), (task.kv_heads, task.length))
    options: dict[str, Any] = {"dtype": dtype, "device": task.device, "requires_grad": task.backward}
    tensors = [torch.empty(task.batch, h, n, task.head_dim, **options) for h, n in sizes]
    with torch.set_grad_enabled(task.backward):
        return plan(*tensors, mask=task.mask, dropout=task.dropout).kernel

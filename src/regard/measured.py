"""What is measured once per machine: a few milliseconds, kept in the user's cache folder.

No library reports how fast it is on a processor, so where two of them compute the same, both are timed on a small
example. Only the choice of the faster depends on it, never a result beyond the order in which numbers are added up.
The file may be deleted at any time; the environment variable REGARD_MEASURE=0 turns measuring and reading off.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

import regard
from regard import processor

Found = TypeVar("Found")

ROUNDS = 15
"""How often both are timed, in turns; the shortest times are compared, since other programs only add to them."""

ENOUGH_SECONDS = 0.05
"""No further round begins after this time ..."""

FEWEST_ROUNDS = 3
"""... but after so many: on a slow processor, the first round is still as slow as what warms up."""


def ratio(name: str, one: Callable[[], object], other: Callable[[], object]) -> float:
    """Time of `one` over that of `other` on this machine, on one thread; 1 where measuring is off.

    Args:
        name: under which it is kept, for this processor and the versions of torch and regard.
    """
    if os.environ.get("REGARD_MEASURE") == "0":
        return 1.0
    machine = f"{processor.model()}, torch {torch.__version__}, regard {regard.__version__}"
    found = _read().get(machine, {}).get(name)
    if not isinstance(found, int | float):
        found = round(_ratio(one, other), 3)
        _keep(machine, name, found)
    return float(found)


def alone(find_out: Callable[[], Found]) -> Found:
    """What a function returns in a thread of its own, without the modes and transforms of the caller, in which tensors
    may have no numbers, and operators take other times."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(find_out).result()


def file() -> Path:
    """Where the measurements are kept."""
    if sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "regard" / "measured.json"


def _ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    # one thread: torch starts its others once, and a process that is forked after that waits for them for ever
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        both: tuple[list[float], list[float]] = [], []
        for number in range(1 + ROUNDS):  # the first is to warm up
            if number < 2:
                began = time.perf_counter()
            elif number > FEWEST_ROUNDS and time.perf_counter() - began > ENOUGH_SECONDS:
                break
            for run, times in zip((one, other), both, strict=True):
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
        return min(both[0][1:]) / min(both[1][1:])
    finally:
        torch.set_num_threads(threads)


def _read() -> dict[str, dict[str, object]]:
    try:
        found = json.loads(file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # none yet, half of one, or no home folder
        return {}
    whole = isinstance(found, dict) and all(isinstance(facts, dict) for facts in found.values())
    return found if whole else {}


def _keep(machine: str, name: str, value: float) -> None:
    """Written beside the file and then moved there, so that nobody reads a half; not at all where nothing can be."""
    facts = _read()
    facts.setdefault(machine, {})[name] = value
    try:
        path = file()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except (OSError, RuntimeError):
        pass

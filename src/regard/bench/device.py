"""Time and memory of a call on its device: CUDA calls return before they are done."""

import time
from collections.abc import Callable
from typing import Any

import torch


def check_device(name: str) -> torch.device:
    """A device by name, if it exists.

    Raises:
        ValueError: neither cpu nor cuda, or there is no such CUDA device.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ValueError(f"device must be cpu or cuda, got {name!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: torch {torch.__version__} finds no CUDA device here")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device(name)


def described(device: torch.device) -> dict[str, Any]:
    """A GPU's name, memory and CUDA version; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}


def wait(device: torch.device) -> None:
    """Waits until all work on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The duration of a call: by CUDA events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begun.record()
        call()
        done.record()
        torch.cuda.synchronize(device)
    return float(begun.elapsed_time(done)) / 1e3


def peak_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes held by torch's allocator during a call, beyond what it held before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before

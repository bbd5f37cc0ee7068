"""What it costs to look: statistics of attention against one forward pass of it.

    python benchmarks/observation.py [--only WORD] [--repeats 5] [--length 8192] [--long 131072]
                                     [--output benchmarks/results/observation.json] [--set MAX_TILE_KEYS=1024 ...]

Each ratio is a task's median time over that of one fused forward pass (`scaled_dot_product_attention`, is_causal) on
the same tensors, run in turn, after one warm-up; float32, causal, heads of 64. "Once" tasks run alone in a process of
their own, whose largest memory is told: with everything it loads, Python and torch too. `--set` gives constants of
`regard.observation.tuning` another value, to find the best.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Causal, Document, Prefix, Window
from regard.bench import machine
from regard.observation import Entropy, Image, Observation, Received, Top, tuning

RESULTS = Path(__file__).parent / "results" / "observation.json"
HEAD_DIM = 64
MIB = 2**20


def tensors(heads: int, length: int) -> tuple[Tensor, Tensor]:
    """Query and key."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, heads, length, HEAD_DIM)
    return query, key


def fresh(query: Tensor, key: Tensor, **more: Any) -> Observation:
    """An observation that knows nothing yet."""
    return regard.observe(query, key, mask=more.pop("mask", Causal()), **more)


def documents(length: int, each: int) -> Document:
    """Documents of so many tokens, and what is left over."""
    return Document.from_lengths([each] * (length // each) + [length % each] * (length % each > 0))


def with_penalty(query: Tensor, key: Tensor) -> None:
    """Entropy in a loss, forward and backward."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key)]
    fresh(*leaves).entropy().mean().backward()


RATIOS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "regard.attention": lambda q, k, lse: regard.attention(q, k, k, mask=Causal()),
    "entropy": lambda q, k, lse: fresh(q, k).entropy(),
    "entropy, lse known": lambda q, k, lse: fresh(q, k, lse=lse).entropy(),
    "received, lse known": lambda q, k, lse: fresh(q, k, lse=lse).received(),
    "top 8, lse known": lambda q, k, lse: fresh(q, k, lse=lse).top(8),
    "mean image of 512, lse known": lambda q, k, lse: fresh(q, k, lse=lse).image(512, "mean"),
    "max image of 512, lse known": lambda q, k, lse: fresh(q, k, lse=lse).image(512),
    "entropy + received + top 8": lambda q, k, lse: fresh(q, k).gather(Entropy(), Received(), Top(8)),
    "the same, lse known": lambda q, k, lse: fresh(q, k, lse=lse).gather(Entropy(), Received(), Top(8)),
    "the same, softcap 50": lambda q, k, lse: fresh(q, k, softcap=50.0).gather(Entropy(), Received(), Top(8)),
    "the same, window 256": lambda q, k, lse: fresh(q, k, mask=Causal() & Window(256)).gather(
        Entropy(), Received(), Top(8)
    ),
    "the same, window 256 or prefix 4": lambda q, k, lse: fresh(q, k, mask=Causal() & (Window(256) | Prefix(4))).gather(
        Entropy(), Received(), Top(8)
    ),
    "the same, documents of 512": lambda q, k, lse: fresh(q, k, mask=documents(q.shape[2], 512)).gather(
        Entropy(), Received(), Top(8)
    ),
    "the same, documents of 128": lambda q, k, lse: fresh(q, k, mask=documents(q.shape[2], 128)).gather(
        Entropy(), Received(), Top(8)
    ),
    "the same, window 64": lambda q, k, lse: fresh(q, k, mask=Causal() & Window(64)).gather(
        Entropy(), Received(), Top(8)
    ),
    "entropy in a loss, forward and backward": lambda q, k, lse: with_penalty(q, k),
}


def ratios(heads: int, length: int, repeats: int, only: str) -> list[dict[str, object]]:
    """Every task against one fused forward pass, in turn."""
    query, key = tensors(heads, length)
    lse = fresh(query, key).lse
    chosen = {name: task for name, task in RATIOS.items() if only in name}
    fused = "fused forward"
    times: dict[str, list[float]] = {name: [] for name in (fused, *chosen)}
    for repeat in range(repeats + 1):
        for name in times:
            start = time.perf_counter()
            if name == fused:
                F.scaled_dot_product_attention(query, key, key, is_causal=True)
            else:
                chosen[name](query, key, lse)
            if repeat:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"task": name, "heads": heads, "length": length, "ms": round(value * 1e3, 3),
         "times_fused": round(value / medians[fused], 3)}
        for name, value in medians.items()
    ]  # fmt: skip


def once_image(length: int) -> dict[str, object]:
    """One head of a long text: a picture, entropy and received, from query and key alone."""
    query, key = tensors(1, length)
    start = time.perf_counter()
    fresh(query, key).gather(Image(1024), Entropy(), Received())
    return {"seconds": round(time.perf_counter() - start, 3)}


def once_tile(length: int) -> dict[str, object]:
    """A rectangle of 256 x 256 weights anywhere in it, lse known."""
    query, key = tensors(1, length)
    seen = fresh(query, key, lse=torch.full((1, 1, length), 5.0))
    times = []
    for repeat in range(60):
        row = (length - 256) * repeat // 59
        column = row * (repeat % 4) // 4
        start = time.perf_counter()
        seen.weights(slice(row, row + 256), slice(column, column + 256))
        times.append(time.perf_counter() - start)
    return {"ms": round(statistics.median(times[5:]) * 1e3, 3), "slowest_ms": round(max(times[5:]) * 1e3, 3)}


def once_penalty(length: int) -> dict[str, object]:
    """Entropy in a loss, forward and backward, of one head."""
    query, key = tensors(1, length // 4)
    start = time.perf_counter()
    with_penalty(query, key)
    return {"length": length // 4, "seconds": round(time.perf_counter() - start, 3)}


ONCE = {
    "image of 1024, entropy and received": once_image,
    "any 256 x 256 weights": once_tile,
    "entropy in a loss, a quarter of the length": once_penalty,
}


def tune(setting: str) -> str:
    """NAME=VALUE: gives a constant another value."""
    name, _, value = setting.partition("=")
    if not name.isupper() or not hasattr(tuning, name):
        raise argparse.ArgumentTypeError(f"regard.observation.tuning has no constant {name!r}")
    setattr(tuning, name, type(getattr(tuning, name))(value))
    return setting


def in_a_child(name: str, length: int, settings: list[str]) -> dict[str, object]:
    """One task in a process of its own, and the most memory that it took."""
    command = [sys.executable, __file__, "--child", name, "--long", str(length), *(f"--set={s}" for s in settings)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"task": name, "heads": 1, "length": length, **json.loads(answer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=8192, help="of the tasks that are compared")
    parser.add_argument("--long", type=int, default=131072, help="of the tasks that run once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--set", type=tune, action="append", default=[], metavar="NAME=VALUE", help="of the tuning")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        result = ONCE[options.child](options.long)
        # ru_maxrss is in KiB, but on a Mac in bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        print(json.dumps({**result, "peak_mib": round(peak / MIB)}))
        return
    # these first: a child's peak counts what its parent held when it was begun
    once = [in_a_child(name, options.long, options.set) for name in ONCE if options.only in name]
    rows = ratios(options.heads, options.length, options.repeats, options.only)
    for row in rows:
        print(f"{row['task']:<42}{row['length']:>8}{row['ms']:>12} ms   x {row['times_fused']} of a forward pass")
    for row in once:
        print(f"{row['task']:<42}{', '.join(f'{k} {v}' for k, v in row.items() if k not in ('task', 'heads'))}")
    if options.set:
        return  # the results that are kept are those of the constants as they are
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"machine": machine(), "repeats": options.repeats, "rows": rows, "once": once}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

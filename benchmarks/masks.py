"""What a mask costs: regard against torch's function given the same mask, and against the explicit formula.

    python benchmarks/masks.py [--only WORD] [--repeats 5] [--output benchmarks/results/masks.json]
    python benchmarks/masks.py --report          writes docs/performance.md from the committed results

Each row is one task. The peers run in turn on the same tensors, `repeats` times after one warm-up; the table holds
medians. torch gets its best form for the task: `is_causal` where that is the mask, the documents as a batch where they
are equally long, one call per document where they are not, `enable_gqa` for grouped heads, and otherwise a dense bool
mask that is made beforehand (making it is not counted).
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Causal, Chunk, Document, Mask, Padding, Prefix, Strided, Window
from regard.functional import check_call
from regard.kernels import choose
from regard.shapes import Grid

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "masks.json"
sdpa = F.scaled_dot_product_attention


@dataclass
class Task:
    """One row: tensors of these sizes, a mask, and torch's best form for it (None: a dense bool mask)."""

    name: str
    length: int
    mask: Mask | None
    torch_form: Callable[..., Tensor] | None = None
    torch_words: str = "dense bool mask"
    backward: bool = False
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    query_len: int | None = None
    dropout: float = 0.0
    explicit: bool = False


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, is_causal=True)


def in_batch(count: int) -> Callable[..., Tensor]:
    """Equal documents side by side in the batch."""

    def run(*tensors: Tensor) -> Tensor:
        split = [t.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1) for t in tensors]
        return sdpa(*split, is_causal=True)

    return run


def one_by_one(lengths: list[int]) -> Callable[..., Tensor]:
    """A call per document."""

    def run(*tensors: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths, dim=2) for t in tensors), strict=True)
        return torch.cat([sdpa(*part, is_causal=True) for part in parts], dim=2)

    return run


def ragged(total: int, seed: int = 0) -> list[int]:
    """Log-normal lengths that sum to `total`."""
    draw = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(max(8, int(math.exp(5.5 + float(torch.randn((), generator=draw))))))
    lengths[-1] -= sum(lengths) - total
    return [n for n in lengths if n > 0]


def tasks() -> list[Task]:
    documents = ragged(8192)
    packed = Causal() & Document.from_lengths(documents)
    rows = torch.randint(64, 1025, (8,), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Task("full", 1024, None, sdpa, "as it is"),
        Task("causal", 512, Causal(), causal, "is_causal"),
        Task("causal", 1024, Causal(), causal, "is_causal"),
        Task("causal", 4096, Causal(), causal, "is_causal"),
        Task("window 256", 4096, Causal() & Window(256), explicit=True),
        Task("window 256", 8192, Causal() & Window(256)),
        Task("window 256, forward and backward", 4096, Causal() & Window(256), backward=True),
        Task("8 documents of 512", 4096, Causal() & Document.from_lengths([512] * 8), in_batch(8), "as a batch"),
        Task("ragged documents", 8192, packed, one_by_one(documents), "one by one"),
        Task("right padding, 8 rows", 1024, Padding(rows), batch=8),
        Task("prefix 1024 | causal", 8192, Causal() | Prefix(1024)),
        Task("streaming, window 256 | prefix 4", 8192, Causal() & (Window(256) | Prefix(4))),
        Task("chunks of 512, causal", 8192, Causal() & Chunk(512)),
        Task("strided 8, causal", 8192, Causal() & Strided(8)),
        Task("decode, 32 heads on 8", 32768, Causal(), lambda *t: sdpa(*t, enable_gqa=True), "enable_gqa",
             heads=32, kv_heads=8, head_dim=128, query_len=1),
        Task("dropout 0.1, causal, forward and backward", 2048, Causal(),
             lambda *t: sdpa(*t, is_causal=True, dropout_p=0.1), "dropout_p", backward=True, dropout=0.1),
    ]  # fmt: skip


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The formula, operation by operation."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ value


def measure(task: Task, dtype: torch.dtype, repeats: int) -> dict[str, object]:
    """One row of the table."""
    torch.manual_seed(0)
    query_len = task.query_len or task.length
    sizes = ((task.heads, query_len), (task.kv_heads, task.length), (task.kv_heads, task.length))
    tensors = [torch.randn(task.batch, h, n, task.head_dim, dtype=dtype, requires_grad=task.backward) for h, n in sizes]
    dense = None
    if task.torch_form is None or task.explicit:
        assert task.mask is not None
        bound = task.mask.bind(Grid(task.batch, task.heads, query_len, task.length))
        dense = bound.allowed(range(query_len), range(task.length)).expand(-1, -1, query_len, task.length).contiguous()
    peers: dict[str, Callable[[], Tensor]] = {
        "regard": lambda: regard.attention(*tensors, mask=task.mask, dropout=task.dropout),
        "torch": (lambda: task.torch_form(*tensors)) if task.torch_form else (lambda: sdpa(*tensors, attn_mask=dense)),
    }
    if task.explicit:
        peers["formula"] = lambda: explicit(*tensors, dense)
    times: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(repeats + 1):
        for name, call in peers.items():
            start = time.perf_counter()
            output = call()
            if task.backward:
                output.backward(torch.ones_like(output))
            if repeat:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    checked = check_call("bench", *tensors, task.mask, None, None, None, None, None, task.dropout, None, False)
    return {
        "task": task.name,
        "length": task.length,
        "dtype": str(dtype).removeprefix("torch."),
        "kernel": choose(checked).name,
        "torch_form": task.torch_words,
        **{f"{name}_ms": round(value * 1e3, 3) for name, value in medians.items()},
        "times_faster": round(medians["torch"] / medians["regard"], 3),
        **({"times_faster_than_formula": round(medians["formula"] / medians["regard"], 3)} if task.explicit else {}),
    }


def report(results: Path) -> str:
    """docs/performance.md."""
    data = json.loads(results.read_text())
    small = json.loads((results.parent / "small_calls.json").read_text())
    lines = [
        "# Performance",
        "",
        "Written by `python benchmarks/masks.py --report` from `benchmarks/results/`. The peers ran in turn on the",
        "same tensors on one machine; read the ratios, the times are that machine's. \"Times faster\" is torch's",
        "median time over regard's: above 1 regard is faster.",
        "",
        f"Machine: {data['machine']['threads']} threads, torch {data['machine']['torch']}, Python "
        f"{data['machine']['python']}; 12 heads of 64 unless the task says otherwise; medians of {data['repeats']}.",
        "",
        "## Masks",
        "",
        "| task | length | dtype | kernel | regard, ms | torch, ms | torch's form | times faster |",
        "|---|---:|---|---|---:|---:|---|---:|",
    ]
    lines += [
        f"| {r['task']} | {r['length']} | {r['dtype']} | {r['kernel']} | {r['regard_ms']} | {r['torch_ms']} | "
        f"{r['torch_form']} | {r['times_faster']} |"
        for r in data["rows"]
    ]
    lines += ["", "## Small calls", "", "What one call costs beyond torch's own.", ""]
    lines += ["| call | shape | dtype | torch, µs | regard, µs | extra, µs |", "|---|---|---|---:|---:|---:|"]
    lines += [
        f"| {r['case']} | {r['shape']} | {r['dtype']} | {r['torch_us']} | {r['regard_us']} | {r['extra_us']} |"
        for r in small["rows"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="write docs/performance.md and measure nothing")
    options = parser.parse_args()
    if options.report:
        (ROOT / "docs" / "performance.md").write_text(report(RESULTS))
        return
    rows = []
    for task in tasks():
        if options.only not in task.name:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            row = measure(task, dtype, options.repeats)
            rows.append(row)
            print(
                f"{task.name:<42}{task.length:>6} {row['dtype']:<9}{row['kernel']:<7}{row['regard_ms']:>11} ms  "
                f"torch {row['torch_ms']:>11} ms ({task.torch_words})  x {row['times_faster']}",
                flush=True,
            )
    machine = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"machine": machine, "repeats": options.repeats, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()

"""What it costs to see what a model attends to: a recording, against the weights that transformers gives.

    python benchmarks/recording.py [--length 2048] [--layers 6] [--repeats 5]
                                   [--output benchmarks/results/recording.json]

A BERT of transformers with random weights (768 features in 12 heads, float32), one text. Every task is a forward pass
with something beside it; "statistics" are entropy, received mass and the 8 largest weights of every head:

    sdpa                    the model as transformers runs it by default
    regard                  the model under attn_implementation="regard"
    recorded                the same, recorded
    recorded, statistics    the same, and then the statistics
    in float16, statistics  the same, with query and key kept in float16
    gathered                the statistics by regard.gather, which keeps nothing else
    eager, statistics       output_attentions=True under "eager", and the statistics from its tensors

Times are medians of interleaved repeats after one warm-up. Memory is the most that a task takes beyond what the process
held before it: the median of three processes, since the allocator keeps more in one than in another.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor

import regard
import regard.huggingface
from regard.bench import machine, most_taken
from regard.observation import Entropy, Received, Top

RESULTS = Path(__file__).parent / "results" / "recording.json"


def bert(layers: int, length: int) -> tuple[torch.nn.Module, Tensor]:
    """The model and its text."""
    torch.manual_seed(0)
    regard.huggingface.register()
    config = transformers.BertConfig(num_hidden_layers=layers, max_position_embeddings=length)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    return model, torch.randint(1000, 30000, (1, length))


def under(implementation: str, model: torch.nn.Module, tokens: Tensor) -> None:
    model.set_attn_implementation(implementation)
    model(tokens)


def recorded(model: torch.nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> regard.Recording:
    model.set_attn_implementation("regard")
    with regard.record(model, dtype=dtype) as recording:
        model(tokens)
    return recording


def recorded_statistics(model: torch.nn.Module, tokens: Tensor, dtype: torch.dtype | None = None) -> list[object]:
    return [seen.gather(Entropy(), Received(), Top(8)) for seen in recorded(model, tokens, dtype).values()]


def gathered(model: torch.nn.Module, tokens: Tensor) -> list[object]:
    model.set_attn_implementation("regard")
    with regard.gather(model, Entropy(), Received(), Top(8)) as found:
        model(tokens)
    return list(found.values())


def eager_statistics(model: torch.nn.Module, tokens: Tensor) -> list[object]:
    model.set_attn_implementation("eager")
    weights = model(tokens, output_attentions=True).attentions
    return [(torch.special.entr(w).sum(-1), w.sum(-2), w.topk(8)) for w in weights]


TASKS: dict[str, Callable[[torch.nn.Module, Tensor], object]] = {
    "sdpa": lambda model, tokens: under("sdpa", model, tokens),
    "regard": lambda model, tokens: under("regard", model, tokens),
    "recorded": recorded,
    "recorded, statistics": recorded_statistics,
    "in float16, statistics": lambda model, tokens: recorded_statistics(model, tokens, torch.float16),
    "gathered": gathered,
    "eager, statistics": eager_statistics,
}


def agree(model: torch.nn.Module, tokens: Tensor) -> None:
    """All ways give the same statistics, or there is nothing to compare."""
    eager = eager_statistics(model, tokens)
    for way in (recorded_statistics, gathered):
        for ours, theirs in zip(way(model, tokens), eager, strict=True):
            torch.testing.assert_close(ours[0], theirs[0], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours[1], theirs[1], atol=1e-3, rtol=1e-4)
            torch.testing.assert_close(ours[2].weights, theirs[2].values, atol=1e-6, rtol=1e-3)


def memory(name: str, layers: int, length: int) -> float:
    """MiB of a task beyond the model, in processes of its own."""
    command = [sys.executable, __file__, "--child", name, "--layers", str(layers), "--length", str(length)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return statistics.median(float(run.stdout) for run in runs)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, tokens = bert(options.layers, options.length)
    if options.child:
        task = TASKS[options.child]
        task(*bert(1, 64))  # what is loaded at a first call is no part of it
        print(most_taken(lambda: task(model, tokens)) / 2**20)
        return
    held = {name: memory(name, options.layers, options.length) for name in TASKS}
    agree(*bert(1, min(options.length, 512)))
    times: dict[str, list[float]] = {name: [] for name in TASKS}
    for repeat in range(options.repeats + 1):
        for name, task in TASKS.items():
            start = time.perf_counter()
            task(model, tokens)
            if repeat:
                times[name].append(time.perf_counter() - start)
    rows = [
        {"task": name, "ms": round(statistics.median(values) * 1e3, 1), "memory_mib": round(held[name], 1)}
        for name, values in times.items()
    ]
    for row in rows:
        print(f"{row['task']:<24}{row['ms']:>10.1f} ms{row['memory_mib']:>10.1f} MiB")
    by_name = {row["task"]: row for row in rows}
    theirs, plain = by_name["eager, statistics"], by_name["sdpa"]
    print(f"recording costs {by_name['recorded']['ms'] / plain['ms'] - 1:+.1%} of sdpa's time")
    for name in ("recorded, statistics", "in float16, statistics", "gathered"):
        ours = by_name[name]
        more, less = (row["memory_mib"] - plain["memory_mib"] for row in (theirs, ours))
        print(f"{name}: {theirs['ms'] / ours['ms']:.1f} times as fast as eager's weights", end=", ")
        print(f"{less:.1f} MiB beyond sdpa's where eager takes {more:.1f}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": {**machine(), "transformers": transformers.__version__}, "layers": options.layers,
            "length": options.length, "repeats": options.repeats, "rows": rows}  # fmt: skip
    options.output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

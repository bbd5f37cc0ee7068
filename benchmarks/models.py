"""Whole models of transformers under regard, beside "sdpa" and "eager".

    python benchmarks/models.py [--repeats 9] [--rows "gpt2*"] [--output benchmarks/results/models.json]

Small models with random weights (6 layers of 384 features in 6 heads, float32) generate 32 tokens after 64, or read
512 tokens at once. In models this small what surrounds attention is a good part of the time; in larger ones, less.

All three take turns, in an order that changes. What is told is sdpa's and eager's time over regard's, the median of the
ratios of one repeat: above 1, regard takes less. Times are those of the processor (`time.process_time`, divided by the
threads), so that other processes on the machine disturb less.
"""

import argparse
import fnmatch
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import regard
import regard.huggingface
from regard.bench import in_turn, machine

RESULTS = Path(__file__).parent / "results" / "models.json"
NAMES = ("regard", "sdpa", "eager")
PROMPT, NEW, READ = 64, 32, 512


class Row(NamedTuple):
    """One task: a model, how many rows, and how they are padded and cached."""

    name: str
    make: Callable[[int], Any]
    rows: int
    padded: bool = False
    cache: str | None = None
    read: bool = False


def gpt2(layers: int) -> Any:
    config = transformers.GPT2Config(
        vocab_size=5000, n_embd=384, n_layer=layers, n_head=6, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=384, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(layers: int) -> Any:
    config = transformers.BertConfig(
        vocab_size=5000, hidden_size=384, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=6
    )
    return transformers.BertModel(config, add_pooling_layer=False)


ROWS = (
    Row("gpt2, 1 row", gpt2, 1),
    Row("gpt2, 4 rows padded left", gpt2, 4, padded=True),
    Row("gpt2, 8 rows padded left", gpt2, 8, padded=True),
    Row("llama, 1 row", llama, 1),
    Row("llama, 8 rows padded left", llama, 8, padded=True),
    Row("llama, 1 row, static cache", llama, 1, cache="static"),
    Row("llama, 4 rows padded left, static cache", llama, 4, padded=True, cache="static"),
    Row("bert reads 4 rows padded right", bert, 4, padded=True, read=True),
)


def batch(row: Row, length: int) -> dict[str, Tensor]:
    """Tokens, and which of them are real."""
    torch.manual_seed(1)
    tokens = torch.randint(3, 5000, (row.rows, length))
    real = torch.ones_like(tokens)
    for number in range(row.rows if row.padded else 0):
        hidden = number * 5 * length // PROMPT % (length // 2)
        real[number, slice(length - hidden, None) if row.read else slice(hidden)] = 0
    return {"input_ids": tokens * real, "attention_mask": real}


def task(row: Row, layers: int, length: int, new: int) -> Callable[[str], Tensor]:
    """What each of them does; gives tokens, or the states of those that are real."""
    torch.manual_seed(0)
    model, given = row.make(layers).eval(), batch(row, length)

    def run(name: str) -> Tensor:
        model.set_attn_implementation(name)
        if row.read:
            return model(**given).last_hidden_state[given["attention_mask"] == 1]
        return model.generate(
            **given, max_new_tokens=new, min_new_tokens=new, do_sample=False, cache_implementation=row.cache
        )

    return run


@torch.inference_mode()
def measure(row: Row, repeats: int, layers: int = 6, length: int | None = None, new: int = NEW) -> dict[str, Any]:
    """Times of all three, after a turn in which they have to agree."""
    run = task(row, layers, length or (READ if row.read else PROMPT), new)
    ours, *theirs = (run(name) for name in NAMES)
    for other in theirs:
        torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for repeat in range(repeats):
        for name in in_turn(list(NAMES), repeat):
            start = time.process_time()
            run(name)
            times[name].append((time.process_time() - start) / torch.get_num_threads())
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["regard"], strict=True)) for name in NAMES[1:]
    }
    return {
        "task": row.name,
        "ms": {name: round(statistics.median(values) * 1e3, 1) for name, values in times.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", default="*")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    regard.huggingface.register()
    transformers.logging.set_verbosity_error()
    rows = []
    for row in (row for row in ROWS if fnmatch.fnmatch(row.name, options.rows)):
        rows.append(measure(row, options.repeats))
        ms, ratio = rows[-1]["ms"], rows[-1]["ratio"]
        print(
            f"{row.name:<42}{ms['regard']:>8.1f} ms   sdpa {ratio['sdpa']:.2f}   eager {ratio['eager']:.2f}", flush=True
        )
    output = options.output or (RESULTS if len(rows) == len(ROWS) else None)
    if output is None:
        print("not kept: only a part of the rows")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": {**machine(), "transformers": transformers.__version__},
        "repeats": options.repeats,
        "rows": rows,
    }
    output.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

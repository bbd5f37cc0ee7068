"""A decoder at work: text from a GPT-2 beside transformers' `generate`, and training beside nanoGPT's loop.

    python benchmarks/decoder.py [--repeats 5] [--rows "generate*"] [--quick] [--output benchmarks/results/decoder.json]
    python benchmarks/decoder.py --report       writes the table of docs/models-at-work.md; measures nothing

Generation: the shape of GPT-2 (124 million parameters), random weights, float32, greedy. Both sides have the same
weights and must write the same tokens before anything is timed; they take turns. A third takes turns with them that
adds up all weights once for each step, and does nothing else: about what reading them costs.

Training: 6 layers of 384 features in 6 heads, 256 tokens of context, 16 rows, float32, no dropout. The peer is the loop
that nanoGPT's description gives, written anew: rows cut from one long array at random places, one fused projection for
query, key and value, `scaled_dot_product_attention`, AdamW with weight decay for matrices, gradients clipped at 1. Its
steps are taken between the steps of regard's own loop, which has Muon for the matrices, keeps documents apart, checks
every loss and writes its metrics.

What is told is tokens per second, the median of the repeats, and the median of regard's over the other's of one repeat:
above 1, regard is faster.
"""

import argparse
import fnmatch
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import regard
from regard.bench import machine
from regard.layouts import from_transformers
from regard.training.data import Packed
from regard.training.loop import train
from regard.training.settings import Settings

RESULTS = Path(__file__).parent / "results" / "decoder.json"
PAGE = Path(__file__).parent.parent / "docs" / "models-at-work.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
READING = "adding up the weights"
Seconds = dict[str, list[float]]


def generation(prompts: list[list[int]], new: int, repeats: int, quick: bool) -> tuple[int, Seconds]:
    """Tokens that are written, and seconds of each repeat."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500} if quick else {}
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, **sizes)
    theirs: Any = transformers.GPT2LMHeadModel(config).eval()
    ours = from_transformers(theirs).eval()
    prompts = [[token % config.vocab_size for token in prompt] for prompt in prompts]
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def transformers_way() -> list[list[int]]:
        out = theirs.generate(padded, attention_mask=real, max_new_tokens=new, do_sample=False, pad_token_id=0)
        written: list[list[int]] = out[:, longest:].tolist()
        return written

    def regards_way() -> list[list[int]]:
        steps = list(regard.generate_batch(ours, prompts, new, temperature=0))
        return [[step[row] or 0 for step in steps] for row in range(len(prompts))]

    if transformers_way() != regards_way():
        raise RuntimeError("they write different texts")

    @torch.inference_mode()
    def reading() -> None:
        for _ in range(new):
            for parameter in ours.parameters():
                parameter.sum()

    ways = {"regard": regards_way, "transformers": transformers_way, READING: reading}
    return new * len(prompts), in_turn(ways, repeats)


def in_turn(ways: dict[str, Callable[[], object]], repeats: int) -> Seconds:
    seconds: Seconds = {name: [] for name in ways}
    for number in range(repeats):
        for name in list(ways) if number % 2 else reversed(ways):
            began = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


class Block(nn.Module):
    """One layer as nanoGPT has it: projections fused, norm first, GELU."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.joint, self.output = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm_after, self.wide, self.narrow = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.joint(self.norm(x)).split(dim, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.narrow(F.gelu(self.wide(self.norm_after(x))))


class Peer(nn.Module):
    """A GPT as nanoGPT has it: learned positions, output layer tied to the embedding."""

    def __init__(self, vocab_size: int, context: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def training(repeats: int, quick: bool) -> tuple[int, Seconds]:
    """Tokens of a step, and seconds of each step."""
    vocab_size, context, rows = (300, 32, 2) if quick else (4096, 256, 16)
    dim, layers, heads = (32, 2, 2) if quick else (384, 6, 6)
    array = torch.randint(1, vocab_size, (100 * context * rows,))
    peer = Peer(vocab_size, context, dim, layers, heads)
    matrices = [p for p in peer.parameters() if p.dim() == 2]
    rest = [p for p in peer.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    seconds: Seconds = {"regard": [], "nanoGPT's loop": []}

    def peer_step() -> float:
        starts = torch.randint(len(array) - context, (rows,))
        tokens = torch.stack([array[start : start + context] for start in starts])
        targets = torch.stack([array[start + 1 : start + 1 + context] for start in starts])
        loss = peer(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    config = regard.ModelConfig.preset(
        "gpt2", vocab_size=vocab_size, context_length=context, dim=dim, layers=layers, heads=heads, activation="gelu",
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = regard.Decoder(config)
    if sum(p.numel() for p in model.parameters()) != sum(p.numel() for p in peer.parameters()):
        raise RuntimeError("they are not of one size")
    data = Packed([array.tolist()], context_length=context, vocab_size=vocab_size)
    settings = Settings(steps=repeats + 1, batch_size=rows, precision="no", save_every=None, save_minutes=None)

    def between(report: Any) -> None:
        began = time.perf_counter()
        if not math.isfinite(peer_step()):
            raise RuntimeError("the peer's loss is no number")
        took = time.perf_counter() - began
        if report.step > 1:  # the first warms up
            seconds["nanoGPT's loop"].append(took)
            seconds["regard"].append(rows * context / report.tokens_per_second)

    with tempfile.TemporaryDirectory() as folder:
        train(model, data, settings, Path(folder), report=between)
    return rows * context, seconds


def report(data: dict[str, Any]) -> str:
    """The table of the page."""
    about = data["machine"]
    lines = [
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, "
        f"transformers {about['transformers']}; tokens per second:",
        "",
        f"| | regard | beside | times as fast | {READING} |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in data["rows"].items():
        speed, other = row["tokens per second"], row["beside"]
        read = f"{speed[READING]:,.0f}" if READING in speed else ""
        faster = f"{row['times as fast']:.2f}"
        lines.append(f"| {name} | {speed['regard']:,.0f} | {other}: {speed[other]:,.0f} | {faster} | {read} |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """The page with this table in the place of the one that it has."""
    before, rest = page.split(f"{BEGIN}\n", 1)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END, 1)[1]}"


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    new = 4 if arguments.quick else arguments.new
    lengths = [16, 4, 10, 6, 14, 8, 12, 2]

    def texts(lengths: list[int]) -> list[list[int]]:
        return [torch.randint(50257, (length,)).tolist() for length in lengths]

    tasks: dict[str, Callable[[], tuple[int, Seconds]]] = {
        "generate, 1 row": lambda: generation(texts([16]), new, arguments.repeats, arguments.quick),
        "generate, 8 rows": lambda: generation(texts([16] * 8), new, arguments.repeats, arguments.quick),
        "generate, 8 rows of unequal lengths": lambda: generation(
            texts(lengths), new, arguments.repeats, arguments.quick
        ),
        "train": lambda: training(arguments.repeats, arguments.quick),
    }
    told: dict[str, Any] = {"machine": {**machine(), "transformers": transformers.__version__}, "rows": {}}
    for name, task in tasks.items():
        if not fnmatch.fnmatch(name, arguments.rows):
            continue
        tokens, seconds = task()
        ours, other = seconds["regard"], next(name for name in seconds if name != "regard")
        row = {
            "tokens per second": {who: round(tokens / statistics.median(times), 1) for who, times in seconds.items()},
            "beside": other,
            "repeats": len(ours),
            "times as fast": round(statistics.median(b / a for a, b in zip(ours, seconds[other], strict=True)), 3),
        }
        told["rows"][name] = row
        print(f"{name:<36} {row['tokens per second']}  {row['times as fast']:.2f} times as fast as {other}", flush=True)
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=48, help="tokens that each text is continued by")
    parser.add_argument("--rows", default="*", help="which rows, such as 'train' or 'generate*'")
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--report", action="store_true", help="write the table from the results, and measure nothing")
    given = parser.parse_args()
    if given.report:
        table = report(json.loads(RESULTS.read_text(encoding="utf-8")))
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
        raise SystemExit
    found = main(given)
    if given.output is not None:
        if given.output.is_file():  # rows that were not measured now stay
            found["rows"] = {**json.loads(given.output.read_text(encoding="utf-8"))["rows"], **found["rows"]}
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

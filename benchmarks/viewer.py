"""What the page's numbers take without a browser: tiles, the pyramid of a head, a first view's answers, files.

    python benchmarks/viewer.py [--tokens 16384 131072] [--output benchmarks/results/viewer.json]
    python benchmarks/page.py --report       writes the tables of docs/page.md

Every time is told twice: on the clock, and the processor's over all threads, which other work on the machine disturbs
less; the least of some repeats. Tiles are the slowest of their level: on the diagonal of a causal head of 64 features
in float32, the lse known as recordings know it.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import regard
from regard import Causal
from regard.bench import machine
from regard.viewer.export import export
from regard.viewer.head import PYRAMID_STEP, SIDE, Head
from regard.viewer.readers import DecoderReader
from regard.viewer.reading import read
from regard.viewer.run import Run, of_observation
from regard.viewer.session import Session

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "viewer.json"
EXAMPLE = ROOT / "examples" / "library_desk.py"
HEAD_DIM = 64

Times = dict[str, dict[str, float]]


def timed(times: Times, name: str, work: Callable[[], object], repeats: int = 5) -> None:
    """Takes the least of some repeats, and prints it."""
    clock, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        work()
        clock.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    times[name] = {"clock_ms": round(min(clock) * 1e3, 2), "processor_ms": round(min(processor) * 1e3, 2)}
    print(f"{name:<56} {min(clock) * 1e3:>10.1f} ms {min(processor) * 1e3:>10.1f} ms of the processor", flush=True)


def one_head(times: Times, length: int) -> None:
    """Tiles and the pyramid of one causal head."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, length, HEAD_DIM)
    lse = regard.attention_with_lse(query, key, key, mask=Causal()).lse
    head = Head(regard.observe(query, key, mask=Causal(), lse=lse))
    told = f"{length:,} tokens: "

    def tile(level: int) -> None:
        last = (length - 1) // (SIDE << level)
        head.tile(level, last, max(0, last - 1), "max")

    direct = [level for level in range(head.levels) if head.is_direct(level)]
    for level in direct:
        timed(times, f"{told}a tile of {1 << level} x {1 << level} weights a cell", lambda level=level: tile(level))
    if len(direct) < head.levels:
        timed(times, f"{told}a preview of the whole head", lambda: head.tile(head.levels - 1, 0, 0, "max"))
        timed(times, f"{told}the exact map, entropy, received", head.make_pyramid, 3 if length <= 1 << 15 else 1)
        timed(times, f"{told}a tile of {PYRAMID_STEP} x {PYRAMID_STEP} and coarser", lambda: tile(len(direct)))
    timed(times, f"{told}one weight in float64", lambda: head.cell(length - 5, min(7, length - 1)))


def example(times: Times, megabytes: dict[str, float], copies: int = 3, length: int = 2048) -> None:
    """What the page asks first, on the bundled model and a file of the examples; and what files of it take."""
    reader = DecoderReader(regard.load("stdlib"))
    text = EXAMPLE.read_text(encoding="utf-8")
    session = Session([read(reader, text, EXAMPLE.name)], [reader])
    run = session.runs[0]

    def first() -> None:
        run.summary = None
        session.handle("info", {})
        session.handle("tokens", {})
        run.summarise()
        for layer in range(len(run.layers)):
            session.handle("thumbs", {"layer": layer})
        session.handle("tile", {"layer": 5, "head": 3, "level": 1, "row": 0, "column": 0})
        session.handle("row", {"query": run.length - 1})

    told = f"the example of {run.length} tokens: "
    timed(times, f"{told}read by the model", lambda: read(reader, text, EXAMPLE.name), 3)
    timed(times, f"{told}all that a first view asks for", first, 3)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, length, HEAD_DIM)
    layers = of_observation(regard.observe(query, key, mask=Causal()))
    layers["attention"].value = value
    whole = read(reader, copies * text, "copies")
    files = {
        f"one head of {length:,} tokens, with its values": Run("random", "numbers", layers),
        f"all {sum(len(seen.heads) for seen in whole.layers.values())} heads of {whole.length:,} tokens": whole,
    }
    for name, of in files.items():
        pages: list[str] = []
        timed(times, f"{name}: written as a file", lambda of=of, pages=pages: pages.append(export(of)), 1)
        megabytes[name] = round(len(pages[0].encode()) / 1e6, 2)
        print(f"{name:<56} {megabytes[name]:>10.2f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 131072])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, help="of torch; default: as many as it takes")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    times: Times = {}
    megabytes: dict[str, float] = {}
    data: dict[str, Any] = {"machine": machine(), "times": times, "megabytes": megabytes}
    example(times, megabytes)
    for tokens in given.tokens:
        one_head(times, tokens)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

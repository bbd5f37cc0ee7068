"""What the page takes: tiles, the pyramid of a head, the first answers on the bundled example, and a file's size.

    python benchmarks/viewer.py                   16,384 tokens
    python benchmarks/viewer.py --tokens 131072   and longer

Every figure is printed twice: on the clock, and the processor's time over all threads, which other work on the machine
disturbs less. Tiles are the slowest of their level: on the diagonal of a causal head of 64 features, the lse known as
recordings know it.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

import regard
from regard import Causal
from regard.viewer.export import export
from regard.viewer.head import PYRAMID_STEP, SIDE, Head
from regard.viewer.readers import DecoderReader
from regard.viewer.reading import read
from regard.viewer.session import Session

EXAMPLE = Path(__file__).parent.parent / "examples" / "library_desk.py"


def timed(name: str, work: Callable[[], object], repeats: int = 5) -> None:
    """Prints the least of some repeats."""
    clock, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        work()
        clock.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    print(f"{name:<48} {min(clock) * 1e3:>10.1f} ms {min(processor) * 1e3:>10.1f} ms of the processor", flush=True)


def one_head(length: int) -> None:
    """Tiles and the pyramid of one causal head."""
    query, key = torch.randn(2, 1, 1, length, 64)
    lse = regard.attention_with_lse(query, key, key, mask=Causal()).lse
    head = Head(regard.observe(query, key, mask=Causal(), lse=lse))

    def tile(level: int) -> None:
        last = (length - 1) // (SIDE << level)
        head.tile(level, last, max(0, last - 1), "max")

    print(f"{length:,} tokens, {torch.get_num_threads()} threads")
    direct = [level for level in range(head.levels) if head.is_direct(level)]
    for level in direct:
        timed(f"tile of {1 << level} x {1 << level} weights a cell", lambda level=level: tile(level))
    if len(direct) < head.levels:
        timed("preview of the whole head", lambda: head.tile(head.levels - 1, 0, 0, "max"))
        timed("pyramid, entropy and received", head.make_pyramid, repeats=3 if length <= 1 << 15 else 1)
        timed(f"tile of {PYRAMID_STEP} x {PYRAMID_STEP} and coarser", lambda: tile(len(direct)))
    timed("one weight in float64", lambda: head.cell(length - 5, 7))


def example() -> None:
    """What the page asks first, on the bundled model and a file of the examples."""
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

    print(f"the bundled model on {EXAMPLE.name}: {run.length} tokens, {len(run.layers)} layers")
    timed("reading it", lambda: read(reader, text, EXAMPLE.name), repeats=3)
    timed("all that a first view asks for", first, repeats=3)
    whole = read(reader, 3 * text, "three times")
    timed(f"a file of all heads, {whole.length} tokens", lambda: export(whole), repeats=1)
    print(f"{'its size':<48} {len(export(whole).encode()) / 1e6:>10.2f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--threads", type=int, help="of torch; default: as many as it takes")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    example()
    for tokens in given.tokens:
        one_head(tokens)

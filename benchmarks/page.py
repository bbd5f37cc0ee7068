"""How fast the page is, in a real Chromium: the first view, single tiles, and a flight over a map.

    python benchmarks/page.py [--long 131072] [--output benchmarks/results/page.json]
    python benchmarks/page.py --report       writes the tables of docs/page.md, from these results and from those of
                                             benchmarks/viewer.py; measures nothing

    first view    from opening the address to the map, the heads, the text and the steps of the bundled example
    tile          from asking to pixels: computed, sent, read and coloured; one head of 64 numbers, causal, float32
    pyramid       until the exact map of a head is there; and tiles of three levels while it is being worked out
    flight        from the whole map to single weights in 120 frames, along the diagonal; the time from frame to frame

Needs playwright and a Chromium (REGARD_CHROMIUM, or `chromium` on the path); it draws without a GPU. Times are those of
the clock: run it where nothing else runs. It takes some minutes.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import regard
from regard import Causal
from regard.bench import machine
from regard.viewer.readers import DecoderReader
from regard.viewer.reading import read
from regard.viewer.run import Run, of_observation
from regard.viewer.server import Server
from regard.viewer.session import Session

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "page.json"
ALONE = RESULTS.with_name("viewer.json")
DOCS = ROOT / "docs" / "page.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
EXAMPLE = ROOT / "examples" / "library_desk.py"
HEAD_DIM = 64
LENGTHS = 16384, 131072
VIEWS = 5
TILES = 24
FRAMES = 120

AT_REST = """async () => {
    const root = document.getElementById('regard');
    for (let quiet = 0; quiet < 3;) {
        await new Promise((done) => requestAnimationFrame(done));
        quiet = root.dataset.idle === 'true' && root.page ? quiet + 1 : 0;
    }
    return performance.now();
}"""

TILE = """async ({ level, pool, count }) => {
    const { app } = document.getElementById('regard').page;
    const { Look } = await import('./static/look.js');
    const look = new Look();
    const times = [];
    const cells = 256 * 2 ** level;
    const rows = Math.max(1, Math.floor(app.layer.query_len / cells));
    for (let n = 0; n < count; n++) {
        const row = Math.floor(((n + 0.5) / count) * rows);
        const column = Math.floor(row * ((n * 0.618) % 1));
        const start = performance.now();
        const { data } = await app.call('tile', { ...app.head, level, row, column, pool });
        look.paint({ codes: new Uint16Array(data), level, row, column, pool });
        times.push(performance.now() - start);
    }
    return times;
}"""

# the pass over the head once more, and tiles of some levels while it goes on: [seconds, {level: [milliseconds]}]
PYRAMID = """async (levels) => {
    const { app } = document.getElementById('regard').page;
    const { Look } = await import('./static/look.js');
    const look = new Look();
    const times = Object.fromEntries(levels.map((level) => [level, []]));
    const start = performance.now();
    const { meta } = await app.call('start', { what: 'pyramid', ...app.head });
    let ended = null;
    const end = app.follow(meta.job).then(() => (ended = performance.now()));
    for (let n = 0; levels.length && ended === null; n++) {
        const level = levels[n % levels.length];
        const row = Math.floor((n * 0.618 % 1) * app.layer.query_len / (256 * 2 ** level));
        const asked = performance.now();
        const { data } = await app.call('tile', { ...app.head, level, row, column: 0, pool: 'max' });
        look.paint({ codes: new Uint16Array(data), level, row, column: 0, pool: 'max' });
        times[level].push(performance.now() - asked);
    }
    await end;
    return [(ended - start) / 1000, times];
}"""

FLIGHT = """async (frames) => {
    const { app } = document.getElementById('regard').page;
    const { query_len: n } = app.layer;
    const room = document.querySelector('.map').getBoundingClientRect().width - 140;
    const [whole, near] = [room / n, 24];
    const times = [];
    let last = null;
    for (let frame = 0; frame < frames; frame++) {
        const part = frame / (frames - 1);
        const cell = whole * (near / whole) ** part;
        const at = (0.3 + 0.4 * part) * n;
        app.store.set({ at: [Math.max(0, at * 0.8 - room / cell / 2), Math.max(0, at - room / cell / 2), cell] });
        await new Promise((done) => requestAnimationFrame(done));
        const now = performance.now();
        if (last !== null) times.push(now - last);
        last = now;
    }
    return times;
}"""


def spread(times: list[float]) -> dict[str, float]:
    """Median and the slow end, in milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "largest_ms": round(ordered[-1], 2),
    }


def long_session(length: int) -> Session:
    """One random head of this length, as a session."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, length, HEAD_DIM)
    seen = regard.observe(query, key, mask=Causal())
    assert seen.lse is not None
    return Session([Run("random", f"{length:,} tokens", of_observation(seen))])


def first_views(page: "Page", address: str) -> list[float]:
    """Milliseconds until everything of the bundled example is there; each time as if for the first time."""
    times = []
    for _ in range(VIEWS):
        page.goto("about:blank")
        page.goto(address)
        times.append(page.evaluate(AT_REST))
    return times


def measure_long(page: "Page", length: int, tiles: int = TILES, frames: int = FRAMES) -> dict[str, Any]:
    """Tiles, pyramid and flight of one length; of the finest tiles, twice as many."""
    server = Server(long_session(length))
    server.start()
    try:
        page.goto(server.address)
        page.evaluate(AT_REST)
        page.evaluate(PYRAMID, [])  # the page has begun with it: what is told is a whole pass
        row: dict[str, Any] = {"pyramid_s": round(page.evaluate(PYRAMID, [])[0], 3)}
        levels = page.evaluate("document.getElementById('regard').page.app.layer.levels")
        meanwhile = page.evaluate(PYRAMID, [0, min(4, levels - 1), levels - 1])[1]
        row["meanwhile"] = {level: spread(times) for level, times in meanwhile.items() if times}
        page.wait_for_timeout(500)
        page.evaluate(AT_REST)
        page.evaluate(TILE, {"level": 0, "pool": "max", "count": 4})  # warm
        row["tiles"] = {
            str(level): spread(
                page.evaluate(TILE, {"level": level, "pool": "max", "count": tiles if level else 2 * tiles})
            )
            for level in range(levels)
        }
        row["flight"] = spread(page.evaluate(FLIGHT, frames))
        row["flight"]["frames_per_s"] = round(1000 / row["flight"]["median_ms"], 1)
        started = time.perf_counter()
        page.evaluate(AT_REST)
        row["flight"]["settled_after_s"] = round(time.perf_counter() - started, 2)
        page.goto("about:blank")  # a page whose server has ended goes on asking it
        return row
    finally:
        server.close()


def report(data: dict[str, Any], alone: dict[str, Any]) -> str:
    """The tables of the page, from the results in a browser and from those without one."""
    about, first = data["machine"], data["first_view"]
    lines = [
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}; Chromium {data['chromium']},",
        "without a GPU. One causal head of 64 numbers in float32. In the page, from asking to pixels: the median, and",
        "in brackets what one in twenty takes at least.",
        "",
        f"The first view of the bundled example stands after {told(first, 1000)} s.",
        "",
        "| in the page | " + " | ".join(f"{int(length):,} tokens" for length in data["lengths"]) + " |",
        "| --- |" + " ---: |" * len(data["lengths"]),
    ]
    found = list(data["lengths"].values())

    def line(name: str, *cells: str) -> None:
        lines.append(f"| {name} | {' | '.join(cells)} |")

    line("tile of single weights, ms", *(told(row["tiles"]["0"]) for row in found))
    line("slowest kind of tile, ms", *(told(slowest(row["tiles"])) for row in found))
    line("exact map of a head, s", *(f"{row['pyramid_s']:.2f}" for row in found))
    line("slowest kind of tile meanwhile, ms", *(told(slowest(row["meanwhile"])) for row in found))
    line("frames per second in a flight to single weights", *(f"{row['flight']['frames_per_s']:.0f}" for row in found))
    lines += ["", "| without a browser | on the clock, ms | of the processor, ms |", "| --- | ---: | ---: |"]
    for name, times in alone["times"].items():
        line(name, f"{times['clock_ms']:,.1f}", f"{times['processor_ms']:,.1f}")
    lines += ["", "| file | MB |", "| --- | ---: |"]
    for name, size in alone["megabytes"].items():
        line(name, f"{size:.2f}")
    return "\n".join(lines)


def told(times: dict[str, float], unit: float = 1.0) -> str:
    """Median and slow end in one cell."""
    digits = 0 if unit == 1.0 else 2
    return f"{times['median_ms'] / unit:.{digits}f} ({times['p95_ms'] / unit:.{digits}f})"


def slowest(levels: dict[str, dict[str, float]]) -> dict[str, float]:
    """The times of the level with the largest median."""
    return max(levels.values(), key=lambda times: times["median_ms"])


def with_tables(page: str, tables: str) -> str:
    """The page with these tables in the place of those that it has."""
    before, rest = page.split(f"{BEGIN}\n", 1)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=max(LENGTHS), help="tokens of the longer head")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="write the tables from the results, and measure nothing")
    options = parser.parse_args(arguments)
    if options.report:
        data, alone = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, ALONE))
        DOCS.write_text(with_tables(DOCS.read_text(encoding="utf-8"), report(data, alone)), encoding="utf-8")
        return
    from playwright.sync_api import sync_playwright  # the tables need no browser

    chromium = os.environ.get("REGARD_CHROMIUM") or shutil.which("chromium")
    results: dict[str, Any] = {"machine": machine(), "lengths": {}}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        results["chromium"] = browser.version
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        reader = DecoderReader(regard.load())
        server = Server(Session([read(reader, EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name)], [reader]))
        server.start()
        results["first_view"] = spread(first_views(page, server.address))
        server.close()
        print("first view", results["first_view"], flush=True)
        for length in dict.fromkeys((min(LENGTHS), options.long)):
            results["lengths"][length] = measure_long(page, length)
            print(length, json.dumps(results["lengths"][length]), flush=True)
        browser.close()
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

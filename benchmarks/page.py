"""How fast the page is, in a real Chromium: the first view, single tiles, and a flight over a map.

    python benchmarks/page.py [--long 131072] [--output benchmarks/results/page.json]

    first view    from opening the address to the map, the heads, the text and the steps of the bundled example
    tile          from asking to pixels: computed, sent, read and coloured; one head of 64 numbers, causal, float32
    pyramid       until the exact map of a head is there (its finest and coarsest tiles can be had at once)
    flight        from the whole map to single weights in 120 frames, along the diagonal; the time from frame to frame

Needs playwright and a Chromium (REGARD_CHROMIUM, or `chromium` on the path); it draws without a GPU.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Page, sync_playwright

import regard
from regard import Causal
from regard.bench import machine
from regard.viewer.readers import DecoderReader
from regard.viewer.reading import read
from regard.viewer.run import Run, of_observation
from regard.viewer.server import Server
from regard.viewer.session import Session

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "page.json"
EXAMPLE = ROOT / "examples" / "library_desk.py"
HEAD_DIM = 64
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


def first_views(page: Page, address: str) -> list[float]:
    """Milliseconds until everything of the bundled example is there; each time as if for the first time."""
    times = []
    for _ in range(VIEWS):
        page.goto("about:blank")
        page.goto(address)
        times.append(page.evaluate(AT_REST))
    return times


def measure_long(page: Page, length: int) -> dict[str, Any]:
    """Tiles, pyramid and flight of one length."""
    server = Server(long_session(length))
    server.start()
    try:
        page.goto(server.address)
        page.evaluate(AT_REST)
        started = time.perf_counter()
        job = {"what": "pyramid", "layer": 0, "head": 0}
        page.evaluate(
            """async (asked) => {
                const { app } = document.getElementById('regard').page;
                const { follow } = await import('./static/transport.js');
                const { meta } = await app.call('start', asked);
                await follow(app.transport, meta.job);
            }""",
            job,
        )
        row: dict[str, Any] = {"pyramid_wait_s": round(time.perf_counter() - started, 2)}
        page.wait_for_timeout(500)
        page.evaluate(AT_REST)
        levels = page.evaluate("document.getElementById('regard').page.app.layer.levels")
        page.evaluate(TILE, {"level": 0, "pool": "max", "count": 4})  # warm
        row["tiles"] = {
            level: spread(page.evaluate(TILE, {"level": level, "pool": "max", "count": TILES if level else 2 * TILES}))
            for level in range(levels)
        }
        row["flight"] = spread(page.evaluate(FLIGHT, FRAMES))
        row["flight"]["frames_per_s"] = round(1000 / row["flight"]["median_ms"], 1)
        started = time.perf_counter()
        page.evaluate(AT_REST)
        row["flight"]["settled_after_s"] = round(time.perf_counter() - started, 2)
        return row
    finally:
        server.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--long", type=int, default=131072)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
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
        for length in dict.fromkeys((16384, options.long)):
            results["lengths"][length] = measure_long(page, length)
            print(length, json.dumps(results["lengths"][length]), flush=True)
        browser.close()
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

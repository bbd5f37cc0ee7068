"""How fast the page is, as its benchmarks tell it: they run, and the tables say what they found and nothing else."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the page needs the extra regard[view]")

from browsing import browsing, opened
from viewing import observed_session, served

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import page as in_browser
import viewer as alone


def spread(median):
    return {"median_ms": median, "p95_ms": 2 * median, "largest_ms": 3 * median}


def test_tables_say_what_was_measured():
    times = {}
    alone.one_head(times, 4200)
    assert all(found["clock_ms"] > 0 for found in times.values())
    assert {"4,200 tokens: the exact map, entropy, received", "4,200 tokens: one weight in float64"} <= {*times}
    row = {
        "pyramid_s": 0.456,
        "tiles": {"0": spread(4.0), "4": spread(70.0), "5": spread(6.0)},
        "meanwhile": {"0": spread(9.0), "5": spread(11.0)},
        "flight": {"frames_per_s": 59.9},
    }
    machine = {"processor": "Abacus 7", "threads": 3, "torch": "9.9"}
    data = {"machine": machine, "chromium": "156", "first_view": spread(1500.0), "lengths": {"4200": row}}
    tables = in_browser.report(data, {"times": times, "megabytes": {"one head": 1.234}})
    for line in (
        "Abacus 7, 3 threads, torch 9.9; Chromium 156,",
        "after 1.50 (3.00) s",
        "| in the page | 4,200 tokens |",
        "| tile of single weights, ms | 4 (8) |",
        "| slowest kind of tile, ms | 70 (140) |",
        "| slowest kind of tile meanwhile, ms | 11 (22) |",
        "| exact map of a head, s | 0.46 |",
        "| frames per second in a flight to single weights | 60 |",
        "| one head | 1.23 |",
    ):
        assert line in tables
    assert all(f"| {name} | {found['clock_ms']:,.1f} |" in tables for name, found in times.items())
    old = in_browser.with_tables(f"a\n{in_browser.BEGIN}\nold\n{in_browser.END}\nb\n", tables)
    assert old == f"a\n{in_browser.BEGIN}\n{tables}\n{in_browser.END}\nb\n"


def test_the_tables_are_those_of_the_committed_results():
    kept = in_browser.DOCS.read_text(encoding="utf-8")
    results = [path for path in (in_browser.RESULTS, in_browser.ALONE) if path.exists()]
    if len(results) < 2:  # nothing was measured, so nothing is told
        assert f"{in_browser.BEGIN}\n{in_browser.END}" in kept
        return
    data = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    assert in_browser.with_tables(kept, in_browser.report(*data)) == kept, "run: python benchmarks/page.py --report"


def test_the_page_is_measured_in_a_browser():
    with browsing() as browser, served(observed_session(20)[0]) as address, opened(browser, address) as page:
        found = in_browser.measure_long(page, 4200, tiles=1, frames=4)
        page.goto(address)
        assert page.evaluate(in_browser.AT_REST) > 0
    assert [*found["tiles"]] == ["0", "1", "2", "3", "4", "5"]
    assert found["pyramid_s"] > 0
    assert found["flight"]["frames_per_s"] > 0
    told = json.loads(json.dumps(found))
    row = {"machine": {"processor": "", "threads": 1, "torch": ""}, "chromium": "", "first_view": spread(1.0)}
    assert in_browser.report(row | {"lengths": {"4200": told}}, {"times": {}, "megabytes": {}})

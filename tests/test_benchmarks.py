"""The benchmarks at tiny sizes: every row runs, all who appear in it do the same work, and the page tells what was
measured and nothing else."""

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, Chunk, Prefix, Strided, Window, bench
from regard.shapes import Grid

ROOT = Path(__file__).parent.parent
SHRINK = 64
TINY = bench.tasks(SHRINK)
PAIRS = [(task, peer) for task in TINY for peer in bench.peers(task) if not task.sweep and peer.name != "regard"]


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


masks = script("masks")


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention and small calls as they are: the same results, without the seconds of compiling."""
    monkeypatch.setattr("regard.bench.peer.compiled", lambda function: function)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def results(task: bench.Task, name: str, dtype: torch.dtype = torch.float32) -> bench.Results:
    """Output and gradients of one peer."""
    peer = next(peer for peer in bench.peers(task) if peer.name == name)
    return bench.work(task, peer, task.inputs(dtype))[0]()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("task", "peer"), PAIRS, ids=lambda part: getattr(part, "label", None) or part.name)
def test_who_appears_in_a_row_gives_what_regard_gives(task: bench.Task, peer: bench.Peer) -> None:
    why = peer.cannot(task)
    if why is not None:
        pytest.skip(why)
    undropped = replace(task, dropout=0.0)
    ours, theirs = results(undropped, "regard"), results(undropped, peer.name)
    assert len(ours) == (1 if not task.backward else 2 if task.layer else 4)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("task", [task for task in TINY if not task.sweep], ids=lambda task: task.label)
def test_regard_does_in_a_row_what_the_explicit_formula_does(task: bench.Task) -> None:
    if task.layer:
        return  # held to nn.MultiheadAttention above
    inputs = task.inputs(torch.float32)
    one = [tensor.detach().double() for tensor in inputs]
    keys, values = (t.repeat_interleave(task.heads // task.kv_heads, dim=1) for t in one[1:])
    rows = slice(None) if task.num_scores < 1 << 20 else slice(-64, None)  # the longest: its last queries
    scores = one[0][:, :, rows] @ keys.mT / math.sqrt(task.head_dim)
    if task.mask is not None:
        bound = task.mask.bind(Grid(task.batch, task.heads, task.queries, task.length))
        allowed = bound.allowed(range(task.queries)[rows], range(task.length))
        scores = scores.masked_fill(~allowed, -math.inf)
    ours = results(replace(task, dropout=0.0), "regard")[0][:, :, rows]
    torch.testing.assert_close(ours.double(), scores.softmax(-1) @ values, atol=1e-5, rtol=1e-4)


def test_the_rows_that_were_asked_for_are_there_in_both_precisions_at_their_sizes() -> None:
    rows = {(task.label, dtype) for task, dtype in bench.chosen(None) if not task.sweep}
    wanted = (
        "full, N=1024", "causal, N=512", "causal, N=1024", "window 256, N=8192", "window 256, N=131072",
        "window 256, forward and backward, N=4096", "documents of 512, N=4096", "ragged documents, N=8192",
        "right padding, 8 rows, N=1024", "prefix 1024 | causal, N=8192", "streaming, window 256 | prefix 4, N=8192",
        "chunks of 512, causal, N=8192", "strided 8, causal, N=8192", "decode, 32 heads on 8 of 128, N=32768",
        "dropout 0.1, causal, forward and backward, N=4096",
    )  # fmt: skip
    for label in wanted:
        assert {(label, torch.float32), (label, torch.bfloat16)} <= rows, label
    by_label = {task.label: task for task in bench.tasks()}
    assert len(by_label) == len(bench.tasks()), "two rows of one name"
    masks_of = {label: repr(by_label[label].mask) for label in wanted}
    assert masks_of["window 256, N=8192"] == repr(Causal() & Window(256))
    assert masks_of["prefix 1024 | causal, N=8192"] == repr(Causal() | Prefix(1024))
    assert masks_of["streaming, window 256 | prefix 4, N=8192"] == repr(Causal() & (Window(256) | Prefix(4)))
    assert masks_of["chunks of 512, causal, N=8192"] == repr(Causal() & Chunk(512))
    assert masks_of["strided 8, causal, N=8192"] == repr(Causal() & Strided(8))
    decode = by_label["decode, 32 heads on 8 of 128, N=32768"]
    assert [tuple(t.shape) for t in decode.inputs(torch.bfloat16)] == [(1, 32, 1, 128), *[(1, 8, 32768, 128)] * 2]
    for kind in masks.PLOTTED:
        lengths = [task.length for task in bench.tasks() if task.name == kind]
        assert len(lengths) >= 5, f"{kind}: too few lengths to plot"


def test_lengths_are_those_of_the_task_whatever_they_are_divided_by() -> None:
    for shrink in (1, bench.QUICK_SHRINK, SHRINK):
        assert sum(bench.ragged(8192 // shrink, shrink)) == 8192 // shrink
        assert all(length > 0 for length in bench.ragged(8192 // shrink, shrink))
    assert {task.name for task in bench.tasks()} == {task.name for task in TINY}


def test_what_is_too_large_for_a_peer_is_told_and_not_tried() -> None:
    longest = next(task for task in bench.tasks() if task.length == 131072)
    whys = {peer.name: peer.cannot(longest) for peer in bench.peers(longest)}
    assert whys["regard"] is None
    assert "16 GiB" in str(whys["torch"])
    assert "131,072 x 131,072" in str(whys["FlexAttention"])
    assert "768.0 GiB" in str(whys["formula"])


@pytest.fixture
def tiny() -> bench.Task:
    return next(task for task in TINY if task.label == "window 256, N=128")


def test_a_peer_that_gives_another_result_is_not_timed_and_that_is_told(
    tiny: bench.Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(task: bench.Task, inputs: tuple[Tensor, ...]) -> bench.Prepared:
        return bench.Prepared(lambda: bench.sdpa(*inputs, is_causal=True))  # forgets the window

    def broken(task: bench.Task, inputs: tuple[Tensor, ...]) -> bench.Prepared:
        raise RuntimeError("no compiler\nat all")

    able = bench.FUNCTIONS[0].cannot
    monkeypatch.setattr(
        "regard.bench.peer.FUNCTIONS",
        (*bench.FUNCTIONS[:2], bench.Peer("wrong", able, wrong), bench.Peer("broken", able, broken)),
    )
    row = bench.measure(tiny, torch.float32, repeats=2, memory=False)
    assert set(row["peers"]) == {"regard", "torch"}
    assert "gives another result than regard" in row["not_measured"]["wrong"]
    assert row["not_measured"]["broken"] == "RuntimeError: no compiler"
    assert all(entry["repeats"] == 2 and entry["ms"] > 0 for entry in row["peers"].values())
    text = bench.shown(row)
    assert "no compiler" in text
    assert "gives another result" in text


def test_results_are_apart_by_a_share_of_the_largest_number() -> None:
    ours = torch.tensor([0.0, -10.0])
    assert bench.difference((ours,), (ours.clone(),)) == 0
    assert bench.difference((ours, ours), (ours, torch.tensor([1.0, -10.0]))) == pytest.approx(0.1)
    assert bench.difference((ours,), (torch.tensor([math.nan, -10.0]),)) == math.inf
    assert bench.difference((ours,), (ours[None],)) == math.inf


def test_gradients_are_part_of_the_work_where_they_are_asked_for() -> None:
    task = next(task for task in TINY if task.backward and not task.dropout and not task.layer)
    output, *gradients = results(task, "regard")
    inputs = [tensor.detach().double().requires_grad_() for tensor in task.inputs(torch.float32)]
    whole = bench.sdpa(*inputs, attn_mask=task.allowed())
    whole.sum().backward()
    torch.testing.assert_close(output.double(), whole.detach(), atol=1e-5, rtol=1e-4)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(gradient.double(), tensor.grad, atol=1e-4, rtol=1e-4)


def test_memory_is_what_a_call_takes_and_gives_back_included() -> None:
    """40 MiB that are given back inside the call, and 4 that stay, in a process that held more before."""
    code = """
        import torch
        from regard.bench import most_taken
        before = torch.ones(60 << 20, dtype=torch.uint8); del before
        def run():
            passing = torch.ones(40 << 20, dtype=torch.uint8)
            del passing
            return torch.ones(4 << 20, dtype=torch.uint8)
        print(most_taken(run) / 2**20)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=os.environ | bench.MALLOC_SETTINGS, capture_output=True, check=True)
    assert 39 < float(done.stdout) < 44


def test_the_memory_of_a_row_counts_the_dense_mask_and_is_measured_in_another_process() -> None:
    task = next(task for task in TINY if task.label == "window 256, N=2048")
    ours, theirs = (bench.memory_of(task, torch.float32, name, SHRINK) for name in ("regard", "torch"))
    assert isinstance(ours, int), ours
    assert isinstance(theirs, int), theirs
    output = 12 * 2048 * 64 * 4
    assert output - 2**18 <= ours < 8 * output  # less some pages that the process held before
    mask = 2048 * 2048
    assert theirs > output + 4.9 * mask  # the mask, and torch's copy of it in float32
    assert bench.memory_of(task, torch.float32, "no such peer", SHRINK) == "StopIteration: "  # told, not thrown


def test_rows_are_chosen_by_what_their_names_contain() -> None:
    assert [(t.label, d) for t, d in bench.chosen("decode")] == [
        ("decode, 32 heads on 8 of 128, N=32768", torch.float32),
        ("decode, 32 heads on 8 of 128, N=32768", torch.bfloat16),
    ]
    assert {t.name for t, _ in bench.chosen("LAYER*bfloat16")} == {t.name for t in bench.tasks() if t.layer}
    assert all(dtype == torch.float32 for task, dtype in bench.chosen(None) if task.sweep)
    with pytest.raises(ValueError, match="no row is named like 'sideways'; there are: full; causal"):
        bench.chosen("sideways")


def row(task: str, length: int, **more: Any) -> dict[str, Any]:
    """A row as it is stored."""
    plain = {
        "task": task, "length": length, "query_len": length, "batch": 1, "heads": 12, "kv_heads": 12, "head_dim": 64,
        "dtype": "float32", "layer": False, "sweep": False, "kernel": "strips", "inputs_mib": 6.0, "results_mib": 2.0,
        "peers": {"regard": {"ms": 12.5, "repeats": 5, "memory_mib": 3.5}},
        "not_measured": {}, "memory_not_measured": {},
    }  # fmt: skip
    return plain | more


def stored(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    machine = {"processor": "Abacus 7", "threads": 3, "python": "3.11.7", "torch": "2.13.0", "regard": "0.1.0"}
    return {"machine": machine, "repeats": 5, "shrink": 1, "planned": len(rows), "rows": list(rows)} | more


SMALL = {
    "machine": {"processor": "Abacus 8", "threads": 4},
    "rows": [
        {
            "case": "tiny",
            "shape": [1, 2, 8, 16],
            "dtype": "float32",
            "torch_us": 5,
            "regard_us": 16,
            "extra_us": 11,
            "between_layers": {"torch_us": 21.04, "regard_us": 32, "extra_us": 10.98},
        },
    ],
}

LOOKING = {
    "machine": {"processor": "Abacus 9", "threads": 5},
    "rows": [{"task": "entropy", "heads": 7, "length": 8192, "ms": 650.0, "times_fused": 1.25}],
    "once": [
        {"task": "an image", "heads": 1, "length": 131072, "seconds": 21.5, "peak_mib": 416},
        {"task": "a tile", "heads": 1, "length": 131072, "ms": 0.25, "slowest_ms": 0.5, "peak_mib": 400},
    ],
}
RECORDED = {
    "machine": {"transformers": "5.23.0", "processor": "Abacus 10", "threads": 6}, "layers": 6, "length": 2048,
    "rows": [
        {"task": "sdpa", "ms": 1000.0, "memory_mib": 100.0},
        {"task": "recorded, statistics", "ms": 2000.0, "memory_mib": 150.0},
        {"task": "in float16, statistics", "ms": 2500.0, "memory_mib": 125.0},
        {"task": "gathered", "ms": 1250.0, "memory_mib": 99.0},
        {"task": "eager, statistics", "ms": 5000.0, "memory_mib": 1300.0},
    ],
}  # fmt: skip
REST = SMALL, LOOKING, RECORDED


def test_the_page_says_what_the_results_say() -> None:
    theirs = {
        "torch": {"ms": 250.0, "memory_mib": 70.0, "form": "as a | batch"},
        "FlexAttention": {"ms": 6.25, "compile_s": 4.5},
    }
    ours = {"regard": {"ms": 12.5, "memory_mib": 3.5}}
    layer = row("layer, full", 1024, layer=True, peers=ours | {"x-transformers": {"ms": 25.0}})
    function = row("a | b", 4096, peers=ours | theirs, not_measured={"formula": "too large"})
    page = masks.report(stored(function, layer), *REST, ["p-time.svg"])
    assert (
        "| a &#124; b | 4,096 | float32 | strips | 12.5 | 250 / 20.0 | as a &#124; batch |  | 6.25 / 0.500 |  |" in page
    )
    assert "| a &#124; b | 4,096 | float32 | 6.00 | 2.00 | 3.50 | 70.0 |  |  |  |" in page
    assert "| layer, full | 1,024 | float32 | strips | 12.5 |  | 25.0 / 2.00 |" in page
    assert "- **formula**: too large (a | b at 4,096)" in page
    assert "4.5 to 4.5 seconds" in page
    for number, threads in ((7, 3), (8, 4), (9, 5), (10, 6)):
        assert f"Abacus {number}, {threads} threads" in page
    assert "(p-time.svg)" in page
    assert "| tiny | [1, 2, 8, 16] | float32 | 5.0 | 16.0 | 11.0 | 21.0 | 32.0 | 11.0 |" in page
    assert "Statistics of 7 heads of 64 over 8,192 tokens" in page
    assert "| entropy | 650 | 1.25 |" in page
    assert "| an image | 131,072 | 21.5 s | 416 |" in page
    assert "| a tile | 131,072 | 0.250 ms | 400 |" in page
    assert "| recorded, statistics | 2,000 | 150 |" in page
    assert "which needs 1,200 MiB beyond the plain forward" in page
    assert "statistics, is 2.50 times as fast and needs 50.0 MiB beyond the plain forward pass" in page
    assert "statistics, is 2.00 times as fast and needs 25.0 MiB beyond" in page
    assert "`gather` is 4.00 times as fast and needs 0 MiB beyond" in page
    assert "inputs and output are 8.00 MiB" in page
    assert "regard needs 1.50 MiB more (18.8%)" in page
    assert "interrupted" not in page
    assert "quick" not in page.lower()


def test_the_page_says_that_a_run_was_quick_or_was_interrupted() -> None:
    assert "1/8 of what its name says" in masks.report(stored(row("full", 8), shrink=8), *REST, [])
    assert "An interrupted run: 1 of 40 rows" in masks.report(stored(row("full", 8), planned=40), *REST, [])


def test_the_page_in_the_docs_is_the_one_that_the_committed_results_make() -> None:
    data, *others = (json.loads(path.read_text(encoding="utf-8")) for path in (masks.RESULTS, *masks.OTHERS))
    page = masks.PAGE.read_text(encoding="utf-8")
    plots = [name for name in ("performance-time.svg", "performance-memory.svg") if f"({name})" in page]
    assert masks.report(data, *others, plots) == page, "run: python benchmarks/masks.py --report"
    assert bool(plots) == any(row["sweep"] for row in data["rows"])
    for name in plots:
        assert (masks.PAGE.parent / name).is_file()


def test_the_readme_says_what_was_measured() -> None:
    said = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    said = " ".join(re.search(r"\*\*Measured on CPUs\*\*(.+?)\n\n", said, re.DOTALL)[1].split())
    rows = json.loads(masks.RESULTS.read_text(encoding="utf-8"))["rows"]
    ratios = {
        (row["task"], row["length"], row["dtype"], name): peer["ms"] / row["peers"]["regard"]["ms"]
        for row in rows
        for name, peer in row["peers"].items()
    }
    assert min(ratios.values()) == 1, "In none of these tasks is another faster"
    assert f"1/{ratios['window 256', 8192, 'float32', 'torch']:.0f} of the time" in said
    features = json.loads((masks.RESULTS.parent / "features-mkl.json").read_text(encoding="utf-8"))["rows"]
    against = {
        (row["row"], row["length"], row["dtype"]): [row[way]["against_torch"] for way in ("forward", "backward")]
        for row in features
        if "against_torch" in row["forward"]
    }
    assert all(2 < ratio < 3 for ratio in against["causal", 512, "float32"])
    assert "a causal call of 512 tokens less than half of its time, forward and backward" in said
    dropout = " and ".join(f"1/{ratio:.0f}" for ratio in against["dropout, causal", 2048, "float32"])
    assert f"dropout on 2,048 tokens {dropout}" in said


def test_the_plots_hold_every_peer_of_the_four_tasks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers = {name: {"ms": 2.0, "memory_mib": 0.0} for name in masks.COLOURS}
    rows = [row(task, length, sweep=True, peers=peers) for task in masks.PLOTTED for length in (512, 1024, 2048)]
    for name in masks.draw(stored(*rows), tmp_path):
        drawing = (tmp_path / name).read_text()
        for word in ("torch, best form", "torch, dense mask", "FlexAttention", "formula", "documents of 512", "2k"):
            assert word in drawing, f"{name}: {word}"
        assert all(drawing.lower().count(colour) >= 4 for colour in masks.COLOURS.values())
    assert masks.draw(stored(row("full", 8)), tmp_path) == []
    assert masks.series(rows[::-1], "causal", "ms")["formula"] == [(512, 2.0), (1024, 2.0), (2048, 2.0)]
    assert masks.series([row("causal", 9, dtype="bfloat16")], "causal", "ms") == {}


def test_a_run_keeps_every_row_as_soon_as_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(task: bench.Task, dtype: torch.dtype, **rest: object) -> dict[str, Any]:
        if task.label == "causal, N=8":
            raise KeyboardInterrupt
        return row(task.name, task.length)

    monkeypatch.setattr("regard.bench.report.measure", stopped)
    shown: list[str] = []
    path = tmp_path / "new" / "results.json"
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.chosen(None, SHRINK), shrink=SHRINK, output=path, show=shown.append)
    kept = json.loads(path.read_text())
    assert [r["task"] for r in kept["rows"]] == ["full", "full"]
    assert len(shown) == 2
    assert kept["planned"] == len(bench.chosen(None, SHRINK))
    assert "An interrupted run: 2 of" in masks.report(kept, *REST, [])


def test_a_part_of_the_rows_is_not_kept_in_place_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Path | None] = []
    monkeypatch.setattr(bench, "run", lambda rows, output, **rest: kept.append(output))
    for arguments in ([], ["--rows", "decode"], ["--quick"], ["--rows", "decode", "--output", "some.json"]):
        monkeypatch.setattr(sys, "argv", ["masks.py", *arguments])
        masks.main()
    assert kept == [masks.RESULTS, None, None, Path("some.json")]
    assert capsys.readouterr().out.count("not kept: only a part") == 2


def test_what_others_take_of_the_processors_is_seen() -> None:
    others = bench.Others()
    if others.before is None:
        pytest.skip("this system does not tell")
    spin = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    rival = subprocess.Popen([sys.executable, "-c", spin])
    time.sleep(1.0)
    share = others.share()
    rival.wait()
    assert share is not None
    assert share > 0.5 / (os.cpu_count() or 1)
    note = bench.busy({"load": 0.0, "rows": [{"others": 0.0}, {"others": share}]})
    assert note is None or "others took up to" in note


def test_a_spread_is_of_ratios_in_the_same_repeat(tiny: bench.Task) -> None:
    row = bench.measure(tiny, torch.float32, repeats=5, memory=False, compile=False)
    assert row["not_measured"]["FlexAttention"] == "a quick run compiles nothing"
    low, high = row["peers"]["regard"]["spread"]
    assert low <= 1 <= high
    for entry in row["peers"].values():
        low, high = entry["spread"]
        assert 0 < low <= high


def test_small_calls_compare_the_same_work() -> None:
    small = script("small_calls")
    for name, shape, dtype, theirs, ours in small.cases():
        tensors = [torch.randn(shape, dtype=dtype).requires_grad_("learns" in name) for _ in range(3)]
        small.compare(ours(*tensors), theirs(*tensors))
    figures = small.measure(lambda: torch.ones(3), lambda: torch.ones(3), repeats=3)
    assert set(figures) == {"torch_us", "regard_us", "extra_us"}


def test_small_calls_are_also_timed_after_other_work() -> None:
    small, done = script("small_calls"), []
    work = small.other_work(7)
    assert work().shape == (7, 768)
    small.measure(lambda: done.append("regard"), lambda: done.append("torch"), 3, before=lambda: done.append("work"))
    assert done == ["work", "torch", "work", "regard"] * 53


def test_every_way_to_look_runs_and_is_compared_with_one_forward_pass() -> None:
    rows = script("observation").ratios(heads=2, length=96, repeats=1, only="")
    assert rows[0]["task"] == "fused forward"
    assert rows[0]["times_fused"] == 1.0
    assert len(rows) > 10
    assert all(row["ms"] > 0 for row in rows)


def test_a_constant_of_tiles_is_given_another_value_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    observation = script("observation")
    monkeypatch.setattr(observation.tuning, "MAX_TILE_KEYS", 7)
    assert observation.tune("MAX_TILE_KEYS=64") == "MAX_TILE_KEYS=64"
    assert observation.tuning.MAX_TILE_KEYS == 64
    for wrong in ("MAX_KEYS=64", "__doc__=3"):
        with pytest.raises(argparse.ArgumentTypeError, match="no constant"):
            observation.tune(wrong)


def test_a_recording_is_compared_with_weights_that_give_the_same_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = script("recording")
    model, tokens = recording.bert(1, 48)
    with torch.inference_mode():
        recording.agree(model, tokens)
        for task in recording.TASKS.values():
            task(model, tokens)
        monkeypatch.setattr(recording, "Received", lambda: recording.Entropy())
        with pytest.raises(AssertionError):
            recording.agree(model, tokens)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_everybody_has_a_turn_in_every_repeat_and_follows_each_other_as_often(count: int) -> None:
    names = [*"abcde"][:count]
    repeats = count * (1 + count % 2)
    turns = [bench.in_turn(names, repeat) for repeat in range(repeats)]
    assert all(sorted(turn) == names for turn in turns)
    pairs = [pair for turn in turns for pair in itertools.pairwise(turn)]
    assert all(pairs.count(pair) == repeats // count for pair in itertools.permutations(names, 2))


def test_whole_models_are_timed_only_where_all_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # which holds what scripts have in common
    models = script("models")
    models.regard.huggingface.register()
    rows = {row.name: row for row in models.ROWS}
    padded = rows["GPT-2 generates, 8 rows padded left"]
    some = (
        "Llama generates, static cache",
        "Gemma 2, softcap and windows, reads 2,048",
        "T5 learns, 4 rows of 512 and 128",
    )
    found = [models.measure(row, torch.float32, 1, layers=1, length=9, new=2) for row in (padded, *map(rows.get, some))]
    assert [set(one["ratio"]) for one in found] == [{"sdpa", "eager"}, {"sdpa", "eager"}, {"eager"}, {"sdpa", "eager"}]
    assert all(ms > 0 for one in found for ms in one["ms"].values())
    given = models.batch(padded, 64, 0)["attention_mask"]
    assert given[0].all()
    assert not given[3, :15].any()
    assert given[:, 40:].all()
    told = {"processor": "Abacus 7", "threads": 3, "torch": "9.9", "products": "MKL", "transformers": "5"}
    page = models.report([{"machine": told, "rows": found}])
    assert all(f"| {one['task']} |" in page for one in found)
    monkeypatch.setattr(models, "task", lambda *rest: lambda name, surely=False: torch.tensor(float(name == "regard")))
    with pytest.raises(AssertionError):
        models.measure(padded, torch.float32, repeats=1)

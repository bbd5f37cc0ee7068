"""What runs on a GPU gives what a CPU gives; and how it is measured there, as far as that can be tested without one."""

import importlib.util
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import regard
from cases import FEATURES
from comparing import assert_close
from regard import Causal, Window, bench
from regard.bench import device as devices
from regard.bench.peer import ON_A_GPU
from regard.kernels import KERNELS, KernelError

ROOT = Path(__file__).parent.parent


def script() -> ModuleType:
    """benchmarks/gpu.py as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpu = script()


# --- on a GPU -----------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = FEATURES | {
    "bias": {"mask": Causal(), "bias": torch.randn(1, 4, 150, 170)},
    "T5": {"bias": regard.RelativeBias(torch.randn(32, 4))},
    "two tensors": {"bias": regard.biases.Given(torch.randn(4, 1, 170)) + torch.randn(150, 1)},
}


def moved(case: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda") if hasattr(value, "to") else value for name, value in case.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=bench.name_of)
@pytest.mark.parametrize("kernel", ["auto", *(kernel.name for kernel in KERNELS)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_kernel_gives_on_a_gpu_what_the_reference_gives_on_a_cpu(case, kernel, dtype):
    tensors = [torch.randn(2, n, length, 64).to(dtype) for n, length in ((4, 150), (2, 170), (2, 170))]
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    exact = regard.attention(*leaves, **case, kernel="reference")
    gradients = torch.autograd.grad(exact.sin().sum(), leaves)
    there = [tensor.cuda().requires_grad_() for tensor in tensors]
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for _ in range(2):  # the second call is one like the first
        try:
            output = regard.attention(*there, **moved(case), kernel=kernel)
        except KernelError as error:
            pytest.skip(str(error).splitlines()[0])
        assert_close(output.cpu().double(), exact, tolerance=tolerance)
        for ours, right in zip(torch.autograd.grad(output.sin().sum(), there), gradients, strict=True):
            assert_close(ours.cpu().double(), right, tolerance=4 * tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "value_size"), [(80, 32), (128, 128), (256, 200), (512, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=bench.name_of)
def test_heads_of_all_sizes_with_all_that_learns(size, value_size, dtype):
    shapes = (4, 300, size), (2, 280, size), (2, 280, value_size)
    tensors = [torch.randn(2, *shape).to(dtype) for shape in shapes]
    tensors += [torch.randn(4), torch.randn(1, 4, 300, 280), torch.randn(32, 4)]  # sink, bias, T5's table
    found = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in tensors]
        query, key, value, sink, numbers, table = leaves
        if device == "cpu":
            query, key, value = query.double(), key.double(), value.double()
        output, lse = regard.attention_with_lse(
            query, key, value, mask=Causal() & Window(200), bias=regard.RelativeBias(table) + numbers, softcap=5.0,
            sink=sink, dropout=0.2, generator=torch.Generator().manual_seed(3),
            kernel="reference" if device == "cpu" else "auto",
        )  # fmt: skip
        grads = torch.autograd.grad(output.sin().sum() + lse.cos().sum(), leaves)
        found.append([output, lse, *grads])
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    for right, ours in zip(*found, strict=True):
        assert_close(ours.cpu().double(), right.double(), tolerance=4 * tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["window", "streaming with a sink", "ALiBi", "padding, a row of it empty"])
def test_a_compiled_call_gives_on_a_gpu_what_it_gives_without_a_graph(name):
    case = moved(CASES[name])
    shapes = (4, 150), (2, 170), (2, 170)
    leaves = [torch.randn(2, heads, length, 64, device="cuda").requires_grad_() for heads, length in shapes]
    right = regard.attention(*leaves, **case)
    ours = torch.compile(lambda *three: regard.attention(*three, **case))(*leaves)
    assert_close(ours, right, tolerance=1e-5)
    for one, other in zip(*(torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, right)), strict=True):
        assert_close(one, other, tolerance=1e-5)


@pytest.mark.gpu
def test_statistics_of_a_gpu_are_those_of_a_cpu():
    query, key = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 70, 16)
    here = regard.observe(query, key, mask=Causal())
    there = regard.observe(query.cuda(), key.cuda(), mask=Causal())
    for name in ("entropy", "received", "max_score", "distance"):
        assert_close(getattr(there, name)().cpu(), getattr(here, name)(), tolerance=1e-3)
    assert_close(there.weights().cpu(), here.weights(), tolerance=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "window 256", "right padding, 8 rows", "layer, causal"])
def test_a_row_is_measured_on_a_gpu(name):
    task = next(task for task in bench.tasks(16, torch.device("cuda")) if task.name == name)
    row = bench.measure(task, torch.float32, repeats=2, compile=False)
    assert "torch" in row["peers"] or task.layer
    assert all(entry["ms"] > 0 and entry["memory_mib"] >= 0 for entry in row["peers"].values())


# --- without one --------------------------------------------------------------------------------------------------


def test_where_there_is_no_gpu_one_line_says_so_and_nothing_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main("--folder", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert said.startswith("no CUDA device here (torch 2")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    assert bench.check_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'gpu'"):
        bench.check_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device cuda: torch .* finds no CUDA device here"):
        bench.check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert bench.check_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device cuda:2: there are 2 CUDA devices"):
        bench.check_device("cuda:2")


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that does what it is told after 5 ms; gives what it was told."""
    told: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("record")

        def elapsed_time(self, other):
            return 5.0

    class Device:
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    peaks = iter([100, 700])
    fakes = {
        "Event": Event, "device": Device, "synchronize": lambda device: told.append("wait"),
        "memory_allocated": lambda device: 100, "reset_peak_memory_stats": lambda device: told.append("reset"),
        "max_memory_allocated": lambda device: next(peaks) + 600,
        "get_device_properties": lambda device: types.SimpleNamespace(name="Abacus 9", total_memory=80 << 30),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return told


def test_on_a_gpu_time_is_that_between_two_events_and_nothing_else_is_under_way(pretended):
    assert devices.seconds_of(lambda: pretended.append("call"), torch.device("cuda")) == 5e-3
    assert pretended == ["wait", "record", "call", "record", "wait"]


def test_on_a_gpu_memory_is_what_the_allocator_held_beyond_what_it_held_before(pretended):
    assert devices.peak_on_gpu(lambda: pretended.append("call"), torch.device("cuda")) == 600
    assert pretended == ["wait", "reset", "call", "wait"]


def test_a_gpu_is_written_down_by_name_memory_and_cuda_version(pretended, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    machine = bench.machine(torch.device("cuda"))
    assert (machine["gpu"], machine["gpu_gib"], machine["cuda"]) == ("Abacus 9", 80.0, "12.9")
    assert "gpu" not in bench.machine()


def test_tensors_of_a_row_are_on_its_device():
    meta = torch.device("meta")  # a device that is another than the CPU, and computes nothing
    for task in bench.tasks(64):
        assert task.device == torch.device("cpu")
        there = replace(task, device=meta)
        tensors = list(there.inputs(torch.bfloat16))
        if task.mask is not None:
            tensors.append(there.allowed())
        assert {(tensor.device, tensor.dtype) for tensor in tensors} <= {(meta, torch.bfloat16), (meta, torch.bool)}


def test_flash_attn_takes_part_on_a_gpu_alone_and_does_what_regard_does(monkeypatch):
    def flash_attn_func(query, key, value, dropout_p=0.0, causal=False, window_size=(-1, -1)):
        """What its documentation says: [batch, length, heads, head_dim], causal from the bottom right."""
        mask = Causal() if causal else None
        if window_size != (-1, -1):
            mask = regard.Band(*window_size)
        output = regard.attention(*(t.transpose(1, 2) for t in (query, key, value)), mask=mask, kernel="reference")
        return output.transpose(1, 2)

    (flash,) = ON_A_GPU
    task = next(task for task in bench.tasks(64) if task.name == "causal")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash.cannot(task) == "flash-attn is not installed"
    module = ModuleType("flash_attn")
    module.__spec__ = importlib.util.spec_from_loader("flash_attn", None)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    compared = []
    for task in bench.tasks(64):
        why = flash.cannot(task)
        if why is None and not task.layer and not task.dropout:
            inputs = task.inputs(torch.bfloat16)
            ours, theirs = (bench.work(task, peer, inputs)[0]() for peer in (bench.FUNCTIONS[0], flash))
            assert bench.difference(ours, theirs) < 3e-2, task.label
            compared.append(task.name)
            with pytest.raises(TypeError, match=r"float16 and bfloat16, not torch\.float32"):
                flash.prepare(task, task.inputs(torch.float32))
    assert {"full", "causal", "window 256", "decode, 32 heads on 8 of 128"} <= set(compared)
    assert "prefix 1024 | causal" not in compared
    cuda = bench.Task("causal", 8, Causal(), device=torch.device("cuda"))
    assert [peer.name for peer in bench.peers(cuda)][-1] == "flash-attn"


def test_gpu_tests_are_counted_and_failures_named(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n\n@pytest.mark.gpu\ndef test_two():\n"
        "    assert 1 == 2, 'one is not two'\n\n@pytest.mark.gpu\ndef test_three():\n    pytest.skip('no')\n\n"
        "def test_elsewhere():\n    raise ValueError\n"
    )
    found = gpu.run_tests("-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", str(tmp_path))
    assert found["passed"] == 1
    assert [failed["test"].rpartition("::")[2] for failed in found["failed"]] == ["test_two"]
    assert "one is not two" in found["failed"][0]["why"]
    assert [name.rpartition("::")[2] for name in found["skipped"]] == ["test_three"]


def test_whether_there_is_a_gpu_is_asked_in_one_place():
    alone = [path.name for path in (ROOT / "tests").rglob("*.py") if "skipif(not torch.cuda" in path.read_text("utf-8")]
    assert [name for name in alone if name != Path(__file__).name] == [], "mark them @pytest.mark.gpu"


MACHINE = {
    "processor": "Abacus 7", "threads": 3, "python": "3.11.7", "torch": "2.13.0+cu129", "regard": "0.1.0",
    "gpu": "Abacus 9", "gpu_gib": 80.0, "cuda": "12.9",
}  # fmt: skip


def results() -> tuple[dict[str, Any], dict[str, Any]]:
    row = {
        "task": "a | b", "length": 4096, "query_len": 4096, "dtype": "bfloat16", "layer": False, "sweep": False,
        "kernel": "flex", "inputs_mib": 6.0, "results_mib": 2.0, "memory_not_measured": {},
        "not_measured": {"formula": "too large"},
        "peers": {
            "regard": {"ms": 0.5, "memory_mib": 2.5}, "torch": {"ms": 1.0, "memory_mib": 70.0, "form": "dense"},
            "FlexAttention": {"ms": 0.25, "compile_s": 4.5, "memory_mib": 3.0}, "flash-attn": {"ms": 0.125},
        },
    }  # fmt: skip
    data = {"machine": MACHINE, "repeats": 5, "shrink": 1, "planned": 1, "rows": [row], "failed": []}
    return data, {"machine": MACHINE, "passed": 40, "failed": [], "skipped": []}


def test_the_page_of_a_gpu_says_what_the_results_say():
    data, tests = results()
    page = gpu.report(data, tests)
    assert "GPU: Abacus 9, 80.0 GiB, CUDA 12.9." in page
    assert "torch 2.13.0+cu129" in page
    assert "40 of 40 tests marked `gpu` passed on Abacus 9." in page
    head = "| task | length | dtype | kernel | regard | torch | form of torch | torch, dense mask | FlexAttention |"
    assert head in page
    assert (
        "| a &#124; b | 4,096 | bfloat16 | flex | 0.500 | 1.00 / 2.00 | dense |  | 0.250 / 0.500 | 0.125 / 0.250 |"
        in page
    )
    assert "| a &#124; b | 4,096 | bfloat16 | 6.00 | 2.00 | 2.50 | 70.0 |  | 3.00 |  |  |" in page
    assert "- **formula**: too large (a | b at 4,096)" in page
    assert "failed" not in page.lower()


def test_the_page_of_a_gpu_names_what_failed():
    data, tests = results()
    tests["failed"] = [{"test": "tests.test_gpu::test_x", "why": "off by 1 | 2"}]
    data["failed"] = [{"row": "causal, N=512, float32", "why": "RuntimeError: no"}]
    page = gpu.report(data, tests)
    assert "40 of 41 tests" in page
    assert "- failed: `tests.test_gpu::test_x`: off by 1 &#124; 2" in page
    assert "- causal, N=512, float32: RuntimeError: no" in page


def test_a_run_writes_both_results_and_the_page_and_tells_of_failures_in_its_status(monkeypatch, tmp_path):
    data, tests = results()
    seen: list[Any] = []

    def run(rows, **options):
        seen.append((len(rows), options["repeats"], options["quick"]))
        if options["output"] is not None:
            options["output"].write_text(json.dumps(data))
        return data

    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "run_tests", lambda: tests)
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(bench, "check_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(bench, "run", run)
    assert gpu.main("--folder", str(tmp_path / "part"), "--quick", "--rows", "causal*float32") == 0
    assert list((tmp_path / "part").iterdir()) == []  # a part of the rows replaces nothing
    assert not gpu.PAGE.exists()
    folder = tmp_path / "whole"
    assert gpu.main("--folder", str(folder)) == 0
    assert seen[1] == (len(bench.chosen(None)), 15, False)
    page = gpu.PAGE.read_text()
    assert page == gpu.report(*(json.loads((folder / f"{n}-gpu.json").read_text()) for n in ("masks", "tests")))
    gpu.PAGE.unlink()
    assert gpu.main("--folder", str(folder), "--report") == 0
    assert gpu.PAGE.read_text() == page
    tests["failed"] = [{"test": "x", "why": ""}]
    assert gpu.main("--folder", str(folder)) == 1
    with pytest.raises(SystemExit, match="no row is named like 'sideways'"):
        gpu.main("--rows", "sideways")


def test_a_page_without_results_is_not_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "page.md")
    assert gpu.main("--folder", str(tmp_path), "--report") == 1
    assert "no results in" in capsys.readouterr().err
    assert not gpu.PAGE.exists()


def test_the_page_in_the_docs_is_there_only_with_the_results_that_make_it():
    paths = [ROOT / "benchmarks" / "results" / f"{name}-gpu.json" for name in ("masks", "tests")]
    assert gpu.PAGE.is_file() == all(path.is_file() for path in paths)
    if gpu.PAGE.is_file():
        page = gpu.report(*(json.loads(path.read_text(encoding="utf-8")) for path in paths))
        assert gpu.PAGE.read_text(encoding="utf-8") == page, "run: python benchmarks/gpu.py --report"

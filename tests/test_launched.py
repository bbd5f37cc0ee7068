"""Several processes train what one trains: the same losses, the same weights, one that writes; they end together."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import launched
from ranks import Ranks
from regard.training.checkpoint import progress_header, read
from regard.training.lock import hold
from regard.training.metrics import read_metrics
from regard.training.report import Listener
from regard.training.run import begin, resume
from regard.training.settings import Recipe, Settings

CASES = {
    "copies": ("texts", {}, 4),
    "copies in parts": ("pairs", {"accumulate": 2}, 4),
    "two copies": ("hidden", {}, 2),
    "tokens dealt out": ("texts", {"context_parallel": 2, "evaluate_every": 2}, 4),
    "tokens of two texts dealt out, weights in shards": ("pairs", {"context_parallel": 4, "shard": True}, 4),
    "hidden tokens dealt out": ("hidden", {"context_parallel": 2}, 2),
}
FILES = ["metrics.jsonl", "model.safetensors", "progress.safetensors"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, list]:
    """What every process of every run told, by the name of the run; they are launched once."""
    launched.training("hidden", folder / "begun alone", stop_at=2)
    launched.training("texts", folder / "tokens begun alone", stop_at=2)
    ranks, found = Ranks(4), {}
    try:
        wanted = {
            name: (work, str(folder / name), changes) for name, (work, changes, count) in CASES.items() if count == 4
        }
        wanted["begun in shards"] = ("pairs", str(folder / "begun in shards"), {"shard": True, "stop_at": 2})
        wanted["too few rows"] = ("texts", str(folder / "too few rows"), {"batch_size": 6})
        wanted["too few processes"] = ("texts", str(folder / "too few processes"), {"context_parallel": 3})
        wanted["other data"] = ("texts", str(folder / "other data"), {"other_data": True})
        wanted["diverged"] = ("texts", str(folder / "diverged"), {"diverge": True, "shard": True})
        wanted["in use"] = ("texts", str(folder / "in use"), {})
        with hold(folder / "in use"):
            answers = ranks.results(launched.trainings, list(wanted.values()))
        for name, by_rank in zip(wanted, zip(*answers, strict=True), strict=True):
            found[name] = list(by_rank)
        found["full disk"] = ranks.results(launched.on_a_full_disk, str(folder / "full disk"))
        wanted = {
            name: (work, str(folder / name), changes) for name, (work, changes, count) in CASES.items() if count == 2
        }
        wanted["begun alone"] = (
            "hidden",
            str(folder / "begun alone"),
            {"shard": True, "accumulate": 2, "resume": True},
        )
        resumed = {"context_parallel": 2, "resume": True}
        wanted["tokens begun alone"] = ("texts", str(folder / "tokens begun alone"), resumed)
        meeting = (folder / "meeting").as_uri()
        answers = ranks.results(launched.in_a_world_of, 2, meeting, list(wanted.values()))[:2]
        for name, by_rank in zip(wanted, zip(*answers, strict=True), strict=True):
            found[name] = list(by_rank)
    finally:
        ranks.close()
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list]:
    """The same work by one process."""
    return {work: launched.training(work, folder / work) for work in launched.WORK}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for name, t in read(folder / "progress.safetensors")[1].items() if name.startswith("model.")}


def assert_same_run(reports: list, expected: list, run: Path, of: Path) -> None:
    """The same losses and gradients, and the same weights.

    Gradients differ by the order of their sums. Muon orthogonalises in bfloat16, which may turn the last digit of one
    number into one of the third digit of the step: a matrix moves by 0.002 per step here.
    """
    assert [told["step"] for told in reports] == [told["step"] for told in expected]
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)
        assert (ours["held_out"] or 0) == pytest.approx(theirs["held_out"] or 0, rel=1e-4)
    assert reports[0]["gradient_norm"] == pytest.approx(expected[0]["gradient_norm"], rel=1e-5)
    ours, theirs = weights(run), weights(of)
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-3)


def test_the_comparison_of_runs_fails_on_another_seed_and_on_another_gradient(alone, folder, tmp_path):
    other = launched.training("texts", tmp_path, seed=4, learning_rate=0.02)
    with pytest.raises(AssertionError):
        assert_same_run(other, alone["texts"], tmp_path, folder / "texts")
    with pytest.raises(AssertionError):
        assert_same_run(alone["texts"], alone["texts"], tmp_path, folder / "texts")
    wrong = [report | {"gradient_norm": 1.01 * report["gradient_norm"]} for report in alone["texts"]]
    with pytest.raises(AssertionError):
        assert_same_run(wrong, alone["texts"], folder / "texts", folder / "texts")


@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_what_one_trains_and_only_the_first_writes_and_tells(name, told, alone, folder):
    work, _, count = CASES[name]
    assert len(told[name]) == count
    assert_same_run(told[name][0], alone[work], folder / name, folder / work)
    assert not any(told[name][1:])
    assert sorted(path.name for path in (folder / name).iterdir()) == FILES
    assert [line["step"] for line in read_metrics(folder / name)] == [1, 2, 3, 4]


def test_rows_in_parts_make_the_same_step_in_one_process(alone, folder, tmp_path):
    reports = launched.training("pairs", tmp_path, accumulate=8)
    assert_same_run(reports, alone["pairs"], tmp_path, folder / "pairs")


def test_a_run_in_shards_is_the_same_and_goes_on_with_another_number_of_processes(told, alone, folder):
    assert [report["step"] for report in told["begun in shards"][0]] == [1, 2]
    assert progress_header(folder / "begun in shards" / "progress.safetensors")["step"] == 2
    rest = launched.training("pairs", folder / "begun in shards", resume=True, accumulate=2)
    assert_same_run(told["begun in shards"][0] + rest, alone["pairs"], folder / "begun in shards", folder / "pairs")
    assert [report["step"] for report in told["begun alone"][0]] == [3, 4]
    assert_same_run(
        alone["hidden"][:2] + told["begun alone"][0], alone["hidden"], folder / "begun alone", folder / "hidden"
    )


def test_held_out_texts_are_read_by_several_processes_each(told, folder, tmp_path):
    expected = [report["held_out"] for report in launched.training("texts", tmp_path, evaluate_every=2)]
    found = [report["held_out"] for report in told["tokens dealt out"][0]]
    assert found[::2] == expected[::2] == [None, None]
    assert found[1::2] == pytest.approx(expected[1::2], rel=1e-4)


def test_a_run_goes_on_with_each_of_its_texts_on_several_processes(told, alone, folder):
    run = folder / "tokens begun alone"
    assert_same_run(alone["texts"][:2] + told["tokens begun alone"][0], alone["texts"], run, folder / "texts")
    assert progress_header(run / "progress.safetensors")["settings"]["context_parallel"] == 2
    with pytest.raises(
        ValueError, match=r"context_parallel: 2 processes are to read each row together, and there is 1"
    ):
        launched.training("texts", run, resume=True, context_parallel=2, steps=5)
    more = launched.training("texts", run, resume=True, steps=5)
    assert [report["step"] for report in more] == [5]


def test_what_one_process_cannot_do_none_goes_on_with(told, folder):
    says = "batch_size: 6 rows cannot be dealt out evenly to 4 processes; give a multiple of 4"
    assert told["too few rows"] == [("ValueError", says)] * 4
    kinds, words = zip(*told["too few processes"], strict=True)
    assert set(kinds) == {"ValueError"}
    assert all(
        "3 processes are to read each row together, and there are 4\n  hint: start 3 of" in word for word in words
    )
    says = "data: process 1 has another than the first; every process has to see the same"
    assert told["other data"] == [("ValueError", says)] * 4
    first, *others = told["in use"]
    assert first[0] == "ValueError"
    assert f"in use is in use, process {os.getpid()} on" in first[1]
    assert others == [("ElsewhereError", f"process 0: {first[1]}")] * 3
    first, *others = told["full disk"]
    assert first[0] == "OSError"
    assert others == [("ElsewhereError", f"process 0: {first[1]}")] * 3
    assert {kind for kind, _ in told["diverged"]} == {"DivergedError"}
    assert "step 1 has loss nan" in told["diverged"][0][1]
    kept = read(folder / "diverged" / "diverged.safetensors")[1]
    assert kept["tokens"].shape[0] == 8  # the whole batch, and whole weights
    assert kept["model.embedding.weight"].shape == (31, 12)
    assert not list((folder / "diverged").glob("diverged-*"))


def test_rows_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(
        ValueError, match="batch_size: 8 rows cannot be dealt out evenly to 3 parts; give a multiple of 3"
    ):
        Settings(steps=1, accumulate=3).rows_at_once(1)
    with pytest.raises(ValueError, match="to 2 processes in 3 parts each; give a multiple of 6"):
        Settings(steps=1, accumulate=3).rows_at_once(2)


def test_what_answers_for_a_whole_text_is_not_dealt_out_by_tokens():
    with pytest.raises(ValueError, match="context_parallel: to classify, a model reads the first token's state"):
        Recipe(task="classify", context_parallel=2)
    with pytest.raises(ValueError, match="to 2 groups of 2 processes; give a multiple of 2"):
        Settings(steps=1, batch_size=3, context_parallel=2).rows_at_once(4)


class StoppedAt(Listener):
    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, report, settings):
        if report.step == self.last:
            raise KeyboardInterrupt


# --- the command ------------------------------------------------------------------------------------------------------


def test_torchrun_starts_the_same_command_which_ctrl_c_ends_cleanly_and_one_process_goes_on_with(tmp_path):
    draw, texts, run = random.Random(0), tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    words = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired", "and", "warm"]
    for number in range(12):
        (texts / f"{number}.md").write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(9)))
    sizes = {"dim": 16, "layers": 1, "heads": 2, "context_length": 32, "vocab_size": 300, "precision": "no"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "regard", "train"]
    process = subprocess.Popen(
        [*torchrun, str(run), "--data", str(texts), "--steps", "100000", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + 120
        while len(read_metrics(run)) < 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < give_up
            time.sleep(0.05)
        with pytest.raises(ValueError, match="run is in use, process"):
            resume(run)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the launcher and to all it has started
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    step = progress_header(run / "progress.safetensors")["step"]
    assert err.count(f"stopped; saved at step {step:,} of 100,000") == 1
    assert err.count("parameters;") == 1
    assert "2 processes, 4 rows of each step in each" in err
    assert "regard/" not in err, "a traceback"
    assert "forcefully" not in err, "the launcher had to kill a process"
    assert read_metrics(run)[-1]["step"] == step
    whole = tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        begin(whole, Recipe(data=str(texts), steps=100000, **sizes), listener=StoppedAt(step))
    assert [line["loss"] for line in read_metrics(run)] == pytest.approx(
        [line["loss"] for line in read_metrics(whole)], rel=1e-3
    )


def test_a_process_that_has_left_its_launch_keeps_no_threads_of_it(tmp_path: Path) -> None:
    # with those of a group that something still holds, it may abort at its end, and the launcher stops all the others
    script = tmp_path / "leaving.py"
    script.write_text("""
import gc, sys, weakref
import torch, torch.distributed as dist
from regard.training.processes import join, leave

join()
group = weakref.ref(dist.group.WORLD)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
leave()
gc.collect()
sys.exit(group() is not None)
""")
    launch(script)


def test_nor_does_one_that_was_stopped_whose_error_still_holds_the_model(tmp_path: Path) -> None:
    # the group would end with the model, when Python waits for its threads, which wait for Python
    script = tmp_path / "stopped.py"
    script.write_text("""
import sys, weakref
import torch, torch.distributed as dist
from regard.training.processes import join, leave

def work():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    step(lambda: model)

def step(model):
    try:
        raise RuntimeError
    except RuntimeError as error:
        raise KeyboardInterrupt from error

join()
group = weakref.ref(dist.group.WORLD)
try:
    try:
        work()
    finally:
        leave()
except KeyboardInterrupt as stopped:
    sys.exit(group() is not None)
""")
    launch(script)


def launch(script: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*torchrun, str(script)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=120)

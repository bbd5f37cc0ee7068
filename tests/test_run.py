"""A run as a user has it: begun, stopped, killed, gone on with, looked at, on a full disk, refused with one line."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from regard.training.checkpoint import load, progress_header, read
from regard.training.metrics import read_metrics
from regard.training.report import Listener, Report
from regard.training.run import begin, resume
from regard.training.settings import Recipe, Settings

WORDS = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired", "and", "the", "mat", "was", "warm"]
SMALL = {"dim": 16, "layers": 1, "heads": 2, "context_length": 32, "vocab_size": 300, "precision": "no"}
OPTIONS = ["--dim", "16", "--layers", "1", "--heads", "2", "--context-length", "32", "--vocab-size", "300",
           "--precision", "no", "--threads", "1"]  # fmt: skip
COMMAND = [sys.executable, "-m", "regard"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as people have them: notes in Markdown, a picture, and no .txt."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for number in range(12):
        lines = [" ".join(draw.choices(WORDS, k=9)) for _ in range(9)]
        (folder / f"{number}.md").write_text("\n".join(lines))
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    return folder


class Told(Listener):
    """All that a run told."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []
        self.stop_at = stop_at

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, report: Report, settings: Settings) -> None:
        self.steps.append(report.step)
        if report.step == self.stop_at:
            raise KeyboardInterrupt


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights a run has come to, in full precision."""
    return {name: t for name, t in read(folder / "progress.safetensors")[1].items() if name.startswith("model.")}


def assert_equal(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_the_comparison_of_runs_fails_on_another_seed(texts: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        begin(tmp_path / str(seed), Recipe(data=str(texts), steps=1, seed=seed, **SMALL))
    with pytest.raises(AssertionError, match="model"):
        assert_equal(tmp_path / "0", tmp_path / "1")


# --- going on ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_by_its_folder_alone_from_wherever_one_stands(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(texts.parent)
    recipe = Recipe(data=texts.name, steps=7, learning_rate=1e-3, repeats=0.2, seed=5, **SMALL)
    begin(tmp_path / "whole", recipe)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "stopped", recipe, listener=Told(stop_at=3))
    monkeypatch.chdir(tmp_path)
    told = Told()
    measures = resume("stopped", listener=told)
    assert measures is not None
    assert told.steps == [4, 5, 6, 7]
    assert_equal(tmp_path / "whole", tmp_path / "stopped")
    assert [line["step"] for line in read_metrics(tmp_path / "stopped")] == [1, 2, 3, 4, 5, 6, 7]
    card = (tmp_path / "stopped" / "card.md").read_text()
    assert "begin(" in card
    assert "; resume('stopped', **{})" in card


def test_a_finished_run_says_so_and_goes_on_with_more_steps(texts: Path, tmp_path: Path) -> None:
    begin(tmp_path, Recipe(data=str(texts), steps=2, **SMALL))
    card = (tmp_path / "card.md").read_text()
    told = Told()
    assert resume(tmp_path, listener=told) is None
    assert told.notes == [f"{tmp_path}: all 2 steps are done; more --steps go further"]
    assert (tmp_path / "card.md").read_text() == card
    assert resume(tmp_path, steps=4, listener=told) is not None
    assert told.steps == [3, 4]
    assert progress_header(tmp_path / "progress.safetensors")["settings"]["steps"] == 4
    assert (tmp_path / "card.md").read_text() != card
    (tmp_path / "card.md").unlink()  # as if it had been stopped while it was measured
    assert resume(tmp_path) is not None
    assert (tmp_path / "card.md").exists()


def test_what_contradicts_the_run_is_refused_in_one_line_and_what_does_not_is_taken(
    texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    begin(folder, Recipe(data=str(texts), steps=2, **SMALL | {"vocab_size": 4000, "dim": 24, "heads": None}))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for changes, says in (
        ({"learning_rate": 1e-3}, "begun with learning_rate 0.003, which cannot become 0.001; leave it out to go on"),
        ({"steps": 1}, "begun with 2 steps; they may be raised, not lowered to 1"),
        ({"dim": 48}, "begun with dim 24, which cannot become 48"),
        ({"heads": 2}, "begun with heads 6, which cannot become 2"),
        ({"start_from": "stdlib"}, "begun with start_from None, which cannot become 'stdlib'"),
        ({"precision": "bf16"}, "begun with precision 'no', which cannot become 'bf16'"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError) as error:
            resume(folder, **changes)
        assert says in str(error.value)
        assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    shutil.copytree(texts, tmp_path / "moved")
    same = {"learning_rate": 3e-3, "heads": 6, "vocab_size": 4000, "data": str(tmp_path / "moved"), "threads": 1}
    assert resume(folder, steps=3, **same) is not None


def test_texts_that_have_changed_are_refused_and_the_finished_model_stays(texts: Path, tmp_path: Path) -> None:
    shutil.copytree(texts, tmp_path / "texts")
    begin(tmp_path / "run", Recipe(data=str(tmp_path / "texts"), steps=1, **SMALL))
    (tmp_path / "texts" / "more.md").write_text("one more text, about a dog\n")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=r"begun with (other data|other settings: size)"):
        resume(tmp_path / "run", steps=2)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_folder_that_holds_a_run_or_a_model_is_not_begun_in_again(texts: Path, tmp_path: Path) -> None:
    begin(tmp_path, Recipe(data=str(texts), steps=1, **SMALL))
    with pytest.raises(ValueError, match="holds a run already; --resume goes on with it"):
        begin(tmp_path, Recipe(data=str(texts), **SMALL))
    (tmp_path / "progress.safetensors").unlink()
    with pytest.raises(ValueError, match="holds a model already, which would be lost"):
        begin(tmp_path, Recipe(data=str(texts), **SMALL))


def test_a_run_of_another_kind_cannot_be_gone_on_with(texts: Path, tmp_path: Path) -> None:
    from regard.configuration import ModelConfig
    from regard.models import Decoder
    from regard.training import loop
    from regard.training.data import Packed

    data = Packed([[1, 2, 3] * 9], context_length=8, vocab_size=31)
    model = Decoder(ModelConfig(vocab_size=31, context_length=8, dim=12, layers=1, heads=3))
    loop.train(model, data, Settings(steps=1, precision="no"), tmp_path)
    with pytest.raises(ValueError, match="the run does not say what it was begun with"):
        resume(tmp_path)


def test_evaluations_show_what_the_model_writes_and_early_stopping_keeps_the_best_model(
    texts: Path, tmp_path: Path
) -> None:
    class Sampled(Told):
        def __init__(self) -> None:
            super().__init__()
            self.samples: dict[int, str] = {}
            self.held_out: dict[int, float] = {}

        def sample(self, step: int, text: str) -> None:
            self.samples[step] = text

        def step(self, report: Report, settings: Settings) -> None:
            super().step(report, settings)
            if report.held_out is not None:
                self.held_out[report.step] = report.held_out

    run, told = tmp_path / "run", Sampled()
    recipe = Recipe(
        data=str(texts), steps=400, learning_rate=0.2, evaluate_every=5, patience=2, tensorboard=True, **SMALL
    )
    assert begin(run, recipe, listener=told) is not None
    assert list(told.samples) == list(told.held_out) == list(range(5, told.steps[-1] + 1, 5))
    best = min(told.held_out, key=lambda step: told.held_out[step])
    assert told.steps[-1] == best + 10 < 400
    assert f"the model is that of step {best}, the best on held-out texts" in told.notes
    half = {name: tensor.half() for name, tensor in read(run / "best.safetensors")[1].items()}
    assert all(torch.equal(half[name], tensor) for name, tensor in read(run / "model.safetensors")[1].items())
    assert load(run).unfinished is None
    again = Told()
    assert resume(run, listener=again) is None
    ended = f"ended after step {told.steps[-1]}, after 2 evaluations without a lower loss on held-out texts"
    assert again.notes == [f"{run}: {ended}"]
    # what TensorBoard reads
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {event.step: event.value for event in events.Scalars("held_out")} == pytest.approx(told.held_out)
    losses = {line["step"]: line["loss"] for line in read_metrics(run)}
    assert {event.step: event.value for event in events.Scalars("loss")} == pytest.approx(losses)
    texts_of = {
        event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("sample/text_summary")
    }
    assert all(told.samples[step] in text for step, text in texts_of.items())
    assert set(texts_of) == set(told.samples)


def test_the_plot_at_the_end_shows_the_metrics(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from regard.plots import training_course

    begin(tmp_path, Recipe(data=str(texts), steps=6, evaluate_every=2, **SMALL))
    assert (tmp_path / "training.svg").read_text().startswith("<?xml")
    lines = read_metrics(tmp_path)
    above, below = training_course(lines).axes
    (raw, mean, evaluated), (rate,) = above.lines, below.lines
    assert raw.get_ydata().tolist() == mean.get_ydata().tolist() == [line["loss"] for line in lines]
    assert evaluated.get_xydata().tolist() == [[line["step"], line["held_out"]] for line in lines[1::2]]
    assert rate.get_ydata().tolist() == [line["learning_rate"] for line in lines]
    many = [{"step": step, "loss": float(step % 2), "learning_rate": 0.1} for step in range(1, 101)]
    assert training_course(many).axes[0].lines[1].get_ydata().tolist() == [1.0] + [0.5] * 99
    with pytest.raises(ValueError, match=r"plots\.training_course: lines must have a step or more, got none"):
        training_course([])


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({}, "expected texts, found none; the folder holds no file"),
        ({"a.txt": b""}, "expected texts, found none, only:\n  a.txt: the file is empty"),
        ({"a.txt": b"one line, no more"}, "is too little to hold some of it out"),
        ({"a.bin": b"\0\1", "b.bin": b"\0\2"}, "found none, only:\n  a.bin: it is binary"),
    ],
    ids=["nothing", "empty", "one line", "binary"],
)
def test_data_that_no_model_can_learn_from_is_named_and_nothing_is_left(
    written: dict[str, bytes], says: str, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    for name, data in written.items():
        (tmp_path / "texts" / name).write_bytes(data)
    with pytest.raises(ValueError) as error:
        begin(tmp_path / "runs" / "mine", Recipe(data=str(tmp_path / "texts"), **SMALL))
    assert says in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_vocabulary_larger_than_the_texts_give_is_said(texts: Path, tmp_path: Path) -> None:
    told = Told()
    begin(tmp_path, Recipe(data=str(texts), steps=1, **SMALL | {"vocab_size": 100_000}), listener=told)
    size = load(tmp_path).model.config.vocab_size
    assert size == load(tmp_path).tokenizer.vocab_size < 1000
    assert f"{size:,} tokens in the vocabulary: the texts give no more" in told.notes


def test_what_is_in_use_is_refused_before_any_work(texts: Path, tmp_path: Path) -> None:
    begin(tmp_path / "run", Recipe(data=str(texts), steps=1, **SMALL))
    holder = "import sys, time\nfrom pathlib import Path\nfrom regard.training.lock import hold\n"
    holder += "with hold(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for again in (lambda: resume(tmp_path / "run", steps=2), lambda: begin(tmp_path / "run", Recipe())):
                with pytest.raises(ValueError, match=rf"is in use, process {process.pid} on"):
                    again()
        finally:
            process.kill()


def test_a_package_that_is_missing_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match="tokenizers"):
        begin(tmp_path / "run", Recipe(data="no/such/folder"))
    assert not (tmp_path / "run").exists()


# --- as a process -----------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A training in a process of its own, after some steps."""
    process = subprocess.Popen(
        [*COMMAND, "train", str(folder), *arguments],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    give_up = time.monotonic() + 120
    while len(read_metrics(folder)) < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    number: int, code: int, texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with started(folder, "--data", str(texts), "--steps", "1000000", "--batch-size", "1", *OPTIONS) as process:
        try:
            used = subprocess.run(
                [*COMMAND, "generate", "the cat", "--count", "2", "--model", str(folder)],
                env=environment(), capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert used.returncode == 0, used.stderr
            assert "its training is at step" in used.stderr
            process.send_signal(number)
            err = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == code, err
    assert "Traceback" not in err
    step = progress_header(folder / "progress.safetensors")["step"]
    assert f"stopped; saved at step {step:,} of 1,000,000" in err
    assert f"go on: regard train {folder} --resume" in err
    assert read_metrics(folder)[-1]["step"] == step
    assert load(folder).unfinished == (step, 1_000_000)


def test_a_full_disk_is_one_line_and_exit_code_2_and_the_last_save_can_be_gone_on_with(
    texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        begin(folder, Recipe(data=str(texts), steps=30, save_every=1, **SMALL), listener=Told(stop_at=3))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error, as on a full disk

    done = subprocess.run(
        [*COMMAND, "train", str(folder), "--resume"],
        env=environment(), capture_output=True, text=True, check=False, preexec_fn=small_files,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert "what was there before is whole" in done.stderr.splitlines()[-1]
    for name in ("progress.safetensors", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == before[name]
    assert {path.name for path in folder.iterdir()} == set(before)
    assert resume(folder) is not None


KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path

from regard.training.metrics import read_metrics
from regard.training.checkpoint import progress_header
from regard.training.run import begin, resume
from regard.training.settings import Recipe
import tokenizers, torch

folder, recipe = Path(sys.argv[1]), Recipe(**json.loads(sys.argv[2]))
begin(folder / "whole", recipe)
draw, kills, lost = random.Random(7), 0, []
run = folder / "killed"

def steps_done():
    return len(read_metrics(run))

def work():
    resume(run) if (run / "progress.safetensors").exists() else begin(run, recipe)

while True:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if kills < 20:  # after so many steps more, and a moment; twenty times that is less than the whole run
        enough = steps_done() + draw.randint(0, recipe.steps // 22)
        while steps_done() < enough:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kills += 1
        if (run / "progress.safetensors").exists():
            done = [line["step"] for line in read_metrics(run)]
            saved = progress_header(run / "progress.safetensors")["step"]
            lost.append(max([saved, *done]) - saved)
    else:
        assert status == 0, status
        break
print(json.dumps({"kills": kills, "lost": lost, "left": sorted(path.name for path in run.iterdir())}))
"""


def test_a_run_killed_at_twenty_moments_ends_with_the_weights_of_one_that_was_not_and_loses_few_steps(
    texts: Path, tmp_path: Path
) -> None:
    recipe = {
        "data": str(texts),
        "steps": 660,
        "batch_size": 2,
        "save_every": 7,
        "threads": 1,
        "repeats": 0.3,
        **SMALL,
    }
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), json.dumps(recipe)],
        env=environment(), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["kills"] == 20
    assert max(told["lost"]) <= 7
    assert any(told["lost"]), "no kill fell between two saves"
    files = ["card.md", "metrics.jsonl", "model.safetensors", "progress.safetensors", "tokenizer.json", "training.svg"]
    assert told["left"] == files
    assert_equal(tmp_path / "whole", tmp_path / "killed")
    one, other = (read_metrics(tmp_path / name) for name in ("whole", "killed"))
    assert [(line["step"], line["loss"]) for line in one] == [(line["step"], line["loss"]) for line in other]
    assert len(one) == 660


def test_the_help_tells_the_defaults_that_hold() -> None:
    done = subprocess.run(
        [*COMMAND, "train", "--help"], env=environment(), capture_output=True, text=True, check=True
    )  # fmt: skip
    shown = " ".join(done.stdout.replace("│", " ").split())
    recipe = Recipe()
    for name in (
        "steps",
        "batch_size",
        "learning_rate",
        "seed",
        "precision",
        "data",
        "save_every",
        "save_minutes",
        "accumulate",
        "schedule",
        "warmup",
        "clip",
    ):
        told = re.search(rf"--{name.replace('_', '-')} \S*[A-Z|]\S* .*?Default: (\S+)\.", shown)
        assert told is not None, name
        assert told[1] == str(getattr(recipe, name)).removesuffix(".0"), name
    for field in fields(Recipe):
        option = f"--{field.name.replace('_', '-')}"
        assert option in shown or field.name in {"weight_decay", "start_from"}, option

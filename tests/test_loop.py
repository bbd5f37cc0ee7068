"""Training: a run that was interrupted ends where an uninterrupted one does, and what goes wrong loses nothing."""

import json
import math
import os
import signal
import threading
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from learning import CONTEXT, model_of, rows
from regard.models import Decoder
from regard.training import loop
from regard.training.checkpoint import load, progress_header, read
from regard.training.data import Batch, Packed, next_token_loss
from regard.training.loop import DivergedError, make_optimizers, train
from regard.training.loss import IGNORED
from regard.training.metrics import Metrics, read_metrics
from regard.training.settings import Settings
from regard.training.text import Tokenizer, train_tokenizer

SETTINGS = Settings(steps=6, batch_size=2, precision="no", save_every=4, seed=3)


@pytest.fixture
def _ctrl_c():
    """What a terminal does; a test run in the background may have been told to ignore Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


interruptible = pytest.mark.usefixtures("_ctrl_c")


@pytest.fixture(scope="module")
def data():
    return rows()


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one, other):
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def test_the_comparison_of_weights_fails_on_a_wrong_value():
    one = weights(model_of())
    other = {name: tensor + 1e-7 if name == "norm.weight" else tensor for name, tensor in one.items()}
    with pytest.raises(AssertionError, match=r"norm\.weight"):
        assert_equal(one, other)


def stop_at(step, reports):
    """A report that interrupts, as Ctrl-C does, after a step."""

    def report(r):
        reports.append(r)
        if r.step == step:
            raise KeyboardInterrupt

    return report


# --- a run and its continuation ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted_run(data, tmp_path_factory):
    """Weights and losses of a whole run, for a model and for one that drops."""
    known = {}

    def of(rate):
        if rate not in known:
            model, reports = model_of(dropout=rate, attention_dropout=rate), []
            train(model, data, SETTINGS, tmp_path_factory.mktemp("whole"), report=reports.append)
            known[rate] = weights(model), [r.loss for r in reports]
        return known[rate]

    return of


@pytest.mark.parametrize("rate", [0.0, 0.3], ids=["", "with dropout"])
@pytest.mark.parametrize("step", [1, 3, 4, 6])
def test_a_run_that_was_interrupted_ends_with_the_same_weights_bit_for_bit(
    step, rate, data, uninterrupted_run, tmp_path
):
    reports = []
    model = model_of(dropout=rate, attention_dropout=rate)
    with pytest.raises(KeyboardInterrupt):
        train(model, data, SETTINGS, tmp_path, report=stop_at(step, reports))
    assert progress_header(tmp_path / "progress.safetensors")["step"] == step
    again = model_of(seed=99, dropout=rate, attention_dropout=rate)  # other weights, which the saved ones replace
    seconds = train(again, data, SETTINGS, tmp_path, resume=True, report=reports.append)
    expected, losses = uninterrupted_run(rate)
    assert_equal(weights(again), expected)
    assert [r.loss for r in reports] == losses
    assert [r.step for r in reports] == [1, 2, 3, 4, 5, 6]
    times = [r.seconds for r in reports]
    assert times == sorted(times)
    assert seconds >= times[-1]
    stored = read(tmp_path / "model.safetensors")[1]
    assert torch.equal(stored["embedding.weight"], expected["embedding.weight"])


def test_the_same_model_may_go_on_too(data, uninterrupted_run, tmp_path):
    model = model_of()
    with pytest.raises(KeyboardInterrupt):
        train(model, data, SETTINGS, tmp_path, report=stop_at(2, []))
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


@interruptible
@pytest.mark.parametrize("where", ["forward", "backward", "first optimizer", "second optimizer"])
def test_ctrl_c_at_any_moment_of_a_step_loses_nothing(where, data, uninterrupted_run, tmp_path, monkeypatch):
    count = 0

    def interrupting(original):
        def wrapped(*arguments, **more):
            nonlocal count
            count += 1
            if count == 3:
                signal.raise_signal(signal.SIGINT)
            return original(*arguments, **more)

        return wrapped

    with monkeypatch.context() as patched:
        owner, name = {
            "forward": (Packed, "loss"),
            "backward": (torch.Tensor, "backward"),
            "first optimizer": (torch.optim.Muon, "step"),
            "second optimizer": (torch.optim.AdamW, "step"),
        }[where]
        patched.setattr(owner, name, interrupting(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            train(model_of(), data, SETTINGS, tmp_path)
    assert progress_header(tmp_path / "progress.safetensors")["step"] == 3  # it is finished first
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


def test_a_run_that_broke_down_goes_on_from_the_last_save(data, uninterrupted_run, tmp_path):
    def break_down(r):
        if r.step == 5:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        train(model_of(), data, SETTINGS, tmp_path, report=break_down)
    assert progress_header(tmp_path / "progress.safetensors")["step"] == 4
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


def test_a_run_that_is_done_stays_as_it_is(data, uninterrupted_run, tmp_path):
    train(model_of(), data, SETTINGS, tmp_path)
    model, reports = model_of(seed=99), []
    train(model, data, SETTINGS, tmp_path, resume=True, report=reports.append)
    assert reports == []
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


def test_the_seed_decides_what_is_dropped(data, uninterrupted_run, tmp_path):
    model = model_of(dropout=0.3, attention_dropout=0.3)
    train(model, data, replace(SETTINGS, seed=4), tmp_path)
    assert not torch.equal(model.norm.weight, uninterrupted_run(0.3)[0]["norm.weight"])


# --- what is refused --------------------------------------------------------------------------------------------------


def test_going_on_with_other_settings_data_or_another_model_is_refused(data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), data, SETTINGS, tmp_path, report=stop_at(1, []))
    before = (tmp_path / "progress.safetensors").read_bytes()
    path = tmp_path / "progress.safetensors"

    def packed(**changes):
        return Packed([[1, 2, 3] * 9], **{"context_length": 16, "vocab_size": 31, "seed": 7, "repeats": 0.25} | changes)

    for settings, says in (
        (replace(SETTINGS, learning_rate=1e-3), "learning_rate was 0.003 and is 0.001"),
        (replace(SETTINGS, steps=5), "steps was 6 and is 5"),
        (replace(SETTINGS, steps=5, batch_size=3), "steps was 6 and is 5, batch_size was 2 and is 3"),
        (replace(SETTINGS, precision="auto"), "precision was 'no' and is 'auto'"),
        (replace(SETTINGS, seed=0), "seed was 3 and is 0"),
    ):
        with pytest.raises(ValueError, match=f"^{path}: begun with other settings: {says}$"):
            train(model_of(), data, settings, tmp_path, resume=True)
    for other, says in (
        (packed(), "size was 91 and is 28"),
        (packed(context_length=8), "context_length was 16 and is 8, size was 91 and is 28"),
        (packed(seed=8, repeats=0.0), "size was 91 and is 28, seed was 7 and is 8, repeats was 0.25 and is 0.0"),
    ):
        with pytest.raises(ValueError, match=f"begun with other settings: {says}$"):
            train(model_of(), other, SETTINGS, tmp_path, resume=True)
    with pytest.raises(ValueError, match=f"{path}: its weights are not this model's"):
        train(model_of(layers=3), data, SETTINGS, tmp_path, resume=True)
    assert path.read_bytes() == before
    # how often it is saved may change
    model = model_of()
    train(model, data, replace(SETTINGS, save_every=1), tmp_path, resume=True)


def test_a_run_may_go_on_for_more_steps_at_the_rate_of_the_longer_schedule(data, tmp_path):
    train(model_of(), data, SETTINGS, tmp_path)
    longer, reports = replace(SETTINGS, steps=9), []
    train(model_of(), data, longer, tmp_path, resume=True, report=reports.append)
    assert [(r.step, r.learning_rate) for r in reports] == [(step, longer.rate(step - 1)) for step in (7, 8, 9)]


def test_going_on_with_nothing_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path / 'progress.safetensors'}: there is no such file"):
        train(model_of(), data, SETTINGS, tmp_path, resume=True)


def test_settings_that_cannot_be_are_refused():
    for changes, says in (
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"save_every": -1}, "save_every must be 1 or more, got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be between 0 and 1, got 0.0"),
        ({"learning_rate": 1.0}, "learning_rate must be between 0 and 1, got 1.0"),
        ({"save_minutes": 0.0}, "save_minutes must be more than 0, got 0.0"),
        ({"schedule": "step"}, "schedule must be linear, cosine, constant, got 'step'"),
        ({"warmup": 1.5}, "warmup must be a share of the steps, 0 to 1, got 1.5"),
        ({"clip": 0.0}, "clip must be more than 0, got 0.0"),
        ({"seed": 2**64}, "seed must be a whole number of 64 bits, got 18446744073709551616"),
        ({"accumulate": 0}, "accumulate must be 1 or more, got 0"),
        ({"precision": "fp16"}, "precision must be auto, bf16 or no, got 'fp16'"),
    ):
        with pytest.raises(ValueError, match=says):
            replace(SETTINGS, **changes)


# --- the parts of a step ----------------------------------------------------------------------------------------------


def test_the_learning_rate_climbs_and_falls():
    # ten steps, two of them to climb: 1/2 and 2/2 of the way up, times what is left: 10/10, 9/10, ...
    settings = Settings(steps=10, learning_rate=0.1, warmup=0.2)
    assert [settings.rate(step) for step in range(10)] == pytest.approx(
        [0.05, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01]
    )
    assert Settings(steps=10, learning_rate=0.1, warmup=0.0).rate(0) == pytest.approx(0.1)
    assert Settings(steps=1000, warmup=0.03).rate(0) == pytest.approx(3e-3 / 30)


def test_schedules_fall_as_they_are_named():
    def rates(schedule, warmup=0.0):
        return [Settings(steps=4, learning_rate=0.1, schedule=schedule, warmup=warmup).rate(step) for step in range(4)]

    root = math.sqrt(0.5)
    assert rates("linear") == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert rates("cosine") == pytest.approx([0.1, 0.05 * (1 + root), 0.05, 0.05 * (1 - root)])
    assert rates("constant") == pytest.approx([0.1] * 4)
    assert rates("constant", warmup=1.0) == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates("cosine", warmup=0.5) == pytest.approx([0.05, 0.05 * (1 + root), 0.05, 0.05 * (1 - root)])


def test_a_gradient_longer_than_the_clip_is_scaled_down_to_it_and_a_shorter_one_is_not(data, tmp_path):
    def first_step(clip):
        folder, reports = tmp_path / str(clip), []
        train(model_of(), data, replace(SETTINGS, steps=1, clip=clip), folder, report=reports.append)
        found = read(folder / "progress.safetensors")[1]
        kept = {"momentum_buffer": 0.05, "exp_avg": 0.1}  # of a gradient, after one step
        parts = [t.double() / kept[name.split(".")[-1]] for name, t in found.items() if name.split(".")[-1] in kept]
        return reports[0].gradient_norm, math.sqrt(sum(float(part.square().sum()) for part in parts))

    told, norm = first_step(1e6)
    assert norm == pytest.approx(told, rel=1e-5)
    short = first_step(told / 3)
    assert short[0] == told  # what is told is the length before
    assert short[1] == pytest.approx(told / 3, rel=1e-4)


def test_the_rate_that_is_told_is_the_rate_that_is_used(data, tmp_path, monkeypatch):
    used, reports = [], []
    step = torch.optim.AdamW.step

    def watched(self, *arguments, **more):
        used.append([group["lr"] for group in self.param_groups])
        return step(self, *arguments, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    train(model_of(), data, SETTINGS, tmp_path, report=reports.append)
    assert used == [[SETTINGS.rate(number)] for number in range(6)]
    assert [r.learning_rate for r in reports] == [SETTINGS.rate(number) for number in range(6)]
    assert all(r.tokens_per_second > 0 for r in reports)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_optimizer_and_matrices_of_blocks_have_muon(tied):
    model = model_of(tied=tied, bias=True, norm="layer", positions="learned")
    muon, adam = make_optimizers(model, SETTINGS)
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adam, torch.optim.AdamW)

    def of(optimizer):
        return {id(p) for group in optimizer.param_groups for p in group["params"]}

    named = dict(model.named_parameters())
    matrices = {
        id(p) for name, p in named.items() if name.startswith("layers.") and name.endswith("weight") and p.dim() == 2
    }
    assert of(muon) == matrices
    assert of(adam) == {id(p) for p in named.values()} - matrices
    assert muon.param_groups[0]["weight_decay"] == 0.1
    assert adam.param_groups[0]["weight_decay"] == 0.0


def test_the_loss_is_the_mean_over_the_next_tokens_of_each_document():
    model = model_of().eval()
    batch = Batch(
        torch.tensor([[0, 5, 6, 0, 7, 8], [9, 9, 0, 4, 3, 2]]),
        torch.tensor([[5, 6, 0, 7, 8, IGNORED], [9, 0, 4, 3, 2, 1]]),
        torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
    )
    losses = []
    for row in range(2):
        for at in range(6):
            document = batch.documents[row].tolist()
            first = document.index(document[at])
            logits = model(batch.tokens[row : row + 1, first : at + 1])[0, -1]
            if batch.targets[row, at] != IGNORED:
                losses.append(-logits.log_softmax(-1)[batch.targets[row, at]].detach())
    assert len(losses) == 11
    assert float(next_token_loss(model, batch).detach()) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_a_model_learns(tmp_path):
    data = Packed([[1, 2, 3, 4, 5] * 20], context_length=CONTEXT, vocab_size=31)
    reports = []
    train(model_of(), data, replace(SETTINGS, steps=60, learning_rate=0.02), tmp_path, report=reports.append)
    assert reports[0].loss == pytest.approx(math.log(31), abs=0.2)
    assert reports[-1].loss < 0.5


def test_bfloat16_stays_inside_of_training(data, tmp_path):
    model, reports = model_of(), []
    train(model, data, replace(SETTINGS, precision="bf16"), tmp_path, report=reports.append)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plain = Decoder(model.config)
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(31, (2, 7))
    assert torch.equal(model(tokens), plain(tokens))
    exact = []
    train(model_of(), data, SETTINGS, tmp_path / "exact", report=exact.append)
    assert [r.loss for r in reports] != [r.loss for r in exact]
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in exact], rel=0.02)


def test_auto_is_bfloat16_where_the_processor_has_it(monkeypatch):
    assert (loop._precision("bf16"), loop._precision("no")) == ("bf16", "no")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has, raising=False)
        assert loop._precision("auto") == ("bf16" if has else "no")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert loop._precision("auto") == "bf16"


# --- saves ------------------------------------------------------------------------------------------------------------


def saves(monkeypatch):
    """The steps at which a save is made, from now on."""
    made, original = [], loop.save_progress

    def watched(path, model, optimizers, header):
        made.append(header["step"])
        original(path, model, optimizers, header)

    monkeypatch.setattr(loop, "save_progress", watched)
    return made


def test_a_save_is_made_at_the_beginning_every_so_many_steps_and_at_the_end(data, tmp_path, monkeypatch):
    made = saves(monkeypatch)
    train(model_of(), data, SETTINGS, tmp_path / "some")
    assert made == [0, 4, 6]
    del made[:]
    train(model_of(), data, replace(SETTINGS, save_every=None, save_minutes=None), tmp_path / "none")
    assert made == [0, 6]


def test_a_save_is_made_when_its_time_has_come(data, tmp_path, monkeypatch):
    made, now = saves(monkeypatch), [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def half_a_minute(r):
        now[0] += 30.0

    monkeypatch.setattr(Packed, "loss", lambda _, *a: (half_a_minute(None), next_token_loss(*a))[1])
    train(model_of(), data, replace(SETTINGS, save_every=None, save_minutes=1.0), tmp_path)
    assert made == [0, 2, 4, 6]


def test_a_model_can_be_used_from_the_first_step_on_and_says_how_far_it_is(data, tmp_path):
    Tokenizer(train_tokenizer(["the cat"], vocab_size=257)).save(tmp_path / "tokenizer.json")
    found = []

    def look(r):
        found.append(load(tmp_path))

    small = Packed([[1, 2, 3] * 9], context_length=CONTEXT, vocab_size=257)
    model = model_of(vocab_size=257)
    train(model, small, replace(SETTINGS, save_every=2), tmp_path, report=look)
    assert [loaded.unfinished for loaded in found] == [(0, 6), (2, 6), (2, 6), (4, 6), (4, 6), (4, 6)]
    assert_equal(weights(load(tmp_path).model), weights(model))
    assert load(tmp_path).unfinished is None


def test_the_course_of_a_run_stands_in_its_folder_with_every_step_once(data, tmp_path):
    reports = []
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), data, SETTINGS, tmp_path, report=stop_at(2, reports))
    with (tmp_path / "metrics.jsonl").open("a") as file:  # a killed run's: steps after its last save, and half a line
        file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')
    train(model_of(), data, SETTINGS, tmp_path, resume=True, report=reports.append)
    assert read_metrics(tmp_path) == [asdict(r) for r in reports]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(tmp_path / "nowhere") == []


# --- evaluation -------------------------------------------------------------------------------------------------------


def other_rows():
    return Packed(
        [[9, 8, 7, 6, 5] * 20], context_length=CONTEXT, vocab_size=31
    )  # of which the training rows tell nothing


def test_an_evaluation_is_the_loss_on_held_out_rows_as_the_model_is_used(data, tmp_path):
    model, held_out, reports = model_of(dropout=0.3), other_rows(), []
    settings = replace(SETTINGS, evaluate_every=3)
    train(model, data, settings, tmp_path, held_out=held_out, report=reports.append)
    assert [r.held_out is None for r in reports] == [True, True, False] * 2
    whole = islice(held_out.batches(2), -(-held_out.rows // 2))
    losses = [next_token_loss(model.eval(), batch).detach() for batch in whole]
    assert reports[-1].held_out == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert [line["held_out"] for line in read_metrics(tmp_path)] == [r.held_out for r in reports]
    plain = model_of(dropout=0.3)
    train(plain, data, SETTINGS, tmp_path / "plain")  # and changes nothing
    assert_equal(weights(model), weights(plain))


@pytest.mark.parametrize("stopped", [None, 7], ids=["", "and a run that was stopped likewise"])
def test_early_stopping_ends_after_so_many_evaluations_without_a_lower_loss_and_keeps_the_best(stopped, data, tmp_path):
    settings = replace(SETTINGS, steps=200, evaluate_every=2, patience=3, learning_rate=0.05)
    reports = []
    if stopped is not None:
        with pytest.raises(KeyboardInterrupt):
            train(model_of(), data, settings, tmp_path, held_out=other_rows(), report=stop_at(stopped, reports))
    train(model_of(), data, settings, tmp_path, held_out=other_rows(), resume=bool(reports), report=reports.append)
    losses = [r.held_out for r in reports if r.held_out is not None]
    best = losses.index(min(losses))
    assert len(losses) - 1 - best == 3  # three evaluations after the best one, and no fourth
    assert reports[-1].step == 2 * len(losses) < 200
    assert progress_header(tmp_path / "progress.safetensors")["course"]["step"] == 2 * (best + 1)
    kept = model_of()
    kept.load_state_dict(read(tmp_path / "best.safetensors")[1], strict=False)
    exact = [next_token_loss(kept.eval(), batch).detach() for batch in islice(other_rows().batches(2), 4)]
    assert float(torch.stack(exact).mean()) == pytest.approx(min(losses), rel=1e-5)
    more = []
    train(model_of(), data, settings, tmp_path, held_out=other_rows(), resume=True, report=more.append)
    assert more == []


def test_patience_without_evaluations_is_refused():
    with pytest.raises(ValueError, match="patience: 3 evaluations need evaluate_every"):
        replace(SETTINGS, patience=3)


def test_two_trainings_in_one_folder_refuse_each_other(data, tmp_path):
    refused = []

    def begin_another(r):
        def other():
            with pytest.raises(ValueError, match=f"{tmp_path} is in use, process {os.getpid()} on"):
                train(model_of(), data, SETTINGS, tmp_path)
            refused.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    model = model_of()
    train(model, data, replace(SETTINGS, steps=1), tmp_path, report=begin_another)
    assert refused == [True]
    assert_equal({k: v for k, v in read(tmp_path / "model.safetensors")[1].items() if k == "norm.weight"},
                 {"norm.weight": model.norm.weight.detach()})  # fmt: skip


def test_two_runs_of_different_precision_fit_into_one_process(data, tmp_path):
    train(model_of(), data, SETTINGS, tmp_path / "exact")
    train(model_of(), data, replace(SETTINGS, precision="bf16"), tmp_path / "bf16")


def test_what_auto_was_when_a_run_began_it_stays(data, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_precision", lambda wanted: "bf16")
    settings = replace(SETTINGS, precision="auto")
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), data, settings, tmp_path / "stopped", report=stop_at(2, []))
    whole, gone_on = model_of(), model_of()
    train(whole, data, settings, tmp_path / "whole")
    monkeypatch.setattr(loop, "_precision", lambda wanted: "no")  # as on another machine
    train(gone_on, data, settings, tmp_path / "stopped", resume=True)
    assert_equal(weights(gone_on), weights(whole))


def test_texts_that_have_changed_since_are_refused(tmp_path):
    one, other = (Packed([[1, 2, 3] * 9, [last]], context_length=CONTEXT, vocab_size=31) for last in (4, 5))
    with pytest.raises(KeyboardInterrupt):
        train(model_of(), one, SETTINGS, tmp_path, report=stop_at(1, []))
    with pytest.raises(ValueError, match=r"begun with other data: the texts, or the tokens .* have changed since"):
        train(model_of(), other, SETTINGS, tmp_path, resume=True)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@interruptible
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_end_lets_the_step_finish_saves_and_exits_with_its_code(
    number, code, data, uninterrupted_run, tmp_path, monkeypatch
):
    def unheard(*_):
        raise AssertionError("the signal would have ended the process")

    before = signal.signal(number, unheard)
    try:
        with pytest.raises(SystemExit) as ended:
            train(model_of(), data, SETTINGS, tmp_path, report=lambda r: r.step == 3 and signal.raise_signal(number))
    finally:
        signal.signal(number, before)
    assert ended.value.code == code
    assert progress_header(tmp_path / "progress.safetensors")["step"] == 3
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


@interruptible
def test_a_second_ctrl_c_ends_the_step_and_the_last_save_stands(data, uninterrupted_run, tmp_path, monkeypatch):
    count = 0
    step = torch.optim.AdamW.step

    def interrupted_twice(*arguments, **more):
        nonlocal count
        count += 1
        if count == 6:  # the other optimizer has changed its part of the weights
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return step(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.AdamW, "step", interrupted_twice)
        with pytest.raises(KeyboardInterrupt):
            train(model_of(), data, SETTINGS, tmp_path)
    assert progress_header(tmp_path / "progress.safetensors")["step"] == 4
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_or_gradient_that_is_no_number_stops_and_keeps_its_batch_and_the_last_save(
    where, data, uninterrupted_run, tmp_path, monkeypatch
):
    met = []

    def broken(_, model, batch):
        loss = next_token_loss(model, batch)
        met.append((batch, weights(model)))
        if len(met) != 6:
            return loss
        return loss * float("nan") if where == "loss" else loss + (model.norm.weight[:1] * 0).abs().sqrt().sum()

    with monkeypatch.context() as patched:
        patched.setattr(Packed, "loss", broken)
        says = "step 6 has loss nan" if where == "loss" else r"step 6 has loss 3\.\d+ and a gradient of norm nan"
        with pytest.raises(DivergedError, match=f"(?s){says}.*{tmp_path}/diverged.safetensors.*hint: .*smaller"):
            train(model_of(), data, SETTINGS, tmp_path)
    metadata, kept = read(tmp_path / "diverged.safetensors")
    assert json.loads(metadata["note"])["step"] == 6
    batch, before = met[-1]
    for name, tensor in batch._asdict().items():
        assert torch.equal(kept[name], tensor), name
    assert_equal({k.removeprefix("model."): v for k, v in kept.items() if k.startswith("model.layers.0")},
                 {k: v for k, v in sorted(before.items()) if k.startswith("layers.0")})  # fmt: skip
    assert progress_header(tmp_path / "progress.safetensors")["step"] == 4
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)  # without what broke it
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


@pytest.mark.parametrize("file", ["progress.safetensors", "model.safetensors", "metrics.jsonl"])
def test_a_full_disk_is_one_error_and_leaves_the_last_save_whole(file, data, uninterrupted_run, tmp_path, monkeypatch):
    full = []

    def fill(r):
        full.append(r.step == 3)

    replace_file, write_line = os.replace, Metrics.write

    def on_full_disk(source, target):
        if any(full) and Path(target).name == file:
            raise OSError(28, "No space left on device")
        replace_file(source, target)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    def write(self, line):
        if any(full) and file == "metrics.jsonl":
            self._file.close()
            self._file = Full()
        return write_line(self, line)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", on_full_disk)
        patched.setattr(Metrics, "write", write)
        with pytest.raises(OSError, match=f"^{tmp_path / file}: cannot be written: No space left on device; what was"):
            train(model_of(), data, SETTINGS, tmp_path, report=fill)
    known = {"progress.safetensors", "model.safetensors", "metrics.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == known
    model = model_of(seed=99)
    train(model, data, SETTINGS, tmp_path, resume=True)
    assert_equal(weights(model), uninterrupted_run(0.0)[0])


def test_too_little_memory_is_said_with_what_would_need_less(data, tmp_path, monkeypatch):
    def too_large(*arguments):
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(Packed, "loss", too_large)
    says = r"out of memory \(step 1, 2 rows, 32 tokens\)\n  hint: a smaller batch_size"
    with pytest.raises(RuntimeError, match=says):
        train(model_of(), data, SETTINGS, tmp_path)

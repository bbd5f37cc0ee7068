"""Training: a run that was interrupted ends where an uninterrupted one does, and measures count every token once."""

import json
import math
import signal
import threading
from dataclasses import asdict, replace

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from regard.models import Decoder, ModelConfig
from regard.training import loop
from regard.training.checkpoint import load, progress_header, read
from regard.training.data import IGNORED, Batch, Corpus, Packed, TextFile, xz_bits_per_byte
from regard.training.loop import (
    Measures,
    Settings,
    bits_per_byte,
    card,
    copying_loss,
    make_optimizers,
    measure,
    next_token_loss,
    train,
    uninterrupted,
)
from regard.training.text import Tokenizer, train_tokenizer

CONTEXT = 16
SETTINGS = Settings(steps=6, batch_size=2, precision="no", save_every=4, seed=3)


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    """Accelerate keeps one state for the whole process, with the precision of the first run."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def _ctrl_c():
    """What a terminal does; a test run in the background may have been told to ignore Ctrl-C."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


interruptible = pytest.mark.usefixtures("_ctrl_c")


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 31, "context_length": CONTEXT, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 17}
    return Decoder(ModelConfig(**sizes | changes))


@pytest.fixture(scope="module")
def data():
    draw = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 31, (length,), generator=draw).tolist() for length in (5, 40, 1, 23, 17)]
    return Packed(documents, context_length=CONTEXT, vocab_size=31, seed=7, repeats=0.25)


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
    assert not (tmp_path / "model.safetensors").exists()
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
            "forward": (loop, "next_token_loss"),
            "backward": (torch.Tensor, "backward"),
            "first optimizer": (torch.optim.Muon, "step"),
            "second optimizer": (torch.optim.AdamW, "step"),
        }[where]
        patched.setattr(owner, name, interrupting(getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            train(model_of(), data, SETTINGS, tmp_path)
    # before the weights change, the step is not done; once they do, it is finished first
    done = 3 if "optimizer" in where else 2
    assert progress_header(tmp_path / "progress.safetensors")["step"] == done
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
        AcceleratorState._reset_state(reset_partial_state=True)
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
    AcceleratorState._reset_state(reset_partial_state=True)
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


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@interruptible
def test_ctrl_c_waits_for_the_end_of_a_block_that_must_not_be_interrupted():
    before = signal.getsignal(signal.SIGINT)
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), uninterrupted():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_thread_that_no_signal_reaches_has_nothing_to_wait_for():
    done = []

    def work():
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


# --- measures ---------------------------------------------------------------------------------------------------------

TEXTS = [
    "the cat sat on the mat, the hat",
    "",
    "é",
    "a mat",
    "the the the the the the hat sat on the cat on the hat" * 2,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(TEXTS, vocab_size=264))


def bits_one_by_one(model, tokenizer, texts, stride):
    """Every token by itself: in the first piece that holds it, which is the one with the most before it."""
    length = model.config.context_length
    bits = 0.0
    for text in texts:
        chain = [tokenizer.end_id, *tokenizer.encode(text)]
        for target in range(1, len(chain)):
            at = next(at for at in range(0, len(chain), stride) if target - at <= length)
            logits = model(torch.tensor([chain[at:target]]))[0, -1].detach().double()
            bits -= float(logits.log_softmax(-1)[chain[target]]) / math.log(2)
    return bits / sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("context", [1, 2, 7, 64])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_bits_per_byte_count_every_token_once(context, batch_size, tokenizer):
    model = model_of(vocab_size=264, context_length=context, positions="learned").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    strides = {None: max(1, context // 4), 1: 1, context: context, max(1, context - 2): max(1, context - 2)}
    for stride, steps in strides.items():
        told = []

        def tell(done, all, told=told):
            told.append((done, all))

        bits = bits_per_byte(model, tokenizer, TEXTS, stride=stride, batch_size=batch_size, progress=tell)
        assert bits == pytest.approx(bits_one_by_one(model, tokenizer, TEXTS, steps), rel=1e-5)
        assert told[-1][0] == told[-1][1]


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary_for_each_token(tokenizer):
    model = model_of(vocab_size=264)
    with torch.no_grad():
        model.embedding.weight.zero_()
    tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert bits_per_byte(model, tokenizer, TEXTS) == pytest.approx(tokens * math.log2(264) / size)


def test_nothing_is_dropped_while_it_is_measured_and_the_mode_is_left_as_it_was(tokenizer):
    model = model_of(vocab_size=264, dropout=0.5).train()
    measured = bits_per_byte(model, tokenizer, TEXTS), copying_loss(model)
    assert model.training
    model.eval()
    assert (bits_per_byte(model, tokenizer, TEXTS), copying_loss(model)) == measured
    assert not model.training


def test_strides_that_would_leave_tokens_out_and_texts_without_a_letter_are_refused(tokenizer):
    model = model_of(vocab_size=264)
    for stride in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"stride: expected 1 to context_length=16, got {stride}"):
            bits_per_byte(model, tokenizer, TEXTS, stride=stride)
    for texts in ([], [""]):
        with pytest.raises(ValueError, match="texts: expected some text, got none"):
            bits_per_byte(model, tokenizer, texts)


class Copying(Decoder):
    """Knows what came `period` tokens ago, and expects everything else alike."""

    period = 5

    def __init__(self, config):
        super().__init__(config)
        self.logits = torch.nn.Identity()

    def states(self, tokens, **arguments):
        self.read = tokens
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for at in range(self.period, tokens.shape[1]):
            logits[torch.arange(len(tokens)), at, tokens[:, at - self.period + 1]] = 20.0
        return logits


@pytest.mark.parametrize("end_id", [0, 13, 30])
def test_the_copying_loss_is_small_for_a_model_that_copies(end_id):
    config = ModelConfig(vocab_size=31, context_length=64, dim=12, layers=1, heads=3)
    model = Copying(config)
    first, second = copying_loss(model, length=5, rows=7, end_id=end_id)
    assert first == pytest.approx(math.log(31))
    assert second < 1e-6
    assert model.read.shape == (7, 10)
    assert (model.read[:, 0] == end_id).all()
    assert end_id not in model.read[:, 1:].unique()
    assert set(model.read[:, 1:].flatten().tolist()) <= set(range(31))
    assert torch.equal(model.read[:, 1:5], model.read[:, 6:10])
    other = Copying(config)
    copying_loss(other, length=5, rows=7, end_id=end_id, seed=1)
    assert not torch.equal(other.read, model.read)
    # where the context is too short for two copies they are shorter
    copying_loss(model, length=128, rows=2)
    assert model.read.shape == (2, 64)


def corpus(held_out=True):
    files = [TextFile(f"{name}.txt", text) for name, text in zip("abcde", TEXTS, strict=True) if text]
    return Corpus(tuple(files[:2]), tuple(files[2:]) if held_out else (), {})


def test_measures_are_those_of_the_held_out_files(tokenizer):
    model = model_of(vocab_size=264)
    measures = measure(model, tokenizer, corpus())
    texts = [file.text for file in corpus().held_out]
    assert measures.bits_per_byte == bits_per_byte(model, tokenizer, texts)
    assert measures.xz_joined == xz_bits_per_byte(texts)
    sizes = [len(text) for text in texts]
    each = [xz_bits_per_byte([text]) for text in texts]
    assert measures.xz_each == pytest.approx(sum(s * e for s, e in zip(sizes, each, strict=True)) / sum(sizes))
    assert (measures.copy_first, measures.copy_second) == copying_loss(model)
    nothing = measure(model, tokenizer, corpus(held_out=False))
    assert all(math.isnan(value) for value in (nothing.bits_per_byte, nothing.xz_each, nothing.xz_joined))
    assert nothing.copy_first == measures.copy_first


def test_a_card_says_what_was_trained_on_what_how_and_how_good_it_is(data):
    model = model_of()
    measures = Measures(1.5, 3.0, 2.0, 3.4, 0.5)
    text = card(measures, model, data, SETTINGS, corpus(), command="regard train runs/mine", seconds=90.0)
    config = json.loads(text.split("| configuration | `")[1].split("`")[0])
    assert ModelConfig.from_dict(config) == model.config
    assert json.loads(text.split("| settings | `")[1].split("`")[0]) == asdict(SETTINGS)
    for line in (
        f"A decoder of {sum(p.numel() for p in model.parameters()):,} parameters.",
        "| data | 2 files, 33 bytes, 91 tokens; 25% of the rows are random tokens, repeated, which teach copying |",
        f"| digest of the data | `{corpus().digest()}`",
        "| command | `regard train runs/mine` |",
        "| trained on | 192 tokens, 2.11 epochs |",
        "| held-out bits per byte | 1.5000 |",
        "| xz -9e on the same files | 3.0000 each by itself (the model needs 0.500 of that), 2.0000 joined (0.750) |",
        "| random tokens, then again | loss 3.400, then 0.500 nats |",
        "- d.txt (5 bytes)",
        "- e.txt (106 bytes)",
    ):
        assert line in text
    assert "| data | 2 files, 33 bytes, 91 tokens |" in card(
        measures, model, Packed([[1] * 90], context_length=16, vocab_size=31), SETTINGS, corpus(), command="", seconds=0
    )


def test_a_trained_model_is_loaded_and_measured_like_any_other(tokenizer, tmp_path):
    data = Packed.from_texts(TEXTS, tokenizer, context_length=CONTEXT)
    model = model_of(vocab_size=264)
    train(model, data, SETTINGS, tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load(tmp_path)
    assert bits_per_byte(loaded.model, loaded.tokenizer, TEXTS) == bits_per_byte(model, tokenizer, TEXTS)

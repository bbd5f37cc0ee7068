"""What stands around attention sees the calls of its own block, thread and model, and no others: compiled, copied,
checkpointed, in threads, or left in any way."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cases import in_threads
from comparing import assert_close
from regard import hooks
from regard.hooks import hooked
from regard.models import Decoder
from regard.observation import Entropy
from regard.recording import Ablate, HideKey, Scale, gather, intervene, record
from small import VOCAB, decoder, text


def llama():
    transformers = pytest.importorskip("transformers")
    from regard import huggingface

    huggingface.register()
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "attn_implementation": "regard",
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def logits(model, tokens):
    output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No test leaves a hook behind, nor the compiler in another state than it was."""
    if "compile" in request.node.name and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    yield
    if hooks._active or hooks._everywhere:
        gc.collect()  # asked for only where it can matter: it walks over everything that the whole suite has made
    assert not hooks._active
    assert hooks._everywhere == []
    assert hooks._uncompiled is None


def assert_same_recording(one, other):
    assert list(one) == list(other)
    for name in one:
        assert len(one.calls(name)) == len(other.calls(name))
        assert_close(one[name].weights(), other[name].weights(), name)
        assert torch.equal(one[name].tokens, other[name].tokens)


# --- compiled models --------------------------------------------------------------------------------------------------


def in_place(model):
    model.compile(backend="eager")
    return model


def by_block(model):
    blocks = model.layers if isinstance(model, Decoder) else model.model.layers
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend="eager")
    return model


COMPILED = {
    "whole": lambda model: torch.compile(model, backend="eager"),
    "in place": in_place,
    "block by block": by_block,
}


@pytest.mark.parametrize("ran_before", [True, False])
@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("kind", [decoder, llama])
def test_a_compiled_model_is_recorded_gathered_from_and_changed_as_it_is_uncompiled(kind, how, ran_before):
    plain, tokens = kind(), text()
    compiled = COMPILED[how](copy.deepcopy(plain))
    names = ["layers.1", 1] if kind is decoder else ["model.layers.1.self_attn", 1]
    with torch.no_grad():
        if ran_before:
            assert_close(logits(compiled, tokens), logits(plain, tokens))
        with record(plain) as expected:
            logits(plain, tokens)
        with record(compiled) as recording:
            assert_close(logits(compiled, tokens), logits(plain, tokens))
        assert_same_recording(recording, expected)
        logits(compiled, tokens)
        assert len(recording.calls(0)) == 1
        with gather(compiled, Entropy(), layers=names[0]) as gathered:
            logits(compiled, tokens)
        logits(compiled, tokens)
        assert_close(gathered[names[0]][0], expected[names[0]].entropy())
        assert len(gathered.calls(0)) == 1
        changes = Ablate(names[0], 2), HideKey(0, 3, key=1)
        with intervene(plain, *changes):
            wanted = logits(plain, tokens)
        with intervene(compiled, *changes):
            assert_close(logits(compiled, tokens), wanted)
        assert not torch.allclose(logits(compiled, tokens), wanted)
        assert_close(logits(compiled, tokens), logits(plain, tokens))


@pytest.mark.parametrize("ran_before", [True, False])
def test_a_model_compiled_into_one_graph_is_recorded_and_stays_one_graph(ran_before):
    plain, tokens = decoder(), text()
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    with torch.no_grad():
        if ran_before:
            compiled(tokens)
        with record(compiled) as recording:
            compiled(tokens)
        assert_close(compiled(tokens), plain(tokens))
    assert list(recording) == ["layers.0", "layers.1", "layers.2"]
    assert len(recording.calls(0)) == 1


def test_a_compiled_step_of_training_runs_the_models_hooks():
    model, tokens = decoder(), text()
    step = torch.compile(lambda tokens: model(tokens).logsumexp(-1).sum(), backend="eager")
    before = step(tokens)
    with intervene(model, Ablate(0, 1)), record(model) as recording:
        changed = step(tokens)
        model.layers[0].attention.output.weight.grad = None
    assert not torch.allclose(before, changed)
    assert len(recording) == 3
    assert_close(step(tokens), before)


def test_the_stance_of_compiled_models_is_as_it_was():
    model, tokens = decoder(), text()
    compiled = torch.compile(model, backend="eager")
    seen = []

    def counting(graph, inputs):
        seen.append(graph)
        return graph

    with record(compiled):
        compiled(tokens)
        torch.compile(lambda x: x + 1, backend=counting)(tokens)
    assert seen == []
    torch.compile(lambda x: x + 1, backend=counting)(tokens)
    assert len(seen) == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        with record(compiled):
            compiled(tokens)
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            torch.compile(lambda x: x + 2, backend=counting)(tokens)


def test_a_model_compiled_for_the_first_time_inside_of_the_block_is_recorded_and_does_not_record_on():
    program = """
import sys, torch, regard
from regard.configuration import ModelConfig
from regard.models import Decoder
sizes = {"vocab_size": 29, "context_length": 13, "dim": 24, "layers": 2, "heads": 6, "hidden_dim": 17}
model, tokens = Decoder(ModelConfig(**sizes)), torch.randint(29, (2, 11))
assert "torch._dynamo" not in sys.modules
with regard.record(model) as recording:
    compiled = torch.compile(model, backend="eager")
    compiled(tokens), compiled(tokens)
compiled(tokens)
assert [len(recording.calls(name)) for name in recording] == [2, 2], [len(recording.calls(n)) for n in recording]
assert torch.equal(recording.tokens, tokens)
whole = torch.compile(model, backend="eager", fullgraph=True)
assert torch.allclose(whole(tokens), model(tokens), atol=1e-5)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# --- wrappers ---------------------------------------------------------------------------------------------------------


class Distributed(nn.parallel.DistributedDataParallel):
    """As the real one, without processes."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Peft(nn.Module):
    """As models of peft are: the base model inside of what changes it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self):
        return self.base_model["model"]

    def forward(self, *args, **kwargs):
        return self.get_base_model()(*args, **kwargs)


class Checkpointed(nn.Module):
    """As torch's checkpoint wrapper and FSDP hold a module."""

    def __init__(self, module):
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._checkpoint_wrapped_module(*args, **kwargs)


def inner_wrapped(model):
    for number, block in enumerate(model.layers):
        model.layers[number] = Checkpointed(block)
    return model


WRAPPED = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": Distributed,
    "peft": Peft,
    "blocks": inner_wrapped,
    "several": lambda model: torch.compile(Distributed(Peft(inner_wrapped(model))), backend="eager"),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapper_is_no_part_of_a_layers_name(how):
    plain, tokens = decoder(), text()
    wrapped = WRAPPED[how](copy.deepcopy(plain))
    with record(plain, layers=[0, "layers.2"]) as expected:
        plain(tokens)
    with record(wrapped, layers=[0, "layers.2"]) as recording:
        assert_close(wrapped(tokens), plain(tokens))
    assert_same_recording(recording, expected)
    assert recording.model == "Decoder"


def test_what_is_no_model_is_refused():
    model = decoder()
    pipeline = type("Pipeline", (), {"model": model})()
    for wrong, says in ((pipeline, "got Pipeline, pass its .model"), (len, "got builtin_function_or_method")):
        with pytest.raises(TypeError, match=rf"record: expected a model, a torch\.nn\.Module, {says}"), record(wrong):
            pass
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]
    with pytest.raises(ValueError, match="gather: DataParallel runs copies of the model in threads"):
        gather(parallel, Entropy()).__enter__()


# --- threads and copies -----------------------------------------------------------------------------------------------


def test_each_thread_has_its_own_calls():
    model, texts = decoder(), [text() for _ in range(4)]
    together, found = threading.Barrier(4), {}

    def run(number):
        with torch.no_grad(), record(model) as recording:
            for _ in range(5):
                together.wait()
                model(texts[number])
        found[number] = recording

    in_threads(run, 4)
    for number, tokens in enumerate(texts):
        with record(model) as expected:
            model(tokens)
        assert [len(found[number].calls(name)) for name in found[number]] == [5] * 3
        assert all(torch.equal(call.tokens, tokens) for call in found[number].calls(2))
        assert_close(found[number][2].weights(), expected[2].weights())


def test_a_thread_is_not_changed_by_what_another_one_intervenes_in():
    model, tokens = decoder(), text()
    plain = model(tokens)
    with ThreadPoolExecutor(1) as pool, intervene(model, Ablate(0, 1)):
        assert torch.equal(pool.submit(model, tokens).result(), plain)
        assert not torch.allclose(model(tokens), plain)


BLOCKS = {
    "record": record,
    "gather": lambda model: gather(model, Entropy()),
    "intervene": lambda model: intervene(model, Ablate(0, 1)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_whose_model_ran_in_another_thread_alone_says_so(name):
    model = decoder()
    with (
        pytest.raises(ValueError, match=f"{name}: .* of Decoder ran in another thread than the with block"),
        ThreadPoolExecutor(1) as pool,
        BLOCKS[name](model),
    ):
        pool.submit(model, text()).result()


def test_a_thread_that_is_started_in_the_context_of_the_block_is_recorded():
    import contextvars

    model, tokens = decoder(), text()
    with record(model) as recording, ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.copy_context().run, model, tokens).result()
    assert torch.equal(recording.tokens, tokens)


@pytest.mark.parametrize("kind", [decoder, llama])
def test_a_copy_of_a_recorded_model_is_another_model(kind):
    model, tokens = kind(), text()
    with record(model) as recording:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        copies.append(torch.load(stored, weights_only=False))
        for other in copies:
            logits(other, tokens)
        assert len(recording) == 0
        logits(model, tokens)
    for other in copies:
        logits(other, tokens)
        with record(other) as own:
            logits(other, tokens)
        assert_same_recording(own, recording)
    assert [len(recording.calls(name)) for name in recording] == [1] * 3


# --- the ways out -----------------------------------------------------------------------------------------------------


def test_blocks_that_are_left_in_another_order_than_they_were_entered():
    model, tokens = decoder(), text()

    def stream():
        with record(model) as recording:
            for _ in range(2):
                model(tokens)
                yield recording

    first, second = stream(), stream()
    one, other = next(first), next(second)
    first.close()
    model(tokens)
    next(second)
    second.close()
    assert len(one.calls(0)) == 2  # its own, and the second one's first, which ran inside of it
    assert len(other.calls(0)) == 3
    model(tokens)
    assert len(other.calls(0)) == 3


def test_a_block_that_is_left_in_another_thread_is_closed():
    model, tokens = decoder(), text()

    def stream():
        with record(model) as recording:
            model(tokens)
            yield recording

    running = stream()
    recording = next(running)
    thread = threading.Thread(target=running.close)
    thread.start()
    thread.join()
    model(tokens)
    assert len(recording.calls(0)) == 1


def test_a_block_that_nobody_leaves_ends_with_its_generator():
    model, tokens = decoder(), text()
    block = record(model)
    recording = block.__enter__()
    model(tokens)
    del block
    gc.collect()
    model(tokens)
    assert len(recording.calls(0)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("where", ["inside", "entering"])
def test_nothing_is_left_after_any_error(where, error, monkeypatch):
    model, tokens = decoder(), text()

    def fail(*_):
        raise error

    if where == "entering":
        monkeypatch.setattr(hooks, "_opened", fail)
    with pytest.raises(error), record(model):
        fail()
    monkeypatch.undo()
    assert hooks._blocks.get() == ()
    with record(model) as recording:
        model(tokens)
    assert len(recording.calls(0)) == 1


def test_a_recording_that_is_over_is_held_by_nobody():
    model, tokens = decoder(), text()
    with record(model) as recording:
        model(tokens)
    gone = weakref.ref(recording)
    del recording
    gc.collect()
    assert gone() is None


def test_a_plain_call_asks_for_nothing_but_whether_there_is_a_hook(monkeypatch):
    model, tokens = decoder(), text()
    monkeypatch.setattr(hooks, "_through_hooks", None)
    model(tokens)
    with pytest.raises(TypeError), record(model):
        model(tokens)


# --- activation checkpointing -----------------------------------------------------------------------------------------


class Saving(nn.Module):
    """A model of regard whose blocks run again in the backward pass."""

    def __init__(self, model, *, reentrant, nested=False):
        super().__init__()
        self.model, self.reentrant, self.nested = model, reentrant, nested

    def forward(self, tokens):
        x = self.model.embedding(tokens)
        for block in self.model.layers:
            run = block
            if self.nested:
                run = lambda x, block=block: checkpoint(block, x, use_reentrant=self.reentrant)  # noqa: E731
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.model.logits(x if self.model.norm is None else self.model.norm(x))


class Plain(Saving):
    def forward(self, tokens):
        x = self.model.embedding(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.model.logits(x if self.model.norm is None else self.model.norm(x))


def assert_same_gradients(model, other):
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert any(float(theirs.grad.abs().sum()) > 0 for _, theirs in pairs if theirs.grad is not None)
    for mine, theirs in pairs:
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_statistics_have_their_gradient_under_checkpointing(outside, nested):
    model, tokens = decoder(), text()
    models = Plain(copy.deepcopy(model), reentrant=False), Saving(model, reentrant=False, nested=nested)

    def loss(output, gathered):
        return output.logsumexp(-1).sum() + sum(entropy.square().sum() for (entropy,) in gathered.values())

    found = []
    for each in models:
        with gather(each, Entropy()) as gathered:
            output = each(tokens)
            if not outside:
                loss(output, gathered).backward()
        if outside:
            loss(output, gathered).backward()
        found.append(gathered)
        assert [len(gathered.calls(name)) for name in gathered] == [1] * 3
        del output
    assert_close(found[1][2][0], found[0][2][0])
    assert_same_gradients(models[1], models[0])
    assert any(p.grad is not None for p in models[1].model.layers[0].attention.query.parameters())


@pytest.mark.parametrize("grad_of", ["the statistic alone", "some layers"])
def test_parts_of_a_penalty_have_their_gradient_under_checkpointing(grad_of):
    model, tokens = decoder(), text()
    models = Plain(copy.deepcopy(model), reentrant=False), Saving(model, reentrant=False)
    for each in models:
        layers = None if grad_of == "the statistic alone" else ["model.layers.0", "model.layers.2"]
        with gather(each, Entropy(), layers=layers) as gathered:
            each(tokens)
        sum(entropy.square().sum() for (entropy,) in gathered.values()).backward()
    assert_same_gradients(models[1], models[0])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_statistics_that_would_have_no_gradient_are_refused_in_the_forward_pass():
    model, tokens = decoder(), text()
    saving = Saving(model, reentrant=True)
    with (
        pytest.raises(RuntimeError, match=r"gather: the statistics of model\.layers\.0 .*use_reentrant=False"),
        gather(saving, Entropy()),
    ):
        saving(tokens)
    with torch.no_grad(), gather(saving, Entropy()) as gathered:  # where nobody wants one, there is none to lose
        saving(tokens)
    assert len(gathered) == 3
    assert len(saving(tokens).sum().backward() or gathered.calls(0)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("outside", [False, True])
def test_a_changed_head_is_changed_again_in_the_backward_pass(outside, nested, reentrant):
    model, tokens = decoder(), text()
    models = Plain(copy.deepcopy(model), reentrant=False), Saving(model, reentrant=reentrant, nested=nested)
    changes = HideKey(0, 3, key=1), Scale(1, 2, 0.3), Ablate(2, 0), HideKey(2, 1, key=0)
    for each in models:
        with intervene(each, *changes):
            output = each(tokens)
            if not outside:
                output.logsumexp(-1).sum().backward()
        if outside:
            with intervene(each, Ablate(0, 3)):  # a block that has nothing to do with it
                each(tokens)
                output.logsumexp(-1).sum().backward()
        del output
    assert_same_gradients(models[1], models[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_call_that_is_repeated_for_the_backward_pass_is_recorded_once(reentrant):
    model, tokens = decoder(), text()
    saving = Saving(model, reentrant=reentrant)
    before = saving(tokens)
    with record(saving) as recording:
        loss = saving(tokens).sum()
        before.sum().backward()
        loss.backward()
    assert [len(recording.calls(name)) for name in recording] == [1] * 3
    with record(model) as expected:
        model(tokens)
    assert_close(recording[2].weights(), expected[2].weights())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_in_another_thread_runs_what_its_forward_pass_ran(reentrant):
    model, tokens = decoder(), text()
    models = Plain(copy.deepcopy(model), reentrant=False), Saving(model, reentrant=reentrant)
    for each in models:
        with intervene(each, HideKey(0, 3, key=1)), record(each) as recording:
            loss = each(tokens).logsumexp(-1).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert len(recording.calls(0)) == 1
        del loss
    assert_same_gradients(models[1], models[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_model_of_transformers_has_the_gradients_that_it_has_without(reentrant):
    model, tokens = llama().train(), text()
    other = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it has another name from transformers 6 on
        other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for each in (model, other):
        with intervene(each, Scale(1, 2, 0.3), HideKey(0, 1, key=0)), record(each) as recording:
            loss = each(tokens, labels=tokens).loss
        loss.backward()
        assert [len(recording.calls(name)) for name in recording] == [1] * 3
        del loss
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, tolerance=1e-5)


# --- the seam ---------------------------------------------------------------------------------------------------------


def test_inner_blocks_stand_outside_of_outer_ones_but_innermost_ones_next_to_attention():
    model, order = decoder(layers=1), []
    layer = model.layers[0].attention

    def named(name):
        def hook(module, attend):
            assert module is layer

            def asked(heads, scoring):
                order.append(name)
                return attend(heads, scoring)

            return asked

        return hook

    with (
        hooked([layer], named("outer innermost"), innermost=True),
        hooked([layer], named("outer")),
        hooked([layer], named("inner innermost"), innermost=True),
        hooked([layer], named("inner")),
    ):
        model(text())
    assert order == ["inner", "outer", "outer innermost", "inner innermost"]

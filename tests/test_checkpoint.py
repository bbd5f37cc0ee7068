"""Models on disk: what is written is read again, whatever happens while it is written, and damage is named."""

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regard import storage
from regard.configuration import ModelConfig
from regard.models import Decoder
from regard.training import checkpoint
from regard.training.checkpoint import (
    PRETRAINED,
    bundled,
    find,
    load,
    load_progress,
    progress_header,
    read,
    save_model,
    save_progress,
)
from regard.training.text import Tokenizer, train_tokenizer


def config(**changes):
    return ModelConfig(
        **{"vocab_size": 260, "context_length": 8, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 17} | changes
    )


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(["the cat, the hat"], vocab_size=260))


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A folder with a whole model."""
    model = Decoder(config())
    save_model(tmp_path, model)
    tokenizer.save(tmp_path / "tokenizer.json")
    return tmp_path


def assert_same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_the_comparison_of_weights_fails_on_a_wrong_value():
    one, other = Decoder(config()), Decoder(config())
    other.load_state_dict(one.state_dict())
    assert_same_weights(one, other)
    with torch.no_grad():
        other.layers[1].feed_forward.gate.weight[3, 4] += 1e-6
    with pytest.raises(AssertionError, match=r"layers\.1\.feed_forward\.gate\.weight"):
        assert_same_weights(one, other)


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "bias": True, "norm": "layer"},
        {"positions": "learned"},
        {"positions": "sinusoidal"},
        {"positions": "alibi", "kv_heads": 1, "window": 3},
        {"rotary_scaling": {"kind": "linear", "factor": 2.0}, "logit_softcap": 30.0},
    ],
    ids=str,
)
def test_a_saved_model_is_the_same_model_again(changes, tmp_path, tokenizer):
    model = Decoder(config(**changes))
    save_model(tmp_path, model)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = load(tmp_path)
    assert loaded.model.config == model.config
    assert not loaded.model.training
    assert loaded.folder == tmp_path
    assert_same_weights(loaded.model, model)
    assert (loaded.model.logits.weight is loaded.model.embedding.weight) is model.config.tied
    tokens = torch.randint(260, (2, 8))
    assert torch.equal(loaded.model(tokens), model.eval()(tokens))
    assert loaded.tokenizer.encode("the cat") == tokenizer.encode("the cat")
    assert load(str(tmp_path)).model.config == model.config


def test_a_tied_weight_is_stored_once(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "embedding.weight" in names
    assert "logits.weight" not in names


def test_weights_may_be_stored_in_half_precision_and_are_read_into_float32(tmp_path, tokenizer):
    model = Decoder(config())
    save_model(tmp_path, model, dtype=torch.float16)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert {tensor.dtype for tensor in read(tmp_path / "model.safetensors")[1].values()} == {torch.float16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the model itself stays as it was"
    expected = Decoder(model.config)
    expected.load_state_dict({name: tensor.half().float() for name, tensor in model.state_dict().items()})
    assert_same_weights(load(tmp_path).model, expected)


def test_names_that_lead_nowhere_are_answered_with_those_that_do(tmp_path, monkeypatch, folder):
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path / "none")
    assert bundled() == []
    with pytest.raises(ValueError, match=r"no model 'nope'; expected a name \(in the package: none\) or a folder"):
        load("nope")
    library = tmp_path / "library"
    shutil.copytree(folder, library / "stories", ignore=shutil.ignore_patterns("library"))
    (library / "empty").mkdir()
    monkeypatch.setattr(checkpoint, "PRETRAINED", library)
    assert bundled() == ["stories"]
    assert find("stories") == library / "stories"
    assert load("stories").model.config == config()
    with pytest.raises(ValueError, match=r"no model 'nope'; expected a name \(in the package: stories\)"):
        find("nope")
    with pytest.raises(ValueError, match="no model"):
        load(library / "empty")


def test_models_of_the_package_lie_beside_its_modules():
    assert PRETRAINED.name == "pretrained"
    assert (PRETRAINED.parent / "models.py").is_file()


# --- damage -----------------------------------------------------------------------------------------------------------


def rewritten(path, change):
    """The file again, after `change(metadata, tensors)`."""
    metadata, tensors = read(path)
    change(metadata, tensors)
    save_file(tensors, path, metadata)


def foreign(metadata, tensors):
    metadata.clear()
    metadata["format"] = "pt"


def without_configuration(metadata, tensors):
    del metadata["config"]


def broken_configuration(metadata, tensors):
    metadata["config"] = metadata["config"][:-5]


def newer_configuration(metadata, tensors):
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "experts": 8})


def impossible_configuration(metadata, tensors):
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "heads": 5})


def half_a_configuration(metadata, tensors):
    metadata["config"] = json.dumps({"dim": 12})


def configuration_of_another_kind(metadata, tensors):
    metadata["config"] = json.dumps([1, 2])


def another_size(metadata, tensors):
    metadata["config"] = json.dumps({**json.loads(metadata["config"]), "hidden_dim": 16})


def missing_weights(metadata, tensors):
    del tensors["norm.weight"]


def missing_embedding(metadata, tensors):
    del tensors["embedding.weight"]


def weights_of_something_else(metadata, tensors):
    tensors["logits.bias"] = torch.zeros(260)


DAMAGE = {
    foreign: r"not a regard model \(format 'pt', expected 'regard.decoder.1' or .*\)",
    without_configuration: "no usable configuration in its header: 'config'",
    broken_configuration: "no usable configuration in its header: ",
    newer_configuration: "no usable configuration in its header: ModelConfig: unknown fields experts",
    impossible_configuration: "no usable configuration in its header: ModelConfig: heads must divide dim",
    half_a_configuration: "no usable configuration in its header: .*vocab_size",
    configuration_of_another_kind: "no usable configuration in its header: ",
    another_size: "not this model's; missing, too many or of another size: layers.0.feed_forward.gate.weight, .*, ...$",
    missing_weights: "missing, too many or of another size: norm.weight$",
    missing_embedding: "missing, too many or of another size: embedding.weight$",
    weights_of_something_else: "missing, too many or of another size: logits.bias$",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_file_that_is_not_a_whole_model_is_named_with_what_is_wrong(damage, folder):
    path = folder / "model.safetensors"
    rewritten(path, damage)
    with pytest.raises(ValueError, match=f"(?s)^{path}: .*{DAMAGE[damage]}"):
        load(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(share, folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=f"{path}: not a whole safetensors file"):
        load(folder)


def test_a_file_of_something_else_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(b"not tensors at all, but long enough to hold a header " * 9)
    with pytest.raises(ValueError, match=f"{path}: not a whole safetensors file"):
        load(folder)


def test_a_tokenizer_that_is_missing_or_of_another_model_is_named(folder):
    path = folder / "tokenizer.json"
    Tokenizer(train_tokenizer(["the cat, the hat, the bat"], vocab_size=263)).save(path)
    with pytest.raises(ValueError, match=f"{path}: has 263 tokens, the model beside it 260"):
        load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path}: there is no such file"):
        load(folder)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_leaves_the_old_one(folder, monkeypatch):
    path = folder / "model.safetensors"
    before = path.read_bytes()

    def interrupted(tensor, file):
        file.write(b"half a f")
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(folder, Decoder(config()))
    assert path.read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]


def test_the_new_file_takes_the_place_of_the_old_one_when_it_is_whole(folder, monkeypatch):
    path = folder / "model.safetensors"
    move, whole = os.replace, []

    def watched(source, target):
        whole.append(len(read(source)[1]) > 0 and source.parent == target.parent)
        move(source, target)

    monkeypatch.setattr(os, "replace", watched)
    save_model(folder, Decoder(config(layers=1)))
    assert whole == [True]
    assert load(folder).model.config.layers == 1
    assert path.is_file()


def test_folders_are_made_and_any_tensor_can_be_written(tmp_path):
    path = tmp_path / "a" / "b" / "x.safetensors"
    weight = torch.randn(3, 4, requires_grad=True)
    storage.save(path, {"turned": weight.T, "part": weight[:, 1]}, {"said": "yes"})
    metadata, tensors = read(path)
    assert metadata == {"said": "yes"}
    assert torch.equal(tensors["turned"], weight.T)
    assert torch.equal(tensors["part"], weight[:, 1])


# --- progress ---------------------------------------------------------------------------------------------------------


def optimizers_of(model):
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW([model.embedding.weight], lr=0.1)]


def step(model, optimizers):
    model.zero_grad()
    model(torch.tensor([[1, 2, 3]])).logsumexp(-1).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("tied", [True, False])
def test_progress_holds_all_that_the_next_step_needs(tied, tmp_path):
    model = Decoder(config(tied=tied))
    optimizers = optimizers_of(model)
    step(model, optimizers)
    step(model, optimizers)
    path = tmp_path / "progress.safetensors"
    save_progress(path, model, optimizers, {"step": 2, "settings": {"rate": 0.1}})
    again = Decoder(config(tied=tied))
    optimizers_again = optimizers_of(again)
    load_progress(path, again, optimizers_again)
    assert_same_weights(again, model)
    step(model, optimizers)
    step(again, optimizers_again)
    assert_same_weights(again, model)
    assert progress_header(path) == {"step": 2, "settings": {"rate": 0.1}}


def test_numbers_in_an_optimizers_state_are_kept_beside_its_tensors(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1

    model = Decoder(config())
    (optimizer,) = optimizers = [Counting(model.parameters(), lr=0.1)]
    optimizer.step()
    optimizer.step()
    save_progress(tmp_path / "progress.safetensors", model, optimizers, {})
    other = [Counting(model.parameters(), lr=0.1)]
    load_progress(tmp_path / "progress.safetensors", model, other)
    assert {state["count"] for state in other[0].state.values()} == {2}
    assert len(other[0].state) == len(list(model.parameters()))


def test_progress_of_another_model_is_refused(tmp_path):
    model = Decoder(config())
    path = tmp_path / "progress.safetensors"
    save_progress(path, model, optimizers_of(model), {})
    other = Decoder(config(layers=1))
    with pytest.raises(ValueError, match=f"{path}: its weights are not this model's; .*: layers.1"):
        load_progress(path, other, optimizers_of(other))


def test_a_run_that_is_not_there_or_not_a_run_is_named(folder):
    path = folder / "progress.safetensors"
    with pytest.raises(ValueError, match=f"{path}: there is no such file, so no training run to go on with"):
        progress_header(path)
    for not_a_run in (folder / "model.safetensors", folder / "tokenizer.json"):
        with pytest.raises(ValueError, match=f"{not_a_run}: not a training run that can be resumed"):
            progress_header(not_a_run)

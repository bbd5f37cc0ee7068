"""A training that cannot fit into the machine is refused before any work; what is refused could not have run."""

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from regard.configuration import ModelConfig
from regard.models import Decoder
from regard.training import memory
from regard.training.data import Packed, next_token_loss
from regard.training.loop import make_optimizers
from regard.training.memory import activations, available_memory, needed_memory
from regard.training.run import begin, resume
from regard.training.settings import Recipe, Settings
from regard.training.text import train_tokenizer

TEXT = "the cat sat on the mat because the cat was tired, and the mat was warm\n"
MOST = 5_000_000 * 1024
"""Bytes of addresses that a refused training may take, as nobody can know that it is refused."""


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"{number}: {TEXT}" * 5)
    return folder


ABSURD = {
    "--batch-size": 100_000_000,
    "--context-length": 100_000_000,
    "--dim": 1_000_008,
    "--hidden-dim": 1_000_000_000,
    "--layers": 10_000_000,
}

ASK = """
import sys
from regard.cli import main
folder, texts, *options = sys.argv[1:]
for option in options:
    sys.argv = ["regard", "train", folder, "--data", texts, *option.split("=")]
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def limited(most: int) -> Callable[[], None]:
    """Lets a child process take so many bytes of addresses."""
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))


def test_an_absurd_size_is_refused_by_its_name_before_any_work(texts: Path) -> None:
    folder = texts.parent / "run"
    options = [f"{option}={value}" for option, value in ABSURD.items()]
    done = subprocess.run(
        [sys.executable, "-c", ASK, folder, texts, *options],
        capture_output=True, text=True, check=False, timeout=120, preexec_fn=limited(MOST),
    )  # fmt: skip
    assert done.stdout.split() == ["2"] * len(ABSURD), done.stderr
    for (option, value), said in zip(ABSURD.items(), done.stderr.splitlines(), strict=True):
        assert said.startswith(f"regard: {option}: {value:,} is too much for this machine: a step takes ")
        assert " GiB of memory or more, " in said
        assert "GiB is available; usual is " in said
    assert not folder.exists()


def test_a_vocabulary_that_no_text_can_give_is_refused_before_the_library_takes_memory_for_it() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at most 1,048,576, got 1,000,000,000"):
        Recipe(vocab_size=10**9)
    with pytest.raises(ValueError, match="vocab_size: expected at most 1,048,576, got 1,000,000,000"):
        train_tokenizer([TEXT], 10**9)


def test_a_vocabulary_counts_as_what_the_texts_give(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(
        data=str(texts), steps=1, vocab_size=10**6, context_length=8, dim=8, layers=1, heads=2, precision="no"
    )
    begin(tmp_path / "run", recipe)
    room = needed_memory(ModelConfig(vocab_size=257, context_length=8, dim=8, layers=1, heads=2, hidden_dim=24), 8)
    monkeypatch.setattr(memory, "available_memory", lambda: room)
    with pytest.raises(ValueError, match="is too much for this machine"):  # found out when it has been learnt
        begin(tmp_path / "other", recipe)


def test_a_run_that_goes_on_where_there_is_less_memory_is_refused_too(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 260, "context_length": 8, "dim": 8, "layers": 1, "heads": 2}
    begin(tmp_path / "run", Recipe(data=str(texts), steps=1, precision="no", **sizes))
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"is too much for this machine: .* 0 MiB is available"):
        resume(tmp_path / "run", steps=2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(("dim", "vocab_size"), [(24, 1000), (96, 100)])
def test_what_a_step_takes_is_never_less_than_was_estimated_and_not_many_times_more(
    dim: int, vocab_size: int, precision: str
) -> None:
    config = ModelConfig(vocab_size=vocab_size, context_length=64, dim=dim, layers=3, heads=3, hidden_dim=3 * dim)
    model = Decoder(config)
    data = Packed([[1 + i % 50 for i in range(2000)]], context_length=64, vocab_size=vocab_size)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        loss = next_token_loss(model, data.batch(0, 4))
    taken = sum(size for place, size in kept.items() if place not in weights)
    taken += 4 * 4 * 64 * vocab_size  # the logits, which are there until their gradient is
    assert activations(config, 4 * 64) <= taken <= 8 * activations(config, 4 * 64)
    loss.backward()
    optimizers = make_optimizers(model, Settings(steps=1))
    for optimizer in optimizers:
        optimizer.step()
    states = [t for o in optimizers for state in o.state.values() for t in state.values() if torch.is_tensor(t)]
    numbers = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    fixed = needed_memory(config, 4) - activations(config, 4 * 64)
    assert fixed <= sum(tensor.nbytes for tensor in numbers) <= 1.5 * fixed


def test_memory_that_is_available_is_no_more_than_the_process_may_take() -> None:
    most = 4 * 2**30
    program = "from regard.training.memory import available_memory; print(available_memory())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        preexec_fn=limited(most),
    )  # fmt: skip
    assert 0 < int(done.stdout) < most
    room = available_memory()
    assert room is None or room > 0

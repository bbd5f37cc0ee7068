"""The core is torch and safetensors: without numpy everything works that does not draw, and nobody hears of numpy."""

import subprocess
import sys
from pathlib import Path

import pytest

import regard

# as if it were not installed, for torch too
HIDDEN = """
import sys
from importlib.machinery import PathFinder

class WithoutNumpy(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] == "numpy" else PathFinder.find_spec(name, path, target)

sys.meta_path = [WithoutNumpy if finder is PathFinder else finder for finder in sys.meta_path]
"""

MASKS = (
    "Causal() & (Window(32) | Prefix(4))", "Causal() & Window(64)", "Causal() | Prefix(100)", "Causal() & Chunk(96)",
    "Causal() & Strided(7)", "Causal() & Document.from_lengths([length // 2, length - length // 2])",
    "Padding(torch.tensor([length - 50]))", "~Window(30)", "Dense(torch.rand(length, length) > 0.5)",
    "Where(lambda batch, head, query, key: (query - key) % 3 == 0)",
)  # fmt: skip

ATTEND = """
import regard, torch
from regard import *
for length in (600, 2048):
    for mask in ({masks}):
        query, key, value = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        regard.attention(query, key, value, mask=mask).sum().backward()
        assert query.grad.isfinite().all()
"""

WHY = ["No module named 'numpy'", "_ARRAY_API not found"]

USE = """
from regard.observation import Entropy
import regard, torch
from regard import *
model = Decoder(ModelConfig.preset("gpt2", layers=2, dim=24, heads=3, hidden_dim=48, vocab_size=50, context_length=64))
tokens = torch.randint(50, (1, 40))
with record(model) as recording, gather(model, Entropy()) as gathered:
    model(tokens)
recording["layers.1"].entropy(), recording["layers.1"].top(3), recording["layers.1"].image(size=8)
recording.save("kept.safetensors")
load_recording("kept.safetensors")["layers.0"].weights()
with intervene(model, Ablate("layers.0", 1)):
    model(tokens)
list(generate(model, [1, 2, 3], 5))
print(steps(MultiHeadAttention(4, 2), torch.randn(1, 3, 4)))
print(plan(*torch.randn(3, 1, 2, 600, 16), mask=Causal() & (Window(32) | Prefix(4))))
"""


def without_numpy(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDDEN + program], capture_output=True, text=True, cwd=folder)


def test_every_mask_works_forward_and_backward_at_lengths_that_are_cut(tmp_path: Path) -> None:
    done = without_numpy(ATTEND.format(masks=", ".join(MASKS)), tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def test_models_recordings_files_and_text_work_without_a_word_on_standard_error(tmp_path: Path) -> None:
    done = without_numpy(USE, tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("command", ["--help", "plan --length 600 --mask 'Causal() & (Window(32) | Prefix(4))'",
                                     "look 'the cat sat on the mat'", "generate 'def main(' --count 3"])  # fmt: skip
def test_commands_say_nothing_of_numpy(command: str, tmp_path: Path) -> None:
    program = f"import shlex; sys.argv = ['regard', *shlex.split({command!r})]\nfrom regard.cli import main; main()"
    done = without_numpy(program, tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)


def test_what_torch_says_of_a_numpy_that_is_broken_is_still_heard(tmp_path: Path) -> None:
    told = "Failed to initialize NumPy: {}"
    # from Python 3.13 on, a warning shows its line of the program, too
    program = f"import regard, sys, warnings\nfor why in sys.argv[1:]: warnings.warn({told!r}.format(why))"
    command = [sys.executable, "-c", program, *WHY]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert [why in done.stderr for why in WHY] == [False, True]


def test_the_source_asks_for_no_numpy() -> None:
    for path in Path(regard.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert ".numpy()" not in line, f"{path}:{number}"
            assert "import numpy" not in line, f"{path}:{number}"

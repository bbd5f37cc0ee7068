"""The package as a user installs it: a wheel, bare and with each extra alone, in environments that hold nothing else.

What the README tells to type and to write runs there. An environment is a fresh one of venv's, into which pip installs
the wheel under constraints.txt. What the environment of the tests holds of its requirements, torch above all, is not
downloaded and unpacked again but linked in, with what it requires in turn and nothing more; pip checks that, and
installs what is missing. Environments are kept in .clean until pyproject.toml or constraints.txt changes; the wheel in
them is of the source as it is now.
"""

import doctest
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra not in ("all", "dev", "clients")]

NO_NETWORK = (
    r"NewConnectionError|NameResolutionError|Name or service not known|Temporary failure|Network is unreachable"
)

COMMANDS = re.findall(r"^\.venv/bin/regard (.*)$", README, re.M)

ATTEND = """
import regard, torch
from regard import Causal, Prefix, Window
for length in (600, 4096):
    query, key, value = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
    regard.attention(query, key, value, mask=Causal() & (Window(32) | Prefix(4))).sum().backward()
    assert query.grad.isfinite().all()
"""

USES = {
    "cli": "import regard; assert regard.load('stdlib').model.config.layers == 6",
    "train": """
import regard, torch
from pathlib import Path
from regard.training import data, loop, text
tokenizer = text.Tokenizer(text.train_tokenizer(["the cat sat on the mat\\n" * 99], 260))
rows = data.Packed.from_texts(["the cat sat on the mat\\n" * 99], tokenizer, context_length=16, seed=0)
model = regard.Decoder(regard.ModelConfig(vocab_size=260, context_length=16, dim=16, layers=1, heads=2))
loop.train(model, rows, loop.Settings(steps=2, batch_size=2, precision="no"), Path("run"))
assert regard.plan(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
""",
    "hf": """
import regard, torch
from transformers import AutoModelForCausalLM, LlamaConfig
regard.huggingface.register()
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
models = [AutoModelForCausalLM.from_config(config, attn_implementation=name).eval() for name in ("regard", "eager")]
models[0].load_state_dict(models[1].state_dict())
tokens = torch.randint(50, (1, 40))
torch.testing.assert_close(*(model(tokens).logits for model in models))
""",
    "plot": """
import regard, torch
regard.plots.heat_map(regard.observe(*torch.randn(2, 1, 1, 9, 4))).figure.savefig("seen.png")
""",
    "view": """
import regard, torch
from regard.viewer.run import Run, of_observation
from regard.viewer.server import Server
from regard.viewer.session import Session
seen = regard.observe(*torch.randn(2, 1, 1, 9, 4))
server = Server(Session([Run("numbers", "random", of_observation(seen))]))
server.start()
from urllib.request import Request, urlopen
asked = Request(server.address + "api/info", b"{}", {"content-type": "application/json"})
assert b'"query_len":9' in urlopen(asked).read()
server.close()
""",
    "notebook": """
import regard, torch
model = regard.Decoder(regard.ModelConfig.preset("gpt2", layers=1, dim=8, heads=2, vocab_size=30))
with regard.record(model) as recording:
    model(torch.tensor([[3, 4, 5]]))
assert "render" in recording.view()._esm
""",
    "tensorboard": """
from contextlib import closing
from pathlib import Path
from regard.training.board import Board
from regard.training.report import Report
with closing(Board(Path.cwd(), 0)) as board:
    board.step(Report(1, 2.0, 0.1, 1.0, 100.0, 3.0))
assert next(Path("tensorboard").iterdir()).stat().st_size > 100
""",
    "bench": """
import regard
rows = regard.bench.chosen("layer, full*float32", 8)[:1]
assert "x-transformers" in regard.bench.run(rows, repeats=1, shrink=8, quick=True)["rows"][0]["peers"]
""",
}
"""What each extra is for, in a few lines."""


def ask(command: list[str | Path], folder: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """A process that knows of no other code than that of its own environment."""
    unknown = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")  # what one process compiled is read by the next
    known = {name: value for name, value in os.environ.items() if name not in unknown} | more
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder, env=known)


def pip(*arguments: str | Path) -> None:
    done = ask([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])
    if done.returncode:
        if re.search(NO_NETWORK, done.stderr + done.stdout):
            pytest.skip("no package index can be reached, which a clean environment is installed from")
        pytest.fail(f"pip {shlex.join(map(str, arguments))}\n{done.stdout}{done.stderr}")


def required(name: str, extras: frozenset[str]) -> set[str]:
    """What is installed here of a distribution with some extras and of all that it requires."""
    found, ahead = set(), {(name, extras)}
    while ahead - found:
        name, extras = one = (ahead - found).pop()
        found.add(one)
        try:
            requires = map(Requirement, distribution(name).requires or [])
        except PackageNotFoundError:
            ahead.discard(one)  # of another platform, or of an extra that the tests do without
            continue
        for asked in requires:
            if not asked.marker or any(asked.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                ahead.add((asked.name, frozenset(asked.extras)))
    return {name for name, _ in ahead}


def link(name: str, site: Path) -> None:
    """Makes an installed distribution known in another environment."""
    installed = distribution(name)
    for top in {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (site / top).exists():
            (site / top).symlink_to(installed.locate_file(top))


@pytest.fixture(scope="module")
def wheel() -> Path:
    kept = PROJECT, (ROOT / "constraints.txt").read_text(), sys.version, distribution("torch").version
    folder = ROOT / ".clean" / hashlib.sha256(repr(kept).encode()).hexdigest()[:16]
    for other in (ROOT / ".clean").glob("*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


def environment(wheel: Path, extras: str) -> Path:
    """The programs of a clean environment with the wheel and some extras."""
    folder = wheel.parent / (extras.replace(",", "-") or "bare")
    python = folder / "bin" / "python"
    # most of what is installed is never imported here, and so need not be compiled
    install: list[str | Path] = ["--python", python, "install", "--quiet", "--no-compile"]
    install += ["--constraint", ROOT / "constraints.txt"]
    if (folder / "whole").exists():
        pip(*install, "--no-deps", "--force-reinstall", wheel)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, symlinks=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        for name in required("regard", frozenset(extras.split(","))) - {"regard"}:
            link(name, site)
        pip(*install, f"{wheel}[{extras}]" if extras else wheel)
        (folder / "whole").touch()
    return folder / "bin"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the files that the README's commands name."""
    for name in ("README.md", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def shortened(command: str) -> list[str]:
    """A command as the README has it, with less to do where it would take minutes."""
    words = shlex.split(re.sub(r"--steps \d+", "--steps 2", command))
    return words + {"train": TINY, "bench": FEW}.get(words[0], [])


TINY = shlex.split("--vocab-size 400 --context-length 64 --dim 48 --layers 2 --batch-size 2")
FEW = shlex.split("--rows window*N=512*float32 --repeats 1")

ONE_BY_ONE = """
import contextlib, io, json, sys
from regard.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv, said, told, ended = ["regard", *command], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
    print(json.dumps([ended, told.getvalue(), said.getvalue()]))
"""


def one_by_one(programs: Path, commands: list[list[str]], folder: Path, **more: str) -> list[tuple[int, str, str]]:
    """Commands in one process, which loads torch once: how each ended, its standard output and standard error."""
    done = ask([programs / "python", "-c", ONE_BY_ONE, json.dumps(commands)], folder, **more)
    ends = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(ends) == len(commands), done.stderr
    return ends


def blocks(text: str) -> list[str]:
    """The README's examples in Python, block by block."""
    found = []
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        examples = doctest.DocTestParser().get_examples(block)
        found.append("".join(f"{example.source}" for example in examples))
    return found


def test_the_torch_that_is_asked_for_at_least_is_the_one_that_the_tests_run_with() -> None:
    (least,) = (Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch"))
    (tested,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    (bound,) = least.specifier
    assert bound.operator == ">="
    assert tested.startswith(bound.version)
    assert distribution("torch").version.split("+")[0] == tested


def test_bare_it_needs_no_numpy_and_its_commands_are_one_line(wheel: Path, desk: Path) -> None:
    programs = environment(wheel, "")
    assert ask([programs / "python", "-c", "import numpy"]).returncode == 1
    done = ask([programs / "python", "-c", ATTEND], desk)
    assert (done.stderr, done.stdout, done.returncode) == ("", "", 0)
    for command in COMMANDS:
        done = ask([programs / "regard", *shortened(command)], desk)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(r"regard: .* needs typer and rich: pip install '.*\[cli\]'.*\n", done.stderr), done.stderr


def test_the_library_of_the_readme_runs_bare_but_for_what_needs_a_tokenizer(wheel: Path, desk: Path) -> None:
    programs = environment(wheel, "")
    first, *more = blocks(README)
    assert "regard.attention(" in first
    said = []
    for end in range(1, len(more) + 2):
        done = ask([programs / "python", "-c", "".join([first, *more][:end])], desk)
        said.append(done.stderr)
    assert said[0] == ""
    for line in filter(None, said):
        assert re.search(r"\nImportError: .* needs tokenizers: pip install '.*\[cli\]'.*\n$", line), line
        assert "NumPy" not in line


def test_every_command_of_the_readme_works_after_make_look(wheel: Path, desk: Path) -> None:
    (extras,) = re.findall(r"\.\[([a-z,]+)\]'", next(line for line in MAKE_LOOK if "--editable" in line))
    programs = environment(wheel, extras)
    assert len(COMMANDS) >= 6
    first, *commands = [shortened(command) for command in COMMANDS]
    done = ask([programs / "regard", *first], desk, CXX="no-compiler", COLUMNS="80")  # as a program of its own
    ends = one_by_one(programs, commands, desk, CXX="no-compiler", COLUMNS="80")
    for command, (code, told, said) in zip(COMMANDS, [(done.returncode, done.stdout, done.stderr), *ends], strict=True):
        assert code == 0, f"{command}\n{said}"
        assert told or command.startswith("train"), command
        assert not re.search(r"numpy|Traceback|Warning", said, re.I), f"{command}\n{said}"
    done = ask([programs / "python", "-c", "".join(blocks(README))], desk)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_alone_brings_what_it_is_for(extra: str, wheel: Path, desk: Path) -> None:
    programs = environment(wheel, extra)
    done = ask([programs / "python", "-c", USES[extra]], desk, CXX="no-compiler", MPLBACKEND="agg")
    assert done.returncode == 0, done.stderr
    assert "Failed to initialize NumPy" not in done.stderr
    if extra == "bench":  # it holds cli
        return
    commands = [shortened(command) for command in COMMANDS if not command.startswith("bench")]  # which has been run
    for command, (code, _, said) in zip(commands, one_by_one(programs, commands, desk), strict=True):
        one_line = re.fullmatch(r"regard: .* needs [^:\n]+: pip install '.*\[[a-z]+\]'.*\n", said)
        assert code == 0 or (code == 2 and one_line), f"{command}\n{said}"


MAKE_LOOK = subprocess.run(["make", "-n", "-B", "look"], capture_output=True, text=True, cwd=ROOT).stdout.splitlines()


def test_make_look_tells_what_torch_takes_and_shows_its_progress() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TORCH"}
    dry = subprocess.run(["make", "-n", "-B", "look"], capture_output=True, text=True, cwd=ROOT, env=without).stdout
    (torch,) = (line for line in dry.splitlines() if line.endswith(" torch"))
    assert "--quiet" not in torch
    assert "index-url" not in torch
    assert "about 4.7 GB" in dry
    assert "make look TORCH=cpu" in dry


def test_torch_for_the_cpu_comes_from_its_own_index_and_nothing_else_does() -> None:
    dry = subprocess.run(["make", "-n", "-B", "look", "TORCH=cpu"], capture_output=True, text=True, cwd=ROOT).stdout
    from_there = [line for line in dry.splitlines() if "download.pytorch.org/whl/cpu" in line]
    assert len(from_there) == 1
    assert from_there[0].endswith("--constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch")
    wrong = subprocess.run(["make", "-n", "look", "TORCH=gpu"], capture_output=True, text=True, cwd=ROOT)
    assert "TORCH=gpu: expected cpu" in wrong.stderr

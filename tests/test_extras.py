"""What is missing is told in one line, before any work, with a command that installs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard import __version__, extras

ROOT = Path(__file__).parent.parent

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {missing} else PathFinder.find_spec(name, path, target)

sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["regard", *{arguments}]
from regard.cli import main
main()
"""


def run(*arguments: str, missing: tuple[str, ...] = (), cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (("look", "the cat sat"), "typer", "cli"),
        (("--help",), "rich", "cli"),
        (("look", "the cat sat"), "tokenizers", "cli"),
        (("generate", "the cat sat"), "tokenizers", "cli"),
        (("train", "runs/mine", "--data", "letters.txt"), "tokenizers", "train"),
    ],
)
def test_a_command_without_its_extra_says_so_in_one_line_before_any_work(
    arguments: tuple[str, ...], missing: str, extra: str, tmp_path: Path
) -> None:
    (tmp_path / "letters.txt").write_text("a letter\n" * 200)
    done = run(*arguments, missing=(missing,), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"needs {missing}: pip install '.[{extra}]' (in {ROOT})\n")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters.txt"]


def told_by(monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict[str, object] | None) -> str:
    """The command of a regard that was installed from somewhere."""

    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    monkeypatch.setattr(extras, "__file__", str(folder / "lib" / "site-packages" / "regard" / "extras.py"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    return extras.how("plot")


def test_the_command_installs_from_where_regard_came(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = tmp_path / "regard 1.whl"
    wheel.touch()
    assert told_by(monkeypatch, tmp_path, None) == "pip install 'regard[plot]'"
    folder = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert told_by(monkeypatch, tmp_path, folder) == f"pip install '.[plot]' (in {tmp_path})"
    assert told_by(monkeypatch, tmp_path, {"url": wheel.as_uri()}) == f"pip install '{wheel}[plot]'"
    git = {"url": "https://example.org/regard", "vcs_info": {"vcs": "git", "commit_id": "0"}}
    assert told_by(monkeypatch, tmp_path, git) == "pip install 'regard[plot] @ git+https://example.org/regard'"
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}
    assert told_by(monkeypatch, tmp_path, gone) == "pip install '.[plot]' (in the folder of regard's source)"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"], ["look", "-h"], []])
def test_what_needs_no_torch_does_not_load_it(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "regard", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 2)  # 2: no command was given
    loaded = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "regard.cli.app" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"torch", "safetensors", "tokenizers", "transformers"}
    assert ("usage" in done.stdout.lower()) == ("--version" not in arguments)
    if "--version" in arguments:
        assert done.stdout == f"regard {__version__}\n"


def test_a_shell_can_complete_the_commands() -> None:
    environment = os.environ | {"_REGARD_COMPLETE": "complete_bash", "COMP_WORDS": "regard ", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['regard']\nfrom regard.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [
        "look",
        "explain",
        "generate",
        "translate",
        "train",
        "embed",
        "classify",
        "plan",
        "bench",
    ]
    assert "--install-completion" in run("--help").stdout


# From its first call on, whatever line the command line or what it calls is about to run: interrupted there.
AT_LINE = """
import os, signal, sys
from regard import cli

lines = int(sys.argv.pop())

def follow(frame, event, _):
    global lines
    lines -= event == "line"
    if lines == 0:
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)
    return follow

def enter(frame, event, _):
    if frame.f_code is cli.main.__code__:
        sys.settrace(follow)
        return follow

sys.argv = ["regard", "look", "the cat"]
sys.settrace(enter)
cli.main()
"""

# Says "here" as soon as the command line answers interruptions itself.
WAITING = """
import signal, sys
from regard import cli

answer = signal.signal

def answered(*arguments):
    signal.signal = answer
    before = answer(*arguments)
    print("here", flush=True)
    return before

signal.signal = answered
sys.argv = ["regard", "look", "the cat"]
cli.main()
"""


# the first five set two names, make two functions and say "try": Python answers no signal there
@pytest.mark.parametrize("line", [*range(6, 20), 100, 1000])
def test_an_interruption_is_quiet_from_the_first_lines_on(line: int) -> None:
    done = subprocess.run([sys.executable, "-c", AT_LINE, str(line)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("wait", [0.0, 0.01, 0.03, 0.1, 0.3, 0.6])
def test_an_interruption_is_quiet_while_a_command_still_loads(wait: float) -> None:
    command = [sys.executable, "-c", WAITING]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "here\n"
    time.sleep(wait)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate()
    assert said == ""


SWALLOWING = """
import os, signal, sys
from regard import cli
from regard.cli import app

def interrupted_import(**more):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process") from None

app.app = interrupted_import
cli.main()
"""


WHILE_TORCH_LOADS = """
import os, signal
from regard import cli
from regard.cli import app

def interrupted_import(**more):
    exec(compile("os.kill(os.getpid(), signal.SIGINT)", "torch/part.py", "exec"), {"__name__": "torch.part"} | globals_)

globals_ = {"os": os, "signal": signal}
app.run = interrupted_import
try:
    cli.main()
except BaseException as error:
    print(error)
"""


def test_an_interruption_while_torch_loads_raises_nothing_in_it() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_TORCH_LOADS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_that_a_library_hides_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", SWALLOWING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


IN_A_CLASS = """
import os, signal, sys
from regard import cli, extras
from regard.cli import app

class Interrupting:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)

def interrupted_import(*given, **more):
    try:
        type("Interrupted", (), {"attribute": Interrupting()})
    except RuntimeError as error:  # until Python 3.11
        raise KINDS[sys.argv.pop()](error) from error

KINDS = {"RuntimeError": RuntimeError, "ImportError": ImportError}
setattr({"extras": extras, "app": app}[sys.argv.pop()], sys.argv.pop(), interrupted_import)
cli.main()
"""


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
@pytest.mark.parametrize(("module", "function"), [("extras", "need"), ("app", "run")])
def test_an_interruption_in_the_body_of_a_class_is_quiet(module: str, function: str, error: str) -> None:
    command = [sys.executable, "-c", IN_A_CLASS, error, function, module]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


LOSING = """
import os, signal
from regard import cli
from regard.cli import app

class Interrupting:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

app.app = lambda **more: [Interrupting() and None, print("went on")]
cli.main()
"""


def test_an_interruption_that_python_cannot_raise_ends_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", LOSING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("generate", "--max-new-tokens", "--count"),
        ("train", "--lr", "--learning-rate"),
        ("train", "--d-model", "--dim"),
    ],
)
def test_an_option_of_other_programs_is_answered_with_its_name_here(command: str, theirs: str, ours: str) -> None:
    done = run(command, "x", theirs, "8")
    assert done.returncode == 2
    assert re.search(rf"No such option: {theirs}\b.*{ours}\b", done.stderr)
    assert ours not in run("explain", "x", theirs, "8").stderr  # a command that has no such option


def test_an_option_without_its_value_is_one_error() -> None:
    done = run("generate", "x", "--temperature")
    assert done.returncode == 2
    assert "Option '--temperature' requires an argument" in done.stderr
    assert "Traceback" not in done.stderr

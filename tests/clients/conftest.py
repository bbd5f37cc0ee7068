"""Programs that other people wrote for transformers' models, run on models under regard and on the same under "eager".

A file is a client, `test_NAME.py` with the name it is installed by. What it is given by `same` is compared, and stands
with the largest difference in a table, which is printed at the end and, with --write-table, put into
docs/transformers.md. A client that is not installed is skipped, with the reason in its row. None of this is in the
suite that `make test` runs: `make clients` installs what is run here.
"""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}  # before any import: nothing is downloaded or sent

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clients import table

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] the cat sat on a mat dog runs far moon shines bright over cold old sea".split()  # noqa: SIM905
)

compared: dict[str, dict[str, float]] = {}
"""Of each client, what was compared and how far it was apart."""
skipped: dict[str, str] = {}
"""The clients that did not run, and why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="put the table of clients into docs/transformers.md")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "default")  # other people's programs may warn


@pytest.fixture
def same(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Asserts that a client got the same numbers twice, and keeps how far they were apart for the table."""

    def compare(what: str, ours: table.Numbers, theirs: table.Numbers) -> None:
        far = table.difference(what, ours, theirs)
        kept = compared.setdefault(table.client_of(request.path), {})
        kept[what] = max(far, kept.get(what, 0.0))

    return compare


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of a few words."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="[CLS]", eos_token="[SEP]", **names)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    keep_reason(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    keep_reason(report)


def keep_reason(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        file = Path(report.nodeid.split("::")[0])
        skipped[table.client_of(file)] = str(report.longrepr[2]).removeprefix("Skipped: ")


def rows() -> list[table.Row]:
    """Of each client what was compared and how far it was apart, or why it did not run."""
    made = []
    for client in sorted(compared.keys() | skipped.keys()):
        if client in compared:
            far = max(compared[client].values())
            version = importlib.metadata.version(client)
            made.append((client, version, "; ".join(compared[client]), f"{far:.0e}" if far else "0"))
        else:
            made.append((client, "", f"not run: {skipped[client]}", ""))
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    made = table.table(rows())
    terminalreporter.section("works with")
    terminalreporter.write(made)
    if config.getoption("--write-table") and exitstatus == 0:
        table.PAGE.write_text(table.written(table.PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
        terminalreporter.write_line(f"written into {table.PAGE}")

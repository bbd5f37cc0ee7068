"""The clients of tests/clients, which `make clients` runs: each is installed, pinned, and in the table of the docs.

What the table says was measured; here it is held to be of the clients that there are, and the comparison to bite.
"""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from clients import table

ROOT = Path(__file__).parent.parent
CONSTRAINTS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
ROWS = {row[0]: row for row in table.rows(table.PAGE.read_text(encoding="utf-8"))}


def dry(target: str) -> str:
    """What make would run."""
    return subprocess.run(["make", "-n", "-B", target], capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_the_extra_installs_every_client_and_nothing_that_no_file_runs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    names = {Requirement(line).name for line in extras["clients"]}
    assert names - {"regard"} == set(table.clients())
    assert set(table.clients()) <= CONSTRAINTS.keys()


def test_the_docs_tell_of_every_client_in_the_version_that_is_pinned() -> None:
    assert sorted(ROWS) == table.clients()
    for client, version, what, far in ROWS.values():
        if what.startswith("not run: "):
            assert (version, far) == ("", "")
        else:
            assert version == CONSTRAINTS[client]
            assert 0 <= float(far) <= table.ALLOWED


def test_clients_are_run_by_a_target_of_their_own_alone(pytestconfig: pytest.Config) -> None:
    assert "pytest tests/clients --write-table" in dry("clients")
    assert "'.[dev,clients]'" in dry("clients")
    assert "clients" not in dry("test")
    assert any(fnmatch("clients", pattern) for pattern in pytestconfig.getini("norecursedirs"))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1.0, 2.0], [1.0, 2.0, 3.0], "2 numbers, expected 3"),
        ([1.0, 2.001], [1.0, 2.0], "off by 5.0e-04, allowed 1e-05"),
        ([1.0, float("nan")], [1.0, 2.0], "off by nan"),
        ([1.0, 2.0], [1.0, float("nan")], "not finite"),
        ([0.0, 0.0], [0.0, 0.0], "the same everywhere"),
    ],
)
def test_numbers_that_differ_or_say_nothing_do_not_pass(ours, theirs, said) -> None:
    with pytest.raises(AssertionError, match=re.escape(f"weights: {said}") if said[0].isdigit() else said):
        table.difference("weights", ours, theirs)


def test_a_difference_is_relative_to_the_largest_number() -> None:
    far = table.difference("weights", (torch.tensor([100.0, 1.0]), [[2.0, 3.0 + 1e-4]]), [100.0, 1.0, 2.0, 3.0])
    assert far == pytest.approx(1e-6)


def test_a_table_is_written_between_its_marks_and_read_again() -> None:
    page = f"before\n{table.BEGIN}old{table.END}after\n"
    made = [("a", "1.0", "weights; logits", "1e-06"), ("b", "", "not run: it needs c", "")]
    new = table.written(page, table.table(made))
    assert table.rows(new) == made
    assert new.startswith(f"before\n{table.BEGIN}\n| client |")
    assert new.endswith(f" |\n\n{table.END}after\n")
    assert "old" not in new
    with pytest.raises(AssertionError, match="no place"):
        table.written("a page without marks", "")

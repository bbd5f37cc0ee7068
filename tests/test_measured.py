"""What the guide measures: the scripts run, their counts are those of the code, and the stored results obey the laws
that the chapters tell."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from regard import matmul

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def stored(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def keys(value: Any) -> Any:
    """What a result is made of, without its numbers."""
    if isinstance(value, dict):
        return {name: keys(part) for name, part in value.items()}
    return [keys(part) for part in value] if isinstance(value, list) and value and isinstance(value[0], dict) else None


# --- scale.py: chapter 13 --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scales(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("scale") / "scale.json"
    script("scale").main(["--draws", "30", "--steps", "10", "--output", str(file)])
    return json.loads(file.read_text())


def test_the_script_of_the_root_measures_again_what_is_stored(scales: Any) -> None:
    before = stored("scale")
    assert keys(scales) == keys(before)
    for new, old in zip(scales["rows"], before["rows"], strict=True):
        assert [new[name] for name in ("similarity", "scaled", "head_dim")] == [
            old[name] for name in ("similarity", "scaled", "head_dim")
        ]
        if new["similarity"] == "product":  # an additive score depends on the v that was drawn
            assert new["variance"] == pytest.approx(old["variance"], rel=0.1)
            assert new["largest_weight"] == pytest.approx(old["largest_weight"], rel=0.3)


def test_scores_grow_with_the_head_unless_they_are_scaled() -> None:
    for row in stored("scale")["rows"]:
        wanted = 1.0 if row["scaled"] else row["head_dim"]
        if row["similarity"] == "product":
            assert row["variance"] == pytest.approx(wanted, rel=0.05)
        else:  # a tanh is less than 1, so is its variance
            assert row["variance"] < 1.3 * wanted
        low, middle, high = row["gradient"]
        assert low <= middle <= high
        if row["scaled"]:
            assert row["saturated"] == 0.0
            assert high < 5 * low
        elif row["head_dim"] >= 256:
            assert high > 400 * low


def test_a_large_head_learns_with_the_factor_and_not_without() -> None:
    learnt = {(row["head_dim"], row["scaled"]): row["loss"] for row in stored("scale")["learnt"]}
    assert learnt[256, True][-1] < 0.05
    assert learnt[256, False][-1] > 1.5
    assert learnt[16, True][-1] < learnt[16, False][-1] < 1.0


# --- cost.py: chapter 14 ---------------------------------------------------------------------------------------------


def test_the_counts_that_are_stored_are_those_of_plan(monkeypatch) -> None:
    cost, machine = script("cost"), stored("cost")["machine"]
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: machine["products"] == "oneDNN")
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine["threads"])
    for task, row in zip(cost.tasks(1), stored("cost")["rows"], strict=True):
        now = cost.counted(task)
        same = ["call", "length", "bytes_moved"]
        if now["kernel"] == row["kernel"]:  # which depends on the processor and its threads
            same += ["flops_needed", "flops_computed"]
        assert [now[name] for name in same] == [row[name] for name in same]


def test_predictions_follow_from_the_counts_and_the_yardsticks_alone() -> None:
    data = stored("cost")
    for row in data["rows"]:
        computing = row["flops_computed"] / data["gflops_per_second"] / 1e6
        moving = row["bytes_moved"] / data["gb_per_second"] / 1e6
        assert row["predicted_ms"] == pytest.approx(max(computing, moving), rel=2e-3, abs=1e-3)
    assert data["others"] < 0.1, "other programs disturbed the measurement"


def test_memory_is_that_of_the_plan_and_the_formula_alone_holds_squares() -> None:
    rows = stored("cost")["rows"]
    assert sum("memory_bytes" in row for row in rows) >= 12
    for row in rows:
        if row["length"] >= 2048 and "memory_bytes" in row:
            assert row["memory_bytes"] < 2 * row["peak_bytes"]
        if "formula_bytes" in row:
            assert row["formula_bytes"] > 12 * row["length"] ** 2 * 4


def test_the_script_of_the_cost_runs(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    script("cost").main(["--shrink", "128", "--repeats", "1", "--output", str(file)])
    said, before = json.loads(file.read_text()), stored("cost")
    assert said.keys() == before.keys()
    assert {row["call"] for row in said["rows"]} == {row["call"] for row in before["rows"]}
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in said["rows"])


# --- first_run.py: chapter 15 ----------------------------------------------------------------------------------------


def test_the_script_of_the_first_run_trains_and_tells_its_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_run = script("first_run")
    sizes = {"dim": 16, "layers": 1, "heads": 2, "context_length": 32, "vocab_size": 300}
    monkeypatch.setattr(first_run, "SIZES", sizes)
    monkeypatch.setattr(first_run, "PEAKS", (0.01,))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.py").write_text("".join(f"def f{number}_{n}(x):\n    return x + {n}\n" for n in range(20)))
    file = tmp_path / "run.json"
    first_run.main(["--steps", "10", "--data", str(texts), "--output", str(file)])
    said, before = json.loads(file.read_text()), stored("first_run")
    assert said["runs"][0].keys() == before["runs"][0].keys()
    assert said["runs"][0]["step"] == [5, 10]
    assert said["runs"][0]["loss"][1] < said["runs"][0]["loss"][0]


def test_the_first_run_learns_and_one_with_a_tenth_of_the_rate_learns_less() -> None:
    runs = {run["learning_rate"]: run for run in stored("first_run")["runs"]}
    assert runs[0.003]["loss"][-1] < 0.6 * runs[0.003]["loss"][0]
    assert runs[0.003]["bits_per_byte"] < min(runs[0.0003]["bits_per_byte"], runs[0.003]["xz_bits_per_byte"])


# --- sections.py: models at work -------------------------------------------------------------------------------------


def test_the_script_of_the_sections_trains_a_classifier_and_tells_its_confusion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = script("sections")
    monkeypatch.setattr(
        sections,
        "SIZES",
        {
            "dim": 16,
            "layers": 1,
            "heads": 2,
            "context_length": 16,
            "vocab_size": 300,
            "batch_size": 8,
        },
    )
    rows = [f"{label},{word} {number}" for label, word in (("pets", "cat"), ("cars", "jeep")) for number in range(20)]
    (tmp_path / "texts.csv").write_text("\n".join(["label,text", *rows]))
    file = tmp_path / "sections.json"
    sections.main(["--steps", "5", "--data", str(tmp_path / "texts.csv"), "--output", str(file)])
    said = json.loads(file.read_text())
    assert said.keys() == stored("sections").keys()
    assert said["labels"] == ["cars", "pets"]
    assert [sum(row) for row in said["counts"]] == [2, 2]  # one text in ten of each label
    assert said["accuracy"] == sum(said["counts"][label][label] for label in (0, 1)) / 4
    assert said["usual"] == 0.5


def test_what_is_stored_of_the_sections_follows_from_its_confusion_and_beats_the_most_frequent_label() -> None:
    from regard.training.classifying import Confusion

    said = stored("sections")
    found = Confusion(tuple(said["labels"]), torch.tensor(said["counts"]))
    assert said["accuracy"] == pytest.approx(found.accuracy, abs=1e-4)
    assert said["usual"] == pytest.approx(found.usual, abs=1e-4)
    assert said["f1"] == pytest.approx(found.f1, abs=1e-4)
    assert len(said["labels"]) == 8
    assert said["accuracy"] > 2 * said["usual"] or said["accuracy"] > 0.8


# --- decoder.py: models at work --------------------------------------------------------------------------------------


def test_the_script_of_the_decoder_measures_again_what_is_stored() -> None:
    decoder = script("decoder")
    before = stored("decoder")
    found = decoder.main(argparse.Namespace(quick=True, repeats=1, new=2, rows="*"))
    assert found.keys() == before.keys()
    assert keys(found["rows"]) == keys(before["rows"])
    assert {name: row["beside"] for name, row in found["rows"].items()} == {
        name: row["beside"] for name, row in before["rows"].items()
    }
    table = decoder.report(found)
    for name, row in found["rows"].items():
        assert f"| {name} | {row['tokens per second']['regard']:,.0f} | {row['beside']}: " in table
    assert decoder.with_table(f"a\n{decoder.BEGIN}\nold\n{decoder.END}\nb\n", table) == (
        f"a\n{decoder.BEGIN}\n{table}\n{decoder.END}\nb\n"
    )


def test_the_table_of_the_decoder_is_that_of_the_committed_results() -> None:
    decoder = script("decoder")
    page = decoder.PAGE.read_text(encoding="utf-8")
    assert decoder.with_table(page, decoder.report(stored("decoder"))) == page, "run: benchmarks/decoder.py --report"

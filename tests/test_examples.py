"""Every example runs, on less, and finds what it says."""

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from regard.masks import Causal
from regard.observation import observe
from regard.recording import record

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text(encoding="utf-8"))


def example(name):
    """An example as a module; what stands under ``if __name__ == "__main__"`` is not run."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_script_is_tested_here():
    assert SCRIPTS == ["ablate_induction", "copying_heads", "dates", "long_file"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_what_it_shows_and_how_it_is_run(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text))
    assert said.split("\n")[0].endswith((".", "?"))
    assert f"python examples/{name}.py" in said
    assert "parse_args()" in text


def test_without_its_induction_heads_the_model_cannot_repeat(capsys):
    table = example("ablate_induction").main(length=48, rows=2, count=4)
    first, second = table["nothing"]
    assert second < first / 4
    falls = [table[name][1] for name in ("nothing", *(n for n in table if "induction" in n))]
    assert falls == sorted(falls)
    assert falls[-1] > first - 2.0  # hardly better than guessing
    assert table["previous-token heads"][1] > first - 2.0
    assert table["4 other heads"][1] < second + 1.0
    said = capsys.readouterr().out
    assert f"nothing               {first:13.2f}  {second:14.2f}" in said
    assert "kind: induction" in said


def test_the_heads_that_copy_a_name_are_induction_heads_and_the_model_needs_them(capsys):
    found = example("copying_heads").main(name="brindleOstrichwake", count=4)
    assert len(found) == 36
    weights = [weight for _, _, weight, _ in found]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > 0.4 > weights[8]
    without = {(layer, head): loss for layer, head, _, loss in found}
    needed = max(without, key=without.get)
    assert needed in [(layer, head) for layer, head, _, _ in found[:4]]
    said = capsys.readouterr().out
    assert "brindleOstrichwake: 9 times in " in said
    assert f"{found[0][0]:<10}{found[0][1]:>4}{found[0][2]:>9.2f}{found[0][3]:>17.2f}   induction" in said


def test_a_long_file_is_read_through_a_window_and_asked_without_it(tmp_path, capsys):
    (tmp_path / "counting.py").write_text("".join(f"value_{i} = {i * i} + value_{i // 2}\n" for i in range(90)))
    module = example("long_file")
    found = module.main(file=tmp_path / "counting.py", tokens=700, window=32)
    windowed, full = found["window of 32"], found["full"]
    assert windowed.grid[:4] == full.grid[:4] == (1, 1, 700, 700)  # more than the model's context
    assert int(windowed.visible().max()) == 32
    assert int(full.visible().max()) == 700
    assert float(windowed.distance().max()) < 32 < float(full.distance().max())
    expected = observe(windowed.query, windowed.key, mask=Causal())
    assert torch.allclose(full.weights(), expected.weights(), atol=1e-6)
    said = capsys.readouterr().out
    assert "counting.py: 700 tokens, read in " in said
    assert said.count("tokens back, on average") == 2
    assert f"a token spreads over e^entropy = {float(full.entropy().exp().mean()):,.1f} tokens" in said
    short = module.main(file=tmp_path / "counting.py", tokens=100, window=512)
    loaded = module.load("stdlib")
    ids = [loaded.tokenizer.end_id, *loaded.tokenizer.encode((tmp_path / "counting.py").read_text())][:100]
    with torch.inference_mode(), record(loaded.model) as recording:
        loaded.model(torch.tensor([ids]))
    assert torch.allclose(recording["layers.5"].head(0).weights(), short["window of 512"].weights(), atol=1e-5)

"""The house: imports point to the lines above, a cold import is light, and the public names are those that are told.

`python tests/test_architecture.py` prints the house as a diagram.
"""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import regard

SOURCE = Path(regard.__file__).parent

HOUSE = (
    "extras", "hints", "graphs", "numerics", "shapes", "indexing", "rules", "masks", "biases", "dropout", "scores",
    "reference", "kernels", "functional", "hooks", "observation", "cache", "positions", "layers", "models", "layouts",
    "stepwise", "storage", "recording", "huggingface", "generation", "training", "viewer", "plots", "display",
    "bench", "cli", "public",
)  # fmt: skip

# What a cold `import regard` may not bring along, beyond what torch itself brings.
HEAVY = ("transformers", "tokenizers", "starlette", "matplotlib", "triton", "typer", "rich", "accelerate")


def storeys(source: Path = SOURCE) -> dict[str, list[Path]]:
    """The files of every line of the house, by name; `__init__` and `__main__` stand outside."""
    found: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def imported(path: Path, package: str) -> set[str]:
    """The lines of the house that a file imports from, wherever in the file the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write the import in full, from regard..."
            names |= {node.module} if node.module != package else {f"{package}.{alias.name}" for alias in node.names}
    return {parts[1] for parts in (name.split(".") for name in names if name) if parts[0] == package and len(parts) > 1}


def upward(source: Path = SOURCE, package: str = "regard", house: tuple[str, ...] = HOUSE) -> list[str]:
    """Every import that does not point to a line above."""
    wrong = []
    for name, paths in storeys(source).items():
        if name not in house:
            wrong.append(f"{name}: no line of the house")
            continue
        for path in paths:
            for other in sorted(imported(path, package) - {name}):
                if other not in house:
                    wrong.append(f"{name}: imports {other}, which is no module")
                elif house.index(other) > house.index(name):
                    wrong.append(f"{name}: imports {other}, which stands below it")
    return wrong


def diagram() -> str:
    """One line for each line of the house: its name, what it is for, and what it imports."""
    lines = []
    for name in HOUSE:
        paths = storeys().get(name)
        if paths:
            first = next((p for p in paths if p.name == "__init__.py"), paths[0])
            purpose = (ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or "").split("\n")[0]
            uses = set().union(*(imported(path, "regard") for path in paths)) - {name}
            shown = name + ("/" if first.name == "__init__.py" else "")
            lines.append(f"{shown:<13}{purpose}")
            if uses:
                lines.append(f"{'':<13}  uses {', '.join(sorted(uses, key=HOUSE.index))}")
    return "\n".join(lines)


def test_imports_point_to_the_lines_above():
    assert upward() == []


def test_an_import_that_points_down_is_seen_wherever_it_stands(tmp_path):
    def house_of(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return upward(tmp_path, "p", ("a", "b", "c"))

    assert house_of(a="import torch", b="from p.a import x", c="import p.a\nfrom p import b") == []
    assert house_of(a="from p.b import x") == ["a: imports b, which stands below it"]
    assert house_of(a="def f():\n    import p.c as c") == ["a: imports c, which stands below it"]
    assert house_of(a="from p import c") == ["a: imports c, which stands below it"]
    assert house_of(a="", d="") == ["d: no line of the house"]
    with pytest.raises(AssertionError, match="write the import in full"):
        house_of(a="from . import b")


def test_the_diagram_shows_every_line_of_the_house_with_its_purpose():
    shown = diagram()
    print(shown)
    for name in storeys():
        assert any(line.split("/")[0].split()[0] == name for line in shown.splitlines()), name
    assert "shapes       The gate" in shown
    assert "  uses shapes, indexing, rules, masks\n" in shown
    for line in shown.splitlines():
        assert len(line.split(maxsplit=1)) == 2, f"{line}: a module begins with a sentence that says what it is for"


def test_no_module_is_named_like_one_of_the_standard_library_or_like_a_drawer():
    for path in SOURCE.rglob("*.py"):
        name = path.stem if path.stem != "__init__" else path.parent.name
        assert name not in sys.stdlib_module_names, path
        assert name not in ("attention", "utils", "common", "helpers", "types", "base"), path


def test_the_public_names_are_those_that_can_be_imported():
    assert set(regard.__all__) <= set(dir(regard))
    public = {
        name
        for name, value in ((name, getattr(regard, name)) for name in dir(regard))
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(regard.__all__)
    assert len(set(regard.__all__)) == len(regard.__all__)
    assert list(regard.__all__) == sorted(regard.__all__)


def test_no_public_name_is_also_that_of_a_module():
    # importing the module would put it in the place of the function
    assert not set(regard.__all__) & set(storeys())


def test_what_regard_does_not_have_is_an_attribute_error_that_knows_its_names():
    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'atention'") as caught:
        _ = regard.atention
    assert (caught.value.name, caught.value.obj) == ("atention", regard)
    with pytest.raises(ImportError, match="cannot import name 'Casual'"):
        exec("from regard import Casual")


def test_every_public_name_says_what_it_is():
    for name in regard.__all__:
        value = getattr(regard, name)
        if isinstance(value, type) or callable(value):
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"
            assert value.__module__.startswith("regard."), f"{name} is not regard's own"


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after a statement."""
    run = [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


def test_a_cold_import_brings_nothing_heavy_that_torch_does_not_bring_itself():
    # torch itself loads triton where it is installed beside CUDA, and numpy; those are its own affair
    without = modules_after("import torch, torch.utils.checkpoint, safetensors.torch")
    brought = modules_after("import regard; regard.attention") - without
    assert "regard.functional" in brought
    assert not {name.split(".")[0] for name in brought} & set(HEAVY)
    outside = {name.split(".")[0] for name in brought} - sys.stdlib_module_names - {"regard", "torch", "safetensors"}
    assert not {name for name in outside if not name.startswith("_")}, "the core is torch and safetensors"


def test_import_regard_loads_nothing_but_itself_until_a_name_is_asked_for():
    brought = modules_after("import regard")
    assert {name for name in brought if name.split(".")[0] in ("regard", "torch", *HEAVY)} == {"regard"}
    for first in (
        "from regard import *; Causal()",
        "import regard, pickle, torch; pickle.loads(pickle.dumps(regard.Window(3)))",
    ):
        assert "regard.functional" in modules_after(first)


def test_modules_are_there_without_an_import_of_their_own():
    modules_after(
        "import regard, sys\n"
        "for name in ('huggingface', 'layouts', 'plots', 'training', 'masks', 'bench'):\n"
        "    assert getattr(regard, name) is sys.modules[f'regard.{name}']"
    )


def test_a_function_stays_a_function_whatever_module_is_imported_first():
    modules_after("import regard.stepwise, regard.display.page, regard; assert callable(regard.steps), regard.steps")


if __name__ == "__main__":
    print(diagram())

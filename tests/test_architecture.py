"""The house: imports point to the lines above, a cold import is light, and the public names are those that are told.

The order of files stands in docs/how-the-pieces-fit.md, folder by folder. `python tests/test_architecture.py` prints it
with what each file imports.
"""

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import regard

SOURCE = Path(regard.__file__).parent
MAP = Path(__file__).parents[1] / "docs" / "how-the-pieces-fit.md"

LONGEST = 500

# What a cold `import regard` may not bring along, beyond what torch itself brings.
HEAVY = ("transformers", "tokenizers", "starlette", "matplotlib", "triton", "typer", "rich", "accelerate")


def drawings(text: str) -> dict[str, list[str]]:
    """What the map draws of each folder: its files in order, as they are written there, by the folder's package."""
    blocks = re.findall(r"^```text\nsrc/(\S+)/\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {
        folder.replace("/", "."): re.findall(r"^  (\w+(?:\.py|/)) +\S", lines, re.MULTILINE) for folder, lines in blocks
    }


def house_of(drawn: list[str]) -> tuple[str, ...]:
    """The names of a folder's lines; `__init__` and `__main__` stand outside."""
    names = (line.removesuffix("/").removesuffix(".py") for line in drawn)
    return tuple(name for name in names if name not in ("__init__", "__main__"))


HOUSES = {package: house_of(drawn) for package, drawn in drawings(MAP.read_text(encoding="utf-8")).items()}


def folder_of(package: str) -> Path:
    return SOURCE.parent.joinpath(*package.split("."))


def packages() -> list[str]:
    """Every folder with code in it: `regard`, `regard.masks` and so on."""
    return [".".join(path.parent.relative_to(SOURCE.parent).parts) for path in sorted(SOURCE.rglob("__init__.py"))]


def storeys(source: Path = SOURCE) -> dict[str, list[Path]]:
    """The files of every line of a house, by name; `__init__` and `__main__` stand outside."""
    found: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).parts[0].removesuffix(".py")
        if name not in ("__init__", "__main__"):
            found.setdefault(name, []).append(path)
    return found


def imported(path: Path, package: str) -> set[str]:
    """The lines of a house that a file imports from, wherever in the file the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write the import in full, from regard..."
            names |= {node.module} if node.module != package else {f"{package}.{alias.name}" for alias in node.names}
    return {name.removeprefix(f"{package}.").split(".")[0] for name in names if name.startswith(f"{package}.")}


def upward(source: Path, package: str, house: tuple[str, ...]) -> list[str]:
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


def diagram(package: str = "regard", indent: str = "") -> str:
    """One line for each line of the house: its name, what it is for, and what it imports; folders with their files."""
    lines = []
    house, standing = HOUSES[package], storeys(folder_of(package))
    for name in house:
        paths = standing[name]
        first = next((p for p in paths if p.name == "__init__.py"), paths[0])
        purpose = (ast.get_docstring(ast.parse(first.read_text(encoding="utf-8"))) or "").split("\n")[0]
        uses = set().union(*(imported(path, package) for path in paths)) - {name}
        shown = name + ("/" if first.name == "__init__.py" else "")
        lines.append(f"{indent}{shown:<13}{' ' * (len(shown) > 12)}{purpose}")
        if uses:
            lines.append(f"{indent}{'':<13}  uses {', '.join(sorted(uses, key=house.index))}")
        if f"{package}.{name}" in HOUSES:
            lines.append(diagram(f"{package}.{name}", f"{indent}    "))
    return "\n".join(lines)


@pytest.mark.parametrize("package", HOUSES)
def test_imports_point_to_the_lines_above(package):
    assert upward(folder_of(package), package, HOUSES[package]) == []


def test_every_folder_has_an_order():
    assert set(packages()) == HOUSES.keys()


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


def test_inside_a_folder_files_import_neither_the_folder_itself_nor_one_below(tmp_path):
    for name, text in {"a": "from p.q import Thing", "b": "import p.q.c", "c": "import p.other, p.q.a"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "__init__.py").write_text("from p.q.c import x")
    assert upward(tmp_path, "p.q", ("a", "b", "c")) == [
        "a: imports Thing, which is no module",
        "b: imports c, which stands below it",
    ]


def test_the_map_is_read_folder_by_folder():
    text = "a\n```text\nsrc/p/\n  __init__.py  x\n  b.py     first\n  a/       then\n```\n"
    text += "```text\nsrc/p/a/\n  c.py   d\n```\n```text\nother\n```\n"
    assert drawings(text) == {"p": ["__init__.py", "b.py", "a/"], "p.a": ["c.py"]}
    assert house_of(drawings(text)["p"]) == ("b", "a")


def test_no_file_is_longer_than_can_be_read_in_a_sitting():
    lengths = {
        path.relative_to(SOURCE).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in SOURCE.rglob("*.py")
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_the_diagram_shows_every_line_of_the_house_with_its_purpose():
    shown = diagram()
    print(shown)
    for name in [name for package in HOUSES for name in storeys(folder_of(package))]:
        assert any(line.split("/")[0].split()[0] == name for line in shown.splitlines()), name
    assert "shapes       Axis names" in shown
    assert "  uses shapes, indexing, diagonals, rules, masks\n" in shown
    assert "    positional   Masks that depend" in shown
    assert "                   uses algebra\n" in shown
    for line in shown.splitlines():
        assert len(line.split(maxsplit=1)) == 2, f"{line}: a module begins with a sentence that says what it is for"


def test_no_module_is_named_like_one_of_the_standard_library_or_like_a_drawer():
    for path in SOURCE.rglob("*.py"):
        name = path.stem if path.stem != "__init__" else path.parent.name
        assert name not in sys.stdlib_module_names, path
        assert name not in ("attention", "utils", "common", "helpers", "types", "base"), path


def test_every_file_begins_with_a_sentence_that_says_what_it_is_for():
    for path in SOURCE.rglob("*.py"):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        assert first.endswith("."), path


OTHER_WORDS = {"of_row": "for_batch", "by_row": "by_batch", "per_row": "per_batch", "batch_row": "batch_index"}
"""What the code once said, and the glossary's word for it (docs/conventions.md): a row is a query's."""

BARE = {
    "alone", "attended", "brought", "busy", "dearest", "either", "faintest", "floating", "gated", "held", "kept",
    "large", "largest", "least", "local", "low", "made", "most", "narrowest", "oldest", "quick", "saturated",
    "several", "small", "sniffed", "special", "together", "whole", "wide", "wrapped",
}  # fmt: skip
"""What a constant cannot be called: it says neither what it is a bound of, nor in which unit."""


def defined(source: str) -> set[str]:
    """Every name that a file gives: of functions, classes, arguments, variables and attributes."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def unclear(source: str) -> list[str]:
    """The names in a file for which there is a better word, and the constants without a noun."""
    found = []
    for name in sorted(defined(source)):
        words = "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()
        found += [f"{name}: say {better}" for word, better in OTHER_WORDS.items() if f"_{word}_" in f"_{words}_"]
        if name.isupper() and words in BARE:
            found.append(f"{name}: a bound of what, in which unit?")
    return found


def test_names_are_those_of_the_glossary_and_constants_say_what_they_are_a_bound_of():
    for path in SOURCE.rglob("*.py"):
        assert unclear(path.read_text(encoding="utf-8")) == [], path


def test_an_unclear_name_is_seen_wherever_it_is_given():
    assert unclear("def f(per_row): pass") == ["per_row: say per_batch"]
    assert unclear("class OfRow: pass") == ["OfRow: say for_batch"]
    assert unclear("x.of_row_2 = 1") == ["of_row_2: say for_batch"]
    assert unclear("LARGEST = 1") == ["LARGEST: a bound of what, in which unit?"]
    assert unclear("MAX_SHOWN_SCORES = largest = 1\nrow = per_rowing = 1") == []


def importers(name: str) -> set[str]:
    """The files that import a name, by their place in the package."""
    module, _, function = name.rpartition(".")
    return {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == module
        and function in [alias.name for alias in node.names]
    }


def test_nothing_but_the_table_of_kernels_and_double_backward_computes_by_the_specification():
    table, double_backward = "kernels/choice.py", "kernels/second.py"
    assert importers("regard.reference.reference") == {table, double_backward}


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


def test_a_call_with_a_function_as_mask_loads_nothing_heavy_that_one_with_causal_does_not():
    call = "import regard, torch; q = torch.ones(1, 1, 3, 2); regard.attention(q, q, q, mask=regard.{})"
    brought = modules_after(call.format("Where(lambda b, h, q, k: q >= k)")) - modules_after(call.format("Causal()"))
    assert not {name.split(".")[0] for name in brought} & {"sympy", "mpmath"}


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
        "for name in ('huggingface', 'interventions', 'layouts', 'plots', 'training', 'masks', 'bench'):\n"
        "    assert getattr(regard, name) is sys.modules[f'regard.{name}']"
    )


def test_changes_to_heads_have_a_namespace_and_can_be_written_without_it():
    from regard import interventions

    for name in ("Ablate", "HideKey", "Replace", "Scale"):
        assert getattr(regard, name) is getattr(interventions, name)


def test_a_function_stays_a_function_whatever_module_is_imported_first():
    modules_after("import regard.stepwise, regard.display.page, regard; assert callable(regard.steps), regard.steps")


if __name__ == "__main__":
    print(diagram())

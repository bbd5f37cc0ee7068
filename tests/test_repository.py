"""What the repository says about itself is so: how to cite it, and what it never reads."""

import ast
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).parent.parent
FORBIDDEN = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")


def unsafe(source: str) -> list[str]:
    """What would run code that was read: pickles, torch.load, eval, exec, and remote code of transformers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.split(".")[0] in FORBIDDEN else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in ("torch.load", "eval", "exec", "__import__") else []
            allowed = [keyword.arg for keyword in node.keywords if ast.unparse(keyword.value) != "False"]
            found += [name for name in allowed if name == "trust_remote_code"]
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_is_read_is_run(path):
    assert unsafe(path.read_text(encoding="utf-8")) == []


def test_code_that_would_run_what_it_reads_is_noticed():
    assert unsafe("import pickle, json\nfrom dill import loads\nx = torch.load(f)\ny = eval('1')") == [
        "pickle", "dill", "torch.load", "eval",
    ]  # fmt: skip
    assert unsafe("AutoModel.from_pretrained(name, trust_remote_code=True)\nmodel.eval()") == ["trust_remote_code"]
    assert unsafe("AutoModel.from_pretrained(name, trust_remote_code=wanted)") == ["trust_remote_code"]
    assert unsafe("AutoModel.from_pretrained(name, trust_remote_code=False)") == []


def test_the_citation_is_valid_and_names_the_version():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    required = {"cff-version", "message", "title", "authors"}
    known = {"type", "abstract", "version", "license", "keywords", "date-released", "repository-code", "url", "doi"}
    assert required <= citation.keys() <= required | known
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == regard.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"]
    assert all("name" in author or {"family-names", "given-names"} <= author.keys() for author in citation["authors"])

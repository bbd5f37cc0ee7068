"""Every picture in README and docs is drawn by a script, and shows what it says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BENCHMARKS = {DOCS / "performance-time.svg", DOCS / "performance-memory.svg"}
"""Drawn by the benchmarks, from what they measured."""


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(page: Path) -> set[Path]:
    """The pictures that a page shows."""
    links = re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if ":" not in link}


def test_every_picture_is_drawn_by_the_script_and_is_small(pictures):
    there = {path for kind in ("*.svg", "*.png", "*.jpg", "*.gif") for path in DOCS.rglob(kind)}
    assert there - BENCHMARKS == {DOCS / name for name in pictures.PICTURES}
    for path in there:
        assert path.stat().st_size < 200_000, path


def test_every_picture_is_shown_somewhere_and_every_chapter_has_one(pictures):
    everywhere = set().union(*(shown(page) for page in PAGES))
    assert {DOCS / name for name in pictures.PICTURES} <= everywhere
    assert DOCS / "look.svg" in shown(ROOT / "README.md")
    chapters = [page for page in PAGES if re.match(r"\d\d-", page.name)]
    assert [page.name for page in chapters if not shown(page)] == []


@pytest.mark.parametrize("name", ["ablation.svg", "guide/masks.png", "guide/three-tokens.svg"])
def test_a_picture_is_drawn_the_same_each_time(pictures, name, tmp_path):
    files = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        pictures.main([Path(name).stem], folder)
        files.append((folder / name).read_bytes())
    assert files[0] == files[1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal of Unix")
def test_the_first_picture_shows_exactly_what_its_command_prints(pictures):
    lines = pictures.words_of((DOCS / "look.svg").read_text(encoding="utf-8"))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", pictures.printed(pictures.LOOK))
    expected = [line.rstrip() for line in printed.rstrip("\n").split("\n")]
    command, *rest = [line for line in lines if line]
    assert command == '$ regard look "self.quillback = quillback; self.quill" --without 5.0,5.3'
    assert rest == [line for line in expected if line]
    assert any("0.96 'back'" in line for line in rest)


def test_a_name_that_is_no_picture_is_refused(pictures, tmp_path):
    with pytest.raises(SystemExit, match="there is no 'sunset'; there are: look, heads"):
        pictures.main(["sunset"], tmp_path)
    assert not list(tmp_path.iterdir())

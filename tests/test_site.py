"""The documentation as a site: what it lists is what there is, and everything in it leads somewhere."""

import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import regard

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class Page(HTMLParser):
    """The links of a page of HTML, and the names that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.names.add(value)


def dead(site: Path) -> list[str]:
    """The links of a built site that lead to no file, or to no name in it."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if re.match(r"[a-z]+:", link):
                continue
            file = (path.parent / unquote(target.partition("?")[0])).resolve() if target else path
            known = anchor in ("", "top") or (file in pages and unquote(anchor) in pages[file].names)
            if not file.is_file() or not known:
                wrong.append(f"{path.relative_to(site)}: {link}")
    return wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--conf-dir", DOCS, ROOT, folder]
    built = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_link_of_the_site_leads_somewhere(site):
    assert dead(site) == []


def test_the_site_has_the_pages_of_the_repository_and_every_public_name(site):
    for page in ("README.html", "docs/looking.html", "docs/guide/01-three-tokens.html", "docs/reference/masks.html"):
        assert (site / page).is_file()
    named = set().union(*(Page(p.read_text(encoding="utf-8")).names for p in site.rglob("docs/reference/*.html")))
    short = {"Ablate", "HideKey", "Replace", "Scale"}
    assert {f"regard.{name}" for name in set(regard.__all__) - short} <= named
    assert {f"regard.interventions.{name}" for name in short} <= named


def test_a_docstring_is_written_for_the_site_as_it_reads(site):
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    assert doctest.testmod(conf) == (0, 1)
    written = conf.as_restructured(
        ["| a | b |", "|---|---|", "| 1 | 2 |", "", "Shapes: x [*n] -> y.", "Notes:", "    n"]
    )
    assert [line.strip() for line in written if line.strip()] == [
        ".. list-table::", ":header-rows: 1", "* - a", "- b", "* - 1", "- 2", "Shapes:", "x [*n] -> y.", "Notes:", "n",
    ]  # fmt: skip


def test_the_reference_lists_every_public_name_once():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.rst")))
    listed = re.findall(r"^\.\. auto(?:function|class|exception):: regard\.(\w+)$", pages, re.MULTILINE)
    assert "automodule:: regard.interventions" in pages
    assert sorted([*listed, "Ablate", "HideKey", "Replace", "Scale"]) == list(regard.__all__)


def described(thing: object) -> set[str]:
    """The arguments that a docstring describes."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.getdoc(thing) or "", re.MULTILINE)
    named = re.findall(r"^    (\w+(?:, \w+)*): ", section[1], re.MULTILINE) if section else []
    return {name for names in named for name in names.split(", ")}


def public() -> dict[str, object]:
    """Every public callable, and the documented methods of the classes among them."""
    found = {name: getattr(regard, name) for name in regard.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {f"{name}.{key}": member for key, member in vars(value).items() if inspect.isfunction(member)}
    return {name: value for name, value in found.items() if callable(value) and not name.split(".")[-1].startswith("_")}


@pytest.mark.parametrize("name", public())
def test_every_argument_that_is_described_exists(name):
    described_here = described(public()[name])
    if described_here:
        assert described_here <= set(inspect.signature(public()[name]).parameters)


# --- the helpers notice what is wrong -----------------------------------------------------------------------------


def test_described_arguments_are_read():
    def f(a, b, c):
        """Sentence.

        Args:
            a: first: as it is.
            b, c: others, over
                two: lines.
        Raises:
            ValueError: never.
        """

    assert described(f) == {"a", "b", "c"}


def test_dead_links_of_a_site_are_noticed(tmp_path):
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"></a><a href="b.html#there"></a><img src="p.svg"><a href="#no"></a><a href="https://x"></a>'
    )
    assert dead(tmp_path.resolve()) == ["a.html: b.html#there", "a.html: p.svg", "a.html: #no"]

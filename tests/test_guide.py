"""README and guide are true: their examples run and print what is printed there, their links lead somewhere.

A page's blocks of ```python are one doctest with one namespace, empty at the start, so that whoever copies a page from
its top gets what the page says. Blocks of ```text and ```console are pictures and are not run.
"""

import doctest
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cases import ABSENT
from test_architecture import MAP, drawings, folder_of, storeys

ROOT = Path(__file__).parent.parent
EVERY_PAGE = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in EVERY_PAGE if page.parent.name != "zh" and not page.name.endswith(".zh.md")]
"""Those that are run. A page in Chinese has the code of its English one, letter by letter (tests/test_chinese.py)."""

CHAPTERS = [page for page in PAGES if re.match(r"\d\d-", page.name)]

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
FENCE = re.compile(r"```(\w*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?:e[+-]?\d+)?(?![\w.]*\w)")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def parts(text: str) -> dict[str, str]:
    """A page taken apart by what a line is in, a kind of block or "" for the prose; every other line is left blank."""
    found: dict[str, list[str]] = {"": [], "python": [], "text": [], "console": []}
    inside = ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence:
            assert not (inside and fence[1]), f"line {number}: a block begins inside a block"
            assert inside or fence[1] in ("python", "text", "console"), f"line {number}: a block of {fence[1]!r}"
            inside = fence[1]
        for kind, lines in found.items():
            lines.append(line if kind == inside and not fence else "")
    assert not inside, "the last block has no end"
    return {kind: "\n".join(lines) + "\n" for kind, lines in found.items()}


def said_of(text: str, name: str = "page") -> str:
    """What doctest says about the examples that failed; nothing if all of them are right."""
    code = parts(text)["python"]
    for number, block in enumerate(re.split(r"\n\n+", code.strip("\n"))):
        if block and not block.lstrip().startswith(">>>"):
            return f"{name}: block {number + 1} does not begin with >>>, so it would not be run:\n{block}"
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(code, {"__name__": name}, name, name, 0)
    # what a page has compiled is let go of by names in its namespace, which has to be there until then
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append, clear_globs=False)
    return "".join(said)


def anchors(text: str) -> set[str]:
    """What a heading can be linked by: its words in lower case, joined by hyphens."""
    headings = re.findall(r"^#+ +(.+?) *$", parts(text)[""], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of it."""
    dead = []
    for link in LINK.findall(parts(page.read_text(encoding="utf-8"))[""]):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


def unproved(text: str) -> list[str]:
    """The decimal numbers in the prose of a page that stand in none of its blocks of Python; its sources left out."""
    kinds = parts(text)
    proved = {float(number) for number in DECIMAL.findall(kinds["python"])}
    prose = re.sub(r"\]\([^)]*\)", "]", kinds[""].split("\n---\n")[0])
    return [number for number in DECIMAL.findall(prose) if float(number) not in proved]


@every_page
@pytest.mark.parametrize("seed", [1, 2])
def test_a_page_prints_what_it_says_whatever_was_random_before(page, seed):
    if ABSENT and page.name == "14-what-it-costs.md":
        pytest.skip("counts what the compiled library computes")
    torch.manual_seed(seed)
    said = said_of(page.read_text(encoding="utf-8"), page.name)
    assert not said, said


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    assert dead_links(page) == []


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_every_decimal_number_of_a_chapter_is_printed_by_its_code(page):
    assert unproved(page.read_text(encoding="utf-8")) == []


def test_the_guide_has_a_chapter_for_every_number_its_index_lists_them_and_each_leads_to_the_next():
    assert [page.name[:2] for page in CHAPTERS] == [f"{number:02}" for number in range(1, len(CHAPTERS) + 1)]
    for page, after in pairwise(CHAPTERS):
        text = page.read_text(encoding="utf-8")
        assert re.search(rf"^# {int(page.name[:2])}\. \S", text)
        assert "Next: [" in text.split("\n---\n")[-1]
        assert f"]({after.name})" in text.split("Next: ")[-1].split(" · ")[0]
    listed = LINK.findall((ROOT / "docs" / "guide" / "README.md").read_text(encoding="utf-8"))
    assert [link for link in listed if re.match(r"\d\d-", link)] == [page.name for page in CHAPTERS]


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.name)
def test_a_chapter_shows_an_example_and_folds_the_answers_of_its_exercises(page):
    text = page.read_text(encoding="utf-8")
    assert "\n>>> " in text
    assert text.count("<details>") == text.count("</details>") >= 1
    assert "## Exercises" in text


def test_the_map_of_the_house_shows_every_module_in_import_order_and_tells_what_each_decides():
    text = MAP.read_text(encoding="utf-8")
    drawn = drawings(text)
    for package, lines in drawn.items():
        names = storeys(folder_of(package))
        files = [name + ("/" if (folder_of(package) / name).is_dir() else ".py") for name in names]
        assert sorted(lines) == sorted(["__init__.py"] * (package == "regard") + files)
    assert re.findall(r"\*\*`(\w+(?:\.py|/))`\*\*", text) == drawn["regard"][1:]


# --- the helpers notice what is wrong -----------------------------------------------------------------------------


def test_an_example_that_is_wrong_is_noticed_by_its_line():
    page = "# t\n\n```python\n>>> x = 1\n```\n\ntext\n\n```python\n>>> x + 1\n2\n>>> x + 1\n3\n```\n"
    said = said_of(page)
    assert "line 12" in said
    assert said.count("Failed example") == 1


def test_a_block_that_would_not_be_run_is_noticed():
    assert "block 1 does not begin with >>>" in said_of("```python\nx = 1\n```\n")
    assert "block 2 does not begin with >>>" in said_of("```python\n>>> 1\n1\n```\n\n```python\n2\n```\n")
    with pytest.raises(AssertionError, match="a block of 'py'"):
        said_of("```py\n>>> 1\n2\n```\n")
    with pytest.raises(AssertionError, match="a block of ''"):
        said_of("```\n>>> 1\n2\n```\n")
    with pytest.raises(AssertionError, match="has no end"):
        said_of("```python\n>>> 1\n1\n")


def test_text_is_not_run():
    assert said_of("```text\n>>> 1\n2\n```\n\n```console\n>>> 1\n2\n```\n") == ""


def test_dead_links_are_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# A `title`, with marks\n\n```text\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](there.md) [b](there.md#a-title-with-marks) [c](#here) [d](https://x.org/y) ![p](missing.svg)\n"
        "[e](missing.md) [f](there.md#no-heading) [g](#there)\n```text\n[h](missing.md)\n```\n"
    )
    assert dead_links(page) == ["missing.svg", "missing.md", "there.md#no-heading", "#there"]


def test_a_number_that_no_code_prints_is_noticed():
    page = "0.25, 0.50 and 3.14 [x](y-2.5.md)\n\n```python\n>>> 0.5\n0.5\n>>> 1.25\n1.25\n```\n\n---\nsection 3.2\n"
    assert unproved(page) == ["0.25", "3.14"]

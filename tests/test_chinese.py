"""The Chinese README and guide have, page by page, the code, formulas, figures and numbers of the English ones.

The code of the English pages is run by tests/test_guide.py. That of a Chinese page is the same, letter by letter, so it
need not be run again. What can be compared of the prose is compared: headings, numbers, names in the letters of code,
and where its links lead.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

from test_guide import FENCE, LINK, ROOT

GUIDE = ROOT / "docs" / "guide"
PAIRS = {ROOT / "README.md": ROOT / "README.zh.md"} | {
    page: GUIDE / "zh" / page.name for page in sorted(GUIDE.glob("*.md"))
}
NUMBER = re.compile(r"(?<![\w.,:/-])\d(?:[\d,]*\d)?(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", re.ASCII)
CHINESE = re.compile(r"[\u4e00-\u9fff]")

every_pair = pytest.mark.parametrize("english", PAIRS, ids=lambda page: page.name)


def taken_apart(text: str) -> tuple[list[str], list[str]]:
    """A page's blocks (fenced ones, and indented ones after an empty line), and the lines of its prose."""
    blocks: list[str] = []
    prose: list[str] = []
    inside, before = False, ""
    for line in text.splitlines():
        fence = FENCE.match(line)
        if fence:
            blocks += [] if inside else [""]
            inside = not inside
        if fence or inside:
            blocks[-1] += line + "\n"
        elif line.startswith("    ") and (not before or before.startswith("    ")):
            blocks += [] if before else [""]
            blocks[-1] += line + "\n"
        else:
            prose.append(line)
        before = line
    return blocks, prose


def headings(prose: list[str]) -> list[tuple[str, str]]:
    """The level of each heading, and its number where it has one."""
    found = (re.match(r"(#+) (\d+\.)?", line) for line in prose)
    return [(match[1], match[2] or "") for match in found if match]


def targets(page: Path, prose: list[str]) -> Counter[str]:
    """Where links and figures lead, a Chinese page told by its English one; places within pages left out."""
    english = {other.resolve(): page.resolve() for page, other in PAIRS.items()}
    found = []
    for link in LINK.findall("\n".join(prose)):
        path, _, _ = link.partition("#")
        if re.match(r"[a-z]+:", link):
            found.append(link)
        elif path:
            target = (page.parent / path).resolve()
            found.append(str(english.get(target, target).relative_to(ROOT.resolve())))
        else:
            found.append(page.name.replace(".zh.", "."))
    return Counter(found)


def said(prose: list[str]) -> str:
    """The prose without its links' targets, and without names in the code's letters."""
    text = re.sub(r"\]\([^)\s]+\)", "]", "\n".join(prose))
    return re.sub(r"`[^`]*`|arXiv:\S+", " ", text)


def numbers(prose: list[str]) -> Counter[str]:
    """The numbers that a page says in digits, headings' and lists' own left out, and "section 3.2" too."""
    text = re.sub(r"^#+ \d+\.|^\d+\. ", "", said(prose), flags=re.MULTILINE)
    return Counter(NUMBER.findall(text))


def names(prose: list[str]) -> Counter[str]:
    """What stands in backticks."""
    return Counter(" ".join(name.split()) for name in re.findall(r"`[^`]+`", "\n".join(prose)))


def differences(english: Path, chinese: Path) -> list[str]:
    """In what the two pages differ, in words."""
    (blocks, prose), (their_blocks, their_prose) = (
        taken_apart(page.read_text(encoding="utf-8")) for page in (english, chinese)
    )
    wrong = [f"block {n}: {theirs!r} is not {ours!r}" for n, (ours, theirs) in enumerate(
        zip(blocks, their_blocks, strict=False), start=1) if ours != theirs]  # fmt: skip
    if len(blocks) != len(their_blocks):
        wrong.append(f"{len(their_blocks)} blocks of code and formulas instead of {len(blocks)}")
    for what, ours, theirs in (
        ("headings", headings(prose), headings(their_prose)),
        ("lists and tables", shape(prose), shape(their_prose)),
    ):
        if ours != theirs:
            wrong.append(f"{what}: {theirs} instead of {ours}")
    for what, count, other in (
        ("links", targets(english, prose), targets(chinese, their_prose)),
        ("numbers", numbers(prose), numbers(their_prose)),
        ("names", names(prose), names(their_prose)),
    ):
        if count != other:
            wrong.append(f"{what}: missing {dict(count - other)}, too many {dict(other - count)}")
    for line in "\n".join(their_prose).split("\n---\n")[0].splitlines():  # sources are told as they are
        foreign = re.sub(r"!\[[^\]]*\]|\]\([^)\s]+\)|`[^`\n]*`", "", line)
        if len(re.findall(r"[A-Za-z]{3,}", foreign)) > 5 and not CHINESE.search(foreign):
            wrong.append(f"not translated: {line}")
    return wrong


def shape(prose: list[str]) -> tuple[int, int, int]:
    """How many rows of tables, points of lists and folded answers there are."""
    kinds = (r"\|", r"(?:- |\d+\. )", r"<details>")
    return tuple(sum(bool(re.match(kind, line)) for line in prose) for kind in kinds)  # type: ignore[return-value]


@every_pair
def test_a_chinese_page_has_the_code_formulas_figures_links_and_numbers_of_the_english_one(english):
    chinese = PAIRS[english]
    assert chinese.is_file(), f"{chinese.relative_to(ROOT)} is missing"
    assert differences(english, chinese) == []


def test_no_chinese_page_is_without_an_english_one():
    there = {ROOT / "README.zh.md", *(GUIDE / "zh").glob("*")}
    assert there == set(PAIRS.values())


# --- the comparison notices what is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        (("1 + 1", "1 + 2"), "block 1"),
        (("    a = b", "    a = c"), "block 2"),
        (("## 二", "### 二"), "headings"),
        (("0.25", "0.35"), "numbers"),
        (("`plan`", "`look`"), "names"),
        (("../x.svg", "../y.svg"), "links"),
        (("- 三", "三"), "lists and tables"),
        (("中文", "These words of English were never translated"), "not translated"),
        (("", ""), ""),
    ],
)
def test_a_difference_is_noticed(tmp_path, change, noticed, monkeypatch):
    code = "\n\n```python\n>>> 1 + 1\n2\n```\n\n    a = b\n\n"
    english = f"# 1. One{code}## Two\n\nWords, 0.25, `plan`. ![p](x.svg)\n\n- three\n"
    chinese = f"# 1. 一{code}## 二\n\n中文，0.25，`plan`。![图](../x.svg)\n\n- 三\n"
    monkeypatch.setattr("test_chinese.ROOT", tmp_path)
    (tmp_path / "zh").mkdir()
    (tmp_path / "page.md").write_text(english, encoding="utf-8")
    (tmp_path / "zh" / "page.md").write_text(chinese.replace(*change, 1), encoding="utf-8")
    found = differences(tmp_path / "page.md", tmp_path / "zh" / "page.md")
    assert [line.split(":")[0] for line in found] == ([noticed] if noticed else [])

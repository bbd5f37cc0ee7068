"""The documentation as a site, built by `make docs`: the pages of the repository, and the reference from docstrings.

Docstrings are written to be read as they are: formulas and tables are indented blocks, names stand in single
backticks, and sections (Shapes, Args, Raises, ...) are those of Google's style. `as_restructured` turns that into what
Sphinx reads.
"""

import re
import sys
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from docutils.nodes import Element, Node
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.logging import getLogger

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

import regard  # noqa: E402

logger = getLogger(__name__)

project = "regard"
author = "the regard developers"
release = version = regard.__version__

# The sources are the repository, so that a link leads to the same place there and on the site.
include_patterns = ["*.md", "docs/**.md", "docs/**.rst", "src/regard/pretrained/**.md"]
exclude_patterns = [".*", "build", "dist", "tests", "runs"]
root_doc = "docs/index"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
default_role = "py:obj"  # a link where it names something of the reference
highlight_language = "none"  # formulas and tables; examples are found by their >>>
python_maximum_signature_line_length = 100
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

html_theme = "furo"
html_title = f"regard {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


SECTIONS = Config(napoleon_use_ivar=True, napoleon_custom_sections=["Shapes"])
HEADING = re.compile(r"(Shapes|Args|Attributes|Raises|Returns|Notes|References):")
STARRED = re.compile(r"(?<![\w*`])\*(?=\w+[\],)])")
INLINE = re.compile(r"(Shapes|Args|Raises|Returns|Notes): (\S.*)")


def as_restructured(lines: list[str]) -> list[str]:
    """A docstring as Sphinx reads it: blocks that are indented or laid out in columns are literal, tables are tables.

    >>> as_restructured(["A sum.", "", "    a + b", "", "a    first", "b    second"])
    ['A sum.', '', '::', '', '    a + b', '', '::', '', '    a    first', '    b    second']
    """
    written: list[str] = []
    flush = ""  # the last line that is not indented: below the heading of a section, indented lines are its text
    for filled, group in groupby(lines, key=lambda line: bool(line.strip())):
        block = list(group)
        if not filled:
            continue
        margin = "        " if HEADING.fullmatch(flush) else "    "
        flush = next((line for line in reversed(block) if not line.startswith(" ")), flush)
        if all(line.startswith(margin) for line in block):
            written += ["::", "", *block]
        elif len(block) > 1 and all(re.match(r"\S.*?\S? {2,}\S", line) for line in block):
            written += ["::", "", *("    " + line for line in block)]
        elif block[0].startswith("|"):
            written += [".. list-table::", "   :header-rows: 1", ""]
            for row in (block[0], *block[2:]):
                cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
                written += [f"   {'* -' if not number else '  -'} {cell}" for number, cell in enumerate(cells)]
        else:
            for line in block:
                inline = INLINE.fullmatch(line)
                written += [f"{inline[1]}:", f"    {inline[2]}"] if inline else [STARRED.sub(r"\\*", line)]
        written += [""]
    return written[:-1]


def process_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    kind = (
        "function" if what in ("attribute", "data", "property") else what
    )  # no "type: text" is read out of a sentence
    lines[:] = GoogleDocstring(as_restructured(lines), SECTIONS, app, kind, name, thing, options).lines()


def skip_member(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out constants, and the fields of named tuples, of which Python says nothing but their number."""
    field = (getattr(thing, "__doc__", None) or "").startswith("Alias for field number")
    return True if field or name.isupper() else None


def to_public(app: Sphinx, env: BuildEnvironment, node: Element, shown: Node) -> Node | None:
    """Links a name to where it is documented: `regard.masks.Causal`, and plain `Causal`, to `regard.Causal`.

    What is written as a name of regard must be one, whether it is documented or not.
    """
    target = node["reftarget"]
    if node.get("refdomain") != "py" or target.startswith(("torch.", "builtins.")):
        return None
    if target.startswith("regard."):
        try:
            resolve_name(target)
        except (ImportError, AttributeError):
            logger.warning("regard has no %s", target, location=node)
    for place in ("regard", "regard.interventions", "regard.Observation"):
        public = f"{place}.{target.rsplit('.', 1)[-1]}"
        if public in env.domains.python_domain.objects:
            return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, shown)
    return None


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("missing-reference", to_public)

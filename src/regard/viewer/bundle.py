"""The page's own files, and its modules joined into one, for where a page can have no others.

A module imports with ``import { a, b } from './other.js';`` and exports with ``export function``, ``export async
function``, ``export class`` or ``export const``, each at the beginning of a line. So a joined module is each of them in
a scope of its own, those that are imported first, and nothing has to be built when the package is.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

STATIC = Path(__file__).parent / "static"

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
"""What the files are, said in so many words: a system's own table may say otherwise of .js, and then no module runs."""

IMPORT = re.compile(r"^import \{([^}]*)\} from '\./([\w.-]+)';[ \t]*$", re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const)\b)", re.MULTILINE)
NAME = re.compile(r"^export (?:async )?(?:function\*?|class|const) ([\w$]+)", re.MULTILINE)


COMMENT = re.compile(r"^[ \t]*//.*\n|[ \t]+// [^'\"`\n]*$", re.MULTILINE)
"""A comment in a module; behind code only where no quote follows, so that nothing is taken out of a text."""


@cache
def files() -> dict[str, bytes]:
    """The page's files by name, read once; comments are for who reads the source."""
    found = {path.name: path.read_bytes() for path in sorted(STATIC.glob("*")) if path.suffix in TYPES}
    return found | {
        name: COMMENT.sub("", data.decode()).encode() for name, data in found.items() if name.endswith(".js")
    }


def sources() -> dict[str, str]:
    """The modules by name."""
    return {name: data.decode() for name, data in files().items() if name.endswith(".js")}


def joined(modules: Mapping[str, str], entry: str, exports: bool = False) -> str:
    """A module and all that it imports, as one.

    Args:
        exports: whether the result exports what the entry does, as one default object; else nothing.
    Raises:
        ValueError: a module that is not there, imports in a circle, or an import or export of another form.

    >>> print(joined({"a.js": "import { two } from './b.js';\\nalert(two);", "b.js": "export const two = 2;"}, "a.js"))
    const module_b = (() => {
    const two = 2;
    return { two };
    })();
    const module_a = (() => {
    const { two } = module_b;
    alert(two);
    return {  };
    })();
    <BLANKLINE>
    """
    parts: dict[str, str] = {}
    _join(modules, entry, parts, ())
    end = f"export default {_variable(entry)};\n" if exports else ""
    return "".join(parts.values()) + end


def _join(modules: Mapping[str, str], name: str, parts: dict[str, str], open_: tuple[str, ...]) -> None:
    """Puts a module behind those that it imports."""
    if name in open_:
        raise ValueError(f"{name}: imports itself: {' -> '.join((*open_, name))}")
    if name in parts:
        return
    if name not in modules:
        raise ValueError(f"{open_[-1] if open_ else 'the page'}: imports {name}, which is not there")
    source = modules[name]
    for found in IMPORT.finditer(source):
        _join(modules, found[2], parts, (*open_, name))
    exported = NAME.findall(source)
    code = IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};", source)
    code = EXPORT.sub("", code)
    for line in code.splitlines():
        if re.match(r"\s*(import\b(?!\s*\()|export\b)", line):
            raise ValueError(
                f"{name}: {line.strip()!r}: write import {{ a }} from './x.js'; or export function, class, const"
            )
    for found in IMPORT.finditer(source):
        missing = {word.strip() for word in found[1].split(",")} - {"", *NAME.findall(modules[found[2]])}
        if missing:
            raise ValueError(f"{name}: {found[2]} does not export {', '.join(sorted(missing))}")
    parts[name] = f"const {_variable(name)} = (() => {{\n{code.strip()}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))

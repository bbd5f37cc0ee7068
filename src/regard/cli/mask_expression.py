"""Masks as people write them on the command line: ``Causal() & Window(256)``, read without running anything."""

import ast
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.masks import Mask

NOT_WRITTEN = ("Dense", "Positioned", "Where")
"""Masks that cannot be written down: they need a tensor or a function, or are only derived from."""

ENTRY_POINTS = "regard.masks"
"""The entry point under which an installed package brings masks of its own: name = "module:Class"."""

LONGEST_LIST = 1 << 20
"""Numbers in a list of a written mask."""


def read_mask(text: str) -> "Mask":
    """The mask that an expression means: names of masks with numbers, joined by ``&``, ``|``, ``~``. Nothing is run.

    Raises:
        ValueError: anything else.

    >>> read_mask("Causal() & (Window(256) | Prefix(4))")
    Causal() & (Window(256) | Prefix(4))
    >>> read_mask("Causal() & open('x')")
    Traceback (most recent call last):
        ...
    ValueError: mask: 'open' is no mask; there are: Band, Causal, Chunk, Document, Padding, Prefix, Strided, Window
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _mask(tree)
    except SyntaxError as error:
        where = f", at character {error.offset}" if error.offset else ""
        raise ValueError(f"mask: {text[:80]!r} cannot be read{where}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("mask: too deeply nested") from None


def _mask(node: ast.expr) -> "Mask":
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _mask(node.left), _mask(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand)
    if isinstance(node, ast.Call):
        return _made(node)
    written = ast.unparse(node)
    hint = f"; write {written}(...)" if written in _known() else ""
    if isinstance(node, ast.BoolOp):
        hint = "; write & for and" if isinstance(node.op, ast.And) else "; write | for or"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        hint = "; write ~ for not"
    raise ValueError(f"mask: expected masks joined by & | ~, got {written!r}{hint}")


def _made(node: ast.Call) -> "Mask":
    """One mask, made from its name and numbers."""
    import torch

    name = ast.unparse(node.func)
    kind, _, maker = name.partition(".")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"mask: {name}: expected numbers and lists of numbers, got {ast.unparse(node)!r}")
    found = _kind(kind) if maker == "" or name == "Document.from_lengths" else None
    if found is None:
        if name in ("Dense", "Where"):
            raise ValueError(f"mask: {name} cannot be written down; there are: {', '.join(_known())}")
        close = get_close_matches(name, _known(), n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(_known())}"
        raise ValueError(f"mask: {name!r} is no mask{hint}")
    values = [_value(argument, name) for argument in node.args]
    named = {str(keyword.arg): _value(keyword.value, name) for keyword in node.keywords}
    try:
        if maker:
            made: Mask = getattr(found, maker)(*values, **named)
            return made
        given = {**dict(zip(found.fields, values, strict=False)), **named}
        for field, value in given.items():
            if isinstance(value, list) and len(found.axes.get(field, ())) > 1:  # data for each token is a tensor
                given[field] = torch.tensor(value)
        return found(*values[len(found.fields) :], **given)
    except TypeError as error:
        raise ValueError(f"mask: {ast.unparse(node)}: {error}") from None


def _known() -> "dict[str, type[Mask]]":
    """The masks of regard that numbers make, by name: every class of the files that define them."""
    from regard.masks import Mask, data, positional
    from regard.rules import RULE_KINDS

    files = (positional.__name__, data.__name__)
    kinds = {kind.__name__: kind for kind in RULE_KINDS.values() if kind.__module__ in files and issubclass(kind, Mask)}
    return {name: kinds[name] for name in sorted(kinds.keys() - NOT_WRITTEN)}


def _kind(name: str) -> "type[Mask] | None":
    """The class of that name: one of regard's, one that is defined, or one that a package brings."""
    from importlib.metadata import entry_points  # slow, and only a mask of somebody's own is looked for

    from regard import masks
    from regard.rules import RULE_KINDS

    if name in _known():
        return _known()[name]
    if not any(entry.name == name for entry in entry_points(group=ENTRY_POINTS)):
        own = (kind for kind in reversed(RULE_KINDS.values()) if not kind.__module__.startswith("regard."))
        return next((kind for kind in own if kind.__name__ == name and issubclass(kind, masks.Mask)), None)
    (entry,) = entry_points(group=ENTRY_POINTS, name=name)
    brought: type[Mask] = entry.load()
    return brought


def _value(node: ast.expr, name: str) -> Any:
    """A whole number, None, or a list of these, which may be repeated: ``[512] * 8``."""
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) is int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, name)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List):
        return [_value(element, name) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left, name), _value(node.right, name)
        if isinstance(left, list) and isinstance(right, int):
            if sum(len(part) if isinstance(part, list) else 1 for part in left) * right > LONGEST_LIST:
                raise ValueError(f"mask: {name}: a list of more than {LONGEST_LIST:,} numbers")
            return left * right
    raise ValueError(f"mask: {name}: expected numbers and lists of numbers, got {ast.unparse(node)!r}")

"""A mask that is put together by &, | and ~ as a list of terms, by which the library finds out what each query sees.

Its data may be others in each call: the operands, which are looked up in the order in which the masks have them.

    Causal() & (Document(ids) | Prefix(n))      ids, ids and n are the operands 0, 1 and 2
        BAND  DOCUMENT(0, 1)  PREFIX(2)  OR  AND
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from torch import Tensor

from regard.kernels.strips.binding import GIVEN, NOT_GIVEN, TermOf
from regard.masks import And, Band, Causal, Chunk, Dense, Document, Mask, Not, Or, Padding, Prefix, Strided, Window

BAND, PREFIX, CHUNK, STRIDED, DOCUMENT, PADDING, DENSE, AND, OR, NOT = range(10)
"""`enum kind_of_term` of c/terms.h."""

MOST_PARTS = 3
"""PARTS of c/terms.h."""

MOST_DEPTH = 8
"""Of the stack: MOST_DEPTH of c/terms.h."""

OPEN = frozenset({"offset", "n"})
"""Attributes that may be other whole numbers in each call. All others are those of the terms."""

PARTS: dict[type[Mask], tuple[int, tuple[str, ...]]] = {
    Band: (BAND, ("before", "after", "offset")),
    Causal: (BAND, ("before", "after", "offset")),
    Window: (BAND, ("before", "after", "offset")),
    Prefix: (PREFIX, ("n",)),
    Chunk: (CHUNK, ("size", "offset")),
    Strided: (STRIDED, ("step", "offset")),
    Document: (DOCUMENT, ("query_ids", "key_ids")),
    Padding: (PADDING, ("keys",)),
    Dense: (DENSE, ("mask", "_axes")),
}
"""Of each kind of mask, its term, and what the parts of that are; a mask that is derived from it may have a rule of its
own."""

_JOINED = {And: AND, Or: OR}


class Term(NamedTuple):
    """A term: its kind, and for each of its parts where it is from, and its number, as c/terms.h has them."""

    kind: int
    parts: tuple[tuple[int, int], ...] = ()

    def told(self) -> TermOf:
        """As the library is told."""
        parts = *self.parts, *[(NOT_GIVEN, 0)] * (MOST_PARTS - len(self.parts))
        return TermOf(self.kind, *(zip(*parts, strict=True)))


def terms_of(mask: Mask) -> list[Term] | None:
    """The terms of a mask; None if the library cannot find out what it shows."""
    terms = _terms_of(mask, count())
    if terms is None or _depth(terms) > MOST_DEPTH:
        return None
    return terms


def _terms_of(mask: Mask, operands: Iterator[int]) -> list[Term] | None:
    if isinstance(mask, And | Or):
        left, right = _terms_of(mask.left, operands), _terms_of(mask.right, operands)
        return None if left is None or right is None else [*left, *right, Term(_JOINED[type(mask)])]
    if type(mask) is Not:
        hidden = _terms_of(mask.mask, operands)
        return None if hidden is None else [*hidden, Term(NOT)]
    if type(mask) not in PARTS or mask._first_batch:
        return None
    kind, names = PARTS[type(mask)]
    found = {name: next(operands) for name in mask.fields if is_operand(name, getattr(mask, name))}
    values = ((name, getattr(mask, name)) for name in names)
    return [Term(kind, tuple(_part(found.get(name), value) for name, value in values))]


def _part(operand: int | None, value: int | None) -> tuple[int, int]:
    if operand is not None:
        return operand, 0
    return (NOT_GIVEN, 0) if value is None else (GIVEN, value)


def is_operand(name: str, value: object) -> bool:
    """Whether an attribute of a mask may be another in each call."""
    return isinstance(value, Tensor) or (name in OPEN and type(value) is int)


def _depth(terms: list[Term]) -> int:
    depths, depth = [], 0
    for term in terms:
        depth += 1 if term.kind < AND else 0 if term.kind == NOT else -1
        depths.append(depth)
    return max(depths)

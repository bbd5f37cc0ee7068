"""What a head can be called where there are no tokens to go by: in a sequence, in an image, between two sequences.

Every share is what goes beyond even attention, so that it is 0 for a head that looks everywhere alike and 1 for one
that looks nowhere else:

    share = sum(weight on the kind's keys - even) / sum(1 - even)        over batch and queries
    even  = the kind's visible keys / all visible keys, of a query

Queries for which the kind has no keys, or all that they see, do not count.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOCAL_DISTANCE = 8
"""Nearer than this is local."""

Rule = Callable[[Tensor, Tensor], Tensor]
"""Of a query's index [rows, 1] and a key's [1, columns]: whether the key is of the kind."""


class Kinds(NamedTuple):
    """The kinds of one way of reading.

    Attributes:
        reads: what it is: "sequence", "image 7 x 7 + 1", "another sequence".
        rules: by kind. wide: those of them that are so wide that more of them is needed to mean something.
        first: the first query that is described; the special tokens of an image come before it.
        place: where a query stands among the keys; its distances are counted from there.
    """

    reads: str
    rules: dict[str, Rule]
    wide: frozenset[str]
    first: int
    place: Callable[[Tensor], Tensor]


def sequence() -> Kinds:
    """Sound, vectors, patches whose places are not known: i is the query's place, j the key's.

    previous    j = i - 1
    next        j = i + 1
    first       j = 0
    same        j = i
    local       |i - j| < LOCAL_DISTANCE                (wide)
    """
    return Kinds(
        "sequence",
        {
            "previous": lambda i, j: j == i - 1,
            "next": lambda i, j: j == i + 1,
            "first": lambda i, j: (j == 0) & (i >= 0),
            "same": lambda i, j: j == i,
            "local": lambda i, j: (i - j).abs() < LOCAL_DISTANCE,
        },
        frozenset({"local"}),
        0,
        lambda i: i,
    )


def image(rows: int, columns: int, special: int) -> Kinds:
    """Patches in rows and columns, read line by line, after `special` tokens: CLS, then registers. Described are the
    patches' queries; r and c are the row and column of the query's patch, s and d of the key's.

    same         s = r and d = c
    neighbour    |r - s| <= 1 and |c - d| <= 1, another patch
    row          s = r, another patch
    column       d = c, another patch
    CLS          the first special token, where there is one
    registers    the special tokens after it, where there are any
    """

    def where(index: Tensor) -> tuple[Tensor, Tensor]:
        patch = index - special
        return patch.div(columns, rounding_mode="floor"), patch.remainder(columns)

    def patches(rule: Callable[[Tensor, Tensor], Tensor]) -> Rule:
        """A rule of the distances between rows and between columns, for other patches alone."""

        def chosen(i: Tensor, j: Tensor) -> Tensor:
            (r, c), (s, d) = where(i), where(j)
            return rule((r - s).abs(), (c - d).abs()) & (j >= special) & (i != j)

        return chosen

    rules: dict[str, Rule] = {
        "same": lambda i, j: i == j,
        "neighbour": patches(lambda down, across: (down <= 1) & (across <= 1)),
        "row": patches(lambda down, across: (down == 0) & (across >= 0)),
        "column": patches(lambda down, across: (across == 0) & (down >= 0)),
    }
    if special:
        rules["CLS"] = lambda i, j: (j == 0) & (i >= 0)
    if special > 1:
        rules["registers"] = lambda i, j: (j > 0) & (j < special) & (i >= 0)
    reads = f"image {rows} x {columns}" + (f" + {special}" if special else "")
    return Kinds(reads, rules, frozenset(), special, lambda i: i)


def another(query_len: int, key_len: int) -> Kinds:
    """Another sequence than the queries' own (cross-attention): M queries and N keys, the query's place among the keys
    being p = i (N - 1) / (M - 1), as if both ran side by side.

    aligned      |j - p| <= max(1, N / 16)
    first key    j = 0
    last key     j = N - 1
    """
    step = (key_len - 1) / max(1, query_len - 1)
    width = max(1.0, key_len / 16)

    def place(i: Tensor) -> Tensor:
        return i * step

    rules: dict[str, Rule] = {
        "first key": lambda i, j: (j == 0) & (i >= 0),
        "last key": lambda i, j: (j == key_len - 1) & (i >= 0),
    }
    if query_len > 1:  # one query stands nowhere
        rules["aligned"] = lambda i, j: (j - place(i)).abs() <= width
    return Kinds("another sequence", rules, frozenset(), 0, place)


def beyond_even(weight: Tensor, even: Tensor, counts: Tensor) -> Tensor:
    """The share above, of weights [batch, heads, queries] on a kind's keys: [heads]."""
    counted = (counts & (even > 0) & (even < 1)).to(weight.dtype)
    tiny = torch.finfo(weight.dtype).tiny
    return ((weight - even) * counted).sum((0, 2)) / ((1 - even) * counted).sum((0, 2)).clamp(min=tiny)

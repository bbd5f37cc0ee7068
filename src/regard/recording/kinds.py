"""Head types where no tokens are known: in a sequence, in an image, between two sequences.

A share is the weight in excess of uniform attention: 0 for a head that attends uniformly, 1 for one that attends only
to the keys of this kind:

    share = sum(weight on the kind's keys - even) / sum(1 - even)        over batch and queries
    even  = the kind's visible keys / all visible keys, of a query

Queries that see no keys of the kind, or only such keys, are left out.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LOCAL_DISTANCE = 8
"""Distances below this are local."""

Rule = Callable[[Tensor, Tensor], Tensor]
"""From a query's index [rows, 1] and a key's [1, columns]: whether the key is of the kind."""


class Kinds(NamedTuple):
    """The kinds for one type of input.

    Attributes:
        reads: the type of input: "sequence", "image 7 x 7 + 1", "another sequence".
        rules: by kind.
        first: the first query that counts; the special tokens of an image come before it.
        place: the position of a query among the keys, from which distances are counted.
    """

    reads: str
    rules: dict[str, Rule]
    first: int
    place: Callable[[Tensor], Tensor]


def sequence() -> Kinds:
    """Sound, vectors, or patches of unknown position: i is the query's index, j the key's.

    previous    j = i - 1
    next        j = i + 1
    first       j = 0
    same        j = i
    local       |i - j| < LOCAL_DISTANCE
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
        0,
        lambda i: i,
    )


def image(rows: int, columns: int, special: int) -> Kinds:
    """Patches in row-major order after `special` tokens: CLS, then registers. Only the queries of patches count; r and
    c are the row and column of the query's patch, s and d those of the key's.

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
        """A rule of the row and column distances, for other patches only."""

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
    return Kinds(reads, rules, special, lambda i: i)


def another(query_len: int, key_len: int) -> Kinds:
    """Another sequence than the queries' own (cross-attention): M queries and N keys. Query i corresponds to key
    position p = i (N - 1) / (M - 1), as if both sequences ran in parallel.

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
    if query_len > 1:  # a single query has no such position
        rules["aligned"] = lambda i, j: (j - place(i)).abs() <= width
    return Kinds("another sequence", rules, 0, place)


def beyond_even(weight: Tensor, even: Tensor, counts: Tensor) -> Tensor:
    """The share defined above, from the weights [batch, heads, queries] on a kind's keys, where it counts: [heads]."""
    tiny = torch.finfo(weight.dtype).tiny
    return ((weight - even) * counts).sum((0, 2)) / ((1 - even) * counts).sum((0, 2)).clamp(min=tiny)

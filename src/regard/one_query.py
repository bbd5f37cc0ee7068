"""One query, as in writing token by token: whatever does not depend on the numbers is done once.

A step of a small model takes a few milliseconds, of which attention's arithmetic is a few hundredths; checking a call
and choosing its kernel takes as long again. So a call that is like an earlier one but for its numbers, its mask and
how many keys there are is known by its form, in all layers and steps. Where something hidden may have had a part in the
result, a call takes the ordinary way, which puts zeros in its place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias, Sum
from regard.checked import MAX_FORMS, NEW, Form, kinds_of
from regard.graphs import as_it_stands
from regard.kernels import Single, choose
from regard.kernels.call import learns
from regard.kernels.hidden import Hidden
from regard.kernels.known import Recent, keep
from regard.kernels.strips.binding import is_there
from regard.masks import EVERYTHING, Mask, Padding
from regard.masks.planning import keys_of_last, product_of
from regard.numerics import wide
from regard.rules import Positioned, contents, settled
from regard.scores import Scoring
from regard.shapes import Grid
from regard.validation import check_call


class Seen(NamedTuple):
    """What a single query sees: consecutive keys, None for all of them, and which of these are hidden in some rows."""

    keys: range | None = None
    hidden: Hidden | None = None


EVERY_KEY = Seen()

_KNOWN: dict[Form, Single | None] = {}
"""Calls by their form; None for those that have no such way."""

_SEEN: Recent[Seen] = Recent(8)
"""What a query sees under masks that were looked at."""

_ROWS: Recent[Tensor] = Recent(8)
"""The numbers of biases by distance, for any number of keys of the same magnitude."""


def attention_of_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    additive: object,
    dropout: float,
    generator: object,
    wants_lse: bool,
    kernel: object,
) -> tuple[Tensor, Tensor | None] | None:
    """Output and lse of one query, [batch, heads, 1, head_dim]. None where a call has to take the ordinary way: where
    something learns or is dropped, and where it is not valid."""
    if not (type(key) is type(value) is Tensor and query.is_cpu and as_it_stands()) or key.is_nested:
        return None
    if additive is not None or generator is not None or type(dropout) is not float or dropout or kernel != "auto":
        return None
    seen: Seen | None = EVERY_KEY
    added = None if isinstance(bias, Bias) else bias
    if mask is not None or added is not bias:
        of_query, of_key = query.shape, key.shape
        if (torch.is_grad_enabled() and any(map(learns, (query, key, value)))) or not len(of_query) == len(of_key) == 4:
            return None  # before anything is looked at
        try:
            if mask is not None:
                seen = _seen_under(mask, of_query, of_key[2], query)
            if seen is not None and isinstance(bias, Bias):
                added = _numbers_of(bias, of_query, of_key[2], query)
        except (TypeError, ValueError):  # which the ordinary way words
            return None
    return None if seen is None else attend_one(query, key, value, scale, softcap, sink, added, seen, wants_lse)


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    seen: Seen = EVERY_KEY,
    wants_lse: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Output, and lse if it is wanted, of one query, which is computed now and as it is (`as_it_stands`); None where it
    has to take the ordinary way."""
    kinds = kinds_of(query, key, value, scale, softcap, sink, bias, of_one=True)
    if kinds is None:
        return None
    form = kinds, wants_lse
    single: Single | None = _KNOWN.get(form, NEW)
    if single is NEW:
        if not query.dim() == key.dim() == value.dim() == 4 or not (bias is None or bias.dim() == 4):
            return None
        call = check_call("attention", query, key, value, None, bias, scale, softcap, sink, None, 0.0, None, wants_lse)
        found = None if torch._C._is_any_autocast_enabled() else choose(call).single(call)
        single = keep(_KNOWN, form, found, MAX_FORMS)
    if single is None:
        return None
    keys, hidden = seen
    if keys is not None:
        start, length = keys.start, len(keys)
        key, value = key.narrow(2, start, length), value.narrow(2, start, length)
        if bias is not None and bias.shape[3] > 1:
            bias = bias.narrow(3, start, length)
    return single(query, key, value, sink, hidden, bias)


def _seen_under(mask: object, of_query: Sequence[int], key_len: int, query: Tensor) -> Seen | None:
    """What the only query of a call sees; None where it sees nothing, and where the ordinary way finds out better."""
    if not isinstance(mask, Mask):
        return None
    keys, others = keys_of_last(mask, key_len)
    if not keys and key_len:
        return None
    seen = EVERY_KEY if len(keys) == key_len else Seen(keys)
    if not others:
        return seen
    if not is_there(wide(query.dtype)):
        return None  # then which kernel is best depends on the mask
    cells = padding_of(others)
    if cells is not None:
        # in the next call with one key more: to look costs less than to compare
        rows, columns = cells.shape
        if rows not in (1, of_query[0]) or columns != key_len or not cells.is_cpu:
            return None
        if seen.keys is not None:
            cells = cells.narrow(1, keys.start, len(keys))
        return Seen(seen.keys, Hidden(cells.view(rows, 1, 1, len(keys)), hides=True))
    grid = Grid(of_query[0], of_query[1], 1, key_len, query.device)
    known = mask.structure()
    if known is None:
        return _looked_at(others, keys, grid, seen)
    return _SEEN.get((known, grid), lambda: _looked_at(others, keys, grid, seen))


def padding_of(masks: list[Mask]) -> Tensor | None:
    """Which keys are real, if masks are nothing but padding that says so of each: [1 or batch, key]."""
    alone = masks[0] if len(masks) == 1 else None
    return alone.keys if type(alone) is Padding and alone.keys.dtype is torch.bool else None


def _looked_at(others: list[Mask], keys: range, grid: Grid, seen: Seen) -> Seen:
    """The same, and which of the keys are hidden by other masks than bands."""
    bound = product_of(others).bind(grid)
    if bound is EVERYTHING:
        return seen
    allowed = bound.allowed(range(1), keys).detach()  # not a view, which would keep the mask's tensors
    return seen._replace(hidden=Hidden(allowed, hides=True))


def _numbers_of(bias: Bias, of_query: Sequence[int], key_len: int, query: Tensor) -> Tensor:
    """What a bias adds to the scores of the only query: [1 or batch, 1 or heads, 1, 1 or key_len]."""
    row = row_of(bias, of_query, key_len, query)
    if row is None:
        return _row(bias, Grid(of_query[0], of_query[1], 1, key_len, query.device), wide(query.dtype))
    return row.narrow(3, row.shape[3] - key_len, key_len)


def row_of(bias: Bias, of_query: Sequence[int], key_len: int, query: Tensor) -> Tensor | None:
    """What a bias adds to the scores of a query that is the last key's own, for as many keys as there may be up to the
    next power of two, of which those of fewer keys are the last; None if it does not count from the last key."""
    batch, heads, dtype = of_query[0], of_query[1], wide(query.dtype)
    known = contents(bias)
    if known is None or not counts_from_the_last(bias):
        return None
    most = 1 << key_len.bit_length()

    def make() -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return _row(settled(bias), Grid(batch, heads, 1, most, query.device), dtype)

    return _ROWS.get((known, batch, heads, most, dtype), make)


def _row(bias: Bias, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The numbers of the only query of a call."""
    return Scoring(grid, 1.0, bias=bias.bind(grid)).biases(range(1), range(grid.key_len), dtype)


def counts_from_the_last(bias: Bias) -> bool:
    """Whether it depends on the distance alone, and the last key is the query's own."""
    if isinstance(bias, Sum):
        return counts_from_the_last(bias.left) and counts_from_the_last(bias.right)
    if not (bias.of_distance and isinstance(bias, Positioned)) or bias.offset is not None:
        return False
    return type(bias).__module__ == "regard.biases"


def forget() -> None:
    """Empties the cache of calls."""
    _KNOWN.clear()

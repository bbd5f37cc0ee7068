"""Calls of other lengths than an earlier one, as texts come and as they are written, token by token.

To validate a call of a new length, to choose its kernel and to plan it takes Python longer than torch takes for 128
tokens. Where each query sees a band of the keys that counts from its own, none of that is needed: what the compiled
library is told for one length holds for all. It finds out about padding, documents, cells and the offset of queries
itself, in every call. The choice is made for a few lengths of the same magnitude, the least and the most among them,
and holds if it is the library for all of them.

What `&`, `|` and `~` make of masks that hold data, it finds out by terms (`kernels.strips.terms`). The answers of
functions are asked for, as cells.

Of what other masks of positions say, as a window or a prefix, alternatives are noted (`seen_from_own_key`). One query
reads the keys of each. Of several, the library writes down who sees whom, as if it were data, and computes what lies
between, too, if that is little: to plan strips that leave it out takes Python several times as long.

Calls that learn have a plan for their gradients, by another way: it is made when they are asked for, of all calls of
the same lengths. What the library found out about data, as intervals of keys, is kept for it.
"""

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from regard import checked
from regard.biases import Bias
from regard.kernels import Call, choose
from regard.kernels.call import learns
from regard.kernels.choice import is_found_out
from regard.kernels.known import keep
from regard.kernels.strips import NATIVE_KERNEL, binding, tuning
from regard.kernels.strips.added import is_read, of_all_distances
from regard.kernels.strips.autograd import Alike, Fixed, beside, without_table
from regard.kernels.strips.binding import MOST_ALTERNATIVES, RepeatedOf, TermOf
from regard.kernels.strips.engines import NATIVE
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.intervals import Interval, Within, cells_of, has_gaps, intervals_from
from regard.kernels.strips.native import plan_within
from regard.kernels.strips.order import by_form
from regard.kernels.strips.single import told_of_one
from regard.kernels.strips.terms import PARTS, Term, terms_of
from regard.kernels.strips.work import by_query
from regard.masks import And, Band, Dense, Document, Mask, Not, Or, Padding
from regard.masks.planning import (
    EVERY_DIAGONAL,
    Alternative,
    Diagonals,
    factors,
    from_own_key,
    holds_data,
    product_of,
    seen_from_own_key,
)
from regard.numerics import wide
from regard.one_query import counts_from_the_last, row_of
from regard.repeated import (
    BIAS,
    DROPOUT,
    KEY,
    MASK,
    NAME,
    QUERY,
    SINK,
    VALUE,
    WANTS_LSE,
    Results,
    is_read_as_it_is,
    note_as,
    note_gradients,
    note_results,
)  # fmt: skip
from regard.rules import settled
from regard.shapes import Grid, Offset
from regard.validation import check_call

MAX_LENGTH = (1 << 12) - 1
"""Queries and keys of calls of several queries that are noted: beside computing more, finding out how takes no time."""

MAX_TEXTS = 256
"""Most texts that are padded: MOST_TEXTS of c/data.h."""

MAX_SCORES = 1 << 24
"""Scores of calls with a mask of cells: MOST_SCORES of c/data.h."""

MAX_PLANS = 8
"""Lengths of which the plans of gradients are kept, of one call that is noted."""

ONE_OF = 8
"""Of so many calls that can be noted one is, after the first `checked.MAX_OPEN`."""

MOST_CELLS = 1 << 17
"""MOST_CELLS of c/repeated.h."""

_DATA = frozenset({torch.bool, torch.int64})
_BY_LIBRARY = frozenset({"auto", NATIVE_KERNEL.name})


def note(given: tuple[Any, ...]) -> Results | None:
    """Notes a call that the library can compute, for any lengths of the same magnitudes, and offsets: if what each
    query sees is counted from its own key, but for masks that hold data, and nothing is added to its scores but what
    follows from how far a key is from the last query's, which is the last; or a tensor, for one query, or for calls of
    the same lengths whose data are others.

    Returns:
        Output and lse where calls like it are computed in another way than by a plan of their own, so that all of them
        have the same numbers to the last bit; None otherwise.
    """
    library = binding.compiled(torch.float32)
    if library is None:
        return None
    kind = _kind_of(given)
    if not _has_a_way(given, kind, library):
        return None
    if _has_functions(given[MASK]) and not kind.several:
        return None  # of one query, nobody looks for a call with their answers
    given = with_cells(given) or given
    seen = _seen_by_the_library(given, kind)
    if seen is None or not (_is_added(given[BIAS], seen, kind, library) and _has_its_turn()):
        return None
    calls = _of_any_lengths(given, seen, kind)
    if any(_is_left_to_others(call, given) for call in calls):
        return None
    before, way = checked.noted, _way(given, calls[0], seen, kind, library)
    note_as(library, given, way, any_data=seen.has_data, any_table=kind.any_table, by_terms=bool(seen.terms))
    if not (seen.alternatives and kind.several):
        return None
    results = library.repeat(given, checked.noted)
    if results is None:  # the library leaves it to strips
        checked.noted = before
    return results


def _is_left_to_others(call: Call, given: tuple[Any, ...]) -> bool:
    """Whether another kernel computes a call with that mask, of which this one may have no data."""
    if given[NAME] in _BY_LIBRARY and is_found_out(call, given[MASK]):
        return False
    return choose(call, given[NAME]) is not NATIVE_KERNEL


def with_cells(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A call with the answers of the functions in its mask as cells: to plan strips by these takes Python longer than a
    small call, and they may be other functions in every call. None for a call without any, and for too many scores."""
    query, key, _, mask, *_ = given
    if not _has_functions(mask) or given[NAME] not in _BY_LIBRARY:
        return None
    if not (type(query) is type(key) is Tensor and query.is_cpu and len(query.shape) == len(key.shape) == 4):
        return None
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    if batch * heads * queries * keys > MAX_SCORES:
        return None
    try:
        with torch.inference_mode(False):
            changed = _evaluated(mask, Grid(batch, heads, queries, keys, query.device))
    except (TypeError, ValueError, RuntimeError):  # which the ordinary way words
        return None
    return None if changed is None else (*given[:MASK], changed, *given[BIAS:])


def _has_functions(mask: object) -> TypeGuard[Mask]:
    """Whether it is a mask of which some say by a function what they show."""
    return isinstance(mask, Mask) and not all(map(_is_known, mask.leaves()))


def _is_known(leaf: Mask) -> bool:
    return type(leaf) in PARTS or leaf.closed_form


def _evaluated(mask: Mask, grid: Grid) -> Mask | None:
    """A mask with functions as cells; None if these are too many."""
    if isinstance(mask, And | Or):
        left, right = _evaluated(mask.left, grid), _evaluated(mask.right, grid)
        return None if left is None or right is None else type(mask)(left, right)
    if type(mask) is Not:
        hidden = _evaluated(mask.mask, grid)
        return None if hidden is None else Not(hidden)
    if _is_known(mask):
        return mask
    cells = cells_of(mask.bind(grid), grid)
    return None if cells is None else Dense(cells)


class _Seen(NamedTuple):
    """What a query sees, counted from its own key.

    Attributes:
        diagonals: of bands alone. alternatives: under bands and other masks of positions, if there are any.
        data: masks that the library has to find out about in each call, as it has about the offset of bands. terms:
            what these say together, if it finds that out by terms.
    """

    diagonals: Diagonals
    alternatives: list[Alternative]
    data: list[Mask]
    offset: Offset
    terms: list[Term] = []  # noqa: RUF012

    @property
    def has_data(self) -> bool:
        return bool(self.data) or self.offset is not None


class _Kind(NamedTuple):
    """What sort of call it is: whether there are several queries, whether it learns, whether its bias is a tensor, and
    whether that may be of any length."""

    several: bool
    learned: bool
    has_table: bool
    any_table: bool


def _seen_by_the_library(given: tuple[Any, ...], kind: _Kind) -> _Seen | None:
    """The same if the library finds out about data in every such call, by itself or by terms."""
    seen = _seen_under(given[MASK])
    return seen if _is_found_out(seen, given, kind) else _in_terms(given)


def _seen_under(mask: Mask | None) -> _Seen:
    if mask is None:
        return _Seen(EVERY_DIAGONAL, [], [], None)
    offset = next((part.offset for part in factors(mask) if isinstance(part, Band) and part.offset is not None), None)
    diagonals, others = from_own_key(mask, offset)
    data = others if offset is not None else [other for other in others if seen_from_own_key(other) is None]
    if len(data) == len(others):
        return _Seen(diagonals, [], others, offset)
    found = seen_from_own_key(product_of(part for part in factors(mask) if part not in data))
    if not found or len(found) > MOST_ALTERNATIVES or sum(one.step > 1 for one in found) > 1:
        return _Seen(diagonals, [], others, offset)
    return _Seen(diagonals, found, data, offset)


def _in_terms(given: tuple[Any, ...]) -> _Seen | None:
    """The same by bands, and by terms for all other masks, of which a plan would evaluate cells; None if there are no
    terms for some."""
    (batch, heads, queries, _), keys = given[QUERY].shape, given[KEY].shape[2]
    scores = batch * heads * queries * keys
    diagonals, others = from_own_key(given[MASK])
    if scores > MAX_SCORES or not (others and all(map(holds_data, others))):
        return None
    terms = terms_of(product_of(others))
    return None if terms is None else _Seen(diagonals, [], others, None, terms)


def _kind_of(given: tuple[Any, ...]) -> _Kind:
    several, has_table = given[QUERY].shape[2] > 1, isinstance(given[BIAS], Tensor)
    learning = *given[: VALUE + 1], given[SINK], given[BIAS] if has_table else None
    learned = torch.is_grad_enabled() and any(map(learns, learning))
    return _Kind(several, learned, has_table, has_table and not several and not learned)


def _is_found_out(seen: _Seen, given: tuple[Any, ...], kind: _Kind) -> bool:
    """Whether the library finds out which keys are seen, in every such call."""
    batch, heads, queries, _ = given[QUERY].shape
    keys = given[KEY].shape[2]
    if len({*map(type, seen.data)}) < len(seen.data):
        return False
    if not all(_may_be_another(mask, batch * heads * queries * keys) for mask in seen.data):
        return False
    if not seen.alternatives:
        return True
    if kind.several:
        return queries * keys <= MOST_CELLS and not any(type(mask) is Dense for mask in seen.data)
    return not kind.learned


def _is_added(bias: Bias | Tensor | None, seen: _Seen, kind: _Kind, library: binding.Compiled) -> bool:
    """Whether the library adds a bias to the scores of any such call. Those with a tensor, of the same lengths and
    under a mask without data, are known by their form."""
    if isinstance(bias, Tensor):
        return (seen.has_data or kind.any_table) and bias.dim() == 4 and is_read(bias, library.dtype)
    return bias is None or counts_from_the_last(bias)


def _way(
    given: tuple[Any, ...], call: Call, seen: _Seen, kind: _Kind, library: binding.Compiled
) -> Callable[[RepeatedOf], list[object]]:
    """How calls like one of these lengths are computed, as `note_as` takes it."""
    bias, sink = given[BIAS], given[SINK]
    told = told_of_one(call, seen.diagonals, seen.alternatives)
    told.tile.spare = spare = 2 * library.lanes if kind.several and not kind.has_table else 0
    told.has_lse = kind.learned or given[WANTS_LSE]
    told.has_exact = kind.learned and given[QUERY].dtype is not library.dtype
    row = _row_of(bias, given[QUERY], given[KEY].shape[2], spare) if isinstance(bias, Bias) else None

    terms = (TermOf * len(seen.terms))(*(term.told() for term in seen.terms))

    def way(made: RepeatedOf) -> list[object]:
        made.one, made.told = ctypes.addressof(told), (sink is not None) + kind.has_table
        made.row = None if row is None else id(row)
        made.term, made.terms = ctypes.addressof(terms), len(terms)
        laid = given[QUERY].shape[3] == given[VALUE].shape[3]
        results = note_results(made, given, library, laid, told.has_exact, _new_lse if told.has_lse else None)
        finds = seen.has_data or bool(seen.alternatives)
        return [told, row, terms, *results, *(_learning(made, given, finds) if kind.learned else ())]

    return way


def _has_its_turn() -> bool:
    """Whether a call is noted of those that can be: what that takes is longer than a small call."""
    checked.open_left -= 1
    return checked.open_left >= 0 or checked.open_left % ONE_OF == 0


def _has_a_way(given: tuple[Any, ...], kind: _Kind, library: binding.Compiled) -> bool:
    """Whether the library computes such calls of other lengths by itself, and gradients follow from what stays."""
    query, key, value, sink, bias = given[QUERY], given[KEY], given[VALUE], given[SINK], given[BIAS]
    of_bias = () if bias is None or isinstance(bias, Tensor) else bias.learned()
    if given[DROPOUT] or (torch.is_grad_enabled() and any(map(learns, of_bias))):
        return False
    if torch._C._is_any_autocast_enabled() or wide(query.dtype) is not library.dtype:
        return False
    if not key.stride(3) == value.stride(3) == 1 or not key.shape[2] or not value.shape[3]:
        return False
    if query.shape[2] > 1 and max(query.shape[2], key.shape[2]) > MAX_LENGTH:
        return False
    return sink is None or is_read_as_it_is(sink, library)


def _may_be_another(mask: Mask, scores: int) -> bool:
    """Whether the library finds out which keys are seen by the data of a mask, in every call of so many scores."""
    if type(mask) is Padding:
        return len(mask.keys) <= MAX_TEXTS and mask.keys.dtype in _DATA
    if type(mask) is Dense:
        return scores <= MAX_SCORES
    if type(mask) is not Document or not mask.query_ids.dtype is mask.key_ids.dtype is torch.int64:
        return False
    return mask.closed_form or scores <= tuning.SCORES_WORTH_SORTING_DOCUMENTS


def _of_any_lengths(given: tuple[Any, ...], seen: _Seen, kind: _Kind) -> list[Call]:
    """Calls like this one with the least and the most queries and keys of the same magnitudes, and with the least whose
    last queries leave lanes empty, under what of the mask holds no data; or this one, if a tensor is added to it."""
    query, key, value, mask, bias, *rest, _ = given
    if kind.has_table:
        return [check_call("attention", *given[:NAME])]
    mask = None if mask is None else product_of(part for part in factors(mask) if part not in seen.data)
    queries, keys = (_of_magnitude(tensor.shape[2].bit_length()) for tensor in (query, key))
    lengths = zip(queries, keys, strict=True) if query.shape[2] == key.shape[2] else product(queries, keys)
    calls = []
    for of_query, of_key in {*lengths}:
        three = _of_length(query, of_query), _of_length(key, of_key), _of_length(value, of_key)
        calls.append(check_call("attention", *three, mask, bias, *rest))
    return calls


def _of_magnitude(bits: int) -> tuple[int, int, int]:
    least, end = 1 << bits - 1, 1 << bits
    return least, min(least + 1, end - 1), end - 1


def _row_of(bias: Bias, query: Tensor, key_len: int, spare: int) -> Tensor:
    """What a bias adds to scores, as `struct repeated` has it: [batch or 1, heads or 1, 1, numbers]."""
    batch, heads, length, _ = query.shape
    if length == 1:
        row = row_of(bias, query.shape, key_len, query)
        assert row is not None  # it counts from the last
        return row
    most = 1 << max(length, key_len).bit_length()
    with torch.inference_mode(False), torch.no_grad():
        grid = Grid(batch, heads, most, most, query.device)
        row = of_all_distances([*settled(bias).bind(grid).terms()], grid, wide(query.dtype))
        assert row is not None
        return by_query(row, spare)[:, :, None]


def _of_length(tensor: Tensor, length: int) -> Tensor:
    """One like it, but for its length, that takes no memory: nobody reads it."""
    other = tensor.new_empty(tensor.shape[3]).expand(*tensor.shape[:2], length, -1)
    return other.requires_grad_() if tensor.requires_grad and torch.is_grad_enabled() else other


def _learning(made: RepeatedOf, given: tuple[Any, ...], has_data: bool) -> list[object]:
    """As `note_gradients`."""
    rule = None if given[MASK] is None else _rule_of(given[MASK])
    bias = settled(given[BIAS]) if isinstance(given[BIAS], Bias) else None
    made.keeps_bias = isinstance(given[BIAS], Tensor)
    rest = *given[BIAS + 1 : SINK], None, *given[SINK + 1 : NAME]
    fixed = _Fixed(rule, bias, rest, has_table=bool(made.keeps_bias))
    learned = () if bias is None else bias.learned()
    return note_gradients(made, fixed, learned, fixed.with_data if has_data else None)


def _rule_of(mask: Mask) -> Mask:
    """The bands that are the same in all calls, without what holds data."""
    return product_of(part for part in factors(mask) if isinstance(part, Band) and part.offset is None)


def _new_lse(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


class _OfLengths(Alike):
    """What is fixed of calls that learn, found out for each length when gradients are asked for.

    Args:
        has_table: whether a tensor is added to scores, which is the first of those that are saved beside query, key and
            value; nothing else keeps it.
    """

    def __init__(self, *, has_table: bool) -> None:
        super().__init__()
        self.has_table = has_table
        self._known: dict[tuple[int, int], Fixed] = {}

    def fixed(self, query: Tensor, key: Tensor, value: Tensor, *saved: Tensor) -> Fixed:
        lengths, table = (query.shape[2], key.shape[2]), saved[:1] if self.has_table else ()
        found = self._known.get(lengths)
        if found is None:
            found = self._of(query, key, value, *table)
            found = keep(self._known, lengths, without_table(found) if table else found, MAX_PLANS)
        return beside(found, *table) if table else found

    def _of(self, query: Tensor, key: Tensor, value: Tensor, *table: Tensor) -> Fixed:
        raise NotImplementedError


class _Fixed(_OfLengths):
    """The same of calls under one mask.

    Args:
        rule: the mask. bias: if it is no tensor. rest: the arguments of `check_call` after it, without a sink.
    """

    def __init__(self, rule: Mask | None, bias: Bias | None, rest: tuple[Any, ...], *, has_table: bool) -> None:
        super().__init__(has_table=has_table)
        self._rule, self._bias, self._rest = rule, bias, rest
        self._within: dict[Hashable, StripPlan] = {}
        self._last: tuple[bytes, Alike] | None = None

    def _of(self, query: Tensor, key: Tensor, value: Tensor, *table: Tensor) -> Fixed:
        bias = table[0] if table else self._bias
        call = check_call("attention", query, key, value, self._rule, bias, *self._rest)
        return NATIVE, call.scoring, None, by_form(NATIVE.plan_of(call), query, value, call.scoring)

    def with_data(self, kept: bytes) -> Alike:
        """The same under a mask of these bands that holds data; if it is the one of the call before, what that had.

        Args:
            kept: what the library found out about it.
        """
        last = self._last
        if last is None or last[0] != kept:
            last = self._last = kept, _UnderData(self, kept)
        return last[1]

    def within(self, interval: Interval, query: Tensor, key: Tensor, value: Tensor, *table: Tensor) -> Fixed:
        """What is fixed of a call of which each query is limited to an interval of keys."""
        engine, scoring, dropout, plan = self.fixed(query, key, value, *table)
        way = query.shape[2], key.shape[2], interval.words is None
        known = self._within.get(way)
        if known is None:
            known = plan_within(scoring, query.dtype, scoring.mask_or_everything, interval).of_form(plan.form)
            keep(self._within, way, known, MAX_PLANS)
        mask = product_of([scoring.mask_or_everything, Within(*interval).bind(scoring.grid)])
        return engine, replace(scoring, mask=mask), dropout, known.within(interval)


class _UnderData(_OfLengths):
    """The same of calls whose mask holds data, as they were then: they may change before gradients are asked for.

    Args:
        fixed: what is of all such calls, under the bands of their masks.
    """

    def __init__(self, fixed: _Fixed, kept: bytes) -> None:
        super().__init__(has_table=fixed.has_table)
        self._of_all = fixed
        self.kept, self.has_gaps, self.passes = kept, has_gaps(kept), fixed.passes

    def _of(self, query: Tensor, key: Tensor, value: Tensor, *table: Tensor) -> Fixed:
        assert self.kept is not None
        return self._of_all.within(intervals_from(self.kept), query, key, value, *table)

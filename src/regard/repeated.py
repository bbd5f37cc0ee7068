"""Calls of which everything but the tensors is as in an earlier one: the compiled library finds that out by itself.

To make the form of a call, and to look for it (`checked`), takes Python a few microseconds, and several times as long
between the layers of a model, where its own code and objects have left the processor's caches. So what the form follows
from is noted as steps, each of which looks at one object: an argument, an attribute of a mask, a state of torch. Where
every one finds what it found before, and query, key and value lie as before, the earlier call's way is taken at once.
Some calls may have other lengths, too (`any_length`). Any other call is left to its form.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import string_at
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import checked
from regard.checked import Checked, Form, InPlace
from regard.functions import readings_of
from regard.kernels.strips import binding
from regard.kernels.strips.autograd import Alike, Same, WithTable, attach
from regard.kernels.strips.binding import (
    DATA,
    EXACT,
    LSE,
    NUMBER,
    NUMBERS,
    OPERAND,
    OUTPUT,
    NotedOf,
    RepeatedOf,
    StepOf,
)
from regard.kernels.strips.kernel import Planned
from regard.kernels.strips.order import laid_like
from regard.kernels.strips.ready import Pass
from regard.kernels.strips.terms import is_operand
from regard.rules import Rule
from regard.versions import is_few

Results = tuple[Tensor, Tensor | None]

QUERY, KEY, VALUE, MASK, BIAS, SCALE, SOFTCAP, SINK, ADDITIVE, DROPOUT, GENERATOR, WANTS_LSE, NAME = range(13)
"""The places of the arguments of a call."""

MAX_CALLS = 16
"""Calls that are noted."""

MAX_WAYS = 4
"""How often calls of one form are noted, whose tensors lie in different ways."""

MAX_STEPS, MAX_NOTED = 48, 8
"""MOST_STEPS and MOST_NOTED of c/repeated.h."""


_SIMPLE = frozenset({type(None), bool, int, float, str})


def _find_repeat(given: tuple[object, ...], table: tuple[object, ...]) -> Results | None:
    """In the first call: finds out whether there is a library."""
    global repeat
    library = binding.compiled(torch.float32)
    repeat = _not_here if library is None else library.repeat
    return repeat(given, table)


def _not_here(given: tuple[object, ...], table: tuple[object, ...]) -> None:
    """Where there is none."""


repeat: Callable[[tuple[object, ...], tuple[object, ...]], Results | None] = _find_repeat
"""Output and lse of a call, if it is like one of `checked.noted`; otherwise None. Not for graphs of torch.compile."""


def note(given: tuple[Any, ...], form: Form, known: Checked) -> None:
    """Notes a call that was computed by its form, if there is a library, and nothing about it may change unnoticed."""
    library = binding.compiled(torch.float32)
    if library is None or known.ways == MAX_WAYS or not given[QUERY].is_cpu:
        return
    known.ways += 1
    if isinstance(given[BIAS], Tensor) and type(form[-1]) is not InPlace:
        return  # calls are alike only if its numbers are

    def way(made: RepeatedOf) -> list[object]:
        held, planned = list[object](), _planned(known)
        told = None if planned is None else _pass_of(library, given, planned)
        if planned is not None and told is not None:
            made.pass_, made.told = told.at, isinstance(given[SINK], Tensor) + told.has_given
            new_lse = partial(Tensor.new_empty, size=given[QUERY].shape[:3], dtype=library.dtype)
            wants_lse = planned.learns or planned.wants_lse
            held = note_results(made, given, library, told.like[0], told.has_exact, new_lse if wants_lse else None)
            held += _learning(made, planned) if planned.learns else ()
        made.run = id(known.run)
        return [told, known.run, *held]

    note_as(library, given, way)


def note_as(
    library: binding.Compiled,
    given: tuple[Any, ...],
    way: Callable[[RepeatedOf], list[object]],
    *,
    any_data: bool = False,
    any_table: bool = False,
    by_terms: bool = False,
) -> None:
    """Notes a call, if nothing about it may change unnoticed.

    Args:
        way: notes how it is computed; returns what has to be kept for that.
        any_data: whether the data of its mask may be another in each call. any_table: whether a tensor that is its bias
            may have numbers for more keys or for fewer. by_terms: whether its mask is told in terms, of which the data
            are the operands.
    """
    try:
        notes = _Notes(library, given, any_data, any_table, by_terms)
    except (_CannotBeNotedError, RuntimeError, BufferError):  # those of torch, for tensors without memory of their own
        return
    if len(notes.steps) > MAX_STEPS or len(notes.tensors) > MAX_NOTED:
        return
    made = RepeatedOf()
    held = *way(made), notes, made
    library.lie_open(ctypes.addressof(made), bool(made.one), given[: VALUE + 1])
    steps = (StepOf * len(notes.steps))(*notes.steps)
    tensors = (NotedOf * len(notes.tensors))(*notes.tensors)
    made.step, made.steps = ctypes.addressof(steps), len(steps)
    made.noted, made.count = ctypes.addressof(tensors), len(tensors)
    made.threads = id(torch.get_num_threads)
    checked.noted = (ctypes.addressof(made), (*held, steps, tensors), *checked.noted)[: 2 * MAX_CALLS]


def _pass_of(library: binding.Compiled, given: tuple[Any, ...], planned: Planned) -> Pass | None:
    """The library's pass, if it is all that the call takes, and reads sink and bias as they are."""
    sink = given[SINK]
    told = planned.last_pass(sink)
    if told is None or told.compiled is not library or not (sink is None or is_read_as_it_is(sink, library)):
        return None
    return told if isinstance(given[BIAS], Tensor) or not told.has_given else None


def _planned(known: Checked) -> Planned | None:
    """What computes it, if it is told the same in every call."""
    run = known.run
    if isinstance(run, Planned):
        return run if run.learns and run.changed is None else None
    planned = getattr(run, "__self__", None)
    return planned if isinstance(planned, Planned) and run == planned.alone else None


def note_results(
    made: RepeatedOf, given: tuple[Any, ...], library: binding.Compiled, laid: bool, has_exact: bool,
    new_lse: Callable[[Tensor], Tensor] | None,
) -> list[object]:  # fmt: skip
    """Notes how the results are made, of a query: the output, the output unrounded, and lse; returns what has to be
    kept for that.

    Args:
        laid: whether the output is laid like the query by torch.
    """
    new = torch.empty_like if laid else partial(laid_like, size=given[VALUE].shape[3])
    results = new, partial(new, dtype=library.dtype) if has_exact else None, new_lse
    for place, make in zip((OUTPUT, EXACT, LSE), results, strict=True):
        made.make[place] = None if make is None else id(make)
    return [*results]


def _learning(made: RepeatedOf, planned: Planned) -> list[object]:
    """As `note_gradients`."""
    scoring, given = planned.scoring, planned.given
    fixed = planned.engine, scoring if given is None else scoring.with_bias(given), planned.dropout, planned.plan
    made.keeps_bias = given is not None
    return note_gradients(made, Same(fixed) if given is None else WithTable(fixed), scoring.learned())


def note_gradients(
    made: RepeatedOf, alike: Alike, learned: Sequence[Tensor], fix: Callable[[bytes], Alike] | None = None
) -> list[object]:
    """Notes what becomes of the results of a call that learns; returns what has to be kept for that.

    Args:
        fix: which calls are alike follows by this from what the library found out about the data of a mask.
    """
    rest = tuple(learned)
    made.attach, made.alike, made.rest = id(attach), id(alike), id(rest)
    made.fix = None if fix is None else id(fix)
    return [alike, rest, fix]


def is_read_as_it_is(sink: Tensor, library: binding.Compiled) -> bool:
    return sink.dtype is library.dtype and sink.is_contiguous() and not sink.is_neg()


class _CannotBeNotedError(Exception):
    """Something may change while the objects stay the same."""


class _Notes:
    """What a call has to be like.

    Args:
        given: its arguments. any_data, any_table, by_terms: as of `note_as`.
    """

    def __init__(
        self, library: binding.Compiled, given: tuple[Any, ...], any_data: bool, any_table: bool, by_terms: bool
    ) -> None:
        self._library, self._any_data, self._any_table, self._by_terms = library, any_data, any_table, by_terms
        self._held: list[object] = []  # as long as an object is there, no other has its address
        self.steps: list[StepOf] = []
        self.tensors: list[NotedOf] = []
        for place in (SCALE, SOFTCAP, ADDITIVE, DROPOUT, GENERATOR, WANTS_LSE, NAME):
            self.look(given[place], place)
        for place in (SINK, BIAS, MASK):  # in the order in which the library's pass is told of tensors
            self._of_rule(given[place], place) if isinstance(given[place], Rule) else self._of_tensor(given, place)
        for function, found in (
            (torch._C._is_tracing, False),
            (torch._C._len_torch_dispatch_stack, 0),
            (torch.is_grad_enabled, torch.is_grad_enabled()),
            (torch._C._is_any_autocast_enabled, torch._C._is_any_autocast_enabled()),
        ):
            self.look(found, of=function, calls=True)
        self.look(-1, of=forward_ad, name="_current_level")
        for place in (QUERY, KEY, VALUE):
            self._of_tensor(given, place)

    def look(
        self, found: object, place: int = 0, name: str | None = None, *, of: object = None, calls: bool = False,
        by_type: bool = False,
    ) -> int:  # fmt: skip
        """A step: finds this, or something of this type, at a place or as an object; there its attribute; and what that
        returns. Returns the place of what it finds."""
        self._held += [found, name, of]
        at = [None if each is None else id(each) for each in (of, name)]
        self.steps.append(StepOf(at[0], place, at[1], calls, id(found), by_type))
        return NAME + len(self.steps)

    def _of_tensor(self, given: tuple[Any, ...], place: int) -> None:
        """An argument that is a tensor, another in each call, or None."""
        tensor = given[place]
        if tensor is None:
            self.look(None, place)
            return
        self.look(False, place, "is_neg", calls=True)
        if torch.is_grad_enabled():
            self.look(tensor.requires_grad, place, "requires_grad")
        if place > VALUE:  # the library looks at the first three itself
            self.look(type(tensor), place, by_type=True)
            self._lies(tensor, place, is_open=place == BIAS and self._any_table)

    def _of_rule(self, rule: Rule, place: int) -> None:
        """A mask or a bias."""
        if ":" in rule.kind:
            raise _CannotBeNotedError  # one of somebody's own may hold more than its arguments
        self.look(type(rule), place, by_type=True)
        for name in ("_first_batch", *(["_axes"] if hasattr(rule, "_axes") else []), *rule.fields):
            value = getattr(rule, name)
            if isinstance(value, Rule):
                self._of_rule(value, self.look(type(value), place, name, by_type=True))
            elif self._by_terms and is_operand(name, value):
                kind = OPERAND if isinstance(value, Tensor) else NUMBER
                self.tensors.append(NotedOf(self.look(type(value), place, name, by_type=True), data=kind))
            elif isinstance(value, Tensor):
                self._in_rule(value, place, name, getattr(rule, "_axes", None) == 4)
            elif self._any_data and name in NUMBERS and type(value) is int:
                self.tensors.append(NotedOf(self.look(int, place, name, by_type=True), data=NUMBERS[name]))
            elif type(value) in _SIMPLE:
                self.look(value, place, name)
            elif type(value) is FunctionType:
                self.look(value, place, name)
                self._of_function(value)
            else:
                raise _CannotBeNotedError

    def _of_function(self, function: FunctionType) -> None:
        """A function whose answers follow from its code, numbers, tensors, and other such functions."""
        readings = readings_of(function)
        if readings is None:
            raise _CannotBeNotedError
        for read in readings:
            value = read()
            at = self.look(value, of=read, calls=True)
            if len(self.steps) > MAX_STEPS:  # a function may call itself
                raise _CannotBeNotedError
            if type(value) is FunctionType:
                self._of_function(value)
            elif type(value) is Tensor:
                self.look(value._version, at, "_version")
            elif not (value is torch or value is abs or type(value) in {*_SIMPLE, CodeType, torch.dtype}):
                raise _CannotBeNotedError

    def _in_rule(self, tensor: Tensor, place: int, name: str, four_axes: bool) -> None:
        """A tensor of a mask or bias: known by its few numbers, or else as itself in this version, as in a form.

        Args:
            four_axes: whether it was given with all of them.
        """
        if self._any_data and name in DATA:
            at = self.look(type(tensor), place, name, by_type=True)
            self.tensors.append(NotedOf(at, data=DATA[name], four_axes=four_axes))
            return
        few = is_few(tensor)
        at = self.look(type(tensor) if few else tensor, place, name, by_type=few)
        if torch.is_grad_enabled():
            self.look(False, at, "requires_grad")
        if few:
            self._lies(tensor, at, string_at(tensor.data_ptr(), tensor.nbytes))
        else:
            self.look(tensor._version, at, "_version")

    def _lies(self, tensor: Tensor, place: int, numbers: bytes | None = None, *, is_open: bool = False) -> None:
        """A tensor lies as it does, if not in any way; and has these numbers."""
        noted = NotedOf(place, open=is_open)
        self._library.lie(ctypes.addressof(noted.lying), tensor)
        if is_open:
            noted.lying.shape[3], noted.lying.stride[:] = 0, [0] * 4
        if numbers is not None:
            self._held.append(numbers)
            noted.numbers, noted.bytes = ctypes.cast(ctypes.c_char_p(numbers), ctypes.c_void_p), len(numbers)
        self.tensors.append(noted)

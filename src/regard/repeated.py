"""Calls of which everything but the tensors is as in an earlier one: the compiled library finds that out by itself.

To make the form of a call, and to look for it (`checked`), takes Python a few microseconds, and several times as long
between the layers of a model, where its own code and objects have left the processor's caches. So what the form follows
from is noted as steps, each of which looks at one object: an argument, an attribute of a mask, a state of torch. Where
every one finds what it found before, and query, key and value lie as before, the earlier call's way is taken at once.
Any other call is left to its form.
"""

import ctypes
from collections.abc import Callable
from ctypes import string_at
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import checked
from regard.checked import Checked, Form, InPlace
from regard.kernels.strips import binding
from regard.kernels.strips.binding import NotedOf, RepeatedOf, StepOf
from regard.kernels.strips.kernel import Planned
from regard.kernels.strips.order import sink_as_read
from regard.kernels.strips.ready import Pass
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
    try:
        notes = _Notes(library, given, form)
    except (_CannotBeNotedError, RuntimeError, BufferError):  # those of torch, for tensors without memory of their own
        return
    noted = notes.made(given, known)
    if len(notes.steps) <= MAX_STEPS and len(notes.tensors) <= MAX_NOTED:
        checked.noted = (ctypes.addressof(noted), (noted, notes), *checked.noted)[: 2 * MAX_CALLS]


class _CannotBeNotedError(Exception):
    """Something may change while the objects stay the same."""


class _Notes:
    """What a call has to be like.

    Args:
        given: its arguments. form: that of `checked`.
    """

    def __init__(self, library: binding.Compiled, given: tuple[Any, ...], form: Form) -> None:
        self._library = library
        self._held: list[object] = []  # as long as an object is there, no other has its address
        self.steps: list[StepOf] = []
        self.tensors: list[NotedOf] = []
        for place in (SCALE, SOFTCAP, ADDITIVE, DROPOUT, GENERATOR, WANTS_LSE, NAME):
            self.look(given[place], place)
        for place in (SINK, BIAS, MASK):  # in the order in which the library's pass is told of tensors
            self._of_rule(given[place], place) if isinstance(given[place], Rule) else self._of_tensor(given, place)
        for function, found in (
            (torch._C._is_tracing, False),
            (torch._C._are_functorch_transforms_active, False),
            (torch._C._len_torch_dispatch_stack, 0),
            (torch.is_grad_enabled, torch.is_grad_enabled()),
            (torch._C._is_any_autocast_enabled, torch._C._is_any_autocast_enabled()),
        ):
            self.look(found, of=function, calls=True)
        self.look(-1, of=forward_ad, name="_current_level")
        for place in (QUERY, KEY, VALUE):
            self._of_tensor(given, place)
        if isinstance(given[BIAS], Tensor) and type(form[-1]) is not InPlace:
            raise _CannotBeNotedError  # the call is alike only if the numbers are

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
        self.look(type(tensor), place, by_type=True)
        self.look(False, place, "is_neg", calls=True)
        if torch.is_grad_enabled():
            self.look(tensor.requires_grad, place, "requires_grad")
        if place > VALUE:
            self._lies(tensor, place)

    def _of_rule(self, rule: Rule, place: int) -> None:
        """A mask or a bias."""
        if ":" in rule.kind:
            raise _CannotBeNotedError  # one of somebody's own may hold more than its arguments
        self.look(type(rule), place, by_type=True)
        for name in ("_first_batch", *(["_axes"] if hasattr(rule, "_axes") else []), *rule.fields):
            value = getattr(rule, name)
            if isinstance(value, Rule):
                self._of_rule(value, self.look(type(value), place, name, by_type=True))
            elif isinstance(value, Tensor):
                self._in_rule(value, place, name)
            elif type(value) in _SIMPLE:
                self.look(value, place, name)
            else:
                raise _CannotBeNotedError

    def _in_rule(self, tensor: Tensor, place: int, name: str) -> None:
        """A tensor of a mask or bias: known by its few numbers, or else as itself in this version, as in a form."""
        few = is_few(tensor)
        at = self.look(type(tensor) if few else tensor, place, name, by_type=few)
        if torch.is_grad_enabled():
            self.look(False, at, "requires_grad")
        if few:
            self._lies(tensor, at, string_at(tensor.data_ptr(), tensor.nbytes))
        else:
            self.look(tensor._version, at, "_version")

    def _lies(self, tensor: Tensor, place: int, numbers: bytes | None = None) -> None:
        """A tensor lies as it does; and has these numbers."""
        noted = NotedOf(place)
        self._library.lie(ctypes.addressof(noted.lying), tensor)
        if numbers is not None:
            self._held.append(numbers)
            noted.numbers, noted.bytes = ctypes.cast(ctypes.c_char_p(numbers), ctypes.c_void_p), len(numbers)
        self.tensors.append(noted)

    def made(self, given: tuple[Any, ...], known: Checked) -> RepeatedOf:
        """For the library."""
        made, told = RepeatedOf(), self._pass_of(given, known)
        for lying, tensor in zip(made.three, given[: VALUE + 1], strict=True):
            self._library.lie(ctypes.addressof(lying), tensor)
        steps = (StepOf * len(self.steps))(*self.steps)
        tensors = (NotedOf * len(self.tensors))(*self.tensors)
        made.step, made.steps = ctypes.addressof(steps), len(steps)
        made.noted, made.count = ctypes.addressof(tensors), len(tensors)
        made.run, made.make_output, made.threads = map(id, (known.run, torch.empty_like, torch.get_num_threads))
        if told is not None:
            made.pass_, made.told = told.at, isinstance(given[SINK], Tensor) + told.has_given
        self._held += [steps, tensors, known.run, told]
        return made

    def _pass_of(self, given: tuple[Any, ...], known: Checked) -> Pass | None:
        """The library's pass, if it is all that the call takes, and reads sink and bias as they are."""
        planned = getattr(known.run, "__self__", None)
        sink, bias = given[SINK], given[BIAS]
        if not isinstance(planned, Planned) or known.run != planned.alone:
            return None
        told = planned.last_pass(sink)
        if told is None or told.compiled is not self._library:
            return None
        if sink is not None and sink_as_read(sink, self._library.dtype).data_ptr() != sink.data_ptr():
            return None
        return told if isinstance(bias, Tensor) or not told.has_given else None

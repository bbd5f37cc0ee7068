"""What the answers of a function follow from, read from its code.

A function of index tensors, as `Where` takes it, may answer otherwise tomorrow: it may look at a list, or at the clock.
Most do not: they compare and combine their arguments, numbers, and tensors such as the ids of documents. If a function
does nothing else, its answers follow from its code and these values, and what was found out about them can be kept for
as long as neither changes.

Only what is named here is taken to be harmless; code with anything else in it is not judged.
"""

import builtins
import dis
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FunctionType
from typing import Any

import torch

_OPERATIONS = """
    RESUME NOP CACHE COPY SWAP POP_TOP PUSH_NULL PRECALL CALL KW_NAMES CALL_KW COPY_FREE_VARS EXTENDED_ARG NOT_TAKEN
    LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW
    STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST LOAD_CONST LOAD_SMALL_INT RETURN_VALUE RETURN_CONST
    LOAD_DEREF LOAD_GLOBAL LOAD_ATTR LOAD_METHOD BINARY_OP BINARY_SUBSCR BINARY_SLICE COMPARE_OP IS_OP TO_BOOL
    UNARY_NEGATIVE UNARY_INVERT UNARY_NOT BUILD_TUPLE BUILD_SLICE
    JUMP_FORWARD POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE
    POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE
    JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP
"""
"""Of bytecode, as `dis` calls them: in any version of Python."""

_METHODS = """
    abs neg sign square add sub mul remainder fmod floor_divide minimum maximum clamp where isin eq ne lt le gt ge
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not bool int long float to
    any all shape device dtype unsqueeze squeeze zeros_like ones_like full_like int32 int64 float32
"""
"""Of tensors, and functions of torch: their results follow from what they are given."""


_OPERATION_NAMES, _METHOD_NAMES = frozenset(_OPERATIONS.split()), frozenset(_METHODS.split())


def captured(function: FunctionType) -> list[Any] | None:
    """All values beside its arguments that the answers of a function follow from; None if that is not known."""
    readings = readings_of(function)
    try:
        values = None if readings is None else [read() for read in readings]
    except ValueError:  # a cell that is still empty
        return None
    return None if values is None else [value for value in values if value is not torch and value is not abs]


def readings_of(function: FunctionType) -> list[Callable[[], Any]] | None:
    """What reads these values, torch itself and `abs` among them, as they are then; None if the code is not judged."""
    names = _names_in(function.__code__)
    if names is None or function.__kwdefaults__:
        return None
    return [
        partial(getattr, function, "__code__"),
        torch.get_default_dtype,
        *(partial(_default, function, place) for place in range(len(function.__defaults__ or ()))),
        *(partial(getattr, cell, "cell_contents") for cell in function.__closure__ or ()),
        *(partial(_global, function, name) for name in names),
    ]


def _default(function: FunctionType, place: int) -> Any:
    return (function.__defaults__ or ())[place]


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, None))


@lru_cache(256)
def _names_in(code: CodeType) -> tuple[str, ...] | None:
    """The global names in a function's code; None if there is anything in it that is not judged."""
    if code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR) or code.co_cellvars:
        return None
    return None if any(isinstance(part, CodeType) for part in code.co_consts) else _judged(dis.get_instructions(code))


def _judged(instructions: Iterator[dis.Instruction]) -> tuple[str, ...] | None:
    names: dict[str, None] = {}
    for instruction in instructions:
        name = instruction.opname
        if name not in _OPERATION_NAMES:
            return None
        if name == "LOAD_GLOBAL":
            names[instruction.argval] = None
        elif name in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval not in _METHOD_NAMES:
            return None
    return tuple(names)

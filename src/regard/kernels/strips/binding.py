"""The compiled library: which one this processor can run, and the structures through which it is called.

The code in c/ is compiled when regard is installed, once for each set of vector instructions, if there is a compiler.
Without one, or with REGARD_NATIVE=0, the other engine computes everything. The library is loaded by ctypes, so it
depends neither on torch's headers nor on Python's: it reads tensors where they are, and runs on torch's threads. What
every call asks are functions of Python's own kind: between the layers of a model, ctypes takes 10 us to convert their
arguments. Row "causal, tiny" of small_calls.py.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from regard import processor

INSTRUCTIONS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}
"""The set of instructions, as compilers call it, for what torch uses on an x86-64 processor."""

ON_ARM = {False: "armv8-a", True: "armv8-a+bf16"}
"""The one for 64-bit processors of Arm, all of which have NEON; True: those that multiply bfloat16 numbers, too."""

ARM = "aarch64", "arm64"
"""What Linux and macOS call them."""

OWN = 0
DTYPES = {torch.float32: OWN, torch.float64: OWN, torch.bfloat16: 1, torch.float16: 2}
"""The library's numbers for them; OWN: that in which it computes."""

BITS = 3
"""Its number for masks, which are words of 32 bits."""

QUERIES_OF_A_WORD = 32

PRODUCTS = "plain", "pairs", "tiles"
"""By what the library multiplies bfloat16 numbers: as float32, or as they are, by AVX512-BF16 or BFDOT, or by AMX; see
c/halves.h."""

FAR = 1 << 40
"""A diagonal beyond all keys: FAR of c/call.h."""

DONE, UNLIKE, SUSPECT = range(3)
"""Outcomes of a call that is like an earlier one. UNLIKE: its tensors lie in another way, and nothing was computed;
SUSPECT: something hidden may have had a part."""

_i64, _f64, _address = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class TensorAt(ctypes.Structure):
    """A tensor [batch, head, row, feature], whose features are consecutive, and its other strides."""

    _fields_ = (("data", _address), ("batch", _i64), ("head", _i64), ("row", _i64))


class TileAt(ctypes.Structure):
    """Numbers added to the scores of a span of keys."""

    _fields_ = (
        ("numbers", _address),
        *((name, _i64) for name in ("dtype", "batch", "head", "query", "key", "time", "spare", "gradient", "by_place")),
    )


class MaskAt(ctypes.Structure):
    """Which keys are seen, as `Compiled.bits_of` tells it."""

    _fields_ = (("words", _address), *((name, _i64) for name in ("batch", "head", "query", "key")))


class GradientAt(ctypes.Structure):
    """Where the gradients of numbers added to scores go."""

    _fields_ = (("numbers", _address), *((name, _i64) for name in ("chunk", "batch", "head", "query", "key")))


class SpanOf(ctypes.Structure):
    """Keys that the queries of a strip see."""

    _fields_ = tuple((name, _i64) for name in ("start", "step", "count", "shift", "low", "high", "tile", "tiles"))


class StripOf(ctypes.Structure):
    """Queries that see the same spans."""

    _fields_ = tuple((name, _i64) for name in ("batch", "times", "shift", "start", "step", "count", "span", "spans"))


class StatisticOf(ctypes.Structure):
    """What is computed of the weights."""

    _fields_ = (
        ("kind", _i64),
        ("numbers", TensorAt),
        ("chunk", _i64),
        ("keys", _address),
        *((name, _i64) for name in ("n", "queries", "keys_of_pixel")),
    )


class CallOf(ctypes.Structure):
    """`struct call` of c/call.h, field by field."""

    _fields_ = (
        *((name, TensorAt) for name in ("query", "key", "value", "output")),
        *((name, TensorAt) for name in ("grad_output", "grad_query", "sum_key", "sum_value")),
        *((name, TensorAt) for name in ("grad_key", "grad_value", "sum_query", "exact")),
        *((name, _address) for name in ("lse", "grad_lse", "sink", "grad_sink")),
        *((name, _address) for name in ("row_bits", "column_bits", "column_odd")),
        ("column_batch", _i64),
        *((name, _i64) for name in ("batches", "heads", "kv_heads", "query_len", "key_len", "head_dim", "value_dim")),
        *((name, _i64) for name in ("dtype", "threads", "strips", "chunks", "chunk_key", "chunk_value")),
        *((name, _i64) for name in ("piece", "chunk_query", "all_heads")),
        *((name, _address) for name in ("gradient", "given")),
        *((name, _i64) for name in ("batches_in_common", "heads_in_common")),
        *((name, _address) for name in ("strip", "span", "tile", "first_key", "end_key")),
        *((name, _i64) for name in ("keys_batch", "keys_query")),
        ("seen", MaskAt),
        *((name, _address) for name in ("query_order", "key_order")),
        *((name, _i64) for name in ("query_order_batch", "key_order_batch")),
        *((name, _f64) for name in ("scale", "softcap", "kept_factor")),
        ("kept_least", _i64),
        ("statistic", _address),
        *((name, _i64) for name in ("statistics", "knows_lse", "is_part", "goes_on")),
        *((name, _i64) for name in ("part", "parts", "first_query", "last_query")),
        *((name, _i64) for name in ("careful", "suspect", "products", "units", "keeps", "first_batch", "last_batch")),
        *((name, _i64) for name in ("from_key", "to_key")),
        ("softmax", _address),
        ("notes", _i64),
        ("parts_of_rows", _address),
        ("share", _address),
    )


MOST_TENSORS = 24
"""Most tensors of a call that is like an earlier one: MOST_TENSORS of c/again.h."""


class LyingOf(ctypes.Structure):
    """How a tensor lies, of which one of the words of a call tells where."""

    _fields_ = (("word", _i64), ("shape", 4 * _i64), ("stride", 4 * _i64), ("numbers", _i64))


class AgainOf(ctypes.Structure):
    """`struct again` of c/again.h."""

    _fields_ = (
        ("call", CallOf),
        *((name, _i64) for name in ("backward", "finishes", "count", "checked")),
        ("room", 3 * _i64),
        ("tensor", LyingOf * MOST_TENSORS),
    )


class AlternativeOf(ctypes.Structure):
    """`struct alternative` of c/again.h."""

    _fields_ = tuple((name, _i64) for name in ("low", "high", "since", "until", "step", "chunk"))


MOST_ALTERNATIVES = 4
"""Most of what one query may see: MOST_ALTERNATIVES of c/again.h."""


class OneOf(ctypes.Structure):
    """`struct one` of c/again.h."""

    _fields_ = (
        ("call", CallOf),
        ("strip", StripOf),
        ("span", SpanOf),
        ("tile", TileAt),
        *((name, _i64) for name in ("alone", "has_exact", "has_lse", "has_sink", "alternatives")),
        ("alternative", AlternativeOf * MOST_ALTERNATIVES),
    )


class StepOf(ctypes.Structure):
    """`struct step` of c/repeated.h."""

    _fields_ = (
        ("of", _address),
        ("place", _i64),
        ("name", _address),
        ("calls", _i64),
        ("is_", _address),
        ("by_type", _i64),
    )


class NotedOf(ctypes.Structure):
    """`struct noted` of c/repeated.h."""

    _fields_ = (
        *(("place", _i64), ("lying", LyingOf), ("numbers", _address)),
        *((name, _i64) for name in ("bytes", "data", "four_axes", "open")),
    )


DATA = {"keys": 1, "query_ids": 2, "key_ids": 3, "mask": 4, "offset": 5}
NUMBERS = {"offset": 6}
"""Attributes of masks that may be others in each call, tensors and whole numbers: `enum kind_of_data` of c/data.h."""

GIVEN, NOT_GIVEN = -1, -2
"""Where a part of a term is from that is no operand: of c/terms.h."""

OPERAND, NUMBER = 7, 8
"""What is an operand of a term, a tensor or a whole number: of the same."""

OUTPUT, EXACT, LSE = RESULTS = range(3)
"""The results that are made for a call: RESULTS of c/repeated.h."""


class RepeatedOf(ctypes.Structure):
    """`struct repeated` of c/repeated.h."""

    _fields_ = (
        ("three", LyingOf * 3),
        *((name, _address) for name in ("step", "noted", "pass_", "one", "term", "row", "run")),
        ("make", _address * len(RESULTS)),
        *((name, _address) for name in ("threads", "attach", "alike", "fix", "rest")),
        *((name, _i64) for name in ("steps", "count", "told", "keeps_bias", "terms")),
    )


class TermOf(ctypes.Structure):
    """`struct term` of c/terms.h."""

    _fields_ = (("kind", _i64), ("from_", _i64 * 3), ("number", _i64 * 3))


STRUCTURES = (
    CallOf, StripOf, SpanOf, TileAt, GradientAt, StatisticOf, AgainOf, OneOf, StepOf, NotedOf, RepeatedOf, TermOf,
)  # fmt: skip

Words = _i64 * (ctypes.sizeof(CallOf) // 8)
"""A `CallOf` as numbers of eight bytes, which are set in a fraction of the time."""

Told: TypeAlias = "ctypes.Array[ctypes.c_int64]"
"""Words that begin with those of a call."""

AT = {name: getattr(CallOf, name).offset // 8 for name, *_ in CallOf._fields_}
"""Where each field begins in them."""


class Compiled:
    """The compiled functions.

    Attributes:
        dtype: in which it computes. lanes: numbers in a vector. products: by what it multiplies bfloat16 numbers.
        forward: writes output, and lse and the exact output if they have a place. Like those below, it takes a call, or
            its address, and runs on as many of torch's threads as that says.
        backward: writes the gradient of the query, adds up those of key and value, from 0 on unless that goes on, and
            adds to those of what was added to scores.
        finish: writes gradients of query, key and value that were added up elsewhere.
        look: writes lse if it is not known, and statistics of the weights.
        find_keys: of a mask, bool [rows, keys], each row's first key that is seen, and the one after the last, int32
            [rows] each; returns whether all between are seen. Takes the cells' address, sizes, and how far rows are
            apart, and the other two addresses.
        describe: of tensors, as `describe` tells it; empty where they are too many.
        again: a pass for other tensors, given an `AgainOf` and by how many threads; returns DONE, UNLIKE or SUSPECT.
        one: one strip, given a `OneOf`, by how many threads, and which keys are seen (or None); DONE or UNLIKE. These
            take addresses, too.
        lie: tells a `LyingOf` how a tensor lies. lie_open: tells a `RepeatedOf` how query, key and value lie, and if
            its second argument is true, only what lengths of the same magnitudes have in common.
        repeat: output and lse of a call like one of a table, or None: `regard.repeated`.
        pull: the gradients of such a call, or None: `regard.kernels.strips.ready.Pass.pull`.
    """

    forward: Callable[["Told | int"], None]
    backward: Callable[["Told | int"], None]
    finish: Callable[["Told | int"], None]
    look: Callable[["Told | int"], None]
    find_keys: Callable[[int, int, int, int, int, int], int]
    describe: Callable[[tuple[Tensor, ...], bool], bytes]
    again: Callable[[int, int, tuple[Tensor, ...]], int]
    one: Callable[[int, int, int | None, tuple[Tensor, ...]], int]
    lie: Callable[[int, Tensor], None]
    lie_open: Callable[[int, bool, tuple[Tensor, ...]], None]
    repeat: Callable[[tuple[object, ...], tuple[object, ...]], tuple[Tensor, Tensor | None] | None]
    pull: Callable[[int, int, tuple[Tensor | None, ...], Tensor, bytes | None], tuple[Tensor | None, ...] | None]

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.dtype = dtype
        loaded = ctypes.CDLL(str(path))
        for question in (loaded.regard_lanes, loaded.regard_size_of_structures, loaded.regard_products):
            question.restype = _i64
        if loaded.regard_size_of_structures() != sum(map(ctypes.sizeof, STRUCTURES)) + ctypes.sizeof(_PythonOf):
            raise OSError(f"{path.name} was compiled from another version of c/call.h")
        self.lanes: int = loaded.regard_lanes()
        self.products = PRODUCTS[loaded.regard_products()]
        self._set_products = loaded.regard_set_products
        self._set_products.argtypes, self._set_products.restype = (_i64,), None
        loaded.regard_set_threads.argtypes, loaded.regard_set_threads.restype = (_address, _address), None
        loaded.regard_set_threads(*_functions_of_threads())
        self.forward, self.backward = loaded.regard_forward, loaded.regard_backward
        self.finish, self.look = loaded.regard_finish, loaded.regard_look
        for function in (self.forward, self.backward, self.finish, self.look):
            function.argtypes, function.restype = (_address,), None
        self.find_keys = loaded.regard_keys
        self.find_keys.argtypes = (_address, _i64, _i64, _i64, _address, _address)
        self.find_keys.restype = _i64
        self._bits = loaded.regard_bits
        self._bits.argtypes, self._bits.restype = (_address, _i64, _i64, _i64, _i64, _i64, _address), None
        self._random = loaded.regard_random
        self._random.argtypes, self._random.restype = (_address, _i64, _i64, _i64, _i64), None
        loaded.regard_set_python.argtypes, loaded.regard_set_python.restype = (_address,), None
        loaded.regard_set_python(_functions_of_python())
        self._methods = []
        for name in ("describe", "again", "one", "lie", "lie_open", "repeat", "pull"):
            method = _MethodOf(name.encode(), ctypes.cast(getattr(loaded, f"regard_{name}"), _address), _FASTCALL)
            self._methods.append(method)  # which the function refers to
            setattr(self, name, _new_function(ctypes.addressof(method), None, None))

    def set_products(self, products: str) -> None:
        """Multiplies bfloat16 numbers by these instructions, which must be there."""
        self.products = products
        self._set_products(PRODUCTS.index(products))

    def bits_of(self, cells: Tensor) -> Tensor:
        """A mask as the library reads it: words of 32 bits, each of 32 queries and a key; of one query, all bits alike.

        Shapes: bool [batch, heads, queries, keys] -> int32 [batch, heads, ceil(queries / 32), keys].
        """
        *apart, queries, keys = cells.shape
        if queries == 1:
            return cells.to(torch.int32).neg_()
        words = torch.empty(*apart, -(-queries // QUERIES_OF_A_WORD), keys, dtype=torch.int32, device=cells.device)
        cells = cells.flatten(0, -3)
        cells = cells if cells.stride(2) == 1 else cells.contiguous()
        self._bits(cells.data_ptr(), len(cells), queries, keys, *cells.stride()[:2], words.data_ptr())
        return words

    def write_random(self, numbers: Tensor, rows: int, seed: int, of_columns: int) -> None:
        """`regard.dropout.Write`, into contiguous numbers."""
        self._random(numbers.data_ptr(), rows, len(numbers) - rows, seed, of_columns)


class _MethodOf(ctypes.Structure):
    """`PyMethodDef`, of which Python makes a function."""

    _fields_ = (("name", ctypes.c_char_p), ("function", _address), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_FASTCALL = 0x80
"""METH_FASTCALL: how its arguments are given."""

_object = ctypes.py_object
_new_function = ctypes.PYFUNCTYPE(_object, _address, _address, _address)(("PyCFunction_NewEx", ctypes.pythonapi))


class _ExchangeOf(ctypes.Structure):
    """`DLPackExchangeAPI`, by which torch tells of tensors (dmlc/dlpack, dlpack.h)."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, _address) for name in ("older", "allocate", "export", "take", "read", "stream")),
    )


_OF_PYTHON = (
    "PyTuple_GetItem", "PyTuple_Size", "PyBytes_FromStringAndSize", "PyBytes_AsString", "PyEval_SaveThread",
    "PyEval_RestoreThread", "PyTuple_New", "PyTuple_SetItem", "Py_IncRef", "Py_DecRef", "PyObject_GetAttr",
    "PyObject_Call", "PyObject_Type", "PyObject_RichCompareBool", "PyLong_AsLongLong", "PyLong_FromLongLong",
    "PyLong_AsVoidPtr", "PyErr_Clear",
)  # fmt: skip
"""Python's functions in the order of `struct python`."""

_OBJECTS = None, int, float, Tensor, torch.empty_like
"""The objects after them."""

_PythonOf = _address * (1 + len(_OF_PYTHON) + len(_OBJECTS))
"""`struct python` of c/again.h."""


def _functions_of_threads() -> "list[ctypes.c_void_p | None]":
    """The two functions of OpenMP that the library calls: of torch's own runtime, since the threads of a second one
    would compete with its for the cores. macOS need not tell of one that came with another library, but by its name."""
    beside_torch = Path(torch.__file__).parent / "lib" / "libomp.dylib"
    runtime = ctypes.CDLL(str(beside_torch) if beside_torch.exists() else None)
    found = (getattr(runtime, name, None) for name in ("GOMP_parallel", "omp_get_thread_num"))
    return [None if function is None else ctypes.cast(function, _address) for function in found]


def _functions_of_python() -> "ctypes.Array[ctypes.c_void_p]":
    """A `_PythonOf`."""
    python = ctypes.pythonapi
    find = ctypes.PYFUNCTYPE(_address, _object, ctypes.c_char_p)(("PyCapsule_GetPointer", python))
    at = find(Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    exchange = _ExchangeOf.from_address(at)
    while exchange.major > 1 and exchange.older:
        exchange = _ExchangeOf.from_address(exchange.older)
    if exchange.major != 1 or not exchange.read:
        raise OSError("this torch tells of tensors in another way")
    addresses = [ctypes.cast(getattr(python, name), _address).value for name in _OF_PYTHON]
    return _PythonOf(exchange.read, *addresses, *map(id, _OBJECTS))


def _find_describe(tensors: tuple[Tensor, ...], of_one: bool) -> Hashable | None:
    """In the first call: finds out which of the two it is from then on."""
    global describe
    library = compiled()
    describe = described if library is None else library.describe
    return describe(tensors, of_one)


describe: Callable[[tuple[Tensor, ...], bool], Hashable | None] = _find_describe
"""Equal for tensors of the same devices, dtypes and shapes. Empty or None where that is not known, or an error of
torch's is raised, as for tensors that are not in strides. The first one is on a CPU.

If `of_one` is true, they are query, key, value and perhaps bias of one query: the number of keys is not told, but its
magnitude, whether there are as many values, and whether the bias has a number for each, or one for all."""


def described(tensors: Sequence[Tensor], of_one: bool) -> Hashable | None:
    """The same without the library, on any device."""
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return None
    shapes: list[Sequence[int]] = [tensor.shape for tensor in tensors]
    if of_one and all(tensor.dim() == 4 for tensor in tensors):
        _, key, value, *bias = shapes
        keys, values = key[2], value[2]
        shapes[1:3] = (*key[:2], key[3], keys.bit_length()), (*value[:2], value[3], values == keys)
        shapes[3:] = [(*sizes[:3], sizes[3] == 1, sizes[3] == keys) for sizes in bias]
    return tuple((tensor.device, tensor.dtype) for tensor in tensors), *map(tuple, shapes)


def is_there(dtype: torch.dtype) -> bool:
    """Whether there is a library that computes in float32 or float64 on this processor."""
    return compiled(dtype) is not None


is_there._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes the answer as it is


def name() -> str | None:
    """The set of instructions of the library that this processor runs; None if there is none."""
    return _instructions() if is_there(torch.float32) else None


@cache
def compiled(dtype: torch.dtype = torch.float32) -> Compiled | None:
    """The library that computes in float32 or float64 on this processor; None if there is none, or if it is turned off
    by REGARD_NATIVE=0."""
    instructions = _instructions()
    if instructions is None or os.environ.get("REGARD_NATIVE") == "0":
        return None
    path = Path(__file__).parent / "c" / f"attention-{instructions}-{str(dtype).removeprefix('torch.')}.so.1"
    try:
        return Compiled(path, dtype)
    except (OSError, AttributeError):  # not compiled, from another version, or for another system
        return None


def _instructions() -> str | None:
    """The set of instructions for this processor; None if the library is written for others."""
    if platform.machine() in ARM:
        return ON_ARM[processor.ARM_BFLOAT16]
    return INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())

"""The cache of validated calls: one like an earlier one goes straight to its kernel.

Whether a call is valid, and which kernel it takes, follows from its `Form`: shapes, dtypes and devices, whether a
gradient is wanted, the structure of the mask, and the other arguments. The last few forms are cached (`recall`,
`remember`), never a result, nor query, key, value or sink, which may be others in each call.
"""

import threading
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.dropout import Dropout, drawn
from regard.graphs import as_it_stands
from regard.kernels import Call, Kernel, Prepared, all_scores
from regard.masks import Mask
from regard.rules import known, serialise, settled
from regard.scores import Additive, Scoring
from regard.shapes import MAX_HEADS, is_plain
from regard.versions import MAX_COMPARED_BYTES

Form = tuple[Hashable, ...]
Value = TypeVar("Value")

MAX_FORMS = 16
"""Forms in the cache: those of a model whose layers differ, at a few lengths."""

MAX_SCORES = 1 << 27
"""Scores of a call, up to which it is cached; beside computing a larger one, validating it costs nothing."""

_NUMBERS = frozenset({float, int, type(None)})
_PLAIN = torch.strided
_TENSORS = frozenset({Tensor, nn.Parameter})
_KNOWN: dict[Form, "Checked"] = {}
_lock = threading.Lock()


class Checked:
    """A call that was validated and has its kernel, for other tensors of the same form.

    Attributes:
        run: takes query, key, value and sink, and returns output and lse.
    """

    __slots__ = ("_scoring", "run")

    def __init__(self, call: Call, kernel: Kernel) -> None:
        self._scoring = call.scoring.with_sink(None)
        prepared = None if torch._C._is_any_autocast_enabled() else kernel.prepare(call)
        anew = partial(_anew, kernel, self._scoring, call.dropout, call.wants_lse)
        self.run: Prepared = anew if prepared is None else prepared


def _anew(
    kernel: Kernel,
    scoring: Scoring,
    dropout: Dropout | None,
    wants_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A call of which nothing could be prepared."""
    scoring = scoring.with_sink(sink)
    if key.shape[2] != scoring.grid.key_len:
        scoring = replace(scoring, grid=scoring.grid._replace(key_len=key.shape[2]))
    dropout = None if dropout is None else Dropout(dropout.rate, drawn())
    return kernel.compute(Call(query, key, value, scoring, dropout, wants_lse))


def form_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    additive: Additive | None,
    dropout: float,
    generator: torch.Generator | None,
    wants_lse: bool,
    kernel: str,
) -> Form | None:
    """The key of a call in the cache: of two calls with one form, both are valid and take the same kernel, or neither.

    One query without a mask, as in writing token by token, has the same form at every key_len of the same magnitude.
    None where that is not known: for subclasses of Tensor and other layouts, in graphs and transforms of torch, and for
    masks and biases of which it is not known what they follow from. Calls with additive similarity or a generator of
    their own have none either.
    """
    if additive is not None or generator is not None:
        return None
    if type(dropout) is not float or type(kernel) is not str:
        return None
    kinds = kinds_of(query, key, value, scale, softcap, sink)
    if kinds is None:
        return None
    key_shape: Hashable = key.shape
    value_shape: Hashable = value.shape
    structure = of_bias = None
    if mask is not None:
        structure = mask.structure() if isinstance(mask, Mask) else None
        if structure is None:
            return None
    elif bias is None and query.dim() == key.dim() == value.dim() == 4 and query.shape[2] == 1:
        batch, kv_heads, key_len, head_dim = key.shape
        if value.shape[:3] == (batch, kv_heads, key_len):
            key_shape, value_shape = (batch, kv_heads, head_dim, key_len.bit_length()), value.shape[3]
    if bias is not None:
        if isinstance(bias, Bias) or (type(bias) in _TENSORS and is_plain(bias)):
            of_bias = known(bias) or _in_place(query, bias)
        if of_bias is None:
            return None
    return query.shape, key_shape, value_shape, kinds, structure, of_bias, dropout, wants_lse, kernel


def _in_place(query: Tensor, bias: Bias | Tensor) -> Form | None:
    """What is equal only for the same memory, of an inference tensor: whatever was written to it. Of one query, and by
    kernels that do not read a bias where it is, numbers are kept."""
    if type(bias) is not Tensor or not bias.is_inference() or query.dim() != 4 or query.shape[2] == 1:
        return None
    return bias.data_ptr(), bias.dtype, bias.shape, bias.stride()


def kinds_of(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None, sink: Tensor | None
) -> Form | None:
    """The part of a form that is neither the shapes of query, key and value nor mask and bias; None if not known."""
    if not as_it_stands():
        return None
    if not (type(query) is type(key) is type(value) is Tensor):
        return None
    if (
        query.is_nested
        or key.is_nested
        or value.is_nested
        or not (query.layout is key.layout is value.layout is _PLAIN)
    ):
        return None
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS:
        return None
    grads = torch.is_grad_enabled()
    on_a_cpu = query.is_cpu and key.is_cpu and value.is_cpu  # asked in half the time of devices that are compared
    of_sink = None
    if sink is not None:
        if type(sink) not in _TENSORS or not is_plain(sink):
            return None
        of_sink = sink.shape, sink.dtype, sink.device, grads and sink.requires_grad
    return (
        query.dtype, key.dtype, value.dtype, None if on_a_cpu else (query.device, key.device, value.device),
        grads and (query.requires_grad or key.requires_grad or value.requires_grad), scale, softcap, of_sink,
        torch._C._is_any_autocast_enabled(),
    )  # fmt: skip


recall: Callable[[Form], Checked | None] = _KNOWN.get
"""The validated call of that form, if it is cached."""


def remember(form: Form, call: Call, kernel: Kernel) -> Checked | None:
    """Caches a valid call and its kernel, unless it holds tensors on a GPU, whose memory is scarce, or small parts of
    large ones; returns it if it is cached."""
    if any(tensor.grad_fn is not None and tensor._base is None for tensor in call.scoring.learned()):
        return None  # made of what was given, whose numbers may change: nothing follows them
    held: list[Tensor] = []
    for rule in (call.scoring.mask, call.scoring.bias):
        if rule is not None:
            serialise(rule, held)
    if call.query.device.type == "cpu":
        held = [tensor for tensor in held if tensor.untyped_storage().nbytes() > MAX_COMPARED_BYTES]
    if held or all_scores(call) > MAX_SCORES or call.scoring.grid.heads > MAX_HEADS:  # large, or one that warns
        return None
    bias = call.scoring.bias
    if bias is not None:
        if known(bias) is None and not kernel.reads_in_place:
            return None
        call = call._replace(scoring=replace(call.scoring, bias=settled(bias)))  # what is compared may change
    return keep(_KNOWN, form, Checked(call, kernel))


def keep(known: dict[Form, Value], form: Form, value: Value) -> Value:
    """Adds what is known of a form to a cache; those that are oldest make room. Returns the value."""
    with _lock:
        while len(known) >= MAX_FORMS:
            del known[next(iter(known))]
        known[form] = value
    return value


def forget() -> None:
    """Empties the cache."""
    with _lock:
        _KNOWN.clear()

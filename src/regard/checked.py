"""The cache of validated calls: one like an earlier one goes straight to its kernel.

Whether a call is valid, and which kernel it takes, follows from its `Form`: shapes, dtypes and devices, whether a
gradient is wanted, the structure of the mask, and the other arguments. The last few forms are cached (`recall`,
`remember`), never a result, nor query, key, value or sink, which may be others in each call.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.biases import Bias, Given
from regard.dropout import Dropout
from regard.graphs import as_it_stands
from regard.kernels import Call, Kernel, Prepared
from regard.kernels.known import keep
from regard.kernels.strips import binding
from regard.masks import Mask
from regard.rules import known, serialise, settled
from regard.scores import Additive, Scoring
from regard.shapes import MAX_HEADS, is_plain
from regard.versions import MAX_HELD_BYTES

Form = tuple[Hashable, ...]

MAX_FORMS = 16
"""Forms in the cache: those of a model whose layers differ, at a few lengths."""

NEW: Any = object()
"""In place of a call whose form is not in a cache."""

MAX_ASKED = 64
"""Forms of which it is remembered that there was a call: by a number, so that nothing is kept for that."""

_NUMBERS = frozenset({float, int, type(None)})
_TENSORS = frozenset({Tensor, nn.Parameter})
_KNOWN: dict[Form, "Checked"] = {}
_ASKED: dict[int, None] = {}
_BY_NUMBERS: dict[Form, None] = {}
"""Forms with a bias tensor whose kernel keeps what it reads: such calls are alike only if its numbers are."""

noted: tuple[object, ...] = ()
"""Calls that are known without their form, by `regard.repeated`, the last one first: of each where in memory it is
told, and what has to be kept for that."""

open_left = MAX_OPEN = 4 * MAX_FORMS
"""How many calls of any lengths may still be noted as they come, and after them not all; these are not noted by their
form."""


class Checked:
    """A call that was validated and has its kernel, for other tensors of the same form.

    Attributes:
        run: takes query, key, value, sink and bias, and returns output and lse.
        ways: how often it was noted (`regard.repeated`).
    """

    __slots__ = ("run", "ways")

    def __init__(self, call: Call, kernel: Kernel) -> None:
        prepared = None if torch._C._is_any_autocast_enabled() else kernel.prepare(call)
        if prepared is None:
            prepared = partial(_anew, kernel, _kept(call.scoring), call.dropout, call.wants_lse)
        self.run: Prepared = prepared
        self.ways = 0


def _kept(scoring: Scoring) -> Scoring:
    """What a cached call keeps: no sink, and no bias tensor."""
    bias = scoring.bias
    return scoring.with_sink(None).with_bias(bias.without_numbers() if isinstance(bias, Given) else bias)


def _anew(
    kernel: Kernel,
    scoring: Scoring,
    dropout: Dropout | None,
    wants_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    bias: Bias | Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """A call of which nothing could be prepared."""
    scoring = scoring.with_sink(sink)
    if isinstance(scoring.bias, Given):
        scoring = scoring.with_bias(scoring.bias.of(bias))
    dropout = None if dropout is None else dropout.drawn_anew()
    return kernel.compute(Call(query, key, value, scoring, dropout, wants_lse))


class InPlace(NamedTuple):
    """A bias tensor that is read where it lies, in every call."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    learns: bool


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

    None where that is not known: for subclasses of Tensor and other layouts, in graphs and transforms of torch, and for
    masks and biases of which it is not known what they follow from. Calls with additive similarity or a generator of
    their own have none either.
    """
    if additive is not None or generator is not None or not as_it_stands():
        return None
    if type(dropout) is not float or type(kernel) is not str:
        return None
    kinds = kinds_of(query, key, value, scale, softcap, sink)
    if kinds is None:
        return None
    structure = None
    if mask is not None:
        structure = mask.structure() if isinstance(mask, Mask) else None
        if structure is None:
            return None
    rest = kinds, structure, dropout, wants_lse, kernel
    if bias is None:
        return rest
    if not isinstance(bias, Bias):
        if type(bias) not in _TENSORS or not is_plain(bias):
            return None
        form = (*rest, InPlace(bias.dtype, bias.shape, bias.stride(), torch.is_grad_enabled() and bias.requires_grad))
        if form not in _BY_NUMBERS and bias.is_cpu and not bias.is_neg():
            return form
    of_bias = known(bias)
    return None if of_bias is None else (*rest, of_bias)


def kinds_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None = None,
    of_one: bool = False,
) -> Form | None:
    """The part of a form that is neither mask nor bias; None if not known. For calls that are computed now and as they
    are (`as_it_stands`).

    Args:
        bias: is part of it, if there is one. of_one: as of `binding.describe`.
    """
    if not (type(query) is type(key) is type(value) is Tensor) or not (bias is None or type(bias) is Tensor):
        return None
    if type(scale) not in _NUMBERS or type(softcap) not in _NUMBERS:
        return None
    describe = binding.describe if query.is_cpu else binding.described
    try:
        kinds = describe((query, key, value) if bias is None else (query, key, value, bias), of_one)
    except (RuntimeError, BufferError, TypeError):  # torch's
        return None
    if not kinds:
        return None
    grads, of_sink = torch.is_grad_enabled(), None
    learns = grads and (query.requires_grad or key.requires_grad or value.requires_grad)
    learns = learns or (grads and bias is not None and bias.requires_grad)
    if sink is not None:
        if type(sink) not in _TENSORS or not is_plain(sink):
            return None
        of_sink = sink.shape, sink.dtype, sink.device, grads and sink.requires_grad
    return kinds, learns, scale, softcap, of_sink, torch._C._is_any_autocast_enabled()


def is_again(form: Form) -> bool:
    """Whether a call of the form was asked for before, as far as is remembered."""
    known = hash(form)
    if known in _ASKED:
        return True
    keep(_ASKED, known, None, MAX_ASKED)
    return False


recall: Callable[[Form], Checked | None] = _KNOWN.get
"""The validated call of that form, if it is cached."""


def remember(form: Form, call: Call, kernel: Kernel, given: Bias | Tensor | None) -> Checked | None:
    """Caches a valid call and its kernel, unless it holds tensors on a GPU, whose memory is scarce, or small parts of
    large ones; returns it if it is cached.

    Args:
        given: the bias of which the form is.
    """
    bias = call.scoring.bias
    if type(form[-1]) is InPlace:
        if kernel.reads_in_place(call):
            bias = None  # another one in each call
        else:
            keep(_BY_NUMBERS, form, None, MAX_FORMS)
            form = *form[:-1], known(given)
    if bias is not None and any(tensor.grad_fn is not None and tensor._base is None for tensor in bias.learned()):
        return None  # made of what was given, whose numbers may change: nothing follows them
    held: list[Tensor] = []
    for rule in (call.scoring.mask, bias):
        if rule is not None:
            serialise(rule, held)
    if call.query.device.type == "cpu":
        held = [tensor for tensor in held if tensor.untyped_storage().nbytes() > MAX_HELD_BYTES]
    if held or call.scoring.grid.heads > MAX_HEADS:  # large, or one that warns
        return None
    if bias is not None:
        if known(bias) is None:
            return None
        call = call._replace(scoring=replace(call.scoring, bias=settled(bias)))  # what is compared may change
    return keep(_KNOWN, form, Checked(call, kernel), MAX_FORMS)


def forget() -> None:
    """Empties the cache."""
    global noted, open_left
    noted, open_left = (), MAX_OPEN
    _KNOWN.clear()
    _ASKED.clear()
    _BY_NUMBERS.clear()

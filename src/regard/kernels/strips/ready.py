"""Passes of the compiled library that are alike but for their tensors: what it is told is made once.

Between the layers of a model, Python's own objects leave the processor's caches: what takes 20 us in a loop of small
calls takes 200 there. So as little as possible is looked at here, and whatever else a call may need takes the general
way of `native`, which tells afterwards what the library was told.
"""

import ctypes
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.dropout import Dropout
from regard.kernels.known import keep
from regard.kernels.strips.binding import AT, Compiled, Words
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.order import Order, laid_like, tell_added, tell_dropout
from regard.kernels.strips.work import gradients_of, places_of_gradients
from regard.shapes import Grid

MAX_KEPT = 8
"""Ways in which the tensors of calls of one form may lie: one for each kind of layer and pass."""

_QUERY, _KEY, _VALUE, _OUTPUT, _EXACT = (AT[name] for name in ("query", "key", "value", "output", "exact"))
_GRAD_OUTPUT, _GRAD_QUERY, _GRADIENT = AT["grad_output"], AT["grad_query"], AT["gradient"]
_SUMS = tuple((AT[f"grad_{name}"], AT[f"sum_{name}"]) for name in ("key", "value"))
_LSE, _GRAD_LSE, _GIVEN, _THREADS, _SUSPECT = (AT[name] for name in ("lse", "grad_lse", "given", "threads", "suspect"))


class Pass(NamedTuple):
    """What the library is told in one pass.

    Attributes:
        call: with addresses that are others in each call.
        held: what must not be freed before the last of them.
        like: for each of the results, whether torch lays it like the tensor that it belongs to.
        sums: numbers that threads add up elsewhere, for the gradients of keys and of values.
        gradients: where the library is told that gradients of bias tensors go, and which of the numbers in there are
            the addresses of those that learn.
    """

    compiled: Compiled
    call: bytes
    held: object
    like: tuple[bool, ...]
    sums: tuple[int, int]
    gradients: tuple[bytes, tuple[int, ...]] | None = None


def forward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | None, dropout: Dropout | None,
    plan: StripPlan, wants_lse: bool, learns: bool, by_token: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """As `native.forward`; None where the general way has to be taken."""
    assert plan.told is not None
    likeness = query.stride(), key.stride(), value.stride(), dropout is None, wants_lse, learns, by_token
    told: Pass | None = plan.told.get(likeness)
    if told is None or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    compiled, words, size = told.compiled, Words.from_buffer_copy(told.call), value.shape[3]
    lse = exact = output = torch.empty_like(query) if told.like[0] else laid_like(query, size, by_token=by_token)
    words[_QUERY], words[_KEY], words[_VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
    words[_OUTPUT], words[_THREADS] = output.data_ptr(), torch.get_num_threads()
    if words[_LSE]:
        lse = query.new_empty(query.shape[:3], dtype=compiled.dtype)
        words[_LSE] = lse.data_ptr()
    if words[_EXACT]:
        exact = laid_like(query, size, compiled.dtype, by_token=by_token)
        words[_EXACT] = exact.data_ptr()
    held = tell_added(words, sink, bias if words[_GIVEN] else None, compiled.dtype)
    if dropout is not None:
        held += tell_dropout(words, dropout, _grid(query, key), compiled)
    compiled.forward(words)
    del held
    return None if words[_SUSPECT] else (output, lse, exact)  # something hidden may have had a part


def backward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | None, dropout: Dropout | None,
    plan: StripPlan, learned: Sequence[Tensor], output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]] | None:  # fmt: skip
    """The gradients of query, key and value, and of those of `learned` that want one; None where the general way has to
    be taken."""
    assert plan.told is not None
    tensors = query, key, value, output, grad_output
    told: Pass | None = plan.told.get(_likeness(tensors, learned, dropout, grad_lse))
    if told is None or any(map(Tensor.is_neg, tensors)) or not lse.is_contiguous():
        return None
    compiled, words = told.compiled, Words.from_buffer_copy(told.call)
    grads = [
        torch.empty_like(tensor) if like else laid_like(tensor, tensor.shape[3])
        for tensor, like in zip(tensors, told.like, strict=False)
    ]
    words[_QUERY], words[_KEY], words[_VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
    words[_EXACT if words[_EXACT] else _OUTPUT] = output.data_ptr()
    words[_GRAD_OUTPUT], words[_GRAD_QUERY], words[_LSE] = grad_output.data_ptr(), grads[0].data_ptr(), lse.data_ptr()
    if grad_lse is not None:
        grad_lse = grad_lse.to(compiled.dtype).resolve_neg().contiguous()
        words[_GRAD_LSE] = grad_lse.data_ptr()
    rooms = []
    for grad, (at_grad, at_sum), numbers in zip(grads[1:], _SUMS, told.sums, strict=True):
        if words[at_grad]:
            words[at_grad] = grad.data_ptr()
        else:
            words[at_sum] = grad.data_ptr()
        if numbers:
            rooms.append(grad.new_empty(numbers, dtype=compiled.dtype))
            words[at_sum] = rooms[-1].data_ptr()
    held = tell_added(words, sink, bias if words[_GIVEN] else None, compiled.dtype)
    of_learned: list[Tensor] = []
    if told.gradients is not None:
        array, places = told.gradients
        of_learned = [t.new_zeros(t.shape, dtype=compiled.dtype) for t in learned if t.requires_grad]
        addresses = (ctypes.c_int64 * (len(array) // 8)).from_buffer_copy(array)
        for place, grad in zip(places, of_learned, strict=True):
            addresses[place] = grad.data_ptr()
        words[_GRADIENT] = ctypes.addressof(addresses)
        held.append(addresses)
    if dropout is not None:
        held += tell_dropout(words, dropout, _grid(query, key), compiled)
    compiled.backward(words)
    if words[_SUSPECT]:
        return None
    if rooms:
        compiled.finish(words)
    del held
    return grads, of_learned


def remember_forward(
    order: Order, query: Tensor, key: Tensor, value: Tensor, dropout: Dropout | None, *likeness: bool
) -> None:
    """What the library was told, for passes like this one.

    Args:
        likeness: of `forward`, from wants_lse on.
    """
    *_, by_token = likeness
    like = value.shape[3] == query.shape[3] and not by_token and _is_laid(query)
    strides = query.stride(), key.stride(), value.stride()
    _remember(order, (*strides, dropout is None, *likeness), (query, key, value), (like,), (0, 0))


def remember_backward(
    order: Order, three: tuple[Tensor, Tensor, Tensor], learned: Sequence[Tensor], dropout: Dropout | None,
    output: Tensor, grad_output: Tensor, grad_lse: Tensor | None, sums: tuple[int, int],
) -> None:  # fmt: skip
    """The same of the gradients.

    Args:
        sums: numbers that threads add up elsewhere for keys and for values.
    """
    gradients = None
    if order.learns:
        places = places_of_gradients(order.added)
        if places is None:
            return
        gradients = bytes(gradients_of(order.added, None)), places
    tensors = *three, output, grad_output
    likeness = _likeness(tensors, learned, dropout, grad_lse)
    _remember(order, likeness, tensors, tuple(map(_is_laid, three)), sums, gradients)


def _likeness(
    tensors: Iterable[Tensor], learned: Sequence[Tensor], dropout: Dropout | None, grad_lse: Tensor | None
) -> Hashable:
    """By what gradients of calls of one form are told apart."""
    which = tuple(tensor.requires_grad for tensor in learned)
    return *map(Tensor.stride, tensors), which, dropout is None, grad_lse is not None, torch.get_num_threads()


def _remember(
    order: Order, likeness: Hashable, tensors: Iterable[Tensor], like: tuple[bool, ...], sums: tuple[int, int],
    gradients: tuple[bytes, tuple[int, ...]] | None = None,
) -> None:  # fmt: skip
    plan = order.plan
    as_they_are = all(tensor.stride(3) == 1 and not tensor.is_neg() for tensor in tensors)
    if plan.told is None or not (order.is_whole and as_they_are) or order.is_suspect():
        return
    call, held = order.of_form()
    keep(plan.told, likeness, Pass(order.compiled, call, held, like, sums, gradients), MAX_KEPT)


def _is_laid(tensor: Tensor) -> bool:
    """Whether torch lays another tensor like this one as `laid_like` does; it takes less time."""
    _, heads, length, size = tensor.shape
    whole = heads * length * size
    return tensor.stride() in ((whole, length * size, size, 1), (whole, size, heads * size, 1))


def _grid(query: Tensor, key: Tensor) -> Grid:
    batch, heads, query_len, _ = query.shape
    return Grid(batch, heads, query_len, key.shape[2], query.device)

"""A layer's call of one query, as in writing token by token: whatever does not depend on the numbers is done once.

A step of a small model takes a few milliseconds, of which attention's arithmetic is a few hundredths; checking a call
and choosing its kernel takes as long again. So a call that is like an earlier one but for its numbers, its padding and
one more key is known by its form, in all layers and steps. Where something hidden may have had a part in the result,
the layer takes the ordinary way, which puts zeros in its place.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.checked import Form, keep, kinds_of
from regard.functional import check_call
from regard.kernels import Single, choose
from regard.kernels.hidden import Hidden
from regard.shapes import is_plain


class Seen(NamedTuple):
    """What a single query sees: consecutive keys, None for all of them, and which of these are hidden in some rows."""

    keys: range | None = None
    hidden: Hidden | None = None


EVERY_KEY = Seen()

_KNOWN: dict[Form, Single | None] = {}
"""Calls by their form; None for those that have no such way."""

_NEW: Any = object()
"""In place of a call whose form is not there."""


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    seen: Seen = EVERY_KEY,
) -> Tensor | None:
    """The output for one query; None where the layer has to take the ordinary way."""
    kinds, of_bias = kinds_of(query, key, value, scale, softcap, sink), None
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if kinds is None or not len(of_query) == len(of_key) == len(of_value) == 4:
        return None
    if bias is not None:
        of_bias = _form_of_bias(bias, of_key[2])
        if of_bias is None:
            return None
    batch, heads, key_len, size = of_key
    magnitude = key_len.bit_length() if key_len == of_value[2] else None
    form = of_query, batch, heads, size, of_value[0], of_value[1], of_value[3], magnitude, kinds, of_bias
    single: Single | None = _KNOWN.get(form, _NEW)
    if single is _NEW:
        call = check_call("attention", query, key, value, None, bias, scale, softcap, sink, None)
        single = keep(_KNOWN, form, None if torch._C._is_any_autocast_enabled() else choose(call).single(call))
    if single is None:
        return None
    keys, hidden = seen
    if keys is not None:
        start, length = keys.start, len(keys)
        key, value = key.narrow(2, start, length), value.narrow(2, start, length)
        if bias is not None and bias.shape[3] > 1:
            bias = bias.narrow(3, start, length)
    return single(query, key, value, sink, hidden, bias)


def _form_of_bias(bias: Tensor, key_len: int) -> Form | None:
    """What validity follows from; None if it is not known."""
    if type(bias) is not Tensor or not is_plain(bias) or bias.dim() != 4:
        return None
    *sizes, columns = bias.shape
    learns = bias.requires_grad and torch.is_grad_enabled()
    return *sizes, columns in (1, key_len), bias.dtype, bias.device, learns

"""A regard mask that transformers accepts as a tensor: of bools, or of numbers after a model has added some."""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.biases import Bias, as_bias
from regard.checked import MAX_SCORES, Checked, Form, keep, kinds_of
from regard.functional import check_call
from regard.huggingface.lazy import _LOGICAL, _OUTSIDE, Lazy
from regard.indexing import indices
from regard.kernels import choose
from regard.kernels.hidden import Hidden
from regard.masks import Mask, Padding
from regard.masks.planning import common_keys
from regard.shapes import Grid, ShapeError, is_plain

SUMS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}
"""The functions by which models add numbers to their mask."""

Ready = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""A layer's call that waits for its query, key, value, sink and bias."""

_STEPS: dict[Form, Checked] = {}
"""Calls of one query, as they are without padding and bias, by which those of the next tokens are known."""


def _next_token(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None, sink: Tensor | None,
    bias: Tensor | None, kinds: Form, seen: slice | None, padding: Padding | None,
) -> Ready | None:  # fmt: skip
    """The call of one query that sees these keys. It is like the one of the token before, but for the padding, the bias
    and one more key: then it is valid, and takes the same kernel."""
    if seen is not None:
        key, value = key[:, :, seen], value[:, :, seen]
        bias = None if bias is None else _part_of(bias, seen)
    if bias is not None and (bias.dim() != 4 or (bias.requires_grad and torch.is_grad_enabled())):
        return None
    batch, kv_heads, key_len, _ = key.shape
    if value.shape[:3] != (batch, kv_heads, key_len):
        return None
    of_bias = None if bias is None else bias.dtype
    form = query.shape, kv_heads, key.shape[3], value.shape[3], key_len.bit_length(), kinds, padding is None, of_bias
    known = _STEPS.get(form)
    if known is None:
        call = check_call("attention", query, key, value, padding, bias, scale, softcap, sink, None)
        bare = call._replace(scoring=replace(call.scoring, mask=None, bias=None))
        known = keep(_STEPS, form, bare, choose(call))
        if known is None:
            return None
    if bias is not None:
        try:
            bound = as_bias(bias).bind(known.grid(key_len))
        except ShapeError:  # a call that is known has to tell of its other tensors too
            return None
        return _of_layers_with_biases(known, padding, bound, seen)
    return _of_layers(known if padding is None else known.like(query, key, value, sink, padding), seen)


def _part_of(bias: Tensor, seen: slice) -> Tensor:
    return bias if bias.shape[-1] == 1 else bias[..., seen]


def _of_layers(checked: Checked, seen: slice | None) -> Ready:
    """A call that is the same in all layers, but for its tensors."""

    def ready(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Tensor | None) -> Tensor:
        if seen is not None:
            key, value = key[:, :, seen], value[:, :, seen]
        return checked(query, key, value, sink)[0]

    return ready


def _of_layers_with_biases(known: Checked, padding: Padding | None, bound: Bias, seen: slice | None) -> Ready:
    """The same where each layer may have a bias of its own, of the form of this one."""

    def ready(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Tensor | None) -> Tensor:
        assert bias is not None
        if seen is not None:
            key, value, bias = key[:, :, seen], value[:, :, seen], _part_of(bias, seen)
        return known.compute(query, key, value, sink, padding, bound._with(numbers=bias))[0]

    return ready


class LazyMask(Lazy):
    """A regard mask in place of transformers' bool tensor [batch, 1, query_len, key_len], True = may attend.

    A model may add numbers to it, as BEiT adds its positions: the result stands for these, with -inf where hidden.

    Args:
        mask: with fixed offsets. shape: batch, query_len and key_len.
        bias: what was added, broadcastable to [batch, heads, query_len, key_len], or None.
        real: bool [batch, key_len], which keys are no padding; None: all, or the mask says so itself.
    """

    bias: Tensor | None
    _rule: Mask
    _real: Tensor | None
    _mask: Mask | None
    _made_for: tuple[int, int, int, torch.device]
    _ready: dict[Hashable, Ready]

    def __new__(
        cls,
        mask: Mask,
        shape: tuple[int, int, int],
        device: torch.device,
        bias: Tensor | None = None,
        real: Tensor | None = None,
    ) -> "LazyMask":
        batch, query_len, key_len = shape
        whole: tuple[int, ...] = (batch, 1, query_len, key_len)
        if bias is not None:
            whole = torch.broadcast_shapes(whole, bias.shape)
        made: LazyMask = cls._empty(cls, whole, torch.bool if bias is None else bias.dtype, device)
        made._rule, made._real, made.bias, made._made_for = mask, real, bias, (batch, query_len, key_len, device)
        made._mask = mask if real is None else None
        made._ready = {}
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    @property
    def mask(self) -> Mask:
        """The mask, with fixed offsets."""
        if self._mask is None:
            assert self._real is not None
            with torch.inference_mode(False):  # a copy that nobody writes to, so that caches stay valid
                self._mask = self._rule & Padding(self._real.clone())
        return self._mask

    def of_call(self, batch: int, query_len: int, key_len: int, device: torch.device) -> Mask:
        """The mask for a layer with these lengths, which must be those for which it was made."""
        self._check_lengths(batch, query_len, key_len)
        return self.mask if device == self._made_for[3] else self.mask.to(device)

    def _check_lengths(self, batch: int, query_len: int, key_len: int) -> None:
        rows, queries, keys, _ = self._made_for  # faster than the tensor's shape
        if rows not in (1, batch) or (queries, keys) != (query_len, key_len):
            raise ShapeError(
                f"regard: the mask is for [batch={rows}, query_len={queries}, key_len={keys}], the layer has "
                f"[{batch=}, {query_len=}, {key_len=}]"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sink: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        """One layer's call with this mask, validated once for all layers of the same form; None if it is not of a form
        that can be told from others.

        The mask is made for one step and never modified, so neither its structure nor the numbers of a bias are a part
        of the form.
        """
        kinds = kinds_of(query, key, value, scale, softcap, sink)
        if kinds is None or not (bias is None or (type(bias) is Tensor and is_plain(bias))):
            return None
        of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.requires_grad)
        form = query.shape, key.shape, value.shape, kinds, of_bias
        ready = self._ready.get(form)
        if ready is None:
            ready = self._first(query, key, value, scale, softcap, sink, bias, kinds)
            if ready is None:
                return None
            self._ready[form] = ready
        return ready(query, key, value, sink, bias)

    def _first(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None,
        sink: Tensor | None, bias: Tensor | None, kinds: Form,
    ) -> Ready | None:  # fmt: skip
        """The call of the first layer of a form, made ready for all of them."""
        (batch, heads, query_len), key_len, own_device = query.shape[:3], key.shape[2], self._made_for[3]
        self._check_lengths(batch, query_len, key_len)
        alike = query.dtype == key.dtype == value.dtype and batch == key.shape[0] == value.shape[0]
        if not alike or query.device != own_device or self.bias is not None:
            return None
        if batch * heads * query_len * key_len > MAX_SCORES:
            return None
        if query_len == 1 and self._one_query is not None:
            seen, padding = self._one_query
            return _next_token(query, key, value, scale, softcap, sink, bias, kinds, seen, padding)
        if bias is not None:  # which is compared by its contents, like all else that a call of `attention` has
            return None
        call = check_call("attention", query, key, value, self.mask, None, scale, softcap, sink, None)
        return _of_layers(Checked(call, choose(call)), None)

    @cached_property
    def _one_query(self) -> tuple[slice | None, Padding | None] | None:
        """The consecutive keys that a single query may see, None for all of them, and which of these are real in each
        row, if some are not; None if the mask says more, or finding out costs much."""
        batch, _, key_len, device = self._made_for
        real = self._real
        seen = common_keys(self._rule, range(1), key_len)
        if seen is None or (real is not None and device.type != "cpu"):
            return None
        part = None if len(seen) == key_len else slice(seen.start, seen.stop)
        if real is None:
            return part, None
        if part is not None:
            real = real[:, part]
        counts = real.sum(1).tolist()
        if part is not None and min(counts) == len(seen):
            return part, None
        hidden = Hidden(real[:, None, None], hides=True, all_see=min(counts) > 0)
        return part, Padding(real)._with(_batch=batch, _device=device, _hidden=hidden)

    def dense(self) -> Tensor:
        self._check_size()
        batch, heads, query_len, key_len = self.shape
        bound = self.mask.bind(Grid(batch, heads, query_len, key_len, self.device))
        rows, columns = indices(range(query_len), self.device), indices(range(key_len), self.device)
        allowed = bound.allowed(rows, columns).expand(self.shape)
        return allowed if self.bias is None else self.bias.expand(self.shape).masked_fill(~allowed, -math.inf)

    def _advice(self) -> str:
        return "ask .mask.allowed(queries, keys) for a rectangle"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.to:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if dtype in (None, args[0].dtype):
                return args[0]._on(device)
        if func in SUMS and not kwargs and len(args) == 2:
            lazy, other = args if isinstance(args[0], LazyMask) else args[::-1]
            if lazy._may_be_added(other):
                return lazy._with(other if lazy.bias is None else lazy.bias + other)
        logical = func in _LOGICAL and all(one.bias is None for one in args if isinstance(one, LazyMask))
        copied = func in (Tensor.contiguous, Tensor.clone, Tensor.__deepcopy__, Tensor.__reduce_ex__)
        if not (func in _OUTSIDE or logical or copied or getattr(func, "__name__", "") == "__get__"):
            # typically a model without the interface that adds the mask, assumed to be 0 and -inf, to its scores
            raise ValueError(  # not a TypeError, whose message `+` would replace
                f"regard: the model works on its mask itself ({getattr(func, '__name__', func)}), which regard "
                'does not support; load it with attn_implementation="eager" '
                "(.dense() returns the mask as a tensor)"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def _may_be_added(self, other: object) -> bool:
        """Whether it can be a bias: an ordinary tensor that does not enlarge batch, query_len or key_len."""
        if not isinstance(other, Tensor) or isinstance(other, Lazy) or not other.is_floating_point():
            return False
        rows, *lengths, _ = self._made_for
        fits = zip(other.shape[::-1], (*lengths[::-1], None, rows), strict=False)
        return other.dim() <= 4 and all(wanted is None or size in (1, wanted) or wanted == 1 for size, wanted in fits)

    def _with(self, bias: Tensor) -> "LazyMask":
        *shape, device = self._made_for
        return LazyMask(self._rule, (shape[0], shape[1], shape[2]), device, bias, self._real)

    def _on(self, device: torch.device | None) -> "LazyMask":
        batch, query_len, key_len, own_device = self._made_for
        if device is None or device == own_device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        return LazyMask(self.mask.to(device), (batch, query_len, key_len), device, bias)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        added = "" if self.bias is None else f" + {self.bias.dtype} {list(self.bias.shape)}"
        return f"LazyMask({self.mask}{added}, {list(self.shape)})"

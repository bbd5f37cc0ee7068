"""A regard mask that transformers accepts as a tensor: of bools, or of numbers after a model has added some."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.checked import Checked, Form, form_of, keep
from regard.functional import attention, check_call, compute
from regard.huggingface.lazy import _LOGICAL, _OUTSIDE, Lazy
from regard.indexing import indices
from regard.kernels import choose
from regard.masks import Mask, Padding
from regard.masks.planning import common_keys, factors, product_of
from regard.shapes import Grid, ShapeError

SUMS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}
"""The functions by which models add numbers to their mask."""

_STEPS: dict[Form, Checked] = {}
"""Calls of one query, by which those of the next steps are known."""


class LazyMask(Lazy):
    """A regard mask in place of transformers' bool tensor [batch, 1, query_len, key_len], True = may attend.

    A model may add numbers to it, as BEiT adds its positions: the result stands for these, with -inf where hidden.

    Attributes:
        mask: the mask, with fixed offsets.
        bias: what was added, broadcastable to [batch, heads, query_len, key_len], or None.
    """

    mask: Mask
    bias: Tensor | None
    _made_for: tuple[int, int, int, torch.device]
    _checked: dict[Form, Checked]

    def __new__(
        cls, mask: Mask, shape: tuple[int, int, int], device: torch.device, bias: Tensor | None = None
    ) -> "LazyMask":
        batch, query_len, key_len = shape
        whole = torch.Size((batch, 1, query_len, key_len))
        if bias is not None:
            whole = torch.broadcast_shapes(whole, bias.shape)
        made: LazyMask = cls._empty(cls, whole, torch.bool if bias is None else bias.dtype, device)
        made.mask, made.bias, made._made_for = mask, bias, (batch, query_len, key_len, device)
        made._checked = {}
        return made

    def __init__(
        self, mask: Mask, shape: tuple[int, int, int], device: torch.device, bias: Tensor | None = None
    ) -> None:
        pass

    def of_call(self, batch: int, query_len: int, key_len: int, device: torch.device) -> Mask:
        """The mask for a layer with these lengths, which must be those for which it was made."""
        rows, queries, keys, own_device = self._made_for  # faster than the tensor's shape
        if rows not in (1, batch) or (queries, keys) != (query_len, key_len):
            raise ShapeError(
                f"regard: the mask is for [batch={rows}, query_len={queries}, key_len={keys}], the layer has "
                f"[{batch=}, {query_len=}, {key_len=}]"
            )
        return self.mask if device == own_device else self.mask.to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, softcap: float | None) -> Tensor:
        """One layer's call with this mask alone; validated once for all layers of the same form.

        The mask is made for one step and never modified, so its structure is not part of the form.
        """
        padding = None
        if query.shape[2] == 1 and self._one_query is not None:  # a call like those of the steps before
            seen, padding = self._one_query
            if len(seen) < key.shape[2]:
                key, value = key[:, :, seen.start : seen.stop], value[:, :, seen.start : seen.stop]
            if padding is None:
                return attention(query, key, value, scale=scale, softcap=softcap)
        form = form_of(query, key, value, None, None, scale, softcap, None, None, 0.0, None, False, "auto")
        checked = None if form is None else self._checked.get(form)
        if checked is None:
            return self._first(form, query, key, value, scale, softcap, padding)
        return checked(query, key, value)[0]

    def _first(
        self,
        form: Form | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        padding: Padding | None,
    ) -> Tensor:
        """The call of the first layer of that form. In writing it is like that of the step before, but with other
        padding: then it is valid, and takes the same kernel."""
        if form is not None and padding is not None and form in _STEPS:
            checked = self._checked[form] = _STEPS[form].like(query, key, value, padding)
            return checked(query, key, value)[0]
        mask = self.mask if padding is None else padding
        call = check_call("attention", query, key, value, mask, None, scale, softcap, None, None)
        kernel = choose(call)
        if form is not None:
            keep(self._checked, form, call, kernel)
            if padding is not None:
                keep(_STEPS, form, call, kernel)
        return compute(call, kernel)[0]

    @cached_property
    def _one_query(self) -> tuple[range, Padding | None] | None:
        """The consecutive keys that a single query may see, and which of them are real in each row, if some are not;
        None if the mask says more, or finding out costs much."""
        batch, _, key_len, device = self._made_for
        given: list[Padding] = []
        rest: list[Mask] = []
        for part in factors(self.mask):
            if isinstance(part, Padding) and part.keys.dtype == torch.bool:
                given.append(part)
            else:
                rest.append(part)
        others = product_of(rest)
        seen = None if others.varies_by_batch else common_keys(others, range(1), key_len)
        if seen is None or len(given) > 1 or (given and device.type != "cpu"):
            return None
        if not given:
            return seen, None
        real = given[0].keys[:, seen.start : seen.stop]
        return seen, None if bool(real.all()) else Padding(real)._with(_batch=batch, _device=device)

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
        return LazyMask(self.mask, (shape[0], shape[1], shape[2]), device, bias)

    def _on(self, device: torch.device | None) -> "LazyMask":
        batch, query_len, key_len, own_device = self._made_for
        if device is None or device == own_device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        return LazyMask(self.mask.to(device), (batch, query_len, key_len), device, bias)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        added = "" if self.bias is None else f" + {self.bias.dtype} {list(self.bias.shape)}"
        return f"LazyMask({self.mask}{added}, {list(self.shape)})"

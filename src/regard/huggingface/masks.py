"""A mask of regard that transformers takes for a bool tensor."""

from typing import Any

import torch
from torch import Tensor

from regard.huggingface.lazy import _LOGICAL, _OUTSIDE, Lazy
from regard.masks import And, Dense, Document, Mask, Not, Or, Padding, indices
from regard.shapes import Grid, ShapeError


class LazyMask(Lazy):
    """A regard mask that transformers takes for its bool tensor [batch, 1, query_len, key_len], True = may attend.

    Attributes:
        mask: the mask, with every offset settled.
    """

    mask: Mask
    _made_for: tuple[int, int, int, torch.device]

    def __new__(cls, mask: Mask, shape: tuple[int, int, int], device: torch.device) -> "LazyMask":
        batch, query_len, key_len = shape
        made: LazyMask = cls._empty(cls, (batch, 1, query_len, key_len), torch.bool, device)
        made.mask, made._made_for = mask, (batch, query_len, key_len, device)
        return made

    def __init__(self, mask: Mask, shape: tuple[int, int, int], device: torch.device) -> None:
        pass

    def of_call(self, batch: int, query_len: int, key_len: int, device: torch.device) -> Mask:
        """The mask for one layer's lengths, which must be those that it was made for."""
        rows, queries, keys, own_device = self._made_for  # every layer asks, and a tensor's own shape takes longer
        if rows not in (1, batch) or (queries, keys) != (query_len, key_len):
            raise ShapeError(
                f"regard: the mask is for [batch={rows}, query_len={queries}, key_len={keys}], the layer has "
                f"[{batch=}, {query_len=}, {key_len=}]"
            )
        return self.mask if device == own_device else _moved(self.mask, device)

    def dense(self) -> Tensor:
        self._check_size()
        batch, heads, query_len, key_len = self.shape
        bound = self.mask.bind(Grid(batch, heads, query_len, key_len, self.device))
        rows, columns = indices(range(query_len), self.device), indices(range(key_len), self.device)
        return bound.allowed(rows, columns).expand(self.shape)

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
            if dtype in (None, torch.bool):
                return args[0]._on(device)
        if not (func in _OUTSIDE or func in _LOGICAL or getattr(func, "__name__", "") == "__get__"):
            # Above all a model that is not on the interface and adds what it takes for 0 and -inf to its scores.
            raise ValueError(  # not a TypeError, of which `+` would keep the words to itself
                f"regard: the model works on its mask itself ({getattr(func, '__name__', func)}), which regard cannot "
                'follow: is it on transformers\' attention interface? With attn_implementation="eager" it runs. '
                "(.dense() gives the mask's numbers)"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def _on(self, device: torch.device | None) -> "LazyMask":
        if device is None or device == self.device:
            return self
        batch, _, query_len, key_len = self.shape
        return LazyMask(_moved(self.mask, device), (batch, query_len, key_len), device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.mask}, {list(self.shape)})"


def _moved(mask: Mask, device: torch.device) -> Mask:
    """The same mask with its data on another device."""
    if isinstance(mask, (And, Or)):
        return type(mask)(_moved(mask.left, device), _moved(mask.right, device))
    if isinstance(mask, Not):
        return Not(_moved(mask.mask, device))
    if isinstance(mask, Document):
        queries = mask.query_ids.to(device)
        return Document(queries, None if mask.key_ids is mask.query_ids else mask.key_ids.to(device))
    if isinstance(mask, Padding):
        return Padding(mask.keys.to(device))
    if isinstance(mask, Dense):
        return Dense(mask.mask.to(device))
    return mask  # a rule alone, or asked where its data lies

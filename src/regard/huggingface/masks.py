"""A regard mask that transformers accepts as a tensor: of bools, or of numbers after a model has added some."""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.checked import NEW, Checked, Form, InPlace, form_of, kinds_of, recall, remember
from regard.huggingface.lazy import _INSIDE_PROPERTIES, _LOGICAL, _OUTSIDE, Lazy, writes
from regard.indexing import indices
from regard.kernels import choose
from regard.kernels.hidden import Hidden
from regard.masks import Mask, Padding
from regard.masks.planning import common_keys
from regard.one_query import Seen, attend_one
from regard.shapes import Grid, ShapeError
from regard.validation import check_call

SUMS = {Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add}
"""The functions by which models add numbers to their mask."""

_WHERE = {torch.where: 0, Tensor.masked_fill: 1, Tensor.masked_fill_: 1, torch.masked_fill: 1}
"""Where functions that choose by bools have these among their arguments."""

_ARRANGING = (
    "__getitem__", "narrow", "select", "view", "reshape", "flatten", "unsqueeze", "squeeze", "transpose", "permute",
    "expand", "expand_as", "repeat", "repeat_interleave", "contiguous", "clone", "detach",
)  # fmt: skip
_VIEWS = {getattr(where, name) for where in (Tensor, torch) for name in _ARRANGING if hasattr(where, name)}
"""Functions that only arrange what is there."""


_KNOW_BOOLS: dict[type, bool] = {}
"""Whether the models with a kind of configuration take masks of bools, where there are such models."""


def knows_bools(config: type) -> bool:
    """Whether the models with a kind of configuration take masks of bools, as they have to under "sdpa". What is the
    configuration of no model does."""
    if config not in _KNOW_BOOLS:
        from transformers import PreTrainedModel

        kinds: list[Any] = [PreTrainedModel]
        for kind in kinds:
            kinds += kind.__subclasses__()
        supported = [kind._supports_sdpa for kind in kinds if kind.config_class is config]
        if not supported:
            return True  # they may be imported yet
        _KNOW_BOOLS[config] = any(supported)
    return _KNOW_BOOLS[config]


knows_bools._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes the answer as it is


class LazyMask(Lazy):
    """A regard mask in place of transformers' tensor [batch, 1, query_len, key_len]: of bools, True = may attend, or of
    numbers, 0 and the least one, for models that know no other.

    A model may add numbers to it, as BEiT adds its positions: the result stands for these, with -inf where hidden. What
    else is done with numbers, as by MPNet, which takes the softmax itself, or by DeepSeek V4, which appends columns, is
    done with an ordinary tensor, as under eager.

    Args:
        mask: with fixed offsets. shape: batch, query_len and key_len.
        bias: what was added, broadcastable to [batch, heads, query_len, key_len], or None.
        real: bool [batch, key_len], which keys are no padding; None: all, or the mask says so itself.
        dtype: of the tensor that it stands for, where nothing was added.
    """

    bias: Tensor | None
    _kind: torch.dtype
    _alone: "LazyMask | None"
    _added: dict[torch.dtype, Tensor | None]
    _rule: Mask
    _real: Tensor | None
    _mask: Mask | None
    _made_for: tuple[int, int, int, torch.device]
    _checked: dict[Form, Checked | None]

    def __new__(
        cls,
        mask: Mask,
        shape: tuple[int, int, int],
        device: torch.device,
        bias: Tensor | None = None,
        real: Tensor | None = None,
        dtype: torch.dtype = torch.bool,
    ) -> "LazyMask":
        batch, query_len, key_len = shape
        whole: tuple[int, ...] = (batch, 1, query_len, key_len)
        if bias is not None:
            whole = torch.broadcast_shapes(whole, bias.shape)
        kind = dtype if bias is None else bias.dtype
        made: LazyMask = cls._empty(cls, whole, kind, device)
        made._kind = kind
        made._rule, made._real, made.bias, made._made_for = mask, real, bias, (batch, query_len, key_len, device)
        made._mask = mask if real is None else None
        made._checked, made._added, made._alone = {}, {}, None
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    # what models ask in every layer, without torch's way to subclasses
    dtype = property(lambda self: self._kind)

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
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Output and lse of one layer's call with this mask, validated once for all layers of the same form; None if it
        is not of a form that can be told from others.

        The mask is made for one step and never modified, so its structure is no part of the form. The call is computed
        now and as it is (`as_it_stands`).
        """
        if self.bias is not None:
            return None
        if self._made_for[1] == 1:
            seen = self.seen_by_one(query, key)
            return None if seen is None else attend_one(query, key, value, scale, softcap, sink, bias, seen)
        form = kinds_of(query, key, value, scale, softcap, sink, bias)
        if form is None:
            return None
        if bias is not None:
            if bias.is_neg():
                return None
            form = (*form, bias.stride(), bias.requires_grad)
        checked = self._checked.get(form, NEW)
        if checked is NEW:
            checked = self._checked[form] = self._first(query, key, value, scale, softcap, sink, bias)
        return None if checked is None else checked.run(query, key, value, sink, bias)

    def seen_by_one(self, query: Tensor, key: Tensor) -> Seen | None:
        """What the only query of a layer's call sees; None if that costs much to find out, or the call does not fit."""
        rows, query_len, key_len, device = self._made_for
        batch, _, queries, _ = query.shape
        fits = queries == query_len == 1 and key.shape[2] == key_len and rows in (1, batch) and query.device == device
        return self._seen if fits else None

    def _first(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        softcap: float | None,
        sink: Tensor | None,
        bias: Tensor | None,
    ) -> Checked | None:
        """The call of the first layer of a form, made ready for all of them; None if its kernel keeps the bias."""
        batch, _, query_len, _ = query.shape
        self._check_lengths(batch, query_len, key.shape[2])
        alike = query.dtype == key.dtype == value.dtype and batch == key.shape[0] == value.shape[0]
        if not alike or query.device != self._made_for[3]:
            return None
        given = query, key, value, self.mask, bias, scale, softcap, sink, None, 0.0, None, False
        form = form_of(*given, "auto") if self._real is None else None  # else it is another mask in each step
        by_numbers = form is not None and bias is not None and type(form[-1]) is not InPlace
        checked = None if form is None or by_numbers else recall(form)
        if checked is None and not by_numbers:
            call = check_call("attention", *given)
            kernel = choose(call)
            if bias is None or kernel.reads_in_place(call):
                known = None if form is None else remember(form, call, kernel, bias)
                checked = Checked(call, kernel) if known is None else known
        return checked

    @cached_property
    def _seen(self) -> Seen | None:
        """What a single query sees; None if the mask is of another kind, or finding out costs much."""
        _, _, key_len, device = self._made_for
        real = self._real
        if real is not None and device.type != "cpu":
            return None
        seen = common_keys(self._rule, range(1), key_len)
        if seen is None:
            return None
        keys = None if len(seen) == key_len else seen
        if real is None:
            return Seen(keys)
        if keys is not None:
            real = real[:, keys.start : keys.stop]
            if bool(real.all()):
                return Seen(keys)
        return Seen(keys, Hidden(real[:, None, None], hides=True))

    def dense(self) -> Tensor:
        self._check_size()
        allowed = self._computed()
        if self._kind == torch.bool:
            return allowed
        added = torch.zeros((), dtype=self._kind, device=self.device) if self.bias is None else self.bias
        return added.expand(self.shape).masked_fill(~allowed, -math.inf)

    def _scores(self) -> Tensor:
        """What was added, and the least number where hidden, as under eager: no row of weights is NaN."""
        numbers = (self if self._alone is None else self._alone)._numbers(self._kind)
        if numbers is None:
            return torch.zeros(self.shape, dtype=self._kind, device=self.device) if self.bias is None else self.bias
        return numbers.expand(self.shape) if self.bias is None else self.bias + numbers

    def _numbers(self, dtype: torch.dtype) -> Tensor | None:
        """0 for who may attend and otherwise the least number, made once for all layers that add them; None if nothing
        is hidden."""
        if dtype not in self._added:
            numbers, allowed = None, self._cells
            if not bool(allowed.all()):
                numbers = as_numbers(allowed, dtype)
            self._added[dtype] = numbers
        return self._added[dtype]

    def _computed(self) -> Tensor:
        """Who may attend to whom, as bools of the mask's own shape."""
        batch, heads, query_len, key_len = self.shape
        seen = self._seen if query_len == 1 else None
        if seen is not None and seen.hidden is None:
            allowed = torch.ones(1, 1, 1, key_len, dtype=torch.bool, device=self.device)
            if seen.keys is not None:
                allowed[..., : seen.keys.start] = False
                allowed[..., seen.keys.stop :] = False
            return allowed.expand(self.shape)
        bound = self.mask.bind(Grid(batch, heads, query_len, key_len, self.device))
        rows, columns = indices(range(query_len), self.device), indices(range(key_len), self.device)
        return bound.allowed(rows, columns).expand(self.shape)

    @cached_property
    def _cells(self) -> Tensor:
        """The same, made once for all layers that look at it; nobody may write to it."""
        return self._computed()

    def __getitem__(self, index: Any) -> Tensor:
        if self._kind != torch.bool:
            return super().__getitem__(index)
        return self._cells[index].as_subclass(Cells)  # in every layer of some models: not by way of torch

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
        of_bools = all(one._kind == torch.bool for one in _masks_in(args))
        if func is Tensor.__getitem__ and isinstance(args[0], LazyMask) and of_bools:
            return args[0][args[1]]
        if _chooses(func, args, LazyMask) and of_bools:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*(one._cells if isinstance(one, LazyMask) else one for one in args), **kwargs)
        logical = func in _LOGICAL and of_bools
        copied = func in (Tensor.contiguous, Tensor.clone, Tensor.__deepcopy__, Tensor.__reduce_ex__)
        if func in _OUTSIDE or logical or copied or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        # of a model that appends to it, or that computes attention itself
        if not of_bools and (func is torch.cat or func not in _LOGICAL) and not writes(func):
            args, kwargs = tree_map_only(LazyMask, LazyMask._scores, (args, kwargs))
            return func(*args, **kwargs)
        raise _works_on_its_mask(func)

    def _may_be_added(self, other: object) -> bool:
        """Whether it can be a bias: an ordinary tensor that does not enlarge batch, query_len or key_len."""
        if not isinstance(other, Tensor) or isinstance(other, Lazy) or not other.is_floating_point():
            return False
        rows, *lengths, _ = self._made_for
        fits = zip(other.shape[::-1], (*lengths[::-1], None, rows), strict=False)
        return other.dim() <= 4 and all(wanted is None or size in (1, wanted) or wanted == 1 for size, wanted in fits)

    def _with(self, bias: Tensor) -> "LazyMask":
        *shape, device = self._made_for
        made = LazyMask(self._rule, (shape[0], shape[1], shape[2]), device, bias, self._real)
        made._alone = self if self._alone is None else self._alone
        return made

    def _on(self, device: torch.device | None) -> "LazyMask":
        batch, query_len, key_len, own_device = self._made_for
        if device is None or device == own_device:
            return self
        moved = LazyMask(self.mask.to(device), (batch, query_len, key_len), device, dtype=self._kind)
        return moved if self.bias is None else moved._with(self.bias.to(device))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        added = "" if self.bias is None else f" + {self.bias.dtype} {list(self.bias.shape)}"
        return f"LazyMask({self.mask}{added}, {list(self.shape)})"


class Cells(Tensor):
    """A part of a mask as a tensor of bools, True = may attend.

    It may be arranged, combined and chosen by. In any other use it raises an error: a model that adds its mask to its
    scores takes it for 0 and -inf.
    """

    # what models ask in every layer, without torch's way to subclasses
    dtype = property(lambda self: torch.bool)

    def __invert__(self) -> Tensor:
        return ~self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arranged = func in _VIEWS and isinstance(args[0], Cells)  # not numbers that are chosen by cells
        if not (arranged or func in _LOGICAL or _chooses(func, args, Cells)):
            if func is Tensor.to and torch._C._nn._parse_to(*args[1:], **kwargs)[1] in (None, torch.bool):
                arranged = True
            elif func not in _OUTSIDE and (getattr(func, "__name__", "") != "__get__" or func in _INSIDE_PROPERTIES):
                raise _works_on_its_mask(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result.as_subclass(Cells) if arranged else result


def as_numbers(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bools as the numbers that eager adds to scores: 0 for who may attend, and otherwise the least one."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _masks_in(args: tuple[Any, ...]) -> list[LazyMask]:
    """The masks among a function's arguments, and in lists of these, as of `torch.cat`."""
    listed = [one for given in args if isinstance(given, (list, tuple)) for one in given]
    return [one for one in (*args, *listed) if isinstance(one, LazyMask)]


def _chooses(func: Any, args: tuple[Any, ...], kind: type) -> bool:
    """Whether tensors of that kind are only what a function chooses by."""
    return func in _WHERE and [place for place, one in enumerate(args) if isinstance(one, kind)] == [_WHERE[func]]


def _works_on_its_mask(func: Any) -> ValueError:
    """Of a model that takes its mask for 0 and -inf, in a way in which bools would give something else."""
    return ValueError(  # not a TypeError, whose message `+` would replace
        f"regard: the model works on its mask itself ({getattr(func, '__name__', func)}), which regard "
        'does not support; load it with attn_implementation="eager" '
        "(.dense() returns the mask as a tensor)"
    )

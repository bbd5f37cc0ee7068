"""transformers' mask functions inside a graph of torch.compile's, where what a function closes over cannot be seen.

There a mask function is called with symbols in place of batch index, head, query and key. Comparing positions or their
differences returns a `Rule`, which stands for a mask, and rules compose. A function that does anything else raises
`UnreadError`, and its mask is built as a tensor by torch's operators.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.huggingface.masks import SUMS, as_numbers
from regard.masks import EVERYTHING, Band, Mask
from regard.shapes import Grid, ShapeError

NOTHING = ~EVERYTHING


class UnreadError(Exception):
    """The mask function asks what a symbol cannot answer."""


class Rule:
    """The result of a mask function: a mask instead of bools."""

    device = None

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def to(self, *places: Any, **more: Any) -> "Rule":
        return self

    def __and__(self, other: object) -> "Rule":
        other = _rule(other)
        return other if self.mask is EVERYTHING else self if other.mask is EVERYTHING else Rule(self.mask & other.mask)

    def __or__(self, other: object) -> "Rule":
        other = _rule(other)
        return other if self.mask is NOTHING else Rule(self.mask | other.mask)

    def __invert__(self) -> "Rule":
        return Rule(~self.mask)


class Symbol:
    """An argument of a mask function, or a result of arithmetic with it; other operations raise `UnreadError`."""

    def _alone(self) -> Any:
        raise UnreadError

    def _beside(self, other: object, /) -> Any:
        raise UnreadError

    __abs__ = __neg__ = __invert__ = __bool__ = __int__ = __index__ = _alone
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = _beside
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __lt__ = __le__ = __gt__ = __ge__ = _beside


class Position(Symbol):
    """The position of a query or key, plus a number."""

    def __init__(self, of_key: bool, offset: int, plus: int = 0) -> None:
        self.of_key, self.offset, self.plus = of_key, offset, plus

    def __add__(self, number: object) -> "Position":
        return Position(self.of_key, self.offset, self.plus + _number(number))

    def __sub__(self, other: object) -> "Position | Ahead":
        if isinstance(other, Position):
            return _ahead(self, other)
        return Position(self.of_key, self.offset, self.plus - _number(other))

    def __le__(self, other: object) -> Rule:
        return self._less(other, 0)

    def __lt__(self, other: object) -> Rule:
        return self._less(other, 1)

    def __ge__(self, other: object) -> Rule:
        if isinstance(other, int) and not self.plus and other <= 0:
            return Rule(EVERYTHING)  # no position is below 0
        return _position(other)._less(self, 0)

    def __gt__(self, other: object) -> Rule:
        return _position(other)._less(self, 1)

    def _less(self, other: object, by: int) -> Rule:
        """self + by <= other."""
        other = _position(other)
        ahead = _ahead(self, other).plus  # key - query = key_position - query_position + ahead
        return Rule(Band(None, -ahead - by, self.offset) if self.of_key else Band(ahead - by, None, self.offset))

    def new_ones(self, *shape: Any, **more: Any) -> Rule:
        return Rule(EVERYTHING)

    def new_zeros(self, *shape: Any, **more: Any) -> Rule:
        return Rule(NOTHING)


class Ahead(Symbol):
    """The difference of the positions of a key and a query, plus a number."""

    def __init__(self, plus: int, offset: int) -> None:
        self.plus, self.offset = plus, offset

    def __abs__(self) -> "Apart":
        if self.plus:
            raise UnreadError
        return Apart(self.offset)


class Apart(Symbol):
    """The distance between a query and a key."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __le__(self, number: object) -> Rule:
        return Rule(Band(_number(number), _number(number), self.offset))

    def __lt__(self, number: object) -> Rule:
        return Rule(Band(_number(number) - 1, _number(number) - 1, self.offset))


class _NoTensors(TorchFunctionMode):
    """Raises `UnreadError` if a mask function uses tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise UnreadError


def rule_of(function: Callable[..., Any], offset: int) -> Mask | None:
    """The mask that a function represents; None if it depends on more than positions.

    Args:
        offset: position of query 0 where key 0 has position 0.
    """
    try:
        with _NoTensors():
            said = function(Symbol(), Symbol(), Position(False, offset), Position(True, offset))
        return _rule(said).mask
    except (UnreadError, TypeError, AttributeError):
        return None


def _ahead(one: Position, other: Position) -> Ahead:
    """The key less the query."""
    if one.of_key == other.of_key:
        raise UnreadError
    key, query = (one, other) if one.of_key else (other, one)
    return Ahead(key.plus - query.plus, one.offset)


def _rule(value: object) -> Rule:
    if not isinstance(value, Rule):
        raise UnreadError
    return value


def _position(value: object) -> Position:
    if not isinstance(value, Position):
        raise UnreadError
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise UnreadError
    return value


class GraphMask:
    """A mask of regard in a graph, in place of transformers' tensor [batch, 1, query_len, key_len]: of bools, or of
    numbers, 0 and the least one, for models that know no other.

    It is passed from layer to layer unchanged. Any other use gets the tensor, as part of the graph.

    Attributes:
        mask: the mask, with fixed offsets.
        dtype: of the tensor.
    """

    ndim = 4

    def __init__(
        self, mask: Mask, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype = torch.bool
    ) -> None:
        batch, query_len, key_len = shape
        self.mask, self.shape, self.device, self.dtype = mask, (batch, 1, query_len, key_len), device, dtype

    def of_call(self, batch: int, query_len: int, key_len: int, device: torch.device) -> Mask:
        """The mask for one layer's lengths, which must be those that it was made for."""
        if self.shape[2] != query_len or self.shape[3] != key_len or device != self.device:
            raise ShapeError(
                f"regard: the mask is for [query_len={self.shape[2]}, key_len={self.shape[3]}] on {self.device}, the "
                f"layer has [{query_len=}, {key_len=}] on {device}"
            )
        return self.mask

    def dense(self) -> Tensor:
        """All the bools or numbers, as an ordinary tensor."""
        allowed = self.allowed()
        return allowed if self.dtype == torch.bool else as_numbers(allowed, self.dtype)

    def allowed(self) -> Tensor:
        """Who may attend to whom, as bools."""
        rows, columns = (torch.arange(length, device=self.device) for length in self.shape[2:])
        return self.mask.bind(Grid(*self.shape, self.device)).allowed(rows, columns).expand(self.shape)

    def dim(self) -> int:
        return 4

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def contiguous(self) -> "GraphMask":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __and__(self, other: Any) -> Any:
        return self.dense() & other

    def __or__(self, other: Any) -> Any:
        return self.dense() | other

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SUMS and len(args) == 2 and not kwargs:  # numbers that are added are for the scores
            mask, added = args if isinstance(args[0], GraphMask) else args[::-1]
            if isinstance(added, Tensor) and added.is_floating_point():
                return torch.where(mask.allowed(), added, -math.inf)
        named = {name: _plain(x) for name, x in (kwargs or {}).items()}
        return func(*map(_plain, args), **named)


def _plain(value: Any) -> Any:
    """An argument of a function of torch with tensors in place of masks, in lists, too."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value.dense() if isinstance(value, GraphMask) else value

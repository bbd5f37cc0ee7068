"""What a mask hides in a rectangle of scores, in the forms that kernels need: computed once, used in every call.

NaN and inf in a fully masked key or value must not reach any result. Two ways to see to that cost little:

    inspect the result   the score of a hidden key is -inf or NaN, whatever the key holds, and its value is multiplied
                         by 0, which gives 0 or NaN: if the result is not NaN, it did not contribute (`has_nan`)
    inspect the keys     a weight of exactly 0 cancels any moderate number, so hidden keys are zeroed only if one holds
                         something larger (`Hidden.seen`): for gradients, which offer nothing to inspect

What is hidden depends on mask and bias alone. It is cached by their structure, and shared by all layers of a step.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from torch import Tensor

from regard.graphs import concrete, has_numbers, tracing, whole
from regard.kernels.known import Kept, cached_by_mask
from regard.masks import EVERYTHING, Mask, Tile
from regard.masks.algebra import coverage_of
from regard.numerics import wide, zero_empty_queries, zero_unseen
from regard.rules import contents, settled
from regard.scores import Scoring
from regard.shapes import Grid

Value = TypeVar("Value")

HARMLESS = 2.0**32
"""Smaller numbers in a hidden key or value are harmless: a weight of exactly 0 cancels them."""

MAX_KEPT_SCORES = 1 << 20
"""Most cells of a mask that is cached: up to 9 MiB each."""

MAX_TABLE_NUMBERS = 1 << 21
"""Most numbers of a table that is cached: 8 heads of 512 tokens, 8 MiB in float32."""

_ENDS = {
    dtype: (torch.tensor(0.0, dtype=dtype, device="cpu"), torch.tensor(-math.inf, dtype=dtype, device="cpu"))
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""0 and -inf: from tensors, `where` is faster than from numbers. Made here, since what is made in a transform of
torch.func must not be kept."""

MIN_BITWISE = 1 << 13
"""Fewest cells of a mask that are turned into numbers bit by bit: `where` goes by every cell in turn, which takes up to
15 times as long for one that alternates. Row "random mask" of features.py."""

_BITS = {
    torch.float64: (torch.int64, -1 << 52),
    torch.float32: (torch.int32, -1 << 23),
    torch.float16: (torch.int16, -1 << 10),
    torch.bfloat16: (torch.int16, -1 << 7),
}
"""An integer dtype of the same size, in which -inf is this number."""

MAX_ALL_NUMBERS = 1 << 23
"""Most numbers of all tables that are cached."""


class Hidden:
    """What is hidden in a rectangle of scores.

    Args:
        allowed: bool, broadcastable to the scores.
        hides: whether anything is hidden, if that is known. all_see: whether it is known that every query sees a key.
    """

    def __init__(self, allowed: Tensor, hides: bool | None = None, all_see: bool = False) -> None:
        self.allowed = allowed
        self._ask = allowed.is_cpu and has_numbers(allowed)
        self._hides = hides
        self._seeing: dict[int, Tensor | None] = {-1: None} if all_see else {}
        self._numbers: dict[torch.dtype, Tensor] = {}
        self._kept: dict[str, object] = {}
        self._folded: dict[tuple[torch.dtype, int, int, int, int], Tensor] = {}

    @property
    def queries(self) -> Tensor | None:
        """Which queries see any key; None if all do and this is known without a device sync."""
        return self._some(-1)

    @property
    def keys(self) -> Tensor | None:
        """Which keys are seen by any query; None as above."""
        return self._some(-2)

    def _some(self, axis: int) -> Tensor | None:
        if axis not in self._seeing:  # not a cached_property: torch.compile cannot trace its lock
            if self._ask and self.allowed.shape[axis] == 1:  # then what is hidden from one is hidden from all
                self._seeing[axis] = self.allowed.squeeze(axis) if self.hides else None
            else:
                # any() of bools takes 20 times as long
                some = self.allowed.view(torch.uint8).amax(axis).bool() if self._ask else self.allowed.any(axis)
                self._seeing[axis] = None if self._ask and bool(some.all()) else some
        return self._seeing[axis]

    @property
    def hides(self) -> bool:
        """Whether anything is hidden; True if this is not known without a device sync."""
        if self._hides is None:
            self._hides = not self._ask or coverage_of(self.allowed) is not Tile.FULL
        return self._hides

    @cached_property
    def unseen(self) -> slice | Tensor:
        """The indices of all keys that are hidden from every query of some batch index or head."""
        assert self.keys is not None
        places = (~self.keys).flatten(0, -2).any(0).nonzero().flatten()
        first, last = int(places[0]), int(places[-1])
        return slice(first, last + 1) if last - first < 2 * len(places) else places

    def seeing(self, query: Tensor) -> Tensor:
        """The queries, with fully masked ones zeroed, so that NaN in them has no effect."""
        return query if self.queries is None else zero_empty_queries(query, self.allowed)

    def seen(self, key: Tensor) -> Tensor:
        """Keys or values with fully masked ones zeroed; the input itself, not a copy, if they are harmless."""
        if self.keys is None:
            return key
        if self._ask and harmless(key[:, :, self.unseen]):
            return key
        return zero_unseen(key, self.allowed)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The mask as torch's operators take it: 0 where allowed, -inf elsewhere."""
        if dtype not in self._numbers:
            with torch.inference_mode(False):
                if self._ask and self.allowed.numel() >= MIN_BITWISE:  # 1 - 1 = 0, and all bits of 0 - 1 are set
                    integer, infinity = _BITS[dtype]
                    less = self.allowed.view(torch.int8).to(integer).sub_(1)
                    self._numbers[dtype] = less.bitwise_and_(infinity).view(dtype)
                elif self._ask:
                    self._numbers[dtype] = torch.where(self.allowed, *_ENDS[dtype])
                elif tracing():  # which is fused with the scores
                    self._numbers[dtype] = torch.zeros_like(self.allowed, dtype=dtype).masked_fill(
                        ~self.allowed, -math.inf
                    )
                else:  # 1 - 1/1 = 0 and 1 - 1/0 = -inf: faster than masked_fill
                    self._numbers[dtype] = self.allowed.to(dtype).reciprocal_().neg_().add_(1.0)
        return self._numbers[dtype]

    def kept(self, name: str, make: Callable[[Tensor], Value]) -> Value:
        """What follows from the cells that are allowed, made once."""
        if name not in self._kept:
            self._kept[name] = make(self.allowed)
        return cast(Value, self._kept[name])

    def where_seeing(self, dtype: torch.dtype) -> Tensor:
        """The same numbers, but 0 in fully masked rows, whose softmax would be NaN."""
        numbers = self.numbers(dtype)
        return numbers if self.queries is None else numbers.masked_fill(~self.queries[..., None], 0.0)

    def folded(self, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, query_len: int) -> Tensor:
        """These numbers in the layout of `fold`."""
        key = dtype, batch, heads, kv_heads, query_len
        if key not in self._folded:
            numbers = self.where_seeing(dtype)
            with torch.inference_mode(False):
                self._folded[key] = fold(numbers, batch, heads, kv_heads, query_len)
        return self._folded[key]


def numbers_added(hidden: Hidden | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What mask and bias add to scores, -inf where hidden, in a dtype in which nothing of the bias is rounded."""
    if bias is None:
        return None if hidden is None else hidden.numbers(dtype)
    numbers = bias if bias.dtype == dtype else bias.to(wide(dtype))
    return numbers if hidden is None else numbers + hidden.numbers(numbers.dtype)


class Table(Hidden):
    """What bias and mask add to all scores of a call, and what they hide.

    Args:
        added: the sum, -inf where hidden.
    """

    def __init__(self, allowed: Tensor, added: Tensor) -> None:
        super().__init__(allowed)
        self.added = added

    @property
    def size(self) -> int:
        return self.added.numel()

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The sum itself: it is made in the dtype in which kernels ask for it."""
        return self.added.to(dtype)


def has_nan(output: Tensor, lse: Tensor | None = None) -> bool:
    """Whether there is NaN in a result, or inf of both signs: then something hidden may have contributed."""
    if math.isnan(output.sum().item()):
        return True
    return lse is not None and math.isnan(lse.clamp(min=0.0).sum().item())  # -inf belongs to a fully masked query


def harmless(*tensors: Tensor) -> bool:
    """Whether a weight of 0 cancels every number in these tensors; False if finding out needs a device sync."""
    for tensor in tensors:
        if not concrete(tensor.device):
            return False
        if tensor.numel():
            tensor = tensor.detach()
            if tensor.dim() == 4 and tensor.stride(1) < tensor.stride(2):  # in the order of memory, without a copy
                tensor = tensor.transpose(1, 2)
            low, high = tensor.aminmax()
            if not (low.item() > -HARMLESS and high.item() < HARMLESS):  # false for NaN
                return False
    return True


def fold(numbers: Tensor, batch: int, heads: int, kv_heads: int, query_len: int) -> Tensor:
    """Numbers for the scores of a call in which query heads that share a kv head are stacked along the queries.

    Shapes: [1 or batch, 1 or heads, 1 or query_len, columns] -> [1 or kv_heads or batch * kv_heads, 1 or
    heads // kv_heads * query_len, columns].
    """
    rows, columns = numbers.shape[2:]
    if numbers.shape[1] == 1 and (rows == 1 or heads == kv_heads):
        if numbers.shape[0] == 1:
            return numbers[0]
        return numbers.expand(batch, kv_heads, rows, columns).reshape(batch * kv_heads, rows, columns)
    numbers = numbers.expand(-1, heads, query_len, columns)
    return numbers.reshape(len(numbers) * kv_heads, heads // kv_heads * query_len, columns)


def hidden_in(mask: Mask | None, grid: Grid) -> Hidden | None:
    """What a bound mask hides in a whole call; None for nothing. Cached if the mask has a structure to compare."""
    if mask is None or mask is EVERYTHING:
        return None
    if not tracing() and grid.batch * grid.query_len * grid.key_len > MAX_KEPT_SCORES:
        return _looked_at(mask, grid)
    return _remembered(mask, grid)


def hidden_in_call(scoring: Scoring, biases: Tensor | None) -> Hidden | None:
    """What mask and bias hide in a whole call.

    Args:
        biases: what the bias adds to its scores; None if there is no bias.
    """
    if biases is None or _hides_nothing(biases):
        return hidden_in(scoring.mask, scoring.grid)
    queries, keys = (whole(length, scoring.grid.device) for length in scoring.grid[2:4])
    allowed = scoring.allowed(queries, keys, biases)
    return None if allowed is None else Hidden(allowed)


def _hides_nothing(biases: Tensor) -> bool:
    """Whether it is known that none of them is -inf; False if finding out needs a device sync."""
    if not concrete(biases.device):
        return False
    return biases.numel() > 0 and biases.detach().amin().item() > -math.inf  # false for NaN


_tables: Kept[Table] = Kept(MAX_ALL_NUMBERS)


def table_key(scoring: Scoring, dtype: torch.dtype) -> Hashable | None:
    """What is equal for two calls only if their tables are. None if there is no bias, if bias or mask may change
    unnoticed, if the table would be large or on a GPU, and in graphs and transforms of torch."""
    bias, mask, grid = scoring.bias, scoring.mask_or_everything, scoring.grid
    if bias is None or not 0 < grid.query_len * grid.key_len <= MAX_TABLE_NUMBERS:
        return None
    if not concrete(grid.device):
        return None
    of_bias, of_mask = contents(bias), mask.structure()
    if of_bias is None or of_mask is None:
        return None
    known = of_bias, of_mask, grid, dtype
    is_small = grid.batch * grid.heads * grid.query_len * grid.key_len <= MAX_TABLE_NUMBERS or _tables.has(known)
    return known if is_small or _table_numbers(scoring) <= MAX_TABLE_NUMBERS else None


def known_table(scoring: Scoring, dtype: torch.dtype) -> Callable[[], Table] | None:
    """The table of a call with a bias, cached for as long as neither bias nor mask changes; None as in `table_key`.

    Returns:
        A function that looks the table up, and makes it first if need be.
    """
    known = table_key(scoring, dtype)

    def make() -> Table:
        with torch.inference_mode(False), torch.no_grad():  # autograd cannot save inference tensors
            return _made(replace(scoring, bias=settled(scoring.bias), mask=settled(scoring.mask)), dtype)

    return None if known is None else _tables.getter(known, make)


def known_numbers(scoring: Scoring, dtype: torch.dtype) -> Callable[[], tuple[Hidden | None, Tensor | None]] | None:
    """A function that looks up what is hidden in all scores of a call, and what mask and bias add to them; None where
    that may change unnoticed, or is not kept."""
    if scoring.bias is None:
        hidden = hidden_in(scoring.mask, scoring.grid)
        added = None if hidden is None else hidden.numbers(dtype)
        return lambda: (hidden, added)
    look_up = known_table(scoring, dtype)
    if look_up is None:
        return None

    def look_up_numbers() -> tuple[Hidden, Tensor]:
        table = look_up()
        return table, table.added

    return look_up_numbers


def _made(scoring: Scoring, dtype: torch.dtype) -> Table:
    queries, keys = map(range, scoring.grid[2:4])
    biases = scoring.biases(queries, keys, dtype).detach()  # with what may learn, torch leaves its fused operator
    allowed = scoring.allowed(queries, keys, biases)
    if allowed is None:
        # torch copies one that lies otherwise in every call
        return Table(torch.ones(1, 1, 1, 1, dtype=torch.bool, device=biases.device), biases.contiguous())
    return Table(allowed, torch.where(allowed, biases, -math.inf))


def _table_numbers(scoring: Scoring) -> int:
    """How many numbers a table holds: what its first number is for batch and heads, all are."""
    first, grid = range(1), scoring.grid
    parts = scoring.biases(first, first, torch.float32), scoring.allowed(first, first)
    batch, heads = (max(part.shape[axis] for part in parts if part is not None) for axis in (0, 1))
    return batch * heads * grid.query_len * grid.key_len


@cached_by_mask(maxsize=8)
def _remembered(mask: Mask, grid: Grid) -> Hidden | None:
    return _looked_at(mask, grid)


def _looked_at(mask: Mask, grid: Grid) -> Hidden | None:
    lengths, device = (grid.query_len, grid.key_len), grid.device
    if device.type == "cpu" and not tracing():
        rows, columns = (range(length) for length in lengths)  # of which masks with data take views
    else:
        rows, columns = (torch.arange(length, device=device) for length in lengths)  # type: ignore[assignment]
    hidden = Hidden(mask.allowed(rows, columns))
    return hidden if hidden.hides else None

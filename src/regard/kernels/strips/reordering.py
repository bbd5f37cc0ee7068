"""Sorts queries and keys by document, for documents whose tokens are not contiguous.

The order of the documents does not matter as long as the tokens of each keep theirs. After sorting, every document is
one rectangle. Under a mask that shows each query keys side by side, as a window, so are those of its document. Little
else is computed. Tokens with the same residue, as under a stride, are sorted as documents are, and so are keys that
nobody sees, if many of them lie between others: they are a document without queries. Other padding is sorted with the
keys; any other mask, a bias and dropout are asked for the places where the tokens were.

The compiled library is told the order, and reads and writes tokens where they are. For torch's operators, they are
copied.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.diagonals import scattered_tile
from regard.dropout import Cells
from regard.graphs import tracing
from regard.indexing import Indices, indices, lookup
from regard.kernels.call import Call, learns
from regard.kernels.known import cached_by_mask
from regard.kernels.strips import tuning
from regard.kernels.strips.intervals import Between, Interval, side_by_side
from regard.masks import Dense, Document, Mask, Padding, Strided
from regard.masks.planning import factors, is_top_left_causal, product_of
from regard.scores import Scoring
from regard.shapes import Grid


class Reordering(NamedTuple):
    """The order in which the tokens of a call are sorted.

    Attributes:
        queries, keys: index of the token at each sorted place, [batch or 1, length]. back: the inverse for queries.
        mask: the mask of the sorted tokens, bound.
        left_out: keys that strips leave out for each query on average, beyond those that they leave out anyway.
    """

    queries: Tensor
    keys: Tensor
    back: Tensor
    mask: Mask
    left_out: float = math.inf

    def planned(self, call: Call) -> Call:
        """A call as it is for the sorted tokens, but for these themselves."""
        dropout = None if call.dropout is None else call.dropout.seen_from(self.unsorted)
        return call._replace(scoring=self.of(call.scoring), dropout=dropout)

    def of(self, scoring: Scoring) -> Scoring:
        """A scoring as it is for the sorted tokens."""
        bias = scoring.bias
        if bias is not None:
            bias = SortedBias(bias, self.queries, self.keys, scoring.grid)
        return replace(scoring, mask=self.mask, bias=bias)

    def unsorted(self, cells: Cells) -> Cells:
        """Where cells between sorted tokens were."""
        (batch,) = cells.batches  # strips ask for one at a time
        orders = (self.queries, cells.queries), (self.keys, cells.keys)
        queries, keys = (order[batch if len(order) > 1 else 0, indices(which)] for order, which in orders)
        return cells._replace(queries=queries, keys=keys)


def reordering(call: Call, *, copies: bool = False) -> Reordering | None:
    """How to sort the tokens of a call; None if documents are contiguous and few keys hidden between others, if there
    is little to compute, or if the order matters.

    Args:
        copies: whether tokens are copied for it: then only if enough is left out, and not if a bias learns a number for
            every score, since each document would get a gradient as large as all of them.
    """
    mask, grid = call.scoring.mask, call.scoring.grid
    if mask is None:
        return None
    if not copies and math.prod(grid[:4]) <= tuning.SCORES_WORTH_SORTING_DOCUMENTS:
        return None
    has_gaps = _has_many_gaps(mask, grid)
    if not has_gaps and all(part.closed_form for part in factors(mask) if isinstance(part, Document)):
        return None
    found = _found(mask, grid, has_gaps)
    if found is None or not copies:
        return found
    learned = () if call.scoring.bias is None else call.scoring.bias.learned()
    large = any(learns(tensor) and tensor.numel() >= grid.query_len * grid.key_len for tensor in learned)
    return None if large or found.left_out < tuning.KEYS_WORTH_SORTING else found


class Sorted(NamedTuple):
    """Tokens in the order of their documents.

    Attributes:
        places: where the token at each place was. ids: its document. Both [batch or 1, length].
    """

    places: Tensor
    ids: Tensor


def _sort(ids: Tensor) -> Sorted:
    places = ids.argsort(dim=1, stable=True)
    return Sorted(places, ids.gather(1, places).to(torch.int64))


@cached_by_mask(maxsize=8)
def _found(mask: Mask, grid: Grid, has_gaps: bool) -> Reordering | None:
    parts = [*factors(mask)]
    documents = [part for part in parts if isinstance(part, Document)]
    on_a_cpu = grid.device.type == "cpu"  # elsewhere every look at a number waits for the device
    if not (on_a_cpu or len(documents) == 1):
        return None
    padding = _paddings(mask) if has_gaps else [part for part in parts if type(part) is Padding]
    strided = [part for part in parts if on_a_cpu and type(part) is Strided and isinstance(part.offset, int)]
    others = [part for part in parts if part not in (*documents, *padding, *strided)]
    query_ids, key_ids = _in_common(documents, strided, grid)
    if has_gaps:
        real = reduce(and_, (_real_keys(part, grid.key_len) for part in padding))
        key_ids, padding = torch.where(real, key_ids, query_ids.amin() - 1), []
    queries = keys = _sort(query_ids)
    left_out = math.inf
    if key_ids is not query_ids:
        keys = _sort(key_ids)
    by_documents = not others and not has_gaps
    if by_documents or (keys is queries and all(is_top_left_causal(part) for part in others)):
        rest = product_of([*others, Document(queries.ids, None if keys is queries else keys.ids)])
    elif not on_a_cpu:
        return None
    elif (inside := side_by_side(product_of(others), grid)) is None:
        together = Document(queries.ids) if keys is queries else _same_documents(queries, keys)
        rest = together & SortedMask(product_of(others), queries.places, keys.places)
        left_out = 0.0  # not known: strips of the other mask alone may leave out as much
    else:
        rest = _between(inside, queries, keys)
        left_out = float((inside.end - inside.first).double().mean() - (rest.end - rest.first).double().mean())
    in_order = (_seen(part, keys.places) for part in padding)
    back = queries.places.argsort(dim=1)
    return Reordering(queries.places, keys.places, back, product_of([rest, *in_order]).bind(grid), left_out)


def share_of_documents(documents: Document) -> float:
    """How many of all keys are of a query's own document; the mean of all queries."""
    within = _same_documents(_sort(documents.query_ids), _sort(documents.key_ids))
    return float((within.end - within.first).double().mean()) / documents.key_ids.shape[1]


def _in_common(documents: Sequence[Document], strided: Sequence[Strided], grid: Grid) -> tuple[Tensor, Tensor]:
    """A number of each query and of each key, [batch or 1, length], equal for those that all masks allow; one tensor
    where queries and keys are known to have the same."""
    ways = [(part.query_ids, part.key_ids) for part in documents]
    for part in strided:
        first = int(part.offset or 0)
        queries, keys = (
            torch.arange(first, first + grid.query_len, device="cpu"),
            torch.arange(grid.key_len, device="cpu"),
        )
        ways.append((queries[None] % part.step, keys[None] % part.step))
    if not ways:
        of_all = torch.zeros(1, max(grid.query_len, grid.key_len), dtype=torch.int64, device="cpu")
        return of_all[:, : grid.query_len], of_all[:, : grid.key_len]
    if len(ways) == 1:
        return ways[0]
    batch, numbers = max(len(ids) for way in ways for ids in way), torch.zeros((), dtype=torch.int64, device="cpu")
    for way in ways:
        ids = torch.cat([of.expand(batch, -1) for of in way], dim=1)
        pairs = torch.stack([numbers.expand_as(ids), ids.to(torch.int64)], dim=-1)
        numbers = torch.unique(pairs.flatten(0, 1), dim=0, return_inverse=True)[1].view_as(ids)
    queries, keys = numbers.split([grid.query_len, grid.key_len], dim=1)
    return (queries, queries) if torch.equal(queries, keys) else (queries, keys)


def _paddings(mask: Mask) -> list[Padding | Dense]:
    """The factors of a bound mask that hide the same keys from all queries and heads."""
    return [
        part
        for part in factors(mask)
        if type(part) is Padding
        or (type(part) is Dense and part.mask.shape[1] == part.mask.shape[2] == 1 < part.mask.shape[3])
    ]


def _real_keys(padding: Padding | Dense, key_len: int) -> Tensor:
    """The keys that it shows, bool [batch or 1, key_len]."""
    if isinstance(padding, Dense):
        return padding.mask[:, 0, 0]
    keys = padding.keys
    return keys if keys.dtype == torch.bool else torch.arange(key_len, device=keys.device) < keys[:, None]


def _has_many_gaps(mask: Mask, grid: Grid) -> bool:
    """Whether so many keys are hidden from all queries, between others, that to sort them takes less time than to
    compute their scores."""
    scores = math.prod(grid[:4])
    if grid.device.type != "cpu" or tracing() or scores < tuning.SCORES_WORTH_SORTING:
        return False
    if all(isinstance(part, Padding) and part.keys.dtype != torch.bool for part in _paddings(mask)):
        return False
    share = _share_of_gaps(mask, grid)
    return share >= tuning.GAPS_WORTH_SORTING and share * scores >= tuning.SCORES_WORTH_SORTING


@cached_by_mask(maxsize=8)
def _share_of_gaps(mask: Mask, grid: Grid) -> float:
    """How many of all keys are hidden from all queries, between others; the mean of the texts."""
    so_far = reduce(and_, (_real_keys(part, grid.key_len) for part in _paddings(mask))).cumsum(1)
    real = so_far[:, -1:]
    between = ((so_far > 0) & (so_far < real)).sum(1) - (real[:, 0] - 1).clamp(min=0)
    return float(between.double().mean()) / grid.key_len


def _between(inside: Interval, queries: Sorted, keys: Sorted) -> Between:
    """Which sorted keys each sorted query sees of those in an interval. They are side by side: the tokens of a document
    are in the order in which they were."""
    batch, key_len = max(map(len, (inside.first, queries.ids, keys.ids))), keys.ids.shape[1]
    places, key_places, key_ids = (
        of.expand(batch, -1).contiguous() for of in (queries.places, keys.places, keys.ids)
    )  # fmt: skip
    documents = _same_documents(queries, keys)
    begin, stop = (side.expand(batch, -1).to(torch.int64) for side in (documents.first, documents.end))
    in_order = torch.searchsorted(key_ids, key_ids) * (key_len + 1) + key_places
    first, end = (
        side.expand(batch, places.shape[1]).gather(1, places) + begin * (key_len + 1)
        for side in (inside.first, inside.end)
    )
    first, end = (torch.searchsorted(in_order, side).minimum(stop).to(torch.int32) for side in (first, end))
    return Between(first, end)


def _same_documents(queries: Sorted, keys: Sorted) -> Between:
    """Which sorted keys are of the document of each sorted query."""
    batch = max(len(queries.ids), len(keys.ids))
    ids, key_ids = (side.expand(batch, -1).contiguous() for side in (queries.ids, keys.ids))
    first, end = (torch.searchsorted(key_ids, ids, right=right).to(torch.int32) for right in (False, True))
    return Between(first, end)


def _seen(padding: Padding | Dense, keys: Tensor) -> Padding:
    """Which sorted keys are not padding."""
    seen, keys = torch.broadcast_tensors(_real_keys(padding, keys.shape[1]), keys)
    return Padding(seen.gather(1, keys))


def take(tensor: Tensor, places: Tensor) -> Tensor:
    """The tokens at these indices, in this order.

    Shapes: tensor [batch, heads, length, ...], places [batch or 1, length].
    """
    if len(places) == 1:
        return tensor.index_select(2, places[0])
    # whole rows are copied: take_along_dim takes sixteen times as long, number by number
    return torch.stack([of_one.index_select(1, order) for of_one, order in zip(tensor, places, strict=True)])


class SortedMask(Mask):
    """A mask of tokens that are sorted by document.

    Args:
        queries, keys: as in `Reordering`.
    """

    axes: ClassVar = {"queries": ("batch", "query_len"), "keys": ("batch", "key_len")}

    def __init__(self, mask: Mask, queries: Tensor, keys: Tensor) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys

    def breaks(self, query_len: int) -> set[int]:
        return set()  # those of the documents matter

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.rule(batch, head, lookup(self.queries, batch, query), lookup(self.keys, batch, key))


class SortedBias(Bias):
    """What a bound bias adds to sorted tokens.

    Args:
        queries, keys: as in `Reordering`. grid: the call.
    """

    def __init__(self, bias: Bias, queries: Tensor, keys: Tensor, grid: Grid) -> None:
        self.bias, self.queries, self.keys, self.grid = bias, queries, keys, grid

    def bind(self, grid: Grid) -> Bias:
        return self  # of a bias that is bound already

    def terms(self) -> Iterator[Bias]:
        return (SortedBias(term, self.queries, self.keys, self.grid) for term in self.bias.terms())

    def for_batch(self, index: int) -> Bias:
        grid = self.grid._replace(batch=1)
        queries, keys = (
            places[index : index + 1] if len(places) > 1 else places for places in (self.queries, self.keys)
        )
        return SortedBias(self.bias.for_batch(index).bind(grid), queries, keys, grid)

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        if len(self.queries) > 1 or len(self.keys) > 1:  # every batch index has an order of its own
            return torch.cat([self.for_batch(index).values(queries, keys) for index in range(self.grid.batch)])
        rows, columns = self.queries[0, indices(queries)], self.keys[0, indices(keys)]
        if not self.bias.of_distance:
            return self.bias.values(rows, columns)
        last = self.grid.query_len - 1
        row = self.bias.values(range(last, last + 1), range(last + self.grid.key_len))[:, :, 0]
        return scattered_tile(row, columns - rows[:, None] + last) if row.shape[2] > 1 else row[..., None]

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.rule(batch, head, lookup(self.queries, batch, query), lookup(self.keys, batch, key))

    def __repr__(self) -> str:
        return repr(self.bias)

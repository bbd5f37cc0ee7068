"""Sorts queries and keys by document, for documents whose tokens are not contiguous.

Under a document mask, alone or with a causal one, the order of the documents does not matter as long as the tokens of
each keep theirs. After sorting, every document is one rectangle, and nothing else is computed. What is padding is
sorted with the keys; a bias and dropout are asked for the places where the tokens were.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.diagonals import scattered_tile
from regard.dropout import Cells
from regard.indexing import Indices, indices, lookup
from regard.kernels.call import Call, learns
from regard.kernels.known import cached_by_mask
from regard.masks import Document, Mask, Padding
from regard.masks.planning import factors, is_top_left_causal, product_of
from regard.shapes import Grid


class Reordering(NamedTuple):
    """The order in which the tokens of a call are sorted.

    Attributes:
        queries, keys: index of the token at each sorted place, [batch or 1, length]. back: the inverse for queries.
        mask: the mask of the sorted tokens, bound.
    """

    queries: Tensor
    keys: Tensor
    back: Tensor
    mask: Mask

    def planned(self, call: Call) -> Call:
        """A call as it is for the sorted tokens, but for these themselves."""
        grid, (bias, dropout) = call.scoring.grid, (call.scoring.bias, call.dropout)
        if bias is not None:
            bias = SortedBias(bias, self.queries, self.keys, grid)
        if dropout is not None:
            dropout = dropout.seen_from(self.unsorted)
        return call._replace(scoring=replace(call.scoring, mask=self.mask, bias=bias), dropout=dropout)

    def unsorted(self, cells: Cells) -> Cells:
        """Where cells between sorted tokens were."""
        (batch,) = cells.batches  # strips ask for one at a time
        orders = (self.queries, cells.queries), (self.keys, cells.keys)
        queries, keys = (order[batch if len(order) > 1 else 0, indices(which)] for order, which in orders)
        return cells._replace(queries=queries, keys=keys)


def reordering(call: Call) -> Reordering | None:
    """How to sort the tokens of a call; None if documents are contiguous, or the order matters."""
    mask, grid = call.scoring.mask, call.scoring.grid
    if mask is None or not any(isinstance(part, Document) for part in factors(mask)):
        return None
    learned = () if call.scoring.bias is None else call.scoring.bias.learned()
    if any(learns(tensor) and tensor.numel() >= grid.query_len * grid.key_len for tensor in learned):
        return None  # every document would get a gradient as large as the tensor
    return _found(mask, grid)


@cached_by_mask(maxsize=8)
def _found(mask: Mask, grid: Grid) -> Reordering | None:
    documents = [part for part in factors(mask) if isinstance(part, Document)]
    padding = [part for part in factors(mask) if type(part) is Padding]
    others = [part for part in factors(mask) if part not in (*documents, *padding)]
    if len(documents) != 1 or documents[0].closed_form:
        return None
    (document,) = documents
    same_tokens = document.key_ids is document.query_ids
    if others and not (same_tokens and all(is_top_left_causal(part) for part in others)):
        return None
    queries = document.query_ids.argsort(dim=1, stable=True)
    query_ids = document.query_ids.gather(1, queries)
    if same_tokens:
        keys, sorted_documents = queries, Document(query_ids)
    else:
        keys = document.key_ids.argsort(dim=1, stable=True)
        sorted_documents = Document(query_ids, document.key_ids.gather(1, keys))
    in_order = (_sorted(part, keys, grid.key_len) for part in padding)
    together = product_of([*others, *in_order, sorted_documents]).bind(grid)
    return Reordering(queries, keys, queries.argsort(dim=1), together)


def _sorted(padding: Padding, keys: Tensor, key_len: int) -> Padding:
    """Which sorted keys are not padding."""
    seen = padding.keys
    if seen.dtype != torch.bool:
        seen = torch.arange(key_len, device=keys.device) < seen[:, None]
    seen, keys = torch.broadcast_tensors(seen, keys)
    return Padding(seen.gather(1, keys))


def take(tensor: Tensor, places: Tensor) -> Tensor:
    """The tokens at these indices, in this order.

    Shapes: tensor [batch, heads, length, ...], places [batch or 1, length].
    """
    if len(places) == 1:
        return tensor.index_select(2, places[0])
    # whole rows are copied: take_along_dim takes sixteen times as long, number by number
    return torch.stack([of_one.index_select(1, order) for of_one, order in zip(tensor, places, strict=True)])


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

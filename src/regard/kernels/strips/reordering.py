"""Documents whose tokens lie apart, brought together: queries and keys are sorted by document before they are cut.

Under a mask of documents alone, or with a causal one, it is all the same in which order documents stand, as long as the
tokens of each keep theirs. Sorted, every document is one rectangle, and nothing else is computed.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.masks import Document, Mask
from regard.masks.planning import MaskKey, factors, is_top_left_causal, product_of
from regard.shapes import Grid


class Reordering(NamedTuple):
    """A call whose tokens have changed places.

    Attributes:
        queries, keys: which token stands where, [batch or 1, length]. back: where each query went.
        mask: that of the new places, bound.
    """

    queries: Tensor
    keys: Tensor
    back: Tensor
    mask: Mask


def reordering(call: Call) -> Reordering | None:
    """How the tokens of a call are brought together; None where they lie together, or must stay where they are."""
    scoring = call.scoring
    if scoring.mask is None or scoring.bias is not None or call.dropout is not None:
        return None  # these depend on the place
    if not any(isinstance(part, Document) for part in factors(scoring.mask)):
        return None
    known = MaskKey(scoring.mask)
    if known.structure is None or torch._C._are_functorch_transforms_active():
        return _found(scoring.mask, scoring.grid)
    return _remembered(known, scoring.grid)


@lru_cache(maxsize=8)
def _remembered(known: MaskKey, grid: Grid) -> Reordering | None:
    with torch.inference_mode(False):  # whose tensors training could not use
        return _found(known.mask, grid)


def _found(mask: Mask, grid: Grid) -> Reordering | None:
    documents = [part for part in factors(mask) if isinstance(part, Document)]
    others = [part for part in factors(mask) if not isinstance(part, Document)]
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
    together = product_of([*others, sorted_documents]).bind(grid)
    return Reordering(queries, keys, queries.argsort(dim=1), together)


def take(tensor: Tensor, places: Tensor) -> Tensor:
    """The tokens at these places, in this order.

    Shapes: tensor [batch, heads, length, ...], places [batch or 1, length].
    """
    if len(places) == 1:
        return tensor.index_select(2, places[0])
    places = places.view(len(places), 1, -1, *[1] * (tensor.dim() - 3))
    return tensor.take_along_dim(places, dim=2)

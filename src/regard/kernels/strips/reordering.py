"""Sorts queries and keys by document, for documents whose tokens are not contiguous.

Under a document mask, alone or with a causal one, the order of the documents does not matter as long as the tokens of
each keep theirs. After sorting, every document is one rectangle, and nothing else is computed.
"""

from typing import NamedTuple

from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.known import cached_by_mask
from regard.masks import Document, Mask
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


def reordering(call: Call) -> Reordering | None:
    """How to sort the tokens of a call; None if documents are contiguous, or the order matters."""
    scoring = call.scoring
    if scoring.mask is None or scoring.bias is not None or call.dropout is not None:
        return None  # these depend on the order
    if not any(isinstance(part, Document) for part in factors(scoring.mask)):
        return None
    return _found(scoring.mask, scoring.grid)


@cached_by_mask(maxsize=8)
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
    """The tokens at these indices, in this order.

    Shapes: tensor [batch, heads, length, ...], places [batch or 1, length].
    """
    if len(places) == 1:
        return tensor.index_select(2, places[0])
    places = places.view(len(places), 1, -1, *[1] * (tensor.dim() - 3))
    return tensor.take_along_dim(places, dim=2)

"""Attention in plain PyTorch: the specification.

Every other kernel must agree with this one. It holds query_len x key_len numbers, which no other file may.
"""

from typing import NamedTuple

from torch import Tensor

from regard.dropout import Dropout
from regard.graphs import whole
from regard.numerics import grouped_matmul, softmax, upcast, zero_empty_queries, zero_unseen
from regard.scores import Scoring


class AttentionOutput(NamedTuple):
    """What attention returns: output [batch, heads, query_len, value_dim] and lse [batch, heads, query_len]."""

    output: Tensor
    lse: Tensor


def reference(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, dropout: Dropout | None = None
) -> AttentionOutput:
    """Attention as it is written in the definition, in float32 or wider.

        weights = softmax(scores), with exp(sink) added to the denominator
        output  = dropout(weights) @ value
        lse     = log sum exp of the scores (and sink)

    A query that may attend to nothing gets output 0, lse -inf (or its sink) and no gradient.
    """
    queries, keys = whole(query.shape[2], query.device), whole(key.shape[2], key.device)
    allowed = scoring.allowed(queries, keys)
    weights, lse = _weights(query, key, scoring, allowed, queries, keys)
    if dropout is not None:
        weights = weights * dropout.keep(scoring.grid, queries, keys) / (1 - dropout.rate)
    output = grouped_matmul(weights, upcast(zero_unseen(value, allowed)))
    return AttentionOutput(output.to(query.dtype), lse)


def all_weights(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
    """The weights of a whole call, before dropout: [batch, heads, query_len, key_len], in float32 or wider."""
    queries, keys = whole(query.shape[2], query.device), whole(key.shape[2], key.device)
    return _weights(query, key, scoring, scoring.allowed(queries, keys), queries, keys)[0]


def _weights(
    query: Tensor, key: Tensor, scoring: Scoring, allowed: Tensor | None, queries: range | Tensor, keys: range | Tensor
) -> tuple[Tensor, Tensor]:
    scores = scoring.tile(zero_empty_queries(query, allowed), zero_unseen(key, allowed), queries, keys)
    return softmax(scores, scoring.sink)

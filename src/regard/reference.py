"""Attention in plain PyTorch: the specification.

Every other kernel must agree with this one. It holds query_len x key_len numbers, which no other file may.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.graphs import whole
from regard.scores import Dropout, Scoring, grouped_product, hide, hide_blind, wide

LOG2_E = 1.0 / math.log(2.0)


class AttentionOutput(NamedTuple):
    """What attention returns: output [batch, heads, query_len, value_dim] and lse [batch, heads, query_len]."""

    output: Tensor
    lse: Tensor


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    dropout: Dropout | None = None,
    queries: range | Tensor | None = None,
    keys: range | Tensor | None = None,
) -> AttentionOutput:
    """Attention as it is written in the definition, in float32 or wider.

        weights = softmax(scores), with exp(sink) added to the denominator
        output  = dropout(weights) @ value
        lse     = log sum exp of the scores (and sink)

    A query that may attend to nothing gets output 0, lse -inf (or its sink) and no gradient.

    Args:
        queries, keys: which rows and columns of the call these tensors are; None for all of them.
    """
    queries = whole(query.shape[2], query.device) if queries is None else queries
    keys = whole(key.shape[2], key.device) if keys is None else keys
    allowed = scoring.allowed(queries, keys)
    weights, lse = _weights(query, key, scoring, allowed, queries, keys)
    if dropout is not None:
        weights = weights * dropout.keep(scoring.grid, queries, keys) / (1 - dropout.rate)
    output = grouped_product(weights, wide(hide(value, allowed)))
    return AttentionOutput(output.to(query.dtype), lse)


def all_weights(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
    """The weights of a whole call, before dropout: [batch, heads, query_len, key_len], in float32 or wider."""
    queries, keys = whole(query.shape[2], query.device), whole(key.shape[2], key.device)
    return _weights(query, key, scoring, scoring.allowed(queries, keys), queries, keys)[0]


def _weights(
    query: Tensor, key: Tensor, scoring: Scoring, allowed: Tensor | None, queries: range | Tensor, keys: range | Tensor
) -> tuple[Tensor, Tensor]:
    scores = scoring.tile(hide_blind(query, allowed), hide(key, allowed), queries, keys)
    return softmax(scores, scoring.sink)


def softmax(scores: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp of scores [batch, heads, rows, columns], with a sink [heads] in the denominator.

    Written out because an empty row must give zeros and not NaN, in the gradient too.
    """
    if scores.shape[-1]:
        top = scores.detach().amax(-1, keepdim=True)
    else:
        top = scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sink is not None:
        sink = sink.to(scores.dtype)[:, None, None]
        top = torch.maximum(top, sink.detach())
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return weights / total, (top + total.log()).masked_fill(empty, -math.inf).squeeze(-1)


def exp(x: Tensor) -> Tensor:
    """e^x as 2^(x log2 e): on a CPU torch's exp2 is many times faster than its exp, above all where x is -inf."""
    return (x * LOG2_E).exp2()

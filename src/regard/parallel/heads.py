"""Heads over ranks: every rank computes some of the heads for all tokens, which are dealt again before and after.

    tokens  [batch, heads, tokens of the rank, size]   <->   heads  [batch, heads of the rank, length, size]

Each rank sends and receives its share of query, key, value and output once, whatever the mask: less than the keys that
a mask lets others see, where it hides little and there are many ranks (Jacobs et al. 2023, "DeepSpeed Ulysses").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.biases import Bias, Given, Sum
from regard.dropout import Dropout
from regard.functional import run
from regard.graphs import uncompiled
from regard.kernels.call import Call
from regard.masks import EVERYTHING
from regard.observation.selecting import selected
from regard.parallel.channel import APART, Channel, Message, check_first_order
from regard.parallel.exchange import total_received
from regard.parallel.moving import Within
from regard.parallel.shards import Shards
from regard.scores import Additive, Scoring
from regard.shapes import Grid


@dataclass(frozen=True)
class Deal:
    """How tokens are dealt again in one call.

    Attributes:
        tag: of its messages, the first of several.
    """

    channel: Channel
    tag: int

    def to_heads(self, tensor: Tensor, shards: Shards, number: int) -> Tensor:
        """All tokens of this rank's heads, from this rank's tokens of all heads."""
        parts = tensor.chunk(self.channel.ranks, dim=1)
        sizes = [shards.size(rank) for rank in range(self.channel.ranks)]
        shapes = [(tensor.shape[0], parts[0].shape[1], size, tensor.shape[3]) for size in sizes]
        return shards.join(self._exchanged(parts, shapes, number))

    def to_tokens(self, tensor: Tensor, shards: Shards, number: int) -> Tensor:
        """This rank's tokens of all heads, from all tokens of this rank's heads."""
        parts = [shards.take(tensor, rank) for rank in range(self.channel.ranks)]
        own = parts[self.channel.rank]
        return torch.cat(self._exchanged(parts, [own.shape] * self.channel.ranks, number), dim=1)

    def _exchanged(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], number: int) -> list[Tensor]:
        """A part of each rank, for a part for each rank."""
        mine, others = self.channel.rank, [rank for rank in range(self.channel.ranks) if rank != self.channel.rank]
        found = [parts[mine] if rank == mine else parts[0].new_empty(shape) for rank, shape in enumerate(shapes)]
        sent = [Message(rank, parts[rank].contiguous()) for rank in others]
        received = [Message(rank, found[rank]) for rank in others]
        self.channel.start(sent, received, self.tag + number).wait()
        return found


class Dealt(torch.autograd.Function):
    """Tokens to heads or back, as a differentiable function: its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, deal: Deal, shards: Shards, number: int, back: bool) -> Tensor:
        ctx.given = deal, shards, number, back
        return (deal.to_tokens if back else deal.to_heads)(tensor, shards, number)

    @staticmethod
    @uncompiled(APART)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        deal, shards, number, back = ctx.given
        check_first_order(deal.channel.function)
        way = deal.to_heads if back else deal.to_tokens
        return way(grad, shards, number + TENSORS), None, None, None, None


TENSORS = 5
"""Query, key, value, output and lse: each has a tag of its own in either pass."""


def attend(
    deal: Deal,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    dropout: Dropout | None,
    queries: Shards,
    keys: Shards,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output and lse of the rank's queries.

    Args:
        scoring, dropout: of the whole call.
    """
    query, key, value = (
        Dealt.apply(tensor, deal, shards, number, False)  # type: ignore[no-untyped-call]
        for number, (tensor, shards) in enumerate(((query, queries), (key, keys), (value, keys)))
    )
    mine = range(deal.channel.rank * query.shape[1], (deal.channel.rank + 1) * query.shape[1])
    if dropout is not None:
        dropout = dropout.seen_from(Within(scoring.grid, head=mine.start))
    output, lse = run(Call(query, key, value, of_heads(scoring, mine), dropout, wants_lse), "auto")
    output = Dealt.apply(output, deal, queries, 3, True)  # type: ignore[no-untyped-call]
    if lse is None or not wants_lse:
        return output, None
    return output, Dealt.apply(lse[..., None], deal, queries, 4, True)[..., 0]  # type: ignore[no-untyped-call]


def heads_pay(scoring: Scoring, queries: Shards, keys: Shards, kv_heads: int, head_dim: int, value_dim: int) -> bool:
    """Whether fewer numbers travel than where keys travel to queries; the same on every rank."""
    ranks, heads = queries.ranks, scoring.grid.heads
    if ranks == 1 or kv_heads % ranks or not scoring.mask_or_everything.closed_form:
        return False
    of_key, of_query = kv_heads * (head_dim + value_dim), heads * (head_dim + value_dim + 1)
    dealt = (queries.length * of_query + keys.length * of_key) * (ranks - 1) / ranks
    return dealt < total_received(scoring.mask_or_everything, queries, keys) * of_key


def of_heads(scoring: Scoring, heads: range) -> Scoring:
    """How scores are computed for some heads of a call, as in a call of these heads alone."""
    grid, of = scoring.grid, slice(heads.start, heads.stop)
    additive = scoring.additive
    return replace(
        scoring,
        grid=grid._replace(heads=len(heads)),
        mask=EVERYTHING if scoring.mask is None else selected(scoring.mask, grid, range(grid.batch), heads),
        bias=None if scoring.bias is None else _bias_of_heads(scoring.bias, grid, heads),
        sink=None if scoring.sink is None else scoring.sink[of],
        additive=None if additive is None else Additive(additive.v[of]),
    )


def _bias_of_heads(bias: Bias, grid: Grid, heads: range) -> Bias:
    if isinstance(bias, Sum):
        return Sum(_bias_of_heads(bias.left, grid, heads), _bias_of_heads(bias.right, grid, heads))
    if isinstance(bias, Given):
        return Given(bias.numbers[:, heads.start : heads.stop] if bias.numbers.shape[1] > 1 else bias.numbers)
    chosen: Bias = selected(bias, grid, range(grid.batch), heads)
    return chosen

"""One tile of a call: its scores and weights, computed when a statistic uses them.

    exponents = log2(e) (score - shift),   powers = 2^exponents,   weights = powers / total

If lse is known, shift = lse and powers are the weights. Otherwise shift is the largest score, or 0 where no score can
be large, and total the sum over all visible keys; for that a tile must hold all keys that its queries see, and then it
gives their lse.

If scores come from products of query and key, the scale is a factor of the product (2 scale / c with a softcap c). If
scores are nothing else and lse is known, -log2(e) lse plus the product with the factor log2(e) scale gives exponents at
once: weights cost one matrix product and one exp2.

Exponents are finite: where nothing is seen, `HIDDEN`, so that a power times its exponent is 0 there and not NaN.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.graphs import tracing
from regard.numerics import LOG2_E, exp, finite_lse, zero_empty_queries, zero_unseen
from regard.observation.hiding import Hiding
from regard.observation.magnitude import UNKNOWN, Magnitude
from regard.observation.products import product
from regard.scores import Scoring

HIDDEN = -(2.0**80)
"""The exponent of a hidden weight, and the least of all: larger than any harmless score, but small enough that its
product with a gradient is finite."""

BUFFERS = 3
"""Buffers of a tile's size that a tile uses: for scores or exponents, for powers, and for their product."""


class TilePlace(NamedTuple):
    """The place of a tile in a call.

    Attributes:
        batch, heads: batch indices and heads in the call: where its numbers go in a result.
        queries, keys: which queries and keys.
        batch_numbers, head_numbers: the indices of these in the call that was observed, of which some batch indices or
            heads may have been selected.
        times: the number of strips, if it is several in one: the queries and keys are those of the first, and in each
            other one all are ``len(queries)`` further on than in the strip before.
    """

    batch: slice
    heads: slice
    queries: range
    keys: range
    batch_numbers: Tensor
    head_numbers: Tensor
    times: int = 1


class ScoreTile(ABC):
    """One tile of a call, as a statistic sees it: scores and weights of some queries and keys, computed on first use.

    The next tile may overwrite its tensors: what a statistic keeps of them has to be a result or a copy, unless it
    sets `keeps_tiles`.

    Under a window, strips of equal form come as one tile, of one batch index, if all statistics set `takes_strips`: its
    tensors are then [strips, heads, len(queries), len(keys)], and `place` says more.

    Attributes:
        batch, heads: slices, the batch indices and heads of the call that it belongs to.
        queries, keys: ranges; its tensors are [batch, heads, len(queries), len(keys)].
    """

    def __init__(
        self, place: TilePlace, scoring: Scoring, query: Tensor, key: Tensor, *, in_place: bool = False,
        hiding: Hiding | None = None, magnitude: Magnitude = UNKNOWN, memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            scoring: of these batch indices and heads.
            query, key: of these queries and keys.
            in_place: whether scores come from products, and everything else is applied to these in place.
            hiding: what the mask hides here; None: it is looked up.
            magnitude: how large its scores can be.
            memory: [BUFFERS, at least as many numbers as the tile has], for its tensors; None: they are allocated.
        """
        self.place, (self.batch, self.heads, self.queries, self.keys) = place, place[:4]
        self._hiding = Hiding(scoring.mask, self.queries, self.keys) if hiding is None else hiding
        self._scoring = scoring if self._hiding.parts else replace(scoring, mask=None)
        self._query, self._key, self._in_place, self._memory = query, key, in_place, memory
        self._magnitude = magnitude

    @property
    def scores(self) -> Tensor:
        """Scores after scale, softcap, bias and mask; -inf where hidden."""
        found = self._scores_now()
        shared = self._memory is not None and found is vars(self).get("_scores")
        return found.clone() if shared else found  # which exponents may overwrite

    @property
    def max_score(self) -> Tensor:
        """The largest score of each query, -inf if fully masked: [batch, heads, queries]."""
        return self._scores_now().amax(-1)

    @abstractmethod
    def _scores_now(self) -> Tensor:
        """Scores, which exponents may overwrite."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """Weights; 0 where hidden."""

    @property
    @abstractmethod
    def log2(self) -> Tensor:
        """The binary logarithms of the weights; -inf where hidden."""

    @property
    @abstractmethod
    def powers(self) -> Tensor:
        """Weights times `total`, which are cheaper than weights."""

    @property
    @abstractmethod
    def total(self) -> Tensor | None:
        """The divisor of powers, [batch, heads, queries]; None for 1, as it is once weights have been used."""

    @abstractmethod
    def negentropy(self) -> Tensor:
        """The sum of weight log2(weight) of each query: [batch, heads, queries]."""

    @cached_property
    def allowed(self) -> Tensor | None:
        """The mask of the tile, broadcastable to it; None if everything is allowed."""
        return self._scoring.allowed(self.queries, self.keys)

    @property
    def indices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The indices of batch, head, query and key of every weight in the call that was observed, even if some batch
        indices and heads were selected: index tensors that broadcast to [batch, heads, queries, keys], like the
        arguments of a mask's `rule`."""
        device = self._query.device
        query = torch.arange(self.queries.start, self.queries.stop, device=device)
        key = torch.arange(self.keys.start, self.keys.stop, device=device)
        batch, head = self.place.batch_numbers, self.place.head_numbers
        return batch[:, None, None, None], head[:, None, None], query[:, None], key

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of its tensors."""
        batch, heads, rows, _ = self._query.shape
        return batch, heads, rows, len(self.keys)

    def num_allowed(self, dim: int) -> Tensor:
        """The number of allowed cells along keys (-1) or queries (-2), as int."""
        shape = [*self.shape]
        if self.allowed is not None:  # bytes into int32: a sum of bools into int64 takes three times as long
            return self.allowed.view(torch.uint8).expand(shape).sum(dim, dtype=torch.int32)
        length = shape.pop(dim)
        return torch.full(shape, length, device=self._query.device)

    def of_queries(self) -> tuple[slice, slice, slice]:
        """The index of its queries in a tensor [batch, heads, query_len, *] of the whole call."""
        return self.batch, self.heads, slice(self.queries.start, self.queries.stop)

    def of_keys(self) -> tuple[slice, slice, slice]:
        """The index of its keys in a tensor [batch, heads, key_len, *] of the whole call."""
        return self.batch, self.heads, slice(self.keys.start, self.keys.stop)

    @property
    def first_keys(self) -> Tensor:
        """The first key, or of several strips those of each: broadcastable to its tensors."""
        first = torch.arange(self.place.times, device=self._query.device) * len(self.queries) + self.keys.start
        return first[:, None, None, None]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The part of its queries, as a view, of a tensor [batch, heads, query_len, *] of the whole call."""
        times, rows = self.place.times, len(self.queries)
        part = tensor[self.batch, self.heads, self.queries.start : self.queries.start + times * rows]
        return part if times == 1 else part[0].unflatten(1, (times, rows)).transpose(0, 1)

    def add_to_columns(self, total: Tensor, part: Tensor) -> None:
        """Adds a part [batch, heads, keys, *] to a tensor [batch, heads, key_len, *] of the whole call."""
        times, step = self.place.times, len(self.queries)
        if times == 1:
            total[self.of_keys()] += part
            return
        for first in range(0, len(self.keys), step):  # of the keys that several strips see, each has others in a step
            start = self.keys.start + first
            into = total[self.batch, self.heads, start : start + times * step][0]
            into += part[:, :, first : first + step].transpose(0, 1).flatten(1, 2)

    def rescaled(self, sums: Tensor) -> Tensor:
        """Turns sums of powers per query into sums of weights: [batch, heads, queries, *]."""
        return sums if self.total is None else sums / self.total.unflatten(-1, (-1, *[1] * (sums.dim() - 3)))

    def _powers_times(self, exponents: Tensor) -> Tensor:
        """The sum of powers times exponents of each query."""
        return torch.mul(self.powers, exponents, out=self._buffer(2)).sum(-1)

    @cached_property
    def _scores(self) -> Tensor:
        """Scores, which exponents may overwrite."""
        if not self._in_place:
            return self._scoring.tile(*self._shown(), self.queries, self.keys)
        out, softcap = self._buffer(0), self._scoring.softcap
        scores = self._product(1.0 if softcap is None else 2.0 / softcap)
        if softcap is not None:  # c tanh(s / c) = 2 c sigmoid(2 s / c) - c, which takes a sixth of the time
            scores = torch.add(scores.new_tensor(-softcap), torch.sigmoid(scores, out=out), alpha=2 * softcap, out=out)
        if self._scoring.bias is not None:
            scores = torch.add(scores, self._biases, out=out)
        return self._hide(scores)

    @property
    def _is_product(self) -> bool:
        """Whether scores are the scaled product of query and key and nothing else."""
        return self._in_place and self._scoring.softcap is None and self._scoring.bias is None

    def _product(self, factor: float, added: Tensor | None = None) -> Tensor:
        """The scaled product of query and key, times a factor, plus a number for each query."""
        added = None if added is None else added[..., None]
        return product(*self._shown(), factor * self._scoring.scale, added, out=self._buffer(0))

    def _hide(self, scores: Tensor, least: float = -math.inf) -> Tensor:
        """Scores, or exponents, with `least` where hidden, in place."""
        if self._bias_hides and not self._magnitude.is_finite:
            assert self.allowed is not None
            return scores.masked_fill_(~self.allowed, least)
        return self._hiding.hide(scores, self._magnitude.is_finite, least)

    def _with_infinities(self, numbers: Tensor) -> Tensor:
        """Numbers made from exponents with -inf where they were `HIDDEN`, in place."""
        for columns in self._columns_with_hidden:
            part = numbers[..., columns]
            part.masked_fill_(part < HIDDEN / 2, -math.inf)
        return numbers

    @cached_property
    def _biases(self) -> Tensor:
        """What the bias adds, broadcastable to the tile."""
        dtype = torch.promote_types(self._query.dtype, torch.float32)
        return self._scoring.biases(self.queries, self.keys, dtype)

    @cached_property
    def _bias_hides(self) -> bool:
        """Whether the bias hides anything."""
        if self._scoring.bias is None or not self._biases.numel():
            return False
        return tracing() or not bool(self._biases.detach().amin() > -math.inf)  # NaN: one of several terms may hide

    @property
    def _columns_with_hidden(self) -> list[slice]:
        """The columns in which anything may be hidden, or a bias may be as low as what hides."""
        has_bias = self._scoring.bias is not None
        return [slice(None)] if has_bias else [part.columns for part in self._hiding.parts]

    def _exponents(self, shift: Tensor) -> Tensor:
        exponents = torch.add(-LOG2_E * shift[..., None], self._scores, alpha=LOG2_E, out=self._buffer(0))
        for columns in self._columns_with_hidden:
            exponents[..., columns].clamp_(min=HIDDEN)
        return exponents

    def _buffer(self, number: int) -> Tensor | None:
        """One of the buffers, in the tile's shape; None if there are none."""
        size = math.prod(self.shape)
        if self._memory is None or self._memory.shape[1] < size:
            return None
        return self._memory[number, :size].view(self.shape)

    def _shown(self) -> tuple[Tensor, Tensor]:
        """Query and key; for gradients, with zeros where fully masked, since 0 * NaN is NaN in a backward pass."""
        if not (self._query.requires_grad or self._key.requires_grad):
            return self._query, self._key
        return zero_empty_queries(self._query, self.allowed), zero_unseen(self._key, self.allowed)


class TileWithLse(ScoreTile):
    """A tile whose queries' lse is known; it may hold any keys."""

    def __init__(
        self, place: TilePlace, scoring: Scoring, query: Tensor, key: Tensor, lse: Tensor, **how: Any
    ) -> None:  # fmt: skip
        """Args: lse: finite, 0 for a fully masked query. The rest as in `ScoreTile`."""
        super().__init__(place, scoring, query, key, **how)
        self._lse = lse

    def _scores_now(self) -> Tensor:
        if self._is_product or "_log2" in vars(self):
            return self._with_infinities(self._log2 / LOG2_E + self._lse[..., None])
        return self._scores

    @property
    def log2(self) -> Tensor:
        return self._with_infinities(self._log2.clone())

    @cached_property
    def _log2(self) -> Tensor:
        if self._is_product:
            return self._hide(self._product(LOG2_E, -LOG2_E * self._lse), HIDDEN)
        return self._exponents(self._lse)

    @cached_property
    def weights(self) -> Tensor:
        return torch.exp2(self._log2, out=self._buffer(1))

    @property
    def powers(self) -> Tensor:
        return self.weights

    @property
    def total(self) -> None:
        return None

    def negentropy(self) -> Tensor:
        return self._powers_times(self._log2)


class _Softmax(NamedTuple):
    """The softmax of a tile without lse: `shift` is what is taken from scores, `seen` is the sum of powers, `total`
    includes the sink and is 1 for a fully masked query; all but exponents and powers are [batch, heads, queries]."""

    shift: Tensor
    exponents: Tensor
    powers: Tensor
    seen: Tensor
    total: Tensor
    lse: Tensor


class TileWithoutLse(ScoreTile):
    """A tile whose queries' lse is unknown: its weights are right only if it holds all keys that its queries see.

    Powers become weights, in place, when weights are first used.
    """

    _are_weights = False

    @cached_property
    def _softmax(self) -> _Softmax:
        sink = self._scoring.sink
        if self._magnitude.is_moderate:  # no number of that size needs a shift
            shift = self._query.new_zeros(self.shape[:-1])
            product_alone = self._is_product and "_scores" not in vars(self)
            exponents = self._hide(self._product(LOG2_E), HIDDEN) if product_alone else self._exponents(shift)
        else:
            shift = self._scores.amax(-1)
            if sink is not None:
                shift = torch.maximum(shift, sink[:, None].to(shift))
            shift = finite_lse(shift)
            exponents = self._exponents(shift)
        powers = torch.exp2(exponents, out=self._buffer(1))
        seen = total = powers.sum(-1)
        if sink is not None:
            total = total + exp(sink[:, None].to(total) - shift)
        lse = shift + total.log()
        return _Softmax(shift, exponents, powers, seen, total.masked_fill(total == 0, 1.0), lse)

    def _scores_now(self) -> Tensor:
        if "_softmax" not in vars(self):
            return self._scores
        known = self._softmax
        shift = known.shift + known.total.log() if self._are_weights else known.shift
        return self._with_infinities(known.exponents / LOG2_E + shift[..., None])

    @property
    def powers(self) -> Tensor:
        return self._softmax.powers

    @property
    def total(self) -> Tensor | None:
        return None if self._are_weights else self._softmax.total

    @property
    def log2(self) -> Tensor:
        self._normalise()
        return self._with_infinities(self._softmax.exponents.clone())

    @property
    def weights(self) -> Tensor:
        self._normalise()
        return self._softmax.powers

    def negentropy(self) -> Tensor:
        sums = self._powers_times(self._softmax.exponents)
        if self._are_weights:
            return sums
        return (sums - self._softmax.total.log2() * self._softmax.seen) / self._softmax.total

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of its queries' scores and sink, -inf if fully masked: [batch, heads, queries]."""
        return self._softmax.lse

    def sums(self) -> tuple[Tensor, Tensor]:
        """The shift of each query, and the sum of exp(score - shift) over its keys; -inf and 0 if fully masked."""
        return self._softmax.shift.masked_fill(self._softmax.seen == 0, -math.inf), self._softmax.seen

    def _normalise(self) -> None:
        if not self._are_weights:
            self._softmax.exponents.sub_(self._softmax.total.log2()[..., None])
            self._softmax.powers.div_(self._softmax.total[..., None])
            self._are_weights = True


def tile_of(
    place: TilePlace, scoring: Scoring, query: Tensor, key: Tensor, lse: Tensor | None, **how: Any
) -> ScoreTile:
    """A tile with lse, or without if it is None; other arguments as in `ScoreTile`."""
    if lse is None:
        return TileWithoutLse(place, scoring, query, key, **how)
    return TileWithLse(place, scoring, query, key, lse, **how)

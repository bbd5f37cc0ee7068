"""What attention did, exactly, from q, k and one number per query.

    weight[i, j] = exp(score[i, j] - lse[i])

Any weight can be had again from that, so nothing of size query_len x key_len is ever kept. A statistic takes one pass
over the scores, a few queries at a time against all keys, and needs memory for those few rows only.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.biases import Bias
from regard.functional import check_call
from regard.masks import EVERYTHING, Indices, Mask, Tile
from regard.reference import exp, softmax
from regard.scores import Additive, Scoring
from regard.shapes import Grid, ShapeError

CELLS = 1 << 22
"""Weights held at a time while a statistic is gathered: 16 MiB in float32."""

LARGEST = 1 << 26
"""Most weights that `Observation.weights` gives at once: 256 MiB in float32."""


class Top(NamedTuple):
    """The keys with the largest weights of each query, largest first: both [batch, heads, query_len, count]."""

    weights: Tensor
    keys: Tensor


class Observation:
    """The weights of one attention call, to be asked about.

    Made by `observe`, or by a recording. Statistics are [batch, heads, query_len] (or key_len, where said).

    >>> query = torch.tensor([[[[1., 0.], [0., 1.]]]])
    >>> seen = observe(query, query, mask=Causal(), scale=1.0)
    >>> seen.weights()
    tensor([[[[1.0000, 0.0000],
              [0.2689, 0.7311]]]])
    >>> seen.entropy()
    tensor([[[0.0000, 0.5822]]])
    """

    def __init__(self, query: Tensor, key: Tensor, scoring: Scoring, lse: Tensor | None = None) -> None:
        self.query, self.key, self.scoring = query, key, scoring
        self._lse = lse

    @property
    def grid(self) -> Grid:
        """Batch, heads, query_len and key_len."""
        return self.scoring.grid

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each query's scores (and sink): [batch, heads, query_len]."""
        if self._lse is None:
            self._lse = self._lse_of(range(self.grid.query_len))
        return self._lse

    def scores(self, queries: range | slice | None = None, keys: range | slice | None = None) -> Tensor:
        """Scores of a rectangle, after scale, softcap, bias and mask: [batch, heads, rows, columns]."""
        rows, columns = _range(queries, self.grid.query_len), _range(keys, self.grid.key_len)
        cells = self.grid.batch * self.grid.heads * len(rows) * len(columns)
        if cells > LARGEST:
            raise ValueError(
                f"Observation: {cells:,} weights at once are more than {LARGEST:,}; ask for a rectangle, "
                "weights(queries=slice(0, 64), keys=slice(0, 64)), or for a statistic: entropy(), top(8), received()"
            )
        return self._tile(rows, columns)

    def weights(self, queries: range | slice | None = None, keys: range | slice | None = None) -> Tensor:
        """Weights of a rectangle (default: all of it, refused when large): [batch, heads, rows, columns]."""
        return self._normalised(self.scores(queries, keys), _range(queries, self.grid.query_len))

    def entropy(self) -> Tensor:
        """How widely each query spreads its weight, in nats: ``-sum_j w log w``, with the sink as one more place.

        0 where all weight is on one key, log(n) where it is even over n; 0 for a query that sees nothing.
        """

        def of(rows: range, scores: Tensor, weights: Tensor) -> Tensor:
            entropy: Tensor = torch.special.entr(weights).sum(-1)
            if self.scoring.sink is not None:
                entropy = entropy + torch.special.entr(self._sink_mass(rows))
            return entropy

        return self._gather(of)

    def top(self, count: int) -> Top:
        """The `count` largest weights of each query and their keys."""
        if not 1 <= count <= self.grid.key_len:
            raise ValueError(f"Observation.top: count must be 1 to key_len={self.grid.key_len}, got {count}")
        found = [weights.topk(count, dim=-1) for _, _, weights in self._weights()]
        return Top(torch.cat([f.values for f in found], dim=2), torch.cat([f.indices for f in found], dim=2))

    def received(self) -> Tensor:
        """How much weight each key gets from all queries together: [batch, heads, key_len]."""
        total = self.lse.new_zeros(self.grid.batch, self.grid.heads, self.grid.key_len)
        for _, _, weights in self._weights():
            total += weights.sum(-2)
        return total

    def mass(self, groups: Tensor) -> Tensor:
        """How much weight each query puts on each group of keys: [batch, heads, query_len, number of groups].

        Args:
            groups: int [key_len] or [batch, key_len], the group (0 upwards) of each key.
        """
        if groups.dim() == 1:
            groups = groups.expand(self.grid.batch, -1)
        if groups.shape != (self.grid.batch, self.grid.key_len):
            raise ShapeError(
                f"Observation.mass: groups must be [batch={self.grid.batch}, key_len={self.grid.key_len}], "
                f"got {list(groups.shape)}"
            )
        member = torch.nn.functional.one_hot(groups.long()).to(self.lse.dtype)[:, None]
        return self._gather(lambda rows, scores, weights: weights @ member)

    def share(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """How much weight each query puts on the keys that a rule chooses.

        Args:
            chosen: ``chosen(query, key) -> bool``, on index tensors [rows, 1] and [1, key_len]; the result broadcasts
                to [batch, heads, rows, key_len].
        """
        keys = torch.arange(self.grid.key_len, device=self.grid.device)[None, :]

        def of(rows: range, scores: Tensor, weights: Tensor) -> Tensor:
            queries = torch.arange(rows.start, rows.stop, device=self.grid.device)[:, None]
            return (weights * chosen(queries, keys)).sum(-1)

        return self._gather(of)

    def distance(self) -> Tensor:
        """How far back each query looks on average, in tokens: ``sum_j w (i + key_len - query_len - j)``."""
        keys = torch.arange(self.grid.key_len, device=self.grid.device)
        behind = self.grid.key_len - self.grid.query_len

        def of(rows: range, scores: Tensor, weights: Tensor) -> Tensor:
            # the distances themselves, not a difference of means: float32 would lose it far into a text
            back = torch.arange(rows.start, rows.stop, device=self.grid.device)[:, None] + behind - keys
            return (weights * back).sum(-1)

        return self._gather(of)

    def max_score(self) -> Tensor:
        """The largest score of each query; -inf for one that sees nothing."""
        if not self.grid.key_len:
            return torch.full_like(self.lse, -math.inf)
        return self._gather(lambda rows, scores, weights: scores.amax(-1))

    def sink_mass(self) -> Tensor:
        """How much weight goes to the sink: ``exp(sink - lse)``; 0 without one."""
        return self._sink_mass(range(self.grid.query_len))

    def visible(self) -> Tensor:
        """How many keys each query may attend to: int [batch, heads, query_len]."""
        return torch.cat([(scores > -math.inf).sum(-1) for _, scores in self._scores()], dim=2)

    def head(self, head: int) -> "Observation":
        """One head alone, as an observation with heads=1."""
        heads = self.grid.heads
        if not 0 <= head < heads:
            raise ValueError(f"Observation.head: head must be 0 to {heads - 1}, got {head}")
        scoring, one = self.scoring, slice(head, head + 1)
        kv_head = head // (heads // self.key.shape[1])
        of_head = replace(
            scoring,
            grid=scoring.grid._replace(heads=1),
            bias=None if scoring.bias is None else _BiasOfHead(scoring.bias, head),
            mask=None if scoring.mask is None or scoring.mask is EVERYTHING else _MaskOfHead(scoring.mask, head),
            sink=None if scoring.sink is None else scoring.sink[one],
            additive=None if scoring.additive is None else Additive(scoring.additive.v[one]),
        )
        lse = None if self._lse is None else self._lse[:, one]
        return Observation(self.query[:, one], self.key[:, kv_head : kv_head + 1], of_head, lse)

    def _tile(self, rows: range, columns: range) -> Tensor:
        query = self.query[:, :, rows.start : rows.stop]
        key = self.key[:, :, columns.start : columns.stop]
        return self.scoring.tile(query, key, rows, columns)

    def _scores(self, queries: range | None = None) -> Iterator[tuple[range, Tensor]]:
        """The scores of queries (default: of all) with all keys, some rows at a time."""
        queries = range(self.grid.query_len) if queries is None else queries
        step = max(1, CELLS // max(1, self.grid.batch * self.grid.heads * self.grid.key_len))
        for start in range(0, max(1, len(queries)), step):  # without queries, one part without rows
            rows = queries[start : start + step]
            yield rows, self._tile(rows, range(self.grid.key_len))

    def _weights(self) -> Iterator[tuple[range, Tensor, Tensor]]:
        """Rows with their scores and weights."""
        assert self.lse is not None  # once for all rows, and kept
        for rows, scores in self._scores():
            yield rows, scores, self._normalised(scores, rows)

    def _normalised(self, scores: Tensor, rows: range) -> Tensor:
        """Weights from scores; a query that sees nothing has none."""
        return exp(scores - self._norm(rows)[..., None])

    def _gather(self, of: Callable[[range, Tensor, Tensor], Tensor]) -> Tensor:
        return torch.cat([of(rows, scores, weights) for rows, scores, weights in self._weights()], dim=2)

    def _sink_mass(self, rows: range) -> Tensor:
        norm = self._norm(rows)
        if self.scoring.sink is None:
            return torch.zeros_like(norm)
        return (self.scoring.sink.to(norm.dtype)[:, None] - norm).exp()

    def _norm(self, rows: range) -> Tensor:
        """What to subtract from a score: lse, or 0 for a query that sees nothing."""
        lse = self._lse_of(rows)
        return lse.masked_fill(lse == -math.inf, 0.0)

    def _lse_of(self, rows: range) -> Tensor:
        """lse of some rows: a rectangle of weights does not need that of all."""
        if self._lse is not None:
            return self._lse[:, :, rows.start : rows.stop]
        return torch.cat([softmax(scores, self.scoring.sink)[1] for _, scores in self._scores(rows)], dim=2)


class _MaskOfHead(Mask):
    """What a mask says of one head."""

    def __init__(self, mask: Mask, head: int) -> None:
        self.mask, self.head = mask, head

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return _of_head(self.mask.allowed(queries, keys), self.head)

    def _tile(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    def __repr__(self) -> str:
        return repr(self.mask)


class _BiasOfHead(Bias):
    """What a bias adds in one head."""

    def __init__(self, bias: Bias, head: int) -> None:
        self.bias, self.head = bias, head

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return _of_head(self.bias.values(queries, keys), self.head)

    def __repr__(self) -> str:
        return repr(self.bias)


def _range(which: range | slice | None, length: int) -> range:
    """Rows or columns: a slice as Python takes it, a range as it stands, None for all."""
    chosen = range(length)[slice(None) if which is None else which] if not isinstance(which, range) else which
    if not 0 <= chosen.start <= chosen.stop <= length or chosen.step != 1:
        raise ValueError(f"Observation: rows and columns must lie in 0 to {length}, in steps of 1, got {which}")
    return chosen


def _of_head(cells: Tensor, head: int) -> Tensor:
    """One head of [batch, heads or 1, rows, columns]."""
    return cells if cells.shape[1] == 1 else cells[:, head : head + 1]


def observe(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    additive: Additive | None = None,
    lse: Tensor | None = None,
) -> Observation:
    """The weights of an attention call, to be asked about, without the call.

    Shapes: query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim].
    Args:
        lse: [batch, heads, query_len], if `attention_with_lse` has given it already; None: computed when needed.
        The rest as in `attention`.
    Raises:
        What `attention` raises.
    """
    call = check_call("observe", query, key, key, mask, bias, scale, softcap, sink, additive, 0.0, None, wants_lse=True)
    if lse is not None and lse.shape != query.shape[:3]:
        batch, heads, query_len = query.shape[:3]
        raise ShapeError(f"observe: lse must be [{batch=}, {heads=}, {query_len=}], got {list(lse.shape)}")
    return Observation(query, key, call.scoring, lse)

"""An attention call as data: what determines its weights, and what follows from it without computing a score.

Statistics get this, not the user-facing `Observation`, which is built on top of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.numerics import finite_lse, upcast, wide
from regard.observation.selecting import kv_of_heads, selected
from regard.observation.tile import ScoreTile, TilePlace, tile_of
from regard.scores import Additive, Scoring
from regard.shapes import Grid


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """An attention call whose weights are observed.

    Attributes:
        query: [batch, heads, query_len, head_dim]. key: [batch, kv_heads, key_len, head_dim].
        scoring: how scores are computed.
        lse: [batch, heads, query_len], -inf for a fully masked query; None while it is unknown. For a statistic that
            `needs_weights`, it is known in `finish`.
        batch_numbers, head_numbers: the indices of its batch elements and heads in the call that was observed; None
            for 0, 1, 2, ...
    """

    query: Tensor
    key: Tensor
    scoring: Scoring
    lse: Tensor | None = None
    batch_numbers: Sequence[int] | None = None
    head_numbers: Sequence[int] | None = None

    @property
    def grid(self) -> Grid:
        """Batch, heads, query_len and key_len."""
        return self.scoring.grid

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores: float32 or wider."""
        return wide(self.query.dtype)

    @property
    def behind(self) -> int:
        """Position of query 0 if the last query has the position of the last key: key_len - query_len."""
        return self.grid.key_len - self.grid.query_len

    @property
    def is_product(self) -> bool:
        """Whether scores are scale * query @ key^T and nothing else."""
        return self.scoring.softcap is None and self.scoring.bias is None and self.scoring.additive is None

    @property
    def from_products(self) -> bool:
        """Whether scores come from products of query and key."""
        return self.scoring.additive is None

    @property
    def finite_lse(self) -> Tensor:
        """lse, with 0 for fully masked queries."""
        assert self.lse is not None  # only statistics that need weights use it
        return finite_lse(self.lse)

    @property
    def sink(self) -> Tensor | None:
        """The sink as a column [heads, 1], clamped to finite numbers, since 0 * inf is NaN."""
        sink = self.scoring.sink
        return None if sink is None else sink.to(self.dtype).clamp(min=-1e30)[:, None]

    @property
    def sink_mass(self) -> Tensor:
        """The weight of the sink for each query; 0 without one."""
        sink = self.sink
        return self.zero_sums(self.grid.query_len) if sink is None else (sink - self.finite_lse).exp()

    @property
    def lse_of_empty(self) -> Tensor:
        """The lse of fully masked queries: the sink's logit, or -inf without one; [batch, heads, query_len]."""
        lse = self.zeros(self.grid.query_len) - torch.inf
        return lse if self.scoring.sink is None else torch.maximum(lse, self.scoring.sink.to(lse)[:, None])

    @property
    def wants_grad(self) -> bool:
        """Whether gradients are recorded through the weights: for query, key or anything else that affects scores."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self._differentiable())

    @property
    def knows_lse(self) -> bool:
        """Whether lse is known, with a graph if gradients are recorded."""
        return self.lse is not None and (self.lse.requires_grad or not self.wants_grad)

    def zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros [batch, heads, *sizes] on the device of the call, by default in the dtype of scores."""
        dtype = self.dtype if dtype is None else dtype
        return torch.zeros(self.grid.batch, self.grid.heads, *sizes, dtype=dtype, device=self.grid.device)

    def zero_sums(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same, for sums of weights: with a graph if the weights have one. So the sum for a fully masked query, to
        which nothing is added, has gradients of 0, like attention's output."""
        zeros = self.zeros(*sizes, dtype=dtype)
        if not zeros.is_floating_point() or not self.wants_grad:
            return zeros
        return zeros + sum(part[:0].sum() for part in self._differentiable() if part.requires_grad)

    def _differentiable(self) -> tuple[Tensor, ...]:
        """What gradients may flow to: query, key, sink, additive similarity, and a corner of the bias."""
        scoring, grid = self.scoring, self.grid
        parts = [self.query, self.key]
        if scoring.sink is not None:
            parts.append(scoring.sink)
        if scoring.additive is not None:
            parts.append(scoring.additive.v)
        if scoring.bias is not None:
            parts.append(scoring.bias.values(range(min(1, grid.query_len)), range(min(1, grid.key_len))))
        return tuple(parts)

    def select(self, batch: range, heads: range) -> "ObservedCall":
        """Some batch indices and heads as a separate call."""
        scoring, whole = self.scoring, self.grid
        if len(batch) == whole.batch and len(heads) == whole.heads:
            return self
        of_batch, of_heads = slice(batch.start, batch.stop), slice(heads.start, heads.stop)
        chosen = replace(
            scoring,
            grid=whole._replace(batch=len(batch), heads=len(heads)),
            mask=None if scoring.mask is None else selected(scoring.mask, whole, batch, heads),
            bias=None if scoring.bias is None else selected(scoring.bias, whole, batch, heads),
            sink=None if scoring.sink is None else scoring.sink[of_heads],
            additive=None if scoring.additive is None else Additive(scoring.additive.v[of_heads]),
        )
        return ObservedCall(
            self.query[of_batch, of_heads],
            kv_of_heads(self.key, whole.heads, heads)[of_batch],
            chosen,
            None if self.lse is None else self.lse[of_batch, of_heads],
            batch if self.batch_numbers is None else self.batch_numbers[of_batch],
            heads if self.head_numbers is None else self.head_numbers[of_heads],
        )

    def place(self, batch: slice, heads: slice, queries: range, keys: range) -> TilePlace:
        """The place of a rectangle of this call within a larger call, of which this one is `batch` and `heads`."""
        in_batch, in_heads = (
            torch.tensor(range(size) if given is None else given, device=self.grid.device)
            for given, size in ((self.batch_numbers, self.grid.batch), (self.head_numbers, self.grid.heads))
        )
        return TilePlace(batch, heads, queries, keys, in_batch, in_heads)

    def tile(self, queries: range, keys: range) -> ScoreTile:
        """One tile of all batch indices and heads, of any size."""
        place = self.place(slice(0, self.grid.batch), slice(0, self.grid.heads), queries, keys)
        query = self.query[:, :, queries.start : queries.stop]
        key = self.key[:, :, keys.start : keys.stop]
        lse = None if self.lse is None else finite_lse(self.lse[:, :, queries.start : queries.stop])
        return tile_of(place, self.scoring, query, key, lse)

    def tensors(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Query, key and finite lse of some queries and keys, as tiles need them."""
        query, key = self.query[:, :, queries], self.key[:, :, keys]
        lse = None if self.lse is None else finite_lse(self.lse[:, :, queries])
        return (upcast(query), upcast(key), lse) if self.from_products else (query, key, lse)

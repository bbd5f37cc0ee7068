"""An attention call as data: what its weights follow from, and what follows from that without looking at a score.

Statistics are given this and not the object that users ask, which stands above them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.numerics import LOG2_E, finite_lse, upcast
from regard.observation.selecting import kv_of_heads, selected
from regard.observation.tile import ScoreTile, TilePlace, tile_of
from regard.scores import Additive, Scoring
from regard.shapes import Grid


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call of attention whose weights are looked at.

    Attributes:
        query: [batch, heads, query_len, head_dim]. key: [batch, kv_heads, key_len, head_dim].
        scoring: what a score is.
        lse: [batch, heads, query_len], -inf for a query that sees nothing; None as long as it is not known. A statistic
            that `needs_weights` finds it when it finishes.
        batch_numbers, head_numbers: the numbers of its batch rows and heads in the call that was observed; None for
            0, 1, 2, ...
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
        """What scores are computed in: float32 or wider."""
        return upcast(self.query[:0]).dtype

    @property
    def behind(self) -> int:
        """How far query 0 stands behind key 0: the last query meets the last key."""
        return self.grid.key_len - self.grid.query_len

    @property
    def is_product(self) -> bool:
        """Whether a score is scale * query @ key^T and nothing else."""
        return self.scoring.softcap is None and self.scoring.bias is None and self.scoring.additive is None

    @property
    def finite_lse(self) -> Tensor:
        """lse, 0 for a query that sees nothing."""
        assert self.lse is not None  # whoever asks for it needs weights
        return finite_lse(self.lse)

    @property
    def sink(self) -> Tensor | None:
        """The sink as a column of numbers that are finite, so that none times 0 is NaN: [heads, 1]."""
        sink = self.scoring.sink
        return None if sink is None else sink.to(self.dtype).clamp(min=-1e30)[:, None]

    @property
    def sink_mass(self) -> Tensor:
        """How much weight each query gives to the sink; 0 without one."""
        sink = self.sink
        return self.zero_sums(self.grid.query_len) if sink is None else (sink - self.finite_lse).exp()

    @property
    def lse_of_empty(self) -> Tensor:
        """lse of queries that see nothing: the sink's logit, -inf where there is none; [batch, heads, query_len]."""
        lse = self.zeros(self.grid.query_len) - torch.inf
        return lse if self.scoring.sink is None else torch.maximum(lse, self.scoring.sink.to(lse)[:, None])

    @property
    def wants_grad(self) -> bool:
        """Whether weights have a gradient to give: to query or key, or to anything that makes a score."""
        return torch.is_grad_enabled() and any(part.requires_grad for part in self._differentiable())

    @property
    def knows_lse(self) -> bool:
        """Whether lse is there, with a graph where a gradient is wanted."""
        return self.lse is not None and (self.lse.requires_grad or not self.wants_grad)

    def zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of [batch, heads, *sizes], where the call runs; in the dtype of scores unless another is given."""
        dtype = self.dtype if dtype is None else dtype
        return torch.zeros(self.grid.batch, self.grid.heads, *sizes, dtype=dtype, device=self.grid.device)

    def zero_sums(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """The same, to add weights to: with a graph where weights have one, so that a sum to which nothing is added,
        since nobody sees anything, has gradients of 0, as attention's output has."""
        zeros = self.zeros(*sizes, dtype=dtype)
        if not zeros.is_floating_point() or not self.wants_grad:
            return zeros
        return zeros + sum(part[:0].sum() for part in self._differentiable() if part.requires_grad)

    def _differentiable(self) -> tuple[Tensor, ...]:
        """What a gradient may flow to: query, key, sink and whatever a score is made of, biases by a corner of them."""
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
        """Some batch rows and heads, as a call of their own."""
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
        """A rectangle of all of it, as that of the batch rows and heads of a larger call."""
        numbers = (
            torch.tensor(range(size) if given is None else given, device=self.grid.device)
            for given, size in ((self.batch_numbers, self.grid.batch), (self.head_numbers, self.grid.heads))
        )
        return TilePlace(batch, heads, queries, keys, *numbers)

    def tile(self, queries: range, keys: range) -> ScoreTile:
        """One tile of all batch rows and heads, whatever its size."""
        place = self.place(slice(0, self.grid.batch), slice(0, self.grid.heads), queries, keys)
        query = self.query[:, :, queries.start : queries.stop]
        key = self.key[:, :, keys.start : keys.stop]
        lse = None if self.lse is None else finite_lse(self.lse[:, :, queries.start : queries.stop])
        return tile_of(place, self.scoring, query, key, lse)

    def folded(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Query, key and finite lse of some queries and keys. Where a score is a plain product, they are folded:
        [scale log2(e) query, -log2(e) lse] . [key, 1] is the exponent; and scale query . key the score, as long as lse
        is not known."""
        query, key = self.query[:, :, queries], self.key[:, :, keys]
        lse = None if self.lse is None else finite_lse(self.lse[:, :, queries])
        if self.is_product:
            query, key = upcast(query) * self.scoring.scale, upcast(key)
            if lse is not None:
                query, key = torch.cat([query, -lse[..., None]], dim=-1) * LOG2_E, F.pad(key, (0, 1), value=1.0)
        return query, key, lse

"""The user-facing object: `Observation`, the weights of one attention call, and `observe`, which makes one.

Each method computes one statistic or one rectangle; its definition for readers is here, the computation in other files.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from regard import hints
from regard.biases import Bias
from regard.hints import hinted
from regard.masks import Mask
from regard.numerics import exp, finite_lse, without_autocast
from regard.observation import compiled, measures, passes, tuning
from regard.observation.comparing import Compare, Comparison
from regard.observation.images import Image, Pyramid
from regard.observation.lse import lse_of, settled
from regard.observation.observed import ObservedCall
from regard.observation.spans import Selection, Span, chosen_of, refuse_many, span_of
from regard.observation.statistic import Result, Statistic, check_statistics
from regard.observation.streaming import Progress, silent
from regard.scores import Additive, Scoring
from regard.shapes import Grid, ShapeError, as_bytes, bytes_of, check_floating, kind
from regard.validation import check_call


class Observation:
    """The weights of one attention call, recomputed on request.

    Made by `observe`, or by a recording. Statistics are exact, [batch, heads, query_len] unless stated otherwise, and
    take one pass over the tiles that are not empty under the mask; `gather` computes several in one pass. If query,
    key, bias, sink or additive require gradients, they are all differentiable, in O(length) memory.

    >>> query = torch.tensor([[[[1., 0.], [0., 1.]]]])
    >>> seen = observe(query, query, mask=Causal(), scale=1.0)
    >>> seen.weights()
    tensor([[[[1.0000, 0.0000],
              [0.2689, 0.7311]]]])
    >>> seen.entropy()
    tensor([[[0.0000, 0.5822]]])
    >>> entropy, top = seen.gather(Entropy(), Top(1))
    >>> top.keys[..., 0]
    tensor([[[0, 1]]])
    """

    def __init__(self, query: Tensor, key: Tensor, scoring: Scoring, lse: Tensor | None = None) -> None:
        call = ObservedCall(query, key, scoring)
        self.call = call if lse is None else replace(call, lse=lse.to(call.dtype))
        """The call as data, with its lse once that is known."""

    # --- the call, a rectangle, a head ---

    def __repr__(self) -> str:
        kept = self._kept()
        parts = [str(self.grid), *([] if self.scoring.mask is None else [repr(self.scoring.mask)])]
        parts += [name for name in kept if name not in ("query", "key")]
        return f"<{type(self).__name__} {', '.join(parts)}, {as_bytes(bytes_of(kept.values()))}>"

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that are kept, by name."""
        return {"query": self.query, "key": self.key} | ({} if self.call.lse is None else {"lse": self.call.lse})

    @property
    def query(self) -> Tensor:
        """[batch, heads, query_len, head_dim]."""
        return self.call.query

    @property
    def key(self) -> Tensor:
        """[batch, kv_heads, key_len, head_dim]."""
        return self.call.key

    @property
    def scoring(self) -> Scoring:
        """How scores are computed: scale, softcap, bias, mask, sink, similarity."""
        return self.call.scoring

    @property
    def grid(self) -> Grid:
        """Batch, heads, query_len and key_len."""
        return self.call.grid

    @property
    def behind(self) -> int:
        """Position of query 0 if the last query has the position of the last key: key_len - query_len."""
        return self.call.behind

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each query's scores (and sink), [batch, heads, query_len]; computed once, on first use."""
        lse = self.settled().lse
        assert lse is not None
        return lse

    def settled(self) -> ObservedCall:
        """The call with its lse, which is kept unless it has a graph: that serves only one backward pass."""
        with without_autocast(self.grid.device):
            call, _ = settled(self.call)
        self._keep(call.lse)
        return call

    def _keep(self, lse: Tensor | None) -> None:
        if lse is not None and not lse.requires_grad:
            self.call = replace(self.call, lse=lse)

    def __getitem__(self, which: Selection | tuple[Selection, Selection]) -> Self:
        """Some batch indices and heads as a separate observation: ``seen[0]``, ``seen[:, 3]``, ``seen[0, 4:6]``.

        Both axes remain, with size 1 for a single index.
        """
        batch, heads = which if isinstance(which, tuple) else (which, slice(None))
        chosen = chosen_of(batch, self.grid.batch, "batch rows"), chosen_of(heads, self.grid.heads, "heads")
        call = self.call.select(*chosen)
        if call is self.call:
            return self
        selected = copy.copy(self)
        selected.call = call
        return selected

    def head(self, head: int) -> Self:
        """A single head, as an observation with heads=1."""
        if isinstance(head, (bool, Tensor)) or not hasattr(head, "__index__") or not 0 <= head < self.grid.heads:
            raise ValueError(f"Observation.head: head must be 0 to {self.grid.heads - 1}, got {head}")
        return self[:, head]

    def scores(self, queries: Span = None, keys: Span = None) -> Tensor:
        """Scores of a rectangle, after scale, softcap, bias and mask: [batch, heads, rows, columns].

        Args:
            queries, keys: a slice or a range; None for all. A large rectangle raises an error.
        """
        rows, columns = span_of(queries, self.grid.query_len), span_of(keys, self.grid.key_len)
        count = self.grid.batch * self.grid.heads * len(rows) * len(columns)
        refuse_many(
            count, "weights", "a rectangle, weights(queries=slice(0, 64), keys=slice(0, 64)), or for a statistic: "
            "entropy(), top(8), received(), image()",
        )  # fmt: skip
        with without_autocast(self.grid.device):
            return replace(self.call, lse=None).tile(rows, columns).scores

    def weights(self, queries: Span = None, keys: Span = None) -> Tensor:
        """Weights of a rectangle, by default all of them: [batch, heads, rows, columns]. Arguments as in `scores`."""
        scores = self.scores(queries, keys)
        rows = span_of(queries, self.grid.query_len)
        if self.call.lse is not None and self.call.knows_lse:
            lse = self.call.lse[:, :, rows.start : rows.stop]
        else:  # only that of these queries is needed
            lse = lse_of(self.call, rows)
        return exp(scores - finite_lse(lse)[..., None])

    # --- statistics ---

    def ask(self, statistic: Statistic[Result]) -> Result:
        """The result of one statistic: one of regard's or your own (`Statistic`)."""
        result: Result = self.gather(statistic)[0]
        return result

    def gather(self, *statistics: Statistic[Any], progress: Progress = silent) -> tuple[Any, ...]:
        """Several statistics in one pass, with the same results as one by one.

        Args:
            statistics: `Entropy`, `Top`, `Received`, `Image` and regard's others, or your own (`Statistic`).
            progress: called with the number of queries done, and of all (once per batch index if masks differ).
        Returns:
            The results in the order of the statistics.
        Raises:
            TypeError: no statistics, or an argument that is not one.
        """
        check_statistics(statistics)
        with without_autocast(self.grid.device):
            results, lse = passes.gather(self.call, statistics, progress)
        self._keep(lse)
        return results

    def entropy(self) -> Tensor:
        """Entropy of each query's weights in nats: ``-sum_j w log w``, with the sink as one more key.

        0 if all weight is on one key, log(n) if it is uniform over n keys; 0 for a fully masked query.
        """
        return self.ask(measures.Entropy())

    def top(self, count: int) -> measures.Largest:
        """The `count` largest weights of each query and their keys, largest first; padded with 0 and -1."""
        return self.ask(measures.Top(count))

    def received(self) -> Tensor:
        """The weight that each key receives from all queries: [batch, heads, key_len].

        Sums to the number of queries that are not fully masked, less the sink's mass.
        """
        return self.ask(measures.Received())

    def mean_received(self) -> Tensor:
        """The same as a mean over the queries that may attend to the key, 0 if none may: [batch, heads, key_len]."""
        received, viewers = self.gather(measures.Received(), measures.Viewers())
        mean: Tensor = received / viewers.clamp(min=1)
        return mean

    def mass(self, groups: Tensor) -> Tensor:
        """The weight that each query puts on each group of keys: [batch, heads, query_len, number of groups].

        Args:
            groups: int [key_len] or [batch, key_len], the group (0 upwards) of each key.
        """
        return self.ask(measures.Mass(groups))

    def share(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The weight that each query puts on the keys that a function selects.

        Args:
            chosen: ``chosen(query, key) -> bool``, of index tensors [rows, 1] and [1, columns]; the result broadcasts
                to [batch, heads, rows, columns].
        """
        return self.ask(measures.Share(chosen))

    def distance(self) -> Tensor:
        """Mean distance to the keys, in tokens: ``sum_j w (i + key_len - query_len - j)``."""
        return self.ask(measures.Distance())

    def distances(self, edges: Sequence[int] | Tensor | None = None) -> measures.Distances:
        """A histogram of each query's weight by distance: mass [batch, heads, query_len, bins].

            mass[i, b] = sum of w[i, j] with edges[b] <= i + key_len - query_len - j < edges[b + 1]

        Args:
            edges: increasing integers, in tokens, negative for keys ahead; None: one bin for all keys ahead, then 0,
                1, 2, 4, 8, ... up to the farthest key.
        """
        return self.ask(measures.Spread(edges))

    def max_score(self) -> Tensor:
        """The largest score of each query; -inf for a fully masked one."""
        return self.ask(measures.MaxScore())

    def sink_mass(self) -> Tensor:
        """The weight of the sink: ``exp(sink - lse)``; 0 without one."""
        return (self.call if self.scoring.sink is None else self.settled()).sink_mass

    def visible(self) -> Tensor:
        """How many keys each query may attend to: int [batch, heads, query_len]."""
        return self.ask(measures.Visible())

    def viewers(self) -> Tensor:
        """How many queries may attend to each key: int [batch, heads, key_len]."""
        return self.ask(measures.Viewers())

    def image(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Span = None, keys: Span = None
    ) -> Tensor:
        """The matrix of weights, or a rectangle of it, pooled to a small image: [batch, heads, rows, columns].

            max    a pixel is the largest weight of its queries and keys, so no large weight is missed
            mean   a pixel is the weight on all its keys, averaged over its queries, so a row of pixels sums to 1
                   (less the sink's mass, and less the share of fully masked queries)

        Pixel (r, c) covers queries ``[r * step, (r + 1) * step)`` of the rectangle, and keys likewise, where
        ``step = ceil(length / size)`` along each axis; the last pixels may cover fewer.

        Args:
            size: most pixels along either axis.
            queries, keys: the rectangle; None for all.
        """
        return self.ask(Image(size, pool, queries, keys))

    def pyramid(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> tuple[Tensor, ...]:
        """Images of the whole matrix for zooming, from `size` pixels down to one, in one pass.

        Each image is half as large as the one before: its pixels cover twice as many queries and keys.
        """
        return self.ask(Pyramid(size, pool))

    def compare(self, other: "Observation") -> Comparison:
        """Distances between these weights p and another observation's q, per query: [batch, heads, query_len] each.

            divergence  Jensen-Shannon: H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, 0 (equal) to log 2 (disjoint)
            variation   total variation: sum_j |p - q| / 2, 0 to 1
            cosine      sum_j p q / (|p| |q|); 0 if one of the two is fully masked

        with the sink as one more key. ``seen[:, 3].compare(seen[:, 5])`` compares two heads.

        Raises:
            ShapeError: the other has another batch size, number of heads or length.
        References:
            Lin 1991, "Divergence Measures Based on the Shannon Entropy", IEEE Transactions on Information Theory 37(1).
        """
        return self.ask(Compare(other))

    def attend(self, value: Tensor, statistics: Sequence[Statistic[Any]]) -> tuple[Tensor, tuple[Any, ...]] | None:
        """The output of attention and statistics of its weights, from one pass; None if two passes are faster or
        gradients are recorded.

        Shapes: value [batch, kv_heads, key_len, value_dim] -> [batch, heads, query_len, value_dim].
        """
        every = (measures.Attended(value), *statistics)
        with without_autocast(self.grid.device):
            by_tiles = self.grid.device.type == "cpu" and not compiled.supports(self.call)
            plan = passes.whole_rows_for(self.call, every, tuning.MAX_ATTENDED_KEYS) if by_tiles else None
            if plan is None:
                return None
            (output, *results), lse = passes.gather(self.call, every, plan=plan)
        self._keep(lse)
        return output.to(value.dtype), tuple(results)


@hinted(hints.ATTENTION)
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
    """The weights of an attention call, from its query and key, without computing its output.

    Takes the arguments of `attention` except value, dropout and kernel, and raises the same errors.

    Shapes: query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim].
    Args:
        lse: [batch, heads, query_len], float32 or wider, as `attention_with_lse` returns it; None: computed when
            needed. If gradients are recorded, an lse without a graph is recomputed.
    """
    call = check_call("observe", query, key, key, mask, bias, scale, softcap, sink, additive, wants_lse=True)
    if lse is not None:
        check_floating("observe", "lse", lse, "[batch, heads, query_len]")
        batch, heads, query_len, _, device = call.scoring.grid
        if lse.shape != (batch, heads, query_len):
            raise ShapeError(f"observe: lse must be [{batch=}, {heads=}, {query_len=}], got {list(lse.shape)}")
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"observe: lse must be float32 or wider, as attention_with_lse gives it, got {kind(lse)}")
        if lse.device != device:
            raise ValueError(f"observe: lse is on {lse.device}, the call runs on {device}")
    return Observation(query, key, call.scoring, lse)

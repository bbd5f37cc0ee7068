"""The object that users ask: the weights of one attention call, and `observe`, which makes it.

Each method is one statistic, or one rectangle; how they are computed stands above. An answer and its definition for
readers stand here.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from regard import hints
from regard.biases import Bias
from regard.functional import check_call
from regard.hints import hinted
from regard.masks import Mask
from regard.numerics import exp, finite_lse, without_autocast
from regard.observation import passes, tuning
from regard.observation.comparing import Compare, Comparison
from regard.observation.images import Image, Pyramid
from regard.observation.lse import settled, streamed_lse
from regard.observation.measures import (
    Attended,
    Distance,
    Distances,
    Entropy,
    Largest,
    Mass,
    MaxScore,
    Received,
    Share,
    Spread,
    Top,
    Viewers,
    Visible,
)
from regard.observation.observed import ObservedCall
from regard.observation.spans import Selection, Span, chosen_of, refuse_many, span_of
from regard.observation.statistic import Result, Statistic, check_statistics
from regard.observation.streaming import Progress, silent
from regard.scores import Additive, Scoring
from regard.shapes import Grid, ShapeError, as_bytes, bytes_of, check_floating, kind


class Observation:
    """The weights of one attention call, to be asked about.

    Made by `observe`, or by a recording. Statistics are [batch, heads, query_len] (or key_len, where said), exact, and
    take one pass over the tiles that the mask does not call empty; `gather` takes one pass for several of them. Where
    query, key, bias, sink or additive want a gradient, all of them are differentiable at O(length) memory.

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
        """The call as data, and its lse as soon as it is known."""

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
        """What a score is: scale, softcap, bias, mask, sink, similarity."""
        return self.call.scoring

    @property
    def grid(self) -> Grid:
        """Batch, heads, query_len and key_len."""
        return self.call.grid

    @property
    def behind(self) -> int:
        """How far query 0 stands behind key 0: the last query meets the last key."""
        return self.call.behind

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of each query's scores (and sink): [batch, heads, query_len]; computed once, when needed."""
        lse = self.settled().lse
        assert lse is not None
        return lse

    def settled(self) -> ObservedCall:
        """The call with its lse; kept, unless it carries a graph, which serves one backward pass."""
        with without_autocast(self.grid.device):
            call, _ = settled(self.call)
        self._keep(call.lse)
        return call

    def _keep(self, lse: Tensor | None) -> None:
        if lse is not None and not lse.requires_grad:
            self.call = replace(self.call, lse=lse)

    def __getitem__(self, which: Selection | tuple[Selection, Selection]) -> Self:
        """Some batch rows and heads, as an observation of their own: ``seen[0]``, ``seen[:, 3]``, ``seen[0, 4:6]``.

        Both axes stay, with size 1 where one was chosen.
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
        """One head alone, as an observation with heads=1."""
        if isinstance(head, (bool, Tensor)) or not hasattr(head, "__index__") or not 0 <= head < self.grid.heads:
            raise ValueError(f"Observation.head: head must be 0 to {self.grid.heads - 1}, got {head}")
        return self[:, head]

    def scores(self, queries: Span = None, keys: Span = None) -> Tensor:
        """Scores of a rectangle, after scale, softcap, bias and mask: [batch, heads, rows, columns].

        Args:
            queries, keys: a slice or a range, None for all; refused where that is large.
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
        """Weights of a rectangle (default: all of it, refused when large): [batch, heads, rows, columns]."""
        scores = self.scores(queries, keys)
        rows = span_of(queries, self.grid.query_len)
        if self.call.lse is not None and self.call.knows_lse:
            lse = self.call.lse[:, :, rows.start : rows.stop]
        else:  # a rectangle does not need that of all queries
            lse = streamed_lse(self.call, rows)
        return exp(scores - finite_lse(lse)[..., None])

    # --- statistics ---

    def ask(self, statistic: Statistic[Result]) -> Result:
        """The answer of one statistic: of regard's, or of your own (`Statistic`)."""
        result: Result = self.gather(statistic)[0]
        return result

    def gather(self, *statistics: Statistic[Any], progress: Progress = silent) -> tuple[Any, ...]:
        """Several statistics in one pass, each as it would be alone.

        Args:
            statistics: `Entropy`, `Top`, `Received`, `Image` and regard's others, or your own (`Statistic`).
            progress: called with the queries done and all there are, over all batch rows that are gone through singly.
        Returns:
            The results in the order of the statistics.
        Raises:
            TypeError: no statistic, or something else.
        """
        check_statistics(statistics)
        with without_autocast(self.grid.device):
            results, lse = passes.gather(self.call, statistics, progress)
        self._keep(lse)
        return results

    def entropy(self) -> Tensor:
        """How widely each query spreads its weight, in nats: ``-sum_j w log w``, with the sink as one more place.

        0 where all weight is on one key, log(n) where it is even over n; 0 for a query that sees nothing.
        """
        return self.ask(Entropy())

    def top(self, count: int) -> Largest:
        """The `count` largest weights of each query and their keys, largest first; 0 and -1 where no more are seen."""
        return self.ask(Top(count))

    def received(self) -> Tensor:
        """How much weight each key gets from all queries together: [batch, heads, key_len].

        They sum to the number of queries that see something, less the sink's mass.
        """
        return self.ask(Received())

    def mean_received(self) -> Tensor:
        """The same as a mean over the queries that may see the key; 0 where none may: [batch, heads, key_len]."""
        received, viewers = self.gather(Received(), Viewers())
        mean: Tensor = received / viewers.clamp(min=1)
        return mean

    def mass(self, groups: Tensor) -> Tensor:
        """How much weight each query puts on each group of keys: [batch, heads, query_len, number of groups].

        Args:
            groups: int [key_len] or [batch, key_len], the group (0 upwards) of each key.
        """
        return self.ask(Mass(groups))

    def share(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """How much weight each query puts on the keys that a rule chooses.

        Args:
            chosen: ``chosen(query, key) -> bool``, on index tensors [rows, 1] and [1, columns]; the result broadcasts
                to [batch, heads, rows, columns].
        """
        return self.ask(Share(chosen))

    def distance(self) -> Tensor:
        """How far back each query looks on average, in tokens: ``sum_j w (i + key_len - query_len - j)``."""
        return self.ask(Distance())

    def distances(self, edges: Sequence[int] | Tensor | None = None) -> Distances:
        """How each query's weight is spread over distances: mass [batch, heads, query_len, bins].

            mass[i, b] = sum of w[i, j] with edges[b] <= i + key_len - query_len - j < edges[b + 1]

        Args:
            edges: rising whole numbers of tokens, negative for keys ahead; None: everything ahead in one bin, then
                0, 1, 2, 4, 8, ... until everything has a bin.
        """
        return self.ask(Spread(edges))

    def max_score(self) -> Tensor:
        """The largest score of each query; -inf for one that sees nothing."""
        return self.ask(MaxScore())

    def sink_mass(self) -> Tensor:
        """How much weight goes to the sink: ``exp(sink - lse)``; 0 without one."""
        return (self.call if self.scoring.sink is None else self.settled()).sink_mass

    def visible(self) -> Tensor:
        """How many keys each query may attend to: int [batch, heads, query_len]."""
        return self.ask(Visible())

    def viewers(self) -> Tensor:
        """How many queries may attend to each key: int [batch, heads, key_len]."""
        return self.ask(Viewers())

    def image(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Span = None, keys: Span = None
    ) -> Tensor:
        """The whole matrix of weights, or a rectangle of it, as a small picture: [batch, heads, rows, columns].

            max    a pixel is the largest weight of its queries and keys: nothing that is there is lost
            mean   a pixel is the mean over its queries of the weight on all its keys, so a row of pixels sums to 1
                   (less the sink's mass, and less the part of its queries that see nothing)

        Pixel (r, c) is of queries ``[r * step, (r + 1) * step)`` and keys likewise, counted from where the rectangle
        begins, with ``step = ceil(length / size)`` in each direction; the last ones may be cut short.

        Args:
            size: most pixels in either direction.
            queries, keys: the rectangle, to look closer; None for all.
        """
        return self.ask(Image(size, pool, queries, keys))

    def pyramid(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> tuple[Tensor, ...]:
        """Images of the whole matrix for zooming, from `size` down to one pixel, from one pass.

        Every image is half of the one before: its pixels cover twice as many queries and keys.
        """
        return self.ask(Pyramid(size, pool))

    def compare(self, other: "Observation") -> Comparison:
        """How far this head's weights p and another's q are apart, query by query: each [batch, heads, query_len].

            divergence  Jensen-Shannon: H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, 0 (equal) to log 2 (nothing shared)
            variation   total variation: sum_j |p - q| / 2, 0 to 1
            cosine      sum_j p q / (|p| |q|); 0 where one of them sees nothing

        with the sink as one more place. ``seen[:, 3].compare(seen[:, 5])`` compares two heads.

        Raises:
            ShapeError: the other has another batch, number of heads or length.
        References:
            Lin 1991, "Divergence Measures Based on the Shannon Entropy", IEEE Transactions on Information Theory 37(1).
        """
        return self.ask(Compare(other))

    def attend(self, value: Tensor, statistics: Sequence[Statistic[Any]]) -> tuple[Tensor, tuple[Any, ...]] | None:
        """What attention gives, and statistics of its weights, from one pass; None where two are faster or a gradient
        is wanted.

        Shapes: value [batch, kv_heads, key_len, value_dim] -> [batch, heads, query_len, value_dim].
        """
        every = (Attended(value), *statistics)
        with without_autocast(self.grid.device):
            on_cpu = self.grid.device.type == "cpu"
            plan = passes.whole_rows_for(self.call, every, tuning.MAX_ATTENDED_KEYS) if on_cpu else None
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

    Takes the arguments of `attention` except value, dropout and kernel, and raises what it raises.

    Shapes: query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim].
    Args:
        lse: [batch, heads, query_len], float32 or wider, if `attention_with_lse` has given it already; None: computed
            when needed. Where a gradient is wanted, one without a graph is computed again.
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

"""What attention did, exactly, from q, k and one number per query.

    weight[i, j] = exp(score[i, j] - lse[i])

Any weight can be had again from that, so nothing of size query_len x key_len is ever kept. A *statistic* is told every
tile of weights once and holds a few numbers per query, per key or per pixel; several statistics share one pass:

    seen = regard.observe(query, key, mask=Causal())
    entropy, top, picture = seen.gather(Entropy(), Top(8), Image(512))

`seen.entropy()` is the same thing asked alone. Tiles that the mask calls empty are skipped. What makes a pass cheap:

    weights   are 2^(log2(e) (score - lse)), where a score is a plain product 2^(q' . k') with
              q' = [scale log2(e) q, -log2(e) lse] and k' = [k, 1]: one product, one exp2
    lse       comes out of the same pass where a tile holds all that a query sees, up to `WHOLE` keys. A longer text
              needs a pass of its own; where nothing but the entropy is wanted, one fused call of attention with the
              keys as values brings both, H = lse - sum_j w s = lse - scale q . (sum_j w k_j)
    tiles     take each other's memory, and statistics are taken while a tile is in the processor's cache

If query, key or whatever else makes a score wants a gradient, every statistic is differentiable: a tile's part is
computed again in the backward pass, so an entropy penalty in a loss needs memory of O(length) too.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import hints
from regard.biases import Bias
from regard.functional import check_call
from regard.hints import hinted
from regard.indexing import Indices
from regard.kernels import Call, choose
from regard.masks import Mask, Tile
from regard.masks.planning import visible
from regard.numerics import LOG2_E, exp, grouped_matmul, upcast, zero_empty_queries, zero_unseen
from regard.scores import Additive, Scoring
from regard.shapes import (
    INTEGERS,
    Grid,
    ShapeError,
    as_bytes,
    check_floating,
    check_kind,
    check_whole,
    held,
    is_number,
    is_plain,
    kind,
    positive,
)

CELLS = 1 << 20
"""Weights in a tile on a CPU: 4 MiB in float32, small enough for the cache between one operation and the next."""

CELLS_ELSEWHERE = 1 << 25
"""Weights in a tile on a GPU, where starting an operation costs more than a cache gains."""

COLUMNS, WHOLE, ATTENDED = 2048, 16384, 4096
"""Most keys in a tile; most where it then holds all that its queries see, so that it brings their lse; and most where
it then brings attention's output too, which costs a second product. All measured on a CPU."""

SEVERAL = 4
"""Heads and batch rows from which on tiles are so wide; with fewer, half of that is faster."""

ROWS = 128
"""Queries of one head in a tile before a second head is taken into it: matrix products like rows."""

DEAREST = 1.5
"""Most cells, over those of tiles that skip what is hidden, for which tiles that hold all of a row save time."""

OVERHEAD = 1 << 15
"""Weights that could be computed in the time that a tile's calls take, measured on a CPU."""

EDGE = 64
"""Keys in the smallest rectangle that a mask is asked about: tiles begin and end at multiples of it."""

LARGEST = 1 << 26
"""Most weights or pixels that are given at once: 256 MiB in float32."""

LOW = -1e4
"""Stands for log2 of a weight of 0 in a product with that weight: 2^LOW is 0 in every dtype."""

Selection = int | slice
Place = range | slice | None
Progress = Callable[[int, int], None]
T = TypeVar("T")
Result = TypeVar("Result")


def _silent(done: int, all: int) -> None:
    """Reports nothing."""


# --- a tile -----------------------------------------------------------------------------------------------------------


class Rectangle:
    """One tile of a call, as a statistic sees it: scores and weights of some queries and keys, made when asked for.

        exponents = log2(e) (score - shift),   powers = 2^exponents,   weights = powers / total

    with shift = lse and total = 1 where lse is known, or else the largest score, and the sum over all that is seen.

    Attributes:
        total: [batch, heads, rows], once there are powers; None for 1.
        batch, heads: which batch rows and heads of the call it belongs to.
        queries, keys: which queries and keys; its tensors are [batch, heads, len(queries), len(keys)]. The next tile
            may take their memory: what is kept of them has to be computed or copied.
    """

    def __init__(
        self,
        scoring: Scoring,
        at: tuple[slice, slice],
        queries: range,
        keys: range,
        query: Tensor,
        key: Tensor,
        norm: Tensor | None,
        *,
        folded: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        """
        Args:
            scoring: of these batch rows and heads.
            norm: lse, 0 for a query that sees nothing; None: not known.
            folded: whether query @ key^T is the exponent; or, as long as lse is not known, the score.
            memory: [3, at least as many cells as the tile has], for its tensors; None: they take their own.
        """
        (self.batch, self.heads), self.queries, self.keys = at, queries, keys
        full = scoring.mask is None or scoring.mask.tile(queries, keys) is Tile.FULL
        self._scoring = replace(scoring, mask=None) if full else scoring
        self._query, self._key, self._norm, self._folded, self._memory = query, key, norm, folded, memory
        self._shift: Tensor | None = None
        self.total: Tensor | None = None
        self._seen: Tensor | None = None

    @cached_property
    def allowed(self) -> Tensor | None:
        """Who may attend to whom, broadcastable to the tile; None for everybody to everybody."""
        return self._scoring.allowed(self.queries, self.keys)

    @property
    def scores(self) -> Tensor:
        """Scores after scale, softcap, bias and mask; -inf where hidden."""
        if self._shift is None and not (self._folded and self._norm is not None):
            return self._scores
        exponents = self.exponents  # which stand where the scores stood
        assert self._shift is not None
        return exponents / LOG2_E + self._shift[..., None]

    @cached_property
    def exponents(self) -> Tensor:
        """The binary logarithms of the powers; -inf where hidden."""
        shift = self._norm
        if shift is not None and self._folded:
            self._shift = shift
            return self._product()
        if shift is None:
            shift = self._scores.amax(-1)
            if self._scoring.sink is not None:
                shift = torch.maximum(shift, self._scoring.sink[:, None].to(shift))
            shift = _finite(shift)
        exponents = torch.add(-LOG2_E * shift[..., None], self._scores, alpha=LOG2_E, out=self._take(0))
        self._shift = shift
        return exponents

    @cached_property
    def powers(self) -> Tensor:
        """Weights times total; 0 where hidden."""
        powers = torch.exp2(self.exponents, out=self._take(1))
        if self._norm is None:
            assert self._shift is not None
            total = self._seen = powers.sum(-1)
            if self._scoring.sink is not None:
                total = total + exp(self._scoring.sink[:, None].to(total) - self._shift)
            self._norm = self._shift + total.log()
            self.total = total.masked_fill(total == 0, 1.0)
        return powers

    @property
    def log2(self) -> Tensor:
        """The binary logarithm of the weights; -inf where hidden."""
        self._normalise()
        return self.exponents

    @property
    def weights(self) -> Tensor:
        """Weights; 0 where hidden."""
        self._normalise()
        return self.powers

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of its queries' scores, if it was given or the tile holds all that they see: [batch, heads,
        rows]."""
        assert self.powers is not None  # which bring it
        assert self._norm is not None
        return self._norm

    def sums(self) -> tuple[Tensor, Tensor]:
        """For a tile whose lse is not known: the largest score of each query, or of its sink; and the sum of
        exp(score - largest), -inf and 0 where nothing is seen."""
        assert self.powers is not None
        assert self._shift is not None
        assert self._seen is not None
        return self._shift.masked_fill(self._seen == 0, -math.inf), self._seen

    def negentropy(self) -> Tensor:
        """The sum of weight log2(weight) of each query: [batch, heads, rows]."""
        powers, exponents = self.powers, self.exponents
        if self.allowed is not None:
            exponents = torch.clamp(exponents, min=LOW, out=self._take(2))
        sums = torch.mul(powers, exponents, out=self._take(2)).sum(-1)
        if self.total is None:
            return sums
        assert self._seen is not None
        return (sums - self.total.log2() * self._seen) / self.total

    def rescaled(self, sums: Tensor) -> Tensor:
        """Sums of powers per query as sums of weights: [batch, heads, rows, *]."""
        return sums if self.total is None else sums / self.total.unflatten(-1, (-1, *[1] * (sums.dim() - 3)))

    def _normalise(self) -> None:
        """Makes total 1."""
        powers = self.powers
        if self.total is not None:
            assert self._shift is not None
            self.exponents.sub_(self.total.log2()[..., None])
            powers.div_(self.total[..., None])
            self._shift, self.total = self._shift + self.total.log(), None

    @cached_property
    def _scores(self) -> Tensor:
        """Scores; in memory, the exponents take their place."""
        return self._product() if self._folded else self._scoring.tile(*self._shown(), self.queries, self.keys)

    def _product(self) -> Tensor:
        """What was folded into query and key; -inf where hidden."""
        query, key = self._shown()
        product = grouped_matmul(query, key.transpose(-2, -1), out=self._take(0))
        return product if self.allowed is None else product.masked_fill_(~self.allowed, -math.inf)

    def _take(self, number: int) -> Tensor | None:
        """One of three pieces of memory of the tile's size, where there are any of it."""
        shape = *self._query.shape[:3], len(self.keys)
        if self._memory is None or self._memory.shape[1] < math.prod(shape):
            return None
        return self._memory[number, : math.prod(shape)].view(shape)

    def _shown(self) -> tuple[Tensor, Tensor]:
        """Query and key; for gradients with zeros where hidden, since 0 times NaN is NaN in a backward pass."""
        if not (self._query.requires_grad or self._key.requires_grad):
            return self._query, self._key
        return zero_empty_queries(self._query, self.allowed), zero_unseen(self._key, self.allowed)

    def count(self, dim: int) -> Tensor:
        """How many cells are allowed, along keys (-1) or queries (-2): int."""
        shape = [self._query.shape[0], self._query.shape[1], len(self.queries), len(self.keys)]
        if self.allowed is not None:
            return self.allowed.expand(shape).sum(dim)
        length = shape.pop(dim)
        return torch.full(shape, length, device=self._query.device)

    def rows(self) -> tuple[slice, slice, slice]:
        """Where its queries stand in a tensor [batch, heads, query_len, *] of the whole call."""
        return self.batch, self.heads, slice(self.queries.start, self.queries.stop)

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The queries [rows, 1] and the keys [1, columns] as numbers."""
        rows = torch.arange(self.queries.start, self.queries.stop, device=device)
        return rows[:, None], torch.arange(self.keys.start, self.keys.stop, device=device)[None, :]


# --- statistics -------------------------------------------------------------------------------------------------------


class Statistic(Generic[Result]):
    """Something that can be gathered from tiles; several of them share one pass (`Observation.gather`).

    A new one that is a sum per query or per key derives from `PerQuery` or `PerKey` and says with `of` what a tile
    adds. Others say in `start` what they hold, in `add` what a part does to it, and in `finish` what they answer.

    >>> class Squares(PerQuery):
    ...     def of(self, tile):
    ...         return tile.weights.square().sum(-1)
    >>> query = torch.zeros(1, 1, 2, 4)
    >>> observe(query, query, mask=Causal()).gather(Squares())
    (tensor([[[1.0000, 0.5000]]]),)
    """

    needs_weights: ClassVar[bool] = True
    """False for one that looks at scores or at the mask alone: lse is then not needed."""

    seen: "Observation"

    def start(self, seen: "Observation") -> None:
        """Before the first tile. A statistic is copied before it starts, so one object may be gathered many times."""
        self.seen = seen

    def area(self) -> tuple[range, range]:
        """The queries and keys that it wants to see (after `start`): all, unless said otherwise."""
        return range(self.seen.grid.query_len), range(self.seen.grid.key_len)

    def also(self) -> "tuple[Observation, ...]":
        """Other observations whose visible keys must not be skipped."""
        return ()

    def of(self, tile: Rectangle) -> Any:
        """What a tile adds: tensors computed from the tile and from nothing that changes."""
        raise NotImplementedError

    def add(self, tile: Rectangle, part: Any) -> None:
        """Takes in what `of` gave for the tile. Tiles come row by row, from left to right."""
        raise NotImplementedError

    def see(self, tile: Rectangle) -> None:
        """Both at once."""
        self.add(tile, self.of(tile))

    def finish(self) -> Result:
        """After the last tile."""
        raise NotImplementedError


class PerQuery(Statistic[Tensor]):
    """A sum for each query: ``of`` gives [batch, heads, rows, *extra], the result is [batch, heads, query_len, *extra].

    Attributes:
        extra: further axes of the result, set before or in `start`.
    """

    extra: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.total = seen._zeros(seen.grid.query_len, *self.extra, dtype=self.dtype)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        self.total[tile.rows()] += part

    def finish(self) -> Tensor:
        return self.total


class PerKey(Statistic[Tensor]):
    """A sum for each key: ``of`` gives [batch, heads, columns], the result is [batch, heads, key_len]."""

    dtype: torch.dtype | None = None

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.total = seen._zeros(seen.grid.key_len, dtype=self.dtype)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        self.total[tile.batch, tile.heads, tile.keys.start : tile.keys.stop] += part

    def finish(self) -> Tensor:
        return self.total


class Entropy(PerQuery):
    """See `Observation.entropy`."""

    def of(self, tile: Rectangle) -> Tensor:
        return tile.negentropy()

    def finish(self) -> Tensor:
        entropy = 0.0 - self.total / LOG2_E
        sink = self.seen._sink()
        if sink is not None:
            entropy = entropy + self.seen.sink_mass() * (_finite(self.seen.lse) - sink)
        return entropy.clamp(min=0.0)


class Received(PerKey):
    """See `Observation.received`."""

    def of(self, tile: Rectangle) -> Tensor:
        powers = tile.powers
        if tile.total is None:
            return powers.sum(-2)
        return (tile.total.reciprocal()[..., None, :] @ powers)[..., 0, :]


class Attended(PerQuery):
    """What attention gives: the sum of the values by weight, [batch, heads, query_len, value_dim].

    Args:
        value: [batch, kv_heads, key_len, value_dim].
    """

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def start(self, seen: "Observation") -> None:
        self.extra = (self.value.shape[-1],)
        super().start(seen)

    def of(self, tile: Rectangle) -> Tensor:
        value = _of_heads(self.value, self.seen.grid.heads, range(tile.heads.start, tile.heads.stop))
        value = upcast(value[tile.batch, :, tile.keys.start : tile.keys.stop])
        return tile.rescaled(grouped_matmul(tile.powers, zero_unseen(value, tile.allowed)))


class Visible(PerQuery):
    """See `Observation.visible`."""

    needs_weights = False
    dtype = torch.int64

    def of(self, tile: Rectangle) -> Tensor:
        return tile.count(-1)


class Viewers(PerKey):
    """See `Observation.viewers`."""

    needs_weights = False
    dtype = torch.int64

    def of(self, tile: Rectangle) -> Tensor:
        return tile.count(-2)


class Share(PerQuery):
    """See `Observation.share`."""

    def __init__(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.chosen = chosen

    def of(self, tile: Rectangle) -> Tensor:
        chosen = self.chosen(*tile.index(tile.weights.device))
        if chosen.dim() == 4:
            chosen = chosen[tile.batch] if chosen.shape[0] > 1 else chosen
            chosen = chosen[:, tile.heads] if chosen.shape[1] > 1 else chosen
        return (tile.weights * chosen).sum(-1)


class Mass(PerQuery):
    """See `Observation.mass`."""

    def __init__(self, groups: Tensor) -> None:
        if not is_plain(groups) or groups.dtype not in INTEGERS:
            raise TypeError(f"Observation.mass: groups must be an int tensor [batch, key_len], got {kind(groups)}")
        self.groups = groups

    def start(self, seen: "Observation") -> None:
        batch, key_len = seen.grid.batch, seen.grid.key_len
        groups = self.groups.expand(batch, -1) if self.groups.dim() == 1 else self.groups
        if groups.shape != (batch, key_len):
            raise ShapeError(f"Observation.mass: groups must be [{batch=}, {key_len=}], got {list(groups.shape)}")
        self.member = F.one_hot(groups.long()).to(seen.dtype)[:, None]
        self.extra = (self.member.shape[-1],)
        super().start(seen)

    def of(self, tile: Rectangle) -> Tensor:
        return tile.weights @ self.member[tile.batch, :, tile.keys.start : tile.keys.stop]


class Distance(PerQuery):
    """See `Observation.distance`."""

    def of(self, tile: Rectangle) -> Tensor:
        queries, keys = tile.index(tile.weights.device)
        # the distances themselves, not a difference of means: float32 would lose it far into a text
        return (tile.weights * (queries + self.seen.behind - keys)).sum(-1)


class Distances(NamedTuple):
    """How weight is spread over distances: edges [bins + 1], mass [batch, heads, query_len, bins]."""

    edges: Tensor
    mass: Tensor


class Spread(Statistic[Distances]):
    """See `Observation.distances`."""

    def __init__(self, edges: Sequence[int] | Tensor | None = None) -> None:
        self.given = edges

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        edges = _doubling(seen.grid.key_len, seen.grid.query_len) if self.given is None else self.given
        if not (is_plain(edges) and not edges.is_complex()) and (
            not isinstance(edges, Sequence) or not all(map(is_number, edges))
        ):
            raise TypeError(f"Observation.distances: edges must be two or more rising numbers, got {kind(edges)}")
        self.edges = torch.as_tensor(edges, device=seen.grid.device)
        if self.edges.dim() != 1 or len(self.edges) < 2 or not bool((self.edges.diff() > 0).all()):
            raise ValueError(f"Observation.distances: edges must be two or more rising numbers, got {edges}")
        self.mass = PerQuery()
        self.mass.extra = (len(self.edges) - 1,)
        self.mass.start(seen)

    def of(self, tile: Rectangle) -> Tensor:
        # every row is moved right by one place more than the row below it, so that a column holds one distance
        rows, columns = len(tile.queries), len(tile.keys)
        flat = F.pad(F.pad(tile.weights, (rows, 0)).flatten(-2), (0, rows))
        slanted = flat.unfold(-1, rows + columns, rows + columns + 1)
        first = tile.queries.start + self.seen.behind - tile.keys.start + rows
        back = first - torch.arange(rows + columns, device=self.edges.device)
        bins = torch.bucketize(back, self.edges, right=True) - 1
        member = bins[:, None] == torch.arange(len(self.edges) - 1, device=bins.device)
        return slanted @ member.to(slanted.dtype)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        self.mass.add(tile, part)

    def finish(self) -> Distances:
        return Distances(self.edges, self.mass.total)


class MaxScore(Statistic[Tensor]):
    """See `Observation.max_score`."""

    needs_weights = False

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.largest = seen._zeros(seen.grid.query_len) - math.inf

    def of(self, tile: Rectangle) -> Tensor:
        return tile.scores.detach().amax(-1)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        at = tile.rows()
        self.largest[at] = torch.maximum(self.largest[at], part)

    def finish(self) -> Tensor:
        return self.largest


class Largest(NamedTuple):
    """The keys with the largest weights of each query, largest first: both [batch, heads, query_len, count]."""

    weights: Tensor
    keys: Tensor


class Top(Statistic[Largest]):
    """See `Observation.top`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        check_whole("Observation.top", "count", self.count, least=-sys.maxsize)
        if not 1 <= self.count <= seen.grid.key_len:
            raise ValueError(f"Observation.top: count must be 1 to key_len={seen.grid.key_len}, got {self.count}")
        self.weights = seen._zeros(seen.grid.query_len, self.count)
        self.keys = seen._zeros(seen.grid.query_len, self.count, dtype=torch.int64) - 1

    def of(self, tile: Rectangle) -> Largest:
        return self._of(tile, tile.weights.detach())

    def _of(self, tile: Rectangle, weights: Tensor) -> Largest:
        # numbers from 0 on are in the order of their bits, and whole numbers are compared without a look for NaN
        bits = weights.view(torch.int64 if weights.dtype == torch.float64 else torch.int32)
        top = bits.topk(min(self.count, weights.shape[-1]), dim=-1)
        return Largest(top.values.view(weights.dtype), top.indices + tile.keys.start)

    def add(self, tile: Rectangle, part: Largest) -> None:
        at = tile.rows()
        self.weights[at], self.keys[at] = self._merged(self.weights[at], self.keys[at], part)

    def see(self, tile: Rectangle) -> None:
        weights, keys = self.weights[tile.rows()], self.keys[tile.rows()]
        if not bool(weights.any()):  # nothing is to be merged
            found = self._of(tile, tile.powers)
            weights[..., : found.keys.shape[-1]] = tile.rescaled(found.weights)
            keys[..., : found.keys.shape[-1]] = found.keys
            return
        # top-k is the dearest of all statistics: only rows where the tile holds a larger weight than those found
        rows = tile.weights.amax(-1) > weights[..., -1]
        share = float(rows.float().mean())
        if share > 0.5:  # gathering them would cost more than it saves
            self.add(tile, self.of(tile))
        elif share:
            found = self._of(tile, tile.weights[rows])
            weights[rows], keys[rows] = self._merged(weights[rows], keys[rows], found)

    def _merged(self, weights: Tensor, keys: Tensor, part: Largest) -> Largest:
        top = torch.cat([weights, part.weights], dim=-1).topk(self.count, dim=-1)
        return Largest(top.values, torch.cat([keys, part.keys], dim=-1).gather(-1, top.indices))

    def finish(self) -> Largest:
        return Largest(self.weights, self.keys.masked_fill(self.weights == 0, -1))


class Image(Statistic[Tensor]):
    """See `Observation.image`."""

    def __init__(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Place = None, keys: Place = None
    ) -> None:
        if pool not in ("max", "mean"):
            raise ValueError(f'Observation.image: pool must be "max" or "mean", got {pool!r}')
        self.size, self.pool = positive(size, "Observation.image: size"), pool
        self.queries, self.keys = queries, keys

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.places = _range(self.queries, seen.grid.query_len), _range(self.keys, seen.grid.key_len)
        self.steps = tuple(max(1, -(-len(place) // self.size)) for place in self.places)
        rows, columns = (-(-len(place) // step) for place, step in zip(self.places, self.steps, strict=True))
        _refuse(
            seen.grid.batch * seen.grid.heads * rows * columns, "pixels", "a smaller size, or for one head, seen[0, 3]"
        )
        self.pixels = seen._zeros(rows, columns)

    def area(self) -> tuple[range, range]:
        return self.places

    def of(self, tile: Rectangle) -> Tensor:
        pixels = tile.weights.detach() if self.pool == "max" else tile.weights
        for dim, place, step, inside in zip((-2, -1), self.places, self.steps, self._inside(tile), strict=True):
            first = (tile.queries, tile.keys)[dim].start
            pixels = pixels.narrow(dim, inside.start - first, len(inside))
            pixels = _pooled(pixels, inside.start - place.start, step, dim, self.pool)
        return pixels

    def add(self, tile: Rectangle, part: Tensor) -> None:
        rows, columns = (
            slice((inside.start - place.start) // step, (inside.stop - 1 - place.start) // step + 1)
            for inside, place, step in zip(self._inside(tile), self.places, self.steps, strict=True)
        )
        at = (tile.batch, tile.heads, rows, columns)
        self.pixels[at] = torch.maximum(self.pixels[at], part) if self.pool == "max" else self.pixels[at] + part

    def finish(self) -> Tensor:
        return self.mean(self.pixels, self.steps[0])

    def _inside(self, tile: Rectangle) -> tuple[range, range]:
        """The tile's queries and keys that lie in the image."""
        rows, columns = self.places
        return _overlap(tile.queries, rows), _overlap(tile.keys, columns)

    def mean(self, pixels: Tensor, step: int) -> Tensor:
        """Sums over queries as means over the queries of each row of pixels."""
        if self.pool == "max":
            return pixels
        first = torch.arange(pixels.shape[-2], device=pixels.device) * step
        return pixels / (len(self.places[0]) - first).clamp(max=step)[:, None]


class Pyramid(Statistic[tuple[Tensor, ...]]):
    """See `Observation.pyramid`."""

    def __init__(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> None:
        self.finest = Image(size, pool)

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.finest = copy.copy(self.finest)
        self.finest.start(seen)

    def of(self, tile: Rectangle) -> Tensor:
        return self.finest.of(tile)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        self.finest.add(tile, part)

    def finish(self) -> tuple[Tensor, ...]:
        pixels, step, pool = self.finest.pixels, self.finest.steps[0], self.finest.pool
        levels = [self.finest.mean(pixels, step)]
        while max(pixels.shape[-2:]) > 1:
            pixels, step = _pooled(_pooled(pixels, 0, 2, -2, pool), 0, 2, -1, pool), 2 * step
            levels.append(self.finest.mean(pixels, step))
        return tuple(levels)


class Comparison(NamedTuple):
    """How far two heads' weights are apart, query by query: each [batch, heads, query_len]."""

    divergence: Tensor
    variation: Tensor
    cosine: Tensor


class Compare(Statistic[Comparison]):
    """See `Observation.compare`."""

    def __init__(self, other: "Observation") -> None:
        self.other = other

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        check_kind("Observation.compare", "other", self.other, Observation)
        if self.other.grid != seen.grid:
            raise ShapeError(
                f"Observation.compare: both must have the same scores, got {seen.grid} and {self.other.grid}; "
                "two heads of one call are seen[:, 3].compare(seen[:, 5])"
            )
        self.with_lse, self.parts = self.other._settled(), dict[tuple[int, int], Observation]()
        self.sums = PerQuery()
        self.sums.extra = (5,)
        self.sums.start(seen)

    def also(self) -> "tuple[Observation, ...]":
        return (self.with_lse,)

    def of(self, tile: Rectangle) -> Tensor:
        first = tile.batch.start, tile.heads.start
        if first not in self.parts:
            self.parts[first] = self.with_lse[tile.batch, tile.heads]
        there = self.parts[first]._rectangle(tile.queries, tile.keys)
        p, q = tile.weights, there.weights
        middle = (p + q) / 2
        inside = p * tile.log2.clamp(min=LOW) + q * there.log2.clamp(min=LOW)
        # log2 of the smallest normal number and not of 0, which is slow, and has no gradient
        inside = inside / 2 - middle * middle.clamp(min=torch.finfo(p.dtype).tiny).log2()
        parts = (inside, (p - q).abs(), p * q, p * p, q * q)
        return torch.stack([part.sum(-1) for part in parts], dim=-1)

    def add(self, tile: Rectangle, part: Tensor) -> None:
        self.sums.add(tile, part)

    def finish(self) -> Comparison:
        divergence, variation, product, left, right = self.sums.total.unbind(-1)
        divergence = divergence / LOG2_E
        if self.seen.scoring.sink is not None or self.other.scoring.sink is not None:
            p, q = self.seen.sink_mass(), self.with_lse.sink_mass()
            middle, entr = (p + q) / 2, torch.special.entr
            divergence = divergence + entr(middle) - (entr(p) + entr(q)) / 2
            variation = variation + (p - q).abs()
            product, left, right = product + p * q, left + p * p, right + q * q
        size = (left * right).clamp(min=torch.finfo(left.dtype).tiny).sqrt()
        return Comparison(divergence.clamp(min=0.0), variation / 2, product / size)


class _LogSumExp(Statistic[Tensor]):
    """lse of some queries, without gradient."""

    needs_weights = False

    def __init__(self, queries: range) -> None:
        self.queries = queries

    def start(self, seen: "Observation") -> None:
        super().start(seen)
        self.top = seen._of_sinks()
        self.total = (self.top != -math.inf).to(self.top.dtype)

    def area(self) -> tuple[range, range]:
        return self.queries, range(self.seen.grid.key_len)

    def of(self, tile: Rectangle) -> tuple[Tensor, Tensor]:
        return tile.sums()

    def add(self, tile: Rectangle, part: tuple[Tensor, Tensor]) -> None:
        at, (top, total) = tile.rows(), part
        largest = torch.maximum(self.top[at], top)
        norm = _finite(largest)
        self.total[at] = self.total[at] * exp(self.top[at] - norm) + total * exp(top - norm)
        self.top[at] = largest

    def finish(self) -> Tensor:
        empty = self.total == 0
        lse = (_finite(self.top) + self.total.log()).masked_fill(empty, -math.inf)
        return lse[:, :, self.queries.start : self.queries.stop]


class _Total(PerQuery):
    """The sum of each query's weights, for some queries: 1, with the gradient of lse."""

    needs_weights = False

    def __init__(self, queries: range) -> None:
        self.queries = queries

    def area(self) -> tuple[range, range]:
        return self.queries, range(self.seen.grid.key_len)

    def of(self, tile: Rectangle) -> Tensor:
        return tile.weights.sum(-1)


# --- the weights of a call --------------------------------------------------------------------------------------------


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
        self.query, self.key, self.scoring = query, key, scoring
        self._lse = lse

    # --- one tile, one row, one head ---

    def __repr__(self) -> str:
        kept = self._kept()
        parts = [str(self.grid), *([] if self.scoring.mask is None else [repr(self.scoring.mask)])]
        parts += [name for name in kept if name not in ("query", "key")]
        return f"<{type(self).__name__} {', '.join(parts)}, {as_bytes(held(kept.values()))}>"

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that are held, by name."""
        return {"query": self.query, "key": self.key} | ({} if self._lse is None else {"lse": self._lse})

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
    def lse(self) -> Tensor:
        """Log-sum-exp of each query's scores (and sink): [batch, heads, query_len]; computed once, when needed."""
        lse = self._settled()._lse
        assert lse is not None
        return lse

    def __getitem__(self, which: Selection | tuple[Selection, Selection]) -> "Observation":
        """Some batch rows and heads, as an observation of their own: ``seen[0]``, ``seen[:, 3]``, ``seen[0, 4:6]``.

        Both axes stay, with size 1 where one was chosen.
        """
        rows, heads = which if isinstance(which, tuple) else (which, slice(None))
        batch, count = self.grid.batch, self.grid.heads
        chosen, of_heads = _chosen(rows, batch, "batch rows"), _chosen(heads, count, "heads")
        if len(chosen) == batch and len(of_heads) == count:
            return self
        at, cut = slice(chosen.start, chosen.stop), slice(of_heads.start, of_heads.stop)
        scoring, whole = self.scoring, self.grid
        mask, bias = scoring.mask, scoring.bias
        if len(chosen) == 1 < batch:
            whole, row, chosen = whole._replace(batch=1), chosen.start, range(1)
            mask = None if mask is None else mask.for_batch(row).bind(whole)
            bias = None if bias is None else bias.for_batch(row).bind(whole)
        grid = whole._replace(batch=len(chosen), heads=len(of_heads))
        first = range(min(1, grid.query_len)), range(min(1, grid.key_len))
        if mask is not None and _differs(mask.allowed(*first), grid):
            mask = _SelectedMask(mask, whole, chosen, of_heads)
        if bias is not None and _differs(bias.values(*first), grid):
            bias = _SelectedBias(bias, whole, chosen, of_heads)
        selected = replace(
            scoring,
            grid=grid,
            mask=mask,
            bias=bias,
            sink=None if scoring.sink is None else scoring.sink[cut],
            additive=None if scoring.additive is None else Additive(scoring.additive.v[cut]),
        )
        lse = None if self._lse is None else self._lse[at, cut]
        return Observation(self.query[at, cut], _of_heads(self.key, count, of_heads)[at], selected, lse)

    def head(self, head: int) -> "Observation":
        """One head alone, as an observation with heads=1."""
        if isinstance(head, (bool, Tensor)) or not hasattr(head, "__index__") or not 0 <= head < self.grid.heads:
            raise ValueError(f"Observation.head: head must be 0 to {self.grid.heads - 1}, got {head}")
        return self[:, head]

    def scores(self, queries: Place = None, keys: Place = None) -> Tensor:
        """Scores of a rectangle, after scale, softcap, bias and mask: [batch, heads, rows, columns].

        Args:
            queries, keys: a slice or a range, None for all; refused where that is large.
        """
        rows, columns = _range(queries, self.grid.query_len), _range(keys, self.grid.key_len)
        cells = self.grid.batch * self.grid.heads * len(rows) * len(columns)
        _refuse(
            cells, "weights", "a rectangle, weights(queries=slice(0, 64), keys=slice(0, 64)), or for a statistic: "
            "entropy(), top(8), received(), image()",
        )  # fmt: skip
        with _unrounded(self.grid.device):
            return self._rectangle(rows, columns, norm=False).scores

    def weights(self, queries: Place = None, keys: Place = None) -> Tensor:
        """Weights of a rectangle (default: all of it, refused when large): [batch, heads, rows, columns]."""
        scores = self.scores(queries, keys)
        return exp(scores - self._norm_of(_range(queries, self.grid.query_len))[..., None])

    # --- statistics ---

    def gather(self, *statistics: Statistic[Any], progress: Progress = _silent) -> tuple[Any, ...]:
        """Several statistics in one pass, each as it would be alone.

        Args:
            statistics: `Entropy`, `Top`, `Received`, `Image` and the others of this module, or your own (`Statistic`).
            progress: called with the queries done and all there are, over all batch rows that are gone through singly.
        Returns:
            The results in the order of the statistics.
        """
        with _unrounded(self.grid.device):
            return self._gathered(statistics, progress)

    def entropy(self) -> Tensor:
        """How widely each query spreads its weight, in nats: ``-sum_j w log w``, with the sink as one more place.

        0 where all weight is on one key, log(n) where it is even over n; 0 for a query that sees nothing.
        """
        return self._one(Entropy())

    def top(self, count: int) -> Largest:
        """The `count` largest weights of each query and their keys, largest first; 0 and -1 where no more are seen."""
        return self._one(Top(count))

    def received(self) -> Tensor:
        """How much weight each key gets from all queries together: [batch, heads, key_len].

        They sum to the number of queries that see something, less the sink's mass.
        """
        return self._one(Received())

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
        return self._one(Mass(groups))

    def share(self, chosen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """How much weight each query puts on the keys that a rule chooses.

        Args:
            chosen: ``chosen(query, key) -> bool``, on index tensors [rows, 1] and [1, columns]; the result broadcasts
                to [batch, heads, rows, columns].
        """
        return self._one(Share(chosen))

    def distance(self) -> Tensor:
        """How far back each query looks on average, in tokens: ``sum_j w (i + key_len - query_len - j)``."""
        return self._one(Distance())

    def distances(self, edges: Sequence[int] | Tensor | None = None) -> Distances:
        """How each query's weight is spread over distances: mass [batch, heads, query_len, bins].

            mass[i, b] = sum of w[i, j] with edges[b] <= i + key_len - query_len - j < edges[b + 1]

        Args:
            edges: rising whole numbers of tokens, negative for keys ahead; None: everything ahead in one bin, then
                0, 1, 2, 4, 8, ... until everything has a bin.
        """
        return self._one(Spread(edges))

    def max_score(self) -> Tensor:
        """The largest score of each query; -inf for one that sees nothing."""
        return self._one(MaxScore())

    def sink_mass(self) -> Tensor:
        """How much weight goes to the sink: ``exp(sink - lse)``; 0 without one."""
        norm, sink = _finite(self.lse), self._sink()
        return torch.zeros_like(norm) if sink is None else (sink - norm).exp()

    def visible(self) -> Tensor:
        """How many keys each query may attend to: int [batch, heads, query_len]."""
        return self._one(Visible())

    def viewers(self) -> Tensor:
        """How many queries may attend to each key: int [batch, heads, key_len]."""
        return self._one(Viewers())

    def image(
        self, size: int = 512, pool: Literal["max", "mean"] = "max", queries: Place = None, keys: Place = None
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
        return self._one(Image(size, pool, queries, keys))

    def pyramid(self, size: int = 1024, pool: Literal["max", "mean"] = "max") -> tuple[Tensor, ...]:
        """Images of the whole matrix for zooming, from `size` down to one pixel, from one pass.

        Every image is half of the one before: its pixels cover twice as many queries and keys.
        """
        levels: tuple[Tensor, ...] = self._one(Pyramid(size, pool))
        return levels

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
        return self._one(Compare(other))

    # --- how ---

    def attend(self, value: Tensor, statistics: Sequence[Statistic[Any]]) -> tuple[Tensor, tuple[Any, ...]] | None:
        """What attention gives, and statistics of its weights, from one pass; None where two are faster or a gradient
        is wanted.

        Shapes: value [batch, kv_heads, key_len, value_dim] -> [batch, heads, query_len, value_dim].
        """
        every = (Attended(value), *statistics)
        with _unrounded(self.grid.device):
            whole = self._in_whole_rows(every, ATTENDED) if self.grid.device.type == "cpu" else None
            if whole is None:
                return None
            output, *results = self._gathered(every, _silent, whole)
        return output.to(value.dtype), tuple(results)

    def _one(self, statistic: Statistic[Result]) -> Result:
        result: Result = self.gather(statistic)[0]
        return result

    def _gathered(
        self, statistics: Sequence[Statistic[Any]], progress: Progress, whole: "_Cut | None" = None
    ) -> tuple[Any, ...]:
        """`gather`: lse first, where it is needed, not known and not had on the way; then the pass."""
        working, entropy = self, None
        needing = [statistic for statistic in statistics if statistic.needs_weights]
        if whole is None and needing and not self._knows_lse():
            entropy_alone = all(type(statistic) is Entropy for statistic in needing)
            whole = self._in_whole_rows(statistics, COLUMNS if entropy_alone and self._is_product else WHOLE)
            if whole is None:
                working, entropy = self._with_lse(entropy_alone)
        running = [copy.copy(statistic) for statistic in statistics]
        results: dict[int, Any] = {}
        for number, statistic in enumerate(running):
            if entropy is not None and type(statistic) is Entropy:
                results[number] = entropy  # lse has brought it along
            else:
                statistic.start(working)
        asked = [statistic for number, statistic in enumerate(running) if number not in results]
        if asked:
            working._stream(asked, progress, whole)
        else:
            progress(self.grid.query_len, self.grid.query_len)
        return tuple(results[n] if n in results else running[n].finish() for n in range(len(running)))

    def _in_whole_rows(self, statistics: Sequence[Statistic[Any]], most: int) -> "_Cut | None":
        """Tiles that hold all that their queries see, and so bring lse; None where lse is better had beforehand.

        Args:
            most: keys in a tile.
        """
        if self._wants_grad() or any(type(statistic).also is not Statistic.also for statistic in statistics):
            return None
        rows, columns = range(self.grid.query_len), range(self.grid.key_len)
        across = cells = skipping = 0
        for _, mask in self._by_batch(()):
            for start in reversed(range(0, len(rows), ROWS)):  # a causal mask shows its last rows most
                queries = range(start, min(start + ROWS, len(rows)))
                tiles = [*_tiles(mask, queries, columns, max(1, len(columns)))]
                wide = len(_hull(tiles)) if tiles else 0
                if wide > most:
                    return None
                across, cells = max(across, wide), cells + wide * len(queries)
                skipping += sum(map(len, tiles)) * len(queries)
        return None if cells > DEAREST * skipping else self._cut(rows, columns, (), max(1, across))

    def _by_batch(self, others: "Sequence[Observation]") -> list[tuple[slice, Mask]]:
        """The mask of this and of other observations: of all batch rows, or of each where they see different keys."""
        every = (self, *others)
        batches = [slice(0, self.grid.batch)]
        if any(seen.scoring.mask is not None and seen.scoring.mask.varies_by_batch for seen in every):
            batches = [slice(row, row + 1) for row in range(self.grid.batch)]
        found = []
        for at in batches:
            first, *more = (seen[at].scoring.mask_or_everything for seen in every)
            for mask in more:
                first = first | mask
            found.append((at, first))
        return found

    def _cut(self, rows: range, columns: range, others: "Sequence[Observation]", whole: int | None = None) -> "_Cut":
        """How an area is cut into tiles.

        Args:
            others: observations whose visible keys must not be skipped either.
            whole: the most keys between the first and the last that `ROWS` queries see, for tiles that hold all of
                that; None: tiles that skip what is hidden.
        """
        batch, heads = self.grid.batch, self.grid.heads
        cells = CELLS if self.grid.device.type == "cpu" else CELLS_ELSEWHERE
        across = whole
        if across is None:
            widest = COLUMNS if batch * heads >= SEVERAL else COLUMNS // 2
            across = max(1, min(widest, len(columns), max(EDGE, cells // EDGE)))
        most = max(1, cells // (across * max(1, min(ROWS, len(rows)))))
        parts = self._by_batch(others)
        if len(parts) == 1 < batch and batch * heads > most:  # tiles of all batch rows would be too flat
            parts = [(slice(row, row + 1), parts[0][1]) for row in range(batch)]
        together = batch if len(parts) == 1 else 1
        held = heads if together * heads <= most else _heads_of_a_tile(heads, heads // self.key.shape[1], most)
        down = max(1, min(len(rows), cells // (across * together * held)))
        if whole is not None and whole < len(columns):  # others together would see more keys
            down = max(count for count in range(1, min(down, ROWS) + 1) if ROWS % count == 0)
        step = across if whole is None else max(1, len(columns))
        cut = []
        for at, mask in parts:
            high = _height(mask, rows, columns, down, step, together * held)
            queries = [range(start, min(start + high, rows.stop)) for start in range(rows.start, rows.stop, high)]
            cut.append((at, mask, queries))
        in_heads = [slice(start, min(start + held, heads)) for start in range(0, heads, held)]
        return _Cut(columns, step, in_heads, cut, together * held * down * across, whole is not None)

    def _stream(
        self, statistics: Sequence[Statistic[Any]], progress: Progress = _silent, whole: "_Cut | None" = None
    ) -> None:
        """Shows every statistic the tiles that it wants, rows from the top, each from left to right.

        Args:
            whole: tiles that bring lse, which is not known, along; None: others are cut.
        """
        areas = [statistic.area() for statistic in statistics]
        others = [other for statistic in statistics for other in statistic.also()]
        differentiable = any(seen._wants_grad() for seen in (self, *others))
        hull = [_hull([area[axis] for area in areas]) for axis in (0, 1)]
        cut = self._cut(hull[0], hull[1], others) if whole is None else whole
        lse = None if whole is None else self._of_sinks()
        # tiles take each other's memory, except where a statistic from elsewhere may keep a view of one
        memory = None
        if not differentiable and all(type(statistic).__module__ == __name__ for statistic in statistics):
            memory = torch.empty(3, cut.largest, dtype=self.dtype, device=self.grid.device)
        done, total = 0, sum(len(queries) for _, _, rows in cut.parts for queries in rows)
        for batch, mask, rows in cut.parts:
            parts = [(heads, self[batch, heads]) for heads in cut.heads] if rows else []
            prepared = [part._prepared(cut.columns, cut.step, rows) for _, part in parts]
            for number, queries in enumerate(rows):
                for keys in cut.tiles(mask, queries):
                    wanting = [
                        statistic
                        for statistic, area in zip(statistics, areas, strict=True)
                        if _overlap(queries, area[0]) and _overlap(keys, area[1])
                    ]
                    piece, first = divmod(keys.start - cut.columns.start, cut.step)
                    inside = slice(first, first + len(keys))
                    for (heads, part), (query, key, norm) in zip(parts, prepared, strict=True):
                        show = _Shown(part, (batch, heads), queries, keys, inside, wanting, memory)
                        tensors = query[number], key[piece], None if norm is None else norm[number]
                        tile = show.to_all(*tensors, differentiable)
                        if lse is not None:
                            lse[tile.rows()] = tile.lse
                done += len(queries)
                progress(done, total)
        if lse is not None:
            self._lse = lse

    def _prepared(
        self, columns: range, step: int, rows: list[range]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """Query, key and lse in the pieces that tiles are made of. Where a score is a plain product, they are folded:
        [scale log2(e) query, -log2(e) lse] . [key, 1] is the exponent, and scale query . key the score."""
        query = self.query[:, :, rows[0].start : rows[-1].stop]
        key = self.key[:, :, columns.start : columns.stop]
        norm = None if self._lse is None else _finite(self._lse[:, :, rows[0].start : rows[-1].stop])
        if self._is_product:
            query, key = upcast(query) * self.scoring.scale, upcast(key)
            if norm is not None:
                query, key = torch.cat([query, -norm[..., None]], dim=-1) * LOG2_E, F.pad(key, (0, 1), value=1.0)
        # split and not sliced: a slice's gradient is as large as the whole, a split's only as its piece
        down = [len(queries) for queries in rows]
        return query.split(down, dim=2), key.split(step, dim=2), None if norm is None else norm.split(down, dim=2)

    @property
    def _is_product(self) -> bool:
        """Whether a score is scale * query @ key^T and nothing else."""
        return self.scoring.softcap is None and self.scoring.bias is None and self.scoring.additive is None

    def _rectangle(self, queries: range, keys: range, norm: bool = True) -> Rectangle:
        """One tile of all batch rows, whatever its size."""
        query = self.query[:, :, queries.start : queries.stop]
        key = self.key[:, :, keys.start : keys.stop]
        given = self._norm_of(queries) if norm else None
        at = slice(0, self.grid.batch), slice(0, self.grid.heads)
        return Rectangle(self.scoring, at, queries, keys, query, key, given)

    def _knows_lse(self) -> bool:
        """Whether lse is there, with a graph where a gradient is wanted."""
        return self._lse is not None and (self._lse.requires_grad or not self._wants_grad())

    def _settled(self) -> "Observation":
        """This observation with its lse known; kept, unless it carries a graph, which serves one backward pass."""
        with _unrounded(self.grid.device):
            return self if self._knows_lse() else self._with_lse()[0]

    def _with_lse(self, entropy_alone: bool = False) -> "tuple[Observation, Tensor | None]":
        """This observation with its lse, and its entropy if that came along: where it is wanted and no other pass is,
        or where a gradient is, which attention's own backward pass gives at less cost."""
        if self._is_product and (entropy_alone or self._wants_grad()):
            lse, entropy = self._fused()
        else:
            lse, entropy = self._streamed(range(self.grid.query_len)), None
        settled = self if not lse.requires_grad else copy.copy(self)
        settled._lse = lse
        return settled, entropy

    def _fused(self) -> tuple[Tensor, Tensor]:
        """lse and entropy from one call of attention with the keys as values: H = lse - scale q . (sum_j w k_j)."""
        query, key = upcast(self.query), upcast(self.key)
        call = Call(query, key, key, self.scoring, None, wants_lse=True)
        attended, lse = choose(call).run(call)
        assert lse is not None
        # a query that sees nothing may hold NaN, which times 0 is NaN
        query = query.masked_fill((attended.detach() == 0).all(-1, keepdim=True), 0.0)
        entropy = _finite(lse) - self.scoring.scale * (query * attended).sum(-1)
        sink = self._sink()
        if sink is not None:
            entropy = entropy - (sink - _finite(lse)).exp() * sink
        return lse, entropy.clamp(min=0.0)

    def _norm_of(self, rows: range) -> Tensor:
        """lse of some queries, 0 for one that sees nothing: a rectangle of weights does not need that of all."""
        if self._knows_lse():
            assert self._lse is not None
            return _finite(self._lse[:, :, rows.start : rows.stop])
        return _finite(self._streamed(rows))

    def _streamed(self, rows: range) -> Tensor:
        """lse of some queries, by tiles."""
        unknown = copy.copy(self)
        unknown._lse = None  # one without the graph that is wanted
        with torch.no_grad():
            lse = unknown._one(_LogSumExp(rows))
        if not self._wants_grad():
            return lse
        # log of a sum of 1 that has the gradient: sums need nothing kept for the backward pass, a running maximum does
        known = copy.copy(self)
        known._lse = F.pad(lse, (rows.start, self.grid.query_len - rows.stop))
        total = known._one(_Total(rows))[:, :, rows.start : rows.stop]
        sink = self._sink()
        if sink is not None:
            total = total + (sink - _finite(lse)).exp()
        return lse + total.masked_fill(lse == -math.inf, 1.0).log()

    def _of_sinks(self) -> Tensor:
        """lse of queries that see nothing: the sink's logit, -inf where there is none."""
        lse = self._zeros(self.grid.query_len) - math.inf
        return lse if self.scoring.sink is None else torch.maximum(lse, self.scoring.sink.to(lse)[:, None])

    def _sink(self) -> Tensor | None:
        """The sink as a column of numbers that are finite, so that none times 0 is NaN: [heads, 1]."""
        sink = self.scoring.sink
        return None if sink is None else sink.to(self.dtype).clamp(min=-1e30)[:, None]

    def _wants_grad(self) -> bool:
        """Whether weights have a gradient to give: to query or key, or to anything that makes a score."""
        if not torch.is_grad_enabled():
            return False
        sink = self.scoring.sink
        if self.query.requires_grad or self.key.requires_grad or (sink is not None and sink.requires_grad):
            return True
        if self.scoring.additive is not None and self.scoring.additive.v.requires_grad:
            return True
        if self.scoring.bias is None:
            return False
        corner = range(min(1, self.grid.query_len)), range(min(1, self.grid.key_len))
        return self.scoring.bias.values(*corner).requires_grad

    def _zeros(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        return torch.zeros(self.grid.batch, self.grid.heads, *sizes, dtype=dtype, device=self.grid.device)


class _Cut(NamedTuple):
    """How an area is cut into tiles."""

    columns: range
    """All keys of the area."""
    step: int
    """Tiles are cut at multiples of it."""
    heads: list[slice]
    """Which heads stand in a tile together."""
    parts: list[tuple[slice, Mask, list[range]]]
    """Batch rows that stand in a tile together, their mask, and the queries that do."""
    largest: int
    """Cells in the largest tile, or more."""
    whole: bool
    """Whether a tile goes from the first to the last key that its queries see."""

    def tiles(self, mask: Mask, queries: range) -> Iterable[range]:
        """The keys of some queries' tiles, from left to right."""
        tiles = _tiles(mask, queries, self.columns, self.step)
        if not self.whole:
            return tiles
        seen = [*tiles]
        return [_hull(seen)] if seen else ()


class _Shown:
    """Shows one tile to some statistics, as often as a backward pass needs it."""

    def __init__(
        self, seen: Observation, at: tuple[slice, slice], queries: range, keys: range, inside: slice,
        to: list[Statistic[Any]], memory: Tensor | None,
    ) -> None:  # fmt: skip
        self.seen, self.at, self.queries, self.keys, self.inside, self.to = seen, at, queries, keys, inside, to
        self.memory = memory

    def tile(self, query: Tensor, key: Tensor, norm: Tensor | None) -> Rectangle:
        key, scoring, folded = key[:, :, self.inside], self.seen.scoring, self.seen._is_product
        return Rectangle(scoring, self.at, self.queries, self.keys, query, key, norm, folded=folded, memory=self.memory)

    def to_all(self, query: Tensor, key: Tensor, norm: Tensor | None, differentiable: bool) -> Rectangle:
        """Once; where a gradient is wanted, so that the backward pass does it again."""
        tile = self.tile(query, key, norm)
        if differentiable:
            found = checkpoint(self, query, key, norm, use_reentrant=False, preserve_rng_state=False)
            for statistic, part in zip(self.to, found, strict=True):
                statistic.add(tile, part)
        else:
            for statistic in self.to:
                statistic.see(tile)
        return tile

    def __call__(self, query: Tensor, key: Tensor, norm: Tensor | None) -> tuple[Any, ...]:
        tile = self.tile(query, key, norm)
        return tuple(statistic.of(tile) for statistic in self.to)


class _SelectedMask(Mask):
    """What a mask says of some batch rows and heads."""

    def __init__(self, mask: Mask, grid: Grid, rows: range, heads: range) -> None:
        self.mask, self.grid, self.rows, self.heads = mask, grid, rows, heads

    def bind(self, grid: Grid) -> Mask:
        return self  # of a mask that is bound already

    def allowed(self, queries: Indices, keys: Indices) -> Tensor:
        return _select(self.mask.allowed(queries, keys), self.rows, self.heads)

    @property
    def varies_by_batch(self) -> bool:
        return len(self.rows) > 1 and self.mask.varies_by_batch

    def for_batch(self, row: int) -> Mask:
        grid = self.grid._replace(batch=1)
        return _SelectedMask(self.mask.for_batch(self.rows[row]).bind(grid), grid, range(1), self.heads)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.mask.rule(batch + self.rows.start, head + self.heads.start, query, key)

    def breaks(self, query_len: int) -> set[int]:
        return self.mask.breaks(query_len)

    def coverage(self, rows: range, columns: range) -> Tile:
        return self.mask.tile(rows, columns)

    def __repr__(self) -> str:
        return repr(self.mask)


class _SelectedBias(Bias):
    """What a bias adds in some batch rows and heads."""

    def __init__(self, bias: Bias, grid: Grid, rows: range, heads: range) -> None:
        self.bias, self.grid, self.rows, self.heads = bias, grid, rows, heads

    def bind(self, grid: Grid) -> Bias:
        return self

    def values(self, queries: Indices, keys: Indices) -> Tensor:
        return _select(self.bias.values(queries, keys), self.rows, self.heads)

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.rule(batch + self.rows.start, head + self.heads.start, query, key)

    def for_batch(self, row: int) -> Bias:
        grid = self.grid._replace(batch=1)
        return _SelectedBias(self.bias.for_batch(self.rows[row]).bind(grid), grid, range(1), self.heads)

    def __repr__(self) -> str:
        return repr(self.bias)


def _of_heads(kv: Tensor, heads: int, chosen: range) -> Tensor:
    """The keys or values of some query heads: a view where every kv head keeps equally many of them.

    Shapes: kv [batch, kv_heads, key_len, size], for so many heads.
    """
    group = heads // kv.shape[1]
    kv_heads = [head // group for head in chosen]
    count = kv_heads[-1] - kv_heads[0] + 1
    each = len(chosen) // count
    if len(chosen) % count == 0 and all(head == kv_heads[0] + n // each for n, head in enumerate(kv_heads)):
        return kv[:, kv_heads[0] : kv_heads[-1] + 1]
    return kv[:, kv_heads]


def _heads_of_a_tile(heads: int, group: int, most: int) -> int:
    """How many heads go together: whole groups that share a kv head, as many in one tile as in the next, or an equal
    part of one group."""
    if most < group:
        return max(count for count in range(1, most + 1) if group % count == 0)
    kv_heads = heads // group
    tiles = -(-kv_heads // (most // group))
    return -(-kv_heads // tiles) * group


# --- places -----------------------------------------------------------------------------------------------------------


def _tiles(mask: Mask, queries: range, columns: range, step: int) -> Iterator[range]:
    """The keys that some of the queries may see, from left to right, cut at every `step` from the first column."""
    pending: range | None = None
    for found, _ in visible(mask, queries, columns, EDGE):
        if pending is not None and found.start == pending.stop:
            pending = range(pending.start, found.stop)
            continue
        if pending is not None:
            yield from _cut(pending, columns.start, step)
        pending = found
    if pending is not None:
        yield from _cut(pending, columns.start, step)


def _height(mask: Mask, rows: range, columns: range, most: int, across: int, heads: int) -> int:
    """Queries in a tile, for the least cost: higher tiles are fewer, and hold more that is hidden where the keys that
    are seen move on with the queries. Measured on the middle of the rows."""

    def cost(height: int) -> float:
        middle = rows.start + max(0, len(rows) - height) // 2
        tiles = [*_tiles(mask, range(middle, min(middle + height, rows.stop)), columns, across)]
        return sum(map(len, tiles)) + len(tiles) * OVERHEAD / (heads * height)

    return min((most >> n for n in range(most.bit_length()) if n == 0 or most >> n >= EDGE), key=cost)


def _cut(places: range, origin: int, step: int) -> Iterator[range]:
    """The parts of a range between multiples of `step` counted from an origin."""
    start = places.start
    while start < places.stop:
        stop = min(places.stop, start + step - (start - origin) % step)
        yield range(start, stop)
        start = stop


def _pooled(pixels: Tensor, first: int, step: int, dim: int, pool: str) -> Tensor:
    """The largest or the sum of every `step` neighbours along -2 or -1, counted from `first` places after a border."""
    if step == 1:
        return pixels
    reduce = torch.amax if pool == "max" else torch.sum
    size = pixels.shape[dim]
    front = min(-first % step, size)
    whole = (size - front) // step * step
    head, middle, tail = pixels.split([front, whole, size - front - whole], dim=dim)
    parts = [reduce(part, dim, keepdim=True) for part in (head, tail) if part.shape[dim]]
    if whole:
        parts.insert(1 if front else 0, reduce(middle.unflatten(dim, (-1, step)), dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _doubling(key_len: int, query_len: int) -> list[int]:
    """Edges: everything ahead, then 0, 1, 2, 4, ... beyond the farthest key."""
    edges = [-max(key_len, query_len), 0, 1]
    while edges[-1] < max(key_len, query_len):
        edges.append(2 * edges[-1])
    return edges


def _range(which: Place, length: int) -> range:
    """Rows or columns: a slice as Python takes it, a range as it stands, None for all."""
    if which is not None and not isinstance(which, (slice, range)):
        raise TypeError(f"Observation: rows and columns are a slice, a range or None for all, got {kind(which)}")
    chosen = range(length)[slice(None) if which is None else which] if not isinstance(which, range) else which
    if not 0 <= chosen.start <= chosen.stop <= length or chosen.step != 1:
        raise ValueError(f"Observation: rows and columns must lie in 0 to {length}, in steps of 1, got {which}")
    return chosen


def _chosen(which: Selection, length: int, what: str) -> range:
    """Batch rows or heads: a number as one of them."""
    if isinstance(which, int):
        if not -length <= which < length:
            raise IndexError(f"Observation: {what} are 0 to {length - 1}, got {which}")
        return range(which % length, which % length + 1)
    chosen = range(length)[which]
    if not chosen or chosen.step != 1:
        raise IndexError(f"Observation: choose one or more {what} of {length}, in steps of 1, got {which}")
    return chosen


def _overlap(one: range, other: range) -> range:
    """What lies in both."""
    return range(max(one.start, other.start), max(one.start, other.start, min(one.stop, other.stop)))


def _hull(places: list[range]) -> range:
    """From the first to the last of all."""
    return range(min(place.start for place in places), max(place.stop for place in places))


def _differs(cells: Tensor, grid: Grid) -> bool:
    """Whether what a mask or bias gives for one cell has batch rows or heads that a smaller grid has not."""
    return any(size not in (1, wanted) for size, wanted in zip(cells.shape[:2], grid[:2], strict=True))


def _select(cells: Tensor, rows: range, heads: range) -> Tensor:
    """Some rows and heads of [batch or 1, heads or 1, rows, columns]."""
    for axis, chosen in ((0, rows), (1, heads)):
        if cells.shape[axis] > 1:
            cells = cells.narrow(axis, chosen.start, len(chosen))
    return cells


def _unrounded(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: the dtype of the query decides, and no score is rounded on the way."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _finite(lse: Tensor) -> Tensor:
    """What to subtract from a score: 0 in place of the lse of a query that sees nothing."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _refuse(count: int, what: str, instead: str) -> None:
    if count > LARGEST:
        raise ValueError(f"Observation: {count:,} {what} at once are more than {LARGEST:,}; ask for {instead}")


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
    """The weights of an attention call, to be asked about, without the call.

    Shapes: query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim].
    Args:
        lse: [batch, heads, query_len], if `attention_with_lse` has given it already; None: computed when needed. Where
            a gradient is wanted, one without a graph is computed again.
        The rest as in `attention`.
    Raises:
        What `attention` raises.
    """
    call = check_call("observe", query, key, key, mask, bias, scale, softcap, sink, additive, 0.0, None, wants_lse=True)
    if lse is not None:
        check_floating("observe", "lse", lse, "[batch, heads, query_len]")
    if lse is not None and lse.shape != query.shape[:3]:
        batch, heads, query_len = query.shape[:3]
        raise ShapeError(f"observe: lse must be [{batch=}, {heads=}, {query_len=}], got {list(lse.shape)}")
    return Observation(query, key, call.scoring, lse)

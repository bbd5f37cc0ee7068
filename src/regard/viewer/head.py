"""One head on one text: its tiles, rows and single weights, as the page asks for them.

Every weight comes from `regard.observation`, and every score from `Scoring`, whatever the call has: mask, bias,
softcap, sink, grouped heads. What is here chooses how: cells up to `MAX_DIRECT_STEP` straight from query and key,
larger ones from a pyramid that one pass over the head makes.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.numerics import LOG2_E, finite_lse, softmax
from regard.observation import Entropy, Observation, Viewers, Visible
from regard.observation.lse import lse_of
from regard.observation.observed import ObservedCall
from regard.observation.passes import gather
from regard.observation.streaming import Progress, silent
from regard.viewer.cells import SMALLEST_MASS, Cells, Filling, Pool
from regard.viewer.codes import encode

SIDE = 256
"""Cells of a tile in each direction."""

MAX_DIRECT_STEP = 16
"""Largest cell that a tile is made of straight from query and key: 4,096 x 4,096 weights, some tens of milliseconds."""

PYRAMID_STEP = 2 * MAX_DIRECT_STEP
"""Cells of a pyramid's finest level: at 131,072 tokens 16 million of them."""

SAMPLED_QUERIES = 1
"""Queries of every row of cells that a preview looks at."""

MAX_PREVIEW_WEIGHTS = 1 << 22
"""Weights that a preview looks at: some hundredths of a second."""

MAX_EXACT_THUMB_WEIGHTS = 1 << 22
"""Weights of a head up to which its thumbnail is exact."""

LSE_QUERIES = 2048
"""Queries whose log-sum-exp is computed between two reports of progress."""


class Tile(NamedTuple):
    """Codes [rows, columns], at most SIDE x SIDE; `sampled`: how many queries of each row were looked at, None: all."""

    codes: Tensor
    sampled: int | None


class Series(NamedTuple):
    """Numbers per query, entropy and visible keys, and per key, the weight received and who may attend to it."""

    entropy: Tensor
    visible: Tensor
    received: Tensor
    viewers: Tensor


class Head:
    """One head of one batch index.

    Args:
        seen: an observation of that head and batch index alone.
    """

    def __init__(self, seen: Observation) -> None:
        assert seen.grid[:2] == (1, 1)
        self.call: ObservedCall = seen.call
        self.query_len, self.key_len = seen.grid.query_len, seen.grid.key_len
        self.levels = levels_of(self.query_len, self.key_len)
        self.pyramid: Pyramid | None = None
        self.series: Series | None = None

    # --- tiles ---

    @torch.inference_mode()
    def tile(self, level: int, row: int, column: int, pool: Pool) -> Tile:
        """One tile; a preview from some queries where the pyramid is needed and has not come so far."""
        step = 1 << level
        rows, columns = (
            range(at * SIDE * step, min((at + 1) * SIDE * step, length))
            for at, length in ((row, self.query_len), (column, self.key_len))
        )
        if self.is_direct(level):
            return Tile(self.cells(step, rows, columns, sums=pool == "mean").codes(pool)[0, 0], None)
        if self.pyramid is not None and (cells := self.pyramid.cells(step, rows, columns)) is not None:
            return Tile(cells.codes(pool)[0, 0], None)
        return Tile(self._sampled(step, rows, columns, pool), SAMPLED_QUERIES)

    def is_direct(self, level: int) -> bool:
        """Whether tiles of a level need no pyramid."""
        return 1 << level <= MAX_DIRECT_STEP

    def cells(self, step: int, rows: range, columns: range, *, sums: bool = True) -> Cells:
        """The cells of a rectangle, straight from query and key."""
        call = self._with_lse(rows)
        cells = Cells.blank(call, step, rows, columns, sums=sums and step > 1)
        gather(call, [Filling(cells, rows, columns)])
        return cells

    def _sampled(self, step: int, rows: range, columns: range, pool: Pool) -> Tensor:
        """Codes of cells [rows, columns] as the middle query of each row, or of several rows, sees them."""
        count = -(-len(rows) // step)
        several = -(-count * len(columns) // MAX_PREVIEW_WEIGHTS)
        middle = torch.arange(rows.start, rows.stop, several * step) + several * step // 2
        return self._seen_by(middle.clamp(max=rows.stop - 1), step, columns, pool).repeat_interleave(several, 0)[:count]

    def _seen_by(self, chosen: Tensor, step: int, columns: range, pool: Pool) -> Tensor:
        """Codes of rows of cells of which each is seen by one query: [len(chosen), columns]."""
        lse, keys = self.call.lse, columns if self.call.lse is not None else range(self.key_len)
        scores = self._scores(chosen, keys)
        lse = softmax(scores, self.call.scoring.sink)[1] if lse is None else lse[:, :, chosen]
        seen = scores[0, 0, :, columns.start - keys.start : columns.stop - keys.start]
        log2 = seen.sub(finite_lse(lse)[0, 0, :, None]).mul_(LOG2_E)
        cells = F.pad(log2, (0, -len(columns) % step), value=-math.inf).unflatten(1, (-1, step))
        peaks = cells.amax(-1)
        if pool == "max":
            return encode(peaks)
        return encode(cells.exp2().sum(-1).clamp(min=SMALLEST_MASS).log2().masked_fill(peaks == -math.inf, -math.inf))

    @torch.inference_mode()
    def thumb(self, size: int, pool: Pool) -> Tile:
        """The whole head in at most size x size cells, of some queries where it is large."""
        rows, columns = range(self.query_len), range(self.key_len)
        step = max(1, -(-max(self.query_len, self.key_len) // size))
        if self.query_len * self.key_len <= MAX_EXACT_THUMB_WEIGHTS:
            return Tile(self.cells(step, rows, columns, sums=pool == "mean").codes(pool)[0, 0], None)
        return Tile(self._sampled(step, rows, columns, pool), SAMPLED_QUERIES)

    # --- numbers ---

    @torch.inference_mode()
    def weights_of(self, queries: Tensor | range, dtype: torch.dtype | None = None) -> Tensor:
        """The weights of some queries on all keys: [len(queries), key_len], in float32 or wider."""
        scores = self._scores(queries, range(self.key_len), dtype)
        return softmax(scores, self.call.scoring.sink)[0][0, 0]

    @torch.inference_mode()
    def column(self, key: int) -> Tensor:
        """How much weight every query puts on one key: [query_len]."""
        call = self.settled()
        return call.tile(range(self.query_len), range(key, key + 1)).weights[0, 0, :, 0]

    @torch.inference_mode()
    def rectangle(self, queries: range, keys: range) -> Tensor:
        """Weights of a rectangle: [rows, columns]."""
        return self._with_lse(queries).tile(queries, keys).weights[0, 0]

    def hides(self, queries: range, keys: range) -> bool:
        """Whether no query of a rectangle may attend to any key in it."""
        allowed = self.call.scoring.allowed(queries, keys)
        return allowed is not None and not bool(allowed.any())

    @torch.inference_mode()
    def cell(self, query: int, key: int) -> dict[str, float | int | bool]:
        """Everything about one weight, in float64."""
        row, keys = range(query, query + 1), range(self.key_len)
        scores = self._scores(row, keys, torch.float64)
        allowed = self.call.scoring.allowed(row, keys)
        weights, lse = softmax(scores, self.call.scoring.sink)
        visible = self.key_len if allowed is None else int(allowed.expand(scores.shape).sum())
        weight, score = float(weights[0, 0, 0, key]), float(scores[0, 0, 0, key])
        hidden = score == -math.inf
        return {
            "weight": weight,
            "log2": (score - float(lse)) / math.log(2) if not hidden else -math.inf,
            "score": score,
            "lse": float(lse),
            "hidden": hidden,
            "visible": visible,
            "uniform": 1 / visible if visible else 0.0,
            "distance": query + self.call.behind - key,
        }

    def _scores(self, queries: Tensor | range, keys: range, dtype: torch.dtype | None = None) -> Tensor:
        """Scores of some queries with some keys, -inf where hidden: [1, 1, rows, columns]."""
        call = self.call
        at = queries if isinstance(queries, Tensor) else slice(queries.start, queries.stop)
        query, key = call.query[:, :, at], call.key[:, :, keys.start : keys.stop]
        if dtype is not None:
            query, key = query.to(dtype), key.to(dtype)
        return call.scoring.tile(query, key, queries, keys)

    # --- log-sum-exp ---

    def settled(self, progress: Progress = silent) -> ObservedCall:
        """The call with its log-sum-exp, which is kept."""
        if self.call.lse is None:
            parts = []
            for start in range(0, self.query_len, LSE_QUERIES):
                parts.append(lse_of(self.call, range(start, min(start + LSE_QUERIES, self.query_len))))
                progress(min(start + LSE_QUERIES, self.query_len), self.query_len)
            self.call = replace(self.call, lse=torch.cat(parts, dim=2))
        return self.call

    def _with_lse(self, rows: range) -> ObservedCall:
        """The call with the log-sum-exp of these queries at least."""
        if self.call.lse is not None or self.query_len * self.key_len <= MAX_EXACT_THUMB_WEIGHTS:
            return self.settled()
        lse = lse_of(self.call, rows)
        return replace(self.call, lse=F.pad(lse, (rows.start, self.query_len - rows.stop)))

    # --- the pass ---

    @torch.inference_mode()
    def make_pyramid(self, progress: Progress = silent) -> None:
        """One pass over the head: the pyramid, where tiles need one, and the series.

        Args:
            progress: called with the queries done and all of them; may raise to stop.
        """
        call = self.settled(lambda done, all: progress(0, all))
        self.pyramid = pyramid = Pyramid(call)

        def told(done: int, all: int) -> None:
            pyramid.done = done
            progress(done, all)

        try:
            entropy, visible, received, viewers = gather(
                call, [Entropy(), Visible(), pyramid.filling(), Viewers()], told
            )[0]
        except BaseException:
            self.pyramid = None
            raise
        pyramid.settle()
        self.series = Series(*(numbers[0, 0].float() for numbers in (entropy, visible, received, viewers)))


class Pyramid:
    """Cells of a whole head in levels of which each has cells twice as large, from one pass.

    Attributes:
        done: how many queries the pass has gone through, from the first on: their cells are there already.
    """

    def __init__(self, call: ObservedCall) -> None:
        self.done, self.all = 0, (range(call.grid.query_len), range(call.grid.key_len))
        self.levels = [Cells.blank(call, PYRAMID_STEP, *self.all, sums=True)]

    def filling(self) -> Filling:
        """What the pass has to gather."""
        return Filling(self.levels[0], *self.all)

    def settle(self) -> None:
        """After the pass: all levels."""
        self.done = len(self.all[0])
        while max(self.levels[-1].peaks.shape[-2:]) > SIDE:
            self.levels.append(self.levels[-1].coarser())

    def cells(self, step: int, rows: range, columns: range) -> Cells | None:
        """A rectangle in cells of `step`; None where they are too fine, or the pass has not come to all its queries."""
        if step < PYRAMID_STEP or rows.stop > self.done:
            return None
        level = next(level for level in reversed(self.levels) if level.step <= step)
        part = level.part(*(slice(span.start // level.step, -(-span.stop // level.step)) for span in (rows, columns)))
        while part.step < step:  # while the pass is under way there are no coarser levels
            part = part.coarser()
        return part


def levels_of(query_len: int, key_len: int) -> int:
    """How many levels of tiles a head has: in the last, one tile holds all of it."""
    levels = 1
    while max(query_len, key_len) > SIDE << (levels - 1):
        levels += 1
    return levels

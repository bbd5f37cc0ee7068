"""Bias and mask as numbers added to the scores of a strip, and the gradients of trainable biases.

A bias that depends only on the distance between key and query is one row of numbers for the whole call, and every strip
is a view into a few copies of that row; if the mask is a band, the row also holds its -inf. A bias tensor is read in
place. Any other bias is evaluated for every score.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from regard.biases import Bias, Given
from regard.diagonals import diagonal_tile, scattered_tile, sum_diagonals
from regard.graphs import concrete
from regard.indexing import indices
from regard.kernels.fused import HALF
from regard.kernels.hidden import Hidden
from regard.kernels.strips.grouping import StripPlan, keys_of
from regard.kernels.strips.plan import Kind, Strip
from regard.kernels.strips.reordering import SortedBias
from regard.masks import EVERYTHING, Band
from regard.numerics import wide
from regard.scores import Scoring
from regard.shapes import Grid


class Added:
    """What is added to the scores of a call.

    Args:
        dtype: of the query. learned: tensors of the bias that may need a gradient; those that do are in `wanted`,
            gradients in `grads`.
        by_place: whether biases of sorted tokens are read by where these lie in the tensors, instead of being
            evaluated.
        chunks: number of threads that add up gradients of the same batch index and head, each for other queries.
    Attributes:
        dtype: of what is added: 0 and -inf for a mask alone are exact in half precision, and are fewer bytes.
        row: all biases by distance, [batch or 1, heads or 1, query_len + key_len - 1], from (last query, first key) to
            (first query, last key); None if there are none. If the mask is a band, `band_is_in_row`, too.
        given: bias tensors, each with its gradient or None: [1 or chunks, batch or 1, heads or 1, query_len or 1,
            key_len or 1], a part for each thread where all queries have the numbers in common.
        reads_by_place: whether `row` and `given` are.
    """

    def __init__(
        self,
        scoring: Scoring,
        plan: StripPlan,
        dtype: torch.dtype,
        learned: Iterable[Tensor] = (),
        *,
        by_place: bool = False,
        chunks: int = 1,
    ) -> None:
        self.scoring, self.plan = scoring, plan
        self.dtype = dtype = dtype if scoring.bias is None else wide(dtype)
        leaves: tuple[Bias, ...] = () if scoring.bias is None else tuple(scoring.bias.terms())
        self.reads_by_place = by_place and read_by_place(scoring.bias, dtype) is not None
        if self.reads_by_place:
            leaves = tuple(leaf.bias for leaf in leaves if isinstance(leaf, SortedBias))
        by_distance = [leaf for leaf in leaves if leaf.of_distance]
        self._others = [leaf for leaf in leaves if not leaf.of_distance and not isinstance(leaf, Given)]
        learned = tuple(learned)
        self.wanted = [tensor for tensor in learned if tensor.requires_grad]
        self.grads = [tensor.new_zeros(tensor.shape, dtype=wide(dtype)) for tensor in self.wanted]
        grads = iter(self.grads)
        of_learned = [next(grads) if tensor.requires_grad else None for tensor in learned]
        places = {id(tensor): n for n, tensor in enumerate(scoring.learned())} if learned else {}
        self._parts: list[tuple[Tensor, Tensor]] = []
        self.given = [
            (leaf.numbers.detach(), self._in_parts(of_learned[places[id(leaf.numbers)]], chunks) if learned else None)
            for leaf in leaves
            if isinstance(leaf, Given)
        ]
        self.grad_of_v = None if not learned or scoring.additive is None else of_learned[places[id(scoring.additive.v)]]
        with torch.set_grad_enabled(bool(self.wanted)):
            self._distances = of_all_distances(by_distance, scoring.grid, dtype)
        self._grad_distances = None
        if self._distances is not None and self._distances.requires_grad:
            self._grad_distances = torch.zeros_like(self._distances)
        self.row = None if self._distances is None else self._distances.detach()
        self.band_is_in_row = False
        band = scoring.mask
        if self.row is not None and isinstance(band, Band) and isinstance(band.offset, int):
            self.band_is_in_row = True
            inside = band.allowed(*_all_distances(scoring.grid))
            self.row = self.row.masked_fill(~inside[:, :, 0], -math.inf)

    def _in_parts(self, grad: Tensor | None, chunks: int) -> Tensor | None:
        """The gradient of a bias tensor, as in `given`."""
        if grad is None:
            return None
        if chunks == 1 or grad.shape[2] > 1:
            return grad[None]
        parts = grad.new_zeros(chunks, *grad.shape)
        self._parts.append((grad, parts))
        return parts

    @cached_property
    def hides(self) -> bool:
        """Whether a bias may hide something; looked up only where its numbers are fewer than the scores."""
        numbers = [numbers for numbers, _ in self.given] + ([] if self.row is None else [self.row])
        batch, heads, queries, keys = self.scoring.grid[:4]
        few = 2 * sum(map(Tensor.numel, numbers)) <= batch * heads * queries * keys
        if self._others or not (few and concrete(self.scoring.grid.device)):
            return bool(self._others or numbers)
        return not all(bool(some.amin() > -math.inf) for some in numbers if some.numel())  # nor NaN, which hides -inf

    def of(self, strip: Strip) -> "AddedToStrip":
        return AddedToStrip(self, strip)

    @property
    def learns_by_distance(self) -> bool:
        """Whether a gradient of `row` is wanted."""
        return self._grad_distances is not None

    @property
    def in_place(self) -> bool:
        """Whether each of `grads` is that of one bias tensor, and none follows from others."""
        totals = [total.data_ptr() for _, total in self.given if total is not None]
        one_by_one = sorted(totals) == sorted(grad.data_ptr() for grad in self.grads)
        return one_by_one and not self._parts and not self.learns_by_distance

    def pull_distances(self, grads: Tensor) -> None:
        """Adds to the gradient of `row`: [batch, heads, query_len + key_len - 1]."""
        assert self._grad_distances is not None
        _add_into(self._grad_distances, grads, slice(None))

    def finish(self) -> list[Tensor]:
        """The gradients of `wanted`."""
        for grad, parts in self._parts:
            grad += parts.sum(0)
        if self._grad_distances is not None:
            assert self._distances is not None
            self._add(torch.autograd.grad(self._distances, self.wanted, self._grad_distances, allow_unused=True))
        return self.grads

    def _add(self, more: Iterable[Tensor | None]) -> None:
        for total, one in zip(self.grads, more, strict=True):
            if one is not None:
                total += one


def is_read(numbers: Tensor, dtype: torch.dtype) -> bool:
    """Whether the compiled library reads a bias tensor where it is, for scores of a dtype."""
    return (numbers.dtype is dtype or numbers.dtype in HALF) and not numbers.is_neg()


def read_by_place(bias: Bias | None, dtype: torch.dtype) -> SortedBias | None:
    """The bias, if it is of sorted tokens and its numbers are read by where these lie in the tensors."""
    if not isinstance(bias, SortedBias):
        return None
    terms = bias.bias.terms()
    are_read = all(term.of_distance or (isinstance(term, Given) and is_read(term.numbers, dtype)) for term in terms)
    return bias if are_read else None


def tensors_of(bias: Bias, dtype: torch.dtype) -> list[Tensor]:
    """The bias tensors that are not evaluated, as in `Added.given`."""
    of_sorted = read_by_place(bias, dtype)
    terms = bias.terms() if of_sorted is None else of_sorted.bias.terms()
    return [term.numbers for term in terms if isinstance(term, Given)]


def is_of_distance(bias: Bias) -> bool:
    """Whether a bias is a function of the distance between key and query."""
    return all(term.of_distance for term in bias.terms())


def is_by_distance(scoring: Scoring) -> bool:
    """Whether all that bias and mask add is one row of numbers by distance, of which nothing wants a gradient."""
    if scoring.bias is None or not is_of_distance(scoring.bias):
        return False
    mask = scoring.mask_or_everything
    band = mask is EVERYTHING or (isinstance(mask, Band) and isinstance(mask.offset, int))
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in scoring.bias.learned())
    return band and not learns


def of_all_distances(leaves: Sequence[Bias], grid: Grid, dtype: torch.dtype) -> Tensor | None:
    """The sum of these biases for all distances of a call, from (last query, first key) to (first query, last key):
    [batch or 1, heads or 1, query_len + key_len - 1]."""
    if not leaves:
        return None
    query, keys = _all_distances(grid)
    total = None
    for leaf in leaves:
        row = leaf.values(query, keys).to(dtype)[:, :, 0]
        total = row if total is None else total + row
    return total


def _all_distances(grid: Grid) -> tuple[Tensor, Tensor]:
    """One query, and keys at every distance that occurs in the call (some lie beyond its last key)."""
    query = torch.tensor([grid.query_len - 1], device=grid.device)
    return query, torch.arange(grid.query_len + grid.key_len - 1, device=grid.device)


class AddedToStrip:
    """What is added to the scores of one strip."""

    def __init__(self, call: Added, strip: Strip) -> None:
        self.call, self.strip = call, strip
        at = strip.batch_index
        self._batch = slice(None) if at is None else slice(at, at + 1)
        self.made = self._of_others() if call._others else None
        """The biases that are evaluated for every score; with a graph, if they are trainable."""
        self._tiles: list[Tensor] | None = None
        self._grad_made: Tensor | None = None

    @cached_property
    def hidden(self) -> Hidden | None:
        """What the mask hides beyond what the row of biases by distance does."""
        is_told = self.strip.kind is not Kind.MASKED or self.call.band_is_in_row
        return None if is_told else self.call.plan.hidden(self.strip)

    @property
    def tiles(self) -> list[Tensor]:
        """Numbers that broadcast to [batch, heads, queries, keys] of the strip; all of them are added."""
        if self._tiles is None:
            call = self.call
            self._tiles = [] if call.row is None else [self._by_distance(call.row)]
            self._tiles += [self._of_given(numbers) for numbers, _ in call.given]
            if self.made is not None:
                self._tiles.append(self.made.detach())
            if self.hidden is not None:
                self._tiles.append(self.hidden.numbers(call.dtype))
        return self._tiles

    @property
    def may_hide_all(self) -> bool:
        """Whether some query may see no key at all, as far as is known without looking at numbers."""
        return self.call.hides or (self.hidden is not None and self.hidden.queries is not None)

    def turn(self, query: Tensor) -> bool:
        """Makes the tile one of the last query first, if all of it is a view of the row of numbers by distance then;
        whether it did.

        A tile that is constant along its diagonals is, with its rows reversed, a window that moves over one row. Not
        done if the tile is smaller than the strip's query and output, which have to be reversed for it: it serves all
        batch indices and all equal strips.
        """
        call, strip = self.call, self.strip
        if call.row is None or call.given or call.wanted or self.made is not None or self.hidden is not None:
            return False
        if len(strip.spans) > 1 or not strip.queries.step == strip.spans[0].step == 1:
            return False
        if len(strip.queries) + strip.keys <= 2 * query.shape[3] * query.shape[0]:
            return False
        self._tiles = [self._diagonals(call.row, strip.spans[0]).unfold(-1, strip.keys, 1)]
        return True

    def _diagonals(self, row: Tensor, span: range) -> Tensor:
        """The numbers of a row on the diagonals of the strip's queries and a span, lowest left corner first."""
        row = row[self._batch] if row.shape[0] > 1 else row
        first = span.start - self.strip.queries.stop + self.call.scoring.grid.query_len
        return row[..., first : first + len(self.strip.queries) + len(span) - 1]

    def _by_distance(self, row: Tensor) -> Tensor:
        queries, spans = self.strip.queries, self.strip.spans
        if queries.step != 1 or any(span.step != 1 for span in spans):
            row = row[self._batch] if row.shape[0] > 1 else row
            ahead = keys_of(self.strip, row.device) - indices(queries, row.device)[:, None]
            return scattered_tile(row, ahead + self.call.scoring.grid.query_len - 1)
        tiles = [diagonal_tile(self._diagonals(row, span), len(queries)) for span in spans]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-1)

    def _of_given(self, numbers: Tensor) -> Tensor:
        """The strip's part of a tensor that broadcasts to the scores of the call."""
        if numbers.shape[0] > 1:
            numbers = numbers[self._batch]
        if numbers.shape[2] > 1:
            queries = self.strip.queries
            numbers = numbers[:, :, queries.start : queries.stop : queries.step]
        if numbers.shape[3] > 1:
            spans = [numbers[..., span.start : span.stop : span.step] for span in self.strip.spans]
            numbers = spans[0] if len(spans) == 1 else torch.cat(spans, dim=-1)
        return numbers

    def _of_others(self) -> Tensor:
        """The biases that are evaluated for every score; with a graph, if they are trainable."""
        call, strip = self.call, self.strip
        grid = call.scoring.grid
        with torch.set_grad_enabled(bool(call.wanted)):
            total: Tensor | None = None
            for leaf in call._others:
                bias: Bias = leaf
                if strip.batch_index is not None:
                    bias = leaf.for_batch(strip.batch_index).bind(grid._replace(batch=1))
                values = bias.values(indices(strip.queries, grid.device), keys_of(strip, grid.device)).to(call.dtype)
                total = values if total is None else total + values
        assert total is not None
        return total

    def whole(self) -> Tensor | None:
        """The sum of all tiles: [batch or 1, heads or 1, queries, keys]."""
        if not self.tiles:
            return None
        total = self.tiles[0].to(self.call.dtype)
        for tile in self.tiles[1:]:
            total = total + tile
        return total.expand(*total.shape[:2], len(self.strip.queries), self.strip.keys)

    # --- backward ---------------------------------------------------------------------------------------------------

    def pull(self, grad_scores: Tensor, batch: int, heads: slice, rows: slice) -> None:
        """Accumulates the gradient of some scores: [heads, rows, keys] of one batch index of the strip."""
        call, strip = self.call, self.strip
        at = strip.batch_index if strip.batch_index is not None else batch
        if call._grad_distances is not None:
            self._pull_distances(grad_scores, at, heads, rows)
        for _, total in call.given:
            if total is not None:
                self._pull_given(total[0], grad_scores, at, heads, rows)
        if self.made is not None and self.made.requires_grad:
            if self._grad_made is None:
                self._grad_made = torch.zeros_like(self.made)
            _add_into(self._grad_made[batch if self.made.shape[0] > 1 else 0], grad_scores, heads, rows)

    def _pull_distances(self, grad_scores: Tensor, at: int, heads: slice, rows: slice) -> None:
        total = self.call._grad_distances
        assert total is not None
        total = total[at if total.shape[0] > 1 else 0]
        total = total[heads] if total.shape[0] > 1 else total
        queries, last = self.strip.queries[rows], self.call.scoring.grid.query_len - 1
        start = 0
        for span in self.strip.spans:
            of_span = grad_scores[..., start : start + len(span)]
            start += len(span)
            if queries.step == span.step == 1:
                first = span.start - (queries.stop - 1) + last
                sums = sum_diagonals(of_span)
                sums = sums if total.shape[0] > 1 or len(sums) == 1 else sums.sum(0, keepdim=True)
                total[:, first : first + sums.shape[-1]] += sums
            else:
                device = total.device
                places = indices(span, device) - indices(queries, device)[:, None] + last
                of_span = of_span if total.shape[0] > 1 or len(of_span) == 1 else of_span.sum(0, keepdim=True)
                total.index_add_(1, places.flatten(), of_span.flatten(1))

    def _pull_given(self, total: Tensor, grad_scores: Tensor, at: int, heads: slice, rows: slice) -> None:
        total = total[at if total.shape[0] > 1 else 0]
        queries = self.strip.queries[rows]
        if total.shape[1] > 1:
            total = total[:, queries.start : queries.stop : queries.step]
        start = 0
        for span in self.strip.spans:
            of_span = grad_scores[..., start : start + len(span)]
            start += len(span)
            _add_into(total[..., span.start : span.stop : span.step] if total.shape[2] > 1 else total, of_span, heads)

    def finish(self) -> None:
        """Backpropagates through the biases that were evaluated for every score."""
        if self._grad_made is not None:
            assert self.made is not None
            call = self.call
            call._add(torch.autograd.grad(self.made, call.wanted, self._grad_made, allow_unused=True))


def _add_into(total: Tensor, part: Tensor, heads: slice, rows: slice = slice(None)) -> None:
    """Adds [heads, rows, keys] to part of a tensor, any axis of which may be 1."""
    total = total[heads] if total.shape[0] > 1 else total
    total = total[:, rows] if total.shape[1] > 1 else total
    axes = [axis for axis in range(3) if total.shape[axis] == 1 and part.shape[axis] != 1]
    total += part.sum(axes, keepdim=True) if axes else part

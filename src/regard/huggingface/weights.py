"""The weights of one layer's call, computed on first use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.graphs import transformed
from regard.hooks import Heads, ScoringArguments
from regard.huggingface.parts import Frame, LazyGradient, LazyParts, OfPlace, Place, Sum
from regard.indexing import hull
from regard.numerics import softmax
from regard.observation import MAX_NUMBERS_AT_ONCE, Observation
from regard.reference import all_weights
from regard.scores import Scoring
from regard.validation import check_call

MAX_UNASKED_WEIGHTS = 1 << 18
"""Most weights that are computed in advance: about as many as take the time of a call."""

MAX_KEPT_WEIGHTS = 1 << 22
"""Most weights of a call that are cached after parts of them were used: 16 MiB in float32."""

MAX_KEPT_LSE_ROWS = 256
"""Most batch indices and heads of a call whose log-sum-exp is cached separately."""


class LazyWeights(LazyParts):
    """The weights of one layer's call, computed on first use: a tensor [batch, heads, query_len, key_len].

    The elements of ``outputs.attentions``. It stores query and key but no weights. Indexing by batch and head,
    ``weights[0][3]``, computes nothing; a rectangle, ``weights[0, 3, -8:, :64]``, is computed on request, at any
    length. A function of torch that needs all weights gets them if they are few, and raises an error with advice if
    not. They are the weights before dropout.

    Gradients flow through them, and a layer's output is a function of its weights, so that its gradient with respect to
    them is available as for any tensor: ``weights.retain_grad()``, `torch.autograd.grad`. That gradient is a
    `LazyGradient`, not quadratic either.

    With a cache, keys grow or are overwritten from step to step, so they are copied; or if there are fewer weights than
    keys, and no gradients are recorded, the weights are computed at once and kept instead.

    Args:
        heads, scoring: the arguments of attention.
        lse: [batch, heads, query_len], if known.
    """

    def __new__(cls, heads: Heads, scoring: ScoringArguments, lse: Tensor | None = None) -> Tensor:  # type: ignore[misc]
        call = check_call("attention", *heads, **scoring)
        return weights_of(heads.query, heads.key, call.scoring, lse, "nothing was computed with them")

    def __init__(self, heads: Heads, scoring: ScoringArguments, lse: Tensor | None = None) -> None:
        pass

    @property
    def observation(self) -> Observation:
        """The weights as an `Observation`, for statistics: entropy, largest weights, an image.

        Raises:
            ValueError: only the weights of a step after a cache are kept; or query, key or sink was overwritten.
        """
        assert isinstance(self.parts, WeightsOfCall)
        place = self.frame.whole()
        return _of_place(self.parts.observation(), place)

    def _advice(self) -> str:
        return (
            "read a part, weights[0, 3, -64:, -64:], or compute a statistic: weights.observation.entropy(), "
            ".top(8), .received()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeights({list(self.shape)}, {self.dtype})"


def weights_of(
    query: Tensor, key: Tensor, scoring: Scoring, lse: Tensor | None = None, aside: str | None = None
) -> Tensor:
    """The weights of a validated call; an ordinary tensor inside `torch.func.grad` and similar transforms, whose graphs
    do not support custom nodes.

    Args:
        aside: as in `LazyParts`.
    """
    if transformed():
        return all_weights(query, key, scoring).to(query.dtype)
    differentiable = is_differentiable(query, key, scoring)
    parts = WeightsOfCall(query, key, scoring, lse, differentiable)
    lengths = scoring.grid.query_len, scoring.grid.key_len
    frame = Frame(range(scoring.grid.batch), range(scoring.grid.heads), lengths, query.dtype, query.device)
    weights: Tensor = (
        _Weights.apply(parts, frame, aside, *parts.call[:2], *_learned(scoring))  # type: ignore[no-untyped-call]
        if differentiable and parts.call is not None
        else LazyWeights.of(parts, frame, aside)
    )
    return weights


def is_differentiable(query: Tensor, key: Tensor, scoring: Scoring) -> bool:
    """Whether the weights are differentiable, and gradients are recorded."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, *_learned(scoring)))


def _learned(scoring: Scoring) -> tuple[Tensor, ...]:
    return (() if scoring.sink is None else (scoring.sink,)) + scoring.learned()


def _of_place(seen: Observation, place: Place) -> Observation:
    return seen[place.batch.start : place.batch.stop, place.heads.start : place.heads.stop]


class WeightsOfCall:
    """Computes any rectangle of the weights of a call, and caches some.

    Access to one row is likely to be followed by its neighbours. So each access computes four times as many rows as the
    one before, and caches them, up to `MAX_KEPT_WEIGHTS` weights of a call.
    """

    def __init__(self, query: Tensor, key: Tensor, scoring: Scoring, lse: Tensor | None, differentiable: bool) -> None:
        self.grid, self.dtype = scoring.grid, query.dtype
        batch, heads, query_len, key_len, _ = scoring.grid
        self.whole = Place(range(batch), range(heads), range(query_len), range(key_len))
        self.call: tuple[Tensor, Tensor, Scoring] | None = (query, key, scoring)
        self._numbers: Tensor | None = None
        self._lse, self._versions = lse, self._versions_now()
        self._seen: dict[tuple[range, range], Observation] = {}
        self._blocks: dict[tuple[range, range], tuple[Place, Tensor]] = {}
        if query_len < key_len:
            if self.whole.cells() <= key.numel() and not differentiable:
                self._numbers, self.call = self._made(self.whole), None
            else:
                self.call = query, key.clone(), scoring
            self._versions = self._versions_now()
            self._seen.clear()

    def observation(self) -> Observation:
        """With the graph of query and key."""
        if self.call is None:
            raise ValueError(
                "regard: after a cache, of a step the weights alone are kept, not query and key; give the model all "
                "tokens at once, or record the step: with regard.record(model) as recording: ..."
            )
        if self._versions != self._versions_now():
            raise ValueError(
                "regard: these weights can no longer be computed: query, key, bias or sink was written over since (by "
                "a static cache or an optimizer); read them before the next step"
            )
        return Observation(*self.call, self._lse)

    def _versions_now(self) -> list[int]:
        """The versions of all tensors that determine the weights."""
        if self.call is None:
            return []
        query, key, scoring = self.call
        kept = query, key, scoring.sink, *scoring.learned()
        return [x._version for x in kept if x is not None and not x.is_inference()]

    def rectangle(self, place: Place) -> Tensor:
        # as ordinary tensors, even in inference mode: they may be cached, and used where gradients are recorded
        with torch.inference_mode(False), torch.no_grad():
            if self._numbers is not None:
                return self._numbers[place.within(self.whole)].clone()
            before = self._blocks.get(place[:2])
            for kept in (before, self._blocks.get(self.whole[:2])):
                if kept is not None and _holds(kept[0], place):
                    return kept[1][place.within(kept[0])].clone()
            size = self._most(place)
            if not place.cells() or len(place.queries) > size:
                return self._made(place)
            block = place._replace(keys=range(self.grid.key_len))
            if before is not None:
                rows = max(len(place.queries), min(size, 4 * len(before[0].queries)))
                start = place.queries.start // rows * rows
                stop = max(place.queries.stop, min(start + rows, self.grid.query_len))
                block = block._replace(queries=range(start, stop))
            numbers = self._made(block)
            self._keep(block, numbers)
            return numbers[place.within(block)].clone()

    def _most(self, place: Place) -> int:
        """The number of queries whose weights may be computed at once and cached, with room for every head."""
        cells = len(place.batch) * len(place.heads)
        share = MAX_KEPT_WEIGHTS * cells // max(1, self.grid.batch * self.grid.heads)
        return int(min(MAX_UNASKED_WEIGHTS, share) // max(1, cells * self.grid.key_len))

    def _keep(self, block: Place, numbers: Tensor) -> None:
        self._blocks.pop(block[:2], None)
        self._blocks[block[:2]] = block, numbers
        while len(self._blocks) > 1 and sum(kept.numel() for _, kept in list(self._blocks.values())) > MAX_KEPT_WEIGHTS:
            self._blocks.pop(next(iter(self._blocks)), None)

    def _made(self, place: Place) -> Tensor:
        """Computes a rectangle."""
        if not place.cells():
            return torch.empty(place.sizes(), dtype=self.dtype, device=self.grid.device)
        if self.call is not None and self._versions != self._versions_now():
            self.observation()
        seen = self._seen.get(place[:2])
        if seen is None:
            seen = _of_place(self.observation(), place)
            seen.call = replace(seen.call, query=seen.query.detach(), key=seen.key.detach())
            if len(self._seen) == MAX_KEPT_LSE_ROWS:
                self._seen.clear()
            self._seen[place[:2]] = seen
        if len(place.queries) == self.grid.query_len:
            lse = seen.lse  # which is then kept, for other keys
            self._lse = lse if place[:2] == self.whole[:2] else self._lse
        return seen.weights(place.queries, place.keys).to(self.dtype)


def _holds(outer: Place, place: Place) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(outer, place, strict=True))


# --- gradients --------------------------------------------------------------------------------------------------------


def is_checkpointed() -> bool:
    """Whether the caller runs inside activation checkpointing (``use_reentrant=False``), in either pass."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


class WithInputs(Protocol):
    """A term of a gradient that comes with the gradients of query, key and other inputs, in this order."""

    of_inputs: Sequence[Tensor | None]


class _Weights(torch.autograd.Function):
    """Weights as a function of query, key, sink and other trainable tensors."""

    @staticmethod
    def forward(
        ctx: Any, parts: WeightsOfCall, frame: Frame, aside: str | None, query: Tensor, key: Tensor, *learned: Tensor
    ) -> LazyWeights:
        assert parts.call is not None
        ctx.scoring, ctx.learned, ctx.held = parts.call[2], learned, None
        if is_checkpointed():  # the repeated call may not request weights, but must save the same tensors
            ctx.held = query, key
        else:
            ctx.save_for_backward(query, key)
        weights: LazyWeights = LazyWeights.of(parts, frame, aside)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key = ctx.held or ctx.saved_tensors
        inputs = query, key, *ctx.learned
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        totals: list[Tensor | None] = [None] * len(inputs)
        seen = Observation(query, key, ctx.scoring)
        for term in _joined(gradient):
            found = _through_softmax(seen, term, inputs, wanted) if isinstance(term, OfPlace) else term.of_inputs
            for n in wanted:
                part, total = found[n], totals[n]
                totals[n] = total if part is None else part if total is None else total + part
        return None, None, None, *totals


def _joined(gradient: Tensor) -> "list[OfPlace | WithInputs]":
    """The terms of a gradient, with rectangles merged into one if that is not much larger."""
    if not isinstance(gradient, LazyGradient):
        return [OfPlace(Place(*(range(size) for size in gradient.shape)), gradient)]
    terms: list[Any] = gradient.parts.terms if isinstance(gradient.parts, Sum) else [gradient.parts]
    places = [term for term in terms if isinstance(term, OfPlace)]
    if len(places) < 2:
        return terms
    around = Place(*(hull([term.place[axis] for term in places]) for axis in range(4)))
    if around.cells() > min(MAX_NUMBERS_AT_ONCE, 4 * sum(term.place.cells() for term in places)):
        return terms
    numbers = places[0].numbers.new_zeros(around.sizes())
    for term in places:
        numbers[term.place.within(around)] += term.numbers.to(numbers)
    return [*(term for term in terms if not isinstance(term, OfPlace)), OfPlace(around, numbers)]


def _through_softmax(
    seen: Observation, term: OfPlace, inputs: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor | None]:
    """The gradients of the inputs from the gradient of a rectangle of weights."""
    again = torch.is_grad_enabled()
    place = term.place
    found: list[Tensor | None] = [None] * len(inputs)
    if not place.cells():
        return found
    with torch.enable_grad():
        part = _of_place(seen, place)
        if len(place.batch) * len(place.heads) * len(place.queries) * seen.grid.key_len <= MAX_NUMBERS_AT_ONCE:
            weights = softmax(part.scores(place.queries), part.scoring.sink)[0]
            weights = weights[..., place.keys.start : place.keys.stop]
        else:
            weights = part.weights(place.queries, place.keys)
        given = torch.autograd.grad(
            weights, [inputs[n] for n in wanted], term.numbers.to(weights), create_graph=again, allow_unused=True
        )
    for n, one in zip(wanted, given, strict=True):
        found[n] = one
    return found

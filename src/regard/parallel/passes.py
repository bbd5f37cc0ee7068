"""Forward and backward pass of one rank: its own keys, then those that arrive, parcel by parcel.

While a parcel is computed, the next one is on its way. Outputs are merged by lse. In the backward pass the same parcels
travel again, and the gradients of a parcel go back to the rank that holds its keys, which adds them up in the order of
the turns: so results do not depend on who is faster.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.dropout import Dropout
from regard.indexing import overlap, placed
from regard.kernels.call import Call
from regard.kernels.strips.engine import gradient_of_sink
from regard.kernels.strips.partial import attend_part, gradients_of_part
from regard.numerics import add_sink, merge, upcast
from regard.parallel.channel import Channel, Message, Transfer
from regard.parallel.exchange import Exchange, Keys, Rectangle, Turn, at_place, count
from regard.parallel.moving import Origins, Within, of_rectangle, part_of
from regard.scores import Scoring


@dataclass(frozen=True)
class ShardedCall:
    """One rank's share of a call.

    Attributes:
        scoring: of the whole call, mask and bias bound to it. dropout: likewise.
        tag: of its messages, the first of three.
        learns_keys: whether anybody wants a gradient of key or value.
    """

    channel: Channel
    tag: int
    scoring: Scoring
    dropout: Dropout | None
    exchange: Exchange
    learns_keys: bool

    def part(self, place: Rectangle, query: Tensor, key: Tensor, value: Tensor, origins: Origins) -> Call:
        """The call of one rectangle, from its queries and from its keys among those at hand."""
        dropout = self.dropout
        if dropout is not None:
            dropout = dropout.seen_from(Within(self.scoring.grid, place.queries.start, place.keys.start))
        query, key, value = query[:, :, place.rows], key[:, :, place.columns], value[:, :, place.columns]
        return Call(query, key, value, part_of(self.scoring, place.queries, place.keys, origins), dropout, True)


class _Packed:
    """Keys and values of a parcel in one flat tensor, as they travel."""

    def __init__(self, keys: Keys, key: Tensor, value: Tensor, dtype: torch.dtype) -> None:
        self.keys, length = keys, count(keys)
        shapes = [(*like.shape[:2], length, like.shape[3]) for like in (key, value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=key.device)
        self.key, self.value = (part.view(shape) for part, shape in zip(self.flat.split(sizes), shapes, strict=True))

    def fill(self, own: Keys, key: Tensor, value: Tensor) -> "_Packed":
        """With those of the rank."""
        for places, at in _places(own, self.keys):
            self.key[:, :, at].copy_(key[:, :, places])
            self.value[:, :, at].copy_(value[:, :, places])
        return self

    def add_to(self, own: Keys, grad_key: Tensor, grad_value: Tensor) -> None:
        """Adds what arrived to the gradients of the rank's own."""
        for places, at in _places(own, self.keys):
            grad_key[:, :, places] += self.key[:, :, at]
            grad_value[:, :, places] += self.value[:, :, at]


MAX_TURNS_AHEAD = 2
"""Turns that may begin before the one at hand is computed: two where the first brings no keys."""


class Arrivals:
    """The parcels of a pass, each asked for while the one before it is computed."""

    def __init__(self, call: ShardedCall, key: Tensor, value: Tensor, tag: int) -> None:
        self._call, self._key, self._value, self._tag = call, key, value, tag
        self._begun: deque[tuple[_Packed, _Packed, Transfer]] = deque()
        self._begin_after(-1)

    def _begin_after(self, number: int) -> None:
        """Begins the turns after this one until keys have been asked for."""
        ahead = self._call.exchange.turns[number + 1 : number + 1 + MAX_TURNS_AHEAD]
        for place, turn in enumerate(ahead):
            if place == len(self._begun):
                self._begun.append(self._begin(turn))
            if turn.received:
                return

    def _begin(self, turn: Turn) -> tuple[_Packed, _Packed, Transfer]:
        key, value = self._key, self._value
        sent, received = (_Packed(keys, key, value, key.dtype) for keys in (turn.sent, turn.received))
        sent.fill(self._call.exchange.own, key, value)
        to, come = Message(turn.target, sent.flat), Message(turn.source, received.flat)
        return sent, received, self._call.channel.start([to], [come], self._tag)

    def __iter__(self) -> Iterator[tuple[Turn, _Packed]]:
        for number, turn in enumerate(self._call.exchange.turns):
            received = self._arrived()
            self._begin_after(number)
            yield turn, received

    def _arrived(self) -> _Packed:
        """The next parcel; what was sent with it is let go."""
        _, received, transfer = self._begun.popleft()
        transfer.wait()
        return received


def forward(call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and lse of the rank's queries, in float32 or wider."""
    arrivals = Arrivals(call, key, value, call.tag)
    query = upcast(query)
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = torch.full_like(query[..., 0], -torch.inf)

    def attend(places: Iterable[Rectangle], key: Tensor, value: Tensor) -> None:
        for place in places:
            part = attend_part(call.part(place, query, key, value, {}))
            merge(output[:, :, place.rows], lse[:, :, place.rows], *part)

    attend(call.exchange.rectangles, key, value)
    for turn, parcel in arrivals:
        attend(turn.rectangles, parcel.key, parcel.value)
    return (output, lse) if sink is None else add_sink(output, lse, sink)


def backward(
    call: ShardedCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor | None]]:
    """The gradients of query, key and value, of the sink, and of the learned tensors of the scoring.

    The last two are this rank's share: what its queries add to them.
    """
    arrivals = Arrivals(call, key, value, call.tag + 1)
    dtype, own = lse.dtype, call.exchange.own
    grad_query, grad_key, grad_value = (torch.zeros_like(tensor, dtype=dtype) for tensor in (query, key, value))
    learned = call.scoring.learned()
    grads = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if t.requires_grad else None
             for t in learned]  # fmt: skip
    number_of = {id(tensor): number for number, tensor in enumerate(learned)}

    def pull(places: Iterable[Rectangle], key: Tensor, value: Tensor, to_key: Tensor, to_value: Tensor) -> None:
        for place in places:
            origins: Origins = {}
            part = call.part(place, query, key, value, origins)
            of_rows = (None if t is None else t[:, :, place.rows] for t in (output, lse, grad_output, grad_lse))
            into = grad_query[:, :, place.rows], to_key[:, :, place.columns], to_value[:, :, place.columns]
            more = gradients_of_part(part, *of_rows, grads=into)  # type: ignore[arg-type]
            for tensor, grad in zip(part.scoring.learned(), more, strict=True):
                if grad is not None:
                    origin = origins.get(id(tensor))
                    total = grads[number_of[id(tensor if origin is None else origin.whole)]]
                    assert total is not None
                    total = total if origin is None else of_rectangle(total, origin.rows, origin.columns)
                    total += grad

    pull(call.exchange.rectangles, key, value, grad_key, grad_value)
    returning: tuple[_Packed, _Packed, Transfer] | None = None

    def arrived() -> None:
        if returning is not None:
            returning[2].wait()
            returning[1].add_to(own, grad_key, grad_value)

    for turn, parcel in arrivals:
        back = _Packed(parcel.keys, key, value, dtype)
        back.flat.zero_()
        pull(turn.rectangles, parcel.key, parcel.value, back.key, back.value)
        if call.learns_keys:
            arrived()
            mine = _Packed(turn.sent, key, value, dtype)
            to, come = Message(turn.source, back.flat), Message(turn.target, mine.flat)
            returning = back, mine, call.channel.start([to], [come], call.tag + 2)
    arrived()
    grad_sink = None
    if sink is not None:
        delta = (upcast(grad_output) * output).sum(-1)
        grad_sink = gradient_of_sink(sink, lse, delta if grad_lse is None else delta - grad_lse)
    return grad_query, grad_key, grad_value, grad_sink, grads


def _places(held: Keys, some: Keys) -> Iterator[tuple[slice, slice]]:
    """Where positions lie among those held, and where among the given ones."""
    for part, at in placed(some):
        for piece, place in placed(held):
            both = overlap(part, piece)
            if both:
                yield at_place(both, place - piece.start), at_place(both, at - part.start)

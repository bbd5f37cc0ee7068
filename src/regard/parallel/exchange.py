"""Which keys travel from whom to whom, and when: a plan that every rank makes alone, from the mask.

At distance d, every rank sends to the rank d places later and receives from the rank d places earlier, only what the
receiver's queries may see, in parcels of bounded size. Every rank spreads its parcels over equally many turns, few keys
as well as many: where ranks have equally much to compute at a distance, they then have in each turn, and none waits for
another that took larger steps. A mask that hides nothing makes this an all-gather in a ring; a
window, an exchange with neighbours; documents that lie whole on a rank, nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regard.indexing import placed
from regard.kernels.known import cached_by_mask
from regard.masks import Mask
from regard.parallel.seen import seen_keys, trimmed
from regard.parallel.shards import Shards

PARCELS_PER_SHARD = 8
"""Turns at each distance, and the most parcels into which the keys of one rank for another are divided: about four
parcels are held at a time, sent or received, with as many gradients in the backward pass."""

MIN_PARCEL_KEYS = 1024
"""Parcels of fewer keys take longer to begin than to travel."""

Keys = tuple[range, ...]
"""Positions of keys, in order."""


class Rectangle(NamedTuple):
    """Consecutive queries and keys that may see each other.

    Attributes:
        queries, keys: by position. rows, columns: by place among the rank's queries and the keys at hand.
    """

    queries: range
    keys: range
    rows: slice
    columns: slice


class Turn(NamedTuple):
    """What a rank sends and receives at the same time; empty for nothing.

    Attributes:
        target: the rank to which `sent` goes. source: the rank from which `received` comes.
        rectangles: of the rank's queries with what it received.
    """

    target: int
    sent: Keys
    source: int
    received: Keys
    rectangles: tuple[Rectangle, ...]


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives in a call.

    Attributes:
        own: the positions of its keys. rectangles: of its queries with them. turns: in the order of all ranks.
    """

    own: Keys
    rectangles: tuple[Rectangle, ...]
    turns: tuple[Turn, ...]

    @property
    def keys_received(self) -> int:
        """How many keys of other ranks it receives."""
        return sum(count(turn.received) for turn in self.turns)

    @property
    def keys_sent(self) -> int:
        """How many of its keys it sends, those for several ranks several times."""
        return sum(count(turn.sent) for turn in self.turns)


@cached_by_mask(maxsize=16)
def total_received(mask: Mask, queries: Shards, keys: Shards) -> int:
    """How many keys all ranks receive together, under a mask that is bound to the whole call."""
    return sum(
        count(seen_keys(mask, queries.ranges[rank], keys.of_others(rank), keys.ranks)) for rank in range(queries.ranks)
    )


def count(keys: Sequence[range]) -> int:
    """How many keys these are."""
    return sum(map(len, keys))


@cached_by_mask(maxsize=16)
def plan_exchange(mask: Mask, queries: Shards, keys: Shards, rank: int) -> Exchange:
    """What a rank sends and receives, under a mask that is bound to the whole call."""
    ranks, turns, mine = keys.ranks, [], queries.ranges[rank]
    for distance in range(1, ranks):
        target, source = (rank + distance) % ranks, (rank - distance) % ranks
        sent = seen_keys(mask, queries.ranges[target], keys.ranges[rank], ranks)
        received = seen_keys(mask, mine, keys.ranges[source], ranks)
        both = zip(parcels(sent), parcels(received), strict=True)
        turns += [
            Turn(target, out, source, into, tuple(_rectangles(mask, mine, into))) for out, into in both if out or into
        ]
    own = keys.ranges[rank]
    return Exchange(own, tuple(_rectangles(mask, mine, own)), tuple(turns))


def _rectangles(mask: Mask, queries: Keys, keys: Keys) -> Iterator[Rectangle]:
    """What queries see of keys, without rows and columns at the edges that are known to be empty."""
    for rows, row in placed(queries):
        for columns, column in placed(keys):
            found = trimmed(mask, rows, columns)
            if found is not None:
                some, seen = found
                yield Rectangle(some, seen, at_place(some, row - rows.start), at_place(seen, column - columns.start))


def at_place(positions: range, by: int) -> slice:
    """Where consecutive positions lie, so many places later."""
    return slice(positions.start + by, positions.stop + by)


def parcels(keys: Sequence[range]) -> Iterator[Keys]:
    """The same keys, for each turn its parcel: equally large ones, evenly spread, with empty turns between them."""
    total = count(keys)
    number = min(PARCELS_PER_SHARD, -(-total // MIN_PARCEL_KEYS))
    left, sent = list(reversed(keys)), 0
    for turn in range(PARCELS_PER_SHARD):
        parcel: list[range] = []
        room = -(-total * -(-(turn + 1) * number // PARCELS_PER_SHARD) // number) - sent if number else 0
        sent += room
        while room:
            part = left.pop()
            parcel.append(part[:room])
            room -= len(parcel[-1])
            if part[len(parcel[-1]) :]:
                left.append(part[len(parcel[-1]) :])
        yield tuple(parcel)

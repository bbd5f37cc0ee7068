"""What a call over many ranks would cost: bytes, FLOPs, memory, balance and time; nothing of the call is computed."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import EVERYTHING, Mask, check_mask
from regard.parallel.exchange import MIN_PARCEL_KEYS, PARCELS_PER_SHARD
from regard.parallel.heads import TENSORS, heads_pay
from regard.parallel.seen import seen_keys
from regard.parallel.shards import Shards, check_shards
from regard.parallel.timing import Speeds, seconds, sent, surplus
from regard.parallel.work import Work, tile_edge
from regard.scores import Scoring
from regard.shapes import FLOATING_DTYPES, Grid, as_bytes, check_flag, check_real, check_whole, kind


class Step(NamedTuple):
    """What happens at one distance between ranks; at distance 0, a rank's own keys.

    Attributes:
        most_bytes: the most bytes that a rank sends or receives. most_flops: the most FLOPs of a rank.
    """

    distance: int
    most_bytes: int
    most_flops: float


@dataclass(frozen=True)
class ParallelPlan:
    """What a call over many ranks would cost. Prints as a short report.

    Attributes:
        shards: which positions each rank holds.
        exchange: what travels, "keys" or "heads".
        received_keys: keys that each rank receives from others, in one pass.
        bytes_received: bytes that each rank receives: keys and values, with `backward` twice, and their gradients.
        flops: floating-point operations of each rank (a multiply-add is two), for the scores that the mask allows.
        peak_bytes: estimated peak memory of the rank that needs most, its query, key and value included.
        steps: distance by distance, for as long as anything is sent.
        seconds: time of the slowest rank. seconds_without_overlap: the same if ranks waited for keys before computing.
    """

    shards: Shards
    mask: str
    exchange: str
    backward: bool
    received_keys: tuple[int, ...]
    bytes_received: tuple[int, ...]
    flops: tuple[float, ...]
    peak_bytes: int
    steps: tuple[Step, ...]
    seconds: float
    seconds_without_overlap: float

    @property
    def balance(self) -> float:
        """FLOPs of the busiest rank over the mean; 1.0 is perfect."""
        mean = sum(self.flops) / len(self.flops)
        return max(self.flops) / mean if mean else 1.0

    def __str__(self) -> str:
        ranks, most = self.shards.ranks, max(self.bytes_received)
        total = sum(self.bytes_received)
        lines = [
            f"length  {self.shards.length:,} on {ranks:,} ranks, mask {self.mask}",
            f"passes  forward{' and backward' * self.backward}",
            f"FLOPs   {max(self.flops):.3g} on the busiest rank, {self.balance:.2f} times the mean",
            f"sent    {self.exchange}: {as_bytes(total)} in all, at most {as_bytes(most)} to one rank, "
            f"in {len(self.steps) - 1:,} steps",
            f"memory  {as_bytes(self.peak_bytes)} at most on a rank",
            f"time    {self.seconds:.3g} s, {self.seconds_without_overlap:.3g} s without overlap",
        ]
        return "\n".join(lines)


def plan(
    length: int | None = None,
    ranks: int | None = None,
    *,
    heads: int,
    head_dim: int,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    mask: Mask | None = None,
    shards: Shards | None = None,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    flops_per_second: float = 1e11,
    bytes_per_second: float = 1e9,
    latency: float = 1e-4,
    pass_seconds: float = 1e-3,
    exchange: str = "auto",
) -> ParallelPlan:
    """What `regard.parallel.attention` would cost on so many ranks; needs no process group.

        FLOPs of a score: 2 (head_dim + value_dim) forward, 2 (3 head_dim + 2 value_dim) backward

    Args:
        length, ranks: of the whole sequence and the group, for consecutive shards; or give `shards`.
        kv_heads, value_dim: None for those of query.
        mask: of the whole sequence.
        backward: whether to count a backward pass too.
        flops_per_second: of one rank in dense attention. Where a mask hides much, the same scores take longer than in
            a dense call; how much is known from the strips that the mask is cut into.
        bytes_per_second: that one rank receives while it sends as many.
        latency: seconds before a message moves anything.
        pass_seconds: what a pass takes however short the text is: ranks agree on the call, results are merged.
        exchange: "keys", "heads" or "auto", as in `attention`.
    Raises:
        ShapeError, TypeError, ValueError: sizes, shards or a mask that do not fit.

    >>> print(regard.parallel.plan(65536, 4, heads=8, head_dim=64, mask=Causal() & Window(256)))
    length  65,536 on 4 ranks, mask Band(255, 0, offset=0)
    passes  forward
    FLOPs   8.59e+09 on the busiest rank, 1.00 times the mean
    sent    keys: 3.0 MiB in all, at most 1.0 MiB to one rank, in 1 steps
    memory  132.5 MiB at most on a rank
    time    0.154 s, 0.155 s without overlap
    """
    name = "parallel.plan"
    shards = _shards(name, length, ranks, shards)
    heads, head_dim, batch = (
        check_whole(name, what, size) for what, size in (("heads", heads), ("head_dim", head_dim), ("batch", batch))
    )
    kv_heads = heads if kv_heads is None else check_whole(name, "kv_heads", kv_heads)
    value_dim = head_dim if value_dim is None else check_whole(name, "value_dim", value_dim)
    if heads % kv_heads:
        raise ValueError(f"{name}: kv_heads must divide heads, got kv_heads={kv_heads} and heads={heads}")
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"{name}: dtype must be one of float64, float32, bfloat16, float16, got {kind(dtype)}")
    check_flag(name, "backward", backward)
    for what, number in (("flops_per_second", flops_per_second), ("bytes_per_second", bytes_per_second)):
        check_real(name, what, number, 0.0)
    for what, number in (("latency", latency), ("pass_seconds", pass_seconds)):
        check_real(name, what, number, -1.0)
    if mask is not None:
        check_mask(name, "mask", mask)
    if exchange not in ("auto", "keys", "heads"):
        raise ValueError(f'{name}: exchange must be "auto", "keys" or "heads", got {kind(exchange)}')
    grid = Grid(batch, heads, shards.length, shards.length)
    bound = EVERYTHING if mask is None else mask.bind(grid)
    if exchange == "auto":
        pays = heads_pay(Scoring(grid, 1.0, mask=bound), shards, shards, kv_heads, head_dim, value_dim)
        exchange = "heads" if pays else "keys"
    sizes = _Sizes(batch, heads, kv_heads, head_dim, value_dim, dtype.itemsize)
    speeds = Speeds(flops_per_second, bytes_per_second, latency, pass_seconds)
    return (_of_heads if exchange == "heads" else _of_keys)(bound, shards, sizes, backward, speeds)


class _Sizes(NamedTuple):
    """What a call consists of beside its length; itemsize in bytes."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @property
    def of_key(self) -> int:
        """Numbers of a key and value."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def wide(self) -> int:
        """Bytes of a number of an accumulated gradient."""
        return max(4, self.itemsize)

    def flops(self, backward: bool) -> list[int]:
        """Of a score, in each pass."""
        both = 2 * (self.head_dim + self.value_dim), 2 * (3 * self.head_dim + 2 * self.value_dim)
        return [self.batch * self.heads * count for count in both[: 1 + backward]]


def _of_heads(mask: Mask, shards: Shards, sizes: _Sizes, backward: bool, speeds: Speeds) -> ParallelPlan:
    """The plan where heads are dealt over ranks: equal work, and the same numbers whatever the mask."""
    ranks, length = shards.ranks, shards.length
    whole, edge = [[range(length)] if length else []], tile_edge(length, 1)
    work = Work(mask, whole, length, edge).of(0)
    grid = Grid(sizes.batch, sizes.heads, length, length)
    slower = float(surplus(mask, whole, grid, sizes.head_dim, edge)[0])
    of_query, of_output = (sizes.batch * sizes.heads * dim for dim in (sizes.head_dim, sizes.value_dim))
    received = []
    for rank in range(ranks):
        own = shards.size(rank)
        there, back = length - own, own * (ranks - 1)
        numbers = there * (of_query + sizes.of_key) + back * of_output
        numbers += backward * (there * of_output + back * (of_query + sizes.of_key))
        received.append(numbers * sizes.itemsize // ranks)
    flops = sum(sizes.flops(backward)) * work / ranks
    took = slower * flops / speeds.flops_per_second + max(received) / speeds.bytes_per_second
    took += (1 + backward) * (TENSORS * speeds.latency + speeds.pass_seconds)
    tensors = shards.largest * (of_query + sizes.of_key + of_output) * sizes.itemsize
    return ParallelPlan(
        shards, repr(mask), "heads", backward, (0,) * ranks, tuple(received), (flops,) * ranks,
        (2 + 2 * backward) * tensors, (Step(0, 0, flops), Step(1, max(received), 0.0)), took, took,
    )  # fmt: skip


def _of_keys(bound: Mask, shards: Shards, sizes: _Sizes, backward: bool, speeds: Speeds) -> ParallelPlan:
    """The plan where keys travel to the queries that may see them."""
    scores, keys = _between(bound, shards)
    of_key, wide = sizes.of_key, sizes.wide
    bytes_of_key = of_key * sizes.itemsize, of_key * (sizes.itemsize + wide)
    passes = [(keys * size, scores * count) for size, count in zip(bytes_of_key, sizes.flops(backward), strict=False)]
    grid = Grid(sizes.batch, sizes.heads, shards.length, shards.length)
    slower = surplus(bound, shards.ranges, grid, sizes.head_dim, tile_edge(shards.length, shards.ranks))[:, None]
    took = [
        sum(seconds(moved, keys, slower * flops, speeds, overlap=way) for moved, flops in passes)
        for way in (True, False)
    ]
    # gradients return the other way: a rank receives those of the keys that it sent
    received = torch.stack([moved for moved, _ in passes]).sum((0, 2))
    if backward:
        back = of_key * wide * keys
        received += (sent(back) - back).sum(1)
    flops = torch.stack([flops for _, flops in passes]).sum(0)
    last = int((keys.sum(0) > 0).nonzero().max()) if bool((keys > 0).any()) else 0
    moved = passes[0][0]
    most = moved.maximum(sent(moved)).amax(0)
    return ParallelPlan(
        shards,
        repr(bound),
        "keys",
        backward,
        tuple(int(n) for n in keys.sum(1).tolist()),
        tuple(int(n) for n in received.tolist()),
        tuple(flops.sum(1).tolist()),
        _peak(shards, keys, sizes, backward),
        tuple(Step(d, int(most[d]), float(flops[:, d].max())) for d in range(last + 1)),
        *took,
    )


def _shards(name: str, length: int | None, ranks: int | None, shards: Shards | None) -> Shards:
    if shards is None:
        if length is None or ranks is None:
            raise TypeError(f"{name}: give length and ranks, or shards")
        return Shards.contiguous(length, ranks)
    check_shards(name, "shards", shards, shards.ranks if ranks is None and isinstance(shards, Shards) else ranks or 0)
    if length is not None and length != shards.length:
        raise ValueError(f"{name}: shards are of length {shards.length}, got length={length}")
    return shards


def _between(mask: Mask, shards: Shards) -> tuple[Tensor, Tensor]:
    """Scores of each rank with the keys at each distance, and how many it receives from there.

    Shapes: float64 [ranks, distances].
    """
    ranks = shards.ranks
    pieces = [(piece.start, piece.stop, rank) for rank, held in enumerate(shards.ranges) for piece in held]
    starts, stops, of = zip(*pieces, strict=True)
    owners = torch.tensor(of, dtype=torch.int64)
    work = Work(mask, shards.ranges, shards.length, tile_edge(shards.length, ranks))
    scores, keys = (torch.zeros(ranks, ranks, dtype=torch.float64) for _ in range(2))
    for rank in range(ranks):
        distances = (rank - owners) % ranks
        before, until = work.until(rank, starts), work.until(rank, stops)
        scores[rank].index_add_(0, distances, until - before)
        seen = seen_keys(mask, shards.ranges[rank], shards.of_others(rank), ranks, looks=False)
        keys[rank].index_add_(0, distances, _covered(seen, stops) - _covered(seen, starts))
    return scores, keys


def _covered(ranges: list[range], ends: Sequence[int]) -> Tensor:
    """How many numbers of some ranges in order lie before each end."""
    starts, before = [part.start for part in ranges], [0, *accumulate(map(len, ranges))]
    at = [bisect_right(starts, end) for end in ends]
    open_ = [max(0, ranges[n - 1].stop - end) if n else 0 for n, end in zip(at, ends, strict=True)]
    return torch.tensor([before[n] - left for n, left in zip(at, open_, strict=True)], dtype=torch.float64)


def _peak(shards: Shards, keys: Tensor, sizes: _Sizes, backward: bool) -> int:
    """A rank's tensors, and parcels on their way: two received and two sent, backward with their gradients."""
    most = max(MIN_PARCEL_KEYS, -(-shards.largest // PARCELS_PER_SHARD))
    size, wide, of_key = sizes.itemsize, sizes.wide, sizes.of_key
    of_query, of_output = (sizes.batch * sizes.heads * dim for dim in (sizes.head_dim, sizes.value_dim + 1))
    parcel = min(most, int(keys.max())) * of_key
    own = shards.largest * (of_query + of_key) * size
    output = shards.largest * of_output * wide
    if not backward:
        return own + output + 4 * parcel * size
    grads = shards.largest * (of_query + of_output + of_key) * wide
    return own + output + grads + 4 * parcel * (size + wide)

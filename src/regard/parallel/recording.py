"""A recording of a text that no process holds alone: each rank keeps its part, and one file holds all of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.hooks import Heads, ScoringArguments
from regard.parallel.agreement import agree
from regard.parallel.channel import DEFAULT_TIMEOUT, Channel, Message
from regard.parallel.functional import TAGS
from regard.parallel.sharded import over_ranks
from regard.parallel.shards import Shards
from regard.recording.reading import Reading
from regard.recording.recorder import Recording, name_of
from regard.recording.texts import Text
from regard.recording.watching import checked, layers_of, named


class ShardedRecording:
    """Query and key of every attention layer, of this rank's tokens; made by `regard.parallel.record`.

    Attributes:
        layers: the names of the layers that have attended, in the order of their first call.
    """

    def __init__(self, recording: Recording, group: object, timeout: float) -> None:
        self._recording, self._group, self._timeout = recording, group, timeout
        self._along: dict[str, tuple[Shards, Shards]] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self._recording)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one recording of the whole text, which `regard.load_recording` opens; every rank has to call it.

        The parts of a layer travel to rank 0 of the group, which holds the whole recording while it writes.

        Raises:
            ValueError: nothing was recorded, or, on rank 0, a mask that is a function is too large.
            OSError: on rank 0: the file cannot be written.
            ParallelError: on the other ranks, the same; or ranks have recorded different calls.
        """
        channel = Channel("parallel.record", self._group, self._timeout)
        texts = [(name, text) for name, of_layer in self._recording._texts.items() for text in of_layer]

        def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
            if not texts:
                raise ValueError("parallel.record: there is nothing to write; has the model run inside the with block?")
            return {"calls": [_kind(name, text) for name, text in texts]}, {}, []

        tag = TAGS * agree(channel, check, told=0).number
        whole = Recording(self._recording.model)
        for name, text in texts:
            joined = _joined(channel, tag, text, *self._along[name])
            if joined is not None:
                whole._texts.setdefault(name, []).append(joined)

        def write() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
            if channel.rank == 0:
                whole.save(path)
            return {}, {}, []

        agree(channel, write, told=0)

    def __repr__(self) -> str:
        return f"<ShardedRecording of {self._recording.model}: {len(self.layers)} layers>"


@contextmanager
def record(
    model: nn.Module,
    shards: Shards,
    *,
    source_shards: Shards | None = None,
    heads: Sequence[int] | None = None,
    values: bool = False,
    dtype: torch.dtype | None = None,
    group: object = None,
    timeout: float = DEFAULT_TIMEOUT,
    exchange: str = "auto",
) -> Iterator[ShardedRecording]:
    """`sharded`, which also keeps each attention layer's query and key, of this rank's tokens.

        with regard.parallel.record(model, shards) as recording:
            model(shards.take(tokens, rank, dim=1))
        recording.save("long.safetensors")                      # every rank calls it; rank 0 writes one file
        regard.load_recording("long.safetensors")               # anywhere: the recording of the whole text

    Args:
        model, shards, source_shards, group, timeout, exchange: as in `regard.parallel.sharded`.
        heads, values, dtype: as in `regard.record`.
    Raises:
        what `sharded` raises.
    """
    inside = checked("parallel.record", model)
    recording = Recording(name_of(inside), heads=heads, values=values, dtype=dtype)
    kept = ShardedRecording(recording, group, timeout)
    modules, own = layers_of(inside)
    names = {id(module): name for name, module in modules.items()}
    reading = Reading(inside, {id(module) for module in named(inside).values()})

    def seen(
        layer: nn.Module, calls: Heads, scoring: ScoringArguments, lse: Tensor, queries: Shards, keys: Shards
    ) -> None:
        name = names.get(id(layer))
        if name is not None:
            read = reading.of_call(layer, len(calls.query), calls.query.shape[2], calls.key.shape[2])
            recording._add(name, calls, scoring, own, lse, read)
            kept._along[name] = queries, keys

    with over_ranks(model, shards, source_shards, group, timeout, exchange, seen):
        yield kept


def _kind(name: str, text: Text) -> list[Any]:
    """What has to be equal on all ranks of a call."""
    if len(text.pieces) > 1:
        raise ValueError(
            f"parallel.record: {name} has read one text in several calls, which cannot be joined over ranks"
        )
    (piece,), (query,) = text.pieces, text.queries
    shapes = [None if t is None else [*t.shape[:2], *t.shape[3:], t.dtype] for t in (query, text.key, text.value)]
    return [name, shapes, text.lse is not None, piece.tokens is not None, text.cross]


def _joined(channel: Channel, tag: int, text: Text, queries: Shards, keys: Shards) -> Text | None:
    """One call of all ranks, on rank 0."""
    (piece,), (query,) = text.pieces, text.queries

    def joined(tensor: Tensor | None, of: Shards, number: int, dim: int = 2) -> Tensor | None:
        if tensor is None:
            return None
        mine = tensor.detach().to(channel.device).contiguous()
        if channel.rank:
            channel.start([Message(0, mine)], [], tag + number).wait()
            return None
        shapes = [(*mine.shape[:dim], of.size(rank), *mine.shape[dim + 1 :]) for rank in range(channel.ranks)]
        parts = [mine, *(mine.new_empty(shape) for shape in shapes[1:])]
        channel.start([], [Message(rank, parts[rank]) for rank in range(1, channel.ranks)], tag + number).wait()
        return of.join([part.cpu() for part in parts], dim)

    whole = joined(query, queries, 0), joined(text.key, keys, 1), joined(text.value, keys, 2)
    lse, tokens = joined(text.lse, queries, 3), joined(piece.tokens, queries, 4, dim=1)
    if whole[0] is None or whole[1] is None:
        return None
    mask = None if piece.mask is None else piece.mask.to("cpu")
    bias = None if piece.bias is None else piece.bias.to("cpu")
    sink, additive = (None if part is None else part.cpu() for part in (text.sink, text.additive))
    calls = piece._replace(query_len=queries.length, key_len=keys.length, mask=mask, bias=bias, tokens=tokens)
    return Text(
        [whole[0]], whole[1], whole[2], text.scale, text.softcap, sink, additive, [calls], text.heads, lse=lse,
        cross=text.cross,
    )  # fmt: skip

"""Pairs of texts for the model: what is read, and what is to be written.

    source    <|end|>  3  .     M  ä  r  z          what the encoder reads
    target    <|end|>  2  0  2  6                   what the decoder reads
    wanted    2        0  2  6  <|end|>             what it is to say after each of these

A batch is as long as its longest source and its longest target. So that little of it is padding, pairs of about the
same length come together: every epoch shuffles the pairs, sorts them by length within pools of `POOL` batches, cuts
these into batches and shuffles the batches. All of that follows from the seed and the number of the epoch alone, so a
run's place in its data is one integer, the number of pairs taken so far.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.masks import Padding
from regard.training.data import PerToken, seeded
from regard.training.loss import IGNORED, cross_entropy

POOL = 50
"""Batches whose pairs are sorted by length together: in the dates of the package, 4% of a source batch is padding."""


class PairBatch(NamedTuple):
    """Pairs for the model, filled up at their ends.

    Attributes:
        source: what the encoder reads, int64 [batch, source_len]. source_lengths: int64 [batch].
        target: what the decoder reads, int64 [batch, target_len].
        wanted: what it is to say after each, int64 [batch, target_len], `IGNORED` where nothing counts.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    wanted: Tensor

    def per_token(self) -> PerToken:
        """What is there for every token of the text, and of another that is read besides."""
        return ("target", "wanted"), ("source",)


class Pairs:
    """Pairs of token numbers, each opened by `<|end|>` (see the module's docstring).

    Args:
        pairs: source and target of each, without `<|end|>`.
        end_id: the number of `<|end|>`.
        seed: decides every order.

    Attributes:
        rows: how many pairs there are.
        size: tokens in an epoch, sources and targets, each one's `<|end|>` counted.
        longest: tokens of the longest row that the model reads.

    Raises:
        ValueError: there is no pair.

    >>> pairs = Pairs([([5, 6], [7]), ([8], [9, 9])])
    >>> batch = pairs.batch(0, 2)
    >>> sorted(zip(batch.source.tolist(), batch.target.tolist(), batch.wanted.tolist()))
    [([0, 5, 6], [0, 7, 0], [7, 0, -100]), ([0, 8, 0], [0, 9, 9], [9, 9, 0])]
    """

    def __init__(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], *, end_id: int = 0, seed: int = 0) -> None:
        sources, targets = _Rows(end_id), _Rows(end_id)
        for source, target in pairs:
            sources.add(source)
            targets.add(target)
        if not len(sources):
            raise ValueError("pairs: expected at least one")
        self.end_id, self.seed = end_id, seed
        self.rows = len(sources)
        self._sources, self._targets = sources.whole(), targets.whole()
        self.size = len(self._sources.tokens) + len(self._targets.tokens)
        self.longest = int(max(self._sources.lengths.max(), self._targets.lengths.max()))
        self._epoch: tuple[int, int, Tensor] | None = None

    def loss(self, model: Callable[..., Tensor], batch: PairBatch) -> Tensor:
        """Mean cross-entropy of the tokens to be written, in nats; the source's padding is seen by nobody."""
        logits = model(batch.source, batch.target, source_mask=Padding(batch.source_lengths))
        return cross_entropy(logits.flatten(0, 1), batch.wanted.flatten())

    def tokens(self, batch: PairBatch) -> int:
        """Tokens of a batch, sources and targets, without padding."""
        return int(batch.source_lengths.sum() + (batch.wanted != IGNORED).sum())

    def counted(self, batch: PairBatch) -> int:
        """Tokens to be written."""
        return int((batch.wanted != IGNORED).sum())

    def epochs(self, rows: int) -> float:
        """How often every pair has been seen after so many."""
        return rows / self.rows

    def facts(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        return {"rows": self.rows, "size": self.size, "seed": self.seed}

    def digest(self) -> str:
        """The SHA-256 of all tokens and lengths, in hexadecimal."""
        total = hashlib.sha256()
        for part in (*self._sources, *self._targets):
            total.update(part.numel().to_bytes(8, "big"))
            total.update(ctypes.string_at(part.data_ptr(), part.nbytes))
        return total.hexdigest()

    def batch(self, position: int, batch_size: int) -> PairBatch:
        """The batch at `position`, a multiple of `batch_size`; the same whichever were taken before."""
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        if position < 0 or position % batch_size:
            raise ValueError(f"position: expected a multiple of batch_size={batch_size}, 0 or more, got {position}")
        epoch, number = divmod(position // batch_size, -(-self.rows // batch_size))
        if self._epoch is None or self._epoch[:2] != (epoch, batch_size):
            self._epoch = epoch, batch_size, self._cut(epoch, batch_size)
        return self._collate(self._epoch[2][number])

    def _cut(self, epoch: int, batch_size: int) -> Tensor:
        """The epoch's batches, as numbers of pairs [batches, batch_size]; the last are filled up from the first."""
        generator = seeded(self.seed, "epoch", epoch)
        order = torch.randperm(self.rows, generator=generator)
        count = -(-self.rows // batch_size)
        order = order.repeat(-(-count * batch_size // self.rows))[: count * batch_size]
        lengths = self._sources.lengths + self._targets.lengths
        pools = [pool[lengths[pool].argsort(stable=True)] for pool in order.split(POOL * batch_size)]
        return torch.cat(pools).view(count, batch_size)[torch.randperm(count, generator=generator)]

    def _collate(self, rows: Tensor) -> PairBatch:
        source, source_lengths = self._sources.read(rows, self.end_id)
        target, target_lengths = self._targets.read(rows, self.end_id)
        beyond = torch.arange(target.shape[1]) >= target_lengths[:, None]
        end = torch.full_like(target[:, :1], self.end_id)
        wanted = torch.cat([target[:, 1:], end], dim=1).masked_fill(beyond, IGNORED)
        return PairBatch(source, source_lengths, target, wanted)


class _Table(NamedTuple):
    """Rows of tokens end to end: int32 [all], int64 [rows] and int64 [rows]."""

    tokens: Tensor
    starts: Tensor
    lengths: Tensor

    def read(self, rows: Tensor, filling: int) -> tuple[Tensor, Tensor]:
        """Some rows as long as the longest of them, and their lengths."""
        lengths, places = self.lengths[rows], torch.arange(int(self.lengths[rows].max()))
        beyond = places >= lengths[:, None]
        found = self.tokens[(self.starts[rows, None] + places).masked_fill(beyond, 0)].long()
        return found.masked_fill(beyond, filling), lengths


class _Rows:
    """A table in the making."""

    def __init__(self, end_id: int) -> None:
        self._end = torch.tensor([end_id], dtype=torch.int32)
        self._parts: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, tokens: Sequence[int]) -> None:
        self._parts.append(torch.cat([self._end, torch.tensor(tokens, dtype=torch.int32)]))

    def whole(self) -> _Table:
        lengths = torch.tensor([len(part) for part in self._parts])
        return _Table(torch.cat(self._parts), lengths.cumsum(0) - lengths, lengths)

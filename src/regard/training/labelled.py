"""Texts with labels for the model.

    tokens    <|end|>  a  b  c  .  .      what the encoder reads, filled up to the longest of the batch
    lengths   4
    label     2

A batch holds texts of about the same length: every epoch shuffles them, sorts them by length within pools of `POOL`
batches, cuts these into batches and shuffles the batches. All of that follows from the seed and the number of the epoch
alone, so a run's place in its data is one integer, the number of texts taken so far.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.masks import Padding
from regard.training.data import seeded

POOL = 50
"""Batches whose texts are sorted by length together."""


class LabelledBatch(NamedTuple):
    """Texts for the model, filled up at their ends.

    Attributes:
        tokens: int64 [batch, longest]. lengths: int64 [batch]. labels: int64 [batch].
    """

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


class Labelled:
    """Texts as token numbers, each opened by `<|end|>`, and their labels (see the module's docstring).

    Args:
        texts: token numbers of each, without `<|end|>`. labels: the number of each one's label.
        context_length: the most tokens of a text that are read.
        end_id: the number of `<|end|>`.
        seed: decides every order.

    Attributes:
        rows: how many texts there are. size: tokens in an epoch. cut: how many texts were longer than is read.

    >>> data = Labelled([[5, 6], [7]], [0, 1], context_length=8, end_id=0)
    >>> sorted(zip(data.batch(0, 2).tokens.tolist(), data.batch(0, 2).labels.tolist()))
    [([0, 5, 6], 0), ([0, 7, 0], 1)]
    """

    def __init__(
        self, texts: Sequence[Sequence[int]], labels: Sequence[int], *, context_length: int, end_id: int, seed: int = 0
    ) -> None:
        self._texts = [torch.tensor([end_id, *text][:context_length]) for text in texts]
        self._labels = torch.tensor(labels)
        self.end_id, self.seed, self.context_length = end_id, seed, context_length
        self.rows, self.size = len(self._texts), sum(map(len, self._texts))
        self.cut = sum(len(text) >= context_length for text in texts)
        self._lengths = torch.tensor([len(text) for text in self._texts])
        self._epoch: tuple[int, int, Tensor] | None = None

    def batch(self, position: int, batch_size: int) -> LabelledBatch:
        """The batch at `position`, a multiple of `batch_size`; the same whichever were taken before."""
        epoch, number = divmod(position // batch_size, -(-self.rows // batch_size))
        if self._epoch is None or self._epoch[:2] != (epoch, batch_size):
            self._epoch = epoch, batch_size, self._cut(epoch, batch_size)
        rows = self._epoch[2][number]
        tokens = pad_sequence([self._texts[row] for row in rows.tolist()], batch_first=True, padding_value=self.end_id)
        return LabelledBatch(tokens, self._lengths[rows], self._labels[rows])

    def loss(self, model: Callable[..., Tensor], batch: LabelledBatch) -> Tensor:
        return F.cross_entropy(model(batch.tokens, mask=Padding(batch.lengths)).float(), batch.labels)

    def tokens(self, batch: LabelledBatch) -> int:
        return int(batch.lengths.sum())

    def counted(self, batch: LabelledBatch) -> int:
        return len(batch.labels)

    def epochs(self, rows: int) -> float:
        return rows / self.rows

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows, "size": self.size, "seed": self.seed, "context_length": self.context_length}

    def digest(self) -> str:
        total = hashlib.sha256()
        for text, label in zip(self._texts, self._labels.tolist(), strict=True):
            total.update(str((text.tolist(), label)).encode())
        return total.hexdigest()

    def _cut(self, epoch: int, batch_size: int) -> Tensor:
        """The epoch's batches, as numbers of texts [batches, batch_size]; the last are filled up from the first."""
        generator = seeded(self.seed, "epoch", epoch)
        order = torch.randperm(self.rows, generator=generator)
        count = -(-self.rows // batch_size)
        order = order.repeat(-(-count * batch_size // self.rows))[: count * batch_size]
        pools = [pool[self._lengths[pool].argsort(stable=True)] for pool in order.split(POOL * batch_size)]
        return torch.cat(pools).view(count, batch_size)[torch.randperm(count, generator=generator)]


def filled(rows: Sequence[Sequence[int]], filling: int) -> tuple[Tensor, Tensor]:
    """Rows filled up to the longest, int64 [rows, longest], and their lengths, int64 [rows]."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=filling), torch.tensor([len(row) for row in rows])

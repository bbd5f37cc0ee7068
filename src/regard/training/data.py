"""Rows of tokens for the model.

Documents are not all as long as the context. They are laid end to end, each opened by `<|end|>`, and the
chain is cut into rows; along with its tokens each row carries document numbers, with which `regard.Document` keeps
attention inside its document:

    tokens     <|end|>  the  cat      <|end|>  a    dog  ran
    targets    the      cat  <|end|>  a        dog  ran  <|end|>
    documents  0        0    0        1        1    1    1

So `<|end|>` is learnt twice. As the target after a document's last token it says that the document ends; as the first
token of the next it says that one begins, with nothing before it in sight. A model that is to write from nothing is
given one `<|end|>`.

The chain is a ring: its end is followed by its beginning. Every epoch shuffles the documents, begins to cut somewhere
else and shuffles the rows. All of that follows from the seed and the number of the epoch alone, so a run's place in its
data is one integer, the number of rows taken so far.

**Repeats.** Attention can copy: a head that looks for the earlier occurrence of the present token, and reads what came
after it, predicts any repetition (an induction head [1]). Text contains few clean examples. A share of rows may
therefore be replaced by random tokens, repeated until the row is full, where copying is the only thing to learn.

References:
    [1] Olsson et al., "In-context Learning and Induction Heads", 2022.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from regard.masks import Document
from regard.training.loss import IGNORED, cross_entropy
from regard.training.text import Tokenizer

T = TypeVar("T", bound=Any)

PerToken = tuple[tuple[str, ...], tuple[str, ...]]
"""The parts of a batch, by name, that hold something for every token of the text, and of another that is read besides.
The rest, such as lengths and documents, is about whole texts."""

ENCODED_AT_ONCE = 2**20
"""Characters: enough to keep every core busy, few enough for memory and to show that it moves."""


class Examples(Protocol):
    """What the training loop is given: batches by their place, and the loss on one of them.

    `Packed` is texts for a language model, `Pairs` (in `pairs.py`) sources and targets for an encoder-decoder.

    Attributes:
        size: tokens in an epoch.
    """

    size: int

    def batch(self, position: int, batch_size: int) -> Any:
        """A NamedTuple of tensors: the batch after `position` rows were taken, a multiple of `batch_size`.

        With a method `per_token`, its tokens can be dealt out to several processes.
        """

    def loss(self, model: Callable[..., Tensor], batch: Any) -> Tensor:
        """What training reduces: the mean over what counts, in nats."""

    def tokens(self, batch: Any) -> int:
        """How many tokens of a batch are no padding."""

    def counted(self, batch: Any) -> int:
        """How many answers the loss is the mean over."""

    def epochs(self, rows: int) -> float:
        """How often everything has been seen after so many rows."""

    def facts(self) -> dict[str, Any]:
        """What must not change when a run goes on, as plain data."""

    def digest(self) -> str:
        """The SHA-256 of all tokens, in hexadecimal."""


class Batch(NamedTuple):
    """Rows for the model, each [batch, context_length].

    Args:
        tokens: what the model reads; int64.
        targets: the token that follows each; int64, `IGNORED` where none counts.
        documents: which document of its row each token belongs to, from 0 upwards; int32.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor

    def per_token(self) -> PerToken:
        """What is there for every token of the text, and of another that is read besides."""
        return ("tokens", "targets"), ()


class Packed:
    """Documents packed into rows of equal length (see the module's docstring).

    Position p, the number of rows taken before, is row `p % rows` of epoch `p // rows`.

    Args:
        documents: the token numbers of each document, without `<|end|>`.
        context_length: tokens in a row.
        vocab_size: how many different tokens there are.
        end_id: the number of `<|end|>`.
        seed: decides every order, offset and repeat.
        repeats: the share of rows, from 0 to 1, spread evenly, that is replaced by repeated random tokens.

    Attributes:
        rows: rows in an epoch, so that every token is a target at least once. The last ones of the ring are filled up
            from its beginning.
        size: tokens in an epoch, each document's `<|end|>` counted.

    Raises:
        ValueError: there is no token at all, one is outside the vocabulary or `<|end|>`, or a number is out of range.

    >>> packed = Packed([[5, 6], [7, 8, 9]], context_length=7, vocab_size=10)
    >>> batch = next(packed.once(1))
    >>> batch.tokens.tolist(), batch.documents.tolist()
    ([[0, 5, 6, 0, 7, 8, 9]], [[0, 0, 0, 1, 1, 1, 1]])
    >>> batch.targets.tolist()
    [[5, 6, 0, 7, 8, 9, 0]]
    """

    def __init__(
        self,
        documents: Iterable[Sequence[int] | Tensor],
        *,
        context_length: int,
        vocab_size: int,
        end_id: int = 0,
        seed: int = 0,
        repeats: float = 0.0,
    ) -> None:
        if context_length < 1:
            raise ValueError(f"context_length: expected at least 1, got {context_length}")
        if not 0 <= end_id < vocab_size:
            raise ValueError(f"end_id: expected a token from 0 to {vocab_size - 1}, got {end_id}")
        if not 0 <= repeats <= 1:
            raise ValueError(f"repeats: expected a share from 0 to 1, got {repeats}")
        if repeats and vocab_size < 2:
            raise ValueError("repeats: expected a token besides <|end|> to repeat, got a vocab_size of 1")
        end = torch.tensor([end_id], dtype=torch.int32)
        chains = []
        for number, document in enumerate(documents):
            tokens = torch.as_tensor(document, dtype=torch.int32)
            if ((tokens < 0) | (tokens >= vocab_size) | (tokens == end_id)).any():
                raise ValueError(
                    f"documents: expected tokens from 0 to {vocab_size - 1}, without <|end|> ({end_id}), "
                    f"got {tokens.min().item()} to {tokens.max().item()} in document {number}"
                )
            if len(tokens):
                chains.append(torch.cat([end, tokens]))
        if not chains:
            raise ValueError("documents: expected at least one with a token in it")
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.seed = seed
        self.repeats = repeats
        self.size = sum(map(len, chains))
        self.rows = -(-self.size // context_length)
        self._chains = chains
        self._epoch: tuple[int, _Ring, Tensor] | None = None

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        seed: int = 0,
        repeats: float = 0.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Packed":
        """Encode texts and pack them.

        Args:
            texts: one document each.
            tokenizer: what encodes them.
            progress: called with the texts encoded so far and all there are.
        """

        def documents() -> Iterator[Tensor]:
            start = 0
            while start < len(texts):
                stop, letters = start, 0
                while stop < len(texts) and (stop == start or letters + len(texts[stop]) <= ENCODED_AT_ONCE):
                    letters += len(texts[stop])
                    stop += 1
                for ids in tokenizer.encode_batch(texts[start:stop]):
                    yield torch.tensor(ids, dtype=torch.int32)
                start = stop
                if progress is not None:
                    progress(start, len(texts))

        return cls(
            documents(),
            context_length=context_length,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            seed=seed,
            repeats=repeats,
        )

    def loss(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        """`next_token_loss`."""
        return next_token_loss(model, batch)

    def tokens(self, batch: Batch) -> int:
        """Tokens of a batch: all of its rows are full."""
        return batch.tokens.numel()

    def counted(self, batch: Batch) -> int:
        """Tokens that are foretold: all that have a next one."""
        return int((batch.targets != IGNORED).sum())

    def epochs(self, rows: int) -> float:
        """How often every token has been seen after so many rows."""
        return rows * self.context_length / self.size

    def facts(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        return {name: getattr(self, name) for name in ("context_length", "size", "seed", "repeats")}

    def digest(self) -> str:
        """The SHA-256 of the documents' tokens, in hexadecimal."""
        total = hashlib.sha256()
        for chain in self._chains:
            total.update(len(chain).to_bytes(8, "big"))
            total.update(ctypes.string_at(chain.data_ptr(), chain.nbytes))
        return total.hexdigest()

    def batch(self, position: int, batch_size: int) -> Batch:
        """The rows at `position` and after it; the same whichever were taken before."""
        if position < 0:
            raise ValueError(f"position: expected at least 0, got {position}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        rows = [self._row(place) for place in range(position, position + batch_size)]
        return _batch(torch.stack([row for row, _ in rows]), torch.stack([documents for _, documents in rows]))

    def batches(self, batch_size: int, *, position: int = 0) -> Iterator[Batch]:
        """Batch after batch, epoch after epoch, without end."""
        for step in count():
            yield self.batch(position + step * batch_size, batch_size)

    def once(self, batch_size: int) -> Iterator[Batch]:
        """Everything once, in order and without repeats, to measure with: every token is a target exactly once.

        The last row is filled up with `<|end|>`, whose targets are `IGNORED`; the last batch may have fewer rows.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        ring = _Ring(self._chains)
        L = self.context_length
        for first in range(0, self.rows, batch_size):
            starts = torch.arange(first, min(first + batch_size, self.rows)) * L
            places = starts[:, None] + torch.arange(L + 1)
            batch = _batch(*ring.read(places))
            beyond = places[:, :-1] >= self.size  # a second lap
            yield Batch(
                batch.tokens.masked_fill(beyond, self.end_id),
                batch.targets.masked_fill(beyond, IGNORED),
                batch.documents,
            )

    def _row(self, position: int) -> tuple[Tensor, Tensor]:
        """context_length + 1 tokens and their documents."""
        # The share is spread evenly, so that every batch has as near to its share as can be.
        if int((position + 1) * self.repeats) > int(position * self.repeats):
            return self._repeat(position)
        epoch, index = divmod(position, self.rows)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._cut(epoch))
        _, ring, starts = self._epoch
        return ring.read(starts[index] + torch.arange(self.context_length + 1))

    def _cut(self, epoch: int) -> tuple["_Ring", Tensor]:
        """The epoch's ring of documents, and where its rows start, in the order in which they are taken."""
        generator = seeded(self.seed, "epoch", epoch)
        order = torch.randperm(len(self._chains), generator=generator).tolist()
        offset = torch.randint(self.context_length, (), generator=generator)
        rows = torch.randperm(self.rows, generator=generator)
        return _Ring([self._chains[number] for number in order]), offset + rows * self.context_length

    def _repeat(self, position: int) -> tuple[Tensor, Tensor]:
        """Random tokens, again and again, as one document; the period is from 16 to half the row."""
        generator = seeded(self.seed, "repeat", position)
        length = self.context_length + 1
        longest = length // 2
        period = int(torch.randint(min(16, longest), longest + 1, (), generator=generator))
        tokens = torch.randint(self.vocab_size - 1, (period,), generator=generator)
        tokens += tokens >= self.end_id  # every token but <|end|>
        return tokens.repeat(-(-length // period))[:length], torch.zeros(length, dtype=torch.int64)


def rows_of(batch: T, first: int, count: int) -> T:
    """Some rows of a batch.

    >>> rows_of(Batch(*torch.arange(12).view(3, 4, 1)), 1, 2).targets.tolist()
    [[5], [6]]
    """
    rows: T = batch._make(part[first : first + count] for part in batch)
    return rows


def next_token_loss(model: Callable[..., Tensor], batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token, in nats, with attention restricted to each document."""
    logits = model(batch.tokens, mask=Document(batch.documents))
    return cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


class _Ring:
    """Documents end to end, the last followed by the first."""

    def __init__(self, chains: Sequence[Tensor]) -> None:
        self.tokens = torch.cat(list(chains))
        self.stops = torch.tensor([len(chain) for chain in chains]).cumsum(0)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens at places, and the number of the document there. Numbers go on growing from lap to lap: a document
        met again is another document."""
        lap, place = places // len(self.tokens), places % len(self.tokens)
        return self.tokens[place].long(), torch.searchsorted(self.stops, place, right=True) + lap * len(self.stops)


def _batch(rows: Tensor, documents: Tensor) -> Batch:
    """rows, documents [batch, context_length + 1]."""
    return Batch(
        rows[:, :-1].contiguous(),
        rows[:, 1:].contiguous(),
        (documents[:, :-1] - documents[:, :1]).to(torch.int32),
    )


def seeded(seed: int, purpose: str, number: int) -> torch.Generator:
    """A generator for each purpose and number."""
    # A hash, because torch's generator starts out alike from seeds that are near to each other.
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

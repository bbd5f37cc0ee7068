"""What a model has read of several texts that go on: one cache, whose rows need not be equally long.

Texts of about the same length are read at once, with padding at their ends, which no token before it sees. Then their
rows are aligned at the end, so that every further token is one call for all of them.

When a text has filled the context, the model goes on from the last half of it, read anew. A model with a window whose
positions are relative (`ModelConfig.endless`) needs no such thing: its cache forgets what has left the window.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.cache import Cache
from regard.models import Decoder

TOKENS_OF_A_CALL = 24
"""What a call costs beside the tokens it reads, in tokens: every weight is fetched. (GPT-2 on two cores of an EPYC.)"""


class Texts:
    """Texts that a model has read and goes on with.

    Args:
        model: what reads them.
        texts: the tokens of each, at least one.

    Attributes:
        logits: for the next token of each text, [texts, vocab_size].
    """

    def __init__(self, model: Decoder, texts: Sequence[Sequence[int]]) -> None:
        self.model, self.context_length = model, model.config.context_length
        self.endless = model.config.endless
        self._texts = [deque(text, maxlen=None if self.endless else self.context_length) for text in texts]
        self.logits, self._cache = self._read(self._texts)
        if self.endless:  # of a text that has been read, nothing is read again
            self._texts = [deque(maxlen=0) for _ in texts]

    def __len__(self) -> int:
        return len(self._texts)

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all texts but these."""
        if len(rows) == len(self):
            return
        self._texts = [self._texts[row] for row in rows]
        self._cache.reorder(self._tensor(list(rows)))

    def add(self, tokens: Sequence[int]) -> None:
        """One more token for each text."""
        position = self._cache.position
        if isinstance(position, int):
            full = [not self.endless and position == self.context_length] * len(self)
        else:
            full = [not self.endless and place == self.context_length for place in position.tolist()]
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)
        if not any(full):
            self.logits = self.model(self._tensor([[token] for token in tokens]), cache=self._cache)[:, -1]
            return
        anew = [row for row in range(len(self)) if full[row]]
        half = max(1, self.context_length // 2)
        logits, cache = self._read([list(self._texts[row])[-half:] for row in anew])
        rest = [row for row in range(len(self)) if not full[row]]
        if rest:
            self._cache.reorder(self._tensor(rest))
            more = self.model(self._tensor([[tokens[row]] for row in rest]), cache=self._cache)[:, -1]
            self._cache.join([cache])
            cache, logits = self._cache, torch.cat([more, logits])
        self._cache, self.logits = cache, logits
        self._sort([*rest, *anew])

    def _read(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """Reads texts from their beginning: logits after the last token of each, and a cache."""
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        groups = _dealt_out([len(texts[row]) for row in order])
        parts = [self._read_at_once([list(texts[row]) for row in order[group]]) for group in groups]
        (logits, cache), rest = parts[0], parts[1:]
        if rest:
            cache.join([more for _, more in rest])
            logits = torch.cat([logits, *(more for more, _ in rest)])
        back = self._tensor(order).argsort()
        if order != sorted(order):
            cache.reorder(back)
            logits = logits[back]
        return logits, cache

    def _read_at_once(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        lengths = [len(text) for text in texts]
        if len(texts) > 1 and max(lengths) > self.context_length:  # longer than one call may be
            singly = [self._read_at_once([text]) for text in texts]
            singly[0][1].join([cache for _, cache in singly[1:]])
            return torch.cat([logits for logits, _ in singly]), singly[0][1]
        cache = self.model.cache(evict=self.endless)
        filled = [[*text, *[0] * (max(lengths) - len(text))] for text in texts]
        for piece in self._tensor(filled).split(self.context_length, dim=1):
            states = self.model.states(piece, cache=cache)
        last = self._tensor([(length - 1) % self.context_length for length in lengths])
        if len(set(lengths)) > 1:
            cache.align(self._tensor(lengths))
        return self.model.logits(states[torch.arange(len(texts), device=last.device), last]), cache

    def _sort(self, order: Sequence[int]) -> None:
        """Rows in their order again, after they were read in another."""
        if list(order) != sorted(order):
            back = self._tensor(list(order)).argsort()
            self._cache.reorder(back)
            self.logits = self.logits[back]

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, device=self.model.embedding.weight.device)


def _dealt_out(lengths: Sequence[int]) -> list[slice]:
    """Which texts, from short to long, are read at once: longer ones take in shorter ones while the padding costs less
    than a call.

    >>> _dealt_out([1, 2, 3, 1000, 1001])
    [slice(0, 3, None), slice(3, 5, None)]
    """
    groups, end = [], len(lengths)
    while end:
        first, longest, padding = end - 1, lengths[end - 1], 0
        while first and (padding := padding + longest - lengths[first - 1]) <= TOKENS_OF_A_CALL:
            first -= 1
        groups.append(slice(first, end))
        end = first
    return groups[::-1]

"""Which token comes next: what may be drawn, and the draw.

    penalised    logit / penalty where it is above 0, logit * penalty below, for tokens that came before
    p            softmax(penalised / temperature)
    drawn from   p, restricted to the likeliest tokens by top_k, then by top_p, then by min_p

These are the definitions, and the order, of transformers' logits processors.

References:
    Keskar et al. 2019, "CTRL" (the penalty), section 4.1; Fan et al. 2018 (top_k); Holtzman et al. 2019 (top_p); Nguyen
    et al. 2024 (min_p).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import hints
from regard.hints import hinted
from regard.shapes import INTEGER_DTYPES, ShapeError, is_number, is_plain, kind

LIKELY_TOKENS = 1024
"""How many of the likeliest tokens top_p looks at first: of 50,257, they take a tenth of the time of sorting all."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; the fields are those of `sample`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def check(self, owner: str) -> "Sampling":
        """Itself, if every number is in its range."""
        if not is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"{owner}: temperature must be 0 or more, got {kind(self.temperature)}")
        k = self.top_k
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise ValueError(f"{owner}: top_k must be 1 or more, or None for all, got {kind(k)}")
        if self.top_p is not None and (not is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"{owner}: top_p must be above 0 and at most 1, or None for all, got {kind(self.top_p)}")
        if self.min_p is not None and (not is_number(self.min_p) or not 0 <= self.min_p <= 1):
            raise ValueError(f"{owner}: min_p must be 0 to 1, or None for all, got {kind(self.min_p)}")
        if not is_number(self.repetition_penalty) or not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"{owner}: repetition_penalty must be above 0 (1 for none), got {kind(self.repetition_penalty)}"
            )
        return self

    def restrict(self, logits: Tensor, came: Tensor | None = None) -> Tensor:
        """Logits whose softmax is what is drawn from: -inf for a token that cannot be.

        Shapes: logits [batch, vocab_size]; came bool [batch, vocab_size], the tokens that came before; -> float32.
        """
        logits = logits.float()
        if not bool(logits.amax(-1).isfinite().all()):  # NaN too, which is the largest of all
            raise ValueError(
                "sample: logits must be numbers, one of each row above -inf, got NaN or inf; do the model's weights "
                "hold NaN?"
            )
        if came is not None and self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            logits = torch.where(came, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
            if not bool(logits.amax(-1).isfinite().all()):
                raise ValueError(f"sample: repetition_penalty {penalty} takes the logits beyond what float32 holds")
        if self.temperature == 0:
            return logits
        # 0 for the likeliest, so that a small temperature sends the others to -inf and not it to inf
        numbers = torch.finfo(logits.dtype)
        temperature = min(max(self.temperature, numbers.tiny), numbers.max)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            logits = logits.masked_fill(~_nucleus(logits.softmax(-1), self.top_p), -torch.inf)
        if self.min_p:
            logits = logits.masked_fill(logits < math.log(self.min_p), -torch.inf)  # the likeliest has logit 0
        return logits

    def draw(self, logits: Tensor, came: Tensor | None, generators: Sequence[torch.Generator | None]) -> Tensor:
        """A token of each row, by its own generator: int [batch]."""
        logits = self.restrict(logits, came)
        if self.temperature == 0:
            return logits.argmax(-1)
        shares = logits.softmax(-1)
        if all(generator is generators[0] for generator in generators):
            return torch.multinomial(shares, 1, generator=generators[0])[:, 0]
        drawn = (torch.multinomial(p, 1, generator=g) for p, g in zip(shares, generators, strict=True))
        return torch.cat(list(drawn))


@hinted(hints.GENERATION)
def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    previous: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a token from each row of logits.

    Shapes: [batch, vocab_size] -> int [batch].
    Args:
        temperature: 1 as the model says; towards 0 ever more the likeliest; 0 the likeliest.
        top_k: only from the k likeliest (ties with the last of them included); None for all.
        top_p: only from the likeliest that together have at least this probability (Holtzman et al. 2019); None: all.
        min_p: only from those at least this many times as probable as the likeliest (Nguyen et al. 2024); None: all.
        repetition_penalty: makes tokens that came before less likely where it is above 1 (Keskar et al. 2019); their
            logits are divided by it, or multiplied if negative. Comes first of all.
        previous: int [batch, length], the tokens that came before; needed for the penalty.
    Raises:
        TypeError, ShapeError: logits are no floating tensor [batch, vocab_size].
        ValueError: one of the others is out of range.

    >>> sample(torch.tensor([[0., 2., 1.]]), temperature=0)
    tensor([1])
    >>> sample(torch.tensor([[0., 2., 1.]]), temperature=0, repetition_penalty=3, previous=torch.tensor([[1]]))
    tensor([2])
    """
    if not is_plain(logits) or not logits.is_floating_point():
        raise TypeError(f"sample: logits must be a floating tensor [batch, vocab_size], got {kind(logits)}")
    if logits.dim() != 2 or logits.shape[1] == 0:
        last = "; take the last token's: logits[:, -1]" if logits.dim() == 3 else ""
        raise ShapeError(f"sample: logits must be [batch, vocab_size], got {list(logits.shape)}{last}")
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    ).check("sample")
    check_generator("sample", generator)
    came = None if previous is None else _came("sample", logits, previous)
    if came is None and repetition_penalty != 1:
        raise ValueError("sample: repetition_penalty needs previous, the tokens that came before, int [batch, length]")
    return sampling.draw(logits, came, [generator] * len(logits))


def check_generator(owner: str, generator: object) -> None:
    """What random numbers come from is a `torch.Generator`, or None for torch's own."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{owner}: generator must be a torch.Generator or None, got {kind(generator)}")


def _came(owner: str, logits: Tensor, previous: object) -> Tensor:
    """Which tokens came before: bool [batch, vocab_size]."""
    if not is_plain(previous) or previous.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{owner}: previous must be an int tensor [batch, length], got {kind(previous)}")
    if previous.dim() != 2 or len(previous) != len(logits):
        raise ShapeError(f"{owner}: previous must be [batch={len(logits)}, length], got {list(previous.shape)}")
    if previous.numel() and not 0 <= int(previous.min()) <= int(previous.max()) < logits.shape[1]:
        raise ValueError(f"{owner}: previous must be tokens from 0 to {logits.shape[1] - 1}")
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, previous.long(), True)


def _nucleus(shares: Tensor, top_p: float) -> Tensor:
    """The likeliest that together have at least top_p: those before which there is less."""
    ordered, places = shares.topk(min(LIKELY_TOKENS, shares.shape[-1]))
    if ordered.shape[-1] < shares.shape[-1] and bool((ordered.sum(-1) < top_p).any()):
        ordered, places = shares.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, places, before < top_p)

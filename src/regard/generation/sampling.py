"""Drawing a token from logits.

p(next) = softmax(logits / temperature), restricted to the likeliest tokens where asked
"""

import math

import torch
from torch import Tensor

from regard import hints
from regard.hints import hinted
from regard.shapes import ShapeError, is_number, is_plain, kind


@hinted(hints.GENERATION)
def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws a token from each row of logits.

    Shapes: [batch, vocab_size] -> int [batch].
    Args:
        temperature: 1 as the model says; towards 0 ever more the likeliest; 0 the likeliest.
        top_k: only from the k likeliest (ties with the last of them included); None for all.
        top_p: only from the likeliest that together have at least this probability (Holtzman et al. 2019); None: all.
    Raises:
        TypeError, ShapeError: logits are no floating tensor [batch, vocab_size].
        ValueError: one of the others is out of range.

    >>> sample(torch.tensor([[0., 2., 1.]]), temperature=0)
    tensor([1])
    """
    if not is_plain(logits) or not logits.is_floating_point():
        raise TypeError(f"sample: logits must be a floating tensor [batch, vocab_size], got {kind(logits)}")
    if logits.dim() != 2 or logits.shape[1] == 0:
        last = "; take the last token's: logits[:, -1]" if logits.dim() == 3 else ""
        raise ShapeError(f"sample: logits must be [batch, vocab_size], got {list(logits.shape)}{last}")
    check_sampling("sample", temperature, top_k, top_p, generator)
    if temperature == 0:
        return logits.argmax(-1)
    # 0 for the likeliest, so that a small temperature sends the others to -inf and not it to inf
    logits = (logits - logits.amax(-1, keepdim=True)).float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, places = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # a token stays if those before it do not reach top_p
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def check_sampling(
    function: str, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> None:
    if not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"{function}: temperature must be 0 or more, got {kind(temperature)}")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise ValueError(f"{function}: top_k must be 1 or more, or None for all, got {kind(top_k)}")
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise ValueError(f"{function}: top_p must be above 0 and at most 1, or None for all, got {kind(top_p)}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{function}: generator must be a torch.Generator or None, got {kind(generator)}")

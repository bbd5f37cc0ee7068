"""Text from a language model, one token at a time, with the cache.

p(next) = softmax(logits / temperature), restricted to the likeliest tokens where asked
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regard.models import Decoder


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
        ValueError: one of them is out of range.

    >>> sample(torch.tensor([[0., 2., 1.]]), temperature=0)
    tensor([1])
    """
    if temperature < 0:
        raise ValueError(f"sample: temperature must be 0 or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"sample: top_k must be 1 or more, or None for all, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p must be above 0 and at most 1, or None for all, got {top_p}")
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


@torch.inference_mode()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    end_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Tokens that follow a prompt, as they come.

    The model sees at most its context: when that is full, it goes on from the last half of it.

    Args:
        prompt: token ids, at least one.
        count: how many tokens at most.
        end_id: stop before this token; None: never.
        temperature, top_k, top_p, generator: as in `sample`.
    Raises:
        ValueError: the prompt is empty, a token is not in the vocabulary, or a number is out of range; when the first
            token is asked for.
    """
    if not prompt:
        raise ValueError("generate: the prompt is empty; begin with the end token, which opens every text")
    was_training = model.training
    model.eval()
    try:
        text = list(prompt)[-model.config.context_length :]
        cache = model.cache()
        new = text
        for _ in range(count):
            if cache.length + len(new) > model.config.context_length:
                cache = model.cache()
                new = text[-max(1, model.config.context_length // 2) :]
            tokens = torch.tensor([new], device=model.embedding.weight.device)
            logits = model(tokens, cache=cache)[:, -1]
            token = int(sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator))
            if token == end_id:
                return
            yield token
            text.append(token)
            new = [token]
    finally:
        model.train(was_training)

"""Text from a language model, one token at a time, with the cache."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard import hints
from regard.generation.prompts import check_decoder, check_prompt
from regard.generation.sampling import check_sampling, sample
from regard.hints import hinted
from regard.models import Decoder
from regard.shapes import check_whole, kind


@hinted(hints.GENERATION)
def generate(
    model: Decoder,
    prompt: Sequence[int] | Tensor,
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
        prompt: token ids, at least one: a list, or an int tensor [length].
        count: how many tokens at most.
        end_id: stop before this token; None: never.
        temperature, top_k, top_p, generator: as in `sample`.
    Raises:
        TypeError: the model is no `Decoder`, or the prompt holds no token ids.
        ValueError: the prompt is empty, a token is not in the vocabulary, or a number is out of range.
    """
    check_decoder("generate", model)
    text = check_prompt("generate", prompt, model.config.vocab_size)
    check_whole("generate", "count", count, least=0)
    if end_id is not None and (not isinstance(end_id, int) or isinstance(end_id, bool)):
        raise TypeError(f"generate: end_id must be a token number or None, got {kind(end_id)}")
    check_sampling("generate", temperature, top_k, top_p, generator)

    def draw(logits: Tensor) -> int:
        return int(sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator))

    return _generate(model, text, count, end_id, draw)


@torch.inference_mode()
def _generate(
    model: Decoder, prompt: list[int], count: int, end_id: int | None, draw: Callable[[Tensor], int]
) -> Iterator[int]:
    was_training = model.training
    model.eval()
    try:
        text = prompt[-model.config.context_length :]
        cache = model.cache()
        new = text
        for _ in range(count):
            if cache.length + len(new) > model.config.context_length:
                cache = model.cache()
                new = text[-max(1, model.config.context_length // 2) :]
            tokens = torch.tensor([new], device=model.embedding.weight.device)
            token = draw(model(tokens, cache=cache)[:, -1])
            if token == end_id:
                return
            yield token
            text.append(token)
            new = [token]
    finally:
        model.train(was_training)

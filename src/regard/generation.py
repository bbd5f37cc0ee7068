"""Text from a language model, one token at a time, with the cache.

p(next) = softmax(logits / temperature), restricted to the likeliest tokens where asked
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from regard import hints
from regard.hints import hinted
from regard.models import Decoder
from regard.shapes import INTEGER_DTYPES, ShapeError, check_whole, is_number, is_plain, kind


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
    _check_sampling("sample", temperature, top_k, top_p, generator)
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
    if not isinstance(model, Decoder):
        raise TypeError(f"generate: model must be a Decoder, got {kind(model)}{_as_decoder(model)}")
    text = _prompt(prompt, model.config.vocab_size)
    check_whole("generate", "count", count, least=0)
    if end_id is not None and (not isinstance(end_id, int) or isinstance(end_id, bool)):
        raise TypeError(f"generate: end_id must be a token number or None, got {kind(end_id)}")
    _check_sampling("generate", temperature, top_k, top_p, generator)

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


def _as_decoder(model: object) -> str:
    return "; a model of transformers has model.generate()" if hasattr(model, "generate") else ""


def _prompt(prompt: object, vocab_size: int) -> list[int]:
    """The token numbers of a prompt."""
    wanted = "generate: prompt must be token numbers, a list or an int tensor [length], got"
    if isinstance(prompt, str):
        raise TypeError(f"{wanted} {kind(prompt)}; encode it first, with the tokenizer of the model")
    if isinstance(prompt, Tensor):
        whole = is_plain(prompt) and prompt.dtype in INTEGER_DTYPES
        if not whole or prompt.dim() != 1:
            row = "; one row at a time: tokens[0]" if whole and prompt.dim() == 2 else ""
            raise TypeError(f"{wanted} {kind(prompt)}{row}")
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise TypeError(f"{wanted} {kind(prompt)}")
    text = list(prompt)
    wrong = next((token for token in text if not isinstance(token, int) or isinstance(token, bool)), None)
    if wrong is not None:
        raise TypeError(f"{wanted} a list with {kind(wrong)} in it")
    if not text:
        raise ValueError("generate: the prompt is empty; begin with the end token, which opens every text")
    for token in text:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"generate: tokens must be 0 to {vocab_size - 1}, got {token}; "
                "is this the tokenizer the model was trained with?"
            )
    return text


def _check_sampling(
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

"""Text from a language model, one token at a time, with the cache."""

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from regard import hints
from regard.generation.prompts import check_decoder, check_prompt
from regard.generation.sampling import Sampling, check_generator
from regard.generation.texts import Texts
from regard.hints import hinted
from regard.models import Decoder
from regard.shapes import check_whole, kind

Steps = Generator[list[int | None], None, None]
"""The new token of each row, step by step; None for a row that has ended."""


@hinted(hints.GENERATION)
def generate(
    model: Decoder,
    prompt: Sequence[int] | Tensor,
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    end_id: int | Collection[int] | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Tokens that follow a prompt, as they come.

    The model sees at most its context: when that is full, it goes on from the last half of it. A model with a window
    and relative positions (`ModelConfig.endless`) goes on as it is, in constant memory.

    Args:
        prompt: token ids, at least one: a list, or an int tensor [length].
        count: how many tokens at most.
        end_id: stop before this token, or before any of several; None: never.
        temperature, top_k, top_p, min_p, repetition_penalty, generator: as in `sample`. The penalty is for the tokens
            of the prompt, too.
    Raises:
        TypeError: the model is no `Decoder`, or the prompt holds no token ids.
        ValueError: the prompt is empty, a token is not in the vocabulary, or a number is out of range.
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    check_decoder("generate", model)
    tokens = check_prompt("generate", prompt, model.config.vocab_size)
    ends = _check("generate", count, end_id, sampling)
    check_generator("generate", generator)
    steps = _write(model, [tokens], count, ends, sampling, [generator], lambda row, token: False)
    return _only_row(steps)


@hinted(hints.GENERATION)
def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int] | Tensor],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    end_id: int | Collection[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    until: Callable[[int, int], bool] = lambda row, token: False,
) -> Iterator[list[int | None]]:
    """Tokens that follow several prompts, of any lengths, written side by side.

    Each row is what `generate` writes for its prompt alone, with its generator (up to rounding: a matrix product of
    several rows may differ from that of one in its last bits).

    Args:
        prompts: token ids of each, at least one.
        count: how many tokens of each row at most.
        generators: one for each row; None: torch's own for all. Equal seeds give rows that equal prompts make equal.
        until: called with a row's number and its new token; True ends the row after it.
        temperature, top_k, top_p, min_p, repetition_penalty, end_id: as in `generate`.
    Returns:
        For each step, the new token of each row; None for a row that has ended.
    Raises:
        TypeError: the model is no `Decoder`, or a prompt holds no token ids.
        ValueError: there is no prompt or an empty one, a token is not in the vocabulary, or a number is out of range.

    >>> from regard import ModelConfig
    >>> model = Decoder(ModelConfig.preset("gpt2", vocab_size=11, dim=16, heads=2, layers=1))
    >>> [len(step) for step in generate_batch(model, [[1, 2, 3], [4]], 2)]
    [2, 2]
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    owner = "generate_batch"
    check_decoder(owner, model)
    given: object = prompts
    if not isinstance(given, Sequence | Tensor) or isinstance(given, str) or not len(given):
        raise TypeError(f"{owner}: prompts must be a list of one prompt or more, got {kind(prompts)}")
    texts = [check_prompt(owner, prompt, model.config.vocab_size) for prompt in prompts]
    ends = _check(owner, count, end_id, sampling)
    if generators is not None and (not isinstance(generators, Sequence) or len(generators) != len(texts)):
        raise ValueError(f"{owner}: generators must be one for each of {len(texts)} prompts, got {kind(generators)}")
    for generator in generators or ():
        check_generator(owner, generator)
    own: list[torch.Generator | None] = [None] * len(texts)
    own = own if generators is None else list(generators)
    scaling = getattr(model.config, "rotary_scaling", None)
    if scaling is not None and scaling.get("kind") == "dynamic" and len({len(text) for text in texts}) > 1:
        # the frequencies follow from the length of a text, so texts of other lengths cannot share a call
        def alone(row: int) -> Steps:
            ended = partial(_as_row, until, row)
            return _write(model, [texts[row]], count, ends, sampling, [own[row]], ended)

        return _singly([alone(row) for row in range(len(texts))])
    return _write(model, texts, count, ends, sampling, own, until)


@torch.inference_mode()
def _write(
    model: Decoder,
    prompts: list[list[int]],
    count: int,
    ends: frozenset[int],
    sampling: Sampling,
    generators: Sequence[torch.Generator | None],
    until: Callable[[int, int], bool],
) -> Steps:
    was_training = model.training
    model.eval()
    try:
        came: Tensor | None = None
        texts: Any = None
        alive = list(range(len(prompts)))
        fresh: list[int] = []
        for _ in range(count):
            if texts is None:
                own: Any = getattr(model, "texts", None)
                texts = Texts(model, prompts) if own is None else own(prompts)
                if sampling.repetition_penalty != 1:
                    came = torch.zeros_like(texts.logits, dtype=torch.bool)
                    for row, prompt in enumerate(prompts):
                        came[row, prompt] = True
            else:
                texts.add(fresh)
            seen = None if came is None else came[alive]
            drawn = sampling.draw(texts.logits, seen, [generators[row] for row in alive]).tolist()
            step: list[int | None] = [None] * len(prompts)
            for row, token in zip(alive, drawn, strict=True):
                step[row] = None if token in ends else token
            if all(token is None for token in step):
                return
            yield step
            on = [
                place
                for place, (row, token) in enumerate(zip(alive, drawn, strict=True))
                if token not in ends and not until(row, token)
            ]
            if not on:
                return
            texts.keep(on)
            alive, fresh = [alive[place] for place in on], [drawn[place] for place in on]
            if came is not None:
                came[alive, fresh] = True
    finally:
        model.train(was_training)


def _only_row(steps: Steps) -> Iterator[int]:
    with closing(steps):
        for (token,) in steps:
            assert token is not None
            yield token


def _singly(steps: list[Steps]) -> Steps:
    """Rows that are written each by itself, as one batch."""
    with ExitStack() as stack:
        for row in steps:
            stack.enter_context(closing(row))
        ended: list[int | None] = [None]
        for step in zip_longest(*steps, fillvalue=ended):
            yield [row[0] for row in step]


def _as_row(until: Callable[[int, int], bool], row: int, _: int, token: int) -> bool:
    return until(row, token)


def _check(owner: str, count: int, end_id: object, sampling: Sampling) -> frozenset[int]:
    """The tokens to stop before, if every number is in its range."""
    check_whole(owner, "count", count, least=0)
    sampling.check(owner)
    ends: list[Any] = [] if end_id is None else [end_id]
    if isinstance(end_id, Collection) and not isinstance(end_id, Tensor):
        ends = [*end_id]
    if any(not isinstance(end, int) or isinstance(end, bool) for end in ends):
        raise TypeError(f"{owner}: end_id must be a token number, several of them, or None, got {kind(end_id)}")
    return frozenset(ends)

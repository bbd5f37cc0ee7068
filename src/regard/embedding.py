"""Texts as vectors: the mean of a model's states over the tokens of a text, and which texts are near.

    vector = mean over the tokens of states[token]       padding does not count
    near   = cosine of two vectors

Reference: Reimers and Gurevych 2019, "Sentence-BERT", section 3 (the mean over tokens).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import Padding
from regard.models import Classifier, Decoder, Encoder, MaskedLanguageModel
from regard.shapes import check_whole, is_plain, kind

ROWS_AT_ONCE = 32
"""Pieces of text of about the same length that are read in one call."""


@torch.inference_mode()
def embed(
    model: Encoder | MaskedLanguageModel | Classifier | Decoder,
    texts: Sequence[Sequence[int]],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """A vector for each text: the mean of its tokens' states.

    A text longer than the model's context is read in pieces, and all its tokens count the same.

    Shapes: float32 [texts, dim].
    Args:
        texts: token ids of each, at least one.
        progress: called with the pieces that have been read, and how many there are.
    Raises:
        TypeError: the model is none of these. ValueError: there is no text, or an empty one.

    >>> from regard import ModelConfig
    >>> encoder = Encoder(ModelConfig.preset("bert", vocab_size=11, dim=16, heads=2, layers=1))
    >>> embed(encoder, [[1, 2, 3], [4]]).shape
    torch.Size([2, 16])
    """
    stack = model.encoder if isinstance(model, MaskedLanguageModel | Classifier) else model
    if not isinstance(stack, Encoder | Decoder):
        raise TypeError(f"embed: model must be an Encoder, a model on one, or a Decoder, got {kind(model)}")
    given: object = texts
    if isinstance(given, str) or not len(texts) or not all(len(t) and not isinstance(t, str) for t in texts):
        raise ValueError("embed: texts must be one or more lists of token numbers, none of them empty")
    states_of = stack.states if isinstance(stack, Decoder) else stack
    context, device = stack.config.context_length, stack.embedding.weight.device
    pieces = [
        (row, list(text[at : at + context])) for row, text in enumerate(texts) for at in range(0, len(text), context)
    ]
    pieces.sort(key=lambda piece: len(piece[1]))  # those of a call then have little padding
    total = torch.zeros(len(texts), stack.config.dim, device=device)
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(pieces), ROWS_AT_ONCE):
            some = pieces[first : first + ROWS_AT_ONCE]
            lengths = torch.tensor([len(piece) for _, piece in some], device=device)
            longest = int(lengths.max())
            tokens = torch.tensor([piece + [0] * (longest - len(piece)) for _, piece in some], device=device)
            states = states_of(tokens, mask=Padding(lengths)).float()
            real = torch.arange(longest, device=device) < lengths[:, None]
            rows = torch.tensor([row for row, _ in some], device=device)
            total.index_add_(0, rows, states.masked_fill(~real[..., None], 0).sum(1))
            progress(first + len(some), len(pieces))
    finally:
        model.train(was_training)
    return total / torch.tensor([len(text) for text in texts], device=device)[:, None]


class Near(NamedTuple):
    """A text that is near: its number, and the cosine of its vector with the other's."""

    text: int
    cosine: float


def nearest(vectors: Tensor, query: Tensor, count: int = 5) -> list[list[Near]]:
    """The texts whose vectors are nearest to each query, the nearest first.

    Shapes: vectors [texts, dim], query [queries, dim].
    Args:
        count: how many for each query, at most.
    Raises:
        ValueError: the vectors are no matrices of the same width, or count is no whole number from 1 on.

    >>> nearest(torch.tensor([[1., 0.], [1., 1.], [-1., 0.]]), torch.tensor([[2., 0.]]), 2)
    [[Near(text=0, cosine=1.0), Near(text=1, cosine=0.7071067690849304)]]
    """
    check_whole("nearest", "count", count)
    for name, given in (("vectors", vectors), ("query", query)):
        if not is_plain(given) or given.dim() != 2 or not given.is_floating_point():
            raise ValueError(f"nearest: {name} must be floating [texts, dim], got {kind(given)}")
    if vectors.shape[1] != query.shape[1]:
        raise ValueError(f"nearest: vectors have {vectors.shape[1]} features, query has {query.shape[1]}")
    cosines = torch.nn.functional.normalize(query, dim=1) @ torch.nn.functional.normalize(vectors, dim=1).T
    best = cosines.topk(min(count, len(vectors)), dim=1)
    return [
        [Near(text, cosine) for text, cosine in zip(texts, values, strict=True)]
        for texts, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]

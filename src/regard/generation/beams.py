"""Beam search: the likeliest whole texts, not the likeliest token each time.

    score(text) = log p(text | source) / length ** length_penalty

A search keeps, for every source, the `beams` likeliest beginnings of a text. Each is lengthened by every token of the
vocabulary, and the likeliest of all these are kept. A text that ends (or has reached the most tokens that it may have)
leaves the beam, and counts by its score; the length is that of the text with its end. The search is over when `beams`
texts have ended and nothing that is left in the beam could still come to a better score, whatever follows.

References:
    Graves 2012, "Sequence Transduction with Recurrent Neural Networks"; Wu et al. 2016, "Google's Neural Machine
    Translation System", section 7.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard import hints
from regard.generation.prompts import check_prompt
from regard.hints import hinted
from regard.masks import Padding
from regard.models import EncoderDecoder
from regard.shapes import check_kind, check_whole, is_number, kind

BATCH_SIZE = 64
"""Sources that are read together."""

Step = Callable[[Tensor | None, Tensor], Tensor]
"""From the newest tokens [rows] (None at the start) and the row of the last step that each goes on from [rows], to the
logits of what follows [rows, vocab_size]."""


class Written(NamedTuple):
    """A text that a model wrote.

    Attributes:
        tokens: without the end token.
        log_probability: of the whole text, its end included, in nats.
        score: the same over length ** length_penalty.
        ended: whether the model ended it; False where it was cut at the most tokens it may have.
    """

    tokens: tuple[int, ...]
    log_probability: float
    score: float
    ended: bool


@hinted(hints.TRANSLATION)
def translate(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int] | Tensor],
    count: int | None = None,
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    end_id: int = 0,
    start_id: int | None = None,
) -> list[list[Written]]:
    """What a model writes for each source, the best first: by beam search, or greedily with one beam.

    Sources of any lengths are read in batches; what is written for one does not depend on the others.

    Args:
        sources: token ids of each, as the model is to read them.
        count: tokens of a text at most, its end included; None: as many as the decoder can read.
        beams: how many beginnings are kept for each source, and how many texts are returned at most. 1 takes the
            likeliest token each time.
        length_penalty: 0 ranks texts by their probability, 1 by the mean log-probability of a token; more favours
            longer texts.
        end_id: the token that ends a text.
        start_id: the token that opens what is written; None: end_id.
    Raises:
        TypeError: the model is no `EncoderDecoder`, or a source holds no token ids.
        ValueError: a source is empty or too long, a token is not in the vocabulary, or a number is out of range.

    >>> from regard import EncoderDecoder, ModelConfig
    >>> _ = torch.manual_seed(0)
    >>> model = EncoderDecoder(ModelConfig(vocab_size=7, context_length=5, dim=8, layers=1, heads=2))
    >>> [len(texts) for texts in translate(model, [[3, 1, 4], [1]], count=2, beams=3)]
    [3, 3]
    """
    check_kind("translate", "model", model, EncoderDecoder, "; a decoder goes on with a text: regard.generate")
    config = model.config
    if not isinstance(sources, (list, tuple)):
        raise TypeError(f"translate: sources must be a list of lists of token numbers, got {kind(sources)}")
    texts = [check_prompt("translate", source, config.vocab_size) for source in sources]
    for text in texts:
        if len(text) > config.context_length:
            raise ValueError(f"translate: a source has {len(text)} tokens, context_length is {config.context_length}")
    count = config.context_length if count is None else count
    check_whole("translate", "count", count)
    if count > config.context_length:
        raise ValueError(f"translate: count must be at most context_length={config.context_length}, got {count}")
    check_whole("translate", "beams", beams)
    if not is_number(length_penalty) or not math.isfinite(length_penalty):
        raise ValueError(f"translate: length_penalty must be a finite number, got {kind(length_penalty)}")
    start_id = end_id if start_id is None else start_id
    for name, token in (("end_id", end_id), ("start_id", start_id)):
        check_whole("translate", name, token, least=0)
        if token >= config.vocab_size:
            raise ValueError(f"translate: {name} must be 0 to {config.vocab_size - 1}, got {token}")

    found: dict[int, list[Written]] = {}
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))  # little padding
    was_training = model.training
    model.eval()
    try:
        for first in range(0, len(order), BATCH_SIZE):
            places = order[first : first + BATCH_SIZE]
            with torch.inference_mode():
                step = _reading(model, [texts[place] for place in places], start_id)
                written = search(step, len(places), count, beams=beams, length_penalty=length_penalty, end_id=end_id)
            found.update(zip(places, written, strict=True))
    finally:
        model.train(was_training)
    return [found[place] for place in range(len(texts))]


def _reading(model: EncoderDecoder, sources: Sequence[list[int]], start_id: int) -> Step:
    """A step of a model that has read some sources: the encoder runs once, and every token costs one query."""
    device = model.decoder.embedding.weight.device
    lengths = torch.tensor([len(source) for source in sources], device=device)
    tokens = torch.full((len(sources), int(lengths.max())), start_id, device=device)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = torch.tensor(source, device=device)
    states = model.encoder(tokens, mask=Padding(lengths))
    cache, context_cache = model.decoder.cache(), model.decoder.cache()

    def step(new: Tensor | None, rows: Tensor) -> Tensor:
        nonlocal states, lengths
        if new is None:
            new = torch.full((len(sources),), start_id)
        rows = rows.to(device)
        if not torch.equal(rows, torch.arange(len(states), device=device)):
            states, lengths = states[rows], lengths[rows]
            cache.reorder(rows)
            context_cache.reorder(rows)
        logits: Tensor = model.decoder(
            new.to(device)[:, None],
            cache=cache,
            context=states,
            context_mask=Padding(lengths),
            context_cache=context_cache,
        )
        return logits[:, -1].cpu()

    return step


class _Beam(NamedTuple):
    """The beginning of a text, its log-probability, and its row in the last step."""

    tokens: tuple[int, ...]
    log_probability: float
    row: int


def search(
    step: Step, batch: int, count: int, *, beams: int, length_penalty: float, end_id: int
) -> list[list[Written]]:
    """Beam search over anything that foretells the next token.

    Args:
        step: computes the logits; rows that it is not given again are done.
        batch: number of sources; in the first step, each is a row. The other arguments are those of `translate`.
    Returns:
        For each source its texts, at most `beams`, the best first.
    """

    def score(log_probability: float, length: int) -> float:
        return log_probability / float(length**length_penalty)

    def hopeful(live: Sequence[_Beam], ended: Sequence[Written], length: int) -> bool:
        """Whether a beginning could still become better than the worst of those that count."""
        if not live or (beams == 1 and ended):  # one beam is greedy: it takes the end where that is likeliest
            return False
        best_length = count if length_penalty > 0 else length + 1  # a log-probability only falls
        return len(ended) < beams or ended[-1].score < score(live[0].log_probability, best_length)

    live = {source: [_Beam((), 0.0, source)] for source in range(batch)}
    ended: list[list[Written]] = [[] for _ in range(batch)]
    new = None
    for length in range(1, count + 1):
        everyone = [beam for of_source in live.values() for beam in of_source]
        logits = step(new, torch.tensor([beam.row for beam in everyone]))
        # float64, so that the sums of long texts are as exact as their parts
        logs = logits.double().log_softmax(-1) + torch.tensor(
            [beam.log_probability for beam in everyone], dtype=torch.float64
        ).unsqueeze(1)
        at = 0
        for source, of_source in list(live.items()):
            here = logs[at : at + len(of_source)].flatten()
            best = here.topk(min(2 * beams, len(here)))
            going_on: list[_Beam] = []
            for rank, (log, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
                if log == -math.inf:
                    break
                which, token = divmod(place, logits.shape[1])
                tokens = of_source[which].tokens
                if token == end_id or length == count:
                    if rank < beams:
                        whole = tokens if token == end_id else (*tokens, token)
                        ended[source].append(Written(whole, log, score(log, length), token == end_id))
                elif len(going_on) < beams:
                    going_on.append(_Beam((*tokens, token), log, at + which))
            at += len(of_source)
            ended[source] = sorted(ended[source], key=lambda text: -text.score)[:beams]
            live[source] = going_on
            if not hopeful(going_on, ended[source], length):
                del live[source]
        if not live:
            break
        new = torch.tensor([beam.tokens[-1] for of_source in live.values() for beam in of_source])
    return ended

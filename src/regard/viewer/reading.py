"""A model reads a text for the page: recorded, with values and outputs, in a way that can be watched and stopped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.hooks import Attend, Heads, Result, ScoringArguments
from regard.models import EncoderDecoder
from regard.observation.streaming import Progress, silent
from regard.recording import record
from regard.recording.watching import Place, watching
from regard.training.checkpoint import Loaded
from regard.viewer.readers import Reader
from regard.viewer.run import Run, of_recording
from regard.viewer.texts import Tokens, of_ids, of_text

MAX_TOKENS_WITH_VALUES = 1 << 14
"""Tokens up to which values and outputs are kept too, for the steps of a query: twice the memory of query and key."""

OPENING = "▸"
"""How a token is shown that opens a text and stands for no letters."""


def read(reader: Reader, text: str, source: str, start: int = 0, progress: Progress = silent) -> Run:
    """A text, or as much of it from a token on as the model can take at once, read by a model.

    Args:
        progress: called with the layers done and all of them; may raise to stop.
    Raises:
        ValueError: a text without tokens, or a start behind its end.
    """
    ids, whole = reader.encode(text)
    if not 0 <= start < len(ids):
        what = f"start must be 0 to {len(ids) - 1}, got {start}" if ids else "the text has no tokens"
        raise ValueError(f"read: {what}")
    around = [token for token in (reader.opening, reader.closing) if token is not None]
    size = len(ids) if reader.context is None else reader.context - len(around)
    shown = slice(start, start + size)
    before, after = ([] if token is None else [token] for token in (reader.opening, reader.closing))
    tokens = Tokens(
        ["" for _ in before] + [*whole.texts[shown]] + ["" for _ in after],
        [OPENING for _ in before] + [*whole.labels[shown]] + [reader.decode([token]) for token in after],
        before + ids[shown] + after,
    )
    run = Run(
        reader.name, source, {}, tokens, text=text, reader=reader, start=start, total=len(ids), opening=bool(before)
    )
    fill(run, progress)
    return run


def read_pair(loaded: Loaded[EncoderDecoder], text: str, written: Sequence[int], source: str) -> Run:
    """A text and what a model wrote for it, read by that model: one by its encoder, the other by its decoder.

    Args:
        written: the tokens. source: what to call the text.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = tokenizer.encode(text)
    texts = {
        "encoder": of_text(text, ids, tokenizer.spans(text)),
        "decoder": of_ids(written[: model.config.context_length - 1], lambda token: tokenizer.decode([token])),
    }
    opening = tokenizer.end_id
    both = {
        side: Tokens(["", *whole.texts], [OPENING, *whole.labels], [opening, *(whole.ids or ())])
        for side, whole in texts.items()
    }
    outputs: dict[str, Tensor] = {}
    with (
        torch.inference_mode(),
        watched(model, None, silent, outputs),
        record(model, values=True) as recording,
    ):
        model(*(torch.tensor([whole.ids]) for whole in both.values()))
    layers = of_recording(recording)
    rows = {side: (whole,) for side, whole in both.items()}
    read_by = {name: rows[name.split(".")[0]] for name in layers}
    return Run(loaded.folder.name, source, layers, texts=read_by, outputs=outputs, opening=True)


def fill(run: Run, progress: Progress = silent) -> None:
    """Has a run's model read its tokens, and keeps what was recorded."""
    reader: Reader = run.reader
    ids = [] if run.tokens is None or run.tokens.ids is None else run.tokens.ids
    small = len(ids) <= MAX_TOKENS_WITH_VALUES
    outputs: dict[str, Tensor] = {}
    with (
        torch.inference_mode(),
        watched(reader.model, reader.layers, progress, outputs if small else None),
        record(reader.model, values=small) as recording,
    ):
        reader.logits(torch.tensor([list(ids)]))
    run.outputs = outputs
    run.show(of_recording(recording), run.tokens)


@contextmanager
def watched(
    model: nn.Module, layers: int | None, progress: Progress, outputs: dict[str, Tensor] | None = None
) -> Iterator[None]:
    """Reports every attention layer that ran, and keeps what it gave.

    Args:
        layers: how many there are, for the reports.
        progress: may raise, which ends the model's run.
    """
    done = 0

    def watch(place: Place, attend: Attend) -> Attend:
        def told(heads: Heads, scoring: ScoringArguments) -> Result:
            nonlocal done
            progress(done, max(done + 1, layers or 0))
            output, lse = attend(heads, scoring)
            if outputs is not None:
                outputs[place.name] = output.detach()
            done += 1
            progress(done, max(done, layers or 0))
            return output, lse

        return told

    with watching("read", model, None, watch):
        yield

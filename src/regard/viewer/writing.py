"""A model goes on with a text for the page: token by token, its attention recorded as it comes."""

import time
from collections.abc import Callable

import torch

from regard.generation.sampling import sample
from regard.recording import record
from regard.viewer.jobs import Job
from regard.viewer.readers import Reader
from regard.viewer.reading import fill
from regard.viewer.run import Run, of_recording
from regard.viewer.texts import Tokens, label

MAX_NEW_TOKENS = 512

SHARE_OF_SHOWING = 0.2
"""How much of the time may go into showing what was recorded so far."""


def continued(run: Run, count: int) -> tuple[Run, list[int]]:
    """A run to go on in: the end of the text that leaves room for so many tokens, and its token numbers.

    Raises:
        ValueError: there is no model that could go on, or its context has no room.
    """
    reader: Reader | None = run.reader
    if reader is None or run.tokens is None or run.tokens.ids is None:
        raise ValueError("generate: this text came without its model")
    if not reader.foretells:
        raise ValueError(f"generate: {reader.name} does not foretell the next token")
    ids, texts, labels = list(run.tokens.ids), list(run.tokens.texts), list(run.tokens.labels)
    if reader.closing is not None and ids[-1] == reader.closing:
        ids, texts, labels = ids[:-1], texts[:-1], labels[:-1]
    gone = 0 if reader.context is None else max(0, len(ids) + count - reader.context)
    first = int(run.opening)
    if gone >= len(ids) - first:
        raise ValueError(f"generate: count must be less than the model's context of {reader.context}, got {count}")
    texts, labels = (parts[:first] + parts[first + gone :] for parts in (texts, labels))
    ids = ids[:first] + ids[first + gone :]
    new = Run(
        run.model, f"{run.source}, continued", run.layers, Tokens(texts, labels, ids), text=run.text, reader=reader,
        start=run.start + gone, opening=run.opening, growing=True,
    )  # fmt: skip
    return new, ids


@torch.inference_mode()
def write(run: Run, ids: list[int], count: int, draw: Callable[[torch.Tensor], int], job: Job) -> None:
    """Goes on with a run's text, and shows what was recorded so far again and again."""
    reader: Reader = run.reader
    assert run.tokens is not None
    texts, labels = list(run.tokens.texts), list(run.tokens.labels)
    new: list[int] = []
    so_far = ""
    began, showing = time.monotonic(), 0.0
    with record(reader.model) as recording:
        for token in reader.follow(ids, count, draw):
            new.append(token)
            text = reader.decode(new)
            part = "" if text.endswith("\ufffd") else text[len(so_far) :]
            so_far = so_far if text.endswith("\ufffd") else text
            texts.append(part)
            labels.append(label(part) or f"{token}")
            job.progress(len(new), count)
            if showing <= SHARE_OF_SHOWING * (time.monotonic() - began):
                start = time.monotonic()
                read = len(ids) + len(new) - 1  # the last token has not been read yet
                run.show(of_recording(recording), Tokens(texts[:read], labels[:read], [*ids, *new][:read]))
                showing += time.monotonic() - start
            job.tell(note=so_far)
    run.show(run.layers, Tokens(texts, labels, [*ids, *new]))
    fill(run)
    run.growing = False


def drawing(seed: int, temperature: float, top_k: int | None) -> Callable[[torch.Tensor], int]:
    """How a token is taken from logits."""
    generator = torch.Generator().manual_seed(seed)
    return lambda logits: int(sample(logits.float(), temperature=temperature, top_k=top_k, generator=generator))

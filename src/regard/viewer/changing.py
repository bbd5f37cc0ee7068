"""What a model expects with some of its heads changed, beside what it expects as it is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.interventions import Ablate, HideKey, Scale
from regard.recording import Intervention, intervene
from regard.viewer.codes import raw
from regard.viewer.jobs import Job, Result
from regard.viewer.params import Params
from regard.viewer.readers import Reader
from regard.viewer.reading import watched
from regard.viewer.run import Run
from regard.viewer.texts import label

GUESSES = 10

MAX_CHANGES = 1024

MAX_KEPT_LOGITS = 1 << 25
"""Logits of the unchanged model that are kept for the next change: 128 MiB."""

ROWS_AT_ONCE = 1024
"""Rows of logits that are turned into losses together."""


def changes_of(run: Run, asked: Params) -> list[Intervention]:
    """The changes that a page asks for."""
    given = asked.given.get("changes")
    if not isinstance(given, list) or not 0 < len(given) <= MAX_CHANGES or not all(isinstance(c, dict) for c in given):
        raise asked.wrong("changes", f"a list of 1 to {MAX_CHANGES} changes")
    found: list[Intervention] = []
    for each in given:
        change = Params("start", each)
        kind = change.choice("kind", ("ablate", "scale", "hide"))
        number = change.whole("layer", most=len(run.layers) - 1)
        layer, seen = run.names[number], run.layer(number)
        head = change.whole("head")
        if head not in seen.heads:
            raise change.wrong("head", f"one of {', '.join(map(str, seen.heads))}")
        if kind == "ablate":
            found.append(Ablate(layer, head))
        elif kind == "scale":
            found.append(Scale(layer, head, change.number("factor", 0.0, least=-100, most=100)))
        else:
            found.append(HideKey(layer, head, change.whole("key", most=seen.grid.key_len - 1)))
    return found


@torch.inference_mode()
def expect(run: Run, query: int, changes: Sequence[Intervention], job: Job) -> Result:
    """The next token after a query, and the loss of every token, without and with the changes."""
    reader: Reader = run.reader
    assert run.tokens is not None
    assert run.tokens.ids is not None
    ids = torch.tensor([list(run.tokens.ids)])
    layers = reader.layers or 0

    def logits_of(*changed: Intervention) -> Tensor:
        first = layers if changed else 0
        with watched(reader.model, layers, lambda done, all: job.progress(first + done, first + all)):
            if not changed:
                return reader.logits(ids)[0]
            with intervene(reader.model, *changed):
                return reader.logits(ids)[0]

    before = run.logits if run.logits is not None else logits_of()
    if before.numel() <= MAX_KEPT_LOGITS:
        run.logits = before
    after = logits_of(*changes)
    losses = [_losses(logits, ids[0]) for logits in (before, after)]
    chances = [logits[query].float().softmax(-1) for logits in (before, after)]
    likeliest = [chance.topk(min(GUESSES, len(chance))).indices.tolist() for chance in chances]
    follows = int(ids[0, query + 1]) if query + 1 < ids.shape[1] else None
    sides = []
    for side, (chance, loss) in enumerate(zip(chances, losses, strict=True)):

        def guess(token: int, chance: Tensor = chance) -> dict[str, Any]:
            text = reader.decode([token])
            return {"id": token, "text": text, "label": label(text) or "∅", "probability": float(chance[token])}

        actual = None
        if follows is not None:
            actual = {**guess(follows), "rank": int((chance > chance[follows]).sum()) + 1}
        sides.append(
            {
                "guesses": [guess(token) for token in likeliest[side]],
                "also": [guess(token) for token in likeliest[1 - side] if token not in likeliest[side]],
                "actual": actual,
                "loss": float(loss.mean()) if len(loss) else None,
                "rest": float(loss[query + 1 :].mean()) if len(loss) > query + 1 else None,
            }
        )
    result = {"query": query, "names": ["before", "after"], "before": sides[0], "after": sides[1]}
    return result, raw(torch.stack(losses))


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of every token but the first, in nats: [length - 1]."""
    rows = zip(logits[:-1].split(ROWS_AT_ONCE), ids[1:].split(ROWS_AT_ONCE), strict=True)
    parts = [cross_entropy(part.float(), then, reduction="none") for part, then in rows]
    return torch.cat(parts) if parts else logits.new_zeros(0).float()

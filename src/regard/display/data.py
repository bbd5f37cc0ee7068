"""What the pages show, as plain data for --json. Numbers and text are whole; JSON has no minus infinity: null."""

import math
from typing import Any

from torch import Tensor

from regard.display.explained import of_head, rounded_weights, values
from regard.display.reading import Expected, Look
from regard.stepwise import Step, Steps, steps, three_tokens


def look_as_data(view: Look, count: int = 8) -> dict[str, Any]:
    """The page of `regard look`, with the `count` largest weights of every head."""
    return {
        **_place(view),
        "start": view.start,
        "total_tokens": len(view.script.ids),
        "tokens": tokens_as_data(view),
        "expected": _expected(view.expected),
        "without": None if view.without is None else _expected(view.without),
        "windows": [window._asdict() for window in view.windows],
        "heads": [
            {
                "layer": layer,
                "head": s.head,
                "kind": s.kind,
                "shares": s.shares,
                "entropy": s.entropy,
                "spread": s.spread,
                "distance": s.distance,
            }
            for layer in range(len(view.recording))
            for s in view.of_layer(layer)
        ],
        "attends": [
            {"layer": layer, "head": head, "keys": _largest(view, weights, count)}
            for layer in range(len(view.recording))
            for head, weights in enumerate(view.weights(layer))
        ],
    }


def tokens_as_data(view: Look) -> list[dict[str, Any]]:
    """Every token of the window: its id, the characters of the text that it touches, and where they stand."""
    found = []
    for number, token in enumerate(view.tokens[0].tolist()):
        start, stop = view.span(number)
        found.append(
            {"number": number, "id": token, "text": view.script.text[start:stop], "start": start, "stop": stop}
        )
    return found


def steps_as_data(view: Look, shown: Steps) -> dict[str, Any]:
    """One head's steps."""
    return {
        **_place(view),
        "tokens": [token["text"] for token in tokens_as_data(view)],
        "steps": [_step(step, of_head(step, view.head, shown)) for step in shown],
    }


def three_tokens_as_data() -> dict[str, Any]:
    """The worked example."""
    shown = steps(*three_tokens())
    _, rounded = rounded_weights(shown)
    return {
        "x": three_tokens()[1].tolist(),
        "steps": [_step(step, step.tensor) for step in shown],
        "rounded": {"weights": _plain(rounded), "output": _plain(rounded @ values(shown))},
    }


def _place(view: Look) -> dict[str, Any]:
    return {
        "model": view.model,
        "source": view.source,
        "query": view.query,
        "layer": view.layer,
        "head": view.head,
        "chosen": view.chosen,
    }


def _expected(expected: Expected) -> dict[str, Any]:
    return {
        "without": [list(place) for place in expected.without],
        "guesses": [guess._asdict() for guess in expected.guesses],
        "actual": None if expected.actual is None else expected.actual._asdict(),
        "loss": expected.loss,
    }


def _largest(view: Look, weights: Tensor, count: int) -> list[dict[str, Any]]:
    found = weights.topk(min(count, len(weights)))
    return [
        {"key": key, "text": view.script.text[slice(*view.span(key))], "weight": weight}
        for weight, key in zip(found.values.tolist(), found.indices.tolist(), strict=True)
    ]


def _step(step: Step, tensor: Tensor) -> dict[str, Any]:
    return {"name": step.name, "formula": step.formula, "note": step.note, "numbers": _plain(tensor)}


def _plain(tensor: Tensor) -> Any:
    """Nested lists of numbers; minus infinity as None."""

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(v) for v in value]
        return value if math.isfinite(value) else None

    return clean(tensor.tolist())

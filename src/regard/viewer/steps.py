"""One query in one head, step by step, for the keys that matter; and the three-token example, with numbers to change.

The steps and their numbers are those of `Recorded.steps` and `regard.steps`, computed in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.functional import attention
from regard.layers import MultiHeadAttention
from regard.masks import Causal
from regard.recording.texts import Recorded
from regard.stepwise import Step, Steps, steps, three_tokens
from regard.viewer.params import Params
from regard.viewer.run import Run

SCORES = ("score", "scale", "cap", "bias", "mask", "softmax")
"""The steps that have one number per key."""

MAX_SHOWN_KEYS = 256

MAX_TOKENS_OF_OWN_OUTPUT = 1 << 15
"""Keys up to which the library's kernel is run again on a recorded head, to compare its output."""

MAX_EXAMPLE_TOKENS, MAX_EXAMPLE_FEATURES = 8, 8


def double(seen: Recorded) -> Recorded:
    """The same call in float64, without the log-sum-exp of rounded numbers."""
    value = None if seen.value is None else seen.value.double()
    wide = Recorded(
        seen.query.double(), seen.key.double(), seen.scoring,
        value=value, tokens=seen.tokens, heads=seen.heads, cross=seen.cross, patches=seen.patches,
    )  # fmt: skip
    wide.call = replace(seen.call, query=wide.query, key=wide.key, lse=None)
    return wide


@torch.inference_mode()
def steps_of_query(run: Run, layer: int, head: int, batch: int, query: int, count: int, more: Sequence[int]) -> Any:
    """Every step of one query, as plain data.

    Args:
        count: how many keys are shown, those with the largest weights. more: keys that are shown besides.
    """
    seen = run.observation(layer, head, batch)
    wide = double(seen)
    shown = wide.steps(query)
    rows = {step.name: step.tensor[0, 0, 0] for step in shown if step.name in SCORES}
    weights = rows["softmax"]
    allowed = wide.scoring.allowed(range(query, query + 1), range(wide.grid.key_len))
    visible = torch.ones_like(weights, dtype=torch.bool) if allowed is None else allowed.expand(1, 1, 1, -1)[0, 0, 0]
    chosen = _chosen(weights, visible, count, more)
    labels = run.tokens_of(layer, "key", batch).labels
    scores = list(rows.values())[-2]  # the last stage before softmax
    seen_scores = scores[visible]
    largest = float(seen_scores.max()) if len(seen_scores) else -math.inf
    lse = float(torch.logsumexp(seen_scores, 0)) if len(seen_scores) else -math.inf
    sink = wide.scoring.sink
    if sink is not None:
        lse = float(torch.logaddexp(torch.tensor(lse, dtype=torch.float64), sink[0].double()))
    table = {name: row[chosen] for name, row in rows.items()}
    table["exp"] = (scores[chosen] - largest).exp() if math.isfinite(largest) else torch.zeros(len(chosen))
    values = None if wide.value is None else wide.value[0, 0]
    output = None if values is None else shown["weigh"].tensor[0, 0, 0]
    own, how = _own_output(run, seen, layer, head, batch, query)
    held = float(weights[chosen].sum())
    return {
        "query": query,
        "label": run.tokens_of(layer, "query", batch).labels[query],
        "shape": {
            "head_dim": wide.query.shape[-1],
            "value_dim": None if values is None else values.shape[-1],
            "visible": int(visible.sum()),
        },
        "steps": described(shown),
        "keys": [{"key": key, "label": labels[key], "hidden": not bool(visible[key])} for key in chosen],
        "table": table,
        "q": wide.query[0, 0, query],
        "k": wide.key[0, 0, chosen],
        "v": None if values is None else values[chosen],
        "partial": None if values is None else (weights[chosen, None] * values[chosen]).cumsum(0),
        "largest": largest,
        "lse": lse,
        "sink": 0.0 if sink is None else math.exp(float(sink[0]) - lse),
        "held": held,
        "rest": float(weights.sum()) - held,
        "output": output,
        "own": own,
        "difference": None if own is None or output is None else float((own.double() - output).abs().max()),
        "own_is": how,
    }


def described(shown: Steps) -> list[dict[str, str]]:
    """What the steps of a query are called, their formulas, and whether they have numbers per query or per key."""
    per = {"query": "query", "key": "keys", "value": "keys", "weigh": "query"}
    return [
        {"name": step.name, "formula": step.formula, "note": step.note, "per": per.get(step.name, "key")}
        for step in shown
    ]


def _chosen(weights: Tensor, visible: Tensor, count: int, more: Sequence[int]) -> list[int]:
    """The keys with the largest weights, largest first, and those that are asked for besides."""
    seen = int(visible.sum())
    largest = weights.masked_fill(~visible, -1.0).topk(min(count, seen)).indices.tolist()
    return [*largest, *(key for key in dict.fromkeys(more) if key not in largest)]


def _own_output(run: Run, seen: Recorded, layer: int, head: int, batch: int, query: int) -> tuple[Tensor | None, str]:
    """What the model's own attention gave for a query, and a sentence on where that comes from."""
    kept = run.outputs.get(run.names[layer])
    dtype = str(seen.query.dtype).removeprefix("torch.")
    if kept is not None:
        own = kept[batch, run.layer(layer).heads.index(head), query]
        return own, f"The model computed it in {dtype}, while it ran; the steps here are in float64."
    if seen.value is None:
        return None, "The values were not recorded, so the steps end with the weights."
    if seen.grid.key_len > MAX_TOKENS_OF_OWN_OUTPUT:
        return None, "The text is too long to compute its output once more for comparison."
    rule = seen.scoring
    own = attention(
        seen.query, seen.key, seen.value, mask=rule.mask, bias=rule.bias, scale=rule.scale, softcap=rule.softcap,
        sink=rule.sink, additive=rule.additive,
    )[0, 0, query]  # fmt: skip
    return own, f"The library's kernel computed it in {dtype} from what was recorded; the steps here are in float64."


# --- the worked example ---


@torch.inference_mode()
def example(asked: Params) -> dict[str, Any]:
    """Attention by hand, with any numbers: x and the three matrices; what is not given is the three-token example's."""
    layer, x = three_tokens()
    given: dict[str, Tensor] = {"x": x[0]}
    given |= {name: layer.get_parameter(f"{name}.weight").T for name in ("query", "key", "value")}
    for name in given:
        if asked.has(name):
            given[name] = _matrix(asked, name)
    causal, scale = asked.given.get("causal", False), asked.number("scale", 1.0, least=-1e3, most=1e3)
    if not isinstance(causal, bool):
        raise asked.wrong("causal", "true or false")
    dim = given["x"].shape[1]
    for name in ("query", "key", "value"):
        if given[name].shape[0] != dim:
            raise ValueError(f"example: {name} must have {dim} rows, one for each feature of x, got {len(given[name])}")
    key_dim, value_dim = given["key"].shape[1], given["value"].shape[1]
    if given["query"].shape[1] != key_dim:
        raise ValueError(
            f"example: query and key must have as many columns, got {given['query'].shape[1]} and {key_dim}"
        )
    own = MultiHeadAttention(
        dim, 1, key_dim=key_dim, value_dim=value_dim, output=False, projection_bias=False, scale=scale,
        mask=Causal() if causal else None,
    ).double()  # fmt: skip
    for name in ("query", "key", "value"):
        own.get_parameter(f"{name}.weight").copy_(given[name].T)
    shown = steps(own, given["x"].double()[None])
    return {
        **given,
        "causal": causal,
        "scale": scale,
        "tokens": [f"token {n}" for n in range(len(given["x"]))],
        "steps": [_as_data(step) for step in shown],
    }


def _matrix(asked: Params, name: str) -> Tensor:
    rows = asked.given[name]
    tall = range(2, MAX_EXAMPLE_TOKENS + 1) if name == "x" else range(1, MAX_EXAMPLE_FEATURES + 1)
    expected = f"{tall[0]} to {tall[-1]} rows of 1 to {MAX_EXAMPLE_FEATURES} numbers, all rows as long"
    if not isinstance(rows, list) or len(rows) not in tall or not all(isinstance(row, list) for row in rows):
        raise asked.wrong(name, expected)
    if not 1 <= len(rows[0]) <= MAX_EXAMPLE_FEATURES or any(len(row) != len(rows[0]) for row in rows):
        raise asked.wrong(name, expected)
    cells = [cell for row in rows for cell in row]
    if any(isinstance(cell, bool) or not isinstance(cell, (int, float)) or not abs(cell) <= 1e6 for cell in cells):
        raise asked.wrong(name, "numbers from -1000000 to 1000000")
    return torch.tensor(rows, dtype=torch.float64)


def _as_data(step: Step) -> dict[str, Any]:
    tensor = step.tensor[0]
    tensor = tensor[0] if "heads" in step.axes or "kv_heads" in step.axes else tensor
    axes = [axis for axis in step.axes if axis not in ("batch", "heads", "kv_heads")]
    return {"name": step.name, "formula": step.formula, "axes": axes, "numbers": tensor, "note": step.note}

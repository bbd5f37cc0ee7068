"""The page of `regard explain`: how one head comes to its output, step by step, with formulas and numbers."""

import math
from collections.abc import Sequence

import torch
from rich.text import Text
from torch import Tensor, nn

from regard.display.letters import fitted
from regard.display.page import print_title
from regard.display.paper import Paper, quoted
from regard.display.reading import Look
from regard.layers import MultiHeadAttention
from regard.models import Decoder
from regard.stepwise import Step, Steps, attention_steps, format_number, numbers, steps, three_tokens

SCORES = ("score", "scale", "cap", "bias", "mask", "softmax")
"""The steps that have one number per key."""

NUMBER = 11
"""Cells of the widest number, and a space."""


def explain_token(model: nn.Module, view: Look) -> Steps:
    """The steps of the shown layer's attention for the shown query, with the numbers the model has there.

    Of a model that is not regard's own they are those from query and key on, as its layers made them.
    """
    if not isinstance(model, Decoder):
        return _from_heads(view)
    given: list[Tensor] = []
    attention = model.layers[view.layer].get_submodule("attention")
    assert isinstance(attention, MultiHeadAttention)
    hook = attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    try:
        with torch.inference_mode():
            model(view.tokens)
    finally:
        hook.remove()
    return steps(attention, given[0], query=view.query)


def _from_heads(view: Look) -> Steps:
    seen = view.recording[view.layer]
    queries = range(view.query, view.query + 1)
    made = "as the model's layer made it, turned by its position where the model does that"
    axes = ("batch", "heads", "query_len", "head_dim")
    return Steps(
        [
            Step("split query", made, axes, seen.query[:, :, view.query : view.query + 1]),
            Step("split key", made, ("batch", "kv_heads", "key_len", "head_dim"), seen.key),
            *attention_steps(seen.query, seen.key, None, seen.scoring, queries),
        ]
    )


def of_head(step: Step, head: int, shown: Steps) -> Tensor:
    """The part of a step that belongs to one query head: without the batch axis, and without the heads axis."""
    if "heads" in step.axes:
        return step.tensor[0, head]
    if "kv_heads" in step.axes:
        return step.tensor[0, head // (shown["split query"].tensor.shape[1] // step.tensor.shape[1])]
    return step.tensor[0]


def print_explained(paper: Paper, view: Look, shown: Steps, *, count: int = 12) -> None:
    """One query and one head: its vectors in every step, and the scores of its strongest keys in a table."""
    print_title(paper, view)
    paper.say(
        ("Token ", "bold"), f"{view.query} ", (quoted(view.label(view.query)), "bold reverse"),
        (" in layer ", "bold"), f"{view.layer}", (", head ", "bold"), f"{view.head} ({view.chosen})",
    )  # fmt: skip
    paper.gap()
    scores = [step for step in shown if step.name in SCORES]
    for step in shown:
        if step is scores[0]:
            _print_scores(paper, view, scores, count)
        elif step not in scores and "query_len" in step.axes:
            _print_formula(paper, step)
            _print_numbers(paper, of_head(step, view.head, shown))
    if shown.names[-1] == "project output":
        paper.quiet("The last vector is the layer's own output for this token: all heads together.")


def _print_formula(paper: Paper, step: Step) -> None:
    paper.say((f"{step.name:<16}", "bold"), step.formula, hang=16 if paper.width >= 60 else 2)
    if step.note:
        paper.say("  ", step.note, hang=2)


def _print_numbers(paper: Paper, tensor: Tensor) -> None:
    fit = max(1, (paper.width - paper.indent - len(" ...")) // NUMBER)
    for line in numbers(tensor, widest=min(8, fit)):
        paper.lines(paper.flow(Text(line), indent=paper.indent))


def _print_scores(paper: Paper, view: Look, scores: Sequence[Step], count: int) -> None:
    """From score to weight, for the keys with the largest weights."""
    for step in scores:
        _print_formula(paper, step)
    found = scores[-1].tensor[0, view.head, 0].topk(min(count, scores[-1].tensor.shape[-1]))
    largest = [(w, j) for w, j in zip(found.values.tolist(), found.indices.tolist(), strict=True) if w > 0]
    number = max(len("key"), len(str(view.count - 1)))
    room = paper.width - paper.indent - number - 2
    columns = list(scores)
    while len(columns) > 2 and len(columns) * (NUMBER + 1) > room - 8:
        del columns[-2]  # what is left out is told by its formula; score and weight stay
    token = min(24, max(3, room - len(columns) * (NUMBER + 1)))
    paper.gap()
    names = "".join(f"{'weight' if step.name == 'softmax' else step.name:>{NUMBER + 1}}" for step in columns)
    heading = " " * paper.indent + f"{'key':>{number}}  {fitted('token', token)}{names}"
    paper.lines([Text(heading, paper.palette.quiet)])
    for weight, key in largest:
        line = Text(" " * paper.indent + f"{key:>{number}}  {fitted(quoted(view.label(key)), token)}")
        for step in columns:
            shown = format_number(float(step.tensor[0, view.head, 0, key]))
            style = paper.palette.fill(weight) if step is scores[-1] else ""
            line.append(" " * (NUMBER + 1 - len(shown))).append(shown, style)
        paper.lines([line])
    held = sum(weight for weight, _ in largest)
    visible = int((scores[-2].tensor[0, view.head, 0] > -math.inf).sum())
    keys = f"{len(largest)} of the {visible} keys it may see hold" if visible > 1 else "the one key it may see holds"
    paper.say(f"{keys} {held:.1%} of the weight", indent=paper.indent)
    paper.gap()


def print_three_tokens(paper: Paper) -> None:
    """The worked example: every number of every step, and what rounding does to it."""
    shown = steps(*three_tokens())
    paper.say(("Three tokens", "bold"), ", four features each, one head of three; whole numbers")
    paper.gap()
    paper.say(("x", "bold"))
    _print_numbers(paper, three_tokens()[1])
    for step in shown:
        _print_formula(paper, step)
        axes = [f"{axis} {size}" for axis, size in zip(step.axes, step.tensor.shape, strict=True) if axis != "batch"]
        paper.lines(paper.flow(Text(", ".join(axes), paper.palette.quiet), indent=paper.indent))
        _print_numbers(paper, step.tensor)
    exact, rounded = rounded_weights(shown)
    paper.gap()
    paper.say(("Rounding", "bold"))
    paper.say(
        "Weights in tenths are easier to read, and give another output. Rounded so that each row still sums to 1 (the "
        "largest remainders up, the others down), the weights"
    )
    _print_numbers(paper, rounded)
    paper.say("give the output")
    _print_numbers(paper, rounded @ values(shown))
    paper.say("and the exact weights give")
    _print_numbers(paper, exact @ values(shown))


def rounded_weights(shown: Steps) -> tuple[Tensor, Tensor]:
    """The example's weights, exact and in whole tenths that still sum to 1: the largest remainders are rounded up."""
    exact = shown["softmax"].tensor[0, 0]
    tenths = exact.mul(10).floor()
    for row, remainders in zip(tenths, exact * 10 - tenths, strict=True):
        row[remainders.topk(10 - int(row.sum())).indices] += 1
    return exact, tenths / 10


def values(shown: Steps) -> Tensor:
    """The example's values."""
    return shown["split value"].tensor[0, 0]

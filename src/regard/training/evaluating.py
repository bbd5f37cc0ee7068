"""Evaluation on held-out texts while a model is being trained, and when to stop because it gets no better."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.training.context import Context
from regard.training.data import Examples
from regard.training.processes import Processes

EVALUATED_TOKENS = 100_000
"""Tokens after which an evaluation ends: enough to tell losses apart by a hundredth, few enough to take seconds."""


@dataclass
class Course:
    """How the loss on held-out texts has gone: what a run that goes on has to know.

    Attributes:
        step, loss: of the best evaluation so far; loss infinite before the first.
        waited: evaluations since then.
    """

    step: int = 0
    loss: float = math.inf
    waited: int = 0

    def add(self, step: int, loss: float) -> bool:
        """Takes another evaluation; whether it is the best.

        >>> course = Course()
        >>> [course.add(step, loss) for step, loss in enumerate([3.0, 2.0, 2.5, 2.0])], course
        ([True, True, False, False], Course(step=1, loss=2.0, waited=2))
        """
        better = loss < self.loss
        if better:
            self.step, self.loss = step, loss
        self.waited = 0 if better else self.waited + 1
        return better


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    data: Examples,
    batch_size: int,
    parts: Callable[[Any], Iterable[Any]],
    here: Processes,
    context: Context,
) -> float:
    """The mean loss on held-out texts, on the first `EVALUATED_TOKENS` of them or on all; nothing is dropped.

    Args:
        parts: the parts of a batch that this process computes, alone or together with those of its `context`.
    """
    total, counted, tokens, taken = 0.0, 0, 0, 0
    with evaluated(model):
        while not taken or (tokens < EVALUATED_TOKENS and data.epochs(taken) < 1):
            batch = data.batch(taken, batch_size)
            tokens, taken = tokens + data.tokens(batch), taken + batch_size
            for rows in parts(batch):
                loss, answers = context.loss(model, data, rows)
                total += float(loss) * answers
                counted += answers
    return here.sum(total) / here.sum(counted)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A model as it is used, not as it is trained: without dropout."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)

"""The engines that compute strips: torch's operators everywhere, the compiled library, and programs for a GPU.

Where a plan has others beside it, the library goes on from one to the next, and the results of torch's operators are
merged; the gradients of each follow from the result of all, and are added up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.dropout import Dropout
from regard.kernels.call import Call
from regard.kernels.strips import engine, native, options
from regard.kernels.strips.gpu import passes
from regard.kernels.strips.grouping import StripPlan
from regard.numerics import merge, upcast
from regard.scores import Scoring


def _by_operators(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
    plan: StripPlan, *, wants_lse: bool = True, learns: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `native.forward`, but that outputs lie as torch's operators lay them. Results are merged in float32,
    unrounded."""
    if not plan.others:
        output, lse = engine.forward(query, key, value, sink, scoring, dropout, plan, wants_lse=wants_lse)
        return output, lse, output
    three = upcast(query), upcast(key), upcast(value)
    exact, lse = engine.forward(*three, sink, scoring, dropout, plan)
    for other in plan.others:
        merge(exact, lse, *engine.forward(*three, None, scoring, dropout, other))
    return exact.to(query.dtype), lse, exact


@dataclass(frozen=True, slots=True)
class Engine:
    """How strips are cut and computed."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why it does not support a call; None if it does."""
    plan_of: Callable[[Call], Any]
    """What it goes by: a `StripPlan`, or the `Blocks` of programs for a GPU."""
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """As `native.forward`, of a plan and those beside it."""
    pull: Callable[..., tuple[Tensor | None, ...]]
    """`backward` of one plan."""
    keeps_exact: bool
    """Whether sums are wider than half precision; if not, all is computed in float32 where gradients are added up."""

    def backward(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
        plan: StripPlan, *learned: Tensor, grad_output: Tensor, **results: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """As `native.backward`."""
        four = query, key, value, grad_output
        if plan.others and not self.keeps_exact:
            four = upcast(query), upcast(key), upcast(value), upcast(grad_output)
        *three, results["grad_output"] = four
        found = self.pull(*three, sink, scoring, dropout, plan, *learned, **results)
        for other in plan.others:
            more = self.pull(*three, None, scoring, dropout, other, *learned, **results)
            found = tuple(map(added, found, more))
        return (*(None if grad is None else grad.to(query.dtype) for grad in found[:3]), *found[3:])


def added(one: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Two gradients, of which there may be none."""
    return one if one is None or more is None else one.add_(more)


OPERATORS = Engine("strips", lambda call: None, options.plan_of, _by_operators, engine.backward, keeps_exact=False)
NATIVE = Engine("native", native.cannot, native.plan_of, native.forward, native.backward, keeps_exact=True)
GPU = Engine("triton", passes.cannot, passes.plan_of, passes.forward, passes.backward, keeps_exact=True)

ENGINES = {engine.name: engine for engine in (OPERATORS, NATIVE, GPU)}


def able(engine: Engine, call: Call) -> Engine:
    """The engine, or torch's operators if it cannot compute a call."""
    return engine if engine.cannot(call) is None else OPERATORS

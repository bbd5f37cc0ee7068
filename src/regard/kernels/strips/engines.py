"""The two engines that compute strips: torch's operators, everywhere, and the compiled library, where there is one.

Where a plan has others beside it, each is computed as if its keys were all there are, and results are merged; the
gradients of each follow from the result of all, and are added up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.dropout import Dropout
from regard.kernels.call import Call
from regard.kernels.strips import engine, native, options
from regard.kernels.strips.grouping import StripPlan
from regard.numerics import merge, upcast
from regard.scores import Scoring


def _by_operators(*given: Any, wants_lse: bool = True, learns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    forward: Callable[..., tuple[Tensor, Tensor]] = engine.forward
    output, lse = forward(*given, wants_lse=wants_lse)
    return output, lse, output


@dataclass(frozen=True, slots=True)
class Engine:
    """How strips are cut and computed."""

    name: str
    plan_of: Callable[[Call], StripPlan]
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """`forward` of one plan."""
    pull: Callable[..., tuple[Tensor | None, ...]]
    """`backward` of one plan."""
    keeps_exact: bool
    """Whether the third that `attend` returns is not rounded to half precision, as results must not be before they are
    merged; if not, all is computed in float32."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
        plan: StripPlan, *, wants_lse: bool = True, learns: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `native.forward`."""
        if not plan.others:
            wanted = {"wants_lse": wants_lse, "learns": learns}
            return self.attend(query, key, value, sink, scoring, dropout, plan, **wanted)
        three = (query, key, value) if self.keeps_exact else (upcast(query), upcast(key), upcast(value))
        _, lse, exact = self.attend(*three, sink, scoring, dropout, plan)
        for other in plan.others:
            _, lse_of_other, more = self.attend(*three, None, scoring, dropout, other)
            merge(exact, lse, more, lse_of_other)
        return exact.to(query.dtype), lse, exact

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


OPERATORS = Engine("strips", options.plan_of, _by_operators, engine.backward, keeps_exact=False)
NATIVE = Engine("native", native.plan_of, native.forward, native.backward, keeps_exact=True)


def able(engine: Engine, call: Call) -> Engine:
    """The engine, or the other one if it cannot compute a call."""
    return OPERATORS if engine is NATIVE and native.cannot(call) is not None else engine

"""The two engines that compute strips: torch's operators, everywhere, and the compiled library, where there is one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.strips import engine, native, options
from regard.kernels.strips.grouping import StripPlan


def _by_operators(*given: Any, wants_lse: bool = True, learns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    forward: Callable[..., tuple[Tensor, Tensor]] = engine.forward
    output, lse = forward(*given, wants_lse=wants_lse)
    return output, lse, output


@dataclass(frozen=True, slots=True)
class Engine:
    """How strips are cut and computed."""

    name: str
    plan_of: Callable[[Call], StripPlan]
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Takes and returns what `native.forward` does."""
    backward: Callable[..., tuple[Tensor | None, ...]]
    """Takes and returns what `native.backward` does."""


OPERATORS = Engine("strips", options.plan_of, _by_operators, engine.backward)
NATIVE = Engine("native", native.plan_of, native.forward, native.backward)


def able(engine: Engine, call: Call) -> Engine:
    """The engine, or the other one if it cannot compute a call."""
    return OPERATORS if engine is NATIVE and native.cannot(call) is not None else engine

"""The statistics that the compiled kernel computes, without tiles: a fraction of the time."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from regard.kernels.strips import native
from regard.kernels.strips.looking import Kind, Wanted, as_call, look
from regard.observation import tuning
from regard.observation.images import Image, Pyramid
from regard.observation.measures import Entropy, Received, Top
from regard.observation.observed import ObservedCall
from regard.observation.statistic import Statistic
from regard.observation.streaming import Progress
from regard.shapes import is_number


def supports(call: ObservedCall) -> bool:
    """Whether the kernel is there for a call: on a CPU, unless gradients are recorded."""
    return not call.wants_grad and native.cannot(as_call(call.query, call.key, call.scoring)) is None


def computes(statistic: Statistic[Any]) -> bool:
    """Whether the kernel computes a statistic."""
    if isinstance(statistic, Image) and not statistic.is_whole:
        return False
    if isinstance(statistic, Top) and is_number(statistic.count) and statistic.count > tuning.MAX_COMPILED_TOP:
        return False
    return type(statistic) in _WANTED  # a class that derives from one of these may compute something else


def lse_of(call: ObservedCall, queries: range) -> Tensor | None:
    """lse of some queries: [batch, heads, len(queries)]; None if the mask or the bias would have to be evaluated for
    others, too."""
    given, lse = as_call(call.query, call.key, call.scoring), call.lse_of_empty
    if len(queries) < call.grid.query_len and not native.is_quickly_planned(given):
        return None
    look(given, lse, queries=queries)
    return lse[:, :, queries.start : queries.stop]


def compute(call: ObservedCall, statistics: Sequence[Statistic[Any]], progress: Progress, *, knows_lse: bool) -> None:
    """Computes statistics that have started, and fills in the call's lse, contiguous, if it is not known."""
    assert call.lse is not None
    length = call.grid.query_len
    look(
        as_call(call.query, call.key, call.scoring),
        call.lse,
        [_WANTED[type(statistic)](statistic) for statistic in statistics],
        knows_lse=knows_lse,
        progress=lambda done, all: progress(length * done // all, length),
    )


def _entropy(statistic: Entropy) -> Wanted:
    return Wanted(Kind.ENTROPY, statistic.total)


def _received(statistic: Received) -> Wanted:
    return Wanted(Kind.RECEIVED, statistic.total)


def _top(statistic: Top) -> Wanted:
    return Wanted(Kind.TOP, statistic.weights, statistic.keys)


def _image(statistic: Image) -> Wanted:
    kind = Kind.PIXEL_MAXIMA if statistic.pool == "max" else Kind.PIXEL_SUMS
    rows, columns = statistic.steps
    return Wanted(kind, statistic.pixels, pixel=(rows, columns))


def _pyramid(statistic: Pyramid) -> Wanted:
    return _image(statistic.finest)


_WANTED: dict[type, Callable[[Any], Wanted]] = {
    Entropy: _entropy, Received: _received, Top: _top, Image: _image, Pyramid: _pyramid,
}  # fmt: skip

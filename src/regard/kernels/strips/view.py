"""The parts of query, key and value that belong to one strip, as views where possible."""

import torch
from torch import Tensor

from regard.kernels.strips.plan import Strip


class StripView:
    """A strip's part of per-query or per-key tensors [batch, heads, length, ...]."""

    def __init__(self, strip: Strip) -> None:
        self.strip = strip

    def of_query(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-query tensor."""
        tensor = self._of_batch(tensor)
        if self.strip.times > 1:
            return self._repeats(tensor, self.strip.queries, self.strip.step)
        return _at(tensor, self.strip.queries)

    def _of_batch(self, tensor: Tensor) -> Tensor:
        at = self.strip.batch_index
        return tensor if at is None else tensor.narrow(0, at, 1)

    def of_key(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-key tensor, its spans concatenated."""
        spans = self.spans_of_key(tensor)
        return spans[0] if len(spans) == 1 else torch.cat(spans, dim=2)

    def spans_of_key(self, tensor: Tensor) -> list[Tensor]:
        """The part of each span, as a view."""
        tensor, spans = self._of_batch(tensor), self.strip.spans
        if self.strip.times == 1:
            return [_at(tensor, span) for span in spans]
        shared = [self._repeats(tensor, span, 0) for span in spans[:-1]]
        return [*shared, self._repeats(tensor, spans[-1], self.strip.step)]

    def _repeats(self, tensor: Tensor, first: range, step: int) -> Tensor:
        """What equal strips hold, `step` after one another, as a batch of views: [times, heads, length, ...]."""
        start = tensor[0, :, first.start :]
        heads, place, *rest = start.stride()
        return start.as_strided(
            (self.strip.times, len(start), len(first), *start.shape[2:]),
            (step * place, heads, first.step * place, *rest),
        )

    def add_to_key(self, total: Tensor, part: Tensor) -> None:
        """Adds the strip's part to a per-key tensor."""
        total, strip = self._of_batch(total), self.strip
        start = 0
        for span in strip.spans if strip.times == 1 else strip.spans[:-1]:
            of_span = part[:, :, start : start + len(span)]
            _at(total, span).add_(of_span if strip.times == 1 else of_span.sum(0))
            start += len(span)
        if strip.times > 1:
            moving = strip.spans[-1]
            repeats, part = self._repeats(total, moving, strip.step), part[:, :, start:]
            apart = -(-len(moving) // strip.step) if strip.overlaps else 1
            for first in range(apart):  # so many strips further on, keys are others
                repeats[first::apart] += part[first::apart]


def _at(tensor: Tensor, places: range) -> Tensor:
    """The tokens at these places, as a view: [batch, heads, length, ...]."""
    if places.step == 1:  # in half the time of slicing
        return tensor.narrow(2, places.start, len(places))
    return tensor[:, :, places.start : places.stop : places.step]

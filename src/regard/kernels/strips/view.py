"""The parts of query, key and value that belong to one strip, as views where possible."""

import torch
from torch import Tensor

from regard.kernels.strips.plan import Strip


class StripView:
    """A strip's part of per-query or per-key tensors [batch, heads, length, ...]."""

    def __init__(self, strip: Strip) -> None:
        self.strip = strip
        at = strip.batch_index
        self.batch = slice(None) if at is None else slice(at, at + 1)
        self.queries = slice(strip.queries.start, strip.queries.stop, strip.queries.step)

    def of_query(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-query tensor."""
        tensor = tensor[self.batch]
        if self.strip.times > 1:
            return self._repeats(tensor, self.strip.queries, self.strip.step)
        return tensor[:, :, self.queries]

    def of_key(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-key tensor, its spans concatenated."""
        spans = self.spans_of_key(tensor)
        return spans[0] if len(spans) == 1 else torch.cat(spans, dim=2)

    def spans_of_key(self, tensor: Tensor) -> list[Tensor]:
        """The part of each span, as a view."""
        tensor, spans = tensor[self.batch], self.strip.spans
        if self.strip.times == 1:
            return [tensor[:, :, span.start : span.stop : span.step] for span in spans]
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
        total, strip = total[self.batch], self.strip
        start = 0
        for span in strip.spans if strip.times == 1 else strip.spans[:-1]:
            of_span = part[:, :, start : start + len(span)]
            total[:, :, span.start : span.stop : span.step] += of_span if strip.times == 1 else of_span.sum(0)
            start += len(span)
        if strip.times > 1:
            moving = strip.spans[-1]
            repeats, part = self._repeats(total, moving, strip.step), part[:, :, start:]
            apart = -(-len(moving) // strip.step) if strip.overlaps else 1
            for first in range(apart):  # so many strips further on, keys are others
                repeats[first::apart] += part[first::apart]

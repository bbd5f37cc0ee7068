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
        return self._repeats(tensor, self.strip.queries) if self.strip.times > 1 else tensor[:, :, self.queries]

    def of_key(self, tensor: Tensor) -> Tensor:
        """The strip's part of a per-key tensor, its spans concatenated."""
        tensor = tensor[self.batch]
        if self.strip.times > 1:
            return self._repeats(tensor, self.strip.spans[0])
        pieces = [tensor[:, :, span.start : span.stop : span.step] for span in self.strip.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _repeats(self, tensor: Tensor, first: range) -> Tensor:
        """Equal strips as a batch of views: [times, heads, length, ...]; their keys may overlap."""
        start = tensor[0, :, first.start :]
        heads, place, *rest = start.stride()
        return start.as_strided(
            (self.strip.times, len(start), len(first), *start.shape[2:]),
            (self.strip.step * place, heads, first.step * place, *rest),
        )

    def add_to_key(self, total: Tensor, part: Tensor) -> None:
        """Adds the strip's part to a per-key tensor."""
        total = total[self.batch]
        if self.strip.times > 1:
            repeats = self._repeats(total, self.strip.spans[0])
            apart = -(-len(self.strip.spans[0]) // self.strip.step) if self.strip.overlaps else 1
            for first in range(apart):  # so many strips further on, keys are others
                repeats[first::apart] += part[first::apart]
            return
        start = 0
        for span in self.strip.spans:
            total[:, :, span.start : span.stop : span.step] += part[:, :, start : start + len(span)]
            start += len(span)

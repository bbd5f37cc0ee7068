"""Strips that have neither queries nor keys in common, as packed documents: torch's operator on one after another.

Nothing is merged or added up: results and gradients of each strip are copied into their place while they are in the
cache. Of a short document, torch's operator takes some 30 us; the general way (`engine`), which has room for biases,
several spans and batches of strips, would take as long again. Row "documents of 20 to 200" of features.py. Equal
documents that follow one another are the batch of one call: row "8 documents, causal".
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.kernels import fused
from regard.kernels.hidden import Hidden
from regard.kernels.strips.plan import Kind, Strip
from regard.numerics import wide


class Apart:
    """Strips that divide queries and keys among them.

    Args:
        strips: as from `one_by_one`.
        hidden: what the mask hides in each; None for nothing, and for a causal square.
    """

    def __init__(self, strips: Sequence[Strip], hidden: Sequence[Hidden | None]) -> None:
        self.strips, self._hidden = strips, hidden
        self._pays: dict[Hashable, bool] = {}
        self._queries: dict[int | None, list[int]] = {}
        self._keys: dict[int | None, list[int]] = {}
        for strip in strips:
            self._queries.setdefault(strip.batch_index, []).append(strip.times * len(strip.queries))
            self._keys.setdefault(strip.batch_index, []).append(strip.times * strip.keys)

    def pays(self, call: Hashable, find_out: Callable[[], bool]) -> bool:
        """Whether this is the fastest way for a call; found out once for all that are equal."""
        if call not in self._pays:
            self._pays[call] = find_out()
        return self._pays[call]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, needs_lse: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp (which holds anything if it is not needed)."""
        output, lse = query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=wide(query.dtype))
        places = zip(self._of_query(output), self._of_query(lse), strict=True)
        tensors = zip(self._of_query(query), self._of_key(key), self._of_key(value), strict=True)
        for three, how, (to_output, to_lse) in zip(tensors, self._masks(query.dtype), places, strict=True):
            of_strip, lse_of_strip = fused.flash(*three, scale=scale, **how)
            to_output.copy_(of_strip)
            if needs_lse:
                to_lse.copy_(lse_of_strip)
        return output, lse

    def gradients(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of query, key and value."""
        by_query = [*map(self._of_query, (grad_output, query, output, lse))]
        tensors = zip(*by_query[:2], self._of_key(key), self._of_key(value), *by_query[2:], strict=True)
        grads = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
        places = zip(self._of_query(grads[0]), *map(self._of_key, grads[1:]), strict=True)
        for six, how, of_strip in zip(tensors, self._masks(query.dtype), places, strict=True):
            for place, grad in zip(of_strip, fused.flash_backward(*six, scale=scale, **how), strict=True):
                place.copy_(grad)
        return grads

    def _of_query(self, tensor: Tensor) -> list[Tensor]:
        return self._parts(tensor, self._queries)

    def _of_key(self, tensor: Tensor) -> list[Tensor]:
        return self._parts(tensor, self._keys)

    def _parts(self, tensor: Tensor, lengths: dict[int | None, list[int]]) -> list[Tensor]:
        """What each call gets of a tensor [batch, heads, length, ...], as views."""
        by_batch = [tensor] if None in lengths else tensor.split(1)
        parts = (part for one, of_one in zip(by_batch, lengths.values(), strict=True) for part in _cut(one, of_one))
        return [_batched(part, strip.times) for part, strip in zip(parts, self.strips, strict=True)]

    def _masks(self, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
        """What torch's operator is told of each strip's mask."""
        for strip, hidden in zip(self.strips, self._hidden, strict=True):
            if strip.kind is Kind.CAUSAL:
                yield {"is_causal": True}
            else:
                yield {} if hidden is None else {"attn_mask": hidden.numbers(dtype)}


def _cut(tensor: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    return (tensor,) if len(lengths) == 1 else tensor.split_with_sizes(lengths, dim=2)


def _batched(part: Tensor, times: int) -> Tensor:
    """Equal pieces of a length as a batch: [1, heads, times * length, ...] -> [times, heads, length, ...]."""
    return part if times == 1 else part[0].unflatten(1, (times, -1)).transpose(0, 1)


def one_by_one(strips: Sequence[Strip], lengths: tuple[int, int]) -> list[Strip] | None:
    """The strips in the order of their queries, if each has one span, and they divide all queries and keys among them
    in this order. Batches of strips stay together where nothing lies between them."""
    if any(len(strip.spans) > 1 or strip.merges or strip.overlaps or not strip.keys for strip in strips):
        return None
    found = [part for strip in strips for part in _without_gaps(strip)]
    found.sort(key=lambda strip: (strip.batch_index or 0, strip.queries.start))
    before = {strip.batch_index: (0, 0) for strip in found}
    for strip in found:
        queries, (keys,) = strip.queries, strip.spans
        if (queries.start, keys.start) != before[strip.batch_index] or not queries.step == keys.step == 1:
            return None
        further = (strip.times - 1) * strip.step
        before[strip.batch_index] = queries.stop + further, keys.stop + further
    return found if set(before.values()) == {lengths} else None


def _without_gaps(strip: Strip) -> list[Strip]:
    """The strips that it stands for, as one batch if each begins where the one before it ends."""
    if strip.times == 1 or strip.step == len(strip.queries) == strip.keys:
        return [strip]
    return [_nth(strip, number) for number in range(strip.times)]


def _nth(strip: Strip, number: int) -> Strip:
    """One of the equal strips that it stands for."""
    queries, span = (
        range(part.start + number * strip.step, part.stop + number * strip.step, part.step)
        for part in (strip.queries, strip.spans[0])
    )
    return replace(strip, queries=queries, spans=(span,), times=1, step=0)

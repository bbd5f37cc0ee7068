"""Positions that are added to the embedding: fixed waves, or a trained vector for each."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.hooks import share_of
from regard.positions.angles import (
    MIN_GROWTH_ROWS,
    angles_between,
    inverse_frequencies,
    positions_from,
    positions_of,
    span,
)
from regard.shapes import check_whole


class Sinusoidal(nn.Module):
    """Fixed waves of different lengths, one vector per position.

        table[p, 2 i]     = sin(p / 10000 ** (2 i / dim))
        table[p, 2 i + 1] = cos(p / 10000 ** (2 i / dim))

    An odd dim ends with a sine. There is no longest position: the table grows on demand. It is a buffer that follows
    the module to its device and dtype and is not part of `state_dict()`.

    Shapes:
        returns [length, dim], or [batch, length, dim] where offset is a tensor; in the module's dtype

    Args:
        dim: features per token.

    Raises:
        ValueError: dim is not a positive integer, or length or offset is not a nonnegative integer.

    >>> Sinusoidal(4)(2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.5, arXiv:1706.03762
    """

    table: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = check_whole("Sinusoidal", "dim", dim)
        # even without rows, it records the device and dtype that rows will have
        self.register_buffer("table", torch.empty(0, dim), persistent=False)

    def forward(self, length: int, *, offset: int | Tensor = 0) -> Tensor:
        """The vectors of the positions `offset, offset + 1, ..., offset + length - 1`.

        Args:
            length: how many positions.
            offset: the first of them; an int, or an int tensor [batch] for rows that start at different places.
        """
        share, device = share_of(self), self.table.device
        end = span("Sinusoidal", offset, length)[1] if share is None else share.length
        if end > len(self.table):
            self._grow(max(end, len(self.table) + len(self.table) // 4 + MIN_GROWTH_ROWS))
        if share is not None:
            return F.embedding(positions_of("Sinusoidal", share, offset, length, device), self.table)
        return F.embedding(positions_from(offset, length, device), self.table)

    def _grow(self, rows: int) -> None:
        # a buffer created in inference_mode cannot be updated in place, as data-parallel training does
        with torch.inference_mode(False):
            angles = angles_between(len(self.table), rows, inverse_frequencies(self.dim, 10000.0))
            waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, : self.dim]
            self.table = torch.cat((self.table, waves.to(self.table)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Rows are recomputed from float64 in the new dtype: converting them would round twice, and converting bfloat16
        # back to float32 would not restore what was lost.
        self.table = self.table.new_empty(0, self.dim)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Learned(nn.Module):
    """A trained vector for each of `context_length` positions.

        output[i] = weight[offset + i]

    Shapes:
        weight   [context_length, dim], drawn from a normal distribution with standard deviation 0.02
        returns  [length, dim], or [batch, length, dim] where offset is a tensor; in the weight's dtype

    Args:
        context_length: number of positions.
        dim: features per token.

    Raises:
        ValueError: context_length or dim is not a positive integer, length or offset is not a nonnegative integer, or
            `offset + length` exceeds context_length: positions that were never trained have no vector.

    >>> positions = Learned(context_length=5, dim=2)
    >>> positions(3, offset=2).shape
    torch.Size([3, 2])

    References:
        Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1, arXiv:1705.03122
    """

    def __init__(self, context_length: int, dim: int) -> None:
        super().__init__()
        self.context_length = check_whole("Learned", "context_length", context_length)
        self.dim = check_whole("Learned", "dim", dim)
        self.weight = nn.Parameter(torch.empty(context_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialises the weight."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, length: int, *, offset: int | Tensor = 0) -> Tensor:
        """The vectors of the positions `offset, offset + 1, ..., offset + length - 1`.

        Args:
            length: how many positions.
            offset: the first of them; an int, or an int tensor [batch] for rows that start at different places.
        """
        share, device = share_of(self), self.weight.device
        if share is not None:
            positions = positions_of("Learned", share, offset, length, device)
            offset, length = 0, share.length  # of the whole text
        _, end = span("Learned", offset, length)
        if end > self.context_length:
            raise ValueError(
                f"Learned: no vectors beyond context_length={self.context_length}: "
                f"offset={end - length} plus length={length} ends at {end}\n"
                "  hint: shorten the input, or use Sinusoidal or Rotary, which have no last position"
            )
        if share is None:
            positions = positions_from(offset, length, device)
        return F.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, dim={self.dim}"

"""Positions of a call's tokens, and their angles."""

import torch
from torch import Tensor

from regard.hooks import Share
from regard.shapes import INTEGER_DTYPES, check_whole

MIN_GROWTH_ROWS = 64
"""Fewest rows by which a table grows, so that a token-by-token loop rarely grows it."""

# Rows before those asked for that a growing table keeps, so that a text without end takes no memory without end.
MAX_PAST_ROWS = 4096


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """Radians per token by which each pair of features rotates: `theta ** (-2 i / dim)` for pair i.

    Shapes:
        returns  float64 [dim // 2, rounded up], on the CPU

    Args:
        dim: features.
        theta: base.

    >>> inverse_frequencies(4, 10000.0)
    tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    return torch.pow(theta, -torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def angles_between(first: int, end: int, frequencies: Tensor) -> Tensor:
    """`position * frequency` [end - first, frequencies] in float64.

    Always on the CPU, since some devices have no float64, and all of them should get the same numbers.
    """
    return torch.outer(torch.arange(first, end, dtype=torch.float64, device="cpu"), frequencies)


def positions_from(offset: int | Tensor, length: int, device: torch.device) -> Tensor:
    """The positions, int64 [length], or [batch, length] where offset is a tensor."""
    if not isinstance(offset, Tensor):
        return torch.arange(offset, offset + length, device=device)
    return offset.to(device=device, dtype=torch.int64)[:, None] + torch.arange(length, device=device)


def positions_of(owner: str, share: Share, offset: int | Tensor, length: int, device: torch.device) -> Tensor:
    """The positions of the tokens that this process holds of a longer text: int64 [length]."""
    if isinstance(offset, Tensor) or offset != 0:
        raise ValueError(f"{owner}: in regard.parallel.sharded a text begins at offset 0, got {offset}")
    share.check(owner, length)
    return share.positions(device)


def span(owner: str, offset: int | Tensor, length: int, batch: int | None = None) -> tuple[int, int]:
    """The first position over all batch indices, and the end of the last one; validates offset and length."""
    check_whole(owner, "length", length, least=0)
    if not isinstance(offset, Tensor):
        first = check_whole(owner, "offset", offset, least=0)
        return first, first + length
    if offset.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{owner}: offset must be an int or an int tensor [batch], got a tensor of {offset.dtype}")
    if offset.dim() != 1 or batch not in (None, len(offset)):
        expected = "[batch]" if batch is None else f"[batch={batch}]"
        raise ValueError(
            f"{owner}: an offset tensor must be {expected}, one number per batch index, got {list(offset.shape)}\n"
            "  hint: one offset for all batch indices is an int"
        )
    offsets: list[int] = offset.tolist() or [0]
    check_whole(owner, "offset", min(offsets), least=0)
    return min(offsets), max(offsets) + length

"""Tiles that are constant along their diagonals, as a row of numbers by distance makes them, and sums along diagonals.

Each is the gradient of the other.
"""

from typing import Any

import torch
from torch import Tensor

from regard.graphs import tracing, transformed


def turned_tile(row: Tensor, rows: int, columns: int) -> Tensor:
    """A tile from the numbers on its diagonals, starting at the bottom left corner; it is differentiable.

    Shapes: [..., rows + columns - 1] -> [..., rows, columns]; tile[i, j] = row[rows - 1 - i + j].

    >>> turned_tile(torch.arange(4), 2, 3).tolist()
    [[1, 2, 3], [0, 1, 2]]
    """
    learns = row.requires_grad and torch.is_grad_enabled()
    if learns and transformed():  # torch.func.vmap has no rule for the gradient of `unfold`
        down, across = torch.arange(rows, device=row.device), torch.arange(columns, device=row.device)
        return scattered_tile(row, across - down[:, None] + rows - 1)
    if learns and not tracing():
        tile: Tensor = _Tile.apply(row, rows, columns)  # type: ignore[no-untyped-call]
        return tile
    return row.unfold(-1, columns, 1).flip(-2)


def diagonal_tile(row: Tensor, rows: int) -> Tensor:
    """The same numbers as a view of copies of the row, which takes less time for many rows.

    >>> diagonal_tile(torch.arange(4), 2).tolist()
    [[1, 2, 3], [0, 1, 2]]
    """
    length = row.shape[-1]
    copies = row[..., None, :].expand(*row.shape[:-1], rows, length).contiguous()
    strides = *copies.stride()[:-2], length - 1, 1
    return copies.as_strided((*row.shape[:-1], rows, length - rows + 1), strides, copies.storage_offset() + rows - 1)


def scattered_tile(row: Tensor, places: Tensor) -> Tensor:
    """row[..., places], which torch takes four times as long to index.

    Shapes: [..., length], places [rows, columns] -> [..., rows, columns].

    >>> scattered_tile(torch.arange(4), torch.tensor([[3, 0], [1, 1]])).tolist()
    [[3, 0], [1, 1]]
    """
    heads = row.shape[:-1]
    return row.gather(-1, places.flatten().expand(*heads, -1)).view(*heads, *places.shape)


def sum_diagonals(tile: Tensor) -> Tensor:
    """Sums along the diagonals: the gradient of a tile's row.

    >>> sum_diagonals(torch.tensor([[[1, 2, 3], [0, 1, 2]]])).tolist()
    [[0, 2, 4, 3]]
    """
    heads, rows, columns = tile.shape
    length = rows + columns - 1
    copies = tile.new_zeros(heads, rows, length)
    copies.as_strided((heads, rows, columns), (rows * length, length - 1, 1), rows - 1).copy_(tile)
    return copies.sum(1)


class _Tile(torch.autograd.Function):
    """`turned_tile`: torch sums the gradient of overlapping views in three to four times the time."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, rows: int, columns: int) -> Tensor:
        return row.unfold(-1, columns, 1).flip(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sums.apply(grad), None, None  # type: ignore[no-untyped-call]


class _Sums(torch.autograd.Function):
    """`sum_diagonals` of [..., rows, columns]."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor) -> Tensor:
        ctx.shape = tile.shape[-2:]
        sums = sum_diagonals(tile.reshape(-1, *tile.shape[-2:]))
        return sums.view(*tile.shape[:-2], sums.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return turned_tile(grad, *ctx.shape)

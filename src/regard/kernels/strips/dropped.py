"""Which weights of a strip are dropped, piece by piece."""

from torch import Tensor

from regard.dropout import Dropout
from regard.kernels.strips.grouping import keys_of
from regard.kernels.strips.pieces import Piece
from regard.kernels.strips.plan import Strip
from regard.shapes import Grid


class Dropped:
    """The dropout of one strip."""

    def __init__(self, dropout: Dropout, grid: Grid, strip: Strip) -> None:
        self._dropout, self._grid, self._strip = dropout, grid, strip
        alone = len(strip.spans) == 1
        self._keys = strip.spans[0] if alone else keys_of(strip, grid.device)

    def factors(self, piece: Piece) -> Tensor:
        """Factors for the weights of a piece, [stack, group * rows, keys]: 0, or 1 / (1 - rate)."""
        at = piece.batch if self._strip.batch_index is None else self._strip.batch_index
        kept = self._dropout.keep(
            self._grid,
            self._strip.queries[piece.rows],
            self._keys[: piece.keys],
            batches=range(at, at + 1),
            heads=range(piece.heads.start, piece.heads.stop),
            dtype=piece.space.dtype,
        )
        stack = len(piece.by_query[0])
        return kept.mul_(1.0 / (1.0 - self._dropout.rate)).view(stack, -1, piece.keys)

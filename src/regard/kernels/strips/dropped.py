"""Which weights of a strip are dropped, piece by piece."""

from torch import Tensor

from regard.dropout import Dropout
from regard.kernels.strips.pieces import Piece
from regard.kernels.strips.view import StripView
from regard.shapes import Grid


class Dropped:
    """The dropout of one strip.

    Attributes:
        by_query, by_key: the random numbers that decide, of the strip as a call of its own.
        factor: what weights that are kept are multiplied by; values and gradients are fewer, and products multiply.
    """

    def __init__(self, dropout: Dropout, grid: Grid, view: StripView) -> None:
        numbers, (first, *others) = dropout.numbers(grid), view.strip.spans
        self._dropout, self.factor = dropout, dropout.factor
        self._odd: int | None = None
        by_key = [numbers.columns, numbers.odds()]
        if isinstance(numbers.odd, int) and not others and first.step == 1 and view.strip.step % 2 == 0:
            self._odd = (numbers.odd + first.start) % 2
            by_key = [numbers.columns]
        self.by_query = [view.of_query(numbers.rows)]
        self.by_key = [view.of_key(of_all.expand(grid.batch, 1, -1)) for of_all in by_key]

    def kept(self, piece: Piece) -> Tensor:
        """1 for weights of a piece that are kept, 0 for others: int16, [stack, group * rows, keys]."""
        rows, (columns, *odd) = piece.by_query[-1].flatten(1), piece.to_key[-len(self.by_key) :]
        return self._dropout.kept(rows, columns, odd[0] if self._odd is None else self._odd)

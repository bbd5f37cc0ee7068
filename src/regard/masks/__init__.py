"""Who may attend to whom.

A mask answers two questions about a rectangle of the score matrix, queries (rows) times keys (columns), both given as
indices into the call:

    allowed(queries, keys)  True where the query may attend to the key. **True = may attend**, always.
    tile(rows, columns)     EMPTY, PARTIAL or FULL: a summary of the rectangle.

For every structured mask, the second is computed in closed form, so that kernels can skip empty parts of a matrix that
is never built. Masks compose with ``&``, ``|`` and ``~``, print as the expression that makes them, and do not depend on
the length: query i has *position* ``i + offset`` and key j position j, where by default offset is
``key_len - query_len``, so that the last query has the position of the last key (as with a cache). The offset is fixed
when a call binds the mask to its lengths (`Mask.bind`); before that, the default offset counts as 0.

    Causal()                 Window(2)                Causal() & Window(2)     Causal() | Prefix(2)
    # . . . .                # # . . .                # . . . .                # # . . .
    # # . . .                # # # . .                # # . . .                # # . . .
    # # # . .                . # # # .                . # # . .                # # # . .
    # # # # .                . . # # #                . . # # .                # # # # .
    # # # # #                . . . # #                . . . # #                # # # # #
"""

from regard.masks.algebra import EVERYTHING, And, Everything, Mask, Not, Or, Tile, check_mask
from regard.masks.data import Dense, Document, Padding, Where
from regard.masks.positional import Band, Causal, Chunk, Positioned, Prefix, Strided, Window

__all__ = [
    "EVERYTHING",
    "And",
    "Band",
    "Causal",
    "Chunk",
    "Dense",
    "Document",
    "Everything",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Positioned",
    "Prefix",
    "Strided",
    "Tile",
    "Where",
    "Window",
    "check_mask",
]

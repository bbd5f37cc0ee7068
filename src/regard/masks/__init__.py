"""Who may attend to whom.

A mask answers two questions about a rectangle of the score matrix, queries (rows) times keys (columns), both given as
indices into the call:

    allowed(queries, keys)  True where the query may attend to the key. **True = may attend**, always.
    tile(rows, columns)     EMPTY, PARTIAL or FULL: the same answer for the whole rectangle, without looking inside.

The second is closed-form for every structured mask, which is what lets a kernel skip the empty part of a matrix that
is never built. Masks compose with ``&``, ``|`` and ``~``, print as the expression that makes them, and know no length:
query i stands at *position* ``i + offset`` and key j at position j, where the default offset ``key_len - query_len``
puts the last query on the last key (right for a cache; zero for a square). The offset is settled when a call binds the
mask to its lengths (`Mask.bind`); a mask that was never bound counts its default offset as 0.

    Causal()                 Window(2)                Causal() & Window(2)     Causal() | Prefix(2)
    # . . . .                # # . . .                # . . . .                # # . . .
    # # . . .                # # # . .                # # . . .                # # . . .
    # # # . .                . # # # .                . # # . .                # # # . .
    # # # # .                . . # # #                . . # # .                # # # # .
    # # # # #                . . . # #                . . . # #                # # # # #

Here belongs what is true of a mask whoever computes with it.
"""

from regard.indexing import Indices
from regard.masks.algebra import EVERYTHING, And, Everything, Mask, Not, Or, Tile, check_mask
from regard.masks.data import Dense, Document, Padding, Where
from regard.masks.positional import Band, Causal, Chunk, Positioned, Prefix, Strided, Window
from regard.shapes import Offset

__all__ = [
    "EVERYTHING",
    "And",
    "Band",
    "Causal",
    "Chunk",
    "Dense",
    "Document",
    "Everything",
    "Indices",
    "Mask",
    "Not",
    "Offset",
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

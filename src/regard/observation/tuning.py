"""How large tiles are: every constant that was found by measuring, with its unit and its reason. Nothing else.

Measured in float32 on 2 cores of an AMD EPYC, with heads of 64 and texts of up to 131,072 tokens, by

    python benchmarks/observation.py --set MAX_TILE_KEYS=1024

which times every task with another value of a constant. `MAX_TILE_SCORES_ON_GPU` has not been measured.
"""

MAX_TILE_SCORES = 1 << 20
"""Scores in a tile on a CPU: 4 MiB in float32, small enough for the cache between one operation and the next."""

MAX_TILE_SCORES_ON_GPU = 1 << 25
"""Scores in a tile on a GPU, where starting an operation costs more than a cache gains."""

MAX_TILE_KEYS = 2048
"""Keys in a tile where lse is known: wider ones are no faster."""

MAX_WHOLE_ROW_KEYS = 16384
"""Keys that a tile's queries see, first to last, up to which a tile holds them all and so brings lse: beyond that a
pass for lse beforehand is faster."""

MAX_ATTENDED_KEYS = 4096
"""The same for a pass that brings attention's output too, which costs a second product."""

MIN_HEADS_OF_WIDE_TILES = 4
"""Heads of all batch rows from which on tiles are `MAX_TILE_KEYS` wide; with fewer, half of that is faster."""

TILE_QUERIES = 128
"""Queries of one head in a tile before a second head is taken into it: matrix products are faster with more rows."""

MAX_WHOLE_ROW_COST = 1.5
"""Scores of tiles that hold whole rows, over those of tiles that skip what is hidden, up to which lse from the same
pass is worth them."""

TILE_OVERHEAD_SCORES = 1 << 15
"""Scores that could be computed in the time that the calls of one tile take."""

MIN_TILE_KEYS = 64
"""Keys in the smallest rectangle that a mask is asked about, and queries in the flattest tile: below that, asking and
calling cost more than skipping saves."""

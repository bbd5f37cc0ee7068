"""Tile sizes: every measured constant, with its unit and its reason.

Measured in float32 on 2 cores of an AMD EPYC, with heads of 64 and texts of up to 131,072 tokens, by

    python benchmarks/observation.py --set MAX_TILE_KEYS=1024

which times every task with another value. `MAX_TILE_SCORES_ON_GPU` has not been measured.
"""

MAX_TILE_SCORES = 1 << 21
"""Scores in a tile on a CPU: 8 MiB in float32, which stay in the last cache between operations."""

MAX_TILE_SCORES_ON_GPU = 1 << 25
"""Scores in a tile on a GPU, where launching a kernel costs more than the cache gains."""

MAX_TILE_KEYS = 8192
"""Keys in a tile if lse is known: the largest weights are found faster in fewer, wider tiles."""

MAX_WHOLE_ROW_KEYS = 16384
"""Keys that a tile's queries span, up to which one tile holds them all and so gives lse: beyond that, a separate pass
for lse is faster."""

MAX_ATTENDED_KEYS = 4096
"""The same for a pass that also computes attention's output, which costs a second product."""

MAX_COMPILED_TOP = 48
"""Largest weights of each query that the compiled kernel finds: of more, tiles find them in less time."""

MIN_HEADS_OF_WIDE_TILES = 4
"""Batch size times heads from which on tiles are `MAX_TILE_KEYS` wide; below, half of that is faster."""

TILE_QUERIES = 128
"""Queries of one head in a tile before it takes in a second head: matrix products are faster with more rows."""

MOST_LOOKS = 64
"""Most places, `TILE_QUERIES` high, at which a mask is asked how many keys queries see together."""

MOST_EVALUATED_LOOKS = 4
"""The same for a mask that has to be evaluated for an answer."""

MAX_WHOLE_ROW_COST = 1.5
"""Scores of tiles that hold whole rows, relative to tiles that skip hidden keys, up to which one pass is faster than
two."""

TILE_OVERHEAD_SCORES = 1 << 15
"""The overhead of a tile, in scores that could be computed in that time."""

MIN_TILE_KEYS = 64
"""Keys in the smallest rectangle for which a mask is evaluated, and queries in the flattest tile: below that, overhead
costs more than skipping saves."""

STRIP_QUERIES = (32, 64, 128)
"""Heights of strips under a window: at most a quarter of the keys that a query sees, so that few of a strip's scores
are hidden, but not so few that their product is slow."""

MAX_STRIP_SCORES = 1 << 20
"""Scores in a tile of strips on a CPU: fewer, since the keys of strips are copied and share the cache with them."""

MIN_SLIDING_QUERIES = 256
"""Fewest queries under a window that are worth cutting into such strips."""

LAYERS = (1, 4, 8)
"""Numbers of layers into which columns may be folded to find the largest weights."""

ROWS_AT_ONCE = 4096
"""Rows whose largest weights are looked up together: what is held in between stays in the cache."""

CALL = 1500.0
"""Nanoseconds that calling an operation takes."""

MIN_DIVIDED = 1 << 15
"""Numbers from which on torch divides an operation among threads."""

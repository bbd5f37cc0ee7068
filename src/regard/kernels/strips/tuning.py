"""Every number of the strips kernel that was found by measuring: its unit, its reason, and what finds it again.

Found on an x86-64 processor with AVX-512 BF16 and without AMX, two cores, by `make bench` and
`python benchmarks/features.py`: change one, and compare the rows that are named. On another processor they cost time,
never correctness.
"""

# --- strips ---------------------------------------------------------------------------------------------------------

MAX_STRIP_QUERIES = 256
"""Queries in a strip, at most: higher ones hold more that is hidden. Rows "window", "documents"."""

MIN_STRIP_QUERIES = 64
"""Queries that are worth a strip of their own. Row "ragged"."""

KEY_STEP = 32
"""Keys in the smallest tile that a mask is asked about: spans begin and end at multiples of it. Row "window"."""

MIN_QUERIES_PER_RESIDUE = 8
"""Queries of a strided mask that share their keys, for them to be worth strips of their own. Row "strided"."""

MAX_QUERIES_TOGETHER = 8192
"""Queries of all heads in strips that are computed together: their result is a copy, which should stay in the cache.
With few heads, one call keeps all threads busy where a strip could not. Rows "window", "documents"."""

SCORES_PER_CALL = 1 << 13
"""Scores of one head that torch's operator computes in the time that it takes to call it. Row "window"."""

SHORT_STRIP_QUERIES = 3.0
SHORT_STRIP_QUERIES_IN_HALF_PRECISION = 16.0
"""A score in a strip of h queries costs 1 + this / h of what it costs in a high one, since torch's operator multiplies
smaller matrices there. Row "window"."""

MAX_TILE_SCORES = 1 << 22
"""Numbers that are held at a time where a bias or a function says something of every score: what fits into a
processor's last cache. Rows "dense bias", "random mask" of features.py."""

# --- plain products -------------------------------------------------------------------------------------------------

PIECE_SCORES = 1 << 19
"""Scores held at a time: what stays in a core's own cache. Rows "softcap", "trained bias" of features.py."""

PIECE_QUERIES = 64
"""Queries of each head at a time in a causal square: more of them compute more that is hidden. Row "softcap"."""

SQUARES_TORCH_COMPUTES_WHOLE = range(320, 641)
"""Lengths of causal squares of which torch computes nearly the whole: it takes keys 512 at a time. Rows "causal 512",
"documents of 512"."""

# --- torch's operator -----------------------------------------------------------------------------------------------

MIN_HALVED_QUERIES = 2048
MIN_UNEVENNESS = 1.1
"""A causal square of this length is worth halving where the busiest thread has so much more than the mean to do, since
torch gives threads equally many rows, and later rows have more to do. (Not in half precision, where merging would round
twice.) Row "causal, 1 head" of features.py."""

"""Every measured constant of the strips kernel: its unit, its reason, and the benchmark that finds it again.

Measured on two cores of an x86-64 processor with AVX-512 BF16 and without AMX, by `make bench` and
`python benchmarks/features.py`. To tune a constant, change it and compare the rows named beside it. On other processors
the values may be slower, but never incorrect.
"""

# --- strips ---------------------------------------------------------------------------------------------------------

MAX_STRIP_QUERIES = 256
"""Most queries in a strip; higher strips contain more masked scores. Rows "window", "documents"."""

MIN_STRIP_QUERIES = 64
"""Fewest queries that are never joined with others, nor cut into lower strips. Row "documents of 20 to 200"."""

KEY_STEP = 32
"""Keys in the smallest tile for which a mask is evaluated; spans start and end at multiples of it. Row "window"."""

KEYS_WORTH_MERGING = 128
"""Keys left out for each query, from which on the parts of a union with a strided mask have strips of their own, and
results are merged. Row "window or stride, causal"."""

KEYS_WORTH_SORTING = 200
"""Keys left out for each query, from which on tokens are copied in the order of their documents for torch's operators
where another mask leaves out keys, too. With REGARD_NATIVE=0, row "8 documents, tokens apart, window 512"."""

GAPS_WORTH_SORTING = 1 / 8
SCORES_WORTH_SORTING = 1 << 20
"""The share of all keys that nobody sees, between others, from which on the compiled library leaves them out by sorting
keys, and the fewest scores of those: sorting takes as long. KEYS_FOR_A_GAP and MOST_HIDDEN of c/data.h. Row "half of
the keys, at random" of features.py."""

SCORES_WORTH_SORTING_DOCUMENTS = 1 << 18
"""Most scores of a call whose documents lie apart for which the compiled library leaves tokens where they are.
MOST_UNSORTED of c/data.h. Row "documents apart, new in every call" of features.py."""

MIN_QUERIES_PER_RESIDUE = 8
"""Fewest queries of a strided mask that share their keys and are worth separate strips. Row "strided"."""

MAX_KEYS_TOGETHER = 1 << 16
"""Most keys, over all heads, of strips computed in one batch: results and the gradients of every strip's keys are
copied and should stay in the cache. With few heads, a batch keeps all threads busy where a single strip could not. Rows
"window", "documents"."""

SCORES_PER_CALL = 1 << 13
"""Overhead of calling torch's operator once, in scores of one head. Rows "window", "documents of 20 to 200"."""

SCORES_PER_RESULT = 16
"""Copying a query's result and merging it with that for other keys, in scores of its head. Row "window 256" of
benchmarks/parallel.py."""

SCORES_PER_COPIED_KEY = 32
"""Copying a key and its value beside those of other spans, in scores of its head. Row "blocks at random"."""

SCORES_PER_STRIP = 1 << 16
"""Scores of all heads computed in the time that a strip takes by itself, with a mask and numbers of its own, or with
the gradients of its keys by plain products. Rows "bias, dense, window 256", "softcap, window", "dropout, window"."""

SHORT_STRIP_QUERIES = 3.0
SHORT_STRIP_QUERIES_THAT_LEARN = 16.0
SHORT_STRIP_QUERIES_IN_HALF_PRECISION = 16.0
SHORT_STRIP_QUERIES_BY_ONEDNN = 64.0
"""A score in a strip of h queries costs 1 + this / h times as much as in a high strip: torch's operator multiplies
smaller matrices, and oneDNN wants the keys of overlapping strips one after another, in copies. Where they learn, every
strip has gradients of its keys to be zeroed and added up; plain products are several operators for each. Rows
"window", "softcap, window", "dropout, window"."""

SHORT_STRIP_QUERIES_NATIVE = 4.0
SCORES_PER_STRIP_NATIVE = 1 << 9
"""The same of the compiled library, which takes queries side by side, and reads keys where they are."""

MAX_TILE_SCORES = 1 << 22
"""Numbers held at a time if a bias or mask function is evaluated for every score: fits the last-level cache. Rows
"dense bias", "random mask" of features.py."""

# --- plain products -------------------------------------------------------------------------------------------------

PIECE_SCORES = 1 << 18
PIECE_SCORES_BY_ONEDNN = 1 << 19
"""Scores held at a time by each thread: about what its core caches. oneDNN takes longer to begin a product, and is
faster with larger ones: in half precision, where a piece has several copies to begin with, twice as many. Rows
"softcap", "trained bias", "window" of features.py, "Whisper" of models.py."""

MAX_COPIED_NUMBERS = 1 << 24
"""Most numbers of query, key, value and the gradient of the output in half precision that are copied so that batch and
heads form one axis: 32 MiB, about what the last-level cache holds. Row "ViT reads 8 images" of models.py."""

MAX_PIECE_THREADS = 16
"""Threads for which a piece has scores of their own; with more of them it would take too much memory."""

SHORT_ODD_KEYS = 256
"""Keys below which a length that is not regular is left to torch's operator, unless there is much to compute, it is a
causal square's, or it is filled up, in half precision: pieces of few rows remain. Row "ViT reads 8 images" of
models.py."""

PIECE_QUERIES = 64
"""Fewest queries of each head in a piece. Row "causal"."""

SQUARE_QUERIES = 128
SQUARE_QUERIES_BY_ONEDNN = range(128, 512)
"""Queries of each head in a piece of a causal square, which computes more masked scores the more it has, and takes more
products and copies of keys the fewer; with oneDNN the fewest and the most, and between them an eighth of the square.
Rows "causal" in bfloat16 and "softcap, causal"."""

MIN_STACK = 8
"""Fewest matrices in a stack that keep all threads and the caches busy in plain products. Row "causal, 3 heads"."""

MIN_SCORES = 1 << 17
MIN_SCORES_BACKWARD = 1 << 15
MIN_SCORES_BY_ONEDNN = 1 << 18
"""Fewest scores at a time for which plain products outweigh the cost of their calls. In bfloat16, torch's operator
takes several times as long for the gradients of small matrices. Rows "8 documents", "window 256"."""

# --- the compiled library ---------------------------------------------------------------------------------------------

SCORES_TO_BEGIN_A_NODE = 7 << 8
SCORES_TO_BEGIN_NODES_THAT_LEARN = 3 << 12
"""Scores of 64 features, for each thread, in the time that a node in a graph of torch.compile takes to begin, which
Python runs; and that with gradients both take. From calls of 2 and 8 heads, of 32 to 256 tokens, full and causal, in
float32 and bfloat16; rows "compiled" of features.py."""

QUERIES_TO_BEGIN = 4
QUERIES_TO_BEGIN_HALVES = 8
QUERIES_TO_BEGIN_GRADIENTS = 16
"""Of many keys, torch's own function takes as long as for so many queries more, since it copies all of them before it
multiplies, in half precision as wider numbers, and has gradients of each. Rows "5 queries", "16 queries", "17 queries"
of features.py; with gradients, of 9 queries and 1,024 keys the library takes 0.5 to 0.8 times as long, with AVX2 and
with AVX-512. In bfloat16, with AVX2, of 5 to 12 queries and 128 to 2,048 keys 0.7 to 0.9 times as long."""

QUERIES_AT_A_TIME = 16
"""Queries take torch's own function at least as long as the next multiple of so many, unless they are few, or in half
precision without AMX, of many keys: 17 of them, with AVX-512, 1.4 to 2.3 times as long as the library, and texts of 9
to 24 tokens 2 to 7 times; 20 in bfloat16, with AMX, 1.2 to 3 times. Rows "17 queries, 32 texts", "texts of 19 tokens"
and "20 queries, 1 head"."""

SCORES_PER_LOOK = 16
"""Looking at the output of a query, where torch's own function was given a finished table that may hide something. On a
processor with AVX2, row "bias, dense"."""

ONE_QUERY = 2
"""Of one alone it does: only so many times that of a score among many. Row "1 query, 2 kv heads, sink"."""

SCORES_BETWEEN_REPORTS = 1 << 26
"""Scores of statistics, for each thread, from one report of progress to the next: about a tenth of a second."""

NUMBERS_OF_A_THREAD = 1 << 15
"""Numbers in the keys of one query that one thread reads before another has begun. Rows "generates" of models.py."""

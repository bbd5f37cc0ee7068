"""How gradients and statistics are given out to threads, which add them up over queries or keys.

Every kv head is one thread's, unless there are too few of them: then the queries of each are dealt to several threads,
which add up the gradients of all keys apart, or its keys are, a piece at a time, and they add up those of all queries
apart. Of few queries and many keys, the second takes the least memory: a piece's sums are written once, from the cache.
Where the heads of a token lie beside one another, a piece is of all of them, and as small as can be: what one head has
fetched is at hand for the next, and no two threads wait for the same page of new memory.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.strips.tuning import KEY_STEP

MAX_UNEVEN = 1.15
"""Sums are added up by one thread for each kv head, or by several, if otherwise the slowest thread took more than this
many times its share."""

MAX_SUMS = 1 << 27
"""Most numbers of gradients of keys and values that several threads add up apart, 512 MiB in float32: of one long head,
every thread of a machine of many cores would have as many as the keys and values have."""

MAX_SUMS_OF_A_THREAD, MAX_SUMS_OF_THREADS = 1 << 20, 1 << 23
"""Most numbers that a thread adds up in memory of its own, 4 MiB in float32, or if threads are few, its share of 32
MiB: where gradients are in half precision, no whole vectors, or lie apart. That of all heads would be new in every
call. Rows "17 queries, 32 texts", "64 queries, heads of 128" and "16 heads of 128 beside one another, causal" of
features.py."""

MIN_KEYS_OF_A_QUERY = 4
MIN_PIECE, MAX_PIECE = 256, 1024
"""Keys for each query from which on keys are dealt instead of queries, and the fewest and most in a piece: each piece
reads the queries once more, and its sums should stay in the cache. KEYS_OF_A_QUERY and LEAST_PIECE of c/attention.c are
those of the forward pass. From 1 to 8 heads of 64 to 512 features, 1 to 1,000 queries and 256 to 32,768 keys; rows
"100 queries, 1 head of 512", "20 queries, 1 head" and "1 query, 8 texts, heads beside one another" of features.py."""


class Dealing(NamedTuple):
    """What the threads of a backward pass are given.

    Attributes:
        chunks: among how many threads those of a kv head are dealt.
        piece: keys of a piece; 0 if queries are dealt.
        all_heads: whether a piece is of all kv heads of a batch index, which lie beside one another.
    """

    chunks: int
    piece: int
    all_heads: bool = False

    @property
    def sums(self) -> int:
        """How many threads add up gradients of the same keys."""
        return 1 if self.piece else self.chunks


def dealing(key: Tensor, value: Tensor, queries: int, apart: tuple[int, int], lanes: int, *, learns: bool) -> Dealing:
    """What the threads are given of a call.

    Args:
        queries: of each head.
        apart: batch indices, and kv heads, that have no gradients in common.
        lanes: numbers in a vector.
        learns: whether a bias does, whose gradients may be sums over keys.
    """
    keys, threads, stacks = key.shape[2], torch.get_num_threads(), math.prod(apart)
    if MIN_KEYS_OF_A_QUERY * queries <= keys and not learns:
        chunks, most = chunks_of(stacks, keys, threads, MIN_PIECE), MAX_PIECE
        is_large = sums_of_a_thread(key, value, apart[1], lanes) > most_sums_of_a_thread()
        of_all_heads = chunks_of(apart[0], keys, threads, MIN_PIECE)
        all_heads = key.stride(1) < key.stride(2) and _is_even(apart[0] * of_all_heads, threads)
        if all_heads:
            chunks, most = of_all_heads, MIN_PIECE
        if all_heads or chunks > 1 or is_large:
            pieces = chunks * -(-keys // (chunks * most))
            return Dealing(chunks, -(-keys // (pieces * KEY_STEP)) * KEY_STEP, all_heads)
    chunks = chunks_of(stacks, queries, threads, 2 * lanes)
    return Dealing(max(1, min(chunks, MAX_SUMS // (key.numel() + value.numel()))), 0)


def chunks_of(stacks: int, length: int, threads: int, unit: int) -> int:
    """By how many threads the queries, or keys, of a stack are computed, of so many that are computed apart.

    Args:
        unit: the fewest that a thread takes.
    """
    most = min(threads, max(1, length // unit))
    for chunks in range(1, most + 1):
        if _is_even(stacks * chunks, threads):
            return chunks
    return most


def _is_even(items: int, threads: int) -> bool:
    """Whether no thread takes much more than its share of so many items."""
    return -(-items // threads) * threads <= MAX_UNEVEN * items


def sums_of_a_thread(key: Tensor, value: Tensor, apart: int, lanes: int, piece: int = 0) -> int:
    """Numbers in the sums of the kv heads that are computed together, which are of whole vectors.

    Args:
        apart: kv heads that have no gradients in common. piece: keys of each; 0: all.
    """
    of_key = sum(-(-tensor.shape[3] // lanes) * lanes for tensor in (key, value))
    return key.shape[1] // apart * (piece or key.shape[2]) * of_key


def most_sums_of_a_thread() -> int:
    return max(MAX_SUMS_OF_A_THREAD, MAX_SUMS_OF_THREADS // torch.get_num_threads())

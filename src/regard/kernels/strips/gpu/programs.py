"""Attention on a GPU, in Triton: what one program computes, forward and backward.

A program has a block of queries of one head (of keys, for their gradients), and goes through the blocks of keys (of
queries) that the mask leaves it: first those that are allowed in full, then those for which it reads a bit for each
cell. What is added to scores is read where it lies. Scores are in units of log 2: exp2 is what a GPU computes.

Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", arXiv:2307.08691, has this
order of loops. Tillet, Kung, Cox 2019, "Triton: An Intermediate Language and Compiler for Tiled Neural Network
Computations".

In all programs: ``*_b``, ``*_h``, ``*_m``, ``*_n`` are strides of batch indices, heads, queries and keys; `begins` is,
for each list of blocks, where its full ones begin, where its partial ones do, and where the next list does.
"""

import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

__all__ = ["OutOfResources", "forward", "of_keys", "of_queries"]

ROWS = tl.constexpr(128)
COLUMNS = tl.constexpr(64)
"""Queries and keys of a block of the mask."""

ANY = [
    "heads", "group", "query_len", "key_len", "first_row", "least", "list_b", "list_h", "of_keys_b", "row_b", "row_h",
    "dense_b", "dense_h", "grads_h",
]  # fmt: skip
"""Numbers for whose divisors no program is compiled, so that one serves all lengths."""

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(at, rows, stride, length, SIZE: tl.constexpr, WIDTH: tl.constexpr, INSIDE: tl.constexpr):
    """Rows of a matrix of SIZE features, and zeros beyond its ends: [rows, WIDTH]."""
    features = tl.arange(0, WIDTH)
    places = at + rows.to(tl.int64)[:, None] * stride + features[None, :]
    if INSIDE and SIZE == WIDTH:
        return tl.load(places)
    if INSIDE:
        return tl.load(places, mask=features[None, :] < SIZE, other=0.0)
    return tl.load(places, mask=(rows[:, None] < length) & (features[None, :] < SIZE), other=0.0)


@triton.jit
def _scores(
    products, m, n, query_len, key_len, scale, softcap, row, dense, dense_m, dense_n, cells, cell,
    CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Scores of queries m and keys n, -inf where hidden, and tanh(scale products / softcap), if there is a softcap."""
    scores = products * scale
    bent = scores
    if CAPS:
        bent = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0)
        scores = softcap * bent
    if HAS_ROW:
        more = tl.load(row + (n - m + (query_len - 1)), mask=(m < query_len) & (n < key_len), other=float("-inf"))
        scores = tl.where(more == float("-inf"), more, scores + more)
    if HAS_DENSE:
        places = dense + m.to(tl.int64) * dense_m + n.to(tl.int64) * dense_n
        more = tl.load(places, mask=(m < query_len) & (n < key_len), other=float("-inf")).to(tl.float32)
        scores = tl.where(more == float("-inf"), more, scores + more)
    if CAPS or HAS_ROW or HAS_DENSE:
        scores *= LOG2_E
    if PARTIAL:
        word = (m % ROWS) * (COLUMNS // 32) + (n % COLUMNS) // 32
        words = tl.load(cells + cell.to(tl.int64) * (ROWS * COLUMNS // 32) + word)
        scores = tl.where((words >> (n % 32)) & 1 != 0, scores, float("-inf"))
    return scores, bent


@triton.jit
def _kept(of_queries, of_keys, odd, m, n, query_len, key_len, least):
    """Whether dropout keeps weights: `Dropout.kept`, cell by cell."""
    of_query = tl.load(of_queries + m, mask=m < query_len, other=0)
    of_key = tl.load(of_keys + n, mask=n < key_len, other=0)
    x = (of_query ^ of_key).to(tl.uint32, bitcast=True)
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    half = (x >> (16 * tl.load(odd + n, mask=n < key_len, other=0)).to(tl.uint32)) & 0xFFFF
    return (half.to(tl.int32) ^ 0x8000) - 0x8000 >= least


@triton.jit
def _seen(rows, scores):
    """Rows that some score here reads, a row of scores for each column of these, and zeros in place of others, whatever
    they hold: 0 times NaN is NaN."""
    some = tl.max(tl.where(scores == float("-inf"), 0, 1), 0)
    return tl.where((some != 0)[:, None], rows, 0.0)


@triton.jit
def _attend(
    acc, top, total, q, m, start, stop, columns, cell_of, cells, key, key_n, value, value_n, row, dense, dense_m,
    dense_n, of_queries, of_keys, odd, query_len, key_len, scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Some blocks of keys: the weighted sum of values, the largest scores, and the sum of the weights."""
    for at in range(start, stop):
        cell = at
        if PARTIAL:
            cell = tl.load(cell_of + at)
        block = tl.load(columns + at)
        keys = block * COLUMNS + tl.arange(0, COLUMNS)
        k = _load(key, keys, key_n, key_len, QK, WIDTH, not PARTIAL)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores, _ = _scores(
            products, m[:, None], keys[None, :], query_len, key_len, scale, softcap, row, dense, dense_m, dense_n,
            cells, cell, CAPS, HAS_ROW, HAS_DENSE, PARTIAL,
        )  # fmt: skip
        new = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - safe[:, None])
        less = tl.exp2(top - safe)
        total = total * less + tl.sum(weights, 1)
        top = new
        v = _load(value, keys, value_n, key_len, V, V_WIDTH, not PARTIAL)
        if PARTIAL or HAS_ROW or HAS_DENSE:
            v = _seen(v, scores)
        if DROPS:
            kept = _kept(of_queries, of_keys, odd, m[:, None], keys[None, :], query_len, key_len, least)
            weights = tl.where(kept, weights * factor, 0.0)
        acc = acc * less[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, top, total


@triton.jit(do_not_specialize=ANY)
def forward(
    query, key, value, output, lse, sink, row, dense, of_queries, of_keys, odd, begins, columns, cell_of, cells,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, output_b, output_h, output_m,
    row_b, row_h, dense_b, dense_h, dense_m, dense_n, of_keys_b, list_b, list_h,
    heads, group, query_len, key_len, scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROPS: tl.constexpr, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of QUERIES queries of one head."""
    first, batch, head = tl.program_id(0) * QUERIES, tl.program_id(1) // heads, tl.program_id(1) % heads
    b, h, kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    m = first + tl.arange(0, QUERIES)
    q = _load(query + b * query_b + h * query_h, m, query_m, query_len, QK, WIDTH, False)
    begin = begins + 2 * (batch * list_b + head * list_h + first // ROWS)
    key += b * key_b + kv * key_h
    value += b * value_b + kv * value_h
    row += b * row_b + h * row_h
    dense += b * dense_b + h * dense_h
    of_queries += tl.program_id(1).to(tl.int64) * query_len
    of_keys += b * of_keys_b
    odd += b * of_keys_b
    acc = tl.zeros([QUERIES, V_WIDTH], dtype=tl.float32)
    top = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    for kind in tl.static_range(2):  # blocks that are allowed in full, then those in part
        start, stop = tl.load(begin + kind), tl.load(begin + kind + 1)
        acc, top, total = _attend(
            acc, top, total, q, m, start, stop, columns, cell_of, cells, key, key_n, value, value_n, row, dense,
            dense_m, dense_n, of_queries, of_keys, odd, query_len, key_len, scale, softcap, least, factor,
            QK, WIDTH, V, V_WIDTH, CAPS, HAS_ROW, HAS_DENSE, DROPS, PRECISION, kind == 1,
        )  # fmt: skip
    if HAS_SINK:
        more = tl.load(sink + head).to(tl.float32) * LOG2_E
        new = tl.maximum(top, more)
        safe = tl.where(new == float("-inf"), 0.0, new)
        less = tl.exp2(top - safe)
        total = total * less + tl.exp2(more - safe)
        acc *= less[:, None]
        top = new
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc /= total[:, None]
    features = tl.arange(0, V_WIDTH)
    places = output + b * output_b + h * output_h + m.to(tl.int64)[:, None] * output_m + features[None, :]
    inside = m < query_len
    tl.store(places, acc.to(output.dtype.element_ty), mask=inside[:, None] & (features[None, :] < V))
    of_all = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN_2)
    tl.store(lse + tl.program_id(1).to(tl.int64) * query_len + m, of_all, mask=inside)


@triton.jit
def _pull_queries(
    acc, q, grad, of_all, delta, m, start, stop, columns, cell_of, cells, key, key_n, value, value_n, row, dense,
    dense_m, dense_n, of_queries, of_keys, odd, grads, first_row, query_len, key_len, scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr, DROPS: tl.constexpr, WRITES: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Some blocks of keys: the gradients of queries, but for the scale."""
    for at in range(start, stop):
        cell = at
        if PARTIAL:
            cell = tl.load(cell_of + at)
        block = tl.load(columns + at)
        keys = block * COLUMNS + tl.arange(0, COLUMNS)
        k = _load(key, keys, key_n, key_len, QK, WIDTH, not PARTIAL)
        v = _load(value, keys, value_n, key_len, V, V_WIDTH, not PARTIAL)
        products = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores, bent = _scores(
            products, m[:, None], keys[None, :], query_len, key_len, scale, softcap, row, dense, dense_m, dense_n,
            cells, cell, CAPS, HAS_ROW, HAS_DENSE, PARTIAL,
        )  # fmt: skip
        if PARTIAL or HAS_ROW or HAS_DENSE:
            k = _seen(k, scores)
            v = _seen(v, scores)
        weights = tl.exp2(scores - of_all[:, None])
        pulled = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        if DROPS:
            kept = _kept(of_queries, of_keys, odd, m[:, None], keys[None, :], query_len, key_len, least)
            pulled = tl.where(kept, pulled * factor, 0.0)
        of_scores = weights * (pulled - delta[:, None])
        if PARTIAL or HAS_ROW or HAS_DENSE:
            of_scores = tl.where(scores == float("-inf"), 0.0, of_scores)
        if WRITES:
            places = grads + (m - first_row).to(tl.int64)[:, None] * key_len + keys[None, :]
            tl.store(places, of_scores, mask=(m[:, None] < query_len) & (keys[None, :] < key_len))
        if CAPS:
            of_scores *= 1.0 - bent * bent
        acc += tl.dot(of_scores.to(k.dtype), k, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=ANY)
def of_queries(
    query, key, value, grad_output, lse, delta, grad_query, grads, row, dense, of_queries, of_keys, odd, begins,
    columns, cell_of, cells,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, grad_b, grad_h, grad_m,
    into_b, into_h, into_m, row_b, row_h, dense_b, dense_h, dense_m, dense_n, of_keys_b, list_b, list_h, grads_h,
    heads, group, first_row, query_len, key_len, scale, plain_scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROPS: tl.constexpr, WRITES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of QUERIES queries of one head, and, if wanted, those of their scores."""
    first = first_row + tl.program_id(0) * QUERIES
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    b, h, kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    m = first + tl.arange(0, QUERIES)
    q = _load(query + b * query_b + h * query_h, m, query_m, query_len, QK, WIDTH, False)
    grad = _load(grad_output + b * grad_b + h * grad_h, m, grad_m, query_len, V, V_WIDTH, False)
    at = tl.program_id(1).to(tl.int64) * query_len + m
    of_all = tl.load(lse + at, mask=m < query_len, other=0.0) * LOG2_E
    of_all = tl.where(of_all == float("-inf"), 0.0, of_all)
    delta = tl.load(delta + at, mask=m < query_len, other=0.0)
    begin = begins + 2 * (batch * list_b + head * list_h + first // ROWS)
    key += b * key_b + kv * key_h
    value += b * value_b + kv * value_h
    row += b * row_b + h * row_h
    dense += b * dense_b + h * dense_h
    of_queries += tl.program_id(1).to(tl.int64) * query_len
    of_keys += b * of_keys_b
    odd += b * of_keys_b
    grads += tl.program_id(1).to(tl.int64) * grads_h
    acc = tl.zeros([QUERIES, WIDTH], dtype=tl.float32)
    for kind in tl.static_range(2):  # blocks that are allowed in full, then those in part
        start, stop = tl.load(begin + kind), tl.load(begin + kind + 1)
        acc = _pull_queries(
            acc, q, grad, of_all, delta, m, start, stop, columns, cell_of, cells, key, key_n, value, value_n, row,
            dense, dense_m, dense_n, of_queries, of_keys, odd, grads, first_row, query_len, key_len, scale, softcap,
            least, factor, QK, WIDTH, V, V_WIDTH, CAPS, HAS_ROW, HAS_DENSE, DROPS, WRITES, PRECISION, kind == 1,
        )  # fmt: skip
    features = tl.arange(0, WIDTH)
    places = grad_query + b * into_b + h * into_h + m.to(tl.int64)[:, None] * into_m + features[None, :]
    inside = (m[:, None] < query_len) & (features[None, :] < QK)
    tl.store(places, (acc * plain_scale).to(grad_query.dtype.element_ty), mask=inside)


@triton.jit
def _pull_keys(
    of_k, of_v, k, v, n, start, stop, rows, cell_of, cells, query, query_m, grad_output, grad_m, lse, delta, row, dense,
    dense_m, dense_n, of_queries, of_keys, odd, query_len, key_len, scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr, QUERIES: tl.constexpr,
    CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Some blocks of queries: the gradients of keys, but for the scale, and of values."""
    for at in range(start, stop):
        cell = at
        if PARTIAL:
            cell = tl.load(cell_of + at)
        block = tl.load(rows + at)
        for part in range(ROWS // QUERIES):
            m = block * ROWS + part * QUERIES + tl.arange(0, QUERIES)
            q = _load(query, m, query_m, query_len, QK, WIDTH, False)
            grad = _load(grad_output, m, grad_m, query_len, V, V_WIDTH, False)
            of_all = tl.load(lse + m, mask=m < query_len, other=0.0) * LOG2_E
            of_all = tl.where(of_all == float("-inf"), 0.0, of_all)
            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            scores, bent = _scores(
                products, m[None, :], n[:, None], query_len, key_len, scale, softcap, row, dense, dense_m, dense_n,
                cells, cell, CAPS, HAS_ROW, HAS_DENSE, PARTIAL,
            )  # fmt: skip
            if PARTIAL or HAS_ROW or HAS_DENSE:
                q = _seen(q, scores)
                grad = _seen(grad, scores)
            weights = tl.exp2(scores - of_all[None, :])
            pulled = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            spread = weights
            if DROPS:
                kept = _kept(of_queries, of_keys, odd, m[None, :], n[:, None], query_len, key_len, least)
                pulled = tl.where(kept, pulled * factor, 0.0)
                spread = tl.where(kept, weights * factor, 0.0)
            of_v += tl.dot(spread.to(grad.dtype), grad, input_precision=PRECISION)
            of_scores = weights * (pulled - tl.load(delta + m, mask=m < query_len, other=0.0)[None, :])
            if PARTIAL or HAS_ROW or HAS_DENSE:
                of_scores = tl.where(scores == float("-inf"), 0.0, of_scores)
            if CAPS:
                of_scores *= 1.0 - bent * bent
            of_k += tl.dot(of_scores.to(q.dtype), q, input_precision=PRECISION)
    return of_k, of_v


@triton.jit(do_not_specialize=ANY)
def of_keys(
    query, key, value, grad_output, lse, delta, grad_key, grad_value, row, dense, of_queries, of_keys, odd, begins,
    rows, cell_of, cells,
    query_b, query_h, query_m, key_b, key_h, key_n, value_b, value_h, value_n, grad_b, grad_h, grad_m,
    into_k_b, into_k_h, into_k_n, into_v_b, into_v_h, into_v_n,
    row_b, row_h, dense_b, dense_h, dense_m, dense_n, of_keys_b, list_b, list_h,
    heads, group, query_len, key_len, scale, plain_scale, softcap, least, factor,
    QK: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, V_WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CAPS: tl.constexpr, HAS_ROW: tl.constexpr, HAS_DENSE: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of KEYS keys and values, as far as they are due to one query head."""
    first, batch, head = tl.program_id(0) * KEYS, tl.program_id(1) // heads, tl.program_id(1) % heads
    b, h, kv = batch.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    n = first + tl.arange(0, KEYS)
    k = _load(key + b * key_b + kv * key_h, n, key_n, key_len, QK, WIDTH, False)
    v = _load(value + b * value_b + kv * value_h, n, value_n, key_len, V, V_WIDTH, False)
    begin = begins + 2 * (batch * list_b + head * list_h + first // COLUMNS)
    query += b * query_b + h * query_h
    grad_output += b * grad_b + h * grad_h
    at = tl.program_id(1).to(tl.int64) * query_len
    row += b * row_b + h * row_h
    dense += b * dense_b + h * dense_h
    of_keys += b * of_keys_b
    odd += b * of_keys_b
    of_k = tl.zeros([KEYS, WIDTH], dtype=tl.float32)
    of_v = tl.zeros([KEYS, V_WIDTH], dtype=tl.float32)
    for kind in tl.static_range(2):  # blocks that are allowed in full, then those in part
        start, stop = tl.load(begin + kind), tl.load(begin + kind + 1)
        of_k, of_v = _pull_keys(
            of_k, of_v, k, v, n, start, stop, rows, cell_of, cells, query, query_m, grad_output, grad_m, lse + at,
            delta + at, row, dense, dense_m, dense_n, of_queries + at, of_keys, odd, query_len, key_len, scale, softcap,
            least, factor, QK, WIDTH, V, V_WIDTH, QUERIES, CAPS, HAS_ROW, HAS_DENSE, DROPS, PRECISION, kind == 1,
        )  # fmt: skip
    features = tl.arange(0, WIDTH)
    places = grad_key + b * into_k_b + h * into_k_h + n.to(tl.int64)[:, None] * into_k_n + features[None, :]
    inside = (n[:, None] < key_len) & (features[None, :] < QK)
    tl.store(places, (of_k * plain_scale).to(grad_key.dtype.element_ty), mask=inside)
    features = tl.arange(0, V_WIDTH)
    places = grad_value + b * into_v_b + h * into_v_h + n.to(tl.int64)[:, None] * into_v_n + features[None, :]
    inside = (n[:, None] < key_len) & (features[None, :] < V)
    tl.store(places, of_v.to(grad_value.dtype.element_ty), mask=inside)

/* What the library is called with: structures that binding.py fills in, with the same fields in the same order. */

#pragma once

#include "halves.h"

enum dtype { OWN, BFLOAT16, FLOAT16, BITS }; /* OWN: that of `real` */

/* [batch, head, row, feature] with consecutive features; strides in numbers */
struct tensor {
    void *data;
    i64 batch, head, row;
};

/* Numbers added to scores: of batch, head, query and key; a stride of 0 repeats them. time: the same of equal strips,
   where their queries move and the keys do not. Up to `spare` further numbers may be read. gradient: which, or -1; those
   from 1 on are of the bias tensors of the call, and `numbers` is how many bytes after their beginning these are.
   by_place: whether the strides of query and key are by the places of tokens in the tensors; otherwise by those in strip
   and span.

   BITS: not numbers, but a `mask`, by the places in strip and span. */
struct tile {
    const void *numbers;
    i64 dtype, batch, head, query, key, time, spare, gradient, by_place;
};

/* Which keys are seen: a word for 32 queries and a key, of which the first query has the lowest bit. Strides are in
   words; that of `query` is from 32 queries to the next. */
#define QUERIES_OF_A_WORD 32
struct mask {
    const int32_t *words;
    i64 batch, head, query, key;
};

/* What the gradients of numbers added to scores are added to, by the places of tokens in the call; NULL: none are
   wanted. Those of different threads lie apart. */
struct gradient {
    real *numbers;
    i64 chunk, batch, head, query, key;
};

/* `count` keys, and what is added to their scores; query i of the strip sees those from i + low to i + high on, both
   included, or FAR in a direction without an end */
#define FAR ((i64)1 << 40)
struct span {
    i64 start, step, count, shift, low, high, tile, tiles;
};

/* Queries that see the same spans; `times` such, the n-th of them n * shift further on. batch -1: all batch indices. */
struct strip {
    i64 batch, times, shift, start, step, count, span, spans;
};

enum kind { ENTROPY, RECEIVED, TOP, PIXEL_SUMS, PIXEL_MAXIMA };

/* What is computed of the weights, each into its own numbers:

       ENTROPY        [query]      sum_j w log2 w
       RECEIVED       [key]        sum_i w, in float64
       TOP            [query][n]   the n largest w, largest first, and their keys
       PIXEL_...      [row][col]   the sum, or the largest, of so many queries and keys each */
struct statistic {
    i64 kind;
    struct tensor numbers; /* [batch, head, row, ...]; of batch, head and row, the strides are in numbers */
    i64 chunk;             /* those of different threads lie so far apart, unless they are of queries */
    i64 *keys;
    i64 n, queries, keys_of_pixel;
};

/* How many of the items that are a thread's by right were taken, by it or by others that had none left. */
struct share {
    i64 taken, apart[7];
};

struct call {
    struct tensor query, key, value, output, grad_output, grad_query;
    /* Where gradients of keys and values are added up, in our dtype and whole vectors; NULL: in a thread's own memory, of
       as many kv heads at a time as have something in common, from which they are written at once. */
    struct tensor sum_key, sum_value;
    struct tensor grad_key, grad_value; /* where `regard_finish` writes them; NULL if that is where they are added up */
    struct tensor sum_query; /* the same of queries, by their places in the tensors, if keys are given to threads */
    struct tensor exact;      /* the output in float32; not written where NULL; what backward reads where given */
    real *lse;               /* [batch, heads, query_len]; not written where NULL */
    const real *grad_lse;    /* the same, or NULL */
    const real *sink;        /* [heads], or NULL */
    real *grad_sink;         /* the same: where its gradient is written */
    const int32_t *row_bits;  /* dropout: random numbers of rows [batch, heads, query_len], or NULL: no dropout */
    const int32_t *column_bits, *column_odd; /* and of columns [batch or 1, key_len] */
    i64 column_batch;
    i64 batches, heads, kv_heads, query_len, key_len, head_dim, value_dim;
    i64 dtype, threads, strips;
    i64 chunks; /* backward, statistics: queries are dealt out to so many threads, each with sums over them ... */
    i64 chunk_key, chunk_value; /* ... so far apart */
    i64 piece, chunk_query; /* backward: or keys are, so many at a time, and the sums over them lie so far apart; 0: not */
    i64 all_heads;          /* ... a piece of all kv heads of a batch index, one after another */
    const struct gradient *gradient;
    const char *const *given; /* where the bias tensors begin, which are others in each call */
    i64 batches_in_common, heads_in_common; /* whether any of these are sums over them */
    const struct strip *strip;
    const struct span *span;
    const struct tile *tile;
    /* [batch, query_len]: the keys that a query sees are at most those from `first_key` to before `end_key`; NULL: all */
    const int32_t *first_key, *end_key;
    i64 keys_batch, keys_query;
    struct mask seen; /* and of these, by their places in the call; NULL: all */
    /* [batch or 1, length]: where each token lies in the tensors, if strips and all that hides keys are of sorted ones;
       NULL: as they are */
    const i64 *query_order, *key_order;
    i64 query_order_batch, key_order_batch;
    double scale, softcap, kept_factor; /* softcap 0: none */
    i64 kept_least;
    const struct statistic *statistic;
    i64 statistics, knows_lse; /* lse is read; otherwise it is computed first */
    i64 is_part; /* queries see other keys, too, which are other calls': lse is of all of them */
    i64 goes_on; /* other strips of the same call were computed before: backward, of other queries or keys, whose sums these
                    are added to; forward and for statistics, of other keys of the same queries, whose results are there */
    i64 part, parts;           /* only every `parts`-th of the queries' blocks is computed, ... */
    i64 first_query, last_query; /* ... and only those with any of these */
    /* of the pass itself; careful: what nobody sees is taken as 0; suspect: something was no finite number; keeps: whether
       copies of keys and values serve several places */
    i64 careful, suspect, products, units, keeps, first_batch, last_batch;
    i64 from_key, to_key; /* those of the keys that are computed */
    /* backward: of each query, the largest score and log2 of the sum of weights relative to it, if lse does not tell them
       and keys come in pieces; notes: they are being found. NULL: each place finds its own */
    void *softmax;
    i64 notes;
    void *parts_of_rows;  /* forward: what was computed of each piece of keys; NULL: a place sees all of its keys at once */
    struct share *share; /* of each thread */
};

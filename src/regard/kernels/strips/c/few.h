/* The output of so few queries that lanes would stay empty, as of the one that is written next: here keys lie side by
   side, scores are [row][KEYS], and products go along the features of each key. */

#pragma once

#include "forward.h"

/* out[row][KEYS] = sum_d key[d] query[row][d], of `rows` that divide LANES; queries filled up to `padded` */
INLINE void fewest_scores(
    const int rows, i64 n, const real *key, i64 key_row, const real *query, i64 padded, i64 size, real *out)
{
    const int keys = LANES / rows;
    for (i64 j = 0; j < n; j += keys) {
        const real *of_key[LANES];
        vec sums[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < keys; k++) of_key[k] = key + least(j + k, n - 1) * key_row;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = all(0);
#pragma GCC unroll 16
        for (int k = 0; k < keys; k++)
            for (i64 d = 0; d + LANES <= size; d += LANES) {
                vec x = load(of_key[k] + d);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) sums[r * keys + k] += x * load(query + r * padded + d);
            }
        transpose(sums);
#pragma GCC unroll 16
        for (int i = 1; i < LANES; i++) sums[0] += sums[i];
        real total[LANES] __attribute__((aligned(64)));
        store(total, sums[0]);
        for (i64 d = size / LANES * LANES; d < size; d++)
            for (int i = 0; i < LANES; i++) total[i] += of_key[i % keys][d] * query[i / keys * padded + d];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) memcpy(out + r * KEYS + j, total + r * keys, keys * sizeof(real));
    }
}

/* The same of any `rows`: so many that keys are turned once for all of them, rather than the sums of each. */
INLINE void few_scores_of_columns(
    const int rows, i64 n, const real *key, i64 key_row, const real *query, i64 padded, i64 size, real *out)
{
    for (i64 j = 0; j < n; j += LANES) {
        const real *of_key[LANES];
        vec sums[FEW], x[LANES];
        i64 d = 0;
        for (int k = 0; k < LANES; k++) of_key[k] = key + least(j + k, n - 1) * key_row;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r] = all(0);
        for (; d + LANES <= size; d += LANES) {
#pragma GCC unroll 16
            for (int k = 0; k < LANES; k++) x[k] = load(of_key[k] + d);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) sums[r] += x[i] * query[r * padded + d + i];
        }
        for (; d < size; d++) {
            for (int k = 0; k < LANES; k++) x[0][k] = of_key[k][d];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r] += x[0] * query[r * padded + d];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) store(out + r * KEYS + j, sums[r]);
    }
}

INLINE void few_scores(
    const int rows, i64 n, const real *key, i64 key_row, const real *query, i64 padded, i64 size, real *out)
{
    if (rows > 2 && FEW > 4)
        few_scores_of_columns(rows, n, key, key_row, query, padded, size, out);
    else
        fewest_scores(rows, n, key, key_row, query, padded, size, out);
}

/* out[row][d] += sum_j weights[row][KEYS] value[j][d], outputs filled up to `padded` */
INLINE void few_outputs(
    const int rows, i64 n, const real *value, i64 value_row, const real *weights, i64 padded, i64 size, real *out)
{
    const int wide = rows > 4 ? 2 : 4;
    i64 d = 0;
    for (; d + wide * LANES <= size; d += wide * LANES) {
        vec sums[FEW][4];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < wide; c++) sums[r][c] = load(out + r * padded + d + c * LANES);
        for (i64 j = 0; j < n; j++) {
            vec x[4];
#pragma GCC unroll 4
            for (int c = 0; c < wide; c++) x[c] = load(value + j * value_row + d + c * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int c = 0; c < wide; c++) sums[r][c] += weights[r * KEYS + j] * x[c];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < wide; c++) store(out + r * padded + d + c * LANES, sums[r][c]);
    }
    for (; d < size; d += LANES)
        for (int r = 0; r < rows; r++) {
            vec sum = load(out + r * padded + d);
            for (i64 j = 0; j < n; j++) {
                vec x = all(0);
                if (d + LANES <= size)
                    x = load(value + j * value_row + d);
                else
                    memcpy(&x, value + j * value_row + d, (size - d) * sizeof(real));
                sum += weights[r * KEYS + j] * x;
            }
            store(out + r * padded + d, sum);
        }
}

/* 1, 2, 4, 6 or 8 rows, the least that are enough: what is beyond those of a place is computed for nothing */
#define WITH_ROWS(function, rows, ...)        \
    do {                                      \
        if ((rows) == 1)                      \
            function(1, __VA_ARGS__);         \
        else if ((rows) == 2 && FEW > 2)      \
            function(2, __VA_ARGS__);         \
        else if ((rows) <= 4 && FEW > 4)      \
            function(4, __VA_ARGS__);         \
        else if ((rows) <= 6 && FEW > 6)      \
            function(6, __VA_ARGS__);         \
        else                                  \
            function(FEW, __VA_ARGS__);       \
    } while (0)

/* adds numbers to the scores of a row with n keys from `first` on */
static void few_add(
    const struct place *p, const struct span *s, const struct tile *t, i64 r, i64 first, i64 n, real *scores)
{
    i64 from = numbers_of(p, t, r), j = 0;
    if (!t->keys && t->key == 1)
        for (; j + LANES <= n; j += LANES) add(scores + j, vector_at(t, from + first + j, t->dtype));
    for (; j < n; j++) {
        real x = number_at(t, from + key_in(p, s, t, first + j) * t->key, t->dtype);
        scores[j] = x == NONE ? x : scores[j] + LOG2_E * x;
    }
}

/* multiplies the weights of a row by 0 where dropout drops them, and by its factor where it does not */
static void few_drop(const struct place *p, const struct span *s, i64 r, i64 first, i64 n, real *weights)
{
    const struct call *c = p->call;
    signed_bits row = (signed_bits){0} + c->row_bits[number_of(p, r)];
    for (i64 j = 0; j < n; j++)
        weights[j] *= kept_of(c, row, p->batch * c->column_batch + key_of(p, s, first + j))[0];
}

/* Scores of a row become weights, relative to the largest so far; returns what the earlier ones are multiplied by. */
static real few_softmax(i64 n, real *scores, real *top, real *total)
{
    vec most = all(*top), sum = all(0);
    for (i64 j = n; j < round_up(n, LANES); j++) scores[j] = NONE;
    for (i64 j = 0; j < n; j += LANES) {
        vec x = load(scores + j);
        most = pick(x > most, x, most);
    }
    real before = *top, from;
    for (int i = 0; i < LANES; i++) *top = most[i] > *top ? most[i] : *top;
    from = *top == NONE ? 0 : *top; /* -inf - -inf is NaN */
    for (i64 j = 0; j < n; j += LANES) {
        vec weight = exp2_of(load(scores + j) - from);
        sum += weight;
        store(scores + j, weight);
    }
    vec by = exp2_of(all(before - from));
    *total *= by[0];
    for (int i = 0; i < LANES; i++) *total += sum[i];
    return by[0];
}

static void few_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, D_padded = round_up(D, LANES), E_padded = round_up(E, LANES);
    real *query = part_of(&memory, FEW * D_padded), *output = part_of(&memory, FEW * E_padded);
    real *top = part_of(&memory, UNIT), *total = part_of(&memory, UNIT), *scores = part_of(&memory, FEW * KEYS);
    real *key_room = part_of(&memory, KEYS * D), *value_room = part_of(&memory, KEYS * E);
    real *seen_room = part_of(&memory, KEYS * E);
    memset(query, 0, FEW * D_padded * sizeof(real));
    memset(output, 0, FEW * E_padded * sizeof(real));
    memset(scores, 0, FEW * KEYS * sizeof(real));
    for (i64 r = 0; r < p->rows; r++) {
        real *of_row = query + r * D_padded;
        widen(c->query.data, place_in(&c->query, p->batch, p->head[r], p->query[r]), D, c->dtype, of_row);
        for (i64 d = 0; d < D; d++) of_row[d] *= query_factor(c);
    }
    begin_softmax(p, 1, top, total);
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        const struct span *s = k.span;
        i64 key_row, value_row, n = k.n;
        const real *key = rows_of(p, &c->key, s, k.first, n, D, key_room, &key_row);
        const real *value = rows_of(p, &c->value, s, k.first, n, E, value_room, &value_row);
        WITH_ROWS(few_scores, p->rows, n, key, key_row, query, D_padded, D, scores);
        for (i64 r = 0; r < p->rows; r++) {
            real *of_row = scores + r * KEYS;
            for (i64 j = 0; c->softcap > 0 && j < n; j += LANES) cap(c, of_row + j, NULL);
            for (i64 t = 0; t < s->tiles; t++) few_add(p, s, c->tile + s->tile + t, r, k.first, n, of_row);
            for (i64 j = n - 1; s->causal && j >= 0 && k.first + j > p->index[r]; j--) of_row[j] = NONE;
        }
        if (c->careful) {
            for (i64 j = 0; j < n; j++) {
                int is_seen = 0;
                for (i64 r = 0; r < p->rows; r++) is_seen |= scores[r * KEYS + j] != NONE;
                for (i64 e = 0; e < E; e++) seen_room[j * E + e] = is_seen ? value[j * value_row + e] : 0;
            }
            value = seen_room, value_row = E;
        }
        for (i64 r = 0; r < p->rows; r++) {
            real by = few_softmax(n, scores + r * KEYS, top + r, total + r);
            if (c->row_bits) few_drop(p, s, r, k.first, n, scores + r * KEYS);
            for (i64 e = 0; by != 1 && e < E_padded; e++) output[r * E_padded + e] *= by;
        }
        WITH_ROWS(few_outputs, p->rows, n, value, value_row, scores, E_padded, E, output);
    }
    for (i64 r = 0; r < p->rows; r++) write_row(p, r, output + r * E_padded, top[r], total[r]);
}

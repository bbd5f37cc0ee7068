/* Output and gradients of so few queries that lanes would stay empty, as of the one that is written next, or of a pool
   of some: here keys lie side by side, scores are [row][KEYS], and products go along the features of each key. */

#pragma once

#include "backward.h"
#include "forward.h"

/* out[row][KEYS] = sum_d key[d] query[row][d], of `rows` that divide LANES; queries filled up to `padded`. dtype: of keys */
INLINE void fewest_scores(
    const int rows, const int dtype, i64 n, struct rows key, const real *query, i64 padded, i64 size, real *out)
{
    const int keys = LANES / rows;
    for (i64 j = 0; j < n; j += keys) {
        const char *of_key[LANES];
        vec sums[LANES];
        UNROLL
        for (int k = 0; k < keys; k++) of_key[k] = address(key.at, least(j + k, n - 1) * key.apart, dtype);
        /* keys that lie side by side are fetched without being told */
        i64 ahead = key.apart == size ? 0 : most(0, least(STEPS_AHEAD, key.there - keys - j)) * key.apart;
        for (int k = 0; ahead && k < keys; k++) fetch_row(address(of_key[k], ahead, dtype), size * bytes_of(dtype));
        UNROLL
        for (int i = 0; i < LANES; i++) sums[i] = all(0);
        UNROLL
        for (int k = 0; k < keys; k++)
            for (i64 d = 0; d < size; d += LANES) {
                vec x = some_at(of_key[k], d, size - d, dtype);
                UNROLL
                for (int r = 0; r < rows; r++) sums[r * keys + k] += x * load(query + r * padded + d);
            }
        transpose(sums);
        UNROLL
        for (int i = 1; i < LANES; i++) sums[0] += sums[i];
        real total[LANES] __attribute__((aligned(64)));
        store(total, sums[0]);
        UNROLL
        for (int r = 0; r < rows; r++) memcpy(out + r * KEYS + j, total + r * keys, keys * sizeof(real));
    }
}

/* The same of any `rows`: so many that keys are turned once for all of them, rather than the sums of each. */
INLINE void few_scores_of_columns(
    const int rows, const int dtype, i64 n, struct rows key, const real *query, i64 padded, i64 size, real *out)
{
    for (i64 j = 0; j < n; j += LANES) {
        const char *of_key[LANES];
        vec sums[FEW], more[FEW], x[LANES];
        for (int k = 0; k < LANES; k++) of_key[k] = address(key.at, least(j + k, n - 1) * key.apart, dtype);
        i64 ahead = most(0, least(STEPS_AHEAD, key.there - LANES - j)) * key.apart;
        UNROLL
        for (int r = 0; r < rows; r++) sums[r] = all(0);
        for (i64 d = 0; d < size; d += LANES) {
            UNROLL
            for (int k = 0; k < LANES; k++) {
                x[k] = some_at(of_key[k], d, size - d, dtype);
                fetch(address(of_key[k], ahead + d, dtype));
            }
            transpose(x);
            UNROLL
            for (int r = 0; r < rows; r++) more[r] = x[0] * query[r * padded + d];
            UNROLL
            for (int i = 1; i < LANES; i++)
                UNROLL
                for (int r = 0; r < rows; r++) more[r] += x[i] * query[r * padded + d + i];
            UNROLL
            for (int r = 0; r < rows; r++) sums[r] += more[r];
        }
        UNROLL
        for (int r = 0; r < rows; r++) store(out + r * KEYS + j, sums[r]);
    }
}

INLINE void few_scores(
    const int rows, const int dtype, i64 n, struct rows key, const real *query, i64 padded, i64 size, real *out)
{
    if (rows > 2 && FEW > 4)
        few_scores_of_columns(rows, dtype, n, key, query, padded, size, out);
    else
        fewest_scores(rows, dtype, n, key, query, padded, size, out);
}

/* out[row][d] += sum_j weights[row][KEYS] value[j][d], for `wide` vectors from d on, of which the last has `left` numbers;
   added once, as in `block` */
INLINE void few_outputs_of(
    const int rows, const int dtype, const int wide, i64 n, struct rows value, i64 d, const real *weights, i64 padded,
    i64 left, real *out)
{
    const char *from = address(value.at, d, dtype);
    vec sums[FEW][4];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < wide; c++) sums[r][c] = all(0);
    for (i64 j = 0; j < n; j++) {
        vec x[4];
        UNROLL
        for (int c = 0; c < wide; c++) {
            x[c] = some_at(from, j * value.apart + c * LANES, left, dtype);
            fetch(address(from, least(j + STEPS_AHEAD, value.there - 1) * value.apart + c * LANES, dtype));
        }
        UNROLL
        for (int r = 0; r < rows; r++)
            UNROLL
            for (int c = 0; c < wide; c++) sums[r][c] += weights[r * KEYS + j] * x[c];
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int c = 0; c < wide; c++) {
            real *at = out + r * padded + c * LANES;
            store(at, load(at) + sums[r][c]);
        }
}

/* the same of all features, outputs filled up to `padded` */
INLINE void few_outputs(
    const int rows, const int dtype, i64 n, struct rows value, const real *weights, i64 padded, i64 size, real *out)
{
    const int wide = rows > 4 ? 2 : 4;
    i64 d = 0;
    for (; d + wide * LANES <= size; d += wide * LANES)
        few_outputs_of(rows, dtype, wide, n, value, d, weights, padded, LANES, out + d);
    for (; d < size; d += LANES)
        few_outputs_of(rows, dtype, 1, n, value, d, weights, padded, size - d, out + d);
}

/* out[j][d] += sum_row weights[row][KEYS] right[row][d], of `padded` features */
INLINE void few_sums(
    const int rows, i64 n, const real *weights, const real *right, i64 padded, real *out, i64 out_row)
{
    for (i64 d = 0; d < padded; d += 2 * LANES) {
        const int wide = d + LANES < padded ? 2 : 1;
        vec x[FEW][2];
        UNROLL
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < wide; c++) x[r][c] = load(right + r * padded + d + c * LANES);
        for (i64 j = 0; j < n; j++)
            for (int c = 0; c < wide; c++) {
                real *to = out + j * out_row + d + c * LANES;
                vec sum = weights[j] * x[0][c];
                UNROLL
                for (int r = 1; r < rows; r++) sum += weights[r * KEYS + j] * x[r][c];
                store(to, load(to) + sum);
            }
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

/* the same with what is read of any dtype, of which float64 numbers have but one */
#ifdef FLOAT64
#define WITH_NUMBERS(function, rows, dtype, ...) WITH_ROWS(function, rows, OWN, __VA_ARGS__)
#else
#define WITH_NUMBERS(function, rows, dtype, ...)              \
    do {                                                      \
        if ((dtype) == BFLOAT16)                              \
            WITH_ROWS(function, rows, BFLOAT16, __VA_ARGS__); \
        else if ((dtype) == FLOAT16)                          \
            WITH_ROWS(function, rows, FLOAT16, __VA_ARGS__);  \
        else                                                  \
            WITH_ROWS(function, rows, OWN, __VA_ARGS__);      \
    } while (0)
#endif

/* Each is compiled once. */
static void few_dots(i64 rows, i64 n, struct rows key, const real *query, i64 padded, i64 size, real *out)
{
    WITH_NUMBERS(few_scores, rows, key.dtype, n, key, query, padded, size, out);
}

static void few_weighed(i64 rows, i64 n, struct rows value, const real *weights, i64 padded, i64 size, real *out)
{
    WITH_NUMBERS(few_outputs, rows, value.dtype, n, value, weights, padded, size, out);
}

/* Hides from a row those of n keys whose bits are 0; as `hide_by_bits`. */
static void few_hide_by_bits(
    const struct place *p, const struct mask *m, i64 query, i64 r, i64 first, i64 apart, i64 n, real *scores)
{
    int32_t bit;
    const int32_t *word = word_of(p, m, r, query, &bit) + first;
    i64 j = 0;
    for (; apart == 1 && j + LANES <= n; j += LANES) hide((load_bits(word + j) & bit) == 0, scores + j);
    for (; j < n; j++)
        if (!(word[j * apart] & bit)) scores[j] = NONE;
}

/* adds a tile to the scores of a row with n keys from `first` on */
static void few_add(
    const struct place *p, const struct span *s, const struct tile *t, i64 r, i64 first, i64 n, real *scores)
{
    if (t->dtype == BITS) {
        struct mask mask = mask_of(t);
        few_hide_by_bits(p, &mask, p->index[r], r, first * t->key, t->key, n, scores);
        return;
    }
    const void *numbers = numbers_in(p, t);
    i64 from = numbers_of(p, t, r), j = 0;
    if (!t->by_place && t->key == 1)
        for (; j + LANES <= n; j += LANES) add(scores + j, 1, vector_at(numbers, from + first + j, t->dtype));
    for (; j < n; j++) {
        real x = number_at(numbers, from + key_in(p, s, t, first + j) * t->key, t->dtype);
        scores[j] = x == NONE ? x : scores[j] + in_log_2(x);
    }
}

/* adds gradients of a row's scores to those of the numbers that were added to them */
static void few_pull(
    const struct place *p, const struct span *s, const struct tile *t, i64 r, i64 first, i64 n, const real *grads)
{
    i64 apart = p->call->gradient[t->gradient].key;
    real *to = gradients_of(p, t, r);
    for (i64 j = 0; j < n; j++) to[gradient_key(p, s, first + j) * apart] += grads[j];
}

/* multiplies the weights of a row, and y if given, by 0 where dropout drops them, and by its factor where not */
static void few_drop(const struct place *p, const struct span *s, i64 r, i64 first, i64 n, real *weights, real *y)
{
    const struct call *c = p->call;
    signed_bits row = (signed_bits){0} + c->row_bits[number_of(p, r)];
    for (i64 j = 0; j < n; j++) {
        real kept = kept_of(c, row, column_of_dropout(p, s, first + j))[0];
        weights[j] *= kept;
        if (y) y[j] *= kept;
    }
}

/* Scores of all rows with n keys, in units of log 2; slope: of the softcap, or NULL. */
static void few_scores_of(
    const struct place *p, const struct span *s, i64 first, i64 n, struct rows key, const real *query,
    real *scores, real *slope)
{
    const struct call *c = p->call;
    few_dots(p->rows, n, key, query, round_up(c->head_dim, LANES), c->head_dim, scores);
    for (i64 r = 0; r < p->rows; r++) {
        real *of_row = scores + r * KEYS;
        for (i64 j = 0; c->softcap > 0 && j < n; j += LANES) cap(c, 1, of_row + j, slope ? slope + r * KEYS + j : NULL);
        for (i64 t = 0; t < s->tiles; t++) few_add(p, s, c->tile + s->tile + t, r, first, n, of_row);
        for (i64 j = 0; j < n && first + j < p->index[r] + s->low; j++) of_row[j] = NONE;
        for (i64 j = n - 1; j >= 0 && first + j > p->index[r] + s->high; j--) of_row[j] = NONE;
        if (!c->first_key) continue;
        for (i64 j = 0; j < n && first + j < keys_before(p, s, p->first_key[r]); j++) of_row[j] = NONE;
        for (i64 j = n - 1; j >= 0 && first + j >= keys_before(p, s, p->end_key[r]); j--) of_row[j] = NONE;
        i64 of_key = c->seen.key * key_of(p, s, first);
        if (c->seen.words) few_hide_by_bits(p, &c->seen, p->query[r], r, of_key, c->seen.key * s->step, n, of_row);
    }
}

/* Scores of a row become weights, relative to the largest so far; returns what the earlier ones are multiplied by. */
static real few_softmax(i64 n, real *scores, real *top, real *total)
{
    vec most = all(*top), sum = all(0);
    for (i64 j = n; j < round_up(n, LANES); j++) scores[j] = NONE;
    for (i64 j = 0; j < n; j += LANES) {
        vec x = load(scores + j);
        most = larger_of(x, most);
    }
    real before = *top, from, now = largest_of(most);
    *top = now > before ? now : before;
    from = *top == NONE ? 0 : *top; /* -inf - -inf is NaN */
    for (i64 j = 0; j < n; j += LANES) {
        vec weight = exp2_of(load(scores + j) - from);
        sum += weight;
        store(scores + j, weight);
    }
    vec by = exp2_of(all(before - from));
    *total = *total * by[0] + sum_of(sum);
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
        widen(c->query.data, place_in(&c->query, p->batch, p->head[r], p->token[r]), D, c->dtype, of_row);
        for (i64 d = 0; d < D; d++) of_row[d] *= query_factor(c);
    }
    begin_softmax(p, 1, top, total, c->goes_on);
    for (i64 r = 0; c->goes_on && !is_later(p) && r < p->rows; r++)
        memcpy(output + r * E_padded, output_before(p, r), E * sizeof(real));
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        const struct span *s = k.span;
        i64 n = k.n;
        struct rows key = rows_for_few(p, &c->key, s, k.first, n, D, key_room);
        struct rows value = rows_for_few(p, &c->value, s, k.first, n, E, value_room);
        few_scores_of(p, s, k.first, n, key, query, scores, NULL);
        if (c->careful) {
            int8_t is_seen[KEYS];
            find_seen(p->rows, n, scores, 1, KEYS, is_seen);
            value = rows_if_seen(is_seen, n, value, E, seen_room);
        }
        for (i64 r = 0; r < p->rows; r++) {
            real by = few_softmax(n, scores + r * KEYS, top + r, total + r);
            if (c->row_bits) few_drop(p, s, r, k.first, n, scores + r * KEYS, NULL);
            for (i64 e = 0; by != 1 && e < E_padded; e++) output[r * E_padded + e] *= by;
        }
        few_weighed(p->rows, n, value, scores, E_padded, E, output);
    }
    for (i64 r = 0; r < p->rows; r++) write_row(p, r, output + r * E_padded, top[r], total[r]);
}

static i64 few_backward_numbers(const struct call *c)
{
    i64 D = c->head_dim, E = c->value_dim;
    return FEW * (3 * round_up(D, LANES) + round_up(E, LANES) + 4 * KEYS) + 3 * UNIT + KEYS * 2 * (D + E) + 16 * 15;
}

/* Takes queries that see no key as 0, with their gradients. */
static void few_forget_empty(
    const struct place *p, real *query, real *rows, real *grad, real *delta, real *scores, real *key_room)
{
    const struct call *c = p->call;
    i64 D_padded = round_up(c->head_dim, LANES), E_padded = round_up(c->value_dim, LANES);
    int8_t sees[FEW] = {0};
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        struct rows key = rows_for_few(p, &c->key, k.span, k.first, k.n, c->head_dim, key_room);
        few_scores_of(p, k.span, k.first, k.n, key, query, scores, NULL);
        for (i64 r = 0; r < p->rows; r++)
            for (i64 j = 0; j < k.n; j++) sees[r] |= scores[r * KEYS + j] != NONE;
    }
    for (i64 r = 0; r < p->rows; r++) {
        if (sees[r]) continue;
        memset(query + r * D_padded, 0, D_padded * sizeof(real));
        memset(rows + r * D_padded, 0, D_padded * sizeof(real));
        memset(grad + r * E_padded, 0, E_padded * sizeof(real));
        delta[r] = 0;
    }
}

/* lse, as the largest score and what is left */
static void few_find_softmax(
    const struct place *p, const real *query, real *lse, real *rest, real *scores, real *key_room)
{
    begin_softmax(p, 1, lse, rest, 0);
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        struct rows key = rows_for_few(p, &p->call->key, k.span, k.first, k.n, p->call->head_dim, key_room);
        few_scores_of(p, k.span, k.first, k.n, key, query, scores, NULL);
        for (i64 r = 0; r < p->rows; r++) few_softmax(k.n, scores + r * KEYS, lse + r, rest + r);
    }
    for (i64 r = 0; r < p->rows; r++) rest[r] = log2(rest[r]);
}

static void few_backward_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, D_padded = round_up(D, LANES), E_padded = round_up(E, LANES);
    real *query = part_of(&memory, FEW * D_padded), *rows = part_of(&memory, FEW * D_padded); /* times c->scale */
    real *grad = part_of(&memory, FEW * E_padded), *grad_query = part_of(&memory, FEW * D_padded);
    real *lse = part_of(&memory, UNIT), *rest = part_of(&memory, UNIT), *delta = part_of(&memory, UNIT);
    real *scores = part_of(&memory, FEW * KEYS), *grads = part_of(&memory, FEW * KEYS);
    real *slope = part_of(&memory, FEW * KEYS), *dropped = part_of(&memory, FEW * KEYS);
    real *key_room = part_of(&memory, KEYS * D), *value_room = part_of(&memory, KEYS * E);
    real *seen_key = part_of(&memory, KEYS * D), *seen_value = part_of(&memory, KEYS * E);
    memset(query, 0, (rows - query + FEW * D_padded) * sizeof(real));
    memset(grad, 0, FEW * E_padded * sizeof(real));
    memset(grad_query, 0, FEW * D_padded * sizeof(real));
    memset(scores, 0, FEW * KEYS * sizeof(real));
    memset(grads, 0, FEW * KEYS * sizeof(real));
    for (i64 r = 0; r < p->rows; r++) {
        read_row(p, &c->query, r, D, rows + r * D_padded);
        for (i64 d = 0; d < D; d++) query[r * D_padded + d] = rows[r * D_padded + d] * query_factor(c);
        for (i64 d = 0; d < D; d++) rows[r * D_padded + d] *= (real)c->scale;
        read_row(p, &c->grad_output, r, E, grad + r * E_padded);
    }
    if (any_is_far(p) && !was_found(p, lse, rest)) few_find_softmax(p, query, lse, rest, scores, key_room);
    if (c->notes) {
        note_softmax(p, lse, rest);
        return;
    }
    for (i64 r = 0; r < p->rows; r++) begin_gradients(p, r, grad + r * E_padded, lse, rest, delta);
    if (c->careful) few_forget_empty(p, query, rows, grad, delta, scores, key_room);
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        const struct span *s = k.span;
        i64 n = k.n, row = key_of(p, s, k.first);
        struct rows key = rows_for_few(p, &c->key, s, k.first, n, D, key_room);
        struct rows value = rows_for_few(p, &c->value, s, k.first, n, E, value_room);
        few_scores_of(p, s, k.first, n, key, query, scores, slope);
        if (c->careful) {
            int8_t is_seen[KEYS];
            find_seen(p->rows, n, scores, 1, KEYS, is_seen);
            /* what the next rows, which are none, have in common with a key that is no number */
            memset(scores + p->rows * KEYS, 0, (FEW - p->rows) * KEYS * sizeof(real));
            key = rows_if_seen(is_seen, n, key, D, seen_key);
            value = rows_if_seen(is_seen, n, value, E, seen_value);
        }
        few_dots(p->rows, n, value, grad, E_padded, E, grads);
        for (i64 r = 0; r < p->rows; r++)
            for (i64 j = 0; j < n; j += LANES) {
                real *x = scores + r * KEYS + j;
                store(x, exp2_of(load(x) - lse[r] - rest[r]));
            }
        real *kept = scores; /* what values were multiplied by */
        if (c->row_bits) {
            kept = memcpy(dropped, scores, FEW * KEYS * sizeof(real));
            for (i64 r = 0; r < p->rows; r++) few_drop(p, s, r, k.first, n, kept + r * KEYS, grads + r * KEYS);
        }
        real *to_value = sum_row(p, &c->sum_value, c->chunk_value, row);
        WITH_ROWS(few_sums, p->rows, n, kept, grad, E_padded, to_value, s->step * c->sum_value.row);
        for (i64 r = 0; r < p->rows; r++) {
            real *of_row = grads + r * KEYS;
            for (i64 j = 0; j < n; j += LANES)
                store(of_row + j, load(scores + r * KEYS + j) * (load(of_row + j) - delta[r]));
            for (i64 t = s->tile; t < s->tile + s->tiles; t++)
                if (wants_gradient(c, c->tile + t)) few_pull(p, s, c->tile + t, r, k.first, n, of_row);
            for (i64 j = 0; c->softcap > 0 && j < n; j++) of_row[j] *= slope[r * KEYS + j];
        }
        few_weighed(p->rows, n, key, grads, D_padded, D, grad_query);
        real *to_key = sum_row(p, &c->sum_key, c->chunk_key, row);
        WITH_ROWS(few_sums, p->rows, n, grads, rows, D_padded, to_key, s->step * c->sum_key.row);
    }
    for (i64 r = 0; r < p->rows; r++) write_grad_query(p, r, grad_query + r * D_padded);
}

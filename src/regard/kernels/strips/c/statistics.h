/* Statistics of the weights, computed block by block, so that the weights are never all in memory. */

#pragma once

#include "forward.h"

#define LOOKS 4 /* keys among which the largest weight is sought before they are looked at one by one */
#define PLACES 8 /* of a list of the largest weights that are held in registers */

/* numbers that are not negative have the order of their bits, and NaN is above all */
typedef whole loose_whole __attribute__((may_alias));

INLINE whole bits_of(real x) { return *(loose_whole *)&x; }

INLINE vec positive(vec x) { return (vec)((ints)x & ~((whole)1 << (8 * sizeof(whole) - 1))); } /* NaN, too */

/* lanes in which x is above y, and what of two numbers they choose */
#if defined(__AVX512F__) && defined(FLOAT64)
typedef __mmask8 lanes;
INLINE lanes above(vec x, vec y) { return _mm512_cmpgt_epi64_mask((__m512i)x, (__m512i)y); }
INLINE vec choose(lanes where, vec x, vec other) { return (vec)_mm512_mask_blend_pd(where, (__m512d)other, (__m512d)x); }
INLINE int any(lanes where) { return where != 0; }
#elif defined(__AVX512F__)
typedef __mmask16 lanes;
INLINE lanes above(vec x, vec y) { return _mm512_cmpgt_epi32_mask((__m512i)x, (__m512i)y); }
INLINE vec choose(lanes where, vec x, vec other) { return (vec)_mm512_mask_blend_ps(where, (__m512)other, (__m512)x); }
INLINE int any(lanes where) { return where != 0; }
#else
typedef ints lanes;
typedef int8_t flags __attribute__((vector_size(LANES)));
INLINE lanes above(vec x, vec y) { return (ints)x > (ints)y; }
INLINE vec choose(lanes where, vec x, vec other) { return pick(where, x, other); }
INLINE int any(lanes where)
{
    flags flag = __builtin_convertvector(where, flags);
    unsigned __int128 found = 0;
    memcpy(&found, &flag, sizeof flag);
    return found != 0;
}
#endif

INLINE vec larger(vec x, vec y) { return choose(above(x, y), x, y); }

/* numbers in the list of a query: the largest weights, and their keys */
INLINE i64 places_of(const struct statistic *t) { return t->kind == TOP ? 2 * round_up(t->n, PLACES) : 0; }

static i64 look_numbers(const struct call *c)
{
    i64 lists = 0;
    for (i64 t = 0; t < c->statistics; t++) lists += places_of(c->statistic + t);
    return c->units * UNIT * (c->head_dim + 4 + lists) + KEYS * (UNIT + c->head_dim) + 16 * (7 + c->statistics);
}

/* Scores of a unit, times a factor, become weights, 0 in lanes without a query; lse in units of log 2. entropy: w log2 w
   is added. */
static void weights_of(i64 n, i64 rows, int wide, const real *lse, real *scores, real factor, real *entropy)
{
    vec sum[2] = {all(0), all(0)};
    ints idle[2];
    for (int i = 0; i < UNIT; i++) idle[i / LANES][i % LANES] = -(i >= rows);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            real *at = scores + j * UNIT + w * LANES;
            vec score = load(at), hidden = all(2 * LOWEST);
            vec log = pick((score == NONE) | idle[w], hidden, score * factor - load(lse + w * LANES));
            vec weight = positive(exp2_of(log));
            sum[w] += weight * log;
            store(at, weight);
        }
    for (int w = 0; w < wide; w++) store(entropy + w * LANES, load(entropy + w * LANES) + sum[w]);
}

/* where the numbers of a statistic begin, of a head, and of a query or key */
INLINE void *numbers_at(const struct place *p, const struct statistic *t, i64 head, i64 row, i64 size)
{
    i64 of_chunk = t->kind == ENTROPY || t->kind == TOP ? 0 : p->chunk * t->chunk;
    return (char *)t->numbers.data + size * (of_chunk + place_in(&t->numbers, p->batch, head, row));
}

/* Weights of some queries of a unit, from `row` on, with n keys: `key`, key + step, ... */
struct seen {
    const real *weights;
    i64 row, rows, key, step, n;
    int wide;
};

/* where the j-th of these keys lies in the tensors */
INLINE i64 token_seen(const struct place *p, const struct seen *s, i64 j)
{
    return token_of_key(p->call, p->batch, s->key + j * s->step);
}

INLINE int is_one_head(const struct place *p, const struct seen *s)
{
    return p->head[s->row] == p->head[s->row + s->rows - 1];
}

static void receive(const struct place *p, const struct statistic *t, const struct seen *s)
{
    for (i64 j = 0; j < s->n; j += LANES) {
        i64 n = least(LANES, s->n - j);
        if (!is_one_head(p, s)) {
            for (i64 i = 0; i < s->rows; i++) {
                double *to = numbers_at(p, t, p->head[s->row + i], 0, sizeof *to);
                for (i64 k = j; k < j + n; k++) to[token_seen(p, s, k)] += s->weights[k * UNIT + i];
            }
            continue;
        }
        vec x[LANES], sum = all(0);
        for (i64 k = 0; k < LANES; k++) {
            const real *of_key = s->weights + (j + least(k, n - 1)) * UNIT;
            x[k] = s->wide == 2 ? load(of_key) + load(of_key + LANES) : load(of_key);
        }
        transpose(x);
        for (i64 i = 0; i < LANES; i++) sum += x[i];
        double *to = numbers_at(p, t, p->head[s->row], 0, sizeof *to);
        for (i64 k = 0; k < n; k++) to[token_seen(p, s, j + k)] += sum[k];
    }
}

/* Some places of the lists of a vector of queries, largest first, take in one more weight of each, with its key; these
   become what then has no place. */
INLINE void insert(vec number[PLACES], vec key[PLACES], vec *weight, vec *of_weight)
{
    lanes is_above[PLACES];
    UNROLL
    for (int l = 0; l < PLACES; l++) is_above[l] = above(*weight, number[l]);
    vec out = choose(is_above[PLACES - 1], number[PLACES - 1], *weight);
    vec of_out = choose(is_above[PLACES - 1], key[PLACES - 1], *of_weight);
    UNROLL
    for (int l = PLACES - 1; l > 0; l--) { /* what is smaller moves down by one place */
        number[l] = choose(is_above[l - 1], number[l - 1], choose(is_above[l], *weight, number[l]));
        key[l] = choose(is_above[l - 1], key[l - 1], choose(is_above[l], *of_weight, key[l]));
    }
    number[0] = choose(is_above[0], *weight, number[0]), key[0] = choose(is_above[0], *of_weight, key[0]);
    *weight = out, *of_weight = of_out;
}

/* PLACES of the lists take in n weights and their keys, which become what then has no place. */
static void insert_all(real *numbers, real *keys, i64 n, vec *weights, vec *of_weights)
{
    vec number[PLACES], key[PLACES];
    UNROLL
    for (int l = 0; l < PLACES; l++) number[l] = load(numbers + l * UNIT), key[l] = load(keys + l * UNIT);
    for (i64 first = 0; first < n; first += LOOKS) {
        i64 stop = least(first + LOOKS, n);
        vec largest = weights[first];
        for (i64 j = first + 1; j < stop; j++) largest = larger(weights[j], largest);
        if (!any(above(largest, number[PLACES - 1]))) continue;
        for (i64 j = first; j < stop; j++) insert(number, key, weights + j, of_weights + j);
    }
    UNROLL
    for (int l = 0; l < PLACES; l++) store(numbers + l * UNIT, number[l]), store(keys + l * UNIT, key[l]);
}

static void find_largest(const struct place *p, const struct statistic *t, const struct seen *s, real *list)
{
    i64 places = places_of(t) / 2;
    vec weights[KEYS], of_weights[KEYS];
    for (int w = 0; w < s->wide; w++) {
        real *numbers = column_of(list, s->row, 2 * places) + w * LANES;
        for (i64 j = 0; j < s->n; j++) {
            weights[j] = load(s->weights + w * LANES + j * UNIT);
            of_weights[j] = (vec)((ints){0} + (whole)token_seen(p, s, j));
        }
        for (i64 l = 0; l < places; l += PLACES)
            insert_all(numbers + l * UNIT, numbers + (places + l) * UNIT, s->n, weights, of_weights);
    }
}

/* what was found among other keys */
static void read_largest(const struct place *p, const struct statistic *t, real *list)
{
    for (i64 r = 0; r < p->rows; r++) {
        real *numbers = column_of(list, r, places_of(t)), *keys = numbers + places_of(t) / 2 * UNIT;
        const real *from = numbers_at(p, t, p->head[r], p->token[r], sizeof *from);
        const i64 *from_keys = t->keys + (from - (real *)t->numbers.data);
        for (i64 l = 0; l < t->n; l++) {
            whole key = from_keys[l];
            numbers[l * UNIT] = from[l];
            memcpy(keys + l * UNIT, &key, sizeof key);
        }
    }
}

static void write_largest(const struct place *p, const struct statistic *t, real *list)
{
    for (i64 r = 0; r < p->rows; r++) {
        const real *numbers = column_of(list, r, places_of(t)), *keys = numbers + places_of(t) / 2 * UNIT;
        real *to = numbers_at(p, t, p->head[r], p->token[r], sizeof *to);
        i64 *to_keys = t->keys + (to - (real *)t->numbers.data); /* with the same strides */
        for (i64 l = 0; l < t->n; l++) to[l] = numbers[l * UNIT], to_keys[l] = bits_of(keys[l * UNIT]);
    }
}

/* a number is drawn over a pixel */
INLINE void draw(const struct statistic *t, real *pixel, real x)
{
    *pixel = t->kind == PIXEL_SUMS ? *pixel + x : bits_of(x) > bits_of(*pixel) ? x : *pixel;
}

static void draw_unit(const struct place *p, const struct statistic *t, const struct seen *s)
{
    real *row[UNIT] = {0}; /* of pixels */
    int is_one_row = 1;
    for (i64 i = 0; i < s->rows; i++) {
        i64 r = s->row + i;
        row[i] = numbers_at(p, t, p->head[r], p->token[r] / t->queries, sizeof(real));
        is_one_row &= row[i] == row[0];
    }
    for (i64 j = 0; j < s->n;) {
        i64 column = token_seen(p, s, j) / t->keys_of_pixel, next = (column + 1) * t->keys_of_pixel;
        i64 stop = least(s->n, (next - s->key + s->step - 1) / s->step);
        if (p->call->key_order)
            for (stop = j + 1; stop < s->n && token_seen(p, s, stop) / t->keys_of_pixel == column;) stop++;
        real drawn[UNIT];
        for (int w = 0; w < s->wide; w++) {
            const real *from = s->weights + w * LANES;
            vec x = load(from + j * UNIT);
            for (i64 k = j + 1; k < stop; k++) {
                vec y = load(from + k * UNIT);
                x = t->kind == PIXEL_SUMS ? x + y : larger(y, x);
            }
            store(drawn + w * LANES, x);
        }
        j = stop;
        if (is_one_row) {
            real x = drawn[0];
            for (i64 i = 1; i < s->rows; i++) draw(t, &x, drawn[i]);
            draw(t, row[0] + column, x);
        } else
            for (i64 i = 0; i < s->rows; i++) draw(t, row[i] + column, drawn[i]);
    }
}

/* The lse of all queries of a place, from a pass over their keys of its own. */
static void find_lse(const struct place *p, real *query, real *top, real *total, real *scores, real *key_room)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, units = (p->rows + UNIT - 1) / UNIT;
    begin_softmax(p, units, top, total);
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        struct rows key = rows_to_multiply(p, &c->key, k.span, k.first, k.n, D, key_room);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, k.span, u, k.first, k.n, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                struct rows of_key = rows_from(key, part[i].from);
                int wide = part[i].wide;
                real factor = scores_of(p, k.span, row, first, n, wide, of_key, column_of(query, row, D), scores, NULL);
                vec by[2];
                softmax(n, wide, scores, factor, 0, top + row, total + row, by);
            }
        }
    }
    for (i64 r = 0; r < p->rows; r++) c->lse[number_of(p, r)] = lse_of(p, r, top[r], total[r]);
}

/* Adds weights to a statistic. */
static void add_up(const struct place *p, const struct statistic *t, const struct seen *s, real *list)
{
    if (t->kind == RECEIVED)
        receive(p, t, s);
    else if (t->kind == TOP)
        find_largest(p, t, s, list);
    else if (t->kind != ENTROPY)
        draw_unit(p, t, s);
}

static void look_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, units = (p->rows + UNIT - 1) / UNIT;
    real *query = part_of(&memory, units * D * UNIT), *lse = part_of(&memory, units * UNIT);
    real *top = part_of(&memory, units * UNIT), *total = part_of(&memory, units * UNIT);
    real *entropy = part_of(&memory, units * UNIT), *scores = part_of(&memory, KEYS * UNIT);
    real *key_room = part_of(&memory, KEYS * D), *list[c->statistics + 1];
    for (i64 t = 0; t < c->statistics; t++) {
        i64 numbers = places_of(c->statistic + t) * units * UNIT;
        list[t] = memset(part_of(&memory, numbers), 0, numbers * sizeof(real));
        if (c->goes_on && c->statistic[t].kind == TOP) read_largest(p, c->statistic + t, list[t]);
    }
    for (i64 u = 0; u < units; u++)
        side_by_side(p, &c->query, u, D, query_factor(c), query + u * D * UNIT);
    if (!c->knows_lse) find_lse(p, query, top, total, scores, key_room);
    if (!c->statistics) return;
    for (i64 r = 0; r < units * UNIT; r++) {
        real of_query = c->lse[number_of(p, least(r, p->rows - 1))] * LOG2_E;
        lse[r] = of_query == NONE ? 0 : of_query;
    }
    memset(entropy, 0, units * UNIT * sizeof(real));
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        const struct span *s = k.span;
        struct rows key = rows_to_multiply(p, &c->key, s, k.first, k.n, D, key_room);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, s, u, k.first, k.n, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                struct rows of_key = rows_from(key, part[i].from);
                struct seen seen = {scores, row, part[i].rows, key_of(p, s, first), s->step, n, part[i].wide};
                real *of_query = column_of(query, row, D);
                real factor = scores_of(p, s, row, first, n, seen.wide, of_key, of_query, scores, NULL);
                weights_of(n, seen.rows, seen.wide, lse + row, scores, factor, entropy + row);
                for (i64 n_th = 0; n_th < c->statistics; n_th++) add_up(p, c->statistic + n_th, &seen, list[n_th]);
            }
        }
    }
    for (i64 n_th = 0; n_th < c->statistics; n_th++) {
        const struct statistic *t = c->statistic + n_th;
        if (t->kind == TOP) write_largest(p, t, list[n_th]);
        for (i64 r = 0; t->kind == ENTROPY && r < p->rows; r++) {
            real *to = numbers_at(p, t, p->head[r], p->token[r], sizeof *to);
            *to = c->goes_on ? *to + entropy[r] : entropy[r];
        }
    }
}

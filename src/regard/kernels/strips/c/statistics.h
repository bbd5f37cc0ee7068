/* Statistics of the weights, computed block by block, so that the weights are never all in memory. */

#pragma once

#include "forward.h"

#define PLACES 8 /* of a list of the largest weights, and weights that are merged with them at a time */

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

/* A weight and its key in one number, by which the larger weight comes first, and of equal ones that of the earlier key:
   for some queries. 0: none. */
#ifdef FLOAT64
#define RANKED LANES /* queries */
typedef struct {
    ints weight, key;
} __attribute__((may_alias)) ranks;

INLINE ranks rank(const real *weights, whole key)
{
    return (ranks){(ints)load(weights), (ints){0} + ~key};
}

INLINE void order(ranks *x, ranks *y)
{
    ints before = (y->weight > x->weight) | ((y->weight == x->weight) & (y->key > x->key));
    ranks one = *x, other = *y;
    x->weight = (ints)pick(before, (vec)other.weight, (vec)one.weight);
    x->key = (ints)pick(before, (vec)other.key, (vec)one.key);
    y->weight = (ints)pick(before, (vec)one.weight, (vec)other.weight);
    y->key = (ints)pick(before, (vec)one.key, (vec)other.key);
}
#else
#define RANKED (LANES / 2)
typedef int64_t ranks __attribute__((vector_size(BYTES), may_alias));
typedef uint32_t half_ranks __attribute__((vector_size(BYTES / 2)));
typedef half_ranks loose_ranks __attribute__((aligned(4), may_alias));

INLINE ranks rank(const real *weights, whole key)
{
#if defined(__AVX512F__)
    ranks wide = (ranks)_mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)weights));
#else
    ranks wide = __builtin_convertvector(*(const loose_ranks *)weights, ranks);
#endif
    return wide << 32 | (int64_t)(uint32_t)~key;
}

/* the larger of each two numbers is the first */
INLINE void order(ranks *x, ranks *y)
{
    ranks one = *x, other = *y;
#if defined(__AVX512F__)
    *x = (ranks)_mm512_max_epi64((__m512i)one, (__m512i)other);
    *y = (ranks)_mm512_min_epi64((__m512i)one, (__m512i)other);
#else
    ranks before = other > one;
    *x = (other & before) | (one & ~before);
    *y = (one & before) | (other & ~before);
#endif
}
#endif

/* the numbers of a list for each query: of the largest weights, with their keys */
INLINE i64 places_of(const struct statistic *t) { return t->kind == TOP ? round_up(t->n, PLACES) : 0; }
INLINE i64 list_numbers(const struct statistic *t) { return places_of(t) * (sizeof(ranks) / sizeof(real)) / RANKED; }

static i64 look_numbers(const struct call *c)
{
    i64 lists = 0;
    for (i64 t = 0; t < c->statistics; t++) lists += list_numbers(c->statistic + t);
    i64 D = deep(c, c->head_dim);
    return c->units * UNIT * (D + 5 + lists) + KEYS * (UNIT + D) + 16 * (8 + c->statistics);
}

/* Scores of a unit, times a factor, become weights, 0 in lanes without a query; lse, in units of log 2, is of two numbers.
   entropy: w log2 w is added. */
static void weights_of(
    i64 n, i64 rows, int wide, const real *lse, const real *rest, real *scores, real factor, real *entropy)
{
    vec sum[2] = {all(0), all(0)};
    ints idle[2];
    for (int i = 0; i < UNIT; i++) idle[i / LANES][i % LANES] = -(i >= rows);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            real *at = scores + j * UNIT + w * LANES;
            vec score = load(at), hidden = all(2 * LOWEST);
            vec seen = score * factor - load(lse + w * LANES) - load(rest + w * LANES);
            vec log = pick((score == NONE) | idle[w], hidden, seen);
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

/* The larger of each two numbers is the first: of those so far apart, or of two runs, of which one is read from its end. */
INLINE void order_apart(ranks x[PLACES], const int apart)
{
    UNROLL
    for (int i = 0; i < PLACES; i++)
        if (!(i & apart)) order(x + i, x + i + apart);
}
INLINE void order_runs(ranks x[PLACES], const int run)
{
    UNROLL
    for (int i = 0; i < PLACES; i++)
        if (!(i & run)) order(x + i, x + (i ^ (2 * run - 1)));
}

/* Largest first, by a sorting network (Batcher 1968, Sorting networks and their applications). */
INLINE void sort(ranks x[PLACES])
{
    order_runs(x, 1);
    order_runs(x, 2), order_apart(x, 1);
    order_runs(x, 4), order_apart(x, 2), order_apart(x, 1);
}

/* the same of a run that falls and then grows, or the other way round */
INLINE void sort_one_bend(ranks x[PLACES]) { order_apart(x, 4), order_apart(x, 2), order_apart(x, 1); }

/* Some places of a list take in sorted numbers; these become what then has no place, sorted if it is wanted. */
INLINE void merge(ranks *list, ranks x[PLACES], int is_wanted)
{
    ranks largest[PLACES];
    UNROLL
    for (int l = 0; l < PLACES; l++) largest[l] = list[l];
    UNROLL
    for (int l = 0; l < PLACES; l++) order(largest + l, x + PLACES - 1 - l);
    sort_one_bend(largest);
    UNROLL
    for (int l = 0; l < PLACES; l++) list[l] = largest[l];
    if (is_wanted) sort_one_bend(x);
}

/* where the list of a query begins, and among the `RANKED` numbers of each place, its own */
INLINE ranks *list_of(real *lists, i64 row, const struct statistic *t)
{
    return (ranks *)(lists + row / UNIT * UNIT * list_numbers(t)) + row % UNIT / RANKED * places_of(t);
}

/* the weights in a place of the lists of a vector of queries, which lie so far apart */
INLINE vec weights_in(const ranks *place, i64 apart)
{
#ifdef FLOAT64
    return (void)apart, (vec)place->weight;
#else
#define OF_UPPER(lane, half) (2 * (lane) + 1)
    return __builtin_shufflevector((vec)place[0], (vec)place[apart], EACH_LANE(OF_UPPER, 0));
#endif
}

/* The lists of a vector of queries take in up to PLACES keys. */
static void take_in(i64 places, i64 n, const real *weights, const whole keys[PLACES], ranks *list)
{
    for (int of = 0; of < LANES / RANKED; of++, weights += RANKED, list += places) {
        ranks x[PLACES];
        UNROLL
        for (i64 j = 0; j < PLACES; j++) x[j] = j < n ? rank(weights + j * UNIT, keys[j]) : (ranks){0};
        sort(x);
        for (i64 l = 0; l < places; l += PLACES) merge(list + l, x, l + PLACES < places);
    }
}

static void find_largest(const struct place *p, const struct statistic *t, const struct seen *s, real *lists)
{
    i64 places = places_of(t);
    whole keys[KEYS];
    for (i64 j = 0; j < s->n; j++) keys[j] = token_seen(p, s, j);
    for (int w = 0; w < s->wide; w++) {
        const real *weights = s->weights + w * LANES;
        ranks *list = list_of(lists, s->row + w * LANES, t);
        vec last = weights_in(list + places - 1, places);
        for (i64 first = 0; first < s->n; first += PLACES, weights += PLACES * UNIT) {
            i64 n = least(PLACES, s->n - first);
            vec largest = load(weights);
            for (i64 j = 1; j < n; j++) largest = larger(load(weights + j * UNIT), largest);
            if (!any(above(largest, last))) continue;
            take_in(places, n, weights, keys + first, list);
            last = weights_in(list + places - 1, places);
        }
    }
}

/* weight and key of a query in a place of its list */
INLINE void write_rank(ranks *place, i64 row, real weight, whole key)
{
#ifdef FLOAT64
    place->weight[row % RANKED] = bits_of(weight), place->key[row % RANKED] = ~key;
#else
    (*place)[row % RANKED] = (int64_t)bits_of(weight) << 32 | (uint32_t)~key;
#endif
}

/* the same the other way; where the weight is 0, the key is left as it was */
INLINE void read_rank(const ranks *place, i64 row, real *weight, i64 *key)
{
#ifdef FLOAT64
    whole bits = place->weight[row % RANKED];
    if (bits) *key = ~place->key[row % RANKED];
#else
    whole bits = (*place)[row % RANKED] >> 32;
    if (bits) *key = ~(uint32_t)(*place)[row % RANKED];
#endif
    memcpy(weight, &bits, sizeof bits);
}

/* what was found among other keys */
static void read_largest(const struct place *p, const struct statistic *t, real *lists)
{
    for (i64 r = 0; r < p->rows; r++) {
        ranks *list = list_of(lists, r, t);
        const real *from = numbers_at(p, t, p->head[r], p->token[r], sizeof *from);
        const i64 *from_keys = t->keys + (from - (real *)t->numbers.data);
        for (i64 l = 0; l < t->n; l++) write_rank(list + l, r, from[l], from_keys[l]);
    }
}

static void write_largest(const struct place *p, const struct statistic *t, real *lists)
{
    for (i64 r = 0; r < p->rows; r++) {
        const ranks *list = list_of(lists, r, t);
        real *to = numbers_at(p, t, p->head[r], p->token[r], sizeof *to);
        i64 *to_keys = t->keys + (to - (real *)t->numbers.data); /* with the same strides */
        for (i64 l = 0; l < t->n; l++) read_rank(list + l, r, to + l, to_keys + l);
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
    i64 D = deep(c, c->head_dim), units = (p->rows + UNIT - 1) / UNIT;
    real *query = part_of(&memory, units * D * UNIT);
    real *lse = part_of(&memory, units * UNIT), *rest = part_of(&memory, units * UNIT);
    real *top = part_of(&memory, units * UNIT), *total = part_of(&memory, units * UNIT);
    real *entropy = part_of(&memory, units * UNIT), *scores = part_of(&memory, KEYS * UNIT);
    real *key_room = part_of(&memory, KEYS * D), *list[c->statistics + 1];
    for (i64 t = 0; t < c->statistics; t++) {
        i64 numbers = list_numbers(c->statistic + t) * units * UNIT;
        list[t] = memset(part_of(&memory, numbers), 0, numbers * sizeof(real));
        if (c->goes_on && c->statistic[t].kind == TOP) read_largest(p, c->statistic + t, list[t]);
    }
    for (i64 u = 0; u < units; u++)
        side_by_side(p, &c->query, u, c->head_dim, query_factor(c), query + u * D * UNIT);
    if (!c->knows_lse) {
        find_softmax(p, query, KEYS, top, total, scores, key_room, c->goes_on);
        for (i64 r = 0; r < p->rows; r++) c->lse[number_of(p, r)] = lse_of(p, r, top[r], total[r]);
    } else if (c->statistics && any_is_far(p))
        find_softmax(p, query, KEYS, top, total, scores, key_room, 0);
    if (!c->statistics) return;
    for (i64 r = 0; r < units * UNIT; r++) {
        i64 of = least(r, p->rows - 1);
        real of_query = in_log_2(c->lse[number_of(p, of)]);
        lse[r] = is_far(p, of) ? top[of] : of_query == NONE ? 0 : of_query;
        rest[r] = is_far(p, of) ? log2(total[of]) : 0;
    }
    memset(entropy, 0, units * UNIT * sizeof(real));
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        const struct span *s = k.span;
        struct rows key = rows_to_multiply(p, &c->key, s, k.first, k.n, c->head_dim, key_room);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, &k, u, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                struct rows of_key = rows_from(key, part[i].from);
                struct seen seen = {scores, row, part[i].rows, key_of(p, s, first), s->step, n, part[i].wide};
                real *of_query = column_of(query, row, D);
                real factor = scores_of(p, s, row, first, n, seen.wide, of_key, of_query, scores, NULL);
                weights_of(n, seen.rows, seen.wide, lse + row, rest + row, scores, factor, entropy + row);
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

/* Attention over the strips of a mask, forward and backward, on the vector units of a CPU.

   The scores of some queries with some keys are computed, used and forgotten before the next ones, as in flash attention
   (Dao et al. 2022). Queries lie side by side in vectors: scores are held as [key][query], so that

       scores[key][query]     = sum_d  key[key][d]      queryT[d][query]          (1)
       outputT[e][query]     += sum_j  value[j][e]      weights[j][query]         (2)
       dweights[key][query]   = sum_e  value[key][e]    doutputT[e][query]        (3)
       dqueryT[d][query]     += sum_j  key[j][d]        dscores[j][query]         (4)
       dvalue[key][e]        += sum_i  weights[key][i]  doutput[i][e]             (5)
       dkey[key][d]          += sum_i  dscores[key][i]  query[i][d]

   are all one loop, `block`: numbers of the left factor, read where they are, times vectors of the right one. Keys and
   values are neither copied nor transposed, and the softmax adds up and compares whole vectors.

   Scores are in units of log 2: weights = exp2(score - max). Whatever hides a key adds -inf. A query that sees no key
   gets 0, and lse -inf. Nothing here allocates beyond a piece of memory for each thread.

   The interface is `struct call`, filled in by library.py; the order of its fields is the same there. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#ifdef FLOAT64 /* compiled once more for float64 */
typedef double real;
typedef int64_t whole;
#else
typedef float real;
typedef int32_t whole;
#endif

#if defined(__AVX512F__)
#define BYTES 64
#define LEFT 8 /* numbers of the left factor at a time: with two vectors of each, all sums stay in registers */
#elif defined(__AVX2__)
#define BYTES 32
#define LEFT 6
#else
#define BYTES 16
#define LEFT 8
#endif

#define LANES (BYTES / (int)sizeof(real))
#define UNIT (2 * LANES) /* queries side by side */
#define UNITS 4          /* units that use the same keys one after another, while a core caches them */
#define KEYS 128         /* keys at a time, forward */
#define KEYS_BACKWARD 64 /* twice as many numbers are held for each */
#define LOG2_E ((real)1.4426950408889634074)
#define LN_2 ((real)0.6931471805599453094)
#define NONE (-(real)INFINITY)
#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))

typedef int64_t i64;
typedef real vec __attribute__((vector_size(BYTES)));
typedef whole ints __attribute__((vector_size(BYTES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t signed_bits __attribute__((vector_size(4 * LANES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t loose_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

enum dtype { OWN, BFLOAT16, FLOAT16 }; /* OWN: that of `real` */

/* [batch, head, row, feature] with consecutive features; strides in numbers */
struct tensor {
    void *data;
    i64 batch, head, row;
};

/* Numbers added to scores: of batch, head, query and key; a stride of 0 repeats them. Up to `spare` further numbers may
   be read. grads: what the gradients are added to, NULL if none are wanted; those of different threads lie apart. */
struct tile {
    const real *numbers;
    i64 batch, head, query, key, spare;
    real *grads;
    i64 grads_batch, grads_head, grads_query, grads_key, grads_chunk;
};

/* `count` keys, and what is added to their scores; causal: query i of the strip sees the first i + 1 */
struct span {
    i64 start, step, count, shift, causal, tile, tiles;
};

/* queries that see the same spans; `times` such, the n-th of them n * shift further on; batch -1: of all batch indices */
struct strip {
    i64 batch, times, shift, start, step, count, span, spans;
};

struct call {
    struct tensor query, key, value, output, grad_output, grad_query, grad_key, grad_value;
    struct tensor exact;      /* the output in float32; not written where NULL; what backward reads where given */
    real *lse;               /* [batch, heads, query_len]; not written where NULL */
    const real *grad_lse;    /* the same, or NULL */
    const real *sink;        /* [heads], or NULL */
    const int32_t *row_bits;  /* dropout: random numbers of rows [batch, heads, query_len], or NULL: no dropout */
    const int32_t *column_bits, *column_odd; /* and of columns [batch or 1, key_len] */
    i64 column_batch;
    i64 batches, heads, kv_heads, query_len, key_len, head_dim, value_dim;
    i64 dtype, threads, strips;
    i64 chunks; /* backward: queries are dealt out to so many threads, each with gradients of keys and values ... */
    i64 chunk_key, chunk_value; /* ... so far apart */
    const struct strip *strip;
    const struct span *span;
    const struct tile *tile;
    double scale, softcap, kept_factor; /* softcap 0: none */
    i64 kept_least;
    /* of the pass itself; careful: what nobody sees is taken as 0; suspect: something was no finite number */
    i64 careful, suspect, units, items, next;
};

INLINE vec load(const real *p) { return *(const loose *)p; }
INLINE signed_bits load_bits(const int32_t *p) { return *(const loose_bits *)p; }
INLINE void store(real *p, vec x) { *(loose *)p = x; }
INLINE vec all(real x) { return (vec){0} + x; }
INLINE vec pick(ints where, vec x, vec other) { return (vec)((where & (ints)x) | (~where & (ints)other)); }
INLINE i64 least(i64 x, i64 y) { return x < y ? x : y; }
INLINE i64 round_up(i64 x, i64 to) { return (x + to - 1) / to * to; }

/* 2^x, to about 1e-7 (1e-15 in float64); 0 below the smallest normal number; NaN stays NaN. */
#ifdef FLOAT64
#define LOWEST -1022.0
#define FRACTION_BITS 52
static const real POWERS[] = { /* ln(2)^n / n! */
    2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011234e-09, 1.0178086009239699e-07,
    1.3215486790144310e-06, 1.5252733804059841e-05, 1.5403530393381609e-04, 1.3333558146428444e-03,
    9.6181291076284772e-03, 5.5504108664821580e-02, 2.4022650695910072e-01, 6.9314718055994531e-01, 1.0};
#else
#define LOWEST -126.0f
#define FRACTION_BITS 23
static const real POWERS[] = { /* of Cephes' exp2f */
    1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
    2.402264791363012e-1f, 6.931472028550421e-1f, 1};
#endif

INLINE vec exp2_of(vec x)
{
    x = pick(x < LOWEST, all(LOWEST - 1), x);
    x = pick(x > 1 - LOWEST, all(1 - LOWEST), x);
    const real shift = (real)3 * ((i64)1 << (FRACTION_BITS - 1)); /* leaves no place for fractions */
    vec rounded = x + shift, fraction = x - (rounded - shift), power = all(POWERS[0]);
    for (int n = 1; n < (int)(sizeof POWERS / sizeof *POWERS); n++) power = power * fraction + POWERS[n];
    return power * (vec)(((ints)rounded << FRACTION_BITS) + (((whole)1 - (whole)LOWEST) << FRACTION_BITS));
}

/* sum x y, of rows of numbers */
INLINE real dot(const real *x, const real *y, i64 size)
{
    vec sums = all(0);
    real sum = 0;
    i64 d = 0;
    for (; d + LANES <= size; d += LANES) sums += load(x + d) * load(y + d);
    for (; d < size; d++) sum += x[d] * y[d];
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* whether all numbers of a row are finite: 0 times others is NaN */
INLINE int is_finite(const real *x, i64 size)
{
    vec sums = all(0);
    real sum = 0;
    i64 d = 0;
    for (; d + LANES <= size; d += LANES) sums += load(x + d) * 0;
    for (; d < size; d++) sum += x[d] * 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum == 0;
}

/* LANES rows of LANES numbers become columns: in log2(LANES) rounds, halves, quarters ... change places. */
INLINE void transpose(vec x[LANES])
{
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 4
    for (int half = 1; half < LANES; half *= 2) {
        ints first, second;
        for (int lane = 0; lane < LANES; lane++) {
            first[lane] = lane & half ? LANES + lane - half : lane;
            second[lane] = lane & half ? LANES + lane : lane + half;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & half) continue;
            vec one = x[i], other = x[i + half];
            x[i] = __builtin_shuffle(one, other, first);
            x[i + half] = __builtin_shuffle(one, other, second);
        }
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            real one = x[i][j];
            x[i][j] = x[j][i], x[j][i] = one;
        }
#endif
}

/* `rows` of `size` numbers, a multiple of LANES of them, side by side: out[number][UNIT] */
static void to_columns(const real *const *rows, int count, i64 size, real factor, real *out)
{
    for (int c = 0; c < count; c += LANES) {
        i64 d = 0;
        for (; d + LANES <= size; d += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load(rows[c + i] + d) * factor;
            transpose(x);
            for (int i = 0; i < LANES; i++) store(out + (d + i) * UNIT + c, x[i]);
        }
        for (; d < size; d++)
            for (int i = 0; i < LANES; i++) out[d * UNIT + c + i] = rows[c + i][d] * factor;
    }
}

/* the other way: out[row][size], for UNIT rows */
static void to_rows(const real *columns, i64 size, real *out)
{
    for (int c = 0; c < UNIT; c += LANES) {
        i64 d = 0;
        for (; d + LANES <= size; d += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load(columns + (d + i) * UNIT + c);
            transpose(x);
            for (int i = 0; i < LANES; i++) store(out + (c + i) * size + d, x[i]);
        }
        for (; d < size; d++)
            for (int i = 0; i < LANES; i++) out[(c + i) * size + d] = columns[d * UNIT + c + i];
    }
}

/* out[r][c] (+)= sum_k left[r * row + k * step] right[k][c], for n rows and `wide` vectors of columns */
INLINE void block(
    const int n, const int wide, const real *left, i64 row, i64 step, const real *right, i64 right_row, i64 depth,
    real *out, i64 out_row, const int add)
{
    vec sum[LEFT][2];
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) sum[r][c] = add ? load(out + r * out_row + c * LANES) : all(0);
    for (i64 k = 0; k < depth; k++) {
        vec x[2];
        for (int c = 0; c < wide; c++) x[c] = load(right + k * right_row + c * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
            for (int c = 0; c < wide; c++) sum[r][c] += left[r * row + k * step] * x[c];
    }
#pragma GCC unroll 8
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) store(out + r * out_row + c * LANES, sum[r][c]);
}

INLINE void blocks(
    i64 n, const int wide, const real *left, i64 row, i64 step, const real *right, i64 right_row, i64 depth,
    real *out, i64 out_row, const int add)
{
    i64 r = 0;
    for (; r + LEFT <= n; r += LEFT)
        block(LEFT, wide, left + r * row, row, step, right, right_row, depth, out + r * out_row, out_row, add);
    for (; r + 2 <= n; r += 2)
        block(2, wide, left + r * row, row, step, right, right_row, depth, out + r * out_row, out_row, add);
    for (; r < n; r++)
        block(1, wide, left + r * row, row, step, right, right_row, depth, out + r * out_row, out_row, add);
}

/* (1) and (3): rows of keys or values times what lies side by side for a unit */
static void rows_times(i64 n, const real *left, i64 row, const real *right, i64 depth, int wide, real *out)
{
    if (wide == 2)
        blocks(n, 2, left, row, 1, right, UNIT, depth, out, UNIT, 0);
    else
        blocks(n, 1, left, row, 1, right, UNIT, depth, out, UNIT, 0);
}

/* (2) and (4): features of keys or values times numbers of all scores */
static void features_times(i64 n, const real *left, i64 row, const real *right, i64 depth, int wide, real *out)
{
    if (wide == 2)
        blocks(n, 2, left, 1, row, right, UNIT, depth, out, UNIT, 1);
    else
        blocks(n, 1, left, 1, row, right, UNIT, depth, out, UNIT, 1);
}

/* (5): numbers of all scores times rows of queries or gradients, `padded` features each */
static void scores_times(i64 n, const real *left, const real *right, i64 padded, i64 depth, real *out, i64 out_row)
{
    i64 c = 0;
    for (; c + UNIT <= padded; c += UNIT)
        blocks(n, 2, left, UNIT, 1, right + c, padded, depth, out + c, out_row, 1);
    if (c < padded) blocks(n, 1, left, UNIT, 1, right + c, padded, depth, out + c, out_row, 1);
}

/* numbers of a dtype in our own */
static void widen(const void *from, i64 at, i64 count, i64 dtype, real *to)
{
    if (dtype == OWN)
        memcpy(to, (const real *)from + at, count * sizeof(real));
    else if (dtype == BFLOAT16)
        for (i64 i = 0; i < count; i++) {
            uint32_t x = (uint32_t)((const uint16_t *)from)[at + i] << 16;
            float wide;
            memcpy(&wide, &x, sizeof x);
            to[i] = wide;
        }
    else
        for (i64 i = 0; i < count; i++) to[i] = ((const _Float16 *)from)[at + i];
}

static void narrow(void *to, i64 at, i64 count, i64 dtype, const real *from)
{
    if (dtype == OWN)
        memcpy((real *)to + at, from, count * sizeof(real));
    else if (dtype == BFLOAT16)
        for (i64 i = 0; i < count; i++) { /* to nearest, even */
            float wide = from[i];
            uint32_t x;
            memcpy(&x, &wide, sizeof x);
            ((uint16_t *)to)[at + i] = wide != wide ? 0x7fc0 : (x + 0x7fff + ((x >> 16) & 1)) >> 16;
        }
    else
        for (i64 i = 0; i < count; i++) ((_Float16 *)to)[at + i] = (_Float16)from[i];
}

/* Some queries of a strip with one kv head: those of one head, or, where they are few, of all that share it. */
struct place {
    const struct call *call;
    const struct strip *strip;
    i64 batch, kv_head, time, chunk, rows;
    i64 head[UNITS * UNIT], query[UNITS * UNIT]; /* of the call */
    int32_t index[UNITS * UNIT];                 /* of the strip */
    int32_t lowest[UNITS], highest[UNITS];       /* of the indices of each unit */
};

INLINE i64 place_in(const struct tensor *t, i64 batch, i64 head, i64 row)
{
    return batch * t->batch + head * t->head + row * t->row;
}

/* `n` rows of keys or values, in our dtype: where they are, or in `room` */
static const real *rows_of(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, real *room,
    i64 *row)
{
    i64 at = place_in(t, p->batch, p->kv_head, s->start + p->time * s->shift + first * s->step), by = s->step * t->row;
    if (p->call->dtype == OWN) {
        *row = by;
        return (const real *)t->data + at;
    }
    *row = size;
    for (i64 i = 0; i < n; i++) widen(t->data, at + i * by, size, p->call->dtype, room + i * size);
    return room;
}

INLINE void suspect(const struct place *p)
{
    __atomic_store_n((i64 *)&p->call->suspect, 1, __ATOMIC_RELAXED);
}

/* Rows of keys or values, as 0 if no query of the unit sees them: a weight of 0 times NaN would be NaN. */
static const real *without_unseen(
    const struct place *p, i64 unit, i64 n, const real *scores, const real *rows, i64 *row, i64 size, real *room)
{
    i64 queries = least(UNIT, p->rows - unit * UNIT);
    for (i64 j = 0; j < n; j++) {
        int is_seen = 0;
        for (i64 i = 0; i < queries; i++) is_seen |= scores[j * UNIT + i] != NONE;
        for (i64 d = 0; d < size; d++) room[j * size + d] = is_seen ? rows[j * *row + d] : 0;
    }
    *row = size;
    return room;
}

INLINE int width(const struct place *p, i64 unit) { return p->rows - unit * UNIT > LANES ? 2 : 1; }

/* how many of `n` keys from `first` on any query of a unit sees */
static i64 seen(const struct place *p, const struct span *s, i64 unit, i64 first, i64 n)
{
    return s->causal ? least(n, p->highest[unit] + 1 - first) : n;
}

static i64 all_seen(const struct place *p, const struct span *s)
{
    i64 most = 0;
    for (i64 u = 0; u * UNIT < p->rows; u++) {
        i64 n = seen(p, s, u, 0, s->count);
        most = n > most ? n : most;
    }
    return most;
}

/* adds numbers to scores [n][UNIT] of keys from `first` on */
static void add_tile(const struct place *p, const struct tile *t, i64 unit, i64 first, i64 n, int wide, real *scores)
{
    const real *from[UNIT];
    int by_lane = t->query == 1, alike = 1, rows = wide * LANES;
    for (int i = 0; i < rows; i++) {
        i64 r = least(unit * UNIT + i, p->rows - 1);
        from[i] = t->numbers + p->batch * t->batch + p->head[r] * t->head + p->index[r] * t->query + first * t->key;
        alike &= from[i] == from[0];
        by_lane &= from[i] == from[0] + i || unit * UNIT + i >= p->rows;
    }
    by_lane &= unit * UNIT + rows - p->rows <= t->spare; /* nothing beyond the last number is read */
    if (by_lane || alike) {
        for (i64 j = 0; j < n; j++)
            for (int c = 0; c < wide; c++) {
                real *at = scores + j * UNIT + c * LANES;
                const real *of_key = from[0] + j * t->key;
                vec x = by_lane ? load(of_key + c * LANES) : all(*of_key);
                store(at, pick(x == NONE, x, load(at) + LOG2_E * x)); /* even if the score is NaN */
            }
        return;
    }
    i64 j = 0;
    for (; t->key == 1 && j + LANES <= n; j += LANES)
        for (int c = 0; c < rows; c += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load(from[c + i] + j);
            transpose(x);
            for (int i = 0; i < LANES; i++) {
                real *at = scores + (j + i) * UNIT + c;
                store(at, pick(x[i] == NONE, x[i], load(at) + LOG2_E * x[i]));
            }
        }
    for (; j < n; j++)
        for (int i = 0; i < rows; i++) {
            real x = from[i][j * t->key], *at = scores + j * UNIT + i;
            *at = x == NONE ? x : *at + LOG2_E * x;
        }
}

/* adds gradients of scores to those of the numbers that were added to them */
static void pull_tile(
    const struct place *p, const struct tile *t, i64 unit, i64 first, i64 n, int wide, const real *grads)
{
    i64 rows = least(p->rows - unit * UNIT, wide * LANES);
    int apart = t->grads_query != 1 || p->head[unit * UNIT] != p->head[unit * UNIT + rows - 1];
    for (i64 i = 0; i < (apart ? rows : 1); i++) {
        i64 r = unit * UNIT + i;
        real *to = t->grads + p->chunk * t->grads_chunk + p->batch * t->grads_batch + p->head[r] * t->grads_head +
                    p->index[r] * t->grads_query + first * t->grads_key;
        for (i64 j = 0; j < n; j++)
            if (apart)
                to[j * t->grads_key] += grads[j * UNIT + i];
            else
                for (i64 k = 0; k < rows; k++) to[j * t->grads_key + k] += grads[j * UNIT + k];
    }
}

/* Scores of a unit with n keys from `first` of a span on, in units of log 2; slope: of the softcap, or NULL. */
static void scores_of(
    const struct place *p, const struct span *s, i64 unit, i64 first, i64 n, int wide, const real *key, i64 key_row,
    const real *query, real *scores, real *slope)
{
    const struct call *c = p->call;
    rows_times(n, key, key_row, query, c->head_dim, wide, scores);
    if (c->softcap > 0) /* c tanh(s / c), of which the product is 2 s / c */
        for (i64 j = 0; j < n; j++)
            for (int w = 0; w < wide; w++) {
                real *at = scores + j * UNIT + w * LANES;
                vec tanh = 1 - 2 / (exp2_of(load(at)) + 1);
                store(at, (real)c->softcap * LOG2_E * tanh);
                if (slope) store(slope + j * UNIT + w * LANES, 1 - tanh * tanh);
            }
    for (i64 t = 0; t < s->tiles; t++) add_tile(p, c->tile + s->tile + t, unit, first, n, wide, scores);
    if (!s->causal) return;
    const int32_t *index = p->index + unit * UNIT, after = p->lowest[unit] + 1;
    for (i64 j = after > first ? after - first : 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            real *at = scores + j * UNIT + w * LANES;
            ints later = __builtin_convertvector(load_bits(index + w * LANES) < (int32_t)(first + j), ints);
            store(at, pick(later, all(NONE), load(at)));
        }
}

/* which weights dropout keeps, as 0 and the factor of those that it keeps; weights [n][UNIT] are multiplied by it */
static void drop(const struct place *p, const struct span *s, i64 unit, i64 first, i64 n, int wide, real *x, real *y)
{
    const struct call *c = p->call;
    int32_t rows[UNIT] __attribute__((aligned(64)));
    for (int i = 0; i < wide * LANES; i++) {
        i64 r = least(unit * UNIT + i, p->rows - 1);
        rows[i] = c->row_bits[(p->batch * c->heads + p->head[r]) * c->query_len + p->query[r]];
    }
    for (i64 j = 0; j < n; j++) {
        i64 key = p->batch * c->column_batch + s->start + p->time * s->shift + (first + j) * s->step;
        int32_t column = c->column_bits[key], odd = c->column_odd[key];
        for (int w = 0; w < wide; w++) { /* the rest of MurmurHash3's finalizer; see dropout.py */
            bits h = (bits)(load_bits(rows + w * LANES) ^ column);
            h *= 0x85EBCA6Bu;
            h ^= h >> 13;
            h *= 0xC2B2AE35u;
            h ^= h >> 16;
            signed_bits half = odd ? (signed_bits)h >> 16 : (signed_bits)(h << 16) >> 16;
            ints dropped = __builtin_convertvector(half < (int32_t)c->kept_least, ints);
            vec kept = pick(dropped, all(0), all((real)c->kept_factor));
            store(x + j * UNIT + w * LANES, load(x + j * UNIT + w * LANES) * kept);
            if (y) store(y + j * UNIT + w * LANES, load(y + j * UNIT + w * LANES) * kept);
        }
    }
}

/* Queries, or gradients of outputs, side by side: [feature][UNIT]; and one after another, if `rows` is given. */
static void side_by_side(
    const struct place *p, const struct tensor *t, i64 unit, i64 size, real factor, real *out, real *rows,
    i64 padded, real rows_factor)
{
    i64 dtype = p->call->dtype, n = least(UNIT, p->rows - unit * UNIT);
    const real *from[UNIT];
    real room[dtype == OWN ? 1 : UNIT * size];
    for (i64 i = 0; i < UNIT; i++) {
        i64 r = unit * UNIT + least(i, n - 1), at = place_in(t, p->batch, p->head[r], p->query[r]);
        from[i] = dtype == OWN ? (const real *)t->data + at : room + i * size;
        if (dtype != OWN) widen(t->data, at, size, dtype, room + i * size);
    }
    to_columns(from, UNIT, size, factor, out);
    if (!rows) return;
    memset(rows, 0, UNIT * padded * sizeof(real));
    for (i64 i = 0; i < n; i++) {
        for (i64 d = 0; d < size; d++) rows[i * padded + d] = from[i][d] * rows_factor;
        if (!is_finite(from[i], size)) suspect(p);
    }
}

/* memory of a thread, which it keeps */
static pthread_key_t kept_memory;
static pthread_once_t kept_once = PTHREAD_ONCE_INIT;
struct memory {
    i64 size;
    real *numbers;
};

static void forget(void *memory)
{
    free(((struct memory *)memory)->numbers);
    free(memory);
}

static void make_key(void) { pthread_key_create(&kept_memory, forget); }

static real *memory_for(i64 numbers)
{
    pthread_once(&kept_once, make_key);
    struct memory *m = pthread_getspecific(kept_memory);
    if (!m) {
        m = calloc(1, sizeof *m);
        pthread_setspecific(kept_memory, m);
    }
    if (m->size < numbers) {
        free(m->numbers);
        m->size = numbers;
        if (posix_memalign((void **)&m->numbers, 64, numbers * sizeof(real))) abort();
    }
    return m->numbers;
}

INLINE real *part_of(real **memory, i64 numbers)
{
    real *part = *memory;
    *memory += round_up(numbers, 16);
    return part;
}

/* --- forward ----------------------------------------------------------------------------------------------------- */

static i64 forward_numbers(const struct call *c)
{
    i64 each = (c->head_dim + c->value_dim + 2) * UNIT;
    return UNITS * each + KEYS * (UNIT + c->head_dim + 2 * c->value_dim) + 16 * 9;
}

/* The output of a unit so far, with n more keys: largest score, sum of weights and output are brought up to date. */
static void attend(
    const struct place *p, const struct span *s, i64 unit, i64 first, i64 n, int wide, const real *value,
    i64 value_row, real *scores, real *top, real *total, real *output)
{
    const struct call *c = p->call;
    vec before[2], most[2], sum[2], by[2];
    for (int w = 0; w < wide; w++) before[w] = most[w] = load(top + w * LANES);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            vec x = load(scores + j * UNIT + w * LANES);
            most[w] = pick(x > most[w], x, most[w]);
        }
    int grew = 0;
    for (int w = 0; w < wide; w++) {
        store(top + w * LANES, most[w]);
        vec from = pick(most[w] == NONE, all(0), most[w]); /* -inf - -inf is NaN */
        by[w] = exp2_of(before[w] - from);
        sum[w] = load(total + w * LANES) * by[w];
        most[w] = from;
        for (int i = 0; i < LANES; i++) grew |= by[w][i] != 1;
    }
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            vec weight = exp2_of(load(scores + j * UNIT + w * LANES) - most[w]);
            sum[w] += weight;
            store(scores + j * UNIT + w * LANES, weight);
        }
    for (int w = 0; w < wide; w++) store(total + w * LANES, sum[w]);
    if (c->row_bits) drop(p, s, unit, first, n, wide, scores, NULL);
    if (grew)
        for (i64 e = 0; e < c->value_dim; e++)
            for (int w = 0; w < wide; w++) {
                real *at = output + e * UNIT + w * LANES;
                store(at, load(at) * by[w]);
            }
    features_times(c->value_dim, value, value_row, scores, n, wide, output);
}

static void forward_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, units = (p->rows + UNIT - 1) / UNIT;
    real *query = part_of(&memory, units * D * UNIT), *output = part_of(&memory, units * E * UNIT);
    real *top = part_of(&memory, units * UNIT), *total = part_of(&memory, units * UNIT);
    real *scores = part_of(&memory, KEYS * UNIT);
    real *key_room = part_of(&memory, KEYS * D), *value_room = part_of(&memory, KEYS * E);
    real *seen_room = part_of(&memory, KEYS * E);
    real factor = c->softcap > 0 ? c->scale * 2 * LOG2_E / c->softcap : c->scale * LOG2_E;
    for (i64 u = 0; u < units; u++) {
        side_by_side(p, &c->query, u, D, factor, query + u * D * UNIT, NULL, 0, 0);
        for (int i = 0; i < UNIT; i++) {
            i64 r = least(u * UNIT + i, p->rows - 1);
            top[u * UNIT + i] = c->sink ? c->sink[p->head[r]] * LOG2_E : NONE; /* a sink is a key without value */
            total[u * UNIT + i] = c->sink && c->sink[p->head[r]] > NONE;
        }
    }
    memset(output, 0, units * E * UNIT * sizeof(real));
    for (i64 at = 0; at < p->strip->spans; at++) {
        const struct span *s = c->span + p->strip->span + at;
        i64 stop = all_seen(p, s);
        for (i64 first = 0; first < stop; first += KEYS) {
            i64 n = least(KEYS, stop - first), key_row, value_row;
            const real *key = rows_of(p, &c->key, s, first, n, D, key_room, &key_row);
            const real *value = rows_of(p, &c->value, s, first, n, E, value_room, &value_row);
            for (i64 u = 0; u < units; u++) {
                i64 of_unit = seen(p, s, u, first, n);
                if (of_unit <= 0) continue;
                int wide = width(p, u);
                scores_of(p, s, u, first, of_unit, wide, key, key_row, query + u * D * UNIT, scores, NULL);
                const real *of_seen = value;
                i64 seen_row = value_row;
                if (c->careful) of_seen = without_unseen(p, u, of_unit, scores, value, &seen_row, E, seen_room);
                attend(
                    p, s, u, first, of_unit, wide, of_seen, seen_row, scores, top + u * UNIT, total + u * UNIT,
                    output + u * E * UNIT);
            }
        }
    }
    real rows[UNIT * E];
    for (i64 r = 0; r < p->rows; r++) {
        if (r % UNIT == 0) to_rows(output + r * E, E, rows);
        real *row = rows + r % UNIT * E, sum = total[r], share = sum == 0 ? 0 : 1 / sum;
        for (i64 e = 0; e < E; e++) row[e] *= share;
        if (!is_finite(row, E) || sum * 0 != 0) suspect(p);
        if (c->exact.data) narrow(c->exact.data, place_in(&c->exact, p->batch, p->head[r], p->query[r]), E, OWN, row);
        narrow(c->output.data, place_in(&c->output, p->batch, p->head[r], p->query[r]), E, c->dtype, row);
        if (!c->lse) continue;
        real sink = c->sink ? c->sink[p->head[r]] : NONE;
        int alone = sum == 1 && top[r] == sink * LOG2_E; /* to the last bit, where no key is seen */
        c->lse[(p->batch * c->heads + p->head[r]) * c->query_len + p->query[r]] =
            alone ? sink : (top[r] + log2(sum)) * LN_2;
    }
}

/* --- backward ---------------------------------------------------------------------------------------------------- */

static i64 backward_numbers(const struct call *c)
{
    i64 D = c->head_dim, E = c->value_dim, wide = round_up(D, LANES) + round_up(E, LANES);
    return UNITS * UNIT * (2 * D + E + wide + 2) + KEYS_BACKWARD * (4 * UNIT + 2 * D + 2 * E) + 16 * 18;
}

/* Takes queries that see no key as 0, with their gradients. */
static void forget_empty(
    const struct place *p, real *query, real *grad, real *query_rows, real *grad_rows, real *delta, real *scores,
    real *key_room)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, D_padded = round_up(D, LANES), E_padded = round_up(E, LANES);
    int8_t sees[UNITS * UNIT] = {0};
    for (i64 at = 0; at < p->strip->spans; at++) {
        const struct span *s = c->span + p->strip->span + at;
        for (i64 first = 0; first < s->count; first += KEYS_BACKWARD)
            for (i64 u = 0; u * UNIT < p->rows; u++) {
                i64 n = seen(p, s, u, first, least(KEYS_BACKWARD, s->count - first)), key_row;
                if (n <= 0) continue;
                const real *key = rows_of(p, &c->key, s, first, n, D, key_room, &key_row);
                scores_of(p, s, u, first, n, 2, key, key_row, query + u * D * UNIT, scores, NULL);
                for (i64 j = 0; j < n * UNIT; j++) sees[u * UNIT + j % UNIT] |= scores[j] != NONE;
            }
    }
    for (i64 r = 0; r < p->rows; r++) {
        if (sees[r]) continue;
        i64 u = r / UNIT, i = r % UNIT;
        for (i64 d = 0; d < D; d++) query[(u * D + d) * UNIT + i] = query_rows[r * D_padded + d] = 0;
        for (i64 e = 0; e < E; e++) grad[(u * E + e) * UNIT + i] = grad_rows[r * E_padded + e] = 0;
        delta[r] = 0;
    }
}

static void backward_place(const struct place *p, real *memory, real *grad_key, real *grad_value)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, units = (p->rows + UNIT - 1) / UNIT;
    i64 D_padded = round_up(D, LANES), E_padded = round_up(E, LANES);
    real *query = part_of(&memory, units * D * UNIT), *grad = part_of(&memory, units * E * UNIT);
    real *query_rows = part_of(&memory, units * D_padded * UNIT), *grad_rows = part_of(&memory, units * E_padded * UNIT);
    real *grad_query = part_of(&memory, units * D * UNIT);
    real *lse = part_of(&memory, units * UNIT), *delta = part_of(&memory, units * UNIT);
    real *scores = part_of(&memory, KEYS_BACKWARD * UNIT), *grads = part_of(&memory, KEYS_BACKWARD * UNIT);
    real *slope = part_of(&memory, KEYS_BACKWARD * UNIT), *dropped = part_of(&memory, KEYS_BACKWARD * UNIT);
    real *key_room = part_of(&memory, KEYS_BACKWARD * D), *value_room = part_of(&memory, KEYS_BACKWARD * E);
    real *seen_key = part_of(&memory, KEYS_BACKWARD * D), *seen_value = part_of(&memory, KEYS_BACKWARD * E);
    real factor = c->softcap > 0 ? c->scale * 2 * LOG2_E / c->softcap : c->scale * LOG2_E;
    for (i64 u = 0; u < units; u++) {
        side_by_side(p, &c->query, u, D, factor, query + u * D * UNIT, query_rows + u * D_padded * UNIT, D_padded, c->scale);
        side_by_side(p, &c->grad_output, u, E, 1, grad + u * E * UNIT, grad_rows + u * E_padded * UNIT, E_padded, 1);
        for (i64 r = u * UNIT; r < least(p->rows, (u + 1) * UNIT); r++) {
            i64 at = (p->batch * c->heads + p->head[r]) * c->query_len + p->query[r];
            const struct tensor *output = c->exact.data ? &c->exact : &c->output;
            real row[E];
            widen(
                output->data, place_in(output, p->batch, p->head[r], p->query[r]), E, c->exact.data ? OWN : c->dtype, row);
            lse[r] = c->lse[at] == NONE ? 0 : c->lse[at] * LOG2_E;
            delta[r] = dot(row, grad_rows + r * E_padded, E) - (c->grad_lse ? c->grad_lse[at] : 0);
        }
        for (i64 r = p->rows; r < (u + 1) * UNIT; r++) lse[r] = delta[r] = 0;
    }
    memset(grad_query, 0, units * D * UNIT * sizeof(real));
    if (c->careful) forget_empty(p, query, grad, query_rows, grad_rows, delta, scores, key_room);
    for (i64 at = 0; at < p->strip->spans; at++) {
        const struct span *s = c->span + p->strip->span + at;
        i64 stop = all_seen(p, s);
        for (i64 first = 0; first < stop; first += KEYS_BACKWARD) {
            i64 n = least(KEYS_BACKWARD, stop - first), key_row, value_row;
            const real *key = rows_of(p, &c->key, s, first, n, D, key_room, &key_row);
            const real *value = rows_of(p, &c->value, s, first, n, E, value_room, &value_row);
            i64 row = s->start + p->time * s->shift + first * s->step;
            real *to_key = grad_key + row * c->grad_key.row, *to_value = grad_value + row * c->grad_value.row;
            for (i64 u = 0; u < units; u++) {
                i64 m = seen(p, s, u, first, n);
                if (m <= 0) continue;
                int wide = width(p, u);
                i64 rows = least(UNIT, p->rows - u * UNIT);
                scores_of(p, s, u, first, m, wide, key, key_row, query + u * D * UNIT, scores, slope);
                const real *k = key, *v = value;
                i64 k_row = key_row, v_row = value_row;
                if (c->careful) {
                    k = without_unseen(p, u, m, scores, key, &k_row, D, seen_key);
                    v = without_unseen(p, u, m, scores, value, &v_row, E, seen_value);
                }
                rows_times(m, v, v_row, grad + u * E * UNIT, E, wide, grads);
                for (i64 j = 0; j < m; j++)
                    for (int w = 0; w < wide; w++) {
                        real *x = scores + j * UNIT + w * LANES;
                        store(x, exp2_of(load(x) - load(lse + u * UNIT + w * LANES)));
                    }
                real *kept = scores; /* what values were multiplied by */
                if (c->row_bits) {
                    kept = memcpy(dropped, scores, m * UNIT * sizeof(real));
                    drop(p, s, u, first, m, wide, kept, grads);
                }
                scores_times(m, kept, grad_rows + u * E_padded * UNIT, E_padded, rows, to_value, s->step * c->grad_value.row);
                for (i64 j = 0; j < m; j++)
                    for (int w = 0; w < wide; w++) {
                        real *x = grads + j * UNIT + w * LANES;
                        store(x, load(scores + j * UNIT + w * LANES) * (load(x) - load(delta + u * UNIT + w * LANES)));
                    }
                for (i64 t = 0; t < s->tiles; t++)
                    if (c->tile[s->tile + t].grads) pull_tile(p, c->tile + s->tile + t, u, first, m, wide, grads);
                if (c->softcap > 0)
                    for (i64 j = 0; j < m * UNIT; j++) grads[j] *= slope[j];
                features_times(D, k, k_row, grads, m, wide, grad_query + u * D * UNIT);
                scores_times(m, grads, query_rows + u * D_padded * UNIT, D_padded, rows, to_key, s->step * c->grad_key.row);
            }
        }
    }
    real of_unit[UNIT * D];
    for (i64 r = 0; r < p->rows; r++) {
        if (r % UNIT == 0) to_rows(grad_query + r * D, D, of_unit);
        real *to = (real *)c->grad_query.data + place_in(&c->grad_query, p->batch, p->head[r], p->query[r]);
        for (i64 d = 0; d < D; d++) to[d] = of_unit[r % UNIT * D + d] * (real)c->scale;
        if (!is_finite(to, D)) suspect(p);
    }
}

/* --- all places of a call ------------------------------------------------------------------------------------------ */

/* Few queries leave lanes empty: those of all heads that share a kv head are then side by side. */
INLINE int is_folded(const struct call *c, const struct strip *s)
{
    return s->count < UNIT && c->heads > c->kv_heads;
}

INLINE i64 rows_in(const struct call *c, const struct strip *s)
{
    return is_folded(c, s) ? s->count * (c->heads / c->kv_heads) : s->count;
}

INLINE i64 blocks_of(const struct call *c, const struct strip *s)
{
    return (rows_in(c, s) + c->units * UNIT - 1) / (c->units * UNIT);
}

/* head: a kv head if the strip is folded */
static void find_place(
    struct place *p, const struct call *c, const struct strip *s, i64 batch, i64 head, i64 time, i64 number)
{
    i64 group = c->heads / c->kv_heads, folded = is_folded(c, s), start = number * c->units * UNIT;
    p->call = c, p->strip = s, p->batch = batch, p->time = time;
    p->kv_head = folded ? head : head / group;
    p->rows = least(c->units * UNIT, rows_in(c, s) - start);
    for (i64 r = 0; r < round_up(p->rows, UNIT); r++) {
        i64 row = start + least(r, p->rows - 1), index = folded ? row % s->count : row, u = r / UNIT;
        p->head[r] = folded ? head * group + row / s->count : head;
        p->query[r] = s->start + time * s->shift + index * s->step;
        p->index[r] = index;
        p->lowest[u] = r % UNIT && p->lowest[u] < index ? p->lowest[u] : index;
        p->highest[u] = r % UNIT && p->highest[u] > index ? p->highest[u] : index;
    }
}

/* Numbers too small to be normal are 0 while we compute: some processors multiply them a hundred times as slowly. */
#if defined(__SSE__)
INLINE unsigned flush_tiny(void)
{
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    return before;
}
INLINE void restore_tiny(unsigned before) { __builtin_ia32_ldmxcsr(before); }
#else
INLINE unsigned flush_tiny(void) { return 0; }
INLINE void restore_tiny(unsigned before) { (void)before; }
#endif

INLINE i64 batches_of(const struct call *c, const struct strip *s) { return s->batch < 0 ? c->batches : 1; }

INLINE i64 heads_of(const struct call *c, const struct strip *s) { return is_folded(c, s) ? c->kv_heads : c->heads; }

static i64 items_of(const struct call *c, const struct strip *s)
{
    return blocks_of(c, s) * s->times * batches_of(c, s) * heads_of(c, s);
}

static void forward_work(void *of_call)
{
    struct call *c = of_call;
    real *memory = memory_for(forward_numbers(c));
    unsigned tiny = flush_tiny();
    struct place p;
    i64 before = 0, number = 0; /* items of the strips before this one */
    for (;;) {
        i64 item = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        while (number < c->strips && item - before >= items_of(c, c->strip + number))
            before += items_of(c, c->strip + number++);
        if (number == c->strips) break;
        const struct strip *s = c->strip + number;
        i64 at = item - before, heads = heads_of(c, s), batches = batches_of(c, s);
        i64 head = at % heads, batch = at / heads % batches, time = at / heads / batches % s->times;
        i64 from_end = at / heads / batches / s->times; /* the longest rows of a causal square come first */
        find_place(&p, c, s, s->batch < 0 ? batch : s->batch, head, time, blocks_of(c, s) - 1 - from_end);
        forward_place(&p, memory);
    }
    restore_tiny(tiny);
}

static void backward_work(void *of_call)
{
    struct call *c = of_call;
    real *memory = memory_for(backward_numbers(c));
    unsigned tiny = flush_tiny();
    struct place p;
    i64 group = c->heads / c->kv_heads;
    for (;;) {
        i64 item = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED);
        if (item >= c->items) break;
        i64 chunk = item % c->chunks, kv_head = item / c->chunks % c->kv_heads, batch = item / c->chunks / c->kv_heads;
        real *grad_key = (real *)c->grad_key.data + place_in(&c->grad_key, batch, kv_head, 0) + chunk * c->chunk_key;
        real *grad_value =
            (real *)c->grad_value.data + place_in(&c->grad_value, batch, kv_head, 0) + chunk * c->chunk_value;
        i64 dealt = 0;
        p.chunk = chunk;
        for (const struct strip *s = c->strip; s < c->strip + c->strips; s++) {
            if (s->batch >= 0 && s->batch != batch) continue;
            i64 first = is_folded(c, s) ? kv_head : kv_head * group, heads = is_folded(c, s) ? 1 : group;
            for (i64 time = 0; time < s->times; time++)
                for (i64 head = first; head < first + heads; head++)
                    for (i64 number = 0; number < blocks_of(c, s); number++) {
                        if (dealt++ % c->chunks != chunk) continue;
                        find_place(&p, c, s, batch, head, time, number);
                        backward_place(&p, memory, grad_key, grad_value);
                    }
        }
    }
    restore_tiny(tiny);
}

typedef void parallel(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of the OpenMP that torch uses */

static void run(struct call *c, void (*work)(void *), parallel *in_parallel)
{
    c->next = 0;
    if (in_parallel && c->threads > 1)
        in_parallel(work, c, c->threads, 0);
    else
        work(c);
}

API void regard_forward(struct call *c, parallel *in_parallel)
{
    for (c->units = UNITS; c->units > 1; c->units /= 2) { /* enough places for all threads */
        i64 items = 0;
        for (i64 n = 0; n < c->strips; n++) items += items_of(c, c->strip + n);
        if (items >= 4 * c->threads) break;
    }
    run(c, forward_work, in_parallel);
}

API void regard_backward(struct call *c, parallel *in_parallel)
{
    c->items = c->batches * c->kv_heads * c->chunks;
    for (c->units = UNITS; c->units > 1; c->units /= 2) {
        i64 dealt = 0;
        for (i64 n = 0; n < c->strips; n++) dealt += blocks_of(c, c->strip + n) * c->strip[n].times;
        if (dealt >= 4 * c->chunks || c->chunks == 1) break;
    }
    run(c, backward_work, in_parallel);
}

API i64 regard_lanes(void) { return LANES; }
API i64 regard_size_of_call(void) { return sizeof(struct call); }

/* Numbers in vectors: types, 2^x, rows that become columns, and the one product that all others are made of. */

#pragma once

#include <stdint.h>
#include <string.h>
#include <tgmath.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#ifdef FLOAT64 /* compiled once more for float64 */
typedef double real;
typedef int64_t whole;
#define BYTES_OF_ONE 8
#else
typedef float real;
typedef int32_t whole;
#define BYTES_OF_ONE 4
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

#define LANES (BYTES / BYTES_OF_ONE)
#define FEW (LANES / 2) /* fewer queries than this and one more leave lanes empty, and keys lie side by side instead */
#define UNIT (2 * LANES) /* queries side by side */
#define UNITS 8          /* most units that use the same keys one after another, while a core caches them ... */
#define UNITS_BY_LANES 4 /* ... unless tiles multiply, for which values are turned: once for all of them */
#define KEYS 128         /* keys at a time, forward */
#define KEYS_BACKWARD 64 /* twice as many numbers are held for each */
#define LOG2_E ((real)1.4426950408889634074)
#define LN_2 0.6931471805599453094
#define NONE (-(real)INFINITY)
#define LEAST (BYTES_OF_ONE == 8 ? -(real)__DBL_MAX__ : -(real)__FLT_MAX__) /* of all numbers */
#define INLINE static inline __attribute__((always_inline))
#define API __attribute__((visibility("default")))
#if defined(__clang__) /* loops of a known number of rounds: what they index is then in registers */
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef int64_t i64;
typedef real vec __attribute__((vector_size(BYTES)));
typedef whole ints __attribute__((vector_size(BYTES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t signed_bits __attribute__((vector_size(4 * LANES)));
typedef real loose __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t loose_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint16_t loose_halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef _Float16 loose_float16 __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

INLINE vec load(const real *p) { return *(const loose *)p; }
INLINE signed_bits load_bits(const int32_t *p) { return *(const loose_bits *)p; }
INLINE void store(real *p, vec x) { *(loose *)p = x; }
INLINE vec all(real x) { return (vec){0} + x; }
INLINE vec pick(ints where, vec x, vec other) { return (vec)((where & (ints)x) | (~where & (ints)other)); }

/* 0, 1, 2, ... */
INLINE ints each_lane(void)
{
    static const whole lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints each;
    memcpy(&each, lanes, sizeof each);
    return each;
}

/* at most n numbers, and 0 beyond them, where nothing is read */
INLINE vec load_some(const real *p, i64 n)
{
    if (n >= LANES) return load(p);
#if defined(__AVX512F__) && defined(FLOAT64)
    return (vec)_mm512_maskz_loadu_pd((1u << n) - 1, p);
#elif defined(__AVX512F__)
    return (vec)_mm512_maskz_loadu_ps((1u << n) - 1, p);
#elif defined(__AVX2__) && defined(FLOAT64)
    return (vec)_mm256_maskload_pd(p, (__m256i)(each_lane() < (whole)n));
#elif defined(__AVX2__)
    return (vec)_mm256_maskload_ps(p, (__m256i)(each_lane() < (whole)n));
#else
    vec x = all(0);
    memcpy(&x, p, n * sizeof(real));
    return x;
#endif
}

/* the upper halves of float32 numbers */
INLINE vec load_bfloat16(const uint16_t *p)
{
#if defined(__AVX512F__) && !defined(FLOAT64)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__) && !defined(FLOAT64)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    return __builtin_convertvector((floats)(__builtin_convertvector(*(const loose_halves *)p, bits) << 16), vec);
#endif
}

/* float16: compilers take numbers one by one where processors compute in it only by conversion */
#if defined(__AVX512F__) && !defined(FLOAT64)
INLINE vec load_float16(const _Float16 *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store_float16(_Float16 *p, vec x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, 0)); }
#elif defined(__AVX2__) && defined(__F16C__) && !defined(FLOAT64)
INLINE vec load_float16(const _Float16 *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store_float16(_Float16 *p, vec x) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, 0)); }
#else
INLINE vec load_float16(const _Float16 *p) { return __builtin_convertvector(*(const loose_float16 *)p, vec); }
INLINE void store_float16(_Float16 *p, vec x) { *(loose_float16 *)p = __builtin_convertvector(x, loose_float16); }
#endif

/* the larger, and the smaller, of each two numbers; y where one is NaN */
#if defined(__AVX512F__) && defined(FLOAT64)
#define OF_TWO(which) (vec)_mm512_##which##_pd((__m512d)x, (__m512d)y)
#elif defined(__AVX512F__)
#define OF_TWO(which) (vec)_mm512_##which##_ps((__m512)x, (__m512)y)
#elif defined(__AVX2__) && defined(FLOAT64)
#define OF_TWO(which) (vec)_mm256_##which##_pd((__m256d)x, (__m256d)y)
#elif defined(__AVX2__)
#define OF_TWO(which) (vec)_mm256_##which##_ps((__m256)x, (__m256)y)
#endif
#ifdef OF_TWO
INLINE vec larger_of(vec x, vec y) { return OF_TWO(max); }
INLINE vec smaller_of(vec x, vec y) { return OF_TWO(min); }
#else
INLINE vec larger_of(vec x, vec y) { return pick(x > y, x, y); }
INLINE vec smaller_of(vec x, vec y) { return pick(x < y, x, y); }
#endif

INLINE i64 least(i64 x, i64 y) { return x < y ? x : y; }
INLINE i64 most(i64 x, i64 y) { return x > y ? x : y; }
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

INLINE vec power_of(vec fraction)
{
    vec power = all(POWERS[0]);
    for (int n = 1; n < (int)(sizeof POWERS / sizeof *POWERS); n++) power = power * fraction + POWERS[n];
    return power;
}

#if defined(__AVX512F__) /* has instructions for what is left of x beside the next whole number, and for y 2^x */
#ifdef FLOAT64
#define BESIDE_WHOLE(x) (vec)_mm512_reduce_pd((__m512d)(x), 0)
#define TIMES_2_TO(y, x) (vec)_mm512_scalef_pd((__m512d)(y), (__m512d)(x))
#else
#define BESIDE_WHOLE(x) (vec)_mm512_reduce_ps((__m512)(x), 0)
#define TIMES_2_TO(y, x) (vec)_mm512_scalef_ps((__m512)(y), (__m512)(x))
#endif
INLINE vec exp2_of(vec x)
{
    vec fraction = BESIDE_WHOLE(x); /* 0 of infinity */
    return TIMES_2_TO(power_of(fraction), x - fraction);
}
#else
INLINE vec exp2_of(vec x)
{
    x = smaller_of(all(1 - LOWEST), larger_of(all(LOWEST - 1), x));
    const real shift = (real)3 * ((i64)1 << (FRACTION_BITS - 1)); /* leaves no place for fractions */
    vec rounded = x + shift, fraction = x - (rounded - shift);
    return power_of(fraction) * (vec)(((ints)rounded << FRACTION_BITS) + (((whole)1 - (whole)LOWEST) << FRACTION_BITS));
}
#endif

/* for each lane, one of a shuffle */
#if LANES == 16
#define EACH_LANE(of, half) \
    of(0, half), of(1, half), of(2, half), of(3, half), of(4, half), of(5, half), of(6, half), of(7, half), \
        of(8, half), of(9, half), of(10, half), of(11, half), of(12, half), of(13, half), of(14, half), of(15, half)
#elif LANES == 8
#define EACH_LANE(of, half) \
    of(0, half), of(1, half), of(2, half), of(3, half), of(4, half), of(5, half), of(6, half), of(7, half)
#elif LANES == 4
#define EACH_LANE(of, half) of(0, half), of(1, half), of(2, half), of(3, half)
#else
#define EACH_LANE(of, half) of(0, half), of(1, half)
#endif
#define OF_OTHER(lane, half) ((lane) ^ (half))
#define BESIDE(x, half) __builtin_shufflevector(x, x, EACH_LANE(OF_OTHER, half))

/* The sum of all lanes, the largest, and whether any is not 0: in log2(LANES) rounds, since each waits for the one before. */
#if LANES == 16
#define EACH_ROUND(of) of(8), of(4), of(2), of(1)
#elif LANES == 8
#define EACH_ROUND(of) of(4), of(2), of(1)
#elif LANES == 4
#define EACH_ROUND(of) of(2), of(1)
#else
#define EACH_ROUND(of) of(1)
#endif
#define ADD_BESIDE(half) x += BESIDE(x, half)
#define LARGER_BESIDE(half) x = larger_of(BESIDE(x, half), x)
#define OR_BESIDE(half) x |= BESIDE(x, half)
INLINE real sum_of(vec x) { return EACH_ROUND(ADD_BESIDE), x[0]; }
INLINE real largest_of(vec x) { return EACH_ROUND(LARGER_BESIDE), x[0]; }
INLINE int any_of(ints x) { return EACH_ROUND(OR_BESIDE), x[0] != 0; }

/* sum x y, of rows of numbers */
INLINE real dot(const real *x, const real *y, i64 size)
{
    vec sums = all(0);
    real sum = 0;
    i64 d = 0;
    for (; d + LANES <= size; d += LANES) sums += load(x + d) * load(y + d);
    for (; d < size; d++) sum += x[d] * y[d];
    return sum + sum_of(sums);
}

/* whether all numbers of a row are finite: 0 times others is NaN */
INLINE int is_finite(const real *x, i64 size)
{
    vec sums = all(0);
    real sum = 0;
    i64 d = 0;
    for (; d + LANES <= size; d += LANES) sums += load(x + d) * 0;
    for (; d < size; d++) sum += x[d] * 0;
    return sum + sum_of(sums) == 0;
}

/* n numbers, of which there are too few for the function that the library of C has for it */
INLINE void copy(real *to, const real *from, i64 n)
{
    i64 i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) to[i] = from[i];
}

/* LANES rows of LANES numbers become columns: in log2(LANES) rounds, halves, quarters ... change places. */
#define OF_FIRST(lane, half) ((lane) & (half) ? (lane) + LANES - (half) : (lane)) /* of both rows, one after the other */
#define OF_SECOND(lane, half) (OF_FIRST(lane, half) + (half))
#define CHANGE_PLACES(x, i, half)                                                            \
    if (!((i) & (half))) {                                                                   \
        vec one = x[i], other = x[(i) + (half)];                                             \
        x[i] = __builtin_shufflevector(one, other, EACH_LANE(OF_FIRST, half));               \
        x[(i) + (half)] = __builtin_shufflevector(one, other, EACH_LANE(OF_SECOND, half));   \
    }

INLINE void transpose(vec x[LANES])
{
    UNROLL
    for (int i = 0; i < LANES; i++) CHANGE_PLACES(x, i, 1)
#if LANES > 2
    UNROLL
    for (int i = 0; i < LANES; i++) CHANGE_PLACES(x, i, 2)
#endif
#if LANES > 4
    UNROLL
    for (int i = 0; i < LANES; i++) CHANGE_PLACES(x, i, 4)
#endif
#if LANES > 8
    UNROLL
    for (int i = 0; i < LANES; i++) CHANGE_PLACES(x, i, 8)
#endif
}

/* `rows` of `size` numbers, a multiple of LANES of them, side by side: out[number][UNIT] */
static void to_columns(const real *const *rows, int count, i64 size, real *out)
{
    for (int c = 0; c < count; c += LANES) {
        i64 d = 0;
        for (; d + LANES <= size; d += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) x[i] = load(rows[c + i] + d);
            transpose(x);
            for (int i = 0; i < LANES; i++) store(out + (d + i) * UNIT + c, x[i]);
        }
        for (; d < size; d++)
            for (int i = 0; i < LANES; i++) memcpy(out + d * UNIT + c + i, rows[c + i] + d, sizeof(real));
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

/* Asks for a line of memory that is soon read: processors do so themselves only along a few rows at a time. Of keys that
   no cache holds, few queries take two thirds of the time with it. Row "17 queries, 32 texts" of features.py. */
INLINE void fetch(const void *at) { __builtin_prefetch(at, 0); }
INLINE void fetch_row(const char *row, i64 bytes)
{
    for (i64 byte = 0; byte < bytes; byte += 64) fetch(row + byte);
}
#define ROWS_AHEAD 16  /* rows of keys or values that are fetched early where some are read at a time ... */
#define STEPS_AHEAD 32 /* ... and where they are read one after another */

/* Arm's processors multiply by any lane of a vector, but to load a number into all lanes takes them a vector operation, too,
   as a product does (LD1R in LLVM's model of Neoverse N2): there, numbers of the left factor that lie side by side are
   read as vectors. */
#ifndef BY_LANE /* the tests choose it on other processors, too */
#ifdef __ARM_NEON
#define BY_LANE 1
#else
#define BY_LANE 0
#endif
#endif
#define IS_1(apart) (__builtin_constant_p(apart) && (apart) == 1)
#define STEPS_AT_ONCE 4 /* the most: lanes of NEON */

/* sum[r][c] += left[r * row + k * step] right[k][c], for so many steps k: where a row lies is found once for all of them */
INLINE void steps_of(
    const int n, const int wide, const int steps, const real *left, i64 row, i64 step, const real *right, i64 right_row,
    vec sum[][2])
{
    vec x[STEPS_AT_ONCE][2];
    UNROLL
    for (int k = 0; k < steps; k++)
        for (int c = 0; c < wide; c++) x[k][c] = load(right + k * right_row + c * LANES);
    UNROLL
    for (int r = 0; r < n; r++)
        UNROLL
        for (int k = 0; k < steps; k++) {
            real number = left[r * row + k * step];
            if (BY_LANE && IS_1(step) && steps == LANES) number = load(left + r * row)[k];
            if (BY_LANE && IS_1(row) && n % LANES == 0) number = load(left + k * step + r / LANES * LANES)[r % LANES];
            for (int c = 0; c < wide; c++) sum[r][c] += number * x[k][c];
        }
}

/* out[r][c] (+)= sum_k left[r * row + k * step] right[k][c], for n rows and `wide` vectors of columns; there: of the left
   factor, rows from the first on or, if it adds, steps. What is fetched early is among them: for each address beyond all
   memory, some processors look for the page anew. */
INLINE void block(
    const int n, const int wide, const real *left, i64 row, i64 step, i64 there, const real *right, i64 right_row,
    i64 depth, real *out, i64 out_row, const int add)
{
    const int side = n > 8 ? 16 : 8; /* numbers of a line that are read while another is fetched */
    /* 1: where 16 registers hold 12 sums, two vectors and a number */
    const int steps = BY_LANE && IS_1(step) ? LANES : wide == 2 && LEFT < 8 ? 1 : 2;
    const real *line = left + most(0, least(ROWS_AHEAD, there - side)) * row, *ahead = line;
    const i64 next = there >= side ? row : 0;
    i64 k = 0;
    vec sum[2 * LEFT][2];
    UNROLL
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) sum[r][c] = all(0);
    for (; k + steps <= depth; k += steps) {
        UNROLL
        for (int s = 0; s < steps; s++)
            if (!add)
                fetch(ahead), ahead += next;
            else if (row == 1)
                fetch(left + least(k + s + STEPS_AHEAD, there - 1) * step);
        if ((k + steps) % side == 0) ahead = line += side; /* of `side` rows in as many steps */
        steps_of(n, wide, steps, left + k * step, row, step, right + k * right_row, right_row, sum);
    }
    for (; steps > 1 && k < depth; k++)
        steps_of(n, wide, 1, left + k * step, row, step, right + k * right_row, right_row, sum);
    UNROLL
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) {
            real *at = out + r * out_row + c * LANES;
            store(at, add ? load(at) + sum[r][c] : sum[r][c]); /* added once: a long sum would round every number */
        }
}

INLINE void blocks(
    i64 n, const int wide, const real *left, i64 row, i64 step, i64 there, const real *right, i64 right_row,
    i64 depth, real *out, i64 out_row, const int add)
{
    i64 r = 0;
#define BLOCK(rows)                                                                                              \
    block(rows, wide, left + r * row, row, step, add ? there : there - r, right, right_row, depth, out + r * out_row, \
          out_row, add)
    for (; wide == 1 && r + 2 * LEFT <= n; r += 2 * LEFT) BLOCK(2 * LEFT); /* as many sums as of two vectors */
    for (; r + LEFT <= n; r += LEFT) BLOCK(LEFT);
    if (!add && r < n && n >= LEFT) { /* with some rows once more: few sums take as long as so many */
        i64 rest = n - r;
        if (rest > LEFT / 2) {
            r = n - LEFT;
            BLOCK(LEFT);
        } else {
            r = n - LEFT / 2;
            BLOCK(LEFT / 2);
        }
        return;
    }
    for (; r + 2 <= n; r += 2) BLOCK(2);
    for (; r < n; r++) BLOCK(1);
#undef BLOCK
}

/* (1) and (3): rows of keys or values, of which there are so many, times what lies side by side for a unit */
static void rows_times(i64 n, const real *left, i64 row, i64 there, const real *right, i64 depth, int wide, real *out)
{
    if (wide == 2)
        blocks(n, 2, left, row, 1, there, right, UNIT, depth, out, UNIT, 0);
    else
        blocks(n, 1, left, row, 1, there, right, UNIT, depth, out, UNIT, 0);
}

/* (2) and (4): features of keys or values times numbers of all scores */
static void features_times(
    i64 n, const real *left, i64 row, i64 there, const real *right, i64 depth, int wide, real *out)
{
    if (wide == 2)
        blocks(n, 2, left, 1, row, there, right, UNIT, depth, out, UNIT, 1);
    else
        blocks(n, 1, left, 1, row, there, right, UNIT, depth, out, UNIT, 1);
}

/* (5): numbers of all scores, of which rows lie so far apart, times rows of queries or gradients, `padded` features each */
static void scores_times(
    i64 n, const real *left, i64 row, const real *right, i64 padded, i64 depth, real *out, i64 out_row)
{
    i64 c = 0;
    for (; c + UNIT <= padded; c += UNIT)
        blocks(n, 2, left, row, 1, depth, right + c, padded, depth, out + c, out_row, 1);
    if (c < padded) blocks(n, 1, left, row, 1, depth, right + c, padded, depth, out + c, out_row, 1);
}

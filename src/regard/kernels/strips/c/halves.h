/* Products of bfloat16 numbers as they are, with sums in float32, on processors that have instructions for them.

   PAIRS  AVX512-BF16, and BFDOT of Arm's processors, multiply two numbers by two others in the time of one product, and
          add both. The left factor is read where it is; the right one has two features of a query in the place of one
          number.
   TILES  AMX multiplies 16 rows of 32 numbers by 32 rows of 16, in the time of 16 products of vectors. The left factor
          is read where it is, 16 rows at a time; the right one has pairs of rows in the place of one, as above. Where
          features are no multiple of 32, rows are copied, with 0 beyond the last one.

   Weights and their gradients, which are float32, are split in two for tiles: into the first 8 significant bits of each,
   and the bfloat16 number next to what these leave, together 16 significant bits. Both are multiplied. */

#pragma once

#include "vectors.h"

enum products { PLAIN, PAIRS, TILES };

#define TILE 16          /* rows of a tile; and numbers in a row of sums */
#define DEEP (2 * TILE)  /* bfloat16 numbers in a row of a left factor */
#define SPARE DEEP       /* numbers, 0, that are read beyond the last key of a column */
#define FIRST_BITS 0xffff0000u /* of a number in float32: those that bfloat16 has */

#if defined(__AVX512F__) && !defined(FLOAT64)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define WITH_PAIRS __attribute__((target("avx512bf16")))
#define WITH_TILES __attribute__((target("avx512bf16,amx-tile,amx-bf16")))
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(FLOAT64)
#include <arm_neon.h>
#define WITH_PAIRS
#endif

/* --- pairs ------------------------------------------------------------------------------------------------------- */

#ifdef WITH_PAIRS
#if defined(__AVX512F__)
#define PAIRS_AT_ONCE 1
static inline WITH_PAIRS __attribute__((always_inline)) void add_pairs(
    const int n, const int wide, const int pairs, const uint16_t *left, i64 row, const real *right, vec sum[][2])
{
    __m512bh x[2];
    (void)pairs;
    for (int c = 0; c < wide; c++) x[c] = (__m512bh)load(right + c * LANES);
    UNROLL
    for (int r = 0; r < n; r++) {
        int32_t pair;
        memcpy(&pair, left + r * row, sizeof pair);
        __m512i repeated = _mm512_set1_epi32(pair);
#if defined(__clang__) /* Clang 16 does not come to an end with repeated numbers that become others */
        __asm__("" : "+v"(repeated));
#endif
        __m512bh of_row = (__m512bh)repeated;
        for (int c = 0; c < wide; c++) sum[r][c] = (vec)_mm512_dpbf16_ps((__m512)sum[r][c], x[c], of_row);
    }
}
#else
#define PAIRS_AT_ONCE 4
#define ADD_PAIR(k)                                                                                                    \
    for (int c = 0; c < wide && (k) < pairs; c++)                                                                      \
        sum[r][c] = (vec)vbfdotq_laneq_f32((float32x4_t)sum[r][c], (bfloat16x8_t)x[k][c], (bfloat16x8_t)of_row, k);
INLINE void add_pairs(
    const int n, const int wide, const int pairs, const uint16_t *left, i64 row, const real *right, vec sum[][2])
{
    vec x[PAIRS_AT_ONCE][2];
    UNROLL
    for (int k = 0; k < pairs; k++)
        for (int c = 0; c < wide; c++) x[k][c] = load(right + k * UNIT + c * LANES);
    UNROLL
    for (int r = 0; r < n; r++) {
        vec of_row = all(0);
        memcpy(&of_row, left + r * row, pairs * 2 * sizeof *left);
        ADD_PAIR(0)
        ADD_PAIR(1)
        ADD_PAIR(2)
        ADD_PAIR(3)
    }
}
#endif

static inline WITH_PAIRS __attribute__((always_inline)) void block_of_pairs(
    const int n, const int wide, const uint16_t *left, i64 row, const real *right, i64 pairs, real factor, real *out)
{
    vec sum[LEFT][2];
    i64 k = 0;
    UNROLL
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) sum[r][c] = all(0);
    for (; k + PAIRS_AT_ONCE <= pairs; k += PAIRS_AT_ONCE)
        add_pairs(n, wide, PAIRS_AT_ONCE, left + 2 * k, row, right + k * UNIT, sum);
    for (; k < pairs; k++) add_pairs(n, wide, 1, left + 2 * k, row, right + k * UNIT, sum);
    UNROLL
    for (int r = 0; r < n; r++)
        for (int c = 0; c < wide; c++) store(out + r * UNIT + c * LANES, sum[r][c] * factor);
}

static inline WITH_PAIRS __attribute__((always_inline)) void blocks_of_pairs(
    i64 n, const int wide, const uint16_t *left, i64 row, const real *right, i64 pairs, real factor, real *out)
{
    i64 r = 0;
    for (; r + LEFT <= n; r += LEFT)
        block_of_pairs(LEFT, wide, left + r * row, row, right, pairs, factor, out + r * UNIT);
    for (; r + 2 <= n; r += 2) block_of_pairs(2, wide, left + r * row, row, right, pairs, factor, out + r * UNIT);
    for (; r < n; r++) block_of_pairs(1, wide, left + r * row, row, right, pairs, factor, out + r * UNIT);
}

/* (1) and (3) of bfloat16, times a factor */
static WITH_PAIRS void pairs_times(
    i64 n, const uint16_t *left, i64 row, const real *right, i64 depth, int wide, real factor, real *out)
{
    if (wide == 2)
        blocks_of_pairs(n, 2, left, row, right, depth / 2, factor, out);
    else
        blocks_of_pairs(n, 1, left, row, right, depth / 2, factor, out);
}
#endif

/* --- tiles ------------------------------------------------------------------------------------------------------- */

#ifdef WITH_TILES

/* Written out, since compilers move the stores of what a tile is to load behind their own functions for it. */
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, apart) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((i64)(apart)) : "memory")
#define TILE_STORE(t, to, apart) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((i64)(apart)) : "memory")
#define TILE_MULTIPLY(sum, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sum ::)

/* A factor in memory: how many bytes its rows lie apart, and what is multiplied next. */
struct factor {
    const void *at;
    i64 row, next;
};

/* out (+)= left times right, of `tall` tiles of rows and `wide` of columns; `steps`: how often a tile of each is
   multiplied; low: where the second part of what was split begins in the right factor, in bytes; 0: nothing is split */
static inline WITH_TILES __attribute__((always_inline)) void block_of_tiles(
    const int tall, const int wide, struct factor left, struct factor right, i64 low, i64 steps, real *out,
    i64 out_row, const int add)
{
    i64 apart = out_row * sizeof(real);
    real *below = out + TILE * out_row;
    if (add) {
        TILE_LOAD(0, out, apart);
        if (wide == 2) TILE_LOAD(1, out + TILE, apart);
        if (tall == 2) TILE_LOAD(2, below, apart);
        if (tall == 2 && wide == 2) TILE_LOAD(3, below + TILE, apart);
    } else {
        TILE_ZERO(0);
        if (wide == 2) TILE_ZERO(1);
        if (tall == 2) TILE_ZERO(2);
        if (tall == 2 && wide == 2) TILE_ZERO(3);
    }
    for (i64 k = 0; k < steps; k++) {
        const char *a = (const char *)left.at + k * left.next, *b = (const char *)right.at + k * right.next;
        TILE_LOAD(4, a, left.row);
        if (tall == 2) TILE_LOAD(5, a + TILE * left.row, left.row);
        for (int part = 0; part < (low ? 2 : 1); part++, b += low) {
            TILE_LOAD(6, b, right.row);
            if (wide == 2) TILE_LOAD(7, b + TILE * sizeof(real), right.row);
            TILE_MULTIPLY(0, 4, 6);
            if (wide == 2) TILE_MULTIPLY(1, 4, 7);
            if (tall == 2) TILE_MULTIPLY(2, 5, 6);
            if (tall == 2 && wide == 2) TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, out, apart);
    if (wide == 2) TILE_STORE(1, out + TILE, apart);
    if (tall == 2) TILE_STORE(2, below, apart);
    if (tall == 2 && wide == 2) TILE_STORE(3, below + TILE, apart);
}

/* the same of n rows, a multiple of TILE */
static inline WITH_TILES __attribute__((always_inline)) void blocks_of_tiles(
    i64 n, const int wide, struct factor left, struct factor right, i64 low, i64 steps, real *out, i64 out_row,
    const int add)
{
    for (; n >= 2 * TILE; n -= 2 * TILE, out += 2 * TILE * out_row) {
        block_of_tiles(2, wide, left, right, low, steps, out, out_row, add);
        left.at = (const char *)left.at + 2 * TILE * left.row;
    }
    if (n) block_of_tiles(1, wide, left, right, low, steps, out, out_row, add);
}

/* the same products by what there is */
static WITH_TILES void halves_times(
    enum products by, i64 n, const uint16_t *left, i64 row, const real *right, i64 depth, int wide, real factor,
    real *out)
{
    i64 whole = by == TILES ? n / TILE * TILE : 0;
    if (whole) {
        struct factor a = {left, row * sizeof *left, DEEP * sizeof *left};
        struct factor b = {right, UNIT * sizeof(real), TILE * UNIT * sizeof(real)};
        if (wide == 2)
            blocks_of_tiles(whole, 2, a, b, 0, depth / DEEP, out, UNIT, 0);
        else
            blocks_of_tiles(whole, 1, a, b, 0, depth / DEEP, out, UNIT, 0);
        for (i64 j = 0; factor != 1 && j < whole; j++)
            for (int w = 0; w < wide * LANES; w += LANES)
                store(out + j * UNIT + w, load(out + j * UNIT + w) * factor);
    }
    pairs_times(n - whole, left + whole * row, row, right, depth, wide, factor, out + whole * UNIT);
}

/* two rows of 16 numbers: of each pair, the first takes the lower half */
INLINE vec paired(const uint16_t *one, const uint16_t *other)
{
    bits low = {0}, high = {0};
    if (one) low = __builtin_convertvector(*(const loose_halves *)one, bits);
    if (other) high = __builtin_convertvector(*(const loose_halves *)other, bits);
    return (vec)(low | high << 16);
}

/* Rows of keys or values become columns, which (2) and (4) by tiles read: out[feature][...], `apart` numbers each, of n
   keys and then 0. */
static void to_half_columns(i64 n, const uint16_t *from, i64 row, i64 size, uint16_t *out, i64 apart)
{
    for (i64 j = 0; j < n + SPARE; j += DEEP)
        for (i64 d = 0; d < size; d += TILE) {
            vec x[LANES];
            for (i64 i = 0, k = j; i < LANES; i++, k += 2)
                x[i] = paired(k < n ? from + k * row + d : NULL, k + 1 < n ? from + (k + 1) * row + d : NULL);
            transpose(x);
            for (i64 i = 0; i < LANES; i++) store((real *)(out + (d + i) * apart + j), x[i]);
        }
}

/* Rows of queries or gradients, of which NULL is 0, in pairs, which (5) by tiles reads: out[pair][size], of the rows with
   these lanes of both vectors of a unit. */
static void to_half_pairs(const uint16_t *const *rows, i64 size, real *out)
{
    for (i64 i = 0; i < LANES; i++, out += size)
        for (i64 d = 0; d < size; d += TILE)
            store(out + d, paired(rows[i] ? rows[i] + d : NULL, rows[i + LANES] ? rows[i + LANES] + d : NULL));
}

/* Two vectors are split: pairs of their first bits, and of the bfloat16 numbers next to what these leave. */
INLINE void split(vec one, vec other, real *first, real *rest)
{
    store(first, (vec)((bits)one >> 16 | ((bits)other & FIRST_BITS)));
    one -= (vec)((bits)one & FIRST_BITS), other -= (vec)((bits)other & FIRST_BITS);
    bits half = (bits){0} + 0x8000;
    store(rest, (vec)(((bits)one + half) >> 16 | (((bits)other + half) & FIRST_BITS)));
}

/* rows of 0, up to a multiple of DEEP */
INLINE void fill_up(i64 n, int wide, real *scores)
{
    for (i64 j = round_up(n, 2); j < round_up(n, DEEP); j++)
        for (int w = 0; w < wide * LANES; w += LANES) store(scores + j * UNIT + w, all(0));
}

/* Numbers of scores [n][UNIT] are split where they are, into pairs of keys, in two rows. */
static void split_keys(i64 n, int wide, real *scores)
{
    for (i64 j = 0; j < n; j += 2)
        for (int w = 0; w < wide * LANES; w += LANES) {
            real *at = scores + j * UNIT + w;
            split(load(at), j + 1 < n ? load(at + UNIT) : all(0), at, at + UNIT);
        }
    fill_up(n, wide, scores);
}

/* Scores [n][UNIT], times a factor, become weights, relative to `most`, which are added up and split. */
INLINE void split_weights(i64 n, const int wide, real *scores, real factor, const vec most[2], vec sum[2])
{
    for (i64 j = 0; j < n; j += 2)
        for (int w = 0; w < wide; w++) {
            real *at = scores + j * UNIT + w * LANES;
            vec one = exp2_of(load(at) * factor - most[w]), other = all(0);
            if (j + 1 < n) other = exp2_of(load(at + UNIT) * factor - most[w]);
            sum[w] += one + other;
            split(one, other, at, at + UNIT);
        }
    fill_up(n, wide, scores);
}

/* (2) and (4): columns of keys or values times scores of n keys that are split; `size` features */
static WITH_TILES void columns_times(
    i64 size, const uint16_t *left, i64 apart, const real *right, i64 n, int wide, real *out)
{
    struct factor a = {left, apart * sizeof *left, DEEP * sizeof *left};
    struct factor b = {right, 2 * UNIT * sizeof(real), DEEP * UNIT * sizeof(real)};
    i64 low = UNIT * sizeof(real), steps = (n + DEEP - 1) / DEEP;
    if (wide == 2)
        blocks_of_tiles(size, 2, a, b, low, steps, out, UNIT, 1);
    else
        blocks_of_tiles(size, 1, a, b, low, steps, out, UNIT, 1);
}

/* (5): scores [n][UNIT] of `rows` queries, which are those from place `from` of a unit on, times a factor, times all
   rows of the unit in pairs; n and size are multiples of TILE */
static WITH_TILES void split_times(
    i64 n, i64 rows, i64 from, const real *left, real factor, real *room, const real *right, i64 size, real *out,
    i64 out_row)
{
    for (i64 j = 0; j < n; j++) {
        vec x[2] = {all(0), all(0)};
        for (i64 i = 0; i < rows; i += LANES)
            x[(from + i) / LANES] = pick(each_lane() < (whole)(rows - i), load(left + j * UNIT + i) * factor, all(0));
        split(x[0], x[1], room + j * UNIT, room + j * UNIT + LANES);
    }
    struct factor a = {room, UNIT * sizeof(real), LANES * sizeof(real)};
    struct factor b = {right, size * sizeof(real), 0};
    i64 c = 0;
    for (; c + UNIT <= size; c += UNIT, b.at = right + c) blocks_of_tiles(n, 2, a, b, 0, 2, out + c, out_row, 1);
    if (c < size) blocks_of_tiles(n, 1, a, b, 0, 2, out + c, out_row, 1);
}

/* --- what there is ----------------------------------------------------------------------------------------------- */

/* What the tiles of a thread were set to, and are set to again afterwards. */
struct tiles {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static WITH_TILES void set_tiles(const struct tiles *to) { __asm__ volatile("ldtilecfg %0" ::"m"(*to)); }

static WITH_TILES void begin_tiles(struct tiles *before)
{
    struct tiles ours = {.palette = 1};
    for (int t = 0; t < 8; t++) ours.bytes_of_row[t] = TILE * sizeof(real), ours.rows[t] = TILE;
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
    set_tiles(&ours);
}

/* Linux lets a process use tiles when it asks for them. The processor is asked by number: Clang 15 knows no name. */
static int has_tiles(void)
{
    const unsigned both = 1u << 24 /* AMX-TILE */ | 1u << 22 /* AMX-BF16 */;
    const long ask = 0x1023 /* ARCH_REQ_XCOMP_PERM */, tiles = 18 /* XFEATURE_XTILEDATA */;
    unsigned a, b, c, features = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &features) && (features & both) == both &&
           syscall(SYS_arch_prctl, ask, tiles) == 0;
}

static enum products best_products(void)
{
    if (!__builtin_cpu_supports("avx512bf16")) return PLAIN;
    return has_tiles() ? TILES : PAIRS;
}
#else
struct tiles {
    int none;
};

static void halves_times(
    enum products by, i64 n, const uint16_t *left, i64 row, const real *right, i64 depth, int wide, real factor,
    real *out)
{
#ifdef WITH_PAIRS
    if (by == PAIRS) pairs_times(n, left, row, right, depth, wide, factor, out);
#else
    (void)by, (void)n, (void)left, (void)row, (void)right, (void)depth, (void)wide, (void)factor, (void)out;
#endif
}
static void to_half_columns(i64 n, const uint16_t *from, i64 row, i64 size, uint16_t *out, i64 apart)
{
    (void)n, (void)from, (void)row, (void)size, (void)out, (void)apart;
}
static void to_half_pairs(const uint16_t *const *rows, i64 size, real *out) { (void)rows, (void)size, (void)out; }
static void split_keys(i64 n, int wide, real *scores) { (void)n, (void)wide, (void)scores; }
static void split_weights(i64 n, int wide, real *scores, real factor, const vec most[2], vec sum[2])
{
    (void)n, (void)wide, (void)scores, (void)factor, (void)most, (void)sum;
}
static void columns_times(i64 size, const uint16_t *left, i64 apart, const real *right, i64 n, int wide, real *out)
{
    (void)size, (void)left, (void)apart, (void)right, (void)n, (void)wide, (void)out;
}
static void split_times(
    i64 n, i64 rows, i64 from, const real *left, real factor, real *room, const real *right, i64 size, real *out,
    i64 out_row)
{
    (void)n, (void)rows, (void)from, (void)left, (void)factor, (void)room, (void)right, (void)size, (void)out;
    (void)out_row;
}
static void set_tiles(const struct tiles *to) { (void)to; }
static void begin_tiles(struct tiles *before) { (void)before; }
#ifdef WITH_PAIRS /* compiled for processors that have them */
static enum products best_products(void) { return PAIRS; }
#else
static enum products best_products(void) { return PLAIN; }
#endif
#endif

/* Attention over the strips of a mask, forward and backward, on the vector units of a CPU.

   The scores of some queries with some keys are computed, used and forgotten before the next ones, as in flash
   attention (Dao et al. 2022). Queries lie side by side in vectors: scores are held as [key][query], so that

       scores[key][query]     = sum_d  key[key][d]      queryT[d][query]          (1)
       outputT[e][query]     += sum_j  value[j][e]      weights[j][query]         (2)
       dweights[key][query]   = sum_e  value[key][e]    doutputT[e][query]        (3)
       dqueryT[d][query]     += sum_j  key[j][d]        dscores[j][query]         (4)
       dvalue[key][e]        += sum_i  weights[key][i]  doutput[i][e]             (5)
       dkey[key][d]          += sum_i  dscores[key][i]  query[i][d]

   are all one loop, `block` of vectors.h: numbers of the left factor, read where they are, times vectors of the right
   one. Keys and values are neither copied nor transposed, and the softmax adds up and compares whole vectors.

   Scores are in units of log 2: weights = exp2(score - max). Whatever hides a key adds -inf. A query that sees no key
   gets 0, and lse -inf. Nothing here allocates beyond a piece of memory for each thread.

   vectors.h has the products, call.h the interface, scores.h what scores are. */

#include <pthread.h>
#include <stdlib.h>

#include "scores.h"

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
    real factor = query_factor(c);
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
    real *query_rows = part_of(&memory, units * D_padded * UNIT);
    real *grad_rows = part_of(&memory, units * E_padded * UNIT);
    real *grad_query = part_of(&memory, units * D * UNIT);
    real *lse = part_of(&memory, units * UNIT), *delta = part_of(&memory, units * UNIT);
    real *scores = part_of(&memory, KEYS_BACKWARD * UNIT), *grads = part_of(&memory, KEYS_BACKWARD * UNIT);
    real *slope = part_of(&memory, KEYS_BACKWARD * UNIT), *dropped = part_of(&memory, KEYS_BACKWARD * UNIT);
    real *key_room = part_of(&memory, KEYS_BACKWARD * D), *value_room = part_of(&memory, KEYS_BACKWARD * E);
    real *seen_key = part_of(&memory, KEYS_BACKWARD * D), *seen_value = part_of(&memory, KEYS_BACKWARD * E);
    real factor = query_factor(c);
    for (i64 u = 0; u < units; u++) {
        side_by_side(
            p, &c->query, u, D, factor, query + u * D * UNIT, query_rows + u * D_padded * UNIT, D_padded, c->scale);
        side_by_side(p, &c->grad_output, u, E, 1, grad + u * E * UNIT, grad_rows + u * E_padded * UNIT, E_padded, 1);
        for (i64 r = u * UNIT; r < least(p->rows, (u + 1) * UNIT); r++) {
            i64 at = (p->batch * c->heads + p->head[r]) * c->query_len + p->query[r];
            const struct tensor *output = c->exact.data ? &c->exact : &c->output;
            real row[E];
            i64 from = place_in(output, p->batch, p->head[r], p->query[r]);
            widen(output->data, from, E, c->exact.data ? OWN : c->dtype, row);
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
                i64 key_step = s->step * c->grad_key.row, value_step = s->step * c->grad_value.row;
                scores_times(m, kept, grad_rows + u * E_padded * UNIT, E_padded, rows, to_value, value_step);
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
                scores_times(m, grads, query_rows + u * D_padded * UNIT, D_padded, rows, to_key, key_step);
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

/* --- all places of a call ---------------------------------------------------------------------------------------- */

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

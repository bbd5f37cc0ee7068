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
   one. Keys and values are not transposed, and copied only where they lie apart or are of another dtype. The softmax
   adds up and compares whole vectors. Products are of float32 or float64 numbers; of bfloat16 ones where the processor has
   instructions for that: see halves.h.

   Scores are in units of log 2: weights = exp2(score - max). Whatever hides a key adds -inf. A query that sees no key
   gets 0, and lse -inf. Nothing here allocates beyond a piece of memory for each thread.

   vectors.h and halves.h have the products, call.h the interface, again.h that for passes like earlier ones, repeated.h
   for whole calls of Python's, scores.h what scores are, forward.h, few.h, backward.h and statistics.h what is computed
   of them, for some queries; here all queries of a call are given out to threads. */

#include <pthread.h>
#include <stdlib.h>

#include "backward.h"
#include "few.h"
#include "repeated.h"
#include "statistics.h"

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
        /* Some of it is fetched early and never used: in pages that are not there yet, some processors look for them
           each time, and products of bfloat16 numbers take up to six times as long. */
        memset(m->numbers, 0, numbers * sizeof(real));
    }
    return m->numbers;
}

/* --- who computes what -------------------------------------------------------------------------------------------- */

/* Those of the OpenMP that torch uses: runs a function by so many threads, and which of them this is. NULL: not there. */
static void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);

/* The next of so many items: of those that are this thread's, side by side, as torch's own operators deal them out, so
   what these wrote lies in this core's cache; or, if none are left, of another's. -1: none are left. */
static i64 take(struct call *c, i64 items)
{
    i64 own = thread_number && c->threads > 1 ? thread_number() : 0;
    for (i64 n = 0; n < c->threads; n++) {
        i64 of = (own + n) % c->threads, first = of * items / c->threads, stop = (of + 1) * items / c->threads;
        if (__atomic_load_n(&c->share[of].taken, __ATOMIC_RELAXED) >= stop - first) continue;
        i64 item = first + __atomic_fetch_add(&c->share[of].taken, 1, __ATOMIC_RELAXED);
        if (item < stop) return item;
    }
    return -1;
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

/* The last queries of a strip, if a unit of them would be nearly empty: they have a place of their own, where keys lie side
   by side. Row "17 queries, 32 texts" of features.py. */
INLINE i64 rest_of(const struct call *c, const struct strip *s)
{
    i64 rows = rows_in(c, s), rest = rows % UNIT;
    return c->products == PLAIN && rows > UNIT && rest <= FEW / 2 ? rest : 0;
}

INLINE i64 blocks_of(const struct call *c, const struct strip *s)
{
    i64 rest = rest_of(c, s);
    return (rows_in(c, s) - rest + c->units * UNIT - 1) / (c->units * UNIT) + (rest > 0);
}

/* The keys that the queries of a place see, by the call. */
static void find_keys(struct place *p)
{
    const struct call *c = p->call;
    for (i64 v = 0; v * LANES < round_up(p->rows, UNIT); v++) {
        p->least_first[v] = p->most_first[v] = c->from_key;
        p->least_end[v] = p->most_end[v] = c->to_key;
        for (i64 r = v * LANES; c->first_key && r < (v + 1) * LANES; r++) {
            i64 at = p->batch * c->keys_batch + p->query[r] * c->keys_query;
            i64 first = p->first_key[r] = most(c->from_key, c->first_key[at]), begins = r % LANES == 0;
            i64 end = p->end_key[r] = least(c->to_key, c->end_key[at]);
            p->least_first[v] = begins ? first : least(p->least_first[v], first);
            p->most_first[v] = begins ? first : most(p->most_first[v], first);
            p->least_end[v] = begins ? end : least(p->least_end[v], end);
            p->most_end[v] = begins ? end : most(p->most_end[v], end);
        }
    }
}

/* before the places of another kv head, or of other keys */
static void forget_copies(struct place *p)
{
    const struct call *c = p->call;
    if (p->keys.rows) memset(p->keys.is_there + c->from_key, 0, c->to_key - c->from_key);
    if (p->values.rows) memset(p->values.is_there + c->from_key, 0, c->to_key - c->from_key);
}

/* head: a kv head if the strip is folded */
static void find_place(
    struct place *p, const struct call *c, const struct strip *s, i64 batch, i64 head, i64 time, i64 number)
{
    i64 group = c->heads / c->kv_heads, folded = is_folded(c, s), start = number * c->units * UNIT;
    i64 rows = rows_in(c, s), rest = rest_of(c, s);
    i64 batch_before = p->batch, head_before = p->kv_head;
    p->call = c, p->strip = s, p->batch = batch, p->time = time;
    p->kv_head = folded ? head : head / group;
    if (batch != batch_before || p->kv_head != head_before) forget_copies(p);
    p->rows = least(c->units * UNIT, rows - rest - start);
    if (p->rows <= 0) start = rows - rest, p->rows = rest;
    for (i64 r = 0; r < round_up(p->rows, UNIT); r++) {
        i64 row = start + least(r, p->rows - 1), index = folded ? row % s->count : row, v = r / LANES;
        p->head[r] = folded ? head * group + row / s->count : head;
        p->query[r] = s->start + time * s->shift + index * s->step;
        p->token[r] = c->query_order ? c->query_order[batch * c->query_order_batch + p->query[r]] : p->query[r];
        p->index[r] = index;
        p->lowest[v] = r % LANES ? least(p->lowest[v], index) : index;
        p->highest[v] = r % LANES ? most(p->highest[v], index) : index;
        p->first_query = r ? least(p->first_query, p->token[r]) : p->token[r];
        p->last_query = r ? most(p->last_query, p->token[r]) : p->token[r];
    }
    find_keys(p);
}

/* Most numbers of copies that a thread has, 8 MiB in float32. */
#define MOST_COPIED ((i64)1 << 21)

/* how many keys a thread computes at a time */
INLINE i64 keys_together(const struct call *c) { return c->piece ? c->piece : c->key_len; }

/* whether copies of keys and values are made for all places of a kv head, of which there are so many */
static i64 keeps_copies(const struct call *c, i64 places)
{
    return c->products == PLAIN && places > 1 && keys_together(c) * (c->head_dim + c->value_dim) <= MOST_COPIED;
}

static i64 copies_numbers(const struct call *c)
{
    i64 keys = keys_together(c);
    if (!c->keeps) return 0;
    return round_up(keys * c->head_dim, 16) + round_up(keys * c->value_dim, 16) + round_up(keys, 16);
}

/* tells a place of the memory for them */
static void take_copies(const struct call *c, struct place *p, real *memory)
{
    p->keys = p->values = (struct copies){0};
    p->batch = p->kv_head = -1;
    if (!c->keeps) return;
    i64 many = keys_together(c), from = c->from_key;
    real *keys = part_of(&memory, many * c->head_dim), *values = part_of(&memory, many * c->value_dim);
    uint8_t *is_there = (uint8_t *)memory - from;
    if (is_copied(c, &c->key, c->head_dim)) p->keys = (struct copies){keys - from * c->head_dim, is_there};
    if (is_copied(c, &c->value, c->value_dim))
        p->values = (struct copies){values - from * c->value_dim, is_there + many};
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

/* What a thread is set to, until we are done. */
struct state {
    unsigned tiny;
    struct tiles tiles;
};

static struct state begin_work(const struct call *c)
{
    struct state before = {.tiny = flush_tiny()};
    if (c->products == TILES) begin_tiles(&before.tiles);
    return before;
}

static void end_work(const struct call *c, struct state before)
{
    if (c->products == TILES) set_tiles(&before.tiles);
    restore_tiny(before.tiny);
}

INLINE i64 batches_of(const struct call *c, const struct strip *s) { return s->batch < 0 ? c->batches : 1; }

INLINE i64 heads_of(const struct call *c, const struct strip *s) { return is_folded(c, s) ? c->kv_heads : c->heads; }

static i64 items_of(const struct call *c, const struct strip *s)
{
    return blocks_of(c, s) * s->times * batches_of(c, s) * heads_of(c, s);
}

static i64 all_items(const struct call *c)
{
    i64 items = 0;
    for (i64 n = 0; n < c->strips; n++) items += items_of(c, c->strip + n);
    return items;
}

/* A strip, and how many items those before it have. */
struct at {
    const struct strip *strip;
    i64 before;
};

/* from where the last one was */
static void find_item(struct place *p, const struct call *c, struct at *at, i64 item)
{
    if (item < at->before) *at = (struct at){c->strip, 0}; /* of another thread's */
    while (item - at->before >= items_of(c, at->strip)) at->before += items_of(c, at->strip++);
    const struct strip *s = at->strip;
    p->item = item;
    item -= at->before;
    i64 blocks = blocks_of(c, s), heads = heads_of(c, s), from_end = item % blocks, time = item / blocks % s->times;
    i64 head = item / blocks / s->times % heads, batch = s->batch < 0 ? item / blocks / s->times / heads : s->batch;
    /* the longest rows of a causal square come first */
    find_place(p, c, s, batch, head, time, blocks - 1 - from_end);
}

static void forward_work(void *of_call)
{
    struct call *c = of_call, own = *c;
    i64 of_copies = copies_numbers(c), items = all_items(c), first = c->from_key, piece = keys_together(c);
    real *copies = memory_for(of_copies + forward_numbers(c)), *memory = copies + of_copies;
    struct state before_us = begin_work(c);
    struct at at = {c->strip, 0};
    struct place p = {.chunk = -1};
    for (i64 item; (item = take(c, items * c->chunks)) >= 0;) {
        i64 chunk = item / items;
        if (chunk != p.chunk) {
            own.from_key = first + chunk * piece, own.to_key = least(c->to_key, own.from_key + piece);
            take_copies(&own, &p, copies);
        }
        p.chunk = chunk;
        find_item(&p, &own, &at, item % items);
        if (p.rows <= FEW)
            few_place(&p, memory);
        else
            forward_place(&p, memory);
    }
    if (own.suspect) __atomic_store_n(&c->suspect, 1, __ATOMIC_RELAXED);
    end_work(c, before_us);
}

/* Outputs from what was computed of each piece of keys, whose weights are relative to its own largest score. */
static void join_work(void *of_call)
{
    struct call *c = of_call, whole = *c;
    struct at at = {c->strip, 0};
    struct place p = {.batch = -1};
    real row[c->value_dim];
    i64 items = all_items(c);
    whole.parts_of_rows = NULL;
    for (i64 item; (item = take(c, items)) >= 0;) {
        find_item(&p, &whole, &at, item);
        for (i64 r = 0; r < p.rows; r++) {
            real top = NONE, total = 0;
            memset(row, 0, sizeof row);
            for (i64 n = 0; n < c->chunks; n++) {
                const real *part = part_of_row(c, item, n, r);
                if (part[0] == NONE) continue;
                real now = part[0] > top ? part[0] : top, by = exp2(part[0] - now), of_before = exp2(top - now);
                for (i64 e = 0; e < c->value_dim; e++) row[e] = row[e] * of_before + part[2 + e] * by;
                total = total * of_before + part[1] * by, top = now;
            }
            write_row(&p, r, row, top, total);
        }
    }
    if (whole.suspect) __atomic_store_n(&c->suspect, 1, __ATOMIC_RELAXED);
}

/* leaves out the keys before and after those that any query sees by strips, and by the call */
static void leave_unseen_keys(struct call *c)
{
    i64 first = c->key_len, end = 0;
    for (const struct strip *s = c->strip; s < c->strip + c->strips; s++)
        for (const struct span *span = c->span + s->span; span < c->span + s->span + s->spans; span++) {
            i64 moved = span->start + (s->times - 1) * span->shift, far = (span->count - 1) * span->step + 1;
            if (!span->count) continue;
            first = least(first, least(span->start, moved)), end = most(end, most(span->start, moved) + far);
        }
    i64 first_of_call = c->key_len, end_of_call = 0;
    for (i64 n = 0; c->first_key && n < c->batches * c->query_len; n++) {
        i64 at = n / c->query_len * c->keys_batch + n % c->query_len * c->keys_query;
        first_of_call = least(first_of_call, c->first_key[at]), end_of_call = most(end_of_call, c->end_key[at]);
    }
    if (c->first_key) first = most(first, first_of_call), end = least(end, end_of_call);
    c->from_key = least(first, end), c->to_key = end;
}

/* Where places of few queries are fewer than threads: into how many pieces the keys that they see are cut, so that all
   threads have the same share. Row "20 queries, 1 head" of features.py. */
#define KEYS_OF_A_QUERY 4
#define LEAST_PIECE 256
static i64 pieces_of(struct call *c)
{
    if (c->query_len * KEYS_OF_A_QUERY > c->key_len) return 1;
    leave_unseen_keys(c);
    i64 items = all_items(c), pieces = 1, most_pieces = (c->to_key - c->from_key) / LEAST_PIECE;
    while (pieces < most_pieces && items * pieces % c->threads && items * pieces < 8 * c->threads) pieces++;
    return pieces;
}

typedef void compute(const struct place *, real *);

INLINE int sees_any(const struct place *p)
{
    struct keys k = {0};
    return next_keys(p, &k, KEYS);
}

/* The queries of a batch index and of some kv heads that are those of one of `chunks` threads, block by block: those of
   all heads that have something in common are computed one after another. If threads are given keys, all queries that see
   any of these. */
static void deal_to_one(
    const struct call *c, i64 batch, i64 kv_head, i64 kv_heads, i64 chunk, compute *of_place, real *copies, real *memory)
{
    i64 dealt = 0;
    struct place p = {.chunk = chunk};
    take_copies(c, &p, copies);
    for (const struct strip *s = c->strip; s < c->strip + c->strips; s++) {
        if (s->batch >= 0 && s->batch != batch) continue;
        i64 each = heads_of(c, s) / c->kv_heads, first = kv_head * each, blocks = blocks_of(c, s);
        for (i64 block = 0; block < s->times * blocks; block++, dealt++) {
            if (!c->piece && dealt % c->chunks != chunk) continue;
            if (dealt / (c->piece ? 1 : c->chunks) % c->parts != c->part) continue;
            for (i64 head = first; head < first + kv_heads * each; head++) {
                find_place(&p, c, s, batch, head, block / blocks, block % blocks);
                if (p.first_query > c->last_query || p.last_query < c->first_query) break;
                if (!c->piece || sees_any(&p)) of_place(&p, memory);
            }
        }
    }
}

/* A thread's own memory for the sums of some kv heads, if there is no other: rows of whole vectors, of which `finish_sums`
   makes gradients while they are in the cache. */
static i64 own_sums(const struct call *c, const struct tensor *sums, const struct tensor *grad, i64 size, i64 heads)
{
    return sums->data || !grad->data ? 0 : round_up(heads * keys_together(c) * round_up(size, LANES), 16);
}

/* tells of them, from one kv head and key on */
static void take_own(const struct call *c, struct tensor *sums, i64 size, real *memory, i64 kv_head)
{
    i64 row = round_up(size, LANES), head = keys_together(c) * row;
    *sums = (struct tensor){memory - kv_head * head - c->from_key * row, 0, head, row};
}

static void begin_queries(const struct call *c, i64 batch, i64 kv_head, i64 kv_heads, i64 chunk)
{
    i64 group = c->heads / c->kv_heads;
    for (i64 head = kv_head * group; head < (kv_head + kv_heads) * group; head++)
        for (i64 token = 0; token < c->query_len; token++) {
            real *of_query = (real *)c->sum_query.data + place_in(&c->sum_query, batch, head, token);
            memset(of_query + chunk * c->chunk_query, 0, c->head_dim * sizeof(real));
        }
}

static void begin_sums(const struct call *c, i64 batch, i64 kv_head, i64 chunk)
{
    for (i64 key = c->from_key; key < c->to_key; key++) {
        real *of_key = (real *)c->sum_key.data + place_in(&c->sum_key, batch, kv_head, key) + chunk * c->chunk_key;
        memset(of_key, 0, round_up(c->head_dim, LANES) * sizeof(real));
        real *of_value = (real *)c->sum_value.data + place_in(&c->sum_value, batch, kv_head, key);
        memset(of_value + chunk * c->chunk_value, 0, round_up(c->value_dim, LANES) * sizeof(real));
    }
}

/* where the gradient of a row goes, whose sums these are: those of keys are in the order of the tensors */
INLINE i64 place_of_sum(
    const struct call *c, const struct tensor *sums, const struct tensor *out, i64 batch, i64 head, i64 row)
{
    return place_in(out, batch, head, sums == &c->sum_query ? row : token_of_key(c, batch, row));
}

/* Writes the sum of what all threads added up for some rows. Those that are to be written are fetched early, unless they
   lie side by side. */
static void finish_sums(
    const struct call *c, const struct tensor *sums, i64 chunk, const struct tensor *out, i64 size, i64 batch, i64 head,
    i64 first, i64 stop)
{
    i64 bytes = bytes_of(c->dtype);
    for (i64 row = first; row < stop; row++) {
        i64 at = place_of_sum(c, sums, out, batch, head, row);
        i64 later = place_of_sum(c, sums, out, batch, head, least(row + ROWS_AHEAD, stop - 1));
        if (out->row != size) fetch_row((char *)out->data + later * bytes, size * bytes);
        const real *sum = (const real *)sums->data + place_in(sums, batch, head, row);
        i64 threads = chunk ? c->chunks : 1;
        real total[size];
        if (threads > 1) copy(total, sum, size);
        for (i64 n = 1; n < threads; n++)
            for (i64 d = 0; d < size; d++) total[d] += sum[n * chunk + d];
        narrow(out->data, at, size, c->dtype, threads > 1 ? total : sum);
    }
}

/* the same of a thread's own sums */
static void finish_own(
    const struct call *c, const struct tensor *sums, const struct tensor *out, i64 size, i64 batch, i64 kv_head,
    i64 kv_heads)
{
    for (i64 head = kv_head; head < kv_head + kv_heads; head++)
        finish_sums(c, sums, 0, out, size, batch, head, c->from_key, c->to_key);
}

/* Gives every query, or every piece of keys, to one of `chunks` threads, which adds up for its keys: the same for all heads
   of a kv head, and for all heads, or batch indices, that have numbers of a bias in common, so that no two threads add to
   the same. */
static void deal(struct call *c, compute *of_place, i64 numbers, int adds_up)
{
    i64 batches = c->batches_in_common ? 1 : c->batches, together = c->heads_in_common ? c->kv_heads : 1;
    i64 of_keys = adds_up ? own_sums(c, &c->sum_key, &c->grad_key, c->head_dim, together) : 0;
    i64 of_values = adds_up ? own_sums(c, &c->sum_value, &c->grad_value, c->value_dim, together) : 0;
    i64 of_sums = of_keys + of_values, of_copies = copies_numbers(c);
    real *memory = memory_for(of_sums + of_copies + numbers), *copies = memory + of_sums, *rest = copies + of_copies;
    struct state before_us = begin_work(c);
    struct call own = *c;
    /* Heads of a batch index may lie in the same pages of memory, which threads wait for each other to get: of many batch
       indices, each is one thread's, where it adds up in place. */
    i64 many = !c->grad_key.data && batches * c->chunks >= 16 * c->threads;
    i64 each = many || (c->piece && c->all_heads) ? c->kv_heads : together, owners = c->kv_heads / each;
    i64 apart = most(1, keys_together(c) * (c->piece ? c->chunks : 1)); /* what a thread computes at a time */
    for (i64 item; (item = take(c, batches * owners * c->chunks)) >= 0;) {
        i64 first = item / c->chunks % owners * each, batch = item / c->chunks / owners, stop = batch + 1;
        i64 chunk = item % c->chunks;
        if (c->batches_in_common) batch = c->first_batch, stop = c->last_batch + 1;
        for (; batch < stop; batch++) {
            if (c->piece && !c->goes_on) begin_queries(c, batch, first, each, chunk);
            for (i64 key = c->piece ? chunk * c->piece : 0; !key || key < c->key_len; key += apart) {
                own.from_key = key, own.to_key = least(c->key_len, key + keys_together(c));
                for (i64 n = first; n < first + each; n += together) {
                    if (of_keys) take_own(&own, &own.sum_key, c->head_dim, memory, n);
                    if (of_values) take_own(&own, &own.sum_value, c->value_dim, memory + of_keys, n);
                    for (i64 head = n; adds_up && !c->goes_on && head < n + together; head++)
                        begin_sums(&own, batch, head, chunk);
                    deal_to_one(&own, batch, n, together, chunk, of_place, copies, rest);
                    if (of_keys) finish_own(&own, &own.sum_key, &c->grad_key, c->head_dim, batch, n, together);
                    if (of_values) finish_own(&own, &own.sum_value, &c->grad_value, c->value_dim, batch, n, together);
                }
            }
        }
    }
    if (own.suspect) __atomic_store_n(&c->suspect, 1, __ATOMIC_RELAXED);
    end_work(c, before_us);
}

static void finish_work(void *of_call)
{
    struct call *c = of_call;
    i64 parts = (c->key_len + KEYS - 1) / KEYS, of_keys = c->batches * c->kv_heads * parts;
    for (i64 item; (item = take(c, of_keys + (c->sum_query.data ? c->batches * c->heads : 0))) >= 0;) {
        if (item >= of_keys) {
            i64 head = (item - of_keys) % c->heads, batch = (item - of_keys) / c->heads;
            if (c->grad_query.data)
                finish_sums(
                    c, &c->sum_query, c->chunk_query, &c->grad_query, c->head_dim, batch, head, 0, c->query_len);
            continue;
        }
        i64 first = item % parts * KEYS, head = item / parts % c->kv_heads, batch = item / parts / c->kv_heads;
        i64 stop = least(first + KEYS, c->key_len);
        /* a gradient that was added up where it belongs has no place, and one of a thread's own sums has no sums */
        if (c->grad_key.data && c->sum_key.data)
            finish_sums(c, &c->sum_key, c->chunk_key, &c->grad_key, c->head_dim, batch, head, first, stop);
        if (c->grad_value.data && c->sum_value.data)
            finish_sums(c, &c->sum_value, c->chunk_value, &c->grad_value, c->value_dim, batch, head, first, stop);
    }
}

/* The gradient of a sink, which is a key with value 0: -sum over batch indices and queries of weight * delta. */
static void sink_work(void *of_call)
{
    struct call *c = of_call;
    real room[c->value_dim], grad[c->value_dim];
    for (i64 head; (head = take(c, c->heads)) >= 0;) {
        double sum = 0;
        for (i64 n = 0; n < c->batches * c->query_len; n++) {
            i64 batch = n / c->query_len, token = n % c->query_len, at = (batch * c->heads + head) * c->query_len + token;
            if (c->lse[at] == NONE) continue;
            const real *output = exact_output(c, batch, head, token, room);
            widen(c->grad_output.data, place_in(&c->grad_output, batch, head, token), c->value_dim, c->dtype, grad);
            double delta = dot(output, grad, c->value_dim) - (c->grad_lse ? c->grad_lse[at] : 0);
            sum -= exp((double)c->sink[head] - c->lse[at]) * delta;
        }
        c->grad_sink[head] = sum;
    }
}

static void backward_of(const struct place *p, real *memory)
{
    if (p->rows <= FEW)
        few_backward_place(p, memory);
    else
        backward_place(p, memory);
}

static void backward_work(void *call)
{
    deal(call, backward_of, most(few_backward_numbers(call), backward_numbers(call)), 1);
}

static void note_work(void *call)
{
    deal(call, backward_of, most(few_backward_numbers(call), backward_numbers(call)), 0);
}

static void look_work(void *call) { deal(call, look_place, look_numbers(call), 0); }

static int best = -1; /* what products can be, of `enum products`; not found out yet */

API i64 regard_products(void)
{
    if (best < 0) best = best_products();
    return best;
}

/* Others that are there, too: which take the least time is measured. */
API void regard_set_products(i64 products) { best = products; }

/* by what the numbers of a call are multiplied */
static enum products products_of(const struct call *c)
{
    enum products by = c->dtype == BFLOAT16 ? regard_products() : PLAIN;
    return by == PAIRS && (c->head_dim | c->value_dim) % 2 ? PLAIN : by;
}

static void run(struct call *c, void (*work)(void *))
{
    struct share share[c->threads];
    memset(share, 0, sizeof share);
    c->share = share;
    if (in_parallel && c->threads > 1)
        in_parallel(work, c, c->threads, 0);
    else
        work(c);
}

API void regard_set_threads(void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int (*number)(void))
{
    in_parallel = parallel, thread_number = number;
}

API void regard_forward(struct call *c)
{
    i64 chunks = c->chunks;
    c->products = products_of(c);
    c->chunks = 1, c->piece = c->from_key = 0, c->to_key = c->key_len, c->parts_of_rows = NULL;
    c->units = c->products == TILES ? UNITS : UNITS_BY_LANES;
    i64 pieces = pieces_of(c);
    while (pieces == 1 && c->units > 1 && all_items(c) < 4 * c->threads) c->units /= 2; /* enough for all threads */
    if (pieces > 1) {
        i64 keys = c->to_key - c->from_key;
        c->piece = round_up((keys + pieces - 1) / pieces, UNIT);
        c->chunks = (keys + c->piece - 1) / c->piece;
        i64 rows = all_items(c) * c->chunks * c->units * UNIT;
        c->parts_of_rows = malloc(rows * (2 + c->value_dim) * sizeof(real));
        if (!c->parts_of_rows) abort();
    }
    c->keeps = keeps_copies(c, all_items(c) / (c->batches * c->kv_heads));
    run(c, forward_work);
    if (c->parts_of_rows) run(c, join_work);
    free(c->parts_of_rows), c->parts_of_rows = NULL;
    c->chunks = chunks;
}

/* enough blocks for all chunks */
static void divide(struct call *c)
{
    c->products = products_of(c);
    c->from_key = 0, c->to_key = c->key_len;
    i64 dealt, chunks = c->piece ? 1 : c->chunks;
    for (c->units = UNITS_BY_LANES;; c->units /= 2) {
        dealt = 0;
        for (i64 n = 0; n < c->strips; n++) dealt += blocks_of(c, c->strip + n) * c->strip[n].times;
        if (c->units == 1 || dealt >= 4 * chunks || chunks == 1) break;
    }
    i64 places = dealt / chunks * (c->heads / c->kv_heads);
    c->keeps = !c->heads_in_common && keeps_copies(c, places); /* otherwise those of all heads come in turns */
}

/* Whether the n-th query of a strip is another one in each batch index: if strips differ, or the order of tokens. */
static int differs_by_batch(const struct call *c, const struct strip *s)
{
    int differs = s->batch >= 0;
    for (const struct span *span = c->span + s->span; span < c->span + s->span + s->spans; span++)
        for (i64 t = span->tile; t < span->tile + span->tiles; t++)
            differs |= c->tile[t].by_place && c->query_order_batch != 0;
    return differs;
}

/* If keys come in pieces, and lse does not tell the weights of any query: finds the softmax of all keys first. */
static void find_all_softmax(struct call *c)
{
    i64 piece = c->piece, rows = c->batches * c->heads * c->query_len, far = 0;
    c->softmax = NULL;
    for (i64 n = 0; piece && n < rows; n++) far |= is_far_lse(c, c->lse[n]);
    if (!far) return;
    c->softmax = malloc(2 * rows * sizeof(real));
    if (!c->softmax) abort();
    c->notes = 1, c->piece = 0;
    divide(c);
    run(c, note_work);
    c->notes = 0, c->piece = piece;
}

API void regard_backward(struct call *c)
{
    find_all_softmax(c);
    divide(c);
    i64 apart = 0; /* batch indices of which threads would add to the same numbers, at once */
    for (i64 n = 0; n < c->strips && c->batches_in_common && c->chunks > 1; n++)
        apart |= differs_by_batch(c, c->strip + n);
    for (i64 batch = 0; batch < (apart ? c->batches : 1); batch++) {
        c->first_batch = batch, c->last_batch = apart ? batch : c->batches - 1;
        run(c, backward_work);
    }
    if (c->grad_sink && !c->goes_on) run(c, sink_work);
    free(c->softmax), c->softmax = NULL;
}

API void regard_finish(struct call *c) { run(c, finish_work); }

API void regard_look(struct call *c)
{
    c->piece = 0;
    divide(c);
    run(c, look_work);
}

/* A random number for dropout: `_random` of dropout.py. */
INLINE int32_t random_of(i64 i, i64 seed)
{
    uint64_t low = seed & 0xFFFFFFFF, high = (uint64_t)seed >> 32;
    uint32_t x = ((uint64_t)i ^ low) * 0x2545F491 + ((uint64_t)i >> 32) * 0x85EBCA6B + high * 0x9E3779B9;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    x ^= x >> 16;
    return x ^ x >> 16;
}

/* Those of all rows, and after them of all keys: of each pair the same. */
API void regard_random(int32_t *numbers, i64 rows, i64 keys, i64 seed, i64 of_columns)
{
    for (i64 i = 0; i < rows; i++) numbers[i] = random_of(i, seed);
    for (i64 j = 0; j < keys; j++) numbers[rows + j] = random_of(j / 2, of_columns);
}

/* the place of the first True of some bools, of which any byte but 0 is one; n if there is none */
static i64 first_true(const uint8_t *cells, i64 n)
{
    i64 at = 0;
    for (uint64_t eight; at + 8 <= n; at += 8) {
        memcpy(&eight, cells + at, 8);
        if (eight) break;
    }
    while (at < n && !cells[at]) at++;
    return at;
}

/* Which keys the queries of a mask [rows][keys] see, of which rows lie so far apart: the first, and the one after the
   last; returns whether those of every query lie side by side. */
API i64 regard_keys(const uint8_t *cells, i64 rows, i64 keys, i64 apart, int32_t *first_key, int32_t *end_key)
{
    i64 all = 1;
    for (i64 row = 0; row < rows; row++) {
        const uint8_t *begin = cells + row * apart;
        i64 first = first_true(begin, keys), end = keys;
        const uint8_t *hidden = first < keys ? memchr(begin + first, 0, keys - first) : NULL;
        if (hidden && first_true(hidden, begin + keys - hidden) == begin + keys - hidden)
            end = hidden - begin;
        else if (hidden)
            for (all = 0; !begin[end - 1]; end--) continue;
        first_key[row] = first, end_key[row] = end;
    }
    return all;
}

/* The words of a `mask` [matrices][rows / 32, rounded up][keys], of cells [matrices][rows][keys] so far apart. */
API void regard_bits(
    const uint8_t *cells, i64 matrices, i64 rows, i64 keys, i64 matrix_apart, i64 row_apart, uint32_t *words)
{
    i64 of_matrix = (rows + QUERIES_OF_A_WORD - 1) / QUERIES_OF_A_WORD * keys;
    memset(words, 0, matrices * of_matrix * sizeof *words);
    for (i64 m = 0; m < matrices; m++)
        for (i64 row = 0; row < rows; row++) {
            const uint8_t *of_row = cells + m * matrix_apart + row * row_apart;
            uint32_t *to = words + m * of_matrix + row / QUERIES_OF_A_WORD * keys;
            uint32_t bit = (uint32_t)1 << row % QUERIES_OF_A_WORD;
            for (i64 j = 0; j < keys; j++) to[j] |= of_row[j] ? bit : 0;
        }
}

API i64 regard_lanes(void) { return LANES; }
API i64 regard_size_of_structures(void)
{
    return sizeof(struct call) + sizeof(struct strip) + sizeof(struct span) + sizeof(struct tile) +
           sizeof(struct gradient) + sizeof(struct statistic) + sizeof(struct again) + sizeof(struct one) +
           sizeof(struct step) + sizeof(struct noted) + sizeof(struct repeated) + sizeof(struct term) +
           sizeof(struct python);
}

/* The scores of some queries with some keys: reading both, what is added to scores and its gradients, and dropout. */

#pragma once

#include "call.h"

/* numbers of a dtype in our own */
INLINE void widen(const void *from, i64 at, i64 count, i64 dtype, real *to)
{
    if (dtype == OWN)
        copy(to, (const real *)from + at, count);
    else if (dtype == BFLOAT16) {
        const uint16_t *numbers = (const uint16_t *)from + at;
        i64 i = 0;
        for (; i + LANES <= count; i += LANES)
            store(to + i, load_bfloat16(numbers + i));
        for (; i < count; i++) {
            uint32_t x = (uint32_t)numbers[i] << 16;
            float wide;
            memcpy(&wide, &x, sizeof x);
            to[i] = wide;
        }
    } else {
        const _Float16 *numbers = (const _Float16 *)from + at;
        i64 i = 0;
        for (; i + LANES <= count; i += LANES)
            store(to + i, load_float16(numbers + i));
        for (; i < count; i++) to[i] = numbers[i];
    }
}

static void narrow(void *to, i64 at, i64 count, i64 dtype, const real *from)
{
    if (dtype == OWN)
        copy((real *)to + at, from, count);
    else if (dtype == BFLOAT16)
        for (i64 i = 0; i < count; i++) { /* to nearest, even */
            float wide = from[i];
            uint32_t x;
            memcpy(&x, &wide, sizeof x);
            ((uint16_t *)to)[at + i] = wide != wide ? 0x7fc0 : (x + 0x7fff + ((x >> 16) & 1)) >> 16;
        }
    else {
        _Float16 *numbers = (_Float16 *)to + at;
        i64 i = 0;
        for (; i + LANES <= count; i += LANES)
            store_float16(numbers + i, load(from + i));
        for (; i < count; i++) numbers[i] = (_Float16)from[i];
    }
}

/* numbers of a dtype, from a place on */
INLINE vec vector_at(const void *numbers, i64 at, const int dtype)
{
    if (dtype == OWN) return load((const real *)numbers + at);
    if (dtype == FLOAT16) return load_float16((const _Float16 *)numbers + at);
    return load_bfloat16((const uint16_t *)numbers + at);
}

/* at most n of them, and 0 beyond */
INLINE vec some_at(const void *numbers, i64 at, i64 n, const int dtype)
{
    if (dtype == OWN) return load_some((const real *)numbers + at, n);
    if (n >= LANES) return vector_at(numbers, at, dtype);
    real some[LANES] = {0};
    widen(numbers, at, n, dtype, some);
    return load(some);
}

INLINE real number_at(const void *numbers, i64 at, const int dtype)
{
    real x;
    widen(numbers, at, 1, dtype, &x);
    return x;
}

/* Keys, or values, that lie elsewhere than where they are multiplied: copied when a place first reads them, for all places
   of a kv head that a thread computes one after another. rows: NULL if none are kept. */
struct copies {
    real *rows;
    uint8_t *is_there; /* of each key */
};

/* Some queries of a strip with one kv head: those of one head, or, where they are few, of all that share it. */
struct place {
    const struct call *call;
    const struct strip *strip;
    struct copies keys, values;
    i64 batch, kv_head, time, chunk, rows, item;
    i64 head[UNITS * UNIT];       /* of the call */
    int32_t query[UNITS * UNIT];  /* of the call */
    int32_t index[UNITS * UNIT];  /* of the strip */
    int32_t token[UNITS * UNIT];  /* of the tensors */
    int32_t lowest[2 * UNITS], highest[2 * UNITS]; /* of the indices of each vector */
    int32_t first_key[UNITS * UNIT], end_key[UNITS * UNIT]; /* of each query, if the call has them, and of a vector: */
    i64 least_first[2 * UNITS], most_first[2 * UNITS], least_end[2 * UNITS], most_end[2 * UNITS];
    i64 first_query, last_query;
};

INLINE i64 place_in(const struct tensor *t, i64 batch, i64 head, i64 row)
{
    return batch * t->batch + head * t->head + row * t->row;
}

/* a query of the place among all of the tensors: [batch, heads, query_len] */
INLINE i64 number_of(const struct place *p, i64 r)
{
    return (p->batch * p->call->heads + p->head[r]) * p->call->query_len + p->token[r];
}

/* where a key of the call lies in the tensors */
INLINE i64 token_of_key(const struct call *c, i64 batch, i64 key)
{
    return c->key_order ? c->key_order[batch * c->key_order_batch + key] : key;
}

/* key `first` of a span, among all of the call */
INLINE i64 key_of(const struct place *p, const struct span *s, i64 first)
{
    return s->start + p->time * s->shift + first * s->step;
}

/* How many features tiles multiply of so many that a call has, and how many they add to; what is beyond those of the call
   is 0. Rows "heads of 80 beside one another" and "heads of 72, causal" of features.py. */
INLINE i64 deep(const struct call *c, i64 size) { return c->products == TILES ? round_up(size, DEEP) : size; }
INLINE i64 tall(const struct call *c, i64 size) { return c->products == TILES ? round_up(size, TILE) : size; }

/* Rows of keys or values, so many numbers apart; there: from this one on, so many may be read. */
struct rows {
    const void *at;
    i64 apart, there, dtype;
};

/* where one of them begins */
INLINE i64 row_at(const struct place *p, const struct tensor *t, const struct span *s, i64 at)
{
    return place_in(t, p->batch, p->kv_head, token_of_key(p->call, p->batch, key_of(p, s, at)));
}

INLINE i64 bytes_of(const int dtype) { return dtype == OWN ? sizeof(real) : sizeof(uint16_t); }

INLINE const char *address(const void *numbers, i64 at, const int dtype)
{
    return (const char *)numbers + at * bytes_of(dtype);
}

/* Whether rows so far apart have the same few places in a cache, which are then too few for those of one tile, as the keys
   of 8 heads of 128 float32 numbers do where the heads of a token lie side by side. Row "16 heads of 128 beside one
   another, causal" of features.py. */
#define SAME_PLACES 4096
INLINE int crowd(i64 apart, i64 size, const i64 bytes) { return apart != size && apart * bytes % SAME_PLACES == 0; }

/* n of them, one after another, filled up to `filled` numbers each: in our dtype if they are widened, otherwise as they
   are. is_there: NULL, or of each whether it is there already. */
INLINE void gather(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, i64 filled,
    const int dtype, const int widened, void *to, uint8_t *is_there)
{
    const struct call *c = p->call; /* all that is needed of it is read once: for the compiler, `to` may be part of it */
    const i64 *order = c->key_order ? c->key_order + p->batch * c->key_order_batch : NULL;
    const char *rows = address(t->data, place_in(t, p->batch, p->kv_head, 0), dtype);
    const i64 key = key_of(p, s, first), step = s->step, last = s->count - 1 - first, apart = t->row;
    const i64 bytes = bytes_of(dtype), of_one = widened ? (i64)sizeof(real) : bytes;
#define ROW(i) (rows + (order ? order[key + (i) * step] : key + (i) * step) * apart * bytes)
    for (i64 i = 0; i < n; i++) {
        if (is_there && is_there[i]) continue;
        const char *row = ROW(i), *next = ROW(least(i + ROWS_AHEAD, last));
        char *to_row = (char *)to + i * filled * of_one;
        fetch_row(next, size * bytes);
        if (widened)
            widen(row, 0, size, dtype, (real *)to_row);
        else
            memcpy(to_row, row, size * bytes);
        if (filled > size) memset(to_row + size * of_one, 0, (filled - size) * of_one);
        if (is_there) is_there[i] = 1;
    }
#undef ROW
}

/* n of them as they are, filled up: where they lie, or in `room` */
INLINE struct rows rows_as_they_are(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, i64 filled,
    const int dtype, void *room)
{
    const i64 apart = s->step * t->row, in_order = !p->call->key_order && size == filled;
    if (in_order && !(p->rows > FEW && crowd(apart, size, bytes_of(dtype))))
        return (struct rows){address(t->data, row_at(p, t, s, first), dtype), apart, s->count - first, dtype};
    gather(p, t, s, first, n, size, filled, dtype, 0, room, NULL);
    return (struct rows){room, filled, n, dtype};
}

/* Whether keys, or values, are copied for all places of a kv head, in our dtype and one after another: one place takes
   longer to read them where they are. The same row, which took 1.5 times as long as with each head by itself. */
INLINE int is_copied(const struct call *c, const struct tensor *t, i64 size)
{
    return c->dtype != OWN || c->key_order || t->row != size;
}

INLINE const struct copies *copies_of(const struct place *p, const struct tensor *t)
{
    return t == &p->call->key ? &p->keys : &p->values;
}

/* n of them in our dtype: where they are, or in `room`, or among copies */
static struct rows rows_of(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, real *room)
{
    const struct call *c = p->call;
    const struct copies *copies = copies_of(p, t);
    i64 key = key_of(p, s, first), keeps = copies->rows && s->step == 1;
    if (!keeps && c->dtype == OWN) return rows_as_they_are(p, t, s, first, n, size, size, OWN, room);
    real *to = keeps ? copies->rows + key * size : room;
    uint8_t *is_there = keeps ? copies->is_there + key : NULL;
    if (c->dtype == OWN)
        gather(p, t, s, first, n, size, size, OWN, 1, to, is_there);
    else if (c->dtype == BFLOAT16)
        gather(p, t, s, first, n, size, size, BFLOAT16, 1, to, is_there);
    else
        gather(p, t, s, first, n, size, size, FLOAT16, 1, to, is_there);
    return (struct rows){to, size, keeps ? c->to_key - key : n, OWN};
}

/* the same for few queries, which widen what they multiply */
static struct rows rows_for_few(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, void *room)
{
    if (copies_of(p, t)->rows) return rows_of(p, t, s, first, n, size, room);
    return rows_as_they_are(p, t, s, first, n, size, size, p->call->dtype, room);
}

/* the same as the left factor of (1) and (3): deep(size) numbers each */
INLINE struct rows rows_to_multiply(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, real *room)
{
    if (p->call->products == PLAIN) return rows_of(p, t, s, first, n, size, room);
    return rows_as_they_are(p, t, s, first, n, size, deep(p->call, size), BFLOAT16, room);
}

/* from a later one on */
INLINE struct rows rows_from(struct rows rows, i64 from)
{
    return (struct rows){address(rows.at, from * rows.apart, rows.dtype), rows.apart, rows.there - from, rows.dtype};
}

/* (1) and (3): rows of `size` numbers times what lies side by side for a unit; and times a factor, unless that has it */
static void multiply(
    const struct call *c, i64 size, struct rows rows, const real *right, real factor, i64 n, int wide, real *out)
{
    if (c->products == PLAIN)
        rows_times(n, rows.at, rows.apart, rows.there, right, size, wide, out);
    else
        halves_times(c->products, n, rows.at, rows.apart, right, size, wide, factor, out);
}

/* The left factor of (2) and (4), where that of (1) and (3) is there: rows in our dtype, or for tiles tall(size) columns,
   of at most `most` at a time */
static struct rows rows_to_weigh(
    const struct place *p, const struct tensor *t, const struct span *s, i64 first, i64 n, i64 size, i64 most,
    struct rows rows, real *room)
{
    if (p->call->products == PLAIN) return rows;
    if (p->call->products == PAIRS) return rows_of(p, t, s, first, n, size, room);
    struct rows columns = {room, most + SPARE, 0, BFLOAT16};
    to_half_columns(n, rows.at, rows.apart, tall(p->call, size), (uint16_t *)room, columns.apart);
    return columns;
}

/* from a later key on */
INLINE struct rows weighed_from(const struct call *c, struct rows rows, i64 from)
{
    if (c->products != TILES) return rows_from(rows, from);
    return (struct rows){(const uint16_t *)rows.at + from, rows.apart, 0, BFLOAT16};
}

/* (2) and (4): adds them, times numbers of all scores, which are lost; split: whether they are, for tiles */
static void weigh(
    const struct call *c, i64 size, struct rows rows, real *scores, i64 n, int wide, int split, real *out)
{
    if (c->products == TILES) {
        if (!split) split_keys(n, wide, scores);
        columns_times(size, rows.at, rows.apart, scores, n, wide, out);
    } else
        features_times(size, rows.at, rows.apart, rows.there, scores, n, wide, out);
}

/* numbers of a thread's memory, for one purpose */
INLINE real *part_of(real **memory, i64 numbers)
{
    real *part = *memory;
    *memory += round_up(numbers, 16);
    return part;
}

INLINE void suspect(const struct place *p)
{
    __atomic_store_n((i64 *)&p->call->suspect, 1, __ATOMIC_RELAXED);
}

/* which of n keys any of some queries sees; by_key, by_query: how far scores lie apart */
INLINE void find_seen(i64 queries, i64 n, const real *scores, i64 by_key, i64 by_query, int8_t *is_seen)
{
    for (i64 j = 0; j < n; j++) {
        is_seen[j] = 0;
        for (i64 i = 0; i < queries; i++) is_seen[j] |= scores[j * by_key + i * by_query] != NONE;
    }
}

/* Rows of keys or values, as 0 if no query sees them: a weight of 0 times NaN would be NaN. */
static struct rows rows_if_seen(const int8_t *is_seen, i64 n, struct rows rows, i64 size, void *room)
{
    i64 bytes = bytes_of(rows.dtype);
    for (i64 j = 0; j < n; j++) {
        char *to = (char *)room + j * size * bytes;
        if (is_seen[j])
            memcpy(to, address(rows.at, j * rows.apart, rows.dtype), size * bytes);
        else
            memset(to, 0, size * bytes);
    }
    return (struct rows){room, size, n, rows.dtype};
}

/* the same of what `weigh` takes */
static struct rows weighed_if_seen(
    const struct call *c, const int8_t *is_seen, i64 n, struct rows rows, i64 size, void *room)
{
    if (c->products != TILES) return rows_if_seen(is_seen, n, rows, size, room);
    i64 apart = round_up(n, DEEP);
    for (i64 d = 0; d < size; d++) {
        const uint16_t *from = (const uint16_t *)rows.at + d * rows.apart;
        for (i64 j = 0; j < apart; j++) ((uint16_t *)room)[d * apart + j] = j < n && is_seen[j] ? from[j] : 0;
    }
    return (struct rows){room, apart, 0, BFLOAT16};
}

/* how many keys of a span come before a key of the call */
INLINE i64 keys_before(const struct place *p, const struct span *s, i64 key)
{
    i64 far = key - key_of(p, s, 0);
    return s->step == 1 ? far : far <= 0 ? 0 : (far + s->step - 1) / s->step;
}

/* the first key of a span that any query of a vector sees, and the one after the last */
INLINE i64 first_seen(const struct place *p, const struct span *s, i64 v)
{
    return most(0, most(p->lowest[v] + s->low, keys_before(p, s, p->least_first[v])));
}

INLINE i64 end_seen(const struct place *p, const struct span *s, i64 v)
{
    return least(s->count, least(p->highest[v] + s->high + 1, keys_before(p, s, p->most_end[v])));
}

INLINE struct mask mask_of(const struct tile *t)
{
    return (struct mask){t->numbers, t->batch, t->head, t->query, t->key};
}

/* where the words of a query's head are, and which bit is its own */
INLINE const int32_t *word_of(const struct place *p, const struct mask *m, i64 r, i64 query, int32_t *bit)
{
    *bit = (int32_t)((uint32_t)1 << query % QUERIES_OF_A_WORD);
    return m->words + p->batch * m->batch + p->head[r] * m->head + query / QUERIES_OF_A_WORD * m->query;
}

/* The words of a vector of queries from `row` on, and the bit of each; returns whether all have the same words. queries: by
   which these are; first: which of them is wanted. */
INLINE int find_words(
    const struct place *p, const struct mask *m, const int32_t *queries, i64 row, i64 first, const int32_t **word,
    int32_t *bit)
{
    int alike = 1;
    for (int i = 0; i < LANES; i++) {
        word[i] = word_of(p, m, row + i, queries[row + i], bit + i) + first;
        alike &= word[i] == word[0];
    }
    return alike;
}

/* Keys before and after those that any query of a vector sees by a mask are left out, if all have the same words. queries:
   by which these are; first: of the words of key 0 of the span, which are `apart` apart. */
static void leave_unseen(
    const struct place *p, const struct mask *m, const int32_t *queries, i64 v, i64 first, i64 apart, i64 *begin,
    i64 *end)
{
    const int32_t *word[LANES];
    int32_t bit[LANES], bits = 0;
    if (!find_words(p, m, queries, v * LANES, first, word, bit)) return;
    for (int i = 0; i < LANES; i++) bits |= bit[i];
    while (*begin < *end && !(word[0][*begin * apart] & bits)) ++*begin;
    while (*begin < *end && !(word[0][(*end - 1) * apart] & bits)) --*end;
}

/* The first of n keys from `first` on that any query of a vector sees, and the one after the last; equal if there is none.
   Rows "blocks at random, new in every call" and "function as mask" of features.py. */
static void seen_of_vector(const struct place *p, const struct span *s, i64 v, i64 first, i64 n, i64 *begin, i64 *end)
{
    const struct mask *seen = &p->call->seen;
    *begin = least(first + n, most(first, first_seen(p, s, v)));
    *end = most(*begin, least(first + n, end_seen(p, s, v)));
    if (seen->words) leave_unseen(p, seen, p->query, v, seen->key * key_of(p, s, 0), seen->key * s->step, begin, end);
    for (const struct tile *t = p->call->tile + s->tile; t < p->call->tile + s->tile + s->tiles; t++) {
        if (t->dtype != BITS) continue;
        struct mask mask = mask_of(t);
        leave_unseen(p, &mask, p->index, v, 0, t->key, begin, end);
    }
}

/* Some keys of a span: n of them from `first` on; and of each vector of a place, the first that any of its queries sees of
   them, and the one after the last. */
struct keys {
    const struct span *span;
    i64 first, n, stop, spans, begin[2 * UNITS], end[2 * UNITS];
};

/* The keys of a span that a place sees, without what hides some of them in between. */
static void begin_span(const struct place *p, struct keys *k, const struct span *s)
{
    k->span = s, k->first = s->count, k->stop = 0;
    for (i64 v = 0; v * LANES < p->rows; v++) {
        i64 first = first_seen(p, s, v), end = end_seen(p, s, v);
        if (first < end) k->first = least(k->first, first), k->stop = most(k->stop, end);
    }
}

/* The next keys of a place, of which at most so many come at a time; to begin with, all is 0. Those before and after what
   any query sees of them are left out: they are not even read. */
static int next_keys(const struct place *p, struct keys *k, i64 at_a_time)
{
    k->first += k->n, k->n = 0;
    while (!k->n) {
        while (k->first >= k->stop) {
            if (k->spans == p->strip->spans) return 0;
            begin_span(p, k, p->call->span + p->strip->span + k->spans++);
        }
        i64 n = least(at_a_time, k->stop - k->first), first = k->first + n, end = k->first;
        for (i64 v = 0; v * LANES < p->rows; v++) {
            seen_of_vector(p, k->span, v, k->first, n, k->begin + v, k->end + v);
            if (k->begin[v] < k->end[v]) first = least(first, k->begin[v]), end = most(end, k->end[v]);
        }
        k->first = first, k->n = most(0, end - first);
    }
    return 1;
}

/* Some queries of a unit, from `row` on, and n keys, `from` places after the first of some. */
struct part {
    i64 row, rows, from, n;
    int wide;
};

/* What is computed of a unit and some keys: of both vectors those keys that both see, and of each alone those that only it
   sees; returns the number of parts. */
static int parts_of(const struct place *p, const struct keys *k, i64 unit, struct part part[3])
{
    i64 row = unit * UNIT, rows = least(UNIT, p->rows - row), begin[2], end[2];
    for (int v = 0; v < 2; v++) {
        begin[v] = rows > v * LANES ? k->begin[2 * unit + v] : k->first;
        end[v] = rows > v * LANES ? k->end[2 * unit + v] : k->first;
    }
    i64 at[4] = {least(begin[0], begin[1]), most(begin[0], begin[1]), least(end[0], end[1]), most(end[0], end[1])};
    if (at[1] > at[2]) { /* no key is seen by both */
        i64 of_first = at[1];
        at[1] = at[2], at[2] = of_first;
    }
    int parts = 0;
    for (int i = 0; i < 3; i++) {
        int by_first = begin[0] <= at[i] && at[i + 1] <= end[0], by_second = begin[1] <= at[i] && at[i + 1] <= end[1];
        if (at[i] >= at[i + 1] || !(by_first || by_second)) continue;
        i64 rows_of = by_second ? rows - (by_first ? 0 : LANES) : least(rows, LANES);
        part[parts++] = (struct part){
            row + (by_first ? 0 : LANES), rows_of, at[i] - k->first, at[i + 1] - at[i], by_first && by_second ? 2 : 1};
    }
    return parts;
}

/* the place of a query by which a tile has its numbers */
INLINE i64 query_in(const struct place *p, const struct tile *t, i64 r)
{
    return t->by_place ? p->token[r] : p->index[r];
}

/* where the numbers of a query are among all of a tile */
INLINE i64 numbers_of(const struct place *p, const struct tile *t, i64 r)
{
    return p->batch * t->batch + p->head[r] * t->head + query_in(p, t, r) * t->query + p->time * t->time;
}

/* the place of a key */
INLINE i64 key_in(const struct place *p, const struct span *s, const struct tile *t, i64 at)
{
    return t->by_place ? token_of_key(p->call, p->batch, key_of(p, s, at)) : at;
}

/* where the numbers of a tile begin */
INLINE const void *numbers_in(const struct place *p, const struct tile *t)
{
    return t->gradient > 0 ? p->call->given[t->gradient - 1] + (i64)t->numbers : t->numbers;
}

/* Biases are fetched so many bytes after what is read of a row now, or for a later key: without that, a dense one takes
   1.3 times as long, and one whose heads lie side by side 1.5 times. Rows "bias, dense" of features.py. */
#define AHEAD 192
INLINE void fetch_to_write(const char *at) { __builtin_prefetch(at, 1); }

/* some of them that lie so far apart, as those of one head do where the numbers of all heads lie side by side */
INLINE vec numbers_apart(const void *numbers, i64 at, i64 apart, const int dtype)
{
    vec x = all(0);
    for (int i = 0; i < LANES; i++) {
        x[i] = number_at(numbers, at + i * apart, dtype);
        fetch(address(numbers, at + (i + LANES) * apart, dtype));
    }
    return x;
}

/* The same of up to so many that lie apart, by reading all that is between and picking out: in a fifth of the time. Row
   "bias, dense, heads innermost" of features.py. */
#define MOST_APART 16
#if defined(__AVX512BW__) && !defined(FLOAT64)
struct picks {
    __m512i place[MOST_APART / 2];   /* of each lane, in a pair of vectors */
    uint32_t is_here[MOST_APART / 2]; /* or in another one */
    uint32_t read[MOST_APART];       /* of a vector */
    i64 pairs;
};

INLINE int can_pick(i64 apart, const int dtype) { return apart > 1 && apart <= MOST_APART && dtype != FLOAT16; }

static void find_picks(struct picks *p, i64 apart, const int dtype)
{
    i64 wide = dtype == OWN ? LANES : 2 * LANES, all = (LANES - 1) * apart + 1;
    p->pairs = (all + 2 * wide - 1) / (2 * wide);
    for (i64 pair = 0; pair < p->pairs; pair++) {
        int32_t place[LANES];
        p->is_here[pair] = 0;
        for (i64 i = 0; i < LANES; i++) {
            i64 at = i * apart - pair * 2 * wide, here = at >= 0 && at < 2 * wide;
            place[i] = here ? dtype == OWN ? at : at << 16 : 0;
            if (here) p->is_here[pair] |= dtype == OWN ? (uint32_t)1 << i : (uint32_t)2 << 2 * i; /* the upper half */
        }
        p->place[pair] = _mm512_loadu_si512(place);
        for (i64 half = 0; half < 2; half++) {
            i64 left = most(0, least(wide, all - (2 * pair + half) * wide));
            p->read[2 * pair + half] = ((uint64_t)1 << left) - 1;
        }
    }
}

INLINE vec pick_apart(const struct picks *p, const void *numbers, i64 at, const int dtype)
{
    const char *from = address(numbers, at, dtype);
    __m512i found = _mm512_setzero_si512();
    for (i64 n = 0; n < p->pairs; n++, from += 128) {
        fetch(from + 128 * p->pairs), fetch(from + 128 * p->pairs + 64);
        if (dtype == OWN) {
            __m512i one = _mm512_maskz_loadu_epi32(p->read[2 * n], from);
            __m512i other = _mm512_maskz_loadu_epi32(p->read[2 * n + 1], from + 64);
            __m512i here = _mm512_maskz_permutex2var_epi32(p->is_here[n], one, p->place[n], other);
            found = _mm512_or_si512(found, here);
        } else {
            __m512i one = _mm512_maskz_loadu_epi16(p->read[2 * n], from);
            __m512i other = _mm512_maskz_loadu_epi16(p->read[2 * n + 1], from + 64);
            __m512i here = _mm512_maskz_permutex2var_epi16(p->is_here[n], one, p->place[n], other);
            found = _mm512_or_si512(found, here);
        }
    }
    return (vec)found;
}
#else
struct picks {
    i64 pairs;
};
INLINE int can_pick(i64 apart, const int dtype) { return apart < 0 && dtype < 0; } /* never */
INLINE void find_picks(struct picks *p, i64 apart, const int dtype) { p->pairs = 0, (void)apart, (void)dtype; }
INLINE vec pick_apart(const struct picks *p, const void *numbers, i64 at, const int dtype)
{
    return numbers_apart(numbers, at, p->pairs, dtype);
}
#endif

INLINE void hide(signed_bits where, real *score)
{
    store(score, pick(__builtin_convertvector(where, ints), all(NONE), load(score)));
}

/* Hides from a vector of queries those of n keys whose bits are 0. queries: by which the words are; first: of the keys'
   words, which are `apart` apart. */
static void hide_by_bits(
    const struct place *p, const struct mask *m, const int32_t *queries, i64 row, i64 first, i64 apart, i64 n,
    real *of_vector)
{
    const int32_t *word[LANES];
    int32_t bit[LANES] __attribute__((aligned(64)));
    int alike = find_words(p, m, queries, row, first, word, bit);
    signed_bits of_lanes = load_bits(bit);
    for (i64 j = 0; j < n; j++) {
        signed_bits found = (signed_bits){0} + word[0][j * apart];
        for (int i = 0; !alike && i < LANES; i++) found[i] = word[i][j * apart];
        hide((found & of_lanes) == 0, of_vector + j * UNIT);
    }
}

/* A natural number in units of log 2. What is finite does not hide, so that it stays finite: some masks are the least
   number there is. */
INLINE real in_log_2(real x)
{
    real y = x * LOG2_E;
    return x > NONE && y < LEAST ? LEAST : y;
}

/* adds natural numbers to a score times a factor; even to NaN */
INLINE void add(real *score, real factor, vec x)
{
    vec y = x * LOG2_E;
    store(score, pick(x == NONE, x, load(score) * factor + larger_of(all(LEAST), y)));
}

INLINE void add_tile_of(
    const struct place *p, const struct span *s, const struct tile *t, i64 row, i64 first, i64 n, int wide,
    real *scores, real factor, const int dtype)
{
    const void *numbers = numbers_in(p, t);
    i64 from[UNIT];
    int by_lane = t->query == 1, alike = 1, rows = wide * LANES;
    for (int i = 0; i < rows; i++) {
        i64 r = least(row + i, p->rows - 1);
        from[i] = numbers_of(p, t, r);
        alike &= from[i] == from[0];
        by_lane &= from[i] == from[0] + i || row + i >= p->rows;
    }
    by_lane &= row + rows - p->rows <= t->spare; /* nothing beyond the last number is read */
    i64 j = 0;
    if (by_lane || alike)
        for (; j < n; j++)
            for (int c = 0; c < rows; c += LANES) {
                i64 at = from[0] + key_in(p, s, t, first + j) * t->key;
                vec x = by_lane ? vector_at(numbers, at + c, dtype) : all(number_at(numbers, at, dtype));
                add(scores + j * UNIT + c, factor, x);
            }
#ifndef FLOAT64
    for (; dtype == BFLOAT16 && !t->by_place && t->key == 1 && j + 2 * LANES <= n; j += 2 * LANES) /* pairs of keys */
        for (int c = 0; c < rows; c += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) {
                const uint16_t *of_query = (const uint16_t *)numbers + from[c + i] + first + j;
                fetch((const char *)of_query + AHEAD);
                x[i] = load((const real *)of_query);
            }
            transpose(x);
            for (int i = 0; i < LANES; i++) {
                real *at = scores + (j + 2 * i) * UNIT + c;
                add(at, factor, (vec)((bits)x[i] << 16));
                add(at + UNIT, factor, (vec)((bits)x[i] & FIRST_BITS));
            }
        }
#endif
    struct picks picks;
    int picked = can_pick(t->key, dtype);
    if (picked) find_picks(&picks, t->key, dtype);
    for (; !t->by_place && j + LANES <= n; j += LANES)
        for (int c = 0; c < rows; c += LANES) {
            vec x[LANES];
            for (int i = 0; i < LANES; i++) {
                i64 at = from[c + i] + (first + j) * t->key;
                if (t->key == 1) fetch(address(numbers, at, dtype) + AHEAD);
                x[i] = t->key == 1 ? vector_at(numbers, at, dtype)
                       : picked    ? pick_apart(&picks, numbers, at, dtype)
                                   : numbers_apart(numbers, at, t->key, dtype);
            }
            transpose(x);
            for (int i = 0; i < LANES; i++) add(scores + (j + i) * UNIT + c, factor, x[i]);
        }
    for (; j < n; j++) {
        i64 of_key = key_in(p, s, t, first + j) * t->key;
        for (int c = 0; c < rows; c += LANES) {
            vec x = all(0);
            for (int i = 0; i < LANES; i++) x[i] = number_at(numbers, from[c + i] + of_key, dtype);
            add(scores + j * UNIT + c, factor, x);
        }
    }
}

/* Adds a tile to scores [n][UNIT], times a factor, of queries from `row` and keys from `first` on; returns what they are
   still to be multiplied by. */
static real add_tile(
    const struct place *p, const struct span *s, const struct tile *t, i64 row, i64 first, i64 n, int wide,
    real *scores, real factor)
{
    if (t->dtype == OWN)
        add_tile_of(p, s, t, row, first, n, wide, scores, factor, OWN);
    else if (t->dtype == BFLOAT16)
        add_tile_of(p, s, t, row, first, n, wide, scores, factor, BFLOAT16);
    else if (t->dtype == FLOAT16)
        add_tile_of(p, s, t, row, first, n, wide, scores, factor, FLOAT16);
    else {
        struct mask mask = mask_of(t);
        for (int w = 0; w < wide * LANES; w += LANES)
            hide_by_bits(p, &mask, p->index, row + w, first * t->key, t->key, n, scores + w);
        return factor;
    }
    return 1;
}

/* where the gradients of the numbers of a query begin */
INLINE real *gradients_of(const struct place *p, const struct tile *t, i64 r)
{
    const struct gradient *g = p->call->gradient + t->gradient;
    return g->numbers + p->chunk * g->chunk + p->batch * g->batch + p->head[r] * g->head + p->token[r] * g->query;
}

/* the place of a key by which they lie */
INLINE i64 gradient_key(const struct place *p, const struct span *s, i64 at)
{
    return token_of_key(p->call, p->batch, key_of(p, s, at));
}

/* adds gradients of scores to those of the numbers that were added to them */
static void pull_tile(
    const struct place *p, const struct span *s, const struct tile *t, i64 row, i64 first, i64 n, int wide,
    const real *grads)
{
    const struct gradient *g = p->call->gradient + t->gradient;
    i64 rows = least(p->rows - row, wide * LANES), at = key_of(p, s, first);
    i64 whole = p->call->key_order || s->step * g->key != 1 ? 0 : n / LANES * LANES;
    real *to[UNIT];
    int beside = 1; /* as the queries, so are their numbers */
    for (i64 i = 0; i < rows; i++) {
        to[i] = gradients_of(p, t, row + i);
        beside &= to[i] == to[0] + i;
    }
    for (i64 j = beside ? n : 0; j < whole; j += LANES)
        for (i64 c = 0; c < rows; c += LANES) {
            vec x[LANES];
            for (int k = 0; k < LANES; k++) x[k] = load(grads + (j + k) * UNIT + c);
            transpose(x);
            for (i64 i = c; i < least(c + LANES, rows); i++) {
                real *of_keys = to[i] + at + j;
                fetch_to_write((const char *)of_keys + AHEAD);
                store(of_keys, load(of_keys) + x[i - c]);
            }
        }
    for (i64 j = beside ? 0 : whole; j < n; j++) {
        i64 of_key = gradient_key(p, s, first + j) * g->key;
        if (beside)
            for (i64 i = 0; i < rows; i++) to[0][of_key + i] += grads[j * UNIT + i];
        else
            for (i64 i = 0; i < rows; i++) to[i][of_key] += grads[j * UNIT + i];
    }
}

/* what queries are multiplied by, so that products are in units of log 2, or what `scores_of` takes a tanh of */
INLINE real query_factor(const struct call *c)
{
    return c->softcap > 0 ? c->scale * 2 * LOG2_E / c->softcap : c->scale * LOG2_E;
}

/* c tanh(s / c), of which the score times a factor is 2 s / c; and its slope, if wanted */
INLINE void cap(const struct call *c, real factor, real *score, real *slope)
{
    vec tanh = 1 - 2 / (exp2_of(load(score) * factor) + 1);
    store(score, (real)c->softcap * LOG2_E * tanh);
    if (slope) store(slope, 1 - tanh * tanh);
}

/* Hides from a vector of queries what is beyond the keys of each. */
INLINE void hide_beyond(const struct place *p, const struct span *s, i64 row, i64 first, i64 n, real *of_vector)
{
    i64 v = row / LANES, at = key_of(p, s, first);
    for (i64 j = 0; j < n && at + j * s->step < p->most_first[v]; j++)
        hide(load_bits(p->first_key + row) > (int32_t)(at + j * s->step), of_vector + j * UNIT);
    for (i64 j = n - 1; j >= 0 && at + j * s->step >= p->least_end[v]; j--)
        hide(load_bits(p->end_key + row) <= (int32_t)(at + j * s->step), of_vector + j * UNIT);
}

/* Scores of queries from `row` on with n keys from `first` of a span on; slope: of the softcap, or NULL. Returns what they
   are still to be multiplied by, to be in units of log 2: whoever reads them next does that at no cost. */
static real scores_of(
    const struct place *p, const struct span *s, i64 row, i64 first, i64 n, int wide, struct rows key,
    const real *query, real *scores, real *slope)
{
    const struct call *c = p->call;
    real factor = c->products == PLAIN ? 1 : query_factor(c);
    int now = factor <= 0; /* infinity times 0 is NaN, and the largest score would be the least */
    multiply(c, deep(c, c->head_dim), key, query, now ? factor : 1, n, wide, scores);
    if (now) factor = 1;
    if (c->softcap > 0) {
        for (i64 j = 0; j < n; j++)
            for (int w = 0; w < wide * LANES; w += LANES)
                cap(c, factor, scores + j * UNIT + w, slope ? slope + j * UNIT + w : NULL);
        factor = 1;
    }
    for (i64 t = 0; t < s->tiles; t++)
        factor = add_tile(p, s, c->tile + s->tile + t, row, first, n, wide, scores, factor);
    for (int w = 0; w < wide; w++) {
        real *of_vector = scores + w * LANES;
        i64 v = row / LANES + w, after = most(0, p->lowest[v] + s->high + 1 - first);
        for (i64 j = least(n, p->highest[v] + s->low - first) - 1; j >= 0; j--) /* keys before those of some query */
            hide(load_bits(p->index + row + w * LANES) > (int32_t)(first + j - s->low), of_vector + j * UNIT);
        for (i64 j = after; j < n; j++)
            hide(load_bits(p->index + row + w * LANES) < (int32_t)(first + j - s->high), of_vector + j * UNIT);
        if (c->first_key) hide_beyond(p, s, row + w * LANES, first, n, of_vector);
        i64 of_key = c->seen.key * key_of(p, s, first);
        if (c->seen.words)
            hide_by_bits(p, &c->seen, p->query, row + w * LANES, of_key, c->seen.key * s->step, n, of_vector);
    }
    return factor;
}

/* 0 where dropout drops a weight, its factor where it keeps it; from the random numbers of rows, and of a key */
INLINE vec kept_of(const struct call *c, signed_bits rows, i64 key)
{
    bits h = (bits)(rows ^ c->column_bits[key]); /* the rest of MurmurHash3's finalizer; see dropout.py */
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    signed_bits half = c->column_odd[key] ? (signed_bits)h >> 16 : (signed_bits)(h << 16) >> 16;
    return pick(__builtin_convertvector(half < (int32_t)c->kept_least, ints), all(0), all((real)c->kept_factor));
}

/* where the random number of a key is */
INLINE i64 column_of_dropout(const struct place *p, const struct span *s, i64 at)
{
    return p->batch * p->call->column_batch + token_of_key(p->call, p->batch, key_of(p, s, at));
}

/* weights [n][UNIT], and y if given, are multiplied by that */
static void drop(const struct place *p, const struct span *s, i64 row, i64 first, i64 n, int wide, real *x, real *y)
{
    const struct call *c = p->call;
    int32_t rows[UNIT] __attribute__((aligned(64)));
    for (int i = 0; i < wide * LANES; i++) rows[i] = c->row_bits[number_of(p, least(row + i, p->rows - 1))];
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide * LANES; w += LANES) {
            vec kept = kept_of(c, load_bits(rows + w), column_of_dropout(p, s, first + j));
            store(x + j * UNIT + w, load(x + j * UNIT + w) * kept);
            if (y) store(y + j * UNIT + w, load(y + j * UNIT + w) * kept);
        }
}

/* where a query has its column, of what lies side by side for all units */
INLINE real *column_of(real *all_units, i64 row, i64 size)
{
    return all_units + row / UNIT * size * UNIT + row % UNIT;
}

/* A query, or the gradient of an output, in our dtype. */
static void read_row(const struct place *p, const struct tensor *t, i64 r, i64 size, real *row)
{
    widen(t->data, place_in(t, p->batch, p->head[r], p->token[r]), size, p->call->dtype, row);
    if (!is_finite(row, size)) suspect(p);
}

/* where a bfloat16 row is, of deep(size) numbers: in `room`, if it is filled up */
INLINE const uint16_t *deep_row(const struct place *p, const struct tensor *t, i64 r, i64 size, uint16_t *room)
{
    const uint16_t *row = (const uint16_t *)t->data + place_in(t, p->batch, p->head[r], p->token[r]);
    i64 filled = deep(p->call, size);
    if (filled == size) return row;
    memset(room + size, 0, (filled - size) * sizeof *row);
    return memcpy(room, row, size * sizeof *row);
}

/* Queries, or gradients of outputs, side by side: [feature][UNIT], times a factor, or pairs of deep(size) features as they
   are. */
static void side_by_side(
    const struct place *p, const struct tensor *t, i64 unit, i64 size, real factor, real *out)
{
    i64 dtype = p->call->dtype, is_plain = p->call->products == PLAIN, filled = deep(p->call, size);
    const real *from[UNIT];
    real room[dtype == OWN ? 1 : UNIT * filled];
    for (i64 i = 0; i < UNIT; i++) {
        i64 r = least(unit * UNIT + i, p->rows - 1), at = place_in(t, p->batch, p->head[r], p->token[r]);
        real *of_row = room + (dtype == OWN ? 0 : i * filled);
        if (is_plain && dtype != OWN) widen(t->data, at, size, dtype, of_row);
        from[i] = !is_plain      ? (const real *)deep_row(p, t, r, size, (uint16_t *)of_row)
                  : dtype == OWN ? (const real *)t->data + at
                                 : of_row;
    }
    to_columns(from, UNIT, is_plain ? size : filled / 2, out);
    for (i64 d = 0; is_plain && factor != 1 && d < size * UNIT; d++) out[d] *= factor;
}

/* The same one after another, of `padded` features; and in pairs of rows, without the factor, as tiles take them. */
static void one_after_another(
    const struct place *p, const struct tensor *t, i64 unit, i64 size, real factor, i64 padded, real *rows,
    real *pairs)
{
    const uint16_t *halves[UNIT] = {0};
    i64 n = least(UNIT, p->rows - unit * UNIT), filled = deep(p->call, size);
    uint16_t room[filled > size ? UNIT * filled : 1];
    if (n < UNIT || size < padded) memset(rows, 0, UNIT * padded * sizeof(real));
    for (i64 i = 0; i < n; i++) {
        i64 r = unit * UNIT + i;
        halves[i] = deep_row(p, t, r, size, room + (filled > size ? i * filled : 0));
        read_row(p, t, r, size, rows + i * padded);
        for (i64 d = 0; factor != 1 && d < size; d++) rows[i * padded + d] *= factor;
    }
    if (p->call->products == TILES) to_half_pairs(halves, padded, pairs);
}

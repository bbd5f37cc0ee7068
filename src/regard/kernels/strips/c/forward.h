/* The output and the log-sum-exp of some queries. */

#pragma once

#include "scores.h"

static i64 forward_numbers(const struct call *c)
{
    i64 D = deep(c, c->head_dim), E = deep(c, c->value_dim);
    return c->units * (D + E + 2) * UNIT + KEYS * (UNIT + D + 3 * E) + UNIT * E + 16 * 11;
}

/* whether some keys of the place come before these */
INLINE int is_later(const struct place *p) { return p->call->parts_of_rows && p->chunk > 0; }

/* The log-sum-exp of a query before the first key, in natural units: a sink is a key without value, and what was
   computed before is one with the output as its value. */
INLINE real lse_before(const struct place *p, i64 r, i64 goes_on)
{
    const struct call *c = p->call;
    if (is_later(p)) return NONE;
    if (goes_on) return c->lse[number_of(p, r)];
    return c->sink ? c->sink[p->head[r]] : NONE;
}

static void begin_softmax(const struct place *p, i64 units, real *top, real *total, i64 goes_on)
{
    for (i64 i = 0; i < units * UNIT; i++) {
        top[i] = in_log_2(lse_before(p, least(i, p->rows - 1), goes_on));
        total[i] = top[i] > NONE;
    }
}

/* where the output of a query is that was computed before */
INLINE const real *output_before(const struct place *p, i64 r)
{
    const struct tensor *output = p->call->exact.data ? &p->call->exact : &p->call->output;
    return (const real *)output->data + place_in(output, p->batch, p->head[r], p->token[r]);
}

/* Scores of a unit with n more keys, times a factor, become weights, relative to the largest score so far; that and the
   sum of weights are brought up to date. split: as tiles take them. by: what earlier weights are multiplied by; returns
   whether that is not 1 everywhere. */
INLINE int softmax_of(
    i64 n, const int wide, real *scores, real factor, int split, real *top, real *total, vec by[2])
{
    vec before[2], most[2], sum[2];
    for (int w = 0; w < wide; w++) most[w] = all(NONE);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            vec x = load(scores + j * UNIT + w * LANES);
            most[w] = larger_of(x, most[w]);
        }
    int grew = 0;
    for (int w = 0; w < wide; w++) {
        before[w] = load(top + w * LANES);
        most[w] = larger_of(most[w] * factor, before[w]);
        store(top + w * LANES, most[w]);
        most[w] = pick(most[w] == NONE, all(0), most[w]); /* -inf - -inf is NaN */
        by[w] = exp2_of(before[w] - most[w]);
        sum[w] = all(0);
        grew |= any_of((ints)(by[w] != 1));
    }
    if (split)
        split_weights(n, wide, scores, factor, most, sum);
    else
        for (i64 j = 0; j < n; j++)
            for (int w = 0; w < wide; w++) {
                vec weight = exp2_of(load(scores + j * UNIT + w * LANES) * factor - most[w]);
                sum[w] += weight;
                store(scores + j * UNIT + w * LANES, weight);
            }
    for (int w = 0; w < wide; w++) store(total + w * LANES, load(total + w * LANES) * by[w] + sum[w]);
    return grew;
}

static int softmax(i64 n, int wide, real *scores, real factor, int split, real *top, real *total, vec by[2])
{
    if (wide == 2) return softmax_of(n, 2, scores, factor, split, top, total, by);
    return softmax_of(n, 1, scores, factor, split, top, total, by);
}

/* The largest score of each query of a place, in units of log 2, and the sum of its weights relative to that: from a
   pass over its keys, of so many at a time. */
static void find_softmax(
    const struct place *p, real *query, i64 at_a_time, real *top, real *total, real *scores, real *key_room,
    i64 goes_on)
{
    const struct call *c = p->call;
    i64 D = deep(c, c->head_dim), units = (p->rows + UNIT - 1) / UNIT;
    begin_softmax(p, units, top, total, goes_on);
    for (struct keys k = {0}; next_keys(p, &k, at_a_time);) {
        struct rows key = rows_to_multiply(p, &c->key, k.span, k.first, k.n, c->head_dim, key_room);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, &k, u, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                struct rows of_key = rows_from(key, part[i].from);
                int wide = part[i].wide;
                real factor = scores_of(p, k.span, row, first, n, wide, of_key, column_of(query, row, D), scores, NULL);
                vec by[2];
                softmax(n, wide, scores, factor, 0, top + row, total + row, by);
            }
        }
    }
}

#define FAR_LSE 8192 /* beyond that, rounding it changes weights by a thousandth */

/* Whether the lse of a query tells its weights no longer, as where all that it sees has a bias of -1e9: then they are
   found anew, relative to the largest, as the output's were. */
INLINE int is_far_lse(const struct call *c, real lse)
{
    return !c->is_part && lse > NONE && (lse > FAR_LSE || lse < -FAR_LSE);
}

INLINE int is_far(const struct place *p, i64 r) { return is_far_lse(p->call, p->call->lse[number_of(p, r)]); }

INLINE int any_is_far(const struct place *p)
{
    for (i64 r = 0; r < p->rows; r++)
        if (is_far(p, r)) return 1;
    return 0;
}

INLINE real *noted_softmax(const struct place *p, i64 r) { return (real *)p->call->softmax + 2 * number_of(p, r); }

/* whether the softmax of a place was found before: if so, tells it */
static int was_found(const struct place *p, real *top, real *log_total)
{
    if (!p->call->softmax || p->call->notes) return 0;
    for (i64 r = 0; r < p->rows; r++) top[r] = noted_softmax(p, r)[0], log_total[r] = noted_softmax(p, r)[1];
    return 1;
}

static void note_softmax(const struct place *p, const real *top, const real *log_total)
{
    for (i64 r = 0; r < p->rows; r++) noted_softmax(p, r)[0] = top[r], noted_softmax(p, r)[1] = log_total[r];
}

/* The log-sum-exp of a query, in natural units; exactly that before where no key is seen. */
static real lse_of(const struct place *p, i64 r, real top, real total)
{
    real before = lse_before(p, r, p->call->goes_on);
    if (total == 1 && top == in_log_2(before)) return before;
    if (top == LEAST) return LEAST;
    return (top + log2((double)total)) * LN_2; /* rounded once: all weights of a query are times that error, backward */
}

/* The output of some queries so far, with n more keys. */
static void attend(
    const struct place *p, const struct span *s, i64 row, i64 first, i64 n, int wide, struct rows value, real *scores,
    real factor, real *top, real *total, real *output)
{
    const struct call *c = p->call;
    vec by[2];
    int split = c->products == TILES && !c->row_bits;
    int grew = softmax(n, wide, scores, factor, split, top, total, by);
    if (c->row_bits) drop(p, s, row, first, n, wide, scores, NULL);
    if (grew)
        for (i64 e = 0; e < c->value_dim; e++)
            for (int w = 0; w < wide; w++) {
                real *at = output + e * UNIT + w * LANES;
                store(at, load(at) * by[w]);
            }
    weigh(c, tall(c, c->value_dim), value, scores, n, wide, split, output);
}

/* what is kept of a query and a piece of keys: the largest score, the sum of weights, and weighted values */
INLINE real *part_of_row(const struct call *c, i64 item, i64 chunk, i64 r)
{
    i64 of_place = (item * c->chunks + chunk) * c->units * UNIT;
    return (real *)c->parts_of_rows + (of_place + r) * (2 + c->value_dim);
}

/* The output of a query, from weighted values and the sum of weights; and its lse. */
static void write_row(const struct place *p, i64 r, real *row, real top, real total)
{
    const struct call *c = p->call;
    i64 size = c->value_dim;
    if (c->parts_of_rows) {
        real *part = part_of_row(c, p->item, p->chunk, r);
        part[0] = top, part[1] = total;
        copy(part + 2, row, size);
        return;
    }
    real share = total == 0 ? 0 : 1 / total;
    for (i64 e = 0; e < size; e++) row[e] *= share;
    if (!is_finite(row, size) || total * 0 != 0) suspect(p);
    if (c->exact.data) narrow(c->exact.data, place_in(&c->exact, p->batch, p->head[r], p->token[r]), size, OWN, row);
    narrow(c->output.data, place_in(&c->output, p->batch, p->head[r], p->token[r]), size, c->dtype, row);
    if (c->lse) c->lse[number_of(p, r)] = lse_of(p, r, top, total);
}

/* The outputs of a unit before the first key, side by side. */
static void begin_outputs(const struct place *p, i64 unit, real *output)
{
    i64 size = p->call->value_dim, filled = tall(p->call, size);
    if (!p->call->goes_on || is_later(p)) {
        memset(output, 0, filled * UNIT * sizeof(real));
        return;
    }
    const real *from[UNIT];
    memset(output + size * UNIT, 0, (filled - size) * UNIT * sizeof(real));
    for (i64 i = 0; i < UNIT; i++) from[i] = output_before(p, least(unit * UNIT + i, p->rows - 1));
    to_columns(from, UNIT, size, output);
}

static void forward_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = deep(c, c->head_dim), E = tall(c, c->value_dim), units = (p->rows + UNIT - 1) / UNIT;
    real *query = part_of(&memory, units * D * UNIT), *output = part_of(&memory, units * E * UNIT);
    real *top = part_of(&memory, units * UNIT), *total = part_of(&memory, units * UNIT);
    real *scores = part_of(&memory, KEYS * UNIT);
    real *key_room = part_of(&memory, KEYS * D), *value_room = part_of(&memory, KEYS * deep(c, E));
    real *seen_room = part_of(&memory, KEYS * E), *weighed_room = part_of(&memory, KEYS * E);
    real *rows = part_of(&memory, UNIT * E);
    for (i64 u = 0; u < units; u++)
        side_by_side(p, &c->query, u, c->head_dim, query_factor(c), query + u * D * UNIT);
    begin_softmax(p, units, top, total, c->goes_on);
    for (i64 u = 0; u < units; u++) begin_outputs(p, u, output + u * E * UNIT);
    for (struct keys k = {0}; next_keys(p, &k, KEYS);) {
        struct rows key = rows_to_multiply(p, &c->key, k.span, k.first, k.n, c->head_dim, key_room);
        struct rows value = rows_to_multiply(p, &c->value, k.span, k.first, k.n, c->value_dim, value_room);
        value = rows_to_weigh(p, &c->value, k.span, k.first, k.n, c->value_dim, KEYS, value, weighed_room);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, &k, u, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                int wide = part[i].wide;
                struct rows of_key = rows_from(key, part[i].from), of_value = weighed_from(c, value, part[i].from);
                real *of_query = column_of(query, row, D);
                real factor = scores_of(p, k.span, row, first, n, wide, of_key, of_query, scores, NULL);
                if (c->careful) {
                    int8_t is_seen[KEYS];
                    find_seen(part[i].rows, n, scores, UNIT, 1, is_seen);
                    of_value = weighed_if_seen(c, is_seen, n, of_value, E, seen_room);
                }
                attend(
                    p, k.span, row, first, n, wide, of_value, scores, factor, top + row, total + row,
                    column_of(output, row, E));
            }
        }
    }
    for (i64 r = 0; r < p->rows; r++) {
        if (r % UNIT == 0) to_rows(output + r * E, E, rows);
        write_row(p, r, rows + r % UNIT * E, top[r], total[r]);
    }
}

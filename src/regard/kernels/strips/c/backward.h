/* The gradients of some queries, and what they add to those of keys, values and biases. */

#pragma once

#include "forward.h"

static i64 backward_numbers(const struct call *c)
{
    i64 D = deep(c, c->head_dim), E = deep(c, c->value_dim), wide = round_up(D, LANES) + round_up(E, LANES);
    i64 of_keys = (5 + 2 * c->units) * UNIT + 3 * D + 2 * E;
    return c->units * UNIT * (2 * D + E + wide + wide / 2 + 5) + KEYS_BACKWARD * of_keys + 16 * 27;
}

#define MOST_LEFT 24 /* in units of log 2: weights are at most 1, so that this leaves them far from infinity */

/* The output of a query as it was before it was rounded, if that is known; in `room`, unless it is read where it is. */
INLINE const real *exact_output(const struct call *c, i64 batch, i64 head, i64 token, real *room)
{
    const struct tensor *output = c->exact.data ? &c->exact : &c->output;
    i64 dtype = c->exact.data ? OWN : c->dtype, from = place_in(output, batch, head, token);
    if (dtype == OWN) return (const real *)output->data + from;
    widen(output->data, from, c->value_dim, dtype, room);
    return room;
}

/* Prepares a query: what is subtracted from its scores, in units of log 2, before they become weights, the gradient of
   its output, and delta = sum_j weight dweight, which is output times gradient. As score - lse is rounded where weights
   are small, and lse is, most of lse is left to a factor: returns that, by which gradient and delta are multiplied, and
   not the weights. An lse that is far is told already, in two numbers. */
static real begin_gradients(const struct place *p, i64 r, real *grad, real *lse, real *rest, real *delta)
{
    const struct call *c = p->call;
    i64 at = number_of(p, r);
    real room[c->value_dim], factor = 1;
    const real *row = exact_output(c, p->batch, p->head[r], p->token[r], room);
    if (!is_far(p, r)) {
        double exact = c->lse[at] == NONE ? 0 : fmax(c->lse[at] / LN_2, LEAST);
        double left = c->products == PLAIN ? rint(fmin(fmax(exact, 0), MOST_LEFT)) : 0;
        lse[r] = exact - left, rest[r] = 0;
        if (c->products == PLAIN) factor = exp2(fabs(exact) > FAR_LSE ? -left : lse[r] - exact);
    }
    delta[r] = (dot(row, grad, c->value_dim) - (c->grad_lse ? c->grad_lse[at] : 0)) * factor;
    for (i64 e = 0; factor != 1 && e < c->value_dim; e++) grad[e] *= factor;
    return factor;
}

/* where the gradient of a key, or value, is added up */
INLINE real *sum_row(const struct place *p, const struct tensor *t, i64 chunk, i64 key)
{
    return (real *)t->data + place_in(t, p->batch, p->kv_head, key) + p->chunk * chunk;
}

INLINE int wants_gradient(const struct call *c, const struct tile *t)
{
    return c->gradient && t->gradient >= 0 && c->gradient[t->gradient].numbers;
}

static void write_grad_query(const struct place *p, i64 r, const real *grad)
{
    const struct call *c = p->call;
    real row[c->head_dim];
    for (i64 d = 0; d < c->head_dim; d++) row[d] = grad[d] * (real)c->scale;
    if (!is_finite(row, c->head_dim)) suspect(p);
    if (!c->piece) {
        i64 at = place_in(&c->grad_query, p->batch, p->head[r], p->token[r]);
        narrow(c->grad_query.data, at, c->head_dim, c->dtype, row);
        return;
    }
    i64 at = place_in(&c->sum_query, p->batch, p->head[r], p->token[r]) + p->chunk * c->chunk_query;
    real *sum = (real *)c->sum_query.data + at;
    for (i64 d = 0; d < c->head_dim; d++) sum[d] += row[d];
}

/* Of all units of a place; what lies side by side is [feature][UNIT] each. */
struct room {
    real *query, *grad, *grad_query;           /* side by side, of deep and tall features; grad: of the output */
    real *query_rows, *grad_rows;              /* one after another, of whole vectors; queries times c->scale */
    real *query_pairs, *grad_pairs;            /* for tiles, in pairs of rows: [pair][feature], as many; as they are */
    real *lse, *rest, *delta;                  /* one number for each query; rest: of lse */
    real *scores, *grads, *slope, *dropped, *split; /* of a part: [key][UNIT] */
    real *key, *value, *weighed, *seen_key, *seen_value; /* of some keys */
    real *all_scores, *all_grads; /* of all units, for (5), unless tiles multiply: [key][units * UNIT] */
};

/* Takes queries that see no key as 0, with their gradients. */
static void forget_empty(const struct place *p, const struct room *m)
{
    const struct call *c = p->call;
    i64 D = deep(c, c->head_dim), E = deep(c, c->value_dim);
    i64 D_padded = round_up(c->head_dim, LANES), E_padded = round_up(c->value_dim, LANES);
    int8_t sees[UNITS * UNIT] = {0};
    for (struct keys k = {0}; next_keys(p, &k, KEYS_BACKWARD);) {
        struct rows key = rows_to_multiply(p, &c->key, k.span, k.first, k.n, c->head_dim, m->key);
        for (i64 u = 0; u * UNIT < p->rows; u++) {
            struct part part[3];
            for (int parts = parts_of(p, &k, u, part), i = 0; i < parts; i++) {
                i64 row = part[i].row, n = part[i].n, first = k.first + part[i].from;
                struct rows of_key = rows_from(key, part[i].from);
                scores_of(p, k.span, row, first, n, part[i].wide, of_key, column_of(m->query, row, D), m->scores, NULL);
                for (i64 j = 0; j < n; j++)
                    for (i64 r = 0; r < part[i].rows; r++) sees[row + r] |= m->scores[j * UNIT + r] != NONE;
            }
        }
    }
    for (i64 r = 0; r < p->rows; r++) {
        if (sees[r]) continue;
        for (i64 d = 0; d < D_padded; d++) m->query_rows[r * D_padded + d] = 0;
        for (i64 d = 0; d < D; d++) column_of(m->query, r, D)[d * UNIT] = 0;
        for (i64 e = 0; e < E_padded; e++) m->grad_rows[r * E_padded + e] = 0;
        for (i64 e = 0; e < E; e++) column_of(m->grad, r, E)[e * UNIT] = 0;
        i64 pair = r / UNIT * LANES + r % LANES, part = r / LANES % 2;
        for (i64 d = 0; d < D_padded; d++) ((uint16_t *)(m->query_pairs + pair * D_padded))[2 * d + part] = 0;
        for (i64 e = 0; e < E_padded; e++) ((uint16_t *)(m->grad_pairs + pair * E_padded))[2 * e + part] = 0;
        m->delta[r] = 0;
    }
}

/* (5) by tiles, of one part: adds numbers of its scores, times a factor, times its queries or gradients to rows of its
   keys or values; `rows` are times that factor, `pairs` are not */
static void add_to_rows(
    const struct room *m, const struct part *part, const real *scores, real factor, const real *rows,
    const real *pairs, i64 size, real *to, i64 apart)
{
    i64 row = part->row, padded = round_up(size, LANES), whole = part->n / TILE * TILE;
    if (whole)
        split_times(
            whole, part->rows, row % UNIT, scores, factor, m->split, pairs + row / UNIT * UNIT / 2 * padded, padded,
            to, apart);
    scores_times(
        part->n - whole, scores + whole * UNIT, UNIT, rows + row * padded, padded, part->rows, to + whole * apart,
        apart);
}

/* puts numbers of a part's scores among those of all units */
static void keep_part(const struct place *p, const struct part *part, const real *scores, real *all_units)
{
    i64 apart = p->call->units * UNIT;
    real *to = all_units + part->from * apart + part->row;
    for (i64 j = 0; j < part->n; j++)
        for (int w = 0; w < part->wide * LANES; w += LANES) store(to + j * apart + w, load(scores + j * UNIT + w));
}

/* Before the parts of some keys: what no part puts there is 0. */
static void begin_all(const struct place *p, const struct room *m, const struct keys *k)
{
    i64 apart = p->call->units * UNIT;
    for (i64 v = 0; v * LANES < p->rows; v++)
        for (i64 j = 0; j < k->n; j++) {
            if (k->begin[v] <= k->first + j && k->first + j < k->end[v]) continue;
            store(m->all_scores + j * apart + v * LANES, all(0));
            store(m->all_grads + j * apart + v * LANES, all(0));
        }
}

/* the vectors of queries that see any of LEFT keys, from the j-th of some on: of those from the first on, to before `end` */
static i64 vectors_that_see(const struct place *p, const struct keys *k, i64 j, i64 *end)
{
    i64 first = round_up(p->rows, LANES) / LANES, key = k->first + j;
    *end = 0;
    for (i64 v = first - 1; v >= 0; v--)
        if (k->begin[v] < key + LEFT && k->end[v] > key) *end = *end ? *end : v + 1, first = v;
    return first;
}

/* (5): adds numbers of all units' scores with some keys times their queries or gradients to rows of keys or values. All
   units at a time, since sums of many queries are long: every number added to them rounds them once more. */
static void add_all(
    const struct place *p, const struct keys *k, const real *all_units, const real *rows, i64 size, real *to, i64 apart)
{
    i64 padded = round_up(size, LANES), of_key = p->call->units * UNIT, end, other_end;
    for (i64 j = 0, stop; j < k->n; j = stop) {
        i64 first = vectors_that_see(p, k, j, &end), row = first * LANES;
        for (stop = j + LEFT; stop < k->n; stop += LEFT)
            if (vectors_that_see(p, k, stop, &other_end) != first || other_end != end) break;
        stop = least(stop, k->n);
        if (end)
            scores_times(
                stop - j, all_units + j * of_key + row, of_key, rows + row * padded, padded,
                least(end * LANES, p->rows) - row, to + j * apart, apart);
    }
}

/* What a part adds to the gradients of its queries and keys, and of what was added to scores; first: of its keys, which
   are given as (1) takes them, and as (4) does. */
static void pull_part(
    const struct place *p, const struct room *m, const struct span *s, const struct part *part, i64 first,
    struct rows key, struct rows value, struct rows weighed)
{
    const struct call *c = p->call;
    i64 D = tall(c, c->head_dim), E = deep(c, c->value_dim), row = part->row, n = part->n, at = key_of(p, s, first);
    int wide = part->wide;
    real *scores = m->scores, *grads = m->grads, *query = column_of(m->query, row, deep(c, D));
    real factor = scores_of(p, s, row, first, n, wide, key, query, scores, m->slope);
    if (c->careful) {
        int8_t is_seen[KEYS_BACKWARD];
        find_seen(part->rows, n, scores, UNIT, 1, is_seen);
        weighed = weighed_if_seen(c, is_seen, n, weighed, D, m->seen_key);
        value = rows_if_seen(is_seen, n, value, E, m->seen_value);
    }
    multiply(c, E, value, column_of(m->grad, row, E), 1, n, wide, grads);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            real *x = scores + j * UNIT + w * LANES;
            store(x, exp2_of(load(x) * factor - load(m->lse + row + w * LANES) - load(m->rest + row + w * LANES)));
        }
    real *kept = scores; /* what values were multiplied by */
    if (c->row_bits) {
        kept = memcpy(m->dropped, scores, n * UNIT * sizeof(real));
        drop(p, s, row, first, n, wide, kept, grads);
    }
    if (c->products == TILES)
        add_to_rows(
            m, part, kept, 1, m->grad_rows, m->grad_pairs, c->value_dim,
            sum_row(p, &c->sum_value, c->chunk_value, at), s->step * c->sum_value.row);
    else
        keep_part(p, part, kept, m->all_scores);
    for (i64 j = 0; j < n; j++)
        for (int w = 0; w < wide; w++) {
            real *x = grads + j * UNIT + w * LANES;
            store(x, load(scores + j * UNIT + w * LANES) * (load(x) - load(m->delta + row + w * LANES)));
        }
    for (i64 t = s->tile; t < s->tile + s->tiles; t++)
        if (wants_gradient(c, c->tile + t)) pull_tile(p, s, c->tile + t, row, first, n, wide, grads);
    if (c->softcap > 0)
        for (i64 j = 0; j < n * UNIT; j++) grads[j] *= m->slope[j];
    if (c->products == TILES)
        add_to_rows(
            m, part, grads, c->scale, m->query_rows, m->query_pairs, c->head_dim,
            sum_row(p, &c->sum_key, c->chunk_key, at), s->step * c->sum_key.row);
    else
        keep_part(p, part, grads, m->all_grads);
    weigh(c, D, weighed, grads, n, wide, 0, column_of(m->grad_query, row, D));
}

/* The same of a unit, whose gradients of outputs lie side by side, too. */
static void begin_unit(const struct place *p, const struct room *m, i64 unit)
{
    const struct call *c = p->call;
    i64 E = c->value_dim, E_padded = round_up(E, LANES), first = unit * UNIT;
    real factor[UNIT] = {0};
    for (i64 i = 0; i < UNIT; i++) {
        i64 r = first + i;
        if (r < p->rows)
            factor[i] = begin_gradients(p, r, m->grad_rows + r * E_padded, m->lse, m->rest, m->delta);
        else
            m->lse[r] = m->rest[r] = m->delta[r] = 0;
    }
    real *grad = m->grad + first * E; /* in pairs unless PLAIN, where no number is left to factors */
    for (i64 e = 0; c->products == PLAIN && e < E; e++)
        for (i64 i = 0; i < UNIT; i++) grad[e * UNIT + i] *= factor[i];
}

static void backward_place(const struct place *p, real *memory)
{
    const struct call *c = p->call;
    i64 D = deep(c, c->head_dim), E = deep(c, c->value_dim), D_tall = tall(c, c->head_dim);
    i64 D_padded = round_up(c->head_dim, LANES), E_padded = round_up(c->value_dim, LANES);
    i64 units = (p->rows + UNIT - 1) / UNIT, of_scores = KEYS_BACKWARD * UNIT;
    struct room m;
    m.query = part_of(&memory, units * D * UNIT), m.grad = part_of(&memory, units * E * UNIT);
    m.grad_query = part_of(&memory, units * D_tall * UNIT);
    m.query_rows = part_of(&memory, units * D_padded * UNIT), m.grad_rows = part_of(&memory, units * E_padded * UNIT);
    m.lse = part_of(&memory, units * UNIT), m.rest = part_of(&memory, units * UNIT);
    m.delta = part_of(&memory, units * UNIT);
    m.scores = part_of(&memory, of_scores), m.grads = part_of(&memory, of_scores);
    m.query_pairs = part_of(&memory, units * D_padded * UNIT / 2);
    m.grad_pairs = part_of(&memory, units * E_padded * UNIT / 2);
    m.slope = part_of(&memory, of_scores), m.dropped = part_of(&memory, of_scores);
    m.split = part_of(&memory, of_scores);
    m.key = part_of(&memory, KEYS_BACKWARD * D), m.value = part_of(&memory, KEYS_BACKWARD * E);
    m.seen_key = part_of(&memory, KEYS_BACKWARD * D), m.seen_value = part_of(&memory, KEYS_BACKWARD * E);
    m.weighed = part_of(&memory, KEYS_BACKWARD * D);
    m.all_scores = part_of(&memory, KEYS_BACKWARD * c->units * UNIT);
    m.all_grads = part_of(&memory, KEYS_BACKWARD * c->units * UNIT);
    for (i64 u = 0; u < units; u++) {
        i64 of_query = u * D_padded * UNIT, of_grad = u * E_padded * UNIT;
        real *query_rows = m.query_rows + of_query, *query_pairs = m.query_pairs + of_query / 2;
        real *grad_rows = m.grad_rows + of_grad, *grad_pairs = m.grad_pairs + of_grad / 2;
        side_by_side(p, &c->query, u, c->head_dim, query_factor(c), m.query + u * D * UNIT);
        side_by_side(p, &c->grad_output, u, c->value_dim, 1, m.grad + u * E * UNIT);
        one_after_another(p, &c->query, u, c->head_dim, c->scale, D_padded, query_rows, query_pairs);
        one_after_another(p, &c->grad_output, u, c->value_dim, 1, E_padded, grad_rows, grad_pairs);
    }
    if (any_is_far(p) && !was_found(p, m.lse, m.rest)) {
        find_softmax(p, m.query, KEYS_BACKWARD, m.lse, m.rest, m.scores, m.key, 0);
        for (i64 r = 0; r < units * UNIT; r++) m.rest[r] = log2(m.rest[r]);
    }
    if (c->notes) {
        note_softmax(p, m.lse, m.rest);
        return;
    }
    for (i64 u = 0; u < units; u++) begin_unit(p, &m, u);
    memset(m.grad_query, 0, units * D_tall * UNIT * sizeof(real));
    if (c->careful) forget_empty(p, &m);
    for (struct keys k = {0}; next_keys(p, &k, KEYS_BACKWARD);) {
        i64 of_key = c->head_dim, of_value = c->value_dim;
        struct rows key = rows_to_multiply(p, &c->key, k.span, k.first, k.n, of_key, m.key);
        struct rows weighed = rows_to_weigh(p, &c->key, k.span, k.first, k.n, of_key, KEYS_BACKWARD, key, m.weighed);
        struct rows value = rows_to_multiply(p, &c->value, k.span, k.first, k.n, of_value, m.value);
        if (c->products != TILES) begin_all(p, &m, &k);
        for (i64 u = 0; u < units; u++) {
            struct part part[3];
            for (int parts = parts_of(p, &k, u, part), i = 0; i < parts; i++) {
                i64 from = part[i].from;
                pull_part(
                    p, &m, k.span, part + i, k.first + from, rows_from(key, from), rows_from(value, from),
                    weighed_from(c, weighed, from));
            }
        }
        if (c->products == TILES) continue;
        i64 at = key_of(p, k.span, k.first);
        real *to_key = sum_row(p, &c->sum_key, c->chunk_key, at);
        add_all(p, &k, m.all_grads, m.query_rows, of_key, to_key, k.span->step * c->sum_key.row);
        real *to_value = sum_row(p, &c->sum_value, c->chunk_value, at);
        add_all(p, &k, m.all_scores, m.grad_rows, of_value, to_value, k.span->step * c->sum_value.row);
    }
    real of_unit[UNIT * D_tall];
    for (i64 r = 0; r < p->rows; r++) {
        if (r % UNIT == 0) to_rows(m.grad_query + r * D_tall, D_tall, of_unit);
        write_grad_query(p, r, of_unit + r % UNIT * D_tall);
    }
}

/* The gradients of some queries, and what they add to those of keys, values and biases. */

#pragma once

#include "scores.h"

static i64 backward_numbers(const struct call *c)
{
    i64 D = c->head_dim, E = c->value_dim, wide = round_up(D, LANES) + round_up(E, LANES);
    return UNITS * UNIT * (2 * D + E + wide + 2) + KEYS_BACKWARD * (4 * UNIT + 2 * D + 2 * E) + 16 * 18;
}

/* The log-sum-exp of a query in units of log 2, and sum_j weight dweight: what an output is multiplied by. */
static void begin_gradients(const struct place *p, i64 r, const real *grad, real *lse, real *delta)
{
    const struct call *c = p->call;
    const struct tensor *output = c->exact.data ? &c->exact : &c->output;
    i64 at = number_of(p, r), from = place_in(output, p->batch, p->head[r], p->query[r]);
    real row[c->value_dim];
    widen(output->data, from, c->value_dim, c->exact.data ? OWN : c->dtype, row);
    lse[r] = c->lse[at] == NONE ? 0 : c->lse[at] * LOG2_E;
    delta[r] = dot(row, grad, c->value_dim) - (c->grad_lse ? c->grad_lse[at] : 0);
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
    narrow(
        c->grad_query.data, place_in(&c->grad_query, p->batch, p->head[r], p->query[r]), c->head_dim, c->dtype, row);
}

/* Takes queries that see no key as 0, with their gradients. */
static void forget_empty(
    const struct place *p, real *query, real *grad, real *query_rows, real *grad_rows, real *delta, real *scores,
    real *key_room)
{
    const struct call *c = p->call;
    i64 D = c->head_dim, E = c->value_dim, D_padded = round_up(D, LANES), E_padded = round_up(E, LANES);
    int8_t sees[UNITS * UNIT] = {0};
    for (struct keys k = {0}; next_keys(p, &k, KEYS_BACKWARD);)
        for (i64 u = 0; u * UNIT < p->rows; u++) {
            i64 n = seen(p, k.span, u, k.first, k.n), key_row;
            if (n <= 0) continue;
            const real *key = rows_of(p, &c->key, k.span, k.first, n, D, key_room, &key_row);
            scores_of(p, k.span, u * UNIT, k.first, n, 2, key, key_row, query + u * D * UNIT, scores, NULL);
            for (i64 j = 0; j < n * UNIT; j++) sees[u * UNIT + j % UNIT] |= scores[j] != NONE;
        }
    for (i64 r = 0; r < p->rows; r++) {
        if (sees[r]) continue;
        i64 u = r / UNIT, i = r % UNIT;
        for (i64 d = 0; d < D; d++) query[(u * D + d) * UNIT + i] = query_rows[r * D_padded + d] = 0;
        for (i64 e = 0; e < E; e++) grad[(u * E + e) * UNIT + i] = grad_rows[r * E_padded + e] = 0;
        delta[r] = 0;
    }
}

static void backward_place(const struct place *p, real *memory)
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
        for (i64 r = u * UNIT; r < least(p->rows, (u + 1) * UNIT); r++)
            begin_gradients(p, r, grad_rows + r * E_padded, lse, delta);
        for (i64 r = p->rows; r < (u + 1) * UNIT; r++) lse[r] = delta[r] = 0;
    }
    memset(grad_query, 0, units * D * UNIT * sizeof(real));
    if (c->careful) forget_empty(p, query, grad, query_rows, grad_rows, delta, scores, key_room);
    for (struct keys k = {0}; next_keys(p, &k, KEYS_BACKWARD);) {
        const struct span *s = k.span;
        i64 key_row, value_row, row = key_of(p, s, k.first);
        const real *key = rows_of(p, &c->key, s, k.first, k.n, D, key_room, &key_row);
        const real *value = rows_of(p, &c->value, s, k.first, k.n, E, value_room, &value_row);
        real *to_key = sum_row(p, &c->sum_key, c->chunk_key, row);
        real *to_value = sum_row(p, &c->sum_value, c->chunk_value, row);
        for (i64 u = 0; u < units; u++) {
            struct part part[2];
            for (int parts = parts_of(p, s, u, k.first, k.n, part), i = 0; i < parts; i++) {
                i64 from = part[i].from, n = part[i].n, first = k.first + from, k_row = key_row, v_row = value_row;
                i64 r = part[i].row, rows = part[i].rows, key_step = s->step * c->sum_key.row;
                i64 value_step = s->step * c->sum_value.row;
                int wide = part[i].wide;
                const real *of_key = key + from * key_row, *of_value = value + from * value_row;
                scores_of(
                    p, s, r, first, n, wide, of_key, key_row, query + u * D * UNIT + r % UNIT, scores, slope);
                if (c->careful) {
                    of_key = without_unseen(rows, n, scores, of_key, &k_row, D, seen_key);
                    of_value = without_unseen(rows, n, scores, of_value, &v_row, E, seen_value);
                }
                rows_times(n, of_value, v_row, grad + u * E * UNIT + r % UNIT, E, wide, grads);
                for (i64 j = 0; j < n; j++)
                    for (int w = 0; w < wide; w++) {
                        real *x = scores + j * UNIT + w * LANES;
                        store(x, exp2_of(load(x) - load(lse + r + w * LANES)));
                    }
                real *kept = scores; /* what values were multiplied by */
                if (c->row_bits) {
                    kept = memcpy(dropped, scores, n * UNIT * sizeof(real));
                    drop(p, s, r, first, n, wide, kept, grads);
                }
                real *to = to_value + from * value_step;
                scores_times(n, kept, grad_rows + r * E_padded, E_padded, rows, to, value_step);
                for (i64 j = 0; j < n; j++)
                    for (int w = 0; w < wide; w++) {
                        real *x = grads + j * UNIT + w * LANES;
                        store(x, load(scores + j * UNIT + w * LANES) * (load(x) - load(delta + r + w * LANES)));
                    }
                for (i64 t = s->tile; t < s->tile + s->tiles; t++)
                    if (wants_gradient(c, c->tile + t)) pull_tile(p, s, c->tile + t, r, first, n, wide, grads);
                if (c->softcap > 0)
                    for (i64 j = 0; j < n * UNIT; j++) grads[j] *= slope[j];
                features_times(D, of_key, k_row, grads, n, wide, grad_query + u * D * UNIT + r % UNIT);
                scores_times(n, grads, query_rows + r * D_padded, D_padded, rows, to_key + from * key_step, key_step);
            }
        }
    }
    real of_unit[UNIT * D];
    for (i64 r = 0; r < p->rows; r++) {
        if (r % UNIT == 0) to_rows(grad_query + r * D, D, of_unit);
        write_grad_query(p, r, of_unit + r % UNIT * D);
    }
}

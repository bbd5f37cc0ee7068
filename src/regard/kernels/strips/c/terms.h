/* What a mask shows that is put together by &, | and ~ of positions and of data, which may be another in each call.

   The mask is a list of terms, as of a calculator with a stack: each puts on it the keys that a mask shows one query, or
   joins the last two, or shows what the last one hides. */

#pragma once

#include "data.h"

enum kind_of_term { BAND, PREFIX, CHUNK, STRIDED, DOCUMENT, PADDING, DENSE, AND, OR, NOT };

#define MOST_DEPTH 8             /* of the stack */
#define MOST_EVALUATED (1 << 23) /* cells: of more, strips follow from the mask in another way */
#define PARTS 3                  /* of a term */
#define GIVEN -1
#define NOT_GIVEN -2

/* from: for each part, which operand of the call it is; GIVEN, if it is `number`; or NOT_GIVEN. The parts of a band are how
   many keys are seen before a query's own, and after it, and its offset; of a chunk and of strided keys, their size and the
   offset; of a document, the ids of queries and of keys; of cells, these, and with how many axes they were given. Others
   that have parts have one. */
struct term {
    i64 kind, from[PARTS], number[PARTS];
};

/* A term for one batch index. */
struct shown {
    const struct term *term;
    i64 number[PARTS];
    const i64 *id, *id_of_key;
    struct cells cells;
};

/* Takes a part of a term that is a number: one, or one for each batch index. Returns whether it can be a position. */
static int take_number(
    struct shown *to, int part, const struct data *data, const struct dl_tensor *query, i64 batch)
{
    i64 from = to->term->from[part], *number = to->number + part;
    *number = to->term->number[part];
    if (from >= 0) {
        const struct dl_tensor *t = &data->operand[from].tensor;
        *number = data->operand[from].number;
        if (t->axes) {
            if (!is_whole(t) || t->axes != 1 || t->device != query->device || t->shape[0] != query->shape[0]) return 0;
            *number = whole_numbers(t)[batch * t->strides[0]];
        }
    }
    return from == NOT_GIVEN || (*number > -FAR && *number < FAR);
}

/* Returns whether the operands of a term fit the call. */
static int take_term(
    struct shown *to, const struct term *term, const struct data *data, const struct dl_tensor *query, i64 keys, i64 batch)
{
    *to = (struct shown){.term = term};
    const struct dl_tensor *t[2] = {0};
    for (int part = 0; part < 2; part++)
        if (term->from[part] >= 0) t[part] = &data->operand[term->from[part]].tensor;
    if (term->kind == DOCUMENT) {
        i64 scores = query->shape[0] * query->shape[1] * query->shape[2] * keys;
        if (batch == 0 && !are_ids(t[0], t[1], query, keys)) return 0; /* those of all batch indices at once */
        if (batch == 0 && scores > MOST_UNSORTED && !are_in_order(t[0], t[1])) return 0;
        to->id = whole_numbers(t[0]) + batch * apart_of(t[0]);
        to->id_of_key = whole_numbers(t[1]) + batch * apart_of(t[1]);
        return 1;
    }
    if (term->kind == DENSE) return place_cells(&to->cells, t[0], term->number[1] == 4, query, keys);
    if (term->kind == PADDING && t[0]->kind == DL_BOOL) {
        to->cells = (struct cells){(const uint8_t *)t[0]->data + t[0]->offset, apart_of(t[0]), 0, 0};
        return is_for_each(t[0], query, keys);
    }
    for (int part = 0; part < PARTS; part++)
        if (!take_number(to, part, data, query, batch)) return 0;
    return term->kind != PADDING || (to->number[0] >= 0 && to->number[0] <= keys);
}

INLINE void show(uint8_t *row, i64 keys, i64 start, i64 stop)
{
    start = most(0, least(start, keys)), stop = most(start, least(stop, keys));
    memset(row, 0, keys);
    memset(row + start, 1, stop - start);
}

/* Rows of bytes, of which the compiler is told that they lie apart: then it takes many at a time. */
static void show_true(i64 keys, const uint8_t *restrict from, uint8_t *restrict row)
{
    for (i64 j = 0; j < keys; j++) row[j] = from[j] != 0;
}

static void show_equal(i64 keys, const i64 *restrict id, i64 own, uint8_t *restrict row)
{
    for (i64 j = 0; j < keys; j++) row[j] = id[j] == own;
}

static void show_both(i64 keys, uint8_t *restrict row, const uint8_t *restrict other)
{
    for (i64 j = 0; j < keys; j++) row[j] &= other[j];
}

static void show_either(i64 keys, uint8_t *restrict row, const uint8_t *restrict other)
{
    for (i64 j = 0; j < keys; j++) row[j] |= other[j];
}

static void show_others(i64 keys, uint8_t *row)
{
    for (i64 j = 0; j < keys; j++) row[j] ^= 1;
}

/* What a term shows a query; own: its own key, unless the term has an offset. */
static void show_term(const struct shown *s, i64 batch, i64 head, i64 query, i64 keys, i64 own, uint8_t *row)
{
    const struct term *term = s->term;
    const i64 *number = s->number;
    i64 of_row = batch * s->cells.batch + head * s->cells.head + query * s->cells.query;
    int offset = term->kind == BAND ? 2 : 1;
    if (term->from[offset] != NOT_GIVEN) own = query + number[offset];
    switch (term->kind) {
    case BAND:
        show(
            row, keys, term->from[0] == NOT_GIVEN ? 0 : own - number[0],
            term->from[1] == NOT_GIVEN ? keys : own + number[1] + 1);
        break;
    case CHUNK:
        own -= modulo(own, number[0]);
        show(row, keys, own, own + number[0]);
        break;
    case STRIDED:
        memset(row, 0, keys);
        for (i64 j = modulo(own, number[0]); j < keys; j += number[0]) row[j] = 1;
        break;
    case DOCUMENT:
        show_equal(keys, s->id_of_key, s->id[query], row);
        break;
    default: /* bools, or so many keys from the first on */
        if (s->cells.at)
            show_true(keys, s->cells.at + of_row, row);
        else
            show(row, keys, 0, number[0]);
    }
}

/* What the terms show a query, into the first row of the stack. */
static void show_terms(
    const struct shown *shown, i64 terms, i64 batch, i64 head, i64 query, i64 keys, i64 own, uint8_t *stack)
{
    uint8_t *next = stack; /* after the last row */
    for (const struct shown *s = shown; s < shown + terms; s++) {
        if (s->term->kind < AND) {
            show_term(s, batch, head, query, keys, own, next);
            next += keys;
            continue;
        }
        next -= s->term->kind == NOT ? 0 : keys;
        uint8_t *last = next - keys;
        if (s->term->kind == NOT)
            show_others(keys, last);
        else if (s->term->kind == AND)
            show_both(keys, last, next);
        else
            show_either(keys, last, next);
    }
}

/* What queries see by terms, as cells of the data, whose memory is to be freed; NULL where operands do not fit the call, or
   the cells are too many. ahead: the first query's own key. shape: its place, and that of strides. */
static uint8_t *cells_by_terms(
    const struct term *term, i64 terms, const struct dl_tensor *query, i64 keys, i64 ahead, struct data *data, i64 shape[8])
{
    i64 queries = query->shape[2], batches = 1, heads = 1;
    if (query->shape[0] * query->shape[1] * queries * keys > MOST_SCORES) return NULL;
    for (i64 i = 0; i < data->operands; i++) {
        const struct dl_tensor *t = &data->operand[i].tensor;
        if (t->axes && t->shape[0] > 1) batches = query->shape[0];
        if (t->axes == 4 && t->shape[1] > 1) heads = query->shape[1];
    }
    i64 of_head = queries * keys;
    if (batches * heads * of_head > MOST_EVALUATED) return NULL;
    struct shown shown[terms];
    uint8_t *cells = malloc(batches * heads * of_head), *stack = malloc(MOST_DEPTH * keys), *to = cells;
    for (i64 batch = 0; cells && stack && batch < batches; batch++) {
        for (i64 i = 0; i < terms; i++)
            if (!take_term(shown + i, term + i, data, query, keys, batch)) return free(cells), free(stack), NULL;
        for (i64 row = 0; row < heads * queries; row++, to += keys) {
            show_terms(shown, terms, batch, row / queries, row % queries, keys, ahead + row % queries, stack);
            memcpy(to, stack, keys);
        }
    }
    if (!stack) free(cells), cells = NULL;
    free(stack);
    tell_cells(data, cells, query, (i64[]){batches, heads, queries, keys}, shape);
    return cells;
}

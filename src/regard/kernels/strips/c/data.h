/* Which keys the queries of a call see by the data of its mask, which may be another in each call: of padding, of packed
   documents, of cells, and where among the keys the queries are. */

#pragma once

#include <stdlib.h>

#include "again.h"

/* Which keys are real, bools [1 or batch, key], or how many of each text are, [batch]; the documents of queries and of keys,
   [1 or batch, token]; who sees whom, bools [1 or batch, 1 or head, 1 or query, key]; which key is the first query's
   own, [batch], and the same as a whole number. Or an operand of terms.h, a tensor of any kind, or a whole number. */
enum kind_of_data { NO_DATA, REAL_KEYS, QUERY_IDS, KEY_IDS, CELLS, OFFSETS, OFFSET, OPERAND, NUMBER };

#define MOST_NOTED 8 /* tensors and numbers that are looked at, and so the most operands, too */

/* A tensor; or a number, if that has no axes. */
struct operand {
    struct dl_tensor tensor;
    i64 number;
};

/* The data of a call, without axes where there is none. has_offset: otherwise the last key is the last query's. four_axes:
   cells were given with all of them. */
struct data {
    struct dl_tensor tensor[OFFSET];
    i64 has_offset, offset, four_axes, operands;
    struct operand operand[MOST_NOTED];
};

#define MOST_TEXTS 256          /* that are padded */
#define MOST_SCORES (1 << 24)   /* of a call with cells: beside computing more, finding out which takes no time */
#define MOST_UNSORTED (1 << 18) /* of one with documents apart: of more, tokens are sorted */
#define KEYS_FOR_A_GAP 8        /* if at least one key of so many, and so many scores, are hidden from all queries ... */
#define MOST_HIDDEN (1 << 20)   /* ... between others, keys are sorted */
#define DL_INT 0                /* the kinds of whole numbers and of bools */
#define DL_BOOL 6

/* What `one` is told: the first key that each query sees and the one after the last, and a mask of those between, if some
   are hidden. Freed by `free_intervals`. */
struct intervals {
    i64 told[4];
    struct mask seen;
    i64 texts, real_apart; /* how many intervals of real keys there are, or one for all; and those in bools, if any are */
    const uint8_t *real;   /* hidden between others; otherwise NULL */
    int32_t first_real[MOST_TEXTS], end_real[MOST_TEXTS];
    int32_t *of_queries;
    uint32_t *words;
};

static void free_intervals(struct intervals *found) { free(found->of_queries), free(found->words); }

/* all keys, for each query */
static void see_all(struct intervals *found, i64 keys)
{
    found->of_queries = NULL, found->words = NULL, found->real = NULL, found->seen.words = NULL;
    found->texts = 1, found->first_real[0] = 0, found->end_real[0] = keys;
    found->told[0] = (i64)found->first_real, found->told[1] = (i64)found->end_real;
    found->told[2] = found->told[3] = 0;
}

API i64 regard_keys(const uint8_t *cells, i64 rows, i64 keys, i64 apart, int32_t *first_key, int32_t *end_key);
API void regard_bits(
    const uint8_t *cells, i64 matrices, i64 rows, i64 keys, i64 matrix_apart, i64 row_apart, uint32_t *words);

/* whether they are of so many tokens, for each batch index or the same for all */
INLINE int is_for_each(const struct dl_tensor *t, const struct dl_tensor *query, i64 tokens)
{
    if (t->axes != 2 || t->device != query->device || t->shape[1] != tokens || t->strides[1] != 1) return 0;
    return t->shape[0] == 1 || t->shape[0] == query->shape[0];
}

INLINE int is_whole(const struct dl_tensor *t) { return t->kind == DL_INT && t->bits == 64; }

/* how far the numbers of two batch indices are apart */
INLINE i64 apart_of(const struct dl_tensor *t) { return t->shape[0] > 1 ? t->strides[0] : 0; }

INLINE const i64 *whole_numbers(const struct dl_tensor *t) { return (const i64 *)(t->data + t->offset); }

/* Takes a number, of those that must be the same; returns whether it is one that can be. -1 may be an error. */
static int take_offset(struct data *data, void *number)
{
    i64 offset = python.number(number);
    if (offset == -1 || offset <= -FAR || offset >= FAR || (data->has_offset && offset != data->offset)) return 0;
    data->has_offset = 1, data->offset = offset;
    return 1;
}

/* Where cells are, and how far those of batch indices, heads and queries are apart. */
struct cells {
    const uint8_t *at;
    i64 batch, head, query;
};

/* Returns whether they are those of such a call, beyond doubt: cells of as many heads or queries as there are texts, given
   with fewer than four axes, may have been meant for each text, which is an error. */
static int place_cells(
    struct cells *to, const struct dl_tensor *t, int four_axes, const struct dl_tensor *query, i64 keys)
{
    if (t->kind != DL_BOOL || t->axes != 4 || t->device != query->device) return 0;
    if (t->shape[3] != keys || t->strides[3] != 1) return 0;
    i64 texts = query->shape[0], apart[3];
    for (int axis = 0; axis < 3; axis++) {
        if (!fits(t->shape[axis], query->shape[axis])) return 0;
        apart[axis] = t->shape[axis] > 1 ? t->strides[axis] : 0;
    }
    int may_be_of_texts = t->shape[0] == 1 && (t->shape[1] == texts || t->shape[2] == texts);
    if (texts > 1 && !four_axes && may_be_of_texts) return 0;
    *to = (struct cells){(const uint8_t *)t->data + t->offset, apart[0], apart[1], apart[2]};
    return 1;
}

/* Tells of cells that are not the caller's. shape: its place, with the sizes of four axes, and that of strides. */
static void tell_cells(
    struct data *data, uint8_t *cells, const struct dl_tensor *query, const i64 size[4], i64 shape[8])
{
    for (int axis = 3; axis >= 0; axis--)
        shape[axis] = size[axis], shape[4 + axis] = axis == 3 ? 1 : shape[5 + axis] * size[axis + 1];
    data->tensor[CELLS] = (struct dl_tensor){
        .data = (char *)cells, .device = query->device, .number = query->number, .axes = 4, .kind = DL_BOOL, .bits = 8,
        .lanes = 1, .shape = shape, .strides = shape + 4};
    data->four_axes = 1;
}

/* Keys from `start` to before `stop` that are real in each of so many rows, which lie so far apart. */
static int find_real(const uint8_t *cells, i64 rows, i64 apart, i64 start, i64 stop, struct intervals *found)
{
    if (rows > MOST_TEXTS || stop - start < 2) return 0;
    if (!regard_keys(cells + start, rows, stop - start, apart, found->first_real, found->end_real))
        found->real = cells, found->real_apart = apart;
    for (i64 row = 0; row < rows; row++) found->first_real[row] += start, found->end_real[row] += start;
    found->texts = rows;
    return 1;
}

/* The same where it is told how many each text begins with. */
static int count_real(const struct dl_tensor *count, const struct dl_tensor *query, i64 keys, struct intervals *found)
{
    i64 rows = query->shape[0];
    if (!is_whole(count) || count->axes != 1 || count->device != query->device) return 0;
    if (rows > MOST_TEXTS || count->shape[0] != rows) return 0;
    for (i64 row = 0; row < rows; row++) {
        i64 real = whole_numbers(count)[row * count->strides[0]];
        if (real < 0 || real > keys) return 0;
        found->first_real[row] = 0, found->end_real[row] = real;
    }
    found->texts = rows;
    return 1;
}

/* Whether so many keys between others are not real that it takes less time to sort them. */
static int has_many_gaps(const struct intervals *found, const struct dl_tensor *query, i64 keys)
{
    i64 hidden = 0, texts = found->texts;
    for (i64 row = 0; row < texts; row++) {
        const uint8_t *real = found->real + row * found->real_apart;
        for (i64 j = found->first_real[row]; j < found->end_real[row]; j++) hidden += !real[j];
    }
    i64 scores = hidden * (query->shape[0] / texts) * query->shape[1] * query->shape[2];
    return hidden * KEYS_FOR_A_GAP >= texts * keys && scores >= MOST_HIDDEN;
}

/* Whether the ids of queries and of keys are as many as these are. */
static int are_ids(
    const struct dl_tensor *ids, const struct dl_tensor *of_keys, const struct dl_tensor *query, i64 keys)
{
    if (!is_whole(ids) || !is_for_each(ids, query, query->shape[2])) return 0;
    return is_whole(of_keys) && is_for_each(of_keys, query, keys);
}

/* Whether queries and keys are the same tokens, and documents come one after another. */
static int are_in_order(const struct dl_tensor *ids, const struct dl_tensor *of_keys)
{
    if (ids->data != of_keys->data || ids->offset != of_keys->offset || ids->shape[0] != of_keys->shape[0]) return 0;
    if (ids->shape[1] != of_keys->shape[1] || apart_of(ids) != apart_of(of_keys)) return 0;
    for (i64 row = 0; row < ids->shape[0]; row++) {
        const i64 *id = whole_numbers(ids) + row * apart_of(ids);
        for (i64 i = 1; i < ids->shape[1]; i++)
            if (id[i] < id[i - 1]) return 0;
    }
    return 1;
}

/* The interval of each of so many tokens: those with the same id, which lie side by side. */
static void find_documents(const i64 *id, i64 tokens, int32_t *first, int32_t *end)
{
    for (i64 begin = 0, stop; begin < tokens; begin = stop) {
        for (stop = begin + 1; stop < tokens && id[stop] == id[begin]; stop++) continue;
        for (i64 i = begin; i < stop; i++) first[i] = begin, end[i] = stop;
    }
}

/* The same of documents that lie apart: from the first key of a query's document to the last. */
static void find_documents_apart(
    const i64 *id, i64 queries, const i64 *of_key, i64 keys, int32_t *first, int32_t *end)
{
    for (i64 i = 0; i < queries; i++) {
        for (first[i] = 0; first[i] < keys && of_key[first[i]] != id[i];) first[i]++;
        for (end[i] = keys; end[i] > first[i] && of_key[end[i] - 1] != id[i];) end[i]--;
    }
}

/* The same of cells, of all heads; returns whether nothing is hidden in between from any. */
static int find_cells(
    const struct cells *cells, i64 batch, i64 heads, i64 queries, i64 keys, int32_t *first, int32_t *end)
{
    int all = !cells->head || heads == 1;
    for (i64 i = 0; i < queries; i++) {
        const uint8_t *row = cells->at + batch * cells->batch + i * cells->query;
        all &= regard_keys(row, 1, keys, 0, first + i, end + i);
        for (i64 head = 1; cells->head && head < heads; head++) {
            int32_t begin, stop, sees_none = first[i] == end[i];
            regard_keys(row + head * cells->head, 1, keys, 0, &begin, &stop);
            if (begin == stop) continue;
            end[i] = sees_none ? stop : most(end[i], stop), first[i] = least(first[i], begin);
        }
    }
    return all;
}

/* Leaves of each query's interval what is in another: first keys, and after them the ends. */
static void leave(int32_t *first, int32_t *end, const int32_t *other, i64 queries)
{
    for (i64 i = 0; i < queries; i++) {
        first[i] = most(first[i], other[i]);
        end[i] = most(first[i], least(end[i], other[queries + i]));
    }
}

/* The interval of each query, by its document or cells, by where it is among the keys, and of those that are real. span: its
   low and high are counted from a query's own key. cells: NULL if there are none. in_between: is set if they hide a key
   between others. */
static int find_of_queries(
    const struct data *data, const struct span *span, const struct dl_tensor *query, i64 keys, int in_order,
    const struct cells *cells, struct intervals *found, int *in_between)
{
    const struct dl_tensor *ids = data->tensor + QUERY_IDS, *of_keys = data->tensor + KEY_IDS;
    const struct dl_tensor *offsets = data->tensor + OFFSETS;
    i64 queries = query->shape[2], has_offsets = offsets->axes, has_ids = ids->axes;
    int differ = found->texts > 1 || (has_ids && (ids->shape[0] > 1 || of_keys->shape[0] > 1)) ||
                 (cells && cells->batch) || (has_offsets && offsets->shape[0] > 1);
    i64 rows = differ ? query->shape[0] : 1;
    int32_t *first = found->of_queries = malloc(2 * (rows + 1) * queries * sizeof *first);
    if (!first) return 0;
    int32_t *end = first + rows * queries, *of_one = end + rows * queries; /* one way's of a text */
    found->told[0] = (i64)first, found->told[1] = (i64)end, found->told[2] = differ ? queries : 0, found->told[3] = 1;
    for (i64 row = 0; row < rows; row++, first += queries, end += queries) {
        i64 text = found->texts > 1 ? row : 0;
        for (i64 i = 0; i < queries; i++) first[i] = found->first_real[text], end[i] = found->end_real[text];
        if (has_ids) {
            const i64 *id = whole_numbers(ids) + row * apart_of(ids);
            if (in_order)
                find_documents(id, queries, of_one, of_one + queries);
            else
                find_documents_apart(
                    id, queries, whole_numbers(of_keys) + row * apart_of(of_keys), keys, of_one, of_one + queries);
            leave(first, end, of_one, queries);
        }
        if (cells) {
            *in_between |= !find_cells(cells, row, query->shape[1], queries, keys, of_one, of_one + queries);
            leave(first, end, of_one, queries);
        }
        if (has_offsets) {
            i64 own = whole_numbers(offsets)[row * apart_of(offsets)];
            if (own <= -FAR || own >= FAR) return 0;
            for (i64 i = 0; i < queries; i++) {
                of_one[i] = most(0, least(keys, own + i + span->low));
                of_one[queries + i] = most(0, least(keys, own + i + span->high + 1));
            }
            leave(first, end, of_one, queries);
        }
    }
    return 1;
}

/* Leaves in the words of a text what keys are real, or the documents that its queries and keys are of. */
static void keep_real(uint32_t *words, i64 rows, i64 keys, const uint8_t *real)
{
    for (i64 row = 0; row < rows; row++, words += keys)
        for (i64 j = 0; j < keys; j++) words[j] &= real[j] ? ~(uint32_t)0 : 0;
}

static void keep_documents(uint32_t *words, i64 queries, i64 keys, const i64 *id, const i64 *of_key)
{
    for (i64 i = 0; i < queries; i++) {
        uint32_t *of_row = words + i / QUERIES_OF_A_WORD * keys, others = ~((uint32_t)1 << i % QUERIES_OF_A_WORD);
        for (i64 j = 0; j < keys; j++) of_row[j] &= of_key[j] == id[i] ? ~(uint32_t)0 : others;
    }
}

/* What is hidden between the keys of intervals, as a mask. cells: NULL if there are none. */
static int find_mask(
    const struct data *data, const struct cells *cells, int by_documents, const struct dl_tensor *query, i64 keys,
    struct intervals *found)
{
    const struct dl_tensor *ids = data->tensor + QUERY_IDS, *of_keys = data->tensor + KEY_IDS;
    i64 queries = query->shape[2], heads = cells && cells->head ? query->shape[1] : 1;
    i64 rows = by_documents || (cells && cells->query) ? (queries + QUERIES_OF_A_WORD - 1) / QUERIES_OF_A_WORD : 1;
    int differ = (found->real && found->texts > 1) || (cells && cells->batch) ||
                 (by_documents && (ids->shape[0] > 1 || of_keys->shape[0] > 1));
    i64 batches = differ ? query->shape[0] : 1, of_head = rows * keys;
    uint32_t *words = found->words = malloc(batches * heads * of_head * sizeof *words);
    if (!words) return 0;
    for (i64 batch = 0; batch < batches; batch++)
        for (i64 head = 0; head < heads; head++, words += of_head) {
            const uint8_t *from = cells ? cells->at + batch * cells->batch + head * cells->head : NULL;
            if (cells && cells->query)
                regard_bits(from, 1, queries, keys, 0, cells->query, words);
            else
                memset(words, -1, of_head * sizeof *words);
            if (cells && !cells->query) keep_real(words, rows, keys, from);
            if (found->real) keep_real(words, rows, keys, found->real + (found->texts > 1 ? batch : 0) * found->real_apart);
            if (by_documents) {
                const i64 *id = whole_numbers(ids) + batch * apart_of(ids);
                keep_documents(words, queries, keys, id, whole_numbers(of_keys) + batch * apart_of(of_keys));
            }
        }
    found->seen = (struct mask){
        (const int32_t *)found->words, differ ? heads * of_head : 0, heads > 1 ? of_head : 0, rows > 1 ? keys : 0, 1};
    return 1;
}

/* Returns whether the data is what the call needs, and worth telling so. Keys before `start` or from `stop` on are seen by
   none. span: as of `find_of_queries`. */
static int find_intervals(
    const struct data *data, const struct span *span, const struct dl_tensor *query, i64 keys, i64 start, i64 stop,
    struct intervals *found)
{
    const struct dl_tensor *real = data->tensor + REAL_KEYS, *offsets = data->tensor + OFFSETS;
    const struct dl_tensor *ids = data->tensor + QUERY_IDS, *of_keys = data->tensor + KEY_IDS;
    struct cells cells;
    int has_cells = data->tensor[CELLS].axes, has_ids = ids->axes;
    see_all(found, keys);
    if (has_ids && !are_ids(ids, of_keys, query, keys)) return 0;
    if (has_cells && !place_cells(&cells, data->tensor + CELLS, data->four_axes, query, keys)) return 0;
    if (offsets->axes) {
        if (!is_whole(offsets) || offsets->axes != 1 || offsets->device != query->device) return 0;
        if (offsets->shape[0] != query->shape[0]) return 0;
    }
    if (real->axes && real->kind != DL_BOOL) {
        if (!count_real(real, query, keys, found)) return 0;
    } else if (real->axes) {
        const uint8_t *from = (const uint8_t *)real->data + real->offset;
        if (!is_for_each(real, query, keys) || !find_real(from, real->shape[0], apart_of(real), start, stop, found)) return 0;
    } else if (has_cells && !cells.head && !cells.query) { /* as padding */
        if (!find_real(cells.at, cells.batch ? query->shape[0] : 1, cells.batch, start, stop, found)) return 0;
        has_cells = 0;
    }
    if (found->real && has_many_gaps(found, query, keys)) return 0;
    int in_order = has_ids && are_in_order(ids, of_keys), apart = has_ids && !in_order;
    i64 scores = query->shape[0] * query->shape[1] * query->shape[2] * keys;
    if ((has_cells && scores > MOST_SCORES) || (apart && scores > MOST_UNSORTED)) return 0;
    const struct cells *given = has_cells ? &cells : NULL;
    int in_between = found->real || apart;
    if (!has_ids && !has_cells && !offsets->axes) {
        found->told[0] = (i64)found->first_real, found->told[1] = (i64)found->end_real;
        found->told[2] = found->texts > 1, found->told[3] = 0;
    } else if (!find_of_queries(data, span, query, keys, in_order, given, found, &in_between))
        return 0;
    return !in_between || find_mask(data, given, apart, query, keys, found);
}

#define SIZES 6 /* of batch indices and queries that have intervals of their own; of the words, which may be none */

/* What was found, as an object of bytes, for gradients: the data may have changed until these are asked for. The sizes, the
   first keys, the ends, and the words. span: as of `find_of_queries`. */
static void *kept_intervals(
    const struct intervals *found, const struct data *data, const struct span *span, const struct dl_tensor *query,
    i64 keys)
{
    i64 batches = query->shape[0], queries = query->shape[2];
    i64 rows = found->told[2] ? batches : 1, columns = found->told[3] || data->has_offset ? queries : 1;
    const struct mask *m = &found->seen;
    i64 size[SIZES] = {rows, columns, 0, 1, 1, keys}, words = 0;
    if (m->words) {
        size[2] = m->batch ? batches : 1, size[3] = m->head ? query->shape[1] : 1;
        size[4] = m->query ? (queries + QUERIES_OF_A_WORD - 1) / QUERIES_OF_A_WORD : 1;
        words = size[2] * size[3] * size[4] * keys;
    }
    i64 count = SIZES + 2 * rows * columns + words;
    int32_t *numbers = malloc(count * sizeof *numbers), *first = numbers + SIZES, *end = first + rows * columns;
    if (!numbers) return python.bytes(NULL, -1); /* which sets an error */
    for (int i = 0; i < SIZES; i++) numbers[i] = size[i];
    for (i64 row = 0; row < rows; row++)
        for (i64 i = 0; i < columns; i++, first++, end++) {
            i64 at = row * found->told[2] + i * found->told[3], own = data->offset + i;
            *first = ((const int32_t *)found->told[0])[at], *end = ((const int32_t *)found->told[1])[at];
            if (!data->has_offset) continue;
            *first = most(*first, least(keys, own + span->low));
            *end = most(*first, least(*end, own + span->high + 1));
        }
    if (words) memcpy(numbers + count - words, m->words, words * sizeof *numbers);
    void *kept = python.bytes((const char *)numbers, count * sizeof *numbers);
    free(numbers);
    return kept;
}

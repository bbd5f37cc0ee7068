/* Which keys the queries of a call see by the data of its mask, which may be another in each call: of padding, of packed
   documents, and where among the keys the queries are. */

#pragma once

#include <stdlib.h>

#include "again.h"

/* Which keys are real, bools [1 or batch, key], or how many of each text are, [batch]; the documents of queries and of keys,
   [1 or batch, token]; and a whole number: which key is the first query's own. */
enum kind_of_data { NO_DATA, REAL_KEYS, QUERY_IDS, KEY_IDS, OFFSET };

/* The data of a call, without axes where there is none. has_offset: otherwise the last key is the last query's. */
struct data {
    struct dl_tensor tensor[OFFSET];
    i64 has_offset, offset;
};

#define MOST_TEXTS 256 /* that are padded */
#define DL_INT 0       /* the kinds of whole numbers and of bools */
#define DL_BOOL 6

/* Intervals of keys, as `one` is told of them. of_queries: whose memory has to be freed, or NULL. */
struct intervals {
    i64 told[4];
    int32_t first_real[MOST_TEXTS], end_real[MOST_TEXTS];
    int32_t *of_queries;
};

API i64 regard_keys(const uint8_t *cells, i64 rows, i64 keys, i64 apart, int32_t *first_key, int32_t *end_key);

/* whether they are of so many tokens, for each batch index or the same for all */
INLINE int is_for_each(const struct dl_tensor *t, const struct dl_tensor *query, i64 tokens)
{
    if (t->axes != 2 || t->device != query->device || t->shape[1] != tokens || t->strides[1] != 1) return 0;
    return t->shape[0] == 1 || t->shape[0] == query->shape[0];
}

INLINE int is_whole(const struct dl_tensor *t) { return t->kind == DL_INT && t->bits == 64; }

/* Takes a number, of those that must be the same; returns whether it is one that can be. -1 may be an error. */
static int take_offset(struct data *data, void *number)
{
    i64 offset = python.number(number);
    if (offset == -1 || offset <= -FAR || offset >= FAR || (data->has_offset && offset != data->offset)) return 0;
    data->has_offset = 1, data->offset = offset;
    return 1;
}

/* Keys from `start` to before `stop` that are real; returns whether they lie side by side. */
static int find_real(
    const struct dl_tensor *real_keys, const struct dl_tensor *query, i64 keys, i64 start, i64 stop,
    struct intervals *found)
{
    const char *from = real_keys->data + real_keys->offset;
    i64 rows = real_keys->shape[0];
    int32_t *first = found->first_real, *end = found->end_real;
    if (rows > MOST_TEXTS) return 0;
    if (real_keys->kind == DL_BOOL) {
        if (!is_for_each(real_keys, query, keys) || stop - start < 2) return 0;
        i64 side_by_side =
            regard_keys((const uint8_t *)from + start, rows, stop - start, real_keys->strides[0], first, end);
        for (i64 row = 0; row < rows; row++) first[row] += start, end[row] += start;
        return side_by_side;
    }
    if (!is_whole(real_keys) || real_keys->axes != 1 || real_keys->device != query->device) return 0;
    if (rows != query->shape[0]) return 0;
    for (i64 row = 0; row < rows; row++) {
        i64 count = ((const i64 *)from)[row * real_keys->strides[0]];
        if (count < 0 || count > keys) return 0;
        first[row] = 0, end[row] = count;
    }
    return 1;
}

/* The interval of each of so many tokens: those with the same id, which must lie side by side. */
static int find_document(const i64 *id, i64 tokens, int32_t *first, int32_t *end)
{
    for (i64 begin = 0, stop; begin < tokens; begin = stop) {
        for (stop = begin + 1; stop < tokens && id[stop] == id[begin]; stop++) continue;
        if (stop < tokens && id[stop] < id[begin]) return 0; /* that document may come again */
        for (i64 i = begin; i < stop; i++) first[i] = begin, end[i] = stop;
    }
    return 1;
}

/* The same of all texts, for queries that are the keys' own. */
static int find_documents(
    const struct data *data, const struct dl_tensor *query, i64 keys, struct intervals *found)
{
    const struct dl_tensor *ids = data->tensor + QUERY_IDS, *of_keys = data->tensor + KEY_IDS;
    const struct dl_tensor *real_keys = data->tensor + REAL_KEYS;
    if (query->shape[2] != keys || !is_whole(ids) || !is_for_each(ids, query, keys)) return 0;
    if (of_keys->data != ids->data || !is_whole(of_keys) || !is_for_each(of_keys, query, keys)) return 0;
    if (of_keys->shape[0] != ids->shape[0] || of_keys->strides[0] != ids->strides[0]) return 0;
    i64 by_ids = ids->shape[0] > 1, by_padding = real_keys->axes && real_keys->shape[0] > 1; /* others for each text */
    i64 rows = by_ids || by_padding ? query->shape[0] : 1;
    int32_t *first = found->of_queries = malloc(2 * rows * keys * sizeof *first), *end = first + rows * keys;
    if (!first) return 0;
    for (i64 row = 0; row < rows; row++, first += keys, end += keys) {
        const i64 *id = (const i64 *)(ids->data + ids->offset) + (by_ids ? row * ids->strides[0] : 0);
        if (!find_document(id, keys, first, end)) return 0;
        if (!real_keys->axes) continue;
        i64 text = by_padding ? row : 0, first_real = found->first_real[text], end_real = found->end_real[text];
        for (i64 i = 0; i < keys; i++) {
            first[i] = most(first[i], first_real);
            end[i] = most(first[i], least(end[i], end_real));
        }
    }
    found->told[0] = (i64)found->of_queries, found->told[1] = (i64)(found->of_queries + rows * keys);
    found->told[2] = rows > 1 ? keys : 0, found->told[3] = 1;
    return 1;
}

/* Returns whether the data is what the call needs, and the keys that each query sees lie side by side. Keys before `start`
   or from `stop` on are seen by none. */
static int find_intervals(
    const struct data *data, const struct dl_tensor *query, i64 keys, i64 start, i64 stop, struct intervals *found)
{
    const struct dl_tensor *real_keys = data->tensor + REAL_KEYS;
    found->of_queries = NULL;
    if (real_keys->axes && !find_real(real_keys, query, keys, start, stop, found)) return 0;
    if (data->tensor[QUERY_IDS].axes) return find_documents(data, query, keys, found);
    found->told[0] = (i64)found->first_real, found->told[1] = (i64)found->end_real;
    found->told[2] = real_keys->shape[0] > 1, found->told[3] = 0;
    return 1;
}

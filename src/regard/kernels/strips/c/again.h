/* Calls that are like an earlier one, but for their tensors, which are read as Python has them.

   What Python's own code would ask of each tensor, a piece at a time, is asked here at once, by DLPack: an interface of
   plain C, which needs neither torch's headers nor Python's (dmlc/dlpack, dlpack.h of version 1.3). All functions here
   that take tensors are called with Python's lock held, and those that compute release it. */

#pragma once

#include "call.h"

API void regard_forward(struct call *c);
API void regard_backward(struct call *c);
API void regard_finish(struct call *c);

/* DLTensor */
struct dl_tensor {
    char *data;
    int32_t device, number, axes;
    uint8_t kind, bits; /* of its numbers */
    uint16_t lanes;
    i64 *shape, *strides;
    uint64_t offset;
};

/* Functions of torch and of Python, and objects. */
static struct python {
    int (*read)(void *, struct dl_tensor *); /* returns 0, or sets an error */
    void *(*item)(void *, i64);              /* of a tuple */
    i64 (*length)(void *);
    void *(*bytes)(const char *, i64);
    const char *(*text)(void *); /* of bytes */
    void *(*release)(void);
    void (*acquire)(void *);
    void *(*tuple)(i64);
    int (*set_item)(void *, i64, void *);
    void (*keep)(void *);
    void (*drop)(void *);
    void *(*attribute)(void *, void *);
    void *(*call)(void *, void *, void *);
    void *(*type)(void *);
    int (*compare)(void *, void *, int);
    i64 (*number)(void *);
    void *(*new_number)(i64);
    void *(*address)(void *);
    void (*clear)(void);
    void *none, *whole_number, *real_number, *tensor; /* all but the first are types */
    void *like;                                       /* torch.empty_like */
} python;

API void regard_set_python(const struct python *functions) { python = *functions; }

/* A function that Python calls as one of its own, METH_FASTCALL: by ctypes, its arguments would be converted by code that
   leaves the processor's caches between the layers of a model. Returns an object; or NULL, and an error is set. */
#define FOR_PYTHON(name) \
    API void *name(void *self __attribute__((unused)), void *const *argument, i64 count __attribute__((unused)))

static void *kept(void *object) { return python.keep(object), object; }

#define DL_BFLOAT 4 /* the kind of bfloat16 numbers */
#define MOST_AXES 8
#define MOST_DESCRIBED 4
#define MOST_TENSORS 24
#define MOST_OF_ONE 8

/* Reads a tuple of tensors. Returns how many there are; -1 if one has no numbers in strides, and an error is set. */
static i64 read_all(void *tensors, i64 most, struct dl_tensor *t)
{
    i64 count = python.length(tensors);
    for (i64 i = 0; i < least(count, most); i++)
        if (python.read(python.item(tensors, i), t + i)) return -1;
    return count;
}

/* Device, dtype and shape of some tensors, as bytes; none where they are too many. An error is set if a tensor has no
   numbers in strides. The second argument: they are query, key, value and bias of one query. Of the number of keys only
   the magnitude is told; of the values, whether there are as many; of the bias, whether it has a number for each key, or
   one for all. */
FOR_PYTHON(regard_describe)
{
    void *tensors = argument[0];
    i64 words[MOST_DESCRIBED * (MOST_AXES + 2)], n = 0, keys = 0, of_one = python.number(argument[1]);
    i64 tensor_count = python.length(tensors);
    if (tensor_count > MOST_DESCRIBED) return python.bytes(NULL, 0);
    for (i64 i = 0; i < tensor_count; i++) {
        struct dl_tensor t;
        if (python.read(python.item(tensors, i), &t)) return NULL;
        if (t.axes > MOST_AXES) return python.bytes(NULL, 0);
        words[n++] = (i64)t.device << 32 | (uint32_t)t.number;
        words[n++] = (i64)t.axes << 32 | t.kind << 24 | t.bits << 16 | t.lanes;
        for (int axis = 0; axis < t.axes; axis++) words[n++] = t.shape[axis];
        if (!of_one || t.axes != 4) continue;
        if (i == 1) keys = t.shape[2], words[n - 2] = keys ? 64 - __builtin_clzll(keys) : 0;
        if (i == 2) words[n - 2] = t.shape[2] == keys;
        if (i == 3) words[n - 1] = t.shape[3] == 1 ? 1 : t.shape[3] == keys ? 2 : 0;
    }
    return python.bytes((const char *)words, 8 * n);
}

/* How a tensor [batch, head, row, feature] lies, of which one of the words of the call tells where. */
struct lying {
    i64 word, shape[4], stride[4], numbers;
};

/* A pass of an earlier call. tensor: those that are others in each call, of which the first `checked` have to lie as
   they did. Those beyond `count` are the bias tensors of the call. room: numbers that are added up elsewhere, for the
   gradients of query, keys and values. */
struct again {
    struct call call;
    i64 backward, finishes, count, checked, room[3];
    struct lying tensor[MOST_TENSORS];
};

static void lie(struct lying *to, const struct dl_tensor *t)
{
    to->numbers = (i64)t->device << 32 | t->axes << 24 | t->kind << 16 | t->bits;
    for (int axis = 0; axis < 4; axis++) {
        to->shape[axis] = axis < t->axes ? t->shape[axis] : 0;
        to->stride[axis] = axis < t->axes && t->shape[axis] != 1 ? t->strides[axis] : 0; /* of one, any */
    }
}

/* Notes how a tensor lies, at an address; returns None. */
FOR_PYTHON(regard_lie)
{
    struct dl_tensor t;
    if (python.read(argument[1], &t)) return NULL;
    lie(python.address(argument[0]), &t);
    return kept(python.none);
}

enum outcome { DONE, UNLIKE, SUSPECT };

/* The same pass for other tensors. UNLIKE: nothing was computed. SUSPECT: something hidden may have had a part. */
static i64 again(const struct again *known, i64 threads, const struct dl_tensor *tensor, i64 count)
{
    struct call c = known->call;
    char *given[MOST_TENSORS];
    for (i64 i = 0; i < count; i++) {
        const struct dl_tensor *t = tensor + i;
        if (i < known->checked) {
            struct lying l = {.word = known->tensor[i].word};
            lie(&l, t);
            if (memcmp(&l, known->tensor + i, sizeof l)) return UNLIKE;
        }
        char *begin = t->data + t->offset;
        if (i < known->count)
            memcpy((i64 *)&c + known->tensor[i].word, &begin, sizeof begin);
        else
            given[i - known->count] = begin;
    }
    c.given = (const char *const *)given, c.threads = threads;
    void *state = python.release();
    (known->backward ? regard_backward : regard_forward)(&c);
    if (known->finishes && !c.suspect) regard_finish(&c);
    python.acquire(state);
    return c.suspect ? SUSPECT : DONE;
}

/* The same, given the address of what is known, the number of threads, and a tuple of tensors. */
FOR_PYTHON(regard_again)
{
    struct dl_tensor t[MOST_TENSORS];
    i64 tensors = read_all(argument[2], MOST_TENSORS, t);
    if (tensors < 0) return NULL;
    const struct again *known = python.address(argument[0]);
    return python.new_number(tensors > MOST_TENSORS ? UNLIKE : again(known, python.number(argument[1]), t, tensors));
}

/* Keys that a query sees: from its own + low to its own + high, both included, from `since` to before
   `until`, those of its own chunk of so many, and of these every step-th, counted from its own. chunk 0: of all chunks. */
struct alternative {
    i64 low, high, since, until, step, chunk;
};

#define MOST_ALTERNATIVES 4
#define MOST_SPANS 10 /* that so many leave, none of which has a key of another: of the n-th at most n */

/* A call of one strip, of any numbers of queries and keys. Where the keys that a query sees begin and end is counted from
   its own key: the span says it as if query and key of the same number were one another's. A query may see those of
   several alternatives, of which only the last one has a step; of one query, they become spans. What has_... says may be
   there or not in all calls alike. alone: up to how many keys one thread computes it. */
struct one {
    struct call call;
    struct strip strip;
    struct span span;
    struct tile tile;
    i64 alone, has_exact, has_lse, has_sink, alternatives;
    struct alternative alternative[MOST_ALTERNATIVES];
};

/* Which keys any of so many queries sees, of so many, if the first one's own is `ahead`. */
static void seen_of(const struct one *known, i64 queries, i64 keys, i64 ahead, i64 *first, i64 *stop)
{
    *first = least(keys, most(0, ahead + known->span.low));
    *stop = most(*first, least(keys, queries + ahead + known->span.high));
}

/* what is left of a number that may be negative, from 0 on */
INLINE i64 modulo(i64 number, i64 by) { return (number % by + by) % by; }

/* Writes the spans of the alternatives, for a query with this key of its own; returns how many. */
static i64 spans_of(const struct one *known, i64 own, i64 keys, struct span *span)
{
    i64 n = 0;
    for (const struct alternative *p = known->alternative; p < known->alternative + known->alternatives; p++) {
        i64 start = most(0, most(p->since, own + p->low)), stop = least(keys, least(p->until, own + p->high + 1));
        if (p->chunk) {
            i64 chunk = own - modulo(own, p->chunk);
            start = most(start, chunk), stop = least(stop, chunk + p->chunk);
        }
        for (i64 earlier = n; start < stop;) { /* between those of earlier ones, which are side by side */
            i64 end = stop, next = stop;
            for (i64 i = 0; i < earlier; i++)
                if (span[i].start < end && span[i].start + span[i].count > start)
                    end = span[i].start, next = span[i].start + span[i].count;
            i64 first = start + modulo(own - start, p->step);
            i64 count = (end - first + p->step - 1) / p->step;
            if (first < end)
                span[n++] = (struct span){.start = first, .step = p->step, .count = count, .low = -FAR, .high = FAR};
            start = next;
        }
    }
    return n;
}

/* where the key of the first query is, if the last one has the last; of query and key */
INLINE i64 ahead_of(const struct dl_tensor *t)
{
    return t[0].axes == 4 && t[1].axes == 4 ? t[1].shape[2] - t[0].shape[2] : 0;
}

/* Returns whether its features are consecutive. */
static int place(struct tensor *to, const struct dl_tensor *t)
{
    *to = (struct tensor){t->data + t->offset, t->strides[0], t->strides[1], t->strides[2]};
    return t->strides[3] == 1 || t->shape[3] == 1;
}

/* whether there is a number for each, or one for all */
INLINE int fits(i64 numbers, i64 size) { return numbers == 1 || numbers == size; }

/* within: where the first keys that are seen are, where the ends, and how far apart those of batch indices and of queries
   are; NULL: all. seen: which of these, or NULL.
   t: query, key, value, output, then the exact output, lse and sink, and then what is added to the scores, if it is. */
static i64 one(
    const struct one *known, i64 threads, i64 ahead, const i64 *within, const struct mask *seen,
    const struct dl_tensor *t, i64 count)
{
    struct one o = *known;
    struct call *c = &o.call;
    struct span span[MOST_SPANS];
    struct tile tile[MOST_SPANS];
    i64 n = 4, of_all = 0;
    struct tensor *to[] = {&c->query, &c->key, &c->value, &c->output};
    for (int i = 0; i < 4; i++)
        if (t[i].axes != 4 || !place(to[i], t + i)) return UNLIKE;
    i64 queries = t[0].shape[2], keys = t[1].shape[2], first, stop;
    seen_of(known, queries, keys, ahead, &first, &stop);
    c->strip = &o.strip, c->span = span, c->tile = tile;
    c->query_len = o.strip.count = queries, c->key_len = keys;
    o.strip.spans = queries == 1 ? spans_of(&o, ahead, keys, span) : 0;
    if (!o.strip.spans) { /* as without alternatives, or they leave none */
        o.span.start = first, o.span.count = o.alternatives && queries == 1 ? 0 : stop - first;
        o.span.low += ahead - first, o.span.high += ahead - first;
        span[0] = o.span, o.strip.spans = 1;
    }
    for (i64 i = 0; i < o.strip.spans; i++) of_all += span[i].count;
    c->threads = of_all <= o.alone ? 1 : threads;
    if (o.has_exact && !place(&c->exact, t + n++)) return UNLIKE;
    if (o.has_lse) c->lse = (real *)(t[n].data + t[n].offset), n++;
    if (o.has_sink) c->sink = (const real *)(t[n].data + t[n].offset), n++;
    if (within) {
        c->first_key = (const int32_t *)within[0], c->end_key = (const int32_t *)within[1];
        c->keys_batch = within[2], c->keys_query = within[3];
    }
    if (seen) c->seen = *seen;
    if (n < count) { /* where one number serves all, it is read again and again */
        const struct dl_tensor *b = t + n;
        i64 apart[4];
        if (b->axes != 4 || !fits(b->shape[2], queries) || !fits(b->shape[3], keys)) return UNLIKE;
        for (int axis = 0; axis < 4; axis++) apart[axis] = b->shape[axis] > 1 ? b->strides[axis] : 0;
        o.tile.dtype = b->bits > 16 ? OWN : b->kind == DL_BFLOAT ? BFLOAT16 : FLOAT16;
        o.tile.batch = apart[0], o.tile.head = apart[1], o.tile.query = apart[2];
        for (i64 i = 0; i < o.strip.spans; i++) {
            span[i].tile = i, span[i].tiles = 1, tile[i] = o.tile;
            tile[i].numbers = b->data + b->offset + span[i].start * apart[3] * (b->bits / 8);
            tile[i].key = span[i].step * apart[3];
        }
    }
    void *state = python.release();
    regard_forward(c);
    if (c->suspect && (span[0].tiles || queries > 1 || c->seen.words)) { /* a hidden key may have had a part */
        c->careful = 1;
        regard_forward(c);
    }
    python.acquire(state);
    return DONE;
}

/* The same, given the address of what is known, the number of threads, the address of `within` or None, and a tuple of
   tensors. */
FOR_PYTHON(regard_one)
{
    struct dl_tensor t[MOST_OF_ONE];
    i64 tensors = read_all(argument[3], MOST_OF_ONE, t);
    if (tensors < 0) return NULL;
    const struct one *known = python.address(argument[0]);
    const i64 *within = argument[2] == python.none ? NULL : python.address(argument[2]);
    i64 threads = python.number(argument[1]);
    return python.new_number(tensors > MOST_OF_ONE ? UNLIKE : one(known, threads, ahead_of(t), within, NULL, t, tensors));
}

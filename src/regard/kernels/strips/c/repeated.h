/* Calls of which everything but the tensors is as in an earlier one.

   What that takes is noted in Python, once, as a list of steps; here it is looked at in each call. Python's own code for
   the same leaves the processor's caches between the layers of a model, and then takes longer than a short text. */

#pragma once

#include "terms.h"

#define ARGUMENTS 13 /* of a call, from the query to the kernel's name */
#define BIAS 4       /* the places of some of them */
#define SINK 7
#define MOST_STEPS 48
enum { OUTPUT, EXACT, LSE, RESULTS }; /* of which only the first is always there */
#define EQUAL 2 /* Py_EQ */

/* An object that has to be as it was. It is `of`, or if that is NULL what an earlier step found, where the arguments come
   first; of that the attribute `name`, if there is one; and what that returns, if it is called. It has to be `is`, or a
   number equal to it; or of the type `is`, if by_type. */
struct step {
    void *of;
    i64 from;
    void *name;
    i64 calls;
    void *is;
    i64 by_type;
};

/* A tensor that a step found, or that is an argument: how it lies, and its numbers where they have to be the same. Or, of a
   call of any lengths, of which `kind_of_data` it is: any numbers, or any whole number. four_axes: as of `struct data`.
   open: it may have any numbers of columns, and lie in any way. */
struct noted {
    i64 from;
    struct lying lying;
    const char *numbers;
    i64 bytes, data, four_axes, open;
};

/* A call, whose query, key and value have to lie as `three`. It is computed by `pass`, or by `one`, for results that
   `make` makes of the query, by as many threads as `threads` returns; or, if both are NULL, `run` is called with query,
   key, value, sink and bias. The tensors that are told to them after the results are the first `told` of those noted.

   Something learns where `attach` is not NULL: it is called with `alike`, (output, lse, output as it was before it was
   rounded), query, key, value, sink, what is in the tuple `rest`, and the bias if `keeps_bias`, and returns output and lse.
   Where `fix` is not NULL, it is called with what `kept_intervals` made of the data, and returns what is `alike` of this
   call.

   Where `one` computes it, lengths may be others: only their magnitudes are told in `three`, and not how they lie. row:
   NULL, or what is added to scores by the distance of a key from a query: for one query, from the farthest key before it
   to its own; for several, from the farthest key after it to the farthest before. term: what each query sees besides, if
   there are terms; their operands are the data, in the order in which it is noted. */
struct repeated {
    struct lying three[3];
    const struct step *step;
    const struct noted *noted;
    const struct again *pass;
    const struct one *one;
    const struct term *term;
    void *row, *run, *make[RESULTS], *threads, *attach, *alike, *fix, *rest;
    i64 steps, count, told, keeps_bias, terms;
};

INLINE i64 magnitude(i64 n) { return n > 0 ? 64 - __builtin_clzll(n) : 0; }

/* A square stays one. */
static void open_ended(struct lying three[3])
{
    i64 queries = three[0].shape[2], keys = three[1].shape[2];
    three[2].shape[2] = three[2].shape[2] == keys;
    three[1].shape[2] = queries > 1 && queries == keys ? -1 : magnitude(keys);
    three[0].shape[2] = magnitude(queries);
    for (int i = 0; i < 3; i++) memset(three[i].stride, 0, 3 * sizeof(i64));
}

/* Notes how query, key and value lie, at the address of a `repeated`; the second argument: of any lengths. The third is a
   tuple of them. Returns None. */
FOR_PYTHON(regard_lie_open)
{
    struct repeated *r = python.address(argument[0]);
    struct dl_tensor t[3];
    if (read_all(argument[2], 3, t) < 0) return NULL;
    for (i64 i = 0; i < 3; i++) lie(r->three + i, t + i);
    if (python.number(argument[1])) open_ended(r->three);
    return kept(python.none);
}

/* What a function returns; the arguments are its own from then on. NULL: an error is set. */
static void *called(void *function, void *arguments)
{
    void *found = python.call(function, arguments, NULL);
    python.drop(arguments);
    return found;
}

/* of references that are the tuple's from then on */
static void *tuple_of(i64 count, void **item)
{
    void *tuple = python.tuple(count);
    for (i64 i = 0; i < count; i++) python.set_item(tuple, i, item[i]);
    return tuple;
}

static void *instead_of(void *object, void *other) { return python.drop(object), other; }

static int is_as_it_was(const struct step *s, void *x)
{
    if (!s->by_type && x == s->is) return 1;
    void *type = python.type(x), *other = python.type(s->is);
    int is_number = type == python.whole_number || type == python.real_number;
    int same = s->by_type ? type == s->is : is_number && type == other && python.compare(x, s->is, EQUAL) == 1;
    python.drop(type), python.drop(other);
    return same;
}

/* Whether all is as it was. An error, as of an attribute that is not there, says no. data: is read, if there is any. */
static int is_like(const struct repeated *r, void *given, struct data *data)
{
    void *found[ARGUMENTS + MOST_STEPS];
    i64 n = ARGUMENTS, like = 1;
    for (i64 i = 0; i < ARGUMENTS; i++) found[i] = python.item(given, i);
    for (i64 i = 0; like && i < r->steps; i++) {
        const struct step *s = r->step + i;
        void *x = kept(s->of ? s->of : found[s->from]);
        if (s->name) x = instead_of(x, python.attribute(x, s->name));
        if (s->calls && x) x = instead_of(x, called(x, python.tuple(0)));
        if (x) found[n++] = x;
        like = x && is_as_it_was(s, x);
    }
    for (i64 i = 0; like && i < r->count; i++) {
        const struct noted *noted = r->noted + i;
        struct dl_tensor t;
        struct lying l = {0};
        if (noted->data == OFFSET) {
            like = take_offset(data, found[noted->from]);
            continue;
        }
        if (noted->data == NUMBER) {
            i64 number = data->operand[data->operands++].number = python.number(found[noted->from]);
            like = number != -1; /* which may be an error */
            continue;
        }
        if (python.read(found[noted->from], &t)) {
            like = 0;
            break;
        }
        if (noted->data == OPERAND) {
            data->operand[data->operands++].tensor = t;
            continue;
        }
        if (noted->data) {
            struct dl_tensor *known = data->tensor + noted->data; /* bands with an offset of their own have others */
            like = !known->axes || (known->data == t.data && known->offset == t.offset && noted->data == OFFSETS);
            *known = t, data->four_axes |= noted->four_axes;
            continue;
        }
        lie(&l, &t);
        if (noted->open) l.shape[3] = 0, memset(l.stride, 0, sizeof l.stride);
        like = !memcmp(&l, &noted->lying, sizeof l);
        if (like && noted->numbers) like = !memcmp(t.data + t.offset, noted->numbers, noted->bytes);
    }
    while (n > ARGUMENTS) python.drop(found[--n]);
    python.clear();
    return like;
}

/* Most scores that are computed in vain between what several queries see of the alternatives, and cells that are written
   down: of more, it takes less time to leave them out by strips, though these have to be planned. */
#define MOST_IN_VAIN (1 << 18)
#define MOST_CELLS (1 << 17)

/* What several queries see of the alternatives, as cells, which are to be freed; NULL where strips are better. shape: its
   place, and that of strides. */
static uint8_t *cells_of(
    const struct one *known, const struct dl_tensor *query, i64 keys, i64 ahead, struct data *data, i64 shape[8])
{
    i64 queries = query->shape[2], in_vain = 0;
    uint8_t *cells = queries * keys > MOST_CELLS ? NULL : calloc(queries * keys, 1);
    for (i64 i = 0; cells && i < queries; i++) {
        struct span span[MOST_SPANS];
        i64 spans = spans_of(known, ahead + i, keys, span), first = keys, end = 0;
        for (const struct span *s = span; s < span + spans; s++) {
            i64 last = s->start + (s->count - 1) * s->step;
            for (i64 j = s->start; j <= last; j += s->step) cells[i * keys + j] = 1;
            first = least(first, s->start), end = most(end, last + 1), in_vain -= s->count;
        }
        in_vain += most(0, end - first);
    }
    if (query->shape[0] * query->shape[1] * in_vain > MOST_IN_VAIN) free(cells), cells = NULL;
    tell_cells(data, cells, query, (i64[]){1, 1, queries, keys}, shape);
    return cells;
}

/* intervals: an object of them, if they are wanted */
static i64 one_again(
    const struct repeated *r, i64 threads, struct dl_tensor *t, i64 count, struct data *data, void **intervals)
{
    i64 queries = t[0].shape[2], keys = t[1].shape[2], start, stop, shape[4], stride[4], of_cells[8];
    i64 ahead = data->has_offset ? data->offset : ahead_of(t);
    uint8_t *cells = NULL;
    if (r->terms || (queries > 1 && r->one->alternatives)) {
        cells = r->terms ? cells_by_terms(r->term, r->terms, t, keys, ahead, data, of_cells)
                         : cells_of(r->one, t, keys, ahead, data, of_cells);
        if (!cells) return UNLIKE;
    }
    if (r->row) { /* each key's number lies before that of the next, if there is one query; otherwise after it */
        struct dl_tensor *row = t + count++;
        if (python.read(r->row, row)) return free(cells), UNLIKE;
        i64 numbers = row->shape[3], own = queries == 1 ? numbers - keys : numbers / 2 + keys - queries;
        memcpy(shape, row->shape, sizeof shape), memcpy(stride, row->strides, sizeof stride);
        shape[2] = queries, shape[3] = keys;
        stride[2] = 1, stride[3] = queries == 1 ? 1 : -1;
        row->data += own * (row->bits / 8), row->shape = shape, row->strides = stride;
    }
    int has_data = 0;
    for (i64 kind = REAL_KEYS; kind < OFFSET; kind++) has_data |= data->tensor[kind].axes > 0;
    struct intervals found;
    i64 outcome = UNLIKE;
    if (!has_data) {
        see_all(&found, keys);
        outcome = one(r->one, threads, ahead, NULL, NULL, t, count);
    } else {
        struct one open = *r->one;
        if (data->tensor[OFFSETS].axes) open.span.low = -FAR, open.span.high = FAR; /* intervals say it of each text */
        seen_of(&open, queries, keys, ahead, &start, &stop);
        if (find_intervals(data, &r->one->span, t, keys, start, stop, &found))
            outcome = one(&open, threads, ahead, found.told, &found.seen, t, count);
    }
    if (outcome == DONE && r->fix) *intervals = kept_intervals(&found, data, &r->one->span, t, keys);
    free_intervals(&found), free(cells);
    return outcome;
}

/* Output, and lse or None, of what was computed, as a tuple. The results are the tuple's from then on, and the intervals
   are those of `fix`, if there is one. */
static void *returned(const struct repeated *r, void *given, void *result[RESULTS], void *intervals)
{
    if (!r->attach) {
        void *both[] = {result[OUTPUT], result[LSE] ? result[LSE] : kept(python.none)};
        return tuple_of(2, both);
    }
    void *exact = result[EXACT] ? result[EXACT] : kept(result[OUTPUT]);
    void *results[] = {result[OUTPUT], result[LSE], exact};
    i64 rest = python.length(r->rest), count = 6 + rest + (r->keeps_bias != 0);
    void *taken[count];
    taken[0] = !r->fix ? kept(r->alike) : intervals ? called(r->fix, tuple_of(1, &intervals)) : NULL;
    taken[1] = tuple_of(3, results);
    if (!taken[0]) return python.drop(taken[1]), NULL;
    for (i64 i = 0; i < 3; i++) taken[2 + i] = kept(python.item(given, i));
    taken[5] = kept(python.item(given, SINK));
    for (i64 i = 0; i < rest; i++) taken[6 + i] = kept(python.item(r->rest, i));
    if (r->keeps_bias) taken[count - 1] = kept(python.item(given, BIAS));
    return called(r->attach, tuple_of(count, taken));
}

/* The same, into `found`; returns whether it was computed, and nothing hidden may have had a part. */
static int pass_again(
    const struct repeated *r, void *given, const struct dl_tensor *three, struct data *data, void **found)
{
    struct dl_tensor t[3 + RESULTS + MOST_NOTED + 1] = {three[0], three[1], three[2]};
    void *threads = called(r->threads, python.tuple(0)), *result[RESULTS] = {0}, *intervals = NULL;
    i64 outcome = threads ? DONE : UNLIKE, count = 3;
    for (i64 i = 0; i < RESULTS && outcome == DONE; i++) {
        if (!r->make[i]) continue;
        void *query = kept(python.item(given, 0));
        result[i] = called(r->make[i], tuple_of(1, &query));
        if (!result[i] || python.read(result[i], t + count++)) outcome = UNLIKE;
    }
    for (i64 i = 0; i < r->told && outcome == DONE; i++)
        if (python.read(python.item(given, r->noted[i].from), t + count++)) outcome = UNLIKE;
    i64 by = threads ? python.number(threads) : 0;
    if (outcome == DONE) outcome = r->one ? one_again(r, by, t, count, data, &intervals) : again(r->pass, by, t, count);
    if (threads) python.drop(threads);
    if (outcome == DONE) {
        *found = returned(r, given, result, intervals);
        return 1;
    }
    for (i64 i = 0; i < RESULTS; i++)
        if (result[i]) python.drop(result[i]);
    python.clear();
    return 0;
}

static void *run_again(const struct repeated *r, void *given)
{
    void *taken[] = {
        kept(python.item(given, 0)), kept(python.item(given, 1)), kept(python.item(given, 2)),
        kept(python.item(given, SINK)), kept(python.item(given, BIAS)),
    };
    return called(r->run, tuple_of(5, taken));
}

/* Output and lse of a call like one of the table's, as a tuple; None if it is like none of them. Given are a tuple of the
   call's arguments, and the table: a tuple of the address of each, and what keeps it. */
FOR_PYTHON(regard_repeat)
{
    void *given = argument[0], *table = argument[1];
    struct dl_tensor t[3];
    struct lying three[3] = {0}, open[3];
    for (i64 i = 0; i < 3; i++) {
        void *type = python.type(python.item(given, i));
        int is_there = type == python.tensor && !python.read(python.item(given, i), t + i);
        python.drop(type);
        if (!is_there) {
            python.clear();
            return kept(python.none);
        }
        lie(three + i, t + i);
    }
    memcpy(open, three, sizeof open);
    open_ended(open);
    for (i64 i = 0; i < python.length(table); i += 2) {
        const struct repeated *r = python.address(python.item(table, i));
        struct data data = {0};
        if (memcmp(r->one ? open : three, r->three, sizeof three) || !is_like(r, given, &data)) continue;
        if (!r->pass && !r->one) return run_again(r, given);
        void *found;
        if (pass_again(r, given, t, &data, &found)) return found;
    }
    return kept(python.none);
}

enum { SAVED_OUTPUT, SAVED_LSE, SAVED_QUERY, SAVED_KEY, SAVED_VALUE, SAVED_SINK, SAVED_BIASES };

/* Tells a call of the intervals that `kept_intervals` made. */
static void tell_intervals(struct call *c, const char *kept)
{
    const int32_t *size = (const int32_t *)kept, *first = size + SIZES;
    i64 rows = size[0], columns = size[1], batches = size[2], heads = size[3], words = size[4], keys = size[5];
    c->first_key = first, c->end_key = first + rows * columns;
    c->keys_batch = rows > 1 ? columns : 0, c->keys_query = columns > 1;
    if (batches)
        c->seen = (struct mask){
            first + 2 * rows * columns, batches > 1 ? heads * words * keys : 0, heads > 1 ? words * keys : 0,
            words > 1 ? keys : 0, keys > 1};
}

/* The gradients of a call like an earlier one, of query, key, value and sink: given the address of its backward pass, the
   number of threads, a tuple of what was saved of the call, the gradient of the output, and None or what
   `kept_intervals` made. Returns them in a tuple, in the places of what they belong to, with None in all others; and
   None instead of it where they cannot be found so. */
FOR_PYTHON(regard_pull)
{
    struct again known = *(const struct again *)python.address(argument[0]);
    void *saved = argument[2], *grad[4] = {0}, *found = NULL, *sink = python.item(saved, SAVED_SINK);
    i64 threads = python.number(argument[1]), tensors = python.length(saved), n = 0;
    void *checked[] = {
        python.item(saved, SAVED_QUERY), python.item(saved, SAVED_KEY), python.item(saved, SAVED_VALUE),
        python.item(saved, SAVED_OUTPUT), argument[3], python.item(saved, SAVED_LSE),
    };
    struct dl_tensor t[MOST_TENSORS];
    char *room[3] = {0};
    int fails = threads != known.call.threads || known.count + tensors - SAVED_BIASES > MOST_TENSORS;
    for (int i = 0; i < 6 && !fails; i++) fails = python.read(checked[i], t + n++);
    for (int i = 0; i < 3 && !fails; i++) {
        void *like = kept(checked[i]);
        grad[i] = called(python.like, tuple_of(1, &like));
        fails = !grad[i] || python.read(grad[i], t + n++);
    }
    for (int i = 0; i < 3 && !fails; i++) {
        if (!known.room[i]) continue;
        room[i] = malloc(known.room[i] * sizeof(real));
        t[n++] = (struct dl_tensor){.data = room[i]}, fails = !room[i];
    }
    if (sink != python.none && !fails) {
        void *like = kept(sink);
        grad[3] = called(python.like, tuple_of(1, &like));
        fails = !grad[3] || python.read(grad[3], t + n++) || python.read(sink, t + n++);
    }
    for (i64 i = SAVED_BIASES; i < tensors && known.call.given && !fails; i++)
        fails = python.read(python.item(saved, i), t + n++);
    if (argument[4] != python.none) tell_intervals(&known.call, python.text(argument[4]));
    if (!fails && again(&known, threads, t, n) == DONE) {
        found = python.tuple(tensors);
        for (i64 i = 0; i < tensors; i++) {
            void *of_it = i >= SAVED_QUERY && i <= SAVED_SINK ? grad[i - SAVED_QUERY] : NULL;
            python.set_item(found, i, kept(of_it ? of_it : python.none));
        }
    }
    for (int i = 0; i < 4; i++)
        if (grad[i]) python.drop(grad[i]);
    for (int i = 0; i < 3; i++) free(room[i]);
    if (!found) python.clear();
    return found ? found : kept(python.none);
}

/* Calls of which everything but the tensors is as in an earlier one.

   What that takes is noted in Python, once, as a list of steps; here it is looked at in each call. Python's own code for
   the same leaves the processor's caches between the layers of a model, and then takes longer than a short text. */

#pragma once

#include "again.h"

#define ARGUMENTS 13 /* of a call, from the query to the kernel's name */
#define MOST_STEPS 48
#define MOST_NOTED 8
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

/* A tensor that a step found, or that is an argument: how it lies, and its numbers where they have to be the same. */
struct noted {
    i64 from;
    struct lying lying;
    const char *numbers;
    i64 bytes;
};

/* A call. pass: what computes it, for an output like the query that `make_output` makes, by as many threads as `threads`
   returns; or NULL, and `run` is called with query, key, value, sink and bias. The tensors that are told to `pass` after
   the output are the first `told` of those noted. */
struct repeated {
    struct lying three[3];
    const struct step *step;
    const struct noted *noted;
    const struct again *pass;
    void *run, *make_output, *threads;
    i64 steps, count, told;
};

static void *called(void *function, void *arguments) /* NULL: an error is set */
{
    void *none = arguments ? NULL : python.tuple(0);
    void *found = python.call(function, arguments ? arguments : none, NULL);
    if (none) python.drop(none);
    return found;
}

/* of references that are the tuple's from then on */
static void *tuple_of(i64 count, void **item)
{
    void *tuple = python.tuple(count);
    for (i64 i = 0; i < count; i++) python.set_item(tuple, i, item[i]);
    return tuple;
}

static void *kept(void *object) { return python.keep(object), object; }

static int is_as_it_was(const struct step *s, void *x)
{
    if (!s->by_type && x == s->is) return 1;
    void *type = python.type(x), *other = python.type(s->is);
    int is_number = type == python.whole_number || type == python.real_number;
    int same = s->by_type ? type == s->is : is_number && type == other && python.compare(x, s->is, EQUAL) == 1;
    python.drop(type), python.drop(other);
    return same;
}

/* Whether all is as it was. An error, as of an attribute that is not there, says no. */
static int is_like(const struct repeated *r, void *given)
{
    void *found[ARGUMENTS + MOST_STEPS];
    i64 n = ARGUMENTS, like = 1;
    for (i64 i = 0; i < ARGUMENTS; i++) found[i] = python.item(given, i);
    for (i64 i = 0; like && i < r->steps; i++) {
        const struct step *s = r->step + i;
        void *x = kept(s->of ? s->of : found[s->from]);
        for (int then = 0; x && then < 2; then++) {
            if (then ? !s->calls : !s->name) continue;
            void *next = then ? called(x, NULL) : python.attribute(x, s->name);
            python.drop(x);
            x = next;
        }
        if (x) found[n++] = x;
        like = x && is_as_it_was(s, x);
    }
    for (i64 i = 0; like && i < r->count; i++) {
        const struct noted *noted = r->noted + i;
        struct dl_tensor t;
        struct lying l = {0};
        if (python.read(found[noted->from], &t)) {
            like = 0;
            break;
        }
        lie(&l, &t);
        like = !memcmp(&l, &noted->lying, sizeof l);
        if (like && noted->numbers) like = !memcmp(t.data + t.offset, noted->numbers, noted->bytes);
    }
    while (n > ARGUMENTS) python.drop(found[--n]);
    python.clear();
    return like;
}

/* Output and None, as a tuple; NULL where nothing was computed, or something hidden may have had a part. */
static void *pass_again(const struct repeated *r, void *given, const struct dl_tensor *three)
{
    struct dl_tensor t[4 + MOST_NOTED] = {three[0], three[1], three[2]};
    void *query = kept(python.item(given, 0)), *arguments = tuple_of(1, &query);
    void *results[2] = {called(r->make_output, arguments), NULL}, *threads = called(r->threads, NULL);
    i64 outcome = results[0] && threads && !python.read(results[0], t + 3) ? DONE : UNLIKE;
    for (i64 i = 0; i < r->told && outcome == DONE; i++)
        if (python.read(python.item(given, r->noted[i].from), t + 4 + i)) outcome = UNLIKE;
    if (outcome == DONE) outcome = again(r->pass, python.number(threads), t, 4 + r->told);
    python.drop(arguments);
    if (threads) python.drop(threads);
    if (outcome == DONE) {
        results[1] = kept(python.none);
        return tuple_of(2, results);
    }
    if (results[0]) python.drop(results[0]);
    python.clear();
    return NULL;
}

static void *run_again(const struct repeated *r, void *given)
{
    void *taken[] = {
        kept(python.item(given, 0)), kept(python.item(given, 1)), kept(python.item(given, 2)),
        kept(python.item(given, 7)), kept(python.item(given, 4)),
    };
    void *arguments = tuple_of(5, taken), *found = called(r->run, arguments);
    python.drop(arguments);
    return found;
}

/* Output and lse of a call like one of the table's, as a tuple; None if it is like none of them. table: a tuple of the
   address of each, and what keeps it. */
API void *regard_repeat(void *given, void *table)
{
    struct dl_tensor t[3];
    struct lying three[3] = {0};
    for (i64 i = 0; i < 3; i++) {
        if (python.read(python.item(given, i), t + i)) {
            python.clear();
            return kept(python.none);
        }
        lie(three + i, t + i);
    }
    for (i64 i = 0; i < python.length(table); i += 2) {
        const struct repeated *r = python.address(python.item(table, i));
        if (memcmp(three, r->three, sizeof three) || !is_like(r, given)) continue;
        if (!r->pass) return run_again(r, given);
        void *found = pass_again(r, given, t);
        return found ? found : kept(python.none);
    }
    return kept(python.none);
}

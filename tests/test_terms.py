"""Masks put together by &, | and ~ of data that is another in each call: the library finds out what they show, and
functions are asked once for all of their cells. Nothing is planned anew."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import needs_library
from regard import (
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    Mask,
    Padding,
    Prefix,
    ShapeError,
    Strided,
    Where,
    Window,
    any_length,
    attention,
    attention_with_lse,
    checked,
    functional,
)
from regard.indexing import lookup
from regard.kernels.strips import intervals
from regard.kernels.strips.terms import MOST_DEPTH, Term, terms_of
from regard.validation import check_call

pytestmark = needs_library

SIZE = 16


@pytest.fixture
def planned(monkeypatch) -> list[Mask]:
    """The masks of calls of the library that were not like an earlier one."""
    masks, real = [], functional._first

    def first(form, call, given):
        if given[-1] == "native":
            masks.append(given[3])
        return real(form, call, given)

    monkeypatch.setattr(functional, "_first", first)
    return masks


class Drawn:
    """A call of random sizes, and random numbers for it."""

    def __init__(self, seed: int) -> None:
        self.of, self.draw = random.Random(seed), torch.Generator().manual_seed(seed)
        self.batch, self.heads, self.keys = self.of.randint(1, 3), self.of.randint(1, 3), self.of.randint(2, 90)
        self.queries = self.of.choice([self.keys, self.keys, 1, 2, self.of.randint(1, self.keys)])

    def tensors(self, dtype: torch.dtype, *, learn: bool = False) -> list[Tensor]:
        return [
            torch.randn(self.batch, self.heads, length, SIZE, generator=self.draw).to(dtype).requires_grad_(learn)
            for length in (self.queries, self.keys, self.keys)
        ]

    def whole(self, least: int, most: int, *shape: int) -> Tensor:
        return torch.randint(least, most, shape, generator=self.draw)

    def bools(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.draw) < 0.6

    def leaf(self) -> Callable[[], Mask]:
        """A function that makes a mask of one kind, with other data each time."""
        of, batch, heads, queries, keys = self.of, self.batch, self.heads, self.queries, self.keys
        some, size, texts = of.randint(-3, keys), of.randint(1, 20), of.choice([1, batch])
        before, after = of.choice([None, 3, -2]), of.choice([None, 5, -1])
        rows, columns = of.choice([1, heads]), of.choice([1, queries])
        makes = [
            Causal, lambda: Window(size), lambda: Band(before, after), lambda: Chunk(size), lambda: Strided(size),
            lambda: Prefix(of.randint(0, keys)), lambda: Causal(offset=of.randint(-3, keys)),
            lambda: Chunk(size, offset=some), lambda: Padding(self.whole(0, keys + 1, batch)),
            lambda: Padding(self.bools(texts, keys)), lambda: Prefix(self.whole(0, keys, batch)),
            lambda: Window(size, offset=self.whole(-3, keys, batch)),
            lambda: Strided(size, offset=self.whole(0, keys, batch)),
            lambda: Dense(self.bools(texts, rows, columns, keys)),
            lambda: Document(self.whole(0, 3, texts, queries), self.whole(0, 3, batch, keys)),
        ]  # fmt: skip
        if queries == keys:
            makes += [
                lambda: Document(self.whole(0, 3, texts, keys)),
                lambda: Document(self.whole(0, 4, batch, keys).sort(1).values),
            ]
        return of.choice(makes)

    def mask(self, depth: int) -> Callable[[], Mask]:
        """The same, of several that are joined."""
        if depth == 0 or self.of.random() < 0.2:
            return self.leaf()
        kind, left, right = self.of.random(), self.mask(depth - 1), self.mask(depth - 1)
        if kind < 0.4:
            return lambda: left() & right()
        return (lambda: left() | right()) if kind < 0.85 else (lambda: ~left())


def results_of(three: list[Tensor], weights: Tensor | None, **given) -> list[Tensor]:
    """Output and lse, and the gradients of query, key and value, if there are weights."""
    output, lse = attention_with_lse(*three, **given)
    grads = () if weights is None else torch.autograd.grad(output, three, weights.to(output.dtype))
    return [output, lse, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(60))
def test_any_mask_that_is_joined_shows_what_its_parts_say(seed, dtype):
    drawn = Drawn(seed)
    learn, make = seed % 2 == 0, drawn.mask(3)
    for _ in range(3):
        three, mask = drawn.tensors(dtype, learn=learn), make()
        weights = torch.randn(three[0].shape, generator=drawn.draw) if learn else None
        found = results_of(three, weights, mask=mask, kernel="native")
        exact = [part.detach().double().requires_grad_(learn) for part in three]
        right = results_of(exact, weights, mask=mask, kernel="reference")
        error = 2e-5 if dtype is torch.float32 else 3e-2
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())
            one, other = one.double().nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
            assert (one - other).norm() <= error * (1 + other.norm())


JOINED = {
    "documents or a prefix": lambda n, draw: Document(ids(n, draw)) | Prefix(n // 8),
    "in front of it or a prefix of each text": lambda n, draw: Causal() | Prefix(lengths(n, draw) // 2),
    "other documents": lambda n, draw: ~Document(ids(n, draw)),
    "near, or in the document": lambda n, draw: Causal() & (Window(5) | Document(ids(n, draw))),
    "padded twice": lambda n, draw: Padding(lengths(n, draw)) & Padding(torch.rand(2, n, generator=draw) < 0.7),
    "cells or near": lambda n, draw: Dense(torch.rand(2, 1, n, n, generator=draw) < 0.3) | Window(3),
    "cells of all texts or near": lambda n, draw: (
        Dense(torch.rand(n, n, generator=draw) < 0.3) | Padding(lengths(n, draw)) & Window(3)
    ),
    "places or a prefix": lambda n, draw: Causal(offset=lengths(n, draw) // 3) | Prefix(2),
    "in a document, and in a chunk or not padded": lambda n, draw: (
        Document(ids(n, draw)) & (Chunk(7, offset=n // 3) | Padding(lengths(n, draw)))
    ),
}  # fmt: skip


def ids(n: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (2, n), generator=draw).sort(1).values


def lengths(n: int, draw: torch.Generator) -> Tensor:
    return torch.randint(n // 2, n + 1, (2,), generator=draw)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", JOINED)
def test_it_is_planned_once_for_any_data_and_lengths_of_the_same_magnitude(kind, learn, planned):
    draw = torch.Generator().manual_seed(0)
    for n in (40, 33, 63, 50, 50):
        three = [torch.randn(2, 2, n, SIZE, generator=draw).requires_grad_(learn) for _ in range(3)]
        mask, weights = JOINED[kind](n, draw), torch.randn(2, 2, n, SIZE, generator=draw) if learn else None
        found = results_of(three, weights, mask=mask, kernel="native")
        exact = [part.detach().double().requires_grad_(learn) for part in three]
        for one, other in zip(found, results_of(exact, weights, mask=mask, kernel="reference"), strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
        own = functional.run(check_call("test", *three, mask, None, None, None, None, None, 0.0, None, True), "native")
        assert torch.equal(own[0], found[0])  # to the last bit
        assert torch.equal(own[1], found[1])
    assert len(planned) == 1


@pytest.mark.parametrize(
    "mask",
    [
        Document(torch.zeros(2, 39, dtype=torch.long)) | Prefix(3),
        Document(torch.zeros(3, 40, dtype=torch.long)) | Prefix(3),
        Document(torch.zeros(2, 40, dtype=torch.long)) | Prefix(torch.tensor([1, 2, 3])),
        Causal() | Padding(torch.ones(2, 39, dtype=torch.bool)),
        Causal() | Padding([41, 2]),
        Causal() | Dense(torch.ones(2, 1, 40, 39, dtype=torch.bool)),
        Causal() | Dense(torch.ones(2, 3, 40, 40, dtype=torch.bool)),
        Causal() | Dense(torch.ones(2, 40, 40, dtype=torch.bool)),
    ],
    ids=repr,
)
def test_operands_that_do_not_fit_are_refused_whatever_came_before(mask):
    draw = torch.Generator().manual_seed(0)
    three = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)]
    fitting = [
        Document(ids(40, draw)) | Prefix(3), Document(ids(40, draw)) | Prefix(lengths(40, draw)),
        Causal() | Padding(torch.ones(2, 40, dtype=torch.bool)), Causal() | Padding([4, 2]),
        Causal() | Dense(torch.ones(2, 1, 40, 40, dtype=torch.bool)),
        Causal() | Dense(torch.ones(40, 40, dtype=torch.bool)),
    ]  # fmt: skip
    for one in fitting * 2:
        attention(*three, mask=one, kernel="native")
    with pytest.raises(ShapeError):
        attention(*three, mask=mask, kernel="native")


def test_whole_numbers_that_are_operands_may_be_others(planned):
    draw = torch.Generator().manual_seed(0)
    three = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)]
    for n in (3, 20, 0, 40, 1000):
        mask = Document(ids(40, draw)) | Prefix(n)
        found = attention(*three, mask=mask, kernel="native")
        expected = by_formula(three, mask)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    assert len(planned) == 1
    for size in (5, 6, 9):  # of which there is one for each
        mask = Document(ids(40, draw)) | Window(size)
        found = attention(*three, mask=mask, kernel="native")
        torch.testing.assert_close(found.double(), by_formula(three, mask), atol=2e-5, rtol=2e-5)
    assert len(planned) == 1 + 3


def by_formula(three: list[Tensor], mask: Mask) -> Tensor:
    """The output in float64."""
    return attention(*(part.double() for part in three), mask=mask, kernel="reference")


def test_a_mask_too_deep_for_the_stack_is_planned(planned):
    draw = torch.Generator().manual_seed(0)
    three = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)]

    def deep(levels: int) -> Mask:
        mask = Document(ids(40, draw))
        for level in range(levels):
            mask = Prefix(level) & (Window(9) | mask) if level % 2 else Window(3) | mask & Padding(lengths(40, draw))
        return Causal() | mask

    assert terms_of(deep(3)) is not None
    assert terms_of(deep(20)) is None
    for _ in range(3):
        mask = deep(20)
        found = attention(*three, mask=mask, kernel="native")
        torch.testing.assert_close(found.double(), by_formula(three, mask), atol=2e-5, rtol=2e-5)
    assert len(planned) == 3


def test_terms_are_in_the_order_of_the_masks_they_are_of():
    draw = torch.Generator().manual_seed(0)
    mask = Causal() & (Document(ids(9, draw)) | ~Prefix(4))
    kinds = [term.kind for term in terms_of(mask)]
    assert kinds == [0, 4, 1, 9, 8, 7]
    assert terms_of(mask)[1] == Term(4, ((0, 0), (1, 0)))
    assert terms_of(mask)[2] == Term(1, ((2, 0),))
    assert terms_of(Where(lambda batch, head, query, key: query == key)) is None
    assert MOST_DEPTH == 8


# --- functions --------------------------------------------------------------------------------------------------------


def by_function(documents: Tensor) -> Where:
    return Where(lambda batch, head, query, key: documents[batch, query] == documents[batch, key])


class SameTurn(Mask):
    """Tokens with the same number."""

    axes = {"turns": ("batch", "key_len")}  # noqa: RUF012

    def __init__(self, turns: Tensor) -> None:
        self.turns = turns

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return lookup(self.turns, batch, query) == lookup(self.turns, batch, key)


FUNCTIONS = {
    "a function": by_function,
    "one of heads": lambda documents: Where(
        lambda batch, head, query, key: (documents[batch, query] == documents[batch, key]) | (head == 0)
    ),
    "in a function, before": lambda documents: Causal() & by_function(documents),
    "in no function, or near": lambda documents: ~by_function(documents) | Window(4),
    "in a function, padded": lambda documents: by_function(documents) & Padding(documents == 1),
    "a mask of one's own": SameTurn,
    "one of one's own, or near": lambda documents: SameTurn(documents) | Window(4),
}


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_that_is_another_in_each_call_is_asked_once_and_not_planned(kind, learn, planned):
    draw = torch.Generator().manual_seed(0)
    for n in (40, 33, 63, 50):
        three = [torch.randn(2, 2, n, SIZE, generator=draw).requires_grad_(learn) for _ in range(3)]
        mask, weights = FUNCTIONS[kind](ids(n, draw)), torch.randn(2, 2, n, SIZE, generator=draw) if learn else None
        found = results_of(three, weights, mask=mask, kernel="native")
        own = functional.run(check_call("test", *three, mask, None, None, None, None, None, 0.0, None, True), "native")
        assert torch.equal(own[0], found[0])  # to the last bit
        exact = [part.detach().double().requires_grad_(learn) for part in three]
        for one, other in zip(found, results_of(exact, weights, mask=mask, kernel="reference"), strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
    assert len(planned) == 1


def test_a_function_that_stays_is_known_from_its_second_call_on(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    three, mask = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)], by_function(ids(40, draw))
    outputs = [attention(*three, mask=mask, kernel="native") for _ in range(3)]
    monkeypatch.setattr(any_length, "with_cells", None)  # it is not asked any more
    monkeypatch.setattr(intervals, "cells_of", None)
    outputs.append(attention(*three, mask=mask, kernel="native"))
    assert all(torch.equal(outputs[0], output) for output in outputs)


def test_a_function_whose_answers_change_is_asked_in_every_call():
    draw, shows = torch.Generator().manual_seed(0), [True]
    three = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)]
    mask = Where(lambda batch, head, query, key: (key <= query) | torch.tensor(shows[0]))
    for answer in (True, False, False, True):
        shows[0] = answer
        expected = attention(*three, mask=None if answer else Causal(), kernel="native")
        torch.testing.assert_close(attention(*three, mask=mask, kernel="native"), expected, atol=2e-6, rtol=2e-6)


def test_what_a_function_does_wrong_is_told_as_ever():
    three = [torch.randn(2, 2, 40, SIZE) for _ in range(3)]

    def broken(batch, head, query, key):
        raise KeyError("mine")

    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            attention(*three, mask=Where(broken))
        with pytest.raises(TypeError, match="must return a bool tensor"):
            attention(*three, mask=Where(lambda batch, head, query, key: query + key))
        with pytest.raises(ShapeError, match="does not broadcast"):
            attention(*three, mask=Where(lambda batch, head, query, key: torch.ones(3, dtype=torch.bool)))
        with pytest.raises(TypeError, match="for and, or, not"):
            attention(*three, mask=Where(lambda batch, head, query, key: query > key and key > 0))


def test_nothing_of_a_call_under_a_function_is_kept_but_a_number():
    draw = torch.Generator().manual_seed(0)
    three = [torch.randn(2, 2, 40, SIZE, generator=draw) for _ in range(3)]
    for _ in range(2 * checked.MAX_ASKED):
        attention(*three, mask=by_function(ids(40, draw)), kernel="native")
    assert 0 < len(checked._ASKED) <= checked.MAX_ASKED
    assert all(type(known) is int for known in checked._ASKED)

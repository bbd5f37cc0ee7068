"""Functions as masks: whose answers are kept, and that what they follow from is looked at in every call."""

import random
from functools import partial

import pytest
import torch

from comparing import assert_close
from regard import Causal, Where, attention

IDS = torch.arange(12) // 5
WIDTH = 3
LIST = [3]


def causal(batch, head, query, key):
    return key <= query


def within(width):
    return lambda batch, head, query, key: (query - key).abs() < width


def same_document(ids):
    def alike(batch, head, query, key):
        inside = ids[query] == ids[key]
        return inside & causal(batch, head, query, key)

    return alike


def recursive(batch, head, query, key):
    return recursive(batch, head, query, key)


def counting(batch, head, query, key):
    LIST.append(1)
    return key <= query


KNOWN = {
    "positions": causal,
    "a number": within(4),
    "a tensor": same_document(IDS),
    "a global number": lambda batch, head, query, key: query - key < WIDTH,
    "torch": lambda batch, head, query, key: torch.where(head > 0, key > 2, key < 5),
    "either": lambda batch, head, query, key: (key < query) if WIDTH else (key > query),
    "defaults": lambda batch, head, query, key, width=2: query - key < width,
}
UNKNOWN = {
    "a list": lambda batch, head, query, key: key < LIST[0],
    "at random": lambda batch, head, query, key: torch.rand(key.shape) < 0.5,
    "at random, by a method": lambda batch, head, query, key: key.float().uniform_() < 0.5,
    "another module": lambda batch, head, query, key: key < random.randint(1, 9),
    "what is written": lambda batch, head, query, key: key.add_(1) < query,
    "a loop": lambda batch, head, query, key: next(key < n for n in range(3)),
    "what it does beside": counting,
    "an object": partial(causal),
    "itself": recursive,
    "a parameter": same_document(torch.nn.Parameter(torch.zeros(12))),
    "a small part of much": same_document(torch.zeros(1 << 21, dtype=torch.int64)[:12]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_function_that_only_compares_is_known_again(name):
    structure = Where(KNOWN[name]).structure()
    assert structure is not None
    assert structure == Where(KNOWN[name]).structure()
    assert [other for other, fn in KNOWN.items() if Where(fn).structure() == structure] == [name]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_function_that_may_answer_otherwise_is_not(name):
    assert Where(UNKNOWN[name]).structure() is None


def test_two_functions_with_the_same_code_and_the_same_values_are_one():
    assert Where(within(4)).structure() == Where(within(4)).structure()
    assert Where(within(4)).structure() != Where(within(5)).structure()
    assert Where(within(4)).structure() != Where(within(4.0)).structure()


def test_an_answer_is_kept_until_what_it_follows_from_changes(monkeypatch):
    asked = []
    rule = Where.rule
    monkeypatch.setattr(Where, "rule", lambda mask, *where: (asked.append(1), rule(mask, *where))[1])
    torch.manual_seed(0)
    tensors, ids, reach = torch.randn(3, 1, 2, 12, 4), IDS.clone(), 3

    def near(batch, head, query, key):
        return (ids[query] == ids[key]) & (query - key < reach) & (key - WIDTH <= query)

    mask = Where(near) & Causal()

    def right():
        before = len(asked)
        found = attention(*tensors, mask=mask)
        new = len(asked) - before
        assert_close(found, attention(*tensors, mask=mask, kernel="reference"))
        return new

    assert right() > 0
    assert right() == 0
    ids[5:] = 0
    assert right() > 0
    reach = 2
    assert right() > 0
    monkeypatch.setitem(globals(), "WIDTH", -1)
    assert right() > 0
    assert right() == 0
    near.__code__ = causal.__code__.replace(co_freevars=near.__code__.co_freevars)
    assert right() > 0

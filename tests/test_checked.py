"""A call like the one before is not checked again, and any other is: nothing that is remembered can be wrong."""

import gc
import itertools
import sys
import warnings
import weakref

import pytest
import torch

import regard.functional
from cases import ABSENT, ON_A_CPU, in_threads, needs_library
from comparing import assert_close
from regard import checked, kernels, one_query
from regard.biases import Alibi, Bias, RelativeBias
from regard.functional import attention, attention_with_lse
from regard.kernels import hidden
from regard.kernels.strips import binding
from regard.masks import Band, Causal, Dense, Document, Mask, Padding, Strided, Where, Window
from regard.shapes import Grid, LayoutWarning, ShapeError

MASKS = [
    None, Causal(), Causal() & Window(3), ~Window(2), Padding([4, 7]), Document.from_lengths([3, 4]),
    Causal() & Padding(torch.arange(7) >= torch.tensor([[2], [0]])), Dense(torch.eye(7, dtype=torch.bool)),
]  # fmt: skip


def heads(batch=2, heads=4, length=7, size=8, kv_heads=2, dtype=torch.float32):
    return tuple(torch.randn(batch, h, length, size, dtype=dtype) for h in (heads, kv_heads, kv_heads))


@pytest.fixture
def checks(monkeypatch):
    """What `check_call` was asked, call after call."""
    asked: list[tuple[object, ...]] = []
    check = regard.functional.check_call
    for module in (regard.functional, one_query):
        monkeypatch.setattr(module, "check_call", lambda *given: (asked.append(given), check(*given))[1])
    monkeypatch.setattr(one_query, "_KNOWN", {})
    return asked


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("parts", [{}, {"scale": 0.3}, {"softcap": 2.0}, {"kernel": "strips"}], ids=repr)
def test_a_call_like_the_one_before_is_checked_once_and_computed_anew(checks, mask, parts):
    for _ in range(3):
        given = heads()
        expected = attention_with_lse(*given, mask=mask, **{**parts, "kernel": "reference"})
        assert_close(attention(*given, mask=mask, **parts), expected.output)
        assert_close(attention_with_lse(*given, mask=mask, **parts).lse, expected.lse)
    assert len(checks) == 3


@pytest.mark.parametrize("mask", [Causal() & Window(8), Causal() & (Window(8) | Strided(2000))], ids=repr)
def test_a_call_of_many_scores_of_which_few_are_computed_is_checked_once(checks, mask):
    three = torch.randn(3, 1, 1, 12_000, 4)
    first = attention(*three, mask=mask)
    for _ in range(2):
        assert torch.equal(attention(*three, mask=mask), first)
    assert len(checks) == 1


LAID = {
    "heads within tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "heads by themselves": lambda t: t.clone(),
    "parts of one projection": lambda t: torch.cat([t, t, t], dim=3)[..., : t.shape[3]],
    "features apart": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "features before tokens": lambda t: t.mT.contiguous().mT,
    "batch indices alike": lambda t: t[:1].expand_as(t),
    "a negative view": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("sizes", [(8, 8), (8, 24), (16, 16), (1, 1)], ids=repr)
@pytest.mark.parametrize("bias", [None, Alibi(4)], ids=repr)
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_calls_alike_may_lie_otherwise_and_hide_what_is_no_number(mask, bias, sizes):
    holes = Dense((torch.arange(7) != 2) & (torch.arange(7) != 3) & torch.ones(7, 7, dtype=torch.bool))
    hidden = holes if mask is None else mask & holes
    for laid in LAID.values():
        for mask_of_call, broken in ((mask, 0.0), (hidden, 0.0), (hidden, torch.nan)):
            query, key, _ = heads(size=sizes[0])
            value = torch.randn(2, 2, 7, sizes[1])
            key[:, :, 2] += broken
            value[:, :, 3] += broken
            given = [laid(tensor) for tensor in (query, key, value)]
            more = {"mask": mask_of_call, "bias": bias, "sink": torch.randn(4)}
            expected = attention_with_lse(*given, **more, kernel="reference")
            found = attention_with_lse(*given, **more)
            assert_close(found.output, expected.output)
            assert_close(found.lse, expected.lse)
            assert_close(attention(*given, **more), expected.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (8, 24)], ids=repr)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "bias", [None, Alibi(4), torch.linspace(-1, 1, 49).view(1, 1, 7, 7)], ids=["", "ALiBi", "table"]
)
@pytest.mark.parametrize("mask", [None, MASKS[2], MASKS[6], MASKS[7]], ids=repr)
def test_gradients_of_calls_alike_are_those_of_what_each_is_given(mask, bias, batch, sizes, dtype):
    mask = mask if batch == 2 or mask is not MASKS[6] else Padding([4] * batch)
    holes = Dense((torch.arange(7) != 2) & (torch.arange(7) != 3) & torch.ones(7, 7, dtype=torch.bool))
    hidden = holes if mask is None else mask & holes
    for laid, with_lse in itertools.product(LAID.values(), (False, True)):
        for mask_of_call, broken in ((mask, 0.0), (hidden, 0.0), (hidden, torch.nan)):
            query, key, _ = heads(batch=batch, size=sizes[0], dtype=dtype)
            value = torch.randn(batch, 2, 7, sizes[1], dtype=dtype)
            key[:, :, 2] += broken
            value[:, :, 3] += broken
            leaves = [laid(tensor).detach().requires_grad_() for tensor in (query, key, value)]
            sink, grad_lse = torch.randn(4).requires_grad_(), torch.randn(batch, 4, 7)
            grad = laid(torch.randn(batch, 4, 7, sizes[1], dtype=dtype))
            found = []
            for kernel in ("reference", "strips" if ABSENT else "native"):
                output, lse = attention_with_lse(*leaves, mask=mask_of_call, bias=bias, sink=sink, kernel=kernel)
                ends, given = [output], [grad]
                if with_lse:
                    ends.append(lse)
                    given.append(grad_lse.to(lse.dtype))
                found.append(torch.autograd.grad(ends, (*leaves, sink), given))
            for right, own in zip(*found, strict=True):
                assert_close(own, right, tolerance=4e-2 if dtype is torch.bfloat16 else None)


REAL = torch.arange(130) >= torch.tensor([[3], [70]])
OF_ONE = {
    "nothing": lambda n: {},
    "softcap": lambda n: {"softcap": 2.0},
    "Causal": lambda n: {"mask": Causal()},
    "a window": lambda n: {"mask": Causal() & Window(9)},
    "padding": lambda n: {"mask": Causal() & Padding(REAL[:, :n])},
    "padding in a window": lambda n: {"mask": Causal() & Window(20) & Padding(REAL[:, :n]), "sink": torch.randn(4)},
    "padding at the end": lambda n: {"mask": Padding([n, n // 2])},
    "at random": lambda n: {"mask": Dense(torch.rand(2, 4, 1, n) < 0.5)},
    "a text without a key": lambda n: {"mask": Padding([n, 0]) & Window(5)},
    "documents": lambda n: {"mask": Document(torch.ones(2, 1, dtype=torch.int64), torch.arange(n).expand(2, n) // 50)},
    "Alibi": lambda n: {"bias": Alibi(4), "mask": Causal()},
    "Alibi twice, padding": lambda n: {"bias": Alibi(4) + Alibi(slopes=torch.ones(4)), "mask": Padding(REAL[:, :n])},
    "Alibi from the first": lambda n: {"bias": Alibi(4, offset=0)},
    "buckets": lambda n: {"bias": RelativeBias(TABLE), "mask": Causal() & Window(30)},
    "a bias of its own": lambda n: {"bias": OfPlaces()},
    "a tensor": lambda n: {"bias": torch.randn(2, 1, 1, n)},
}
TABLE = torch.randn(8, 4)


class OfPlaces(Bias):
    of_distance = True

    def rule(self, batch, head, query, key):
        return (key - query) * -0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("parts", OF_ONE.values(), ids=OF_ONE)
def test_one_query_is_checked_once_for_lengths_of_one_magnitude(checks, parts, dtype):
    query, key, value = heads(length=130, dtype=dtype)
    for length in range(64, 130):
        given, more = (query[:, :, -1:], key[:, :, :length], value[:, :, :length]), parts(length)
        asked = len(checks)
        expected = attention_with_lse(*given, **more, kernel="reference")
        del checks[asked:]
        assert_close(attention(*given, **more), expected.output)
        found = attention_with_lse(*given, **more)
        assert_close(found.output, expected.output)
        assert_close(found.lse, expected.lse)
    if binding.is_there(dtype):
        assert len(checks) == 2 * 2  # 64 to 127, and from 128 on, without lse and with it
    with pytest.raises(ShapeError):
        attention(query[:, :, :1], key[:, :, :65], value[:, :, :64], **parts(65))


@pytest.mark.parametrize("of_cells", [lambda real: Padding(real), lambda real: Causal() & Dense(real[:, None, None])])
@pytest.mark.parametrize("without_gaps", [False, True])
def test_what_one_query_sees_is_read_anew_when_written_to_and_forgotten_with_the_mask(of_cells, without_gaps):
    query, key, value = heads(length=130)
    real = REAL.clone() if without_gaps else torch.rand(2, 130) < 0.5
    for _ in range(2):
        mask = of_cells(real)
        expected = attention(query[:, :, -1:], key, value, mask=mask, kernel="reference")
        for _ in range(2):
            assert_close(attention(query[:, :, -1:], key, value, mask=mask), expected)
        real.logical_not_()
    kept = weakref.ref(real)
    del mask, real
    assert kept() is None


@pytest.mark.parametrize("wrong", [Padding([3, 4, 5]), Padding(REAL[:, :6]), Alibi(5), torch.zeros(2, 5), Dense(REAL)])
def test_what_one_query_cannot_be_given_is_told_as_of_many(wrong):
    query, key, value = heads()
    name = "mask" if isinstance(wrong, Mask) else "bias"
    for _ in range(2):
        with pytest.raises((TypeError, ShapeError), match=r"^attention: |query_len=1"):
            attention(query[:, :, -1:], key, value, **{name: wrong})
    attention(query[:, :, -1:], key, value)


@pytest.mark.parametrize("wrong", [{"generator": "one"}, {"dropout": 2.0}, {"kernel": "own"}, {"additive": 1}])
def test_what_one_query_has_no_use_for_is_checked_too(wrong):
    query, key, value = heads()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, kernels.KernelError), match="attention: "):
            attention(query[:, :, -1:], key, value, **wrong)


def test_the_gradients_of_one_query_are_those_of_many():
    query, key, value = (tensor.requires_grad_() for tensor in heads())
    slopes = torch.rand(4, requires_grad=True)
    parts = {"mask": Causal() & Padding(REAL[:, :7]), "bias": Alibi(slopes=slopes)}
    leaves = query, key, value, slopes
    for _ in range(2):
        found, expected = (
            torch.autograd.grad(attention(query[:, :, -1:], key, value, **parts, **by).square().sum(), leaves)
            for by in ({}, {"kernel": "reference"})
        )
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)


def test_masks_that_are_made_for_each_call_are_one_by_what_they_are(checks):
    for _ in range(3):
        attention(*heads(), mask=Causal() & Window(3))
    assert len(checks) == 1
    attention(*heads(), mask=Causal() & Window(4))
    assert len(checks) == 2


@needs_library
@pytest.mark.parametrize(("mask", "most"), [(None, 24), (Causal(), 25), (Causal() & Window(3), 37)], ids=repr)
def test_a_call_like_the_one_before_makes_few_calls_beside_torchs_operator(mask, most):
    query, key, value = heads(kv_heads=4, length=2)
    calls = []
    with torch.inference_mode():
        for _ in range(3):
            attention(query, key, value, mask=mask, kernel="sdpa")
        sys.setprofile(lambda frame, event, of: calls.append((event, of, frame)) if "call" in event else None)
        attention(query, key, value, mask=mask, kernel="sdpa")
        sys.setprofile(None)
    assert len(calls) <= most, calls


def test_lengths_that_are_given_as_numbers_in_inference_mode_are_told_from_others(checks):
    with torch.inference_mode():
        mask = Padding([4, 7])
        for _ in range(3):
            attention(*heads(), mask=mask)
        assert len(checks) == 1
        mask.keys[0] = 2
        right(heads(), mask)


@pytest.mark.parametrize("length", [7, 300])
@pytest.mark.parametrize("query_len", [1, None])
def test_layers_with_sinks_of_their_own_are_checked_once_and_each_has_its_own(checks, query_len, length):
    query, key, value = heads(length=length)
    given = query[:, :, :query_len], key, value
    sinks = [torch.randn(4) for _ in range(2 * checked.MAX_FORMS)]
    for _ in range(2):
        for sink in sinks:
            assert_close(attention(*given, sink=sink), attention(*given, sink=sink, kernel="reference"))
    assert len(checks) == 2
    sink = sinks.pop()
    with torch.no_grad():
        attention(*given, sink=sink.requires_grad_())
    attention(*given, sink=sink).sum().backward()
    assert sink.grad is not None
    kept = weakref.ref(sink)
    checks.clear()
    del sink
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("kernel", ["auto", "direct", "strips", "reference"])
def test_a_call_with_dropout_is_checked_once_and_drops_others_each_time(checks, kernel):
    given, parts = heads(), {"mask": Causal(), "dropout": 0.5}
    torch.manual_seed(3)
    expected = [attention(*given, **parts, kernel=kernel, generator=torch.default_generator) for _ in range(3)]
    checks.clear()
    torch.manual_seed(3)
    for right in expected:
        assert torch.equal(attention(*given, **parts, kernel=kernel), right)
    assert len(checks) == 1
    assert not torch.allclose(*expected[:2])
    attention(*given, mask=Causal(), dropout=0.25, kernel=kernel)
    attention(*given, mask=Causal(), kernel=kernel)
    assert len(checks) == 3


def test_any_difference_is_checked(checks):
    given = heads()
    ways = [
        {}, {"mask": Causal()}, {"mask": Window(3)}, {"mask": Causal(0)}, {"mask": Causal(1)}, {"scale": 0.5},
        {"softcap": 0.5}, {"kernel": "strips"}, {"dropout": 0.5}, {"sink": torch.zeros(4)}, {"bias": torch.zeros(7, 7)},
    ]  # fmt: skip
    for way in ways:
        attention(*given, **way)
    attention_with_lse(*given)
    for other in (
        heads(1),
        heads(heads=2),
        heads(length=5),
        heads(size=4),
        heads(kv_heads=4),
        heads(dtype=torch.double),
    ):
        attention(*other)
    attention(*(tensor.requires_grad_() for tensor in heads()))
    assert len(checks) == len(ways) + 8
    for way in ways:
        expected = attention_with_lse(*given, **{**way, "kernel": "reference"}, generator=same()).output
        assert_close(attention(*given, **way, generator=same()), expected)


def same():
    return torch.Generator().manual_seed(7)


def test_a_refusal_stays_one_after_a_call_that_is_equal_to_it():
    query, key, value = heads(size=1)
    attention(query, key, value, scale=1, softcap=1, dropout=0.0)
    for wrong in ({"scale": True}, {"softcap": True}, {"dropout": False}, {"scale": [1]}, {"kernel": ["auto"]}):
        with pytest.raises((TypeError, ValueError, kernels.KernelError), match="attention: "):
            attention(query, key, value, **{"scale": 1, "softcap": 1, **wrong})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor(list(query))
    for strange in (query.to_sparse(), nested, query.numpy(), query.to_mkldnn()):
        with pytest.raises(TypeError, match="query must be a tensor"):
            attention(strange, key, value, scale=1, softcap=1)
    with pytest.raises(TypeError, match="mask"):
        attention(query, key, value, mask=torch.ones(7, 7, dtype=torch.bool))


def test_what_is_refused_is_refused_again():
    query, key, value = heads()
    for _ in range(2):
        with pytest.raises(ShapeError, match="key_len"):
            attention(query, key[:, :, :5], value)
        with pytest.raises(kernels.KernelError, match="softcap"):
            attention(query, key, value, softcap=1.0, kernel="sdpa")
        with pytest.raises(ShapeError, match="lengths"):
            attention(query, key, value, mask=Padding([4]))


def test_a_call_that_warns_warns_each_time():
    swapped = torch.zeros(1, 300, 3, 2)
    for _ in range(2):
        with pytest.warns(LayoutWarning):
            attention(swapped, swapped, swapped)


# --- masks that change ------------------------------------------------------------------------------------------------


class Every(Mask):
    """Keys at multiples of the numbers in a list, or in a tensor."""

    def __init__(self, steps, strict=False):
        self.steps, self.strict = steps, strict

    def rule(self, batch, head, query, key):
        allowed = key < 0
        for step in self.steps:
            allowed = allowed | (key % step == 0)
        return allowed & (key > 0) if self.strict is True else allowed


def right(given, mask):
    assert_close(attention(*given, mask=mask), attention(*given, mask=mask, kernel="reference"))


FROM_DATA = {
    "padding": lambda: Padding(torch.arange(7) < torch.tensor([[4], [7]])),
    "documents": lambda: Causal() & Document(torch.tensor([[0, 0, 0, 1, 1, 2, 2]])),
    "cells": lambda: Dense(torch.arange(49).reshape(7, 7) % 3 > 0),
}


@pytest.mark.parametrize("name", FROM_DATA)
def test_a_mask_of_inference_tensors_is_known_by_its_few_bytes(checks, name):
    given = heads()
    with torch.inference_mode():
        for _ in range(3):
            expected = attention_with_lse(*given, mask=FROM_DATA[name](), kernel="reference").output
            assert_close(attention(*given, mask=FROM_DATA[name]()), expected)
    assert len(checks) == 2


@pytest.mark.parametrize("name", FROM_DATA)
@pytest.mark.parametrize("length", [7, 1])
def test_what_is_known_of_an_inference_tensor_is_not_written_to_with_it(name, length):
    query, key, value = heads()
    given = query[:, :, :length], key, value
    if length == 1 and name != "padding":
        return
    expected = attention(*given, mask=FROM_DATA[name](), kernel="reference")
    with torch.inference_mode():
        mask = FROM_DATA[name]()
        assert_close(attention(*given, mask=mask), expected)
        leaf = list(mask.leaves())[-1]
        for tensor in {id(part): part for part in leaf.arguments().values() if part is not None}.values():
            tensor.fill_(1)
        right(given, mask)
        assert_close(attention(*given, mask=FROM_DATA[name]()), expected)
        wide = [tensor.double() for tensor in given]  # of which nothing is known yet
        assert_close(attention(*wide, mask=FROM_DATA[name]()).float(), expected, tolerance=1e-5)


@pytest.mark.parametrize("length", [64, 1])
def test_a_large_bias_of_inference_tensors_may_be_written_to(checks, length):
    query, key, value = heads(length=150)
    given = query[:, :, :length], key, value
    with torch.inference_mode():
        bias = torch.randn(2, 4, length, 150)
        for _ in range(3):
            same_as_reference(given, bias=bias, mask=Causal())
            bias.normal_()
        other = torch.randn(2, 4, length, 150)
        same_as_reference(given, bias=other, mask=Causal())


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_is_changed_in_place_is_another(inference):
    given = heads()
    lengths, cells, steps = [4, 7], torch.eye(7, dtype=torch.bool), [2, 5]
    with torch.inference_mode(inference):
        padding, dense, every, causal = Padding(torch.tensor(lengths)), Dense(cells.clone()), Every(steps), Causal(2)
        outputs = []
        for _ in range(2):
            outputs.append([attention(*given, mask=mask) for mask in (padding, dense, every, causal)])
            padding.keys.fill_(2)
            dense.mask.fill_(True)
            steps[0], causal.offset = 3, -4
        for before, after in zip(*outputs, strict=True):
            assert not torch.equal(before, after)
        for mask in (Padding([2, 2]), Every([3, 5]), Causal(-4)):
            assert any(torch.allclose(attention(*given, mask=mask), after) for after in outputs[1])


def test_what_was_remembered_of_a_mask_is_not_changed_with_it():
    given, steps = heads(), [2, 5]
    expected = attention(*given, mask=Every([2, 5]), kernel="reference")
    attention(*given, mask=Every(steps))
    steps[:] = 3, 4
    assert_close(attention(*given, mask=Every([2, 5])), expected)


def test_numbers_that_are_equal_and_not_the_same_are_two():
    given = heads()
    right(given, Every([2], strict=1))
    right(given, Every([2], strict=True))
    right(given, Every([True], strict=True))


def test_a_function_is_asked_at_every_call(checks):
    given, allowed = heads(), [2]
    mask = Where(lambda batch, head, query, key: key < allowed[0])
    for allowed[0] in (2, 5):
        right(given, mask)


# --- biases and sinks -------------------------------------------------------------------------------------------------


def same_as_reference(given, **parts):
    output = attention(*given, **parts)
    assert_close(output, attention(*given, **parts, kernel="reference"))
    return output


class Held(Bias):
    """A bias whose numbers are no argument of its own."""

    def __init__(self, count):
        self.count = count
        self.numbers = [torch.zeros(count)]

    def rule(self, batch, head, query, key):
        return self.numbers[0][key]


BIASES = {
    "slopes made anew": lambda: Alibi(4),
    "slopes in inference mode": lambda: Alibi(slopes=torch.tensor([0.5, 0.25, 1.0, 2.0])),
    "a table": lambda: RelativeBias(torch.arange(128.0).reshape(32, 4).clone() / 128),
    "a sum": lambda: Alibi(4) + torch.linspace(-1, 1, 7),
    "numbers": lambda: torch.linspace(-1, 1, 49).reshape(7, 7),
    "numbers that hide": lambda: torch.zeros(4, 1, 7).index_fill(2, torch.tensor([3]), -torch.inf)[None],
    "no argument": lambda: Held(7),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("mask", [None, Causal(), Padding([4, 7])], ids=repr)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_a_bias_that_is_equal_is_checked_and_evaluated_once(checks, name, mask, learns, inference):
    with torch.inference_mode(inference):
        for _ in range(3):
            given = [tensor.requires_grad_(learns) for tensor in heads()]
            expected = attention_with_lse(*given, mask=mask, bias=BIASES[name](), kernel="reference").output
            output = attention(*given, mask=mask, bias=BIASES[name]())
            assert_close(output, expected)
            if learns and not inference:
                found, right = (torch.autograd.grad(o.square().sum(), given) for o in (output, expected))
                for pair in zip(found, right, strict=True):
                    assert_close(*pair)
    assert len(checks) == 2  # once by each of both functions


@pytest.mark.parametrize("shape", [(7, 7), (1, 4, 64, 64)], ids=str)
@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
@pytest.mark.parametrize("unseen", [False, True])
def test_a_bias_that_is_written_to_is_another(shape, mask, unseen):
    given = heads(length=shape[-1])
    numbers = torch.nn.Parameter(torch.randn(shape)) if unseen else torch.randn(shape)
    for _ in range(2):
        with torch.no_grad():
            before = same_as_reference(given, mask=mask, bias=numbers)
            (numbers.data if unseen else numbers).normal_()
            assert not torch.allclose(before, same_as_reference(given, mask=mask, bias=numbers))


def test_what_is_read_of_a_bias_is_not_changed_with_it():
    given = heads()
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0])
    first = attention(*given, bias=Alibi(slopes=slopes), kernel="strips")
    small = torch.zeros(7, 7)
    empty = same_as_reference(given, bias=small)
    slopes.fill_(3.0)
    small.normal_()
    assert torch.equal(
        attention(*given, bias=Alibi(slopes=torch.tensor([0.5, 0.25, 1.0, 2.0])), kernel="strips"), first
    )
    assert torch.equal(attention(*given, bias=torch.zeros(7, 7)), empty)
    held = Held(7)
    same_as_reference(given, bias=held)
    held.numbers[0].normal_()
    assert not torch.allclose(same_as_reference(given, bias=held), empty)


@pytest.mark.parametrize("kernel", ["auto", *ON_A_CPU])
@pytest.mark.parametrize("mask", [None, Causal(), Padding([4, 7])], ids=repr)
@pytest.mark.parametrize("shape", [(7, 7), (2, 4, 7, 7), (2, 1, 1, 7), (2, 4, 1, 7)], ids=str)
@pytest.mark.parametrize("learns", [False, True])
def test_each_call_may_have_a_bias_tensor_of_its_own(checks, kernel, mask, shape, learns):
    numbers, lengths = torch.nn.Parameter(torch.randn(shape), requires_grad=learns), (1, 7)
    kept, reads = [], kernel in ("native", "strips", "reference")
    for turn in range(4):
        for length in lengths:
            given = heads()
            given = given[0][:, :, :length], *given[1:]
            bias = numbers[..., -length:, :] * (turn + 1) if shape[-2] > 1 else numbers * (turn + 1)
            expected = attention(*given, mask=mask, bias=bias, kernel="reference", generator=same())
            checks.clear()
            output = attention(*given, mask=mask, bias=bias, kernel=kernel)
            assert_close(output, expected)
            assert not (reads and turn and checks)
            if learns:
                found, right = (
                    torch.autograd.grad(o.square().sum(), numbers, retain_graph=True)[0] for o in (output, expected)
                )
                assert_close(found, right)
            kept.append(weakref.ref(bias))
    del bias, output, expected
    gc.collect()
    assert not reads or [ref() for ref in kept] == [None] * 8


def test_a_bias_that_holds_a_graph_is_read_in_place_by_a_call_like_it(checks):
    given = heads()
    bias = torch.nn.Parameter(torch.randn(7, 7))
    for _ in range(2):
        attention(*given, bias=bias, kernel="strips").sum().backward()
        attention(*given, bias=bias * 2, kernel="strips").sum().backward()
    assert bias.grad.abs().sum() > 0
    with torch.no_grad():
        attention(*given, bias=torch.enable_grad()(lambda: bias * 2)(), kernel="strips")
    assert len(checks) == 2  # with gradients, and without


def test_a_sink_may_learn_and_change_while_its_calls_stay_alike(checks):
    given, sink = heads(), torch.nn.Parameter(torch.randn(4))
    outputs = []
    for _ in range(3):
        outputs.append(attention(*given, mask=Causal(), sink=sink))
        outputs[-1].sum().backward()
        with torch.no_grad():
            sink -= sink.grad
        sink.grad = None
    assert len(checks) == 1
    assert not torch.allclose(outputs[0], outputs[2])
    assert_close(
        attention(*given, mask=Causal(), sink=sink), attention(*given, mask=Causal(), sink=sink, kernel="reference")
    )
    sink.data = torch.zeros(3)
    with pytest.raises(ShapeError, match="sink"):
        attention(*given, mask=Causal(), sink=sink)
    many = torch.zeros(1 << 22)
    for part in (many[:4], many[4:8]):
        attention(*given, sink=part)
        attention(*given, bias=part[:, None, None])
    del part
    checks.clear()
    gc.collect()
    memory = range(many.data_ptr(), many.data_ptr() + many.nbytes)
    assert [t.shape for t in gc.get_objects() if type(t) is torch.Tensor and t.data_ptr() in memory] == [many.shape]


@pytest.mark.usefixtures("without_the_library")
def test_tables_are_kept_up_to_a_number_of_numbers(monkeypatch):
    made = []
    make = hidden._made
    monkeypatch.setattr(hidden, "_made", lambda *given: (made.append(given), make(*given))[1])
    monkeypatch.setattr(hidden._tables, "_most", 3 * 4 * 64 * 64)
    given = heads(length=64)
    hidden._tables.clear()
    with torch.no_grad():
        for number in range(5):
            same_as_reference(given, bias=Alibi(slopes=torch.full((4,), 1.0 + number)), mask=Causal())
        assert len(made) == 5
        assert hidden._tables._numbers == len(hidden._tables._values) * 4 * 64 * 64 == 3 * 4 * 64 * 64
        same_as_reference(given, bias=Alibi(slopes=torch.full((4,), 5.0)), mask=Causal())
        assert len(made) == 5


@pytest.mark.parametrize("mask", [None, Causal()])
def test_a_kept_table_lies_so_that_torch_does_not_copy_it(mask):
    hidden._tables.clear()
    query, key, value = heads(length=64)
    with torch.no_grad():
        attention(query[:, :, :17], key, value, bias=Alibi(4), mask=mask, kernel="sdpa")
    (table,) = hidden._tables._values.values()
    assert table.added.shape == (1, 4, 17, 64)
    assert table.added.is_contiguous()


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "direct"])
def test_a_table_that_is_kept_is_not_looked_for_again(kernel, learns, monkeypatch):
    asked = []
    get = hidden.Kept.get
    monkeypatch.setattr(hidden.Kept, "get", lambda *given: (asked.append(1), get(*given))[1])
    hidden._tables.clear()
    given = [tensor.requires_grad_(learns) for tensor in heads(length=16)]
    right = attention(*given, bias=Alibi(4), mask=Causal(), kernel="reference")
    for turn in range(3):
        asked.clear()
        assert_close(attention(*given, bias=Alibi(4), mask=Causal(), kernel=kernel), right)
        assert bool(asked) == (turn == 0)
    hidden._tables.clear()  # as if others had taken its room
    assert_close(attention(*given, bias=Alibi(4), mask=Causal(), kernel=kernel), right)
    assert bool(asked) == (kernel == "sdpa")  # the other one keeps what it made of it


# --- writing token by token -------------------------------------------------------------------------------------------

ONE_MORE = [
    Causal(), Causal() & Window(5), Window(30), Band(9, -2), Causal() & Band(None, -3) & Window(8), Band(3, None),
]  # fmt: skip


@pytest.mark.parametrize("mask", ONE_MORE, ids=str)
def test_one_query_with_one_key_more_in_each_call_is_checked_once_under_any_band(mask, checks):
    query, key, value = heads(length=30)
    for length in range(17, 31):
        attention(query[:, :, -1:], key[:, :, :length], value[:, :, :length], mask=mask)
    assert len(checks) <= 3  # windows are full by then


@pytest.mark.parametrize("mask", [*ONE_MORE, Band(-40, 50), Causal(offset=3), Causal() | Window(3)], ids=str)
def test_one_query_sees_what_the_mask_allows(mask):
    sink = torch.randn(4)
    for length in (1, 5, 12, 40):
        query, key, value = heads(length=length)
        given = [tensor.clone().requires_grad_() for tensor in (query[:, :, -1:], key, value)]
        grid = Grid(2, 4, 1, length, torch.device("cpu"))
        cells = Dense(mask.bind(grid).allowed(range(1), range(length)).expand(1, 1, 1, length))
        found = attention_with_lse(*given, mask=mask, sink=sink, softcap=3.0)
        expected = attention_with_lse(*given, mask=cells, sink=sink, softcap=3.0, kernel="reference")
        assert_close(attention(*given, mask=mask), attention(*given, mask=cells, kernel="reference"))
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
        of = [torch.autograd.grad(o.output.square().sum() + o.lse.sum(), given) for o in (found, expected)]
        for one, other in zip(*of, strict=True):
            assert_close(one, other)


def test_errors_about_one_query_tell_of_all_keys():
    query, key, value = heads(length=30)
    with pytest.raises(ShapeError, match="30"):
        attention(query[:, :, -1:, :3], key, value, mask=Causal() & Window(5))
    for rows, keys in ((3, 30), (2, 29)):
        with pytest.raises(ShapeError, match=f"batch={rows}, key_len={keys}"):
            attention(query[:, :, -1:], key, value, mask=Causal() & Padding(torch.ones(rows, keys, dtype=torch.bool)))


def test_one_query_that_hides_or_adds_something_leaves_nothing_to_the_next_nor_to_other_threads():
    real = torch.arange(30) >= torch.tensor([[4], [0]])
    apart = torch.arange(30) % 3 > 0
    with_nan = real.clone()
    with_nan[0, 5] = False
    wrong: list[str] = []

    def work(seed):
        draw = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(2, n, size, 8, generator=draw) for n, size in ((4, 1), (2, 30), (2, 30)))
        unknown = key.clone()
        unknown[0, :, 5] = torch.nan
        table = torch.randn(1, 4, 1, 30, generator=draw)
        calls = [
            ((query, key, value), parts)
            for parts in (
                {"mask": None}, {"mask": Padding(real)}, {"bias": table}, {"mask": Padding(real), "bias": table},
                {"mask": Dense(apart)}, {"mask": Causal() & Padding(real.mT.contiguous().mT)}, {"bias": Alibi(4)},
            )
        ]  # fmt: skip
        calls.append(((query, unknown, value), {"mask": Dense(with_nan[:, None, None]), "bias": table}))
        expected = [attention(*given, **parts, kernel="reference") for given, parts in calls]
        for turn in torch.randint(len(calls), (300,), generator=draw).tolist():
            given, parts = calls[turn]
            try:
                assert_close(attention(*given, **parts), expected[turn])
            except AssertionError as error:
                wrong.append(f"{parts}: {error}")

    in_threads(work, 4)
    assert wrong == []


# --- what is not kept -------------------------------------------------------------------------------------------------


def test_query_key_value_and_results_are_not_kept():
    given = heads()
    kept = [weakref.ref(tensor) for tensor in (*given, attention(*given, mask=Causal()))]
    del given
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


@pytest.mark.parametrize(("mask", "elsewhere"), [(Causal(), 1), (Padding([4, 7]), 0), (Causal() & Padding([4, 7]), 0)])
def test_masks_that_hold_memory_of_another_device_are_not_kept(mask, elsewhere):
    call = regard.functional.check_call("t", *heads(), mask, *[None] * 5, 0.0, None, False)
    for query, count in ((call.query, 1), (call.query.to("meta"), elsewhere)):
        checked.forget()
        checked.remember(("a form",), call._replace(query=query), kernels.REFERENCE, None)
        assert len(checked._KNOWN) == count


def test_few_forms_are_kept():
    for length in range(1, 3 * checked.MAX_FORMS):
        attention(*heads(length=length))
    assert len(checked._KNOWN) == checked.MAX_FORMS


# --- the state of torch -----------------------------------------------------------------------------------------------


def test_modes_of_torch_are_those_of_the_call():
    given = heads()
    for tensor in given:
        tensor.requires_grad_()
    for _ in range(2):
        assert attention(*given, mask=Causal()).requires_grad
        with torch.no_grad():
            assert not attention(*given, mask=Causal()).requires_grad
        with torch.inference_mode():
            assert attention(*given, mask=Causal()).is_inference()
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(*given, mask=Causal()).dtype == torch.float32
    attention(*given, mask=Causal()).sum().backward()
    assert all(tensor.grad is not None for tensor in given)
    exact = attention(*given, mask=Padding([4, 7]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*given, mask=Padding([4, 7])), exact)


def test_transforms_and_graphs_are_checked_by_themselves(checks):
    given = heads()
    expected = attention(*given, mask=Causal())
    forms = list(checked._KNOWN)

    def run(*tensors):
        return attention(*tensors, mask=Causal())

    # the inner call of a transform has the very shapes of the outer one
    stacked = [tensor.expand(3, *tensor.shape) for tensor in given]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(torch.vmap(run)(*stacked), expected.expand(3, *expected.shape))
        assert_close(torch.func.vjp(run, *given)[0], expected)
        assert_close(torch.compile(run, backend="eager", fullgraph=True)(*given), expected)
        assert_close(torch.jit.trace(run, given, check_trace=False)(*given), expected)
    assert list(checked._KNOWN) == forms


def test_a_compiled_call_is_not_compiled_again_when_another_is_remembered():
    compiled = torch.compile(lambda *tensors: attention(*tensors, mask=Causal()), backend="eager", fullgraph=True)
    given = heads()
    expected = compiled(*given)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in range(2, 5):
            attention(*heads(length=length), mask=Window(2))
            assert torch.equal(compiled(*given), expected)


def test_threads_do_not_meet_each_others_calls():
    wrong: list[str] = []

    def work(number):
        mask = MASKS[number % len(MASKS)]
        given = heads()
        expected = attention(*given, mask=mask, kernel="reference")
        for turn in range(200):
            extra = heads(length=1 + (turn * (number + 3)) % 29)
            attention(*extra, mask=Window(1 + turn % 5))
            try:
                assert_close(attention(*given, mask=mask), expected)
            except AssertionError as error:
                wrong.append(str(error))

    in_threads(work, 8)
    assert wrong == []
    assert len(checked._KNOWN) <= checked.MAX_FORMS


@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_finished_table_that_torch_reads_may_be_another_one_in_every_call(axes, learns, kv_heads, checks):
    query, key, value = heads(kv_heads=kv_heads)
    key[:, :, 3] = torch.nan  # hidden by all tables
    key.requires_grad_(learns)
    for _ in range(4):
        table = torch.randn(2, 4, 7, 7) if axes == 4 else torch.randn(7, 7)
        table[..., 3] = -torch.inf
        output = attention(query, key, value, bias=table, kernel="sdpa")
        expected = attention(query, key, value, bias=table, kernel="reference")
        assert_close(output, expected)
        if learns:
            assert_close(*(torch.autograd.grad(o.sum(), key)[0] for o in (output, expected)))
    assert len(checks) == 2  # of each kernel, the first


def trained():
    """Biases that learn, and what of them does."""
    table, slopes = torch.zeros(8, 2), torch.ones(2)
    numbers = torch.zeros(1, 2, 7, 7), torch.zeros(7, 7)
    for tensor in (table, slopes, *numbers):
        tensor.requires_grad_()
    half = torch.ones(2, dtype=torch.bfloat16).requires_grad_()  # of which a copy in float32 is made for each call
    yield from ((tensor, tensor) for tensor in numbers)
    yield RelativeBias(table, max_distance=3), table
    yield Alibi(slopes=slopes) + numbers[0], slopes
    yield Alibi(slopes=half), half


@pytest.mark.parametrize("kernel", ["auto", "strips"])
@pytest.mark.parametrize("number", range(5))
def test_a_bias_that_learns_is_checked_once_and_followed_wherever_it_goes(number, kernel, monkeypatch):
    bias, learning = list(trained())[number]
    asked = []
    check_call = regard.functional.check_call
    monkeypatch.setattr(regard.functional, "check_call", lambda *given: (asked.append(1), check_call(*given))[1])
    three = [torch.randn(1, 2, 7, 4).requires_grad_() for _ in range(3)]
    for _ in range(4):
        asked.clear()
        ours = attention(*three, bias=bias, mask=Causal(), kernel=kernel)
        checked = len(asked)
        right = attention(*three, bias=bias, mask=Causal(), kernel="reference")
        assert_close(ours, right)
        found, expected = (torch.autograd.grad(x.sin().sum(), learning)[0] for x in (ours, right))
        assert_close(found, expected, tolerance=1e-2 if learning.dtype == torch.bfloat16 else 1e-5)
        with torch.no_grad():
            learning += torch.randn(learning.shape)
    assert checked == (learning.dtype == torch.bfloat16)
    learning.data = torch.randn(learning.shape, dtype=learning.dtype)  # another place in memory
    ours, right = (attention(*three, bias=bias, mask=Causal(), kernel=name) for name in (kernel, "reference"))
    assert_close(ours, right)

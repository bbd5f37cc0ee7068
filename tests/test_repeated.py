"""Calls that are like an earlier one but for their tensors: found out by the library, and by nothing else than what
decides what a call computes."""

import ctypes
import gc
import itertools
import random
import re
import sys
import warnings
import weakref
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from cases import in_threads, needs_library
from regard import (
    Additive,
    Alibi,
    AttentionOutput,
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    KernelError,
    Mask,
    Padding,
    Prefix,
    RelativeBias,
    ShapeError,
    Strided,
    Where,
    Window,
    any_length,
    attention,
    attention_with_lse,
    checked,
    repeated,
)
from regard.biases import Given
from regard.kernels import choice
from regard.kernels.strips import NATIVE_KERNEL, autograd, binding, dealing, intervals, ready, terms, tuning
from regard.kernels.strips.autograd import Alike, attach
from regard.kernels.strips.kernel import Planned
from regard.masks.planning import product_of, seen_from_own_key
from regard.shapes import Grid

pytestmark = needs_library

LENGTH, HEADS, SIZE = 24, 4, 16


def heads(seed: int = 0, dtype: torch.dtype = torch.float32, queries: int = LENGTH) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, HEADS, queries, SIZE), (2, 2, LENGTH, SIZE), (2, 2, LENGTH, SIZE)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.fixture
def found(monkeypatch) -> list[bool]:
    """For each call, whether it was like one of those that are noted."""
    seen: list[bool] = []
    real = binding.compiled(torch.float32).repeat

    def repeat(given, table):
        results = real(given, table)
        seen.append(results is not None)
        return results

    monkeypatch.setattr(repeated, "repeat", repeat)
    return seen


@pytest.fixture
def pulled(monkeypatch) -> list[bool]:
    """For each backward pass that the library was asked for, whether it found all gradients by itself."""
    seen: list[bool] = []
    library = binding.compiled(torch.float32)
    real = library.pull

    def pull(*given):
        grads = real(*given)
        seen.append(grads is not None)
        return grads

    monkeypatch.setattr(library, "pull", pull)
    return seen


def by_formula(three: list[Tensor], **given) -> Tensor:
    """The output in float64, found without looking for calls like it."""
    noted, checked.noted = checked.noted, ()
    try:
        return attention(*(t.detach().double() for t in three), **given, kernel="reference")
    finally:
        checked.noted = noted


def right(three: list[Tensor], kernel: str = "auto", **given) -> None:
    expected, found = by_formula(three, **given), attention(*three, **given, kernel=kernel)
    error = 2e-5 if three[0].dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)


@pytest.fixture
def planned(monkeypatch):
    """Few scores under a mask of data are planned too, as of more scores: a library that finds out about data by itself
    knows calls again whatever that is."""
    monkeypatch.setattr(choice, "SCORES_TO_PLAN", 0)


def settle(*arguments, **given) -> None:
    """Calls until one is noted, if it ever is."""
    for _ in range(3):
        attention(*arguments, **given)


def last_noted() -> binding.RepeatedOf:
    """What the library is told of the call that was noted last."""
    _, held, *_ = checked.noted
    return next(part for part in held if isinstance(part, binding.RepeatedOf))


class StoppedError(Exception):
    """An error of the caller's own."""


def stop(*given):
    raise StoppedError


KINDS = {
    "nothing": dict,
    "causal": lambda: {"mask": Causal()},
    "window": lambda: {"mask": Causal() & Window(5), "scale": 0.3},
    "either": lambda: {"mask": (Causal() & Window(4)) | Prefix(2), "softcap": 9.0},
    "not": lambda: {"mask": ~Window(3) & Causal()},
    "slopes": lambda: {"mask": Causal(), "bias": Alibi(HEADS)},
    "a bias tensor": lambda: {"bias": torch.linspace(-1, 1, HEADS * LENGTH * LENGTH).view(1, HEADS, LENGTH, LENGTH)},
    "a bias for each key": lambda: {"bias": torch.linspace(-1, 1, LENGTH)},
    "sink": lambda: {"mask": Causal(), "sink": torch.arange(HEADS) / 4},
    "slopes and sink": lambda: {"mask": Window(9), "bias": Alibi(HEADS), "sink": torch.arange(HEADS) / 4},
    "a bias tensor and sink": lambda: {"bias": torch.linspace(-1, 1, LENGTH), "sink": torch.arange(HEADS) / 4},
    "a whole number": lambda: {"scale": 1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_a_call_like_an_earlier_one_is_found_and_right(kind, dtype, learns, kernel, found):
    given = KINDS[kind]()
    for seed in range(6):
        three = [tensor.requires_grad_(learns) for tensor in heads(seed, dtype)]
        anew = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        expected = by_formula(three, **given)
        found.clear()
        output = attention(*three, **anew, kernel=kernel)
        error = 2e-2 if dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(output.detach().double(), expected, atol=error, rtol=error)
        assert output.requires_grad == learns
    assert found == [True] or checked._BY_NUMBERS  # a bias of which the kernel keeps a copy is known by its numbers


@pytest.mark.parametrize("kind", ["causal", "window", "either", "not", "slopes", "sink"])
def test_masks_and_biases_made_anew_are_like_those_before(kind, found):
    for seed in range(5):
        right(heads(seed), **KINDS[kind]())
    assert found[-1]


@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_log_sum_exp_and_output_are_calls_of_their_own(kernel, found):
    three = heads()
    settle(*three, mask=Causal(), kernel=kernel)
    for _ in range(3):
        output, lse = attention_with_lse(*three, mask=Causal(), kernel=kernel)
        torch.testing.assert_close(attention(*three, mask=Causal(), kernel=kernel), output)
        assert lse.shape == (2, HEADS, LENGTH)
    assert found[-2:] == [True, True]


LAID = {
    "as they are": torch.clone,
    "by token": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "features apart": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "every second": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], 3).flatten(2, 3)[:, :, ::2],
    "negated": lambda t: torch._neg_view(-t),
}


@pytest.mark.parametrize("kernel", ["auto", "native"])
@pytest.mark.parametrize("laid", LAID)
def test_tensors_may_lie_in_another_way(laid, kernel):
    for step in range(9):
        three, sink = heads(step), torch.arange(HEADS) / 3
        if step % 3 == 2:
            three = [LAID[laid](tensor) if place <= step // 3 else tensor for place, tensor in enumerate(three)]
        right(three, mask=Causal(), sink=sink, kernel=kernel)
        right(three, mask=Causal(), kernel=kernel)
        right([tensor.double() for tensor in three], mask=Causal(), kernel=kernel)


def other_slopes() -> Alibi:
    return Alibi(slopes=torch.tensor([1.0, 0.5, 0.25, 0.125]))


def reversed_table() -> Tensor:
    return torch.linspace(1, -1, LENGTH)


DIFFERENCES = {
    "scale": ({"scale": 0.5}, {"scale": 0.25}),
    "no scale": ({"scale": None}, {"scale": 0.75}),
    "a whole scale": ({"scale": 1}, {"scale": 2}),
    "softcap": ({"softcap": 3.0}, {"softcap": 4.0}),
    "no softcap": ({"softcap": None}, {"softcap": 1.0}),
    "mask": ({"mask": Causal()}, {"mask": None}),
    "kind of mask": ({"mask": Window(4)}, {"mask": Prefix(4)}),
    "number of a mask": ({"mask": Window(4)}, {"mask": Window(7)}),
    "part of a mask": ({"mask": Causal() & Window(4)}, {"mask": Causal() & Prefix(4)}),
    "number in a part": ({"mask": Causal() & ~Window(4)}, {"mask": Causal() & ~Window(2)}),
    "offset": ({"mask": Causal(offset=0)}, {"mask": Causal(offset=-3)}),
    "slopes": ({"bias": Alibi(HEADS)}, {"bias": other_slopes()}),
    "bias": ({"bias": Alibi(HEADS)}, {"bias": None}),
    "bias that is a tensor": ({"bias": torch.linspace(-1, 1, LENGTH)}, {"bias": reversed_table()}),
    "axes of a bias": ({"bias": torch.ones(LENGTH)}, {"bias": torch.linspace(-1, 1, LENGTH)[:, None]}),
    "sink": ({"sink": torch.zeros(HEADS)}, {"sink": torch.ones(HEADS)}),
    "no sink": ({"sink": torch.zeros(HEADS)}, {"sink": None}),
    "strides of a sink": ({"sink": torch.arange(4.0)}, {"sink": torch.arange(8.0)[::2]}),
    "dtype of a sink": ({"sink": torch.arange(4.0)}, {"sink": torch.arange(4.0).double() / 2}),
    "additive": ({}, {"additive": Additive(torch.ones(HEADS, SIZE))}),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_call_that_differs_in_one_thing_is_another(difference, learns):
    for one, other in itertools.permutations(DIFFERENCES[difference]):
        checked.forget()
        for step in range(12):
            three = [tensor.requires_grad_(learns) for tensor in heads(step)]
            right(three, **(other if step % 4 == 3 else one))


def test_a_kernel_that_does_not_exist_is_refused_whatever_came_before():
    settle(*heads())
    with pytest.raises(KernelError, match="no kernel named"):
        attention(*heads(), kernel="nothing")


def test_dropout_and_its_generator_are_looked_at(found):
    settle(*heads())
    assert not torch.equal(attention(*heads(), dropout=0.5), attention(*heads()))
    settle(*heads(), dropout=0.5)
    seeded = [attention(*heads(), dropout=0.5, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    assert all(torch.equal(seeded[0], each) for each in seeded)


def test_a_bias_of_which_the_kernel_keeps_a_copy_is_known_by_its_numbers():
    bias = torch.zeros(1, HEADS, LENGTH, LENGTH)
    for step in range(8):
        bias[..., step] += step // 4
        expected = by_formula(heads(), bias=bias, mask=Causal())
        found = attention(*heads(), bias=bias, mask=Causal(), kernel="sdpa")
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


def test_a_mask_that_could_be_read_in_two_ways_is_refused_whatever_came_before():
    three = [tensor[:, :2] for tensor in heads()]
    with torch.inference_mode():  # where few cells are known by their contents
        cells = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
        settle(*three, mask=Dense(cells[None]))
        with pytest.raises(ShapeError, match="Dense"):
            attention(*three, mask=Dense(cells))


class Watched(Tensor):
    """A tensor of one's own, which sees what is done with it."""


def test_tensors_of_ones_own_are_not_taken_for_plain_ones(found):
    three = heads()
    settle(*three, mask=Causal())
    for place in range(3):
        given = [t.as_subclass(Watched) if n == place else t for n, t in enumerate(three)]
        attention(*given, mask=Causal())
        assert not found[-1]
        given[place] = nn.Parameter(three[place], requires_grad=False)
        attention(*given, mask=Causal())
        assert not found[-1]


def test_whatever_changes_about_an_object_is_seen():
    """In each call something else changes, and often changes back; nothing may be taken for what it was."""
    draw = random.Random(1)
    window, slopes, cells = Window(5), Alibi(slopes=torch.ones(HEADS)), torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    dense, bias, sink = Dense(cells), torch.zeros(1, HEADS, LENGTH, LENGTH), nn.Parameter(torch.zeros(HEADS))
    by_token = torch.zeros(1, LENGTH, LENGTH, HEADS).permute(0, 3, 1, 2)
    masks = [None, window, Causal() & window, dense, dense & window]
    for step in range(300):
        change = draw.randrange(9)
        if change == 0:
            window.w = draw.choice([3, 5])
            window.before = window.w - 1
        elif change == 1:
            slopes.slopes.data.fill_(draw.choice([0.5, 1.0]))
        elif change == 2:
            cells[draw.randrange(1, LENGTH), 0] = draw.random() < 0.5
        elif change == 3:
            bias[..., draw.randrange(LENGTH)] = draw.random()
        elif change == 4:
            sink.data.fill_(draw.random())
        elif change == 5:
            bias.data = draw.choice([bias.data.contiguous(), by_token.copy_(bias)])
        with torch.set_grad_enabled(draw.random() < 0.5):
            given = {"scale": draw.choice([None, 0.25, 0.5, 1, 1.0]), "softcap": draw.choice([None, 4.0])}
            added = draw.choice([None, bias, slopes])
            right(heads(step % 5), mask=draw.choice(masks), bias=added, sink=draw.choice([None, sink]), **given)


def test_what_autograd_is_asked_for_is_seen(found):
    for learns in itertools.product([False, True], repeat=3):
        for grads in (True, False, True):
            for _ in range(2):
                three = [t.requires_grad_(wants) for t, wants in zip(heads(), learns, strict=True)]
                with torch.set_grad_enabled(grads):
                    output = attention(*three, mask=Causal(), kernel="native")
                assert output.requires_grad == (grads and any(learns))
                if output.requires_grad:
                    output.sum().backward()
                    assert [t.grad is not None for t in three] == list(learns)
    assert any(found)


def test_gradients_are_right_again_and_again(found):
    for seed in range(5):
        three = [t.requires_grad_() for t in heads(seed)]
        others = [t.detach().double().requires_grad_() for t in three]
        attention(*three, mask=Causal() & Window(7)).square().sum().backward()
        attention(*others, mask=Causal() & Window(7), kernel="reference").square().sum().backward()
        for one, other in zip(three, others, strict=True):
            torch.testing.assert_close(one.grad.double(), other.grad, atol=1e-4, rtol=1e-4)
    assert found[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nothing", "window", "either", "slopes", "a bias tensor"])
@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
def test_what_learns_is_computed_at_once_too(kind, dtype, monkeypatch):
    """With lse, with gradients through both, and with gradients of gradients. In float64 by Python's code."""

    def differentiated(call, inputs):
        output, lse = call(*inputs, **KINDS[kind]())
        loss = output.double().square().sum() + lse.double().sin().sum()
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        twice = torch.autograd.grad(sum(grad.double().square().sum() for grad in grads), inputs)
        return [output, lse, *grads, *twice]

    def native(*inputs, **given):
        return attention_with_lse(*inputs, **given, kernel="native")

    def exact(*inputs, **given):
        return attention_with_lse(*inputs, **given, kernel="reference")

    for seed in range(4):
        three = [t.requires_grad_() for t in heads(seed, dtype)]
        if seed == 3 and dtype is not torch.float64:
            monkeypatch.setattr(Planned, "__call__", None)  # it is not asked any more
        found = differentiated(native, three)
        expected = differentiated(exact, [t.detach().double().requires_grad_() for t in three])
        error = 1e-10 if dtype is torch.float64 else 2e-4 if dtype is torch.float32 else 0.1
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other).norm() <= error * (1 + other.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nothing", "window", "either", "slopes", "a bias tensor"])
@pytest.mark.parametrize("learns", list(itertools.product([True, False], repeat=3))[:-1])
def test_its_gradients_are_computed_at_once_too(kind, dtype, learns, monkeypatch):
    def grads(number, kernel, inputs):
        weight = torch.linspace(-1, 1, LENGTH)[:, None].to(inputs[0].dtype)
        output = attention(*inputs, **KINDS[kind](), kernel=kernel)
        given = torch.ones_like(output) if number < 5 else weight.expand_as(output)  # which lies in another way
        return torch.autograd.grad(output, [t for t in inputs if t.requires_grad], given)

    for number in range(6):
        three = [t.requires_grad_(each) for t, each in zip(heads(number, dtype), learns, strict=True)]
        exact = grads(number, "reference", [t.detach().double().requires_grad_(t.requires_grad) for t in three])
        if number == 4:
            monkeypatch.setattr(autograd, "_pulled", None)  # the general way is not taken any more
        found = grads(number, "native", three)
        monkeypatch.undo()
        for one, other in zip(found, exact, strict=True):
            assert one.dtype is dtype
            assert (one.double() - other).norm() <= (2e-5 if dtype is torch.float32 else 2e-2) * (1 + other.norm())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_hidden_has_no_part_in_gradients_either(bad):
    cells = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.4
    cells[:, 5] = False
    found = []
    for number in (0.0, 0.0, 0.0, bad, 0.0):
        three = heads()
        three[1][:, :, 5] = three[2][:, :, 5] = number
        three = [t.requires_grad_() for t in three]
        output = attention(*three, mask=Dense(cells), kernel="native")
        found.append([output, *torch.autograd.grad(output.square().sum(), three)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=2e-5)


def test_results_that_cannot_be_attached_say_why():
    three = [t.requires_grad_() for t in heads()]
    settle(*three, mask=Causal(), kernel="native")
    noted = last_noted()
    assert noted.attach
    attach, noted.attach = noted.attach, id(stop)
    with pytest.raises(StoppedError):
        attention(*three, mask=Causal(), kernel="native")
    noted.attach = attach
    attention(*three, mask=Causal(), kernel="native").sum().backward()


def test_states_of_torch_are_seen(found):
    three = heads()
    settle(*three, mask=Causal())
    expected = attention(*three, mask=Causal())
    assert found.pop()
    found.clear()

    def right_and_not_found() -> None:
        torch.testing.assert_close(attention(*three, mask=Causal()), expected)
        assert not found.pop()

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            return function(*arguments, **(named or {}))

    with Counts():
        right_and_not_found()
    with forward_ad.dual_level():
        right_and_not_found()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(*three, mask=Causal())
        assert not found.pop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *given: attention(*given, mask=Causal()), three, check_trace=False)
    assert not any(found)
    torch.testing.assert_close(traced(*heads(1)), attention(*heads(1), mask=Causal()))
    asked = len(found)
    torch.func.grad(lambda x: (attention(*three, mask=Causal()) * x).sum())(torch.ones(1))
    assert len(found) == asked
    traced = make_fx(lambda *given: attention(*given, mask=Causal()))(*three)
    torch.testing.assert_close(traced(*heads(1)), attention(*heads(1), mask=Causal()))
    torch.func.vmap(lambda *one: attention(*(t[None] for t in one), mask=Causal()))(*three)
    torch.func.grad(lambda q, k, v: attention(q, k, v, mask=Causal()).sum())(*three)
    attention(*three, mask=Causal())
    assert found.pop()


def test_dropout_is_drawn_anew_in_every_call(found):
    torch.manual_seed(0)
    outputs = [attention(*heads(), dropout=0.5) for _ in range(5)]
    assert found[-1]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(outputs, 2))
    torch.manual_seed(0)
    torch.testing.assert_close(attention(*heads(), dropout=0.5), outputs[0])


class Switched(Mask):
    """A mask that says something else when a switch that is no argument of it is turned."""

    def __init__(self, n: int) -> None:
        self.n = n

    on = True

    def structure(self):
        return type(self), self.n, self.on

    def rule(self, batch, head, query, key):
        return key <= query if self.on else key >= query


@pytest.mark.usefixtures("planned")
def test_masks_of_ones_own_are_always_asked(found):
    mask = Switched(3)
    for on in (True, True, True, False, True):
        Switched.on = on
        right(heads(), mask=mask)
    steps = [0]
    of_a_list = Where(lambda batch, head, query, key: key <= query + steps[0])
    for steps[0] in (0, 0, 0, 3, 0):
        right(heads(), mask=of_a_list)
    assert not any(found)


AHEAD = 0


def ahead(batch, head, query, key, by=0):
    return key <= query + by


def of_functions():
    """Masks by functions, each with what changes something that its answers follow from."""

    def closed_over(by, ids):
        def function(batch, head, query, key):
            return (key <= query + by) & (ids[query] == ids[key])

        def move():
            nonlocal by
            by += 2

        return function, move

    ids = torch.arange(LENGTH) // 9
    of_number, move = closed_over(0, ids)
    of_tensor, _ = closed_over(0, other := ids.clone())
    by_default = FunctionType(ahead.__code__, globals(), argdefs=(0,))
    by_code = FunctionType(ahead.__code__, globals(), argdefs=(0,))
    nested = lambda batch, head, query, key: by_default(batch, head, query, key)  # noqa: E731
    return {
        "a number closed over": (of_number, move),
        "a tensor closed over": (of_tensor, lambda: other.add_(torch.arange(LENGTH) % 2)),
        "a global number": (
            lambda batch, head, query, key: torch.where(key > AHEAD, key <= query, key < 3),
            lambda: globals().update(AHEAD=5),
        ),
        "a default": (by_default, lambda: setattr(by_default, "__defaults__", (2,))),
        "a function that it calls": (nested, lambda: setattr(by_default, "__defaults__", (4,))),
        "its code": (
            by_code,
            lambda: setattr(by_code, "__code__", (lambda batch, head, query, key: key >= query).__code__),
        ),
    }


@pytest.mark.parametrize("what", of_functions())
@pytest.mark.usefixtures("planned")
def test_what_the_answers_of_a_function_follow_from_is_looked_at(what, found):
    function, change = of_functions()[what]
    mask = Where(function)
    settle(*heads(), mask=mask)
    right(heads(1), mask=mask)
    assert found[-1]
    before = attention(*heads(1), mask=mask)
    change()
    right(heads(1), mask=mask)
    assert not found[-1]
    assert not torch.equal(attention(*heads(1), mask=mask), before)
    right(heads(2), mask=Where(lambda batch, head, query, key: key <= query))  # another function
    assert not found[-1]


@pytest.mark.parametrize(
    "mask",
    [
        lambda: Padding(torch.arange(LENGTH)[None].expand(2, -1) < torch.tensor([[9], [LENGTH]])),
        lambda: Document(torch.arange(LENGTH)[None] // 7),
        lambda: Dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.5),
    ],
)
@pytest.mark.usefixtures("planned")
def test_tensors_of_masks_are_known_as_themselves(mask, found):
    kept = mask()
    settle(*heads(), mask=kept)
    right(heads(1), mask=kept)
    assert found[-1]
    other = mask()
    right(heads(1), mask=other)
    assert not found[-1]
    tensor = next(value for value in vars(kept).values() if isinstance(value, Tensor))
    tensor[:] = tensor.flip(-1)
    right(heads(1), mask=kept)
    assert not found[-1]


@pytest.mark.parametrize("queries", [8, LENGTH])
@pytest.mark.parametrize(
    "mask",
    [
        lambda draw, queries: Dense(torch.rand(queries, LENGTH, generator=draw) < 0.7),
        lambda draw, queries: Padding(torch.rand(2, LENGTH, generator=draw) < 0.7) & Causal(),
        lambda draw, queries: Padding(torch.randint(1, LENGTH, (2,), generator=draw)),
        lambda draw, queries: Dense(torch.rand(queries, LENGTH, generator=draw) < 0.7) | Prefix(2),
    ],
    ids=["cells", "keys", "lengths", "either"],
)
def test_few_scores_are_known_again_whatever_data_their_mask_holds(mask, queries, found):
    draw, known = torch.Generator().manual_seed(0), []
    for seed in range(6):
        right(heads(seed, queries=queries), mask=mask(draw, queries))
        known.append(found[-1])
    assert all(known[3:])


def test_a_table_that_learns_is_never_taken_for_what_it_was():
    table = nn.Parameter(torch.zeros(32, HEADS))
    bias = RelativeBias(table)
    for step in range(6):
        right(heads(), bias=bias)
        with torch.no_grad():
            right(heads(), bias=bias)
            table.add_(step)


def test_slopes_that_begin_to_learn_are_given_gradients():
    slopes = torch.ones(HEADS)
    bias = Alibi(slopes=slopes)
    settle(*heads(), bias=bias, kernel="native")
    slopes.requires_grad_()
    attention(*heads(), bias=bias, kernel="native").square().sum().backward()
    assert slopes.grad is not None


def test_hidden_numbers_have_no_part(found):
    cells = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.4
    cells[:, 5] = False
    mask = Dense(cells)
    for bad in (0.0, 0.0, 0.0, torch.nan, torch.inf, 0.0):
        query, key, value = heads()
        expected = by_formula([query, key, value], mask=mask)
        key[:, :, 5] = value[:, :, 5] = bad
        found_now = attention(query, key, value, mask=mask, kernel="native")
        torch.testing.assert_close(found_now.double(), expected, atol=2e-5, rtol=2e-5)
    assert found[-1]


def test_no_more_calls_are_noted_than_so_many_and_none_again_and_again():
    for length in range(2, 3 * repeated.MAX_CALLS):
        settle(*heads(queries=length), mask=Causal())
        assert len(checked.noted) <= 2 * repeated.MAX_CALLS
    checked.forget()
    for step in range(1, 3 * repeated.MAX_WAYS):
        three = [torch.zeros(*t.shape[:3], step + SIZE)[..., :SIZE].copy_(t) for t in heads()]
        for _ in range(2):
            attention(*three, mask=Strided(3) | Strided(5))  # which is not noted for any length
    assert len(checked.noted) == 2 * repeated.MAX_WAYS


def test_nothing_of_a_call_is_kept_but_its_mask():
    three = heads()
    bias, sink = torch.zeros(HEADS, LENGTH, LENGTH), torch.zeros(HEADS)
    settle(*three, bias=bias, sink=sink)
    output = attention(*three, bias=bias, sink=sink)
    alive = [weakref.ref(t) for t in (*three, bias, sink, output)]
    del three, bias, sink, output
    gc.collect()
    assert [one() for one in alive] == [None] * 6


@pytest.mark.usefixtures("planned")
def test_what_is_known_as_itself_is_kept_so_that_nothing_else_takes_its_place():
    mask = Dense(torch.rand(LENGTH, LENGTH) < 0.5)
    cells = weakref.ref(mask.mask)
    settle(*heads(), mask=mask)
    del mask
    gc.collect()
    assert cells() is not None
    checked.forget()
    gc.collect()
    assert cells() is None


def test_objects_are_counted_as_often_as_they_are_held():
    three, mask, scale = heads(), Causal() & Window(9), 0.375
    given = {"mask": mask, "scale": scale}
    learning = [t.requires_grad_() for t in heads()]
    settle(*three, **given)
    settle(*learning, **given, kernel="native")
    _, held, *_ = checked.noted
    alike = next(part for part in held if isinstance(part, Alike))
    settle(*three, mask=mask, sink=torch.ones(HEADS, dtype=torch.float64))  # by its own code
    watched = *three, *learning, mask, scale, Causal, Tensor, torch.empty_like, attach, alike, None
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        attention(*three, **given)
        attention(*learning, **given, kernel="native").sum().backward()
        attention(*three, mask=mask, sink=torch.ones(HEADS, dtype=torch.float64))
        attention(*three, mask=Causal() & Window(8))  # like none of them, at first
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(now - then) < 100 for then, now in zip(before, after, strict=True))


def test_errors_of_a_call_are_its_own():
    three = [t.requires_grad_() for t in heads()]
    settle(*three, mask=Causal(), kernel="sdpa")
    noted = last_noted()
    noted.run = id(stop)
    with pytest.raises(StoppedError):
        attention(*three, mask=Causal(), kernel="sdpa")


def test_threads_may_call_at_once():
    wrong: list[object] = []

    def calls(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(150):
            try:
                mask = draw.choice([Causal(), Window(draw.randrange(2, 20)), Causal() & Prefix(draw.randrange(1, 20))])
                right(heads(draw.randrange(4), queries=draw.choice([LENGTH, 5, 9])), mask=mask)
            except BaseException as error:
                wrong.append(error)
                raise

    in_threads(calls, 4)
    assert not wrong


def real_keys(length: int, step: int) -> Tensor:
    """Padding on the left, another in each call; side by side, but for that of every fifth step."""
    padded = torch.tensor([[step % 4], [length if step % 7 == 3 else 0]])
    real = torch.arange(length) >= padded
    real[:, length // 2] &= step % 5 != 0
    return real


ONES = {
    "nothing": lambda length, step: {},
    "causal": lambda length, step: {"mask": Causal(), "softcap": 5.0},
    "window": lambda length, step: {"mask": Causal() & Window(9), "scale": 0.5},
    "padding": lambda length, step: {"mask": Padding(real_keys(length, step))},
    "one padding of all": lambda length, step: {"mask": Causal() & Padding(real_keys(length, step)[:1])},
    "padding in a window": lambda length, step: {"mask": Window(7) & Padding(real_keys(length, step))},
    "slopes": lambda length, step: {"mask": Causal(), "bias": Alibi(HEADS)},
    "buckets": lambda length, step: {"bias": RelativeBias(torch.linspace(-1, 1, 32 * HEADS).view(32, HEADS))},
    "slopes in a window": lambda length, step: {"mask": Window(6), "bias": Alibi(HEADS), "sink": torch.ones(HEADS)},
    "padding, slopes and sink": lambda length, step: {
        "mask": Causal() & Padding(real_keys(length, step)), "bias": Alibi(HEADS), "sink": torch.arange(4.0),
    },
    "another offset": lambda length, step: {"mask": Causal(offset=step)},
    "holes": lambda length, step: {"mask": Dense(torch.arange(length) % 3 != step % 3)},
    "streaming": lambda length, step: {"mask": Causal() & (Window(9) | Prefix(4))},
    "streaming, slopes and sink": lambda length, step: {
        "mask": Causal() & (Window(9) | Prefix(4)), "bias": Alibi(HEADS), "sink": torch.arange(4.0),
    },
    "streaming and padding": lambda length, step: {
        "mask": Causal() & (Window(9) | Prefix(4)) & Padding(real_keys(length, step)),
    },
    "window or stride": lambda length, step: {"mask": Window(5) | Strided(4), "bias": Alibi(HEADS)},
    "far keys and chunks": lambda length, step: {"mask": ~Window(5) & (Chunk(16) | ~Prefix(3))},
}  # fmt: skip


def written(length: int, dtype: torch.dtype, step: int) -> list[Tensor]:
    """The query of the last token, and keys and values of all: in a cache with room for more, or laid end to end."""
    query, key, value = heads(step, dtype, queries=1)
    parts = [torch.cat([part] * 4, dim=2) for part in (key, value)]
    parts = [part[:, :, :length] if step % 2 else part[:, :, :length].contiguous() for part in parts]
    return [query, *parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ONES)
def test_one_query_may_have_any_number_of_keys(kind, dtype, found):
    for step, length in enumerate([1, 2, 5, 6, 7, 30, 31, 32, 33, 34, 5, 64, 65, 66, 67, 68, 69, 70]):
        three = written(length, dtype, step)
        right(three, **ONES[kind](length, step))
    quickly = dtype is not torch.float64
    assert [found[-3], found[-1]] == [quickly] * 2  # between them, the formula


def of_positions(draw: random.Random, depth: int) -> Mask:
    """A mask of positions alone."""
    if not depth:
        return draw.choice([
            Causal(), Window(draw.choice([1, 3, 9])), ~Window(draw.choice([2, 8])), Prefix(draw.choice([0, 2, 7, 40])),
            ~Prefix(3), Strided(draw.choice([1, 3, 8])), Chunk(draw.choice([4, 16, 50])),
            Band(draw.randint(-3, 9), draw.randint(-2, 5)), Band(None, draw.randint(-6, 2)),
            Band(draw.randint(0, 9), None),
        ])  # fmt: skip
    left, right = of_positions(draw, depth - 1), of_positions(draw, draw.choice([0, depth - 1]))
    return left & right if draw.random() < 0.5 else left | right


def test_what_the_last_of_some_tokens_sees_is_what_its_mask_says():
    known = 0
    for seed in range(400):
        draw = random.Random(seed)
        mask, keys = of_positions(draw, draw.choice([0, 1, 2, 3])), draw.randint(1, 70)
        alternatives = seen_from_own_key(mask)
        if alternatives is None:
            continue
        known += 1
        own, seen = keys - 1, torch.zeros(keys, dtype=torch.bool)
        for low, high, since, until, step, chunk in alternatives:
            for key in range(since or 0, keys if until is None else min(until, keys)):
                inside = (low is None or key - own >= low) and (high is None or key - own <= high)
                same = chunk is None or key // chunk == own // chunk
                seen[key] |= inside and same and (own - key) % step == 0
        allowed = mask.bind(Grid(1, 1, 1, keys)).allowed(range(1), range(keys))
        assert torch.equal(seen, allowed.expand(1, 1, 1, keys).flatten()), mask
    assert known > 200
    many = product_of(Window(n) | Prefix(n) for n in range(1, 40))  # 2^39 alternatives
    assert seen_from_own_key(many) is None
    for other in (Causal(offset=3), Prefix([3]), Padding([3]), Where(lambda batch, head, query, key: key >= 0)):
        assert seen_from_own_key(Causal() | other) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_query_sees_what_any_mask_of_positions_says(dtype, found):
    quickly = 0
    for seed in range(120):
        checked.forget()
        draw = random.Random(seed)
        mask = of_positions(draw, draw.choice([1, 2, 3]))
        given = draw.choice([{}, {"bias": Alibi(HEADS)}, {"sink": torch.arange(4.0)}])
        for step in range(3):
            right(written(draw.randint(17, 31), dtype, step), mask=mask, **given)
        quickly += found[-1]
    assert quickly > 60


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "kind",
    ["window", "padding", "padding in a window", "padding, slopes and sink", "streaming", "streaming and padding"],
)
def test_keys_that_one_query_does_not_see_have_no_part(kind, bad, found):
    for step in range(1, 12):
        length = 20 + step
        three, given = written(length, torch.float32, step), ONES[kind](length, step)
        expected = by_formula(three, **given)
        seen = given["mask"].bind(Grid(2, HEADS, 1, length)).allowed(range(1), range(length))
        for part in three[1:]:
            part.masked_fill_(~seen[:, 0, 0, :, None].expand(2, length, 1)[:, None], bad)
        torch.testing.assert_close(attention(*three, **given).double(), expected, atol=2e-5, rtol=2e-5)
    assert found[-1]


def test_values_of_another_length_are_refused_whatever_came_before():
    for step in range(4):
        query, key, value = written(20, torch.float32, step)
        right([query, key, value])
    with pytest.raises(ShapeError, match="value"):
        attention(query, key, value[:, :, 1:])


def test_padding_of_another_length_is_refused_whatever_came_before():
    for step in range(4):
        right(written(20, torch.float32, step), mask=Padding(real_keys(20, step + 1)))
    with pytest.raises(ShapeError, match="Padding"):
        attention(*written(20, torch.float32, 0), mask=Padding(real_keys(19, 1)))


def test_a_bias_of_one_query_that_changes_is_made_anew(found):
    slopes = torch.ones(HEADS)
    for step in range(8):
        slopes.data.fill_(step // 2)
        right(written(20, torch.float32, step), bias=Alibi(slopes=slopes))


def test_one_query_that_learns_has_gradients():
    for step in range(4):
        three = written(20, torch.float32, step)
        with torch.no_grad():
            right(three, mask=Causal())
        three[1].requires_grad_()
        attention(*three, mask=Causal()).sum().backward()
        assert three[1].grad is not None


def test_calls_of_any_length_are_noted_only_so_often(monkeypatch):
    noted, real = [], any_length.note_as
    monkeypatch.setattr(any_length, "note_as", lambda *given, **more: noted.append(given) or real(*given, **more))
    for n in range(2, checked.MAX_OPEN + 42):
        attention(*written(20, torch.float32, n), mask=Causal() & Window(n))
    assert len(noted) == checked.MAX_OPEN + 40 // any_length.ONE_OF
    right(written(20, torch.float32, 0), mask=Causal() & Window(500))


def texts(length: int, step: int) -> Document:
    """Packed documents, others for each text and in each call."""
    draw = torch.Generator().manual_seed(step)
    return Document((torch.rand(2, length, generator=draw) < 0.2).cumsum(1))


def lengths(keys: int, step: int) -> Padding:
    return Padding([keys - step % keys, min(keys, 3)])


def at_random(*shape: int, step: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(step)) < 0.6


def offset_band(before: int, after: int, offset: Tensor) -> Band:
    return Band(before, after, offset=offset)


ANY_LENGTHS = {
    "nothing": lambda queries, keys, step: {},
    "causal": lambda queries, keys, step: {"mask": Causal(), "softcap": 5.0},
    "window": lambda queries, keys, step: {"mask": Causal() & Window(9), "scale": 0.5},
    "both ways": lambda queries, keys, step: {"mask": Window(4), "sink": torch.arange(4.0)},
    "before its own": lambda queries, keys, step: {"mask": Band(5, -1)},
    "padding": lambda queries, keys, step: {"mask": Padding(real_keys(keys, step))},
    "one padding of all": lambda queries, keys, step: {"mask": Causal() & Padding(real_keys(keys, step)[:1])},
    "lengths": lambda queries, keys, step: {"mask": lengths(keys, step) & Causal()},
    "slopes": lambda queries, keys, step: {"mask": Causal(), "bias": Alibi(HEADS)},
    "buckets": lambda queries, keys, step: {"bias": RelativeBias(torch.linspace(-1, 1, 32 * HEADS).view(32, HEADS))},
    "both": lambda queries, keys, step: {
        "mask": Window(6) & lengths(keys, step), "bias": Alibi(HEADS) + Alibi(HEADS), "sink": torch.arange(4.0),
    },
    "another offset": lambda queries, keys, step: {"mask": Causal(offset=3 * step - 9)},
    "the same offset twice": lambda queries, keys, step: {
        "mask": Causal(offset=step) & Window(5, offset=step) & lengths(keys, step), "bias": Alibi(HEADS),
    },
    "two offsets": lambda queries, keys, step: {"mask": Causal(offset=step) & Window(9, offset=step + 1)},
    "an offset and none": lambda queries, keys, step: {"mask": Causal(offset=step) & Window(9)},
    "an offset and offsets": lambda queries, keys, step: {
        "mask": Causal(offset=step) & Window(9, offset=torch.tensor([step, 2])),
    },
    "offsets": lambda queries, keys, step: {"mask": Causal(offset=torch.tensor([step, 2]))},
    "offsets of a window, and padding": lambda queries, keys, step: {
        "mask": offset_band(6, 2, torch.tensor([step - 3, 9 - step])) & lengths(keys, step), "bias": Alibi(HEADS),
    },
    "holes": lambda queries, keys, step: {
        "mask": Padding(at_random(1, keys, step=step)) & Causal(), "bias": Alibi(HEADS),
    },
    "cells": lambda queries, keys, step: {"mask": Dense(at_random(1, queries, keys, step=step))},
    "cells of texts": lambda queries, keys, step: {
        "mask": Dense(at_random(2, 1, queries, keys, step=step)) & Window(9), "sink": torch.arange(4.0),
    },
    "cells of heads": lambda queries, keys, step: {
        "mask": Dense(at_random(HEADS, queries, keys, step=step)) & lengths(keys, step),
    },
    "cells of each head and text": lambda queries, keys, step: {
        "mask": Dense(at_random(2, HEADS, queries, keys, step=step)) & Causal(),
    },
    "cells of heads for all queries": lambda queries, keys, step: {
        "mask": Dense(at_random(1, HEADS, 1, keys, step=step)),
    },
    "keys of texts": lambda queries, keys, step: {"mask": Dense(at_random(2, 1, 1, keys, step=step)) & Causal()},
    "cells and holes": lambda queries, keys, step: {
        "mask": Dense(at_random(1, queries, keys, step=step)) & Padding(at_random(2, keys, step=step + 1)) & Causal(),
    },
    "of two sides": lambda queries, keys, step: {
        "mask": Document(torch.arange(queries).expand(2, -1) % 3, torch.arange(keys) // 2 % 3),
    },
    "of two sides, cells and keys": lambda queries, keys, step: {
        "mask": Document(torch.arange(queries) % 3, torch.arange(2 * keys).view(2, keys) % 3)
        & Dense(at_random(1, queries, keys, step=step)) & Padding(at_random(1, keys, step=step + 1)),
    },
    "a prefix": lambda queries, keys, step: {"mask": Causal() | Prefix(3)},
}  # fmt: skip
SQUARES = {
    "documents": lambda queries, keys, step: {"mask": texts(keys, step)},
    "documents of all": lambda queries, keys, step: {"mask": Document(texts(keys, step).query_ids[1]) & Causal()},
    "documents and padding": lambda queries, keys, step: {
        "mask": Causal() & texts(keys, step) & Padding(real_keys(keys, step)), "bias": Alibi(HEADS),
    },
    "documents of one text and padding of two": lambda queries, keys, step: {
        "mask": lengths(keys, step) & Document(texts(keys, step).query_ids[:1]),
    },
    "documents apart": lambda queries, keys, step: {"mask": Document(torch.arange(keys) % 3)},
    "documents apart of texts, and holes": lambda queries, keys, step: {
        "mask": Document(torch.arange(2 * keys).view(2, keys) % 5) & Padding(at_random(2, keys, step=step)) & Causal(),
    },
    "documents before its own": lambda queries, keys, step: {"mask": texts(keys, step) & Band(5, -1)},
}  # fmt: skip
IN_DOUBT = "cells", "cells of heads", "cells and holes", "of two sides, cells and keys"
NEVER_ANY = "two offsets", "an offset and none", "an offset and offsets"


def read(queries: int, keys: int, dtype: torch.dtype, step: int) -> list[Tensor]:
    """Query, key and value of lengths of their own, each head by itself or as a layer projects them."""
    draw = torch.Generator().manual_seed(step)
    shapes = (2, HEADS, queries, SIZE), (2, 2, keys, SIZE), (2, 2, keys, SIZE)
    three = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return [part.transpose(1, 2).contiguous().transpose(1, 2) for part in three] if step % 2 else three


def anew(three: list[Tensor], **given) -> AttentionOutput:
    """Output and lse, found without looking for calls like it."""
    noted, checked.noted = checked.noted, ()
    try:
        return attention_with_lse(*three, **given)
    finally:
        checked.noted = noted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [*ANY_LENGTHS, *SQUARES])
def test_lengths_may_be_any_of_the_same_magnitude(kind, dtype, found):
    of_length = [(24, 24), (17, 17), (31, 31), (16, 16), (25, 25), (30, 30)]
    of_length += [(3, 24), (2, 17), (3, 31), (24, 9), (16, 8), (31, 15)] if kind in ANY_LENGTHS else []
    for step, (queries, keys) in enumerate(of_length, 1):
        three = read(queries, keys, dtype, step)
        given = {**ANY_LENGTHS, **SQUARES}[kind](queries, keys, step)
        right(three, "native", **given)
        is_found = found[-1]
        output, lse = attention_with_lse(*three, **given, kernel="native")
        assert found[-1] == is_found
        assert all(map(torch.equal, (output, lse), anew(three, **given, kernel="native")))
        assert torch.equal(output, attention(*three, **given, kernel="native"))
        if kind in NEVER_ANY or dtype is torch.float64:
            assert not is_found
        else:
            in_doubt = kind in IN_DOUBT and queries == 2  # cells of as many queries as there are texts
            assert is_found == (step not in (1, 7, 10) and not in_doubt), (queries, keys)


ALTERNATIVES = {
    "streaming": lambda keys, step: {"mask": Causal() & (Window(7) | Prefix(3))},
    "a prefix of all": lambda keys, step: {"mask": Causal() | Prefix(9), "softcap": 5.0},
    "window or stride, slopes": lambda keys, step: {"mask": Causal() & (Window(4) | Strided(5)), "bias": Alibi(HEADS)},
    "far keys": lambda keys, step: {"mask": ~Window(6)},
    "chunks": lambda keys, step: {"mask": Causal() & Chunk(8)},
    "streaming, padding": lambda keys, step: {"mask": Causal() & (Window(7) | Prefix(3)) & lengths(keys, step)},
    "a prefix, documents": lambda keys, step: {"mask": (Window(5) | Prefix(4)) & texts(keys, step)},
    "chunks, sink": lambda keys, step: {"mask": Chunk(8) | Prefix(2), "sink": torch.arange(4.0)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ALTERNATIVES)
def test_alternatives_of_positions_may_be_of_any_length(kind, learns, dtype, found):
    of_length = [(24, 24), (17, 17), (31, 31), (25, 25), (30, 30), (30, 30)]
    of_length += [] if "documents" in kind else [(3, 24), (2, 17), (3, 31), (24, 17), (30, 19)]
    for step, (queries, keys) in enumerate(of_length, 1):
        leaves = [part.requires_grad_(learns) for part in read(queries, keys, dtype, step)]
        exact = [part.detach().double().requires_grad_(learns) for part in leaves]
        given = ALTERNATIVES[kind](keys, step)
        pairs = [attention_with_lse(*leaves, **given, kernel="native")]
        is_found = found[-1]
        pairs.append(attention_with_lse(*exact, **given, kernel="reference"))
        if learns:
            weights = torch.linspace(-1, 1, queries * SIZE).view(queries, SIZE).expand_as(pairs[0].output).to(dtype)
            pairs = [
                (*results, *torch.autograd.grad(results.output, inputs, weights.to(results.output)))
                for results, inputs in zip(pairs, (leaves, exact), strict=True)
            ]
        for one, other in zip(*pairs, strict=True):
            error = 3e-5 if dtype is torch.float32 else 4e-2
            torch.testing.assert_close(one.double(), other, atol=error, rtol=error)
        assert is_found == (step not in (1, 7, 10)), (queries, keys)


def test_what_alternatives_hide_is_left_out_by_strips_if_it_is_much(found):
    three = [torch.randn(2, HEADS, 360, SIZE) for _ in range(3)]
    for mask, quickly in ((Causal() & (Window(300) | Prefix(4)), True), (Causal() & (Window(9) | Prefix(4)), False)):
        for length in (300, 360, 310):
            part = [tensor[:, :, :length] for tensor in three]
            before = len(checked.noted)
            right(part, "native", mask=mask)
            assert found[-1] is (quickly and length > 300)
            assert quickly or len(checked.noted) == before
        assert torch.equal(attention(*part, mask=mask, kernel="native"), attention(*part, mask=mask, kernel="native"))


def test_padding_and_documents_of_another_kind_are_read_as_such(found):
    ids = texts(24, 1).query_ids
    sides = Document(ids, ids[:1]), Document(ids, texts(24, 9).query_ids)
    for mask in (texts(20, 2), Document(ids), Document(ids.int()), *sides):
        length = mask.query_ids.shape[1]
        right(read(length, length, torch.float32, 0), "native", mask=mask)
    real = real_keys(24, 1)
    numbers = torch.tensor([[24, 9], [3, 24]])
    for mask in (real_keys(20, 2), real, numbers[0], numbers[:, 0], [7, 2], real.T.contiguous().T, real[:1]):
        length = 20 if len(mask) == 2 and torch.as_tensor(mask).shape[-1] == 20 else 24
        right(read(length, length, torch.float32, 0), "native", mask=Padding(mask))
    assert found.count(True) > 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["window", "both ways", "lengths", "both", "documents before its own"])
def test_keys_that_no_query_sees_have_no_part(kind, bad, found):
    for step, (queries, keys) in enumerate([(24, 24), (17, 17), (31, 31), (3, 24), (2, 17), (3, 31)]):
        if queries != keys and kind in SQUARES:
            continue
        three, given = read(queries, keys, torch.float32, step), {**ANY_LENGTHS, **SQUARES}[kind](queries, keys, step)
        expected = by_formula(three, **given)
        seen = given["mask"].bind(Grid(2, HEADS, queries, keys)).allowed(range(queries), range(keys)).any(2)
        for part in three[1:]:
            part.masked_fill_(~seen[:, :, :, None].expand(2, 2, keys, 1), bad)
        found_now = attention(*three, **given, kernel="native")
        torch.testing.assert_close(found_now.double(), expected, atol=2e-5, rtol=2e-5)
    assert any(found)


@pytest.mark.parametrize(
    "mask",
    [
        Padding(torch.ones(2, 19, dtype=torch.bool)), Padding([20, 21]), Padding([4]), Padding([1, 2, 3]),
        Padding(torch.ones(3, 20, dtype=torch.bool)),
    ],
    ids=["keys", "more than there are", "of one", "of three", "of three texts"],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_whatever_came_before(mask):
    for step, keys in enumerate((20, 21, 22)):
        right(read(keys, keys, torch.float32, step), "native", mask=lengths(keys, step))
        right(read(keys, keys, torch.float32, step), "native", mask=Padding(real_keys(keys, step)))
    with pytest.raises(ShapeError, match="Padding"):
        attention(*read(20, 20, torch.float32, 0), mask=mask, kernel="native")


def test_what_is_said_in_c_and_in_python_is_the_same():
    texts = [path.read_text(encoding="utf-8") for path in (Path(binding.__file__).parent / "c").glob("*.[ch]")]
    found = re.findall(r"^#define (\w+) (\d+|\(\d+ << \d+\))(?= |$)", "\n".join(texts), re.MULTILINE)
    numbers = {name: eval(value) for name, value in found}
    assert numbers["MOST_TEXTS"] == any_length.MAX_TEXTS
    assert numbers["MOST_SCORES"] == any_length.MAX_SCORES
    assert numbers["MOST_CELLS"] == any_length.MOST_CELLS
    assert numbers["MOST_EVALUATED"] == intervals.MAX_CELLS
    assert (numbers["MOST_DEPTH"], numbers["PARTS"]) == (terms.MOST_DEPTH, terms.MOST_PARTS)
    assert numbers["MOST_UNSORTED"] == tuning.SCORES_WORTH_SORTING_DOCUMENTS
    assert 1 / numbers["KEYS_FOR_A_GAP"] == tuning.GAPS_WORTH_SORTING
    assert numbers["MOST_HIDDEN"] == tuning.SCORES_WORTH_SORTING
    assert numbers["MOST_ALTERNATIVES"] == binding.MOST_ALTERNATIVES
    assert numbers["MOST_TENSORS"] == binding.MOST_TENSORS
    assert numbers["QUERIES_OF_A_WORD"] == binding.QUERIES_OF_A_WORD
    assert (numbers["MOST_STEPS"], numbers["MOST_NOTED"]) == (repeated.MAX_STEPS, repeated.MAX_NOTED)
    assert (numbers["BIAS"], numbers["SINK"]) == (repeated.BIAS, repeated.SINK)
    assert numbers["KEYS_OF_A_QUERY"] == dealing.MIN_KEYS_OF_A_QUERY
    assert numbers["LEAST_PIECE"] == dealing.MIN_PIECE


def test_cells_that_do_not_fit_or_may_be_of_texts_are_refused_whatever_came_before():
    for step, queries in enumerate((5, 6, 7)):
        right(read(queries, 20, torch.float32, step), "native", mask=Dense(at_random(queries, 20, step=step)))
        right(read(queries, 20, torch.float32, step), "native", mask=Dense(at_random(3, 1, queries, 20, step=step)[:2]))
    for shape in ((2, 20), (2, 2, 6, 19), (1, 3, 6, 20), (3, 1, 6, 20), (5, 20), (2, 6, 20)):
        with pytest.raises(ShapeError, match="Dense"):
            attention(*read(2 if shape == (2, 20) else 6, 20, torch.float32, 0), mask=Dense(at_random(*shape, step=1)))


def test_offsets_that_do_not_fit_are_refused_whatever_came_before():
    for step in range(3):
        right(read(9, 20, torch.float32, step), "native", mask=Causal(offset=torch.tensor([step, 7])))
    right(read(9, 20, torch.float32, 0), "native", mask=Causal(offset=torch.tensor([1 << 45, -(1 << 45)])))
    with pytest.raises(ShapeError, match="offset"):
        attention(*read(9, 20, torch.float32, 0), mask=Causal(offset=torch.tensor([1, 2, 3])), kernel="native")


def test_documents_that_do_not_fit_are_refused_whatever_came_before():
    for step, keys in enumerate((20, 21, 22)):
        right(read(keys, keys, torch.float32, step), "native", mask=texts(keys, step))
    with pytest.raises(ShapeError, match="Document"):
        attention(*read(20, 20, torch.float32, 0), mask=texts(19, 0), kernel="native")
    with pytest.raises(ShapeError, match="Document"):
        attention(*read(20, 24, torch.float32, 0), mask=texts(20, 0), kernel="native")


def test_what_learns_is_not_taken_for_what_does_not():
    for step, keys in enumerate((20, 21, 22, 23)):
        three = read(keys, keys, torch.float32, step)
        right(three, "native", mask=Causal(), bias=Alibi(HEADS))
        three[step % 3].requires_grad_()
        attention(*three, mask=Causal(), bias=Alibi(HEADS), kernel="native").sum().backward()
        assert three[step % 3].grad is not None


def gradients(three: list[Tensor], kernel: str, *, twice: bool = False, **given) -> list[Tensor]:
    """Of query, key and value; those of their squares, too."""
    leaves = [part.detach().clone().requires_grad_() for part in three]
    output = attention(*leaves, **given, kernel=kernel)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    found = torch.autograd.grad(output, leaves, weights, create_graph=twice)
    of_squares = torch.autograd.grad(sum(grad.square().sum() for grad in found), leaves) if twice else ()
    return [*found, *of_squares]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nothing", "causal", "window", "before its own", "slopes", "buckets"])
def test_lengths_of_what_learns_may_be_any_too(kind, dtype, found):
    of_length = [(24, 24), (17, 17), (31, 31), (17, 17), (3, 24), (2, 17), *((n, n) for n in range(18, 31))]
    for step, (queries, keys) in enumerate(of_length):
        three, given = read(queries, keys, dtype, step), ANY_LENGTHS[kind](queries, keys, step)
        ours = gradients(three, "native", **given)
        assert found[-1] == (step not in (0, 4))
        for one, expected in zip(ours, gradients([p.double() for p in three], "reference", **given), strict=True):
            error = 2e-5 if dtype is torch.float32 else 4e-2
            torch.testing.assert_close(one.double(), expected, atol=error, rtol=error)
    queries, fixed = of_length[-1], ctypes.cast(last_of_any_length().alike, ctypes.py_object).value
    assert queries in fixed._known
    assert len(fixed._known) <= any_length.MAX_PLANS


def last_of_any_length() -> binding.RepeatedOf:
    """What the library is told of the squares that were noted last."""
    parts = [part for held in checked.noted[1::2] for part in held if isinstance(part, binding.RepeatedOf)]
    return next(part for part in parts if part.three[1].shape[2] == -1)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
def test_gradients_of_gradients_of_any_length_are_right():
    for step, keys in enumerate((24, 17, 31)):
        three = read(keys, keys, torch.float32, step)
        ours = gradients(three, "native", twice=True, mask=Causal())
        expected = gradients([p.double() for p in three], "reference", twice=True, mask=Causal())
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_offsets_that_differ_are_seen_whatever_came_before(found):
    for one, other in ((3, 3), (4, 4), (4, 5), (-1, -1), (0, 0), (-1, 2), (1 << 41, 1 << 41), (7, 7)):
        mask = Causal(offset=one) & Window(4, offset=other)
        right(read(24, 24, torch.float32, one % 7), "native", mask=mask)
    assert found[1::2] == [False, True, False, False, True, False, False, True]


def test_an_offset_of_what_learns_is_that_of_its_call():
    for step, offset in enumerate((0, 3, 7, 3)):
        three = read(24, 24, torch.float32, step)
        expected = gradients([p.double() for p in three], "reference", mask=Causal(offset=offset))
        for one, other in zip(gradients(three, "native", mask=Causal(offset=offset)), expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("queries", [1, 4, 24])
def test_cells_of_four_axes_are_meant_for_heads_however_many_texts_there_are(queries, found):
    """As many heads as texts, and for 4 queries as many queries."""
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        three = [torch.randn(4, heads, n, 16, generator=draw) for heads, n in ((4, queries), (2, 24), (2, 24))]
        right(three, mask=Dense(at_random(1, 4, queries, 24, step=step)), kernel="auto" if queries == 1 else "native")
    assert found[1::2] == [False, True, True, True]
    with pytest.raises(ShapeError, match="Dense"):
        attention(*three, mask=Dense(at_random(4, queries, 24, step=9)))


WITH_DATA = [
    "padding", "one padding of all", "lengths", "another offset", "the same offset twice", "offsets", "holes", "cells",
    "cells of texts", "cells of each head and text", "cells of heads for all queries", "keys of texts",
    "cells and holes", "of two sides", "of two sides, cells and keys", "offsets of a window, and padding", *SQUARES,
]  # fmt: skip


def write_into(mask: Mask) -> None:
    """Other data in all tensors of a mask."""
    for leaf in mask.leaves():
        for value in leaf.arguments().values():
            if isinstance(value, Tensor):
                value.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", WITH_DATA)
def test_data_of_what_learns_is_that_of_its_call(kind, dtype, found):
    """However it may change before gradients are asked for."""
    for step, keys in enumerate((24, 17, 31, 17, 17)):
        given = {**ANY_LENGTHS, **SQUARES}[kind](keys, keys, step + 1)
        leaves = [part.requires_grad_() for part in read(keys, keys, dtype, step)]
        doubles = [part.detach().double().requires_grad_() for part in leaves]
        expected = attention(*doubles, **given, kernel="reference")
        expected_grads = torch.autograd.grad(expected.sin().sum(), doubles)
        output = attention(*leaves, **given, kernel="native")
        assert found[-1] == (step > 0)
        write_into(given["mask"])
        error = 2e-5 if dtype is torch.float32 else 4e-2
        for one, other in zip(torch.autograd.grad(output.sin().sum(), leaves), expected_grads, strict=True):
            torch.testing.assert_close(one.double(), other, atol=error, rtol=error)


def test_gradients_of_a_mask_that_stays_are_planned_once(found, monkeypatch):
    planned, real = [], any_length.intervals_from
    monkeypatch.setattr(any_length, "intervals_from", lambda kept: planned.append(kept) or real(kept))
    masks = Causal() & Padding(real_keys(24, 1)), Dense(at_random(1, 24, 24, step=2)), texts(24, 3)
    for mask in masks:
        for step in range(4):
            three = read(24, 24, torch.float32, step)
            expected = gradients([p.double() for p in three], "reference", mask=mask)
            for one, other in zip(gradients(three, "native", mask=mask), expected, strict=True):
                torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)
        assert found[-1]
    assert len(planned) == len(masks)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("kind", ["padding", "cells and holes", "documents and padding", "offsets"])
def test_gradients_of_gradients_under_data_are_right(kind, found):
    for step, keys in enumerate((24, 17, 31)):
        three, given = read(keys, keys, torch.float32, step), {**ANY_LENGTHS, **SQUARES}[kind](keys, keys, step + 1)
        ours = gradients(three, "native", twice=True, **given)
        expected = gradients([p.double() for p in three], "reference", twice=True, **given)
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    assert any(found)


def test_lengths_are_any_only_where_the_library_is_chosen_for_all(monkeypatch, found):
    monkeypatch.setattr(any_length, "choose", lambda call, name: NATIVE_KERNEL if len(call.query[0, 0]) < 31 else None)
    for step, keys in enumerate((20, 21, 22)):
        right(read(keys, keys, torch.float32, step), "native", mask=Causal())
    assert not any(found)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("other", [None, "text", 1.5, [1.0], torch.Size([2])], ids=repr)
def test_what_is_no_tensor_is_refused_as_ever(place, other):
    settle(*heads())
    with pytest.raises(TypeError):
        attention(*(other if n == place else tensor for n, tensor in enumerate(heads())))


def test_padding_of_no_key_at_all_is_refused_whatever_came_before():
    for step in range(4):
        right(written(20, torch.float32, step), mask=Padding(real_keys(20, step + 1)))
    with pytest.raises(ShapeError):
        attention(*written(20, torch.float32, 0), mask=Padding(torch.ones(2, 0, dtype=torch.bool)))


def test_tensors_without_numbers_are_not_read(capfd):
    settle(*heads())
    with FakeTensorMode():
        assert attention(*heads()).shape == (2, HEADS, LENGTH, SIZE)
    attention(*(tensor.to("meta") for tensor in heads()))
    assert "data pointer" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "pull", [Tensor.sum, Tensor.mean, lambda output: output.square().sum()], ids=["sum", "mean", "squares"]
)
def test_the_gradients_of_a_sum_are_computed_at_the_first_try(pull, pulled, monkeypatch):
    """Its gradient is one number for all, which lies nowhere as the library reads it."""
    outcomes, run = [], ready.Pass.run
    monkeypatch.setattr(ready.Pass, "run", lambda *given: (outcomes.append(run(*given)), outcomes[-1])[1])
    three = [tensor.requires_grad_() for tensor in heads()]
    for tries in ([binding.DONE], []):  # of its first passes, and of those that the library finds by itself
        for _ in range(3):
            outcomes.clear()
            grads = torch.autograd.grad(pull(attention(*three, mask=Causal(), kernel="native")), three)
        assert outcomes == tries
    assert pulled == [True] * 3
    right = torch.autograd.grad(pull(attention(*three, mask=Causal(), kernel="reference")), three)
    for one, other in zip(grads, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


PULLED = {
    "causal": lambda keys, step: {"mask": Causal()},
    "slopes, softcap": lambda keys, step: {"mask": Window(9), "bias": Alibi(HEADS), "softcap": 5.0},
    "a bias tensor": lambda keys, step: {"bias": torch.linspace(-step, 1, HEADS * keys).view(1, HEADS, 1, keys)},
    "padding": lambda keys, step: {"mask": Padding(torch.tensor([keys // 2, keys - step]))},
    "keys at random": lambda keys, step: {"mask": Padding(at_random(2, keys, step=step))},
    "cells": lambda keys, step: {"mask": Dense(at_random(2, 1, 1, keys, step=step))},
    "places": lambda keys, step: {"mask": Causal(offset=torch.tensor([keys // 2, keys - step]))},
    "padding and a bias tensor": lambda keys, step: {
        "mask": Padding([keys // 2, keys - step]), "bias": torch.linspace(-step, 1, keys)[None, None, None],
    },
    "a sink": lambda keys, step: {"mask": Causal(), "sink": torch.linspace(-1, step, HEADS)},
    "a sink that learns": lambda keys, step: {"sink": torch.linspace(-1, step, HEADS).requires_grad_()},
    "places and a sink that learns": lambda keys, step: {
        "mask": Causal(offset=torch.tensor([keys // 2, keys - step])), "sink": torch.ones(HEADS).requires_grad_(),
    },
    "padding, a bias tensor, and a sink that learns": lambda keys, step: {
        "mask": Padding([keys // 2, keys - step]), "bias": torch.linspace(-step, 1, keys)[None, None, None],
        "sink": torch.linspace(-1, step, HEADS).requires_grad_(),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (5, 24), (1, 24), (1, 700), (3, 700)])
@pytest.mark.parametrize("kind", PULLED)
def test_gradients_like_earlier_ones_are_found_by_the_library_alone(kind, queries, keys, dtype, pulled, monkeypatch):
    """Those of many keys are added up by several threads, elsewhere."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for step in range(1, 9):
        leaves = [part.requires_grad_() for part in read(queries, keys, dtype, 2 * step)]
        given, weights = PULLED[kind](keys, step), torch.linspace(-1, step, queries * SIZE).view(queries, SIZE)
        output = attention(*leaves, **given, kernel="native")
        if kind.endswith("learns"):
            leaves.append(given["sink"])
        grads = torch.autograd.grad(output, leaves, weights.expand_as(output).contiguous().to(dtype))
        exact = [part.detach().double().requires_grad_() for part in leaves]
        if kind.endswith("learns"):
            given["sink"] = exact[-1]
        expected = attention(*exact[:3], **given, kernel="reference")
        right = torch.autograd.grad(expected, exact, weights.expand_as(expected))
        for leaf, one, other in zip(leaves, grads, right, strict=True):
            assert one.dtype is leaf.dtype
            assert (one.double() - other).norm() <= (2e-5 if dtype is torch.float32 else 2e-2) * (1 + other.norm())
    assert all(pulled[-2:])
    assert len(pulled) >= 3


def test_a_tensor_that_is_added_is_that_of_its_call_whatever_else_is_added(pulled):
    """Of a sum of biases, the library reads one tensor; which learns, so that its gradient is no one else's matter."""
    table, learned = torch.randn(1, HEADS, LENGTH, LENGTH), torch.randn(32, HEADS)
    for learns in (False, True):
        learned.requires_grad_(learns)
        for step in range(5):
            leaves = [part.requires_grad_() for part in heads(step)]
            asked = [*leaves, learned] if learns else leaves
            found = [
                torch.autograd.grad(
                    attention(*leaves, bias=RelativeBias(learned) + Given(table), kernel=kernel).sin().sum(), asked
                )
                for kernel in ("native", "reference")
            ]
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(one, other, atol=5e-5, rtol=5e-5)


class Kept:
    """What `torch.autograd.graph.saved_tensors_hooks` keeps instead of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = tensor.clone()


def lie_elsewhere(kept: Kept) -> Tensor:
    """The tensor, in other strides if it has any."""
    return kept.copy.mT.contiguous().mT if kept.copy.dim() > 1 else kept.copy


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("has_sink", [False, True], ids=["", "a sink"])
@pytest.mark.parametrize("way", ["threads", "twice", "many", "lse", "negative", "elsewhere", "hidden"])
def test_other_gradients_are_right_too(way, has_sink, pulled, monkeypatch):
    """threads: by more of them. twice: gradients that have gradients. many: of several at once. lse: of that, too.
    negative: of a gradient that is another one's negative. elsewhere: saved tensors that lie in another way.
    hidden: NaN under the mask."""
    sink = torch.linspace(-1, 1, HEADS).requires_grad_() if has_sink else None
    given, three = {"mask": Causal() & Padding([LENGTH, 9]), "sink": sink}, [part.requires_grad_() for part in heads()]
    leaves = three if sink is None else [*three, sink]
    weights = torch.randn(2, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        torch.autograd.grad(attention(*three, **given, kernel="native"), leaves, weights)
    assert pulled.pop()
    pulled.clear()

    def grads(kernel: str) -> list[Tensor]:
        output, lse = attention_with_lse(*three, **given, kernel=kernel)
        if way == "twice":
            firsts = torch.autograd.grad(output, leaves, weights, create_graph=True)
            return [*firsts, *torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves)]
        if way == "many":
            return [*torch.autograd.grad(output, leaves, torch.stack([weights, -weights]), is_grads_batched=True)]
        if way == "lse":
            return [*torch.autograd.grad((output, lse), leaves, (weights, weights[..., 0]))]
        if way == "negative":
            return [*torch.autograd.grad(output, leaves, torch.complex(weights, weights).conj().imag)]
        return [*torch.autograd.grad(output, leaves, weights)]

    if way == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if way == "hidden":
        for part in three[1:]:
            part.data[1, :, 9:] = torch.nan
    if way == "elsewhere":
        with torch.autograd.graph.saved_tensors_hooks(Kept, lie_elsewhere):
            found = grads("native")
    else:
        found = grads("native")
    assert not any(pulled)
    for one, other in zip(found, grads("reference"), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
def test_a_derivative_that_is_carried_forward_through_gradients_is_not_lost(pulled):
    leaves, weights = [part.requires_grad_() for part in heads()], torch.randn(2, HEADS, LENGTH, SIZE)
    for _ in range(4):
        output = attention(*leaves, mask=Causal(), kernel="native")
        torch.autograd.grad(output, leaves, weights, retain_graph=True)
    assert pulled[-1]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        torch.autograd.grad(output, leaves, forward_ad.make_dual(weights, weights))


@pytest.mark.parametrize("has_sink", [False, True], ids=["", "a sink"])
def test_objects_are_counted_as_often_by_gradients(has_sink, pulled):
    leaves, weights = [part.requires_grad_() for part in heads()], torch.randn(2, HEADS, LENGTH, SIZE)
    sink = torch.zeros(HEADS).requires_grad_() if has_sink else None
    learns = leaves if sink is None else [*leaves, sink]
    masks = [Causal() & Padding(torch.tensor([LENGTH, 3 + step])) for step in range(6)]
    for mask in masks:
        torch.autograd.grad(attention(*leaves, mask=mask, sink=sink, kernel="native"), learns, weights)
    watched = *learns, weights, None, torch.empty_like
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        grads = torch.autograd.grad(attention(*leaves, mask=masks[0], sink=sink, kernel="native"), learns, weights)
        assert all(sys.getrefcount(grad) == 3 for grad in grads)  # the tuple's, the loop's and the argument's
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(pulled[-1000:])
    assert all(abs(now - then) < 100 for then, now in zip(before, after, strict=True))


TABLES = {
    "of heads": lambda queries, keys, draw: torch.randn(1, HEADS, queries, keys, generator=draw),
    "of texts, by key": lambda queries, keys, draw: torch.randn(2, 1, keys, queries, generator=draw).mT,
    "of keys": lambda queries, keys, draw: torch.randn(2, HEADS, 1, keys, generator=draw),
    "with -inf": lambda queries, keys, draw: torch.randn(1, 1, queries, keys, generator=draw).sub(0.5).log(),
    "in half precision": lambda queries, keys, draw: torch.randn(1, HEADS, queries, keys, generator=draw).bfloat16(),
}
WITH_A_TABLE = {
    "padding": lambda queries, keys, step: Padding(real_keys(keys, step)),
    "lengths, causal": lambda queries, keys, step: Causal() & lengths(keys, step),
    "documents": lambda queries, keys, step: texts(keys, step),
    "cells": lambda queries, keys, step: Dense(
        torch.rand(1, 1, queries, keys, generator=torch.Generator().manual_seed(step)) < 0.6
    ),
    "places": lambda queries, keys, step: Causal(offset=torch.tensor([step, keys - queries])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", WITH_A_TABLE)
def test_data_may_be_others_beside_a_tensor_that_is_added(kind, table, dtype, found):
    for queries, keys in ((24, 24), (5, 24), (1, 24)):
        if kind == "documents" and queries < keys:
            continue
        for step in range(1, 7):
            three, draw = read(queries, keys, dtype, 0), torch.Generator().manual_seed(step)
            three = [part + step / 10 for part in three]
            bias = TABLES[table](queries, keys, draw).nan_to_num(nan=-torch.inf)
            given = {"mask": WITH_A_TABLE[kind](queries, keys, step), "bias": bias}
            with torch.set_grad_enabled(step % 2 == 0):
                output, lse = attention_with_lse(*three, **given, kernel="native")
            is_found = found[-1]
            assert all(map(torch.equal, (output, lse), anew(three, **given, kernel="native")))
            expected = attention(*three, **given, kernel="reference")
            error = 2e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(output, expected, atol=error, rtol=error)
            assert is_found or step < 4, (queries, keys)
    query, key, value = read(24, 24, dtype, 0)
    bias = torch.zeros(1, HEADS, 24, 24, requires_grad=True)
    for step in range(3):  # what learns has gradients
        output = attention(query, key, value, mask=WITH_A_TABLE[kind](24, 24, step), bias=bias, kernel="native")
        assert output.requires_grad


@pytest.mark.parametrize("table", ["of heads", "of keys"])
@pytest.mark.parametrize("queries", [1, 24])
def test_a_tensor_of_other_lengths_is_refused_whatever_came_before(queries, table, found):
    draw = torch.Generator().manual_seed(0)
    bias = TABLES[table](queries, 24, draw)
    for step in range(4):
        attention(*read(queries, 24, torch.float32, 0), mask=Padding(real_keys(24, step)), bias=bias, kernel="native")
    assert found[-1]
    for keys in (25, 23):
        three = read(queries if queries == 1 else keys, keys, torch.float32, 0)
        with pytest.raises(ShapeError, match="bias"):
            attention(*three, mask=Padding(real_keys(keys, 1)), bias=bias, kernel="native")
    scale = torch.full((1, HEADS, 1, 1), 0.5)  # one number for all fits any lengths
    for step, keys in enumerate((24, 24, 25, 23)):
        three = read(queries, keys, torch.float32, 0)
        given = {"mask": Padding(real_keys(keys, step)), "bias": scale}
        torch.testing.assert_close(
            attention(*three, **given, kernel="native"),
            attention(*three, **given, kernel="reference"),
            atol=2e-5,
            rtol=2e-5,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["nothing", "window", "padding"])
def test_one_query_may_have_a_tensor_of_any_length_added(kind, table, dtype, found):
    for step, keys in enumerate((24, 17, 31, 30, 16, 25)):
        (query, key, value), draw = read(1, keys, dtype, step), torch.Generator().manual_seed(step)
        bias = TABLES[table](1, keys, draw).nan_to_num(nan=-torch.inf)
        mask = {"nothing": None, "window": Window(20), "padding": Padding(real_keys(keys, step))}[kind]
        for given in ({"mask": mask, "bias": bias}, {"mask": mask, "bias": bias[..., -1:].clamp(min=-9)}):
            right([query, key, value], **given)
        assert found[-1]  # one number for all keys fits as well
        assert found[-3] is (step > 0)
        key[:, :, 3] = torch.nan
        hidden = torch.zeros(1, 1, 1, keys)
        hidden[..., 3] = -torch.inf
        assert torch.isfinite(attention(query, key, value, mask=mask, bias=hidden)).all()
    query, key, value = read(1, 24, dtype, 0)
    for sizes in ((1, HEADS, 1, 23), (1, 3, 1, 24), (3, 1, 1, 24), (1, 1, 2, 24)):
        with pytest.raises(ShapeError, match="bias"):
            attention(query, key, value, bias=torch.zeros(sizes))
    others = torch.zeros(1, HEADS, 1, 24, dtype=torch.float64), torch.zeros(24), torch.ones(1, 1, 1, 24).mul(-1j).imag
    for bias in others:
        right([query, key, value], bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", WITH_A_TABLE)
@pytest.mark.parametrize("which", ["query, key and value", "all", "the tensor"])
def test_data_may_be_others_beside_a_tensor_where_something_learns(which, kind, table, dtype, found):
    """Gradients are those of the data and of the tensor of their call."""
    for queries, keys in ((24, 24), (5, 24), (1, 24)):
        if kind == "documents" and queries < keys:
            continue
        for step in range(1, 6):
            draw = torch.Generator().manual_seed(step)
            bias = TABLES[table](queries, keys, draw).nan_to_num(nan=-torch.inf)
            mask = WITH_A_TABLE[kind](queries, keys, step)
            tensors = [part + step / 10 for part in read(queries, keys, dtype, 0)]
            leaves = [
                part.requires_grad_(which != "the tensor") for part in tensors
            ] + [bias.requires_grad_(which != "query, key and value")]  # fmt: skip
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            *three, added = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
            expected = attention(*three, mask=mask, bias=added, kernel="reference")
            wanted = torch.autograd.grad(expected.sin().sum(), [d for d in (*three, added) if d.requires_grad])
            output = attention(*leaves[:3], mask=mask, bias=bias, kernel="native")
            assert found[-1] or step < 4, (queries, keys)
            write_into(mask)
            for one, other in zip(torch.autograd.grad(output.sin().sum(), asked), wanted, strict=True):
                error = 2e-5 if one.dtype is dtype is torch.float32 else 4e-2  # a gradient has its tensor's dtype
                torch.testing.assert_close(one.double(), other, atol=error, rtol=error)


def test_a_tensor_beside_new_data_that_is_written_into_before_its_gradients_is_refused(found):
    bias = torch.zeros(1, HEADS, 24, 24)
    for step in range(4):
        leaves = [part.requires_grad_() for part in read(24, 24, torch.float32, step)]
        output = attention(*leaves, mask=Padding(real_keys(24, step)), bias=bias, kernel="native")
    assert found[-1]
    bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_tensor_beside_new_data_is_not_kept(found):
    gone = []
    for step in range(6):
        leaves = [part.requires_grad_() for part in read(24, 24, torch.float32, step)]
        bias = torch.zeros(1, HEADS, 24, 24)
        gone.append(weakref.ref(bias))
        output = attention(*leaves, mask=Padding(real_keys(24, step)), bias=bias, kernel="native")
        output.sum().backward()
    del bias, output
    assert found[-1]
    assert not any(bias() is not None for bias in gone)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("learns", [False, True])
def test_gradients_of_gradients_beside_a_tensor_and_new_data_are_right(learns, found):
    for step in range(4):
        bias = torch.randn(1, HEADS, 24, 24, generator=torch.Generator().manual_seed(step)).requires_grad_(learns)
        leaves = [*(part.requires_grad_() for part in read(24, 24, torch.float32, step)), *([bias] if learns else [])]
        seconds = []
        for kernel in ("native", "reference"):
            query = leaves[0] + bias.mean(2, keepdim=True).mT  # which depends on what is added, too
            output = attention(query, *leaves[1:3], mask=Padding(real_keys(24, step)), bias=bias, kernel=kernel)
            firsts = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
            seconds.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves))
        for one, other in zip(*seconds, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert any(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("value_dim", [1, 8, 24])
def test_values_may_have_other_features_than_keys(value_dim, by_token, learns, dtype, found):
    """For one query of any number of keys, for data that are new, and for one call again and again."""

    def laid(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2) if by_token else tensor

    masks = {
        "one query": (1, lambda keys, step: None),
        "new data": (24, lambda keys, step: Padding(real_keys(keys, step))),
        "any lengths": (None, lambda keys, step: Causal()),
        "the same": (24, lambda keys, step: Window(5)),
    }
    for kind, (queries, mask) in masks.items():
        for step, keys in enumerate((24, 24, 24, 24) if kind == "the same" else (24, 24, 17, 31)):
            query, key, _ = read(queries or keys, keys, dtype, step)
            value = torch.randn(*key.shape[:3], value_dim, generator=torch.Generator().manual_seed(step)).to(dtype)
            if kind == "new data" and keys != 24:
                query = read(keys, keys, dtype, step)[0]
            three = [laid(part).requires_grad_(learns) for part in (query, key, value)]
            given = {"mask": mask(keys, step)}
            doubles = [part.detach().double().requires_grad_(learns) for part in three]
            expected = attention(*doubles, **given, kernel="reference")
            output, lse = attention_with_lse(*three, **given, kernel="native")
            error = 2e-5 if dtype is torch.float32 else 4e-2
            torch.testing.assert_close(output.double(), expected, atol=error, rtol=error)
            assert lse.shape == query.shape[:3]
            is_found = found[-1]
            laid_anew, _ = anew(three, **given, kernel="native")
            assert output.stride() == laid_anew.stride()
            if learns:
                wanted = torch.autograd.grad(expected.sin().sum(), doubles)
                for one, other in zip(torch.autograd.grad(output.sin().sum(), three), wanted, strict=True):
                    torch.testing.assert_close(one.double(), other, atol=error, rtol=error)
        assert is_found, kind


@pytest.mark.parametrize("shape", [(1, HEADS, LENGTH, LENGTH), (2, 1, 1, LENGTH), (LENGTH, LENGTH), (LENGTH,)])
@pytest.mark.parametrize("learns", [False, True])
def test_a_tensor_that_is_added_is_read_and_learns_at_once(learns, shape, monkeypatch):
    """Another in each call under the same mask."""
    draw = torch.Generator().manual_seed(0)
    for number in range(6):
        leaves = [tensor.requires_grad_() for tensor in heads(number)]
        leaves.append(torch.randn(shape, generator=draw).requires_grad_(learns))
        grads = []
        for kernel in ("reference", "native"):
            if number == 5 and kernel == "native":  # the general ways are not taken any more
                monkeypatch.setattr(Planned, "__call__", None)
                monkeypatch.setattr(autograd, "_pulled", None)
            output = attention(*leaves[:3], mask=Window(5), bias=leaves[3], kernel=kernel)
            grads.append(torch.autograd.grad(output.sin().sum(), [leaf for leaf in leaves if leaf.requires_grad]))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

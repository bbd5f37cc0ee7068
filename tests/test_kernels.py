"""The ladder that every kernel climbs. A kernel that is put into `regard.kernels.KERNELS` is tested by being there.

A kernel may say that it cannot do a call; then it must refuse that call by name, in its own words, and what it can do
it must do as `reference` does: in float64 to the last digits, in lower precision within twice the error of `reference`.
"""

import functools
import math
import re
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from cases import (
    ABSENT,
    BATCH,
    HEAD_DIM,
    HEADS,
    KEY_LEN,
    KV_HEADS,
    ON_A_CPU,
    QUERY_LEN,
    VALUE_DIM,
    biases,
    composed_masks,
    fixed_masks,
    tensors,
)
from comparing import assert_close, assert_within_budget, assert_zero
from regard import processor
from regard.biases import Alibi, RelativeBias
from regard.functional import attention, attention_with_lse, check_call
from regard.kernels import KERNELS, KernelError, choose, fused, sdpa
from regard.kernels.hidden import Hidden
from regard.kernels.strips import native
from regard.masks import Causal, Chunk, Dense, Document, Padding, Prefix, Strided, Where, Window
from regard.scores import Additive
from regard.shapes import Grid

NAMES = [kernel.name for kernel in KERNELS if kernel.name not in ABSENT]
OTHERS = [name for name in ON_A_CPU if name != "reference"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LOW = [torch.bfloat16, torch.float16]

every_kernel = pytest.mark.parametrize("kernel", ON_A_CPU)
every_other_kernel = pytest.mark.parametrize("kernel", OTHERS)


def same_seed():
    return torch.Generator().manual_seed(77)


def ask(function, kernel, tensors, parts):
    """One call; with dropout always from the same seed."""
    return function(*tensors, **parts, kernel=kernel, generator=same_seed() if parts.get("dropout") else None)


def can(kernel, tensors, parts, *, lse):
    """Whether a kernel does a call; one that says it cannot must also refuse it, in the same words."""
    given = {"dropout": 0.0} | dict.fromkeys(("mask", "bias", "scale", "softcap", "sink", "additive")) | parts
    call = check_call("test", *tensors, **given, generator=same_seed(), wants_lse=lse)
    why = next(k for k in KERNELS if k.name == kernel).cannot(call)
    if why is not None:
        with pytest.raises(KernelError, match=re.escape(why)):
            ask(attention_with_lse if lse else attention, kernel, tensors, parts)
    return why is None


class Answers(NamedTuple):
    output: torch.Tensor
    lse: torch.Tensor | None
    gradients: list[torch.Tensor]


def answers(kernel, tensors, parts, leaves=(), *, lse_in_loss=True):
    """Output, lse (None where the kernel gives none) and gradients of all that learns; None if the kernel cannot."""
    can_alone, can_lse = (can(kernel, tensors, parts, lse=lse) for lse in (False, True))
    if not can_alone and not can_lse:
        return None
    output, lse = ask(attention_with_lse, kernel, tensors, parts) if can_lse else (None, None)
    if can_alone:
        alone = ask(attention, kernel, tensors, parts)
        if can_lse:
            assert_close(alone, output, "attention against attention_with_lse")
        output = alone if output is None else output
    query, _, value = tensors
    assert output.dtype == query.dtype
    assert output.shape == (*query.shape[:3], value.shape[3])
    if lse is not None:
        assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
        assert lse.shape == query.shape[:3]
    learning = [x for x in (*tensors, *leaves) if x.requires_grad]
    loss = loss_of(output, lse if lse_in_loss else None)
    gradients = torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True) if learning else []
    return Answers(output, lse, list(gradients))


def loss_of(output, lse):
    """A number that depends on every number of the answer, with the same factors in every dtype."""
    draw = torch.Generator().manual_seed(2)

    def weighed(x):
        x = x if x.dtype in (torch.float64, torch.float32) else x.float()
        return (x * torch.randn(x.shape, generator=draw).to(torch.bfloat16).to(x.dtype)).sum()

    return weighed(output) if lse is None else weighed(output) + weighed(lse.masked_fill(lse == -math.inf, 0.0))


# --- the calls ----------------------------------------------------------------------------------------------------


def _call_of_mask(name):
    return lambda dtype: (tensors(dtype), {"mask": fixed_masks()[name].mask}, [])


def _call_of_bias(name):
    def make(dtype):
        bias, leaf = biases(dtype)[name]
        return tensors(dtype), {"bias": bias}, [] if leaf is None else [leaf]

    return make


def _plain(dtype, parts=None, **sizes):
    return tensors(dtype, **sizes), parts or {}, []


def _with_sink(dtype, **parts):
    sink = torch.linspace(-2, 2, HEADS).to(torch.bfloat16).to(dtype).requires_grad_()
    return tensors(dtype), {"sink": sink, **parts}, [sink]


def _additive(dtype, **parts):
    v = torch.linspace(-1, 1, HEADS * HEAD_DIM).view(HEADS, HEAD_DIM).to(torch.bfloat16).to(dtype).requires_grad_()
    return tensors(dtype), {"additive": Additive(v), **parts}, [v]


def _everything(dtype):
    (query, key, value), parts, leaves = _with_sink(dtype, mask=Causal() & Window(4), softcap=2.0, scale=0.7)
    bias, leaf = biases(dtype)["tensor with -inf"]
    return (query, key, value), parts | {"bias": bias}, [*leaves, leaf]


LONG = {"query_len": 149, "key_len": 263, "kv_heads": 2, "heads": 4, "head_dim": 16, "value_dim": 16}
SQUARE = LONG | {"query_len": 263}
DOCUMENTS = Document.from_lengths([[101, 3, 159], [7, 200, 56]])

CALLS = {
    "plain": _plain,
    **{f"mask: {name}": _call_of_mask(name) for name in fixed_masks()},
    **{f"bias: {name}": _call_of_bias(name) for name in biases()},
    "bias and mask": lambda dtype: (*_call_of_bias("alibi")(dtype)[:1], {"bias": Alibi(HEADS), "mask": Causal()}, []),
    "softcap": functools.partial(_plain, parts={"softcap": 0.9}),
    "scale": functools.partial(_plain, parts={"scale": 0.03}),
    "negative scale": functools.partial(_plain, parts={"scale": -0.8}),
    "scale 0": functools.partial(_plain, parts={"scale": 0.0}),
    "sharp": functools.partial(_plain, parts={"scale": 9.0}),
    "sink": _with_sink,
    "sink and empty rows": functools.partial(_with_sink, mask=Causal(offset=-3)),
    "additive": _additive,
    "additive, masked": functools.partial(_additive, mask=Causal(), softcap=1.3, scale=0.5),
    "dropout": functools.partial(_plain, parts={"dropout": 0.3}),
    "dropout, masked": functools.partial(_plain, parts={"dropout": 0.3, "mask": Causal() & Window(5)}),
    "everything": _everything,
    "one kv head for all": functools.partial(_plain, parts={"mask": Causal()}, kv_heads=1),
    "a kv head for each": functools.partial(_plain, parts={"mask": Causal()}, kv_heads=HEADS),
    "one head": functools.partial(_plain, parts={"mask": Causal()}, heads=1, kv_heads=1),
    "value_dim as head_dim": functools.partial(_plain, value_dim=HEAD_DIM),
    "value_dim as head_dim, masked": functools.partial(_plain, parts={"mask": Causal()}, value_dim=HEAD_DIM),
    "causal offset 0, value_dim as head_dim": functools.partial(_plain, parts={"mask": Causal(0)}, value_dim=HEAD_DIM),
    "more queries than keys": functools.partial(_plain, parts={"mask": Causal()}, query_len=11, key_len=7),
    "more queries than keys, offset 0": functools.partial(_plain, parts={"mask": Causal(0)}, query_len=11, key_len=7),
    "one query of a cache": functools.partial(_plain, parts={"mask": Causal()}, query_len=1, key_len=29),
    "long": functools.partial(_plain, **LONG),
    "long causal": functools.partial(_plain, parts={"mask": Causal()}, **LONG),
    "long causal offset 0": functools.partial(_plain, parts={"mask": Causal(0)}, **SQUARE),
    "long causal window": functools.partial(_plain, parts={"mask": Causal() & Window(37)}, **LONG),
    "long window": functools.partial(_plain, parts={"mask": Window(37)}, **SQUARE),
    "long window and sinks": functools.partial(_plain, parts={"mask": Causal() & (Window(37) | Prefix(4))}, **SQUARE),
    "long prefix": functools.partial(_plain, parts={"mask": Causal() | Prefix([100, 3])}, **SQUARE),
    "long documents": functools.partial(_plain, parts={"mask": DOCUMENTS}, **SQUARE),
    "long causal documents": functools.partial(_plain, parts={"mask": Causal() & DOCUMENTS}, **SQUARE),
    "long padding": functools.partial(_plain, parts={"mask": Padding([263, 130])}, **LONG),
    "long causal padding": functools.partial(_plain, parts={"mask": Causal() & Padding([77, 263])}, **SQUARE),
    "long chunks": functools.partial(_plain, parts={"mask": Chunk(41)}, **SQUARE),
    "long strided": functools.partial(_plain, parts={"mask": Causal() & Strided(7)}, **SQUARE),
    "long where": functools.partial(_plain, parts={"mask": Where(lambda b, h, i, j: (i + j) % 5 > h)}, **SQUARE),
    "long with one kv head for all": functools.partial(
        _plain, parts={"mask": Causal(0)}, heads=8, kv_heads=1, value_dim=HEAD_DIM, query_len=512, key_len=512
    ),
    "long alibi": functools.partial(_plain, parts={"mask": Causal(), "bias": Alibi(4)}, **SQUARE),
    "long offsets per row": functools.partial(_plain, parts={"mask": Causal([-40, 60]) & Window(50, [9, -9])}, **LONG),
}  # fmt: skip


@pytest.fixture(scope="module")
def right_answers():
    """What the reference answers to each of the calls, computed once: several kernels are compared with it."""

    @functools.cache
    def right(name, dtype, *, lse_in_loss):
        return answers("reference", *CALLS[name](dtype), lse_in_loss=lse_in_loss)

    return right


@every_other_kernel
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_computes_in_float64_what_the_reference_computes(kernel, name):
    same_as_the_reference(kernel, *CALLS[name](torch.float64))


def same_as_the_reference(kernel, tensors, parts, leaves):
    found = answers(kernel, tensors, parts, leaves)
    if found is None:
        return
    right = answers("reference", tensors, parts, leaves, lse_in_loss=found.lse is not None)
    assert_close(found.output, right.output, "output")
    if found.lse is not None:
        assert_close(found.lse, right.lse, "lse")
    for at, (gradient, expected) in enumerate(zip(found.gradients, right.gradients, strict=True)):
        assert_close(gradient, expected, f"gradient {at}")


@every_kernel
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_stays_within_twice_the_error_of_the_reference(right_answers, kernel, dtype, name):
    tensors, parts, leaves = CALLS[name](dtype)
    found = answers(kernel, tensors, parts, leaves)
    if found is None:
        return
    has_lse = found.lse is not None
    plain = right_answers(name, dtype, lse_in_loss=has_lse)
    exact = right_answers(name, torch.float64, lse_in_loss=has_lse)
    assert_within_budget(found.output, exact.output, plain.output, "output")
    if has_lse:
        assert_within_budget(found.lse, exact.lse, plain.lse, "lse")
    for at, three in enumerate(zip(found.gradients, exact.gradients, plain.gradients, strict=True)):
        assert_within_budget(*three, f"gradient {at}")


@every_kernel
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_in_float32_is_right_to_five_digits(right_answers, kernel, name):
    tensors, parts, leaves = CALLS[name](torch.float32)
    found = answers(kernel, tensors, parts, leaves)
    if found is None:
        return
    exact = right_answers(name, torch.float64, lse_in_loss=found.lse is not None)
    assert_close(found.output.double(), exact.output, "output", tolerance=1e-5)
    if found.lse is not None:
        assert_close(found.lse.double(), exact.lse, "lse", tolerance=1e-5)
    for at, (gradient, right) in enumerate(zip(found.gradients, exact.gradients, strict=True)):
        assert_close(gradient.double(), right, f"gradient {at}", tolerance=1e-5)


@every_other_kernel
@given(st.data())
def test_a_kernel_agrees_with_the_reference_on_random_shapes_and_masks(kernel, data):
    few, length = st.integers(1, 3), st.integers(1, 9)
    batch, kv_heads, group = data.draw(few), data.draw(few), data.draw(few)
    query_len, key_len, head_dim, value_dim = (data.draw(length) for _ in range(4))
    grid = Grid(batch, kv_heads * group, query_len, key_len)
    parts = {"mask": data.draw(st.none() | composed_masks(grid).map(lambda ruled: ruled.mask))}
    if data.draw(st.booleans()):
        parts["bias"] = Alibi(grid.heads)
    inputs = tensors(
        batch=batch, heads=grid.heads, kv_heads=kv_heads, query_len=query_len, key_len=key_len,
        head_dim=head_dim, value_dim=data.draw(st.sampled_from([head_dim, value_dim])),
    )  # fmt: skip
    same_as_the_reference(kernel, inputs, parts, [])


# --- rows that see nothing ----------------------------------------------------------------------------------------


EMPTY_ROWS = {  # masks and biases under which some rows see nothing, and which those are
    "nothing at all": ({"mask": Dense(torch.zeros(1, 1, dtype=torch.bool))}, lambda b, h, i: True),
    "causal before the first key": ({"mask": Causal(offset=-3)}, lambda b, h, i: i < 3),
    "a row of the batch without keys": ({"mask": Padding([0, 4])}, lambda b, h, i: b == 0),
    "a window beyond the keys": ({"mask": Window(2, [-5, 3])}, lambda b, h, i: b == 0 and i < 4),
    "documents without keys": (
        {"mask": Document(torch.tensor([0, 1, 1, 5, 6, 0, 1]), torch.tensor([0] * 6 + [1] * 5))},
        lambda b, h, i: i in (3, 4),
    ),
    "one head blind": (
        {"mask": Where(lambda b, h, i, j: (h != 4) | (i == 6))},
        lambda b, h, i: h == 4 and i != 6,
    ),
    "a bias of -inf": (
        {"bias": torch.zeros(7, 11).masked_fill((torch.arange(7) == 2)[:, None], -math.inf)},
        lambda b, h, i: i == 2,
    ),
    "a bias of -inf under a mask": (
        {"bias": torch.zeros(11).masked_fill(torch.arange(11) < 6, -math.inf), "mask": Causal(0)},
        lambda b, h, i: i < 6,
    ),
}


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("same_dim", [False, True], ids=["", "value_dim as head_dim"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_a_row_that_sees_nothing_is_zero_and_learns_nothing(kernel, dtype, same_dim, name):
    parts, is_empty = EMPTY_ROWS[name]
    inputs = tensors(dtype, value_dim=HEAD_DIM if same_dim else VALUE_DIM)
    empty = torch.tensor(
        [[[is_empty(b, h, i) for i in range(QUERY_LEN)] for h in range(HEADS)] for b in range(BATCH)]
    )  # fmt: skip
    assert empty.any()
    found = answers(kernel, inputs, parts)
    if found is not None:
        for tensor in (found.output, *found.gradients):
            assert tensor.isfinite().all()
        assert_zero(found.output[empty], "output")
        assert_zero(found.gradients[0][empty], "gradient of query")
        if found.lse is not None:
            assert (found.lse[empty] == -math.inf).all()
            assert found.lse[~empty].isfinite().all()
        blind = empty.all(dim=2).unflatten(1, (KV_HEADS, -1)).all(dim=2)  # [batch, kv_heads]: nobody sees these keys
        assert_zero(found.gradients[1][blind], "gradient of key")
        assert_zero(found.gradients[2][blind], "gradient of value")
    sink = torch.linspace(-1, 1, HEADS).to(dtype).requires_grad_()
    found = answers(kernel, inputs, parts | {"sink": sink}, [sink])
    if found is not None:
        for tensor in (found.output, *found.gradients):
            assert tensor.isfinite().all()
        assert_zero(found.output[empty], "output with a sink")
        assert_zero(found.gradients[0][empty], "gradient of query with a sink")
        if found.lse is not None:
            expected = sink.to(found.lse.dtype)[:, None].expand(BATCH, HEADS, QUERY_LEN)
            assert torch.equal(found.lse[empty], expected[empty])


# --- what is hidden reaches nothing -------------------------------------------------------------------------------


def _first(n):
    return torch.arange(KEY_LEN) < n


HIDDEN = {  # parts of a call, and which keys nobody sees: [kv_heads or 1, key_len] per batch row
    "dense": ({"mask": Dense(_first(8))}, lambda b, g: ~_first(8)),
    "padding": ({"mask": Padding([9, 4])}, lambda b, g: ~_first([9, 4][b])),
    "padding on the left": (
        {"mask": Padding(torch.stack([~_first(2), ~_first(6)]))},
        lambda b, g: _first([2, 6][b]),
    ),
    "a whole row of padding": ({"mask": Padding([0, 11])}, lambda b, g: ~_first([0, 11][b])),
    "bias -inf": ({"bias": torch.zeros(11).masked_fill(~_first(8), -math.inf)}, lambda b, g: ~_first(8)),
    "bias -inf that learns": (
        {"bias": torch.zeros(7, 11).masked_fill(~_first(8), -math.inf).requires_grad_()},
        lambda b, g: ~_first(8),
    ),
    "causal offset 0": ({"mask": Causal(0)}, lambda b, g: ~_first(7)),
    "causal offset per row": ({"mask": Causal([0, -6])}, lambda b, g: ~_first([7, 1][b])),
    "window": ({"mask": Window(2, 0)}, lambda b, g: ~_first(8)),
    "causal window": ({"mask": Causal() & Window(2)}, lambda b, g: _first(3)),
    "document": (
        {"mask": Document(torch.tensor([0] * 7), torch.tensor([0] * 5 + [1] * 3 + [0] * 3))},
        lambda b, g: _first(8) & ~_first(5),
    ),
    "bias -inf under a mask": (
        {"bias": torch.zeros(11).masked_fill(_first(3), -math.inf), "mask": Causal(0)},
        lambda b, g: _first(3) | ~_first(7),
    ),
    "causal & alibi": ({"mask": Causal(0), "bias": Alibi(HEADS)}, lambda b, g: ~_first(7)),
    "softcap": ({"mask": Padding([9, 4]), "softcap": 2.0}, lambda b, g: ~_first([9, 4][b])),
    "additive": ({"mask": Padding([9, 4]), "additive": Additive(torch.ones(HEADS, HEAD_DIM))},
                 lambda b, g: ~_first([9, 4][b])),
    "dropout": ({"mask": Padding([9, 4]), "dropout": 0.2}, lambda b, g: ~_first([9, 4][b])),
    "hidden from one group of heads": (  # heads 2 and 3 share kv head 1
        {"mask": Where(lambda b, h, i, j: (h // 2 != 1) | (j < 8))},
        lambda b, g: ~_first(8) & (g == 1),
    ),
    "seen by one head of a group": (  # of heads 2 and 3 only head 3 sees keys 8, 9; nobody sees 10
        {"mask": Where(lambda b, h, i, j: (j < 8) | ((h == 3) & (j < 10)))},
        lambda b, g: ~_first(10) if g == 1 else ~_first(8),
    ),
}  # fmt: skip


@every_kernel
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("same_dim", [False, True], ids=["", "value_dim as head_dim"])
@pytest.mark.parametrize("name", HIDDEN)
def test_nan_and_inf_in_what_nobody_sees_reach_neither_output_nor_gradient(kernel, poison, dtype, same_dim, name):
    parts, is_hidden = HIDDEN[name]
    inputs = tensors(dtype, value_dim=HEAD_DIM if same_dim else VALUE_DIM)
    clean = answers(kernel, inputs, parts)
    if clean is None:
        return
    hidden = torch.stack([torch.stack([is_hidden(b, g) for g in range(KV_HEADS)]) for b in range(BATCH)])
    assert hidden.any()
    query, key, value = (x.detach().clone() for x in inputs)
    key[hidden] = poison
    value[hidden] = poison
    poisoned = answers(kernel, [x.requires_grad_() for x in (query, key, value)], parts)
    assert_close(poisoned.output, clean.output, "output", tolerance=0)
    if clean.lse is not None:
        assert_close(poisoned.lse, clean.lse, "lse", tolerance=0)
    for name_, found, expected in zip(("query", "key", "value"), poisoned.gradients, clean.gradients, strict=False):
        assert_close(found, expected, f"gradient of {name_}", tolerance=0)
    assert_zero(poisoned.gradients[1][hidden], "gradient of the hidden keys")
    assert_zero(poisoned.gradients[2][hidden], "gradient of the hidden values")


# --- odd sizes and layouts ----------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("empty", ["batch", "query_len", "key_len", "head_dim", "value_dim"])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS], ids=["grouped", "not grouped"])
@pytest.mark.parametrize("parts", ["none", "causal", "window or prefix", "padding", "dense", "where", "bias", "alibi",
                                   "relative", "softcap", "sink", "additive", "dropout"])  # fmt: skip
def test_an_axis_of_size_0_yields_an_answer_of_the_right_shape(kernel, empty, kv_heads, parts):
    sizes = {"batch": BATCH, "query_len": 7, "key_len": 11, "head_dim": 5, "value_dim": 13, empty: 0}
    inputs = tensors(torch.float32, kv_heads=kv_heads, **sizes)
    sink = torch.linspace(-1, 1, HEADS)
    made = {
        "none": {},
        "causal": {"mask": Causal()},
        "window or prefix": {"mask": Causal() & (Window(3) | Prefix(2))},
        "padding": {"mask": Padding(torch.full((sizes["batch"],), min(3, sizes["key_len"])))},
        "dense": {"mask": Dense(torch.ones(sizes["query_len"], sizes["key_len"], dtype=torch.bool))},
        "where": {"mask": Where(lambda b, h, i, j: i >= j + b + h)},
        "bias": {"bias": torch.zeros(sizes["query_len"], sizes["key_len"])},
        "alibi": {"bias": Alibi(HEADS)},
        "relative": {"bias": RelativeBias(torch.zeros(8, HEADS), max_distance=6)},
        "softcap": {"softcap": 2.0},
        "sink": {"sink": sink},
        "additive": {"additive": Additive(torch.ones(HEADS, sizes["head_dim"]))},
        "dropout": {"dropout": 0.5},
    }[parts]
    found = answers(kernel, inputs, made)
    if found is None:
        return
    for tensor in (found.output, *found.gradients):
        assert tensor.isfinite().all()
    if empty == "key_len":
        assert_zero(found.output)
        if found.lse is not None:
            expected = (
                sink[:, None].expand(BATCH, -1, 7) if parts == "sink" else torch.full((BATCH, HEADS, 7), -math.inf)
            )
            assert torch.equal(found.lse, expected)


def _length_before_heads(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_second_feature(x):
    return x.repeat_interleave(2, dim=-1)[..., ::2]


def _features_before_length(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@every_kernel
@pytest.mark.parametrize("layout", [_length_before_heads, _every_second_feature, _features_before_length])
@pytest.mark.parametrize("mask", [None, Causal(), Padding([11, 6])], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_layout_in_memory_does_not_matter(kernel, layout, mask, dtype):
    inputs = tensors(dtype)
    strided = [layout(x.detach()).requires_grad_() for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    found, expected = answers(kernel, strided, {"mask": mask}), answers(kernel, inputs, {"mask": mask})
    assert_close(found.output, expected.output)
    for gradient, right in zip(found.gradients, expected.gradients, strict=True):
        assert_close(gradient, right)


@every_kernel
@pytest.mark.parametrize("mask", [None, Causal(), Padding([11, 6])], ids=str)
def test_a_tensor_expanded_over_the_batch_is_read_as_it_stands(kernel, mask):
    query, key, value = (x.detach()[:1] for x in tensors())
    expanded = [x.expand(BATCH, -1, -1, -1) for x in (query, key, value)]
    found = answers(kernel, expanded, {"mask": mask})
    assert_close(found.output, answers(kernel, [x.clone() for x in expanded], {"mask": mask}).output)


@every_kernel
@pytest.mark.parametrize("name", ["plain", "mask: padding", "bias: tensor with -inf", "everything", "sink", "dropout"])
def test_nothing_that_is_passed_is_changed(kernel, name):
    inputs, parts, leaves = CALLS[name](torch.float64)
    before = [x.detach().clone() for x in (*inputs, *leaves)]
    answers(kernel, inputs, parts, leaves)
    for x, copy in zip((*inputs, *leaves), before, strict=True):
        assert torch.equal(x.detach(), copy)


@every_kernel
def test_only_what_learns_gets_a_gradient(kernel):
    for learns in range(3):
        inputs = [x.detach().requires_grad_(at == learns) for at, x in enumerate(tensors())]
        found, expected = answers(kernel, inputs, {"mask": Causal()}), answers(kernel, tensors(), {"mask": Causal()})
        assert_close(found.gradients[0], expected.gradients[learns])
    with torch.no_grad():
        assert not ask(attention, kernel, tensors(), {}).requires_grad


# --- laws ---------------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize(
    "name", ["plain", "softcap", "mask: causal", "mask: where", "bias: alibi", "long causal window"]
)
def test_heads_that_share_a_key_equal_heads_with_copies_of_it(kernel, name):
    (query, key, value), parts, leaves = CALLS[name](torch.float64)
    group = query.shape[1] // key.shape[1]
    shared = answers(kernel, (query, key, value), parts, leaves)
    if shared is None:
        return
    copies = [x.repeat_interleave(group, dim=1) for x in (key, value)]
    apart = answers(kernel, (query, *copies), parts, leaves)
    assert_close(shared.output, apart.output)
    for gradient, right in zip(shared.gradients[1:3], apart.gradients[1:3], strict=True):
        assert_close(gradient, right.unflatten(1, (-1, group)).sum(2))


@every_kernel
@pytest.mark.parametrize("name", ["plain", "mask: padding", "mask: document", "mask: dense per row and head",
                                  "mask: causal offset per row", "bias: tensor with -inf", "sink"])  # fmt: skip
def test_the_rows_of_a_batch_do_not_see_each_other(kernel, name):
    inputs, parts, leaves = CALLS[name](torch.float64)
    if answers(kernel, inputs, parts, leaves) is None:
        return
    before = ask(attention, kernel, inputs, parts)
    right = torch.autograd.grad(before[0].sum(), inputs)
    for number in (3.0, math.nan):
        changed = [torch.cat([x.detach()[:1], torch.full_like(x[1:], number)]).requires_grad_() for x in inputs]
        after = ask(attention, kernel, changed, parts)
        assert_close(after[0], before[0], tolerance=0)
        gradients = torch.autograd.grad(after[0].sum(), changed)
        for gradient, expected in zip(gradients, right, strict=True):
            assert_close(gradient[0], expected[0], tolerance=0)
            if not math.isnan(number):
                assert_zero(gradient[1], "gradient of the other row")


@every_kernel
def test_documents_in_another_order_give_their_outputs_in_that_order(kernel):
    lengths, order = [5, 2, 7, 3], [2, 0, 3, 1]
    inputs = [x.detach() for x in tensors(query_len=17, key_len=17)]
    bounds = [(sum(lengths[:d]), sum(lengths[: d + 1])) for d in range(4)]
    moved = torch.cat([torch.arange(*bounds[d]) for d in order])
    for join in (lambda m: m, lambda m: m & Causal(), lambda m: m & Window(3)):
        packed = answers(kernel, inputs, {"mask": join(Document.from_lengths(lengths))})
        permuted = answers(
            kernel, [x[:, :, moved] for x in inputs], {"mask": join(Document.from_lengths([lengths[d] for d in order]))}
        )
        assert_close(permuted.output, packed.output[:, :, moved])
        for start, stop in bounds:  # and each is as if it were alone
            alone = [x[:, :, start:stop] for x in inputs]
            own = join(Document.from_lengths([stop - start]))
            assert_close(packed.output[:, :, start:stop], answers(kernel, alone, {"mask": own}).output)


@every_kernel
@pytest.mark.parametrize(
    "name", ["plain", "mask: causal & window", "mask: padding", "bias: alibi", "softcap", "long causal"]
)
def test_two_halves_of_the_keys_merge_by_lse(kernel, name):
    (query, key, value), parts, _ = CALLS[name](torch.float64)
    if not can(kernel, (query, key, value), parts, lse=True):
        return
    whole = ask(attention_with_lse, kernel, (query, key, value), parts)
    cut, key_len = 4, key.shape[2]
    halves = []
    for inside in (range(cut), range(cut, key_len)):
        only = Where(lambda b, h, i, j, inside=inside: (j >= inside.start) & (j < inside.stop))
        mask = only if parts.get("mask") is None else parts["mask"] & only
        halves.append(ask(attention_with_lse, kernel, (query, key, value), parts | {"mask": mask}))
    lse = torch.logaddexp(halves[0].lse, halves[1].lse)
    merged = sum(half.output * (half.lse - lse).nan_to_num(nan=-math.inf).exp()[..., None] for half in halves)
    assert_close(lse, whole.lse, "lse")
    assert_close(merged, whole.output, "output")


@every_kernel
def test_a_query_of_a_cache_sees_what_it_saw_in_the_whole(kernel):
    query, key, value = (x.detach() for x in tensors(query_len=11, key_len=11))
    for mask in (Causal(), Causal() & Window(3), Causal() & (Window(2) | Prefix(2)), Causal() & Chunk(4), None):
        whole = answers(kernel, (query, key, value), {"mask": mask}).output
        for start, stop in ((10, 11), (4, 7), (0, 11)):
            keys = slice(0, 11 if mask is None else stop)  # the default offset is key_len - query_len
            part = answers(kernel, (query[:, :, start:stop], key[:, :, keys], value[:, :, keys]), {"mask": mask}).output
            assert_close(part, whole[:, :, start:stop], repr(mask))


# --- the choice ---------------------------------------------------------------------------------------------------


def call_of(**parts):
    given = {"dropout": 0.0} | dict.fromkeys(("mask", "bias", "scale", "softcap", "sink", "additive")) | parts
    lse = given.pop("lse", False)
    return check_call("test", *tensors(torch.float32), **given, generator=None, wants_lse=lse)


def test_every_kernel_has_a_name_of_its_own_and_the_reference_stands_last():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[-1] == "reference"
    assert "auto" not in NAMES


@every_kernel
def test_every_kernel_can_do_the_plain_call(kernel):
    assert can(kernel, tensors(), {}, lse=False)


def test_the_reference_can_do_everything():
    for name, make in CALLS.items():
        inputs, parts, _ = make(torch.bfloat16)
        assert can("reference", inputs, parts, lse=True), name


def test_auto_takes_a_kernel_that_can():
    additive = Additive(torch.ones(HEADS, HEAD_DIM))
    calls = (
        call_of(),
        call_of(lse=True),
        call_of(softcap=1.0),
        call_of(mask=Causal(), dropout=0.1),
        call_of(additive=additive),
    )
    small, ours = ("sdpa", "native") if native.is_there(torch.float64) else ("direct", "direct")
    assert [choose(call).name for call in calls] == [small, ours, ours, ours, "strips"]
    assert all(choose(call).cannot(call) is None for call in calls)


def test_a_kernel_named_that_cannot_says_what_is_missing_and_who_can():
    call = call_of(softcap=1.0)
    with pytest.raises(KernelError) as caught:
        choose(call, "sdpa")
    able = [kernel.name for kernel in KERNELS if kernel.cannot(call) is None]
    assert str(caught.value) == (
        "attention: kernel 'sdpa' does not support this call: torch's scaled_dot_product_attention has no softcap\n"
        f"  kernels that do: {', '.join(able)}"
    )


@pytest.mark.parametrize("name", ["nope", "", "Dense", None, 3])
def test_a_kernel_that_does_not_exist_is_answered_with_those_that_do(name):
    every = ", ".join(kernel.name for kernel in KERNELS)
    with pytest.raises(KernelError, match=f"no kernel named {name!r}; there are: auto, {every}"):
        choose(call_of(), name)


@every_kernel
def test_a_kernel_tells_how_many_quadratic_numbers_it_holds(kernel):
    found = next(k for k in KERNELS if k.name == kernel)
    for parts in ({}, {"mask": Causal()}, {"mask": Padding([11, 6])}):
        numbers = found.quadratic_numbers(call_of(**parts))
        assert isinstance(numbers, int)
        assert numbers == 0 or numbers >= QUERY_LEN * KEY_LEN
    if kernel == "reference":
        assert found.quadratic_numbers(call_of()) >= 2 * BATCH * HEADS * QUERY_LEN * KEY_LEN  # scores and weights


@pytest.mark.parametrize("same_dim", [False, True], ids=["", "value_dim as head_dim"])
@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith(("plain", "mask: ", "bias"))])
def test_dense_tells_of_every_square_that_torch_is_given_or_makes(name, same_dim, strided, monkeypatch):
    seen = {}

    def spy(query, key, value, attn_mask, dropout, causal, **options):
        choice = torch._fused_sdp_choice(query, key, value, attn_mask, dropout, causal, **options)
        seen["scores"] = 0 if choice == SDPBackend.FLASH_ATTENTION.value else BATCH * HEADS * QUERY_LEN * KEY_LEN
        seen["mask"] = held(attn_mask)
        return torch_sdpa(query, key, value, attn_mask, dropout, causal, **options)

    def spy_on_operator(*three, attn_mask, **more):
        seen["scores"], seen["mask"] = 0, held(attn_mask)
        return flash(*three, attn_mask=attn_mask, **more)

    def held(mask):  # what an expanded mask holds is what it was before it was expanded
        return (
            0 if mask is None else math.prod(n for n, stride in zip(mask.shape, mask.stride(), strict=True) if stride)
        )

    torch_sdpa, flash = torch.nn.functional.scaled_dot_product_attention, fused.flash
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(fused, "flash", spy_on_operator)
    _, parts, _ = CALLS[name](torch.float32)
    inputs = tensors(torch.float32, value_dim=HEAD_DIM if same_dim else VALUE_DIM)
    inputs = [_every_second_feature(x) for x in inputs] if strided else inputs
    attention(*inputs, **parts, kernel="sdpa")
    given = {"dropout": 0.0} | dict.fromkeys(("mask", "bias", "scale", "softcap", "sink", "additive")) | parts
    told = sdpa.quadratic_numbers(check_call("test", *inputs, **given, generator=None, wants_lse=False))
    assert told >= seen["mask"] + 2 * seen["scores"]
    assert told <= 2 * QUERY_LEN * KEY_LEN * BATCH * HEADS + 2 * seen["scores"]
    assert (told == 0) == (seen["mask"] == 0 == seen["scores"])


@every_kernel
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("parts", [{"mask": Causal(offset=-3)}, {"mask": Padding([0, 5])}, {"mask": Document(
    torch.tensor([7, 7, 7, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1]))}], ids=repr)  # fmt: skip
def test_nan_in_a_query_that_sees_nothing_reaches_nothing(kernel, parts, number):
    query, key, value = tensors(query_len=8, key_len=5)
    blind = ~parts["mask"].bind(Grid(2, 6, 8, 5)).allowed(range(8), range(5)).any(-1).expand(2, 1, 8)
    assert blind.any()
    spoiled = query.detach().masked_fill(blind[..., None], number).requires_grad_()
    clean = attention(query, key, value, kernel=kernel, **parts)
    output = attention(spoiled, key, value, kernel=kernel, **parts)
    assert_close(output, clean, tolerance=0)
    for gradient, right in zip(
        torch.autograd.grad(output.sum(), (spoiled, key, value)),
        torch.autograd.grad(clean.sum(), (query, key, value)),
        strict=True,
    ):
        assert_close(gradient, right, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "rows"), [(6, 1), (2, 1), (6, 3)])
@pytest.mark.parametrize("hides", [None, (1, 1, 1), (3, 1, 1), (3, 6, 1), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("amx", [False, True], ids=["", "AMX"])
def test_torchs_operator_reads_keys_once_for_all_heads_that_share_them(dtype, heads, rows, hides, amx, monkeypatch):
    monkeypatch.setattr(processor, "AMX", amx)
    torch.manual_seed(0)
    query, grad = torch.randn(2, 3, heads, rows, 8).to(dtype)
    key, value = torch.randn(2, 3, 2, 37, 8).to(dtype)
    mask = None
    if hides is not None:
        mask = torch.randn(hides[0], min(hides[1], heads), min(hides[2], rows), 37)
        mask[..., 5] = -math.inf
    given = {} if mask is None else {"attn_mask": mask}
    whole = {} if mask is None else {"attn_mask": mask.expand(-1, -1, rows, -1).to(dtype)}
    leaves = [tensor.float().requires_grad_() for tensor in (query, key, value)]
    whole = {name: tensor.float() for name, tensor in whole.items()}
    repeated = [leaf.repeat_interleave(heads // 2, 1) for leaf in leaves[1:]]
    expected = torch.nn.functional.scaled_dot_product_attention(leaves[0], *repeated, **whole, scale=0.5)
    output, lse = fused.flash(query, key, value, scale=0.5, **given)
    grads = fused._gradients(grad, query, key, value, output, lse, 0.5, False, mask)  # as they are given
    in_full = fused.flash_backward(grad, query, key, value, output, lse, scale=0.5, **given)
    right = torch.autograd.grad(expected, leaves, grad.float())
    error = 1e-5 if dtype == torch.float32 else 0.1
    assert lse.shape == (3, heads, rows)
    for found, exact in zip((output, *grads, *in_full), (expected, *right, *right), strict=True):
        assert found.shape == exact.shape
        assert torch.allclose(found.float(), exact, atol=error)
    by_row_or_head = rows > 1 and hides in ((3, 6, 1), (1, 1, 3))
    one_by_one = heads == 2 and (amx or dtype == torch.float32)
    assert fused.Rows(query, key, mask).as_they_are == (by_row_or_head or one_by_one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hides", [False, True])
def test_gradients_of_few_queries_in_half_precision_are_computed_in_float32(monkeypatch, dtype, hides):
    monkeypatch.setattr(processor, "BFLOAT16", True)
    monkeypatch.setattr(processor, "FLOAT16", True)

    def gradients(rows, keys):
        sizes = (rows, keys, keys, rows)
        given = [torch.randn(2, 3, length, 8).to(dtype) for length in sizes]
        how = {"attn_mask": torch.zeros(rows, keys, dtype=dtype)[None, None]} if hides else {"is_causal": True}
        grad, *three = given[3], *given[:3]
        output, lse = fused.flash(*three, scale=0.5, **how)
        return [
            fused.flash_backward(grad, *three, output, lse, scale=0.5, **how),
            fused.flash_backward(
                *(tensor.float() for tensor in (grad, *three, output)), lse, scale=0.5,
                **{name: one if name == "is_causal" else one.float() for name, one in how.items()},
            ),
        ]  # fmt: skip

    for ours, exact in zip(*gradients(40, 40), strict=True):
        assert torch.equal(ours, exact)
    assert gradients(fused.SHORT, fused.SHORT)[0][0].dtype == dtype  # more are multiplied at a time
    monkeypatch.setattr(processor, "BFLOAT16", False)
    monkeypatch.setattr(processor, "FLOAT16", False)
    assert gradients(fused.SHORT, fused.SHORT)[0][0].dtype == torch.float32


@pytest.mark.parametrize("size", [7, 128])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_mask_as_numbers_is_zero_and_minus_infinity(dtype, size):
    allowed = torch.rand(2, 1, size, size) > 0.5
    for mask in (allowed, allowed.mT, allowed[:, :, :, 1:], allowed[:1].expand(2, 3, -1, -1)):
        numbers = Hidden(mask).numbers(dtype)
        assert numbers.dtype == dtype
        assert torch.equal(numbers, torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf))


@pytest.mark.parametrize("kernel", ["native", "strips"])
def test_many_gradients_at_once_are_those_of_the_reference(kernel):
    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    call = call_of()
    if next(k for k in KERNELS if k.name == kernel).cannot(call) is not None:
        pytest.skip("not compiled here")
    found = [
        torch.autograd.functional.jacobian(
            lambda *three, by=by: attention(*three, mask=Causal(), sink=torch.ones(2).double(), kernel=by),
            (query, key, value),
            vectorize=True,
        )
        for by in (kernel, "reference")
    ]
    for one, other in zip(*found, strict=True):
        assert_close(one, other)

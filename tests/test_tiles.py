"""The compiled library's products by AMX, on any processor with AVX-512 BF16: where it has no such instructions, they
are emulated one by one, by emulated_tiles.c."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comparing import assert_close, assert_within_budget
from regard import (
    Alibi,
    Causal,
    Dense,
    Document,
    Padding,
    Strided,
    Window,
    attention,
    attention_with_lse,
    observe,
)
from regard.biases import Given
from regard.kernels.strips import binding
from regard.kernels.strips.binding import AT, PRODUCTS
from regard.kernels.strips.order import Order
from regard.observation import Entropy, Received

HERE = Path(__file__).parent
LIBRARY = binding.compiled()
THERE = LIBRARY is not None and LIBRARY.products == "tiles"
"""Whether this processor has them."""

BUILDS = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which("cc") is not None

pytestmark = pytest.mark.skipif(
    LIBRARY is None or not BUILDS or LIBRARY.products == "plain", reason="it needs a compiler, and AVX-512 BF16"
)


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles") / "emulated.so"
    source = str(HERE / "emulated_tiles.c")
    subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", source, "-o", str(path)], check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.products_so_far.restype = ctypes.c_long
    return loaded


@pytest.fixture
def tiles(emulation, monkeypatch):
    """Products are by tiles; called, it tells how many there were, or, where they are not emulated, how many passes."""
    begun, before, passes, run = emulation.products_so_far(), LIBRARY.products, [], Order.run

    def counted(order, *given, **more):
        run(order, *given, **more)
        passes.append(PRODUCTS[order._words[AT["products"]]])

    monkeypatch.setattr(Order, "run", counted)
    emulation.begin_emulation()
    LIBRARY.set_products("tiles")
    yield lambda: passes.count("tiles") if THERE else emulation.products_so_far() - begun
    assert emulation.is_left_alone()
    LIBRARY.set_products(before)
    emulation.end_emulation()


def drawn(query_len, key_len, size, value_size, heads, kv_heads, batch=1):
    """Query, key, value, and the gradient of an output, whose heads lie within each token."""
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, query_len, size), (kv_heads, key_len, size), (kv_heads, key_len, value_size)
    return [
        torch.randn(batch, length, count, features, generator=draw).bfloat16().transpose(1, 2)
        for count, length, features in (*shapes, (heads, query_len, value_size))
    ]


def both_passes(four, dtype, kernel, **features):
    """The output and the gradients of query, key and value."""
    *three, grad = four
    leaves = [part.to(dtype).detach().requires_grad_() for part in three]
    output = attention(*leaves, kernel=kernel, **features)
    return output.detach(), *torch.autograd.grad(output, leaves, grad.to(dtype))


CASES = {
    "full": ((200, 300, 64, 96, 2, 2), {}),
    "no whole tile of keys": ((40, 15, 32, 32, 2, 2), {}),
    "causal": ((257, 257, 64, 64, 2, 2), {"mask": Causal()}),
    "causal, grouped": ((131, 131, 32, 32, 4, 2), {"mask": Causal()}),
    "a few queries of many heads": ((5, 300, 64, 64, 8, 2), {}),
    "heads whose tokens lie 4,096 bytes apart": ((150, 150, 128, 128, 16, 16), {"mask": Causal()}),
    "window": ((300, 300, 64, 32, 2, 2), {"mask": Causal() & Window(37)}),
    "documents": ((300, 300, 64, 64, 2, 2), {"mask": Causal() & Document(torch.arange(300) // 43)}),
    "keys apart": ((300, 300, 64, 64, 2, 2), {"mask": Causal() & Strided(3)}),
    "padded": ((90, 90, 64, 64, 2, 2, 2), {"mask": Padding(torch.tensor([37, 90]))}),
    "random cells": ((150, 150, 64, 64, 2, 2), {"mask": Dense(torch.rand(150, 150).lt(0.5) | torch.eye(150).bool())}),
    "ALiBi and softcap": ((150, 150, 96, 64, 2, 2), {"mask": Causal(), "bias": Alibi(2), "softcap": 5.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_as_exact_as_any(name, tiles):
    shape, features = CASES[name]
    four = drawn(*shape)
    found = both_passes(four, torch.bfloat16, "native", **features)
    assert tiles() > 0
    exact = both_passes(four, torch.float64, "reference", **features)
    plain = both_passes(four, torch.bfloat16, "reference", **features)
    for what, one, truth, other in zip(("output", "query", "key", "value"), found, exact, plain, strict=True):
        assert_within_budget(one, truth, other, what)


def test_weights_and_their_gradients_are_not_rounded_to_bfloat16(tiles):
    """Values, and gradients, of which nearly all cancel: a relative error of 2^-9 in each weight would show."""
    query, key, value, grad = drawn(64, 512, 32, 32, 1, 1)
    value, grad = (torch.where(torch.arange(part.shape[2])[:, None] % 2 == 0, 512.0, -512.0) for part in (value, grad))
    four = query / 64, key / 64, value.expand(1, 1, 512, 32).bfloat16(), grad.expand(1, 1, 64, 32).bfloat16()
    found, exact = (both_passes(four, *how) for how in ((torch.bfloat16, "native"), (torch.float64, "reference")))
    assert tiles() > 0
    for what, one, truth in zip(("output", "query", "key", "value"), found, exact, strict=True):
        assert_close(one.double(), truth, what, tolerance=2**-7)


def test_lanes_without_a_query_have_no_part_in_it(tiles, monkeypatch):
    """Their weights are of no lse, so they may be infinite, and the call would be computed again."""
    monkeypatch.delattr(Order, "begin_again")
    query, *others = drawn(40, 64, 32, 32, 1, 1)
    found = both_passes((100 * query, *others), torch.bfloat16, "native")
    assert tiles() > 0
    assert all(part.isfinite().all() for part in found)


def test_lse_and_the_gradients_of_a_bias_are_those_of_float32(tiles):
    query, key, value, grad = drawn(70, 90, 64, 64, 2, 2)
    numbers = torch.randn(1, 2, 70, 90, generator=torch.Generator().manual_seed(1))
    found = []
    for dtype, kernel in ((torch.bfloat16, "native"), (torch.float64, "reference")):
        bias = numbers.to(torch.float32 if dtype is torch.bfloat16 else dtype).requires_grad_()
        three = (part.to(dtype) for part in (query, key, value))
        output, lse = attention_with_lse(*three, bias=Given(bias), kernel=kernel)
        found.append((lse.detach().double(), *torch.autograd.grad(output, bias, grad.to(dtype))))
    assert tiles() > 0
    assert_close(found[0][0], found[1][0], "lse", tolerance=1e-6)
    assert_close(found[0][1].double(), found[1][1], "gradient", tolerance=1e-5)


def test_what_a_hidden_key_holds_has_no_part_in_it(tiles):
    """A weight of 0 times NaN is NaN by tiles too: such calls are computed again, without what nobody sees."""
    query, key, value, grad = drawn(100, 100, 64, 64, 2, 2)
    key[:, :, 60:], value[:, :, 60:] = torch.nan, torch.inf
    hidden = both_passes((query, key, value, grad), torch.bfloat16, "native", mask=Padding(torch.tensor([60])))
    shown = [part[:, :, :60] for part in (key, value)]
    expected = both_passes((query, *shown, grad), torch.bfloat16, "native")
    assert tiles() > 0
    assert all(map(torch.equal, hidden[:2], expected[:2]))
    for part, other in zip(hidden[2:], expected[2:], strict=True):
        assert torch.equal(part[:, :, :60], other)
        assert not part[:, :, 60:].any()


def test_what_a_query_that_sees_nothing_holds_has_no_part_in_it(tiles):
    mask, found = Causal() & Padding(torch.arange(70)[None] >= 9), []  # the first 9 see nothing
    for poison in (0.0, torch.nan):
        four = [part.clone() for part in drawn(70, 70, 64, 64, 2, 2)]
        for part in four:
            part[:, :, :9] = poison
        found.append(both_passes(four, torch.bfloat16, "native", mask=mask))
    assert tiles() > 0
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("sizes", [(1, 1), (7, 40), (16, 24), (48, 64), (72, 72), (80, 112), (129, 33)], ids=str)
@pytest.mark.parametrize("name", ["full", "causal, grouped", "documents apart", "padded", "20 queries, 1 head"])
def test_features_that_fill_no_tile_are_filled_up(name, sizes, tiles):
    """Whatever lies beside them is not read: the heads of a token, and what is beyond the last of them, are NaN."""
    ids = torch.randint(0, 3, (1, 70), generator=torch.Generator().manual_seed(0))
    shape, mask = {
        "full": ((70, 90, 2, 2, 1), None),
        "causal, grouped": ((70, 70, 4, 2, 1), Causal()),
        "documents apart": ((70, 70, 2, 2, 1), Document(ids)),
        "padded": ((40, 40, 2, 2, 2), Padding(torch.tensor([17, 40]))),
        "20 queries, 1 head": ((20, 1024, 1, 1, 1), None),
    }[name]
    queries, keys, heads, kv_heads, batch = shape
    four = drawn(queries, keys, *sizes, heads, kv_heads, batch)
    beside = []
    for part in four:
        among = part.new_full((batch, part.shape[2], 2 * part.shape[1] + 1, part.shape[3]), torch.nan)
        among[:, :, 1::2] = part.transpose(1, 2)
        beside.append(among[:, :, 1::2].transpose(1, 2))
    found = both_passes(beside, torch.bfloat16, "native", mask=mask)
    assert tiles() > 0
    exact = both_passes(four, torch.float64, "reference", mask=mask)
    plain = both_passes(four, torch.bfloat16, "reference", mask=mask)
    for what, one, truth, other in zip(("output", "query", "key", "value"), found, exact, plain, strict=True):
        assert_within_budget(one, truth, other, what)


def test_statistics_of_heads_that_fill_no_tile(tiles):
    query, key, *_ = drawn(70, 90, 40, 8, 2, 2)
    found = observe(query, key, mask=Causal()).gather(Entropy(), Received())
    assert tiles() > 0
    weights = (query.double() @ key.double().mT * 40**-0.5).masked_fill(
        torch.ones(70, 90).triu(21).bool(), -torch.inf).softmax(-1)  # fmt: skip
    assert_close(found[1].double(), weights.sum(2), "received", tolerance=1e-5)
    assert_close(found[0].double(), torch.special.entr(weights).sum(-1), "entropy", tolerance=1e-5)

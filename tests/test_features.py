"""What features cost: every row is one call on which regard and torch agree, and the page says what was measured."""

import functools
import sys
from pathlib import Path

import pytest
import torch

import regard
from comparing import assert_close
from regard import Dense

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import features
import kinds

EXACT = [row for row in features.ROWS if "dropout" not in row.name]


@pytest.mark.parametrize("row", EXACT, ids=[row.name for row in EXACT])
def test_torch_is_given_the_same_work(row: features.Row) -> None:
    length = 48
    draw = torch.Generator().manual_seed(0)
    size = row.head_dim
    sizes = (
        (row.heads, row.queries or length, size),
        (row.kv_heads, length, size),
        (row.kv_heads, length, row.value_dim),
    )
    tensors = [torch.randn(row.batch, *size, generator=draw) for size in sizes]
    given = row.make(length)
    ours = regard.attention(*tensors, **given)
    for way in features.torch_ways(row, given, length, torch.float32, features.CPU):
        assert_close(ours, way(*tensors), tolerance=1e-5)


def test_the_formula_is_a_peer_of_torchs_function_where_it_may_be_faster() -> None:
    def ways(name: str, length: int = 64, dtype: torch.dtype = torch.float32) -> int:
        row = next(row for row in features.ROWS if row.name == name)
        return len(features.torch_ways(row, row.make(length), length, dtype, features.CPU))

    assert ways("full") == ways("bias, dense, trained") == ways("17 queries, 32 texts", 2048) == 2
    assert ways("full", 1024) == ways("full", dtype=torch.bfloat16) == ways("full, compiled") == 1
    assert ways("softcap, causal") == ways("dropout, causal") == ways("far keys alone", 512) == 1


@pytest.mark.parametrize("first", range(0, 240, 24))
def test_regard_and_torch_agree_on_calls_that_nobody_thought_of(first: int) -> None:
    tried = 0
    for number in range(first, first + 24):
        row, length, dtype = features.drawn(number)
        given, queries = row.make(length), row.queries or length
        if given.pop("dropout", None) or row.batch * row.heads * queries * length > 1 << 21:
            continue
        draw = torch.Generator().manual_seed(number)
        of_query, of_key = (row.heads, queries, row.head_dim), (row.kv_heads, length, row.head_dim)
        of_value = *of_key[:2], row.value_dim
        leaves = [torch.randn(row.batch, *size, generator=draw).to(dtype) for size in (of_query, of_key, of_value)]
        if row.by_token:
            leaves = [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]
        bias = given["bias"]
        learned = [] if row.learns is None else [bias if isinstance(bias, torch.Tensor) else bias.table]
        grad = torch.randn(*leaves[0].shape[:3], row.value_dim, generator=draw).to(dtype)
        # a query that sees no key gets 0 and gives no gradient, but NaN from torch, which may let it see all of them
        cells = features.allowed(given["mask"], row, length)
        blind = ~cells.any(-1, keepdim=True)
        grad.masked_fill_(blind, 0.0)
        with_eyes = given | ({"mask": Dense(cells | blind)} if blind.any() else {})
        exact = [leaf.float() for leaf in leaves]  # the formula rounds every score to bfloat16
        found, ours = [], functools.partial(regard.attention, **given)
        for way, tensors in (
            (ours, leaves),
            (features.torch_ways(row, with_eyes, length, torch.float32, features.CPU)[0], exact),
        ):
            for tensor in tensors:
                tensor.requires_grad_()
            output = way(*tensors)
            grads = torch.autograd.grad(output, [*tensors, *learned], grad.to(output.dtype))
            if way is not ours:
                output = output.masked_fill(blind, 0.0)
            found.append([tensor.detach().float() for tensor in (output, *grads)])
        for one, other in zip(*found, strict=True):
            assert_close(one, other, row.name, tolerance=2e-5 if dtype is torch.float32 else 2e-2)
        tried += 1
    assert tried


def test_the_page_says_what_was_measured() -> None:
    row = features.measure(features.ROWS[0], 16, torch.float32, repeats=1)
    row["forward"] |= {"ms": 12.345, "per_score": 1.25, "against_torch": 0.75}
    told = {"processor": "Abacus 7", "threads": 3, "torch": "9.9", "products": "MKL"}
    page = features.report([{"machine": told, "rows": [row]}, {"machine": told | {"products": "oneDNN"}, "rows": []}])
    assert "### float32, 16 tokens" in page
    assert page.index("## Products by MKL") < page.index("| causal | ") < page.index("## Products by oneDNN")
    assert "| causal | 12.3 / " in page
    assert " | 1.25 / " in page
    assert " | 0.75 / " in page
    assert "Abacus 7, 3 threads, torch 9.9" in page


def test_what_torchs_operators_take_alone_is_a_kind_of_its_own() -> None:
    machine = {
        "products": "MKL on Intel",
        "processor": "Abacus 7",
        "threads": 3,
        "torch": "9.9",
        "library": "x86-64-v3",
    }
    assert kinds.file("features", machine).name == "features-mkl-on-intel.json"
    assert kinds.heading(machine)[1] == "## Products by MKL on Intel"
    assert kinds.file("features", machine | {"library": None}).name == "features-mkl-on-intel-without-the-library.json"
    assert kinds.heading(machine | {"library": None})[1] == "## Products by MKL on Intel without the library"


def test_the_page_is_that_of_the_committed_results() -> None:
    assert features.report(kinds.every("features")) == features.PAGE.read_text(encoding="utf-8"), (
        "run: python benchmarks/features.py --report"
    )

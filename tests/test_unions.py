"""Unions with a strided mask or documents apart: parts without a common cell, whose results are merged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparing import assert_close, assert_same_cells, assert_within_budget
from regard import (
    Band,
    Causal,
    Dense,
    Document,
    Padding,
    Prefix,
    RelativeBias,
    Strided,
    Window,
    attention,
    attention_with_lse,
    plan,
)
from regard.kernels.strips import binding, tuning
from regard.kernels.strips.unions import parts_by_document, parts_by_residue
from regard.shapes import Grid

KERNELS = ["strips", *(["native"] if binding.compiled() is not None else [])]
LENGTH = 150
DOCUMENTS = Document(torch.arange(LENGTH) * 7 % LENGTH // 50)
OTHERS = Document(torch.arange(2 * LENGTH).view(2, LENGTH) * 11 % 5)

UNIONS = {
    "causal": Causal() & (Window(8) | Strided(8)),
    "both ways": Window(9) | Strided(9),
    "dilated": Causal() & (Window(5) | (Strided(7) & Window(70))),
    "with a prefix": Causal() & (Window(8) | Prefix(3) | Strided(8)),
    "two of them": Causal() & (Strided(6) | Strided(10)),
    "padded": Causal() & (Window(8) | Strided(8)) & Padding(torch.tensor([120, 77])),
    "documents": DOCUMENTS & (Window(8) | Strided(8)),
    "or a document": Causal() & (DOCUMENTS | Strided(8)),
    "documents or a prefix": Causal() & (DOCUMENTS | Prefix(7)),
    "documents or a window": OTHERS | Window(9),
    "documents or documents": DOCUMENTS | OTHERS,
    "documents in a window or a prefix": Causal() & ((OTHERS & Window(70)) | Prefix(3)),
    "documents or keys": (DOCUMENTS | Padding(torch.arange(LENGTH)[None] % 19 == 0)) & Padding([120, 77]),
    "documents or cells": Causal() & (DOCUMENTS | Dense(torch.rand(1, 4, LENGTH, LENGTH) < 0.1)),
    "with holes": Causal() & (Window(8) | Strided(8)) & Dense(torch.rand(LENGTH, LENGTH) < 0.7),
}


@pytest.fixture(autouse=True, scope="module")
def all_are_parted():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "KEYS_WORTH_MERGING", 0)
        yield


def documents_apart(kinds, seed):
    draw = torch.Generator().manual_seed(seed)
    return Document(*(torch.randint(0, kinds, (120,), generator=draw) for _ in range(2)))


MASKS = st.recursive(
    st.builds(Strided, st.integers(1, 12), offset=st.integers(-20, 20))
    | st.builds(Window, st.integers(1, 40))
    | st.builds(Prefix, st.integers(0, 30))
    | st.builds(Causal)
    | st.builds(documents_apart, st.integers(1, 6), st.integers(0, 99))
    | st.builds(lambda low, more: Band(-low, low + more), st.integers(-30, 30), st.integers(0, 30)),
    lambda masks: st.builds(lambda one, other: one & other, masks, masks) | st.builds(lambda a, b: a | b, masks, masks),
    max_leaves=6,
)


@pytest.mark.parametrize("parts_of", [parts_by_residue, parts_by_document])
@settings(max_examples=150)
@given(MASKS, st.integers(1, 120), st.integers(1, 120))
def test_the_parts_have_every_cell_of_the_mask_once(parts_of, mask, query_len, key_len):
    if any(isinstance(part, Document) for part in mask.leaves()):
        query_len = key_len = 120
    grid = Grid(1, 1, query_len, key_len, torch.device("cpu"))
    bound = mask.bind(grid)
    here, parts = (range(query_len), range(key_len)), parts_of(bound, grid)
    cells = sum(part.allowed(*here).expand(1, 1, query_len, key_len).int() for part in parts)
    assert int(cells.max()) <= 1
    assert_same_cells(cells == 1, bound.allowed(*here))


def test_few_keys_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(tuning, "KEYS_WORTH_MERGING", 128)
    device = torch.device("cpu")
    for length, count in ((128, 1), (2048, 2)):
        grid = Grid(1, 1, length, length, device)
        assert len(parts_by_residue(UNIONS["causal"].bind(grid), grid)) == count
        documents = Document(torch.arange(length) % 2) | Window(4)
        assert len(parts_by_document(documents.bind(grid), grid)) == (1 if count == 1 else 3)


def drawn(dtype, batch):
    draw = torch.Generator().manual_seed(0)
    shapes = (batch, 4, LENGTH, 16), (batch, 2, LENGTH, 16), (batch, 2, LENGTH, 24), (batch, 4, LENGTH, 24)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("name", UNIONS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_output_lse_and_gradients_are_those_of_the_mask(name, kernel, dtype):
    *three, grad = drawn(dtype, 2 if UNIONS[name].varies_by_batch else 1)
    draw, found = torch.Generator().manual_seed(1), []
    sink, table = torch.randn(4, generator=draw).to(dtype), torch.randn(32, 4, generator=draw)
    for by, of in ((kernel, dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [part.to(of).detach().requires_grad_() for part in (*three, sink)]
        learned = table.to(torch.promote_types(of, torch.float32)).detach().requires_grad_()
        output, lse = attention_with_lse(
            *leaves[:3], mask=UNIONS[name], bias=RelativeBias(learned), sink=leaves[3], softcap=8.0, kernel=by,
            dropout=0.1, generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        total = (output * grad.to(of)).sum() + lse[lse.isfinite()].sum()
        found.append((output, lse, *torch.autograd.grad(total, (*leaves, learned))))
    names = "output", "lse", "query", "key", "value", "sink", "table"
    for what, actual, plain, exact in zip(names, *found, strict=True):
        if dtype is torch.bfloat16 and what not in ("lse", "table"):
            assert_within_budget(actual, exact, plain, what)
        else:
            assert_close(actual.double(), exact, what, tolerance=1e-10 if dtype is torch.float64 else 2e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_costs_about_what_the_mask_allows(kernel):
    query = torch.zeros(1, 1, 4096, 8)
    for mask in (Causal() & (Window(64) | Strided(64)), Window(64) | Strided(64)):
        found = plan(query, query, query, mask=mask, kernel=kernel)
        assert found.flops_computed <= 3 * found.flops_needed


@pytest.mark.skipif(KERNELS == ["strips"], reason="only the library sorts the parts of a union")
def test_documents_apart_cost_about_what_they_allow_beside_another_mask():
    query, places = torch.zeros(1, 1, 2048, 8), torch.arange(2048)
    documents, others = Document(places * 7 % 2048 // 64), Document(places % 40)
    for mask in (Causal() & (documents | Prefix(32)), documents | Window(32), documents | others):
        found = plan(query, query, query, mask=mask, kernel="native")
        assert found.flops_computed <= 2.5 * found.flops_needed, mask


@pytest.mark.usefixtures("sorts_few")
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_nobody_sees_has_no_part_in_it(kernel):
    *three, _ = drawn(torch.float32, 1)
    mask = Causal() & (Window(8) | Strided(8) | DOCUMENTS) & Padding(torch.tensor([100]))
    expected = attention(*three, mask=mask, kernel=kernel)
    three[1][:, :, 100:], three[2][:, :, 100:] = torch.nan, torch.inf
    assert_close(attention(*three, mask=mask, kernel=kernel), expected)


def test_a_graph_holds_it_as_a_node():
    *three, _ = drawn(torch.float32, 1)
    mask = UNIONS["causal"]
    compiled = torch.compile(lambda *given: attention(*given, mask=mask), fullgraph=True, backend="aot_eager")
    assert_close(compiled(*three), attention(*three, mask=mask, kernel="reference"))

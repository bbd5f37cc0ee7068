"""Programs for a GPU, run on a CPU by Triton's interpreter: all features forward and backward, beside the reference.

What only a GPU can tell, its compiler's part and bfloat16, which the interpreter does not know, is in test_gpu.py.
"""

import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from cases import FEATURES, composed_masks, grids
from comparing import assert_close, assert_same_cells
from regard import Causal, Dense, Padding, Where, Window
from regard.biases import Given
from regard.kernels.strips.gpu import blocks, passes
from regard.reference import reference
from regard.shapes import Grid
from regard.validation import check_call


def call_of(query, key, value, mask=None, *, softcap=None, sink=None, dropout=0.0, bias=None):
    generator = torch.Generator().manual_seed(3) if dropout else None
    return check_call("test", query, key, value, mask, bias, None, softcap, sink, None, dropout, generator, True)


# --- blocks of a mask ---------------------------------------------------------------------------------------------


@given(st.data())
def test_the_function_of_a_cell_says_what_the_mask_says(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    batch, heads, query_len, key_len, _ = grid
    axes = torch.meshgrid(*map(torch.arange, (batch, heads, query_len, key_len)), indexing="ij")
    asked = mask.rule(*axes)
    assert_same_cells(asked.expand(grid[:4]), mask.allowed(range(query_len), range(key_len)).expand(grid[:4]))


def cells_of(found, grid, by, rows, columns):
    """The cells that lists of blocks hold: bool [batch, heads, query_len, key_len]."""
    own, across = -(-grid.query_len // rows), -(-grid.key_len // columns)
    lists = own if by is found.by_query else across
    held = torch.zeros(found.batch * found.heads, own * rows, across * columns, dtype=torch.bool)
    for number in range(len(held) * lists):
        of, mine = divmod(number, lists)
        full, partial, end = by.begins[2 * number : 2 * number + 3].tolist()
        assert sorted(set(by.others[full:partial].tolist())) == by.others[full:partial].tolist()
        for at in range(full, end):
            other = int(by.others[at])
            row, column = (mine, other) if by is found.by_query else (other, mine)
            cells = torch.ones(rows, columns, dtype=torch.bool)
            if at >= partial:
                cells = ((found.bits[int(by.cells[at])][..., None] >> torch.arange(32)) & 1).flatten(1).bool()
                assert bool(cells.any())
            held[of, row * rows : (row + 1) * rows, column * columns : (column + 1) * columns] |= cells
    assert not bool(held[:, :, grid.key_len :].any())
    return held.unflatten(0, (found.batch, found.heads))[:, :, : grid.query_len, : grid.key_len]


@settings(max_examples=60)
@given(st.data())
def test_blocks_hold_every_allowed_cell_and_nothing_else(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ROWS", 4)
        patch.setattr(blocks, "COLUMNS", 32)
        found = blocks._found(mask, grid)
    allowed = mask.allowed(range(grid.query_len), range(grid.key_len)).expand(grid[:4])
    for by in (found.by_query, found.by_key):
        assert torch.equal(cells_of(found, grid, by, 4, 32).expand(grid[:4]), allowed)


@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(40), Dense(torch.arange(150)[:, None] % 3 == torch.arange(170) % 3)],
    ids=["in closed form", "cells"],
)
def test_blocks_lie_where_the_call_does_whatever_the_default_device_is(mask):
    grid = Grid(1, 1, 150, 170)
    bound = mask.bind(grid)
    right = blocks._found(bound, grid)
    with torch.device("meta"):
        found = blocks._found(bound, grid)
    for ours, theirs in zip((*found.by_query, found.bits), (*right.by_query, right.bits), strict=True):
        assert torch.equal(ours, theirs)


def test_a_long_window_is_planned_without_a_square():
    grid = Grid(1, 1, 1 << 14, 1 << 14)
    asked = []

    class Watched(Window):
        def rule(self, batch, head, query, key):
            asked.append(query.numel() * key.shape[-1])
            return super().rule(batch, head, query, key)

    found = blocks.blocks_of(Watched(200).bind(grid), grid)
    assert sum(asked) < 8 * blocks.ROWS * grid.query_len
    assert len(found.bits) * blocks.ROWS * blocks.COLUMNS < 8 * blocks.ROWS * grid.query_len


# --- passes -------------------------------------------------------------------------------------------------------

CASES = FEATURES | {
    "a bias that learns": {"mask": Causal(), "bias": torch.randn(1, 4, 150, 170).requires_grad_()},
    "a bias of keys that learns": {"bias": torch.randn(2, 1, 1, 170).requires_grad_()},
    "a bias that hides keys": {"bias": torch.zeros(170).masked_fill(torch.arange(170) >= 110, -math.inf)},
    "bias and sink that lie otherwise": {
        "mask": Causal(), "sink": torch.randn(8)[::2], "bias": -torch.randn(1, 4, 170, 150).mT,
    },
    "T5's bias, which learns": {"bias": regard.RelativeBias(torch.randn(32, 4).requires_grad_())},
    "two tensors, one of which learns": {"bias": Given(torch.randn(4, 1, 1).requires_grad_()) + torch.randn(150, 1)},
    "dropout": {"mask": Causal(), "dropout": 0.3},
}  # fmt: skip


@pytest.fixture(scope="module")
def patched_language():
    """Triton's language as its interpreter patches it, which else does so anew in each call of a function."""
    if torch.cuda.is_available():
        pytest.skip("test_gpu.py runs them on the GPU")
    pytest.importorskip("triton", reason="Triton is for Linux")
    from triton import language
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())  # changes nothing
        yield
    scope.restore()


@pytest.fixture
def interpreted(patched_language):
    """The programs, run by Triton's interpreter: see conftest.py."""
    return passes.programs()


@pytest.mark.parametrize(("size", "value_size", "dtype"), [(24, 40, torch.float32), (16, 16, torch.float16)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_programs_compute_what_the_reference_does(interpreted, case, size, value_size, dtype):
    shapes = (4, 150, size), (2, 170, size), (2, 170, value_size)
    query, key, value = (torch.randn(2, *shape).to(dtype) for shape in shapes)
    if isinstance(case.get("mask"), Padding):
        key[0, :, 120:] = value[0, :, 110:] = math.nan  # seen by nobody
    if case is CASES["a bias that hides keys"]:
        key[:, :, 120:] = value[:, :, 110:] = math.nan
    sink = None if case.get("sink") is None else case["sink"].detach().requires_grad_()
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    learning = [*leaves, *([] if sink is None else [sink])]
    case = {**case, "sink": sink}
    call = call_of(*leaves, **case)
    learning += [tensor for tensor in call.scoring.learned() if tensor.requires_grad]
    output, lse = reference(*leaves, call.scoring, call.dropout)
    grad_output = torch.randn(output.shape).to(dtype)
    grad_lse = torch.randn(lse.shape).masked_fill(lse.detach() == -math.inf, 0.0)
    scalar = (output * grad_output).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * grad_lse).sum()
    right = [output, lse, *torch.autograd.grad(scalar, learning)]

    call = call_of(query, key, value, **case)
    fixed, found = (sink, call.scoring, call.dropout), passes.plan_of(call)
    with torch.no_grad():
        output, lse, kept = passes.forward(query, key, value, *fixed, found)
        grads = passes.backward(
            query, key, value, *fixed, found, *call.scoring.learned(), output=kept, lse=lse, grad_output=grad_output,
            grad_lse=grad_lse,
        )  # fmt: skip
    ours = [output, lse, *(grad for grad in grads if grad is not None)]
    for one, other in zip(ours, right, strict=True):
        assert_close(one.double(), other.detach().double(), tolerance=2e-6 if dtype is torch.float32 else 4e-3)


@pytest.fixture
def on_a_cpu(interpreted, monkeypatch):
    """The kernel supports calls on a CPU."""
    monkeypatch.setattr(passes, "cannot_on", lambda device: None)


EXAMPLES = {name: CASES[name] for name in ("window", "padding, a row of it empty", "a function")} | {
    "softcap, T5 and a tensor that learn": {
        "mask": Causal() & Window(60), "softcap": 4.0,
        "bias": regard.RelativeBias(torch.randn(32, 4).requires_grad_()) + torch.randn(170).requires_grad_(),
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch._dynamo
@pytest.mark.parametrize("compiles", [False, True], ids=["as it is", "in a graph"])
@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_call_of_attention_is_computed_by_them(on_a_cpu, case, compiles):
    if compiles and isinstance(case["mask"], Where):
        pytest.skip("a graph has no room for a function")
    tensors = [torch.randn(2, heads, length, 16) for heads, length in ((4, 150), (2, 170), (2, 170))]
    assert regard.plan(*tensors, **case).kernel == "triton"  # by itself, not by name
    found = []
    for kernel in ("auto", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]

        def attend(*three, kernel=kernel):
            return regard.attention(*three, **case, kernel=kernel)

        attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiles and kernel == "auto" else attend
        output = attend(*leaves)
        with torch.no_grad():
            assert torch.equal(attend(*leaves), output)
        learning = [*leaves, *case["bias"].learned()] if "bias" in case else leaves
        found.append([output, *torch.autograd.grad(output.sin().sum(), learning)])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, tolerance=5e-6)


def test_dropout_drops_what_other_kernels_drop_and_draws_a_seed_in_each_call(on_a_cpu):
    tensors = [torch.randn(1, 2, 70, 16) for _ in range(3)]

    def attend(kernel):
        generator = torch.Generator().manual_seed(5)
        return regard.attention(*tensors, mask=Causal(), dropout=0.4, generator=generator, kernel=kernel)

    assert_close(attend("triton"), attend("reference"), tolerance=2e-6)
    first, second = (regard.attention(*tensors, mask=Causal(), dropout=0.4, kernel="triton") for _ in range(2))
    assert not torch.equal(first, second)


def test_a_gradient_of_a_gradient_is_that_of_the_reference(on_a_cpu):
    tensors = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    found = []
    for kernel in ("triton", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = regard.attention(*leaves, mask=Causal() & Window(9), kernel=kernel)
        firsts = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which says that the reference computes it
            found.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves))
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right, tolerance=2e-5)


def test_what_it_cannot_do_is_said(monkeypatch):
    monkeypatch.delenv("REGARD_NATIVE", raising=False)
    query = torch.randn(1, 2, 5, 4)
    assert "CUDA devices only" in passes.cannot(call_of(query, query, query))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class OnCuda:
        """A call that says that it lies on a GPU."""

        def __init__(self, size=4, dtype=torch.float32, **given):
            self.call = call_of(*torch.randn(3, 1, 2, 5, size), **given)
            self.scoring, self.value = self.call.scoring, self.call.value
            self.query = type("Query", (), {"device": torch.device("cuda"), "dtype": dtype, "shape": self.value.shape})

    monkeypatch.setattr(passes, "cannot_on", passes._why_not_on.__wrapped__)  # which remembers nothing
    monkeypatch.setattr(passes, "find_spec", lambda name: None)
    assert "Triton is not installed" in passes.cannot(OnCuda())
    monkeypatch.setattr(passes, "find_spec", lambda name: name)
    assert "compute capability 8.0" in passes.cannot(OnCuda())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert passes.cannot(OnCuda()) is None
    monkeypatch.setenv("REGARD_NATIVE", "0")
    assert "REGARD_NATIVE=0" in passes.cannot(OnCuda())
    monkeypatch.delenv("REGARD_NATIVE")
    assert passes.cannot(OnCuda(mask=Causal() & Window(3), softcap=1.0, dropout=0.1, bias=torch.zeros(5, 5))) is None
    assert "torch.float64" in passes.cannot(OnCuda(dtype=torch.float64))
    assert "more than 128 features" in passes.cannot(OnCuda(size=130))
    assert "more than 256 features" in passes.cannot(OnCuda(size=260, dtype=torch.float16))
    monkeypatch.setattr(passes, "MAX_HEADS", 1)
    assert "at most 1 heads" in passes.cannot(OnCuda())
    monkeypatch.setattr(passes, "MAX_HEADS", 2)
    monkeypatch.setattr(passes, "MAX_EVALUATED", 10)
    two = Given(torch.zeros(5)) + torch.zeros(5)
    assert "evaluated for every score" in passes.cannot(OnCuda(bias=two))


# --- as a GPU is given them -----------------------------------------------------------------------------------------

SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Shared memory that a program may take, by compute capability: NVIDIA, CUDA C++ Programming Guide, "Compute
Capabilities"."""


def test_programs_are_compiled_for_gpus_and_the_last_of_their_sizes_fit_into_little_shared_memory():
    pytest.importorskip("triton", reason="Triton is for Linux")
    script = Path(__file__).parent / "compiled_programs.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    assert {(one["program"], one["half"], one["width"]) for one in found} == {
        (program, *kind) for program in passes.PROGRAMS for kind in passes.SIZES
    }
    for one in found:
        assert one["shared"] == sorted(one["shared"], reverse=True), one
        assert one["shared"][-1] <= SHARED[89 if one["capability"] == 80 else 90], one  # one code for 8.x


def test_a_program_that_a_gpu_has_no_memory_for_is_cut_smaller_from_then_on(interpreted, monkeypatch):
    tried = []

    class Large:
        """Takes more memory than there is, for more than 16 queries at a time."""

        def __getitem__(self, grid):
            def run(**given):
                tried.append(given["QUERIES"])
                if given["QUERIES"] > 16:
                    raise interpreted.OutOfResources(99, 9, "shared memory")
                return interpreted.forward[grid](**given)

            return run

    monkeypatch.setattr(passes, "_fits", {})
    monkeypatch.setitem(passes.SIZES, (False, 64), ((passes.Size(64, 64, 4, 1), passes.Size(16, 64, 4, 1)),))
    query = torch.randn(1, 2, 40, 16)
    call = call_of(query, query, query, Causal())
    right, _ = reference(query, query, query, call.scoring)
    monkeypatch.setattr(passes, "programs", lambda: SimpleNamespace(**vars(interpreted) | {"forward": Large()}))
    for _ in range(2):
        output, _, _ = passes.forward(query, query, query, None, call.scoring, None, passes.plan_of(call))
        assert_close(output, right, tolerance=2e-6)
    assert tried == [64, 16, 16]
    monkeypatch.setitem(passes.SIZES, (False, 64), ((passes.Size(64, 64, 4, 1),),))
    monkeypatch.setattr(passes, "_fits", {})
    with pytest.raises(interpreted.OutOfResources):
        passes.forward(query, query, query, None, call.scoring, None, passes.plan_of(call))

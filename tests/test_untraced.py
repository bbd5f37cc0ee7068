"""A call in a graph of fixed lengths: one function that Dynamo does not trace, the same numbers, few guards."""

import operator

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from cases import FEATURES
from comparing import assert_close
from regard import (
    Alibi,
    Causal,
    KernelError,
    Mask,
    Padding,
    RelativeBias,
    ShapeError,
    Window,
    attention,
    attention_with_lse,
    measured,
    untraced,
)
from regard.kernels.strips import native

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch._dynamo

LEARNED = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))

CASES = {name: (lambda learned, given=given: given) for name, given in FEATURES.items() if name != "a function"} | {
    "a table of T5": lambda learned: {"mask": Causal(), "bias": RelativeBias(learned)},
    "a tensor, and a sink": lambda learned: {"bias": learned[:1, :, None, None], "sink": learned[0]},
    "one of one's own": lambda learned: {"mask": ByText(3), "bias": Alibi(4), "softcap": 9.0, "scale": 0.3},
    "dropout": lambda learned: {"mask": Causal(), "dropout": 0.3},
}


class ByText(Mask):
    """Keys that a remainder hides, another one in each text."""

    def __init__(self, n):
        self.n = n

    def rule(self, batch, head, query, key):
        return (key + batch) % self.n != 0


@pytest.fixture(autouse=True)
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def three():
    return [torch.randn(2, heads, length, 16) for heads, length in ((4, 150), (2, 170), (2, 170))]


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_it_is_one_function_of_a_graph_forward_and_backward(three, given):
    functions = []

    def backend(graph, examples):
        functions.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    def run(query, key, value, learned):
        return attention_with_lse(query, key, value, **given(learned))

    found = []
    for function in (torch.compile(run, backend=backend, fullgraph=True), run):
        torch.manual_seed(7)  # of what is dropped
        leaves = [tensor.clone().requires_grad_() for tensor in (*three, LEARNED)]
        output, lse = function(*leaves)
        loss = output.square().sum() + lse[lse.isfinite()].sum()
        found.append([output, lse, *torch.autograd.grad(loss, leaves, allow_unused=True)])
    for ours, right in zip(*found, strict=True):
        if right is None:
            assert ours is None
        else:
            assert_close(ours, right)
    assert functions.count(untraced._attention) == 1
    if given is not CASES["a tensor, and a sink"]:  # which are taken from what learns
        small = {operator.getitem, torch._C._are_functorch_transforms_active, torch.tensor}  # of numbers in a list
        assert set(functions) - small == {untraced._attention}


def test_few_of_the_guards_of_a_graph_are_about_regard(three):
    def run(*three):
        return attention(*three, mask=Causal() & Window(40), bias=Alibi(4), softcap=5.0)

    torch.compile(run, backend="eager", fullgraph=True)(*three)
    (entry,) = _debug_get_cache_entry_list(run.__code__)
    about = [line for line in str(entry.guard_manager).splitlines() if "regard" in line]
    assert 0 < len(about) < 300  # 225; traced, they would be 860


def test_a_mask_taken_out_of_a_batch_is_that_of_its_text(three):
    mask = ByText(3).for_batch(1)
    one = [tensor[1:] for tensor in three]
    compiled = torch.compile(lambda *one: attention(*one, mask=mask), backend="aot_eager", fullgraph=True)
    assert_close(compiled(*one), attention(*three, mask=ByText(3))[1:])


def test_a_mask_of_a_class_that_was_defined_anew_is_that_of_its_own_class(three):
    def defined(remainder):
        class Every(Mask):
            def __init__(self, n):
                self.n = n

            def rule(self, batch, head, query, key):
                return key % self.n == remainder

        return Every(3)

    older, newer = defined(1), defined(2)
    assert older.kind == newer.kind
    for mask in (older, newer):
        compiled = torch.compile(lambda *three, m=mask: attention(*three, mask=m), backend="aot_eager", fullgraph=True)
        assert_close(compiled(*three), attention(*three, mask=mask))
        torch.compiler.reset()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mask": Padding([100])}, ShapeError, "Padding: lengths is for batch=1, the scores are [batch=2"),
        ({"scale": float("nan")}, ValueError, "attention: scale must be a finite number or None"),
        ({"bias": torch.zeros(3, dtype=torch.int)}, TypeError, "attention: bias must be a floating tensor"),
        ({"mask": torch.ones(150, 170) > 0}, TypeError, "attention: mask must be a regard mask such as Causal()"),
        ({"kernel": "fastest"}, KernelError, "attention: no kernel named 'fastest'"),
        ({"kernel": "sdpa", "softcap": 3.0}, KernelError, "kernel 'sdpa' does not support this call"),
    ],
    ids=str,
)
def test_what_is_wrong_is_the_same_error_as_without_a_graph(three, change, error, words):
    compiled = torch.compile(lambda *three: attention(*three, **change), backend="aot_eager")
    for function in (compiled, lambda *three: attention(*three, **change)):
        with pytest.raises(error) as raised:
            function(*three)
        assert words in str(raised.value)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # what tells which transforms there are
def test_a_graph_is_not_run_for_derivatives_that_are_carried_forward(three):
    def run(query):
        return attention(query, *three[1:], mask=Causal())

    compiled, found = torch.compile(run, backend="aot_eager"), []
    compiled(three[0])
    with forward_ad.dual_level():
        for function in (compiled, run):
            dual = function(forward_ad.make_dual(three[0], torch.ones_like(three[0])))
            found.append(forward_ad.unpack_dual(dual).tangent)
    assert_close(*found)


def test_numbers_that_change_from_call_to_call_are_those_of_each_call(three):
    compiled = torch.compile(
        lambda scale, before, *three: attention(*three, mask=Window(before), scale=scale), backend="aot_eager"
    )
    for scale, before, length in ((0.1, 5, 150), (0.2, 9, 150), (0.3, 70, 150), (0.4, 70, 140), (0.5, 70, 131)):
        query, key, value = three[0][:, :, :length], *three[1:]
        right = attention(query, key, value, mask=Window(before), scale=scale)
        assert_close(compiled(scale, before, query, key, value), right)


@pytest.mark.skipif(not native.is_there(torch.float64), reason="the library was not compiled")
def test_what_a_choice_in_a_graph_follows_from_is_measured_with_numbers(three, monkeypatch, tmp_path):
    monkeypatch.delenv("REGARD_MEASURE")
    monkeypatch.setattr(measured, "file", lambda: tmp_path / "measured.json")
    monkeypatch.setattr(measured, "ROUNDS", 1)
    for dtype in (torch.float64, torch.bfloat16):
        cached = [native.price, native.settle_products]
        given = [tensor.to(dtype) for tensor in three]
        try:
            for function in cached:
                function.cache_clear()
            compiled = torch.compile(lambda *given: attention(*given, softcap=3.0), backend="aot_eager", fullgraph=True)
            assert_close(compiled(*given), attention(*given, softcap=3.0))
        finally:
            for function in cached:
                function.cache_clear()
    assert "native / fused, torch.float64" in measured.file().read_text()

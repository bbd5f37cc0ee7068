"""Calls like an earlier one: the library reads their tensors itself, however they lie, as it would the first time."""

import ctypes
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from cases import in_threads, needs_library
from regard import Alibi, Causal, Dense, Window, attention, attention_with_lse, repeated
from regard.kernels.strips import binding, ready
from regard.kernels.strips.order import library_for
from regard.validation import check_call


def heads(queries: int = 9, keys: int = 21, size: int = 16, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, 4, queries, size), (2, 2, keys, size), (2, 2, keys, size)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def right(three: list[Tensor], **given) -> None:
    """What a call computes is what the formula says."""
    expected = attention_with_lse(*(t.double() for t in three), **given, kernel="reference")
    found = attention_with_lse(*three, **given)
    error = 0.02 if three[0].dtype in (torch.bfloat16, torch.float16) else 2e-5
    torch.testing.assert_close(found.output.double(), expected.output, atol=error, rtol=error)
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(attention(*three, **given).double(), expected.output, atol=error, rtol=error)


def by_token(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def part(tensor: Tensor) -> Tensor:
    larger = torch.full((tensor.shape[0], tensor.shape[1] + 1, tensor.shape[2] + 3, tensor.shape[3] + 5), torch.nan)
    larger = larger.to(tensor.dtype)
    larger[:, 1:, 2:-1, 3:-2] = tensor
    return larger[:, 1:, 2:-1, 3:-2]


def apart(tensor: Tensor) -> Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def negated(tensor: Tensor) -> Tensor:
    """With torch's bit for numbers that are to be read with the other sign."""
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


LAID = (torch.clone, by_token, part, apart, negated)


@pytest.fixture
def again(monkeypatch) -> list[int]:
    """The outcomes of passes like an earlier one, all of which are found by the form of their call."""
    monkeypatch.setattr(repeated, "repeat", lambda given, table: None)
    outcomes: list[int] = []
    library = library_for(torch.float32)
    real = library.again
    monkeypatch.setattr(library, "again", lambda *told: outcomes.append(real(*told)) or outcomes[-1])
    return outcomes


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 9, 40])
def test_tensors_of_calls_alike_may_lie_in_any_way(dtype, queries):
    draw = random.Random(queries)
    for seed in range(30):
        three = [draw.choice(LAID)(tensor) for tensor in heads(queries, seed=seed, dtype=dtype)]
        right(three, mask=Causal(), bias=Alibi(4), softcap=9.0)


@needs_library
def test_no_more_ways_are_kept_than_so_many_and_the_last_ones_are(again):
    ways = list(itertools.islice(itertools.product(LAID[:3], repeat=3), ready.MAX_KEPT + 3))
    for way in ways:
        three = [lay(tensor) for lay, tensor in zip(way, heads(), strict=True)]
        for _ in range(3):
            attention(*three, kernel="native")
    again.clear()
    for way in ways[::-1]:
        attention(*(lay(tensor) for lay, tensor in zip(way, heads(), strict=True)), kernel="native")
    assert again.count(binding.DONE) >= ready.MAX_KEPT
    assert len(again) <= len(ways) * ready.MAX_KEPT


@needs_library
def test_a_call_like_an_earlier_one_is_told_at_once_and_its_gradients_too(again):
    three = [tensor.requires_grad_() for tensor in heads()]
    for _ in range(3):
        again.clear()
        attention(*three, mask=Window(5), kernel="native").sum().backward()
    assert again == [binding.DONE, binding.DONE]


@needs_library
def test_what_is_hidden_has_no_part_in_calls_alike(again):
    cells = torch.rand(9, 21, generator=torch.Generator().manual_seed(0)) > 0.3
    cells[:, 11] = cells[:, 17] = False
    mask = Dense(cells)
    for bad in (0.0, torch.nan, torch.inf, 0.0):
        query, key, value = heads()
        expected = attention(query.double(), key.double(), value.double(), mask=mask, kernel="reference").float()
        key[:, :, 11] = value[:, :, 17] = bad
        for _ in range(2):
            found = attention(query, key, value, mask=mask, kernel="native")
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert {binding.DONE, binding.SUSPECT} <= set(again)


@needs_library
def test_gradients_of_tensors_that_lie_in_any_way_are_those_of_the_formula():
    draw = random.Random(1)
    for seed in range(12):
        leaves = [tensor.requires_grad_() for tensor in heads(seed=seed)]
        given = [draw.choice(LAID)(tensor) for tensor in leaves]
        grads = torch.autograd.grad(attention(*given, mask=Causal()).square().sum(), leaves)
        doubled = [tensor.detach().double().requires_grad_() for tensor in leaves]
        output = attention(*doubled, mask=Causal(), kernel="reference")
        for found, expected in zip(grads, torch.autograd.grad(output.square().sum(), doubled), strict=True):
            torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@needs_library
@pytest.mark.parametrize("queries", [1, 9])
def test_threads_of_python_compute_calls_alike_at_the_same_time(queries):
    wrong: list[str] = []

    def compute(number: int) -> None:
        try:
            for seed in range(20):
                right(heads(queries, seed=100 * number + seed), mask=Causal(), sink=torch.full((4,), float(number)))
        except AssertionError as error:
            wrong.append(str(error))

    in_threads(compute, 4)
    assert not wrong


@needs_library
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("learns", [False, True])
def test_other_threads_of_python_run_meanwhile(queries, learns):
    """Its lock is released before anything is computed, and taken again after it."""
    calls: list[str] = []
    path = Path(binding.__file__).parent / "c" / f"attention-{binding.name()}-float32.so.1"
    functions = binding._functions_of_python()
    release = ctypes.PYFUNCTYPE(ctypes.c_void_p)(lambda: calls.append("release"))
    acquire = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(lambda state: calls.append("acquire"))
    watched = type(functions)(*functions)
    for name, one in (("PyEval_SaveThread", release), ("PyEval_RestoreThread", acquire)):
        watched[1 + binding._OF_PYTHON.index(name)] = ctypes.cast(one, ctypes.c_void_p).value
    kernel = "native" if queries > 1 or learns else "auto"
    three = [part.requires_grad_(learns) for part in heads(queries)]
    grad = torch.randn(three[0].shape)

    def run() -> None:
        output = attention(*three, kernel=kernel)
        if learns:
            output.backward(grad)

    for _ in range(4):
        run()
    library = ctypes.PyDLL(str(path))
    library.regard_set_python(watched)
    try:
        run()
    finally:
        library.regard_set_python(functions)
    assert calls == ["release", "acquire"] * (1 + learns)


# --- by what they are known -------------------------------------------------------------------------------------------

SHAPES = ((1, 4, 1, 8), (1, 4, 1, 16), (2, 4, 1, 8), (1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 7, 8), (4, 1, 8), (8,), ())
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.float8_e4m3fn


@needs_library
@pytest.mark.parametrize("of_one", [False, True])
@pytest.mark.parametrize("count", [3, 4])
def test_the_library_tells_tensors_apart_as_python_does(of_one, count):
    draw, library = random.Random(count), binding.compiled()
    pairs = set()
    for _ in range(600):
        shapes = SHAPES[:6] if draw.random() < 0.7 else SHAPES
        tensors = tuple(torch.empty(draw.choice(shapes), dtype=draw.choice(DTYPES[:2])) for _ in range(count - 1))
        tensors += (torch.empty(draw.choice(shapes), dtype=draw.choice(DTYPES)),)
        pairs.add((library.describe(tensors, of_one), binding.described(tensors, of_one)))
    assert len({told for told, _ in pairs}) == len({described for _, described in pairs}) == len(pairs)
    assert len(pairs) > 100


@needs_library
def test_tensors_without_numbers_in_strides_are_not_described():
    plain = torch.randn(2, 3)
    odd = torch.nested.nested_tensor([plain, plain], layout=torch.jagged), plain.to_sparse()
    for tensor in odd:
        with pytest.raises((RuntimeError, TypeError, BufferError)):
            binding.compiled().describe((plain, tensor), False)
        assert binding.described((plain, tensor), False) is None
    assert binding.compiled().describe((torch.randn([1] * 9),), False) == b""
    assert binding.compiled().describe((plain,) * 5, False) == b""
    query, key, value = heads()
    for _ in range(2):
        with pytest.raises(TypeError, match="key must be"):
            attention(query, key.to_sparse(), value)
        with pytest.raises((TypeError, ValueError, regard.ShapeError)):
            attention(query, key.to("meta"), value)


@needs_library
def test_tensors_without_numbers_are_not_asked_for_them(monkeypatch):
    """To find out by an error takes longer than all the rest."""
    monkeypatch.setattr(binding, "describe", lambda *given: pytest.fail("it was asked"))
    for queries in (1, 9):
        three = [tensor.to("meta") for tensor in heads(queries)]
        assert attention(*three, mask=Causal()).shape == three[0].shape


def test_a_torch_that_tells_of_tensors_in_another_way_is_refused(monkeypatch):
    class Later(binding._ExchangeOf):
        @property
        def major(self):
            return 2

    monkeypatch.setattr(binding, "_ExchangeOf", Later)
    with pytest.raises(OSError, match="in another way"):
        binding._functions_of_python()


def test_without_the_library_calls_are_known_as_well(monkeypatch):
    monkeypatch.setattr(binding, "describe", binding.described)
    checks = []
    monkeypatch.setattr("regard.functional.check_call", lambda *given: checks.append(given) or check_call(*given))
    for _ in range(3):
        right(heads(), mask=Causal())
    assert len(checks) <= 4  # with and without lse, of one dtype and the other

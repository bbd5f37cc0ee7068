"""Products by either library: the same numbers, by the faster one, which is measured once and kept."""

import importlib.util
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import regard
from comparing import assert_close, assert_within_budget
from regard import (
    Alibi,
    Causal,
    Dense,
    Document,
    Prefix,
    Window,
    attention,
    attention_with_lse,
    checked,
    matmul,
    measured,
    observe,
    plan,
    processor,
)
from regard.kernels.strips import products, tuning
from regard.observation import Entropy, Received, Top
from regard.scores import Additive

SETTING = torch.backends.mkldnn.matmul


@pytest.fixture
def exact(monkeypatch):
    """Products of float32 that are not rounded, whatever is set: with AMX, oneDNN would."""

    def unrounded(real):
        def product(*given, **more):
            before = SETTING.fp32_precision
            SETTING.fp32_precision = "ieee"
            try:
                return real(*given, **more)
            finally:
                SETTING.fp32_precision = before

        return product

    for name in ("bmm", "baddbmm", "mm", "addmm"):
        monkeypatch.setattr(torch, name, unrounded(getattr(torch, name)))


@pytest.fixture
def by_onednn(monkeypatch, exact):
    """oneDNN for every product, however small, as without AMX, on any machine."""
    monkeypatch.setattr(processor, "AMX", False)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: dtype in (torch.float32, torch.bfloat16))
    monkeypatch.setattr(matmul, "MIN_PRODUCTS", 0)
    checked.forget()


@pytest.fixture
def seen(monkeypatch):
    """The precision set at each product, which tells the library."""
    found = []

    def watching(real):
        def watched(*given, **more):
            found.append(SETTING.fp32_precision)
            return real(*given, **more)

        return watched

    for name in ("bmm", "baddbmm", "mm", "addmm"):
        monkeypatch.setattr(torch, name, watching(getattr(torch, name)))
    return found


@pytest.mark.parametrize("into", [False, True], ids=["new", "into a tensor"])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("turned", [False, True], ids=["as it lies", "transposed"])
def test_products_of_float32_are_as_exact_by_either_library(by_onednn, seen, stack, turned, into):
    first, second, added = torch.randn(stack, 40, 320), torch.randn(stack, 320, 72), torch.randn(1, 40, 72)
    if turned:
        first, second = first.mT.contiguous().mT, second.mT.contiguous().mT
    exact = first.double() @ second.double()
    out = torch.full((stack, 40, 72), 9.0) if into else None
    found = matmul.bmm(first, second, out=out)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)
    assert out is None or found.data_ptr() == out.data_ptr()
    found = matmul.baddbmm(added, first, second, beta=-2.0, alpha=0.5)
    torch.testing.assert_close(found.double(), 0.5 * exact - 2.0 * added, rtol=0, atol=2e-4)
    found = matmul.baddbmm(added.new_full((stack, 40, 72), torch.nan), first, second, beta=0.0, alpha=3.0, out=out)
    torch.testing.assert_close(found.double(), 3.0 * exact, rtol=0, atol=6e-4)
    assert seen == ["bf16"] * 3
    assert SETTING.fp32_precision == "none"


@pytest.mark.parametrize("stack", [1, 3])
def test_factors_that_lie_apart_are_copied_row_by_row_before_onednn_gets_them(by_onednn, monkeypatch, stack):
    got = []

    def watched(first, second, out=None, real=torch.bmm if stack > 1 else torch.mm):
        got.append(second)
        return real(first, second, out=out)

    monkeypatch.setattr(torch, "bmm" if stack > 1 else "mm", watched)
    first = torch.randn(stack, 64, 64)
    layer = torch.randn(400, stack, 64).transpose(0, 1)  # as a layer holds its heads
    longer = torch.randn(stack, 400, 64)
    moving = torch.randn(400 + 64 * stack, 64).as_strided((stack, 320, 64), (64 * 64, 64, 1))
    for key in (layer[:, :320], longer[:, :320], moving):
        torch.testing.assert_close(matmul.bmm(first, key.mT), first @ key.mT, rtol=0, atol=1e-4)
        assert got.pop().mT.is_contiguous()
        torch.testing.assert_close(matmul.bmm(first.mT, key[:, :64]), first.mT @ key[:, :64], rtol=0, atol=1e-4)
        assert got.pop().is_contiguous()


def test_the_setting_of_the_process_is_put_back_after_an_error(by_onednn):
    with pytest.raises(RuntimeError, match="size"):
        matmul.bmm(torch.randn(2, 3, 4), torch.randn(2, 5, 6))
    assert SETTING.fp32_precision == "none"


def test_what_another_thread_is_in_the_middle_of_is_never_put_back(by_onednn, monkeypatch):
    class Setting:
        """Another thread begins a product as soon as this one has looked."""

        looked, put = ["bf16", "none"], []

        @property
        def fp32_precision(self):
            return self.looked.pop() if len(self.looked) > 1 else self.looked[0]

        @fp32_precision.setter
        def fp32_precision(self, value):
            self.put.append(value)

    monkeypatch.setattr(matmul, "_MATMUL", Setting())
    matmul.bmm(torch.randn(2, 8, 8), torch.randn(2, 8, 8))
    assert Setting.put == ["bf16", "none"]


@pytest.mark.parametrize("asked", ["none", "ieee", "tf32", "bf16"])
def test_whatever_precision_was_asked_of_torch_is_there_afterwards(by_onednn, seen, asked):
    SETTING.fp32_precision = asked
    try:
        matmul.bmm(torch.randn(2, 8, 8), torch.randn(2, 8, 8))
        assert seen == ["bf16"]
        assert SETTING.fp32_precision == asked
    finally:
        SETTING.fp32_precision = "none"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_left_to_torch(by_onednn, seen, dtype):
    matmul.bmm(torch.randn(2, 8, 8, dtype=dtype), torch.randn(2, 8, 8, dtype=dtype))
    assert seen == ["none"]


def test_small_products_are_left_to_torch(by_onednn, seen, monkeypatch):
    monkeypatch.setattr(matmul, "MIN_PRODUCTS", 8**3 + 1)
    matmul.bmm(torch.randn(1, 8, 8), torch.randn(1, 8, 8))
    matmul.bmm(torch.randn(2, 8, 8), torch.randn(2, 8, 8))
    assert seen == ["none", "bf16"]


def test_odd_shapes_are_left_to_torch(by_onednn, seen):
    for rows, middle, columns in ((1100, 64, 64), (64, 1100, 64), (64, 64, 1100), (1152, 64, 1024)):
        matmul.bmm(torch.randn(1, rows, middle), torch.randn(1, middle, columns))
    assert seen == ["none", "none", "none", "bf16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "given",
    [
        {}, {"mask": Causal()}, {"mask": Causal() & Window(40)}, {"bias": Alibi(4), "softcap": 9.0},
        {"mask": Causal(), "softcap": 5.0, "dropout": 0.2}, {"mask": Dense(torch.rand(300, 300) > 0.7), "sink": 0.1},
    ],
    ids=["full", "causal", "window", "by distance", "softcap and dropout", "cells and a sink"],
)  # fmt: skip
def test_attention_by_onednn_is_that_of_the_definition(by_onednn, seen, monkeypatch, given, dtype):
    monkeypatch.setattr(products, "pay", lambda *given, **more: True)
    given = {name: torch.full((4,), value) if name == "sink" else value for name, value in given.items()}
    tensors = [torch.randn(1, heads, 300, 64).to(dtype) for heads in (4, 2, 2)]
    towards = torch.randn(1, 4, 300, 64).to(dtype)

    def answers(kernel, dtype):
        learning = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        draw = torch.Generator().manual_seed(3) if "dropout" in given else None
        output = attention(*learning, kernel=kernel, generator=draw, **given)
        return output, *torch.autograd.grad(output, learning, towards.to(dtype))

    right = answers("reference", torch.float64)
    for ours, theirs in zip(answers("strips", dtype), right, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert "bf16" in seen
    given.pop("dropout", None)
    lse = attention_with_lse(*tensors, kernel="strips", **given).lse
    reference = attention_with_lse(*(t.double() for t in tensors), kernel="reference", **given).lse
    torch.testing.assert_close(lse.double(), reference, rtol=0, atol=2e-5)


def test_a_library_that_rounds_its_factors_is_not_used(monkeypatch, exact):
    for name, value in {"MKL": True, "BFLOAT16": True, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)
    monkeypatch.setattr(measured, "ratio", lambda *given: 0.1)
    real = torch.bmm

    def rounding(first, second):
        rounds = SETTING.fp32_precision == "bf16"
        return real(first.bfloat16().float(), second.bfloat16().float()) if rounds else real(first, second)

    def found(dtype):
        matmul._onednn_is_faster.cache_clear()
        return matmul._onednn_is_faster(dtype)

    try:
        assert found(torch.float32)
        assert found(torch.bfloat16)
        assert not found(torch.float16)
        monkeypatch.setattr(torch, "bmm", rounding)
        assert not found(torch.float32)
        assert not found(torch.bfloat16)
        monkeypatch.setattr(processor, "AMX", True)
        assert not found(torch.float32)
        assert found(torch.bfloat16)  # numbers that are rounded already
        monkeypatch.setattr(processor, "BFLOAT16", False)
        assert not found(torch.bfloat16)
    finally:
        matmul._onednn_is_faster.cache_clear()


def test_additive_similarity_is_not_filled_up(by_onednn):
    query, key = torch.randn(1, 4, 37, 16).bfloat16(), torch.randn(1, 2, 45, 16).bfloat16()
    found, right = (attention(query, key, key, additive=Additive(torch.ones(4, 16)), kernel=kernel)
                    for kernel in ("strips", "reference"))  # fmt: skip
    assert_close(found, right)


@pytest.mark.parametrize("more", [{"softcap": 5.0}, {"dropout": 0.2}, {"bias": "trained"}], ids=str)
def test_bfloat16_loses_nothing_where_onednn_rounds_float32(monkeypatch, more):
    def rounding(real):
        def product(*given, **more):
            rounds = SETTING.fp32_precision == "bf16" and given[-1].dtype is torch.float32
            rounded.append(rounds)
            factors = (factor.bfloat16().float() for factor in given[-2:])
            return real(*given[:-2], *factors, **more) if rounds else real(*given, **more)

        return product

    for name in ("bmm", "baddbmm", "mm", "addmm"):
        monkeypatch.setattr(torch, name, rounding(getattr(torch, name)))
    monkeypatch.setattr(processor, "AMX", True)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(matmul, "MIN_PRODUCTS", 0)
    checked.forget()
    tensors = [torch.randn(1, heads, 300, 64).bfloat16() for heads in (4, 2, 2)]
    towards, numbers = torch.randn(1, 4, 300, 64).bfloat16(), torch.randn(1, 1, 300, 300)

    def answers(dtype, kernel):
        learning = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        draw = torch.Generator().manual_seed(3) if "dropout" in more else None
        bias = numbers.clone().requires_grad_() if "bias" in more else None
        given = {"mask": Causal(), "kernel": kernel, "generator": draw, **more, "bias": bias}
        output = attention(*learning, **given)
        return output, *torch.autograd.grad(output, learning, towards.to(dtype))

    rounded, threads = [], 1
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    ours = answers(torch.bfloat16, "strips")
    assert any(rounded)
    exact, plain = answers(torch.float64, "reference"), answers(torch.bfloat16, "reference")
    for name, *three in zip(("output", "query", "key", "value"), ours, exact, plain, strict=True):
        assert_within_budget(*three, name)
    rounded.clear()
    answers(torch.float32, "strips")
    threads = 2  # whose products would be rounded meanwhile
    answers(torch.bfloat16, "strips")
    assert rounded
    assert not any(rounded)


def test_the_two_libraries_are_timed_whatever_precision_was_asked_of_torch(monkeypatch, exact, seen):
    monkeypatch.setattr(processor, "MKL", True)
    monkeypatch.setattr(measured, "ratio", lambda name, one, other: len((one(), other())))
    SETTING.fp32_precision = "bf16"
    try:
        matmul._found_to_be_faster()
        assert seen[-2:] == ["bf16", "ieee"]
        assert SETTING.fp32_precision == "bf16"
    finally:
        SETTING.fp32_precision = "none"


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Measurements are made, and kept in this file."""
    path = tmp_path / "cache" / "regard" / "measured.json"
    monkeypatch.delenv("REGARD_MEASURE")
    monkeypatch.setattr(measured, "file", lambda: path)
    return path


def test_a_ratio_is_measured_once_and_kept_for_this_processor_and_version(kept, monkeypatch):
    ran = []
    turns = {"one": lambda: ran.append("one"), "other": lambda: ran.append("other")}
    first = measured.ratio("a / b", *turns.values())
    assert ran == ["one", "other"] * (1 + measured.ROUNDS)
    assert measured.ratio("a / b", *turns.values()) == first
    assert len(ran) == 2 * (1 + measured.ROUNDS)
    machine = f"{processor.model()}, torch {torch.__version__}, regard {regard.__version__}"
    assert json.loads(kept.read_text()) == {machine: {"a / b": first}}
    assert list(kept.parent.iterdir()) == [kept]
    monkeypatch.setattr(processor, "name", lambda: "another processor")
    measured.ratio("a / b", *turns.values())
    assert len(ran) == 4 * (1 + measured.ROUNDS)
    assert len(json.loads(kept.read_text())) == 2


def test_processors_of_one_name_are_measured_one_by_one(kept, monkeypatch):
    told = {"model name": "a rented machine", "cpu family": "25"}
    monkeypatch.setattr(processor, "_told", told.get)
    for told["model"] in ("17", "2"):
        measured.ratio("a / b", lambda: None, lambda: None)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "half of its instructions")
    measured.ratio("a / b", lambda: None, lambda: None)
    assert processor.name() == "a rented machine"
    told |= {"cpu family": None, "model": None, "CPU implementer": "0x41"}  # as Linux tells of processors of Arm
    for told["CPU part"] in ("0xd0c", "0xd40"):
        measured.ratio("a / b", lambda: None, lambda: None)
    assert len(json.loads(kept.read_text())) == 5


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("", (True, True, True)), ("ALL", (True, True, True)), ("AVX2", (False, False, False)),
        ("AVX512_CORE", (False, False, False)), ("AVX512_CORE_BF16", (False, True, False)),
        ("avx512_core_fp16", (True, True, False)), ("AVX512_CORE_AMX", (True, True, True)),
    ],
)  # fmt: skip
def test_instructions_that_onednn_is_told_to_leave_out_are_not_there(told, found, monkeypatch):
    able = ("avx512_fp16", "avx512_bf16", "amx_fp16", "amx_bf16", "amx_tile")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(able, True))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", told)
    spec = importlib.util.spec_from_file_location("processor_as_told", processor.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert found == (fresh.FLOAT16, fresh.BFLOAT16, fresh.AMX)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 3}', "\udcff"], ids=repr)
def test_a_file_that_is_no_measurement_is_written_anew(kept, text):
    kept.parent.mkdir(parents=True)
    kept.write_bytes(text.encode("utf-8", "surrogateescape"))
    found = measured.ratio("a / b", lambda: None, lambda: None)
    assert found > 0
    assert next(iter(json.loads(kept.read_text()).values())) == {"a / b": found}


def test_where_nothing_can_be_written_it_is_measured_all_the_same(kept):
    kept.parent.parent.write_text("a file where the folder should be")
    assert measured.ratio("a / b", lambda: None, lambda: None) > 0


def test_measuring_can_be_turned_off(kept, monkeypatch):
    monkeypatch.setenv("REGARD_MEASURE", "0")
    assert measured.ratio("a / b", lambda: 1 / 0, lambda: 1 / 0) == 1.0
    assert not kept.exists()


def test_a_large_product_measures_and_keeps_in_the_cache_folder_and_a_small_one_does_not(tmp_path):
    program = (
        "import torch, pathlib, sys, time\nfrom regard import matmul, measured\n"
        "small = torch.randn(1, 8, 8)\nmatmul.bmm(small, small)\nassert not measured.file().exists()\n"
        "start = time.perf_counter()\nmatmul.onednn_is_faster(torch.float32)\nprint(time.perf_counter() - start)\n"
        "print(measured.file().exists() or not matmul.processor.MKL or matmul.processor.AMX)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "REGARD_MEASURE"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    seconds, there = run.stdout.split()
    assert float(seconds) < 2.0  # about 10 ms; the machine may be busy
    assert there == "True"


def test_products_are_preferred_where_onednn_is_faster(monkeypatch):
    asked = (torch.float32, 8, 256, 2048)
    assert not products.pay(*asked, causal=False, backward=False)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: True)
    monkeypatch.setattr(processor, "MKL", True)
    assert products.pay(*asked, causal=False, backward=False)


@pytest.mark.parametrize("length", [70, 131, 300, 517, 1100])
@pytest.mark.parametrize(
    "given",
    [{}, {"mask": Causal()}, {"mask": Causal(), "softcap": 9.0}, {"bias": "dense"}, {"bias": "trained"}],
    ids=str,
)
def test_lengths_of_any_kind_come_as_products_of_few_shapes(by_onednn, monkeypatch, given, length):
    monkeypatch.setattr(products, "pay", lambda *given, **more: True)
    monkeypatch.setattr(tuning, "SQUARE_QUERIES_BY_ONEDNN", range(64, 64))
    seen = set()

    def watching(real):
        def watched(*given, **more):
            first, second = given[-2:]
            if SETTING.fp32_precision == "bf16":
                seen.update((first.shape[-2], first.shape[-1], second.shape[-1]))
            return real(*given, **more)

        return watched

    for name in ("bmm", "baddbmm", "mm", "addmm"):
        monkeypatch.setattr(torch, name, watching(getattr(torch, name)))
    tensors = [torch.randn(1, heads, length, 24).requires_grad_() for heads in (4, 2, 2)]
    bias = torch.randn(4, length, length, requires_grad=given.get("bias") == "trained")
    given = {**given, "bias": bias} if "bias" in given else given
    learning = [*tensors, bias] if bias.requires_grad else tensors
    towards = torch.randn(1, 4, length, 24)
    ours = attention(*tensors, kernel="strips", **given)
    grads = torch.autograd.grad(ours, learning, towards)
    assert seen
    assert all(matmul.is_regular(size) for size in seen)
    exact = [tensor.double() for tensor in tensors]
    right = attention(*exact, kernel="reference", **given)
    torch.testing.assert_close(ours.double(), right, rtol=0, atol=1e-5)
    for mine, theirs in zip(grads, torch.autograd.grad(right, learning, towards.double()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("length", [70, 131, 197])
def test_odd_lengths_in_half_precision_are_filled_up_and_all_heads_are_one_stack(by_onednn, monkeypatch, length):
    monkeypatch.setattr(processor, "BFLOAT16", True)
    shapes, real = [], torch.baddbmm

    def watched(added, first, second, **more):
        shapes.append((*first.shape[:2], second.shape[2], SETTING.fp32_precision))
        return real(added, first, second, **more)

    monkeypatch.setattr(torch, "baddbmm", watched)
    query, key, value = torch.randn(3, 5, length, 4, 24).bfloat16().transpose(2, 3)  # as layers hold them
    monkeypatch.setattr(tuning, "MIN_SCORES_BY_ONEDNN", 1)
    ours = attention(query, key, value, kernel="strips")
    filled = matmul.regular(length)
    assert shapes == [(20, filled, filled, "bf16")]
    plain, exact = (
        attention(*(tensor.to(dtype) for tensor in (query, key, value)), kernel="reference")
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert_within_budget(ours, exact, plain, "output")


def test_only_what_a_layer_holds_token_by_token_is_copied_to_form_one_stack(by_onednn, monkeypatch):
    monkeypatch.setattr(processor, "BFLOAT16", True)
    held = torch.zeros(2, 5, 8, 8).bfloat16()[:, :, ::2]
    for tensor, copied in ((held, False), (held.transpose(1, 2), True), (held[:1].transpose(1, 2), False)):
        (query,), (key,) = products._one_stack([tensor], [tensor])
        assert (query is tensor, key is tensor) == (not copied, not copied)
        assert not copied or query.is_contiguous()


@pytest.mark.usefixtures("torch_is_faster")
def test_a_table_in_half_precision_takes_products_where_these_are_faster(by_onednn, monkeypatch):
    monkeypatch.setattr(processor, "BFLOAT16", True)
    monkeypatch.setattr(processor, "MKL", True)
    tensors = torch.randn(3, 2, 4, 512, 24).bfloat16()
    assert plan(*tensors, bias=torch.randn(1, 4, 512, 512).bfloat16()).kernel == "strips"


@pytest.mark.parametrize("known", [False, True], ids=["lse unknown", "lse known"])
@pytest.mark.parametrize("mask", [Causal(), Causal() & (Window(60) | Prefix(4)), Document.from_lengths([500, 548])])
def test_statistics_are_computed_by_products_of_few_shapes(by_onednn, seen, monkeypatch, known, mask):
    query, key = torch.randn(1, 4, 1048, 16), torch.randn(1, 2, 1048, 16)
    dense = observe(query.double(), key.double(), mask=mask)
    weights, expected = dense.weights(), dense.entropy()
    lse = attention_with_lse(query, key, key, mask=mask).lse if known else None
    seen.clear()
    entropies, received, top = observe(query, key, mask=mask, lse=lse).gather(Entropy(), Received(), Top(8))
    assert seen.count("none") <= len(seen) // 2, seen  # the last 24 queries and keys
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(received.double(), weights.sum(-2), rtol=0, atol=1e-4)
    torch.testing.assert_close(top.weights.double(), weights.topk(8).values, rtol=0, atol=1e-5)

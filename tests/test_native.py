"""The compiled library: that it is there where it can be, that it is left where it is not, and what only it decides.

That it computes what the reference does is said by the ladder of test_kernels.py, which it climbs as every kernel.
"""

import ctypes
import importlib.util
import math
import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from cases import needs_library
from comparing import assert_close, assert_within_budget
from regard import (
    Alibi,
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    Padding,
    Prefix,
    RelativeBias,
    Strided,
    Where,
    Window,
    attention,
    attention_with_lse,
    measured,
    processor,
)
from regard.biases import Given, as_bias
from regard.checked import forget
from regard.dropout import Dropout
from regard.kernels import KERNELS, KernelError, choose, fused
from regard.kernels.strips import binding, dealing, intervals, native, work
from regard.kernels.strips.binding import AT, PRODUCTS
from regard.kernels.strips.order import Order, form_of, library_for
from regard.reference import reference
from regard.shapes import Grid
from regard.validation import check_call

pytestmark = pytest.mark.usefixtures("sorts_few")

ROOT = Path(__file__).parent.parent
IS_OFF = os.environ.get("REGARD_NATIVE") == "0"


def run(program: str, **environment: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build():
    """hatch_build.py, as a module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = build().INSTRUCTIONS.get((sys.platform, platform.machine()), {})
BUILDS = bool(HERE) and shutil.which("cc") is not None


def checked(
    mask=None, bias=None, shape=(1, 2, 70, 8), kv_heads=2, dtype=torch.float32, softcap=None, sink=None, **more
):
    batch, _, length, size = shape
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(shape, generator=draw).to(dtype)
    key, value = torch.randn(2, batch, kv_heads, length, size, generator=draw).to(dtype)
    return check_call("attention", query, key, value, mask, bias, None, softcap, sink, None, **more)


class OfEveryScore(regard.Bias):
    """A bias that learns and is neither a tensor nor by distance."""

    def __init__(self):
        self.slope = torch.ones(1).requires_grad_()

    def rule(self, batch, head, query, key):
        return self.slope * (query + key)


# --- where it is, and where it is not ---------------------------------------------------------------------------------


@pytest.mark.skipif(IS_OFF or not BUILDS, reason="no cc, or not for this system")
def test_it_is_compiled_where_there_is_a_compiler():
    assert binding.compiled() is not None
    assert binding.compiled(torch.float64).lanes * 2 == binding.compiled().lanes


def test_without_it_the_same_is_computed_by_torchs_operators():
    program = """
import torch, regard
from regard import Causal, Window
query, key, value = torch.randn(3, 1, 8, 900, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
output = regard.attention(query, key, value, mask=Causal() & Window(50))
output.sum().backward()
print(regard.plan(query, key, value, mask=Causal() & Window(50)).kernel, float(output.detach().square().sum()))
try:
    regard.attention(query, key, value, kernel="native")
except regard.KernelError as error:
    print(error)
"""
    off = run(program, REGARD_NATIVE="0").splitlines()
    assert off[0].split()[0] == "strips"
    assert "turned off by REGARD_NATIVE=0" in off[1]
    assert "kernels that do: " in off[2]
    kernel, found = run(program).splitlines()[0].split()
    assert kernel == ("native" if binding.compiled() is not None else "strips")
    assert math.isclose(float(found), float(off[0].split()[1]), rel_tol=1e-5)


def test_without_it_every_row_of_the_benchmark_is_what_the_reference_computes():
    program = """
import sys
sys.path.append("benchmarks")
import torch, regard, features
draw = torch.Generator().manual_seed(0)
for row in features.ROWS:
    length = row.tokens or 320
    sizes = (row.heads, row.queries or length, row.head_dim), (row.kv_heads, length, row.head_dim)
    tensors = [torch.randn(row.batch, *size, generator=draw) for size in (*sizes, (*sizes[1][:2], row.value_dim))]
    given = row.make(length) | {"dropout": 0.0}
    found, exact = (regard.attention(*tensors, **given, kernel=name) for name in ("auto", "reference"))
    print(float((found - exact).abs().max()), row.name)
"""
    worst = max((float(line.split()[0]), line) for line in run(program, REGARD_NATIVE="0").splitlines())
    assert worst[0] < 2e-5, worst[1]


def test_without_it_strips_of_data_are_cut_only_where_that_pays():
    program = """
import torch, regard
for batch, length in (32, 128), (1, 128), (1, 1024):
    ids = torch.arange(length).expand(batch, -1) % 8
    tensors = torch.zeros(3, batch, 8, length, 64)
    masks = regard.Document(ids), regard.Causal() & regard.Document(ids.sort(1).values)
    print(*(regard.plan(*tensors, mask=mask).kernel for mask in masks))
"""
    printed = run(program, REGARD_NATIVE="0", REGARD_MEASURE="0")
    assert printed.splitlines() == ["sdpa strips", "sdpa strips", "strips strips"]


def test_a_library_of_another_version_is_left_alone(monkeypatch, tmp_path):
    class Longer(binding.CallOf):
        _fields_ = (("more", ctypes.c_int64),)

    monkeypatch.setattr(binding, "STRUCTURES", (Longer, *binding.STRUCTURES[1:]))
    assert binding.compiled.__wrapped__() is None
    monkeypatch.setattr(binding, "__file__", str(tmp_path / "binding.py"))
    assert binding.compiled.__wrapped__() is None


def test_without_a_compiler_the_installation_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    source = tmp_path / build().SOURCE
    source.parent.mkdir(parents=True)
    source.write_text("int main(void) { return no_such_name; }")
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "no-such-compiler" in build().compile_all(tmp_path)
    monkeypatch.delenv("CC")
    why = build().compile_all(tmp_path)
    assert why is not None
    assert [path.name for path in source.parent.iterdir()] == ["attention.c"]
    if BUILDS:
        assert "failed" in why


COMPILER = """#!/bin/sh
echo "$@" >> $0.asked
while [ $# -gt 1 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""


@pytest.mark.parametrize(
    ("system", "machine", "python", "wheel", "flags"),
    [
        ("darwin", "arm64", "macosx-10.9-universal2", "macosx_11_0_arm64", "-arch arm64 -mmacosx-version-min=11.0"),
        ("linux", "aarch64", "linux-aarch64", "linux_aarch64", "-march=armv8"),
    ],
)
def test_on_other_systems_the_flags_and_the_wheel_are_theirs(
    system, machine, python, wheel, flags, tmp_path, monkeypatch
):
    module, compiler = build(), tmp_path / "cc"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    folder = (tmp_path / module.SOURCE).parent
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(module.sysconfig, "get_platform", lambda: python)
    monkeypatch.setenv("CC", str(compiler))
    assert module.compile_all(tmp_path) is None
    asked = (tmp_path / "cc.asked").read_text().splitlines()
    assert len(asked) == 4
    assert all(f" {flags}" in line for line in asked)
    assert module._platform() == wheel
    for has_bfloat16 in (False, True):
        monkeypatch.setattr(processor, "ARM_BFLOAT16", has_bfloat16)
        for dtype in ("float32", "float64"):
            assert (folder / f"attention-{binding._instructions()}-{dtype}.so.1").exists()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert f"not for {system} on riscv64" in module.compile_all(tmp_path)


@pytest.mark.skipif(not BUILDS, reason="no cc")
def test_threads_are_those_of_the_runtime_beside_torch(tmp_path, monkeypatch):
    folder = tmp_path / "torch"
    (folder / "lib").mkdir(parents=True)
    source = tmp_path / "omp.c"
    source.write_text("void GOMP_parallel(void) {} int omp_get_thread_num(void) { return 41; }")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(folder / "lib" / "libomp.dylib")], check=True)
    monkeypatch.setattr(torch, "__file__", str(folder / "__init__.py"))
    _, number = binding._functions_of_threads()
    assert ctypes.CFUNCTYPE(ctypes.c_int)(number.value)() == 41


SAME = """
import sys; sys.path.insert(0, "tests")
import torch, regard
from comparing import assert_close, assert_within_budget
from regard import Alibi, Causal, Dense, Document, Padding, RelativeBias, Strided, Window
draw = torch.Generator().manual_seed(0)
table = torch.randn(32, 4, generator=draw)
cases = (
    {"mask": Causal() & Window(40)}, {"bias": Alibi(4), "softcap": 3.0}, {"sink": torch.ones(4)},
    {"mask": Dense(torch.rand(150, 150, generator=draw) < 0.5), "bias": RelativeBias(table.clone().requires_grad_())},
    {"mask": Document(torch.arange(150) * 7 % 150 // 40), "bias": torch.randn(1, 4, 150, 150, generator=draw)},
    {"mask": Padding(torch.tensor([90])), "dropout": 0.2}, {"mask": Causal() & Strided(3)},
)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for queries in (150, 5, 1):
        inputs = [torch.randn(1, h, n, 20, generator=draw).to(dtype) for h, n in ((4, queries), (2, 150), (2, 150))]
        grad = torch.randn(1, 4, queries, 20, generator=draw)
        for parts in cases if queries == 150 else cases[1:3]:
            found = []
            for wide, kernel in ((True, "reference"), (False, "reference"), (False, "native")):
                three = [(t.double() if wide else t).detach().requires_grad_() for t in inputs]
                given = {"kernel": kernel, "generator": torch.Generator().manual_seed(0), **parts}
                output = regard.attention(*three, **given)
                found.append((output, *torch.autograd.grad(output, three, grad.to(output.dtype))))
            for of, (exact, plain, actual) in enumerate(zip(*found, strict=True)):
                if dtype == torch.float64:
                    assert_close(actual, exact)
                elif dtype == torch.float32 and of > 0:  # of gradients, lse is rounded once more
                    assert_close(actual, exact.float(), tolerance=2e-6)
                else:
                    assert_within_budget(actual, exact, plain)
from regard.kernels.strips.binding import compiled
print(compiled().lanes)
"""


@needs_library
@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="it runs with AVX2 anyway")
def test_with_avx2_alone_it_computes_the_same():
    assert run(SAME, ATEN_CPU_CAPABILITY="avx2").strip() == "8"


@pytest.mark.skipif(IS_OFF or not BUILDS or platform.machine() != "x86_64", reason="it is compiled for x86-64")
def test_with_vectors_of_16_bytes_as_arm_has_them_it_computes_the_same(tmp_path):
    """What has no instructions named for it in vectors.h is compiled as for Arm, of which few have a machine."""
    source, folder = ROOT / build().SOURCE, tmp_path / "c"
    folder.mkdir()
    for dtype in build().DTYPES:
        path = folder / f"attention-x86-64-v2-{dtype}.so.1"
        flags = *build().FLAGS, "-O1", "-march=x86-64-v2", "-DBY_LANE=1", f"-D{dtype.upper()}", "-lm", "-lpthread"
        subprocess.run(["cc", str(source), "-o", str(path), *flags], check=True)
    instead = f"""
from regard.kernels.strips import binding
binding._instructions, binding.__file__ = lambda: "x86-64-v2", {str(tmp_path / "binding.py")!r}
"""
    assert run(instead + SAME).strip() == "4"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "parts",
    [
        {}, {"mask": Causal()}, {"mask": Padding([33, 20])}, {"mask": Document(torch.arange(33)[None] % 3)},
        {"bias": Alibi(4)}, {"sink": torch.linspace(-1, 1, 4)}, {"mask": Causal() & Strided(4)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("learns", [True, False])
def test_each_call_with_dropout_like_the_one_before_drops_its_own_weights(parts, dtype, learns):
    grad = torch.randn(2, 4, 33, 16).to(dtype)

    def answers(kernel, seed, by_token):
        torch.manual_seed(seed)
        shapes = (2, 4, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16)
        given = [torch.randn(shape).to(dtype) for shape in shapes]
        if by_token:
            given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
        given = [x.requires_grad_(learns) for x in given]
        output = attention(*given, **parts, dropout=0.3, kernel=kernel)
        return output, *(torch.autograd.grad(output, given, grad) if learns else ())

    for seed, by_token in ((0, False), (1, False), (2, True), (3, True), (1, False)):
        for n, (one, right) in enumerate(
            zip(answers("native", seed, by_token), answers("reference", seed, by_token), strict=True)
        ):
            assert_close(one, right, f"{n} of call {seed}")


# --- which calls it takes ---------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("parts", "kernel"),
    [
        ({"mask": Causal() & Window(50), "shape": (1, 8, 600, 64), "kv_heads": 8}, "native"),
        ({"bias": Alibi(8), "mask": Causal(), "shape": (1, 8, 600, 64), "kv_heads": 8}, "native"),
        ({"mask": Causal(), "shape": (1, 8, 600, 64), "kv_heads": 2}, "native"),
        ({"dropout": 0.1}, "native"),
        ({"wants_lse": True}, "native"),
        ({"shape": (1, 2, 8, 16)}, "sdpa"),  # torch's own function begins sooner
        ({"shape": (1, 8, 600, 64), "kv_heads": 8}, "sdpa"),  # nothing to leave out, and no price measured
    ],
    ids=str,
)
def test_it_takes_calls_in_which_others_would_compute_more(parts, kernel):
    assert choose(checked(**parts)).name == kernel


@needs_library
def test_what_it_costs_beside_torchs_operator_is_measured(monkeypatch):
    call = checked(shape=(1, 8, 600, 64), kv_heads=8)
    monkeypatch.setattr(native, "price", lambda *of: 0.8)
    assert choose(call).name == "native"
    monkeypatch.setattr(native, "price", lambda *of: 1.2)
    assert choose(call).name == "sdpa"
    monkeypatch.setattr(native, "price", lambda *of: 0.5)
    small = checked(Causal(), shape=(1, 2, 8, 16))
    assert choose(small).name == "native"
    one, other = native._two_ways(torch.float32, learns=False)
    assert_close(one(), other())
    one, other = native._two_ways(torch.float32, learns=True)
    for mine, theirs in zip(one(), other(), strict=False):
        assert_close(mine, theirs)


OLDEST = {"gcc": 12, "clang": 15}
ON_ARM = "aarch64-linux-gnu-gcc"


@pytest.mark.skipif(IS_OFF or not BUILDS, reason="no cc, or not for this system")
@pytest.mark.parametrize("compiler", ["gcc", "clang", "clang-15", "clang-16", "clang-19", ON_ARM])
def test_other_compilers_compile_it_without_a_warning(compiler, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    if int(version.split(".")[0]) < OLDEST["clang" if "clang" in compiler else "gcc"]:
        pytest.skip(f"{compiler} is {version.strip()}, which does not know _Float16")
    variants = build().INSTRUCTIONS["linux", "aarch64"] if compiler == ON_ARM else HERE
    for instructions in variants.values():
        for dtype in build().DTYPES:
            flags = *build().FLAGS, *instructions, "-O1", "-Wall", "-Wextra", "-Werror", f"-D{dtype.upper()}"
            command = [
                compiler,
                *flags,
                str(ROOT / build().SOURCE),
                "-o",
                str(tmp_path / "library"),
                "-lm",
                "-lpthread",
            ]
            subprocess.run(command, check=True)


@needs_library
def test_bfloat16_numbers_are_multiplied_by_what_is_measured_to_be_fastest(monkeypatch):
    library = library_for(torch.bfloat16)
    there, asked = library.products, []

    def said(name, one, other):
        asked.append(name)
        for way in (one, other) if there == "pairs" else ():  # tiles may have to be emulated
            way()
        return times[name.split(" ")[0]] / times[name.split(" ")[2]]

    monkeypatch.setattr(measured, "ratio", said)
    try:
        for order in (["tiles", "pairs", "plain"], ["pairs", "plain", "tiles"], ["plain", "pairs", "tiles"]):
            times = {kind: 1 + order.index(kind) for kind in order}
            library.set_products(there)
            native.settle_products.__wrapped__()
            kinds = PRODUCTS[: PRODUCTS.index(there) + 1]
            assert library.products == min(reversed(kinds), key=times.get)
            assert len(asked) == len(kinds) - 1
            asked.clear()
    finally:
        library.set_products(there)


@needs_library
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"shape": (1, 2, 0, 8)}, "nothing to compute"),
        ({"bias": OfEveryScore()}, "a function of every score"),
    ],
)
def test_it_says_what_it_does_not_support(parts, why):
    call = checked(**parts)
    kernel = next(kernel for kernel in KERNELS if kernel.name == "native")
    assert why in kernel.cannot(call)
    with pytest.raises(KernelError, match=why):
        choose(call, "native")


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_torchs_operator_is_faster_only_more_work_of_it_decides(dtype, monkeypatch):
    """As on a processor whose matrix instructions the library does not use."""
    if dtype is torch.bfloat16 and not processor.BFLOAT16:
        pytest.skip(f"no instructions for {dtype}: torch's operator is not taken")

    def kernel(price, **parts):
        monkeypatch.setattr(native, "price", lambda *of, **by: price)
        return choose(checked(shape=(1, 8, 1200, 64), kv_heads=8, dtype=dtype, **parts)).name

    assert kernel(1.5, mask=Causal()) == "sdpa"
    # by torch's operator, which tells lse; of those a score takes longer
    assert kernel(2.5, mask=Causal(), sink=torch.zeros(8)) == "strips"
    assert kernel(1.2, mask=Causal(), sink=torch.zeros(8)) == "native"
    assert kernel(1.1, mask=Causal() & Window(40)) == "native"
    # a call takes as long as more scores where these take less time
    assert kernel(4.0 * fused.speed(dtype), mask=Causal() & Window(40)) == "strips"
    assert kernel(1.5, mask=Dense(torch.rand(1200, 1200) < 0.5)) != "native"
    assert kernel(3.0, mask=Causal(), softcap=20.0) == "native"  # which torch's operator has not


@needs_library
def test_the_library_adds_what_torchs_operators_would_write_into_a_table_in_every_call(monkeypatch):
    cells, draw = Dense(torch.rand(1100, 1100) < 0.5), torch.randn(1, 2, 1100, 1100)
    biases = draw, draw[:, :, :1], Alibi(2), RelativeBias(torch.randn(32, 2))

    def kernels(price, mask, biases):
        monkeypatch.setattr(native, "price", lambda *of, **by: price)
        return {choose(checked(shape=(1, 2, 1100, 256), kv_heads=2, mask=mask, bias=bias)).name for bias in biases}

    assert kernels(1.2, cells, biases) == kernels(1.2, None, biases[2:]) == {"native"}
    assert kernels(1.2, None, biases[:2]) <= {"sdpa", "strips"}  # which are read as they are
    assert kernels(1.6, cells, biases) == {"strips"}


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_that_is_read_from_memory_has_a_price_of_its_own(dtype, monkeypatch):
    """As on a processor where torch's operator multiplies faster than numbers are read."""
    if dtype is torch.bfloat16 and not processor.BFLOAT16:
        pytest.skip(f"no instructions for {dtype}: torch's operator is not taken")
    monkeypatch.setattr(native, "price", lambda dtype, learns, table, of_head, **by: 1.3 if table else 0.7)

    def kernel(bias, **parts):
        return choose(checked(shape=(1, 8, 1200, 64), kv_heads=8, dtype=dtype, bias=bias, **parts)).name

    table = torch.zeros(1, 8, 1200, 1200, dtype=dtype)
    assert kernel(None) == kernel(table[:, :, :1]) == kernel(table[..., :1]) == kernel(Alibi(8)) == "native"
    assert kernel(table) == kernel(table[:, :1]) == "sdpa"
    assert kernel(table, mask=Causal() & Window(40)) == kernel(table, softcap=20.0) == "native"
    one, other = native._two_ways(dtype, learns=False, here=True, there=True)
    plain, _ = native._two_ways(dtype, learns=False)
    assert_close(one(), other())
    assert (one() - plain()).abs().max() > 0.1


@needs_library
def test_large_heads_have_a_price_of_their_own(monkeypatch):
    """As on a processor where torch's operator multiplies large matrices faster."""
    prices = {64: 0.8, 128: 0.95, 256: 1.05, 512: 1.3}
    monkeypatch.setattr(native, "price", lambda dtype, learns, table, of_head, **by: prices[of_head])

    def kernel(size, length=1200, **parts):
        return choose(checked(shape=(1, 2, length, size), kv_heads=2, **parts)).name

    assert [kernel(size) for size in (8, 64, 96, 97, 128, 192)] == ["native"] * 6
    assert [kernel(size) for size in (193, 256, 512, 1000)] == ["sdpa"] * 4
    assert kernel(500, length=190) == kernel(256, length=190) == "native"  # of which torch's takes few at a time
    assert kernel(500, length=200) == kernel(256, length=768) == "sdpa" != kernel(256, length=767)
    call = checked(shape=(1, 2, 800, 200), kv_heads=2)
    assert native.head_size(call._replace(value=call.value[..., :100])) == 128
    assert kernel(512, mask=Causal() & Window(100)) == kernel(256, mask=Causal(), softcap=20.0) == "native"
    for size in native.HEAD_SIZES:
        one, other = native._two_ways(torch.float32, learns=True, of_head=size)
        for mine, theirs in zip(one(), other(), strict=False):
            assert_close(mine, theirs)


@needs_library
def test_the_largest_heads_are_multiplied_whole_while_their_scores_are_few(monkeypatch):
    monkeypatch.setattr(native, "price", lambda *of, **by: 1.1)

    def kernel(size=512, length=500, **parts):
        return choose(checked(shape=(1, 2, length, size), kv_heads=2, **parts)).name

    assert kernel() == kernel(900) == kernel(512, 512) == kernel(512, 130) == "direct"
    assert "direct" not in {kernel(511), kernel(512, 513), kernel(512, 120), kernel(dtype=torch.bfloat16)}
    assert "direct" not in {kernel(mask=Causal()), kernel(softcap=20.0), kernel(sink=torch.zeros(2))}
    query, key, value, *_ = checked(shape=(1, 8, 4500, 512), kv_heads=8)
    for rows in (1, 5, 50):
        few = check_call("attention", query[:, :, :rows], key, value, None, None, None, None, None, None)
        assert choose(few).name != "direct"


@needs_library
def test_weights_of_large_heads_are_kept_for_their_gradients_while_they_are_few():
    def kernel(size=256, length=600, dtype=torch.float32, learns=True, **parts):
        call = checked(shape=(1, 2, length, size), kv_heads=2, dtype=dtype, **parts)
        three = [tensor.detach().requires_grad_(learns) for tensor in call[:3]]
        return choose(call._replace(query=three[0], key=three[1], value=three[2])).name

    assert kernel() == kernel(512) == kernel(256, 1024) == kernel(512, 200) == kernel(256, 191) == "direct"
    cells = torch.rand(600, 600, generator=torch.Generator().manual_seed(0)) < 0.5
    assert kernel(bias=torch.zeros(600, 600)) == kernel(mask=Dense(cells)) == "direct"
    learning = [torch.zeros(1, 2, 600, 256).requires_grad_() for _ in range(3)]
    assert "large heads" in regard.plan(*learning).why
    assert kernel(256, 150) == kernel(512, 100) == kernel(512, 60) == "direct"  # torch's operators, which begin soon
    for size, length in ((256, 150), (512, 100)):
        assert kernel(size, length, bias=torch.zeros(length, length)) != "direct"
    assert kernel(512, 1400) == kernel(1024, 1448) == "direct" != kernel(1024, 1449)  # up to 2^22 weights
    assert "direct" not in {kernel(255), kernel(256, 1025), kernel(256, 90), kernel(512, 40), kernel(512, 2048)}
    assert "direct" not in {kernel(512, 2049), kernel(1024, 2900)}
    assert "direct" not in {
        kernel(learns=False),
        kernel(dtype=torch.bfloat16),
        kernel(mask=Causal()),
        kernel(softcap=9.0),
    }
    assert kernel(bias=torch.zeros(600, 600).requires_grad_()) != "direct"


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_of_many_keys_take_torchs_operator_longer(dtype, monkeypatch):
    monkeypatch.setattr(native, "price", lambda *of, **by: 0.9)

    def kernel(queries, learns):
        shapes = (4, 2, queries, 64), (4, 2, 1024, 64), (4, 2, 1024, 64)
        three = [torch.zeros(shape, dtype=dtype).requires_grad_(learns) for shape in shapes]
        return choose(check_call("attention", *three, *[None] * 6)).name

    assert [kernel(queries, True) for queries in (5, 9, 17, 33)] == ["native"] * 4
    copies = "native" if dtype is torch.bfloat16 else "sdpa"  # torch's operator those of half precision, as wider ones
    assert [kernel(queries, False) for queries in (5, 9)] == ["native", copies]
    assert dtype is torch.bfloat16 or kernel(17, False) == "native"


@needs_library
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("mask", [None, Causal()])
def test_texts_of_odd_lengths_take_torchs_operator_no_less_than_longer_ones(mask, learns, monkeypatch):
    """Of 9 to 24 tokens it took 2 to 7 times as long as the library, and was chosen: for the latter, rows were counted
    in full, and for the former, as they are."""
    monkeypatch.setattr(native, "price", lambda *of, **by: 0.9)

    def kernel(length):
        three = [torch.zeros(4, 4, length, 64).requires_grad_(learns) for _ in range(3)]
        return choose(check_call("attention", *three, mask, *[None] * 5)).name

    chosen = {length: kernel(length) for length in range(9, 200)}
    assert {length for length, name in chosen.items() if name != "native"} == set()
    monkeypatch.setattr(native, "price", lambda *of, **by: 1.1)
    assert mask is not None or {kernel(length) for length in (16, 32, 64, 96)} == {"sdpa"}


@needs_library
def test_strips_of_torchs_operator_take_longer_for_a_score_than_that_for_all(monkeypatch):
    """Of heads of 512 numbers, where a score by the library takes a little longer than by torch's operator."""

    def kernel(price, mask):
        monkeypatch.setattr(native, "price", lambda *of, **by: price)
        return choose(checked(shape=(1, 4, 1024, 512), kv_heads=4, mask=mask)).name

    apart = Document(torch.arange(1024)[None] * 7 % 1024 // 205)
    function = Where(lambda batch, head, query, key: (key <= query) & ((query - key) % 3 != 1))
    assert [kernel(1.2, apart), kernel(1.2, function)] == ["native", "native"]
    assert "native" not in {kernel(2.0, apart), kernel(2.0, function)}


@needs_library
def test_a_table_that_torchs_operator_alone_reads_is_part_of_its_price(monkeypatch):
    """As on a processor where a score by the library costs a little more, and less than to read a number, too."""
    monkeypatch.setattr(native, "price", lambda *of, by_table=False: 0.9 if by_table else 1.05)

    def kernel(length=1200, **parts):
        return choose(checked(shape=(1, 8, length, 64), kv_heads=8, **parts)).name

    cells = torch.rand(1200, 1200) < 0.9
    assert kernel() == "sdpa"
    assert kernel(bias=Alibi(8)) == kernel(mask=Dense(cells)) == "native"
    # a table that is given takes both as long, but the outputs of torch's are looked at, which shows in short calls
    assert kernel(bias=torch.zeros(1, 8, 1200, 1200)) == "sdpa"
    assert kernel(128, bias=torch.zeros(1, 8, 128, 128)) == "native"
    (of_ours, by_torch), plain = native._two_ways(torch.float32, learns=False, there=True), native._two_ways
    assert_close(of_ours(), plain(torch.float32, learns=False)[0]())
    assert (by_torch() - of_ours()).abs().max() > 0.1


# --- what only it decides ---------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_of_few_heads_are_added_up_by_several_threads_to_the_same(heads):
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 1, heads, 200, 24, generator=draw)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4, 4):
            torch.set_num_threads(threads)
            three = [part.clone().requires_grad_() for part in inputs]
            output = attention(*three, mask=Causal(), bias=Alibi(heads), kernel="native")
            found.append(torch.autograd.grad(output.square().sum(), three))
    finally:
        torch.set_num_threads(before)
    for grads in found[1:]:
        for grad, alone in zip(grads, found[0], strict=True):
            assert_close(grad, alone)
    assert all(torch.equal(*pair) for pair in zip(found[2], found[3], strict=True))  # in a fixed order


@needs_library
def test_many_threads_add_up_gradients_of_a_long_head_in_limited_memory(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    three = [part.requires_grad_() for part in torch.randn(3, 1, 1, 600, 24, generator=draw)]
    dealt, deal = [], Order.deal
    monkeypatch.setattr(
        Order, "deal", lambda order, *given, **more: (dealt.append(given[0]), deal(order, *given, **more))
    )
    before, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(4)
        for most in (dealing.MAX_SUMS, 3 * 2 * 600 * 24, 1):
            monkeypatch.setattr(dealing, "MAX_SUMS", most)
            forget()
            output = attention(*three, mask=Causal(), kernel="native")
            found.append(torch.autograd.grad(output.square().sum(), three))
    finally:
        torch.set_num_threads(before)
    assert dealt == [4, 3, 1]
    for grads in found[1:]:
        for grad, of_all in zip(grads, found[0], strict=True):
            assert_close(grad, of_all)


@needs_library
@pytest.mark.parametrize("mask", [None, Causal()], ids=["full", "causal"])
def test_gradients_of_keys_that_many_queries_see_are_sums_as_exact_as_any(mask):
    """Of numbers of one sign, whose sum is large beside each: added to it one by one, all would be rounded."""
    draw, found = torch.Generator().manual_seed(5), []
    inputs = torch.randn(3, 1, 2, 1500, 32, generator=draw)
    for dtype, kernel in ((torch.float32, "native"), (torch.float64, "reference"), (torch.float32, "reference")):
        three = inputs.to(dtype).requires_grad_().unbind()
        output = attention(*three, mask=mask, kernel=kernel)
        found.append((output, *torch.autograd.grad(output.sum(), three)))
    for what, actual, exact, plain in zip(("output", "query", "key", "value"), *found, strict=True):
        assert_within_budget(actual, exact, plain, what)


@needs_library
@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 3, 5, 8, 9, 17, 31, 34, 40, 200]),
    st.integers(2000, 6000),
    st.sampled_from([24, 64]),
    st.booleans(),
)
def test_of_few_queries_and_many_keys_outputs_and_gradients_are_as_exact_as_any(queries, keys, size, causal):
    """Of few queries, gradients of keys and values are sums too short for the errors of lse to cancel out. All errors
    count together: of a few thousand sums, the largest error of the plain computation is at times a small one."""
    draw, found = torch.Generator().manual_seed(keys), []
    inputs = [torch.randn(1, 4, length, size, generator=draw) for length in (queries, keys, keys, queries)]
    for dtype, kernel in ((torch.float32, "native"), (torch.float64, "reference"), (torch.float32, "reference")):
        *three, grad = (tensor.to(dtype) for tensor in inputs)
        leaves = [tensor.requires_grad_() for tensor in three]
        output = attention(*leaves, mask=Causal() if causal else None, kernel=kernel)
        found.append((output, *torch.autograd.grad(output, leaves, grad)))
    for what, actual, exact, plain in zip(("output", "query", "key", "value"), *found, strict=True):
        error, of_plain = ((some - exact).norm().item() for some in (actual, plain))
        assert error <= 2 * of_plain + torch.finfo(torch.float32).eps * exact.norm().item(), what


@needs_library
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float32, 22), (torch.float64, 16)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "with numbers in common"])
@pytest.mark.parametrize("mask", [Dense((torch.arange(90) % 9 != 4).expand(90, -1)), Causal() & Window(30)], ids=str)
def test_sums_of_a_thread_are_those_of_the_whole_call(monkeypatch, dtype, size, shared, mask):
    draw, found, sums = torch.Generator().manual_seed(0), [], []
    inputs = [torch.randn(3, heads, 90, size, generator=draw).to(dtype) for heads in (8, 4, 4, 8)]
    if type(mask) is Dense:
        inputs[2][:, :, 4::9] = math.nan  # so that it is computed twice
    bias = torch.randn(1, 1, 90, 90, generator=draw).to(torch.promote_types(dtype, torch.float32))
    tell = Order.sums
    monkeypatch.setattr(Order, "sums", lambda *given: (sums.append(1), tell(*given))[1])
    for most in (dealing.MAX_SUMS_OF_A_THREAD, 0):
        monkeypatch.setattr(dealing, "MAX_SUMS_OF_A_THREAD", most)
        monkeypatch.setattr(dealing, "MAX_SUMS_OF_THREADS", most)
        forget()
        sums.clear()
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:3]]
        learned = [bias.clone().requires_grad_()] if shared else []
        for _ in range(3):  # of the second its strips are known, of the third all that the library is told
            output = attention(*leaves, mask=mask, bias=learned[0] if shared else None, kernel="native")
            grads = torch.autograd.grad(output, [*leaves, *learned], inputs[3])
        assert bool(sums) == (most == 0 and dtype is not torch.float64)
        found.append(grads)
    for own, whole in zip(*found, strict=True):
        assert bool(own.isfinite().all())
        assert torch.equal(own, whole)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Causal() & Window(30),
        Strided(16),
        Padding(torch.arange(300)[None] % 150 >= torch.tensor([[9], [0]])),
    ],
    ids=str,
)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(8, 8, 128, 256), (4, 2, 64, 22)])
def test_heads_side_by_side_in_each_token_give_the_same_numbers_to_the_last_bit(
    dtype, mask, heads, kv_heads, size, value_size
):
    draw = torch.Generator().manual_seed(0)
    sizes = (heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)
    by_token = [torch.randn(2, 300, *of, generator=draw).to(dtype).transpose(1, 2) for of in sizes]
    if type(mask) is Padding:  # so that it is computed twice
        by_token[2][0, :, :9] = by_token[1][0, :, 150:159] = math.nan
    found = []
    for inputs in (by_token, [tensor.contiguous() for tensor in by_token]):
        forget()
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        for _ in range(3):  # of the second its strips are known, of the third all that the library is told
            output, lse = attention_with_lse(*leaves, mask=mask, kernel="native")
            grads = torch.autograd.grad((output, lse), leaves, (inputs[3], torch.ones_like(lse)))
            found.append((output, lse, *grads))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert bool(one.isfinite().all())
            assert torch.equal(one, two)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_bias_tensors_of_later_calls_get_gradients_of_their_own(dtype, mask, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((1, 2, 70, 70), (3, 1, 70, 70), (3, 2, 1, 70), (1, 1, 70, 1)):
            forget()
            for seed in range(4):  # of the third, all that the library is told is known
                draw = torch.Generator().manual_seed(seed)
                inputs = [torch.randn(3, 2, 70, 16, generator=draw).to(dtype) for _ in range(4)]
                numbers, found = torch.randn(shape, generator=draw).to(dtype), []
                for kernel in ("native", "reference"):
                    leaves = [tensor.clone().requires_grad_() for tensor in (*inputs[:3], numbers)]
                    output = attention(*leaves[:3], mask=mask, bias=leaves[3], kernel=kernel)
                    found.append((output, *torch.autograd.grad(output, leaves, inputs[3])))
                for one, right in zip(*found, strict=True):
                    assert_close(one, right)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_a_bias_tensor_that_is_added_twice_gets_both_gradients_in_every_call():
    draw = torch.Generator().manual_seed(0)
    twice = Given(torch.randn(1, 2, 70, 70, generator=draw).requires_grad_())
    for _ in range(4):
        query, key, value, grad = torch.randn(4, 3, 2, 70, 16, generator=draw)
        outputs = [attention(query, key, value, bias=twice + twice, kernel=name) for name in ("native", "reference")]
        assert_close(*(torch.autograd.grad(output, twice.numbers, grad)[0] for output in outputs))


@needs_library
def test_learned_biases_by_distance_and_of_every_score_get_their_gradients():
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 90, 8, dtype=torch.float64, generator=draw)
    table = torch.randn(32, 3, dtype=torch.float64, generator=draw)
    dense = torch.randn(2, 3, 90, 90, dtype=torch.float64, generator=draw)
    for mask in (None, Causal() & Window(20), Causal()):
        for make, numbers in ((lambda t: RelativeBias(t), table), (lambda t: t, dense)):
            grads = []
            for kernel in ("native", "reference"):
                learned = numbers.clone().requires_grad_()
                output = attention(query, key, value, mask=mask, bias=make(learned), kernel=kernel)
                grads.append(torch.autograd.grad(output.square().sum(), learned)[0])
            assert_close(*grads)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_that_nobody_sees_changes_nothing_to_the_last_bit_forward_and_backward(dtype):
    mask = Causal() & Padding(torch.arange(70)[None] >= 9)  # the first queries see nothing
    found = []
    for poison in (0.0, math.nan, math.inf):
        call = checked(mask, dtype=dtype)
        three = [part.clone() for part in (call.query, call.key, call.value)]
        three[0][:, :, :9] = poison
        three[1][:, :, :9] = poison
        three[2][:, :, :9] = poison
        three = [part.requires_grad_() for part in three]
        output, lse = attention_with_lse(*three, mask=mask, kernel="native")
        grad = torch.ones_like(output)
        grad[:, :, :9] = poison
        found.append((output, lse, *torch.autograd.grad(output, three, grad)))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@needs_library
def test_in_half_precision_gradients_follow_from_the_output_before_it_was_rounded():
    call = checked(dtype=torch.float16, shape=(1, 2, 300, 64))
    plan, three = native.plan_of(call), call[:3]
    output, lse, kept = native.forward(*three, None, call.scoring, None, plan)
    assert kept.dtype == torch.float32
    assert torch.equal(kept.half(), output)
    output, lse, kept = native.forward(*three, None, call.scoring, None, plan, learns=False, wants_lse=False)
    assert kept is output
    assert not lse.numel()


@needs_library
def test_equal_strips_and_their_masks_are_told_once():
    call = checked(Causal() & Window(40) & ~Window(5), shape=(2, 2, 500, 8))
    plan = native.plan_of(call)
    native.forward(*call[:3], None, call.scoring, None, plan)
    ((_, told),) = plan.orders.values()
    assert sum(row[1] for row in told.strips) > 3 * len(told.strips)  # each stands for several
    assert 0 < told.numbers < 500 * 100


@needs_library
@pytest.mark.parametrize(
    "mask",
    [Causal() & Window(20), Causal() & (Window(70) | Prefix(3)), Window(9), Window(5, offset=-100), Band(300, -2)],
)
def test_of_a_band_the_ends_alone_are_told(mask):
    """No mask is made of it, but of a prefix that begins in it, and what no query of a vector sees is not computed."""
    call = checked(mask, shape=(1, 4, 700, 8))
    plan = native.plan_of(call)
    output, lse, _ = native.forward(*call[:3], None, call.scoring, None, plan)
    ((_, told),) = plan.orders.values()
    assert told.numbers <= (0 if isinstance(call.scoring.mask, Band) else 3 * 128 * 128)
    allowed = int(call.scoring.mask.allowed(range(700), range(700)).sum())
    beside = 2 * max(8, library_for(torch.float32).lanes)  # at both ends of a span, and in a prefix
    assert native.num_scores(call) <= 4 * (allowed + 700 * beside)
    exact = reference(*(t.double() for t in call[:3]), call.scoring, None)
    plain = reference(*call[:3], call.scoring, None)
    assert_within_budget(output, exact[0], plain[0])
    assert_within_budget(lse, exact[1], plain[1])


@needs_library
@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.none(), st.integers(-20, 90)), st.one_of(st.none(), st.integers(-20, 90)),
    st.one_of(st.none(), st.integers(-90, 90)), st.integers(2, 90), st.integers(1, 90), st.booleans(),
)  # fmt: skip
def test_a_band_is_one_strip_with_the_keys_that_some_query_sees(before, after, offset, rows, keys, biased):
    """It is planned in no time, however long the text, and however narrow the band."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 8, generator=draw) for n in (rows, keys, keys))
    mask, bias = Band(before, after, offset=offset), Alibi(2) if biased else None
    call = check_call("attention", query, key, value, mask, bias, None, None, None, None)
    plan = native.plan_of(call)
    (strip,) = plan.strips
    assert (len(strip.queries), strip.times) == (rows, 1)
    seen = call.scoring.mask_or_everything.allowed(range(rows), range(keys)).expand(1, 1, rows, keys)[0, 0].any(0)
    assert [*strip.spans[0]] == seen.nonzero().flatten().tolist()
    output, lse, _ = native.forward(*call[:3], None, call.scoring, None, plan)
    exact = reference(*(t.double() for t in call[:3]), call.scoring, None)
    plain = reference(*call[:3], call.scoring, None)
    assert_within_budget(output, exact[0], plain[0])
    assert_within_budget(lse, exact[1], plain[1])


def apart(batch, length):
    """A mask whose cells are at random in blocks that lie apart, as a function, so that strips are cut by looking at
    it."""
    draw = torch.Generator().manual_seed(1)
    blocks = torch.arange(length) // 64
    near = (blocks[:, None] - blocks) % 4 == 0
    cells = near & (torch.rand(batch, length, length, generator=draw) < 0.5)
    return Where(lambda batch, head, query, key: cells[batch, query, key])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("is_function", [False, True])
def test_keys_that_queries_side_by_side_do_not_see_are_not_computed(is_function, heads, dtype, monkeypatch):
    """They hold NaN, which would be seen in the results of a pass that takes no care of it."""
    query_len, key_len, calls = 64, 500, []
    draw = torch.Generator().manual_seed(1)
    cells = torch.rand(1, heads, query_len, key_len, generator=draw) < 0.5
    cells[..., 37:450] = False
    cells[:, :, 40:] &= torch.arange(key_len) < 37  # of the last queries, on one side alone
    mask = Where(lambda batch, head, query, key: cells[0, head, query, key]) if is_function else Dense(cells)
    query, key, value = (
        torch.randn(2, heads, length, 16, generator=draw).to(dtype) for length in (query_len, key_len, key_len)
    )
    for tensor in (key, value):
        tensor[:, :, 37:450] = torch.nan
    for way in ("forward", "backward"):
        real = getattr(library_for(dtype), way)
        monkeypatch.setattr(library_for(dtype), way, lambda order, real=real: calls.append(order) or real(order))
    three = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = attention(*three, mask=mask, kernel="native")
    grads = torch.autograd.grad(found.double().square().sum(), three)
    assert len(calls) == 2  # each way once
    doubles = [tensor.detach().double().nan_to_num(0.0).requires_grad_() for tensor in three]
    exact = attention(*doubles, mask=mask, kernel="reference")
    expected = torch.autograd.grad(exact.square().sum(), doubles)
    error = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for one, other in zip((found, *grads), (exact, *expected), strict=True):
        assert_close(one.double(), other, tolerance=error)


@needs_library
def test_masks_that_hold_much_are_given_in_parts(monkeypatch):
    monkeypatch.setattr(intervals, "MAX_CELLS", 0)  # of more, strips are cut
    monkeypatch.setattr(work, "MAX_KEPT_SCORES", 100)
    call, calls = checked(apart(1, 300), shape=(1, 2, 300, 8)), []
    real = binding.compiled(torch.float32).forward
    monkeypatch.setattr(
        binding.compiled(torch.float32), "forward", lambda order: calls.append(order[AT["strips"]]) or real(order)
    )
    plan = native.plan_of(call)
    output, lse, _ = native.forward(*call[:3], None, call.scoring, None, plan)
    assert len(calls) > 1
    assert not plan.orders
    exact = reference(*(t.double() for t in call[:3]), call.scoring, None)
    plain = reference(*call[:3], call.scoring, None)
    assert_within_budget(output, exact[0], plain[0])
    assert_within_budget(lse, exact[1], plain[1])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_of_a_call_that_is_given_in_parts_are_those_of_all_parts(dtype, batch, monkeypatch):
    monkeypatch.setattr(intervals, "MAX_CELLS", 0)
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, batch, 2, 300, 16, generator=draw).to(dtype)
    numbers, found, calls = torch.randn(1, 1, 300, 300, generator=draw), [], []
    real = binding.compiled(torch.float32).backward
    monkeypatch.setattr(
        binding.compiled(torch.float32), "backward", lambda order: calls.append(order[AT["goes_on"]]) or real(order)
    )
    for most in (100, work.MAX_KEPT_SCORES):
        monkeypatch.setattr(work, "MAX_KEPT_SCORES", most)
        four = [part.clone().requires_grad_() for part in (*inputs, numbers)]
        output = attention(*four[:3], mask=apart(batch, 300), bias=four[3], kernel="native")
        found.append(torch.autograd.grad(output.float().square().sum(), four))
    assert calls[0] == calls[-1] == 0
    assert sum(calls) == len(calls) - 2 > 0
    for one, other in zip(*found, strict=True):
        assert_close(one, other, tolerance=1e-5 if dtype is torch.float32 else 1e-2)


LONG = 300
"""Tokens of so many strips that equal ones are told once."""

MASKS = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(40),
    "streaming": Causal() & (Window(40) | Prefix(4)),
    "long prefix": Causal() | Prefix(130),
    "prefix and a window both ways": Window(30, 20) | Prefix(70),
    "chunks": Chunk(48) & Causal(),
    "strided": Causal() & (Strided(16) | Window(16)),
    "padding": Causal() & Padding([290, 120]),
    "documents": Causal() & Document.from_lengths([40] * 7 + [20]),
    "documents apart": Document(torch.arange(2 * LONG).view(2, LONG) * 7 % 5),
    "a function": Where(lambda batch, head, query, key: (key <= query) & ((query - key) % 3 != 1)),
    "cells": Dense(torch.rand(1, 2, LONG, LONG, generator=torch.Generator().manual_seed(7)) < 0.3),
}


@needs_library
@pytest.mark.parametrize("kind", ["ALiBi", "T5", "a tensor", "a tensor of another dtype", "both"])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_with_every_bias_over_many_strips(name, kind):
    draw = torch.Generator().manual_seed(3)
    query, grad = torch.randn(2, 2, 2, LONG, 8, generator=draw)
    key, value = torch.randn(2, 2, 1, LONG, 8, generator=draw)
    table, numbers = torch.randn(32, 2, generator=draw), torch.randn(2, 2, LONG, LONG, generator=draw)

    def found(kernel, dtype):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value, table, numbers)]
        of_distance = RelativeBias(leaves[3], bidirectional=name == "none")
        bias = {
            "ALiBi": Alibi(2),
            "T5": of_distance,
            "a tensor": leaves[4],
            "a tensor of another dtype": numbers.double() if dtype is torch.float32 else leaves[4].detach(),
            "both": of_distance + leaves[4],
        }[kind]
        output = attention(*leaves[:3], mask=MASKS[name], bias=bias, kernel=kernel)
        return output, *torch.autograd.grad(output, leaves, grad.to(dtype), allow_unused=True)

    for mine, expected in zip(found("native", torch.float32), found("reference", torch.float64), strict=True):
        assert (mine is None) == (expected is None)
        if mine is not None:
            assert_close(mine, expected.float(), tolerance=1e-5)


def sorted_call(some, dtype):
    """A call of documents whose tokens lie apart: a function of a kernel, which returns output and gradients."""
    draw = torch.Generator().manual_seed(some.randrange(1 << 30))
    batch, kv_heads, group, length = some.choice([1, 3]), some.choice([1, 2]), some.choice([1, 3]), some.choice([5, 90])
    heads, size, value_size = kv_heads * group, some.choice([8, 20, 64]), some.choice([8, 34])
    queries = some.choice([length, length, length // 2])

    def tensor(heads, length, size):
        by_token = torch.randn(batch, length, heads, size, generator=draw).to(dtype).transpose(1, 2)
        return by_token if some.random() < 0.5 else by_token.contiguous()

    ids = torch.randint(0, some.choice([2, 9]), (some.choice([1, batch]), length), generator=draw)
    if queries < length:
        mask = Document(torch.randint(0, 3, (1, queries), generator=draw), ids)
    else:
        mask = Document(ids) & some.choice([Causal(), Causal() & Window(9), Padding([length // 2] * batch)])
    biases = {
        "none": (None, None),
        "ALiBi": (Alibi(heads), None),
        "table": ((table := torch.randn(32, heads, generator=draw).double()), RelativeBias),
        "tensor": ((numbers := torch.randn(1, heads, queries, length, generator=draw).double()), as_bias),
        "tensor of rows": (numbers[..., :1], as_bias),
    }
    (kept, make), wants = biases[some.choice(list(biases))], table is not None and some.random() < 0.7
    leaves = [tensor(heads, queries, size), tensor(kv_heads, length, size), tensor(kv_heads, length, value_size)]
    leaves += [] if make is None else [kept]
    given = {"softcap": some.choice([None, 9.0]), "dropout": some.choice([0.0, 0.0, 0.4])}
    given["sink"] = some.choice([None, torch.linspace(-1, 1, heads)])

    def answers(kernel):
        mine = [leaf.to(dtype).detach().requires_grad_(n < 3 or wants) for n, leaf in enumerate(leaves)]
        bias = kept if make is None else make(mine[3])
        some_draws = torch.Generator().manual_seed(1) if given["dropout"] else None
        output, lse = attention_with_lse(*mine[:3], mask=mask, bias=bias, **given, generator=some_draws, kernel=kernel)
        grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
        learning = [leaf for leaf in mine if leaf.requires_grad]
        return output, *torch.autograd.grad((output, lse.nan_to_num(0, 0, 0)), learning, (grad, torch.ones_like(lse)))

    return answers


@needs_library
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tokens_of_documents_that_lie_apart_are_read_and_written_where_they_are(dtype):
    for seed in range(40):
        answers = sorted_call(random.Random(seed), dtype)
        for n, (one, right) in enumerate(zip(answers("native"), answers("reference"), strict=True)):
            assert_close(one, right, f"{n} of call {seed}")


@needs_library
def test_a_graph_sorts_the_tokens_of_documents_as_a_call_does():
    call = checked(Document(torch.arange(70)[None] % 5))
    assert native.plan_of(call).reordering is not None
    leaves = [tensor.requires_grad_() for tensor in call[:3]]

    def loss(query, key, value):
        return attention(query, key, value, mask=Document(torch.arange(70)[None] % 5), bias=Alibi(2), kernel="native")

    graph = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for way in (graph, loss):
        output = way(*leaves)
        assert_close(output, attention(*leaves, mask=call.scoring.mask, bias=Alibi(2), kernel="reference"))
    one, other = (torch.autograd.grad(way(*leaves).square().sum(), leaves) for way in (graph, loss))
    assert all(map(torch.equal, one, other))


@needs_library
@pytest.mark.parametrize("of_bias", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_of_any_dtype_learns(dtype, of_bias):
    query, key, value = torch.randn(3, 1, 2, 300, 8).to(dtype)
    bias = torch.randn(1, 2, 300, 300).to(of_bias).requires_grad_()
    found, expected = (
        torch.autograd.grad(attention(query, key, value, bias=bias, kernel=kernel).sum(), bias)[0]
        for kernel in ("auto", "reference")
    )
    assert_close(found, expected, tolerance=2e-2 if 2 in (dtype.itemsize, of_bias.itemsize) else 1e-5)


@needs_library
def test_biases_of_other_dtypes_in_the_same_memory_are_told_apart():
    query, key, value = torch.randn(3, 1, 2, 80, 8)
    bias = torch.randn(1, 2, 80, 80).bfloat16()
    for bias_there in (bias, bias.view(torch.float16).nan_to_num_(0.0)):
        found, expected = (
            attention(query, key, value, bias=bias_there, kernel=kernel) for kernel in ("native", "reference")
        )
        assert_close(found, expected, tolerance=1e-4)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("heads", [2, 3, 6, 8, 11, 16, 17])
def test_a_bias_whose_heads_lie_beside_one_another_is_read_number_by_number(heads, dtype):
    draw = torch.Generator().manual_seed(heads)
    query, key, value = torch.randn(3, 2, heads, 70, 8, generator=draw, dtype=torch.float64)
    for of_bias in {torch.float64: [torch.float64], torch.float32: [torch.float32, torch.bfloat16]}.get(dtype, [dtype]):
        bias = torch.randn(2, 70, 70, heads, generator=draw).to(of_bias).permute(0, 3, 1, 2)
        bias[:, :, 5, 3:60] = -math.inf
        given = {"mask": Causal() & Window(50), "bias": bias}
        three = query.to(dtype), key.to(dtype), value.to(dtype)
        found, expected = (attention(*three, **given, kernel=kernel) for kernel in ("native", "reference"))
        assert_close(found, expected)
        whole, expected = (attention(*three, bias=bias[:1], kernel=kernel) for kernel in ("native", "reference"))
        assert_close(whole, expected)


SHARED = [
    (1, 4, 150, 150), (3, 1, 150, 150), (150, 150), (1, 4, 1, 150), (3, 1, 1, 150), (1, 150), (4, 150, 1), (1, 1, 1, 1),
]  # fmt: skip
"""Shapes of biases of which several scores of [3, 4, 150, 150] have a number in common."""


@needs_library
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", ["everything", "causal", "padding", "documents, apart", "few queries"])
def test_numbers_that_scores_have_in_common_get_their_gradients_with_any_number_of_threads(name, kv_heads):
    draw = torch.Generator().manual_seed(0)
    queries = 5 if name == "few queries" else 150
    query = torch.randn(3, 4, queries, 8, dtype=torch.float64, generator=draw)
    key, value = torch.randn(2, 3, kv_heads, 150, 8, dtype=torch.float64, generator=draw)
    ids = torch.arange(150) % 3
    mask = {
        "causal": Causal(),
        "padding": Padding(torch.arange(150)[None] < torch.tensor([150, 40, 97])[:, None]),
        "documents, apart": Document(torch.stack([ids, ids.flip(0), ids.roll(7)])),
    }.get(name)
    before = torch.get_num_threads()
    for shape in SHARED:
        numbers = torch.randn(shape, dtype=torch.float64, generator=draw)
        numbers = numbers[..., :queries, :] if numbers.shape[-2] > 1 else numbers
        also = torch.randn(4, 1, 150, dtype=torch.float64, generator=draw)

        def grads(kernel, numbers=numbers, also=also):
            two = [tensor.clone().requires_grad_() for tensor in (numbers, also)]
            output = attention(query, key, value, mask=mask, bias=as_bias(two[0]) + two[1], kernel=kernel)
            return torch.autograd.grad(output.square().sum(), two)

        expected = grads("reference")
        try:
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                found = grads("native")
                for one, other in zip(found, expected, strict=True):
                    assert_close(one, other)
                assert all(map(torch.equal, found, grads("native")))  # in a fixed order
        finally:
            torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (7, 8), (8, 5), (64, 34)])
def test_bfloat16_of_any_size_is_read_wherever_it_begins(size, value_size):
    """Two features at a time where the processor multiplies them so; an odd number of them, or of places before."""
    draw = torch.Generator().manual_seed(0)

    def odd(features):
        return torch.randn(2 * 3 * 90 * features + 1, generator=draw).bfloat16()[1:].view(2, 90, 3, features)

    three = [odd(features).transpose(1, 2) for features in (size, size, value_size)]
    grad = odd(value_size).transpose(1, 2)
    found = []
    for dtype, kernel in ((torch.bfloat16, "native"), (torch.float64, "reference"), (torch.bfloat16, "reference")):
        leaves = [part.to(dtype).detach().requires_grad_() for part in three]
        output = attention(*leaves, mask=Causal(), softcap=20.0, kernel=kernel)
        found.append((output, *torch.autograd.grad(output, leaves, grad.to(dtype))))
    for name, one, exact, plain in zip(("output", "query", "key", "value"), *found, strict=True):
        assert_within_budget(one, exact, plain, name)


class _PrefixOfTheirOwn(Prefix):
    """Not known to have its keys side by side, since its rule might be another."""


@needs_library
def test_strips_of_the_same_queries_are_given_together(monkeypatch):
    monkeypatch.setattr(work, "MAX_KEPT_SCORES", 1000)
    bias = torch.randn(1, 2, 360, 480, generator=torch.Generator().manual_seed(1)).double()  # a copy for each strip
    query, key = torch.randn(1, 2, 360, 8), torch.randn(1, 2, 480, 8)
    call = check_call("attention", query, key, key, Causal() | _PrefixOfTheirOwn(160), bias, None, None, None, None)
    plan = native.plan_of(call)
    assert any(strip.merges for strip in plan.strips)
    found_and_expected = native.forward(*call[:3], None, call.scoring, None, plan), reference(*call[:4], None)
    for found, expected in zip(*found_and_expected, strict=False):
        assert_close(found, expected)


@needs_library
def test_a_bias_is_read_anew_wherever_it_is_and_whatever_was_written_to_it():
    query, key, value = torch.randn(3, 1, 2, 40, 8)
    biases = [torch.randn(1, 2, 40, 40), torch.randn(2, 40, 40), torch.randn(40, 40).T, torch.randn(1, 2, 1, 40)]
    for number in range(3):
        for bias in biases:
            plain = bias.clone()
            for bias_now in (bias, bias.clone(), Given(bias) + Alibi(2)):
                expected = reference_of(query, key, value, bias_now)
                assert_close(attention(query, key, value, bias=bias_now, kernel="native"), expected)
            bias[..., number] = -math.inf if number else 3.0
            assert_close(
                attention(query, key, value, bias=bias, kernel="native"), reference_of(query, key, value, bias)
            )
            bias.data.copy_(plain * 2)  # of which no version is counted
            assert_close(
                attention(query, key, value, bias=bias, kernel="native"), reference_of(query, key, value, bias)
            )


def reference_of(query, key, value, bias):
    return attention(query, key, value, bias=bias, kernel="reference")


@needs_library
def test_a_bias_that_is_read_where_it_is_is_not_kept():
    call = checked(bias=torch.randn(1, 2, 70, 70))
    plan = native.plan_of(call)
    native.forward(*call[:3], None, call.scoring, None, plan)
    _, told = plan.orders[form_of(call.query, call.value, call.scoring, plan)]
    assert not told.held


@needs_library
def test_prefixes_and_several_spans_are_read_where_they_are():
    call = checked(Causal() & (Window(16) | Prefix(3)), shape=(2, 2, 200, 8))
    plan = native.plan_of(call)
    assert not plan.merges
    assert any(len(strip.spans) > 1 and strip.times > 1 for strip in plan.strips)
    output, _, _ = native.forward(*call[:3], None, call.scoring, None, plan)
    assert_close(output, reference(*call[:3], call.scoring, None)[0])


@needs_library
def test_tiny_numbers_do_not_stay_flushed_in_the_callers_thread():
    query, key, value = torch.randn(3, 1, 2, 300, 16)
    attention(query, key, value, mask=Causal(), kernel="native")
    tiny = torch.tensor([1e-40])
    assert (tiny * 0.5).item() > 0.0


@needs_library
def test_packed_documents_of_any_length_are_one_call(monkeypatch):
    lengths = [20, 111, 3, 64, 102]
    mask, calls = Document.from_lengths(lengths) & Causal(), []
    real = binding.compiled(torch.float32).forward
    monkeypatch.setattr(
        binding.compiled(torch.float32), "forward", lambda order: calls.append(order[AT["strips"]]) or real(order)
    )
    query, key, value = torch.randn(3, 1, 4, sum(lengths), 16)
    output = regard.attention(query, key, value, mask=mask, kernel="native")
    assert len(calls) == 1
    assert_close(output, attention(query, key, value, mask=mask, kernel="reference"))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", [9, 300])
def test_a_bias_is_read_where_it_is_however_its_numbers_lie(length, dtype):
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, length, 8, generator=draw).requires_grad_()
    numbers = torch.randn(1, 4, length, 2 * length, generator=draw).to(dtype)
    of_heads = numbers[..., :length].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # as of an embedding
    every_other = numbers.repeat_interleave(2, 3)[..., : 2 * length : 2]
    found = []
    for bias in (numbers[..., :length].contiguous(), of_heads, of_heads.mT.contiguous().mT, every_other):
        assert dtype is torch.float64 or work.is_read(bias, torch.float32)
        for _ in range(2):  # the second is cached
            leaf = bias.detach().requires_grad_()
            output = attention(query, key, value, bias=leaf, mask=Causal(), kernel="native")
            found.append((output, *torch.autograd.grad(output.square().sum(), (query, leaf))))
    for one in found[1:]:
        for ours, other in zip(one, found[0], strict=True):
            assert_close(ours, other)


@needs_library
@pytest.mark.parametrize("length", [8, 49, 64, 200])
def test_a_bias_that_learns_is_the_librarys_of_any_length(length):  # torch computes its scores by plain operators
    query, key, value = torch.randn(3, 1, 6, length, 32)
    bias = torch.randn(1, 6, length, length, requires_grad=True)
    assert regard.plan(query, key, value, bias=bias).kernel == "native"


@needs_library
@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("kind", ["alibi", "relative, learned", "tensor", "tensor in float64", "two"])
def test_a_bias_of_sorted_tokens_is_read_where_it_is_by_the_places_where_they_were(kind, orders):
    draw = torch.Generator().manual_seed(0)
    relative = RelativeBias(torch.randn(32, 4, generator=draw).requires_grad_(kind != "two"))
    numbers = torch.randn(4, 150, 150, generator=draw)
    biases = {"alibi": Alibi(4), "relative, learned": relative, "tensor": numbers, "two": relative + as_bias(numbers)}
    bias = biases.get(kind, numbers.double())
    ids = torch.arange(150)[None] % 3
    mask = Causal() & Document(torch.cat([ids, 2 - ids]) if orders == 2 else ids)  # sorted, all are alike
    found = []
    for kernel, dtype in (("native", torch.float32), ("reference", torch.float64)):
        drawn = (torch.randn(2, heads, 150, 8, generator=draw.manual_seed(1)) for heads in (4, 2, 2))
        tensors = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        learned = [relative.table] if "learned" in kind else []
        output = attention(*tensors, mask=mask, bias=bias, kernel=kernel)
        found.append((output, *torch.autograd.grad(output.square().sum(), (*tensors, *learned))))
    for one, other in zip(*found, strict=True):
        assert_close(one, other.to(one.dtype), kind, tolerance=2e-6)


@needs_library
def test_places_of_sorted_tokens_are_told_once_and_never_taken_for_others():
    query, key, value = torch.randn(3, 1, 2, 90, 8)
    for start in range(12):  # more orders than are kept, of documents that are alike once sorted
        mask = Document((torch.arange(90)[None] + start) % 3 if start % 2 else (torch.arange(90)[None] * 7 + start) % 3)
        expected = attention(query, key, value, mask=mask, bias=Alibi(2), kernel="reference")
        for _ in range(2):
            assert_close(attention(query, key, value, mask=mask, bias=Alibi(2), kernel="native"), expected)


ONES = {
    "plain": {},
    "softcap, sink": {"softcap": 2.0, "sink": torch.linspace(-1, 1, 8)},
    "padding": {"mask": Padding([70, 13, 0])},
    "a bias": {"bias": torch.randn(1, 8, 1, 70, generator=torch.Generator().manual_seed(5))},
    "a bias in float64": {
        "bias": torch.randn(8, 1, 70, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    },
    "window": {"mask": Causal() & Window(20)},
    "any cells": {"mask": Dense(torch.rand(3, 1, 1, 70, generator=torch.Generator().manual_seed(6)) < 0.5)},
}


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ONES)
def test_few_queries_have_their_keys_side_by_side(name, dtype):
    """Fewer than half a vector of queries, with those of the heads that share a kv head; any number of features."""
    draw = torch.Generator().manual_seed(0)
    for rows, kv_heads, size, value_size in (
        (1, 8, 16, 16),
        (1, 4, 5, 33),
        (1, 2, 64, 64),
        (1, 1, 40, 70),
        (3, 8, 7, 130),
    ):
        if rows > 1 and name != "plain":
            continue
        query = torch.randn(3, 8, rows, size, generator=draw).to(dtype)
        key = torch.randn(3, kv_heads, 70, size, generator=draw).to(dtype)
        value = torch.randn(3, kv_heads, 70, value_size, generator=draw).to(dtype)
        given = {what: part.to(dtype) if what == "sink" else part for what, part in ONES[name].items()}
        with torch.no_grad():
            output = attention(query, key, value, **given, kernel="native")
            with_lse, lse = attention_with_lse(query, key, value, **given, kernel="native")
            plain = attention(query, key, value, **given, kernel="reference")
            wide = query.double(), key.double(), value.double()
            exact, exact_lse = attention_with_lse(*wide, **given, kernel="reference")
            for found in (output, with_lse):
                if dtype is torch.float64:
                    assert_close(found, exact, name, tolerance=1e-14)
                else:
                    assert_within_budget(found, exact, plain, name)
            seen = exact_lse > -math.inf
            assert_close(lse[seen].double(), exact_lse[seen], tolerance=1e-5)
            apart = value.transpose(2, 3).contiguous().transpose(2, 3)  # features are not consecutive
            assert torch.equal(attention(query, key, apart, **given, kernel="native"), output)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", ["sorted", "hidden NaN", "every third key", "heads side by side"])
def test_few_queries_read_numbers_of_half_precision_where_they_are(apart, dtype):
    draw = torch.Generator().manual_seed(0)
    for queries, size, value_size in ((3, 16, 16), (2, 21, 70), (6, 40, 5)):
        shapes = (2, 4, queries, size), (2, 4, 300, size), (2, 4, 300, value_size)
        three = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
        cells = torch.rand(2, 1, queries, 300, generator=draw) < 0.5
        cells[1, :, :, [20, 200]] = False
        mask = {
            "sorted": Document(torch.arange(queries)[None] % 2, torch.arange(300)[None] % 3),
            "hidden NaN": Dense(cells),
            "every third key": Strided(3),
            "heads side by side": None,
        }[apart]
        if apart == "hidden NaN":
            three[1][1, :, 20], three[2][1, :, 200] = math.nan, math.inf
        elif apart == "heads side by side":
            three = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in three]
        found = []
        for wide, kernel in ((dtype, "native"), (torch.float64, "reference"), (dtype, "reference")):
            leaves = [part.to(wide).detach().requires_grad_() for part in three]
            output = attention(*leaves, mask=mask, kernel=kernel)
            found.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
        lse = attention_with_lse(*three, mask=mask, kernel="native").lse
        for name, one, exact, plain in zip(("output", "query", "key", "value"), *found, strict=True):
            assert_within_budget(one, exact, plain, name, lse=None if name == "output" else lse)


@needs_library
def test_an_output_lies_as_its_query_does_and_gradients_as_what_they_belong_to():
    for shape in ((2, 40, 4, 16), (2, 4, 40, 16)):
        within = shape[1] == 40  # heads within each token, as a layer projects them
        tensors = [torch.randn(shape) for _ in range(3)]
        query, key, value = (t.transpose(1, 2) if within else t for t in tensors)
        query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
        output = attention(query, key, value, mask=Causal(), kernel="native")
        assert output.transpose(1, 2).is_contiguous() == within
        grads = torch.autograd.grad(output.square().sum(), (query, key, value))
        assert [grad.transpose(1, 2).is_contiguous() for grad in grads] == [within] * 3


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, 5, 0x7FFFFFFF00000001, 2**63 - 1])
def test_it_draws_the_numbers_of_dropout_that_torch_would(seed, dtype):
    for grid in (Grid(2, 3, 7, 9), Grid(1, 4, 1, 1000), Grid(3, 1, 501, 1)):
        by_torch = Dropout(0.1, seed).numbers(grid)
        written = Dropout(0.1, seed).written(grid, binding.compiled(dtype).write_random)
        assert torch.equal(written[: -grid.key_len].view(grid[:3]), by_torch.rows)
        assert torch.equal(written[-grid.key_len :].view(1, 1, -1), by_torch.columns)
        assert by_torch.odd == 0


LEAST = torch.finfo(torch.float32).min


@needs_library
@pytest.mark.parametrize(
    ("dtype", "low"),
    [
        *((torch.float32, low) for low in (-1e9, -1e30, LEAST)),
        *((torch.bfloat16, low) for low in (-1e9, LEAST)),
        *((torch.float64, low) for low in (-1e30, torch.finfo(torch.float64).min)),
    ],
)
@pytest.mark.parametrize(("queries", "heads"), [(70, 4), (3, 4), (1, 2)])
@pytest.mark.parametrize("name", ["nothing", "causal", "documents"])
def test_of_keys_whose_biases_are_all_as_low_as_some_masks_are_none_is_hidden(dtype, low, queries, heads, name):
    draw = torch.Generator().manual_seed(0)
    shapes = (2, heads, queries, 16), (2, 2, 70, 16), (2, 2, 70, 16)
    three = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    documents = Document(torch.arange(queries)[None] % 3, torch.arange(70)[None] % 3)
    given = {"mask": {"nothing": None, "causal": Causal(), "documents": documents}[name]}
    given["bias"] = torch.zeros(2, 1, queries, 70, dtype=torch.promote_types(dtype, torch.float32))
    given["bias"][0, :, :2], given["bias"][1, ..., 5] = low, low
    found = []
    for kernel in ("native", "reference"):
        leaves = [part.detach().requires_grad_() for part in three]
        for _ in range(2):  # the second call is like the first
            output, lse = attention_with_lse(*leaves, **given, kernel=kernel)
            grads = torch.autograd.grad(output.square().sum(), leaves)
        found.append((output, lse, *grads))
    for one, right in zip(*found, strict=True):
        assert_close(one, right, tolerance=4e-2 if dtype is torch.bfloat16 else None)

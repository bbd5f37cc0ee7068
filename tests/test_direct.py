"""All scores at once, and what is hidden: found once, looked at only where it is."""

import math
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from cases import ABSENT, ON_A_CPU
from comparing import assert_close, assert_within_budget
from lowered import looking
from regard import (
    Alibi,
    Causal,
    Dense,
    Document,
    Padding,
    RelativeBias,
    Where,
    Window,
    attention,
    attention_with_lse,
    matmul,
    processor,
)
from regard.functional import attention_and_perhaps_lse
from regard.kernels import choice, direct, fused, hidden, known, stacked
from regard.kernels.scratch import MAX_NUMBERS, scratch
from regard.kernels.strips import binding, native
from regard.masks import EVERYTHING, Mask
from regard.shapes import Grid
from regard.validation import check_call

BATCH, HEADS, KV_HEADS, KEYS, SIZE = 3, 6, 2, 37, 8
LEFT = torch.arange(KEYS) >= torch.tensor([[0], [5], [11]])


def step(rows=1, keys=KEYS, dtype=torch.float32, heads=HEADS, kv_heads=KV_HEADS):
    """Query, key and value of some new tokens behind a cache."""
    torch.manual_seed(0)
    key, value = torch.randn(2, BATCH, kv_heads, keys, SIZE, dtype=dtype)
    return torch.randn(BATCH, heads, rows, SIZE, dtype=dtype), key, value


class Made(TorchDispatchMode):
    """How many numbers each operation makes, beside views."""

    def __init__(self):
        super().__init__()
        self.numbers, self.names = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.numbers.append(result.numel())
        return result


@pytest.mark.parametrize("keys", [KEYS, 8000])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [("auto", torch.float32), ("auto", torch.bfloat16), ("direct", torch.float32)], ids=str
)
def test_a_step_behind_left_padding_copies_no_keys(keys, kernel, dtype):
    mask, tensors = Padding(torch.arange(keys) >= torch.tensor([[0], [5], [11]])), step(keys=keys, dtype=dtype)
    if kernel == "auto":
        assert regard.plan(*tensors, mask=mask).kernel == ("sdpa" if ABSENT else "native")
    with torch.no_grad(), Made() as made:
        attention(*tensors, mask=mask, kernel=kernel)
    assert max(made.numbers) < tensors[1].numel() / 2
    with torch.no_grad(), Made() as made:
        tensors[1].masked_fill(tensors[1] > 0, 0.0)
    assert max(made.numbers) == tensors[1].numel()  # which is what is counted


def test_a_query_that_is_computed_twice_has_two_places_in_memory(monkeypatch):
    """torch's gradients for bfloat16 take twenty times as long if the rows of a matrix lie in one place."""
    monkeypatch.setattr(processor, "AMX", False)
    strides, given = set(), fused.Rows.given

    def watched(rows, tensor):
        found = given(rows, tensor)
        if found.dim() == 4:
            strides.add(found.stride(2))
        return found

    monkeypatch.setattr(fused.Rows, "given", watched)
    query, key, value = (tensor.requires_grad_() for tensor in step(dtype=torch.bfloat16, heads=2, kv_heads=2))
    attention(query, key, value, kernel="sdpa").sum().backward()
    assert strides == {SIZE}
    assert_close(query.grad, torch.autograd.grad(attention(query, key, value, kernel="reference").sum(), query)[0])


@pytest.mark.usefixtures("without_the_library")
def test_a_finished_table_is_torchs_own_though_nobody_can_tell_whether_it_changes():
    with torch.inference_mode():  # no versions of tensors
        query, key, value = torch.randn(3, BATCH, HEADS, KEYS, SIZE)
        table = torch.randn(KEYS, KEYS, HEADS).permute(2, 0, 1)[None]
        assert regard.plan(query, key, value, bias=table).kernel == "sdpa"
        for _ in range(3):
            assert_close(
                attention(query, key, value, bias=table), attention(query, key, value, bias=table, kernel="reference")
            )
            table.mul_(-0.5)


@pytest.mark.usefixtures("without_the_library")
def test_a_step_that_does_not_fit_in_a_few_scores_is_left_to_the_other_kernels():
    assert regard.plan(*step(rows=600, keys=600), mask=Padding([10, 100, 600])).kernel != "direct"
    assert regard.plan(*step()).kernel == "sdpa"  # torch's own call has nothing around it here


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("more", [{"softcap": 20.0}, {"sink": torch.zeros(4)}], ids=str)
def test_one_query_in_half_precision_is_for_strips_only_where_copies_would_be_large(more, monkeypatch):
    monkeypatch.setattr(processor, "MKL", True)
    for keys, kernel in ((1000, "direct"), (4000, "strips")):
        query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 2, keys, 64)
        given = query.bfloat16(), key.bfloat16(), key.bfloat16()
        assert regard.plan(*given, **more).kernel == kernel
        assert_close(attention(*given, **more), attention(*given, **more, kernel="reference"))


@pytest.mark.usefixtures("without_the_library")
def test_all_scores_are_computed_at_once_where_that_takes_less_time(monkeypatch):
    for name, value in {"MKL": True, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)

    def kernel(mask, heads, length, learns=False, queries=None, **parts):
        query, key = (torch.zeros(1, heads, rows, 64, requires_grad=learns) for rows in (queries or length, length))
        return regard.plan(query, key, key, mask=mask, **parts).kernel

    window, documents = Causal() & Window(100), Causal() & Document.from_lengths([64] * 6)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    assert kernel(window, heads=8, length=128) == kernel(window, heads=2, length=128) == "sdpa"
    assert kernel(None, heads=2, length=128, bias=torch.zeros(128, 128)) == "sdpa"
    assert kernel(window, heads=2, length=128, softcap=5.0) == "direct"  # which torch's operator has not
    assert kernel(Causal(), heads=8, length=128, sink=torch.zeros(8)) == "strips"  # a number for each query
    assert kernel(Causal(), heads=8, length=128, sink=torch.zeros(8), learns=True) == "direct"
    assert kernel(window, heads=8, length=128, sink=torch.zeros(8)) == "direct"
    assert kernel(Causal(), heads=8, length=128) == "sdpa"
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: True)
    assert kernel(Causal(), heads=8, length=128) == "direct"
    assert kernel(Causal(), heads=2, length=512) == kernel(Causal(), heads=7, length=384, learns=True) == "direct"
    assert kernel(Causal(), heads=7, length=383, learns=True) != "direct"  # oneDNN compiles each length anew
    assert kernel(documents, heads=7, length=384, learns=True) == "strips"  # which leave out five sixths
    assert kernel(Causal(), heads=8, length=512) != "direct"
    few = {"mask": Causal(), "heads": 8, "bias": Alibi(8)}  # few queries: their keys are read, and little else is done
    for onednn in (False, True):
        monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype, onednn=onednn: onednn)
        for queries, length in ((16, 1024), (32, 512), (16, 2048)):
            assert kernel(queries=queries, length=length, **few) != "direct"
        assert kernel(queries=128, length=128, **few) == ("direct" if onednn else "sdpa")
        assert kernel(queries=16, length=256, learns=True, **few) == "sdpa"
        assert kernel(queries=32, length=512, learns=True, **few) == ("direct" if onednn else "sdpa")


@pytest.mark.usefixtures("without_the_library")
def test_what_torchs_operator_cannot_do_is_computed_at_once_whatever_the_library_of_its_products(monkeypatch):
    monkeypatch.setattr(processor, "MKL", False)
    few, many = (torch.zeros(1, 8, length, 64) for length in (128, 2048))
    assert regard.plan(few, few, few, mask=Causal(), softcap=5.0).kernel == "direct"
    assert regard.plan(many, many, many, mask=Causal(), softcap=5.0).kernel == "strips"
    assert regard.plan(few, few, few, mask=Window(100)).kernel == "sdpa"


@pytest.mark.usefixtures("without_the_library")
def test_one_query_that_learns_is_left_to_torch_while_its_keys_stay_in_the_cache(monkeypatch):
    monkeypatch.setattr(processor, "MKL", True)
    for keys, kernel in ((1024, "sdpa"), (8192, "direct")):
        query, key = torch.zeros(1, 8, 1, 64, requires_grad=True), torch.zeros(1, 8, keys, 64)
        assert regard.plan(query, key, key).kernel == kernel
        assert regard.plan(query, key, key, bias=torch.zeros(keys)).kernel == kernel
        assert_close(attention(query, key, key), attention(query, key, key, kernel="reference"))


@pytest.mark.parametrize("onednn", [False, True])
def test_strips_have_to_leave_out_more_where_all_scores_are_multiplied_faster(onednn, monkeypatch):
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: onednn)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    query = torch.zeros(1, 8, 512, 64)

    def hides_most(keys):
        scoring = {"bias": None, "scale": None, "softcap": None, "sink": None, "additive": None}
        mask = Padding([keys])
        return choice._hides_most(
            check_call("here", query, query, query, mask=mask, **scoring, dropout=0.0, generator=None, wants_lse=False),
            direct.KERNEL,
        )

    threads = 2
    assert [hides_most(keys) for keys in (200, 280, 480)] == [True, not onednn, False]
    threads = 64  # which compute all scores before strips have begun
    assert not hides_most(200)


@pytest.mark.usefixtures("without_the_library")
def test_many_strips_of_plain_products_cost_more_than_all_scores(monkeypatch):
    monkeypatch.setattr(processor, "MKL", True)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: min(threads, 2))

    def kernel(mask, *sizes):
        query = torch.zeros(*sizes, 64)
        return regard.plan(query, query, query, mask=mask, softcap=20.0).kernel

    documents = Document.from_lengths([[40, 30, 48 + n, 10 - n] for n in range(8)])  # others in each text
    assert kernel(Causal() & documents, 8, 12, 128) == "direct"
    assert kernel(Causal() & Window(64), 4, 4, 400) == "strips"  # equal strips, computed together


@pytest.mark.usefixtures("without_the_library")
def test_short_calls_in_bfloat16_are_computed_at_once_where_mkl_multiplies(monkeypatch):
    for name, value in {"MKL": True, "AMX": False, "BFLOAT16": True}.items():
        monkeypatch.setattr(processor, name, value)

    def kernel(onednn, batch=8, length=197, dtype=torch.bfloat16, **parts):
        monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: onednn)
        query = torch.zeros(batch, 6, length, 64, dtype=dtype)
        return regard.plan(query, query, query, **parts).kernel

    assert kernel(False) == kernel(False, batch=2, length=128, mask=Causal()) == "direct"
    assert kernel(False, batch=1, length=128, mask=Causal()) == "sdpa"  # a stack of few heads
    assert kernel(True) == "strips"  # which fill odd lengths up
    assert kernel(False, dtype=torch.float32) == "sdpa"
    assert kernel(False, batch=1, length=64) == "sdpa"  # one operator for few scores
    finished = torch.zeros(1, 6, 512, 512, dtype=torch.bfloat16)
    assert kernel(False, batch=4, length=512, bias=finished) == "sdpa"  # which reads the table in place
    assert kernel(True, batch=4, length=512, bias=finished) == "strips"
    monkeypatch.setattr(processor, "BFLOAT16", False)
    assert kernel(False) == "sdpa"


@pytest.mark.usefixtures("without_the_library")
def test_short_calls_that_learn_in_bfloat16_are_computed_at_once_with_amx(monkeypatch):
    for name in ("MKL", "BFLOAT16"):
        monkeypatch.setattr(processor, name, True)

    def kernel(rows, keys, amx=True, learns=True):
        monkeypatch.setattr(processor, "AMX", amx)
        query, key = (torch.zeros(2, 4, length, 64, dtype=torch.bfloat16) for length in (rows, keys))
        return regard.plan(query.requires_grad_(learns), key, key).kernel

    assert kernel(128, 128) == kernel(64, 64) == kernel(160, 100) == "direct"
    assert kernel(200, 200) == kernel(64, 512) == kernel(128, 128, learns=False) == "sdpa"
    assert kernel(64, 512, amx=False) == "direct"


@pytest.mark.usefixtures("without_the_library")
def test_many_single_rows_in_bfloat16_are_widened_where_their_values_need_not_be_or_they_are_very_many(monkeypatch):
    def kernel(batch, instructions):
        for name, value in {"MKL": True, "AMX": False, "BFLOAT16": instructions}.items():
            monkeypatch.setattr(processor, name, value)
        query, key = (torch.zeros(batch, 6, length, 64, dtype=torch.bfloat16) for length in (1, 40))
        return regard.plan(query, key, key).kernel

    assert kernel(2, True) == kernel(8, False) == "sdpa"
    assert kernel(8, True) == kernel(16, False) == "direct"


@pytest.mark.usefixtures("without_the_library")
def test_many_small_batch_indices_are_one_call_where_strips_would_take_them_one_by_one(monkeypatch):
    monkeypatch.setattr(processor, "MKL", True)
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda dtype: False)
    small, large = (torch.zeros(batch, 4, 130, 8).requires_grad_() for batch in (16, 128))
    bias = torch.zeros(130, 130).requires_grad_()
    for parts in ({"dropout": 0.1}, {"bias": bias}):
        assert regard.plan(small, small, small, **parts).kernel == "direct"
        assert regard.plan(large, large, large, **parts).kernel == "strips"  # which hold a piece of all these scores
    assert regard.plan(large, large, large, softcap=5.0).kernel == "strips"


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("rows", [1, 16])
def test_few_queries_that_learn_in_half_precision_are_copied_while_the_copies_stay_in_the_cache(rows, monkeypatch):
    for name, value in {"MKL": True, "AMX": False}.items():
        monkeypatch.setattr(processor, name, value)
    for keys, kernel in ((1000, "direct"), (8000, "sdpa")):
        query, key = torch.zeros(1, 4, rows, 64), torch.zeros(1, 4, keys, 64)
        given = query.bfloat16().requires_grad_(), key.bfloat16(), key.bfloat16()
        assert regard.plan(*given).kernel == kernel
        assert regard.plan(given[0].detach(), *given[1:]).kernel == "sdpa"


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
@pytest.mark.parametrize(("heads", "length"), [(2, 64), (8, 512)])
def test_a_finished_table_of_a_short_call_is_asked_once_and_read_by_torchs_operator(heads, length, mask, learns):
    table = torch.randn(1, heads, length, length).requires_grad_(learns)
    tensors = [*torch.randn(3, 1, heads, length, 8)]
    with torch.no_grad():
        attention(*tensors, mask=mask, bias=table, kernel="sdpa")
        with Made() as made:
            output = attention(*tensors, mask=mask, bias=table, kernel="sdpa")
    # a table may be another one in each call: one that could learn is detached, which makes no numbers
    assert next(name for name in made.names if name != "detach") == "_scaled_dot_product_flash_attention_for_cpu"
    assert max(made.numbers, default=0) <= 1
    assert_close(output, attention(*tensors, mask=mask, bias=table.detach(), kernel="reference"))


@pytest.mark.usefixtures("without_the_library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, Causal(0), Causal(0) & Window(200)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_short_call_with_a_sink_or_its_lse_is_torchs_operator_and_a_number_for_each_query(dtype, mask, kv_heads):
    query = torch.randn(2, 4, 90, 8).transpose(2, 3).contiguous().mT.to(dtype)  # features far apart
    key, value = (torch.randn(2, kv_heads, 95, 8).to(dtype) for _ in range(2))
    at_once = dtype == torch.bfloat16 and processor.BFLOAT16 and not processor.AMX  # weights are rounded faster so
    chosen = regard.plan(query, key, value, mask=mask, sink=torch.zeros(4)).kernel
    assert chosen == "strips" or (chosen == "direct" and at_once)
    for sink in (None, torch.tensor([-math.inf, -1.0, 2.0, 9.0])):
        given = {"mask": mask, "sink": sink}
        with torch.no_grad():
            attention_with_lse(query, key, value, **given, kernel="strips")
            with Made() as made:
                output, lse = attention_with_lse(query, key, value, **given, kernel="strips")
            alone = attention(query, key, value, **given)
        assert made.names.count("_scaled_dot_product_flash_attention_for_cpu") == 1
        assert all(number <= query.numel() or dtype == torch.bfloat16 for number in made.numbers)
        exact = attention_with_lse(*(tensor.double() for tensor in (query, key, value)), **given, kernel="reference")
        plain = attention_with_lse(query, key, value, **given, kernel="reference")
        for ours in (output, alone):
            assert_within_budget(ours, exact.output, plain.output, "output")
        assert_within_budget(lse, exact.lse, plain.lse, "lse")


@pytest.mark.parametrize("parts", [{}, {"softcap": 3.0}, {"sink": torch.zeros(HEADS)}], ids=str)
@pytest.mark.parametrize("bias", [None, Alibi(HEADS)], ids=str)
def test_all_scores_without_gradients_lie_in_one_place_whatever_is_done_to_them(parts, bias):
    class Places(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() == HEADS * KEYS * KEYS:
                places.append(result.data_ptr())
            return result

    tensors, places = [tensor[:1] for tensor in step(rows=KEYS)], []
    given = {"mask": Causal(), "bias": bias, "kernel": "direct", **parts}
    with torch.no_grad():
        attention(*tensors, **given)
        with Places():
            attention(*tensors, **given)
    assert len(places) >= 2
    assert len(set(places)) == 1


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38, -3e38], ids=str)
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kernel", ["auto", *ON_A_CPU])
@pytest.mark.parametrize("parts", [{}, {"softcap": 3.0}, {"sink": torch.linspace(-1, 1, HEADS)}], ids=str)
@pytest.mark.parametrize("grouped", [True, False])
def test_where_nothing_learns_what_is_hidden_reaches_nothing_to_the_last_bit(
    poison, where, rows, kernel, parts, grouped
):
    if kernel == "sdpa" and parts:
        return
    query, key, value = step(rows, heads=HEADS, kv_heads=KV_HEADS if grouped else HEADS)
    mask, bad_key, bad_value = Padding(LEFT) & Causal(), key.clone(), value.clone()
    bad = (~LEFT)[:, None, :, None]
    bad_key = bad_key.masked_fill(bad, poison) if where != "value" else bad_key
    bad_value = bad_value.masked_fill(bad, poison) if where != "key" else bad_value
    with torch.no_grad():
        clean, found = (
            attention(query, *two, mask=mask, kernel=kernel, **parts) for two in ((key, value), (bad_key, bad_value))
        )
    assert clean.isfinite().all()
    assert torch.equal(clean, found)


def test_keys_are_looked_at_in_the_order_of_memory(monkeypatch):
    in_order, real = [], torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda tensor: in_order.append(tensor.is_contiguous()) or real(tensor))
    assert hidden.harmless(torch.randn(2, 5, 3, 4).transpose(1, 2))
    assert in_order == [True]


def test_one_hidden_key_that_is_not_harmless_is_found_wherever_it_lies():
    query, key, value = step(keys=8000)
    mask = Padding(torch.arange(8000) % torch.tensor([[7], [11], [13]]) != 3)
    with torch.no_grad():
        clean = attention(query, key, value, mask=mask, kernel="sdpa")
        for row, place in ((0, 3), (1, 14), (2, 7985), (0, 7990)):
            assert not mask.keys[row, place]
            for tensor in (key, value):
                kept = tensor[row, 1, place, 5].item()
                tensor[row, 1, place, 5] = math.nan
                assert torch.equal(attention(query, key, value, mask=mask, kernel="sdpa"), clean)
                tensor[row, 1, place, 5] = kept


def test_what_is_seen_and_is_no_number_is_told_in_the_answer():
    query, key, value = step()
    value[1, 0, 20, 3] = math.nan
    with torch.no_grad():
        output = attention(query, key, value, mask=Padding(LEFT))
    assert output[1, :3, 0, 3].isnan().all()
    assert output.isnan().sum() == 3


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", [Padding, Dense])
def test_all_layers_of_a_step_share_what_was_found_out_about_their_mask(kind, inference, monkeypatch):
    asked = []
    look = kind.allowed
    monkeypatch.setattr(kind, "allowed", lambda mask, *places: (asked.append(mask), look(mask, *places))[1])
    mask = kind(LEFT.clone() if kind is Padding else LEFT[:, None, None].clone()) & Causal()
    with torch.inference_mode(inference):
        first, *rest = (attention(*step(), mask=mask) for _ in range(4))
    of_padding = int(not binding.is_there(torch.float32))  # otherwise the library reads its keys where they are
    assert len(asked) == (1 if kind is Dense else of_padding)
    assert all(torch.equal(first, other) for other in rest)
    with torch.no_grad(), Made() as made:
        attention(*step(), mask=mask)
    assert made.names.count("arange") == made.names.count("index") == made.names.count("all") == 0


def test_a_mask_that_was_written_to_is_asked_anew():
    real = LEFT.clone()
    mask, tensors = Padding(real) & Causal(), step(rows=2)
    with torch.no_grad():
        before = attention(*tensors, mask=mask)
        real[:, 20:25] = False
        after = attention(*tensors, mask=mask)
        assert_close(after, attention(*tensors, mask=mask, kernel="reference"))
        real.fill_(True)
        assert_close(attention(*tensors, mask=mask), attention(*tensors, mask=Causal()))
    assert not torch.allclose(before, after)


def test_a_rule_that_may_answer_otherwise_tomorrow_is_asked_in_every_call():
    last = [5]
    mask, tensors = Where(lambda batch, head, query, key: key < last[0]), step()
    with torch.no_grad():
        before = attention(*tensors, mask=mask)
        last[0] = 30
        assert not torch.allclose(before, attention(*tensors, mask=mask))


def test_a_bias_that_hides_a_whole_row_leaves_it_empty():
    bias = torch.zeros(BATCH, 1, 1, KEYS)
    bias[1] = -math.inf
    for sink in (None, torch.linspace(-1, 1, HEADS)):
        with torch.no_grad():
            output, lse = attention_with_lse(*step(), bias=bias, mask=Padding(LEFT), sink=sink, kernel="direct")
        assert (output[1] == 0).all()
        assert torch.equal(lse[1, :, 0], torch.full([HEADS], -math.inf) if sink is None else sink)
        assert output[[0, 2]].isfinite().all()


@pytest.mark.parametrize("parts", [{}, {"softcap": 3.0}, {"sink": True}, {"bias": True}, {"dropout": 0.3}], ids=str)
def test_the_gradients_of_a_small_call_take_four_products_and_little_else(parts, monkeypatch):
    learning = {"sink": torch.zeros(HEADS).requires_grad_(), "bias": torch.zeros(KEYS, KEYS).requires_grad_()}
    parts = {name: learning.get(name, part) for name, part in parts.items()}
    tensors = [tensor.requires_grad_() for tensor in step(rows=KEYS)]
    chosen = []  # every product asks which library is faster, those of the gradients too
    choose = matmul._setting_to_change
    monkeypatch.setattr(matmul, "_setting_to_change", lambda *two: (chosen.append(two), choose(*two))[1])
    output = attention(*tensors, mask=Causal(), kernel="direct", **parts)
    assert len(chosen) == 2
    with Made() as made:
        output.backward(torch.ones_like(output))
    assert len(chosen) == 6
    square = [number for number in made.numbers if number >= BATCH * HEADS * KEYS * KEYS]
    assert len(square) <= 2 + 3 * len(parts)


def test_a_dense_bias_that_learns_is_read_where_it_lies_and_its_gradient_is_that_of_the_scores():
    query, key, value = step(rows=KEYS)
    bias = torch.zeros(BATCH, HEADS, KEYS, KEYS, requires_grad=True)
    with Made() as made:
        attention(query, key, value, bias=bias, kernel="direct").sum().backward()
    assert not {"index_select", "index_add_", "index_add", "slice_backward", "scatter_add_"} & set(made.names)


def test_query_key_and_value_may_be_one_tensor_also_in_gradients_of_gradients():
    one = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: attention(x, x, x, softcap=2.0, kernel="direct"), [one])


def test_gradients_of_gradients_are_those_of_the_reference():
    tensors = [tensor.requires_grad_() for tensor in step(rows=2, keys=7, dtype=torch.float64)]
    mask = Padding([7, 0, 3]) & Document(torch.zeros(2, dtype=torch.int64), torch.tensor([0] * 5 + [1] * 2))
    assert torch.autograd.gradgradcheck(lambda *three: attention(*three, mask=mask, kernel="direct"), tensors)


def test_the_same_mask_is_bound_once_and_one_that_does_not_fit_is_refused_every_time():
    grid = Grid(BATCH, HEADS, 1, KEYS, torch.device("cpu"))
    mask: Mask = Padding(LEFT)
    assert known.bind(mask, grid) is known.bind(mask, grid)
    assert known.bind(Padding(torch.ones(BATCH, KEYS, dtype=torch.bool)), grid) is EVERYTHING
    for _ in range(2):
        with pytest.raises(regard.ShapeError, match="Padding: keys is for"):
            known.bind(mask, grid._replace(key_len=KEYS + 1))


def test_heads_that_share_a_key_lie_one_below_the_other():
    numbers = torch.arange(2 * 6 * 3 * 5.0).view(2, 6, 3, 5)
    folded = hidden.fold(numbers, 2, 6, 2, 3)
    assert torch.equal(folded[3], torch.cat([numbers[1, 3], numbers[1, 4], numbers[1, 5]]))
    assert hidden.fold(numbers[:1, :1], 2, 6, 6, 3).shape == (1, 3, 5)
    assert hidden.fold(numbers[:, :1, :1], 2, 6, 2, 3).shape == (4, 1, 5)
    assert hidden.fold(numbers[:, :, :1], 2, 6, 2, 3).shape == (4, 9, 5)


@pytest.mark.parametrize("number", [0.0, 2.0, -math.inf])
def test_under_a_bias_that_hides_nothing_what_the_mask_hides_is_known(number, monkeypatch):
    """A bias that learns has other numbers in each step, and the mask is the same."""
    asked = []
    allowed = Causal.allowed
    monkeypatch.setattr(Causal, "allowed", lambda *given: (asked.append(1), allowed(*given))[1])
    query, key, value = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    numbers = torch.zeros(2, 9, 9)
    numbers[1, 5, 3] = number
    numbers.requires_grad_()
    attention(query, key, value, mask=Causal(), bias=torch.zeros(2, 9, 9).requires_grad_(), kernel="direct")
    asked.clear()
    found = attention(query, key, value, mask=Causal(), bias=numbers, kernel="direct")
    assert bool(asked) == (not number > -math.inf)
    right = attention(query, key, value, mask=Causal(), bias=numbers, kernel="reference")
    grads = [torch.autograd.grad(output.sin().sum(), [query, key, value, numbers]) for output in (found, right)]
    for pair in zip((found, *grads[0]), (right, *grads[1]), strict=True):
        assert_close(*pair)


def test_calls_of_one_thread_share_the_memory_of_their_scores_and_results_keep_their_own():
    def found(seed):
        draw = torch.Generator().manual_seed(seed)
        three = torch.randn(3, 1, 4, 64, 8, generator=draw)
        return attention_with_lse(*three, mask=Causal(), kernel="direct"), scratch(three, torch.float32, (1,))[
            0
        ].data_ptr()

    elsewhere = []
    first, place = found(0)
    before = [result.clone() for result in first]
    assert found(1)[1] == place
    thread = threading.Thread(target=lambda: elsewhere.append(found(2)[1]))
    thread.start()
    thread.join()
    assert elsewhere[0] != place
    for result, kept in zip(first, before, strict=True):
        assert torch.equal(result, kept)


def test_scores_that_are_many_or_no_float32_have_memory_of_their_own():
    few = torch.zeros(1)
    with torch.inference_mode():
        (place,) = scratch(few, torch.float32, (3,))
    assert not place.is_inference()
    assert scratch(few, torch.float32, (2,))[0].data_ptr() == place.data_ptr()
    assert scratch(few, torch.float32, (2, MAX_NUMBERS))[0].data_ptr() != place.data_ptr()
    assert scratch(few, torch.float64, (3,))[0].dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", ["bias", "bias of each text", "padding", "sink and lse", "dropout"])
def test_many_texts_are_computed_a_few_at_a_time_in_memory_that_is_kept(dtype, more, monkeypatch):
    asked = []
    kept = stacked.scratch
    monkeypatch.setattr(stacked, "MAX_NUMBERS", 5000)
    monkeypatch.setattr(stacked, "scratch", lambda *given: (asked.append(given[2:]), kept(*given))[1])
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, n, heads, 8, generator=draw).to(dtype).transpose(1, 2) for heads, n in SIZES)
    rows = 7 if more == "bias of each text" else 1
    given = {
        "mask": Padding(torch.arange(29) < torch.arange(20, 27)[:, None]) if more == "padding" else Causal(),
        "bias": torch.randn(rows, 6, 13, 29, generator=draw) if "bias" in more else None,
        "sink": torch.randn(6, generator=draw) if "sink" in more else None,
        "dropout": 0.5 if more == "dropout" else 0.0,
    }

    def found(kernel, dtype):
        three, seed = (tensor.to(dtype) for tensor in (query, key, value)), torch.Generator().manual_seed(3)
        return attention_with_lse(*three, **given, generator=seed, kernel=kernel)

    results = found("direct", dtype)
    texts = [sizes[0][0] // 3 for sizes in asked]
    assert len(texts) > 1
    assert sum(texts) == 7
    assert all(sum(map(math.prod, sizes)) <= 5000 for sizes in asked)
    for three in zip(results, found("reference", torch.float64), found("reference", dtype), strict=True):
        assert_within_budget(*three)


SIZES = (6, 13), (3, 29), (3, 29)


@pytest.mark.usefixtures("without_the_library")
def test_large_heads_do_not_compute_what_a_mask_hides_for_the_sake_of_their_weights():
    def kernel(mask):
        return regard.plan(*(torch.zeros(1, 2, 600, 256, requires_grad=True) for _ in range(3)), mask=mask).why

    assert "large heads" in kernel(None)
    assert "large heads" not in kernel(regard.Causal())


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [
        *((queries, keys, True) for queries, keys in ((100, 1000), (1000, 1000), (600, 2000))),
        *((queries, keys, False) for queries, keys in ((100, 8000), (500, 3000), (600, 3000), (2100, 2000))),
    ],
)
def test_the_weights_of_large_heads_are_kept_where_keys_are_few(queries, keys, expected):
    leaves = [torch.zeros(1, 1, length, 512, requires_grad=True) for length in (queries, keys, keys)]
    assert ("large heads" in regard.plan(*leaves).why) == expected


@pytest.mark.parametrize(("size", "heads", "expected"), [(256, 2, True), (256, 5, False), (512, 5, True)])
def test_larger_heads_keep_their_weights_where_a_bias_is_written_anew_in_every_call(size, heads, expected):
    leaves = [torch.zeros(1, heads, 700, size, requires_grad=True) for _ in range(3)]
    bias = regard.Alibi(heads)  # of so many heads, a table that is not kept
    assert ("large heads" in regard.plan(*leaves, bias=bias).why) == expected
    assert "large heads" in regard.plan(*leaves, bias=torch.zeros(1, heads, 700, 700)).why


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("by_token", [False, True])
def test_whole_products_of_the_largest_heads_are_attention(kv_heads, by_token, monkeypatch):
    monkeypatch.setattr(native, "price", lambda *kind, **more: 1.2)
    draw = torch.Generator().manual_seed(0)
    sizes = (2, 4, 110, 520), (2, kv_heads, 100, 520), (2, kv_heads, 100, 600)
    query, key, value = (torch.randn(size, generator=draw) for size in sizes)
    if by_token:
        query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    assert "whole matrices" in regard.plan(query, key, value).why

    def found(dtype, kernel="auto"):
        return attention(query.to(dtype), key.to(dtype), value.to(dtype), scale=0.3, kernel=kernel)

    for _ in range(2):  # the second one is like the first
        three = found(torch.float32), found(torch.float64, "reference"), found(torch.float32, "reference")
        assert_within_budget(*three)
    scoring = {"mask": None, "bias": None, "scale": 0.3, "softcap": None, "sink": None, "additive": None}
    assert attention_and_perhaps_lse(query, key, value, **scoring, dropout=0.0)[0].equal(three[0])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_gradients_of_large_heads_without_anything_added_are_those_of_the_formula(kv_heads, by_token, twice):
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 110, 260), (2, kv_heads, 100, 260), (2, kv_heads, 100, 300), (2, 4, 110, 300)]
    query, key, value, grad = (torch.randn(size, generator=draw) for size in sizes)
    if by_token:
        query, key, value = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    assert "large heads" in regard.plan(query.requires_grad_(), key, value).why

    def found(dtype, kernel="auto"):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
        results = [attention(*leaves, kernel=kernel)]
        grads = torch.autograd.grad(results[0], leaves, grad.to(dtype), create_graph=twice)
        results += grads
        if twice:
            results += torch.autograd.grad(sum(part.square().sum() for part in grads), leaves)
        return results

    reference = found(torch.float64, "reference"), found(torch.float32, "reference")
    first, *others = (found(torch.float32) for _ in range(3))
    for three in zip(first, *reference, strict=True):
        assert_within_budget(*three)
    for other in others:  # calls like one before
        assert all(map(torch.equal, first, other))


IN_A_GRAPH = {
    "sink": lambda learned: {"sink": learned[:HEADS, 0]},
    "softcap, causal": lambda learned: {"mask": Causal(), "softcap": 2.0},
    "sink, padding left": lambda learned: {"mask": Causal() & Padding(LEFT), "sink": learned[:HEADS, 0]},
    "sink, window": lambda learned: {"mask": Causal() & Window(9), "sink": learned[:HEADS, 0]},
    "a trained table": lambda learned: {"mask": Causal(), "bias": RelativeBias(learned)},
    "a trained bias": lambda learned: {"bias": learned[None, :HEADS, :1, None] * ALL_PLACES},
    "dropout, ALiBi": lambda learned: {"bias": Alibi(HEADS), "dropout": 0.3},
}
ALL_PLACES = torch.linspace(-1.0, 1.0, KEYS)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("given", IN_A_GRAPH.values(), ids=IN_A_GRAPH)
def test_a_graph_computes_few_scores_by_operators_that_it_fuses(given, rows):
    torch.compiler.reset()
    nodes = []

    def run(query, key, value, learned):
        return attention_with_lse(query, key, value, **given(learned))

    backend = looking(lambda node: nodes.append(str(node.target)))
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        three, learned = step(rows), torch.randn(32, HEADS)
        learned[0, 0] = seed
        answers = []
        for function in (compiled, run):
            torch.manual_seed(7)  # of what is dropped
            leaves = [tensor.clone().requires_grad_() for tensor in (*three, learned)]
            output, lse = function(*leaves)
            loss = output.square().sum() + lse[lse.isfinite()].sum()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            torch.manual_seed(7)
            with torch.no_grad():
                answers.append([output, lse, *grads, *function(*three, learned)])
        for ours, right in zip(*answers, strict=True):
            if right is None:
                assert ours is None
            else:
                assert_close(ours, right)
    assert nodes
    assert not any("regard" in name for name in nodes)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("given", [{"sink": torch.zeros(HEADS)}, {}, {"softcap": 2.0}, {"bias": Alibi(HEADS)}], ids=str)
def test_what_a_mask_hides_has_no_part_in_a_graph(given, rows, bad, learns):
    """Neither keys and values, nor queries that see no key, as those of the first text."""
    torch.compiler.reset()
    three, real = step(rows), LEFT.clone()
    real[0] = False
    mask = Causal() & Padding(real)

    def run(*three):
        return *attention_with_lse(*three, mask=mask, **given), attention(*three, mask=mask, **given)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    spoilt = [tensor.clone() for tensor in three]
    spoilt[0][0] = bad
    for tensor in spoilt[1:]:
        tensor.transpose(1, 2)[~real] = bad
    found = []
    for tensors in (spoilt, three):
        leaves = [tensor.clone().requires_grad_(learns) for tensor in tensors]
        if tensors is spoilt:
            output, lse, alone = compiled(*leaves)
        else:
            output, lse = attention_with_lse(*leaves, mask=mask, kernel="reference", **given)
            alone = output
        grads = torch.autograd.grad(output.sin().sum() + alone.cos().sum(), leaves) if learns else ()
        found.append([output, lse, alone, *grads])
    for ours, right in zip(*found, strict=True):
        assert_close(ours, right)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_one_query_of_a_graph_sees_all_keys_of_a_cache_that_grows():
    torch.compiler.reset()
    sink, graphs, nodes = torch.zeros(HEADS), [], []

    def look(node):
        nodes.append(str(node.target))
        graphs.extend([node] if node.op == "output" else [])

    compiled = torch.compile(
        lambda *three: attention(*three, mask=Causal(), sink=sink),
        backend=looking(look),
        fullgraph=True,
        dynamic=True,
    )
    for keys in (30, 31, 40, 57):
        three = step(keys=keys)
        assert_close(compiled(*three), attention(*three, sink=sink))
    assert len(graphs) == 1
    assert not any("arange" in node for node in nodes)  # nothing is hidden, so nothing is compared

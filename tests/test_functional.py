"""The public functions: one gate for every argument, warnings, dropout, autocast, and what plan tells."""

import inspect
import math
import warnings
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import regard.functional
from cases import BATCH, HEAD_DIM, HEADS, KEY_LEN, ON_A_CPU, QUERY_LEN, VALUE_DIM, biases, tensors
from comparing import assert_close
from regard import one_query
from regard.biases import Alibi, Bias, RelativeBias
from regard.functional import Plan, QuadraticMemoryWarning, attention, attention_with_lse, plan
from regard.kernels import KERNELS, KernelError, choice
from regard.masks import Causal, Dense, Document, Mask, Padding, Prefix, Tile, Where, Window
from regard.reference import AttentionOutput
from regard.scores import Additive
from regard.shapes import ShapeError

QUERY, KEY, VALUE = (x.detach() for x in tensors(torch.float32))
FUNCTIONS = [attention, attention_with_lse, plan]

every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


# --- what comes back ----------------------------------------------------------------------------------------------


def test_two_queries_by_hand():
    query = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    value = torch.tensor([[[[1.0], [3.0]]]])
    # scores of the second query: 0 and 1; weights 1/(1+e) = 0.26894 and 0.73106
    assert_close(attention(query, query, value, mask=Causal(), scale=1.0), torch.tensor([[[[1.0], [2.46212]]]]))
    # without a scale, 1/sqrt(2): weights 0.33024 and 0.66976 for the second query
    output, lse = attention_with_lse(query, query, value, mask=Causal())
    assert_close(output, torch.tensor([[[[1.0], [2.33952]]]]))
    assert_close(lse, torch.tensor([[[math.sqrt(0.5), math.log(1 + math.exp(math.sqrt(0.5)))]]]))


def test_the_type_of_the_answer_depends_on_the_function_alone():
    for parts in ({}, {"mask": Causal()}, {"sink": torch.zeros(HEADS)}, {"dropout": 0.5}, {"kernel": "reference"}):
        assert type(attention(QUERY, KEY, VALUE, **parts)) is torch.Tensor
        assert type(attention_with_lse(QUERY, KEY, VALUE, **parts)) is AttentionOutput
        assert type(plan(QUERY, KEY, VALUE, **parts)) is Plan


def test_both_functions_take_the_same_arguments_and_plan_takes_them_too():
    ours, lse, planned = (inspect.signature(f).parameters for f in FUNCTIONS)
    assert list(ours.values()) == list(lse.values())
    assert [p for p in ours.values() if p.name != "generator"] == [
        p for p in planned.values() if p.name not in ("lse", "tile_size")
    ]
    for name, parameter in ours.items():
        positional = name in ("query", "key", "value")
        assert parameter.kind is (parameter.POSITIONAL_OR_KEYWORD if positional else parameter.KEYWORD_ONLY)


def test_the_default_scale_is_1_over_the_root_of_head_dim_and_1_for_the_additive_similarity():
    assert_close(attention(QUERY, KEY, VALUE), attention(QUERY, KEY, VALUE, scale=HEAD_DIM**-0.5))
    additive = Additive(torch.ones(HEADS, HEAD_DIM))
    assert_close(
        attention(QUERY, KEY, VALUE, additive=additive), attention(QUERY, KEY, VALUE, additive=additive, scale=1)
    )


def test_a_tensor_is_a_bias_as_it_stands():
    bias = torch.randn(HEADS, 1, KEY_LEN)
    expected = attention(QUERY, KEY, VALUE, bias=bias.expand(BATCH, HEADS, QUERY_LEN, KEY_LEN), kernel="reference")
    assert_close(attention(QUERY, KEY, VALUE, bias=bias), expected)


# --- the gate -----------------------------------------------------------------------------------------------------

META = torch.device("meta")
BOOLS = torch.ones(QUERY_LEN, KEY_LEN, dtype=torch.bool)

WRONG = {
    "query, no tensor": ({"query": QUERY.tolist()}, TypeError, "query must be a tensor .*, got list"),
    "key of three axes": ({"key": KEY[0]}, ShapeError, "key must have 4 axes"),
    "key shorter than value": (
        {"key": KEY[:, :, :10]},
        ShapeError,
        "same key_len, got 10 and 11\n  query .*\n.*\n.*\n  hint",
    ),
    "batch of one": ({"value": VALUE[:1]}, ShapeError, "same batch, got 2 and 1"),
    "heads that do not divide": (
        {"query": QUERY[:, :5]},
        ShapeError,
        "kv_heads must divide heads, got kv_heads=3 and heads=5",
    ),
    "dtypes that differ": ({"key": KEY.double()}, TypeError, "must share one of .*, got torch.float32, torch.float64"),
    "integers": ({"query": QUERY.int(), "key": KEY.int(), "value": VALUE.int()}, TypeError, "got torch.int32"),
    "devices that differ": ({"value": VALUE.to(META)}, ValueError, "must be on one device, got cpu, cpu, meta"),
    "mask, a bool tensor": (
        {"mask": BOOLS},
        TypeError,
        r"mask must be a regard mask .*, got torch.bool tensor \[7, 11\].*Dense",
    ),
    "mask, a float tensor": (
        {"mask": BOOLS.float()},
        TypeError,
        "mask must be a regard mask .*, got torch.float32 tensor",
    ),
    "mask, the class": ({"mask": Causal}, TypeError, r"mask must be a regard mask such as Causal\(\), got <class"),
    "mask, a string": ({"mask": "causal"}, TypeError, r"mask must be a regard mask such as Causal\(\), got 'causal'"),
    "mask, a flag": ({"mask": True}, TypeError, "mask must be a regard mask .*, got True"),
    "dense of another length": (
        {"mask": Dense(BOOLS[:, :9])},
        ShapeError,
        r"Dense: mask \[7, 9\] does not broadcast to the scores .*\n  query .*\n  key .*\n  value",
    ),
    "dense on another device": (
        {"mask": Dense(BOOLS.to(META))},
        ValueError,
        "Dense: mask is on meta, the call runs on cpu",
    ),
    "documents of another length": (
        {"mask": Document(torch.zeros(9, dtype=torch.int64))},
        ShapeError,
        "Document: query_ids is for .batch=1, query_len=9",
    ),
    "documents of the queries alone": (
        {"mask": Document(torch.zeros(7, dtype=torch.int64))},
        ShapeError,
        "give key_ids too",
    ),
    "padding of another batch": (
        {"mask": Causal() & Padding([1, 2, 3])},
        ShapeError,
        "Padding: lengths is for batch=3",
    ),
    "padding beyond the keys": ({"mask": Padding([1, 12])}, ShapeError, "Padding: a row has 12 real keys"),
    "padding of another length": (
        {"mask": ~Padding(torch.ones(2, 7).bool())},
        ShapeError,
        "Padding: keys is for .batch=2, key_len=7., the scores are",
    ),
    "offsets of another batch": ({"mask": Causal(offset=[1, 2, 3])}, ShapeError, "Causal: offset is for batch=3"),
    "prefixes of another batch": ({"mask": Prefix([1])}, ShapeError, "Prefix: n is for batch=1"),
    "bias, a number": ({"bias": 1.0}, TypeError, "bias must be a floating tensor or a regard bias .*, got 1.0"),
    "bias, a bool tensor": (
        {"bias": BOOLS},
        TypeError,
        "bias must be a floating tensor, got torch.bool .*; a bool tensor is a mask",
    ),
    "bias of five axes": ({"bias": torch.zeros(1, 1, 1, 1, 1)}, ShapeError, "bias has more axes"),
    "bias of another length": ({"bias": torch.zeros(7, 9)}, ShapeError, r"bias \[7, 9\] does not broadcast"),
    "bias on another device": ({"bias": torch.zeros(7, 11, device=META)}, ValueError, "bias is on meta"),
    "alibi of other heads": ({"bias": Alibi(5)}, ShapeError, "Alibi: 5 slopes, the scores are"),
    "table of other heads": (
        {"bias": RelativeBias(torch.zeros(8, 5))},
        ShapeError,
        "RelativeBias: the table has heads=5",
    ),
    "scale nan": (
        {"scale": math.nan},
        ValueError,
        r"scale must be a finite number or None for 1/sqrt\(head_dim\), got nan",
    ),
    "scale inf": ({"scale": math.inf}, ValueError, "scale must be a finite number .*, got inf"),
    "scale, a string": ({"scale": "1"}, ValueError, "scale must be a finite number .*, got '1'"),
    "scale, a flag": ({"scale": True}, ValueError, "scale must be a finite number .*, got True"),
    "scale, a tensor": ({"scale": torch.ones(())}, ValueError, "scale must be a finite number"),
    "softcap 0": ({"softcap": 0}, ValueError, "softcap must be a positive number or None for none, got 0"),
    "softcap below 0": ({"softcap": -1.0}, ValueError, "softcap must be a positive number .*, got -1.0"),
    "softcap nan": ({"softcap": math.nan}, ValueError, "softcap must be a positive number .*, got nan"),
    "softcap inf": ({"softcap": math.inf}, ValueError, "softcap must be a positive number .*, got inf"),
    "softcap, a flag": ({"softcap": True}, ValueError, "softcap must be a positive number .*, got True"),
    "sink, a number": ({"sink": 1.0}, TypeError, r"sink must be a floating tensor \[heads=6\], got 1.0"),
    "sink of integers": (
        {"sink": torch.zeros(6, dtype=torch.int64)},
        TypeError,
        r"sink must be .* got torch.int64 tensor \[6\]",
    ),
    "sink of other heads": (
        {"sink": torch.zeros(3)},
        ShapeError,
        r"sink must be .* \[heads=6\], got torch.float32 tensor \[3\]",
    ),
    "sink with a batch": (
        {"sink": torch.zeros(2, 6)},
        ShapeError,
        r"sink must be .* got torch.float32 tensor \[2, 6\]",
    ),
    "sink on another device": (
        {"sink": torch.zeros(6, device=META)},
        ValueError,
        "sink is on meta, the call runs on cpu",
    ),
    "additive, a tensor": (
        {"additive": torch.ones(6, 5)},
        TypeError,
        r"additive must be an Additive\(v\), got torch.float32",
    ),
    "additive, a flag": ({"additive": True}, TypeError, r"additive must be an Additive\(v\), got True"),
    "additive of a list": ({"additive": Additive([1.0])}, TypeError, "additive.v must be a floating tensor .*, got"),
    "additive of integers": (
        {"additive": Additive(torch.ones(6, 5).int())},
        TypeError,
        "additive.v must be .* got torch.int32",
    ),
    "additive of another size": (
        {"additive": Additive(torch.ones(6, 4))},
        ShapeError,
        r"additive.v must be .* \[heads=6, head_dim=5\], got torch.float32 tensor \[6, 4\]",
    ),
    "additive on another device": (
        {"additive": Additive(torch.ones(6, 5, device=META))},
        ValueError,
        "additive.v is on meta",
    ),
    "dropout 1": ({"dropout": 1.0}, ValueError, r"dropout must be a probability in \[0, 1\), got 1.0"),
    "dropout below 0": ({"dropout": -0.1}, ValueError, "dropout must be a probability .*, got -0.1"),
    "dropout nan": ({"dropout": math.nan}, ValueError, "dropout must be a probability .*, got nan"),
    "dropout none": ({"dropout": None}, ValueError, "dropout must be a probability .*, got None"),
    "dropout, a flag": ({"dropout": True}, ValueError, "dropout must be a probability .*, got True"),
    "dropout, off by a flag": ({"dropout": False}, ValueError, "dropout must be a probability .*, got False"),
    "dropout, a tensor": ({"dropout": torch.zeros(2)}, ValueError, "dropout must be a probability"),
    "kernel unknown": ({"kernel": "nope"}, KernelError, "no kernel named 'nope'; there are: auto, "),
    "kernel none": ({"kernel": None}, KernelError, "no kernel named None"),
    "kernel that cannot": (
        {"kernel": "sdpa", "softcap": 1.0},
        KernelError,
        "kernel 'sdpa' does not support this call: torch's",
    ),
}


@every_function
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_with_what_was_expected_and_what_came(function, name):
    arguments, error, says = WRONG[name]
    with pytest.raises(error, match=f"(?s){says}") as caught:
        function(**{"query": QUERY, "key": KEY, "value": VALUE} | arguments)
    assert type(caught.value) in (ShapeError, TypeError, ValueError, KernelError)
    if error is ShapeError:
        assert str(caught.value).startswith(f"{function.__name__}: ")


@pytest.mark.parametrize("function", [attention, attention_with_lse])
@pytest.mark.parametrize("generator", [5, "cpu", torch.device("cpu")], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_generator_is_a_generator_whether_it_is_needed_or_not(function, generator, dropout):
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None, got"):
        function(QUERY, KEY, VALUE, dropout=dropout, generator=generator)


@pytest.mark.parametrize("kernel", [*ON_A_CPU, "auto"])
def test_where_that_returns_numbers_is_refused_by_every_kernel_alike(kernel):
    with pytest.raises(TypeError, match=r"Where: fn must return a bool tensor .*, got torch.int64"):
        attention(QUERY, KEY, VALUE, mask=Where(lambda b, h, i, j: i - j), kernel=kernel)
    with pytest.raises(ShapeError, match=r"Where: fn returned \[5, 11\]"):
        attention(QUERY, KEY, VALUE, mask=Where(lambda b, h, i, j: torch.ones(5, 11).bool()), kernel=kernel)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_the_tiles_of_a_plan_have_a_size(size):
    with pytest.raises(ValueError, match=r"plan: tile_size must be a whole number, 1 or more, got"):
        plan(QUERY, KEY, VALUE, tile_size=size)


# --- dropout ------------------------------------------------------------------------------------------------------


DIFFERENTIATED = {
    "nothing": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(5)},
    "a table": {"bias": torch.linspace(-1, 1, 400, dtype=torch.float64).view(20, 20)},
    "ALiBi, causal": {"mask": Causal(), "bias": Alibi(2)},
    "softcap": {"softcap": 3.0},
}


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("length", [20, 160])
@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (8, 2)], ids=str)
def test_a_gradient_has_a_gradient_whatever_the_kernel(name, length, heads):
    given = DIFFERENTIATED[name]
    if ("bias" in given and heads != (2, 2)) or (name == "a table" and length != 20):
        pytest.skip("a bias of 2 heads, a table of 20 tokens")
    tensors = [
        torch.randn(1, n, length, 4, dtype=torch.float64, requires_grad=True) for n in (heads[0], *heads[1:] * 2)
    ]

    def second(kernel):
        output = attention(*tensors, kernel=kernel, **given)
        firsts = torch.autograd.grad(output.sin().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(first.square().sum() for first in firsts), tensors)

    for found, right in zip(second("auto"), second("reference"), strict=True):
        assert_close(found, right)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("wanted", ["query", "key", "value", "key and value"])
@pytest.mark.parametrize("kernel", ["sdpa", "strips", "direct"])
def test_a_gradient_has_a_gradient_where_others_are_not_wanted_and_under_activation_checkpointing(wanted, kernel):
    names = ("query", "key", "value")
    tensors = [torch.randn(1, 2, 20, 4, dtype=torch.float64, requires_grad=name in wanted) for name in names]
    learning = [tensor for tensor in tensors if tensor.requires_grad]

    def thirds(kernel, run):
        output = run(lambda *three: attention(*three, mask=Causal(), kernel=kernel), *(t.sin() for t in tensors))
        for _ in range(2):
            firsts = torch.autograd.grad(output.sin().sum(), learning, create_graph=True)
            output = sum(first.square().sum() for first in firsts)
        return torch.autograd.grad(output, learning)

    right = thirds("reference", lambda function, *three: function(*three))
    for run in (lambda function, *three: function(*three), partial(checkpoint, use_reentrant=False)):
        for found, expected in zip(thirds(kernel, run), right, strict=True):
            assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
def test_third_derivatives_by_strips_beside_a_bias_that_learns_are_refused():
    query, table = (torch.randn(*sizes, dtype=torch.float64, requires_grad=True) for sizes in ((1, 2, 5, 4), (2, 5, 5)))
    output = attention(query + table[..., :4], query, query, bias=table, kernel="strips")
    (first,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    with pytest.raises(KernelError, match=r"third derivatives.*\n  hint: kernel='reference'"):
        torch.autograd.grad(first.square().sum(), query, create_graph=True)


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "direct", "strips"])
def test_what_learns_in_a_bias_need_have_no_part_in_its_numbers(kernel):
    class Flat(Bias):
        def __init__(self):
            self.unused = torch.zeros(3, requires_grad=True)

        def rule(self, batch, head, query, key):
            return 0.0 * (query + key)

    assert_close(attention(QUERY, KEY, VALUE, bias=Flat(), kernel=kernel), attention(QUERY, KEY, VALUE))


@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("mask", [None, Causal(), Causal(0)], ids=repr)
def test_a_call_with_an_axis_of_size_0_has_gradients(sizes, mask):
    batch, queries, keys = sizes
    tensors = [torch.randn(batch, 4, length, 8, requires_grad=True) for length in (queries, keys, keys)]
    attention(*tensors, mask=mask).sum().backward()
    for tensor in tensors:
        assert_close(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_torch_func_takes_derivatives_of_any_kind(name):
    given, (key, point) = DIFFERENTIATED[name], torch.randn(2, 1, 2, 20, 3, dtype=torch.float64)

    def of(kernel):
        return lambda x: attention(x, key, key, kernel=kernel, **given).sin().sum()

    for transform in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.grad(f))):
        assert_close(transform(of("auto"))(point), transform(of("reference"))(point))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_that_are_carried_forward_are_those_of_torch_func(name, queries):
    given, draw = dict(DIFFERENTIATED[name]), torch.Generator().manual_seed(0)
    if isinstance(given.get("bias"), torch.Tensor):
        given["bias"] = given["bias"][..., -queries:, :]
    drawn = torch.randn(6, 1, 2, 20, 3, generator=draw, dtype=torch.float64)
    drawn = [tensor[:, :, -queries:] if n % 3 == 0 else tensor for n, tensor in enumerate(drawn)]
    point, tangent = drawn[:3], drawn[3:]
    expected = torch.func.jvp(lambda *x: attention(*x, kernel="reference", **given), (*point,), (*tangent,))[1]
    for _ in range(3):
        attention(*point, **given)  # alike, without any derivative
        with forward_ad.dual_level():
            output = attention(*map(forward_ad.make_dual, point, tangent), **given)
            assert_close(forward_ad.unpack_dual(output).tangent, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode uses it
def test_derivatives_of_very_many_scores_are_not_carried_forward_unless_they_are_asked_for():
    tensors = [torch.randn(1, 8, 1500, 2) for _ in range(3)]
    with forward_ad.dual_level():
        query = forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        with pytest.raises(NotImplementedError, match="kernel='direct'"):
            attention(query, *tensors[1:], mask=Causal())
        output = attention(query, *tensors[1:], mask=Causal(), kernel="direct")
        assert forward_ad.unpack_dual(output).tangent is not None


def test_dropout_is_reproducible_from_a_generator_and_from_torchs_seed():
    def drop(seed):
        return attention(QUERY, KEY, VALUE, dropout=0.4, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    torch.manual_seed(1)
    first, second = (attention(QUERY, KEY, VALUE, dropout=0.4) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(attention(QUERY, KEY, VALUE, dropout=0.4), first)


def test_dropout_keeps_the_mean_and_drops_the_weights_not_the_outputs():
    value = torch.eye(KEY_LEN).expand(BATCH, 3, -1, -1)
    weights = attention(QUERY, KEY, value)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.stack([attention(QUERY, KEY, value, dropout=0.3, generator=generator) for _ in range(400)])
    ratio = drawn / weights
    kept = ratio > 0.5
    assert_close(ratio[kept], torch.full_like(ratio[kept], 1 / 0.7))
    assert_close(ratio[~kept], torch.zeros_like(ratio[~kept]))
    assert abs(kept.float().mean() - 0.7) < 5 * math.sqrt(0.21 / kept.numel())
    assert (drawn.mean(0) - weights).abs().max() < 0.1


def test_the_backward_pass_sees_the_weights_that_the_forward_pass_kept():
    query, key, _ = tensors()
    value = torch.eye(KEY_LEN, dtype=torch.float64).repeat(BATCH, 3, 1, 1).requires_grad_()
    dropped = attention(query, key, value, dropout=0.5)  # with these values, the weights themselves
    assert (dropped == 0).any()
    (gradient,) = torch.autograd.grad(dropped.sum(), value)
    expected = dropped.unflatten(1, (3, 2)).sum((2, 3))  # d sum / d value[j] is what key j received, in its group
    assert_close(gradient, expected[..., None].expand_as(gradient))


def test_dropout_of_0_draws_nothing_and_neither_does_a_plan():
    before = torch.get_rng_state()
    attention(QUERY, KEY, VALUE)
    attention(QUERY, KEY, VALUE, dropout=0)
    print(plan(QUERY, KEY, VALUE, dropout=0.5))
    assert torch.equal(torch.get_rng_state(), before)


# --- autocast -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"softcap": 2.0}, {"mask": Causal()}], ids=["plain", "softcap", "causal"])
@pytest.mark.parametrize("kernel", [*ON_A_CPU, "auto"])
def test_autocast_neither_rounds_scores_nor_changes_the_dtype_of_the_answer(parts, kernel):
    inputs = tensors(torch.float32)
    for function in (attention, attention_with_lse):
        try:
            expected = function(*inputs, **parts, kernel=kernel)
        except KernelError:
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(*inputs, **parts, kernel=kernel)
        expected, found = ((x,) if isinstance(x, torch.Tensor) else x for x in (expected, found))
        for one, right in zip(found, expected, strict=True):
            assert_close(one, right, tolerance=0)
        gradients = (torch.autograd.grad(x[0].sum(), inputs) for x in (found, expected))
        for one, right in zip(*gradients, strict=True):
            assert_close(one, right, tolerance=0)


@pytest.mark.parametrize("parts", [{}, {"mask": Causal() & Window(3)}, {"softcap": 2.0}], ids=str)
def test_tensors_without_data_yield_their_shapes(parts):
    output, lse = attention_with_lse(*(x.to(META) for x in (QUERY, KEY, VALUE)), **parts)
    assert output.shape == (BATCH, HEADS, QUERY_LEN, VALUE_DIM)
    assert lse.shape == (BATCH, HEADS, QUERY_LEN)


# --- warnings -----------------------------------------------------------------------------------------------------


def test_a_call_that_holds_a_large_square_warns_with_its_kernel_and_its_numbers(monkeypatch):
    cells = BATCH * HEADS * QUERY_LEN * KEY_LEN
    monkeypatch.setattr(regard.functional, "MIN_WARNED_NUMBERS", cells)
    with pytest.warns(
        QuadraticMemoryWarning, match=f"kernel 'reference' holds {3 * cells:,} numbers of query_len x key_len"
    ) as caught:
        attention(QUERY, KEY, VALUE, softcap=1.0, kernel="reference")
    assert caught[0].filename == __file__
    with pytest.warns(QuadraticMemoryWarning) as caught:
        attention_with_lse(QUERY, KEY, VALUE, kernel="reference")
    assert caught[0].filename == __file__


def test_a_call_that_holds_no_square_or_a_small_one_does_not_warn(monkeypatch):
    value = VALUE[..., :HEAD_DIM]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(QUERY, KEY, VALUE, softcap=1.0, kernel="reference")
        monkeypatch.setattr(regard.functional, "MIN_WARNED_NUMBERS", 1)
        attention(QUERY, KEY, value, kernel="sdpa")
        attention(QUERY, KEY, value, mask=Causal(0), kernel="sdpa")
        plan(QUERY, KEY, VALUE, softcap=1.0, kernel="reference")  # computes nothing
        monkeypatch.setattr(regard.functional, "MIN_WARNED_NUMBERS", 3 * BATCH * HEADS * QUERY_LEN * KEY_LEN + 1)
        attention(QUERY, KEY, VALUE, softcap=1.0, kernel="reference")


# --- plan ---------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_plan_by_hand():
    query, key, value = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 3)
    planned = plan(query, key, value, mask=Causal(), tile_size=3, kernel="reference")
    # offset 2. Rows 0-2 and 3-4, columns 0-2, 3-5, 6: query i sees keys up to i + 2
    assert planned.tiles == {Tile.EMPTY: 1, Tile.PARTIAL: 2, Tile.FULL: 3}
    needed = 5 * 7 - 3 * 1  # all cells but the empty tile's (rows 0-2, column 6)
    assert planned.flops_needed == needed * 2 * (8 + 3) * 2 * 4
    assert planned.flops_computed == 35 * 2 * (8 + 3) * 2 * 4
    assert planned.bytes_moved == 4 * (2 * 4 * 5 * 8 + 2 * 2 * 7 * 8 + 2 * 2 * 7 * 3 + 2 * 4 * 5 * 3)
    assert planned.quadratic_numbers == 3 * 2 * 4 * 35
    assert planned.peak_bytes == 4 * (planned.quadratic_numbers + 2 * 4 * 5 * 3)
    assert planned.kernel == "reference"
    assert planned.why == "requested by name"
    assert planned.mask == "Causal(offset=2)"
    assert set(planned.others) == {kernel.name for kernel in KERNELS} - {"reference"}


@pytest.mark.parametrize("length", [160, 640, 752, 1088, 2048])
def test_a_plan_counts_the_scores_that_torchs_causal_operator_computes(length):
    # a weight of 0 times a value of NaN is NaN: so the output shows for which queries a value was multiplied at all
    features = length // 16
    query, value = torch.randn(1, 2, length, features), torch.zeros(1, 2, length, features)
    for feature in range(features):
        value[:, :, 16 * feature : 16 * (feature + 1), feature] = math.nan
    output = torch.nn.functional.scaled_dot_product_attention(query, query, value, is_causal=True)
    multiplied = 16 * int(output.isnan().sum())
    planned = plan(query, query, value, mask=Causal(), kernel="sdpa")
    assert planned.flops_computed == multiplied * 4 * features
    assert planned.flops_needed <= planned.flops_computed
    assert plan(query, query, value, kernel="sdpa").flops_computed == 2 * length**2 * 4 * features


def test_a_plan_prints_as_a_report():
    planned = plan(*torch.zeros(3, 1, 2, 4, 8), mask=Window(2), softcap=1.0, tile_size=2, kernel="reference")
    lines = str(planned).splitlines()
    assert lines[0] == "scores  [batch=1, heads=2, query_len=4, key_len=4], mask Window(2, offset=0)"
    assert lines[1] == "kernel  reference: requested by name"
    assert "        not sdpa: torch's scaled_dot_product_attention has no softcap" in lines
    assert lines[-3] == "tiles   0 empty (0%), 2 partial (50%), 2 full (50%) of 2 x 2"
    assert lines[-2] == "FLOPs   1.02e+03 needed, 1.02e+03 computed"
    assert lines[-1] == (
        "memory  1.0 KiB read and written, 640.0 B beside inputs at most; 96 numbers of query_len x key_len"
    )


@pytest.fixture
def ran(monkeypatch):
    """The kernels that ran, by name."""
    found = []

    def spy(kernel):
        def prepare(call):
            prepared = kernel.prepare(call)
            return prepared and (lambda *tensors: found.append(kernel.name) or prepared(*tensors))

        def single(call):
            alone = kernel.single(call)
            return alone and (lambda *given: found.append(kernel.name) or alone(*given))

        return kernel._replace(
            run=lambda call: found.append(kernel.name) or kernel.run(call), prepare=prepare, single=single
        )

    monkeypatch.setattr(one_query, "_KNOWN", {})
    monkeypatch.setattr(choice, "KERNELS", tuple(map(spy, KERNELS)))
    table = tuple(row._replace(kernel=spy(row.kernel)) for row in choice.PREFERENCES)
    monkeypatch.setattr(choice, "PREFERENCES", table)
    return found


@pytest.mark.parametrize("parts", [{}, {"mask": Causal()}, {"softcap": 2.0}, {"dropout": 0.5}, {"kernel": "reference"}])
def test_a_plan_names_the_kernel_that_would_run(parts, ran):
    planned = [plan(QUERY, KEY, VALUE, lse=lse, **parts).kernel for lse in (False, True)]
    attention(QUERY, KEY, VALUE, **parts)
    attention_with_lse(QUERY, KEY, VALUE, **parts)
    assert ran == planned


def random_call(draw):
    """Tensors and arguments of a call, with or without gradients, of a size at which any kernel may be the best."""

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=draw))]

    batch, kv_heads, group, length = pick(1, 3), pick(1, 2, 4), pick(1, 3), pick(1, 5, 130, 400)
    dtype, size, learns = pick(torch.float32, torch.bfloat16, torch.float64), pick(8, 16), pick(True, False)
    sizes = (kv_heads * group, size), (kv_heads, size), (kv_heads, pick(8, 16))
    tensors = [torch.randn(batch, n, length, d, dtype=dtype, requires_grad=learns) for n, d in sizes]
    heads = kv_heads * group
    parts = {
        "mask": pick(None, Causal(), Causal() & Window(7), Dense(torch.rand(length, length) < 0.5), Window(3)),
        "bias": pick(None, None, Alibi(heads), torch.randn(1, heads, length, length, requires_grad=learns)),
        "softcap": pick(None, None, 3.0),
        "sink": pick(None, None, torch.zeros(heads)),
        "dropout": pick(0.0, 0.0, 0.25),
    }
    return tensors, {name: value for name, value in parts.items() if value is not None}


@pytest.mark.parametrize("seed", range(60))
def test_what_a_plan_says_is_what_runs(ran, seed):
    tensors, parts = random_call(torch.Generator().manual_seed(seed))
    for lse, function in ((False, attention), (True, attention_with_lse)):
        for mode in (torch.enable_grad, torch.no_grad):
            ran.clear()
            with mode():
                planned = plan(*tensors, lse=lse, **parts).kernel
                function(*tensors, **parts)
            assert ran == [planned]


def test_a_plan_of_a_long_call_holds_nothing_large():
    long = torch.empty(1, 1, 1, 8).expand(1, 1, 1 << 17, 8)
    planned = plan(long, long, long, mask=Causal() & Window(256), tile_size=1 << 12)
    assert planned.tiles[Tile.EMPTY] == 32 * 32 - 32 - 31
    assert plan(long, long, long).quadratic_numbers == 0


@every_function
def test_a_plan_and_a_call_bind_the_masks_they_are_given_without_changing_them(function):
    mask: Mask = Causal() & (Window(3) | Prefix(2))
    function(QUERY, KEY, VALUE, mask=mask, bias=Alibi(HEADS))
    assert repr(mask) == "Causal() & (Window(3) | Prefix(2))"
    function(QUERY[:, :, :1], KEY, VALUE, mask=mask)


def test_a_bias_that_learns_and_a_sink_get_their_gradients_through_the_public_function():
    for name, (bias, leaf) in biases().items():
        if leaf is not None:
            sink = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
            output = attention(*tensors(), bias=bias, sink=sink, mask=Causal())
            assert output.shape == (BATCH, HEADS, QUERY_LEN, VALUE_DIM)
            for gradient in torch.autograd.grad(output.square().sum(), (leaf, sink)):
                assert gradient.isfinite().all(), name
                assert gradient.abs().max() > 0, name


def test_a_plan_never_needs_more_than_it_computes():
    query = torch.zeros(1, 2, 2048, 8)
    planned = plan(query, query, query, mask=Causal() & (Window(100) | Prefix(4)), tile_size=256)
    assert planned.flops_needed == planned.flops_computed < 2048 * 256 * 2 * 32


def test_a_scale_that_changes_from_call_to_call_stays_one_graph():
    torch.compiler.reset()

    def run(query, scale, kernel="sdpa"):
        return attention(query, query, query, scale=scale, mask=Causal(), kernel=kernel)

    compiled, query = torch.compile(run, backend="eager", fullgraph=True), torch.randn(1, 2, 5, 8)
    for scale in (0.5, 0.25, 0.125):  # from the second on, the compiler takes it for any number
        expected = run(query, scale)
        assert torch.equal(compiled(query, scale), expected)
        torch.testing.assert_close(compiled(query, scale, "auto"), expected)

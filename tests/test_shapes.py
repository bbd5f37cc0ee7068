"""The gate: which tensors pass, and the words in which the others are refused."""

import re

import pytest
import torch

import regard
from regard.shapes import (
    ATTENTION,
    CACHE,
    LAYER,
    TOKENS,
    Grid,
    LayoutWarning,
    ShapeError,
    check,
    check_attention,
    describe,
)

# A different prime for every axis: batch 2, kv_heads 3 (heads 6), query_len 7, key_len 11, head_dim 5, value_dim 13.
QUERY, KEY, VALUE = torch.zeros(2, 6, 7, 5), torch.zeros(2, 3, 11, 5), torch.zeros(2, 3, 11, 13)


def test_an_error_says_what_then_all_that_was_passed_then_a_hint():
    with pytest.raises(ShapeError) as caught:
        check_attention("attention", torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 6, 8))
    assert str(caught.value) == (
        "attention: key and value must have the same key_len, got 5 and 6\n"
        "  query [batch=1, heads=2, query_len=4, head_dim=8]\n"
        "  key   [batch=1, kv_heads=2, key_len=5, head_dim=8]\n"
        "  value [batch=1, kv_heads=2, key_len=6, value_dim=8]\n"
        "  hint: after a cache, pass the keys and values that append() returned, both of them"
    )


def test_a_good_call_yields_its_grid():
    grid = check_attention("attention", QUERY, KEY, VALUE)
    assert grid == Grid(2, 6, 7, 11, torch.device("cpu"))
    assert str(grid) == "[batch=2, heads=6, query_len=7, key_len=11]"


def test_the_size_of_every_axis_is_returned_by_name():
    assert check("attention", ATTENTION, query=QUERY, key=KEY, value=VALUE) == {
        "batch": 2, "heads": 6, "query_len": 7, "head_dim": 5, "kv_heads": 3, "key_len": 11, "value_dim": 13
    }  # fmt: skip
    assert check("embedding", TOKENS, tokens=torch.zeros(2, 7)) == {"batch": 2, "length": 7}


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 6, 7, 5), (0, 3, 11, 5), (0, 3, 11, 13)),
        ((2, 6, 0, 5), (2, 3, 11, 5), (2, 3, 11, 13)),
        ((2, 6, 7, 5), (2, 3, 0, 5), (2, 3, 0, 13)),
        ((2, 6, 7, 0), (2, 3, 11, 0), (2, 3, 11, 13)),
        ((2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 0)),
    ],
    ids=["batch", "query_len", "key_len", "head_dim", "value_dim"],
)
def test_an_axis_of_size_0_is_no_mistake(shapes):
    assert check_attention("attention", *map(torch.zeros, shapes))[:4] == (shapes[0][0], 6, shapes[0][2], shapes[1][2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_four_floating_dtypes_pass(dtype):
    check_attention("attention", QUERY.to(dtype), KEY.to(dtype), VALUE.to(dtype))


@pytest.mark.parametrize("function", ["attention", "attention_with_lse", "plan"])
@pytest.mark.parametrize(
    ("query", "key", "value", "says", "hint"),
    [
        (
            QUERY[0],
            KEY,
            VALUE,
            r"query must have 4 axes \[batch, heads, query_len, head_dim\], got 3",
            "split the heads",
        ),
        (
            QUERY,
            KEY[0],
            VALUE,
            r"key must have 4 axes \[batch, kv_heads, key_len, head_dim\], got 3",
            "split the heads",
        ),
        (QUERY, KEY, VALUE[0, 0], r"value must have 4 axes \[batch, kv_heads, key_len, value_dim\], got 2", None),
        (QUERY[None], KEY, VALUE, "query must have 4 axes .*, got 5", None),
        (QUERY, KEY[:1], VALUE, "query and key must have the same batch, got 2 and 1", "nothing is broadcast"),
        (QUERY, KEY, VALUE[:1], "query and value must have the same batch, got 2 and 1", "nothing is broadcast"),
        (QUERY, KEY[..., :4], VALUE, "query and key must have the same head_dim, got 5 and 4", "feature by feature"),
        (QUERY, KEY, VALUE[:, :1], "key and value must have the same kv_heads, got 3 and 1", "in pairs"),
        (QUERY, KEY, VALUE[:, :, :10], "key and value must have the same key_len, got 11 and 10", "append"),
        (QUERY[:, :4], KEY, VALUE, "kv_heads must divide heads, got kv_heads=3 and heads=4", "length put before heads"),
        (QUERY[:, :2], KEY, VALUE, "kv_heads must divide heads, got kv_heads=3 and heads=2", "length put before heads"),
        (QUERY[:, :0], KEY, VALUE, "kv_heads must divide heads, got kv_heads=3 and heads=0", None),
        (QUERY[:, :0], KEY[:, :0], VALUE[:, :0], "kv_heads must divide heads, got kv_heads=0 and heads=0", None),
    ],
)
def test_shapes_that_do_not_fit_are_refused(function, query, key, value, says, hint):
    with pytest.raises(ShapeError, match=f"^{function}: {says}\n") as caught:
        check_attention(function, query, key, value)
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["query", "key", "value"]
    if hint is not None:
        assert lines[4].startswith("  hint: ")
        assert hint in lines[4]


@pytest.mark.parametrize(
    ("query", "key", "value", "error", "says"),
    [
        (None, KEY, VALUE, TypeError, r"query must be a tensor \[batch, heads, query_len, head_dim\], got NoneType"),
        (
            QUERY,
            KEY.tolist(),
            VALUE,
            TypeError,
            r"key must be a tensor \[batch, kv_heads, key_len, head_dim\], got list",
        ),
        (QUERY, KEY, "v", TypeError, r"value must be a tensor .* got str"),
        (QUERY[0], KEY, 1, TypeError, r"value must be a tensor .* got int"),
        (QUERY.half(), KEY, VALUE, TypeError, "must share one of .*, got torch.float16, torch.float32, torch.float32"),
        (
            QUERY,
            KEY,
            VALUE.double(),
            TypeError,
            r"got torch.float32, torch.float32, torch.float64\n  hint: convert them, as by",
        ),
        (QUERY.int(), KEY.int(), VALUE.int(), TypeError, "got torch.int32, torch.int32, torch.int32$"),
        (QUERY.cfloat(), KEY.cfloat(), VALUE.cfloat(), TypeError, "got torch.complex64"),
        (QUERY, KEY.to("meta"), VALUE, ValueError, "must be on one device, got cpu, meta, cpu"),
        (QUERY, KEY, VALUE.to("meta"), ValueError, "must be on one device, got cpu, cpu, meta"),
    ],
)
def test_what_is_no_tensor_or_of_another_dtype_or_device_is_refused(query, key, value, error, says):
    with pytest.raises(error, match=says):
        check_attention("attention", query, key, value)


NESTED = [torch.zeros(2, 5), torch.zeros(3, 5)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: torch.nested.nested_tensor(NESTED), r"got a nested tensor; pad it, .*mask=Padding\(lengths\)"),
        (lambda: torch.nested.nested_tensor(NESTED, layout=torch.jagged), "got a nested tensor; pad it"),
        (lambda: KEY.to_sparse(), r"got torch.float32 sparse_coo tensor \[2, 3, 11, 5\]; pass tensor.to_dense\(\)"),
        (lambda: KEY[0, 0].to_sparse_csr(), r"got torch.float32 sparse_csr tensor \[11, 5\]; pass tensor.to_dense"),
        (lambda: KEY.numpy(), r"got ndarray; pass torch.as_tensor\(array\)"),
        (lambda: torch.quantize_per_tensor(KEY, 0.1, 0, torch.qint8), "must share one of .*torch.qint8"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse", "ignore:.*quant", "ignore:.*nested")
def test_what_holds_no_number_at_every_place_is_refused_with_the_way_to_make_it(wrong, says):
    for place in range(3):
        passed = [QUERY, KEY, VALUE]
        passed[place] = wrong()
        with pytest.raises(TypeError, match=says):
            check_attention("attention", *passed)
        with pytest.raises((TypeError, ShapeError), match=r"attention: "):
            check_attention("attention", wrong(), wrong(), wrong())


@pytest.mark.parametrize(
    ("shapes", "hint"),
    [
        (((2, 6, 7, 5), (2, 6, 5, 11), (2, 6, 11, 5)), r"not transposed: key.transpose\(-2, -1\)"),
        (((2, 6, 7, 5), (2, 11, 6, 5), (2, 6, 11, 5)), r"the other way round than value: .transpose\(1, 2\)"),
        (((2, 7, 6, 5), (2, 11, 3, 5), (2, 11, 3, 5)), r"was length put before heads\? x.transpose\(1, 2\)"),
        (((7, 30), (11, 30), (11, 30)), None),
        (((2, 7, 30), (2, 11, 30), (2, 11, 30)), r"\[batch, length, dim\]: split the heads .*unsqueeze\(0\)"),
    ],
)
def test_the_usual_mistakes_of_layout_have_a_hint(shapes, hint):
    with pytest.raises(ShapeError) as caught:
        check_attention("attention", *map(torch.zeros, shapes))
    assert ("  hint: " in str(caught.value)) == (hint is not None)
    assert re.search(hint or "must have 4 axes", str(caught.value))


def test_heads_that_look_like_a_length_are_told():
    there = torch.zeros(2, 300, 8, 4)  # [batch, length, heads, head_dim], as flash-attn has it
    with pytest.warns(
        LayoutWarning, match=r"300 heads of 8 queries and 8 keys look like \[batch, length, heads, "
    ) as said:
        regard.attention(there, there, there)
    assert [one.filename for one in said] == [__file__]
    for fits in ((2, 128, 8, 4), (2, 300, 300, 4), (1, 300, 1, 4), (2, 4, 300, 8)):  # warnings are errors here
        check_attention("attention", *[torch.zeros(fits)] * 3)
    check_attention("attention", torch.zeros(1, 300, 1, 4), torch.zeros(1, 300, 500, 4), torch.zeros(1, 300, 500, 4))


def test_every_call_that_fits_by_the_table_passes_and_no_other():
    sizes = [(2, 6, 7, 5), (2, 3, 11, 5), (2, 3, 11, 13)]
    for place in range(3):
        for axis in range(4):
            changed = [list(shape) for shape in sizes]
            changed[place][axis] += 1
            tensors = [torch.zeros(shape) for shape in changed]
            try:
                check("attention", ATTENTION, **dict(zip(ATTENTION, tensors, strict=True)))
            except ShapeError as error:
                with pytest.raises(ShapeError, match=f"^{re.escape(str(error))}$"):
                    check_attention("attention", *tensors)
            else:
                if tensors[0].shape[1] % tensors[1].shape[1] == 0:
                    check_attention("attention", *tensors)


def test_other_tables_name_their_own_axes():
    with pytest.raises(
        ShapeError, match=r"^embedding: tokens must have 2 axes \[batch, length\], got 1\n.*\n  hint: .*unsq"
    ):
        check("embedding", TOKENS, tokens=torch.zeros(7))
    with pytest.raises(ShapeError, match=r"^cache: key and value must have the same length, got 11 and 7\n") as caught:
        check("cache", CACHE, key=torch.zeros(2, 3, 11, 5), value=torch.zeros(2, 3, 7, 13))
    assert "hint" not in str(caught.value)
    with pytest.raises(ShapeError, match=r"^layer: key and value must have the same key_len, got 11 and 7\n") as caught:
        check("layer", LAYER, key=torch.zeros(2, 11, 5), value=torch.zeros(2, 7, 5))
    assert "hint" not in str(caught.value)


def test_a_tensor_whose_axes_cannot_be_named_is_described_by_its_sizes():
    assert describe("key", torch.zeros(2, 3), ("batch", "length")) == "  key   [batch=2, length=3]"
    assert describe("key", torch.zeros(2, 3), ("batch",)) == "  key   [2, 3]"


def test_a_shape_error_is_a_value_error():
    assert issubclass(ShapeError, ValueError)

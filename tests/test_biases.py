"""Biases: numbers by hand, the published formulas and T5's own buckets, tiles of the whole, learning, the errors."""

import math

import pytest
import torch
import torch.profiler
from hypothesis import given
from hypothesis import strategies as st

from cases import GRID, HEADS, KEY_LEN, QUERY_LEN, biases
from comparing import assert_close, assert_within_budget
from regard.biases import Alibi, Given, RelativeBias, Sum, as_bias
from regard.diagonals import turned_tile
from regard.functional import attention, plan
from regard.kernels.strips import engine
from regard.masks import Causal
from regard.shapes import Grid, ShapeError

# --- by hand ------------------------------------------------------------------------------------------------------


def test_alibi_subtracts_slope_times_distance():
    bias = Alibi(slopes=torch.tensor([0.5, 2.0])).bind(Grid(1, 2, 2, 3))  # queries stand at positions 1 and 2
    assert bias.values(range(2), range(3)).tolist() == [
        [[[-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]], [[-2.0, 0.0, -2.0], [-4.0, -2.0, 0.0]]]
    ]


def test_a_relative_bias_looks_its_distance_up():
    table = torch.tensor([[10.0, -1.0], [20.0, -2.0], [30.0, -3.0], [40.0, -4.0]])
    both = RelativeBias(table, max_distance=8).bind(Grid(1, 2, 3, 3))
    # two buckets on a side: distance 0, and all that is farther; keys ahead begin at bucket 2
    assert both.values(range(3), range(3))[0, 0].tolist() == [[10, 40, 40], [20, 10, 40], [20, 20, 10]]
    behind = RelativeBias(table, bidirectional=False, max_distance=8).bind(Grid(1, 2, 3, 3))
    assert behind.values(range(3), range(3))[0, 1].tolist() == [[-1, -1, -1], [-2, -1, -1], [-3, -2, -1]]


def test_alibis_slopes_for_powers_of_two_are_a_geometric_series():
    assert Alibi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]
    assert Alibi(4).slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert Alibi(1).slopes.tolist() == [2**-8]


# --- outside authorities ------------------------------------------------------------------------------------------


def published_slopes(heads):
    """As the paper has it: a series that starts at and multiplies by 2^(-8/n); for other n, every second of 2n."""

    def series(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**h for h in range(n)]

    if math.log2(heads).is_integer():
        return series(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return series(closest) + series(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 112])
def test_alibis_slopes_are_the_published_ones(heads):
    expected = torch.tensor(published_slopes(heads), dtype=torch.float32)
    assert_close(Alibi(heads).slopes, expected, tolerance=1e-7)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 20), (8, 6), (7, 50), (4, 3), (64, 1000)])
def test_the_buckets_are_those_of_t5(bidirectional, buckets, max_distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = torch.arange(-1500, 1501)
    ours = RelativeBias(torch.zeros(buckets, 1), bidirectional=bidirectional, max_distance=max_distance)._bucket(ahead)
    theirs = T5Attention._relative_position_bucket(ahead, bidirectional, buckets, max_distance)
    assert torch.equal(ours, theirs)
    assert ours.unique().numel() >= min(buckets - buckets % 2, 4) - 1  # the comparison saw more than one bucket


def test_a_relative_bias_is_the_bias_of_t5_with_the_queries_at_the_end_of_the_keys():
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=10, d_kv=5, num_heads=2, relative_attention_num_buckets=8, is_decoder=True)
    config.relative_attention_max_distance = 11
    layer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs = layer.compute_bias(13, 13)[:, :, -7:].detach()
    table = layer.relative_attention_bias.weight.detach()
    ours = RelativeBias(table, bidirectional=False, max_distance=11).bind(Grid(3, 2, 7, 13))
    assert_close(ours.values(range(7), range(13)), theirs)


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", biases())
def test_a_rectangle_is_a_slice_of_the_whole(name):
    bias = as_bias(biases()[name][0]).bind(GRID)
    whole = bias.values(range(QUERY_LEN), range(KEY_LEN)).expand(GRID[:4])
    for rows, columns in ((range(2, 5), range(3, 10)), (range(6, 7), range(11)), (range(0), range(4))):
        part = whole[:, :, rows.start : rows.stop, columns.start : columns.stop]
        assert_close(bias.values(rows, columns).expand(part.shape), part)
        assert_close(bias.values(slice(rows.start, rows.stop), columns).expand(part.shape), part)
    rows, columns = torch.tensor([6, 0, 3]), torch.tensor([10, 10, 2, 5], dtype=torch.int32)
    assert_close(bias.values(rows, columns).expand(2, 6, 3, 4), whole[:, :, rows][..., columns.long()])


@given(st.data())
def test_a_relative_bias_depends_on_positions_alone(data):
    query_len, key_len = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    offset = data.draw(st.none() | st.integers(-9, 9) | st.lists(st.integers(-9, 9), min_size=2, max_size=2))
    grid = Grid(2, 3, query_len, key_len)
    table = torch.arange(24.0).view(8, 3)
    alibi = Alibi(3, offset=offset).bind(grid)
    relative = RelativeBias(table, max_distance=5, offset=offset).bind(grid)
    rows, columns = range(query_len), range(key_len)
    alibis, relatives = alibi.values(rows, columns), relative.values(rows, columns)
    for b in range(2):
        start = key_len - query_len if offset is None else offset if isinstance(offset, int) else offset[b]
        for i in rows:
            for j in columns:
                ahead = j - (i + start)
                # "+ 0": a distance of none is -0.0
                expected = -Alibi(3).slopes * abs(ahead) + 0
                assert torch.equal(alibis.expand(2, -1, -1, -1)[b, :, i, j] + 0, expected)
                found = table[relative._bucket(torch.tensor(ahead))]
                assert torch.equal(relatives.expand(2, -1, -1, -1)[b, :, i, j], found)


def test_biases_add_up():
    numbers = torch.randn(QUERY_LEN, KEY_LEN)
    total = (Alibi(HEADS) + numbers + Alibi(HEADS)).bind(GRID)
    assert isinstance(total, Sum)
    assert repr(total) == f"Alibi(6) + Given(<[1, 1, {QUERY_LEN}, {KEY_LEN}]>) + Alibi(6)"
    rows, columns = range(2, 5), range(1, 9)
    alibi = Alibi(HEADS).bind(GRID).values(rows, columns)
    assert_close(total.values(rows, columns), alibi + numbers[2:5, 1:9] + alibi)


def test_binding_leaves_the_bias_itself_alone():
    bias = Alibi(6)
    bias.bind(GRID)
    assert bias.offset is None
    assert bias.bind(Grid(1, 6, 2, 2)).values(range(2), range(2))[0, 0].diagonal().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_slopes_in_low_precision_round_no_distance_and_reach_no_infinity(dtype):
    far = 70_001  # beyond the largest float16, and no bfloat16
    values = Alibi(slopes=torch.tensor([0.5], dtype=dtype)).bind(Grid(1, 1, 1, far + 1)).values(range(1), range(1))
    assert values.item() == -0.5 * far


# --- learning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, learns) in biases().items() if learns is not None])
def test_the_gradient_of_what_learns_is_the_sum_over_its_cells(name):
    bias, leaf = biases()[name]
    bound = as_bias(bias).bind(GRID)
    values = bound.values(range(QUERY_LEN), range(KEY_LEN)).expand(GRID[:4])
    upstream = torch.randn(values.shape, dtype=torch.float64)
    (found,) = torch.autograd.grad((values.masked_fill(values.isneginf(), 0) * upstream).sum(), leaf)
    expected = torch.zeros_like(leaf).reshape(-1)
    shape = (1,) * (4 - leaf.dim()) + leaf.shape
    for b in range(2):
        for h in range(HEADS):
            for i in range(QUERY_LEN):
                for j in range(KEY_LEN):
                    if values[b, h, i, j] == -math.inf:
                        continue
                    factor = 1.0
                    if name == "alibi that learns":
                        at, factor = h, -abs(j - (i + KEY_LEN - QUERY_LEN))
                    elif name.startswith("relative"):
                        offset = [0, 5][b] if "behind" in name else KEY_LEN - QUERY_LEN
                        at = bound._bucket(torch.tensor(j - (i + offset))) * HEADS + h
                    else:
                        place = [x if n > 1 else 0 for x, n in zip((b, h, i, j), shape, strict=True)]
                        at = torch.tensor(0)
                        for x, n in zip(place, shape, strict=True):
                            at = at * n + x
                    expected[at] += factor * upstream[b, h, i, j]
    assert_close(found.reshape(-1), expected)


# --- wrong use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Alibi(), TypeError, "Alibi: give heads .* or slopes, one of the two"),
        (lambda: Alibi(2, slopes=torch.ones(2)), TypeError, "Alibi: give heads .* or slopes, one of the two"),
        (lambda: Alibi(0), ValueError, "Alibi: heads must be a whole number, 1 or more, got 0"),
        (lambda: Alibi(2.0), ValueError, "Alibi: heads must be a whole number, 1 or more, got 2.0"),
        (lambda: Alibi(slopes=[1.0]), TypeError, r"Alibi: slopes must be a floating tensor \[heads\], got list"),
        (lambda: Alibi(slopes=torch.ones(2, 2)), TypeError, r"Alibi: slopes .* got torch.float32 tensor \[2, 2\]"),
        (lambda: Alibi(slopes=torch.ones(2).long()), TypeError, r"Alibi: slopes .* got torch.int64 tensor \[2\]"),
        (lambda: Alibi(2, offset="x"), TypeError, "Alibi: offset must be an int, or one int per batch index, got 'x'"),
        (lambda: Alibi(2, offset=True), TypeError, "Alibi: offset .* got True"),
        (lambda: Alibi(2, offset=1.5), TypeError, "Alibi: offset .* got 1.5"),
        (lambda: RelativeBias([[1.0]]), TypeError, r"RelativeBias: table must be .* \[buckets, heads\], got list"),
        (lambda: RelativeBias(torch.ones(8)), TypeError, r"RelativeBias: table .* got torch.float32 tensor \[8\]"),
        (lambda: RelativeBias(torch.ones(8, 2).long()), TypeError, r"RelativeBias: table .*int64 tensor \[8, 2\]"),
        (lambda: RelativeBias(torch.ones(3, 2)), ValueError, "RelativeBias: 3 buckets hold 0 single distances"),
        (lambda: RelativeBias(torch.ones(1, 2), bidirectional=False), ValueError, "RelativeBias: 1 buckets hold 0"),
        (lambda: RelativeBias(torch.ones(32, 2), max_distance=8), ValueError, "hold 8 .* less than max_distance=8"),
        (lambda: RelativeBias(torch.ones(32, 2), max_distance=20.5), ValueError, "max_distance must be a whole number"),
        (lambda: as_bias(3.0), TypeError, "must be a floating tensor or a regard bias .*, got 3.0"),
        (lambda: as_bias([1.0]), TypeError, "bias must be a floating tensor or a regard bias .*, got list"),
        (lambda: as_bias(torch.ones(2).bool()), TypeError, "got torch.bool .*; a bool tensor is a mask: mask=Dense"),
        (lambda: as_bias(torch.ones(2).long()), TypeError, "bias must be a floating tensor, got torch.int64"),
        (lambda: as_bias(torch.ones(1, 1, 1, 1, 1)), ShapeError, r"bias has more axes than .*: \[1, 1, 1, 1, 1\]"),
        (lambda: Alibi(2) + 3.0, TypeError, "must be a floating tensor or a regard bias .*, got 3.0"),
    ],
)
def test_a_bias_that_cannot_be_is_refused_when_it_is_made(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("bias", "error", "says"),
    [
        (Alibi(5), ShapeError, r"Alibi: 5 slopes, the scores are \[batch=2, heads=3"),
        (Alibi(3, offset=[1, 2, 3]), ShapeError, "Alibi: offset is for batch=3, the scores are"),
        (RelativeBias(torch.ones(8, 5)), ShapeError, "RelativeBias: the table has heads=5, the scores are"),
        (
            RelativeBias(torch.ones(8, 3, device="meta")),
            ValueError,
            "RelativeBias: table is on meta, the call runs on cpu",
        ),
        (Given(torch.ones(5, 6)), ShapeError, r"bias \[5, 6\] does not broadcast to the scores"),
        (Given(torch.ones(2, 5, 7)), ShapeError, r"bias \[2, 5, 7\] does not broadcast to the scores"),
        (Given(torch.ones(7, device="meta")), ValueError, "bias is on meta, the call runs on cpu"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str | type) else "",
)
def test_a_bias_for_another_call_is_refused_when_it_is_bound_also_inside_a_sum(bias, error, says):
    grid = Grid(2, 3, 5, 7)
    for wrong in (bias, Alibi(3) + bias, bias + Alibi(3)):
        with pytest.raises(error, match=says):
            wrong.bind(grid)


def cells(bias, grid):
    """What a bias adds in a call, every cell: [batch, heads, query_len, key_len]."""
    return bias.bind(grid).values(range(grid.query_len), range(grid.key_len)).expand(grid[:4])


def test_a_bias_is_neither_true_nor_false_and_biases_sum_up():
    for bias in (Alibi(3), Given(torch.zeros(5, 7)), Alibi(3) + Alibi(3), RelativeBias(torch.zeros(8, 3))):
        for wrong in (lambda b: b and b, lambda b: not b, lambda b: b or None):
            with pytest.raises(TypeError, match=r"a bias is neither true nor false. Biases add up with a \+ b"):
                wrong(bias)
    grid, numbers = Grid(2, 3, 5, 7), torch.randn(5, 7)
    for total in (numbers + Alibi(3), sum([Given(numbers), Alibi(3)])):
        assert torch.equal(cells(total, grid), cells(Alibi(3) + numbers, grid))
    for wrong in (1, 0.0, "b", None, Causal(), Alibi, numbers > 0):
        for pair in ((Alibi(3), wrong), (wrong, Alibi(3))):
            with pytest.raises(TypeError, match=r"must be a floating tensor|joined with &"):
                _ = pair[0] + pair[1]


def test_a_bias_that_fits_a_call_in_two_ways_is_refused_until_it_says_which():
    grid, numbers = Grid(5, 3, 5, 7), torch.randn(5, 7)
    for wrong in (Given(numbers), Alibi(3) + numbers):
        with pytest.raises(
            ShapeError, match=r"bias \[5, 7\] may be .* which, bias\[None, None\] or bias\[:, None, None\]"
        ):
            wrong.bind(grid)
    assert torch.equal(cells(Given(numbers[None, None]), grid), numbers.expand(grid[:4]))
    assert torch.equal(cells(Given(numbers[:, None, None]), grid), numbers[:, None, None].expand(grid[:4]))
    numbers = torch.randn(3, 5, 7)
    with pytest.raises(ShapeError, match=r"bias \[3, 5, 7\] may be .* which, bias\[None\] or bias\[:, None\]"):
        Given(numbers).bind(Grid(3, 3, 5, 7))
    with pytest.raises(ShapeError, match=r"bias \[2, 7\] does not .*; if it is \[batch, key_len\]: bias\[:, None, No"):
        Given(numbers[0, :2]).bind(Grid(2, 3, 5, 7))


@pytest.mark.usefixtures("torch_is_faster")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finished_table_is_read_in_place_and_what_it_hides_reaches_nothing(dtype):
    query, key, value = (torch.randn(2, 4, 520, 16, dtype=dtype) for _ in range(3))
    table = torch.randn(1, 4, 520, 520, dtype=dtype)
    table[:, :, :, 7] = -math.inf  # nobody sees this key
    table[:, 1, 5] = -math.inf  # this query sees nothing
    planned = plan(query, key, value, bias=table)
    assert (planned.kernel in ("sdpa", "strips"), planned.quadratic_numbers) == (True, 0)
    exact = attention(*(t.double() for t in (query, key, value)), bias=table.double(), kernel="reference")
    plain = attention(query, key, value, bias=table, kernel="reference")
    for poison in (0.0, math.nan, math.inf):
        key[:, :, 7], value[:, :, 7] = poison, poison
        output = attention(query, key, value, bias=table)
        assert not output[:, 1, 5].any()
        assert_within_budget(output, exact, plain, f"{dtype} {poison}")
    learning = table.detach().requires_grad_()
    attention(query, key.nan_to_num(0, 0), value.nan_to_num(0, 0), bias=learning).sum().backward()
    assert learning.grad.isfinite().all()


@pytest.mark.usefixtures("torch_is_faster")
def test_a_trained_table_is_torchs_fused_operators_where_no_gradient_is_asked_for():
    query, key, value = (torch.randn(1, 8, 520, 16) for _ in range(3))
    table = torch.randn(1, 8, 520, 520, requires_grad=True)
    with torch.no_grad(), torch.profiler.profile() as seen:
        output = attention(query, key, value, bias=table)
    names = [event.name for event in seen.events()]
    assert any("flash_attention" in name or "bmm" in name for name in names)
    assert not any("_math" in name for name in names)  # which makes all scores anew, several times
    assert_close(output, attention(query, key, value, bias=table.detach(), kernel="reference"))
    attention(query, key, value, bias=table).sum().backward()  # like the call before it, but it learns
    assert table.grad is not None
    assert table.grad.any()


@pytest.mark.parametrize("offset", [None, 3, [1, 5]])
@pytest.mark.parametrize(
    "make", [lambda at: Alibi(4, offset=at), lambda at: RelativeBias(torch.randn(32, 4), offset=at)]
)
def test_what_depends_on_distance_alone_is_evaluated_once_per_distance_and_the_same(make, offset):
    bias = make(offset).bind(Grid(2, 4, 30, 41))
    asked = []
    ask, bias.ask = bias.ask, lambda queries, keys: asked.append(len(queries) * len(keys)) or ask(queries, keys)
    for rows, columns in (
        (range(30), range(41)),
        (range(7, 9), range(20, 41)),
        (range(29, 30), range(3)),
        (range(2), range(0)),
    ):
        assert torch.equal(
            bias.values(rows, columns), ask(torch.tensor(list(rows)), torch.tensor(list(columns), dtype=int))
        )
    assert asked == [30 + 41 - 1, 2 + 21 - 1, 3, 0]


def test_a_tile_and_the_sums_along_its_diagonals_are_the_gradients_of_each_other():
    row = torch.randn(1, 2, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(turned_tile(row, 3, 5), row.unfold(-1, 5, 1).flip(-2))
    assert torch.autograd.gradcheck(lambda x: turned_tile(x, 3, 5), [row])
    assert torch.autograd.gradgradcheck(lambda x: turned_tile(x, 3, 5).sin(), [row])


def test_keys_are_looked_at_in_the_backward_pass_alone_and_only_beside_a_bias_that_hides_something(monkeypatch):
    looked = []
    monkeypatch.setattr(engine, "harmless", lambda *tensors: looked.append(tensors) or False)
    query, bias = torch.randn(3, 2, 40, 8, requires_grad=True), torch.randn(1, 2, 40, 40)
    attention(query, query, query, bias=bias, kernel="strips").sum().backward()
    assert not looked
    bias[0, 1, 3, 5] = -math.inf
    output = attention(query, query, query, bias=bias, kernel="strips")
    assert not looked  # the result is looked at instead
    output.sum().backward()
    assert looked


@pytest.mark.parametrize("by_products", [False, True], ids=["by torch's operator", "by products"])
@pytest.mark.parametrize("worse", [0.0, math.nan], ids=["numbers", "and no number"])
def test_what_a_shared_bias_hides_reaches_nothing(monkeypatch, by_products, worse):
    monkeypatch.setattr(engine.products, "pay", lambda *given, **more: by_products)
    query, key, value = torch.randn(3, 3, 2, 40, 8)
    bias = torch.randn(1, 2, 40, 40)
    bias[:, :, :, 7] = bias[:, :, 9] = -math.inf
    bias[0, 0, 0, 0] += worse
    key[:, :, 7] = value[:, :, 7] = query[:, :, 9] = math.inf
    ours, right = (attention(query, key, value, bias=bias, kernel=kernel) for kernel in ("strips", "reference"))
    assert torch.equal(ours.isnan(), right.isnan())
    assert_close(ours.nan_to_num(), right.nan_to_num())
    assert not ours[:, :, 9].any()
    assert not ours[:, 1].isnan().any()

"""Positions: numbers worked by hand, the laws that rotation obeys, and transformers as an outside authority."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.positions import (
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    Sinusoidal,
    YarnScaling,
    inverse_frequencies,
)

LAYOUTS = ["half", "interleaved"]
SCALINGS = [
    None,
    LinearScaling(3.0),
    DynamicScaling(2.0, original_context=7),
    YarnScaling(4.0, original_context=32),
    Llama3Scaling(8.0, 1.0, 4.0, original_context=64),
]


def close(actual: Tensor, expected: Any, *, atol: float = 1e-12, rtol: float = 0.0) -> None:
    """Assert equal shape and values within a tolerance; dtypes may differ."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.to(torch.float64), expected, atol=atol, rtol=rtol)


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(x: Tensor, offset: int, **settings: Any) -> Tensor:
    return Rotary(x.shape[-1], **settings)(x, offset=offset)


def test_the_helper_close_refuses_a_wrong_value_and_a_wrong_shape():
    with pytest.raises(AssertionError):
        close(torch.tensor([1.0]), [1.0 + 1e-6])
    with pytest.raises(AssertionError):
        close(torch.tensor([1.0, 1.0]), [1.0])


# ---------------------------------------------------------------------------------------------------- sinusoidal


def test_sinusoidal_gives_the_numbers_worked_by_hand():
    # dim 4: angles p and p / 100. sin 1 = 0.841471, cos 1 = 0.540302, sin 0.01 = 0.0099998, cos 0.01 = 0.99995.
    close(Sinusoidal(4)(2), [[0, 1, 0, 1], [0.8414710, 0.5403023, 0.0099998, 0.9999500]], atol=1e-7)


def test_sinusoidal_of_an_odd_dim_ends_on_a_sine():
    # dim 3: angles p and p / 10000^(2/3) = p * 0.00215443.
    close(Sinusoidal(3)(1, offset=1), [[0.8414710, 0.5403023, 0.0021544]], atol=1e-7)
    close(Sinusoidal(1)(1, offset=1), [[0.8414710]], atol=1e-7)


@given(dim=st.integers(1, 23), length=st.integers(0, 13), offset=st.integers(0, 211))
@settings(max_examples=40, deadline=None)
def test_sinusoidal_follows_the_formula_at_every_dim_length_and_offset(dim: int, length: int, offset: int):
    def formula(position: int, feature: int) -> float:
        angle = position / 10000 ** ((feature - feature % 2) / dim)
        return math.cos(angle) if feature % 2 else math.sin(angle)

    expected = [[formula(offset + i, j) for j in range(dim)] for i in range(length)]
    got = Sinusoidal(dim).double()(length, offset=offset)
    close(got, torch.tensor(expected, dtype=torch.float64).reshape(length, dim))


def test_sinusoidal_grows_and_keeps_what_it_said():
    positions = Sinusoidal(5)
    before = positions(3)
    after = positions(301)
    assert after.shape == (301, 5)
    assert torch.equal(after[:3], before)
    assert torch.equal(positions(7, offset=290), after[290:297])


def test_sinusoidal_gives_each_row_its_own_offset():
    positions = Sinusoidal(5)
    got = positions(3, offset=torch.tensor([11, 0]))
    assert got.shape == (2, 3, 5)
    assert torch.equal(got[0], positions(3, offset=11))
    assert torch.equal(got[1], positions(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinusoidal_follows_the_dtype_and_is_rounded_once(dtype: torch.dtype):
    exact = Sinusoidal(6).double()(17)
    converted_after_use = Sinusoidal(6)
    converted_after_use(5)
    converted_after_use.to(dtype)
    got = converted_after_use(17)
    assert got.dtype == dtype
    assert torch.equal(got, exact.to(dtype))


def test_sinusoidal_loses_nothing_on_the_way_through_bfloat16():
    positions = Sinusoidal(6)
    before = positions(17)
    assert torch.equal(positions.bfloat16().float()(17), before)


def test_sinusoidal_follows_the_device_before_and_after_its_first_use():
    positions = Sinusoidal(6)
    assert positions.to("meta")(5).device.type == "meta"
    back = positions.to_empty(device="cpu")
    close(back(2)[1, :2], [0.8414710, 0.5403023], atol=1e-7)


def test_what_sinusoidal_returns_may_be_changed_in_place():
    positions = Sinusoidal(4)
    positions(3).fill_(9.0)
    assert positions(3).max() <= 1.0


# ------------------------------------------------------------------------------------------------------- learned


def test_learned_returns_rows_of_its_weight():
    positions = Learned(7, 2)
    assert torch.equal(positions(3), positions.weight[:3])
    assert torch.equal(positions(3, offset=4), positions.weight[4:7])
    by_row = positions(2, offset=torch.tensor([5, 0, 3]))
    assert torch.equal(by_row, torch.stack([positions.weight[5:7], positions.weight[:2], positions.weight[3:5]]))


def test_learned_starts_at_a_standard_deviation_of_two_hundredths():
    torch.manual_seed(0)
    weight = Learned(101, 103).weight
    assert abs(weight.std().item() - 0.02) < 0.001
    assert abs(weight.mean().item()) < 0.001


def test_learned_trains_exactly_the_rows_it_returned():
    positions = Learned(5, 3)
    positions(2, offset=1).sum().backward()
    assert positions.weight.grad is not None
    close(positions.weight.grad, [[0] * 3, [1] * 3, [1] * 3, [0] * 3, [0] * 3])


@pytest.mark.parametrize("offset", [5, torch.tensor([0, 5])])
def test_learned_refuses_positions_that_it_has_no_vector_for(offset: int | Tensor):
    with pytest.raises(ValueError, match=r"context_length=7: offset=5 plus length=3 ends at 8"):
        Learned(7, 2)(3, offset=offset)


# ------------------------------------------------------------------------------------- rotary: numbers and errors


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        # head_dim 4, theta 100: frequencies 1 and 0.1. cos 1, sin 1 = 0.5403023, 0.8414710; cos 0.1, sin 0.1 =
        # 0.9950042, 0.0998334. x = (1, 2, 3, 4); half pairs (1, 3) and (2, 4), interleaved (1, 2) and (3, 4).
        ("half", [-1.9841106, 1.5906747, 2.4623779, 4.1796835]),
        ("interleaved", [-1.1426397, 1.9220756, 2.5856789, 4.2795170]),
    ],
)
def test_rotary_gives_the_numbers_worked_by_hand(layout: str, expected: list[float]):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    close(turned(x, 1, theta=100.0, layout=layout).flatten(), expected, atol=1e-7)
    assert torch.equal(turned(x, 0, theta=100.0, layout=layout), x)


def test_partial_rotary_leaves_the_other_features_alone():
    x = random(2, 3, 5, 11)
    got = turned(x, 13, rotary_dim=4)
    assert torch.equal(got[..., 4:], x[..., 4:])
    close(got[..., :4], turned(x[..., :4], 13))


def test_rotary_keeps_the_dtype_of_its_input():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert Rotary(4)(torch.ones(1, 1, 3, 4, dtype=dtype)).dtype == dtype


def test_rotary_does_not_change_its_input():
    x = random(1, 2, 3, 4)
    before = x.clone()
    Rotary(4)(x, offset=5)
    assert torch.equal(x, before)


def test_rotary_takes_a_transposed_input_and_an_empty_one():
    x = random(2, 5, 3, 4).transpose(1, 2)
    close(Rotary(4)(x), Rotary(4)(x.contiguous()))
    assert Rotary(4)(x[:, :, :0]).shape == (2, 3, 0, 4)
    assert Rotary(4)(x[:0], offset=torch.zeros(0, dtype=torch.int64)).shape == (0, 3, 5, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotary(5), "rotary_dim must be even.*rotary_dim=5"),
        (lambda: Rotary(8, rotary_dim=3), "rotary_dim must be even.*rotary_dim=3"),
        (lambda: Rotary(8, rotary_dim=10), "at most head_dim.*rotary_dim=10.*head_dim=8"),
        (lambda: Rotary(8, rotary_dim=0), "rotary_dim must be a whole number, 2 or more, got 0"),
        (lambda: Rotary(0), "head_dim must be a whole number, 1 or more, got 0"),
        (lambda: Rotary(8, theta=1.0), "theta must be a finite number above 1, got 1.0"),
        (lambda: Rotary(8, layout="neox"), 'layout must be "half" or "interleaved", got \'neox\''),
        (lambda: LinearScaling(0.5), "LinearScaling: factor must be 1 or more, got 0.5"),
        (lambda: LinearScaling(math.nan), "factor must be a finite number"),
        (lambda: DynamicScaling(0.5, 8), "DynamicScaling: factor must be 1 or more"),
        (lambda: DynamicScaling(2.0, 0), "original_context must be a whole number, 1 or more, got 0"),
        (lambda: YarnScaling(0.5, 8), "YarnScaling: factor must be 1 or more"),
        (lambda: YarnScaling(2.0, 0), "original_context must be a whole number, 1 or more, got 0"),
        (lambda: YarnScaling(2.0, 8, beta_fast=1.0, beta_slow=2.0), "beta_fast must be above beta_slow"),
        (lambda: YarnScaling(2.0, 8, beta_slow=0.0), "beta_slow must be a finite number above 0, got 0.0"),
        (lambda: YarnScaling(2.0, 8, mscale=1.0), "mscale and mscale_all_dim go together"),
        (lambda: Llama3Scaling(0.5, 1.0, 4.0, 8), "Llama3Scaling: factor must be 1 or more"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 8), "high_freq_factor must be above low_freq_factor"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_context must be a whole number, 1 or more, got 0"),
        (lambda: Sinusoidal(0), "dim must be a whole number, 1 or more, got 0"),
        (lambda: Learned(0, 3), "context_length must be a whole number, 1 or more, got 0"),
        (lambda: Learned(3, 0), "dim must be a whole number, 1 or more, got 0"),
        (lambda: Sinusoidal(3)(-1), "length must be a whole number, 0 or more, got -1"),
        (lambda: Sinusoidal(3)(2, offset=-1), "Sinusoidal: offset must be a whole number, 0 or more, got -1"),
        (
            lambda: Learned(3, 3)(2, offset=torch.tensor([0, -1])),
            "Learned: offset must be a whole number, 0 or more, got -1",
        ),
        (lambda: Sinusoidal(3)(2, offset=torch.tensor(1)), r"must be \[batch\].*got \[\]"),
        (lambda: Rotary(8)(torch.ones(1, 1, 3, 6)), r"head_dim=8\], got \[1, 1, 3, 6\]"),
        (lambda: Rotary(8)(torch.ones(1, 3, 8)), r"head_dim=8\], got \[1, 3, 8\]"),
        (
            lambda: Rotary(4)(torch.ones(1, 1, 3, 4), offset=-2),
            "Rotary: offset must be a whole number, 0 or more, got -2",
        ),
        (
            lambda: Rotary(4)(torch.ones(2, 1, 3, 4), offset=torch.tensor([3, -2])),
            "offset must be a whole number, 0 or more, got -2",
        ),
        (lambda: Rotary(4)(torch.ones(2, 1, 3, 4), offset=torch.tensor([3])), r"\[batch=2\].*got \[1\]"),
        (lambda: Rotary(4)(torch.ones(2, 1, 3, 4), offset=torch.tensor([[3], [3]])), r"\[batch=2\].*got \[2, 1\]"),
        (lambda: Rotary(8.0), "head_dim must be a whole number, 1 or more, got 8.0"),
        (lambda: Rotary(8, rotary_dim=4.0), "rotary_dim must be a whole number, 2 or more, got 4.0"),
        (lambda: DynamicScaling(2.0, 8.0), "original_context must be a whole number, 1 or more, got 8.0"),
        (lambda: Rotary(4)(torch.ones(1, 1, 3, 4), offset=1.0), "offset must be a whole number, 0 or more, got 1.0"),
        (lambda: Rotary(4)(torch.ones(1, 1, 3, 4), offset=True), "offset must be a whole number, 0 or more, got True"),
        (lambda: Sinusoidal(3)(2.0), "length must be a whole number, 0 or more, got 2.0"),
    ],
)
def test_a_bad_value_is_refused_by_name(build: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rotary(8, theta="big"), "theta must be a number, got 'big'"),
        (lambda: Rotary(8, scaling="linear"), "scaling must be a Scaling such as.*'linear'"),
        (lambda: LinearScaling(None), "LinearScaling: factor must be a number, got None"),
        (lambda: YarnScaling(2.0, 8, attention_factor="big"), "attention_factor must be a number, got 'big'"),
        (lambda: Rotary(4)(torch.ones(1, 1, 3, 4), offset=torch.tensor([1.0])), "tensor of torch.float32"),
        (lambda: Rotary(4)(torch.ones(1, 1, 3, 4), offset=torch.tensor([True])), "tensor of torch.bool"),
        (lambda: Rotary(4)(torch.ones(1, 1, 3, 4, dtype=torch.int64)), "floating point, got torch.int64"),
    ],
)
def test_a_wrong_type_is_refused_by_name(build: Callable[[], object], message: str):
    with pytest.raises(TypeError, match=message):
        build()


def test_a_whole_number_of_numpy_is_a_size_or_an_offset():
    numpy = pytest.importorskip("numpy")
    x = random(1, 1, 3, 4)
    close(Rotary(numpy.int64(4))(x, offset=numpy.int32(5)), Rotary(4)(x, offset=5))
    close(Sinusoidal(numpy.int64(4))(3, offset=numpy.int64(2)), Sinusoidal(4)(3, offset=2))


# --------------------------------------------------------------------------------------------------- rotary: laws


@given(
    pairs=st.integers(1, 7),
    rest=st.integers(0, 5),
    layout=st.sampled_from(LAYOUTS),
    scaling=st.sampled_from([None, *[s for s in SCALINGS if not isinstance(s, DynamicScaling)]]),
    query_position=st.integers(0, 100),
    key_position=st.integers(0, 100),
    shift=st.integers(1, 5000),
)
@settings(max_examples=60, deadline=None)
def test_a_score_depends_on_the_distance_alone(
    pairs: int,
    rest: int,
    layout: str,
    scaling: Scaling | None,
    query_position: int,
    key_position: int,
    shift: int,
):
    rotary = Rotary(2 * pairs + rest, rotary_dim=2 * pairs, layout=layout, scaling=scaling)
    query, key = random(1, 1, 1, 2 * pairs + rest, seed=1), random(1, 1, 1, 2 * pairs + rest, seed=2)

    def score(m: int, n: int) -> Tensor:
        return (rotary(query, offset=m) * rotary(key, offset=n)).sum()

    close(score(query_position + shift, key_position + shift), score(query_position, key_position), atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_score_does_depend_on_the_distance(layout: str):
    rotary = Rotary(6, layout=layout)
    query, key = random(1, 1, 1, 6, seed=1), random(1, 1, 1, 6, seed=2)
    near = (rotary(query, offset=5) * rotary(key, offset=4)).sum()
    far = (rotary(query, offset=5) * rotary(key, offset=2)).sum()
    assert abs(near - far) > 1e-3


@given(
    pairs=st.integers(1, 7),
    rest=st.integers(0, 5),
    scaling=st.sampled_from(SCALINGS),
    length=st.integers(1, 13),
    offset=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_the_layouts_differ_by_a_permutation_of_the_features(
    pairs: int, rest: int, scaling: Scaling | None, length: int, offset: int
):
    x = random(2, 3, length, 2 * pairs + rest)
    firsts = torch.arange(0, 2 * pairs, 2)
    order = torch.cat((firsts, firsts + 1, torch.arange(2 * pairs, 2 * pairs + rest)))
    settings = {"rotary_dim": 2 * pairs, "scaling": scaling}
    interleaved = turned(x, offset, layout="interleaved", **settings)
    half = turned(x[..., order], offset, layout="half", **settings)
    close(interleaved[..., order], half)


@given(pairs=st.integers(1, 9), rest=st.integers(0, 3), layout=st.sampled_from(LAYOUTS), offset=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_rotation_keeps_the_norm(pairs: int, rest: int, layout: str, offset: int):
    x = random(2, 3, 5, 2 * pairs + rest)
    got = turned(x, offset, rotary_dim=2 * pairs, layout=layout)
    close(got.norm(dim=-1), x.norm(dim=-1))


@given(
    length=st.integers(2, 200),
    cuts=st.lists(st.integers(0, 199), max_size=5),
    layout=st.sampled_from(LAYOUTS),
    scaling=st.sampled_from([s for s in SCALINGS if not isinstance(s, DynamicScaling)]),
)
@settings(max_examples=60, deadline=None)
def test_pieces_with_their_offsets_are_the_slices_of_the_whole_in_any_order(
    length: int, cuts: list[int], layout: str, scaling: Scaling | None
):
    x = random(1, 2, length, 6)
    whole = turned(x, 0, layout=layout, scaling=scaling)
    one_module = Rotary(6, layout=layout, scaling=scaling)
    for start in cuts:
        start %= length
        stop = min(length, start + 1 + start % 3)
        close(one_module(x[:, :, start:stop], offset=start), whole[:, :, start:stop])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_each_row_of_a_batch_can_stand_at_its_own_offset(layout: str, dtype: torch.dtype):
    rotary = Rotary(6, layout=layout, rotary_dim=4)
    x = random(3, 2, 5, 6)
    got = rotary(x, offset=torch.tensor([11, 0, 201], dtype=dtype))
    for row, offset in enumerate((11, 0, 201)):
        close(got[row : row + 1], turned(x[row : row + 1], offset, layout=layout, rotary_dim=4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_right(layout: str):
    x = random(2, 3, 5, 6).requires_grad_()
    offset = torch.tensor([3, 0])
    rotary = Rotary(6, rotary_dim=4, layout=layout, scaling=YarnScaling(4.0, original_context=32))
    assert torch.autograd.gradcheck(rotary, (x,))
    assert torch.autograd.gradcheck(lambda x: rotary(x, offset=offset), (x,))
    assert torch.autograd.gradgradcheck(rotary, (x,))


# ---------------------------------------------------------------------------------------- rotary: precision, tables


@pytest.mark.parametrize("offset", [0, 100_000, torch.tensor([100_000, 7])])
@pytest.mark.parametrize("convert", ["bfloat16", "half"])
def test_a_low_precision_module_turns_as_exactly_as_a_float32_one_far_out(offset: int | Tensor, convert: str):
    dtype = {"bfloat16": torch.bfloat16, "half": torch.float16}[convert]
    rotary = Rotary(64)
    rotary(torch.ones(1, 1, 3, 64))  # a table exists before the module is converted
    rotary = getattr(rotary, convert)()
    x = random(2, 3, 5, 64, dtype=dtype)
    exact = Rotary(64)(x.double(), offset=offset)
    got = rotary(x, offset=offset)
    # One rounding of the result and nothing else: half a unit in the last place, and the float32 error besides.
    half_unit = torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((got.double() - exact).abs() <= half_unit * 1.001 + 1e-6).all()
    close(rotary.float()(x.float(), offset=offset), exact, atol=2e-6)
    close(rotary.double()(x.double(), offset=offset), exact)


def test_float64_angles_are_right_to_float64_far_out():
    got = turned(torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2), 1_000_000)
    close(got.flatten(), [math.cos(1_000_000), math.sin(1_000_000)])


def test_inputs_of_every_dtype_can_take_turns():
    rotary = Rotary(8)
    x = random(1, 2, 3, 8)
    exact = turned(x, 99_999)
    for dtype, atol in ((torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)):
        close(rotary(x.to(dtype), offset=99_999), exact, atol=atol)


class Counting(Scaling):
    """No scaling at all, but it counts how often frequencies were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        self.asked += 1
        return inverse_frequencies(rotary_dim, theta), 1.0


def test_cosines_and_sines_are_computed_seldom():
    scaling = Counting()
    rotary = Rotary(4, scaling=scaling)
    x = random(1, 1, 1000, 4)
    whole = turned(x, 0)
    rotary(x[:, :, :10])
    rotary(x[:, :, :10])
    rotary(x[:, :, :7])
    close(rotary(x[:, :, 2:9], offset=2), whole[:, :, 2:9])
    assert scaling.asked == 1
    for position in range(10, 1000):
        close(rotary(x[:, :, position : position + 1], offset=position), whole[:, :, position : position + 1])
    assert scaling.asked < 15


def test_a_leap_does_not_fill_the_gap_that_it_leaves():
    rotary = Rotary(2)
    east = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    rotary(east)
    far = 10**12  # a table up to here would need 32 terabytes
    close(rotary(east, offset=far).flatten(), [math.cos(far), math.sin(far)])
    close(rotary(east, offset=1).flatten(), [math.cos(1), math.sin(1)])


def test_positional_tables_stay_out_of_the_state_dict_and_learned_ones_in():
    rotary, sinusoidal, learned = Rotary(4), Sinusoidal(4), Learned(5, 4)
    rotary(torch.ones(1, 1, 3, 4))
    sinusoidal(3)
    assert not rotary.state_dict()
    assert not sinusoidal.state_dict()
    assert list(learned.state_dict()) == ["weight"]


def test_a_table_made_in_inference_mode_serves_training_afterwards():
    rotary, sinusoidal = Rotary(4), Sinusoidal(4)
    x = random(1, 1, 3, 4).requires_grad_()
    with torch.inference_mode():
        rotary(x)
        sinusoidal(3)
    rotary(x).sum().backward()
    scale = torch.ones(4, requires_grad=True)
    (scale * sinusoidal(3)).sum().backward()
    assert not sinusoidal.table.is_inference()
    assert x.grad is not None
    assert scale.grad is not None


def test_a_module_built_on_meta_or_copied_is_right():
    with torch.device("meta"):
        built = Rotary(4)
    x = random(1, 2, 3, 4)
    assert built(x.to("meta"), offset=5).device.type == "meta"
    close(built.to_empty(device="cpu")(x, offset=5), turned(x, 5))
    close(copy.deepcopy(built)(x, offset=5), turned(x, 5))


def test_modules_print_what_they_are():
    assert repr(Sinusoidal(4)) == "Sinusoidal(dim=4)"
    assert repr(Learned(5, 4)) == "Learned(context_length=5, dim=4)"
    assert repr(Rotary(4)) == "Rotary(4, theta=10000.0, layout='half')"
    assert (
        repr(Rotary(8, rotary_dim=4, layout="interleaved", scaling=LinearScaling(2.0)))
        == "Rotary(8, theta=10000.0, rotary_dim=4, layout='interleaved', scaling=LinearScaling(factor=2.0))"
    )


# ------------------------------------------------------------------------------------------------------- scalings


def test_linear_scaling_gives_the_numbers_worked_by_hand():
    frequencies, attention_factor = LinearScaling(2.0).frequencies(4, 100.0, length=1)
    close(frequencies, [0.5, 0.05])
    assert attention_factor == 1.0
    x = random(1, 2, 1, 4)
    close(turned(x, 10, scaling=LinearScaling(2.0)), turned(x, 5))


def test_dynamic_scaling_gives_the_numbers_worked_by_hand():
    # stretch = 2 * 16 / 8 - 1 = 3, theta = 100 * 3 ** (4 / 2) = 900, so the last pair turns by 900 ** (-1/2).
    scaling = DynamicScaling(2.0, original_context=8)
    close(scaling.frequencies(4, 100.0, length=16)[0], [1.0, 1 / 30])
    close(scaling.frequencies(4, 100.0, length=8)[0], [1.0, 0.1])
    close(scaling.frequencies(2, 100.0, length=99)[0], [1.0])
    # A factor of 1 still stretches, by 16 / 8: theta = 100 * 2 ** 2.
    close(DynamicScaling(1.0, original_context=8).frequencies(4, 100.0, length=16)[0], [1.0, 1 / 20])


def test_yarn_scaling_gives_the_numbers_worked_by_hand():
    # pair(32) = 8 ln(2048 / 201.06) / (2 ln 10000) = 1.008, floor 1; pair(1) = 2.513, ceil 3; ramp 0, 0, 1/2, 1.
    # plain 1, 0.1, 0.01, 0.001; attention 1 + 0.1 ln 4 = 1.1386294.
    frequencies, attention_factor = YarnScaling(4.0, 2048).frequencies(8, 10000.0, length=1)
    close(frequencies, [1.0, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.00025])
    assert attention_factor == pytest.approx(1.1386294, abs=1e-7)


def test_yarns_attention_factor_can_be_given_or_weighted():
    assert YarnScaling(4.0, 32, attention_factor=1.5).frequencies(4, 100.0, 1)[1] == 1.5
    # (1 + 0.0707 ln 40) / (1 + 0.1 ln 40) = 1.2608048 / 1.3688879
    weighted = YarnScaling(40.0, 32, mscale=0.707, mscale_all_dim=1.0)
    assert weighted.frequencies(4, 100.0, 1)[1] == pytest.approx(0.9210432, abs=1e-6)
    assert YarnScaling(40.0, 32, mscale=0.707, mscale_all_dim=0.707).frequencies(4, 100.0, 1)[1] == 1.0


def test_yarns_attention_factor_multiplies_what_turns_and_nothing_else():
    x = random(1, 2, 3, 6)
    plain = turned(x, 5, rotary_dim=4, scaling=YarnScaling(4.0, 32, attention_factor=1.0))
    sharpened = turned(x, 5, rotary_dim=4, scaling=YarnScaling(4.0, 32, attention_factor=1.5))
    close(sharpened[..., :4], plain[..., :4] * 1.5)
    assert torch.equal(sharpened[..., 4:], x[..., 4:])


@pytest.mark.parametrize(
    ("original_context", "last"),
    [
        # theta 10000, rotary_dim 4: the second pair has frequency 0.01, a wave of 628.3 tokens. It turns
        # 400 / 628.3 < 1 time: the whole factor; 1000 / 628.3 = 1.59 times: blend (1.5915494 - 1) / 3 = 0.1971831;
        # 2600 / 628.3 > 4 times: as it was.
        (400, 0.01 / 8),
        (1000, 0.01 * ((1 - 0.1971831) / 8 + 0.1971831)),
        (2600, 0.01),
    ],
)
def test_llama3_scaling_gives_the_numbers_worked_by_hand(original_context: int, last: float):
    frequencies, attention_factor = Llama3Scaling(8.0, 1.0, 4.0, original_context).frequencies(4, 10000.0, length=1)
    close(frequencies, [1.0, last], atol=1e-9)
    assert attention_factor == 1.0


@pytest.mark.parametrize("scaling", SCALINGS[1:])
@given(rotary_dim=st.integers(1, 40).map(lambda pairs: 2 * pairs), length=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_a_scaling_only_ever_slows_and_keeps_the_order_of_the_pairs(scaling: Scaling, rotary_dim: int, length: int):
    frequencies, _ = scaling.frequencies(rotary_dim, 10000.0, length)
    plain = inverse_frequencies(rotary_dim, 10000.0)
    assert frequencies.shape == plain.shape
    assert frequencies.dtype == torch.float64
    assert (frequencies <= plain * (1 + 1e-12)).all()
    assert (frequencies > 0).all()
    assert (frequencies.diff() < 0).all()


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(1.0),
        YarnScaling(1.0, 32),
        Llama3Scaling(1.0, 1.0, 4.0, 64),
        DynamicScaling(3.0, 8),
    ],
)
def test_a_factor_of_one_or_a_length_within_the_context_changes_nothing(scaling: Scaling):
    x = random(1, 2, 8, 12)
    close(turned(x, 0, scaling=scaling), turned(x, 0))


@given(scaling=st.sampled_from(SCALINGS[1:]), length=st.integers(1, 60))
def test_the_deciding_length_has_the_same_frequencies(scaling: Scaling, length: int):
    deciding = scaling.deciding_length(length)
    assert deciding <= length
    close(scaling.frequencies(6, 100.0, deciding)[0], scaling.frequencies(6, 100.0, length)[0])


def test_dynamic_scaling_takes_the_length_of_each_call_and_forgets_the_last_one():
    scaling = DynamicScaling(2.0, original_context=7)
    rotary = Rotary(6, scaling=scaling)
    x = random(1, 2, 23, 6)
    for length in (5, 7, 8, 23, 9, 3):
        expected = turned(x[:, :, :length], 0, scaling=scaling)
        close(rotary(x[:, :, :length]), expected)
        # One token at the end of the same length turns with the same frequencies.
        close(rotary(x[:, :, length - 1 : length], offset=length - 1), expected[:, :, -1:])
    assert (
        turned(x, 0, scaling=scaling)[:, :, 5] - turned(x[:, :, :7], 0, scaling=scaling)[:, :, 5]
    ).abs().max() > 0.01


def test_the_row_that_reaches_furthest_decides_dynamic_scaling_for_the_batch():
    scaling = DynamicScaling(2.0, original_context=7)
    x = random(2, 3, 2, 6)
    got = Rotary(6, scaling=scaling)(x, offset=torch.tensor([3, 19]))
    long = random(1, 3, 21, 6, seed=5)
    long[:, :, 3:5] = x[:1]
    long[:, :, 19:21] = x[1:]
    whole = turned(long, 0, scaling=scaling)
    close(got[:1], whole[:, :, 3:5])
    close(got[1:], whole[:, :, 19:21])


# --------------------------------------------------------------------------------------------- against transformers


def llama_config(theta: float, parameters: dict[str, Any], head_dim: int = 12, context: int = 64) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_theta": theta, **parameters},
    )


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
AUTHORITY: list[tuple[Scaling, dict[str, Any]]] = [
    (LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}),
    (DynamicScaling(2.0, 64), {"rope_type": "dynamic", "factor": 2.0}),
    (DynamicScaling(8.0, 64), {"rope_type": "dynamic", "factor": 8.0}),
    (YarnScaling(2.0, 32), YARN | {"factor": 2.0}),
    (YarnScaling(1.0, 32), YARN | {"factor": 1.0}),
    (YarnScaling(40.0, 4096), YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}),
    (YarnScaling(16.0, 4), YARN | {"factor": 16.0, "original_max_position_embeddings": 4}),
    (YarnScaling(2.0, 32, truncate=False), YARN | {"factor": 2.0, "truncate": False}),
    (YarnScaling(2.0, 32, beta_fast=5.0, beta_slow=0.5), YARN | {"factor": 2.0, "beta_fast": 5.0, "beta_slow": 0.5}),
    (YarnScaling(2.0, 32, attention_factor=1.25), YARN | {"factor": 2.0, "attention_factor": 1.25}),
    (
        YarnScaling(40.0, 32, mscale=0.707, mscale_all_dim=1.2),
        YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    ),
    (Llama3Scaling(8.0, 1.0, 4.0, 32), LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 32}),
    (
        Llama3Scaling(32.0, 1.0, 4.0, 8192),
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    ),
]


@pytest.mark.parametrize(("scaling", "parameters"), AUTHORITY, ids=lambda value: repr(value)[:60])
@pytest.mark.parametrize(("head_dim", "theta"), [(12, 500.0), (128, 500000.0), (34, 10000.0)])
def test_scaled_frequencies_are_those_of_transformers(
    scaling: Scaling, parameters: dict[str, Any], head_dim: int, theta: float
):
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama_config(theta, parameters, head_dim)
    for length in (1, 5, 63, 64, 65, 200, 4096):
        expected, expected_factor = rope.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
        frequencies, attention_factor = scaling.frequencies(head_dim, theta, length)
        close(frequencies, expected, rtol=3e-6)  # theirs are float32
        assert attention_factor == pytest.approx(expected_factor, rel=1e-12)


def test_partial_frequencies_are_those_of_transformers():
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama_config(500.0, YARN | {"factor": 2.0, "partial_rotary_factor": 0.5}, head_dim=24)
    expected, _ = rope.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    close(Rotary(24, rotary_dim=12, theta=500.0, scaling=YarnScaling(2.0, 32)).frequencies(1)[0], expected, rtol=3e-6)


@pytest.mark.parametrize(
    ("scaling", "parameters"), [(None, {"rope_type": "default"}), *AUTHORITY], ids=lambda value: repr(value)[:60]
)
def test_layout_half_is_llamas_rotary_embedding(scaling: Scaling | None, parameters: dict[str, Any]):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaRotaryEmbedding(llama_config(500.0, parameters))
    rotary = Rotary(12, theta=500.0, scaling=scaling)
    for length in (5, 64, 71, 103):
        query = random(2, 3, length, 12, dtype=torch.float32, seed=1)
        key = random(2, 3, length, 12, dtype=torch.float32, seed=2)
        cosine, sine = theirs(query, torch.arange(length)[None])
        expected_query, expected_key = llama.apply_rotary_pos_emb(query, key, cosine, sine)
        # Their float32 angles at position 100 are off by up to 1e-5.
        close(rotary(query), expected_query, atol=1e-4)
        close(rotary(key), expected_key, atol=1e-4)


def test_layout_interleaved_is_gptjs_partial_rotary():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = random(2, 3, 17, 20, dtype=torch.float32)
    sine, cosine = gptj.create_sinusoidal_positions(17, 8).expand(2, -1, -1).chunk(2, dim=-1)
    by_length = x.transpose(1, 2)
    expected = torch.cat((gptj.apply_rotary_pos_emb(by_length[..., :8], sine, cosine), by_length[..., 8:]), dim=-1)
    close(turned(x, 0, rotary_dim=8, layout="interleaved"), expected.transpose(1, 2), atol=1e-5)


# ------------------------------------------------------------------------------------------------------------ GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_follow_the_model_to_the_gpu(layout: str):
    x = random(2, 3, 5, 8)
    offset = torch.tensor([3, 100_000])
    rotary, sinusoidal, learned = Rotary(8, layout=layout), Sinusoidal(7), Learned(9, 4)
    expected, waves = rotary(x, offset=offset), sinusoidal(5)
    for module in (rotary, sinusoidal, learned):
        module.cuda()
    assert torch.equal(sinusoidal(5).cpu(), waves)
    assert learned(3, offset=offset[:1]).device.type == "cuda"
    close(rotary(x.cuda(), offset=offset).cpu(), expected)
    close(rotary(x.cuda(), offset=offset.cuda()).cpu(), expected)
    close(rotary(x.cuda(), offset=3).cpu()[:1], expected[:1])
    close(rotary.bfloat16()(x.cuda().bfloat16(), offset=offset).cpu(), expected, atol=5e-2)

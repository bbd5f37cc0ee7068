"""The comparing helpers must fail on wrong values: a comparison that cannot fail proves nothing."""

import math

import pytest
import torch

from comparing import TOLERANCE, assert_close, assert_same_cells, assert_within_budget, assert_zero

RIGHT = torch.tensor([[1.0, -2.0, 3.0], [0.0, -math.inf, 5.0]], dtype=torch.float64)


def changed(value, row=0, column=1, dtype=torch.float64):
    wrong = RIGHT.clone()
    wrong[row, column] = value
    return wrong.to(dtype)


def test_assert_close_accepts_what_is_close():
    assert_close(RIGHT, RIGHT)
    assert_close(changed(-2.0 + 1e-12), RIGHT)
    assert_close(torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        changed(-2.0 + 1e-8),
        changed(2.0),
        changed(math.nan),
        changed(math.inf),
        changed(-1e30, 1, 1),
        changed(math.inf, 1, 1),
        RIGHT.float(),
        RIGHT[:1],
        RIGHT[None],
        RIGHT.tolist(),
    ],
    ids=["a little", "sign", "nan", "inf", "finite for -inf", "inf for -inf", "dtype", "shape", "axes", "no tensor"],
)
def test_assert_close_fails_on(wrong):
    with pytest.raises(AssertionError):
        assert_close(wrong, RIGHT)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_assert_close_fails_on_one_wrong_number_in_every_dtype(dtype):
    right = torch.linspace(-1, 1, 101).to(dtype)
    wrong = right.clone()
    wrong[50] = 2 * TOLERANCE[dtype]
    with pytest.raises(AssertionError, match="off by"):
        assert_close(wrong, right)


def test_assert_close_does_not_take_a_nan_for_a_nan():
    with pytest.raises(AssertionError, match="itself is NaN"):
        assert_close(changed(math.nan), changed(math.nan))


def test_the_budget_is_twice_the_plain_error_plus_one_rounding():
    exact = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.0, 4.001], dtype=torch.float32)
    assert_within_budget(torch.tensor([1.0, 2.0019, 4.0]), exact, plain)
    with pytest.raises(AssertionError, match=r"allowed 0\.002"):
        assert_within_budget(torch.tensor([1.0, 2.0021, 4.0]), exact, plain)


def test_a_plain_computation_without_error_still_leaves_one_rounding():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    assert_within_budget(torch.tensor([1.0, 2.0 + 2 * eps]), exact, exact.float())
    with pytest.raises(AssertionError):
        assert_within_budget(torch.tensor([1.0, 2.0 + 4 * eps]), exact, exact.float())


def test_the_rounding_of_lse_may_be_told_to_the_budget_and_no_more_than_that():
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    lse = torch.tensor([-6.0, math.inf, 3.0])
    eps = torch.finfo(torch.float32).eps
    assert_within_budget(torch.tensor([1.0, 2.0 + 8 * eps]), exact, exact.float(), lse=lse)
    with pytest.raises(AssertionError):
        assert_within_budget(torch.tensor([1.0, 2.0 + 10 * eps]), exact, exact.float(), lse=lse)
    with pytest.raises(AssertionError):
        assert_within_budget(torch.tensor([1.0, 2.0 + 8 * eps]), exact, exact.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_the_budget_fails_on_numbers_that_are_not_finite(value):
    exact, plain = RIGHT, RIGHT.to(torch.bfloat16)
    assert_within_budget(plain, exact, plain)
    with pytest.raises(AssertionError):
        assert_within_budget(changed(value, dtype=torch.bfloat16), exact, plain)


def test_the_budget_fails_on_a_finite_number_in_the_place_of_minus_inf():
    plain = RIGHT.to(torch.bfloat16)
    with pytest.raises(AssertionError, match="not inf"):
        assert_within_budget(changed(-1e9, 1, 1, torch.bfloat16), RIGHT, plain)


def test_the_budget_wants_a_float64_truth_and_one_dtype():
    with pytest.raises(AssertionError, match="must be float64"):
        assert_within_budget(RIGHT.float(), RIGHT.float(), RIGHT.float())
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_budget(RIGHT.float(), RIGHT, RIGHT.half())


def test_assert_same_cells_fails_on_one_wrong_cell():
    right = torch.ones(2, 3, dtype=torch.bool)
    assert_same_cells(torch.ones(1, 1, 1, 3, dtype=torch.bool), right)
    wrong = right.clone()
    wrong[1, 2] = False
    with pytest.raises(AssertionError, match=r"1 cells differ, the first at \[1, 2\]"):
        assert_same_cells(wrong, right)
    with pytest.raises(AssertionError, match="dtypes"):
        assert_same_cells(right.float(), right)


@pytest.mark.parametrize("value", [1e-30, math.nan, -1.0], ids=str)
def test_assert_zero_fails_on(value):
    assert_zero(torch.tensor([0.0, -0.0]))
    with pytest.raises(AssertionError):
        assert_zero(torch.tensor([0.0, value]))

"""Helpers that compare. Each of them asserts, and test_comparing.py holds each of them to failing on a wrong value."""

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""How far two ways to the same number may be apart, relative to the largest number of the tensor."""


def assert_close(actual: Tensor, expected: Tensor, what: str = "value", *, tolerance: float | None = None) -> None:
    """Same shape, dtype and numbers, up to `tolerance` times the largest finite number; inf only at the same place."""
    assert isinstance(actual, Tensor), f"{what}: expected a tensor, got {type(actual).__name__}"
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    actual, expected = actual.detach(), expected.detach()
    if actual.numel() == 0:
        return
    far, size = (actual - expected).abs(), expected.abs()
    if not (far.max().isfinite() and size.max().isfinite()):
        infinite = _where_both_are_infinite(actual, expected, what)
        far, size = far.masked_fill(infinite, 0.0), size.masked_fill(infinite, 0.0)
    allowed = (TOLERANCE[actual.dtype] if tolerance is None else tolerance) * max(1.0, float(size.max()))
    assert float(far.max()) <= allowed, (
        f"{what}: off by {float(far.max()):.3g} (allowed {allowed:.3g}) "
        f"at {_place(far)}, {_both(actual, expected, far)}"
    )


def _where_both_are_infinite(actual: Tensor, expected: Tensor, what: str) -> Tensor:
    """Where both numbers are the same infinity; they are infinite nowhere else, and NaN nowhere."""
    assert not expected.isnan().any(), f"{what}: the expected value itself is NaN"
    assert not actual.isnan().any(), f"{what}: NaN"
    infinite = expected.isinf()
    assert torch.equal(actual.isinf(), infinite), f"{what}: inf at other places"
    assert torch.equal(actual[infinite], expected[infinite]), f"{what}: inf of another sign"
    return infinite


def assert_within_budget(
    actual: Tensor, exact: Tensor, plain: Tensor, what: str = "value", *, lse: Tensor | None = None
) -> None:
    """Error against float64 at most twice that of the plain computation in the same dtype, plus eps times the largest.

        max|actual - exact| <= 2 max|plain - exact| + eps max|exact|

    Args:
        actual: what is judged, in some dtype.
        exact: the truth, float64.
        plain: `reference` in the dtype of `actual`.
        lse: of the call, where `actual` is the gradient of a query, or of a key or value that few queries see, and was
            made of weights computed again as exp(score - lse). Rounding lse multiplies all weights of a row by one
            factor, 1 + |lse| eps / 2 at most, and with them the query's gradient, and its share of others; a softmax
            has no such error. So much, of the largest, is allowed too.
    """
    assert exact.dtype == torch.float64, f"{what}: the truth must be float64, got {exact.dtype}"
    assert actual.dtype == plain.dtype, f"{what}: dtype {actual.dtype}, expected {plain.dtype}"
    assert actual.shape == exact.shape == plain.shape, f"{what}: shapes {actual.shape}, {exact.shape}, {plain.shape}"
    actual, exact, plain = actual.detach(), exact.detach(), plain.detach()
    assert not exact.isnan().any(), f"{what}: the truth itself is NaN"
    infinite = exact.isinf()
    for name, value in (("plain", plain), ("actual", actual)):
        assert not value.isnan().any(), f"{what}: NaN in {name}"
        assert torch.equal(value[infinite].double(), exact[infinite]), f"{what}: {name} is not inf where the truth is"
        assert not value[~infinite].isinf().any(), f"{what}: {name} is inf where the truth is not"
    if not (~infinite).any():
        return
    error = (actual.double() - exact).masked_fill(infinite, 0.0).abs()
    plain_error = (plain.double() - exact).masked_fill(infinite, 0.0).abs().max()
    largest = exact.masked_fill(infinite, 0.0).abs().max()
    allowed = 2 * float(plain_error) + torch.finfo(actual.dtype).eps * float(largest)
    if lse is not None:
        allowed += torch.finfo(lse.dtype).eps / 2 * float(lse.detach()[lse.isfinite()].abs().max()) * float(largest)
    assert float(error.max()) <= allowed, (
        f"{what}: error {float(error.max()):.3g}, allowed {allowed:.3g} "
        f"(plain {actual.dtype}: {float(plain_error):.3g}) at {_place(error)}, {_both(actual, exact, error)}"
    )


def assert_same_cells(actual: Tensor, expected: Tensor, what: str = "mask") -> None:
    """Two bool tensors that are equal once both are broadcast to one shape."""
    assert actual.dtype == expected.dtype == torch.bool, f"{what}: dtypes {actual.dtype}, {expected.dtype}"
    actual, expected = torch.broadcast_tensors(actual, expected)
    wrong = (actual != expected).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} cells differ, the first at {wrong[0].tolist()}"


def assert_zero(actual: Tensor, what: str = "value") -> None:
    """Every number is exactly 0: not small, not NaN."""
    assert bool((actual == 0).all()), f"{what}: expected zeros, got {actual[actual != 0].flatten()[:5].tolist()}"


def _place(far: Tensor) -> list[int]:
    return [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]


def _both(actual: Tensor, expected: Tensor, far: Tensor) -> str:
    at = far.argmax()
    return f"got {actual.flatten()[at].item():.8g}, expected {expected.flatten()[at].item():.8g}"

"""Cross-entropy in pieces, beside torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F

from comparing import assert_close
from regard.training import loss
from regard.training.loss import IGNORED, cross_entropy


@pytest.mark.parametrize("piece", [1, 40, 1 << 18])
def test_loss_and_gradient_are_torchs_own_whatever_the_pieces(monkeypatch, piece):
    monkeypatch.setattr(loss, "PIECE", piece)
    logits, targets = 9 * torch.randn(17, 11), torch.randint(11, (17,))
    logits[3] += 1e4  # exp would overflow
    logits[5, 2], targets[5] = -1e4, 2  # the target's share is 0 in float32
    targets[[0, 7]] = IGNORED
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, wanted = cross_entropy(mine, targets), F.cross_entropy(exact, targets)
    assert_close(found, wanted.float())
    (3 * found).backward()
    (3 * wanted).backward()
    assert_close(mine.grad, exact.grad.float())
    assert not mine.grad[[0, 7]].any()


def test_without_an_answer_it_is_nan_and_its_gradient_nothing():
    logits = torch.randn(3, 5, requires_grad=True)
    found = cross_entropy(logits, torch.full((3,), IGNORED))
    assert found.isnan()
    found.nan_to_num().backward()
    assert not logits.grad.any()


def test_nan_in_the_logits_is_seen_and_half_precision_counted_in_float32():
    logits = torch.randn(3, 5)
    targets = torch.tensor([0, 1, 2])
    half = logits.bfloat16().requires_grad_()
    assert_close(cross_entropy(half, targets), F.cross_entropy(half.detach().float(), targets))
    logits[1, 4] = torch.nan
    assert cross_entropy(logits.requires_grad_(), targets).isnan()


def test_nothing_as_large_as_the_logits_is_kept_but_their_gradient():
    logits, kept = torch.randn(64, 1000, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        found = cross_entropy(logits, torch.randint(1000, (64,)))
    assert kept == [logits.nbytes]
    found.backward()
    with pytest.raises(RuntimeError, match="second time"):
        found.backward()

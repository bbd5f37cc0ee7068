"""The three models of chapter 12 are compared on equal terms, and none of them sees padding."""

import importlib.util
from pathlib import Path

import pytest
import torch

from regard.training.pairs import Pairs

PATH = Path(__file__).parent.parent / "benchmarks" / "recurrent.py"


@pytest.fixture(scope="module")
def recurrent():
    spec = importlib.util.spec_from_file_location("recurrent", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(recurrent):
    torch.manual_seed(0)
    return {name: make(300).eval() for name, make in recurrent.MODELS.items()}


def test_all_have_the_same_number_of_parameters_but_for_a_few_in_a_hundred(recurrent, models):
    sizes = [recurrent.size(model) for model in models.values()]
    assert max(sizes) < 1.03 * min(sizes)


def test_none_sees_the_padding_of_a_source_or_what_it_is_still_to_write(recurrent, models):
    pairs = [([5, 6, 7, 8, 9], [11, 12, 13]), ([5, 6], [14, 15, 16])]
    batch = Pairs(pairs).batch(0, 2)
    for name, model in models.items():
        together = recurrent.logits_of(model, batch)
        for row in range(2):
            length = int(batch.source_lengths[row])
            alone = model(batch.source[row : row + 1, :length], batch.target[row : row + 1], torch.tensor([length]))
            torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=1e-4, msg=name)
        changed = batch.target.clone()
        changed[:, -1] = 20
        later = recurrent.logits_of(model, batch._replace(target=changed))
        torch.testing.assert_close(later[:, :-1], together[:, :-1], msg=name)
        assert not torch.allclose(later[:, -1], together[:, -1])


def test_a_text_counts_as_exact_only_where_every_token_is_the_likeliest(recurrent):
    data = Pairs([([5, 6], [7, 8]), ([5], [9, 8])])

    class Knows(torch.nn.Module):
        def forward(self, source, target, lengths):
            said = torch.zeros(*target.shape, 12)
            wanted = torch.where((target == 0)[..., None], torch.eye(12)[7], torch.eye(12)[8])
            said += wanted
            said[:, -1] = torch.eye(12)[0]
            return said

    assert recurrent.exact(Knows(), data) == 0.5


def test_joined_texts_have_as_many_dates_as_was_asked(recurrent):
    found = recurrent.joined([("3. März 2026", "2026-03-03"), ("5 Oct 1971", "1971-10-05")], [1, 3], 10, seed=0)
    assert [source.count("; ") for source, _ in found] == [0, 2] * 5
    assert [target.count(" ") for _, target in found] == [0, 2] * 5

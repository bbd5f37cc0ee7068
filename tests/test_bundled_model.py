"""The model in the package is a real one: it predicts text it has never seen, and it copies."""

import pytest
import torch

from regard import record
from regard.training.checkpoint import PRETRAINED, load
from regard.training.corpus import Corpus, standard_library, xz_bits_per_byte
from regard.training.measures import bits_per_byte, copying_loss

FOLDER = PRETRAINED / "stdlib"


@pytest.fixture(scope="module")
def loaded():
    return load("stdlib")


@pytest.fixture(scope="module")
def library() -> Corpus:
    return standard_library()


def test_it_has_two_to_four_million_parameters_and_is_small_on_disk(loaded):
    assert 2e6 < sum(parameter.numel() for parameter in loaded.model.parameters()) < 4e6
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 10e6


def test_its_card_tells_how_it_was_made():
    card = (FOLDER / "card.md").read_text(encoding="utf-8")
    for word in ("regard train", '"seed": 1', '"steps"', "minutes", "held-out bits per byte", "## Held-out files"):
        assert word in card


def test_it_was_not_trained_on_the_files_that_it_is_measured_with(library):
    """The card lists them; the same rule holds them out here, whatever the version of Python."""
    listed = {line[2:].split(" (")[0] for line in (FOLDER / "card.md").read_text().splitlines() if line[:2] == "- "}
    held_out = {file.path for file in library.held_out}
    assert len(held_out & listed) > 0.5 * len(held_out)
    assert not listed & {file.path for file in library.training}


@pytest.fixture(scope="module")
def share_of_xz(loaded, library) -> float:
    """The model's bits over those of xz, file by file, which like the model sees nothing of the other files.

    Of every other file: its card has the share of all.
    """
    texts = [file.text for file in library.held_out[::2]]
    sizes = [len(text.encode()) for text in texts]
    each = sum(xz_bits_per_byte([text]) * size for text, size in zip(texts, sizes, strict=True)) / sum(sizes)
    # in pieces that do not overlap, which is quicker, and worse for the model: the first tokens of a piece see little
    return bits_per_byte(loaded.model, loaded.tokenizer, texts, stride=loaded.model.config.context_length) / each


def test_it_needs_at_most_half_of_the_bits_that_xz_needs_for_files_it_has_never_seen(share_of_xz):
    assert share_of_xz <= 0.5


@pytest.mark.parametrize("length", [64, 128, 250, 500])
def test_random_tokens_cost_it_less_than_half_when_they_come_again(loaded, length):
    first, second = copying_loss(loaded.model, length=length, end_id=loaded.tokenizer.end_id)
    assert second < 0.5 * first


def test_some_head_puts_more_than_half_of_its_weight_on_the_token_after_the_earlier_occurrence(loaded):
    length, draw = 128, torch.Generator().manual_seed(1)
    tokens = torch.randint(1, loaded.model.config.vocab_size, (8, length), generator=draw)
    twice = torch.cat([torch.full((8, 1), loaded.tokenizer.end_id), tokens, tokens], dim=1)
    with torch.inference_mode(), record(loaded.model) as recording:
        loaded.model(twice)
        shares = [
            seen.share(lambda query, key: key == query - length + 1)[:, head, length + 1 :].mean()
            for seen in recording.values()
            for head in range(seen.grid.heads)
        ]
    assert max(shares) > 0.5


def test_it_writes_text_of_its_kind(loaded):
    from regard import generate

    prompt = loaded.tokenizer.encode("import os\nimport")
    ids = list(generate(loaded.model, [loaded.tokenizer.end_id, *prompt], 40, temperature=0))
    text = loaded.tokenizer.decode(ids)
    assert "import" in text
    assert "\n" in text

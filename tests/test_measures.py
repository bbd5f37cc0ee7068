"""Measures count every token once, and a model's card says what it was trained on."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from learning import CONTEXT, model_of, rows
from regard.configuration import ModelConfig
from regard.models import Decoder
from regard.training.card import card
from regard.training.corpus import Corpus, TextFile, xz_bits_per_byte
from regard.training.language import Language
from regard.training.measures import Measures, bits_per_byte, copying_loss, measure
from regard.training.settings import Recipe, settings_alone
from regard.training.text import Tokenizer, train_tokenizer

RECIPE = Recipe(steps=6, batch_size=2, precision="no", save_every=4, seed=3, data="/home/me/letters")

TEXTS = [
    "the cat sat on the mat, the hat",
    "",
    "é",
    "a mat",
    "the the the the the the hat sat on the cat on the hat" * 2,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(train_tokenizer(TEXTS, vocab_size=264))


def bits_one_by_one(model, tokenizer, texts, stride):
    """Every token by itself: in the first piece that holds it, which is the one with the most before it."""
    length = model.config.context_length
    bits = 0.0
    for text in texts:
        chain = [tokenizer.end_id, *tokenizer.encode(text)]
        for target in range(1, len(chain)):
            at = next(at for at in range(0, len(chain), stride) if target - at <= length)
            logits = model(torch.tensor([chain[at:target]]))[0, -1].detach().double()
            bits -= float(logits.log_softmax(-1)[chain[target]]) / math.log(2)
    return bits / sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("context", [1, 2, 7, 64])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_bits_per_byte_count_every_token_once(context, batch_size, tokenizer):
    model = model_of(vocab_size=264, context_length=context, positions="learned").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    strides = {None: max(1, context // 4), 1: 1, context: context, max(1, context - 2): max(1, context - 2)}
    for stride, steps in strides.items():
        told = []

        def tell(done, all, told=told):
            told.append((done, all))

        bits = bits_per_byte(model, tokenizer, TEXTS, stride=stride, batch_size=batch_size, progress=tell)
        assert bits == pytest.approx(bits_one_by_one(model, tokenizer, TEXTS, steps), rel=1e-5)
        assert told[-1][0] == told[-1][1]


def test_a_model_that_knows_nothing_needs_the_logarithm_of_the_vocabulary_for_each_token(tokenizer):
    model = model_of(vocab_size=264)
    with torch.no_grad():
        model.embedding.weight.zero_()
    tokens = sum(len(tokenizer.encode(text)) for text in TEXTS)
    size = sum(len(text.encode()) for text in TEXTS)
    assert bits_per_byte(model, tokenizer, TEXTS) == pytest.approx(tokens * math.log2(264) / size)


def test_nothing_is_dropped_while_it_is_measured_and_the_mode_is_left_as_it_was(tokenizer):
    model = model_of(vocab_size=264, dropout=0.5).train()
    measured = bits_per_byte(model, tokenizer, TEXTS), copying_loss(model)
    assert model.training
    model.eval()
    assert (bits_per_byte(model, tokenizer, TEXTS), copying_loss(model)) == measured
    assert not model.training


def test_strides_that_would_leave_tokens_out_and_texts_without_a_letter_are_refused(tokenizer):
    model = model_of(vocab_size=264)
    for stride in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"stride: expected 1 to context_length=16, got {stride}"):
            bits_per_byte(model, tokenizer, TEXTS, stride=stride)
    for texts in ([], [""]):
        with pytest.raises(ValueError, match="texts: expected some text, got none"):
            bits_per_byte(model, tokenizer, texts)


class Copying(Decoder):
    """Knows what came `period` tokens ago, and expects everything else alike."""

    period = 5

    def __init__(self, config):
        super().__init__(config)
        self.logits = torch.nn.Identity()

    def states(self, tokens, **arguments):
        self.read = tokens
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for at in range(self.period, tokens.shape[1]):
            logits[torch.arange(len(tokens)), at, tokens[:, at - self.period + 1]] = 20.0
        return logits


@pytest.mark.parametrize("end_id", [0, 13, 30])
def test_the_copying_loss_is_small_for_a_model_that_copies(end_id):
    config = ModelConfig(vocab_size=31, context_length=64, dim=12, layers=1, heads=3)
    model = Copying(config)
    first, second = copying_loss(model, length=5, rows=7, end_id=end_id)
    assert first == pytest.approx(math.log(31))
    assert second < 1e-6
    assert model.read.shape == (7, 10)
    assert (model.read[:, 0] == end_id).all()
    assert end_id not in model.read[:, 1:].unique()
    assert set(model.read[:, 1:].flatten().tolist()) <= set(range(31))
    assert torch.equal(model.read[:, 1:5], model.read[:, 6:10])
    other = Copying(config)
    copying_loss(other, length=5, rows=7, end_id=end_id, seed=1)
    assert not torch.equal(other.read, model.read)
    # where the context is too short for two copies they are shorter
    copying_loss(model, length=128, rows=2)
    assert model.read.shape == (2, 64)


def corpus(held_out=True):
    files = [TextFile(f"{name}.txt", text) for name, text in zip("abcde", TEXTS, strict=True) if text]
    return Corpus(tuple(files[:2]), tuple(files[2:]) if held_out else (), {})


def test_measures_are_those_of_the_held_out_files(tokenizer):
    model = model_of(vocab_size=264)
    measures = measure(model, tokenizer, corpus())
    texts = [file.text for file in corpus().held_out]
    assert measures.bits_per_byte == bits_per_byte(model, tokenizer, texts)
    assert measures.xz_joined == xz_bits_per_byte(texts)
    sizes = [len(text) for text in texts]
    each = [xz_bits_per_byte([text]) for text in texts]
    assert measures.xz_each == pytest.approx(sum(s * e for s, e in zip(sizes, each, strict=True)) / sum(sizes))
    assert (measures.copy_first, measures.copy_second) == copying_loss(model)
    nothing = measure(model, tokenizer, corpus(held_out=False))
    assert all(math.isnan(value) for value in (nothing.bits_per_byte, nothing.xz_each, nothing.xz_joined))
    assert nothing.copy_first == measures.copy_first


def test_a_card_says_what_was_trained_on_what_how_and_how_good_it_is():
    model, data = model_of(), rows()
    measures = Measures(1.5, 3.0, 2.0, 3.4, 0.5)
    task = Language.__new__(Language)
    task.recipe, task.corpus = SimpleNamespace(repeats=0.25), corpus()
    text = card(measures, model, data, RECIPE, task, command="regard train runs/mine", seconds=90.0)
    config = json.loads(text.split("| configuration | `")[1].split("`")[0])
    assert ModelConfig.from_dict(config) == model.config
    assert json.loads(text.split("| settings | `")[1].split("`")[0]) == settings_alone(RECIPE)
    assert "/home/me" not in text
    for line in (
        f"Decoder of {sum(p.numel() for p in model.parameters()):,} parameters.",
        "| data | 2 files, 33 bytes; 25% of the rows are random tokens, repeated, which teach copying |",
        f"| digest of the data | `{corpus().digest()}`",
        "| command | `regard train runs/mine` |",
        "| trained on | 192 tokens, 2.11 epochs of 91 |",
        "| held-out bits per byte | 1.5000 |",
        "| xz -9e on the same files | 3.0000 each by itself (the model needs 0.500 of that), 2.0000 joined (0.750) |",
        "| random tokens, then again | loss 3.400, then 0.500 nats |",
        "- d.txt (5 bytes)",
        "- e.txt (106 bytes)",
    ):
        assert line in text
    task.recipe = SimpleNamespace(repeats=0.0)
    assert "| data | 2 files, 33 bytes |" in card(measures, model, data, RECIPE, task, command="", seconds=0)

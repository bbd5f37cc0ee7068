"""Beam search against every text there is, against transformers, and without a cache."""

import math

import pytest
import torch

from regard import EncoderDecoder, ModelConfig, translate
from regard.generation.beams import search

VOCAB, CONTEXT, END = 5, 6, 0
SOURCES = [[1, 2, 3, 4], [2], [3, 3], [4, 1, 2, 3, 1, 2]]


def spread(model):
    """Weights large enough that some tokens are far likelier than others, in float64."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.6 if parameter.dim() > 1 else 1.0))
    return model.double().eval()


@pytest.fixture
def model():
    torch.manual_seed(3)
    return spread(EncoderDecoder(ModelConfig(vocab_size=VOCAB, context_length=CONTEXT, dim=8, layers=2, heads=2)))


def every_text(model, source, count, penalty):
    """All texts of at most `count` tokens with their scores, the best first, each by whole passes without a cache."""
    found = []

    def go_on(text, log):
        with torch.no_grad():
            logs = model(torch.tensor([source]), torch.tensor([[END, *text]]))[0, -1].log_softmax(-1).tolist()
        for token in range(VOCAB):
            length, total = len(text) + 1, log + logs[token]
            if token == END:
                found.append((tuple(text), total / length**penalty, True))
            elif length == count:
                found.append(((*text, token), total / length**penalty, False))
            else:
                go_on([*text, token], total)

    go_on([], 0.0)
    return sorted(found, key=lambda text: -text[1])


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.5, -1.0])
def test_with_beams_for_all_beginnings_it_finds_every_text_in_the_order_of_their_scores(model, penalty):
    found = translate(model, SOURCES, 3, beams=VOCAB**3, length_penalty=penalty)
    for source, texts in zip(SOURCES, found, strict=True):
        expected = every_text(model, source, 3, penalty)
        assert len(texts) == len(expected) == 1 + 4 + 16 + 64
        assert [text.tokens for text in texts[:20]] == [tokens for tokens, _, _ in expected[:20]]
        assert [text.ended for text in texts[:20]] == [ended for _, _, ended in expected[:20]]
        assert [text.score for text in texts] == pytest.approx([score for _, score, _ in expected], abs=1e-9)


def test_the_length_penalty_decides_between_short_and_long_texts(model):
    lengths = [
        sum(len(texts[0].tokens) for texts in translate(model, SOURCES, beams=500, length_penalty=penalty))
        for penalty in (-2.0, 0.0, 1.0, 4.0)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_what_is_written_for_a_source_does_not_depend_on_the_others(model):
    sources = [torch.randint(VOCAB, (length,)).tolist() for length in (1, 6, 2, 5, 3, 4) * 14]  # more than a batch
    together = translate(model, sources, beams=3)
    for source, texts in list(zip(sources, together, strict=True))[::7]:
        (alone,) = translate(model, [source], beams=3)
        assert [text.tokens for text in alone] == [text.tokens for text in texts]
        assert [text.score for text in alone] == pytest.approx([text.score for text in texts], abs=1e-9)


def test_one_beam_takes_the_likeliest_token_each_time(model):
    for source, (best,) in zip(SOURCES, translate(model, SOURCES), strict=True):
        text, log = [], 0.0
        while len(text) < CONTEXT:
            with torch.no_grad():
                logs = model(torch.tensor([source]), torch.tensor([[END, *text]]))[0, -1].log_softmax(-1)
            token = int(logs.argmax())
            log += float(logs[token])
            if token == END:
                break
            text.append(token)
        assert best.tokens == tuple(text)
        assert best.log_probability == pytest.approx(log, abs=1e-9)
        assert best.ended == (len(text) < CONTEXT)


def test_more_beams_never_find_a_worse_text_than_the_best_of_all(model):
    for source in SOURCES:
        best = every_text(model, source, 4, 1.0)[0][1]
        for beams in (1, 2, 4, 8):
            (texts,) = translate(model, [source], 4, beams=beams)
            assert texts[0].score <= best + 1e-9
            assert len(texts) <= beams
            assert [text.score for text in texts] == sorted((text.score for text in texts), reverse=True)


def test_each_token_costs_one_query_and_the_encoder_runs_once_for_a_batch(model):
    read, asked = [], []
    model.encoder.register_forward_pre_hook(lambda _, given: read.append(tuple(given[0].shape)))
    model.decoder.register_forward_pre_hook(lambda _, given: asked.append(given[0].shape[1]))
    translate(model, SOURCES, 4, beams=2)
    assert read == [(4, 6)]
    assert asked == [1] * len(asked)
    assert len(asked) <= 4


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 4])
def test_transformers_beam_search_finds_the_same_texts_in_the_same_model(beams, penalty):
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(beams)
    config = BartConfig(
        vocab_size=11, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=1,
        bos_token_id=3, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    theirs = spread(BartForConditionalGeneration(config))
    source, count = torch.randint(4, 11, (3, 7)), 6
    given = {"max_new_tokens": count, "num_beams": beams, "num_return_sequences": beams, "early_stopping": "never"}
    expected = theirs.generate(
        source, length_penalty=penalty, do_sample=False, output_scores=True, return_dict_in_generate=True, **given
    )
    read, texts = source, torch.full((3, 1), 2)

    def step(new, rows):
        nonlocal read, texts
        read, texts = read[rows], texts[rows]
        if new is not None:
            texts = torch.cat([texts, new[:, None]], dim=1)
        with torch.no_grad():
            return theirs(input_ids=read, decoder_input_ids=texts).logits[:, -1]

    found = search(step, 3, count, beams=beams, length_penalty=penalty, end_id=2)
    for row, written in enumerate(found):
        for text, tokens, score in zip(
            written,
            expected.sequences.view(3, beams, -1)[row].tolist(),
            expected.sequences_scores.view(3, beams)[row].tolist(),
            strict=True,
        ):
            told = tokens[1:]
            told = told[: told.index(2)] if 2 in told else told[:count]
            assert text.tokens == tuple(told)
            assert text.score == pytest.approx(score, abs=1e-5)


def test_a_search_over_impossible_tokens_returns_what_is_possible():
    def step(new, rows):
        logits = torch.full((len(rows), 4), -math.inf)
        logits[:, 2 if new is None else 0] = 0.0  # one token, then the end
        return logits

    ((text,),) = search(step, 1, 5, beams=3, length_penalty=1.0, end_id=0)
    assert text == ((2,), 0.0, 0.0, True)


def test_the_model_is_left_as_it_was_and_nothing_is_dropped():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "context_length": CONTEXT, "dim": 8, "layers": 1, "heads": 2}
    model = spread(EncoderDecoder(ModelConfig(dropout=0.5, **sizes))).train()
    assert translate(model, SOURCES) == translate(model, SOURCES)
    assert model.training


def test_bad_arguments_are_named(model):
    for arguments, says in (
        ({"sources": [[]]}, "translate: the prompt is empty"),
        ({"sources": [[1] * 7]}, "translate: a source has 7 tokens, context_length is 6"),
        ({"sources": [[5]]}, "translate: tokens must be 0 to 4, got 5"),
        ({"count": 7}, "translate: count must be at most context_length=6, got 7"),
        ({"count": 0}, "translate: count must be a whole number, 1 or more, got 0"),
        ({"beams": 0}, "translate: beams must be a whole number, 1 or more, got 0"),
        ({"length_penalty": math.nan}, "translate: length_penalty must be a finite number, got nan"),
        ({"end_id": 5}, "translate: end_id must be 0 to 4, got 5"),
    ):
        with pytest.raises(ValueError, match=says):
            translate(model, **{"sources": SOURCES, **arguments})
    for arguments, says in (
        ({"sources": "ab"}, "translate: sources must be a list of lists of token numbers, got 'ab'"),
        ({"sources": [3, 1]}, "translate: prompt must be token numbers"),
        ({"model": model.decoder}, "translate: model must be a EncoderDecoder, got .*; a decoder goes on with a text"),
        ({"num_beams": 3}, "hint: .*beams="),
    ):
        with pytest.raises(TypeError, match=f"(?s){says}"):
            translate(**{"model": model, "sources": SOURCES, **arguments})
    assert translate(model, []) == []

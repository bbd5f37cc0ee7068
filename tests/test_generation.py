"""Sampling by its laws, and generation against full passes without a cache."""

from itertools import islice

import pytest
import torch

from comparing import assert_close
from regard.configuration import ModelConfig
from regard.generation import generate, sample
from regard.models import Decoder

VOCAB, CONTEXT = 29, 13
LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0, 2.0 - 1e-3]])


def spread(model):
    """Weights large enough that some tokens are far likelier than others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return model


@pytest.fixture
def model():
    config = ModelConfig(vocab_size=VOCAB, context_length=CONTEXT, dim=24, layers=2, heads=6, kv_heads=3, hidden_dim=17)
    return spread(Decoder(config))


def drawn(logits, count=20_000, **arguments):
    """The share of each token among many draws."""
    tokens = sample(logits.expand(count, -1), **arguments)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


# --- sample -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_tokens_come_as_often_as_the_model_says(temperature):
    expected = (LOGITS[0] / temperature).softmax(-1)
    assert_close(drawn(LOGITS, temperature=temperature), expected, tolerance=0.015)


def test_temperature_0_takes_the_likeliest_and_a_tiny_one_does_too():
    rows = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 2.0], [-5.0, -5.0, -4.0]])
    for temperature in (0, 1e-4, 1e-38, 1e-300):
        assert sample(rows, temperature=temperature).tolist() == [1, 0, 2]
    assert sample(1e4 * rows, temperature=1e-38).tolist() == [1, 0, 2]


def test_top_k_keeps_the_k_likeliest_and_their_proportions():
    kept = LOGITS[0].softmax(-1)[[1, 4]]
    shares = drawn(LOGITS, top_k=2)
    assert_close(shares[[1, 4]], kept / kept.sum(), tolerance=0.015)
    assert shares[[0, 2, 3]].tolist() == [0, 0, 0]
    assert drawn(LOGITS, 100, top_k=1)[1] == 1
    assert_close(drawn(LOGITS, top_k=100), LOGITS[0].softmax(-1), tolerance=0.015)


def test_top_k_keeps_what_ties_with_the_last_of_them():
    shares = drawn(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), top_k=1)
    assert_close(shares, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]), tolerance=0.015)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.05, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.76, 3), (0.99, 4), (1.0, 4)]
)
def test_top_p_keeps_the_likeliest_that_reach_it_together(top_p, kept):
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    expected = torch.zeros(4)
    order = [1, 3, 2, 0][:kept]
    expected[order] = probabilities[order] / probabilities[order].sum()
    assert_close(drawn(probabilities.log()[None], top_p=top_p), expected, tolerance=0.015)


def test_top_p_of_1_drops_nothing_however_unlikely(monkeypatch):
    # behind a token of probability 1 - 4e-5, the sum of the others is lost in rounding before they are all counted
    logits = torch.full((1, 1001), -17.0)
    logits[0, 0] = 0.0
    draw = torch.multinomial

    def watched(shares, *rest, **more):
        assert bool((shares > 0).all())
        return draw(shares, *rest, **more)

    monkeypatch.setattr(torch, "multinomial", watched)
    sample(logits, top_p=1.0)
    with pytest.raises(AssertionError):
        sample(logits, top_p=0.9999)


def test_top_k_comes_before_top_p():
    # of the two likeliest, 0.5 and 0.25, the first alone has two thirds
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    logits[0, 1] += 1e-4
    assert drawn(logits, 100, top_k=2, top_p=0.6)[0] == 1
    assert drawn(logits, 1000, top_p=0.6)[0] < 1


def test_the_same_seed_draws_the_same_and_rows_are_drawn_apart():
    rows = LOGITS.expand(50, -1)
    first = sample(rows, generator=seeded())
    assert torch.equal(sample(rows, generator=seeded()), first)
    assert not torch.equal(sample(rows, generator=seeded(8)), first)
    assert len(set(first.tolist())) > 1


def test_half_precision_logits_are_drawn_in_float32():
    shares = drawn(LOGITS.to(torch.bfloat16), top_p=0.9)
    assert shares[3] == 0
    assert float(shares.sum()) == pytest.approx(1)


def test_arguments_out_of_range_are_named():
    for arguments, says in (
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"top_k": 0}, "top_k must be 1 or more, or None for all, got 0"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, or None for all, got 0\.0"),
        ({"top_p": 1.1}, r"top_p must be above 0 and at most 1, or None for all, got 1\.1"),
    ):
        with pytest.raises(ValueError, match=f"sample: {says}"):
            sample(LOGITS, **arguments)
    with pytest.raises(ValueError, match="repetition_penalty 1e-300 takes the logits beyond what float32 holds"):
        sample(LOGITS + 5, repetition_penalty=1e-300, previous=torch.tensor([[1]]))


# --- generate ---------------------------------------------------------------------------------------------------------


def test_greedy_generation_takes_the_likeliest_of_a_whole_pass_every_time(model):
    text = [3, 1, 4, 1, 5]
    expected = list(text)
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model.eval()(torch.tensor([expected]))[0, -1].argmax()))
    assert list(generate(model, text, 8, temperature=0)) == expected[5:]


def test_beyond_the_context_it_goes_on_from_the_last_half(model):
    text = [3, 1, 4, 1, 5]
    written = list(generate(model, text, 30, temperature=0))
    assert len(written) == 30
    expected, read = list(text), list(text)
    with torch.no_grad():
        for _ in range(30):
            if len(read) > CONTEXT:
                read = expected[-(CONTEXT // 2) :]
            token = int(model.eval()(torch.tensor([read]))[0, -1].argmax())
            expected.append(token)
            read.append(token)
    assert written == expected[5:]


def test_a_prompt_longer_than_the_context_is_read_from_its_end(model):
    text = torch.randint(VOCAB, (40,)).tolist()
    assert list(generate(model, text, 5, temperature=0)) == list(generate(model, text[-CONTEXT:], 5, temperature=0))


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_go_on_for_ever_too(context):
    model = spread(Decoder(ModelConfig(vocab_size=VOCAB, context_length=context, dim=8, layers=1, heads=2)))
    assert len(list(generate(model, [1, 2, 3], 7))) == 7


def test_each_token_costs_one_query(model):
    lengths = []
    model.embedding.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    list(generate(model, [3, 1, 4], 5))
    assert lengths == [3, 1, 1, 1, 1]


def test_it_stops_before_the_end_token_and_after_count_tokens(model):
    written = list(generate(model, [3], 9, temperature=0))
    end = written[4]
    assert list(generate(model, [3], 9, temperature=0, end_id=end)) == written[: written.index(end)]
    assert list(generate(model, [3], 0)) == []


def test_the_same_seed_writes_the_same_text(model):
    first = list(generate(model, [3], 12, generator=seeded()))
    assert list(generate(model, [3], 12, generator=seeded())) == first
    assert list(generate(model, [3], 12, generator=seeded(8))) != first
    assert list(generate(model, [3], 12, top_k=1, generator=seeded(8))) == list(generate(model, [3], 12, temperature=0))


def test_nothing_is_dropped_and_the_model_is_left_as_it_was():
    config = ModelConfig(vocab_size=VOCAB, context_length=CONTEXT, dim=24, layers=2, heads=6, dropout=0.5)
    model = spread(Decoder(config)).train()
    written = list(generate(model, [3], 8, temperature=0))
    assert model.training
    assert written == list(generate(model.eval(), [3], 8, temperature=0))
    assert not model.training
    model.train()
    some = generate(model, [3], 8)
    assert len(list(islice(some, 2))) == 2
    some.close()
    assert model.training
    with pytest.raises(ValueError, match="temperature"):
        list(generate(model, [3], 8, temperature=-1))
    assert model.training


def test_gradients_are_off_inside_and_as_they_were_outside(model):
    model.embedding.register_forward_pre_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    modes = []
    for _ in generate(model, [3], 2):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert modes == [True, True]


def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(model):
    with pytest.raises(ValueError, match="generate: the prompt is empty; begin with the end token"):
        list(generate(model, [], 5))
    with pytest.raises(ValueError, match="generate: tokens must be 0 to 28, got 29"):
        list(generate(model, [29], 5))


def test_a_prompt_may_be_a_tensor_and_what_is_no_prompt_is_refused_at_once(model):
    for tokens in (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3], dtype=torch.int32), (1, 2, 3)):
        assert list(generate(model, tokens, 3, temperature=0)) == list(generate(model, [1, 2, 3], 3, temperature=0))
    for prompt, says in (
        (torch.tensor([[1, 2]]), r"got torch.int64 tensor \[1, 2\]; one row at a time: tokens\[0\]"),
        (torch.tensor([1.0]), r"got torch.float32 tensor \[1\]"),
        (torch.tensor(1), r"got torch.int64 tensor \[\]"),
        ("def", "got 'def'; encode it first"),
        ([1, "a"], "got a list with 'a' in it"),
        ([1.0], "got a list with 1.0 in it"),
        (None, "got None"),
    ):
        with pytest.raises(TypeError, match=f"generate: prompt must be token numbers.*{says}"):
            generate(model, prompt, 3)
    with pytest.raises(TypeError, match=r"generate: model must be a Decoder, got torch.int64 tensor \[2\]"):
        generate(torch.tensor([1, 2]), [1], 3)
    for count in (-1, 2.0, None, True):
        with pytest.raises(ValueError, match="generate: count must be a whole number, 0 or more, got"):
            generate(model, [1], count)
    for wrong in ({"temperature": "hot"}, {"top_k": 1.5}, {"top_p": "all"}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match=f"generate: {next(iter(wrong))} must be"):
            generate(model, [1], 3, **wrong)
    for logits in (torch.zeros(3), torch.zeros(1, 2, 3), [0.0], torch.zeros(1, 3).long(), None):
        with pytest.raises((TypeError, ValueError), match="sample: logits must be"):
            sample(logits)

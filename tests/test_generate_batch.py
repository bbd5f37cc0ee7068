"""Texts written side by side, without end, and up to a stop string; what is drawn, against transformers."""

import gc
import random

import pytest
import torch

from comparing import assert_close
from regard.configuration import ModelConfig
from regard.generation import TextStream, generate, generate_batch, sample
from regard.generation.sampling import Sampling
from regard.kernels import hidden
from regard.models import Decoder
from test_generation import seeded, spread

VOCAB, CONTEXT = 29, 13
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2], [3, 8, 4, 6, 2], [6] * 20]

KINDS = {
    "learned": {"positions": "learned", "norm": "layer", "bias": True},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary, grouped heads": {"kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "no positions, softcap": {"positions": None, "softcap": 3.0},
    "rotary, frequencies that follow from the length": {
        "rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_context": 5}
    },
    "window": {"window": 4},
    "window of one": {"window": 1},
    "window and alibi": {"window": 5, "positions": "alibi"},
    "window and learned": {"window": 5, "positions": "learned"},
}


def decoder(context_length=CONTEXT, **changes):
    """A model in float64, so that a batch and a single run differ by less than any choice."""
    sizes = {"vocab_size": VOCAB, "context_length": context_length, "dim": 24, "layers": 2, "heads": 6}
    return spread(Decoder(ModelConfig(**sizes | {"hidden_dim": 17} | changes))).double()


def column(steps, row):
    """What a row of a batch wrote."""
    return [step[row] for step in steps if step[row] is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_batch_of_unequal_prompts_is_what_its_prompt_gives_alone(kind):
    model = decoder(**KINDS[kind])
    settings = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.2}
    settings["end_id"] = list(generate(model, PROMPTS[0], 7, **settings, generator=seeded(0)))[-1]
    steps = list(
        generate_batch(model, PROMPTS, 25, **settings, generators=[seeded(row) for row in range(len(PROMPTS))])
    )
    alone = [list(generate(model, p, 25, **settings, generator=seeded(row))) for row, p in enumerate(PROMPTS)]
    assert [column(steps, row) for row in range(len(PROMPTS))] == alone
    assert len({len(row) for row in alone}) > 1, "rows that end at different times are what is tested"


def test_a_row_ends_after_the_token_that_its_caller_wants_no_more_of_and_the_others_go_on():
    model = decoder()
    alone = [list(generate(model, prompt, 9, temperature=0)) for prompt in PROMPTS[:3]]
    steps = list(generate_batch(model, PROMPTS[:3], 9, temperature=0, until=lambda row, token: row == 1))
    assert column(steps, 1) == alone[1][:1]
    assert [column(steps, row) for row in (0, 2)] == [alone[0], alone[2]]
    assert all(step[1] is None for step in steps[1:])


def test_texts_of_a_batch_read_no_padding_to_speak_of():
    model, numbers = decoder(context_length=700), []
    model.embedding.register_forward_pre_hook(lambda module, inputs: numbers.append(inputs[0].numel()))
    list(generate_batch(model, [[1] * 600, *([[2, 3]] * 20)], 1))
    assert sum(numbers) <= 2 * (600 + 40)


@pytest.mark.parametrize(("positions", "window"), [("rotary", 4), ("alibi", 4), (None, 4), ("rotary", (4, 2))])
def test_a_model_with_a_window_and_relative_positions_goes_on_past_its_context_as_if_it_had_none(positions, window):
    model = decoder(window=window, positions=positions)
    longer = decoder(context_length=200, window=window, positions=positions)
    longer.load_state_dict(model.state_dict())
    prompt = torch.randint(VOCAB, (40,)).tolist()  # longer than the context, too
    text = list(prompt)
    with torch.no_grad():
        for _ in range(60):
            text.append(int(longer.eval()(torch.tensor([text]))[0, -1].argmax()))
    assert list(generate(model, prompt, 60, temperature=0)) == text[40:]


def test_the_same_window_without_a_cache_that_evicts_is_bound_to_the_context():
    model = decoder(window=4)
    with pytest.raises(ValueError, match=f"14 tokens are more than context_length={CONTEXT}"):
        model(torch.zeros(1, 14, dtype=torch.long), cache=model.cache(evict=True))
    cache = model.cache()
    model(torch.zeros(1, 13, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="1 tokens after 13 in the cache"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def held_bytes():
    """Bytes of all tensors that live."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())


def test_a_text_of_100_000_tokens_takes_the_memory_of_one_of_20_000():
    config = ModelConfig(vocab_size=11, context_length=4000, dim=8, layers=1, heads=2, hidden_dim=8, window=16)
    model = spread(Decoder(config))

    def taken(length):
        """Bytes of tensors when so many tokens have been read, and 300 more were written."""
        stream = generate(model, [3] * (length - 300), 300)
        assert len([next(stream) for _ in range(299)]) == 299
        bytes_held = held_bytes()
        stream.close()
        return bytes_held

    assert taken(100_000) <= 1.05 * taken(20_000)


# --- what is drawn ----------------------------------------------------------------------------------------------------

CHOICES = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "top_k": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.3, "min_p": 0.3, "repetition_penalty": 3.0},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_may_be_drawn_and_how_often_is_what_transformers_draws_from(choice):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(60)
    given = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **choice}
    prompt = torch.randint(61, (3, 5))
    out = model.generate(
        prompt, do_sample=True, max_new_tokens=4, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        output_logits=True, **given,
    )  # fmt: skip
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        came = torch.zeros(3, 61, dtype=torch.bool).scatter(1, out.sequences[:, : 5 + step], True)
        ours = Sampling(**choice).restrict(logits, came)
        assert torch.equal(ours == -torch.inf, scores == -torch.inf)
        assert_close(ours.softmax(-1), scores.softmax(-1), tolerance=1e-6)


@pytest.mark.parametrize("spread_out", [0.01, 1.0, 3.0])
def test_of_a_large_vocabulary_top_p_keeps_what_sorting_all_of_it_would(spread_out):
    logits = spread_out * torch.randn(2, 5000)
    ordered, places = logits.softmax(-1).sort(descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, ordered.cumsum(-1) - ordered < 0.8)
    assert torch.equal(Sampling(top_p=0.8).restrict(logits) > -torch.inf, kept)
    assert 1 < int(kept.sum(-1).min()) < 5000


def test_the_penalty_is_for_what_came_before_and_asks_for_it():
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert sample(logits, temperature=0, repetition_penalty=1.2, previous=torch.tensor([[0, 0]])).tolist() == [1]
    assert sample(-logits, temperature=0, repetition_penalty=4.0, previous=torch.tensor([[2]])).tolist() == [2]
    for arguments, says in (
        ({"repetition_penalty": 2.0}, "repetition_penalty needs previous"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be above 0 \(1 for none\), got 0\.0"),
        ({"min_p": 1.5}, r"min_p must be 0 to 1, or None for all, got 1\.5"),
        ({"previous": torch.tensor([1])}, r"previous must be \[batch=1, length\], got \[1\]"),
        ({"previous": torch.tensor([[3]])}, "previous must be tokens from 0 to 2"),
    ):
        with pytest.raises(ValueError, match=f"sample: {says}"):
            sample(logits, **arguments)


def test_prompts_and_generators_that_do_not_fit_are_refused_at_once():
    model = decoder()
    for prompts in ([], "def", None):
        with pytest.raises(TypeError, match="generate_batch: prompts must be a list of one prompt or more"):
            generate_batch(model, prompts, 3)
    with pytest.raises(ValueError, match="generate_batch: the prompt is empty"):
        generate_batch(model, [[1], []], 3)
    with pytest.raises(ValueError, match="generators must be one for each of 2 prompts"):
        generate_batch(model, [[1], [2]], 3, generators=[seeded()])


# --- text as it comes -------------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def as_bytes(self, ids):
        return bytes(ids)


def test_a_stream_gives_the_text_up_to_the_first_stop_string_whichever_way_it_is_cut():
    chance = random.Random(5)
    for _ in range(300):
        text = "".join(chance.choice("ab\né🙂") for _ in range(chance.randrange(12)))
        stops = ["".join(chance.choice("ab\né") for _ in range(chance.randrange(1, 4))) for _ in range(2)]
        stream = TextStream(Bytes(), stop=stops)
        parts = [stream.add(byte) for byte in text.encode()]
        ends = [place for place in map(text.find, stops) if place >= 0]
        assert stream.stopped == bool(ends)
        assert "".join(parts) + stream.end() == text[: min(ends, default=None)]


def test_nothing_is_held_back_longer_than_it_has_to_be():
    stream = TextStream(Bytes(), stop=["END", "\n\n"])
    assert [stream.add(byte) for byte in b"aE\nNEb"] == ["a", "", "E", "\nN", "", "Eb"]
    cut = TextStream(Bytes())
    assert [cut.add(byte) for byte in "é".encode()[:1]] + [cut.end()] == ["", "\ufffd"]
    with pytest.raises(ValueError, match="stop must be a list of texts, none of them empty, got 'END'"):
        TextStream(Bytes(), stop="END")


def test_what_hides_the_slots_before_a_row_is_prepared_once_for_all_layers(monkeypatch):
    model, looked = decoder(layers=5), []
    look = hidden._looked_at
    monkeypatch.setattr(hidden, "_looked_at", lambda *given: looked.append(1) or look(*given))
    steps = 0
    for step in generate_batch(model, [[3, 1, 4], [1]], 9, temperature=0):
        assert len(step) == 2
        steps += 1
    assert len(looked) <= steps


def test_texts_are_read_at_once_where_padding_costs_less_than_a_call(monkeypatch):
    model, read = decoder(context_length=300), []
    states = model.states
    monkeypatch.setattr(
        model, "states", lambda tokens, **more: read.append(list(tokens.shape)) or states(tokens, **more)
    )
    lengths = [200, 3, 1, 9, 210]
    next(generate_batch(model, [[7] * length for length in lengths], 1))
    assert read == [[3, 9], [2, 210]]

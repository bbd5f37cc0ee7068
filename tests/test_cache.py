"""A cache changes no number: token by token, in pieces and at once a model says the same."""

import contextlib

import pytest
import torch

from comparing import assert_close
from regard.cache import Cache, LayerCache
from regard.configuration import ModelConfig
from regard.layers import MultiHeadAttention
from regard.masks import Causal, Padding
from regard.models import Decoder, EncoderDecoder
from regard.positions import Rotary
from regard.shapes import ShapeError

BATCH, LENGTH = 2, 11
PIECES = {"token by token": [1] * LENGTH, "in pieces": [3, 1, 5, 2], "at once": [LENGTH]}

KINDS = {
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary, half": {"rotary_layout": "half"},
    "rotary, interleaved": {"rotary_layout": "interleaved"},
    "rotary, some features": {"rotary_dim": 2},
    "rotary, scaled": {"rotary_scaling": {"kind": "linear", "factor": 2.0}},
    "alibi": {"positions": "alibi"},
    "no positions": {"positions": None},
    "window": {"window": 3},
    "window and alibi": {"window": 4, "positions": "alibi"},
    "grouped heads": {"kv_heads": 3},
    "one kv head, softcap": {"kv_heads": 1, "softcap": 2.0},
    "post-norm with constants": {"norm": "layer", "norm_first": False, "bias": True},
}


def config(**changes):
    return ModelConfig(
        **{"vocab_size": 29, "context_length": 13, "dim": 24, "layers": 2, "heads": 6, "hidden_dim": 17} | changes
    )


def spread(model):
    """Weights large enough that attention is far from even."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return model.double().eval()


def read(model, tokens, pieces, cache, **arguments):
    """Logits of tokens that the model reads piece after piece."""
    parts = tokens.split(pieces, dim=1)
    return torch.cat([model(part, cache=cache, **arguments) for part in parts], dim=1)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_with_a_cache_says_what_it_says_without(kind, pieces):
    model = spread(Decoder(config(**KINDS[kind])))
    tokens = torch.randint(29, (BATCH, LENGTH))
    cache = model.cache()
    with torch.inference_mode():
        assert_close(read(model, tokens, PIECES[pieces], cache), model(tokens), kind)
    assert cache.length == LENGTH


@pytest.mark.parametrize("pieces", PIECES)
def test_the_same_with_gradients_and_they_are_the_same_too(pieces):
    model = spread(Decoder(config(kv_heads=3)))
    tokens = torch.randint(29, (BATCH, LENGTH))
    pull = torch.randn(BATCH, LENGTH, 29, dtype=torch.float64)
    expected = torch.autograd.grad((model(tokens) * pull).sum(), list(model.parameters()))
    logits = read(model, tokens, PIECES[pieces], model.cache())
    for actual, wanted in zip(
        torch.autograd.grad((logits * pull).sum(), list(model.parameters())), expected, strict=True
    ):
        assert_close(actual, wanted)


def test_a_cache_may_go_from_one_mode_to_another():
    model = spread(Decoder(config()))
    tokens = torch.randint(29, (BATCH, LENGTH))
    cache = model.cache()
    logits = []
    # the second append leaves room that only inference mode may write to
    modes = [torch.inference_mode] * 2 + [
        torch.no_grad,
        contextlib.nullcontext,
        torch.inference_mode,
        torch.enable_grad,
    ]
    for mode, part in zip(modes, tokens.split([3, 1, 2, 2, 1, 2], dim=1), strict=True):
        with mode():
            logits.append(model(part, cache=cache))
    logits[-1].sum().backward()
    assert_close(torch.cat(logits, dim=1), model(tokens))


def test_a_frozen_key_does_not_keep_the_query_from_learning():
    layer = MultiHeadAttention(12, 2, mask=Causal()).double()
    for part in (layer.key, layer.value):
        part.requires_grad_(False)
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    cache = LayerCache()
    torch.cat([layer(token, cache=cache) for token in x.split(1, dim=1)], dim=1).sum().backward()
    actual = layer.query.weight.grad.clone()
    layer.query.weight.grad = None
    layer(x).sum().backward()
    assert_close(actual, layer.query.weight.grad)


def test_beams_share_what_they_have_in_common_and_a_cropped_text_goes_on_differently():
    model = spread(Decoder(config()))
    text, others = torch.randint(29, (2, 6)), torch.randint(29, (3, 2))
    rows = torch.tensor([1, 1, 0])
    with torch.inference_mode():
        cache = model.cache()
        model(text, cache=cache)
        cache.reorder(rows)
        whole = model(torch.cat([text[rows], others], dim=1))
        assert_close(read(model, others, [1, 1], cache), whole[:, 6:], "after reorder")
        cache.crop(4)
        assert cache.length == 4
        whole = model(torch.cat([text[rows, :4], others], dim=1))
        assert_close(read(model, others, [2], cache), whole[:, 4:], "after crop")


def test_an_encoder_decoder_writes_with_two_caches_what_it_writes_without():
    model = spread(EncoderDecoder(config(positions="sinusoidal", norm_first=False, norm="layer")))
    source, target = torch.randint(29, (BATCH, 7)), torch.randint(29, (BATCH, 5))
    padding = Padding([7, 4])
    with torch.inference_mode():
        states = model.encoder(source, mask=padding)
        cache, context_cache = model.decoder.cache(), model.decoder.cache()
        logits = read(
            model.decoder, target, [2, 1, 1, 1], cache,
            context=states, context_mask=padding, context_cache=context_cache,
        )  # fmt: skip
        assert_close(logits, model(source, target, source_mask=padding))
    assert (cache.length, context_cache.length) == (5, 7)


def test_the_context_is_projected_once():
    layer = MultiHeadAttention(12, 3, key_input=7)
    seen = []
    layer.key.register_forward_hook(lambda module, inputs, output: seen.append("key"))
    layer.value.register_forward_hook(lambda module, inputs, output: seen.append("value"))
    x, context = torch.randn(2, 5, 12), torch.randn(2, 11, 7)
    cache = LayerCache()
    parts = torch.cat([layer(token, context, cache=cache) for token in x.split(1, dim=1)], dim=1)
    assert seen == ["key", "value"]
    assert cache.length == 11
    assert_close(parts, layer(x, context))


def test_cross_attention_with_rotary_refuses_a_cache_because_nobody_knows_where_the_query_stands():
    layer = MultiHeadAttention(12, 3, rotary=Rotary(4))
    x, context = torch.randn(1, 2, 12), torch.randn(1, 5, 12)
    assert layer(x, context).shape == (1, 2, 12)
    with pytest.raises(ValueError, match="with rotary, a cache is for self-attention alone"):
        layer(x, context, cache=LayerCache())


def test_the_context_length_counts_what_the_cache_holds():
    layer = MultiHeadAttention(12, 3, context_length=5)
    cache = LayerCache()
    layer(torch.randn(1, 3, 12), cache=cache)
    with pytest.raises(ValueError, match="MultiHeadAttention: 6 tokens are more than context_length=5"):
        layer(torch.randn(1, 3, 12), cache=cache)
    model = Decoder(config())
    cache = model.cache()
    model(torch.zeros(1, 10, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="Decoder: 4 tokens after 10 in the cache are more than context_length=13"):
        model(torch.zeros(1, 4, dtype=torch.int64), cache=cache)


# --- one layer's cache --------------------------------------------------------------------------------------------


def keys_and_values(length, batch=2, kv_heads=3, head_dim=5, value_dim=7):
    return torch.randn(batch, kv_heads, length, head_dim), torch.randn(batch, kv_heads, length, value_dim)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_what_was_appended_is_read_oldest_first(mode):
    with mode():
        parts = [keys_and_values(length) for length in (4, 1, 1, 70, 1)]
        cache = LayerCache()
        for part in parts:
            key, value = cache.append(*part)
        assert_close(key, torch.cat([k for k, _ in parts], dim=2))
        assert_close(value, torch.cat([v for _, v in parts], dim=2))
        assert cache.length == 77
        for read_again, was in zip(cache.read(), (key, value), strict=True):
            assert_close(read_again, was)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_n_appends_copy_no_more_than_a_few_times_n_numbers(mode):
    with mode():
        cache = LayerCache()
        copied, place = 0, None
        for _ in range(1000):
            key, _ = cache.append(*keys_and_values(1, 1, 1, 1, 1))
            if key.data_ptr() != place:  # the keys moved: all of them were copied
                copied, place = copied + key.shape[2], key.data_ptr()
        assert copied < 2 * 1000


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_nothing_that_was_given_or_read_is_ever_written_over(mode):
    with mode():
        cache = LayerCache()
        given = keys_and_values(6)
        read = cache.append(*given)
        later = cache.append(*keys_and_values(3))
        kept = [part.clone() for part in (*given, *read, *later)]
        cache.crop(4)
        cache.append(*keys_and_values(2))
        cache.append(*keys_and_values(1))
        cache.crop(0)
        cache.append(*keys_and_values(9))
        cache.reorder(torch.tensor([1, 0]))
        for now, was in zip((*given, *read, *later), kept, strict=True):
            assert_close(now, was)


def test_a_cache_that_was_cropped_holds_what_came_before_and_what_came_after():
    with torch.no_grad():
        (k1, v1), (k2, v2) = keys_and_values(6), keys_and_values(2)
        cache = LayerCache()
        cache.append(k1, v1)
        cache.crop(4)
        key, value = cache.append(k2, v2)
        assert_close(key, torch.cat([k1[:, :, :4], k2], dim=2))
        assert_close(value, torch.cat([v1[:, :, :4], v2], dim=2))


def test_reorder_chooses_rows_and_may_repeat_them():
    cache = LayerCache()
    cache.reorder(torch.tensor([0]))  # nothing to choose from yet
    key, value = cache.append(*keys_and_values(4, batch=3))
    cache.reorder(torch.tensor([2, 0, 0, 1]))
    assert_close(cache.read()[0], key[[2, 0, 0, 1]])
    assert_close(cache.read()[1], value[[2, 0, 0, 1]])


K, V = keys_and_values(4)
WRONG = {
    "three axes": (K[0], V, "key must have 4 axes"),
    "key and value of different lengths": (K[:, :, :3], V, "key and value must have the same length, got 3 and 4"),
    "another batch": (K[:1], V[:1], r"the cache holds \[2, 3, 4, 5\], which new tokens must fit"),
    "other heads": (K[:, :2], V[:, :2], r"the cache holds \[2, 3, 4, 5\], which new tokens must fit"),
    "another head_dim": (K[..., :4], V, r"the cache holds \[2, 3, 4, 5\], which new tokens must fit"),
    "another value_dim": (K, V[..., :4], r"the cache holds \[2, 3, 4, 7\], which new tokens must fit"),
    "another dtype": (K.double(), V.double(), "the cache holds torch.float32 on cpu, got torch.float64 on cpu"),
}


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_leaves_the_cache_as_it_was(name, mode):
    key, value, says = WRONG[name]
    with mode():
        cache = LayerCache()
        cache.append(K, V)
        with pytest.raises(ShapeError, match=f"LayerCache.append: {says}"):
            cache.append(key, value)
        assert cache.length == 4
        assert_close(cache.append(K, V)[0], torch.cat([K, K], dim=2))
        assert_close(cache.read()[1], torch.cat([V, V], dim=2))


def test_an_empty_cache_cannot_be_read_and_none_can_be_cropped_to_more_than_it_holds():
    with pytest.raises(ValueError, match=r"LayerCache\.read: the cache is empty"):
        LayerCache().read()
    cache = LayerCache()
    cache.append(K, V)
    for length in (-1, 5):
        with pytest.raises(ValueError, match=f"length must be 0 to 4, got {length}"):
            cache.crop(length)


def test_a_models_cache_has_one_for_each_layer_and_does_to_all_what_it_is_told():
    cache = Cache(3)
    assert (len(cache), cache.length, Cache(0).length) == (3, 0, 0)
    for layer in cache:
        layer.append(K, V)
    cache.reorder(torch.tensor([1]))
    cache.crop(2)
    assert cache.length == 2
    for number in range(3):
        assert_close(cache[number].read()[0], K[1:, :, :2])


def test_a_cache_that_keeps_a_window_holds_no_more_and_does_not_go_back_to_what_it_forgot():
    cache = LayerCache(keep=4)
    everything = torch.randn(1, 2, 200, 3)
    for place in range(200):
        key, value = cache.append(*everything[None, :, :, place : place + 1].expand(2, -1, -1, -1, -1))
        assert torch.equal(key, everything[:, :, max(0, place - 4) : place + 1])
        assert torch.equal(key, value)
        assert place == 0 or key.untyped_storage().nbytes() <= 64 * 2 * 3 * 4
    assert (cache.length, cache.held, cache.kept, cache.position) == (200, 5, 4, 200)
    cache.crop(199)
    assert torch.equal(cache.read()[0], everything[:, :, 195:199])
    with pytest.raises(ValueError, match="of the 199 tokens seen the last 4 are held, so that there is no going back"):
        cache.crop(198)
    assert LayerCache(keep=0).append(*everything[None].expand(2, -1, -1, -1, -1))[0].shape[2] == 200


def test_texts_of_unequal_lengths_share_a_cache_that_is_aligned_at_its_end():
    texts = torch.randn(2, 1, 5, 3)
    cache = LayerCache()
    cache.append(texts, texts)
    cache.align(torch.tensor([2, 5]))
    assert cache.position.tolist() == [2, 5]
    assert torch.equal(cache.read()[0][0, :, 3:], texts[0, :, :2])
    other = LayerCache()
    other.append(texts[:1, :, :4], texts[:1, :, :4])
    cache.join([other])
    assert cache.position.tolist() == [2, 5, 4]
    assert torch.equal(cache.read()[0][2, :, 1:], texts[0, :, :4])
    cache.reorder(torch.tensor([2, 0]))  # the longest goes, and with it the slot that only it had
    assert (cache.length, cache.position.tolist(), cache.held) == (4, [4, 2], 4)
    cache.reorder(torch.tensor([1, 1]))
    assert (cache.position, cache.starts, cache.held) == (2, None, 2)
    assert torch.equal(cache.read()[0][1], texts[0, :, :2])

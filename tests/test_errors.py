"""Every argument of every public callable, replaced by nonsense: it is taken, or refused in words of regard's own."""

import traceback
from pathlib import Path

import pytest
import torch

import regard
from regard import (
    Additive,
    Alibi,
    Band,
    Block,
    Cache,
    Causal,
    Chunk,
    Classifier,
    Decoder,
    Dense,
    Document,
    Encoder,
    EncoderDecoder,
    FeedForward,
    KernelError,
    LayerCache,
    Learned,
    MaskedLanguageModel,
    ModelConfig,
    MultiHeadAttention,
    Padding,
    Prefix,
    RelativeBias,
    Rotary,
    Sinusoidal,
    Strided,
    TokenEmbedding,
    Where,
    Window,
    attention,
    attention_with_lse,
    generate,
    observe,
    plan,
    sample,
    steps,
)

SOURCE = str(Path(regard.__file__).parent)
Q, X, TOKENS = torch.randn(2, 2, 3, 4), torch.randn(2, 3, 8), torch.tensor([[1, 2, 3]])
SIZES = {"vocab_size": 11, "context_length": 16, "dim": 8, "heads": 2, "layers": 1}
CONFIG = ModelConfig(**SIZES)
LAYER, MODEL, SEEN = MultiHeadAttention(8, 2), Decoder(CONFIG), observe(Q, Q)
CALL = dict.fromkeys(["mask", "bias", "scale", "softcap", "sink", "additive"])
ALL = {"query": Q, "key": Q, "value": Q, **CALL, "dropout": 0.0, "generator": None, "kernel": "auto"}

GOOD = {
    "attention": (attention, ALL),
    "attention_with_lse": (attention_with_lse, ALL),
    "plan": (plan, {name: ALL[name] for name in ALL if name != "generator"} | {"tile_size": 128}),
    "observe": (observe, {"query": Q, "key": Q, **CALL, "lse": None}),
    "Window": (Window, {"w": 3, "offset": None}),
    "Causal": (Causal, {"offset": None}),
    "Band": (Band, {"before": 1, "after": 1, "offset": None}),
    "Prefix": (Prefix, {"n": 2}),
    "Strided": (Strided, {"step": 2, "offset": None}),
    "Chunk": (Chunk, {"size": 2, "offset": None}),
    "Document": (Document, {"query_ids": TOKENS, "key_ids": None}),
    "Document.from_lengths": (Document.from_lengths, {"lengths": [2, 3]}),
    "Padding": (Padding, {"keys": [1]}),
    "Dense": (Dense, {"mask": TOKENS > 1}),
    "Where": (Where, {"fn": lambda batch, head, query, key: query >= key}),
    "Alibi": (Alibi, {"heads": 2, "offset": None}),
    "Alibi of slopes": (Alibi, {"slopes": torch.ones(2)}),
    "RelativeBias": (RelativeBias, {"table": torch.ones(8, 2), "bidirectional": True, "max_distance": 9}),
    "Additive": (lambda v: attention(Q, Q, Q, additive=Additive(v)), {"v": torch.ones(2, 4)}),
    "MultiHeadAttention": (
        MultiHeadAttention,
        {
            "dim": 8, "heads": 2, "kv_heads": None, "key_dim": None, "value_dim": None, "key_input": None, "mask": None,
            "value_input": None, "output": True, "projection_bias": True, "output_bias": None, "bias": None,
            "rotary": None, "sink": False, "similarity": "product", "dropout": 0.0, "output_dropout": 0.0,
            "context_length": None,
        },
    ),
    "MultiHeadAttention()": (LAYER, {"query": X, "key": None, "value": None, "mask": None, "cache": None}),
    "FeedForward": (FeedForward, {"dim": 8, "hidden_dim": 9, "activation": "gelu", "bias": True, "dropout": 0.0}),
    "FeedForward()": (FeedForward(8, 16), {"x": X}),
    "Block": (Block, {"attention": LAYER, "feed_forward": FeedForward(8, 16), "cross": None, "norm_first": True}),
    "Block()": (Block(LAYER, FeedForward(8, 16)), {"x": X, "mask": None, "bias": None, "context": None, "cache": None}),
    "TokenEmbedding": (TokenEmbedding, {"vocab_size": 11, "dim": 8, "padding_id": None, "scale": 1.0}),
    "TokenEmbedding()": (MODEL.embedding, {"tokens": TOKENS}),
    "TokenEmbedding.from_vectors": (TokenEmbedding.from_vectors, {"vectors": torch.ones(3, 4), "frozen": True}),
    "ModelConfig": (ModelConfig, SIZES),
    "ModelConfig.from_dict": (ModelConfig.from_dict, {"data": SIZES}),
    "Decoder": (Decoder, {"config": CONFIG}),
    "Decoder()": (MODEL, {"tokens": TOKENS, "mask": None, "cache": None, "context": None}),
    "EncoderDecoder()": (EncoderDecoder(CONFIG), {"source": TOKENS, "target": TOKENS, "source_mask": None}),
    "Classifier": (Classifier, {"encoder": Encoder(CONFIG), "classes": 2}),
    "MaskedLanguageModel": (MaskedLanguageModel, {"encoder": Encoder(CONFIG)}),
    "generate": (
        lambda **named: list(generate(**named)),
        {"model": MODEL, "prompt": [1], "count": 2, "temperature": 1.0, "top_k": None, "top_p": None, "end_id": None},
    ),
    "sample": (sample, {"logits": torch.ones(1, 5), "temperature": 1.0, "top_k": None, "top_p": None}),
    "Rotary": (Rotary, {"head_dim": 4, "theta": 1e4, "rotary_dim": None, "layout": "half", "scaling": None}),
    "Rotary()": (Rotary(4), {"x": Q, "offset": 0}),
    "Sinusoidal": (Sinusoidal, {"dim": 8}),
    "Sinusoidal()": (Sinusoidal(8), {"length": 3, "offset": 0}),
    "Learned": (Learned, {"context_length": 8, "dim": 8}),
    "Learned()": (Learned(8, 8), {"length": 3, "offset": 0}),
    "LayerCache.append": (lambda **named: LayerCache().append(**named), {"key": Q, "value": Q}),
    "LayerCache.crop": (LayerCache().crop, {"length": 0}),
    "steps": (steps, {"layer": LAYER, "x": X}),
    "Observation.head": (SEEN.head, {"head": 0}),
    "Observation.weights": (SEEN.weights, {"queries": None, "keys": None}),
    "Observation.top": (SEEN.top, {"count": 2}),
    "Observation.mass": (SEEN.mass, {"groups": torch.tensor([0, 0, 1])}),
    "Observation.compare": (SEEN.compare, {"other": SEEN}),
    "Observation.distances": (SEEN.distances, {"edges": None}),
}  # fmt: skip


def nonsense() -> list[object]:
    return [
        None, "a", 1.5, -1, True, [], {}, [1.0], object(), Causal, lambda: 1, MODEL, Cache(1), float("nan"),
        torch.zeros(()), torch.randn(3), torch.randn(5, 7), torch.zeros(1, 1, 1, 1, 1), torch.tensor([[99, 1]]),
        torch.randn(2, 3, 8).to_sparse(), torch.zeros(2, dtype=torch.cfloat), torch.zeros(2, 3).numpy(),
        torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*[Ss]parse")
def test_an_argument_is_taken_or_refused_in_words(name):
    function, good = GOOD[name]
    function(**good)
    refused = 0
    for argument in good:
        for wrong in nonsense():
            try:
                function(**good | {argument: wrong})
            except (TypeError, ValueError, KernelError) as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                told = f"{name}, {argument}={type(wrong).__name__}: {type(error).__name__}: {error}"
                assert last.filename.startswith(SOURCE), f"not of regard's own words: {told}"
                assert "assert" not in (last.line or ""), told
                refused += 1
            except Exception as error:
                pytest.fail(f"{name}, {argument}={type(wrong).__name__}: {type(error).__name__}: {error}")
    assert refused >= len(good)


def _recorded():
    model = Decoder(CONFIG)
    with regard.record(model) as recording:
        model(TOKENS)
    return recording


@pytest.mark.parametrize(
    ("call", "error", "words"),
    {
        "a layer in another precision": (
            lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8).half()),
            TypeError,
            "query must be torch.float32, as the layer's weights are, got torch.float16",
        ),
        "numbers of tokens for a layer": (
            lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8).long()),
            TypeError,
            "got torch.int64",
        ),
        "half a head": (lambda: MultiHeadAttention(8, 2.0), ValueError, "heads must be a whole number, got 2.0"),
        "a learned scale": (
            lambda: attention(Q, Q, Q, scale=torch.ones(())),
            ValueError,
            "a tensor is a factor of the query: query * scale, with scale=1.0",
        ),
        "and in a rule": (
            lambda: attention(Q, Q, Q, mask=Where(lambda batch, head, query, key: key <= query and key > 1)),
            TypeError,
            "write & | ~ for and, or, not, and torch.where for if",
        ),
        "logits of a model gone wrong": (
            lambda: regard.sample(torch.full((1, 4), torch.nan), temperature=0),
            ValueError,
            "logits must be numbers, one of each row above -inf",
        ),
        "no token allowed": (
            lambda: regard.sample(torch.full((1, 4), -torch.inf)),
            ValueError,
            "logits must be numbers, one of each row above -inf",
        ),
        "no model": (lambda: regard.load(None), TypeError, "load: name must be that of a model or a folder, got None"),
        "words to embed": (
            lambda: regard.embed(Decoder(CONFIG), ["hello"]),
            ValueError,
            "texts must be one or more lists of token numbers",
        ),
        "several heads in one": (
            lambda: regard.Ablate("layers.0", [0, 1]),
            TypeError,
            "head must be a number, got list; of several heads, one Ablate each",
        ),
        "a layer between two": (lambda: regard.Ablate(0.5, 1), TypeError, "layer must be a name or a number, got 0.5"),
        "a factor in words": (lambda: regard.Scale(0, 1, "x"), TypeError, "factor must be a number, got 'x'"),
        "groups below nothing": (
            lambda: regard.observe(Q, Q).mass(torch.tensor([0, -1, 1])),
            ValueError,
            "groups must be numbers from 0 on, got -1",
        ),
        "one query of an observation": (
            lambda: regard.observe(Q, Q).weights(queries=1),
            TypeError,
            "queries and keys must be a slice, a range or None for all, got 1",
        ),
        "words of a recording": (
            lambda: _recorded().summary("hello"),
            TypeError,
            "summary: tokens must be an int tensor [batch, length], got 'hello'",
        ),
        "numbers of texts under jax's name": (
            lambda: attention(Q, Q, Q, segment_ids=torch.zeros(3)),
            TypeError,
            "segment_ids is mask=Document(segment_ids)",
        ),
    }.values(),
)
def test_a_first_mistake_is_one_error_that_names_the_argument(call, error, words):
    with pytest.raises(error) as raised:
        call()
    assert words in str(raised.value)

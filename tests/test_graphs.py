"""Graphs of whole models: torch.compile without a break, and torch.export, torch.jit.trace and ONNX, which leave.

A graph is made from one example and asked about another, of another length, another number of rows and another padding.
"""

import importlib.util
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from transformers import masking_utils

import regard.huggingface
from comparing import assert_close
from lowered import looking
from regard import Alibi, Causal, Prefix, Strided, Window, kernels
from regard.huggingface import mask_for_transformers
from regard.huggingface.symbols import GraphMask, rule_of
from regard.shapes import Grid

regard.huggingface.register()

TOLERANCE = 1e-5

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 41,
}  # fmt: skip
GROUPED = {**SIZES, **NO_TOKENS, "num_key_value_heads": 2, "head_dim": 10}
WINDOWED = {**GROUPED, "sliding_window": 5}
GPT = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 41, **NO_TOKENS}
T5 = {
    "vocab_size": 61, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "Llama, grouped heads": ("LlamaForCausalLM", GROUPED),
    "Mistral, windows": ("MistralForCausalLM", WINDOWED),
    "Gemma2, softcap": (
        "Gemma2ForCausalLM",
        {**WINDOWED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "GPT-OSS, sinks": ("GptOssForCausalLM", {**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "Llama4, chunks": (
        "Llama4ForCausalLM",
        {
            **GROUPED, "attention_chunk_size": 5, "intermediate_size_mlp": 40, "no_rope_layers": [1, 0],
            "num_local_experts": 2, "num_experts_per_tok": 1,
        },
    ),
    "BERT": ("BertModel", SIZES),
    "T5, a position bias": ("T5ForConditionalGeneration", T5),
}  # fmt: skip

TRACING = pytest.mark.filterwarnings(  # sizes that regard compares, and what torch.jit looks up in transformers
    "ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning", "ignore::FutureWarning"
)


class Whole(nn.Module):
    """A model that takes tokens and which of them are real, and gives logits or states."""

    def __init__(self, kind: str, implementation: str = "regard", **changes: Any) -> None:
        super().__init__()
        name, sizes = MODELS[kind]
        made = getattr(transformers, name)
        torch.manual_seed(0)
        config = made.config_class(**{**sizes, **changes})
        self.model = made._from_config(config, attn_implementation=implementation).eval()
        self.more = {} if kind == "BERT" else {"use_cache": False}
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        more = {**self.more, "decoder_input_ids": tokens} if self.model.config.is_encoder_decoder else self.more
        outputs = self.model(tokens, attention_mask=real, **more)
        found: Tensor = outputs.last_hidden_state if "last_hidden_state" in outputs else outputs.logits
        return found


def some_tokens(batch: int = 2, length: int = 13, side: str = "left") -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(length))
    real = torch.ones_like(tokens)
    real[0, slice(4) if side == "left" else slice(-4, None)] = 0
    return tokens, real


EXAMPLE, OTHERS = some_tokens(), (some_tokens(3, 19, "left"), some_tokens(2, 7, "right"))
ANY_LENGTH = ({0: Dim("batch"), 1: Dim("length", max=40)},) * 2


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


LOOKED_AT = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch._dynamo


def trained(function: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output, and the gradients of every parameter."""
    torch.manual_seed(0)  # of what is dropped
    output = function(*inputs)
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()), allow_unused=True)
    return [output, *(gradient for gradient in found if gradient is not None)]


@LOOKED_AT
@pytest.mark.parametrize("kind", ["Mistral, windows", "Gemma2, softcap", "GPT-OSS, sinks", "BERT"])
def test_a_compiled_model_is_one_graph_at_any_length_and_padding(compiler, kind):
    model = Whole(kind)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for inputs in (EXAMPLE, *OTHERS):
            assert_close(compiled(*inputs), model(*inputs), tolerance=TOLERANCE)


def parities(batch, head, query, key):
    return (query - key) % 2 == 0


RULES = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "a window behind": masking_utils.sliding_window_causal_mask_function(3),
    "a window around": masking_utils.sliding_window_bidirectional_mask_function(2),
    "either": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.sliding_window_bidirectional_overlay(2)
    ),
    "strictly before": lambda batch, head, query, key: key + 2 < query,
    "ahead": lambda batch, head, query, key: key - 1 >= query,
    "close": lambda batch, head, query, key: abs(key - query) < 3,
}
LOOKED_UP = {
    "padding": masking_utils.padding_mask_function(torch.ones(1, 9).bool()),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([1])),
    "a rule of another kind": masking_utils.and_masks(masking_utils.causal_mask_function, parities),
    "a rule about rows": lambda batch, head, query, key: (batch == 0) & (key <= query),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_rule_about_positions_is_read_by_calling_it_with_symbols(rule):
    queries, keys = torch.arange(5)[:, None] + 2, torch.arange(9)[None]
    read = rule_of(rule, 2).bind(Grid(1, 1, 5, 9)).allowed(range(5), range(9))
    assert torch.equal(read[0, 0].expand(5, 9), rule(0, 0, queries, keys).expand(5, 9))


@pytest.mark.parametrize("rule", LOOKED_UP.values(), ids=LOOKED_UP.keys())
def test_a_rule_about_more_than_positions_is_not_read(rule):
    assert rule_of(rule, 2) is None


@LOOKED_AT
@pytest.mark.parametrize("rules", [RULES, LOOKED_UP], ids=["read", "not read"])
def test_a_compiler_reads_rules_as_well(compiler, rules):
    shapes = {}

    def model(states):
        for name, rule in rules.items():
            shapes[name] = type(mask_for_transformers(1, 5, 7, q_offset=2, mask_function=rule)) is GraphMask
        return 2 * states

    torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(1))
    assert shapes == dict.fromkeys(rules, rules is RULES)


@LOOKED_AT
def test_no_square_is_held_in_a_compiled_graph(compiler):
    sizes = []

    def look(node):
        value = node.meta.get("val")
        sizes.extend([value.numel()] if isinstance(value, Tensor) else [])

    model = Whole("Mistral, windows", max_position_embeddings=1000, num_hidden_layers=1)
    inputs = some_tokens(1, 900)
    with torch.no_grad():
        found = torch.compile(model, backend=looking(look), fullgraph=True)(*inputs)
        assert_close(found, model(*inputs), tolerance=TOLERANCE)
    assert 900 * 48 <= max(sizes) < 900 * 900 / 4


@LOOKED_AT
def test_a_model_that_works_on_its_mask_gets_the_tensor(compiler):
    def model(states, real):
        mask = mask_for_transformers(2, 5, 5, attention_mask=real)
        shapes = mask.shape, mask.dim(), mask.size(-1), mask.ndim
        return torch.where(mask, 0.0, 1.0), mask[:, :, :, :3], mask & real[:, None, None], mask.sum(), shapes

    real = torch.tensor([[False, True, True, True, True], [True] * 5])
    whole = masking_utils.sdpa_mask(2, 5, 5, attention_mask=real)
    found = torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(1), real)
    expected = torch.where(whole, 0.0, 1.0), whole[:, :, :, :3], whole & real[:, None, None], whole.sum()
    for ours, right in zip(found[:4], expected, strict=True):
        assert torch.equal(ours, right)
    assert tuple(found[4][0]) == tuple(whole.shape)


@LOOKED_AT
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GPT-2", {"attn_pdrop": 0.25, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("Llama, grouped heads", {}),
        ("T5, a position bias", {"dropout_rate": 0.0}),
    ],
    ids=["dropout", "grouped heads", "a bias that learns"],
)
def test_a_compiled_training_step_is_one_graph_with_the_same_gradients(compiler, monkeypatch, kind, changes):
    monkeypatch.setattr(kernels.choice, "FEW_NUMBERS", 0)  # as in a long text
    model = Whole(kind, **changes).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = trained(compiled, model, EXAMPLE), trained(model, model, EXAMPLE)
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, tolerance=1e-4)


@LOOKED_AT
def test_a_static_cache_is_filled_by_compiled_steps(compiler):
    model = Whole("Mistral, windows").model
    given = {
        "attention_mask": EXAMPLE[1], "max_new_tokens": 12, "do_sample": False, "cache_implementation": "static",
        "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True  # transformers compiles on a GPU alone, else
    expected = model.generate(EXAMPLE[0], disable_compile=True, **given)
    assert torch.equal(model.generate(EXAMPLE[0], compile_config=config, **given), expected)
    counted = torch._dynamo.utils.counters
    assert not counted["graph_break"]
    assert 1 <= counted["stats"]["unique_graphs"] <= 3  # not one for each step


@LOOKED_AT
def test_weights_that_are_asked_for_are_whole_tensors_of_a_compiled_graph(compiler):
    model = Whole("Mistral, windows").model

    def weights(tokens: Tensor, real: Tensor) -> Tensor:
        return model(tokens, attention_mask=real, output_attentions=True, use_cache=False).attentions[1]

    with torch.no_grad():
        expected = weights(*EXAMPLE).dense()  # transformers sets up what it collects in the first call, under a lock
        found = torch.compile(weights, backend="eager", fullgraph=True)(*EXAMPLE)
        assert type(found) is Tensor
        assert_close(found, expected, tolerance=TOLERANCE)


def operators(exported: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target).split(".")[0] for node in exported.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("kind", MODELS)
def test_an_exported_model_takes_any_length_and_padding_and_holds_torchs_operators_alone(kind):
    model = Whole(kind)
    exported = torch.export.export(model, EXAMPLE, dynamic_shapes=ANY_LENGTH)
    assert "regard" not in operators(exported)
    for inputs in OTHERS:
        assert_close(exported.module()(*inputs), model(*inputs), tolerance=TOLERANCE)


@TRACING
@pytest.mark.parametrize("kind", ["GPT-2", "Mistral, windows", "GPT-OSS, sinks", "T5, a position bias"])
def test_a_traced_model_takes_any_length_and_padding(kind):
    model = Whole(kind)
    traced = torch.jit.trace(model, EXAMPLE, check_trace=False)
    for inputs in OTHERS:
        assert_close(traced(*inputs), model(*inputs), tolerance=TOLERANCE)


@pytest.mark.skipif(
    importlib.util.find_spec("onnxscript") is None or importlib.util.find_spec("onnxruntime") is None,
    reason="torch.onnx.export(dynamo=True) needs onnxscript, and running its result onnxruntime",
)
@pytest.mark.parametrize("kind", ["Mistral, windows", "Gemma2, softcap", "BERT"])
def test_onnx_computes_the_same_at_any_length_and_padding(kind, tmp_path):
    import onnxruntime

    model, path = Whole(kind), tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, EXAMPLE, dynamo=True, dynamic_shapes=ANY_LENGTH, verbose=False).save(path)
    session = onnxruntime.InferenceSession(path)
    for inputs in OTHERS:
        named = {place.name: tensor.numpy() for place, tensor in zip(session.get_inputs(), inputs, strict=True)}
        assert_close(torch.tensor(session.run(None, named)[0]), model(*inputs).detach(), tolerance=TOLERANCE)


def test_an_exported_vision_model_agrees():
    made = transformers.ViTConfig(
        hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, image_size=16, patch_size=4
    )
    model = transformers.ViTModel._from_config(made, attn_implementation="regard").eval()
    pixels = torch.randn(5, 3, 16, 16)
    exported = torch.export.export(model, (pixels[:2],), dynamic_shapes=({0: Dim("batch")},), strict=False)
    assert_close(exported.module()(pixels).last_hidden_state, model(pixels).last_hidden_state, tolerance=TOLERANCE)


def test_weights_that_are_asked_for_are_whole_tensors_of_an_exported_graph():
    class Weights(Whole):
        def forward(self, tokens, real):
            return self.model(tokens, attention_mask=real, output_attentions=True, **self.more).attentions[1]

    model = Weights("GPT-OSS, sinks")
    exported = torch.export.export(model, EXAMPLE, dynamic_shapes=ANY_LENGTH)
    for inputs in OTHERS:
        assert_close(exported.module()(*inputs), model(*inputs).dense(), tolerance=TOLERANCE)


def test_a_dropout_in_training_is_refused_in_words():
    model = Whole("BERT", attention_probs_dropout_prob=0.1).train()
    with pytest.raises(ValueError, match=r"dropout=0\.1 cannot be exported.*eval mode"):
        torch.export.export(model, EXAMPLE)


def test_training_without_dropout_exports():
    model = Whole("Llama, grouped heads").train()
    exported = torch.export.export(model, EXAMPLE, dynamic_shapes=ANY_LENGTH)
    inputs = OTHERS[0]
    theirs = torch.autograd.grad(exported.module()(*inputs).square().sum(), list(exported.parameters()))
    ours = torch.autograd.grad(model(*inputs).square().sum(), list(model.parameters()))
    for one, other in zip(theirs, ours, strict=True):
        assert_close(one, other, tolerance=1e-4)


OWN = {
    "causal": {"mask": Causal()},
    "a window with a prefix": {"mask": Causal() & (Window(5) | Prefix(2))},
    "softcap": {"mask": Causal() & Strided(3), "softcap": 3.0},
    "a bias": {"mask": Causal(), "bias": Alibi(6)},
}


@TRACING
@pytest.mark.parametrize("given", OWN.values(), ids=OWN.keys())
def test_regards_own_layers_export_too(given):
    layer = regard.MultiHeadAttention(48, 6, kv_heads=2, **given).eval()
    example, other = torch.randn(2, 13, 48), torch.randn(3, 19, 48)
    any_length = ({0: Dim("batch"), 1: Dim("length", min=2, max=40)},)
    exported = torch.export.export(layer, (example,), dynamic_shapes=any_length)
    assert "regard" not in operators(exported)
    assert_close(exported.module()(other), layer(other), tolerance=TOLERANCE)
    assert_close(torch.jit.trace(layer, example, check_trace=False)(other), layer(other), tolerance=TOLERANCE)


def test_the_bounds_of_packed_texts_are_refused_in_words_where_a_graph_leaves():
    class Packed(Whole):
        def forward(self, tokens, bounds):
            return self.model(tokens, use_cache=False, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds).logits

    tokens = EXAMPLE[0][:1]
    with pytest.raises(ValueError, match=r"cu_seq_lens_k cannot be exported.*position_ids"):
        torch.export.export(Packed("Llama, grouped heads"), (tokens, torch.tensor([0, 5, 13])))


@TRACING
def test_a_graph_that_leaves_is_for_other_numbers_of_queries_than_the_one_it_was_traced_with():
    def run(query, key):
        return regard.attention(query, key, key, mask=Causal())

    draw = torch.Generator().manual_seed(0)
    one, three, keys = (torch.randn(1, 2, length, 8, generator=draw) for length in (1, 3, 7))
    traced = torch.jit.trace(run, (one, keys), check_trace=False)
    assert_close(traced(one, keys), run(one, keys))
    assert_close(traced(three, keys), run(three, keys))

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

import regard.huggingface
from comparing import assert_close
from regard import Alibi, Causal, Prefix, Strided, Window, kernels

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
    monkeypatch.setattr(kernels, "SMALL", 0)  # as in a long text
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

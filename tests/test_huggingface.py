"""regard inside transformers: tiny random models of many families against "eager", and mutants that must not pass.

The library draws weights so small that attention is almost even, and a wrong mask hardly shows. Here they are drawn
with 1.5 / sqrt(fan-in), so that a head attends to few tokens. Only real tokens are compared: a query that sees nothing
gets a mean from "eager" and 0 from regard.
"""

import copy
import gc
import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel, StaticCache, masking_utils
from transformers.pytorch_utils import Conv1D

import regard
from cases import ABSENT, around, needs_library
from comparing import assert_close, assert_same_cells, assert_within_budget
from regard import functional, hooks, huggingface, one_query
from regard.huggingface import LazyMask, LazyWeights, attend, interface, mask_for_transformers, masks, reading
from regard.layers import Heads
from regard.masks import Causal, Dense, Document, Padding, Window
from regard.observation import MAX_NUMBERS_AT_ONCE
from regard.shapes import Grid, ShapeError

regard.huggingface.register()

BATCH, LENGTH, VOCAB, LAYERS, HEADS, KV_HEADS, WINDOW = 2, 13, 61, 2, 6, 2, 5
DIM, HIDDEN = 48, 40  # experts want rows of whole 16 bytes, of bfloat16 too
TOLERANCE = 1e-5

NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 41,
}
PLAIN = {**SIZES, **NO_TOKENS}
GROUPED = {**PLAIN, "num_key_value_heads": KV_HEADS}
WIDE = {**GROUPED, "head_dim": 10}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
GPT = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 41, **NO_TOKENS}
GEMMA = {**WIDE, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": HEADS, "q_lora_rank": 11, "kv_lora_rank": 13, "qk_rope_head_dim": 6, "qk_nope_head_dim": 5,
    "v_head_dim": 7, "moe_intermediate_size": HIDDEN, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "num_local_experts": 4}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", WIDE),
    "Mistral, windows": ("MistralForCausalLM", {**WIDE, "sliding_window": WINDOW}),
    "Mixtral, windows": ("MixtralForCausalLM", {**GROUPED, "sliding_window": WINDOW, **EXPERTS}),
    "Qwen2, a window in one layer": (
        "Qwen2ForCausalLM",
        {**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", WIDE),
    "Gemma": ("GemmaForCausalLM", WIDE),
    "Gemma2, softcap": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3": ("Gemma3ForCausalLM", {**GEMMA, **MIXED}),
    "GPT-OSS, sinks": ("GptOssForCausalLM", {**WIDE, "sliding_window": WINDOW, **EXPERTS}),
    "Llama4, chunks": (
        "Llama4ForCausalLM",
        {
            **GROUPED,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": HIDDEN,
            "no_rope_layers": [1, 0],
            **EXPERTS,
        },
    ),
    "DeepseekV3, another value size": ("DeepseekV3ForCausalLM", {**PLAIN, **LATENT}),
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPTBigCode, one kv head": ("GPTBigCodeForCausalLM", GPT),
    "GPTNeoX": ("GPTNeoXForCausalLM", PLAIN),
    "OPT": (
        "OPTForCausalLM",
        {**PLAIN, "ffn_dim": HIDDEN, "word_embed_proj_dim": DIM, "pad_token_id": 1, "eos_token_id": 1},
    ),
    "Phi": ("PhiForCausalLM", GROUPED),
    "Phi3": ("Phi3ForCausalLM", GROUPED),
    "Cohere": ("CohereForCausalLM", GROUPED),
    "Cohere2, windows": ("Cohere2ForCausalLM", {**GROUPED, "sliding_window": WINDOW}),
    "Olmo2": ("Olmo2ForCausalLM", GROUPED),
    "Starcoder2, windows": ("Starcoder2ForCausalLM", {**GROUPED, "sliding_window": WINDOW}),
    "StableLm": ("StableLmForCausalLM", GROUPED),
    "Granite": ("GraniteForCausalLM", {**GROUPED, "attention_multiplier": 0.4}),
    "Nemotron": ("NemotronForCausalLM", GROUPED),
    "Persimmon": ("PersimmonForCausalLM", PLAIN),
    "Glm": ("GlmForCausalLM", GROUPED),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED),
    "Exaone4, windows": ("Exaone4ForCausalLM", {**GROUPED, "sliding_window": WINDOW, "sliding_window_pattern": 2}),
    "Helium": ("HeliumForCausalLM", {**GROUPED, "head_dim": DIM // HEADS}),
    "BioGpt": ("BioGptForCausalLM", PLAIN),
}
SELECTING: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV32": ("DeepseekV32ForCausalLM", {**PLAIN, **INDEXED}),
    "GlmMoeDsa": ("GlmMoeDsaForCausalLM", {**PLAIN, **INDEXED}),
    "HYV4": ("HYV4ForCausalLM", {**PLAIN, **INDEXED}),
    "AXK2": ("AXK2ForCausalLM", {**PLAIN, **INDEXED}),
    "Dots3Note": ("Dots3NoteForCausalLM", {**PLAIN, **INDEXED}),
    "MiniMaxM3VL, blocks of 3 keys": (
        "MiniMaxM3VLForCausalLM",
        {
            **WIDE, **EXPERTS, "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": KV_HEADS,
            "index_head_dim": 10, "index_block_size": 3, "index_topk_blocks": 2,
        },
    ),
    "Doge": ("DogeForCausalLM", {**GROUPED, "keep_window_size": 4}),
}  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", SIZES),
    "RoBERTa": ("RobertaModel", {**SIZES, "pad_token_id": 0}),
    "ELECTRA": ("ElectraModel", {**SIZES, "embedding_size": 11}),
    "ALBERT": ("AlbertModel", {**SIZES, "embedding_size": 11}),
    "DistilBERT": ("DistilBertModel", {"vocab_size": VOCAB, "dim": DIM, "hidden_dim": HIDDEN, "n_heads": 6}),
    "ModernBERT, windows": (
        "ModernBertModel",
        {
            **SIZES, "local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1,
        },
    ),
}  # fmt: skip
T5_SIZES = {
    "vocab_size": VOCAB, "d_model": DIM, "d_kv": 10, "d_ff": HIDDEN, "num_layers": 2, "num_heads": HEADS,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
BART_SIZES = {
    "vocab_size": VOCAB, "d_model": DIM, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "bos_token_id": 0,
    "max_position_embeddings": 41, "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "T5, position bias": ("T5ForConditionalGeneration", T5_SIZES),
    "BART": ("BartForConditionalGeneration", BART_SIZES),
    "Marian": ("MarianMTModel", BART_SIZES),
}
VISION = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "image_size": 12, "patch_size": 4}  # fmt: skip
WHISPER = {
    **BART_SIZES, "num_mel_bins": 7, "max_source_positions": 11, "max_target_positions": 23,
    "begin_suppress_tokens": None,
}  # fmt: skip


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """The model with sharp attention, with constants and norms that are not 0 and 1, and without dropout."""
    flipped = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in looked_up:
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[0 if id(parameter) in flipped else -1] ** -0.5)
            else:  # the weight of a norm, a sink, or a constant
                parameter.normal_(mean=1.0 if name.endswith("weight") else 0.0, std=0.3)
    model.tie_weights()
    return model.eval()


def pair(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One model twice: with attention by "eager" and by regard."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    made = getattr(transformers, kind)
    config = (
        made.config_class(**sizes)
        if made is not transformers.Gemma3ForCausalLM
        else transformers.Gemma3TextConfig(**sizes)
    )
    theirs = drawn(made._from_config(config, attn_implementation="eager")).to(dtype)
    ours = made._from_config(copy.deepcopy(config), attn_implementation="regard").to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def some_tokens(length: int = LENGTH, batch: int = BATCH) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def real_tokens(side: str) -> Tensor:
    """Bool [batch, length]: none is padding, the first or the last of a row are."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if side != "none":
        real[0, slice(0, 4) if side == "left" else slice(9, None)] = False
    return real


def state(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


@torch.no_grad()
def agree(
    theirs: PreTrainedModel,
    ours: PreTrainedModel,
    real: Tensor | None = None,
    tolerance: float = TOLERANCE,
    **inputs: Any,
) -> None:
    """The same logits or states of real tokens, relative to the largest."""
    expected, actual = state(theirs(**inputs)), state(ours(**inputs))
    real = torch.ones(expected.shape[:2], dtype=torch.bool) if real is None else real
    scale = expected[real].abs().max()
    assert_close(actual[real] / scale, expected[real] / scale, tolerance=tolerance)


def generated(model: PreTrainedModel, tokens: Tensor, **arguments: Any) -> Any:
    return model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, **arguments)


def of(families: dict[str, tuple[str, dict[str, Any]]], *names: str) -> Any:
    chosen = {name: family for name, family in families.items() if not names or name.split(",")[0] in names}
    return pytest.mark.parametrize(("kind", "sizes"), chosen.values(), ids=chosen)


# --- the families -------------------------------------------------------------------------------------------------


@of(CAUSAL)
def test_a_causal_family_gives_eagers_logits_with_padding_left_right_and_none(kind, sizes):
    theirs, ours = pair(kind, sizes)
    for side in ("none", "left", "right"):
        real = real_tokens(side)
        agree(theirs, ours, real, input_ids=some_tokens(), attention_mask=real.long())
    agree(theirs, ours, input_ids=some_tokens())


@of(CAUSAL)
def test_a_causal_family_generates_eagers_tokens_with_a_dynamic_and_a_static_cache(kind, sizes):
    theirs, ours = pair(kind, sizes)
    tokens, real = some_tokens(), real_tokens("left").long()
    expected = generated(theirs, tokens, attention_mask=real)
    assert torch.equal(generated(ours, tokens, attention_mask=real), expected)
    assert torch.equal(generated(ours, tokens, attention_mask=real, cache_implementation="static"), expected)


def pair_of_selecting(kind: str, sizes: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A pair, of which the first takes torch's function where transformers has it for the family."""
    theirs, ours = pair(kind, sizes)
    if theirs._supports_sdpa:  # "eager" gives real tokens of MiniMax that see no real block another result
        theirs.set_attn_implementation("sdpa")
    return theirs, ours


@of(SELECTING)
def test_a_family_that_selects_keys_for_each_query_gives_the_same_logits(kind, sizes):
    theirs, ours = pair_of_selecting(kind, sizes)
    if kind == "DogeForCausalLM":  # rounding to float32 would decide which of two keys is selected, as near ties are
        theirs, ours = theirs.double(), ours.double()
    compiled = torch.compile(ours, backend="eager")
    for side in ("none", "left", "right"):
        real = real_tokens(side)
        inputs = {"input_ids": some_tokens(), "attention_mask": real.long()}
        agree(theirs, ours, real, **inputs)
        agree(theirs, compiled, real, **inputs)
    agree(theirs, ours, input_ids=some_tokens())


@of(SELECTING)
def test_a_family_that_selects_keys_for_each_query_generates_the_same_tokens(kind, sizes):
    theirs, ours = pair_of_selecting(kind, sizes)
    tokens, real = some_tokens(), real_tokens("left").long()
    for cache in (None, "static"):  # which give different tokens in some of these families
        expected, actual = (
            generated(model, tokens, attention_mask=real, cache_implementation=cache) for model in (theirs, ours)
        )
        assert torch.equal(actual, expected), cache


@of(SELECTING, "DeepseekV32", "MiniMaxM3VL", "Doge")
def test_what_a_selecting_family_learns_and_its_weights_are_eagers(kind, sizes):
    theirs, ours = pair(kind, sizes)
    tokens = some_tokens()
    for expected, actual in zip(*(m(tokens, output_attentions=True).attentions for m in (theirs, ours)), strict=True):
        assert_close(actual.dense(), expected, tolerance=TOLERANCE)
    assert (expected == 0).sum() > 0.55 * expected.numel()  # causality alone leaves out less than half
    for model in (theirs, ours):
        model(tokens, labels=tokens).loss.backward()
    for expected, actual in zip(theirs.parameters(), ours.parameters(), strict=True):
        if expected.grad is not None:
            assert_close(actual.grad, expected.grad, tolerance=TOLERANCE * max(1.0, expected.grad.abs().max().item()))


APPENDING: dict[str, Any] = {
    **PLAIN, "head_dim": 8, "num_hidden_layers": 3, "sliding_window": WINDOW, "q_lora_rank": 11, "o_groups": 2,
    "o_lora_rank": 5, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 3, "moe_intermediate_size": HIDDEN,
    "n_routed_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}  # fmt: skip


@pytest.mark.parametrize("side", ["none", "left", "right", "no mask"])
def test_a_model_that_knows_masks_of_numbers_only_may_append_keys_and_columns(side):
    """DeepSeek V4 appends keys that stand for several tokens, and 0 or -inf for them in the dtype of its mask: as bools
    these would be turned round."""
    theirs, ours = pair("DeepseekV4ForCausalLM", APPENDING)
    tokens = some_tokens()
    masked = {} if side == "no mask" else {"attention_mask": real_tokens(side).long()}
    agree(theirs, ours, masked["attention_mask"].bool() if masked else None, input_ids=tokens, **masked)
    if side != "right":
        assert torch.equal(generated(ours, tokens, **masked), generated(theirs, tokens, **masked))


@torch.no_grad()
def test_what_a_model_appends_to_its_mask_in_a_graph_is_right_or_refused():
    torch._dynamo.reset()  # transformers' wrappers are one function of all models, which is not compiled without end
    theirs, ours = pair("DeepseekV4ForCausalLM", APPENDING)
    compiled = torch.compile(ours, backend="eager")
    agree(theirs, compiled, input_ids=some_tokens(), use_cache=False)
    with pytest.raises(ShapeError, match="the mask is for"):  # a regard mask, to which nothing can be appended
        compiled(some_tokens(), attention_mask=real_tokens("left").long(), use_cache=False)


@torch.no_grad()
def test_a_model_imported_later_does_not_compile_another_one_again(monkeypatch):
    """Whether a model takes bools is asked of the classes of all models, on which no graph may depend."""
    torch._dynamo.reset()
    monkeypatch.setattr(masks, "_KNOW_BOOLS", {})
    _, ours = pair("LlamaForCausalLM", WIDE)
    counter = CompileCounter()
    compiled, tokens = torch.compile(ours, backend=counter), some_tokens()
    compiled(tokens, attention_mask=real_tokens("left").long(), use_cache=False)
    frames = counter.frame_count
    type("ImportedLater", (PreTrainedModel,), {})
    compiled(tokens, attention_mask=real_tokens("right").long(), use_cache=False)
    assert counter.frame_count == frames


def test_a_mask_of_numbers_is_the_tensor_of_eager():
    config = transformers.GptOssForCausalLM.config_class()
    for places, padding in ((AT_ONCE, None), (AFTER, torch.arange(17).expand(2, 17) > 4)):
        lazy, whole = both(places, stranger, padding, config=config)
        numbers = torch.zeros(whole.shape).masked_fill(~whole, torch.finfo(torch.float32).min)
        assert lazy.dtype == torch.float32
        appended = torch.randn(*whole.shape[:3], 3)
        assert torch.equal(torch.cat([lazy, appended], -1), torch.cat([numbers, appended], -1))
        assert torch.equal(torch.nn.functional.pad(lazy, (0, 2)), torch.nn.functional.pad(numbers, (0, 2)))
        assert torch.equal(lazy[..., :2], numbers[..., :2])
        assert torch.equal(lazy < 0, numbers < 0)
        assert torch.equal(lazy.dense() == 0, whole)
        with pytest.raises(ValueError, match=r"works on its mask itself \(add_\)"):
            lazy.add_(1.0)


def test_the_keys_that_a_query_selects_are_those_of_the_mask_that_it_names():
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    numbers = torch.tensor([[0, 3, 3, -1], [6, 1, 2, 0], [-1, -1, -1, 4], [5, 6, 7, 9], [-1, -1, -1, -1]])
    numbers = torch.stack([numbers, numbers.flip(0)])
    chosen = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for row, query_number, place in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(4)).tolist():
        if 0 <= (number := int(numbers[row, query_number, place])) < 7:
            chosen[row, 0, query_number, number] = True
    lazy = mask_for_transformers(2, 5, 7, q_offset=2)
    for mask, allowed in ((lazy, lazy.dense() & chosen), (None, Causal(0).allowed(range(5), range(7)) & chosen)):
        made = attend(Layer(), query, key, value, mask, indices=numbers.int())[0]
        assert_close(made, regard.attention(query, key, value, mask=Dense(allowed)).transpose(1, 2))
    blocks = numbers.clamp(max=2)[:, None].expand(2, 2, 5, 4).clone()
    blocks[:, 1, :, :2] = 1  # other blocks in the second group of heads
    layer = Layer(indexer=Layer(block_size=3))
    of_keys = torch.tensor([0, 0, 0, 1, 1, 1, 2])
    chosen = (blocks[..., None] == of_keys).any(3).repeat_interleave(3, dim=1)
    made = attend(layer, query, key, value, lazy, block_indices=blocks)[0]
    expected = regard.attention(query, key, value, mask=Dense(lazy.dense() & chosen))
    assert_close(made, expected.transpose(1, 2))
    one = attend(Layer(), query[:, :, :1], key, value, None, indices=numbers[:, :1])[0]
    allowed = torch.tensor([[1, 0, 0, 1, 0, 0, 0], [0] * 7], dtype=torch.bool)[:, None, None]
    assert_close(one, regard.attention(query[:, :, :1], key, value, mask=Dense(allowed)).transpose(1, 2))
    for wrong in (numbers[:1], numbers.float(), numbers[0], [0, 1]):
        with pytest.raises(ShapeError, match=r"regard: indices must be int \[2, 5, 'any'\]"):
            attend(Layer(), query, key, value, lazy, indices=wrong)
    with pytest.raises(ShapeError, match=r"regard: block_indices must be int \[2, 2, 5, 'any'\]"):
        attend(layer, query, key, value, lazy, block_indices=numbers)
    for other in ({"indices": numbers}, {}):
        with pytest.raises(ValueError, match=r"as the layer's indexer.block_size says"):
            attend(layer if other else Layer(), query, key, value, lazy, block_indices=blocks, **other)


@of(ENCODERS)
def test_an_encoder_gives_eagers_states(kind, sizes):
    theirs, ours = pair(kind, sizes)
    for side in ("none", "left", "right"):
        real = real_tokens(side)
        agree(theirs, ours, real, input_ids=some_tokens(), attention_mask=real.long())


@of(SEQ2SEQ)
def test_an_encoder_decoder_gives_eagers_logits_and_tokens(kind, sizes):
    theirs, ours = pair(kind, sizes)
    real, decoder_real = real_tokens("right"), torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    texts = {"input_ids": some_tokens(), "attention_mask": real.long()}
    agree(
        theirs,
        ours,
        decoder_real,
        **texts,
        decoder_input_ids=some_tokens(7),
        decoder_attention_mask=decoder_real.long(),
    )
    expected = generated(theirs, texts["input_ids"], attention_mask=real.long())
    assert torch.equal(generated(ours, texts["input_ids"], attention_mask=real.long()), expected)
    beams = generated(theirs, texts["input_ids"], attention_mask=real.long(), num_beams=3)
    assert torch.equal(generated(ours, texts["input_ids"], attention_mask=real.long(), num_beams=3), beams)


def test_speech_agrees():
    theirs, ours = pair("WhisperForConditionalGeneration", WHISPER)
    agree(theirs, ours, input_features=torch.randn(BATCH, 7, 22), decoder_input_ids=some_tokens(5))
    sizes = {**SIZES, "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
             "num_conv_pos_embedding_groups": 2}  # fmt: skip
    theirs, ours = pair("Wav2Vec2Model", sizes)
    agree(theirs, ours, input_values=torch.randn(BATCH, 43))


@pytest.mark.parametrize("kind", ["ViTModel", "DeiTModel", "Dinov2Model", "SiglipVisionModel", "BeitModel"])
def test_vision_agrees(kind):
    theirs, ours = pair(kind, VISION)
    agree(theirs, ours, pixel_values=torch.randn(BATCH, 3, 12, 12))


def test_text_and_image_side_by_side_agree():
    text = {**SIZES, "bos_token_id": 0, "eos_token_id": 1, "projection_dim": 7}
    theirs, ours = pair(
        "CLIPModel", {"text_config": text, "vision_config": VISION | {"projection_dim": 7}, "projection_dim": 7}
    )
    inputs = {
        "input_ids": some_tokens(),
        "attention_mask": real_tokens("right").long(),
        "pixel_values": torch.randn(3, 3, 12, 12),
    }
    with torch.no_grad():
        assert_close(ours(**inputs).logits_per_text, theirs(**inputs).logits_per_text, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "sizes"), [("GPT2LMHeadModel", GPT), ("BertModel", SIZES), ("T5EncoderModel", T5_SIZES)]
)
def test_in_float64_the_agreement_is_tight(kind, sizes):
    # families whose softmax stays in the dtype of the model
    theirs, ours = pair(kind, sizes, torch.float64)
    real = real_tokens("right")
    # T5 rounds to float32 in one place of its own
    agree(theirs, ours, real, 1e-12, input_ids=some_tokens(), attention_mask=real.long())


@of(CAUSAL, "Llama", "Mistral", "Gemma2", "GPT-OSS", "GPT-2")
def test_bfloat16_is_no_further_from_the_truth_than_eager(kind, sizes):
    theirs, ours = pair(kind, sizes, torch.bfloat16)
    truth = copy.deepcopy(theirs).float()  # experts know no float64
    tokens = some_tokens(batch=1)
    with torch.no_grad():
        assert_within_budget(ours(tokens).logits, truth(tokens).logits.double(), theirs(tokens).logits)


def test_autocast_takes_what_a_norm_left_in_float32():
    theirs, ours = pair("Qwen3ForCausalLM", WIDE)
    tokens = some_tokens()
    with torch.no_grad():
        exact = theirs(tokens).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(ours(tokens).logits.float(), exact, tolerance=0.05)


# --- caches, packing, training ------------------------------------------------------------------------------------


@of(CAUSAL, "Llama", "Mistral", "Gemma2", "GPT-OSS", "Llama4", "DeepseekV3", "GPT-2")
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_a_prompt_in_pieces_gives_what_it_gives_whole(kind, sizes, cache):
    theirs, ours = pair(kind, sizes)
    tokens = some_tokens()
    kept = cache(config=ours.config, **({} if cache is DynamicCache else {"max_cache_len": 17}))
    with torch.no_grad():
        whole = theirs(tokens).logits
        pieces = [
            ours(tokens[:, i:j], past_key_values=kept, use_cache=True).logits for i, j in ((0, 6), (6, 7), (7, 13))
        ]
    assert_close(torch.cat(pieces, 1), whole, tolerance=TOLERANCE)


@of(CAUSAL, "Llama", "Mistral", "Llama4", "Gemma2")
def test_packed_texts_do_not_see_each_other(kind, sizes):
    theirs, ours = pair(kind, sizes)
    texts = [some_tokens(n, batch=1) for n in (7, 1, 8)]
    packed = torch.cat(texts, 1)
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    agree(theirs, ours, input_ids=packed, position_ids=positions, use_cache=False)
    with torch.no_grad():
        alone = torch.cat([ours(text).logits for text in texts], 1)
        assert_close(ours(packed, position_ids=positions, use_cache=False).logits, alone, tolerance=TOLERANCE)


def test_texts_laid_end_to_end_for_flash_attention_do_not_see_each_other():
    _, ours = pair("LlamaForCausalLM", WIDE)
    texts = [some_tokens(n, batch=1) for n in (7, 1, 5)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    bounds = torch.tensor([0, 7, 8, 13], dtype=torch.int32)
    # a mask of ones hides from transformers that the positions begin anew, so that only the bounds tell
    with torch.no_grad():
        packed = ours(
            torch.cat(texts, 1), attention_mask=torch.ones(1, LENGTH), position_ids=positions, cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds, max_length_q=7, max_length_k=7,
        ).logits  # fmt: skip
        assert_close(packed, torch.cat([ours(text).logits for text in texts], 1), tolerance=TOLERANCE)


def gradients(
    model: PreTrainedModel, tokens: Tensor, real: Tensor | None = None, **arguments: Any
) -> dict[str, Tensor]:
    """Of each parameter, relative to its largest, or to a thousandth of the largest of all (where it is noise)."""
    model.zero_grad()
    labels = tokens if real is None else tokens.masked_fill(~real, -100)
    model.train()(
        tokens, labels=labels, attention_mask=None if real is None else real.long(), **arguments
    ).loss.backward()
    model.eval()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    least = max(g.abs().max() for g in found.values()) / 1000
    return {name: gradient / gradient.abs().max().clamp(min=least) for name, gradient in found.items()}


@of(CAUSAL, "Llama", "Mistral", "Gemma2", "GPT-OSS", "Llama4", "DeepseekV3")
def test_training_has_eagers_gradients(kind, sizes):
    theirs, ours = pair(kind, sizes)
    tokens, real = some_tokens(), real_tokens("right")
    expected = gradients(theirs, tokens, real)
    actual = gradients(ours, tokens, real)
    assert expected.keys() == actual.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name, tolerance=1e-4)


def test_gradients_flow_into_position_bias():
    theirs, ours = pair("T5ForConditionalGeneration", {**T5_SIZES, "dropout_rate": 0.0})
    tokens = some_tokens()
    expected, actual = gradients(theirs, tokens), gradients(ours, tokens)
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name, tolerance=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(reentrant):
    _, ours = pair("MistralForCausalLM", {**WIDE, "sliding_window": WINDOW})
    tokens, real = some_tokens(), real_tokens("left")
    expected = gradients(ours, tokens, real, use_cache=False)
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # it wants an input that takes part
        ours.enable_input_require_grads()
    actual = gradients(ours, tokens, real, use_cache=False)
    for name, gradient in expected.items():
        assert_close(actual[name], gradient, name, tolerance=1e-5)


def test_a_compiled_model_agrees():
    theirs, ours = pair("MistralForCausalLM", {**WIDE, "sliding_window": WINDOW, "num_hidden_layers": 1})
    tokens, real = some_tokens(), real_tokens("left")
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=real.long()).logits[real]
        assert_close(compiled(tokens, attention_mask=real.long()).logits[real], expected, tolerance=TOLERANCE)


# --- mutants ------------------------------------------------------------------------------------------------------


def ignore_mask(query, key, value, **arguments):
    return regard.attention(query, key, value, **{**arguments, "mask": None})


def tile_heads(query, key, value, **arguments):
    copies = query.shape[1] // key.shape[1]
    return regard.attention(query, key.repeat(1, copies, 1, 1), value.repeat(1, copies, 1, 1), **arguments)


def without(name):
    return lambda query, key, value, **arguments: regard.attention(query, key, value, **{**arguments, name: None})


def top_left(query, key, value, **arguments):
    return regard.attention(query, key, value, **{**arguments, "mask": Causal(offset=0)})


def another_scale(query, key, value, **arguments):
    return regard.attention(query, key, value, **{**arguments, "scale": arguments["scale"] * 1.01})


def of_mask_alone(mutant):
    """In place of `LazyMask.attend`."""

    def attend(lazy: LazyMask, query, key, value, scale, softcap, sink, bias) -> tuple[Tensor, None]:
        more = {"scale": scale, "softcap": softcap, "sink": sink, "bias": bias, "additive": None}
        return mutant(query, key, value, mask=lazy.mask, **more), None

    return attend


@pytest.mark.parametrize(
    ("family", "mutant"),
    [
        ("Llama", ignore_mask), ("Llama", tile_heads), ("Gemma2, softcap", without("softcap")),
        ("GPT-OSS, sinks", without("sink")), ("Granite", without("scale")), ("Mistral, windows", top_left),
        ("Llama4, chunks", top_left), ("GPT-2", another_scale),
    ],
)  # fmt: skip
def test_a_mutant_of_attention_is_noticed(monkeypatch, family, mutant):
    theirs, ours = pair(*CAUSAL[family])
    inputs = {"input_ids": some_tokens()}
    agree(theirs, ours, **inputs)
    monkeypatch.setattr(hooks, "attention", mutant)
    monkeypatch.setattr(LazyMask, "attend", of_mask_alone(mutant))
    with pytest.raises(AssertionError, match="off by"):
        agree(theirs, ours, **inputs)


@pytest.mark.parametrize("short", [True, False])
def test_a_lost_position_bias_is_noticed(monkeypatch, short):
    theirs, ours = pair(*SEQ2SEQ["T5, position bias"])
    attend_mask = LazyMask.attend
    if short:
        monkeypatch.setattr(LazyMask, "attend", lambda lazy, *given: attend_mask(lazy, *given[:6]))
    else:
        monkeypatch.setattr(LazyMask, "attend", lambda *given: None)
        agree(theirs, ours, input_ids=some_tokens(), decoder_input_ids=some_tokens(5))
        monkeypatch.setattr(hooks, "attention", without("bias"))
    with pytest.raises(AssertionError, match="off by"):
        agree(theirs, ours, input_ids=some_tokens(), decoder_input_ids=some_tokens(5))


def test_a_lost_padding_is_noticed(monkeypatch):
    theirs, ours = pair(*ENCODERS["BERT"])
    real = real_tokens("right")
    monkeypatch.setattr(masks, "Padding", lambda real: Padding(torch.ones_like(real)))
    with pytest.raises(AssertionError, match="off by"):
        agree(theirs, ours, real, input_ids=some_tokens(), attention_mask=real.long())


def test_a_window_applied_once_more_by_the_argument_is_noticed(monkeypatch):
    # as if it were the layer's to apply, from the corner that a text without a cache has
    theirs, ours = pair(*CAUSAL["Mistral, windows"])
    tokens = some_tokens()

    def last_piece() -> Tensor:
        kept = DynamicCache()  # one that keeps what the window hides
        ours(tokens[:, :7], past_key_values=kept, use_cache=True)
        return ours(tokens[:, 7:], past_key_values=kept, use_cache=True).logits

    def twice(module, query, key, value, mask, sliding_window=None, **others):
        mask = LazyMask(mask.mask & Window(sliding_window, 0), (mask.shape[0], *mask.shape[2:]), mask.device)
        return attend(module, query, key, value, mask, sliding_window=sliding_window, **others)

    with torch.no_grad():
        expected = theirs(tokens).logits[:, 7:]
        assert_close(last_piece(), expected, tolerance=TOLERANCE)
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "regard", twice)
        agree(theirs, ours, input_ids=tokens)  # a text at once does not show it
        with pytest.raises(AssertionError, match="off by"):
            assert_close(last_piece(), expected, tolerance=TOLERANCE)


def test_a_bidirectional_window_read_as_a_causal_one_is_noticed(monkeypatch):
    theirs, ours = pair(*ENCODERS["ModernBERT, windows"])
    agree(theirs, ours, input_ids=some_tokens())
    name = "sliding_window_bidirectional_overlay"
    narrower = reading._KNOWN[name]._replace(
        reading=lambda inside, place: Window(inside["sliding_window"], place.offset)
    )
    monkeypatch.setitem(reading._KNOWN, name, narrower)
    with pytest.raises(AssertionError, match="off by"):
        agree(theirs, ours, input_ids=some_tokens())


# --- masks --------------------------------------------------------------------------------------------------------


def both(
    places: dict[str, Any], function: Callable[..., Any], padding: Tensor | None = None, **others: Any
) -> tuple[LazyMask, Tensor]:
    """The mask that regard makes, and transformers' own."""
    arguments = {**places, "mask_function": function, "attention_mask": padding, **others}
    whole = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return mask_for_transformers(**arguments, allow_is_causal_skip=True, dtype=torch.float32), whole


def at(query: int, key: int, query_len: int, key_len: int) -> dict[str, Any]:
    return {"batch_size": 2, "q_length": query_len, "kv_length": key_len, "q_offset": query, "kv_offset": key}


AT_ONCE, AFTER, FORGOTTEN, AHEAD = at(0, 0, 17, 17), at(11, 0, 6, 17), at(13, 7, 4, 10), at(0, 0, 5, 17)
IDS = torch.tensor([[0] * 5 + [1] * 12, [0] * 3 + [1] + [2] * 13])
COUNTED = torch.tensor([[*range(5), *range(12)], [*range(3), 7, *range(13)]])
GROUPS = torch.tensor([[-1] * 3 + [0] * 4 + [-1] * 5 + [1] * 5, [-1] * 17])
REAL = torch.tensor([[False] * 4 + [True] * 13, [True] * 11 + [False] * 6])
LEFT = torch.tensor([4, 0])

RULES: dict[str, Callable[[], Callable[..., Any]]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "everything": lambda: masking_utils.bidirectional_mask_function,
    "causal window": lambda: masking_utils.sliding_window_causal_mask_function(5),
    "window": lambda: masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda: masking_utils.chunked_causal_mask_function(5, LEFT),
    "whole chunks": lambda: masking_utils.chunked_causal_mask_function(7, torch.zeros(2, dtype=torch.int64)),
    "groups": lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(GROUPS)
    ),
    "texts": lambda: masking_utils.packed_sequence_mask_function(IDS),
    "padded": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.padding_mask_function(REAL)
    ),
}
PACKED: dict[str, Callable[[], Callable[..., Any]]] = {
    f"packed {name}": lambda rule=rule: masking_utils.packed_sequence_compatibility_function(rule(), COUNTED, IDS)
    for name, rule in RULES.items()
    if name in ("causal", "everything", "causal window", "window", "whole chunks")
}


def stranger(batch, head, query, key):
    return (query * 7 + key * 3 + batch) % 5 != 0


def for_single_numbers(batch, head, query, key):
    return torch.stack([query - key, key - query]).max() < 4


@pytest.mark.parametrize("places", [AT_ONCE, AFTER, FORGOTTEN, AHEAD], ids=["at once", "after", "forgotten", "ahead"])
@pytest.mark.parametrize(
    "padding", [None, REAL, REAL[:, :13], torch.ones_like(REAL)], ids=["none", "some", "short", "all"]
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_of_transformers_is_read_in_closed_form(places, padding, rule):
    lazy, whole = both(places, rule(), padding)
    assert "Where" not in repr(lazy)
    assert lazy.shape == whole.shape
    assert_same_cells(lazy.dense(), whole)


@pytest.mark.parametrize("rule", PACKED.values(), ids=PACKED)
def test_a_rule_inside_packed_texts_is_read_in_closed_form(rule):
    lazy, whole = both(AT_ONCE, rule())
    assert "Where" not in repr(lazy)
    assert_same_cells(lazy.dense(), whole)


def test_positions_that_do_not_count_one_by_one_are_asked():
    positions = COUNTED.clone()
    positions[0, 7] = 3
    rule = masking_utils.packed_sequence_compatibility_function(masking_utils.sliding_window_overlay(3), positions, IDS)
    lazy, whole = both(AT_ONCE, rule)
    assert "Where" in repr(lazy)
    assert_same_cells(lazy.dense(), whole)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_an_unknown_rule_is_asked_and_the_known_ones_around_it_are_read(one_by_one):
    rule = masking_utils.and_masks(masking_utils.sliding_window_causal_mask_function(9), stranger)
    for places in (AT_ONCE, AFTER, FORGOTTEN):
        lazy, whole = both(places, rule, REAL, use_vmap=one_by_one)
        assert "Causal" in repr(lazy)
        assert "Where(stranger)" in repr(lazy)
        assert_same_cells(lazy.dense(), whole)


def test_a_rule_about_heads_is_asked_about_the_first_as_transformers_asks():
    lazy, whole = both(AT_ONCE, lambda batch, head, query, key: (query + key) % 3 != head)
    allowed = lazy.mask.bind(Grid(2, HEADS, 17, 17)).allowed(range(17), range(17))
    assert_same_cells(allowed.expand(2, HEADS, 17, 17), whole.expand(2, HEADS, 17, 17))


def test_a_rule_that_takes_single_numbers_only_is_asked_about_them():
    lazy, whole = both(
        AFTER, masking_utils.or_masks(masking_utils.causal_mask_function, for_single_numbers), use_vmap=True
    )
    assert_same_cells(lazy.dense(), whole)


@given(st.data())
def test_rules_joined_in_any_way_say_what_transformers_says(data):
    rules = [rule() for rule in RULES.values()] + [stranger]

    def draw(depth: int) -> Callable[..., Any]:
        if not depth or data.draw(st.booleans()):
            return data.draw(st.sampled_from(rules))
        join = data.draw(st.sampled_from([masking_utils.and_masks, masking_utils.or_masks]))
        return join(*(draw(depth - 1) for _ in range(data.draw(st.integers(1, 3)))))

    start = data.draw(st.integers(0, 9))
    places = at(
        start, data.draw(st.integers(0, 5)), data.draw(st.integers(1, 17 - start)), data.draw(st.integers(1, 12))
    )
    lazy, whole = both(places, draw(2), data.draw(st.sampled_from([None, REAL])))
    if lazy is None:  # one query that sees every key
        assert places["q_length"] == 1
        assert whole.all()
    else:
        assert_same_cells(lazy.dense(), whole)


@pytest.mark.parametrize("change", ["meaning", "name inside", "gone"])
def test_a_rule_that_changed_in_transformers_is_no_longer_read_but_asked(monkeypatch, change):
    def overlay(sliding_window):
        width = sliding_window
        if change == "meaning":
            return lambda batch, head, query, key: key >= query - sliding_window
        return lambda batch, head, query, key: key > query - width

    if change == "gone":
        monkeypatch.delattr(masking_utils, "sliding_window_overlay")
    else:
        monkeypatch.setattr(masking_utils, "sliding_window_overlay", overlay)
    monkeypatch.setattr(reading, "_TRUSTED", {})
    reading._learn.cache_clear()
    try:
        rule = masking_utils.and_masks(masking_utils.causal_mask_function, overlay(3))
        lazy, whole = both(AFTER, rule)
    finally:
        reading._learn.cache_clear()
    assert "Where" in repr(lazy)
    assert "Causal" in repr(lazy) or change == "gone"  # without it there is no example of both
    assert_same_cells(lazy.dense(), whole)


def test_every_known_rule_of_this_transformers_is_trusted():
    mask_for_transformers(1, 2, 2)
    assert sorted(reading._TRUSTED.values()) == sorted(reading._KNOWN)


def test_a_mask_for_a_million_tokens_is_a_rule():
    rule = masking_utils.sliding_window_causal_mask_function(4096)
    lazy = mask_for_transformers(1, 10**6, 10**6, mask_function=rule)
    assert lazy.shape == (1, 1, 10**6, 10**6)
    assert lazy.mask.tile(range(128), range(128, 256)) is regard.Tile.EMPTY
    with pytest.raises(ValueError, match=r"not made.*ask \.mask\.allowed"):
        lazy.dense()


def test_a_lazy_mask_survives_what_transformers_does_with_masks():
    lazy = mask_for_transformers(2, 3, 7, q_offset=torch.tensor(4), attention_mask=torch.ones(2, 7, dtype=torch.bool))
    assert isinstance(lazy, Tensor)
    assert (lazy.ndim, lazy.dim(), len(lazy), lazy.dtype, lazy.device.type) == (4, 4, 2, torch.bool, "cpu")
    assert lazy.size(-1) == 7
    for same in (lazy.contiguous(), lazy.clone(), lazy.detach(), lazy.to("cpu"), lazy.to(torch.bool)):
        assert same is lazy
    assert not lazy.requires_grad
    assert repr(lazy) == "LazyMask(Causal(offset=4), [2, 1, 3, 7])"


def test_a_mask_moves_with_its_data():
    rule = masking_utils.or_masks(RULES["chunks"](), RULES["groups"](), RULES["texts"]())
    lazy = both(AT_ONCE, rule, REAL)[0].to("meta")
    assert lazy.device.type == "meta"
    assert lazy.mask.right.keys.device.type == "meta"
    assert lazy.mask.left.right.query_ids.device.type == "meta"


@pytest.mark.parametrize("kind", ["MPNetModel", "BigBirdPegasusModel"])
def test_a_model_that_computes_its_weights_itself_gives_the_same(kind):
    """The first in all layers, the second in those of its encoder."""
    decodes = kind == "BigBirdPegasusModel"
    names = {"hidden_size": "d_model", "intermediate_size": "encoder_ffn_dim", "num_hidden_layers": "encoder_layers"}
    names |= {"num_attention_heads": "encoder_attention_heads"}
    more = {"decoder_layers": LAYERS, "decoder_attention_heads": HEADS, "decoder_ffn_dim": HIDDEN}
    sizes = {**{names.get(name, name): size for name, size in SIZES.items()}, **more} if decodes else SIZES
    theirs, ours = pair(kind, sizes)
    compiled = torch.compile(ours, backend="eager")
    for side in ("none", "left", "right"):
        real = real_tokens(side)
        inputs = {"input_ids": some_tokens(), "attention_mask": real.long()}
        if decodes:
            inputs["decoder_input_ids"], real = some_tokens(7), None
        agree(theirs, ours, real, **inputs)
        agree(theirs, compiled, real, **inputs)
    grads = []
    for model in (theirs, ours):
        state(model(**inputs)).square().mean().backward()
        grads.append([one.grad for one in model.parameters() if one.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for expected, actual in zip(*grads, strict=True):
        assert_close(actual, expected, tolerance=TOLERANCE)
    if decodes:
        with regard.record(ours) as recording:
            ours(**inputs)
        assert len(recording) == 2 * LAYERS  # of the decoder
    else:
        with pytest.raises(ValueError, match="computes its attention itself"), regard.record(ours):
            ours(**inputs)


def test_a_sum_with_a_mask_stands_for_the_scores_of_a_model_that_computes_its_weights_itself():
    lazy, whole = both(AFTER, stranger)
    scores = torch.randn(whole.shape[0], 4, *whole.shape[2:])
    numbers = scores.masked_fill(~whole, torch.finfo(scores.dtype).min)
    found = scores + lazy
    assert_close(found.softmax(-1), numbers.softmax(-1))
    assert_close(torch.nn.functional.softmax(found, dim=-1, dtype=torch.float64), numbers.double().softmax(-1))
    assert_close(torch.maximum(found, numbers), numbers)
    assert_close(found.float().sum(-1), numbers.sum(-1))
    with pytest.raises(ValueError, match=r"works on its mask itself \(mul_\)"):
        found.mul_(2.0)


@pytest.mark.filterwarnings("ignore:Dynamo detected")  # what transformers calls there
@torch.no_grad()
def test_a_model_that_looks_at_its_mask_of_numbers_gives_the_same():
    """NLLB-MoE takes it for padding, wherever it is not 0."""
    theirs, ours = pair("NllbMoeModel", {"vocab_size": VOCAB, "d_model": DIM, "encoder_layers": 1, "decoder_layers": 1,
                                         "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
                                         "encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 2,
                                         "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN})  # fmt: skip
    inputs = {"attention_mask": real_tokens("right").long(), "decoder_input_ids": some_tokens(5)}
    for model in (ours, torch.compile(ours, backend="eager")):
        agree(theirs, model, None, input_ids=some_tokens(), **inputs)


@torch.no_grad()
def test_masks_are_joined_in_a_graph():
    """As T5Gemma 2 joins those of what it writes and of what it reads."""

    def joined(states: Tensor, real: Tensor) -> Tensor:
        masks = [
            masking_utils.create_causal_mask(config, states, real, None),
            masking_utils.create_bidirectional_mask(config, states, real),
        ]
        return torch.cat(masks, dim=-1)

    config = transformers.LlamaConfig(**WIDE, attn_implementation="regard")
    states, real = torch.randn(BATCH, LENGTH, DIM), real_tokens("left")
    found = torch.compile(joined, backend="eager", fullgraph=True)(states, real)
    config._attn_implementation = "sdpa"
    assert_same_cells(found, joined(states, real))


def test_a_mask_takes_part_in_logic_and_in_nothing_else():
    lazy, whole = both(AFTER, stranger)
    assert_same_cells(lazy & whole, whole)
    assert_same_cells(~lazy, ~whole)
    assert_same_cells(torch.cat([lazy, whole], -1), torch.cat([whole, whole], -1))
    assert torch.equal(copy.deepcopy(lazy), whole)
    scores = torch.randn(whole.shape)
    assert torch.equal(scores.masked_fill(~lazy, -1.0), scores.masked_fill(~whole, -1.0))
    assert torch.equal(scores.masked_fill(lazy, -1.0), scores.masked_fill(whole, -1.0))
    assert torch.equal(torch.where(lazy, 0.0, -1.0), torch.where(whole, 0.0, -1.0))
    for use in (
        lambda: lazy + 0.0, lambda: 1.0 - lazy, lambda: lazy.float(), lambda: lazy.any(), lambda: lazy == 0,
        lambda: torch.where(whole, lazy, 0.0), lambda: torch.where(lazy, lazy, 0.0), lambda: scores[lazy],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="works on its mask itself"):
            use()


def test_a_part_of_a_mask_takes_part_in_logic_and_in_nothing_else():
    lazy, whole = both(AFTER, stranger)
    for part, cells in (
        (lazy[:, 0], whole[:, 0]),
        (lazy[..., :2], whole[..., :2]),
        (lazy[:, 0][:, None].expand_as(whole).contiguous(), whole),
        (lazy[:, :, -1].transpose(0, 2).unsqueeze(0).squeeze(0), whole[:, :, -1].transpose(0, 2)),
        (lazy[:].repeat_interleave(2, dim=1).to(whole.device).detach(), whole.repeat_interleave(2, dim=1)),
    ):
        numbers = torch.randn(cells.shape)
        assert (part.shape, part.dtype, part.dim()) == (cells.shape, torch.bool, cells.dim())
        assert torch.equal(part & cells, cells)
        assert torch.equal(~part, ~cells)
        assert torch.equal(numbers.masked_fill(part, -1.0), numbers.masked_fill(cells, -1.0))
        assert torch.equal(torch.where(part, numbers, 0.0), torch.where(cells, numbers, 0.0))
        for use in (
            lambda part, numbers: numbers + part, lambda part, numbers: part + 0.0, lambda part, numbers: 1.0 - part,
            lambda part, numbers: part.float(), lambda part, numbers: part.to(torch.float32),
            lambda part, numbers: part == 0, lambda part, numbers: numbers.masked_fill(part == 0, -1.0),
            lambda part, numbers: part.any(), lambda part, numbers: torch.where(numbers > 0, part, 0.0),
            lambda part, numbers: part.long().sum(), lambda part, numbers: numbers[part],
        ):  # fmt: skip
            with pytest.raises(ValueError, match="works on its mask itself"):
                use(part, numbers)
    query, key, value = torch.randn(3, 2, 4, whole.shape[3], 8)
    query = query[:, :, -whole.shape[2] :]
    assert_close(attend(Layer(), query, key, value, lazy[:])[0], attend(Layer(), query, key, value, whole)[0])


# --- nothing square -----------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has that is made meanwhile; what holds no numbers has none."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor) and not isinstance(made, LazyMask | LazyWeights):
                self.numbers = max(self.numbers, made.untyped_storage().nbytes() // made.element_size())
        return result


@pytest.mark.parametrize("family", ["Mistral, windows", "Llama4, chunks", "Gemma2, softcap"])
def test_nothing_of_length_times_length_is_made(family):
    length = 1531
    kind, sizes = CAUSAL[family]
    theirs, ours = pair(
        kind, {**sizes, "max_position_embeddings": length, "num_attention_heads": 2, "num_hidden_layers": 2}
    )
    tokens, real = some_tokens(length, batch=1), torch.ones(1, length, dtype=torch.int64)
    real[0, :7] = 0
    with torch.no_grad(), Largest() as seen:
        output = ours(tokens, attention_mask=real, output_attentions=True, logits_to_keep=1)
        assert output.attentions[1][0, 0, -3:, -2:].shape == (3, 2)
    assert seen.numbers < length * length / 2
    if family.startswith("Mistral"):
        with torch.no_grad(), Largest() as seen:
            theirs(tokens, attention_mask=real, logits_to_keep=1)
        assert seen.numbers >= length * length


# --- one call -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def heads(query_len: int = 7, key_len: int = 11, batch: int = 2) -> Heads:
    query = torch.randn(batch, 6, query_len, 5)
    return Heads(query, torch.randn(batch, 2, key_len, 5), torch.randn(batch, 2, key_len, 3))


def computed(given: Heads, mask: Any = None, layer: nn.Module | None = None, **arguments: Any) -> Tensor:
    output, weights = attend(layer or Layer(), *given, mask, **arguments)
    assert weights is None
    assert output.is_contiguous()
    return output.transpose(1, 2)


def test_the_output_has_heads_behind_length():
    given = heads()
    assert attend(Layer(is_causal=False), *given, None)[0].shape == (2, 7, 6, 3)
    assert torch.equal(computed(given, layer=Layer(is_causal=False)), regard.attention(*given))


def test_no_mask_is_causal_from_the_top_left_corner_unless_the_layer_says_otherwise():
    given = heads()
    causal = regard.attention(*given, mask=Causal(offset=0))
    assert_close(computed(given), causal)
    assert_close(computed(given, layer=Layer(is_causal=True)), causal)
    assert_close(computed(given, layer=Layer(is_causal=False), is_causal=True), causal)
    assert_close(computed(given, layer=Layer(is_causal=True), is_causal=False), regard.attention(*given))
    last = Heads(given.query[:, :, :1], *given[1:])
    assert_close(computed(last), regard.attention(*last))


def test_no_mask_and_a_window_is_a_window_where_it_is_clear_which():
    given = heads()
    assert_close(computed(given, sliding_window=3), regard.attention(*given, mask=Causal(0) & Window(3, 0)))
    last = Heads(given.query[:, :, :1], *given[1:])
    assert_close(computed(last, sliding_window=3), regard.attention(*last, mask=Causal() & Window(3)))
    assert_close(computed(given, is_causal=False, sliding_window=11), regard.attention(*given))
    with pytest.raises(ValueError, match="sliding_window=10 without a mask"):
        computed(given, is_causal=False, sliding_window=10)


def test_a_window_beside_a_mask_is_for_information():
    given, mask = heads(), mask_for_transformers(2, 7, 11, q_offset=4)
    assert_close(computed(given, mask, sliding_window=2), regard.attention(*given, mask=Causal(4)))


def test_a_callers_own_mask_is_taken_as_it_is():
    given, allowed = heads(), torch.rand(2, 1, 7, 11) > 0.4
    added = torch.randn(1, 6, 7, 11)
    assert_close(computed(given, allowed), regard.attention(*given, mask=Dense(allowed)))
    assert_close(computed(given, added), regard.attention(*given, bias=added))
    assert_close(computed(given, added, position_bias=added), regard.attention(*given, bias=2 * added))
    assert_close(
        computed(given, allowed, position_bias=added), regard.attention(*given, mask=Dense(allowed), bias=added)
    )


def test_a_whole_model_takes_a_callers_own_mask():
    theirs, ours = pair("LlamaForCausalLM", WIDE)
    allowed = (torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.4) | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    tokens = some_tokens()
    agree(theirs, ours, input_ids=tokens, attention_mask=added)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=added).logits
        assert_close(ours(tokens, attention_mask=allowed).logits, expected, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    "mask", [torch.ones(2, 11, dtype=torch.bool), torch.ones(2, 1, 7, 11, dtype=torch.int64), "causal"], ids=str
)
def test_a_mask_that_could_mean_two_things_is_refused(mask):
    with pytest.raises(ValueError, match="attention_mask must be bool"):
        computed(heads(), mask)


def test_a_mask_for_other_lengths_is_refused():
    for lazy in (mask_for_transformers(2, 7, 13), mask_for_transformers(2, 5, 11), mask_for_transformers(3, 7, 11)):
        with pytest.raises(ShapeError, match=r"the mask is for \[batch"):
            computed(heads(), lazy)
    assert computed(heads(), mask_for_transformers(1, 7, 11)).shape == (2, 6, 7, 3)


def test_padding_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"padding must be \[batch, length\]"):
        mask_for_transformers(2, 7, 7, attention_mask=torch.ones(2, 7, 7, dtype=torch.bool))


def test_an_argument_that_is_not_understood_is_refused_by_name(monkeypatch):
    for name in ("block_table", "head_mask", "sparse_keys", "sinks"):
        with pytest.raises(ValueError, match=f"was given {name}, and regard does not know"):
            computed(heads(), **{name: torch.zeros(1)})
        computed(heads(), **{name: None})
    computed(heads(), position_ids=torch.zeros(1), use_cache=True, max_length_q=3, deterministic=True)
    monkeypatch.setattr(interface, "HARMLESS", huggingface.HARMLESS | {"sinks"})
    computed(heads(), sinks=torch.zeros(1))


def test_continuous_batching_is_refused():
    with pytest.raises(ValueError, match="continuous batching"):
        computed(heads(), cache=object())


def test_the_bounds_of_packed_texts_keep_them_apart():
    given, bounds = heads(7, 7, batch=1), torch.tensor([0, 3, 4, 7], dtype=torch.int32)
    documents = Document.from_lengths([3, 1, 3])
    ends = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert_close(computed(given, **ends), regard.attention(*given, mask=Causal() & documents))
    assert_close(computed(given, is_causal=False, **ends), regard.attention(*given, mask=documents))
    for wrong in (
        {"cu_seq_lens_q": bounds}, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds + 1},
        {"cu_seq_lens_q": bounds[:3], "cu_seq_lens_k": bounds[:3]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must be equal"):
            computed(given, **wrong)
    with pytest.raises(ValueError, match="2 rows"):
        computed(heads(7, 7), **ends)


def test_a_learnt_query_serves_every_row():
    query, key, value = heads()
    one = query[:1]
    assert_close(
        computed(Heads(one, key, value), is_causal=False), regard.attention(one.expand(2, -1, -1, -1), key, value)
    )


def test_weights_are_dropped_in_training_alone():
    given, layer = heads(), Layer(is_causal=False)
    assert torch.equal(computed(given, layer=layer.eval(), dropout=0.5), regard.attention(*given))
    torch.manual_seed(3)
    dropped = computed(given, layer=layer.train(), dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(dropped, regard.attention(*given, dropout=0.5))
    assert not torch.equal(dropped, regard.attention(*given))


def test_a_hook_stands_around_attention():
    given, mask, layer, sink = heads(), mask_for_transformers(2, 7, 11, q_offset=4), Layer().eval(), torch.randn(6)
    told: list[Any] = []

    def double(heads, scoring, compute):
        told.append((heads, scoring))
        return 2 * compute(heads._replace(value=heads.value + 1), scoring)

    with around(layer, double):
        actual = computed(given, mask, layer, scaling=0.3, softcap=5.0, s_aux=sink)
    expected = regard.attention(
        given.query, given.key, given.value + 1, mask=Causal(4), scale=0.3, softcap=5.0, sink=sink
    )
    assert_close(actual, 2 * expected)
    ((seen, scoring),) = told
    assert isinstance(seen, Heads)
    assert seen.key.shape == (2, 2, 11, 5)
    assert repr(scoring["mask"]) == "Causal(offset=4)"
    assert scoring["additive"] is scoring["bias"] is None
    assert regard.observe(seen.query, seen.key, **scoring).weights().shape == (2, 6, 7, 11)


def test_a_hook_on_a_models_layer_can_take_a_head_out():
    _, ours = pair("LlamaForCausalLM", WIDE)
    tokens = some_tokens()

    def silence(heads, scoring, compute):
        output = compute(heads, scoring).clone()
        output[:, 3] = 0
        return output

    with torch.no_grad():
        before = ours(tokens).logits
        with around(ours.model.layers[0].self_attn, silence):
            assert not torch.allclose(ours(tokens).logits, before)
        assert torch.equal(ours(tokens).logits, before)


# --- weights ------------------------------------------------------------------------------------------------------


def weights(key_len: int = 11, query_len: int = 11) -> LazyWeights:
    mask = mask_for_transformers(2, query_len, key_len, q_offset=key_len - query_len)
    made = attend(Layer(), *heads(query_len, key_len), mask, output_attentions=True)[1]
    assert isinstance(made, LazyWeights)
    return made


def attentions_agree(
    theirs: PreTrainedModel, ours: PreTrainedModel, real: Tensor, tolerance: float = TOLERANCE, **inputs: Any
) -> None:
    with torch.no_grad():
        expected, actual = (model(**inputs, output_attentions=True) for model in (theirs, ours))
    names = [name for name in expected if name.endswith("attentions") and expected[name]]
    assert names
    for name in names:
        assert len(actual[name]) == len(expected[name])
        for mine, eager in zip(actual[name], expected[name], strict=True):
            assert isinstance(mine, LazyWeights)
            assert mine.shape == eager.shape
            rows = (
                real if mine.shape[2] == real.shape[1] else torch.ones(mine.shape[0], mine.shape[2], dtype=torch.bool)
            )
            rows = rows[:, None].expand(mine.shape[:3])
            assert_close(mine[rows], eager[rows], name, tolerance=tolerance)


@of(CAUSAL, "Llama", "Mistral", "Gemma2", "GPT-OSS", "GPT-2", "OPT", "DeepseekV3")
def test_attentions_of_a_causal_family_are_eagers(kind, sizes):
    real = real_tokens("left")
    attentions_agree(*pair(kind, sizes), real, input_ids=some_tokens(), attention_mask=real.long())


def test_attentions_of_encoders_and_encoder_decoders_are_eagers():
    real = real_tokens("right")
    for name in ("BERT", "DistilBERT", "ModernBERT, windows"):
        attentions_agree(*pair(*ENCODERS[name]), real, input_ids=some_tokens(), attention_mask=real.long())
    for name in ("T5, position bias", "BART"):
        inputs = {"input_ids": some_tokens(), "attention_mask": real.long(), "decoder_input_ids": some_tokens(7)}
        # T5 does not scale its scores: they are large, and so is what float32 rounds off
        attentions_agree(*pair(*SEQ2SEQ[name]), real, 1e-4 if name.startswith("T5") else TOLERANCE, **inputs)


def test_attentions_are_not_made_unless_asked_for():
    for family in ("Llama", "GPT-2"):
        _, ours = pair(*CAUSAL[family])
        assert ours(some_tokens()).attentions is None
    assert attend(Layer(), *heads(), None, output_attentions=False)[1] is None


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_attentions_of_generated_tokens_are_eagers(cache):
    theirs, ours = pair("LlamaForCausalLM", WIDE)
    tokens, asked = some_tokens(), {"output_attentions": True, "return_dict_in_generate": True}
    expected = generated(theirs, tokens, **asked).attentions
    actual = generated(ours, tokens, **asked, cache_implementation=cache).attentions
    for mine, eager in zip(actual, expected, strict=True):
        for layer, of_eager in zip(mine, eager, strict=True):
            assert_close(layer[..., : of_eager.shape[-1]], of_eager, tolerance=TOLERANCE)
            assert_close(layer.sum(-1), torch.ones(layer.shape[:3]))


@pytest.mark.parametrize(
    "index",
    [
        0, -1, (0, 3), (1, -2, 4), (0, 5, 4, -1), (..., slice(2, 5)), (slice(None), 2, slice(-3, None), slice(None, 4)),
        (0, ..., 1), (slice(0, 1), slice(1, 5, 2), slice(None, None, 3), slice(8, 2)), (Ellipsis,), (None, 0),
        ([0, 1], 2), (torch.tensor([1, 0]),), (0, slice(4), torch.tensor([3, 5])), slice(None), (0, 1, 2, 3),
    ],
    ids=str,
)  # fmt: skip
def test_a_part_of_the_weights_is_that_part_of_all(index):
    for lazy in (weights(), weights(query_len=2)):
        rows = lazy.shape[2]
        if rows == 2 and isinstance(index, tuple) and any(isinstance(x, int) and abs(x) > 1 for x in index[2:3]):
            continue
        if rows == 2 and isinstance(index, tuple) and isinstance(index[-1], Tensor) and len(index) == 3:
            continue
        assert_close(lazy[index], lazy.dense()[index])


def test_places_outside_are_index_errors():
    lazy = weights()
    for index in (2, (0, 6), (0, 0, 11), (0, 0, 0, -12), (0, 0, 0, 0, 0)):
        with pytest.raises(IndexError):
            lazy[index]


def test_weights_behave_like_the_tensor():
    lazy = weights()
    whole = lazy.dense()
    assert type(whole) is Tensor
    assert (lazy.shape, lazy.dtype, lazy.device, lazy.dim()) == (whole.shape, whole.dtype, whole.device, 4)
    assert_close(lazy.mean(1), whole.mean(1))
    assert_close(torch.stack([lazy, lazy]), torch.stack([whole, whole]))
    assert_close(lazy * 2 + whole, 3 * whole)
    assert_close(lazy @ torch.ones(11, 3), whole @ torch.ones(11, 3))
    assert_close(torch.as_tensor(lazy), whole)
    assert torch.equal(lazy.argmax(-1), whole.argmax(-1))
    assert np.array_equal(lazy.numpy(), whole.numpy())
    assert np.array_equal(np.asarray(lazy), whole.numpy())
    assert lazy.tolist() == whole.tolist()
    assert torch.equal(copy.deepcopy(lazy), whole)
    assert [row.shape for row in lazy] == [(6, 11, 11)] * 2
    assert lazy.double().dtype == torch.float64
    assert repr(lazy) == "LazyWeights([2, 6, 11, 11], torch.float32)"
    torch.save(lazy, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), whole)


def test_the_observation_is_at_hand():
    lazy = weights()
    assert_close(lazy.observation.received(), lazy.dense().sum(2))
    assert lazy.observation.entropy().shape == (2, 6, 11)


def test_many_weights_are_refused_with_advice_and_a_rectangle_is_given():
    length = 8209
    query, key = torch.randn(1, 1, length, 5), torch.randn(1, 1, length, 5)
    lazy = attend(Layer(), query, key, key, mask_for_transformers(1, length, length), output_attentions=True)[1]
    assert lazy.numel() > MAX_NUMBERS_AT_ONCE
    for use in (lazy.dense, lambda: lazy.mean(), lambda: torch.stack([lazy])):
        with pytest.raises(ValueError, match=r"not made.*weights\[0, 3, -64:, -64:\].*entropy\(\)"):
            use()
    corner = torch.softmax(query[0, 0, -2:] @ key[0, 0, : length - 1].T * 5**-0.5, -1)
    assert_close(lazy[0, 0, -2, :7], corner[0, :7])


def test_gradients_flow_through_weights():
    theirs, ours = pair("GPT2LMHeadModel", GPT)
    tokens = some_tokens()
    for model in (theirs, ours):
        given = model(tokens, output_attentions=True).attentions
        assert given[1].requires_grad
        (given[1][0, 2, -3:].pow(2).sum() + given[0].pow(3).sum()).backward()
    for (name, expected), actual in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (expected.grad is None) == (actual.grad is None), name
        if expected.grad is not None:
            assert_close(actual.grad, expected.grad, name, tolerance=1e-4)


def test_nothing_is_written_into_what_holds_no_numbers():
    lazy, plain = weights(), torch.zeros(2, 6, 11, 11)
    for write in (
        lambda: lazy.zero_(), lambda: lazy.__setitem__(0, 1.0), lambda: lazy.__iadd__(1.0),
        lambda: torch.add(plain, plain, out=lazy),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="would write into a tensor that holds no numbers"):
            write()
    plain.copy_(lazy)
    assert_close(plain, lazy.dense())


def test_weights_whose_key_was_written_over_are_no_longer_told():
    given = heads(11, 11)
    lazy = attend(Layer(), *given, None, output_attentions=True)[1]
    given.key.zero_()
    with pytest.raises(ValueError, match="written over"):
        lazy.dense()


@pytest.mark.parametrize("query_len", [1, 10])
def test_after_a_cache_weights_do_not_change_with_it(query_len):
    given = heads(query_len, 11)
    lazy = attend(Layer(), *given, None, output_attentions=True)[1]
    before = lazy.dense().clone()
    given.key.zero_()
    assert torch.equal(lazy.dense(), before)
    if query_len == 1:
        with pytest.raises(ValueError, match="the weights alone are kept"):
            lazy.observation.entropy()
    else:
        assert lazy.observation.entropy().shape == (2, 6, 10)


# --- transformers itself ------------------------------------------------------------------------------------------


def test_a_model_that_is_there_can_change_over_and_back():
    theirs, _ = pair("LlamaForCausalLM", WIDE)
    tokens = some_tokens()
    with torch.no_grad():
        expected = theirs(tokens).logits
        theirs.set_attn_implementation("regard")
        assert type(theirs(tokens, output_attentions=True).attentions[0]) is LazyWeights
        assert_close(theirs(tokens).logits, expected, tolerance=TOLERANCE)
        theirs.set_attn_implementation("eager")
        assert torch.equal(theirs(tokens).logits, expected)


def test_layers_that_share_a_mask_are_checked_once_and_each_gets_what_it_asks_for(monkeypatch):
    real = torch.arange(11) >= torch.tensor([[3], [0]])
    lazy = mask_for_transformers(2, 7, 11, q_offset=4, attention_mask=real)
    looked: list[int] = []
    check = functional.check_call
    monkeypatch.setattr(masks, "check_call", lambda *given: (looked.append(1), check(*given))[1])

    def right(given: Heads, **arguments: Any) -> None:
        names = {"scaling": "scale", "softcap": "softcap", "s_aux": "sink"}
        parts = {names[name]: value for name, value in arguments.items()}
        expected = regard.attention(*given, mask=lazy.mask, **parts, kernel="reference")
        assert_close(computed(given, lazy, **arguments), expected)

    for _ in range(3):
        given = heads()
        before = len(looked)
        assert_close(computed(given, lazy), computed(given, lazy))
        assert len(looked) - before <= 1
    assert sum(looked) == 1
    for _ in range(2):
        right(heads(), scaling=0.1)
        right(heads(), scaling=3.0)
        right(heads(), scaling=3.0, softcap=2.0)
        right(heads(), s_aux=torch.linspace(-1, 1, 6))
        right(Heads(*(tensor.double() for tensor in heads())))
    learning = Heads(*(tensor.requires_grad_() for tensor in heads()))
    computed(learning, lazy).sum().backward()
    assert all(tensor.grad is not None for tensor in learning)
    query, key, value = heads()
    with pytest.raises(TypeError, match="share one of float64"):
        computed(Heads(query, key.double(), value), lazy)
    with pytest.raises(ShapeError, match="the layer has"):
        computed(heads(query_len=6), lazy)


# --- models that take their attention from elsewhere --------------------------------------------------------------

SMALL_VISION: dict[str, Any] = {
    "hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": HIDDEN, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_that_adds_numbers_to_its_mask_is_followed(shared):
    sizes = SMALL_VISION | {"use_shared_relative_position_bias": shared, "use_relative_position_bias": not shared}
    theirs, ours = pair("BeitModel", sizes)
    for model in (theirs, ours):
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "relative_position_bias_table" in name:
                nn.init.normal_(parameter)
    pixels = torch.randn(2, 3, 16, 16)
    outputs = [model(pixel_values=pixels).last_hidden_state for model in (theirs, ours)]
    assert_close(*outputs, tolerance=TOLERANCE)
    for output in outputs:
        output.sin().sum().backward()
    for (name, one), (_, other) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        if "relative_position_bias_table" in name:
            assert one.grad.abs().sum() > 0
            assert_close(other.grad, one.grad, name, tolerance=TOLERANCE)


def test_numbers_added_to_a_mask_are_followed_in_a_compiled_model_too():
    theirs, ours = pair("BeitModel", SMALL_VISION | {"use_relative_position_bias": True})
    pixels, real = torch.randn(2, 3, 16, 16), torch.ones(2, 17, dtype=torch.bool)
    real[0, 9:] = False
    with torch.no_grad():
        outputs = [
            model(pixel_values=pixels, attention_mask=real).last_hidden_state[real]
            for model in (ours, torch.compile(ours, backend="eager"), theirs)
        ]
    assert_close(outputs[0], outputs[2], tolerance=TOLERANCE)
    assert_close(outputs[1], outputs[2], tolerance=TOLERANCE)


def test_a_lazy_mask_and_numbers_are_a_mask_with_a_bias():
    lazy = mask_for_transformers(
        2, 3, 5, q_offset=2, attention_mask=torch.tensor([[False] * 2 + [True] * 3, [True] * 5])
    )
    bias = torch.randn(1, 4, 3, 5)
    for added in (lazy + bias, bias + lazy, torch.add(lazy, bias), lazy.add(bias)):
        assert isinstance(added, LazyMask)
        assert (added.shape, added.dtype) == ((2, 4, 3, 5), torch.float32)
        expected = bias.expand(2, -1, -1, -1).masked_fill(~lazy.dense(), -torch.inf)
        assert torch.equal(added.dense(), expected)
        assert torch.equal((added + 2 * bias).dense(), expected + 2 * bias)
        assert added.to(torch.float32) is added
        assert "Padding" in repr(added)
    with pytest.raises(ValueError, match="works on its mask itself"):
        (lazy + bias) & lazy
    for wrong in (torch.ones(1, 1, 3, 6), torch.ones(3, 1, 3, 5), torch.ones(1, 1, 3, 5, dtype=torch.int64), 1.0):
        with pytest.raises(ValueError, match="works on its mask itself"):
            lazy + wrong


def test_a_part_that_takes_its_attention_from_a_table_is_named_with_what_to_write():
    vision = {
        "hidden_size": DIM, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
        "patch_size": 4, "window_size": 0, "global_attn_indexes": [0], "mlp_dim": HIDDEN,
    }  # fmt: skip
    decoder = {"hidden_size": 16, "num_attention_heads": 4, "mlp_dim": HIDDEN, "num_hidden_layers": 1}
    config = transformers.SamConfig(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config=decoder,
    )
    with pytest.raises(
        ValueError,
        match=r"SamVision takes its attention from a table of its own, which has eager, sdpa: .* "
        r'Write attn_implementation=\{"": "regard", "vision_config": "eager"\}; the rest of SamModel is under regard',
    ):
        transformers.SamModel._from_config(copy.deepcopy(config), attn_implementation="regard")
    advised = {"": "regard", "vision_config": "eager"}
    model = transformers.SamModel._from_config(copy.deepcopy(config), attn_implementation=advised)
    assert model.config._attn_implementation == "regard"
    assert model.vision_encoder.config._attn_implementation == "eager"


def test_a_model_that_takes_its_attention_from_a_table_is_told_how_it_runs():
    config = transformers.FalconConfig(vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ValueError, match=r'which has eager, .*Load FalconModel with attn_implementation="eager"'):
        transformers.FalconModel._from_config(config, attn_implementation="regard")
    with pytest.raises(ValueError, match="FalconModel"):
        transformers.AutoModel.from_config(config, attn_implementation="regard")


def test_another_missing_key_stays_what_it_is():
    with pytest.raises(KeyError, match="no such activation"):
        transformers.BertModel._from_config(transformers.BertConfig(**PLAIN, hidden_act="no such activation"))


def test_a_model_that_ignores_what_is_chosen_is_not_told_to_choose_again():
    sizes = {key: size for key, size in PLAIN.items() if not key.endswith("token_id")}
    for chosen in ("regard", "eager"):
        model = transformers.DebertaModel._from_config(
            transformers.DebertaConfig(**sizes), attn_implementation=chosen
        ).eval()
        with pytest.raises(ValueError, match="computes its attention itself") as error, regard.record(model):
            model(some_tokens(5))
        assert "load it with" not in str(error.value)
        assert "register()" not in str(error.value)


def test_registering_again_changes_nothing():
    regard.huggingface.register()
    test_a_model_that_is_there_can_change_over_and_back()


def test_without_transformers_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"regard\.huggingface needs transformers, 5\.4 or newer: pip install '\.\[hf\]'"
    ):
        regard.huggingface.register()


def test_an_older_transformers_is_told_by_its_version(monkeypatch):
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match=rf"5\.4 or newer.*there is {transformers.__version__}"):
        regard.huggingface.register()


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        ('RuntimeError("operator torchvision::nms does not exist")', "hint: torchvision 0.1.0 does not fit torch"),
        ('OSError("libsomething.so: cannot open")', None),
    ],
    ids=["torchvision", "a library"],
)
def test_what_keeps_transformers_from_being_imported_is_told_and_is_not_its_age(tmp_path, raised, hint):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise {raised}")
    (tmp_path / "torchvision-0.1.0.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import regard; regard.huggingface.register()"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    told = done.stderr[done.stderr.rindex("\nImportError: ") :]
    kind, words = raised.split('"')[0].rstrip("("), raised.split('"')[1]
    assert f"transformers {transformers.__version__} is installed and cannot be imported: {kind}: {words}" in told
    assert "5.4 or newer" not in told
    assert ("hint" in told) == (hint is not None)
    assert hint is None or hint in told


def test_the_package_asks_for_the_transformers_that_register_asks_for():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    oldest = ".".join(map(str, huggingface.OLDEST_VERSION))
    assert f'hf = ["transformers>={oldest}"]' in text


def test_the_module_is_light_until_it_is_used():
    code = "import sys, regard.huggingface; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_a_step_behind_padding_is_one_like_the_step_before(monkeypatch, dtype, static):
    asked = []
    monkeypatch.setattr(one_query, "check_call", lambda *given: (asked.append(given), functional.check_call(*given))[1])
    monkeypatch.setattr(one_query, "_KNOWN", {})
    for step in range(70, 80):
        length = 90 if static else step
        real = torch.arange(length) >= torch.tensor([[0], [7], [step % 5]])
        mask = LazyMask(Causal(step - 1), (3, 1, length), torch.device("cpu"), real=real)
        query, key, value = (
            torch.randn(3, heads, n, 16, dtype=dtype) for heads, n in ((4, 1), (2, length), (2, length))
        )
        hidden = (~real | (torch.arange(length) >= step))[:, None, :, None]
        expected = regard.attention(query, key, value, mask=Causal(step - 1) & Padding(real), kernel="reference")
        for _ in range(2):  # layers
            for tensor in (key, value):
                tensor.masked_fill_(hidden, 1e4)
            assert_close(mask.attend(query, key, value)[0], expected)
            for tensor in (key, value):
                tensor.masked_fill_(hidden, math.nan)
            found = mask.attend(query, key, value)
            assert found is None if ABSENT else torch.equal(found[0], computed(Heads(query, key, value), mask))
            assert_close(computed(Heads(query, key, value), mask), expected)
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_each_token_with_a_bias_and_a_sink_is_like_the_one_before_whatever_their_numbers(monkeypatch, dtype, padded):
    asked = []
    monkeypatch.setattr(one_query, "check_call", lambda *given: (asked.append(given), functional.check_call(*given))[1])
    monkeypatch.setattr(one_query, "_KNOWN", {})
    for length in range(70, 80):
        real = torch.arange(length) >= torch.tensor([[0], [7 if padded else 0], [length if padded else 0]])
        given = {"mask": Causal(length - 1) & Padding(real), "kernel": "reference"}
        query, key, value = (
            torch.randn(3, heads, n, 16, dtype=dtype) for heads, n in ((4, 1), (2, length), (2, length))
        )
        given_heads = Heads(query, key, value)
        with torch.inference_mode():
            lazy = mask_for_transformers(3, 1, length, q_offset=length - 1, attention_mask=real)
            bias = torch.zeros(1, 4, 1, length, dtype=dtype)
            for number in range(3):  # layers, which write into the bias of the one before
                bias += torch.randn(1, 4, 1, length)
                bias[..., number] = -math.inf
                sink = torch.randn(4)
                ours = computed(given_heads, lazy, s_aux=sink, position_bias=bias)
                assert_close(ours, regard.attention(query, key, value, sink=sink, bias=bias, **given))
                alone = computed(given_heads, lazy, s_aux=sink)
                assert_close(alone, regard.attention(query, key, value, sink=sink, **given))
                wide = computed(given_heads, lazy, position_bias=bias[:, :1])
                assert_close(wide, regard.attention(query, key, value, bias=bias[:, :1], **given))
            with pytest.raises(ShapeError, match="query_len=1"):
                computed(given_heads, lazy, position_bias=bias[..., 1:])
    assert len(asked) == 3 + 10  # those that raise an error are asked again


@needs_library
@pytest.mark.parametrize(("kv_heads", "masked", "most"), [(4, False, 44), (2, False, 44), (4, True, 50), (2, True, 54)])
def test_a_layer_that_writes_a_token_makes_few_calls(kv_heads, masked, most):
    query, key, value = (torch.randn(3, heads, n, 8) for heads, n in ((4, 1), (kv_heads, 70), (kv_heads, 70)))
    real = torch.arange(70) >= torch.tensor([[0], [7], [5]])
    mask = LazyMask(Causal(69), (3, 1, 70), torch.device("cpu"), real=real) if masked else None
    module, calls = torch.nn.Module().eval(), []
    with torch.inference_mode():
        for _ in range(3):
            attend(module, query, key, value, mask, scaling=0.5)
        gc.collect()  # what is called while garbage is collected is no part of it
        sys.setprofile(lambda frame, event, of: calls.append((event, of, frame)) if "call" in event else None)
        attend(module, query, key, value, mask, scaling=0.5)
        sys.setprofile(None)
    assert len(calls) <= most, calls


def test_a_t5_that_writes_is_checked_for_its_first_tokens_alone(monkeypatch):
    theirs, ours = pair(*SEQ2SEQ["T5, position bias"])
    options = {"input_ids": some_tokens(), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    asked = []
    check = functional.check_call
    for module in (functional, masks, one_query):
        monkeypatch.setattr(module, "check_call", lambda *given: (asked.append(given), check(*given))[1])
    expected = theirs.generate(**options)
    assert torch.equal(ours.generate(**options), expected)
    first = len(asked)
    assert torch.equal(ours.generate(**options), expected)
    assert len(asked) - first <= first // 2


def test_a_position_bias_of_zeros_is_none(monkeypatch):
    biases = []
    check = functional.check_call
    for module in (functional, masks):
        monkeypatch.setattr(module, "check_call", lambda *given: (biases.append(given[5]), check(*given))[1])
    query, key, value = given = tuple(torch.randn(2, 4, length, 8) for length in (5, 7, 7))
    right = regard.attention(query, key, value)
    biases.clear()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(computed(given, is_causal=False, position_bias=torch.zeros(1, 4, 5, 7, dtype=dtype)), right)
    assert biases in ([], [None], [None, None])
    last, learned = torch.zeros(1, 4, 5, 7), torch.zeros(1, 4, 5, 7, requires_grad=True)
    last[..., -1, -1] = -math.inf
    for bias in (last, learned, torch.zeros(1, 4, 7, 5).mT):  # the last is not asked: it lies otherwise in memory
        biases.clear()
        assert_close(computed(given, is_causal=False, position_bias=bias), regard.attention(*given, bias=bias))
        assert biases[0] is bias
    with pytest.raises(ShapeError):
        computed(given, is_causal=False, position_bias=torch.zeros(1, 4, 5, 8))


def test_one_query_that_sees_every_key_has_no_mask_where_transformers_allows_it():
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    def made(length=1, keys=9, start=8, function=causal_mask_function, **allowed):
        return mask_for_transformers(2, length, keys, q_offset=start, mask_function=function, **allowed)

    real = torch.arange(9) >= torch.tensor([[3], [0]])
    causal, both = {"allow_is_causal_skip": True}, {"allow_is_bidirectional_skip": True}
    assert made(**causal) is made(**causal, attention_mask=torch.ones(2, 9)) is None
    assert made(function=bidirectional_mask_function, **both) is None
    window = masking_utils.sliding_window_causal_mask_function
    chunk = masking_utils.chunked_causal_mask_function(9, torch.zeros(2, dtype=torch.int64))
    assert made(function=window(9), **causal) is made(start=20, kv_offset=12, function=window(9), **causal) is None
    for mask in (
        made(function=window(9)), made(function=window(8), **causal), made(keys=10, function=window(99), **causal),
        made(function=window(9), **causal, attention_mask=real), made(function=chunk, **causal),
        made(function=masking_utils.or_masks(causal_mask_function, window(9)), **causal),
        made(), made(**both), made(keys=10, **causal), made(length=2, start=7, **causal),
        made(**causal, attention_mask=real),
        made(function=bidirectional_mask_function, **causal), made(function=lambda b, h, q, k: k <= q, **causal),
    ):  # fmt: skip
        assert isinstance(mask, LazyMask)


def test_a_second_text_of_the_same_form_is_not_checked_again(monkeypatch):
    theirs, ours = pair("MistralForCausalLM", {**WIDE, "sliding_window": WINDOW})
    agree(theirs, ours, input_ids=some_tokens())

    def again(*given: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(masks, "check_call", again)
    agree(theirs, ours, input_ids=some_tokens())
    for model in (theirs, ours):
        model.config.sliding_window = WINDOW + 1
    with pytest.raises(AssertionError, match="checked again"):
        ours(some_tokens())
    monkeypatch.undo()
    agree(theirs, ours, input_ids=some_tokens())


@needs_library
def test_one_query_with_a_mask_of_its_own_takes_the_short_way_and_sees_what_it_says(monkeypatch):
    def too_long(*given: Any) -> None:
        raise AssertionError("the ordinary way")

    monkeypatch.setattr(hooks, "attend", too_long)
    query, key, value = (x[:, :, -1:] if name == "query" else x for name, x in heads(9, 9)._asdict().items())
    numbers = torch.tensor([[[1, 8, 5]], [[0, 2, 2]]])
    selected = torch.zeros(2, 1, 1, 9, dtype=torch.bool).scatter_(-1, numbers[:, None], True)
    lazy = mask_for_transformers(2, 1, 9, q_offset=8, attention_mask=torch.arange(9) >= torch.tensor([[3], [0]]))
    window = mask_for_transformers(2, 1, 9, 8, 0, masking_utils.sliding_window_causal_mask_function(5))
    bias = torch.randn(2, 6, 1, 9)
    everything = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    for mask, allowed in (
        (torch.rand(2, 6, 1, 9) > 0.3, None), (torch.rand(1, 1, 1, 9) > 0.5, None), (lazy, lazy.dense()),
        (lazy[:], lazy.dense()), (window, window.dense()), (None, everything),
    ):  # fmt: skip
        allowed = mask if allowed is None else allowed
        for added in (None, bias):
            for chosen in (None, numbers, numbers.int()):
                seen = allowed if chosen is None else allowed & selected
                expected = regard.attention(query, key, value, mask=Dense(seen), bias=added, kernel="reference")
                made = attend(Layer(), query, key, value, mask, position_bias=added, indices=chosen)[0]
                assert_close(made, expected.transpose(1, 2))
                if chosen is not None and not bool((allowed & selected).all()):  # what is hidden does nothing
                    unseen = ~(allowed & selected).any(0).any(0).any(0)
                    spoilt = value.masked_fill(unseen[:, None], math.nan)
                    made = attend(Layer(), query, key, spoilt, mask, position_bias=added, indices=chosen)[0]
                    assert_close(made, expected.transpose(1, 2))
    for added in (bias, bias[:1, :1], bias.masked_fill(torch.rand(2, 6, 1, 9) > 0.5, torch.finfo(torch.float32).min)):
        expected = regard.attention(query, key, value, bias=added, kernel="reference")
        assert_close(attend(Layer(), query, key, value, added)[0], expected.transpose(1, 2))
    for wrong in (torch.ones(2, 1, 1, 8, dtype=torch.bool), torch.ones(3, 1, 1, 9), torch.ones(2, 1, 9)):
        with pytest.raises((AssertionError, ValueError), match=r"the ordinary way|attention_mask must be"):
            attend(Layer(), query, key, value, wrong)


def test_one_query_without_a_mask_sees_no_further_than_the_window_of_its_layer():
    query, key, value = heads()
    one = Heads(query[:, :, -1:], key, value)
    length = key.shape[2]
    for window in (None, length + 1, length):
        assert_close(computed(one, None, sliding_window=window), regard.attention(*one, kernel="reference"))
    assert_close(computed(one, None, sliding_window=3), regard.attention(*one, mask=Window(3), kernel="reference"))

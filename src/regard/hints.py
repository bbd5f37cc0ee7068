"""Hints for arguments under the names of other libraries.

    regard.attention(query, key, value, is_causal=True)

    TypeError: attention: unknown argument is_causal
      hint: is_causal=True is mask=Causal(); ...

Python raises a TypeError for such a call. `hinted` adds a hint to it from the tables below: one for each kind of
callable, the other library's name on the left, regard's equivalent on the right. Signatures are unchanged, for type
checkers and help().
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch

Names = Mapping[str, str]
Target = TypeVar("Target", bound=Callable[..., Any])


def _same(there: str, here: str) -> dict[str, str]:
    """Several names, separated by spaces, for one of regard's names."""
    return {name: f"{name} is {here}" for name in there.split()}


def _all(there: str, hint: str) -> dict[str, str]:
    """Several names, separated by spaces, with one hint."""
    return dict.fromkeys(there.split(), hint)


_WEIGHTS = "weights are asked for apart: regard.observe(query, key, mask=...).weights(), or regard.record(model)"
_CAUSAL = "mask=Causal(); torch counts from the top left, which differs where lengths do: mask=Causal(offset=0)"
_PACKED = "texts laid end to end are one row with mask=Document.from_lengths(cu_seqlens.diff())"
_CACHE = "cache=, made by model.cache() and passed to each call"

ATTENTION: Names = {
    "attn_mask": "a bool attn_mask (True = may attend) is mask=Dense(attn_mask), a float one is bias=attn_mask",
    "attention_mask": "an attention_mask [batch, length] of 1 and 0 is mask=Padding(attention_mask.bool())",
    "key_padding_mask": "mask=Padding(~key_padding_mask): torch's is True where a key is padding",
    "is_causal": f"is_causal=True is {_CAUSAL}",
    "causal": "causal=True is mask=Causal()",
    "enable_gqa": "leave enable_gqa out: key and value may have fewer heads than query",
    "window_size": "window_size=(left, right) is mask=Band(left, right), with None for no end",
    "sliding_window": "w keys, the query's own included, are mask=Causal() & Window(w)",
    "alibi_slopes": "bias=Alibi(slopes=alibi_slopes)",
    "block_mask": "mask=Where(block_mask.mask_mod), or the rule that it was made from, such as Causal() & Window(256)",
    "score_mod": "what a score_mod adds is bias=, tanh is softcap=, what it hides is mask=",
    "mask_mod": "mask=Where(mask_mod)",
    "training": "pass dropout=0.0 outside training",
    "deterministic": "leave deterministic out: dropout comes from generator=, and nothing else is random",
    "segment_ids": "segment_ids is mask=Document(segment_ids)",
    "local_window_size": "local_window_size=(left, right) is mask=Band(left, right), with None for no end",
    "head_mask": "heads are taken away while a model runs: regard.intervene(model, Ablate(layer, head))",
    "past_key_value": f"{_CACHE}, which puts them in front of key and value",
    "past_key_values": f"{_CACHE}, which puts them in front of key and value",
    "seed": "generator=torch.Generator().manual_seed(seed)",
    "return_lse": "attention_with_lse(...) returns output and lse",
    "batch_first": "leave batch_first out: tensors are [batch, heads, length, head_dim], always",
    **_same("dropout_p attention_dropout p", "dropout=, applied whenever it is given: pass 0.0 outside training"),
    **_same("softmax_scale scaling sm_scale", "scale="),
    **_same(
        "soft_cap logit_cap logits_soft_cap attn_logits_soft_cap softcapping attn_logit_softcapping tanh_softcap",
        "softcap=",
    ),
    **_same("attn_bias position_bias", "bias="),
    **_same("sinks s_aux learnable_sink", "sink="),
    **_same("q query_states", "query="),
    **_same("k key_states", "key="),
    **_same("v value_states", "value="),
    **_all("heads num_heads n_head n_heads", "heads are an axis: query is [batch, heads, length, head_dim]"),
    **_all(
        "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_seq_lens_q cu_seq_lens_k max_seqlen "
        "max_seqlen_q max_seqlen_k seqused_k",
        _PACKED,
    ),
    **_all(
        "need_weights average_attn_weights output_attentions return_attn_probs return_weights "
        "return_attention",
        _WEIGHTS,
    ),
}  # fmt: skip
"""attention, attention_with_lse, plan, observe."""

_SIZES: Names = {
    **_same("embed_dim embedding_dim d_model hidden_size n_embd model_dim in_features embedding_size width", "dim="),
    **_same("num_heads n_head n_heads nhead num_attention_heads num_query_heads", "heads="),
    **_same("num_key_value_heads num_kv_heads n_kv_heads n_head_kv num_query_groups", "kv_heads="),
    **_same("attn_pdrop attn_dropout attention_probs_dropout_prob dropout_p", "dropout="),
    **_same("activation_function hidden_act act_fn", "activation=; silu in a gated feed-forward is 'swiglu'"),
    **_same("intermediate_size n_inner d_ff ffn_dim dim_feedforward ffn_hidden_size mlp_dim d_inner", "hidden_dim="),
    **_same("padding_idx pad_token_id pad_id", "padding_id="),
    **_same("num_embeddings", "vocab_size="),
    **_same(
        "max_position_embeddings n_positions n_ctx block_size max_seq_len max_seq_length max_len seq_len",
        "context_length=",
    ),
    "batch_first": "leave batch_first out: tensors are [batch, length, dim], always",
    "device": "make it, then move it: .to(device)",
    "dtype": "make it, then convert it: .to(dtype)",
}

LAYER: Names = {
    **_SIZES,
    "head_dim": "key_dim=heads * head_dim: the features of all heads together",
    "kdim": "kdim is key_input=",
    "vdim": "vdim is value_input=",
    "qkv_bias": "qkv_bias is projection_bias=, and the output's own is output_bias=",
    "attention_bias": "attention_bias is projection_bias=, and the output's own is output_bias=",
    "out_bias": "out_bias is output_bias=",
    "add_zero_attn": "a place that takes weight and gives no value is sink=True, whose logit begins at 0",
    "add_bias_kv": "there is none; sink=True is a place that takes weight and gives no value",
    "rope_theta": "rotary=Rotary(head_dim, theta=rope_theta)",
    "is_causal": f"is_causal=True is {_CAUSAL}",
    "causal": "causal=True is mask=Causal()",
    "sliding_window": ATTENTION["sliding_window"],
    "attention_dropout": "attention_dropout is dropout=",
    "resid_pdrop": "resid_pdrop is output_dropout=",
    "attn_mask": ATTENTION["attn_mask"],
    "block_size": "block_size is context_length=, and mask=Causal() makes the layer causal",
}
"""MultiHeadAttention(...), FeedForward(...), TokenEmbedding(...)."""

LAYER_CALL: Names = {
    **ATTENTION,
    **_same("hidden_states x input src", "the first argument"),
    **_same("layer_past past_key_value past_key_values past kv_cache", "cache=LayerCache()"),
    "position_ids": "leave position_ids out: positions follow from the cache",
    "use_cache": "pass cache=LayerCache() to each call",
    "batch_first": _SIZES["batch_first"],
    "dropout_p": "dropout belongs to the layer: MultiHeadAttention(..., dropout=); .eval() turns it off",
    "need_weights": "weights are asked for apart: regard.record(model), or regard.steps(layer, x)",
    "src_mask": "src_mask, True = may not attend, is mask=Dense(~src_mask), or better the rule, such as Causal()",
    "src_key_padding_mask": "mask=Padding(~src_key_padding_mask): torch's is True where a key is padding",
    "memory": "memory is context=",
    "memory_key_padding_mask": "context_mask=Padding(~memory_key_padding_mask)",
    "encoder_hidden_states": "encoder_hidden_states is context=",
    "encoder_attention_mask": "context_mask=Padding(encoder_attention_mask.bool())",
}
"""MultiHeadAttention and Block, called."""

_PARTS = "Block(MultiHeadAttention(dim, heads), FeedForward(dim, hidden_dim))"

BLOCK: Names = {
    **_all(
        "d_model nhead dim dim_feedforward hidden_dim heads embed_dim num_heads n_head n_embd dropout "
        "activation hidden_size intermediate_size num_attention_heads",
        f"a block is made of its parts: {_PARTS}",
    ),
    "batch_first": _SIZES["batch_first"],
    "layer_norm_eps": "norm=lambda dim: torch.nn.LayerNorm(dim, eps=layer_norm_eps)",
    "is_decoder": "mask=Causal() in the attention makes it a decoder block",
}
"""Block(...)."""

CONFIG: Names = {
    **_SIZES,
    **_same("num_hidden_layers n_layer n_layers num_layers num_blocks depth", "layers="),
    **_same("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon", "norm_eps="),
    **_same("hidden_dropout_prob resid_pdrop embd_pdrop hidden_dropout", "dropout="),
    **_same("attn_pdrop attn_dropout attention_probs_dropout_prob", "attention_dropout="),
    **_same("position_embedding_type pos_emb", "positions=: learned, sinusoidal, rotary, alibi or None"),
    **_same("attn_logit_softcapping", "softcap="),
    "rope_theta": "rope_theta is rotary_theta=",
    "rope_scaling": "rotary_scaling=, a dict with its kind: linear, dynamic, yarn or llama3",
    "rope_parameters": "rotary_theta= and rotary_scaling=",
    "partial_rotary_factor": "rotary_dim=int(partial_rotary_factor * head_dim)",
    "tie_word_embeddings": "tie_word_embeddings is tied=",
    "final_logit_softcapping": "final_logit_softcapping is logit_softcap=",
    "sliding_window": "sliding_window is window=",
    "type_vocab_size": "type_vocab_size is segments=",
    "mlp_bias": "mlp_bias is bias=, and attention's own is attention_bias=",
    "qkv_bias": "qkv_bias is attention_bias=",
    "model_type": "ModelConfig.preset('gpt2'), or regard.layouts.from_transformers(model) for a model that is there",
    "architectures": "regard.layouts.from_transformers(model) takes a model of transformers, with its weights",
}
"""ModelConfig(...)."""

MODEL_CALL: Names = {
    **LAYER_CALL,
    **_same("input_ids idx x ids src inputs", "tokens, the first argument"),
    **_same("token_type_ids segment_ids", "segments="),
    **_same("past_key_values past_key_value layer_past past kv_cache", _CACHE),
    "use_cache": f"pass {_CACHE}",
    "labels": "a model returns logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "targets": "a model returns logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten())",
    "inputs_embeds": "a model takes tokens; its layers take vectors: model.layers[0](x)",
    "is_causal": "a Decoder is causal as it is, an Encoder with mask=Causal()",
    "output_attentions": "with regard.record(model) as recording: model(tokens)",
    "output_hidden_states": "model.states(tokens) for those before the logits",
    "decoder_input_ids": "model(source, target)",
}
"""Encoder, Decoder, EncoderDecoder and what stands on them, called."""

GENERATION: Names = {
    **_same("max_new_tokens max_length max_tokens length", "count="),
    **_same("eos_token_id stop_token eos_id", "end_id="),
    **_same("input_ids idx tokens inputs", "prompt=, a list of token numbers"),
    "do_sample": "temperature=0 takes the likeliest token, anything above it samples",
    "seed": "generator=torch.Generator().manual_seed(seed)",
    "num_beams": "a decoder has no beam search; regard.translate, for an EncoderDecoder, has beams=",
    "k": "k is top_k=",
    "p": "p is top_p=",
}
"""generate, sample."""

TRANSLATION: Names = {
    **_same("max_new_tokens max_length max_tokens length", "count="),
    **_same("eos_token_id stop_token eos_id", "end_id="),
    **_same("decoder_start_token_id bos_token_id start_token", "start_id="),
    **_same("input_ids inputs source prompt", "sources=, lists of token numbers"),
    **_same("num_beams beam_size beam_width", "beams="),
    **_same("lenpen alpha", "length_penalty="),
}
"""translate."""

ROTARY: Names = {
    **_same("dim rotary_ndims embed_dim d_head", "head_dim="),
    **_same("base rope_theta freqs_base", "theta="),
    **_same("rope_scaling scaling_factor", "scaling=, such as LinearScaling(2.0)"),
    **_same("interleaved", "layout='interleaved'"),
    **_all("max_position_embeddings max_seq_len max_len", "leave it out: angles are computed for any position"),
    "partial_rotary_factor": "rotary_dim=int(partial_rotary_factor * head_dim)",
}
"""Rotary(...)."""


def hinted(names: Names) -> Callable[[Target], Target]:
    """Decorates a function, or the ``__init__`` of a class, so that wrong arguments raise an error with a hint.

    Errors raised inside the function, and its signature, are unchanged.
    """

    def decorate(target: Target) -> Target:
        if isinstance(target, type):
            target.__init__ = _hinting(target.__init__, names)  # type: ignore[misc]
            return target
        made: Target = _hinting(target, names)
        return made

    return decorate


def _hinting(function: Callable[..., Any], names: Names) -> Any:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except TypeError as error:
            if torch.compiler.is_compiling() or error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # by the function itself, not by calling it
            explained = _explained(function, names, arguments, named)
        raise TypeError(explained)

    return call


def _explained(function: Callable[..., Any], names: Names, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Why a call does not fit a signature: unknown names, too many positional arguments, or missing ones."""
    parameters = dict(inspect.signature(function).parameters)
    owner = function.__name__
    if "self" in parameters:
        del parameters["self"]
        owner, arguments = type(arguments[0]).__name__, arguments[1:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    places = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    called = f"it is called as {owner}({', '.join([*places, *(f'{name}=' for name in rest)])})"

    unknown = [name for name in named if name not in parameters and (not open_ended or name in names)]
    if unknown:
        hints = []
        for name in unknown:
            close = difflib.get_close_matches(name, [*places, *rest], 1, 0.75)
            hints.append(names.get(name) or (f"{name} is perhaps {close[0]}=" if close else called))
        return f"{owner}: unknown argument {', '.join(unknown)}" + "".join(
            f"\n  hint: {h}" for h in dict.fromkeys(hints)
        )
    if len(arguments) > len(places):
        by_place = f"only {', '.join(places)} by position" if places else "nothing by position"
        return f"{owner}: takes {by_place}, got {len(arguments)} arguments\n  hint: {called}"
    twice = [name for name in places[: len(arguments)] if name in named]
    if twice:
        return f"{owner}: {', '.join(twice)} given twice, by position and by name\n  hint: {called}"
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    missing = [name for name in needed if name not in named and name not in places[: len(arguments)]]
    return f"{owner}: {', '.join(missing)} missing\n  hint: {called}"

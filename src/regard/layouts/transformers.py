"""Models of transformers as models of regard: names of tensors, and settings from their config."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from regard.configuration import ModelConfig
from regard.feed_forward import Activation
from regard.layouts.gpt import GPT, config_of, without
from regard.layouts.layers import upright
from regard.layouts.renaming import LAYOUTS, LEFT_OUT, Names, Renamed, within
from regard.models import Classifier, Decoder, Encoder, MaskedLanguageModel

LLAMA: Names = {
    "embed_tokens.weight": "embedding.weight",
    "layers.*.input_layernorm.weight": "layers.*.attention_norm.weight",
    "layers.*.self_attn.q_proj.*": "layers.*.attention.query.*",
    "layers.*.self_attn.k_proj.*": "layers.*.attention.key.*",
    "layers.*.self_attn.v_proj.*": "layers.*.attention.value.*",
    "layers.*.self_attn.o_proj.*": "layers.*.attention.output.*",
    "layers.*.self_attn.q_norm.weight": "layers.*.attention.query_norm.weight",
    "layers.*.self_attn.k_norm.weight": "layers.*.attention.key_norm.weight",
    "layers.*.self_attn.rotary_emb.inv_freq": LEFT_OUT,
    "layers.*.post_attention_layernorm.weight": "layers.*.feed_forward_norm.weight",
    "layers.*.mlp.gate_proj.*": "layers.*.feed_forward.gate.*",
    "layers.*.mlp.up_proj.*": "layers.*.feed_forward.input.*",
    "layers.*.mlp.down_proj.*": "layers.*.feed_forward.output.*",
    "norm.weight": "norm.weight",
    "lm_head.weight": "logits.weight",
}
GEMMA2: Names = {
    **LLAMA,
    "layers.*.post_attention_layernorm.weight": "layers.*.attention_output_norm.weight",
    "layers.*.pre_feedforward_layernorm.weight": "layers.*.feed_forward_norm.weight",
    "layers.*.post_feedforward_layernorm.weight": "layers.*.feed_forward_output_norm.weight",
}
BERT: Names = {
    "embeddings.word_embeddings.weight": "embedding.weight",
    "embeddings.position_embeddings.weight": "positions.weight",
    "embeddings.token_type_embeddings.weight": "segments.weight",
    "embeddings.LayerNorm.*": "embedding_norm.*",
    "embeddings.position_ids": LEFT_OUT,
    "encoder.layer.*.attention.self.query.*": "layers.*.attention.query.*",
    "encoder.layer.*.attention.self.key.*": "layers.*.attention.key.*",
    "encoder.layer.*.attention.self.value.*": "layers.*.attention.value.*",
    "encoder.layer.*.attention.output.dense.*": "layers.*.attention.output.*",
    "encoder.layer.*.attention.output.LayerNorm.*": "layers.*.attention_norm.*",
    "encoder.layer.*.intermediate.dense.*": "layers.*.feed_forward.input.*",
    "encoder.layer.*.output.dense.*": "layers.*.feed_forward.output.*",
    "encoder.layer.*.output.LayerNorm.*": "layers.*.feed_forward_norm.*",
    "pooler.dense.*": LEFT_OUT,
}
BERT_MASKED: Names = {
    **within("", "encoder.", BERT),
    "cls.predictions.transform.dense.*": "transform.*",
    "cls.predictions.transform.LayerNorm.*": "norm.*",
    "cls.predictions.bias": "constant",
    # tied to the two above: several names for one tensor must agree
    "cls.predictions.decoder.bias": "constant",
    "cls.predictions.decoder.weight": "encoder.embedding.weight",
}
BERT_CLASSIFIER: Names = {
    **within("", "encoder.", BERT),
    "pooler.dense.*": "pool.*",
    "classifier.*": "classes.*",
}
Model = Decoder | Encoder | MaskedLanguageModel | Classifier

LAYOUTS["from_transformers"] = "a GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma or BERT of transformers"


def from_transformers(model: nn.Module) -> Model:
    """A model of transformers as a model of regard, with the same logits.

    | model of transformers | result |
    |---|---|
    | `GPT2LMHeadModel`, `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM` | `Decoder` |
    | `GemmaForCausalLM`, `Gemma2ForCausalLM`, `Gemma3ForCausalLM` | `Decoder`, in float32 |
    | `GPT2Model`, `LlamaModel`, `MistralModel`, `Qwen2Model`, `Qwen3Model` | `Decoder`, for its `states` |
    | `BertModel` | `Encoder`, without the pooler |
    | `BertForMaskedLM` | `MaskedLanguageModel` |
    | `BertForSequenceClassification` | `Classifier` |

    Shapes: ``decoder(tokens)`` and ``encoder(tokens, segments=token_type_ids)`` as usual in regard. An attention mask
    of 0 and 1 becomes ``mask=Padding(attention_mask.bool())``.
    Notes:
        A model without an output head gets its embedding as one, which was not trained for that.

        The length of a text is limited: to max_position_embeddings, or if rotary positions are scaled by a factor, to
        that many times the original context.

        With "dynamic" scaling beyond the original context, results depend on the lengths of earlier calls in
        transformers, but not here: see `DynamicScaling`.
    Raises:
        ValueError: another model, or an unsupported setting that changes the result.

    >>> model = transformers.AutoModelForCausalLM.from_pretrained("openai-community/gpt2")  # doctest: +SKIP
    >>> decoder = from_transformers(model)  # doctest: +SKIP
    """
    theirs = getattr(model, "config", None)
    return from_state_dict(type(model).__name__, theirs, model.state_dict()).train(model.training)


def from_state_dict(name: str, theirs: Any, state_dict: Mapping[str, Tensor]) -> Model:
    """`from_transformers` without the model: the name of its class, its configuration, and its tensors.

    Raises:
        ValueError: another model, or a setting that changes the result and that regard does not have.
    """
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        missing = f", for lack of a {MISSING_PARTS[name]}" if name in MISSING_PARTS else ""
        raise ValueError(
            f"from_transformers: regard has no model like {name}{missing}\n  hint: it has {', '.join(ARCHITECTURES)}"
        )
    tensors = Renamed("from_transformers", architecture.names, without(upright(state_dict), *architecture.prefixes))
    if architecture.norms_from_one:
        for their, tensor in tensors.items():  # in float32, since 1 + w may have more digits than bfloat16 has
            tensors[their] = tensor.float() + 1 if their.endswith("norm.weight") else tensor.float()
    settings = architecture.settings(theirs)
    config = config_of(tensors, theirs.num_attention_heads, inside=architecture.inside, **settings)
    if config.layers != theirs.num_hidden_layers:
        raise ValueError(
            f"from_transformers: the model holds {config.layers} layers and its num_hidden_layers is "
            f"{theirs.num_hidden_layers}"
        )
    return tensors.fill(partial(architecture.build, config, tensors))


PLAIN_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
GATED_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_python": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_accurate": "geglu_tanh",
}

ROTARY: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
}  # fmt: skip
"""The kinds of rotary positions, with the supported parameters of each."""


def _gpt2(theirs: Any) -> dict[str, Any]:
    _require(
        theirs,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        is_causal=True,
        embd_pdrop=theirs.resid_pdrop,
    )
    return {
        "positions": "learned",
        "norm": "layer",
        "norm_eps": theirs.layer_norm_epsilon,
        "activation": _activation(theirs, "activation_function", PLAIN_ACTIVATIONS),
        "dropout": theirs.resid_pdrop,
        "attention_dropout": theirs.attn_pdrop,
    }


def _llama(theirs: Any) -> dict[str, Any]:
    _require(theirs, is_causal=True, partial_rotary_factor=1.0)
    return {
        "positions": "rotary",
        **rotary(theirs),
        "norm": "rms",
        "norm_eps": theirs.rms_norm_eps,
        "activation": _activation(theirs, "hidden_act", GATED_ACTIVATIONS),
        "padding_id": theirs.pad_token_id,
        "attention_dropout": theirs.attention_dropout,
    }


def _mistral(theirs: Any) -> dict[str, Any]:
    return {**_llama(theirs), "window": theirs.sliding_window}


def _qwen2(theirs: Any) -> dict[str, Any]:
    return {**_llama(theirs), "window": _windows(theirs) if theirs.use_sliding_window else None}


def _windows(theirs: Any) -> int | tuple[int | None, ...] | None:
    """The window of each layer; of all, where it is the same."""
    kinds: Mapping[str, int | None] = {"full_attention": None, "sliding_attention": theirs.sliding_window}
    unknown = sorted(set(theirs.layer_types) - set(kinds))
    if unknown:
        raise ValueError(f"from_transformers: layer_types must be {' or '.join(kinds)}, got {', '.join(unknown)}")
    each = tuple(kinds[name] for name in theirs.layer_types)
    return each[0] if len(set(each)) == 1 else each


def _gemma(theirs: Any) -> dict[str, Any]:
    return {**_llama(theirs), "embedding_scale": math.sqrt(theirs.hidden_size)}


def _gemma2(theirs: Any) -> dict[str, Any]:
    _require(theirs, is_causal=True, partial_rotary_factor=1.0, use_bidirectional_attention=False)
    return {
        "positions": "rotary",
        **_rotary_of_layers(theirs),
        "norm": "rms",
        "norm_eps": theirs.rms_norm_eps,
        "output_norms": True,
        "embedding_scale": math.sqrt(theirs.hidden_size),
        "activation": _activation(theirs, "hidden_activation", GATED_ACTIVATIONS),
        "window": _windows(theirs),
        "scale": theirs.query_pre_attn_scalar**-0.5,
        "softcap": theirs.attn_logit_softcapping,
        "logit_softcap": theirs.final_logit_softcapping,
        "padding_id": theirs.pad_token_id,
        "attention_dropout": theirs.attention_dropout,
    }


def _gemma3(theirs: Any) -> dict[str, Any]:
    _require(theirs, attn_logit_softcapping=None)  # transformers keeps the number and does not use it
    return _gemma2(theirs)


def _rotary_of_layers(theirs: Any) -> dict[str, Any]:
    """`rotary`, where layers with a window may have a rotation of their own (Gemma 3)."""
    given = getattr(theirs, "rope_parameters", None) or {}
    if "full_attention" not in given:
        return rotary(theirs)
    context = theirs.max_position_embeddings
    full, sliding = (
        rotary(SimpleNamespace(rope_parameters=given[name], max_position_embeddings=context))
        for name in ("full_attention", "sliding_attention")
    )
    if "rotary_scaling" in sliding:
        raise ValueError("from_transformers: scaled positions in layers with a window are not supported")
    return {**full, "context_length": context, "window_theta": sliding["rotary_theta"]}


def _bert(theirs: Any) -> dict[str, Any]:
    _require(theirs, is_causal=False, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    return {
        "positions": "learned",
        "norm": "layer",
        "norm_eps": theirs.layer_norm_eps,
        "norm_first": False,
        "embedding_norm": True,
        "activation": _activation(theirs, "hidden_act", PLAIN_ACTIVATIONS),
        "padding_id": theirs.pad_token_id,
        "dropout": theirs.hidden_dropout_prob,
        "attention_dropout": theirs.attention_probs_dropout_prob,
    }


def _bert_classifier(theirs: Any) -> dict[str, Any]:
    _require(theirs, classifier_dropout=theirs.hidden_dropout_prob)
    return _bert(theirs)


def _require(theirs: Any, **expected: object) -> None:
    """Raises if a setting for which regard supports a single value has another one."""
    for name, value in {
        **expected,
        "is_encoder_decoder": False,
        "pruned_heads": None,
        "quantization_config": None,
    }.items():
        got = getattr(theirs, name, None)
        if got is not None and got != value and (got or value):
            hint = "; if the model is not trained, set them equal" if name.endswith(("_pdrop", "_dropout")) else ""
            raise ValueError(f"from_transformers: {name}={got!r} is not supported, only {name}={value!r}{hint}")


def _activation(theirs: Any, name: str, known: Mapping[str, Activation]) -> Activation:
    activation = getattr(theirs, name)
    if activation not in known:
        raise ValueError(f"from_transformers: {name} must be one of {', '.join(known)}, got {activation!r}")
    return known[activation]


def rotary(theirs: Any) -> dict[str, Any]:
    """Fields of `ModelConfig`, from ``rope_parameters``, or from the older ``rope_theta`` and ``rope_scaling``."""
    before = {"rope_theta": getattr(theirs, "rope_theta", None), **(getattr(theirs, "rope_scaling", None) or {})}
    given = {k: v for k, v in (getattr(theirs, "rope_parameters", None) or before).items() if v is not None}
    named_before = given.pop("type", "default")
    kind = given.pop("rope_type", named_before)
    if kind not in ROTARY:
        raise ValueError(f"from_transformers: rope_type must be one of {', '.join(ROTARY)}, got {kind!r}")
    theta, turning = given.pop("rope_theta", 10000.0), given.pop("partial_rotary_factor", 1.0)
    unknown = sorted(set(given) - set(ROTARY[kind])) + ["partial_rotary_factor"] * (turning != 1.0)
    if unknown:
        raise ValueError(f"from_transformers: rope_type {kind!r} with {', '.join(unknown)} is not supported")

    context: int = theirs.max_position_embeddings
    if kind == "default":
        return {"context_length": context, "rotary_theta": theta}
    original = given.pop("original_max_position_embeddings", context)
    if "original_max_position_embeddings" in ROTARY[kind]:
        original = getattr(theirs, "original_max_position_embeddings", None) or original
    factor = given.setdefault("factor", context / original)
    if kind == "yarn":
        # transformers treats 0 as "not given" here, and ignores one mscale without the other
        dropped = [name for name in ("beta_fast", "beta_slow") if not given.get(name)]
        if not (given.get("mscale") and given.get("mscale_all_dim")):
            dropped += ["mscale", "mscale_all_dim"]
        given = {name: value for name, value in given.items() if name not in dropped}
    if kind != "linear":
        given["original_context"] = original
    return {
        "context_length": max(context, int(factor * original)),
        "rotary_theta": theta,
        "rotary_scaling": {"kind": kind, **given},
    }


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers: its names, its settings, and the model that it becomes."""

    names: Names
    settings: Callable[[Any], dict[str, Any]]
    build: Callable[[ModelConfig, Renamed], Model] = lambda config, tensors: Decoder(config)
    prefixes: tuple[str, ...] = ()
    """Prefixes of its names, except those of its output heads."""
    inside: str = ""
    """Prefix of the stack's names in the result."""
    norms_from_one: bool = False
    """Whether norms multiply by 1 + weight; such a model comes over in float32."""


ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(GPT, _gpt2, prefixes=("transformer.",)),
    "GPT2Model": Architecture(GPT, _gpt2),
    "LlamaForCausalLM": Architecture(LLAMA, _llama, prefixes=("model.",)),
    "LlamaModel": Architecture(LLAMA, _llama),
    "MistralForCausalLM": Architecture(LLAMA, _mistral, prefixes=("model.",)),
    "MistralModel": Architecture(LLAMA, _mistral),
    "Qwen2ForCausalLM": Architecture(LLAMA, _qwen2, prefixes=("model.",)),
    "Qwen2Model": Architecture(LLAMA, _qwen2),
    "Qwen3ForCausalLM": Architecture(LLAMA, _qwen2, prefixes=("model.",)),
    "Qwen3Model": Architecture(LLAMA, _qwen2),
    "GemmaForCausalLM": Architecture(LLAMA, _gemma, prefixes=("model.",), norms_from_one=True),
    "GemmaModel": Architecture(LLAMA, _gemma, norms_from_one=True),
    "Gemma2ForCausalLM": Architecture(GEMMA2, _gemma2, prefixes=("model.",), norms_from_one=True),
    "Gemma2Model": Architecture(GEMMA2, _gemma2, norms_from_one=True),
    "Gemma3ForCausalLM": Architecture(GEMMA2, _gemma3, prefixes=("model.",), norms_from_one=True),
    "Gemma3TextModel": Architecture(GEMMA2, _gemma3, norms_from_one=True),
    "BertModel": Architecture(BERT, _bert, lambda config, _: Encoder(config)),
    "BertForMaskedLM": Architecture(
        BERT_MASKED, _bert, lambda config, _: MaskedLanguageModel(Encoder(config)), ("bert.",), "encoder."
    ),
    "BertForSequenceClassification": Architecture(
        BERT_CLASSIFIER,
        _bert_classifier,
        lambda config, tensors: Classifier(Encoder(config), len(tensors["classes.weight"])),
        ("bert.",),
        "encoder.",
    ),
}

MISSING_PARTS: dict[str, str] = {
    "GptOssForCausalLM": "choice among several feed-forward networks for each token",
    "MixtralForCausalLM": "choice among several feed-forward networks for each token",
    "T5ForConditionalGeneration": "table of biases by distance that all layers of a stack share",
}
"""Of models that are often asked for, the part that regard's own models lack."""

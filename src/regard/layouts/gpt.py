"""A whole GPT-2, minGPT or nanoGPT; and the sizes of any whole model, inferred from its tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.configuration import ModelConfig
from regard.feed_forward import Activation
from regard.layouts.layers import FUSED_ATTENTION, upright
from regard.layouts.renaming import LAYOUTS, Names, Renamed, match, within
from regard.models import Decoder

GPT: Names = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "h.*.ln_1.*": "layers.*.attention_norm.*",
    **within("h.*.attn.", "layers.*.attention.", FUSED_ATTENTION),
    "h.*.ln_2.*": "layers.*.feed_forward_norm.*",
    "h.*.mlp.c_fc.*": "layers.*.feed_forward.input.*",
    "h.*.mlp.c_proj.*": "layers.*.feed_forward.output.*",
    "ln_f.*": "norm.*",
    "lm_head.weight": "logits.weight",
}
LAYOUTS["from_gpt"] = "a whole GPT-2, minGPT or nanoGPT: wte, wpe, h.0 and so on, ln_f"


def from_gpt(state_dict: Mapping[str, Tensor], *, heads: int, activation: Activation = "gelu_tanh") -> Decoder:
    """A whole GPT-2, minGPT or nanoGPT as a `Decoder`; all sizes are read from the tensors.

    Names may or may not begin with ``transformer.`` (and with ``_orig_mod.`` if the model was compiled), matrices may
    be transposed, and saved masks and biases are optional. Without an ``lm_head.weight``, or with one that equals
    ``wte.weight``, the logits are tied to the embedding.

    Args:
        state_dict: of the model.
        heads: number of heads, which tensors do not contain.
        activation: "gelu_tanh" in GPT-2 and minGPT (called NewGELU there), "gelu" in nanoGPT.
    Raises:
        ValueError: another layout, or heads that do not divide.
    References:
        Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Karpathy, minGPT and nanoGPT.

    >>> sizes = {"wte.weight": (11, 4), "wpe.weight": (8, 4), "ln_f.weight": (4,)}
    >>> sizes |= {"h.0.ln_1.weight": (4,), "h.0.attn.c_attn.weight": (12, 4), "h.0.attn.c_proj.weight": (4, 4)}
    >>> sizes |= {"h.0.ln_2.weight": (4,), "h.0.mlp.c_fc.weight": (16, 4), "h.0.mlp.c_proj.weight": (4, 16)}
    >>> decoder = from_gpt({name: torch.randn(size) for name, size in sizes.items()}, heads=2)
    >>> decoder(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    tensors = Renamed("from_gpt", GPT, upright(without(state_dict, "_orig_mod.", "transformer.")))
    config = config_of(tensors, heads, positions="learned", norm="layer", activation=activation)
    return tensors.fill(partial(Decoder, config))


def config_of(tensors: Renamed, heads: int, *, inside: str = "", **settings: Any) -> ModelConfig:
    """The configuration of a model with these tensors: sizes inferred from them, and `settings` for the rest.

    Args:
        inside: the prefix of the stack's names.
    """
    embedding, block = tensors[inside + "embedding.weight"], inside + "layers.0."
    positions, segments = (tensors.get(f"{inside}{name}.weight") for name in ("positions", "segments"))
    key_dim, hidden_dim = (len(tensors[f"{block}{name}.weight"]) for name in ("attention.query", "feed_forward.input"))
    if not isinstance(heads, int) or heads < 1 or key_dim % heads:
        raise ValueError(f"{tensors.function}: heads must divide the size of all queries, {key_dim}, got {heads!r}")
    head_dim = key_dim // heads
    kv_heads = len(tensors[block + "attention.key.weight"]) // head_dim
    bias, attention_bias, output_bias = (
        f"{block}{name}.bias" in tensors for name in ("feed_forward.output", "attention.query", "attention.output")
    )
    logits = tensors.get("logits.weight")
    sizes: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "dim": embedding.shape[1],
        "layers": sum(match(f"{inside}layers.*.attention.query.weight", name) is not None for name in tensors),
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if key_dim == embedding.shape[1] else head_dim,
        "hidden_dim": hidden_dim,
        "bias": bias,
        "attention_bias": None if attention_bias == bias else attention_bias,
        "output_bias": None if output_bias == bias else output_bias,
        "head_norm": block + "attention.query_norm.weight" in tensors,
        "tied": logits is None or torch.equal(logits, embedding),
        "segments": 0 if segments is None else len(segments),
    }
    if positions is not None:
        sizes["context_length"] = len(positions)
    return ModelConfig(**sizes, **settings)


def without(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """The tensors with these prefixes removed from their names, in this order."""
    for prefix in prefixes:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)

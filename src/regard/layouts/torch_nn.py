"""Attention and Transformer layers of torch.nn."""

from collections.abc import Mapping
from functools import partial
from typing import overload

import torch
import torch.nn.functional as F
from torch import nn

from regard.feed_forward import Activation, FeedForward
from regard.layers import Block, MultiHeadAttention, make_norm
from regard.layouts.renaming import LAYOUTS, Names, Renamed, within

TORCH_ATTENTION: Names = {
    "in_proj_weight": "{query,key,value}.weight",
    "in_proj_bias": "{query,key,value}.bias",
    "q_proj_weight": "query.weight",
    "k_proj_weight": "key.weight",
    "v_proj_weight": "value.weight",
    "out_proj.*": "output.*",
}
TORCH_ENCODER_LAYER: Names = {
    **within("self_attn.", "attention.", TORCH_ATTENTION),
    "linear1.*": "feed_forward.input.*",
    "linear2.*": "feed_forward.output.*",
    "norm1.*": "attention_norm.*",
    "norm2.*": "feed_forward_norm.*",
}
TORCH_DECODER_LAYER: Names = {
    **TORCH_ENCODER_LAYER,
    **within("multihead_attn.", "cross.", TORCH_ATTENTION),
    "norm2.*": "cross_norm.*",
    "norm3.*": "feed_forward_norm.*",
}
LAYOUTS["from_torch"] = "attention and Transformer layers of torch.nn"

TORCH_ACTIVATIONS: Mapping[object, Activation] = {
    F.relu: "relu",
    torch.relu: "relu",
    nn.ReLU: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    nn.SiLU: "silu",
}


@overload
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Block: ...
@overload
def from_torch(module: nn.TransformerEncoder | nn.TransformerDecoder) -> nn.ModuleList: ...
def from_torch(module: nn.Module) -> nn.Module:
    """A layer of torch.nn as a layer of regard, with the same output.

    | module | result |
    |---|---|
    | `nn.MultiheadAttention` | `MultiHeadAttention` |
    | `nn.TransformerEncoderLayer` | `Block` |
    | `nn.TransformerDecoderLayer` | `Block` with cross-attention to `context` |
    | `nn.TransformerEncoder`, `nn.TransformerDecoder` | `nn.ModuleList` of blocks, without a final norm |

    Notes:
        regard is always batch first, [batch, length, dim], regardless of `module.batch_first`.

        Masks are inverted: in torch's bool masks, True means that a query may **not** attend, in regard that it may. A
        ``key_padding_mask`` p becomes ``Padding(~p)``, a bool ``attn_mask`` m becomes ``Dense(~m)``, a float one is a
        ``bias``; a causal one is ``Causal()``.

        ``add_zero_attn`` adds a key and a value of zeros, which is a `sink` with logit 0; it stays 0 in training.
    Raises:
        TypeError: another module.
        ValueError: ``add_bias_kv``, an unsupported activation, or norms with different eps.

    >>> layer = from_torch(nn.TransformerEncoderLayer(16, 2, dim_feedforward=32))
    >>> layer(torch.randn(1, 5, 16), mask=Causal()).shape
    torch.Size([1, 5, 16])
    """
    if isinstance(module, nn.MultiheadAttention):
        return _torch_attention(module)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return _torch_block(module)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return nn.ModuleList(from_torch(layer) for layer in module.layers)
    raise TypeError(
        "from_torch: module must be an nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer "
        f"or a stack of these layers, got {type(module).__name__}"
    )


def _torch_attention(module: nn.MultiheadAttention) -> MultiHeadAttention:
    tensors = Renamed("from_torch", TORCH_ATTENTION, module.state_dict())
    _add_sink(tensors, "sink", module)
    return tensors.fill(partial(_make_torch_attention, module)).train(module.training)


def _torch_block(module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Block:
    decoder = module if isinstance(module, nn.TransformerDecoderLayer) else None
    norms, last_dropout = [module.norm1, module.norm2], module.dropout2
    if decoder is not None:
        norms, last_dropout = [*norms, decoder.norm3], decoder.dropout3
    if any(norm.eps != norms[0].eps for norm in norms):
        raise ValueError(f"from_torch: all norms of a layer must have one eps, got {[norm.eps for norm in norms]}")

    def make() -> Block:
        return Block(
            _make_torch_attention(module.self_attn, module.dropout1.p),
            FeedForward(
                module.linear1.in_features,
                module.linear1.out_features,
                activation=_torch_activation(module.activation),
                bias=module.linear1.bias is not None,
                dropout=module.dropout.p,
                output_dropout=last_dropout.p,
            ),
            cross=None if decoder is None else _make_torch_attention(decoder.multihead_attn, decoder.dropout2.p),
            norm=partial(make_norm, "layer", eps=norms[0].eps, bias=module.norm1.bias is not None),
            norm_first=module.norm_first,
        )

    names = TORCH_ENCODER_LAYER if decoder is None else TORCH_DECODER_LAYER
    tensors = Renamed("from_torch", names, module.state_dict())
    _add_sink(tensors, "attention.sink", module.self_attn)
    if decoder is not None:
        _add_sink(tensors, "cross.sink", decoder.multihead_attn)
    return tensors.fill(make).train(module.training)


def _make_torch_attention(module: nn.MultiheadAttention, output_dropout: float = 0.0) -> MultiHeadAttention:
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError(
            "from_torch: add_bias_kv is not in regard: it adds one learned key and value to every text; "
            "only its special case add_zero_attn is, as a sink"
        )
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_input=module.kdim,
        value_input=module.vdim,
        projection_bias=module.in_proj_bias is not None,
        output_bias=module.out_proj.bias is not None,
        sink=module.add_zero_attn,
        dropout=module.dropout,
        output_dropout=output_dropout,
    )
    if layer.sink is not None:
        layer.sink.requires_grad_(False)
    return layer


def _add_sink(tensors: Renamed, name: str, module: nn.MultiheadAttention) -> None:
    if module.add_zero_attn:
        tensors[name] = module.out_proj.weight.new_zeros(module.num_heads)


def _torch_activation(activation: object) -> Activation:
    """regard's name of an activation of torch.nn or torch.nn.functional."""
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    for known in (activation, type(activation)):
        if known in TORCH_ACTIVATIONS:
            return TORCH_ACTIVATIONS[known]
    raise ValueError(f"from_torch: activation must be relu, gelu or silu of torch, got {activation!r}")

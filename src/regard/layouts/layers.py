"""A single attention layer: stored as one matrix, as four linear maps, or with one matrix per head."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from regard.layers import MultiHeadAttention
from regard.layouts.renaming import LAYOUTS, STORED_MASK, Names, Renamed, below
from regard.masks import Causal
from regard.shapes import Table as Shapes
from regard.shapes import check, shape_error

FUSED_ATTENTION: Names = {
    "c_attn.*": "{query,key,value}.*",
    "c_proj.*": "output.*",
    "bias": STORED_MASK,
    "masked_bias": STORED_MASK,
}
ANNOTATED_ATTENTION: Names = {
    "linears.0.*": "query.*",
    "linears.1.*": "key.*",
    "linears.2.*": "value.*",
    "linears.3.*": "output.*",
}
LAYOUTS |= {
    "from_fused": "one attention layer of GPT-2, minGPT or nanoGPT: c_attn, c_proj",
    "from_annotated": "one attention layer of four linear maps: linears.0 to linears.3",
    "from_heads": "one attention layer with a matrix per head",
}

PER_HEAD_SHAPES: Shapes = {
    "query": ("heads", "dim", "head_dim"),
    "key": ("kv_heads", "key_input", "head_dim"),
    "value": ("kv_heads", "value_input", "value_dim"),
    "output": ("joined", "dim"),
    "query_bias": ("heads", "head_dim"),
    "key_bias": ("kv_heads", "head_dim"),
    "value_bias": ("kv_heads", "value_dim"),
    "output_bias": ("dim",),
}


def from_fused(state_dict: Mapping[str, Tensor], *, heads: int, prefix: str = "") -> MultiHeadAttention:
    """The causal attention layer of GPT-2, minGPT or nanoGPT: query, key and value in one matrix.

        query | key | value = x @ c_attn,   output = joined heads @ c_proj

    The matrices may be stored as in nn.Linear, c_attn [3 * dim, dim], or as in Conv1D, [dim, 3 * dim]. A mask saved
    with them (``bias`` [1, 1, N, N], ``masked_bias``) is ignored: the layer is causal at any length.

    Args:
        state_dict: of such a layer, or of a whole model.
        heads: number of heads, which tensors do not contain.
        prefix: the prefix of the layer's names, such as "transformer.h.0.attn.".
    Raises:
        ValueError: another layout, or heads that do not divide.

    >>> linear = {"c_attn.weight": torch.randn(48, 16), "c_proj.weight": torch.randn(16, 16)}
    >>> from_fused(linear, heads=2)(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """
    tensors = Renamed("from_fused", FUSED_ATTENTION, upright(below(state_dict, prefix)))
    return tensors.fill(partial(_make_attention, tensors, heads, mask=Causal()))


def from_annotated(state_dict: Mapping[str, Tensor], *, heads: int, prefix: str = "") -> MultiHeadAttention:
    """An attention layer of four linear maps in a list: ``linears.0`` to ``linears.3``, query, key, value, output.

    The layer has no mask of its own: pass one with each call, as with the original.

    Args:
        state_dict: of such a layer, or of a whole model.
        heads: number of heads, which tensors do not contain.
        prefix: the prefix of the layer's names, such as "encoder.layers.0.self_attn.".
    Raises:
        ValueError: another layout, or heads that do not divide.
    References:
        Rush 2018, "The Annotated Transformer", class MultiHeadedAttention.

    >>> maps = {f"linears.{i}.weight": torch.randn(16, 16) for i in range(4)}
    >>> from_annotated(maps, heads=2)
    MultiHeadAttention(
      heads=2
      (query): Linear(in_features=16, out_features=16, bias=False)
      (key): Linear(in_features=16, out_features=16, bias=False)
      (value): Linear(in_features=16, out_features=16, bias=False)
      (output): Linear(in_features=16, out_features=16, bias=False)
    )
    """
    tensors = Renamed("from_annotated", ANNOTATED_ATTENTION, below(state_dict, prefix))
    return tensors.fill(partial(_make_attention, tensors, heads))


def from_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
) -> MultiHeadAttention:
    """An attention layer from one matrix per head.

        head h:  attention(x @ query[h], x @ key[h], x @ value[h]),   all heads side by side @ output

    Shapes:
        query [heads, dim, head_dim], key [kv_heads, key_input, head_dim], value [kv_heads, value_input, value_dim],
        output [heads * value_dim, dim]; query_bias [heads, head_dim], key_bias [kv_heads, head_dim],
        value_bias [kv_heads, value_dim], output_bias [dim]
    Args:
        query_bias, key_bias, value_bias, output_bias: biases of the projections; None for none. If only some of the
            first three are given, the others are zero.
    Raises:
        ShapeError: matrices that do not fit each other, or kv_heads that do not divide heads.

    >>> from_heads(*torch.randn(3, 2, 16, 8), torch.randn(16, 16))(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """
    given = {"query": query, "key": key, "value": value, "output": output}
    constants = {"query": query_bias, "key": key_bias, "value": value_bias}
    present = {f"{name}_bias": c for name, c in (*constants.items(), ("output", output_bias)) if c is not None}
    sizes = check("from_heads", PER_HEAD_SHAPES, **given, **present)
    heads, kv_heads, joined = sizes["heads"], sizes["kv_heads"], sizes["heads"] * sizes["value_dim"]
    if heads % max(1, kv_heads):
        raise shape_error("from_heads", f"kv_heads={kv_heads} must divide heads={heads}", PER_HEAD_SHAPES, given)
    if sizes["joined"] != joined:
        what = f"output must have heads * value_dim = {joined} rows, got {sizes['joined']}"
        raise shape_error("from_heads", what, PER_HEAD_SHAPES, given)

    tensors = Renamed("from_heads", {}, {})
    tensors["output.weight"] = output.T
    if output_bias is not None:
        tensors["output.bias"] = output_bias
    for name, constant in constants.items():
        tensors[f"{name}.weight"] = given[name].transpose(1, 2).flatten(0, 1)
        if any(c is not None for c in constants.values()):
            zeros = given[name].new_zeros(len(given[name]) * given[name].shape[2])
            tensors[f"{name}.bias"] = zeros if constant is None else constant.flatten()
    return tensors.fill(partial(_make_attention, tensors, heads, kv_heads=kv_heads))


def _make_attention(tensors: Renamed, heads: int, *, kv_heads: int | None = None, **parts: Any) -> MultiHeadAttention:
    """An attention layer of the tensors' sizes."""
    (key_dim, dim), (_, key_input) = tensors["query.weight"].shape, tensors["key.weight"].shape
    value_dim, value_input = tensors["value.weight"].shape
    return MultiHeadAttention(
        dim,
        heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim if kv_heads is None else value_dim // kv_heads * heads,
        key_input=key_input,
        value_input=value_input,
        projection_bias="query.bias" in tensors,
        output_bias="output.bias" in tensors,
        **parts,
    )


def upright(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of GPT-2, minGPT or nanoGPT as in nn.Linear.

    Only the shape of c_attn, [3 * dim, dim] or its transpose, shows whether matrices are transposed.
    """
    shapes = {tuple(tensor.shape) for name, tensor in tensors.items() if name.endswith("c_attn.weight")}
    if not shapes or any(len(shape) != 2 or shape[1] != 3 * shape[0] for shape in shapes):
        return dict(tensors)
    projections = re.compile(r"(.*\.)?c_(attn|proj|fc)\.weight")
    return {name: tensor.T if projections.fullmatch(name) else tensor for name, tensor in tensors.items()}

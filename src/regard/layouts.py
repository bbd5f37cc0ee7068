"""Other libraries' weights in regard's layers and models.

The same attention is stored in many ways. What differs is names, whether query, key and value lie in one matrix or in
three, and which way round a matrix lies:

    nn.Linear, regard        [output, input]    x @ W^T
    Conv1D (GPT-2)           [input, output]    x @ W
    one matrix per head      [heads, input, head_dim], for query, key and value each

| function | what it reads |
|---|---|
| `from_torch` | `nn.MultiheadAttention`, Transformer layers of torch.nn, and stacks of these |
| `from_fused` | one causal attention layer of GPT-2, minGPT or nanoGPT: `c_attn` and `c_proj` |
| `from_annotated` | one attention layer of four linear maps: `linears.0` to `linears.3` |
| `from_heads` | one attention layer with a matrix per head |
| `from_gpt` | a whole GPT-2, minGPT or nanoGPT |
| `from_transformers` | a GPT-2, Llama, Mistral, Qwen2 or BERT of transformers |

Each layout is a table of names, theirs on the left, regard's on the right. A ``*`` stands for one part of a dotted name
and keeps its value; ``{query,key,value}`` stands for three tensors that lie in one, below each other.

Every result has its own copy of the numbers, in the dtype and on the device where they were. Nothing is guessed: a name
that no table knows, a tensor that is missing, or a setting that would change the result and that regard does not know
is an error that names it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.layers import Activation, Block, FeedForward, MultiHeadAttention, make_norm
from regard.masks import Causal
from regard.models import Classifier, Decoder, Encoder, MaskedLanguageModel, ModelConfig
from regard.shapes import Table as Shapes
from regard.shapes import check, shape_error

__all__ = ["from_annotated", "from_fused", "from_gpt", "from_heads", "from_torch", "from_transformers"]

Names = Mapping[str, str]
"""Their names -> regard's names."""

LEFT_OUT = "(left out)"
"""In place of a name: something that regard has no use for."""

STORED_MASK = "(stored mask)"
"""In place of a name: a causal mask that was saved with the weights. It has four axes, or none."""

LAYOUTS = {
    "from_torch": "attention and Transformer layers of torch.nn",
    "from_fused": "one attention layer of GPT-2, minGPT or nanoGPT: c_attn, c_proj",
    "from_annotated": "one attention layer of four linear maps: linears.0 to linears.3",
    "from_heads": "one attention layer with a matrix per head",
    "from_gpt": "a whole GPT-2, minGPT or nanoGPT: wte, wpe, h.0 and so on, ln_f",
    "from_transformers": "a GPT-2, Llama, Mistral, Qwen2 or BERT of transformers",
}


def _within(theirs: str, ours: str, names: Names) -> Names:
    """A table of names inside a part of a larger layout; "(left out)" and "(stored mask)" stay as they are."""
    return {theirs + name: our if our in (LEFT_OUT, STORED_MASK) else ours + our for name, our in names.items()}


# --- the tables ---------------------------------------------------------------------------------------------------

TORCH_ATTENTION: Names = {
    "in_proj_weight": "{query,key,value}.weight",
    "in_proj_bias": "{query,key,value}.bias",
    "q_proj_weight": "query.weight",
    "k_proj_weight": "key.weight",
    "v_proj_weight": "value.weight",
    "out_proj.*": "output.*",
}
TORCH_ENCODER_LAYER: Names = {
    **_within("self_attn.", "attention.", TORCH_ATTENTION),
    "linear1.*": "feed_forward.input.*",
    "linear2.*": "feed_forward.output.*",
    "norm1.*": "attention_norm.*",
    "norm2.*": "feed_forward_norm.*",
}
TORCH_DECODER_LAYER: Names = {
    **TORCH_ENCODER_LAYER,
    **_within("multihead_attn.", "cross.", TORCH_ATTENTION),
    "norm2.*": "cross_norm.*",
    "norm3.*": "feed_forward_norm.*",
}
FUSED: Names = {
    "c_attn.*": "{query,key,value}.*",
    "c_proj.*": "output.*",
    "bias": STORED_MASK,
    "masked_bias": STORED_MASK,
}
ANNOTATED: Names = {
    "linears.0.*": "query.*",
    "linears.1.*": "key.*",
    "linears.2.*": "value.*",
    "linears.3.*": "output.*",
}
GPT: Names = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "positions.weight",
    "h.*.ln_1.*": "layers.*.attention_norm.*",
    **_within("h.*.attn.", "layers.*.attention.", FUSED),
    "h.*.ln_2.*": "layers.*.feed_forward_norm.*",
    "h.*.mlp.c_fc.*": "layers.*.feed_forward.input.*",
    "h.*.mlp.c_proj.*": "layers.*.feed_forward.output.*",
    "ln_f.*": "norm.*",
    "lm_head.weight": "logits.weight",
}
LLAMA: Names = {
    "embed_tokens.weight": "embedding.weight",
    "layers.*.input_layernorm.weight": "layers.*.attention_norm.weight",
    "layers.*.self_attn.q_proj.*": "layers.*.attention.query.*",
    "layers.*.self_attn.k_proj.*": "layers.*.attention.key.*",
    "layers.*.self_attn.v_proj.*": "layers.*.attention.value.*",
    "layers.*.self_attn.o_proj.*": "layers.*.attention.output.*",
    "layers.*.post_attention_layernorm.weight": "layers.*.feed_forward_norm.weight",
    "layers.*.mlp.gate_proj.*": "layers.*.feed_forward.gate.*",
    "layers.*.mlp.up_proj.*": "layers.*.feed_forward.input.*",
    "layers.*.mlp.down_proj.*": "layers.*.feed_forward.output.*",
    "norm.weight": "norm.weight",
    "lm_head.weight": "logits.weight",
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
    **_within("", "encoder.", BERT),
    "cls.predictions.transform.dense.*": "transform.*",
    "cls.predictions.transform.LayerNorm.*": "norm.*",
    "cls.predictions.bias": "constant",
    # tied to the two above: several names for one tensor must agree
    "cls.predictions.decoder.bias": "constant",
    "cls.predictions.decoder.weight": "encoder.embedding.weight",
}
BERT_CLASSIFIER: Names = {
    **_within("", "encoder.", BERT),
    "pooler.dense.*": "pool.*",
    "classifier.*": "classes.*",
}


# --- the engine ---------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


class Renamed(dict[str, Tensor]):
    """Somebody's tensors under regard's names, ready to fill a layer or a model.

    Asking for a name that is not there raises the error of a state dict in another layout.

    Args:
        function: who asks, for errors.
        names: the table.
        tensors: a state dict, or the part of one that the table is for.
    """

    def __init__(self, function: str, names: Names, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function, self.names = function, names
        self._source: dict[str, str] = {}
        self._unknown: list[str] = []
        for name, tensor in tensors.items():
            self._add(name, tensor)

    def fill(self, make: Callable[[], M]) -> M:
        """What `make` makes, with these tensors as its parameters.

        Raises:
            ValueError: a tensor is missing, superfluous, or of another shape.
        """
        with torch.device("meta"), Undrawn():  # no memory and no random numbers for what is replaced below
            module = make()
        held = dict(module.named_parameters(remove_duplicate=False))
        missing = [name for name, _ in module.named_parameters() if name not in self]
        superfluous = [self._source.get(name, name) for name in self if name not in held]
        if missing or superfluous or self._unknown:
            self._fail(missing, superfluous)
        copies: dict[int, nn.Parameter] = {}  # by parameter, so that what was shared stays shared
        for name, parameter in held.items():
            if id(parameter) not in copies:
                copies[id(parameter)] = self._copy(name, parameter)
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, copies[id(parameter)])
        return module

    def __missing__(self, name: str) -> NoReturn:
        self._fail([name], [])

    def _add(self, theirs: str, tensor: Tensor) -> None:
        our = next((our for pattern, our in self.names.items() if (stars := _match(pattern, theirs)) is not None), None)
        if our == LEFT_OUT or (our == STORED_MASK and tensor.dim() in (0, 4)):
            return
        if our is None or our == STORED_MASK:
            self._unknown.append(theirs)
            return
        if not tensor.is_floating_point():
            raise ValueError(f"{self.function}: {theirs} must be floating point, got {tensor.dtype}; is it quantised?")
        ours = _alternatives(_put(our, stars or ()))
        if tensor.dim() == 0 or tensor.shape[0] % len(ours):
            raise ValueError(
                f"{self.function}: {theirs} must hold {len(ours)} equal parts ({', '.join(ours)}), "
                f"got {list(tensor.shape)}"
            )
        for name, part in zip(ours, tensor.chunk(len(ours)), strict=True):
            if name in self and not torch.equal(self[name], part):
                raise ValueError(
                    f"{self.function}: {theirs} and {self._source[name]} must be equal, for regard ties them"
                )
            self[name], self._source[name] = part, theirs

    def _copy(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        tensor = self[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{self.function}: {self._source.get(name, name)} must be {list(parameter.shape)} as {name}, "
                f"got {list(tensor.shape)}"
            )
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(copy, requires_grad=parameter.requires_grad)

    def _fail(self, missing: list[str], superfluous: list[str]) -> NoReturn:
        lines = [f"{self.function}: these are not the tensors of {LAYOUTS[self.function]}"]
        for what, names in (
            ("missing   ", [self._theirs(name) for name in missing]),
            ("unexpected", [*self._unknown, *superfluous]),
        ):
            distinct = list(dict.fromkeys(names))
            if distinct:
                more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
                lines.append(f"  {what} {', '.join(distinct[:4])}{more}")
        lines += ["  the layouts are"] + [f"    {function:<17} {what}" for function, what in LAYOUTS.items()]
        raise ValueError("\n".join(lines))

    def _theirs(self, name: str) -> str:
        """What they would call it."""
        for pattern, our in self.names.items():
            for alternative in _alternatives(our):
                stars = _match(alternative, name)
                if stars is not None:
                    return _put(pattern, stars)
        return name


class Undrawn(TorchFunctionMode):
    """New parameters stay as they are. To draw them on the meta device would load torch's compiler, for seconds."""

    DRAWING = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern stand for in a name, or None where it is another name."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    return None if found is None else found.groups()


def _put(pattern: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        pattern = pattern.replace("*", star, 1)
    return pattern


def _alternatives(name: str) -> list[str]:
    """ "a.{b,c}.d" -> a.b.d and a.c.d."""
    before, _, rest = name.partition("{")
    inside, _, after = rest.partition("}")
    return [before + one + after for one in inside.split(",")]


def _only(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# --- one layer ----------------------------------------------------------------------------------------------------

PER_HEAD: Shapes = {
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

    The matrices may lie as in nn.Linear, c_attn [3 * dim, dim], or as in Conv1D, [dim, 3 * dim]. A mask that was saved
    with them (``bias`` [1, 1, N, N], ``masked_bias``) is left out: the layer is causal at any length.

    Args:
        state_dict: of such a layer, or of a whole model.
        heads: number of heads; no tensor tells.
        prefix: what the names of the layer begin with, such as "transformer.h.0.attn.".
    Raises:
        ValueError: another layout, or heads that do not divide.

    >>> linear = {"c_attn.weight": torch.randn(48, 16), "c_proj.weight": torch.randn(16, 16)}
    >>> from_fused(linear, heads=2)(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """
    tensors = Renamed("from_fused", FUSED, _upright(_only(state_dict, prefix)))
    return tensors.fill(partial(_make_attention, tensors, heads, mask=Causal()))


def from_annotated(state_dict: Mapping[str, Tensor], *, heads: int, prefix: str = "") -> MultiHeadAttention:
    """An attention layer of four linear maps in a list: ``linears.0`` to ``linears.3``, query, key, value, output.

    The layer has no mask of its own: pass one with each call, as with the original.

    Args:
        state_dict: of such a layer, or of a whole model.
        heads: number of heads; no tensor tells.
        prefix: what the names of the layer begin with, such as "encoder.layers.0.self_attn.".
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
    tensors = Renamed("from_annotated", ANNOTATED, _only(state_dict, prefix))
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
        query_bias, key_bias, value_bias, output_bias: the projections' own; None for none. Where only some of the first
            three are given, the others are zero.
    Raises:
        ShapeError: matrices that do not fit each other, or kv_heads that do not divide heads.

    >>> from_heads(*torch.randn(3, 2, 16, 8), torch.randn(16, 16))(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """
    given = {"query": query, "key": key, "value": value, "output": output}
    constants = {"query": query_bias, "key": key_bias, "value": value_bias}
    present = {f"{name}_bias": c for name, c in (*constants.items(), ("output", output_bias)) if c is not None}
    sizes = check("from_heads", PER_HEAD, **given, **present)
    heads, kv_heads, joined = sizes["heads"], sizes["kv_heads"], sizes["heads"] * sizes["value_dim"]
    if heads % max(1, kv_heads):
        raise shape_error("from_heads", f"kv_heads={kv_heads} must divide heads={heads}", PER_HEAD, given)
    if sizes["joined"] != joined:
        what = f"output must have heads * value_dim = {joined} rows, got {sizes['joined']}"
        raise shape_error("from_heads", what, PER_HEAD, given)

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


def _upright(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The matrices of GPT-2, minGPT or nanoGPT as in nn.Linear.

    Only c_attn, which is three times as long as wide, shows which way round it lies; the others lie like it.
    """
    shapes = {tuple(tensor.shape) for name, tensor in tensors.items() if name.endswith("c_attn.weight")}
    if not shapes or any(len(shape) != 2 or shape[1] != 3 * shape[0] for shape in shapes):
        return dict(tensors)
    projections = re.compile(r"(.*\.)?c_(attn|proj|fc)\.weight")
    return {name: tensor.T if projections.fullmatch(name) else tensor for name, tensor in tensors.items()}


# --- torch.nn -----------------------------------------------------------------------------------------------------


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
    | `nn.TransformerDecoderLayer` | `Block` with cross-attention: its second text is `context` |
    | `nn.TransformerEncoder`, `nn.TransformerDecoder` | `nn.ModuleList` of blocks; a last norm stays `module.norm` |

    Notes:
        regard is batch first, [batch, length, dim], whatever `module.batch_first` says.

        Masks turn round: torch's bool masks say True where a query may **not** attend, regard's where it may. A
        ``key_padding_mask`` p becomes ``Padding(~p)``, a bool ``attn_mask`` m becomes ``Dense(~m)``, a float one is a
        ``bias``; a causal one is ``Causal()``.

        ``add_zero_attn`` adds a key and a value of zeros, which is a `sink` with logit 0; it stays 0 in training.
    Raises:
        TypeError: none of these modules.
        ValueError: ``add_bias_kv``, an activation that regard does not have, or norms with several eps.

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


TORCH_ACTIVATIONS: Mapping[object, Activation] = {
    F.relu: "relu",
    torch.relu: "relu",
    nn.ReLU: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
    nn.SiLU: "silu",
}


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


# --- whole models -------------------------------------------------------------------------------------------------


def from_gpt(state_dict: Mapping[str, Tensor], *, heads: int, activation: Activation = "gelu_tanh") -> Decoder:
    """A whole GPT-2, minGPT or nanoGPT as a `Decoder`; all sizes are read from the tensors.

    Names may begin with ``transformer.`` or not (and with ``_orig_mod.`` where the model was compiled), matrices may
    lie either way round, masks may have been saved or not, biases may be there or not. Without an
    ``lm_head.weight``, or with one that equals ``wte.weight``, the logits are tied to the embedding.

    Args:
        state_dict: of the model.
        heads: number of heads; no tensor tells.
        activation: "gelu_tanh" in GPT-2 and minGPT (there NewGELU), "gelu" in nanoGPT; no tensor tells.
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
    tensors = Renamed("from_gpt", GPT, _upright(_without(state_dict, "_orig_mod.", "transformer.")))
    config = _config(tensors, heads, positions="learned", norm="layer", activation=activation)
    return _decoder(config, tensors)


def from_transformers(model: nn.Module) -> Decoder | Encoder | MaskedLanguageModel | Classifier:
    """A model of transformers as a model of regard, with the same logits.

    | model of transformers | result |
    |---|---|
    | `GPT2LMHeadModel`, `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` | `Decoder` |
    | `GPT2Model`, `LlamaModel`, `MistralModel`, `Qwen2Model` | `Decoder`; `Decoder.states` gives its states |
    | `BertModel` | `Encoder`; its pooler is left out |
    | `BertForMaskedLM` | `MaskedLanguageModel` |
    | `BertForSequenceClassification` | `Classifier` |

    Shapes: ``decoder(tokens)`` and ``encoder(tokens, segments=token_type_ids)`` as usual in regard. An attention mask
    of 0 and 1 becomes ``mask=Padding(attention_mask.bool())``.
    Notes:
        A model without a head for logits gets its own embedding as one, which was not trained for that.

        regard bounds the length of a text: by max_position_embeddings, or where rotary positions are scaled by a
        factor, by that many times the original context.

        With "dynamic" scaling and beyond the original context, the lengths of earlier calls matter in transformers and
        do not matter here: see `DynamicScaling`.
    Raises:
        ValueError: another model, or a setting that changes the result and that regard does not have.

    >>> model = transformers.AutoModelForCausalLM.from_pretrained("openai-community/gpt2")  # doctest: +SKIP
    >>> decoder = from_transformers(model)  # doctest: +SKIP
    """
    architecture = ARCHITECTURES.get(type(model).__name__)
    if architecture is None:
        raise ValueError(
            f"from_transformers: model must be one of {', '.join(ARCHITECTURES)}, got {type(model).__name__}"
        )
    theirs: Any = model.config
    tensors = Renamed(
        "from_transformers", architecture.names, _without(_upright(model.state_dict()), *architecture.prefixes)
    )
    settings = architecture.settings(theirs)
    config = _config(tensors, theirs.num_attention_heads, inside=architecture.inside, **settings)
    if config.layers != theirs.num_hidden_layers:
        raise ValueError(
            f"from_transformers: the model holds {config.layers} layers and its num_hidden_layers is "
            f"{theirs.num_hidden_layers}"
        )
    return architecture.build(config, tensors).train(model.training)


def _config(tensors: Renamed, heads: int, *, inside: str = "", **settings: Any) -> ModelConfig:
    """The configuration of a model with these tensors: every size that a tensor tells, and `settings` for the rest.

    Args:
        inside: what the names of the stack begin with.
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
        "layers": sum(_match(f"{inside}layers.*.attention.query.weight", name) is not None for name in tensors),
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if key_dim == embedding.shape[1] else head_dim,
        "hidden_dim": hidden_dim,
        "bias": bias,
        "attention_bias": None if attention_bias == bias else attention_bias,
        "output_bias": None if output_bias == bias else output_bias,
        "tied": logits is None or torch.equal(logits, embedding),
        "segments": 0 if segments is None else len(segments),
    }
    if positions is not None:
        sizes["context_length"] = len(positions)
    return ModelConfig(**sizes, **settings)


def _without(tensors: Mapping[str, Tensor], *prefixes: str) -> dict[str, Tensor]:
    """The tensors under names without these prefixes, in this order, where they have them."""
    for prefix in prefixes:
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def _decoder(config: ModelConfig, tensors: Renamed) -> Decoder:
    tensors.setdefault("logits.weight", tensors["embedding.weight"])
    return tensors.fill(lambda: Decoder(config))


def _encoder(config: ModelConfig, tensors: Renamed) -> Encoder:
    return tensors.fill(lambda: Encoder(config))


def _masked(config: ModelConfig, tensors: Renamed) -> MaskedLanguageModel:
    return tensors.fill(lambda: MaskedLanguageModel(Encoder(config)))


def _classifier(config: ModelConfig, tensors: Renamed) -> Classifier:
    return tensors.fill(lambda: Classifier(Encoder(config), len(tensors["classes.weight"])))


# --- transformers: what the tensors do not tell -------------------------------------------------------------------

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
}

ROTARY: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The kinds of rotary positions, and the parameters of each that are understood."""


def _gpt2(theirs: Any) -> dict[str, Any]:
    _must(
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
    _must(theirs, is_causal=True, partial_rotary_factor=1.0)
    return {
        "positions": "rotary",
        **_rotary(theirs),
        "norm": "rms",
        "norm_eps": theirs.rms_norm_eps,
        "activation": _activation(theirs, "hidden_act", GATED_ACTIVATIONS),
        "padding_id": theirs.pad_token_id,
        "attention_dropout": theirs.attention_dropout,
    }


def _mistral(theirs: Any) -> dict[str, Any]:
    return {**_llama(theirs), "window": theirs.sliding_window}


def _qwen2(theirs: Any) -> dict[str, Any]:
    kinds = set(getattr(theirs, "layer_types", None) or ())
    if not theirs.use_sliding_window or kinds == {"full_attention"}:
        return _llama(theirs)
    if kinds == {"sliding_attention"}:
        return _mistral(theirs)
    raise ValueError(
        "from_transformers: a regard model has one window for all layers, so layer_types must be all full_attention or "
        f"all sliding_attention, got {', '.join(sorted(kinds)) or None}"
    )


def _bert(theirs: Any) -> dict[str, Any]:
    _must(theirs, is_causal=False, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
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
    _must(theirs, classifier_dropout=theirs.hidden_dropout_prob)
    return _bert(theirs)


def _must(theirs: Any, **expected: object) -> None:
    """Every setting that regard knows only one value of must have that value, or not be there."""
    for name, value in {
        **expected,
        "is_encoder_decoder": False,
        "pruned_heads": None,
        "quantization_config": None,
    }.items():
        got = getattr(theirs, name, None)
        if got is not None and got != value and (got or value):
            hint = "; where the model is not trained, set them equal" if name.endswith(("_pdrop", "_dropout")) else ""
            raise ValueError(
                f"from_transformers: regard has no such model with {name}={got!r}, only with {name}={value!r}{hint}"
            )


def _activation(theirs: Any, name: str, known: Mapping[str, Activation]) -> Activation:
    activation = getattr(theirs, name)
    if activation not in known:
        raise ValueError(f"from_transformers: {name} must be one of {', '.join(known)}, got {activation!r}")
    return known[activation]


def _rotary(theirs: Any) -> dict[str, Any]:
    """Fields of `ModelConfig`, from ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling`` as formerly."""
    before = {"rope_theta": getattr(theirs, "rope_theta", None), **(getattr(theirs, "rope_scaling", None) or {})}
    given = {k: v for k, v in (getattr(theirs, "rope_parameters", None) or before).items() if v is not None}
    named_before = given.pop("type", "default")
    kind = given.pop("rope_type", named_before)
    if kind not in ROTARY:
        raise ValueError(f"from_transformers: rope_type must be one of {', '.join(ROTARY)}, got {kind!r}")
    theta, turning = given.pop("rope_theta", 10000.0), given.pop("partial_rotary_factor", 1.0)
    unknown = sorted(set(given) - ROTARY[kind]) + ["partial_rotary_factor"] * (turning != 1.0)
    if unknown:
        raise ValueError(f"from_transformers: rotary positions of kind {kind!r} have no {', '.join(unknown)} in regard")

    context: int = theirs.max_position_embeddings
    if kind == "default":
        return {"context_length": context, "rotary_theta": theta}
    original = given.pop("original_max_position_embeddings", context)
    if "original_max_position_embeddings" in ROTARY[kind]:
        original = getattr(theirs, "original_max_position_embeddings", None) or original
    factor = given.setdefault("factor", context / original)
    if kind == "yarn":
        # Transformers takes 0 for "not given" here, and one of the two mscales without the other for none.
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
    """A model class of transformers: its names, what its configuration says, and what it becomes."""

    names: Names
    settings: Callable[[Any], dict[str, Any]]
    build: Callable[[ModelConfig, Renamed], Decoder | Encoder | MaskedLanguageModel | Classifier] = _decoder
    prefixes: tuple[str, ...] = ()
    """What names begin with, apart from the model's own heads."""
    inside: str = ""
    """What the result calls its stack."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(GPT, _gpt2, prefixes=("transformer.",)),
    "GPT2Model": Architecture(GPT, _gpt2),
    "LlamaForCausalLM": Architecture(LLAMA, _llama, prefixes=("model.",)),
    "LlamaModel": Architecture(LLAMA, _llama),
    "MistralForCausalLM": Architecture(LLAMA, _mistral, prefixes=("model.",)),
    "MistralModel": Architecture(LLAMA, _mistral),
    "Qwen2ForCausalLM": Architecture(LLAMA, _qwen2, prefixes=("model.",)),
    "Qwen2Model": Architecture(LLAMA, _qwen2),
    "BertModel": Architecture(BERT, _bert, _encoder),
    "BertForMaskedLM": Architecture(BERT_MASKED, _bert, _masked, ("bert.",), "encoder."),
    "BertForSequenceClassification": Architecture(
        BERT_CLASSIFIER, _bert_classifier, _classifier, ("bert.",), "encoder."
    ),
}

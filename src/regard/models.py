"""Whole models: encoder, decoder, encoder-decoder, from one configuration.

    tokens -> embedding (+ positions) -> blocks -> norm -> states          Encoder
                                                        -> logits          Decoder, one per token of the vocabulary

What differs between GPT-2, Llama, BERT and the original Transformer is data: `PRESETS` lists their configurations, and
`ModelConfig.preset("gpt2", layers=2)` takes one with changes.

References:
    Vaswani et al. 2017 ("original"); Devlin et al. 2018 ("bert"); Radford et al. 2019 ("gpt2"); Touvron et al. 2023 and
    Grattafiori et al. 2024 ("llama").
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import hints
from regard.biases import Alibi, Bias
from regard.cache import Cache
from regard.hints import hinted
from regard.layers import (
    ACTIVATIONS,
    Activation,
    Block,
    FeedForward,
    MultiHeadAttention,
    NormKind,
    TokenEmbedding,
    check_tokens,
    make_norm,
)
from regard.masks import Causal, Mask, Window
from regard.positions import (
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    Sinusoidal,
    YarnScaling,
)
from regard.shapes import check_kind, check_whole, kind

PositionKind = Literal["learned", "sinusoidal", "rotary", "alibi"]

SCALINGS: dict[str, Callable[..., Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


@hinted(hints.CONFIG)
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture and the sizes of a model, as plain data.

    Args:
        vocab_size, context_length, dim, layers, heads: sizes.
        kv_heads, head_dim: key and value heads, None: heads; features of a head, None: dim / heads.
        hidden_dim: hidden features of the feed-forward; None: 4 * dim.
        positions: "learned", "sinusoidal", "rotary", "alibi", or None for none.
        rotary_theta, rotary_dim, rotary_layout, rotary_scaling: as in `Rotary`; the scaling as a dict with its "kind"
            (linear, dynamic, yarn, llama3) and its arguments, so that a configuration is plain data.
        norm, norm_eps: "layer" or "rms", and its epsilon; None: the norm's usual one.
        norm_first: pre-norm (True) or post-norm.
        embedding_norm, embedding_scale: whether the embeddings are normalised (BERT); factor on token vectors.
        activation: of the feed-forward.
        bias: whether projections and norms have biases.
        attention_bias, output_bias: the same for query, key and value, and for attention's output; None: bias.
        tied: whether the output layer shares the token embedding.
        window: how many tokens each token attends to, itself included; None: all.
        softcap, logit_softcap: on attention scores, on logits; None for none.
        segments: number of segment embeddings (2 in BERT), 0 for none.
        padding_id: the padding token; None for none.
        dropout, attention_dropout: on embeddings, attention outputs and feed-forward; on weights. In training only.

    >>> ModelConfig.preset("gpt2").layers
    12
    """

    vocab_size: int
    context_length: int
    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden_dim: int | None = None
    positions: PositionKind | None = "rotary"
    rotary_theta: float = 10000.0
    rotary_dim: int | None = None
    rotary_layout: Literal["half", "interleaved"] = "half"
    rotary_scaling: Mapping[str, Any] | None = None
    norm: NormKind = "rms"
    norm_first: bool = True
    norm_eps: float | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    activation: Activation = "swiglu"
    bias: bool = False
    attention_bias: bool | None = None
    output_bias: bool | None = None
    tied: bool = True
    window: int | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    segments: int = 0
    padding_id: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "dim", "layers", "heads"):
            check_whole("ModelConfig", name, getattr(self, name))
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"ModelConfig: heads must divide dim, got heads={self.heads}, dim={self.dim}")
        if self.positions not in ("learned", "sinusoidal", "rotary", "alibi", None):
            raise ValueError(
                f"ModelConfig: positions must be learned, sinusoidal, rotary, alibi or None, got {self.positions!r}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"ModelConfig: activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ModelConfig":
        """A published configuration, with changes.

        With another `dim`, what was published as a multiple of it stays so: `hidden_dim`, and an `embedding_scale` that
        is its square root.

        Raises:
            ValueError: there is no such preset. TypeError: there is no such field.

        >>> ModelConfig.preset("gpt2", dim=48).hidden_dim
        192
        """
        if name not in PRESETS:
            raise ValueError(f"ModelConfig: no preset named {name!r}; there are: {', '.join(PRESETS)}")
        published, dim = PRESETS[name], changes.get("dim")
        if isinstance(dim, int) and dim > 0:
            if published.hidden_dim is not None:
                changes.setdefault("hidden_dim", round(published.hidden_dim * dim / published.dim))
            if published.embedding_scale == math.sqrt(published.dim):
                changes.setdefault("embedding_scale", math.sqrt(dim))
        return replace(published, **changes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """The configuration that `to_dict` wrote."""
        if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
            raise TypeError(f"ModelConfig.from_dict: data must be a dict of fields by name, got {kind(data)}")
        unknown = sorted(set(data) - {field.name for field in fields(cls)})
        if unknown:
            theirs = [hints.CONFIG[name] for name in unknown if name in hints.CONFIG]
            what = f"ModelConfig: unknown fields {', '.join(unknown)}{'' if theirs else '; written by a newer regard?'}"
            raise ValueError("\n  hint: ".join([what, *dict.fromkeys(theirs)]))
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def check_config(owner: str, config: object) -> None:
    """What a model is made from is a `ModelConfig`."""
    if isinstance(config, ModelConfig):
        return
    usual = ""
    if isinstance(config, Mapping):
        usual = "; make one: ModelConfig.from_dict(config), or ModelConfig(**config)"
    elif isinstance(config, str):
        usual = f"; make one: ModelConfig.preset({config!r})" if config in PRESETS else ""
    elif hasattr(config, "model_type"):
        usual = "; a model of transformers comes over with its weights: regard.layouts.from_transformers(model)"
    raise TypeError(f"{owner}: config must be a ModelConfig, got {kind(config)}{usual}")


PRESETS: dict[str, ModelConfig] = {
    "original": ModelConfig(
        vocab_size=37000, context_length=1024, dim=512, layers=6, heads=8, hidden_dim=2048, positions="sinusoidal",
        norm="layer", norm_first=False, embedding_scale=math.sqrt(512), activation="relu", bias=True, dropout=0.1,
    ),
    "bert": ModelConfig(
        vocab_size=30522, context_length=512, dim=768, layers=12, heads=12, hidden_dim=3072, positions="learned",
        norm="layer", norm_first=False, norm_eps=1e-12, embedding_norm=True, activation="gelu", bias=True, segments=2,
        padding_id=0, dropout=0.1, attention_dropout=0.1,
    ),
    "gpt2": ModelConfig(
        vocab_size=50257, context_length=1024, dim=768, layers=12, heads=12, hidden_dim=3072, positions="learned",
        norm="layer", activation="gelu_tanh", bias=True, dropout=0.1, attention_dropout=0.1,
    ),
    "llama": ModelConfig(
        vocab_size=128256, context_length=8192, dim=4096, layers=32, heads=32, kv_heads=8, hidden_dim=14336,
        rotary_theta=500000.0, norm="rms", norm_eps=1e-5, activation="swiglu", tied=False,
    ),
}  # fmt: skip


class Stack(nn.Module):
    """Embedding, blocks and the last norm: what all models share. Maps tokens to states [batch, length, dim]."""

    def __init__(self, config: ModelConfig, *, mask: Mask | None = None, cross: bool = False) -> None:
        super().__init__()
        check_config(type(self).__name__, config)
        self.config = config
        norm = partial(make_norm, config.norm, eps=config.norm_eps, bias=config.bias)
        self.embedding = TokenEmbedding(
            config.vocab_size, config.dim, padding_id=config.padding_id, scale=config.embedding_scale
        )
        self.positions = make_positions(config)
        self.segments = nn.Embedding(config.segments, config.dim) if config.segments else None
        self.embedding_norm = norm(config.dim) if config.embedding_norm else None
        rotary = make_rotary(config)
        if config.window is not None:
            mask = Window(config.window) if mask is None else mask & Window(config.window)
        bias = Alibi(config.heads) if config.positions == "alibi" else None
        head_dim = config.dim // config.heads if config.head_dim is None else config.head_dim

        def attention(mask: Mask | None, bias: Bias | None, rotary: Rotary | None) -> MultiHeadAttention:
            return MultiHeadAttention(
                config.dim,
                config.heads,
                kv_heads=config.kv_heads,
                key_dim=config.heads * head_dim,
                projection_bias=config.bias if config.attention_bias is None else config.attention_bias,
                output_bias=config.bias if config.output_bias is None else config.output_bias,
                mask=mask,
                bias=bias,
                rotary=rotary,
                softcap=config.softcap,
                dropout=config.attention_dropout,
                output_dropout=config.dropout,
            )

        self.layers = nn.ModuleList(
            Block(
                attention(mask, bias, rotary),
                FeedForward(
                    config.dim,
                    4 * config.dim if config.hidden_dim is None else config.hidden_dim,
                    activation=config.activation,
                    bias=config.bias,
                    output_dropout=config.dropout,
                ),
                cross=attention(None, None, None) if cross else None,
                norm=norm,
                norm_first=config.norm_first,
            )
            for _ in range(config.layers)
        )
        self.norm = norm(config.dim) if config.norm_first else None
        self._initialise()

    @hinted(hints.MODEL_CALL)
    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        context: Tensor | None = None,
        context_mask: Mask | None = None,
        context_cache: Cache | None = None,
    ) -> Tensor:
        """Shapes: tokens int [batch, length] -> states [batch, length, dim]."""
        config = self.config
        check_tokens(type(self).__name__, tokens, config.vocab_size)
        if cache is not None:
            check_kind(type(self).__name__, "cache", cache, Cache, "; make one: model.cache()")
        seen = 0 if cache is None else cache.length
        length = tokens.shape[1]
        if seen + length > config.context_length:
            before = f" after {seen} in the cache" if seen else ""
            raise ValueError(
                f"{type(self).__name__}: {length} tokens{before} are more than context_length={config.context_length}; "
                "shorten the text or read it in pieces"
            )
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(length, offset=seen).to(x.dtype)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        elif segments is not None:
            raise ValueError(f"{type(self).__name__}: segments were given, but the configuration has segments=0")
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = F.dropout(x, config.dropout, self.training)
        for number, block in enumerate(self.layers):
            x = block(
                x,
                mask=mask,
                context=context,
                context_mask=context_mask,
                cache=None if cache is None else cache[number],
                context_cache=None if context_cache is None else context_cache[number],
            )
        states: Tensor = x if self.norm is None else self.norm(x)
        return states

    def cache(self) -> Cache:
        """An empty cache for this model."""
        return Cache(self.config.layers)

    def _initialise(self) -> None:
        """N(0, 0.02), and for what is added to the residual stream 0.02 / sqrt(2 * layers), so that its variance at the
        end does not grow with depth (Radford et al. 2019, section 2.3). Token vectors with a scale are drawn so that
        they are N(0, 1) once scaled."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith("output")
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * self.config.layers) if last else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                scale = module.scale if isinstance(module, TokenEmbedding) else 1.0
                nn.init.normal_(module.weight, std=0.02 if scale == 1.0 else 1.0 / scale)
                if module.padding_idx is not None:
                    nn.init.zeros_(module.weight[module.padding_idx])


class Encoder(Stack):
    """Every token sees every token: states for classification, retrieval and tagging.

    Shapes: tokens int [batch, length] -> states [batch, length, dim]. Padding is hidden with ``mask=Padding(lengths)``.

    >>> encoder = Encoder(ModelConfig.preset("bert", vocab_size=11, dim=16, heads=2, layers=1))
    >>> encoder(torch.tensor([[1, 2, 3]]), mask=Padding([2])).shape
    torch.Size([1, 3, 16])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)


class Decoder(Stack):
    """Every token sees itself and what came before: a language model.

    Shapes: tokens int [batch, length] -> logits [batch, length, vocab_size]; logits at i are for token i + 1.

    >>> decoder = Decoder(ModelConfig.preset("gpt2", vocab_size=11, dim=16, heads=2, layers=1))
    >>> decoder(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, config: ModelConfig, *, cross: bool = False) -> None:
        super().__init__(config, mask=Causal(), cross=cross)
        self.logits = Logits(config, self.embedding)

    @hinted(hints.MODEL_CALL)
    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Logits; arguments as in `Stack.forward`: mask, cache, context, context_mask, context_cache."""
        logits: Tensor = self.logits(self.states(tokens, **arguments))
        return logits

    def states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """What the logits are made from, [batch, length, dim], after the last norm; arguments as in `forward`."""
        return super().forward(tokens, **arguments)


class Logits(nn.Module):
    """States to one number per token of the vocabulary: a linear map, or the token embedding turned round."""

    def __init__(self, config: ModelConfig, embedding: TokenEmbedding) -> None:
        super().__init__()
        self.softcap = config.logit_softcap
        if config.tied:
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, states: Tensor) -> Tensor:
        logits = F.linear(states, self.weight)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class EncoderDecoder(nn.Module):
    """One text read, another written: the decoder attends to the encoder's states in every block.

    Shapes: source int [batch, source_len], target int [batch, length] -> logits [batch, length, vocab_size].
    Source and target share one vocabulary and one embedding, as in the original Transformer.

    >>> model = EncoderDecoder(ModelConfig.preset("original", vocab_size=11, dim=16, heads=2, layers=1))
    >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])).shape
    torch.Size([1, 2, 11])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_config("EncoderDecoder", config)
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config, cross=True)
        self.encoder.embedding.weight = self.decoder.embedding.weight

    @hinted(hints.MODEL_CALL)
    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Mask | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Args: source_mask hides the source's padding from encoder and decoder; mask is for the target."""
        states = self.encoder(source, mask=source_mask)
        logits: Tensor = self.decoder(target, mask=mask, context=states, context_mask=source_mask)
        return logits


class MaskedLanguageModel(nn.Module):
    """BERT's head on an encoder: logits for every token, the hidden ones among them (Devlin et al. 2018, section 3.1).

    logits = norm(activation(states W + b)) @ embedding^T + c

    The activation is that of the encoder's feed-forward: gelu in BERT.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        check_kind("MaskedLanguageModel", "encoder", encoder, Encoder)
        config = encoder.config
        self.encoder = encoder
        self.transform = nn.Linear(config.dim, config.dim)
        self.norm = make_norm(config.norm, config.dim, eps=config.norm_eps)
        self.constant = nn.Parameter(torch.zeros(config.vocab_size))

    @hinted(hints.MODEL_CALL)
    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Shapes: tokens int [batch, length] -> logits [batch, length, vocab_size]. Arguments as in `Stack.forward`."""
        activation = ACTIVATIONS[self.encoder.config.activation]
        states = self.norm(activation(self.transform(self.encoder(tokens, **arguments))))
        return F.linear(states, self.encoder.embedding.weight, self.constant)


class Classifier(nn.Module):
    """One answer for a whole text: BERT's pooler, tanh of a linear map of the first token's state, then a linear map.

    logits = tanh(states[:, 0] W + b) W' + b'
    """

    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        check_kind("Classifier", "encoder", encoder, Encoder)
        check_whole("Classifier", "classes", classes)
        self.encoder = encoder
        self.pool = nn.Linear(encoder.config.dim, encoder.config.dim)
        self.classes = nn.Linear(encoder.config.dim, classes)

    @hinted(hints.MODEL_CALL)
    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Shapes: tokens int [batch, length] -> logits [batch, classes]. Arguments as in `Stack.forward`."""
        pooled = torch.tanh(self.pool(self.encoder(tokens, **arguments)[:, 0]))
        logits: Tensor = self.classes(F.dropout(pooled, self.encoder.config.dropout, self.training))
        return logits


def make_positions(config: ModelConfig) -> Learned | Sinusoidal | None:
    """What is added to the embeddings, if anything."""
    makers: dict[str | None, Callable[[], Learned | Sinusoidal]] = {
        "learned": lambda: Learned(config.context_length, config.dim),
        "sinusoidal": lambda: Sinusoidal(config.dim),
    }
    return makers[config.positions]() if config.positions in makers else None


def make_rotary(config: ModelConfig) -> Rotary | None:
    """What turns queries and keys, if anything; one for all layers, since it holds no parameters."""
    if config.positions != "rotary":
        return None
    scaling = None
    if config.rotary_scaling is not None:
        arguments = dict(config.rotary_scaling)
        kind = arguments.pop("kind", None)
        if kind not in SCALINGS:
            raise ValueError(f"ModelConfig: rotary_scaling's kind must be one of {', '.join(SCALINGS)}, got {kind!r}")
        scaling = SCALINGS[kind](**arguments)
    return Rotary(
        config.dim // config.heads if config.head_dim is None else config.head_dim,
        theta=config.rotary_theta,
        rotary_dim=config.rotary_dim,
        layout=config.rotary_layout,
        scaling=scaling,
    )

"""What a model is made of, as plain data: sizes, and which variant of each part.

What differs between GPT-2, Llama, BERT and the original Transformer is data: `PRESETS` lists their configurations, and
`ModelConfig.preset("gpt2", layers=2)` takes one with changes.

References:
    Vaswani et al. 2017 ("original"); Devlin et al. 2018 ("bert"); Radford et al. 2019 ("gpt2"); Touvron et al. 2023 and
    Grattafiori et al. 2024 ("llama").
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from regard import hints
from regard.feed_forward import ACTIVATIONS, Activation
from regard.hints import hinted
from regard.layers import NormKind
from regard.shapes import check_whole, kind

PositionKind = Literal["learned", "sinusoidal", "rotary", "alibi"]


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
        output_norms: whether what a sublayer gives is normalised too, before it is added (Gemma 2).
        embedding_norm, embedding_scale: whether the embeddings are normalised (BERT); factor on token vectors.
        activation: of the feed-forward.
        bias: whether projections and norms have biases.
        attention_bias, output_bias: the same for query, key and value, and for attention's output; None: bias.
        tied: whether the output layer shares the token embedding.
        head_norm: whether the query and key of each head are normalised (Qwen3).
        window: how many tokens each token attends to, itself included; None: all. A sequence has one for each layer and
            is repeated over the layers (Gemma 2).
        window_theta: rotary_theta in layers with a window, without rotary_scaling; None: as in all others (Gemma 3).
        scale: factor on attention scores; None: 1 / sqrt(head_dim).
        softcap, logit_softcap: on attention scores, on logits; None for none.
        segments: number of segment embeddings (2 in BERT), 0 for none.
        padding_id: the padding token; None for none.
        labels: names of the classes that a `Classifier` tells apart; None for a model that is none.
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
    output_norms: bool = False
    norm_eps: float | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    activation: Activation = "swiglu"
    bias: bool = False
    attention_bias: bool | None = None
    output_bias: bool | None = None
    tied: bool = True
    head_norm: bool = False
    window: int | Sequence[int | None] | None = None
    window_theta: float | None = None
    scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    segments: int = 0
    padding_id: int | None = None
    labels: Sequence[str] | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "dim", "layers", "heads"):
            check_whole("ModelConfig", name, getattr(self, name))
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(self.labels))  # a list, in JSON
        if isinstance(self.window, Sequence):
            if not self.window:
                raise ValueError("ModelConfig: window must be a number, one for each layer, or None, got none of them")
            object.__setattr__(self, "window", tuple(self.window))
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

    def window_of(self, layer: int) -> int | None:
        """The window of a layer, by its number; None: it sees all tokens.

        >>> config = ModelConfig(vocab_size=5, context_length=9, dim=4, layers=3, heads=1, window=(4, None))
        >>> [config.window_of(layer) for layer in range(3)]
        [4, None, 4]
        """
        return self.window[layer % len(self.window)] if isinstance(self.window, Sequence) else self.window

    @property
    def widest(self) -> int | None:
        """The largest window of a layer; None where one sees all tokens."""
        windows = [self.window_of(layer) for layer in range(self.layers)]
        return None if None in windows else max(window for window in windows if window is not None)

    @property
    def endless(self) -> bool:
        """Whether a text may go on beyond context_length, read with a cache that evicts: there is a window, and what a
        token gets depends on distances alone."""
        scaling = None if self.rotary_scaling is None else self.rotary_scaling.get("kind")
        return self.widest is not None and self.positions in ("rotary", "alibi", None) and scaling != "dynamic"

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

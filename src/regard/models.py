"""Whole models: encoder, decoder, encoder-decoder, from one configuration.

    tokens -> embedding (+ positions) -> blocks -> norm -> states          Encoder
                                                        -> logits          Decoder, one per token of the vocabulary

What differs between GPT-2, Llama, BERT and the original Transformer is data: see `ModelConfig`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import hints
from regard.biases import Alibi, Bias
from regard.cache import Cache
from regard.configuration import ModelConfig, check_config
from regard.feed_forward import ACTIVATIONS, FeedForward
from regard.hints import hinted
from regard.hooks import share_of
from regard.layers import Block, MultiHeadAttention, TokenEmbedding, check_no_cache, check_tokens, make_norm
from regard.linear import linear
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
from regard.shapes import check_flag, check_kind, check_whole

SCALINGS: dict[str, Callable[..., Scaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


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
        in_windows = rotary if config.window_theta is None else make_rotary(config, in_windows=True)
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
                head_norm=norm if config.head_norm else None,
                rotary=rotary,
                scale=config.scale,
                softcap=config.softcap,
                dropout=config.attention_dropout,
                output_dropout=config.dropout,
            )

        def own(layer: int) -> MultiHeadAttention:
            """The self-attention of a layer."""
            window = config.window_of(layer)
            if window is None:
                return attention(mask, bias, rotary)
            return attention(Window(window) if mask is None else mask & Window(window), bias, in_windows)

        self.layers = nn.ModuleList(
            Block(
                own(layer),
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
                output_norm=norm if config.output_norms else None,
            )
            for layer in range(config.layers)
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
        seen, position = (0, 0) if cache is None else (cache.longest, cache.position)
        length, share = tokens.shape[1], share_of(self)
        whole = length
        if share is not None:
            check_no_cache(type(self).__name__, share, cache if cache is not None else context_cache)
            share.check(type(self).__name__, length)
            whole = share.length
        without_end = config.endless and cache is not None and cache.keep is not None
        if whole > config.context_length or (seen + whole > config.context_length and not without_end):
            before = f" after {seen} in the cache" if seen else ""
            raise ValueError(
                f"{type(self).__name__}: {whole} tokens{before} are more than context_length={config.context_length}; "
                "shorten the text or read it in pieces"
            )
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(length, offset=position).to(x.dtype)
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        elif segments is not None:
            raise ValueError(f"{type(self).__name__}: segments were given, but the configuration has segments=0")
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = F.dropout(x, config.dropout, self.training)
        padding = None if cache is None else cache.padding(length)
        if padding is not None:
            mask = padding if mask is None else mask & padding
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

    def cache(self, *, evict: bool = False) -> Cache:
        """An empty cache for this model.

        Args:
            evict: whether a model with a window in every layer forgets what has left the largest. Then its memory is
                bounded, and where positions count only relative to each other (see `ModelConfig.endless`) so is not the
                text.
        """
        check_flag("cache", "evict", evict)
        window = self.config.widest if evict else None
        return Cache(self.config.layers, keep=None if window is None else window - 1)

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
        logits = linear(states, self.weight)
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

    Args:
        encoder: an `Encoder`, or the configuration of a new one.
    """

    def __init__(self, encoder: Encoder | ModelConfig) -> None:
        super().__init__()
        self.encoder = _encoder("MaskedLanguageModel", encoder)
        self.config = config = self.encoder.config
        self.transform = nn.Linear(config.dim, config.dim)
        self.norm = make_norm(config.norm, config.dim, eps=config.norm_eps)
        self.constant = nn.Parameter(torch.zeros(config.vocab_size))

    @hinted(hints.MODEL_CALL)
    def forward(self, tokens: Tensor, *, where: Tensor | None = None, **arguments: Any) -> Tensor:
        """Shapes: tokens int [batch, length] -> logits [batch, length, vocab_size].

        Args:
            where: bool [batch, length], the tokens that logits are wanted for: [tokens, vocab_size]. None: all.
            arguments: as in `Stack.forward`.
        """
        activation = ACTIVATIONS[self.config.activation]
        states = self.encoder(tokens, **arguments)
        states = self.norm(activation(self.transform(states if where is None else states[where])))
        return F.linear(states, self.encoder.embedding.weight, self.constant)


class Classifier(nn.Module):
    """One answer for a whole text: BERT's pooler, tanh of a linear map of the first token's state, then a linear map.

    logits = tanh(states[:, 0] W + b) W' + b'

    Args:
        encoder: an `Encoder`, or the configuration of a new one.
        classes: how many there are; None: one for each of the configuration's `labels`.
    """

    def __init__(self, encoder: Encoder | ModelConfig, classes: int | None = None) -> None:
        super().__init__()
        self.encoder = _encoder("Classifier", encoder)
        self.config = config = self.encoder.config
        classes = len(config.labels) if classes is None and config.labels is not None else classes
        self.pool = nn.Linear(config.dim, config.dim)
        self.classes = nn.Linear(config.dim, check_whole("Classifier", "classes", classes))

    @hinted(hints.MODEL_CALL)
    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Shapes: tokens int [batch, length] -> logits [batch, classes]. Arguments as in `Stack.forward`."""
        pooled = torch.tanh(self.pool(self.encoder(tokens, **arguments)[:, 0]))
        logits: Tensor = self.classes(F.dropout(pooled, self.encoder.config.dropout, self.training))
        return logits


def _encoder(owner: str, encoder: object) -> Encoder:
    """An encoder as it is, or a new one of a configuration."""
    if isinstance(encoder, ModelConfig):
        return Encoder(encoder)
    check_kind(owner, "encoder", encoder, Encoder)
    assert isinstance(encoder, Encoder)
    return encoder


def make_positions(config: ModelConfig) -> Learned | Sinusoidal | None:
    """What is added to the embeddings, if anything."""
    makers: dict[str | None, Callable[[], Learned | Sinusoidal]] = {
        "learned": lambda: Learned(config.context_length, config.dim),
        "sinusoidal": lambda: Sinusoidal(config.dim),
    }
    return makers[config.positions]() if config.positions in makers else None


def make_rotary(config: ModelConfig, *, in_windows: bool = False) -> Rotary | None:
    """What turns queries and keys, if anything; one for many layers, since it holds no parameters.

    Args:
        in_windows: of layers with a window, where these have a rotation of their own.
    """
    if config.positions != "rotary":
        return None
    scaling = None
    if config.rotary_scaling is not None and not in_windows:
        arguments = dict(config.rotary_scaling)
        kind = arguments.pop("kind", None)
        if kind not in SCALINGS:
            raise ValueError(f"ModelConfig: rotary_scaling's kind must be one of {', '.join(SCALINGS)}, got {kind!r}")
        scaling = SCALINGS[kind](**arguments)
    return Rotary(
        config.dim // config.heads if config.head_dim is None else config.head_dim,
        theta=config.window_theta if in_windows and config.window_theta is not None else config.rotary_theta,
        rotary_dim=config.rotary_dim,
        layout=config.rotary_layout,
        scaling=scaling,
    )

"""The layers that Transformers are made of: embedding, attention, feed-forward, and the block that joins them.

Every layer maps [batch, length, dim] to [batch, length, dim] (batch first, always). Variants are parts that are passed
in: a rotary encoding, a bias, a mask, another similarity. One `MultiHeadAttention` is self-attention, cross-attention,
causal attention, grouped heads and attention whose keys and values have sizes of their own.

References:
    Vaswani et al. 2017, "Attention Is All You Need"; Shazeer 2019, "Fast Transformer Decoding" (one kv head); Ainslie
    et al. 2023, "GQA" (grouped heads); Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; Shazeer 2020,
    "GLU Variants Improve Transformer".
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import hints
from regard.biases import Bias, as_bias
from regard.cache import LayerCache
from regard.graphs import has_numbers
from regard.hints import hinted
from regard.hooks import Heads, ScoringArguments, Share, attend, share_of
from regard.linear import Linear
from regard.masks import Mask, check_mask
from regard.positions import Rotary
from regard.scores import Additive
from regard.shapes import (
    LAYER,
    STATES,
    TOKENS,
    check,
    check_flag,
    check_kind,
    check_rate,
    check_whole,
    how_to_plain,
    is_number,
    is_plain,
    kind,
    shape_error,
)

NormKind = Literal["layer", "rms"]


@hinted(hints.LAYER)
class TokenEmbedding(nn.Embedding):
    """A vector for each token: ``output = scale * weight[token]``.

    Drawn from N(0, 1). The row of `padding_id` is zero and gets no gradient.

    Shapes: int [batch, length] -> [batch, length, dim].
    Args:
        vocab_size: number of tokens.
        dim: size of a vector.
        padding_id: the token that stands for nothing; None for none.
        scale: factor on the vectors (sqrt(dim) in Vaswani et al. 2017, section 3.4).
    Raises:
        ValueError: a token, or padding_id, that is not in the vocabulary.

    >>> TokenEmbedding(10, 4, padding_id=0)(torch.tensor([[0]]))
    tensor([[[0., 0., 0., 0.]]], grad_fn=<EmbeddingBackward0>)
    """

    def __init__(self, vocab_size: int, dim: int, *, padding_id: int | None = None, scale: float = 1.0) -> None:
        check_whole("TokenEmbedding", "vocab_size", vocab_size)
        check_whole("TokenEmbedding", "dim", dim)
        if padding_id is not None:
            check_whole("TokenEmbedding", "padding_id", padding_id, least=None)
        if not is_number(scale):
            raise ValueError(f"TokenEmbedding: scale must be a number, got {kind(scale)}")
        if padding_id is not None and not 0 <= padding_id < vocab_size:
            raise ValueError(f"TokenEmbedding: padding_id must be 0 to {vocab_size - 1}, got {padding_id}")
        super().__init__(vocab_size, dim, padding_idx=padding_id)
        self.scale = scale

    @classmethod
    def from_vectors(
        cls, vectors: Tensor, *, frozen: bool, padding_id: int | None = None, scale: float = 1.0
    ) -> "TokenEmbedding":
        """Vectors learned elsewhere, [vocab_size, dim]; `frozen` ones stay as they are in training.

        The row of `padding_id`, if there is one, is set to zero.
        """
        check_flag("TokenEmbedding", "frozen", frozen)
        if not is_plain(vectors):
            raise TypeError(
                f"TokenEmbedding: vectors must be a floating tensor [vocab_size, dim], got {kind(vectors)}"
                f"{how_to_plain(vectors)}"
            )
        if vectors.dim() != 2 or not vectors.is_floating_point():
            raise ValueError(
                f"TokenEmbedding: vectors must be floating [vocab_size, dim], got {vectors.dtype} {list(vectors.shape)}"
            )
        layer = cls(*vectors.shape, padding_id=padding_id, scale=scale).to(vectors)
        with torch.no_grad():
            layer.weight.copy_(vectors)
            if padding_id is not None:
                layer.weight[padding_id] = 0.0
        layer.weight.requires_grad_(not frozen)
        return layer

    def forward(self, tokens: Tensor) -> Tensor:
        check_tokens("TokenEmbedding", tokens, self.num_embeddings)
        embedded = super().forward(tokens)
        return embedded if self.scale == 1.0 else embedded * self.scale


@hinted(hints.LAYER)
class MultiHeadAttention(nn.Module):
    """Several attentions side by side, each on its own projection of the tokens.

        output = join_h(attention(query W_q^h, key W_k^h, value W_v^h)) W_o

    Shapes:
        query [batch, query_len, dim], key [batch, key_len, key_input], value [batch, key_len, value_input]
        -> [batch, query_len, dim]   (or value_dim, without an output projection)
    Args:
        dim: features of the query, and of the output.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of heads; None: heads.
        key_dim: features of all projected queries together, heads * head_dim; None: dim.
        value_dim: features of all heads' values together; None: key_dim.
        key_input, value_input: features of the key and value inputs; None: dim, and key_input.
        output: whether the joined heads go through an output projection.
        projection_bias, output_bias: whether the projections have biases; the output's, None: as the others.
        mask: always applied, together with the mask of a call; `Causal()` makes the layer causal.
        bias: always added to the scores (an `Alibi`), together with the bias of a call.
        head_norm: makes a norm for the features of a head, for each head's query and key (Qwen3); None for none.
        rotary: rotates queries and keys by their positions (`Rotary`), after the norm.
        scale: factor on the scores; None: 1/sqrt(head_dim), the size of **one** head.
        softcap: bound on the scores; None for none.
        sink: whether each head learns the logit of a sink, which takes weight and gives no value.
        similarity: "product", or "additive" for v . tanh(q + k) with a learned v (Bahdanau et al. 2014).
        dropout, output_dropout: on the weights, on the output; in training only.
        context_length: the largest key_len; None for no bound.
    Raises:
        ValueError: sizes that do not divide, or a text longer than the context.
        ShapeError: inputs that do not fit.

    >>> layer = MultiHeadAttention(16, 4, kv_heads=2, mask=Causal())
    >>> layer(torch.randn(1, 5, 16)).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        key_input: int | None = None,
        value_input: int | None = None,
        output: bool = True,
        projection_bias: bool = True,
        output_bias: bool | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        head_norm: Callable[[int], nn.Module] | None = None,
        rotary: Rotary | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: bool = False,
        similarity: Literal["product", "additive"] = "product",
        dropout: float = 0.0,
        output_dropout: float = 0.0,
        context_length: int | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        key_input = dim if key_input is None else key_input
        value_input = key_input if value_input is None else value_input
        owner = "MultiHeadAttention"
        check_whole(owner, "dim", dim)
        for name, size in (("heads", heads), ("kv_heads", kv_heads), ("key_dim", key_dim), ("value_dim", value_dim)):
            check_whole(owner, name, size, least=None)  # how small is said below, with what it must divide
        for name, size in (("key_input", key_input), ("value_input", value_input)):
            check_whole(owner, name, size)
        for name, flag in (("output", output), ("projection_bias", projection_bias), ("sink", sink)):
            check_flag(owner, name, flag)
        if output_bias is not None:
            check_flag(owner, "output_bias", output_bias)
        if mask is not None:
            check_mask(owner, "mask", mask)
        if isinstance(bias, bool):
            raise TypeError(
                f"{owner}: bias is added to scores, such as Alibi(8), got {bias}; for the projections' own: "
                f"projection_bias={bias}"
            )
        if bias is not None:
            as_bias(bias, owner)
        if rotary is not None:
            check_kind(owner, "rotary", rotary, Rotary, "; make one: Rotary(head_dim)")
        if context_length is not None:
            check_whole(owner, "context_length", context_length)
        for name, size, divisor in (
            ("key_dim", key_dim, "heads"),
            ("value_dim", value_dim, "heads"),
            ("heads", heads, "kv_heads"),
        ):
            by = heads if divisor == "heads" else kv_heads
            if by < 1 or size < 1 or size % by:
                raise ValueError(f"MultiHeadAttention: {divisor} must divide {name}, got {divisor}={by}, {name}={size}")
        if similarity not in ("product", "additive"):
            raise ValueError(f"MultiHeadAttention: similarity must be 'product' or 'additive', got {similarity!r}")
        for name, rate in (("dropout", dropout), ("output_dropout", output_dropout)):
            check_rate(owner, name, rate)
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim, self.value_dim = key_dim // heads, value_dim // heads
        self.mask, self.bias, self.scale, self.softcap = mask, bias, scale, softcap
        self.dropout, self.output_dropout, self.context_length = dropout, output_dropout, context_length
        self.rotary = rotary

        self.query = Linear(dim, key_dim, bias=projection_bias)
        self.key = Linear(key_input, kv_heads * self.head_dim, bias=projection_bias)
        self.value = Linear(value_input, kv_heads * self.value_dim, bias=projection_bias)
        self.output = (
            Linear(value_dim, dim, bias=projection_bias if output_bias is None else output_bias) if output else None
        )
        self.query_norm = None if head_norm is None else head_norm(self.head_dim)
        self.key_norm = None if head_norm is None else head_norm(self.head_dim)
        self.sink = nn.Parameter(torch.zeros(heads)) if sink else None
        self.similarity = nn.Parameter(torch.empty(heads, self.head_dim)) if similarity == "additive" else None
        if self.similarity is not None:
            nn.init.uniform_(self.similarity, -(self.head_dim**-0.5), self.head_dim**-0.5)

    @hinted(hints.LAYER_CALL)
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attention of each query token over the key tokens.

        Args:
            key: None: the query itself (self-attention).
            value: None: the key.
            mask, bias: for this call, together with the layer's own.
            cache: the tokens already seen. In self-attention new keys and values are appended to it; given a `key`
                (cross-attention) it is filled by the first call and read by the later ones.
        Raises:
            ShapeError: inputs that do not fit.
            ValueError: a text longer than the context, or a rotary layer with a `key` and a cache.
        """
        heads = self.project(query, key, value, cache)
        return self.join(self.attend(heads, mask=mask, bias=bias))

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, cache: LayerCache | None = None
    ) -> Heads:
        """Projects the inputs, splits them into heads, turns them by position and puts the cache's tokens in front."""
        cross, share = key is not None, share_of(self)
        check_no_cache("MultiHeadAttention", share, cache)
        key = query if key is None else key
        value = key if value is None else value
        self._check(query, key, value)
        if cache is not None:
            check_kind("MultiHeadAttention", "cache", cache, LayerCache, "; a model's Cache holds one for each layer")
        q = split(self.query(query), self.heads)
        q = q if self.query_norm is None else self.query_norm(q)
        if cross and cache is not None:
            if self.rotary is not None:
                raise ValueError(
                    "MultiHeadAttention: with rotary, a cache is for self-attention alone: given a key as well, the "
                    "layer cannot know how many queries came before"
                )
            if cache.length:
                return Heads(q, *cache.read())
        k, v = split(self.key(key), self.kv_heads), split(self.value(value), self.kv_heads)
        k = k if self.key_norm is None else self.key_norm(k)
        seen = 0 if cache is None or cross else cache.length
        length = k.shape[2] if share is None else share.length
        if self.context_length is not None and seen + length > self.context_length:
            raise ValueError(
                f"MultiHeadAttention: {seen + length} tokens are more than context_length={self.context_length}"
            )
        if self.rotary is not None:
            position = 0 if cache is None or cross else cache.position
            q, k = self.rotary(q, offset=position), self.rotary(k, offset=position)
        if cache is not None:
            k, v = cache.append(k, v)
        return Heads(q, k, v)

    def attend(self, heads: Heads, *, mask: Mask | None = None, bias: Bias | Tensor | None = None) -> Tensor:
        """Attention of the projected heads: [batch, heads, query_len, value_dim]."""
        return attend(self, heads, self.scoring(mask, bias), self.dropout if self.training else 0.0)

    def scoring(self, mask: Mask | None = None, bias: Bias | Tensor | None = None) -> ScoringArguments:
        """What `attention` is told of a score: mask and bias are the layer's own with those of a call."""
        return {
            "mask": self.mask if mask is None else mask if self.mask is None else self.mask & mask,
            "bias": self.bias if bias is None else bias if self.bias is None else self.bias + as_bias(bias),
            "scale": self.scale,
            "softcap": self.softcap,
            "sink": self.sink,
            "additive": None if self.similarity is None else Additive(self.similarity),
        }

    def join(self, attended: Tensor) -> Tensor:
        """Heads side by side again, through the output projection and dropout."""
        joined = join(attended)
        if self.output is not None:
            joined = self.output(joined)
        return F.dropout(joined, self.output_dropout, self.training) if self.output_dropout else joined

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        given = {"query": query, "key": key, "value": value}
        check("MultiHeadAttention", LAYER, **given)
        for (name, tensor), projection in zip(given.items(), (self.query, self.key, self.value), strict=True):
            if tensor.shape[2] != projection.in_features:
                what = f"{name} must have {projection.in_features} features, got {tensor.shape[2]}"
                raise shape_error("MultiHeadAttention", what, LAYER, given)
            dtype = projection.weight.dtype
            if type(projection) is Linear and tensor.dtype != dtype and not torch._C._is_any_autocast_enabled():
                raise TypeError(
                    f"MultiHeadAttention: {name} must be {dtype}, as the layer's weights are, got {tensor.dtype}; "
                    "convert one of them, or run in torch.autocast"
                )

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"kv_heads={self.kv_heads}")
        parts += [f"{name}={part!r}" for name, part in (("mask", self.mask), ("bias", self.bias)) if part is not None]
        return ", ".join(parts)


@hinted(hints.BLOCK)
class Block(nn.Module):
    """One Transformer layer: attention, then feed-forward, each added to what came in.

        pre-norm    x + sublayer(norm(x))        (GPT-2, Llama: trains without warm-up at any depth)
        post-norm   norm(x + sublayer(x))        (Vaswani et al. 2017, BERT)

    With a causal `attention` it is a decoder block; with `cross` it is a block of an encoder-decoder.

    Args:
        attention, feed_forward: the sublayers.
        cross: attention over another text's states, between the two; None for none.
        norm: makes a norm for a number of features.
        norm_first: pre-norm (True) or post-norm.
        output_norm: makes a norm of what a sublayer gives, before it is added (Gemma 2); None for none.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        cross: MultiHeadAttention | None = None,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        norm_first: bool = True,
        output_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        made = "; a block is made of its parts: Block(MultiHeadAttention(dim, heads), FeedForward(dim, hidden_dim))"
        check_kind("Block", "attention", attention, MultiHeadAttention, made)
        check_kind("Block", "feed_forward", feed_forward, nn.Module, made)
        if cross is not None:
            check_kind("Block", "cross", cross, MultiHeadAttention, made)
        check_flag("Block", "norm_first", norm_first)
        self.norm_first = norm_first
        self.attention_norm, self.attention = norm(attention.dim), attention
        self.cross_norm, self.cross = None if cross is None else norm(cross.dim), cross
        self.feed_forward_norm, self.feed_forward = norm(attention.dim), feed_forward
        dim = attention.dim
        self.attention_output_norm = None if output_norm is None else output_norm(dim)
        self.cross_output_norm = None if output_norm is None or cross is None else output_norm(dim)
        self.feed_forward_output_norm = None if output_norm is None else output_norm(dim)

    @hinted(hints.LAYER_CALL)
    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Mask | None = None,
        cache: LayerCache | None = None,
        context_cache: LayerCache | None = None,
    ) -> Tensor:
        """Shapes: x [batch, length, dim], context [batch, context_len, dim] -> [batch, length, dim].

        Args:
            mask, bias: for the self-attention of this call. context, context_mask: what `cross` looks at.
            cache, context_cache: the tokens already seen, and the context's keys and values.
        """
        check("Block", STATES, x=x)
        own, cross = self.attention, self.cross
        norms: tuple[nn.Module | None, nn.Module | None] = (self.attention_norm, self.attention_output_norm)
        x = self._add(x, *norms, lambda x: own(x, mask=mask, bias=bias, cache=cache))
        if cross is not None:
            if context is None:
                raise ValueError("Block: this block has cross-attention and needs a context [batch, context_len, dim]")
            norms = self.cross_norm, self.cross_output_norm
            x = self._add(x, *norms, lambda x: cross(x, context, mask=context_mask, cache=context_cache))
        elif context is not None:
            raise ValueError("Block: a context was given, but this block has no cross-attention")
        return self._add(x, self.feed_forward_norm, self.feed_forward_output_norm, self.feed_forward)

    def _add(
        self,
        x: Tensor,
        norm: nn.Module | None,
        output_norm: nn.Module | None,
        sublayer: Callable[[Tensor], Tensor],
    ) -> Tensor:
        assert norm is not None
        given = sublayer(norm(x) if self.norm_first else x)
        added: Tensor = x + (given if output_norm is None else output_norm(given))
        return added if self.norm_first else norm(added)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"


def split(x: Tensor, heads: int) -> Tensor:
    """[batch, length, heads * size] -> [batch, heads, length, size]: head h has the features from h * size on."""
    return torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """[batch, heads, length, size] -> [batch, length, heads * size]: what `split` took apart."""
    return x.transpose(1, 2).flatten(2)


class RMSNorm(nn.RMSNorm):
    """torch's; what a linear map rounded in autocast is taken in the weight's precision, as torch's LayerNorm does.

    The numbers are the same. Without it torch takes a slower way, and warns.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.promote_types(x.dtype, self.weight.dtype)))


def make_norm(kind: NormKind, dim: int, *, eps: float | None = None, bias: bool = True) -> nn.Module:
    """LayerNorm ("layer") or RMSNorm ("rms") over `dim` features; eps None: 1e-5, and 1e-6 for "rms"."""
    if kind == "layer":
        return nn.LayerNorm(dim, eps=1e-5 if eps is None else eps, bias=bias)
    if kind == "rms":
        return RMSNorm(dim, eps=1e-6 if eps is None else eps)
    raise ValueError(f"norm must be 'layer' or 'rms', got {kind!r}")


def check_no_cache(owner: str, share: Share | None, cache: object) -> None:
    """Raises for a cache where other processes hold other tokens of the text."""
    if share is not None and cache is not None:
        raise ValueError(
            f"{owner}: a cache would hold one rank's tokens as if they were all; generate outside "
            "regard.parallel.sharded"
        )


def check_tokens(function: str, tokens: Tensor, vocab_size: int) -> None:
    """Tokens must be int [batch, length] and lie in the vocabulary."""
    check(function, TOKENS, tokens=tokens)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{function}: tokens must be int64 or int32, got {tokens.dtype}")
    # on another device the look would wait for it, and a compiler and vmap cannot look; there torch's own has to do
    if tokens.device.type == "cpu" and has_numbers(tokens) and tokens.numel():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{function}: tokens must be 0 to {vocab_size - 1}, got {low if low < 0 else high}; "
                "is this the tokenizer the model was trained with?"
            )

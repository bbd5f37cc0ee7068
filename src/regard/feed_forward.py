"""The feed-forward network of a Transformer layer, and its activations.

References:
    Vaswani et al. 2017, "Attention Is All You Need", section 3.3; Shazeer 2020, "GLU Variants Improve Transformer".
"""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from regard import hints
from regard.hints import hinted
from regard.linear import Linear
from regard.shapes import ShapeError, check_flag, check_floating, check_rate, check_whole

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
GATED_ACTIVATIONS = frozenset({"swiglu", "geglu", "geglu_tanh"})


@hinted(hints.LAYER)
class FeedForward(nn.Module):
    """The same two-layer network on every token.

        output = activation(x W_in) W_out                     relu, gelu, gelu_tanh, silu
        output = (activation(x W_gate) * (x W_in)) W_out      swiglu (silu), geglu (gelu), geglu_tanh

    Shapes: [batch, length, dim] -> [batch, length, dim].
    Args:
        dim: features of the input and the output.
        hidden_dim: features of the hidden layer.
        activation: one of those above.
        bias: whether the projections have biases.
        dropout, output_dropout: on the hidden layer, on the output; in training only.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"FeedForward: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        check_whole("FeedForward", "dim", dim)
        check_whole("FeedForward", "hidden_dim", hidden_dim)
        check_flag("FeedForward", "bias", bias)
        check_rate("FeedForward", "dropout", dropout)
        check_rate("FeedForward", "output_dropout", output_dropout)
        self.activation, self.dropout, self.output_dropout = activation, dropout, output_dropout
        self.input = Linear(dim, hidden_dim, bias=bias)
        self.gate = Linear(dim, hidden_dim, bias=bias) if activation in GATED_ACTIVATIONS else None
        self.output = Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        check_floating("FeedForward", "x", x, "[batch, length, dim]")
        if x.shape[-1:] != (self.input.in_features,):
            raise ShapeError(
                f"FeedForward: x must be [batch, length, dim={self.input.in_features}], got {list(x.shape)}"
            )
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.input(x)) if self.gate is None else activate(self.gate(x)) * self.input(x)
        return F.dropout(
            self.output(F.dropout(hidden, self.dropout, self.training)), self.output_dropout, self.training
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"

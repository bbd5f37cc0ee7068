"""Where a token stands: sinusoidal, learned and rotary positions.

Attention alone sees a set: permute the keys with their values and the output is the same. Order has to be put in.

**Added to the token.** `Sinusoidal` and `Learned` make one vector per position, added to the token's embedding once,
below the first block. Both speak of absolute places: "I am token 17".

**Turned into query and key.** `Rotary` takes the features of a query or a key in pairs and turns each pair, as a point
in the plane, by an angle that grows with the position p. With `R(p)` for all these turns together,

    (R(m) query) · (R(n) key)  =  query · (R(n - m) key)

so a score depends on the distance of query and key alone, and the length of every vector stays what it was. Pair i
turns by `p * frequency[i]` radians, where `frequency[i] = theta ** (-2 i / rotary_dim)`: the first pair turns by one
radian per token, the last ones so slowly that they tell far from near.

A model trained up to some length has never seen the angles beyond it. The scalings below bring them back into the
range that it knows, by slowing the turns; they differ in which pairs they slow, and by how much:

| scaling | which pairs it slows | depends on the length |
|---|---|---|
| `LinearScaling` | all by the same factor | no |
| `DynamicScaling` | the slower the pair, the more; the first not at all | yes, beyond the original context |
| `YarnScaling` | those that turn seldom; and it sharpens the softmax | no |
| `Llama3Scaling` | those that turn seldom, with another ramp up to the others | no |

**Precision.** At position 100,000 the angle of the first pair is 100,000 radians. float32 keeps it to 0.004, bfloat16
to 256, which is no angle at all. So angles are always computed in float64, and only the cosine and sine are rounded:
to float32 for inputs of at most that width, not at all for float64. Converting a module never rounds a table twice,
because tables are made again from float64.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import hints
from regard.hints import hinted
from regard.shapes import is_plain, kind

__all__ = [
    "DynamicScaling",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Rotary",
    "Scaling",
    "Sinusoidal",
    "YarnScaling",
    "inverse_frequencies",
]

# Rows that a table gains at least when it has to grow, so that a token-by-token loop grows it seldom.
_SLACK = 64


class Sinusoidal(nn.Module):
    """Fixed waves of different lengths, one vector per position.

        table[p, 2 i]     = sin(p / 10000 ** (2 i / dim))
        table[p, 2 i + 1] = cos(p / 10000 ** (2 i / dim))

    An odd dim ends on a sine. There is no longest position: the table grows when it is asked for more. It is a buffer
    that follows the module to its device and dtype and stays out of `state_dict()`.

    Shapes:
        returns [length, dim], or [batch, length, dim] where offset is a tensor; in the module's dtype

    Args:
        dim: features per token.

    Raises:
        TypeError: dim, length or offset is not a whole number.
        ValueError: dim is below 1, or length or offset is negative.

    Example:
        >>> Sinusoidal(4)(2)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.5, arXiv:1706.03762
    """

    table: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        _check_whole("Sinusoidal", "dim", dim, least=1)
        self.dim = dim
        # Without rows it still says which device and dtype the rows shall have.
        self.register_buffer("table", torch.empty(0, dim), persistent=False)

    def forward(self, length: int, *, offset: int | Tensor = 0) -> Tensor:
        """Return the vectors of the positions `offset, offset + 1, ..., offset + length - 1`.

        Args:
            length: how many positions.
            offset: the first of them; an int, or an int tensor [batch] for rows that start at different places.
        """
        _, end = _span("Sinusoidal", offset, length)
        if end > len(self.table):
            self._grow(max(end, len(self.table) + len(self.table) // 4 + _SLACK))
        return F.embedding(_positions(offset, length, self.table.device), self.table)

    def _grow(self, rows: int) -> None:
        # A buffer made under inference_mode could never be updated in place, as data-parallel training does.
        with torch.inference_mode(False):
            angles = _angles(len(self.table), rows, inverse_frequencies(self.dim, 10000.0))
            waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)[:, : self.dim]
            self.table = torch.cat((self.table, waves.to(self.table)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Rows are made again from float64 in the new dtype. Converting them would round twice, and on the way from
        # bfloat16 back to float32 it would keep the loss.
        self.table = self.table.new_empty(0, self.dim)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Learned(nn.Module):
    """A trained vector for each of `context_length` positions.

        output[i] = weight[offset + i]

    Shapes:
        weight   [context_length, dim], drawn from a normal distribution with standard deviation 0.02
        returns  [length, dim], or [batch, length, dim] where offset is a tensor; in the weight's dtype

    Args:
        context_length: number of positions that there is a vector for.
        dim: features per token.

    Raises:
        TypeError: context_length, dim, length or offset is not a whole number.
        ValueError: context_length or dim is below 1, length or offset is negative, or `offset + length` is beyond
            context_length: a position never trained has no vector.

    Example:
        >>> positions = Learned(context_length=5, dim=2)
        >>> positions(3, offset=2).shape
        torch.Size([3, 2])

    References:
        Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1, arXiv:1705.03122
    """

    def __init__(self, context_length: int, dim: int) -> None:
        super().__init__()
        _check_whole("Learned", "context_length", context_length, least=1)
        _check_whole("Learned", "dim", dim, least=1)
        self.context_length = context_length
        self.dim = dim
        self.weight = nn.Parameter(torch.empty(context_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, length: int, *, offset: int | Tensor = 0) -> Tensor:
        """Return the vectors of the positions `offset, offset + 1, ..., offset + length - 1`.

        Args:
            length: how many positions.
            offset: the first of them; an int, or an int tensor [batch] for rows that start at different places.
        """
        _, end = _span("Learned", offset, length)
        if end > self.context_length:
            raise ValueError(
                f"Learned: no vectors beyond context_length={self.context_length}: "
                f"offset={end - length} plus length={length} ends at {end}\n"
                "  hint: shorten the input, or use Sinusoidal or Rotary, which have no last position"
            )
        return F.embedding(_positions(offset, length, self.weight.device), self.weight)

    def extra_repr(self) -> str:
        return f"context_length={self.context_length}, dim={self.dim}"


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """Return how fast each pair of features turns: `theta ** (-2 i / dim)` radians per token for pair i.

    Shapes:
        returns  float64 [dim // 2, rounded up], on the CPU

    Args:
        dim: features.
        theta: base.

    Example:
        >>> inverse_frequencies(4, 10000.0)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    return torch.pow(theta, -torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


class Scaling(ABC):
    """How a model with rotary positions is brought to read further than it was trained.

    A scaling is asked for the inverse frequencies by `Rotary`; a new one needs `frequencies` alone, and
    `deciding_length` where they depend on the length.
    """

    @abstractmethod
    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        """Return the inverse frequencies and the attention factor.

        Shapes:
            inverse frequencies  float64 [rotary_dim // 2], in radians per token

        Args:
            rotary_dim: features that turn.
            theta: base of the unscaled frequencies.
            length: the longest position in sight, plus one.

        Returns:
            The inverse frequencies, and the attention factor: a number that multiplies every cosine and sine, so
            that it enters the score of rotated features squared.
        """

    def deciding_length(self, length: int) -> int:
        """Return the shortest length that has the same frequencies as this one: 0 where they depend on no length."""
        return 0


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Slow every pair by the same factor: position interpolation.

        frequency[i] = theta ** (-2 i / rotary_dim) / factor

    Args:
        factor: how many times longer than the trained context; 1 or more.

    Example:
        >>> LinearScaling(4.0).frequencies(4, 10000.0, length=1)
        (tensor([0.2500, 0.0025], dtype=torch.float64), 1.0)

    References:
        Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation",
        arXiv:2306.15595; found at the same time by the Reddit user kaiokendev
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self)

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        return inverse_frequencies(rotary_dim, theta) / self.factor, 1.0


@dataclass(frozen=True)
class DynamicScaling(Scaling):
    """Raise theta with the length, once it is beyond the original context: dynamic NTK scaling.

        stretch      = factor * length / original_context - (factor - 1)      1 up to the original context
        frequency[i] = (theta * stretch ** (rotary_dim / (rotary_dim - 2))) ** (-2 i / rotary_dim)

    The first pair keeps its frequency, the last is slowed by `stretch`. Within the original context nothing changes.

    Notes:
        `length` is the longest position of the call, plus one. With an offset per row, the row that reaches furthest
        decides for the whole batch.

        Keys that a cache already holds were turned with the frequencies of their time and stay so, while the next
        query turns more slowly; scores across the two are no longer a function of the distance alone. The same holds
        in transformers. There, moreover, the frequencies of the longest call last until a call shorter than the
        original context; here each call's own length decides, so that equal calls give equal results.

    Args:
        factor: strength of the stretch; 1 or more. At 1 the stretch is `length / original_context`.
        original_context: tokens of context that the model was trained with.

    Example:
        >>> DynamicScaling(2.0, original_context=8).frequencies(4, 100.0, length=16)
        (tensor([1.0000, 0.0333], dtype=torch.float64), 1.0)

    References:
        Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.1 and 3.3,
        arXiv:2309.00071; first described by the Reddit users bloc97 and emozilla
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_whole("DynamicScaling", "original_context", self.original_context, least=1)

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        stretch = self.factor * max(length, self.original_context) / self.original_context - (self.factor - 1.0)
        # The exponent of theta's stretch, multiplied out. A single pair (rotary_dim 2) has i = 0 only, which no
        # stretch reaches; the formula as printed would divide by zero there.
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / max(rotary_dim - 2, 1)
        return inverse_frequencies(rotary_dim, theta) * torch.pow(stretch, -exponents), 1.0

    def deciding_length(self, length: int) -> int:
        return length if length > self.original_context else 0


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """Slow the slow pairs, leave the fast pairs, blend between them, and sharpen the softmax: YaRN.

        plain[i]     = theta ** (-2 i / rotary_dim)
        pair(turns)  = rotary_dim * ln(original_context / (2 pi turns)) / (2 ln theta)
        low, high    = max(floor(pair(beta_fast)), 0), min(ceil(pair(beta_slow)), rotary_dim - 1)
        ramp[i]      = clamp((i - low) / (high - low), 0, 1)                  high = low counts as high = low + 0.001
        frequency[i] = plain[i] * (1 - ramp[i]) + plain[i] / factor * ramp[i]
        attention    = m(1), or m(mscale) / m(mscale_all_dim) where these are given,  m(s) = 1 + 0.1 s ln(factor)

    `pair(turns)` is the (fractional) index of the pair that turns so many times within the original context.

    Notes:
        The ramp runs over the index of the pair, as in the authors' released code and in transformers; the text of
        the paper has it run over the number of turns.

        DeepSeek's models multiply the softmax scale by `m(mscale_all_dim) ** 2` besides. That belongs to the scale
        that their attention is given, not to the positions.

    Args:
        factor: how many times longer than the original context; 1 or more.
        original_context: tokens of context that the model was trained with.
        beta_fast: pairs that turn at least so many times in the original context keep their frequency; default 32.
        beta_slow: pairs that turn at most so many times are slowed by the whole factor; default 1.
        attention_factor: multiplies cosine and sine, and is taken as it stands; default: from the last line above.
        mscale: numerator's weight in the attention factor; only together with mscale_all_dim.
        mscale_all_dim: denominator's weight in the attention factor; only together with mscale.
        truncate: round low down and high up to whole pairs; default True.

    Raises:
        TypeError: an argument is not a number.
        ValueError: factor below 1, original_context below 1, a number that must be positive is not, beta_fast not
            above beta_slow, or one of mscale and mscale_all_dim without the other (implementations disagree on it).

    Example:
        >>> frequencies, attention_factor = YarnScaling(4.0, original_context=2048).frequencies(8, 10000.0, length=1)
        >>> [round(frequency, 5) for frequency in frequencies.tolist()], round(attention_factor, 5)
        ([1.0, 0.1, 0.00625, 0.00025], 1.13863)

    References:
        Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2 and 3.4,
        arXiv:2309.00071; mscale: the released code of DeepSeek-V2, arXiv:2405.04434
    """

    factor: float
    original_context: int
    _: KW_ONLY
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_whole("YarnScaling", "original_context", self.original_context, least=1)
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None:
                _check_real("YarnScaling", name, value, above=0.0)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"YarnScaling: beta_fast must be above beta_slow, got beta_fast={self.beta_fast} and "
                f"beta_slow={self.beta_slow}"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"YarnScaling: mscale and mscale_all_dim go together, got mscale={self.mscale} and "
                f"mscale_all_dim={self.mscale_all_dim}\n"
                "  hint: transformers ignores the one without the other; leave it out for the same result"
            )

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        def pair(turns: float) -> float:
            return rotary_dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        width = 0.001 if low == high else high - low
        ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu") - low) / width).clamp(0, 1)
        plain = inverse_frequencies(rotary_dim, theta)
        return plain * (1 - ramp) + plain / self.factor * ramp, self._attention()

    def _attention(self) -> float:
        def m(weight: float) -> float:
            return 1.0 + 0.1 * weight * math.log(self.factor)

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return m(1.0)
        return m(self.mscale) / m(self.mscale_all_dim)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Slow the slow pairs, leave the fast pairs, blend between them: the scaling of Llama 3.1.

        plain[i]     = theta ** (-2 i / rotary_dim)
        turns[i]     = original_context * plain[i] / (2 pi)                    within the original context
        blend[i]     = clamp((turns[i] - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        frequency[i] = (1 - blend[i]) * plain[i] / factor + blend[i] * plain[i]

    Args:
        factor: how much the slow pairs are slowed; 1 or more. Llama 3.1 has 8.
        low_freq_factor: pairs with at most so many turns are slowed by the whole factor. Llama 3.1 has 1.
        high_freq_factor: pairs with at least so many turns keep their frequency. Llama 3.1 has 4.
        original_context: tokens of context that the model was trained with. Llama 3.1 has 8192.

    Raises:
        TypeError: an argument is not a number.
        ValueError: factor below 1, original_context below 1, low_freq_factor not positive, or high_freq_factor not
            above low_freq_factor.

    Example:
        >>> Llama3Scaling(8.0, 1.0, 4.0, original_context=400).frequencies(4, 10000.0, length=1)
        (tensor([1.0000, 0.0013], dtype=torch.float64), 1.0)

    References:
        Meta, "llama-models", function apply_scaling; Grattafiori et al. 2024, "The Llama 3 Herd of Models",
        arXiv:2407.21783
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _check_factor(self)
        _check_real("Llama3Scaling", "low_freq_factor", self.low_freq_factor, above=0.0)
        _check_real("Llama3Scaling", "high_freq_factor", self.high_freq_factor, above=0.0)
        _check_whole("Llama3Scaling", "original_context", self.original_context, least=1)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "Llama3Scaling: high_freq_factor must be above low_freq_factor, got "
                f"high_freq_factor={self.high_freq_factor} and low_freq_factor={self.low_freq_factor}"
            )

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        plain = inverse_frequencies(rotary_dim, theta)
        turns = self.original_context * plain / (2 * math.pi)
        blend = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - blend) * plain / self.factor + blend * plain, 1.0


class _Unscaled(Scaling):
    """The frequencies as they are."""

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        return inverse_frequencies(rotary_dim, theta), 1.0


class _Turns(NamedTuple):
    """Cosines and sines for the positions `first` to `end - 1`, and the deciding length that they hold for.

    Row 0 of `table` [2, rows, rotary_dim] holds the cosine of every feature's angle, row 1 the sine with the sign
    that it has in that feature: minus for the first feature of a pair, plus for the second.
    """

    table: Tensor
    first: int
    end: int
    deciding_length: int


@hinted(hints.ROTARY)
class Rotary(nn.Module):
    """Turn query and key so that their product knows how far apart they stand.

    For each pair (a, b) of features at position p, with `angle = p * frequency[pair]`:

        a' = a * cos(angle) - b * sin(angle)
        b' = b * cos(angle) + a * sin(angle)

    Rotate the query and the key, never the value, and rotate a key before it enters a cache.

    layout says which features are pairs. The two differ by a fixed permutation of the features, so a model trained
    with one gives nonsense under the other:

        "half"         (i, i + rotary_dim // 2)   GPT-NeoX; Llama, Mistral and Qwen as transformers has them
        "interleaved"  (2 i, 2 i + 1)             the paper (RoFormer), GPT-J, Llama in Meta's own code

    Shapes:
        x        [batch, heads, length, head_dim]
        returns  [batch, heads, length, head_dim], in x's dtype

    Args:
        head_dim: features per head.
        theta: base of the frequencies, above 1; default 10,000.
        rotary_dim: only so many first features turn, the others pass unchanged; even; default: all.
        layout: "half" (default) or "interleaved".
        scaling: a `Scaling`, for a context longer than the trained one; default: none.

    Raises:
        TypeError: a size or offset is not a whole number, theta is not a number, scaling is not a Scaling, or x is
            not floating point.
        ValueError: rotary_dim is odd or above head_dim, layout is unknown, x is not [batch, heads, length, head_dim],
            or offset is negative or does not have one number per row.

    Notes:
        Cosines and sines are kept from call to call, for all positions seen so far, on the device of the last input,
        at least in float32. They are no buffers: nothing that converts, saves or synchronises a module's tensors
        finds them, so they cannot be degraded by `.to(torch.bfloat16)`. One module may serve all layers of a model
        and then keeps one table.

        An offset tensor is read on the host. On a GPU, an offset that lives on the CPU spares the wait.

    Example:
        >>> rotary = Rotary(2)
        >>> east = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
        >>> rotary(east)
        tensor([[[[ 1.0000,  0.0000],
                  [ 0.5403,  0.8415],
                  [-0.4161,  0.9093]]]])

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2, arXiv:2104.09864
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        _check_whole("Rotary", "head_dim", head_dim, least=1)
        _check_real("Rotary", "theta", theta, above=1.0)
        if rotary_dim is not None:
            _check_whole("Rotary", "rotary_dim", rotary_dim, least=2)
        self.head_dim = head_dim
        self.theta = theta
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        self.layout = layout
        self.scaling = scaling
        if self.rotary_dim % 2:
            raise ValueError(
                f"Rotary: rotary_dim must be even, for features turn in pairs, got rotary_dim={self.rotary_dim} with "
                f"head_dim={head_dim}" + ("\n  hint: rotary_dim is head_dim by default" if rotary_dim is None else "")
            )
        if self.rotary_dim > head_dim:
            raise ValueError(
                f"Rotary: rotary_dim must be at most head_dim, got rotary_dim={rotary_dim} with head_dim={head_dim}"
            )
        if layout not in ("half", "interleaved"):
            raise ValueError(f'Rotary: layout must be "half" or "interleaved", got {layout!r}')
        if scaling is not None and not isinstance(scaling, Scaling):
            raise TypeError(f"Rotary: scaling must be a Scaling such as LinearScaling(2.0), got {scaling!r}")
        self._scaling = _Unscaled() if scaling is None else scaling
        self._turns = _Turns(torch.empty(2, 0, self.rotary_dim, device="cpu"), first=0, end=0, deciding_length=-1)

    def forward(self, x: Tensor, *, offset: int | Tensor = 0) -> Tensor:
        """Rotate a query or a key whose first token stands at position offset.

        Args:
            x: query or key [batch, heads, length, head_dim].
            offset: position of the first token; an int, or an int tensor [batch] for rows that start at different
                places, as in a cache with rows of different lengths.
        """
        if not is_plain(x):
            raise TypeError(
                f"Rotary: x must be a tensor [batch, heads, length, head_dim={self.head_dim}], got {kind(x)}"
            )
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(f"Rotary: x must be [batch, heads, length, head_dim={self.head_dim}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"Rotary: x must be floating point, got {x.dtype}")
        length = x.shape[2]
        first, end = _span("Rotary", offset, length, batch=x.shape[0])
        turns = self._turns_for(first, end, x)
        if isinstance(offset, int):
            cosine, sine = turns.table[:, first - turns.first : end - turns.first].unbind()
        else:
            rows = _positions(offset, length, x.device) - turns.first
            cosine, sine = turns.table[:, rows].unsqueeze(2).unbind()  # [batch, 1, length, rotary_dim]

        whole = self.rotary_dim == self.head_dim
        turning = x if whole else x[..., : self.rotary_dim]
        # Each feature beside the other one of its pair; the signs are in the sine.
        if self.layout == "half":
            partner = turning.roll(self.rotary_dim // 2, dims=-1)
        else:
            partner = torch.unflatten(turning, -1, (-1, 2)).flip(-1).flatten(-2)
        # float32 cosines widen a half-precision x, so that the result is rounded once, here at the end.
        turned = (turning * cosine).addcmul_(partner, sine).to(x.dtype)
        return turned if whole else torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """Return the inverse frequencies, float64 [rotary_dim // 2], and the attention factor at a length."""
        return self._scaling.frequencies(self.rotary_dim, self.theta, length)

    def _turns_for(self, first: int, end: int, x: Tensor) -> _Turns:
        """Return cosines and sines that hold for the positions from first to end - 1, made now or before."""
        turns = self._turns
        dtype = torch.promote_types(x.dtype, torch.float32)
        deciding_length = self._scaling.deciding_length(end)
        usable = (
            turns.deciding_length == deciding_length and turns.table.dtype == dtype and turns.table.device == x.device
        )
        if usable and turns.first <= first and end <= turns.end:
            return turns

        frequencies, attention_factor = self.frequencies(end)

        def make(first: int, end: int) -> Tensor:
            angles = _angles(first, end, frequencies)
            cosine, sine = angles.cos() * attention_factor, angles.sin() * attention_factor
            pair_axis = -2 if self.layout == "half" else -1
            signed = torch.stack((torch.stack((cosine, cosine), pair_axis), torch.stack((-sine, sine), pair_axis)))
            return signed.flatten(-2).to(device=x.device, dtype=dtype)

        # A table made under inference_mode would be barred from any later training.
        with torch.inference_mode(False):
            if usable and first <= turns.end and turns.first <= end:
                first = min(first, turns.first)
                end = turns.end if end <= turns.end else max(end, turns.end + len(turns.table[0]) // 4 + _SLACK)
                table = torch.cat((make(first, turns.first), turns.table, make(turns.end, end)), dim=1)
            else:
                # A first call, another dtype or device, other frequencies, or a leap: exactly the rows asked for. A
                # leap must not fill the gap, and frequencies that change with every token must not redo all before.
                table = make(first, end)
        # One assignment, so that two threads at worst both do the work.
        self._turns = _Turns(table, first, end, deciding_length)
        return self._turns

    def extra_repr(self) -> str:
        parts = [str(self.head_dim), f"theta={self.theta}"]
        if self.rotary_dim != self.head_dim:
            parts.append(f"rotary_dim={self.rotary_dim}")
        parts.append(f"layout={self.layout!r}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling}")
        return ", ".join(parts)


def _angles(first: int, end: int, frequencies: Tensor) -> Tensor:
    """Return `position * frequency` [end - first, frequencies] in float64.

    On the CPU, whatever the device: some devices have no float64, and all of them shall have the same numbers.
    """
    return torch.outer(torch.arange(first, end, dtype=torch.float64, device="cpu"), frequencies)


def _positions(offset: int | Tensor, length: int, device: torch.device) -> Tensor:
    """Return the positions, int64 [length], or [batch, length] where offset is a tensor."""
    if isinstance(offset, int):
        return torch.arange(offset, offset + length, device=device)
    return offset.to(device=device, dtype=torch.int64)[:, None] + torch.arange(length, device=device)


def _span(owner: str, offset: int | Tensor, length: int, batch: int | None = None) -> tuple[int, int]:
    """Check offset and length, and return the first position of any row and the one after the last of any row."""
    _check_whole(owner, "length", length, least=0)
    if not isinstance(offset, Tensor):
        _check_whole(owner, "offset", offset, least=0)
        return offset, offset + length
    if offset.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"{owner}: offset must be an int or an int tensor [batch], got a tensor of {offset.dtype}")
    if offset.dim() != 1 or batch not in (None, len(offset)):
        expected = "[batch]" if batch is None else f"[batch={batch}]"
        raise ValueError(
            f"{owner}: an offset tensor must be {expected}, one number per row, got {list(offset.shape)}\n"
            "  hint: one offset for all rows is an int"
        )
    offsets: list[int] = offset.tolist() or [0]
    _check_whole(owner, "offset", min(offsets), least=0)
    return min(offsets), max(offsets) + length


def _check_whole(owner: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{owner}: {name} must be {least} or more, got {value}")


def _check_real(owner: str, name: str, value: object, *, above: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r}")
    if not above < value < math.inf:
        raise ValueError(f"{owner}: {name} must be a finite number above {above:g}, got {value}")


def _check_factor(scaling: "LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling") -> None:
    owner, factor = type(scaling).__name__, scaling.factor
    _check_real(owner, "factor", factor, above=0.0)
    if factor < 1:
        raise ValueError(f"{owner}: factor must be 1 or more, got {factor}: a scaling lengthens the context")

"""Scalings of rotary positions, for contexts longer than in training."""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from regard.positions.angles import inverse_frequencies
from regard.shapes import check_real, check_whole


class Scaling(ABC):
    """How a model with rotary positions reads longer texts than in training.

    `Rotary` gets its inverse frequencies from a scaling; a new one defines `frequencies`, and `deciding_length` if they
    depend on the length.
    """

    @abstractmethod
    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        """The inverse frequencies and the attention factor.

        Shapes:
            inverse frequencies  float64 [rotary_dim // 2], in radians per token

        Args:
            rotary_dim: number of features that are rotated.
            theta: base of the unscaled frequencies.
            length: the largest position, plus one.

        Returns:
            The inverse frequencies, and the attention factor, which multiplies every cosine and sine and so enters
            the scores squared.
        """

    def deciding_length(self, length: int) -> int:
        """The shortest length with the same frequencies as this one: 0 if they do not depend on the length."""
        return 0


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Slows every pair by the same factor: position interpolation.

        frequency[i] = theta ** (-2 i / rotary_dim) / factor

    Args:
        factor: how many times longer than the trained context; 1 or more.

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
    """Raises theta with the length beyond the original context: dynamic NTK scaling.

        stretch      = factor * length / original_context - (factor - 1)      1 up to the original context
        frequency[i] = (theta * stretch ** (rotary_dim / (rotary_dim - 2))) ** (-2 i / rotary_dim)

    The first pair keeps its frequency, the last is slowed by `stretch`. Within the original context nothing changes.

    Notes:
        `length` is the largest position of the call, plus one. With an offset per batch index, the longest text decides
        for the whole batch.

        Keys in a cache keep the frequencies with which they were rotated, while later queries rotate more slowly, so
        scores across the two no longer depend on the distance alone. The same holds in transformers. There, moreover,
        the frequencies of the longest call persist until a call shorter than the original context; here each call's own
        length decides, so that equal calls give equal results.

    Args:
        factor: strength of the stretch; 1 or more. At 1 the stretch is `length / original_context`.
        original_context: tokens of context that the model was trained with.

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
        check_whole("DynamicScaling", "original_context", self.original_context)

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        stretch = self.factor * max(length, self.original_context) / self.original_context - (self.factor - 1.0)
        # the exponent of theta's stretch, multiplied out; with a single pair (rotary_dim 2), i = 0 is not stretched,
        # and the formula as printed would divide by zero
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / max(rotary_dim - 2, 1)
        return inverse_frequencies(rotary_dim, theta) * torch.pow(stretch, -exponents), 1.0

    def deciding_length(self, length: int) -> int:
        return length if length > self.original_context else 0


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """Slows the slow pairs, keeps the fast ones, blends in between, and sharpens the softmax: YaRN.

        plain[i]     = theta ** (-2 i / rotary_dim)
        pair(turns)  = rotary_dim * ln(original_context / (2 pi turns)) / (2 ln theta)
        low, high    = max(floor(pair(beta_fast)), 0), min(ceil(pair(beta_slow)), rotary_dim - 1)
        ramp[i]      = clamp((i - low) / (high - low), 0, 1)                  high = low counts as high = low + 0.001
        frequency[i] = plain[i] * (1 - ramp[i]) + plain[i] / factor * ramp[i]
        attention    = m(1), or m(mscale) / m(mscale_all_dim) where these are given,  m(s) = 1 + 0.1 s ln(factor)

    `pair(turns)` is the (fractional) index of the pair that rotates so many times within the original context.

    Notes:
        The ramp is linear in the index of the pair, as in the authors' code and in transformers; in the text of the
        paper it is linear in the number of rotations.

        DeepSeek's models also multiply the softmax scale by `m(mscale_all_dim) ** 2`. That belongs to the scale of
        their attention, not to the positions.

    Args:
        factor: how many times longer than the original context; 1 or more.
        original_context: tokens of context that the model was trained with.
        beta_fast: pairs that rotate at least so many times in the original context keep their frequency; default 32.
        beta_slow: pairs that rotate at most so many times are slowed by the whole factor; default 1.
        attention_factor: multiplies cosine and sine, used as given; default: from the last line above.
        mscale: numerator's weight in the attention factor; only together with mscale_all_dim.
        mscale_all_dim: denominator's weight in the attention factor; only together with mscale.
        truncate: round low down and high up to whole pairs; default True.

    Raises:
        TypeError: an argument is not a number.
        ValueError: factor below 1, original_context below 1, a number that must be positive is not, beta_fast not
            above beta_slow, or one of mscale and mscale_all_dim without the other (implementations disagree on it).

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
        check_whole("YarnScaling", "original_context", self.original_context)
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None:
                check_real("YarnScaling", name, value, above=0.0)
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
    """Slows the slow pairs, keeps the fast ones, blends in between: the scaling of Llama 3.1.

        plain[i]     = theta ** (-2 i / rotary_dim)
        turns[i]     = original_context * plain[i] / (2 pi)                    within the original context
        blend[i]     = clamp((turns[i] - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
        frequency[i] = (1 - blend[i]) * plain[i] / factor + blend[i] * plain[i]

    Args:
        factor: how much the slow pairs are slowed; 1 or more. Llama 3.1 has 8.
        low_freq_factor: pairs with at most so many rotations are slowed by the whole factor. Llama 3.1 has 1.
        high_freq_factor: pairs with at least so many rotations keep their frequency. Llama 3.1 has 4.
        original_context: tokens of context that the model was trained with. Llama 3.1 has 8192.

    Raises:
        TypeError: an argument is not a number.
        ValueError: factor below 1, original_context below 1, low_freq_factor not positive, or high_freq_factor not
            above low_freq_factor.

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
        check_real("Llama3Scaling", "low_freq_factor", self.low_freq_factor, above=0.0)
        check_real("Llama3Scaling", "high_freq_factor", self.high_freq_factor, above=0.0)
        check_whole("Llama3Scaling", "original_context", self.original_context)
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


class Unscaled(Scaling):
    """No scaling."""

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> tuple[Tensor, float]:
        return inverse_frequencies(rotary_dim, theta), 1.0


def _check_factor(scaling: "LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling") -> None:
    owner, factor = type(scaling).__name__, scaling.factor
    check_real(owner, "factor", factor, above=0.0)
    if factor < 1:
        raise ValueError(f"{owner}: factor must be 1 or more, got {factor}: a scaling lengthens the context")

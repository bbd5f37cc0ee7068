"""Changes single heads while a model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.hooks import Attend, Heads, Result, ScoringArguments
from regard.recording.views import HiddenKey
from regard.recording.watching import Place, watching
from regard.shapes import ShapeError, as_whole, is_number, is_plain, kind


@dataclass(frozen=True)
class Intervention:
    """One change to one head, for `intervene`. Args: layer: name or number, as in `record`. head: number."""

    layer: str | int
    head: int

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if as_whole(self.layer) is None and not isinstance(self.layer, str):
            raise TypeError(f"{owner}: layer must be a name or a number, got {kind(self.layer)}")
        if as_whole(self.head) is None:
            raise TypeError(
                f"{owner}: head must be a number, got {kind(self.head)}; of several heads, one {owner} each"
            )

    def before(self, scoring: ScoringArguments) -> ScoringArguments:
        """The score arguments that attention gets."""
        return scoring

    def after(self, output: Tensor) -> Tensor:
        """The changed output of the head, [batch, query_len, value_dim]."""
        return output


@dataclass(frozen=True)
class Ablate(Intervention):
    """Sets the head's output to 0."""

    def after(self, output: Tensor) -> Tensor:
        return torch.zeros_like(output)


@dataclass(frozen=True)
class Scale(Intervention):
    """Multiplies the head's output by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.factor) and not is_plain(self.factor):
            raise TypeError(f"Scale: factor must be a number, got {kind(self.factor)}")

    def after(self, output: Tensor) -> Tensor:
        return self.factor * output


@dataclass(frozen=True)
class Replace(Intervention):
    """Replaces the head's output.

    Args:
        output: a tensor that broadcasts to [batch, query_len, value_dim], such as the head's mean or its output on
            another text; or a function of the head's output that returns such a tensor.
    """

    output: Tensor | Callable[[Tensor], Tensor]

    def after(self, output: Tensor) -> Tensor:
        other = self.output if isinstance(self.output, Tensor) else self.output(output)
        try:
            return other.to(output).expand(output.shape)
        except RuntimeError:
            raise ShapeError(
                f"Replace: layer {self.layer!r}, head {self.head}: output must broadcast to [batch, query_len, "
                f"value_dim] = {list(output.shape)}, got {list(other.shape)}"
            ) from None


@dataclass(frozen=True)
class HideKey(Intervention):
    """Hides the key at this index from all queries of the head. A call without such a key is not changed."""

    key: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.key, int) or isinstance(self.key, bool) or self.key < 0:
            raise ValueError(f"HideKey: key must be an index, 0 or more, got {self.key!r}")

    def before(self, scoring: ScoringArguments) -> ScoringArguments:
        mask = scoring["mask"]
        hidden = HiddenKey(self.head, self.key)
        return {**scoring, "mask": hidden if mask is None else mask & hidden}


@contextmanager
def intervene(model: nn.Module, *changes: Intervention) -> Iterator[None]:
    """Changes single heads while the ``with`` block runs.

    Several changes of one head apply in the given order, those of an outer block before those of an inner one.
    Gradients flow through them. A recording, inside or outside, holds the inputs of attention: hidden keys are visible
    in it, changes of a head's output are not.

    Args:
        model: as in `record`.
        changes: of `regard.interventions`: `Ablate`, `Scale`, `Replace`, `HideKey`.
    Raises:
        ValueError: a layer or head that does not exist.

    >>> layer = MultiHeadAttention(8, 2, output=False)
    >>> with intervene(layer, regard.interventions.Ablate("attention", 1)):
    ...     output = layer(torch.randn(1, 5, 8))
    >>> output[0, 0, 4:]
    tensor([0., 0., 0., 0.], grad_fn=<SliceBackward0>)
    """
    wrong = next((type(change).__name__ for change in changes if not isinstance(change, Intervention)), None)
    if wrong is not None:
        raise TypeError(f"intervene: expected Ablate, Scale, Replace or HideKey, got {wrong}")

    def change(place: Place, attend: Attend) -> Attend:
        here = [change for change in changes if change.layer in (place.name, place.number)]

        def changed(heads: Heads, scoring: ScoringArguments) -> Result:
            count = heads.query.shape[1]
            for change in here:
                if not 0 <= change.head < count:
                    raise ValueError(f"intervene: {place.name} has heads 0 to {count - 1}, got {change.head}")
                scoring = change.before(scoring)
            output, lse = attend(heads, scoring)
            parts = list(output.unbind(1))
            for change in here:
                parts[change.head] = change.after(parts[change.head])
            return torch.stack(parts, dim=1), lse

        return changed if here else attend

    with watching("intervene", model, [change.layer for change in changes], change, again=change):
        yield

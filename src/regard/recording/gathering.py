"""Computes statistics of every attention layer while a model runs, and keeps nothing else."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.hooks import Attend, Compute, Heads, Result, ScoringArguments, loses_gradients
from regard.observation import Statistic, observe
from regard.observation.statistic import check_statistics
from regard.recording.watching import Place, find, watching
from regard.shapes import as_bytes, bytes_of, plural


class Gathered(Mapping[str, tuple[Any, ...]]):
    """The results of `gather`, in the order of the statistics, for each attention layer: by name ("layers.0", ...) or
    by number, in the order of their first calls."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[Any, ...]]] = {}

    def __getitem__(self, name: str | int) -> tuple[Any, ...]:
        """The results of a layer's last call."""
        return self.calls(name)[-1]

    def calls(self, name: str | int) -> list[tuple[Any, ...]]:
        """The results of every single call of a layer."""
        return find("gather", "gathered", self._calls, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        calls = [results for of_layer in self._calls.values() for results in of_layer]
        parts = [plural(len(self), "layer")]
        if calls:
            parts += [plural(len(calls), "call"), plural(len(calls[0]), "statistic")]
            parts.append(as_bytes(bytes_of(leaf for leaf in tree_leaves(calls) if isinstance(leaf, Tensor))))
        return f"<Gathered: {', '.join(parts)}>"


@contextmanager
def gather(
    model: nn.Module, *statistics: Statistic[Any], layers: str | int | Iterable[str | int] | None = None
) -> Iterator[Gathered]:
    """Computes statistics of a model's attention layers while the ``with`` block runs.

    `record` keeps query and key for later questions. This keeps only the results, so each layer adds no more memory
    than these. On a CPU without the compiled kernel, output and statistics are computed from the same weights if a tile
    holds all keys that its queries see (up to `regard.observation.tuning.MAX_ATTENDED_KEYS`): the output is then
    equally accurate, though not bit-identical to attention's.

    Every call of a layer is handled separately: during generation with a cache, a call has the new queries and all
    keys. The statistics are differentiable if gradients are recorded: an entropy penalty on a whole model is one line,
    in O(length) memory. Use `torch.no_grad` if you need no gradients.

    Args:
        model: as in `record`.
        statistics: `Entropy`, `Received`, `Top` and regard's others, or your own (`Statistic`).
        layers: as in `record`.
    Raises:
        TypeError: no statistics, or an argument that is not a statistic.
        ValueError: as `record`.
        RuntimeError: a layer runs where statistics would get no gradient although the model's output does: under
            activation checkpointing with ``use_reentrant=True``. ``use_reentrant=False`` works.

    >>> from regard import Entropy, Top
    >>> layer = MultiHeadAttention(8, 2)
    >>> with gather(layer, Entropy(), Top(3)) as gathered:
    ...     output = layer(torch.randn(1, 5, 8))
    >>> entropy, top = gathered["attention"]
    >>> entropy.shape, top.keys.shape
    (torch.Size([1, 2, 5]), torch.Size([1, 2, 5, 3]))
    """
    check_statistics(statistics)
    gathered = Gathered()

    def asked(heads: Heads, scoring: ScoringArguments, attend: Attend) -> tuple[Result, tuple[Any, ...]]:
        if isinstance(attend, Compute) and not attend.dropout:  # no other hook wraps the call
            seen = observe(heads.query, heads.key, **scoring)
            both = seen.attend(heads.value, statistics)
            if both is not None:
                return (both[0], seen.lse), both[1]
        output, lse = attend(heads, scoring)
        return (output, lse), observe(heads.query, heads.key, **scoring, lse=lse).gather(*statistics)

    def take(place: Place, attend: Attend) -> Attend:
        def taken(heads: Heads, scoring: ScoringArguments) -> Result:
            if loses_gradients():
                raise RuntimeError(
                    f"gather: the statistics of {place.name} would have no gradient, since activation checkpointing "
                    "with use_reentrant=True runs the layer without gradients first; use use_reentrant=False "
                    '(model.gradient_checkpointing_enable({"use_reentrant": False})), or regard.record where no '
                    "gradient of a statistic is wanted"
                )
            result, statistics = asked(heads, scoring, attend)
            gathered._calls.setdefault(place.name, []).append(statistics)
            return result

        return taken

    def again(place: Place, attend: Attend) -> Attend:
        return lambda heads, scoring: asked(heads, scoring, attend)[0]

    with watching("gather", model, layers, take, again=again, innermost=True):
        yield gathered

"""Keeps q and k of every attention layer while a model runs, so that it can be asked afterwards what it attended to.

    with regard.record(model) as recording:
        model(tokens)
    recording["layers.3"].head(5).entropy()

The model runs as fast as ever: nothing is computed until something is asked.

A head is described by five shares of its weight. They are means over the queries from the second on, induction over
those that have an earlier occurrence. In a text, the first token that a query may see is usually where a head rests
that has found nothing (Xiao et al. 2023).

    previous token   weight on the token just before
    first token      weight on the first token
    same token       weight on the query's own place and on earlier places with the same token
    induction        weight on tokens that follow an earlier occurrence of the query's token (Olsson et al. 2022)
    local            weight on tokens nearer than `LOCAL`, the query's own included
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.layers import Attend, Heads, MultiHeadAttention, ScoringArguments
from regard.observation import Observation, observe
from regard.scores import Additive
from regard.shapes import ShapeError

LOCAL = 8
KIND_SHARE = 0.4
"""A head is called by a kind when that share of its weight, or more, is of that kind."""

LOCAL_SHARE = 0.5
"""The same for "local", which is so much wider that more of it is needed to mean something."""

EVEN_SPREAD = 0.8
"""From this spread on, a head of no kind is called even."""


class HeadSummary(NamedTuple):
    """One head on one text: means over batch and queries, and the kind with the largest share."""

    layer: str
    head: int
    entropy: float
    """Mean entropy in nats."""
    spread: float
    """Mean of entropy over its largest possible value, log(visible keys and sink): 0 one key, 1 even."""
    distance: float
    """Mean distance to what is attended to, in tokens."""
    shares: dict[str, float]
    """previous token, first token, same token, induction, local."""
    kind: str
    """The largest share's name; if none is large, "even", "local" or "mixed" (`kind_of`)."""


class Recording(Mapping[str, Observation]):
    """What a model's attention layers saw, by name: "layers.0", "layers.1", ..."""

    def __init__(self) -> None:
        self._seen: dict[str, Observation] = {}

    def add(self, name: str, heads: Heads, scoring: ScoringArguments) -> None:
        """Keeps one call; the last call of a layer is the one that stays."""
        bias, sink, additive = scoring["bias"], scoring["sink"], scoring["additive"]
        self._seen[name] = observe(
            heads.query.detach(),
            heads.key.detach(),
            mask=scoring["mask"],
            bias=bias.detach() if isinstance(bias, Tensor) else bias,
            scale=scoring["scale"],
            softcap=scoring["softcap"],
            # parameters: copied, because training changes them in place
            sink=None if sink is None else sink.detach().clone(),
            additive=None if additive is None else Additive(additive.v.detach().clone()),
        )

    def __getitem__(self, name: str) -> Observation:
        try:
            return self._seen[name]
        except KeyError:
            known = ", ".join(self._seen) or "none: has the model run inside the with block?"
            raise KeyError(f"recording: no layer {name!r}; recorded are: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    @torch.no_grad()
    def summary(
        self, tokens: Tensor, *, progress: Callable[[int, int], None] = lambda done, all: None
    ) -> list[HeadSummary]:
        """Every head in a few numbers.

        Args:
            tokens: what the model read, int [batch, length], whole and at once.
            progress: called with the layers done and all there are.
        Raises:
            ShapeError: a layer saw something else: cross-attention, or a text read in pieces with a cache.
        """
        heads: list[HeadSummary] = []
        for number, (name, seen) in enumerate(self.items(), start=1):
            heads += summarise(name, seen, tokens)
            progress(number, len(self))
        return heads


@contextmanager
def record(model: nn.Module) -> Iterator[Recording]:
    """Records a model's attention layers while the ``with`` block runs.

    A recording inside another one takes nothing from it: both see every call.

    Args:
        model: any module that contains `MultiHeadAttention` layers.
    Raises:
        ValueError: it contains none.

    >>> layer = MultiHeadAttention(8, 2)
    >>> with record(layer) as recording:
    ...     output = layer(torch.randn(1, 5, 8))
    >>> recording["attention"].weights().shape
    torch.Size([1, 2, 5, 5])
    """
    layers = {
        name.removesuffix(".attention") or "attention": module
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }
    if not layers:
        raise ValueError(f"record: {type(model).__name__} contains no regard.MultiHeadAttention")
    recording = Recording()
    before = {name: layer.watcher for name, layer in layers.items()}

    def keep(name: str, heads: Heads, scoring: ScoringArguments, attend: Attend) -> Tensor:
        recording.add(name, heads, scoring)
        watcher = before[name]
        return attend(heads, scoring) if watcher is None else watcher(heads, scoring, attend)

    for name, layer in layers.items():
        layer.watcher = partial(keep, name)
    try:
        yield recording
    finally:
        for name, layer in layers.items():
            layer.watcher = before[name]


def summarise(name: str, seen: Observation, tokens: Tensor) -> list[HeadSummary]:
    """Every head of one layer in a few numbers (see the module)."""
    batch, heads, query_len, key_len, _ = seen.grid
    if tokens.shape != (batch, query_len) or query_len != key_len:
        raise ShapeError(
            f"summary: {name} saw {query_len} queries and {key_len} keys in {batch} rows, tokens are "
            f"{list(tokens.shape)}; a summary needs a text that was read whole and at once"
        )

    def equal(query: Tensor, key: Tensor) -> Tensor:
        """Whether query and key hold the same token: [batch, 1, rows, columns]."""
        return tokens[:, None, query[:, 0], None] == tokens[:, None, None, key[0]]

    def after_same(query: Tensor, key: Tensor) -> Tensor:
        """Whether the token before the key is the query's."""
        return equal(query, (key - 1).clamp(min=0)) & (key > 0) & (key <= query)

    entropy, distance = seen.entropy(), seen.distance()
    places = seen.visible() + (0 if seen.scoring.sink is None else 1)
    spread = _mean(entropy / places.clamp(min=2).log(), places > 1)
    later = torch.arange(query_len, device=tokens.device) > 0
    shares = {
        "previous token": _mean(seen.share(lambda query, key: key == query - 1), later),
        "first token": _mean(seen.share(lambda query, key: key == 0), later),
        "same token": _mean(seen.share(lambda query, key: equal(query, key) & (key <= query)), later),
        "induction": _mean(seen.share(after_same), seen_before(tokens)[:, None]),
        "local": _mean(seen.share(lambda query, key: (query - key).abs() < LOCAL), later),
    }
    summaries = []
    for head in range(heads):
        of_head = {kind: float(share[head]) for kind, share in shares.items()}
        means = float(entropy[:, head].mean()), float(spread[head]), float(distance[:, head].mean())
        summaries.append(HeadSummary(name, head, *means, of_head, kind_of(of_head, float(spread[head]))))
    return summaries


def seen_before(tokens: Tensor) -> Tensor:
    """Whether the same token stands earlier in its row: bool [batch, length]."""
    rows = []
    for row in tokens:
        _, which = row.unique(return_inverse=True)
        places = torch.arange(len(row), device=row.device)
        first = places.new_full((len(row),), len(row)).scatter_reduce(0, which, places, "amin")
        rows.append(first[which] < places)
    return torch.stack(rows)


def kind_of(shares: Mapping[str, float], spread: float) -> str:
    """What to call a head with these shares."""
    narrow = {kind: share for kind, share in shares.items() if kind != "local"}
    best = max(narrow, key=lambda kind: narrow[kind])
    if narrow[best] >= KIND_SHARE:
        return best
    if spread >= EVEN_SPREAD:  # before local, which everything is in a short text
        return "even"
    return "local" if shares["local"] >= LOCAL_SHARE else "mixed"


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean per head over batch and queries where it counts; 0 where it never does: [heads]."""
    counted = where.expand_as(values).to(values.dtype)
    return (values * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)

"""One text read by one model, or a recording that was given: layers by number, heads by number, tokens."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.masks import And, Band, Mask, Or, Prefix, Tile
from regard.observation import Observation
from regard.observation.comparing import Comparison
from regard.observation.streaming import Progress, silent
from regard.recording import HeadSummary, Recording
from regard.recording.summary import summarise
from regard.recording.texts import Recorded
from regard.viewer.head import MAX_EXACT_THUMB_WEIGHTS, Head, levels_of
from regard.viewer.texts import Tokens, of_places

MAX_KEPT_HEADS = 8
"""Heads whose pyramid is kept: at 131,072 tokens each has 180 MiB."""


@dataclass(eq=False)
class Run:
    """One text read by one model.

    Attributes:
        model, source: what to call them.
        layers: what was recorded, by name, in order.
        tokens: of batch index 0, where all layers read one text; else None. texts: of the queries of a layer, by its
            name and then by batch index; layers that read the same have the same object.
        outputs: what the model's heads gave, [batch, heads, query_len, value_dim] by layer name, where it was kept.
        written: the whole text that it was read from, with the place of its first token and how many there are.
        start: which token of the whole text comes first. total: how many the whole text has. opening: whether token 0
            opens the text and stands for no letters.
        chosen: layer, head and query to show first; None: found out.
        picture: of an image model, its image, RGBA uint8 [height, width, 4].
        growing: whether tokens are still being added. number: its number in the session.
        summary, logits, compared: what was found out about it, kept.
        still: held while one question is answered, so that no answer mixes two states of a text that grows.
    """

    model: str
    source: str
    layers: Mapping[str, Recorded]
    tokens: Tokens | None = None
    texts: Mapping[str, Sequence[Tokens]] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    text: str | None = None
    reader: Any = None
    start: int = 0
    total: int | None = None
    opening: bool = False
    chosen: tuple[int, int, int] | None = None
    picture: Tensor | None = None
    growing: bool = False
    number: int = 0
    summary: list[HeadSummary] | None = None
    logits: Tensor | None = None
    compared: dict[tuple[Any, ...], Comparison] = field(default_factory=dict)
    _heads: "OrderedDict[tuple[int, int, int], Head]" = field(default_factory=OrderedDict, repr=False)
    still: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def names(self) -> list[str]:
        """The layers' names in order."""
        return list(self.layers)

    @property
    def length(self) -> int:
        """How many tokens there are: queries of the first layer."""
        return self.layer(0).grid.query_len

    def first_shown(self) -> tuple[int, int, int]:
        """Layer, head and query to show first: those that were chosen, or the head that is most typical of its kind."""
        if self.chosen is not None:
            return self.chosen
        telling = [s for s in self.summary or () if s.kind not in ("even", "mixed", "local", "first token")]
        best = max(telling, key=lambda s: (s.kind == "induction", s.score), default=None)
        layer, head = (0, self.layer(0).heads[0]) if best is None else (self.names.index(best.layer), best.head)
        return layer, head, self.layer(layer).grid.query_len - 1

    def layer(self, number: int) -> Recorded:
        """A layer by number."""
        names = self.names
        if not 0 <= number < len(names):
            raise ValueError(f"layer must be 0 to {len(names) - 1}, got {number}")
        return self.layers[names[number]]

    def head(self, layer: int, head: int, batch: int = 0) -> Head:
        """One head of one batch index; the last `MAX_KEPT_HEADS` keep what was computed of them."""
        place = layer, head, batch
        with self._lock:
            if place not in self._heads:
                self._heads[place] = Head(self.observation(layer, head, batch))
            self._heads.move_to_end(place)
            while len(self._heads) > MAX_KEPT_HEADS:
                self._heads.popitem(last=False)
            return self._heads[place]

    def show(self, layers: Mapping[str, Recorded], tokens: Tokens | None) -> None:
        """Puts newer layers and tokens in the place of those that there are."""
        with self.still:
            self._heads = OrderedDict()
            self.layers, self.tokens, self.summary = layers, tokens, None

    def fresh_head(self, layer: int, head: int, batch: int = 0) -> Head:
        """The same, and if it is not kept, without a place among those that are."""
        kept = self._heads.get((layer, head, batch))
        return Head(self.observation(layer, head, batch)) if kept is None else kept

    def observation(self, layer: int, head: int, batch: int = 0) -> Recorded:
        """The same as an observation, with values where they were recorded."""
        seen = self.layer(layer)
        if not 0 <= batch < seen.grid.batch:
            raise ValueError(f"batch must be 0 to {seen.grid.batch - 1}, got {batch}")
        if seen.call.lse is None and seen.grid.query_len * seen.grid.key_len <= MAX_EXACT_THUMB_WEIGHTS:
            with torch.inference_mode():
                seen.settled()  # once for all of its heads
        return seen.head(head)[batch]

    def tokens_of(self, layer: int, of: str, batch: int = 0) -> Tokens:
        """The tokens of a layer's queries or keys."""
        rows, length, patches = self._axis(layer, of)
        return rows[batch] if batch < len(rows) else of_places(length, patches)

    def _axis(self, layer: int, of: str) -> tuple[Sequence[Tokens], int, tuple[int, int] | None]:
        """The texts along a layer's queries or keys, where they are known; how long they are; of an image, its patches.

        The keys of cross-attention are the queries of another layer: the first that read another text of that length.
        """
        seen = self.layer(layer)
        length = seen.grid.query_len if of == "query" else seen.grid.key_len
        rows = self.texts.get(self.names[layer], ())
        if of == "key" and seen.cross:
            own = rows
            rows = next((rows for rows in self.texts.values() if rows is not own and len(rows[0]) == length), ())
            return rows, length, None
        if seen.patches is not None:
            return (), length, seen.patches
        if self.tokens is not None:
            rows = [self.tokens]
        return (rows if rows and len(rows[0]) == length else ()), length, None

    def described(self) -> list[dict[str, Any]]:
        """The layers in a few numbers each; `texts`: which text the queries are, and which the keys, numbered."""
        known: dict[tuple[Any, ...], int] = {}
        layers = []
        for number, (name, seen) in enumerate(self.layers.items()):
            axes = (self._axis(number, of) for of in ("query", "key"))
            same = [(id(rows[0]),) if rows else (length, patches) for rows, length, patches in axes]
            layers.append({**_described(name, seen), "texts": [known.setdefault(text, len(known)) for text in same]})
        return layers

    @torch.inference_mode()
    def summarise(self, progress: Progress = silent) -> list[HeadSummary]:
        """Every head in a few numbers; kept."""
        found: list[HeadSummary] = []
        for number, (name, seen) in enumerate(self.layers.items()):
            of_text = not (seen.cross or seen.patches) and seen.grid.query_len == seen.grid.key_len
            tokens = seen.tokens if of_text else None
            found += summarise(name, seen, tokens, progress=lambda *_, done=number: progress(done, len(self.layers)))
            progress(number + 1, len(self.layers))
        self.summary = found
        return found

    def weights(self) -> int:
        """How many weights there are in all."""
        return sum(seen.grid.batch * seen.grid.heads * seen.grid.query_len * seen.grid.key_len
                   for seen in self.layers.values())  # fmt: skip


def of_observation(seen: Observation, name: str = "attention") -> dict[str, Recorded]:
    """An observation as the only layer of a run."""
    if isinstance(seen, Recorded):
        return {name: seen}
    return {name: Recorded(seen.query, seen.key, seen.scoring, seen.call.lse)}


def of_recording(recording: Recording) -> dict[str, Recorded]:
    """The layers of a recording."""
    return dict(recording.items())


def _described(name: str, seen: Recorded) -> dict[str, Any]:
    scoring, grid, (window, in_words) = seen.scoring, seen.grid, _window(seen)
    kv_heads = seen.key.shape[1]
    group = grid.heads // kv_heads
    traits = {
        "cross-attention": seen.cross,
        in_words: window is not None,
        "sink": scoring.sink is not None,
        f"{group} heads per key head": group > 1,
        f"{' × '.join(map(str, seen.patches or ()))} patches": seen.patches is not None,
        f"softcap {scoring.softcap or 0:g}": scoring.softcap is not None,
        "bias": scoring.bias is not None,
    }
    return {
        "name": name,
        "heads": list(seen.heads),
        "kv_heads": kv_heads,
        "group": group,
        "query_len": grid.query_len,
        "key_len": grid.key_len,
        "head_dim": seen.query.shape[-1],
        "value_dim": None if seen.value is None else seen.value.shape[-1],
        "levels": levels_of(grid.query_len, grid.key_len),
        "scale": scoring.scale,
        "softcap": scoring.softcap,
        "bias": None if scoring.bias is None else repr(scoring.bias),
        "mask": None if scoring.mask is None else repr(scoring.mask),
        "causal": _hides_later_keys(seen),
        "window": window,
        "sink": scoring.sink is not None,
        "similarity": "product" if scoring.additive is None else "additive",
        "cross": seen.cross,
        "patches": seen.patches,
        "behind": seen.behind,
        "traits": [words for words, has in traits.items() if has],
    }


def _hides_later_keys(seen: Recorded) -> bool:
    """Whether no query sees a key after it; asked of some of them."""
    mask, (_, _, query_len, key_len, _) = seen.scoring.mask, seen.grid
    if mask is None or query_len < 2 or seen.cross:
        return False
    rows = {0, query_len // 2, query_len - 2}
    later = [(row, row + 1 + seen.behind) for row in rows if 0 < row + 1 + seen.behind < key_len]
    return bool(later) and all(mask.tile(range(row, row + 1), range(key, key_len)) is Tile.EMPTY for row, key in later)


def _window(seen: Recorded) -> tuple[int | None, str]:
    """How many keys back a query sees at most, itself included, where the mask is one of a window; the same in words,
    with the first keys that it sees besides."""
    found = []
    for rule in _rules(seen.scoring.mask):
        band, first = (rule.left, rule.right) if isinstance(rule, Or) else (rule, None)
        if first is not None and isinstance(band, Prefix):
            band, first = first, band
        if isinstance(band, Band) and band.before is not None and (first is None or isinstance(first, Prefix)):
            besides = "" if first is None else f" and the first {first.n if isinstance(first.n, int) else 'keys'}"
            found.append((band.before + 1, f"window {band.before + 1:,}{besides}"))
    return min(found, default=(None, ""))


def _rules(mask: Mask | None) -> list[Mask]:
    """A mask and, where it is of several that must all hold, each of them."""
    if isinstance(mask, And):
        return [*_rules(mask.left), *_rules(mask.right)]
    return [] if mask is None else [mask]

"""What a head does, in a few numbers.

A head is described by shares of its weight. If the tokens of a text are known, they are means over the queries from the
second on; for induction, over queries whose token occurred before. A head that finds nothing to attend to usually puts
its weight on the first visible token, the attention sink (Xiao et al. 2023).

    previous token   weight on the token just before
    first token      weight on the first token
    same token       weight on the query's own place and on earlier places with the same token
    induction        weight on tokens that follow an earlier occurrence of the query's token (Olsson et al. 2022)
    local            weight on tokens nearer than `LOCAL_DISTANCE`, the query's own included
    document         weight on the query's own document, where it could go to others, beyond what even attention would
                     put there: sum(weight - even) / sum(1 - even); 0 as if there were no documents, 1 never outside

Without tokens, in images, sound and between two sequences, the kinds are those of `regard.recording.kinds`.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.masks import Document
from regard.observation import Distance, Entropy, Observation, Share, Visible
from regard.observation.streaming import Progress, silent
from regard.recording.kinds import LOCAL_DISTANCE, Kinds, another, beyond_even, image, sequence
from regard.recording.texts import Recorded
from regard.shapes import ShapeError

KIND_SHARE = 0.4
"""Smallest share at which a head is named after a kind."""

WIDE_SHARES = {"local": 0.5, "document": 0.8}
"""The same for kinds that cover more keys, and so need a larger share. Local comes first: local heads mostly stay in
their document."""

EVEN_SPREAD = 0.8
"""Smallest spread at which a head of no other kind is called even: before local, since in a short text every head is
local."""


class HeadSummary(NamedTuple):
    """One head on one text: means over batch and queries, and the kind with the largest share."""

    layer: str
    head: int
    entropy: float
    """Mean entropy in nats."""
    spread: float
    """Mean of entropy over its largest possible value, log(visible keys and sink): 0 one key, 1 even."""
    distance: float
    """Mean distance to what is attended to, in tokens; in cross-attention, from where the query would stand."""
    shares: dict[str, float]
    """Of a text: previous token, first token, same token, induction, local, and, if documents were given, document.
    Of others: see `regard.recording.kinds`."""
    kind: str
    """The largest share's name; if none is large, "even", "local", "document" or "mixed" (`kind_of`)."""
    reads: str = "text"
    """What the layer reads: "text", "sequence" (without known tokens), "image 7 x 7 + 1", "another sequence"."""

    @property
    def score(self) -> float:
        """How typical it is of its kind: the share; the spread for an even head, 1 - spread for a mixed one."""
        return self.shares.get(self.kind, self.spread if self.kind == "even" else 1 - self.spread)


class Summary(list[HeadSummary]):
    """Every head in a few numbers. Prints as a table, in a notebook too; of several towers (an image's and a text's, an
    encoder's and a decoder's, cross-attention) each has its own."""

    def of(self, kind: str) -> "Summary":
        """The heads of a kind, those with the highest score first."""
        return Summary(sorted((s for s in self if s.kind == kind), key=lambda s: -s.score))

    def towers(self) -> "dict[str, Summary]":
        """The heads of each tower: layers that read alike and whose names differ in their numbers alone."""
        found: dict[str, Summary] = {}
        for s in self:
            name = re.sub(r"(?<![^.])\d+(?![^.])", "*", s.layer)
            found.setdefault(f"{name}: {s.reads}", Summary()).append(s)
        return found

    def _rows(self) -> list[list[str]]:
        return [["layer", "head", "kind", "score", "entropy", "spread", "distance"]] + [
            [s.layer, str(s.head), s.kind, *(f"{x:.2f}" for x in (s.score, s.entropy, s.spread)), f"{s.distance:.1f}"]
            for s in self
        ]

    def __str__(self) -> str:
        towers = self.towers()
        if len(towers) < 2:
            return _text_table(self._rows())
        return "\n\n".join(f"{name}\n{_text_table(tower._rows())}" for name, tower in towers.items())

    def _repr_html_(self) -> str:
        towers = self.towers()
        if len(towers) < 2:
            return html_table(self._rows())
        return "".join(f"<p>{html.escape(name)}</p>{html_table(tower._rows())}" for name, tower in towers.items())


def summarise(
    name: str,
    seen: Observation,
    tokens: Tensor | None = None,
    documents: Tensor | None = None,
    progress: Progress = silent,
) -> list[HeadSummary]:
    """A summary of every head of one layer; tokens None: with kinds that need no tokens.

    Args:
        progress: called now and then, each pass with its own numbers; may raise to stop.
    """
    if tokens is None:
        return _by_place(name, seen, kinds_of(seen), progress)
    return _by_token(name, seen, tokens, documents, progress)


def kinds_of(seen: Observation) -> Kinds:
    """The kinds for a head that is not described by tokens."""
    _, _, query_len, key_len, _ = seen.grid
    cross, patches = (seen.cross, seen.patches) if isinstance(seen, Recorded) else (False, None)
    if cross or query_len != key_len:
        return another(query_len, key_len)
    if patches is not None and key_len - patches[0] * patches[1] >= 0:
        return image(*patches, key_len - patches[0] * patches[1])
    return sequence()


def _by_place(name: str, seen: Observation, kinds: Kinds, progress: Progress) -> list[HeadSummary]:
    batch, heads, query_len, key_len, device = seen.grid
    assert seen.lse is not None  # known first, so that entropy is made in the same way each time
    rules = [Share(rule) for rule in kinds.rules.values()]
    away = Share(lambda query, key: (key - kinds.place(query)).abs())
    entropy, distance, visible, *shared = seen.gather(Entropy(), away, Visible(), *rules, progress=progress)
    nothing = torch.zeros(batch, heads, max(query_len, key_len), 1, dtype=shared[0].dtype, device=device)
    same = replace(seen.scoring, scale=1.0, softcap=None, bias=None, sink=None, additive=None)
    even = Observation(nothing[:, :, :query_len], nothing[:, :, :key_len], same).gather(*rules, progress=progress)
    described = (torch.arange(query_len, device=device) >= kinds.first).expand(batch, heads, -1)
    shares = {
        kind: beyond_even(weight, by_even, described & (by_even > 0) & (by_even < 1))
        for kind, weight, by_even in zip(kinds.rules, shared, even, strict=True)
    }
    return _by_head(name, seen, (entropy, visible, distance), shares, kinds.reads)


def _by_head(
    name: str, seen: Observation, asked: tuple[Tensor, Tensor, Tensor], shares: Mapping[str, Tensor], reads: str
) -> list[HeadSummary]:
    """The summaries of all heads. Args: asked: entropy, visible and distance."""
    entropy, visible, distance = asked
    choices = visible + (0 if seen.scoring.sink is None else 1)
    spread = _mean(entropy / choices.clamp(min=2).log(), choices > 1)
    summaries = []
    for head, number in enumerate(seen.heads if isinstance(seen, Recorded) else range(seen.grid.heads)):
        of_head = {kind: float(share[head]) for kind, share in shares.items()}
        means = float(entropy[:, head].mean()), float(spread[head]), float(distance[:, head].mean())
        summaries.append(HeadSummary(name, number, *means, of_head, kind_of(of_head, means[1]), reads))
    return summaries


def _by_token(
    name: str, seen: Observation, tokens: Tensor, documents: Tensor | None, progress: Progress
) -> list[HeadSummary]:
    batch, _, query_len, key_len, device = seen.grid
    for what, given in (("tokens", tokens), ("documents", documents)):
        if given is not None and (given.shape != (batch, query_len) or query_len != key_len):
            raise ShapeError(
                f"summary: {name} saw {query_len} queries and {key_len} keys in {batch} rows, {what} are "
                f"{list(given.shape)}; a summary needs a text that was read whole, from its first token on"
            )
    tokens = tokens.to(device)

    def equal(query: Tensor, key: Tensor) -> Tensor:
        """Whether query and key hold the same token: [batch, 1, rows, columns]."""
        return tokens[:, None, query[:, 0], None] == tokens[:, None, None, key[0]]

    def after_same(query: Tensor, key: Tensor) -> Tensor:
        """Whether the token before the key is the query's."""
        return equal(query, (key - 1).clamp(min=0)) & (key > 0) & (key <= query)

    chosen: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda query, key: key == query - 1,
        lambda query, key: key == 0,
        lambda query, key: equal(query, key) & (key <= query),
        after_same,
        lambda query, key: (query - key).abs() < LOCAL_DISTANCE,
    ]
    if documents is not None:
        ids = documents.to(device)
        chosen.append(lambda query, key: ids[:, None, query[:, 0], None] == ids[:, None, None, key[0]])
    assert seen.lse is not None  # known first, so that entropy is made in the same way each time
    entropy, distance, visible, *shared = seen.gather(
        Entropy(), Distance(), Visible(), *map(Share, chosen), progress=progress
    )
    later = torch.arange(query_len, device=device) > 0
    repeated = seen_before(tokens)[:, None]
    kinds = ("previous token", "first token", "same token", "induction", "local")
    shares = {
        kind: _mean(share, repeated if kind == "induction" else later)
        for kind, share in zip(kinds, shared[: len(kinds)], strict=True)
    }
    if documents is not None:
        shares["document"] = _document_share(seen, visible, documents.to(device), shared[-1])
    return _by_head(name, seen, (entropy, visible, distance), shares, "text")


def _document_share(seen: Observation, visible: Tensor, documents: Tensor, share: Tensor) -> Tensor:
    """Weight on the own document beyond what even attention would put there, per head: [heads]."""
    own = Document(documents)
    mask = own if seen.scoring.mask is None else seen.scoring.mask & own
    inside = Observation(seen.query, seen.key, replace(seen.scoring, mask=mask.bind(seen.grid))).visible()
    even = inside.to(share.dtype) / visible.clamp(min=1)
    free = visible > inside  # other documents can be seen
    return beyond_even(share, even, free)


def seen_before(tokens: Tensor) -> Tensor:
    """Whether the same token occurs earlier in its text: bool [batch, length]."""
    rows = []
    for row in tokens:
        _, which = row.unique(return_inverse=True)
        places = torch.arange(len(row), device=row.device)
        first = places.new_full((len(row),), len(row)).scatter_reduce(0, which, places, "amin")
        rows.append(first[which] < places)
    return torch.stack(rows)


def kind_of(shares: Mapping[str, float], spread: float) -> str:
    """The kind of a head with these shares."""
    narrow = {kind: share for kind, share in shares.items() if kind not in WIDE_SHARES}
    best = max(narrow, key=lambda kind: narrow[kind])
    if narrow[best] >= KIND_SHARE:
        return best
    if spread >= EVEN_SPREAD:
        return "even"
    return next((kind for kind, least in WIDE_SHARES.items() if shares.get(kind, 0.0) >= least), "mixed")


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Mean per head over batch and queries where it counts; 0 where it never does: [heads]."""
    counted = where.expand_as(values).to(values.dtype)
    return (values * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def _text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns: names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if place in (0, 2) else '>'}{width}}}" for place, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in rows)


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same for a notebook: the first row is the head."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return f"<table><thead>{line(rows[0], 'th')}</thead><tbody>{body}</tbody></table>"

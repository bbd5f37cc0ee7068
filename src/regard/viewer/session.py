"""What the page can ask, whatever carries the questions: methods by name, with parameters, answered in data and bytes.

    meta, data = session.handle("tile", {"layer": 3, "head": 1, "level": 0, "row": 0, "column": 0})

Every answer is a mapping that JSON can hold (what is not finite is null) and the bytes of one tensor, or none. A
server, a notebook and an exported file carry the same methods.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import regard
from regard.recording import HeadSummary, Summary
from regard.viewer.codes import raw
from regard.viewer.head import SIDE, Head, Tile
from regard.viewer.params import NotFoundError, Params
from regard.viewer.readers import Reader
from regard.viewer.run import Run

MAX_TOKENS_AT_ONCE = 8192
MAX_SELECTED = 512
"""Queries, or keys, of an exact rectangle."""

MAX_NUMBERS = 1 << 22
"""Weights in one answer."""

MAX_HEADS_AT_ONCE = 4096

MAX_WORDS_BYTES = 1000
"""Bytes of what is searched for."""

Answer = tuple[dict[str, Any], bytes]


class Session:
    """Texts that models have read, and what can be asked about them.

    Args:
        runs: what there is to look at, first things first.
        readers: models that can read more.
    """

    UNHURRIED = frozenset({"start", "job", "stop"})
    """Methods that compute nothing themselves: they need not wait for those that do."""

    def __init__(self, runs: Sequence[Run] = (), readers: Sequence[Reader] = ()) -> None:
        self.runs: dict[int, Run] = {}
        self.readers = {reader.name: reader for reader in readers}
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> int:
        """Takes in one more text; returns its number."""
        run.number = max(self.runs, default=-1) + 1
        self.runs[run.number] = run
        return run.number

    def close(self) -> None:
        """Stops whatever is under way."""

    def handle(self, method: str, params: Mapping[str, Any]) -> Answer:
        """The answer to one question.

        Raises:
            NotFoundError: there is no such method, text or job.
            ValueError: a parameter is missing or wrong; one sentence that says which.
        """
        answer = METHODS.get(method)
        if answer is None:
            raise NotFoundError(f"no method {method[:40]!r}; there are: {', '.join(METHODS)}")
        meta, data = answer(self, Params(method, params))
        return plain(meta), data

    # --- what there is ---

    def run_of(self, asked: Params) -> Run:
        """The text that is meant: by number, or the first."""
        number = asked.whole("run", default=min(self.runs, default=0))
        if number not in self.runs:
            raise NotFoundError(f"{asked.method}: there is no run {number} any more")
        return self.runs[number]

    def head_of(self, asked: Params) -> tuple[Run, Head]:
        """The head that is meant."""
        run = self.run_of(asked)
        return run, run.head(asked.whole("layer"), asked.whole("head"), asked.whole("batch", default=0))

    def info(self, asked: Params) -> Answer:
        """Everything but numbers."""
        run = self.run_of(asked)
        layer, head, query = run.first_shown()
        return {
            "version": regard.__version__,
            "run": run.number,
            "runs": [
                {"run": r.number, "model": r.model, "source": r.source, "tokens": r.length} for r in self.runs.values()
            ],
            "model": run.model,
            "source": run.source,
            "start": run.start,
            "stop": run.start + run.length - run.opening,
            "total": run.total,
            "opening": run.opening,
            "growing": run.growing,
            "batch": run.layer(0).grid.batch,
            "layers": run.described(),
            "chosen": {"layer": layer, "head": head, "query": query},
            "picture": None if run.picture is None else {"width": run.picture.shape[1], "height": run.picture.shape[0]},
            "limits": {"sel": MAX_SELECTED, "heads": MAX_HEADS_AT_ONCE, "tokens": MAX_TOKENS_AT_ONCE},
        }, b""

    def tokens(self, asked: Params) -> Answer:
        """Labels and characters of some tokens."""
        of = asked.choice("of", ("query", "key"), "query")
        tokens = self.run_of(asked).tokens_of(asked.whole("layer", default=0), of, asked.whole("batch", default=0))
        start = asked.whole("start", most=len(tokens), default=0)
        stop = asked.whole("stop", most=len(tokens), default=min(len(tokens), start + MAX_TOKENS_AT_ONCE))
        if stop - start > MAX_TOKENS_AT_ONCE:
            raise ValueError(f"tokens: at most {MAX_TOKENS_AT_ONCE:,} at once, got {stop - start:,}")
        some = slice(start, stop)
        return {
            "start": start,
            "stop": stop,
            "total": len(tokens),
            "labels": [*tokens.labels[some]],
            "texts": [*tokens.texts[some]],
            "ids": None if tokens.ids is None else [*tokens.ids[some]],
        }, b""

    def search(self, asked: Params) -> Answer:
        """Where words stand."""
        of = asked.choice("of", ("query", "key"), "query")
        tokens = self.run_of(asked).tokens_of(asked.whole("layer", default=0), of, asked.whole("batch", default=0))
        found = tokens.search(asked.text("text", most_bytes=MAX_WORDS_BYTES))
        return {"matches": found[: asked.whole("limit", least=1, most=10_000, default=200)], "total": len(found)}, b""

    def picture(self, asked: Params) -> Answer:
        """The image that was read."""
        picture = self.run_of(asked).picture
        if picture is None:
            raise ValueError("picture: this run read no image, or it was not given")
        return {"width": picture.shape[1], "height": picture.shape[0]}, raw(picture)

    # --- heads ---

    def heads(self, asked: Params) -> Answer:
        """Every head in a few numbers."""
        run = self.run_of(asked)
        found = run.summary if run.summary is not None else run.summarise()
        return {**heads_as_data(run, found), "complete": True, "job": None}, b""

    def thumbs(self, asked: Params) -> Answer:
        """Every head of a layer, small."""
        run, layer = self.run_of(asked), asked.whole("layer")
        batch, size = asked.whole("batch", default=0), asked.whole("size", least=1, most=SIDE, default=64)
        pool = asked.choice("pool", ("max", "mean"), "max")
        heads = run.layer(layer).heads
        thumbs = [run.fresh_head(layer, head, batch).thumb(size, pool) for head in heads]  # type: ignore[arg-type]
        codes = torch.stack([thumb.codes for thumb in thumbs])
        _, rows, columns = codes.shape
        sampled = thumbs[0].sampled
        return {"heads": heads, "rows": rows, "columns": columns, "exact": sampled is None, "sampled": sampled}, raw(
            codes
        )

    def tile(self, asked: Params) -> Answer:
        """One tile of a head's map."""
        _, head = self.head_of(asked)
        level = asked.whole("level", most=head.levels - 1)
        most = (SIDE << level, max(head.query_len, 1), max(head.key_len, 1))
        row, column = (
            asked.whole(name, most=(length - 1) // most[0]) for name, length in (("row", most[1]), ("column", most[2]))
        )
        tile: Tile = head.tile(level, row, column, asked.choice("pool", ("max", "mean"), "max"))  # type: ignore[arg-type]
        rows, columns = tile.codes.shape
        whole = torch.zeros(SIDE, SIDE, dtype=torch.uint16)
        whole[:rows, :columns] = tile.codes
        meta = {"rows": rows, "columns": columns, "exact": tile.sampled is None, "sampled": tile.sampled, "job": None}
        return meta, raw(whole)

    # --- numbers ---

    def cell(self, asked: Params) -> Answer:
        """One weight, or what a cell of several comes to."""
        run, head = self.head_of(asked)
        layer, batch = asked.whole("layer"), asked.whole("batch", default=0)
        if not asked.has("query"):
            return self._larger_cell(asked, head), b""
        query, key = asked.whole("query", most=head.query_len - 1), asked.whole("key", most=head.key_len - 1)
        labels = (run.tokens_of(layer, of, batch).labels[place] for of, place in (("query", query), ("key", key)))
        return {**head.cell(query, key), **dict(zip(("query_label", "key_label"), labels, strict=True))}, b""

    def _larger_cell(self, asked: Params, head: Head) -> dict[str, Any]:
        queries, keys = asked.span("queries", head.query_len), asked.span("keys", head.key_len)
        if len(queries) * len(keys) > MAX_NUMBERS:
            raise ValueError(f"cell: at most {MAX_NUMBERS:,} weights, got {len(queries) * len(keys):,}")
        weights = head.rectangle(queries, keys)
        place = int(weights.argmax())
        return {
            "max": float(weights.max()),
            "mass": float(weights.sum()) / len(queries),
            "query": queries[place // len(keys)],
            "key": keys[place % len(keys)],
            "hidden": head.hides(queries, keys),
        }

    def row(self, asked: Params) -> Answer:
        """The weights of one query on all keys, in several heads."""
        heads = self._several(asked)
        query = asked.whole("query", most=heads[0][1].query_len - 1)
        rows = torch.stack([head.weights_of(range(query, query + 1))[0] for _, head in heads]).float()
        sink = [1.0 - total if head.call.scoring.sink is not None else 0.0
                for total, (_, head) in zip(rows.sum(-1).tolist(), heads, strict=True)]  # fmt: skip
        return {"heads": [place for place, _ in heads], "key_len": rows.shape[1], "sink": sink}, raw(rows)

    def column(self, asked: Params) -> Answer:
        """The weights of all queries on one key, in several heads."""
        heads = self._several(asked)
        key = asked.whole("key", most=heads[0][1].key_len - 1)
        columns = torch.stack([head.column(key) for _, head in heads]).float()
        return {"heads": [place for place, _ in heads], "query_len": columns.shape[1]}, raw(columns)

    def sel(self, asked: Params) -> Answer:
        """An exact rectangle of several heads."""
        heads = self._several(asked)
        first = heads[0][1]
        queries = asked.span("queries", first.query_len, MAX_SELECTED)
        keys = asked.span("keys", first.key_len, MAX_SELECTED)
        if len(heads) * len(queries) * len(keys) > MAX_NUMBERS:
            raise ValueError(f"sel: at most {MAX_NUMBERS:,} weights at once; take fewer heads or tokens")
        found = torch.stack([head.rectangle(queries, keys) for _, head in heads]).float()
        return {"heads": [place for place, _ in heads], "rows": len(queries), "columns": len(keys)}, raw(found)

    def _several(self, asked: Params) -> list[tuple[tuple[int, int], Head]]:
        """Heads of the same lengths: those that are named, or all like the first."""
        run, batch = self.run_of(asked), asked.whole("batch", default=0)
        if asked.has("heads"):
            places = asked.pairs("heads", MAX_HEADS_AT_ONCE)
        else:
            places = [(number, head) for number, layer in enumerate(run.layers.values()) for head in layer.heads]
        heads = [(place, run.fresh_head(*place, batch)) for place in places]
        lengths = heads[0][1].query_len, heads[0][1].key_len
        alike = [pair for pair in heads if (pair[1].query_len, pair[1].key_len) == lengths]
        if asked.has("heads") and len(alike) < len(heads):
            raise ValueError(f"{asked.method}: heads must have the same number of queries and keys")
        return alike


METHODS: dict[str, Callable[[Session, Params], Answer]] = {
    method.__name__: method
    for method in (
        Session.info,
        Session.tokens,
        Session.search,
        Session.picture,
        Session.heads,
        Session.thumbs,
        Session.tile,
        Session.cell,
        Session.row,
        Session.column,
        Session.sel,
    )
}
"""What can be asked."""


def heads_as_data(run: Run, found: Sequence[HeadSummary]) -> dict[str, Any]:
    """Summaries as plain data."""
    numbers = {name: number for number, name in enumerate(run.names)}
    towers = Summary(found).towers()
    of_tower = {id(s): name for name, tower in towers.items() for s in tower}
    heads = [
        {
            "layer": numbers[s.layer],
            "head": s.head,
            "kind": s.kind,
            "score": s.score,
            "entropy": s.entropy,
            "spread": s.spread,
            "distance": s.distance,
            "shares": s.shares,
            "tower": of_tower[id(s)],
        }
        for s in found
    ]
    return {"heads": heads, "towers": [*towers], "kinds": sorted({s.kind for s in found})}


def plain(value: Any) -> Any:
    """Data as JSON can hold it: tuples as lists, numbers of tensors as numbers, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(part) for part in value]
    if isinstance(value, Tensor):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def framed(meta: Mapping[str, Any], data: bytes) -> bytes:
    """An answer as one piece: the length of its JSON in four bytes, the JSON, and the bytes, at a multiple of eight."""
    text = json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return len(text).to_bytes(4, "little") + text + data

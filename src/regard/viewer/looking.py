"""What can be asked about texts that models have read: heads, tiles, single weights, series, steps.

Every answer is a mapping that JSON can hold (what is not finite is null) and the bytes of one tensor, or none.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import regard
from regard.observation import Compare
from regard.observation.comparing import Comparison
from regard.observation.streaming import Progress, silent
from regard.recording import HeadSummary, Summary
from regard.viewer.codes import raw
from regard.viewer.head import SIDE, Head, Series, Tile
from regard.viewer.jobs import Job, Jobs, Result
from regard.viewer.params import NotFoundError, Params
from regard.viewer.run import Run
from regard.viewer.steps import MAX_SHOWN_KEYS, example, steps_of_query

MAX_TOKENS_AT_ONCE = 8192
MAX_SELECTED = 512
"""Queries, or keys, of an exact rectangle."""

MAX_NUMBERS = 1 << 22
"""Weights in one answer."""

MAX_HEADS_AT_ONCE = 4096

MAX_WEIGHTS_AT_ONCE = 1 << 23
"""Weights that are gone through while the page waits; for more, there is a job: some hundredths of a second."""

MAX_RUNS = 8
"""Texts that are kept: the first, and the last that were read."""

MAX_WORDS_BYTES = 1000
"""Bytes of what is searched for."""

Answer = Result
"""Data as JSON can hold it, and the bytes of a tensor."""


class Looking:
    """Texts that models have read, and what can be asked about them.

    Args:
        runs: what there is to look at, first things first.
    """

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.runs: dict[int, Run] = {}
        self.jobs = Jobs()
        self._count, self._lock = 0, threading.Lock()
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> int:
        """Takes in one more text; returns its number."""
        with self._lock:
            run.number = self._count
            self._count += 1
            self.runs[run.number] = run
            for number in list(self.runs)[1 : max(1, len(self.runs) - MAX_RUNS + 1)]:  # the first stays
                del self.runs[number]
        return run.number

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
            "limits": {
                "sel": MAX_SELECTED,
                "heads": MAX_HEADS_AT_ONCE,
                "tokens": MAX_TOKENS_AT_ONCE,
            },
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
        if run.summary is None and run.weights() <= MAX_WEIGHTS_AT_ONCE:
            run.summarise()
        if run.summary is None:
            return {"heads": [], "towers": [], "kinds": [], "complete": False, "job": self._summary(run).number}, b""
        return {**heads_as_data(run, run.summary), "complete": True, "job": None}, b""

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
        run, head = self.head_of(asked)
        level = asked.whole("level", most=head.levels - 1)
        most = (SIDE << level, max(head.query_len, 1), max(head.key_len, 1))
        row, column = (
            asked.whole(name, most=(length - 1) // most[0]) for name, length in (("row", most[1]), ("column", most[2]))
        )
        tile: Tile = head.tile(level, row, column, asked.choice("pool", ("max", "mean"), "max"))  # type: ignore[arg-type]
        rows, columns = tile.codes.shape
        whole = torch.zeros(SIDE, SIDE, dtype=torch.uint16)
        whole[:rows, :columns] = tile.codes
        exact = tile.sampled is None
        job = None if exact else self._pyramid(run, head).number
        return {"rows": rows, "columns": columns, "exact": exact, "sampled": tile.sampled, "job": job}, raw(whole)

    def series(self, asked: Params) -> Answer:
        """Numbers of every query and of every key."""
        run, head = self.head_of(asked)
        if head.series is None and head.query_len * head.key_len <= MAX_WEIGHTS_AT_ONCE:
            head.make_pyramid()
        meta = {"names": Series._fields, "query_len": head.query_len, "key_len": head.key_len}
        if head.series is None:
            return {**meta, "ready": False, "job": self._pyramid(run, head).number}, b""
        return {**meta, "ready": True, "job": None}, b"".join(map(raw, head.series))

    def compare(self, asked: Params) -> Answer:
        """How far two heads are apart, query by query."""
        run, batch = self.run_of(asked), asked.whole("batch", default=0)
        places = asked.pair("a"), asked.pair("b")
        one, other = (run.observation(*place, batch) for place in places)
        if one.grid != other.grid:
            raise ValueError("compare: the heads must have the same number of queries and keys")
        key = (*places, batch)

        def work(progress: Progress) -> None:
            with torch.inference_mode():
                (run.compared[key],) = one.gather(Compare(other), progress=progress)

        if key not in run.compared and one.grid.query_len * one.grid.key_len <= MAX_WEIGHTS_AT_ONCE:
            work(silent)
        meta = {"names": Comparison._fields, "query_len": one.grid.query_len}
        if key not in run.compared:
            job = self.jobs.start("compare", _quiet(work), ("compare", run.number, key))
            return {**meta, "ready": False, "job": job.number, "means": None}, b""
        found = [numbers[0, 0].float() for numbers in run.compared[key]]
        means = [float(numbers.mean()) for numbers in found]
        return {**meta, "ready": True, "job": None, "means": means}, b"".join(map(raw, found))

    def steps(self, asked: Params) -> Answer:
        """One query in one head, step by step."""
        run, head = self.head_of(asked)
        more = asked.given.get("keys") or []
        if not isinstance(more, list) or len(more) > MAX_SHOWN_KEYS or not all(type(key) is int for key in more):
            raise asked.wrong("keys", f"a list of at most {MAX_SHOWN_KEYS} keys")
        if any(not 0 <= key < head.key_len for key in more):
            raise asked.wrong("keys", f"keys from 0 to {head.key_len - 1}")
        return steps_of_query(
            run, asked.whole("layer"), asked.whole("head"), asked.whole("batch", default=0),
            asked.whole("query", most=head.query_len - 1),
            asked.whole("count", least=0, most=MAX_SHOWN_KEYS, default=16), more,
        ), b""  # fmt: skip

    def example(self, asked: Params) -> Answer:
        """Attention by hand."""
        return example(asked), b""

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

    def _summary(self, run: Run) -> Job:
        return self.jobs.start("summary", _quiet(run.summarise), ("summary", run.number, run.length), patient=True)

    def _pyramid(self, run: Run, head: Head) -> Job:
        return self.jobs.start("pyramid", _quiet(head.make_pyramid), ("pyramid", head))

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


def _quiet(work: Callable[[Progress], object]) -> Callable[[Job], Result]:
    """Work that leaves its result where it is asked for."""

    def done(job: Job) -> Result:
        work(job.progress)
        return {}, b""

    return done


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

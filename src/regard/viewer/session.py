"""A session of the page: whatever carries the questions, methods by name, with parameters, answered in data and bytes.

    meta, data = session.handle("tile", {"layer": 3, "head": 1, "level": 0, "row": 0, "column": 0})

A server, a notebook and an exported file carry the same methods. What is here besides is what needs a model: reading
another text, going on with one, changing heads; these are jobs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from regard.models import Decoder
from regard.training.checkpoint import bundled, downloaded, kind_of
from regard.training.text import MAX_TEXT_BYTES
from regard.viewer.changing import changes_of, expect
from regard.viewer.export import export
from regard.viewer.jobs import Job, Result
from regard.viewer.looking import MAX_HEADS_AT_ONCE, MAX_WORDS_BYTES, Answer, Looking, plain
from regard.viewer.params import NotFoundError, Params
from regard.viewer.readers import Reader, find_reader
from regard.viewer.reading import read
from regard.viewer.run import Run
from regard.viewer.writing import MAX_NEW_TOKENS, continued, drawing, write


class Session(Looking):
    """Texts that models have read, models that read more, and every method that the page has.

    Args:
        runs: what there is to look at, first things first.
        readers: models that can read more.
    """

    UNHURRIED = frozenset({"start", "job", "stop"})
    """Methods that compute nothing themselves: they need not wait for those that do."""

    def __init__(self, runs: Sequence[Run] = (), readers: Sequence[Reader] = ()) -> None:
        super().__init__(runs)
        self.readers = {reader.name: reader for reader in readers}

    def close(self) -> bool:
        """Stops whatever is under way; whether it has ended."""
        return self.jobs.close()

    def handle(self, method: str, params: Mapping[str, Any]) -> Answer:
        """The answer to one question.

        Raises:
            NotFoundError: there is no such method, text or job.
            ValueError: a parameter is missing or wrong; one sentence that says which.
        """
        answer = METHODS.get(method)
        if answer is None:
            raise NotFoundError(f"no method {method[:40]!r}; there are: {', '.join(METHODS)}")
        asked = Params(method, params)
        of_run = method not in self.UNHURRIED and (self.runs or "run" in params)
        with self.run_of(asked).still if of_run else nullcontext():
            meta, data = answer(self, asked)
        return plain(meta), data

    def info(self, asked: Params) -> Answer:
        """Everything but numbers."""
        meta, data = super().info(asked)
        run = self.run_of(asked)
        foretells = run.reader is not None and run.reader.foretells
        can = {"read": bool(self.readers), "generate": foretells, "intervene": foretells, "export": True}
        context = None if run.reader is None else run.reader.context
        meta["limits"]["text_bytes"] = MAX_TEXT_BYTES
        return {**meta, "models": self._models(), "can": can, "context": context}, data

    def start(self, asked: Params) -> Answer:
        """Starts work that takes a while."""
        what = asked.choice("what", [*STARTS])
        return {"job": STARTS[what](self, asked).number}, b""

    def job(self, asked: Params) -> Answer:
        """How a job stands, and what it came to."""
        job = self.jobs.find(asked.whole("job"))
        meta = job.seen(asked.whole("seen") if asked.has("seen") else None)
        return meta, job.data if meta["state"] == "done" else b""

    def stop(self, asked: Params) -> Answer:
        """Stops a job."""
        job = self.jobs.find(asked.whole("job"))
        job.stop()
        return job.seen(None), b""

    def _start_summary(self, asked: Params) -> Job:
        return self._summary(self.run_of(asked))

    def _start_pyramid(self, asked: Params) -> Job:
        return self._pyramid(*self.head_of(asked))

    def _start_read(self, asked: Params) -> Job:
        if not self.readers:
            raise ValueError("start: there is no model to read with")
        start = asked.whole("start", default=0)
        if asked.has("text"):
            text = asked.text("text", most_bytes=MAX_TEXT_BYTES)
            source = asked.text("source", most_bytes=MAX_WORDS_BYTES, default="your text")
            name = asked.choice("model", self._models(), next(iter(self.readers)))
        else:
            run = self.run_of(asked)
            if run.text is None or run.reader is None:
                raise ValueError("start: this text came without its model")
            text, source, name = run.text, run.source, run.reader.name

        def work(job: Job) -> Result:
            if name not in self.readers:
                job.tell(note=f"loading {name}")
                self.readers[name] = find_reader(name)
            return {"run": self.add(read(self.readers[name], text, source, start, job.progress))}, b""

        return self.jobs.start("read", work)

    def _start_generate(self, asked: Params) -> Job:
        count = asked.whole("count", least=1, most=MAX_NEW_TOKENS, default=64)
        draw = drawing(
            asked.whole("seed", default=0, most=2**32 - 1),
            asked.number("temperature", 0.8, least=0, most=100),
            asked.whole("top_k", least=1) if asked.has("top_k") else None,
        )
        new, ids = continued(self.run_of(asked), count)

        def work(job: Job) -> Result:
            result = {"run": self.add(new)}
            job.tell(result=result)
            try:
                write(new, ids, count, draw, job)
            finally:
                new.growing = False
            return result, b""

        return self.jobs.start("generate", work)

    def _start_intervene(self, asked: Params) -> Job:
        run = self.run_of(asked)
        if run.reader is None or not run.reader.foretells:
            raise ValueError("start: this text came without a model that foretells the next token")
        query, changes = asked.whole("query", most=run.length - 1), changes_of(run, asked)
        return self.jobs.start("intervene", lambda job: expect(run, query, changes, job))

    def _start_export(self, asked: Params) -> Job:
        run = self.run_of(asked)
        heads = asked.pairs("heads", MAX_HEADS_AT_ONCE) if asked.has("heads") else None
        batch = asked.whole("batch", most=run.layer(0).grid.batch - 1, default=0)
        for layer, head in heads or ():
            run.observation(layer, head, batch)

        def work(job: Job) -> Result:
            page = export(run, heads, job.progress, batch=batch).encode()
            return {"name": "regard.html", "bytes": len(page)}, page

        return self.jobs.start("export", work)

    def _models(self) -> list[str]:
        """Names of the models that can read: given, in the package, in the cache of transformers."""
        return [*dict.fromkeys([*self.readers, *self._others])] if self.readers else []

    @cached_property
    def _others(self) -> list[str]:
        return [*(name for name in bundled() if kind_of(name) is Decoder), *downloaded()]


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
        Session.series,
        Session.compare,
        Session.steps,
        Session.example,
        Session.start,
        Session.job,
        Session.stop,
    )
}
"""What can be asked."""

STARTS: dict[str, Callable[[Session, Params], Job]] = {
    "summary": Session._start_summary,
    "pyramid": Session._start_pyramid,
    "read": Session._start_read,
    "generate": Session._start_generate,
    "intervene": Session._start_intervene,
    "export": Session._start_export,
}
"""What can be started."""


def framed(meta: Mapping[str, Any], data: bytes) -> bytes:
    """An answer as one piece: the length of its JSON in four bytes, the JSON, and the bytes, at a multiple of eight."""
    text = json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return len(text).to_bytes(4, "little") + text + data

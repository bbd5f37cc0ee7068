"""Sessions for tests of the page, and ways to serve them."""

from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

import regard
from regard import Causal
from regard.viewer.readers import DecoderReader
from regard.viewer.reading import read
from regard.viewer.run import Run, of_observation
from regard.viewer.session import Session

EXAMPLE = Path(__file__).parent.parent / "examples" / "library_desk.py"


@cache
def bundled_reader():
    return DecoderReader(regard.load())


def bundled_session(text=None, source="examples/library_desk.py"):
    """The bundled model on a real file, or on a text."""
    reader = bundled_reader()
    return Session([read(reader, EXAMPLE.read_text() if text is None else text, source)], [reader])


def observed_session(length=600, head_dim=16, heads=2, kv_heads=1, *, seed=0, lse=None, **scoring):
    """A session of one random call, and its observation in float64."""
    generator = torch.Generator().manual_seed(seed)
    key_len = scoring.pop("key_len", length)
    query = 2 * torch.randn(1, heads, length, head_dim, generator=generator)
    key = torch.randn(1, kv_heads, key_len, head_dim, generator=generator)
    scoring.setdefault("mask", Causal())
    seen = regard.observe(query, key, **scoring)
    exact = regard.observe(query.double(), key.double(), **scoring)
    return Session([Run("random", "numbers", of_observation(seen))]), exact


WHEN_ENDED = []
"""What is called with the address of a server that has ended: another one may get it."""


@contextmanager
def served(session):
    """The address of a server of the session, in a thread."""
    from regard.viewer.server import Server

    server = Server(session)
    server.start()
    try:
        yield server.address
    finally:
        server.close()
        for call in WHEN_ENDED:
            call(server.address)


def ask(session, method, **params):
    return session.handle(method, params)


def finished(session, **params):
    """What a job that is started comes to."""
    job, seen = ask(session, "start", **params)[0]["job"], None
    while True:
        meta, data = ask(session, "job", job=job, seen=seen)
        if meta["state"] != "running":
            return meta, data
        seen = meta["tick"]


def floats(data, *shape):
    """The bytes of an answer as float32."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32).view(*shape)

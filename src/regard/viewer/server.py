"""The page over HTTP, for one person on one machine: Starlette and uvicorn around a session.

It listens on 127.0.0.1 alone. Its address holds a token that nobody can guess, and whoever asks for another host, or
from another page, is refused. What is asked for is looked up in a table: no path of a request reaches the file system.
One question is computed at a time (torch has threads of its own), and one whose asker has gone is dropped unbegun.
"""

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from regard.viewer.bundle import TYPES, files
from regard.viewer.params import NotFoundError
from regard.viewer.session import Session, framed

HOST = "127.0.0.1"

MAX_REQUEST_BYTES = 20 * 2**20
"""Bytes of a request: a text of the largest size, and what JSON makes of it."""

MAX_REQUEST_SECONDS = 60
"""How long a request may take to come in."""

MAX_CONNECTIONS = 200

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Headers:
    """Adds the headers to every answer, of errors too."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *((name, value) for name, value in message.get("headers", ()) if name.decode() not in HEADERS),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, told)


def application(session: Session, token: str) -> Starlette:
    """The page of a session as an ASGI application, at /TOKEN/."""
    known = files()
    lane = ThreadPoolExecutor(1, thread_name_prefix="regard-page")
    waiting = ThreadPoolExecutor(16, thread_name_prefix="regard-job")
    turn = asyncio.Semaphore(1)

    def is_known(request: Request) -> bool:
        return secrets.compare_digest(request.path_params["token"].encode(), token.encode())

    async def page(request: Request) -> Response:
        return served("page.html") if is_known(request) else refused()

    async def static(request: Request) -> Response:
        return served(request.path_params["name"]) if is_known(request) else refused()

    def served(name: str) -> Response:
        if name not in known:
            return PlainTextResponse("not found\n", 404)
        return Response(known[name], media_type=TYPES[PurePosixPath(name).suffix])

    def refused() -> Response:
        return PlainTextResponse("open the address that regard printed, with all of its letters\n", 403)

    async def answer(request: Request) -> Response:
        if not is_known(request):
            return refused()
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{request.headers['host']}":
            return said(403, "the page of another site cannot ask")
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            return said(415, "a question is JSON: content-type must be application/json")
        try:
            body = await asyncio.wait_for(read(request), MAX_REQUEST_SECONDS)
            params = json.loads(body or b"{}")
        except (TimeoutError, ValueError, RecursionError):
            return said(400, "the question is no JSON, or did not come whole")
        if body is None:
            return said(413, f"a question may have at most {MAX_REQUEST_BYTES:,} bytes")
        if not isinstance(params, dict):
            return said(400, "a question is an object of parameters")
        return await computed(request, request.path_params["method"], params)

    async def computed(request: Request, method: str, params: dict[str, Any]) -> Response:
        loop = asyncio.get_running_loop()
        try:
            if method in Session.UNHURRIED:
                answer = await loop.run_in_executor(waiting, session.handle, method, params)
            else:
                async with turn:
                    if await request.is_disconnected():
                        return Response(status_code=499)
                    answer = await loop.run_in_executor(lane, session.handle, method, params)
        except NotFoundError as error:
            return said(404, str(error))
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            return said(400, str(error))
        return Response(framed(*answer), media_type="application/octet-stream")

    def said(status: int, words: str) -> Response:
        return JSONResponse({"error": words}, status)

    app = Starlette(
        routes=[
            Route("/{token}/", page, methods=["GET"]),
            Route("/{token}/static/{name}", static, methods=["GET"]),
            Route("/{token}/api/{method}", answer, methods=["POST"]),
        ],
        middleware=[Middleware(_Headers), Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])],
    )
    app.router.redirect_slashes = False
    return app


async def read(request: Request) -> bytes | None:
    """What was sent; None where it is too large, as soon as that is known."""
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > MAX_REQUEST_BYTES:
        return None
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_REQUEST_BYTES:
            return None
    return b"".join(parts)


class Server:
    """A session's page on this machine, at an address that only its reader knows.

    Args:
        port: 0 for any that is free.
    """

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session = session
        # named TCP in so many words, or asyncio leaves Nagle's algorithm on: small answers then wait 40 ms
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((HOST, port))
        self._socket.listen()  # who comes before the server runs waits for it
        token = secrets.token_urlsafe(16)
        self.address = f"http://{HOST}:{self._socket.getsockname()[1]}/{token}/"
        config = uvicorn.Config(
            application(session, token), http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=1, limit_concurrency=MAX_CONNECTIONS,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def run(self) -> bool:
        """Serves until an interruption (Ctrl-C), which ends it at once; whether all work has ended too."""
        with contextlib.suppress(KeyboardInterrupt):
            self._server.run(sockets=[self._socket])
        return self.session.close()

    def start(self) -> None:
        """Serves in a thread, until `close`."""
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        """Ends what `start` began."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        self.session.close()

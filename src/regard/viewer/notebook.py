"""The page in a notebook: by the notebook's own messages, and never over a port, which a remote kernel does not have.

    recording.view()

With anywidget it is live. Without, and in a notebook that was saved, it is the page as one file inside a frame.
"""

import html
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.observation import Observation
from regard.recording import Recording
from regard.viewer.bundle import files, joined, sources
from regard.viewer.export import export, save_page
from regard.viewer.params import NotFoundError
from regard.viewer.run import Run, of_observation, of_recording
from regard.viewer.session import Session
from regard.viewer.texts import Tokens, label, of_ids

HEIGHT = 720
"""Pixels of the frame."""


def run_of(seen: Recording | Observation, *, source: str = "", tokens: Any = None, image: Tensor | None = None) -> Run:
    """A recording, or a single observation, as the page takes it.

    Args:
        source: what to call the text.
        tokens: what the tokens are called: a list of texts; or a tokenizer with `decode`, for those that were recorded;
            None: their numbers.
        image: [height, width, 3] or [3, height, width] for an image model, its picture: uint8, or floating from 0 to 1.
    Raises:
        ValueError: nothing was recorded, or an image of another shape.
    """
    if isinstance(seen, Recording):
        layers, model = of_recording(seen), seen.model
        if not layers:
            raise ValueError("view: there is nothing to show; has the model run inside the with block?")
    else:
        layers, model = of_observation(seen), ""
    run = Run(model, source or ("a recording" if isinstance(seen, Recording) else "an observation"), layers)
    if isinstance(tokens, (list, tuple)):
        run.tokens = Tokens([str(text) for text in tokens], [label(str(text)) for text in tokens])
    else:
        decode = getattr(tokens, "decode", None)
        written = None if decode is None else (lambda number: str(decode([number])))
        run.texts = _texts({name: seen.tokens for name, seen in layers.items() if seen.tokens is not None}, written)
    run.picture = None if image is None else _picture(image)
    return run


def _texts(read: Mapping[str, Tensor], written: Callable[[int], str] | None) -> dict[str, list[Tokens]]:
    """What layers read, by name: of layers that read the same numbers one object."""
    known: list[tuple[Tensor, list[Tokens]]] = []
    found = {}
    for name, ids in read.items():
        rows = next((rows for other, rows in known if torch.equal(ids, other)), None)
        if rows is None:
            rows = [of_ids(row, written) for row in ids.tolist()]
            known.append((ids, rows))
        found[name] = rows
    return found


def _picture(image: Tensor) -> Tensor:
    """RGBA uint8 [height, width, 4]."""
    if image.dim() != 3 or 3 not in (image.shape[0], image.shape[2]):
        raise ValueError(f"view: image must be [height, width, 3] or [3, height, width], got {list(image.shape)}")
    pixels = image.permute(1, 2, 0) if image.shape[0] == 3 else image
    if pixels.is_floating_point():
        pixels = (pixels.clamp(0, 1) * 255).round()
    opaque = torch.full((*pixels.shape[:2], 1), 255, dtype=torch.uint8)
    return torch.cat([pixels.to(torch.uint8).cpu(), opaque], dim=-1)


class Frame:
    """The page as one file, shown by a notebook in a frame of its own."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def _repr_html_(self) -> str:
        page = html.escape(export(self.run), quote=True)
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{page}"></iframe>'


def view(seen: Recording | Observation, *, tokens: Any = None, image: Tensor | None = None) -> Any:
    """The page of a recording or an observation, for a notebook to show: live with anywidget, else in a frame.

    Args: as of `run_of`.
    """
    run = run_of(seen, tokens=tokens, image=image)
    return Frame(run) if find_spec("anywidget") is None else widget(Session([run]))


def write(
    seen: Recording | Observation, path: str | os.PathLike[str], *, tokens: Any = None, image: Tensor | None = None
) -> None:
    """Writes the page of a recording or an observation as one HTML file, which works offline.

    Args:
        path: where; an older page is replaced, another file is not.
        tokens, image: as of `run_of`.
    Raises:
        ValueError: there is another file of that name, or too much for one file.
        OSError: there is no room, or no permission.
    """
    save_page(Path(path), export(run_of(seen, tokens=tokens, image=image)))


def widget(session: Session) -> Any:
    """A session as a widget of anywidget."""
    import anywidget

    class Page(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
        """Answers the page's messages: {id, method, params} with {id, meta} and a buffer, or {id, error}."""

        _esm = joined(sources(), "widget.js", exports=True)
        _css = files()["page.css"].decode()

        def __init__(self) -> None:
            super().__init__()
            self.on_msg(lambda _, message, buffers: answers.take(message))

    page = Page()
    answers = _Answers(session, lambda message, buffers: page.send(message, buffers=buffers))
    return page


class _Answers:
    """Messages in, messages out, one question after another in a thread; one that was taken back is dropped."""

    def __init__(self, session: Session, send: Any) -> None:
        self.session, self.send = session, send
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="regard-page")
        self._waiting = ThreadPoolExecutor(4, thread_name_prefix="regard-job")
        self._open: set[Any] = set()
        self._lock = threading.Lock()

    def take(self, message: Any) -> None:
        """One message from the page."""
        if not isinstance(message, dict):
            return
        if "cancel" in message:
            with self._lock:
                self._open.discard(_key(message["cancel"]))
            return
        method, params = message.get("method"), message.get("params")
        with self._lock:
            self._open.add(_key(message.get("id")))
        lane = self._waiting if method in Session.UNHURRIED else self._lane
        lane.submit(self._answer, message.get("id"), str(method), params if isinstance(params, dict) else {})

    def _answer(self, number: Any, method: str, params: dict[str, Any]) -> None:
        with self._lock:
            if _key(number) not in self._open:
                return
            self._open.remove(_key(number))
        try:
            meta, data = self.session.handle(method, params)
        except (NotFoundError, ValueError, TypeError, LookupError, RuntimeError) as error:
            self.send({"id": number, "error": str(error)}, [])
        else:
            self.send({"id": number, "meta": meta}, [data])


def _key(number: Any) -> str:
    """The number of a message, whatever was sent as one."""
    return repr(number)

"""Signals that ask a training to stop: Ctrl-C (SIGINT), SIGTERM, a terminal that closes (SIGHUP)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end the block as an exception does, with exit code 128 + number: it cleans up."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stopping:
    """Notes the first signal that asks to stop, so that work can be brought to an end; a second one acts at once.

    As a context it stands in for the handlers there are. A signal that the process ignores goes on being ignored. Only
    the main thread can receive signals; in another one nothing is noted.

    Args:
        launched: whether a launcher watches this process: it passes on a Ctrl-C that the terminal has sent already, and
            ends with SIGKILL what takes too long, so a second signal is no wish to stop at once.

    Attributes:
        asked: the signal that came, None before.
    """

    def __init__(self, launched: bool = False) -> None:
        self.asked: int | None = None
        self.launched = launched
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def ask(self, number: int) -> None:
        """Asks to stop, as a signal does."""
        self.asked = number

    def end(self) -> NoReturn:
        """Ends as the signal would have: KeyboardInterrupt for Ctrl-C, exit code 128 + its number for another."""
        self._restore()
        assert self.asked is not None
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.ask(number)
        if not self.launched:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

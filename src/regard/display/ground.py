"""What the terminal looks like: how many colours it has, and whether it is dark or light.

The background is, from the surest to a guess:

    1. what `--theme` or the environment's REGARD_THEME says, dark or light
    2. what the terminal answers when it is asked (OSC 11, xterm's way, which most follow)
    3. what COLORFGBG says, which some terminals set
    4. black on the Linux console

If nothing says, it is not known, and only colours are used that can be read on black and on white.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from regard.display.palette import Colour, Depth, Palette

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

Theme = Literal["auto", "dark", "light"]

PATIENCE = 0.3
"""Seconds to wait for a terminal's answer; most need a few thousandths, a distant one a tenth."""

THEMES: dict[str, Colour] = {"dark": (12, 12, 12), "light": (255, 255, 255)}
DEPTHS: dict[str, Depth] = {"truecolor": "truecolor", "256": "256", "standard": "16", "windows": "16"}

# After the question about the background, one that every terminal answers: whoever answers only the second has no
# answer to the first, and need not be waited for.
QUESTION = b"\x1b]11;?\x1b\\" + b"\x1b[c"
ANSWER = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)")
LAST = re.compile(rb"\x1b\[\?[0-9;]*c")


def palette_of(console: "Console", theme: Theme = "auto", environment: Mapping[str, str] = os.environ) -> Palette:
    """The colours for what a console writes to.

    Args:
        theme: "dark" or "light" as somebody said; "auto" to find out.
    """
    depth = None if console.no_color or console.is_dumb_terminal else DEPTHS.get(console.color_system or "")
    if depth is None:
        return Palette()
    if theme != "auto":
        return Palette(THEMES[theme], depth)
    ground = ask() if console.file.isatty() else None
    return Palette(ground or from_environment(environment), depth)


def from_environment(environment: Mapping[str, str]) -> Colour | None:
    """The background as the environment tells it, in COLORFGBG ("15;0": text white, ground black) or TERM.

    >>> from regard.display.ground import from_environment
    >>> from_environment({"COLORFGBG": "0;default;15"})
    (255, 255, 255)
    """
    last = environment.get("COLORFGBG", "").rsplit(";", 1)[-1]
    if last.isdecimal() and int(last) < 16:
        return THEMES["light" if int(last) in (7, *range(9, 16)) else "dark"]
    return THEMES["dark"] if environment.get("TERM") == "linux" else None


def colour_in(answer: bytes) -> Colour | None:
    """The colour in a terminal's answer, whose channels have one to four hexadecimal digits.

    >>> from regard.display.ground import colour_in
    >>> colour_in(bytes([27]) + b"]11;rgb:0000/2b2b/3636")
    (0, 43, 54)
    """
    found = ANSWER.search(answer)
    if found is None:
        return None
    red, green, blue = (round(255 * int(digits, 16) / (16 ** len(digits) - 1)) for digits in found.groups())
    return red, green, blue


def ask(patience: float = PATIENCE) -> Colour | None:
    """Asks the terminal that this process runs in for its background; None where there is none, or no answer."""
    if os.environ.get("TERM", "dumb") in ("dumb", "linux"):
        return None
    try:
        import select
        import termios
        import tty

        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except (ImportError, OSError):  # not Unix, or no terminal
        return None
    with suppress(OSError, termios.error), _closing(terminal):
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return None  # in the background, where asking would stop the process
        before = termios.tcgetattr(terminal)
        if select.select([terminal], [], [], 0)[0]:
            return None  # somebody is typing ahead: those keys are not ours
        try:
            tty.setcbreak(terminal, termios.TCSADRAIN)
            os.write(terminal, QUESTION)
            return colour_in(_read(terminal, select, time.monotonic() + patience))
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    return None


def _read(terminal: int, select: Any, until: float) -> bytes:
    """What the terminal says, until it has answered both questions or time is up."""
    answer = b""
    while not LAST.search(answer):
        left = until - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            break
        part = os.read(terminal, 256)
        if not part:
            break
        answer += part
    return answer


@contextmanager
def _closing(file: int) -> "Iterator[None]":
    try:
        yield
    finally:
        os.close(file)

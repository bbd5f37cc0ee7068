"""Colours say the weight on every background, with every number of colours, and can be read."""

import re
import subprocess
import sys

import pytest
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme

from regard.display.ground import THEMES, ask, colour_in, from_environment, palette_of
from regard.display.page import KINDS
from regard.display.palette import CONTRAST, Palette, contrast, luminance

GROUNDS = {
    "black": (0, 0, 0), "dark": THEMES["dark"], "code editor": (30, 30, 30), "solarized dark": (0, 43, 54),
    "aubergine": (48, 10, 36), "navy": (0, 0, 128), "grey below the middle": (105, 105, 105),
    "grey above the middle": (140, 140, 140), "solarized light": (253, 246, 227), "paper": (250, 240, 230),
    "light": THEMES["light"],
}  # fmt: skip
SIXTEEN = {
    "xterm": [
        (0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (0, 0, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229),
        (127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255), (255, 0, 255), (0, 255, 255),
        (255, 255, 255),
    ],
    "VGA": [
        (0, 0, 0), (170, 0, 0), (0, 170, 0), (170, 85, 0), (0, 0, 170), (170, 0, 170), (0, 170, 170), (170, 170, 170),
        (85, 85, 85), (255, 85, 85), (85, 255, 85), (255, 255, 85), (85, 85, 255), (255, 85, 255), (85, 255, 255),
        (255, 255, 255),
    ],
}  # fmt: skip
"""What two common terminals make of the sixteen colours."""
WEIGHTS = [n / 250 for n in range(251)]

every_ground = pytest.mark.parametrize("ground", GROUNDS.values(), ids=GROUNDS.keys())


def shown(style: str, ground: tuple[int, int, int], sixteen: str = "xterm") -> tuple[tuple, tuple]:
    """The text's colour and its background as rich's own terminal shows a style."""
    theme = TerminalTheme(ground, (128, 128, 128), SIXTEEN[sixteen][:8], SIXTEEN[sixteen][8:])
    parsed = Style.parse(style) if style else Style()
    text = parsed.color.get_truecolor(theme) if parsed.color else (128, 128, 128)
    back = parsed.bgcolor.get_truecolor(theme, foreground=False) if parsed.bgcolor else ground
    return tuple(text), tuple(back)


def check_fills(palette: Palette, sixteen: str = "xterm") -> int:
    """That a larger weight is never nearer to the ground, and its text readable; gives how many steps there are."""
    reached, steps = 0.0, 0
    for weight in WEIGHTS:
        style = palette.fill(weight)
        text, back = shown(style, palette.ground, sixteen)
        distance = abs(luminance(back) - luminance(palette.ground))
        assert distance >= reached, f"{weight}: {style} lies back"
        if style:
            assert contrast(text, back) >= CONTRAST, f"{weight}: {style}"
            steps += distance > reached
        reached = distance
    assert steps == len(palette.fills), "every step differs from the one before"
    return steps


@every_ground
@pytest.mark.parametrize(("depth", "least"), [("truecolor", 16), ("256", 5)])
def test_a_larger_weight_is_farther_from_the_ground_and_its_text_can_be_read(ground, depth, least):
    palette = Palette(ground, depth)
    if contrast(ground, (0, 0, 0)) > 3 and contrast(ground, (255, 255, 255)) > 3:
        least = 3  # a grey in the middle leaves room for few
    assert check_fills(palette) >= least
    assert palette.fill(0.0) == palette.fill(0.003) == ""


@pytest.mark.parametrize("sixteen", SIXTEEN)
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_sixteen_colours_keep_the_order_too(theme, sixteen):
    assert check_fills(Palette(THEMES[theme], "16"), sixteen) == 3


@every_ground
@pytest.mark.parametrize("depth", ["truecolor", "256"])
def test_words_in_colour_can_be_read(ground, depth):
    palette = Palette(ground, depth)
    for style in (palette.quiet, *(palette.ink(kind.colour) for kind in KINDS.values())):
        text, _ = shown(style, ground)
        assert contrast(text, ground) >= CONTRAST, style


def test_the_check_notices_a_weight_that_lies_back_and_text_that_cannot_be_read():
    class Wrong(Palette):
        fills = ("white on rgb(60,60,60)", "white on rgb(30,30,30)")

    class Faint(Palette):
        fills = ("rgb(80,80,80) on rgb(60,60,60)",)

    for palette in (Wrong, Faint):
        with pytest.raises(AssertionError):
            check_fills(palette((0, 0, 0), "truecolor"))


def test_where_there_are_no_colours_nothing_is_coloured():
    for palette in (Palette((0, 0, 0), None), Palette(None, "16"), Palette()):
        assert not palette.coloured
        assert palette.fill(1.0) == palette.quiet == palette.ink((255, 0, 0)) == ""


@pytest.mark.parametrize("depth", ["truecolor", "256"])
def test_where_the_ground_is_not_known_colours_can_be_read_on_black_and_on_white_and_the_weights_are_written(depth):
    palette = Palette(None, depth)
    assert not palette.coloured  # so the weights stand under the text
    for ground in ((0, 0, 0), (255, 255, 255)):
        for style in (palette.quiet, *(palette.ink(kind.colour) for kind in KINDS.values()), *palette.fills):
            text, behind = shown(style, ground)
            assert contrast(text, behind) >= CONTRAST, style
    steps = [palette.fill(weight) for weight in (0.001, 0.01, 0.3, 0.9)]
    assert steps[0] == ""
    assert [("bold" in style, " on " in style) for style in steps[1:]] == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(
    ("answer", "colour"),
    [
        ("\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62c", (255, 255, 255)),
        ("\x1b]11;rgb:00/2b/36\x07", (0, 43, 54)),
        ("\x1b]11;rgba:1e1e/1e1e/1e1e/ffff\x07", (30, 30, 30)),
        ("\x1b[?62;22c", None),
        ("", None),
        ("q\x1b]11;#ffffff", None),
    ],
)
def test_a_terminals_answer_is_read(answer, colour):
    assert colour_in(answer.encode()) == colour


@pytest.mark.parametrize(
    ("environment", "theme"),
    [
        ({"COLORFGBG": "15;0"}, "dark"), ({"COLORFGBG": "0;15"}, "light"), ({"COLORFGBG": "12;default;8"}, "dark"),
        ({"COLORFGBG": "0;default;7"}, "light"), ({"COLORFGBG": "default;default"}, None), ({}, None),
        ({"COLORFGBG": "0;99999"}, None), ({"TERM": "linux"}, "dark"),
    ],
)  # fmt: skip
def test_the_environment_tells_the_theme_or_does_not(environment, theme):
    assert from_environment(environment) == (THEMES[theme] if theme else None)


def console(**options) -> Console:
    return Console(force_terminal=True, color_system="truecolor", _environ=options)


def test_no_color_and_a_dumb_terminal_have_no_colours_whatever_the_theme():
    assert palette_of(console(TERM="xterm"), "dark").coloured
    assert not palette_of(console(TERM="xterm", NO_COLOR="1"), "dark").coloured
    assert not palette_of(console(TERM="dumb"), "dark").coloured


TERMINAL = """
import os, pty, sys, select
pid, master = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm-256color"
    os.execv(sys.executable, [sys.executable, "-c", "from regard.display.ground import ask; print('ground', ask(1.0))"])
said = b""
while True:
    try:
        part = os.read(master, 4096)
    except OSError:
        break
    if not part:
        break
    said += part
    if b"\\x1b[c" in part:
        os.write(master, %r)
os.waitpid(pid, 0)
print(said.decode())
"""


@pytest.mark.parametrize(
    ("reply", "ground"),
    [(b"\x1b]11;rgb:fdfd/f6f6/e3e3\x1b\\\x1b[?62c", "(253, 246, 227)"), (b"\x1b[?62c", "None")],
)
def test_a_terminal_is_asked_and_one_without_an_answer_is_not_waited_for(reply, ground):
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL % reply], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"ground {ground}" in done.stdout
    assert "rgb:" not in re.sub(r"ground.*", "", done.stdout), "the answer must not be echoed"


def test_without_a_terminal_nothing_is_asked(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert ask() is None


def test_a_colour_is_written_so_that_rich_keeps_it():
    """A number between 16 and 255 is one of the colours that are the same everywhere."""
    for ground in GROUNDS.values():
        for style in Palette(ground, "256").fills:
            for number in re.findall(r"color\((\d+)\)", style):
                assert Color.parse(f"color({number})").number >= 16

"""Colours that fit the terminal there is: its background, and how many colours it can show.

A weight w fills the background of its text. Lightness (L* of CIELAB) goes from the terminal's own background, over
orange, to a pale orange on dark ground and a deep brown on light, in proportion to sqrt(w), so that small weights can
be seen; nothing looks like nothing. Fills come in steps, and a later step is farther from the ground in relative
luminance, whatever the ground and the colours:

    truecolor   16 steps, blended in linear light
    256         6 steps, each the colour of the cube or the greys that is nearest to the blend
    16          3 steps; a terminal may show these colours as it likes, so they are the ones that differ most

Text on a fill is black or white, whichever contrasts more, and coloured text is moved away from the ground until it
contrasts enough: 4.5 to 1, as WCAG 2 asks of text.

Where the ground is not known, luminance cannot grow away from it. Then weights are written under the text, and three
steps mark it beside that: coloured text, bold coloured text, and a fill; all of the one luminance that contrasts 4.5 to
1 with black and with white.

References: CIE 15:2004 (L*); W3C, "Web Content Accessibility Guidelines 2.1" (relative luminance, contrast).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

Colour = tuple[int, int, int]
Depth = Literal["truecolor", "256", "16"]

CONTRAST = 4.5
"""The least contrast of text, as WCAG 2 has it."""

MIN_DRAWN_WEIGHT = 0.004
"""A smaller weight is not drawn: it would read 0.00."""

MIDDLE_LUMINANCE = 0.179
"""The relative luminance whose contrast with black is that with white: 4.58 to 1."""

HUE_ON_UNKNOWN_GROUND: Colour = (190, 88, 10)
"""The hue of weights where the ground is not known."""

STEPS: dict[Depth, int] = {"truecolor": 16, "256": 6}
RAMPS: dict[bool, tuple[Colour, ...]] = {
    True: ((165, 66, 8), (255, 184, 92)),
    False: ((255, 158, 70), (125, 26, 0)),
}
"""What lies on the way to the weight 1, and what it looks like, on dark ground and on light."""

BLACK: Colour = (0, 0, 0)
WHITE: Colour = (255, 255, 255)

SIXTEEN = {True: ((4, 15), (6, 0), (15, 0)), False: ((7, 0), (6, 0), (4, 15))}
"""Fill and text by their numbers among 16 colours, on dark ground and on light."""


def luminance(colour: Colour) -> float:
    """Relative luminance: 0 black, 1 white."""
    red, green, blue = (_linear(channel) for channel in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    """Contrast of two colours: 1 none, 21 black on white.

    >>> from regard.display.palette import contrast
    >>> contrast((0, 0, 0), (255, 255, 255))
    21.0
    """
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@dataclass(frozen=True)
class Palette:
    """The colours to draw with.

    Args:
        ground: the terminal's background; None where it is not known.
        depth: how many colours it has; None where it has none.
    """

    ground: Colour | None = None
    depth: Depth | None = None

    @property
    def coloured(self) -> bool:
        """Whether colours alone tell the weights; otherwise they are written under the text."""
        return self.ground is not None and self.depth is not None

    def fill(self, weight: float) -> str:
        """The style of text that gets this weight: "" for none."""
        if weight < MIN_DRAWN_WEIGHT or not self.fills:
            return ""
        least = math.sqrt(MIN_DRAWN_WEIGHT)
        strength = (math.sqrt(min(1.0, weight)) - least) / (1 - least)
        return self.fills[max(0, math.ceil(strength * len(self.fills)) - 1)]

    def ink(self, colour: Colour) -> str:
        """The style of text in this colour, made lighter or darker until it can be read: "" where that is not sure."""
        if self.depth not in ("truecolor", "256"):
            return ""
        if self.ground is None:
            return self._ink_on_either(colour)
        towards = _readable(self.ground)
        for part in range(41):
            mixed = _mix(colour, towards, part / 40)
            if contrast(mixed, self.ground) >= CONTRAST:
                break
        if self.depth == "truecolor":
            return _rgb(mixed)
        ground = self.ground
        readable = (number for number in _INDEXED if contrast(_INDEXED[number], ground) >= CONTRAST)
        return f"color({min(readable, key=lambda number: _apart(_INDEXED[number], mixed))})"

    def _ink_on_either(self, colour: Colour) -> str:
        """The style of text that can be read on black and on white."""
        towards = BLACK if luminance(colour) > MIDDLE_LUMINANCE else WHITE
        mixes = [_mix(colour, towards, part / 200) for part in range(201)]
        mixed = min(mixes, key=lambda one: abs(luminance(one) - MIDDLE_LUMINANCE))
        if self.depth == "truecolor":
            return _rgb(mixed)
        readable = (n for n, one in _INDEXED.items() if min(contrast(one, BLACK), contrast(one, WHITE)) >= CONTRAST)
        return f"color({min(readable, key=lambda number: _apart(_INDEXED[number], mixed))})"

    @property
    def quiet(self) -> str:
        """The style of what is less important."""
        return self.ink((128, 128, 128))

    @cached_property
    def fills(self) -> tuple[str, ...]:
        """The steps, from the smallest weight to 1."""
        if self.depth is None or (self.ground is None and self.depth == "16"):
            return ()
        if self.ground is None:
            ink = self.ink(HUE_ON_UNKNOWN_GROUND)
            return ink, f"bold {ink}", f"bold {_rgb(WHITE) if self.depth == 'truecolor' else 'color(231)'} on {ink}"
        if self.depth == "16":
            return tuple(f"color({ink}) on color({fill})" for fill, ink in SIXTEEN[is_dark(self.ground)])
        blends = ramp(self.ground, STEPS[self.depth])
        if self.depth == "truecolor":
            return tuple(f"{_rgb(_readable(blend))} on {_rgb(blend)}" for blend in blends)
        away = 1 if is_dark(self.ground) else -1
        styles, reached = [], luminance(self.ground)
        for blend in blends:
            farther = [n for n in _WARM if away * luminance(_INDEXED[n]) > away * reached]
            if not farther:
                break
            number = min(farther, key=lambda n: _apart(_INDEXED[n], blend))
            reached = luminance(_INDEXED[number])
            styles.append(f"color({_number_of(_readable(_INDEXED[number]))}) on color({number})")
        return tuple(styles)


def is_dark(ground: Colour) -> bool:
    """Whether white can be read better on it than black."""
    return _readable(ground) == WHITE


def ramp(ground: Colour, steps: int) -> list[Colour]:
    """Colours from the ground (itself left out) to that of the weight 1, evenly in lightness."""
    low = luminance(ground)
    *between, target = RAMPS[is_dark(ground)]
    high = luminance(target)
    # a ground in the middle may lie beyond what is on the way
    way = [ground, *(c for c in between if min(low, high) < luminance(c) < max(low, high)), target]
    first, last = _lightness(low), _lightness(high)
    found = []
    for step in range(1, steps + 1):
        light = _luminance_of(first + (last - first) * step / steps)
        for one, other in pairwise(way):
            start, stop = luminance(one), luminance(other)
            part = (light - start) / (stop - start)
            if part <= 1 or other == target:
                found.append(_mix(one, other, part))
                break
    return found


def _readable(ground: Colour) -> Colour:
    return max(WHITE, BLACK, key=lambda colour: contrast(colour, ground))


def _mix(one: Colour, other: Colour, part: float) -> Colour:
    """Blended in linear light, so that luminance goes straight from one to the other."""
    part = min(1.0, max(0.0, part))
    red, green, blue = (_channel((1 - part) * _linear(a) + part * _linear(b)) for a, b in zip(one, other, strict=True))
    return red, green, blue


def _linear(channel: int) -> float:
    value = channel / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def _channel(light: float) -> int:
    return round(255 * (12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055))


def _lightness(light: float) -> float:
    """L* of CIELAB."""
    return 116 * light ** (1 / 3) - 16 if light > 216 / 24389 else light * 24389 / 27


def _luminance_of(lightness: float) -> float:
    return ((lightness + 16) / 116) ** 3 if lightness > 8 else lightness * 27 / 24389


def _apart(one: Colour, other: Colour) -> float:
    """How different two colours look, roughly: channels weighted by what the eye makes of them."""
    red, green, blue = (a - b for a, b in zip(one, other, strict=True))
    return 2.0 * red * red + 4.0 * green * green + 3.0 * blue * blue


def _rgb(colour: Colour) -> str:
    return f"rgb({colour[0]},{colour[1]},{colour[2]})"


def _indexed() -> dict[int, Colour]:
    """The 240 of the 256 colours that look the same in every terminal: a cube of six steps, and 24 greys."""
    steps = (0, 95, 135, 175, 215, 255)
    cube = {
        16 + 36 * r + 6 * g + b: (steps[r], steps[g], steps[b]) for r in range(6) for g in range(6) for b in range(6)
    }
    return cube | {232 + n: (8 + 10 * n, 8 + 10 * n, 8 + 10 * n) for n in range(24)}


_INDEXED = _indexed()
_WARM = [n for n, (r, g, b) in _INDEXED.items() if r > g >= b and (g - b) <= 0.72 * (r - b) and (r - b) >= 0.3 * r]
"""Reds to oranges: a fill of another hue, however near, would look like another thing."""


def _number_of(colour: Colour) -> int:
    return next(number for number, known in _INDEXED.items() if known == colour)

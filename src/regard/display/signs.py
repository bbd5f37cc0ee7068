"""Signs for characters that must not be obeyed: line ends, controls, marks that turn the direction of writing."""

import unicodedata

SIGNS = {"\n": "↵", "\t": "⇥", "\x7f": "␡"} | {
    chr(code): chr(0x2400 + code) for code in range(32) if code not in (9, 10)
}
"""Signs for control characters, such as ␛ for escape."""

JOINERS = "\u200c\u200d"
"""Invisible characters that scripts need to be written rightly: left as they are."""

NO_LETTERS = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
"""Categories of Unicode that are shown by number: controls, marks of direction, line ends, what is not assigned."""


def sign(character: str) -> str:
    """A character, or the sign that stands for it.

    >>> sign("a") + sign(chr(27)) + sign(chr(0x202E))
    'a␛<202E>'
    """
    if character in SIGNS:
        return SIGNS[character]
    if unicodedata.category(character) in NO_LETTERS and character not in JOINERS:
        return f"<{ord(character):04X}>"
    return character

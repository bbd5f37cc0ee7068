"""Dates as people write them, in many languages and formats, each with its ISO form: data to train a translator on.

    python examples/dates.py data/dates
    regard train runs/dates --task translate --data data/dates/train.tsv

Names, orders and punctuation come from Babel's copy of the Unicode locale data (CLDR), so nothing is downloaded. Four
files are written, each with the columns source, target, locale, format and typed:

    train.tsv               to learn from
    unseen-formats.tsv      formats that are in no other file, of languages that are in train.tsv
    unseen-languages.tsv    languages that are in no other file
    ambiguous.tsv           what was left out, with the two or more dates that each text can mean

**One text, one date.** 03/04/2026 is a day in March to some and a day in April to others. A text is kept only if
everybody who could have written it meant the same date: for every format of every locale, all shapes of its texts are
listed (a shape has N in place of a digit), with what the digits mean there and which month a name stands for. A text
whose shape has two readings that are different dates is left out; 13/04/2026 has only one, since there is no thirteenth
month. So are years of two digits, which do not say the century. Calendars other than the Gregorian are left out.

**As typed.** A third of the texts is written as people type: in small or capital letters, without accents, without
full stops and commas. A typed text is left out if it could be another date's typed or printed text.
"""

import argparse
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from random import Random
from typing import NamedTuple

from babel import Locale
from babel.dates import DateTimeFormat, tokenize_pattern

SEEN = [
    "af", "am", "ar", "ar_EG", "az", "be", "bg", "bn", "bs", "ca", "cs", "cy", "da", "de", "de_AT", "de_CH", "el", "en",
    "en_AU", "en_CA", "en_GB", "en_IN", "en_ZA", "es", "es_MX", "es_US", "et", "fa", "fi", "fr", "fr_CA", "ga", "gu",
    "he", "hr", "hu", "hy", "id", "is", "it", "ja", "ka", "kk", "kn", "ko", "lo", "lt", "lv", "ml", "mn", "mr", "ms",
    "my", "nb", "ne", "nl", "nn", "pa", "pl", "pt", "pt_PT", "ro", "ru", "si", "sl", "sq", "sr", "sr_Latn", "sv", "sw",
    "ta", "te", "th", "tr", "uk", "ur", "uz", "vi", "zh", "zh_Hant",
]  # fmt: skip
UNSEEN = ["ast", "br", "eo", "eu", "fil", "fo", "fy", "gl", "hi", "lb", "mk", "mt", "sk", "so", "yue", "zu"]

STYLES = ("medium", "long", "full", "short")
SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd", "yMMMMd", "yMMMMEd")

EVERYWHERE = (
    "d MMMM y", "d. MMMM y", "MMMM d, y", "d MMM y", "d-MMM-y", "y-MM-dd", "d/M/y", "dd/MM/y", "d.M.y", "dd.MM.y",
    "y/MM/dd", "EEE d MMM y", "EEEE, d MMMM y", "EEEE d MMMM y",
)  # fmt: skip
"""Formats in which many write, whatever is usual in their language."""

ENGLISH = ("MMMM d'TH', y", "d'TH' MMMM y", "'the' d'TH' 'of' MMMM y", "EEEE, MMMM d'TH', y", "MMM d'TH' y")
"""Ordinals, which the locale data has not; TH is st, nd, rd or th."""

NEW_FORMATS = ("y MMMM d", "d MMMM, y", "EEEE d. MMMM y", "MMM d y", "dd-MMM-y", "y MMM d, EEE")
"""Formats for the measurement alone."""

ZEROS = {
    "arab": 0x660, "arabext": 0x6F0, "deva": 0x966, "beng": 0x9E6, "gujr": 0xAE6, "guru": 0xA66, "mlym": 0xD66,
    "knda": 0xCE6, "telu": 0xC66, "tamldec": 0xBE6, "thai": 0xE50, "laoo": 0xED0, "mymr": 0x1040, "khmr": 0x17E0,
}  # fmt: skip
"""The digit 0 of a numbering system."""

DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Marks of direction, which nobody sees."""

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)


class Piece(NamedTuple):
    """A part of a date as it is written: d, M, y, E for what is a field of the date, "" for what stands between."""

    role: str
    text: str


@dataclass(frozen=True)
class Format:
    """One way in which one locale writes dates.

    Attributes:
        pattern: as in the locale data: d is the day, M or L the month, y the year, E or c the day of the week.
        zero: the digit 0 of a numbering system, as a code point; None: 0 to 9.
    """

    locale: Locale
    pattern: str
    zero: int | None = None

    @property
    def name(self) -> str:
        return self.pattern if self.zero is None else f"{self.pattern} in digits of its own"

    @property
    def parts(self) -> set[str]:
        """The letters of its fields, without what is quoted."""
        return set(re.sub("'[^']*'", "", self.pattern.replace("L", "M").replace("c", "E")))

    @property
    def named(self) -> bool:
        """Whether the month is a word."""
        return "MMM" in self.pattern.replace("L", "M")

    def pieces(self, day: date) -> list[Piece]:
        """A date in this format."""
        fields = DateTimeFormat(day, self.locale)
        found = []
        for kind, value in tokenize_pattern(self.pattern):
            if kind == "chars":
                found.append(Piece("", value.replace("TH", ordinal(day.day))))
            else:
                letter, count = value
                role = {"L": "M", "c": "E", "e": "E"}.get(letter, letter)
                found.append(Piece(role, fields[letter * count]))
        if self.zero is None:
            return found
        native = {ord(str(n)): chr(self.zero + n) for n in range(10)}
        return [Piece(role, text.translate(native)) for role, text in found]


def formats(names: Sequence[str], own: Sequence[str] | None = None) -> list[Format]:
    """The formats of some locales: their own and those used everywhere, or a list of patterns."""
    found = []
    for name in names:
        locale = Locale.parse(name)
        if own is None:
            usual = [locale.date_formats[style].pattern for style in STYLES]
            usual += [locale.datetime_skeletons[key].pattern for key in SKELETONS if key in locale.datetime_skeletons]
            patterns = [*usual, *EVERYWHERE, *(ENGLISH if locale.language == "en" else ())]
            patterns = [pattern for pattern in patterns if pattern not in NEW_FORMATS]
        else:
            patterns = list(own)
        zeros = (None,) if (zero := ZEROS.get(locale.default_numbering_system)) is None else (None, zero)
        for pattern in dict.fromkeys(re.sub("y+", "y", pattern) for pattern in patterns):
            forms = [Format(locale, pattern, zero) for zero in zeros]
            found += [form for form in forms if {"d", "M", "y"} <= form.parts]
    return found


def written(pieces: Iterable[Piece], typed: str = "printed") -> str:
    """The text of pieces, without marks of direction and with plain single spaces."""
    text = "".join(TYPED[typed](piece.text) for piece in pieces)
    text = "".join(" " if c.isspace() else c for c in text if c not in DIRECTIONS)
    return re.sub(" +", " ", text).strip()


def ordinal(day: int) -> str:
    return "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def without_accents(text: str) -> str:
    """Latin letters without their marks; the marks of other scripts are part of the letter."""
    kept, latin = [], False
    for c in unicodedata.normalize("NFD", text):
        if not unicodedata.combining(c):
            latin = "LATIN" in unicodedata.name(c, "")
        elif latin:
            continue
        kept.append(c)
    return unicodedata.normalize("NFC", "".join(kept))


def without_stops(text: str) -> str:
    return re.sub("[.,،]", " ", text)


TYPED: dict[str, Callable[[str], str]] = {
    "printed": lambda text: text,
    "small letters": str.lower,
    "capitals": str.upper,
    "no accents": without_accents,
    "no stops": without_stops,
    "plain": lambda text: without_stops(without_accents(text)).lower(),
}
"""What typing does to a text."""


class Reading(NamedTuple):
    """What the numbers of a shape are, in order, and the month that a name stands for; None: a number is the month."""

    roles: tuple[str, ...]
    month: int | None

    @classmethod
    def of(cls, pieces: Iterable[Piece], day: date) -> "Reading":
        """How a format reads its own text of a day."""
        roles = [role for role, text in pieces for _ in re.findall(r"\d+", text)]
        return cls(tuple(roles), None if "M" in roles else day.month)

    def date(self, numbers: Sequence[int]) -> date | None:
        """The date that numbers are under this reading; None if there is no such date."""
        parts = dict(zip(self.roles, numbers, strict=True))
        try:
            return date(parts["y"], self.month or parts["M"], parts["d"])
        except ValueError:
            return None


class Readings:
    """Every shape that some formats give, printed or typed, and how it can be read there.

    >>> american, british = formats(["en_US"], ["M/d/y"]), formats(["en_GB"], ["dd/MM/y", "d/M/y"])
    >>> both = Readings([*american, *british], ["printed"])
    >>> sorted(map(str, both.dates("3/4/2026"))), sorted(map(str, both.dates("13/4/2026")))
    (['2026-03-04', '2026-04-03'], ['2026-04-13'])
    """

    def __init__(self, known: Iterable[Format], typed: Iterable[str]) -> None:
        self._of: dict[str, set[Reading]] = defaultdict(set)
        days = list(samples())
        for form in known:
            for day in days if "E" in form.parts else days[: len(days) // 7]:
                pieces = form.pieces(day)
                reading = Reading.of(pieces, day)
                for how in typed if form.named else ["printed"]:
                    self._of[shape(written(pieces, how))].add(reading)

    def __contains__(self, text: str) -> bool:
        return shape(text) in self._of

    def dates(self, text: str) -> set[date]:
        """Every date that a text can mean."""
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        found = {reading.date(numbers) for reading in self._of.get(shape(text), ())}
        return {day for day in found if day is not None}


def shape(text: str) -> str:
    """A text with N in place of every digit."""
    return re.sub(r"\d", "N", text)


def samples() -> Iterator[date]:
    """Days whose texts show every shape: each month, day of the week and ordinal, with one digit and with two."""
    for weekday in range(7):
        for month in range(1, 13):
            for day in (1, 2, 3, 4, 13, 21, 22, 23):
                yield next(d for y in range(1990, 2090) if (d := date(y, month, day)).weekday() == weekday)


class Row(NamedTuple):
    source: str
    target: str
    locale: str
    format: str
    typed: str


def draw(known: Sequence[Format], count: int, random: Random, *, typed_share: float) -> Iterator[tuple[Row, date]]:
    """Random dates in random formats: every locale as often as any other."""
    by_locale = defaultdict(list)
    for form in known:
        by_locale[str(form.locale)].append(form)
    days = (LAST - FIRST).days + 1
    for _ in range(count):
        locale = random.choice(list(by_locale))
        form = random.choice(by_locale[locale])
        day = FIRST + timedelta(random.randrange(days))
        how = random.choice(list(TYPED)[1:]) if form.named and random.random() < typed_share else "printed"
        yield Row(written(form.pieces(day), how), day.isoformat(), locale, form.name, how), day


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the files are written")
    parser.add_argument("--count", type=int, default=400_000, help="texts to draw for train.tsv")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = formats(SEEN), formats(UNSEEN)
    new = formats(SEEN, NEW_FORMATS)
    everybody = [*seen, *unseen, *new]
    printed, typed = Readings(everybody, ["printed"]), Readings(everybody, list(TYPED))
    known = Readings(seen, list(TYPED))

    def meanings(row: Row) -> set[date]:
        return (printed if row.typed == "printed" else typed).dates(row.source)

    ambiguous: list[Row] = []

    def decided(rows: Iterable[tuple[Row, date]]) -> Iterator[Row]:
        for row, day in rows:
            found = meanings(row)
            if found == {day}:
                yield row
            else:
                ambiguous.append(row._replace(target=" ".join(sorted(map(str, found)))))

    numbers = Random(given.seed)
    files = {
        "train": decided(draw(seen, given.count, numbers, typed_share=1 / 3)),
        "unseen-formats": (
            row for row in decided(draw(new, given.count // 40, numbers, typed_share=0)) if row.source not in known
        ),
        "unseen-languages": decided(
            draw([form for form in unseen if form.named], given.count // 40, numbers, typed_share=0)
        ),
        "ambiguous": ambiguous,
    }
    for name, rows in files.items():
        chosen = list({row.source: row for row in rows}.values())
        with (given.folder / f"{name}.tsv").open("w", encoding="utf-8", newline="") as file:
            file.writelines("\t".join(row) + "\n" for row in (Row._fields, *chosen))
        print(f"{given.folder / name}.tsv  {len(chosen):,} texts")


if __name__ == "__main__":
    main()

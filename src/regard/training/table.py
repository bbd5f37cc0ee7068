"""Rows of texts from a table: a CSV, TSV or JSONL file with named columns.

    .csv     fields in quotes where they hold a comma, a quote or a newline (RFC 4180); the first row names the columns
    .tsv     fields apart by tabs, in quotes where the program that wrote them quotes; the first row names the columns
    .jsonl   one JSON object in each line

A row in which a wanted field is missing or blank is left out, and counted.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from regard.training.corpus import MAX_FILE_BYTES
from regard.training.text import read_text


class Table(NamedTuple):
    """Some columns of a file.

    Attributes:
        columns: their names. rows: the fields of these columns, without space around them.
        blank: how many rows were left out because a field was missing or blank.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    blank: int


def read_table(path: str | PathLike[str], columns: Sequence[str | None]) -> Table:
    """Some columns of a table.

    Args:
        path: a .csv, .tsv or .jsonl file.
        columns: their names; None takes the file's own column at that place.
    Raises:
        ValueError: the file is missing, no text or of another kind, a row is malformed, a column is not there, or there
            is no row with all of them. The message names the file and the line.

    >>> Path("colours.csv").write_text('name,colour\\nsky,blue\\n"grass, fresh",green\\nair,\\n') and None
    >>> read_table("colours.csv", ["colour", None])
    Table(columns=('colour', 'name'), rows=[('blue', 'sky'), ('green', 'grass, fresh')], blank=1)
    >>> Path("colours.csv").unlink()
    """
    kind = Path(path).suffix.lower()
    if Path(path).is_file() and kind not in KINDS:
        raise ValueError(f"{path}: expected a table, a file in {', '.join(KINDS)}, got {kind or 'no ending'}")
    text = read_text(path, largest=MAX_FILE_BYTES)
    if kind not in KINDS:
        raise ValueError(f"{path}: expected a table, a file in {', '.join(KINDS)}")
    names, records = KINDS[kind](str(path), text)
    if not names:
        raise ValueError(f"{path}: expected rows with names, found none")
    chosen = _chosen(str(path), names, columns)
    found = [tuple(record.get(name, "").strip() for name in chosen) for record in records]
    rows = [row for row in found if all(row)]
    if not rows:
        blank = f", {len(found):,} with a blank {' or '.join(chosen)}" if found else " below the names of the columns"
        raise ValueError(f"{path}: expected rows with {' and '.join(chosen)}, found none{blank}")
    return Table(chosen, rows, len(found) - len(rows))


def _chosen(path: str, names: Sequence[str], columns: Sequence[str | None]) -> tuple[str, ...]:
    """The columns by name; for None, the first of those that nobody asked for."""
    there = f"the file has {', '.join(names)}"
    for name in columns:
        if name is not None and name not in names:
            raise ValueError(f"{path}: expected a column {name!r}, {there}")
    rest = iter([name for name in names if name not in columns])
    if len(names) < len(columns):
        raise ValueError(f"{path}: expected {len(columns)} columns or more, {there or 'none'}")
    return tuple(next(rest) if name is None else name for name in columns)


Records = tuple[list[str], Iterator[dict[str, str]]]


def _csv(path: str, text: str) -> Records:
    return _with_names(path, _quoted(path, text, ","))


def _quoted(path: str, text: str, apart: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=apart, strict=True)
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num:,} is no CSV: {error}") from None


def _tsv(path: str, text: str) -> Records:
    """Some programs quote fields that hold a quote, a tab or a newline, as in a CSV; others write them as they are."""
    plain = [line.split("\t") for line in text.split("\n")]
    rows = plain
    if '"' in text:
        try:
            quoted = list(_quoted(path, text, "\t"))
        except ValueError:
            pass
        else:
            if _even(quoted) and (not _even(plain) or _in_quotes(plain)):
                rows = quoted
    return _with_names(path, iter(rows))


def _even(rows: list[list[str]]) -> bool:
    """Whether every row has as many fields as the first."""
    return all(len(row) == len(rows[0]) for row in rows if any(row))


def _in_quotes(rows: list[list[str]]) -> bool:
    """Whether fields have what only a program that quotes writes: doubled quotes, or quotes around every name."""
    return all(_QUOTED.fullmatch(name) for name in rows[0]) or any(
        _QUOTED.fullmatch(field) and '""' in field[1:-1] for row in rows for field in row
    )


_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def _with_names(path: str, lines: Iterator[list[str]]) -> Records:
    """Rows under the names that the first of them gives."""
    names = [name.strip() for name in next(lines, [])]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: expected each column once, got {', '.join(sorted(twice))} twice")

    def records() -> Iterator[dict[str, str]]:
        for number, fields in enumerate(lines, 2):
            if not any(fields):
                continue
            if len(fields) > len(names):
                raise ValueError(
                    f"{path}: row {number:,} has {len(fields)} fields, more than the {len(names)} that are named: "
                    f"{', '.join(names)}"
                )
            yield dict(zip(names, fields, strict=False))

    return names, records()


def _jsonl(path: str, text: str) -> Records:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number:,} is no JSON: {error.msg} at character {error.pos + 1}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}: line {number:,}: expected an object with names and texts, got {line[:40]!r}")
        found.append({name: _field(value) for name, value in record.items()})
    return list(dict.fromkeys(name for record in found for name in record)), iter(found)


def _field(value: Any) -> str:
    """A text as it is, null as blank, anything else as JSON."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


KINDS: dict[str, Callable[[str, str], Records]] = {".csv": _csv, ".tsv": _tsv, ".jsonl": _jsonl}
"""What a file's ending says about it."""

"""Training texts, and held-out texts for evaluation.

**Files.** Every Python installation carries its standard library as source: some thirty megabytes of code, comments and
documentation by many hands, under a free licence, already on the machine. `standard_library` collects it; `folder` and
`files` take texts of your own.

**Held out.** About one file in twenty is never trained on, and tells how well the model does on text it has not seen.
Which one is decided by a hash of its relative path, so it is the same on every machine and does not change when other
files come or go. Of the standard library, only source and documentation are held out, not tests and tables of
characters. A copy is no test: of files with the same text only the first is kept, and a held-out file most of
whose text stands, line for line, in the training files is left out of both.
"""

import hashlib
import io
import lzma
import os
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from regard.training.text import read_text

HELD_OUT_ONE_IN = 20

MAX_FILE_BYTES = 2**30
"""Bytes of the largest file that is taken."""

MODEL_FILES = ("model.safetensors", "progress.safetensors")
"""What tells the folder of a model: its card and its vocabulary are no texts to learn from."""

SNIFF_BYTES = 2**13
"""Bytes at a file's beginning that tell whether it is binary."""


KINDS = {
    "it has the same text": "the same as another",
    "held out, but": "held out, but like a training file",
    "it is binary": "binary",
    "expected text, got NUL": "binary",
    "it is empty": "empty",
    "the file is empty": "empty",
    "expected UTF-8": "not UTF-8",
    "expected at most": "too large",
}
"""What is said when files are counted, by how the reason begins."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text and where it came from, as a path relative to its collection, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from and texts to measure with.

    Args:
        training: sorted by path.
        held_out: sorted by path; may be empty where there is next to nothing to learn from.
        skipped: path and reason of every file that was found and not taken.
    """

    training: tuple[TextFile, ...]
    held_out: tuple[TextFile, ...]
    skipped: Mapping[str, str]

    def __str__(self) -> str:
        """A summary in a line or two: number of files by kind, and which were skipped, and why."""
        every = (*self.training, *self.held_out)
        size = sum(len(file.text.encode()) for file in every)
        lines = [
            f"{len(every):,} {'text' if len(every) == 1 else 'texts'} ({_endings(file.path for file in every)}), "
            f"{size / 1e6:,.1f} MB; {len(self.held_out):,} held out"
        ]
        reasons = Counter(_kind(reason) for reason in self.skipped.values())
        if reasons:
            lines.append("skipped: " + ", ".join(f"{count:,} {kind}" for kind, count in reasons.most_common()))
        return "\n".join(lines)

    def digest(self) -> str:
        """The SHA-256 of every path and text, in hexadecimal: two runs with the same digest had the same data."""
        total = hashlib.sha256()
        for part in (self.training, self.held_out):
            for file in part:
                for field in (file.path, file.text):
                    total.update(hashlib.sha256(field.encode()).digest())
            total.update(b"end of part")
        return total.hexdigest()


def standard_library(root: str | PathLike[str] | None = None) -> Corpus:
    """The source and documentation of Python's standard library.

    Every `.py` file, decoded as Python would (PEP 263), and every `.txt` and `.rst` outside the tests, where those are
    data. Not taken: installed packages, caches, what the build wrote about its own machine, and test inputs that are
    broken on purpose.

    Args:
        root: the library's folder; by default that of the Python that runs.

    Raises:
        ValueError: there are no files, as in a Python that keeps its library in a zip archive.
    """
    library = Path(sysconfig.get_path("stdlib") if root is None else root)
    taken, skipped = [], {}
    for path in _walk(library):
        if not _is_library_text(path):
            continue
        try:
            data = (library / path).read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
            text.encode()  # some encodings can give what UTF-8 cannot hold
        except (SyntaxError, LookupError, UnicodeError, OSError) as error:
            skipped[path] = str(error)
            continue
        if "\0" in text:
            skipped[path] = "it has a NUL character"
        else:
            taken.append(TextFile(path, text))
    return _split(taken, skipped, where=library, may_be_held_out=_is_source)


def folder(path: str | PathLike[str], pattern: str | None = None) -> Corpus:
    """The texts of a folder and of those in it.

    Args:
        path: the folder.
        pattern: which of its files, as in `pathlib.Path.glob`; None takes every file that holds text, except in hidden
            folders, caches and installed packages. What is no text is skipped; `Corpus.skipped` says why. The folders
            of models are left out in either case.

    Raises:
        ValueError: it is not a folder, or none of its files match and hold text; the message says what is there.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"{path}: expected a folder")
    here = [name for name in _walk(root, hidden=False) if (root / name).is_file()]
    if pattern is None:
        names = here
    else:
        models = {place.parent for kind in MODEL_FILES for place in root.rglob(kind)}
        found = [file for file in root.glob(pattern) if file.is_file() and not models & {*file.parents}]
        names = [file.relative_to(root).as_posix() for file in found]
    taken, skipped = [], {}
    for name in names:
        try:
            if (nul := _nul(root / name)) >= 0:
                skipped[name] = f"it is binary, with NUL at byte {nul:,}"
            else:
                taken.append(TextFile(name, read_text(root / name, largest=MAX_FILE_BYTES)))
        except (ValueError, OSError) as error:
            skipped[name] = str(error).removeprefix(f"{root / name}: ").partition("\n")[0]
    if not names:
        there = f"; the folder holds {_endings(here)}" if here else "; the folder holds no file"
        hint = "\n  hint: without a pattern every file that holds text is taken" if here and pattern else ""
        raise ValueError(f"{root / (pattern or '')}: expected texts, found none{there}{hint}")
    return _split(taken, skipped, where=root / (pattern or ""))


def files(paths: Sequence[str | PathLike[str]]) -> Corpus:
    """The texts of the files that are named. Of a single file, its last lines are held out.

    Raises:
        ValueError: no file is named, or one cannot be read.
    """
    if isinstance(paths, (str, PathLike)) or not paths:
        raise ValueError(f"paths: expected a list of one file or more, got {paths!r}")
    absolute = dict.fromkeys(Path(os.path.abspath(path)) for path in paths)
    root = os.path.commonpath([file.parent for file in absolute])
    texts = [TextFile(file.relative_to(root).as_posix(), read_text(file, largest=MAX_FILE_BYTES)) for file in absolute]
    return _split(texts, {}, where=root)


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Bits that xz, at its strongest, needs per byte of the joined texts in UTF-8: the yardstick for a language model.

    Whoever predicts text can compress it, to its cross-entropy in bits, so the two numbers can be compared.

    Raises:
        ValueError: there is no text.

    >>> xz_bits_per_byte(["spam " * 10_000]) < 0.1
    True
    """
    data = "".join(texts).encode()
    if not data:
        raise ValueError("texts: expected some text, got none")
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def _walk(root: Path, *, hidden: bool = True) -> Iterator[str]:
    """Relative paths of the files below root, with forward slashes, but for installed packages and caches.

    Args:
        hidden: whether files and folders whose name begins with a dot, and folders of models, are among them.
    """
    for place, folders, names in os.walk(root):
        left_out = {"site-packages", "dist-packages", "__pycache__"} | (set() if hidden else {"node_modules"})
        folders[:] = [name for name in folders if name not in left_out and (hidden or not name.startswith("."))]
        if not hidden and set(MODEL_FILES) & set(names):
            folders.clear()
            continue
        for name in names:
            if hidden or not name.startswith("."):
                yield (Path(place) / name).relative_to(root).as_posix()


def _nul(file: Path) -> int:
    """Where the beginning of a file has its first NUL, which no text has; -1 for nowhere."""
    with file.open("rb") as stream:
        return stream.read(SNIFF_BYTES).find(0)


def _endings(names: Iterable[str]) -> str:
    """How many files there are of each kind, the most frequent first: '12 .md, 3 .png'."""
    kinds = Counter(Path(name).suffix.lower() or "without an ending" for name in names)
    counts = sorted(kinds.items(), key=lambda entry: (-entry[1], entry[0]))
    more = f", {sum(n for _, n in counts[5:]):,} others" if len(counts) > 5 else ""
    return ", ".join(f"{n:,} {ending}" for ending, n in counts[:5]) + more


def _is_library_text(path: str) -> bool:
    parts = path.split("/")
    if path.startswith(("lib2to3/tests/data/", "test/tokenizedata/", "test/cjkencodings/", "ensurepip/_bundled/")):
        return False
    # written by the build or by the installation: about this machine, not part of the library
    if parts[0].startswith(("config-", "_sysconfigdata")) or path in {"sitecustomize.py", "usercustomize.py"}:
        return False
    if path.endswith(".py"):
        return True
    return path.endswith((".txt", ".rst")) and not {"test", "tests"} & set(parts)


def _split(
    found: Sequence[TextFile],
    skipped: Mapping[str, str],
    *,
    where: object,
    may_be_held_out: Callable[[str], bool] = lambda path: True,
) -> Corpus:
    """Training and held-out files: see the module's docstring. One file alone is cut in two, at the end of a line."""
    skipped = dict(skipped)
    first: dict[str, str] = {}
    texts = []
    for file in sorted(found, key=lambda file: file.path):
        if not file.text.strip():
            skipped[file.path] = "it is empty"
        elif file.text in first:
            skipped[file.path] = f"it has the same text as {first[file.text]}"
        else:
            first[file.text] = file.path
            texts.append(file)
    if not texts:
        reasons = "".join(f"\n  {path}: {reason}" for path, reason in list(skipped.items())[:3])
        raise ValueError(f"{where}: expected texts, found none{reasons and ', only:'}{reasons}")
    if len(texts) == 1:
        (file,) = texts
        cut = file.text.rfind("\n", 0, round(len(file.text) * (1 - 1 / HELD_OUT_ONE_IN))) + 1
        if not cut:
            return Corpus((file,), (), skipped)
        return Corpus((TextFile(file.path, file.text[:cut]),), (TextFile(file.path, file.text[cut:]),), skipped)

    ranked = sorted((file.path for file in texts if may_be_held_out(file.path)), key=_rank)
    under = sum(_rank(path)[0] == 0 for path in ranked)
    few = min(max(under, 1), len(texts) - 1)
    chosen = set(ranked[:few])
    training = tuple(file for file in texts if file.path not in chosen)
    known = {line for file in training for line in _telling_lines(file.text)}
    held_out = []
    for file in texts:
        if file.path in chosen:
            lines = list(_telling_lines(file.text))
            if 2 * sum(len(line) for line in lines if line in known) > sum(map(len, lines)):
                skipped[file.path] = "held out, but most of its lines stand in training files"
            else:
                held_out.append(file)
    return Corpus(training, tuple(held_out), skipped)


def _kind(reason: str) -> str:
    """The kind of a reason for which a file is skipped, for counting."""
    return next((kind for words, kind in KINDS.items() if reason.startswith(words)), "unreadable")


def _telling_lines(text: str) -> Iterator[str]:
    """Lines that are unlikely to occur in two files by chance."""
    return (line for line in map(str.strip, text.splitlines()) if len(line) >= 20)


def _rank(path: str) -> tuple[int, int]:
    """Which files are held out first: one in HELD_OUT_ONE_IN starts with 0. It depends on the path alone."""
    number = int.from_bytes(hashlib.sha256(path.encode()).digest(), "big")
    return number % HELD_OUT_ONE_IN, number


def _is_source(path: str) -> bool:
    """Whether a file of the library is neither a test nor a table of characters, which tell little of reading code."""
    return not {"test", "tests", "idle_test"} & set(path.split("/")[:-1]) and not path.startswith("encodings/")

"""What a model learns from: files, which of them are held out, and rows of tokens.

**Files.** Every Python installation carries its standard library as source: some thirty megabytes of code, comments and
documentation by many hands, under a free licence, already on the machine. `standard_library` collects it; `folder` and
`files` take texts of your own.

**Held out.** About one file in twenty is never trained on, and tells how well the model does on text it has not seen.
Which one is decided by a hash of its relative path, so it is the same on every machine and does not change when other
files come or go. Of the standard library, only source and documentation are held out, not tests and tables of
characters. A copy is no test: of files with the same text only the first is kept, and a held-out file most of
whose text stands, line for line, in the training files is left out of both.

**Rows.** Documents are not all as long as the context. They are laid end to end, each opened by `<|end|>`, and the
chain is cut into rows; along with its tokens each row carries document numbers, with which `regard.Document` keeps
attention inside its document:

    tokens     <|end|>  the  cat      <|end|>  a    dog  ran
    targets    the      cat  <|end|>  a        dog  ran  <|end|>
    documents  0        0    0        1        1    1    1

So `<|end|>` is learnt twice. As the target after a document's last token it says that the document ends; as the first
token of the next it says that one begins, with nothing before it in sight. A model that is to write from nothing is
given one `<|end|>`.

The chain is a ring: its end is followed by its beginning. Every epoch shuffles the documents, begins to cut somewhere
else and shuffles the rows. All of that follows from the seed and the number of the epoch alone, so a run's place in its
data is one integer, the number of rows taken so far.

**Repeats.** Attention can copy: a head that looks for the earlier occurrence of the present token, and reads what came
after it, predicts any repetition (an induction head [1]). Text contains few clean examples. A share of rows may
therefore be replaced by random tokens, repeated until the row is full, where copying is the only thing to learn.

References:
    [1] Olsson et al., "In-context Learning and Induction Heads", 2022.
"""

import hashlib
import io
import lzma
import os
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regard.training.text import Tokenizer, read_text

HELD_OUT_ONE_IN = 20
IGNORED = -100
"""The target that counts for nothing: what torch's `cross_entropy` ignores by default."""

ENCODED_AT_ONCE = 2**20
"""Characters: enough to keep every core busy, few enough for memory and to show that it moves."""


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


def folder(path: str | PathLike[str], pattern: str = "**/*.txt") -> Corpus:
    """The texts of a folder.

    Args:
        path: the folder.
        pattern: which of its files, as in `pathlib.Path.glob`. What is no text is skipped; `Corpus.skipped` says why.

    Raises:
        ValueError: it is not a folder, or none of its files match and hold text.
    """
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"{path}: expected a folder")
    taken, skipped = [], {}
    for file in root.glob(pattern):
        if file.is_file():
            name = file.relative_to(root).as_posix()
            try:
                taken.append(TextFile(name, read_text(file)))
            except ValueError as error:
                skipped[name] = str(error)
    return _split(taken, skipped, where=root / pattern)


def files(paths: Sequence[str | PathLike[str]]) -> Corpus:
    """The texts of the files that are named. Of a single file, its last lines are held out.

    Raises:
        ValueError: no file is named, or one cannot be read.
    """
    if isinstance(paths, (str, PathLike)) or not paths:
        raise ValueError(f"paths: expected a list of one file or more, got {paths!r}")
    absolute = dict.fromkeys(Path(os.path.abspath(path)) for path in paths)
    root = os.path.commonpath([file.parent for file in absolute])
    return _split([TextFile(file.relative_to(root).as_posix(), read_text(file)) for file in absolute], {}, where=root)


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


class Batch(NamedTuple):
    """Rows for the model, each [batch, context_length].

    Args:
        tokens: what the model reads; int64.
        targets: the token that follows each; int64, `IGNORED` where none counts.
        documents: which document of its row each token belongs to, from 0 upwards; int32.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor


class Packed:
    """Documents packed into rows of equal length (see the module's docstring).

    Position p, the number of rows taken before, is row `p % rows` of epoch `p // rows`.

    Args:
        documents: the token numbers of each document, without `<|end|>`.
        context_length: tokens in a row.
        vocab_size: how many different tokens there are.
        end_id: the number of `<|end|>`.
        seed: decides every order, offset and repeat.
        repeats: the share of rows, from 0 to 1, spread evenly, that is replaced by repeated random tokens.

    Attributes:
        rows: rows in an epoch, so that every token is a target at least once. The last ones of the ring are filled up
            from its beginning.
        size: tokens in an epoch, each document's `<|end|>` counted.

    Raises:
        ValueError: there is no token at all, one is outside the vocabulary or `<|end|>`, or a number is out of range.

    >>> packed = Packed([[5, 6], [7, 8, 9]], context_length=7, vocab_size=10)
    >>> batch = next(packed.once(1))
    >>> batch.tokens.tolist(), batch.documents.tolist()
    ([[0, 5, 6, 0, 7, 8, 9]], [[0, 0, 0, 1, 1, 1, 1]])
    >>> batch.targets.tolist()
    [[5, 6, 0, 7, 8, 9, 0]]
    """

    def __init__(
        self,
        documents: Iterable[Sequence[int] | Tensor],
        *,
        context_length: int,
        vocab_size: int,
        end_id: int = 0,
        seed: int = 0,
        repeats: float = 0.0,
    ) -> None:
        if context_length < 1:
            raise ValueError(f"context_length: expected at least 1, got {context_length}")
        if not 0 <= end_id < vocab_size:
            raise ValueError(f"end_id: expected a token from 0 to {vocab_size - 1}, got {end_id}")
        if not 0 <= repeats <= 1:
            raise ValueError(f"repeats: expected a share from 0 to 1, got {repeats}")
        if repeats and vocab_size < 2:
            raise ValueError("repeats: expected a token besides <|end|> to repeat, got a vocab_size of 1")
        end = torch.tensor([end_id], dtype=torch.int32)
        chains = []
        for number, document in enumerate(documents):
            tokens = torch.as_tensor(document, dtype=torch.int32)
            if ((tokens < 0) | (tokens >= vocab_size) | (tokens == end_id)).any():
                raise ValueError(
                    f"documents: expected tokens from 0 to {vocab_size - 1}, without <|end|> ({end_id}), "
                    f"got {tokens.min().item()} to {tokens.max().item()} in document {number}"
                )
            if len(tokens):
                chains.append(torch.cat([end, tokens]))
        if not chains:
            raise ValueError("documents: expected at least one with a token in it")
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.seed = seed
        self.repeats = repeats
        self.size = sum(map(len, chains))
        self.rows = -(-self.size // context_length)
        self._chains = chains
        self._epoch: tuple[int, _Ring, Tensor] | None = None

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Tokenizer,
        *,
        context_length: int,
        seed: int = 0,
        repeats: float = 0.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Packed":
        """Encode texts and pack them.

        Args:
            texts: one document each.
            tokenizer: what encodes them.
            progress: called with the texts encoded so far and all there are.
        """

        def documents() -> Iterator[Tensor]:
            start = 0
            while start < len(texts):
                stop, letters = start, 0
                while stop < len(texts) and (stop == start or letters + len(texts[stop]) <= ENCODED_AT_ONCE):
                    letters += len(texts[stop])
                    stop += 1
                for ids in tokenizer.encode_batch(texts[start:stop]):
                    yield torch.tensor(ids, dtype=torch.int32)
                start = stop
                if progress is not None:
                    progress(start, len(texts))

        return cls(
            documents(),
            context_length=context_length,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            seed=seed,
            repeats=repeats,
        )

    def batch(self, position: int, batch_size: int) -> Batch:
        """The rows at `position` and after it; the same whichever were taken before."""
        if position < 0:
            raise ValueError(f"position: expected at least 0, got {position}")
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        rows = [self._row(place) for place in range(position, position + batch_size)]
        return _batch(torch.stack([row for row, _ in rows]), torch.stack([documents for _, documents in rows]))

    def batches(self, batch_size: int, *, position: int = 0) -> Iterator[Batch]:
        """Batch after batch, epoch after epoch, without end."""
        for step in count():
            yield self.batch(position + step * batch_size, batch_size)

    def once(self, batch_size: int) -> Iterator[Batch]:
        """Everything once, in order and without repeats, to measure with: every token is a target exactly once.

        The last row is filled up with `<|end|>`, whose targets are `IGNORED`; the last batch may have fewer rows.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        ring = _Ring(self._chains)
        L = self.context_length
        for first in range(0, self.rows, batch_size):
            starts = torch.arange(first, min(first + batch_size, self.rows)) * L
            places = starts[:, None] + torch.arange(L + 1)
            batch = _batch(*ring.read(places))
            beyond = places[:, :-1] >= self.size  # a second lap
            yield Batch(
                batch.tokens.masked_fill(beyond, self.end_id),
                batch.targets.masked_fill(beyond, IGNORED),
                batch.documents,
            )

    def _row(self, position: int) -> tuple[Tensor, Tensor]:
        """context_length + 1 tokens and their documents."""
        # The share is spread evenly, so that every batch has as near to its share as can be.
        if int((position + 1) * self.repeats) > int(position * self.repeats):
            return self._repeat(position)
        epoch, index = divmod(position, self.rows)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._cut(epoch))
        _, ring, starts = self._epoch
        return ring.read(starts[index] + torch.arange(self.context_length + 1))

    def _cut(self, epoch: int) -> tuple["_Ring", Tensor]:
        """The epoch's ring of documents, and where its rows start, in the order in which they are taken."""
        generator = _generator(self.seed, "epoch", epoch)
        order = torch.randperm(len(self._chains), generator=generator).tolist()
        offset = torch.randint(self.context_length, (), generator=generator)
        rows = torch.randperm(self.rows, generator=generator)
        return _Ring([self._chains[number] for number in order]), offset + rows * self.context_length

    def _repeat(self, position: int) -> tuple[Tensor, Tensor]:
        """Random tokens, again and again, as one document; the period is from 16 to half the row."""
        generator = _generator(self.seed, "repeat", position)
        length = self.context_length + 1
        longest = length // 2
        period = int(torch.randint(min(16, longest), longest + 1, (), generator=generator))
        tokens = torch.randint(self.vocab_size - 1, (period,), generator=generator)
        tokens += tokens >= self.end_id  # every token but <|end|>
        return tokens.repeat(-(-length // period))[:length], torch.zeros(length, dtype=torch.int64)


class _Ring:
    """Documents end to end, the last followed by the first."""

    def __init__(self, chains: Sequence[Tensor]) -> None:
        self.tokens = torch.cat(list(chains))
        self.stops = torch.tensor([len(chain) for chain in chains]).cumsum(0)

    def read(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens at places, and the number of the document there. Numbers go on growing from lap to lap: a document
        met again is another document."""
        lap, place = places // len(self.tokens), places % len(self.tokens)
        return self.tokens[place].long(), torch.searchsorted(self.stops, place, right=True) + lap * len(self.stops)


def _batch(rows: Tensor, documents: Tensor) -> Batch:
    """rows, documents [batch, context_length + 1]."""
    return Batch(
        rows[:, :-1].contiguous(),
        rows[:, 1:].contiguous(),
        (documents[:, :-1] - documents[:, :1]).to(torch.int32),
    )


def _generator(seed: int, purpose: str, number: int) -> torch.Generator:
    # A hash, because torch's generator starts out alike from seeds that are near to each other.
    digest = hashlib.sha256(f"{seed}/{purpose}/{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _walk(root: Path) -> Iterator[str]:
    """Relative paths of the files below root, with forward slashes, but for installed packages and caches."""
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in {"site-packages", "dist-packages", "__pycache__"}]
        for name in names:
            yield (Path(place) / name).relative_to(root).as_posix()


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


def _telling_lines(text: str) -> Iterator[str]:
    """Lines that hardly two files share by chance."""
    return (line for line in map(str.strip, text.splitlines()) if len(line) >= 20)


def _rank(path: str) -> tuple[int, int]:
    """Which files are held out first: one in HELD_OUT_ONE_IN starts with 0. It depends on the path alone."""
    number = int.from_bytes(hashlib.sha256(path.encode()).digest(), "big")
    return number % HELD_OUT_ONE_IN, number


def _is_source(path: str) -> bool:
    """Whether a file of the library is neither a test nor a table of characters, which tell little of reading code."""
    return not {"test", "tests", "idle_test"} & set(path.split("/")[:-1]) and not path.startswith("encodings/")

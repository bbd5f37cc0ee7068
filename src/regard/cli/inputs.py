"""What a command is given to work on: a text, a model."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.console import open_console, tell
from regard.extras import need

if TYPE_CHECKING:
    from regard.models import EncoderDecoder
    from regard.training.checkpoint import Loaded
    from regard.viewer.readers import Reader


def read_text_argument(text: str) -> tuple[str, str]:
    """The words to look at, and what to call them: a file's, standard input's, or the argument itself."""
    from regard.training.text import read_text

    if text == "-":
        if not (words := read_input()):
            raise ValueError("standard input: empty")
        return words, "standard input"
    if _names_a_file(text):
        return read_text(text), text
    if not text.strip():
        raise ValueError('text: empty; give a file or a text in quotes, as in regard look "the cat sat"')
    return text, "your text"


def read_input() -> str:
    """What is piped in, or nothing."""
    from regard.training.text import MAX_TEXT_BYTES, as_text

    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"standard input: more than {MAX_TEXT_BYTES:,} bytes")
    return as_text("standard input", data)


def read_texts(command: str, texts: Sequence[str]) -> list[str]:
    """The arguments, without space around them, or in place of - the lines of standard input that are not blank."""
    return [line for line in read_lines(command, texts) if line]


def read_lines(command: str, texts: Sequence[str]) -> list[str]:
    """As `read_texts`, with the blank lines of standard input, for output that stands line by line beside its input."""
    found = []
    for text in texts:
        if text == "-":
            found += read_text_argument("-")[0].removesuffix("\n").split("\n")
        else:
            found.append(words_of(command, text))
    found = [line.strip() for line in found]
    if not any(found):
        raise ValueError("standard input: no line with something in it")
    return found


def words_of(command: str, text: str) -> str:
    """An argument that can be a text only, and is no file by mistake.

    Raises:
        ValueError: it is empty, or the name of a file.
    """
    if not text.strip():
        raise ValueError(f'text: empty; give one in quotes, as in regard {command} "the cat sat"')
    if os.path.isfile(text):
        raise ValueError(f"text: {text!r} is a file; to read what is in it: regard {command} - < {shlex.quote(text)}")
    return text


def names_a_recording(text: str) -> bool:
    """Whether this is the file of a recording."""
    return text.endswith(".safetensors") and _names_a_file(text)


def _names_a_file(text: str) -> bool:
    """A path that exists, or one word that looks like a path."""
    if not text:  # which Path takes for the folder that one is in
        return False
    try:
        if Path(text).exists():
            return True
    except OSError:  # too long for a name
        return False
    return not any(c.isspace() for c in text) and ("/" in text or "\\" in text or bool(Path(text).suffix))


def load_reader(name: str) -> "Reader":
    """A model that reads texts: ours, or one of transformers."""
    from regard.viewer.readers import DecoderReader, find_reader

    reader = find_reader(name)
    if isinstance(reader, DecoderReader):
        _tell_unfinished(name, reader.loaded)
    return reader


def find_translator(name: str) -> "Loaded[EncoderDecoder] | None":
    """The model of this name, if it is one of ours that writes one text for another."""
    from regard.models import EncoderDecoder
    from regard.training.checkpoint import kind_of

    return load_model(name) if kind_of(name) is EncoderDecoder else None


PURPOSES = {
    "decoder": "regard generate goes on with a text",
    "encoder-decoder": "regard translate writes one text for another",
    "masked language model": "regard embed makes vectors of texts with it",
    "classifier": "regard classify tells the label of a text with it",
}
"""What each kind of model is for."""


def load_model(name: str, *kinds: str) -> "Loaded[Any]":
    """A model and its tokenizer.

    Args:
        kinds: those that a command takes, in words; none: it takes any.
    """
    need("a model's tokenizer", "cli", "tokenizers")
    from regard.training.checkpoint import load
    from regard.training.task import describe

    with open_console(stderr=True).status("opening the model"):
        loaded = load(name)
    found = describe(loaded.model)
    if kinds and found not in kinds:
        wanted = " or ".join(kinds)
        raise ValueError(
            f"--model: expected a model of the kind {wanted}, {name} is of the kind {found}: {PURPOSES[found]}"
        )
    if loaded.foreign is not None:
        tell(open_console(stderr=True), f"{name}: run by transformers, its attention by regard ({loaded.foreign})")
    _tell_unfinished(name, loaded)
    return loaded


def _tell_unfinished(name: str, loaded: "Loaded[Any]") -> None:
    if loaded.unfinished is not None:
        step, steps = loaded.unfinished
        tell(open_console(stderr=True), f"{name}: its training is at step {step:,} of {steps:,}")

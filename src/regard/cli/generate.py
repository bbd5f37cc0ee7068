"""regard generate: text from a language model."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import open_console
from regard.cli.inputs import load_model, read_input, words_of
from regard.cli.options import ModelOption

if TYPE_CHECKING:
    from torch import Generator

    from regard.models import Decoder
    from regard.training.checkpoint import Loaded


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar='"TEXT"...',
            help="What the text begins with; several are written side by side; - for standard input.",
        ),
    ] = None,
    model: ModelOption = "stdlib",
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="How many tokens to write, at most.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", metavar="T", min=0, help="0 takes the likeliest token; 1 draws as the model says."
        ),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="N", min=1, help="Draw only from the k likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            min=0,
            max=1,
            help="Draw only from the likeliest tokens that together have this probability.",
        ),
    ] = 0.95,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            metavar="P",
            min=0,
            max=1,
            help="Draw only tokens at least this many times as probable as the likeliest.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty", metavar="R", min=0, help="Above 1, tokens that came before become less likely."
        ),
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End before this text; several: the option again."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed writes the same text.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt, in a line: prompt, text, tokens.")
    ] = False,
) -> None:
    """Let a language model go on with a text.

    The bundled model writes what looks like Python's standard library. It stops at --count tokens, or where it expects
    a text to end. A model with a window goes on in constant memory, however many tokens are asked for.

    [bold]Examples[/bold]

      regard generate "def main(" --count 60 --seed 5
      regard generate "import os, sys" --temperature 0 --count 40
      regard generate "def area(" "def volume(" --stop return --seed 1
      cat notes.txt | regard generate -
    """
    from regard.generation import generate_batch

    if stop and not all(stop):
        raise ValueError("--stop: empty; give the text to end before")
    texts = _prompts(prompts)
    loaded = load_model(model, "decoder")
    generators = [_seeded(seed) for _ in texts]
    rows = [_Row(loaded, prompt, stop or []) for prompt in texts]
    steps = generate_batch(
        loaded.model,
        [row.tokens for row in rows],
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        end_id=loaded.tokenizer.stop_ids,
        generators=generators,
        until=lambda row, token: rows[row].add(token),
    )
    first = next(steps, None)  # what is wrong with the arguments shows here, before anything is printed
    following = steps if first is None else chain([first], steps)
    if as_json:
        _told(rows, following)
    else:
        _streamed(rows, following)


def _prompts(texts: list[str] | None) -> list[str]:
    """What to go on with; standard input in place of -, or of nothing where something is piped in."""
    if not texts:
        texts = [""] if sys.stdin is None or sys.stdin.isatty() else ["-"]
    # a text that is piped in ends with its last line's end, as echo writes it: the model goes on with that line
    return [read_input().removesuffix("\n") if text == "-" else text and words_of("generate", text) for text in texts]


class _Row:
    """A prompt, and the text that comes after it."""

    def __init__(self, loaded: "Loaded[Decoder]", prompt: str, stop: Sequence[str]) -> None:
        from regard.generation import TextStream

        self.prompt, self.count, self.ended = prompt, 0, False
        self.tokens = [loaded.tokenizer.end_id, *loaded.tokenizer.encode(prompt)]
        self.new = ""  # what has not been printed yet
        self._stream = TextStream(loaded.tokenizer, stop=stop)

    def add(self, token: int) -> bool:
        """Whether the text ends with this token."""
        self.count += 1
        self.new += self._stream.add(token)
        return self._stream.stopped

    def end(self) -> None:
        if not self.ended:
            self.new += self._stream.end()
            self.ended = True

    def taken(self) -> str:
        text, self.new = self.new, ""
        return text


def _told(rows: list[_Row], steps: Iterator[list[int | None]]) -> None:
    for _ in steps:
        pass
    for row in rows:
        row.end()
        print(json.dumps({"prompt": row.prompt, "text": row.taken(), "tokens": row.count}, ensure_ascii=False))


def _streamed(rows: list[_Row], steps: Iterator[list[int | None]]) -> None:
    """Each text after the one before; the first that is not done as it comes."""
    from regard.display.letters import obeyed_by_none

    # a file gets the text as it is; a terminal gets nothing that it would obey
    shown = obeyed_by_none if open_console().is_terminal else str
    waiting = list(rows)
    print(shown(waiting[0].prompt), end="", flush=True)

    def show() -> None:
        while waiting:
            print(shown(waiting[0].taken()), end="", flush=True)
            if not waiting[0].ended:
                return
            print(flush=True)
            waiting.pop(0)
            if waiting:
                print(shown(waiting[0].prompt), end="", flush=True)

    for step in steps:
        for row, token in zip(rows, step, strict=True):
            if token is None:
                row.end()
        show()
    for row in rows:
        row.end()
    show()


def _seeded(seed: int | None) -> "Generator":
    import torch

    generator = torch.Generator()
    if seed is None:
        generator.seed()
    elif -(2**63) <= seed < 2**64:
        generator.manual_seed(seed)
    else:
        raise ValueError(f"--seed: expected a whole number of 64 bits, got {seed}")
    return generator

"""regard generate: text from a language model."""

from itertools import chain
from typing import Annotated

import typer

from regard.cli.console import open_console
from regard.cli.inputs import load_model
from regard.cli.options import ModelOption


def generate(
    prompt: Annotated[str, typer.Argument(metavar='"TEXT"', help="What the text begins with.")] = "",
    model: ModelOption = "stdlib",
    count: Annotated[int, typer.Option("--count", min=1, help="How many tokens to write, at most.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token; 1 draws as the model says.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw only from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Draw only from the likeliest tokens that together have this probability."),
    ] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed writes the same text.")] = None,
) -> None:
    """Let a language model go on with a text.

    The bundled model writes what looks like Python's standard library. It stops at --count tokens, or where it expects
    a text to end.

    [bold]Examples[/bold]

      regard generate "def main(" --count 60 --seed 5
      regard generate "import os, sys" --temperature 0 --count 40
    """
    import torch

    from regard.display.letters import obeyed_by_none
    from regard.generation import generate as tokens

    loaded = load_model(model)
    tokenizer = loaded.tokenizer
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    ids = tokenizer.encode(prompt)
    written = ""
    stream = tokens(
        loaded.model,
        [tokenizer.end_id, *ids],
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        end_id=tokenizer.end_id,
        generator=generator,
    )
    first = next(stream, None)  # what is wrong with the arguments shows here, before anything is printed
    console = open_console()
    # a file gets the text as it is; a terminal gets nothing that it would obey
    shown = obeyed_by_none if console.is_terminal else str
    print(shown(prompt), end="", flush=True)
    new: list[int] = []
    for token in () if first is None else chain([first], stream):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # a character of several tokens is not whole yet
            print(shown(text[len(written) :]), end="", flush=True)
            written = text
    print()

"""regard generate: text from a language model."""

from itertools import chain
from typing import Annotated

import typer

from regard.cli.inputs import load_model
from regard.cli.options import ModelOption


def generate(
    prompt: Annotated[str, typer.Argument(metavar='"TEXT"', help="What the text begins with.")] = "",
    model: ModelOption = "stdlib",
    count: Annotated[int, typer.Option("--count", min=1, help="Tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Only from the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Only from the likeliest p of the probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed writes the same text.")] = None,
) -> None:
    """Text from a language model.

    [bold]Examples[/bold]

      regard generate "def main():" --count 60 --seed 1
    """
    import torch

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
    print(prompt, end="", flush=True)
    new: list[int] = []
    for token in () if first is None else chain([first], stream):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # a character of several tokens is not whole yet
            print(text[len(written) :], end="", flush=True)
            written = text
    print()

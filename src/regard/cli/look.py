"""regard look and regard explain: what heads attend to, and how one comes to its output."""

import json
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.console import open_console
from regard.cli.inputs import load_model, read_text_argument
from regard.cli.options import (
    HeadOption,
    JsonOption,
    LayerOption,
    ModelOption,
    QueryOption,
    StartOption,
    TextArgument,
)

if TYPE_CHECKING:
    from regard.terminal import Look
    from regard.training.checkpoint import Loaded


def look(
    text: TextArgument,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    start: StartOption = 0,
    as_json: JsonOption = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it here, in the terminal (the default).")] = True,
) -> None:
    """What each head of a language model attends to in a text.

    [bold]Examples[/bold]

      regard look examples/library_desk.py

      regard look "the cat sat on the mat because the cat was tired" --query 11

      regard look notes.txt --layer 3 --head 1 --query 200

      cat notes.txt | regard look - --json
    """
    from regard.terminal import look_as_data, print_look

    del terminal  # the only view so far
    view = _view(text, model, layer, head, query, start)
    if as_json:
        print(json.dumps(look_as_data(view), ensure_ascii=False))
    else:
        print_look(open_console(), view)


def explain(
    text: Annotated[
        str | None, typer.Argument(metavar='[FILE|"TEXT"]', help="As in regard look; or --example.", show_default=False)
    ] = None,
    example: Annotated[
        Literal["three-tokens"] | None,
        typer.Option("--example", help="A worked example: three tokens, every number of every step."),
    ] = None,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    start: StartOption = 0,
    as_json: JsonOption = False,
) -> None:
    """How one head comes to its output, step by step, with the real numbers.

    [bold]Examples[/bold]

      regard explain --example three-tokens

      regard explain examples/library_desk.py --layer 3 --head 1 --query 200
    """
    from regard.terminal import explain_token, print_explained, print_three_tokens, steps_as_data, three_tokens_as_data

    if (text is None) == (example is None):
        raise ValueError("explain: give a text or --example three-tokens, one of the two")
    if text is None:
        if as_json:
            print(json.dumps(three_tokens_as_data()))
        else:
            print_three_tokens(open_console())
        return
    loaded = load_model(model)
    view = _view(text, loaded, layer, head, query, start)
    shown = explain_token(loaded.model, view)
    if as_json:
        print(json.dumps(steps_as_data(view, shown), ensure_ascii=False))
    else:
        print_explained(open_console(), view, shown)


def _view(
    text: str, model: "str | Loaded", layer: int | None, head: int | None, query: int | None, start: int
) -> "Look":
    from regard.terminal import look as view

    loaded = load_model(model) if isinstance(model, str) else model
    words, source = read_text_argument(text)
    with open_console(stderr=True).status("reading"):
        return view(
            loaded.model,
            loaded.tokenizer,
            words,
            name=loaded.folder.name,
            source=source,
            start=start,
            query=query,
            layer=layer,
            head=head,
        )

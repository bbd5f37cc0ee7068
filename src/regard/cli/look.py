"""regard look and regard explain: what heads attend to, and how one comes to its output."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard.cli.console import open_console, progress_bar
from regard.cli.inputs import find_translator, load_model, load_reader, names_a_recording, read_text_argument
from regard.cli.options import (
    HeadOption,
    JsonOption,
    LayerOption,
    ModelOption,
    QueryOption,
    StartOption,
    TextArgument,
    ThemeOption,
)

if TYPE_CHECKING:
    from regard.display.alignment import Alignment
    from regard.display.reading import Look, Place
    from regard.models import Decoder, EncoderDecoder
    from regard.training.checkpoint import Loaded


def look(
    text: TextArgument,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            metavar="LAYER.HEAD",
            help="What the model expects without this head; several: 5.0,5.3, or the option again.",
        ),
    ] = None,
    start: StartOption = None,
    every: Annotated[bool, typer.Option("--all", help="List the keys of every head.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="List the tokens with their numbers, and no more.")] = False,
    theme: ThemeOption = "auto",
    as_json: JsonOption = False,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write the page to this file, and do not serve it.")
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Only what the terminal shows.")] = False,
) -> None:
    """What each head of a language model attends to in a text: in the terminal, and on a page to walk through it.

    The terminal shades the text by the weights of one token (a character of several tokens shows the largest of
    theirs); below it stand the model's guesses for the next token, a map of all heads, and what each head attends to. A
    text longer than the model's context is read in windows. Of a model that translates, the source is shaded once for
    every token that was written.

    The page has every weight of every head. It is served on this machine, at the address that is printed, until Ctrl-C;
    where standard input is no terminal, it is written to regard-look.html, which works without a server.

    [bold]Examples[/bold]

      regard look examples/library_desk.py
      regard look notes.txt --model my-model --page notes.html
      regard look recording.safetensors
      regard look "self.quillback = quillback; self.quill" --without 5.0,5.3
      regard look "the cat sat on the mat because the cat was tired" --query mat
      regard look examples/library_desk.py --layer 3 --head 1 --query 200
      regard look "3. März 2026" --model dates
      cat notes.txt | regard look - --json
    """
    if page is not None and (no_page or as_json or tokens):
        raise ValueError("look: --page writes a page; --no-page, --json and --tokens ask for none")
    translator = None if names_a_recording(text) else find_translator(model)
    if translator is not None:
        for option, asked in (("--start", start is not None), ("--tokens", tokens)):
            if asked:
                raise ValueError(f"look: {option} is for language models; {model} reads a text and writes another")
        aligned = _look_at_translation(text, translator, layer, head, query, without or [], every, theme, as_json)
        if not (as_json or no_page):
            from regard.cli.opening import open_page
            from regard.viewer.reading import read_pair

            run = read_pair(translator, aligned.script.text, aligned.written, aligned.source)
            shown, number = aligned.place
            run.chosen = run.names.index(shown), number, aligned.query
            open_page(run, page)
        return
    from regard.cli.opening import choose, is_served, open_page, open_recording, print_summary, read_for_page
    from regard.display.data import look_as_data, tokens_as_data
    from regard.display.page import print_look, print_tokens
    from regard.display.paper import Paper
    from regard.viewer.readers import DecoderReader

    reader = None if names_a_recording(text) else load_reader(model)
    if not isinstance(reader, DecoderReader):
        for option, given in (("--without", without), ("--all", every), ("--tokens", tokens)):
            if given:
                raise ValueError(
                    f"look: {option} is for regard's own language models; the page shows the same of others"
                )
        run = open_recording(text) if reader is None else read_for_page(reader, *read_text_argument(text), start or 0)
        choose(run, layer, head, query)
        print_summary(open_console(), run, as_json=as_json, served=not (as_json or no_page) and is_served(page))
        if not (as_json or no_page):
            open_page(run, page)
        return
    view = _view(text, reader.loaded, layer, head, query, start, without=without or [], overview=not tokens)
    if as_json:
        data = {"tokens": tokens_as_data(view)} if tokens else look_as_data(view)
        print(json.dumps(data, ensure_ascii=False), flush=True)
    elif tokens:
        print_tokens(Paper.on(open_console(), theme), view)
    else:
        print_look(Paper.on(open_console(), theme), view, every=every)
        if not no_page:
            run = read_for_page(reader, view.script.text, view.source, view.start)
            run.summary, run.chosen = [*view.heads], (view.layer, view.head, view.query)
            open_page(run, page)


def explain(
    text: Annotated[
        str | None,
        typer.Argument(
            metavar='FILE|"TEXT"', help="A text file, the text itself in quotes, or - for standard input; or --example."
        ),
    ] = None,
    example: Annotated[
        Literal["three-tokens"] | None,
        typer.Option("--example", help="A worked example: three tokens, every number of every step."),
    ] = None,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    start: StartOption = None,
    theme: ThemeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """How one head comes to its output, step by step, with the real numbers.

    For one token of a text: its query, its score with every key, the weights that softmax makes of them, and the
    weighted sum of the values, each with its formula.

    [bold]Examples[/bold]

      regard explain --example three-tokens
      regard explain examples/library_desk.py --layer 3 --head 1 --query 200
      regard explain "the cat sat on the mat" --query mat
    """
    from regard.display.data import steps_as_data, three_tokens_as_data
    from regard.display.explained import explain_token, print_explained, print_three_tokens
    from regard.display.paper import Paper

    if (text is None) == (example is None):
        raise ValueError("explain: give a text or --example three-tokens, one of the two")
    if text is None:
        if as_json:
            print(json.dumps(three_tokens_as_data()), flush=True)
        else:
            print_three_tokens(Paper.on(open_console(), theme))
        return
    loaded = load_model(model, "decoder")
    view = _view(text, loaded, layer, head, query, start)
    shown = explain_token(loaded.model, view)
    if as_json:
        print(json.dumps(steps_as_data(view, shown), ensure_ascii=False), flush=True)
    else:
        print_explained(Paper.on(open_console(), theme), view, shown)


def read_places(written: list[str]) -> "list[Place]":
    """Heads as they are written, LAYER.HEAD, alone or joined by commas; each once.

    Raises:
        ValueError: anything else.

    >>> [str(place) for place in read_places(["5.0,5.3", "4.2"])]
    ['5.0', '5.3', '4.2']
    """
    from regard.display.reading import Place

    found = []
    for text in (part.strip() for words in written for part in words.split(",")):
        if not re.fullmatch(r"[0-9]{1,6}\.[0-9]{1,6}", text):
            raise ValueError(f"--without: expected a head as LAYER.HEAD, such as 5.0, got {text!r}")
        place = Place(*map(int, text.split(".")))
        if place not in found:
            found.append(place)
    return found


def _view(
    text: str,
    loaded: "Loaded[Decoder]",
    layer: int | None,
    head: int | None,
    query: str | None,
    start: int | None,
    *,
    without: list[str] | None = None,
    overview: bool = False,
) -> "Look":
    from regard.display.reading import look as view
    from regard.display.reading import read_windows
    from regard.display.script import Script

    places = read_places(without or [])
    words, source = read_text_argument(text)
    console = open_console(stderr=True)
    with console.status("cutting the text into tokens"):
        script = Script(loaded.tokenizer, words)
    windows = []
    if overview and start is None:
        with progress_bar(console, transient=True) as bar:
            task = bar.add_task("reading the text in windows", total=None, visible=False)
            windows = read_windows(
                loaded.model,
                script,
                lambda done, total: bar.update(task, completed=done, total=total, visible=True),
            )
    with console.status("reading"):
        return view(
            loaded.model,
            script,
            name=loaded.folder.name,
            source=source,
            start=start or 0,
            query=_number_or_text(query),
            layer=layer,
            head=head,
            without=places,
            windows=windows,
        )


def _look_at_translation(
    text: str,
    loaded: "Loaded[EncoderDecoder]",
    layer: int | None,
    head: int | None,
    query: str | None,
    without: list[str],
    every: bool,
    theme: Literal["auto", "dark", "light"],
    as_json: bool,
) -> "Alignment":
    from regard.display.alignment import align, alignment_as_data, print_alignment
    from regard.display.paper import Paper
    from regard.display.script import Script

    places = read_places(without)
    words, source = read_text_argument(text)
    if not words.strip():
        raise ValueError(f"{source}: blank")
    view = align(
        loaded.model,
        Script(loaded.tokenizer, words.strip()),
        name=loaded.folder.name,
        source=source,
        query=_number_or_text(query),
        layer=layer,
        head=head,
        without=places,
    )
    if as_json:
        print(json.dumps(alignment_as_data(view), ensure_ascii=False), flush=True)
    else:
        print_alignment(Paper.on(open_console(), theme), view, every=every)
    return view


def _number_or_text(query: str | None) -> int | str | None:
    return int(query) if query is not None and re.fullmatch(r"[+-]?[0-9]{1,12}", query) else query

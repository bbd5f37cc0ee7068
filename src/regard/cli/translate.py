"""regard translate: one text for another."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import open_console
from regard.cli.inputs import load_model, read_lines
from regard.cli.options import JsonOption, ModelOption

if TYPE_CHECKING:
    from regard.training.translating import Translation


def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar='"TEXT"...', help="What to translate; - or nothing reads lines from standard input."),
    ] = None,
    model: ModelOption = "dates",
    beams: Annotated[
        int,
        typer.Option(
            "--beams", metavar="N", min=1, help="Beginnings of a translation that are kept while it is written."
        ),
    ] = 1,
    length_penalty: Annotated[
        float,
        typer.Option("--length-penalty", help="Above 0 favours longer translations, 0 ranks them by probability."),
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", metavar="N", min=1, help="Tokens of a translation, at most. Default: the model's context."
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All translations that were kept, with their probabilities.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Translate texts, with a model that was trained on pairs.

    The bundled model reads a date as people write it, in one of 66 languages, and writes it as ISO 8601. There is one
    line of output for each text, in order, and a blank one for a blank line of standard input.

    [bold]Examples[/bold]

      regard translate "3. März 2026"
      regard translate "3 mars 2026" "2026年3月3日" "March 3rd, 2026" --json
      cat dates.txt | regard translate
      regard translate "3 listopada 2026" --beams 4 --all
      regard look "3. März 2026" --model dates
    """
    from regard.training.translating import translate_texts

    lines = read_lines("translate", texts or ["-"])
    sources = [line for line in lines if line]
    loaded = load_model(model, "encoder-decoder")
    found = translate_texts(
        loaded.model, loaded.tokenizer, sources, count=count, beams=beams, length_penalty=length_penalty
    )
    given = iter(found)
    for line in lines:
        translations = next(given) if line else []
        if not as_json:
            _print(line, translations if every else translations[:1], every)
        elif line:
            told = {"source": line, "translations": [translation._asdict() for translation in translations]}
            print(json.dumps(told, ensure_ascii=False), flush=True)


def _print(source: str, translations: "list[Translation]", every: bool) -> None:
    from regard.display.letters import obeyed_by_none

    console = open_console()
    # a file gets the text as it is; a terminal gets nothing that it would obey
    shown = obeyed_by_none if console.is_terminal else str
    if not translations:
        print(flush=True)
    for translation in translations:
        line = translation.text if not every else f"{translation.probability:.4f}\t{translation.text}\t{source}"
        print(shown(line), flush=True)

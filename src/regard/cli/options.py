"""Options that several commands share."""

from typing import Annotated, Literal

import typer

TextArgument = Annotated[
    str, typer.Argument(metavar='FILE|"TEXT"', help="A text file, the text itself in quotes, or - for standard input.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME|PATH",
        help="A model in the package, a folder that regard train wrote, or a model of transformers: its folder, "
        "or OWNER/NAME of one that was downloaded.",
    ),
]
LayerOption = Annotated[
    int | None, typer.Option("--layer", help="Layer, 0 for the first. Default: where there is most to see.")
]
HeadOption = Annotated[int | None, typer.Option("--head", help="Head, 0 for the first.")]
QueryOption = Annotated[
    str | None,
    typer.Option(
        "--query", metavar="N|TEXT", help="The token that looks: its number (0 opens the text), or its text. Default: "
        "one with something to see.",
    ),
]  # fmt: skip
StartOption = Annotated[
    int | None, typer.Option("--start", help="Read the text from this token on. Default: its beginning.")
]
ThemeOption = Annotated[
    Literal["auto", "dark", "light"],
    typer.Option("--theme", envvar="REGARD_THEME", help="Whether the terminal is dark or light; auto asks it."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as numbers, and as text in JSON.")]

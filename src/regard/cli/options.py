"""Options that several commands share."""

from typing import Annotated

import typer

TextArgument = Annotated[
    str, typer.Argument(metavar='FILE|"TEXT"', help="A text file, the text itself in quotes, or - for standard input.")
]
ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="NAME|PATH", help="A model in the package, or a folder that regard train wrote."),
]
LayerOption = Annotated[
    int | None, typer.Option("--layer", help="Layer, 0 for the first. Default: where most is to be seen.")
]
HeadOption = Annotated[int | None, typer.Option("--head", help="Head, 0 for the first.")]
QueryOption = Annotated[
    int | None, typer.Option("--query", help="The token that looks; 0 is the one that opens the text.")
]
StartOption = Annotated[int, typer.Option("--start", help="Show the text from this token on.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Numbers instead of a picture.")]

"""The commands put together, and how they end: bad input is one message and exit code 2."""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

import regard
from regard.cli.generate import generate
from regard.cli.look import explain, look
from regard.cli.measure import bench, plan
from regard.cli.train import train

app = typer.Typer(
    name="regard",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for command in (look, explain, generate, train, plan, bench):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and that is all.")
    ] = False,
) -> None:
    """Look into attention: what each head of a language model attends to, and why."""


def run() -> None:
    """Runs the command that was typed; bad input is one message and exit code 2."""
    console = Console(stderr=True, highlight=False)
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        console.print(f"regard: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        show: Callable[[], None] | None = getattr(error, "show", None)  # usage errors of the command line library
        if show is None:
            raise
        show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)

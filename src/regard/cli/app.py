"""The commands put together, and how they end: bad input is one message and exit code 2."""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

import regard
from regard.cli.console import open_console, tell
from regard.cli.embed import classify, embed
from regard.cli.generate import generate
from regard.cli.look import explain, look
from regard.cli.measure import bench, plan
from regard.cli.train import train
from regard.cli.translate import translate
from regard.display.letters import obeyed_by_none


def _paragraphs(text: str) -> str:
    """A docstring's paragraphs, each in one line, as a help of any width wants them; lines of examples stay."""
    return "\n\n".join(
        part if part.startswith(" ") else part.replace("\n", " ") for part in inspect.cleandoc(text).split("\n\n")
    )


app = typer.Typer(
    name="regard",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for command in (look, explain, generate, translate, train, embed, classify, plan, bench):
    app.command(help=_paragraphs(command.__doc__ or ""))(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Look into attention: what each head of a language model attends to, and why."""


def run(interrupted: Callable[[], bool] = lambda: False) -> None:
    """Runs the command that was typed; bad input is one message and exit code 2.

    Args:
        interrupted: whether the process was interrupted; no error is told after that.
    """
    console = open_console(stderr=True)
    try:
        code = app(standalone_mode=False, prog_name="regard")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        if interrupted():
            sys.exit(130)
        tell(console, f"regard: {error}", style="red")
        sys.exit(2)
    except Exception as error:
        usage: Any = error  # an error of the command line library, which shows itself
        if not hasattr(usage, "show"):
            raise
        usage.message = obeyed_by_none(usage.message)
        usage.show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)

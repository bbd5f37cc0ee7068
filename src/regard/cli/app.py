"""The commands put together, and how they end: bad input is one message and exit code 2."""

import os
import sys
from collections.abc import Callable

import typer
from rich.console import Console

from regard.cli.generate import generate
from regard.cli.look import explain, look
from regard.cli.measure import bench, plan
from regard.cli.train import train

app = typer.Typer(
    name="regard",
    help="Look into attention: what each head of a language model attends to, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for command in (look, explain, generate, train, plan, bench):
    app.command()(command)


def main() -> None:
    """Runs the command line; bad input is one message and exit code 2."""
    console = Console(stderr=True, highlight=False)
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        console.print(f"regard: {error}", style="red", markup=False)
        sys.exit(2)
    except Exception as error:
        show: Callable[[], None] | None = getattr(error, "show", None)  # usage errors of the command line library
        if show is None:
            raise
        show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)

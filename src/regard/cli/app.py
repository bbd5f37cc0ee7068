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


NAMES_ELSEWHERE = {
    **dict.fromkeys(("--max-new-tokens", "--max-tokens", "--max-length", "--n-predict"), "--count"),
    **dict.fromkeys(("--lr", "--learning_rate"), "--learning-rate"),
    **dict.fromkeys(("--max-steps", "--max_steps", "--iterations", "--max-iters"), "--steps"),
    **dict.fromkeys(("--n-layer", "--num-layers", "--num-hidden-layers"), "--layers"),
    **dict.fromkeys(("--n-head", "--num-heads", "--num-attention-heads"), "--heads"),
    **dict.fromkeys(("--n-embd", "--hidden-size", "--d-model"), "--dim"),
    **dict.fromkeys(("--block-size", "--seq-len", "--max-seq-len"), "--context-length"),
    **dict.fromkeys(("--grad-clip", "--max-grad-norm"), "--clip"),
    **dict.fromkeys(("--gradient-accumulation-steps", "--grad-accum"), "--accumulate"),
    **dict.fromkeys(("--per-device-train-batch-size", "--micro-batch-size"), "--batch-size"),
}
"""What other programs call an option, and what regard calls it: who types the one is told the other."""


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
        meant = NAMES_ELSEWHERE.get(getattr(usage, "option_name", ""))
        if meant is not None and any(meant in parameter.opts for parameter in usage.ctx.command.params):
            usage.possibilities = [meant]
        usage.show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)

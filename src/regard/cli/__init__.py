"""The command line: regard look | explain | generate | train | plan | bench.

Output that is piped is plain text, and ``--json`` gives numbers. Whatever is wrong with the input is one message and
exit code 2. A command imports what it needs when it runs, so that ``--help`` is quick.

    mask_expression  masks as people write them
    options          options that several commands share
    console          where commands print
    inputs           the text and the model that a command is given
    look, generate, train, measure  the commands
    app              all of them, and how they end
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line; an interruption is quiet from the first moment on."""
    try:
        from regard.extras import need

        try:
            need("regard's command line", "cli", "typer", "rich")
        except ImportError as error:
            print(f"regard: {error}", file=sys.stderr)
            sys.exit(2)
        from regard.cli.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)

"""The command line: regard look | explain | generate | train | plan | bench.

Output that is piped is plain text, and ``--json`` gives numbers. Whatever is wrong with the input is one message and
exit code 2. A command imports what it needs when it runs, so that ``--help`` is quick.

    mask_expression  masks as people write them
    options          options that several commands share
    console          where commands print
    inputs           the text and the model that a command is given
    look, generate, train, measure  the commands
    app              all of them
"""

import sys

try:
    from regard.cli.app import main
except ImportError as error:  # pragma: no cover
    if error.name not in ("typer", "rich"):
        raise
    sys.exit("regard: the command line needs typer and rich: pip install regard[cli]")

__all__ = ["main"]

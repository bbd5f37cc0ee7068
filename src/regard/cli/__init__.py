"""The command line: regard look | explain | generate | translate | train | embed | classify | plan | bench.

Output that is piped is plain text, and ``--json`` gives numbers. Whatever is wrong with the input is one message and
exit code 2. A command imports what it needs when it runs, so that ``--help`` is quick.

Here belongs what turns words on a command line into calls. What a command does and shows is in the rest of the package.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Runs the command line; an interruption is quiet from the first moment on."""
    interrupted = False
    before = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        if _loads_torch(frame):  # whose C++ code would end the process by itself, and not quietly
            os._exit(130)
        raise KeyboardInterrupt

    def end_at_once(lost: "sys.UnraisableHookArgs") -> None:
        if lost.exc_type is KeyboardInterrupt:  # raised where Python only tells of it, and would go on
            os._exit(130)
        sys.__unraisablehook__(lost)

    try:
        before = signal.getsignal(signal.SIGINT), sys.unraisablehook
        sys.unraisablehook = end_at_once
        signal.signal(signal.SIGINT, interrupt)
        from regard.extras import need

        try:
            need("regard's command line", "cli", "typer", "rich")
        except ImportError as error:
            if interrupted:
                raise
            print(f"regard: {error}", file=sys.stderr)
            sys.exit(2)
        from regard.cli.app import run

        # a library that is interrupted in its import may hide that, and fail when it is imported again
        run(interrupted=lambda: interrupted)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        if not interrupted:
            raise
        sys.exit(130)  # what interrupts the body of a class comes out of it as another error
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before[0])
            sys.unraisablehook = before[1]


def _loads_torch(frame: FrameType | None) -> bool:
    """Whether a module of torch is being imported."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False

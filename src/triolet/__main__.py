"""The ``triolet`` command, also as ``python -m triolet``. A ^C during its imports ends it like any other ^C."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

_INTERRUPTED = 130


def main() -> NoReturn:
    """Runs the command and exits."""
    try:
        from .api.command_line.main import cli
        from .api.command_line.main import main as command
        from .bench.card import card
        from .bench.command import bench
        from .server.command import serve

        for added in (bench, card, serve):
            cli.add_command(added)
        command()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def run() -> NoReturn:
    """Runs the command, and ends the process before the interpreter ends, but behind all other functions of the exit.
    Python up to 3.13 throws the thread of a load that was cut short out of its call, and C++ answers with SIGABRT."""
    status = 1  # of an error that nobody catches

    def leave() -> None:
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it cannot be written
            sys.stdout.flush()
        os._exit(status)

    atexit.register(leave)  # the first one that is registered runs last
    try:
        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        raise


if __name__ == "__main__":
    run()

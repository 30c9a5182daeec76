"""The ``triolet`` command, also as ``python -m triolet``. A ^C during its imports ends it like any other ^C."""

import sys
from typing import NoReturn

_INTERRUPTED = 130


def main() -> NoReturn:
    """Runs the command and exits."""
    try:
        from .api.command_line.main import cli
        from .api.command_line.main import main as command
        from .bench.command import bench
        from .server.command import serve

        cli.add_command(bench)
        cli.add_command(serve)
        command()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

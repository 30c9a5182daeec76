"""``python -m triolet``: the same as the ``triolet`` command."""

from .api.command_line.main import main

if __name__ == "__main__":
    main()

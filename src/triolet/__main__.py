"""``python -m triolet``: the same as the ``triolet`` command."""

from .api.cli import main

if __name__ == "__main__":
    main()

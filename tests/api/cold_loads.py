"""Reads groups of families, and prints for each what its models say that are loaded at once, in a process of its own
that has not imported transformers. `test_process.py` runs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import trio

from .process import Folders, both_say


def main() -> None:
    folders = Folders(Path(sys.argv[1]))
    for line in sys.stdin:
        assert "transformers" not in sys.modules
        child = os.fork()
        if not child:
            try:
                said = repr(trio.run(both_say, folders, tuple(json.loads(line))))
            except Exception as error:  # noqa: BLE001  (told in place of the answers)
                said = repr(error)
            sys.stdout.write(said.replace("\n", " ") + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


main()

"""The claims of the scripts in this folder. Each is printed with its figures; a claim that fails makes the exit status
1."""

from __future__ import annotations

import sys

from attrs import define


@define
class Claims:
    """The count of the claims that fail."""

    failed: int = 0

    def __call__(self, holds: bool, what: str) -> None:
        """Prints whether a claim holds, and counts it if it fails."""
        print(f"{'holds' if holds else 'FAILS'}: {what}", flush=True)
        self.failed += not holds

    def exit(self) -> None:
        """Ends the process, with status 1 if a claim has failed."""
        sys.exit(1 if self.failed else 0)

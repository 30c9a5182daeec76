"""Files in the user's cache folder, in which an engine keeps what it has measured on this machine."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen


@frozen
class CacheFile:
    """A JSON object in a file that may be removed at any time.

    A file that cannot be read counts as an empty object. A file that cannot be written is no error: the engine measures
    again next time."""

    path: Path

    @classmethod
    def of_user(cls, name: str) -> CacheFile:
        """Returns the file ``name`` in the user's cache folder (XDG Base Directory Specification)."""
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or os.curdir, ".cache")
        return cls(Path(root) / "triolet" / name)

    def read(self) -> dict[str, Any]:
        """Returns the stored object."""
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, value: Mapping[str, Any]) -> None:
        """Stores ``value`` in place of the old object. The file is replaced as a whole, so that two processes may write
        at the same time."""
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(value, indent=1), encoding="utf-8")
            fresh.replace(self.path)
        except OSError as error:
            logging.getLogger("triolet").info("%s is not remembered: %s", self.path, error)

"""The settings in a checkpoint's JSON files, each checked where it is read: damage is reported by file and setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `CheckpointError` when it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; a checkpoint's settings are a JSON object")
    return value


@frozen
class Settings:
    """One file's settings. A getter raises `CheckpointError` for a value of another kind than it promises."""

    path: Path
    values: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read_if_there(cls, path: Path) -> Settings | None:
        """The settings in ``path``; ``None`` where there is no such file."""
        return cls(path, read_json(path)) if path.is_file() else None

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """The value as it is written; ``None`` where it is not."""
        return self.values.get(name)

    def whole(self, name: str, *, least: int = 1) -> int:
        """A whole number, ``least`` or more."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < least:
            raise self.bad(name, f"a whole number, {least} or more")
        return int(value)

    def flag(self, name: str) -> bool | None:
        """True or false; ``None`` where it is not written."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """A JSON object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.bad(name, "a JSON object")
        return value

    def bad(self, name: str, allowed: str) -> CheckpointError:
        """The error to raise where the setting's value is none of ``allowed``."""
        return CheckpointError(
            f"{self.path} has {name}={self.get(name)!r}; allowed: {allowed}. Mend it, or save the checkpoint again"
        )

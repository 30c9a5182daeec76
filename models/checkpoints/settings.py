"""The settings in a checkpoint's JSON files. Each setting is checked when it is read, and errors name the file and the
setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from ...core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises `CheckpointError` if the file cannot be read or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download or save the checkpoint again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; a checkpoint's settings are a JSON object")
    return value


@frozen
class FileSettings:
    """The settings of one file. Each getter raises `CheckpointError` if the value is of another kind than the getter
    returns."""

    path: Path
    values: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read_if_there(cls, path: Path) -> FileSettings | None:
        """Reads the settings in ``path``; ``None``: the file does not exist."""
        return cls(path, read_json(path)) if path.is_file() else None

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """Returns the value as it is written; ``None``: the file has no such setting."""
        return self.values.get(name)

    def whole(self, name: str, *, least: int = 1) -> int:
        """Returns a whole number, ``least`` or more."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < least:
            raise self.bad(name, f"a whole number, {least} or more")
        return int(value)

    def flag(self, name: str) -> bool | None:
        """Returns true or false; ``None``: the file has no such setting."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Returns a JSON object."""
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.bad(name, "a JSON object")
        return value

    def tokens(self, name: str, vocabulary: int, *, cut: bool = False) -> tuple[int, ...]:
        """Returns the ids of one token or of several; empty: the file has no such setting. Ids outside the
        ``vocabulary`` are refused, or left out if ``cut`` is true."""
        value = self.get(name)
        found = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(is_integer(token) and (cut or 0 <= token < vocabulary) for token in found):
            raise self.bad(name, f"token ids from 0 to {vocabulary - 1}, the vocabulary of config.json, or null")
        return tuple(token for token in found if 0 <= token < vocabulary)

    def bad(self, name: str, allowed: str) -> CheckpointError:
        """Returns the error to raise if the setting's value is not ``allowed``."""
        return CheckpointError(
            f"{self.path} has {name}={self.get(name)!r}; allowed: {allowed}. Correct it, or save the checkpoint again"
        )


def processor_settings(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of a checkpoint's image processor, which has a file of its own or is a part of another."""
    whole = FileSettings.read_if_there(folder / "processor_config.json")
    own = whole.get("image_processor") if whole else None
    found = FileSettings.read_if_there(folder / "preprocessor_config.json")
    return own or (found.values if found else {})


def is_integer(value: object) -> bool:
    """True for an integer. True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def adapter_rank(folder: Path) -> int:
    """Returns the largest rank of the adapter in ``folder``, as its settings say.

    Raises:
        CheckpointError: there is no adapter, or its settings are damaged.
    """
    settings = FileSettings.read_if_there(folder / "adapter_config.json")
    if settings is None:
        raise CheckpointError(f"{folder} lacks an adapter (adapter_config.json); save one there with peft")
    others = settings.get("rank_pattern") or {}
    ranks: list[int] = [rank for rank in others.values() if is_integer(rank)] if isinstance(others, dict) else []
    return max([settings.whole("r"), *ranks])


def adapter_bytes(folder: Path) -> int:
    """Returns the most bytes that the adapter in ``folder`` takes once it is loaded; 0: its file is missing, as a load
    will tell."""
    file = folder / "adapter_model.safetensors"
    return file.stat().st_size if file.is_file() else 0

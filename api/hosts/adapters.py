"""The adapters that are loaded into an engine, by the names that callers gave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from ...core.checks import shown
from ...core.errors import InvalidRequest, UnknownModel
from .backend import Backend


@define(eq=False)
class Adapters:
    """The key of each adapter, by its name. A request keeps the key that its adapter's name had when it was made."""

    _keys: dict[str, str] = field(factory=dict, init=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of the loads."""
        return tuple(self._keys)

    async def load(self, backend: Backend, name: Any, folder: Any) -> None:
        """Implements `Engine.load_adapter`."""
        if not isinstance(name, str) or not name.strip():
            raise InvalidRequest(f"an adapter is named {shown(name)}; allowed: a text that is not blank")
        if not isinstance(folder, str | Path):
            raise InvalidRequest(f"folder={shown(folder)}; allowed: the folder of an adapter, as a text or a Path")
        key = await backend.load_adapter(str(folder))
        before = self._keys.pop(name, None)
        self._keys[name] = key
        if before is not None:
            backend.unload_adapter(before)

    async def unload(self, backend: Backend, name: Any) -> None:
        """Implements `Engine.unload_adapter`."""
        await trio.lowlevel.checkpoint()
        key = self.key(name)
        del self._keys[name]
        backend.unload_adapter(key)

    def key(self, name: Any) -> str:
        """Returns the key of the adapter ``name``; empty for ``None``.

        Raises:
            UnknownModel: there is no such adapter.
        """
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self._keys:
            there = ", ".join(self._keys) or "none, since none is loaded"
            raise UnknownModel(f"there is no adapter {shown(name)}; allowed: {there}. Use load_adapter(name, folder)")
        return self._keys[name]

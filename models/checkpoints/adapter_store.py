"""`AdapterStore`: the adapters that are loaded, as they are stored, in host memory. Slots get copies of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from attrs import define, field
from torch import Tensor

from .lora import Adapter


@define(eq=False)
class AdapterStore:
    """Adapters by their keys, each with the number of times that it was loaded."""

    _adapters: dict[str, Adapter] = field(factory=dict, init=False, repr=False)
    _loads: Counter[str] = field(factory=Counter, init=False)

    def add(self, adapter: Adapter) -> str:
        """Keeps an adapter, or counts the equal one that is there. Returns its key."""
        self._adapters.setdefault(adapter.key, adapter)
        self._loads[adapter.key] += 1
        return adapter.key

    def get(self, key: str) -> Adapter:
        """Returns an adapter that is loaded."""
        return self._adapters[key]

    def drop(self, key: str) -> None:
        """Counts an adapter once less; at 0 it is forgotten."""
        assert self._loads[key], f"adapter {key} is dropped, but it is not loaded"
        self._loads[key] -= 1
        if not self._loads[key]:
            del self._loads[key], self._adapters[key]

    def tensors(self) -> Iterator[Tensor]:
        """Yields the matrices of all adapters."""
        for adapter in self._adapters.values():
            for change in adapter.changes.values():
                yield from (change.down, change.up)

    def release(self) -> None:
        """Forgets all adapters."""
        self._adapters.clear()
        self._loads.clear()

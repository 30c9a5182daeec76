"""Memory that is a library's own, of which no tensor tells."""

from __future__ import annotations

from abc import ABC, abstractmethod


class NativeMemory(ABC):
    """An object with memory that is given back when the object is gone. Nobody but the object refers to the memory."""

    __slots__ = ("__weakref__",)

    @abstractmethod
    def nbytes(self) -> int:
        """How many bytes it holds."""

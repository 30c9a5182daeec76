"""The process that an engine belongs to. A fork has a copy of the engine's memory, and none of its threads."""

from __future__ import annotations

import os

from attrs import field, frozen

from ..core.errors import EngineStateError


@frozen
class Process:
    """The process in which this object was made. In its forks, an engine does nothing and gives nothing back, since all
    that it has, down to the sockets that wake its loop, is the parent's."""

    _id: int = field(factory=os.getpid, init=False)

    @property
    def is_forked(self) -> bool:
        """True in a fork of the process."""
        return os.getpid() != self._id

    def check(self) -> None:
        """Raises `EngineStateError` in a fork of the process."""
        if self.is_forked:
            raise EngineStateError(
                f"the engine of process {self._id} was used in a fork of its process ({os.getpid()}), which does not "
                "have the engine's threads; allowed: the process in which it was opened. In a fork, open another "
                "engine, by SyncEngine(...) or in an event loop that the fork runs itself"
            )

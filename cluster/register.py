"""`Register`: the reports of replicas that have left. An actor of Ray's, one for each deployment.

It lives as long as the process that has deployed them, so that its end tells them of that process's death, too.
"""

from __future__ import annotations

import asyncio

from attrs import frozen


@frozen(kw_only=True)
class Departure:
    """The report of a replica that has left in order.

    Attributes:
        replica: its name.
        bytes_held: on its device, after the engine's end: 0, or the end has failed.
        outputs_held: encoder outputs on its books.
        error: of the engine's end, or ``None``.
    """

    replica: str
    bytes_held: int
    outputs_held: int
    error: str | None


NAMESPACE = "serve"  # of Ray's names: that of the replicas


class Register:
    """Keeps the departures, in their order."""

    def __init__(self) -> None:
        self._departures: list[Departure] = []
        self._is_open = False

    async def watch(self) -> None:
        """Never answers. It breaks when the process that has deployed the caller is no more."""
        await asyncio.Event().wait()

    async def open(self) -> None:
        """Notes that every replica has loaded the model."""
        self._is_open = True

    async def is_open(self) -> bool:
        """True if every replica has loaded the model once: if one cannot later, that is not the model's fault."""
        return self._is_open

    async def note(self, departure: Departure) -> None:
        """Keeps a departure. A replica calls it last of all."""
        self._departures.append(departure)

    async def read(self, first: int) -> list[Departure]:
        """Returns the departures from the ``first`` on."""
        return self._departures[first:]


def quarantine_of(deployment: str) -> str:
    """Returns the name of the application that the suspects of a deployment have for themselves."""
    return f"{deployment}-quarantine"


def name_of(deployment: str) -> str:
    """Returns the name of a deployment's register on Ray."""
    return f"{deployment} register"

"""`Register`: an actor on Ray that keeps the reports of replicas that have left, one for each deployment.

The register lives as long as the process that has deployed the replicas. So replicas know by its end that the process
is dead.
"""

from __future__ import annotations

import asyncio

from attrs import frozen


@frozen(kw_only=True)
class Departure:
    """The report of a replica that has left in order.

    Attributes:
        replica: the name of the replica.
        bytes_held: the bytes on its device after the end of the engine; 0 unless the end has failed.
        outputs_held: the number of encoder outputs in its books.
        error: the error of the engine's end; ``None``: there was none.
    """

    replica: str
    bytes_held: int
    outputs_held: int
    error: str | None


NAMESPACE = "serve"  # Ray's namespace of the replicas


class Register:
    """Keeps the departures in the order in which they come."""

    def __init__(self) -> None:
        self._departures: list[Departure] = []
        self._is_open = False

    async def watch(self) -> None:
        """Never returns. The call fails when the process that has deployed the caller has ended."""
        await asyncio.Event().wait()

    async def open(self) -> None:
        """Notes that every replica has loaded the model."""
        self._is_open = True

    async def is_open(self) -> bool:
        """True if every replica has loaded the model before. If a later replica cannot load it, the model is not at
        fault.
        """
        return self._is_open

    async def note(self, departure: Departure) -> None:
        """Keeps a departure. It is the last call of a replica."""
        self._departures.append(departure)

    async def read(self, first: int) -> list[Departure]:
        """Returns the departures from index ``first`` on."""
        return self._departures[first:]


def quarantine_of(deployment: str) -> str:
    """Returns the name of the application that runs the suspects of a deployment."""
    return f"{deployment}-quarantine"


def name_of(deployment: str) -> str:
    """Returns the name of a deployment's register on Ray."""
    return f"{deployment} register"

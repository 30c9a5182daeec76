"""`Register`: where replicas that leave say what they have left. An actor of Ray's, one for each deployment.

It lives as long as the process that has deployed them, and so tells them of that process's death, too.
"""

from __future__ import annotations

import asyncio

from attrs import frozen


@frozen(kw_only=True)
class Departure:
    """A replica has left in order.

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
        """Every replica has loaded the model."""
        self._is_open = True

    async def is_open(self) -> bool:
        """Whether every replica had loaded the model once: one that cannot is not the model's fault then."""
        return self._is_open

    async def note(self, departure: Departure) -> None:
        """A replica calls it, last of all."""
        self._departures.append(departure)

    async def read(self, first: int) -> list[Departure]:
        """The departures from the ``first`` on."""
        return self._departures[first:]


def quarantine_of(deployment: str) -> str:
    """The name of the application that the suspects of a deployment have for themselves."""
    return f"{deployment}-quarantine"


def name_of(deployment: str) -> str:
    """The name of a deployment's register on Ray."""
    return f"{deployment} register"

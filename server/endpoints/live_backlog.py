"""`Backlog`: what the client of a live session has said and nobody has heard yet."""

from __future__ import annotations

import math
from typing import TypeAlias

import trio
from attrs import define, field, frozen

from .live_audio import Samples
from .live_settings import Settings

MOST_SAMPLES = 14_400_000  # 28.8 MB: 600 s at 24,000 Hz
_OF_EVENT = 128  # samples that are as large as a command without any: else tiny ones would have no bound


@frozen
class Audio:
    """More of the turn's audio, which is not empty."""

    samples: Samples


@frozen
class EndTurn:
    """``keep``: tell the text of what was heard. ``then``: the settings from now on."""

    keep: bool
    then: Settings | None = None


Command: TypeAlias = Audio | EndTurn


class TooMuch(Exception):
    """The client says so much, or leaves so much unread, that its session ends."""


@define(eq=False)
class Backlog:
    """Commands in order. Putting one never waits: who waits would not hear that the client has gone."""

    _held: int = field(default=0, init=False)  # samples, or as large
    _give: trio.MemorySendChannel[tuple[Command, int]] = field(init=False)
    _take: trio.MemoryReceiveChannel[tuple[Command, int]] = field(init=False)
    is_closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._give, self._take = trio.open_memory_channel(math.inf)

    def put(self, command: Command, size: int) -> None:
        """``size``: samples, or characters of the settings.

        Raises:
            TooMuch: with it more than `MOST_SAMPLES` would wait.
        """
        size += _OF_EVENT
        if self._held + size > MOST_SAMPLES:
            raise TooMuch(f"more than {MOST_SAMPLES:,} samples wait to be heard; send no faster than the model hears")
        self._held += size
        self._give.send_nowait((command, size))

    async def take(self) -> Command | None:
        """The next command; ``None``: no more comes."""
        try:
            command, size = await self._take.receive()
        except trio.EndOfChannel:
            return None
        self._held -= size
        return command

    def close(self) -> None:
        """No more comes."""
        self.is_closed = True
        self._give.close()

"""Inboxes: unbounded memory channels, emptied a batch at a time."""

from __future__ import annotations

from typing import TypeVar

import trio

Message = TypeVar("Message")


def drain(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Takes every message that is there now."""
    batch: list[Message] = []
    while True:
        try:
            batch.append(inbox.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return batch


async def take_all(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Waits for one message and takes all others that are there: messages that arrive together are decided together.

    Cancellation loses no message: after the first one there is no checkpoint.
    """
    return [await inbox.receive(), *drain(inbox)]

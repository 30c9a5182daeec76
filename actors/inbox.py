"""Inboxes: unbounded memory channels, emptied a batch at a time."""

from __future__ import annotations

from typing import TypeVar

import trio

Message = TypeVar("Message")


def drain(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Every message that is there now."""
    batch: list[Message] = []
    while True:
        try:
            batch.append(inbox.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return batch


async def take_all(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Waits for one message and takes every further one that is there: what arrived together is decided together.

    Nothing is lost under cancellation: after the first message there is no further checkpoint.
    """
    return [await inbox.receive(), *drain(inbox)]

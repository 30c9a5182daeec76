"""Inboxes: unbounded memory channels, emptied a batch at a time."""

from __future__ import annotations

from typing import TypeVar

import trio

Message = TypeVar("Message")


def drain(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Takes all messages that are in the inbox now."""
    batch: list[Message] = []
    while True:
        try:
            batch.append(inbox.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            return batch


async def take_all(inbox: trio.MemoryReceiveChannel[Message]) -> list[Message]:
    """Waits for one message, and takes all other messages that are in the inbox then. So messages that arrive together
    are handled together.

    Cancellation loses no message, since there is no checkpoint after the first message.
    """
    return [await inbox.receive(), *drain(inbox)]

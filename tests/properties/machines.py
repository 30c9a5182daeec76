"""What the state machines of this folder share."""

from __future__ import annotations

import sys
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.request import EncoderItem


def item(key: str, *, size: int = 1, embeddings: int = 1, payload: Any = None) -> EncoderItem:
    """An encoder item, as a ledger's acquire names it."""
    return EncoderItem(key=key, payload=payload, embeddings=embeddings, size=size)


def bytes_by_state(ledger: EncoderLedger) -> dict[str, int]:
    """The bytes of the ledger's entries in each state, as its statistics must tell them."""
    found = {state.value: 0 for state in State if state is not State.ABSENT}
    for state, _, size in ledger.entries().values():
        found[state.value] += size
    return found


class Machine(RuleBasedStateMachine):
    """Hypothesis calls `teardown` after a failure too, where an error of its own would take the place of the first one:
    liveness is checked only where nothing has ``failed``."""

    def __init__(self) -> None:
        super().__init__()
        self._around = sys.exception()

    @property
    def failed(self) -> bool:
        """Within `teardown`: whether it is called because of an error."""
        return sys.exception() is not self._around

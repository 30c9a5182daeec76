"""What the state machines of this folder share."""

from __future__ import annotations

import sys

from hypothesis.stateful import RuleBasedStateMachine


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

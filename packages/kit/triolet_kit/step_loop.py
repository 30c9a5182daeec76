"""A thread for engines whose own loop calls the device: the loop stays as it is, and the kit plays the device.

The loop runs in a thread of its own, and calls a `StepLoop` where it would receive requests, launch a step, and wait
for the tokens. In these calls it stands still until the adapter calls. So one of the two threads runs at a time; what
they hand over goes through queues, and there is no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .findings import SPEAKS, BrokenPromise

_PATIENCE = 1000  # turns of the loop in which it waits for no step, though one is in flight


class LoopEnded(BaseException):
    """The error that ends the engine's loop when its workload is over. It is no `Exception`, so that the loop does not
    take it for one of a request's.
    """


class StepLoop:
    """An engine's step loop, taken in pieces. The adapter's ``schedule`` calls `plan`, its ``update`` calls `take`, and
    its ``close``, which the kit calls at the end of each workload, calls `close`. The engine's loop calls the other
    methods, in its thread.

    Args:
        run: the engine's loop. It gets the `StepLoop`, and returns by the error `LoopEnded`, which a call of the
            `StepLoop` raises.
    """

    def __init__(self, run: Callable[[StepLoop], object]) -> None:
        self._asked, self._given = SimpleQueue[Any](), SimpleQueue[Any]()
        self._planned: list[Any] = []
        self._over = False
        self._thread = Thread(target=self._main, args=(run,), name="the engine's loop", daemon=True)
        self._thread.start()
        self._at = self._reached()

    # -- called by the adapter ---------------------------------------------------------------------------------------

    def plan(self) -> Any:
        """Lets the loop go on until it launches a step, and returns the step. ``None``: it launches none, since it
        waits for a step in flight, or has taken a whole turn.
        """
        turns = int(self._at == "turn")
        while not self._planned and self._at != "wait" and turns < 2:
            self._go_on()
            turns += self._at == "turn"
        return self._planned.pop(0) if self._planned else None

    def take(self, tokens: Mapping[str, int]) -> None:
        """Lets the loop go on until it waits for the oldest step, gives it the step's ``tokens``, and lets it work with
        them. A step that it launches on the way is the next one that `plan` returns.
        """
        for _ in range(_PATIENCE):
            if self._at == "wait":
                return self._go_on(tokens)
            self._go_on()
        raise BrokenPromise(SPEAKS, f"the loop took {_PATIENCE} turns without waiting for a step", kind="never waits")

    def close(self) -> None:
        """Ends the loop and its thread. What the loop raises then is not told, since it ends so in the kit alone."""
        self._over = True
        while self._at != "ended":
            self._given.put(None)
            self._at = self._asked.get()
        self._thread.join()

    def _go_on(self, given: Any = None) -> None:
        if self._at == "ended":
            raise BrokenPromise(SPEAKS, "the engine's loop has returned before its workload was over", kind="returns")
        self._given.put(given)
        self._at = self._reached()

    def _reached(self) -> str:
        reached = self._asked.get()
        if not isinstance(reached, str):
            self._at = str(self._asked.get())
            raise reached
        return reached

    # -- called by the engine's loop, in its thread ------------------------------------------------------------------

    def turn(self) -> None:
        """Begins a turn of the loop. Call it where the engine receives requests: here the clients act."""
        self._ask("turn")

    def launch(self, step: Any) -> None:
        """Launches a step on the device, and returns at once."""
        self._planned.append(step)
        self._ask("launch")

    def wait(self) -> Mapping[str, int]:
        """Waits for the oldest step that was launched. Returns its tokens, by request."""
        tokens: Mapping[str, int] = self._ask("wait")
        return tokens

    def run(self, step: Any) -> Mapping[str, int]:
        """Launches a step and waits for it."""
        self.launch(step)
        return self.wait()

    def _ask(self, what: str) -> Any:
        self._asked.put(what)
        given = self._given.get()
        if self._over:
            raise LoopEnded
        return given

    def _main(self, run: Callable[[StepLoop], object]) -> None:
        try:
            run(self)
        except LoopEnded:
            return
        except Exception as error:  # noqa: BLE001  (raised in the adapter's call)
            self._asked.put(error)
        finally:
            self._asked.put("ended")

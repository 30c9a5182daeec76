"""The trace checker's books of recurrent states."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from .events import StepBegun


@define(eq=False)
class StateBooks:
    """The states of each request, by the steps that were sent. A request has the states of its last step until it stops
    running (`drop`), and those of a step in flight in any case."""

    _owners: dict[int, str] = field(factory=dict, init=False)
    _states: dict[str, tuple[int, ...]] = field(factory=dict, init=False)  # of each request

    def begun(self, step: StepBegun, flights: Iterable[StepBegun]) -> str:
        """Notes that a step was sent after ``flights``, which are not answered. Returns what is wrong with its states;
        an empty text if nothing is."""
        if not step.states:
            return ""
        written = dict(zip(step.states, step.owners, strict=True)) | dict.fromkeys(step.kept, "")
        if len(written) < len(step.states) + len(step.kept):
            return "writes a state twice"
        if shared := written.keys() & set(step.sources):
            return f"writes states {sorted(shared)}, which its requests go on from"
        taken = dict(self._owners)
        for flight in flights:
            if early := set(flight.kept).intersection(step.sources):
                return f"goes on from states {sorted(early)}, which step {flight.step_id} writes"
            taken |= dict(zip(flight.states, flight.owners, strict=True))
            taken |= dict.fromkeys((*flight.kept, *flight.sources), f"step {flight.step_id}")
        for state, name in written.items():
            if taken.get(state, name) != name:
                return f"writes state {state}, which {taken[state]} has"
        for name in dict.fromkeys(step.owners):
            self.drop(name)
            self._states[name] = tuple(
                state for state, owner in zip(step.states, step.owners, strict=True) if owner == name
            )
            self._owners |= dict.fromkeys(self._states[name], name)
        return ""

    def drop(self, request_id: str) -> None:
        """Notes that a request does not run any more, and has no states but those of steps in flight."""
        for state in self._states.pop(request_id, ()):
            del self._owners[state]

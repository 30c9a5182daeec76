"""What sequences have asked the encoder cache for, and the rule that keeps them from waiting for each other.

A request with placed items (images among its tokens) asks for the encoder outputs of as many as fit the encoder cache
together, then runs up to the first one that it does not hold, gives those back that answered steps have read, and asks
for the next ones only when it holds nothing. The cache serves asks in order, so that of all who wait only the first one
may hold a part of what it asks. Who waits for a start while a running one waits for outputs gives up its own
(`Planner`). So nobody holds what another one needs while it waits itself.
"""

from __future__ import annotations

from attrs import define, field

from .actions import AcquireItem, Action, ReleaseItem
from .request import EncoderItem
from .sequence import Ask, Phase, Sequence


@define(eq=False)
class Asks:
    """The asks of all sequences; what is to be told goes to ``actions``. ``capacity``: bytes of the encoder cache."""

    capacity: int
    actions: list[Action]
    _askers: dict[str, Sequence] = field(factory=dict, init=False)  # by holder

    def ready(self, holder: str) -> None:
        """``holder`` may read its encoder output. An unknown holder has withdrawn meanwhile."""
        sequence = self._askers.get(holder)
        if sequence is not None:
            _ask_of(sequence, holder).held = True

    def refused(self, holder: str) -> Sequence | None:
        """The encoder cache will not give the output; whose ask it was. ``None``: withdrawn meanwhile."""
        sequence = self._askers.pop(holder, None)
        if sequence is not None:
            del sequence.asks[_ask_of(sequence, holder).item.key]
        return sequence

    def ask_for(self, sequence: Sequence, item: EncoderItem) -> None:
        """Asks for one item."""
        ask = Ask(f"{sequence.request.id}/{sequence.asked}", item)
        sequence.asked += 1
        sequence.asks[item.key] = ask
        self._askers[ask.holder] = sequence
        self.actions.append(AcquireItem(ask.holder, item))

    def ask_from(self, sequence: Sequence, start: int) -> None:
        """Asks for the next items from position ``start`` on, as many as fit the encoder cache together, at least one.
        The sequence must hold nothing."""
        assert not sequence.asks, f"{sequence.request.id} would wait for encoder outputs while it holds others"
        left = self.capacity
        for item in sequence.needed(start):
            left -= item.size
            if left < 0 and sequence.asks:
                return
            self.ask_for(sequence, item)

    def release_read(self, sequence: Sequence) -> None:
        """Gives back the placed items that lie wholly before what answered steps have fed. A running sequence that
        holds nothing then, or cannot go on with what it holds, asks for its next ones."""
        if not sequence.asks or not sequence.placements:
            return
        needed = {item.key for item in sequence.needed(sequence.fed)}
        for key in [key for key in sequence.asks if key not in needed]:
            self._release(sequence, key)
        if sequence.phase is not Phase.RUNNING or sequence.waits_for_item:
            return
        if sequence.reach(sequence.fed) <= sequence.fed:
            self.release_all(sequence)  # what it holds comes once more, but only behind something else
        if not sequence.asks:
            self.ask_from(sequence, sequence.fed)

    def release_all(self, sequence: Sequence) -> None:
        """Gives back what it holds and withdraws what it waits for."""
        for key in list(sequence.asks):
            self._release(sequence, key)

    def _release(self, sequence: Sequence, key: str) -> None:
        ask = sequence.asks.pop(key)
        del self._askers[ask.holder]
        self.actions.append(ReleaseItem(ask.holder, key))


def _ask_of(sequence: Sequence, holder: str) -> Ask:
    return next(ask for ask in sequence.asks.values() if ask.holder == holder)

"""The declaration of a cache manager: the ways in which its engine differs from the kit's assumptions."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class StepDeclaration:
    """The ways in which an engine differs from the kit's assumptions. Each argument turns off one action or one check
    of the kit; all other promises stay.

    Args:
        closes: the cache has ``close``. False: the manager is never closed while the process lives.
        resets: the cache has ``reset``, for engines that empty the encoder cache when weights change.
        shared: requests share the entries of equal keys. False: each request has entries of its own, as in the
            cross-attention of encoder-decoders. No two requests ask for one key then.
        missed_free: a free of a key that is not on the device is a ``"fault"``, or ``"harmless"`` if the runner ignores
            it. Outputs that such a free fails to remove are still found.
        may_fail_after_plan: planned encodings may fail. False: a failed encoding ends the engine.
        refuses: the cache answers ``"never"`` if an output is larger than the room. False: the engine refuses such
            requests before they reach the cache manager, so the kit does not make any.
        evicts_within_step: the encodings of a step may use the room that its frees give back. False: the device frees
            after the encodings and reads, so that only the next step can use this room.
        budgets: the engine has a budget of encoder compute for each step. False: the budget is always four times the
            room.
        repeats: ``release`` and ``finish`` are called again for what was given back already, as a step loop does.
            False: they are called once, and only if something is held.
        preempts_within_step: a request that has asked in a step may be preempted while that step is planned. False:
            requests are preempted between two steps, by ``finish``.
        reads_in_own_step: an output is read only in the step that encodes it. Encoder-decoders do so, since they keep
            the cross-attention keys and values instead. So later steps may free what a request holds, and a request
            does not ask again for a key that it holds.
        steps_in_flight: the most steps that are planned and have not run. 1: the engine plans a step after the last one
            has run.
    """

    closes: bool = True
    resets: bool = False
    shared: bool = True
    missed_free: str = field(default="fault", validator=validators.in_(("fault", "harmless")))
    may_fail_after_plan: bool = True
    refuses: bool = True
    evicts_within_step: bool = True
    budgets: bool = True
    repeats: bool = True
    preempts_within_step: bool = True
    reads_in_own_step: bool = False
    steps_in_flight: int = field(default=2, validator=validators.in_((1, 2)))

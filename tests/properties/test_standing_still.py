"""Nobody stands still: histories of scarce room, by dice alone, over the planner machine and its promises.

Once an engine stood still for ever after one failed step. The machine's own examples had not met the history: a request
must wait for its image again when its step has failed, another one has its place by then, and nobody comes later and
sets things going. Hypothesis draws few long examples; these are many short ones, of little else.
"""

from __future__ import annotations

from random import Random

from hypothesis import settings

from .planner_machine import PLACED, PlannerMachine


class ScarceMachine(PlannerMachine):
    """Few places, urgent images among patient texts, and answers of the encoder cache that take their time: a request
    whose step has failed finds others in its place when it may start again."""

    def wander(self, dice: Random) -> None:
        """One history, by dice alone: hundreds of them take as long as ten of Hypothesis's examples."""
        self.open(
            pages=dice.randint(6, 12),
            slots=1,
            running=dice.choice((1, 1, 2, 3)),
            budget=dice.randint(4, 12),
            capacity=dice.randint(1, 3),
            depth=dice.randint(1, 2),
            caching=True,
            delays=True,
        )
        rules = (self.text, self.image, *2 * (self.step_is_planned, self.step_ends, self.encoding_ends, self.answer))
        for _ in range(60):
            dice.choice(rules)(dice)
        self.teardown()

    def text(self, dice: Random) -> None:
        poison = dice.random() < 0.1
        self.submit(dice.randint(1, 4), None, dice.randint(2, 6), dice.randint(0, 2), poison=poison)

    def image(self, dice: Random) -> None:
        self.submit_placed(dice.randint(0, 1), [dice.choice(sorted(PLACED))], dice.randint(1, 4), dice.randint(0, 1))

    def step_is_planned(self, _: Random) -> None:
        self.plan()

    def step_ends(self, dice: Random) -> None:
        self.device_steps(broken=dice.random() < 0.25, full=dice.random() < 0.2)

    def encoding_ends(self, dice: Random) -> None:
        self.device_encodes(broken=dice.random() < 0.1)

    def answer(self, dice: Random) -> None:
        self.cache_answers(dice.randint(1, 2))


def wander(histories: int) -> None:
    """Plays so many histories of `ScarceMachine`."""
    for seed in range(histories):
        ScarceMachine().wander(Random(seed))


def test_nobody_stands_still_where_room_is_scarce_and_steps_fail() -> None:
    wander(settings.default.max_examples)

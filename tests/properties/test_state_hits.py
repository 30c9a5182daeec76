"""What the prefix cache saves in models with recurrent layers: a state is there where prefixes end.

A hit needs the pages of a prefix and a state that has read exactly them. The simulated device refuses any other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from triolet.core.config import EngineConfig, Speculation
from triolet.core.planning.actions import Commit
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import Request, SamplingParams
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel

PAGE = 16


class Device:
    """A planner and a simulated device that answers each step at once."""

    def __init__(self, *, states: int = 16, drafts: int = 0, budget: int = 512, running: int = 4) -> None:
        model = SimModel(max_positions=8192, page_size=PAGE, pages=8192, states=states, vocabulary_size=50_000)
        speculation = Speculation(tokens=drafts) if drafts else None
        config = EngineConfig(max_running=running, max_step_tokens=budget, speculation=speculation)
        self.planner = Planner(PlannerLimits.of(model.describe(), config))
        self.executor = SimExecutor(model)
        self.executor.open()
        self.names = count()
        self.tokens: dict[str, list[int]] = {}

    def run(self, *prompts: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Returns the tokens that follow each of the prompts, which come together."""
        names = [f"r{next(self.names)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.tokens[name] = []
            sampling = SamplingParams(ignore_eos=True)
            request = Request(id=name, prompt_token_ids=tuple(prompt), max_tokens=max_tokens, sampling=sampling)
            self.planner.submit(request)
        while not self.planner.idle:
            while (plan := self.planner.next_step()) is not None:
                self.planner.step_done(self.executor.step(plan))
                for action in self.planner.take_actions():
                    if isinstance(action, Commit):
                        self.tokens[action.request_id] += [one.token_id for one in action.sampled]
        return [self.tokens[name] for name in names]

    @property
    def fed(self) -> int:
        statistics = self.planner.statistics()
        return statistics.tokens_fed - statistics.tokens_drafted + statistics.tokens_accepted


def text(length: int, seed: int) -> list[int]:
    return [2 + (seed * 7919 + place * 31) % 40_000 for place in range(length)]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("cut", [0, 3])
def test_a_conversation_feeds_its_new_tokens_and_little_more(cut: int, drafts: int) -> None:
    """Ten turns, at every place that prompt and answer may have in a page. The template of a model that reasons leaves
    out the last tokens of a prompt, which ask for reasoning, and the reasoning itself: then only the prompt comes
    again."""
    for first in range(PAGE):
        device, prompt, new = Device(drafts=drafts), text(200 + first, 1), 0
        before = 0
        for turn in range(10):
            answer = device.run(prompt, max_tokens=60 + first)[0]
            new += len(prompt) - before + len(answer)
            kept = prompt[: len(prompt) - cut] if cut else [*prompt, *answer]
            before = len(kept)
            prompt = [*kept, *text(100 + turn, 2 + turn)]
        assert device.fed <= 1.15 * new, f"{device.fed} tokens are fed for {new} new ones"


@pytest.mark.parametrize("shared", range(1490, 1490 + PAGE))
def test_prompts_that_share_a_beginning_find_it(shared: int) -> None:
    """64 requests share 1,500 tokens, and have 700 of their own. The first one finds what a request for the beginning
    alone has left."""
    device, beginning = Device(states=6, running=1), text(shared, 1)
    device.run(beginning, max_tokens=1)
    found = device.planner.statistics().tokens_cached
    for number in range(64):
        device.run([*beginning, *text(700, 2 + number)], max_tokens=4)
        now = device.planner.statistics().tokens_cached
        assert now - found >= (shared - 1) // PAGE * PAGE, f"request {number} finds {now - found} of {shared} tokens"
        found = now


def test_a_prefix_that_nobody_asked_for_alone_is_found_from_the_third_request_on() -> None:
    """The second one finds pages without a state, so it keeps one where it leaves the first one."""
    device, beginning, found = Device(states=6), text(1500, 1), list[int]()
    for number in range(5):
        before = device.planner.statistics().tokens_cached
        device.run([*beginning, *text(700, 2 + number)], max_tokens=4)
        found.append(device.planner.statistics().tokens_cached - before)
    assert found == [0, 0, 1488, 1488, 1488]


def test_completions_of_a_prompt_share_its_state() -> None:
    device, prompt = Device(states=16), text(1000, 1)
    device.run(prompt, max_tokens=1)
    before = device.fed
    device.run(*[prompt] * 4, max_tokens=8)
    assert device.fed - before <= 4 * (PAGE + 8)

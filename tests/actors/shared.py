"""What the tests of the engine in simulation share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import trio
from attrs import evolve, frozen

from triolet import Engine, SamplingParams
from triolet.actors.messages import End
from triolet.api.inputs.audio import Samples, content_key
from triolet.core import events
from triolet.core.model import ModelDescription
from triolet.core.plan import SampledToken
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import EOS, SimModel, expected_tokens

TEARDOWN = [
    "intake closed",
    "scheduler stopped",
    "encoder cache stopped",
    "device released",
    "runner stopped",
    "channels closed",
]


@frozen(kw_only=True)
class TextModel(SimModel):
    """One whose tokens are all text, but for the end."""

    def describe(self) -> ModelDescription:
        return evolve(super().describe(), text_tokens=None)


def audio(number: int) -> Samples:
    return np.full(1600, number / 100, np.float32)


def prompt(number: int) -> list[int]:
    return [1, 2 + number]


def expected(number: int, max_tokens: int = 20) -> tuple[int, ...]:
    tokens = expected_tokens(prompt(number), content_key(audio(number), "sim"), max_tokens)
    return tokens[:-1] if tokens[-1] == EOS else tokens


async def ask(engine: Engine, number: int, max_tokens: int = 20, **more: object) -> None:
    """One request, whose tokens must be those it would have had alone."""
    completion = await engine.generate(
        prompt_token_ids=prompt(number),
        audio=audio(number),
        sampling=SamplingParams(max_tokens=max_tokens),
        **more,
    )
    assert completion.token_ids == expected(number, max_tokens)


class Reader:
    """A request's stream: the tokens that it was given, and its end."""

    def __init__(self) -> None:
        self.token_ids: list[int | None] = []
        self.told: End | None = None
        self.ended = trio.Event()

    def put(self, sampled: tuple[SampledToken, ...]) -> None:
        self.token_ids += [one.token_id for one in sampled]

    def end(self, end: End) -> None:
        assert self.told is None, "a request ends once"
        self.told = end
        self.ended.set()


class Trace(list[events.Event]):
    def stages(self) -> list[str]:
        return [event.stage for event in self if isinstance(event, events.StageReached)]

    def of(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self if isinstance(event, kind)]

    def ends(self) -> list[str]:
        return [event.request_id for event in self if isinstance(event, events.RequestEnded)]


@asynccontextmanager
async def all_returned(executor: SimExecutor, trace: Trace) -> AsyncIterator[None]:
    """Whatever happens inside: every accepted request ends once, and the device is released last but for channels."""
    try:
        yield
    finally:
        assert not executor.is_open
        assert not executor.outputs
        accepted = [event.request_id for event in trace if isinstance(event, events.RequestQueued)]
        assert sorted(trace.ends()) == sorted(accepted)
        if "accepting" in trace.stages():
            assert [stage for stage in trace.stages() if stage in TEARDOWN] == TEARDOWN

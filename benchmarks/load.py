"""What the engine does under load, on virtual time and over devices that answer at once: one table, a row a figure.

::

    python benchmarks/load.py [--only BURST ...]

Virtual seconds and counts are the same on every machine. What is told in ms and us is the host's own work: of the
planner and the ledger alone in time of the CPU, of the whole engine by the wall clock. Run it on a machine that has
nothing else to do. A row that has a bound says whether it holds.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import click
import ledger
import numpy as np
import trio
from attrs import Factory, define, evolve, field, frozen
from trio.testing import MockClock

from triolet import Engine, EngineConfig, SamplingParams
from triolet.actors.worker import Job, ThreadWorker
from triolet.core import events
from triolet.core.model import ModelDescription
from triolet.core.plan import DeviceMemory, SampledToken, StepPlan, StepResult
from triolet.core.planning.actions import Acquire
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.planning.prefix import prompt_keys
from triolet.core.request import EncoderItem, Request
from triolet.testing import Kind, SimExecutor, SimModel, SimPreparer, SimWorker, sim_engine
from triolet.testing.sim import SECONDS
from triolet.testing.sim_model import IMAGE

BURST = 400  # requests at once
PAGE = 16  # positions, of the planner alone
TOKEN = 5  # what every device here samples


@frozen
class Row:
    """One figure; it holds up to ``most``, where there is one, from ``least`` on."""

    case: str
    figure: float
    unit: str
    most: float | None = None
    least: float | None = None

    @property
    def bound(self) -> str:
        """As the table says it."""
        if self.most is not None:
            return f"at most {self.most:g}"
        return "" if self.least is None else f"at least {self.least:g}"

    @property
    def verdict(self) -> str:
        """Whether it holds; nothing where there is no bound."""
        if self.most is None and self.least is None:
            return ""
        below = self.most is None or self.figure <= self.most
        return "holds" if below and (self.least is None or self.figure >= self.least) else "FAILS"


# -- engines on virtual time -------------------------------------------------------------------------------------------


def virtually(run: Callable[..., Awaitable[Any]], *args: object) -> Any:
    """What ``run`` returns, on a clock that jumps."""
    return trio.run(run, *args, clock=MockClock(autojump_threshold=0))


def takes(job: Job, argument: Any) -> float:
    """Seconds: an encode call costs something itself, and something for each of its items."""
    return 0.02 + 0.02 * len(argument) if job is Job.ENCODE else SECONDS[job]


def audio(number: int) -> np.ndarray:
    """A clip unlike all others."""
    return np.full(1600, number / 1000, np.float32)


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


async def transcribe(engine: Engine, number: int, *, priority: int = 0) -> None:
    """One request of Whisper, with a clip of its own."""
    await engine.generate(prompt_token_ids=[1, 2], audio=audio(number), sampling=tokens(40), priority=priority)


async def look(engine: Engine, number: int) -> None:
    """One request of a decoder, with an image of its own. What `Engine.generate` prepares in threads is made here."""
    prepared = SimPreparer(model=IMAGES).prepare((1, IMAGE, TOKEN), images=[4 * number + 3])
    request = Request(
        id=str(number), prompt_token_ids=prepared.token_ids, items=prepared.items, max_tokens=24, sampling=tokens(24)
    )
    async with engine.inside._submitted(request, wait=True) as mailbox:
        await mailbox.wait_end()


WINDOWS = SimModel(max_positions=64, pages=1000, cross_slots=32)
IMAGES = SimModel(kind=Kind.DECODER, max_positions=64, pages=4000)


@frozen(kw_only=True)
class Burst:
    """`BURST` requests at once, each with an encoder output of its own."""

    what: str
    model: SimModel
    ask: Callable[[Engine, int], Awaitable[None]]
    size: int  # bytes of an output
    embeddings: int  # of an output
    small: int  # outputs that the small cache has room for
    running: int

    def rows(self) -> Iterator[Row]:
        """The small cache against one that holds everything."""
        roomy, _ = virtually(self._run, 2 * BURST)
        seconds, batch = virtually(self._run, self.small)
        what = f"{BURST} {self.what}, room for {self.small}"
        yield Row(f"{what}: time, of that with room for all", seconds / roomy, "x", most=1.1)
        yield Row(f"{what}: mean encode batch", batch, "items", least=4)

    async def _run(self, outputs: int) -> tuple[float, float]:
        """Seconds, and the mean encode batch."""
        batches: list[int] = []

        def watch(event: events.Event) -> None:
            if isinstance(event, events.EncodeDispatched):
                batches.append(len(event.keys))

        config = EngineConfig(
            max_running=self.running,
            encoder_cache_bytes=outputs * self.size,
            encode_batch_embeddings=8 * self.embeddings,
            observer=watch,
        )
        async with sim_engine(SimExecutor(self.model), config=config, worker=SimWorker(duration=takes)) as engine:
            begun = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number in range(BURST):
                    nursery.start_soon(self.ask, engine, number)
            return trio.current_time() - begun, statistics.mean(batches)


def windows_in_a_burst() -> Iterator[Row]:
    """The encoder cache makes room for all whom it can serve."""
    return Burst(what="windows", model=WINDOWS, ask=transcribe, size=100, embeddings=10, small=66, running=32).rows()


def images_in_a_burst() -> Iterator[Row]:
    """As windows."""
    return Burst(what="images", model=IMAGES, ask=look, size=40, embeddings=4, small=64, running=64).rows()


def an_urgent_request() -> Iterator[Row]:
    """The place, in the order of ends, of a request with priority=-10 that comes when all others are there."""
    for where, outputs, pending in (("places", 1000, 1024), ("outputs", 8, 1024), ("the door", 1000, 64)):
        rank = virtually(_urgent, outputs, pending)
        yield Row(f"priority=-10 among {BURST} that wait for {where}: ended as number", rank, "", most=40)


async def _urgent(outputs: int, pending: int) -> int:
    ended: list[int] = []
    model = SimModel(max_positions=64, pages=1000, cross_slots=8)
    config = EngineConfig(
        max_running=8, encoder_cache_bytes=outputs * 100, max_pending=pending, encode_batch_embeddings=40
    )

    async def ask(engine: Engine, number: int, priority: int) -> None:
        await transcribe(engine, number, priority=priority)
        ended.append(number)

    async with sim_engine(SimExecutor(model), config=config) as engine, trio.open_nursery() as nursery:
        for number in range(BURST):
            nursery.start_soon(ask, engine, number, 0)
        await trio.sleep(1.5)
        before = len(ended)
        nursery.start_soon(ask, engine, BURST, -10)
    return ended.index(BURST) + 1 - before


def encodes_out_of_memory() -> Iterator[Row]:
    """Batches of more than two windows do not fit the device."""
    calls = virtually(_encode_in_little_memory)
    yield Row("encode calls that run out of memory", 100 * calls["too large"] / calls["all"], "%", most=3)


async def _encode_in_little_memory() -> Counter[str]:
    calls: Counter[str] = Counter()

    def fault(job: Job, argument: Any) -> Exception | None:
        if job is not Job.ENCODE:
            return None
        calls["all"] += 1
        if len(argument) <= 2:
            return None
        calls["too large"] += 1
        return MemoryError("CUDA out of memory")

    config = EngineConfig(max_running=32, encode_batch_embeddings=80, encoder_cache_bytes=100_000)
    async with sim_engine(SimExecutor(WINDOWS, fault=fault), config=config) as engine, trio.open_nursery() as nursery:
        for number in range(BURST):
            nursery.start_soon(transcribe, engine, number)
    return calls


def a_prompt_that_does_not_fit() -> Iterator[Row]:
    """A long prompt beside a request that grows until both have no room: is it read again and again?"""
    for caching in (False, True):
        fed, needed = virtually(_crowd, caching)
        yield Row(f"tokens fed per token needed, prefix_caching={caching}", fed / needed, "x", most=1.3)


async def _crowd(caching: bool) -> tuple[int, int]:
    model = SimModel(kind=Kind.DECODER, max_positions=400, pages=110, page_size=4)
    config = EngineConfig(max_running=8, max_step_tokens=32, prefix_caching=caching)
    async with sim_engine(SimExecutor(model), config=config) as engine, trio.open_nursery() as nursery:

        async def ask(prompt: list[int], count: int) -> None:
            await engine.generate(prompt_token_ids=prompt, sampling=tokens(count))

        async with trio.open_nursery() as both:
            both.start_soon(ask, [1, 2, 3], 300)
            await trio.sleep(1.5)
            both.start_soon(ask, [1, *(2 + number % 50 for number in range(339))], 10)
        nursery.cancel_scope.cancel()
        return engine.statistics().requests.tokens_fed, 3 + 299 + 340 + 9


# -- the planner alone -------------------------------------------------------------------------------------------------


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((number * 7 + index) % 900 + 1 for index in range(length))


def sampled(plan: StepPlan) -> StepResult:
    """What a device would answer."""
    answers = tuple(SampledToken(token_id=TOKEN if chunk.samples else None, logprob=-1.0) for chunk in plan.chunks)
    return StepResult(step_id=plan.step_id, sampled=answers)


def least(measure: Callable[[], float]) -> float:
    """Of three runs: what else the machine does only adds."""
    return min(measure() for _ in range(3))


@define
class Lane:
    """A planner, and the steps of it that are in flight. Encoder outputs are there as soon as they are asked for."""

    planner: Planner
    _flight: deque[StepPlan] = field(factory=deque)

    @classmethod
    def of(cls, *, running: int, pages: int, step_tokens: int = 2048, cross_slots: int = 0) -> Lane:
        limits = PlannerLimits(
            max_running=running,
            max_step_tokens=step_tokens,
            page_size=PAGE,
            pages=pages,
            cross_slots=cross_slots,
            eos_token_ids=frozenset({0}),
            prefix_caching=True,
        )
        return cls(Planner(limits))

    def submit(self, name: str, token_ids: tuple[int, ...], most: int, **more: Any) -> None:
        request = Request(id=name, prompt_token_ids=token_ids, max_tokens=most, **more)
        keys = prompt_keys(request, page_size=PAGE, identity="")  # which the engine has hashed in a thread
        self.planner.submit(evolve(request, page_keys=keys))

    def plan(self) -> None:
        """All that can be planned now."""
        self._answer()
        while (plan := self.planner.next_step()) is not None:
            self._flight.append(plan)
            self._answer()

    def _answer(self) -> None:
        for action in self.planner.take_actions():
            if isinstance(action, Acquire):
                self.planner.encoder_ready(action.holder)

    def step(self) -> tuple[StepPlan, float]:
        """The oldest step ends; what it was, and the seconds of computing until the next is planned."""
        ended = self._flight.popleft()
        result = sampled(ended)
        begun = time.thread_time()
        self.planner.step_done(result)
        self.plan()
        return ended, time.thread_time() - begun

    def steps(self, count: int) -> Iterator[tuple[StepPlan, float]]:
        return (self.step() for _ in range(count))


def a_long_prompt_beside_decoders() -> Iterator[Row]:
    """It comes before them in (priority, arrival). In how many steps in a row does a decoder get no token, and how much
    later has the long prompt its own first one?"""
    alone, _ = _read_beside(0)
    beside, longest = _read_beside(8)
    yield Row("steps in a row without a token for one of 8 decoders, 100k prompt beside", longest, "", most=0)
    yield Row("steps to the 100k prompt's first token, of those without decoders", beside / alone, "x", most=1.15)


def _read_beside(decoders: int) -> tuple[int, int]:
    """Steps to the long prompt's first token, and the longest run of steps without a token for some decoder."""
    lane = Lane.of(running=32, pages=20_000)
    for number in range(decoders):
        lane.submit(f"decoder {number}", prompt(number, 100), 1000)
    lane.plan()
    for _ in lane.steps(20 if decoders else 0):
        pass
    decoding = lane.planner.statistics().tokens_fed
    lane.submit("long", prompt(9, 100_000), 5, priority=-1)
    lane.plan()
    run = longest = 0
    for index, (plan, _) in enumerate(iter(lane.step, None)):
        ours = sum(chunk.samples for chunk in plan.chunks)
        run = run + 1 if ours < decoders else 0
        longest = max(longest, run)
        if ours > decoders or (not decoders and ours):
            return index, longest
    raise AssertionError(f"the long prompt has no token after {decoding} tokens of decoders")


def images_that_are_read() -> Iterator[Row]:
    """A decode step of requests whose prompts hold many images, against one without."""
    none = _step_with_images(0)
    yield Row("64 running, no image read: a decode step", none * 1e6, "us")
    yield Row("64 running, 200 images read by each: a decode step, of that", _step_with_images(200) / none, "x", 1.2)


def _step_with_images(images: int, running: int = 64) -> float:
    """Seconds, the median."""
    length, budget = images * 20 + 10, 8192
    lane = Lane.of(running=running, pages=running * (length // 16 + 40), step_tokens=budget)
    for number in range(running):
        lane.submit(f"r{number}", prompt(number, length), 400, items=tuple(_items(number, images)))
    lane.plan()
    for _ in lane.steps(running * length // budget + 10):
        pass
    return statistics.median(seconds for _, seconds in lane.steps(200))


def _items(number: int, images: int) -> Iterator[EncoderItem]:
    for index in range(images):
        span = (20 * index, 20 * index + 16)
        yield EncoderItem(key=f"image {number}-{index}", payload=1, embeddings=16, size=100, spans=(span,))


def cached_prompts_in_a_burst() -> Iterator[Row]:
    """Many requests at once of which all but the last tokens are cached."""
    for count, length in ((32, 16_000), (256, 16_000)):
        worst = least(partial(_longest_step, count, length)) * 1e3
        yield Row(f"{count} requests at once, {length // 1000}k of each cached: the longest step", worst, "ms", 5)


def _longest_step(count: int, length: int) -> float:
    lane = Lane.of(running=count + 1, pages=length // 16 + count * 10)
    shared = prompt(0, length)
    lane.submit("first", (*shared, 3), 1000)
    lane.plan()
    for _ in lane.steps(length // 2048 + 6):
        pass
    for number in range(count):
        lane.submit(f"r{number}", (*shared, 4, number + 5), 50)
    return max(seconds for _, seconds in lane.steps(6))


def withdrawals() -> Iterator[Row]:
    """Of requests that wait."""
    for items in (False, True):
        seconds = least(partial(_abort, items))
        yield Row(f"10,000 aborts, {'with' if items else 'without'} an encoder item", seconds * 1e3, "ms", 30)


def _abort(items: bool, count: int = 10_000) -> float:
    """Seconds."""
    lane = Lane.of(running=32, pages=4000, cross_slots=32)
    for number in range(count):
        item = EncoderItem(key=f"k{number}", payload=1, embeddings=1, size=1)
        lane.submit(f"r{number}", (1, 2, 3), 10, items=(item,) if items else ())
    lane.planner.take_actions()
    begun = time.thread_time()
    for number in reversed(range(count)):
        lane.planner.abort(f"r{number}")
    lane.planner.take_actions()
    return time.thread_time() - begun


def messages_of_the_ledger() -> Iterator[Row]:
    """What one costs by how many entries there are."""
    few, many = ledger.costs(10), ledger.costs(10_000)
    for message, cost in many.items():
        yield Row(f"encoder ledger of 10,000 entries: {message}", cost, "us")
        yield Row(f"encoder ledger: {message}, of that with 10 entries", cost / few[message], "x", most=2)


# -- the whole engine over a device that answers at once --------------------------------------------------------------


@define
class Instant:
    """An executor without a device."""

    model: SimModel
    steps: int = 0

    def open(self) -> ModelDescription:
        return self.model.describe()

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        return sampled(plan)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(device="sim", by_owner={})

    def encode(self, jobs: tuple[Any, ...]) -> None: ...

    def free(self, keys: tuple[str, ...]) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def hosts_work() -> Iterator[Row]:
    """Wall time of a step, all of it the host's: trio, actors, planner, tokens to their readers."""
    for stream in (True, False):
        for running, most in ((8, 0.15), (64, 0.6), (256, 2.5)):
            for waiting in (0, 1000):
                ms = trio.run(_serve, running, waiting, stream) * 1e3
                case = f"{running} {'streams' if stream else 'requests'} running, {waiting} waiting: a step"
                yield Row(case, ms, "ms", most if stream else None)


@define
class Readers:
    """Clients, of whom so many ``run``; the rest wait. ``done``: the first of those who run has ended."""

    engine: Engine
    length: int
    stream: bool
    done: trio.Event = Factory(trio.Event)

    async def read(self, number: int) -> None:
        request = partial(dict, prompt_token_ids=[1, *(2 + (number * 7 + index) % 50 for index in range(100))])
        sampling = SamplingParams(max_tokens=self.length)
        if self.stream:
            async with self.engine.stream(**request(), sampling=sampling) as deltas:
                async for _ in deltas:
                    pass
        else:
            await self.engine.generate(**request(), sampling=sampling)
        self.done.set()


async def _all_there(engine: Engine, running: int, waiting: int) -> None:
    """Returns when so many run and wait; nobody tells."""
    while (now := engine.statistics().requests).running < running or now.waiting < waiting:  # noqa: ASYNC110
        await trio.sleep(0.001)


async def _serve(running: int, waiting: int, stream: bool) -> float:
    """Seconds of a step."""
    model = SimModel(kind=Kind.DECODER, max_positions=8192, page_size=16, pages=running * 520, vocabulary_size=64)
    device = Instant(model)
    config = EngineConfig(max_running=running, max_pending=100_000, prefix_caching=True)
    async with Engine.from_parts(lambda: device, ThreadWorker, config=config) as engine:
        readers = Readers(engine, max(300, 20_000 // running), stream)
        async with trio.open_nursery() as nursery:
            for number in range(running + waiting):
                nursery.start_soon(readers.read, number)
            await _all_there(engine, running, waiting)
            steps, begun = device.steps, time.perf_counter()
            await readers.done.wait()
            seconds = (time.perf_counter() - begun) / (device.steps - steps)
            nursery.cancel_scope.cancel()
    return seconds


SUBJECTS: dict[str, Callable[[], Iterable[Row]]] = {
    "windows": windows_in_a_burst,
    "images": images_in_a_burst,
    "urgent": an_urgent_request,
    "long-prompt": a_long_prompt_beside_decoders,
    "images-read": images_that_are_read,
    "cached-burst": cached_prompts_in_a_burst,
    "encode-memory": encodes_out_of_memory,
    "crowded": a_prompt_that_does_not_fit,
    "aborts": withdrawals,
    "ledger": messages_of_the_ledger,
    "host": hosts_work,
}


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--only", multiple=True, type=click.Choice(list(SUBJECTS)), help="Some subjects; again for more.")
def main(only: tuple[str, ...]) -> None:
    print("| subject | case | figure | bound | |\n|---|---|---|---|---|")
    holds = True
    for subject in only or SUBJECTS:
        for row in SUBJECTS[subject]():
            print(f"| {subject} | {row.case} | {row.figure:.3g} {row.unit} | {row.bound} | {row.verdict} |", flush=True)
            holds = holds and row.verdict != "FAILS"
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    logging.getLogger("triolet").setLevel(logging.CRITICAL)  # devices here fail on purpose
    main()

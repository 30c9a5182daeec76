"""Chaos: runs of engines in which several faults meet. Each run has a seed of its own.

::

    python -m triolet_testing.chaos --runs 10000 --workers 2

The sweep injects one fault in each run, at every step of every task. Here steps, encodings, frees, sleeps, wakes and
loads of adapters fail by chance, several in one run. Meanwhile clients come, wait, leave and are cancelled, and
operators put the engine to sleep and wake it. After `CALM` virtual seconds nothing fails any more, and every client
that still waits must be served. Many runs must come into every situation of `triolet_testing.situations`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import trio
from attrs import define, field, frozen

from triolet.actors.supervisor import Supervisor
from triolet.actors.worker import Job
from triolet.api.engine import Engine
from triolet.core import events
from triolet.core.config import EngineConfig, Speculation
from triolet.core.errors import InvariantViolation, TrioletError
from triolet.core.model import Kind

from .clients import FOREVER, Client, request_of, true_tokens
from .run import books_of
from .sim import SimExecutor, SimWorker, sim_engine
from .sim_model import IMAGE, START, SimModel
from .situations import SITUATIONS, situations, told
from .sweep import begin_worker
from .trio_tools.schedules import Batches, Deadlock, Uniform, run_scheduled

CALM = 20.0
"""The virtual seconds after which the device always works and the operators have gone."""
GIVEN_UP = 3000.0
"""The virtual seconds after which a run counts as hung; the longest run takes a tenth of them."""

LONG = 5_000
"""So many runs must come into every situation."""

_FAILING = (Job.FREE, Job.STEP, Job.ENCODE, Job.SLEEP, Job.WAKE, Job.ADAPTER)
_CLIENTS = 6
_OPERATORS = 2


class WrongTokens(AssertionError):
    """A client got other tokens than it would have had alone."""


@define(eq=False)
class Chaos:
    """One run: six clients, two operators, and a device that fails by chance. ``dice`` decide everything."""

    dice: random.Random
    faults: int = field(default=0, init=False)
    ends: Counter[str] = field(factory=Counter, init=False)
    seen: Counter[str] = field(factory=Counter, init=False)  # situations
    _trace: list[events.Event] = field(factory=list, init=False)
    _quiet: bool = field(default=False, init=False)
    _rates: dict[Job, float] = field(init=False)
    _model: SimModel = field(init=False)
    _adapters: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        pick = self.dice.choice
        self._rates = {job: pick([0, 0, 0.1, 0.3]) for job in _FAILING}
        self._model = SimModel(
            kind=pick([Kind.ENCODER_DECODER, Kind.DECODER, Kind.DECODER]),
            cross_slots=pick([1, 2, 4]),
            pages=pick([20, 64]),
            max_positions=48,
            states=pick([0, 0, 3, 6]),  # three: for the largest search alone
        )
        self._adapters = pick([0, 0, 1, 2]) if self._model.kind is Kind.DECODER else 0

    async def main(self) -> None:
        """Plays the run.

        Raises:
            WrongTokens: a client got wrong tokens.
            InvariantViolation: a promise of the trace is broken.
            TooSlowError: somebody waits for ever.
            AssertionError: the device was misused or not given back, or a request keeps its place.
        """
        executor = SimExecutor(self._model, fault=self._fault)
        worker = SimWorker(seconds={job: self.dice.choice([0.001, 0.01, 0.1, 0.3]) for job in Job})
        async with sim_engine(executor, config=self._config(), worker=worker) as engine:
            with trio.fail_after(GIVEN_UP):
                async with trio.open_nursery() as nursery:
                    for _ in range(_CLIENTS):
                        nursery.start_soon(self._come, engine)
                    for _ in range(_OPERATORS):
                        nursery.start_soon(self._operate, engine)
                    nursery.start_soon(self._calm_down, engine)
        assert not executor.misuses, executor.misuses[0]
        assert not executor.is_open, "the device was not given back"
        assert not engine.inside.pending, "a request holds its place"
        books = books_of(engine, self._trace)
        self.seen = situations(self._trace, None if books is None else books.requests)

    def _config(self) -> EngineConfig:
        pick = self.dice.choice
        return EngineConfig(
            verify=True,
            observer=self._trace.append,
            drain_seconds=pick([0, 1, 300]),
            stage_seconds=60,
            restarts=10**6,
            idle_sleep=pick([math.inf, 0, 0.2, 1]),
            encoder_idle_seconds=pick([0, 0.1, 30]),
            encoder_cache_bytes=pick([40, 80, 200, 1000] if self._model.kind is Kind.DECODER else [100, 200, 1000]),
            max_step_tokens=pick([2, 8, 2048]),
            max_running=pick([1, 1, 2, 3, 32]),
            max_pending=pick([2, 256]),
            steps_in_flight=pick([1, 1, 2]),
            prefix_caching=pick([False, True]),
            speculation=pick([None, Speculation(tokens=3)]),
            while_asleep=pick(["wait", "refuse"]),
            encode_batch_embeddings=pick([4, 10, 30]),
            adapters=self._adapters,
        )

    def _fault(self, job: Job, _: object) -> Exception | None:
        if self._quiet or self.dice.random() >= self._rates.get(job, 0):
            return None
        self.faults += 1
        return self.dice.choice([RuntimeError, MemoryError])("injected")

    # -- clients -----------------------------------------------------------------------------------------------------

    def _client(self) -> Client:
        dice = self.dice
        text = tuple(2 + dice.randrange(50) for _ in range(dice.randrange(6)))
        client: dict[str, Any] = {
            "max_tokens": 1 + dice.randrange(12),
            "priority": dice.randrange(3),
            "beams": dice.choice([1, 1, 1, 2, 3]),
            "arrives": dice.random() * 4,
            "patience": dice.choice([0.2, 1, FOREVER, FOREVER]),
            "pause": dice.choice([0, 0, 0, 0.2]),
        }
        if self._model.kind is Kind.ENCODER_DECODER:
            return Client(audio=dice.randrange(4), prompt=(START, *text), **client)
        if self._adapters and client["beams"] == 1:
            client["adapter"] = dice.choice(["", "first", "second", "third"])
        images = tuple(dice.randrange(8) for _ in range(dice.choice([0, 1, 2, 3])))
        prompt = [START, *text]
        for _ in images:
            prompt.insert(dice.randint(1, len(prompt)), IMAGE)
        return Client(images=images, prompt=tuple(prompt), **client)

    async def _come(self, engine: Engine) -> None:
        client = self._client()
        await trio.sleep(client.arrives)
        end = "left"
        try:
            with trio.move_on_after(client.patience):
                end = await self._read(engine, client)
            self.ends[end] += 1
        except TrioletError as error:  # the sweep checks which errors may reach which clients
            self.ends[type(error).__name__] += 1

    async def _read(self, engine: Engine, client: Client) -> str:
        if not client.adapter:
            await self._read_tokens(engine, client)
            return "finished"
        supervisor = engine.inside.backend
        assert isinstance(supervisor, Supervisor), "the device is one of this process"
        try:
            loaded = [await supervisor.load_adapter(client.adapter)]
        except (RuntimeError, MemoryError) as error:  # the client of a load that fails gets the load's own error
            if self._quiet or str(error) != "injected":
                raise
            return type(error).__name__
        try:
            await self._read_tokens(engine, client, lambda: supervisor.unload_adapter(loaded.pop()))
        finally:
            for key in loaded:
                supervisor.unload_adapter(key)
        return "finished"

    async def _read_tokens(self, engine: Engine, client: Client, begun: Callable[[], None] = lambda: None) -> None:
        true = true_tokens(client, self._model)
        got: tuple[int, ...] = ()
        request = request_of(client, self._model, engine.inside._new_id(None))
        async with engine.inside.follow(request, trio.current_time(), wait=True) as deltas:
            async for delta in deltas:
                if delta.token_ids and not got:
                    begun()
                got += delta.token_ids
                if got != true[: len(got)]:
                    raise WrongTokens(f"{client} got the tokens {got}, not {true}")
                await trio.sleep(client.pause)
        if got != true:
            raise WrongTokens(f"{client} finished with the tokens {got}, not {true}")

    # -- operators ---------------------------------------------------------------------------------------------------

    async def _operate(self, engine: Engine) -> None:
        with trio.move_on_after(CALM):
            for _ in range(self.dice.randrange(6)):
                await trio.sleep(self.dice.random() * 1.5)
                await self._order(self.dice.choice([engine.sleep, engine.wake]))

    async def _order(self, what: Callable[[], Awaitable[None]]) -> None:
        with trio.move_on_after(self.dice.choice([0, 0.05, 100])):
            with contextlib.suppress(TrioletError):
                await what()

    async def _calm_down(self, engine: Engine) -> None:
        await trio.sleep(CALM)
        self._quiet = True
        for _ in range(3):
            with contextlib.suppress(TrioletError):
                await engine.wake()
            await trio.sleep(5)


# -- many runs -------------------------------------------------------------------------------------------------------


@frozen
class Outcome:
    """The outcome of one run. ``broken`` names a hang, a violation, wrong tokens or another error; ``None``: no promise
    was broken.
    """

    seed: int
    faults: int
    ends: Counter[str]
    seen: Counter[str]
    broken: str | None = None
    error: str = ""


def play(seed: int) -> Outcome:
    """Plays the run of ``seed``. A broken promise raises nothing, but is reported in `Outcome.broken`."""
    chaos = Chaos(random.Random(seed))
    try:
        run_scheduled(chaos.main, schedule=(Uniform if seed % 2 else Batches)(seed))
    except Exception as error:  # noqa: BLE001  (told in the outcome)
        return Outcome(seed, chaos.faults, chaos.ends, chaos.seen, *_kind(error))
    return Outcome(seed, chaos.faults, chaos.ends, chaos.seen)


def _kind(error: BaseException) -> tuple[str, str]:
    inside = error
    while isinstance(inside, BaseExceptionGroup):
        inside = inside.exceptions[0]
    kinds = {
        "hangs": (trio.TooSlowError, Deadlock),
        "violations": (InvariantViolation,),
        "wrong tokens": (WrongTokens,),
    }
    kind = next((kind for kind, classes in kinds.items() if isinstance(inside, classes)), "other errors")
    return kind, f"{type(inside).__name__}: {inside}"


@click.command()
@click.option("--runs", default=1000, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="of the first run")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=1), help="processes")
def main(runs: int, seed: int, workers: int) -> None:
    """Run engines in which several faults meet, and see whether anybody hangs or gets a wrong token."""
    begun = time.perf_counter()
    seeds = range(seed, seed + runs)
    if workers == 1:
        _report(map(play, seeds), begun)
        return
    with ProcessPoolExecutor(workers, initializer=begin_worker, initargs=(logging.CRITICAL + 1,)) as pool:
        _report(pool.map(play, seeds, chunksize=50), begun)


def _report(outcomes: Iterable[Outcome], begun: float) -> None:
    runs, faults = 0, 0
    ends: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    broken = Counter({"hangs": 0, "violations": 0, "wrong tokens": 0, "other errors": 0})
    for outcome in outcomes:
        runs, faults = runs + 1, faults + outcome.faults
        ends += outcome.ends
        seen += outcome.seen
        if outcome.broken is not None:
            broken[outcome.broken] += 1
            click.echo(f"BROKEN triolet_testing.chaos.play({outcome.seed}): {outcome.error}")
    click.echo(f"{runs} runs, {faults} faults in {time.perf_counter() - begun:.0f} s")
    click.echo(", ".join(f"{count} {kind}" for kind, count in broken.items()))
    click.echo("clients ended: " + ", ".join(f"{end} {count}" for end, count in ends.most_common()))
    lines, complete = told(seen, SITUATIONS, enough=runs >= LONG)
    click.echo(lines)
    if broken.total() or not complete:
        raise SystemExit(1)


if __name__ == "__main__":
    begin_worker(logging.CRITICAL + 1)  # the faults are injected, so their log lines would say nothing new
    main()

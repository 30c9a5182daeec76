"""A simulated network between engines that lend encoder outputs and engines that borrow them, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio
from attrs import define, evolve, field

from triolet.actors import messages as m
from triolet.actors.supervisor import Supervisor
from triolet.api.engine import Engine
from triolet.api.hosts.trio_engine import TrioEngine
from triolet.core.config import EngineConfig
from triolet.core.errors import BorrowFailed
from triolet.core.plan import LentOutput
from triolet.core.request import EncoderItem
from triolet.testing.sim import SimExecutor, SimWorker

_SECONDS = 0.05  # of a message, at most


@define(eq=False)
class SimLender:
    """The real actors of an engine that only encodes, over a simulated device."""

    config: EngineConfig = field(factory=EngineConfig)
    executor: SimExecutor = field(factory=SimExecutor)
    supervisor: Supervisor | None = field(default=None, init=False)  # while it lives
    _scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    lost: trio.Event = field(factory=trio.Event, init=False)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lives until `kill`."""
        supervisor = Supervisor(self.config, lambda: self.executor, SimWorker())
        try:
            with self._scope:
                async with supervisor.running():
                    self.supervisor = supervisor
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            self.kill()

    def kill(self) -> None:
        """As a machine that is gone: it answers nothing any more."""
        self.supervisor = None
        self.lost.set()
        self._scope.cancel()


@define(eq=False)
class _Lent:
    """See `messages.Lent`."""

    done: trio.Event = field(factory=trio.Event)
    output: LentOutput | None = None
    error: Exception | None = None

    def put(self, output: LentOutput) -> None:
        self.output = evolve(output)
        self.done.set()

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.done.set()


@define(eq=False)
class SimLenders:
    """See `messages.Lenders`: what one borrower knows of the lenders, by a network with delays."""

    name: str
    nursery: trio.Nursery
    lenders: list[SimLender]
    chance: random.Random
    tell: Callable[[m.Arrived | m.BorrowBroken], None] = field(init=False)
    returns: bool = True  # false: as a borrower that is gone, it says nothing when it has got what it wanted
    answers: bool = True  # false: as a network that swallows everything
    withdrawn: set[int] = field(factory=set, init=False)

    def ask(self, number: int, item: EncoderItem) -> None:
        """See `Lenders.ask`."""
        if self.answers:
            self.nursery.start_soon(self._fetch, number, item)

    def withdraw(self, number: int) -> None:
        """See `Lenders.withdraw`."""
        self.withdrawn.add(number)

    async def _fetch(self, number: int, item: EncoderItem) -> None:
        try:
            output = await self._borrow(number, item)
        except Exception as error:  # noqa: BLE001  (told to the borrower)
            self.tell(m.BorrowBroken(number, error))
        else:
            self.tell(m.Arrived(number, output))

    async def _borrow(self, number: int, item: EncoderItem) -> LentOutput:
        await self._travel()
        there = [lender for lender in self.lenders if lender.supervisor is not None]
        if not there:
            raise BorrowFailed("there is no lender")
        lender = there[hash_of(item.key) % len(there)]
        lent, loan = _Lent(), f"{self.name}/{number}"
        assert lender.supervisor is not None, "it was there"
        lender.supervisor.tell(m.Lend(loan, item, lent))
        await _either(lent.done, lender.lost)
        if lent.output is None:
            raise lent.error or BorrowFailed("the lender is lost")
        await self._travel()
        if self.returns and lender.supervisor is not None:
            lender.supervisor.tell(m.Release(loan, item.key))
        return lent.output

    async def _travel(self) -> None:
        await trio.sleep(self.chance.random() * _SECONDS)


def hash_of(key: str) -> int:
    """The same in every process."""
    return sum(key.encode())


async def _either(first: trio.Event, second: trio.Event) -> None:
    async with trio.open_nursery() as nursery:

        async def wait(event: trio.Event) -> None:
            await event.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, first)
        nursery.start_soon(wait, second)


def sim_borrower(
    lenders: SimLenders, executor: SimExecutor, *, config: EngineConfig | None = None, encodes: bool = True
) -> Engine:
    """An engine with the real supervisor and actors that borrows from ``lenders``."""
    config = config or EngineConfig()

    def make() -> Supervisor:
        supervisor = Supervisor(config, lambda: executor, SimWorker(), lenders=lenders, encodes=encodes)
        lenders.tell = supervisor.tell
        return supervisor

    engine = Engine.from_parts(lambda: executor, SimWorker, config=config)
    engine.inside = TrioEngine(config, make)
    return engine

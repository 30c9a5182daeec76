"""A simulated device. It is deterministic, has no threads, and tolerates no misuse.

`SimExecutor` keeps books where a real executor keeps tensors. Every KV position holds a fingerprint of all inputs that
real KV would depend on, and a sampled token is a function of the fingerprints read. So a page that is freed too early,
a slot that was not written, or an encoder output that is used before it is ready causes an `AssertionError`, or at
least a wrong token. `expected_tokens` returns the right tokens.

`SimWorker` runs the executor's calls in a trio task on virtual time (use `trio.testing.MockClock`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import trio
from attrs import define, evolve, field

from triolet.actors.switch_interval import SwitchInterval
from triolet.actors.worker import Call, Deliver, Job, run_call
from triolet.api.engine import Engine
from triolet.core.config import EngineConfig
from triolet.core.model import ModelDescription
from triolet.core.plan import Chunk, DeviceMemory, SampledToken, SequenceStart, StepPlan, StepResult
from triolet.core.recurrent import OwnState
from triolet.core.request import EncoderItem

from .sim_beams import SimSearch
from .sim_interpreter import SimInterpreter
from .sim_model import READ_WHOLE, SimModel, _begin, _chain, _placed, _seen, aligned_tokens, expected_logprob
from .trio_tools.hooks import Alarm

SECONDS: Mapping[Job, float] = {
    Job.OPEN: 1.0,
    Job.ENCODE: 0.3,
    Job.FREE: 0.001,
    Job.STEP: 0.02,
    Job.ADAPTER: 0.05,
    Job.RESET: 0.01,
    Job.SLEEP: 0.05,
    Job.WAKE: 0.5,
    Job.CLOSE: 0.1,
}
WEIGHTS = 1000  # bytes
_KEPT = -1  # the owner of a state that a step has kept, and that nobody has changed since
_ASLEEP = {Job.WAKE, Job.RESET, Job.CLOSE, Job.ADAPTER}  # the calls that are allowed while asleep


@define(eq=False)
class _Record:
    start: SequenceStart
    tokens: list[int]
    placed: dict[int, tuple[str, int]]
    key: str | None = None
    adapter: str = ""
    search: SimSearch | None = None
    own: OwnState = field(factory=OwnState)
    states: tuple[int, ...] = ()  # those of its last chunk
    first: int | None = None  # the first position that was fed
    fingerprints: list[int] = field(factory=list)  # of the positions fed or read so far; they never change

    def read_to(self, stop: int) -> list[int]:
        """Returns the fingerprints of the positions before ``stop``, and of later positions that are known already."""
        known = self.fingerprints
        for position in range(len(known), stop):
            before = known[-1] if known else _begin(self.adapter)
            known.append(_chain(before, self.tokens[position], _seen(self.placed, position, self.key)))
        return known


def _states_of(part: Chunk) -> tuple[int, ...]:
    """Returns the states that a chunk may write."""
    return (*part.states, *(keep.state for keep in part.keeps))


DeviceArgument: TypeAlias = "tuple[EncoderItem, ...] | StepPlan | tuple[str, ...] | str | None"
DeviceFault = Callable[[Job, DeviceArgument], BaseException | None]


@define(eq=False)
class SimExecutor:
    """A simulated `triolet.core.executor.Executor`. ``fault`` is called before each call and may return an error.

    A misuse raises an error, as on a real device. It is also recorded in ``misuses``, since the engine may take the
    error for a fault of the device and try again.
    """

    model: SimModel = field(factory=SimModel)
    fault: DeviceFault | None = None
    calls: list[Job] = field(factory=list, init=False)
    outputs: dict[str, int] = field(factory=dict, init=False)  # key -> bytes
    adapters: Counter[str] = field(factory=Counter, init=False)  # how often each is loaded
    is_open: bool = field(default=False, init=False)  # true while asleep, too
    is_asleep: bool = field(default=False, init=False)
    parked: int = field(default=0, init=False)  # bytes of weights kept in host memory
    misuses: list[str] = field(factory=list, init=False)
    generation: int = field(default=0, init=False)  # how often it was reset or put to sleep
    left: tuple[str, ...] = field(default=(), init=False)  # outputs that were still resident at the close
    _pages: dict[int, list[int | None]] = field(factory=dict, init=False)  # the fingerprint at each offset of a page
    _slots: dict[int, str] = field(factory=dict, init=False)
    _adapted: dict[int | None, str] = field(factory=dict, init=False)  # the adapter in each slot
    _states: dict[int, int | None] = field(factory=dict, init=False)  # the fingerprint of all that a state has read
    _owners: dict[int, int] = field(factory=dict, init=False)  # the sequence that has a state, or `_KEPT`
    _records: dict[int, _Record] = field(factory=dict, init=False)

    def open(self) -> ModelDescription:
        """Implements `Executor.open`."""
        assert not self.is_open, "opened twice"
        self._call(Job.OPEN, None)
        self.is_open = True
        return self.model.describe()

    def give_up(self) -> None:
        """Implements `Executor.give_up`. A simulated device waits for no other."""

    def encode(self, jobs: tuple[EncoderItem, ...]) -> None:
        """Implements `Executor.encode`."""
        self._call(Job.ENCODE, jobs)
        for job in jobs:
            self._check(job.key not in self.outputs, f"{job.key} is encoded though it is resident")
            self._check(job.payload is not None, f"{job.key} is encoded without a payload")
        self.outputs.update({job.key: job.size for job in jobs})

    def load_adapter(self, folder: str) -> str:
        """Implements `Executor.load_adapter`: the key is the folder."""
        self._call(Job.ADAPTER, folder)
        self.adapters[folder] += 1
        return folder

    def drop_adapter(self, key: str) -> None:
        """Implements `Executor.drop_adapter`."""
        self.calls.append(Job.ADAPTER)
        self._check(self.adapters[key] > 0, f"adapter {key} is dropped, but it is not loaded")
        self.adapters[key] -= 1

    def free(self, keys: tuple[str, ...]) -> None:
        """Implements `Executor.free`. A fault strikes when the first of ``keys`` is gone already."""
        try:
            self._call(Job.FREE, keys)
        except Exception:
            self.outputs.pop(next(iter(keys), ""), None)
            raise
        for key in keys:
            self._check(key in self.outputs, f"{key} is freed, but it is not resident")
            del self.outputs[key]

    def step(self, plan: StepPlan) -> StepResult:
        """Implements `Executor.step`."""
        for sequence_id in plan.ended:
            record = self._records.pop(sequence_id, None)
            own = () if record is None else record.states
            self.give_away([state for state in own if self._owners.get(state) == sequence_id])
        try:
            self._call(Job.STEP, plan)
            return self._watched_step(plan)
        except BaseException:
            for part in plan.chunks:
                self._records.pop(part.sequence_id, None)
                self.give_away(_states_of(part))
            raise

    def give_away(self, states: Iterable[int]) -> None:
        """Forgets what ``states`` have read: nobody has them any more, so whoever reads one misuses the device. Those
        of sequences that have ended, or whose step has failed, are forgotten in any case."""
        for state in states:
            self._states.pop(state, None)
            self._owners.pop(state, None)

    def _watched_step(self, plan: StepPlan) -> StepResult:
        try:
            return self._step(plan)
        except Exception as error:
            self.misuses.append(f"{type(error).__name__}: {error}")
            raise

    def _step(self, plan: StepPlan) -> StepResult:
        for load in plan.adapter_writes:
            assert self.adapters[load.key] > 0, f"adapter {load.key} is written, but it is not loaded"
            self._adapted[load.slot] = load.key
        for start in plan.started:
            assert start.sequence_id not in self._records, f"sequence {start.sequence_id} was started twice"
            record = _Record(start, list(start.token_ids), _placed(start.placeholders))
            record.adapter = "" if start.adapter is None else self._adapted[start.adapter]
            record.search = SimSearch.of(start, self.model.page_size)
            self._records[start.sequence_id] = record
        for write in plan.cross_writes:
            assert write.key in self.outputs, f"cross KV of {write.key} is written, but its output is not resident"
            self._slots[write.slot] = write.key
        self._check_nobody_writes_what_others_use(plan.chunks)
        sampled = tuple([self._run(part) for part in plan.chunks])
        for part, one in zip(plan.chunks, sampled, strict=True):
            read = part.start + part.length + len(one.accepted)  # what is kept behind a wrong draft token is of no use
            self._owners.update({keep.state: _KEPT for keep in part.keeps if keep.position <= read})
            self.give_away(keep.state for keep in part.keeps if keep.position > read)
        return StepResult(step_id=plan.step_id, sampled=sampled)

    def reset(self) -> None:
        """Implements `Executor.reset`."""
        self._call(Job.RESET, None)
        self.generation += 1
        self._forget()

    def sleep(self, *, keep_weights: bool) -> None:
        """Implements `Executor.sleep`. If the fault is an `ExceptionGroup` (of failed releases), the executor is asleep
        all the same."""
        try:
            self._call(Job.SLEEP, None)
        except ExceptionGroup:
            self._fall_asleep(keep_weights)
            raise
        self._fall_asleep(keep_weights)

    def _fall_asleep(self, keep_weights: bool) -> None:
        self.is_asleep, self.parked = True, WEIGHTS if keep_weights else 0
        self.generation += 1
        self._forget()

    def wake(self) -> None:
        """Implements `Executor.wake`."""
        self._call(Job.WAKE, None)
        self.is_asleep, self.parked = False, 0

    def memory(self) -> DeviceMemory:
        """Implements `Executor.memory`."""
        if self.is_asleep:
            return DeviceMemory(device="cpu", by_owner={"parked_weights": self.parked} if self.parked else {})
        owned = {"weights": WEIGHTS, "encoder_outputs": sum(self.outputs.values())} if self.is_open else {}
        return DeviceMemory(device="sim", by_owner=owned)

    def close(self) -> None:
        """Implements `Executor.close`. A fault is the error of one release; all other releases are done."""
        try:
            self._call(Job.CLOSE, None)
        finally:
            self.is_open = self.is_asleep = False
            self.parked = 0
            self.left = tuple(self.outputs)
            self._forget()

    def _forget(self) -> None:
        slots = self._slots, self._adapted
        for kept in (self.outputs, self._records, self._pages, *slots, self._states, self._owners):
            kept.clear()

    def _check(self, right: bool, misuse: str) -> None:
        if not right:
            self.misuses.append(f"AssertionError: {misuse}")
            raise AssertionError(misuse)

    def _call(self, job: Job, argument: DeviceArgument) -> None:
        if not self.is_open or self.is_asleep or job is Job.WAKE:
            self._check(self.is_open or job in {Job.OPEN, Job.CLOSE}, f"{job.value} on a closed executor")
            self._check(not self.is_asleep or job in _ASLEEP, f"{job.value} on an executor that is asleep")
            self._check(self.is_asleep or job is not Job.WAKE, "wake of an executor that is awake")
        self.calls.append(job)
        error = self.fault(job, argument) if self.fault is not None else None
        if error is not None:
            raise error

    def _check_nobody_writes_what_others_use(self, chunks: Sequence[Chunk]) -> None:
        users = Counter(page for part in chunks for page in part.page_table)
        for part in chunks:
            written = part.page_table[part.start // self.model.page_size :]
            assert all(users[page] == 1 for page in written), "a page is written while another sequence uses it"
        if not self.model.states:
            return
        written_states = Counter(state for part in chunks for state in _states_of(part))
        records = [record for part in chunks if (record := self._records.get(part.sequence_id)) is not None]
        read = {record.start.state for record in records if record.first is None}
        assert max(written_states.values(), default=0) <= 1, "a state is written by two"
        assert not written_states.keys() & read, "a state is written while a sequence goes on from it"
        assert all(0 <= state < self.model.states for state in written_states), f"states of {self.model.states}"
        self._owners.update({state: part.sequence_id for part in chunks for state in _states_of(part)})

    def _run(self, part: Chunk) -> SampledToken:
        record = self._record(part)
        if record.search is not None and part.start >= record.search.prompt_length:
            prompt = record.read_to(record.search.prompt_length)
            held = self._states if self.model.states else None
            return record.search.go_on(part, self._pages, prompt, self.model.vocabulary_size, record.key, held)
        fingerprint = self._feed(record, part)
        probe = record.start.probe
        asked = probe is not None and part.start <= probe.position < part.start + part.length
        answer = tuple(map(expected_logprob, probe.token_ids)) if probe and asked else None
        if not part.samples:
            return SampledToken(token_id=None, probe=answer)
        if record.start.pooling is not None:
            whole = record.first == 0 or record.start.pooling.kind not in READ_WHOLE
            assert whole, f"{record.start.pooling} of a prompt whose first {record.first} positions were not fed"
            return SampledToken(token_id=None, vector=(float(fingerprint),))
        if (alignment := record.start.alignment) is not None:
            assert (record.first or 0) < alignment.start, f"{alignment} needs what comes before it, which was not fed"
            read = record.read_to(part.start + part.length)
            return SampledToken(token_id=None, aligned=aligned_tokens(read[alignment.start - 1 :], alignment))
        if record.search is not None:
            found = record.search.begin(fingerprint, self.model.vocabulary_size, record.key)
            return evolve(found, probe=answer)
        token_id = fingerprint % self.model.vocabulary_size
        record.tokens.append(token_id)
        return SampledToken(
            token_id=token_id, logprob=-1.0, probe=answer, accepted=self._accepted(record, part, fingerprint)
        )

    def _record(self, part: Chunk) -> _Record:
        assert part.sequence_id in self._records, f"sequence {part.sequence_id} is not known"
        record = self._records[part.sequence_id]
        key = None if part.cross_slot is None else self._slots[part.cross_slot]
        adapter = self._adapted.get(record.start.adapter, "")
        assert adapter == record.adapter, f"the slot of adapter {record.adapter!r} now holds {adapter!r}"
        if record.first is None:
            record.key, record.first = key, part.start
        assert record.key == key, f"cross slot {part.cross_slot} held {record.key}, now it holds {key}"
        assert part.states[: len(record.states)] == record.states, f"sequence {part.sequence_id} loses states"
        record.states = part.states
        if record.search is not None and part.start >= record.search.prompt_length:
            return record
        assert part.beams == 1, "a chunk of beams of a sequence that has none yet"
        assert part.start + part.length <= len(record.tokens), "a chunk beyond the tokens that are known"
        assert not part.samples or part.start + part.length == len(record.tokens), (
            "a token is sampled before the last one is fed"
        )
        return record

    def _feed(self, record: _Record, part: Chunk) -> int:
        """Writes the chunk's positions, and checks that the positions before them hold this sequence's KV."""
        end = part.start + part.length
        fingerprints = record.read_to(end)
        for position in range(part.start, end):
            item = record.placed.get(position)
            assert item is None or item[0] in self.outputs, f"{item} is read, but it is not resident"
            self._write(part, position, fingerprints[position])
        self._check_pages(part, fingerprints, end)
        if self.model.states:
            self._read_on(record, part, fingerprints)
        return fingerprints[end - 1]

    def _read_on(self, record: _Record, part: Chunk, fingerprints: list[int]) -> None:
        """Changes the sequence's state, which must have read what comes before the chunk, and writes what is kept.
        Draft tokens are read later."""
        copy = record.own.enter(part, record.start.state)
        fed, end = record.own.fed(part, 0), part.start + part.length
        own = fed.states[0]
        if copy is not None:
            assert self._owners.get(copy[0]) == _KEPT, f"state {copy[0]} is read, and no step has kept it"
            self._states[own] = self._states.get(copy[0])
        elif fed.start == 0:
            self._states[own] = 0
        true = fingerprints[fed.start - 1] if fed.start else 0
        assert self._states.get(own) == true, f"state {own} of position {fed.start} has read something else"
        self._states.update(dict.fromkeys(part.states))  # nobody may count on the others
        self._states[own] = fingerprints[end - 1]
        self._states.update({keep.state: fingerprints[keep.position - 1] for keep in fed.keeps})
        if not part.draft_tokens:
            record.own.leave()

    def _write(self, part: Chunk, position: int, fingerprint: int) -> None:
        if self.model.whole_prompts:
            return
        size = self.model.page_size
        page = self._pages.setdefault(part.page_table[position // size], [None] * size)
        page[position % size] = fingerprint

    def _check_pages(self, part: Chunk, fingerprints: list[int], end: int) -> None:
        """Checks that the pages hold this sequence's KV at every position before ``end``, one page at a time."""
        if self.model.whole_prompts:
            return
        size = self.model.page_size
        for begin in range(0, end, size):
            true = fingerprints[begin : min(begin + size, end)]
            held = self._pages.get(part.page_table[begin // size], ())
            assert [*held[: len(true)]] == true, f"a page of positions {begin} on holds another sequence's KV"

    def _accepted(self, record: _Record, part: Chunk, fingerprint: int) -> tuple[SampledToken, ...]:
        """Returns the accepted draft tokens, which are those before the first wrong one. All draft tokens are written,
        since a device feeds them before it knows which are right."""
        accepted: list[SampledToken] = []
        read = [fingerprint]
        right, end = True, part.start + part.length
        for position in range(end, end + part.draft_tokens):
            token_id = record.tokens[-1] if right else -1
            wrong = fingerprint % 3 == 0
            draft = token_id + 1 if wrong or not right else token_id
            read.append(_chain(read[-1], draft, record.key))
            self._write(part, position, _chain(fingerprint, draft, record.key))
            right = right and not wrong
            if not right:
                continue
            fingerprint = _chain(fingerprint, token_id, record.key)
            record.tokens.append(fingerprint % self.model.vocabulary_size)
            accepted.append(SampledToken(token_id=record.tokens[-1], logprob=-1.0))
        if self.model.states and part.draft_tokens:
            fed = record.own.fed(part, part.draft_tokens)
            self._states.update({keep.state: read[keep.position - end] for keep in fed.keeps if keep.position >= end})
            self._states[fed.states[0]] = read[-1]
            record.own.leave(right=len(accepted) == part.draft_tokens)
        return tuple(accepted)


@define(eq=False)
class SimWorker:
    """Runs calls one after another in a trio task. Each call takes its virtual time and acts at its end.

    Like a thread, the worker cannot be cancelled.

    Args:
        seconds: the seconds that a call of each job takes.
        duration: replaces ``seconds``; returns the seconds of a call from its job and argument (a `StepPlan`, the
            encode jobs, the keys to free, or ``None``).
        hangs: returns whether a call of a job never returns.
        interpreter: has the switch interval, which is short while calls are in flight.
    """

    seconds: Mapping[Job, float] = field(factory=lambda: SECONDS)
    duration: Callable[[Job, Any], float] | None = None
    hangs: Callable[[Job], bool] = field(default=lambda _: False)
    interpreter: SimInterpreter = field(factory=SimInterpreter)
    switch_interval: SwitchInterval = field(init=False)
    abandoned: bool = field(default=False, init=False)
    _queue: deque[tuple[Any, ...]] = field(factory=deque, init=False)  # includes the running call
    _alarm: Alarm = field(factory=Alarm, init=False)  # rings when the running call ends, or the worker
    _running: bool = field(default=False, init=False)
    _hanging: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True), init=False)

    def __attrs_post_init__(self) -> None:
        self.switch_interval = self.interpreter.owner()

    @property
    def in_flight(self) -> bool:
        """True if somebody waits for a call of the executor."""
        return bool(self._queue) and not self.abandoned

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:
        """Implements `Worker.start`."""
        nursery.start_soon(self._serve, deliver, name="sim worker")

    def submit(self, job: Job, call: Call, *args: Any) -> None:
        """Implements `Worker.submit`. If no call runs, the call begins at once, without a turn of the worker."""
        self._queue.append((job, call, *args))
        if self._alarm.is_waited_for and not self._running:
            self._begin()

    def _begin(self) -> None:
        self._running = True
        self._hanging = self.hangs(self._queue[0][0])
        if not self._hanging:
            self._alarm.set(trio.current_time() + self._seconds(*self._queue[0]))

    def stop(self) -> None:
        """Implements `Worker.stop`."""
        self._ended = True
        if not self._running:
            self._alarm.ring()

    def abandon(self, last: Call) -> None:
        """Implements `Worker.abandon`. A call that hangs never returns, so no call after it ever runs."""
        self.abandoned = True
        if self._hanging:
            self._queue.clear()  # the calls refer to the runner, and the runner to this worker
            self._scope.cancel()
        else:
            self._queue.append((Job.CLOSE, last))
        self.stop()

    @trio.lowlevel.enable_ki_protection  # a thread never gets a ^C
    async def _serve(self, deliver: Deliver) -> None:
        with self._scope:
            while self._queue or not self._ended:
                if self._queue:
                    self._begin()
                await self._alarm.wait()
                if self._running:
                    self._running = False
                    deliver(run_call(*self._queue.popleft()))

    def _seconds(self, job: Job, _: Call, argument: object = None) -> float:
        return self.seconds[job] if self.duration is None else self.duration(job, argument)


def sim_engine(
    executor: SimExecutor | None = None, *, config: EngineConfig | None = None, worker: SimWorker | None = None
) -> Engine:
    """Returns an engine with the real supervisor and actors over a simulated device."""
    device = executor or SimExecutor()
    return Engine.from_parts(lambda: device, lambda: worker or SimWorker(), config=config)

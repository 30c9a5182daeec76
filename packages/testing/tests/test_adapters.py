"""The adapter kit passes our own executors, and catches every fault that was planted."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from tests.models import conftest as tiny  # what the executor's own tests make their tiny checkpoints with
from triolet.actors.worker import Job
from triolet.core.errors import InvariantViolation
from triolet.core.plan import DeviceMemory
from triolet.models.executor import EncoderOutputs, TorchExecutor
from triolet_testing import live_bytes
from triolet_testing.adapters import check_model_adapter
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel

PAYLOADS = ("one", "two", "three")  # the simulated device does not look at them


@pytest.fixture(scope="module")
def make_torch(tmp_path_factory):
    folder = tiny.save_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny.make_model())
    return lambda: TorchExecutor(folder, tiny.small_config(max_running=3, threads=1))


@pytest.fixture(scope="module")
def clips():
    return [tiny.make_audio(seed, seconds) for seed, seconds in enumerate((2.0, 0.7, 1.3))]


def broken(make_adapter, payloads=PAYLOADS, **settings):
    """The violation that is found, and its invariant."""
    with pytest.raises(InvariantViolation) as found:
        check_model_adapter(make_adapter, payloads, **settings)
    return found.value.invariant, found.value


def test_the_torch_executor_passes(make_torch, clips):
    check_model_adapter(make_torch, clips, live_bytes=live_bytes)


def test_the_simulated_executor_passes():
    check_model_adapter(SimExecutor, PAYLOADS)
    check_model_adapter(lambda: SimExecutor(SimModel(cross_slots=8)), range(8), max_tokens=9)


# -- faults of the torch executor ------------------------------------------------------------------------------------


def test_e10_outputs_that_are_views_of_a_buffer_are_found(make_torch, clips, monkeypatch):
    """E10, in its wrong-token form: outputs are views of the batch's buffer, and the next batch is written over it."""
    buffer = []

    def keep_views(self, outputs):
        batch = torch.stack(list(outputs.values()))
        if not buffer:
            buffer.append(torch.zeros(len(clips), *batch.shape[1:]))
        buffer[0][: len(batch)] = batch
        self._outputs.update(zip(outputs, buffer[0], strict=False))

    monkeypatch.setattr(EncoderOutputs, "add", keep_views)
    invariant, error = broken(make_torch, clips)
    assert invariant == "outputs are copies"
    assert "alone it gets" in str(error)


def test_e10_outputs_that_pin_their_siblings_are_found(make_torch, clips, monkeypatch):
    """E10: outputs are views of the batch's tensor: a free gives nothing back, since bytes are counted by storage."""

    def keep_views(self, outputs):
        self._outputs.update(zip(outputs, torch.stack(list(outputs.values())), strict=True))

    monkeypatch.setattr(EncoderOutputs, "add", keep_views)
    invariant, error = broken(make_torch, clips)
    assert invariant == "free gives back"
    assert "1 of 3 outputs were freed" in str(error)


def test_probabilities_that_depend_on_the_batch_are_found(make_torch, clips, monkeypatch):
    """The tokens are right and their log-probabilities are not."""
    step = TorchExecutor.step

    def shifted(self, plan):
        result = step(self, plan)
        sampled = tuple(evolve(one, logprob=one.logprob - 0.01 * (len(plan.chunks) - 1)) for one in result.sampled)
        return evolve(result, sampled=sampled)

    monkeypatch.setattr(TorchExecutor, "step", shifted)
    invariant, error = broken(make_torch, clips)
    assert invariant == "batched as alone"
    assert "log-probabilities that are 0.02" in str(error)
    check_model_adapter(make_torch, clips, tolerance=0.03)


def test_bytes_that_are_not_told_are_found(make_torch, clips, monkeypatch):
    """A buffer beside the books, as large as may be."""
    buffers = []

    class Buffers(TorchExecutor):
        def encode(self, jobs):
            super().encode(jobs)
            buffers.append(torch.zeros(10))

    executor = make_torch()
    invariant, error = broken(lambda: Buffers(executor.model, executor.config), clips, live_bytes=live_bytes)
    assert invariant == "bytes are true"
    assert "at rest, the adapter reports" in str(error)


# -- faults of the simulated one -------------------------------------------------------------------------------------


class SharedOutputs(SimExecutor):
    """All instances keep their outputs in one place."""

    shared: dict[str, int] = {}  # noqa: RUF012  (the fault)

    def open(self):
        self.outputs = self.shared
        return super().open()


class Kept(SimExecutor):
    """`close` leaves the weights where they are."""

    def memory(self):
        return super().memory() if self.is_open else DeviceMemory(device="sim", by_owner={"weights": 1000})


class Leaky(SimExecutor):
    """Every step takes a byte and keeps it."""

    def memory(self):
        by_owner = dict(super().memory().by_owner)
        return DeviceMemory(
            device="sim", by_owner={**by_owner, "buffers": self.calls.count(Job.STEP)} if self.is_open else by_owner
        )


class Deaf(SimExecutor):
    """Reads no cross slot."""

    def _run(self, part):
        return super()._run(evolve(part, cross_slot=None))


class WritersOnly(SimExecutor):
    """A slot is of use to the sequence that wrote it, and to nobody who comes later."""

    def open(self):
        self.__dict__["writers"] = {}
        return super().open()

    def _step(self, plan):
        written = {write.slot for write in plan.cross_writes}
        for part in plan.chunks:
            if part.cross_slot in written:
                self.writers[part.cross_slot] = part.sequence_id
            elif self.writers[part.cross_slot] != part.sequence_id:
                self._slots[part.cross_slot] = "garbage"
        return super()._step(plan)


class RecordsStay(SimExecutor):
    """The records of sequences that have ended are kept."""

    def step(self, plan):
        return super().step(evolve(plan, ended=()))


class CountsThePromptAnew(SimExecutor):
    """A replayed sequence draws as if its committed tokens were prompt: without a word, and wrongly."""

    def _run(self, part):
        sampled, start = super()._run(part), self._records[part.sequence_id].start
        replayed = part.samples and len(start.token_ids) > start.prompt_length
        return evolve(sampled, token_id=(sampled.token_id + 1) % 64) if replayed else sampled


class NoProbe(SimExecutor):
    """Probes are not answered."""

    def _run(self, part):
        return evolve(super()._run(part), probe=None)


class ProbeOfAnotherPlace(SimExecutor):
    """A probe is answered by the chunk that draws first."""

    def _run(self, part):
        record = self._records[part.sequence_id]
        first, probe = part.samples and len(record.tokens) == record.start.prompt_length, record.start.probe
        return evolve(super()._run(part), probe=tuple(-1.0 for _ in probe.token_ids) if probe and first else None)


class HalfAProbe(SimExecutor):
    """A probe gets one log-probability, whatever it asks for."""

    def _run(self, part):
        sampled = super()._run(part)
        return evolve(sampled, probe=sampled.probe and sampled.probe[:1])


class ProbeOfTheBatch(SimExecutor):
    """A probe's answer depends on how many sequences are fed."""

    def _step(self, plan):
        result, count = super()._step(plan), len(plan.chunks)
        sampled = (
            evolve(one, probe=one.probe and tuple(value - count for value in one.probe)) for one in result.sampled
        )
        return evolve(result, sampled=tuple(sampled))


class FreesNothingSilently(SimExecutor):
    """To free what is not there does nothing."""

    def free(self, keys):
        super().free(tuple(key for key in keys if key in self.outputs))


class Silent(SimExecutor):
    """Tells of no memory at all."""

    def memory(self):
        return DeviceMemory(device="sim", by_owner={})


class WeightsOnly(SimExecutor):
    """Tells of its weights, and of no output."""

    def memory(self):
        return DeviceMemory(device="sim", by_owner={"weights": 1000} if self.is_open else {})


class GivesBackTheMean(SimExecutor):
    """Outputs of three sizes, of which each free gives the mean back."""

    def memory(self):
        count, mean = len(self.outputs), 20
        sizes = {0: 0, 1: mean - 10, 2: 2 * mean - 10, 3: 3 * mean} if "item 0" in self.outputs else {}
        return DeviceMemory(
            device="sim", by_owner={"weights": 1000, "outputs": sizes.get(count, count * mean)} if self.is_open else {}
        )


class KeepsOutputsAsleep(SimExecutor):
    """Encoder outputs stay on the device."""

    def sleep(self, *, keep_weights):
        kept = dict(self.outputs)
        super().sleep(keep_weights=keep_weights)
        self.outputs = kept

    def memory(self):
        told = super().memory()
        return evolve(told, by_owner={**told.by_owner, "encoder_outputs": sum(self.outputs.values())})


class KeepsDroppedWeights(SimExecutor):
    """Weights are parked, whether they are to be kept or not."""

    def sleep(self, *, keep_weights):
        super().sleep(keep_weights=True)


class KeepsParkedWeights(SimExecutor):
    """Parked weights outlive the close of an adapter that sleeps."""

    def close(self):
        asleep, self.__dict__["left_over"] = self.is_asleep, self.parked
        super().close()
        if not asleep:
            self.__dict__["left_over"] = 0

    def memory(self):
        left = self.__dict__.get("left_over", 0)
        return DeviceMemory(device="cpu", by_owner={"parked_weights": left}) if left else super().memory()


class WorksAsleep(SimExecutor):
    """Encodes in its sleep."""

    def encode(self, jobs):
        asleep, self.is_asleep = self.is_asleep, False
        super().encode(jobs)
        self.is_asleep = asleep


class WakesTwice(SimExecutor):
    """And says nothing."""

    def wake(self):
        if self.is_asleep:
            super().wake()


class WakesWithOutputs(SimExecutor):
    """What was encoded before is still there."""

    def sleep(self, *, keep_weights):
        self.__dict__["kept"] = dict(self.outputs)
        super().sleep(keep_weights=keep_weights)

    def wake(self):
        super().wake()
        self.outputs.update(self.kept)


class WakesWithOtherWeights(SimExecutor):
    """The checkpoint was another when it was read again."""

    def wake(self):
        self.__dict__["other"] = not self.parked
        super().wake()

    def _run(self, part):
        sampled = super()._run(part)
        other = part.samples and self.__dict__.get("other", False)
        return evolve(sampled, logprob=sampled.logprob - 1) if other else sampled


FAULTS = [
    (Deaf, "payloads are heard", "the same tokens with the same"),
    (WritersOnly, "slots are shared", "garbage"),
    (RecordsStay, "replayed as whole", "was started twice"),
    (CountsThePromptAnew, "replayed as whole", "started again with what it had sampled, gets"),
    (NoProbe, "probes are answered", "has 0 answers"),
    (ProbeOfAnotherPlace, "probes are answered", "gets its answer from a chunk of 1 from"),
    (HalfAProbe, "probes are answered", "allowed: a number for each of"),
    (ProbeOfTheBatch, "probes are answered", "alone it gets"),
    (Silent, "memory is reported", "an open adapter reports 0 bytes; allowed: more than 0"),
    (WeightsOnly, "memory is reported", "before it encodes item 0"),
    (GivesBackTheMean, "free gives back", "which its encoding took"),
    (FreesNothingSilently, "free gives back", "item 0 is not there"),
    (Leaky, "free gives back", "before a round of work"),
    (SharedOutputs, "instances apart", "though it is resident"),
    (
        KeepsOutputsAsleep,
        "asleep is empty",
        "an adapter that sleeps holds {'parked_weights': 1000, 'encoder_outputs': 300}",
    ),
    (KeepsDroppedWeights, "asleep is empty", "allowed: 0"),
    (KeepsParkedWeights, "asleep is empty", "an adapter that was closed while it slept holds"),
    (WorksAsleep, "asleep is empty", "to encode asleep raises nothing; allowed: AssertionError"),
    (WakesTwice, "asleep is empty", "wake of an adapter that is awake raises nothing; allowed: AssertionError"),
    (WakesWithOutputs, "wakes as opened", "when it wakes"),
    (WakesWithOtherWeights, "wakes as opened", "after its adapter slept and woke"),
    (Kept, "closed is empty", "a closed adapter owns"),
]


@pytest.mark.parametrize(("make_adapter", "invariant", "told"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_planted_fault_is_found_by_the_name_of_the_promise_it_breaks(make_adapter, invariant, told):
    found, error = broken(make_adapter)
    assert found == invariant
    assert told in str(error)


def test_the_simulated_executor_remembers_misuse_of_a_sleeper():
    """As of everything else; a fault of sleep or wake leaves it as it was, unless it is of a release."""
    faults = {}
    executor = SimExecutor(fault=lambda job, _: faults.pop(job, None))
    executor.open()
    with pytest.raises(AssertionError, match="wake of an executor that is awake"):
        executor.wake()
    executor.sleep(keep_weights=True)
    with pytest.raises(AssertionError, match="free on an executor that is asleep"):
        executor.free(())
    assert [told.split(": ")[0] for told in executor.misuses] == ["AssertionError", "AssertionError"]
    executor.misuses.clear()
    faults[Job.WAKE] = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        executor.wake()
    assert executor.memory() == DeviceMemory(device="cpu", by_owner={"parked_weights": 1000})
    executor.wake()
    faults[Job.SLEEP] = RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        executor.sleep(keep_weights=False)
    assert not executor.is_asleep
    faults[Job.SLEEP] = ExceptionGroup("releases", [RuntimeError("stuck")])
    with pytest.raises(ExceptionGroup):
        executor.sleep(keep_weights=False)
    assert executor.is_asleep
    assert executor.memory().total == 0
    assert executor.misuses == []


def test_outputs_of_several_sizes_pass():
    """A free gives back what its own encoding took, which is not the mean of all."""

    class SeveralSizes(SimExecutor):
        def memory(self):
            told = super().memory()
            outputs = sum(10 + int(key[-1]) for key in self.outputs)
            return evolve(told, by_owner={**told.by_owner, "encoder_outputs": outputs})

    check_model_adapter(SeveralSizes, PAYLOADS)


def test_one_token_each_is_enough():
    """Nothing can be replayed, and all the rest is checked."""
    check_model_adapter(SimExecutor, PAYLOADS, max_tokens=1)
    assert broken(WritersOnly, max_tokens=1)[0] == "slots are shared"


def test_a_prompt_that_is_not_the_same_in_pieces_is_found():
    """The first piece of a prompt is forgotten when the next comes."""

    class Forgets(SimExecutor):
        def step(self, plan):
            result = super().step(plan)
            pieces = [part.samples and part.start > 0 and part.length > 1 for part in plan.chunks]
            sampled = zip(pieces, result.sampled, strict=True)
            return evolve(
                result,
                sampled=tuple(evolve(one, token_id=one.token_id + 1) if piece else one for piece, one in sampled),
            )

    invariant, error = broken(Forgets)
    assert invariant == "chunked as whole"
    assert "fed in pieces of 2" in str(error)


def test_what_the_adapter_raises_is_the_cause():
    """SimExecutor asserts that no key is encoded twice: with shared outputs, the second instance does that."""
    _, error = broken(SharedOutputs)
    assert isinstance(error.__cause__, AssertionError)


@pytest.mark.parametrize(
    ("payloads", "settings", "told"),
    [
        (PAYLOADS[:2], {}, "2 payloads are given; allowed: 3 or more"),
        (PAYLOADS, {"prompts": [(1,)]}, "1 prompts are given; allowed: 3"),
        (PAYLOADS, {"max_tokens": 100}, "allowed: up to 64"),
        (range(5), {}, "and 4; give the model more"),
    ],
)
def test_settings_that_cannot_work_are_told(payloads, settings, told):
    with pytest.raises(ValueError, match=told):
        check_model_adapter(SimExecutor, payloads, **settings)


def test_a_model_without_a_start_token_needs_prompts():
    class Plain(SimExecutor):
        def open(self):
            return evolve(super().open(), start_id=None)

    with pytest.raises(ValueError, match="give prompts="):
        check_model_adapter(Plain, PAYLOADS)
    check_model_adapter(Plain, PAYLOADS, prompts=[(1,), (1, 2, 3), (2,)])

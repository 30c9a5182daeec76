"""The adapter kit passes our own executors, and catches every fault that was planted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from attrs import evolve

from triolet.core.errors import InvariantViolation
from triolet.core.plan import DeviceMemory
from triolet.models.executor import EncoderOutputs, TorchExecutor
from triolet.testing.adapters import (
    BATCHED_AS_ALONE,
    CHUNKED_AS_WHOLE,
    CLOSED_IS_EMPTY,
    FREE_GIVES_BACK,
    INSTANCES_APART,
    OUTPUTS_ARE_COPIES,
    check_model_adapter,
)
from triolet.testing.sim import SimExecutor, SimModel

PAYLOADS = ("one", "two", "three")  # the simulated device does not look at them


@pytest.fixture(scope="module")
def tiny():
    """What the executor's own tests make their tiny checkpoints with."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).parents[1] / "models" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_torch(tiny, tmp_path_factory):
    folder = tiny.save_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny.make_model())
    return lambda: TorchExecutor(folder, tiny.small_config(max_running=3))


@pytest.fixture(scope="module")
def clips(tiny):
    return [tiny.make_audio(seed, seconds) for seed, seconds in enumerate((2.0, 0.7, 1.3))]


def broken(make_adapter, payloads=PAYLOADS, **settings):
    """The violation that is found, and its invariant."""
    with pytest.raises(InvariantViolation) as found:
        check_model_adapter(make_adapter, payloads, **settings)
    return found.value.invariant, found.value


def test_the_torch_executor_passes(make_torch, clips):
    check_model_adapter(make_torch, clips)


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
    assert invariant == OUTPUTS_ARE_COPIES
    assert "alone it gets" in str(error)


def test_e10_outputs_that_pin_their_siblings_are_found(make_torch, clips, monkeypatch):
    """E10: outputs are views of the batch's tensor, and bytes are counted by storage: a free gives nothing back."""

    def keep_views(self, outputs):
        self._outputs.update(zip(outputs, torch.stack(list(outputs.values())), strict=True))

    def nbytes(self):
        storages = {output.untyped_storage().data_ptr(): output.untyped_storage() for output in self._outputs.values()}
        return sum(storage.nbytes() for storage in storages.values())

    monkeypatch.setattr(EncoderOutputs, "add", keep_views)
    monkeypatch.setattr(EncoderOutputs, "nbytes", nbytes)
    invariant, error = broken(make_torch, clips)
    assert invariant == FREE_GIVES_BACK
    assert "1 of 3 outputs were freed" in str(error)


def test_probabilities_that_depend_on_the_batch_are_found(make_torch, clips, monkeypatch):
    """The tokens are right and their log-probabilities are not."""
    step = TorchExecutor.step

    def shifted(self, plan):
        result = step(self, plan)
        drawn = tuple(evolve(one, logprob=one.logprob - 0.01 * (len(plan.slices) - 1)) for one in result.drawn)
        return evolve(result, drawn=drawn)

    monkeypatch.setattr(TorchExecutor, "step", shifted)
    invariant, error = broken(make_torch, clips)
    assert invariant == BATCHED_AS_ALONE
    assert "log-probabilities that are 0.02" in str(error)
    check_model_adapter(make_torch, clips, tolerance=0.03)


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
            device="sim", by_owner={**by_owner, "buffers": len(self.calls)} if self.is_open else by_owner
        )


@pytest.mark.parametrize(
    ("make_adapter", "invariant"),
    [
        (SharedOutputs, INSTANCES_APART),
        (Kept, CLOSED_IS_EMPTY),
        (Leaky, FREE_GIVES_BACK),
    ],
)
def test_a_planted_fault_is_found_by_the_name_of_the_promise_it_breaks(make_adapter, invariant):
    assert broken(make_adapter)[0] == invariant


def test_a_prompt_that_is_not_the_same_in_pieces_is_found():
    """The first piece of a prompt is forgotten when the next comes."""

    class Forgets(SimExecutor):
        def step(self, plan):
            result = super().step(plan)
            pieces = [part.draw and part.start > 0 and part.length > 1 for part in plan.slices]
            drawn = zip(pieces, result.drawn, strict=True)
            return evolve(
                result, drawn=tuple(evolve(one, token_id=one.token_id + 1) if piece else one for piece, one in drawn)
            )

    invariant, error = broken(Forgets)
    assert invariant == CHUNKED_AS_WHOLE
    assert "fed in pieces of 2" in str(error)


def test_what_the_adapter_raises_is_the_cause():
    """SimExecutor asserts that no key is encoded twice: with shared outputs, the second instance does that."""
    _, error = broken(SharedOutputs)
    assert isinstance(error.__cause__, AssertionError)


@pytest.mark.parametrize(
    ("payloads", "settings", "told"),
    [
        (PAYLOADS[:2], {}, "2 payloads; allowed: 3 or more"),
        (PAYLOADS, {"prompts": [(1,)]}, "1 prompts; allowed: 3"),
        (PAYLOADS, {"max_tokens": 100}, "allowed: up to 64"),
        (range(5), {}, "and 4: give it more"),
    ],
)
def test_settings_that_cannot_work_are_told(payloads, settings, told):
    with pytest.raises(ValueError, match=told):
        check_model_adapter(SimExecutor, payloads, **settings)


def test_a_model_without_a_start_token_needs_prompts():
    class Plain(SimExecutor):
        def open(self):
            return evolve(super().open(), whisper=None)

    with pytest.raises(ValueError, match="give prompts="):
        check_model_adapter(Plain, PAYLOADS)
    check_model_adapter(Plain, PAYLOADS, prompts=[(1,), (1, 2, 3), (2,)])

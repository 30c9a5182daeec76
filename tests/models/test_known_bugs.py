"""Faults of other engines, planted into ours: the promise that each breaks must notice it."""

from __future__ import annotations

import gc
import weakref

import attrs
import numpy as np
import pytest
import torch

from triolet.actors import worker
from triolet.models.executor import EncoderOutputs, TorchExecutor
from triolet.models.kv import PagedKV
from triolet.models.resources import ResourceStack
from triolet.models.whisper import WhisperModel


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def bytes_follow_freeing(driver, audio) -> bool:
    """Freeing one output of a batch of three gives a third of the storage back."""
    driver.encode(a=audio(1), b=audio(2), c=audio(3))
    driver.executor.free(("a", "b"))
    left = driver.executor._open.outputs.get("c").untyped_storage().nbytes()
    return left == driver.description.encoder_bytes


@pytest.mark.parametrize("planted", [False, True])
def test_e10_an_output_that_is_a_view_of_its_batch(driver, audio, monkeypatch, planted):
    """E10: outputs kept as views of the batch: freeing two of three frees nothing."""

    def keep_views(self, outputs):
        self._outputs.update(zip(outputs, torch.stack(list(outputs.values())), strict=True))

    if planted:
        monkeypatch.setattr(EncoderOutputs, "add", keep_views)
    assert bytes_follow_freeing(driver, audio) is not planted


@pytest.mark.parametrize("planted", [False, True])
def test_r4_payloads_kept_until_the_next_call(driver, monkeypatch, no_collector, planted):
    """R4: the runner remembers the last payloads."""
    kept = []
    if planted:
        encode = type(driver.executor).encode
        monkeypatch.setattr(type(driver.executor), "encode", lambda self, jobs: (kept.append(jobs), encode(self, jobs)))
    payload = np.zeros(4_000, dtype=np.float32)
    watched = weakref.ref(payload)
    driver.encode(a=payload)
    del payload
    assert (watched() is not None) is planted


@pytest.mark.parametrize("planted", [False, True])
def test_r2_records_that_are_never_dropped(driver, audio, job, ids, monkeypatch, planted):
    """R2: the executor is told which sequences ended, and keeps their records."""
    if planted:
        step = TorchExecutor.step
        monkeypatch.setattr(TorchExecutor, "step", lambda self, plan: step(self, attrs.evolve(plan, ended=())))
    driver.encode(a=audio(1))
    driver.run(*[job(key="a", prompt=(ids.start,), max_tokens=3)] * 3)
    assert bool(driver.executor._records) is planted


@pytest.mark.parametrize("planted", [False, True])
def test_r5_an_error_pins_the_tensors_of_a_failed_batch(driver, audio, monkeypatch, no_collector, planted):
    """R5: somebody keeps the error, and with it the frames that it came through on the worker."""
    features: list[weakref.ref[torch.Tensor]] = []

    def crash(self: WhisperModel, batch: torch.Tensor) -> torch.Tensor:
        features.append(weakref.ref(batch))
        raise RuntimeError("boom")

    if planted:
        monkeypatch.setattr(worker, "clear_frames", lambda error: None)
    monkeypatch.setattr(WhisperModel, "encode", crash)
    kept = worker.run_call(lambda: driver.encode(a=audio(1))).error
    assert isinstance(kept, RuntimeError)
    assert (features[0]() is not None) is planted


@pytest.mark.parametrize("planted", [False, True])
def test_s1_pages_kept_after_close(open_driver, checkpoint, monkeypatch, no_collector, planted):
    """S1: the KV cache survives an in-process shutdown: somebody else knows it too, and its release lets nothing go."""
    if planted:
        monkeypatch.setattr(PagedKV, "release", lambda self: None)
    driver = open_driver(checkpoint)
    keeper = driver.executor._open.paged
    watched = weakref.ref(keeper._pool)
    driver.executor.close()
    assert (watched() is not None) is planted


@pytest.mark.parametrize("planted", [False, True])
def test_s4_the_first_failing_release_skips_the_later_ones(planted):
    """S4: a release that raises leaves the rest on the device."""

    class Impatient(ResourceStack):
        def close(self) -> None:
            while self._resources:
                self._resources.pop().release()

    def fail() -> None:
        raise RuntimeError("a sticky device error")

    stack, released = (Impatient if planted else ResourceStack)(), []
    stack.register("weights", lambda: 1, lambda: released.append("weights"))
    stack.register("pages", lambda: 1, fail)
    with pytest.raises((RuntimeError, ExceptionGroup)):
        stack.close()
    assert (released == []) is planted

"""Faults of other engines, planted into ours: the promise that each breaks must notice it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from triolet.models.executor import EncoderOutputs
from triolet.models.kv import PagedKV
from triolet.models.resources import ResourceStack


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
    stack.callback("weights", lambda: released.append("weights"))
    stack.callback("pages", fail)
    with pytest.raises((RuntimeError, ExceptionGroup)):
        stack.close()
    assert (released == []) is planted

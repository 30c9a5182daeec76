"""The executor's promises beside the tokens: memory comes back, failures leave nothing half done."""

from __future__ import annotations

import logging
import math
import weakref

import numpy as np
import pytest
import torch
from attrs import evolve

from triolet.core.errors import DeviceOutOfMemory, EncodeFailed, EngineError, InvalidRequest
from triolet.core.plan import Chunk, CrossWrite, StepPlan
from triolet.core.reasoning import Reasoning
from triolet.core.request import LogitRules, Probe
from triolet.models.executor import TorchExecutor
from triolet.models.native.library import Library

from .texts import encode_job, start_of

NATIVE = set() if Library.load() is None else {"native"}


def started(sequence, ids, **changes):
    given = {"token_ids": (ids.start, ids.en), "rules": LogitRules(suppress=(1,)), **changes}
    return start_of(sequence, given.pop("token_ids"), **given)


def plan_of(step_id=0, *, started=(), ended=(), cross_writes=(), chunks=()):
    return StepPlan(
        step_id=step_id,
        epoch=0,
        started=tuple(started),
        ended=tuple(ended),
        cross_writes=tuple(cross_writes),
        chunks=tuple(chunks),
    )


def chunk_of(sequence, start=0, length=2, pages=(0,), slot=0, samples=True):
    return Chunk(sequence_id=sequence, start=start, length=length, page_table=pages, cross_slot=slot, samples=samples)


def tensors_of(executor):
    """Weak references to everything an open executor holds."""
    now = executor._open
    found = [
        now.parts.paged._pool,
        now.parts.cross._pool,
        now.parts.network.log_mel._filters,
        now.parts.network.log_mel._window,
        *now.parts.model.tensors(),
    ]
    found += now.outputs._outputs.values()
    return [weakref.ref(tensor) for tensor in found]


def run_a_little(driver, job, audio, ids):
    driver.encode(a=audio(1), b=audio(2, 0.5))
    rules = LogitRules(suppress=(1, 2))
    probe = Probe(position=0, token_ids=(ids.no_speech,))
    driver.run(*[job(key=key, prompt=(ids.start, ids.en), rules=rules, probe=probe, max_tokens=4) for key in "ab"])


def test_a_dropped_executor_dies_by_reference_count(checkpoint, config, audio, no_collector):
    """An executor that nobody closed is in no cycle: its last reference takes the tensors with it."""
    executor = TorchExecutor(checkpoint, config())
    executor.encode((encode_job(executor.open(), "a", audio(1)),))
    watched = tensors_of(executor)
    del executor
    assert [reference for reference in watched if reference() is not None] == []


def test_every_tensor_is_one_of_inference(driver, job, audio, ids):
    """Opening, encoding and stepping happen in inference mode: nothing is recorded for a gradient."""
    run_a_little(driver, job, audio, ids)
    tensors = [reference() for reference in tensors_of(driver.executor)]
    assert all(tensor.is_inference() for tensor in tensors)
    driver.executor.sleep(keep_weights=False)
    driver.executor.wake()
    assert all(reference().is_inference() for reference in tensors_of(driver.executor))


def test_an_output_of_a_batch_is_freed_alone_and_its_payload_with_the_call(driver, audio, no_collector):
    """Other engines kept views of the batch (E10), so freeing two of three freed nothing, or the last payloads (R4)."""
    payload = audio(1)
    watched = weakref.ref(payload)
    driver.encode(a=payload, b=audio(2), c=audio(3))
    del payload
    assert watched() is None
    driver.executor.free(("a", "b"))
    left = driver.executor._open.outputs.get("c").untyped_storage().nbytes()
    assert left == driver.description.encoder_bytes


def test_tokens_are_followed_only_for_a_budget_or_a_structure(driver, job, audio, ids):
    """Else the draws of a conversation are as usual."""
    usual, marks = started(1, ids), Reasoning("<think>", "</think>")
    held = [evolve(usual, reasoning=marks), evolve(usual, sequence_id=2, reasoning=evolve(marks, budget=1))]
    driver.executor.step(plan_of(started=held))
    records = driver.executor._records
    assert [records[sequence].track is not None for sequence in (1, 2)] == [False, True]
    assert records[1].sampler_input.settled < math.inf == records[2].sampler_input.settled
    driver.executor.reset()


def test_keys_that_are_not_there_or_there_already_are_our_bug(driver, audio):
    """Encode once: a key is encoded again only after it was freed. All keys are freed, or none."""
    driver.encode(a=audio(1))
    with pytest.raises(AssertionError, match="freed but not resident"):
        driver.executor.free(("a", "absent"))
    with pytest.raises(AssertionError, match="although resident"):
        driver.encode(a=audio(1))
    job = encode_job(driver.description, "b", audio(2))
    with pytest.raises(AssertionError, match="twice"):
        driver.executor.encode((job, job))
    with pytest.raises(AssertionError, match="'absent' is read but not resident"):
        driver.executor.step(plan_of(cross_writes=[CrossWrite(key="absent", slot=0)]))
    assert "a" in driver.executor._open.outputs


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (np.full(1_000, np.nan, dtype=np.float32), EncodeFailed),
        (np.zeros(0, dtype=np.float32), InvalidRequest),
        (np.zeros(32_001, dtype=np.float32), InvalidRequest),
        (np.zeros((2, 100), dtype=np.float32), InvalidRequest),
    ],
)
def test_a_failing_encode_leaves_nothing_behind(driver, audio, payload, error):
    """One bad window fails its batch; none of the batch is kept, and each good one encodes again."""
    with pytest.raises(error, match="bad"):
        driver.encode(good=audio(1), bad=payload)
    assert driver.executor.memory().by_owner["encoder_outputs"] == 0
    driver.encode(good=audio(1))


def test_a_failed_step_hurts_only_its_own_sequences(driver, audio, ids, monkeypatch):
    """After a step raises, its sequences are forgotten, the others go on, and the same work runs under new ids."""
    executor = driver.executor
    driver.encode(a=audio(1))
    write = CrossWrite(key="a", slot=0)
    first = executor.step(plan_of(0, started=[started(1, ids)], cross_writes=[write], chunks=[chunk_of(1, pages=(5,))]))
    network = type(executor._open.parts.network)
    with monkeypatch.context() as patch:
        for name in ("logits", "fed"):
            patch.setattr(network, name, lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
        with pytest.raises(DeviceOutOfMemory):
            executor.step(plan_of(1, started=[started(2, ids)], chunks=[chunk_of(2, pages=(6,))]))
    assert set(executor._records) == {1}
    again = executor.step(plan_of(2, ended=[2], started=[started(3, ids)], chunks=[chunk_of(3, pages=(6,))]))
    assert again.sampled == first.sampled
    step = executor.step(plan_of(3, chunks=[chunk_of(1, 2, 1, (5,)), chunk_of(3, 2, 1, (6,))]))
    assert step.sampled[0].token_id == step.sampled[1].token_id
    executor.step(plan_of(4, ended=[1, 3]))
    assert not executor._records


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"sequence": 9}, "not known"),
        ({"sequence": 1, "length": 3}, "chunk 0..3 of 2 tokens"),
        ({"sequence": 1, "length": 1}, "samples at 1 of 2 tokens"),
        ({"sequence": 1, "slot": None}, "no cross slot"),
        ({"sequence": 1, "slot": 8}, "unknown slot"),
        ({"sequence": 1, "pages": ()}, "pages are missing"),
        ({"sequence": 1, "slot": -1}, "unknown slot"),
        ({"sequence": 1, "pages": (128,)}, "pages of 128 are unknown"),
        ({"sequence": 1, "pages": (-1,)}, "pages of 128 are unknown"),
        ({"sequence": 1, "length": 0, "pages": (), "samples": False}, "chunk 0..0 of 2 tokens"),
        ({"sequence": 1, "start": -1, "length": 3}, "chunk -1..2 of 2 tokens"),
    ],
)
def test_impossible_slices_are_our_bug(driver, audio, ids, part, told):
    """A plan that contradicts what the executor knows is refused before anything is sampled."""
    driver.encode(a=audio(1))
    with pytest.raises(AssertionError, match=told):
        driver.executor.step(
            plan_of(started=[started(1, ids)], cross_writes=[CrossWrite(key="a", slot=0)], chunks=[chunk_of(**part)])
        )
    assert not driver.executor._records


def test_starting_a_sequence_again_leaves_the_older_one_as_it_is(driver, audio, ids):
    """The step that does so fails, with what is new in it; the sequence of that id goes on."""
    executor = driver.executor
    driver.encode(a=audio(1))
    executor.step(plan_of(0, started=[started(1, ids)], cross_writes=[CrossWrite(key="a", slot=0)]))
    with pytest.raises(AssertionError, match="started twice"):
        executor.step(plan_of(1, started=[started(1, ids), started(2, ids)], chunks=[chunk_of(1), chunk_of(2)]))
    assert set(executor._records) == {1}
    (sampled,) = executor.step(plan_of(2, chunks=[chunk_of(1)])).sampled
    assert sampled.token_id is not None


def test_positions_past_the_last_are_refused(driver, audio, ids):
    """The model has 64 positions: a chunk that would feed a 65th is our bug."""
    driver.encode(a=audio(1))
    long = started(1, ids, token_ids=(ids.start,) * 65, prompt_length=65)
    with pytest.raises(AssertionError, match="position 64 is past the last"):
        driver.executor.step(
            plan_of(
                started=[long],
                cross_writes=[CrossWrite(key="a", slot=0)],
                chunks=[chunk_of(1, 0, 65, tuple(range(17)))],
            )
        )
    with pytest.raises(AssertionError, match="of 8 slots"):
        driver.executor.step(plan_of(cross_writes=[CrossWrite(key="a", slot=8)]))


def test_rules_that_allow_nothing_are_told(driver, audio, ids):
    """No token is made up where the rules allow none."""
    driver.encode(a=audio(1))
    start = started(1, ids, rules=LogitRules(allowed=(5,), suppress=(5,)))
    with pytest.raises(EngineError, match="do not allow any token"):
        driver.executor.step(plan_of(started=[start], cross_writes=[CrossWrite(key="a", slot=0)], chunks=[chunk_of(1)]))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"self_kv_bytes": 1_000}, "52224 or more"),
        ({"cross_kv_bytes": 1_000}, "76800 or more"),
        ({"device": "cuda:99"}, "use device='auto' or 'cpu'"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_told(checkpoint, config, changes, told):
    """Sizes and devices are named with what is allowed."""
    executor = TorchExecutor(checkpoint, config(**changes))
    with pytest.raises(InvalidRequest, match=told):
        executor.open()


def test_sizes_follow_the_configuration(open_driver, checkpoint):
    """The least sizes that are allowed do work, and hold one sequence and one window."""
    description = open_driver(checkpoint, self_kv_bytes=52_224, cross_kv_bytes=76_800 + 1).description
    assert (description.pages, description.cross_slots) == (16, 1)
    description = open_driver(checkpoint, max_running=3).description
    assert (description.pages, description.cross_slots) == (48, 3)


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        ("float32", "by the native library, on " if NATIVE else "by torch's operations, not by the native library: "),
        ("bfloat16", "by the native library, on " if NATIVE else "by torch's operations, not by the native library: "),
        ("float16", "by torch's operations, not by the native library: it computes in float16; known: float32"),
    ],
)
def test_the_log_says_what_computes_a_model(open_driver, checkpoint, caplog, dtype, way):
    with caplog.at_level(logging.INFO, "triolet"):
        open_driver(checkpoint, dtype=dtype)
    assert f"WhisperForConditionalGeneration runs {way}" in caplog.text

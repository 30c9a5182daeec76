"""Every byte has an owner: what the executor counts is what lives, no more and no less.

The truth comes from elsewhere. On the CPU: from all tensors that the process knows of (`books`), from the storages that
torch's operations make (`watch`), and from torch's allocator. On CUDA: from `torch.cuda.memory_allocated`.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from triolet.core.errors import DeviceOutOfMemory, EncodeFailed, EngineError
from triolet.core.plan import Chunk, CrossWrite, DeviceMemory, StepPlan
from triolet.core.request import LogitRules, Probe, SamplingParams
from triolet.models import sampler as drawing
from triolet.models.blueprints import read as reading
from triolet.models.executor import TorchExecutor
from triolet.models.memory.resources import ResourceStack
from triolet.models.native.library import Library
from triolet_testing.tensors import live_bytes

from .conftest import CUDA
from .texts import start_of

NATIVE = () if Library.load() is None else ("native",)
OWNERS = ("weights", "features", "self_kv", "cross_kv", *NATIVE, "encoder_outputs")
NO_MEMORY = (DeviceOutOfMemory, ValueError)  # the latter from safetensors, where it is in the middle of a tensor


@pytest.fixture
def work(audio, ids, job):
    """``work(driver)`` encodes and decodes with rules, sampling, probes and shared batches, and leaves an output
    behind."""

    def run(driver):
        driver.encode(a=audio(1), b=audio(2, 0.5))
        driver.encode(c=audio(3, 1.0))
        driver.executor.free(("c",))
        driver.encode(c=audio(3, 1.0))
        settings = {
            "rules": LogitRules(suppress=(1, 2), begin_suppress=(3,)),
            "probe": Probe(position=0, token_ids=(ids.no_speech,)),
            "max_tokens": 3,
        }
        sampling = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=1)
        outcomes = driver.run(
            job(key="a", prompt=(ids.start, ids.en, ids.transcribe), **settings),
            job(key="b", prompt=(ids.start, ids.en), sampling=sampling, **settings, joins=1),
            job(key="c", prompt=(ids.start,) * 9, chunk=4, **settings),
        )
        driver.executor.free(("b", "c"))  # of the batch of "a" and "b", one is left
        return outcomes

    return run


@pytest.fixture
def drive(open_driver, checkpoint):
    """``drive(make_executor, **config_changes)`` opens the tiny checkpoint."""
    return lambda make_executor=TorchExecutor, **changes: open_driver(checkpoint, make_executor, **changes)


def expected_bytes(driver, reference):
    """From the checkpoint and the configuration, with one output left."""
    description, width, layers = driver.description, 48, 2
    position = layers * 2 * width * 4
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in reference.model.parameters()}
    # The keys' projections have no bias: zeros are stored for them, in each of three attentions but the encoder's own.
    zeros = (layers + 2 * layers) * width * 4
    network, filled, native = driver.executor._open.parts.network, 0, {}
    if network.native is not None:  # matrices and their biases are filled up to panels of 32 outputs
        config = reference.config
        inner, vocabulary = config.decoder_ffn_dim, config.vocab_size
        layer = [(3 * width, width), (width, width), (inner, width), (width, inner)]
        shapes = [*layer * 2, *[(width, width)] * 2] * layers + [(2 * layers * width, width)]
        filled = sum(-outputs % 32 * 4 * (inputs + 1) for outputs, inputs in shapes) + -vocabulary % 32 * 4 * width
        between = 3 * width + width + inner + width
        buffers = 256 * (between + layers * width) * 4 + description.encoder_embeddings * between * 4
        norms = ((3 * layers + 1 + 2 * layers + 1) * 2 + config.max_target_positions) * width * 4  # and positions
        both = (*network.encoder.tensors(), *network.native.tensors())
        native = {"native": buffers + norms + sum(one.nbytes for one in both if one.dtype == torch.uint8)}
    return {
        **native,
        "features": (80 * 201 + 400) * 4,
        "weights": sum(weights.values()) + zeros + filled,
        "self_kv": (description.pages + 1) * description.page_size * position,
        "cross_kv": description.cross_slots * description.encoder_embeddings * position,
        "encoder_outputs": description.encoder_bytes,
    }


# -- at rest -----------------------------------------------------------------------------------------------------------


def test_at_rest_every_byte_has_one_owner(books, drive, work, reference):
    """Between calls nothing lives but what is counted: all that came into being since before `open`, and all that the
    executor leads to. By owner it is, to the byte, what the checkpoint and the configuration say."""
    driver = drive()
    books.check(driver.executor)
    work(driver)
    assert books.check(driver.executor) == expected_bytes(driver, reference)
    driver.executor.reset()
    assert books.check(driver.executor)["encoder_outputs"] == 0
    driver.executor.close()
    assert books.check(driver.executor) == {}
    assert books.live() == {}


def test_torchs_own_allocator_agrees(drive, work, capfd):
    """What C++ alone may hold is counted too: the allocator's balance is the executor's, and zero after `close`."""
    work(drive())  # what the libraries take once is theirs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as opened:
        driver = drive()
        work(driver)
    assert balance(opened) == driver.executor.memory().total
    driver.executor.close()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as closed:
        driver = drive()
        work(driver)
        driver.executor.close()
    assert balance(closed) == 0
    capfd.readouterr()


def balance(profiled):
    events = profiled.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


class Static:
    """A captured graph's buffers: in a closure, behind a bound method."""

    def __init__(self):
        inputs = torch.zeros(11)
        self.replay = lambda: inputs


class CapturesGraphs(TorchExecutor):
    def open(self):
        description = super().open()
        self.graph = Static()
        return description


class Elsewhere(TorchExecutor):
    """Buffers of a module are in no object's attribute."""

    def encode(self, jobs):
        super().encode(jobs)
        ELSEWHERE.append(torch.zeros(13))


ELSEWHERE: list[torch.Tensor] = []


class Twice(TorchExecutor):
    """One buffer under two names."""

    def open(self):
        description = super().open()
        self._stack.own("pages", self._open.parts.paged)
        return description


PLANTED = [
    (CapturesGraphs, "leads to [44] bytes that nobody counts"),
    (Elsewhere, "[52, 52, 52] bytes live that nobody counts"),
    (Twice, "counted twice: [('self_kv', 'pages')]"),
]


@pytest.mark.parametrize(("make_executor", "told"), PLANTED, ids=[planted.__name__ for planted, _ in PLANTED])
def test_a_kind_of_buffer_that_is_not_registered_is_found(books, drive, work, make_executor, told):
    """S2, S3: captured graphs, buffers of a module, and one buffer under two names."""
    driver = drive(make_executor)
    work(driver)
    try:
        with pytest.raises(AssertionError) as found:
            books.check(driver.executor)
    finally:
        ELSEWHERE.clear()
    assert told in str(found.value)


@pytest.mark.parametrize("forgotten", OWNERS)
def test_an_owner_that_is_forgotten_is_found(books, drive, work, monkeypatch, forgotten):
    """Whichever it is: at once by `open` where it holds tensors then, else at rest."""
    own = ResourceStack.own
    monkeypatch.setattr(
        ResourceStack, "own", lambda self, owner, holder: holder if owner == forgotten else own(self, owner, holder)
    )
    with pytest.raises(AssertionError) as found:
        driver = drive()
        work(driver)
        books.check(driver.executor)
    late = forgotten == "encoder_outputs"
    assert ("that nobody counts" if late else "have no owner: whoever holds them is to be own()ed") in str(found.value)


# -- what a call leaves behind -----------------------------------------------------------------------------------------


def step_of(ids):
    """A first step of two sequences, of different lengths and in slots apart, of which one samples; with cross writes,
    rules and probes."""
    rules = LogitRules(suppress=(1, 2))
    starts = [
        start_of(
            number,
            (ids.start,) * (2 + number),
            sampling=SamplingParams(temperature=float(number), top_p=0.9),
            rules=rules,
            probe=Probe(position=0, token_ids=(1,)),
        )
        for number in (0, 1)
    ]
    return StepPlan(
        step_id=0,
        epoch=0,
        started=tuple(starts),
        ended=(),
        cross_writes=(CrossWrite(key="a", slot=0), CrossWrite(key="b", slot=2)),
        chunks=tuple(
            Chunk(
                sequence_id=number,
                start=0,
                length=2 + number,
                page_table=(number,),
                cross_slot=2 * number,
                samples=True,
            )
            for number in (0, 1)
        ),
    )


def test_what_a_step_makes_dies_with_it(books, driver, audio, ids, watch):
    """Whoever holds its result, and although the error is kept of a step that runs out of memory, at whichever of its
    storages."""
    executor = driver.executor
    driver.encode(a=audio(1), b=audio(2))
    with watch() as watched:
        result = executor.step(step_of(ids))
    assert [sampled.token_id is not None for sampled in result.sampled] == [True, True]
    assert watched.alive == 0
    count = len(watched.made)
    assert count > (1 if NATIVE else 50)  # the library's operations make none
    for number in range(1, count):
        executor.reset()
        driver.encode(a=audio(1), b=audio(2))
        with watch(fail_at=number) as watched, pytest.raises(DeviceOutOfMemory) as kept:
            executor.step(step_of(ids))
        assert watched.alive == 0, f"storage {number}: {kept.value}"
    books.check(executor)


def test_what_an_encode_batch_makes_dies_with_it(books, driver, audio, watch):
    """Its outputs stay. When it runs out of memory, at whichever of its storages, nothing stays, although the error is
    kept."""
    executor, batch = driver.executor, {"a": audio(1), "b": audio(2, 0.5)}
    with watch() as watched:
        driver.encode(**batch)
    assert watched.alive == 2
    executor.reset()
    for number in range(1, len(watched.made) + 1):
        with watch(fail_at=number) as failed, pytest.raises(DeviceOutOfMemory) as kept:
            driver.encode(**batch)
        assert failed.alive == 0, f"storage {number}: {kept.value}"
    assert books.check(executor)["encoder_outputs"] == 0


def test_an_error_of_ours_keeps_no_tensor_either(books, driver, audio, ids, monkeypatch):
    """Not the encoder's refusal, not a step's own error, not one that was raised from another."""
    executor, kept = driver.executor, []
    with pytest.raises(EncodeFailed) as error:
        driver.encode(a=np.full(1_000, np.nan, dtype=np.float32))
    kept.append(error)
    books.check(executor)
    driver.encode(a=audio(1), b=audio(2))

    def fail(*given):
        try:
            raise ValueError(torch.ones(3).sum())
        except ValueError as first:
            raise EngineError("chained") from first

    monkeypatch.setattr(drawing, "_accept", fail)
    with pytest.raises(EngineError, match="chained") as error:
        executor.step(step_of(ids))
    kept.append(error)
    kept[-1].value.__cause__.args = ()
    books.check(executor)


# -- half-open ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_once(monkeypatch):
    """The tokenizer takes longer to read than everything else: it is read once."""
    read, known = reading.read_checkpoint, {}

    def read_checkpoint(folder):
        if folder not in known:
            known[folder] = read(folder)
        return known[folder]

    monkeypatch.setattr(reading, "read_checkpoint", read_checkpoint)


@pytest.mark.parametrize("call", ["own", "callback"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_s7_an_open_that_fails_at_a_registration_leaves_nothing(
    registrations, checkpoint, config, read_once, call, when
):
    """S7: before the owner is known or after it, for every owner."""
    both = OWNERS.index("encoder_outputs")  # encoder and decoder in the library
    expected = {"own": [*OWNERS[:both], *NATIVE, *OWNERS[both:]], "callback": ["records", "threads", "grammars"]}[call]
    assert registrations(TorchExecutor(checkpoint, config(threads=1)), call, when) == expected


def test_s7_an_open_without_memory_for_any_of_its_storages_leaves_nothing(books, checkpoint, config, read_once, watch):
    """S7: however far it came, weights half read included; the error is kept."""
    executor = TorchExecutor(checkpoint, config())
    with watch() as watched:
        executor.open()
    owned = executor._stack.owners().keys()
    assert owned <= watched.made.keys(), "memory could not run out at each storage that is owned"
    assert watched.alive == len(owned), "the others die before it is open"
    executor.close()
    count = len(watched.made)
    for number in [*range(1, count, 13), count]:
        with watch(fail_at=number) as watched, pytest.raises(NO_MEMORY) as kept:
            executor.open()
        assert watched.alive == 0, f"storage {number}: {kept.value}"
        assert executor.memory().by_owner == {}
    assert books.live() == {}


def test_what_was_on_its_way_is_dead_before_the_last_release(
    no_collector, checkpoint, config, read_once, watch, monkeypatch
):
    """The allocator's cache, and whatever else was taken first, is given back last: by then the weights that were read
    half must be dead, though they had no owner yet."""
    at_the_end, restore = [], torch.set_num_threads
    before = torch.get_num_threads()
    executor = TorchExecutor(checkpoint, config(threads=before + 1))
    with watch(fail_at=60) as watched:

        def set_num_threads(count):
            restore(count)
            if count == before:
                at_the_end.append(watched.alive)

        monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
        with pytest.raises(NO_MEMORY):
            executor.open()
    assert at_the_end == [0]


# -- by the device's own count -----------------------------------------------------------------------------------------


@pytest.fixture
def allocated(device, drive, work, no_collector):
    """Tells the bytes that are allocated now: on CUDA the allocator's own count. What the libraries take once and keep
    (the workspaces of cuBLAS) is taken before."""
    driver = drive(device=device)
    work(driver)
    driver.executor.sleep(keep_weights=True)
    driver.executor.wake()
    work(driver)
    driver.executor.close()
    if device == "cuda":
        return torch.cuda.memory_allocated
    return live_bytes


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_close_gives_every_byte_back_after_errors(device, allocated, drive, audio, ids, watch):
    """Errors of encode batches and steps are kept by somebody; the count is as before all the same. (On the CPU `watch`
    and `books` say it of every storage.)"""
    before, kept = allocated(), []
    driver = drive(device=device)
    executor, batch = driver.executor, {"a": audio(1), "b": audio(2, 0.5)}
    driver.encode(**batch)
    rest = allocated()
    numbers = (1, 3, 7, 12)
    calls = [(partial(driver.encode, c=audio(3), d=audio(4)), number) for number in numbers]
    calls += [(partial(executor.step, step_of(ids)), number) for number in numbers]
    for call, number in calls:
        with watch(fail_at=number), pytest.raises(DeviceOutOfMemory) as error:
            call()
        kept.append(error.value)
        assert allocated() == rest
    assert len(kept) == len(calls)
    executor.close()
    assert allocated() == before


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=CUDA)])
def test_an_open_that_fails_gives_every_byte_back(device, allocated, checkpoint, config, read_once, watch):
    """S7, by the device's count, after each failure: weights, pages or slots do not fit, and the error is kept."""
    before = allocated()
    executor = TorchExecutor(checkpoint, config(device=device))
    with watch() as watched:
        executor.open()
    count = len(watched.made)
    executor.close()
    for number in [*range(1, count, 97), *range(count - 6, count + 1)]:
        with watch(fail_at=number), pytest.raises(NO_MEMORY) as kept:
            executor.open()
        assert allocated() == before, f"storage {number}: {kept.value}"


def test_sleep_and_close_give_every_byte_back_in_time(device, allocated, drive, work):
    """The count is as before `open`, exactly, when the call returns; on the CPU parked weights are all that is left."""
    before = allocated()
    driver = drive(device=device)
    executor = driver.executor
    for keep_weights in (True, False):
        work(driver)
        held = executor.memory()
        assert allocated() >= before + held.total  # CUDA rounds each up
        executor.sleep(keep_weights=keep_weights)
        weights = held.by_owner["weights"] if keep_weights else 0
        assert executor.memory() == DeviceMemory(device="cpu", by_owner={"parked_weights": weights} if weights else {})
        assert allocated() == before + (weights if device == "cpu" else 0)
        executor.wake()
    held = executor.memory()
    executor.close()
    assert allocated() == before
    assert executor.released.before == held.by_owner
    assert executor.released.kept == {}

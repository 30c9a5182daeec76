"""Steps in fixed shapes: recorded or not, a sequence gets the tokens that it gets without.

No test here needs a GPU to say something: `EagerRecorder` walks the whole way but the capture, and the meta device
refuses whatever a capture would (numbers asked of the device, tensors of two devices together). With one, the same
tests run on captured graphs.
"""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from attrs import define, field
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from triolet.core.plan import Chunk
from triolet.core.request import Probe, SamplingParams
from triolet.models.attention import graphs as module
from triolet.models.attention.fixed import Bucket, Buckets, FixedInputs
from triolet.models.attention.graphs import CannotCaptureError, EagerRecorder, GraphManager
from triolet.models.memory.kv import PagedKV
from triolet.models.memory.module import TransformerModel
from triolet.models.memory.rows import Rows
from triolet.models.networks.causal import CausalDecode

from .conftest import CUDA, on_cuda
from .texts import Job, generate, noise

LENGTHS = (1, 5, 23, 40, 70)
BOTH = pytest.mark.parametrize(
    ("place", "mode"),
    [("cpu", "eager"), pytest.param("cuda", "eager", marks=CUDA), pytest.param("cuda", "auto", marks=CUDA)],
)


def manager(driver):
    return driver.executor._open.parts.network.graphs


def assert_tokens_without(start, results, **changes):
    """That ``results`` of `mixed_jobs` by llama are those of an executor that records nothing."""
    expected = start("llama", graphs="off", **changes).run(*mixed_jobs())
    assert [one.tokens for one in results] == [one.tokens for one in expected]


def mixed_jobs(**changes):
    """Sequences of different lengths that join one after the other, leave when they like, and start again."""
    return [
        Job(
            prompt=noise(length, length),
            joins=3 * index,
            chunk=(1000, 7, 18)[index % 3],
            max_tokens=(34, 30, 27, 24, 16)[index],
            preempted_at=9 * (index % 2),
            **changes,
        )
        for index, length in enumerate(LENGTHS)
    ]


# -- the same tokens ---------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "gemma4"])
def test_recorded_steps_give_the_tokens_of_transformers(start, folder, family, place, mode):
    """Joining, leaving and starting again, over the borders of buckets in both directions; prefill and mixed steps
    between them are computed as they come."""
    driver = start(family, graphs=mode, device=place)
    results = driver.run(*mixed_jobs())
    reference = AutoModelForCausalLM.from_pretrained(folder(family), dtype=torch.float32).eval()
    assert [result.tokens for result in results] == [
        generate(reference, job.prompt, job.max_tokens) for job in mixed_jobs()
    ]
    told = manager(driver)
    assert told.replays > 20, "too few steps were replayed to prove anything"
    assert {bucket.rows for bucket in told._recorded} >= {1, 2, 4, 8}
    assert len({bucket.pages for bucket in told._recorded}) >= 3
    assert told.refused == ""


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_what_follows_images_and_audio_is_recorded_too(open_driver, opened, name):
    """Where positions have three dimensions, a token behind the prompt has one number for all of them; inside, the step
    is computed as it comes."""
    checkpoint = opened(name)
    medium = "audio" if name == "qwen2_audio" else "images"
    told = []
    for mode in ("off", "eager"):
        driver = open_driver(checkpoint.folder, graphs=mode)
        prepared = driver.description.preparer.prepare(
            f"See {checkpoint.placeholder} here", **{medium: checkpoint.items(1)}
        )
        driver.executor.encode(prepared.items)
        placeholders = tuple(item.placeholder for item in prepared.items)
        jobs = [
            Job(prompt=prepared.token_ids, placeholders=placeholders, chunk=chunk, max_tokens=8) for chunk in (1000, 1)
        ]
        told.append([result.tokens for result in driver.run(*jobs)])
    assert told[0] == told[1]
    assert manager(driver).replays >= 7


@BOTH
def test_draws_and_probes_are_those_of_a_step_without(start, place, mode):
    """Seeds, log-probabilities, and a probe in a chunk of one token."""
    sampling = SamplingParams(temperature=0.9, top_k=40, seed=5, logprobs=2)
    jobs = mixed_jobs(sampling=sampling)
    jobs.append(Job(prompt=noise(9, 9), probe=Probe(position=4, token_ids=(5, 9)), chunk=1, max_tokens=3))
    plain = start("qwen3", graphs="off", device=place).run(*jobs)
    recorded = start("qwen3", graphs=mode, device=place).run(*jobs)
    for one, other in zip(plain, recorded, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert recorded[-1].probes[0] == pytest.approx(plain[-1].probes[0], abs=1e-4)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_left_over_writes_zeros_whatever_it_computes(start, number):
    """Weights that overflow for token 0, which those rows feed."""
    driver = start("llama", graphs="eager")
    with torch.inference_mode():
        driver.executor._open.parts.model.module.get_input_embeddings().weight[0] = number
    jobs = [Job(prompt=tuple(token or 1 for token in noise(length, length)), max_tokens=5) for length in (3, 9, 20)]
    results = driver.run(*jobs)
    assert all(result.tokens for result in results)
    assert not any(part[-1].any() for part in driver.executor._open.parts.paged.parts())


# -- shapes ------------------------------------------------------------------------------------------------------------


def rows_at(*starts):
    parts = [
        Chunk(sequence_id=index, start=start, length=1, page_table=(7, 8, 9, 10, 11, 12), cross_slot=None, samples=True)
        for index, start in enumerate(starts)
    ]
    return Rows.of(parts, (), 4)


@pytest.mark.parametrize(
    ("count", "start", "bucket"),
    [(1, 0, (1, 1)), (3, 4, (4, 2)), (5, 8, (8, 4)), (9, 19, (16, 5)), (17, 3, (20, 1)), (21, 0, None), (1, 20, None)],
)
def test_a_step_has_the_next_larger_shape(count, start, bucket):
    """Never larger than what there is; none where it is too large."""
    buckets = Buckets(rows=20, pages=5, cells=1000)
    found = buckets.fit(rows_at(*[start] * count), 4)
    assert found == (bucket and Bucket(*bucket))


def test_a_step_that_is_too_large_is_computed_as_it_comes(start):
    """More sequences than `max_running` says: nothing is asked of the recorder."""
    driver = start("llama", graphs="eager", max_running=2)
    jobs = [Job(prompt=noise(4, index), max_tokens=6) for index in range(5)]
    results = driver.run(*jobs)
    assert [one.tokens for one in results] == [one.tokens for one in start("llama", graphs="off").run(*jobs)]
    assert manager(driver).replays == 1, "only what `prove` did"


# -- what may be captured ----------------------------------------------------------------------------------------------


class NothingFromTheHost(TorchDispatchMode):
    """Refuses tensors made of Python's numbers: a capture would bake them in, or break off."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "lift_fresh" not in str(func), "a tensor is made of Python's numbers"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "qwen2_vl", "smolvlm"])
def test_a_decode_asks_nothing_of_the_device_and_takes_nothing_to_it(start, name):
    """On the meta device a number cannot be asked for, and tensors of two devices cannot meet: what runs there can be
    captured, as far as the host is concerned."""
    network = start(name, graphs="eager").executor._open.parts.network
    numbers = torch.zeros(network.graphs.buckets.numbers, dtype=torch.long)
    inputs = FixedInputs.of(Bucket(4, 8), numbers, network.graphs._logits)
    with torch.inference_mode(), NothingFromTheHost():
        CausalDecode.of(network).rehearse(inputs)


def test_a_model_that_asks_the_device_for_something_is_never_captured(start, monkeypatch, caplog):
    """The rehearsal finds out: nothing is recorded that would have to be broken off. The tokens stay the same."""
    caplog.set_level(logging.WARNING, "triolet")  # whatever level another test has left
    compute, captured = CausalDecode.__call__, []

    def asking(self, inputs):
        compute(self, inputs)
        inputs.logits[0, 0].item()

    monkeypatch.setattr(EagerRecorder, "capture", lambda self, function, inputs: captured.append(inputs))
    monkeypatch.setattr(CausalDecode, "__call__", asking)
    driver = start("llama", graphs="eager")
    results = driver.run(*mixed_jobs())
    assert_tokens_without(start, results)
    assert captured == []
    assert "meta" in manager(driver).refused
    assert len(caplog.records) == 1


@define
class Refuses:
    """Captures so many steps, then none: the function asks the device for something."""

    left: int
    released: int = field(init=False, default=0)

    def capture(self, function, inputs):
        if not self.left:
            raise CannotCaptureError("planted")
        self.left -= 1
        return EagerRecorder().capture(function, inputs)

    def release(self):
        self.released += 1


@pytest.mark.parametrize("captures", [0, 3])
def test_a_model_that_cannot_be_captured_runs_without_and_says_so(start, monkeypatch, caplog, captures):
    """At `open`, or in the middle of a step: once, with the reason; the tokens stay the same, and what was captured is
    given back."""
    recorder = Refuses(captures)
    monkeypatch.setattr(module, "EagerRecorder", lambda: recorder)
    with caplog.at_level(logging.WARNING, "triolet"):
        driver = start("llama", graphs="eager")
        results = driver.run(*mixed_jobs())
    assert_tokens_without(start, results)
    told = manager(driver)
    assert (told.refused, len(told._recorded), told.captures) == ("planted", 0, captures)
    assert [record.message for record in caplog.records] == [
        "steps are computed without graphs from now on, since one cannot be captured: planted"
    ]
    assert recorder.released == 1


def test_the_least_recently_used_graph_goes_first(start):
    """And only when the new one is there: the pool of memory that they share goes with the last."""

    @define
    class Notes:
        alive: list = field(factory=list)
        closing: bool = False

        def capture(self, function, inputs):
            self.alive.append(inputs.bucket.rows)
            return (lambda: None), functools.partial(self.forget, inputs.bucket.rows)

        def forget(self, rows):
            assert len(self.alive) > 1 or self.closing
            self.alive.remove(rows)

        def release(self):
            assert not self.alive, "the pool is given back before the graphs"

    network = start("llama", graphs="eager").executor._open.parts.network
    notes = Notes()
    graphs = GraphManager(
        decode=CausalDecode.of(network),
        recorder=notes,
        paged=network.paged,
        max_running=8,
        positions=64,
        vocabulary=network.graphs._logits.shape[1],
        capacity=2,
    )
    for count, alive in ((1, [1]), (2, [1, 2]), (1, [1, 2]), (3, [1, 4]), (2, [4, 2]), (8, [2, 8]), (2, [2, 8])):
        numbers = [0] * count
        assert graphs.run(rows_at(*numbers), numbers, numbers).shape[0] == count
        assert sorted(notes.alive) == sorted(alive)
    assert (graphs.captures, graphs.replays, len(graphs._recorded), graphs.refused) == (5, 7, 2, "")
    notes.closing = True
    graphs.release()
    assert notes.alive == []
    assert all(tensor.numel() == 0 for tensor in graphs.tensors())


# -- memory ------------------------------------------------------------------------------------------------------------


def test_static_buffers_are_counted_and_die_first(start, monkeypatch):
    """Before the pages and weights that graphs refer to, by sleep and by close. (Their bytes have an owner at all
    times: `test_s2_s3_nothing_lives_asleep_or_after_close`.)"""
    order = []
    for kind in (GraphManager, PagedKV, TransformerModel):
        release = kind.release
        monkeypatch.setattr(kind, "release", lambda self, r=release: (order.append(type(self).__name__), r(self))[1])
    driver = start("gemma2", graphs="eager")
    executor, graphs = driver.executor, manager(driver)
    held = executor.memory().by_owner
    assert held["graphs"] == graphs.buckets.numbers * 8 + 8 * driver.description.vocabulary_size * 4
    order.clear()
    executor.sleep(keep_weights=False)
    executor.wake()
    assert executor.memory().by_owner == held
    executor.close()
    assert order[:3] == order[-3:] == ["GraphManager", "PagedKV", "TransformerModel"]


# -- on CUDA alone -----------------------------------------------------------------------------------------------------


def cuda_bytes():
    """What is allocated, without what cuBLAS keeps for good."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@on_cuda
def test_captured_graphs_give_every_byte_back(no_collector, start):
    """Close and sleep: the allocator's count is as before, exactly."""
    start("llama", graphs="auto", device="cuda").executor.close()
    before = cuda_bytes()
    driver = start("llama", graphs="auto", device="cuda")
    executor = driver.executor
    first = driver.run(*mixed_jobs())
    assert len(manager(driver)._recorded) > 3
    for keep_weights in (True, False):
        executor.sleep(keep_weights=keep_weights)
        assert cuda_bytes() == before
        executor.wake()
        assert [one.tokens for one in driver.run(*mixed_jobs())] == [one.tokens for one in first]
    executor.close()
    assert cuda_bytes() == before
    assert executor.released.kept == {}


@on_cuda
def test_a_capture_that_breaks_off_harms_nothing(start, monkeypatch, caplog):
    """The function asks the device for a number in the midst of its capture, and the rehearsal has not found out."""
    monkeypatch.setattr(CausalDecode, "rehearse", lambda self, inputs: None)
    compute = CausalDecode.__call__

    def asks(self, inputs):
        compute(self, inputs)
        inputs.logits[0, 0].item()

    monkeypatch.setattr(CausalDecode, "__call__", asks)
    driver = start("llama", graphs="auto", device="cuda")
    assert manager(driver).refused
    assert_tokens_without(start, driver.run(*mixed_jobs()), device="cuda")


@on_cuda
def test_graphs_that_come_and_go_share_one_pool(start):
    """With room for two: each is captured anew when it is needed again."""
    driver = start("llama", graphs="auto", device="cuda")
    manager(driver).capacity = 2
    assert_tokens_without(start, driver.run(*mixed_jobs()), device="cuda")
    told = manager(driver)
    assert (len(told._recorded), told.refused) == (2, "")
    assert told.captures > 4

"""Sleeping gives the device back, and waking takes it again as it was: the same description, the same tokens, bit for
bit."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from triolet.core.errors import CheckpointError, DeviceOutOfMemory
from triolet.core.plan import DeviceMemory
from triolet.core.request import LogitRules, Probe, SamplingParams
from triolet.models import executor as module
from triolet.models.blueprints import blueprint as common
from triolet.models.blueprints import whisper_blueprint as blueprint
from triolet.models.memory.module import TransformerModel

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint
from ..checkpoints.gguf_files import tiny, write_gguf
from .texts import Job

BOTH_WAYS = pytest.mark.parametrize("keep_weights", [True, False], ids=["parked", "dropped"])


@pytest.fixture
def transcribe(audio, ids, job):
    """``transcribe(driver)``: the outcomes (tokens, log-probabilities, probes) of a mixed batch, from a clean start."""

    def run(driver):
        driver.random = random.Random(0)
        driver.encode(a=audio(1), b=audio(2, 0.5))
        settings = {"rules": LogitRules(suppress=(1, 2)), "probe": Probe(position=0, token_ids=(ids.no_speech,))}
        outcomes = driver.run(
            job(key="a", prompt=(ids.start, ids.en), max_tokens=6, **settings),
            job(
                key="b",
                prompt=(ids.start,),
                max_tokens=4,
                sampling=SamplingParams(temperature=0.7, seed=3),
                **settings,
            ),
        )
        driver.executor.free(("a", "b"))
        return outcomes

    return run


# -- as it was ---------------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_the_same_tokens_before_and_after(books, open_driver, checkpoint, transcribe, device, keep_weights):
    """Twice over: the same tokens, log-probabilities and probes, bit for bit, and the same bytes by owner. Asleep it
    holds the parked weights (on the CPU the same tensors under another name) or nothing, and `close` drops these."""
    driver = open_driver(checkpoint, device=device)
    executor = driver.executor
    opened = books.check(executor)
    parked = {"parked_weights": opened["weights"]} if keep_weights else {}
    before = transcribe(driver)
    for _ in range(2):
        pointers = {tensor.data_ptr() for tensor in executor._open.parts.model.tensors()}
        executor.sleep(keep_weights=keep_weights)
        assert books.check(executor) == parked
        assert executor.memory() == DeviceMemory(device="cpu", by_owner=parked)
        assert executor.released.kept == {}
        if keep_weights and device == "cpu":
            assert {tensor.data_ptr() for tensor in executor._parked_model.tensors()} == pointers
        executor.wake()
        assert books.check(executor) == opened
        assert transcribe(driver) == before
    executor.sleep(keep_weights=keep_weights)
    executor.close()
    assert executor.released.before == parked
    assert books.live() == {}


def test_threads_are_given_back_while_it_sleeps(open_driver, checkpoint):
    """torch's thread count is the process's."""
    before = torch.get_num_threads()
    executor = open_driver(checkpoint, threads=before + 1).executor
    executor.sleep(keep_weights=True)
    assert torch.get_num_threads() == before
    executor.wake()
    assert torch.get_num_threads() == before + 1
    executor.close()
    assert torch.get_num_threads() == before


def test_a_head_that_is_the_embedding_stays_one_tensor(driver):
    """The tied head is not parked twice."""
    before = driver.executor.memory().by_owner["weights"]
    moved = driver.executor._open.parts.model.to(torch.device("meta"))
    assert moved.module.proj_out.packed is moved.module.decoder.embed_tokens.weight
    assert sum(tensor.nbytes for tensor in set(moved.tensors())) == before
    assert all(tensor.is_meta for tensor in moved.tensors())


# -- misuse, and what is allowed asleep --------------------------------------------------------------------------------


@BOTH_WAYS
def test_asleep_only_reset_memory_and_close_are_allowed(driver, audio, keep_weights):
    """Everything else is our bug, and so are a second sleep, and a wake when it is awake, closed or was never open."""
    executor = driver.executor
    with pytest.raises(AssertionError, match="is awake"):
        executor.wake()
    executor.sleep(keep_weights=keep_weights)
    for call in (
        lambda: driver.encode(a=audio(1)),
        driver.run,
        lambda: executor.free(()),
        lambda: executor.sleep(keep_weights=True),
    ):
        with pytest.raises(AssertionError, match="is asleep"):
            call()
    with pytest.raises(AssertionError, match="open already"):
        executor.open()
    executor.reset()
    executor.close()
    for call in (executor.wake, executor.reset, lambda: executor.sleep(keep_weights=True)):
        with pytest.raises(AssertionError, match="not open"):
            call()
    driver.description = executor.open()
    driver.encode(a=audio(1))


# -- failures ----------------------------------------------------------------------------------------------------------


STAGES = [
    (True, common.PagedKV, "allocate"),
    (True, module.EncoderOutputs, "__init__"),
    (True, TransformerModel, "to"),
    (False, blueprint.WeightFiles, "get"),
    (False, module._Open, "__init__"),
]


@pytest.mark.parametrize(
    ("keep_weights", "owner", "name"), STAGES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_wake_that_fails_gives_back_and_can_be_tried_again(
    books, open_driver, checkpoint, transcribe, monkeypatch, keep_weights, owner, name
):
    """At each stage: what it had taken is given back though the error is kept, the parked weights stay, and the next
    try gives the same tokens."""
    driver = open_driver(checkpoint)
    before = transcribe(driver)
    driver.executor.sleep(keep_weights=keep_weights)
    asleep = books.check(driver.executor)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("somebody else has it")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        for _ in range(2):
            with pytest.raises(
                DeviceOutOfMemory, match="the model does not fit into the device's memory: somebody"
            ) as kept:
                driver.executor.wake()
            assert books.check(driver.executor) == asleep, f"{kept.value} keeps tensors"
            assert driver.executor.released.kept == {}
    driver.executor.wake()
    assert transcribe(driver) == before


@BOTH_WAYS
def test_a_wake_without_memory_for_any_of_its_storages(books, open_driver, checkpoint, transcribe, watch, keep_weights):
    """However far it came."""
    driver = open_driver(checkpoint)
    before = transcribe(driver)
    executor = driver.executor
    executor.sleep(keep_weights=keep_weights)
    asleep = books.check(executor)
    with watch() as watched:
        executor.wake()
    executor.sleep(keep_weights=keep_weights)
    for number in range(1, len(watched.made) + 1, 1 if keep_weights else 17):
        with watch(fail_at=number) as failed, pytest.raises((DeviceOutOfMemory, ValueError)) as kept:
            executor.wake()
        assert failed.alive == 0, f"storage {number}: {kept.value}"
        assert executor.memory().by_owner == asleep
    executor.wake()
    assert transcribe(driver) == before


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_half_moved_weights_die_with_the_error(books, driver, monkeypatch, watch, call):
    """Between two kinds of memory (here to one without bytes): when it is full half-way, the weights are where they
    were, and no half copy lives."""
    executor, elsewhere = driver.executor, torch.device("meta")
    weights, to = books.check(executor)["weights"], TransformerModel.to
    if call == "wake":
        executor.sleep(keep_weights=True)
    books.check(executor)
    with monkeypatch.context() as patch:
        patch.setattr(TransformerModel, "to", lambda self, device, *, copied=False: to(self, elsewhere))
        for number in (1, 2, 30, 60):
            with watch(fail_at=number) as watched, pytest.raises(DeviceOutOfMemory) as kept:
                executor.wake() if call == "wake" else executor.sleep(keep_weights=True)
            assert watched.alive == 0, f"storage {number}: {kept.value}"
    if call == "wake":
        assert books.check(executor) == {"parked_weights": weights}
        executor.wake()
    assert books.check(executor)["weights"] == weights


def test_a_sleep_without_room_on_the_host_changes_nothing(driver, audio, ids, job, monkeypatch):
    """It is awake, and goes on with what it knew."""
    driver.encode(a=audio(1))

    def fail(self, device, *, copied=False):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(TransformerModel, "to", fail)
        with pytest.raises(DeviceOutOfMemory, match="a copy of the weights does not fit into the host's memory"):
            driver.executor.sleep(keep_weights=True)
    assert "parked_weights" not in driver.executor.memory().by_owner
    assert driver.run(job(key="a", prompt=(ids.start,), max_tokens=2))[0].tokens


def test_a_sleep_whose_release_fails_sleeps_all_the_same(books, open_driver, checkpoint, transcribe, monkeypatch):
    """The others are released, the error says whose it was, and it wakes."""
    driver = open_driver(checkpoint)
    before = transcribe(driver)

    def fail(self):
        raise RuntimeError("a sticky error")

    with monkeypatch.context() as patch:
        patch.setattr(common.CrossKV, "release", fail)
        executor = driver.executor
        executor.sleep(keep_weights=True)
        executor.wake()
        with pytest.raises(ExceptionGroup) as caught:
            executor.sleep(keep_weights=True)
    assert caught.value.exceptions[0].__notes__ == ["while releasing 'cross_kv'"]
    assert set(executor.memory().by_owner) == {"parked_weights"}
    executor.wake()
    assert transcribe(driver) == before
    books.check(executor)


def test_a_failed_wake_whose_release_fails_too_tells_of_both(driver, monkeypatch):
    """The first error is raised; the other is in its notes."""
    driver.executor.sleep(keep_weights=True)

    def fail(*args, **kwargs):
        raise RuntimeError("first")

    def release(self):
        raise RuntimeError("second")

    with monkeypatch.context() as patch:
        patch.setattr(module, "Sampler", fail)
        patch.setattr(blueprint.LogMel, "release", release)
        with pytest.raises(RuntimeError, match="first") as caught:
            driver.executor.wake()
    assert "second" in caught.value.__notes__[0]
    driver.executor.wake()


# -- the checkpoint meanwhile ------------------------------------------------------------------------------------------


def damage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"nothing")


def edit_config(folder):
    rewrite(folder / "config.json", decoder_layers=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (damage_weights, "cannot be read"),
        (edit_config, "changed or deleted: config.json"),
        (shutil.rmtree, "config.json, generation_config.json"),
    ],
)
def test_a_checkpoint_that_changed_meanwhile_is_told(
    books, open_driver, checkpoint, tmp_path, transcribe, change, told
):
    """Only where the weights were dropped. Nothing is taken; when it is as it was, the executor wakes."""
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    driver = open_driver(folder)
    before = transcribe(driver)
    driver.executor.sleep(keep_weights=False)
    change(folder)
    with pytest.raises(CheckpointError, match=f"has changed since the executor was opened: .*{told}") as kept:
        driver.executor.wake()
    assert books.check(driver.executor) == {}, f"{kept.value} keeps tensors"
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    driver.executor.wake()
    assert transcribe(driver) == before
    driver.executor.sleep(keep_weights=True)
    change(folder)
    driver.executor.wake()
    assert transcribe(driver) == before


def test_a_gguf_file_wakes_though_its_settings_were_removed(books, open_driver, tmp_path, monkeypatch):
    """They are in the user's cache, which may be emptied at any time. Another file is told by its name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    path, other = (
        write_gguf(tmp_path / f"{seed}.gguf", "llama", tiny("LlamaConfig", "LlamaForCausalLM", seed, **small))
        for seed in range(2)
    )
    driver = open_driver(path)
    before = driver.run(Job(prompt=(5, 6, 7), max_tokens=4))
    driver.executor.sleep(keep_weights=False)
    shutil.rmtree(tmp_path / "cache")
    driver.executor.wake()
    assert driver.run(Job(prompt=(5, 6, 7), max_tokens=4)) == before
    driver.executor.sleep(keep_weights=False)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"the checkpoint .*0.gguf has changed since the executor was opened"):
        driver.executor.wake()
    other.rename(path)
    with pytest.raises(CheckpointError, match="the weights are different"):
        driver.executor.wake()
    assert books.check(driver.executor) == {}


@pytest.mark.parametrize("family", ["whisper", "llama"])
def test_another_training_of_the_same_model_is_told(open_driver, checkpoint, tmp_path, make, save, folder, family):
    """The settings are the same, the weights are not."""
    whisper = family == "whisper"
    copy = shutil.copytree(checkpoint if whisper else folder(family), tmp_path / "copy")
    executor = open_driver(copy).executor
    executor.sleep(keep_weights=False)
    other = tmp_path / "other"
    _ = save(other, make(seed=1)) if whisper else make_checkpoint(family, other, seed=1)
    shutil.copy(other / "model.safetensors", copy)
    with pytest.raises(CheckpointError, match="the weights are different"):
        executor.wake()
    assert executor.memory().by_owner == {}
    executor.close()

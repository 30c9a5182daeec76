"""S2, S3, S7 and E10 of other engines on what decoders have beside weights and pages: a draft model, recorded steps, a
pooling head, images' encodings, and the layers of a pipeline on devices of their own.

The collector is off: what dies here dies by reference count, seen through weak references to storages (`books`).
"""

from __future__ import annotations

import pytest
import torch

from triolet.core.config import Speculation
from triolet.models.executor import TorchExecutor
from triolet.models.memory.encoder_outputs import EncoderOutputs
from triolet.models.memory.resources import ResourceStack
from triolet.testing.families import make_checkpoint

from .media import PLACEHOLDERS, picture
from .texts import TextDriver, TextJob, noise

FAMILIES = {
    "draft": "llama",
    "graphs": "llama",
    "pipeline": "llama",
    "classifier": "bert_classifier",
    "decoding classifier": "llama_classifier",
    "images": "qwen2_5_vl",
}
OWNERS = {  # beside encoder outputs and masks, which all have
    "draft": {"weights", "self_kv", "draft_weights", "draft_self_kv", "draft_graphs", "graphs"},
    "graphs": {"weights", "self_kv", "graphs"},
    "pipeline": {"weights", "self_kv"},
    "classifier": {"weights"},
    "decoding classifier": {"weights", "self_kv"},
    "images": {"weights", "self_kv", "graphs"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = {*FAMILIES.values()}
    made = {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in sorted(names)}
    return {**made, "a draft": make_checkpoint("llama", tmp_path_factory.mktemp("draft"), seed=1)}


def settings(folders, kind):
    """What `EngineConfig` needs beside the small sizes."""
    if kind == "pipeline":
        return {"device": "auto", "devices": ("cpu", "cpu")}
    graphs = {"graphs": "eager"} if kind in {"draft", "graphs", "images"} else {}
    proposed = {"speculation": Speculation(draft=str(folders["a draft"]))} if kind == "draft" else {}
    return {**graphs, **proposed}


def work(driver):
    """Whatever the model does: texts are sampled or pooled, images are encoded; one encoding is left behind."""
    description, executor = driver.description, driver.executor
    prompts = [(noise(length, length), ()) for length in (3, 21)]
    if description.preparer.media:
        prompts = [asked_about(description, seeds) for seeds in ((1, 2), (3,))]
        items = {item.key: item for _, items in prompts for item in items}
        executor.encode(tuple(map(job, items.values())))
    pooling = description.default_pooling
    jobs = [
        TextJob(prompt=prompt, pooling=pooling, placeholders=tuple(item.placeholder for item in items), max_tokens=4)
        for prompt, items in prompts
    ]
    TextDriver(executor, description).run(*jobs)
    if description.preparer.media:
        executor.free(tuple(list(items)[:2]))


def asked_about(description, seeds):
    images = [picture(40, 60, seed) for seed in seeds]
    prepared = description.preparer.prepare("a cat " + PLACEHOLDERS["qwen2_5_vl"] * len(images), images=images)
    return prepared.token_ids, prepared.items


def job(item):
    return item


@pytest.mark.parametrize("kind", FAMILIES)
def test_s2_s3_nothing_lives_asleep_or_after_close(books, open_driver, folders, kind):
    """Every tensor has one owner while the executor is open; asleep the parked weights are all that is left, or
    nothing; after `close` nothing is, and no owner kept anything at any time."""
    driver = open_driver(folders[FAMILIES[kind]], **settings(folders, kind))
    executor = driver.executor
    for keep_weights in (True, False):
        work(driver)
        assert OWNERS[kind] <= set(books.check(executor))
        executor.sleep(keep_weights=keep_weights)
        assert set(books.check(executor)) == ({"parked_weights"} if keep_weights else set())
        assert executor.released.kept == {}
        executor.wake()
    work(driver)
    executor.close()
    assert executor.released.kept == executor.memory().by_owner == {}
    assert books.live() == {}


@pytest.mark.parametrize("kind", ["draft", "pipeline"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_s7_an_open_that_fails_at_any_registration_leaves_nothing(books, config, folders, monkeypatch, kind, when):
    """A draft model that is half there, graphs without their buffers; the errors are kept."""
    own, calls, kept = ResourceStack.own, [], []
    executor = TorchExecutor(folders[FAMILIES[kind]], config(**settings(folders, kind)))

    def failing(number):
        def register(self, owner, holder):
            calls.append(owner)
            if len(calls) == number and when == "before":
                raise RuntimeError("planted")
            own(self, owner, holder)
            if len(calls) == number:
                raise RuntimeError("planted")
            return holder

        return register

    monkeypatch.setattr(ResourceStack, "own", failing(0))
    executor.open()
    executor.close()
    assert set(calls) >= OWNERS[kind]
    for number in range(1, len(calls) + 1):
        calls.clear()
        monkeypatch.setattr(ResourceStack, "own", failing(number))
        with pytest.raises(RuntimeError, match="planted") as error:
            executor.open()
        kept.append(error)
        assert books.live() == {}, f"at {calls[-1]}"
        assert executor.memory().by_owner == {}


def keep_the_draft(executor):
    """Somebody measures how often it is right."""
    return executor._open.draft.network.model.module.lm_head.weight


def keep_a_recorded_step(executor):
    """A profiler keeps the inputs of the last graph."""
    return executor._open.main.network.graphs._logits[:1]


def keep_the_head(executor):
    """A pooling runner refers to the module."""
    return executor._open.main.model.module.classifier


def keep_a_layer(executor):
    """The last stage of a pipeline."""
    return executor._open.main.model.module.model.layers[-1].mlp.down_proj.weight


def keep_an_encoding(executor):
    """A view of its first row."""
    return next(iter(executor._open.outputs._outputs.values()))[:1]


KEPT = {
    "draft": (keep_the_draft, "draft_weights"),
    "graphs": (keep_a_recorded_step, "graphs"),
    "pipeline": (keep_a_layer, "weights"),
    "classifier": (keep_the_head, "weights"),
    "images": (keep_an_encoding, "encoder_outputs"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_s2_s3_what_is_kept_after_close_is_told_with_its_owner(books, open_driver, folders, kind):
    """A module that is kept has been emptied: only who keeps the tensors themselves keeps bytes."""
    driver = open_driver(folders[FAMILIES[kind]], **settings(folders, kind))
    work(driver)
    keep, owner = KEPT[kind]
    kept = [keep(driver.executor)]
    driver.executor.close()
    pinned = isinstance(kept[0], torch.Tensor)
    assert set(driver.executor.released.kept) == ({owner} if pinned else set())
    assert bool(books.live()) is pinned
    kept.clear()
    assert driver.executor.memory().by_owner == {}


def bytes_follow_freeing(driver):
    """Freeing two of three images leaves the storage of one."""
    _, items = asked_about(driver.description, (1, 2, 3))
    driver.executor.encode(tuple(map(job, items)))
    driver.executor.free(tuple(item.key for item in items[:2]))
    left = driver.executor._open.outputs.get(items[2].key).untyped_storage().nbytes()
    return left == items[2].size


@pytest.mark.parametrize("planted", [False, True])
def test_e10_an_image_that_is_a_view_of_its_batch(open_driver, folders, monkeypatch, planted):
    """E10: the encoder gives one tensor for all images of a batch; each is kept in storage of its own."""

    def keep_views(self, outputs):
        whole = torch.cat(list(outputs.values()))
        self._outputs.update(zip(outputs, whole.split([len(one) for one in outputs.values()]), strict=True))

    if planted:
        monkeypatch.setattr(EncoderOutputs, "add", keep_views)
    assert bytes_follow_freeing(open_driver(folders["qwen2_5_vl"])) is not planted

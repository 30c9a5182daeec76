"""Every byte has an owner in what decoders have beside weights and pages: recorded steps, a pooling head, and
images' encodings.

The collector is off: what dies here dies by reference count, seen through weak references to storages (`books`).
"""

from __future__ import annotations

import random

import pytest

from triolet.core.errors import UnsupportedModel
from triolet.models.attention import graphs
from triolet.models.blueprints import blueprint
from triolet.models.executor import TorchExecutor

from ..checkpoints.families import make_checkpoint
from .media import PLACEHOLDERS, picture
from .texts import Job, noise

FAMILIES = {
    "graphs": "gemma2",
    "classifier": "bert_classifier",
    "decoding classifier": "llama_classifier",
    "images": "qwen2_5_vl",
}
OWNERS = {  # beside encoder outputs, which all have
    "graphs": {"weights", "self_kv", "graphs"},
    "classifier": {"weights"},
    "decoding classifier": {"weights", "self_kv"},
    "images": {"weights", "self_kv", "graphs"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    names = {*FAMILIES.values()}
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in sorted(names)}


def settings(kind):
    """What `EngineConfig` needs beside the small sizes."""
    return {"graphs": "eager"} if kind in {"graphs", "images"} else {}


def work(driver):
    """Whatever the model does: texts are sampled or pooled, images are encoded; one encoding is left behind."""
    description, executor = driver.description, driver.executor
    driver.random = random.Random(0)
    prompts = [(noise(length, length), ()) for length in (3, 21)]
    if description.preparer.media:
        prompts = [asked_about(description, seeds) for seeds in ((1, 2), (3,))]
        items = {item.key: item for _, items in prompts for item in items}
        executor.encode(tuple(items.values()))
    pooling = description.default_pooling
    jobs = [
        Job(prompt=prompt, pooling=pooling, placeholders=tuple(item.placeholder for item in items), max_tokens=4)
        for prompt, items in prompts
    ]
    results = driver.run(*jobs)
    if description.preparer.media:
        executor.free(tuple(list(items)[:2]))
    return results


def asked_about(description, seeds):
    images = [picture(40, 60, seed) for seed in seeds]
    prepared = description.preparer.prepare("a cat " + PLACEHOLDERS["qwen2_5_vl"] * len(images), images=images)
    return prepared.token_ids, prepared.items


@pytest.mark.parametrize("kind", FAMILIES)
def test_s2_s3_nothing_lives_asleep_or_after_close(books, open_driver, folders, kind):
    """Every tensor has one owner while the executor is open; asleep the parked weights (on the CPU the very same
    tensors) are all that is left, or nothing; awake it says the same. After `close` nothing lives, and no owner kept
    anything at any time."""
    driver = open_driver(folders[FAMILIES[kind]], **settings(kind))
    executor, opened = driver.executor, books.check(driver.executor)
    first = work(driver)
    for keep_weights in (True, False):
        assert OWNERS[kind] <= set(books.check(executor))
        executor.reset()
        assert books.check(executor) == opened
        pointers = {tensor.data_ptr() for tensor in executor._open.parts.model.tensors()}
        executor.sleep(keep_weights=keep_weights)
        parked = sum(count for owner, count in opened.items() if owner.endswith("weights")) if keep_weights else 0
        assert books.check(executor) == ({"parked_weights": parked} if parked else {})
        assert executor.released.kept == {}
        executor.wake()
        if keep_weights:
            assert {tensor.data_ptr() for tensor in executor._open.parts.model.tensors()} == pointers
        assert work(driver) == first
    executor.close()
    assert executor.released.kept == executor.memory().by_owner == {}
    assert books.live() == {}


@pytest.mark.parametrize("kind", ["graphs", "images"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_s7_an_open_that_fails_at_any_registration_leaves_nothing(registrations, config, folders, kind, when):
    """Graphs without their buffers."""
    executor = TorchExecutor(folders[FAMILIES[kind]], config(**settings(kind)))
    assert set(registrations(executor, "own", when)) >= OWNERS[kind]


@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [
        ("graphs", blueprint, "compare_decoder"),
        ("graphs", graphs.GraphManager, "prove"),
    ],
    ids=str,
)
def test_s7_an_open_that_fails_with_everything_taken_leaves_nothing(
    books, config, folders, monkeypatch, kind, owner, name
):
    """In the comparison, and in the proof of the graphs; the error is kept."""
    executor = TorchExecutor(folders[FAMILIES[kind]], config(**settings(kind)))

    def fail(*args, **kwargs):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises((RuntimeError, UnsupportedModel), match="planted") as kept:
            executor.open()
        assert books.live() == {}, f"{kept.value} keeps tensors"
        assert executor.memory().by_owner == {}
    executor.open()
    executor.close()
    assert books.live() == {}

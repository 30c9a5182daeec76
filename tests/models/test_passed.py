"""A comparison that was passed is not repeated, until something that it depends on changes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from attrs import evolve

from triolet.core.config import EngineConfig
from triolet.core.errors import UnsupportedModel
from triolet.models.blueprints import blueprint, passed
from triolet.models.blueprints.passed import PassedComparisons, comparison_key
from triolet.models.executor import TorchExecutor

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import make_checkpoint


@pytest.fixture(autouse=True)
def every_comparison():
    """But not here."""


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """The checkpoints that were compared."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tried, really = [], blueprint.compare_decoder

    def compare_decoder(network, checkpoint, dtype, native):
        tried.append(checkpoint.folder.name)
        really(network, checkpoint, dtype, native)

    monkeypatch.setattr(blueprint, "compare_decoder", compare_decoder)
    return tried


def opened(folder, **changes):
    executor = TorchExecutor(folder, evolve(EngineConfig(device="cpu", dtype="float32"), **changes))
    executor.open()
    executor.close()


def test_a_checkpoint_is_compared_once(tried, tmp_path):
    folder = make_checkpoint("llama", tmp_path / "llama")
    opened(folder)
    opened(folder)
    assert tried == ["llama"]
    opened(folder, dtype="bfloat16")
    assert tried == ["llama", "llama"]
    other = shutil.copytree(folder, tmp_path / "other")
    opened(other)
    rewrite(other / "config.json", rms_norm_eps=0.1)
    opened(other)
    assert tried == ["llama", "llama", "other"], "the same files elsewhere have passed"


def test_what_was_refused_is_tried_again(tmp_path):
    passed_ones = PassedComparisons(tmp_path / "comparisons")

    def refuse():
        raise UnsupportedModel("it differs")

    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            passed_ones.once("key", refuse)
    called = []
    passed_ones.once("key", lambda: called.append(1))
    passed_ones.once("key", lambda: called.append(2))
    assert called == [1]


def test_what_another_process_passes_meanwhile_is_kept(tmp_path):
    """Two that compare at the same time both note it."""
    ours, theirs, called = PassedComparisons(tmp_path), PassedComparisons(tmp_path), []
    ours.once("one", lambda: theirs.once("two", lambda: called.append("two")))
    for each in (ours, theirs):
        each.once("one", lambda: called.append("one again"))
        each.once("two", lambda: called.append("two again"))
    assert called == ["two"]


def test_the_latest_comparisons_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(passed, "_KEPT", 2)
    passed_ones = PassedComparisons(tmp_path)
    for place, key in enumerate(("one", "two", "three")):
        passed_ones.once(key, lambda: None)
        os.utime(tmp_path / key, (place, place))
    passed_ones.once("four", lambda: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["four", "three"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    called = []
    for _ in range(2):
        PassedComparisons(tmp_path / "file").once("key", lambda: called.append(1))
    assert called == [1, 1]


def test_a_key_is_of_all_that_matters(monkeypatch):
    base = ({"config.json": "a"}, "weights", torch.device("cpu"), torch.float32)
    keys = [
        comparison_key(*base),
        comparison_key({"config.json": "b"}, *base[1:]),
        comparison_key(base[0], "others", *base[2:]),
        comparison_key(*base[:2], torch.device("meta"), base[3]),
        comparison_key(*base[:3], torch.bfloat16),
        comparison_key(*base, "int8"),
    ]
    assert comparison_key(*base) == keys[0]
    monkeypatch.setattr("triolet.models.blueprints.passed.machine_name", lambda: "another machine")
    keys.append(comparison_key(*base))
    monkeypatch.setattr("transformers.__version__", "99")
    keys.append(comparison_key(*base))
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: b"other code")
    passed._sources.cache_clear()
    try:
        keys.append(comparison_key(*base))
    finally:
        passed._sources.cache_clear()
    assert len(set(keys)) == 9

"""Compiled layers: the same tokens, and nothing that outlives the executor.

Here Dynamo takes the layers apart and its backend ``eager`` runs the pieces: all of the way but the generated code,
which takes longest; and without the native library, which computes the decoders that it knows. With
``TRIOLET_TEST_COMPILE=1`` set, the generated code is tested too (half a minute on the CPU, and it needs a C++
compiler).
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from triolet.core.errors import InvalidRequest, UnsupportedModel
from triolet.models.executor import TorchExecutor
from triolet.models.launch import compiled
from triolet.models.launch.compiled import CompiledLayers
from triolet.models.native.library import Library
from triolet.testing.families import make_checkpoint

from .conftest import on_cuda
from .texts import Job, noise

LENGTHS = (1, 5, 23, 40)
ASKED = pytest.mark.skipif(not os.environ.get("TRIOLET_TEST_COMPILE"), reason="TRIOLET_TEST_COMPILE is not set")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_checkpoint("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.fixture
def quickly(monkeypatch):
    """Without generated code."""
    monkeypatch.setattr(compiled.torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture
def start(open_driver, folder, without_native):
    return lambda **changes: open_driver(folder, **changes)


def work(driver):
    jobs = [
        Job(prompt=noise(length, length), joins=3 * index, chunk=(1000, 7)[index % 2], max_tokens=12)
        for index, length in enumerate(LENGTHS)
    ]
    return [result.tokens for result in driver.run(*jobs)]


def own_forwards(executor):
    return [each for each in executor._open.main.model.module.modules() if "forward" in vars(each)]


def check(start, graphs="off", **changes):
    """The tokens of the layers as they are; asleep and closed every storage is dead, without the collector."""
    expected = work(start(**changes))
    driver = start(compile=True, graphs=graphs, **changes)
    executor = driver.executor
    assert work(driver) == expected
    assert own_forwards(executor) == []
    calls = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for keep_weights in (True, False):
        executor.sleep(keep_weights=keep_weights)
        assert executor.released.kept == {}
        executor.wake()
        assert work(driver) == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == calls, "awake, it is compiled again"
    executor.close()
    assert executor.released.kept == {}
    assert executor.memory().by_owner == {}


def test_compiled_layers_give_the_same_tokens(no_collector, start, quickly):
    """In mixed steps and in fixed shapes. `wake` has the code at once."""
    check(start, "eager")


@ASKED
def test_generated_code_gives_the_same_tokens(no_collector, start):
    """Inductor's, on the CPU."""
    check(start)


@on_cuda
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_generated_code_on_cuda_gives_the_same_tokens(no_collector, start, graphs):
    """Alone, and captured in graphs."""
    check(start, graphs, device="cuda")


def test_the_compiled_code_is_what_runs(start, quickly, monkeypatch):
    """In steps; not in the comparison before, which is of the layers as they are."""
    called = []
    crossing = CompiledLayers.crossing
    monkeypatch.setattr(CompiledLayers, "crossing", lambda self: (called.append(self), crossing(self))[1])
    driver = start(compile=True)
    assert len(called) == 4, "mixed rows twice, and one row of each prompt"
    driver.run(Job(prompt=noise(5, 5), max_tokens=3))
    assert len(called) == 4 + 3
    assert driver.executor.memory().by_owner["compiled"] == 0


def test_what_torch_cannot_compile_is_told(folder, config, monkeypatch, books, without_native):
    """With what to do; nothing is left."""

    def broken(function, **options):
        def fail(*args, **kwargs):
            raise TorchDynamoException("no compiler")

        return fail

    monkeypatch.setattr(compiled.torch, "compile", broken)
    executor = TorchExecutor(folder, config(compile=True))
    with pytest.raises(
        InvalidRequest, match=r"torch\.compile fails here: TorchDynamoException: no compiler; use compile="
    ):
        executor.open()
    assert executor.memory().by_owner == {}
    assert books.live() == {}


def test_numbers_that_compilation_changes_are_refused(folder, config, monkeypatch, without_native):
    """The comparison at open is of the compiled layers too."""

    def off(function, **options):
        return lambda *args, **kwargs: function(*args, **kwargs) * 1.5

    monkeypatch.setattr(compiled.torch, "compile", off)
    executor = TorchExecutor(folder, config(compile=True))
    with pytest.raises(UnsupportedModel, match="other numbers"):
        executor.open()


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
def test_what_the_native_library_computes_is_not_compiled(open_driver, folder):
    network = open_driver(folder, compile=True).executor._open.main.network
    assert network.native is not None
    assert network.compiled is None

"""Models with recurrent layers, opened by the executor: the comparison refuses one that is computed wrongly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve

from triolet.core.config import EngineConfig
from triolet.core.errors import UnsupportedModel
from triolet.models.architectures.layer_sizes import RECURRENT
from triolet.models.blueprints.passed import PassedComparisons
from triolet.models.executor import TorchExecutor
from triolet.models.memory.recurrent_states import RecurrentStates
from triolet.models.native.library import Library
from triolet.models.native.program import Program
from triolet.models.native.recipes import FAMILIES
from triolet.models.native.recurrent import DeltaNet, StateSpace
from triolet.models.native.runner import Runner

from ..checkpoints.drawn import draw_model
from ..checkpoints.words import LLAMA

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

CONFIG = EngineConfig(dtype="float32", device="cpu", max_positions=64, page_size=4)
KINDS = ("lfm2", "qwen3_next", "falcon_h1", "mamba2")
Broken = tuple[type, str, Callable[[Any], Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        draw_model(kind).save_pretrained(folder)
        LLAMA.make().save_pretrained(folder)
    return made


def with_recurrence(**changes: Callable[[Any], Any]) -> Broken:
    """Programs whose recurrences have other fields."""

    def broken(recur: Any) -> Any:
        def wrong(self: Program, source: int, to: int, gates: int, one: Any) -> None:
            changed = {name: change(getattr(one, name)) for name, change in changes.items()}
            recur(self, source, to, gates, evolve(one, **changed))

        return wrong

    return Program, "recur", broken


def with_gate(**changes: Callable[[Any], Any]) -> Broken:
    """Programs whose gates have other fields."""

    def broken(gate: Any) -> Any:
        def wrong(self: Program, source: int, to: int, gates: int, one: Any) -> None:
            changed = {name: change(getattr(one, name)) for name, change in changes.items()}
            gate(self, source, to, gates, evolve(one, **changed))

        return wrong

    return Program, "gate", broken


FORGOTTEN: Broken = (RecurrentStates, "of", lambda _: lambda self, _: torch.zeros(self.numbers, dtype=torch.float32))
SHARED: Broken = (RecurrentStates, "of", lambda of: lambda self, _: of(self, 0))
NO_WINDOW: Broken = (Runner, "kept", lambda _: property(lambda _: 0))
OTHER_HEADS = with_recurrence(decay=lambda decay: decay.flip(0))
OTHER_STEPS = with_recurrence(shift=lambda shift: shift.roll(1))
NO_NORM = with_gate(gain=lambda _: None)
NORM_ELSEWHERE = with_gate(norm_first=lambda first: not first)
ONE_KEY: Broken = (DeltaNet, "order", lambda _: property(lambda _: None))
NO_FACTORS: Broken = (StateSpace, "_factors", lambda _: lambda _: [1.0] * 5)


def test_the_library_knows_the_layers_of_each_model_type() -> None:
    assert {kind for kind, (_, recipe) in FAMILIES.items() if recipe.recurrent} == RECURRENT


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        *((kind, broken) for kind in KINDS for broken in (FORGOTTEN, SHARED, NO_WINDOW)),
        *((kind, OTHER_HEADS) for kind in ("qwen3_next", "falcon_h1", "mamba2")),
        ("mamba2", OTHER_STEPS),
        ("falcon_h1", NO_FACTORS),
        ("qwen3_next", NORM_ELSEWHERE),
        ("mamba2", NO_NORM),
        ("qwen3_next", ONE_KEY),
    ],
)
def test_the_comparison_refuses_a_wrong_state_cut_or_head(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, broken: Broken
) -> None:
    owner, name, change = broken
    monkeypatch.setattr(PassedComparisons, "has", lambda *_: False)
    monkeypatch.setattr(owner, name, change(vars(owner)[name]))
    executor = TorchExecutor(folders[kind], CONFIG)
    wrong = "computes other numbers by the native library than by transformers|cannot be computed by the native library"
    with pytest.raises(UnsupportedModel, match=wrong):  # the library itself refuses a state that two chunks change
        executor.open()
    executor.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_comparison_is_passed_by_what_is_right(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(PassedComparisons, "has", lambda *_: False)
    for config in (CONFIG, evolve(CONFIG, quantization="int8"), evolve(CONFIG, dtype="bfloat16")):
        executor = TorchExecutor(folders[kind], config)
        executor.open()
        executor.close()


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_an_engine_that_opens_does_not_advise_packages_that_it_does_not_use(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Transformers warns once in a process that its own functions are slow, which only the comparison calls."""
    monkeypatch.setattr(PassedComparisons, "has", lambda *_: False)
    library, told = transformers.utils.logging, list[logging.LogRecord]()
    own, handler = library.get_verbosity(), logging.Handler()
    monkeypatch.setattr(handler, "emit", told.append)
    library.set_verbosity_warning()
    library.add_handler(handler)
    library.warning_once.cache_clear()
    try:
        executor = TorchExecutor(folders[kind], CONFIG)
        executor.open()
        executor.close()
        assert library.get_verbosity() == library.WARNING
    finally:
        library.remove_handler(handler)
        library.set_verbosity(own)
    assert not told


@pytest.mark.parametrize(
    ("change", "told"),
    [({"dtype": "float16"}, "it computes in float16; known: float32 and bfloat16"), ({}, "without a compiler")],
)
def test_a_model_that_the_library_does_not_compute_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], told: str
) -> None:
    if not change:
        monkeypatch.setattr(Library, "load", classmethod(lambda _: None))
    executor = TorchExecutor(folders["lfm2"], evolve(CONFIG, **change))
    with pytest.raises(UnsupportedModel, match=f"has recurrent layers, which only the native library .*{told}"):
        executor.open()
    executor.close()

"""Loads take turns, and what they make is what transformers makes, without what it does to the process meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from triolet import EngineClosed, EngineConfig
from triolet.models.blueprints.read import read_blueprint
from triolet.models.checkpoints import loading
from triolet.models.checkpoints.turns import Turns, private

from ..checkpoints.families import FAMILIES, make_checkpoint
from .test_defaults import default_dtype

NET = 300
SOME = ("smollm2", "granite_speech5", "bart")

OTHERS = [pytest.param(one, marks=pytest.mark.thorough) for one in FAMILIES if one not in SOME]


def tensors(module: Any) -> dict[str, torch.Tensor]:
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: one.detach() for name, one in found}


def ties(module: Any) -> list[set[str]]:
    found = dict(module.named_parameters(remove_duplicate=False))
    return [{other for other in found if found[other] is one} for one in found.values()]


@pytest.mark.parametrize("family", [*SOME, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ambient", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_module_is_bit_for_bit_that_of_transformers(
    family: str, ambient: torch.dtype, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers and ties; and the random state of the process stays."""
    folder, made = make_checkpoint(family, tmp_path), list[Any]()
    load_private = loading._load_private

    def load(*args: Any, **options: Any) -> Any:
        module, told = load_private(*args, **options)
        copies = {name: one.clone() for name, one in tensors(module).items()}  # before they are packed
        made.append((type(module), told, copies, ties(module), not options["left_out"]))
        return module, told

    blueprint = read_blueprint(folder, EngineConfig(dtype=str(dtype).removeprefix("torch."), device="cpu"))
    before = torch.get_rng_state()
    with default_dtype(ambient):
        monkeypatch.setattr(loading, "_load_private", load)
        blueprint.read()
    assert torch.equal(torch.get_rng_state(), before)
    ((model, told, ours, tied, is_whole),) = made
    theirs, expected = model.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    genuine = tensors(theirs)
    for name, one in ours.items():
        assert one.dtype == genuine[name].dtype, name
        assert torch.equal(one.nan_to_num(), genuine[name].nan_to_num()), name
    if is_whole:
        assert ours.keys() == genuine.keys()
        assert tied == ties(theirs)
        assert set(told["missing_keys"]) == set(expected["missing_keys"])


def test_another_version_of_transformers_that_makes_modules_in_another_way_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would change the process again."""
    folder = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(
        loading,
        "private",
        lambda made: type(made.__name__, (made,), {**vars(private(made)), "get_init_context": made.get_init_context}),
    )
    with pytest.raises(AssertionError, match="get_init_context"):
        loading.load_module("LlamaForCausalLM", folder, torch.float32)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.real_time
def test_turns_are_taken_in_the_order_of_asking_and_may_be_entered_again(threads: ThreadPoolExecutor) -> None:
    turns, order, go = Turns(), [], threading.Event()

    def load(number: int) -> None:
        with turns.turn(), turns.turn():
            order.append(number)
            assert go.wait(NET)

    loads = []
    for number in range(6):
        loads.append(threads.submit(load, number))
        while len(turns._queue) <= number:
            pass
    go.set()
    for one in loads:
        one.result(NET)
    assert order == list(range(6))
    assert not turns._queue


@pytest.mark.real_time
def test_a_load_that_is_given_up_while_it_waits_ends_and_the_others_go_on(threads: ThreadPoolExecutor) -> None:
    turns, go, given_up = Turns(), threading.Event(), threading.Event()

    def load(is_given_up: Any = bool) -> None:
        with turns.loading(is_given_up), turns.turn():
            assert go.wait(NET)

    loads = []
    for number, arguments in enumerate([(), (given_up.is_set,), ()], 1):
        loads.append(threads.submit(load, *arguments))
        while len(turns._queue) < number:
            pass
    given_up.set()
    turns.look_again()
    with pytest.raises(EngineClosed, match="waited for other loads"):
        loads[1].result(NET)
    assert len(turns._queue) == 2
    go.set()
    loads[0].result(NET)
    loads[2].result(NET)
    assert not turns._queue


def test_the_log_of_the_program_is_restored_unless_it_has_changed_it() -> None:
    """The progress bars of huggingface_hub stay as they are."""
    library: Any = transformers.utils.logging
    found, turns = library.get_verbosity(), Turns()
    try:
        library.set_verbosity_info()
        with turns.quiet():
            assert library.get_verbosity() == library.ERROR
            library.set_verbosity_debug()
        assert library.get_verbosity() == library.DEBUG
    finally:
        library.set_verbosity(found)

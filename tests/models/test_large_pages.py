"""The weights of a module in memory of large pages: the same numbers, shared as before, each byte counted once."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from triolet.models.memory import module as room
from triolet.models.memory.allocator import large_empty
from triolet.models.memory.module import TransformerModel
from triolet.models.native.library import Library


def made(seed: int) -> nn.Module:
    """A module of matrices of several sizes and dtypes: one in two places, one that is not contiguous, one of no parts,
    one that is neither parameter nor buffer, and those of an LSTM, which lists its parameters once more."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = nn.Sequential(*(nn.Linear(draw.randrange(1, 200), draw.randrange(1, 200)) for _ in range(6)))
    module.add_module("twice", nn.Linear(1, 1))
    module.twice.weight = module[0].weight
    module.register_buffer("packed", torch.randint(0, 255, (draw.randrange(1, 90), 3, 1_152), dtype=torch.uint8))
    module.register_buffer("turned", torch.rand(70, 90).T)
    module.register_buffer("empty", torch.empty(0))
    module.add_module("recurrent", nn.LSTM(30, 40))
    module.plain = torch.rand(60, 70, dtype=torch.float64)
    return module


@pytest.mark.parametrize("chunk", [1, 50_000, 1 << 30])
@pytest.mark.parametrize("seed", range(4))
def test_gathered_weights_are_the_same_and_are_held_once(
    monkeypatch: pytest.MonkeyPatch, seed: int, chunk: int
) -> None:
    monkeypatch.setattr(room, "_CHUNK", chunk)
    model = TransformerModel(made(seed))
    before = [(one.detach().clone(), type(one)) for one in model.tensors()]
    old = [StorageWeakRef(one.untyped_storage()) for one in model.tensors() if one.nbytes >= room._LEAST]
    model.gather()
    after = model.tensors()
    assert all(one.expired() for one in old), "a matrix is held twice"
    for (wanted, kind), found in zip(before, after, strict=True):
        assert torch.equal(wanted, found)
        assert (wanted.dtype, kind) == (found.dtype, type(found))
    assert model.module.twice.weight is model.module[0].weight
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in after}
    least = sum({id(one): one.nbytes for one in after}.values())
    assert least <= sum(storages.values()) < least + 64 * len(after)


@pytest.mark.parametrize("shape", [(9, 3, 1_152), (31_104,)], ids=["int8", "blocks"])
def test_what_is_packed_in_large_pages_is_not_moved(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """It would be held twice, and it is most of a small model."""
    model = TransformerModel(made(0))
    monkeypatch.setattr(room, "ROOMY", 31_104)
    model.module.packed = torch.zeros(shape, dtype=torch.uint8)
    before = model.module.packed.data_ptr()
    model.gather()
    assert model.module.packed.data_ptr() == before


@pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")
@pytest.mark.parametrize("family", ["whisper", "llama"])
def test_the_matrices_of_an_opened_model_lie_side_by_side(
    open_driver: Callable[..., Any], folder: Callable[[str], Path], checkpoint: Path, family: str
) -> None:
    """Whisper's are read by names, those of others by transformers."""
    model = open_driver(checkpoint if family == "whisper" else folder(family)).executor._open.parts.model
    matrices = [one for one in model.tensors() if one.nbytes >= room._LEAST]
    assert len({id(one) for one in matrices}) > 2
    assert len({one.untyped_storage()._cdata for one in matrices}) == 1


def test_a_released_model_keeps_no_chunk() -> None:
    model = TransformerModel(made(0))
    model.gather()
    module = model.module  # as in a cycle, which lives on until a collection
    chunk = StorageWeakRef(module.packed.untyped_storage())
    model.release()
    assert chunk.expired()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages to ask for")
def test_large_memory_asks_for_large_pages() -> None:
    """The flag `hg` of its mapping (proc(5), VmFlags); a kernel may be built without them."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no large pages")
    memory = large_empty((64 << 20,), torch.uint8)
    inside, mapping = memory.data_ptr() + len(memory) // 2, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (bounds := line.split()[0]) and not line.endswith("kB"):
            start, end = (int(one, 16) for one in bounds.split("-"))
            mapping = line if start <= inside < end else ""
        if mapping and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the memory has no mapping")

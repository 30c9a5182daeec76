"""Parts of a checkpoint that are left out: their weights are not read, and nothing of them is held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from triolet.core.model import ModelDescription
from triolet.models.architectures.families import _families
from triolet.models.checkpoints.files import find_weights
from triolet.models.checkpoints.parts import leaving_out
from triolet.models.checkpoints.stored import StoredTensor, stored_tensors
from triolet.models.executor import TorchExecutor

from .texts import SMALL

LEFT_OUT = {name: family.left_out for name, family in _families().items() if family.left_out}
Opens = Callable[..., tuple[TorchExecutor, ModelDescription]]
Folder = Callable[[str], Path]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_weights_of_what_is_left_out_are_not_read(
    name: str, opens: Opens, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, read, pieces = LEFT_OUT[name], list[str](), StoredTensor.pieces
    stored = [key for path in find_weights(folder(name)) for key in stored_tensors(path)]
    monkeypatch.setattr(StoredTensor, "pieces", lambda one: (read.append(one.name), pieces(one))[1])
    executor, _ = opens(folder(name), SMALL)
    assert any(key.startswith(part) for key in stored)
    assert read
    assert not [key for key in read if key.startswith(part)]
    assert not [key for key, _ in executor._open.parts.model.module.named_modules() if key == part]


def test_transformers_takes_what_leaves_a_part_out_for_its_own() -> None:
    """Else it would not rename the weights of older checkpoints."""
    made = leaving_out(transformers.LlavaForConditionalGeneration, "model.vision_tower")
    assert not made.is_custom_code()
    assert made.__name__ == "LlavaForConditionalGeneration"

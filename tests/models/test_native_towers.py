"""Encoders of images and audio within language models, by the native library: an item's numbers are transformers', and
the same bits alone and beside others."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from torch import Tensor
from transformers.models.clip.modeling_clip import CLIPMLP

from triolet.core.errors import UnsupportedModel
from triolet.models.native.library import Library
from triolet.models.native.towers import MODEL_TYPES, Tower, known_tower

from .conftest import small_config
from .media import Checkpoint

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

Opened = Callable[[str], Checkpoint]


def known(module: Any) -> Tower:
    tower = known_tower(module)
    assert not isinstance(tower, str), tower
    return tower


def packed(module: Any, *, int8: bool = False) -> Any:
    made = copy.deepcopy(module)
    known(made).pack(int8=int8)
    return made


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def encoded(checkpoint: Checkpoint, module: Any, payload: Any) -> Tensor:
    (rows,) = checkpoint.family.encode(module, [payload])
    return rows


@pytest.mark.parametrize("name", sorted(MODEL_TYPES))
def test_numbers_are_those_of_transformers(name: str, opened: Opened) -> None:
    """Of items of several sizes, with the last window filled up and the last window of an image cut off."""
    checkpoint = opened({"gemma3": "gemma3_vision"}.get(name, name))
    exact, rounded = packed(checkpoint.module), packed(checkpoint.module, int8=True)
    for item in checkpoint.items(0, 1, 2):
        payload = checkpoint.prepare(checkpoint.placeholder, [item]).items[0].payload
        expected = encoded(checkpoint, checkpoint.module, payload)
        assert off(encoded(checkpoint, exact, payload), expected) < 1e-5  # transformers, with packed matrices
        with known(exact).computed():
            assert off(encoded(checkpoint, exact, payload), expected) < 1e-5
        with known(rounded).computed():
            assert 1e-5 < off(encoded(checkpoint, rounded, payload), expected) < 0.06


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm", "qwen2_audio", "qwen3_asr"])
def test_an_engine_encodes_items_together_as_alone(
    opens: Any, folder: Any, opened: Opened, name: str, quantization: str | None
) -> None:
    executor, description = opens(folder(name), small_config(quantization=quantization))
    checkpoint = opened(name)
    media = "audio" if checkpoint.preparer.medium == "audio" else "images"
    prompt = checkpoint.placeholder * 3
    jobs = description.preparer.prepare(prompt, **{media: checkpoint.items(2, 0, 1)}).items
    executor.encode(jobs)
    for job in jobs:
        found = executor._open.outputs.get(job.key)
        executor.encode((evolve(job, key="alone"),))
        assert torch.equal(found, executor._open.outputs.get("alone"))
        least, most = (0.0, 1e-5) if quantization is None else (1e-5, 0.06)
        assert least <= off(found, encoded(checkpoint, checkpoint.module, job.payload)) < most
        executor.free(("alone",))


def test_a_tower_is_computed_where_the_decoder_is_unknown(changed: Any, opens: Any, opened: Opened) -> None:
    text = opened("llava").config.to_dict()["text_config"]
    path = changed("llava", text_config={**text, "hidden_act": "mish"})
    executor, _ = opens(path, small_config(quantization="int8"))
    module = executor._open.parts.model.module
    assert executor._open.parts.network.native is None
    assert known(module).packed
    assert module.model.language_model.layers[0].mlp.up_proj.weight.dtype == torch.int8


def test_a_model_whose_tower_is_computed_otherwise_is_refused(
    opens: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of transformers, whose layers do something else."""
    monkeypatch.setattr(CLIPMLP, "forward", lambda self, rows: self.fc2(self.activation_fn(self.fc1(rows)) + 0.1))
    with pytest.raises(UnsupportedModel, match="other numbers by the native library"):
        opens(folder("llava"), small_config())


VISION = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARES = {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, **VISION}
TEXT = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 32) | {"model_type": "llama"}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llava(vision: dict[str, Any], **changes: Any) -> Any:
    config = transformers.LlavaConfig(text_config=TEXT, vision_config={**SQUARES, **vision}, **changes)
    return transformers.LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("read", [-1, 1])
@pytest.mark.parametrize("kind", ["clip_vision_model", "siglip_vision_model"])
def test_a_language_model_reads_the_layer_that_it_names(kind: str, read: int) -> None:
    torch.manual_seed(read)
    module = llava({"model_type": kind, "vision_use_head": False}, vision_feature_layer=read)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, tower = torch.cat(module.model.get_image_features(pixels).pooler_output), known(module)
        tower.pack()
        with tower.computed():
            found = torch.cat(module.model.get_image_features(pixels).pooler_output)
    assert off(found, expected) < 1e-5


def test_gates_need_not_fill_whole_panels() -> None:
    """As in Qwen2.5-VL, with 3,420 of them. Images that nobody encodes in one call attend to their own windows."""
    torch.manual_seed(2)
    vision = {"hidden_size": 32, "intermediate_size": 44, "depth": 3, "num_heads": 2, "patch_size": 4}
    vision |= {"window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 32}
    text = {**TEXT, "model_type": "qwen2_5_vl_text", "num_key_value_heads": 2}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    module = transformers.Qwen2_5_VLModel(config).eval()
    pixels, grid = torch.randn(14 * 10, 96), torch.tensor([[1, 14, 10]])
    with torch.no_grad():
        for parameter in module.visual.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
        expected, tower = module.visual(pixels, grid).pooler_output, known(module)
        tower.pack()
        assert off(module.visual(pixels, grid).pooler_output, expected) < 1e-5
        with tower.computed():
            assert off(module.visual(pixels, grid).pooler_output, expected) < 1e-5


@pytest.mark.parametrize(
    ("vision", "changes", "why"),
    [
        ({"hidden_size": 40}, {}, "the width of its encoder is 40; known: multiples of 16"),
        ({"hidden_act": "mish"}, {}, "the activation of its encoder is mish; known: silu"),
        ({}, {"vision_feature_layer": [1, 2]}, "its language model reads the layers .* of its encoder; known: one"),
        ({"model_type": "dinov2"}, {}, "the layers of its encoder are none; known: CLIPEncoderLayer"),
    ],
)
def test_what_the_library_does_not_know_is_told(vision: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    told = known_tower(llava(vision, **changes))
    assert isinstance(told, str)
    assert re.match(why, told)

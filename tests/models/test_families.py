"""Families against transformers: what is encoded and placed by hand gives what the model's own forward gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.request import Placeholder
from triolet.models.architectures.families import find_family
from triolet.models.checkpoints.loading import load_part
from triolet.models.checkpoints.turns import Turns

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.families import FAMILIES, make_checkpoint
from ..checkpoints.frame_families import FRAME_MAKERS
from ..checkpoints.speech_families import SPEECH_MAKERS
from .media import PLACEHOLDERS, Checkpoint, make_preparer

MULTIMODAL = tuple(PLACEHOLDERS)
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
Opened = Callable[[str], Checkpoint]


@pytest.fixture(params=MULTIMODAL)
def checkpoint(request: pytest.FixtureRequest, opened: Opened) -> Checkpoint:
    return opened(request.param)


def two_items(checkpoint: Checkpoint) -> tuple[str, list[Any]]:
    """A prompt with two items of different sizes, and text around and between."""
    mark = checkpoint.placeholder
    return f"here is {mark} one, and\n\nthere {mark} the other:", checkpoint.items(0, 1)


def test_encodings_are_as_large_as_promised_and_stand_in_storage_of_their_own(checkpoint: Checkpoint) -> None:
    prompt, items = two_items(checkpoint)
    prepared = checkpoint.prepare(prompt, items)
    encoded = checkpoint.family.encode(checkpoint.module, [item.payload for item in prepared.items])
    for item, embeddings in zip(prepared.items, encoded, strict=True):
        assert len(embeddings) == item.embeddings
        assert not embeddings.requires_grad
        assert embeddings.is_contiguous()
        assert embeddings.untyped_storage().nbytes() == item.size == embeddings.nbytes
    assert encoded[0].untyped_storage().data_ptr() != encoded[1].untyped_storage().data_ptr()


def test_an_item_is_encoded_alike_alone_and_among_others(checkpoint: Checkpoint) -> None:
    prompt, items = two_items(checkpoint)
    payloads = [item.payload for item in checkpoint.prepare(prompt, items).items]
    together = checkpoint.family.encode(checkpoint.module, payloads)
    for payload, embeddings in zip(payloads, together, strict=True):
        (alone,) = checkpoint.family.encode(checkpoint.module, [payload])
        torch.testing.assert_close(alone, embeddings, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("encoder", "strategy", "embeddings"),
    [("clip_vision_model", "full", 17), ("siglip_vision_model", "full", 16), ("siglip_vision_model", "default", 15)],
)
def test_llava_counts_the_embeddings_of_its_encoder(
    encoder: str, strategy: str, embeddings: int, opened: Opened
) -> None:
    """CLIP has one for the whole image before the patches', SigLIP has none; the default strategy drops the first."""
    checkpoint = opened("llava")
    vision = {**checkpoint.config.vision_config.to_dict(), "model_type": encoder}
    config = transformers.LlavaConfig(
        text_config=checkpoint.config.text_config.to_dict(),
        vision_config=vision,
        image_token_index=checkpoint.config.image_token_id,
        vision_feature_select_strategy=strategy,
    )
    preparer = make_preparer(checkpoint.folder, checkpoint.family, config, checkpoint.tokenizer)
    (item,) = preparer.prepare("<image>", images=checkpoint.items(0)).items
    module = transformers.LlavaForConditionalGeneration(config).eval()
    (encoded,) = checkpoint.family.encode(module, [item.payload])
    assert len(encoded) == item.embeddings == embeddings


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_tile_that_transformers_takes_for_padding_fails_its_batch_and_shifts_nobodys_embeddings(
    name: str, opened: Opened
) -> None:
    """Pixels that are all exactly zero, which a processor that does not normalize makes of black."""
    checkpoint = opened(name)
    one, other = (item.payload for item in checkpoint.prepare("<image><image>", checkpoint.items(0, 0)).items)
    blank = {**one, "pixel_values": one["pixel_values"].clone()}
    blank["pixel_values"][0] = 0.0
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        checkpoint.family.encode(checkpoint.module, [blank, other])


def test_the_fine_route_of_a_page_has_four_times_as_many_embeddings(tmp_path: Path) -> None:
    """The settings of Granite for Docling's image processor choose the route."""
    folder = make_checkpoint("granite_docling", tmp_path)
    rewrite(folder / "preprocessor_config.json", fine_route=True)
    checkpoint = Checkpoint.open("granite_docling", folder)
    prompt, items = two_items(checkpoint)
    prepared = checkpoint.prepare(prompt, items)
    assert prepared.token_ids == tuple(checkpoint.process(prompt, items)["input_ids"][0].tolist())
    encoded = checkpoint.family.encode(checkpoint.module, [item.payload for item in prepared.items])
    assert list(map(len, encoded)) == [item.embeddings for item in prepared.items] == [5 * 16, 3 * 16]


def test_half_precision_weights_encode_in_half_precision(checkpoint: Checkpoint) -> None:
    module = checkpoint.family.load(checkpoint.folder, torch.bfloat16)
    preparer = make_preparer(
        checkpoint.folder, checkpoint.family, checkpoint.config, checkpoint.tokenizer, dtype=torch.bfloat16
    )
    medium = next(iter(preparer.media))
    given = {"image": "images", "audio": "audio"}[medium]
    (item,) = preparer.prepare(checkpoint.placeholder, **{given: checkpoint.items(0)}).items
    (embeddings,) = checkpoint.family.encode(module, [item.payload])
    assert embeddings.dtype == torch.bfloat16
    assert embeddings.nbytes == item.size
    assert embeddings.isfinite().all()


@pytest.mark.parametrize("name", MROPE)
def test_positions_are_transformers_own(name: str, opened: Opened) -> None:
    checkpoint = opened(name)
    prompt, items = two_items(checkpoint)
    inputs = checkpoint.process(prompt, items)
    expected, delta = checkpoint.module.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    prepared = checkpoint.prepare(prompt, items)
    placeholders = [item.placeholder for item in prepared.items]
    positions, ahead = checkpoint.family.positions(checkpoint.module, prepared.token_ids, placeholders)
    assert torch.equal(positions, expected[:, 0])
    assert ahead == delta.item() < 0
    longer, same = checkpoint.family.positions(checkpoint.module, [*prepared.token_ids, 1, 2], placeholders)
    assert same == ahead
    assert longer[:, -1].tolist() == [len(prepared.token_ids) + 1 + ahead] * 3


@pytest.mark.parametrize("name", MROPE)
def test_two_images_side_by_side_count_apart(name: str, opened: Opened) -> None:
    checkpoint = opened(name)
    grid = (1, 4, 8)  # in patches: 2 by 4 embeddings
    placeholders = [Placeholder(key="b", spans=((9, 17),), grid=grid), Placeholder(key="a", spans=((1, 9),), grid=grid)]
    positions, ahead = checkpoint.family.positions(checkpoint.module, range(18), placeholders)
    assert positions[1].tolist() == [0, *[1] * 4, *[2] * 4, *[5] * 4, *[6] * 4, 9]
    assert positions[2].tolist() == [0, *[1, 2, 3, 4] * 2, *[5, 6, 7, 8] * 2, 9]
    assert ahead == 10 - 18


# -- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llava", "qwen2_audio"])
def test_a_missing_weight_is_told_by_name_and_not_drawn_at_random(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(name, tmp_path)
    weights = load_file(folder / "model.safetensors")
    gone = next(key for key in weights if "projector" in key and key.endswith("weight"))
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 weights that its configuration asks for: .*projector.*weight"):
        load(folder)


def test_an_error_of_a_transformers_that_was_not_tried_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with pytest.raises(CheckpointError, match=r"again, or install transformers 5\.23: 5\.99\.0 was not tried"):
        load_part("AutoImageProcessor", tmp_path)


def test_two_loads_at_once_leave_transformers_as_it_was() -> None:
    """Several engines open in one process: its settings are as they were when the last of them has loaded."""
    logging: Any = transformers.utils.logging
    found = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        turns = Turns()
        first, second = turns.quiet(), turns.quiet()
        first.__enter__()
        second.__enter__()
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.ERROR, False)
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(found[0])
        (logging.enable_progress_bar if found[1] else logging.disable_progress_bar)()


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("llava", tmp_path)
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if "projector" in key and key.endswith("bias"))
    weights[name] = weights[name][:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight .*projector.*bias' of .* has shape .*; its configuration"):
        load(folder)


def load(folder: Path) -> None:
    family = find_family(AutoConfig.from_pretrained(folder))
    assert family is not None
    family.load(folder, torch.float32)


def test_an_encoder_that_llava_is_not_known_to_have_is_refused(opened: Opened, tmp_path: Path) -> None:
    config = transformers.LlavaConfig(vision_config={"model_type": "pixtral"}, text_config={"model_type": "llama"})
    family = find_family(config)
    assert family is not None
    with pytest.raises(UnsupportedModel, match="pixtral encoder; allowed: clip_vision_model, siglip_vision_model"):
        make_preparer(opened("llava").folder, family, config, opened("llava").tokenizer)
    other = transformers.LlavaNextConfig(vision_config={"model_type": "siglip_vision_model"})
    with pytest.raises(
        UnsupportedModel, match="siglip_vision_model encoder and vision_feature_select_strategy='default'"
    ):
        make_preparer(opened("llava").folder, find_family(other), other, opened("llava").tokenizer)


def test_an_image_processor_that_is_not_there_is_told(opened: Opened, tmp_path: Path) -> None:
    checkpoint = opened("llava")
    with pytest.raises(CheckpointError, match="AutoImageProcessor cannot be made from"):
        make_preparer(tmp_path, checkpoint.family, checkpoint.config, checkpoint.tokenizer)


def test_a_tokenizer_without_the_placeholder_is_told(opened: Opened) -> None:
    checkpoint = opened("llava")
    other = opened("qwen2_audio").tokenizer
    config = transformers.LlavaConfig(image_token_index=9999)
    with pytest.raises(CheckpointError, match="9999 for the placeholder of an item, but the tokenizer does not find"):
        make_preparer(checkpoint.folder, checkpoint.family, config, other)


# -- which family ----------------------------------------------------------------------------------------------------


def test_text_alone_has_no_family(folder: Callable[[str], Path]) -> None:
    for name in set(FAMILIES) - {*MULTIMODAL, *SPEECH_MAKERS, *FRAME_MAKERS}:
        assert find_family(AutoConfig.from_pretrained(folder(name))) is None


# -- the tiny checkpoints --------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    one, same, other = (make_checkpoint("llama", tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [load_file(folder / "model.safetensors") for folder in (one, same, other)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"family='gpt5'; allowed: llama, "):
        make_checkpoint("gpt5", tmp_path)

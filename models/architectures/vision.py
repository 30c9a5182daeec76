"""The families that read images: Qwen-VL, LLaVA, Idefics3 and SmolVLM.

The checkpoint's own image processor turns images into pixel values. Its PIL form is used, so that the values do not
depend on other installed packages. The encoder and projector that transformers has for the checkpoint turn pixel values
into embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from PIL import Image
from torch import Tensor, nn

from ...core.errors import InvalidRequest, UnsupportedModel
from ...core.request import Placeholder
from ..checkpoints.loading import apart, place_of
from .family import Family
from .prompts import ReadItem

CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # by the type of encoder that LLaVA has


@frozen
class QwenVision(Family):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL (Wang et al. 2024; Bai et al. 2025), PaddleOCR-VL (Cui et al. 2025), GLM-V
    (GLM-V Team 2025) and GLM-OCR: images of any size, positions in three axes.
    """

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes all payloads in one batch: the patches of images of any size follow each other."""
        pixels = torch.cat([payload["pixel_values"] for payload in payloads])
        grids = torch.stack([payload["image_grid_thw"] for payload in payloads])
        found = _features(module, pixels, grids)
        parts = zip(found.pooler_output, *getattr(found, "deepstack_features", ()), strict=True)
        return [torch.cat(of_image, 1) for of_image in parts]

    def positions(
        self, module: nn.Module, token_ids: Sequence[int], placeholders: Sequence[Placeholder]
    ) -> tuple[Tensor, int]:
        """Returns positions in three dimensions. In text, all three count up. In an image, rows and columns count from
        the position where the image begins. The text after an image continues after the longer side of the image."""
        config: Any = module.config
        merge = config.vision_config.spatial_merge_size
        parts, index, position = [], 0, 0
        for placeholder in sorted(placeholders, key=lambda placeholder: placeholder.start):
            parts.append(_straight(position, placeholder.start - index))
            position += placeholder.start - index
            frames, height, width = placeholder.grid
            height, width = height // merge, width // merge
            parts.append(position + _cells(frames, height, width))
            position += max(height, width)
            index = placeholder.stop
        parts.append(_straight(position, len(token_ids) - index))
        return torch.cat(parts, dim=1), position - index

    def unread(self, config: Any) -> tuple[int, ...]:
        return (config.video_token_id,)

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:
        names = "vision" if hasattr(config, "vision_start_token_id") else "image"
        ends = (getattr(config, f"{names}_{end}_token_id") for end in ("start", "end"))
        begin, end = (text or "" for text in map(tokenizer.convert_ids_to_tokens, ends))
        return begin, end

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:  # noqa: ARG002
        """Reads as many patches as the image needs. A square of ``merge_size`` by ``merge_size`` patches becomes one
        embedding.
        """
        outputs = process(processor, item)
        grid = outputs["image_grid_thw"][0]
        embeddings = int(grid.prod()) // processor.merge_size**2
        return ReadItem(
            payload={"pixel_values": outputs["pixel_values"], "image_grid_thw": grid},
            text=token * embeddings,
            embeddings=embeddings,
            grid=tuple(grid.tolist()),
        )


@frozen
class Llava(Family):
    """LLaVA (Liu et al. 2023): every image becomes one square and has the same number of embeddings."""

    architecture: str = "LlavaForConditionalGeneration"

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes all payloads in one batch, since all images have the same size."""
        pixels = torch.stack([payload["pixel_values"] for payload in payloads])
        return apart(_features(module, pixels).pooler_output)

    def processor(self, folder: Path, config: Any) -> Any:
        kind = config.vision_config.model_type
        if kind not in CLASS_TOKENS:
            raise UnsupportedModel(f"the LLaVA checkpoint has a {kind} encoder; allowed: {', '.join(CLASS_TOKENS)}")
        return super().processor(folder, config)

    def around(self, tokenizer: Any, config: Any) -> tuple[str, str]:  # noqa: ARG002
        return "", "\n"

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        """Reads one square of patches; the encoder may put embeddings of its own before them."""
        pixels, vision = process(processor, item)["pixel_values"][0], config.vision_config
        extra = CLASS_TOKENS[vision.model_type] - (config.vision_feature_select_strategy == "default")
        height, width = pixels.shape[-2:]
        embeddings = (height // vision.patch_size) * (width // vision.patch_size) + extra
        return ReadItem(payload={"pixel_values": pixels}, text=token * embeddings, embeddings=embeddings)


@frozen
class Gemma3(Family):
    """Gemma 3 (Gemma Team 2025): every image becomes one square, and its embeddings see each other. The token that
    begins an image stands for it in a prompt."""

    architecture: str = "Gemma3ForConditionalGeneration"
    mutual: bool = True

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes all payloads in one batch, since all images have the same size."""
        return apart(_features(module, torch.stack([payload["pixel_values"] for payload in payloads])).pooler_output)

    def together(self, folder: Path, config: Any) -> int:  # noqa: ARG002
        return int(config.mm_tokens_per_image)

    def placeholder(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        return int(config.boi_token_index)

    def embedded(self, tokenizer: Any, config: Any) -> int:  # noqa: ARG002
        return int(config.image_token_id)

    def unread(self, config: Any) -> tuple[int, ...]:
        return (config.image_token_id,)

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        """Reads one square, and no crops of it, as transformers does unless it is asked to."""
        pixels, count = process(processor, item, do_pan_and_scan=False)["pixel_values"][0], config.mm_tokens_per_image
        text = f"\n\n<start_of_image>{token * count}<end_of_image>\n\n"
        return ReadItem(payload={"pixel_values": pixels}, text=text, embeddings=count)


@frozen
class Tiled(Family):
    """Idefics3 and SmolVLM (Laurençon et al. 2024; Marafioti et al. 2025): an image is cut into square tiles, and the
    whole image is one more tile. Each tile has its own span in the prompt."""

    language: str = "model.text_model"

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encodes the tiles of all images in one batch."""
        pixels = torch.cat([payload["pixel_values"] for payload in payloads])
        masks = torch.cat([payload["pixel_attention_mask"] for payload in payloads])
        (rows,) = _features(module, pixels[None], masks[None]).pooler_output  # as if one prompt had all the tiles
        config: Any = module.config
        embeddings = _cells_of(pixels, config)
        return apart(torch.split(rows, [len(payload["pixel_values"]) * embeddings for payload in payloads]))

    def read(self, processor: Any, config: Any, token: str, item: Any) -> ReadItem:
        """Reads rows and columns of tiles, then the whole image; the text in the prompt names the place of each
        tile."""
        outputs = process(processor, item, return_row_col_info=True)
        pixels = outputs["pixel_values"][0]
        tiles, embeddings = len(pixels), _cells_of(pixels, config)
        mask = outputs.get("pixel_attention_mask")
        shown = torch.ones_like(pixels[:, 0], dtype=torch.bool) if mask is None else mask[0].bool()
        rows, columns = outputs["rows"][0][0], outputs["cols"][0][0]
        return ReadItem(
            payload={"pixel_values": pixels, "pixel_attention_mask": shown},
            text=text_of_tiles(rows, columns, token * embeddings),
            embeddings=tiles * embeddings,
        )


def _features(module: nn.Module, pixels: Tensor, *more: Tensor) -> Any:
    """Returns what transformers' encoder makes of images. ``more``: what its method reads beside the pixels."""
    device, dtype = place_of(module)
    model: Any = module.get_submodule("model")
    with torch.no_grad():
        read = [one.to(device) for one in more]
        return model.get_image_features(pixels.to(device, dtype), *read, return_dict=True)


def process(processor: Any, item: Image.Image, **options: Any) -> Mapping[str, Any]:
    """Returns the outputs of ``processor`` for an image that `load_image` has read. The image is converted to RGB, with
    transparency on white, as in transformers.
    """
    from transformers.image_transforms import convert_to_rgb

    if 0 in item.size:
        raise InvalidRequest(f"an image has {item.width} x {item.height} pixels; allowed: 1 x 1 or more")
    try:
        pixels: Any = convert_to_rgb(item, return_numpy=True)
        image = Image.fromarray(pixels)
    except Exception as error:  # damaged files raise many kinds: wrapped, not hidden
        raise InvalidRequest(
            f"it cannot be decoded: {type(error).__name__}: {error}; repair the image or leave it out"
        ) from error
    try:
        outputs: Mapping[str, Any] = processor([image], return_tensors="pt", **options)
    except Exception as error:  # processors refuse some sizes, with various errors
        raise InvalidRequest(
            f"the checkpoint's processor refuses an image of {image.width} x {image.height} pixels: {error}; resize "
            "or crop the image"
        ) from error
    return outputs


def text_of_tiles(rows: int, columns: int, tile: str) -> str:
    """Returns the text of an image in a prompt: each tile behind the name of its place, then the whole image."""
    around, whole = "<fake_token_around_image>", "<global-img>"
    lines = [
        "".join(f"{around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    gap = "\n" if lines else ""
    return f"{''.join(lines)}{gap}{around}{whole}{tile}{around}"


def _cells_of(pixels: Tensor, config: Any) -> int:
    """The number of embeddings of each tile of ``pixels`` [..., height, width]."""
    side = config.vision_config.patch_size * config.scale_factor
    height, width = pixels.shape[-2:]
    return int((height // side) * (width // side))


def _straight(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, length)


def _cells(frames: int, height: int, width: int) -> Tensor:
    """Returns the time, row and column of each cell, [3, cells]; the column changes fastest."""
    axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes).reshape(3, -1)

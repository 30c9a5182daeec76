"""The families that read images: Qwen2.5-VL, LLaVA, Idefics3 and SmolVLM.

Images become pixel values by the checkpoint's own image processor, in its PIL form, so that they are the same whatever
else is installed. They become embeddings by the encoder and projector that transformers has for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from PIL import Image
from torch import Tensor, nn

from ...core.errors import InvalidRequest, UnsupportedModel
from ...core.request import Placeholder
from ..checkpoints.loading import apart, load_part, place_of, processor_template
from .family import Family
from .prompts import MediaPreparer, Read

_CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # of the encoders that LLaVA may have


@frozen
class QwenVision(Family):
    """Qwen2-VL and Qwen2.5-VL (Wang et al. 2024; Bai et al. 2025): images of any size, positions in three axes."""

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """One batch: the encoder takes patches of images of any size, one after the other."""
        pixels = torch.cat([payload["pixel_values"] for payload in payloads])
        grids = torch.stack([payload["image_grid_thw"] for payload in payloads])
        device, dtype = place_of(module)
        model: Any = module.get_submodule("model")
        with torch.no_grad():
            output = model.get_image_features(pixels.to(device, dtype), grids.to(device), return_dict=True)
        return apart(output.pooler_output)

    def positions(
        self, module: nn.Module, token_ids: Sequence[int], placeholders: Sequence[Placeholder]
    ) -> tuple[Tensor, int]:
        """Returns positions: text counts on; an image's rows and columns count from where it stands, and the text after
        it goes on after the longer side."""
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

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        processor = _image_processor(folder)
        token = tokenizer.convert_ids_to_tokens(config.image_token_id)
        reader = _PatchReader(processor=processor, token=token)
        unread = (config.video_token_id,)
        ends = (config.vision_start_token_id, config.vision_end_token_id)
        around = (tokenizer.convert_ids_to_tokens(ends[0]) or "", tokenizer.convert_ids_to_tokens(ends[1]) or "")
        return _preparer(folder, tokenizer, config, reader, processor, identity, hidden, dtype, unread, around)


@frozen
class Llava(Family):
    """LLaVA (Liu et al. 2023): every image becomes one square, and a fixed number of embeddings."""

    architecture: str = "LlavaForConditionalGeneration"

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """One batch: all images have one size."""
        pixels = torch.stack([payload["pixel_values"] for payload in payloads])
        device, dtype = place_of(module)
        model: Any = module.get_submodule("model")
        with torch.no_grad():
            output = model.get_image_features(pixels.to(device, dtype), return_dict=True)
        return apart(output.pooler_output)

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        processor = _image_processor(folder)
        extra = _class_tokens(config) - (config.vision_feature_select_strategy == "default")
        reader = _SquareReader(
            processor=processor,
            token=tokenizer.convert_ids_to_tokens(config.image_token_id),
            patch=config.vision_config.patch_size,
            extra=extra,
        )
        around = ("", "\n")
        return _preparer(folder, tokenizer, config, reader, processor, identity, hidden, dtype, around=around)


@frozen
class Tiled(Family):
    """Idefics3 and SmolVLM (Laurençon et al. 2024; Marafioti et al. 2025): an image is cut into square tiles, with the
    whole image as one more; each tile has a span of its own in the prompt."""

    language: str = "model.text_model"

    def encode(self, module: nn.Module, payloads: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """One batch of the tiles of all images."""
        pixels = torch.cat([payload["pixel_values"] for payload in payloads])
        masks = torch.cat([payload["pixel_attention_mask"] for payload in payloads])
        device, dtype = place_of(module)
        model: Any = module.get_submodule("model")
        with torch.no_grad():
            output = model.get_image_features(
                pixels[None].to(device, dtype), masks[None].to(device), return_dict=True
            )  # as one prompt with all the tiles
        (rows,) = output.pooler_output
        config: Any = module.config
        embeddings = _cells_of(pixels, config)
        return apart(torch.split(rows, [len(payload["pixel_values"]) * embeddings for payload in payloads]))

    def preparer(
        self, folder: Path, tokenizer: Any, config: Any, *, identity: str, hidden: int, dtype: torch.dtype
    ) -> MediaPreparer:
        processor = _image_processor(folder)
        reader = _TileReader(
            processor=processor,
            token=tokenizer.convert_ids_to_tokens(config.image_token_id),
            config=config,
        )
        return _preparer(folder, tokenizer, config, reader, processor, identity, hidden, dtype)


@frozen(kw_only=True)
class _ImageReader:
    """The common part of the readers of images."""

    processor: Any = field(repr=False)  # transformers' image processor
    token: str
    medium: str = "image"
    sampling_rate: int = 0

    def _process(self, item: Any, **options: Any) -> Mapping[str, Any]:
        image = self._rgb(item)
        try:
            outputs: Mapping[str, Any] = self.processor([image], return_tensors="pt", **options)
        except Exception as error:  # of sizes that it refuses, each in a way of its own
            raise InvalidRequest(
                f"an image of {image.width} by {image.height} pixels, which the checkpoint's processor refuses: "
                f"{error}; resize or crop it"
            ) from error
        return outputs

    def _rgb(self, item: Image.Image) -> Image.Image:
        """The image, which `load_image` has read, in RGB, transparency on white, as transformers converts it."""
        from transformers.image_transforms import convert_to_rgb

        if 0 in item.size:
            raise InvalidRequest(f"an image of {item.width} by {item.height} pixels; allowed: 1 or more each way")
        try:
            pixels: Any = convert_to_rgb(item, return_numpy=True)
            return Image.fromarray(pixels)
        except Exception as error:  # damaged files raise many kinds: wrapped, not hidden
            raise InvalidRequest(
                f"it cannot be decoded: {type(error).__name__}: {error}; mend or leave it out"
            ) from error


@frozen(kw_only=True)
class _PatchReader(_ImageReader):
    """Qwen: as many patches as the image needs, each ``merge_size`` squared of them one embedding."""

    def read(self, item: Any) -> Read:
        outputs = self._process(item)
        grid = outputs["image_grid_thw"][0]
        embeddings = int(grid.prod()) // self.processor.merge_size**2
        return Read(
            payload={"pixel_values": outputs["pixel_values"], "image_grid_thw": grid},
            text=self.token * embeddings,
            embeddings=embeddings,
            grid=tuple(grid.tolist()),
        )


@frozen(kw_only=True)
class _SquareReader(_ImageReader):
    """LLaVA: one square of patches."""

    patch: int  # pixels of a side
    extra: int  # embeddings beside the patches'

    def read(self, item: Any) -> Read:
        pixels = self._process(item)["pixel_values"][0]
        height, width = pixels.shape[-2:]
        embeddings = (height // self.patch) * (width // self.patch) + self.extra
        return Read(payload={"pixel_values": pixels}, text=self.token * embeddings, embeddings=embeddings)


@frozen(kw_only=True)
class _TileReader(_ImageReader):
    """Idefics3: rows and columns of tiles, then the whole image; the text says which is which."""

    config: Any = field(repr=False)

    def read(self, item: Any) -> Read:
        outputs = self._process(item, return_row_col_info=True)
        pixels = outputs["pixel_values"][0]
        tiles, embeddings = len(pixels), _cells_of(pixels, self.config)
        mask = outputs.get("pixel_attention_mask")
        shown = torch.ones_like(pixels[:, 0], dtype=torch.bool) if mask is None else mask[0].bool()
        rows, columns = outputs["rows"][0][0], outputs["cols"][0][0]
        return Read(
            payload={"pixel_values": pixels, "pixel_attention_mask": shown},
            text=self._text(rows, columns, self.token * embeddings),
            embeddings=tiles * embeddings,
        )

    def _text(self, rows: int, columns: int, tile: str) -> str:
        around, whole = "<fake_token_around_image>", "<global-img>"
        lines = [
            "".join(f"{around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        gap = "\n" if lines else ""
        return f"{''.join(lines)}{gap}{around}{whole}{tile}{around}"


def _preparer(
    folder: Path,
    tokenizer: Any,
    config: Any,
    reader: Any,
    processor: Any,
    identity: str,
    hidden: int,
    dtype: torch.dtype,
    unread: tuple[int, ...] = (),
    around: tuple[str, str] = ("", ""),
) -> MediaPreparer:
    return MediaPreparer.reading(
        tokenizer,
        reader,
        placeholder_id=config.image_token_id,
        identity=(identity, config.model_type, str(dtype), processor.to_json_string()),
        embedding_bytes=hidden * dtype.itemsize,
        chat_template=processor_template(folder),
        unread_ids=unread,
        around=around,
    )


def _image_processor(folder: Path) -> Any:
    return load_part("AutoImageProcessor", folder, backend="pil", trust_remote_code=False)


def _class_tokens(config: Any) -> int:
    """The number of embeddings that LLaVA's encoder puts before the patches'."""
    kind = config.vision_config.model_type
    if kind not in _CLASS_TOKENS:
        raise UnsupportedModel(f"a LLaVA checkpoint with a {kind} encoder; allowed: {', '.join(_CLASS_TOKENS)}")
    return _CLASS_TOKENS[kind]


def _cells_of(pixels: Tensor, config: Any) -> int:
    """Embeddings of each tile of ``pixels``, [..., height, width]."""
    side = config.vision_config.patch_size * config.scale_factor
    height, width = pixels.shape[-2:]
    return int((height // side) * (width // side))


def _straight(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, length)


def _cells(frames: int, height: int, width: int) -> Tensor:
    """Time, row and column of each cell, [3, cells], columns fastest."""
    axes = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(axes).reshape(3, -1)

"""Gemma 4 (Gemma Team 2026), with an encoder of images or without one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from attrs import asdict, evolve, fields_dict, frozen
from torch import Tensor, nn
from torch.nn import functional

from ...core.errors import UnsupportedModel
from ..checkpoints.loading import text_alone
from ..checkpoints.settings import processor_settings
from .pictures import Pictures

_USUAL = {"do_resize": True, "do_rescale": True, "do_normalize": False, "resample": 3}  # 3: bicubic


@frozen(kw_only=True)
class Gemma4(Pictures):
    """Gemma 4: an image of any size. In larger models its embeddings see each other in windows. Audio is not read, and
    its encoder is left out."""

    architecture: str = "Gemma4ForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "image_position_ids")
    hears_by: str = "model.audio_tower"

    def of(self, config: Any) -> Self | None:
        if config.vision_config is None:
            return None
        mutual = config.text_config.use_bidirectional_attention == "vision"
        left_out = "" if config.audio_config is None else self.hears_by
        return evolve(self, mutual=mutual, in_windows=mutual, left_out=left_out)

    def as_text(self, module: nn.Module) -> nn.Module:
        return text_alone(module)

    def read_as(self, config: Any) -> Mapping[int, int]:
        """Embeddings that enter layers are those of padding where an image stands."""
        return dict.fromkeys((config.image_token_id, *self.unread(config)), config.text_config.pad_token_id)

    def together(self, folder: Path, config: Any) -> int:
        return int(self.processor(folder, config).max_soft_tokens) if self.mutual else 0

    def unread(self, config: Any) -> tuple[int, ...]:
        return tuple(token for token in (config.audio_token_id, config.video_token_id) if token is not None)

    def written(self, config: Any, payload: Mapping[str, Tensor], token: str) -> str:
        shown = int((payload["image_position_ids"] >= 0).all(-1).sum())
        return f"<|image>{token * (shown // self.patches(config))}<image|>"

    def patches(self, config: Any) -> int:
        """The number of patches that become one embedding."""
        return int(config.vision_config.pooling_kernel_size**2)


@frozen(kw_only=True)
class Gemma4Unified(Gemma4):
    """Gemma 4 without encoders: a matrix makes the embeddings of squares of pixels. They see each other in all layers,
    as in `generate` of transformers 5.23; with a static cache it lets them do so in windows alone."""

    architecture: str = "Gemma4UnifiedForConditionalGeneration"
    hears_by: str = "model.embed_audio"

    def of(self, config: Any) -> Self | None:
        family = super().of(config)
        return family and evolve(family, in_windows=False)

    def together(self, folder: Path, config: Any) -> int:
        most, window = super().together(folder, config), config.text_config.sliding_window
        if most > window:
            raise UnsupportedModel(
                f"{folder} has {most} rows of an image, which see each other beyond windows of {window} positions; "
                "allowed: images within a window"
            )
        return most

    def processor(self, folder: Path, config: Any) -> Squares:  # noqa: ARG002
        return Squares.read(folder)

    def patches(self, config: Any) -> int:  # noqa: ARG002
        return 1


@frozen(kw_only=True)
class Squares:
    """The settings of the image processor, by the names that its file has. transformers' own needs torchvision; here
    torch alone cuts an image into the same squares."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280
    rescale_factor: float = 1 / 255

    @classmethod
    def read(cls, folder: Path) -> Squares:
        """Reads the settings of a checkpoint. Raises `CheckpointError` if the file is damaged, and `UnsupportedModel`
        if it asks for more than this does."""
        values = processor_settings(folder)
        if odd := [name for name, usual in _USUAL.items() if values.get(name) not in {None, usual}]:
            told = ", ".join(f"{name}={values[name]}" for name in odd)
            raise UnsupportedModel(f"the image processor of {folder} has {told}; allowed: {_USUAL}")
        return cls(**{name: values[name] for name in fields_dict(cls) if values.get(name) is not None})

    def to_json_string(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(asdict(self))

    def __call__(self, images: Sequence[Any], **_: Any) -> dict[str, Tensor]:
        """Returns the squares of one image, line by line, and where they lie."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        pixels = torch.from_numpy(np.array(images[0])).permute(2, 0, 1)[None]
        kernel, side = self.pooling_kernel_size, self.patch_size * self.pooling_kernel_size
        most = self.max_soft_tokens * kernel**2
        size = get_aspect_ratio_preserving_size(pixels.shape[2], pixels.shape[3], self.patch_size, most, kernel)
        if pixels.shape[-2:] != size:
            pixels = functional.interpolate(pixels, size, mode="bicubic", align_corners=False, antialias=True)
        rows, columns = size[0] // side, size[1] // side
        cut = (pixels[0] * self.rescale_factor).view(3, rows, side, columns, side)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
        squares = cut.permute(1, 3, 2, 4, 0).reshape(rows * columns, side * side * 3)
        return {"pixel_values": squares[None], "image_position_ids": places[None]}

"""LFM2-VL: the patches of an image are those of transformers' `Lfm2VlImageProcessor`, which needs torchvision. Here
torch alone makes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import asdict, fields_dict, frozen
from torch import Tensor
from torch.nn import functional

from ..checkpoints.settings import processor_settings
from .pictures import Pictures
from .prompts import ReadItem
from .vision import process


@frozen(kw_only=True)
class TiledPatches:
    """The settings of the image processor, by the names that its file has. A large image is cut into tiles, and read
    once more as a whole, made small."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    rescale_factor: float = 1 / 255
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    @classmethod
    def read(cls, folder: Path) -> TiledPatches:
        """Reads the settings of a checkpoint. Raises `CheckpointError` if the file is damaged."""
        values = processor_settings(folder)
        return cls(**{name: values[name] for name in fields_dict(cls) if values.get(name) is not None})

    def to_json_string(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(asdict(self))

    @property
    def side(self) -> int:
        """The pixels of a side of the square that becomes one embedding."""
        return self.encoder_patch_size * self.downsample_factor

    def __call__(self, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        """Returns the patches of all tiles of one image, filled up with zeros, and where the tiles lie."""
        pixels = torch.from_numpy(np.array(images[0])).permute(2, 0, 1)[None]
        height, width = pixels.shape[-2:]
        small, columns, rows = self._small(height, width), 1, 1
        if self._is_large(height, width):
            columns, rows = self._grid(height, width)
        tiles = list(self._tiles(pixels, rows, columns))
        if len(tiles) != 1 and self.use_thumbnail:
            tiles.append(_resized(pixels, *small))
        elif len(tiles) == 1:
            tiles = [_resized(pixels, *small)]
        most = max(self.max_image_tokens * self.downsample_factor**2, self._in_tile * self.do_image_splitting)
        patches = [self._patches(tile) for tile in tiles]
        shapes = [[side // self.encoder_patch_size for side in tile.shape[-2:]] for tile in tiles]
        shown = [torch.arange(most) < len(one) for one in patches]
        return {
            "pixel_values": torch.stack([functional.pad(one, (0, 0, 0, most - len(one))) for one in patches]),
            "pixel_attention_mask": torch.stack(shown).int(),
            "spatial_shapes": torch.tensor(shapes),
            "grid": (rows, columns),
        }

    @property
    def _in_tile(self) -> int:
        return (self.tile_size // self.encoder_patch_size) ** 2

    def _is_large(self, height: int, width: int) -> bool:
        if not self.do_image_splitting or self.min_tiles == self.max_tiles == 1:
            return False
        sides = [max(self.encoder_patch_size, round(one / self.side) * self.side) for one in (height, width)]
        return math.prod(sides) > self.max_image_tokens * self.side**2 * self.max_pixels_tolerance

    def _small(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size of a whole image, within the smallest and the largest number of embeddings."""
        side, (least, most) = self.side, (n * self.side**2 for n in (self.min_image_tokens, self.max_image_tokens))
        high, wide = (max(side, round(one / side) * side) for one in (height, width))
        if high * wide > most:
            shrunk = math.sqrt(height * width / most)
            return max(side, math.floor(height / shrunk / side) * side), max(
                side, math.floor(width / shrunk / side) * side
            )
        if high * wide < least:
            grown = math.sqrt(least / (height * width))
            return math.ceil(height * grown / side) * side, math.ceil(width * grown / side) * side
        return high, wide

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the columns and rows of tiles that are most like the image in shape."""
        sides, most = range(1, self.max_tiles + 1), self.max_tiles
        grids = {(wide, high) for wide in sides for high in sides if self.min_tiles <= wide * high <= most}
        best, least = (1, 1), math.inf
        for wide, high in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            apart = abs(width / height - wide / high)
            if apart < least or (apart == least and height * width > 0.5 * self.tile_size**2 * wide * high):
                best, least = (wide, high), apart
        return best

    def _tiles(self, pixels: Tensor, rows: int, columns: int) -> Iterator[Tensor]:
        if rows * columns == 1:
            yield pixels
            return
        size = self.tile_size
        whole = _resized(pixels, size * rows, size * columns)
        for row in range(rows):
            for column in range(columns):
                yield whole[..., row * size : (row + 1) * size, column * size : (column + 1) * size]

    def _patches(self, tile: Tensor) -> Tensor:
        """Returns the patches [patches, side * side * 3] of a tile."""
        mean, std = (torch.tensor(one) * (1.0 / self.rescale_factor) for one in (self.image_mean, self.image_std))
        values = tile[0].float().sub(mean[:, None, None]).div_(std[:, None, None])
        size = self.encoder_patch_size
        rows, columns = (one // size for one in values.shape[1:])
        cut = values.view(3, rows, size, columns, size)
        return cut.permute(1, 3, 2, 4, 0).reshape(-1, size * size * 3)


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    if pixels.shape[-2:] == (height, width):
        return pixels
    return functional.interpolate(pixels, (height, width), mode="bilinear", align_corners=False, antialias=True)


@frozen(kw_only=True)
class Lfm2Vl(Pictures):
    """LFM2-VL (Liquid AI 2025): an image of any size, or tiles and the whole image."""

    architecture: str = "Lfm2VlForConditionalGeneration"
    inputs: tuple[str, ...] = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def processor(self, folder: Path, config: Any) -> TiledPatches:  # noqa: ARG002
        return TiledPatches.read(folder)

    def read(self, processor: TiledPatches, config: Any, token: str, item: Any) -> ReadItem:  # noqa: ARG002
        outputs = process(processor, item)
        rows, columns = outputs["grid"]
        counts = [int((-(-shape // processor.downsample_factor)).prod()) for shape in outputs["spatial_shapes"]]
        names = [""]
        if rows * columns > 1:
            names = [
                f"<|img_row_{row}_col_{column}|>" for row in range(1, rows + 1) for column in range(1, columns + 1)
            ]
            names += ["<|img_thumbnail|>"] * (len(counts) - len(names))
        text = "".join(name + token * count for name, count in zip(names, counts, strict=True))
        payload = {name: outputs[name] for name in self.inputs}
        return ReadItem(payload=payload, text=f"<|image_start|>{text}<|image_end|>", embeddings=sum(counts))

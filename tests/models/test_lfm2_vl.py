"""LFM2-VL's patches: as large and as many as transformers' image processor makes, with the colours of Pillow's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from triolet.models.architectures.lfm2_vl import TiledPatches

from .media import picture


@pytest.mark.parametrize(
    ("size", "grid", "last", "count"),
    [
        ((40, 60), (1, 1), [14, 20], 1),
        ((17, 900), (1, 1), [4, 118], 1),
        ((700, 900), (2, 3), [28, 36], 7),
        ((1500, 600), (5, 2), [50, 20], 11),
        ((2000, 2100), (3, 3), [30, 32], 10),
        ((512, 512), (1, 1), [32, 32], 1),
        ((900, 400), (1, 1), [48, 20], 1),
    ],
)
def test_tiles_are_as_many_and_as_large_as_transformers_makes(
    size: tuple[int, int], grid: tuple[int, int], last: list[int], count: int
) -> None:
    """What `Lfm2VlImageProcessor` of transformers 5.23 returns, with torchvision 0.28."""
    made = TiledPatches()([Image.new("RGB", size[::-1])])
    assert made["grid"] == grid
    assert made["spatial_shapes"][-1].tolist() == last
    assert made["pixel_values"].shape == (count, 1024, 768)
    assert made["pixel_attention_mask"].sum(1).tolist() == made["spatial_shapes"].prod(1).tolist()


def test_patches_have_the_colours_of_the_image_line_by_line() -> None:
    """Tiles first, then the whole image: each as Pillow resizes it, within a level."""
    image, sizes = picture(90, 130), {"encoder_patch_size": 8, "tile_size": 32, "max_image_tokens": 4, "max_tiles": 4}
    made = TiledPatches(min_image_tokens=1, **sizes)([image])
    rows, columns = made["grid"]
    assert rows * columns > 1
    whole = image.resize((32 * columns, 32 * rows), Image.Resampling.BILINEAR)
    tiles = [
        whole.crop((32 * column, 32 * row, 32 * column + 32, 32 * row + 32))
        for row in range(rows)
        for column in range(columns)
    ]
    high, wide = (made["spatial_shapes"][-1] * 8).tolist()
    for tile, found in zip(
        [*tiles, image.resize((wide, high), Image.Resampling.BILINEAR)], made["pixel_values"], strict=True
    ):
        told = np.asarray(tile, np.float32)
        cut = told.reshape(told.shape[0] // 8, 8, told.shape[1] // 8, 8, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 192)
        own = found[: len(cut)] * 127.5 + 127.5
        assert (own - torch.from_numpy(cut)).abs().max() <= 1.01
        assert not found[len(cut) :].any()


def test_settings_are_read_from_either_file(tmp_path: Path) -> None:
    assert TiledPatches.read(tmp_path) == TiledPatches()
    (tmp_path / "preprocessor_config.json").write_text('{"tile_size": 256, "do_resize": true, "max_tiles": null}')
    assert TiledPatches.read(tmp_path) == TiledPatches(tile_size=256)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"tile_size": 128, "use_thumbnail": false}}')
    assert TiledPatches.read(tmp_path) == TiledPatches(tile_size=128, use_thumbnail=False)

"""The squares of a Gemma 4 without encoders: as large and as many as transformers' image processor makes, with the
colours of Pillow's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from triolet.models.architectures.gemma4 import Squares

from .media import picture


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [((40, 60), 13, 20), ((17, 900), 2, 121), ((700, 900), 14, 18), ((768, 768), 16, 16), ((3, 301), 1, 167)],
)
def test_squares_are_as_many_as_transformers_makes(size: tuple[int, int], rows: int, columns: int) -> None:
    """What `Gemma4UnifiedImageProcessor` of transformers 5.23 returns, with torchvision 0.28."""
    made = Squares()([Image.new("RGB", size[::-1])])
    assert made["pixel_values"].shape == (1, rows * columns, 48 * 48 * 3)
    assert made["image_position_ids"][0].tolist() == [[column, row] for row in range(rows) for column in range(columns)]


def test_squares_have_the_colours_of_the_image_line_by_line() -> None:
    """As Pillow resizes it, within a level."""
    image, settings = picture(30, 50), Squares(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    (found,), (places,) = settings([image]).values()
    columns, rows = (8 * (places.amax(0) + 1)).tolist()
    whole = np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC), np.float32)
    for square, (column, row) in zip(found, places.tolist(), strict=True):
        own = torch.from_numpy(whole[8 * row : 8 * row + 8, 8 * column : 8 * column + 8])
        assert (square.view(8, 8, 3) * 255 - own).abs().max() <= 1.01

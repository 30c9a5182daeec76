"""Images are taken as a viewer shows them: turned as their EXIF orientation says, whoever gives them in which form."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

import triolet
from triolet.api.inputs.images import load_image
from triolet.core.errors import UnsupportedImage
from triolet.testing import make_checkpoint

UPRIGHT = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
STORED: dict[int, Callable[[Any], Any]] = {
    1: lambda shown: shown,
    2: np.fliplr,
    3: lambda shown: np.rot90(shown, 2),
    4: np.flipud,
    5: lambda shown: shown.transpose(1, 0, 2),
    6: lambda shown: np.rot90(shown, 1),  # shown by turning it clockwise
    7: lambda shown: np.rot90(shown.transpose(1, 0, 2), 2),
    8: lambda shown: np.rot90(shown, -1),
}
"""How the picture lies in a file with each orientation (Exif 2.3, table 6), so that a viewer shows it upright."""

LOSSLESS: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}}


def saved(pixels: NDArray[np.uint8], orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(data, kind, exif=exif, **LOSSLESS.get(kind, {}))
    return data.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", STORED)
def test_every_orientation_gives_the_upright_picture(orientation: int, kind: str, tmp_path: Path) -> None:
    data = saved(STORED[orientation](UPRIGHT), orientation, kind)
    path = tmp_path / "picture"
    path.write_bytes(data)
    for source in (data, path, io.BytesIO(data), Image.open(path)):
        assert np.array_equal(np.asarray(load_image(source)), UPRIGHT)


@pytest.mark.parametrize("orientation", STORED)
def test_a_photograph_is_turned_as_its_stored_pixels_are(orientation: int) -> None:
    """JPEG loses something, but the same in every orientation."""
    data = saved(UPRIGHT, orientation, "JPEG")
    decoded = np.asarray(Image.open(io.BytesIO(data)))
    turned = np.asarray(load_image(data))
    assert np.array_equal(STORED[orientation](turned), decoded)


def test_what_was_turned_is_not_turned_again_and_a_pil_image_stays_as_it_is() -> None:
    mine = Image.open(io.BytesIO(saved(STORED[6](UPRIGHT), 6)))
    once = load_image(mine)
    assert np.array_equal(np.asarray(load_image(once)), UPRIGHT)
    assert np.array_equal(np.asarray(mine), STORED[6](UPRIGHT))
    assert mine.getexif()[ExifTags.Base.Orientation] == 6


def test_a_pil_image_that_was_set_upright_by_hand_is_not_turned_again() -> None:
    """Pillow keeps the EXIF data of the file in all that is made of its image."""
    mine = Image.open(io.BytesIO(saved(STORED[6](UPRIGHT), 6))).rotate(-90, expand=True)
    assert mine.getexif()[ExifTags.Base.Orientation] == 6
    assert load_image(mine) is mine
    assert np.array_equal(np.asarray(mine), UPRIGHT)


def test_an_upright_pil_image_is_not_copied() -> None:
    image = Image.fromarray(UPRIGHT)
    assert load_image(image) is image


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_an_orientation_that_there_is_none_of_turns_nothing(orientation: int) -> None:
    assert np.array_equal(np.asarray(load_image(saved(UPRIGHT, orientation))), UPRIGHT)


def test_exif_data_that_cannot_be_read_are_told_and_turn_nothing(caplog: pytest.LogCaptureFixture) -> None:
    data = io.BytesIO()
    Image.fromarray(UPRIGHT).save(data, "PNG", exif=b"Exif\0\0no header of TIFF")
    with caplog.at_level(logging.WARNING, "triolet"):
        assert np.array_equal(np.asarray(load_image(data.getvalue())), UPRIGHT)
    (told,) = caplog.messages
    assert told.startswith(f"{len(data.getvalue())} bytes: its EXIF data cannot be read (SyntaxError: ")


def test_an_orientation_that_cannot_be_followed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow writes the other EXIF data anew, and some it cannot write."""

    def fail(_: object) -> None:
        raise TypeError("an odd tag")

    monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(UnsupportedImage, match=r"cannot be turned as .* \(TypeError: an odd tag\); save it upright"):
        load_image(saved(UPRIGHT, 6))


async def test_a_picture_is_encoded_once_in_whatever_orientation_it_comes(tmp_path: Path) -> None:
    """The key of its content is of what is shown."""
    path = tmp_path / "turned.png"
    path.write_bytes(saved(STORED[8](UPRIGHT), 8))
    shown = [UPRIGHT, saved(UPRIGHT, 1), saved(STORED[6](UPRIGHT), 6), path, Image.open(path)]
    async with triolet.Engine(make_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")) as engine:
        texts = set()
        for image in shown:
            content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
            messages = [{"role": "user", "content": content}]
            texts.add((await engine.generate(messages=messages, max_tokens=4)).token_ids)
        assert len(texts) == 1
        assert engine.statistics().encoder_cache.encoded == 1
        await engine.generate(messages=[{"role": "user", "content": [{"type": "image", "image": UPRIGHT[::-1]}]}])
        assert engine.statistics().encoder_cache.encoded == 2

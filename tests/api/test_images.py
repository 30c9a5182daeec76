"""Images as users have them, taken as a viewer shows them, and what a model that reads none makes of media."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, PngImagePlugin
from transformers.image_transforms import convert_to_rgb

import triolet
from triolet import demo
from triolet.api.inputs import images
from triolet.api.inputs.images import load_image, pixels_of
from triolet.core.errors import InvalidRequest, RequestTooLarge, UnsupportedImage

LOSSLESS: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}}
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def png(pixels: Any = PIXELS) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def closed_file() -> io.BytesIO:
    file = io.BytesIO(png())
    file.close()
    return file


class NoArray:
    """As a tensor on a GPU."""

    def __array__(self, *_: object) -> Any:
        raise RuntimeError("it is elsewhere")


def test_an_image_may_be_a_path_bytes_a_file_an_image_or_an_array(tmp_path: Path) -> None:
    path = tmp_path / "noise.png"
    path.write_bytes(png())
    skipped = io.BytesIO(b"head" + png())
    skipped.seek(4)
    sources = [path, str(path), png(), bytearray(png()), memoryview(png()), io.BytesIO(png()), skipped]
    for source in [*sources, Image.fromarray(PIXELS), PIXELS, PIXELS[::-1][::-1]]:
        assert np.array_equal(np.asarray(load_image(source)), PIXELS)
    assert not skipped.closed


def test_postscript_is_not_an_image() -> None:
    """Pillow would have Ghostscript run it, where it is installed."""
    data = io.BytesIO()
    Image.new("RGB", (4, 4)).save(data, "EPS")
    with pytest.raises(UnsupportedImage):
        load_image(data.getvalue())


def test_a_transparent_image_keeps_its_mode_for_the_processor() -> None:
    assert load_image(png(np.zeros((2, 3, 4), np.uint8))).mode == "RGBA"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (np.array([[0, 257, 65_535]], np.uint16), [0, 1, 255]),
        (np.array([[0.0, 0.5, 1.0]], np.float32), [0, 128, 255]),
        (np.array([[0.0, 51.0, 255.0]], np.float32), [0, 51, 255]),
        (np.array([[-1.0, 0.0, np.nan, 3.0]], np.float32), [0, 64, 64, 255]),
        (np.array([[0, 51, 255]], np.int32), [0, 51, 255]),
        (np.array([[-100, 0, 100_000]], np.int32), [0, 0, 255]),
        (np.full((1, 3), 7.0e5, np.float32), [0, 0, 0]),
        (np.array([[-3e38, 0, 3e38]], np.float32), [0, 128, 255]),
    ],
    ids=["16 bits", "to 1", "to 255", "beyond", "32 bits", "signed", "even", "large"],
)
def test_gray_values_of_more_than_8_bits_are_scaled(stored: Any, expected: list[int]) -> None:
    """They became white, or black, without a word."""
    data = io.BytesIO()
    Image.fromarray(stored).save(data, "TIFF")
    for source in (data.getvalue(), Image.fromarray(stored), *([png(stored)] if stored.dtype == np.uint16 else [])):
        assert np.asarray(load_image(source).convert("RGB"))[0, :, 0].tolist() == expected
    assert load_image(Image.new(Image.fromarray(stored).mode, (0, 3))).size == (0, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_of_an_animation_the_first_frame_is_read_and_of_an_opened_one_its_own(kind: str) -> None:
    """As transformers and viewers of still pictures do."""
    data = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(data, kind, save_all=True, append_images=frames[1:], **LOSSLESS.get(kind, {}))
    opened = Image.open(data)
    opened.seek(2)
    for source, expected in ((data.getvalue(), [255, 0, 0]), (opened, [0, 0, 255])):
        assert np.asarray(load_image(source).convert("RGB"))[0, 0].tolist() == expected


def test_transparency_of_any_kind_is_shown_on_white() -> None:
    """Of a palette, as one colour that is transparent, as a band; also where colours are multiplied with it."""
    half = Image.new("RGBA", (4, 4), (200, 100, 0, 128))
    palette = Image.new("RGB", (4, 4), "red").quantize(2)
    one = Image.new("RGB", (4, 4), (9, 8, 7))
    for image, told, expected in (
        (palette, {"transparency": bytes([128])}, [255, 127, 127]),
        (one, {"transparency": (9, 8, 7)}, [255, 255, 255]),
        (half, {}, [227, 177, 127]),
    ):
        data = io.BytesIO()
        image.save(data, "PNG", **told)
        shown: Any = convert_to_rgb(load_image(data.getvalue()), return_numpy=True)
        assert shown[0, 0].tolist() == pytest.approx(expected, abs=1)
    for mode in ("RGBa", "La"):
        plain = half.convert(mode.upper())
        told = load_image(plain.convert(mode))
        assert told.mode == mode.upper()
        assert np.asarray(told)[0, 0].tolist() == pytest.approx(np.asarray(plain)[0, 0].tolist(), abs=1)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "TIFF", "WEBP"])
def test_a_file_that_is_cut_short_is_refused_and_not_filled_up(kind: str) -> None:
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(data, kind)
    with pytest.raises(UnsupportedImage, match=r"is not an image that can be read .*(truncated|decoder)"):
        load_image(data.getvalue()[: len(data.getvalue()) * 2 // 3])


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (b"no image", r"8 bytes is not an image that can be read \(its format is not known\); allowed: PNG, JPEG,"),
        (png()[:60], r"60 bytes is not an image that can be read \(\w+: .*"),
        (io.BytesIO(b""), r"the image file is not an image that can be read \(its format is not known\)"),
        ("absent.png", r"absent.png cannot be read \(.*No such file"),
        ("a\0b.png", r"a\0b.png cannot be read \(embedded null byte\); allowed: a readable image file"),
        ("~nobody-of-this-name/a.png", r"~nobody-of-this-name/a.png cannot be read \(.*home directory"),
        (closed_file(), r"the image file cannot be read \(I/O operation on closed file"),
        (NoArray(), r"an image of the type NoArray cannot be read as an array \(it is elsewhere\); allowed: a path"),
        (io.StringIO("text"), "the image file returned str; allowed: bytes. Open it in binary mode"),
        (5, "an image has the type int; allowed: a path, bytes, a binary file, a PIL image, or a uint8 array"),
        (
            PIXELS[0],
            r"an image array has the shape \(7, 3\) and the dtype uint8; allowed: uint8 of shape \(height, width, 3\)",
        ),
        (PIXELS / 255, r"an image array has the shape \(5, 7, 3\) and the dtype float64; allowed: uint8"),
        (PIXELS[:0], r"an image array has the shape \(0, 7, 3\) and the dtype uint8; allowed"),
    ],
)
def test_what_cannot_be_an_image_is_told_without_our_objects_in_it(source: Any, told: str) -> None:
    error = UnsupportedImage if "is not an image" in told else InvalidRequest
    with pytest.raises(error, match=told) as caught:
        load_image(source)
    assert type(caught.value) is error
    assert "BytesIO" not in str(caught.value)


def test_an_image_of_too_many_pixels_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than anybody reads, or than its reader wants."""
    assert pixels_of(png(), 35) == pixels_of(png()) == 35
    with pytest.raises(RequestTooLarge, match="7 x 5 pixels; allowed: up to 34"):
        pixels_of(png(), 34)
    monkeypatch.setattr(images, "_MOST_PIXELS", 34)
    for source, name in ((png(), "bytes"), (Image.fromarray(PIXELS), "the PIL image")):
        with pytest.raises(
            UnsupportedImage, match=f"{name} has 7 x 5 pixels; allowed: up to 34; make it smaller first"
        ):
            load_image(source)


def test_the_pixels_of_a_pil_image_are_read_at_once() -> None:
    """Pillow puts that off, and its file may be closed by then, or cut short."""
    file, closed = io.BytesIO(png()), io.BytesIO(png())
    image, late = load_image(Image.open(file)), Image.open(closed)
    file.close()
    closed.close()
    assert np.array_equal(np.asarray(image), PIXELS)
    with pytest.raises(UnsupportedImage, match=r"the PIL image is not an image that can be read \(ValueError: "):
        load_image(late)


def test_whatever_a_decoder_raises_the_image_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's decoders of AVIF and DDS raise RuntimeError and NotImplementedError for some damaged files."""

    def fail(_: object) -> None:
        raise NotImplementedError("unknown pixel format flags 0")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    with pytest.raises(UnsupportedImage, match=r"\(NotImplementedError: unknown pixel format flags 0\)"):
        load_image(png())


async def test_a_model_of_text_tells_what_it_reads(made: Callable[[str], Path]) -> None:
    """Also when it is asked to transcribe: before the file is opened. Halves of surrogate pairs, which file names and
    arguments that are no text have, are no text."""
    reads, half = "the request has {}, but LlamaForCausalLM reads only text; leave it out", r"a text has '\\udcff' at"
    image: list[Any] = [{"role": "user", "content": [{"type": "image"}]}]
    async with triolet.Engine(made("llama")) as engine:
        for ask, told in (
            (partial(engine.generate, "hi", images=[png()]), reads.format("image")),
            (partial(engine.generate, messages=image), reads.format("image")),
            (partial(engine.generate, "hi", audio="absent.wav"), reads.format("audio")),
            (partial(engine.transcribe, "absent.wav"), "LlamaForCausalLM cannot transcribe; allowed: models of speech"),
            (partial(engine.generate, "hi\udcff"), rf"{half} character 2: half of a surrogate pair"),
            (partial(engine.generate, messages=[{"role": "user", "content": "hi\udcff"}]), "half of a surrogate pair"),
            (partial(engine.generate, prompt_token_ids=[]), r"the prompt has no tokens; allowed: 1 token or more$"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await ask()
        with pytest.raises(InvalidRequest, match=r"cannot transcribe"):
            async with engine.stream_transcription("absent.wav"):
                pass
    async with triolet.Engine(demo.checkpoint()) as engine:
        with pytest.raises(InvalidRequest, match=half):
            await engine.generate("hi\udcff", audio=np.zeros(16_000, np.float32))


def test_one_opened_file_may_stand_in_many_requests_at_once() -> None:
    """It is decoded on first use, and Pillow's decoding is not made for two threads at once."""
    written = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (600, 600, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(written, "PNG")
    image = Image.open(written)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(load_image, [image] * 8))
    assert all((np.asarray(one) == pixels).all() for one in found)


# -- orientation -----------------------------------------------------------------------------------------------------

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


def saved(pixels: NDArray[np.uint8], orientation: int, kind: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(data, kind, exif=exif, **LOSSLESS.get(kind, {}))
    return data.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", [*STORED, 0, 9, 65_535])
def test_every_orientation_gives_the_upright_picture(orientation: int, kind: str, tmp_path: Path) -> None:
    """One that there is none of turns nothing."""
    data = saved(STORED.get(orientation, STORED[1])(UPRIGHT), orientation, kind)
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
    """Turned by us, or by hand: Pillow keeps the EXIF data of the file in all that is made of its image."""
    mine = Image.open(io.BytesIO(saved(STORED[6](UPRIGHT), 6)))
    assert np.array_equal(np.asarray(load_image(load_image(mine))), UPRIGHT)
    assert np.array_equal(np.asarray(mine), STORED[6](UPRIGHT))
    by_hand = mine.rotate(-90, expand=True)
    assert mine.getexif()[ExifTags.Base.Orientation] == by_hand.getexif()[ExifTags.Base.Orientation] == 6
    assert load_image(by_hand) is by_hand
    assert np.array_equal(np.asarray(by_hand), UPRIGHT)


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
    with pytest.raises(UnsupportedImage, match=r"cannot be rotated as .* \(TypeError: an odd tag\); save it upright"):
        load_image(saved(UPRIGHT, 6))


async def test_a_picture_is_encoded_once_in_whatever_orientation_it_comes(
    tmp_path: Path, made: Callable[[str], Path]
) -> None:
    """The key of its content is of what is shown."""
    path = tmp_path / "turned.png"
    path.write_bytes(saved(STORED[8](UPRIGHT), 8))
    shown = [UPRIGHT, saved(UPRIGHT, 1), saved(STORED[6](UPRIGHT), 6), path, Image.open(path)]
    async with triolet.Engine(made("qwen2_5_vl")) as engine:
        texts = set()
        for image in shown:
            content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
            messages = [{"role": "user", "content": content}]
            texts.add((await engine.generate(messages=messages, max_tokens=4)).token_ids)
        assert len(texts) == 1
        assert engine.statistics().encoder_cache.encoded == 1
        await engine.generate(messages=[{"role": "user", "content": [{"type": "image", "image": UPRIGHT[::-1]}]}])
        assert engine.statistics().encoder_cache.encoded == 2

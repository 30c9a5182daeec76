"""Images as users have them, and what a model that reads none makes of media."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

import triolet
from triolet import demo
from triolet.api.inputs import images
from triolet.api.inputs.images import load_image
from triolet.core.errors import InvalidRequest, RequestTooLarge, UnsupportedImage
from triolet.testing import make_checkpoint

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
    ("source", "told"),
    [
        (b"no image", r"8 bytes is not an image that can be read \(no format that is known\); allowed: PNG, JPEG,"),
        (png()[:60], r"60 bytes is not an image that can be read \(\w+: .*"),
        (io.BytesIO(b""), r"the image file is not an image that can be read \(no format that is known\)"),
    ],
)
def test_what_is_no_image_is_told_without_our_objects_in_it(source: Any, told: str) -> None:
    with pytest.raises(UnsupportedImage, match=told) as caught:
        load_image(source)
    assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("absent.png", r"absent.png cannot be read \(.*No such file"),
        ("a\0b.png", r"a\0b.png cannot be read \(embedded null byte\); allowed: a readable image file"),
        ("~nobody-of-this-name/a.png", r"~nobody-of-this-name/a.png cannot be read \(.*home directory"),
        (closed_file(), r"the image file cannot be read \(I/O operation on closed file"),
        (NoArray(), r"an image of type NoArray cannot be read as an array \(it is elsewhere\); allowed: a path"),
        (io.StringIO("text"), "the image file gave str; allowed: a file opened in binary mode"),
        (5, "an image of type int; allowed: a path, bytes, a binary file, a PIL image, or a uint8 array"),
        (PIXELS[0], r"an image array of shape \(7, 3\) and uint8; allowed: uint8 of shape \(height, width, 3\)"),
        (PIXELS / 255, r"an image array of shape \(5, 7, 3\) and float64; allowed: uint8"),
        (PIXELS[:0], r"an image array of shape \(0, 7, 3\) and uint8; allowed"),
    ],
)
def test_what_cannot_be_an_image_is_told(source: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        load_image(source)


def test_an_image_of_too_many_pixels_is_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MOST_PIXELS", 34)
    with pytest.raises(UnsupportedImage, match="has 7 x 5 pixels; allowed: up to 34; make it smaller first"):
        load_image(png())

    with pytest.raises(UnsupportedImage, match="the PIL image has 7 x 5 pixels"):
        load_image(Image.fromarray(PIXELS))


def test_an_image_of_more_pixels_than_its_reader_wants_is_refused_before_they_are_read() -> None:
    data = png()
    width, height = Image.open(io.BytesIO(data)).size
    assert load_image(data, most_pixels=width * height).size == (width, height)
    for source in (data, PIXELS, Image.open(io.BytesIO(data))):
        with pytest.raises(RequestTooLarge, match=rf"{width} x {height} pixels; allowed: up to {width * height - 1}"):
            load_image(source, most_pixels=width * height - 1)


def test_the_pixels_of_a_pil_image_are_read_at_once() -> None:
    """Pillow puts that off, and its file may be closed by then, or cut short."""
    file = io.BytesIO(png())
    image = load_image(Image.open(file))
    file.close()
    assert np.array_equal(np.asarray(image), PIXELS)
    with pytest.raises(UnsupportedImage, match=r"the PIL image is not an image that can be read \(ValueError: "):
        load_image(opened_and_closed())


def opened_and_closed() -> Image.Image:
    file = io.BytesIO(png())
    image = Image.open(file)
    file.close()
    return image


def test_whatever_a_decoder_raises_the_image_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's decoders of AVIF and DDS raise RuntimeError and NotImplementedError for some damaged files."""

    def fail(_: object) -> None:
        raise NotImplementedError("unknown pixel format flags 0")

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    with pytest.raises(UnsupportedImage, match=r"\(NotImplementedError: unknown pixel format flags 0\)"):
        load_image(png())


async def test_a_model_of_text_tells_what_it_reads(tmp_path: Path) -> None:
    """Also when it is asked to transcribe: before the file is opened."""
    async with triolet.Engine(make_checkpoint("llama", tmp_path)) as engine:
        with pytest.raises(InvalidRequest, match="image in the request, but LlamaForCausalLM reads text; leave it out"):
            await engine.generate("hi", images=[png()])
        with pytest.raises(InvalidRequest, match="audio in the request, but LlamaForCausalLM reads text; leave it out"):
            await engine.generate("hi", audio="absent.wav")
        with pytest.raises(InvalidRequest, match="LlamaForCausalLM cannot transcribe; allowed: Whisper models"):
            await engine.transcribe("absent.wav")
        with pytest.raises(InvalidRequest, match=r"cannot transcribe"):
            async with engine.stream_transcription("absent.wav"):
                pass


async def test_text_that_is_none_is_refused_to_its_caller(tmp_path: Path) -> None:
    """Halves of surrogate pairs, as file names and arguments that are no text have."""
    told = r"a text with '\\udcff' at character 2, half of a surrogate pair"
    async with triolet.Engine(make_checkpoint("llama", tmp_path)) as engine:
        with pytest.raises(InvalidRequest, match=told):
            await engine.generate("hi\udcff")
        with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
            await engine.generate(messages=[{"role": "user", "content": "hi\udcff"}])
    async with triolet.Engine(demo.checkpoint()) as engine:
        with pytest.raises(InvalidRequest, match=told):
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

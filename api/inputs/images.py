"""Images as users have them: a path, bytes, a binary file, a PIL image or an array, read by Pillow."""

from __future__ import annotations

import io
import logging
from os import PathLike, fspath
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidRequest, RequestTooLarge, UnsupportedImage
from .sources import read_all

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Any  # any source that `load_image` reads

_MOST_PIXELS = 64_000_000  # of one image: 192 MB of RGB
_NOT_READ = ("EPS", "ICO", "ICNS")
_LOADING = Lock()  # Pillow reads a file on first use, and one image may be in many requests at once
_KINDS = "a path, bytes, a binary file, a PIL image, or a uint8 array of shape (height, width, 3)"


def load_image(source: Any) -> Image:
    """Returns the image of ``source``, with all of its pixels read.

    The call blocks: make it in a worker thread from async code. A file object is read from its position to its end and
    left open. The image is turned as its EXIF orientation says, so that it looks as in a viewer. A PIL image is turned
    in a copy, and only if it is still as it was opened. An image that Pillow made from another one (``rotate``,
    ``convert``, ``resize``...) keeps its EXIF data even if it is upright already, so its pixels are taken as they are.
    If EXIF data cannot be read, the log has a warning, and the image is taken as it is stored. Gray values of more than
    8 bits are scaled to 8: those of 16 bits, floating-point ones from 0 to 1, and of others all that the image has. Of
    an animation the first frame is read; of a PIL image, the frame at which it stands. The checkpoint's processor
    converts other modes to RGB later, with transparency on white. PostScript is not read, since Pillow has another
    program run it; nor are icons, whose header may promise a smaller image than they contain.

    Raises:
        InvalidRequest: no such file, or not a kind of source listed above.
        UnsupportedImage: not an image, damaged, or of more than 64 million pixels.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        with _LOADING:
            image = _with_pixels(source, "the PIL image")
        as_opened = source.format is not None  # Pillow sets the format only when it opens an image
        return _in_8_bits(_upright(image, "the PIL image") if as_opened else image)
    if hasattr(source, "__array__"):
        return _with_pixels(Image.fromarray(_checked(source)), "the image array")
    image, name = _open(source)
    with image:
        upright = _upright(_with_pixels(image, name), name)
        return _in_8_bits(upright.copy() if upright is image else upright)


def pixels_of(source: Any, most: int | None = None) -> int:
    """Returns the number of pixels of an image as its header says, and decodes none. Raises as `load_image` does, and
    `RequestTooLarge` for more pixels than ``most``."""
    image, name = _open(source)
    with image:
        _check_size(image, name, most)
        return image.width * image.height


def _open(source: Any) -> tuple[Image, str]:
    from PIL import Image

    data, name = _read(source)
    Image.init()
    try:
        return Image.open(io.BytesIO(data), formats=[kind for kind in Image.ID if kind not in _NOT_READ]), name
    except Exception as error:  # Pillow's decoders raise many kinds of errors for damage
        raise _unreadable(name, error) from error


def _with_pixels(image: Image, name: str) -> Image:
    """Returns ``image`` with its pixels read. Pillow puts this off until they are needed."""
    _check_size(image, name)
    try:
        image.load()
    except Exception as error:  # see `_open`
        raise _unreadable(name, error) from error
    return image


def _check_size(image: Image, name: str, most: int | None = None) -> None:
    width, height = image.size
    if width * height > _MOST_PIXELS:
        raise UnsupportedImage(
            f"{name} has {width} x {height} pixels; allowed: up to {_MOST_PIXELS}; make it smaller first"
        )
    if most is not None and width * height > most:
        raise RequestTooLarge(f"{name} has {width} x {height} pixels; allowed: up to {most:,}; make it smaller first")


def _upright(image: Image, name: str) -> Image:
    """Returns ``image``, or a copy that is turned as its EXIF orientation says."""
    from PIL import ExifTags, ImageOps

    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            return image
    except Exception as error:  # noqa: BLE001  (damaged EXIF data raise many kinds of errors)
        told = "%s: its EXIF data cannot be read (%s); the image is used as it is stored"
        logging.getLogger("triolet").warning(told, name, f"{type(error).__name__}: {error}")
        return image
    try:
        return ImageOps.exif_transpose(image)
    except Exception as error:
        raise UnsupportedImage(
            f"{name} cannot be rotated as its EXIF orientation says ({type(error).__name__}: {error}); save it "
            "upright, without EXIF data"
        ) from error


def _in_8_bits(image: Image) -> Image:
    """Returns ``image`` with gray values of 8 bits: conversions of Pillow make white of all values above 255. Colours
    that are multiplied with their transparency become those that are not, since processors know only these."""
    from PIL import Image

    if image.mode in ("La", "RGBa"):
        return image.convert(image.mode.upper())
    if 0 in image.size or (image.mode not in ("I", "F") and not image.mode.startswith("I;16")):
        return image
    values = np.nan_to_num(np.asarray(image, np.float32), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    usual = {"F": (1.0, 255.0, 65_535.0), "I": (255.0, 65_535.0)}.get(image.mode, (65_535.0,))
    if low >= 0.0 and high <= usual[-1]:
        low, high = 0.0, next(most for most in usual if high <= most)
    values /= 2  # else the difference of two large ones overflows
    values -= low / 2
    values *= 510.0 / (high - low or 1.0)
    return Image.fromarray(np.round(values).astype(np.uint8))


def _unreadable(name: str, error: Exception) -> UnsupportedImage:
    from PIL import UnidentifiedImageError

    unknown = isinstance(error, UnidentifiedImageError)  # its text names our BytesIO object
    reason = "its format is not known" if unknown else f"{type(error).__name__}: {error}"
    return UnsupportedImage(
        f"{name} is not an image that can be read ({reason}); allowed: PNG, JPEG, WebP and all other formats of Pillow"
    )


def _checked(source: Any) -> NDArray[np.uint8]:
    try:
        pixels = np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(
            f"an image of the type {type(source).__name__} cannot be read as an array ({error}); allowed: {_KINDS}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InvalidRequest(
            f"an image array has the shape {pixels.shape} and the dtype {pixels.dtype}; allowed: uint8 of shape "
            "(height, width, 3)"
        )
    return np.ascontiguousarray(pixels)


def _read(source: Any) -> tuple[bytes, str]:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"{len(source)} bytes"
    if isinstance(source, str | PathLike):
        try:
            path = Path(fspath(source)).expanduser()
            return path.read_bytes(), str(path)
        except (OSError, ValueError, RuntimeError) as error:  # a null character; an unknown ~user
            raise InvalidRequest(f"{source} cannot be read ({error}); allowed: a readable image file") from error
    if hasattr(source, "read"):
        return read_all(source, "the image file"), "the image file"
    raise InvalidRequest(f"an image has the type {type(source).__name__}; allowed: {_KINDS}")

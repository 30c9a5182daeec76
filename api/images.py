"""Images as users have them: a path, bytes, a binary file, a PIL image or an array, read by Pillow."""

from __future__ import annotations

import io
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidRequest, UnsupportedImage

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Any  # what `load_image` takes

_MOST_PIXELS = 64_000_000  # of one image: 192 MB of RGB
_KINDS = "a path, bytes, a binary file, a PIL image, or a uint8 array of shape (height, width, 3)"


def load_image(source: Any) -> Image:
    """The image of ``source``. Its pixels are read here, so that nothing of it is read later.

    Blocking: call it in a worker thread from async code. A file object is read from where it stands to its end and left
    open. Orientation tags are not followed. What is not RGB is made so later, as the checkpoint's processor does it.

    Raises:
        InvalidRequest: no such file, or not a kind of source listed above.
        UnsupportedImage: not an image, damaged, or of more than 64 million pixels.
    """
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if hasattr(source, "__array__"):
        return Image.fromarray(_checked(np.asarray(source)))
    data, name = _read(source)
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise UnsupportedImage(
                    f"{name} has {width} x {height} pixels; allowed: up to {_MOST_PIXELS}; make it smaller first"
                )
            image.load()
            return image.copy()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, UnsupportedImage):
            raise
        raise UnsupportedImage(
            f"{name} is not an image that can be read ({_reason(error)}); allowed: PNG, JPEG, WebP and what else "
            "Pillow reads"
        ) from error


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # whose text is of an object of ours
        return "no format that is known"
    return f"{type(error).__name__}: {error}"


def _checked(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InvalidRequest(
            f"an image array of shape {pixels.shape} and {pixels.dtype}; allowed: uint8 of shape (height, width, 3)"
        )
    return np.ascontiguousarray(pixels)


def _read(source: Any) -> tuple[bytes, str]:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"{len(source)} bytes"
    if isinstance(source, str | PathLike):
        path = Path(fspath(source)).expanduser()
        try:
            return path.read_bytes(), str(path)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read ({error}); allowed: a readable image file") from error
    if hasattr(source, "read"):
        data = source.read()
        if isinstance(data, bytes):
            return data, "the image file"
        raise InvalidRequest(f"the image file gave {type(data).__name__}; allowed: a file opened in binary mode")
    raise InvalidRequest(f"an image of type {type(source).__name__}; allowed: {_KINDS}")

"""The sources of audio: a path, bytes, a binary file or an array, each checked and named for messages."""

from __future__ import annotations

import contextlib
import io
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from ...core.checks import Refused, as_integer
from ...core.errors import InvalidRequest, RequestTooLarge

Samples: TypeAlias = npt.NDArray[np.float32]
SampleArray: TypeAlias = npt.NDArray[np.floating] | npt.NDArray[np.int16]
AudioSource: TypeAlias = (
    str
    | os.PathLike[str]
    | bytes
    | bytearray
    | memoryview
    | IO[bytes]
    | npt.NDArray[np.floating]
    | tuple[SampleArray, int]
    | Mapping[str, Any]
    | "AudioTrack"
)

SAMPLING_RATE = 16_000  # Hz, Whisper's rate
MIN_SECONDS = 0.02  # one timestamp step of Whisper
MAX_PEAK = 100.0  # full scale is 1.0; float audio may exceed it a little, integers kept as floats exceed it a lot
RATES = (1_000, 768_000)  # Hz

TRACKS = "the number of an audio track, from 1 on, or its language ('en', 'eng', 'english')"
_ALLOWED = (
    "a path, bytes, a binary file object, or a 1-D float32 or float64 array, either without a rate (it then has the "
    "model's) or with its rate: (samples, rate) or {'array': samples, 'sampling_rate': rate}"
)
INLINE_SAMPLES = 1_000_000  # checking more samples would hold the loop up for over a millisecond
_CHECKED_AT_ONCE = 1 << 20  # samples: so that the check of a long array makes no copy of all of it
_KEYS = ("array", "sampling_rate")  # of a mapping, as the library `datasets` has them


@frozen
class NamedPath(os.PathLike[str]):
    """A file that messages call ``name``, since its path means nothing to their readers."""

    path: str
    name: str

    def __fspath__(self) -> str:
        return self.path


@frozen(eq=False)
class AudioTrack:
    """Audio of which one track is read: by its number, from 1 on, or by its language ("de", "deu", "german")."""

    source: Any
    track: int | str


@frozen(eq=False)
class ArraySource:
    """An array that can be read as audio: one dimension, float32, float64 or int16. ``rate`` is in Hz; ``None``: the
    caller gave no rate, so the array is taken to be at the wanted rate.
    """

    samples: npt.NDArray[Any]
    rate: int | None

    def part(self, start: int, stop: int) -> Samples:
        """Returns a float32 copy of samples ``start`` to ``stop``, full scale at 1.0."""
        found = self.samples[start:stop].astype(np.float32)
        return found if self.samples.dtype.kind == "f" else found / np.float32(full_scale(self.samples.dtype))


def with_rate(source: AudioSource, sampling_rate: int | None) -> AudioSource:
    """Returns ``source`` with the rate that the caller gave beside it (``sampling_rate=...``); ``None``: the caller
    gave none.

    Raises:
        InvalidRequest: a rate beside audio that has its own.
    """
    if sampling_rate is None:
        return source
    if hasattr(source, "__array__"):
        array: Any = source
        return array, sampling_rate
    raise InvalidRequest(
        f"sampling_rate={sampling_rate!r} is given with audio of the type {type_name(source)}; allowed: with an "
        "array. Leave it out: files, bytes, pairs and mappings have their own rate"
    )


def with_track(source: AudioSource, track: int | str | None) -> AudioSource:
    """Returns ``source`` with the track that is read (``audio_track=...``); ``None``: the default track.

    Raises:
        InvalidRequest: a track of an array, or no number and no language.
    """
    if track is None:
        return source
    try:
        found = read_track(track)
    except (Refused, ValueError):
        raise InvalidRequest(f"audio_track={track!r:.100}; allowed: {TRACKS}") from None
    if array_source(source) is not None:
        raise InvalidRequest(f"audio_track={track!r} is given with an array, which has no tracks; leave it out")
    return AudioTrack(source, found)


def read_track(value: Any) -> int | str:
    """Returns the number or the language of a track; raises `Refused` for all else."""
    if isinstance(value, str) and value.strip() and not value.strip().isdecimal():
        return value.strip()
    number = int(value) if isinstance(value, str) else as_integer(value)
    if number < 1:
        raise Refused
    return number


def is_pair(source: object) -> bool:
    """True if ``source`` is ``(samples, rate)``, which is one audio. Any other list or tuple may hold several."""
    return isinstance(source, tuple) and len(source) == 2 and _is_number(source[1])


def array_source(source: Any, what: str = "audio", *, int16: bool = False) -> ArraySource | None:
    """Returns ``source`` as an array with its rate, or ``None`` if it is a file, bytes, or something else.

    The values are checked by `check_all` instead, since that takes long for a long array.

    Args:
        what: the name of the source in messages.
        int16: an array without a rate may hold int16, too.

    Raises:
        InvalidRequest: a dtype or shape that is not allowed, a rate that no audio has, or a pair or mapping of
            something else.
    """
    if isinstance(source, Mapping):
        if missing := [key for key in _KEYS if key not in source]:
            raise InvalidRequest(
                f"{what} is a mapping without {' and '.join(map(repr, missing))} (keys: "
                f"{', '.join(map(repr, list(source)[:9])) or 'none'}); allowed: {_ALLOWED}"
            )
        return ArraySource(_array(source["array"], "the mapping's array", int16=True), _rate(source["sampling_rate"]))
    if isinstance(source, tuple) and len(source) == 2:
        if _is_number(source[0]) and hasattr(source[1], "__array__") and np.ndim(source[1]):
            raise InvalidRequest("audio is given as (rate, samples); allowed: (samples, rate). Swap the two")
        return ArraySource(_array(source[0], "the pair's first part", int16=True), _rate(source[1]))
    if hasattr(source, "__array__"):
        return ArraySource(_array(source, "the array", int16=int16), None)
    return None


def check_all(samples: npt.NDArray[Any], name: str) -> None:
    """Refuses an array with NaN, infinity or integers kept as floats, whatever its length."""
    if samples.dtype.kind == "f":
        for start in range(0, len(samples), _CHECKED_AT_ONCE):
            check_values(samples[start : start + _CHECKED_AT_ONCE], name, InvalidRequest, start)


class BytesFile(io.BytesIO):
    """A file in memory. A seek to a place before the file's beginning returns -1 and moves nothing, as ``lseek`` does.
    libsndfile tries that on damaged files, and an exception could not pass through libsndfile.
    """

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a position. Returns it, or -1 if it is before the beginning."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return -1


@contextlib.contextmanager
def opened(source: Any) -> Iterator[tuple[IO[bytes], str]]:
    """Yields a seekable binary file with the whole source, and its name for messages."""
    if isinstance(source, str | os.PathLike):
        name = source.name if isinstance(source, NamedPath) else repr(os.fspath(source))
        with _open_path(source, name) as file:
            is_seekable = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            yield file if is_seekable else BytesFile(read_all(file, name)), name
    elif isinstance(source, bytes | bytearray | memoryview):
        yield BytesFile(source), "the file"
    elif hasattr(source, "read"):
        name = "the audio file object"
        yield BytesFile(read_all(source, name)), name
    else:
        raise InvalidRequest(f"audio has the type {type_name(source)}; allowed: {_ALLOWED}")


def _open_path(source: str | os.PathLike[str], name: str) -> IO[bytes]:
    try:
        return open(source, "rb", buffering=0)  # libsndfile reads from the descriptor: nothing may read ahead
    except FileNotFoundError as error:
        hint = " (URLs are not fetched; download the file first)" if "://" in name else ""
        raise InvalidRequest(f"the path {name} does not exist{hint}; allowed: {_ALLOWED}") from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the path {name} cannot be opened ({error}); allowed: a readable audio file") from error


def read_all(file: Any, name: str) -> bytes:
    """Returns what a file object that messages call ``name`` has from its position to its end.

    Raises:
        InvalidRequest: it cannot be read, or is no binary file.
    """
    try:
        data = file.read()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be read ({error}); give a file that is open for reading") from error
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if hasattr(data, "__await__"):
        if hasattr(data, "close"):
            data.close()
        raise InvalidRequest(
            f"{name} is asynchronous; allowed: a plain binary file. Or await its read(), and give the bytes"
        )
    raise InvalidRequest(f"{name} returned {type_name(data)}; allowed: bytes. Open it in binary mode: open(path, 'rb')")


def type_name(value: object) -> str:
    """Returns the name of the type of ``value`` as it is imported, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# ---- arrays ----------------------------------------------------------------------------------------------------------


def _array(value: Any, what: str, *, int16: bool) -> npt.NDArray[Any]:
    """Returns an array of anything that numpy can read, such as a tensor on the CPU. ``int16`` allows int16, too: a
    caller who gives the rate knows the format."""
    if not hasattr(value, "__array__"):
        raise InvalidRequest(f"{what} is {type_name(value)}; allowed: a 1-D float32, float64 or int16 array")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{type_name(value)} cannot be read as an array ({error}); allowed: {_ALLOWED}") from error
    if array.dtype.kind in "iu" and not (int16 and array.dtype == np.int16):
        beside = ", or give (samples, rate)" if array.dtype == np.int16 else ""
        raise InvalidRequest(
            f"the array holds {array.dtype}; allowed: float32 or float64 with full scale at 1.0{beside}. "
            f"Convert: samples.astype(np.float32) / {full_scale(array.dtype)}"
        )
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and array.dtype.itemsize not in (4, 8)):
        raise InvalidRequest(
            f"the array holds {array.dtype}; allowed: float32 or float64. Convert: samples.astype(np.float32)"
        )
    if array.ndim != 1:
        raise InvalidRequest(
            f"the array has shape {array.shape}; allowed: one dimension, mono. "
            "Mix channels down first: samples.mean(axis=...) over the axis of the channels"
        )
    return array


def full_scale(dtype: np.dtype[Any]) -> int:
    """Returns the number by which integer samples are divided for full scale at 1.0."""
    bits = 8 * dtype.itemsize
    return int(2 ** (bits - 1))


# ---- checks ----------------------------------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _rate(value: Any) -> int:
    if not _is_number(value) or value != value // 1:
        raise InvalidRequest(f"the array's sampling rate is {value!r}; allowed: a whole number of Hz, such as 44100")
    check_rate(int(value), "the array's sampling rate", InvalidRequest)
    return int(value)


def check_rate(rate: int, what: str, error: type[InvalidRequest]) -> None:
    """Raises ``error`` for a rate that no audio has."""
    low, high = RATES
    if not low <= rate <= high:
        raise error(f"{what} is {rate} Hz; allowed: {low} to {high} Hz")


def check_values(
    samples: npt.NDArray[np.floating], name: str, error: type[InvalidRequest], offset: int = 0, most: float = MAX_PEAK
) -> None:
    """Refuses NaN, infinity, and a peak above ``most``, which integers kept as floats have. ``offset`` is the number of
    samples before ``samples``."""
    peak = float(np.abs(samples).max(initial=0.0))
    if not math.isfinite(peak):
        at = offset + int(np.flatnonzero(~np.isfinite(samples))[0])
        raise error(f"{name} has a sample that is NaN or infinite (number {at}); allowed: finite samples")
    if peak > most:
        raise error(
            f"{name} has a peak of {peak:g}; allowed: full scale at 1.0 (up to {most:g}). Divide integer samples by "
            "their full scale, 16-bit samples by 32768"
        )


def check_bound(seconds: float, name: str, most: float) -> None:
    """Raises `RequestTooLarge` for audio that has ``seconds`` or more, if that is more than ``most``."""
    if seconds > most:
        raise RequestTooLarge(
            f"{name} is too long; allowed: up to {most:.6g} s, but it has {seconds:.0f} s or more. Cut it into pieces"
        )


def check_length(count: int, name: str, rate: int) -> None:
    """Refuses ``count`` samples if they are too short for speech."""
    if not count:
        raise InvalidRequest(f"{name} has no samples; allowed: {MIN_SECONDS:g} s of audio or more")
    if count < round(MIN_SECONDS * rate):
        raise InvalidRequest(f"{name} lasts {count / rate:.4f} s; allowed: {MIN_SECONDS:g} s of audio or more")

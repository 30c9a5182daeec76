"""Audio in: any file, bytes or array becomes mono float32 samples at one rate.

libsndfile (soundfile) decodes the uncompressed formats and FLAC, whose damage it notices. FFmpeg's libraries (PyAV)
decode all other formats. MP3 and Ogg are among these, since libsndfile silently stops at the end of the first of
several joined streams, as in podcasts with inserted parts and in recorded radio. soxr resamples.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import stat
import struct
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from attrs import frozen

from ...core.errors import InvalidRequest, UnsupportedAudio

Samples: TypeAlias = npt.NDArray[np.float32]
AudioSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | npt.NDArray[np.floating]

SAMPLING_RATE = 16_000  # Hz, Whisper's rate
MIN_SECONDS = 0.02  # one timestamp step of Whisper
MAX_PEAK = 100.0  # full scale is 1.0; float audio may exceed it a little, integers kept as floats exceed it a lot
RATES = (1_000, 768_000)  # Hz

_ALLOWED = "a path, bytes, a binary file object, or a 1-D float32 or float64 array"
_BLOCK_FRAMES = 1 << 16
_UNKNOWN_SIZE = 0x7FFF_0000  # sizes from here to 2**32 - 1 come from programs that cannot seek back to fill the size in
_FOR_SOUNDFILE = (b"RIFF", b"RIFX", b"RF64", b"FORM", b"fLaC", b".snd", b"caff")  # first bytes of libsndfile's files
_INDEXED_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # their stated duration is no estimate
_DURATION_SLACK = 0.5  # seconds: encoder delay, padding, rounding to the container's time base


def load_audio(source: AudioSource, *, sampling_rate: int = SAMPLING_RATE) -> Samples:
    """Returns the audio of ``source`` as mono samples, float32, shape (n,), at ``sampling_rate`` Hz.

    Files and bytes may have any sampling rate and channels: channels are averaged, and soxr converts the rate. An
    array must be mono and at ``sampling_rate`` already; it is copied. The level is never changed. A file object is
    read from its position to its end and left open. MP3 and Ogg state no dependable length, so a file that was cut
    short is decoded up to its end. For other formats less audio than the header promises is an error.

    The whole audio is held in memory, 230 MB an hour at 16 kHz. Blocking: call it in a worker thread from async code.

    Raises:
        InvalidRequest: no such file, not a kind of source listed above, an array of another shape or dtype, samples
            that are NaN or infinite, less than `MIN_SECONDS` of audio.
        UnsupportedAudio: not audio, cut short, damaged, without an audio stream, empty.
    """
    _check_rate(sampling_rate, "sampling_rate", InvalidRequest)
    if hasattr(source, "__array__"):
        samples, name = _from_array(source), "the array"
    else:
        with _opened(source) as (file, name):
            try:
                samples = _decode(file, name, sampling_rate)
            except OSError as error:
                raise InvalidRequest(f"{name} cannot be read ({error}); allowed: a readable audio file") from error
    return _checked_length(samples, name, sampling_rate)


def content_key(samples: Samples, identity: str) -> str:
    """The key under which an encoding of ``samples`` is shared: 128 bits of BLAKE2b, in hexadecimal.

    ``samples`` are float32 of any shape. ``identity`` names the processor and the model that encode them.
    """
    if samples.dtype != np.float32:
        raise InvalidRequest(f"content_key of {samples.dtype} samples; allowed: float32")
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((identity, samples.shape)).encode())
    digest.update(np.ascontiguousarray(samples).data)
    return digest.hexdigest()


# ---- sources ---------------------------------------------------------------------------------------------------------


def _from_array(source: Any) -> Samples:
    """A float32 copy of a mono array (numpy's, or anything that numpy can read, such as a tensor on the CPU)."""
    try:
        array = np.asarray(source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{_type(source)} cannot be read as an array ({error}); allowed: {_ALLOWED}") from error
    if array.dtype.kind in "iu":
        raise InvalidRequest(
            f"the array holds {array.dtype}; allowed: float32 or float64 with full scale at 1.0. "
            f"Convert: samples.astype(np.float32) / {_full_scale(array.dtype)}"
        )
    if array.dtype.kind != "f" or array.dtype.itemsize not in (4, 8):
        raise InvalidRequest(
            f"the array holds {array.dtype}; allowed: float32 or float64. Convert: samples.astype(np.float32)"
        )
    if array.ndim != 1:
        raise InvalidRequest(
            f"the array has shape {array.shape}; allowed: one dimension, mono. "
            "Mix channels down first: samples.mean(axis=...) over the axis of the channels"
        )
    _check_values(array, "the array", InvalidRequest)
    return array.astype(np.float32)


def _full_scale(dtype: np.dtype[Any]) -> int:
    bits = 8 * dtype.itemsize
    return int(2 ** (bits - 1))


class _Bytes(io.BytesIO):
    """A file in memory. A seek before its beginning returns -1 and moves nothing, as ``lseek`` does. libsndfile tries
    that on damaged files, and an exception could not pass through libsndfile."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The new position, or -1."""
        try:
            return super().seek(offset, whence)
        except ValueError:
            return -1


@contextlib.contextmanager
def _opened(source: Any) -> Iterator[tuple[IO[bytes], str]]:
    """A seekable binary file with the whole source, and its name for messages."""
    if isinstance(source, str | os.PathLike):
        with _open_path(source) as (file, name):
            yield file, name
    elif isinstance(source, bytes | bytearray | memoryview):
        yield _Bytes(source), "the audio given as bytes"
    elif hasattr(source, "read"):
        yield _Bytes(_read_all(source)), "the audio file object"
    else:
        raise InvalidRequest(f"audio given as {_type(source)}; allowed: {_ALLOWED}")


@contextlib.contextmanager
def _open_path(source: str | os.PathLike[str]) -> Iterator[tuple[IO[bytes], str]]:
    name = repr(os.fspath(source))
    try:
        file = open(source, "rb", buffering=0)  # noqa: SIM115  (libsndfile reads from the descriptor: nothing may read ahead)
    except FileNotFoundError as error:
        hint = " (URLs are not fetched: download it first)" if "://" in name else ""
        raise InvalidRequest(f"the path {name} does not exist{hint}; allowed: {_ALLOWED}") from error
    except IsADirectoryError as error:
        raise InvalidRequest(f"the path {name} is a directory; allowed: an audio file") from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the path {name} cannot be opened ({error}); allowed: a readable audio file") from error
    with file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            yield file, name
        else:
            yield _Bytes(_read_all(file)), name


def _read_all(file: Any) -> bytes:
    try:
        data = file.read()
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the audio file object cannot be read ({error}); give one that is open for reading"
        ) from error
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    if hasattr(data, "__await__"):
        if hasattr(data, "close"):
            data.close()
        raise InvalidRequest(
            "the file object is asynchronous; allowed: a plain binary file, or await its read() and give the bytes"
        )
    raise InvalidRequest(
        f"the file object gave {_type(data)}; allowed: bytes. Open it in binary mode: open(path, 'rb')"
    )


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_rate(rate: int, what: str, error: type[InvalidRequest]) -> None:
    low, high = RATES
    if not low <= rate <= high:
        raise error(f"{what} is {rate} Hz; allowed: {low} to {high} Hz")


def _check_values(samples: npt.NDArray[np.floating], name: str, error: type[InvalidRequest], offset: int = 0) -> None:
    """Refuses NaN, infinity and integers kept as floats. ``offset``: how many samples came before ``samples``."""
    peak = float(np.abs(samples).max(initial=0.0))
    if not math.isfinite(peak):
        at = offset + int(np.flatnonzero(~np.isfinite(samples))[0])
        raise error(f"{name} holds a sample that is NaN or infinite (number {at}); allowed: finite samples")
    if peak > MAX_PEAK:
        raise error(
            f"{name} has a peak of {peak:g}; allowed: full scale at 1.0 (up to {MAX_PEAK:g}). "
            "Samples that were integers are divided by their full scale: 16-bit ones by 32768"
        )


def _checked_length(samples: Samples, name: str, rate: int) -> Samples:
    if not len(samples):
        raise InvalidRequest(f"{name} has no samples; allowed: {MIN_SECONDS:g} s of audio or more")
    if len(samples) < round(MIN_SECONDS * rate):
        raise InvalidRequest(f"{name} lasts {len(samples) / rate:.4f} s; allowed: {MIN_SECONDS:g} s of audio or more")
    return samples


# ---- decoding --------------------------------------------------------------------------------------------------------


class _Collector:
    """Turns frames into mono samples at another rate, block by block, so that only the result is large."""

    def __init__(self, name: str, rate: int, sampling_rate: int) -> None:
        _check_rate(rate, f"the sampling rate of {name}", UnsupportedAudio)
        self._name = name
        self.rate = rate
        self._blocks: list[Samples] = []
        self._resampler = None
        if rate != sampling_rate:
            self._resampler = soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")
        self.frames = 0

    def add(self, block: Samples) -> None:
        """Takes frames: shape (frames, channels)."""
        channels = block.shape[1]
        mono = block[:, 0] if channels == 1 else block @ np.full(channels, 1 / channels, np.float32)
        _check_values(mono, self._name, UnsupportedAudio, self.frames)
        self.frames += len(mono)
        self._blocks.append(self._resampler.resample_chunk(np.ascontiguousarray(mono)) if self._resampler else mono)

    def finish(self) -> Samples:
        """All samples, shape (n,), after at least one block."""
        if self._resampler:
            self._blocks.append(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        return np.concatenate(self._blocks)


def _decode(file: IO[bytes], name: str, sampling_rate: int) -> Samples:
    if not file.seek(0, os.SEEK_END):
        raise UnsupportedAudio(f"{name} is empty (0 bytes); allowed: an audio file")
    samples = _decode_soundfile(file, name, sampling_rate)
    return _decode_ffmpeg(file, name, sampling_rate) if samples is None else samples


def _decode_soundfile(file: IO[bytes], name: str, sampling_rate: int) -> Samples | None:
    """The samples; ``None``: no format for libsndfile."""
    if not _read_at(file, 0, 4).startswith(_FOR_SOUNDFILE):
        return None
    chunk = _data_chunk(file)
    file.seek(0)
    try:
        # By descriptor where there is one: libsndfile then reads by itself, and ignores misleading names ("x.raw").
        sound = soundfile.SoundFile(file if isinstance(file, _Bytes) else file.fileno(), closefd=False)
    except soundfile.LibsndfileError:
        return None
    with sound:
        if chunk is not None:
            chunk.check(name)
        # No frames: perhaps from a recorder that could not finish the header. FFmpeg ignores the header's size then.
        if not sound.frames or not sound.seekable():
            return None
        collector = _Collector(name, sound.samplerate, sampling_rate)
        try:
            for block in sound.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True):
                collector.add(block)
        except soundfile.LibsndfileError as error:
            raise _damaged(name, collector.frames / sound.samplerate, error) from error
        if collector.frames < sound.frames:
            raise _cut_short(name, f"{sound.frames} frames", f"{collector.frames}")
    return collector.finish()


def _decode_ffmpeg(file: IO[bytes], name: str, sampling_rate: int) -> Samples:
    import av

    file.seek(0)
    try:
        # A playlist must not make FFmpeg open other files or addresses.
        container = av.open(file, options={"protocol_whitelist": "none"}, metadata_errors="replace")
    except av.FFmpegError as error:
        raise UnsupportedAudio(
            f"{name} is not audio that can be decoded ({_reason(error)}); "
            "allowed: WAV, FLAC, Ogg, MP3, M4A, WebM and what else FFmpeg reads"
        ) from error
    with container:
        if not container.streams.audio:
            kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
            raise UnsupportedAudio(f"{name} has no audio stream (streams: {kinds}); allowed: a file with sound")
        return _decode_stream(container, container.streams.audio[0], name, sampling_rate)


def _decode_stream(container: Any, stream: Any, name: str, sampling_rate: int) -> Samples:
    """Decodes joined streams, each with its own rate and channels."""
    parts: list[Samples] = []
    collector: _Collector | None = None
    heard = end = 0.0  # seconds decoded; end of the last frame as the container counts
    for frame in _frames(container, stream, name):
        if collector is None or collector.rate != frame.sample_rate:
            parts += [collector.finish()] if collector else []
            collector = _Collector(name, frame.sample_rate, sampling_rate)
        collector.add(_block(frame, name))
        heard += frame.samples / frame.sample_rate
        end = max(end, heard, _end(frame))
    if collector is None:
        raise _without_samples(name)
    promised = _promised_seconds(container, stream)
    if promised is not None and end < promised - _DURATION_SLACK:
        raise _cut_short(name, f"{promised:.2f} s", f"{end:.2f} s")
    return np.concatenate([*parts, collector.finish()])


def _frames(container: Any, stream: Any, name: str) -> Iterator[Any]:
    """Decoded frames. Junk between two frames of an MP3 stream, where tags are common, is skipped. Any other packet
    that cannot be decoded is an error."""
    import av

    at = 0.0
    try:
        for packet in container.demux(stream):
            try:
                decoded = packet.decode()
            except av.FFmpegError:
                if container.format.name != "mp3":
                    raise
                continue
            for frame in decoded:
                at = _end(frame)
                yield frame
    except av.FFmpegError as error:
        raise _damaged(name, at, error) from error


def _block(frame: Any, name: str) -> Samples:
    """The frame's samples with full scale at 1.0, float32, shape (frames, channels)."""
    if frame.format.bytes == 8 and not frame.format.name.startswith("dbl"):
        raise UnsupportedAudio(f"{name} has 64-bit integer samples; allowed: integers up to 32 bits, or floats")
    array: npt.NDArray[Any] = frame.to_ndarray()  # planar: (channels, frames); packed: (1, frames * channels)
    block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    samples: Samples = block.astype(np.float32)
    if block.dtype.kind == "u":
        samples -= 128
    if block.dtype.kind != "f":
        samples /= _full_scale(block.dtype)
    return samples


def _end(frame: Any) -> float:
    """Seconds from the beginning of the stream to the end of ``frame``; 0 where the frame has no time."""
    if frame.pts is None or frame.time_base is None:
        return 0.0
    return float(frame.pts * frame.time_base + frame.samples / frame.sample_rate)


def _promised_seconds(container: Any, stream: Any) -> float | None:
    if container.format.name not in _INDEXED_CONTAINERS:
        return None
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration and len(container.streams) == 1:
        return float(container.duration) / 1e6
    return None


def _without_samples(name: str) -> UnsupportedAudio:
    return UnsupportedAudio(
        f"{name} has no samples, or was cut short before the first; allowed: {MIN_SECONDS:g} s of audio or more"
    )


def _damaged(name: str, seconds: float, error: Exception) -> UnsupportedAudio:
    return UnsupportedAudio(
        f"{name} is damaged or cut short: decoding failed after {seconds:.2f} s ({_reason(error)}). "
        "Transfer it anew, or repair it to accept the loss"
    )


def _cut_short(name: str, promised: str, found: str) -> UnsupportedAudio:
    return UnsupportedAudio(
        f"{name} is cut short: its header promises {promised}, found {found}. "
        "Transfer it anew, or repair it to accept the loss"
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "error_string", None) or error)


# ---- WAV and AIFF headers --------------------------------------------------------------------------------------------


@frozen
class _DataChunk:
    """Bytes of samples that a header promises, bytes that the file has, and the bytes of one frame."""

    promised: int
    found: int
    frame_bytes: int

    def check(self, name: str) -> None:
        """Raises where the file is cut short, which libsndfile ignores."""
        promised, found = self.promised // self.frame_bytes, self.found // self.frame_bytes
        if found < promised:
            raise _cut_short(name, f"{promised} frames", f"{found}")


def _data_chunk(file: IO[bytes]) -> _DataChunk | None:
    """The data chunk of a WAV (RIFF, RIFX, RF64) or AIFF file; ``None`` for other files and for an unknown size."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(12)
    order = {b"RIFF": "<", b"RF64": "<", b"RIFX": ">", b"FORM": ">"}.get(head[:4])
    if order is None or head[8:12] not in (b"WAVE", b"AIFF", b"AIFC"):
        return None
    frame_bytes, wide = 1, None
    at = 12
    while len(head := _read_at(file, at, 8)) == 8:
        kind, length = struct.unpack(order + "4sI", head)
        body = _read_at(file, at + 8, 16)
        if kind == b"ds64" and len(body) == 16:  # 64-bit sizes: of the file, of the data
            wide = struct.unpack("<8xQ", body)[0]
        elif kind == b"fmt " and len(body) == 16:
            frame_bytes = struct.unpack(order + "12xH2x", body)[0]
        elif kind == b"COMM" and len(body) == 16:
            channels, bits = struct.unpack(">H4xH8x", body)
            frame_bytes = channels * ((bits + 7) // 8)
        elif kind in (b"data", b"SSND"):
            promised = wide if wide is not None else length
            if wide is None and length >= _UNKNOWN_SIZE:
                return None
            skipped = 8 if kind == b"SSND" else 0  # its offset and block size
            return _DataChunk(promised - skipped, size - at - 8 - skipped, max(frame_bytes, 1))
        at += 8 + length + length % 2
    return None


def _read_at(file: IO[bytes], position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)

"""Decoders, which turn files into frames: libsndfile for the uncompressed formats and FLAC, FFmpeg for all others.

libsndfile (soundfile) reports the frame at which a FLAC is damaged, while FFmpeg silently skips the damaged frames. It
also reads uncompressed files ten times as fast. MP3 and Ogg are decoded by FFmpeg (PyAV): if a file joins several
streams, as podcasts with inserted parts and recorded radio do, libsndfile silently stops after the first one.

A decoder is an iterator of parts: (rate in Hz, frames as float32 of shape (frames, channels), full scale at 1.0). A
part lasts about a second, so that only audio that was asked for is in memory. If the file breaks in the middle, the
decoder yields all frames before the break, then raises `UnsupportedAudio`. All functions block: call them in a worker
thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import soundfile
from attrs import frozen

from ...core.errors import UnsupportedAudio
from .sources import MIN_SECONDS, BytesFile, Samples, full_scale
from .wav_header import DataChunk, data_chunk, read_at

Part: TypeAlias = tuple[int, Samples]

_FOR_SOUNDFILE = (b"RIFF", b"RIFX", b"RF64", b"FORM", b"fLaC", b".snd", b"caff")  # first bytes of libsndfile's files
_MOST_FRAMES = 1 << 16  # of one read
_INDEXED_CONTAINERS = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}  # their stated duration is no estimate
_DURATION_SLACK = 0.5  # seconds: encoder delay, padding, rounding to the container's time base


@frozen(eq=False)
class Decoding:
    """A file that is being decoded. ``seconds`` is the length that its header promises: exact for uncompressed formats
    and FLAC, an estimate for MP3 and Ogg, ``None`` if the header promises no length."""

    parts: Iterator[Part]
    seconds: float | None


def open_decoder(file: IO[bytes], name: str, stack: ExitStack) -> Decoding:
    """Returns the decoder of a seekable file. ``stack`` closes it.

    Raises:
        UnsupportedAudio: the file is not audio, has no audio stream, is empty, or is cut short before the first sample.
        OSError: the file cannot be read. The iterator may raise this error too.
    """
    if not file.seek(0, os.SEEK_END):
        raise UnsupportedAudio(f"{name} is empty (0 bytes); allowed: an audio file")
    return _open_soundfile(file, name, stack) or _open_ffmpeg(file, name, stack)


# ---- libsndfile ------------------------------------------------------------------------------------------------------


def _open_soundfile(file: IO[bytes], name: str, stack: ExitStack) -> Decoding | None:
    """Opens the file with libsndfile. Returns ``None`` if its format is not for libsndfile."""
    if not read_at(file, 0, 4).startswith(_FOR_SOUNDFILE):
        return None
    chunk = data_chunk(file)
    file.seek(0)
    try:
        # By descriptor if there is one: libsndfile then reads by itself, and ignores misleading names ("x.raw").
        sound = soundfile.SoundFile(file if isinstance(file, BytesFile) else file.fileno(), closefd=False)
    except soundfile.LibsndfileError:
        return None
    stack.callback(sound.close)
    if sound.frames and sound.seekable():
        return Decoding(_soundfile_parts(sound, name, chunk), sound.frames / sound.samplerate)
    if chunk is not None:
        _check_chunk(chunk, name)
    return None  # a recorder may have left the header unfinished: FFmpeg then ignores the size in it


def _soundfile_parts(sound: Any, name: str, chunk: DataChunk | None) -> Iterator[Part]:
    rate: int = sound.samplerate
    done = 0
    while done < sound.frames:
        frames = np.zeros((min(rate, _MOST_FRAMES), sound.channels), np.float32)
        fault: UnsupportedAudio | None = None
        try:
            count = len(sound.read(dtype="float32", always_2d=True, out=frames))
        except soundfile.LibsndfileError as error:
            count = _filled(sound, done, len(frames))
            fault = _damaged(name, (done + count) / rate, error)
            fault.__cause__ = error
        if count:
            yield rate, frames[:count]
        if fault is not None:
            try:
                raise fault
            finally:
                del fault  # this frame is in its traceback
        done += count
        if not count:
            break
    if done < sound.frames:
        raise _cut_short(name, f"{sound.frames} frames", f"{done}")
    if chunk is not None:
        _check_chunk(chunk, name)


def _filled(sound: Any, done: int, most: int) -> int:
    """Returns the number of frames that a failed read has put into its array. The file's position has moved by this
    number.
    """
    try:
        moved = int(sound.tell()) - done
    except soundfile.LibsndfileError:
        return 0
    return min(max(moved, 0), most)


def _check_chunk(chunk: DataChunk, name: str) -> None:
    if chunk.found < chunk.promised:
        raise _cut_short(name, f"{chunk.promised} frames", f"{chunk.found}")


# ---- FFmpeg ----------------------------------------------------------------------------------------------------------


def _open_ffmpeg(file: IO[bytes], name: str, stack: ExitStack) -> Decoding:
    import av

    file.seek(0)
    try:
        # A playlist must not make FFmpeg open other files or addresses.
        container = av.open(file, options={"protocol_whitelist": "none"}, metadata_errors="replace")
    except av.FFmpegError as error:
        raise UnsupportedAudio(
            f"{name} is not audio that can be decoded ({_reason(error)}); allowed: WAV, FLAC, Ogg, MP3, M4A, WebM "
            "and all other formats of FFmpeg"
        ) from error
    stack.callback(container.close)
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        raise UnsupportedAudio(f"{name} has no audio stream (streams: {kinds}); allowed: a file with sound")
    stream = container.streams.audio[0]
    seconds = _stated_seconds(container, stream)
    return Decoding(_gathered(_ffmpeg_parts(container, stream, name)), seconds)


def _gathered(parts: Iterator[Part]) -> Iterator[Part]:
    """Joins ``parts``, which last 20 ms or so each, into parts of about a second."""
    rate, held = 0, [np.zeros((0, 0), np.float32)]
    try:
        for next_rate, frames in parts:
            alike = next_rate == rate and frames.shape[1] == held[0].shape[1]
            if alike and sum(map(len, held)) < rate:
                held.append(frames)
                continue
            if rate:
                yield rate, np.concatenate(held)
            rate, held = next_rate, [frames]
    except (UnsupportedAudio, OSError):
        if rate:
            yield rate, np.concatenate(held)
        raise
    if rate:
        yield rate, np.concatenate(held)


def _ffmpeg_parts(container: Any, stream: Any, name: str) -> Iterator[Part]:
    """Yields the frames of joined streams, each stream with its own rate and channels."""
    heard = end = 0.0  # seconds decoded; end of the last frame as the container counts
    for frame in _frames(container, stream, name):
        yield frame.sample_rate, _samples(frame, name)
        heard += frame.samples / frame.sample_rate
        end = max(end, heard, _end(frame))
    if not heard:
        raise UnsupportedAudio(
            f"{name} has no samples, or was cut short before the first sample; allowed: {MIN_SECONDS:g} s of "
            "audio or more"
        )
    promised = _stated_seconds(container, stream) if container.format.name in _INDEXED_CONTAINERS else None
    if promised is not None and end < promised - _DURATION_SLACK:
        raise _cut_short(name, f"{promised:.2f} s", f"{end:.2f} s")


def _frames(container: Any, stream: Any, name: str) -> Iterator[Any]:
    """Yields decoded frames. Junk between two frames of an MP3 stream, where tags are common, is skipped. Any other
    packet that cannot be decoded is an error."""
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


def _samples(frame: Any, name: str) -> Samples:
    """Returns the frame's samples with full scale at 1.0, float32, shape (frames, channels)."""
    if frame.format.bytes == 8 and not frame.format.name.startswith("dbl"):
        raise UnsupportedAudio(f"{name} has 64-bit integer samples; allowed: integers up to 32 bits, or floats")
    array: npt.NDArray[Any] = frame.to_ndarray()  # planar: (channels, frames); packed: (1, frames * channels)
    block = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    samples: Samples = block.astype(np.float32)
    if block.dtype.kind == "u":
        samples -= 128
    if block.dtype.kind != "f":
        samples /= full_scale(block.dtype)
    return samples


def _end(frame: Any) -> float:
    """Returns the seconds from the beginning of the stream to the end of ``frame``, or 0 if the frame has no time."""
    if frame.pts is None or frame.time_base is None:
        return 0.0
    return float(frame.pts * frame.time_base + frame.samples / frame.sample_rate)


def _stated_seconds(container: Any, stream: Any) -> float | None:
    if stream.duration:
        return float(stream.duration * stream.time_base)
    if container.duration and len(container.streams) == 1:
        return float(container.duration) / 1e6
    return None


# ---- errors ----------------------------------------------------------------------------------------------------------


def _damaged(name: str, seconds: float, error: Exception) -> UnsupportedAudio:
    return UnsupportedAudio(
        f"{name} is damaged or cut short: decoding failed after {seconds:.2f} s ({_reason(error)}). Copy or download "
        "the file again, or repair it and accept the loss"
    )


def _cut_short(name: str, promised: str, found: str) -> UnsupportedAudio:
    return UnsupportedAudio(
        f"{name} is cut short: its header promises {promised}, but it has {found}. Copy or download the file again, "
        "or repair it and accept the loss"
    )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or getattr(error, "error_string", None) or error)

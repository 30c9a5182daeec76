"""Decoders, which turn files into frames: libsndfile for uncompressed formats, FFmpeg (PyAV) for all others.

libsndfile knows more of the old formats for uncompressed files, and their lengths in samples. Of compressed files it
would give up what follows the first damage, or the first of several joined streams.

A decoder is an iterator of parts: (seconds of silence before it, rate in Hz, frames as float32 of shape (frames,
channels), full scale at 1.0). A part lasts about a second, so that only audio that was asked for is in memory. A part
without frames is a moment at which the caller may stop. Times are those of the file, see `Timeline`. What cannot be
decoded becomes silence, and is told in the `FaultLog`. Only a file that can give nothing more raises `UnsupportedAudio`
or `OSError`, after all that could be read. All functions block: call them in a worker thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import soundfile
from attrs import frozen

from ...core.errors import InvalidRequest, UnsupportedAudio
from ...core.languages import is_language
from .containers import Joined, Stopped, Watch, lacks, mp3_frames, ogg_samples, read_at, short_of
from .sources import MIN_SECONDS, RATES, BytesFile, Samples, check_rate, full_scale
from .timeline import AudioFault, FaultLog, Timeline

Part: TypeAlias = tuple[float, int, Samples]

_FOR_SOUNDFILE = (b"RIFF", b"RIFX", b"RF64", b"FORM", b".snd", b"caff")  # first bytes of libsndfile's files
_MOST_FRAMES = 1 << 16  # of one read
_MOST_HELD = 512  # frames of FFmpeg in a part
_STATED = {  # the containers whose duration is stated, no estimate
    "mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "flac", "avi", "flv", "w64", "asf", "wv", "tta", "ape", "caf"
}  # fmt: skip
_EACH_STATED = {"mov,mp4,m4a,3gp,3g2,mj2", "avi"}  # those that state the duration of each stream
_SLACK = 0.15  # seconds: encoder delay, padding, rounding to the container's time base
_OTHERS_SLACK = 0.5  # seconds: a picture may be shown so long
_EXACT = {"flac", "w64", "caf", "wv", "tta", "ape"}  # containers that count samples
_CLOCK_JUMPS = {"mpegts": 10.0, "mpeg": 10.0}  # seconds: broadcasts set their clock, as FFmpeg's dts_delta_threshold
_LONGEST_GAP = 30 * 3600.0  # seconds: FFmpeg's dts_error_threshold
_MOST_ERRORS = 64  # of the demuxer, one after the other
_NO_FRAMES = np.zeros((0, 1), np.float32)


@frozen(eq=False)
class Decoding:
    """A file that is being decoded.

    Attributes:
        seconds: the length that its header promises; ``None`` if it promises no length.
        is_stated: the header states ``seconds``; those for Ogg and for most MP3 files are an estimate.
        timeline: the times of what was decoded.
    """

    parts: Iterator[Part]
    seconds: float | None
    is_stated: bool
    timeline: Timeline[Any]


def open_decoder(
    file: IO[bytes], faults: FaultLog, stack: ExitStack, track: int | str | None, watch: Watch
) -> Decoding:
    """Returns the decoder of a seekable file. ``stack`` closes it. ``track`` is the number of an audio track, from 1
    on, or its language; ``None``: the one that the file marks as its default, or the first. The iterator raises
    `Stopped` if ``watch`` has stopped it: the decoder must be opened again.

    Raises:
        UnsupportedAudio: the file is not audio, has no audio stream, or is empty.
        InvalidRequest: the file has no such track.
        OSError: the file cannot be read. The iterator may raise this error too.
    """
    if not file.seek(0, os.SEEK_END):
        raise UnsupportedAudio(f"{faults.name} is empty (0 bytes); allowed: an audio file")
    return _open_soundfile(file, faults, stack, track) or _open_ffmpeg(file, faults, stack, track, watch)


# ---- libsndfile ------------------------------------------------------------------------------------------------------


def _open_soundfile(file: IO[bytes], faults: FaultLog, stack: ExitStack, track: int | str | None) -> Decoding | None:
    """Opens the file with libsndfile. Returns ``None`` if its format is not for libsndfile."""
    if not read_at(file, 0, 4).startswith(_FOR_SOUNDFILE):
        return None
    sizes = short_of(file)
    file.seek(0)
    try:
        # By descriptor if there is one: libsndfile then reads by itself, and ignores misleading names ("x.raw").
        sound = soundfile.SoundFile(file if isinstance(file, BytesFile) else file.fileno(), closefd=False)
    except soundfile.LibsndfileError:
        return None
    stack.callback(sound.close)
    if sound.frames and sound.seekable():
        if track not in (None, 1):
            raise _no_track(faults.name, track, "only one, which has no language")
        seconds = sound.frames / sound.samplerate
        return Decoding(_soundfile_parts(sound, faults, sizes), seconds, True, Timeline(faults))
    return None  # a recorder may have left the header unfinished: FFmpeg then ignores the size in it


def _soundfile_parts(sound: Any, faults: FaultLog, sizes: tuple[int, int] | None) -> Iterator[Part]:
    rate, done = int(sound.samplerate), 0
    while done < sound.frames:
        frames = np.zeros((min(rate, _MOST_FRAMES), sound.channels), np.float32)
        try:
            count = len(sound.read(dtype="float32", always_2d=True, out=frames))
        except soundfile.LibsndfileError:
            count = 0
        if not count:
            break
        yield 0.0, rate, frames[:count]
        done += count
    if sizes is not None:
        stated, found = sizes
        faults.cut_short(f"{stated:,} bytes", f"{found:,}", done / rate, done / rate * stated / found)
    elif done < sound.frames:
        faults.cut_short(f"{sound.frames:,} frames", f"{done:,}", done / rate, sound.frames / rate)


# ---- FFmpeg ----------------------------------------------------------------------------------------------------------


def _open_ffmpeg(
    file: IO[bytes], faults: FaultLog, stack: ExitStack, track: int | str | None, watch: Watch
) -> Decoding:
    opened = _Opened.of(Joined(file, watch), faults.name, stack, track)
    streams, start = opened.container.streams.audio, opened.start
    if track is None and len(streams) > 1:
        number = list(streams).index(opened.stream) + 1
        told = f"{faults.name} has {_tracks(streams)}; number {number} is read, audio_track chooses another"
        faults.tell(AudioFault(0.0, 0.0, "tracks", told, is_loss=False))
    if start >= _SLACK and opened.name in {*_STATED, "ogg"}:
        told = f"{faults.name} begins at {start:.2f} s by its own times, which are counted from there"
        faults.tell(AudioFault(0.0, 0.0, "gap", told, is_loss=False))
    timeline: Timeline[Any] = Timeline(faults)
    parts = _gathered(_placed(opened, timeline, stack, track), faults.name)
    return Decoding(parts, opened.seconds, opened.is_stated, timeline)


def _placed(
    opened: _Opened, timeline: Timeline[Any], stack: ExitStack, track: int | str | None
) -> Iterator[tuple[float, Any]]:
    """Yields the frames of joined recordings, each with the silence before it. ``None`` in place of a frame is a moment
    at which the caller may stop."""
    faults, recording = timeline.faults, opened.recording
    yield from opened.frames(timeline)
    while (following := recording.next()) is not None:
        recording = following
        try:
            opened = _Opened.of(recording, faults.name, stack, track)
        except InvalidRequest:
            faults.add("damaged", timeline.end, timeline.end)
            continue
        faults.add("joined", timeline.end, timeline.end)
        yield from opened.frames(timeline)
    if not timeline.end:
        raise UnsupportedAudio(
            f"{faults.name} has no samples, or was cut short before the first sample; allowed: {MIN_SECONDS:g} s of "
            "audio or more"
        )


@frozen(eq=False)
class _Opened:
    """A recording that FFmpeg has opened. Times are in seconds from its beginning.

    Attributes:
        stream: the audio stream that is read.
        name: FFmpeg's name of the container.
        start: the beginning by the file's own clock. A whole FLAC counts from its first sample.
        seconds: the end of the audio by the header; ``None``: the header does not say it.
        is_stated: ``seconds`` is no estimate.
        whole: the end of the longest stream by the header; 0: the header does not say it.
    """

    recording: Joined
    container: Any
    stream: Any
    name: str
    start: float
    seconds: float | None
    is_stated: bool
    whole: float

    @classmethod
    def of(cls, recording: Joined, file_name: str, stack: ExitStack, track: int | str | None) -> _Opened:
        """Opens a recording, and chooses its stream."""
        import av

        try:
            # A playlist must not make FFmpeg open other files or addresses.
            container = av.open(recording, "r", options={"protocol_whitelist": "none"}, metadata_errors="replace")
        except av.FFmpegError as error:
            raise UnsupportedAudio(
                f"{file_name} is not audio that can be decoded ({error.strerror}); allowed: WAV, FLAC, Ogg, MP3, M4A, "
                "WebM and all other formats of FFmpeg"
            ) from error
        stack.callback(container.close)
        stream, name = _chosen(container, file_name, track), container.format.name
        start = 0.0 if name == "flac" and stream.duration else (container.start_time or 0) / 1e6
        whole = (container.duration or 0) / 1e6 - start if name in _STATED else 0.0
        return cls(recording, container, stream, name, start, *_stated(recording, container, stream, start), whole)

    def frames(self, timeline: Timeline[Any]) -> Iterator[tuple[float, Any]]:
        """Yields the frames of the recording, tells if it ends too early, and closes it."""
        begin, base, start = timeline.end, float(self.stream.time_base), self.start
        codec = self.stream.codec_context
        block = int.from_bytes((codec.extradata or b"")[:2], "big") if self.name == "flac" else 0  # samples of a frame
        lenient = _lenient(codec) if codec.name == "flac" else None
        due, others, read, lost, torn = 0, 0.0, 0, 0.0, False
        end = max(self.seconds or 0.0, self.whole)
        timeline.latest = begin + end + _SLACK if self.is_stated or self.whole else math.inf
        timeline.most_gap = _CLOCK_JUMPS.get(self.name, _LONGEST_GAP)
        watch = self.recording.watch
        for packet in _packets(self.container, timeline):
            if watch.stopped:
                break
            watch.searched = 0
            yield 0.0, None
            if packet is None:
                continue
            read += packet.size
            torn = packet.is_corrupt if packet.size else torn  # of any stream: it may have been sound
            if packet.stream is not self.stream:  # `stream_index` of the last one is always 0
                if packet.pts is not None and packet.duration is not None:  # it may go on to the end
                    reached = float((packet.pts + packet.duration) * packet.time_base) - start
                    others = max(others, reached if reached <= self.whole + _OTHERS_SLACK else 0.0)
                continue
            sample = _flac_sample(packet, block) if block else None
            time = packet.pts if sample is None else sample  # of the first frame, if it has none by itself
            found = _decoded(codec, packet, timeline)
            if lenient is not None and time is not None:
                noise = [] if found else _decoded(lenient, packet, timeline)
                lost = time * base - start + sum(frame.samples / frame.sample_rate for frame in noise)
            for frame in found:
                if sample is not None:  # frames of FLAC are numbered without gaps
                    timeline.is_hurt |= sample > due
                    due = sample
                due += frame.samples
                pts = time if sample is not None or frame.pts is None else frame.pts
                placed = None if pts is None else pts * base - start
                yield from timeline.add(placed, frame.samples / frame.sample_rate, frame)
                sample = time = None
        if watch.stopped:  # before frames are placed that wait for the next ones
            raise Stopped
        timeline.is_hurt |= torn
        yield from timeline.finish(min(lost, end))
        self._check_end(timeline, begin, begin + others, read)
        self.container.close()

    def _check_end(self, timeline: Timeline[Any], begin: float, others: float, read: int) -> None:
        """Adds a fault if the recording, which begins at ``begin``, ends before its stated end. Streams that are not
        read end at ``others``; all packets had ``read`` bytes."""
        faults, end, is_last = timeline.faults, timeline.end, self.recording.next() is None
        is_stated = self.is_stated or (self.name == "ogg" and is_last and not begin)  # by the last page
        stated = begin + self.seconds if is_stated and self.seconds is not None else 0.0
        if end < stated - (0.01 if self.name in _EXACT else _SLACK):
            faults.cut_short(f"{stated:.2f} s", f"{end:.2f} s", end, stated)
        elif max(end, others) < begin + self.whole - _OTHERS_SLACK:
            faults.cut_short(f"{begin + self.whole:.2f} s", f"{max(end, others):.2f} s", end, begin + self.whole)
        elif is_last and (lack := lacks(self.recording, self.name, read)) is not None:
            faults.cut_short(*lack, end, end)


def _chosen(container: Any, name: str, track: int | str | None) -> Any:
    """Returns the audio stream that is read: the track, else the default one, else the first."""
    streams = container.streams.audio
    if not streams:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        raise UnsupportedAudio(f"{name} has no audio stream (streams: {kinds}); allowed: a file with sound")
    if isinstance(track, int):
        fitting = streams[track - 1 : track]
    else:
        fitting = tuple(one for one in streams if track is None or is_language(one.language, track))
    if not fitting:
        raise _no_track(name, track, _tracks(streams))
    stream = next((one for one in fitting if _is_default(one)), fitting[0])
    codec = stream.codec_context
    if codec is None:
        raise UnsupportedAudio(f"{name} has audio of a codec that FFmpeg does not know; convert it, such as to WAV")
    if codec.sample_rate:
        check_rate(codec.sample_rate, f"the sampling rate of {name}", UnsupportedAudio)
    if codec.name == "flac":
        codec.options = {"err_detect": "crccheck+explode"}  # else damaged frames become noise
    return stream


def _tracks(streams: Any) -> str:
    """Returns the tracks, for messages."""
    told = [
        f"{number} {one.language or 'without language'}" + " (default)" * _is_default(one)
        for number, one in enumerate(streams, 1)
    ]
    return f"{len(told)} audio track{'s' * (len(told) > 1)}: {', '.join(told)}"


def _stated(recording: Joined, container: Any, stream: Any, start: float) -> tuple[float | None, bool]:
    """Returns the end of the audio by the header, in seconds from ``start``, and whether it is no estimate."""
    name, is_alone = container.format.name, len(container.streams) == 1
    if name == "mp3" and (frames := mp3_frames(recording)):
        rate = stream.codec_context.sample_rate
        return frames * (1152 if rate >= 32_000 else 576) / rate, True
    if name == "ogg" and is_alone and (samples := ogg_samples(recording)):
        return float(samples * stream.time_base) - start, False
    # Of several streams FFmpeg gives those without a duration the longest one, except where each has its own.
    if stream.duration and (is_alone or name in _EACH_STATED):
        first = 0 if name == "flac" else stream.start_time or 0
        return float((first + stream.duration) * stream.time_base) - start, name in _STATED
    if container.duration and is_alone:
        return container.duration / 1e6 - start, name in _STATED
    return None, False


def _packets(container: Any, timeline: Timeline[Any]) -> Iterator[Any]:
    """Yields the packets of all streams, and ``None`` where FFmpeg cannot read on at once."""
    import av

    errors = 0
    while errors <= _MOST_ERRORS:
        try:
            for packet in container.demux():
                errors = 0
                yield packet
        except IndexError:  # PyAV 18 raises it at the end of a file in which streams have appeared, after all packets
            return
        except av.FFmpegError:
            errors, timeline.is_hurt = errors + 1, True
            yield None
        else:
            return


def _decoded(codec: Any, packet: Any, timeline: Timeline[Any]) -> list[Any]:
    import av

    try:
        timeline.is_hurt |= packet.is_corrupt
        frames: list[Any] = codec.decode(packet)
    except av.FFmpegError:
        timeline.is_hurt = True
        return []
    sound = [frame for frame in frames if frame.samples and RATES[0] <= frame.sample_rate <= RATES[1]]
    timeline.is_hurt |= len(sound) < len([frame for frame in frames if frame.samples])
    return sound


def _gathered(frames: Iterator[tuple[float, Any]], name: str) -> Iterator[Part]:
    """Joins frames, which last 20 ms or so each, into parts of about a second."""
    held: list[npt.NDArray[Any]] = []  # each of shape (frames, channels)
    first, rate, count = 0.0, 0, 0
    for gap, frame in frames:
        if frame is None:
            if gap:  # after the last frame
                yield from _parts(first, rate, held)
                held = []
            yield gap, rate, _NO_FRAMES
            continue
        block = _block(frame, name)
        alike = held and not gap and frame.sample_rate == rate and held[0].shape[1:] == block.shape[1:]
        if not alike or held[0].dtype != block.dtype or count >= rate or len(held) >= _MOST_HELD:
            yield from _parts(first, rate, held)
            held, first, rate, count = [], gap, frame.sample_rate, 0
        held.append(block)
        count += len(block)
    yield from _parts(first, rate, held)


def _parts(gap: float, rate: int, held: list[npt.NDArray[Any]]) -> Iterator[Part]:
    """Yields the samples with full scale at 1.0, float32."""
    block = np.concatenate(held) if held else _NO_FRAMES
    for start in range(0, len(block), max(2 * rate, _MOST_FRAMES)):  # a frame may be as long as the file
        samples: Samples = block[start : start + max(2 * rate, _MOST_FRAMES)].astype(np.float32)
        if block.dtype.kind == "u":
            samples -= 128
        if block.dtype.kind != "f":
            samples /= full_scale(block.dtype)
        yield gap if not start else 0.0, rate, samples


def _block(frame: Any, name: str) -> npt.NDArray[Any]:
    """Returns the frame's samples, of shape (frames, channels)."""
    if frame.format.bytes == 8 and not frame.format.name.startswith("dbl"):
        raise UnsupportedAudio(f"{name} has 64-bit integer samples; allowed: integers up to 32 bits, or floats")
    array: npt.NDArray[Any] = frame.to_ndarray()  # planar: (channels, frames); packed: (1, frames * channels)
    return array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)


# ---- what the containers say -----------------------------------------------------------------------------------------


def _is_default(stream: Any) -> bool:
    return bool(stream.disposition & stream.disposition.default)


def _lenient(flac: Any) -> Any:
    """Returns a decoder that makes noise of a damaged FLAC frame, which is as long as the frame was."""
    import av

    decoder = av.CodecContext.create("flac", "r")
    decoder.extradata = flac.extradata
    return decoder


def _flac_sample(packet: Any, block: int) -> int | None:
    """Returns the place of a FLAC frame in samples, by its own number (RFC 9639, section 9.1.5). FFmpeg counts the
    frames that it finds, so a lost one would move all others."""
    head = bytes(memoryview(packet)[:13]) if packet.size else b""
    if len(head) < 9 or head[0] != 0xFF or head[1] & 0xFC != 0xF8:
        return None
    ones = 8 - (head[4] ^ 0xFF).bit_length()
    number = head[4] & 0x7F >> ones
    for byte in head[5 : 4 + max(ones, 1)]:
        number = number << 6 | byte & 63
    return number if head[1] & 1 else number * block


# ---- errors ----------------------------------------------------------------------------------------------------------


def _no_track(name: str, track: int | str | None, tracks: str) -> InvalidRequest:
    return InvalidRequest(f"audio_track={track!r}, but {name} has {tracks}; allowed: a number or language of these")

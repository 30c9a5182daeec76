"""Recordings: audio of hours, read window by window out of bounded memory; what breaks in the middle; every way out."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import struct
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import AudioSource, Blocks, Samples, load_audio, open_blocks
from triolet.api.inputs.containers import Stops
from triolet.api.inputs.decoding import Decoding
from triolet.api.inputs.recording import Recording
from triolet.core.errors import InvalidRequest, UnsupportedAudio

from .films import RATE, encode, mux, mux_into, tone


def noise(seconds: float, rate: int = RATE) -> np.ndarray:
    return (0.2 * np.random.default_rng(7).standard_normal(round(seconds * rate))).astype(np.float32)


def sparse_wav(path: Path, seconds: int, rate: int, channels: int) -> Path:
    """A WAV of silence that takes no room on the disk."""
    size = seconds * rate * 2 * channels
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", size + 36, b"WAVE", b"fmt ", 16, 1, channels, rate,
                         rate * 2 * channels, 2 * channels, 16, b"data", size)  # fmt: skip
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return path


async def everything(source: AudioSource, *, size: int = RATE, **options: Any) -> tuple[Samples, str | None]:
    """The samples, window by window, and what `Recording.broken` said at the end."""
    parts, start = [], 0
    async with Recording(source, **options) as recording:
        while len(part := await recording.window(start, size)):
            parts.append(part)
            start += len(part)
            recording.forget(start)
        assert recording.length == start
        assert recording.duration == start / recording.sampling_rate
        return np.concatenate(parts), recording.broken


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, RATE, 7 * RATE])
async def test_windows_are_exactly_those_of_load_audio(size: int) -> None:
    """Clipped at both ends of the scale; floats, quiet and above full scale; compressed audio; another rate."""
    clipped = encode(np.clip(noise(5) * 3, -1, 32767 / 32768), kind="FLAC")
    assert (load_audio(clipped).min(), load_audio(clipped).max()) == (-1, np.float32(32767 / 32768))
    for data in (
        clipped,
        encode(noise(3, 44_100) * np.float32(1e-5), 44_100, subtype="FLOAT"),
        encode(noise(3) * np.float32(50), subtype="FLOAT"),
        encode(tone(3), kind="MP3"),
        mux(tone(3), "aac", RATE, "mp4"),
        encode(tone(3), kind="OGG"),
    ):
        samples, broken = await everything(data, size=size)
        np.testing.assert_array_equal(samples, load_audio(data))
        assert samples.dtype == np.float32
        assert broken is None


@given(st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_any_order_of_windows_gives_the_samples_that_lie_there(data: st.DataObject) -> None:
    """Overlapping, backwards, beyond the end, far ahead: as long as nothing was forgotten."""
    whole = load_audio(FOUR_SECONDS)
    spans = st.lists(st.tuples(st.integers(0, 5 * RATE), st.integers(0, 2 * RATE), st.booleans()), max_size=6)

    async def check() -> None:
        async with Recording(FOUR_SECONDS) as recording:
            known = 0
            for start, length, forgets in data.draw(spans):
                if start < known:
                    continue
                window = await recording.window(start, length)
                np.testing.assert_array_equal(window, whole[start : start + length])
                if forgets:
                    recording.forget(start)
                    known = start

    trio.run(check)


FOUR_SECONDS = encode(noise(4))


async def test_a_forgotten_stretch_is_skipped_before_it_is_decoded() -> None:
    """Clip timestamps begin far into a file: what comes before is never kept."""
    data = encode(noise(60))
    async with Recording(data) as recording:
        recording.forget(50 * RATE)
        window = await recording.window(50 * RATE, RATE)
        np.testing.assert_array_equal(window, load_audio(data)[50 * RATE : 51 * RATE])
        assert recording.held <= 3 * RATE
        with pytest.raises(AssertionError, match="was forgotten"):
            await recording.window(0, 10)


async def test_tasks_may_ask_at_once() -> None:
    """Voice activity runs ahead of a transcription: each gets its own samples, none is decoded twice."""
    whole = load_audio(FOUR_SECONDS)

    async def ask(recording: Recording, start: int) -> None:
        np.testing.assert_array_equal(await recording.window(start, RATE), whole[start : start + RATE])

    async with Recording(FOUR_SECONDS) as recording, trio.open_nursery() as nursery:
        for start in (48_000, 0, 16_001, 48_000, 63_000):
            nursery.start_soon(ask, recording, start)
    assert recording.held == 0


async def test_a_recording_that_is_closed_is_as_long_as_before(tmp_path: Path) -> None:
    """Whoever was stopped in its middle looks back at it."""
    path = tmp_path / "x.wav"
    path.write_bytes(encode(tone(20)))
    for source in (path, load_audio(path)):
        async with Recording(source) as recording:
            await recording.window(0, RATE)
        assert (recording.duration, recording.held) == (20, 0)


# ---- bounded memory --------------------------------------------------------------------------------------------------


async def test_ten_minutes_take_the_memory_of_a_window(tmp_path: Path) -> None:
    """No more samples wait than lie between what was forgotten and the last window's end, and one block."""
    path = sparse_wav(tmp_path / "long.wav", 600, 8_000, 1)
    most = start = 0
    async with Recording(path) as recording:
        assert recording.duration == 600
        assert recording.held <= 2 * RATE, "decoded before anybody asked"
        while len(window := await recording.window(start, 30 * RATE)):
            most = max(most, recording.held)
            start += len(window)
            recording.forget(start)
    assert start == 600 * RATE
    assert most <= 32 * RATE


async def test_decoding_waits_for_whoever_asks() -> None:
    """Back-pressure: a recording that nobody reads stays where it is, however long it is."""
    async with Recording(encode(noise(90))) as recording:
        await recording.window(0, RATE)
        await trio.testing.wait_all_tasks_blocked()
        assert recording.held <= 3 * RATE
        assert recording.length is None


async def test_an_array_is_read_where_it_lies() -> None:
    """No copy of hours; what is returned is a copy, since it outlives the call."""
    array = noise(3)
    async with Recording(array) as recording:
        assert recording.length == 3 * RATE
        assert recording.duration == 3.0
        array[0] = 0.5
        window = await recording.window(0, RATE)
        assert window[0] == 0.5
        assert not np.shares_memory(window, array)
        assert recording.held == 0
        assert len(await recording.window(3 * RATE - 10, RATE)) == 10


async def test_arrays_of_another_rate_are_converted_bit_by_bit() -> None:
    array = noise(20, 44_100)
    whole = load_audio((array, 44_100))
    async with Recording((array, 44_100)) as recording:
        assert recording.duration == pytest.approx(20)
        window = await recording.window(0, RATE)
        assert recording.held <= 3 * RATE
        np.testing.assert_array_equal(window, whole[:RATE])


async def test_a_short_array_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its window: simulations on virtual time do not see threads."""
    monkeypatch.setattr(trio.to_thread, "run_sync", None)
    async with Recording((np.full(RATE, 16_384, np.int16), RATE)) as recording:
        assert (await recording.window(0, RATE) == 0.5).all()


# ---- what breaks in the middle ---------------------------------------------------------------------------------------


def cut(data: bytes, count: int) -> bytes:
    return data[:-count]


def damaged(data: bytes, at: float) -> bytes:
    """Bytes in the middle become others."""
    middle = round(len(data) * at)
    return data[:middle] + bytes(2000) + data[middle + 2000 :]


def faststart(samples: np.ndarray, path: Path) -> bytes:
    mux_into(str(path), samples, "aac", RATE, "mp4", movflags="faststart")
    return path.read_bytes()


def with_nan(at: int, count: int = 1) -> bytes:
    samples = noise(6)
    samples[at : at + count] = np.nan
    return encode(samples, subtype="FLOAT")


@pytest.mark.parametrize(
    ("make", "message", "seconds"),
    [
        (
            lambda _: cut(encode(noise(6)), 32_000),
            r"promises 192,\d{3} bytes, but it has 160,\d{3}: nothing could be read from 5.00 s",
            5.0,
        ),
        (
            lambda _: cut(encode(noise(6), kind="AIFF"), 32_000),
            r"promises 192,\d{3} bytes, but it has 160,\d{3}: nothing could be read from 5.00 s",
            5.0,
        ),
        (
            lambda _: cut(encode(noise(6), kind="RF64"), 32_000),
            r"promises 192,\d{3} bytes, but it has 160,\d{3}: nothing could be read from 5.00 s",
            5.0,
        ),
        (
            lambda _: cut(encode(noise(6), kind="FLAC"), 40_000),
            r"cut short: its header promises 6.00 s, but it has 4",
            4.6,
        ),
        (
            lambda _: damaged(encode(noise(6), kind="FLAC"), 0.5),
            r"damaged: what could not be decoded at 2\.\d\d s",
            6.0,
        ),
        (lambda path: cut(faststart(noise(6), path / "a.m4a"), 20_000), r"cut short", 3.7),
        (
            lambda _: cut(mux(noise(6, 48_000), "libopus", 48_000, "webm"), 20_000),
            r"cut short: its header promises 6.0\d s, but it has 3.\d\d s",
            3.3,
        ),
        (lambda _: with_nan(50_000, 4_000), r"NaN, infinite or too large at 3.12 s \(0.25 s in all\)", 6.0),
    ],
    ids=["WAV", "AIFF", "RF64", "FLAC", "FLAC with damage", "M4A", "WebM", "NaN"],
)
async def test_what_comes_before_the_damage_is_given_and_the_second_is_told(
    make: Any, message: str, seconds: float, tmp_path: Path
) -> None:
    """What load_audio refuses as a whole. Not a tenth of a second that can be read is lost."""
    data = make(tmp_path)
    with pytest.raises(UnsupportedAudio):
        load_audio(data)
    samples, broken = await everything(data)
    assert broken is not None
    assert len(samples) / RATE == pytest.approx(seconds, abs=0.5)
    assert re.search(message, broken), broken


async def test_what_the_resampler_still_holds_is_given_before_the_error() -> None:
    """The file's last tenth is as long at another rate."""
    samples, broken = await everything(cut(encode(noise(4, 44_100), 44_100), 88_200))
    assert broken is not None
    assert len(samples) == 3 * RATE


SMALL_FILES: dict[str, Any] = {
    "WAV": lambda: encode(tone(0.1)),
    "FLAC": lambda: encode(tone(0.1), kind="FLAC"),
    "MP3": lambda: encode(tone(0.1), kind="MP3"),
    "OGG": lambda: encode(tone(0.1), kind="OGG"),
    "mp4": lambda: mux(tone(0.1), "aac", RATE, "mp4"),
    "webm": lambda: mux(tone(0.1, 48_000), "libopus", 48_000, "webm"),
}


@pytest.mark.parametrize("kind", SMALL_FILES)
def test_damaged_files_give_a_beginning_or_one_kind_of_error(kind: str) -> None:
    """Whatever bytes are changed or missing: the samples before the error, and never less than strictly read."""
    whole = SMALL_FILES[kind]()

    @given(
        end=st.integers(0, len(whole)),
        damage=st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4),
    )
    @settings(derandomize=True, max_examples=25, deadline=None)
    def check(end: int, damage: list[tuple[int, int]]) -> None:
        data = bytearray(whole)
        for at, value in damage:
            data[at] = value
        strict, said = outcome(bytes(data[:end] if end % 2 else data))
        try:
            samples, broken = trio.run(everything, data[:end] if end % 2 else data)
        except InvalidRequest:
            assert said is not None, "refused, though load_audio reads it"
            return
        assert np.isfinite(samples).all()
        assert broken is not None or strict is not None, (broken, said)  # it lets 0.1 s be silent
        assert strict is None or len(strict) == len(samples)

    check()


def outcome(data: bytes) -> tuple[Samples | None, str | None]:
    try:
        return load_audio(data), None
    except InvalidRequest as error:
        return None, str(error)


async def test_strictly_read_the_window_that_reaches_the_damage_raises() -> None:
    """And every later one; those before it are given."""
    async with Recording(cut(encode(noise(6)), 32_000), strict=True) as recording:
        assert len(await recording.window(0, 4 * RATE)) == 4 * RATE
        assert recording.broken is None
        for start in (4 * RATE, 5 * RATE):
            with pytest.raises(UnsupportedAudio, match=r"but it has 160,044"):
                await recording.window(start, 2 * RATE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"hello" * 100, "not audio that can be decoded"),
        (encode(tone())[:44], "was cut short before the first sample"),
        (encode(tone())[:100], "promises 32,044 bytes, but it has 100"),
        (encode(tone(0.005)), "lasts 0.0050 s; allowed: 0.02 s"),
        (np.zeros(80, np.float32), "lasts 0.0050 s; allowed: 0.02 s"),
        ((np.zeros(0, np.float32), 8_000), "has no samples"),
        ("no/such.wav", "does not exist"),
        (None, "has the type NoneType"),
    ],
    ids=["text", "a header", "28 frames", "too short", "a short array", "no samples", "no file", "nothing"],
)
async def test_where_nothing_can_be_read_entering_raises_as_load_audio_does(source: Any, message: str) -> None:
    recording = Recording(source)
    with pytest.raises(InvalidRequest, match=message):
        async with recording:
            raise AssertionError("entered")
    with pytest.raises(InvalidRequest, match=message):
        load_audio(source)


# ---- the way out -----------------------------------------------------------------------------------------------------


def open_files(path: Path) -> int:
    return sum(link.resolve() == path for link in Path("/proc/self/fd").iterdir() if link.exists())


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("kind", ["WAV", "MP3"])
@pytest.mark.parametrize("way", ["at the end", "in the middle", "by an error", "cancelled", "closed twice"])
async def test_the_file_is_closed_on_every_way_out(kind: str, way: str, tmp_path: Path) -> None:
    """libsndfile's descriptor, FFmpeg's container, and the file under both; no thread is left at work."""
    path = tmp_path / "x"
    path.write_bytes(encode(noise(5), kind=kind))
    with trio.CancelScope() as scope, contextlib.suppress(ZeroDivisionError):
        async with Recording(path) as recording:
            assert open_files(path) >= 1
            await recording.window(0, 9 * RATE if way == "at the end" else RATE)
            if way == "by an error":
                raise ZeroDivisionError
            if way == "cancelled":
                scope.cancel()
                await recording.window(0, 9 * RATE)
                raise AssertionError("a window was decoded for a cancelled task")
            if way == "closed twice":
                await recording.aclose()
    assert open_files(path) == 0
    assert recording.held == 0


@needs_proc
async def test_a_source_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (encode(tone())[:44], encode(tone(0.005)), b"hello" * 100):
        path.write_bytes(data)
        with pytest.raises(InvalidRequest):
            async with Recording(path):
                raise AssertionError("entered")
        assert open_files(path) == 0


class HeldBlocks:
    """`Blocks` that wait in their thread until they may be read."""

    def __init__(self, blocks: Blocks) -> None:
        self.inner = blocks
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, upto: float, stops: Stops) -> list[Samples]:
        self.reached.set()
        assert self.go_on.wait(300), "nobody let the thread go on"
        return self.inner.read(upto)

    def close(self) -> None:
        assert self.go_on.is_set(), "closed under a thread that still decodes"
        self.inner.close()


@pytest.mark.real_time
async def test_leaving_waits_for_a_thread_that_still_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file closed under a decoder at work would crash the process. A real thread is held in its middle."""
    held: list[HeldBlocks] = []

    def hold(source: AudioSource, rate: int, stops: Stops) -> HeldBlocks:
        held.append(HeldBlocks(open_blocks(source, rate)))
        held[0].go_on.set()
        return held[0]

    monkeypatch.setattr("triolet.api.inputs.recording.open_blocks", hold)
    recording = Recording(FOUR_SECONDS)
    await recording.__aenter__()
    held[0].go_on.clear()
    held[0].reached.clear()
    closed = trio.Event()

    async def ask() -> None:
        assert len(await recording.window(0, 4 * RATE)) == 4 * RATE

    async def close() -> None:
        await recording.aclose()
        closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.to_thread.run_sync(held[0].reached.wait)
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        assert not closed.is_set()
        held[0].go_on.set()
    assert closed.is_set()


@pytest.mark.real_time
@needs_proc
@pytest.mark.parametrize("moment", ["while it opens", "while it decodes", "while it closes"])
def test_an_interrupt_leaves_nothing_open(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """^C in the middle of a thread's call, or of the way out: the block ends in order first."""
    path = tmp_path / "x.wav"
    path.write_bytes(encode(noise(5)))
    entered: list[Recording] = []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    class Interrupted(HeldBlocks):
        def read(self, upto: float, stops: Stops) -> list[Samples]:
            if bool(entered) == (moment == "while it decodes") and moment != "while it closes":
                trio.from_thread.run_sync(interrupt)
            return self.inner.read(upto)

        def close(self) -> None:
            if moment == "while it closes":
                interrupt()
            self.inner.close()

    monkeypatch.setattr(
        "triolet.api.inputs.recording.open_blocks", lambda source, rate, _: Interrupted(open_blocks(source, rate))
    )

    async def main() -> None:
        async with Recording(path) as recording:
            entered.append(recording)
            await recording.window(0, 4 * RATE)
        await trio.lowlevel.checkpoint()

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert open_files(path) == 0


async def test_a_recording_leaves_no_garbage(no_collector: None) -> None:
    """Broken, refused or not: decoders, errors and their frames, with the samples in them, die by reference count."""
    others = frozenset(map(id, living()))  # of other tests
    for data in (FOUR_SECONDS, cut(FOUR_SECONDS, 32_000), with_nan(40_000), cut(encode(noise(4), kind="FLAC"), 9_000)):
        await everything(data)
        assert [repr(one) for one in living() if id(one) not in others] == []
        with contextlib.suppress(InvalidRequest):
            load_audio(data)
        assert [repr(one) for one in living() if id(one) not in others] == []
    for data in (encode(tone())[:44], encode(tone(0.005)), b"hello" * 100, encode(tone())[:60]):
        with contextlib.suppress(InvalidRequest):
            async with Recording(data):
                raise AssertionError("entered")
        assert [repr(one) for one in living() if id(one) not in others] == []


def living() -> list[object]:
    """What decodes, or tells that it could not, and is still alive."""
    kinds = (Recording, Blocks, Decoding, UnsupportedAudio, InvalidRequest, soundfile.LibsndfileError)
    named = {"_mono", "_soundfile_parts", "_gathered", "_placed", "frames", "_packets"}
    return [
        one
        for one in gc.get_objects()
        if type(one) in kinds or (type(one) is types.GeneratorType and one.__name__ in named)
    ]

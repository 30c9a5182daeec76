"""Files: every sample at its time in the file, whatever was cut, lost, damaged, joined or made by an enemy."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import Blocks, Samples, load_audio, open_blocks
from triolet.api.inputs.containers import Joined, Watch
from triolet.api.inputs.decoding import Decoding, _Opened
from triolet.api.inputs.recording import Recording
from triolet.api.inputs.sources import with_track
from triolet.api.inputs.timeline import AudioFault, FaultLog, Timeline
from triolet.core.errors import InvalidRequest, RequestTooLarge, UnsupportedAudio

from .films import RATE, encode, encoded, film_of_two_tracks, tone

SECONDS = 5
KINDS = {  # the container, the codec, its rate, and whether each packet has a time or a place of its own
    "wav": ("wav", "pcm_s16le", 16_000, True),
    "w64": ("w64", "pcm_s16le", 16_000, True),
    "aiff": ("aiff", "pcm_s16be", 16_000, True),
    "au": ("au", "pcm_s16be", 16_000, True),
    "caf": ("caf", "pcm_s16le", 16_000, True),
    "flac": ("flac", "flac", 16_000, True),
    "mp3": ("mp3", "libmp3lame", 16_000, False),
    "adts": ("adts", "aac", 16_000, False),
    "vorbis": ("ogg", "vorbis", 16_000, True),
    "opus": ("ogg", "libopus", 48_000, True),
    "webm": ("webm", "libopus", 48_000, True),
    "mkv": ("matroska", "aac", 16_000, True),
    "m4a": ("ipod", "aac", 16_000, True),
    "alac": ("ipod", "alac", 16_000, True),
    "mov": ("mov", "pcm_s16le", 16_000, True),
    "ts": ("mpegts", "mp2", 16_000, True),
    "avi": ("avi", "libmp3lame", 16_000, True),
    "flv": ("flv", "aac", 16_000, True),
}
UNSTATED = {"mp3", "adts", "ts"}  # a Xing header counts frames of MP3, but the others do not say where they end
COUNTED = {"wav", "w64", "aiff", "au", "caf", "mov", "avi"}  # a place is counted in bytes, or in the packets before it


def scale(seconds: float = SECONDS, rate: int = RATE, low: float = 300) -> Samples:
    """One tone a second, each 100 Hz above the last."""
    at = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * (low + 100 * np.floor(at)) * at)).astype(np.float32)


def write(
    kind: str, samples: Samples, *, moved: Callable[[Any], None] = lambda _: None, film: bool = False, **options: str
) -> bytes:
    """A file of `KINDS`. ``moved`` may change the packets, and ``film`` adds pictures from 0 s on."""
    container, codec, rate, _ = KINDS[kind]
    if codec == "vorbis":
        return encode(samples, kind="OGG", subtype="VORBIS")
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout="mono")
        if film:
            video: Any = out.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
            picture = np.zeros((32, 32, 3), np.uint8)
            for number in range(10 * SECONDS):
                frame: Any = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 10)
                out.mux(video.encode(frame))
            out.mux(video.encode(None))
        for packet in encoded(stream, samples, rate):
            moved(packet)
            out.mux(packet)
    return file.getvalue()


def heard(data: bytes) -> tuple[Samples, tuple[AudioFault, ...]]:
    """All samples and all faults, as `Recording` has them."""
    blocks = open_blocks(data, RATE)
    found = np.concatenate([np.zeros(0, np.float32), *blocks.read(float("inf"))])
    assert blocks.fault is None or not len(found), blocks.fault
    blocks.close()
    return found, blocks.faults


def pitches(samples: Samples) -> list[float | None]:
    """The pitch in the middle of each second; ``None``: it is quiet there."""
    found: list[float | None] = []
    for at in range(round(len(samples) / RATE)):
        part = samples[at * RATE + 6_000 : at * RATE + 10_000]
        spectrum = np.abs(np.fft.rfft(part * np.hanning(len(part)), 16_000)) if len(part) == 4_000 else np.zeros(2)
        found.append(float(spectrum.argmax()) if spectrum.max() > 100 else None)
    return found


WHOLE: dict[str, bytes] = {}


def whole(kind: str) -> bytes:
    if kind not in WHOLE:
        WHOLE[kind] = write(kind, scale(rate=KINDS[kind][2]))
    return WHOLE[kind]


def kinds(faults: tuple[AudioFault, ...]) -> set[str]:
    return {one.kind for one in faults}


# ---- every container -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_has_its_length_and_no_fault(kind: str) -> None:
    samples, faults = heard(whole(kind))
    assert faults == ()
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=0.15)
    assert pitches(samples)[:SECONDS] == pytest.approx([300, 400, 500, 600, 700], abs=8)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_in_silence_and_what_is_left_stays_where_it_was(kind: str) -> None:
    """Cuts, holes and damage anywhere: a second is its own tone or quiet, and less than the file states is said."""
    data, keeps_times = whole(kind), KINDS[kind][3]
    head = len(data) // 10 + 1_000  # headers are another matter

    @given(
        way=st.sampled_from(["cut", "hole", "damage"]),
        at=st.floats(0, 0.999),
        count=st.sampled_from([4, 200, 2_000, 9_000]),
    )
    @example(way="cut", at=0.5, count=4)
    @example(way="damage", at=0.4, count=200)
    @settings(derandomize=True, max_examples=8, deadline=None)
    def check(way: str, at: float, count: int) -> None:
        start = head + int(at * (len(data) - head))
        changed = data[:start] + (b"" if way == "cut" else data[start + count :])
        if way == "damage":
            changed = (
                data[:start]
                + np.random.default_rng(count).bytes(len(data[start : start + count]))
                + data[start + count :]
            )
        try:
            samples, faults = heard(changed)
        except InvalidRequest:  # refused, as an MP4 without the index at its end
            return
        lost = SECONDS - len(samples) / RATE
        if kind not in UNSTATED:
            assert lost < 0.15 or faults, f"{lost:.2f} s are lost in silence"
        # FFmpeg joins the last page of an Ogg file to what it has read, though a page between may be lost, and
        # what begins late without pictures is counted from there
        is_short = bool(faults) and faults[0].kind in {"cut short", "gap"} and KINDS[kind][0] == "ogg"
        # AVI counts the packets that FFmpeg finds: those behind a damaged head of one are early, and a fault is told
        moves = kind in COUNTED and (way == "hole" or (kind == "avi" and faults))
        if keeps_times and not is_short and not moves:
            for second, pitch in enumerate(pitches(samples)[: SECONDS - 1]):
                assert pitch is None or abs(pitch - 300 - 100 * second) < 25, (second, pitches(samples))

    check()


@pytest.mark.parametrize("kind", ["mkv", "m4a", "ts"])
def test_a_track_that_begins_late_keeps_its_time(kind: str) -> None:
    """The audio of a film begins 3.5 s after its pictures: no fault, and nothing is early."""

    def later(packet: Any) -> None:
        packet.pts += int(3.5 / packet.time_base)
        packet.dts = packet.pts

    samples, faults = heard(write(kind, scale(rate=KINDS[kind][2]), moved=later, film=True))
    assert np.abs(samples[: int(3.3 * RATE)]).max() < 0.01
    assert faults == ()
    assert len(samples) / RATE == pytest.approx(SECONDS + 3.5, abs=0.15)
    shifted = np.concatenate([samples[int(3.5 * RATE) :], np.zeros(1_000, np.float32)])
    assert pitches(shifted)[:4] == pytest.approx([300, 400, 500, 600], abs=12)


@pytest.mark.parametrize("kind", ["webm", "mkv", "m4a", "ts", "flv", "opus"])
def test_a_part_that_the_times_leave_out_keeps_its_time(kind: str) -> None:
    """A recorder was paused, or packets are missing: silence, and one warning with the place and the length."""

    def paused(packet: Any) -> None:
        if packet.pts * packet.time_base >= 2:
            packet.pts = packet.dts = packet.pts + int(6 / packet.time_base)

    samples, faults = heard(write(kind, scale(rate=KINDS[kind][2]), moved=paused))
    assert kinds(faults) == {"gap"}
    assert faults[0].start == pytest.approx(2, abs=0.15)
    assert faults[0].end - faults[0].start == pytest.approx(6, abs=0.1)
    assert pitches(samples)[2:8] == [None] * 6
    assert pitches(samples)[8:10] == pytest.approx([500, 600], abs=12)


def test_a_frame_that_has_no_time_has_that_of_its_packet() -> None:
    """FFmpeg's decoders forget the time after errors: without it, what follows the damage would be early."""
    packets = [(0, "-"), (1, ""), (2, ""), (3, "--"), (5, "-"), (None, "-")]  # a line: a second that can be decoded
    frames = opened_film([packet(pts, "sound", seconds) for pts, seconds in packets]).frames(Timeline(FaultLog("x")))
    assert [gap for gap, one in frames if one is not None] == [0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("last", "kind"),
    [((8, "pictures", ""), None), ((9_999, "pictures", ""), "cut short"), ((8, "pictures", "", True), "damaged")],
    ids=["whole", "a wrong time", "the last packet is damaged"],
)
def test_what_the_pictures_show_is_told(last: tuple[Any, ...], kind: str | None) -> None:
    """They may be longer than the sound, and damaged themselves. But a wrong time of theirs makes no cut film whole,
    and what is damaged last may have been sound."""
    timeline: Timeline[Any] = Timeline(FaultLog("x"))
    packets = [packet(0, "pictures", "", True), packet(0, "sound", "-"), packet(*last), packet(None, "sound", "")]
    packets[-1].size = 0
    list(opened_film(packets).frames(timeline))
    assert kinds(timeline.faults.faults) == ({kind} if kind else set())


FRAME = SimpleNamespace(sample_rate=RATE, samples=RATE, pts=None)
CODEC = SimpleNamespace(name="mp3", decode=lambda packet: packet.found)
STREAMS = {name: SimpleNamespace(time_base=Fraction(1), codec_context=CODEC) for name in ("sound", "pictures")}


def packet(pts: int | None, stream: str, seconds: str, is_corrupt: bool = False) -> Any:
    """A packet of FFmpeg's, as PyAV has it: the last one, which has no time, says stream 0, whatever it is."""
    facts = {"pts": pts, "duration": 1, "time_base": 1, "size": 9, "is_corrupt": is_corrupt}
    return SimpleNamespace(**facts, stream=STREAMS[stream], stream_index=0, found=[FRAME] * len(seconds))


def opened_film(packets: list[Any]) -> _Opened:
    """A film whose header states 9 s."""
    container = SimpleNamespace(demux=lambda: iter(packets), close=lambda: None)
    return _Opened(Joined(io.BytesIO(b"a"), Watch()), container, STREAMS["sound"], "matroska", 0.0, None, False, 9.0)


@pytest.mark.parametrize("jump", [20, 4])
def test_one_wrong_time_moves_nothing(jump: int) -> None:
    """A damaged time in the middle: FFmpeg's aresample would be silent until the clock has caught up."""

    def wrong(packet: Any) -> None:
        if 2.0 <= packet.pts * packet.time_base < 2.1:
            packet.pts = max(packet.pts + int(jump / packet.time_base), 0)

    samples, faults = heard(write("webm", scale(rate=48_000), moved=wrong, live="1"))
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=0.1)
    assert pitches(samples)[:SECONDS] == pytest.approx([300, 400, 500, 600, 700], abs=12)
    assert kinds(faults) <= {"cut short"}  # the muxer may have written the wrong time as the end


@pytest.mark.parametrize("after", [None, 9.0], ids=["at the end", "at the next gap"])
def test_what_is_damaged_while_frames_are_held_is_told(after: float | None) -> None:
    """Frames behind a gap wait; what could not be decoded after them is another fault, with its own place."""
    timeline: Timeline[int] = Timeline(FaultLog("x"))
    for number, time in enumerate((0.0, 3.0)):
        timeline.add(time, 0.5, number)
    timeline.is_hurt = True
    if after is not None:
        timeline.add(after, 0.5, 2)
    timeline.finish()
    found = {one.kind: (one.start, one.end) for one in timeline.faults.faults}
    assert found == {"gap": (0.5, 3.0), "damaged": (3.5, after or 3.5)}


@given(
    times=st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e18, -1e18]) | st.none(), max_size=12),
    bad=st.integers(0, 40),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_any_times_give_every_frame_once_and_in_order(times: list[float | None], bad: int) -> None:
    """And where the wrong ones return to the right ones, each right one is at its time."""
    clock = [0.5 * number for number in range(120)]
    given_times = [*clock[:bad], *times, *clock[bad + len(times) :]]
    timeline: Timeline[int] = Timeline(FaultLog("x"))
    placed = [one for number, time in enumerate(given_times) for one in timeline.add(time, 0.5, number)]
    placed += timeline.finish()
    assert [number for _, number in placed] == list(range(120))
    assert min(gap for gap, _ in placed) >= 0
    if len(times) == 1 and bad:
        assert sum(gap for gap, _ in placed) == 0
        assert timeline.faults.faults == ()


# ---- joined files ----------------------------------------------------------------------------------------------------


def broadcast(low: float, codec: str = "mp2", rate: int = 16_000, channels: str = "mono", **options: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mpegts", options={name: str(value) for name, value in options.items()}) as out:
        stream: Any = out.add_stream(codec, rate=rate, layout=channels)
        for packet in encoded(stream, scale(4, rate, low), rate, channels):
            out.mux(packet)
    return file.getvalue()


OTHER = {"mpegts_start_pid": 0x200, "mpegts_pmt_start_pid": 0x1100, "mpegts_service_id": 2}


@pytest.mark.parametrize(
    "second",
    [
        {},
        OTHER,
        {"mpegts_start_pid": 0x200},
        {"codec": "aac"},
        {"rate": 48_000, "channels": "stereo"},
        OTHER | {"codec": "aac", "rate": 44_100},
    ],
    ids=["the same", "other program", "other PID", "other codec", "other rate", "all other"],
)
def test_joined_broadcasts_are_heard_to_the_last(second: dict[str, Any]) -> None:
    """And the first program again afterwards, which FFmpeg alone would join to the first part."""
    first = broadcast(300)
    samples, faults = heard(first + broadcast(800, **second) + first)
    found = pitches(samples)
    assert len(samples) / RATE == pytest.approx(12, abs=0.4)
    assert found[:4] == pytest.approx([300, 400, 500, 600], abs=30)
    assert 800 in np.round([one or 0 for one in found[3:6]], -2)
    assert 300 in np.round([one or 0 for one in found[7:10]], -2)
    assert kinds(faults) == {"joined"}
    assert not any(one.is_loss for one in faults)


@pytest.mark.parametrize(
    ("first", "second"), [("vorbis", "opus"), ("opus", "vorbis"), ("webm", "webm"), ("flac", "flac")]
)
def test_joined_files_are_heard_to_the_last(first: str, second: str) -> None:
    """As ``cat a b`` joins them: other codecs, rates and clocks."""
    other = write(second, scale(3, KINDS[second][2], 800))
    samples, faults = heard(whole(first) + other)
    assert len(samples) / RATE == pytest.approx(SECONDS + 3, abs=0.2)
    assert pitches(samples)[5:7] == pytest.approx([800, 900], abs=30)
    assert kinds(faults) == {"joined"}


# ---- tracks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("track", "pitch"),
    [(None, 900), (1, 400), (2, 900), ("2", 900), ("de", 400), ("deu", 400), ("German", 400), ("en-US", 900)],
)
def test_the_default_track_is_read_unless_another_is_chosen(track: Any, pitch: float) -> None:
    samples = load_audio(with_track(film_of_two_tracks(), track))
    assert pitches(samples)[0] == pytest.approx(pitch, abs=8)


async def test_the_tracks_are_listed_once() -> None:
    async with Recording(film_of_two_tracks()) as recording:
        (fault,) = recording.faults
        assert fault.message.endswith(
            "has 2 audio tracks: 1 ger, 2 eng (default); number 2 is read, audio_track chooses another"
        )
        assert recording.broken is None


@pytest.mark.parametrize(
    ("source", "track", "message"),
    [
        (film_of_two_tracks(), 3, r"audio_track=3, but .* has 2 audio tracks: 1 ger, 2 eng \(default\); allowed"),
        (film_of_two_tracks(), "fr", r"audio_track='fr', but .* has 2 audio tracks"),
        (encode(tone()), 2, r"audio_track=2, but .* has only one"),
        (film_of_two_tracks(), 0, r"audio_track=0; allowed: the number of an audio track, from 1 on"),
        (film_of_two_tracks(), 1.5, r"audio_track=1.5; allowed"),
        (film_of_two_tracks(), True, r"audio_track=True; allowed"),
        (film_of_two_tracks(), " ", r"audio_track=' '; allowed"),
        (tone(), 1, r"audio_track=1 is given with an array"),
    ],
)
def test_a_track_that_is_none_is_refused(source: Any, track: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_audio(with_track(source, track))


# ---- samples that are no numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 5e4])
def test_samples_that_are_no_sound_count_as_silence(value: float) -> None:
    """In one channel only, too; whoever wants all of the file is told, and whoever is strict has an error."""
    frames = np.stack([scale(3), scale(3)], axis=1)
    frames[20_000:20_100, 1] = value
    samples, faults = heard(encode(frames, subtype="FLOAT"))
    assert len(samples) == 3 * RATE
    assert np.abs(samples).max() < 0.31
    assert kinds(faults) == {"damaged"}
    assert "at 1.25 s (0.01 s in all)" in faults[0].message
    np.testing.assert_allclose(samples[20_000:20_100], frames[20_000:20_100, 0] / 2, atol=1e-6)


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subtype", ["PCM_16", "IMA_ADPCM", "GSM610"])
def test_half_of_a_wav_is_said_however_it_is_packed(subtype: str) -> None:
    """Its sizes are bytes: a packet of several samples must not be taken for one."""
    data = encode(scale(), subtype=subtype)
    assert heard(data)[1] == heard(data + b"more")[1] == ()
    fault = heard(data[: len(data) // 2])[1][0]
    assert fault.kind == "cut short"
    assert fault.start == pytest.approx(SECONDS / 2, abs=0.1)


def test_a_wav_that_counts_its_head_twice_is_whole() -> None:
    """As some recorders write it: the size of the file, where that of the rest belongs."""
    data = encode(scale())
    assert heard(over(data, 4, struct.pack("<I", len(data))))[1] == ()


def test_half_of_an_mp3_with_a_xing_header_is_said() -> None:
    data = whole("mp3")
    samples, faults = heard(data[: len(data) // 2])
    assert kinds(faults) == {"cut short"}
    assert "promises 5.0" in faults[0].message
    assert len(samples) / RATE == pytest.approx(2.5, abs=0.2)
    with pytest.raises(UnsupportedAudio, match="cut short"):
        load_audio(data[: len(data) // 2])


@pytest.mark.parametrize(("kind", "start", "count"), [("opus", 0.6, 3_000), ("vorbis", 0.75, 300)])
def test_the_last_page_of_an_ogg_file_says_what_was_lost_before_it(kind: str, start: float, count: int) -> None:
    """FFmpeg joins it to what it has read, so nothing else would."""
    data = whole(kind)
    at = int(len(data) * start)
    samples, faults = heard(data[:at] + data[at + count :])
    assert SECONDS - len(samples) / RATE < 0.15 or kinds(faults) & {"cut short", "gap"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-5_000], "its header promises"),
        (lambda data: over(data, data.rindex(b"moof") - 4, bytes(8)), r"bytes, but it has \d\d,\d{3} that can be read"),
        (lambda data: over(data, data.rindex(b"trun"), b"free"), "bytes of media, but it has"),
    ],
    ids=["cut", "what is no box", "a lost table"],
)
def test_an_mp4_in_fragments_whose_end_is_lost_is_said(change: Callable[[bytes], bytes], message: str) -> None:
    """Its header states no length, and FFmpeg ends as if nothing more came; but zeros at its end are no loss."""
    data = write("m4a", scale(), movflags="frag_keyframe+empty_moov", frag_duration="500000")
    assert heard(data)[1] == heard(data + bytes(5_000))[1] == ()
    samples, faults = heard(change(data))
    assert SECONDS - len(samples) / RATE > 0.2
    assert faults[0].kind == "cut short"
    assert re.search(message, faults[0].message), faults[0].message


def over(data: bytes, start: int, other: bytes) -> bytes:
    """``data`` with ``other`` from ``start`` on."""
    return data[:start] + other + data[start + len(other) :]


def test_the_first_frames_of_a_flac_that_are_lost_keep_their_time() -> None:
    """By their own numbers, where FFmpeg would count from the first frame that it finds."""
    data = bytearray(whole("flac"))
    data[9_000:14_000] = bytes(5_000)
    samples, faults = heard(bytes(data))
    assert len(samples) == SECONDS * RATE
    assert kinds(faults) == {"damaged"}
    assert pitches(samples)[2:] == pytest.approx([500, 600, 700], abs=8)


def test_the_last_frame_of_a_flac_that_is_damaged_keeps_its_time() -> None:
    """As if it stood in the middle, though no frame after it shows how long it was."""
    data = encode(scale(), kind="FLAC")
    at = data.rindex(b"\xff\xf8") + 200
    samples, faults = heard(over(data, at, b"damage"))
    assert len(samples) == SECONDS * RATE
    assert [one.kind for one in faults] == ["damaged"]
    assert faults[0].seconds > 0.01


def test_a_film_whose_sound_ends_early_is_whole() -> None:
    """The header's length is that of the pictures."""
    assert heard(write("mkv", scale(2), film=True))[1] == ()


# ---- enemies ---------------------------------------------------------------------------------------------------------


def caf(count: int, rate: float = 768_000.0) -> bytes:
    """A CAF file whose packets have one sample each, though it states 256."""
    description = struct.pack(">d4sIIIII", rate, b"lpcm", 2, 2, 256, 1, 1)
    data = struct.pack(">I", 0) + b"\1\0" * count
    head = b"caff" + struct.pack(">HH", 1, 0) + b"desc" + struct.pack(">q", len(description)) + description
    return head + b"data" + struct.pack(">q", len(data)) + data


def test_the_work_between_two_looks_is_bounded() -> None:
    """A packet of one sample costs what a packet costs, however many came before, and a caller who gives up waits for
    512 of them at most."""
    blocks = open_blocks(caf(4_000), 768_000)
    sizes = [len(frames) for _, _, frames in blocks.decoding.parts]
    blocks.close()
    assert sum(sizes) == 2 * 4_000  # of one byte each
    assert max(sizes) <= 512


def test_a_thread_that_shall_stop_stops_at_the_next_packet() -> None:
    """And goes on later: nothing that was decoded is lost."""
    blocks, (whole_samples, _) = open_blocks(caf(4_000), RATE), heard(caf(4_000))
    parts, calls = [], 0
    while not blocks.ended:
        parts += blocks.read(float("inf"), lambda: True)
        calls += 1
    blocks.close()
    assert calls > 4_000 / 512
    np.testing.assert_array_equal(np.concatenate(parts), whole_samples)


@pytest.mark.parametrize("kind", ["webm", "avi"])
def test_a_thread_that_shall_stop_stops_while_ffmpeg_searches_for_a_packet(kind: str) -> None:
    """In megabytes of noise one call of FFmpeg's takes seconds. It ends at once, and begins again later: whoever reads
    on loses nothing, and gets nothing twice, though frames behind a gap wait."""

    def paused(packet: Any) -> None:
        packet.pts = packet.dts = packet.pts + (packet.pts * packet.time_base >= 2) * int(1 / packet.time_base)

    data = write(kind, scale(rate=KINDS[kind][2]), moved=paused)
    data = data[: len(data) * 2 // 3] + np.random.default_rng(0).bytes(6_000_000)
    samples, faults = heard(data)
    blocks = open_blocks(data, RATE)
    watch = blocks._watch
    parts = blocks.read(math.inf, lambda: watch.searched > 1 << 20)
    assert not blocks.ended
    assert watch.searched < 2 << 20
    parts += blocks.read(math.inf)
    blocks.close()
    np.testing.assert_array_equal(np.concatenate(parts), samples)
    assert blocks.faults == faults


def far(hours: float) -> bytes:
    """A WebM file whose last seconds are hours later, by their times."""

    def moved(packet: Any) -> None:
        if packet.pts * packet.time_base >= 3:
            packet.pts += int(hours * 3_600 / packet.time_base)
            packet.dts = packet.pts

    return write("webm", scale(rate=48_000), moved=moved, live="1")


async def test_ten_hours_without_packets_take_no_memory_and_are_too_long() -> None:
    """By the time of the packet, before anything is silent for so long."""
    data = far(10)
    blocks = open_blocks(data, RATE)
    silent = [part for part in blocks.read(float("inf")) if part.strides == (0,)]  # a zero that is read many times
    blocks.close()
    assert sum(map(len, silent)) == pytest.approx(36_000 * RATE, abs=RATE)
    with pytest.raises(RequestTooLarge, match="allowed: up to 3600 s, but it has 3600"):
        load_audio(data, most_seconds=3_600)
    async with Recording(data, most_seconds=3_600) as recording:
        with pytest.raises(RequestTooLarge, match="36005 s or more"):
            await recording.window(0, 2 * RATE)
        assert recording.held < 20 * RATE


def test_a_month_without_packets_is_a_clock_that_was_set() -> None:
    samples, faults = heard(far(24 * 30))
    assert len(samples) / RATE == pytest.approx(SECONDS, abs=0.1)
    assert kinds(faults) == {"joined"}


async def test_audio_that_is_too_long_by_its_header_is_refused_at_once() -> None:
    """And, if the header lies, when its silence has become too long: nobody needs to speak."""
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(60 * RATE, np.int16), RATE, format="FLAC")
    with pytest.raises(RequestTooLarge, match="but it has 60 s or more"):
        async with Recording(silence.getvalue(), most_seconds=50):
            raise AssertionError("entered")
    lying = bytearray(silence.getvalue())
    struct.pack_into(">I", lying, 22, 0)  # the lower bits of STREAMINFO's total: the length is not known
    async with Recording(bytes(lying), most_seconds=50) as recording:
        await recording.window(0, 40 * RATE)
        with pytest.raises(RequestTooLarge):
            await recording.window(40 * RATE, 20 * RATE)
    with pytest.raises(RequestTooLarge):
        async with Recording(np.zeros(60 * RATE, np.float32), most_seconds=50):
            raise AssertionError("entered")


def test_an_error_that_nobody_expected_is_no_end() -> None:
    """A generator that died has nothing more to give, which looks like the end; each later call says what happened."""

    def dies() -> Iterator[Samples]:
        yield np.zeros(10, np.float32)
        raise IndexError("a bug")

    import contextlib

    blocks = Blocks(dies(), contextlib.ExitStack(), RATE, Decoding(iter(()), None, False, Timeline(FaultLog("x"))))
    for message in ("a bug", "x cannot be read on after an error: IndexError", "x cannot be read on"):
        with pytest.raises((IndexError, RuntimeError), match=message):
            blocks.read(100)
    assert not blocks.ended

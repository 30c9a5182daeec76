"""Audio in: every kind of source, format, rate and channel count, and every way for it to be wrong."""

from __future__ import annotations

import io
import os
import struct
import threading
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from triolet.api.inputs import audio
from triolet.api.inputs.audio import content_key, load_audio
from triolet.api.inputs.recording import Recording
from triolet.api.inputs.sources import is_pair, with_rate
from triolet.core.errors import InvalidRequest, RequestTooLarge, UnsupportedAudio

from .films import RATE, encode, mux, mux_into, tone


def loudest_frequency(samples: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax()) * RATE / len(samples)


# ---- what is accepted ------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_samples(tmp_path: Path) -> None:
    """Path as str or PathLike, bytes, bytearray, memoryview, open file, buffer."""
    data = encode(tone())
    path = tmp_path / "tone.wav"
    path.write_bytes(data)
    expected = load_audio(data)
    assert expected.dtype == np.float32
    assert expected.shape == (RATE,)
    np.testing.assert_allclose(expected, tone(), atol=1e-4)
    with path.open("rb") as file:
        for source in (str(path), path, bytearray(data), memoryview(data), file, io.BytesIO(data)):
            np.testing.assert_array_equal(load_audio(source), expected)
        assert not file.closed


def test_the_end_of_the_name_means_nothing(tmp_path: Path) -> None:
    """libsndfile would want a rate for "x.raw"; the content decides."""
    path = tmp_path / "x.raw"
    path.write_bytes(encode(tone()))
    assert load_audio(path).shape == (RATE,)


def test_a_file_object_is_read_from_where_it_stands() -> None:
    """What comes before is the caller's."""
    file = io.BytesIO(b"header" + encode(tone()))
    file.seek(6)
    assert load_audio(file).shape == (RATE,)


@pytest.mark.real_time
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """As in ``triolet transcribe <(...)``."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(encode(tone()),))
    writer.start()
    assert load_audio(path).shape == (RATE,)
    writer.join()


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
def test_arrays_are_copied_as_they_are(dtype: str) -> None:
    """float32 and float64; strided too; the level is not touched; the caller may use the array on."""
    array = (3 * tone())[::2].astype(dtype)
    samples = load_audio(array)
    assert samples.dtype == np.float32
    assert samples.flags.c_contiguous
    np.testing.assert_array_equal(samples, array.astype(np.float32))
    assert not np.shares_memory(samples, array)


def test_whatever_numpy_can_read_is_an_array() -> None:
    """A tensor on the CPU, say, without an import of torch."""

    class Tensor:
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return tone()

    np.testing.assert_array_equal(load_audio(Tensor()), tone())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rate", "dtype"), [(8_000, "<f4"), (11_025, "<f8"), (16_000, "<i2"), (44_100, ">f4"), (96_000, "<i2")]
)
def test_arrays_may_carry_their_rate(rate: int, dtype: str) -> None:
    """As soundfile returns them, and as the library datasets has them: soxr converts, int16 is scaled."""
    array = tone(2.0, rate)
    given = (array * 32768).astype(dtype) if dtype == "<i2" else array.astype(dtype)
    samples = load_audio((given, rate))
    assert samples.dtype == np.float32
    assert abs(len(samples) - 2 * RATE) <= 1
    np.testing.assert_allclose(samples[800:-800], tone(2.0)[800 : len(samples) - 800], atol=2e-3)
    mapping = {"path": "x.wav", "array": given, "sampling_rate": np.int64(rate)}
    np.testing.assert_array_equal(load_audio(mapping), samples)
    np.testing.assert_array_equal(load_audio(with_rate(given, rate)), samples)
    if rate == RATE:
        np.testing.assert_allclose(samples, array, atol=1 / 32768)


def test_a_rate_beside_the_array_leaves_other_audio_alone() -> None:
    """Without one the array is at the model's rate."""
    array = tone()
    assert with_rate(array, None) is array
    assert with_rate("x.wav", None) == "x.wav"


@pytest.mark.parametrize("source", ["x.wav", b"RIFF", (tone(), RATE), {"array": tone(), "sampling_rate": RATE}])
def test_a_rate_beside_audio_that_carries_its_own_is_refused(source: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=r"sampling_rate=8000 is given with audio of the type \w+; allowed: with an array"
    ):
        with_rate(source, 8_000)


def test_a_pair_is_one_audio() -> None:
    """Where a tuple may also hold several."""
    assert is_pair((tone(), RATE))
    assert is_pair((tone(), np.int32(RATE)))
    assert not any(map(is_pair, [(tone(), tone()), ("a.wav", "b.wav"), ("a.wav",), [tone(), RATE], (tone(), True)]))


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        *(("WAV", subtype) for subtype in ("PCM_16", "PCM_24", "PCM_U8", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM")),
        *((kind, "PCM_16") for kind in ("WAVEX", "RF64", "AIFF", "AU", "CAF", "FLAC")),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", None),
    ],
)
def test_formats_of_libsndfile(kind: str, subtype: str | None) -> None:
    is_the_tone(load_audio(encode(tone(), kind=kind, subtype=subtype)))


@pytest.mark.parametrize(
    ("codec", "rate", "kind"),
    [
        ("aac", 44_100, "mp4"),
        ("aac", 22_050, "adts"),
        ("libopus", 48_000, "webm"),
        ("libopus", 48_000, "ogg"),
        ("alac", 44_100, "mp4"),
        ("pcm_u8", 22_050, "matroska"),
        ("pcm_s32le", 22_050, "matroska"),
        ("mp2", 48_000, "mp2"),
    ],
)
def test_formats_of_ffmpeg(codec: str, rate: int, kind: str) -> None:
    """What libsndfile cannot read: M4A, WebM, Matroska..."""
    is_the_tone(load_audio(mux(tone(rate=rate), codec, rate, kind)), slack=0.1)


def is_the_tone(samples: np.ndarray, slack: float = 0.02) -> None:
    """Within its codec's loss and padding."""
    assert abs(len(samples) - RATE) <= slack * RATE
    assert loudest_frequency(samples[1600:-1600]) == pytest.approx(440, abs=3)
    assert np.abs(samples[1600:-1600]).max() == pytest.approx(0.25, abs=0.03)
    assert abs(samples.mean()) < 0.01


def test_another_rate_may_be_asked_for() -> None:
    """``sampling_rate`` is what comes out."""
    assert load_audio(encode(tone()), sampling_rate=8_000).shape == (8_000,)


@pytest.mark.parametrize("channels", [2, 3, 6])
def test_channels_are_averaged(channels: int) -> None:
    """The mean, of as many as there are."""
    frames = np.stack([tone() * (index + 1) / channels for index in range(channels)], axis=1)
    samples = load_audio(encode(frames, subtype="FLOAT"))
    np.testing.assert_allclose(samples, frames.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("channels", [2, 6])
async def test_channels_that_cancel_each_other_are_read_as_one_and_told(channels: int) -> None:
    """Only where they do: the second second has two channels of noise, the last one is silent."""
    voice, noise = tone(), 0.1 * np.random.default_rng(0).standard_normal((RATE, channels)).astype(np.float32)
    turned = np.zeros((RATE, channels), np.float32)
    turned[:, -2:] = voice[:, None] * (1, -1)
    frames = np.concatenate([turned, turned, noise, turned, np.zeros_like(noise)])
    async with Recording(encode(frames, subtype="FLOAT"), strict=True) as recording:
        samples = await recording.window(0, 6 * RATE)
        (fault,) = recording.faults
    expected = np.concatenate([voice, voice, noise.mean(axis=1), voice, np.zeros(RATE)])
    np.testing.assert_allclose(samples, expected, atol=1e-6)
    told = "has channels that cancel each other in 2 places, the first at 0.00 s (3.00 s in all); one of them is read"
    assert fault.message.endswith(f"{told} there")
    assert (fault.is_loss, recording.lost) == (False, ())


@pytest.mark.parametrize("kind", ["MP3", "OGG"])
def test_joined_streams_are_read_to_the_last(kind: str) -> None:
    """Podcasts and recorded radio: libsndfile alone would stop after the first without a word."""
    first, second = encode(tone(), kind=kind), encode(tone(hertz=880), kind=kind)
    samples = load_audio(first + second)
    assert abs(len(samples) - 2 * RATE) <= 0.15 * RATE
    assert loudest_frequency(samples[-RATE // 2 : -1600]) == pytest.approx(880, abs=5)


def test_joined_streams_may_differ_in_rate_and_channels() -> None:
    """An inserted part was made by another studio: it keeps its pitch and its place."""
    other = np.stack([tone(rate=44_100, hertz=880)] * 2, axis=1)
    samples = load_audio(encode(tone(), kind="MP3") + encode(other, 44_100, kind="MP3"))
    assert abs(len(samples) - 2 * RATE) <= 0.15 * RATE
    assert loudest_frequency(samples[:RATE]) == pytest.approx(440, abs=5)
    assert loudest_frequency(samples[-RATE // 2 : -1600]) == pytest.approx(880, abs=5)


def test_junk_inside_an_mp3_is_stepped_over() -> None:
    """A tag or some garbage between two joined files holds no sound."""
    data = encode(tone(), kind="MP3")
    junk = np.random.default_rng(0).bytes(500)
    assert len(load_audio(data + junk + data)) > 1.8 * RATE


def test_a_live_recording_promises_no_length() -> None:
    """Browsers write WebM without a duration: it lasts as long as it does."""
    file = io.BytesIO()
    mux_into(file, tone(3, 48_000), "libopus", 48_000, "webm", live="1")
    whole = load_audio(file.getvalue())
    part = load_audio(file.getvalue()[:-12_000])
    assert abs(len(whole) - 3 * RATE) <= 320
    assert 0 < len(part) < len(whole)


@pytest.mark.parametrize("size", [0, 0x7FFF_F000, 0xFFFF_FFFF])
def test_wav_headers_of_streams_promise_nothing(size: int) -> None:
    """Programs that write to a pipe cannot fill in the size: the file is read to its end."""
    data = encode(tone())
    at = data.index(b"data") + 4
    assert load_audio(data[:at] + struct.pack("<I", size) + data[at + 4 :]).shape == (RATE,)


def test_long_audio_in_blocks_is_the_same_as_at_once() -> None:
    """Blocks of frames leave no seams: an impulse train keeps its beat across them."""
    clicks = np.zeros(44_100 * 5, np.float32)
    clicks[::44_100] = 0.5
    samples = load_audio(encode(clicks, 44_100, subtype="FLOAT"))
    assert [int(at) for at in np.flatnonzero(samples > 0.1)] == [0, 16_000, 32_000, 48_000, 64_000]


# ---- what is refused -------------------------------------------------------------------------------------------------


class AsyncFile:
    async def read(self) -> bytes:
        return b""


class Unreadable:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("it lies on the device")


def closed_file() -> io.BytesIO:
    file = io.BytesIO(b"x")
    file.close()
    return file


def with_field(at: int, kind: str, *values: int) -> bytes:
    """A WAV file with other values in its header."""
    data = bytearray(encode(tone()))
    struct.pack_into(kind, data, at, *values)
    return bytes(data)


def flac_that_promises(frames: int) -> bytes:
    data = bytearray(encode(tone(), kind="FLAC"))
    struct.pack_into(">I", data, 22, frames)  # the lower bits of STREAMINFO's total
    return bytes(data)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.wav", r"URLs are not fetched"),
        ("\0", r"cannot be opened \(embedded null byte\)"),
        ([0.0, 0.1], r"has the type list; allowed"),
        (io.StringIO("text"), r"returned str; allowed: bytes. Open it in binary mode"),
        (AsyncFile(), r"asynchronous; allowed: a plain binary file. Or await"),
        (closed_file(), r"cannot be read \(I/O operation on closed file"),
        (Unreadable(), r"cannot be read as an array \(it lies on the device\)"),
        ((RATE, tone()), r"given as \(rate, samples\); allowed: \(samples, rate\). Swap the two"),
        ((tone(), 0), r"array's sampling rate is 0 Hz; allowed: 1000 to 768000 Hz"),
        ((tone(), 44.1), r"array's sampling rate is 44.1; allowed: a whole number of Hz"),
        ((tone(), "16000"), r"array's sampling rate is '16000'; allowed: a whole number of Hz"),
        ((tone(), None), r"array's sampling rate is None; allowed: a whole number of Hz"),
        ((tone(), float("nan")), r"array's sampling rate is nan; allowed"),
        (("x.wav", RATE), r"pair's first part is str; allowed: a 1-D float32, float64 or int16 array"),
        ((tone(), RATE, 1), r"has the type tuple; allowed"),
        ((np.zeros(RATE, np.int32), RATE), r"holds int32; allowed: float32 or float64.* / 2147483648"),
        ((np.zeros((RATE, 2), np.float32), RATE), r"shape \(16000, 2\); allowed: one dimension, mono"),
        ((np.zeros((RATE, 2), np.int16), RATE), r"shape \(16000, 2\); allowed: one dimension, mono"),
        ((np.full(RATE, np.inf, np.float32), 8_000), r"NaN or infinite \(number 0\)"),
        ((tone() * 32768, RATE), r"peak of 8192; allowed: full scale at 1.0"),
        ({"array": tone()}, r"mapping without 'sampling_rate' \(keys: 'array'\); allowed"),
        ({"bytes": b"", "path": "x"}, r"without 'array' and 'sampling_rate' \(keys: 'bytes', 'path'\); allowed"),
        ({"array": [0.0], "sampling_rate": RATE}, r"the mapping's array is list; allowed"),
        (np.zeros(RATE, np.int16), r"or give \(samples, rate\)"),
        (np.zeros(RATE, np.int16), r"holds int16; allowed: float32 or float64.*astype\(np.float32\) / 32768"),
        (np.zeros(RATE, np.float16), r"holds float16; allowed: float32 or float64"),
        (np.zeros(RATE, np.complex64), r"holds complex64; allowed"),
        (np.zeros((1, RATE), np.float32), r"shape \(1, 16000\); allowed: one dimension, mono"),
        (np.float32(0), r"shape \(\); allowed: one dimension"),
        (np.zeros(0, np.float32), r"has no samples; allowed: 0.02 s"),
        (np.full(RATE, np.nan, np.float32), r"NaN or infinite \(number 0\)"),
        (np.array([0.0] * 500 + [np.inf] + [0.0] * 500), r"NaN or infinite \(number 500\)"),
        (tone() * 32768, r"peak of 8192; allowed: full scale at 1.0.*16-bit samples by 32768"),
    ],
)
def test_what_can_never_work_is_refused(source: Any, message: str) -> None:
    """The message says what was got, what is allowed, what to do."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        load_audio(source)
    assert not isinstance(caught.value, UnsupportedAudio)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", r"empty \(0 bytes\)"),
        (bytes(10_000), r"not audio that can be decoded"),
        (encode(tone())[:30], r"not audio that can be decoded"),
        (encode(np.zeros(0, np.float32)), r"has no samples"),
        (encode(np.stack([tone()] * 2, 1), subtype="PCM_24")[:-600], r"promises 96,0\d\d bytes, but it has 95,4\d\d"),
        (encode(tone(), kind="AIFF")[:30], r"not audio that can be decoded"),
        (encode(tone(), kind="FLAC")[:44], r"not audio that can be decoded"),
        (encode(tone(), kind="FLAC")[:9_000], r"cut short: its header promises 1.00 s, but it has 0.\d\d s"),
        (flac_that_promises(20_000), r"cut short"),
        (encode(tone(), kind="OGG")[:-1000], r"can be decoded|cut short"),
        (mux(tone(3), "aac", RATE, "mp4")[:-9000], r"not audio that can be decoded"),
        (encode(np.full(RATE, 300.0), subtype="FLOAT"), r"peak of 300; allowed"),
        (with_field(24, "<I", 10), r"sampling rate of the file is 10 Hz; allowed: 1000 to 768000 Hz"),
        (with_field(24, "<I", 4_000_000), r"is 4000000 Hz; allowed"),
        (with_field(32, "<HH", 8, 64), r"has 64-bit integer samples; allowed: integers up to 32 bits"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:3,\n/etc/hostname\n#EXT-X-ENDLIST\n", r"not audio"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_what_is_not_whole_audio_is_refused(source: bytes, message: str) -> None:
    """Never a silent part: the message names what was promised and found."""
    with pytest.raises(UnsupportedAudio, match=message):
        load_audio(source)


def test_paths_that_are_no_readable_files_are_refused(tmp_path: Path) -> None:
    """A directory; a file that may not be read."""
    with pytest.raises(InvalidRequest, match=r"cannot be opened \(.*Is a directory.*allowed: a readable audio file"):
        load_audio(tmp_path)
    secret = tmp_path / "secret.wav"
    secret.touch(mode=0)
    if os.access(secret, os.R_OK):  # the superuser may
        with pytest.raises(UnsupportedAudio, match="empty"):
            load_audio(secret)
    else:
        with pytest.raises(InvalidRequest, match="cannot be opened"):
            load_audio(secret)


def test_a_device_that_fails_while_read_is_named() -> None:
    """An I/O error is the file's, told as such."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("needs a file that opens and cannot be read")
    with pytest.raises(InvalidRequest, match=r"'/proc/self/mem' cannot be read"):
        load_audio("/proc/self/mem")


def test_pictures_have_no_audio_stream() -> None:
    """The kinds of streams found are named."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        video: Any = container.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux([*video.encode(picture), *video.encode(None)])
    with pytest.raises(UnsupportedAudio, match=r"no audio stream \(streams: video\)"):
        load_audio(file.getvalue())


@pytest.mark.parametrize("rate", [0, -16_000, 10_000_000])
def test_rates_out_of_range_are_refused(rate: int) -> None:
    """Also the one asked for."""
    with pytest.raises(InvalidRequest, match=rf"sampling_rate is {rate} Hz; allowed: 1000 to 768000 Hz"):
        load_audio(tone(), sampling_rate=rate)


# ---- content keys ----------------------------------------------------------------------------------------------------


def test_content_keys_tell_apart_samples_and_processors() -> None:
    """Same samples and processor: same key, whatever the memory layout; any difference: another key."""
    samples = tone()
    key = content_key(samples, "whisper-80")
    assert len(key) == 32
    assert key == content_key(np.repeat(samples, 2)[::2], "whisper-80")
    others = [
        content_key(samples, "whisper-128"),
        content_key(samples[:-1], "whisper-80"),
        content_key(samples.reshape(2, -1), "whisper-80"),
        content_key(-samples, "whisper-80"),
    ]
    assert len({key, *others}) == 5
    with pytest.raises(InvalidRequest, match="float64 samples; allowed: float32"):
        content_key(samples.astype(np.float64), "whisper-80")  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_audio_of_as_many_seconds_as_are_wanted_is_read(seconds: float) -> None:
    assert len(load_audio(encode(tone(seconds)), most_seconds=seconds)) == seconds * RATE
    assert len(load_audio(tone(seconds), most_seconds=seconds)) == seconds * RATE


def test_of_longer_audio_no_more_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may hold hours of silence."""
    decoded: list[int] = []
    mono = audio._mono

    def counted(*given: Any) -> Any:
        for samples in mono(*given):
            decoded.append(len(samples))
            yield samples

    monkeypatch.setattr(audio, "_mono", counted)
    silence = encode(np.zeros(600 * RATE, np.float32), kind="FLAC", subtype="PCM_16")
    with pytest.raises(RequestTooLarge, match=r"is too long; allowed: up to 2\.5 s"):
        load_audio(silence, most_seconds=2.5)
    assert sum(decoded) <= 4 * RATE
    with pytest.raises(RequestTooLarge, match="the audio is too long"):
        load_audio(tone(3.0), most_seconds=2.5)

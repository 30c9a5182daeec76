"""Random damage in 26 formats: how much of each file is heard, beside ffmpeg, and what is lost without a word.

::

    apt-get install --no-install-recommends ffmpeg
    python benchmarks/files.py [--files 2000] [--seed 0]

Each file is written by ffmpeg, then cut, holed, overwritten or has bits flipped, by its seed. The length that is heard
is compared with that of ``ffmpeg -af aresample=async=1:first_pts=0``, or, where that cannot follow (`of_ffmpeg`,
`by_frames`), with the times of ffprobe's frames. Where a file lacks sound, there must be a warning; but the formats in
`ENDLESS` do not say where they end, so that nobody can tell a cut.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from claims import Claims

from triolet.api.inputs.audio import open_blocks
from triolet.core.errors import InvalidRequest

FORMATS = {
    **{name: f"-c:a pcm_s16le -f {name}" for name in ("wav", "w64", "caf", "mov")},
    **{name: f"-c:a pcm_s16be -f {name}" for name in ("aiff", "au")},
    "flac": "-c:a flac -f flac",
    "mp3": "-c:a libmp3lame -b:a 64k -write_xing 0 -f mp3",
    "mp3 with Xing": "-c:a libmp3lame -q:a 5 -f mp3",
    "vorbis": "-c:a libvorbis -f ogg",
    "opus": "-c:a libopus -b:a 32k -f ogg",
    "flac in ogg": "-c:a flac -f ogg",
    "webm": "-c:a libopus -b:a 32k -f webm",
    "mkv": "-c:a aac -f matroska",
    "m4a": "-c:a aac -f ipod",
    "alac": "-c:a alac -f ipod",
    "fragmented mp4": "-c:a aac -movflags frag_keyframe+empty_moov -frag_duration 500000 -f mp4",
    "ts": "-c:a mp2 -f mpegts",
    "aac in ts": "-c:a aac -f mpegts",
    "adts": "-c:a aac -f adts",
    "avi": "-c:a libmp3lame -f avi",
    "flv": "-c:a aac -f flv",
    "wma": "-c:a wmav2 -f asf",
    "mpg": "-c:a mp2 -f mpeg",
    "ac3": "-c:a ac3 -f ac3",
    "nut": "-c:a libmp3lame -f nut",
}
ENDLESS = {"mp3", "ac3", "nut", "adts", "ts", "aac in ts", "mpg"}
MOST = 0.1  # seconds
JITTER = 0.03  # seconds: times are rounded
LONGEST_MISS = 0.15  # seconds: encoder delay and padding


@cache
def written(name: str, rate: int, seconds: float) -> bytes:
    """Returns a healthy file: a tone for each second, with noise."""
    rng, times = np.random.default_rng(1), np.arange(int(seconds * rate)) / rate
    sound = 0.3 * np.sin(2 * np.pi * (200 + 100 * np.floor(times)) * times) + 0.02 * rng.standard_normal(len(times))
    samples = (sound * 20_000).astype(np.int16).tobytes()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        given = ["-f", "s16le", "-ar", str(rate), "-ac", "1", "-i", "-"]
        subprocess.run(["ffmpeg", "-v", "error", *given, *FORMATS[name].split(), path], input=samples, check=True)
        return path.read_bytes()


def damaged(seed: int) -> tuple[str, float, bytes]:
    """Returns a format, the seconds of the healthy file, and the file after one kind of damage."""
    draw = random.Random(seed)
    name, rate, seconds = draw.choice(list(FORMATS)), draw.choice((16_000, 44_100, 48_000)), draw.choice((6.0, 12.34))
    data = bytearray(written(name, rate, seconds))
    size = len(data)
    at = draw.randrange(min(size // 10, 2_000), size - 10)
    match draw.choice(("cut", "hole", "noise", "zeros", "bits")):
        case "cut":
            del data[at:]
        case "hole":
            del data[at : at + draw.choice((10, 200, 3_000, size // 5))]
        case "noise":
            count = min(draw.choice((4, 100, 2_000)), size - at)
            data[at : at + count] = draw.randbytes(count)
        case "zeros":
            count = min(draw.choice((4, 100, 2_000)), size - at)
            data[at : at + count] = bytes(count)
        case _:
            for _ in range(8):
                data[draw.randrange(at, size)] ^= 1 << draw.randrange(8)
    return name, seconds, bytes(data)


def heard(data: bytes) -> tuple[float, bool]:
    """Returns the seconds that are heard, and whether a fault was told."""
    try:
        blocks = open_blocks(data, 16_000)
    except InvalidRequest:
        return 0.0, True
    try:
        blocks.read(math.inf)
        return blocks.done / 16_000, blocks.fault is not None or any(
            one.kind not in ("tracks", "joined") for one in blocks.faults
        )
    finally:
        blocks.close()


def of_ffmpeg(data: bytes) -> tuple[float, bool, bool]:
    """Returns the seconds that ffmpeg's aresample makes of a file; whether it could follow: where the format of frames
    changes, it begins again, with the silence from 0 s on, and it does not know each layout of channels; and whether
    ffmpeg has read all of the file: it ends with the first error of a container."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        resampled = ["-vn", "-af", "aresample=async=1:first_pts=0", "-ar", "16000", "-ac", "1", "-f", "s16le", "-"]
        found = subprocess.run(["ffmpeg", "-v", "verbose", "-i", path, *resampled], capture_output=True, check=False)
        can_follow = found.stderr.count(b"samplerate:") < 2 and (found.returncode == 0 or len(found.stdout) > 0)
        return len(found.stdout) / 32_000, can_follow, f"\n{path}: ".encode() not in found.stderr


def by_frames(data: bytes) -> tuple[float, bool]:
    """Returns the end of the longest row of frames that lie one after the other, and whether it is all that ffmpeg has:
    where times return, aresample has filled the way to a wrong one; and ffmpeg counts from the first frame, though
    those of FLAC count from the first sample of the recording. Frames and times are those of ffprobe."""
    entries = "frame=best_effort_timestamp_time,nb_samples:stream=sample_rate:format=start_time,format_name"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        asked = ["ffprobe", "-v", "quiet", "-select_streams", "a:0", "-show_entries", entries, "-of", "json", path]
        found = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=False).stdout or "{}")
    frames, last, is_late = found.get("frames", []), 0.0, False
    rows = [(0.0, 0)]  # the end of the row that ends with each frame, and its frames
    for frame in frames:
        rate, start = float(found["streams"][0]["sample_rate"]), float(found["format"].get("start_time", 0))
        if found["format"]["format_name"] == "flac":
            start, is_late = 0.0, start > 0
        begin = float(frame.get("best_effort_timestamp_time", last + start)) - start
        last = begin + frame["nb_samples"] / rate
        rows.append((last, 1 + max((count for end, count in rows if end <= begin + JITTER), default=0)))
    end, count = max(rows, key=lambda row: row[1])
    return end, count == len(frames) and not is_late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first file; the next ones follow it")
    given = parser.parse_args()
    claims, differing, silent, endless, beyond, refused, largest = Claims(), 0, 0, 0, 0, 0, 0.0
    for seed in range(given.seed, given.seed + given.files):
        name, seconds, data = damaged(seed)
        (ours, told), (theirs, can_follow, has_read) = heard(data), of_ffmpeg(data)
        if abs(ours - theirs) > MOST:
            end, is_row = by_frames(data)
            if not has_read and theirs < ours:
                print(f"seed {seed}, {name}: {ours:.3f} s heard, but ffmpeg gives up at {theirs:.3f} s", flush=True)
                theirs, refused = min(ours, seconds + LONGEST_MISS), refused + 1
            elif not (can_follow and is_row):
                print(f"seed {seed}, {name}: {theirs:.3f} s by ffmpeg, but its frames end at {end:.3f} s", flush=True)
                theirs, beyond = end, beyond + 1
        largest = max(largest, abs(ours - theirs))
        if abs(ours - theirs) > MOST:
            differing += 1
            print(f"seed {seed}, {name}: {ours:.3f} s heard, {theirs:.3f} s by ffmpeg", flush=True)
        if ours < seconds - LONGEST_MISS and not told:
            endless += name in ENDLESS
            silent += name not in ENDLESS
            if name not in ENDLESS:
                print(f"seed {seed}, {name}: {ours:.3f} of {seconds} s are heard, without a word", flush=True)
    print(f"{endless} files of formats that do not say where they end lack sound without a word")
    print(
        f"{beyond} files whose format changes, whose times return or whose first frames are lost are compared with the"
    )
    print(
        f"times of their frames; ffmpeg gives up in {refused} files that are heard on, though no longer than they were"
    )
    claims(not differing, f"{differing} of {given.files} files differ by more than {MOST:g} s; at most {largest:.3f} s")
    claims(not silent, f"{silent} of {given.files} files lose sound in silence")
    claims.exit()


if __name__ == "__main__":
    main()

"""Speech of espeak-ng, its augmentation, and windows of several sentences with their true times.

Audio is float32 mono at 16 kHz, in [-1, 1]; times are in seconds.
"""

import hashlib
import io
import json
import random
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from grammar import LANGUAGES, Sentence, sentence, sentences

RATE = 16_000
WINDOW = 30.0
TICK = 0.02
"""Seconds per timestamp token and per encoder position."""

BASES = {"en": ("en-us", "en-gb", "en-us", "en-gb-x-rp"), "de": ("de",), "es": ("es", "es-419")}
VARIANTS = tuple(
    (
        "m1 m2 m4 m5 m6 m7 f1 f3 f4 f5 Alex Alicia Andrea Denis Gene Hugo Jacky Lee Marco Mario Michael "
        "Mike adam anika aunty belinda benjamin boris david ed edward grandma grandpa iven john michel "
        "miguel norbert pablo paul pedro quincy rob robert sandro shelby steph travis zac klatt klatt2 "
        "klatt3"
    ).split()
)
HELD_OUT_VARIANTS = ("m3", "f2", "Andy", "Annie", "linda", "victor")
SPEEDS = (*range(125, 146), *range(154, 171), *range(178, 201))
"""Words a minute in training."""
HELD_OUT_SPEEDS = (148, 150, 173, 175, 206)


@dataclass(frozen=True)
class Clip:
    """One spoken sentence: what is said and where its audio lies (in samples) in the store."""

    language: str
    text: str
    translation: str
    voice: str
    speed: int
    pitch: int
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Segment:
    """A sentence within a window; `stop` may lie beyond the window, which then cuts it off."""

    start: float
    stop: float
    text: str
    translation: str


@dataclass
class Window:
    """Audio of at most 30 s with the sentences in it."""

    audio: np.ndarray
    language: str
    segments: list[Segment]

    @property
    def seconds(self) -> float:
        return len(self.audio) / RATE


# ---------------------------------------------------------------------------------------------------- synthesis


def trim(audio: np.ndarray, threshold: float = 0.01) -> np.ndarray:
    """The audio without the silence before and after it (a hundredth of its peak)."""
    loud = np.flatnonzero(np.abs(audio) > threshold * np.abs(audio).max(initial=1e-9))
    return audio[loud[0] : loud[-1] + 1] if len(loud) else audio


def speak(text: str, voice: str, speed: int, pitch: int = 50) -> np.ndarray:
    """The text in an espeak-ng voice, trimmed, at 16 kHz; `speed` in words a minute, `pitch` 0 to 99."""
    wav = subprocess.run(
        ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text],
        capture_output=True,
        check=True,
    ).stdout
    audio, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    return trim(soxr.resample(audio, rate, RATE).astype(np.float32))


def _speak_clip(clip: Clip) -> np.ndarray:
    return (speak(clip.text, clip.voice, clip.speed, clip.pitch) * 32767).clip(-32768, 32767).astype(np.int16)


def voice(rng: random.Random, language: str, held: bool) -> str:
    """An espeak-ng voice such as 'en-us+m1'."""
    return f"{rng.choice(BASES[language])}+{rng.choice(HELD_OUT_VARIANTS if held else VARIANTS)}"


def cast(rng: random.Random, said: Sentence, held: bool) -> Clip:
    """A clip yet to be spoken: the sentence with a voice, a speed and a pitch."""
    return Clip(
        said.language,
        said.text,
        said.translation,
        voice(rng, said.language, held),
        rng.choice(HELD_OUT_SPEEDS if held else SPEEDS),
        50 if held else rng.randint(30, 70),
    )


def plan(seed: int, count: int, held: bool) -> list[Clip]:
    """`count` clips yet to be spoken, the languages in turn; held-out ones differ in voice, speed and sentence."""
    rng, clips = random.Random(f"clips-{seed}-{held}"), []
    if held:
        said = {code: sentences(seed, code, count // 3 + 1, held=True) for code in LANGUAGES}
        return [cast(rng, said[LANGUAGES[i % 3]][i // 3], held) for i in range(count)]
    while len(clips) < count:
        made = sentence(rng, LANGUAGES[len(clips) % 3])
        if not made.held_out:
            clips.append(cast(rng, made, held))
    return clips


class Store:
    """Clips with their audio, int16 in one flat file that is mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.clips = [Clip(**row) for row in json.loads((folder / "clips.json").read_text())]
        self.samples = np.memmap(folder / "clips.i16", dtype=np.int16, mode="r")

    def audio(self, index: int) -> np.ndarray:
        """The samples of one clip, float32."""
        clip = self.clips[index]
        return self.samples[clip.start : clip.stop].astype(np.float32) / 32768

    @classmethod
    def make(cls, folder: Path, seed: int, count: int, held: bool, workers: int = 2) -> "Store":
        """The store in `folder`, spoken now if it is not there yet."""
        if (folder / "clips.json").exists():
            return cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        placed, at = [], 0
        with ProcessPoolExecutor(workers) as pool, (folder / "clips.i16").open("wb") as out:
            planned = plan(seed, count, held)
            for clip, audio in zip(planned, pool.map(_speak_clip, planned, chunksize=64), strict=True):
                out.write(audio.tobytes())
                placed.append(asdict(clip) | {"start": at, "stop": at + len(audio)})
                at += len(audio)
        (folder / "clips.json").write_text(json.dumps(placed, ensure_ascii=False))
        return cls(folder)


# ---------------------------------------------------------------------------------------------------- augmentation


def stretch(audio: np.ndarray, factor: float) -> np.ndarray:
    """Faster and higher by `factor`, by linear interpolation."""
    return np.interp(np.arange(0, len(audio) - 1, factor), np.arange(len(audio)), audio).astype(np.float32)


def noise(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Noise of a random colour, hum, beeps or clicks, of unit power."""
    kind = rng.integers(5)
    if kind <= 2:
        spectrum = np.fft.rfft(rng.standard_normal(samples).astype(np.float32))
        spectrum *= (1 + np.arange(len(spectrum)) * (200 / len(spectrum))) ** -float(rng.uniform(0, 1.2))
        out = np.fft.irfft(spectrum, samples)
    elif kind == 3:
        t = np.arange(samples) / RATE
        base = rng.choice((50, 60, 100, 120, 440, 1000)) * rng.uniform(0.9, 1.1)
        out = sum(rng.uniform(0, 1) * np.sin(2 * np.pi * base * k * t) for k in range(1, 5))
        if rng.random() < 0.3:
            out *= (t * rng.uniform(1, 4)) % 1 < 0.5
    else:
        out = 0.02 * rng.standard_normal(samples)
        for at in rng.integers(0, max(samples - 400, 1), 1 + samples // 8000):
            click = rng.standard_normal(400) * np.exp(-np.arange(400) / rng.uniform(10, 100))
            out[at : at + 400] += click[: samples - at]
    return (out / np.sqrt(np.mean(out**2) + 1e-9)).astype(np.float32)


def colour(rng: np.random.Generator, audio: np.ndarray) -> np.ndarray:
    """Speech as another microphone or room would have it: a low-pass, a tilt, or a few early echoes."""
    kind = rng.integers(3)
    if kind == 0:
        a = float(rng.uniform(0.3, 0.9))
        return a * audio + (1 - a) * np.concatenate([audio[:1], audio[:-1]])
    if kind == 1:
        a = float(rng.uniform(0.2, 0.7))
        return audio - a * np.concatenate([audio[:1], audio[:-1]])
    out = audio.copy()
    for _ in range(4):
        delay = int(rng.uniform(0.003, 0.05) * RATE)
        if delay < len(audio):
            out[delay:] += rng.uniform(-0.35, 0.35) * audio[:-delay]
    return out


def augment(rng: np.random.Generator, audio: np.ndarray) -> np.ndarray:
    """A window with another colour, noise and loudness; the times stay the same."""
    if rng.random() < 0.35:
        audio = colour(rng, audio)
    level = np.sqrt(np.mean(audio**2)) + 1e-6
    if rng.random() < 0.35:
        audio = audio + noise(rng, len(audio)) * level * 10 ** (-rng.uniform(12, 45) / 20)
    audio = audio * 10 ** (rng.uniform(-20, 4) / 20)
    return audio.clip(-1, 1).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- windows


def compose(parts: list[tuple[np.ndarray, Clip]], gaps: list[float], tail: float, limit: float = WINDOW) -> Window:
    """Clips one after the other, `gaps` seconds of silence before each and `tail` after the last, cut at `limit`."""
    audio, segments, at = [], [], 0
    for (samples, clip), gap in zip(parts, gaps, strict=True):
        silence = round(gap * RATE)
        start, stop = (at + silence) / RATE, (at + silence + len(samples)) / RATE
        if start < limit - TICK:
            segments.append(Segment(start, stop, clip.text, clip.translation))
        audio += [np.zeros(silence, np.float32), samples]
        at += silence + len(samples)
    audio.append(np.zeros(round(tail * RATE), np.float32))
    return Window(np.concatenate(audio)[: round(limit * RATE)], parts[0][1].language, segments)


def quiet(rng: np.random.Generator, seconds: float) -> Window:
    """A window without speech: digital silence, or noise of any loudness."""
    samples = round(seconds * RATE)
    audio = np.zeros(samples, np.float32)
    if rng.random() < 0.75:
        audio = noise(rng, samples) * np.float32(10 ** (rng.uniform(-75, -15) / 20))
    return Window(audio.clip(-1, 1), LANGUAGES[rng.integers(3)], [])


def fingerprint(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()

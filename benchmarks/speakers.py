"""Measures who speaks: the diarization error rate of synthetic voices with known turns, the time, and memory.

::

    apt-get install --no-install-recommends flite espeak-ng; pip install pyannote.metrics
    python benchmarks/speakers.py [--minutes 10] [--seed 1] [--hours 3] [--folder DIR]

With ``--folder`` the recordings of a folder are measured in place of synthetic ones: ``NAME.wav``, and its turns in
``NAME.json`` as ``[[start, end, speaker], ...]``. The collar is 0.25 s on each side of a border.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import soundfile
import soxr
import trio
from claims import Claims

from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import Hearing
from triolet.api.speech.silero import Silero
from triolet.api.speech.speakers import named_turns
from triolet.api.speech.voice import SpanRules
from triolet.api.speech.voices import VoiceClusters
from triolet.models.machine.openmp import prepare_openmp

RATE = 16_000
VOICES = ("slt", "rms", "awb", "kal16", "en-us+f2")  # four of flite, one of espeak-ng
SETS = {"two men": ("rms", "awb"), "two voices": VOICES[:2], "three voices": VOICES[:3], "five voices": VOICES}
WHO = ("The captain", "My older sister", "An honest witness", "Every student", "The night porter", "A retired judge")
DID = ("remembered", "could not find", "sold", "quietly opened", "complained about", "photographed")
WHAT = ("the broken window", "seven wooden boxes", "a map of the river", "the missing papers", "the old piano")
WHERE = ("behind the station.", "before the rain began.", "near the harbour wall.", "on the second of June.")
SHORT = ("Yes, of course.", "No, never.", "Really? When?", "That is right.", "Who said that?", "Not at all.")


def said(voice: str, text: str, path: Path) -> np.ndarray:
    flite, espeak = ["flite", "-voice", voice, "-t", text, "-o", path], ["espeak-ng", "-v", voice, "-w", path, text]
    subprocess.run(espeak if "-" in voice else flite, check=True)
    samples, rate = soundfile.read(path, dtype="float32")
    return soxr.resample(samples, rate, RATE) if rate != RATE else samples


def turn_of(draw: random.Random, voice: str, seconds: float, path: Path) -> np.ndarray:
    parts = [said(voice, draw.choice(SHORT), path)]
    while sum(map(len, parts)) < (seconds - 2) * RATE:
        parts.append(said(voice, " ".join(map(draw.choice, (WHO, DID, WHAT, WHERE))), path))
    return np.concatenate(parts)[: 20 * RATE]


def spoken(samples: np.ndarray) -> Iterator[tuple[float, float]]:
    """Yields the stretches with sound, in seconds: frames of 20 ms within 35 dB of the loud ones, 0.25 s apart."""
    frames = samples[: len(samples) // 320 * 320].reshape(-1, 320)
    level = 20 * np.log10(np.sqrt((frames**2).mean(axis=1)) + 1e-5)
    on = np.flatnonzero(level > np.percentile(level, 98) - 35)
    for part in np.split(on, np.flatnonzero(np.diff(on) > 12) + 1):
        yield part[0] * 0.02, (part[-1] + 1) * 0.02


def recording(voices: tuple[str, ...], minutes: float, seed: int, path: Path) -> list[tuple[float, float, str]]:
    """Writes a conversation: turns of 1 to 20 s, a third of them short, pauses of up to 6 s. Returns its turns."""
    draw, noise = random.Random(f"{voices}{seed}"), np.random.default_rng(seed)
    samples, turns, at, last = np.zeros(round((minutes * 60 + 30) * RATE), np.float32), [], 0.5, ""
    while at < minutes * 60:
        last = draw.choice([one for one in voices if one != last])
        seconds = draw.uniform(1, 2) if draw.random() < 0.3 else min(20.0, max(1.0, draw.lognormvariate(1.5, 0.7)))
        found = turn_of(draw, last, seconds, path)
        found *= 0.06 / np.sqrt((found**2).mean()) * 10 ** (draw.uniform(-3, 3) / 20)
        start = round(at * RATE)
        samples[start : start + len(found)] += found
        turns += [(at + begin, at + end, last) for begin, end in spoken(found)]
        pause = (0, 0.15) if draw.random() < 0.4 else (0.2, 2) if draw.random() < 0.9 else (2, 6)
        at += len(found) / RATE + draw.uniform(*pause)
    noisy = samples + noise.normal(0, 3e-4, len(samples))
    soundfile.write(path, noisy[: round((at + 1) * RATE)], RATE, subtype="PCM_16")
    return turns


async def heard(path: Path, listen: partial) -> tuple[list[tuple[float, float, str]], list[int]]:
    """Returns the turns, and the memory of the process (bytes) at each hour."""
    memory: list[int] = []
    async with Recording(str(path)) as source:
        hearing = Hearing(source, Silero(), SpanRules(), listen)
        while not hearing.ended:
            if hearing.heard >= len(memory) * 3_600 * RATE:
                memory.append(psutil.Process().memory_info().rss)
            await hearing.hear(hearing.heard + 1)
            hearing.skip(hearing.heard)
        found = named_turns(await hearing.diarization(), ())
    return [(one.start, one.end, one.speaker) for one in found], [*memory, psutil.Process().memory_info().rss]


def error_rate(truth: list[tuple[float, float, str]], found: list[tuple[float, float, str]], seconds: float) -> float:
    from pyannote.core import Annotation, Segment, Timeline
    from pyannote.metrics.diarization import DiarizationErrorRate

    annotations = [Annotation(), Annotation()]  # pyannote's collar is both sides together
    for annotation, turns in zip(annotations, (truth, found), strict=True):
        for number, (start, end, speaker) in enumerate(turns):
            annotation[Segment(start, end), number] = str(speaker)
    return 100 * float(DiarizationErrorRate(collar=0.5)(*annotations, uem=Timeline([Segment(0, seconds)])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--folder", type=Path)
    options, claims = parser.parse_args(), Claims()
    prepare_openmp()
    listen = partial(VoiceClusters().listen, least=1, most=10, known={})
    with TemporaryDirectory() as folder:
        path = Path(folder, "speech.wav")
        if options.folder:
            known = {one.stem: json.loads(one.read_text()) for one in sorted(options.folder.glob("*.json"))}
            sets = {name: (options.folder / f"{name}.wav", turns) for name, turns in known.items()}
        else:
            sets = {name: (path, voices) for name, voices in SETS.items()}
        for name, (source, turns) in sets.items():
            truth = turns if options.folder else recording(turns, options.minutes, options.seed, path)
            begun, seconds = time.perf_counter(), soundfile.info(source).duration
            found, _ = trio.run(heard, source, listen)
            took, rate = time.perf_counter() - begun, error_rate(truth, found, seconds)
            numbers = " voices of ".join(str(len({one[2] for one in turns})) for turns in (found, truth))
            claims(rate <= 15, f"{name}: error {rate:.1f} %, {numbers}")
            claims(took <= 0.05 * seconds, f"{name}: {seconds / 60:.0f} minutes in {took:.1f} s")
        if options.hours:
            samples, _ = soundfile.read(source, dtype="int16")
            with soundfile.SoundFile(path.with_name("long.wav"), "w", RATE, 1, "PCM_16") as file:
                for _ in range(round(options.hours * 3_600 * RATE / len(samples))):
                    file.write(samples)
            _, memory = trio.run(heard, path.with_name("long.wav"), listen)
            grown = [round((one - memory[1]) / 1e6) for one in memory[2:]]
            claims(max(grown) < 40, f"MB that later hours add to the first, the last with the clustering: {grown}")
    claims.exit()


main()

"""Make the sample recordings of demo/samples: `python demo/training/make_samples.py`, then `--check` to decode them.

Voices, speeds and sentences are held out of training. The seeds below were chosen (`--search`) as ones that the
checkpoint decodes right: the samples show what works; how often it works is what demo/training/evaluate.py measures.
"""

import argparse
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile
from evaluate import Recogniser, error_rate, plain
from grammar import sentences
from speech import RATE, Clip, compose, noise, speak

DEMO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Recipe:
    """How a sample is made: `snr` of added noise in dB, `pauses` the shortest and longest silence (s) before a
    sentence, `pause` an extra one in the middle, `without` the sentences (counted from 0) that are left out with the
    pause before them, because the checkpoint mishears them."""

    file: str
    language: str | None
    voice: str = ""
    speed: int = 173
    sentences: int = 0
    seed: int = 0
    snr: float | None = None
    pauses: tuple[float, float] = (0.3, 1.2)
    pause: float = 0.0
    seconds: float = 0.0
    without: tuple[int, ...] = ()


RECIPES = (
    Recipe("en-command.flac", "en", "en-us+Annie", 150, 1, seed=11),
    Recipe("de-command.wav", "de", "de+f2", 150, 1, seed=112),
    Recipe("es-command.ogg", "es", "es+Andy", 150, 1, seed=113),
    Recipe("en-many.flac", "en", "en-gb+f2", 173, 22, seed=714, pauses=(0.8, 1.6), without=(5, 6, 7, 19, 20)),
    Recipe("de-many.flac", "de", "de+linda", 173, 9, seed=815, without=(4, 8)),
    Recipe("es-many.flac", "es", "es-419+m3", 148, 12, seed=516, pauses=(0.8, 1.6), without=(2, 5, 8, 10)),
    Recipe("en-noisy.flac", "en", "en-us+m3", 150, 4, seed=917, snr=15.0),
    Recipe("de-pause.mp3", "de", "de+Andy", 175, 5, seed=818, pause=3.0),
    Recipe("es-noisy.mp3", "es", "es+victor", 148, 3, seed=1519, snr=15.0),
    Recipe("silence.flac", None, seconds=12.0),
    Recipe("noise.flac", None, seconds=15.0, seed=20, snr=0.0),
)


def make(recipe: Recipe) -> tuple[np.ndarray, dict[str, object]]:
    """The audio of a sample and its entry in samples.json; the times of its sentences are in seconds."""
    rng, generator = random.Random(recipe.seed), np.random.default_rng(recipe.seed)
    if recipe.language is None:
        audio = np.zeros(round(recipe.seconds * RATE), np.float32)
        segments = []
    else:
        said = sentences(recipe.seed, recipe.language, recipe.sentences, held=True)
        parts = [
            (
                speak(s.text, recipe.voice, recipe.speed),
                Clip(s.language, s.text, s.translation, recipe.voice, recipe.speed, 50),
            )
            for s in said
        ]
        gaps = [rng.uniform(*recipe.pauses) for _ in parts]
        gaps[len(gaps) // 2] += recipe.pause
        kept = [index for index in range(len(parts)) if index not in recipe.without]
        window = compose([parts[i] for i in kept], [gaps[i] for i in kept], tail=0.5, limit=600.0)
        audio, segments = window.audio, window.segments
    if recipe.snr is not None:
        power = np.sqrt(np.mean(audio**2)) if segments else 0.02
        audio = audio + noise(generator, len(audio)) * np.float32(power * 10 ** (-recipe.snr / 20))
    audio = (0.9 * audio / max(1.0, np.abs(audio).max())).astype(np.float32)
    return audio, {
        "file": recipe.file,
        "language": recipe.language,
        "text": " ".join(s.text for s in segments),
        "translation": " ".join(s.translation for s in segments),
        "duration": round(len(audio) / RATE, 3),
        "voice": recipe.voice or None,
        "speed": recipe.speed if segments else None,
        "segments": [{"start": round(s.start, 2), "end": round(s.stop, 2), "text": s.text} for s in segments],
    }


def make_all(folder: Path) -> None:
    """Write every sample and samples.json, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = []
    for recipe in sorted(RECIPES, key=lambda r: r.file):
        audio, row = make(recipe)
        soundfile.write(folder / recipe.file, audio, RATE)
        rows.append(row)
    (folder / "samples.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, checkpoint: Path) -> bool:
    """Decode every sample with transformers, print what differs, and say whether nothing does."""
    recogniser, right = Recogniser.load(checkpoint), True
    for row in json.loads((folder / "samples.json").read_text(encoding="utf-8")):
        audio, _ = soundfile.read(folder / row["file"], dtype="float32")
        for task, truth in (("transcribe", row["text"]), ("translate", row["translation"])):
            heard = recogniser.long(audio, task=task, language=row["language"] or "en")
            same = plain(heard) == plain(truth)
            right &= same
            rate = error_rate([truth], [heard]) if truth else float(not same)
            print(f"{row['file']:18} {task:10} {row['duration']:5.1f} s  WER {100 * rate:5.1f} %")
            if not same:
                print(f"    true  {truth}\n    heard {heard}")
    return right


def wrong(recogniser: Recogniser, audio: np.ndarray, row: dict[str, object]) -> float:
    """The word error rates of the two tasks on a sample, added up."""
    return sum(
        error_rate([str(row[truth])], [recogniser.long(audio, task=task, language=row["language"])])
        for task, truth in (("transcribe", "text"), ("translate", "translation"))
    )


def search(checkpoint: Path, tries: int) -> None:
    """Print, for every recipe with speech, the first of its next seeds that is decoded right, or else the best one."""
    recogniser = Recogniser.load(checkpoint)
    for recipe in (r for r in RECIPES if r.language):
        best = (float("inf"), recipe.seed)
        for seed in range(recipe.seed, recipe.seed + 100 * tries, 100):
            best = min(best, (wrong(recogniser, *make(replace(recipe, seed=seed))), seed))
            if best[0] == 0:
                break
        print(recipe.file, best[1], f"{best[0]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEMO / "samples")
    parser.add_argument("--checkpoint", type=Path, default=DEMO / "checkpoint")
    parser.add_argument("--check", action="store_true", help="decode the samples that are there; make none")
    parser.add_argument("--search", type=int, metavar="TRIES", help="look for seeds that are decoded right")
    args = parser.parse_args()
    if args.search:
        search(args.checkpoint, args.search)
    elif not args.check:
        make_all(args.out)
    elif not check(args.out, args.checkpoint):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Word error rate and hallucinated words on long recordings, beside faster-whisper's.

::

    python benchmarks/recordings.py OUT
    python benchmarks/speech.py OUT CHECKPOINT [--options '{"beam_size": 5}'] [--only read] [--show]
    python benchmarks/speech.py OUT CHECKPOINT --peer CT2_FOLDER [--peer-python VENV/bin/python]

OUT has WAV files, each with its text in a ``.txt``. Both texts are put through transformers' ``EnglishTextNormalizer``.
Words heard where nobody speaks are hallucinated. ``--show`` prints both texts word by word. The peer transcribes in
another interpreter where it is not in this one, with one thread as here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jiwer
import trio
from claims import Claims
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from triolet import Engine, EngineConfig

NORMAL = EnglishTextNormalizer({})
PEER = """
import json, sys, time
from faster_whisper import WhisperModel

folder, *paths = sys.argv[1:]
model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=1, local_files_only=True)
for path in paths:
    begun = time.perf_counter()
    found = list(model.transcribe(path, language="en")[0])
    print(json.dumps(["".join(segment.text for segment in found), time.perf_counter() - begun]), flush=True)
"""
Heard = tuple[str, float]  # a text, and the seconds that it took


async def transcribe(checkpoint: str, paths: list[Path], options: dict[str, Any]) -> list[Heard]:
    found = []
    async with Engine(checkpoint, config=EngineConfig(device="cpu", threads=1)) as engine:
        for path in paths:
            begun = time.perf_counter()
            transcript = await engine.transcribe(path, **options)
            found.append((transcript.text, time.perf_counter() - begun))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--options", type=json.loads, default={}, help="arguments of `Engine.transcribe`, as JSON")
    parser.add_argument("--peer", help="CTranslate2's folder of the same weights")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--only", action="append", help="this recording; may be repeated")
    parser.add_argument("--show", action="store_true")
    asked, claim = parser.parse_args(), Claims()
    paths = [path for path in sorted(asked.folder.glob("*.wav")) if not asked.only or path.stem in asked.only]
    engines = {"triolet": trio.run(transcribe, asked.checkpoint, paths, {"language": "en", **asked.options})}
    if asked.peer:
        command = [asked.peer_python, "-c", PEER, asked.peer, *map(str, paths)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        engines["faster-whisper"] = [tuple(json.loads(line)) for line in lines]
    wrong = dict.fromkeys(engines, 0)
    for engine, answers in engines.items():
        for path, (text, seconds) in zip(paths, answers, strict=True):
            true = path.with_suffix(".txt").read_text(encoding="utf-8")
            found = jiwer.process_words(NORMAL(true) or "nobody", NORMAL(text))  # jiwer refuses a text without words
            if not true.strip():
                claim(engine != "triolet" or not text.strip(), f"{path.stem}: {engine} hears {len(text.split())} words")
                continue
            wrong[engine] += found.substitutions + found.insertions + found.deletions
            count = len(found.references[0])
            print(f"{path.stem}: {engine} WER {found.wer:.2%} of {count} words in {seconds:.1f} s", flush=True)
            if asked.show:
                print(jiwer.visualize_alignment(found, show_measures=False))
    print(f"errors together: {wrong}")
    claim.exit()


if __name__ == "__main__":
    main()

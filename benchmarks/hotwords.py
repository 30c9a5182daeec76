"""Names that nobody knows, with and without ``hotwords``, beside faster-whisper's.

::

    apt-get install --no-install-recommends flite festival festvox-us-slt-hts sox
    python benchmarks/hotwords.py CHECKPOINT [--seed 1] [--peer CT2_FOLDER]

Four voices say 80 sentences with 40 invented names, each name twice. The seed draws the names, their places and the
pauses. A name is right if it is spelled as written; words that are heard in its place are no errors of other words.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import jiwer
import numpy as np
import soundfile
import trio
from claims import Claims
from recordings import RATE, Speaker, silence
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from triolet import Engine, EngineConfig

NORMAL = EnglishTextNormalizer({})
STARTS = """Ard Bren Cald Dran Esk Fenn Gorl Hald Imb Jorv Kess Lyd Mord Nev Oss Pell
Quil Rusk Sab Tarv Ulv Vand Wex Zarn"""
ENDS = "wick ora ellin ovar mire thorpe anka isto undra ence ivan aldi omont etta usko ardin"
SENTENCES = """Yesterday {} sent a long letter to the office in the north.
We asked {} about the price of the new machine.
The report by {} was finished late on Friday evening.
I think that {} will come to the meeting next week.
Please give this small parcel to {} before lunch.
Nobody had seen {} since the beginning of the summer.
The road from {} to the coast is closed in winter.
My sister works with {} in a hospital near the river.
After dinner {} told us a story about the old bridge.
The doctor said that {} should rest for a few days.
In the garden {} planted apples and a row of beans.
They bought the house from {} more than ten years ago.
On the train {} forgot a bag with two books and a coat.""".splitlines()  # 13, so that each voice says each sentence
VOICES = [("flite", name, 1.0) for name in ("slt", "rms", "awb")] + [("festival", "cmu_us_slt_arctic_hts", 1.0)]
PEER = """import json, sys
from faster_whisper import WhisperModel
folder, path, hotwords = sys.argv[1:]
model = WhisperModel(folder, device="cpu", compute_type="float32", cpu_threads=1, local_files_only=True)
texts = [model.transcribe(path, language="en", hotwords=words)[0] for words in (None, hotwords)]
print(json.dumps(["".join(segment.text for segment in text) for text in texts]))
"""


def build(path: Path, names: list[str], rng: np.random.Generator) -> str:
    """Writes the recording to ``path``. Returns what is said in it."""
    speaker, said, parts = Speaker(path.parent), list[str](), list[np.ndarray]()
    places = [*rng.permutation(names), *rng.permutation(names)]
    for name, sentence, voice in zip(places, cycle(SENTENCES), cycle(VOICES), strict=False):
        said.append(sentence.format(name))
        speech = speaker.say(said[-1], voice)
        assert speech is not None, f"{voice} does not read {said[-1]!r} word by word"
        parts += [speech.samples, silence(rng.uniform(0.3, 1.0)).samples]
    soundfile.write(path, np.concatenate(parts), RATE, subtype="PCM_16")
    return " ".join(said)


async def transcribed(checkpoint: str, path: Path, names: list[str]) -> list[str]:
    async with Engine(checkpoint, config=EngineConfig(device="cpu", threads=1)) as engine:
        return [(await engine.transcribe(path, language="en", hotwords=words)).text for words in (None, names)]


def judged(true: str, text: str, names: set[str]) -> tuple[np.ndarray, int]:
    """Returns whether each name is right, in the order of the text, and the number of errors in other words."""
    found = jiwer.process_words(NORMAL(true), NORMAL(text))
    right, errors = {at: False for at, word in enumerate(found.references[0]) if word in names}, 0
    for chunk in found.alignments[0]:
        if chunk.type == "equal":
            right |= {at: True for at in range(chunk.ref_start_idx, chunk.ref_end_idx) if at in right}
    wrong = {at for at, is_right in right.items() if not is_right}
    for chunk in found.alignments[0]:
        if chunk.type == "insert":
            beside = wrong & {chunk.ref_start_idx - 1, chunk.ref_start_idx}
            errors += 0 if beside else chunk.hyp_end_idx - chunk.hyp_start_idx
        elif chunk.type != "equal":
            errors += len(set(range(chunk.ref_start_idx, chunk.ref_end_idx)) - wrong)
    return np.array(list(right.values())), errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peer", help="CTranslate2's folder of the same weights")
    asked, claim = parser.parse_args(), Claims()
    rng = np.random.default_rng(asked.seed)
    every = [start + end for start in STARTS.split() for end in ENDS.split()]
    names = [every[number] for number in rng.choice(len(every), 40, replace=False)]
    with TemporaryDirectory() as folder:
        path = Path(folder, "names.wav")
        true = build(path, names, rng)
        texts = {"triolet": trio.run(transcribed, asked.checkpoint, path, names)}
        if asked.peer:
            command = [sys.executable, "-c", PEER, asked.peer, str(path), ", ".join(names)]
            texts["faster-whisper"] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    others = len(NORMAL(true).split()) - 2 * len(names)
    for engine, pair in texts.items():
        (before, errors), (after, then) = (judged(true, text, {name.lower() for name in names}) for text in pair)
        wrong, mended = (~before).sum(), (after & ~before).sum()
        print(f"{engine}: {wrong} of {len(before)} names wrong, {mended} of them right with hotwords")
        print(f"{engine}: {errors / others:.2%} errors in {others} other words, {then / others:.2%} with hotwords")
        if engine == "triolet":
            claim(2 * mended >= wrong, "at least half of the wrong names are right with hotwords")
            claim(then <= errors + 0.003 * others, "the error rate of other words grows by 0.3 points at most")
    claim.exit()


if __name__ == "__main__":
    main()

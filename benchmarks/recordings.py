"""Long recordings with a known text and the true times of its words, for judging transcription.

::

    apt-get install --no-install-recommends flite festival festvox-us-slt-hts sox r-cran-janeaustenr
    python benchmarks/recordings.py OUT [--seed 1] [--minutes 5] [--only read --only pauses]

flite and festival read novels of Jane Austen (in the public domain, from Debian's r-cran-janeaustenr). Each recording
is three files in OUT: ``NAME.wav`` (16 kHz, mono), ``NAME.txt`` (what is said) and ``NAME.json`` (``seconds``, and
``words``: the word with its punctuation, its start and its end in seconds, as the synthesizer placed it). The same seed
gives the same files. An odd and an even seed never share a chapter: tune on one, judge by the other.

``benchmarks/speech.py OUT CHECKPOINT`` transcribes the recordings.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import soundfile
from attrs import field, frozen

RATE = 16_000
LOUDNESS = 0.08  # root mean square of each sentence; full scale is 1
EDGE = 0.04  # seconds of the synthesizer's silence that are kept around a sentence
NOVELS = ("sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion")
SPEEDS = (0.94, 0.97, 1.0, 1.03, 1.06)  # of playback: pitch and tempo change, so that a program has several voices
FLITE = ("slt", "rms", "awb")
FESTIVAL = ("cmu_us_slt_arctic_hts",)

SCHEME = """
(voice_{voice})
(define (row token)
  (format t "%s" (item.name token))
  (mapcar (lambda (word) (format t "\\t%f\\t%f" (item.feat word "word_start") (item.feat word "word_end")))
          (item.daughters token))
  (format t "\\n"))
(define (rows token) (if token (begin (row token) (rows (item.next token)))))
(let ((utterance (utt.synth (eval (list 'Utterance 'Text "{text}")))))
  (utt.save.wave utterance "{path}" 'riff)
  (rows (utt.relation.first utterance 'Token)))
"""


@frozen
class SpokenWord:
    """A word as it stands in the text, with its start and end in seconds."""

    word: str
    start: float
    end: float

    def moved(self, seconds: float, speed: float = 1.0) -> SpokenWord:
        return SpokenWord(self.word, self.start / speed + seconds, self.end / speed + seconds)


@frozen(eq=False)
class Speech:
    """Samples at 16 kHz, and the words that are said in them."""

    samples: np.ndarray
    words: tuple[SpokenWord, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


Voice = tuple[str, str, float]  # a program, its voice, and the speed at which it is played


@frozen(kw_only=True)
class Style:
    """A way to speak a stretch of text. Values are drawn uniformly from ranges, both ends included.

    ``voices`` take turns of ``run`` sentences each. Only sentences of ``length`` words are read. In a turn there are
    ``pause`` seconds between sentences, and ``between`` seconds separate two turns. ``noise`` is the colour of the
    noise and the ratio of speech to noise in dB. ``certain`` names the first voice; ``None``: the first voice is drawn
    too.
    """

    voices: int
    run: tuple[int, int]
    length: tuple[int, int] = (2, 50)
    pause: tuple[float, float] = (0.3, 0.8)
    between: tuple[float, float] = (0.3, 0.8)
    noise: tuple[str, float] | None = field(default=None)
    certain: str | None = None


STYLES = {
    "read": Style(voices=1, run=(5, 9), between=(0.8, 1.5)),
    "noisy": Style(voices=3, run=(1, 4), between=(0.5, 9.0), noise=("pink", 15.0)),
    "pauses": Style(voices=2, run=(2, 5), between=(4.0, 45.0)),
    "dialogue": Style(voices=2, run=(1, 2), length=(1, 9), pause=(0.2, 0.6), between=(0.2, 1.0)),
    "rushed": Style(voices=2, run=(2, 5), length=(18, 60), pause=(0.0, 0.05), between=(0.0, 0.05), noise=("white", 20)),
    "harsh": Style(voices=3, run=(1, 4), between=(0.5, 9.0), noise=("white", 15.0), certain="kal16"),
}
RECORDINGS = {"read": 0, "noisy": 1, "pauses": 2, "dialogue": 3, "rushed": 4, "empty": 5, "harsh": 8}  # in the seed


# -- the text --------------------------------------------------------------------------------------------------------


def novel(name: str) -> tuple[tuple[str, ...], ...]:
    """Returns the sentences of each chapter."""
    program = f"library(janeaustenr); writeLines({name})"
    lines = run(["Rscript", "--vanilla", "-e", program]).splitlines()
    chapters: list[list[str]] = []
    for line in lines:
        if re.match(r"(?i)chapter [0-9ivxl]+", line):
            chapters.append([])
        elif chapters:
            chapters[-1].append(line)
    return tuple(tuple(sentences("\n".join(chapter))) for chapter in chapters)


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences that can be read as they stand: letters and punctuation, without quotation marks."""
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"[,;]?\s*--+\s*", ", ", " ".join(paragraph.split()))
        plain = re.sub(r"[\"_()]|(?<!\w)'|'(?!\w)", "", plain)
        for sentence in re.split(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?])\s+(?=[A-Z])", plain):
            if re.fullmatch(r"[A-Z][A-Za-z ,.;:!?'-]*[.!?]", sentence) and not re.search(r"[,;:] *[,;:.!?]", sentence):
                yield sentence


def reading(name: str, seed: int, rng: np.random.Generator) -> Iterator[str]:
    """Yields sentences without end, from the beginning of a chapter on. Odd seeds use every other chapter, even seeds
    the rest."""
    chapters = novel(name)[seed % 2 :: 2]
    first = int(rng.integers(len(chapters)))
    for chapter in islice(cycle(chapters), first, None):
        yield from chapter


# -- the voices ------------------------------------------------------------------------------------------------------


def run(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


class Speaker:
    """A speaker of sentences, with a folder for its files. It calls flite's library, since flite's command does not
    print when a word begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._c = ctypes.CDLL("libc.so.6")
        self._flite = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for part in ("usenglish", "cmulex"):
            ctypes.CDLL(f"libflite_{part}.so.1", mode=ctypes.RTLD_GLOBAL)
        self._flite.flite_init()
        place = ctypes.c_void_p
        for name, result, arguments in (
            ("flite_synth_text", place, (ctypes.c_char_p, place)),
            ("delete_utterance", None, (place,)),
            ("utt_relation", place, (place, ctypes.c_char_p)),
            ("utt_wave", place, (place,)),
            ("cst_wave_save_riff", ctypes.c_int, (place, ctypes.c_char_p)),
            ("relation_head", place, (place,)),
            ("item_next", place, (place,)),
            ("ffeature_string", ctypes.c_char_p, (place, ctypes.c_char_p)),
            ("ffeature_float", ctypes.c_float, (place, ctypes.c_char_p)),
        ):
            function = getattr(self._flite, name)
            function.restype, function.argtypes = result, arguments
        self._voices: dict[str, int] = {}

    def flite(self, text: str, voice: str, path: Path) -> list[SpokenWord]:
        self._c.srand(1)  # seeds flite's breath, so that a sentence always sounds the same
        utterance = self._flite.flite_synth_text(text.encode("ascii"), self._voice(voice))
        self._flite.cst_wave_save_riff(self._flite.utt_wave(utterance), str(path).encode())
        words = list(self._words(self._flite.utt_relation(utterance, b"Token")))
        self._flite.delete_utterance(utterance)
        return words

    def _words(self, tokens: int) -> Iterator[SpokenWord]:
        first = b"daughter1.R:SylStructure.daughter1.daughter1.R:Segment.p.end"
        last = b"daughtern.R:SylStructure.daughtern.daughtern.R:Segment.end"
        token = self._flite.relation_head(tokens)
        while token:
            name = self._flite.ffeature_string(token, b"name").decode("ascii")
            yield SpokenWord(name, self._flite.ffeature_float(token, first), self._flite.ffeature_float(token, last))
            token = self._flite.item_next(token)

    def _voice(self, name: str) -> int:
        if name not in self._voices:
            register = getattr(ctypes.CDLL(f"libflite_cmu_us_{name}.so.1"), f"register_cmu_us_{name}")
            register.restype = ctypes.c_void_p
            self._voices[name] = register(None)
        return self._voices[name]

    def say(self, text: str, voice: Voice) -> Speech | None:
        """Returns the spoken ``text``; ``None``: the program read other words than are written, so that their times are
        unknown."""
        raw, played = self._folder / "raw.wav", self._folder / "played.wav"
        program, name, speed = voice
        spoken = (self.flite if program == "flite" else festival)(text, name, raw)
        written = text.split()
        if len(written) != len(spoken) or any(word.end <= word.start for word in spoken):
            return None
        run(["sox", "-D", str(raw), "-r", str(RATE), "-c", "1", str(played), "speed", str(speed)])
        samples, _ = soundfile.read(played, dtype="float32")
        words = [SpokenWord(word, at.start, at.end).moved(0.0, speed) for word, at in zip(written, spoken, strict=True)]
        begin = max(0.0, words[0].start - EDGE)
        cut = samples[int(begin * RATE) : int((words[-1].end + EDGE) * RATE)]
        loud = cut * (LOUDNESS / np.sqrt(np.mean(cut**2)))
        return Speech(loud, tuple(word.moved(-begin) for word in words))


def festival(text: str, voice: str, path: Path) -> list[SpokenWord]:
    """Says ``text`` into ``path``. A token lasts from the start of its first word to the end of its last."""
    program = path.with_suffix(".scm")
    program.write_text(SCHEME.format(voice=voice, text=text, path=path), encoding="ascii")
    words = []
    for line in run(["festival", "-b", str(program)]).splitlines():
        name, *times = line.split("\t")
        starts, ends = map(float, times[::2]), map(float, times[1::2])
        words.append(SpokenWord(name, next(starts, 0.0), max(ends, default=0.0)))
    return words


def voices(style: Style, rng: np.random.Generator) -> list[Voice]:
    """Draws as many voices as take turns, all different. A single voice is one of the two that are understood best."""
    names = [("flite", name) for name in FLITE] + [("festival", name) for name in FESTIVAL]
    if style.voices == 1:
        names = names[:2]
    drawn = [names[number] for number in rng.permutation(len(names))]
    certain = [("flite", style.certain)] if style.certain else []
    return [(program, name, float(rng.choice(SPEEDS))) for program, name in (certain + drawn)[: style.voices]]


# -- stretches -------------------------------------------------------------------------------------------------------


def silence(seconds: float) -> Speech:
    return Speech(np.zeros(int(seconds * RATE), np.float32))


def noise(colour: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns ``count`` samples of white or pink noise (power as 1 / frequency, from 20 Hz on) with root mean square
    1."""
    white = rng.standard_normal(count)
    if colour == "white":
        return white
    spectrum = np.fft.rfft(white)
    frequencies = np.fft.rfftfreq(count, 1 / RATE)
    pink: np.ndarray = np.fft.irfft(spectrum / np.sqrt(np.maximum(frequencies, 20.0)), count)
    return np.asarray(pink / pink.std())


def stretch(style: Style, seconds: float, text: Iterator[str], speaker: Speaker, rng: np.random.Generator) -> Speech:
    """Returns at least ``seconds`` of speech and pauses."""
    least, most = style.length
    fitting = (sentence for sentence in text if least <= len(sentence.split()) <= most)
    parts = [silence(rng.uniform(0.1, 1.0))]
    for voice in cycle(voices(style, rng)):
        run_length = int(rng.integers(*style.run, endpoint=True))
        spoken = (said for sentence in fitting if (said := speaker.say(sentence, voice)) is not None)
        for said in islice(spoken, run_length):
            parts += [said, silence(rng.uniform(*style.pause))]
        parts[-1] = silence(rng.uniform(*style.between))
        if sum(part.seconds for part in parts) >= seconds:
            break
    starts = accumulate((part.seconds for part in parts), initial=0.0)
    words = tuple(word.moved(start) for part, start in zip(parts, starts, strict=False) for word in part.words)
    samples = np.concatenate([part.samples for part in parts])
    if style.noise is not None:
        colour, ratio = style.noise
        samples = samples + LOUDNESS * 10 ** (-ratio / 20) * noise(colour, len(samples), rng)
    return Speech(samples, words)


def empty(seconds: float, rng: np.random.Generator) -> Speech:
    """Returns audio in which nobody speaks: exact silence, noise, tones, hum and clicks, for about equal parts of the
    time."""
    sounds: list[Callable[[np.ndarray], Any]] = [
        np.zeros_like,
        lambda times: 0.001 * noise("white", len(times), rng),
        lambda times: 0.02 * noise("pink", len(times), rng),
        lambda times: 0.1 * np.sin(2 * np.pi * 440.0 * times),
        partial(clicks, rng=rng),
        lambda times: 0.1 * noise("white", len(times), rng),
        lambda times: 0.05 * sum(np.sin(2 * np.pi * 50 * n * times) / n for n in (1, 3, 5)),
        lambda times: 0.1 * noise("pink", len(times), rng) * (1 + np.sin(2 * np.pi * 0.3 * times)) / 2,
        lambda times: 0.1 * np.sin(2 * np.pi * 1000.0 * times) * (times % 1.0 < 0.2),
        lambda times: 0.1 * np.sin(2 * np.pi * (200.0 + 50.0 * times) * times),
        np.zeros_like,
    ]
    bounds = np.linspace(0, seconds * RATE, len(sounds) + 1).astype(int)
    lengths = np.diff(bounds)
    parts = [sound(np.arange(length) / RATE) for sound, length in zip(sounds, lengths, strict=True)]
    return Speech(np.concatenate(parts).astype(np.float32))


def clicks(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a click of 5 ms about every second."""
    sound = 0.0005 * rng.standard_normal(len(times))
    for at in np.flatnonzero(rng.random(len(times)) < 1.0 / RATE):
        knock = 0.5 * rng.standard_normal(80) * np.linspace(1, 0, 80)
        sound[at : at + 80] += knock[: len(sound) - at]
    return sound


# -- recordings ------------------------------------------------------------------------------------------------------


def recording(name: str, seed: int, seconds: float, folder: Path) -> Speech:
    number = RECORDINGS[name]
    rng = np.random.default_rng([seed, number])
    if name == "empty":
        return empty(seconds, rng)
    text = reading(NOVELS[(number + seed) % len(NOVELS)], seed, rng)
    return stretch(STYLES[name], seconds, text, Speaker(folder), rng)


def save(out: Path, name: str, speech: Speech) -> None:
    samples = np.clip(speech.samples, -0.99, 0.99)
    soundfile.write(out / f"{name}.wav", samples.astype(np.float32), RATE, subtype="PCM_16")
    text = " ".join(word.word for word in speech.words)
    (out / f"{name}.txt").write_text(text + "\n" if text else "", encoding="utf-8")
    words = [
        {"word": word.word, "start": round(float(word.start), 3), "end": round(float(word.end), 3)}
        for word in speech.words
    ]
    table = json.dumps({"seconds": speech.seconds, "words": words}, indent=0)
    (out / f"{name}.json").write_text(table, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of voices, chapters, pauses and noise")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each recording")
    parser.add_argument("--only", action="append", choices=RECORDINGS, help="may be repeated")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.only or RECORDINGS:
        with TemporaryDirectory() as folder:
            speech = recording(name, asked.seed, asked.minutes * 60, Path(folder))
        save(asked.out, name, speech)
        print(f"{name}: {speech.seconds:.1f} seconds, {len(speech.words)} words", flush=True)


if __name__ == "__main__":
    main()

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

import ctypes
import json
import re
import subprocess
import wave
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import soundfile
from attrs import evolve, field, frozen

RATE = 16_000
LOUDNESS = 0.08  # root mean square of each sentence; full scale is 1
EDGE = 0.04  # seconds of the synthesizer's silence that stay around a sentence
MIXED = ("read", "noisy", "pauses", "dialogue", "rushed")  # the styles of a mix, in an order drawn for each
STRETCH = 75.0  # seconds of each style in a mix
NOVELS = ("sensesensibility", "prideprejudice", "mansfieldpark", "emma", "northangerabbey", "persuasion")
SPEEDS = (0.94, 0.97, 1.0, 1.03, 1.06)  # of the tape: pitch and tempo, so that one program has several voices
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
class Word:
    """A word as it stands in the text, and when it is said, in seconds."""

    word: str
    start: float
    end: float

    def moved(self, seconds: float, speed: float = 1.0) -> Word:
        return Word(self.word, self.start / speed + seconds, self.end / speed + seconds)


@frozen(eq=False)
class Speech:
    """Samples of 16 kHz, and the words in them."""

    samples: np.ndarray
    words: tuple[Word, ...] = ()

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


@frozen
class Voice:
    """A voice of a program, played at ``speed``."""

    program: str
    name: str
    speed: float


@frozen(kw_only=True)
class Style:
    """How a stretch is spoken. Ranges are drawn from uniformly, both ends included.

    ``voices`` take turns after ``run`` sentences, and of the sentences only those of ``length`` words are read. In a
    turn there are ``pause`` seconds between sentences, and ``between`` seconds from turn to turn. ``noise`` is the
    colour and the ratio of speech to noise in dB. The first voice is ``certain``, where one is named.
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
RECORDINGS = {  # how often the minutes; the place is part of the seed
    **dict.fromkeys(MIXED, 1),
    "empty": 1,
    "mix": 2,
    "long": 3,
    "harsh": 1,
}


# -- the text --------------------------------------------------------------------------------------------------------


def novel(name: str) -> tuple[tuple[str, ...], ...]:
    """The sentences of each chapter."""
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
    """Those that can be read as they stand: letters and punctuation, without quotation marks."""
    for paragraph in re.split(r"\n\s*\n", text):
        plain = re.sub(r"[,;]?\s*--+\s*", ", ", " ".join(paragraph.split()))
        plain = re.sub(r"[\"_()]|(?<!\w)'|'(?!\w)", "", plain)
        for sentence in re.split(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?])\s+(?=[A-Z])", plain):
            if re.fullmatch(r"[A-Z][A-Za-z ,.;:!?'-]*[.!?]", sentence) and not re.search(r"[,;:] *[,;:.!?]", sentence):
                yield sentence


def reading(name: str, seed: int, rng: np.random.Generator) -> Iterator[str]:
    """Sentences without end, from the beginning of a chapter on. Odd seeds have every other chapter, even the rest."""
    chapters = novel(name)[seed % 2 :: 2]
    first = int(rng.integers(len(chapters)))
    for chapter in islice(cycle(chapters), first, None):
        yield from chapter


# -- the voices ------------------------------------------------------------------------------------------------------


def run(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout


class Flite:
    """flite's library, since its command does not print when a word begins."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL("libc.so.6")
        self._flite = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for part in ("usenglish", "cmulex"):
            ctypes.CDLL(f"libflite_{part}.so.1", mode=ctypes.RTLD_GLOBAL)
        self._flite.flite_init()
        self._function("flite_synth_text", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        self._function("delete_utterance", None, ctypes.c_void_p)
        self._function("utt_relation", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        self._function("utt_wave", ctypes.c_void_p, ctypes.c_void_p)
        self._function("cst_wave_save_riff", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
        self._function("relation_head", ctypes.c_void_p, ctypes.c_void_p)
        self._function("item_next", ctypes.c_void_p, ctypes.c_void_p)
        self._function("ffeature_string", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_char_p)
        self._function("ffeature_float", ctypes.c_float, ctypes.c_void_p, ctypes.c_char_p)
        self._voices: dict[str, int] = {}

    def say(self, text: str, voice: str, path: Path) -> list[Word]:
        self._c.srand(1)  # flite's breath is drawn by C's generator: the same for a sentence, whatever was said before
        utterance = self._flite.flite_synth_text(text.encode("ascii"), self._voice(voice))
        self._flite.cst_wave_save_riff(self._flite.utt_wave(utterance), str(path).encode())
        words = list(self._words(self._flite.utt_relation(utterance, b"Token")))
        self._flite.delete_utterance(utterance)
        return words

    def _words(self, tokens: int) -> Iterator[Word]:
        first = b"daughter1.R:SylStructure.daughter1.daughter1.R:Segment.p.end"
        last = b"daughtern.R:SylStructure.daughtern.daughtern.R:Segment.end"
        token = self._flite.relation_head(tokens)
        while token:
            name = self._flite.ffeature_string(token, b"name").decode("ascii")
            yield Word(name, self._flite.ffeature_float(token, first), self._flite.ffeature_float(token, last))
            token = self._flite.item_next(token)

    def _voice(self, name: str) -> int:
        if name not in self._voices:
            register = getattr(ctypes.CDLL(f"libflite_cmu_us_{name}.so.1"), f"register_cmu_us_{name}")
            register.restype = ctypes.c_void_p
            self._voices[name] = register(None)
        return self._voices[name]

    def _function(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self._flite, name)
        function.restype, function.argtypes = result, arguments


def festival(text: str, voice: str, path: Path) -> list[Word]:
    """Says ``text`` into ``path``. The times of a token are those of its words."""
    program = path.with_suffix(".scm")
    program.write_text(SCHEME.format(voice=voice, text=text, path=path), encoding="ascii")
    words = []
    for line in run(["festival", "-b", str(program)]).splitlines():
        name, *times = line.split("\t")
        starts, ends = map(float, times[::2]), map(float, times[1::2])
        words.append(Word(name, next(starts, 0.0), max(ends, default=0.0)))
    return words


class Speaker:
    """Says sentences, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flite = Flite()

    def say(self, text: str, voice: Voice) -> Speech | None:
        """``None`` where the program read other words than are written, so that their times are unknown."""
        raw, played = self._folder / "raw.wav", self._folder / "played.wav"
        say = self._flite.say if voice.program == "flite" else festival
        spoken = say(text, voice.name, raw)
        written = text.split()
        if len(written) != len(spoken) or any(word.end <= word.start for word in spoken):
            return None
        run(["sox", "-D", str(raw), "-r", str(RATE), "-c", "1", str(played), "speed", str(voice.speed)])
        samples = read_wave(played)
        words = [Word(word, at.start, at.end).moved(0.0, voice.speed) for word, at in zip(written, spoken, strict=True)]
        begin = max(0.0, words[0].start - EDGE)
        cut = samples[int(begin * RATE) : int((words[-1].end + EDGE) * RATE)]
        loud = cut * (LOUDNESS / np.sqrt(np.mean(cut**2)))
        return Speech(loud, tuple(word.moved(-begin) for word in words))


def read_wave(path: Path) -> np.ndarray:
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


def voices(style: Style, rng: np.random.Generator) -> list[Voice]:
    """As many as take turns, all different. A single one is of the two that are understood best."""
    names = [("flite", name) for name in FLITE] + [("festival", name) for name in FESTIVAL]
    if style.voices == 1:
        names = names[:2]
    drawn = [names[number] for number in rng.permutation(len(names))]
    certain = [("flite", style.certain)] if style.certain else []
    return [Voice(program, name, float(rng.choice(SPEEDS))) for program, name in (certain + drawn)[: style.voices]]


# -- stretches -------------------------------------------------------------------------------------------------------


def joined(parts: list[Speech]) -> Speech:
    words: list[Word] = []
    before = 0.0
    for part in parts:
        words += [word.moved(before) for word in part.words]
        before += part.seconds
    return Speech(np.concatenate([part.samples for part in parts]), tuple(words))


def silence(seconds: float) -> Speech:
    return Speech(np.zeros(int(seconds * RATE), np.float32))


def noise(colour: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` samples of white or pink noise (power as 1 / frequency, from 20 Hz on), root mean square 1."""
    white = rng.standard_normal(count)
    if colour == "white":
        return white
    spectrum = np.fft.rfft(white)
    frequencies = np.fft.rfftfreq(count, 1 / RATE)
    pink: np.ndarray = np.fft.irfft(spectrum / np.sqrt(np.maximum(frequencies, 20.0)), count)
    return np.asarray(pink / pink.std())


def noisy(speech: Speech, kind: tuple[str, float], rng: np.random.Generator) -> Speech:
    """With noise throughout, so many dB below the sentences."""
    colour, ratio = kind
    level = LOUDNESS * 10 ** (-ratio / 20)
    return evolve(speech, samples=speech.samples + level * noise(colour, len(speech.samples), rng))


def stretch(style: Style, seconds: float, text: Iterator[str], speaker: Speaker, rng: np.random.Generator) -> Speech:
    """At least ``seconds`` of speech and pauses."""
    least, most = style.length
    fitting = (sentence for sentence in text if least <= len(sentence.split()) <= most)
    parts = [silence(rng.uniform(0.1, 1.0))]
    length = 0.0
    for voice in cycle(voices(style, rng)):
        for said in turn(style, voice, fitting, speaker, rng):
            parts += [said, silence(rng.uniform(*style.pause))]
        parts[-1] = silence(rng.uniform(*style.between))
        length = sum(part.seconds for part in parts)
        if length >= seconds:
            break
    speech = joined(parts)
    return noisy(speech, style.noise, rng) if style.noise else speech


def turn(
    style: Style, voice: Voice, text: Iterator[str], speaker: Speaker, rng: np.random.Generator
) -> Iterator[Speech]:
    said = (speaker.say(sentence, voice) for sentence in text)
    return islice((speech for speech in said if speech is not None), int(rng.integers(*style.run, endpoint=True)))


def mixed(seconds: float, text: Iterator[str], speaker: Speaker, rng: np.random.Generator) -> Speech:
    """Stretches of all styles."""
    parts: list[Speech] = []
    while sum(part.seconds for part in parts) < seconds:
        for name in rng.permutation(MIXED):
            parts.append(stretch(STYLES[name], STRETCH, text, speaker, rng))
            if sum(part.seconds for part in parts) >= seconds:
                break
    return joined(parts)


def empty(seconds: float, rng: np.random.Generator) -> Speech:
    """Nobody speaks: exact silence, noise, tones, hum and clicks, each for a tenth of the time or so."""
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
    """A knock of 5 ms about every second."""
    sound = 0.0005 * rng.standard_normal(len(times))
    for at in np.flatnonzero(rng.random(len(times)) < 1.0 / RATE):
        knock = 0.5 * rng.standard_normal(80) * np.linspace(1, 0, 80)
        sound[at : at + 80] += knock[: len(sound) - at]
    return sound


# -- recordings ------------------------------------------------------------------------------------------------------


def recording(name: str, seed: int, seconds: float, folder: Path) -> Speech:
    number = list(RECORDINGS).index(name)
    rng = np.random.default_rng([seed, number])
    if name == "empty":
        return empty(seconds, rng)
    text = reading(NOVELS[(number + seed) % len(NOVELS)], seed, rng)
    speaker = Speaker(folder)
    if name in STYLES:
        return stretch(STYLES[name], seconds, text, speaker, rng)
    return mixed(seconds, text, speaker, rng)


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


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=1, show_default=True, help="Of voices, chapters, pauses and noise.")
@click.option(
    "--minutes", default=5.0, show_default=True, help="Of each recording; a mix has twice as many, a long one thrice."
)
@click.option("--only", multiple=True, type=click.Choice(list(RECORDINGS)), help="This recording; may be repeated.")
def main(out: Path, seed: int, minutes: float, only: tuple[str, ...]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    print("| recording | seconds | words |\n|---|---|---|")
    for name in only or RECORDINGS:
        with TemporaryDirectory() as folder:
            speech = recording(name, seed, minutes * 60 * RECORDINGS[name], Path(folder))
        save(out, name, speech)
        print(f"| {name} | {speech.seconds:.1f} | {len(speech.words)} |", flush=True)


if __name__ == "__main__":
    main()

"""Word error rate, hallucinated words, word times and speed on long recordings, beside faster-whisper's.

::

    python benchmarks/recordings.py OUT
    python benchmarks/speech.py OUT CHECKPOINT [--options '{"beam_size": 5}'] [--only read] [--show] [--words]
    python benchmarks/speech.py OUT CHECKPOINT --peer CT2_FOLDER [--peer-python VENV/bin/python] [--peer-options '{}']
    python benchmarks/speech.py OUT --saved beam5=ANSWERS.jsonl [--show]

OUT has WAV files, each with its text in a ``.txt`` and, for word times, a ``.json`` as `recordings.py` writes it.
Without OUT the demo checkpoint hears its English samples. Both sides of a word error rate are put through
transformers' ``EnglishTextNormalizer``. In the sum are the recordings with a text; words heard where nobody speaks are
counted as hallucinated. With ``--words`` the words that are right have their starts and ends compared with the true
ones: median and 90th percentile of the absolute error. ``--show`` prints every place where the texts differ, with the
true time, as ``before {true > heard} behind``. ``--save`` writes what was heard into a file that ``--saved`` reads.
``--peer`` asks faster-whisper, in another interpreter where it is not in this one, with one thread as here.

The claims, with a peer or saved answers to compare with (the first of them): the error rate is not above the other's on
any recording and at most 0.9 of it in the sum. And no word is hallucinated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import soundfile
import trio
from attrs import frozen
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from triolet import Engine, EngineConfig, demo

MOST = 0.9  # of the other's errors, in the sum
CONTEXT = 4  # words around a difference
TRIOLET = "triolet"
PEER = "faster-whisper"
PEER_PROGRAM = Path(__file__).with_name("speech_peer.py")

NORMAL = EnglishTextNormalizer({})


@frozen
class Word:
    """A word and when it is said, in seconds."""

    text: str
    start: float
    end: float


@frozen(kw_only=True)
class Recording:
    """A file and what is said in it. ``words`` is empty where their times are not known."""

    path: Path
    text: str
    words: tuple[Word, ...]

    @property
    def name(self) -> str:
        return self.path.stem


@frozen(kw_only=True)
class Heard:
    """What an engine made of one recording. ``words`` is empty where they have no times."""

    text: str
    seconds: float
    words: tuple[Word, ...] = ()
    segments: tuple[Word, ...] = ()


@frozen
class Pair:
    """One step of an alignment: places in the true and in the heard text. ``None``: inserted, deleted."""

    true: int | None
    heard: int | None
    right: bool


@frozen(kw_only=True)
class Verdict:
    """What is wrong in one recording. ``starts`` and ``ends`` are the errors of the right words' times in seconds."""

    words: int
    substituted: int
    inserted: int
    deleted: int
    audio: float
    seconds: float
    starts: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def wrong(self) -> int:
        return self.substituted + self.inserted + self.deleted

    @property
    def rate(self) -> float:
        """The word error rate; of a recording without words, NaN."""
        return self.wrong / self.words if self.words else float("nan")


Answers = dict[str, Heard]  # by the recording's name


# -- words against words ---------------------------------------------------------------------------------------------


def align(true: list[str], heard: list[str]) -> list[Pair]:
    """The fewest substitutions, insertions and deletions that make ``heard`` of ``true`` (Levenshtein, 1966)."""
    columns = np.arange(len(heard) + 1, dtype=np.int32)
    said = np.array(heard, dtype=object)
    costs = np.empty((len(true) + 1, len(heard) + 1), np.int32)
    costs[0] = columns
    for row, word in enumerate(true, 1):
        best = costs[row - 1] + 1
        best[1:] = np.minimum(best[1:], costs[row - 1, :-1] + (said != word))
        costs[row] = np.minimum.accumulate(best - columns) + columns  # insertions run along the row
    return list(_walk(costs, true, heard))[::-1]


def _walk(costs: np.ndarray, true: list[str], heard: list[str]) -> Iterator[Pair]:
    """From the end back to the beginning."""
    row, column = len(true), len(heard)
    while row or column:
        right = bool(row and column and true[row - 1] == heard[column - 1])
        if row and column and costs[row, column] == costs[row - 1, column - 1] + (not right):
            row, column = row - 1, column - 1
            yield Pair(row, column, right)
        elif row and costs[row, column] == costs[row - 1, column] + 1:
            row -= 1
            yield Pair(row, None, right=False)
        else:
            column -= 1
            yield Pair(None, column, right=False)


def timed(normal: list[str], words: Iterable[Word]) -> dict[int, Word]:
    """Which of ``words`` stands at which place of the normalized text; two words that become one have no place."""
    single = [(part, word) for word in words for part in NORMAL(word.text).split()]
    pairs = align(normal, [part for part, _ in single])
    return {
        pair.true: single[pair.heard][1]
        for pair in pairs
        if pair.right and pair.true is not None and pair.heard is not None
    }


def judge(recording: Recording, heard: Heard) -> Verdict:
    true, said = NORMAL(recording.text).split(), NORMAL(heard.text).split()
    pairs = align(true, said)
    starts, ends = time_errors(pairs, timed(true, recording.words), timed(said, heard.words) if heard.words else {})
    return Verdict(
        words=len(true),
        substituted=sum(not pair.right for pair in pairs if pair.true is not None and pair.heard is not None),
        inserted=sum(pair.true is None for pair in pairs),
        deleted=sum(pair.heard is None for pair in pairs),
        audio=soundfile.info(recording.path).duration,
        seconds=heard.seconds,
        starts=starts,
        ends=ends,
    )


def time_errors(
    pairs: list[Pair], true: dict[int, Word], heard: dict[int, Word]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of the starts, and of the ends; one each for a word that is right and has a time on both sides."""
    both = [
        (true[pair.true], heard[pair.heard])
        for pair in pairs
        if pair.right and pair.true in true and pair.heard in heard
    ]
    return tuple(abs(a.start - b.start) for a, b in both), tuple(abs(a.end - b.end) for a, b in both)


def summed(verdicts: Iterable[Verdict]) -> Verdict:
    """Of the recordings with a text."""
    some = [verdict for verdict in verdicts if verdict.words]
    return Verdict(
        words=sum(verdict.words for verdict in some),
        substituted=sum(verdict.substituted for verdict in some),
        inserted=sum(verdict.inserted for verdict in some),
        deleted=sum(verdict.deleted for verdict in some),
        audio=sum(verdict.audio for verdict in some),
        seconds=sum(verdict.seconds for verdict in some),
        starts=tuple(error for verdict in some for error in verdict.starts),
        ends=tuple(error for verdict in some for error in verdict.ends),
    )


# -- what is heard ---------------------------------------------------------------------------------------------------


def recordings(folder: Path | None, only: tuple[str, ...]) -> list[Recording]:
    if folder is None:
        samples = [sample for sample in demo.samples() if sample.language in {"en", None}]
        found = [Recording(path=sample.path, text=sample.text, words=()) for sample in samples]
    else:
        found = [recording(path) for path in sorted(folder.glob("*.wav")) if path.with_suffix(".txt").exists()]
    names = [each.name for each in found]
    unknown = sorted(set(only) - set(names))
    if unknown or not found:
        raise click.UsageError(f"--only {unknown}; there are {names} in {folder or 'the demo'}, each with a .txt")
    return [each for each in found if not only or each.name in only]


def recording(path: Path) -> Recording:
    text, table = path.with_suffix(".txt"), path.with_suffix(".json")
    rows = json.loads(table.read_text(encoding="utf-8"))["words"] if table.exists() else []
    words = tuple(Word(row["word"], row["start"], row["end"]) for row in rows)
    return Recording(path=path, text=text.read_text(encoding="utf-8"), words=words)


async def by_triolet(
    checkpoint: Path, options: dict[str, Any], config: dict[str, Any], found: list[Recording]
) -> Answers:
    answers = {}
    async with Engine(checkpoint, config=EngineConfig(**config)) as engine:
        for each in found:
            begun = time.perf_counter()
            transcript = await engine.transcribe(each.path, **options)
            seconds = time.perf_counter() - begun
            words = [word for segment in transcript.segments for word in getattr(segment, "words", None) or ()]
            answers[each.name] = Heard(
                text=transcript.text,
                seconds=seconds,
                words=tuple(Word(word.text, word.start, word.end) for word in words),
                segments=tuple(Word(cut.text, cut.start, cut.end) for cut in transcript.segments),
            )
            note(TRIOLET, each, seconds)
    return answers


def by_peer(python: str, model: Path, options: dict[str, Any], found: list[Recording]) -> Answers:
    """In a process of its own, since the libraries of threads of two engines disturb each other."""
    command = [python, str(PEER_PROGRAM), str(model), json.dumps(options), *(str(each.path) for each in found)]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return loaded(done.stdout)


def loaded(lines: str) -> Answers:
    rows = [json.loads(line) for line in lines.splitlines()]
    return {
        Path(row["path"]).stem: Heard(
            text=row["text"],
            seconds=row["seconds"],
            words=tuple(Word(*word) for word in row["words"]),
            segments=tuple(Word(text, start, end) for start, end, text in row["segments"]),
        )
        for row in rows
    }


def dumped(answers: Answers) -> str:
    """What `loaded` reads."""
    rows = [
        {
            "path": name,
            "seconds": heard.seconds,
            "text": heard.text,
            "words": [(word.text, word.start, word.end) for word in heard.words],
            "segments": [(cut.start, cut.end, cut.text) for cut in heard.segments],
        }
        for name, heard in answers.items()
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def note(engine: str, each: Recording, seconds: float) -> None:
    print(f"{engine}: {each.name} in {seconds:.1f} s", file=sys.stderr, flush=True)


# -- what is printed -------------------------------------------------------------------------------------------------


def show(engine: str, recording: Recording, heard: Heard) -> None:
    """Every place where the texts differ."""
    true, said = NORMAL(recording.text).split(), NORMAL(heard.text).split()
    pairs = align(true, said)
    times = timed(true, recording.words)
    print(f"\n{engine}, {recording.name}:")
    place = 0
    for right, group in groupby(pairs, lambda pair: pair.right):
        steps = list(group)
        if not right:
            before, behind = pairs[max(0, place - CONTEXT) : place], pairs[place + len(steps) :][:CONTEXT]
            missed = " ".join(true[pair.true] for pair in steps if pair.true is not None)
            made = " ".join(said[pair.heard] for pair in steps if pair.heard is not None)
            around = [" ".join(true[pair.true] for pair in some if pair.true is not None) for some in (before, behind)]
            print(f"  {when(steps + before[::-1] + behind, times):>7}  {around[0]} {{{missed} > {made}}} {around[1]}")
        place += len(steps)
    for cut in heard.segments if not true else ():
        print(f"  segment {cut.start:.2f} to {cut.end:.2f}: {cut.text}")


def when(pairs: list[Pair], times: dict[int, Word]) -> str:
    """The true time of the first word that has one."""
    found = (times[pair.true] for pair in pairs if pair.true in times)
    word = next(found, None)
    return f"{word.start:.1f} s" if word else "?"


def row(name: str, engine: str, verdict: Verdict) -> str:
    rate = f"{100 * verdict.rate:.2f}" if verdict.words else "-"
    wrong = f"{verdict.substituted} | {verdict.inserted if verdict.words else 0} | {verdict.deleted}"
    hallucinated = "-" if verdict.words else str(verdict.inserted)
    speed = f"{verdict.seconds:.1f} | {verdict.audio / verdict.seconds:.1f}" if verdict.seconds else "- | -"
    times = f"{spread(verdict.starts)} | {spread(verdict.ends)}"
    return f"| {name} | {engine} | {rate} | {verdict.words} | {wrong} | {hallucinated} | {speed} | {times} |"


def spread(errors: tuple[float, ...]) -> str:
    return f"{median(errors):.3f}, {np.quantile(errors, 0.9):.3f}" if errors else "-"


def table(found: list[Recording], engines: dict[str, Answers]) -> dict[str, dict[str, Verdict]]:
    """Prints it. Returns the verdicts of each engine by recording."""
    verdicts = {
        engine: {each.name: judge(each, answers[each.name]) for each in found if each.name in answers}
        for engine, answers in engines.items()
    }
    print("| recording | engine | WER, % | words | sub | ins | del | hallucinated | seconds | x real time | ", end="")
    print("starts off, s: median, p90 | ends off, s: median, p90 |")
    print("|---" * 12 + "|")
    for each in found:
        for engine, of_engine in verdicts.items():
            if each.name in of_engine:
                print(row(each.name, engine, of_engine[each.name]))
    for engine, of_engine in verdicts.items():
        print(row("sum", engine, summed(of_engine.values())))
    return verdicts


def claims(verdicts: dict[str, dict[str, Verdict]]) -> Iterator[tuple[bool, str]]:
    """Whether each holds, of the first engine beside the second."""
    first, *others = verdicts
    ours = verdicts[first]
    hallucinated = sum(verdict.inserted for verdict in ours.values() if not verdict.words)
    if any(not verdict.words for verdict in ours.values()):
        yield hallucinated == 0, f"{first} hears {hallucinated} words where nobody speaks; claimed: none"
    if not others:
        return
    theirs = verdicts[others[0]]
    shared = [name for name, verdict in ours.items() if name in theirs and verdict.words]
    worse = [name for name in shared if ours[name].wrong > theirs[name].wrong]
    yield not worse, f"{first} makes more errors than {others[0]} in {worse}; claimed: in none"
    a, b = (summed(some[name] for name in shared).wrong for some in (ours, theirs))
    yield a <= MOST * b, f"errors in the sum: {a} beside {b}; claimed: at most {MOST} of them"


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True))
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--options", default="{}", help="Arguments of `Engine.transcribe` as a JSON object.")
@click.option("--config", default="{}", help="Fields of EngineConfig as a JSON object; one thread unless it says so.")
@click.option("--peer", type=click.Path(path_type=Path, exists=True), help="CTranslate2's folder of the same weights.")
@click.option("--peer-python", default=sys.executable, help="The interpreter that has faster-whisper.")
@click.option("--peer-options", default="{}", help="Arguments of its `transcribe`; batched: its batched pipeline.")
@click.option("--saved", multiple=True, help="NAME=FILE: what was heard before.")
@click.option("--save", type=click.Path(path_type=Path), help="Write what is heard into this file.")
@click.option("--only", multiple=True, help="This recording, by its name without .wav; may be repeated.")
@click.option("--words", is_flag=True, help="Ask for the times of words.")
@click.option("--show", "shown", is_flag=True, help="Print every place where the texts differ.")
def main(
    folder: Path | None,
    checkpoint: Path | None,
    options: str,
    config: str,
    peer: Path | None,
    peer_python: str,
    peer_options: str,
    saved: tuple[str, ...],
    save: Path | None,
    only: tuple[str, ...],
    words: bool,
    shown: bool,
) -> None:
    found = recordings(folder, only)
    print(f"load before: {os.getloadavg()}, {os.cpu_count()} CPUs")
    engines: dict[str, Answers] = {}
    if checkpoint is not None or folder is None:
        asked = {"language": "en", **({"timestamps": "word"} if words else {}), **json.loads(options)}
        settings = {"device": "cpu", "threads": 1, **json.loads(config)}
        engines[TRIOLET] = trio.run(by_triolet, checkpoint or demo.checkpoint(), asked, settings, found)
        if save is not None:
            save.write_text(dumped(engines[TRIOLET]), encoding="utf-8")
    if peer is not None:
        asked = {"language": "en", **({"word_timestamps": True} if words else {}), **json.loads(peer_options)}
        engines[PEER] = by_peer(peer_python, peer, asked, found)
    for name, _, path in (each.partition("=") for each in saved):
        engines[name] = loaded(Path(path).read_text(encoding="utf-8"))
    if not engines:
        raise click.UsageError("nothing to judge: give CHECKPOINT, --peer or --saved NAME=FILE")
    verdicts = table(found, engines)
    for name, answers in engines.items() if shown else ():
        for each in found:
            if each.name in answers:
                show(name, each, answers[each.name])
    print(f"load after: {os.getloadavg()}")
    checked = list(claims(verdicts))
    for holds, claim in checked:
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    sys.exit(0 if all(holds for holds, _ in checked) else 1)


if __name__ == "__main__":
    main()

"""The speakers of a transcript: each word and segment gets the speaker whose turns it overlaps most. Pure functions;
times are in seconds."""

from __future__ import annotations

import itertools
import math
import string
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from attrs import evolve

from ..outputs.results import Segment, Transcript, Turn
from .diarizer import Diarization

SpeakerAt: TypeAlias = Callable[[float, float], str | None]


def named_turns(found: Diarization, spoken: Sequence[tuple[float, float]]) -> tuple[Turn, ...]:
    """Returns the turns of ``found`` with the names of their speakers. Known voices have their names, and others the
    letters A, B and so on, in the order in which their text begins.

    Args:
        spoken: the times of the segments, in order. Voices without text come last.
    """
    starts, ends = [*(start for start, _ in spoken), math.inf], [end for _, end in spoken]
    ordered = sorted(found.turns, key=lambda turn: starts[bisect_right(ends, turn.start)] >= turn.end)
    names, letters = dict(found.names), string.ascii_uppercase
    free = (one for one in (*letters, *(a + b for a in letters for b in letters)) if one not in names.values())
    for voice in dict.fromkeys(turn.voice for turn in ordered):
        if voice not in names:
            names[voice] = next(free)
    return tuple(Turn(start=turn.start, end=turn.end, speaker=names[turn.voice]) for turn in found.turns)


def with_speakers(transcript: Transcript) -> Transcript:
    """Returns ``transcript`` with the speakers of its segments and words, by its turns. A segment in which several
    people speak is split between two words; without words it has the speaker who speaks longest. Segments to which the
    model itself gave a speaker keep it.
    """
    if not transcript.turns and not transcript.speakers:
        return transcript
    speaker_at = _finder(transcript.turns)
    parts = [part for segment in transcript.segments for part in _parts(segment, speaker_at)]
    return evolve(transcript, segments=tuple(evolve(part, id=number) for number, part in enumerate(parts)))


def _finder(turns: Iterable[Turn]) -> SpeakerAt:
    """Returns a function: who speaks longest from a start to an end, or, if nobody does, whose turn is nearest."""
    ordered = sorted(turns, key=lambda turn: turn.start)
    starts = [turn.start for turn in ordered]
    last = [*itertools.accumulate(ordered, _last)]  # to end, up to each

    def speaker_at(start: float, end: float) -> str | None:
        first, stop = bisect_right(last, start, key=lambda turn: turn.end), bisect_left(starts, end)
        near = [*last[max(first - 1, 0) : first], *ordered[first : max(first, stop) + 1]]
        seconds: defaultdict[str, float] = defaultdict(float)
        for turn in near:
            seconds[turn.speaker] += max(0.0, min(turn.end, end) - max(turn.start, start))
        if any(seconds.values()):
            return max(seconds, key=seconds.__getitem__)
        nearest = min(near, key=lambda turn: max(turn.start - end, start - turn.end), default=None)
        return None if nearest is None else nearest.speaker

    return speaker_at


def _last(one: Turn, two: Turn) -> Turn:
    return two if two.end > one.end else one


def _parts(segment: Segment, speaker_at: SpeakerAt) -> Iterator[Segment]:
    if segment.speaker is not None or not segment.words:
        speaker = segment.speaker or speaker_at(segment.start, segment.end)
        said = segment.words and tuple(evolve(word, speaker=speaker) for word in segment.words)
        yield evolve(segment, speaker=speaker, words=said)
        return
    words = [evolve(word, speaker=speaker_at(word.start, word.end)) for word in segment.words]
    runs = [(speaker, tuple(run)) for speaker, run in itertools.groupby(words, key=lambda word: word.speaker)]
    if len(runs) == 1:
        yield evolve(segment, words=runs[0][1], speaker=runs[0][0])
        return
    logprobs = iter(segment.logprobs)
    for number, (speaker, run) in enumerate(runs):
        tokens = tuple(token for word in run for token in word.token_ids)
        yield evolve(
            segment,
            start=run[0].start if number else segment.start,
            end=segment.end if number == len(runs) - 1 else run[-1].end,
            text="".join(word.text for word in run),
            token_ids=tokens,
            logprobs=tuple(itertools.islice(logprobs, len(tokens))),
            words=run,
            speaker=speaker,
        )

"""The ways in which language models write what they hear: as plain text, or as turns with times and speakers.

Each reader takes any text, and leaves none out: what it cannot read is a turn as it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve, frozen

from ...core.speech import continuing


@frozen(kw_only=True)
class WrittenTurn:
    """A stretch of speech as a model wrote it, in the characters [first, stop) of its text. The times are in seconds.
    ``None``: the model wrote no such time, or no speaker."""

    text: str
    first: int
    stop: int
    start: float | None = None
    end: float | None = None
    speaker: str | None = None


_LATEST = 1e9  # seconds
ReadTurns = Callable[[str], list[WrittenTurn]]

_CLOCK = r"\s*(?:\d+:){0,2}\d+(?:\.\d+)?\s*"
_BRACKETED = re.compile(rf"\[({_CLOCK})\]\[S(\d+)\](.*?)(?:\[({_CLOCK})\]|\Z)", re.DOTALL)
_OPENING = re.compile(r"\[\s*(?=\{)")
_BETWEEN = re.compile(r"[\s,\]]*")
_UNFINISHED_MARK = re.compile(r"\[[\d:.\s]*(?:\](?:\[S?\d*)?)?\Z")
_UNFINISHED_OBJECT = re.compile(r'\{(?:\s*"\w+"\s*:\s*[\d.]+\s*,)*\s*(?:"\w*(?:"\s*:?\s*[\d.]*)?)?\Z')
_FRAMES = (
    "The spoken content of the audio is",
    "The transcription of the audio is",
    "The content of the input audio is",
)


def plain(written: str) -> list[WrittenTurn]:
    """Returns the whole text as one turn."""
    return _left(written, 0, len(written))


def unquoted(written: str) -> list[WrittenTurn]:
    """Returns the whole text as one turn, without the sentence and the quotes that Audio Flamingo 3 may write around
    it."""
    text = written.strip()
    frame = next((one for one in _FRAMES if text.startswith(one)), "")
    text = text.removeprefix(frame).strip()
    bare = text.removesuffix(".").strip()
    if len(bare) >= 2 and bare[0] == bare[-1] and bare[0] in "'\"":
        text = bare[1:-1].strip()
    return [WrittenTurn(text=text, first=0, stop=len(written))] if text else []


def bracketed(written: str) -> list[WrittenTurn]:
    """Reads ``[0.00][S01]text[7.56]``, as MOSS-Transcribe-Diarize writes. Times are seconds, or have minutes and hours
    before a colon. The last turn may have no end."""
    turns, done = list[WrittenTurn](), 0
    for match in _BRACKETED.finditer(written):
        turns += _left(written, done, match.start())
        start, speaker, text, end = match.groups()
        turns.append(
            WrittenTurn(
                text=text.strip(),
                first=match.start(),
                stop=match.end(),
                start=_seconds(start),
                end=None if end is None else _seconds(end),
                speaker=f"S{speaker}",
            )
        )
        done = match.end()
    return [*turns, *_left(_UNFINISHED_MARK.sub("", written), done, len(written))]


def json_turns(written: str) -> list[WrittenTurn]:
    """Reads ``[{"Start": 0.0, "End": 7.56, "Speaker": 0, "Content": "text"}]``, as VibeVoice-ASR writes. The last turn
    may be unfinished; then it has no end."""
    opening = _OPENING.search(written)
    if opening is None:
        return plain(written)
    turns, done = _left(written, len("assistant") * written.startswith("assistant"), opening.start()), opening.end()
    while written.startswith("{", done):
        value, stop, whole = _object(written, done)
        if value is None:
            break
        turns.append(
            WrittenTurn(
                text=_characters(value["Content"]),
                first=done,
                stop=stop,
                start=_number(value.get("Start")),
                end=_number(value.get("End")) if whole else None,
                speaker=_name(value.get("Speaker")),
            )
        )
        between = _BETWEEN.match(written, stop)
        done = stop if between is None else between.end()
    return [*turns, *_left(_UNFINISHED_OBJECT.sub("", written), done, len(written))]


def placed(turns: Sequence[WrittenTurn]) -> list[WrittenTurn]:
    """Returns the turns with times that rise, in hundredths of a second: each start is later than the one before, and
    no turn goes on after the next one has begun. A turn without such a start, or that ends before it starts, is joined
    to the turn before it; before the first turn with times, to that one. The last turn may have no end."""
    found = list[WrittenTurn]()
    for turn in (turn for turn in turns if turn.text):
        start, end = _usable(turn.start), _usable(turn.end)
        if start is None or (end is not None and end <= start):
            start = end = None
        last = found[-1] if found else None
        if last is None:
            found.append(evolve(turn, start=start, end=end))
        elif start is None or (last.start is not None and start <= last.start):
            found[-1] = evolve(last, text=joined([last.text, turn.text]), stop=turn.stop)
        elif last.start is None:
            text = joined([last.text, turn.text])
            found[-1] = evolve(turn, text=text, first=last.first, start=start, end=end)
        else:
            found[-1] = evolve(last, end=start if last.end is None else min(last.end, start))
            found.append(evolve(turn, start=start, end=end))
    return found


def _usable(time: float | None) -> float | None:
    return None if time is None or not 0.0 <= time < _LATEST else round(time, 2)


def joined(texts: Sequence[str]) -> str:
    """Returns the texts as one, with blanks between them where the script has blanks."""
    return "".join(map(continuing, texts)).strip()


def _left(written: str, first: int, stop: int) -> list[WrittenTurn]:
    text = written[first:stop].strip()
    return [WrittenTurn(text=text, first=first, stop=stop)] if text else []


def _seconds(clock: str) -> float:
    parts = clock.strip().split(":")
    return sum(float(part) * 60.0**power for power, part in enumerate(reversed(parts)))


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < _LATEST else None


def _name(value: Any) -> str | None:
    return _characters(str(value)) if type(value) in (int, str) else None


def _characters(text: str) -> str:
    """Returns ``text`` with question marks for lone surrogates, which JSON may have and which are no characters."""
    return text.strip().encode(errors="replace").decode()


def _object(written: str, at: int) -> tuple[Any, int, bool]:
    """Returns the turn that begins at ``at``, its end, and whether it is finished. The turn is ``None`` if there is
    none."""
    read = json.JSONDecoder().raw_decode
    for closing in ("", '"}', "}"):
        try:
            value, stop = read(written + closing, at)
        except (ValueError, RecursionError):
            continue
        if isinstance(value.get("Content"), str):
            return value, min(stop, len(written)), not closing
    return None, at, False

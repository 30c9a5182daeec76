"""Diarization: who speaks when. A `Diarizer` finds out; `voices` has the default one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeGuard

from ...core.errors import InvalidRequest
from ..inputs.audio import AudioSource, Samples
from ..outputs.results import Turn
from .voice import Probabilities


class VoiceTurn(NamedTuple):
    """One voice speaks from ``start`` to ``end``, in seconds. ``voice`` is the number of the voice in all its turns."""

    start: float
    end: float
    voice: int


class Diarization(NamedTuple):
    """The turns of a recording, ordered by their starts, and the names of known voices by their numbers."""

    turns: Sequence[VoiceTurn] = ()
    names: Mapping[int, str] = MappingProxyType({})


class SpeakerListener(Protocol):
    """Hears one recording. One thread at a time calls it, but not always the same thread."""

    def hear(self, samples: Samples, probabilities: Probabilities) -> None:
        """Adds the next samples (at the end perhaps none), and the probability of speech of each frame that they
        complete."""
        ...

    def diarization(self) -> Diarization:
        """Ends the recording, and returns its turns."""
        ...

    def voice(self) -> Any:
        """Ends the recording, in which one person speaks. Returns that person's voice, in a form of its own."""
        ...


class Diarizer(Protocol):
    """Finds out who speaks. It may be slow: it is called in worker threads.

    Attributes:
        sampling_rate: the rate of the samples that listeners hear, in Hz; it must be the speech model's.
    """

    @property
    def sampling_rate(self) -> int: ...

    def listen(self, frame_samples: int, *, least: int, most: int, known: Mapping[str, Any]) -> SpeakerListener:
        """Returns a new listener. The first call may load data that all listeners share.

        Args:
            frame_samples: the number of samples of one probability of speech.
            least: the least number of voices; fewer are found if too little is said.
            most: the most voices.
            known: voices by their names, as `SpeakerListener.voice` has returned them.
        """
        ...


class AudioDiarizer(Protocol):
    """Finds who speaks for ``engine.transcribe(..., diarizer=...)``. An `Engine` whose model finds speakers is one, and
    so is an object of the caller's with this method."""

    def diarize(self, audio: AudioSource, strict: bool) -> Awaitable[Sequence[Turn]] | Sequence[Turn]:
        """Returns the turns, ordered by their starts. They may overlap. For an `Engine` this is an async method, which
        is awaited in the caller's event loop. For a `SyncEngine` it is a plain method, which is called in a thread.

        Args:
            audio: the audio of the transcription: a path, bytes, or an array, alone or with its rate.
            strict: refuse audio that is damaged or cut short; otherwise the turns end at the break.

        A transcription with ``audio_track=`` gives that argument, too, as `Engine.diarize` has it.
        """
        ...


TURNS = "a list of Turn, each with a speaker and 0 <= start <= end"


def are_turns(value: object) -> TypeGuard[list[Turn] | tuple[Turn, ...]]:
    """True if ``value`` is `TURNS`."""
    return isinstance(value, list | tuple) and all(
        isinstance(one, Turn)
        and isinstance(one.speaker, str)
        and all(isinstance(time, Real) for time in (one.start, one.end))
        and 0 <= one.start <= one.end < math.inf
        for one in value
    )


async def turns_of(
    diarizer: AudioDiarizer | Sequence[Turn], audio: AudioSource, strict: bool, track: int | str | None
) -> tuple[Turn, ...]:
    """Returns the turns that ``diarizer`` has found, or finds now in the track ``track``; ``None``: the default one.

    Raises:
        InvalidRequest: the audio can be read only once, or the diarizer refuses it or answers with something else.
    """
    found: Any = diarizer
    if not isinstance(diarizer, Sequence):
        if hasattr(audio, "read"):
            raise InvalidRequest(
                "audio is a file object, which is read once; allowed with diarizer: a path, bytes or an array"
            )
        diarize: Any = diarizer.diarize
        found = await (diarize(audio, strict) if track is None else diarize(audio, strict, audio_track=track))
    if not are_turns(found):
        raise InvalidRequest(f"the diarizer answered {found!r:.200}; allowed: {TURNS}")
    return tuple(found)

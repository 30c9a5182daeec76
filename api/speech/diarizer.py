"""Diarization: who speaks when. A `Diarizer` finds out; `voices` has the default one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..inputs.audio import Samples
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

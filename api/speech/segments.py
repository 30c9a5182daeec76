"""The segments of a transcription, which clients iterate over while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ...core.timings import Timings
from ..outputs.results import Progress, Segment, Transcript
from .speakers import with_speakers


class ReadSoFar:
    """The facts about a stream of segments apart from the segments. ``language``, ``language_probability`` and
    ``duration`` are known from the start.
    """

    def __init__(self, progress: Callable[[bool], Progress]) -> None:
        self._found: list[Segment] = []
        self._progress = progress

    def transcript(self) -> Transcript:
        """Returns a transcript of all that is read so far. After the last segment it is complete.

        Before that it has the segments of all windows that are read, even those that the stream has not given out. In
        parallel mode these may come after a gap. ``coverage`` says which seconds are not read (``"unread"``). So a
        program that stops early, or is stopped, keeps its text. Under asyncio and in threads, the text ahead and the
        coverage are added when the block is left, or when a reader was cancelled or got an error, but not between two
        segments.

        With ``speakers`` the stream gives segments without a speaker, since voices are told apart only when all are
        heard. The complete transcript has the speakers, and segments that are split where another speaker begins.
        """
        return with_speakers(self.progress(whole=True).transcript(self._found))

    def progress(self, *, whole: bool = False) -> Progress:
        """Returns the state of the transcription. With ``whole``, adds the segments ahead and the coverage, which takes
        a pass over all segments.
        """
        return self._progress(whole)

    @property
    def language(self) -> str | None:
        """The code of the spoken language."""
        return self.progress().so_far.language

    @property
    def language_probability(self) -> float | None:
        """The model's certainty about the language, 0 to 1; ``None``: the language was not detected."""
        return self.progress().so_far.language_probability

    @property
    def duration(self) -> float | None:
        """The length of the audio in seconds; ``None`` while it is unknown."""
        return self.progress().duration

    @property
    def position(self) -> float:
        """Seconds of the audio that are done."""
        return self.progress().position

    @property
    def seconds_read(self) -> float:
        """The number of seconds of audio that are done. A parallel transcription also reads beyond `position`."""
        return self.progress().seconds_read

    @property
    def timings(self) -> Timings | None:
        """The time that each stage of the transcription took; ``None`` before the last window is done."""
        return self.progress().so_far.timings


class SegmentStream(ReadSoFar):
    """An async iterator of `Segment`."""

    def __init__(self, segments: AsyncIterator[Segment], progress: Callable[[bool], Progress]) -> None:
        super().__init__(progress)
        self._segments = segments

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        segment = await anext(self._segments)
        self._found.append(segment)
        return segment

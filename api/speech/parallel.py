"""`ParallelTranscription`: cuts audio into pieces at pauses, and reads the pieces at the same time. Their segments come
in order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import define, field

from ...core.tracebacks import raise_kept
from ..inputs.audio import Samples
from ..inputs.recording import Recording
from ..outputs.results import Segment
from .plan import Plan
from .reader import WindowReader
from .transcription import Transcription
from .walk import Walk, sound_of

StartSoon = Callable[[Callable[[], Awaitable[None]]], None]

_MOST_TOGETHER = 4  # the most windows of a piece
_LEAST_PIECES = 4
_FIRST_TOGETHER = 2  # the pieces that are read at the same time at the beginning


@define(eq=False)
class _Piece:
    """A stretch of audio that one task reads."""

    stop: int
    walk: Walk | None  # None: the piece is read
    read: deque[tuple[tuple[Segment, ...], int, str | None]] = field(factory=deque, init=False)
    """The segments of each window, the start of the next one, and the language so far."""
    error: Exception | None = field(default=None, init=False)  # not raised yet
    failed: bool = field(default=False, init=False)  # its task ended with an error


class ParallelTranscription(Transcription):
    """A `Transcription` that first cuts the audio at pauses into pieces of some windows, then reads up to ``at_once``
    pieces at the same time. No piece gets the text before it. Segments come in order, each as soon as all earlier
    segments are read. One piece more is cut than may be read at once.

    At first `_FIRST_TOGETHER` pieces are read at the same time. After every window that is read, one more piece may
    begin. If all began at once, they would share the device evenly, and even the first window would be read late.

    Args:
        start_soon: starts a task, which lives no longer than the block in which the transcription is used.
    """

    def __init__(
        self, recording: Recording, plan: Plan, reader: WindowReader, *, at_once: int, start_soon: StartSoon
    ) -> None:
        super().__init__(recording, plan, reader)
        self._start_soon = start_soon
        self._at_once = at_once
        self._places = trio.CapacityLimiter(min(at_once, _FIRST_TOGETHER))
        self._pieces: deque[_Piece] = deque()  # their segments are not all returned yet
        self._news = trio.lowlevel.ParkingLot()
        self._cut_to: int | None = 0  # None: all is cut
        self._cutting = False
        self._error: Exception | None = None  # of the last cut, not raised yet

    async def _next(self) -> tuple[Segment, ...] | None:
        while True:
            if self._pieces and (found := self._of_first(self._pieces[0])) is not None:
                return found
            if self._may_cut() and not self._cutting:
                self._cutting = True
                self._start_soon(self._cut_ahead)
            if not self._pieces and not self._cutting:
                raise_kept(self, "_error")
                return None
            await self._news.park()

    def _unread_samples(self) -> list[tuple[int, float]]:
        unread: list[tuple[int, float]] = [(one.walk.seek, one.stop) for one in self._pieces if one.walk is not None]
        return unread if self._cut_to is None else [*unread, (self._cut_to, math.inf)]

    def _later(self) -> list[Segment]:
        return [segment for piece in self._pieces for segments, _, _ in piece.read for segment in segments]

    def _may_cut(self) -> bool:
        """True if there is audio to cut, and no more pieces are unread than are read at once."""
        unread = sum(piece.walk is not None for piece in self._pieces)
        return self._cut_to is not None and self._error is None and unread <= self._places.total_tokens

    async def _cut_ahead(self) -> None:
        """Runs the task that cuts. Meanwhile segments that are ready are given out."""
        while self._cut_to is not None and self._may_cut():
            try:
                self._cut_to = await self._cut(self._cut_to)
            except Exception as error:  # noqa: BLE001  (raised after all that was cut before)
                self._error = error
        self._cutting = False
        self._news.unpark_all()

    def _of_first(self, piece: _Piece) -> tuple[Segment, ...] | None:
        """Returns the next segments of the first piece, or ``None`` if nothing is ready yet. If the piece has failed
        and its error was already raised, starts to read the piece again.

        Raises:
            Exception: the piece has failed.
        """
        if piece.read:
            segments, self._reached, language = piece.read.popleft()
            self.reader.language = self.reader.language or language
            return segments
        raise_kept(piece, "error")
        if piece.walk is None:
            self._pieces.popleft()
            self._reached = piece.stop
            return ()
        if piece.failed:
            piece.failed = False
            self._start_soon(partial(self._read, piece))
        return None

    async def _cut(self, start: int) -> int | None:
        """Cuts the next piece. Returns its end, or ``None`` if no audio is left."""
        planned = await self.plan.piece(start, self._windows())
        window = await sound_of(self.recording.window, planned, self.reader.recipe)
        if window is None:
            return None
        start, samples = window
        stop = start + len(samples)
        walk = Walk(
            reader=self.reader,
            recording=self.recording,
            plan=self.plan,
            window=partial(_excerpt, samples, start),
            seek=start,
            limit=stop,
            first=False,
            name=f"{start}.",
        )
        self.recording.forget(stop)
        self._pieces.append(_Piece(stop, walk))
        self._start_soon(partial(self._read, self._pieces[-1]))
        return stop

    def _windows(self) -> int:
        """The number of windows in a piece. A piece has several windows, since all but its first are read with the text
        before them. If the audio is short, a piece has fewer, so that at least `_LEAST_PIECES` pieces are read at the
        same time."""
        if self.recording.duration is None:
            return _MOST_TOGETHER
        recipe = self.reader.recipe
        full = recipe.samples(self.recording.duration) // recipe.facts.window_samples
        return max(1, min(full // _LEAST_PIECES, _MOST_TOGETHER))

    async def _read(self, piece: _Piece) -> None:
        """Reads one piece, in a task of its own."""
        async with self._places:
            try:
                while piece.walk is not None:
                    segments = await piece.walk.next_window()
                    if segments is None:
                        piece.walk = None
                    else:
                        piece.read.append((segments, piece.walk.seek, piece.walk.language))
                        self._places.total_tokens = min(self._places.total_tokens + 1, self._at_once)
                    self._news.unpark_all()
            except Exception as error:  # noqa: BLE001  (raised by `next_window`)
                piece.error, piece.failed = error, True
                self._news.unpark_all()


async def _excerpt(samples: Samples, first: int, start: int, length: int) -> Samples:
    """Returns a copy of samples of a piece that begins at sample ``first``. A view would keep the whole piece alive."""
    return samples[start - first : start - first + length].copy()

"""`ParallelTranscription`: windows cut at pauses are read at the same time, and given in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import define, field

from ..inputs.audio import Samples
from ..outputs.results import Segment
from .plan import AudioWindows, Plan
from .reader import WindowReader
from .transcription import Transcription
from .walk import Walk

StartSoon = Callable[[Callable[[], Awaitable[None]]], None]

_MOST_TOGETHER = 4  # windows of a piece
_LEAST_PIECES = 4


@define(eq=False)
class _Excerpt:
    """`AudioWindows` of a piece's samples."""

    start: int
    samples: Samples
    whole: AudioWindows
    broken: None = field(default=None, init=False)

    @property
    def duration(self) -> float | None:
        """The duration of the whole recording: a piece may be its last one."""
        return self.whole.duration

    async def window(self, start: int, length: int) -> Samples:
        """A copy: a view would keep the whole piece alive."""
        first = start - self.start
        return self.samples[first : first + length].copy()

    def forget(self, before: int) -> None:
        """Keeps all samples: they are few."""


@define(eq=False)
class _Piece:
    """A stretch of audio that one task reads."""

    stop: int
    walk: Walk | None  # until it is read
    read: deque[tuple[tuple[Segment, ...], int]] = field(
        factory=deque, init=False
    )  # segments, and the end of their window
    error: Exception | None = field(default=None, init=False)  # not raised yet
    failed: bool = field(default=False, init=False)  # nobody reads it now

    async def next_window(self) -> bool:
        """Reads one window, whose segments wait for their turn. False: all is read."""
        assert self.walk is not None, "a piece is read once"
        segments = await self.walk.next_window()
        if segments is None:
            self.walk = None
            return False
        self.read.append((segments, self.walk.seek))
        return True


class ParallelTranscription(Transcription):
    """A `Transcription` that cuts the audio at pauses into pieces of some windows first, and reads up to ``at_once`` of
    these at the same time, none with the text before it. Segments come in order, each when all before it are
    there.

    Args:
        start_soon: starts a task, which lives no longer than the block in which the transcription is used.
    """

    def __init__(
        self, recording: AudioWindows, plan: Plan, reader: WindowReader, *, at_once: int, start_soon: StartSoon
    ) -> None:
        super().__init__(recording, plan, reader)
        self._start_soon = start_soon
        self._at_once = trio.Semaphore(at_once)
        self._pieces: deque[_Piece] = deque()  # not given to the end yet
        self._news = trio.Event()
        self._cut_to = 0
        self._cutting = False
        self._all_cut = False
        self._error: Exception | None = None  # of the cutter, not raised yet
        self._given_to = 0

    async def _next(self) -> tuple[Segment, ...] | None:
        self._go_on()
        while True:
            if self._pieces and (found := self._of_first(self._pieces[0])) is not None:
                return found
            if not self._pieces and not self._cutting:
                error, self._error = self._error, None
                _raise(error)
                return None
            await self._news.wait()

    def _go_on(self) -> None:
        """Starts the cutter, and again the first piece where it has failed and its error was raised."""
        if not self._cutting and not self._all_cut and self._error is None:
            self._cutting = True
            self._start_soon(self._cut)
        if self._pieces and self._pieces[0].failed and self._pieces[0].error is None:
            piece = self._pieces[0]
            piece.failed = False
            self._start_soon(partial(self._read, piece))

    def _of_first(self, piece: _Piece) -> tuple[Segment, ...] | None:
        """The next segments of the first piece; ``None``: nothing is ready yet.

        Raises:
            Exception: the piece has failed.
        """
        if piece.read:
            segments, self._given_to = piece.read.popleft()
            return segments
        error, piece.error = piece.error, None
        _raise(error)
        if piece.walk is not None:
            return None
        self._pieces.popleft()
        self._given_to = piece.stop
        return ()

    def _wake(self) -> None:
        """Wakes the reader."""
        self._news.set()
        self._news = trio.Event()

    async def _cut(self) -> None:
        """Cuts the audio, one piece further ahead than may be read at once."""
        try:
            while (piece := await self._next_piece()) is not None:
                await self._at_once.acquire()
                self._cut_to = piece.stop
                self.recording.forget(piece.stop)
                self._pieces.append(piece)
                self._start_soon(partial(self._read, piece))
            self._all_cut = True
        except Exception as error:  # noqa: BLE001  (raised by `next_window`)
            self._error = error
        self._cutting = False
        self._wake()

    async def _next_piece(self) -> _Piece | None:
        planned = await self.plan.piece(self._cut_to, self._windows())
        if planned is None:
            return None
        start, stop = planned
        samples = await self.recording.window(start, stop - start)
        if self.reader.ends_before(samples, stop - start):
            return None
        stop = start + len(samples)
        walk = Walk(
            reader=self.reader,
            recording=_Excerpt(start, samples, self.recording),
            plan=self.plan,
            history=self.reader.recipe.history(),
            language=self.languages.of,
            seek=start,
            limit=stop,
            first=False,
            name=f"{start}.",
        )
        return _Piece(stop, walk)

    def _windows(self) -> int:
        """The number of windows of a piece. There are several, since each but the first is read with the text before
        it. There are few where the audio is short, so that at least `_LEAST_PIECES` are read at the same time."""
        if self.recording.duration is None:
            return _MOST_TOGETHER
        description = self.reader.recipe.description
        full = int(self.recording.duration * description.sampling_rate / description.window_samples)
        return max(1, min(full // _LEAST_PIECES, _MOST_TOGETHER))

    async def _read(self, piece: _Piece) -> None:
        try:
            while await piece.next_window():
                self._wake()
        except Exception as error:  # noqa: BLE001  (raised by `next_window`)
            piece.error, piece.failed = error, True
        else:
            self._at_once.release()
        self._wake()

    def _reached(self) -> int:
        return self._given_to


def _raise(error: Exception | None) -> None:
    try:
        if error is not None:
            raise error
    finally:
        del error  # a frame in its own error's traceback would be a reference cycle

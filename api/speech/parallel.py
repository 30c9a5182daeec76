"""`ParallelTranscription`: windows cut at pauses are read at the same time, and told in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio
from attrs import define, field

from ..inputs.audio import Samples
from ..outputs.results import Segment
from .plan import Plan, Recording
from .reader import WindowReader
from .transcription import Transcription
from .walk import Walk

StartSoon = Callable[[Callable[[], Awaitable[None]]], None]


@define(eq=False)
class _Piece:
    """A stretch of audio that one task reads: a `Recording` of its own samples."""

    start: int
    samples: Samples
    read: deque[tuple[tuple[Segment, ...], int]] = field(factory=deque, init=False)  # see `add`
    done: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    duration: None = field(default=None, init=False)
    broken: None = field(default=None, init=False)

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + len(self.samples)

    async def window(self, start: int, length: int) -> Samples:
        """A copy: a view would keep the whole piece alive."""
        first = start - self.start
        return self.samples[first : first + length].copy()

    def forget(self, before: int) -> None:
        """It is small."""

    def add(self, segments: tuple[Segment, ...], seek: int) -> None:
        """A window was read up to ``seek``. Its segments wait until they are told."""
        self.read.append((segments, seek))


class ParallelTranscription(Transcription):
    """As `Transcription`, but the audio is cut at pauses into windows first, and up to ``at_once`` of these are read at
    the same time, none with the text before it. Segments come in order, each when all before it are there.

    Args:
        start_soon: starts a task, which lives no longer than the block in which the transcription is used.
    """

    def __init__(
        self, recording: Recording, plan: Plan, reader: WindowReader, *, at_once: int, start_soon: StartSoon
    ) -> None:
        super().__init__(recording, plan, reader)
        self._start_soon = start_soon
        self._at_once = trio.Semaphore(at_once)
        self._pieces: deque[_Piece] = deque()  # not told to the end yet
        self._news = trio.Event()
        self._cutting = False
        self._all_cut = False
        self._error: Exception | None = None  # of the cutter
        self._told_to = 0

    async def _next(self) -> tuple[Segment, ...] | None:
        if not self._cutting:
            self._cutting = True
            self._start_soon(self._cut)
        while True:
            if self._pieces and (found := self._of_first()) is not None:
                return found
            if not self._pieces and self._all_cut:
                self._raise(self._error)
                return None
            await self._news.wait()

    def _of_first(self) -> tuple[Segment, ...] | None:
        """What the first piece has to tell; ``None``: nothing yet."""
        piece = self._pieces[0]
        if piece.read:
            segments, self._told_to = piece.read.popleft()
            return segments
        if not piece.done:
            return None
        self._pieces.popleft()
        self._told_to = piece.stop
        self._raise(piece.error)
        return ()

    @staticmethod
    def _raise(error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
        finally:
            del error  # a frame in its own error's traceback would be a reference cycle

    def _tell(self) -> None:
        """Wakes the reader."""
        self._news.set()
        self._news = trio.Event()

    async def _cut(self) -> None:
        """Cuts the audio, no further ahead than the pieces that may be read at once."""
        try:
            seek = 0
            while (planned := await self.plan.next(seek)) is not None:
                start, stop = planned
                await self._at_once.acquire()
                samples = await self.recording.window(start, stop - start)
                if self.reader.ends_before(samples, stop - start):
                    break
                piece = _Piece(start, samples)
                seek = piece.stop
                self.recording.forget(seek)
                self._pieces.append(piece)
                self._start_soon(lambda piece=piece: self._read(piece))
        except Exception as error:  # noqa: BLE001  (raised by `next_window`)
            self._error = error
        self._all_cut = True
        self._tell()

    async def _read(self, piece: _Piece) -> None:
        walk = Walk(
            reader=self.reader,
            recording=piece,
            plan=self.plan,
            history=self.reader.recipe.history(),
            language=self.languages.of,
            seek=piece.start,
            limit=piece.stop,
            first=False,
            name=f"{piece.start}.",
        )
        try:
            while (segments := await walk.next_window()) is not None:
                piece.add(segments, walk.seek)
                self._tell()
        except Exception as error:  # noqa: BLE001  (raised by `next_window`)
            piece.error = error
        piece.done = True
        self._at_once.release()
        self._tell()

    def _reached(self) -> int:
        return self._told_to

"""Live sessions: audio goes in as it is heard, text comes out while somebody speaks.

::

    feed -> backlog -> `Ear`, in a thread -> held samples -> `UtteranceReader` -> updates -> async for
            bounded    voice activity        bounded          one reading at a time
                              `Endpointer` decides what is read, and when

Two tasks work for a session: one listens, one reads. If a reading takes long, the next reading has more new audio, so
that no readings queue up. If readings always take longer than their audio lasts, held samples and backlog fill up, and
`feed` waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import soxr
import trio
from attrs import define, field

from ...actors.process import Process
from ...core.errors import EngineStateError, InvalidRequest
from ...core.tracebacks import Untraced, raise_kept
from ..inputs.audio import new_resampler
from ..inputs.recording import HeldSamples
from ..inputs.sources import ArraySource, Samples, array_source, check_values, type_name
from ..inputs.threads import run_in_thread
from ..outputs.results import LiveText
from ..speech.voice import CheckedListener, Probabilities, VoiceActivity
from .endpoints import Endpointer, Reading
from .options import LiveOptions
from .reader import Heard, UtteranceReader
from .streamed_session import StreamReader

MAX_PEAK = 2.0  # full scale is 1.0; audio that was resampled or decoded overshoots it a little
_ALLOWED = (
    "int16 samples as bytes (little endian, mono), or a 1-D int16 or float array, without a rate or with the "
    "session's: (samples, rate) or {'array': samples, 'sampling_rate': rate}"
)


def read_chunk(chunk: Any, rate: int) -> ArraySource:
    """Returns the samples of a chunk that is fed to a session of ``rate`` Hz. They may share the caller's memory.

    Raises:
        InvalidRequest: a type, dtype, shape or rate that is not allowed; bytes that end within a sample; floats that
            are NaN, infinite or beyond full scale.
    """
    if isinstance(chunk, bytes | bytearray | memoryview):
        count = memoryview(chunk).nbytes
        if count % 2:
            raise InvalidRequest(
                f"a chunk has {count} bytes; allowed: an even number, since an int16 sample has 2 bytes. Keep an odd "
                "last byte for the next chunk"
            )
        return ArraySource(np.frombuffer(chunk, "<i2"), rate)
    found = array_source(chunk, "a chunk", int16=True)
    if found is None:
        raise InvalidRequest(f"a chunk has the type {type_name(chunk)}; allowed: {_ALLOWED}")
    if found.rate not in (None, rate):
        raise InvalidRequest(
            f"a chunk has {found.rate} Hz; allowed: {rate} Hz, the rate of the session. Open the session with "
            "engine.live(rate=...), the rate of your chunks"
        )
    if found.samples.dtype.kind == "f":
        check_values(found.samples, "a chunk", InvalidRequest, most=MAX_PEAK)
    return found


@define(eq=False)
class Ear:
    """Turns chunks into samples at the model's rate, and into probabilities of speech. Its calls block, and one thread
    at a time may use it.

    Raises:
        InvalidRequest: the detector's rate is not the model's.
    """

    rate: int
    detector: VoiceActivity
    model_rate: int
    _resampler: soxr.ResampleStream | None = field(init=False)
    _listener: CheckedListener = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listener = CheckedListener(self.detector, self.model_rate)
        self._resampler = new_resampler(self.rate, self.model_rate)

    def hear(self, chunk: Samples, *, last: bool = False) -> tuple[Samples, Probabilities]:
        """Returns the next samples, and the probabilities of the frames that they complete. ``last``: no more chunks
        come, and the last frame need not be complete."""
        samples = chunk if self._resampler is None else self._resampler.resample_chunk(chunk, last=last)
        return samples, self._listener.hear(samples, last=last)


# ---- sessions --------------------------------------------------------------------------------------------------------


_PIECE = 1.0  # seconds of audio that are heard at once


class LiveSession(Protocol):
    """The transcription of one live audio. Its user feeds chunks and iterates over the updates, in two tasks or in
    turn."""

    async def feed(self, chunk: Any) -> None:
        """Adds the next chunk, of any length. Waits while the backlog has ``max_backlog`` seconds of audio; nothing is
        dropped. If a call is cancelled while it waits, the beginning of the chunk may have been added.

        Args:
            chunk: int16 samples as bytes (little endian, mono), or an int16 or float array of shape (n,), full scale at
                1.0; alone, or with its rate: ``(samples, rate)``, ``{"array": samples, "sampling_rate": rate}``.

        Raises:
            InvalidRequest: a chunk that is not allowed; nothing of it was added.
            EngineStateError: the call comes after `finish`, outside of the session's block, or while another task
                feeds.
            EngineError: the session has failed, see `__anext__`.
        """
        ...

    async def finish(self) -> None:
        """Ends the audio. Iteration ends after the last text. The call returns at once, and a second call does nothing.
        If a `feed` of another task still waits for room, its whole chunk is heard."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> LiveText:
        """Returns the next update. If the reader is late, the updates of one utterance are merged into one.

        Raises:
            EngineError: a request failed, or the engine has ended. All earlier updates were returned before.
        """
        ...


class LiveTranscription:
    """Implements `LiveSession` in the engine's own loop. `listen` and `transcribe` are its two tasks. They never raise
    an error: the next call of the session's user raises it."""

    def __init__(
        self, options: LiveOptions, ear: Ear, endpointer: Endpointer, reader: UtteranceReader | StreamReader
    ) -> None:
        self._process = Process()
        self._options = options
        self._ear = ear
        self._endpointer = endpointer
        self._reader = reader
        self._backlog: deque[Samples] = deque()
        self._waiting = 0  # samples of the backlog, and of the piece that is being heard
        self._samples = HeldSamples()
        self._updates: deque[LiveText] = deque()
        self._utterance = 0
        self._position = 0.0  # seconds, the end of the latest reading
        self._shown: str | None = None  # the provisional text of the last update; None: the utterance has no update
        self._changed = trio.lowlevel.ParkingLot()  # for all tasks that wait for a change
        self._feeding = False
        self._finished = False  # no more is fed
        self._heard = False  # all is heard
        self._read = False  # all is read
        self._closed = False
        self._fault: Exception | None = None  # not raised yet
        self._failure: str | None = None

    # -- the user's side -----------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def feed(self, chunk: Any) -> None:
        """Implements `LiveSession.feed`."""
        self._check()
        if self._finished:
            raise EngineStateError("feed() was called after finish(); allowed: before finish(). Open another session")
        source = read_chunk(chunk, self._options.rate)
        with self._alone():
            await trio.lowlevel.checkpoint()
            most = round(self._options.max_backlog * self._options.rate)
            size = min(most, round(_PIECE * self._options.rate))
            for start in range(0, len(source.samples), size):
                piece = source.part(start, start + size)
                while self._waiting + len(piece) > most and self._failure is None and not self._closed:
                    await self._change()
                self._check()
                self._backlog.append(piece)
                self._waiting += len(piece)
                self._changed.unpark_all()

    @trio.lowlevel.enable_ki_protection
    async def finish(self) -> None:
        """Implements `LiveSession.finish`."""
        self._check()
        self._finished = True
        self._changed.unpark_all()
        await trio.lowlevel.checkpoint()

    def __aiter__(self) -> Self:
        return self

    @trio.lowlevel.enable_ki_protection
    async def __anext__(self) -> LiveText:
        await trio.lowlevel.checkpoint()
        while not self._updates:
            if self._read:
                raise StopAsyncIteration
            self._check()
            await self._change()
        return self._updates.popleft()

    async def _change(self) -> None:
        """Waits for a change."""
        with Untraced(trio.Cancelled):
            await self._changed.park()

    def _check(self) -> None:
        """Raises an error if the session cannot go on."""
        self._process.check()
        if self._closed:
            raise EngineStateError(
                "this live session is over, since its block has ended; open another: engine.live(...)"
            )
        raise_kept(self, "_fault")
        if self._failure is not None:
            raise EngineStateError(f"this live session has failed ({self._failure}); open another: engine.live(...)")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._feeding:
            raise EngineStateError(
                "feed() was called while another task feeds this live session; allowed: one call at a time. Await "
                "feed() first, or open a session for each task"
            )
        self._feeding = True
        try:
            yield
        finally:
            self._feeding = False
            self._changed.unpark_all()  # `_listen` waits for this

    # -- the ends ------------------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Ends the session with ``error``, which is raised to its user once."""
        if self._failure is None and not self._read:
            self._fault, self._failure = error, f"{type(error).__name__}: {error}"
            self._changed.unpark_all()

    def close(self) -> None:
        """Ends the session when its block ends."""
        self._closed = True
        self._fault = None
        self._backlog.clear()
        self._changed.unpark_all()

    # -- the tasks -----------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Hears the audio that is fed, in a task of its own."""
        await self._guarded(self._listen)

    async def transcribe(self) -> None:
        """Reads the audio that was heard, in a task of its own."""
        await self._guarded(self._transcribe)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  (raised where the session is used)
            self.fail(error)

    @trio.lowlevel.enable_ki_protection  # a ^C after an answer would lose the answer
    async def _listen(self) -> None:
        while not self._heard:
            all_fed = self._finished and not self._feeding
            if self._endpointer.is_full or not (self._backlog or all_fed):
                await self._change()
            elif self._backlog:
                await self._hear(self._next_piece())
            else:
                await self._hear(np.zeros(0, np.float32), last=True)

    def _next_piece(self) -> Samples:
        """Removes up to a second of audio from the backlog, so that small chunks do not cost a thread each."""
        taken = [self._backlog.popleft()]
        room = round(_PIECE * self._options.rate) - len(taken[0])
        while self._backlog and len(self._backlog[0]) <= room:
            taken.append(self._backlog.popleft())
            room -= len(taken[-1])
        return np.concatenate(taken)

    async def _hear(self, piece: Samples, *, last: bool = False) -> None:
        samples, probabilities = await run_in_thread(partial(self._ear.hear, piece, last=last))
        self._samples.append(samples)
        self._endpointer.hear(probabilities.tolist())
        self._waiting -= len(piece)
        if last:
            self._endpointer.end(self._samples.stop)
            self._heard = True
        self._forget()

    def _forget(self) -> None:
        self._samples.forget(self._endpointer.needed)
        self._changed.unpark_all()

    @trio.lowlevel.enable_ki_protection
    async def _transcribe(self) -> None:
        while not self._read:
            reading = self._endpointer.due()
            if reading is not None:
                await self._make(reading)
            elif self._endpointer.is_over:
                rest = await self._reader.end()
                self._endpointer.next()
                self._tell(rest, ends=True)
                self._forget()
            elif self._heard:
                self._read = True
                self._changed.unpark_all()
            else:
                await self._change()

    async def _make(self, reading: Reading) -> None:
        heard = await self._reader.read(reading, self._samples.read(reading.start, reading.stop))
        self._endpointer.read(reading)
        if heard.moved is not None:
            self._endpointer.moved(heard.moved)
        self._position = reading.stop / self._endpointer.sampling_rate
        self._tell(heard, ends=False)
        self._forget()

    def _tell(self, heard: Heard, *, ends: bool) -> None:
        words, provisional = heard.words, self._reader.provisional
        is_news = words or provisional != (self._shown or "")
        if is_news or (ends and self._shown is not None):
            update = LiveText(
                utterance=self._utterance,
                stable="".join(word.text for word in words),
                provisional=provisional,
                words=words,
                start=words[0].start if words else None,
                end=words[-1].end if words else None,
                position=self._position,
                language=self._reader.language,
                ends_utterance=ends,
            )
            if self._updates and self._updates[-1].utterance == update.utterance:
                update = self._updates.pop().followed_by(update)
            self._updates.append(update)
            self._shown = provisional
            self._changed.unpark_all()
        if ends and self._shown is not None:
            self._utterance += 1
            self._shown = None

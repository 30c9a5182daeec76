"""`TrioEngine`: the engine itself, for the trio loop in which it is entered. `Engine` provides this loop."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Self

import numpy as np
import trio
from attrs import evolve

from ...actors.statistics import EngineStatistics
from ...actors.switch_interval import shortened_by
from ...core.checks import flag
from ...core.config import EngineConfig
from ...core.detokenizer import TextDeltas, TokenBytes
from ...core.errors import EngineClosed, EngineStateError, InvalidRequest, Left
from ...core.events import error_text
from ...core.model import ModelDescription
from ...core.order import read_priority
from ...core.request import Request
from ..inputs.audio import AudioSource
from ..inputs.compiling import Compiler
from ..inputs.prompts import Query, build_request, check_kind, with_page_keys
from ..inputs.vectors import (
    Told,
    VectorQuery,
    Vectors,
    build_requests,
    check_texts,
    embedding_pooling,
    scoring_pooling,
    softmax,
)
from ..live.options import LiveOptions
from ..live.session import LiveSession, LiveTranscription
from ..outputs.results import Completion, Transcript, Turn, Word
from ..outputs.streams import Deltas, DeltaStream, Mailbox
from ..outputs.text import Output, completion_of, output_of, sampled_of
from ..speech.aligning import AlignQuery, align
from ..speech.options import TranscribeOptions
from ..speech.silero import Silero
from ..speech.speakers import DiarizeQuery, diarize
from ..speech.transcription import SegmentStream, Transcription
from ..speech.windows import Generated
from ..tools.formats import silent_beside_calls
from .adapters import Adapters
from .alternatives import run_together
from .backend import Backend
from .door import Door
from .live import open_live
from .state import Spelling, State
from .transcriptions import Detectors, open_transcription


class TrioEngine:
    """Implements `Engine` for tasks of one trio loop. A `TrioEngine` can be made without a loop.

    Args:
        trim: called after everything is released; it returns free memory to the operating system.
    """

    def __init__(
        self, config: EngineConfig, make_backend: Callable[[], Backend], trim: Callable[[], None] = lambda: None
    ) -> None:
        self.config = config
        self.state = State.NEW
        self.backend: Backend | None = None  # set when the engine is entered
        self._detectors = Detectors(Silero(shortened_by(config.switch_interval)))
        self._make_backend = make_backend
        self._trim = trim
        self._description: ModelDescription | None = None
        self._device: str | None = None  # set when the engine is closed
        self._failure: str | None = None  # set if the engine's block ends with an error
        self.spelling = Spelling()
        self._block: AbstractAsyncContextManager[ModelDescription] | None = None
        self._door = Door(config.max_pending)
        self._numbers = itertools.count()
        self._live: set[LiveTranscription] = set()
        self._texts: dict[bool | None, tuple[TokenBytes, frozenset[int]]] = {}  # see `_texts_of`
        self._reading = trio.CapacityLimiter(1)  # texts are tokenized one after another
        self._compiler = Compiler()
        self.adapters = Adapters()

    # -- the block ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        assert self.state is State.NEW, "entered twice"
        await trio.lowlevel.checkpoint_if_cancelled()
        self.state = State.OPENING
        self.backend = self._make_backend()
        self._block = self.backend.running()
        try:
            self._description = await self._block.__aenter__()
        except BaseException as error:
            self._note_failure(error)
            self.state = State.CLOSED
            raise
        self.state = State.OPEN
        return self

    async def __aexit__(self, *end: *Left) -> bool | None:
        assert self._block is not None, "left before entered"
        (block, self._block), (_, error, traceback) = (self._block, None), end
        try:
            return await block.__aexit__(*end)
        except BaseException as left:
            if left is not error:
                self._note_failure(left)
            raise
        finally:
            self.state = State.CLOSED
            self._let_go()
            if error is not None:  # else the error would keep frames of the block and of contextlib, which refer to it
                error.__traceback__ = traceback

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._failure = error_text(error)

    def _let_go(self) -> None:
        """Drops what is left after the device is released, above all the tokenizer."""
        self._device, self._description = self.device, None
        self._end_sessions()
        self._detectors = Detectors()  # without weights
        self._texts.clear()
        self._trim()

    async def aclose(self, drain: float) -> None:
        """Implements `Engine.aclose`."""
        if self.state is State.CLOSED:
            return
        backend, _ = self._opened()
        await backend.stop(drain)
        self.state = State.CLOSED
        self._end_sessions()

    def _end_sessions(self) -> None:
        """Ends the live sessions with an error. While nobody speaks, a session has no request by which it would notice
        the end of the engine.
        """
        for session in self._live:
            session.fail(EngineClosed("the engine ended before the live session did; call finish() and read it first"))

    async def sleep(self) -> None:
        """Implements `Engine.sleep`."""
        await self._opened()[0].sleep()

    async def wake(self) -> None:
        """Implements `Engine.wake`."""
        await self._opened()[0].wake()

    async def load_adapter(self, name: object, folder: object) -> None:
        """Implements `Engine.load_adapter`."""
        await self.adapters.load(self._opened()[0], name, folder)

    async def unload_adapter(self, name: object) -> None:
        """Implements `Engine.unload_adapter`."""
        await self.adapters.unload(self._opened()[0], name)

    @property
    def model(self) -> ModelDescription:
        """Implements `Engine.model`."""
        return self._opened()[1]

    @property
    def device(self) -> str:
        """The device on which the engine runs, will run or has run."""
        description = self._description  # another thread may ask while the engine closes
        if description is not None:
            return description.device
        if self._device is not None:
            return self._device
        return self.config.device

    @property
    def pending(self) -> int:
        """Number of requests that have a place at the door (``max_pending``)."""
        return self._door.places - self._door.free

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place at the door (``max_pending``)."""
        return self._door.waiting

    @property
    def crash(self) -> str | None:
        """The type and text of the failure that ended the engine; ``None``: the engine has not failed."""
        return None if self.backend is None else self.backend.failure

    def statistics(self) -> EngineStatistics:
        """Implements `Engine.statistics`."""
        return self._opened()[0].statistics()

    def not_open(self) -> EngineStateError:
        """Returns the error for calls while the engine is not open."""
        return self.spelling.not_open(self.state, self._failure or self.crash)

    def _opened(self) -> tuple[Backend, ModelDescription]:
        if self.state is not State.OPEN or self.backend is None or self._description is None:
            raise self.not_open()
        return self.backend, self._description

    # -- token level -------------------------------------------------------------------------------------------------

    async def generate(self, query: Query) -> Completion:
        """Implements `Engine.generate`."""
        asked = trio.current_time()
        requests = await self.requests_of(query)
        if len(requests) == 1:
            return await self._complete(requests[0], asked, wait=query.wait)
        begun = trio.Event()
        runs = [partial(self._complete, one, asked, begun, wait=query.wait) for one in requests]
        first, *others = await run_together(runs, begun)
        return evolve(first, alternatives=tuple(others))

    async def requests_of(self, query: Query) -> list[Request]:
        """Returns one request for each of the ``n`` completions that ``query`` wants. Its prompt is tokenized once. A
        beam search is a single request, which finds all its completions."""
        request = await self._build(query)
        count = request.sampling.n
        if count == 1 or request.sampling.beam_size > 1:
            return [request]
        return [
            evolve(request, id=self._new_id(query.request_id), sampling=request.sampling.sibling(index))
            for index in range(count)
        ]

    @asynccontextmanager
    async def follow(self, request: Request, asked: float, *, wait: bool) -> AsyncIterator[Deltas]:
        """Submits ``request`` and yields its deltas.

        Args:
            request: a request from `requests_of`.
            asked: the time at which the caller made the query.
        """
        output = self._output(request, self._text_deltas(request))
        async with self._submitted(request, asked, output, wait=wait) as mailbox:
            yield Deltas(mailbox, output)

    @asynccontextmanager
    async def stream(self, query: Query) -> AsyncIterator[DeltaStream]:
        """Implements `Engine.stream`."""
        asked = trio.current_time()
        request = await self._build(query)
        if request.sampling.n > 1:
            raise InvalidRequest(
                f"n={request.sampling.n} for a stream; allowed: n=1. For several answers use engine.generate(...)"
            )
        async with self.follow(request, asked, wait=query.wait) as deltas:
            yield deltas

    # -- vectors -----------------------------------------------------------------------------------------------------

    async def embed(
        self,
        texts: object,
        pooling: str | None,
        normalize: bool | None,
        priority: int,
        *,
        wait: bool,
        told: Told = bool,
        name: str | None = None,
    ) -> Vectors:
        """Implements `Engine.embed`."""
        kind = embedding_pooling(self._opened()[1], pooling, normalize)
        query = VectorQuery(texts=check_texts("texts", texts), pooling=kind, priority=priority)
        return await self._vectors(query, wait=wait, told=told, name=name)

    async def score(
        self, query: object, documents: object, priority: int, *, wait: bool, told: Told = bool, name: str | None = None
    ) -> tuple[float, ...]:
        """Implements `Engine.score`."""
        pooling = scoring_pooling(self._opened()[1])
        if not isinstance(query, str):
            raise InvalidRequest(f"query={reprlib.repr(query)}; allowed: a text")
        if (labels := len(self.model.labels)) != 1:
            told_labels = f"{self.model.architecture} has {labels} labels"
            raise InvalidRequest(
                f"{told_labels}; engine.score needs a reranker, which has one label. Use engine.classify(...)"
            )
        pairs = [(query, document) for document in check_texts("documents", documents)]
        asked = VectorQuery(texts=pairs, pooling=pooling, priority=priority)
        vectors = await self._vectors(asked, wait=wait, told=told, name=name)
        return tuple(map(float, vectors[:, 0])) if pairs else ()

    async def classify(
        self, texts: object, priority: int, *, wait: bool, told: Told = bool, name: str | None = None
    ) -> tuple[dict[str, float], ...]:
        """Implements `Engine.classify`."""
        pooling = scoring_pooling(self._opened()[1])
        query = VectorQuery(texts=check_texts("texts", texts), pooling=pooling, priority=priority)
        labels = self.model.labels
        scores = await self._vectors(query, wait=wait, told=told, name=name)
        return tuple(dict(zip(labels, softmax(row), strict=True)) for row in scores.tolist())

    async def _vectors(self, query: VectorQuery, *, wait: bool, told: Told, name: str | None) -> Vectors:
        """Computes the vectors of ``query``, [texts, width]."""
        run, new_id = partial(self._vector, asked=trio.current_time(), wait=wait), partial(self._new_id, name)
        requests = await build_requests(self.model, query, self.config, new_id=new_id, reading=self._reading)
        told(sum(len(request.prompt_token_ids) for request in requests))
        vectors = await run_together([partial(run, request) for request in requests])
        return np.array(vectors, np.float32).reshape(len(requests), len(vectors[0]) if vectors else 0)

    async def _vector(self, request: Request, *, asked: float, wait: bool) -> tuple[float, ...]:
        async with self._submitted(request, asked, wait=wait) as mailbox:
            await mailbox.wait_end()
        mailbox.take_end()
        vector = mailbox.unread[-1].vector if mailbox.unread else None
        assert vector is not None, "a pooled request ended without a vector"
        return vector

    # -- speech ------------------------------------------------------------------------------------------------------

    async def align(self, query: AlignQuery) -> tuple[Word, ...]:
        """Implements `Engine.align`."""
        run = partial(self._run, priority=read_priority(query.priority), wait=query.wait)
        return await align(query, self.model, run, self._new_id(query.request_id))

    async def diarize(self, query: DiarizeQuery) -> tuple[Turn, ...]:
        """Implements `Engine.diarize`."""
        run, name = partial(self._vector, asked=trio.current_time(), wait=query.wait), self._new_id(query.request_id)
        return await diarize(query, self.model, run, name)

    async def transcribe(
        self, audio: AudioSource, options: TranscribeOptions, priority: int, request_id: str | None, *, wait: bool
    ) -> Transcript:
        """Implements `Engine.transcribe`."""
        async with self._transcription(audio, options, priority, request_id, wait=wait) as transcription:
            return await transcription.transcript()

    @asynccontextmanager
    async def stream_transcription(
        self, audio: AudioSource, options: TranscribeOptions, priority: int, request_id: str | None, *, wait: bool
    ) -> AsyncIterator[SegmentStream]:
        """Implements `Engine.stream_transcription`."""
        async with self._transcription(audio, options, priority, request_id, wait=wait) as transcription:
            await transcription.start()
            yield SegmentStream(transcription, transcription.progress)

    @asynccontextmanager
    async def live(
        self, options: LiveOptions, priority: int, request_id: str | None, *, wait: bool
    ) -> AsyncIterator[LiveSession]:
        """Implements `Engine.live`."""
        _, description = self._opened()
        run = partial(self._run_together, priority=read_priority(priority), wait=wait)
        name = self._new_id(request_id)
        async with open_live(options, description, run, request_id=name, detector=self._detectors.voice) as session:
            self._live.add(session)
            try:
                yield session
            finally:
                self._live.discard(session)

    def _transcription(
        self, audio: AudioSource, options: TranscribeOptions, priority: int, request_id: str | None, *, wait: bool
    ) -> AbstractAsyncContextManager[Transcription]:
        _, description = self._opened()
        return open_transcription(
            audio,
            options,
            description,
            partial(self._run_together, priority=read_priority(priority), wait=wait),
            request_id=self._new_id(request_id),
            asked=trio.current_time(),
            config=self.config,
            detectors=self._detectors,
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _build(self, query: Query) -> Request:
        description, name, adapter = self._opened()[1], self._new_id(query.request_id), self.adapters.key(query.adapter)
        request = await build_request(description, query, name, reading=self._reading, compiler=self._compiler)
        request = evolve(request, adapter=adapter) if adapter else request
        return await with_page_keys(request, description, prefix_caching=self.config.prefix_caching)

    def _new_id(self, name: str | None) -> str:
        """Returns an id that is unique in this engine, even if ``name`` is not."""
        check_kind("request_id", name, str, "a text, or leave it out")
        return f"{name or 'request'}#{next(self._numbers)}"

    @asynccontextmanager
    async def _submitted(
        self, request: Request, asked: float, output: Output | None = None, *, wait: bool
    ) -> AsyncIterator[Mailbox]:
        """Admits and submits ``request`` for a block, and yields its mailbox. On the way out the request is aborted if
        it has not ended. Its place at the door is free again when it has ended, even if its tokens are not read yet.

        Args:
            asked: the time at which the caller made the request.
            output: an output, which receives the tokens at once if it is eager.
        """
        backend, _ = self._opened()
        if flag().of("wait", wait):
            await self._door.enter(request.priority)
        else:
            self._door.enter_nowait()
        on_token = output.take if output is not None and output.eager else None
        mailbox = Mailbox(self._door.leave, on_token, trio.current_time() - asked)
        try:
            backend.submit(request, mailbox)
        except BaseException:
            self._door.leave()
            raise
        try:
            yield mailbox
        finally:
            if not mailbox.ended:
                backend.abort(request.id)

    @trio.lowlevel.enable_ki_protection  # the reader of a stream of segments calls it, too
    async def _run_together(self, requests: Sequence[Request], *, priority: int, wait: bool) -> list[Generated]:
        """Runs requests of a transcription until all have ended."""
        runs = [partial(self._run, one, priority=priority, wait=wait) for one in requests]
        return [await runs[0]()] if len(runs) == 1 else await run_together(runs)

    async def _run(self, request: Request, *, priority: int, wait: bool) -> Generated:
        """Runs one request of a transcription to its end."""
        asked = trio.current_time()
        request = evolve(request, priority=priority)
        request = await with_page_keys(request, self.model, prefix_caching=self.config.prefix_caching)
        async with self._submitted(request, asked, wait=wait) as mailbox:
            await mailbox.wait_end()
        reason = mailbox.take_end()
        token_ids, logprobs = sampled_of(mailbox.unread)
        stops = {*request.sampling.stop_token_ids}
        if not request.sampling.ignore_eos:
            stops |= {*self.model.eos_token_ids}
        if token_ids and token_ids[-1] in stops:
            token_ids = token_ids[:-1]
        return Generated(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            frames=tuple(part.frames for part in mailbox.unread if part.frames is not None),
            probe=next((part.probe for part in mailbox.unread if part.probe is not None), None),
            aligned=next((part.aligned for part in mailbox.unread if part.aligned is not None), None),
            timings=mailbox.timings,
        )

    def _output(self, request: Request, texts: TextDeltas | None) -> Output:
        backend, description = self._opened()
        return output_of(request, texts, frozenset(description.eos_token_ids), partial(backend.abort, request.id))

    async def _complete(
        self, request: Request, asked: float, begun: trio.Event | None = None, *, wait: bool
    ) -> Completion:
        """Runs ``request`` to its end. Tokens do not wake the caller's task. If ``begun`` is given, it is set at the
        first token, which alone wakes the task.
        """
        output = self._output(request, self._text_deltas(request) if request.sampling.stop else None)
        async with self._submitted(request, asked, output, wait=wait) as mailbox:
            if begun is not None:
                await mailbox.wait()
                begun.set()
            await mailbox.wait_end()
        return evolve(self._completion(request, mailbox, output), timings=mailbox.timings)

    def _completion(self, request: Request, mailbox: Mailbox, output: Output) -> Completion:
        if not output.eager:
            return output.completion(mailbox.unread, mailbox.take_end(), partial(self._text_deltas, request))
        output.raise_fault()
        if not output.ended:
            output.end(mailbox.take_end())
        return completion_of(output.ready)

    def _text_deltas(self, request: Request) -> TextDeltas:
        """Returns what turns the tokens of ``request`` into text. Timestamps and special tokens are part of a
        completion's tokens, but not of its text unless the request includes special tokens."""
        skip = request.sampling.skip_special_tokens
        return self.texts(None if request.calls and skip is None else skip is not False)

    def texts(self, skip: bool | None) -> TextDeltas:
        """Returns what turns tokens into text with special tokens, without (``skip``), or with those alone that mark
        calls (``None``)."""
        return TextDeltas(*self._texts_of(skip))

    def token_bytes(self) -> TokenBytes:
        """Returns the bytes of the model's tokens in texts without special tokens. All requests share them."""
        return self._texts_of(skip=True)[0]

    def _texts_of(self, skip: bool | None) -> tuple[TokenBytes, frozenset[int]]:
        """Returns the bytes of tokens in texts as `texts` makes them, and the tokens that give no text."""
        if skip not in self._texts:
            description = self.model
            end = description.vocabulary_size
            first = end if description.text_tokens is None else description.text_tokens
            silent = frozenset({*description.eos_token_ids, *range(first, end)} if skip else ())
            silent |= silent_beside_calls(description) if skip is None else frozenset()
            self._texts[skip] = TokenBytes(description.tokenizer, bool(skip)), silent
        return self._texts[skip]

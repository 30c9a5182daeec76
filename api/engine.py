"""`Engine`: what users open, ask and close."""

from __future__ import annotations

import enum
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, Unpack

import numpy as np
import sniffio
import trio

from ..actors.gpu_runner import torch_executor
from ..actors.supervisor import EngineStatistics, Supervisor
from ..actors.worker import ThreadWorker, Worker
from ..core.config import EngineConfig
from ..core.errors import EngineStateError, InvalidRequest, Overloaded, RequestTooLarge
from ..core.model import Executor, ModelDescription
from ..core.plan import Drawn
from ..core.request import EncoderItem, LogitRules, Request, SamplingParams, check_integer
from .audio import AudioSource, Samples, content_key, load_audio
from .results import Completion, Delta, Segment, Transcript, Usage
from .streams import Mailbox, TextDeltas
from .transcription import Generated, TranscribeOptions, Transcription

_INLINE_SAMPLES = 1_000_000  # checking more would hold the loop up for over a millisecond


class TranscribeArguments(TypedDict, total=False):
    """The keywords of `Engine.transcribe`: the fields of `TranscribeOptions`, which tells what they mean."""

    language: str | None
    task: str
    prompt: str | None
    timestamps: str
    temperature: float | Sequence[float]
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    seed: int


class _State(enum.Enum):
    NEW = "not entered yet"
    OPENING = "still opening"
    OPEN = "open"
    CLOSED = "closed"


class Engine:
    """An inference engine that lives as long as its ``async with`` block, in the caller's trio loop.

    ::

        async with Engine("path-or-hub-id") as engine:
            transcript = await engine.transcribe("speech.wav")

    Many tasks may ask at once; their requests are batched. Cancelling a task withdraws its request. When the block
    ends, however it ends, running requests are drained or aborted, every page and cache entry comes back and the device
    is released, in that order. What drains are requests: a transcription asks anew for each of its windows, and is
    refused once the block has ended.

    Args:
        model: a folder with a transformers checkpoint, or a hub id.
        config: settings; see `EngineConfig`.

    Raises (on entering):
        CheckpointError: no checkpoint there, or one that cannot be loaded.
        EngineStateError: entered twice, or not in a trio loop.

    Raises (on leaving, beside what the block raises):
        RunnerCrashed: an actor failed; the block was cancelled.
        EngineTeardownError: something could not be given back in time, or a release failed.
        InvariantViolation: with ``EngineConfig(verify=True)``, the engine broke one of its promises.
    """

    def __init__(self, model: str | Path, *, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self._assemble(config, partial(torch_executor, model, config), ThreadWorker)

    @classmethod
    def from_parts(
        cls,
        make_executor: Callable[[], Executor],
        make_worker: Callable[[], Worker],
        *,
        config: EngineConfig | None = None,
    ) -> Self:
        """An engine over an executor and a worker of your own, as the simulation in `triolet.testing` does."""
        engine = cls.__new__(cls)
        engine._assemble(config or EngineConfig(), make_executor, make_worker)
        return engine

    def _assemble(
        self, config: EngineConfig, make_executor: Callable[[], Executor], make_worker: Callable[[], Worker]
    ) -> None:
        self._config = config
        self._make_executor = make_executor
        self._make_worker = make_worker
        self._state = _State.NEW
        self._supervisor: Supervisor | None = None
        self._description: ModelDescription | None = None
        self._block: AbstractAsyncContextManager[ModelDescription] | None = None
        self._admission = trio.Semaphore(config.max_pending)
        self._numbers = itertools.count()

    # -- the block ---------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        if self._state is not _State.NEW:
            raise EngineStateError(
                f"this engine is {self._state.value}; an engine is entered once: make a new Engine(...)"
            )
        _require_trio()
        await trio.lowlevel.checkpoint_if_cancelled()
        self._state = _State.OPENING
        self._supervisor = Supervisor(self._config, self._make_executor, self._make_worker())
        self._block = self._supervisor.running()
        try:
            self._description = await self._block.__aenter__()
        except BaseException:
            self._state = _State.CLOSED
            raise
        self._state = _State.OPEN
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._block is not None, "left before entered"
        block, self._block = self._block, None
        try:
            return await block.__aexit__(kind, error, traceback)
        finally:
            self._state = _State.CLOSED
            del error, traceback

    async def aclose(self, drain: float | None = None) -> None:
        """Stops the engine before its block ends. Running requests have ``drain`` seconds (default:
        ``EngineConfig.drain_seconds``; 0 aborts at once); returns when the device is released."""
        seconds = self._config.drain_seconds if drain is None else drain
        if not seconds >= 0:
            raise InvalidRequest(f"drain={drain}; allowed: 0 (abort at once) or more seconds")
        if self._state is _State.CLOSED:
            return
        supervisor, _ = self._opened()
        await supervisor.stop(seconds)
        self._state = _State.CLOSED

    @property
    def model(self) -> ModelDescription:
        """The loaded model's limits, vocabulary and tokenizer."""
        return self._opened()[1]

    def statistics(self) -> EngineStatistics:
        """A frozen snapshot: the queue and the pages, the encoder cache, the device's bytes by owner."""
        return self._opened()[0].statistics()

    def _opened(self) -> tuple[Supervisor, ModelDescription]:
        if self._state is not _State.OPEN or self._supervisor is None or self._description is None:
            raise EngineStateError(
                f"this engine is {self._state.value}; use it inside its block: async with Engine(...) as engine"
            )
        return self._supervisor, self._description

    # -- token level -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        audio: AudioSource | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
    ) -> Completion:
        """Runs one sequence to its end.

        Args:
            prompt: decoder prompt as text; special tokens are spelled as in the vocabulary (``<|startoftranscript|>``).
            prompt_token_ids: the decoder prompt as tokens, instead of ``prompt``.
            audio: path, bytes, binary file or mono float array at the model's rate; at most one window of the model.
            sampling: how tokens are drawn; greedy by default.
            priority: smaller runs first.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait where the queue is full, or raise `Overloaded` at once.

        Raises:
            InvalidRequest: an argument that cannot work; `UnsupportedAudio`, `RequestTooLarge` among them.
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: the request could not be served.
        """
        request = await self._build(prompt, prompt_token_ids, audio, sampling, priority, request_id)
        generated = await self._run(request, wait=wait)
        return self._completion(request, generated)

    @asynccontextmanager
    async def stream(
        self,
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        audio: AudioSource | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Like `generate`, token by token: ``async with engine.stream(...) as deltas: async for delta in deltas``.

        Leaving the block early withdraws the request.
        """
        request = await self._build(prompt, prompt_token_ids, audio, sampling, priority, request_id)
        async with self._submitted(request, wait=wait) as mailbox:
            yield _Deltas(mailbox, self._text_deltas(), self._stop_ids(request))

    # -- speech ------------------------------------------------------------------------------------------------------

    async def transcribe(
        self,
        audio: AudioSource,
        *,
        request_id: str | None = None,
        wait: bool = True,
        **options: Unpack[TranscribeArguments],
    ) -> Transcript:
        """Transcribes audio of any length.

        Args:
            audio: path, bytes, binary file or mono float array at the model's rate.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait where the queue is full, or raise `Overloaded` at once.
            options: ``language``, ``task``, ``prompt``, ``timestamps``, ``temperature`` and the other fields of
                `TranscribeOptions`.

        Raises:
            InvalidRequest: an argument that cannot work, or audio that cannot be read (`UnsupportedAudio`).
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: a window could not be served.
        """
        transcription = await self._transcription(audio, TranscribeOptions(**options), request_id, wait=wait)
        return await transcription.transcript()

    @asynccontextmanager
    async def stream_transcription(
        self,
        audio: AudioSource,
        *,
        request_id: str | None = None,
        wait: bool = True,
        **options: Unpack[TranscribeArguments],
    ) -> AsyncIterator[SegmentStream]:
        """Like `transcribe`, segment by segment: ``async with engine.stream_transcription(...) as segments``."""
        transcription = await self._transcription(audio, TranscribeOptions(**options), request_id, wait=wait)
        await transcription.start()
        yield SegmentStream(transcription)

    async def _transcription(
        self, audio: AudioSource, options: TranscribeOptions, request_id: str | None, *, wait: bool
    ) -> Transcription:
        _, description = self._opened()
        samples = await _load(audio, description.sampling_rate)
        run = partial(self._run, wait=wait)
        return Transcription(samples, options, description, run, request_id=self._new_id(request_id))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _build(
        self,
        prompt: str | None,
        prompt_token_ids: Sequence[int] | None,
        audio: AudioSource | None,
        sampling: SamplingParams | None,
        priority: int,
        request_id: str | None,
    ) -> Request:
        _, description = self._opened()
        sampling = sampling or SamplingParams()
        token_ids = _prompt_tokens(description, prompt, prompt_token_ids)
        check_integer("priority", priority)
        _check_token_ids(description, "prompt_token_ids", token_ids)
        _check_token_ids(description, "stop_token_ids", sampling.stop_token_ids)
        max_tokens = _resolve_max_tokens(description, len(token_ids), sampling)
        return Request(
            id=self._new_id(request_id),
            prompt_token_ids=token_ids,
            items=(await _audio_item(description, audio),),
            sampling=sampling,
            rules=LogitRules(
                suppress=description.suppress_token_ids, begin_suppress=description.begin_suppress_token_ids
            ),
            max_tokens=max_tokens,
            priority=priority,
        )

    def _new_id(self, name: str | None) -> str:
        """Unique in this engine, whatever names its users give."""
        return f"{name or 'request'}#{next(self._numbers)}"

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def _submitted(self, request: Request, *, wait: bool) -> AsyncIterator[Mailbox]:
        """Admits and submits ``request``; on the way out withdraws what has not ended. No await between the halves of a
        state change: from admission on, everything is undone by the ``finally``."""
        supervisor, _ = self._opened()
        await self._admit(wait=wait)
        try:
            mailbox = Mailbox()
            supervisor.submit(request, mailbox)
            try:
                yield mailbox
            finally:
                if not mailbox.ended:
                    supervisor.abort(request.id)
        finally:
            self._admission.release()

    @trio.lowlevel.enable_ki_protection
    async def _admit(self, *, wait: bool) -> None:
        if wait:
            try:
                await self._admission.acquire()
            except trio.Cancelled as cancelled:
                cancelled.__traceback__ = None  # see `Mailbox.__anext__`
                raise
            return
        try:
            self._admission.acquire_nowait()
        except trio.WouldBlock:
            raise Overloaded(
                f"{self._config.max_pending} requests are pending already, the most that are allowed; wait "
                f"(wait=True), retry later, or raise EngineConfig(max_pending=...)"
            ) from None

    async def _run(self, request: Request, *, wait: bool) -> Generated:
        """Runs ``request`` to its end."""
        drawn: list[Drawn] = []
        async with self._submitted(request, wait=wait) as mailbox:
            async for part in mailbox:
                drawn.append(part)  # noqa: PERF401  (a comprehension's frame would hide in tracebacks)
        assert mailbox.finish_reason is not None, "a request ended without a reason"
        token_ids = [part.token_id for part in drawn if part.token_id is not None]
        if token_ids and token_ids[-1] in self._stop_ids(request):
            token_ids.pop()
        return Generated(
            token_ids=tuple(token_ids),
            logprobs=tuple(part.logprob for part in drawn if part.token_id is not None),
            finish_reason=mailbox.finish_reason,
            probe=next((part.probe for part in drawn if part.probe is not None), None),
        )

    def _completion(self, request: Request, generated: Generated) -> Completion:
        special = self._special_ids()
        text_ids = [token for token in generated.token_ids if token not in special]
        return Completion(
            text=str(self.model.tokenizer.decode(text_ids, skip_special_tokens=True)),
            token_ids=generated.token_ids,
            finish_reason=generated.finish_reason,
            logprobs=generated.logprobs[: len(generated.token_ids)],
            usage=Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=len(generated.logprobs)),
        )

    def _stop_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end the request; they are not part of its output."""
        stops = frozenset(request.sampling.stop_token_ids)
        return stops if request.sampling.ignore_eos else stops | {*self.model.eos_token_ids}

    def _text_deltas(self) -> TextDeltas:
        return TextDeltas(self.model.tokenizer, self._special_ids())

    def _special_ids(self) -> frozenset[int]:
        """Timestamps and special tokens: part of the tokens, not of the text."""
        description = self.model
        whisper = description.whisper
        first = description.vocabulary_size if whisper is None else whisper.start_id
        return frozenset({*description.eos_token_ids, *range(first, description.vocabulary_size)})


class _Deltas:
    """Async iterator of `Delta` over one request."""

    def __init__(self, mailbox: Mailbox, texts: TextDeltas, stop_ids: frozenset[int]) -> None:
        self._mailbox = mailbox
        self._texts = texts
        self._stop_ids = stop_ids

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._mailbox.ended:
            raise StopAsyncIteration
        async for drawn in self._mailbox:
            if drawn.token_id is not None and drawn.token_id not in self._stop_ids:
                return self._texts.add(drawn.token_id)
        rest = self._texts.rest()
        if not rest:
            raise StopAsyncIteration
        return Delta(text=rest, token_ids=())


class SegmentStream:
    """Async iterator of `Segment`; ``language``, ``language_probability`` and ``duration`` are known from the start."""

    def __init__(self, transcription: Transcription) -> None:
        self._transcription = transcription
        self._pending: list[Segment] = []

    @property
    def language(self) -> str | None:
        """The code of the spoken language."""
        return self._transcription.language

    @property
    def language_probability(self) -> float | None:
        """The model's certainty, 0 to 1; ``None`` where the language was given."""
        return self._transcription.language_probability

    @property
    def duration(self) -> float:
        """Seconds of the audio."""
        return self._transcription.duration

    @property
    def position(self) -> float:
        """Seconds that are done."""
        return self._transcription.position

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        while not self._pending:
            segments = await self._transcription.next_window()
            if segments is None:
                raise StopAsyncIteration
            self._pending = segments
        return self._pending.pop(0)


# -- checks of what callers give -------------------------------------------------------------------------------------


def _require_trio() -> None:
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "no event loop"
    if library != "trio":
        raise EngineStateError(
            f"the engine was entered under {library}; allowed: trio, and anyio on trio (trio.run(...), "
            f"anyio.run(..., backend='trio'))"
        )


def _prompt_tokens(
    description: ModelDescription, prompt: str | None, prompt_token_ids: Sequence[int] | None
) -> tuple[int, ...]:
    if (prompt is None) == (prompt_token_ids is None):
        raise InvalidRequest("give exactly one of prompt and prompt_token_ids")
    if prompt_token_ids is None:
        token_ids = tuple(description.tokenizer.encode(prompt, add_special_tokens=False))
    else:
        token_ids = tuple(prompt_token_ids)
    if not token_ids:
        raise InvalidRequest(
            "the prompt has no tokens; allowed: 1 or more (Whisper's begin with <|startoftranscript|>)"
        )
    return token_ids


def _check_token_ids(description: ModelDescription, name: str, token_ids: Sequence[int]) -> None:
    size = description.vocabulary_size
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
            raise InvalidRequest(
                f"{name} holds {token_id!r}; allowed: integers from 0 to {size - 1}, the model's vocabulary"
            )


def _resolve_max_tokens(description: ModelDescription, prompt_length: int, sampling: SamplingParams) -> int:
    most = description.max_positions - prompt_length
    if most < 1:
        raise RequestTooLarge(
            f"a prompt of {prompt_length} tokens leaves no room to generate; allowed: up to "
            f"{description.max_positions - 1} tokens, the model has {description.max_positions} positions"
        )
    if sampling.max_tokens is not None and sampling.max_tokens > most:
        raise RequestTooLarge(
            f"max_tokens={sampling.max_tokens} after a prompt of {prompt_length} tokens; allowed: up to {most}, the "
            f"model has {description.max_positions} positions; leave max_tokens out to use them all"
        )
    return most if sampling.max_tokens is None else sampling.max_tokens


async def _load(audio: AudioSource, sampling_rate: int) -> Samples:
    """`load_audio` in a worker thread, since it reads files and decodes; a short array needs neither."""
    if isinstance(audio, np.ndarray) and audio.size <= _INLINE_SAMPLES:
        return load_audio(audio, sampling_rate=sampling_rate)
    return await trio.to_thread.run_sync(partial(load_audio, audio, sampling_rate=sampling_rate))


async def _audio_item(description: ModelDescription, audio: AudioSource | None) -> EncoderItem:
    if audio is None:
        raise InvalidRequest(f"{description.architecture} reads audio; give audio=...")
    samples = await _load(audio, description.sampling_rate)
    if len(samples) > description.window_samples:
        raise RequestTooLarge(
            f"audio of {len(samples) / description.sampling_rate:.2f} s; allowed: one window of the model, "
            f"{description.window_samples / description.sampling_rate:g} s; engine.transcribe takes audio of any length"
        )
    return EncoderItem(
        key=content_key(samples, description.processor_identity),
        payload=samples,
        embeddings=description.encoder_embeddings,
        size=description.encoder_bytes,
    )

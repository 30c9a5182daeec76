"""`TrioEngine`: the engine itself, for the trio loop that it is entered in. `Engine` finds it one and speaks for it."""

from __future__ import annotations

import enum
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import trio
from attrs import evolve, field, frozen

from ..actors.supervisor import EngineStatistics, Supervisor
from ..actors.worker import Worker
from ..core.config import EngineConfig
from ..core.errors import EngineStateError, InvalidRequest, Overloaded, RequestTooLarge
from ..core.model import Executor, ModelDescription
from ..core.plan import Drawn
from ..core.request import EncoderItem, LogitRules, Request, SamplingParams, check_integer
from ..models.structure import fault_of
from .alternatives import run_together
from .audio import AudioSource, Samples, content_key, load_audio
from .outputs import TextDeltas, completion_of, output_of
from .results import Completion, Delta, Transcript
from .streams import Deltas, Mailbox, Segments, SegmentStream
from .transcription import Generated, TranscribeOptions, Transcription

_INLINE_SAMPLES = 1_000_000  # checking more would hold the loop up for over a millisecond


class State(enum.Enum):
    """Where an engine is in its life."""

    NEW = "not entered yet"
    OPENING = "still opening"
    OPEN = "open"
    CLOSED = "closed"


@frozen(kw_only=True, eq=False)
class Query:
    """What one call of `Engine.generate` or `Engine.stream` asks for; see there."""

    prompt: str | None
    prompt_token_ids: Sequence[int] | None
    audio: AudioSource | None = field(repr=False)
    sampling: SamplingParams | None
    priority: int
    request_id: str | None


class TrioEngine:
    """Everything that `Engine` promises, for tasks of one trio loop. Making one needs no loop."""

    def __init__(
        self, config: EngineConfig, make_executor: Callable[[], Executor], make_worker: Callable[[], Worker]
    ) -> None:
        self.config = config
        self.state = State.NEW
        self.supervisor: Supervisor | None = None  # once it is entered
        self._make_executor = make_executor
        self._make_worker = make_worker
        self._description: ModelDescription | None = None
        self._block: AbstractAsyncContextManager[ModelDescription] | None = None
        self._admission = trio.Semaphore(config.max_pending)
        self._numbers = itertools.count()

    # -- the block ---------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        assert self.state is State.NEW, "entered twice"
        await trio.lowlevel.checkpoint_if_cancelled()
        self.state = State.OPENING
        self.supervisor = Supervisor(self.config, self._make_executor, self._make_worker())
        self._block = self.supervisor.running()
        try:
            self._description = await self._block.__aenter__()
        except BaseException:
            self.state = State.CLOSED
            raise
        self.state = State.OPEN
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
            self.state = State.CLOSED
            del error, traceback

    async def aclose(self, drain: float) -> None:
        """See `Engine.aclose`."""
        if self.state is State.CLOSED:
            return
        supervisor, _ = self._opened()
        await supervisor.stop(drain)
        self.state = State.CLOSED

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._opened()[0].sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._opened()[0].wake()

    @property
    def model(self) -> ModelDescription:
        """See `Engine.model`."""
        return self._opened()[1]

    @property
    def pending(self) -> int:
        """Requests that hold a permit of ``max_pending``."""
        return self.config.max_pending - self._admission.value

    @property
    def waiting(self) -> int:
        """Requests that wait for such a permit."""
        return self._admission.statistics().tasks_waiting

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return self._opened()[0].statistics()

    def not_open(self) -> EngineStateError:
        """The error of those who ask when it is not open, or no longer."""
        if self.state in (State.NEW, State.OPENING):
            return EngineStateError(
                f"this engine is {self.state.value}; use it inside its block: async with Engine(...) as engine"
            )
        return EngineStateError(
            "this engine is closed: its block has ended, aclose() was called or it failed; open a new one: "
            "async with Engine(...) as engine"
        )

    def _opened(self) -> tuple[Supervisor, ModelDescription]:
        if self.state is not State.OPEN or self.supervisor is None or self._description is None:
            raise self.not_open()
        return self.supervisor, self._description

    # -- token level -------------------------------------------------------------------------------------------------

    async def generate(self, query: Query, *, wait: bool) -> Completion:
        """See `Engine.generate`."""
        request = await self._build(query)
        count = request.sampling.n
        if count == 1:
            return await self._complete(request, _nothing, wait=wait)
        requests = [
            evolve(request, id=self._new_id(query.request_id), sampling=request.sampling.sibling(index))
            for index in range(count)
        ]
        first, *others = await run_together([partial(self._complete, one, wait=wait) for one in requests])
        return evolve(first, alternatives=tuple(others))

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection  # a ^C between the body and our exit would skip that
    async def stream(self, query: Query, *, wait: bool) -> AsyncIterator[AsyncIterator[Delta]]:
        """See `Engine.stream`."""
        request = await self._build(query)
        if request.sampling.n > 1:
            raise InvalidRequest(f"n={request.sampling.n} of a stream; allowed: 1, or engine.generate(...) for several")
        async with self._deltas(request, wait=wait, texts=self._text_deltas()) as deltas:
            yield deltas

    # -- speech ------------------------------------------------------------------------------------------------------

    async def transcribe(
        self, audio: AudioSource, options: TranscribeOptions, request_id: str | None, *, wait: bool
    ) -> Transcript:
        """See `Engine.transcribe`."""
        transcription = await self._transcription(audio, options, request_id, wait=wait)
        return await transcription.transcript()

    @asynccontextmanager
    async def stream_transcription(
        self, audio: AudioSource, options: TranscribeOptions, request_id: str | None, *, wait: bool
    ) -> AsyncIterator[SegmentStream]:
        """See `Engine.stream_transcription`."""
        transcription = await self._transcription(audio, options, request_id, wait=wait)
        await transcription.start()
        segments = Segments(transcription)
        yield SegmentStream(segments, segments.progress)

    async def _transcription(
        self, audio: AudioSource, options: TranscribeOptions, request_id: str | None, *, wait: bool
    ) -> Transcription:
        _, description = self._opened()
        samples = await _load(audio, description.sampling_rate)
        run = partial(self._run, wait=wait)
        return Transcription(samples, options, description, run, request_id=self._new_id(request_id))

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _build(self, query: Query) -> Request:
        _, description = self._opened()
        sampling = _sampling(query.sampling)
        token_ids = _prompt_tokens(description, query.prompt, query.prompt_token_ids)
        check_integer("priority", query.priority)
        _check_token_ids(description, "prompt_token_ids", token_ids)
        _check_token_ids(description, "stop_token_ids", sampling.stop_token_ids)
        _check_token_ids(description, "logit_bias", [token for token, _ in sampling.logit_bias])
        max_tokens = _resolve_max_tokens(description, len(token_ids), sampling)
        return Request(
            id=self._new_id(query.request_id),
            prompt_token_ids=token_ids,
            items=(await _audio_item(description, query.audio),),
            sampling=sampling,
            rules=await _rules(description, sampling),
            max_tokens=max_tokens,
            priority=query.priority,
        )

    def _new_id(self, name: str | None) -> str:
        """Unique in this engine, whatever names its users give."""
        return f"{name or 'request'}#{next(self._numbers)}"

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def _submitted(
        self, request: Request, *, wait: bool, on_token: Callable[[Drawn], object] | None = None
    ) -> AsyncIterator[Mailbox]:
        """Admits and submits ``request``; on the way out withdraws what has not ended. No await between the halves of a
        state change. The request's place is free again when it has ended, whether or not anybody reads that."""
        supervisor, _ = self._opened()
        await self._admit(wait=wait)
        mailbox = Mailbox(self._admission.release, on_token)
        try:
            supervisor.submit(request, mailbox)
        except BaseException:
            self._admission.release()
            raise
        try:
            yield mailbox
        finally:
            if not mailbox.ended:
                supervisor.abort(request.id)

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
                f"{self.config.max_pending} requests are pending already, the most that are allowed; wait "
                f"(wait=True), retry later, or raise EngineConfig(max_pending=...)"
            ) from None

    @trio.lowlevel.enable_ki_protection
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

    @asynccontextmanager
    @trio.lowlevel.enable_ki_protection
    async def _deltas(self, request: Request, *, wait: bool, texts: TextDeltas | None) -> AsyncIterator[Deltas]:
        """`_submitted`, read as deltas; without ``texts`` these have none."""
        supervisor, description = self._opened()
        withdraw = partial(supervisor.abort, request.id)
        output = output_of(request, texts, frozenset(description.eos_token_ids), withdraw)
        on_token = output.take if output.eager else None
        async with self._submitted(request, wait=wait, on_token=on_token) as mailbox:
            yield Deltas(mailbox, output)

    @trio.lowlevel.enable_ki_protection
    async def _complete(self, request: Request, begun: Callable[[], object], *, wait: bool) -> Completion:
        """Runs ``request`` to its end; calls ``begun`` when it has its first token."""
        texts = self._text_deltas() if request.sampling.stop else None
        parts: list[Delta] = []
        async with self._deltas(request, wait=wait, texts=texts) as deltas:
            async for delta in deltas:
                parts.append(delta)
                begun()
        return completion_of(parts, self._decode if texts is None else None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        special = self._special_ids()
        text_ids = [token for token in token_ids if token not in special]
        return str(self.model.tokenizer.decode(text_ids, skip_special_tokens=True))

    def _text_deltas(self) -> TextDeltas:
        return TextDeltas(self.model.tokenizer, self._special_ids())

    def _stop_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end the request; they are not part of its output."""
        stops = frozenset(request.sampling.stop_token_ids)
        return stops if request.sampling.ignore_eos else stops | {*self.model.eos_token_ids}

    def _special_ids(self) -> frozenset[int]:
        """Timestamps and special tokens: part of the tokens, not of the text."""
        description = self.model
        whisper = description.whisper
        first = description.vocabulary_size if whisper is None else whisper.start_id
        return frozenset({*description.eos_token_ids, *range(first, description.vocabulary_size)})


def _nothing() -> None:
    """Nobody waits for its first token."""


# -- checks of what callers give -------------------------------------------------------------------------------------


def _prompt_tokens(
    description: ModelDescription, prompt: str | None, prompt_token_ids: Sequence[int] | None
) -> tuple[int, ...]:
    if (prompt is None) == (prompt_token_ids is None):
        raise InvalidRequest("give exactly one of prompt and prompt_token_ids")
    _check_kind("prompt", prompt, str, "a text, or use prompt_token_ids=[...]")
    _check_kind("prompt_token_ids", prompt_token_ids, Iterable, "a sequence of integers")
    if prompt_token_ids is None:
        token_ids = tuple(description.tokenizer.encode(prompt, add_special_tokens=False))
    else:
        token_ids = tuple(prompt_token_ids)
    if not token_ids:
        raise InvalidRequest(
            "the prompt has no tokens; allowed: 1 or more (Whisper's begin with <|startoftranscript|>)"
        )
    return token_ids


def _sampling(sampling: SamplingParams | None) -> SamplingParams:
    _check_kind("sampling", sampling, SamplingParams, "SamplingParams(...), or leave it out for greedy sampling")
    return sampling or SamplingParams()


def _check_kind(name: str, value: object, kind: type, allowed: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{name}={value!r}; allowed: {allowed}")


def _check_token_ids(description: ModelDescription, name: str, token_ids: Sequence[int]) -> None:
    size = description.vocabulary_size
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
            raise InvalidRequest(
                f"{name} holds {token_id!r}; allowed: integers from 0 to {size - 1}, the model's vocabulary"
            )


async def _rules(description: ModelDescription, sampling: SamplingParams) -> LogitRules:
    """The checkpoint's own. With a structure they give way to it, since it may ask for what they suppress, brackets and
    quotation marks for one; timestamps stay out of it, as they are no text."""
    if sampling.structure is None:
        return LogitRules(suppress=description.suppress_token_ids, begin_suppress=description.begin_suppress_token_ids)
    if fault := await trio.to_thread.run_sync(fault_of, sampling.structure):
        raise InvalidRequest(fault)
    whisper = description.whisper
    first = description.vocabulary_size if whisper is None else whisper.timestamp_begin_id
    return LogitRules(suppress=tuple(range(first, description.vocabulary_size)))


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

"""`Engine`: the users' class, on every host. The engine itself is in `triolet.api.hosts.trio_engine`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Never, Self, Unpack

import trio
from attrs import fields_dict

from ..actors.gpu_runner import torch_executor
from ..actors.statistics import EngineStatistics
from ..actors.supervisor import Supervisor
from ..actors.worker import ThreadWorker, Worker
from ..core.checks import number, unknown_name
from ..core.config import EngineConfig
from ..core.errors import EngineStateError, InvalidRequest
from ..core.executor import Executor
from ..core.model import ModelDescription
from ..models.memory.allocator import trim
from .arguments import GenerateArguments, LiveArguments, TranscribeArguments
from .hosts.current import Host, current_host
from .hosts.portal_stream import PortalDeltas, PortalLive, PortalSegments
from .hosts.state import State
from .hosts.trio_engine import TrioEngine
from .inputs.audio import AudioSource
from .inputs.prompts import read_query
from .inputs.sources import with_rate
from .inputs.vectors import Vectors
from .live.options import read_live_options
from .live.session import LiveSession
from .outputs.results import Completion, Transcript
from .outputs.streams import DeltaStream, StreamBlock
from .speech.options import read_options
from .speech.segments import SegmentStream

_DRAIN = number(0, math.inf, "; 0 aborts at once")


class Engine:
    """An inference engine that lives as long as its ``async with`` block.

    ::

        async with Engine("path-or-hub-id") as engine:
            transcript = await engine.transcribe("speech.wav")

    On trio, and on anyio over trio, the engine runs in the caller's loop. On asyncio, and on anyio over asyncio, its
    trio loop runs in a thread of its own, and serves the event loop that entered the block. All else is the same.

    Many tasks may call at once; their requests are batched. Cancelling a task aborts its request. When the block ends,
    however it ends, the engine drains or aborts running requests, gives every page and cache entry back and releases
    the device, in that order. A drain lasts for requests: a transcription makes a new request for each of its windows,
    which is refused once the block has ended.

    In a notebook `open` and `aclose` stand for the block. `triolet.SyncEngine` is for programs without an event loop.

    Args:
        model: a folder with a transformers checkpoint, or a hub id.
        config: settings; see `EngineConfig`.

    Raises (on making one):
        InvalidRequest: ``model`` or ``config`` is of another type, or there is another keyword.

    Raises (on entering):
        CheckpointError: no checkpoint there, or one that cannot be loaded.
        EngineStateError: entered twice, or in no task of trio or asyncio.

    Raises (on leaving, beside the block's own error):
        RunnerCrashed: an actor failed; the block was cancelled.
        EngineTeardownError: something could not be given back in time, or a release failed.
        InvariantViolation: with ``EngineConfig(verify=True)``, the engine broke one of its promises.

    Raises (on every use):
        EngineStateError: outside of its block, or outside of the event loop that entered it.

    Attributes:
        inside: the engine proper, for tests; on asyncio it belongs to another thread while the block lasts.
    """

    inside: TrioEngine
    _name: str
    _host: Host | None

    def __init__(self, model: str | Path, *, config: EngineConfig | None = None, **unknown: Never) -> None:
        for name in unknown:
            raise unknown_keyword(name, "Engine")
        if not isinstance(model, str | Path):
            raise InvalidRequest(
                f"model={model!r}; allowed: a folder with a checkpoint, or a hub id, as a text or a Path"
            )
        config = _settings(config)
        self._name = str(model)
        backend = partial(_supervisor, config, partial(torch_executor, model, config), ThreadWorker)
        self.inside = TrioEngine(config, backend, trim)
        self._host = None

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
        engine._name = "parts of its maker's"
        config = _settings(config)
        engine.inside = TrioEngine(config, partial(_supervisor, config, make_executor, make_worker))
        engine._host = None
        return engine

    def __repr__(self) -> str:
        return f"<Engine of {self._name} on {self.inside.device}: {self.inside.state.value}>"

    def _repr_html_(self) -> str | None:
        return shown(self, self.statistics)

    # -- the block ---------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> Self:
        await self._enter(current_host)
        return self

    async def open(self) -> None:
        """Opens the engine without a block, for notebooks on asyncio: the engine is opened in one cell, used in others,
        and ends with `aclose`. An engine that fails meanwhile cancels nobody: calls raise what ended it, and so does
        `aclose`. An engine that is thrown away, and the interpreter's exit, end in order.

        Raises:
            CheckpointError: no checkpoint there, or one that cannot be loaded.
            EngineStateError: opened twice, in no task of asyncio, or on trio.
        """
        await self._enter(partial(current_host, lasting=True))

    @trio.lowlevel.enable_ki_protection
    async def _enter(self, make_host: Callable[[TrioEngine], Host]) -> None:
        """Opens the engine on the host that ``make_host`` makes. `SyncEngine` calls it, too."""
        if self._host is not None:
            state = State.OPENING if self.inside.state is State.NEW else self.inside.state
            raise EngineStateError(f"this engine is {state.value}; an engine is entered once: make a new one")
        self._host = make_host(self.inside)
        try:
            await self._host.__aenter__()
        except BaseException:
            if self.inside.state is State.NEW:  # cancelled before it began
                self._host = None
            raise

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._host is not None, "left before entered"
        try:
            return await self._host.__aexit__(kind, error, traceback)
        finally:
            del error, traceback

    async def aclose(self, drain: float | None = None) -> None:
        """Stops the engine before its block ends; returns when the device is released. Running requests have ``drain``
        seconds (default: ``EngineConfig.drain_seconds``; 0 aborts at once).

        Raises (where `open` has opened the engine; else the block raises it):
            RunnerCrashed, EngineTeardownError, InvariantViolation: what ended the engine, told once; see `Engine`.
        """
        seconds = self.inside.config.drain_seconds if drain is None else _DRAIN.of("drain", drain)
        async with AsyncExitStack() as stack:
            if self._host is not None and self._host.lasting and self.inside.state is not State.OPENING:
                stack.push_async_exit(self._host.__aexit__)
            try:
                if self.inside.state is not State.CLOSED:
                    await self._reached().call(partial(self.inside.aclose, seconds))
            except EngineStateError:
                if self.inside.state is not State.CLOSED:  # else it has ended meanwhile
                    raise

    async def sleep(self) -> None:
        """Gives the device back, until `wake`; returns when that is done. The weights are parked in the host's memory
        or dropped (``EngineConfig.sleep_keeps_weights``). Running requests stop within a step and go on after `wake`
        where they were. New requests wait as well, or are refused (``EngineConfig.while_asleep``). A cancelled caller
        no longer waits; the order stands. A release that fails ends the engine, since the device's state is unknown.

        Raises:
            EngineClosed: the engine ends meanwhile.
            EngineError: the device could not be given back, for want of room for the weights say; it is still held.
            EngineStateError: not in its block, or woken before it slept.
        """
        await self._reached().call(self.inside.sleep)

    async def wake(self) -> None:
        """Takes the device again after `sleep`; returns when that is done.

        Raises:
            EngineAsleep: the device could not be taken, for want of memory say (the cause is attached). The engine
                sleeps on.
            EngineClosed: the engine ends meanwhile.
            EngineStateError: not in its block, or put to sleep before it woke.
        """
        await self._reached().call(self.inside.wake)

    @property
    def model(self) -> ModelDescription:
        """The loaded model's limits, vocabulary and tokenizer."""
        return self.inside.model

    def statistics(self) -> EngineStatistics:
        """A frozen snapshot: the queue and the pages, the encoder cache, the device's bytes by owner."""
        return self._reached().read(self.inside.statistics)

    def _reached(self) -> Host:
        """The host, while the engine is open or opening. The host itself checks the event loop."""
        if self._host is None or self.inside.state is State.CLOSED:
            raise self.inside.not_open()
        return self._host

    # -- token level -------------------------------------------------------------------------------------------------

    async def generate(self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]) -> Completion:
        """Runs one sequence to its end.

        Args:
            prompt: the prompt as text; special tokens are spelled as in the vocabulary (``<|startoftranscript|>``), and
                so is the checkpoint's own placeholder for an image or audio (``<image>``), once for each.
            prompt_token_ids: the prompt as tokens, instead of ``prompt``.
            messages: a conversation, instead of ``prompt``: ``{"role": ..., "content": text or list of parts}``,
                rendered by the checkpoint's chat template. Parts ``{"type": "image", "image": ...}`` hold images, and
                ``{"type": "audio", "audio": ...}`` audio. Messages of the assistant may have ``tool_calls`` in the
                shape of OpenAI's, their arguments as JSON text or as mappings, and the role ``"tool"`` has results.
            tools: functions that the model may call, in the shape of OpenAI's: ``{"type": "function", "function":
                {"name": ..., "description": ..., "parameters": JSON schema}}``. The chat template tells the model; the
                calls are in the text, where `ToolFormat` finds them.
            template_options: further variables of the chat template, as ``{"enable_thinking": False}``.
            images: path, bytes, binary file, PIL image or uint8 array (height, width, 3) each, in the order of their
                placeholders.
            audio: path, bytes, binary file or mono float array at the model's rate. Whisper reads one, of at most one
                window; decoders that read audio take a list, in the order of their placeholders.
            sampling: how tokens are sampled; greedy by default.
            max_tokens, temperature, stop and the other fields of `SamplingParams`: instead of ``sampling``.
            priority: -100 to 100, the smallest runs first, wherever requests wait: at the door, for encoder outputs and
                for a place. One level is worth 1,024 arrivals, so that no request waits for ever. A waiting request
                preempts running ones only where it lacks nothing but room (a place, pages or a cross slot) and its
                priority is strictly more urgent than theirs. The request that comes last gives way, keeps its tokens,
                and runs again when there is room.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait where the queue is full, in the order of `priority` and arrival, or raise `Overloaded` at once.
                A request that does not wait never overtakes one that does.

        Raises:
            InvalidRequest: an argument that cannot work; `UnsupportedAudio`, `UnsupportedImage` and `RequestTooLarge`
                among them.
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: the request could not be served.
        """
        query = read_query(prompt, arguments)
        return await self._reached().call(partial(self.inside.generate, query))

    def stream(
        self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """Like `generate`, token by token: ``async with engine.stream(...) as deltas: async for delta in deltas``.

        Leaving the block early aborts the request. ``deltas.timings`` tell at the end how long each stage took.
        """
        stream = partial(self.inside.stream, read_query(prompt, arguments))
        return StreamBlock(self._reached().stream(PortalDeltas, stream), "stream")

    # -- vectors -----------------------------------------------------------------------------------------------------

    async def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        priority: int = 0,
        wait: bool = True,
    ) -> Vectors:
        """Embeddings of texts, by an embedding model.

        Args:
            texts: one text or many; each is a request of its own.
            pooling: ``"mean"``, ``"cls"`` or ``"last"``; by default as the checkpoint says (sentence-transformers'
                files), or else the mean for encoders and the last token for decoders.
            normalize: divide each vector by its Euclidean length; by default as the checkpoint says.
            priority: the smallest runs first, see `generate`.
            wait: wait where the queue is full, or raise `Overloaded` at once.

        Returns:
            float32 [texts, width].

        Raises:
            InvalidRequest: the model gives no embeddings, or an argument cannot work (`RequestTooLarge` among them).
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: a text could not be served.
        """
        ask = partial(self.inside.embed, texts, pooling, normalize, priority, wait=wait)
        return await self._reached().call(ask)

    async def score(
        self, query: str, documents: str | Sequence[str], *, priority: int = 0, wait: bool = True
    ) -> tuple[float, ...]:
        """Scores how well each document answers ``query``: the raw score of a reranker (a sequence classifier with one
        label that reads both texts together), larger is better. Arguments and errors are those of `embed`."""
        return await self._reached().call(partial(self.inside.score, query, documents, priority, wait=wait))

    async def classify(
        self, texts: str | Sequence[str], *, priority: int = 0, wait: bool = True
    ) -> tuple[dict[str, float], ...]:
        """The probability of each label for each text, by a sequence classifier (softmax of its scores). Arguments and
        errors are those of `embed`."""
        return await self._reached().call(partial(self.inside.classify, texts, priority, wait=wait))

    # -- speech ------------------------------------------------------------------------------------------------------

    async def transcribe(
        self,
        audio: AudioSource,
        *,
        sampling_rate: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
        **options: Unpack[TranscribeArguments],
    ) -> Transcript:
        """Transcribes audio of any length.

        Args:
            audio: path, bytes, binary file, or a mono array: bare at the model's rate (16,000 Hz for Whisper) or at
                ``sampling_rate``, or with its rate, as ``(samples, rate)`` or ``{"array": ..., "sampling_rate": ...}``.
                Audio of hours is read as a stream.
            sampling_rate: of a bare array, in Hz.
            priority: of all windows; the smallest runs first, see `generate`.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait where the queue is full, or raise `Overloaded` at once.
            options: ``language``, ``task``, ``initial_prompt``, ``timestamps``, ``temperature`` and the other fields of
                `TranscribeOptions`.

        Raises:
            InvalidRequest: an argument that cannot work, or audio that cannot be read (`UnsupportedAudio`).
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: a window could not be served.
        """
        resolved = read_options(options)
        source = with_rate(audio, sampling_rate)
        transcribe = partial(self.inside.transcribe, source, resolved, priority, request_id, wait=wait)
        return await self._reached().call(transcribe)

    def stream_transcription(
        self,
        audio: AudioSource,
        *,
        sampling_rate: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
        **options: Unpack[TranscribeArguments],
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """Like `transcribe`, segment by segment: ``async with engine.stream_transcription(...) as segments``."""
        resolved = read_options(options)
        source = with_rate(audio, sampling_rate)
        stream = partial(self.inside.stream_transcription, source, resolved, priority, request_id, wait=wait)
        return StreamBlock(self._reached().stream(PortalSegments, stream), "stream_transcription")

    def live(
        self,
        *,
        rate: int = 16_000,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
        **options: Unpack[LiveArguments],
    ) -> AbstractAsyncContextManager[LiveSession]:
        """Transcribes audio while somebody speaks.

        ::

            async with engine.live(rate=16000) as session:
                ...  # in one task: await session.feed(chunk), at the end await session.finish()
                async for update in session:  # in another
                    print(update.stable, end="")

        Leaving the block ends the session: what still runs is withdrawn, and text that was not read is lost. To have
        all of it, iterate behind `finish`.

        Args:
            rate: of the chunks, in Hz, 8,000 to 768,000; another one than the model's is resampled.
            priority: of all requests of the session; the smallest runs first, see `generate`.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait where the queue is full, or fail with `Overloaded`.
            options: ``step``, ``endpoint_silence`` and the other fields of `LiveOptions`; ``language``, ``task``,
                ``initial_prompt`` and others of `TranscribeOptions`.

        Raises:
            InvalidRequest: an option that cannot work, with this model or any. On `LiveSession.feed` and iteration see
                there.
        """
        resolved = read_live_options({"rate": rate, **options})
        live = partial(self.inside.live, resolved, priority, request_id, wait=wait)
        return StreamBlock(self._reached().stream(PortalLive, live), "live")


def shown(engine: object, statistics: Callable[[], EngineStatistics]) -> str | None:
    """The table that a notebook shows of an engine with statistics. Of an engine without, it shows the repr."""
    try:
        return statistics().table(repr(engine))
    except EngineStateError:
        return None


def unknown_keyword(name: str, owner: str) -> InvalidRequest:
    """The error for a keyword that `Engine` or another ``owner`` does not have, which may be a setting."""
    settings = {setting: f"config=EngineConfig({setting}=...)" for setting in fields_dict(EngineConfig)}
    return unknown_name(name, ("model", "config"), settings, owner=owner)


def _settings(config: object) -> EngineConfig:
    if config is None:
        return EngineConfig()
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"config={config!r}; allowed: EngineConfig(...), or leave it out")
    return config


def _supervisor(
    config: EngineConfig, make_executor: Callable[[], Executor], make_worker: Callable[[], Worker]
) -> Supervisor:
    return Supervisor(config, make_executor, make_worker())

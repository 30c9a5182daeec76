"""`Engine`: the class for users, on every host. The engine itself is in `triolet.api.hosts.trio_engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Never, Self, Unpack

import trio

from ..actors.gpu_runner import torch_executor
from ..actors.statistics import EngineStatistics
from ..actors.worker import ThreadWorker, Worker
from ..core.config import EngineConfig
from ..core.errors import EngineStateError, InvalidRequest, Left
from ..core.executor import Executor
from ..core.model import ModelDescription
from ..models.memory.allocator import trim
from .adapting import Adapting
from .arguments import GenerateArguments, LiveArguments, TranscribeArguments, spelled_out
from .hosts.current import Host, current_host
from .hosts.portal_stream import PortalDeltas, PortalLive, PortalSegments
from .hosts.state import State
from .hosts.trio_engine import TrioEngine
from .inputs.audio import AudioSource
from .inputs.prompts import read_query
from .inputs.sources import with_rate, with_track
from .inputs.vectors import Vectors
from .live.options import read_live_options
from .live.session import LiveSession
from .making import DRAIN, settings_of, shown, supervisor, unknown_keyword
from .outputs.results import Completion, Transcript, Turn, Word
from .outputs.streams import DeltaStream, StreamBlock
from .speech.aligning import AlignQuery
from .speech.options import read_options
from .speech.speakers import DiarizeQuery
from .speech.transcription import SegmentStream


@spelled_out
class Engine(Adapting):
    """An inference engine that lives as long as its ``async with`` block.

    ::

        async with Engine("path-or-hub-id") as engine:
            transcript = await engine.transcribe("speech.wav")

    On trio, and on anyio over trio, the engine runs in the caller's loop. On asyncio, and on anyio over asyncio, the
    engine runs a trio loop in its own thread, and serves the event loop in which the block was entered. There is no
    other difference.

    Many tasks may call at once; their requests are batched. Cancelling a task aborts its request. When the block ends,
    for any reason, the engine first drains or aborts the running requests, then frees every page and cache entry, and
    then releases the device. From the end of the block on, new requests are refused. So a transcription, which makes a
    request for each window, fails at its next window.

    In a notebook use `open` and `aclose` in place of the block. `triolet.SyncEngine` is for programs without an event
    loop.

    Args:
        model: a folder with a transformers checkpoint, or a hub id.
        config: settings; see `EngineConfig`.

    Raises (on making one):
        InvalidRequest: ``model`` or ``config`` has another type, or a keyword is unknown.

    Raises (on entering):
        CheckpointError: there is no checkpoint, or it cannot be loaded.
        EngineStateError: the engine is entered twice, or not in a task of trio or asyncio.

    Raises (on leaving, in addition to the block's own error):
        RunnerCrashed: an actor failed; the block was cancelled.
        EngineTeardownError: something could not be released in time, or a release failed.
        InvariantViolation: with ``EngineConfig(verify=True)``, the engine broke one of its promises.

    Raises (on every use):
        EngineStateError: the engine is used outside of its block, or outside of the event loop in which it was entered.

    Attributes:
        inside: the `TrioEngine`, for tests; on asyncio it belongs to another thread while the block lasts.
    """

    inside: TrioEngine
    _name: str
    _host: Host | None

    def __init__(self, model: str | Path, *, config: EngineConfig | None = None, **unknown: Never) -> None:
        for name in unknown:
            raise unknown_keyword(name, "Engine")
        if not isinstance(model, str | Path):
            raise InvalidRequest(
                f"model={model!r}; allowed: the folder of a checkpoint, or a hub id, as a text or a Path"
            )
        config = settings_of(config)
        self._name = str(model)
        backend = partial(supervisor, config, partial(torch_executor, model, config), ThreadWorker)
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
        """Makes an engine with an executor and a worker of your own, as the simulation in `triolet_testing` does."""
        engine = cls.__new__(cls)
        engine._name = "parts of its maker's"
        config = settings_of(config)
        engine.inside = TrioEngine(config, partial(supervisor, config, make_executor, make_worker))
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

    def __enter__(self) -> Never:
        raise EngineStateError(
            "the engine was entered by a plain with; allowed: async with Engine(...). Without an event loop use "
            "SyncEngine(...)"
        )

    def __exit__(self, *_: object) -> None:
        """Does nothing: Python looks for this method before it calls `__enter__`."""

    async def open(self) -> None:
        """Opens the engine without a block, for notebooks on asyncio: the engine is opened in one cell, used in others,
        and closed with `aclose`. An engine that fails does not cancel any task. Calls raise an error that names the
        failure, and `aclose` raises the failure. If the engine is thrown away, or the interpreter exits, the engine
        still ends in order.

        Raises:
            CheckpointError: there is no checkpoint, or it cannot be loaded.
            EngineStateError: the engine is opened twice, not in a task of asyncio, or on trio.
        """
        await self._enter(partial(current_host, lasting=True))

    async def _enter(self, make_host: Callable[[TrioEngine], Host]) -> None:
        """Opens the engine on the host that ``make_host`` makes. `SyncEngine` calls this method, too."""
        if self._host is not None:
            state = State.OPENING if self.inside.state is State.NEW else self.inside.state
            raise EngineStateError(
                f"this engine is {state.value}, and an engine can be entered only once; make a new engine"
            )
        self._host = make_host(self.inside)
        try:
            await self._host.__aenter__()
        except BaseException:
            if self.inside.state is State.NEW:  # cancelled before it began
                self._host = None
            raise

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *end: *Left) -> bool | None:
        assert self._host is not None, "left before entered"
        return await self._host.__aexit__(*end)

    async def aclose(self, drain: float | None = None) -> None:
        """Stops the engine before its block ends, and returns when the device is released. Running requests have
        ``drain`` seconds to end (default: ``EngineConfig.drain_seconds``; 0 aborts at once).

        Raises (if the engine was opened by `open`; otherwise the block raises these errors):
            RunnerCrashed, EngineTeardownError, InvariantViolation: the error that ended the engine, see `Engine`. It is
                raised once only.
        """
        seconds = self.inside.config.drain_seconds if drain is None else DRAIN.of("drain", drain)
        if self._host is not None and self._host.process.is_forked:
            return
        host = self._host if self.inside.state is not State.OPENING else None
        leave = None if host is None or not host.lasting else host.__aexit__
        try:
            if self.inside.state is not State.CLOSED:
                await self._reached().call(partial(self.inside.aclose, seconds))
        except BaseException as error:
            if not isinstance(error, EngineStateError) or self.inside.state is not State.CLOSED:
                if leave is not None:
                    await leave(type(error), error, error.__traceback__)
                raise  # otherwise the engine has ended meanwhile
        if leave is not None:
            await leave(None, None, None)

    async def sleep(self) -> None:
        """Releases the device until `wake`, and returns when the device is released. The weights are kept in the host's
        memory or dropped (``EngineConfig.sleep_keeps_weights``). Running requests stop within a step, and continue
        after `wake`. New requests wait as well, or are refused (``EngineConfig.while_asleep``). If the caller is
        cancelled, the engine still goes to sleep. A release that fails ends the engine, since the state of the device
        is unknown.

        Raises:
            EngineClosed: the engine ended meanwhile.
            EngineError: the device could not be released, for example because the host has no room for the weights. The
                engine still holds the device.
            EngineStateError: the engine is not in its block, or was woken before it slept.
        """
        await self._reached().call(self.inside.sleep)

    async def wake(self) -> None:
        """Takes the device again after `sleep`, and returns when the engine is awake.

        Raises:
            EngineAsleep: the device could not be taken, for example because memory is short (the cause is attached).
                The engine still sleeps.
            EngineClosed: the engine ended meanwhile.
            EngineStateError: the engine is not in its block, or was put to sleep before it woke.
        """
        await self._reached().call(self.inside.wake)

    @property
    def model(self) -> ModelDescription:
        """The loaded model's limits, vocabulary and tokenizer."""
        return self.inside.model

    def statistics(self) -> EngineStatistics:
        """Returns a frozen snapshot: the queue and the pages, the encoder cache, the device's bytes by owner."""
        return self._reached().read(self.inside.statistics)

    def _reached(self) -> Host:
        """Returns the host while the engine is open or opening. The host checks the event loop."""
        if self._host is None or self.inside.state is State.CLOSED:
            raise self.inside.not_open()
        return self._host

    # -- token level -------------------------------------------------------------------------------------------------

    async def generate(self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]) -> Completion:
        """Runs one sequence to its end.

        Args:
            prompt: the prompt as text. Special tokens are written as in the vocabulary (``<|startoftranscript|>``). The
                prompt has the checkpoint's placeholder (such as ``<image>``) once for each image or audio.
            prompt_token_ids: the prompt as tokens, instead of ``prompt``.
            messages: a conversation, instead of ``prompt``: ``{"role": ..., "content": text or list of parts}``,
                rendered by the checkpoint's chat template. Parts ``{"type": "image", "image": ...}`` hold images, and
                ``{"type": "audio", "audio": ...}`` audio. Messages of the assistant may have ``tool_calls`` in OpenAI's
                format, with arguments as JSON text or as mappings. Messages with the role ``"tool"`` have results.
            tools: functions that the model may call, in OpenAI's format: ``{"type": "function", "function":
                {"name": ..., "description": ..., "parameters": JSON schema}}``. The chat template describes them to the
                model. The model writes calls into its text, where `ToolFormat` finds them.
            template_options: further variables of the chat template, for example ``{"enable_thinking": False}``.
            images: the images in the order of their placeholders, each a path, bytes, a binary file, a PIL image or a
                uint8 array (height, width, 3).
            audio: a path, bytes, a binary file or a mono float array at the model's rate. Whisper reads one audio of at
                most one window. Decoders that read audio accept a list, in the order of the placeholders.
            sampling: the parameters of sampling; greedy by default. The fields of `SamplingParams`, such as
                ``max_tokens``, ``temperature`` and ``stop``, may be keywords themselves, instead of ``sampling``.
            priority: -100 to 100. The smallest number runs first, wherever requests wait: at the door, for encoder
                outputs and for a place. One level is worth 1,024 arrivals, so that no request waits for ever. A waiting
                request preempts running ones only if it needs nothing but room (a place, pages or a cross slot) and its
                priority is strictly more urgent than theirs. The request that comes last in the order is preempted; it
                keeps its tokens, and runs again when there is room.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: if the queue is full, wait in the order of `priority` and arrival; ``False``: raise `Overloaded` at
                once. A request with ``wait=False`` never overtakes one that waits.
            adapter: the name of an adapter, see `load_adapter`; ``None``: the model as it is.

        Raises:
            InvalidRequest: an argument is not allowed. `UnsupportedAudio`, `UnsupportedImage` and `RequestTooLarge` are
                kinds of this error.
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: the request could not be served.
        """
        query = read_query(prompt, arguments)
        return await self._reached().call(partial(self.inside.generate, query))

    def stream(
        self, prompt: str | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """Runs one sequence like `generate`, and yields its text token by token:
        ``async with engine.stream(...) as deltas: async for delta in deltas``.

        Leaving the block early aborts the request. After the end ``deltas.timings`` has the time of each stage.
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
        """Computes embeddings of texts with an embedding model.

        Args:
            texts: one text or many; each text is a separate request.
            pooling: ``"mean"``, ``"cls"`` or ``"last"``. The default is that of the checkpoint (in files of
                sentence-transformers), or else the mean for encoders and the last token for decoders.
            normalize: divide each vector by its Euclidean length. The default is that of the checkpoint.
            priority: the smallest number runs first, see `generate`.
            wait: wait if the queue is full; ``False``: raise `Overloaded` at once.

        Returns:
            The embeddings, float32 [texts, width].

        Raises:
            InvalidRequest: the model computes no embeddings, or an argument is not allowed. `RequestTooLarge` is a kind
                of this error.
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: a text could not be served.
        """
        ask = partial(self.inside.embed, texts, pooling, normalize, priority, wait=wait)
        return await self._reached().call(ask)

    async def score(
        self, query: str, documents: str | Sequence[str], *, priority: int = 0, wait: bool = True
    ) -> tuple[float, ...]:
        """Scores how well each document answers ``query``, with a reranker: a sequence classifier with one label that
        reads both texts together. Scores are raw; a larger score is better. Arguments and errors are those of `embed`.
        """
        return await self._reached().call(partial(self.inside.score, query, documents, priority, wait=wait))

    async def classify(
        self, texts: str | Sequence[str], *, priority: int = 0, wait: bool = True
    ) -> tuple[dict[str, float], ...]:
        """Computes the probability of each label for each text with a sequence classifier (softmax of its scores).
        Arguments and errors are those of `embed`."""
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
            audio: a path, bytes, a binary file, or a mono array. A bare array is at the model's rate (16,000 Hz for
                Whisper) or at ``sampling_rate``; an array with its rate is ``(samples, rate)`` or
                ``{"array": ..., "sampling_rate": ...}``. Long audio is read as a stream.
            sampling_rate: the rate of a bare array, in Hz.
            priority: the priority of all windows. The smallest number runs first, see `generate`.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait if the queue is full; ``False``: raise `Overloaded` at once.
            options: ``language``, ``task``, ``initial_prompt``, ``timestamps``, ``temperature`` and the other fields of
                `TranscribeOptions`.

        Raises:
            InvalidRequest: an argument is not allowed, or the audio cannot be read (`UnsupportedAudio`).
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: a window could not be served.
        """
        resolved = self._reached().outward(read_options(options))
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
        """Transcribes like `transcribe`, by segments: ``async with engine.stream_transcription(...) as segments``."""
        resolved = self._reached().outward(read_options(options))
        source = with_rate(audio, sampling_rate)
        stream = partial(self.inside.stream_transcription, source, resolved, priority, request_id, wait=wait)
        return StreamBlock(self._reached().stream(PortalSegments, stream), "stream_transcription")

    async def align(
        self,
        audio: AudioSource,
        text: str,
        language: str | None = None,
        *,
        audio_track: int | str | None = None,
        sampling_rate: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
    ) -> tuple[Word, ...]:
        """Finds the times at which the words of ``text`` are spoken, with a model that aligns texts
        (Qwen3-ForcedAligner, CTC). An engine with such a model is an ``aligner`` of `transcribe`. Arguments that are
        not listed are those of `transcribe`.

        Args:
            audio: as in `transcribe`; as long as the model reads at once.
            text: the text that is spoken in the audio.
            language: as in `transcribe`; ``None``: words are found by blanks and by Chinese characters.

        Returns:
            The words in order, with times in seconds. Their joined texts are ``text``; a blank text has no words. A
            word of which the model knows no letter has probability 0, and shares the time between its neighbours.

        Raises:
            InvalidRequest: the model aligns no texts, an argument is not allowed, or the audio cannot be read.
                `ContextLengthExceeded` and `RequestTooLarge` are kinds of this error.
            Overloaded: ``wait=False`` and the queue is full.
            EngineError: the request could not be served.
        """
        source = with_track(with_rate(audio, sampling_rate), audio_track)
        query = AlignQuery(source, text, language, priority=priority, request_id=request_id, wait=wait)
        return await self._reached().call(partial(self.inside.align, query))

    async def diarize(
        self,
        audio: AudioSource,
        strict: bool = True,
        *,
        mode: str | None = None,
        threshold: float = 0.5,
        min_speech: float = 0.0,
        min_silence: float = 0.0,
        audio_track: int | str | None = None,
        sampling_rate: int | None = None,
        priority: int = 0,
        request_id: str | None = None,
        wait: bool = True,
    ) -> tuple[Turn, ...]:
        """Finds who speaks when, with a model that finds speakers frame by frame (Nemotron 3 Diarization). An engine
        with such a model is a ``diarizer`` of `transcribe`. Arguments that are not listed are those of `transcribe`.

        Args:
            audio: as in `transcribe`; it is read as a stream.
            strict: refuse audio that is damaged or cut short; ``False``: the turns end at the break.
            mode: ``"offline"``, the default, or a way of the checkpoint for audio that is heard as it comes, such as
                ``"low_latency"``.
            threshold: a speaker speaks in frames of this probability or more.
            min_speech: shorter turns are dropped, in seconds.
            min_silence: shorter pauses of a speaker do not end a turn, in seconds.

        Returns:
            The turns, ordered by their starts. Speakers are A, B and so on, by their first turns. Turns may overlap.

        Raises:
            InvalidRequest: the model finds no speakers, an argument is not allowed, or the audio cannot be read.
            Overloaded, EngineError: as in `align`.
        """
        audio, rules = with_rate(audio, sampling_rate), (mode, threshold, min_speech, min_silence, strict)
        source = with_track(audio, audio_track)
        query = DiarizeQuery(source, *rules, priority=priority, request_id=request_id, wait=wait)
        return await self._reached().call(partial(self.inside.diarize, query))

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

        Leaving the block ends the session: running requests are aborted, and text that was not read is lost. To get the
        whole text, iterate to the end after `finish`.

        Args:
            rate: the rate of the chunks in Hz, 8,000 to 768,000. Audio at another rate than the model's is resampled.
            priority: the priority of all requests of the session. The smallest number runs first, see `generate`.
            request_id: a name for the trace and for errors; it need not be unique.
            wait: wait if the queue is full; ``False``: fail with `Overloaded`.
            options: ``step``, ``endpoint_silence`` and the other fields of `LiveOptions`; ``language``, ``task``,
                ``initial_prompt`` and others of `TranscribeOptions`.

        Raises:
            InvalidRequest: an option is not allowed, with this model or with any. `LiveSession` lists the errors of
                `LiveSession.feed` and of iteration.
        """
        resolved = read_live_options({"rate": rate, **options})
        live = partial(self.inside.live, resolved, priority, request_id, wait=wait)
        return StreamBlock(self._reached().stream(PortalLive, live), "live")

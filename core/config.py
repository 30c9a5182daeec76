"""`EngineConfig`: every setting of an engine, with its unit, default and range."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import UnionType

from attrs import field, frozen

from .errors import InvalidRequest
from .events import Event

DTYPES = ("auto", "float32", "float16", "bfloat16")
COUNTS = (  # 1 or more
    "max_running",
    "max_pending",
    "max_step_tokens",
    "page_size",
    "encoder_cache_bytes",
    "encode_batch_embeddings",
)
SIZES = ("threads", "max_positions", "self_kv_bytes", "cross_kv_bytes", "restarts")  # 0 or more
SECONDS = ("encoder_idle_seconds", "drain_seconds", "stage_seconds", "restart_seconds", "idle_sleep")
WHILE_ASLEEP = ("wait", "refuse")
GRAPHS = ("auto", "off", "eager")


@frozen(kw_only=True)
class Speculation:
    """How tokens are guessed ahead (speculative decoding; Leviathan et al. 2023, "Fast inference from transformers via
    speculative decoding"; Saxena 2023, "Prompt lookup decoding").

    Args:
        tokens: most tokens guessed in one step, 1 or more.
        draft: a smaller checkpoint with the same vocabulary that guesses, a folder or a hub id; ``None``: the tokens
            that followed the last ones where they occurred before.
        match: (without ``draft``) most of the last tokens that must occur before, 1 or more; fewer are tried after.

    Raises:
        InvalidRequest: a value out of its range.
    """

    tokens: int = 4
    draft: str | None = None
    match: int = 3

    def __attrs_post_init__(self) -> None:
        for name in ("tokens", "match"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidRequest(f"Speculation({name}={value!r}); allowed: an integer, 1 or more")
        if self.draft is not None and not isinstance(self.draft, str):
            raise InvalidRequest(f"Speculation(draft={self.draft!r}); allowed: a folder or hub id, or None")


@frozen(kw_only=True)
class EngineConfig:
    """Settings of one engine. All sizes are bytes unless the name says otherwise.

    Args:
        device: ``"auto"`` (CUDA where there is one, else the CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        devices: two or more devices of one kind that share a decoder-only model, ``("cuda:0", "cuda:1")``: its layers,
            with their pages, lie on one behind the other. It is for models that are too large for one; ``device`` is
            then left as it is, and ``graphs`` and ``compile`` are not used. ``()``: all on ``device``.
        dtype: ``"auto"`` (float16 on CUDA, float32 on the CPU), ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        threads: CPU threads of torch, a setting of the whole process; 0: one for each physical core that the process
            may use (affinity and the cgroup's quota, rounded down), but no more than torch has been told.
        max_running: most sequences decoded together.
        max_pending: most requests accepted and not yet ended; past it ``submit`` waits, or raises `Overloaded`.
        max_step_tokens: token budget of one step.
        max_positions: most positions of a sequence, prompt and generated tokens together; 0: as many as the model has.
            A smaller number needs fewer pages.
        page_size: positions of one self-attention KV page.
        self_kv_bytes: bytes for self-attention pages; 0: enough for ``max_running`` sequences of 1,024 positions (or of
            full length where that is shorter), within the room that there is, but never less than one of full length.
            The room is counted when the weights are loaded: on the CPU as much as the weights, 512 MiB at least, but no
            more than a quarter of what is free in the machine and the cgroup; on CUDA half of what is free. Pages are
            the fourth part of it where there is cross-attention. `DeviceOutOfMemory` where the least does not fit.
        cross_kv_bytes: bytes for cross-attention KV; 0: enough for ``max_running`` audio windows, within three quarters
            of the room, but never less than one.
        encoder_cache_bytes: bytes for encoder outputs, held and idle together.
        encode_batch_embeddings: most embeddings (encoder output rows) of one encode batch; a single item may exceed it.
        encoder_idle_seconds: an encoder output nobody holds is freed after this time.
        drain_seconds: how long the end of the block waits for running requests before it aborts them.
        stage_seconds: how long each further stage of the teardown may take before it is cut off.
        restarts: how often within ``restart_seconds`` a runner that crashes is started anew; 0: its first crash ends
            the engine.
        restart_seconds: see ``restarts``.
        idle_sleep: after so many seconds without a request the device is given back; the next request takes it again.
        sleep_keeps_weights: asleep, the weights are parked in the host's memory; else they are dropped, and waking
            reads the checkpoint again.
        while_asleep: what becomes of requests after `Engine.sleep`, until `Engine.wake`: ``"wait"`` or ``"refuse"``
            (`EngineAsleep`).
        prefix_caching: keep the KV of full pages after their request has ended, and share it with requests whose prompt
            begins alike (the same tokens, images and audio).
        speculation: guess several tokens ahead and check them in one step; the tokens stay the same. ``None``: off.
        graphs: the steps in which all sequences of a decoder-only model decode are recorded and replayed, which saves
            most of a small step's time on a GPU. ``"auto"``: as CUDA graphs on CUDA, unless the model does what no
            graph can (a warning tells, and the engine goes on without); nothing on the CPU. ``"off"``. ``"eager"``: in
            the shapes and buffers of graphs, but computed each time, on any device: to find faults.
        compile: compile the layers of a decoder-only model with `torch.compile`. It takes a minute or so, when the
            engine is entered, and on the CPU a C++ compiler.
        steps_in_flight: 2 hides the hand-over between loop and device; 1 is easier to follow.
        verify: check the engine's promises on every event (see `triolet.testing.TraceChecker`); a broken one stops the
            engine, and its `InvariantViolation` leaves the block.
        observer: called with every `Event` of the engine, in order, from the engine's loop (on asyncio that is another
            thread); it must not block or raise.

    Raises:
        InvalidRequest: a value out of its range.
    """

    device: str = "auto"
    devices: tuple[str, ...] = ()
    dtype: str = "auto"
    threads: int = 0
    max_running: int = 32
    max_pending: int = 1024
    max_step_tokens: int = 2048
    max_positions: int = 0
    page_size: int = 16
    self_kv_bytes: int = 0
    cross_kv_bytes: int = 0
    encoder_cache_bytes: int = 256 << 20
    encode_batch_embeddings: int = 12_000
    encoder_idle_seconds: float = 30.0
    drain_seconds: float = 30.0
    stage_seconds: float = 10.0
    restarts: int = 3
    restart_seconds: float = 60.0
    idle_sleep: float = math.inf
    sleep_keeps_weights: bool = True
    while_asleep: str = "wait"
    prefix_caching: bool = True
    speculation: Speculation | None = None
    graphs: str = "auto"
    compile: bool = False
    steps_in_flight: int = 2
    verify: bool = False
    observer: Callable[[Event], None] | None = field(default=None, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidRequest(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if not isinstance(self.device, str):
            raise InvalidRequest(f"device={self.device!r}; allowed: 'auto', 'cpu', 'cuda' or 'cuda:N'")
        self._check_devices()
        for name in COUNTS:
            self._check_number(name, 1, int)
        for name in SIZES:
            self._check_number(name, 0, int)
        for name in SECONDS:
            self._check_number(name, 0, int | float)
        if self.while_asleep not in WHILE_ASLEEP:
            raise InvalidRequest(f"while_asleep={self.while_asleep!r}; allowed: {' or '.join(map(repr, WHILE_ASLEEP))}")
        if self.speculation is not None and not isinstance(self.speculation, Speculation):
            raise InvalidRequest(f"speculation={self.speculation!r}; allowed: Speculation(...), or None")
        if self.graphs not in GRAPHS:
            raise InvalidRequest(f"graphs={self.graphs!r}; allowed: {', '.join(map(repr, GRAPHS))}")
        if not isinstance(self.compile, bool):
            raise InvalidRequest(f"compile={self.compile!r}; allowed: True or False")
        if self.steps_in_flight not in (1, 2):
            raise InvalidRequest(f"steps_in_flight={self.steps_in_flight}; allowed: 1 or 2")

    def _check_devices(self) -> None:
        names = self.devices
        if not isinstance(names, tuple) or len(names) == 1 or not all(isinstance(name, str) for name in names):
            raise InvalidRequest(
                f"devices={names!r}; allowed: a tuple of two or more devices, as ('cuda:0', 'cuda:1'), or () for one"
            )
        if names and self.device != "auto":
            raise InvalidRequest(f"device={self.device!r} besides devices={names!r}; allowed: one of the two")
        if names and self.compile:
            raise InvalidRequest(f"compile=True with devices={names!r}; allowed: compile=False on several devices")
        if names and self.graphs == "eager":
            raise InvalidRequest(f"graphs='eager' with devices={names!r}; allowed: 'auto' or 'off' on several devices")

    def _check_number(self, name: str, least: int, kind: type[int] | UnionType) -> None:
        value: float = getattr(self, name)
        if not isinstance(value, kind) or isinstance(value, bool) or not float(value) >= least:
            what = "an integer" if kind is int else "a number"
            raise InvalidRequest(f"{name}={value!r}; allowed: {what}, {least} or more")

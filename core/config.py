"""`EngineConfig`: every setting of an engine, with its unit, default and range."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal

from attrs import frozen

from .checks import Check, Refused, checked, flag, function, integer, nearest_names, number, one_of, settle
from .events import Event
from .model import Kind

DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("int8", "int4")
_MUCH = 2**31 - 1
_BYTES = 2**50
ELSEWHERE = {
    "assistant_model": "draft_head",
    "block_size": "page_size",
    "compute_type": "dtype",
    "cpu_threads": "threads",
    "device_map": "device",
    "enable_prefix_caching": "prefix_caching",
    "enforce_eager": "graphs",
    "gpu_memory_utilization": "self_kv_bytes",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "self_kv_bytes",
    "max_lora_rank": "adapter_rank",
    "max_loras": "adapters",
    "max_model_len": "max_positions",
    "max_num_batched_tokens": "max_step_tokens",
    "max_num_seqs": "max_running",
    "num_workers": "max_running",
    "speculative_config": "speculation",
    "torch_dtype": "dtype",
}
"""Names of settings in other programs, each with the setting that does the same here."""


@nearest_names({"num_speculative_tokens": "tokens", "prompt_lookup_max": "match"})
@frozen(kw_only=True)
class Speculation:
    """The settings of speculative decoding (Leviathan et al. 2023, "Fast inference from transformers via speculative
    decoding"). The text itself proposes the tokens that followed an earlier occurrence of its last tokens (Saxena 2023,
    "Prompt lookup decoding"). If the checkpoint has a draft head (Qwen3.5) that the native library computes, or
    ``EngineConfig.draft_head`` names one, the head proposes them.

    Args:
        tokens: the largest number of draft tokens of a sequence in one step, 1 to 64.
        match: the largest number of last tokens to look up in the text, 1 to 32. If they do not occur, fewer are tried.
            A draft head has no use for it.
        most_running: no draft tokens are proposed while more sequences than this run. The rows of draft tokens cost
            almost nothing beside one sequence, but as much as other tokens beside many.

    Raises:
        InvalidRequest: a value out of its range.
    """

    tokens: int = checked(4, integer(1, 64))
    match: int = checked(3, integer(1, 32))
    most_running: int = checked(_MUCH, integer(1, _MUCH))

    def __attrs_post_init__(self) -> None:
        settle(self, named="Speculation.{}")


_ALONE = Speculation(most_running=1)  # docs/performance.md: it pays for one sequence, perhaps not for several

_DEVICE = re.compile(r"auto|cpu(:0)?|cuda(:\d+)?")


def _device(value: Any) -> str:
    if isinstance(value, list | tuple) or (isinstance(value, str) and "," in value):
        raise Refused("an engine runs on one device: open an engine for each, or replicas in a cluster")
    if not isinstance(value, str):
        raise Refused
    if _DEVICE.fullmatch(value):
        return value
    near = re.sub("gpu|nvidia", "cuda", value.strip().lower())
    near = re.sub(r"(?<=cuda)[ .]?(?=\d)", ":", near)
    if _DEVICE.fullmatch(near):
        raise Refused(f"did you mean {near!r}?")
    raise Refused


def _template(value: Any) -> str:
    if not isinstance(value, str) or not ("{{" in value or "{%" in value):
        raise Refused
    return value


def _checkpoint(value: Any) -> str:
    as_text = getattr(type(value), "__fspath__", None)
    path = value if as_text is None else as_text(value)
    if not isinstance(path, str) or not path.strip():
        raise Refused
    return path


_CHECKPOINT = Check(_checkpoint, "a folder with a checkpoint, or a hub id, as a text or a Path")


def _speculation(value: Any) -> Any:
    if not isinstance(value, Speculation) and not (isinstance(value, str) and value == "auto"):
        raise Refused
    return value


@nearest_names(ELSEWHERE)
@frozen(kw_only=True)
class EngineConfig:
    """The settings of one engine. All sizes are in bytes unless the name says otherwise.

    Args:
        device: ``"auto"`` (CUDA if there is such a device, else the CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        dtype: ``"auto"`` (float16 on CUDA, float32 on the CPU), ``"float32"``, ``"float16"`` or ``"bfloat16"``.
            In bfloat16 on the CPU the native library multiplies in bfloat16, and computes all else in float32. This is
            faster if the CPU has instructions for it (AVX512_BF16).
        kv_dtype: the type of stored keys and values, including those of cross-attention. ``"auto"``: the same as
            ``dtype``, and ``"float16"`` for a quantized Whisper on the CPU. ``"float16"`` or ``"bfloat16"``: half of
            the bytes of float32, so twice the tokens in the same room. These are for models that the native library
            computes on the CPU. The library still computes in float32, and rounds the values that it
            stores. If torch computes the model, only ``dtype`` is allowed.
        threads: the number of CPU threads of torch, a setting of the whole process: that of the engine that opened
            last holds, and the program's own when all engines have ended. 0: one for each physical core that
            the process may use (affinity and the cgroup's quota, rounded down), but no more than torch's present
            setting.
        switch_interval: how long a Python thread that computes may keep other threads waiting, a setting of the whole
            process (`sys.setswitchinterval`). ``"short"``: 0.1 ms while the device works for an engine, and the
            program's own value otherwise. So the engine goes on beside such a thread, which then computes more slowly.
            ``"kept"``: the interval is never changed.
        max_running: the largest number of sequences decoded together.
        max_pending: the largest number of requests that are accepted and have not ended. Beyond it ``submit`` waits, or
            raises `Overloaded`.
        max_step_tokens: the token budget of one step.
        max_positions: the largest number of positions of a sequence, prompt and generated tokens together; 0: as many
            as the model has, which are also the most that are allowed; but on the CPU no more than fit the room for KV,
            if ``self_kv_bytes`` is 0, and 2,048 at least. A smaller number needs fewer pages.
        page_size: the number of positions of one self-attention KV page.
        self_kv_bytes: bytes for self-attention pages. 0: enough for ``max_running`` sequences of 1,024 positions (or of
            full length, if that is shorter), within the room for KV, but never less than one sequence of full length.
            The room for KV is measured when the weights are loaded. On the CPU it is as large as the weights, at least
            512 MiB, but no more than a quarter of the free memory of the machine and the cgroup. On CUDA it is half of
            the free memory. With cross-attention, pages get a quarter of the room. If the smallest size does not fit,
            `DeviceOutOfMemory` is raised.
        cross_kv_bytes: bytes for cross-attention KV; 0: enough for ``max_running`` audio windows, within three quarters
            of the room, but never less than one window.
        state_bytes: bytes for the states of recurrent layers: those of sequences, and those that are kept for prompts
            with the same beginning. 0: enough for three states for each of ``max_running``, within half of the room for
            KV, but never less than four.
        encoder_cache_bytes: bytes for encoder outputs, held and idle together.
        encode_batch_embeddings: the largest number of embeddings (encoder output rows) of one encode batch; a single
            item may exceed it. 0: on the CPU one item a batch, since a larger batch is not faster there and all its
            requests wait for it; on other devices 12,000.
        encoder_idle_seconds: an encoder output that no request holds is freed after this time; ``math.inf``: only if
            room is needed.
        drain_seconds: how long the end of the block waits for running requests before it aborts them; 0: it does not
            wait; ``math.inf``: until they have ended.
        stage_seconds: how long each further stage of the teardown may take before it is cut off; more than 0, up to a
            day, so that the teardown always ends.
        restarts: how often within ``restart_seconds`` the runner may restart after a free that raised. Such a free
            leaves the device's state unknown. 0: the first such free ends the engine.
        restart_seconds: see ``restarts``; more than 0; ``math.inf``: the engine's whole life.
        idle_sleep: the engine gives the device back after so many seconds without a request, and takes it again for the
            next request. ``math.inf``: never.
        sleep_keeps_weights: True: a sleeping engine parks the weights in the host's memory. False: it drops the
            weights, and reads the checkpoint again when it wakes.
        while_asleep: what happens to requests between `Engine.sleep` and `Engine.wake`: ``"wait"``, or ``"refuse"``
            (`EngineAsleep`).
        prefix_caching: keep the KV of full pages after their request has ended, and share it with requests whose prompt
            begins with the same tokens, images and audio.
        chat_template: the text of a Jinja template that turns conversations into prompts, in place of the template of
            the checkpoint. The format of tool calls is then found in this text. ``None``: the checkpoint's own.
        speculation: propose several draft tokens and check them in one step. The generated tokens stay the same; if
            torch computes the model, except for ties that rounding decides, as in batches of other sizes. ``"auto"``:
            decoders on the CPU propose from the text itself, or by their draft head, while one sequence runs alone. A
            sequence whose draft tokens are wrong goes without them for up to 15 tokens. ``None``: off.
        draft_head: the folder or hub id of a small model that proposes the draft tokens: an assistant of Gemma 4, which
            reads the model's own keys and values. It must be made for the model, which the native library must compute.
            ``None``: the checkpoint's own draft head, or the text itself.
        quantization: ``"int8"``: the matrices of the model, token embedding and head included, are held in int8, with a
            scale for each output. They need a quarter of their bytes in float32. Only on the CPU. Tokens may differ
            from those of the unchanged checkpoint. ``dtype`` is the type of the computation. ``"auto"`` is then float32
            with the native library; without it, bfloat16 if the CPU has instructions for that. ``None``: the weights
            stay as they are in the checkpoint. Those that are quantized there stay so in each case. ``"int4"``: the
            linear layers have 4 bits in groups of 32, with a scale and a least value for each group; the values of
            attention, the token embedding and the head are in int8. Only what the native library computes, and no CTC
            models, transducers and diarizers. Vectors change more than they should: the engine warns.
        adapters: the largest number of LoRA adapters that running requests may have together. Room for so many is
            allocated when the engine opens. More may be loaded (`Engine.load_adapter`): a request with another one
            waits until no running request has one of these. Only for decoders that the native library computes on the
            CPU.
        adapter_rank: the largest rank of an adapter. A larger number takes more memory and time for each adapter.
        graphs: record and replay the steps in which all sequences of a decoder-only model decode. This saves most of a
            small step's time on a GPU. ``"auto"``: CUDA graphs on CUDA, unless a graph cannot record the model's
            operations (then the engine warns and goes on without graphs); no graphs on the CPU. ``"off"``: no graphs.
            ``"eager"``: the shapes and buffers of graphs, but each step is computed without replay, on any device, in
            order to find faults.
        steps_in_flight: the number of steps that are sent to the device before their results are known. 2 hides the
            time of the hand-over between loop and device; 1 is easier to follow.
        verify: check the engine's promises on every event (see `triolet_testing.TraceChecker`). A broken promise stops
            the engine, and the block raises `InvariantViolation`.
        observer: a function that is called with every `Event` of the engine, in order, from the engine's loop (with
            asyncio the loop runs in another thread). The observer must not block or raise.

    Raises:
        InvalidRequest: a value out of its range.
    """

    device: str = checked(
        "auto", Check(_device, "'auto', 'cpu', 'cuda' or 'cuda:N'; triolet devices lists what is there")
    )
    dtype: str = checked("auto", one_of(*DTYPES))
    kv_dtype: str = checked("auto", one_of(*DTYPES))
    threads: int = checked(0, integer(0, 1024, "; 0: one for each usable core"))
    switch_interval: str = checked("short", one_of("short", "kept"))
    max_running: int = checked(32, integer(1, 65_536))
    max_pending: int = checked(1024, integer(1, _MUCH))
    max_step_tokens: int = checked(2048, integer(1, 2**24))
    max_positions: int = checked(0, integer(0, _MUCH, "; 0: as many as the model has"))
    page_size: int = checked(16, integer(1, 65_536))
    self_kv_bytes: int = checked(0, integer(0, _BYTES, "; 0: chosen"))
    cross_kv_bytes: int = checked(0, integer(0, _BYTES, "; 0: chosen"))
    state_bytes: int = checked(0, integer(0, _BYTES, "; 0: chosen"))
    encoder_cache_bytes: int = checked(256 << 20, integer(1, _BYTES))
    encode_batch_embeddings: int = checked(0, integer(0, _MUCH))
    encoder_idle_seconds: float = checked(30.0, number(0, math.inf, "; math.inf: never"))
    drain_seconds: float = checked(30.0, number(0, math.inf, "; 0: abort at once; math.inf: wait for all of them"))
    stage_seconds: float = checked(10.0, number(0, 86_400, above=True))
    restarts: int = checked(3, integer(0, _MUCH, "; 0: never"))
    restart_seconds: float = checked(60.0, number(0, math.inf, "; restarts=0: never", above=True))
    idle_sleep: float = checked(math.inf, number(0, math.inf, "; math.inf: never"))
    sleep_keeps_weights: bool = checked(True, flag())
    while_asleep: str = checked("wait", one_of("wait", "refuse"))
    prefix_caching: bool = checked(True, flag())
    chat_template: str | None = checked(
        None,
        Check(_template, "the text of a Jinja template; of a file: Path(...).read_text()").or_none("the model's own"),
        repr=False,
    )
    speculation: Speculation | Literal["auto"] | None = checked(  # noqa: RUF009  (a field)
        "auto", Check(_speculation, "'auto' or Speculation(...)").or_none("off")
    )
    draft_head: str | None = checked(None, _CHECKPOINT.or_none("the model's own"))
    quantization: str | None = checked(None, one_of(*QUANTIZATIONS).or_none("weights as they are"))
    adapters: int = checked(0, integer(0, 1024, "; 0: none"))
    adapter_rank: int = checked(16, integer(1, 1024))
    graphs: str = checked("auto", one_of("auto", "off", "eager"))
    steps_in_flight: int = checked(2, integer(1, 2))
    verify: bool = checked(False, flag())
    observer: Callable[[Event], None] | None = checked(  # noqa: RUF009  (a field)
        None, function("a function of one event, not async").or_none("none"), repr=False, eq=False
    )

    def __attrs_post_init__(self) -> None:
        settle(self)

    def encode_budget(self, device: str) -> int:
        """Returns the largest number of embeddings of one encode batch on ``device``, as the executor names it:
        ``"cpu"``, ``"cuda:0"``."""
        return self.encode_batch_embeddings or (1 if device.startswith("cpu") else 12_000)

    def speculation_for(self, kind: Kind, device: str) -> Speculation | None:
        """Returns the speculation for a model of ``kind`` on ``device``, as the executor names it; ``None``: no
        speculation."""
        if self.speculation != "auto":
            return self.speculation
        plain = self.graphs != "eager"  # those are made for one token a sequence
        return _ALONE if kind is Kind.DECODER and device.startswith("cpu") and plain else None
